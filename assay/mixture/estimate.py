"""The estimator of the paper's main theorem: atoms and weights from samples with isotropic noise.

Algorithm "High-dimensional Gaussian Mixtures": half of the samples find the subspace of the atoms, the other
half, projected onto it, their places and weights by denoised moments. Then, unless `polish` is off, the
likelihood of all samples is climbed from there to a local maximum. Under any other noise, of which the theorem
says nothing, the likelihood is climbed from k-means alone. The number of atoms, if nobody gives it, is the one
whose likelihood is highest after a penalty for what it fits.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from scipy.special import softmax

from assay.errors import AssayError
from assay.mixture.likelihood import climb, cluster_starts, log_likelihood, polish_in_space
from assay.mixture.moments import Array, Atoms, denoised_moments, inverse_weights
from assay.mixture.noise import LARGEST, LEAST_NOISE, Noise, isotropic, make_noise
from assay.mixture.npmle import Estimate, npmle
from assay.mixture.search import Marginals, cluster, scalable_search
from assay.mixture.subspace import Subspace, cleanest, find_subspace
from assay.settings import Strict

_CLEANEST = 1000  # samples per atom that the atoms' radius is read off
_SUBSAMPLE = 20_000  # on which the likelihood is first climbed
_MOST_ATOMS = 30
_MOST_SAMPLES = 200_000  # on which the number of atoms is chosen


class Settings(Strict):
    """The parameters of `NoisyMixture` that decide how it fits, and what they may be."""

    n_components: Annotated[int, Field(ge=1)] | None = 2
    covariance: Literal["zero", "full"] = "zero"
    polish: bool = True
    num_restarts: int = Field(2, ge=0)
    radius: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    delta: float = Field(0.05, gt=0, lt=0.5)


def estimate_atoms(
    x: NDArray, level: Array, k: int, rng: np.random.Generator, settings: Settings, guess: Array | None = None
) -> Atoms:
    """At most k atoms and their weights, from samples `x` (n, d) with the noise `level` of `read_sigma`.

    `guess` (k, d) is one more place to climb the likelihood from.
    """
    if level.ndim > 1:
        center = x.mean(0)
        z, rest = x - center, rng.permutation(len(x))
        noise = make_noise(level, x.shape[1], LEAST_NOISE * (float(z.std()) or 1.0))
        starts = cluster_starts(z, noise, k, rng, 1 + settings.num_restarts)
        starts += [] if guess is None else [Atoms(guess - center, np.full(k, 1 / k))]
        found = climb(z, noise, rest[:_SUBSAMPLE], starts)
        return Atoms(found.atoms + center, found.weights)
    if k == 1:  # the mean with weights sigma^-2, which is the maximum of the likelihood too
        mean = denoised_moments(x, level, 1, inverse_weights(level**2))[1]
        reject_bad_rows(x, mean)
        return Atoms(mean[None], np.ones(1))
    subspace, z, rest = project_half(x, level, k, rng)
    radius = settings.radius if settings.radius is not None else _radius(z[rest], level[rest], k)
    found = moment_estimate(z[rest] / radius, level[rest] / radius, k, settings.delta)
    found = Atoms(found.atoms * radius, found.weights)
    if not settings.polish:
        return Atoms(subspace.lift(found.atoms), found.weights)
    # A few samples without noise may weigh more than all others together: they belong to the subsample.
    few, sigma = np.union1d(rest[:_SUBSAMPLE], cleanest(level, 100)), np.maximum(level, LEAST_NOISE * radius)
    noise = isotropic(sigma, z.shape[1])
    starts = [found, *cluster_starts(z[few], noise[few], k, rng, settings.num_restarts)]
    starts += [] if guess is None else [Atoms(subspace.project(guess), np.full(k, 1 / k))]
    low = climb(z, noise, few, starts)
    if subspace.basis.shape[1] == x.shape[1]:
        return Atoms(subspace.lift(low.atoms), low.weights)
    return polish_in_space(x, sigma, low, subspace)


def project_half(
    x: NDArray, sigma: Array, k: int, rng: np.random.Generator
) -> tuple[Subspace, Array, NDArray[np.int64]]:
    """The subspace from a random half of the samples, all samples in it (n, r), and the other half's rows."""
    shuffled, half = rng.permutation(len(x)), len(x) // 2
    chosen = np.zeros(len(x), bool)
    chosen[shuffled[:half]] = True
    try:
        with np.errstate(over="ignore", invalid="ignore"):  # a sentence follows instead
            subspace = find_subspace(x, sigma, min(k - 1, x.shape[1]), rng, chosen)
    except np.linalg.LinAlgError:
        reject_bad_rows(x, np.full(1, np.nan))
        raise
    z = subspace.project(x)
    # Beyond these sizes the squares that follow would be infinite or 0; equal samples are fine.
    size = np.abs(z).max()
    reject_bad_rows(x, z if size == 0 or 1 / LARGEST < size < LARGEST else np.full(1, np.nan))
    return subspace, z, shuffled[half:]


def moment_estimate(z: Array, sigma: Array, k: int, delta: float = 0.05) -> Atoms:
    """Atoms and weights by moments, from samples `z` (n, r) in units of the ball that holds the atoms."""
    num_groups = math.ceil(math.log(1 / delta) + k * math.log(k))
    return scalable_search(Marginals(z, sigma, k, num_groups))


def _radius(z: Array, sigma: Array, k: int) -> float:
    """Largest distance from the mean among the cleanest samples: half of an extreme atom's are beyond it."""
    radius = float(np.linalg.norm(z[cleanest(sigma, _CLEANEST * k)], axis=1).max())
    return radius if radius > 0 else 1.0


def reject_bad_rows(x: NDArray, computed: Array) -> None:
    """If `computed` is not finite: name the first sample that is not, or blame the size of the values."""
    if np.isfinite(computed).all():
        return
    bad = next((i for i, row in enumerate(x) if not np.isfinite(row).all()), None)
    if bad is None:
        what = "values are too large or too small to square"
        raise AssayError(what, key="X", cure="rescale X and sigma together")
    raise AssayError(f"sample {bad} holds NaN or infinity", key="X", cure="remove or correct the sample")


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
    penalty, center, few = math.log(len(x)) / 2, x.mean(0), np.arange(0, len(x), max(1, len(x) // _SUBSAMPLE))
    tried: list[tuple[float, float, Array]] = []
    for k in range(1, min(_MOST_ATOMS, len(best.mixture.weights)) + 1):
        start = cluster(best.mixture.atoms - center, best.mixture.weights, k)
        found = climb(x - center, noise, few, [start])
        height = log_likelihood(x - center, noise, found)
        tried.append((height, height - penalty * found.num_parameters, found.atoms + center))
        more = (k + 1) * (x.shape[1] + 1) - 1
        if best.log_likelihood + best.gap - penalty * more <= max(penalised for _, penalised, _ in tried):
            break
    share = softmax([penalised for _, penalised, _ in tried])
    evidence = [Evidence(k + 1, *tried[k][:2], float(share[k])) for k in range(len(tried))]
    return evidence, tried[int(np.argmax(share))][2]


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
