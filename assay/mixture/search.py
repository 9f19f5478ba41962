"""From one-dimensional marginals to atoms in a few dimensions.

Along each direction of a finite set the samples give an estimate of the marginal: atoms from the denoised
moments of each group of samples, of which the group that agrees best with the others is taken (median of means,
Lemma "conc_mom"). A k-atomic distribution is close to the truth if its marginals are close to all of these
(Lemma "sliced_wass_disc"), so the search minimises the largest W1 over the directions.

`exhaustive_search` is the Low-dimensional Algorithm as the paper writes it: every k-subset of the grid of axis
atoms with every weight vector of a net, over a net of directions. `scalable_search` thins each of the nets.
"""

import math
import warnings
from itertools import combinations

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import least_squares, linprog
from scipy.special import softmax
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning

from assay.errors import AssayError
from assay.mixture.distance import wasserstein_line
from assay.mixture.moments import (
    Array,
    Atoms,
    denoised_moments,
    hermite_variance,
    inverse_weights,
    moment_weights,
    project_moments,
    quadrature,
)

_BEAM = 40
_CAUTION = 10.0  # of the weights of samples, see `moment_weights`


def partition_mass(alpha: Array, num_groups: int) -> NDArray[np.int64]:
    """Group (n,) of each sample such that each group holds at least half of its share of the mass.

    Lemma "gred_part", if max alpha <= sum alpha / (4 num_groups). Algorithm "Partition Mass" gives each sample
    to the lightest group so far. Dealing them like cards in falling order of alpha keeps its invariant, that
    groups differ by at most max alpha: the first exceeds the last by sum_j (a_{jm} - a_{jm+m-1}) <= a_0.
    """
    group = np.empty(len(alpha), np.int64)
    group[np.argsort(-alpha, kind="stable")] = np.arange(len(alpha)) % num_groups
    return group


def select_group(atoms: Array, weights: Array) -> NDArray[np.int64]:
    """Among estimates (num_groups, ..., k), the index (...) of one that 60% of the others lie closest to.

    Lemma "conc_mom" takes any estimate with 60% of all within a radius it knows up to constants; the one for
    which the smallest such radius is least needs no constants and is among them.
    """
    distance = wasserstein_line(atoms[:, None], weights[:, None], atoms[None], weights[None])
    rank = min(math.ceil(0.6 * len(atoms)), len(atoms) - 1)  # its distance 0 to itself counts as one
    return np.asarray(np.sort(distance, axis=1)[:, rank].argmin(0))


class Marginals:
    """Estimated marginals of the atoms' distribution along any directions: all that the searches look at.

    `z` (n, num_dims) are samples with noise `sigma` (n,), in units in which the atoms lie in the unit ball.
    """

    def __init__(self, z: Array, sigma: Array, k: int, num_groups: int) -> None:
        self.k, self.num_dims, self.num_samples = k, z.shape[1], len(z)
        # How far out the atoms are, in units of the ball: samples that stick out of the noise show it; where
        # none does, the root mean square of the atoms will do.
        square, largest_noise = (z**2).sum(1), math.sqrt(z.shape[1]) + math.sqrt(2 * math.log(len(z)))
        mean_square = float(inverse_weights((sigma**2) ** 2) @ (square / z.shape[1] - sigma**2))
        outermost = float((np.sqrt(square) - sigma * largest_noise).max())
        spread = float(np.clip(max(outermost, math.sqrt(max(mean_square, 0))), 0.01, 1))
        # A sample this noisy has next to no weight, but its powers could overflow.
        usable = sigma <= 1e6 * max(float(sigma.min()), spread)
        z, sigma = (z, sigma) if usable.all() else (z[usable], sigma[usable])
        alpha = moment_weights(sigma, k, spread, _CAUTION)
        # The lemma asks for 4 effective samples per group: with fewer samples, fewer groups.
        num_groups = max(1, min(num_groups, int(1 / alpha.max()) // 4))
        group = partition_mass(alpha, num_groups)
        ends = np.cumsum(np.bincount(group, minlength=num_groups))[:-1]
        by_group = np.argsort(group.astype(np.int16), kind="stable")
        self.groups = list(zip(*(np.split(each[by_group], ends) for each in (z, sigma, alpha)), strict=True))
        self.mass = np.array([mass.sum() for _, _, mass in self.groups])
        orders = range(1, 2 * k)
        self.standard_error = np.sqrt([alpha**2 @ hermite_variance(r, sigma**2, spread) for r in orders])

    def moments(self, directions: Array) -> Array:
        """Denoised moments 1 .. 2k - 1 per group along `directions` (G, num_dims): (num_groups, G, 2k - 1)."""
        order = 2 * self.k - 1
        return np.array([denoised_moments(z, s, order, a, directions)[1:].T for z, s, a in self.groups])


def marginals_from(moments: Array) -> tuple[Array, Array]:
    """Of moments (num_groups, G, 2k - 1) the selected estimate for each direction: atoms and weights (G, k)."""
    atoms, weights = quadrature(project_moments(moments))
    chosen = select_group(atoms, weights), np.arange(atoms.shape[1])
    return atoms[chosen], weights[chosen]


def worst_marginal(atoms: Array, weights: Array, directions: Array, marginals: tuple[Array, Array]) -> Array:
    """max over v of W1 between the projections of atoms (..., k, r), weights (..., k), and the marginals."""
    projected = np.moveaxis(atoms @ directions.T, -1, -2)  # (..., G, k)
    return wasserstein_line(projected, weights[..., None, :], *marginals).max(-1)


def sphere_net(num_dims: int, radius: float) -> Array:
    """A net (G, num_dims) with the axes: within `radius` of each unit vector, or of its negative, is a point.

    The points are those of a grid on the faces of the cube, normalised, which only brings them closer together;
    grid steps of 2 radius / sqrt(num_dims - 1) suffice.
    """
    if num_dims == 1:
        return np.ones((1, 1))
    steps = math.ceil(math.sqrt(num_dims - 1) / radius)
    steps += steps % 2  # an even number of steps puts 0, hence the axes, on the grid
    ticks = np.linspace(-1, 1, steps + 1)
    face = np.stack(np.meshgrid(*[ticks] * (num_dims - 1), indexing="ij"), -1).reshape(-1, num_dims - 1)
    points = np.concatenate([np.insert(face, axis, 1.0, axis=1) for axis in range(num_dims)])
    return points / np.linalg.norm(points, axis=1, keepdims=True)


def simplex_net(k: int, spacing: float) -> Array:
    """All weight vectors (W, k) whose entries are multiples of 1 / N, N = ceil(1 / spacing), and sum to 1."""
    parts = math.ceil(1 / spacing)
    bars = np.array(list(combinations(range(parts + k - 1), k - 1)), dtype=int).reshape(-1, k - 1)
    edges = np.concatenate([np.full((len(bars), 1), -1), bars, np.full((len(bars), 1), parts + k - 1)], axis=1)
    return (np.diff(edges, axis=1) - 1) / parts


def exhaustive_search(marginals: Marginals) -> Atoms:
    """The Low-dimensional Algorithm: min over candidate atoms and weights of max over directions of W1.

    The net of directions has radius 1 / (32 k^2 sqrt(r)), the net of weights n^-1/(4k-2).
    """
    k, num_dims = marginals.k, marginals.num_dims
    if num_dims > 2 or (num_dims == 2 and k > 3):
        what = f"an exhaustive search for {k} atoms in {num_dims} dimensions would take too long"
        raise AssayError(what, key="search", cure="use scalable_search")
    directions = sphere_net(num_dims, 1 / (32 * k**2 * math.sqrt(num_dims)))
    net = simplex_net(k, marginals.num_samples ** (-1 / (4 * k - 2)))
    estimates = marginals_from(marginals.moments(directions))
    axes = marginals_from(marginals.moments(np.eye(num_dims)))[0]  # (num_dims, k)
    grid = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, num_dims)
    candidates = [grid[list(subset)] for subset in combinations(range(len(grid)), k)]
    scores = np.array([worst_marginal(atoms, net, directions, estimates) for atoms in candidates])
    best, weights = np.unravel_index(scores.argmin(), scores.shape)
    return Atoms(candidates[best], net[weights])


def scalable_search(marginals: Marginals) -> Atoms:
    """A search whose cost does not explode with k. What it approximates, against `exhaustive_search`:

    - directions: the axes, and the diagonals (e_i +- e_j) / sqrt 2, which tell what belongs together;
    - candidates: the grid of axis atoms grown axis by axis, keeping the 40 partial atoms whose projections lie
      nearest to the marginals along the diagonals seen so far;
    - weights: a linear programme over all candidates instead of a net; its solution is gathered into k
      clusters, and a second programme weighs their centres;
    - last, least squares on the denoised moments along all directions moves atoms off the grid; it is kept if
      it lowers the largest W1, the criterion of the paper.
    """
    k, num_dims = marginals.k, marginals.num_dims
    pairs = combinations(np.eye(num_dims), 2)
    diagonals = [(first + sign * second) / math.sqrt(2) for first, second in pairs for sign in (1, -1)]
    directions = np.array([*np.eye(num_dims), *diagonals])
    moments = marginals.moments(directions)
    atoms, weights = marginals_from(moments)
    if num_dims == 1:
        return Atoms(atoms.T, weights[0])
    candidates = _beam(atoms, weights, directions, num_dims)
    start = cluster(candidates, linear_weights(candidates, directions, (atoms, weights)), k).atoms
    found = Atoms(start, linear_weights(start, directions, (atoms, weights)))
    pooled = np.tensordot(marginals.mass, moments, 1)
    refined = _refine(found, directions, pooled, marginals.standard_error)
    scores = [worst_marginal(one.atoms, one.weights, directions, (atoms, weights)) for one in (found, refined)]
    return refined if scores[1] <= scores[0] else found


def _beam(atoms: Array, weights: Array, directions: Array, num_dims: int) -> Array:
    """Grow candidate atoms (_BEAM, num_dims) axis by axis from the axis atoms, judged along the diagonals."""
    real = np.where(weights > 1e-4, atoms, np.inf)  # quadrature pads with atoms of no weight
    partial = np.empty((1, 0))
    for axis in range(num_dims):
        places = real[axis][np.isfinite(real[axis])]
        grown = np.concatenate([np.repeat(partial, len(places), 0), np.tile(places, len(partial))[:, None]], 1)
        seen = np.flatnonzero((directions[:, axis + 1 :] == 0).all(1))  # directions within the axes so far
        projected = grown @ directions[seen, : axis + 1].T  # (N, seen)
        nearest = np.abs(projected[:, :, None] - real[seen]).min(-1)
        partial = grown[np.argsort((nearest**2).sum(1))[:_BEAM]]
    return partial


def cluster(points: Array, mass: Array, k: int) -> Atoms:
    """k clusters of weighted points (N, r): k-means, started at heavy points far from each other."""
    chosen = [int(mass.argmax())]
    while len(chosen) < min(k, len(points)):
        gap = ((points[:, None] - points[chosen]) ** 2).sum(-1).min(1)
        chosen.append(int((mass * gap).argmax()))
    with warnings.catch_warnings(action="ignore", category=ConvergenceWarning):  # equal points
        found = KMeans(len(chosen), init=points[chosen], n_init=1).fit(points, sample_weight=mass)
    return Atoms(found.cluster_centers_, np.bincount(found.labels_, mass, len(chosen)) / mass.sum())


def linear_weights(candidates: Array, directions: Array, marginals: tuple[Array, Array]) -> Array:
    """Weights (N,) on `candidates` (N, r) that minimise the largest W1 to the marginals: a linear programme.

    Between two neighbouring projected points the difference of distribution functions is linear in the weights,
    and W1 is the sum of its absolute values e times the gaps: min t, t >= sum gap e, e >= +-(F_w - F).
    """
    below, target, gaps = [], [], []
    for v, atoms, weights in zip(directions, *marginals, strict=True):
        projected = candidates @ v
        points = np.unique(np.concatenate([projected, atoms]))
        below.append(projected <= points[:-1, None])
        target.append((atoms <= points[:-1, None]) @ weights)
        gaps.append(np.diff(points)[None])
    inside, goal = np.concatenate(below).astype(float), np.concatenate(target)
    slack, num_directions = sparse.eye_array(len(goal)), len(directions)
    rows = [
        [inside, -slack, None],
        [-inside, -slack, None],
        [None, sparse.block_diag(gaps), -np.ones((num_directions, 1))],
    ]
    limit = np.concatenate([goal, -goal, np.zeros(num_directions)])
    cost, total = np.zeros(len(candidates) + len(goal) + 1), np.zeros(len(candidates) + len(goal) + 1)
    cost[-1], total[: len(candidates)] = 1, 1
    solved = linprog(cost, sparse.block_array(rows, format="csr"), limit, total[None], [1.0])
    weights = np.maximum(solved.x[: len(candidates)], 0)
    return weights / weights.sum()


def _refine(start: Atoms, directions: Array, moments: Array, standard_error: Array) -> Atoms:
    """Least squares on the moments along `directions`, (G, 2k - 1), each divided by its standard error."""
    k, num_dims = start.atoms.shape
    orders = np.arange(1, moments.shape[1] + 1)

    def unpack(theta: Array) -> tuple[Array, Array]:
        return theta[: k * num_dims].reshape(k, num_dims), softmax(theta[k * num_dims :])

    def residual(theta: Array) -> Array:
        atoms, weights = unpack(theta)
        powers = (directions @ atoms.T)[:, None] ** orders[:, None]  # (G, 2k - 1, k)
        return np.asarray(((powers @ weights - moments) / standard_error).ravel())

    logits = np.log(np.maximum(start.weights, 1e-3))
    theta = least_squares(residual, np.concatenate([start.atoms.ravel(), logits]), max_nfev=50).x
    atoms, weights = unpack(theta)
    return Atoms(np.clip(atoms, -1, 1), weights)
