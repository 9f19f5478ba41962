"""Mixtures from noisy samples, with the interface of scikit-learn."""

from collections.abc import Callable
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL.Image import Image
from sklearn.base import BaseEstimator, DensityMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from assay.errors import AssayError, AssayWarning, check, check_enough, warn
from assay.mixture.bounds import upper_conditions
from assay.mixture.estimate import LEAST_NOISE, choose_number, estimate_atoms
from assay.mixture.likelihood import posterior, standard_errors
from assay.mixture.moments import Array, Atoms
from assay.mixture.samples import LARGEST, check_sigma


class ConditionWarning(AssayWarning):
    """A hypothesis of the theorem fails: there is an estimate, but no guarantee for it."""


class NoisyMixture(DensityMixin, BaseEstimator):
    """Learns a mixture of k atoms from samples X_i = Y_i + sigma_i g_i, each with its own known noise level.

    The estimator is the one of the paper's theorem, see `assay.mixture.estimate`. Every method takes the noise
    as `sigma`: a level per sample (n,), or one number for all. It has the units of X: put no scaler in front.

    Parameters
    ----------
    n_components : number k of atoms; None chooses it by the likelihood.
    sigma : the noise level of every sample, unless a method is given another.
    polish : climb the likelihood to a local maximum. Without it the estimate is the theorem's own.
    num_restarts : places to climb from besides that estimate; more find a higher maximum more often.
    delta : probability of failure; sets the number of groups of the median of means.
    check_units : reject samples that a scaler has changed, and sigma has not.
    random_state : seed, generator or None, as in scikit-learn.

    Attributes
    ----------
    means_ : (k', d), the atoms, heaviest first; k' <= k if fewer suffice.
    weights_ : (k',), their weights.
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

    def __init__(
        self, n_components: int | None = 2, *, sigma: float | None = None, polish: bool = True,
        num_restarts: int = 2, delta: float = 0.05, check_units: bool = True, random_state: Any = None,
    ) -> None:  # fmt: skip
        self.n_components = n_components
        self.sigma = sigma
        self.polish = polish
        self.num_restarts = num_restarts
        self.delta = delta
        self.check_units = check_units
        self.random_state = random_state

    def fit(self, X: ArrayLike, y: None = None, *, sigma: ArrayLike | None = None) -> "NoisyMixture":
        """Fit to samples `X` (n, d), an array or a memory-map, with their noise."""
        x, level = self._read(X, sigma, reset=True)
        self._check_parameters(len(x))
        if self.check_units and level.all():  # without noise, units do not matter
            _reject_scaled(x)
        rng = np.random.default_rng(check_random_state(self.random_state).randint(2**31))
        k, guess = self.n_components, None
        if k is None:
            guess, self.npmle_, self.evidence_ = choose_number(x, level, rng)
            k = len(guess)
        found = estimate_atoms(x, level, k, rng, self.polish, self.num_restarts, self.delta, guess)
        order = np.argsort(-found.weights, kind="stable")
        order = order[found.weights[order] > 1e-12]
        self.means_ = found.atoms[order]
        self.weights_ = found.weights[order] / found.weights[order].sum()
        self.radius_ = float(np.linalg.norm(self.means_ - self.weights_ @ self.means_, axis=1).max())
        self.conditions_ = upper_conditions(level, self.n_features_in_, k, self.delta, self.radius_)
        for condition in self.conditions_[:2]:  # the last, sigma >= R, is not needed for the guarantee
            if not condition.holds:
                warn(f"{condition}; the theorem's guarantee does not apply", ConditionWarning)
        return self

    def plot(self, X: ArrayLike) -> Image:
        """A figure of the atoms, and of some of the samples `X` (n, d), in the first two dimensions."""
        from assay.figure import COLOURS, Panel, Series, draw

        panel = Panel("Atoms and their weights", "dimension 1", "dimension 2")
        x = np.asarray(X)
        groups = [("samples", x[:: max(1, len(x) // 2000)], "#BBBBBB")]
        for j, (weight, atom) in enumerate(zip(self.weights_, self.means_, strict=True)):
            groups.append((f"weight {weight:.3g}", atom[None], COLOURS[1 + j % (len(COLOURS) - 1)]))
        for name, points, colour in groups:
            first, second = np.column_stack([points, np.zeros(len(points))]).T[:2]
            panel.series.append(Series(name, "points", first, second, colour=colour))
        return draw([panel])

    @property
    def mixture_(self) -> Atoms:
        """The fitted atoms as the distances take them."""
        check_is_fitted(self)
        return Atoms(self.means_, self.weights_)

    def score_samples(self, X: ArrayLike, *, sigma: ArrayLike | None = None) -> Array:
        """Log-density of each sample under the mixture and its own noise, in nats: (n,)."""
        return posterior(*self._given(X, sigma))[1]

    def score(
        self, X: ArrayLike, y: None = None, sample_weight: ArrayLike | None = None, *,
        sigma: ArrayLike | None = None,
    ) -> float:  # fmt: skip
        """Mean log-density of the samples, in nats: higher is better. A pipeline may pass a `sample_weight`."""
        weights = None if sample_weight is None else np.asarray(sample_weight, np.float64)
        return float(np.average(self.score_samples(X, sigma=sigma), weights=weights))

    def predict_proba(self, X: ArrayLike, *, sigma: ArrayLike | None = None) -> Array:
        """Probability that each sample comes from each atom, given its noise: (n, k')."""
        return posterior(*self._given(X, sigma))[0]

    def predict(self, X: ArrayLike, *, sigma: ArrayLike | None = None) -> NDArray[np.int64]:
        """Index of the most probable atom of each sample: (n,)."""
        return np.asarray(self.predict_proba(X, sigma=sigma).argmax(1))

    def posterior_mean(self, X: ArrayLike, *, sigma: ArrayLike | None = None) -> Array:
        """Denoised samples E[Y_i | X_i]: (n, d)."""
        return self.predict_proba(X, sigma=sigma) @ self.means_

    def standard_errors(self, X: ArrayLike, *, sigma: ArrayLike | None = None) -> tuple[Array, Array]:
        """Standard errors of `means_` (k', d) and `weights_` (k',), from the samples of the fit.

        They hold for polished fits that tell the atoms apart; what samples do not show has an infinite error.
        """
        return standard_errors(*self._given(X, sigma))

    def sample(self, n_samples: int = 1, *, sigma: float = 0.0) -> tuple[Array, NDArray[np.int64]]:
        """Draw samples with noise `sigma`: (n, d), and the index of each one's atom, (n,)."""
        check_is_fitted(self)
        if n_samples < 1:
            raise AssayError(f"is {n_samples}", key="n_samples", cure="draw at least one")
        rng = np.random.default_rng(check_random_state(self.random_state).randint(2**31))
        label = rng.choice(len(self.weights_), n_samples, p=self.weights_)
        x = self.means_[label]
        return x + sigma * rng.standard_normal(x.shape), label

    def _given(self, X: ArrayLike, sigma: ArrayLike | None) -> tuple[NDArray, Array, Atoms]:
        """Samples, their levels, and the fitted atoms."""
        mixture, (x, level) = self.mixture_, self._read(X, sigma, reset=False)
        return x, np.maximum(level, LEAST_NOISE * (self.radius_ or 1.0)), mixture

    def _read(self, X: ArrayLike, sigma: ArrayLike | None, reset: bool) -> tuple[NDArray, Array]:
        """Samples as an array (memory-maps stay on disk) and their levels (n,), after checking both."""
        x = validate_data(self, X, reset=reset, dtype="numeric", ensure_all_finite=False)
        if x.dtype.kind not in "fiu":
            raise AssayError(f"has type {x.dtype}, not numbers", key="X")
        given = self.sigma if sigma is None else sigma
        if given is None:
            cure = "give it to this method or to NoisyMixture; in a pipeline, call set_fit_request(sigma=True)"
            raise AssayError("is missing", key="sigma", cure=cure)
        level, size = check_sigma(given, len(x)), max(float(x.max()), -float(x.min()))
        if not np.isfinite(size):
            what = f"sample {int((~np.isfinite(x)).any(1).argmax())} holds NaN or infinity"
            raise AssayError(what, key="X", cure="remove or correct the sample")
        if size >= LARGEST or 0 < size <= 1 / LARGEST:
            what = "has values too large or too small to square"
            raise AssayError(what, key="X", cure="rescale X and sigma together")
        return x, level

    def _check_parameters(self, num_samples: int) -> None:
        k, count = self.n_components, self.num_restarts
        rules = {
            "n_components": (k is None or (isinstance(k, Integral) and k >= 1), "give a number >= 1, or None"),
            "num_restarts": (isinstance(count, Integral) and count >= 0, "give a number >= 0"),
            "delta": (0 < self.delta < 0.5, "give a probability below 0.5"),
        }
        given = self.get_params()
        check(
            (not holds, AssayError(f"is {given[k]!r}", key=k, cure=cure)) for k, (holds, cure) in rules.items()
        )
        check_enough(num_samples, 2 * (k or 1), f"samples for {k or 1} atoms", "X")


# A scaler of scikit-learn leaves exact traces in every column: these are 0.
_TRACES: dict[str, Callable[[Array], list[Array]]] = {
    "StandardScaler": lambda x: [x.mean(0), x.std(0) - 1],
    "MinMaxScaler": lambda x: [x.min(0), x.max(0) - 1],
    "MaxAbsScaler": lambda x: [np.abs(x).max(0) - 1],
    "RobustScaler": lambda x: [np.median(x, 0), np.subtract(*np.quantile(x, [0.75, 0.25], axis=0)) - 1],
}


def _reject_scaled(x: NDArray) -> None:
    """Reject samples that a scaler has left: sigma would be in other units than X."""
    few = x[:: max(1, len(x) // 1000)]  # these rule most of it out before all are read
    for name, trace in _TRACES.items():
        sizes = (np.abs(trace(np.asarray(rows, np.float64))).max() for rows in (few, x))
        if all(size < most for size, most in zip(sizes, (0.5, 1e-6), strict=True)):
            what = f"looks like the output of {name}, so that sigma is in other units than X"
            cure = "leave the scaler out (a fit needs none), or scale sigma too and set check_units=False"
            raise AssayError(what, key="X", cure=cure)
