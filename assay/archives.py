"""Files from elsewhere, read within fixed limits: gzip, tar, zip, npy and npz.

Sizes that a file states are compared with the bytes that are there before any memory is allocated, checksums
are read to the end, and nothing unpacks to far more than it takes on the disk.
"""

import gzip
import math
import struct
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Literal

import numpy as np

from assay.errors import AssayError
from assay.files import decoding, one_line

# What may be unpacked: this much always, and beyond it this many times the packed size. Images rarely
# shrink by more than a factor of 20; deflate can claim 1,032.
FREE_BYTES = 2**26
MAX_RATIO = 100
MAX_DIMENSIONS = 8  # of an array


def check_unpacked(where: str | Path, unpacked: int, packed: int) -> None:
    """Reject what claims to unpack to far more bytes than it has."""
    if unpacked > max(FREE_BYTES, MAX_RATIO * packed):
        what = f"unpacks from {packed} to {unpacked} bytes, as decompression bombs do"
        raise AssayError(what, path=where, cure="get it from a source you trust, or unpack it first")


def check_member_name(path: Path, name: str) -> None:
    """Reject an archive with a member that points outside it."""
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\\" in name:
        what = f"has a member {one_line(repr(name))}, which points outside it"
        raise AssayError(what, path=path, cure="get it from a source you trust")


class _Limited:
    """A stream of unpacked bytes that ends with an error once they exceed what the file may unpack to."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self.file, self.path, self.packed, self.count = file, path, path.stat().st_size, 0

    def read(self, size: int = -1) -> bytes:
        data = self.file.read(size)
        self.count += len(data)
        check_unpacked(self.path, self.count, self.packed)
        return data


@contextmanager
def open_unpacked(path: Path) -> Iterator[_Limited]:
    """The bytes of a file that may be gzipped. Read to the end, or its checksum is not compared."""
    with open(path, "rb") as start:
        is_gzip = start.read(2) == b"\x1f\x8b"
    with decoding(path), gzip.open(path) if is_gzip else open(path, "rb") as file:
        yield _Limited(file, path)  # type: ignore[arg-type]


def check_gzip(path: Path) -> None:
    """Compare the checksum of a gzipped file, for readers that do not go to its end."""
    with open_unpacked(path) as file:
        while file.read(2**20):
            pass


def is_tar(path: Path) -> bool:
    """Whether a file, perhaps gzipped, begins with the header of a tar archive."""
    with open_unpacked(path) as file:
        try:
            tarfile.TarInfo.frombuf(file.read(512), "utf-8", "surrogateescape")
        except tarfile.HeaderError:
            return False
        return True


def read_tar(path: Path, names: set[str]) -> dict[str, bytes]:
    """The files of these last names anywhere in a tar archive, perhaps gzipped; links are not followed."""
    found: dict[str, bytes] = {}
    with open_unpacked(path) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:  # type: ignore[call-overload]
        for member in archive:
            name = PurePosixPath(member.name).name
            if name not in names or not member.isreg():
                continue
            if name in found:
                raise ValueError(f"it holds {name} twice")
            check_unpacked(path, member.size, stream.packed)
            file = archive.extractfile(member)
            assert file is not None
            found[name] = file.read()
        while stream.read(2**20):  # up to gzip's checksum
            pass
    return found


def open_zip(path: Path) -> zipfile.ZipFile:
    """Open a zip archive whose directory is whole; members are compared with it as they are read."""
    with decoding(path, "copy or make the zip again"):
        archive, size = zipfile.ZipFile(path), path.stat().st_size
        for info in archive.infolist():
            check_member_name(path, info.filename)
            if info.compress_size > size:  # zipfile would set that memory aside
                raise ValueError(f"its member {info.filename} claims {info.compress_size:,} of {size:,} bytes")
        with open(path, "rb") as file:
            file.seek(max(0, size - 2**16 - 22))
            end = file.read().rpartition(b"PK\x05\x06")[2]
        (declared,) = struct.unpack("<H", end[6:8])
        if declared not in (len(archive.namelist()), 2**16 - 1):  # the latter: written elsewhere
            raise ValueError(f"it declares {declared} members and lists {len(archive.namelist())}")
    return archive


def read_member(archive: zipfile.ZipFile, name: str) -> bytes:
    """One member of a zip archive, its checksum compared."""
    where = f"{archive.filename}:{name}"
    info = archive.getinfo(name)
    check_unpacked(where, info.file_size, info.compress_size)
    with decoding(where, "copy or make the zip again"):
        return archive.read(info)


def read_npy(
    path: Path, mode: Literal["r", "c"] = "r", cure: str = "save it again as a plain array, with np.save"
) -> np.ndarray:
    """The array of a .npy file, memory-mapped."""
    with decoding(path, cure):
        with open(path, "rb") as file:
            shape, order, dtype = _npy_header(file, path.stat().st_size)
            offset = file.tell()
        if 0 in shape:
            return np.empty(shape, dtype, order)
        return np.memmap(path, dtype, mode, offset, shape, order).view(np.ndarray)  # indexes faster than memmap


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a .npz file."""
    arrays = {}
    with decoding(path, "save it again with np.savez"), open_zip(path) as archive:
        for info in archive.infolist():
            check_unpacked(path, info.file_size, info.compress_size)
            with archive.open(info) as member:
                _npy_header(member, info.file_size)
            with archive.open(info) as member:
                arrays[info.filename.removesuffix(".npy")] = np.lib.format.read_array(member)
                member.read(1)  # at the end the checksum is compared
    return arrays


def _npy_header(file: IO[bytes], size: int) -> tuple[tuple[int, ...], Literal["C", "F"], np.dtype]:
    """Shape, order and type of an array whose header is next in `file`, and which must fill `size` bytes."""
    version, known = np.lib.format.read_magic(file), np.lib.format
    headers = {(1, 0): known.read_array_header_1_0, (2, 0): known.read_array_header_2_0}
    if version not in headers:
        raise ValueError(f"it has version {version} of the npy format; 1.0 and 2.0 are known")
    shape, is_fortran, dtype = headers[version](file)
    is_plain = not dtype.hasobject and dtype.itemsize > 0 and len(shape) <= MAX_DIMENSIONS
    is_plain = is_plain and min(shape, default=0) >= 0
    if not is_plain or math.prod(shape) * dtype.itemsize != size - file.tell():
        raise ValueError(f"it declares {dtype} {shape}, not a plain array of {size - file.tell()} bytes")
    return shape, "F" if is_fortran else "C", dtype
