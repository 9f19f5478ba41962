"""Images as files hold them, before packing, and the formats that they are read from.

A reader returns `RawImages`: the columns at once, the pixels one image at a time. `pixels(i)` is an image
(H, W, C) as it is in the file: uint8, uint16 or float32. In a picture file the last of 2 or 4 channels is the
opacity; in an array every channel is a channel. `load(i)` is the same without opacity, flattened on white.

Each format is a module of `assay.data.formats` with a `FORMAT`; a package of yours adds one by an entry point
of the group `assay.formats` that names a `Format`. A folder that is of no format holds files: pictures, or
those of one scientific format.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path, PurePosixPath
from pkgutil import iter_modules

import numpy as np

from assay.archives import read_npy
from assay.data.decode import PICTURES, flatten
from assay.data.levels import Level
from assay.data.spec import SourceSpec
from assay.data.units import Stabilised
from assay.errors import AssayError
from assay.files import decoding

Size = tuple[int, int]  # (H, W)
# image number, its size in the file and in the store -> kernel (H, W) and missing pixels (H, W)
Operator = Callable[[int, Size, Size], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class RawImages:
    """Images in their original form; the first three fields are enough.

    name : what to call them.
    names : the file of each image.
    pixels : the image of a number, (H, W, C).
    label, class_names : the class of each image (N,), -1 for none, if there are classes.
    levels : the noise of each image, or what is wrong with it; None if nothing is known: they are clean.
    sigma_map : the noise of each pixel of an image, (H, W, C or 1), in the units of the files, or of images
        from -1 to 1 if `map_scaled`; the `quantile` of it is the image's level.
    value_range : the pixels that are black and white; 8-bit and 16-bit pixels need none.
    sensor : the images are of a sensor that counts photons, and clean if their level is 0.
    has_opacity : the last of 2 or 4 channels is one.
    group : the file (N,) that each image is a part of, if several come from one.
    operator : what images were seen through (see `assay.data.operators`).
    units : what the units of pixels are called.
    """

    name: str
    names: Sequence[str]
    pixels: Callable[[int], np.ndarray]
    label: np.ndarray | None = None
    class_names: tuple[str, ...] = ()
    levels: Sequence[Level | AssayError] | None = None
    sigma_map: Callable[[int], np.ndarray] | None = None
    map_scaled: bool = False
    quantile: float = 1.0
    value_range: tuple[float, float] | None = None
    sensor: Stabilised | None = None
    has_opacity: bool = False
    group: np.ndarray | None = None
    operator: Operator | None = None
    units: str = "the files' units"

    def load(self, i: int) -> np.ndarray:
        """The pixels (H, W, C) of one image, transparency flattened on white."""
        return flatten(self.pixels(i), self.names[i]) if self.has_opacity else self.pixels(i)


@dataclass(frozen=True)
class Format:
    """A format: whether a source is of it, and how it is opened.

    `in_folder` opens one file of a folder of such files; None if a folder does not hold them.
    """

    name: str
    matches: Callable[[Path], bool]
    open: Callable[[Path, SourceSpec], RawImages]
    in_folder: Callable[[Path, SourceSpec], RawImages] | None = None


@cache
def formats() -> tuple[Format, ...]:
    """All formats: those of entry points, which come first, and our own."""
    found = [entry.load() for entry in entry_points(group="assay.formats")]
    package = import_module("assay.data.formats")
    for module in iter_modules(package.__path__, f"{package.__name__}."):
        found.append(import_module(module.name).FORMAT)
    return tuple(found)


def read_any(source: str, **settings: object) -> RawImages:
    """The images of a path, as `SourceSpec` with these settings describes it."""
    return open_images(SourceSpec(path=source, **settings))


def open_images(spec: SourceSpec) -> RawImages:
    """Find out what a source is, and open it."""
    path = Path(spec.path)
    for format in formats():
        if format.matches(path):
            with decoding(path, "check that it is whole"):
                return format.open(path, spec)
    if path.is_dir():
        return _open_folder(path, spec)
    if not path.exists():
        raise AssayError("does not exist", path=path, cure="give a folder, a file, or hf:NAME")
    known = ", ".join(format.name for format in formats())
    raise AssayError(
        "is none of the formats Assay reads", path=path, cure=f"give a folder of images, or {known}"
    )


def _open_folder(path: Path, spec: SourceSpec) -> RawImages:
    """The files of a folder and those below it: pictures, or files of one format; hidden ones do not count."""
    from assay.data.formats.pictures import open_pictures
    from assay.data.formats.tiff import is_stack

    files = sorted(file for file in path.rglob("[!.]*"))
    pictures = [file for file in files if file.suffix.lower() in PICTURES and file.is_file()]
    found: dict[str, list[Path]] = {}
    for file in files:
        of = next((f.name for f in formats() if f.in_folder and f.matches(file)), None)
        if of is not None and not any(parent in found.get(of, ()) for parent in file.parents):
            found.setdefault(of, []).append(file)
    tiffs = found.pop("TIFF", [])  # pictures, if they have one page each
    if not found and len(tiffs) == len(pictures) > 0 and is_stack(tiffs[0]):
        found, pictures = {"TIFF": tiffs}, []
    if len(found) + bool(pictures) > 1:
        examples = [each[0].name for each in (pictures, *found.values()) if each]
        what = f"holds files of several kinds, such as {' and '.join(examples[:2])}"
        raise AssayError(what, path=path, cure="pack each kind as a source of its own")
    if not found:
        return open_pictures(path, pictures)
    ((name, of_one),) = found.items()
    format = next(format for format in formats() if format.name == name)
    return _joined(path, of_one, [_open_file(format, file, spec) for file in of_one])


def _open_file(format: Format, file: Path, spec: SourceSpec) -> RawImages:
    assert format.in_folder is not None
    with decoding(file, "check that the file is whole, or leave it out"):
        return format.in_folder(file, spec)


def _joined(folder: Path, files: list[Path], raws: list[RawImages]) -> RawImages:
    """The images of several files; those of one file stay one group."""
    place = [(raw, k) for raw in raws for k in range(len(raw.names))]
    names: list[str] = []
    for file, raw in zip(files, raws, strict=True):
        above = file.parent.relative_to(folder)
        names += [(PurePosixPath(above.as_posix()) / name).as_posix() for name in raw.names]

    def pixels(i: int) -> np.ndarray:
        raw, k = place[i]
        return raw.pixels(k)

    def sigma_map(i: int) -> np.ndarray:
        raw, k = place[i]
        if raw.sigma_map is not None:
            return raw.sigma_map(k)
        level = raw.levels[k] if raw.levels is not None else Level(0.0)
        if isinstance(level, AssayError):
            raise level
        return np.full((*raw.pixels(k).shape[:2], 1), level.sigma)

    group = np.repeat(np.arange(len(raws)), [len(raw.names) for raw in raws])
    if any(raw.sigma_map is not None for raw in raws):
        return RawImages(folder.name, names, pixels, sigma_map=sigma_map, group=group)
    levels = [level for raw in raws for level in raw.levels or [Level(0.0)] * len(raw.names)]
    stated = any(raw.levels is not None for raw in raws)
    return RawImages(folder.name, names, pixels, levels=levels if stated else None, group=group)


def printable(name: str) -> str:
    """A file's name with the bytes that are not UTF-8 as escapes, since nothing can print or store them."""
    return os.fsencode(name).decode(errors="backslashreplace")


def numbered_classes(
    labels: Sequence[int] | np.ndarray, where: str | Path, num_images: int
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Check that labels are one per image, 0 .. K - 1 without gaps (or -1); classes are called by number."""
    label = np.asarray(labels)
    if label.shape != (num_images,) or label.dtype.kind not in "iu":
        raise AssayError(
            f"has labels {label.dtype} {label.shape}", path=where, cure=f"give whole numbers ({num_images},)"
        )
    label = label.astype(np.int64)
    present = np.unique(label[label != -1])
    gaps = np.flatnonzero(present != np.arange(len(present)))
    if len(gaps):
        problem = f"go down to {present[0]}" if present[0] < 0 else f"skip {gaps[0]}"
        cure = f"number the classes 0 .. {len(present) - 1} without gaps"
        raise AssayError(f"has labels that {problem}", path=where, cure=cure)
    return label, tuple(str(number) for number in present)


def with_map(raw: RawImages, path: Path, scaled: bool = False) -> RawImages:
    """The images with the noise of each pixel from a `.npy`: one map for all, or one for each.

    (H, W) or (C, H, W) is for all; (N, H, W) and (N, C, H, W) have one for each of N images, in their order.
    """
    maps = read_npy(path)
    shapes = (
        "give one level per pixel, (H, W) or (C, H, W), or one map for each image, (N, H, W) or (N, C, H, W)"
    )
    num_images, num_channels = len(raw.names), raw.pixels(0).shape[2]
    what = f"holds {maps.dtype} {maps.shape} for {num_images} images of {num_channels} channels"
    for_each = maps.ndim == 4 or (maps.ndim == 3 and len(maps) == num_images)
    is_ambiguous = maps.ndim == 3 and num_images == num_channels > 1
    if maps.dtype.kind not in "fiu" or maps.ndim not in (2, 3, 4) or is_ambiguous:
        raise AssayError(what, path=path, key="map", cure=shapes)
    if for_each and len(maps) != num_images:
        raise AssayError(what, path=path, key="map", cure=shapes)

    def sigma_map(i: int) -> np.ndarray:
        levels = np.asarray(maps[i] if for_each else maps, dtype=np.float32)
        return levels[:, :, None] if levels.ndim == 2 else levels.transpose(1, 2, 0)

    return replace(raw, sigma_map=sigma_map, map_scaled=scaled, levels=None)


def cut_patches(raw: RawImages, size: Size, stride: int) -> RawImages:
    """Patches (H, W) of large images, every `stride` pixels; those of one image are one group."""
    height, width = size
    corners: list[tuple[int, int, int]] = []
    sizes: list[Size] = []
    for i in range(len(raw.names)):
        shape = raw.pixels(i).shape
        sizes.append((shape[0], shape[1]))
        if shape[0] < height or shape[1] < width:
            what = f"has {shape[0]} x {shape[1]} pixels, fewer than a patch of {height} x {width}"
            raise AssayError(
                what, path=raw.names[i], key="patch", cure="choose smaller patches, or leave it out"
            )
        tops, lefts = (range(0, all_ - mine + 1, stride) for all_, mine in zip(shape, size, strict=False))
        corners += [(i, y, x) for y in tops for x in lefts]
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

    def operator(k: int, before: Size, size: Size) -> tuple[np.ndarray, np.ndarray]:
        i = corners[k][0]
        assert of_whole is not None
        return of_whole(i, sizes[i], size)

    return replace(
        raw,
        sigma_map=None if whole_map is None else sigma_map,
        operator=None if of_whole is None else operator,
        names=[f"{raw.names[i]}[{y},{x}]" for i, y, x in corners],
        label=None if raw.label is None else raw.label[image],
        pixels=pixels,
        levels=None if raw.levels is None else [raw.levels[i] for i in image],
        group=image if raw.group is None else raw.group[image],
    )
