"""Worker processes that end when the process that started them ends for any reason.

A worker imports torch for seconds before its first line of work. So this file imports nothing large and is
what a new process runs first: not the program that started it, as `multiprocessing` would.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe

_PR_SET_PDEATHSIG = 1
_SECONDS_TO_SAVE = 3.0


def start_worker(
    function: Callable[..., None], *arguments: object, environment: Mapping[str, str] | None = None
) -> "tuple[subprocess.Popen[bytes], Connection]":
    """Run `function(connection, *arguments)` in a new process: the process, and our end of the connection.

    `environment` adds variables to those that it inherits.
    """
    ours, theirs = Pipe()
    with theirs:
        command = [sys.executable, "-P", __file__, str(os.getpid()), str(theirs.fileno())]
        variables = {**os.environ, **(environment or {})}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=variables)
    with suppress(OSError):  # it has died already, as whoever listens to the connection will notice
        ours.send(sys.path)
        ours.send((function, arguments))
    return process, ours


def _run() -> None:
    """The life of a worker: its arguments are the parent's process number and the connection's descriptor."""
    parent, descriptor = map(int, sys.argv[1:])
    end_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C reaches everyone; the parent decides
        signal.signal(number, signal.SIG_IGN)
    with suppress(EOFError), Connection(descriptor) as connection:
        sys.path[:] = connection.recv()
        function, arguments = connection.recv()  # imports all that the function needs
        function(connection, *arguments)


def end_with(parent: int) -> None:
    """End this process soon after its parent ends.

    On Linux the kernel kills it at once, even if it is stopped; elsewhere a thread notices, and leaves it
    some seconds to save.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # gone before the kernel was told
        os._exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    time.sleep(_SECONDS_TO_SAVE)
    os._exit(1)


if __name__ == "__main__":
    _run()
