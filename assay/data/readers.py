"""Images as files hold them, before packing, and the formats that they are read from.

A reader returns `RawImages`: the columns at once, the pixels one image at a time. The formats are in
`assay.data.formats`; a package of yours adds one by an entry point of the group `assay.formats` that names a
`Format`. A folder that is of no format holds files: pictures, or those of one format; its folders are classes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib import import_module
from importlib.metadata import entry_points
from itertools import chain
from pathlib import Path, PurePosixPath

import numpy as np

from assay.archives import read_npy
from assay.data.decode import PICTURES, flatten
from assay.data.spec import Level, SourceSpec
from assay.data.units import Stabilised
from assay.errors import AssayError
from assay.files import decoding

Size = tuple[int, int]  # (H, W)


def clean(i: int) -> Level:
    """The noise of an image that has none."""
    return Level()


@dataclass(frozen=True)
class RawImages:
    """Images in their original form; the first three fields are enough.

    name : what to call them.
    names : the file of each image.
    pixels : the image of a number as it is in the file, (H, W, C) uint8, uint16 or float32.
    label, class_names : the class of each image (N,), -1 for none, if there are classes.
    noise : the level of an image, or of each of its pixels; images of which nothing is known are clean.
    value_range : the pixels that are black and white; 8-bit and 16-bit pixels need none.
    sensor : the images are of a sensor that counts photons, and clean if their level is 0.
    has_opacity : the last of 2 or 4 channels is one.
    group : the file (N,) that each image is a part of, if several come from one.
    """

    name: str
    names: Sequence[str]
    pixels: Callable[[int], np.ndarray]
    label: np.ndarray | None = None
    class_names: tuple[str, ...] = ()
    noise: Callable[[int], Level] = clean
    value_range: tuple[float, float] | None = None
    sensor: Stabilised | None = None
    has_opacity: bool = False
    group: np.ndarray | None = None

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
    modules = ("scientific", "arrays", "pictures")  # tried in this order
    ours = [import_module(f"assay.data.formats.{name}").FORMATS for name in modules]
    return *(entry.load() for entry in entry_points(group="assay.formats")), *chain(*ours)


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
    what = "is none of the formats Assay reads" if path.exists() else "does not exist"
    known = ", ".join(format.name for format in formats())
    raise AssayError(what, path=path, cure=f"give a folder of images, {known}, or hf:NAME")


def _open_folder(path: Path, spec: SourceSpec) -> RawImages:
    """The files of a folder and those below it: pictures, or files of one format; hidden ones do not count."""
    from assay.data.formats.pictures import open_pictures
    from assay.data.formats.scientific import is_stack

    files = sorted(path.rglob("[!.]*"))
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
    open_one = next(format.in_folder for format in formats() if format.name == name)
    raws, names = [], []
    for file in of_one:
        with decoding(file, "check that the file is whole, or leave it out"):
            raws.append(open_one(file, spec))  # type: ignore[misc]
        above = PurePosixPath(file.parent.relative_to(path).as_posix())
        names += [(above / name).as_posix() for name in raws[-1].names]
    place = [(raw, k) for raw in raws for k in range(len(raw.names))]
    group = np.repeat(np.arange(len(raws)), [len(raw.names) for raw in raws])
    noise = clean if all(raw.noise is clean for raw in raws) else lambda i: place[i][0].noise(place[i][1])
    raw = RawImages(path.name, names, lambda i: place[i][0].pixels(place[i][1]), noise=noise, group=group)
    return with_folder_classes(raw)


def with_folder_classes(raw: RawImages) -> RawImages:
    """The images of a folder; those in a folder directly below it belong to the class of that name."""
    tops = [PurePosixPath(name).parts[0] if "/" in name else "" for name in raw.names]
    class_names = sorted({*tops} - {""})
    label = np.array([class_names.index(top) if top else -1 for top in tops], np.int64)
    return replace(raw, label=label, class_names=tuple(class_names))


def numbered_classes(raw: RawImages, labels: Sequence[int] | np.ndarray | None, where: str | Path) -> RawImages:
    """The images with classes called by number, 0 .. K - 1 without gaps, -1 for none; or without classes."""
    if labels is None:
        return replace(raw, label=None, class_names=())
    label = np.asarray(labels)
    present = np.unique(label[label != -1])
    is_whole = label.shape == (len(raw.names),) and label.dtype.kind in "iu"
    if not is_whole or not np.array_equal(present, np.arange(len(present))):
        what = f"has labels {label.dtype} {label.shape}, which are not classes or leave some out"
        cure = f"give whole numbers ({len(raw.names)},) from 0 without gaps, -1 for none"
        raise AssayError(what, path=where, cure=cure)
    return replace(raw, label=label.astype(np.int64), class_names=tuple(map(str, present)))


def with_map(raw: RawImages, path: Path, scaled: bool = False) -> RawImages:
    """The images with the noise of each pixel from a `.npy`: one map for all, or one for each.

    (H, W) or (C, H, W) is for all; (N, H, W) and (N, C, H, W) have one for each of N images, in their order.
    """
    maps = read_npy(path)
    num_images, num_channels = len(raw.names), raw.pixels(0).shape[2]
    for_each = maps.ndim == 4 or (maps.ndim == 3 and len(maps) == num_images)
    is_ambiguous = maps.ndim == 3 and num_images == num_channels > 1
    is_number = maps.dtype.kind in "fiu" and maps.ndim in (2, 3, 4)
    if not is_number or is_ambiguous or (for_each and len(maps) != num_images):
        what = f"holds {maps.dtype} {maps.shape} for {num_images} images of {num_channels} channels"
        cure = "give one level per pixel, (H, W) or (C, H, W), or N such maps, one for each image"
        raise AssayError(what, path=path, key="map", cure=cure)

    def noise(i: int) -> Level:
        levels = np.asarray(maps[i] if for_each else maps, dtype=np.float32)
        return Level(levels[:, :, None] if levels.ndim == 2 else levels.transpose(1, 2, 0), None, scaled)

    return replace(raw, noise=noise)


def cut_patches(raw: RawImages, size: Size, stride: int) -> RawImages:
    """Patches (H, W) of large images, every `stride` pixels and at the far borders; one image is one group."""
    corners = []
    for i, name in enumerate(raw.names):
        height, width = raw.pixels(i).shape[:2]
        if height < size[0] or width < size[1]:
            what = f"has {height} x {width} pixels, fewer than a patch of {size[0]} x {size[1]}"
            raise AssayError(what, path=name, key="patch", cure="choose smaller patches, or leave it out")
        last = height - size[0], width - size[1]
        places = [sorted({*range(0, end + 1, stride), end}) for end in last]
        corners += [(i, y, x) for y in places[0] for x in places[1]]
    whole = lru_cache(1)(raw.pixels)  # the image whose patches are being cut
    image = np.array([i for i, _, _ in corners])

    def cut(values: np.ndarray, k: int) -> np.ndarray:
        _, y, x = corners[k]
        return values[y : y + size[0], x : x + size[1]]

    def noise(k: int) -> Level:
        found = raw.noise(image[k])
        return found._replace(sigma=cut(found.sigma, k)) if isinstance(found.sigma, np.ndarray) else found

    return replace(
        raw,
        names=[f"{raw.names[i]}[{y},{x}]" for i, y, x in corners],
        pixels=lambda k: cut(whole(image[k]), k),
        noise=noise,
        label=None if raw.label is None else raw.label[image],
        group=image if raw.group is None else raw.group[image],
    )
