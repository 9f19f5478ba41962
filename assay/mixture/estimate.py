"""The estimator of the paper's main theorem: atoms and weights from samples with isotropic noise.

Algorithm "High-dimensional Gaussian Mixtures": half of the samples find the subspace of the atoms, the other
half, projected onto it, their places and weights by denoised moments. Then, unless `polish` is off, the
likelihood of all samples is climbed from there to a local maximum.
"""

import math
import warnings
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning

from assay.errors import AssayError
from assay.mixture.likelihood import log_likelihood, polish, polish_in_space
from assay.mixture.moments import Array, Atoms, denoised_moments, inverse_weights
from assay.mixture.noise import LARGEST
from assay.mixture.search import Marginals, exhaustive_search, scalable_search
from assay.mixture.subspace import Subspace, cleanest, find_subspace

_CLEANEST = 1000  # samples per atom that the atoms' radius is read off
_SUBSAMPLE = 20_000  # on which the likelihood is first climbed
LEAST_NOISE = 1e-6  # of the radius: a sample without noise would have infinite precision


@dataclass(frozen=True)
class Settings:
    """How the estimator works; see `NoisyMixture`."""

    search: Literal["scalable", "exhaustive"] = "scalable"
    polish: bool = True
    num_restarts: int = 2
    radius: float | None = None
    delta: float = 0.05


def estimate_atoms(
    x: NDArray, sigma: Array, k: int, rng: np.random.Generator, settings: Settings, guess: Array | None = None
) -> Atoms:
    """At most k atoms and their weights, from samples `x` (n, d) with noise `sigma` (n,).

    `guess` (k, d) is one more place to climb the likelihood from.
    """
    if k == 1:  # the mean with weights sigma^-2, which is the maximum of the likelihood too
        mean = denoised_moments(x, sigma, 1, inverse_weights(sigma**2))[1]
        reject_bad_rows(x, mean)
        return Atoms(mean[None], np.ones(1))
    subspace, z, rest = project_half(x, sigma, k, rng)
    radius = settings.radius if settings.radius is not None else _radius(z[rest], sigma[rest], k)
    found = moment_estimate(z[rest] / radius, sigma[rest] / radius, k, settings)
    found = Atoms(found.atoms * radius, found.weights)
    if not settings.polish:
        return Atoms(subspace.lift(found.atoms), found.weights)
    level = np.maximum(sigma, LEAST_NOISE * radius)
    # A few samples without noise may weigh more than all others together: they belong to the subsample.
    few = np.union1d(rest[:_SUBSAMPLE], cleanest(sigma, 100))
    starts = [found, *_more_starts(z[few], sigma[few], k, rng, settings.num_restarts)]
    if guess is not None:
        starts.append(Atoms(subspace.project(guess), np.full(len(guess), 1 / len(guess))))
    low = _best_maximum(z, level, few, starts)
    if subspace.basis.shape[1] == x.shape[1]:
        return Atoms(subspace.lift(low.atoms), low.weights)
    return polish_in_space(x, level, low, subspace)


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


def moment_estimate(z: Array, sigma: Array, k: int, settings: Settings) -> Atoms:
    """Atoms and weights by moments, from samples `z` (n, r) in units of the ball that holds the atoms."""
    num_groups = math.ceil(math.log(1 / settings.delta) + k * math.log(k))
    search = exhaustive_search if settings.search == "exhaustive" else scalable_search
    return search(Marginals(z, sigma, k, num_groups))


def _more_starts(z: Array, sigma: Array, k: int, rng: np.random.Generator, num_starts: int) -> list[Atoms]:
    """k-means of the cleanest samples: many atoms make moments of high order unreliable."""
    clean = z[np.argsort(sigma, kind="stable")[: 200 * k]]
    starts = []
    for _ in range(num_starts):
        with warnings.catch_warnings(action="ignore", category=ConvergenceWarning):  # equal samples
            clusters = KMeans(min(k, len(clean)), n_init=1, random_state=int(rng.integers(2**31))).fit(clean)
        counts = np.bincount(clusters.labels_, minlength=clusters.n_clusters)
        starts.append(Atoms(clusters.cluster_centers_, counts / len(clean)))
    return starts


def _best_maximum(z: Array, sigma: Array, few: NDArray[np.int64], starts: list[Atoms]) -> Atoms:
    """The highest maximum that climbs from `starts` reach: first on a `few` samples, then the best on all.

    Starts stay among the points that are compared: no fit is less likely than the moments' own estimate.
    """
    points = list(starts)
    for start in starts:
        weights = np.maximum(start.weights, 0.1 / len(start.weights))  # an atom of weight 0 would never move
        points.append(polish(z[few], sigma[few], Atoms(start.atoms, weights / weights.sum())))
    return polish(z, sigma, max(points, key=lambda point: log_likelihood(z, sigma, point)))


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
        raise AssayError(
            "values are too large or too small to square", key="X", cure="rescale X and sigma together"
        )
    raise AssayError(f"sample {bad} holds NaN or infinity", key="X", cure="remove or correct the sample")
