"""What the theorems promise: effective sample sizes, upper and lower bounds on W1, their conditions, hard
instances.

Two effective sample sizes decide, one per stage of the estimator,

    n_d = sum_i sigma_i^-4 / max_i sigma_i^-4        for the subspace,
    n_l = sum_i sigma_i^-(4k-2) / max_i sigma_i^-(4k-2)   inside it.

The theorems hold up to absolute constants that the paper leaves open: they are arguments here, 1 unless given.
They are stated for atoms in the unit ball and sigma_i >= 1; every formula is homogeneous of degree one in
(sigma, W1), so other units need no conversion, and `radius` enters the lower bound's condition alone.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from assay.mixture.moments import Array, Atoms


def effective_sample_size(sigma: ArrayLike, power: float) -> float:
    """sum_i sigma_i^-power / max_i sigma_i^-power: how many samples at the lowest noise these are worth."""
    level = check_sigma(sigma)
    if level.min() == 0:
        return float((level == 0).sum())
    return float(((level.min() / level) ** power).sum())


def check_sigma(sigma: ArrayLike) -> Array:
    """Noise levels as a float64 vector; refuses none at all, negative ones, NaN and infinity."""
    level = np.atleast_1d(np.asarray(sigma, np.float64))
    if level.ndim != 1 or len(level) == 0:
        raise ValueError(f"sigma has shape {np.shape(sigma)}; expected one noise level per sample")
    bad = ~(np.isfinite(level) & (level >= 0))
    if bad.any():
        first = int(bad.argmax())
        raise ValueError(f"sigma[{first}] = {level[first]}: a noise level is finite and >= 0")
    return level


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


def _root(sigma: Array, power: float) -> float:
    """(sum_i sigma_i^-power)^(-1/power), in logarithms: the noise level of all samples together."""
    if sigma.min() == 0:
        return 0.0
    return float(sigma.min() * effective_sample_size(sigma, power) ** (-1 / power))


def upper_bound(
    sigma: ArrayLike, num_features: int, k: int, delta: float = 0.05, constant: float = 1.0
) -> Bound:
    """Theorem "ub_heterogenous": W1 is below the total with probability 1 - delta. Its terms are

    C k ((d + log(1/delta)) / sum_i sigma_i^-4)^(1/4)  and
    C k^3 ((k log k + log(1/delta)) / sum_i sigma_i^-(4k-2))^(1/(4k-2)).
    """
    level, log_delta = check_sigma(sigma), _check(k, num_features, delta)
    power = 4 * k - 2
    subspace = constant * k * (num_features + log_delta) ** 0.25 * _root(level, 4)
    low_dim = constant * k**3 * (k * math.log(k) + log_delta) ** (1 / power) * _root(level, power)
    return Bound(subspace, low_dim)


def upper_bound_two_levels(
    num_samples: int,
    clean_fraction: float,
    sigma: float,
    num_features: int,
    k: int,
    delta: float = 0.05,
    constant: float = 1.0,
) -> Bound:
    """Corollary "two_noise_levels": a fraction p of the samples has noise 1, the others `sigma` >= 1.

    The sums become n (p + (1 - p) / sigma^4) and n (p + (1 - p) / sigma^(4k-2)).
    """
    if not 0 <= clean_fraction <= 1 or not sigma >= 1:
        raise ValueError(f"clean_fraction = {clean_fraction}, sigma = {sigma}: need a fraction and sigma >= 1")
    log_delta, power = _check(k, num_features, delta), 4 * k - 2
    worth = [num_samples * (clean_fraction + (1 - clean_fraction) * sigma**-p) for p in (4, power)]
    subspace = constant * k * ((num_features + log_delta) / worth[0]) ** 0.25
    return Bound(subspace, constant * k**3 * ((k * math.log(k) + log_delta) / worth[1]) ** (1 / power))


def lower_bound(
    sigma: ArrayLike, num_features: int, k: int, delta: float = 0.05, constant: float = 1.0
) -> Bound:
    """Theorem "lb_combined": for any estimator some k-atomic distribution has W1 >= `largest` with probability
    delta.

    Its terms are c ((d + log(1/delta)) / sum_i sigma_i^-4)^(1/4), proved for d >= 3 and k >= 2 (0 otherwise),
    and (c/k) (log(1/delta) / sum_i sigma_i^-(4k-2))^(1/(4k-2)), which holds on a line already.
    """
    level, log_delta = check_sigma(sigma), _check(k, num_features, delta)
    power = 4 * k - 2
    subspace = (num_features + log_delta) ** 0.25 * _root(level, 4) if num_features >= 3 and k >= 2 else 0.0
    return Bound(constant * subspace, constant / k * log_delta ** (1 / power) * _root(level, power))


def _check(k: int, num_features: int, delta: float) -> float:
    """log(1 / delta), after refusing values outside the theorems."""
    if k < 1 or num_features < 1:
        raise ValueError(f"k = {k}, d = {num_features}: need at least one atom and one dimension")
    if not 0 < delta < 0.5:
        raise ValueError(f"delta = {delta}: the probability of failure lies in (0, 1/2)")
    return math.log(1 / delta)


def noisy_per_clean(sigma: float, k: int) -> tuple[float, float]:
    """How many samples at noise `sigma` replace one at noise 1: (for the subspace, inside it)."""
    return sigma**4, sigma ** (4 * k - 2)


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
    sigma: ArrayLike, num_features: int, k: int, delta: float = 0.05, c_1: float = 1.0, c_2: float = 0.25
) -> list[Condition]:
    """Hypotheses of the upper bound: n_d >= (d + log(1/delta)) / c_1 and n_l >= (log(1/delta) + k log k) / c_2.

    c_2 = 1/4 is what the partition into groups needs.
    """
    level, log_delta = check_sigma(sigma), _check(k, num_features, delta)
    need_l = (log_delta + k * math.log(k)) / c_2
    return [
        Condition(
            "effective samples for the subspace, n_d",
            effective_sample_size(level, 4),
            (num_features + log_delta) / c_1,
        ),
        Condition("effective samples inside it, n_l", effective_sample_size(level, 4 * k - 2), need_l),
    ]


def lower_conditions(
    sigma: ArrayLike, num_features: int, k: int, delta: float = 0.05, radius: float = 1.0, constant: float = 1.0
) -> list[Condition]:
    """Hypotheses of the lower bound, for atoms in a ball of `radius`: sum_i sigma_i^-(4k-2) >= (Ck)^(2k-1)
    log(1/delta)

    and sum_i sigma_i^-4 >= C (d + log(1/delta)), with sigma in units of the radius.
    """
    level, log_delta = check_sigma(sigma) / radius, _check(k, num_features, delta)
    low, high = (root**-power if (root := _root(level, power)) else math.inf for power in (4, 4 * k - 2))
    return [
        Condition("sum of sigma^-4", low, constant * (num_features + log_delta)),
        Condition(f"sum of sigma^-{4 * k - 2}", high, (constant * k) ** (2 * k - 1) * log_delta),
    ]


def hard_pair(k: int, epsilon: float = 1.0) -> tuple[Atoms, Atoms]:
    """Two k-atomic distributions on [-epsilon, epsilon] with the same first 2k - 2 moments, W1 of order
    epsilon / k.

    On 2k points the divided difference of order 2k - 1 vanishes for polynomials of degree <= 2k - 2; its
    coefficients alternate in sign, and the positive and the negative ones are the two distributions. The
    points are the Chebyshev extrema, symmetric, so that one is the mirror image of the other and (for k >= 2)
    both have mean 0.
    """
    if k < 1:
        raise ValueError(f"k = {k}: need at least one atom")
    points = -np.cos(np.pi * np.arange(2 * k) / (2 * k - 1))
    gaps = points[:, None] - points
    np.fill_diagonal(gaps, 1)
    coefficient = 1 / gaps.prod(1)
    pair = []
    for sign in (1, -1):
        chosen = coefficient * sign > 0
        weights = np.abs(coefficient[chosen])
        pair.append(Atoms(epsilon * points[chosen], weights / weights.sum()))
    return pair[0], pair[1]
