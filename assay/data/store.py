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

Opening a store reads the columns of numbers and no images. Images are memory-mapped, or read from the file if
they are more than a quarter of a GB. A store is whole or absent (`assay.files`), and damage is noticed: columns
are compared with their checksums when the store is opened, images block by block as they are first read.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO, Literal, Protocol

import numpy as np
import torch
from PIL.Image import Image
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from assay.archives import read_npy
from assay.data.blocks import Blocks, Fetch, Rows, write_blocks
from assay.data.units import PhysicalRange
from assay.files import Name, naming, one_line, sha256, write_whole_directory
from assay.noise import check_sigma

DType = Literal["uint8", "float16", "float32"]
FORMAT_VERSION: Literal[2] = 2  # 1 had no checksums of blocks and of meta.json
_COLUMNS = ("images.npy", "sigma_tn.npy", "label.npy", "names.npy")
_USABLE_FROM = "usable_from.npy"  # a column that stores may lack
_GROUP = "group.npy"
_BLOCKS = "blocks.npy"
CHECKSUM = "checksum"  # of meta.json, the key in it
_MAX_BYTES_HASHED_WHOLE = 2**31  # of images without checksums of blocks; a second or two
_MAP, _KERNEL = ("sigma_map.npy", "map_index.npy"), ("kernel.npy", "kernel_index.npy")


class ImageSource(Protocol):
    """Images with a noise level and a class each, as training, scoring and evaluation read them.

    Stores, views and `assay.from_arrays` are sources. To read images from somewhere else, write a class with
    these attributes and methods; it need not inherit from anything:

    name : what to call the data in reports.
    image_shape : (C, H, W), the same for all images.
    class_names, num_classes : the classes, () and 0 if there are none.
    physical_range : the values of -1 and 1 in the units of your files, or None.
    sigma_tn : (N,) float32, the noise level of each image after scaling to [-1, 1]; 0 is clean.
    label : (N,) int64, the class of each image; -1 is none.
    fingerprint : a hash of everything that `read`, `sigma_tn` and `label` return. Runs are named by it.
    len(source) : the number N of images.
    read(index) : the images `index` (B,) as (B, C, H, W) float32, scaled to [-1, 1] and not clipped. It must
        return the same values whenever it is called.

    >>> class Stripes:
    ...     name, image_shape, class_names, num_classes = "stripes", (1, 8, 8), (), 0
    ...     physical_range, fingerprint = None, "stripes 1"
    ...     sigma_tn, label = torch.zeros(100), torch.full((100,), -1)
    ...     def __len__(self):
    ...         return 100
    ...     def read(self, index):
    ...         phase = index[:, None, None, None] + torch.arange(8.0)
    ...         return phase.sin().expand(-1, 1, 8, 8)
    >>> noisy = assay.simulate(Stripes(), clean_fraction=0.1, sigma=0.3)
    >>> noisy
    <stripes (0.1 clean, noisy: 0.9 at sigma 0.3): 100 images of 1 x 8 x 8, 10 clean, 90 noisy>
    """

    name: str  # what to call the data in reports
    image_shape: tuple[int, int, int]  # (C, H, W)
    class_names: tuple[str, ...]  # empty if the images have no classes
    num_classes: int
    physical_range: PhysicalRange | None  # -1 and 1 in the units of the files; None if these differ
    sigma_tn: Tensor  # (N,) float32, the noise level of each image
    label: Tensor  # (N,) int64, the class of each image, -1 for none
    fingerprint: str  # hash of all that `read`, `sigma_tn` and `label` return

    def __len__(self) -> int: ...

    def read(self, index: Tensor) -> Tensor:
        """`index` (B,) -> `x_tn` (B, C, H, W) float32, scaled to [-1, 1] but never clipped to it."""
        ...


class Parents(BaseModel):
    """What images that a model restored were made from, and how: they are never taken for clean ones."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    images: str  # fingerprint of the noisy images
    checkpoint: str  # SHA-256 of the model's file
    method: dict[str, str | int | float]  # the settings of the restoration


class SourceDisplay:
    """How a source shows itself in a notebook."""

    name: str
    image_shape: tuple[int, int, int]
    sigma_tn: Tensor

    def __repr__(self) -> str:
        num_images, num_clean = len(self.sigma_tn), int((self.sigma_tn == 0).sum())
        shape = " x ".join(map(str, self.image_shape))
        noisy = f"{num_clean} clean, {num_images - num_clean} noisy"
        return f"<{self.name}: {num_images} images of {shape}, {noisy}>"

    def plot(self) -> Image:
        """A picture with a row of images for each noise level."""
        from assay.data.show import noise_picture

        return noise_picture(self)  # type: ignore[arg-type]


class StoreMeta(BaseModel):
    """`meta.json`: what the arrays of a store mean."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format_version: Literal[1, 2] = FORMAT_VERSION
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


class Store(SourceDisplay):
    """An open store (see the top of this module). Satisfies `ImageSource`.

    `fetch` gets parts of `images.npy` where the folder is a local copy of a store elsewhere.
    """

    def __init__(self, path: Path, meta: StoreMeta, fetch: Fetch | None = None) -> None:
        self.path = path
        self.meta = meta
        self.name = meta.name
        self.image_shape = meta.image_shape
        self.class_names = meta.class_names
        self.num_classes = len(meta.class_names)
        self.physical_range: PhysicalRange | None = meta.physical_range or meta.value_range
        for file in meta.checksums:
            if not (path / file).is_file():
                raise ValueError(f"{path / file} is missing: restore it, or pack the store again")
            if file not in ("images.npy", "names.npy"):  # these are compared when they are read
                self._compare(file)
        self._images = _map_column(path, "images.npy", (meta.num_images, *meta.image_shape), meta.dtype)
        self._names = _map_column(path, "names.npy", (meta.num_images,), None)
        self.sigma_tn = torch.from_numpy(_map_column(path, "sigma_tn.npy", (meta.num_images,), "float32"))
        self.label = torch.from_numpy(_map_column(path, "label.npy", (meta.num_images,), "int64"))
        self.usable_from = self.sigma_tn
        if _USABLE_FROM in meta.checksums:
            self.usable_from = torch.from_numpy(_map_column(path, _USABLE_FROM, (meta.num_images,), "float32"))
        self.group: Tensor | None = None
        if _GROUP in meta.checksums:
            self.group = torch.from_numpy(_map_column(path, _GROUP, (meta.num_images,), "int64"))
        self.has_map = _MAP[0] in meta.checksums
        self.convolved = torch.zeros(meta.num_images, dtype=torch.bool)
        if self.has_map:
            self._maps = _Shared(path, _MAP, (meta.num_images, None, *meta.image_shape[1:]))
        if _KERNEL[0] in meta.checksums:
            self._kernels = _Shared(path, _KERNEL, (meta.num_images, *meta.image_shape[1:]))
            self.convolved = self._kernels.index >= 0
        self._check_columns()
        self._images_unchecked = self._names_unchecked = True
        self._blocks = None
        if _BLOCKS in meta.checksums:
            self._blocks = Blocks(path / "images.npy", path / _BLOCKS, fetch)
        self.rows = Rows([self._images], [path / "images.npy"])
        if self._blocks is not None:
            self._blocks.check(np.zeros(1, np.int64), self.rows.header_bytes)
        no_contents = ("names.npy", _GROUP, _BLOCKS)
        contents = {key: value for key, value in meta.checksums.items() if key not in no_contents}
        self.fingerprint = hash_of(contents, meta.value_range, meta.class_names)

    def __len__(self) -> int:
        return self.meta.num_images

    def read(self, index: Tensor) -> Tensor:
        """`index` (B,) -> `x_tn` (B, C, H, W) float32, scaled to [-1, 1] but never clipped to it."""
        self.check_images(index.numpy())
        return self._scaled(self.rows.read(index.numpy()))

    def _scaled(self, values: np.ndarray) -> Tensor:
        low, high = self.meta.value_range
        x = torch.from_numpy(values).to(torch.float32)
        return x if (low, high) == (-1, 1) else x.mul_(2 / (high - low)).sub_((high + low) / (high - low))

    def read_map(self, index: Tensor) -> Tensor | None:
        """`index` (B,) -> the noise level of each pixel (B, C or 1, H, W), or None if no image has a map."""
        if not self.has_map:
            return None
        return self._maps.read(index, self.sigma_tn[index][:, None, None, None])

    def read_kernel(self, index: Tensor) -> Tensor | None:
        """`index` (B,) -> the kernel of each image (B, H, W), or None if no image has one."""
        if not bool(self.convolved.any()):
            return None
        return self._kernels.read(index, no_kernel(self.image_shape))

    @property
    def num_mapped(self) -> int:
        """How many images have several noise levels, besides the infinite one of missing pixels."""
        if not self.has_map:
            return 0
        finite = (levels[np.isfinite(levels)] for levels in self._maps.values)
        varied = torch.tensor([len(levels) > 0 and levels.min() < levels.max() for levels in finite])
        return int(varied[self._maps.index[self._maps.index >= 0]].sum())

    def _check_columns(self) -> None:
        """Reject values that make no sense, in a store that may come from someone else."""
        with naming(self.path, "pack the store again"):
            check_sigma("sigma_tn", self.sigma_tn)
            check_sigma("usable_from", self.usable_from)
            if not bool(((self.label >= -1) & (self.label < self.num_classes)).all()):
                raise ValueError(f"labels are not all classes from 0 to {self.num_classes - 1}, or -1")
            if self.has_map and not self._maps.values.min() >= 0:
                raise ValueError("it has maps of the noise with levels that are NaN or negative")
            if self.has_map and self._maps.values.shape[1] not in (1, self.image_shape[0]):
                raise ValueError("it has maps of the noise that do not fit its channels")
            if bool(self.convolved.any()) and not np.isfinite(self._kernels.values).all():
                raise ValueError("it has kernels that are NaN or infinite")
            if bool(self.convolved.any()) and not self._kernels.values.any((1, 2)).all():
                raise ValueError("it has kernels that are 0 everywhere")
            if not bool(self.sigma_tn[self.convolved].all()):
                raise ValueError("it has images that were convolved with a kernel and count as clean")

    def source_names(self, index: Sequence[int]) -> list[str]:
        """The files that these images came from."""
        if self._names_unchecked:
            self._compare("names.npy")
            self._names_unchecked = False
        return [bytes(name).decode() for name in self._names[list(index)]]

    def verify(self) -> None:
        """Compare every file with its checksum; raises ValueError on the first that has changed."""
        for file in self.meta.checksums:
            self._compare(file)

    def _compare(self, file: str) -> None:
        if sha256(self.path / file) != self.meta.checksums[file]:
            raise ValueError(
                f"{self.path / file} has changed since it was packed: restore it, or pack the store again"
            )

    @property
    def is_checked(self) -> bool:
        """Whether all images have been compared with their checksums."""
        return not self._images_unchecked if self._blocks is None else self._blocks.is_checked

    def check_images(self, index: np.ndarray) -> None:
        """Compare what is about to be read; in a store of the first format all images, if that is quick."""
        if self.is_checked:
            return
        if self._blocks is not None:
            _, row = self.rows.place(index)
            start = self.rows.header_bytes + row * self.rows.row_bytes
            self._blocks.check(start, start + self.rows.row_bytes)
        elif self._images_unchecked:
            if self._images.nbytes <= _MAX_BYTES_HASHED_WHOLE:
                self._compare("images.npy")
            self._images_unchecked = False


def open_one(path: Path, fetch: Fetch | None = None) -> Store:
    """Open the store in a folder that is not sharded, reading the columns of numbers and no images."""
    file = path / "meta.json"
    if not file.is_file():
        raise FileNotFoundError(f"{path} is not a store: it has no meta.json; make one with `assay data pack`")
    with naming(file, "restore it, or pack the store again"):
        tree = dict(json.loads(file.read_bytes()))
        checksum = tree.pop(CHECKSUM, None)
    try:
        meta = StoreMeta.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        version = next((part["input"] for part in error.errors() if part["loc"] == ("format_version",)), 0)
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise ValueError(
                f"{file} has store format {version}, newer than the {FORMAT_VERSION} known here: upgrade Assay"
            ) from error
        problem = error.errors()[0]
        where = one_line(".".join(str(part) for part in problem["loc"])) or "the file"
        raise ValueError(f"{file}: {where}: {problem['msg']}; pack the store again") from error
    is_first_format = meta.format_version == 1 and checksum is None
    pairs = [pair for pair in (_MAP, _KERNEL) if meta.checksums.keys() & set(pair)]
    for column in chain(_COLUMNS, [] if is_first_format else [_BLOCKS], *pairs):
        if column not in meta.checksums:
            raise ValueError(f"{file}: checksums: that of {column} is missing; pack the store again")
    if not is_first_format and checksum != hash_of(tree):
        raise ValueError(f"{file} has changed since it was packed: restore it, or pack the store again")
    return Store(path, meta, fetch)


def no_kernel(image_shape: tuple[int, int, int]) -> Tensor:
    """The kernel (H, W) that leaves an image (C, H, W) as it is."""
    kernel = torch.zeros(image_shape[1:])
    kernel[0, 0] = 1
    return kernel


def hash_of(*parts: object) -> str:
    """SHA-256 of plain values (numbers, strings, lists, dicts), as fingerprints use it."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


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
    path = Path(path)
    sigmas: list[float] = []
    usable: list[float] = []
    labels: list[int] = []
    names: list[bytes] = []
    ranges: set[PhysicalRange | None] = set()
    groups: list[int] = []
    size = image_shape[1:]
    with write_whole_directory(path) as partial:
        maps = _SharedWriter(partial, _MAP, "map of the noise", {(1, *size), image_shape}, lambda v: v >= 0)
        kernels = _SharedWriter(partial, _KERNEL, "kernel", {size}, lambda v: np.isfinite(v) & v.any())
        # Not np.memmap: on a full disk writing to a mapping kills the process, write() raises.
        with open(partial / "images.npy", "wb") as file:
            header_size = _write_header(file, (0, *image_shape), dtype)
            for image in images:
                if image.values.shape != image_shape or image.values.dtype != dtype:
                    raise ValueError(
                        f"{image.name} is {image.values.dtype} {image.values.shape}; the store holds {dtype} "
                        f"{image_shape}"
                    )
                file.write(image.values.tobytes())
                sigmas.append(image.sigma_tn)
                usable.append(image.sigma_tn if image.usable_from is None else image.usable_from)
                labels.append(image.label)
                names.append(image.name.encode())
                ranges.add(image.physical_range)
                groups.append(image.group)
                maps.add(image.name, image.sigma_map)
                kernels.add(image.name, image.kernel)
            if not sigmas:
                raise ValueError(f"{path}: there are no images to store")
            file.seek(0)
            assert _write_header(file, (len(sigmas), *image_shape), dtype) == header_size
        sigma_tn = np.asarray(sigmas, dtype=np.float32)
        label = np.asarray(labels, dtype=np.int64)
        usable_from = np.asarray(usable, dtype=np.float32)
        check_sigma("sigma_tn", torch.from_numpy(sigma_tn))
        check_sigma("usable_from", torch.from_numpy(usable_from))
        if bool((wrong := usable_from < sigma_tn).any()):
            first = int(wrong.argmax())
            raise ValueError(
                f"{names[first].decode()} has noise of {sigma_tn[first]:g} and cannot be usable from "
                f"{usable_from[first]:g}: the level from which an image may be used is not below its noise"
            )
        if label.min() < -1 or label.max() >= len(class_names):
            raise ValueError(
                f"labels reach from {label.min()} to {label.max()}; there are {len(class_names)} classes"
            )
        np.save(partial / "sigma_tn.npy", sigma_tn)
        np.save(partial / "label.npy", label)
        np.save(partial / "names.npy", np.array(names, dtype=np.bytes_))
        optional: dict[str, np.ndarray] = {}
        if bool((usable_from > sigma_tn).any()):
            optional[_USABLE_FROM] = usable_from
        if len(set(groups)) < len(groups) and min(groups) >= 0:
            optional[_GROUP] = np.asarray(groups, dtype=np.int64)
        for file_name, column in optional.items():
            np.save(partial / file_name, column)
        checksums = {"images.npy": write_blocks(partial / "images.npy", partial / _BLOCKS)}
        columns = [file for file in (*_COLUMNS, *optional, _BLOCKS) if file != "images.npy"]
        columns += [*maps.finish(), *kernels.finish()]
        meta = StoreMeta(
            name=name,
            num_images=len(sigmas),
            image_shape=image_shape,
            dtype=dtype,
            value_range=value_range,
            physical_range=ranges.pop() if len(ranges) == 1 else None,
            class_names=tuple(class_names),
            num_clean=int((usable_from == 0).sum()),
            checksums=checksums | {file: sha256(partial / file) for file in columns},
            restored_from=restored_from,
        )
        tree = meta.model_dump(mode="json")
        (partial / "meta.json").write_text(json.dumps({**tree, CHECKSUM: hash_of(tree)}, indent=2) + "\n")
    return open_one(path)


class _Shared:
    """Arrays that several images may share, maps or kernels, in two files: the arrays, and which is whose."""

    def __init__(self, path: Path, files: tuple[str, str], shape: tuple[int | None, ...]) -> None:
        """`shape`: the number of images, then the shape of an array; None is any length."""
        index = _map_column(path, files[1], shape[:1], "int64")
        if index.min() < -1 or index.max() < 0:
            raise ValueError(f"{path / files[1]} has numbers of no array: pack the store again")
        self.values = _map_column(path, files[0], (int(index.max()) + 1, *shape[1:]), "float32")
        self.index = torch.from_numpy(index)  # (N,), -1 is none

    def read(self, index: Tensor, default: Tensor) -> Tensor:
        """The arrays of images `index` (B,), `default` where an image has none."""
        which = self.index[index]
        values = torch.from_numpy(self.values[which.clamp(min=0).numpy()])
        return values.where(which.view(-1, *[1] * (values.ndim - 1)) >= 0, default)


class _SharedWriter:
    """Writes what `_Shared` reads, one array after the other; equal ones, e.g. of one detector, once."""

    def __init__(
        self,
        path: Path,
        files: tuple[str, str],
        what: str,
        shapes: set[tuple[int, ...]],
        is_valid: Callable[[np.ndarray], np.ndarray],
    ) -> None:
        """`shapes`: those that an array may have; all have that of the first. `is_valid` of each value."""
        self._path, self._files, self._what, self._is_valid = path, files, what, is_valid
        self._shapes = shapes
        self._number: dict[bytes, int] = {}  # by hash
        self._index: list[int] = []  # of each image

    def add(self, name: str, values: np.ndarray | None) -> None:
        """Take in the array of an image, which may have none."""
        if values is None:
            self._index.append(-1)
            return
        values = np.ascontiguousarray(values, dtype=np.float32)
        if values.shape not in self._shapes:
            shapes = " or ".join(map(str, sorted(self._shapes)))
            raise ValueError(f"{name}: its {self._what} has the shape {values.shape}, not {shapes}")
        if not bool(self._is_valid(values).all()):
            raise ValueError(f"{name}: its {self._what} has values that are NaN or out of range")
        if not self._number:
            self._shapes = {values.shape}
            with open(self._path / self._files[0], "wb") as file:
                self._header_size = _write_header(file, (0, *values.shape), "float32")
        key = hashlib.sha256(values.tobytes()).digest()
        if key not in self._number:
            with open(self._path / self._files[0], "ab") as file:
                file.write(values.tobytes())
        self._index.append(self._number.setdefault(key, len(self._number)))

    def finish(self) -> tuple[str, ...]:
        """Write the number of arrays into the header, and which is whose; the files, none if there are none."""
        if not self._number:
            return ()
        with open(self._path / self._files[0], "r+b") as file:
            (shape,) = self._shapes
            assert _write_header(file, (len(self._number), *shape), "float32") == self._header_size
        np.save(self._path / self._files[1], np.asarray(self._index, dtype=np.int64))
        return self._files


def _write_header(file: BinaryIO, shape: tuple[int, ...], dtype: str) -> int:
    """Write the header of a .npy file and return its size: numpy pads it, so the count may change later."""
    header = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.tell()


def _map_column(path: Path, file: str, shape: tuple[int | None, ...], dtype: str | None) -> np.ndarray:
    """Memory-map one array of a store, in mode "c" because torch wants memory it could write to.

    None in `shape` is any length.
    """
    array = read_npy(path / file, "c", "restore it, or pack the store again")
    fits = array.ndim == len(shape) and all(b in (None, a) for a, b in zip(array.shape, shape, strict=True))
    if not fits or (dtype is not None and array.dtype != dtype):
        raise ValueError(
            f"{path / file} holds {array.dtype} {array.shape}, meta.json says {dtype} {shape}: "
            "pack the store again"
        )
    return array
