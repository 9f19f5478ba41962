"""The affine subspace in which the atoms lie, from noisy samples in d dimensions, in O(nd).

    Sigma_hat = sum_i alpha_i (x_i - c)(x_i - c)' - sigma_bar^2 I,   alpha_i ~ sigma_i^-4,   c = sum_i alpha_i
    x_i

estimates the covariance of the atoms (Lemma "cov_conc"), and c their mean. The paper takes the top k
eigenvectors of the second moment about 0; around the mean k - 1 suffice, which makes the low-dimensional
problem smaller and the estimate independent of where the origin lies.

Sigma_hat is never formed. A block of vectors is multiplied by it, a pass over the samples each time. The noise
of Sigma_hat has eigenvalues near 0, so that a pass shrinks the error of the block by the ratio of that noise
to the signal, which is what limits the estimate anyway: from a start on a subsample, two passes reach it.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from assay.mixture.moments import Array, sample_weights

_CHUNK_VALUES = 1 << 17  # numbers read at a time: 1 MiB of float64 stays in the cache between two products
_SUBSAMPLE = 2048


@dataclass(frozen=True)
class Subspace:
    """The points center + basis z."""

    center: Array
    """(d,): the estimated mean of the atoms."""
    basis: Array
    """(d, num_dims), orthonormal columns."""

    def project(self, x: NDArray) -> Array:
        """Coordinates z (n, num_dims) of samples (n, d); streams memory-maps."""
        z = np.empty((len(x), self.basis.shape[1]))
        offset = self.center @ self.basis

        def work(rows: slice, part: Array) -> tuple[Array, ...]:
            z[rows] = part @ self.basis - offset
            return ()

        sum_over_chunks(x, work)
        return z

    def lift(self, z: Array) -> Array:
        """The points (k, d) with coordinates `z` (k, num_dims)."""
        return self.center + z @ self.basis.T


def sum_over_chunks(x: NDArray, work: Callable[[slice, Array], tuple[Array, ...]]) -> tuple[Array, ...]:
    """One pass over `x` (n, d): the sums of what `work(rows, x[rows])` returns for chunks of rows.

    Chunks are small enough for the cache, too small to be worth splitting a product over threads: each thread
    takes chunks of its own instead, as many threads as the products were allowed.
    """
    step = max(64, _CHUNK_VALUES // x.shape[1])
    slices = [slice(start, min(start + step, len(x))) for start in range(0, len(x), step)]

    def share(mine: list[slice]) -> list[Array]:
        sums: list[Array] = []
        for rows in mine:
            parts = work(rows, np.asarray(x[rows], np.float64))
            sums = [total + part for total, part in zip(sums, parts, strict=True)] if sums else list(parts)
        return sums

    products = _products()
    num_threads = min(
        len(slices), max((library.num_threads for library in products.lib_controllers), default=1)
    )
    with products.limit(limits=1), ThreadPoolExecutor(num_threads) as pool:
        shares = list(pool.map(share, [slices[i::num_threads] for i in range(num_threads)]))
    return tuple(sum(parts[1:], start=parts[0]) for parts in zip(*shares, strict=True))


@cache
def _products() -> ThreadpoolController:
    """The libraries that multiply matrices."""
    return ThreadpoolController().select(user_api="blas")


def find_subspace(
    x: NDArray, sigma: Array, num_dims: int, rng: np.random.Generator, chosen: NDArray[np.bool_] | None = None
) -> Subspace:
    """Center and top `num_dims` eigenvectors of Sigma_hat, from the `chosen` rows (n,) of `x` (n, d), or all.

    With num_dims >= d the basis is the identity and only the center is estimated.
    """
    num_features = x.shape[1]
    weights, used = np.zeros(len(x)), slice(None) if chosen is None else chosen
    weights[used] = sample_weights(sigma[used], 4, num_features)
    if num_dims >= num_features:
        return Subspace(
            _apply(x, weights, sigma, np.zeros(num_features), np.empty((num_features, 0)))[0],
            np.eye(num_features),
        )
    rows = slice(None, None, max(1, len(x) // _SUBSAMPLE))
    few, level = np.asarray(x[rows], np.float64), sigma[rows]
    few_weights = sample_weights(level, 4, num_features)
    center = few_weights @ few
    few = few - center
    width = min(
        -(-(num_dims + 4) // 8) * 8, num_features
    )  # a few to spare, in the multiples that products like
    block = np.linalg.qr(rng.standard_normal((num_features, width)))[0]
    for _ in range(4):
        image = few.T @ (few_weights[:, None] * (few @ block)) - (few_weights @ level**2) * block
        block = np.linalg.qr(image)[0]
    top = np.eye(width)[:, :num_dims]
    for _ in range(3):
        center, image = _apply(x, weights, sigma, center, block)
        value, vector = np.linalg.eigh(block.T @ image)
        noise = np.abs(value[:-num_dims]).max()
        if (
            noise < 0.05 * value[-num_dims]
        ):  # the error that is left, noise / signal squared, is far below theirs
            break
        top = vector[:, -num_dims:]
        block = np.linalg.qr(image)[0]
    return Subspace(center, np.linalg.qr(image @ top)[0])


def _apply(x: NDArray, weights: Array, sigma: Array, center: Array, block: Array) -> tuple[Array, Array]:
    """One pass: the weighted mean (d,) and Sigma_hat (about that mean) times `block` (d, b)."""
    transposed = np.ascontiguousarray(block.T)
    offset = (transposed @ center)[:, None]

    def work(rows: slice, part: Array) -> tuple[Array, ...]:
        weight = weights[rows]
        used = weight > 0
        if not used.all():
            part, weight = part[used], weight[used]
        inner = (transposed @ part.T - offset) * weight  # (b, c): the layout in which both products run fast
        return inner @ part, inner.sum(1), weight @ part

    image, total, mean = sum_over_chunks(x, work)
    shift = mean - center  # from the second moment about the old center to that about the mean
    image = image.T - np.outer(center, total) - np.outer(shift, shift @ block)
    return mean, image - (weights @ sigma**2) * block
