"""Distances between two sets of images, given their features or the statistics of their features.

Frechet distance of the Gaussians with the same mean and covariance:

    FD = |mean_a - mean_b|^2 + tr cov_a + tr cov_b - 2 tr (cov_a cov_b)^(1/2).

With cov = root^T root, the last trace is the sum of the singular values of root_a root_b^T: real, never
negative, and without the square root of a non-symmetric product. The roots come from a pivoted Cholesky
factorisation that stops at the rank, so fewer images than dimensions cost less and lose nothing.

FD is biased upwards by about 1/n: compare equal counts only. The kernel distance has no such bias.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy import linalg
from sklearn.metrics import pairwise_distances_argmin
from sklearn.neighbors import NearestNeighbors
from threadpoolctl import threadpool_limits

from assay.errors import AssayError
from assay.metrics.statistics import Array, FeatureStatistics


def frechet_distance(a: FeatureStatistics, b: FeatureStatistics) -> float:
    """The (squared) Frechet distance; >= 0, symmetric, 0 on itself."""
    product = _root(a.cov) @ _root(b.cov).T
    with threadpool_limits(1, "blas"):  # many small steps: threads would wait, long on a busy machine
        singular_values = linalg.svdvals(product)
    shift = a.mean - b.mean
    distance = shift @ shift + np.trace(a.cov) + np.trace(b.cov) - 2 * singular_values.sum()
    return max(float(distance), 0.0)  # equal statistics leave a rounding error of either sign


def _root(cov: Array) -> Array:
    """(rank, D) with cov = root^T root, by Cholesky with complete pivoting (LAPACK dpstrf)."""
    factor, pivots, rank, _ = linalg.lapack.dpstrf((cov + cov.T) / 2)
    root = np.zeros((max(rank, 1), len(cov)))
    root[:rank, pivots - 1] = np.triu(factor)[:rank]
    trace = np.trace(cov)
    if abs(trace - np.square(root).sum()) > 1e-6 * abs(trace):
        raise AssayError("a covariance has negative eigenvalues", cure="compute the statistics again")
    return root


@dataclass(frozen=True)
class Measurement:
    """A number and its standard error."""

    value: float
    standard_error: float

    def __str__(self) -> str:
        return f"{self.value:.4g} ± {self.standard_error:.2g}"


def kernel_distance(a: np.ndarray, b: np.ndarray, seed: int = 0, block_size: int = 1000) -> Measurement:
    """KID: squared maximum mean discrepancy of features (N, D) and (M, D), kernel (x.y / D + 1)^3.

    Unbiased at any count. Averaged over disjoint random blocks (at least 10), whose spread gives the
    standard error of the mean.
    """
    smaller = min(len(a), len(b))
    size = min(block_size, smaller // 10)
    rng = np.random.default_rng(seed)
    order_a, order_b = rng.permutation(len(a)), rng.permutation(len(b))
    values = []
    for start in range(0, smaller - size + 1, size):
        x = a[np.sort(order_a[start : start + size])].astype(np.float64)
        y = b[np.sort(order_b[start : start + size])].astype(np.float64)
        within_x, within_y, across = _cubic(x, x), _cubic(y, y), _cubic(x, y)
        within = within_x.sum() - np.trace(within_x) + within_y.sum() - np.trace(within_y)
        values.append(within / (size * (size - 1)) - 2 * across.mean())
    return Measurement(float(np.mean(values)), float(np.std(values, ddof=1) / np.sqrt(len(values))))


def _cubic(x: Array, y: Array) -> Array:
    return (x @ y.T / x.shape[1] + 1) ** 3


@dataclass(frozen=True)
class Manifold:
    """How the two sets cover each other: shares of images in the k-nearest-neighbour balls of the other."""

    precision: float  # generated images inside the real manifold, k = 3 (Kynkaanniemi et al. 2019)
    recall: float  # real images inside the generated manifold, k = 3
    density: float  # real balls around a generated image, over k = 5 (Naeem et al. 2020); may exceed 1
    coverage: float  # real images with a generated one in their ball, k = 5


def manifold_overlap(generated: np.ndarray, real: np.ndarray, max_images: int = 10_000) -> Manifold:
    """Precision, recall, density and coverage of features (N, D) and (M, D).

    All four depend on the counts, so both sets are cut to the same: the smaller one, at most `max_images`,
    evenly spaced.
    """
    num_images = min(len(generated), len(real), max_images)
    generated = generated[np.linspace(0, len(generated) - 1, num_images).astype(int)]
    real = real[np.linspace(0, len(real) - 1, num_images).astype(int)]
    own = np.arange(num_images)
    radius_generated = neighbour_distances(generated, generated, 3, own)[:, 2]
    radius_real = neighbour_distances(real, real, 5, own)
    in_real = np.zeros(num_images, dtype=bool)
    num_balls = np.zeros(num_images)
    in_generated, covered = [], []
    for rows, distances in distance_blocks(real, generated):  # each a block of real images (b, N)
        in_real |= (distances < radius_real[rows, 2, None]).any(0)
        num_balls += (distances < radius_real[rows, 4, None]).sum(0)
        in_generated.append((distances < radius_generated).any(1))
        covered.append(distances.min(1) < radius_real[rows, 4])
    return Manifold(
        precision=float(in_real.mean()),
        recall=float(np.concatenate(in_generated).mean()),
        density=float(num_balls.mean() / 5),
        coverage=float(np.concatenate(covered).mean()),
    )


def neighbour_distances(a: np.ndarray, b: np.ndarray, num: int, own: np.ndarray) -> Array:
    """Distances (N, num) from each row of `a` to its nearest rows of `b`, ascending, but not b[own[i]]."""
    nearest = []
    for rows, distances in distance_blocks(a, b):
        distances[np.arange(len(distances)), own[rows]] = np.inf
        nearest.append(np.sort(np.partition(distances, num - 1, axis=1)[:, :num], axis=1))
    return np.concatenate(nearest)


def distance_blocks(a: np.ndarray, b: np.ndarray, block_size: int = 512) -> Iterator[tuple[slice, Array]]:
    """Euclidean distances from blocks of rows of `a` (N, D) to all of `b` (M, D): (rows, (block, M))."""
    # |x - y|^2 = |x|^2 + |y|^2 - 2 x.y loses its digits where the features sit far from the origin.
    centre = np.asarray(b[:1024], dtype=np.float64).mean(0)
    b = b.astype(np.float64) - centre
    square_b = np.square(b).sum(1)
    for start in range(0, len(a), block_size):
        rows = slice(start, min(start + block_size, len(a)))
        block = a[rows].astype(np.float64) - centre
        squares = np.square(block).sum(1)[:, None] + square_b - 2 * block @ b.T
        yield rows, np.sqrt(np.maximum(squares, 0))


@dataclass(frozen=True)
class Neighbours:
    """For each of N images its nearest among others: `index` (N,) and `distance` (N,) in feature space."""

    index: np.ndarray
    distance: np.ndarray


def nearest_neighbours(a: np.ndarray, b: np.ndarray) -> Neighbours:
    """Which row of `b` (M, D) is nearest to each row of `a` (N, D); `b` may be a mapped file."""
    index = pairwise_distances_argmin(a, b)
    return Neighbours(index, np.linalg.norm(a.astype(np.float64) - b[index], axis=1))


def leave_one_out(training: np.ndarray, max_images: int = 5000) -> Neighbours:
    """Training images (evenly spaced) and their nearest other training image: in effect, held-out images."""
    own = np.linspace(0, len(training) - 1, min(len(training), max_images)).astype(int)
    search = NearestNeighbors(n_neighbors=2, algorithm="brute").fit(training)
    first, second = search.kneighbors(training[own], return_distance=False).T
    index = np.where(first == own, second, first)
    return Neighbours(index, np.linalg.norm(training[own].astype(np.float64) - training[index], axis=1))


@dataclass(frozen=True)
class Memorisation:
    """How much closer to the training images generated images are than real images not trained on.

    `share` of them are closer than `threshold`, the `quantile` of the held-out images' distances. A model that
    learned the distribution has share ~ quantile, one that copies has share ~ 1.
    """

    share: float
    quantile: float
    threshold: float
    num_held_out: int


_TOO_CLOSE = 0.05  # the share of held-out images that a copy is closer than


def memorisation(generated: Neighbours, held_out: Neighbours) -> Memorisation:
    """Compare the distances of generated and of held-out images to their nearest training images."""
    threshold = float(np.quantile(held_out.distance, _TOO_CLOSE))
    share = float((generated.distance < threshold).mean())
    return Memorisation(share, _TOO_CLOSE, threshold, len(held_out.distance))
