"""The nonparametric maximum likelihood estimate: a mixture without knowing the number of atoms, certified.

Over all distributions G of the atoms, on a grid or anywhere, maximise

    L(G) = sum_i log f_i(G),   f_i(G) = integral N(x_i; mu, S_i) dG(mu).

It is concave in G, and any G proves how far it is from the maximum: with

    D(mu) = sum_i N(x_i; mu, S_i) / f_i(G),   max L - L(G) <= n log(max_mu D(mu) / n),

the duality gap. The maximum has few atoms, where D = n. So a few places are kept (the active ones), their
weights are found by Newton's method under the constraint that none is negative, and places where D exceeds n
join them until none does. A pass costs n times the number of active places, plus D on the grid: a product of
matrices, since the density on a grid is a product over its axes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import make_interp_spline
from scipy.linalg import solve_triangular
from scipy.ndimage import maximum_filter
from scipy.optimize import nnls

from assay.errors import AssayError
from assay.mixture.moments import Array, Atoms
from assay.mixture.noise import Noise
from assay.mixture.subspace import sum_over_chunks

_SUBSAMPLE = 20_000  # on which the active places are first found
_NODES = 5  # nodes per standard deviation of the noise: a spline of degree 9 through a Gaussian errs by 1e-12
_MARGIN = 40  # nodes beyond the grid, over which what the ends of a spline err by dies out
_LARGEST_EXPONENT = 300.0  # the square of its exponential is still a floating-point number
_SMALLEST_EXPONENT = -230.0  # the product of three such exponentials too
_MOST_ROUNDS = 80


@dataclass(frozen=True)
class Estimate:
    """A nonparametric maximum likelihood estimate and what is proved about it."""

    mixture: Atoms
    """Atoms (k, d), heaviest first."""
    log_likelihood: float
    """Of all samples, in nats."""
    gap: float
    """No distribution on the places looked at has a log-likelihood higher by more than this."""
    gap_everywhere: float
    """The same for every distribution in the grid's box; infinite if the grid is coarser than the noise."""
    num_places: int
    """How many places were looked at: those of the grid and those found between them."""


@dataclass(frozen=True)
class _Samples:
    x: Array
    noise: Noise
    vectors: Array
    """(n, q): what `Noise.features` makes of x."""

    def __getitem__(self, rows: NDArray | slice) -> "_Samples":
        return _Samples(self.x[rows], self.noise[rows], self.vectors[rows])

    def __len__(self) -> int:
        return len(self.x)


def npmle(
    x: Array,
    noise: Noise,
    axes: Sequence[Array] | None = None,
    free: bool = True,
    tolerance: float = 1e-6,
    seed: int = 0,
) -> Estimate:
    """Maximise the likelihood of samples `x` (n, d) with their `noise`, to a duality gap of n `tolerance`.

    `axes` are d increasing vectors, whose product is the grid; the default covers the samples with 10,000
    places in 1, 2 or 3 dimensions. Atoms may leave it if `free`: from the grid, from the active places and from
    the samples that fit worst, places are moved to where D is largest.
    """
    n, d = x.shape
    if axes is None and d > 3:
        what = f"a grid in {d} dimensions is too large"
        raise AssayError(what, key="axes", cure="project X onto 3 dimensions")
    grid = default_axes(x, noise) if axes is None else [np.asarray(axis, np.float64) for axis in axes]
    if len(grid) != d or any(axis.ndim != 1 or len(axis) < 2 or (np.diff(axis) <= 0).any() for axis in grid):
        raise AssayError(f"must be {d} increasing vectors, one for each column of X", key="axes")
    center = np.array([(axis[0] + axis[-1]) / 2 for axis in grid])
    grid = [axis - middle for axis, middle in zip(grid, center, strict=True)]
    samples = _Samples(x - center, noise, noise.features(x - center))
    num_starts = round(64 ** (1 / d))
    start = [axis[np.linspace(0, len(axis) - 1, min(num_starts, len(axis))).astype(int)] for axis in grid]
    places = np.stack(np.meshgrid(*start, indexing="ij"), -1).reshape(-1, d)
    weights = np.full(len(places), 1 / len(places))
    if n > 2 * _SUBSAMPLE:
        few = np.random.default_rng(seed).permutation(n)[:_SUBSAMPLE]
        places, weights, *_ = _solve(samples[few], places, weights, grid, free, max(tolerance, 1e-5))
    places, weights, log_density, gap, num_places = _solve(samples, places, weights, grid, free, tolerance)
    order = np.argsort(-weights, kind="stable")
    spacing = np.array([np.diff(axis).max() for axis in grid])
    log_likelihood, everywhere = float((log_density + noise.constant).sum()), gap + _between(noise, spacing)
    mixture = Atoms(places[order] + center, weights[order])
    return Estimate(mixture, log_likelihood, gap * n, everywhere * n, num_places)


def default_axes(x: Array, noise: Noise, num_places: int = 10_000) -> list[Array]:
    """Axes of a grid of about `num_places` places that covers the samples.

    Not those with more noise than all cleaner samples are wide: wherever the atoms lie, they say little of it.
    """
    count = round(num_places ** (1 / x.shape[1]))
    precision = noise.axis_precision()
    axes = []
    for column, level in zip(x.T, precision.T, strict=True):
        seen = level > 0
        order = np.argsort(-level[seen], kind="stable")
        values, deviation = column[seen][order], level[seen][order] ** -0.5
        low, high = np.minimum.accumulate(values), np.maximum.accumulate(values)
        beyond = deviation[1:] > (high - low)[:-1]
        beyond[:20] = False
        last = int(beyond.argmax()) if beyond.any() else len(values) - 1
        margin = 0.0 if high[last] > low[last] else deviation[0]  # equal samples
        axes.append(np.linspace(low[last] - margin, high[last] + margin, count))
    return axes


def _between(noise: Noise, spacing: Array) -> float:
    """What log max D may exceed its maximum on the grid by.

    Between two neighbours on an axis, h apart, a function exceeds the larger of its values there by at most
    h^2 / 8 times the largest -D'', and -d^2 D / d mu_a^2 <= max_i (P_i)_aa D. Axis after axis this gives
    max D <= max over the grid / prod_a (1 - h_a^2 max_i (P_i)_aa / 8).
    """
    share = spacing**2 * noise.axis_precision().max(0) / 8
    return -float(np.log1p(-share).sum()) if (share < 1).all() else math.inf


def _solve(
    samples: _Samples, places: Array, weights: Array, axes: list[Array], free: bool, tolerance: float
) -> tuple[Array, Array, Array, float, int]:
    """Active places, weights, log f_i (n,), the gap over n, and how many places were looked at."""
    inner, num_places = 1e-2, math.prod(len(axis) for axis in axes)
    for rounds_left in reversed(range(_MOST_ROUNDS)):
        weights, log_density = _solve_weights(samples, places, weights, inner)
        places, weights = places[weights > 0], weights[weights > 0]
        scores = _grid_scores(samples, log_density, axes)
        peaks = np.argwhere((scores > 1) & (scores == maximum_filter(scores, 3, mode="nearest")))
        found = np.stack([axis[column] for axis, column in zip(axes, peaks.T, strict=True)], axis=1)
        values = scores[tuple(peaks.T)]
        if free:
            worst = np.argpartition(log_density, min(32, len(samples) - 1))[:32]
            climbed = np.concatenate([places, found, samples.x[worst]])
            for _ in range(2):
                climbed = _climb(samples, log_density, climbed)
            there = _scores(samples, log_density, np.concatenate([places, climbed]))
            active, reached = np.split(there, [len(places)])
            found, values = np.concatenate([found, climbed]), np.concatenate([values, reached])
            num_places += len(climbed)
        else:
            active = np.ones(0)  # they are on the grid
        gap = math.log(max(1.0, values.max(initial=1.0), active.max(initial=1.0)))
        if gap < tolerance or rounds_left == 0:
            break
        new = values > 1 + tolerance / 10
        share = min(gap, 1e-3)
        places = np.concatenate([places, found[new]])
        weights = np.concatenate([(1 - share) * weights, np.full(new.sum(), share / new.sum())])
        inner = max(min(gap / 10, 1e-2), tolerance / 4)
    return places, weights, log_density, gap, num_places


def _solve_weights(samples: _Samples, places: Array, weights: Array, tolerance: float) -> tuple[Array, Array]:
    """The best weights (m,) of `places`, to a duality gap of n `tolerance` among them, and log f_i (n,).

    Newton's method for sum_i log f_i - n sum_j w_j, whose maximum has weights of sum 1 by itself, with w >= 0.
    A step of EM comes first: it finds the scale of weights that were set arbitrarily.
    """
    weights = weights * _active(samples, places, weights)[1]
    for _ in range(50):
        weights = weights / weights.sum()
        log_density, score = _active(samples, places, weights)
        if math.log(score.max()) < tolerance:
            break
        move = _newton_step(_curvature(samples, log_density, places), score - 1, weights)
        live = weights + move > 0
        there = _active(samples, places[live], (weights + move)[live])[0]
        ratio = np.expm1(np.clip(there - log_density, -700, 700))
        step, slope = 1.0, (score - 1) @ move
        with np.errstate(divide="ignore"):  # a density of 0 at the end of the step: it is shortened
            while np.log1p(step * ratio).mean() - step * move.sum() < 1e-4 * step * slope and step > 1e-6:
                step /= 2
        weights = np.maximum(weights + step * move, 0)
    else:  # the certificate is one of the weights that are returned
        weights = weights / weights.sum()
        log_density, _ = _active(samples, places, weights)
    return weights, log_density


def _newton_step(curvature: Array, slope: Array, weights: Array) -> Array:
    """argmax of slope' v - v' curvature v / 2 over weights + v >= 0, as non-negative least squares."""
    for ridge in (1e-12, 1e-10, 1e-8, 1e-6):  # rounding may make the curvature slightly indefinite
        matrix = curvature + ridge * np.trace(curvature) * np.eye(len(curvature))
        try:
            factor = np.linalg.cholesky(matrix)
        except np.linalg.LinAlgError:
            continue
        goal = solve_triangular(factor, matrix @ weights + slope, lower=True)
        return np.asarray(nnls(factor.T, goal, maxiter=100 * len(weights))[0]) - weights
    raise AssayError("the densities of samples are not finite", key="X", cure="rescale X and sigma together")


def _active(samples: _Samples, places: Array, weights: Array) -> tuple[Array, Array]:
    """log f_i (n,) without its constant, and D / n at the active places (m,)."""
    vectors, live, log_density = samples.noise.places(places), weights > 0, np.empty(len(samples))

    def work(rows: slice, part: Array) -> tuple[Array, ...]:
        density = part @ vectors.T
        peak = density[:, live].max(1)
        density -= peak[:, None]
        np.exp(np.minimum(density, _LARGEST_EXPONENT, out=density), out=density)
        total = density @ weights
        log_density[rows] = np.log(total) + peak
        return ((1 / total) @ density,)

    return log_density, sum_over_chunks(samples.vectors, work, len(places))[0] / len(samples)


def _curvature(samples: _Samples, log_density: Array, places: Array) -> Array:
    """Minus the second derivatives of L / n in the weights: mean products of densities over f_i, (m, m)."""
    vectors = samples.noise.places(places)

    def work(rows: slice, part: Array) -> tuple[Array, ...]:
        shares = np.minimum(_shares(part, vectors, log_density[rows]), math.exp(_LARGEST_EXPONENT))
        return (shares.T @ shares,)

    return sum_over_chunks(samples.vectors, work, len(places))[0] / len(samples)


def _shares(vectors: Array, places: Array, log_density: Array) -> Array:
    """N(x_i; mu_j, S_i) / f_i, (c, m): what sample i adds to D at place j."""
    exponent = vectors @ places.T
    exponent -= log_density[:, None]
    return _bounded_exp(exponent)


def _bounded_exp(exponent: Array) -> Array:
    """exp in place; what is next to nothing becomes a number whose products are not slow denormal ones."""
    np.clip(exponent, _SMALLEST_EXPONENT, -2 * _SMALLEST_EXPONENT, out=exponent)
    return np.asarray(np.exp(exponent, out=exponent))


def _scores(samples: _Samples, log_density: Array, places: Array) -> Array:
    """D / n at arbitrary places (m,)."""
    vectors = samples.noise.places(places)

    def work(rows: slice, part: Array) -> tuple[Array, ...]:
        return (_shares(part, vectors, log_density[rows]).sum(0),)

    return sum_over_chunks(samples.vectors, work, len(places))[0] / len(samples)


def _climb(samples: _Samples, log_density: Array, places: Array) -> Array:
    """One step of Newton's method from each of `places` (m, d) towards a maximum of D.

    With derivatives of the places' vectors, the gradient and the Hessian of D are products of the first and
    second moments of the samples' vectors. Where D is not concave, directions are climbed by the size of their
    curvature.
    """
    noise = samples.noise
    vectors, slopes = noise.places(places), noise.slopes(places)
    size = slopes.shape[1]
    upper = np.triu_indices(size)

    def work(rows: slice, part: Array) -> tuple[Array, ...]:
        shares = _shares(part, vectors, log_density[rows]).T
        return shares @ part, shares @ (part[:, upper[0]] * part[:, upper[1]])

    first, flat = sum_over_chunks(samples.vectors, work, len(places) + len(upper[0]))
    second = np.empty((len(places), size, size))
    second[:, upper[0], upper[1]] = second[:, upper[1], upper[0]] = flat
    gradient = np.einsum("mqa,mq->ma", slopes, first)
    precision = noise.total_precision(first)
    hessian = slopes.swapaxes(1, 2) @ second @ slopes - precision
    value, vector = np.linalg.eigh(hessian)
    least = 0.02 * np.trace(precision, axis1=1, axis2=2)[:, None] / noise.num_features
    along = (vector.swapaxes(1, 2) @ gradient[..., None])[..., 0]
    along /= np.maximum(np.maximum(np.abs(value), least), np.finfo(float).tiny)
    return places + (vector @ along[..., None])[..., 0]


def _grid_scores(samples: _Samples, log_density: Array, axes: list[Array]) -> Array:
    """D / n on the grid with these axes: (len(axes[0]), ...)."""
    shape = [len(axis) for axis in axes]
    precision = samples.noise.precision
    if precision.ndim == 3:
        points = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, len(axes))
        return _scores(samples, log_density, points).reshape(shape)
    if len(axes) == 1:
        return _line_scores(samples.x[:, 0], precision[:, 0], log_density, axes[0]) / len(samples)
    root = np.sqrt(samples.noise.axis_precision() / 2)

    def work(rows: slice, part: Array) -> tuple[Array, ...]:
        tables = []
        for axis, column, scale in zip(axes, part.T, root[rows].T, strict=True):
            distance = (column[:, None] - axis) * scale[:, None]
            tables.append(_bounded_exp(np.multiply(distance, -distance, out=distance)))
        tables[0] *= _bounded_exp(-log_density[rows])[:, None]
        rest = tables[1]
        for table in tables[2:]:
            rest = (rest[:, :, None] * table[:, None]).reshape(len(part), -1)
        return (tables[0].T @ rest,)

    (total,) = sum_over_chunks(samples.x, work, math.prod(shape[1:]))
    return total.reshape(shape) / len(samples)


def _line_scores(x: Array, precision: Array, log_density: Array, axis: Array) -> Array:
    """D on a line (m,).

    Samples whose noise is the same within a factor of 2 are summed at nodes a fraction of it apart, through
    which a spline is drawn, if these are fewer than the grid has places.
    """
    total = np.zeros(len(axis))
    octave = np.floor(np.log2(np.maximum(precision, np.finfo(float).tiny)) / 2)
    for which in np.unique(octave):
        mine, step = octave == which, 2.0 ** -(which + 1) / _NODES
        count = (axis[-1] - axis[0]) / step + 2 * _MARGIN
        places = axis[0] + step * np.arange(-_MARGIN, count - _MARGIN + 1) if count < len(axis) else axis
        values = _sum_of_gaussians(x[mine], precision[mine], log_density[mine], places)
        total += make_interp_spline(places, values, 9)(axis) if count < len(axis) else values
    return total


def _sum_of_gaussians(x: Array, precision: Array, log_density: Array, points: Array) -> Array:
    """sum_i exp(-precision_i (x_i - point)^2 / 2) / f_i: (m,)."""
    root = np.sqrt(precision / 2)

    def work(rows: slice, part: Array) -> tuple[Array, ...]:
        distance = (part - points) * root[rows, None]
        np.multiply(distance, -distance, out=distance)
        distance -= log_density[rows, None]
        return (_bounded_exp(distance).sum(0),)

    return sum_over_chunks(x[:, None], work, len(points))[0]
