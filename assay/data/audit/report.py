"""`audit`: what noise is in these images, and does the Gaussian model of training hold for them?

What images of one camera have in common is measured in the flattest windows of all of them together. A sensor
that counts photons has noise whose variance grows with the signal (Poisson-Gaussian):

    variance = gain * mean + read_noise^2,        mean measured from the value of no light.
"""

import csv
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy.special import i0e, i1e
from torch import Tensor

from assay.data.audit.level import MIN_SIDE, blind_net, lag_one, spread, train_on_examples, unclipped, windows
from assay.data.decode import check_finite
from assay.data.readers import RawImages
from assay.data.spec import Level
from assay.data.store import Store
from assay.data.units import Stabilised
from assay.devices import one_thread
from assay.errors import AssayError, check_enough
from assay.files import csv_cell

Progress = Callable[[int, int], None]
Bounds = tuple[float, float]
_ANY: Bounds = (-math.inf, math.inf)

_SIDE = 6
_SIDE_SHARED = 4  # for the level of a group, with the windows beside each
_START = 0.01  # of all windows, the flattest: what the search for flat windows starts from
_MIN_WINDOWS = 200
_NUM_COPIES = 600  # of clean examples, with noise
_TEXTURE = 0.01  # how much too high a level may be for what is left of texture (bench/noise_levels.md)
_MAX_TOTAL = 2**23  # windows kept in memory; of more images an even selection is looked at
_NUM_BINS = 16
_MIN_FLAT = 20  # windows of an image that its own correlation is measured in
_BATCH = 64
_MAX_VALUES = 2**26  # of the images kept for what all have in common
_MIN_EXAMPLES = 20
_MAX_EXAMPLES = 1000
_SAME_UNITS = 8.0  # times larger or smaller that values of images in the same units may be
_AGREEMENT = 1.5  # mean squared deviation, in standard errors, of images that may share a level


class Measured(NamedTuple):
    """A number with its 95% interval."""

    value: float
    low: float
    high: float

    @classmethod
    def around(cls, value: float, half: float) -> "Measured":
        """With an interval of that half width."""
        return cls(value, value - half, value + half)

    def __format__(self, form: str) -> str:
        return f"{self.value:{form}} (95%: {self.low:{form}} to {self.high:{form}})"


@dataclass(frozen=True)
class Sensor:
    """A line fitted to the variance of flat windows: `variance = gain * mean + offset`."""

    gain: Measured
    offset: Measured  # the square of the read noise, if no light is 0
    mean: np.ndarray  # (bins,) of the signal that the line was fitted to

    def line(self, mean: np.ndarray) -> np.ndarray:
        """The variance of the noise where the signal has this mean."""
        return self.gain.value * mean + self.offset.value

    def dependence(self) -> float:
        """Variance of the noise at the bright end over that at the dark end; 1 if the gain may be zero."""
        if self.gain.low <= 0:
            return 1.0
        dark, bright = self.line(np.array([self.mean.min(), self.mean.max()])).tolist()
        return bright / dark if dark > 0 else math.inf

    def __str__(self) -> str:
        """As settings of a source; of read noise and the value of no light, only their sum can be seen."""
        offset = self.offset.value
        name, value = ("read_noise", math.sqrt(offset)) if offset > 0 else ("black", -offset / self.gain.value)
        return f"gain = {self.gain.value:.4g} and {name} = {value:.4g}"


class _Pool(NamedTuple):
    """All windows of all images, each (L,); `owner` is the number of the image."""

    detail: np.ndarray
    structure: np.ndarray
    mean: np.ndarray
    owner: np.ndarray


def _pool(images: Sequence[Tensor], bounds: Bounds, each_channel: bool = False) -> _Pool:
    """The windows without values at the `bounds`; of more images than fit into memory, an even selection."""
    per_image = min(images[0].shape[-2] * images[0].shape[-1], 2**16)
    columns: list[list[np.ndarray]] = [[], [], [], []]
    for number, image in enumerate(images[:: max(1, len(images) * per_image // _MAX_TOTAL)]):
        x, k = (image[:, None], _SIDE) if each_channel else (image[None], _SIDE_SHARED)
        found = windows(x, k)
        whole = unclipped(x, k, bounds)
        structure = found.structure if each_channel else found.structure_around()
        for column, values in zip(columns, (found.detail, structure, found.mean), strict=False):
            column.append(values[whole].double().numpy())
        columns[3].append(np.full(int(whole.sum()), number))
    return _Pool(*(np.concatenate(column) for column in columns))


def group_level(images: Sequence[Tensor], bounds: Bounds = _ANY, clean: Sequence[Tensor] = ()) -> Measured:
    """The noise level that all `images` (C, H, W) share; windows with values at the `bounds` are left out.

    The texture left in their flattest windows makes it slightly too high, which the interval allows for. With
    `clean` examples it is measured, on copies of them with noise of the level found, and divided out.
    """
    pool = _pool(images, bounds)
    chosen, variance = _flat_windows(pool)
    if variance == 0:
        return Measured(0.0, 0.0, 0.0)
    value, texture = math.sqrt(variance), 0.0 if clean else _TEXTURE
    error = _error(pool.detail[chosen] - variance, pool.owner[chosen]) / (2 * variance)
    if clean:
        generator = torch.Generator().manual_seed(0)
        for _ in range(2):  # the second time at a level that is nearly right
            factor, error_there = _texture(clean, value, generator)
            value = math.sqrt(variance) / factor
        error = math.hypot(error, error_there)
    return Measured(value, value * math.exp(-1.96 * error - texture), value * math.exp(1.96 * error))


def _texture(clean: Sequence[Tensor], sigma: float, generator: torch.Generator) -> tuple[float, float]:
    """How many times too high a level of `sigma` is found in images like `clean`, and the error of that.

    The detail of noisy copies is compared with that of their noise in the same windows: what is left is
    texture, and not the chance that this noise is a little more or less than it should be.
    """
    copies = list(clean) * max(1, _NUM_COPIES // len(clean))
    noise = [sigma * torch.randn(image.shape, generator=generator) for image in copies]
    pool = _pool([image + z for image, z in zip(copies, noise, strict=True)], _ANY)
    chosen, _ = _flat_windows(pool)
    alone = _pool(noise, _ANY).detail[chosen]
    ratio = float(pool.detail[chosen].mean() / alone.mean())
    error = _error(pool.detail[chosen] - ratio * alone, pool.owner[chosen] % len(clean)) / alone.mean()
    return math.sqrt(ratio), error / (2 * ratio)


def _error(residual: np.ndarray, owner: np.ndarray) -> float:
    """Standard error of a mean whose independent units are images, from the residuals (L,) of its terms."""
    return math.sqrt(np.square(np.bincount(owner, residual)).sum()) / len(residual)


def _flat_windows(pool: _Pool) -> tuple[np.ndarray, float]:
    """The windows whose structure is below the mean of their detail, and that mean, which is sigma^2.

    Half of all windows without texture pass, and few others.
    """
    if len(pool.detail) == 0:
        return np.arange(0), 0.0
    chosen = np.argsort(pool.structure)[: max(_MIN_WINDOWS, round(_START * len(pool.structure)))]
    variance = float(pool.detail[chosen].mean())
    for _ in range(30):
        passed = np.flatnonzero(pool.structure < variance)
        if len(passed) < _MIN_WINDOWS or np.array_equal(passed, chosen):
            break
        chosen, variance = passed, float(pool.detail[passed].mean())
    return chosen, variance


def fit_sensor(images: Sequence[Tensor], bounds: Bounds = _ANY) -> Sensor | None:
    """Gain and read noise of the camera that took `images` (C, H, W); None without enough flat windows.

    Weighted least squares over the flat windows of each channel. Which are flat depends on the line itself.
    """
    pool = _pool(images, bounds, each_channel=True)
    if len(pool.mean) < _MIN_WINDOWS:
        return None
    low, high = np.quantile(pool.mean, [0.001, 0.999])
    bin_of = _bins(pool.mean, low, high)
    start = []
    for number in range(_NUM_BINS):
        inside = np.flatnonzero(bin_of == number)
        if len(inside) >= _MIN_WINDOWS:
            flattest = inside[np.argsort(pool.structure[inside])[: max(20, round(_START * len(inside)))]]
            if pool.structure[flattest].mean() < pool.detail[flattest].mean():
                start.append(flattest)
    if len(start) < 3:
        return None
    chosen = np.concatenate(start)
    variance = np.concatenate([np.full(len(part), pool.detail[part].mean()) for part in start])
    for _ in range(30):
        mean = pool.mean[chosen]
        sensor = _fitted(mean, pool.detail[chosen], variance, pool.owner[chosen], mean)
        everywhere = np.maximum(sensor.line(pool.mean), 1e-3 * variance.max())
        passed = np.flatnonzero((pool.structure < everywhere) & (pool.mean >= low) & (pool.mean <= high))
        if len(passed) < _MIN_WINDOWS or np.array_equal(passed, chosen):
            break
        chosen, variance = passed, everywhere[passed]
    gain, offset, slack = sensor.gain, sensor.offset, 2 * _TEXTURE * float(np.median(variance))
    gain = gain._replace(low=gain.low - 2 * _TEXTURE * abs(gain.value))  # for texture, as the level of a group
    return replace(sensor, gain=gain, offset=Measured(offset.value, offset.low - slack, offset.high + slack))


def sensor_from_repeats(mean: np.ndarray, variance: np.ndarray, around: np.ndarray) -> Sensor | None:
    """The same from the mean and the variance over repeated exposures of each pixel, (L,) all.

    The mean of a few exposures is noisy itself, which would make the line too flat. `around`, the mean of the
    pixels beside each (`mean_around`), follows the brightness and is independent of the pixel's noise. It gives
    the weights, and the line is fitted with it as the instrument. None if the exposures do not differ.
    """
    if not variance.any():
        return None
    expected = np.full(len(mean), variance.mean())
    for _ in range(6):
        sensor = _fitted(mean, variance, expected, np.arange(len(mean)), around)
        expected = np.maximum(sensor.line(around), 1e-3 * variance.mean())
    return sensor


def mean_around(image: Tensor) -> Tensor:
    """The mean of the eight pixels beside each, (C, H, W); at the edge those inside stand for those outside."""
    kernel = torch.full((1, 1, 3, 3), 1 / 8, dtype=image.dtype)
    kernel[..., 1, 1] = 0
    return F.conv2d(F.pad(image[:, None], (1, 1, 1, 1), mode="reflect"), kernel)[:, 0]


def _bins(mean: np.ndarray, low: float, high: float) -> np.ndarray:
    edges = np.linspace(low, high, _NUM_BINS + 1)
    return np.clip(np.searchsorted(edges, mean, side="right") - 1, 0, _NUM_BINS - 1)


def _fitted(
    mean: np.ndarray, energy: np.ndarray, variance: np.ndarray, owner: np.ndarray, instrument: np.ndarray
) -> Sensor:
    """The line of `energy` against `mean`; all (L,), with weights 1 / variance^2.

    Owners are independent of each other, their windows are not: the errors are a sandwich of sums over owners.
    The residuals are orthogonal to the `instrument`, which may be the mean itself.
    """
    ones, weight = np.ones(len(mean)), variance[:, None]
    design, chosen = (np.stack([column, ones], 1) / weight for column in (mean, instrument))
    inverse = np.linalg.pinv(chosen.T @ design)
    line = inverse @ chosen.T @ (energy / variance)
    residual = (energy / variance - design @ line)[:, None] * chosen
    unit = np.unique(owner, return_inverse=True)[1]
    sums = np.stack([np.bincount(unit, column) for column in residual.T], 1)
    error = 1.96 * np.sqrt(np.diag(inverse @ sums.T @ sums @ inverse.T))
    gain, offset = map(Measured.around, line.tolist(), error.tolist())
    bin_of = _bins(instrument, instrument.min(), instrument.max())
    count = np.bincount(bin_of)
    filled = count >= 20
    return Sensor(gain, offset, np.bincount(bin_of, mean)[filled] / count[filled])


def neighbour_correlation(images: Sequence[Tensor], sigma: Sequence[float]) -> Measured:
    """Correlation of the noise of pixels beside each other; 0 for white noise, NaN without flat parts.

    If the noise has the spectrum exp(b (cos u + cos v)), neighbours correlate by I_1(b) / I_0(b), and the log
    of the variance of a coefficient is a line in the lag-one sum of its cosines (`lag_one`), with slope b.
    That line is fitted to the fine coefficients of windows with less structure than `sigma`^2.
    """
    fine, lag = lag_one(_SIDE)
    slope_of = np.linalg.pinv(np.stack([np.ones(int(fine.sum())), lag[fine].numpy()], 1))[1]
    for share in (0.0, 0.05):  # if hardly any window is that flat, the flattest of each image must do
        spectra = []
        for image, level in zip(images, sigma, strict=True):
            found = windows(image[:, None], _SIDE)
            bound = max(level**2, found.structure.quantile(share).item() if share else 0.0)
            flat = (found.structure < bound).double()
            if level > 0 and flat.sum() >= _MIN_FLAT:
                energy = found.energy[:, fine.flatten()].double()
                spectra.append((torch.einsum("cfl,cl->f", energy, flat) / level**2).numpy())
        if len(spectra) >= 0.05 * len(images):
            break
    if not spectra:
        return Measured(math.nan, math.nan, math.nan)

    def correlation(spectrum: np.ndarray) -> float:
        slope = float(np.log(np.maximum(spectrum, 1e-30)) @ slope_of)
        return math.copysign(i1e(abs(slope)) / i0e(abs(slope)), slope)

    total = np.stack(spectra)
    together = correlation(total.sum(0))
    blocks = [block for block in np.array_split(total, 10) if 0 < len(block) < len(total)]
    without = np.array([correlation(total.sum(0) - block.sum(0)) for block in blocks])  # the jackknife
    error = 1.96 * math.sqrt(0.9 * np.square(without - without.mean()).sum()) if blocks else math.inf
    return Measured(together, max(-1.0, together - error), min(1.0, together + error))


@dataclass(frozen=True)
class Audit:
    """The noise of N images, in the units of their files; arrays are (N,)."""

    names: tuple[str, ...]
    sigma: np.ndarray
    low: np.ndarray  # of the 95% interval
    high: np.ndarray
    clipped: np.ndarray  # the share of values at the lowest or the highest value of all images
    method: str
    group: Measured  # the level, if all images share one
    agree: bool  # whether the images' own levels allow that
    whiteness: Measured  # correlation of neighbours over all images
    step: float  # between neighbouring values (1 for whole numbers), 0 if they are not rounded
    values: tuple[float, float, float, float]  # the lowest, those that 1% and 99% lie below, the highest
    sensor: Sensor | None
    recorded: np.ndarray | None  # levels that are stated for the images

    def rows(self) -> list[tuple[str, str]]:
        """The audit as a table of two columns."""
        lowest, typical, highest = np.quantile(self.sigma, [0.05, 0.5, 0.95])
        spread = f" ({lowest:.4g} to {highest:.4g} for 90% of them)" if highest > lowest else ""
        darkest, low, high, brightest = (f"{value:.4g}" for value in self.values)
        white, noisy = self.whiteness, self.low > 0
        is_white_known = white.high - white.low < 1
        factor = float(np.median(np.sqrt(self.high[noisy] / self.low[noisy]))) if noisy.any() else 1.0
        rows = [
            ("images", f"{len(self.names):,}"),
            ("values of the pixels", f"{darkest} to {brightest} ({low} to {high} for 98% of them)"),
            ("noise level, in the same units", f"{typical:.4g}{spread}"),
            ("measured", f"{self.method}, each to within a factor of {factor:.3g} (95% interval)"),
            ("correlation of neighbours", f"{white:.2f}" if is_white_known else "unknown: too few flat parts"),
            ("clipped values", f"{self.clipped.mean():.2%}"),
            ("rounded to steps of", f"{self.step:.4g}" if 0 < self.step < math.inf else "not rounded"),
        ]
        if len(self.names) > 1 and typical > 0:
            rows.append(("if all share one level", f"{self.group:.4g}" if self.agree else "they do not"))
        if self.recorded is not None:
            wrong = ((self.recorded < self.low) | (self.recorded > self.high))[self.recorded > 0]
            rows.append(("recorded levels", f"{wrong.mean():.0%} are outside their measured interval"))
        if self.sensor is None:
            unknown = "unknown: needs flat parts of different brightness, or `repeats`"
            return [*rows, ("gain and read noise", unknown)]
        if self.sensor.gain.low <= 0:
            return [*rows, ("gain", "none found: the noise does not depend on the signal")]
        rows.append(("gain (variance per unit of signal)", f"{self.sensor.gain:.4g}"))
        return [*rows, ("variance at value 0 (read noise squared)", f"{self.sensor.offset:.4g}")]

    def warnings(self) -> list[str]:
        """What of the Gaussian model does not hold, in words."""
        found, typical, share = [], float(np.median(self.sigma)), float(self.clipped.mean())
        if typical == 0:
            found.append("most images have perfectly flat parts: no noise, or it was removed or clipped")
        if share > 0.01 and typical > 0:
            found.append(f"{share:.1%} of the values are clipped: measured levels are too low")
        if self.step > typical > 0:
            found.append(f"values are rounded to steps of {self.step:.3g}, more than the noise ({typical:.3g})")
        if self.whiteness.low > 0.05 and self.whiteness.value > 0.1:
            found.append(
                f"the noise of neighbouring pixels is correlated ({self.whiteness.value:.2f}; white noise: 0), "
                "as it is after resizing, sharpening, compression or demosaicing. Training assumes white "
                "noise, and the true levels are higher than these: use unprocessed images if you can"
            )
        if self.sensor is not None and (ratio := self.sensor.dependence()) > 1.5:
            found.append(
                f"the noise depends on the signal: its variance is {ratio:.1f} times as large in bright parts "
                f"as in dark ones. Pack these images as those of a sensor with {self.sensor}"
            )
        return found


def audit(
    raw: RawImages,
    clean: RawImages | None = None,
    repeats: bool = False,
    shared: bool = False,
    progress: Progress | None = None,
) -> Audit:
    """Measure the noise of `raw`, image by image and as a whole.

    With `clean` examples of the same kind of images, levels are read by a network trained on them. They are
    brought to the units of `raw` by the `value_range` of both. With `repeats`, images in the same folder are
    exposures of the same scene, and levels are exact. `shared`: all images have one level, and each is given
    that of the group.
    """
    if repeats and clean is not None:
        raise AssayError("repeated exposures need no clean examples", key="clean", cure="give one of the two")
    with one_thread():
        found = _from_repeats(raw, progress) if repeats else _from_each(raw, clean, progress)
    if shared:
        found |= {key: np.full(len(raw.names), end) for key, end in found["group"]._asdict().items()}
        found["sigma"] = found.pop("value")
    stated = [raw.noise(i).sigma for i in range(len(raw.names))]
    recorded = np.array(stated) if all(isinstance(sigma, float) for sigma in stated) and any(stated) else None
    return Audit(names=tuple(raw.names), recorded=recorded, **found)


def _from_each(raw: RawImages, clean: RawImages | None, progress: Progress | None) -> dict[str, Any]:
    """What each image says about its own noise, and all of them together."""
    examples = [] if clean is None else _examples(raw, clean)
    net = train_on_examples(examples) if examples else blind_net()
    kept = spread(len(raw.names), max(1, _MAX_VALUES // _image(raw, 0).numel()))
    looked_at, images, levels, ends = set(kept), list[Tensor](), list[Tensor](), list[tuple[float, ...]]()
    for start, batch in _batches(raw, progress):
        levels.append(net.levels(torch.stack(batch)))
        images += [image for i, image in enumerate(batch, start) if i in looked_at]
        ends += map(_ends, batch)
    sigma, low, high = torch.cat(levels, 1).double().numpy()
    values = _values(np.array(ends), images)
    bounds = values["values"][0], values["values"][-1]
    known = (sigma > 0) | (values["clipped"] == 0)  # parts that are clipped look perfectly flat
    known |= not known.any()
    with np.errstate(divide="ignore", invalid="ignore"):
        deviation = np.log(sigma / np.median(sigma[known])) / (np.log(high / low) / (2 * 1.96))
    return {
        "sigma": sigma,
        "low": low,
        "high": high,
        "method": f"from {len(examples):,} clean examples" if examples else "from each image alone",
        "group": group_level(images, bounds, examples),
        "agree": bool(np.median(sigma) > 0 and np.square(np.nan_to_num(deviation[known])).mean() < _AGREEMENT),
        "whiteness": neighbour_correlation(images, sigma[kept].tolist()),
        "sensor": fit_sensor(images, bounds),
        **values,
    }


def _examples(raw: RawImages, clean: RawImages) -> list[Tensor]:
    """Clean images (C, H, W) in the units of `raw`; an error if their values are of another size."""
    check_enough(len(clean.names), _MIN_EXAMPLES, f"clean examples in {clean.name}", "clean")
    examples = [_image(clean, i) for i in spread(len(clean.names), _MAX_EXAMPLES)]
    if raw.value_range and clean.value_range:
        (low, high), (black, white) = raw.value_range, clean.value_range
        examples = [low + (image - black) * ((high - low) / (white - black)) for image in examples]
    some = [_image(raw, i) for i in spread(len(raw.names), len(examples))]
    sizes = [float(np.median([image.median().abs() + image.std() for image in x])) for x in (some, examples)]
    alike = (raw.value_range is None) == (clean.value_range is None)
    if not alike or not 1 / _SAME_UNITS < sizes[0] / max(sizes[1], 1e-30) < _SAME_UNITS:
        what = f"{raw.name} has values of about {sizes[0]:.3g}, the clean examples of about {sizes[1]:.3g}"
        raise AssayError(f"{what}: their units differ", key="range", cure="give black and white of both")
    return examples


def _from_repeats(raw: RawImages, progress: Progress | None) -> dict[str, Any]:
    """What differs between exposures of the same scene is noise."""
    scenes: dict[PurePosixPath, list[int]] = {}
    for i, name in enumerate(raw.names):
        scenes.setdefault(PurePosixPath(name).parent, []).append(i)
    variance, error, correlation = (np.zeros(len(raw.names)) for _ in range(3))
    pixels: list[tuple[np.ndarray, ...]] = []  # of each scene: mean, variance, mean of the pixels around
    num_values, ends, firsts = 0, np.zeros((len(raw.names), 4)), []
    for members in scenes.values():
        stack = [_image(raw, i) for i in members]
        if len(stack) < 2 or len({image.shape for image in stack}) > 1:
            what = "is not one of two or more exposures of one scene and one size"
            raise AssayError(what, path=raw.names[members[0]], key="repeats", cure="give each scene a folder")
        ends[members] = list(map(_ends, stack))
        firsts.append(stack[0])
        y = torch.stack(stack).double()
        residual, count = y - y.mean(0), len(y)
        power = residual.square().flatten(1).mean(1)
        # E power_i = s_i^2 (1 - 2/n) + T / n^2 with T the sum of all s_j^2, and powers sum to T (1 - 1/n).
        total = power.sum() / (1 - 1 / count)
        own = total.expand(2) / 2 if count == 2 else (power - total / count**2) / (1 - 2 / count)
        variance[members] = own.clamp_min(0)
        error[members] = math.sqrt(2 / y[0].numel()) * power / (0.5 if count == 2 else 1 - 2 / count)
        beside = [residual[..., 1:] * residual[..., :-1], residual[..., 1:, :] * residual[..., :-1, :]]
        near = torch.stack([product.flatten(1).mean(1) for product in beside]).mean(0)
        correlation[members] = near / power.clamp_min(1e-300)
        found = (y.mean(0), y.var(0), mean_around(y.mean(0)))
        pixels.append(tuple(each.flatten().numpy() for each in found))
        num_values += y.numel() - y[0].numel()
        if progress is not None:
            progress(len(pixels), len(scenes))
    mean, variances, around = map(np.concatenate, zip(*pixels, strict=True))
    sigma, level = np.sqrt(variance), math.sqrt(variances.mean())
    relative = error / (2 * np.maximum(variance, 1e-300))
    half = 1.96 / math.sqrt(2 * num_values)
    deviation = (variance - level**2) / np.maximum(error, 1e-300)
    return {
        "sigma": sigma,
        "low": sigma * np.exp(-1.96 * relative),
        "high": sigma * np.exp(1.96 * relative),
        "method": f"from repeated exposures of {len(scenes):,} scene{'s' if len(scenes) > 1 else ''}",
        "group": Measured(level, level * math.exp(-half), level * math.exp(half)),
        "agree": bool(level > 0 and np.square(deviation).mean() < _AGREEMENT),
        "whiteness": Measured.around(float(correlation.mean()), 2 / math.sqrt(num_values)),
        "sensor": sensor_from_repeats(mean, variances, around),
        **_values(ends, firsts),
    }


def images_of(store: Store) -> RawImages:
    """The images of a store in the units of the files they came from, or stabilised, to be measured again."""
    known = store.physical_range
    low, high = (-1.0, 1.0) if known is None or isinstance(known, Stabilised) else known

    def pixels(i: int) -> np.ndarray:
        return (low + (store.read(torch.tensor([i]))[0] + 1) * ((high - low) / 2)).permute(1, 2, 0).numpy()

    names = store.source_names(range(len(store)))
    sigma = store.sigma_tn.double().numpy() * (high - low) / 2
    return RawImages(store.name, names, pixels, noise=lambda i: Level(float(sigma[i])))


def _ends(image: Tensor) -> tuple[float, float, float, float]:
    """The lowest and the highest value of an image, and the share of its values that equal each."""
    ends = float(image.min()), float(image.max())
    counts = [int((image == end).sum()) for end in ends]
    low, high = (count / image.numel() if count > 1 else 0.0 for count in counts)  # every image has a brightest
    return *ends, low, high


def _values(ends: np.ndarray, images: Sequence[Tensor]) -> dict[str, Any]:
    """Extremes, clipping and rounding from the ends (N, 4) of all images, and some of these."""
    low, high = ends[:, 0].min(), ends[:, 1].max()
    clipped = np.where(ends[:, :2] == (low, high), ends[:, 2:], 0).sum(1)
    some = [images[i] for i in spread(len(images), _MAX_EXAMPLES)]
    sample = np.concatenate([image.flatten()[:: max(1, image.numel() // 4096)].numpy() for image in some])
    return {
        "clipped": clipped if low < high else np.zeros(len(ends)),
        "step": min(rounding_step(images[i]) for i in spread(len(images), 16)),
        "values": (float(low), *np.quantile(sample, [0.01, 0.99]).tolist(), float(high)),
    }


def rounding_step(image: Tensor) -> float:
    """The step between the values of a rounded image; 0 if they are not rounded, inf if all are equal."""
    values = image.double().unique()
    if len(values) == 1:
        return math.inf
    if len(values) > image.numel() / 2 and len(values) > 256:
        return 0.0
    gaps = values.diff()
    step = gaps.min()
    return float(step) if bool(((gaps / step - (gaps / step).round()).abs() < 1e-3).all()) else 0.0


def _image(raw: RawImages, i: int) -> Tensor:
    """Image (C, H, W), float32, in the units of its file."""
    pixels = raw.load(i)
    if min(pixels.shape[:2]) < MIN_SIDE:
        what = f"has {pixels.shape[0]} x {pixels.shape[1]} pixels, too few for noise to be measured"
        raise AssayError(what, path=raw.names[i], cure=f"give images of {MIN_SIDE} x {MIN_SIDE} and more")
    check_finite(pixels, path=raw.names[i], cure="replace them first")
    return torch.from_numpy(pixels.astype(np.float32).transpose(2, 0, 1).copy())


def _batches(raw: RawImages, progress: Progress | None) -> Iterator[tuple[int, list[Tensor]]]:
    """Runs of images of one shape, each with the number of its first."""
    batch: list[Tensor] = []
    for i in range(len(raw.names)):
        image = _image(raw, i)
        if batch and (image.shape != batch[0].shape or len(batch) * image.numel() > _BATCH * 4096):
            yield i - len(batch), batch
            batch = []
        batch.append(image)
        if progress is not None:
            progress(i + 1, len(raw.names))
    yield len(raw.names) - len(batch), batch


def write_levels(found: Audit, path: Path) -> None:
    """A CSV for `levels=` of `assay data pack`; levels are in the files' units."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["filename", "sigma", "low", "high", "clipped"])
        columns = found.sigma, found.low, found.high, found.clipped
        for name, *numbers in zip(found.names, *columns, strict=True):
            writer.writerow([csv_cell(name), *(f"{number:.6g}" for number in numbers)])
