"""Processes that are killed: how they start, who their children are, and whether these are gone."""

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from assay.cli import app
from assay.processes import Workers


def start_command(words: Sequence[object], dies_at_write: int | None = None) -> int:
    """Run a command of `assay` in a child that has everything imported; its process number."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        if dies_at_write is not None:
            _die_at_write(dies_at_write)
        app([str(word) for word in words])
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        os._exit(code)


def _die_at_write(number: int) -> None:
    """Kill this process at the `number`-th time that it flushes or renames a file."""
    left = number

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments)

        return call

    os.fsync, os.replace = counted(os.fsync), counted(os.replace)


def fork_worker(
    self: Workers, function: Callable[..., None], *arguments: object, environment: Any
) -> Connection:
    """`Workers.start` without the seconds in which a new process imports torch: a copy of this one."""
    ours, theirs = Pipe()
    if not (child := os.fork()):
        code = 1
        try:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # end with the parent
            ours.close()
            function(theirs, *arguments)
            code = 0
        finally:
            os._exit(code)
    theirs.close()
    self.processes[ours] = _Forked(child)  # type: ignore[assignment]
    return ours


class _Forked:
    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self, patience: None = None) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def children(pid: int, command: str = "") -> list[int]:
    """The processes that `pid` has started and that live, those with `command` in their command line."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rsplit(")", 1)[1].split()[:2]
            line = stat.with_name("cmdline").read_bytes().decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
        if int(parent) == pid and state != "Z" and command in line:
            found.append(int(stat.parent.name))
    return found


def workers_of(pid: int) -> list[int]:
    """The workers of a study that process `pid` runs."""
    return children(pid, "processes.py")


def seconds_until_gone(pids: Iterable[int], patience: float = 30.0) -> float:
    """Wait until none of the processes lives, and tell how long that took."""
    started, left = time.monotonic(), set(pids)
    while left and time.monotonic() - started < patience:
        left = {pid for pid in left if _lives(pid)}
        time.sleep(0.01)
    assert not left, f"{left} live on after {patience} s"
    return time.monotonic() - started


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
