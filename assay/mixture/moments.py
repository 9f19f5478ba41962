"""Denoised moments, the moment space, and Gauss quadrature: from noisy samples on a line to atoms.

If X = Y + sigma g with g standard normal, the scaled Hermite polynomial gamma_r sees through the noise,

    E[gamma_r(X; sigma)] = E[Y^r],  gamma_0 = 1,  gamma_1 = x,  gamma_{r+1} = x gamma_r - r sigma^2 gamma_{r-1},

and alpha_i proportional to sigma_i^-(4k-2) weighs samples of unequal noise (Algorithm "Denoised Method of
Moments"). Estimated moments are moved to the nearest vector of moments of a distribution on [a, b]
(`project_moments`) and turned into at most k atoms that have them (`quadrature`).
"""

import math
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
_CHUNK = 2048  # samples at a time: the features of a chunk stay in the cache


@dataclass(frozen=True)
class Atoms:
    """A discrete distribution."""

    atoms: Array
    """(k,) or (k, d)."""
    weights: Array
    """(k,), with sum 1."""


def inverse_weights(variance: Array) -> Array:
    """alpha_i proportional to 1 / variance_i, with sum 1: (n,) -> (n,); zero variances share all the weight."""
    least = variance.min()
    alpha = least / variance if least > 0 else (variance == 0).astype(np.float64)
    return alpha / alpha.sum()


def moment_weights(sigma: Array, k: int, radius: float, caution: float = 1.0) -> Array:
    """Weights (n,) of samples in the moments 1 .. 2k - 1 of atoms within `radius`.

    The inverse of the variance of the highest, `hermite_variance`: the paper's sigma^-(4k-2) far above the
    radius; far below it equal weights, since there the spread of the atoms limits the variance. Errors from
    which atoms were drawn only move the estimated weights, those from the noise move the atoms: `caution` >= 1
    multiplies the noise's part of the variance.
    """
    spread = radius ** (4 * k - 2)
    return inverse_weights(spread + caution * (hermite_variance(2 * k - 1, sigma**2, radius) - spread))


def hermite(x: Array, variance: Array, order: int) -> Array:
    """gamma_0 .. gamma_order of `x` (..., n) at noise `variance` (n,): (order + 1, ..., n)."""
    values = np.ones((order + 1, *x.shape))
    values[1:2] = x
    for r in range(1, order):
        np.multiply(x, values[r], out=values[r + 1])
        values[r + 1] -= (r * variance) * values[r - 1]
    return values


def hermite_variance(order: int, variance: Array, radius: float) -> Array:
    """E[gamma_r(mu + sigma g)^2] for r = order, at mu = radius and noise `variance` (n,): (n,).

    It bounds Var gamma_r(X; sigma) for atoms within `radius`, the exact form of Lemma "var_mom":

        sum_j binom(r, j)^2 j! sigma^(2j) radius^(2(r-j)).
    """
    each = range(order + 1)
    terms = [math.comb(order, j) ** 2 * math.factorial(j) * radius ** (2 * (order - j)) for j in each]
    return np.asarray(np.polynomial.polynomial.polyval(variance, terms))


def denoised_moments(
    x: ArrayLike, sigma: ArrayLike, order: int, weights: ArrayLike = 1.0, directions: Array | None = None
) -> Array:
    """Moments 0 .. order of the distribution behind noisy `x` (n,) or (n, d), column by column, in one pass.

    `sigma` and `weights` are (n,) or a number each; weights need no normalisation. With unit vectors
    `directions` (G, d), the moments are those of <x, v>: noise is the same along all directions.
    """
    x, sums = np.asarray(x), np.zeros(1)
    levels, masses = (np.broadcast_to(np.asarray(values), x.shape[:1]) for values in (sigma, weights))
    for start in range(0, len(x), _CHUNK):
        rows = slice(start, start + _CHUNK)
        columns, level, mass = (np.asarray(values[rows], np.float64).T for values in (x, levels, masses))
        columns = columns if directions is None else directions @ columns
        sums = sums + hermite(columns, level**2, order) @ mass
    return np.asarray(sums / sums[0])


@cache
def moment_constraints(order: int, interval: tuple[float, float]) -> list[Array]:
    """(MOM-CHAR): m_1 .. m_order are moments of a distribution on [a, b] iff each sum_r m_r C[r] >= 0, m_0 = 1.

    Returns the two stacks C of symmetric matrices, (order + 1, q, q). In terms of E, the expectation under m,
    they are E[p p'] and E[(b - x)(x - a) q q'] for even order, and E[(b - x) p p'] and E[(x - a) p p'] for odd
    order (the printed right-hand constraint lacks the factor a). p are Legendre polynomials of [a, b] rather
    than powers: a congruence that leaves the cone as it is and the matrices well conditioned.
    """
    a, b = interval
    factors = [[1.0], [-a * b, a + b, -1.0]] if order % 2 == 0 else [[b, -1.0], [-a, 1.0]]
    stacks = []
    for factor in factors:
        size = (order - (len(factor) - 1)) // 2 + 1
        basis = _legendre(size, interval)
        stack = np.zeros((order + 1, size, size))
        for i, j in product(range(size), range(size)):
            for r, coefficient in enumerate(factor):
                stack[i + j + r, i, j] += coefficient
        stacks.append(basis @ stack @ basis.T)
    return stacks


@cache
def _legendre(size: int, interval: tuple[float, float]) -> Array:
    """Coefficients (size, size) of Legendre polynomials, orthonormal under the uniform law on [a, b]."""
    a, b = interval
    shift = np.polynomial.Polynomial([-(a + b) / (b - a), 2 / (b - a)])
    rows = np.zeros((size, size))
    for i in range(size):
        series = np.polynomial.Legendre.basis(i).convert(kind=np.polynomial.Polynomial)(shift)
        rows[i, : i + 1] = series.coef * np.sqrt(2 * i + 1)
    return rows


def project_moments(moments: ArrayLike, interval: tuple[float, float] = (-1.0, 1.0)) -> Array:
    """The nearest moments of a distribution on [a, b], in Euclidean norm; a batch (..., order) at once.

    `moments` are m_1, .., m_order. Valid ones come back unchanged; the others are projected by an
    interior-point method (log-determinant barrier, damped Newton steps, all problems of the batch together).
    """
    target = np.asarray(moments, np.float64)
    order = target.shape[-1]
    stacks = moment_constraints(order, interval)
    flat = target.reshape(-1, order).copy()
    valid = _margin(flat, stacks) >= -1e-12  # on the boundary (fewer atoms) rounding must not matter
    if not valid.all():
        flat[~valid] = _barrier_projection(flat[~valid], stacks, interval)
    return flat.reshape(target.shape)


def _combine(moments: Array, stack: Array) -> Array:
    """C[0] + sum_r m_r C[r] for a batch (B, order): (B, q, q)."""
    return stack[0] + np.tensordot(moments, stack[1:], 1)


def _margin(moments: Array, stacks: list[Array]) -> Array:
    """The smallest eigenvalue of the constraints, (B,): negative outside the moment space."""
    return np.min([np.linalg.eigvalsh(_combine(moments, stack))[:, 0] for stack in stacks], axis=0)


def _barrier_projection(target: Array, stacks: list[Array], interval: tuple[float, float]) -> Array:
    """Minimise |m - target|^2 / 2 - mu sum_s log det F_s(m), for mu falling to the precision of the answer."""
    a, b = interval
    order = target.shape[1]
    powers = np.arange(1, order + 1)
    # Moments of the uniform law, well inside the cone; lengths in units of the interval's largest power.
    moments = np.tile((b ** (powers + 1) - a ** (powers + 1)) / ((powers + 1) * (b - a)), (len(target), 1))
    scale = np.maximum(np.linalg.norm(moments - target, axis=1) ** 2, 1e-300)
    before, barrier, active = moments, 1.0, np.ones(len(target), bool)
    while barrier > 1e-12:
        barrier *= 0.04
        mu = barrier * scale
        for _ in range(30):
            gradient, hessian, ratios = moments - target, np.tile(np.eye(order), (len(target), 1, 1)), []
            for stack in stacks:
                eigenvalue, vector = np.linalg.eigh(_combine(moments, stack))
                active &= eigenvalue[:, 0] > 1e-15  # rounding ends the path of a problem, at its precision
                scaled = vector / np.sqrt(np.maximum(eigenvalue, 1e-15))[:, None]
                ratio = scaled.swapaxes(-1, -2)[:, None] @ stack[1:] @ scaled[:, None]  # F^-1/2 C_r F^-1/2
                flat = ratio.reshape(len(target), order, -1)
                gradient = gradient - mu[:, None] * np.trace(ratio, axis1=-2, axis2=-1)
                hessian += mu[:, None, None] * (flat @ flat.swapaxes(-1, -2))
                ratios.append(ratio)
            step = -np.linalg.solve(hessian, gradient[..., None])[..., 0]
            decrement = np.sqrt(np.maximum(-(gradient * step).sum(1), 0) / mu)
            # At most nine tenths of the way to where a constraint would become singular.
            change = [np.linalg.eigvalsh((step[:, :, None, None] * ratio).sum(1))[:, 0] for ratio in ratios]
            moved = moments + step / np.maximum(1, -np.min(change, axis=0) / 0.9)[:, None]
            before = np.where(active[:, None], moments, before)
            moments = np.where(active[:, None], moved, before)
            if not (active & (decrement >= 1)).any():
                break
    inside = _margin(moments, stacks) > 0
    return np.where(inside[:, None], moments, before)


def quadrature(moments: ArrayLike, interval: tuple[float, float] = (-1.0, 1.0)) -> tuple[Array, Array]:
    """Atoms (..., k) and weights (..., k) with the given moments m_1 .. m_{2k-1}, a batch at once.

    Multiplication by x, written in a basis that is orthonormal under m, is the Jacobi matrix: its eigenvalues
    are the atoms, the squared first components of its eigenvectors the weights. If k' < k atoms suffice the
    Hankel matrix has rank k' and the other weights are 0. Atoms are kept in [a, b].
    """
    values = np.asarray(moments, np.float64)
    order = values.shape[-1]
    k = (order + 1) // 2
    basis = _legendre(k, interval)
    extended = np.concatenate([np.ones((*values.shape[:-1], 1)), values], axis=-1)
    rows = np.arange(k)[:, None] + np.arange(k)
    gram = basis @ extended[..., rows] @ basis.T  # E[p p']
    shifted = basis @ extended[..., rows + 1] @ basis.T  # E[x p p']
    eigenvalue, vector = np.linalg.eigh((gram + gram.swapaxes(-1, -2)) / 2)
    kept = eigenvalue > 1e-12 * eigenvalue[..., -1:]
    whitening = vector * np.where(kept, 1 / np.sqrt(np.where(kept, eigenvalue, 1)), 0)[..., None, :]
    jacobi = whitening.swapaxes(-1, -2) @ shifted @ whitening
    first = (whitening.swapaxes(-1, -2) @ gram[..., :1])[..., 0]  # the constant 1 in the orthonormal basis
    atoms, rotation = np.linalg.eigh((jacobi + jacobi.swapaxes(-1, -2)) / 2)
    weights = (rotation.swapaxes(-1, -2) @ first[..., None])[..., 0] ** 2
    return np.clip(atoms, *interval), weights / weights.sum(-1, keepdims=True)
