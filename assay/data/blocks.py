"""Checksums of the blocks of a large file, compared as its parts are first read.

A whole file of images is too large to be hashed before every run; each of its blocks is hashed once in
each process that reads it. At 64 KiB a block costs some 40 microseconds (1.7 GB/s, SHA-256 in hardware),
and the checksums take 1/4096 of the file.
"""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from assay.archives import read_npy

_BLOCK_BYTES = 2**16
_DIGEST_BYTES = 16  # of SHA-256
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
        self._unchecked, self._num_unchecked = np.ones(num_blocks, dtype=bool), num_blocks

    def check(self, start: np.ndarray, stop: np.ndarray) -> None:
        """Compare the blocks that hold the bytes start .. stop - 1, (B,) each, unless that was done before."""
        if not self._num_unchecked:
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


def _digest(block: bytes) -> bytes:
    return hashlib.sha256(block).digest()[:_DIGEST_BYTES]
