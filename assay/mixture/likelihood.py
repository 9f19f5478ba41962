"""A local maximum of the likelihood of atoms under isotropic noise,

    L(atoms, weights) = sum_i log sum_j w_j exp(-|x_i - mu_j|^2 / (2 sigma_i^2)).

EM with the known sigma_i crawls when atoms overlap. `polish` climbs by Newton's method in the atoms' subspace:
the observed information is the complete one minus the variance of the complete score over the labels (Louis'
formula). `polish_in_space` then moves the atoms off the subspace, where the samples are noise, the observed
information is R' P R for responsibilities R and precisions P = diag(sigma^-2), and the step is a weighted
regression of the samples on their responsibilities.

A step is taken only if it does not lower L, so the point returned is the best one evaluated. The last step is
EM's, which cannot lower L and whose atoms are averages of samples: no fit leaves the range of its data.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from assay.mixture.moments import Array, Atoms
from assay.mixture.subspace import Subspace, sum_over_chunks

# A step is the last when it gains less than this, in nats per parameter: a tenth of a standard error.
_TOLERANCE = 0.01
_DAMPING = 1e-3  # of steps off the subspace, in units of the complete information


@dataclass(frozen=True)
class Pass:
    """What one pass over the samples gathers at (atoms, weights)."""

    guess: Atoms
    log_likelihood: float
    """Up to a constant of the samples."""
    score: Array
    """(k, r + 1): derivative with respect to each atom and to its weight's logarithm."""
    mass: Array
    """(k,): sum_i R_ji / sigma_i^2, the complete information of each atom."""
    observed: Array
    """Observed over complete information, eigenvalues at most 1: (k (r + 1), k (r + 1)), or (k, k) in space."""
    num_samples: int

    @property
    def complete(self) -> Array:
        """(k, r + 1): the diagonal of the complete information, the metric in which EM takes its steps."""
        num_dims = self.guess.atoms.shape[1]
        both = np.column_stack([np.tile(self.mass[:, None], num_dims), self.num_samples * self.guess.weights])
        return np.maximum(both, 1e-12 * both.max(0))

    def em(self) -> Atoms:
        """The next step of EM."""
        atoms = self.guess.atoms + self.score[:, :-1] / np.maximum(self.mass, 1e-300)[:, None]
        weights = np.maximum(self.guess.weights + self.score[:, -1] / self.num_samples, 0)
        return Atoms(atoms, weights / weights.sum())


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


def _gather(z: Array, precision: Array, guess: Atoms) -> Pass:
    k, num_dims = guess.atoms.shape
    size = num_dims + 1

    def work(rows: slice, part: Array) -> tuple[Array, ...]:
        resp, log_density = responsibilities(part, precision[rows], guess)
        slope = np.ones((k, size, len(part)))  # complete score of each atom, and of its weight
        slope[:, :num_dims] = (part.T - guess.atoms[:, :, None]) * precision[rows]
        scaled = slope * resp[:, None]
        flat = scaled.reshape(k * size, -1)
        block = scaled @ slope.swapaxes(1, 2)
        return flat @ flat.T, block, scaled.sum(2), resp @ precision[rows], log_density.sum()

    outer, block, score, mass, log_likelihood = sum_over_chunks(z, work, 3 * k * size)
    score[:, -1] -= len(z) * guess.weights
    variance = np.zeros((k, size, k, size))
    variance[np.arange(k), :, np.arange(k), :] = block
    here = Pass(guess, float(log_likelihood), score, mass, outer, len(z))
    # Only differences of the weights' logarithms matter: n w w', which leaves steps with sum_j w_j step_j = 0,
    # is added to both informations and makes them regular.
    root = np.sqrt(here.complete.ravel())
    hidden = (variance.reshape(outer.shape) - outer) / np.outer(root, root)
    return replace(here, observed=np.eye(len(root)) - hidden)


def _move(guess: Atoms, step: Array) -> Atoms:
    """Add `step` (k, r + 1) to the atoms and to the logarithms of the weights."""
    weights = guess.weights * np.exp(np.clip(step[:, -1], -3, 3))
    return Atoms(guess.atoms + step[:, :-1], weights / weights.sum())


def log_likelihood(z: Array, sigma: Array, guess: Atoms) -> float:
    """L, up to a constant of the samples `z` (n, r) with noise `sigma` (n,) > 0."""
    precision = 1 / sigma**2

    def work(rows: slice, part: Array) -> tuple[Array, ...]:
        return (responsibilities(part, precision[rows], guess)[1].sum(),)

    return float(sum_over_chunks(z, work, len(guess.weights))[0])


def polish(z: Array, sigma: Array, start: Atoms, max_passes: int = 100) -> Atoms:
    """Climb the likelihood of samples `z` (n, r) with noise `sigma` (n,) > 0 from `start`, by Newton's method.

    The metric is EM's. Directions in which the likelihood is not concave are climbed by the size of their
    curvature, and all steps are damped until they improve the likelihood: at the limit they are EM's.
    """
    precision = 1 / sigma**2
    here, damping = _gather(z, precision, start), 0.01
    for _ in range(max_passes):
        curvature, vector = np.linalg.eigh(here.observed)
        root = np.sqrt(here.complete.ravel())
        slope = vector.T @ (here.score.ravel() / root)
        # What Newton's step would gain is all there is.
        small = float((slope**2 / np.maximum(np.abs(curvature), 1e-6)).sum()) < _TOLERANCE * len(slope)
        step = (vector @ (slope / (np.abs(curvature) + damping)) / root).reshape(here.score.shape)
        there = _gather(z, precision, _move(here.guess, step))
        if there.log_likelihood >= here.log_likelihood:
            here, damping = there, damping / 8
        else:
            damping = max(4 * damping, 1e-4)
        if (small and curvature[0] > 0) or damping > 1e6:
            break
    return here.em()


def polish_in_space(x: NDArray, sigma: Array, low: Atoms, subspace: Subspace, max_rounds: int = 3) -> Atoms:
    """Climb the likelihood of samples `x` (n, d) from `low`, the maximum within the subspace: atoms (k, r).

    In turns the atoms move off their subspace, and `polish` climbs within the one that they span then.
    """
    precision = 1 / sigma**2
    for left in reversed(range(max_rounds)):
        basis, center = subspace.basis, subspace.center
        here = _gather_in_space(x, precision, Atoms(low.atoms @ basis.T, low.weights), center)
        root = np.sqrt(here.complete[:, :1])
        outside = (here.score[:, :-1] - here.score[:, :-1] @ basis @ basis.T) / root
        # Atoms that the samples cannot tell apart share a correction.
        value, vector = np.linalg.eigh(here.observed)
        along, curvature = vector.T @ outside, (np.maximum(value, 0) + _DAMPING)[:, None]
        step = vector @ (along / curvature) / root
        there = _gather_in_space(x, precision, Atoms(here.guess.atoms + step, low.weights), center)
        here = there if there.log_likelihood >= here.log_likelihood else here
        last = here.em()
        last = Atoms(last.atoms + center, last.weights)
        # EM leaves the square of its rate, the share of information that the labels hide, of what there is.
        if not left or (1 - value[0]) ** 2 * float((along**2 / curvature).sum()) < _TOLERANCE * step.size:
            break
        subspace = Subspace.through(last.atoms, last.weights)
        low = polish(subspace.project(x), sigma, Atoms(subspace.project(last.atoms), last.weights))
    return last


def _gather_in_space(x: NDArray, precision: Array, guess: Atoms, center: Array) -> Pass:
    """One pass over `x` - `center`; the information is R' P R over the complete one, (k, k)."""

    def work(rows: slice, part: Array) -> tuple[Array, ...]:
        part = part - center
        resp, log_density = responsibilities(part, precision[rows], guess)
        weighted = resp * precision[rows]
        return weighted @ resp.T, weighted @ part, resp.sum(1), weighted.sum(1), log_density.sum()

    gram, cross, count, mass, log_likelihood = sum_over_chunks(x, work)
    score = np.column_stack([cross - mass[:, None] * guess.atoms, count - len(x) * guess.weights])
    scale = np.sqrt(np.maximum(mass, 1e-12 * mass.max()))
    return Pass(guess, float(log_likelihood), score, mass, gram / np.outer(scale, scale), len(x))
