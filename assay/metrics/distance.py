"""Statistics of features, and distances between two sets of images that follow from their features.

    mean = 1/n sum_i f_i,      cov = 1/(n - 1) sum_i (f_i - mean)(f_i - mean)^T      (unbiased)

Both are accumulated in float64, batch by batch, and parts merge exactly (Chan, Golub and LeVeque):

    scatter = scatter_a + scatter_b + n_a n_b / (n_a + n_b) (mean_b - mean_a)(mean_b - mean_a)^T.

The Frechet distance of the Gaussians with the same mean and covariance is

    FD = |mean_a - mean_b|^2 + tr cov_a + tr cov_b - 2 tr (cov_a cov_b)^(1/2).

With cov = root^T root, the last trace is the sum of the singular values of root_a root_b^T: real, never
negative, and without the square root of a non-symmetric product. The roots come from a pivoted Cholesky
factorisation that stops at the rank, so fewer images than dimensions cost less and lose nothing.

FD is biased upwards by about 1/n: compare equal counts only. The kernel distance has no such bias.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import linalg
from threadpoolctl import threadpool_limits

from assay.archives import read_npz
from assay.errors import AssayError
from assay.files import decoding, write_whole

Array = NDArray[np.float64]


@dataclass(frozen=True)
class FeatureStatistics:
    """`mean` (D,), unbiased `cov` (D, D), and how many images they were taken from.

    `num_images` and `extractor_sha256` are None where a file does not say, as in EDM's references.
    """

    mean: Array
    cov: Array
    num_images: int | None
    extractor_sha256: str | None = None


def features_to_statistics(features: np.ndarray, batch_size: int = 1024) -> FeatureStatistics:
    """Statistics of features (N, D), also of a memory-mapped array larger than memory."""
    num_dims = features.shape[1]
    num_images, mean, scatter = 0, np.zeros(num_dims), np.zeros((num_dims, num_dims))
    for start in range(0, len(features), batch_size):
        batch = features[start : start + batch_size].astype(np.float64)
        here, total = batch.mean(0), num_images + len(batch)
        batch -= here
        shift = here - mean
        scatter += batch.T @ batch
        scatter += np.outer(shift * (num_images * len(batch) / total), shift)
        mean = mean + shift * (len(batch) / total)
        num_images = total
    return FeatureStatistics(mean, scatter / max(num_images - 1, 1), num_images)


def save_statistics(path: Path, statistics: FeatureStatistics) -> None:
    """Write an npz with the names of EDM's references, `mu` and `sigma`, so that its tools read it too."""
    arrays: dict[str, Any] = {"mu": statistics.mean, "sigma": statistics.cov}
    arrays |= {name: getattr(statistics, name) for name in ("num_images", "extractor_sha256")}
    with write_whole(path) as partial, open(partial, "wb") as file:
        np.savez(file, **{name: value for name, value in arrays.items() if value is not None})


def load_statistics(path: Path) -> FeatureStatistics:
    """Read an npz of ours, or a reference of EDM's."""
    arrays = read_npz(path)
    with decoding(path, "make it with `assay evaluate reference`"):
        mean, cov = (arrays[name].astype(np.float64) for name in ("mu", "sigma"))
        is_finite = np.isfinite(mean).all() and np.isfinite(cov).all()
        if mean.ndim != 1 or cov.shape != 2 * mean.shape or not is_finite:
            raise AssayError(f"holds mu {mean.shape} and sigma {cov.shape}, not finite numbers (D,) and (D, D)")
        num_images = int(arrays["num_images"]) if "num_images" in arrays else None
        extractor_sha256 = str(arrays["extractor_sha256"]) if "extractor_sha256" in arrays else None
        return FeatureStatistics(mean, cov, num_images, extractor_sha256)


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

    @property
    def in_errors(self) -> float:
        """The number in standard errors."""
        return self.value / max(self.standard_error, 1e-30)

    def __float__(self) -> float:
        return self.value


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


def precision_recall(generated: np.ndarray, real: np.ndarray, max_images: int = 10_000) -> tuple[float, float]:
    """Precision and recall of features (N, D) and (M, D) (Kynkaanniemi et al. 2019).

    The shares of generated images in a ball of a real one, and of real ones in a ball of a generated one; a
    ball reaches to the third neighbour in its own set. Both depend on the counts, so both sets are cut to the
    same: the smaller one, at most `max_images`, evenly spaced.
    """
    num_images = min(len(generated), len(real), max_images)
    generated = generated[np.linspace(0, len(generated) - 1, num_images).astype(int)]
    real = real[np.linspace(0, len(real) - 1, num_images).astype(int)]
    radius_generated, radius_real = _third_neighbours(generated), _third_neighbours(real)
    in_real, in_generated = np.zeros(num_images, dtype=bool), np.zeros(num_images, dtype=bool)
    for rows, distances in _distance_blocks(real, generated):  # each a block of real images (b, N)
        in_real |= (distances < radius_real[rows, None]).any(0)
        in_generated[rows] = (distances < radius_generated).any(1)
    return float(in_real.mean()), float(in_generated.mean())


def _third_neighbours(features: np.ndarray) -> Array:
    """The distance (N,) from each row to its third neighbour among the others."""
    found = []
    for rows, distances in _distance_blocks(features, features):
        distances[:, rows][np.diag_indices(len(distances))] = np.inf  # from itself
        found.append(np.partition(distances, 2, axis=1)[:, 2])
    return np.concatenate(found)


def _distance_blocks(a: np.ndarray, b: np.ndarray, block_size: int = 512) -> Iterator[tuple[slice, Array]]:
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
