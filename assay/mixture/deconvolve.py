"""Components with a covariance of their own, under any Gaussian noise (extreme deconvolution).

X_i ~ sum_j w_j N(m_j, V_j + S_i) with known S_i. In terms of the noise's precision P_i = S_i^-1, singular where
a coordinate was not observed, that of sample i under component j is

    W_ij = (V_j + S_i)^-1 = P_i - P_i F (I + F' P_i F)^-1 F' P_i,   V_j = F F'.

A step of EM takes labels as missing for the means, whose best values are then a regression, and the samples
without noise as missing too for the covariances: with e = x_i - m_j,

    m_j = (sum_i r_ij W_ij)^-1 sum_i r_ij W_ij x_i,   V_j += V_j (sum_i r_ij (W e e' W - W)) V_j / sum_i r_ij.

Steps are extrapolated (SQUAREM) as long as the likelihood rises: alone they are slow where the noise is large.
"""

import numpy as np
from scipy.special import logsumexp, softmax

from assay.mixture.likelihood import cluster_starts
from assay.mixture.moments import Array, Atoms
from assay.mixture.noise import Noise

_CHUNK = 8192
_NUM_STARTS = 3
_TRIAL_SAMPLES = 20_000  # on which starts of a climb are compared
_TOLERANCE = 1e-5  # nats per parameter: three steps that gain less are the last


def _spreads(mixture: Atoms) -> Array:
    """The covariance of each component, (k, d, d)."""
    assert mixture.covariances is not None  # atoms are climbed by `assay.mixture.likelihood`
    return mixture.covariances


def _weighing(noise: Noise, covariance: Array) -> tuple[Array, Array]:
    """W_ij for one component, (n, d, d), and log det (I + V P_i), (n,)."""
    precision = noise.matrices()
    value, vector = np.linalg.eigh(covariance)
    root = vector * np.sqrt(np.maximum(value, 0))
    half = (precision.reshape(-1, len(root)) @ root).reshape(precision.shape)  # P F
    across = half.swapaxes(1, 2)
    inverse, log_det = _inverse(np.eye(len(root)) + (across.reshape(-1, len(root)) @ root).reshape(half.shape))
    return precision - half @ inverse @ across, log_det


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


def _apply(weighing: Array, e: Array) -> Array:
    """W_ij e_i for `e` (n, d): (n, d)."""
    return np.asarray(np.einsum("nab,nb->na", weighing, e))


def log_joint(x: Array, noise: Noise, mixture: Atoms, weighings: list | None = None) -> Array:
    """log w_j N(x_i; m_j, V_j + S_i): (n, k). `weighings` are those of `_weighing`, if they are known."""
    log_weights = np.log(np.maximum(mixture.weights, 1e-300)) + noise.constant[:, None]
    if mixture.covariances is None:
        center = mixture.weights @ mixture.atoms
        return noise.features(x - center) @ noise.places(mixture.atoms - center).T + log_weights
    squares, each = [], weighings or (_weighing(noise, covariance) for covariance in mixture.covariances)
    for mean, (weighing, log_det) in zip(mixture.atoms, each, strict=True):
        squares.append(((x - mean) * _apply(weighing, x - mean)).sum(1) + log_det)
    return log_weights - 0.5 * np.stack(squares, axis=1)


def posterior_means(x: Array, noise: Noise, mixture: Atoms) -> Array:
    """E[Y_i | X_i]: (n, d)."""
    share = softmax(log_joint(x, noise, mixture), axis=1)
    total = share @ mixture.atoms
    for j, covariance in enumerate(() if mixture.covariances is None else mixture.covariances):
        pulled = _apply(_weighing(noise, covariance)[0], x - mixture.atoms[j])
        total += share[:, j, None] * (pulled @ covariance)
    return total


def _step(x: Array, noise: Noise, now: Atoms) -> tuple[Atoms, float]:
    """One step of EM for components with covariances, and the log-likelihood before it."""
    means, covariances = now.atoms.copy(), _spreads(now).copy()
    weighings = [_weighing(noise, covariance) for covariance in covariances]
    joint = log_joint(x, noise, now, weighings)
    total = logsumexp(joint, axis=1)
    shares = np.exp(joint - total[:, None])
    mass = shares.sum(0)
    for j, (share, (weighing, _)) in enumerate(zip(shares.T, weighings, strict=True)):
        weight = np.tensordot(share, weighing, 1)
        # Coordinates that no sample of a component has observed stay where they are.
        ridge = (1e-12 * np.trace(weight) + 1e-300) * np.eye(len(weight))
        target = share @ _apply(weighing, x) + ridge @ means[j]
        means[j] = np.linalg.solve(weight + ridge, target)
        pulled = _apply(weighing, x - means[j])
        outer = (share[:, None] * pulled).T @ pulled - weight
        covariances[j] += covariances[j] @ outer @ covariances[j] / max(mass[j], 1e-300)
    return Atoms(means, mass / len(x), _symmetric(covariances)), float(total.sum())


def _symmetric(covariances: Array) -> Array:
    return (covariances + covariances.swapaxes(1, 2)) / 2


def deconvolve(x: Array, noise: Noise, start: Atoms, max_steps: int = 3000) -> tuple[Atoms, float]:
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


def _extrapolate(zero: Atoms, one: Atoms, two: Atoms) -> Atoms | None:
    """SQUAREM's leap along two steps of EM, if it leads anywhere."""
    points = [
        np.concatenate([np.log(np.maximum(p.weights, 1e-300)), p.atoms.ravel(), _spreads(p).ravel()])
        for p in (zero, one, two)
    ]
    change = points[1] - points[0]
    bend = points[2] - points[1] - change
    length = np.linalg.norm(bend)
    if length == 0:
        return None
    step = max(1.0, float(np.linalg.norm(change) / length))
    leap = points[0] + 2 * step * change + step**2 * bend
    k, d = zero.atoms.shape
    weights, means, covariances = np.split(leap, [k, k * (1 + d)])
    value, vector = np.linalg.eigh(_symmetric(covariances.reshape(k, d, d)))
    # A leap past 0 is cut to a hundredth of where the step before stood, from which it can return.
    least = 0.01 * np.linalg.eigvalsh(_spreads(two))
    covariances = (vector * np.maximum(value, np.maximum(least, 0))[:, None]) @ vector.swapaxes(1, 2)
    return Atoms(means.reshape(k, d), softmax(weights), covariances)


def fit_components(x: Array, noise: Noise, k: int, rng: np.random.Generator) -> Atoms:
    """The best of a few climbs of the likelihood from k-means."""
    starts = cluster_starts(x, noise, k, rng, _NUM_STARTS, spread=True)
    few = rng.permutation(len(x))[:_TRIAL_SAMPLES]
    trials = [deconvolve(x[few], noise[few], start, 12) for start in starts]
    return deconvolve(x, noise, max(trials, key=lambda trial: trial[1])[0])[0]


def scores(x: Array, noise: Noise, mixture: Atoms) -> Array:
    """Derivatives of each sample's log-likelihood: (n, k (d + 1)), for each component its mean and log weight.

    Components with a covariance add k d (d + 1) / 2 columns for its entries.
    """
    share = softmax(log_joint(x, noise, mixture), axis=1)
    resp = share.T[..., None]
    if mixture.covariances is None:
        pulled, spreads = noise.features(x) @ noise.slopes(mixture.atoms), np.empty((len(x), 0))
    else:
        weighings = np.stack([_weighing(noise, covariance)[0] for covariance in mixture.covariances])
        pulled = np.stack([_apply(w, x - mean) for w, mean in zip(weighings, mixture.atoms, strict=True)])
        above, below = np.triu_indices(x.shape[1])
        slopes = pulled[..., above] * pulled[..., below] - weighings[..., above, below]
        spreads = (resp * slopes * (1 - 0.5 * (above == below))).swapaxes(0, 1).reshape(len(x), -1)
    means = np.concatenate([resp * pulled, (share - mixture.weights).T[..., None]], axis=2)
    return np.concatenate([means.swapaxes(0, 1).reshape(len(x), -1), spreads], axis=1)


def standard_errors(x: Array, noise: Noise, mixture: Atoms) -> tuple[Array, Array]:
    """Standard errors of the means (k, d) and of the weights (k,), from the information in the scores."""
    k, d = mixture.atoms.shape
    chunks = [slice(start, start + _CHUNK) for start in range(0, len(x), _CHUNK)]
    parts = (scores(x[rows], noise[rows], mixture) for rows in chunks)
    information = sum(part.T @ part for part in parts)
    # Only differences of the weights' logarithms matter: the pseudo-inverse leaves their sum out.
    scale = np.sqrt(np.maximum(np.diag(information), 1e-300))
    covariance = np.linalg.pinv(information / np.outer(scale, scale), rcond=1e-12, hermitian=True)
    covariance /= np.outer(scale, scale)
    block = np.arange(k * (d + 1)).reshape(k, d + 1)
    slope = np.diag(mixture.weights) - np.outer(mixture.weights, mixture.weights)
    logs = covariance[np.ix_(block[:, -1], block[:, -1])]
    # Nothing is known of a coordinate of a mean that no sample has observed.
    variance = np.where(np.diag(information) > 0, np.diag(covariance), np.inf)[block[:, :-1]]
    return np.sqrt(variance), np.sqrt(np.maximum(np.diag(slope @ logs @ slope), 0))
