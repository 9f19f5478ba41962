"""The estimator of the paper's main theorem, and how many atoms there are.

Algorithm "High-dimensional Gaussian Mixtures": half of the samples find the subspace of the atoms, the other
half, projected onto it, their places and weights by denoised moments. Then, unless `polish` is off, the
likelihood of all samples is climbed from there to a local maximum. The number of atoms, if nobody gives it, is
the one whose likelihood is highest after a penalty for what it fits.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax

from assay.mixture.likelihood import climb, cluster_starts, log_likelihood, polish_in_space
from assay.mixture.moments import Array, Atoms, denoised_moments, inverse_weights
from assay.mixture.npmle import Estimate, npmle
from assay.mixture.search import Marginals, cluster, scalable_search
from assay.mixture.subspace import Subspace, cleanest, find_subspace

LEAST_NOISE = 1e-6  # of the radius: a sample without noise would have infinite precision
_CLEANEST = 1000  # samples per atom that the atoms' radius is read off
_SUBSAMPLE = 20_000  # on which the likelihood is first climbed
_MOST_ATOMS = 30
_MOST_SAMPLES = 200_000  # on which the number of atoms is chosen


def estimate_atoms(
    x: NDArray, sigma: Array, k: int, rng: np.random.Generator, polish: bool = True, num_restarts: int = 2,
    delta: float = 0.05, guess: Array | None = None,
) -> Atoms:  # fmt: skip
    """At most k atoms and their weights, from samples `x` (n, d) with noise `sigma` (n,).

    With `polish`, the likelihood is climbed from the theorem's estimate, from k-means with `num_restarts` seeds
    and from `guess` (k, d). `delta` is the theorem's probability of failure.
    """
    if k == 1:  # the mean with weights sigma^-2, which is the maximum of the likelihood too
        return Atoms(denoised_moments(x, sigma, 1, inverse_weights(sigma**2))[1][None], np.ones(1))
    subspace, z, rest = project_half(x, sigma, k, rng)
    # Largest distance from the mean among the cleanest samples: half of an extreme atom's are beyond it.
    clean = rest[cleanest(sigma[rest], _CLEANEST * k)]
    radius = float(np.linalg.norm(z[clean], axis=1).max()) or 1.0
    found = moment_estimate(z[rest] / radius, sigma[rest] / radius, k, delta)
    found = Atoms(found.atoms * radius, found.weights)
    if not polish:
        return Atoms(subspace.lift(found.atoms), found.weights)
    # A few samples without noise may weigh more than all others together: they belong to the subsample.
    few, sigma = np.union1d(rest[:_SUBSAMPLE], cleanest(sigma, 100)), np.maximum(sigma, LEAST_NOISE * radius)
    starts = [found, *cluster_starts(z[few], sigma[few], k, rng, num_restarts)]
    starts += [] if guess is None else [Atoms(subspace.project(guess), np.full(k, 1 / k))]
    low = climb(z, sigma, few, starts)
    if subspace.basis.shape[1] == x.shape[1]:
        return Atoms(subspace.lift(low.atoms), low.weights)
    return polish_in_space(x, sigma, low, subspace)


def project_half(
    x: NDArray, sigma: Array, k: int, rng: np.random.Generator
) -> tuple[Subspace, Array, NDArray[np.int64]]:
    """The subspace from a random half of the samples, all samples in it (n, r), and the other half's rows."""
    shuffled, half = rng.permutation(len(x)), len(x) // 2
    subspace = find_subspace(x, sigma, min(k - 1, x.shape[1]), rng, shuffled[:half])
    return subspace, subspace.project(x), shuffled[half:]


def moment_estimate(z: Array, sigma: Array, k: int, delta: float = 0.05) -> Atoms:
    """Atoms and weights by moments, from samples `z` (n, r) in units of the ball that holds the atoms."""
    num_groups = math.ceil(math.log(1 / delta) + k * math.log(k))
    return scalable_search(Marginals(z, sigma, k, num_groups))


# how many atoms --------------------------------------------------------------------------------------


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


def choose_number(x: NDArray, sigma: Array, rng: np.random.Generator) -> tuple[Array, Estimate, list[Evidence]]:
    """The winner's atoms (k, d), the nonparametric estimate that bounds every k, and the evidence.

    From samples `x` (n, d) with noise `sigma` (n,); beyond 3 dimensions, along the 3 in which atoms vary most.
    The bound ends the search over k = 1, 2, .. where no larger k can win.
    """
    chosen = np.sort(rng.permutation(len(x))[:_MOST_SAMPLES])
    z, level, subspace = np.asarray(x[chosen], np.float64), sigma[chosen], None
    if x.shape[1] > 3:
        subspace = _visible(find_subspace(z, level, 3, rng), z, level)
        z = subspace.project(z)
    level = np.maximum(level, 1e-4 * (float(np.ptp(z, axis=0).max()) or 1.0))
    best = npmle(z, level, seed=int(rng.integers(2**31)))
    penalty, center, few = math.log(len(z)) / 2, z.mean(0), np.arange(0, len(z), max(1, len(z) // _SUBSAMPLE))
    tried: list[tuple[float, float, Array]] = []
    for k in range(1, min(_MOST_ATOMS, len(best.mixture.weights)) + 1):
        start = cluster(best.mixture.atoms - center, best.mixture.weights, k)
        found = climb(z - center, level, few, [start])
        height = log_likelihood(z - center, level, found)
        tried.append((height, height - penalty * (found.atoms.size + k - 1), found.atoms + center))
        more = (k + 1) * (z.shape[1] + 1) - 1
        if best.log_likelihood + best.gap - penalty * more <= max(penalised for _, penalised, _ in tried):
            break
    share = softmax([penalised for _, penalised, _ in tried])
    evidence = [Evidence(k + 1, *tried[k][:2], float(share[k])) for k in range(len(tried))]
    atoms = tried[int(np.argmax(share))][2]
    return atoms if subspace is None else subspace.lift(atoms), best, evidence


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
