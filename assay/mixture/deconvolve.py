"""Mixtures under any Gaussian noise: atoms, or components with their own covariance (extreme deconvolution).

X_i ~ sum_j w_j N(m_j, V_j + S_i) with known S_i. V_j = 0 makes component j an atom. In terms of the noise's
precision P_i = S_i^-1, singular where a coordinate was not observed, that of sample i under component j is

    W_ij = (V_j + S_i)^-1 = P_i - P_i F (I + F' P_i F)^-1 F' P_i,   V_j = F F'.

A step of EM takes labels as missing for the means, whose best values are then a regression, and the samples
without noise as missing too for the covariances: with e = x_i - m_j,

    m_j = (sum_i r_ij W_ij)^-1 sum_i r_ij W_ij x_i,   V_j += V_j (sum_i r_ij (W e e' W - W)) V_j / sum_i r_ij.

Steps are extrapolated (SQUAREM) as long as the likelihood rises: alone they are slow where the noise is large.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp, softmax
from sklearn.cluster import KMeans

from assay.mixture.moments import Array
from assay.mixture.noise import Noise

_CHUNK = 8192
_MOST_KEPT = 1 << 24  # numbers of a step that are kept instead of computed twice
_NUM_STARTS = 3
_TRIAL_SAMPLES = 20_000  # on which starts of a climb are compared
_TOLERANCE = 1e-5  # nats per parameter: three steps that gain less are the last


@dataclass(frozen=True)
class Components:
    """Gaussian components, or atoms."""

    weights: Array
    """(k,)"""
    means: Array = field(repr=False)
    """(k, d)"""
    covariances: Array | None = field(default=None, repr=False)
    """(k, d, d); None for atoms, whose covariance is 0."""

    @property
    def num_parameters(self) -> int:
        """Numbers that a fit chooses."""
        k, d = self.means.shape
        return k * (1 + d + (0 if self.covariances is None else d * (d + 1) // 2)) - 1

    def parts(self) -> Iterator[tuple[float, Array, Array | None]]:
        """Weight, mean (d,) and covariance (d, d) of each component."""
        covariances = [None] * len(self.weights) if self.covariances is None else self.covariances
        return zip(self.weights, self.means, covariances, strict=True)


def _weighing(noise: Noise, covariance: Array | None) -> tuple[Array, Array | None, Array]:
    """W_ij for one component: (n, d) eigenvalues, or (n, d, d) matrices, and log det (I + V P_i), (n,).

    Isotropic noise has the eigenvectors of V, returned as (d, d); None means the axes, or matrices.
    """
    if covariance is None:
        precision = noise.precision if noise.precision.ndim == 3 else noise.axis_precision()
        return precision, None, np.zeros(len(noise))
    value, vector = np.linalg.eigh(covariance)
    if noise.precision.ndim == 1:
        inflation = 1 + np.outer(noise.precision, np.maximum(value, 0))
        return noise.precision[:, None] / inflation, vector, np.log(inflation).sum(1)
    root = vector * np.sqrt(np.maximum(value, 0))
    precision = noise.matrices()
    half = (precision.reshape(-1, len(root)) @ root).reshape(precision.shape)  # P F
    across = half.swapaxes(1, 2)
    inverse, log_det = _inverse(np.eye(len(root)) + (across.reshape(-1, len(root)) @ root).reshape(half.shape))
    return precision - half @ inverse @ across, None, log_det


def _inverse(matrices: Array) -> tuple[Array, Array]:
    """Inverses and logarithms of determinants of positive definite `matrices` (n, d, d), by sweeps over d.

    For many small matrices this is several times faster than a call of LAPACK for each.
    """
    a, log_det = matrices, np.zeros(len(matrices))
    for i in range(a.shape[1]):
        pivot, column = a[:, i, i, None].copy(), a[:, :, i].copy()
        log_det += np.log(pivot[:, 0])
        row = a[:, i] / pivot
        a = a - column[:, :, None] * row[:, None]
        a[:, i], a[:, :, i], a[:, i, i] = row, -column / pivot, 1 / pivot[:, 0]
    return a, log_det


def _apply(weighing: Array, basis: Array | None, e: Array) -> Array:
    """W_ij e_i for `e` (n, d): (n, d)."""
    if weighing.ndim == 3:
        return np.asarray(np.einsum("nab,nb->na", weighing, e))
    return weighing * e if basis is None else (weighing * (e @ basis)) @ basis.T


def _weighted_sum(share: Array, weighing: Array, basis: Array | None) -> Array:
    """sum_i r_ij W_ij: (d, d)."""
    if weighing.ndim == 3:
        return np.asarray(np.einsum("n,nab->ab", share, weighing))
    diagonal = share @ weighing
    return np.diag(diagonal) if basis is None else (basis * diagonal) @ basis.T


def log_joint(x: Array, noise: Noise, components: Components, weighings: list | None = None) -> Array:
    """log w_j N(x_i; m_j, V_j + S_i): (n, k). `weighings` are those of `_weighing`, if they are known."""
    columns = []
    for j, (weight, mean, covariance) in enumerate(components.parts()):
        weighing, basis, log_det = weighings[j] if weighings else _weighing(noise, covariance)
        e = x - mean
        square = (e * _apply(weighing, basis, e)).sum(1)
        columns.append(np.log(max(weight, 1e-300)) + noise.constant - 0.5 * (square + log_det))
    return np.stack(columns, axis=1)


def posterior_means(x: Array, noise: Noise, components: Components) -> Array:
    """E[Y_i | X_i]: (n, d)."""
    share = softmax(log_joint(x, noise, components), axis=1)
    total = share @ components.means
    for j, (_, mean, covariance) in enumerate(components.parts()):
        if covariance is not None:
            weighing, basis, _ = _weighing(noise, covariance)
            total += share[:, j, None] * (_apply(weighing, basis, x - mean) @ covariance)
    return total


def _step(x: Array, noise: Noise, now: Components) -> tuple[Components, float]:
    """One step of EM, and the log-likelihood before it."""
    k, d = now.means.shape
    weighing_sum, target = np.zeros((k, d, d)), np.zeros((k, d))
    shares, log_likelihood = np.empty((len(x), k)), 0.0
    slices = [slice(start, start + _CHUNK) for start in range(0, len(x), _CHUNK)]
    kept = []  # for the second half of the step, if there is room
    for rows in slices:
        weighings = [_weighing(noise[rows], covariance) for _, _, covariance in now.parts()]
        kept.append(weighings if len(x) * k * d * d <= _MOST_KEPT else None)
        joint = log_joint(x[rows], noise[rows], now, weighings)
        total = logsumexp(joint, axis=1)
        log_likelihood += float(total.sum())
        shares[rows] = np.exp(joint - total[:, None])
        for j, (weighing, basis, _) in enumerate(weighings):
            weighing_sum[j] += _weighted_sum(shares[rows, j], weighing, basis)
            target[j] += shares[rows, j] @ _apply(weighing, basis, x[rows])
    mass = shares.sum(0)
    # Coordinates that no sample of a component has observed stay where they are.
    ridge = 1e-12 * np.trace(weighing_sum, axis1=1, axis2=2)[:, None, None] * np.eye(d) + 1e-300 * np.eye(d)
    means = np.linalg.solve(weighing_sum + ridge, (target + (ridge @ now.means[..., None])[..., 0])[..., None])[
        ..., 0
    ]
    if now.covariances is None:
        return Components(mass / len(x), means), log_likelihood
    covariances = now.covariances.copy()
    for j, covariance in enumerate(now.covariances):
        outer = -weighing_sum[j]
        for rows, known in zip(slices, kept, strict=True):
            weighing, basis, _ = known[j] if known else _weighing(noise[rows], covariance)
            pulled = _apply(weighing, basis, x[rows] - means[j])
            outer = outer + (shares[rows, j, None] * pulled).T @ pulled
        covariances[j] += covariance @ outer @ covariance / max(mass[j], 1e-300)
    return Components(mass / len(x), means, _symmetric(covariances)), log_likelihood


def _symmetric(covariances: Array) -> Array:
    return (covariances + covariances.swapaxes(1, 2)) / 2


def deconvolve(x: Array, noise: Noise, start: Components, max_steps: int = 3000) -> tuple[Components, float]:
    """Climb the likelihood of samples `x` (n, d) from `start`: the components, and their log-likelihood.

    Leaps that end below the step before them are not taken, and every one is followed by a step of EM.
    """
    now = start
    for _ in range(max_steps // 3):
        first, before = _step(x, noise, now)
        second, between = _step(x, noise, first)
        leap = _extrapolate(now, first, second)
        now, after = _step(x, noise, leap) if leap is not None else (second, -np.inf)
        if after < between:
            now, after = _step(x, noise, second)
        if after - before < _TOLERANCE * start.num_parameters:
            break
    return now, _step(x, noise, now)[1]


def _extrapolate(zero: Components, one: Components, two: Components) -> Components | None:
    """SQUAREM's leap along two steps of EM, if it leads to a mixture."""
    points = [
        np.concatenate([np.log(np.maximum(w, 1e-300)), m.ravel(), np.empty(0) if v is None else v.ravel()])
        for w, m, v in ((p.weights, p.means, p.covariances) for p in (zero, one, two))
    ]
    change = points[1] - points[0]
    bend = points[2] - points[1] - change
    length = np.linalg.norm(bend)
    if length == 0:
        return None
    step = max(1.0, float(np.linalg.norm(change) / length))
    leap = points[0] + 2 * step * change + step**2 * bend
    k, d = zero.means.shape
    weights, means = softmax(leap[:k]), leap[k : k * (1 + d)].reshape(k, d)
    if two.covariances is None:
        return Components(weights, means)
    covariances = _symmetric(leap[k * (1 + d) :].reshape(k, d, d))
    value, vector = np.linalg.eigh(covariances)
    # A leap past 0 is cut to a hundredth of where the step before stood, from which it can return.
    least = 0.01 * np.linalg.eigvalsh(two.covariances)
    covariances = (vector * np.maximum(value, np.maximum(least, 0))[:, None]) @ vector.swapaxes(1, 2)
    return Components(weights, means, covariances)


def fit_components(x: Array, noise: Noise, k: int, spread: bool, rng: np.random.Generator) -> Components:
    """The best of a few climbs of the likelihood from k-means; components have covariances if `spread`."""
    starts = [_start(x, noise, k, spread, int(rng.integers(2**31))) for _ in range(_NUM_STARTS)]
    few = rng.permutation(len(x))[:_TRIAL_SAMPLES]
    trials = [deconvolve(x[few], noise[few], start, 12) for start in starts]
    return deconvolve(x, noise, max(trials, key=lambda trial: trial[1])[0])[0]


def _start(x: Array, noise: Noise, k: int, spread: bool, seed: int) -> Components:
    """k-means of the cleanest samples, of those without a gap if there are enough."""
    precision = noise.axis_precision()
    mean = (precision * x).sum(0) / np.maximum(precision.sum(0), np.finfo(float).tiny)
    filled = np.where(precision > 0, x, mean)
    clean = filled[np.argsort(-precision.min(1), kind="stable")[: max(1000 * k, len(x) // 10)]]
    clusters = KMeans(min(k, len(clean)), n_init=1, random_state=seed).fit(clean)
    counts = np.maximum(np.bincount(clusters.labels_, minlength=clusters.n_clusters), 1)
    if not spread:
        return Components(counts / counts.sum(), clusters.cluster_centers_)
    d, total = x.shape[1], np.diag(clean.var(0) + 1e-12)
    groups = [clean[clusters.labels_ == j] for j in range(clusters.n_clusters)]
    own = [(np.cov(mine.T, bias=True) if len(mine) > d else total).reshape(d, d) for mine in groups]
    # Half of it may be noise; along no axis does a component start as an atom.
    return Components(counts / counts.sum(), clusters.cluster_centers_, np.array(own) / 2 + 0.05 * total)


def scores(x: Array, noise: Noise, components: Components) -> Array:
    """Derivatives of each sample's log-likelihood: (n, k (d + 1)), for each component its mean and log weight.

    Components with a covariance add k d (d + 1) / 2 columns for its entries.
    """
    d = x.shape[1]
    share = softmax(log_joint(x, noise, components), axis=1)
    columns: list[NDArray] = []
    spreads: list[NDArray] = []
    for j, (weight, mean, covariance) in enumerate(components.parts()):
        weighing, basis, _ = _weighing(noise, covariance)
        pulled = _apply(weighing, basis, x - mean)
        columns.append(np.concatenate([share[:, j, None] * pulled, share[:, j, None] - weight], 1))
        if covariance is not None:
            matrix = weighing if basis is None else np.einsum("ab,nb,cb->nac", basis, weighing, basis)
            full = 0.5 * share[:, j, None, None] * (pulled[:, :, None] * pulled[:, None] - matrix)
            above, below = np.triu_indices(d)
            spreads.append(full[:, above, below] * (2 - (above == below)))
    return np.concatenate([*columns, *spreads], axis=1)


def standard_errors(x: Array, noise: Noise, components: Components) -> tuple[Array, Array]:
    """Standard errors of the means (k, d) and of the weights (k,), from the information in the scores."""
    k, d = components.means.shape
    information = np.zeros((1, 1))
    for start in range(0, len(x), _CHUNK):
        rows = slice(start, start + _CHUNK)
        part = scores(x[rows], noise[rows], components)
        information = information + part.T @ part
    # Only differences of the weights' logarithms matter: the pseudo-inverse leaves their sum out.
    scale = np.sqrt(np.maximum(np.diag(information), 1e-300))
    covariance = np.linalg.pinv(information / np.outer(scale, scale), rcond=1e-12, hermitian=True)
    covariance /= np.outer(scale, scale)
    block = np.arange(k * (d + 1)).reshape(k, d + 1)
    slope = np.diag(components.weights) - np.outer(components.weights, components.weights)
    logs = covariance[np.ix_(block[:, -1], block[:, -1])]
    # Nothing is known of a coordinate of a mean that no sample has observed.
    variance = np.where(np.diag(information) > 0, np.diag(covariance), np.inf)[block[:, :-1]]
    return np.sqrt(variance), np.sqrt(np.maximum(np.diag(slope @ logs @ slope), 0))
