"""The nonparametric maximum likelihood estimate: a mixture without knowing the number of atoms, certified.

Over all distributions G of the atoms, on a grid or anywhere, maximise

    L(G) = sum_i log f_i(G),   f_i(G) = integral N(x_i; mu, sigma_i^2 I) dG(mu).

It is concave in G, and any G proves how far it is from the maximum, by the duality gap: with

    D(mu) = sum_i N(x_i; mu, sigma_i^2 I) / f_i(G),   max L - L(G) <= n log(max_mu D(mu) / n).

The maximum has few atoms, where D = n. So a few places are kept (the active ones), their weights are found by
Newton's method under the constraint that none is negative, and places where D exceeds n join them until none
does. D on a grid is a product of matrices, since a density is a product over the axes. Samples enter by their
vectors (n, d + 2), see `assay.mixture.likelihood`.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy.interpolate import make_interp_spline
from scipy.linalg import solve_triangular
from scipy.ndimage import maximum_filter
from scipy.optimize import nnls

from assay.errors import AssayError
from assay.mixture.likelihood import log_constant, place_vectors, responsibilities, sample_vectors
from assay.mixture.moments import Array, Atoms
from assay.mixture.subspace import sum_over_chunks

_SUBSAMPLE = 20_000  # on which the active places are first found
_NODES = 5  # nodes per standard deviation of the noise: a spline of degree 9 through a Gaussian errs by 1e-12
_MARGIN = 40  # nodes beyond the grid, over which what the ends of a spline err by dies out
_LARGEST_SHARE = 1e130  # its square is still a floating-point number
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


def npmle(
    x: Array, sigma: Array, num_places: int = 10_000, free: bool = True, tolerance: float = 1e-6, seed: int = 0
) -> Estimate:
    """Maximise the likelihood of samples `x` (n, d) with noise `sigma` (n,) > 0, to a gap of n `tolerance`.

    A grid of `num_places` places covers the samples, in 1, 2 or 3 dimensions. If `free`, atoms may leave it:
    from the grid, the active places and the samples that fit worst, places move to where D is largest.
    """
    n, d = x.shape
    if d > 3:
        raise AssayError(f"has {d} columns: a grid is too large", key="X", cure="project X onto 3 dimensions")
    grid = grid_axes(x, sigma, num_places)
    center = np.array([(axis[0] + axis[-1]) / 2 for axis in grid])
    grid = [axis - middle for axis, middle in zip(grid, center, strict=True)]
    vectors = sample_vectors(x - center, sigma)
    num_starts = round(64 ** (1 / d))
    start = [axis[np.linspace(0, len(axis) - 1, min(num_starts, len(axis))).astype(int)] for axis in grid]
    places = np.stack(np.meshgrid(*start, indexing="ij"), -1).reshape(-1, d)
    weights = np.full(len(places), 1 / len(places))
    if n > 2 * _SUBSAMPLE:
        few = np.random.default_rng(seed).permutation(n)[:_SUBSAMPLE]
        places, weights, *_ = _solve(vectors[few], places, weights, grid, free, max(tolerance, 1e-5))
    places, weights, log_density, gap = _solve(vectors, places, weights, grid, free, tolerance)
    order = np.argsort(-weights, kind="stable")
    log_likelihood = float((log_density + log_constant(sigma, d)).sum())
    everywhere = gap + _between(sigma, np.array([np.diff(axis).max() for axis in grid]))
    mixture = Atoms(places[order] + center, weights[order])
    return Estimate(mixture, log_likelihood, gap * n, everywhere * n)


def grid_axes(x: Array, sigma: Array, num_places: int) -> list[Array]:
    """Axes of a grid that covers the samples, except those with more noise than all cleaner ones are wide."""
    count, order = round(num_places ** (1 / x.shape[1])), np.argsort(sigma, kind="stable")
    axes = []
    for column in x[order].T:
        low, high = np.minimum.accumulate(column), np.maximum.accumulate(column)
        beyond = sigma[order][1:] > (high - low)[:-1]
        beyond[:20] = False
        last = int(beyond.argmax()) if beyond.any() else len(column) - 1
        margin = 0.0 if high[last] > low[last] else sigma.min()  # equal samples
        axes.append(np.linspace(low[last] - margin, high[last] + margin, count))
    return axes


def _between(sigma: Array, spacing: Array) -> float:
    """What log max D may exceed its maximum on the grid by.

    Between two neighbours on an axis, h apart, a function exceeds the larger of its values there by at most
    h^2 / 8 times the largest -D'', and -d^2 D / d mu_a^2 <= D / min sigma^2. Axis after axis this gives
    max D <= max over the grid / prod_a (1 - h_a^2 / (8 min sigma^2)).
    """
    share = (spacing / sigma.min()) ** 2 / 8
    return -float(np.log1p(-share).sum()) if (share < 1).all() else math.inf


def _solve(
    vectors: Array, places: Array, weights: Array, axes: list[Array], free: bool, tolerance: float
) -> tuple[Array, Array, Array, float]:
    """Active places, weights, log f_i (n,), and the gap over n."""
    inner = 1e-2
    for rounds_left in reversed(range(_MOST_ROUNDS)):
        weights, log_density = _solve_weights(vectors, places, weights, inner)
        places, weights = places[weights > 0], weights[weights > 0]
        scores = _grid_scores(vectors, log_density, axes)
        peaks = np.argwhere((scores > 1) & (scores == maximum_filter(scores, 3, mode="nearest")))
        found = np.stack([axis[column] for axis, column in zip(axes, peaks.T, strict=True)], axis=1)
        values = scores[tuple(peaks.T)]
        if free:
            worst = vectors[np.argpartition(log_density, min(32, len(vectors) - 1))[:32]]
            climbed = np.concatenate([places, found, worst[:, 1:-1] / (-2 * worst[:, -1:])])
            for _ in range(2):
                climbed = _climb(vectors, log_density, climbed)
            there = _scores(vectors, log_density, np.concatenate([climbed, places])) / len(vectors)
            found, values = np.concatenate([found, climbed]), np.concatenate([values, there])
        gap = math.log(values.max(initial=1.0))
        if gap < tolerance or rounds_left == 0:
            break
        new = values[: len(found)] > 1 + tolerance / 10
        share = min(gap, 1e-3)
        places = np.concatenate([places, found[new]])
        weights = np.concatenate([(1 - share) * weights, np.full(new.sum(), share / new.sum())])
        inner = max(min(gap / 10, 1e-2), tolerance / 4)
    return places, weights, log_density, gap


def _solve_weights(vectors: Array, places: Array, weights: Array, tolerance: float) -> tuple[Array, Array]:
    """The best weights (m,) of `places`, to a duality gap of n `tolerance` among them, and log f_i (n,).

    Newton's method for sum_i log f_i - n sum_j w_j, whose maximum has weights of sum 1 by itself, with w >= 0,
    after a step of EM, which finds the scale of weights that were set arbitrarily.
    """
    weights = weights * _scores(vectors, _log_density(vectors, places, weights), places) / len(vectors)
    for left in reversed(range(51)):
        weights = weights / weights.sum()
        log_density = _log_density(vectors, places, weights)
        score, curvature = _derivatives(vectors, log_density, places)
        if math.log(score.max()) < tolerance or not left:
            break
        move = _newton_step(curvature, score - 1, weights)
        ratio = np.expm1(np.clip(_log_density(vectors, places, weights + move) - log_density, -700, 700))
        step, slope = 1.0, (score - 1) @ move
        with np.errstate(divide="ignore"):  # a density of 0 at the end of the step: it is shortened
            while np.log1p(step * ratio).mean() - step * move.sum() < 1e-4 * step * slope and step > 1e-6:
                step /= 2
        weights = np.maximum(weights + step * move, 0)
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


def _log_density(vectors: Array, places: Array, weights: Array) -> Array:
    """log f_i without its constant: (n,)."""
    live, log_density = weights > 0, np.empty(len(vectors))
    targets = place_vectors(places[live])

    def work(rows: slice, part: Array) -> None:
        log_density[rows] = responsibilities(part, targets, weights[live])[1]

    sum_over_chunks(vectors, work, len(targets))
    return log_density


def _shares(vectors: Array, places: Array, log_density: Array) -> Array:
    """N(x_i; mu_j, sigma_i^2 I) / f_i, (c, m): what sample i adds to D at place j."""
    exponent = vectors @ place_vectors(places).T
    exponent -= log_density[:, None]
    return _bounded_exp(exponent)


def _bounded_exp(exponent: Array) -> Array:
    """exp in place; what is next to nothing becomes a number whose products are not slow denormal ones."""
    np.clip(exponent, _SMALLEST_EXPONENT, -2 * _SMALLEST_EXPONENT, out=exponent)
    return np.asarray(np.exp(exponent, out=exponent))


def _derivatives(vectors: Array, log_density: Array, places: Array) -> tuple[Array, Array]:
    """D / n at a few places (m,), and minus the second derivatives of L / n in their weights, (m, m)."""

    def work(rows: slice, part: Array) -> tuple[Array, ...]:
        shares = np.minimum(_shares(part, places, log_density[rows]), _LARGEST_SHARE)
        return shares.sum(0), shares.T @ shares

    score, curvature = sum_over_chunks(vectors, work, len(places))
    return score / len(vectors), curvature / len(vectors)


def _scores(vectors: Array, log_density: Array, places: Array) -> Array:
    """D at arbitrary places (m,)."""

    def work(rows: slice, part: Array) -> tuple[Array, ...]:
        return (_shares(part, places, log_density[rows]).sum(0),)

    return sum_over_chunks(vectors, work, len(places))[0]


def _climb(vectors: Array, log_density: Array, places: Array) -> Array:
    """One step of Newton's method from each of `places` (m, d) towards a maximum of D.

    The derivatives of D are products of the moments of the samples' vectors with the derivatives of the places'
    vectors. Where D is not concave, directions are climbed by the size of their curvature.
    """
    (m, d), size = places.shape, vectors.shape[1]
    slopes = np.zeros((m, size, d))
    slopes[:, 1:-1], slopes[:, -1] = np.eye(d), 2 * places
    upper = np.triu_indices(size)

    def work(rows: slice, part: Array) -> tuple[Array, ...]:
        shares = _shares(part, places, log_density[rows]).T
        return shares @ part, shares @ (part[:, upper[0]] * part[:, upper[1]])

    first, flat = sum_over_chunks(vectors, work, m + len(upper[0]))
    second = np.empty((m, size, size))
    second[:, upper[0], upper[1]] = second[:, upper[1], upper[0]] = flat
    precision = -2 * first[:, -1]
    hessian = slopes.swapaxes(1, 2) @ second @ slopes - precision[:, None, None] * np.eye(d)
    value, vector = np.linalg.eigh(hessian)
    along = np.einsum("mab,mqa,mq->mb", vector, slopes, first)
    along /= np.maximum(np.abs(value), np.maximum(0.02 * precision[:, None], np.finfo(float).tiny))
    return places + (vector @ along[..., None])[..., 0]


def _grid_scores(vectors: Array, log_density: Array, axes: list[Array]) -> Array:
    """D / n on the grid with these axes: (len(axes[0]), ...)."""
    if len(axes) == 1:
        return _line_scores(vectors, log_density, axes[0]) / len(vectors)

    def work(rows: slice, part: Array) -> tuple[Array, ...]:
        precision = -2 * part[:, -1:]
        tables = []
        for axis, column in zip(axes, (part[:, 1:-1] / precision).T, strict=True):
            distance = (column[:, None] - axis) * np.sqrt(precision / 2)
            tables.append(_bounded_exp(np.multiply(distance, -distance, out=distance)))
        tables[0] *= _bounded_exp(-log_density[rows])[:, None]
        rest = tables[1]
        for table in tables[2:]:
            rest = (rest[:, :, None] * table[:, None]).reshape(len(part), -1)
        return (tables[0].T @ rest,)

    shape = [len(axis) for axis in axes]
    return sum_over_chunks(vectors, work, math.prod(shape[1:]))[0].reshape(shape) / len(vectors)


def _line_scores(vectors: Array, log_density: Array, axis: Array) -> Array:
    """D on a line (m,).

    Samples whose noise is the same within a factor of 2 are summed at nodes a fraction of it apart, through
    which a spline is drawn, if these are fewer than the grid has places.
    """
    total = np.zeros(len(axis))
    octave = np.floor(np.log2(-2 * vectors[:, -1]) / 2)
    for which in np.unique(octave):
        mine, step = octave == which, 2.0 ** -(which + 1) / _NODES
        count = (axis[-1] - axis[0]) / step + 2 * _MARGIN
        places = axis[0] + step * np.arange(-_MARGIN, count - _MARGIN + 1) if count < len(axis) else axis
        values = _scores(vectors[mine], log_density[mine], places[:, None])
        total += make_interp_spline(places, values, 9)(axis) if count < len(axis) else values
    return total
