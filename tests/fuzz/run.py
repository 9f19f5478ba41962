"""Reads mutants of a format in a child process, and tells those that end in a way that is not allowed.

Allowed: the right contents, or one sentence that names the file and says what to do. Not allowed: any other
exception, a crash, more than 10 seconds of CPU time or 1 GB of memory, other contents where the format has a
checksum.

    python -m tests.fuzz.run                     10,000 mutants of every format
    python -m tests.fuzz.run -n 500 cifar zip    500 mutants of two formats
    python -m tests.fuzz.run --only 17 zip       one mutant, with its traceback
"""

import argparse
import copy
import json
import os
import random
import re
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from assay.errors import AssayError
from tests.fuzz.formats import FORMATS, Format
from tests.fuzz.mutate import mutate

SECONDS = 10
BYTES = 2**30
_PATIENCE = 120.0  # wall-clock seconds for a mutant: only one that sleeps or waits takes that long


@dataclass(frozen=True)
class Fault:
    """A mutant that ended otherwise than allowed."""

    format: str
    number: int
    what: str


def check(format: Format, num_mutants: int, first: int = 0) -> tuple[Counter[str], list[Fault]]:
    """How many mutants ended in which way, and the faults among them."""
    ends: Counter[str] = Counter()
    faults: list[Fault] = []
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        number, last = first, first + num_mutants
        while number < last:
            for end in _read_in_child(format, Path(folder), number, last):
                kind, _, what = end.partition(": ")
                ends[kind] += 1
                if kind == "fault":
                    faults.append(Fault(format.name, number, what))
                number += 1
    return ends, faults


def _read_in_child(format: Format, folder: Path, first: int, last: int) -> Iterator[str]:
    """The ends of mutants first .. last - 1, up to the first that takes the process with it."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        try:
            _read_all(format, folder, first, last, theirs)
        except BaseException:  # the format's own functions are wrong
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        number = first
        while number < last:
            if not select.select([pipe], [], [], _PATIENCE)[0]:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                yield f"fault: it waits for more than {_PATIENCE:.0f} s"
                return
            line = pipe.readline()
            if not line:
                status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                slow = status == -signal.SIGPROF
                yield f"fault: more than {SECONDS} s" if slow else f"fault: the process ended with {status}"
                return
            yield json.loads(line)
            number += 1
    os.waitpid(child, 0)


def _read_all(format: Format, folder: Path, first: int, last: int, pipe: int) -> None:
    torch.set_num_threads(1)
    path = format.make(folder)
    valid = path.read_bytes()
    expected = copy.deepcopy(format.read(path))  # what is memory-mapped changes with the file
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 2)  # what decoders in C have to say
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + BYTES, in_use + BYTES))
    for number in range(first, last):
        path.write_bytes(mutant(format, number, valid))
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # of CPU time; ends the process
        end = _read_one(format, path, expected)
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(pipe, json.dumps(end).encode() + b"\n")


def mutant(format: Format, number: int, valid: bytes) -> bytes:
    """The bytes of mutant `number`."""
    return mutate(valid, random.Random(f"{format.name} {number}"))


def _read_one(format: Format, path: Path, expected: Any) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = format.read(path)
            if same(found, expected):
                return "the right contents"
    except Exception as error:
        return _judge(error, format.named(path))
    return "fault: other contents are accepted" if format.has_checksum else "other contents"


def _judge(error: BaseException, named: str) -> str:
    message, cause = str(error), error
    while cause.__cause__ is not None or cause.__context__ is not None:
        cause = cause.__cause__ or cause.__context__  # type: ignore[assignment]
        if isinstance(cause, MemoryError) or re.search("allocate memory|unable to allocate", str(cause), re.I):
            return f"fault: more than {BYTES >> 20} MB: {message}"
    if not isinstance(error, AssayError | OSError):
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"fault: {type(error).__name__}: {message[:200]} ({where.filename}:{where.lineno})"
    if named not in message:
        return f"fault: no file is named: {message[:200]}"
    if "\n" in message or any(not char.isprintable() for char in message):
        return f"fault: not one line of text: {message[:200]!r}"
    if isinstance(error, AssayError) and not error.cure:
        return f"fault: nothing to do is said: {message[:300]}"
    return "a sentence"


def same(found: Any, expected: Any) -> bool:
    """Whether two results of a reader are equal, NaNs included."""
    match found, expected:
        case torch.Tensor(), torch.Tensor():
            return same(found.detach().numpy(), expected.detach().numpy())
        case np.ndarray(), np.ndarray():
            alike = found.dtype == expected.dtype and found.shape == expected.shape
            return alike and found.tobytes() == expected.tobytes()
        case dict(), dict():
            return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in found)
        case (list(), list()) | (tuple(), tuple()):
            return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(found, np.ndarray | torch.Tensor) or isinstance(expected, np.ndarray | torch.Tensor):
        return False
    return bool(found == expected) or (found != found and expected != expected)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("formats", nargs="*", help="beginnings of names; default: all")
    parser.add_argument("-n", type=int, default=10_000, help="mutants of each format")
    parser.add_argument("--only", type=int, help="read this mutant here, with its traceback")
    options = parser.parse_args()
    chosen = [f for f in FORMATS if not options.formats or f.name.startswith(tuple(options.formats))]
    if options.only is not None:
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            path = chosen[0].make(Path(folder))
            path.write_bytes(mutant(chosen[0], options.only, path.read_bytes()))
            print(path.read_bytes()[:300], chosen[0].read(path))
        return
    num_faults = 0
    for format in chosen:
        started = time.monotonic()
        ends, faults = check(format, options.n)
        num_faults += len(faults)
        told = ", ".join(f"{count} {end}" for end, count in ends.most_common() if end != "fault")
        print(
            f"{format.name:24} {len(faults):5} faults; {told} ({time.monotonic() - started:.0f} s)", flush=True
        )
        for what, count in Counter(fault.what for fault in faults).most_common(8):
            example = next(fault.number for fault in faults if fault.what == what)
            print(f"    {count} x, e.g. {example}: {what}", flush=True)
    sys.exit(1 if num_faults else 0)


if __name__ == "__main__":
    main()
