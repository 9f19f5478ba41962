"""One file of images: read at random places, each of its blocks compared with a checksum.

A whole file of images is too large to be hashed before every run; each of its blocks is hashed once in each
process that reads it, and again if the file is written to meanwhile. At 64 KiB a block costs some 40
microseconds (1.7 GB/s, SHA-256 in hardware), and the checksums take 1/4096 of the file. What is compared, and
what is read, is one open file: whoever puts another one in its place changes nothing for those who have this.
"""

import hashlib
import mmap
import os
import weakref
from pathlib import Path

import numpy as np

from assay.archives import read_npy
from assay.errors import AssayError

_BLOCK_BYTES = 2**16
_DIGEST_BYTES = 16  # of SHA-256
_MAX_MAPPED_BYTES = 2**24  # of a file, which stay in memory once they were read
CURE = "restore it, or pack the store again"


def write_blocks(path: Path, target: Path) -> str:
    """Save the checksums of the blocks of a file to `target`, a .npy; returns the SHA-256 of all of it."""
    whole, digests = hashlib.sha256(), []
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            whole.update(block)
            digests.append(_digest(block))
    np.save(target, np.frombuffer(b"".join(digests), np.uint8).reshape(-1, _DIGEST_BYTES))
    return whole.hexdigest()


class ImageFile:
    """The rows of an array in a .npy file, with the checksums of the file's blocks.

    Small files are mapped; the pages of large ones would fill the memory, so these are read row by row.
    """

    def __init__(self, path: Path, checksums: Path) -> None:
        self.path, self._checksums = path, checksums
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        rows = read_npy(path, cure=CURE)
        self.shape, self.dtype = rows.shape, rows.dtype
        self._num_bytes = os.fstat(self._file).st_size
        self._header_bytes, self._row_bytes = self._num_bytes - rows.nbytes, rows[:1].nbytes
        self._expected = read_npy(checksums, cure=CURE)
        num_blocks = -(-self._num_bytes // _BLOCK_BYTES)
        if self._expected.shape != (num_blocks, _DIGEST_BYTES):
            raise AssayError(f"does not fit the {num_blocks} blocks of {path}", path=checksums, cure=CURE)
        self._rows: np.ndarray | None = None
        if self._num_bytes <= _MAX_MAPPED_BYTES:
            mapping = mmap.mmap(self._file, 0, access=mmap.ACCESS_READ)
            self._rows = np.ndarray(self.shape, self.dtype, mapping, self._header_bytes)
        self._unchecked, self._written = np.ones(num_blocks, dtype=bool), -1
        self._check(np.zeros(1, np.int64), np.array([self._header_bytes]))

    def __reduce__(self) -> tuple[type["ImageFile"], tuple[object, ...]]:
        return ImageFile, (self.path, self._checksums)  # another process opens the file itself

    def read(self, index: np.ndarray) -> np.ndarray:
        """The rows `index` (B,) as a new array (B, ...); -1 is the last."""
        index = np.where(index < 0, index + self.shape[0], index)
        start = self._header_bytes + index * self._row_bytes
        self._check(start, start + self._row_bytes)
        if self._rows is not None:
            return self._rows[index]
        values = np.empty((len(index), *self.shape[1:]), self.dtype)
        room = values.reshape(-1).view(np.uint8).data
        begins = np.flatnonzero(np.diff(index, prepend=-2) != 1)  # rows in a row are read at once
        for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(index)], strict=False):
            part, place = room[begin * self._row_bytes : end * self._row_bytes], int(start[begin])
            while part:
                if not (count := os.preadv(self._file, [part], place)):
                    raise AssayError("became shorter while it was read", path=self.path, cure=CURE)
                part, place = part[count:], place + count
        return values

    def check_all(self) -> None:
        """Compare every block."""
        self._check(np.zeros(1, np.int64), np.array([self._num_bytes]))

    def _check(self, start: np.ndarray, stop: np.ndarray) -> None:
        """Compare the blocks that hold the bytes start .. stop - 1, (B,) each, unless that was done before."""
        if (written := os.fstat(self._file).st_mtime_ns) != self._written:
            self._unchecked[:], self._written = True, written
        first, last = start // _BLOCK_BYTES, (stop - 1) // _BLOCK_BYTES
        width = int((last - first).max(initial=0)) + 1
        blocks = np.minimum(first[:, None] + np.arange(width), last[:, None])
        for block in np.unique(blocks[self._unchecked[blocks]]).tolist():
            content = os.pread(self._file, _BLOCK_BYTES, block * _BLOCK_BYTES)
            if _digest(content) != self._expected[block].tobytes():
                what = f"has changed since it was packed (near byte {block * _BLOCK_BYTES})"
                raise AssayError(what, path=self.path, cure=CURE)
            self._unchecked[block] = False


def _digest(block: bytes) -> bytes:
    return hashlib.sha256(block).digest()[:_DIGEST_BYTES]
