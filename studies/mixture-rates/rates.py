"""The experiment behind the theorems: error against the number of samples, for clean, noisy and mixed samples.

On a line, with Algorithm "Denoised Method of Moments", the error falls like n^-1/(4k-2) in the worst case. What
is hard at one n is easy at another, so the worst case is the largest mean error over hard pairs of many scales.
Well separated atoms are learned at the parametric rate n^-1/2.

In d dimensions each fit measures both terms of the theorem, the distance between the truth and its projection
onto the directions that were found and the error along these, and the error of the whole. The hard pairs lie on
a line in a random direction.

How many noisy samples replace a clean one is read off the curves: as many as give the same error in the worst
case. The theorem promises sigma^4 for the subspace and sigma^(4k-2) inside it.

    python studies/mixture-rates/rates.py        measures all this and writes the figures and tables beside it
"""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from assay.figure import COLOURS, Panel, Series, save_png
from assay.mixture.bounds import noisy_per_clean
from assay.mixture.distance import wasserstein, wasserstein_line
from assay.mixture.estimate import moment_estimate, project_half
from assay.mixture.lemmas import hard_pair
from assay.mixture.moments import Array, Atoms, hermite, moment_weights, project_moments, quadrature
from assay.mixture.samples import simulate

MOST_NUMBERS = 2_000_000  # in the samples of one fit
TERMS = ("subspace", "inside it", "together")
NUM_REDRAWN = 200


@dataclass(frozen=True)
class Config:
    """What to measure: clean samples have noise 1, atoms lie in the unit ball."""

    k: int = 2
    sigma: float = 2.0
    """Noise level of noisy samples."""
    clean_fraction: float = 0.1
    """Share of clean samples in the mixed curve."""
    num_features: int = 1
    """Dimension; above 1 the subspace is measured too."""
    num_samples: tuple[int, ...] = (300, 1000, 3000, 10_000)
    """Numbers of clean samples."""
    num_repeats: int = 40
    seed: int = 0


@dataclass(frozen=True)
class Curve:
    """W1 errors at each number of samples (or of dimensions)."""

    name: str
    num_samples: Sequence[int]
    draws: Sequence[Array]
    """The errors at each number of samples: (num_repeats, num_scales)."""
    theory_slope: float

    @property
    def worst(self) -> list[Array]:
        """The errors (num_repeats,) at the scale where their mean is largest, by number of samples."""
        return [draw[:, draw.mean(0).argmax()] for draw in self.draws]

    @property
    def error(self) -> Array:
        """Mean error in the worst case."""
        return np.array([column.mean() for column in self.worst])

    @property
    def standard_error(self) -> Array:
        """Of the mean errors."""
        return np.array([column.std() / math.sqrt(max(len(column) - 1, 1)) for column in self.worst])

    def power_law(self) -> tuple[float, float]:
        """b and log a of the fit error = a n^-b."""
        slope, level = np.polyfit(np.log(self.num_samples), np.log(self.error), 1)
        return -float(slope), float(level)

    def slope_interval(self, seed: int = 0) -> tuple[float, float]:
        """A 90% interval of the exponent b, from draws of the draws."""
        rng = np.random.default_rng(seed)
        return middle_90([self.redrawn(rng).power_law()[0] for _ in range(NUM_REDRAWN)])

    def redrawn(self, rng: np.random.Generator) -> "Curve":
        """The curve of as many draws, taken from these with replacement."""
        return replace(self, draws=[draw[rng.integers(len(draw), size=len(draw))] for draw in self.draws])


@dataclass(frozen=True)
class Exchange:
    """How many noisy samples replace a clean one."""

    term: str
    """Of which error: that of the subspace, inside it, or both together."""
    measured: float
    """At the error where the curves of clean and of noisy samples overlap most."""
    interval: tuple[float, float]
    """A 90% interval for it, from draws of the draws."""
    theory: float
    """What the theorem promises; nan for both terms together."""


@dataclass(frozen=True)
class Rates:
    """All curves of the experiment, and the exchange rates between noisy and clean samples."""

    curves: list[Curve]
    dimensions: list[Curve]
    """In d dimensions: the errors of clean samples against d, at one number of samples."""
    exchanges: list[Exchange]


def middle_90(values: list[float]) -> tuple[float, float]:
    """The 5% and the 95% quantile."""
    low, high = np.quantile(values, [0.05, 0.95])
    return float(low), float(high)


def exchange_rate(clean: Curve, noisy: Curve) -> float:
    """Noisy samples for a clean one, by the fitted power laws, at the error where the curves overlap most."""
    middle = np.log(np.concatenate([clean.error, noisy.error])).mean()
    sizes = [(level - middle) / slope for slope, level in (clean.power_law(), noisy.power_law())]
    # Few repeats may leave no slope to speak of: the rate is then anything, and its interval says so.
    return float(np.exp(np.clip(sizes[1] - sizes[0], -300, 300)))


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


def hard_errors(k: int, sigma: Array, num_repeats: int, rng: np.random.Generator, d: int = 1) -> list[Array]:
    """W1 errors (num_repeats, num_scales) by term for hard pairs in the unit ball; samples have noise `sigma`.

    Of a pair one suffices: the other is its mirror image. On a line there is one term, in d dimensions three.
    """
    if d == 1:
        return [line_errors(hard_pair(k)[0], np.geomspace(0.03, 1, 14), sigma, num_repeats, rng, 1.0)]
    scales = np.geomspace(0.1, 1, 6)
    errors = [[fit_errors(k, scale, d, sigma, rng) for scale in scales] for _ in range(num_repeats)]
    return list(np.moveaxis(np.array(errors), -1, 0))


def fit_errors(k: int, scale: float, d: int, sigma: Array, rng: np.random.Generator) -> list[float]:
    """Errors of the theorem's estimator, by term, for a hard mixture of this scale in a random direction."""
    shape, direction = hard_pair(k, scale)[0], rng.standard_normal(d)
    truth = Atoms(shape.atoms[:, None] * direction / np.linalg.norm(direction), shape.weights)
    subspace, z, rest = project_half(simulate(truth, sigma, rng), sigma, k, rng)
    found = moment_estimate(z[rest], sigma[rest], k)
    projected = Atoms(truth.atoms @ subspace.basis @ subspace.basis.T, truth.weights)  # the truth has mean 0
    seen = Atoms(subspace.project(truth.atoms), truth.weights)
    fitted = Atoms(subspace.lift(found.atoms), found.weights)
    return [wasserstein(truth, projected), wasserstein(found, seen), wasserstein(truth, fitted)]


def measure_rates(config: Config) -> Rates:
    """Run the experiment.

    Noisy curves are measured at as many more samples as the theory says they need for the same errors, as far
    as two million numbers allow.
    """
    k, d, sizes = config.k, config.num_features, config.num_samples
    terms, rate = (TERMS[1:2], [1 / (4 * k - 2)]) if d == 1 else (TERMS, [0.25, 1 / (4 * k - 2), math.nan])
    rng = np.random.default_rng(config.seed)

    def measure(name: str, levels: list[Array], dims: list[int], slopes: list[float]) -> list[Curve]:
        """A curve for each term: against the number of samples, or of dimensions if these differ."""
        repeats = config.num_repeats
        draws = [hard_errors(k, level, repeats, rng, dim) for level, dim in zip(levels, dims, strict=True)]
        at = dims if len(set(dims)) > 1 else [len(level) for level in levels]
        names = [name] if d == 1 else [f"{name}, {term}" for term in terms]
        by_term = zip(names, zip(*draws, strict=True), slopes, strict=True)
        return [Curve(each, at, mine, slope) for each, mine, slope in by_term]

    measured = []
    for name, share, sigma, factor in kinds(config):
        counts = [(round(share * round(n * factor)), round(n * factor)) for n in sizes]
        levels = [np.repeat([1.0, sigma], [clean, total - clean]) for clean, total in counts]
        measured.append(measure(f"worst case, {name}", levels, [d] * len(sizes), rate))
    curves, dimensions = [curve for kind in measured for curve in kind], []
    if d == 1:
        easy = Atoms(np.linspace(-1, 1, k) * 3.0 * (k - 1), np.full(k, 1 / k))  # 6 apart, in units of the noise
        repeats, radius = 4 * config.num_repeats, 3.0 * k + 3
        draws = [line_errors(easy, np.ones(1), np.ones(n), repeats, rng, radius) for n in sizes]
        curves.append(Curve("separated, clean", sizes, draws, 0.5))
    else:
        levels, dims = [np.ones(max(sizes))] * 4, [d, 2 * d, 4 * d, 8 * d]
        dimensions = measure(f"{max(sizes):,} clean samples", levels, dims, [-0.25, 0.0, math.nan])
    exchanges, theory = [], dict(zip(TERMS, [*noisy_per_clean(config.sigma, k), math.nan], strict=True))
    for term, clean, noisy in zip(terms, measured[0], measured[1], strict=True):
        pairs = [(clean.redrawn(rng), noisy.redrawn(rng)) for _ in range(NUM_REDRAWN)]
        interval = middle_90([exchange_rate(*pair) for pair in pairs])
        exchanges.append(Exchange(term, exchange_rate(clean, noisy), interval, theory[term]))
    return Rates(curves, dimensions, exchanges)


def kinds(config: Config) -> list[tuple[str, float, float, float]]:
    """Clean, noisy and mixed samples: name, share of clean ones, noise of the others, how many more."""
    most = MOST_NUMBERS / config.num_features / max(config.num_samples)
    subspace, inside = noisy_per_clean(config.sigma, config.k)
    p, factor = config.clean_fraction, inside if config.num_features == 1 else math.sqrt(subspace * inside)
    mixed = 1 / (p + (1 - p) / factor)
    return [
        ("clean", 1.0, 1.0, min(1.0, most)),
        ("noisy", 0.0, config.sigma, min(factor, most)),
        (f"{p:.0%} clean", p, config.sigma, min(mixed, most)),
    ]


def rates_panels(rates: Rates, sigma: float) -> list[Panel]:
    """Errors against numbers of samples and of dimensions, and how many noisy samples replace a clean one."""
    panels = [curves_panel(rates.curves, "Error against the number of samples", "samples, n")]
    if rates.dimensions:
        panels.append(curves_panel(rates.dimensions, "The price of the dimension", "dimension, d"))
    title = "Noisy samples for a clean one"
    worth = Panel(title, "noise (clean: 1)", "noisy per clean", log_x=True, log_y=True)
    for row, colour in zip(rates.exchanges, COLOURS, strict=False):
        at, measured, low, high = (np.array([value]) for value in (sigma, row.measured, *row.interval))
        worth.series.append(Series(f"{row.term}, measured", "bars", at, measured, low, high, colour=colour))
        if math.isfinite(row.theory):
            power = math.log(row.theory) / math.log(sigma)
            fine, name = np.geomspace(1, sigma, 50), f"{row.term}: noise^{power:.0f}"
            worth.series.append(Series(name, "dashed", fine, fine**power, colour=colour))
    return [*panels, worth]


def curves_panel(curves: list[Curve], title: str, label: str) -> Panel:
    """Curves with their standard errors and the slopes of the theory."""
    panel = Panel(title, label, "W1 error (dashed: slope of the theory)", log_x=True, log_y=True)
    for which, curve in enumerate(curves):
        size, error, colour = np.array(curve.num_samples, float), curve.error, COLOURS[which % len(COLOURS)]
        low, high = error - curve.standard_error, error + curve.standard_error
        name = f"{curve.name}: {label[-1]}^{-curve.power_law()[0]:.3f}"
        panel.series.append(Series(name, "line", size, error, colour=colour))
        panel.series.append(Series("", "bars", size, error, low, high, colour=colour, width=1.0))
        if np.isfinite(curve.theory_slope):
            expected = np.exp(np.log(error).mean() - curve.theory_slope * (np.log(size) - np.log(size).mean()))
            panel.series.append(Series("", "dashed", size, expected, colour=colour, width=1.0))
    return panel


def write(config: Config, folder: Path, picture: str, table: str) -> None:
    """Measure, print the exponents and the exchange rates, and write the figure and the curves."""
    rates = measure_rates(config)
    for sign, curve in [(1, each) for each in rates.curves] + [(-1, each) for each in rates.dimensions]:
        low, high = sorted(sign * end for end in curve.slope_interval())
        exponent, theory = sign * curve.power_law()[0], sign * curve.theory_slope
        print(f"{curve.name}: exponent {exponent:.3f} (90%: {low:.3f} to {high:.3f}), in theory {theory:.3f}")
    for row in rates.exchanges:
        interval = "{:.3g} to {:.3g}".format(*row.interval)
        print(f"noisy for a clean one, {row.term}: {row.measured:.3g} ({interval}), in theory {row.theory:.3g}")
    with open(folder / table, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["curve", "num_samples", "error", "standard_error"])
        for curve in [*rates.curves, *rates.dimensions]:
            columns = curve.num_samples, curve.error, curve.standard_error
            writer.writerows([curve.name.replace(",", ""), *row] for row in zip(*columns, strict=True))
    save_png(rates_panels(rates, config.sigma), folder / picture)


if __name__ == "__main__":
    here = Path(__file__).parent
    write(Config(), here, "rates.png", "results.csv")
    space = Config(num_features=8, sigma=1.5, num_samples=(500, 2000, 8000), num_repeats=16)
    write(space, here, "space.png", "space.csv")
