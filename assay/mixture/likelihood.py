"""A local maximum of the likelihood of atoms, and what a fitted mixture says of samples.

    L(atoms, weights) = sum_i log sum_j w_j N(x_i; mu_j, sigma_i^2 I).

With the precision p_i = sigma_i^-2, log N(x_i; mu, sigma_i^2 I) is a constant plus the product

    [-p_i |x_i|^2 / 2, p_i x_i, -p_i / 2] . [1, mu, |mu|^2],

so that the log-densities of many samples at many places are one product of matrices.

EM crawls when atoms overlap. `polish` climbs by Newton's method in the atoms' subspace; the information is the
complete one minus the variance of the complete score over the labels (Louis' formula). `polish_in_space` then
moves the atoms off it, where the samples are noise, the information is R' P R for responsibilities R and
P = diag(p), and the step is a weighted regression of the samples on their responsibilities. No step lowers L.
The last one is EM's, whose atoms are averages of samples: no fit leaves the range of its data.
"""

import math
import warnings
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning

from assay.mixture.moments import Array, Atoms
from assay.mixture.subspace import Subspace, sum_over_chunks

# A step is the last when it gains less than this, in nats per parameter: a tenth of a standard error.
_TOLERANCE = 0.01
_DAMPING = 1e-3  # of steps off the subspace, in units of the complete information


def sample_vectors(x: Array, sigma: Array) -> Array:
    """The vectors of samples `x` (n, d) with noise `sigma` (n,) > 0 in the product above: (n, d + 2)."""
    precision = sigma[:, None] ** -2.0
    linear = precision * x
    return np.concatenate([-0.5 * (x * linear).sum(1)[:, None], linear, -0.5 * precision], axis=1)


def place_vectors(mu: Array) -> Array:
    """The vectors of places `mu` (m, d) in the product above: (m, d + 2)."""
    return np.concatenate([np.ones((len(mu), 1)), mu, (mu**2).sum(1)[:, None]], axis=1)


def log_constant(sigma: Array, num_features: int) -> Array:
    """The constant of the log-densities: (n,)."""
    return -num_features * (np.log(sigma) + 0.5 * math.log(2 * math.pi))


def responsibilities(vectors: Array, places: Array, weights: Array) -> tuple[Array, Array]:
    """R (k, c), the posterior of each atom, and log sum_j w_j exp(place_j . vector_i), (c,)."""
    logits = places @ vectors.T
    logits += np.log(np.maximum(weights, 1e-300))[:, None]
    peak = logits.max(0)
    logits -= peak
    np.exp(logits, out=logits)
    total = logits.sum(0)
    logits /= total
    return logits, np.log(total) + peak


def posterior(x: NDArray, sigma: Array, mixture: Atoms) -> tuple[Array, Array]:
    """Probability of each atom given each sample (n, k), and the log-density of the samples (n,), in nats."""
    center = mixture.weights @ mixture.atoms
    places = place_vectors(mixture.atoms - center)
    shares, log_density = np.empty((len(x), len(places))), log_constant(sigma, x.shape[1])

    def work(rows: slice, part: Array) -> None:
        resp, height = responsibilities(sample_vectors(part - center, sigma[rows]), places, mixture.weights)
        shares[rows] = resp.T
        log_density[rows] += height

    sum_over_chunks(x, work, len(places))
    return shares, log_density


def log_likelihood(x: NDArray, sigma: Array, guess: Atoms) -> float:
    """L of samples `x` (n, d), in nats."""
    return float(posterior(x, sigma, guess)[1].sum())


def standard_errors(x: NDArray, sigma: Array, mixture: Atoms) -> tuple[Array, Array]:
    """Standard errors of the atoms (k, d) and of the weights (k,), from the information in the scores."""
    k, d = mixture.atoms.shape
    shares = posterior(x, sigma, mixture)[0]

    def work(rows: slice, part: Array) -> tuple[Array, ...]:
        share = shares[rows, :, None]
        pulled = share * (part[:, None] - mixture.atoms) / (sigma[rows] ** 2)[:, None, None]
        scores = np.concatenate([pulled, share - mixture.weights[:, None]], axis=2).reshape(len(part), -1)
        return (scores.T @ scores,)

    (information,) = sum_over_chunks(x, work, k * (d + 1))
    # Only differences of the weights' logarithms matter: the pseudo-inverse leaves their sum out.
    scale = np.sqrt(np.maximum(np.diag(information), 1e-300))
    covariance = np.linalg.pinv(information / np.outer(scale, scale), rcond=1e-12, hermitian=True)
    covariance /= np.outer(scale, scale)
    block = np.arange(k * (d + 1)).reshape(k, d + 1)
    slope = np.diag(mixture.weights) - np.outer(mixture.weights, mixture.weights)
    logs = covariance[np.ix_(block[:, -1], block[:, -1])]
    variance = np.where(np.diag(information) > 0, np.diag(covariance), np.inf)[block[:, :-1]]
    return np.sqrt(variance), np.sqrt(np.maximum(np.diag(slope @ logs @ slope), 0))


@dataclass(frozen=True)
class Pass:
    """What one pass over the samples gathers at (atoms, weights)."""

    guess: Atoms
    log_likelihood: float
    score: Array
    """(k, d + 1): derivative with respect to each atom and to its weight's logarithm."""
    complete: Array
    """(k, d + 1): the diagonal of the complete information, the metric of all steps; (k, 1) in space."""
    observed: Array
    """The observed information in this metric: (k (d + 1), k (d + 1)), or (k, k) in space."""
    em: Atoms
    """The next step of EM."""


def _gather(x: Array, sigma: Array, guess: Atoms) -> Pass:
    k, d = guess.atoms.shape
    size, each = d + 1, np.arange(k)
    places = place_vectors(guess.atoms)

    def work(rows: slice, part: Array) -> tuple[Array, ...]:
        vectors = sample_vectors(part, sigma[rows])
        resp, height = responsibilities(vectors, places, guess.weights)
        precision = -2 * vectors[:, -1]
        slope = np.ones((k, size, len(part)))  # complete score of each atom, and of its weight
        slope[:, :d] = vectors[:, 1:-1].T - guess.atoms[:, :, None] * precision
        scaled = slope * resp[:, None]
        flat = scaled.reshape(k * size, -1)
        return flat @ flat.T, scaled @ slope.swapaxes(1, 2), scaled.sum(2), resp @ precision, height.sum()

    outer, block, score, mass, height = sum_over_chunks(x, work, 3 * k * size)
    weights = score[:, -1] / len(x)
    score[:, -1] -= len(x) * guess.weights
    # Only differences of the weights' logarithms matter: n w w', which leaves steps with sum_j w_j step_j = 0,
    # is added to both informations and makes them regular.
    complete = np.column_stack([*[mass] * d, len(x) * guess.weights])
    complete = np.maximum(complete, 1e-12 * complete.max(0) + 1e-300)
    observed = outer.reshape(k, size, k, size)
    observed[each, :, each, :] += complete[..., None] * np.eye(size) - block
    root = np.sqrt(complete.ravel())
    observed = observed.reshape(outer.shape) / np.outer(root, root)
    # However little an atom weighs, EM moves it to an average of samples.
    em = Atoms(guess.atoms + score[:, :d] / (mass[:, None] + 1e-300), weights / weights.sum())
    height += log_constant(sigma, d).sum()
    return Pass(guess, float(height), score, complete, observed, em)


def _move(guess: Atoms, step: Array) -> Atoms:
    """Add `step` (k, d + 1) to the atoms and to the logarithms of the weights."""
    weights = guess.weights * np.exp(np.clip(step[:, -1], -3, 3))
    return Atoms(guess.atoms + step[:, :-1], weights / weights.sum())


def polish(x: Array, sigma: Array, start: Atoms, max_passes: int = 100) -> Atoms:
    """Climb the likelihood of samples `x` (n, d), centred, from `start` by Newton's method.

    The metric is EM's. Directions in which the likelihood is not concave are climbed by the size of their
    curvature, and all steps are damped until they improve the likelihood: at the limit they are EM's.
    """
    here, damping = _gather(x, sigma, start), 0.01
    for _ in range(max_passes):
        curvature, vector = np.linalg.eigh(here.observed)
        root = np.sqrt(here.complete.ravel())
        slope = vector.T @ (here.score.ravel() / root)
        # What Newton's step would gain is all there is.
        small = float((slope**2 / np.maximum(np.abs(curvature), 1e-6)).sum()) < _TOLERANCE * len(slope)
        step = (vector @ (slope / (np.abs(curvature) + damping)) / root).reshape(here.score.shape)
        there = _gather(x, sigma, _move(here.guess, step))
        if there.log_likelihood >= here.log_likelihood:
            here, damping = there, damping / 8
        else:
            damping = max(4 * damping, 1e-4)
        if (small and curvature[0] > 0) or damping > 1e6:
            break
    return here.em


def climb(x: Array, sigma: Array, few: NDArray, starts: list[Atoms]) -> Atoms:
    """The highest maximum that is reached from `starts`: first on a `few` samples, then from the best on all.

    Starts stay among the points that are compared: no fit is less likely than any of them.
    """
    points = list(starts)
    for start in starts:
        weights = np.maximum(start.weights, 0.1 / len(start.weights))  # an atom of weight 0 would never move
        points.append(polish(x[few], sigma[few], Atoms(start.atoms, weights / weights.sum())))
    return polish(x, sigma, max(points, key=lambda point: log_likelihood(x, sigma, point)))


def cluster_starts(x: Array, sigma: Array, k: int, rng: np.random.Generator, num_starts: int) -> list[Atoms]:
    """k-means of the cleanest samples: many atoms make moments of high order unreliable."""
    clean, starts = x[np.argsort(sigma, kind="stable")[: 200 * k]], []
    for _ in range(num_starts):
        with warnings.catch_warnings(action="ignore", category=ConvergenceWarning):  # equal samples
            clusters = KMeans(min(k, len(clean)), n_init=1, random_state=int(rng.integers(2**31))).fit(clean)
        counts = np.maximum(np.bincount(clusters.labels_, minlength=clusters.n_clusters), 1)
        starts.append(Atoms(clusters.cluster_centers_, counts / counts.sum()))
    return starts


def polish_in_space(x: NDArray, sigma: Array, low: Atoms, subspace: Subspace, max_rounds: int = 3) -> Atoms:
    """Climb the likelihood of samples `x` (n, d) from its maximum in the subspace, `low`, with atoms (k, r).

    In turns the atoms move off their subspace, and `polish` climbs within the one that they span then.
    """
    for left in reversed(range(max_rounds)):
        basis, center = subspace.basis, subspace.center
        here = _gather_in_space(x, sigma, Atoms(low.atoms @ basis.T, low.weights), center)
        root = np.sqrt(here.complete)
        outside = (here.score[:, :-1] - here.score[:, :-1] @ basis @ basis.T) / root
        # Atoms that the samples cannot tell apart share a correction.
        value, vector = np.linalg.eigh(here.observed)
        along, curvature = vector.T @ outside, (np.maximum(value, 0) + _DAMPING)[:, None]
        step = vector @ (along / curvature) / root
        there = _gather_in_space(x, sigma, Atoms(here.guess.atoms + step, low.weights), center)
        here = there if there.log_likelihood >= here.log_likelihood else here
        last = Atoms(here.em.atoms + center, here.em.weights)
        # EM leaves the square of its rate, the share of information that the labels hide, of what there is.
        if not left or (1 - value[0]) ** 2 * float((along**2 / curvature).sum()) < _TOLERANCE * step.size:
            break
        subspace = Subspace.through(last.atoms, last.weights)
        low = polish(subspace.project(x), sigma, Atoms(subspace.project(last.atoms), last.weights))
    return last


def _gather_in_space(x: NDArray, sigma: Array, guess: Atoms, center: Array) -> Pass:
    """One pass over `x` - `center`; the information is R' P R over the complete one."""
    places = place_vectors(guess.atoms)

    def work(rows: slice, part: Array) -> tuple[Array, ...]:
        vectors = sample_vectors(part - center, sigma[rows])
        resp, height = responsibilities(vectors, places, guess.weights)
        return (resp * sigma[rows] ** -2.0) @ resp.T, resp @ vectors, resp.sum(1), height.sum()

    gram, sums, count, height = sum_over_chunks(x, work)
    mass, cross = -2 * sums[:, -1:], sums[:, 1:-1]
    score = np.column_stack([cross - mass * guess.atoms, count - len(x) * guess.weights])
    metric = np.maximum(mass, 1e-12 * mass.max())
    em = Atoms(guess.atoms + score[:, :-1] / np.maximum(mass, 1e-300), count / len(x))
    height += log_constant(sigma, x.shape[1]).sum()
    return Pass(guess, float(height), score, metric, gram / np.sqrt(metric * metric.T), em)
