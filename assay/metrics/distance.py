"""Distances between two sets of images, given their features or the statistics of their features.

Frechet distance of the Gaussians with the same mean and covariance:

    FD = |mean_a - mean_b|^2 + tr cov_a + tr cov_b - 2 tr (cov_a cov_b)^(1/2).

With cov = root^T root, the last trace is the sum of the singular values of root_a root_b^T: real, never
negative, and without the square root of a non-symmetric product. The roots come from a pivoted Cholesky
factorisation that stops at the rank, so fewer images than dimensions cost less and lose nothing.

FD is biased upwards by about 1/n: compare equal counts only, or extrapolate (`frechet_infinity`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy import linalg, special
from threadpoolctl import threadpool_limits

from assay.errors import AssayError
from assay.metrics.statistics import Array, FeatureStatistics, features_to_statistics, merge_statistics


def frechet_distance(a: FeatureStatistics, b: FeatureStatistics) -> float:
    """The (squared) Frechet distance; >= 0, symmetric, 0 on itself."""
    if len(a.mean) != len(b.mean):
        what = f"features of {len(a.mean)} and of {len(b.mean)} dimensions come from two extractors"
        raise AssayError(what, key="extractor", cure="take both with one")
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

    def times(self, factor: float) -> "Measurement":
        """The same in other units."""
        return Measurement(factor * self.value, factor * self.standard_error)


_NUM_BLOCKS = 8  # of the smallest size


def check_extrapolation(num_images: int, num_features: int) -> None:
    """Reject too few images, for which FD does not fall as 1/n in the smallest blocks."""
    needed = 2 * _NUM_BLOCKS * num_features
    if num_images < needed:
        what = f"{num_images} images are too few to extrapolate the distance of {num_features} features"
        raise AssayError(what, key="infinity", cure=f"give at least {needed}, or leave it out")


def frechet_infinity(features: np.ndarray, reference: FeatureStatistics, seed: int = 0) -> Measurement:
    """FD extrapolated to infinitely many images of the set `features` (N, D); `reference` stays as it is.

    The images are dealt into 8 blocks, merged in pairs to 4, 2 and 1. FD averaged over the blocks of each
    size is fitted as FD_inf + slope / n (Chong and Forsyth 2020, with every image used at every size).
    The standard error is that of the fit's residuals.
    """
    check_extrapolation(*features.shape)
    order = np.random.default_rng(seed).permutation(len(features))
    blocks = [features_to_statistics(features[part]) for part in np.array_split(order, _NUM_BLOCKS)]
    inverse_counts, distances = [], []
    while True:
        inverse_counts.append(len(blocks) / len(features))
        distances.append(np.mean([frechet_distance(block, reference) for block in blocks]))
        if len(blocks) == 1:
            break
        blocks = [merge_statistics(*pair) for pair in zip(blocks[::2], blocks[1::2], strict=True)]
    design = np.stack([np.ones(len(distances)), inverse_counts], 1)
    fit = np.linalg.lstsq(design, np.array(distances), rcond=None)[0]
    variance = np.square(design @ fit - distances).sum() / (len(distances) - 2)
    standard_error = np.sqrt(variance * np.linalg.inv(design.T @ design)[0, 0])
    return Measurement(float(fit[0]), float(standard_error))


def _check_count(num_images: int, needed: int, what: str) -> None:
    if num_images < needed:
        raise AssayError(
            f"{what} cannot be had of {num_images} images", key="num_images", cure=f"give {needed}"
        )


def kernel_distance(a: np.ndarray, b: np.ndarray, seed: int = 0, block_size: int = 1000) -> Measurement:
    """KID: squared maximum mean discrepancy of features (N, D) and (M, D), kernel (x.y / D + 1)^3.

    Unbiased at any count. Averaged over disjoint random blocks (at least 10), whose spread gives the
    standard error of the mean.
    """
    smaller = min(len(a), len(b))
    _check_count(smaller, 20, "the kernel distance")
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
    _check_count(num_images, 6, "precision and recall, which look at 5 neighbours,")
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


def inception_score(logits: np.ndarray, num_splits: int = 10) -> Measurement:
    """exp of the mean KL from p(class | image) to p(class), of `logits` (N, K); mean and std over splits.

    As in the original, the logits are those without the last layer's bias, and what is reported as the
    error is the standard deviation over the splits.
    """
    _check_count(len(logits), 2 * num_splits, "the Inception score")
    losses = []
    for part in np.array_split(special.log_softmax(logits.astype(np.float64), axis=1), num_splits):
        log_marginal = special.logsumexp(part, axis=0) - np.log(len(part))
        losses.append(np.exp((np.exp(part) * (part - log_marginal)).sum(1).mean()))
    return Measurement(float(np.mean(losses)), float(np.std(losses)))


@dataclass(frozen=True)
class Neighbours:
    """For each of N images its nearest among others: `index` (N,) and `distance` (N,) in feature space."""

    index: np.ndarray
    distance: np.ndarray


def nearest_neighbours(a: np.ndarray, b: np.ndarray, own: np.ndarray | None = None) -> Neighbours:
    """Which row of `b` (M, D) is nearest to each row of `a` (N, D); b[own[i]] does not count for a[i].

    Rows are compared by products in float32, twice as fast as float64: where two of them are equally far up to
    a millionth of |a|^2, either may be chosen. The distance to the chosen one is exact. Memory is bounded, so
    that `b` may be a mapped file larger than it.
    """
    index, distance = np.zeros(len(a), dtype=np.int64), np.full(len(a), np.inf)
    block_size, chunk_size = 512, 8192
    centre = np.asarray(b[:1024], dtype=np.float64).mean(0)  # far from it, products lose their digits
    for start in range(0, len(b), chunk_size):
        chunk = (b[start : start + chunk_size] - centre).astype(np.float32)
        half_square = np.square(chunk).sum(1) / 2
        for first in range(0, len(a), block_size):
            rows = slice(first, min(first + block_size, len(a)))
            block = a[rows].astype(np.float64)
            gap = half_square - (block - centre).astype(np.float32) @ chunk.T  # (|x - y|^2 - |x|^2) / 2
            if own is not None:
                here = np.flatnonzero((own[rows] >= start) & (own[rows] < start + len(chunk)))
                gap[here, own[rows][here] - start] = np.inf
            lowest = gap.argmin(1)
            exact = np.sqrt(np.square(block - b[start + lowest]).sum(1))
            exact[np.isinf(gap[np.arange(len(gap)), lowest])] = np.inf  # this chunk has its own row only
            closer = np.flatnonzero(exact < distance[rows])
            index[first + closer], distance[first + closer] = start + lowest[closer], exact[closer]
    return Neighbours(index, distance)


def leave_one_out(training: np.ndarray, max_images: int = 5000) -> Neighbours:
    """Training images (evenly spaced) and their nearest other training image: in effect, held-out images."""
    own = np.linspace(0, len(training) - 1, min(len(training), max_images)).astype(int)
    return nearest_neighbours(training[own], training, own)


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


def memorisation(generated: Neighbours, held_out: Neighbours, quantile: float = 0.05) -> Memorisation:
    """Compare the distances of generated and of held-out images to their nearest training images."""
    threshold = float(np.quantile(held_out.distance, quantile))
    share = float((generated.distance < threshold).mean())
    return Memorisation(share, quantile, threshold, len(held_out.distance))
