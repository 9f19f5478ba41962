"""Files that are whole or absent, and what readers of all kinds of files share.

Everything Assay writes goes to a hidden temporary name in the target's own directory, is flushed to
the disk and then renamed. A process killed at any moment leaves the old file, the new file, or none:
never half of one.
"""

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from typing import Any

_MARK = ".partial-"
_CLAIM = ".claim"  # locked while its directory is being written; the lock ends with the process


@contextmanager
def write_whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write a file to; on success it becomes `path`, on error it vanishes.

    An existing file is replaced. Missing parent directories are made.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}{_MARK}{secrets.token_hex(4)}{path.suffix}")
    try:
        yield partial
        _flush(partial)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _flush(path.parent)


@contextmanager
def write_whole_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary directory to fill; on success it becomes `path`, on error it vanishes.

    Refuses to replace an existing directory, or one that another process is writing. Leftovers of killed
    writers of the same `path` are removed.
    """
    path = Path(path)
    if path.exists():
        raise FileExistsError(f"{path} exists already; remove it or choose another name")
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in path.parent.glob(f".{path.name}{_MARK}*/"):
        with open(leftover / _CLAIM, "a") as claim:
            try:
                flock(claim, LOCK_EX | LOCK_NB)
            except BlockingIOError:
                raise FileExistsError(
                    f"another process is writing {path}; wait for it or choose another name"
                ) from None
            shutil.rmtree(leftover, ignore_errors=True)
    partial = path.with_name(f".{path.name}{_MARK}{secrets.token_hex(4)}")
    partial.mkdir()
    try:
        with open(partial / _CLAIM, "a") as claim:
            flock(claim, LOCK_EX)
            yield partial
            for file in partial.rglob("*"):
                _flush(file)
            os.replace(partial, path)
            (path / _CLAIM).unlink()  # not earlier: a folder without its claim is a leftover
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _flush(path.parent)


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def differences(there: Any, here: Any, key: str = "") -> list[str]:
    """Where what a file says differs from what is asked now, as `train.lr: 0.001 there, 0.0001 here`."""
    if isinstance(there, dict) and isinstance(here, dict):
        names = {name: f"{key}.{name}" if key else name for name in {**there, **here}}
        return [
            line for name, full in names.items() for line in differences(there.get(name), here.get(name), full)
        ]
    return [] if there == here else [f"{key}: {there} there, {here} here"]


def is_number(text: str) -> bool:
    """Whether a cell of a CSV file is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
