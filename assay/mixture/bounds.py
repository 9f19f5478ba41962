"""What the theorems promise: effective sample sizes, upper and lower bounds on W1, their conditions, hard
instances.

Two effective sample sizes decide, one per stage of the estimator,

    n_d = sum_i sigma_i^-4 / max_i sigma_i^-4        for the subspace,
    n_l = sum_i sigma_i^-(4k-2) / max_i sigma_i^-(4k-2)   inside it.

The theorems hold up to absolute constants that the paper leaves open: they are arguments here, 1 unless given.

They are stated for sigma_i >= R, the radius of a ball that holds the atoms (the paper's unit). A sample below
that may be given more noise, so its level counts as R: the spread of the atoms, not the noise, then limits what
it tells, and no formula promises more. Every formula is homogeneous of degree one in (sigma, R, W1).
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from assay.mixture.moments import Array, Atoms
from assay.mixture.noise import check_sigma


def effective_sample_size(sigma: ArrayLike, power: float, radius: float = 0.0) -> float:
    """sum_i sigma_i^-power / max_i sigma_i^-power: how many samples at the lowest noise these are worth.

    Levels below `radius` count as `radius`.
    """
    level = np.maximum(check_sigma(sigma), radius)
    if level.min() == 0:
        return float((level == 0).sum())
    return float(((level.min() / level) ** power).sum())


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
    sigma: ArrayLike, num_features: int, k: int, delta: float = 0.05, constant: float = 1.0, radius: float = 1.0
) -> Bound:
    """Theorem "ub_heterogenous": W1 is below the total with probability 1 - delta, for atoms within `radius`.

    Its terms, with levels below the radius raised to it, are

    C k ((d + log(1/delta)) / sum_i sigma_i^-4)^(1/4)  and
    C k^3 ((k log k + log(1/delta)) / sum_i sigma_i^-(4k-2))^(1/(4k-2)).
    """
    level, log_delta = np.maximum(check_sigma(sigma), radius), _check(k, num_features, delta)
    power = 4 * k - 2
    subspace = constant * k * (num_features + log_delta) ** 0.25 * _root(level, 4)
    low_dim = constant * k**3 * (k * math.log(k) + log_delta) ** (1 / power) * _root(level, power)
    return Bound(subspace, low_dim)


def upper_bound_line(sigma: ArrayLike, k: int, constant: float = 1.0, radius: float = 1.0) -> float:
    """Theorem "ub_1d": on a line W1 <= C k^2 (sum_i sigma_i^-(4k-2))^(-1/(4k-2)) with probability 3/4.

    The power of k is one less than in several dimensions; levels below the radius are raised to it.
    """
    level = np.maximum(check_sigma(sigma), radius)
    _check(k, 1, 0.25)
    return constant * k**2 * _root(level, 4 * k - 2)


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

    Atoms lie in the unit ball. The sums become n (p + (1 - p) / sigma^4) and n (p + (1 - p) / sigma^(4k-2)).
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
    """Theorem "lb_combined": any estimator has W1 >= `largest` with probability delta <= 1/4 somewhere.

    That is, for some k-atomic distribution in a ball whose radius is at most every sigma_i. Its terms are

    c ((d + log(1/delta)) / sum_i sigma_i^-4)^(1/4), proved for d >= 3 and k >= 2 (0 otherwise),
    and (c/k) (log(1/delta) / sum_i sigma_i^-(4k-2))^(1/(4k-2)), which holds on a line already.
    """
    level, log_delta = check_sigma(sigma), _check(k, num_features, delta, 0.25)
    power = 4 * k - 2
    subspace = (num_features + log_delta) ** 0.25 * _root(level, 4) if num_features >= 3 and k >= 2 else 0.0
    return Bound(constant * subspace, constant / k * log_delta ** (1 / power) * _root(level, power))


def _check(k: int, num_features: int, delta: float, largest_delta: float = 0.5) -> float:
    """log(1 / delta), after rejecting values outside the theorems."""
    if k < 1 or num_features < 1:
        raise ValueError(f"k = {k}, d = {num_features}: need at least one atom and one dimension")
    if not 0 < delta < 0.5:
        raise ValueError(f"delta = {delta}: the probability of failure lies in (0, 1/2)")
    if delta > largest_delta:
        raise ValueError(f"delta = {delta}: the lower bound is proved for delta <= {largest_delta:g}")
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
    sigma: ArrayLike,
    num_features: int,
    k: int,
    delta: float = 0.05,
    radius: float = 1.0,
    c_1: float = 1.0,
    c_2: float = 0.25,
) -> list[Condition]:
    """Hypotheses of the upper bound: n_d >= (d + log(1/delta)) / c_1 and n_l >= (log(1/delta) + k log k) / c_2.

    c_2 = 1/4 is what the partition into groups needs. The last, sigma >= `radius`, is one that the bound can do
    without: levels below the radius count as the radius, in n_d and n_l too.
    """
    level, log_delta = check_sigma(sigma), _check(k, num_features, delta)
    sizes = [effective_sample_size(level, power, radius) for power in (4, 4 * k - 2)]
    needs = (num_features + log_delta) / c_1, (log_delta + k * math.log(k)) / c_2
    return [
        Condition("effective samples for the subspace, n_d", sizes[0], needs[0]),
        Condition("effective samples inside it, n_l", sizes[1], needs[1]),
        Condition("lowest noise (below the atoms' radius it counts as the radius)", float(level.min()), radius),
    ]


def lower_conditions(
    sigma: ArrayLike, num_features: int, k: int, delta: float = 0.05, radius: float = 1.0, constant: float = 1.0
) -> list[Condition]:
    """Hypotheses of the lower bound, for atoms in a ball of `radius`, or of the lowest sigma if that is less:

    sum_i sigma_i^-(4k-2) >= (Ck)^(2k-1) log(1/delta) and sum_i sigma_i^-4 >= C (d + log(1/delta)), with sigma
    in units of that radius.
    """
    level, log_delta = check_sigma(sigma), _check(k, num_features, delta, 0.25)
    unit = min(radius, float(level.min()))
    roots = [_root(level, power) for power in (4, 4 * k - 2)]
    low, high = (
        (unit / root) ** power if root else 0.0 for root, power in zip(roots, (4, 4 * k - 2), strict=True)
    )
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


def hard_packing(
    num_features: int, num_members: int, scale: float, rng: np.random.Generator, distance: float = 0.25
) -> list[Atoms]:
    """The family of Theorem "lb_hd": (delta_theta + delta_-theta) / 2 for theta in a packing of a sphere.

    theta = scale u for `num_members` unit vectors u, drawn at random, of which no two, nor one and the negative
    of another, are closer than `distance`: W1 between two members is at least scale * distance. The theorem
    takes the scale c (d / sum_i sigma_i^-4)^(1/4), at which the samples cannot tell the members apart.
    """
    if num_features < 2 or num_members < 1:
        raise ValueError(f"d = {num_features}, {num_members} members: need two dimensions and one member")
    found = np.empty((0, num_features))
    for _ in range(1000):
        u = rng.standard_normal(num_features)
        u /= np.linalg.norm(u)
        # |u - v|^2 = 2 - 2 <u, v>, and of v and -v the closer counts.
        if (2 - 2 * np.abs(found @ u) >= distance**2).all():
            found = np.concatenate([found, u[None]])
            if len(found) == num_members:
                return [Atoms(scale * np.stack([u, -u]), np.full(2, 0.5)) for u in found]
    raise ValueError(
        f"found {len(found)} of {num_members} directions {distance:g} apart in {num_features} dimensions: "
        "ask for fewer members or a smaller distance"
    )
