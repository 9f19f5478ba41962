"""Worker processes that end when the process that started them ends for any reason.

A worker imports torch for seconds before its first line of work. So this file imports nothing large and is
what a new process runs first: not the program that started it, as `multiprocessing` would.
"""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from threading import current_thread, main_thread
from typing import Any

_PR_SET_PDEATHSIG = 1


@contextmanager
def stop_on_signal() -> Iterator[list[int]]:
    """Yield a list that SIGINT, SIGTERM and SIGHUP append to, so that a loop can stop; a second SIGINT kills.

    Only the main thread can listen. With nohup, a closed terminal stops nothing.
    """
    received: list[int] = []
    numbers = [signal.SIGINT, signal.SIGTERM] if current_thread() is main_thread() else []
    if numbers and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)

    def note(number: int, frame: object) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)

    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class Ended:
    """The last that is heard of a worker: its process has ended, by itself or killed."""

    exit_code: int


class Workers:
    """Processes at work for this one, and what they say. Leaving the block ends them.

    They see the end of their connection, and have `patience` seconds to save before they are killed (None: as
    long as they need).
    """

    def __init__(self, patience: float | None = None) -> None:
        self.patience = patience
        self.processes: dict[Connection, subprocess.Popen[bytes]] = {}

    def start(
        self, function: Callable[..., None], *arguments: object, environment: Mapping[str, str] | None = None
    ) -> Connection:
        """Run `function(connection, *arguments)` in a new process; returns our end of the connection.

        `environment` adds variables to those that it inherits.
        """
        ours, theirs = Pipe()
        with theirs:
            command = [sys.executable, "-P", __file__, str(os.getpid()), str(theirs.fileno())]
            variables = {**os.environ, **(environment or {})}
            files = [theirs.fileno()]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=files, env=variables)
        self.processes[ours] = process
        with suppress(OSError):  # it has died already: `heard` will tell
            ours.send(sys.path)
            ours.send((function, arguments))
        return ours

    def heard(self, seconds: float = 0.2) -> Iterator[tuple[Connection, Any]]:
        """What workers said, waiting for at most `seconds`; an `Ended` is the last of each."""
        for connection in wait(list(self.processes), timeout=seconds):
            assert isinstance(connection, Connection)
            try:
                message = connection.recv()
            except (EOFError, OSError):
                message = Ended(self.processes.pop(connection).wait())
                connection.close()
            yield connection, message

    def tell_all(self, message: object) -> None:
        """Send a message to every worker that lives."""
        for connection in self.processes:
            with suppress(OSError):
                connection.send(message)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *error: object) -> None:
        for connection in self.processes:
            connection.close()
        for process in self.processes.values():
            try:
                process.wait(self.patience)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _run() -> None:
    """The life of a worker: its arguments are the parent's process number and the connection's descriptor."""
    parent, descriptor = map(int, sys.argv[1:])
    if sys.platform == "linux":  # end with the parent, even if stopped; elsewhere the connection ends
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # gone before the kernel was told
        os._exit(1)
    for number in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C reaches everyone; the parent decides
        signal.signal(number, signal.SIG_IGN)
    with suppress(EOFError), Connection(descriptor) as connection:
        sys.path[:] = connection.recv()
        function, arguments = connection.recv()  # imports all that the function needs
        function(connection, *arguments)


if __name__ == "__main__":
    _run()
