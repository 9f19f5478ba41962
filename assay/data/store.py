"""A store: a folder of images, each with its noise level, class and name.

    images.npy     (N, C, H, W) uint8, float16 or float32
    sigma_tn.npy   (N,) float32, the standard deviation of the noise in each image; 0 is clean
    label.npy      (N,) int64, the class; -1 is none
    names.npy      (N,) UTF-8 bytes, the file each image came from
    usable_from.npy  (N,) float32, only if some image may be used from a higher level than its noise on
    group.npy      (N,) int64, the file each image is a part of; absent if no two share one
    sigma_map.npy  (K, C or 1, H, W) float32, maps of the noise, one level per pixel; only if some image has one
    map_index.npy  (N,) int64, the map of each image; -1 is none, sigma_tn everywhere
    blocks.npy     checksums of the blocks of images.npy
    meta.json      shape, value range, classes, checksums of all files and of itself

`value_range` (low, high) are the stored values of black and white. Reading maps them to -1 and 1,

    x = 2 (value - low) / (high - low) - 1,

and clips nothing: the noise of a noisy image leaves [-1, 1]. `physical_range` are black and white in the files
that were packed (see `assay.data.units`). An image that is blurred, compressed or restored by a model can still
teach the levels where noise hides that: `usable_from` >= sigma_tn says from which level on, and
`assay.data.usable` adds noise up to it.

A store is whole or absent (`assay.files`), and damage is noticed: columns are compared with their checksums
when the store is opened, images block by block as they are first read, at some 40 microseconds for 64 KiB.
"""

import hashlib
import json
import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from assay.archives import read_npy
from assay.data.source import ImageSource
from assay.data.units import PhysicalRange
from assay.denoise import check_label
from assay.errors import AssayError, check_same, warn
from assay.files import (
    Name,
    check_sha256,
    content_hash,
    decoding,
    sha256,
    write_whole_directory,
)
from assay.noise import check_sigma

DType = Literal["uint8", "float16", "float32"]
_CHANGED, _CURE = "has changed since it was packed", "restore it, or pack the store again"
_CHECKSUM = "checksum"  # of meta.json, the key in it
_BLOCK_BYTES = 2**16
_DIGEST_BYTES = 16  # of SHA-256
_MAX_MAPPED_BYTES = 2**24  # of a file of images, which stay in memory once they were read
_IMAGES, _NAMES, _BLOCKS = "images.npy", "names.npy", "blocks.npy"
_SIGMA_TN, _LABEL, _USABLE_FROM, _GROUP = "sigma_tn.npy", "label.npy", "usable_from.npy", "group.npy"
_MAP, _MAP_INDEX = "sigma_map.npy", "map_index.npy"
_NUMBERS = dict.fromkeys((_SIGMA_TN, _USABLE_FROM), "float32")  # the columns of numbers
_NUMBERS |= dict.fromkeys((_LABEL, _GROUP, _MAP_INDEX), "int64")


class Parents(BaseModel):
    """What images that a model restored were made from, and how: they are never taken for clean ones."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    images: str  # fingerprint of the noisy images
    checkpoint: str  # SHA-256 of the model's file
    method: dict[str, str | int | float]  # the settings of the restoration


class StoreMeta(BaseModel):
    """`meta.json`: what the arrays of a store mean."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format_version: Literal[2] = 2
    name: Name
    num_images: int
    image_shape: tuple[int, int, int]
    dtype: DType
    value_range: tuple[float, float]
    physical_range: PhysicalRange | None = None  # None: the value range
    class_names: tuple[Name, ...]
    num_clean: int  # images that may be used from level 0 on
    checksums: dict[str, str]
    restored_from: Parents | None = None  # of images that a model restored
    warnings: tuple[str, ...] = ()  # what looked wrong when it was packed


class ImageFile:
    """The rows of an array in a .npy file, each of its blocks compared with a checksum when it is first read.

    It stays open, so that another file in its place changes nothing; blocks are compared again if it is written
    to. Small files are mapped; the pages of large ones would fill the memory, so these are read row by row.
    """

    def __init__(self, path: Path, checksums: Path) -> None:
        self.path, self._checksums = path, checksums
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        rows = read_npy(path, cure=_CURE)
        self.shape, self.dtype = rows.shape, rows.dtype
        self._num_bytes = os.fstat(self._file).st_size
        self._header_bytes, self._row_bytes = self._num_bytes - rows.nbytes, rows[:1].nbytes
        self._expected = read_npy(checksums, cure=_CURE)
        num_blocks = -(-self._num_bytes // _BLOCK_BYTES)
        if self._expected.shape != (num_blocks, _DIGEST_BYTES):
            raise AssayError(f"does not fit the {num_blocks} blocks of {path}", path=checksums, cure=_CURE)
        self._rows: np.ndarray | None = None
        if self._num_bytes <= _MAX_MAPPED_BYTES:
            mapping = mmap.mmap(self._file, 0, access=mmap.ACCESS_READ)
            self._rows = np.ndarray(self.shape, self.dtype, mapping, self._header_bytes)
        self._unchecked, self._written = np.ones(num_blocks, dtype=bool), -1
        self.check(np.zeros(1, np.int64), np.array([self._header_bytes]))

    def __reduce__(self) -> tuple[type["ImageFile"], tuple[object, ...]]:
        return ImageFile, (self.path, self._checksums)  # another process opens the file itself

    def read(self, index: np.ndarray) -> np.ndarray:
        """The rows `index` (B,) as a new array (B, ...); -1 is the last."""
        index = np.where(index < 0, index + self.shape[0], index)
        start = self._header_bytes + index * self._row_bytes
        self.check(start, start + self._row_bytes)
        if self._rows is not None:
            return self._rows[index]
        values = np.empty((len(index), *self.shape[1:]), self.dtype)
        room = values.reshape(-1).view(np.uint8).data
        begins = np.flatnonzero(np.diff(index, prepend=-2) != 1)  # rows in a row are read at once
        for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(index)], strict=False):
            part, place = room[begin * self._row_bytes : end * self._row_bytes], int(start[begin])
            while part:
                if not (count := os.preadv(self._file, [part], place)):
                    raise AssayError("became shorter while it was read", path=self.path, cure=_CURE)
                part, place = part[count:], place + count
        return values

    def check(self, start: np.ndarray, stop: np.ndarray) -> None:
        """Compare the blocks that hold the bytes start .. stop - 1, (B,) each, unless that was done before."""
        if (written := os.fstat(self._file).st_mtime_ns) != self._written:
            self._unchecked[:], self._written = True, written
        first, last = start // _BLOCK_BYTES, (stop - 1) // _BLOCK_BYTES
        width = int((last - first).max(initial=0)) + 1
        blocks = np.minimum(first[:, None] + np.arange(width), last[:, None])
        for block in np.unique(blocks[self._unchecked[blocks]]).tolist():
            content = os.pread(self._file, _BLOCK_BYTES, block * _BLOCK_BYTES)
            if _digest(content) != self._expected[block].tobytes():
                what = f"{_CHANGED} (near byte {block * _BLOCK_BYTES})"
                raise AssayError(what, path=self.path, cure=_CURE)
            self._unchecked[block] = False


def _digest(block: bytes) -> bytes:
    return hashlib.sha256(block).digest()[:_DIGEST_BYTES]


class Store(ImageSource):
    """An open store (see the top of this module): the columns of numbers are read, no images."""

    def __init__(self, path: Path) -> None:
        self.path, self.meta = path, (meta := read_meta(path))
        self.name, self.image_shape, self.class_names = meta.name, meta.image_shape, meta.class_names
        units = meta.physical_range or meta.value_range
        self.physical_range = units if meta.physical_range or units != (-1, 1) else None  # sources differ
        for file in meta.checksums:
            if not (path / file).is_file():
                raise AssayError("is missing", path=path / file, cure=_CURE)
            if file not in (_IMAGES, _NAMES):  # these are compared when they are read
                self._compare(file)
        self._images = ImageFile(path / _IMAGES, path / _BLOCKS)
        self._check_type(_IMAGES, self._images, (len(self), *meta.image_shape), meta.dtype)
        there = {file: dtype for file, dtype in _NUMBERS.items() if file in meta.checksums}
        found = {file: torch.from_numpy(self._column(file, dtype)) for file, dtype in there.items()}
        self.sigma_tn, self.label, self.group = found[_SIGMA_TN], found[_LABEL], found.get(_GROUP)
        self.usable_from = found.get(_USABLE_FROM, self.sigma_tn)
        self.has_map = _MAP in meta.checksums
        if self.has_map:
            self._map_index, self._maps = found[_MAP_INDEX], read_npy(path / _MAP, "c", _CURE)
        with decoding(path, _CURE):
            self._check_columns()
        contents = {key: meta.checksums[key] for key in meta.checksums if key not in (_NAMES, _GROUP, _BLOCKS)}
        self.fingerprint = content_hash(contents, meta.value_range, meta.class_names)

    def __len__(self) -> int:
        return self.meta.num_images

    def read(self, index: Tensor) -> Tensor:
        """`index` (B,) -> `x_tn` (B, C, H, W) float32, scaled to [-1, 1] but never clipped to it."""
        low, high = self.meta.value_range
        x = torch.from_numpy(self._images.read(index.numpy())).to(torch.float32)
        return x if (low, high) == (-1, 1) else x.mul_(2 / (high - low)).sub_((high + low) / (high - low))

    def read_levels(self, index: Tensor) -> Tensor:
        """`index` (B,) -> the noise level of each pixel (B, C or 1, H, W), `sigma_tn` without maps."""
        if not self.has_map:
            return super().read_levels(index)
        which = self._map_index[index]
        levels = torch.from_numpy(self._maps[which.clamp(min=0).numpy()])
        own = self.sigma_tn[index][:, None, None, None]
        return levels.where(which[:, None, None, None] >= 0, own)

    def source_names(self, index: Sequence[int]) -> list[str]:
        """The files that these images came from."""
        self._compare(_NAMES)
        return [bytes(name).decode() for name in self._column(_NAMES)[list(index)]]

    def verify(self) -> None:
        """Compare every file with its checksum; raises an error on the first that has changed."""
        for file in self.meta.checksums:
            self._compare(file)

    def _compare(self, file: str) -> None:
        check_sha256(self.path / file, self.meta.checksums[file], _CHANGED, cure=_CURE)

    def _column(self, file: str, dtype: str | None = None) -> np.ndarray:
        """An array (N,), mapped in mode "c" because torch wants memory that it could write to."""
        array = read_npy(self.path / file, "c", _CURE)
        self._check_type(file, array, (len(self),), dtype or array.dtype)
        return array

    def _check_type(self, file: str, array: np.ndarray | ImageFile, shape: tuple[int, ...], dtype: Any) -> None:
        found, what = (array.dtype.str, array.shape), "holds something else than meta.json says"
        check_same(found, (np.dtype(dtype).str, shape), what, path=self.path / file, cure=_CURE)

    def _check_columns(self) -> None:
        """Reject values that make no sense."""
        check_sigma("sigma_tn", self.sigma_tn)
        check_sigma("usable_from", self.usable_from, self.sigma_tn)
        check_label(self.label, self.num_classes)
        if self.has_map:
            maps, shapes = self._maps, {(1, *self.image_shape[1:]), self.image_shape}
            is_valid = -1 <= int(self._map_index.min()) and 0 <= int(self._map_index.max()) < len(maps)
            is_valid = is_valid and maps.dtype == "float32" and maps.shape[1:] in shapes
            if not is_valid or not bool((np.isfinite(maps) & (maps >= 0)).all()):
                what = "does not fit the images, or has levels that are negative, NaN or infinite"
                raise AssayError(what, path=self.path / _MAP, cure=_CURE)


def is_store(path: Path) -> bool:
    """Whether this is the folder of a store."""
    return (path / "meta.json").is_file()


def open_store(path: Path | str) -> Store:
    """Open a store: a folder that `assay data pack` or `from_arrays(...).save` wrote.

    What looked wrong when it was packed is told again.

    >>> images = assay.from_arrays(np.zeros((10, 8, 8)), sigma=0.1, name="scans")
    >>> images.save("stores/scans")
    <scans: 10 images of 1 x 8 x 8, 0 clean, 10 noisy>
    >>> store = assay.open_store("stores/scans")
    >>> store
    <scans: 10 images of 1 x 8 x 8, 0 clean, 10 noisy>
    >>> store.read(torch.tensor([0, 5])).shape
    torch.Size([2, 1, 8, 8])
    """
    store = Store(Path(path))
    for text in store.meta.warnings:
        warn(f"{path} was packed with a warning: {text}")
    return store


def read_meta(path: Path) -> StoreMeta:
    """What the folder of a store says of itself."""
    file = path / "meta.json"
    if not file.is_file():
        what, cure = "is not a store: it has no meta.json", "make one with `assay data pack`"
        raise AssayError(what, path=path, cure=cure)
    with decoding(file, "pack the store again, or upgrade Assay if a newer version made it"):
        tree = dict(json.loads(file.read_bytes()))
        checksum = tree.pop(_CHECKSUM, None)
        meta = StoreMeta.model_validate_json(json.dumps(tree))
        needed = {_IMAGES, _NAMES, _BLOCKS, _SIGMA_TN, _LABEL}
        needed |= {_MAP, _MAP_INDEX} if meta.checksums.keys() & {_MAP, _MAP_INDEX} else set()
        if missing := needed - meta.checksums.keys():
            raise AssayError(f"lacks the checksums of {', '.join(sorted(missing))}", cure=_CURE)
        if checksum != content_hash(tree):
            raise AssayError(_CHANGED, cure=_CURE)
    return meta


@dataclass(frozen=True)
class PackedImage:
    """One image on its way into a store: `values` (C, H, W) in the store's own dtype and value range."""

    name: str
    values: np.ndarray
    sigma_tn: float
    label: int
    usable_from: float | None = None  # the same as sigma_tn
    physical_range: PhysicalRange | None = None  # the same as the store's value range
    group: int = -1  # images of one group, e.g. patches of one picture, are held out together
    sigma_map: np.ndarray | None = None  # (C or 1, H, W), the noise of each pixel as images from -1 to 1


def write_store(
    path: Path,
    name: str,
    images: Iterable[PackedImage],
    image_shape: tuple[int, int, int],
    dtype: DType,
    value_range: tuple[float, float],
    class_names: Sequence[str],
    restored_from: Parents | None = None,
    warnings: Callable[[], Sequence[str]] = tuple,
) -> Store:
    """Write a store, whole or not at all, image by image, so that no more than one is in memory.

    `warnings` is asked once all images are written.
    """
    rows: list[tuple[float, float, int, int, int]] = []
    names, ranges = [], set()
    with write_whole_directory(path) as partial:
        pixels, maps = _Stack(partial / _IMAGES), _Stack(partial / _MAP)
        for image in images:
            pixels.add(image.values)
            usable_from = image.sigma_tn if image.usable_from is None else image.usable_from
            number = maps.number(image.sigma_map)
            rows.append((image.sigma_tn, usable_from, image.label, image.group, number))
            names.append(image.name.encode())
            ranges.add(image.physical_range)
        columns = _columns(rows)
        for file, column in {**columns, _NAMES: np.array(names, dtype=np.bytes_)}.items():
            np.save(partial / file, column)
        pixels.close()
        maps.close()
        checksums = {_IMAGES: _write_blocks(partial)}
        files = [file.name for file in sorted(partial.iterdir()) if file.name != _IMAGES]
        meta = StoreMeta(
            name=name,
            num_images=len(rows),
            image_shape=image_shape,
            dtype=dtype,
            value_range=value_range,
            physical_range=ranges.pop() if len(ranges) == 1 else None,
            class_names=tuple(class_names),
            num_clean=int((columns.get(_USABLE_FROM, columns[_SIGMA_TN]) == 0).sum()),
            checksums=checksums | {file: sha256(partial / file) for file in files},
            restored_from=restored_from,
            warnings=tuple(warnings()),
        )
        tree = meta.model_dump(mode="json")
        (partial / "meta.json").write_text(json.dumps({**tree, _CHECKSUM: content_hash(tree)}, indent=2) + "\n")
        try:
            Store(partial)  # checks what was written, before it takes its place
        except AssayError as error:
            error.path = str(path)
            raise
    return Store(path)


def _write_blocks(folder: Path) -> str:
    """Save the checksums of the blocks of the images; returns the SHA-256 of all of them."""
    whole, digests = hashlib.sha256(), []
    with open(folder / _IMAGES, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            whole.update(block)
            digests.append(_digest(block))
    np.save(folder / _BLOCKS, np.frombuffer(b"".join(digests), np.uint8).reshape(-1, _DIGEST_BYTES))
    return whole.hexdigest()


def _columns(rows: Sequence[tuple[float, float, int, int, int]]) -> dict[str, np.ndarray]:
    """The columns of numbers by their files, without those that say nothing."""
    values = zip(*rows, strict=True)
    found = {file: np.array(next(values), dtype) for file, dtype in _NUMBERS.items()}
    said = {_MAP_INDEX: found[_MAP_INDEX].max() >= 0}
    said[_USABLE_FROM] = (found[_USABLE_FROM] != found[_SIGMA_TN]).any()
    said[_GROUP] = len(np.unique(found[_GROUP])) < len(rows) and found[_GROUP].min() >= 0
    return {file: column for file, column in found.items() if said.get(file, True)}


class _Stack:
    """Writes a .npy file row by row. Not np.memmap: on a full disk writing to a mapping kills the process."""

    def __init__(self, path: Path) -> None:
        self._path, self._number, self.num_rows = path, dict[str, int](), 0

    def add(self, values: np.ndarray) -> None:
        """Write a row; all have the shape and the type of the first."""
        if not self.num_rows:
            self._shape, self._dtype = values.shape, values.dtype
            self._file = open(self._path, "wb")  # noqa: SIM115
            self._write_header()
        self._file.write(values.tobytes())
        self.num_rows += 1

    def number(self, values: np.ndarray | None) -> int:
        """The row of an array, -1 of none; equal ones, e.g. of one detector, are written once."""
        if values is None:
            return -1
        values = np.ascontiguousarray(values, dtype=np.float32)
        if (key := content_hash(values.tobytes())) not in self._number:
            self.add(values)
        return self._number.setdefault(key, len(self._number))

    def close(self) -> None:
        """Write the number of rows into the header, which numpy pads for that."""
        if self.num_rows:
            self._file.seek(0)
            self._write_header()
            self._file.close()

    def _write_header(self) -> None:
        descr, shape = np.lib.format.dtype_to_descr(self._dtype), (self.num_rows, *self._shape)
        header = {"descr": descr, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._file, header)
