"""A local maximum of the likelihood of atoms, under any noise,

    L(atoms, weights) = sum_i log sum_j w_j N(x_i; mu_j, S_i).

EM with the known noise crawls when atoms overlap. `polish` climbs by Newton's method: the observed information
is the complete one minus the variance of the complete score over the labels (Louis' formula). Under isotropic
noise that happens in the atoms' subspace. `polish_in_space` then moves the atoms off it, where the samples are
noise, the observed information is R' P R for responsibilities R and precisions P = diag(sigma^-2), and the step
is a weighted regression of the samples on their responsibilities.

A step is taken only if it does not lower L, so the point returned is the best one evaluated. The last step is
EM's, which cannot lower L and whose atoms are averages of samples: no fit leaves the range of its data.
"""

import warnings
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning

from assay.mixture.moments import Array, Atoms
from assay.mixture.noise import Noise, isotropic
from assay.mixture.subspace import Subspace, sum_over_chunks

# A step is the last when it gains less than this, in nats per parameter: a tenth of a standard error.
_TOLERANCE = 0.01
_DAMPING = 1e-3  # of steps off the subspace, in units of the complete information


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


def _posterior(vectors: Array, places: Array, weights: Array) -> tuple[Array, Array]:
    """R (k, c), the posterior of each atom, and log sum_j w_j exp(place_j . vector_i), (c,)."""
    logits = places @ vectors.T
    logits += np.log(np.maximum(weights, 1e-300))[:, None]
    peak = logits.max(0)
    logits -= peak
    np.exp(logits, out=logits)
    total = logits.sum(0)
    logits /= total
    return logits, np.log(total) + peak


def log_likelihood(x: Array, noise: Noise, guess: Atoms) -> float:
    """L of samples `x` (n, d), in nats."""
    places = noise.places(guess.atoms)

    def work(rows: slice, part: Array) -> tuple[Array, ...]:
        return (_posterior(noise[rows].features(part), places, guess.weights)[1].sum(),)

    return float(sum_over_chunks(x, work, len(places))[0] + noise.constant.sum())


def _gather(x: Array, noise: Noise, guess: Atoms) -> Pass:
    k, d = guess.atoms.shape
    size, each = d + 1, np.arange(k)
    places, slopes = noise.places(guess.atoms), noise.slopes(guess.atoms).swapaxes(1, 2)

    def work(rows: slice, part: Array) -> tuple[Array, ...]:
        vectors = noise[rows].features(part)
        resp, log_density = _posterior(vectors, places, guess.weights)
        slope = np.ones((k, size, len(part)))  # complete score of each atom, and of its weight
        slope[:, :d] = slopes @ vectors.T
        scaled = slope * resp[:, None]
        flat = scaled.reshape(k * size, -1)
        return flat @ flat.T, scaled @ slope.swapaxes(1, 2), scaled.sum(2), resp @ vectors, log_density.sum()

    outer, block, score, sums, height = sum_over_chunks(x, work, 3 * k * size)
    weights = score[:, -1] / len(x)
    score[:, -1] -= len(x) * guess.weights
    # Only differences of the weights' logarithms matter: n w w', which leaves steps with sum_j w_j step_j = 0,
    # is added to both informations and makes them regular.
    complete, precision = np.zeros((k, size, size)), noise.total_precision(sums)
    complete[:, :d, :d] = precision
    complete[:, d, d] = len(x) * guess.weights
    diagonal = np.einsum("kaa->ka", complete)
    diagonal[:] = metric = np.maximum(diagonal, 1e-12 * diagonal.max(0) + 1e-300)
    observed = outer.reshape(k, size, k, size)
    observed[each, :, each, :] += complete - block
    root = np.sqrt(metric.ravel())
    observed = observed.reshape(outer.shape) / np.outer(root, root)
    # However little an atom weighs, EM moves it to an average of samples.
    precision += (1e-14 * np.trace(precision, axis1=1, axis2=2) + 1e-300)[:, None, None] * np.eye(d)
    atoms = guess.atoms + np.linalg.solve(precision, score[:, :d, None])[..., 0]
    height += noise.constant.sum()
    return Pass(guess, float(height), score, metric, observed, Atoms(atoms, weights / weights.sum()))


def _move(guess: Atoms, step: Array) -> Atoms:
    """Add `step` (k, d + 1) to the atoms and to the logarithms of the weights."""
    weights = guess.weights * np.exp(np.clip(step[:, -1], -3, 3))
    return Atoms(guess.atoms + step[:, :-1], weights / weights.sum())


def polish(x: Array, noise: Noise, start: Atoms, max_passes: int = 100) -> Atoms:
    """Climb the likelihood of samples `x` (n, d), centred, from `start` by Newton's method.

    The metric is EM's. Directions in which the likelihood is not concave are climbed by the size of their
    curvature, and all steps are damped until they improve the likelihood: at the limit they are EM's.
    """
    here, damping = _gather(x, noise, start), 0.01
    for _ in range(max_passes):
        curvature, vector = np.linalg.eigh(here.observed)
        root = np.sqrt(here.complete.ravel())
        slope = vector.T @ (here.score.ravel() / root)
        # What Newton's step would gain is all there is.
        small = float((slope**2 / np.maximum(np.abs(curvature), 1e-6)).sum()) < _TOLERANCE * len(slope)
        step = (vector @ (slope / (np.abs(curvature) + damping)) / root).reshape(here.score.shape)
        there = _gather(x, noise, _move(here.guess, step))
        if there.log_likelihood >= here.log_likelihood:
            here, damping = there, damping / 8
        else:
            damping = max(4 * damping, 1e-4)
        if (small and curvature[0] > 0) or damping > 1e6:
            break
    return here.em


def climb(x: Array, noise: Noise, few: NDArray, starts: list[Atoms]) -> Atoms:
    """The highest maximum that is reached from `starts`: first on a `few` samples, then from the best on all.

    Starts stay among the points that are compared: no fit is less likely than any of them.
    """
    points = list(starts)
    for start in starts:
        weights = np.maximum(start.weights, 0.1 / len(start.weights))  # an atom of weight 0 would never move
        points.append(polish(x[few], noise[few], Atoms(start.atoms, weights / weights.sum())))
    return polish(x, noise, max(points, key=lambda point: log_likelihood(x, noise, point)))


def cluster_starts(
    x: Array, noise: Noise, k: int, rng: np.random.Generator, num_starts: int, spread: bool = False
) -> list[Atoms]:
    """k-means of the cleanest samples, of those without a gap if there are enough; with covariances if asked.

    Many atoms make moments of high order unreliable, and under other than isotropic noise there are none.
    """
    precision = noise.axis_precision()
    mean = (precision * x).sum(0) / np.maximum(precision.sum(0), np.finfo(float).tiny)
    filled = np.where(precision > 0, x, mean)
    clean = filled[np.argsort(-precision.min(1), kind="stable")[: 200 * k]]
    d, total, starts = x.shape[1], np.diag(clean.var(0) + 1e-12), []
    for _ in range(num_starts):
        with warnings.catch_warnings(action="ignore", category=ConvergenceWarning):  # equal samples
            clusters = KMeans(min(k, len(clean)), n_init=1, random_state=int(rng.integers(2**31))).fit(clean)
        groups = [clean[clusters.labels_ == j] for j in range(clusters.n_clusters)]
        counts = np.array([max(len(mine), 1) for mine in groups])
        own = [np.cov(mine.T, bias=True).reshape(d, d) if len(mine) > d else total for mine in groups]
        # Half of it may be noise; along no axis does a component start as an atom.
        covariances = np.array(own) / 2 + 0.05 * total if spread else None
        starts.append(Atoms(clusters.cluster_centers_, counts / counts.sum(), covariances))
    return starts


def polish_in_space(x: NDArray, sigma: Array, low: Atoms, subspace: Subspace, max_rounds: int = 3) -> Atoms:
    """Climb the likelihood of samples `x` (n, d) with noise `sigma` (n,) from the maximum within the subspace.

    That is `low`, with atoms (k, r). In turns the atoms move off their subspace, and `polish` climbs within
    the one that they span then.
    """
    noise = isotropic(sigma, x.shape[1])
    for left in reversed(range(max_rounds)):
        basis, center = subspace.basis, subspace.center
        here = _gather_in_space(x, noise, Atoms(low.atoms @ basis.T, low.weights), center)
        root = np.sqrt(here.complete)
        outside = (here.score[:, :-1] - here.score[:, :-1] @ basis @ basis.T) / root
        # Atoms that the samples cannot tell apart share a correction.
        value, vector = np.linalg.eigh(here.observed)
        along, curvature = vector.T @ outside, (np.maximum(value, 0) + _DAMPING)[:, None]
        step = vector @ (along / curvature) / root
        there = _gather_in_space(x, noise, Atoms(here.guess.atoms + step, low.weights), center)
        here = there if there.log_likelihood >= here.log_likelihood else here
        last = Atoms(here.em.atoms + center, here.em.weights)
        # EM leaves the square of its rate, the share of information that the labels hide, of what there is.
        if not left or (1 - value[0]) ** 2 * float((along**2 / curvature).sum()) < _TOLERANCE * step.size:
            break
        subspace = Subspace.through(last.atoms, last.weights)
        inside = isotropic(sigma, subspace.basis.shape[1])
        low = polish(subspace.project(x), inside, Atoms(subspace.project(last.atoms), last.weights))
    return last


def _gather_in_space(x: NDArray, noise: Noise, guess: Atoms, center: Array) -> Pass:
    """One pass over `x` - `center`, under isotropic noise; the information is R' P R over the complete one."""
    places = noise.places(guess.atoms)

    def work(rows: slice, part: Array) -> tuple[Array, ...]:
        vectors = noise[rows].features(part - center)
        resp, log_density = _posterior(vectors, places, guess.weights)
        return (resp * noise.precision[rows, 0]) @ resp.T, resp @ vectors, resp.sum(1), log_density.sum()

    gram, sums, count, height = sum_over_chunks(x, work)
    mass, cross = -2 * sums[:, -1:], sums[:, 1:-1]
    score = np.column_stack([cross - mass * guess.atoms, count - len(x) * guess.weights])
    metric = np.maximum(mass, 1e-12 * mass.max())
    em = Atoms(guess.atoms + score[:, :-1] / np.maximum(mass, 1e-300), count / len(x))
    observed = gram / np.sqrt(metric * metric.T)
    return Pass(guess, float(height + noise.constant.sum()), score, metric, observed, em)
