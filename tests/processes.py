"""Processes that are killed: who their children are, and whether these are gone."""

import time
from collections.abc import Iterable
from pathlib import Path


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
