"""Packing: any readable images, from one source or several -> a store.

Nothing is guessed. Images keep their size and colours unless you ask otherwise, float pixels need their
value range named, and what would change the noise of a noisy image (resizing, recolouring, flattening
transparency, rounding to 8 bits) is rejected. Noise levels are given in the units of the files and converted
with the value range, sigma_tn = 2 sigma / (high - low); a level that the pixels rule out is rejected.
"""

import contextlib
import math
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.ndimage import uniform_filter

from assay.data.convert import Layout, PackConfig, convert, fit, size_of
from assay.data.decode import flatten, is_transparent
from assay.data.levels import Level, read_levels
from assay.data.notes import Note, Notes, chosen, measure, share_at
from assay.data.operators import with_fewer_pixels, with_kernel, with_kspace
from assay.data.readers import RawImages, cut_patches, open_images, printable, with_map
from assay.data.shards import declare_job, is_store, join_shards, shard_path
from assay.data.spec import SourceSpec
from assay.data.store import PackedImage, Store, open_one, write_store
from assay.errors import AssayError
from assay.files import check_absent, content_hash, decoding, one_line

Progress = Callable[[int, int], None]
Source = SourceSpec | RawImages
_FILES = ("path", "levels", "map", "kernel", "kspace")  # of a source: what they hold counts, not where they are
_NUM_AHEAD = 64  # images loaded before they are needed


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
    only: range | None = None,
) -> PackReport:
    """Write the images of sources to a store at `path`; `only` some of them, counted over all sources.

    `progress` is called with (images done, images in all).
    """
    config = config or PackConfig()
    if not config.overwrite:
        check_absent(Path(path))  # before any long work
    return _write(Images(sources, config), Path(path), config, progress, only)


def _write(
    images: "Images", path: Path, config: PackConfig, progress: Progress | None, only: range | None
) -> PackReport:
    target = path
    if config.overwrite and is_store(path):
        _check_ours(path)
        target = path.with_name(f"{path.name}-new")
    if config.dtype is None and len(images.raws) > 1 and not all(map(_begins_with_bytes, images.raws)):
        config = config.model_copy(update={"dtype": "float32"})
    run = _Run(images, config, progress)
    packed = run.images(range(len(images)) if only is None else only)
    first = next(packed, None)
    if first is None or run.layout is None:
        cure = str(next(iter(run.skipped.values())))
        raise AssayError(f"none of its {len(images)} images can be packed", path=images.name, cure=cure)
    shape, dtype, value_range = run.layout
    store = write_store(
        target, images.name, chain([first], packed), shape, dtype, value_range, images.class_names
    )
    if target != path:
        _check_ours(path)
        old = path.with_name(f"{path.name}-old")
        check_absent(old)
        os.replace(path, old)
        os.replace(target, path)
        shutil.rmtree(old)
        store = open_one(path)
    return PackReport(store, run.skipped, tuple(run.notes.warnings()))


def _check_ours(path: Path) -> None:
    """Reject to replace a folder that holds more than the store."""
    if not (path / "meta.json").is_file():
        raise AssayError("is a store of several shards", path=path, cure="remove it, or choose another name")
    ours = {"meta.json", *open_one(path).meta.checksums}
    if others := sorted(file.name for file in path.iterdir() if file.name not in ours):
        raise AssayError(f"holds {others[0]}, which is not the store's", path=path, cure="move it elsewhere")


def pack_shards(
    sources: Source | Sequence[Source],
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
    images = Images(sources, config)
    if not 1 <= (only or 1) <= num_shards <= len(images):
        what = f"{only or 1}/{num_shards} is no part of {len(images)} images"
        raise AssayError(what, key="shards", cure="give a part of at most as many as there are images")
    many = [sources] if isinstance(sources, SourceSpec | RawImages) else sources
    specs = [source for source in many if isinstance(source, SourceSpec)]
    arrays = [source for source in many if isinstance(source, RawImages)]
    settings = [spec.model_dump(exclude=set(_FILES), mode="json") for spec in specs]
    labels = [[] if raw.label is None else raw.label.tolist() for raw in images.raws]
    pixels = [[raw.pixels(i).tobytes() for i in range(len(raw.names))] for raw in arrays]
    job = [
        num_shards,
        config.model_dump(mode="json"),
        settings,
        [images.name_of(k) for k in range(len(images))],
    ]
    files = [Path(file) for spec in specs for key in _FILES if (file := getattr(spec, key)) is not None]
    declare_job(path, content_hash(job, labels, pixels), [file for file in files if file.exists()])
    borders = np.linspace(0, len(images), num_shards + 1).round().astype(int)
    begins = np.append(np.flatnonzero(np.diff(images.group, prepend=-1)), len(images))
    borders = begins[np.searchsorted(begins, borders)]  # to where the next picture begins
    reports = []
    for number in range(1, num_shards + 1) if only is None else [only]:
        part, target = range(borders[number - 1], borders[number]), shard_path(path, number, num_shards)
        if is_store(target):
            continue
        if len(part) == 0:
            what = f"{num_shards} are more than the pictures that patches are cut from"
            raise AssayError(what, key="shards", cure="give fewer")
        reports.append(_write(images, target, config, progress, part))
    join_shards(path, images.name, num_shards)
    return reports


def open_source(source: Source, config: PackConfig) -> RawImages:
    """Open a source, and add what the user knows about it; patches are cut if asked for."""
    raw = open_images(source) if isinstance(source, SourceSpec) else source
    spec = source if isinstance(source, SourceSpec) else SourceSpec(path=raw.name)
    if isinstance(source, SourceSpec):
        if spec.gain is not None and spec.sigma is None and (raw.levels or raw.sigma_map):
            raise AssayError("has noise levels of its own, and a sensor's", path=spec.path, key="gain")
        value_range = spec.range or raw.value_range
        raw = replace(raw, value_range=value_range, sensor=spec.sensor, quantile=spec.quantile)
    if spec.sigma is not None:
        raw = replace(raw, levels=[Level(spec.sigma, None, spec.scaled)] * len(raw.names), sigma_map=None)
    if spec.levels is not None:
        raw = replace(raw, levels=read_levels(spec.levels, raw.names, spec.scaled), sigma_map=None)
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
    """The images of all sources, one after the other."""

    def __init__(self, sources: Source | Sequence[Source], config: PackConfig) -> None:
        many = [sources] if isinstance(sources, SourceSpec | RawImages) else sources
        self.raws = [open_source(source, config) for source in many]
        names = [raw.name for raw in self.raws]
        self.titles = [n if names.count(n) == 1 else f"{i}-{n}" for i, n in enumerate(names, 1)]
        self.name = "+".join(self.titles)
        self.class_names = next((raw.class_names for raw in self.raws if raw.class_names), ())
        self._starts = np.cumsum([0, *(len(raw.names) for raw in self.raws)])
        groups = [np.arange(len(raw.names)) if raw.group is None else raw.group for raw in self.raws]
        offsets = np.cumsum([0, *(int(group.max(initial=-1)) + 1 for group in groups[:-1])])
        self.group = np.concatenate([group + offset for group, offset in zip(groups, offsets, strict=True)])
        for raw in self.raws:
            if raw.class_names not in ((), self.class_names):
                what = f"has the classes {', '.join(raw.class_names)}, others {', '.join(self.class_names)}"
                raise AssayError(one_line(what), path=raw.name, key="classes", cure="pack without classes")
        for label in (self.name, *self.class_names):
            if printable(label) != label:
                what = "is the name of a folder, which is not UTF-8"
                raise AssayError(what, path=printable(label), cure="rename it")
        if len({raw.sensor for raw in self.raws}) > 1:
            what = "images that are stabilised and others cannot be in one store"
            raise AssayError(
                what, key="gain", cure="give all sources the same gain, read_noise, black and range"
            )

    def __len__(self) -> int:
        return int(self._starts[-1])

    def place(self, k: int) -> tuple[int, int]:
        """The source of image k, and its number there."""
        number = int(np.searchsorted(self._starts, k, side="right")) - 1
        return number, k - int(self._starts[number])

    def name_of(self, k: int) -> str:
        """The name of image k, with its source's if there are several."""
        number, i = self.place(k)
        name = self.raws[number].names[i]
        return name if len(self.raws) == 1 else f"{self.titles[number]}/{name}"


class _Run:
    """One run of `pack`: what it skips, what it notes, and what its first image decides."""

    def __init__(self, images: Images, config: PackConfig, progress: Progress | None) -> None:
        self.all, self.config, self.progress = images, config, progress
        self.skipped: dict[str, AssayError] = {}
        self.notes = Notes(images.titles, images.raws[0].sensor)
        self.layout: Layout | None = None

    def reject(self, wrong: dict[str, AssayError]) -> None:
        """Skip images if that is asked for, else raise the first."""
        if wrong and not self.config.skip_bad:
            error = next(iter(wrong.values()))
            more = f" (and {len(wrong) - 1} more like it)" if len(wrong) > 1 else ""
            cure = "; ".join(filter(None, [error.cure, "skip_bad leaves out what cannot be packed"]))
            raise AssayError(error.what + more, path=error.path, key=error.key, cure=cure) from error
        self.skipped |= wrong

    def images(self, numbers: range) -> Iterator[PackedImage]:
        """Load and convert images on all cores; threads decode and resize several large images at a time."""
        wrong = {self.all.name_of(k): level for k in numbers if isinstance(level := self._level(k), AssayError)}
        self.reject(wrong)
        waiting = iter(k for k in numbers if self.all.name_of(k) not in wrong)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            ahead: deque[tuple[int, Future[tuple[PackedImage, Note, Layout]]]] = deque()
            while True:
                num_ahead = 1 if self.layout is None else _NUM_AHEAD  # the first fixes what others must be
                for k in islice(waiting, num_ahead - len(ahead)):
                    ahead.append((k, pool.submit(_pack_one, self.all, k, self.config, self.layout)))
                if not ahead:
                    return
                k, packed = ahead.popleft()
                try:
                    image, note, self.layout = packed.result()
                    self.notes.add(note)
                    yield image
                except AssayError as error:
                    error.path = error.path or printable(self.all.name_of(k))
                    self.reject({self.all.name_of(k): error})
                if self.progress is not None:
                    self.progress(k + 1, len(self.all))

    def _level(self, k: int) -> Level | AssayError:
        number, i = self.all.place(k)
        levels = self.all.raws[number].levels
        return Level(0.0) if levels is None else levels[i]


def _pack_one(
    images: Images, k: int, config: PackConfig, layout: Layout | None
) -> tuple[PackedImage, Note, Layout]:
    """One image with its level where black to white is 2, what was noted, and what all images must be."""
    number, i = images.place(k)
    raw, name = images.raws[number], images.name_of(k)
    if printable(name) != name:
        raise AssayError("has a name that is not UTF-8", path=printable(name), cure="rename it")
    with decoding(raw.names[i], "check the file, or leave it out"):
        pixels = raw.pixels(i)
    level, sigma_map = _level_of(raw, i, pixels)
    noisy = level.sigma > 0
    pixels, opacity = _without_opacity(pixels, noisy) if raw.has_opacity else (pixels, "")
    units = value_range = _range_of(raw, pixels)
    files, dark = pixels, None
    if raw.sensor is not None:
        pixels, dark = _stabilised(raw, pixels, noisy)
        value_range = (-1.0, 1.0)
    sigma, usable_from = level.in_range(*value_range)
    size = size_of(pixels.shape, config, layout)
    operator = None if raw.operator is None else raw.operator(i, (pixels.shape[0], pixels.shape[1]), size)
    values, layout = convert(pixels, value_range, noisy, config, layout)
    if sigma_map is not None:
        unit = 1 if raw.map_scaled else 2 / (value_range[1] - value_range[0])
        sigma_map = fit(sigma_map * unit, size, config.fit, noisy).transpose(2, 0, 1)
    kernel, kernel_sum = None, None
    if operator is not None:
        kernel, missing = operator
        values, kernel_sum = _centred(values, kernel, sigma, value_range, layout)
        if missing.any():
            levels = np.full((1, 1, 1), sigma) if sigma_map is None else sigma_map
            sigma_map = np.where(missing, np.inf, levels)
    if sigma_map is not None and len(images.raws) > 1:  # others may have one for each channel
        sigma_map = np.broadcast_to(sigma_map, values.shape)
    x = layout.scaled(values)
    note = Note(
        number,
        sigma,
        (float(files.min()), float(files.mean()), float(files.max())),
        units,
        content=hash(values.tobytes()),
        is_faint=noisy and _check_noise(x, sigma, sigma_map, kernel),
        opacity=opacity,
        clipped=share_at(x, (0, 255), units) if noisy and files.dtype == np.uint8 else None,
        kernel_sum=kernel_sum,
        dark=dark,
        is_deep=files.dtype == np.uint16 and raw.value_range is None,
        measured=measure(x) if sigma_map is kernel is None and i in chosen(len(raw.names)) else None,
    )
    label, group = -1 if raw.label is None else int(raw.label[i]), int(images.group[k])
    seen_in = raw.sensor or units
    return PackedImage(name, values, sigma, label, usable_from, seen_in, group, sigma_map, kernel), note, layout


def _level_of(raw: RawImages, i: int, pixels: np.ndarray) -> tuple[Level, np.ndarray | None]:
    """The level of an image, and the map of its noise (H, W, C or 1) that it is from, if it has one."""
    if raw.sigma_map is None:
        if raw.sensor is not None and raw.levels is None:
            return Level(raw.sensor.sigma_tn, None, scaled=True), None
        level = Level(0.0) if raw.levels is None else raw.levels[i]
        assert isinstance(level, Level), "those that are wrong were left out"
        return level, None
    found = raw.sigma_map(i).astype(np.float64)
    if found.shape[:2] != pixels.shape[:2] or found.shape[2] not in (1, pixels.shape[2]):
        what = f"has pixels {pixels.shape} (H, W, C) and a map of the noise {found.shape}"
        raise AssayError(what, key="map", cure="give a level for each pixel")
    measured = found[np.isfinite(found)]  # the other pixels are missing
    if not bool((found >= 0).all()) or len(measured) == 0:
        what = "has a map of the noise that is negative, NaN, or infinite everywhere"
        raise AssayError(what, key="map", cure="correct it, or leave the image out")
    sigma = float(np.quantile(measured, raw.quantile, method="inverted_cdf"))
    if sigma == 0 and len(measured) < found.size:
        what = "has missing pixels and no noise in the others, and would be treated as clean"
        raise AssayError(
            what, key="map", cure="give those that were measured a small level, e.g. that of rounding"
        )
    return Level(sigma, None, raw.map_scaled), found


def _without_opacity(pixels: np.ndarray, noisy: bool) -> tuple[np.ndarray, str]:
    """The pixels of a picture without its opacity, and what became of that."""
    if pixels.shape[2] in (1, 3):
        return pixels, ""
    if not is_transparent(pixels):
        return pixels[..., :-1], "left out: nothing is transparent"
    if noisy:
        what = "is noisy, and flattening its transparency would change its noise"
        raise AssayError(what, cure="save it opaque")
    return flatten(pixels, ""), "laid on white"


def _range_of(raw: RawImages, pixels: np.ndarray) -> tuple[float, float]:
    """The values of black and white in a file."""
    if raw.value_range is not None:
        return raw.value_range
    if pixels.dtype not in (np.uint8, np.uint16):
        what = (
            f"has values from {pixels.min():.4g} to {pixels.max():.4g}, which say nothing about black and white"
        )
        raise AssayError(what, key="range", cure="name the values of black and white, e.g. range=0,255")
    return 0.0, float(np.iinfo(pixels.dtype).max)


def _stabilised(raw: RawImages, pixels: np.ndarray, noisy: bool) -> tuple[np.ndarray, float | None]:
    """Images of a sensor between -1 and 1, and the share of pixels with too few photons if they are noisy."""
    assert raw.sensor is not None
    if not noisy:
        return raw.sensor.clean_to_images(pixels).astype(np.float32), None
    # The mean count of a pixel is not known; that of its neighbourhood is nearer to it than its own count.
    counts, fewest = uniform_filter(raw.sensor.counts(pixels), (5, 5, 1)), raw.sensor.smallest_count()
    dark = float((counts < fewest).mean()) if fewest > 0 else 0.0
    return raw.sensor.noisy_to_images(pixels).astype(np.float32), dark


def _centred(
    values: np.ndarray, kernel: np.ndarray, sigma: float, value_range: tuple[float, float], layout: Layout
) -> tuple[np.ndarray, float | None]:
    """Values of the store such that y = k * x holds, where 0 is the middle of black and white.

    The files have it where 0 is 0. With b = (low + high) / (high - low) the two differ by b (1 - sum k). The
    sum is returned if it is neither 1 nor, as of lines of k-space without the mean, 0.
    """
    if sigma == 0:
        what = "was convolved with a kernel and has no noise, and would be treated as clean"
        raise AssayError(what, key="sigma", cure="give it a small level, e.g. that of rounding")
    low, high = value_range
    total = float(kernel.sum())
    lacks_mean = abs(total) < 1e-6 * float(np.abs(kernel).sum())
    shift = (low + high) / (high - low) * (1 - total)
    if abs(shift) >= 1e-6:
        if layout.dtype == "uint8":
            what = f"has a kernel or mask that sums to {total:.4g}, not to 1"
            raise AssayError(what, key="dtype", cure="divide it by its sum, or use float32")
        values = (values + shift).astype(layout.dtype)
    return values, total if abs(total - 1) > 0.01 and not lacks_mean else None


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


def _begins_with_bytes(raw: RawImages) -> bool:
    """Whether the first image that can be read has 8 bits."""
    for i in range(len(raw.names)):
        with contextlib.suppress(ValueError, OSError):  # reported when its turn comes
            return raw.pixels(i).dtype == np.uint8
    return True
