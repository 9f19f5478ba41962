"""The experiment behind the theorems: error against the number of samples, for clean, noisy and mixed samples.

On a line, with the estimator of Algorithm "Denoised Method of Moments", the error falls like n^-1/(4k-2) in the
worst case; a distribution that is hard at one n is easy at another, so the worst case is the largest mean error
over hard pairs of many scales. Well separated atoms are learned at the parametric rate n^-1/2.

In d dimensions the theorem adds a term for finding the subspace, of order (d / n)^(1/4). `measure_rates`
measures it by itself, as the distance between the truth and its projection onto the subspace that was found.
Its worst case are two atoms theta and -theta in an unknown direction, again at the hardest scale.

`measure_worth` asks how many noisy samples replace a clean one, level by level: as many as give the estimator
the same error in the worst case. The theorem promises sigma^4 where finding the subspace dominates the error,
and sigma^(4k-2) where telling the atoms apart does; in between, only a measurement tells.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from assay.mixture.bounds import hard_packing, hard_pair, noisy_per_clean
from assay.mixture.distance import wasserstein, wasserstein_line
from assay.mixture.model import ConditionWarning, NoisyMixture
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
    draws: tuple[Array, ...] = ()
    """Where they are known, the errors behind each mean: (num_repeats, num_scales), the worst scale counts."""

    @property
    def standard_error(self) -> Array:
        """Of the mean errors; 0 where the draws are not known."""
        if not self.draws:
            return np.zeros(len(self.error))
        worst = [draw[:, draw.mean(0).argmax()] for draw in self.draws]
        return np.array([column.std() / math.sqrt(max(len(column) - 1, 1)) for column in worst])

    @property
    def slope(self) -> float:
        """Exponent b of the fit error = a n^-b."""
        return -float(np.polyfit(np.log(self.num_samples), np.log(self.error), 1)[0])

    def samples_for(self, error: float) -> float:
        """How many samples reach `error`, by the fitted power law."""
        slope, level = np.polyfit(np.log(self.num_samples), np.log(self.error), 1)
        return float(np.exp((np.log(error) - level) / slope))

    def redrawn(self, rng: np.random.Generator) -> "Curve":
        """The curve of as many draws, taken from these with replacement."""
        draws = tuple(draw[rng.integers(len(draw), size=len(draw))] for draw in self.draws)
        return draw_curve(self.name, self.num_samples, draws, self.theory_slope)


def draw_curve(name: str, num_samples: ArrayLike, draws: Sequence[Array], theory_slope: float) -> Curve:
    """A curve from errors (num_repeats, num_scales) at each number of samples."""
    error = np.array([float(draw.mean(0).max()) for draw in draws])
    return Curve(name, np.array(num_samples, np.float64), error, theory_slope, tuple(draws))


@dataclass(frozen=True)
class Exchange:
    """Noisy samples that replace a clean one."""

    sigma: float
    measured: float
    """At the error where the curves of clean and of noisy samples overlap most."""
    low: float
    high: float
    """A 90 % interval for it, from draws of the draws."""
    subspace: float
    """sigma^4: what the theorem promises for the subspace."""
    inside: float
    """sigma^(4k-2): what it promises inside the subspace, and on a line."""


def exchange(k: int, sigma: float, clean: Curve, noisy: Curve, rng: np.random.Generator) -> Exchange:
    """The exchange rate between two curves of error against the number of samples, with its interval."""

    def rate(one: Curve, other: Curve) -> float:
        middle = float(np.exp(np.log(np.concatenate([one.error, other.error])).mean()))
        return other.samples_for(middle) / one.samples_for(middle)

    redrawn = [rate(clean.redrawn(rng), noisy.redrawn(rng)) for _ in range(200)]
    low, high = np.quantile(redrawn, [0.05, 0.95])
    return Exchange(sigma, rate(clean, noisy), float(low), float(high), *noisy_per_clean(sigma, k))


@dataclass(frozen=True)
class Rates:
    """All curves of the experiment, and the exchange rate between noisy and clean samples."""

    curves: list[Curve]
    exchange: Exchange
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


def hard_errors(
    k: int,
    sigma: Array,
    num_repeats: int,
    rng: np.random.Generator,
    num_features: int = 1,
    only_subspace: bool = False,
) -> Array:
    """W1 errors (num_repeats, num_scales) for a hard family in the unit ball; samples have noise `sigma` (n,).

    The family are hard pairs on [-epsilon, epsilon], of which one suffices: the other is its mirror image. In d
    dimensions they lie on a line in a random direction. Of the subspace alone, +-theta is the hard family.
    """
    if num_features == 1:
        return line_errors(hard_pair(k)[0], np.geomspace(0.03, 1, 14), sigma, num_repeats, rng, 1.0)
    if only_subspace:  # theta around the length at which samples just show it
        critical = (num_features / (sigma**-4.0).sum()) ** 0.25
        scales = np.minimum(critical * np.geomspace(0.5, 4, 8), 1)
        return np.array(
            [[_subspace_error(s, num_features, sigma, rng) for s in scales] for _ in range(num_repeats)]
        )
    scales = np.geomspace(0.1, 1, 5)
    return np.array([[_fit_error(k, s, num_features, sigma, rng) for s in scales] for _ in range(num_repeats)])


def _subspace_error(scale: float, num_features: int, sigma: Array, rng: np.random.Generator) -> float:
    """W1 between +-theta, |theta| = scale, and its projection onto the line found from one draw of samples."""
    truth = hard_packing(num_features, 1, scale, rng)[0]
    found = find_subspace(simulate(truth, sigma, rng), sigma, 1, rng)
    return wasserstein(truth, Atoms(found.lift(found.project(truth.atoms)), truth.weights))


def _fit_error(k: int, scale: float, num_features: int, sigma: Array, rng: np.random.Generator) -> float:
    """W1 error of the theorem's estimator for a hard mixture of this scale, in a random direction."""
    shape, direction = hard_pair(k, scale)[0], rng.standard_normal(num_features)
    truth = Atoms(shape.atoms[:, None] * direction / np.linalg.norm(direction), shape.weights)
    model = NoisyMixture(k, polish=False, radius=1.0, check_units=False, random_state=int(rng.integers(2**31)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConditionWarning)  # few samples are the point of the experiment
        found = model.fit(simulate(truth, sigma, rng), sigma=sigma).mixture_
    return wasserstein(found, truth)


def separated(k: int, spacing: float = 6.0) -> Atoms:
    """k equally heavy atoms, `spacing` apart: in units of the noise, 6 keeps the samples apart."""
    return Atoms(np.linspace(-1, 1, k) * spacing * (k - 1) / 2, np.full(k, 1 / k))


def _check(k: int, sigma: float, num_samples: Sequence[int], num_repeats: int) -> None:
    if not sigma >= 1 or k < 2:
        raise ValueError(
            f"sigma = {sigma}, k = {k}: need k >= 2, and sigma >= 1, which is the noise of clean samples"
        )
    if len(num_samples) < 2 or min(num_samples) < 2 * k or num_repeats < 1:
        raise ValueError(f"num_samples = {list(num_samples)}: a slope needs two sizes, each at least {2 * k}")


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
    _check(k, sigma, num_samples, num_repeats)
    on_a_line = num_features == 1
    theory = noisy_per_clean(sigma, k)[on_a_line]
    theory_slope = 1 / (4 * k - 2) if on_a_line else 0.25
    most = 2_000_000 / num_features / max(num_samples)
    mixed = 1 / (clean_fraction + (1 - clean_fraction) / theory)
    kinds = [
        ("clean", 1.0, 1.0),
        ("noisy", 0.0, min(theory, most)),
        (f"{clean_fraction:.0%} clean", clean_fraction, min(mixed, most)),
    ]
    total = sum(factor for _, _, factor in kinds) * sum(num_samples) + 2 * max(num_samples)
    done, rng = 0.0, np.random.default_rng(seed)

    def errors(level: Array, d: int) -> Array:
        nonlocal done
        done += len(level)
        progress(min(done / total, 1.0))
        return hard_errors(k, level, num_repeats, rng, d, only_subspace=True)

    curves = []
    for name, fraction, factor in kinds:
        sizes = [round(n * factor) for n in num_samples]
        draws = [errors(two_levels(n, fraction, 1.0, sigma), num_features) for n in sizes]
        curves.append(draw_curve(f"worst case, {name}", sizes, draws, theory_slope))
    dimension = None
    if on_a_line:
        radius, each = 3.0 * k + 3, np.ones(1)
        draws = [line_errors(separated(k), each, np.ones(n), 4 * num_repeats, rng, radius) for n in num_samples]
        curves.append(draw_curve("separated, clean", num_samples, draws, 0.5))
    else:
        dims = [num_features * factor for factor in (1, 2, 4, 8)]
        draws = [errors(np.ones(max(num_samples)), d) for d in dims]
        dimension = draw_curve(f"{max(num_samples):,} clean samples", dims, draws, -0.25)
    progress(1.0)
    return Rates(curves, exchange(k, sigma, curves[0], curves[1], rng), dimension)


def measure_worth(
    k: int,
    sigmas: Sequence[float],
    num_features: int = 1,
    num_samples: Sequence[int] = (500, 1500, 4500),
    num_repeats: int = 20,
    seed: int = 0,
    progress: Callable[[float], None] = lambda share: None,
) -> list[Exchange]:
    """How many samples of each of `sigmas` >= 1 replace a clean one, of noise 1, for atoms in the unit ball.

    Noisy samples are tried between what the theorem promises for the subspace and inside it, as far as two
    million numbers allow.
    """
    rng, most = np.random.default_rng(seed), 2_000_000 / num_features
    clean = None
    curves: list[Exchange] = []
    for which, sigma in enumerate([1.0, *sigmas]):
        _check(k, sigma, num_samples, num_repeats)
        subspace, inside = noisy_per_clean(sigma, k)
        factor = min(inside if num_features == 1 else math.sqrt(subspace * inside), most / max(num_samples))
        sizes = [round(n * factor) for n in num_samples]
        draws = [hard_errors(k, np.full(n, sigma), num_repeats, rng, num_features) for n in sizes]
        slope = 1 / (4 * k - 2)
        noisy = draw_curve(f"noise {sigma:g}", sizes, draws, slope)
        if clean is None:
            clean = noisy
        else:
            curves.append(exchange(k, sigma, clean, noisy, rng))
        progress((which + 1) / (len(sigmas) + 1))
    return curves
