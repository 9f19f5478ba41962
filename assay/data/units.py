"""From images between -1 and 1 back to the units of the files they came from.

Most data are linear in these units: -1 and 1 are black and white. A sensor that counts photons has noise
that grows with the signal (Poisson-Gaussian): with Poisson counts k of mean lambda,

    value = black + gain k + read_noise z,        variance = gain (mean - black) + read_noise^2.

Its images are kept stabilised, by the generalised Anscombe transform of counts y = (value - black) / gain,

    f(y) = 2 sqrt(max(0, y + 3/8 + s^2)),        s = read_noise / gain,

whose noise has a standard deviation of 1, within 3% above five counts. A noisy image scatters around E f, not
around f of the mean: clean images are mapped by E f, and come back by the inverse of Makitalo and Foi (2013).
"""

import math
from functools import cache
from typing import Self

import numpy as np
from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

from assay.errors import AssayError

_TABULATED = 100.0  # counts up to which E f is summed; above, four terms of its expansion are exact to 1e-5


@dataclass(frozen=True, config=ConfigDict(allow_inf_nan=False))
class Stabilised:
    """The units of a sensor that counts: black and white of the files (`low`, `high`), and its noise."""

    low: float
    high: float
    gain: float = Field(gt=0)  # of the value, per photon
    read_noise: float = Field(0.0, ge=0)  # standard deviation, in the units of the files
    black: float = 0.0  # the value of no light

    @model_validator(mode="after")
    def _check_ends(self) -> Self:
        if not max(self.low, self.black) < self.high:
            what = f"expected low ({self.low:g}) and black ({self.black:g}) below high ({self.high:g})"
            raise AssayError(what, key="black", cure="correct black or the range")
        return self

    @property
    def sensor(self) -> str:
        """The sensor in words."""
        return f"gain {self.gain:g}, read noise {self.read_noise:g}, black at {self.black:g}"

    @property
    def sigma_tn(self) -> float:
        """The noise level of every noisy image, where black to white is 2."""
        low, high = self._ends()
        return 2 / (high - low)

    def counts(self, values: np.ndarray) -> np.ndarray:
        """Photons; in noisy images with the read noise still in them."""
        return (values.astype(np.float64) - self.black) / self.gain

    def share_darker(self, values: np.ndarray) -> float:
        """The share of values that lie further below `black` than noise does: by six deviations."""
        return float((values < self.black - 6 * math.hypot(self.read_noise, self.gain)).mean())

    def noisy_to_images(self, values: np.ndarray) -> np.ndarray:
        """Values of noisy files, of any shape -> images with noise of level `sigma_tn`."""
        return self._scaled(_anscombe(self.counts(values), self._spread))

    def clean_to_images(self, values: np.ndarray) -> np.ndarray:
        """Values without noise -> what noisy images of them scatter around."""
        return self._scaled(_expected(np.maximum(self.counts(values), 0), self._spread))

    def to_physical(self, images: np.ndarray) -> np.ndarray:
        """The inverse of `clean_to_images`, in the units of the files; nothing is darker than `black`."""
        low, high = self._ends()
        stable = low + (images.astype(np.float64) + 1) * ((high - low) / 2)
        table, expected = _tabulate(self._spread)
        many = np.maximum(stable, expected[-1])
        counts = many**2 / 4 - 1 / 8 - self._spread**2
        for _ in range(2):  # Newton's steps, with the derivative of f for that of E f
            counts += (many - _expand(counts, self._spread)) * many / 2
        few = np.interp(stable, expected, table)
        return self.black + self.gain * np.where(stable < expected[-1], few, counts)

    @property
    def _spread(self) -> float:
        return self.read_noise / self.gain

    def _ends(self) -> np.ndarray:
        """E f of black and white."""
        return _expected(np.maximum(self.counts(np.array([self.low, self.high])), 0), self._spread)

    def _scaled(self, stable: np.ndarray) -> np.ndarray:
        low, high = self._ends()
        return (stable - low) * (2 / (high - low)) - 1


PhysicalRange = tuple[float, float] | Stabilised  # of black and white; what -1 and 1 are in the files


def as_settings(units: PhysicalRange) -> str:
    """What to pack images with that they have these units, `range=0,4095`."""
    if not isinstance(units, Stabilised):
        return "range={:g},{:g}".format(*units)
    sensor = f"gain={units.gain:g},read_noise={units.read_noise:g},black={units.black:g}"
    return f"range={units.low:g},{units.high:g},{sensor}"


def ends_around(low: float, high: float) -> tuple[float, float]:
    """Round numbers just below and above."""
    step = 10 ** math.floor(math.log10(high - low) - 1)
    return math.floor(low / step) * step, math.ceil(high / step) * step


def to_physical(images: np.ndarray, physical_range: PhysicalRange) -> np.ndarray:
    """Images between -1 and 1 -> values in the units of the files, float64."""
    if isinstance(physical_range, Stabilised):
        return physical_range.to_physical(images)
    low, high = physical_range
    return low + (images.astype(np.float64) + 1) * ((high - low) / 2)


def black_and_white(physical_range: PhysicalRange) -> tuple[float, float]:
    """The two values of the files."""
    if isinstance(physical_range, Stabilised):
        return physical_range.low, physical_range.high
    return physical_range


@cache
def _tabulate(spread: float) -> tuple[np.ndarray, np.ndarray]:
    """Mean counts from 0 to `_TABULATED`, and E f of them, summed over k and z."""
    counts = np.linspace(0, math.sqrt(_TABULATED), 2001) ** 2
    k = np.arange(math.ceil(_TABULATED + 12 * math.sqrt(_TABULATED)))
    z, width = np.linspace(-8, 8, 4001, retstep=True)
    density = np.exp(-(z**2) / 2) * (width / math.sqrt(2 * math.pi))
    of_k = _anscombe(k[:, None] + spread * z, spread)
    factorial = np.concatenate([[0.0], np.cumsum(np.log(k[1:]))])
    with np.errstate(divide="ignore", invalid="ignore"):
        log_counts = np.where(k == 0, 0.0, k * np.log(counts)[:, None])
    poisson = np.exp(log_counts - counts[:, None] - factorial)
    return counts, poisson @ (of_k @ density)


def _anscombe(counts: np.ndarray, spread: float) -> np.ndarray:
    return 2 * np.sqrt(np.maximum(0, counts + 3 / 8 + spread**2))


def _expected(counts: np.ndarray, spread: float) -> np.ndarray:
    """E f for mean counts >= 0, of any shape."""
    few = np.interp(counts, *_tabulate(spread))
    return np.where(counts < _TABULATED, few, _expand(np.maximum(counts, _TABULATED), spread))


def _expand(counts: np.ndarray, spread: float) -> np.ndarray:
    """E f = f + f'' m_2 / 2 + f''' m_3 / 6 + f'''' m_4 / 24 at the mean, with m_i the central moments of y."""
    y, variance = counts + 3 / 8 + spread**2, counts + spread**2
    second, third, fourth = -0.5 * y**-1.5, 0.75 * y**-2.5, -1.875 * y**-3.5
    return (
        2 * np.sqrt(y) + second * variance / 2 + third * counts / 6 + fourth * (counts + 3 * variance**2) / 24
    )
