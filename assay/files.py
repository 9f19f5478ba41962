"""Files that are whole or absent, locks, and errors that name the file they are about.

Everything Assay writes goes to a folder `.assay-partial` beside the target, is flushed and then renamed. What a
killed process leaves there is removed by the next writer of the same target, or by `remove_leftovers`; a lock,
which ends with the process, tells leftovers from work in progress. Nothing else is ever removed.
"""

import errno
import fcntl
import hashlib
import json
import math
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

from filelock import FileLock, Timeout
from pydantic import AfterValidator, ValidationError

from assay.errors import AssayError, warn

_PARTIAL = ".assay-partial"
_LOCK = ".lock"
_SECONDS_UNTIL_WARNED = 5.0


@contextmanager
def write_whole(path: Path, flush: bool = True) -> Iterator[Path]:
    """Yield a temporary path to write a file to; on success it replaces `path`, on error it vanishes.

    `flush=False` does not wait for the disk (often 10 ms): a power cut can then leave the file empty.
    """
    partial = _partial(Path(path))
    while (lock := _lock(partial)) is None:  # another process is writing the same target: the last to end wins
        partial = partial.with_name(f"{secrets.token_hex(4)}-{Path(path).name}")
    with _replacing(Path(path), partial, lock, flush):
        partial.touch()
        yield partial


def write_text(path: Path, text: str) -> None:
    """Write a text file; it is whole or absent."""
    with write_whole(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def write_whole_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary directory to fill; on success it becomes `path`, which must not exist before."""
    path = Path(path)
    check_absent(path)
    if (lock := _lock(partial := _partial(path), seconds=1.0)) is None:  # not only looked at for leftovers
        raise AssayError("is being written by another process", path=path, cure="wait, or choose another name")
    with _replacing(path, partial, lock):
        check_absent(path)  # it may have appeared while the lock was waited for
        partial.mkdir()
        yield partial


@contextmanager
def _replacing(path: Path, partial: Path, lock: FileLock, flush: bool = True) -> Iterator[None]:
    """Remove what a killed writer left at `partial`; at the end that becomes `path`, or vanishes."""
    try:
        with explain_full_disk(path):
            remove(partial)
            yield
            for file in (partial, *partial.rglob("*")) if flush else ():
                _flush(file)
            os.replace(partial, path)
    except BaseException:
        remove(partial)
        raise
    finally:
        _unlock(lock)
    if flush:
        _flush(path.parent)


def check_absent(path: Path) -> None:
    """Raise an error if `path` exists; what a writer that was killed at the very end left is removed."""
    if path.exists() or path.is_symlink():
        _remove_leftover(_partial(path))
        raise AssayError("exists already", path=path, cure="remove it, or choose another name")


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes left beside its lock below a folder; what is still written stays."""
    for place, _, names in [*os.walk(folder)]:  # not rglob, which fails if another process removes a folder
        for lock in (name for name in names if name.endswith(_LOCK) and Path(place).name == _PARTIAL):
            _remove_leftover(Path(place, lock.removesuffix(_LOCK)))


def _remove_leftover(partial: Path) -> None:
    if partial.parent.exists() and (lock := _lock(partial)) is not None:
        remove(partial)
        _unlock(lock)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _partial(path: Path) -> Path:
    return path.parent / _PARTIAL / path.name


def _lock(partial: Path, seconds: float = 0.02) -> FileLock | None:
    """Lock a temporary file or directory by a file beside it; None if another writer holds it.

    The lock ends with this process: forked children do not inherit it.
    """
    lock, tries = FileLock(f"{partial}{_LOCK}"), 100
    while True:
        try:
            partial.parent.mkdir(parents=True, exist_ok=True)
            with suppress(Timeout):  # tried again, if its last holder just removed the file
                lock.acquire(timeout=seconds, poll_interval=0.01)
            return lock if lock.is_locked else None
        except (FileNotFoundError, FileExistsError):  # another writer removes the folder as soon as it is empty
            if not (tries := tries - 1):
                raise


def _unlock(lock: FileLock) -> None:
    """Remove the file of a lock, and its folder if that is empty."""
    path = Path(lock.lock_file)
    path.unlink(missing_ok=True)
    lock.release()
    with suppress(OSError):
        path.parent.rmdir()


class Busy(AssayError):
    """Another process holds a lock."""


@contextmanager
def hold_lock(path: Path, busy: str = "") -> Iterator[None]:
    """Hold the lock called `path` until the block or the process ends. No file of that name is touched.

    If another process holds it, waits, or if there is a sentence `busy` raises `Busy` with it, in which
    `{holder}` is that process. A long wait is announced by a warning.
    """
    file, announce_at = Path(f"{_partial(path)}{_LOCK}"), time.monotonic() + _SECONDS_UNTIL_WARNED
    while (lock := _lock(_partial(path))) is None:
        if busy:
            raise Busy(busy.format(holder=_holder(file)))
        if time.monotonic() > announce_at:
            announce_at = math.inf
            warn(f"waiting for {_holder(file)}, which holds {file}")
        time.sleep(0.05)
    try:
        with explain_full_disk(path):
            file.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
        yield
    finally:
        _unlock(lock)


def is_held(path: Path) -> bool:
    """Whether a process holds the lock called `path`; one that is dead does not. Writes nothing."""
    try:
        with open(f"{_partial(path)}{_LOCK}", "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:  # or it belongs to another user
        return not isinstance(error, FileNotFoundError)
    return False


def _holder(path: Path) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="utf-8") or "another process"
    return "another process"


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def explain_full_disk(path: Path) -> Iterator[None]:
    """Turn the bare "No space left on device" into a sentence that names `path`."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, None):  # None: numpy and safetensors
            raise
        what = f"{path} could not be written: the disk is full ({error.strerror or error})"
        raise OSError(f"{what}; free some space or choose another disk, then run the command again") from error


@contextmanager
def decoding(path: Path | str, cure: str = "get it again") -> Iterator[None]:
    """Turn any failure of a decoder into an error that names the file and says what to do.

    An `AssayError` keeps its words, and is given path and cure if it has none; what the system says of a file
    that is not there passes unchanged.
    """
    try:
        yield
    except AssayError as error:
        error.path, error.cure = error.path or str(path), error.cure or cure
        raise
    except Exception as error:
        if isinstance(error, OSError) and str(error.filename) == str(path):
            raise
        raise AssayError(f"cannot be read ({reason(error)})", path=path, cure=cure) from error


def reason(error: Exception) -> str:
    """What an exception says, on one line of printable characters and of bounded length."""
    if isinstance(error, ValidationError):
        faults = [f"{'.'.join(map(str, part['loc']))}: {part['msg']}" for part in error.errors()]
        text = "; ".join(faults).replace("Value error, ", "").removeprefix(": ")
    elif isinstance(error, KeyError):
        text = f"{error} is missing"
    else:
        text = str(error) or type(error).__name__
    return one_line(text)


def one_line(text: str) -> str:
    """Text from elsewhere as a message may quote it: on one line, printable, of bounded length."""
    text = " ".join(text[:1000].split())
    text = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return text if len(text) <= 300 else text[:297] + "..."


Name = Annotated[str, AfterValidator(one_line)]  # of a class, a data set ..., whatever a file says


def read_text(path: Path, cure: str = "save it as UTF-8 text") -> str:
    """The text of a UTF-8 file, with or without a byte order mark."""
    with decoding(path, cure):
        return Path(path).read_text(encoding="utf-8-sig")


def read_json(path: Path, cure: str = "get it again") -> dict[str, Any]:
    """The object in a JSON file."""
    with decoding(path, cure):
        content = json.loads(Path(path).read_bytes())
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}, not an object")
        return content


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_sha256(file: Path, expected: str, what: str, **where: Any) -> None:
    """Reject a file with another hash than `expected`; `where` as for an error, by default about the file."""
    if sha256(file) != expected:
        raise AssayError(what, **{"path": file, **where})


def content_hash(*parts: object) -> str:
    """One SHA-256 over all `parts`: plain values as JSON writes them, bytes, and files and folders (a `Path`).

    Of a file the bytes count, of a folder the names and bytes of its files; where they lie does not.
    """
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=_contents).encode()).hexdigest()


def _contents(part: object) -> object:
    if isinstance(part, bytes):
        return hashlib.sha256(part).hexdigest()
    if not isinstance(part, Path):
        raise TypeError(f"{part!r} has no contents that can be hashed")
    if part.is_dir():
        return {file.relative_to(part).as_posix(): sha256(file) for file in part.rglob("*") if file.is_file()}
    return sha256(part)


def differences(there: Any, here: Any, key: str = "") -> list[str]:
    """Where what a file says differs from what is asked now, as `train.lr: 0.001 there, 0.0001 here`."""
    if isinstance(there, dict) and isinstance(here, dict):
        parts = ((there.get(name), here.get(name), f"{key}.{name}".lstrip(".")) for name in {**there, **here})
        return [line for part in parts for line in differences(*part)]
    return [] if there == here else [one_line(f"{key}: {there} there, {here} here")]


_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet runs a cell that begins with one of these


def csv_cell(value: object) -> object:
    """A value for a CSV file: text that a spreadsheet would run begins with an apostrophe."""
    if isinstance(value, str) and value.lstrip("'").startswith(_FORMULA):
        return "'" + value
    return "" if value is None else value


def csv_text(cell: str) -> str:
    """The text that `csv_cell` made a cell of."""
    return cell[1:] if cell.startswith("'") and cell.lstrip("'").startswith(_FORMULA) else cell


def is_number(text: str) -> bool:
    """Whether a cell of a CSV file is a number."""
    with suppress(ValueError):
        float(text)
        return True
    return False
