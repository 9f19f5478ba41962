"""Likelihood polish: from a good start to the maximum of

    L(atoms, weights) = sum_i log sum_j w_j exp(-|x_i - mu_j|^2 / (2 sigma_i^2)).

EM with the known sigma_i crawls when atoms overlap. Here the observed information (Louis' formula: the complete
information minus the variance of the complete score over the labels) is gathered from a subsample in the atoms'
subspace, where the maximum is found first (`polish`). From there a pass over all samples costs as much as a
step of EM and moves as far as a step of Newton's method (`polish_all`). Off the subspace the samples are
noise, the observed information is R' P R for responsibilities R and precisions P = diag(sigma^-2), and the
step is a weighted regression of the samples on their responsibilities.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from assay.mixture.moments import Array, Atoms
from assay.mixture.subspace import Subspace, sum_over_chunks

_CHUNK = 4096
# A step is the last when it gains less than this, in nats per parameter: a tenth of a standard error.
_TOLERANCE = 0.01


@dataclass(frozen=True)
class _Pass:
    """What one pass over the samples gathers at (atoms, weights)."""

    log_likelihood: float
    score: Array
    """(k, r + 1): derivative with respect to each atom and to its weight's logarithm."""
    complete: Array
    """(k, r + 1): the diagonal of the complete information, the metric in which EM takes its steps."""
    observed: Array
    """(k (r + 1), k (r + 1)): observed over complete information, eigenvalues at most 1."""


def responsibilities(x: Array, precision: Array, guess: Atoms) -> tuple[Array, Array]:
    """R (k, n), the posterior of each atom, and log sum_j w_j exp(..) up to a constant of the samples, (n,)."""
    logits = guess.atoms @ x.T
    logits -= 0.5 * (guess.atoms**2).sum(1)[:, None]
    logits *= precision
    logits += np.log(np.maximum(guess.weights, 1e-300))[:, None]
    peak = logits.max(0)
    logits -= peak
    np.exp(logits, out=logits)
    total = logits.sum(0)
    logits /= total
    return logits, np.log(total) + peak


def _gather(z: Array, precision: Array, guess: Atoms) -> _Pass:
    k, num_dims = guess.atoms.shape
    size = num_dims + 1
    outer, block = np.zeros((k * size, k * size)), np.zeros((k, size, size))
    sums, mass, log_likelihood = np.zeros(k * size), np.zeros(k), 0.0
    for start in range(0, len(z), _CHUNK):
        part, prec = z[start : start + _CHUNK], precision[start : start + _CHUNK]
        resp, log_density = responsibilities(part, prec, guess)
        log_likelihood += float(log_density.sum())
        slope = np.ones((k, size, len(part)))  # complete score of each atom, and of its weight
        slope[:, :num_dims] = (part.T - guess.atoms[:, :, None]) * prec
        scaled = slope * resp[:, None]
        flat = scaled.reshape(k * size, -1)
        outer += flat @ flat.T
        block += scaled @ slope.swapaxes(1, 2)
        sums += flat.sum(1)
        mass += resp @ prec
    score = sums.reshape(k, size).copy()
    score[:, -1] -= len(z) * guess.weights
    variance, complete = np.zeros((k, size, k, size)), np.empty((k, size))
    variance[np.arange(k), :, np.arange(k), :] = block
    # Only differences of the weights' logarithms matter: n w w', which leaves steps with sum_j w_j step_j = 0,
    # is added to both informations and makes them regular.
    complete[:, :num_dims], complete[:, -1] = mass[:, None], len(z) * guess.weights
    complete = np.maximum(complete, 1e-12 * complete.max(0))
    root = np.sqrt(complete.ravel())
    hidden = (variance.reshape(outer.shape) - outer) / np.outer(root, root)
    return _Pass(log_likelihood, score, complete, np.eye(len(hidden)) - hidden)


def _move(guess: Atoms, step: Array) -> Atoms:
    """Add `step` (k, r + 1) to the atoms and to the logarithms of the weights."""
    weights = guess.weights * np.exp(np.clip(step[:, -1], -3, 3))
    return Atoms(guess.atoms + step[:, :-1], weights / weights.sum())


@dataclass(frozen=True)
class Maximum:
    """Where a climb of the likelihood ended."""

    guess: Atoms
    log_likelihood: float
    inverse: Array
    """Complete over observed information, (k (r + 1), k (r + 1)): makes steps of EM those of Newton."""


def polish(z: Array, sigma: Array, start: Atoms, max_passes: int = 100) -> Maximum:
    """Maximise the likelihood of samples `z` (n, r) with noise `sigma` (n,) > 0, from `start`.

    Newton's method in the metric of EM. Directions in which the likelihood is not concave are climbed by the
    size of their curvature, and all steps are damped until they improve the likelihood: at the limit they are
    EM's.
    """
    precision = 1 / sigma**2
    guess, here, damping = start, _gather(z, precision, start), 0.01
    for _ in range(max_passes):
        curvature, vector = np.linalg.eigh(here.observed)
        root = np.sqrt(here.complete.ravel())
        slope = vector.T @ (here.score.ravel() / root)
        # What Newton's step would gain is all there is.
        small = float((slope**2 / np.maximum(np.abs(curvature), 1e-6)).sum()) < _TOLERANCE * len(slope)
        step = (vector @ (slope / (np.abs(curvature) + damping)) / root).reshape(here.score.shape)
        trial = _move(guess, step)
        there = _gather(z, precision, trial)
        if there.log_likelihood >= here.log_likelihood:
            guess, here, damping = trial, there, damping / 8
        else:
            damping = max(4 * damping, 1e-4)
        if (small and curvature[0] > 0) or damping > 1e6:
            break
    curvature, vector = np.linalg.eigh(here.observed)
    return Maximum(guess, here.log_likelihood, (vector / np.maximum(np.abs(curvature), 1e-3)) @ vector.T)


def polish_all(x: NDArray, sigma: Array, low: Maximum, subspace: Subspace, max_passes: int = 4) -> Atoms:
    """Maximise the likelihood of all samples `x` (n, d), from the maximum `low` of a subsample in the subspace.

    Each pass gathers what EM does, and the k x k matrix R' P R.
    """
    precision = 1 / sigma**2
    basis = subspace.basis
    guess = best = Atoms(subspace.lift(low.guess.atoms), low.guess.weights)
    last_likelihood = np.array(-np.inf)
    for _ in range(max_passes):
        gram, cross, count, mass, likelihood = _pass_in_space(x, precision, guess)
        if likelihood < last_likelihood:
            return best
        best, last_likelihood = guess, likelihood
        score = cross - mass[:, None] * guess.atoms  # (k, d)
        inside = np.concatenate([score @ basis, (count - len(x) * guess.weights)[:, None]], axis=1)
        outside = score - inside[:, :-1] @ basis.T
        complete = np.concatenate(
            [np.tile(mass[:, None], basis.shape[1]), len(x) * guess.weights[:, None]], axis=1
        )
        root = np.sqrt(np.maximum(complete, 1e-300))
        step = (low.inverse @ (inside / root).ravel()).reshape(inside.shape) / root
        # Atoms that the samples cannot tell apart share a correction: the pseudo-inverse splits it evenly.
        step_outside = np.linalg.pinv(gram, rcond=1e-9, hermitian=True) @ outside
        gain = float((step * inside).sum() + (step_outside * outside).sum())
        step_in_space = step[:, :-1] @ basis.T + step_outside
        guess = _move(guess, np.concatenate([step_in_space, step[:, -1:]], axis=1))
        # EM would leave the square of its rate, the share of information that the labels hide, of this gain;
        # these steps leave less than a tenth of that (about a hundredth in trials).
        hidden = 1 - np.linalg.eigvalsh(gram / np.sqrt(np.outer(mass, mass) + 1e-300))[0]
        if 0.1 * hidden**2 * gain < _TOLERANCE * guess.atoms.size:
            break
    return guess


def _pass_in_space(x: NDArray, precision: Array, guess: Atoms) -> tuple[Array, ...]:
    """One pass: R' P R (k, k), R' P x (k, d), sums of R and of R P (k,), and the log-likelihood."""

    def work(rows: slice, part: Array) -> tuple[Array, ...]:
        resp, log_density = responsibilities(part, precision[rows], guess)
        weighted = resp * precision[rows]
        return weighted @ resp.T, weighted @ part, resp.sum(1), weighted.sum(1), log_density.sum()

    return sum_over_chunks(x, work)
