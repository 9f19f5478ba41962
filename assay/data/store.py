"""A store: a folder of images, each with its noise level, class and name.

    images.npy     (N, C, H, W) uint8, float16 or float32
    sigma_tn.npy   (N,) float32, the standard deviation of the noise in each image; 0 is clean
    label.npy      (N,) int64, the class; -1 is none
    names.npy      (N,) UTF-8 bytes, the file each image came from
    usable_from.npy  (N,) float32, only if some image may be used from a higher level than its noise on
    group.npy      (N,) int64, the file each image is a part of; absent if no two share one
    sigma_map.npy  (K, C or 1, H, W) float32, maps of the noise, one level per pixel; only if some image has one
    map_index.npy  (N,) int64, the map of each image; -1 is none, sigma_tn everywhere
    kernel.npy     (K, H, W) float32, kernels that images were seen through (see `assay.data.operators`), if any
    kernel_index.npy  (N,) int64, the kernel of each image; -1 is none
    blocks.npy     checksums of the blocks of images.npy
    meta.json      shape, value range, classes, checksums of all files and of itself

`value_range` (low, high) are the stored values of black and white. Reading maps them to -1 and 1,

    x = 2 (value - low) / (high - low) - 1,

and clips nothing: the noise of a noisy image leaves [-1, 1]. `physical_range` are black and white in the files
that were packed (see `assay.data.units`), so that results can be given in their units. An image that is
blurred, compressed or of another kind can still teach the levels where noise hides that: `usable_from` >=
sigma_tn says from which level on. It must get noise up to that level before training, which
`assay.data.usable` adds. So can an image that a model restored (`restored_from`): it is usable from the level
of the noise that was removed.

Opening a store reads the columns of numbers and no images. A store is whole or absent (`assay.files`), and
damage is noticed: columns are compared with their checksums when the store is opened, images block by block
as they are first read (`assay.data.blocks`).
"""

import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from assay.archives import check_member_name, read_npy
from assay.data.blocks import CURE, ImageFile, write_blocks
from assay.data.source import ImageSource, no_kernel
from assay.data.units import PhysicalRange
from assay.denoise import check_label
from assay.errors import AssayError
from assay.files import Name, content_hash, decoding, hold_lock, sha256, write_whole, write_whole_directory
from assay.noise import check_sigma

DType = Literal["uint8", "float16", "float32"]
CHECKSUM = "checksum"  # of meta.json, the key in it
_IMAGES, _NAMES, _BLOCKS = "images.npy", "names.npy", "blocks.npy"
_SIGMA_TN, _LABEL, _USABLE_FROM, _GROUP = "sigma_tn.npy", "label.npy", "usable_from.npy", "group.npy"
_MAP, _KERNEL = ("sigma_map.npy", "map_index.npy"), ("kernel.npy", "kernel_index.npy")
_NUMBERS = dict.fromkeys((_SIGMA_TN, _USABLE_FROM), "float32")  # the columns of numbers
_NUMBERS |= dict.fromkeys((_LABEL, _GROUP, _MAP[1], _KERNEL[1]), "int64")
_MIN_LEVEL = np.float32(1e-6)  # of noise, where black to white is 2


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


class Store(ImageSource):
    """An open store (see the top of this module)."""

    def __init__(self, path: Path, meta: StoreMeta) -> None:
        self.path, self.meta = path, meta
        self.name, self.image_shape, self.class_names = meta.name, meta.image_shape, meta.class_names
        self.physical_range = meta.physical_range or meta.value_range
        for file in meta.checksums:
            if not (path / file).is_file():
                raise AssayError("is missing", path=path / file, cure=CURE)
            if file not in (_IMAGES, _NAMES):  # these are compared when they are read
                self._compare(file)
        self._images = ImageFile(path / _IMAGES, path / _BLOCKS)
        self._check_type(_IMAGES, self._images, (len(self), *meta.image_shape), meta.dtype)
        found = {
            file: torch.from_numpy(self._column(file, dtype))
            for file, dtype in _NUMBERS.items()
            if file in meta.checksums
        }
        self.sigma_tn, self.label, self.group = found[_SIGMA_TN], found[_LABEL], found.get(_GROUP)
        self.usable_from = found.get(_USABLE_FROM, self.sigma_tn)
        size, self.has_map = meta.image_shape[1:], _MAP[0] in meta.checksums
        if self.has_map:
            self._map_index = found[_MAP[1]]
            self._maps = self._shared(_MAP[0], self._map_index, {(1, *size), meta.image_shape})
        if _KERNEL[0] in meta.checksums:
            self._kernel_index = found[_KERNEL[1]]
            self._kernels = self._shared(_KERNEL[0], self._kernel_index, {size})
            self.convolved = self._kernel_index >= 0
        with decoding(path, CURE):
            self._check_columns()
        no_contents = (_NAMES, _GROUP, _BLOCKS)
        contents = {key: value for key, value in meta.checksums.items() if key not in no_contents}
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
        return _chosen(self._maps, self._map_index[index], self.sigma_tn[index][:, None, None, None])

    def read_kernel(self, index: Tensor) -> Tensor | None:
        """`index` (B,) -> the kernel of each image (B, H, W), or None if no image has one."""
        if not bool(self.convolved.any()):
            return None
        return _chosen(self._kernels, self._kernel_index[index], no_kernel(self.image_shape))

    @property
    def num_mapped(self) -> int:
        """How many images have several noise levels, besides the infinite one of missing pixels."""
        if not self.has_map:
            return 0
        finite = (levels[np.isfinite(levels)] for levels in self._maps)
        varied = torch.tensor([len(levels) > 0 and levels.min() < levels.max() for levels in finite])
        return int(varied[self._map_index[self._map_index >= 0]].sum())

    @cached_property
    def _names(self) -> np.ndarray:
        self._compare(_NAMES)
        return self._column(_NAMES)

    def source_names(self, index: Sequence[int]) -> list[str]:
        """The files that these images came from."""
        return [bytes(name).decode() for name in self._names[list(index)]]

    def verify(self) -> None:
        """Compare every file with its checksum; raises an error on the first that has changed."""
        self._images.check_all()
        for file in self.meta.checksums:
            self._compare(file)

    def _compare(self, file: str) -> None:
        if sha256(self.path / file) != self.meta.checksums[file]:
            raise AssayError("has changed since it was packed", path=self.path / file, cure=CURE)

    def _column(self, file: str, dtype: str | None = None) -> np.ndarray:
        """An array (N,), mapped in mode "c" because torch wants memory that it could write to."""
        array = read_npy(self.path / file, "c", CURE)
        self._check_type(file, array, (len(self),), dtype or array.dtype)
        return array

    def _check_type(self, file: str, array: np.ndarray | ImageFile, shape: tuple[int, ...], dtype: Any) -> None:
        if array.shape != shape or array.dtype != dtype:
            what = f"holds {array.dtype} {array.shape}, meta.json says {dtype} {shape}"
            raise AssayError(what, path=self.path / file, cure=CURE)

    def _shared(self, file: str, index: Tensor, shapes: set[tuple[int, ...]]) -> np.ndarray:
        """Arrays that several images may share, maps or kernels; `index` (N,) says which is whose."""
        values = read_npy(self.path / file, "c", CURE)
        is_valid = -1 <= int(index.min()) and 0 <= int(index.max()) < len(values)
        is_valid = is_valid and values.dtype == "float32" and values.shape[1:] in shapes
        if is_valid and file == _MAP[0]:
            is_valid = bool((values >= 0).all())
        elif is_valid:
            is_valid = bool(np.isfinite(values).all() and values.any((-2, -1)).all())
        if not is_valid:
            what = "does not fit the images, or has impossible values"
            raise AssayError(what, path=self.path / file, cure=CURE)
        return values

    def _check_columns(self) -> None:
        """Reject values that make no sense."""
        check_sigma("sigma_tn", self.sigma_tn)
        check_sigma("usable_from", self.usable_from)
        check_label(self.label, self.num_classes)
        if bool((wrong := self.usable_from < self.sigma_tn).any()):
            what = f"image {int(wrong.nonzero()[0])} cannot be usable from a level below its noise"
            raise AssayError(what, key="usable_from")
        if not bool(self.sigma_tn[self.convolved].all()):
            raise AssayError("has images that were convolved with a kernel and count as clean")


def _chosen(values: np.ndarray, which: Tensor, default: Tensor) -> Tensor:
    """Arrays number `which` (B,) of `values` (K, ...); the default where it is -1."""
    found = torch.from_numpy(values[which.clamp(min=0).numpy()])
    return found.where(which.view(-1, *[1] * (found.ndim - 1)) >= 0, default)


def check_levels(levels: np.ndarray) -> None:
    """Reject levels (N,), scaled, so small that an image would count as clean by mistake."""
    if bool((tiny := (levels > 0) & (levels < _MIN_LEVEL)).any()):
        what = f"image {int(tiny.argmax())} has a level of {levels[tiny][0]:g}, too small to be that of noise"
        raise AssayError(what, key="sigma", cure="give 0 for clean images")
    check_sigma("sigma", torch.from_numpy(levels.astype(np.float32)))


def address_of(path: Path | str) -> str | None:
    """The address of a store elsewhere, e.g. s3://bucket/store; None of a folder here.

    Paths in config files have lost a slash, which is put back.
    """
    found = re.fullmatch(r"([a-z][a-z0-9+]+):/+(.+)", str(path))
    return None if found is None else f"{found[1]}://{'/' if found[1] == 'file' else ''}{found[2]}"


def is_store(path: Path) -> bool:
    """Whether this names a store: a folder with one, or an address."""
    return address_of(path) is not None or (path / "meta.json").is_file()


def open_store(path: Path | str) -> Store:
    """Open a store: a folder that `assay data pack` or `from_arrays(...).save` wrote, or its address elsewhere.

    A store elsewhere, with an address that fsspec knows such as s3://bucket/store, is copied to a local folder
    first. Images are read from disk when they are needed.

    >>> images = assay.from_arrays(np.zeros((10, 8, 8)), sigma=0.1, name="scans")
    >>> images.save("stores/scans")
    <scans: 10 images of 1 x 8 x 8, 0 clean, 10 noisy>
    >>> store = assay.open_store("stores/scans")
    >>> store
    <scans: 10 images of 1 x 8 x 8, 0 clean, 10 noisy>
    >>> store.read(torch.tensor([0, 5])).shape
    torch.Size([2, 1, 8, 8])
    """
    address = address_of(path)
    return _open_folder(Path(path) if address is None else _copied(address))


def _copied(address: str) -> Path:
    """The local copy of a store elsewhere. Its meta.json comes last: with it, the copy is known to be whole."""
    import fsspec

    cache = Path(os.environ.get("ASSAY_CACHE") or Path.home() / ".cache" / "assay")
    here = cache / "stores" / content_hash(address)[:16]
    busy = f"{here} is being filled by {{holder}}: wait for it, or set ASSAY_CACHE to another folder"
    cure = "check the address and your access to it, or copy the store there again"
    with decoding(address, cure), hold_lock(here, busy, seconds=math.inf):
        files, root = fsspec.core.url_to_fs(address)
        text, meta = files.cat_file(f"{root}/meta.json"), here / "meta.json"
        if meta.is_file() and meta.read_bytes() == text:
            return here
        for name, checksum in json.loads(text)["checksums"].items():
            check_member_name(here, name)
            if (here / name).is_file() and sha256(here / name) == checksum:
                continue
            with write_whole(here / name) as partial:
                files.get_file(f"{root}/{name}", str(partial))
                if sha256(partial) != checksum:
                    raise AssayError("has changed since it was packed", path=f"{address}/{name}", cure=CURE)
        with write_whole(meta) as partial:
            partial.write_bytes(text)
    return here


def _open_folder(path: Path) -> Store:
    """Open the store in a folder, reading the columns of numbers and no images."""
    file = path / "meta.json"
    if not file.is_file():
        raise AssayError(
            "is not a store: it has no meta.json", path=path, cure="make one with `assay data pack`"
        )
    with decoding(file, "pack the store again, or upgrade Assay if a newer version made it"):
        tree = dict(json.loads(file.read_bytes()))
        checksum = tree.pop(CHECKSUM, None)
        meta = StoreMeta.model_validate_json(json.dumps(tree))
        needed = {_IMAGES, _NAMES, _BLOCKS, _SIGMA_TN, _LABEL}
        needed |= {name for pair in (_MAP, _KERNEL) if meta.checksums.keys() & set(pair) for name in pair}
        if missing := needed - meta.checksums.keys():
            raise AssayError(f"lacks the checksums of {', '.join(sorted(missing))}", cure=CURE)
        if checksum != content_hash(tree):
            raise AssayError("has changed since it was packed", cure=CURE)
    return Store(path, meta)


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
    kernel: np.ndarray | None = None  # (H, W), what the image was convolved with


def write_store(
    path: Path,
    name: str,
    images: Iterable[PackedImage],
    image_shape: tuple[int, int, int],
    dtype: DType,
    value_range: tuple[float, float],
    class_names: Sequence[str],
    restored_from: Parents | None = None,
) -> Store:
    """Write a store image by image, so that no more than one is in memory.

    Whole or absent: on any error nothing stays behind, and leftovers of a killed writer are removed.
    """
    rows: list[tuple[float, float, int, int, int, int]] = []
    names, ranges = [], set()
    with write_whole_directory(path) as partial:
        pixels, maps, kernels = (_Stack(partial / file) for file in (_IMAGES, _MAP[0], _KERNEL[0]))
        for image in images:
            pixels.add(image.values)
            shared = maps.number(image.sigma_map), kernels.number(image.kernel)
            usable_from = image.sigma_tn if image.usable_from is None else image.usable_from
            rows.append((image.sigma_tn, usable_from, image.label, image.group, *shared))
            names.append(image.name.encode())
            ranges.add(image.physical_range)
        columns = _columns(rows)
        for file, column in columns.items():
            np.save(partial / file, column)
        np.save(partial / _NAMES, np.array(names, dtype=np.bytes_))
        for stack in (pixels, maps, kernels):
            stack.close()
        checksums = {_IMAGES: write_blocks(partial / _IMAGES, partial / _BLOCKS)}
        files = [file.name for file in partial.iterdir() if file.name != _IMAGES]
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
        )
        tree = meta.model_dump(mode="json")
        (partial / "meta.json").write_text(json.dumps({**tree, CHECKSUM: content_hash(tree)}, indent=2) + "\n")
        try:
            _open_folder(partial)  # checks what was written, before it takes its place
        except AssayError as error:
            error.path = str(path)
            raise
    return _open_folder(path)


def _columns(rows: Sequence[tuple[float, float, int, int, int, int]]) -> dict[str, np.ndarray]:
    """The columns of numbers by their files, without those that say nothing."""
    check_levels(np.array([row[0] for row in rows]))
    values = zip(*rows, strict=True)
    found = {file: np.array(next(values), dtype) for file, dtype in _NUMBERS.items()}
    said = {_MAP[1]: found[_MAP[1]].max() >= 0, _KERNEL[1]: found[_KERNEL[1]].max() >= 0}
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
