"""How many atoms: the likelihood of each number, minus a penalty for what it fits."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp, softmax
from sklearn.cluster import KMeans

from assay.errors import AssayError
from assay.mixture.deconvolve import Components, deconvolve, log_joint
from assay.mixture.estimate import reject_bad_rows
from assay.mixture.likelihood import polish
from assay.mixture.moments import Array, Atoms, inverse_weights
from assay.mixture.noise import Noise, make_noise
from assay.mixture.npmle import Estimate, npmle
from assay.mixture.subspace import Subspace, find_subspace

_MOST_ATOMS = 30
_MOST_SAMPLES = 200_000  # on which the number of atoms is chosen
_SUBSAMPLE = 20_000  # on which a climb begins


@dataclass(frozen=True)
class Evidence:
    """The evidence for a number of atoms."""

    num_atoms: int
    log_likelihood: float
    """The highest that was found with this number of atoms, in nats."""
    penalised: float
    """Minus log n / 2 for each fitted parameter (Schwarz's criterion): the largest wins."""
    probability: float
    """exp(penalised), over the sum for the numbers of atoms that were tried."""


def choose_number(x: NDArray, level: Array, rng: np.random.Generator) -> tuple[Array, Estimate, list[Evidence]]:
    """The winner's atoms (k, d), the nonparametric estimate that bounds every k, and the evidence.

    `x` (n, d) are samples with the noise `level` of `read_sigma`; beyond 3 dimensions, in the subspace of 3 in
    which the atoms vary most.
    """
    few = np.sort(rng.permutation(len(x))[:_MOST_SAMPLES])
    z, subspace = np.asarray(x[few], np.float64), None
    reject_bad_rows(z, z)
    if x.shape[1] > 3:
        if level.ndim > 1:
            what = "None needs isotropic noise, or at most 3 dimensions"
            raise AssayError(what, key="n_components", cure="give a number of atoms")
        subspace = _visible(find_subspace(z, level[few], 3, rng), z, level[few])
        z = subspace.project(z)
    noise = make_noise(level[few], z.shape[1], 1e-4 * (float(np.ptp(z, axis=0).max()) or 1.0))
    best = npmle(z, noise, seed=int(rng.integers(2**31)))
    evidence, atoms = _weigh(z, noise, best)
    return atoms if subspace is None else subspace.lift(atoms), best, evidence


def _weigh(x: Array, noise: Noise, best: Estimate) -> tuple[list[Evidence], Array]:
    """Fit k = 1, 2, .. atoms to samples `x` (n, d) and weigh them: the evidence, and the winner's atoms (k, d).

    `best` bounds the likelihood of every mixture, so that the search ends where no larger k can win.
    """
    penalty, mixture = math.log(len(x)) / 2, best.mixture
    tried: list[tuple[float, float, Array]] = []
    for k in range(1, min(_MOST_ATOMS, len(mixture.weights)) + 1):
        clusters = KMeans(k, n_init=4, random_state=0).fit(mixture.atoms, sample_weight=mixture.weights)
        weights = np.maximum(np.bincount(clusters.labels_, mixture.weights, k), 1e-6)
        found = _climb(x, noise, Components(weights / weights.sum(), clusters.cluster_centers_))
        log_likelihood = float(logsumexp(log_joint(x, noise, found), axis=1).sum())
        tried.append((log_likelihood, log_likelihood - penalty * found.num_parameters, found.means))
        more = (k + 1) * (x.shape[1] + 1) - 1
        if best.log_likelihood + best.gap - penalty * more <= max(penalised for _, penalised, _ in tried):
            break
    share = softmax([penalised for _, penalised, _ in tried])
    evidence = [Evidence(k + 1, *tried[k][:2], float(share[k])) for k in range(len(tried))]
    return evidence, tried[int(np.argmax(share))][2]


def _climb(x: Array, noise: Noise, start: Components) -> Components:
    """A local maximum of the likelihood near `start`, for atoms."""
    if noise.precision.ndim > 1:
        return deconvolve(x, noise, start)[0]
    sigma, few = noise.precision**-0.5, slice(None, None, max(1, len(x) // _SUBSAMPLE))
    found = polish(x, sigma, polish(x[few], sigma[few], Atoms(start.means, start.weights)))
    return Components(found.weights, found.atoms)


def _visible(subspace: Subspace, x: Array, sigma: Array) -> Subspace:
    """The axes of a subspace along which the atoms vary by more than 4 standard errors, at least the first."""
    z = subspace.project(x)
    alpha = inverse_weights(sigma**4 + 1e-12 * (z**2).mean() ** 2)
    square = z**2 - (sigma**2)[:, None]
    mean = alpha @ square
    error = np.sqrt((alpha**2) @ (square - mean) ** 2)
    order = np.argsort(-mean)
    kept = order[(mean > 4 * error)[order]]
    return Subspace(subspace.center, subspace.basis[:, kept if len(kept) else order[:1]])
