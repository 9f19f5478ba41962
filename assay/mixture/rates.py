"""The experiment behind the theorems: error against the number of samples, for clean, noisy and mixed samples.

On a line, with the estimator of Algorithm "Denoised Method of Moments", the error falls like n^-1/(4k-2) in the
worst case; a distribution that is hard at one n is easy at another, so the worst case is the largest mean error
over hard pairs of many scales. Well separated atoms are learned at the parametric rate n^-1/2.

In d dimensions the theorem has two terms, and each fit measures both: the distance between the truth and its
projection onto the directions that were found, of order (d / n)^(1/4), and the error along these, of order
n^-1/(4k-2); beside them, the error of the whole. The hard pairs lie on a line in a random direction.

How many noisy samples replace a clean one is read off the curves: as many as give the same error in the worst
case. The theorem promises sigma^4 for the subspace and sigma^(4k-2) inside it; of both together, only the
measurement tells.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
from numpy.typing import ArrayLike
from pydantic import BeforeValidator, Field, Strict, model_validator

from assay.errors import AssayError
from assay.figure import COLOURS, Panel, Series
from assay.mixture.bounds import noisy_per_clean
from assay.mixture.distance import wasserstein, wasserstein_line
from assay.mixture.estimate import moment_estimate, project_half
from assay.mixture.lemmas import hard_pair
from assay.mixture.moments import Array, Atoms, hermite, moment_weights, project_moments, quadrature
from assay.mixture.samples import simulate, two_levels
from assay.settings import Strict as Settings

_MOST_NUMBERS = 2_000_000  # in the samples of one fit
_TERMS = ("subspace", "inside it", "together")
_NUM_REDRAWN = 200


def _listed(text: object) -> object:
    """`1.5,2` as a command line gives a list."""
    return tuple(text.replace(",", " ").split()) if isinstance(text, str) else text


_Level = Annotated[float, Field(ge=1, le=1e6)]


class RatesConfig(Settings):
    """What to measure: clean samples have noise 1, atoms lie in the unit ball."""

    k: int = Field(2, ge=2, description="Number of atoms.")
    sigma: Annotated[tuple[_Level, ...], BeforeValidator(_listed), Strict(False)] = Field(
        (2.0,), min_length=1, description="Noise levels of noisy samples; that of clean ones is 1."
    )
    clean_fraction: float = Field(0.1, ge=0, le=1, description="Share of clean samples in the mixed curve.")
    num_features: int = Field(1, ge=1, description="Dimension; above 1 the subspace is measured too.")
    num_samples: Annotated[tuple[int, ...], BeforeValidator(_listed), Strict(False)] = Field(
        (300, 1000, 3000, 10_000), min_length=2, description="Numbers of clean samples to try."
    )
    num_repeats: int = Field(40, ge=2, description="Repeats per number of samples.")
    seed: int = Field(0, ge=0, description="Seed of all random draws.")

    @model_validator(mode="after")
    def _enough(self) -> "RatesConfig":
        if min(self.num_samples) < 4 * self.k or len(set(self.num_samples)) < 2:
            what = f"a slope needs two sizes, each at least {4 * self.k} for {self.k} atoms"
            raise AssayError(what, key="num_samples")
        return self


@dataclass(frozen=True)
class Curve:
    """Mean W1 error at each number of samples (or of dimensions)."""

    name: str
    num_samples: Array
    error: Array
    theory_slope: float
    draws: tuple[Array, ...] = field(default=(), repr=False)
    """Where they are known, the errors behind each mean: (num_repeats, num_scales), the worst scale counts."""

    @property
    def standard_error(self) -> Array:
        """Of the mean errors."""
        worst = [draw[:, draw.mean(0).argmax()] for draw in self.draws]
        return np.array([column.std() / math.sqrt(max(len(column) - 1, 1)) for column in worst])

    def _power_law(self) -> Array:
        """-b and log a of the fit error = a n^-b."""
        return np.polyfit(np.log(self.num_samples), np.log(self.error), 1)

    @property
    def slope(self) -> float:
        """Exponent b of the fit error = a n^-b."""
        return -float(self._power_law()[0])

    def slope_interval(self, seed: int = 0) -> tuple[float, float]:
        """A 90% interval of the slope, from draws of the draws."""
        rng = np.random.default_rng(seed)
        low, high = np.quantile([self.redrawn(rng).slope for _ in range(_NUM_REDRAWN)], [0.05, 0.95])
        return float(low), float(high)

    def log_samples_for(self, error: float) -> float:
        """Logarithm of the number of samples that reach `error`, by the fitted power law."""
        slope, level = self._power_law()
        return float((np.log(error) - level) / slope)

    def redrawn(self, rng: np.random.Generator) -> "Curve":
        """The curve of as many draws, taken from these with replacement."""
        draws = [draw[rng.integers(len(draw), size=len(draw))] for draw in self.draws]
        return draw_curve(self.name, self.num_samples, draws, self.theory_slope)


def draw_curve(name: str, num_samples: ArrayLike, draws: Sequence[Array], theory_slope: float) -> Curve:
    """A curve from errors (num_repeats, num_scales) at each number of samples."""
    error = np.array([float(draw.mean(0).max()) for draw in draws])
    return Curve(name, np.array(num_samples, np.float64), error, theory_slope, tuple(draws))


@dataclass(frozen=True)
class Exchange:
    """Noisy samples that replace a clean one."""

    term: str
    """Of which error: that of the subspace, inside it, or both together."""
    sigma: float
    measured: float
    """At the error where the curves of clean and of noisy samples overlap most."""
    low: float
    high: float
    """A 90% interval for it, from draws of the draws."""
    theory: float
    """What the theorem promises; nan for both terms together."""


def exchange(
    term: str, sigma: float, theory: float, curves: tuple[Curve, Curve], rng: np.random.Generator
) -> Exchange:
    """The exchange rate between the curves of clean and of noisy samples, with its interval."""

    def rate(clean: Curve, noisy: Curve) -> float:
        middle = float(np.exp(np.log(np.concatenate([clean.error, noisy.error])).mean()))
        # Few repeats may leave no slope to speak of: the rate is then anything, and its interval says so.
        return float(np.exp(np.clip(noisy.log_samples_for(middle) - clean.log_samples_for(middle), -300, 300)))

    redrawn = [rate(*(curve.redrawn(rng) for curve in curves)) for _ in range(_NUM_REDRAWN)]
    low, high = np.quantile(redrawn, [0.05, 0.95])
    return Exchange(term, sigma, rate(*curves), float(low), float(high), theory)


@dataclass(frozen=True)
class Rates:
    """All curves of the experiment, and the exchange rates between noisy and clean samples."""

    curves: list[Curve]
    exchanges: list[Exchange]
    dimensions: list[Curve] = field(default_factory=list)
    """In d dimensions: the errors of clean samples against d, at one number of samples."""


def line_errors(
    shape: Atoms, scales: Array, sigma: Array, num_repeats: int, rng: np.random.Generator, radius: float
) -> Array:
    """W1 errors (num_repeats, num_scales) of the estimator, for atoms (k,) of a `shape` times each of `scales`.

    Each repeat draws labels and noise for samples with levels `sigma` (n,) once. Since
    gamma_r(y + e) = sum_j binom(r, j) y^(r-j) gamma_j(e), the sums of gamma_j(e) over the samples of each atom
    are all that the moments depend on, whatever the scale. The estimator knows the radius of the atoms.
    """
    k = len(shape.weights)
    order = 2 * k - 1
    weights = moment_weights(sigma, k, radius)
    orders = np.arange(order + 1)
    binomial = np.array([[math.comb(r, j) for j in orders] for r in orders], dtype=float)
    shift = np.maximum(orders[:, None] - orders, 0)  # r - j; binom is 0 where it is < 0
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
    k: int, sigma: Array, num_repeats: int, rng: np.random.Generator, num_features: int = 1
) -> list[Array]:
    """W1 errors (num_repeats, num_scales) by term for hard pairs in the unit ball; samples have noise `sigma`.

    Of a pair one suffices: the other is its mirror image. On a line there is one term. In d dimensions there
    are three: of the subspace, inside it, and of the whole.
    """
    if num_features == 1:
        return [line_errors(hard_pair(k)[0], np.geomspace(0.03, 1, 14), sigma, num_repeats, rng, 1.0)]
    scales = np.geomspace(0.1, 1, 6)
    errors = [[_fit_errors(k, scale, num_features, sigma, rng) for scale in scales] for _ in range(num_repeats)]
    return list(np.moveaxis(np.array(errors), -1, 0))


def _fit_errors(k: int, scale: float, num_features: int, sigma: Array, rng: np.random.Generator) -> list[float]:
    """Errors of the theorem's estimator, by term, for a hard mixture of this scale in a random direction."""
    shape, direction = hard_pair(k, scale)[0], rng.standard_normal(num_features)
    truth = Atoms(shape.atoms[:, None] * direction / np.linalg.norm(direction), shape.weights)
    subspace, z, rest = project_half(simulate(truth, sigma, rng), sigma, k, rng)
    found = moment_estimate(z[rest], sigma[rest], k)
    projected = Atoms(truth.atoms @ subspace.basis @ subspace.basis.T, truth.weights)  # the truth has mean 0
    seen = Atoms(subspace.project(truth.atoms), truth.weights)
    fitted = Atoms(subspace.lift(found.atoms), found.weights)
    return [wasserstein(truth, projected), wasserstein(found, seen), wasserstein(truth, fitted)]


def separated(k: int, spacing: float = 6.0) -> Atoms:
    """k equally heavy atoms, `spacing` apart: in units of the noise, 6 keeps the samples apart."""
    return Atoms(np.linspace(-1, 1, k) * spacing * (k - 1) / 2, np.full(k, 1 / k))


def measure_rates(config: RatesConfig, progress: Callable[[float], None] = lambda share: None) -> Rates:
    """Run the experiment.

    Noisy curves are measured at as many more samples as the theory says they need for the same errors, as far
    as two million numbers allow.
    """
    k, d, sizes = config.k, config.num_features, config.num_samples
    terms, rate = (_TERMS[1:2], [1 / (4 * k - 2)]) if d == 1 else (_TERMS, [0.25, 1 / (4 * k - 2), math.nan])
    kinds = _kinds(config)
    total = sum(factor for *_, factor in kinds) * sum(sizes) + 15 * (d > 1) * max(sizes)
    done, rng = 0.0, np.random.default_rng(config.seed)

    def measure(name: str, levels: list[Array], dims: list[int], slopes: list[float]) -> list[Curve]:
        """A curve for each term: against the number of samples, or of dimensions if these differ."""
        nonlocal done
        draws = []
        for level, dim in zip(levels, dims, strict=True):
            draws.append(hard_errors(k, level, config.num_repeats, rng, dim))
            done += len(level) * dim / d
            progress(min(done / total, 1.0))
        at = dims if len(set(dims)) > 1 else [len(level) for level in levels]
        names = [name] if d == 1 else [f"{name}, {term}" for term in terms]
        by_term = zip(names, zip(*draws, strict=True), slopes, strict=True)
        return [draw_curve(each, at, mine, slope) for each, mine, slope in by_term]

    measured = []
    for name, share, noisy, factor in kinds:
        levels = [two_levels(round(n * factor), share, 1.0, noisy) for n in sizes]
        measured.append(measure(f"worst case, {name}", levels, [d] * len(sizes), rate))
    curves, dimensions = [curve for kind in measured for curve in kind], []
    if d == 1:
        easy, repeats, each = separated(k), 4 * config.num_repeats, np.ones(1)
        draws = [line_errors(easy, each, np.ones(n), repeats, rng, 3.0 * k + 3) for n in sizes]
        curves.append(draw_curve("separated, clean", sizes, draws, 0.5))
    else:
        levels, dims = [np.ones(max(sizes))] * 4, [d, 2 * d, 4 * d, 8 * d]
        dimensions = measure(f"{max(sizes):,} clean samples", levels, dims, [-0.25, 0.0, math.nan])
    exchanges = []
    for sigma, noisy_curves in zip(config.sigma, measured[1:-1], strict=True):
        theory = dict(zip(_TERMS, [*noisy_per_clean(sigma, k), math.nan], strict=True))
        for term, *pair in zip(terms, measured[0], noisy_curves, strict=True):
            exchanges.append(exchange(term, sigma, theory[term], (pair[0], pair[1]), rng))
    progress(1.0)
    return Rates(curves, exchanges, dimensions)


def _kinds(config: RatesConfig) -> list[tuple[str, float, float, float]]:
    """Clean, noisy and mixed samples: name, share of clean ones, noise of the others, how many more."""
    most = _MOST_NUMBERS / config.num_features / max(config.num_samples)
    kinds = [("clean", 1.0, 1.0, 1.0)]
    for sigma in config.sigma:
        subspace, inside = noisy_per_clean(sigma, config.k)
        factor = inside if config.num_features == 1 else math.sqrt(subspace * inside)
        kinds.append(("noisy" if len(config.sigma) == 1 else f"noise {sigma:g}", 0.0, sigma, factor))
    p = config.clean_fraction
    kinds.append((f"{p:.0%} clean", p, config.sigma[0], 1 / (p + (1 - p) / kinds[1][3])))
    return [(name, share, noisy, min(factor, most)) for name, share, noisy, factor in kinds]


def rates_panels(rates: Rates) -> list[Panel]:
    """Errors against numbers of samples and of dimensions, and how many noisy samples replace a clean one."""
    panels = [_curves(rates.curves, "Error against the number of samples", "samples, n")]
    if rates.dimensions:
        panels.append(_curves(rates.dimensions, "The price of the dimension", "dimension, d"))
    title = "Noisy samples for a clean one"
    worth = Panel(title, "noise (clean: 1)", "noisy per clean", log_x=True, log_y=True)
    for which, term in enumerate(dict.fromkeys(row.term for row in rates.exchanges)):
        rows = [row for row in rates.exchanges if row.term == term]
        numbers = [[row.sigma, row.measured, row.low, row.high, row.theory] for row in rows]
        sigma, measured, low, high, theory = np.transpose(numbers)
        colour = COLOURS[which]
        worth.series.append(Series(f"{term}, measured", "bars", sigma, measured, low, high, colour=colour))
        if np.isfinite(theory).all():
            power = float(np.log(theory[-1]) / np.log(sigma[-1])) if sigma[-1] > 1 else 0.0
            fine, name = np.geomspace(1, sigma.max(), 50), f"{term}: noise^{power:.0f}"
            worth.series.append(Series(name, "dashed", fine, fine**power, colour=colour))
    return [*panels, worth]


def _curves(curves: list[Curve], title: str, label: str) -> Panel:
    panel = Panel(title, label, "W1 error (dashed: slope of the theory)", log_x=True, log_y=True)
    for which, curve in enumerate(curves):
        size, error, colour = curve.num_samples, curve.error, COLOURS[which % len(COLOURS)]
        low, high = error - curve.standard_error, error + curve.standard_error
        name = f"{curve.name}: {label[-1]}^{-curve.slope:.3f}"
        panel.series.append(Series(name, "line", size, error, colour=colour))
        panel.series.append(Series("", "bars", size, error, low, high, colour=colour, width=1.0))
        if np.isfinite(curve.theory_slope):
            expected = np.exp(np.log(error).mean() - curve.theory_slope * (np.log(size) - np.log(size).mean()))
            panel.series.append(Series("", "dashed", size, expected, colour=colour, width=1.0))
    return panel
