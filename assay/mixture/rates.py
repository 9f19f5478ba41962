"""The experiment behind the theorems: error against the number of samples, for clean, noisy and mixed samples.

On a line, with the estimator of Algorithm "Denoised Method of Moments". In the worst case the error falls like
n^-1/(4k-2); a distribution that is hard at one n is easy at another, so the worst case is the largest mean
error over hard pairs of many scales. Well separated atoms are learned at the parametric rate n^-1/2.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from assay.mixture.bounds import hard_pair, noisy_per_clean
from assay.mixture.distance import wasserstein_line
from assay.mixture.moments import Array, Atoms, hermite, project_moments, quadrature, sample_weights
from assay.mixture.samples import two_levels


@dataclass(frozen=True)
class Curve:
    """Mean W1 error at each number of samples."""

    name: str
    num_samples: Array
    error: Array
    theory_slope: float

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
    """sigma^(4k-2)."""


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
    weights = sample_weights(sigma, 4 * k - 2)
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


def worst_case(k: int, sigma: Array, num_repeats: int, rng: np.random.Generator) -> float:
    """The largest mean error over hard pairs on [-epsilon, epsilon], epsilon <= 1, for atoms known to lie in
    [-1, 1].

    One of each pair suffices: the other is its mirror image.
    """
    scales = np.geomspace(0.03, 1, 14)
    return float(line_errors(hard_pair(k)[0], scales, sigma, num_repeats, rng, 1.0).mean(0).max())


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
) -> Rates:
    """Run the experiment: clean samples have noise 1, noisy ones `sigma` >= 1.

    Noisy curves are measured at sigma^(4k-2) times as many samples, where the theory says the errors are the
    same, as far as two million samples allow.
    """
    if not sigma >= 1 or k < 2:
        raise ValueError(
            f"sigma = {sigma}, k = {k}: need k >= 2, and sigma >= 1, which is the noise of clean samples"
        )
    if len(num_samples) < 2 or min(num_samples) < 2 or num_repeats < 1:
        raise ValueError(f"num_samples = {list(num_samples)}: a slope needs two sizes, each at least 2")
    exchange = noisy_per_clean(sigma, k)[1]
    largest = 2_000_000
    growth = min(exchange, largest / max(num_samples))
    mixed_worth = clean_fraction + (1 - clean_fraction) / exchange
    mixed_growth = min(1 / mixed_worth, largest / max(num_samples))
    kinds = [
        ("clean", 1.0, 1.0),
        ("noisy", 0.0, growth),
        (f"{clean_fraction:.0%} clean", clean_fraction, mixed_growth),
    ]
    sizes = {name: [round(n * factor) for n in num_samples] for name, _, factor in kinds}
    total = sum(map(sum, sizes.values())) + sum(num_samples) / 10
    done = 0.0
    rng = np.random.default_rng(seed)
    curves = []
    for name, fraction, _ in kinds:
        errors = []
        for n in sizes[name]:
            errors.append(worst_case(k, two_levels(n, fraction, 1.0, sigma), num_repeats, rng))
            done += n
            progress(done / total)
        curves.append(
            Curve(f"worst case, {name}", np.array(sizes[name], float), np.array(errors), 1 / (4 * k - 2))
        )
    easy, radius = separated(k), 3.0 * k + 3
    errors = [
        float(line_errors(easy, np.ones(1), np.ones(n), 4 * num_repeats, rng, radius).mean())
        for n in num_samples
    ]
    curves.append(Curve("separated, clean", np.array(num_samples, float), np.array(errors), 0.5))
    progress(1.0)
    clean, noisy = curves[:2]
    middle = float(np.exp(np.log(np.concatenate([clean.error, noisy.error])).mean()))
    return Rates(curves, noisy.samples_for(middle) / clean.samples_for(middle), exchange)
