"""The estimator of the paper's main theorem: atoms and weights from samples with isotropic noise.

Algorithm "High-dimensional Gaussian Mixtures": half of the samples find the subspace of the atoms, the other
half, projected onto it, their places and weights by denoised moments. Then, unless `polish` is off, the
likelihood of all samples is maximised from there.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import KMeans

from assay.mixture.likelihood import Maximum, polish, polish_all
from assay.mixture.moments import Array, Atoms, denoised_moments, inverse_weights
from assay.mixture.search import Marginals, choose_caution, exhaustive_search, scalable_search
from assay.mixture.subspace import cleanest, find_subspace

_CLEANEST = 1000  # samples per atom that the atoms' radius is read off
_SUBSAMPLE = 20_000  # on which the likelihood is first maximised
LEAST_NOISE = 1e-6  # of the radius: a sample without noise would have infinite precision
_LARGEST = 1e140  # its square, and that of a millionth of its inverse, are still floating-point numbers


@dataclass(frozen=True)
class Settings:
    """How the estimator works; see `NoisyMixture`."""

    search: Literal["scalable", "exhaustive"] = "scalable"
    polish: bool = True
    split: bool = True
    radius: float | None = None
    delta: float = 0.05


def estimate_atoms(
    x: NDArray,
    sigma: Array,
    k: int,
    rng: np.random.Generator,
    settings: Settings,
    guess: Array | None = None,
) -> Atoms:
    """At most k atoms and their weights, from samples `x` (n, d) with noise `sigma` (n,).

    `guess` (k, d) is one more place to climb the likelihood from.
    """
    if k == 1:  # the mean with weights sigma^-2, which is the maximum of the likelihood too
        mean = denoised_moments(x, sigma, 1, inverse_weights(sigma**2))[1]
        reject_bad_rows(x, mean)
        return Atoms(mean[None], np.ones(1))
    num_samples = len(x)
    shuffled = rng.permutation(num_samples)
    half = num_samples // 2 if settings.split else 0
    chosen = None
    if settings.split:
        chosen = np.zeros(num_samples, bool)
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
    reject_bad_rows(x, z if size == 0 or 1 / _LARGEST < size < _LARGEST else np.full(1, np.nan))
    rest = shuffled[half:]
    radius = settings.radius if settings.radius is not None else _radius(z[rest], sigma[rest], k)
    found = _moment_estimate(z[rest] / radius, sigma[rest] / radius, k, settings)
    found = Atoms(found.atoms * radius, found.weights)
    if not settings.polish:
        return Atoms(subspace.lift(found.atoms), found.weights)
    level = np.maximum(sigma, LEAST_NOISE * radius)
    # A few samples without noise may weigh more than all others together: they belong to the subsample.
    few = np.union1d(rest[:_SUBSAMPLE], cleanest(sigma, 100))
    starts = [found]
    if guess is not None:
        starts.append(Atoms(subspace.project(guess), np.full(len(guess), 1 / len(guess))))
    maximum = _best_maximum(z[few], level[few], k, starts, rng)
    return polish_all(x, level, maximum, subspace)


def _moment_estimate(z: Array, sigma: Array, k: int, settings: Settings) -> Atoms:
    """Atoms and weights by moments, from samples `z` (n, r) in units of the ball that holds the atoms.

    Whatever the caution, the theorem's guarantee holds up to the constant; a polish needs no better start.
    """
    num_groups = math.ceil(math.log(1 / settings.delta) + k * math.log(k))
    search = exhaustive_search if settings.search == "exhaustive" else scalable_search
    caution = 10.0 if settings.polish else choose_caution(z, sigma, k, num_groups)
    return search(Marginals(z, sigma, k, num_groups, caution))


def _best_maximum(z: Array, sigma: Array, k: int, starts: list[Atoms], rng: np.random.Generator) -> Maximum:
    """The highest maximum of the likelihood of a subsample that climbs from `starts` reach.

    One more start is k-means of the cleanest samples, where many atoms make moments of high order, and so the
    estimate from them, unreliable.
    """
    if k > 3 or len(starts[0].atoms) < k:
        clean = z[np.argsort(sigma, kind="stable")[: 200 * k]]
        clusters = KMeans(min(k, len(clean)), n_init=1, random_state=int(rng.integers(2**31))).fit(clean)
        counts = np.bincount(clusters.labels_, minlength=clusters.n_clusters)
        starts = [*starts, Atoms(clusters.cluster_centers_, counts / len(clean))]
    maxima = []
    for start in starts:
        weights = np.maximum(start.weights, 0.1 / k)  # an atom of weight 0 would never move
        maxima.append(polish(z, sigma, Atoms(start.atoms, weights / weights.sum())))
    return max(maxima, key=lambda maximum: maximum.log_likelihood)


def _radius(z: Array, sigma: Array, k: int) -> float:
    """Largest distance from the mean among the cleanest samples: half of an extreme atom's are beyond it."""
    radius = float(np.linalg.norm(z[cleanest(sigma, _CLEANEST * k)], axis=1).max())
    return radius if radius > 0 else 1.0


def reject_bad_rows(x: NDArray, computed: Array) -> None:
    """If `computed` is not finite: name the first sample that is not, or blame the size of the values."""
    if not np.isfinite(computed).all():
        bad = next((i for i, row in enumerate(x) if not np.isfinite(row).all()), None)
        if bad is None:
            raise ValueError("values are too large or too small to square: rescale X and sigma together")
        raise ValueError(f"X[{bad}] holds NaN or infinity: remove or correct the sample")
