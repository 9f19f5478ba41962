"""Packing: any readable images, from one source or several -> a store.

Nothing is guessed. Images keep their size and colours unless you ask otherwise, float pixels need their
value range named, and what would change the noise of a noisy image (resizing, recolouring, flattening
transparency, rounding to 8 bits) is rejected. Noise levels are given in the units of the files and converted
with the value range, sigma_tn = 2 sigma / (high - low); a level that the pixels rule out is rejected.
"""

import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.ndimage import uniform_filter

from assay.data.convert import Layout, PackConfig, convert, fit, size_of
from assay.data.decode import flatten, is_transparent
from assay.data.levels import Level, read_levels
from assay.data.notes import CLIPPED, DARK, FAINT, FLATTENED, KERNEL, OPAQUE, Note, Notes, measure, share_at
from assay.data.operators import with_fewer_pixels, with_kernel, with_kspace
from assay.data.readers import RawImages, clean, cut_patches, open_images, printable, with_map
from assay.data.shards import declare_job, is_store, join_shards, shard_path
from assay.data.spec import FILES, SourceSpec
from assay.data.store import PackedImage, Store, open_one, write_store
from assay.data.units import Stabilised
from assay.errors import AssayError
from assay.files import check_absent, content_hash, decoding

Progress = Callable[[int, int], None]
Source = SourceSpec | RawImages
_NUM_AT_ONCE = 64  # images that are converted before they are written


class PackReport(NamedTuple):
    """The finished store, the images that were left out and why, and what the user should know."""

    store: Store
    skipped: dict[str, AssayError]
    warnings: tuple[str, ...]


def pack(
    sources: Source | Sequence[Source],
    path: Path,
    config: PackConfig | None = None,
    progress: Progress | None = None,
) -> PackReport:
    """Write the images of sources to a store at `path`. `progress` is called with (images done, in all)."""
    config, path = config or PackConfig(), Path(path)
    if not config.overwrite:
        check_absent(path)  # before any long work
    images = Images(sources, config)
    return _write(images, range(len(images.names)), path, config, progress)


def pack_shards(
    sources: SourceSpec | Sequence[SourceSpec],
    path: Path,
    num_shards: int,
    only: int | None = None,
    config: PackConfig | None = None,
    progress: Progress | None = None,
) -> list[PackReport]:
    """Write images to a store of several shards, each an equal part; those that are there are not made again.

    `only` makes one of them, counted from 1, so that several processes can share the work. The store is
    complete with its last shard. Patches of one picture stay in one shard. All parts are made of the same
    contents with the same settings, or rejected.
    """
    if is_store(path):
        raise AssayError("exists already and is complete", path=path, cure="remove it, or choose another name")
    config = config or PackConfig()
    specs = [sources] if isinstance(sources, SourceSpec) else sources
    images = Images(specs, config)
    begins = np.append(np.flatnonzero(np.diff(images.group, prepend=-1)), len(images.names))  # of pictures
    borders = np.linspace(0, len(images.names), num_shards + 1).round().astype(int)
    borders = begins[np.searchsorted(begins, borders)]
    if not 1 <= (only or 1) <= num_shards or not np.diff(borders).all():
        what = f"{only or 1}/{num_shards} is no part of {len(begins) - 1} pictures"
        raise AssayError(what, key="shards", cure="give a part of at most as many as there are pictures")
    # Where files are is no matter, but what they hold.
    settings = [spec.model_dump(exclude=set(FILES), mode="json") for spec in specs]
    files = [Path(file) for spec in specs for key in FILES if (file := getattr(spec, key)) is not None]
    job = content_hash(num_shards, config.model_dump(mode="json"), settings)
    declare_job(path, job, [file for file in files if file.exists()])
    reports = []
    for number in range(1, num_shards + 1) if only is None else [only]:
        target = shard_path(path, number, num_shards)
        if not is_store(target):
            part = range(borders[number - 1], borders[number])
            reports.append(_write(images, part, target, config, progress))
    join_shards(path, images.name, num_shards)
    return reports


def open_source(source: Source, config: PackConfig) -> RawImages:
    """Open a source, and add what the user knows about it; patches are cut if asked for."""
    raw = source if isinstance(source, RawImages) else open_images(source)
    spec = SourceSpec(path=raw.name) if isinstance(source, RawImages) else source
    if spec.gain is not None and spec.sigma is None and raw.noise is not clean:
        raise AssayError("has noise levels of its own, and a sensor's", path=spec.path, key="gain")
    if isinstance(source, SourceSpec):
        value_range = spec.range or raw.value_range
        raw = replace(raw, value_range=value_range, sensor=spec.sensor, quantile=spec.quantile)
    if spec.sigma is not None:
        level = Level(spec.sigma, None, spec.scaled)
        raw = replace(raw, noise=lambda i: level)
    elif spec.sensor is not None:
        level = Level(spec.sensor.sigma_tn, None, scaled=True)
        raw = replace(raw, noise=lambda i: level)
    if spec.levels is not None:
        levels = read_levels(spec.levels, raw.names, spec.scaled)
        for each in levels if not config.skip_bad else ():
            _checked(each)  # before any long work
        raw = replace(raw, noise=lambda i: _checked(levels[i]))
    if spec.map is not None:
        raw = with_map(raw, spec.map, spec.scaled)
    if spec.kernel is not None:
        raw = with_kernel(raw, spec.kernel)
    if spec.kspace is not None:
        raw = with_kspace(raw, spec.kspace)
    if config.patch is not None:
        raw = cut_patches(raw, config.patch, config.stride or config.patch[1])
    if spec.downsampled is not None:
        raw = with_fewer_pixels(raw, spec.downsampled)
    return raw if config.classes else replace(raw, label=None, class_names=())


class Images:
    """The images of all sources, one after the other; if there are several, names begin with the source."""

    def __init__(self, sources: Source | Sequence[Source], config: PackConfig) -> None:
        many = [sources] if isinstance(sources, SourceSpec | RawImages) else sources
        self.raws = [open_source(source, config) for source in many]
        names = [raw.name for raw in self.raws]
        self.titles = [n if names.count(n) == 1 else f"{i}-{n}" for i, n in enumerate(names, 1)]
        self.name = "+".join(self.titles)
        self.place = [(n, i) for n, raw in enumerate(self.raws) for i in range(len(raw.names))]
        above = [f"{title}/" if len(self.raws) > 1 else "" for title in self.titles]
        self.names = [above[n] + self.raws[n].names[i] for n, i in self.place]
        groups = [np.arange(len(raw.names)) if raw.group is None else raw.group for raw in self.raws]
        offsets = np.cumsum([0, *(int(group.max(initial=-1)) + 1 for group in groups[:-1])])
        self.group = np.concatenate([group + offset for group, offset in zip(groups, offsets, strict=True)])
        self.class_names = next((raw.class_names for raw in self.raws if raw.class_names), ())
        if any(raw.class_names not in ((), self.class_names) for raw in self.raws):
            what, cure = "has sources with different classes", "pack without classes"
            raise AssayError(what, path=self.name, key="classes", cure=cure)
        if odd := [label for label in (self.name, *self.class_names) if printable(label) != label]:
            what = "is the name of a folder, which is not UTF-8"
            raise AssayError(what, path=printable(odd[0]), cure="rename it")
        if len({raw.sensor for raw in self.raws}) > 1:
            what = "images that are stabilised and others cannot be in one store"
            cure = "give all sources the same gain, read_noise, black and range"
            raise AssayError(what, key="gain", cure=cure)


class _Converted(NamedTuple):
    image: PackedImage
    note: Note
    layout: Layout


def _write(
    images: Images, numbers: range, path: Path, config: PackConfig, progress: Progress | None
) -> PackReport:
    """Convert these images, and write those that can be packed."""
    target = path
    if config.overwrite and is_store(path):
        _check_ours(path)
        target = path.with_name(f"{path.name}-new")
    if config.dtype is None and len(images.raws) > 1 and not all(map(_begins_with_bytes, images.raws)):
        config = config.model_copy(update={"dtype": "float32"})
    notes, skipped = Notes(images.titles, images.raws[0].sensor), dict[str, AssayError]()
    converted = _convert_all(images, numbers, config, skipped, progress)
    first = next(converted, None)
    if first is None:
        cure = str(next(iter(skipped.values())))
        raise AssayError(f"none of its {len(numbers)} images can be packed", path=images.name, cure=cure)

    def noted() -> Iterator[PackedImage]:
        for each in chain([first], converted):
            notes.add(each.note)
            yield each.image

    store = write_store(target, images.name, noted(), *first.layout, images.class_names)
    if target != path:
        _check_ours(path)  # which may have changed meanwhile
        old = path.with_name(f"{path.name}-old")
        check_absent(old)
        os.replace(path, old)
        os.replace(target, path)
        shutil.rmtree(old)
        store = open_one(path)
    return PackReport(store, skipped, tuple(notes.warnings()))


def _check_ours(path: Path) -> None:
    """Reject to replace a folder that holds more than one store."""
    ours = {"meta.json", *open_one(path).meta.checksums} if (path / "meta.json").is_file() else set()
    if others := sorted(file.name for file in path.iterdir() if file.name not in ours):
        what = f"holds {others[0]}, which is not of a plain store"
        raise AssayError(what, path=path, cure="move it elsewhere, or choose another name")


def _begins_with_bytes(raw: RawImages) -> bool:
    """Whether the first image that can be read has 8 bits."""
    for i in range(len(raw.names)):
        with suppress(ValueError, OSError):  # reported when its turn comes
            return raw.pixels(i).dtype == np.uint8
    return True


def _convert_all(
    images: Images,
    numbers: range,
    config: PackConfig,
    skipped: dict[str, AssayError],
    progress: Progress | None,
) -> Iterator[_Converted]:
    """Convert images on all cores, in their order; the first that can be packed decides what all must be."""
    layout: Layout | None = None
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        while numbers:
            num_at_once = 1 if layout is None else _NUM_AT_ONCE
            some, numbers = numbers[:num_at_once], numbers[num_at_once:]
            for k, found in zip(some, pool.map(partial(_attempt, images, config, layout), some), strict=True):
                if isinstance(found, _Converted):
                    layout = found.layout
                    yield found
                elif config.skip_bad:
                    skipped[images.names[k]] = found
                else:
                    found.cure = "; ".join(filter(None, [found.cure, "or leave it out with skip_bad"]))
                    raise found
                if progress is not None:
                    progress(k + 1, len(images.names))


def _attempt(images: Images, config: PackConfig, layout: Layout | None, k: int) -> _Converted | AssayError:
    try:
        return _convert_one(images, config, layout, k)
    except AssayError as error:
        error.path = error.path or printable(images.names[k])
        return error


def _convert_one(images: Images, config: PackConfig, layout: Layout | None, k: int) -> _Converted:
    """One image with its level where black to white is 2, what was noted, and what all images must be."""
    (number, i), name = images.place[k], images.names[k]
    raw, found = images.raws[number], dict[str, float]()
    if printable(name) != name:
        raise AssayError("has a name that is not UTF-8", path=printable(name), cure="rename it")
    with decoding(raw.names[i], "check the file, or leave it out"):
        pixels = raw.pixels(i)
    level, levels = _level_of(raw, i, pixels)
    noisy = level.sigma > 0
    if raw.has_opacity and pixels.shape[2] in (2, 4):
        pixels = _without_opacity(pixels, noisy, found)
    units = value_range = _range_of(raw, pixels)
    files = pixels
    if raw.sensor is not None:
        pixels, value_range = _stabilised(raw.sensor, pixels, noisy, found), (-1.0, 1.0)
    sigma, usable_from = level.in_range(*value_range)
    size = size_of(pixels.shape, config, layout)
    values, layout = convert(pixels, value_range, noisy, config, layout)
    sigma_map = kernel = None
    if levels is not None:
        unit = 1 if level.scaled else 2 / (value_range[1] - value_range[0])
        sigma_map = fit(levels * unit, size, config.fit, noisy).transpose(2, 0, 1)
    if raw.operator is not None:
        kernel, missing = raw.operator(i, (pixels.shape[0], pixels.shape[1]), size)
        values = _centred(values, kernel, sigma, value_range, layout, found)
        if missing.any():
            sigma_map = np.where(missing, np.inf, np.full((1, 1, 1), sigma) if sigma_map is None else sigma_map)
    if sigma_map is not None and len(images.raws) > 1:  # others may have one for each channel
        sigma_map = np.broadcast_to(sigma_map, values.shape)
    x = layout.scaled(values)
    if noisy and _check_noise(x, sigma, sigma_map, kernel):
        found[FAINT] = 1.0
    if noisy and files.dtype == np.uint8:
        found[CLIPPED] = share_at(x, (0, 255), units)
    note = Note(
        number,
        sigma,
        (float(files.min()), float(files.mean()), float(files.max())),
        units,
        content=hash(values.tobytes()),
        is_deep=files.dtype == np.uint16 and raw.value_range is None,
        found=found,
        measured=measure(x, i, len(raw.names)) if sigma_map is kernel is None else None,
    )
    label, group = -1 if raw.label is None else int(raw.label[i]), int(images.group[k])
    columns = sigma, label, usable_from, raw.sensor or units, group, sigma_map, kernel
    return _Converted(PackedImage(name, values, *columns), note, layout)


def _checked(level: Level | AssayError) -> Level:
    if isinstance(level, AssayError):
        raise level
    return level


def _level_of(raw: RawImages, i: int, pixels: np.ndarray) -> tuple[Level, np.ndarray | None]:
    """The level of an image, and the map of its noise (H, W, C or 1) that it is from, if it has one."""
    found = raw.noise(i)
    if isinstance(found, Level):
        return found, None
    levels = found.sigma.astype(np.float64)
    if levels.shape[:2] != pixels.shape[:2] or levels.shape[2] not in (1, pixels.shape[2]):
        what = f"has pixels {pixels.shape} (H, W, C) and a map of the noise {levels.shape}"
        raise AssayError(what, key="map", cure="give a level for each pixel")
    return found._replace(sigma=levels).level(raw.quantile), levels


def _without_opacity(pixels: np.ndarray, noisy: bool, found: dict[str, float]) -> np.ndarray:
    """The pixels of a picture without its opacity."""
    if not is_transparent(pixels):
        found[OPAQUE] = 1.0
        return pixels[..., :-1]
    if noisy:
        what = "is noisy, and flattening its transparency would change its noise"
        raise AssayError(what, cure="save it opaque")
    found[FLATTENED] = 1.0
    return flatten(pixels, "")


def _range_of(raw: RawImages, pixels: np.ndarray) -> tuple[float, float]:
    """The values of black and white in a file."""
    if raw.value_range is not None:
        return raw.value_range
    if pixels.dtype not in (np.uint8, np.uint16):
        what = f"has values from {pixels.min():.4g} to {pixels.max():.4g}, and no known black and white"
        raise AssayError(what, key="range", cure="name the values of black and white, e.g. range=0,255")
    return 0.0, float(np.iinfo(pixels.dtype).max)


def _stabilised(sensor: Stabilised, pixels: np.ndarray, noisy: bool, found: dict[str, float]) -> np.ndarray:
    """Images of a sensor between -1 and 1; of noisy ones the share of pixels with too few photons is noted."""
    if not noisy:
        return sensor.clean_to_images(pixels).astype(np.float32)
    # The mean count of a pixel is not known; that of its neighbourhood is nearer to it than its own count.
    counts = uniform_filter(sensor.counts(pixels), (5, 5, 1))
    found[DARK] = float((counts < sensor.smallest_count()).mean()) if sensor.smallest_count() > 0 else 0.0
    return sensor.noisy_to_images(pixels).astype(np.float32)


def _centred(
    values: np.ndarray,
    kernel: np.ndarray,
    sigma: float,
    value_range: tuple[float, float],
    layout: Layout,
    found: dict[str, float],
) -> np.ndarray:
    """Values of the store such that y = k * x holds, where 0 is the middle of black and white.

    The files have it where 0 is 0. With b = (low + high) / (high - low) the two differ by b (1 - sum k). The
    sum is noted if it is neither 1 nor, as of lines of k-space without the mean, 0.
    """
    low, high = value_range
    total = float(kernel.sum())
    lacks_mean = abs(total) < 1e-6 * float(np.abs(kernel).sum())
    shift = (low + high) / (high - low) * (1 - total)
    if sigma == 0:
        what = "was convolved with a kernel and has no noise, and would be treated as clean"
        raise AssayError(what, key="sigma", cure="give it a small level, e.g. that of rounding")
    if abs(total - 1) > 0.01 and not lacks_mean:
        found[KERNEL] = total
    if abs(shift) < 1e-6:
        return values
    if layout.dtype == "uint8":
        what = f"has a kernel or mask that sums to {total:.4g}, not to 1"
        raise AssayError(what, key="dtype", cure="divide it by its sum, or use float32")
    return (values + shift).astype(layout.dtype)


def _check_noise(x: np.ndarray, sigma: float, sigma_map: np.ndarray | None, kernel: np.ndarray | None) -> bool:
    """Reject noise that the pixels rule out; whether images (C, H, W) vary less by content than by noise.

    The variance of n pixels with noise sigma alone is sigma^2 up to sigma^2 sqrt(2 / n); less by six of these
    deviations rules the level out. Missing pixels do not count. At a frequency that was measured the noise has
    a power of sigma^2 times the number of pixels; less than a hundredth of it at many rules a mask out.
    """
    seen, noise = x, sigma
    if sigma_map is not None:
        is_seen = np.isfinite(np.broadcast_to(sigma_map, x.shape))
        if not is_seen.any():
            raise AssayError("has no pixel left, some because of the kernel", cure="leave it out")
        seen = x[is_seen]
        levels = np.minimum(np.broadcast_to(sigma_map, x.shape)[is_seen], sigma)
        noise = math.sqrt(float(np.square(levels).mean()))
    if kernel is not None:
        passes = np.abs(np.fft.fft2(kernel)) > 1e-6
        noise *= math.sqrt(passes.mean())  # none at frequencies filled with 0
        if seen is x:
            power = np.square(np.abs(np.fft.fft2(x)))[:, passes]
            is_empty = power < 0.01 * sigma**2 * x[0].size
            if is_empty.sum() > 4 and is_empty.mean() > 0.1:
                what = f"has nothing at {is_empty.mean():.0%} of the frequencies that its mask calls measured"
                cure = "give the mask in the order of numpy's fft2, perhaps by np.fft.ifftshift"
                raise AssayError(what, key="kspace", cure=cure)
    variance = float(np.var(seen))
    if variance < noise**2 * (1 - 6 * math.sqrt(2 / seen.size)):
        what = f"varies by {math.sqrt(variance):.3g}, less than its noise of {noise:.3g} (black to white is 2)"
        raise AssayError(what, key="sigma", cure="check it and range; sigma is in the units of the files")
    return variance < 2 * noise**2
