"""The estimator of the paper's main theorem, with the interface of scikit-learn."""

import math
import warnings
from numbers import Integral
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator
from sklearn.cluster import KMeans
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted

from assay.mixture.bounds import check_sigma, upper_conditions
from assay.mixture.likelihood import Maximum, polish, polish_all
from assay.mixture.moments import Array, Atoms, denoised_moments, inverse_weights
from assay.mixture.search import Marginals, choose_caution, exhaustive_search, scalable_search
from assay.mixture.subspace import cleanest, find_subspace

_CLEANEST = 1000  # samples per atom that the atoms' radius is read off
_SUBSAMPLE = 20_000  # on which the likelihood is first maximised
_LEAST_NOISE = 1e-6  # of the radius: a sample without noise would have infinite precision
_LARGEST = 1e140  # its square, and that of a millionth of its inverse, are still floating-point numbers


class ConditionWarning(UserWarning):
    """A hypothesis of the theorem fails: the estimate stands, its guarantee does not."""


class NoisyMixture(BaseEstimator):
    """Learns a k-atomic distribution from samples X_i = Y_i + sigma_i g_i, each with its own known noise
    sigma_i.

    Algorithm "High-dimensional Gaussian Mixtures": half of the samples find the subspace of the atoms, the
    other half, projected onto it, their places and weights by denoised moments. Then, unless `polish` is off,
    the likelihood of all samples is maximised from there.

    Parameters
    ----------
    n_components : number k of atoms.
    search : "scalable" or "exhaustive", the paper's own search, which is feasible for k <= 3.
    polish : maximise the likelihood afterwards. Without it the estimate is the one the theorem speaks of.
    split : find the subspace on one half of the samples and the rest on the other, as the theorem asks.
    radius : distance from their mean within which atoms lie; None reads it off the cleanest samples.
    delta : probability of failure; sets the number of groups of the median of means.
    random_state : seed, generator or None, as in scikit-learn.

    Attributes
    ----------
    means_ : (k', d), the atoms, heaviest first; k' <= k if fewer suffice.
    weights_ : (k',), their weights.
    radius_ : distance from their mean of the outermost atom.
    conditions_ : the hypotheses of the theorem, each with what it needs and what these samples have.
    n_features_in_ : d.
    """

    means_: Array
    weights_: Array

    def __init__(
        self,
        n_components: int = 2,
        *,
        search: Literal["scalable", "exhaustive"] = "scalable",
        polish: bool = True,
        split: bool = True,
        radius: float | None = None,
        delta: float = 0.05,
        random_state: Any = None,
    ) -> None:
        self.n_components = n_components
        self.search = search
        self.polish = polish
        self.split = split
        self.radius = radius
        self.delta = delta
        self.random_state = random_state

    def fit(self, X: ArrayLike, y: None = None, *, sigma: ArrayLike | None = None) -> "NoisyMixture":
        """Fit to samples `X` (n, d), an array or a memory-map, with noise levels `sigma` (n,) or one number."""
        x, level = self._checked(X, sigma)
        k, num_features = self.n_components, x.shape[1]
        self.n_features_in_ = num_features
        rng = np.random.default_rng(check_random_state(self.random_state).randint(2**31))
        found = self._fit(x, level, rng) if k > 1 else self._fit_one(x, level)
        order = np.argsort(-found.weights, kind="stable")
        order = order[found.weights[order] > 1e-12]
        self.means_, self.weights_ = found.atoms[order], found.weights[order] / found.weights[order].sum()
        self.radius_ = float(np.linalg.norm(self.means_ - self.weights_ @ self.means_, axis=1).max())
        self.conditions_ = upper_conditions(level, num_features, k, self.delta, self.radius_)
        for condition in self.conditions_[:2]:  # the last, sigma >= R, is not needed for the guarantee
            if not condition.holds:
                warnings.warn(
                    f"{condition}; the theorem's guarantee does not apply", ConditionWarning, stacklevel=2
                )
        return self

    @property
    def mixture_(self) -> Atoms:
        """The fitted distribution, as the distances take it."""
        check_is_fitted(self)
        return Atoms(self.means_, self.weights_)

    def _checked(self, samples: ArrayLike, sigma: ArrayLike | None) -> tuple[NDArray, Array]:
        """Samples as an array (memory-maps stay on disk) and one level per sample, or a sentence why not."""
        x = samples if isinstance(samples, np.ndarray) else np.asarray(samples)
        if x.ndim != 2 or x.dtype.kind not in "fiu" or 0 in x.shape:
            raise ValueError(
                f"X has shape {x.shape} and type {x.dtype}; expected numbers (num_samples, num_features), "
                "a line of samples as X.reshape(-1, 1)"
            )
        if sigma is None:
            raise ValueError("sigma is missing: give the noise level of each sample, or one number for all")
        level = np.full(len(x), sigma, np.float64) if np.ndim(sigma) == 0 else np.asarray(sigma)
        level = check_sigma(level)
        if len(level) != len(x):
            raise ValueError(f"X has {len(x)} samples, sigma {len(level)} levels: expected one per sample")
        k = self.n_components
        if not isinstance(k, Integral) or isinstance(k, bool) or k < 1:
            raise ValueError(f"n_components = {k!r}: give a whole number of atoms, at least one atom")
        if self.search not in ("scalable", "exhaustive"):
            raise ValueError(f"search = {self.search!r}: choose 'scalable' or 'exhaustive'")
        if self.radius is not None and not 0 < self.radius < math.inf:
            raise ValueError(f"radius = {self.radius}: give a finite number > 0, or None to read it off X")
        if len(x) < 2 * self.n_components:
            raise ValueError(f"{len(x)} samples are too few for {self.n_components} atoms: need two per atom")
        return x, level

    def _fit_one(self, x: NDArray, sigma: Array) -> Atoms:
        """One atom: the mean with weights sigma^-2, which is the maximum of the likelihood too."""
        mean = denoised_moments(x, sigma, 1, inverse_weights(sigma**2))[1]
        _refuse_bad_rows(x, mean)
        return Atoms(mean[None], np.ones(1))

    def _fit(self, x: NDArray, sigma: Array, rng: np.random.Generator) -> Atoms:
        k, num_samples = self.n_components, len(x)
        shuffled = rng.permutation(num_samples)
        half = num_samples // 2 if self.split else 0
        chosen = None
        if self.split:
            chosen = np.zeros(num_samples, bool)
            chosen[shuffled[:half]] = True
        try:
            with np.errstate(over="ignore", invalid="ignore"):  # a sentence follows instead
                subspace = find_subspace(x, sigma, min(k - 1, x.shape[1]), rng, chosen)
        except np.linalg.LinAlgError:
            _refuse_bad_rows(x, np.full(1, np.nan))
            raise
        z = subspace.project(x)
        # Beyond these sizes the squares that follow would be infinite or 0; equal samples are fine.
        size = np.abs(z).max()
        _refuse_bad_rows(x, z if size == 0 or 1 / _LARGEST < size < _LARGEST else np.full(1, np.nan))
        rest = shuffled[half:]
        radius = self.radius if self.radius is not None else _radius(z[rest], sigma[rest], k)
        found = self._moment_estimate(z[rest] / radius, sigma[rest] / radius)
        found = Atoms(found.atoms * radius, found.weights)
        if not self.polish:
            return Atoms(subspace.lift(found.atoms), found.weights)
        level = np.maximum(sigma, _LEAST_NOISE * radius)
        # A few samples without noise may weigh more than all others together: they belong to the subsample.
        few = np.union1d(rest[:_SUBSAMPLE], cleanest(sigma, 100))
        maximum = self._best_start(z[few], level[few], found, rng)
        return polish_all(x, level, maximum, subspace)

    def _moment_estimate(self, z: Array, sigma: Array) -> Atoms:
        """Atoms and weights by moments, from samples `z` (n, r) in units of the ball that holds the atoms.

        Whatever the caution, the theorem's guarantee holds up to the constant; a polish needs no better start.
        """
        k = self.n_components
        num_groups = math.ceil(math.log(1 / self.delta) + k * math.log(k))
        search = exhaustive_search if self.search == "exhaustive" else scalable_search
        caution = 10.0 if self.polish else choose_caution(z, sigma, k, num_groups)
        return search(Marginals(z, sigma, k, num_groups, caution))

    def _best_start(self, z: Array, sigma: Array, found: Atoms, rng: np.random.Generator) -> Maximum:
        """Climb the likelihood of a subsample from the moment estimate; from k-means of its cleanest samples
        too

        where many atoms make moments of high order, and so that estimate, unreliable. The higher maximum wins.
        """
        k = self.n_components
        weights = np.maximum(found.weights, 0.1 / k)  # an atom of weight 0 would never move
        best = polish(z, sigma, Atoms(found.atoms, weights / weights.sum()))
        if k > 3 or len(found.atoms) < k:
            cleanest = z[np.argsort(sigma, kind="stable")[: 200 * k]]
            clusters = KMeans(min(k, len(cleanest)), n_init=1, random_state=int(rng.integers(2**31))).fit(
                cleanest
            )
            weights = np.bincount(clusters.labels_, minlength=clusters.n_clusters) / len(cleanest)
            other = polish(z, sigma, Atoms(clusters.cluster_centers_, weights))
            best = other if other.log_likelihood > best.log_likelihood else best
        return best


def _radius(z: Array, sigma: Array, k: int) -> float:
    """Largest distance from the mean among the cleanest samples: half of an extreme atom's are beyond it."""
    radius = float(np.linalg.norm(z[cleanest(sigma, _CLEANEST * k)], axis=1).max())
    return radius if radius > 0 else 1.0


def _refuse_bad_rows(x: NDArray, computed: Array) -> None:
    """If `computed` is not finite: name the first sample that is not, or blame the size of the values."""
    if not np.isfinite(computed).all():
        bad = next((i for i, row in enumerate(x) if not np.isfinite(row).all()), None)
        if bad is None:
            raise ValueError("values are too large or too small to square: rescale X and sigma together")
        raise ValueError(f"X[{bad}] holds NaN or infinity: remove or correct the sample")
