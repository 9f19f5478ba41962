"""Packing: any readable images, from one source or several -> a store.

Nothing is guessed. Images keep their size and colours unless you ask otherwise, float pixels need their
value range named, and what would change the noise of a noisy image (resizing, recolouring, flattening
transparency, rounding to 8 bits) is rejected. Noise levels are given in the units of the files and converted
with the value range, sigma_tn = 2 sigma / (high - low); a level that the pixels rule out is rejected.
"""

import contextlib
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from threading import Lock
from typing import Literal

import numpy as np
from PIL import Image
from scipy.ndimage import uniform_filter

from assay.data.decode import flatten, is_transparent
from assay.data.levels import Level, Problem, check_level, read_annotations
from assay.data.readers import RawImages, Size, printable
from assay.data.shards import is_store, join_shards, shard_path
from assay.data.store import DType, PackedImage, Store, hash_of, write_store
from assay.data.units import Stabilised
from assay.files import write_whole

Fit = Literal["exact", "crop", "resize"]
Colour = Literal["keep", "grey", "colour"]
Units = Literal["files", "scaled"]
Progress = Callable[[int, int], None]
MAX_PIXELS = 2**26
_NUM_AHEAD = 64  # images loaded before they are needed
_LUMA = np.array([0.299, 0.587, 0.114])


@dataclass(frozen=True)
class PackSource:
    """Images to pack together with others, with a noise level and value range of their own.

    `sigma` is the noise level of all images or a file with one per image (`assay.data.levels`); without it
    the format's own levels count, and else the images are clean. `value_range`: see `Conversion`. An image with
    a map of levels counts as noisy up to this `map_quantile` of them; 1 is the highest.
    """

    raw: RawImages
    sigma: float | Path | None = None
    value_range: tuple[float, float] | None = None
    units: Units = "files"
    map_quantile: float = 1.0


@dataclass(frozen=True)
class PackReport:
    """The finished store, what was left out, and what the user should know."""

    store: Store
    skipped: tuple[Problem, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Conversion:
    """How pixels become values of a store.

    `size` (H, W): None keeps the size of the first image. `fit`: what to do with another size; reject it
    ("exact"), cut out the centre ("crop"), or scale the shorter side and cut out the centre ("resize").
    `value_range`: the pixels that are black and white; None means 0 .. 255 or 0 .. 65535, and is rejected for
    float pixels. `dtype`: None means uint8 if the files have 8 bits, else float32; of several sources, all.
    `sensor`: all images are of a sensor that counts photons, and are kept stabilised, in its range.
    """

    size: tuple[int, int] | None = None
    fit: Fit = "exact"
    colour: Colour = "keep"
    value_range: tuple[float, float] | None = None
    dtype: DType | None = None
    sensor: Stabilised | None = None

    def __post_init__(self) -> None:
        if self.size is not None and min(self.size) < 1:
            raise ValueError(f"size {self.size}: an image has at least one pixel")
        if self.size is not None and math.prod(self.size) > MAX_PIXELS:
            raise ValueError(f"size {self.size}: an image of a store has at most {MAX_PIXELS:,} pixels")
        if self.sensor is not None and self.dtype == "uint8":
            raise ValueError("dtype uint8: stabilised images are not whole numbers; use float32")
        if self.fit != "exact" and self.size is None:
            raise ValueError(f"fit {self.fit!r} needs a size")
        if (
            self.value_range is not None
            and not -math.inf < self.value_range[0] < self.value_range[1] < math.inf
        ):
            raise ValueError(f"value range {self.value_range}: black must be below white, both finite")


def pack_shards(
    sources: Sequence[PackSource],
    path: Path,
    num_shards: int,
    only: int | None = None,
    conversion: Conversion | None = None,
    skip_bad: bool = False,
    progress: Progress | None = None,
) -> list[PackReport]:
    """Write images to a store of several shards, each an equal part; those that are there are not made again.

    `only` makes one of them, counted from 1, so that several processes can share the work. The store is
    complete with its last shard. Patches of one picture stay in one shard.
    """
    raw = _join(list(sources))
    wanted = [shard_path(path, number, num_shards) for number in range(1, num_shards + 1)]
    if not 1 <= (only or 1) <= num_shards <= len(raw.names):
        raise ValueError(
            f"shards = {only or 1}/{num_shards}: give a part of at most {len(raw.names)}, the images"
        )
    if other := [found for found in path.glob("shard-*") if found.with_suffix("") not in wanted]:
        raise ValueError(f"{path} has another number of shards, such as {other[0].name}: remove the folder")
    job = hash_of(list(raw.names), repr(conversion), [_recipe(source) for source in sources])
    for record in path.glob("shard-*.json"):
        if record.read_text() != job:
            raise ValueError(
                f"{path} has shards of other images or settings: remove it, or choose another name"
            )
    borders = np.linspace(0, len(raw.names), num_shards + 1).round().astype(int)
    if raw.group is not None:  # to where the next picture begins
        begins = np.append(np.flatnonzero(np.diff(raw.group, prepend=-1)), len(raw.names))
        borders = begins[np.searchsorted(begins, borders)]
    reports = []
    for number in range(1, num_shards + 1) if only is None else [only]:
        part, target = range(borders[number - 1], borders[number]), wanted[number - 1]
        if not is_store(target):
            if len(part) == 0:
                raise ValueError(f"{num_shards} shards are more than the pictures that patches are cut from")
            with write_whole(target.with_suffix(".json")) as partial:
                partial.write_text(job)
            reports.append(pack(sources, target, conversion, None, skip_bad, progress, only=part))
    join_shards(path, raw.name, num_shards)
    return reports


def _recipe(source: PackSource) -> str:
    """All but the images that decides what a source becomes; as before maps and kernels if it has none."""
    quantile = [] if source.map_quantile == 1 else [source.map_quantile]
    return repr((source.sigma, source.value_range, source.units, *quantile, *source.raw.recipe))


def pack(
    sources: RawImages | PackSource | Sequence[PackSource],
    path: Path,
    conversion: Conversion | None = None,
    sigma: float | Path | None = None,
    skip_bad: bool = False,
    progress: Progress | None = None,
    units: Units = "files",
    only: range | None = None,
) -> PackReport:
    """Write images to a store at `path`: those of one source, with noise `sigma` in `units`, or of several.

    `skip_bad` leaves out what is wrong instead of raising. `progress` is called with (images done, images in
    all). `only` some of the images, counted over all sources, are packed.
    """
    if isinstance(sources, RawImages):
        sources = PackSource(sources, sigma, units=units)
    many = [sources] if isinstance(sources, PackSource) else list(sources)
    raw = _join(many)
    for label in (raw.name, *raw.class_names):
        if printable(label) != label:
            raise ValueError(f"{printable(label)}: the name of this folder is not UTF-8: rename it")
    conversion = conversion or Conversion()
    dark: dict[tuple[int, int], float] = {}
    if conversion.sensor is not None:
        many = [_stabilised(source, conversion.sensor, n, dark) for n, source in enumerate(many)]
        raw = _join(many)
    if conversion.dtype is None and len(many) > 1 and not all(map(_begins_with_bytes, many)):
        conversion = replace(conversion, dtype="float32")
    writer = _Packer(raw, conversion, skip_bad, progress, dark, len(many))
    for number, source in enumerate(many):
        writer.set_levels(source, number, sum(len(before.raw.names) for before in many[:number]))
    if only is not None:
        writer.levels = {i: level for i, level in writer.levels.items() if i in only}
    images = writer.images()
    first = next(images, None)
    if first is None:
        raise ValueError(
            f"{raw.name}: none of its {len(raw.names)} images can be packed: {writer.skipped[0].reason}"
        )
    store = write_store(
        path,
        raw.name,
        chain([first], images),
        first.values.shape,
        writer.dtype,
        writer.value_range,
        raw.class_names,
    )
    return PackReport(store, tuple(writer.skipped), tuple(writer.warnings()))


def _stabilised(
    source: PackSource, sensor: Stabilised, number: int, dark: dict[tuple[int, int], float]
) -> PackSource:
    """A source of a sensor's images, between -1 and 1: clean if its sigma is 0, else with the sensor's noise.

    `dark` receives the share of each noisy image with so few photons that its noise cannot be stabilised.
    """
    raw, clean, fewest = source.raw, source.sigma == 0, sensor.smallest_count()
    if source.sigma not in (None, 0) or (not clean and (raw.sigma_tn is not None or raw.sigma_map is not None)):
        raise ValueError(
            f"{raw.name}: its noise is given twice, as a level and as the `gain` of a sensor: leave out one, "
            "or give `sigma` 0 for clean images"
        )
    if raw.operator is not None:
        raise ValueError(f"{raw.name}: no kernel describes stabilised images: pack it without `gain`")
    if source.value_range not in (None, (sensor.low, sensor.high)):
        raise ValueError(f"{raw.name}: images of one sensor have one range; leave out {source.value_range}")

    def pixels(i: int) -> np.ndarray:
        values = raw.pixels(i)
        if raw.has_opacity:
            if not clean and is_transparent(values):
                raise ValueError(f"{raw.names[i]} is noisy and transparent: save it opaque")
            values = flatten(values, raw.names[i])
        if clean:
            return sensor.clean_to_images(values).astype(np.float32)
        # The mean count of a pixel is not known; that of its neighbourhood is nearer to it than its own count.
        counts = uniform_filter(sensor.counts(values), (5, 5, 1))
        dark[number, i] = float((counts < fewest).mean()) if fewest > 0 else 0.0
        return sensor.noisy_to_images(values).astype(np.float32)

    plain = replace(raw, pixels=pixels, has_opacity=False, sigma_tn=None, sigma_map=None)
    return PackSource(plain, 0.0 if clean else sensor.sigma_tn, (-1.0, 1.0), "scaled")


def _begins_with_bytes(source: PackSource) -> bool:
    """Whether the first image that can be read has 8 bits."""
    for i in range(len(source.raw.names)):
        with contextlib.suppress(ValueError, OSError):  # reported when its turn comes
            return source.raw.pixels(i).dtype == np.uint8
    return True


def _join(sources: Sequence[PackSource]) -> RawImages:
    """The images of all sources, one after the other; names begin with the source's where several have it."""
    if len(sources) == 1:
        return sources[0].raw
    raws = [source.raw for source in sources]
    titles = [
        raw.name if [r.name for r in raws].count(raw.name) == 1 else f"{i + 1}-{raw.name}"
        for i, raw in enumerate(raws)
    ]
    class_names = next((raw.class_names for raw in raws if raw.class_names), ())
    for raw in raws:
        if raw.class_names not in ((), class_names):
            raise ValueError(
                f"{raw.name} has the classes {', '.join(raw.class_names)}, another source "
                f"{', '.join(class_names)}: pack them without classes"
            )
    ends = np.cumsum([len(raw.names) for raw in raws])
    starts = ends - [len(raw.names) for raw in raws]

    def place(i: int) -> tuple[RawImages, int]:
        number = int(np.searchsorted(ends, i, side="right"))
        return raws[number], i - int(starts[number])

    def pixels(i: int) -> np.ndarray:
        raw, mine = place(i)
        return raw.load(mine)

    def sigma_map(i: int) -> np.ndarray:
        raw, mine = place(i)
        assert raw.sigma_map is not None
        return raw.sigma_map(mine)

    def operator(i: int, before: Size, size: Size) -> tuple[np.ndarray, np.ndarray] | None:
        raw, mine = place(i)
        return None if raw.operator is None else raw.operator(mine, before, size)

    groups = [np.arange(len(raw.names)) if raw.group is None else raw.group for raw in raws]
    offsets = np.cumsum([0, *(int(group.max()) + 1 for group in groups[:-1])])
    return RawImages(
        "+".join(titles),
        [f"{title}/{name}" for title, raw in zip(titles, raws, strict=True) for name in raw.names],
        np.concatenate([raw.label for raw in raws]),
        class_names,
        pixels,
        has_opacity=False,  # laid on white by `load`
        group=np.concatenate([group + offset for group, offset in zip(groups, offsets, strict=True)]),
        sigma_map=sigma_map,
        operator=operator,
    )


@dataclass
class _Packer:
    """The state of one `pack`: the first image fixes what all others must be."""

    raw: RawImages
    conversion: Conversion
    skip_bad: bool
    progress: Progress | None
    dark: Mapping[tuple[int, int], float]  # the share of too few photons, of images of a sensor
    num_sources: int
    skipped: list[Problem] = field(default_factory=list)
    levels: dict[int, Level] = field(default_factory=dict)
    ranges: dict[int, tuple[float, float]] = field(default_factory=dict)  # of images whose source names one
    quantile: dict[int, float] = field(default_factory=dict)  # of the map that an image has
    sums: list[float] = field(default_factory=list)  # of kernels that change the brightness
    num_faint: int = 0
    shape: tuple[int, int, int] | None = None
    dtype: DType = "uint8"
    value_range: tuple[float, float] = (-1.0, 1.0)
    num_noisy_8_bit: int = 0
    num_clipped: int = 0
    num_beyond: int = 0
    lock: Lock = field(default_factory=Lock)

    def reject(self, problems: list[Problem]) -> None:
        """Note problems if bad images are skipped, else raise the first."""
        if problems and not self.skip_bad:
            more = f" (and {len(problems) - 1} more like it)" if len(problems) > 1 else ""
            raise ValueError(f"{problems[0].reason}{more}; `skip_bad` leaves out what cannot be packed")
        self.skipped += problems

    def count(self, **numbers: int) -> None:
        """Add to counters, from any thread."""
        with self.lock:
            for name, number in numbers.items():
                setattr(self, name, getattr(self, name) + number)

    def set_levels(self, source: PackSource, number: int, start: int) -> None:
        """Fill `levels` and `ranges` for the images of one source, which begin at `start`."""
        raw, scaled = source.raw, source.units == "scaled"
        levels: dict[int, Level] = {}
        if isinstance(source.sigma, Path):
            levels, problems = read_annotations(source.sigma, list(raw.names), scaled)
            self.reject(problems)
        elif source.sigma is not None:
            check_level(source.sigma, "sigma")
            levels = dict.fromkeys(range(len(raw.names)), Level(source.sigma, source.sigma, scaled))
        elif raw.sigma_map is not None:
            if not 0 < source.map_quantile <= 1:
                raise ValueError(f"map_quantile = {source.map_quantile:g}: expected a share above 0, at most 1")
            number_of = range(len(raw.names))
            levels = dict.fromkeys(number_of, Level(math.inf, math.inf, scaled))  # until the map is read
            self.quantile |= dict.fromkeys((start + i for i in number_of), source.map_quantile)
        elif raw.sigma_tn is not None:
            for i, level in enumerate(raw.sigma_tn.tolist()):
                try:
                    check_level(level, f"{raw.names[i]}: sigma_tn")
                    levels[i] = Level(level, level, not raw.in_file_units)
                except ValueError as error:
                    self.reject([Problem(raw.names[i], str(error))])
        else:
            levels = dict.fromkeys(range(len(raw.names)), Level(0.0, 0.0))
        self.levels |= {start + i: level for i, level in levels.items()}
        if source.value_range is not None:
            self.ranges |= dict.fromkeys(range(start, start + len(raw.names)), source.value_range)

    def images(self) -> Iterator[PackedImage]:
        """Load and convert images on all cores; threads decode and resize several large images at a time."""
        waiting = iter(sorted(self.levels))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            ahead: deque[tuple[int, Future[PackedImage]]] = deque()
            while True:
                num_ahead = 1 if self.shape is None else _NUM_AHEAD  # the first image fixes what others must be
                for i in islice(waiting, num_ahead - len(ahead)):
                    ahead.append((i, pool.submit(self.pack_one, i)))
                if not ahead:
                    return
                i, packed = ahead.popleft()
                try:
                    yield packed.result()
                except ValueError as error:
                    self.reject([Problem(self.raw.names[i], str(error))])
                if self.progress is not None:
                    self.progress(i + 1, len(self.raw.names))

    def pack_one(self, i: int) -> PackedImage:
        """One image with its level in units of images from -1 to 1."""
        pixels, name = self.load(i), self.raw.names[i]
        physical_range = self.range_of(pixels, name, i)
        level, sigma_map = self.levels[i], None
        if i in self.quantile:
            sigma_map, level = self.map_of(i, pixels, level.scaled)
        before = (pixels.shape[0], pixels.shape[1])
        operator = None if self.raw.operator is None else self.raw.operator(i, before, self.size_of(before))
        level = level.in_range(*physical_range)
        if level.usable_from < level.sigma_tn * (1 - 1e-9):
            raise ValueError(
                f"{name}: it has noise of {level.sigma_tn:g} and cannot be usable from {level.usable_from:g} "
                "(black to white is 2): the level from which an image may be used is not below its noise"
            )
        level = level._replace(usable_from=max(level.usable_from, level.sigma_tn))
        values = self.convert(pixels, name, level.sigma_tn, physical_range)
        noise = level.sigma_tn
        if sigma_map is not None:
            sigma_map = sigma_map * (
                1 if self.levels[i].scaled else 2 / (physical_range[1] - physical_range[0])
            )
            sigma_map = self.fit(sigma_map, name, noise).transpose(2, 0, 1)
            noise = math.sqrt(float(np.square(np.minimum(sigma_map, noise)).mean()))
        kernel = None
        if operator is not None:
            kernel, missing = operator
            values = self.centre(values, kernel, name, level.sigma_tn, physical_range)
            noise *= math.sqrt(np.mean(np.abs(np.fft.fft2(kernel)) > 1e-6))  # none at frequencies filled with 0
            if missing.any():
                sigma_map = np.where(missing, np.inf, level.sigma_tn if sigma_map is None else sigma_map)
                sigma_map = sigma_map.reshape(-1, *missing.shape)
                if np.isinf(sigma_map).all():
                    raise ValueError(
                        f"{name}: all its pixels are missing, some because of the kernel: leave it out"
                    )
        if sigma_map is not None and self.num_sources > 1:  # others may have one for each channel
            sigma_map = np.broadcast_to(sigma_map, values.shape)
        self.check_noise(values, noise, name)
        group = -1 if self.raw.group is None else int(self.raw.group[i])
        label = int(self.raw.label[i])
        units = self.conversion.sensor or physical_range
        return PackedImage(
            name, values, level.sigma_tn, label, level.usable_from, units, group, sigma_map, kernel
        )

    def centre(
        self, values: np.ndarray, kernel: np.ndarray, name: str, sigma: float, value_range: tuple[float, float]
    ) -> np.ndarray:
        """Values of the store such that y = k * x holds, where 0 is the middle of black and white.

        The files have it where 0 is 0. With b = (low + high) / (high - low) the two differ by b (1 - sum k).
        """
        if sigma == 0:
            raise ValueError(
                f"{name} was convolved with a kernel and has no noise, and would be treated as clean: give it "
                "a small level, e.g. that of rounding"
            )
        low, high = value_range
        total = float(kernel.sum())
        lacks_mean = abs(total) < 1e-6 * float(np.abs(kernel).sum())  # lines of k-space without the first
        if abs(total - 1) > 0.01 and not lacks_mean:
            self.sums.append(total)
        shift = (low + high) / (high - low) * (1 - total)
        if abs(shift) < 1e-6:
            return values
        if self.dtype == "uint8":
            if lacks_mean:
                raise ValueError(f"{name}: its kernel or mask leaves out the mean value: use dtype = float32")
            raise ValueError(
                f"{name}: its kernel sums to {total:.4g}, not to 1: divide it by its sum, or use dtype = "
                "float32 if the optics lose light"
            )
        return (values + shift).astype(self.dtype)

    def map_of(self, i: int, pixels: np.ndarray, scaled: bool) -> tuple[np.ndarray, Level]:
        """The map of an image's noise, (H, W, C or 1), and the level that it is used from."""
        assert self.raw.sigma_map is not None
        found, name = self.raw.sigma_map(i).astype(np.float64), self.raw.names[i]
        if found.shape[:2] != pixels.shape[:2] or found.shape[2] not in (1, pixels.shape[2]):
            raise ValueError(
                f"{name} has {' x '.join(map(str, pixels.shape))} pixels (H x W x C), its map of the noise "
                f"{' x '.join(map(str, found.shape))}: give a level for each"
            )
        if not bool((found >= 0).all()):
            raise ValueError(f"{name}: its map of the noise has levels that are negative or NaN")
        measured = found[np.isfinite(found)]  # the other pixels are missing
        if len(measured) == 0:
            raise ValueError(f"{name}: its map of the noise is infinite everywhere: leave the image out")
        level = float(np.quantile(measured, self.quantile[i], method="inverted_cdf"))
        if level == 0 and len(measured) < found.size:
            raise ValueError(
                f"{name} has missing pixels, whose level is infinite, and no noise in the others, and would "
                "be treated as clean: give those that were measured a small level, e.g. that of rounding"
            )
        return found, Level(level, level, scaled)

    def check_noise(self, values: np.ndarray, sigma: float, name: str) -> None:
        """Reject noise that is more than all that varies in an image, and count images below 0 dB.

        The variance of n pixels with noise sigma alone is sigma^2 up to sigma^2 sqrt(2 / n); less by six of
        these deviations rules the level out.
        """
        if sigma == 0:
            return
        low, high = self.value_range
        variance = float(np.var(values.astype(np.float64)) * (2 / (high - low)) ** 2)
        if variance < sigma**2 * (1 - 6 * math.sqrt(2 / values.size)):
            raise ValueError(
                f"{name} varies by {math.sqrt(variance):.3g} (black to white is 2), less than its noise of "
                f"{sigma:.3g}: check `value_range`, and that sigma is in the units of the files (or units = "
                "scaled)"
            )
        self.count(num_faint=variance < 2 * sigma**2)

    def load(self, i: int) -> np.ndarray:
        """The pixels of one image; that its file cannot be read is a fault of this image alone."""
        name = printable(self.raw.names[i])
        if name != self.raw.names[i]:
            raise ValueError(f"{name} has a name that is not UTF-8: rename it")
        try:
            return self.raw.load(i) if self.levels[i].sigma_tn == 0 else self.raw.pixels(i)
        except OSError as error:
            raise ValueError(f"{name} cannot be read ({error.strerror or error}): make it readable") from error

    def range_of(self, pixels: np.ndarray, name: str, i: int) -> tuple[float, float]:
        """The values of black and white in a file."""
        if i in self.ranges:
            return self.ranges[i]
        if self.conversion.value_range is not None:
            return self.conversion.value_range
        if pixels.dtype not in (np.uint8, np.uint16):
            raise ValueError(
                f"{name} has {pixels.dtype} pixels: name the values of black and white with `value_range`"
            )
        return 0.0, float(np.iinfo(pixels.dtype).max)

    def convert(
        self, pixels: np.ndarray, name: str, sigma: float, value_range: tuple[float, float]
    ) -> np.ndarray:
        """Pixels (H, W, C) as they are in the file -> values (C, H, W) of the store."""
        if self.raw.has_opacity and sigma > 0:
            if is_transparent(pixels):
                raise ValueError(
                    f"{name} is noisy, and flattening its transparency would change its noise: save it opaque"
                )
            pixels = flatten(pixels, name)
        eight_bit = pixels.dtype == np.uint8
        if pixels.dtype.kind == "f" and not np.isfinite(pixels).all():
            raise ValueError(f"{name} has pixels that are NaN or infinite: remove the image or repair it")
        resampled = self.fit(self.recolour(pixels, name, sigma), name, sigma)
        dtype = self.conversion.dtype or ("uint8" if eight_bit else "float32")
        if self.shape is None:
            self.dtype = dtype
            self.value_range = value_range if dtype == "uint8" and eight_bit else _OUR_RANGE[dtype]
        self.check_shape(resampled.transpose(2, 0, 1).shape, dtype, name)
        values = self.quantise(resampled.transpose(2, 0, 1), value_range, name, sigma)
        if sigma > 0 and eight_bit:  # counted last: only what is stored
            self.count(num_noisy_8_bit=1, num_clipped=int(((resampled == 0) | (resampled == 255)).sum()))
        return values

    def recolour(self, pixels: np.ndarray, name: str, sigma: float) -> np.ndarray:
        """Grey <-> colour, as asked for."""
        wanted = {"keep": pixels.shape[2], "grey": 1, "colour": 3}[self.conversion.colour]
        if wanted == pixels.shape[2]:
            return pixels
        if pixels.shape[2] not in (1, 3):
            raise ValueError(
                f"{name} has {pixels.shape[2]} channels: only grey and colour convert to each other"
            )
        if sigma > 0:
            raise ValueError(
                f"{name} is noisy, and making it {self.conversion.colour} would change its noise: keep colours"
            )
        if wanted == 3:
            return pixels.repeat(3, axis=2)
        grey = (pixels @ _LUMA)[..., None]
        return (np.rint(grey) if pixels.dtype.kind == "u" else grey).astype(pixels.dtype)

    def size_of(self, before: Size) -> Size:
        """The size that an image gets."""
        return self.conversion.size or (self.shape[1:] if self.shape else before)

    def fit(self, pixels: np.ndarray, name: str, sigma: float) -> np.ndarray:
        """Give (H, W, C) the size asked for."""
        height, width, num_channels = pixels.shape
        size = self.size_of((height, width))
        if (height, width) == size:
            return pixels
        if self.conversion.fit == "exact":
            raise ValueError(
                f"{name} has {height} x {width} pixels, not {size[0]} x {size[1]}: give `size` with "
                "fit = crop or fit = resize"
            )
        scale = 1.0 if self.conversion.fit == "crop" else min(height / size[0], width / size[1])
        box_height, box_width = size[0] * scale, size[1] * scale
        top, left = (height - box_height) / 2, (width - box_width) / 2
        if scale == 1:
            top, left = math.floor(top), math.floor(left)
            if top < 0 or left < 0:
                raise ValueError(
                    f"{name} has {height} x {width} pixels: too small to cut {size[0]} x {size[1]} out of it"
                )
            return pixels[top : top + size[0], left : left + size[1]]
        if sigma > 0:
            raise ValueError(f"{name} is noisy, and resizing would change its noise: use fit = crop")
        box = (left, top, left + box_width, top + box_height)
        channels = [Image.fromarray(pixels[..., c].astype(np.float32)) for c in range(num_channels)]
        scaled = np.stack(
            [np.asarray(c.resize(size[::-1], Image.Resampling.LANCZOS, box)) for c in channels], 2
        )
        if pixels.dtype.kind == "u":
            scaled = np.rint(scaled).clip(0, np.iinfo(pixels.dtype).max)
        return scaled.astype(pixels.dtype)

    def check_shape(self, shape: tuple[int, ...], dtype: DType, name: str) -> None:
        """The first image decides; each later one must agree."""
        if self.shape is None:
            self.shape = (shape[0], shape[1], shape[2])
        if shape[0] != self.shape[0]:
            kinds = {1: "is grey", 3: "is in colour"}
            mine, theirs = (kinds.get(n, f"has {n} channels") for n in (shape[0], self.shape[0]))
            raise ValueError(f"{name} {mine}, the image before it {theirs}: give `colour`")
        if dtype != self.dtype:
            raise ValueError(
                f"{name} is not 8-bit like those before it, or the other way round: use dtype = float32"
            )

    def quantise(
        self, values: np.ndarray, value_range: tuple[float, float], name: str, sigma: float
    ) -> np.ndarray:
        """(C, H, W) pixels -> the store's dtype and value range."""
        if self.dtype == "uint8" and values.dtype == np.uint8 and value_range == self.value_range:
            return values
        low, high = value_range
        x = (values.astype(np.float64) - low) * (2 / (high - low)) - 1
        if sigma == 0 and np.abs(x).max() > 2:
            self.count(num_beyond=1)
        if self.dtype != "uint8":
            with np.errstate(over="ignore"):
                kept = x.astype(self.dtype)
            if not np.isfinite(kept).all():
                raise ValueError(
                    f"{name} has values up to {np.abs(x).max():.3g} where white is 1, too large for "
                    f"{self.dtype}: check `value_range`, or use dtype = float32"
                )
            return kept
        if sigma > 0:
            raise ValueError(f"{name} is noisy, and 8 bits would round and clip its noise: use dtype = float32")
        black, white = self.value_range
        return np.rint(black + (x + 1) * (white - black) / 2).clip(0, 255).astype(np.uint8)

    def warnings(self) -> Iterator[str]:
        """What the user should know about a store that could be written."""
        share = float(np.mean(list(self.dark.values()))) if self.dark else 0.0
        if share > 0 and self.conversion.sensor is not None:
            fewest = self.conversion.sensor.smallest_count()
            yield (
                f"about {share:.1%} of the noisy pixels have a mean below {fewest:.1f} photons: their "
                "stabilised noise differs from its level by more than 3 %"
            )
        if self.num_noisy_8_bit and self.shape is not None:
            share = self.num_clipped / (self.num_noisy_8_bit * math.prod(self.shape))
            yield (
                f"{self.num_noisy_8_bit} noisy images come from 8-bit files: rounding to 256 steps and "
                f"clipping at black and white ({share:.1%} of their values lie there) break the Gaussian noise "
                "that training assumes. Pack the float originals if you have them."
            )
        if self.num_faint:
            sensor = self.conversion.sensor
            check = "is sigma" if sensor is None else "are `gain`, `read_noise` and `black`"
            yield (
                f"{self.num_faint:,} noisy images vary less by their content than by their noise (a "
                f"signal-to-noise ratio below 0 dB): {check} in the units of the files, and "
                "`value_range` right?"
            )
        if self.sums:
            ends = sorted({f"{end:.4g}" for end in (min(self.sums), max(self.sums))}, key=float)
            yield (
                f"{len(self.sums):,} images have a kernel that sums to {' to '.join(ends)}, not to 1: divide "
                "it by its sum, unless the optics also lose light"
            )
        if self.num_beyond:
            yield (
                f"{self.num_beyond} clean images have values beyond twice the range from black to white: "
                "is `value_range` right?"
            )


_OUR_RANGE = {"uint8": (0.0, 255.0), "float16": (-1.0, 1.0), "float32": (-1.0, 1.0)}
