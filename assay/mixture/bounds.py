"""What the theorems promise: effective sample sizes, upper and lower bounds on W1, and their conditions.

Two effective sample sizes decide, one per stage of the estimator,

    n_d = sum_i sigma_i^-4 / max_i sigma_i^-4        for the subspace,
    n_l = sum_i sigma_i^-(4k-2) / max_i sigma_i^-(4k-2)   inside it.

The theorems hold up to absolute constants that the paper leaves open: 1 here. They are stated for atoms in the
unit ball (else divide sigma and W1 by its radius) and sigma_i >= 1. A cleaner sample may be given more noise:
its level counts as 1: the spread of the atoms, not the noise, limits what it tells.

Samples are given by their levels `sigma`, one per sample, or one per kind with the `count` of each: Corollary
"two_noise_levels" is `upper_bound([1, sigma], d, k, count=[p n, (1 - p) n])`.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from assay.errors import AssayError, check
from assay.mixture.moments import Array
from assay.mixture.samples import check_sigma


class Bound(NamedTuple):
    """The terms of a bound on W1: their sum is an upper bound, the larger of them a lower one."""

    subspace: float
    """From finding the subspace of the atoms."""
    low_dim: float
    """From estimating inside it."""


@dataclass(frozen=True)
class Condition:
    """One hypothesis of a theorem: it holds if `have` >= `need`."""

    name: str
    have: float
    need: float

    @property
    def holds(self) -> bool:
        """Whether the samples satisfy it."""
        return self.have >= self.need

    def __str__(self) -> str:
        verdict = "holds" if self.holds else "FAILS"
        return f"{self.name}: have {self.have:,.4g}, need {self.need:,.4g}: {verdict}"


def effective_sizes(sigma: ArrayLike, k: int, count: ArrayLike = 1.0, radius: float = 0.0) -> tuple[float, ...]:
    """(n_d, n_l): how many samples at the lowest noise these are worth; levels below `radius` count as it."""
    _log_inverse(k)
    return tuple(_size(*_samples(sigma, count, radius), power) for power in (4, 4 * k - 2))


def noisy_per_clean(sigma: float, k: int) -> tuple[float, float]:
    """How many samples at noise `sigma` replace one at noise 1: (for the subspace, inside it)."""
    return _power(sigma, 4), _power(sigma, 4 * k - 2)


def upper_bound(
    sigma: ArrayLike, num_features: int, k: int, delta: float = 0.05, count: ArrayLike = 1.0
) -> Bound:
    """Theorem "ub_heterogenous": W1 is below the sum with probability 1 - delta, for atoms in the unit ball.

    Its terms, with levels below 1 raised to it, are

    C k ((d + log(1/delta)) / sum_i sigma_i^-4)^(1/4)  and
    C k^3 ((k log k + log(1/delta)) / sum_i sigma_i^-(4k-2))^(1/(4k-2)).
    """
    samples, log_delta, power = _samples(sigma, count, 1.0), _log_inverse(k, num_features, delta), 4 * k - 2
    subspace = k * (num_features + log_delta) ** 0.25 * _root(*samples, 4)
    low_dim = k**3 * (k * math.log(k) + log_delta) ** (1 / power) * _root(*samples, power)
    return Bound(subspace, low_dim)


def upper_bound_line(sigma: ArrayLike, k: int, count: ArrayLike = 1.0) -> float:
    """Theorem "ub_1d": on a line W1 <= C k^2 (sum_i sigma_i^-(4k-2))^(-1/(4k-2)) with probability 3/4.

    The power of k is one less than in several dimensions; levels below 1 are raised to it.
    """
    _log_inverse(k)
    return k**2 * _root(*_samples(sigma, count, 1.0), 4 * k - 2)


def lower_bound(
    sigma: ArrayLike, num_features: int, k: int, delta: float = 0.05, count: ArrayLike = 1.0
) -> Bound:
    """Theorem "lb_combined": any estimator has W1 >= the larger term with probability delta <= 1/4 somewhere.

    That is, for some k-atomic distribution in a ball whose radius is at most every sigma_i. Its terms are

    c ((d + log(1/delta)) / sum_i sigma_i^-4)^(1/4), for k >= 2 and d >= 3; in the plane Theorem
    "lb_hd_high_prob" still has its part c (log(1/delta) / sum_i sigma_i^-4)^(1/4),
    and (c/k) (log(1/delta) / sum_i sigma_i^-(4k-2))^(1/(4k-2)), which holds on a line already.
    """
    samples, log_delta, power = _samples(sigma, count), _log_inverse(k, num_features, delta, 0.25), 4 * k - 2
    dimension = num_features if num_features >= 3 else 0
    subspace = (dimension + log_delta) ** 0.25 * _root(*samples, 4) if min(k, num_features) >= 2 else 0.0
    return Bound(subspace, 1 / k * log_delta ** (1 / power) * _root(*samples, power))


def upper_conditions(
    sigma: ArrayLike, num_features: int, k: int, delta: float = 0.05, radius: float = 1.0,
    count: ArrayLike = 1.0,
) -> list[Condition]:  # fmt: skip
    """Hypotheses of the upper bound: n_d >= d + log(1/delta) and n_l >= 4 (log(1/delta) + k log k).

    The 4 is what the partition into groups needs. The bound can do without the last, sigma >= `radius`.
    """
    log_delta = _log_inverse(k, num_features, delta)
    n_d, n_l = effective_sizes(sigma, k, count, radius)
    least = float(_samples(sigma, count)[0].min())
    return [
        Condition("effective samples for the subspace, n_d", n_d, num_features + log_delta),
        Condition("effective samples inside it, n_l", n_l, 4 * (log_delta + k * math.log(k))),
        Condition("lowest noise (below the atoms' radius it counts as the radius)", least, radius),
    ]


def lower_conditions(
    sigma: ArrayLike, num_features: int, k: int, delta: float = 0.05, count: ArrayLike = 1.0
) -> list[Condition]:
    """sum_i sigma_i^-4 >= d + log(1/delta) and sum_i sigma_i^-(4k-2) >= k^(2k-1) log(1/delta).

    These are the hypotheses of the lower bound, in units of the ball's radius: 1, or the lowest sigma if less.
    """
    samples, log_delta, power = _samples(sigma, count), _log_inverse(k, num_features, delta, 0.25), 4 * k - 2
    unit = min(1.0, float(samples[0].min()))
    low, high = ((unit / root) ** p if (root := _root(*samples, p)) else 0.0 for p in (4, power))
    return [
        Condition("sum of sigma^-4", low, num_features + log_delta),
        Condition(f"sum of sigma^-{power}", high, _power(k, 2 * k - 1) * log_delta),
    ]


def _log_inverse(k: int, num_features: int = 1, delta: float = 0.25, most: float = 0.5) -> float:
    """log(1 / delta), after rejecting values outside the theorems."""
    what = f"{delta:g} is no probability of failure: above 0, below 0.5, and at most 0.25 for a lower bound"
    sizes, outside = {"k": k, "num_features": num_features}, not 0 < delta < 0.5 or delta > most
    rules = [(n < 1, AssayError(f"is {n}, but needs at least 1", key=key)) for key, n in sizes.items()]
    check([*rules, (outside, AssayError(what, key="delta"))])
    return math.log(1 / delta)


def _samples(sigma: ArrayLike, count: ArrayLike, radius: float = 0.0) -> tuple[Array, Array]:
    """The levels that occur, raised to `radius`, and how often."""
    level = check_sigma(sigma)
    number = np.broadcast_to(np.asarray(count, np.float64), level.shape)
    if not (number >= 0).all() or not number.any():
        raise AssayError("counts are numbers >= 0, not all of them 0", key="count")
    return np.maximum(level, radius)[number > 0], number[number > 0]


def _size(level: Array, number: Array, power: int) -> float:
    least = level.min()
    return float(number @ np.where(level == least, 1.0, least / np.where(level > 0, level, 1)) ** power)


def _root(level: Array, number: Array, power: int) -> float:
    """(sum_i sigma_i^-power)^(-1/power): the noise level of all samples together."""
    return float(level.min() * _size(level, number, power) ** (-1 / power))


def _power(base: float, exponent: int) -> float:
    with np.errstate(over="ignore"):  # infinitely many will do
        return float(np.float64(base) ** exponent)
