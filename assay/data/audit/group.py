"""What images of one camera have in common: a noise level, the correlation of neighbours, gain and read noise.

All of it is measured in the flattest windows of all images together. A sensor that counts photons has noise
whose variance grows with the signal (Poisson-Gaussian):

    variance = gain * mean + read_noise^2,        mean measured from the value of no light.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy.special import i0e, i1e, stdtrit
from torch import Tensor

from assay.data.audit.level import lag_one, unclipped, windows

Bounds = tuple[float, float]
_ANY: Bounds = (-math.inf, math.inf)

_SIDE = 6
_SIDE_SHARED = 4  # for the level of a group, with the windows beside each
_START = 0.01  # of all windows, the flattest: what the search for flat windows starts from
_MIN_WINDOWS = 200
_NUM_COPIES = 600  # of clean examples, with noise
_TEXTURE = 0.01  # how much too high a level may be for what is left of texture (bench/noise_levels.md)
_MAX_TOTAL = 2**23  # windows kept in memory; of more images an even selection is looked at
_MIN_OWNERS = 16  # independent parts, of which errors are computed; fewer images are cut
_LEAST_PART = 16  # sides of such parts
_TINY = 12  # sides of images that may have no flat windows
_MOST_TURNS, _NEARLY = 10, 0.01
_MOSTLY = 2.0  # times too high
_NUM_BINS = 16
_LEAST_STRIPED = 24  # sides of images whose stripes are looked for
_STRIPED = 1.8  # times the variance along one axis that it may have along the other
_MAX_STRIPED = 2**17  # windows that are looked at
_MIN_FLAT = 20  # windows of an image that its own correlation is measured in
_MIN_SHARE = 0.25  # of the images that must have as many flat ones: in fewer, levels may be too high by chance
_MAX_SPREAD = 1 / 3  # variance of the detail of flat windows over its square: 2/15 for noise, more for texture
_DEPENDS = 1.5  # times the variance of noise in dark parts, if it depends on the signal
_SURELY = 1.3  # times, at the low end of the interval of the gain


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
    """A line fitted to the variance of flat windows: `variance = gain * mean + offset`, mean above `black`."""

    gain: Measured
    offset: Measured  # the square of the read noise, if no light is `black`
    mean: np.ndarray  # (bins,) of the signal that the line was fitted to
    black: float = 0.0

    def line(self, mean: np.ndarray) -> np.ndarray:
        """The variance of the noise where the signal has this mean."""
        return self.gain.value * mean + self.offset.value

    def dependence(self) -> float:
        """Variance of the noise at the bright end over that at the dark end; 1 if it may hardly differ."""
        if self.gain.low <= 0 or not len(self.mean):
            return 1.0
        ends, middle = np.array([self.mean.min(), self.mean.max()]), self.mean.mean()
        least = self.line(middle) + self.gain.low * (ends - middle)
        dark, bright = self.line(ends).tolist()
        depends = least[1] >= _SURELY * least[0] and bright > _DEPENDS * dark
        return (bright / dark if dark > 0 else math.inf) if depends else 1.0

    def __str__(self) -> str:
        """As settings of a source; of read noise and the value of no light, only their sum can be seen."""
        gain, offset = self.gain.value, self.offset.value
        read_noise = f",read_noise={math.sqrt(offset):.4g}" if offset > 0 else ""
        black = self.black - min(offset, 0) / gain
        return f"gain={gain:.4g}{read_noise}" + (f",black={black:.4g}" if black else "")


class _Pool(NamedTuple):
    """All windows of all images, each (L,); `owner` is the number of the image, or of its part."""

    detail: np.ndarray
    structure: np.ndarray
    mean: np.ndarray
    owner: np.ndarray


def _pool(images: Sequence[Tensor], bounds: Bounds, each_channel: bool = False) -> _Pool:
    """The windows without values at the `bounds`; of more images than fit into memory, an even selection."""
    images = _cut(images)
    per_image = min(images[0].shape[-2] * images[0].shape[-1], 2**16)
    parts = []
    for number, image in enumerate(images[:: max(1, len(images) * per_image // _MAX_TOTAL)]):
        x, k = (image[:, None], _SIDE) if each_channel else (image[None], _SIDE_SHARED)
        found, whole = windows(x, k), unclipped(x, k, bounds)
        structure = found.structure if each_channel else found.structure_around()
        kept = [values[whole].double().numpy() for values in (found.detail, structure, found.mean)]
        parts.append((*kept, np.full(len(kept[0]), number)))
    return _Pool(*map(np.concatenate, zip(*parts, strict=True)))


def _cut(images: Sequence[Tensor]) -> Sequence[Tensor]:
    """Few images in parts: the residuals of a fit to one image add up to 0, which would pass for certainty."""
    num_cuts = math.ceil(math.sqrt(_MIN_OWNERS / len(images)))
    num_cuts = min(num_cuts, min(images[0].shape[1:]) // _LEAST_PART)
    if num_cuts < 2:
        return images
    rows = [part for image in images for part in image.chunk(num_cuts, 1)]
    return [part for row in rows for part in row.chunk(num_cuts, 2)]


def group_level(images: Sequence[Tensor], bounds: Bounds = _ANY, clean: Sequence[Tensor] = ()) -> Measured:
    """The noise level that all `images` (C, H, W) share; windows with values at the `bounds` are left out.

    The texture left in their flattest windows makes it slightly too high, which the interval allows for; in
    tiny images it may be all texture. With `clean` examples texture is measured, on copies of them with noise
    of the level found, and subtracted:

        sigma^2 = variance - (f^2 - 1) sigma^2,        f the factor by which that noise is found too high.
    """
    pool = _pool(images, bounds)
    chosen, variance = _flat_windows(pool)
    if variance == 0:
        return Measured(0.0, 0.0, 0.0)
    value, texture = math.sqrt(variance), 0.0 if clean else _TEXTURE
    error = _error(pool.detail[chosen] - variance, pool.owner[chosen]) / (2 * variance)
    if clean:
        generator = torch.Generator().manual_seed(0)
        for _ in range(_MOST_TURNS):  # each time at a level that is more nearly right
            before, (factor, error_there) = value, _texture(clean, value, generator)
            value = math.sqrt(max(variance - (factor**2 - 1) * value**2, 0.01 * variance))
            if abs(math.log(value / before)) < _NEARLY:
                break
        if factor > _MOSTLY:  # texture, beside which the rest is not known
            return Measured(value, 0.0, math.sqrt(variance) * math.exp(1.96 * error))
        error = factor**2 * math.hypot(error, error_there)
    elif min(images[0].shape[1:]) < _TINY:
        texture = math.inf
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


def fit_sensor(images: Sequence[Tensor], bounds: Bounds = _ANY, black: float = 0.0) -> Sensor | None:
    """Gain and read noise of the camera that took `images` (C, H, W); None without enough flat windows.

    Weighted least squares over the flat windows of each channel. Which are flat depends on the line itself.
    """
    pool = _pool(images, bounds, each_channel=True)
    pool = pool._replace(mean=pool.mean - black)
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
    if np.square(pool.detail[chosen] / variance - 1).mean() > _MAX_SPREAD:
        return None
    gain, offset, slack = sensor.gain, sensor.offset, 2 * _TEXTURE * float(np.median(variance))
    gain = gain._replace(low=gain.low - 2 * _TEXTURE * abs(gain.value))  # for texture, as the level of a group
    offset = Measured(offset.value, offset.low - slack, offset.high + slack)
    if _slope_within(pool.mean[chosen], pool.detail[chosen], variance, pool.owner[chosen]) < gain.value / 2:
        gain = gain._replace(low=0.0)  # images differ in level, and not their parts
    return replace(sensor, gain=gain, offset=offset, black=black)


def _slope_within(mean: np.ndarray, energy: np.ndarray, variance: np.ndarray, owner: np.ndarray) -> float:
    """The high end of the slope of `energy` against `mean` within images; all (L,), weights as in `_fitted`."""
    unit, weight = np.unique(owner, return_inverse=True)[1], variance**-2.0
    total = np.bincount(unit, weight)
    x, y = (each - (np.bincount(unit, weight * each) / total)[unit] for each in (mean, energy))
    spread, noise = float((weight * x * x).sum()), float((weight * variance).sum()) / _SIDE**2
    if spread < 4 * noise:  # the means of parts hardly differ but by their noise
        return math.inf
    spread -= noise
    slope = float((weight * x * y).sum()) / spread
    return slope + 1.96 * math.sqrt(np.square(np.bincount(unit, weight * x * (y - slope * x))).sum()) / spread


def sensor_from_repeats(
    mean: np.ndarray, variance: np.ndarray, around: np.ndarray, black: float = 0.0
) -> Sensor | None:
    """The same from the mean and the variance over repeated exposures of each pixel, (L,) all.

    The mean of a few exposures is noisy itself, which would make the line too flat. `around`, the mean of the
    pixels beside each (`mean_around`), follows the brightness and is independent of the pixel's noise. It gives
    the weights, and the line is fitted with it as the instrument. None if the exposures do not differ.
    """
    if not variance.any():
        return None
    mean, around, expected = mean - black, around - black, np.full(len(mean), variance.mean())
    for _ in range(6):
        sensor = _fitted(mean, variance, expected, np.arange(len(mean)), around)
        expected = np.maximum(sensor.line(around), 1e-3 * variance.mean())
    return replace(sensor, black=black)


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
    free = max(len(sums) - 2, 1)
    error = stdtrit(free, 0.975) * np.sqrt(len(sums) / free * np.diag(inverse @ sums.T @ sums @ inverse.T))
    gain, offset = map(Measured.around, line.tolist(), error.tolist())
    bin_of = _bins(instrument, instrument.min(), instrument.max())
    count = np.bincount(bin_of)
    filled = count >= 20
    return Sensor(gain, offset, np.bincount(bin_of, mean)[filled] / count[filled])


def stripes(images: Sequence[Tensor]) -> str:
    """What to say of noise that rows or columns of pixels share, as of a camera that reads them one by one.

    In windows that are smooth but for that, coefficients that vary along one axis only have the variance of the
    others. Stripes raise those of one axis, texture those of both; medians do without edges. Most windows of
    small images have some of what these show.
    """
    images = [x for x in images if min(x.shape[1:]) >= _LEAST_STRIPED]
    if not images:
        return ""
    energy = [windows(x[:, None], _SIDE).energy.transpose(1, 2).flatten(0, 1) for x in images]
    some = torch.cat([each[:: max(1, len(each) * len(images) // _MAX_STRIPED)] for each in energy])
    found = some.unflatten(1, (_SIDE, _SIDE))
    order = torch.arange(1, _SIDE)[:, None] + torch.arange(1, _SIDE)  # of those that vary along both axes
    structure = found[:, 1:, 1:][:, order < _SIDE].mean(1)
    smooth = found[structure <= structure.quantile(0.3)]
    fine, half = smooth[:, 1:, 1:][:, order >= _SIDE + 2], _SIDE // 2
    white, *shared = (float(each.median()) for each in (fine, smooth[:, half:, 0], smooth[:, 0, half:]))
    low, high = sorted(shared)
    if not (0 < white and low < 1.6 * white and high > _STRIPED * low):
        return ""
    which = "rows" if shared[0] == high else "columns"
    offset = math.sqrt((high / white - 1) / _SIDE)
    what = f"{which} of pixels share noise of about {offset:.1g} times that of a pixel: stripes"
    return f"{what}, which are not the white noise that training assumes. Subtract each {which[:-1]}'s offset"


def is_correlated(white: Measured) -> bool:
    """Whether a correlation of neighbours is surely, and by more than a little, above that of white noise."""
    return white.low > 0.05 and white.value > 0.1


def neighbour_correlation(images: Sequence[Tensor], sigma: Sequence[float]) -> Measured:
    """Correlation of the noise of pixels beside each other; 0 for white noise, NaN without flat parts.

    If the noise has the spectrum exp(b (cos u + cos v)), neighbours correlate by I_1(b) / I_0(b), and the log
    of the variance of a coefficient is a line in the lag-one sum of its cosines (`lag_one`), with slope b.
    That line is fitted to the fine coefficients of windows with less structure than `sigma`^2. Without
    any, the flattest of each image may have texture, which unlike noise differs from image to image: the
    interval then covers most images.
    """
    fine, lag = lag_one(_SIDE)
    slope_of = np.linalg.pinv(np.stack([np.ones(int(fine.sum())), lag[fine].numpy()], 1))[1]
    for share in (0.0, 0.05):  # if hardly any image has such windows, the flattest of each image must do
        spectra = []
        for image, level in zip(images, sigma, strict=True):
            found = windows(image[:, None], _SIDE)
            least = max(share, min(1.0, (_MIN_FLAT + 1) / found.structure.numel()))
            bound = max(level**2, found.structure.quantile(least).item() if share else 0.0)
            flat = (found.structure < bound).double()
            if level > 0 and flat.sum() >= _MIN_FLAT:
                energy = found.energy[:, fine.flatten()].double()
                spectra.append((torch.einsum("cfl,cl->f", energy, flat) / level**2).numpy())
        if len(spectra) >= _MIN_SHARE * len(images):
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
    ends = [max(-1.0, together - error), min(1.0, together + error)]
    if share:
        ends += np.quantile([correlation(spectrum) for spectrum in spectra], (0.05, 0.95)).tolist()
    return Measured(together, min(ends), max(ends))
