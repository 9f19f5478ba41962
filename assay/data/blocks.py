"""Reading large files of images at random places, and the checksums of their blocks.

A whole file of images is too large to be hashed before every run; each of its blocks is hashed once in
each process that reads it, and again if the file is written to meanwhile. At 64 KiB a block costs some
40 microseconds (1.7 GB/s, SHA-256 in hardware), and the checksums take 1/4096 of the file.
"""

import hashlib
import os
import weakref
from collections.abc import Callable, Sequence
from itertools import repeat
from pathlib import Path

import numpy as np

from assay.archives import read_npy

_BLOCK_BYTES = 2**16
_DIGEST_BYTES = 16  # of SHA-256
_MAX_MAPPED_BYTES = 2**28  # of images, which stay in memory once they were read
Fetch = Callable[[Sequence[int], Sequence[int]], Sequence[bytes]]  # the bytes start .. stop - 1 of a file


def write_blocks(path: Path, target: Path) -> str:
    """Save the checksums of the blocks of a file to `target`, a .npy; returns the SHA-256 of all of it."""
    whole, digests = hashlib.sha256(), []
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            whole.update(block)
            digests.append(_digest(block))
    np.save(target, np.frombuffer(b"".join(digests), np.uint8).reshape(-1, _DIGEST_BYTES))
    return whole.hexdigest()


class Blocks:
    """A file and the checksums of its blocks. Of a local copy, those that are not there yet are fetched."""

    def __init__(self, path: Path, checksums: Path, fetch: Fetch | None = None) -> None:
        self.path, self._fetch = path, fetch
        self._expected = read_npy(checksums)
        self._num_bytes = path.stat().st_size
        num_blocks = -(-self._num_bytes // _BLOCK_BYTES)
        if self._expected.shape != (num_blocks, _DIGEST_BYTES):
            raise ValueError(
                f"{checksums} has {len(self._expected)} checksums for {num_blocks} blocks of {path}: pack the "
                "store again"
            )
        self._unchecked = np.ones(num_blocks, dtype=bool)
        self._num_unchecked, self._written = num_blocks, path.stat().st_mtime_ns

    @property
    def is_checked(self) -> bool:
        """Whether all blocks have been compared since somebody last wrote to the file."""
        if (written := self.path.stat().st_mtime_ns) != self._written:
            self._unchecked[:] = True
            self._num_unchecked, self._written = len(self._unchecked), written
        return not self._num_unchecked

    def check(self, start: np.ndarray, stop: np.ndarray) -> None:
        """Compare the blocks that hold the bytes start .. stop - 1, (B,) each, unless that was done before."""
        if self.is_checked:
            return
        first, last = start // _BLOCK_BYTES, (stop - 1) // _BLOCK_BYTES
        width = int((last - first).max(initial=0)) + 1
        blocks = np.minimum(first[:, None] + np.arange(width), last[:, None])
        missing = []
        with open(self.path, "rb") as file:  # not a mapping, whose pages would stay in memory
            for block in np.unique(blocks[self._unchecked[blocks]]).tolist():
                file.seek(block * _BLOCK_BYTES)
                if not self._is_right(block, file.read(_BLOCK_BYTES)):
                    missing.append(block)
        if missing:
            self._fill(missing)

    def _is_right(self, block: int, content: bytes) -> bool:
        if _digest(content) != self._expected[block].tobytes():
            return False
        self._num_unchecked -= int(self._unchecked[block])
        self._unchecked[block] = False
        return True

    def _fill(self, missing: list[int]) -> None:
        """Fetch blocks into the local copy; an error if this is no copy, or if the origin has changed."""
        starts = [block * _BLOCK_BYTES for block in missing]
        stops = [min(start + _BLOCK_BYTES, self._num_bytes) for start in starts]
        found = self._fetch(starts, stops) if self._fetch else [b""] * len(missing)
        with open(self.path, "r+b" if self._fetch else "rb") as file:
            for block, start, content in zip(missing, starts, found, strict=True):
                if not self._is_right(block, content):
                    raise ValueError(
                        f"{self.path} has changed since it was packed (near byte {start}): restore it, or pack "
                        "the store again"
                    )
                file.seek(start)
                file.write(content)
        self._written = self.path.stat().st_mtime_ns


class Rows:
    """The rows of arrays in one or several .npy files, one after the other.

    Arrays are memory-mapped if they are small. The pages of large ones would fill the memory, and to give them
    back costs a page fault at every read, several times the cost of reading from the file.
    """

    def __init__(
        self, arrays: Sequence[np.ndarray], files: Sequence[Path], num_bytes: int | None = None
    ) -> None:
        self._arrays, self._paths = list(arrays), list(files)
        self._shape, self._dtype = arrays[0].shape[1:], arrays[0].dtype
        self.row_bytes = arrays[0].itemsize * int(np.prod(self._shape))
        self.header_bytes = np.array([file.stat().st_size for file in files]) - [each.nbytes for each in arrays]
        self._ends = np.cumsum([len(each) for each in arrays])
        self._starts = self._ends - [len(each) for each in arrays]
        self.num_bytes = sum(each.nbytes for each in arrays) if num_bytes is None else num_bytes
        self._opened = np.array([], dtype=np.int64)  # descriptors, if rows are read from the files
        if self.num_bytes > _MAX_MAPPED_BYTES and hasattr(os, "pread"):
            self._opened = np.array([os.open(file, os.O_RDONLY) for file in files])
            for each in self._opened.tolist():
                weakref.finalize(self, os.close, each)

    def __reduce__(self) -> tuple[type["Rows"], tuple[object, ...]]:
        return Rows, (self._arrays, self._paths, self.num_bytes)  # another process opens the files itself

    def __len__(self) -> int:
        return int(self._ends[-1])

    def place(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The number of the file, and of the row in it, of each row of all; -1 is the last."""
        if index.min(initial=0) < 0:
            index = np.where(index < 0, index + len(self), index)
        number = np.searchsorted(self._ends, index, side="right")
        return number, index - self._starts[number]

    def read(self, index: np.ndarray) -> np.ndarray:
        """The rows `index` (B,) as a new array (B, ...)."""
        if len(self._arrays) == 1 and not len(self._opened):
            return self._arrays[0][index]
        number, row = self.place(index)
        if not len(self._opened):
            values = np.empty((len(index), *self._shape), self._dtype)
            for which in np.unique(number).tolist():
                values[number == which] = self._arrays[which][row[number == which]]
            return values
        start = self.header_bytes[number] + row * self.row_bytes
        opened = self._opened[number].tolist()
        found = bytearray().join(map(os.pread, opened, repeat(self.row_bytes), start.tolist()))
        if len(found) != len(index) * self.row_bytes:
            raise ValueError(f"{self._paths[0]} became shorter while it was read: pack the store again")
        return np.ndarray((len(index), *self._shape), self._dtype, found)


def _digest(block: bytes) -> bytes:
    return hashlib.sha256(block).digest()[:_DIGEST_BYTES]
