"""Packing: any readable images, from one source or several -> a store.

Nothing is guessed. Images keep their size and colours unless you ask otherwise, float pixels need their
value range named, and what would change the noise of a noisy image (resizing, recolouring, flattening
transparency, rounding to 8 bits) is rejected. Noise levels are given in the units of the files and converted
with the value range, sigma_tn = 2 sigma / (high - low); a level that the pixels rule out is rejected.
"""

import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from PIL import Image
from pydantic import BeforeValidator, Field
from torch import Tensor

from assay.data.audit.level import MIN_SIDE, blind_net, spread
from assay.data.copies import are_versions, small_copy
from assay.data.decode import check_finite, flatten, is_lossy, is_transparent
from assay.data.looks import DARKER, LOSSY, OPACITY, look_at, rules_out
from assay.data.notes import Note, Notes
from assay.data.readers import RawImages, clean, cut_patches, open_images, with_map
from assay.data.spec import Level, SourceSpec, read_levels
from assay.data.store import DType, PackedImage, Store, read_meta, write_store
from assay.data.units import Stabilised
from assay.errors import AssayError, Rules, about, check, check_same
from assay.files import check_absent, decoding
from assay.settings import Config

Progress = Callable[[int, int], None]
Source = SourceSpec | RawImages
_NUM_AT_ONCE = 64  # images that are converted before they are written
_DARKER = 1e-3  # of the values of an image that may be too dark: dead pixels
_MAX_PIXELS = 2**26
_LUMA = np.array([0.299, 0.587, 0.114])
_OUR_RANGE = {"uint8": (0.0, 255.0), "float16": (-1.0, 1.0), "float32": (-1.0, 1.0)}


def _sides(value: Any) -> Any:
    """`64` or `48x64` -> (H, W)."""
    parts = str(value).lower().split("x") if isinstance(value, str | int) else value
    is_size = len(parts) <= 2 and all(str(part).isdecimal() for part in parts)
    size = (int(parts[0]), int(parts[-1])) if is_size else (0, 0)
    if not 1 <= math.prod(size) <= _MAX_PIXELS:
        raise AssayError(f"expected 64 or HEIGHTxWIDTH such as 48x64, at most {_MAX_PIXELS:,} pixels in all")
    return size


Pixels = Annotated[tuple[int, int], BeforeValidator(_sides)]


class PackConfig(Config):
    """How the images of all sources become a store."""

    size: Pixels | None = Field(
        None, examples=["64", "48x64"], description="Size in pixels, (H, W). Default: that of the first image."
    )
    fit: Literal["exact", "crop", "resize"] = Field(
        "exact",
        description="Images of another size: reject them, cut the size out of their centre, or crop them to "
        "its shape and resize (as EDM's center-crop).",
    )
    patch: Pixels | None = Field(
        None, examples=["64", "48x64"], description="Cut large images into patches of this size, (H, W)."
    )
    stride: int | None = Field(None, ge=1, description="Pixels from one patch to the next. Default: its width.")
    colour: Literal["keep", "grey", "colour"] = Field("keep", description="Make images grey or colour.")
    dtype: DType | None = Field(
        None, description="Type of stored values. Default: uint8 if all files have 8 bits, else float32."
    )
    classes: bool = Field(False, description="Keep classes, from labels or from the names of subfolders.")
    skip_bad: bool = Field(False, description="Skip images that cannot be packed, and list them.")
    overwrite: bool = Field(False, description="Replace a store of this name, once the new one is written.")

    def rules(self) -> Rules:
        """Cropping needs a size, and a stride patches."""
        error = AssayError("is needed to crop or resize images", key="size", cure="give size = 64")
        yield self.fit != "exact" and self.size is None, error
        error = AssayError("is the distance of patches", key="stride", cure="give patch too")
        yield self.stride is not None and self.patch is None, error


class PackReport(NamedTuple):
    """The finished store, the images that were left out and why, and what the user should know."""

    store: Store
    skipped: dict[str, AssayError]
    warnings: tuple[str, ...]


class _Layout(NamedTuple):
    """What the first image decides for all images of a store."""

    shape: tuple[int, int, int]  # (C, H, W)
    dtype: DType
    value_range: tuple[float, float]


class _Job(NamedTuple):
    """Image i of a source, as a store calls it."""

    raw: RawImages
    i: int
    source: int  # its number
    name: str
    group: int


def pack(
    sources: Source | Sequence[Source],
    path: Path,
    config: PackConfig | None = None,
    progress: Progress | None = None,
) -> PackReport:
    """Write the images of sources to a store at `path`. `progress` is called with (images done, in all)."""
    config, path = config or PackConfig(), Path(path)
    target = path
    if config.overwrite and path.exists():
        path = path.resolve()
        target, old = (path.with_name(f"{path.name}-{word}") for word in ("new", "old"))
        check_absent(old)
        _check_ours(path)
    check_absent(target)  # before any long work
    many = [sources] if isinstance(sources, SourceSpec | RawImages) else sources
    raws = [open_source(source, config) for source in many]
    names = [raw.name for raw in raws]
    titles = [n if names.count(n) == 1 else f"{i}-{n}" for i, n in enumerate(names, 1)]
    name, class_names = "+".join(titles), _check_alike(raws, "+".join(titles), config.classes)
    if config.dtype is None and len(raws) > 1 and not all(map(_begins_with_bytes, raws)):
        config = config.model_copy(update={"dtype": "float32"})
    (jobs, twins), skipped = _join_twins(_jobs(raws, titles)), dict[str, AssayError]()
    notes = Notes(titles, in_files=raws[0].sensor is None, twins=twins)
    converted = _convert_all(jobs, config, skipped, progress)
    first = next(converted, None)
    if first is None:
        cure = str(next(iter(skipped.values())))
        raise AssayError(f"none of its {len(jobs)} images can be packed", path=name, cure=cure)

    def noted() -> Iterator[PackedImage]:
        for image, note, _ in chain([first], converted):
            notes.add(note)
            if image.sigma_map is not None and len(raws) > 1:  # other sources may have one for each channel
                image = replace(image, sigma_map=np.broadcast_to(image.sigma_map, image.values.shape))
            yield image

    store = write_store(target, name, noted(), *first[2], class_names, warnings=notes.warnings)
    if target != path:
        _check_ours(path)  # which may have changed meanwhile
        shutil.copymode(path, target)  # private images stay private
        os.replace(path, old)
        os.replace(target, path)
        shutil.rmtree(old)
        store = Store(path)
    return PackReport(store, skipped, store.meta.warnings)


def _check_ours(path: Path) -> None:
    """Reject to replace anything but a store; one whose images are damaged is a store too."""
    ours = {"meta.json", *read_meta(path).checksums}
    if others := sorted(file.name for file in path.iterdir() if file.name not in ours):
        what = f"holds {others[0]}, which is not of a store"
        raise AssayError(what, path=path, cure="move it elsewhere, or choose another name")


def open_source(source: Source, config: PackConfig) -> RawImages:
    """Open a source, and add what the user knows about it; patches are cut if asked for."""
    raw = source if isinstance(source, RawImages) else _with_noise(open_images(source), source, config)
    if config.patch is not None:
        raw = cut_patches(raw, config.patch, config.stride or config.patch[1])
    return raw if config.classes else replace(raw, label=None, class_names=())


def _with_noise(raw: RawImages, spec: SourceSpec, config: PackConfig) -> RawImages:
    """The images with the range and the noise that a source states."""
    if spec.gain is not None and spec.sigma is None and raw.noise is not clean:
        raise AssayError("has noise levels of its own, and a sensor's", path=spec.path, key="gain")
    value_range = spec.range or raw.value_range
    raw = replace(raw, value_range=value_range, sensor=spec.sensor)
    if spec.sigma is not None or spec.sensor is not None:
        level = Level(spec.sensor.sigma_tn, None, scaled=True) if spec.sensor else Level()
        level = level if spec.sigma is None else Level(spec.sigma, None, spec.scaled)
        return replace(raw, noise=lambda i: level)
    if spec.map is not None:
        return with_map(raw, spec.map, spec.scaled)
    if spec.levels is None:
        return raw
    levels = read_levels(spec.levels, raw.names, spec.scaled)

    def checked(i: int) -> Level:
        if isinstance(level := levels[i], AssayError):
            raise level
        return level

    for i in range(0 if config.skip_bad else len(levels)):
        checked(i)  # before any long work
    return replace(raw, noise=checked)


def _check_alike(raws: Sequence[RawImages], name: str, needs_classes: bool) -> tuple[str, ...]:
    """The classes of all sources; an error if they cannot be in one store."""
    class_names = next((raw.class_names for raw in raws if raw.class_names), ())
    differ = any(raw.class_names not in ((), class_names) for raw in raws)
    what, cure = "has sources with different classes", "pack without classes"
    rules = [(differ, AssayError(what, path=name, key="classes", cure=cure))]
    cure = "sort the files into a folder for each class, or pack without classes"
    rules += [
        (needs_classes and not class_names, AssayError("has no classes", path=name, key="classes", cure=cure))
    ]
    what, cure = "is the name of a folder, which is not UTF-8", "rename it"
    for label in (name, *class_names):
        rules += [(_printable(label) != label, AssayError(what, path=_printable(label), cure=cure))]
    what = "images that are stabilised and others cannot be in one store"
    cure = "give all sources the same gain, read_noise, black and range"
    check([*rules, (len({raw.sensor for raw in raws}) > 1, AssayError(what, key="gain", cure=cure))])
    return class_names


def _printable(name: str) -> str:
    """A file's name with the bytes that are not UTF-8 as escapes, since nothing can print or store them."""
    return os.fsencode(name).decode(errors="backslashreplace")


def _jobs(raws: Sequence[RawImages], titles: Sequence[str]) -> list[_Job]:
    """The images of all sources, one after the other; if there are several, names begin with the source."""
    jobs: list[_Job] = []
    num_groups = 0
    for source, raw in enumerate(raws):
        above = f"{titles[source]}/" if len(raws) > 1 else ""
        group = num_groups + (np.arange(len(raw.names)) if raw.group is None else raw.group)
        jobs += [_Job(raw, i, source, above + name, int(group[i])) for i, name in enumerate(raw.names)]
        num_groups = int(group.max(initial=num_groups - 1)) + 1
    return jobs


def _join_twins(jobs: list[_Job]) -> tuple[list[_Job], str]:
    """Hold images of several sources with one name and scene out together: a noisy version tells a lot."""
    first, copies = dict[str, _Job](), list[list[Tensor]]()
    named = [(first.setdefault(re.sub(r"\.\w+(?=\[|$)", "", job.raw.names[job.i]), job), job) for job in jobs]
    pairs = [pair for pair in named if pair[0].source != pair[1].source]
    for k in spread(len(pairs), _NUM_AT_ONCE):
        with suppress(ValueError, OSError):  # reported when its turn comes
            images = (torch.from_numpy(job.raw.load(job.i).astype(np.float32)) for job in pairs[k])
            copies.append([small_copy(x.movedim(2, 0)[None])[0] for x in images])
    if not are_versions(copies):
        return jobs, ""  # of names alone nothing follows: files may be numbered
    group = {twin.group: job.group for job, twin in pairs}
    twin = f"{pairs[0][1].name} of {pairs[0][0].name}"
    told = f"{len(pairs):,} images show scenes of other sources ({twin}): they are held out together, but "
    told += "noisy ones teach no new scene; for a price, have noisy images of other scenes than the clean ones"
    return [job._replace(group=group.get(job.group, job.group)) for job in jobs], told


def _begins_with_bytes(raw: RawImages) -> bool:
    """Whether the first image that can be read has 8 bits."""
    for i in range(len(raw.names)):
        with suppress(ValueError, OSError):  # reported when its turn comes
            return raw.pixels(i).dtype == np.uint8
    return True


_Converted = tuple[PackedImage, Note, _Layout]


def _convert_all(
    jobs: list[_Job], config: PackConfig, skipped: dict[str, AssayError], progress: Progress | None
) -> Iterator[_Converted]:
    """Convert images on all cores, in their order; the first that can be packed decides what all must be."""
    layout, num_done = None, 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        while some := jobs[num_done : num_done + (1 if layout is None else _NUM_AT_ONCE)]:
            converted = [pool.submit(_convert, job, config, layout) for job in some]
            for job, future in zip(some, converted, strict=True):
                num_done += 1
                try:
                    with about(_printable(job.name)):
                        found = future.result()
                    layout = found[2]
                    yield found
                except AssayError as error:
                    skipped[job.name] = error
                    if not config.skip_bad:
                        leave = "or leave it out with skip_bad = true" * (error.key not in ("sigma", "gain"))
                        parts = filter(None, [error.cure, leave])
                        error.cure = "; ".join(parts)
                        raise
                if progress is not None:
                    progress(num_done, len(jobs))


def _convert(job: _Job, config: PackConfig, layout: _Layout | None) -> _Converted:
    """An image of a file -> an image of a store, with its level where black to white is 2."""
    raw, i, found = job.raw, job.i, dict[str, tuple[float, ...]]()
    if _printable(job.name) != job.name:
        raise AssayError("has a name that is not UTF-8", cure="rename it")
    with decoding(raw.names[i], "check the file, or leave it out"):
        pixels = raw.pixels(i)
    given = raw.noise(i)
    level = given.highest()
    noisy = bool(level.sigma > 0)
    if raw.has_opacity and pixels.shape[2] in (2, 4):
        if noisy and is_transparent(pixels):
            what = "is noisy, and flattening its transparency would change its noise"
            raise AssayError(what, cure="save it opaque")
        found[OPACITY] = ()
        pixels = flatten(pixels, "")
    if raw.value_range is None and pixels.dtype not in (np.uint8, np.uint16):
        what = f"has values from {pixels.min():.4g} to {pixels.max():.4g}, and no known black and white"
        raise AssayError(what, key="range", cure="name the values of black and white, e.g. range=0,255")
    units = value_range = raw.value_range or (0.0, float(np.iinfo(pixels.dtype).max))
    files = pixels
    if raw.sensor is not None:
        stabilise = raw.sensor.noisy_to_images if noisy else raw.sensor.clean_to_images
        pixels, value_range = stabilise(pixels).astype(np.float32), (-1.0, 1.0)
    sigma, usable_from = level.in_range(*value_range)
    unit = 1.0 if level.scaled else (value_range[1] - value_range[0]) / 2  # of what is stated
    size = config.size or (layout.shape[1:] if layout else (pixels.shape[0], pixels.shape[1]))
    sigma_map = None
    if isinstance(given.sigma, np.ndarray):
        levels = given.sigma.astype(np.float64) / unit
        if levels.shape[:2] != pixels.shape[:2] or levels.shape[2] not in (1, pixels.shape[2]):
            what = f"has pixels {pixels.shape} (H, W, C) and a map of the noise {levels.shape}"
            raise AssayError(what, key="map", cure="give a level for each pixel")
        sigma_map = _fit(levels, size, config.fit, noisy).transpose(2, 0, 1)
    values, layout = _convert_pixels(pixels, value_range, noisy, size, config, layout)
    low, high = layout.value_range
    x = (values.astype(np.float64) - low) * (2 / (high - low)) - 1
    if noisy:
        _check_noise(x, sigma, sigma_map, unit, raw.sensor)
        found |= {LOSSY: ()} if is_lossy(job.name) else {}
    if raw.sensor and (share := raw.sensor.share_darker(files)) > _DARKER:
        found[DARKER] = share, raw.sensor.black
    looks = look_at(x, sigma if sigma_map is None else sigma_map, i, len(raw.names), files)
    looks.found.update(found)
    note = Note(job.name, sigma, units, hash(values.tobytes()), job.source, job.group, looks)
    label = -1 if raw.label is None else int(raw.label[i])
    columns = sigma, label, usable_from, raw.sensor or units, job.group, sigma_map
    return PackedImage(job.name, values, *columns), note, layout


def _convert_pixels(
    pixels: np.ndarray,
    value_range: tuple[float, float],
    noisy: bool,
    size: tuple[int, int],
    config: PackConfig,
    layout: _Layout | None,
) -> tuple[np.ndarray, _Layout]:
    """Pixels (H, W, C) without opacity, black and white at `value_range` -> values (C, H, W) of the store."""
    check_finite(pixels, cure="remove the image or repair it")
    eight_bit = pixels.dtype == np.uint8
    values = _fit(_recolour(pixels, config.colour, noisy), size, config.fit, noisy).transpose(2, 0, 1)
    dtype = config.dtype or ("uint8" if eight_bit else "float32")
    if layout is None:
        kept = value_range if dtype == "uint8" and eight_bit else _OUR_RANGE[dtype]
        layout = _Layout((values.shape[0], *size), dtype, kept)
    what, cure = "has not as many channels as the images before it", "choose colour = grey or colour = colour"
    check_same(len(values), layout.shape[0], what, key="colour", cure=cure)
    what = "is not 8-bit like the images before it, or the other way round"
    cure = "make each kind a source (12 bits: with range=0,4095), or use float32 if all bits are used"
    check_same(dtype, layout.dtype, what, key="dtype", cure=cure)
    if layout.dtype == "uint8" and values.dtype == np.uint8 and value_range == layout.value_range:
        return values, layout
    low, high = value_range
    x = (values.astype(np.float64) - low) * (2 / (high - low)) - 1
    if layout.dtype == "uint8" and not noisy:
        black, white = layout.value_range
        return np.rint(black + (x + 1) * (white - black) / 2).clip(0, 255).astype(np.uint8), layout
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = x.astype(layout.dtype)
    if layout.dtype == "uint8" or not np.isfinite(rounded).all():
        why = "has noise" if noisy else f"has values up to {np.abs(x).max():.3g} where white is 1"
        raise AssayError(f"{why}, which {layout.dtype} cannot hold", key="dtype", cure="use float32")
    return rounded, layout


def _recolour(pixels: np.ndarray, colour: str, noisy: bool) -> np.ndarray:
    """Grey <-> colour, as asked for."""
    num_channels = pixels.shape[2]
    wanted = {"keep": num_channels, "grey": 1, "colour": 3}[colour]
    if wanted == num_channels:
        return pixels
    if noisy or num_channels not in (1, 3):
        what = f"has {num_channels} channels{' and noise, which would change' if noisy else ''}"
        raise AssayError(f"cannot be made {colour}: it {what}", key="colour", cure="use keep")
    if wanted == 3:
        return pixels.repeat(3, axis=2)
    grey = (pixels @ _LUMA)[..., None]
    return (np.rint(grey) if pixels.dtype.kind == "u" else grey).astype(pixels.dtype)


def _fit(pixels: np.ndarray, size: tuple[int, int], how: str, noisy: bool) -> np.ndarray:
    """Give (H, W, C) the size asked for."""
    height, width, num_channels = pixels.shape
    if (height, width) == size:
        return pixels
    scale = min(height / size[0], width / size[1]) if how == "resize" else 1.0
    box = round(size[0] * scale), round(size[1] * scale)
    top, left = (height - box[0]) // 2, (width - box[1]) // 2
    what = f"has {height} x {width} pixels, not {size[0]} x {size[1]}"
    if how == "exact" or top < 0 or left < 0:
        raise AssayError(what, key="size", cure="give one that fits into the images, with fit = crop or resize")
    if scale != 1 and noisy:
        what = f"{what}; it is noisy, and resizing would change its noise"
        raise AssayError(what, key="fit", cure="use crop")
    cropped = pixels[top : top + box[0], left : left + box[1]]
    if box == size:
        return cropped
    channels = [Image.fromarray(cropped[..., c].astype(np.float32)) for c in range(num_channels)]
    scaled = np.stack([np.asarray(c.resize(size[::-1], Image.Resampling.LANCZOS)) for c in channels], 2)
    if pixels.dtype.kind == "u":
        scaled = np.rint(scaled).clip(0, np.iinfo(pixels.dtype).max)
    return scaled.astype(pixels.dtype)


def _check_noise(
    x: np.ndarray, sigma: float, sigma_map: np.ndarray | None, unit: float, sensor: Stabilised | None
) -> None:
    """Reject noise that the pixels (C, H, W) rule out; its own `unit` is this large."""
    if sigma_map is not None:
        sigma = math.sqrt(float(np.square(np.minimum(sigma_map, sigma)).mean()))
    if rules_out(x, sigma):
        what = f"varies by {unit * float(np.std(x)):.3g}, less than its noise of {unit * sigma:.3g}"
        if min(x.shape[1:]) >= MIN_SIDE:
            measured = float(blind_net().levels(torch.from_numpy(x.astype(np.float32))[None])[0])
            what += f" (it measures {unit * measured:.3g})"
        if sensor is not None:
            cure = f"check gain, read_noise, range and black, the value of no light ({sensor.black:g})"
            raise AssayError(f"stabilised, it {what}", key="gain", cure=cure)
        units = "as black to white is 2 (scaled=true)" if unit == 1 else "in the units of the files"
        raise AssayError(what, key="sigma", cure=f"check it and range; sigma is {units}")
