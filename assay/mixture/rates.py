"""The experiment behind the theorems: error against the number of samples, for clean, noisy and mixed samples.

On a line, with the estimator of Algorithm "Denoised Method of Moments", the error falls like n^-1/(4k-2) in the
worst case; a distribution that is hard at one n is easy at another, so the worst case is the largest mean error
over hard pairs of many scales. Well separated atoms are learned at the parametric rate n^-1/2.

In d dimensions the theorem adds a term for finding the subspace, of order (d / n)^(1/4). It is measured by
itself, as the distance between the truth and its projection onto the subspace that was found. Its worst case
are two atoms theta and -theta in an unknown direction, again at the hardest scale.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from assay.mixture.bounds import hard_packing, hard_pair, noisy_per_clean
from assay.mixture.distance import wasserstein, wasserstein_line
from assay.mixture.moments import Array, Atoms, hermite, moment_weights, project_moments, quadrature
from assay.mixture.samples import simulate, two_levels
from assay.mixture.subspace import find_subspace


@dataclass(frozen=True)
class Curve:
    """Mean W1 error at each number of samples (or of dimensions)."""

    name: str
    num_samples: Array
    error: Array
    theory_slope: float
    standard_error: Array | None = None

    @property
    def slope(self) -> float:
        """Exponent b of the fit error = a n^-b."""
        return -float(np.polyfit(np.log(self.num_samples), np.log(self.error), 1)[0])

    def samples_for(self, error: float) -> float:
        """How many samples reach `error`, by the fitted power law."""
        slope, level = np.polyfit(np.log(self.num_samples), np.log(self.error), 1)
        return float(np.exp((np.log(error) - level) / slope))


@dataclass(frozen=True)
class Rates:
    """All curves of the experiment, and the exchange rate between noisy and clean samples."""

    curves: list[Curve]
    measured_exchange: float
    """Noisy samples that replace a clean one, at the error where the two curves overlap most."""
    theory_exchange: float
    """sigma^(4k-2) on a line, sigma^4 in d dimensions."""
    dimension: Curve | None = None
    """In d dimensions: the error of clean samples against d, at one number of samples."""


def line_errors(
    shape: Atoms, scales: Array, sigma: Array, num_repeats: int, rng: np.random.Generator, radius: float
) -> Array:
    """W1 errors (num_repeats, num_scales) of the estimator, for the atoms of `shape` (k,) times each of
    `scales`.

    Each repeat draws labels and noise for samples with levels `sigma` (n,) once. Since
    gamma_r(y + e) = sum_j binom(r, j) y^(r-j) gamma_j(e), the sums of gamma_j(e) over the samples of each atom
    are all that the moments depend on, whatever the scale. The estimator knows that atoms lie in [-radius,
    radius].
    """
    k = len(shape.weights)
    order = 2 * k - 1
    weights = moment_weights(sigma, k, radius)
    binomial = np.array([[math.comb(r, j) for j in range(order + 1)] for r in range(order + 1)], dtype=float)
    shift = np.maximum(
        np.arange(order + 1)[:, None] - np.arange(order + 1), 0
    )  # r - j; binom is 0 where it is < 0
    powers = (scales[:, None] * shape.atoms)[..., None, None] ** shift  # (num_scales, k, order + 1, order + 1)
    moments = np.empty((num_repeats, len(scales), order))
    for repeat in range(num_repeats):
        label = np.searchsorted(np.cumsum(shape.weights)[:-1], rng.random(len(sigma)))
        denoised = hermite(sigma * rng.standard_normal(len(sigma)), sigma**2, order)
        sums = denoised @ (weights[:, None] * (label[:, None] == np.arange(k)))  # (order + 1, k)
        moments[repeat] = np.einsum("skrj,rj,jk->sr", powers, binomial, sums)[:, 1:]
    atoms, mass = quadrature(project_moments(moments / radius ** np.arange(1, order + 1)))
    return wasserstein_line(radius * atoms, mass, scales[:, None] * shape.atoms, shape.weights)


def worst_case(
    k: int, sigma: Array, num_repeats: int, rng: np.random.Generator, num_features: int = 1
) -> tuple[float, float]:
    """The largest mean error over the scales of a hard family in the unit ball, and its standard error.

    On a line the family are the hard pairs on [-epsilon, epsilon], of which one suffices: the other is its
    mirror image. In d dimensions it is +-theta, theta around the length at which samples just show it.
    """
    if num_features == 1:
        errors = line_errors(hard_pair(k)[0], np.geomspace(0.03, 1, 14), sigma, num_repeats, rng, 1.0)
    else:
        critical = (num_features / (sigma**-4.0).sum()) ** 0.25
        scales = np.minimum(critical * np.geomspace(0.5, 4, 8), 1)
        errors = np.array(
            [[_subspace_error(s, num_features, sigma, rng) for s in scales] for _ in range(num_repeats)]
        )
    worst = int(errors.mean(0).argmax())
    return float(errors[:, worst].mean()), float(errors[:, worst].std() / math.sqrt(max(num_repeats - 1, 1)))


def _subspace_error(scale: float, num_features: int, sigma: Array, rng: np.random.Generator) -> float:
    """W1 between +-theta, |theta| = scale, and its projection onto the line found from one draw of samples."""
    truth = hard_packing(num_features, 1, scale, rng)[0]
    found = find_subspace(simulate(truth, sigma, rng), sigma, 1, rng)
    return wasserstein(truth, Atoms(found.lift(found.project(truth.atoms)), truth.weights))


def separated(k: int, spacing: float = 6.0) -> Atoms:
    """k equally heavy atoms, `spacing` apart: in units of the noise, 6 keeps the samples apart."""
    return Atoms(np.linspace(-1, 1, k) * spacing * (k - 1) / 2, np.full(k, 1 / k))


def measure_rates(
    k: int,
    sigma: float,
    clean_fraction: float = 0.1,
    num_samples: Sequence[int] = (300, 1000, 3000, 10_000),
    num_repeats: int = 20,
    seed: int = 0,
    progress: Callable[[float], None] = lambda share: None,
    num_features: int = 1,
) -> Rates:
    """Run the experiment: clean samples have noise 1, noisy ones `sigma` >= 1, atoms lie in the unit ball.

    Noisy curves are measured at as many more samples as the theory says they need for the same errors, as far
    as two million numbers allow.
    """
    if not sigma >= 1 or k < 2:
        raise ValueError(
            f"sigma = {sigma}, k = {k}: need k >= 2, and sigma >= 1, which is the noise of clean samples"
        )
    if len(num_samples) < 2 or min(num_samples) < 2 * k or num_repeats < 1:
        raise ValueError(f"num_samples = {list(num_samples)}: a slope needs two sizes, each at least {2 * k}")
    on_a_line = num_features == 1
    exchange = noisy_per_clean(sigma, k)[on_a_line]
    theory_slope = 1 / (4 * k - 2) if on_a_line else 0.25
    most = 2_000_000 / num_features / max(num_samples)
    mixed = 1 / (clean_fraction + (1 - clean_fraction) / exchange)
    kinds = [
        ("clean", 1.0, 1.0),
        ("noisy", 0.0, min(exchange, most)),
        (f"{clean_fraction:.0%} clean", clean_fraction, min(mixed, most)),
    ]
    total = sum(factor for _, _, factor in kinds) * sum(num_samples) + 2 * max(num_samples)
    done = 0.0
    rng = np.random.default_rng(seed)

    def curve(
        name: str, sizes: Sequence[int], levels: Sequence[Array], dims: Sequence[int], slope: float
    ) -> Curve:
        nonlocal done
        points = []
        for level, d in zip(levels, dims, strict=True):
            points.append(worst_case(k, level, num_repeats, rng, d))
            done += len(level)
            progress(min(done / total, 1.0))
        error, standard_error = np.transpose(points)
        return Curve(name, np.array(sizes, float), error, slope, standard_error)

    curves = []
    for name, fraction, factor in kinds:
        sizes = [round(n * factor) for n in num_samples]
        levels = [two_levels(n, fraction, 1.0, sigma) for n in sizes]
        curves.append(curve(f"worst case, {name}", sizes, levels, [num_features] * len(sizes), theory_slope))
    dimension = None
    if on_a_line:
        radius, each = 3.0 * k + 3, np.ones(1)
        draws = [line_errors(separated(k), each, np.ones(n), 4 * num_repeats, rng, radius) for n in num_samples]
        means, deviations = ([float(f(errors)) for errors in draws] for f in (np.mean, np.std))
        errors, standard_error = np.array(means), np.array(deviations) / math.sqrt(4 * num_repeats)
        curves.append(Curve("separated, clean", np.array(num_samples, float), errors, 0.5, standard_error))
    else:
        dims = [max(2, round(num_features * factor)) for factor in (1, 2, 4, 8)]
        levels = [np.ones(max(num_samples))] * len(dims)
        dimension = curve(f"{max(num_samples):,} clean samples", dims, levels, dims, -0.25)
    progress(1.0)
    clean, noisy = curves[:2]
    middle = float(np.exp(np.log(np.concatenate([clean.error, noisy.error])).mean()))
    return Rates(curves, noisy.samples_for(middle) / clean.samples_for(middle), exchange, dimension)
