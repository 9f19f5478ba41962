"""What the theorems promise: effective sample sizes, upper and lower bounds on W1, and their conditions.

Two effective sample sizes decide, one per stage of the estimator,

    n_d = sum_i sigma_i^-4 / max_i sigma_i^-4        for the subspace,
    n_l = sum_i sigma_i^-(4k-2) / max_i sigma_i^-(4k-2)   inside it.

The theorems hold up to absolute constants that the paper leaves open: they are arguments here, 1 unless given.

They are stated for sigma_i >= R, the radius of a ball that holds the atoms (the paper's unit). A sample below
that may be given more noise, so its level counts as R: the spread of the atoms, not the noise, then limits what
it tells, and no formula promises more. Every formula is homogeneous of degree one in (sigma, R, W1).

Samples are given by their levels `sigma`, one per sample, or one per kind with the `count` of each: Corollary
"two_noise_levels" is `upper_bound([1, sigma], d, k, count=[p n, (1 - p) n])`.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from assay.errors import AssayError
from assay.mixture.moments import Array
from assay.mixture.noise import check_sigma


def effective_sizes(
    sigma: ArrayLike, k: int, count: ArrayLike = 1.0, radius: float = 0.0
) -> tuple[float, float]:
    """(n_d, n_l): how many samples at the lowest noise these are worth; levels below `radius` count as it."""
    _check(k)
    level, number = _samples(sigma, count, radius)
    return _size(level, number, 4), _size(level, number, 4 * k - 2)


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


@dataclass(frozen=True)
class Bound:
    """A bound on W1, term by term."""

    subspace: float
    """From finding the subspace of the atoms."""
    low_dim: float
    """From estimating inside it."""

    @property
    def total(self) -> float:
        """The sum, for an upper bound."""
        return self.subspace + self.low_dim

    @property
    def largest(self) -> float:
        """The maximum, for a lower bound."""
        return max(self.subspace, self.low_dim)


def upper_bound(
    sigma: ArrayLike, num_features: int, k: int, delta: float = 0.05, constant: float = 1.0,
    radius: float = 1.0, count: ArrayLike = 1.0,
) -> Bound:  # fmt: skip
    """Theorem "ub_heterogenous": W1 is below the total with probability 1 - delta, for atoms within `radius`.

    Its terms, with levels below the radius raised to it, are

    C k ((d + log(1/delta)) / sum_i sigma_i^-4)^(1/4)  and
    C k^3 ((k log k + log(1/delta)) / sum_i sigma_i^-(4k-2))^(1/(4k-2)).
    """
    samples, log_delta, power = _samples(sigma, count, radius), _check(k, num_features, delta), 4 * k - 2
    subspace = constant * k * (num_features + log_delta) ** 0.25 * _root(*samples, 4)
    low_dim = constant * k**3 * (k * math.log(k) + log_delta) ** (1 / power) * _root(*samples, power)
    return Bound(subspace, low_dim)


def upper_bound_line(
    sigma: ArrayLike, k: int, constant: float = 1.0, radius: float = 1.0, count: ArrayLike = 1.0
) -> float:
    """Theorem "ub_1d": on a line W1 <= C k^2 (sum_i sigma_i^-(4k-2))^(-1/(4k-2)) with probability 3/4.

    The power of k is one less than in several dimensions; levels below the radius are raised to it.
    """
    _check(k)
    return constant * k**2 * _root(*_samples(sigma, count, radius), 4 * k - 2)


def lower_bound(
    sigma: ArrayLike, num_features: int, k: int, delta: float = 0.05, constant: float = 1.0,
    count: ArrayLike = 1.0,
) -> Bound:  # fmt: skip
    """Theorem "lb_combined": any estimator has W1 >= `largest` with probability delta <= 1/4 somewhere.

    That is, for some k-atomic distribution in a ball whose radius is at most every sigma_i. Its terms are

    c ((d + log(1/delta)) / sum_i sigma_i^-4)^(1/4), for k >= 2 and d >= 3; in the plane Theorem
    "lb_hd_high_prob" still has its part c (log(1/delta) / sum_i sigma_i^-4)^(1/4),
    and (c/k) (log(1/delta) / sum_i sigma_i^-(4k-2))^(1/(4k-2)), which holds on a line already.
    """
    samples, log_delta, power = _samples(sigma, count), _check(k, num_features, delta, 0.25), 4 * k - 2
    subspace = 0.0
    if k >= 2 and num_features >= 2:
        dimension = num_features if num_features >= 3 else 0
        subspace = (dimension + log_delta) ** 0.25 * _root(*samples, 4)
    return Bound(constant * subspace, constant / k * log_delta ** (1 / power) * _root(*samples, power))


def _check(k: int, num_features: int = 1, delta: float = 0.25, largest_delta: float = 0.5) -> float:
    """log(1 / delta), after rejecting values outside the theorems."""
    for key, value in (("k", k), ("num_features", num_features)):
        if value < 1:
            raise AssayError(f"is {value}, but the theorems need at least 1", key=key)
    if not 0 < delta < 0.5 or delta > largest_delta:
        limit = "below 0.5" if largest_delta == 0.5 else f"at most {largest_delta:g} for a lower bound"
        raise AssayError(f"{delta:g} is no probability of failure: above 0 and {limit}", key="delta")
    return math.log(1 / delta)


def noisy_per_clean(sigma: float, k: int) -> tuple[float, float]:
    """How many samples at noise `sigma` replace one at noise 1: (for the subspace, inside it)."""
    return _power(sigma, 4), _power(sigma, 4 * k - 2)


def _power(base: float, exponent: int) -> float:
    with np.errstate(over="ignore"):  # infinitely many will do
        return float(np.float64(base) ** exponent)


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


def upper_conditions(
    sigma: ArrayLike, num_features: int, k: int, delta: float = 0.05, radius: float = 1.0, c_1: float = 1.0,
    c_2: float = 0.25, count: ArrayLike = 1.0,
) -> list[Condition]:  # fmt: skip
    """Hypotheses of the upper bound: n_d >= (d + log(1/delta)) / c_1 and n_l >= (log(1/delta) + k log k) / c_2.

    c_2 = 1/4 is what the partition into groups needs. The last, sigma >= `radius`, is one that the bound can do
    without: levels below the radius count as the radius, in n_d and n_l too.
    """
    log_delta = _check(k, num_features, delta)
    n_d, n_l = effective_sizes(sigma, k, count, radius)
    least = float(_samples(sigma, count)[0].min())
    return [
        Condition("effective samples for the subspace, n_d", n_d, (num_features + log_delta) / c_1),
        Condition("effective samples inside it, n_l", n_l, (log_delta + k * math.log(k)) / c_2),
        Condition("lowest noise (below the atoms' radius it counts as the radius)", least, radius),
    ]


def lower_conditions(
    sigma: ArrayLike, num_features: int, k: int, delta: float = 0.05, radius: float = 1.0,
    constant: float = 1.0, count: ArrayLike = 1.0,
) -> list[Condition]:  # fmt: skip
    """Hypotheses of the lower bound, for atoms in a ball of `radius`, or of the lowest sigma if that is less:

    sum_i sigma_i^-(4k-2) >= (Ck)^(2k-1) log(1/delta) and sum_i sigma_i^-4 >= C (d + log(1/delta)), with sigma
    in units of that radius.
    """
    samples, log_delta = _samples(sigma, count), _check(k, num_features, delta, 0.25)
    unit, power = min(radius, float(samples[0].min())), 4 * k - 2
    low, high = ((unit / root) ** p if (root := _root(*samples, p)) else 0.0 for p in (4, power))
    return [
        Condition("sum of sigma^-4", low, constant * (num_features + log_delta)),
        Condition(f"sum of sigma^-{power}", high, _power(constant * k, 2 * k - 1) * log_delta),
    ]
