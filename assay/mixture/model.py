"""Mixtures from noisy samples, with the interface of scikit-learn."""

import warnings
from collections.abc import Callable
from itertools import cycle
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import logsumexp, softmax
from sklearn.base import BaseEstimator, DensityMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from assay.errors import AssayError
from assay.mixture.bounds import Condition, upper_conditions
from assay.mixture.deconvolve import fit_components, log_joint, posterior_means, standard_errors
from assay.mixture.estimate import Evidence, Settings, choose_number, estimate_atoms, reject_bad_rows
from assay.mixture.moments import Array, Atoms
from assay.mixture.noise import LEAST_NOISE, Noise, axis_levels, make_noise, read_sigma
from assay.mixture.npmle import Estimate

if TYPE_CHECKING:
    from PIL.Image import Image

_CHUNK = 65_536  # samples at a time when a fitted mixture is asked about them
_MAX_DRAWN = 2000  # samples of a figure


class ConditionWarning(UserWarning):
    """A hypothesis of the theorem fails: there is an estimate, but no guarantee for it."""


class NoisyMixture(DensityMixin, BaseEstimator):
    """Learns a mixture from samples X_i = Y_i + noise_i, each with its own known Gaussian noise.

    Y has k atoms, or k Gaussian components. With isotropic noise and atoms, the estimator is the one of the
    paper's theorem (`assay.mixture.estimate`). Under any other noise the likelihood is climbed from k-means;
    components with covariances are learned by EM (`assay.mixture.deconvolve`).

    Every method takes the noise as `sigma`: one number for all samples, a level per sample (n,), a level per
    sample and coordinate (n, d), or a covariance per sample (n, d, d). An infinite level or variance marks a
    coordinate that was not observed, where X may hold anything. It has the units of X: put no scaler in front.

    Parameters
    ----------
    n_components : number k of atoms; None chooses it by the likelihood.
    covariance : "zero" for atoms, "full" for components with a covariance each (extreme deconvolution).
    sigma : the noise level of every sample, unless a method is given another.
    polish : climb the likelihood to a local maximum. Without it the estimate is the theorem's own.
    num_restarts : places to climb from besides that estimate; more find a higher maximum more often.
    radius : distance from their mean within which atoms lie; None reads it off the cleanest samples.
    delta : probability of failure; sets the number of groups of the median of means.
    check_units : reject samples that a scaler has changed, and sigma has not.
    random_state : seed, generator or None, as in scikit-learn.

    Attributes
    ----------
    means_ : (k', d), the atoms or the components' means, heaviest first; k' <= k if fewer suffice.
    weights_ : (k',), their weights.
    covariances_ : (k', d, d), or None for atoms.
    radius_ : distance from their mean of the outermost atom.
    conditions_ : the hypotheses of the theorem, each with what it needs and what these samples have.
    npmle_, evidence_ : with n_components=None, the nonparametric estimate and a list of `Evidence`, by k.
    n_features_in_ : d.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> sigma = np.repeat([0.5, 2.0], 5000)                         # half of the samples are noisier
    >>> atoms = np.array([[0.0, 0.0], [4.0, 0.0], [0.0, 5.0]])
    >>> X = atoms[rng.integers(3, size=10_000)] + sigma[:, None] * rng.normal(size=(10_000, 2))
    >>> found = assay.NoisyMixture(3, random_state=0).fit(X, sigma=sigma)
    >>> np.abs(np.sort(found.means_, axis=0) - np.sort(atoms, axis=0)).max() < 0.1
    np.True_
    >>> picture = found.plot(X)
    """

    means_: Array
    weights_: Array
    covariances_: Array | None
    conditions_: list[Condition]
    npmle_: Estimate
    evidence_: list[Evidence]

    def __init__(
        self,
        n_components: int | None = 2,
        *,
        covariance: Literal["zero", "full"] = "zero",
        sigma: float | None = None,
        polish: bool = True,
        num_restarts: int = 2,
        radius: float | None = None,
        delta: float = 0.05,
        check_units: bool = True,
        random_state: Any = None,
    ) -> None:
        self.n_components = n_components
        self.covariance = covariance
        self.sigma = sigma
        self.polish = polish
        self.num_restarts = num_restarts
        self.radius = radius
        self.delta = delta
        self.check_units = check_units
        self.random_state = random_state

    def fit(self, X: ArrayLike, y: None = None, *, sigma: ArrayLike | None = None) -> "NoisyMixture":
        """Fit to samples `X` (n, d), an array or a memory-map, with their noise."""
        x, level = self._read(X, sigma, reset=True)
        settings = self._settings(len(x))
        if level.ndim > 1 and np.isinf(axis_levels(level)).all(0).any():
            raise AssayError("no sample has observed some coordinate", key="sigma", cure="leave it out of X")
        if self.check_units and level.all():  # without noise, units do not matter
            _reject_scaled(x)
        rng = np.random.default_rng(check_random_state(self.random_state).randint(2**31))
        k, guess = settings.n_components, None
        if k is None:
            guess, self.npmle_, self.evidence_ = choose_number(x, level, rng)
            k = len(guess)
        if self.covariance == "zero":
            found = estimate_atoms(x, level, k, rng, settings, guess)
        else:
            x = np.asarray(x, np.float64)
            reject_bad_rows(x, x)
            noise = make_noise(level, x.shape[1], LEAST_NOISE * (float(x.std()) or 1.0))
            found = fit_components(x, noise, k, rng)
        order = np.argsort(-found.weights, kind="stable")
        order = order[found.weights[order] > 1e-12]
        self.means_ = found.atoms[order]
        self.covariances_ = None if found.covariances is None else found.covariances[order]
        self.weights_ = found.weights[order] / found.weights[order].sum()
        self.radius_ = float(np.linalg.norm(self.means_ - self.weights_ @ self.means_, axis=1).max())
        self._check_conditions(level, k)
        return self

    def plot(self, X: ArrayLike | None = None) -> "Image":
        """A figure of the atoms, and of some of the samples `X` (n, d), in the first two dimensions."""
        from assay.figure import COLOURS, Panel, Series, draw

        panel = Panel("Atoms and their weights", "dimension 1", "dimension 2")
        pairs = zip(self.mixture_.weights, self.means_, cycle(COLOURS[1:]))
        groups = [(f"weight {weight:.3g}", atom[None], colour) for weight, atom, colour in pairs]
        if X is not None:
            x = np.asarray(X)
            groups.insert(0, ("samples", x[:: -(-len(x) // _MAX_DRAWN)], "#BBBBBB"))
        for name, points, colour in groups:
            y = points[:, 1] if points.shape[1] > 1 else np.zeros(len(points))
            panel.series.append(Series(name, "points", points[:, 0], y, colour=colour))
        return draw([panel])

    @property
    def mixture_(self) -> Atoms:
        """The fitted atoms, or means, as the distances take them."""
        check_is_fitted(self)
        return Atoms(self.means_, self.weights_, self.covariances_)

    def score_samples(self, X: ArrayLike, *, sigma: ArrayLike | None = None) -> Array:
        """Log-density of each sample under the mixture and its own noise, in nats: (n,)."""
        return self._in_chunks(X, sigma, lambda *given: logsumexp(log_joint(*given), axis=1))

    def score(
        self,
        X: ArrayLike,
        y: None = None,
        sample_weight: ArrayLike | None = None,
        *,
        sigma: ArrayLike | None = None,
    ) -> float:
        """Mean log-density of the samples, weighted if asked for, in nats: higher is better."""
        weights = None if sample_weight is None else np.asarray(sample_weight, np.float64)
        return float(np.average(self.score_samples(X, sigma=sigma), weights=weights))

    def predict_proba(self, X: ArrayLike, *, sigma: ArrayLike | None = None) -> Array:
        """Probability that each sample comes from each atom, given its noise: (n, k')."""
        return self._in_chunks(X, sigma, lambda *given: softmax(log_joint(*given), axis=1))

    def predict(self, X: ArrayLike, *, sigma: ArrayLike | None = None) -> NDArray[np.int64]:
        """Index of the most probable atom of each sample: (n,)."""
        return np.asarray(self.predict_proba(X, sigma=sigma).argmax(1))

    def posterior_mean(self, X: ArrayLike, *, sigma: ArrayLike | None = None) -> Array:
        """Denoised samples E[Y_i | X_i], (n, d); coordinates that were not observed are filled in."""
        return self._in_chunks(X, sigma, posterior_means)

    def standard_errors(self, X: ArrayLike, *, sigma: ArrayLike | None = None) -> tuple[Array, Array]:
        """Standard errors of `means_` (k', d) and `weights_` (k',), from the samples of the fit.

        They come from the information of the likelihood: for polished fits with enough samples to tell the
        atoms apart. Where samples say nothing of a number, its error is infinite.
        """
        x, noise = self._with_noise(X, sigma)
        return standard_errors(x, noise, self.mixture_)

    def sample(self, n_samples: int = 1, *, sigma: float = 0.0) -> tuple[Array, NDArray[np.int64]]:
        """Draw samples with isotropic noise `sigma`: (n, d), and the index of each one's atom, (n,)."""
        check_is_fitted(self)
        if n_samples < 1:
            raise AssayError(f"is {n_samples}", key="n_samples", cure="draw at least one")
        rng = np.random.default_rng(check_random_state(self.random_state).randint(2**31))
        label = rng.choice(len(self.weights_), n_samples, p=self.weights_)
        x = self.means_[label]
        x += sigma * rng.standard_normal(x.shape)
        for j, covariance in enumerate(self.covariances_ if self.covariances_ is not None else ()):
            x[label == j] += rng.multivariate_normal(np.zeros(x.shape[1]), covariance, (label == j).sum())
        return x, label

    # what the methods share --------------------------------------------------------------------------

    def _read(self, X: ArrayLike, sigma: ArrayLike | None, reset: bool) -> tuple[NDArray, Array]:
        """Samples as an array (memory-maps stay on disk) and their noise as `read_sigma` returns it."""
        x = validate_data(self, X, reset=reset, dtype="numeric", ensure_all_finite=False)
        if x.dtype.kind not in "fiu":
            raise AssayError(f"has type {x.dtype}, not numbers", key="X")
        given = self.sigma if sigma is None else sigma
        if given is None:
            cure = "give it to this method or to NoisyMixture; in a pipeline, call set_fit_request(sigma=True)"
            raise AssayError("is missing", key="sigma", cure=cure)
        level = read_sigma(given, *x.shape)
        if level.ndim > 1:
            x = np.where(np.isinf(axis_levels(level)), 0.0, x)
            reject_bad_rows(x, x)
        return x, level

    def _settings(self, num_samples: int) -> Settings:
        """The parameters, after checking them."""
        given = {name: getattr(self, name) for name in Settings.model_fields}
        plain = {name: v.item() if isinstance(v, np.generic) else v for name, v in given.items()}
        settings = Settings(**plain)
        if settings.covariance == "full" and settings.n_components is None:
            raise AssayError("is None", key="n_components", cure="give a number for covariance = 'full'")
        k = settings.n_components or 1
        if num_samples < 2 * k:
            what = f"has {num_samples} samples, too few for {k} atoms"
            raise AssayError(what, key="X", cure="give two samples per atom, or look for fewer")
        return settings

    def _check_conditions(self, level: Array, k: int) -> None:
        """The theorem's hypotheses, if it applies to this fit, with a warning for those that fail."""
        self.conditions_ = []
        if self.covariance == "full":
            return
        if level.ndim > 1:  # isotropic noise of the largest variance would be worse
            largest = level.max(1) if level.ndim == 2 else np.sqrt(axis_levels(level).sum(1))
            level = largest[np.isfinite(largest)]
        if len(level):
            self.conditions_ = upper_conditions(level, self.n_features_in_, k, self.delta, self.radius_)
        for condition in self.conditions_[:2]:  # the last, sigma >= R, is not needed for the guarantee
            if not condition.holds:
                message = f"{condition}; the theorem's guarantee does not apply"
                warnings.warn(message, ConditionWarning, stacklevel=3)

    def _with_noise(self, X: ArrayLike, sigma: ArrayLike | None) -> tuple[NDArray, Noise]:
        check_is_fitted(self)
        x, level = self._read(X, sigma, reset=False)
        return x, make_noise(level, x.shape[1], LEAST_NOISE * (self.radius_ or 1.0))

    def _in_chunks(
        self, X: ArrayLike, sigma: ArrayLike | None, ask: Callable[[Array, Noise, Atoms], Array]
    ) -> Array:
        x, noise = self._with_noise(X, sigma)
        rows = [slice(start, start + _CHUNK) for start in range(0, len(x), _CHUNK)]
        parts = [ask(np.asarray(x[each], np.float64), noise[each], self.mixture_) for each in rows]
        answer = np.concatenate(parts)
        reject_bad_rows(x, answer)
        return answer


def _reject_scaled(x: NDArray) -> None:
    """Reject samples that a scaler of scikit-learn has left: sigma would be in other units than X.

    A scaler leaves exact traces in every column: mean 0 and variance 1, least 0 and largest 1, largest size 1,
    or median 0 and quartiles 1 apart. A few rows rule most of that out before all are read.
    """
    few = np.asarray(x[:: max(1, len(x) // 1000)], np.float64)
    for name, trace in _TRACES.items():
        if _is_zero(trace(few), 0.5) and _is_zero(trace(np.asarray(x, np.float64)), 1e-6):
            what = f"looks like the output of {name}, so that sigma is in other units than X"
            cure = "leave the scaler out (a fit needs none), or scale sigma too and set check_units=False"
            raise AssayError(what, key="X", cure=cure)


def _is_zero(values: list[Array], tolerance: float) -> bool:
    return bool((np.abs(values) < tolerance).all())


_TRACES: dict[str, Callable[[Array], list[Array]]] = {
    "StandardScaler": lambda x: [x.mean(0), x.std(0) - 1],
    "MinMaxScaler": lambda x: [x.min(0), x.max(0) - 1],
    "MaxAbsScaler": lambda x: [np.abs(x).max(0) - 1],
    "RobustScaler": lambda x: [np.median(x, 0), np.subtract(*np.quantile(x, [0.75, 0.25], axis=0)) - 1],
}
