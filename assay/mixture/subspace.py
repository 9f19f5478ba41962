"""The affine subspace in which the atoms lie, from noisy samples in d dimensions, in O(nd).

    Sigma_hat = sum_i alpha_i (x_i - c)(x_i - c)' - sigma_bar^2 I,   c = sum_i alpha_i x_i,
    1 / alpha_i ~ sigma_i^2 (sigma_i^2 + s) + (r / d) s^2,

estimates the covariance of the atoms (Lemma "cov_conc"), and c their mean. The paper takes the top k
eigenvectors of the second moment about 0; around the mean r = k - 1 suffice, which makes the low-dimensional
problem smaller and the estimate independent of the origin. The weights are the inverse of the terms of that
lemma, s being the mean variance of the atoms along the subspace; if sigma^2 >> s they are the paper's sigma^-4.

Sigma_hat is never formed. A block of vectors is multiplied by it, a pass over the samples each time, and the
best vectors in the span of all blocks so far are kept (block Lanczos).
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from assay.mixture.moments import Array, inverse_weights

_CHUNK_VALUES = 1 << 17  # numbers read at a time: 1 MiB of float64 stays in the cache between two products
_SUBSAMPLE = 2048
_MOST_PASSES = 12
_BLAS = ThreadpoolController().select(user_api="blas")  # what multiplies matrices


@dataclass(frozen=True)
class Subspace:
    """The points center + basis z."""

    center: Array
    """(d,): the estimated mean of the atoms."""
    basis: Array
    """(d, num_dims), orthonormal columns."""

    @classmethod
    def through(cls, atoms: Array, weights: Array) -> "Subspace":
        """The affine hull of atoms (k, d), about their mean."""
        center = weights @ atoms
        num_dims = min(len(atoms) - 1, atoms.shape[1])
        return cls(center, np.linalg.svd(atoms - center, full_matrices=False)[2][:num_dims].T)

    def project(self, x: NDArray) -> Array:
        """Coordinates z (n, num_dims) of samples (n, d); streams memory-maps."""
        z = np.empty((len(x), self.basis.shape[1]))
        offset = self.center @ self.basis

        def work(rows: slice, part: Array) -> None:
            z[rows] = part @ self.basis - offset

        sum_over_chunks(x, work)
        return z

    def lift(self, z: Array) -> Array:
        """The points (k, d) with coordinates `z` (k, num_dims)."""
        return self.center + z @ self.basis.T


def sum_over_chunks(
    x: NDArray, work: Callable[[slice, Array], tuple[Array, ...] | None], width: int = 1
) -> tuple[Array, ...]:
    """One pass over `x` (n, d): the sums of what `work(rows, x[rows])` returns for chunks of rows, if anything.

    `width` is how many numbers the work keeps for each row, if more than d. Chunks fit into the cache, too
    small for products to be split over threads: each thread takes chunks of its own instead.
    """
    step = max(64, _CHUNK_VALUES // max(x.shape[1], width))
    slices = [slice(start, min(start + step, len(x))) for start in range(0, len(x), step)]

    def share(mine: list[slice]) -> list[Array]:
        sums: list[Array] = []
        for rows in mine:
            parts = work(rows, np.asarray(x[rows], np.float64)) or ()
            sums = [total + part for total, part in zip(sums, parts, strict=True)] if sums else list(parts)
        return sums

    num_threads = min(len(slices), max((library.num_threads for library in _BLAS.lib_controllers), default=1))
    with _BLAS.limit(limits=1), ThreadPoolExecutor(num_threads) as pool:
        shares = list(pool.map(share, [slices[i::num_threads] for i in range(num_threads)]))
    return tuple(sum(parts[1:], start=parts[0]) for parts in zip(*shares, strict=True))


def find_subspace(
    x: NDArray, sigma: Array, num_dims: int, rng: np.random.Generator, rows: NDArray[np.int64] | None = None
) -> Subspace:
    """Center and top `num_dims` eigenvectors of Sigma_hat, from some `rows` of `x` (n, d), or all.

    With num_dims >= d the basis is the identity and only the center is estimated.
    """
    num_features = x.shape[1]
    used = np.arange(len(x)) if rows is None else np.sort(rows)
    few = np.sort(used[cleanest(sigma[used], _SUBSAMPLE)])
    part, level = np.asarray(x[few], np.float64), sigma[few]
    center = part.mean(0)
    part -= center
    # Mean variance of the atoms along the subspace's axes.
    signal = max(float((part**2).sum(1).mean() - num_features * (level**2).mean()), 0) / num_dims
    variance = sigma**2 * (sigma**2 + signal) + num_dims / num_features * signal**2
    weights = np.zeros(len(x))
    weights[used] = inverse_weights(variance[used])
    if num_dims >= num_features:
        nothing = np.empty((num_features, 0))
        return Subspace(_apply(x, weights, sigma, center, nothing)[0], np.eye(num_features))
    width = min(-(-(num_dims + 4) // 8) * 8, num_features)  # a few to spare, in the multiples products like
    block = np.linalg.qr(rng.standard_normal((num_features, width)))[0]
    alpha = inverse_weights(variance[few])
    for _ in range(4):
        image = part.T @ (alpha[:, None] * (part @ block)) - (alpha @ level**2) * block
        block = np.linalg.qr(image)[0]
    basis = images = np.empty((num_features, 0))
    for _ in range(_MOST_PASSES):
        center, image = _apply(x, weights, sigma, center, block)
        basis, images = np.hstack([basis, block]), np.hstack([images, image])
        value, vector = np.linalg.eigh(basis.T @ images)
        top, weakest = vector[:, -num_dims:], value[-num_dims]
        moved = images @ top
        residual = np.linalg.norm(moved - basis @ (top * value[-num_dims:]), 2)
        next_value = max(value[-num_dims - 1], 0) if len(value) > num_dims else 0.0
        # residual / weakest is the sine of the angle between these vectors and their images, which are returned
        # and closer to the eigenvectors by the ratio of noise to signal: 0.2 adds a fiftieth to the error.
        if residual < 0.2 * (weakest - next_value) or basis.shape[1] == num_features:
            break
        for _ in range(2):  # twice, because of rounding
            image = np.linalg.qr(image - basis @ (basis.T @ image))[0]
        block = image[:, : num_features - basis.shape[1]]
    return Subspace(center, np.linalg.qr(moved)[0])


def cleanest(sigma: Array, count: int) -> NDArray[np.int64]:
    """Indices of the `count` samples with the least noise (all, if there are fewer), in no order."""
    count = min(count, len(sigma))
    return np.argpartition(sigma, count - 1)[:count]


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
