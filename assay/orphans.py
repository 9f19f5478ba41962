"""Worker processes that end when the process that started them ends for any reason.

A worker imports torch for seconds before its first line of work, so this module imports nothing large
and is what a new process runs first.
"""

import ctypes
import os
import pickle
import signal
import sys
import threading
import time
from typing import Any

_PR_SET_PDEATHSIG = 1
_SECONDS_TO_SAVE = 3.0


def run_in_worker(parent: int, work: bytes, *arguments: Any) -> None:
    """The first function of a worker: `work` is a pickled pair of a function and its further arguments."""
    end_with(parent)
    function, more = pickle.loads(work)  # imports all that the function needs
    function(*arguments, *more)


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
