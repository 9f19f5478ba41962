"""Checksums of the blocks of a large file, compared as its parts are first read.

A whole file of images is too large to be hashed before every run; each of its blocks is hashed once in
each process that reads it. At 64 KiB a block costs some 40 microseconds (1.7 GB/s, SHA-256 in hardware),
and the checksums take 1/4096 of the file.
"""

import hashlib
from pathlib import Path

import numpy as np

from assay.archives import read_npy

_BLOCK_BYTES = 2**16
_DIGEST_BYTES = 16  # of SHA-256


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
    """A file and the checksums of its blocks."""

    def __init__(self, path: Path, checksums: Path) -> None:
        self.path = path
        self._bytes = np.memmap(path, np.uint8, "r").view(np.ndarray)
        self._expected = read_npy(checksums)
        num_blocks = -(-len(self._bytes) // _BLOCK_BYTES)
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
        for block in np.unique(blocks[self._unchecked[blocks]]).tolist():
            at = block * _BLOCK_BYTES
            if _digest(self._bytes[at : at + _BLOCK_BYTES].data) != self._expected[block].tobytes():
                raise ValueError(
                    f"{self.path} has changed since it was packed (near byte {at}): restore it, or pack the "
                    "store again"
                )
            self._unchecked[block] = False
            self._num_unchecked -= 1


def _digest(block: bytes | memoryview) -> bytes:
    return hashlib.sha256(block).digest()[:_DIGEST_BYTES]
