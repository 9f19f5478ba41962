"""A law for the result of a model trained on n_clean clean and n_noisy(sigma) noisy images.

With n in units of `num_images` (the largest total of the table),

    value = floor + amplitude n_eff^-exponent + details / n_clean,
    n_eff = n_clean + sum over sigma of c(sigma) n_noisy(sigma),
    c(sigma) = (1 + (sigma / sigma_floor)^2)^-steepness.

Levels of noise above an image's own are taught by every image: a noisy one counts as c(sigma) clean ones.
What lies below it only clean images can show; that error falls at the parametric rate 1 / n_clean. So the
first clean images are worth much more than c says, and without any the law gives infinity. It is convex and
falls in every count, which makes the budget planner exact.

So c is a weight inside the law, and not the number of noisy images that replace a clean one. That price, which
the `bounds` and the `curve` are about, compares a mix with the a clean images that give the same result alone,

    value(a, 0) = value(n_clean, n_noisy),        price = n_noisy / (a - n_clean),

and is higher than 1 / c, the more so the fewer clean images the mix has (`Law.equal_clean`).

The form was chosen among 19 with all of the paper's tables in view, its two extreme rows included: they test
the fit, which never sees them, but not the choice of the form.

In the theory c is the whole price: with clean images of noise sigma_floor, an image of total variance
sigma_floor^2 + sigma^2 weighs 1 / sigma_i^(4k - 2) in n_l, so steepness = 2k - 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from assay.pricing.table import Array, Comparable

PARAMETERS = ("floor", "amplitude", "exponent", "sigma_floor", "steepness", "details")
MIN_ROWS = 5  # leaving one out leaves four
_MAX_ROWS = 1000  # six numbers need no more rows; an even sample is fitted beyond
_MAX_LEFT_OUT = 200  # real leave-one-out up to here, ten folds beyond
# A weak prior on the logarithms keeps tables of few rows, or of one sigma, from running off to infinity.
# One prior standard deviation costs as much as one row that is off by its scale.
_PRIOR_STD = np.array([2.0, 2.0, 1.0, 1.5, 1.5, 3.0])
# Scatter of log value to expect before seeing any, and how many rows that expectation is worth.
_USUAL_SCATTER, _USUAL_ROWS = 0.02, 2.0


@dataclass(frozen=True)
class Prediction:
    """Predicted result of a setting, the interval in which a new run falls, and why it may be a guess."""

    value: float
    low: float
    high: float
    extrapolates: tuple[str, ...]


@dataclass(frozen=True)
class LeftOut:
    """The law at the rows of its table (n,): fitted, and predicted by a law fitted to the other rows.

    `extrapolates` says why predicting a left-out row is an extrapolation; empty if it is not.
    """

    fitted: Array
    predicted: Array
    error: Array  # |predicted / value - 1|
    extrapolates: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Law:
    """A fitted law; `parameters` (6,) in the order of PARAMETERS, `draws` (R, 6) from the bootstrap.

    `scatter` (R,) are residuals of log value, one for each draw: how far a new run may be off its law.
    """

    parameters: Array
    draws: Array
    scatter: Array
    num_images: float
    confidence: float
    seen: dict[str, tuple[float, float]]

    def as_dict(self) -> dict[str, float]:
        """The numbers of the formula by name; all that is needed to recompute it elsewhere."""
        return dict(zip(PARAMETERS, map(float, self.parameters), strict=True)) | {"num_images": self.num_images}

    def weight(self, sigma: ArrayLike) -> Array:
        """c(sigma): how much a noisy image adds to n_eff, elementwise."""
        return _weight(self.parameters, np.asarray(sigma, float))

    def weight_interval(self, sigma: float) -> tuple[float, float]:
        """Bootstrap interval of c(sigma) at `confidence`."""
        return self.interval(_weight(self.draws[:, None], np.array([sigma]))[:, 0])

    def equal_clean(self, num_clean: ArrayLike, num_noisy: ArrayLike, sigma: float) -> tuple[Array, Array]:
        """How many clean images alone give the result of mixes (m,): by the fit (m,), and the draws (R, m)."""
        theta = np.vstack([self.parameters, self.draws])[:, None]
        clean, noisy = (np.asarray(count, float) / self.num_images for count in (num_clean, num_noisy))
        # Between n_clean, where the noisy images are missed, and n_eff, with more details than the mix shows.
        low = np.broadcast_to(clean, np.broadcast_shapes(clean.shape, theta.shape[:-1]))
        high = low + _weight(theta, np.asarray(sigma)) * noisy
        target = _value(theta, low, high)
        for _ in range(60):
            middle = np.sqrt(low * high)
            too_few = _value(theta, middle, middle) > target
            low, high = np.where(too_few, middle, low), np.where(too_few, high, middle)
        equal = np.sqrt(low * high) * self.num_images
        return equal[0], equal[1:]

    def value(self, num_clean: ArrayLike, num_noisy: ArrayLike, sigma: ArrayLike) -> Array:
        """Results of settings (...,) with noisy images of one level each."""
        clean = np.asarray(num_clean, float)
        return self.value_of_sizes(clean, clean + self.weight(sigma) * np.asarray(num_noisy))

    def value_of_sizes(self, num_clean: ArrayLike, effective: ArrayLike) -> Array:
        """Results from the number of clean images and the effective size n_eff, elementwise."""
        unit = self.num_images
        return _value(self.parameters, np.asarray(num_clean) / unit, np.asarray(effective) / unit)

    def slopes(self, num_clean: float, effective: float) -> tuple[float, float]:
        """Derivatives of the result by n_clean at fixed n_eff, and by n_eff."""
        law, clean, size = self.as_dict(), num_clean / self.num_images, effective / self.num_images
        by_effective = -law["exponent"] * law["amplitude"] * size ** (-law["exponent"] - 1)
        return -law["details"] / clean**2 / self.num_images, by_effective / self.num_images

    def predict(self, num_clean: float, noisy: Sequence[tuple[float, float]] = ()) -> Prediction:
        """The result of a run on `num_clean` clean images and (count, sigma) pairs of noisy ones."""
        counts, sigmas = np.array(noisy, float).reshape(-1, 2).T
        theta = np.vstack([self.parameters, self.draws])
        effective = num_clean + _weight(theta[:, None], sigmas) @ counts
        value = _value(theta[:, None], num_clean / self.num_images, effective[:, None] / self.num_images)[:, 0]
        # Each draw of the law is paired with a residual: parameters and runs are both uncertain.
        low, high = self.interval(value[1:] * np.exp(self.scatter))
        used = sigmas[counts > 0]
        reasons = _extrapolates(self.seen, num_clean, effective[0], used.max() if used.size else 0.0)
        return Prediction(float(value[0]), low, high, reasons)

    def interval(self, values: Array) -> tuple[float, float]:
        """The interval of a quantity at `confidence`, from its values (R,) for the draws."""
        tail = 50 * (1 - self.confidence)
        low, high = np.percentile(values, [tail, 100 - tail], method="inverted_cdf")
        return float(low), float(high)


def fit_law(results: Comparable, confidence: float = 0.95, num_draws: int = 400, seed: int = 0) -> Law:
    """Fit the law to a table in log value with a soft L1 loss; bootstrap intervals from `num_draws` refits.

    Each refit sees the fitted curve plus resampled residuals, made unbiased for the leverage of their rows
    and multiplied by a random scale sqrt(df / chi^2_df), as in Student's t: a short table knows its own
    scatter only roughly. The prior's centre is drawn again as well, around the fit, so that what the table
    leaves open stays open in the intervals.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence = {confidence:g}: a confidence is between 0 and 1")
    if len(results) < MIN_ROWS:
        raise ValueError(too_few_rows(results))
    data = _Data(results)
    theta = data.fit()
    fitted, slope = data.log_value(theta)
    residual = (data.target - fitted) / data.scale
    weight = 1 / np.sqrt(1 + residual**2)
    slope = slope / data.scale[:, None]
    hessian = (slope * weight[:, None]).T @ slope + np.diag(data.prior_std**-2.0)
    leverage = np.einsum("np,pq,nq->n", slope, np.linalg.inv(hessian), slope) * weight
    residual = residual / np.sqrt((1 - leverage).clip(0.1))
    residual -= residual.mean()
    freedom = max(len(residual) - leverage.sum(), 1.0)
    generator = np.random.default_rng(seed)
    # One column more than rows: the last one is the scatter of a run yet to be made.
    noise = generator.choice(residual, (num_draws, len(residual) + 1))
    noise *= np.sqrt(freedom / generator.chisquare(freedom, (num_draws, 1)))
    prior = theta + data.prior_std * generator.standard_normal((num_draws, len(theta)))
    draws, _ = data.minimise(np.tile(theta, (num_draws, 1)), fitted + noise[:, :-1] * data.scale, prior)
    scatter, theta = noise[:, -1] * np.median(data.scale), np.exp(theta)
    return Law(theta, np.exp(draws), scatter, data.num_images, confidence, _seen(results, theta))


def too_few_rows(results: Comparable) -> str:
    """Why a table is too short for a law, in the same words for `price` and `plan`."""
    return (
        f"{results.name}: {len(results)} usable rows, from line {results.line.min()} on, are too few for a "
        f"law; it takes at least {MIN_ROWS} settings, clean-only and mixed"
    )


def leave_one_out(results: Comparable, law: Law) -> LeftOut:
    """Predict each row by a law fitted without it (without its tenth of the rows, in large tables)."""
    num_folds = len(results) if len(results) <= _MAX_LEFT_OUT else 10
    fold = np.random.default_rng(0).permutation(len(results)) % num_folds
    predicted = np.empty(len(results))
    reasons: list[tuple[str, ...]] = [()] * len(results)
    for left_out in range(num_folds):
        kept = results.take(fold != left_out)
        data = _Data(kept)
        theta = np.exp(data.fit())
        size = results.num_clean + _weight(theta, results.sigma) * results.num_noisy
        value, seen = (
            _value(theta, results.num_clean / data.num_images, size / data.num_images),
            _seen(kept, theta),
        )
        for i in np.flatnonzero(fold == left_out):
            predicted[i] = value[i]
            reasons[i] = _extrapolates(seen, results.num_clean[i], size[i], results.sigma[i])
    fitted = law.value(results.num_clean, results.num_noisy, results.sigma)
    return LeftOut(fitted, predicted, np.abs(predicted / results.value - 1), tuple(reasons))


@dataclass(frozen=True)
class TheoryFit:
    """The law with the theory's weight for mixtures of k atoms: steepness = 2k - 1, all else fitted.

    `cost` is what the fit minimises (comparable between k), `error` the median of |fitted / value - 1|.
    """

    k: int
    sigma_floor: float
    error: float
    cost: float


def fit_theory(results: Comparable, max_k: int = 5) -> list[TheoryFit]:
    """Fit the law with the theory's weights for k = 1 ... max_k, best first."""
    free = _Data(results)
    free.fit()
    fits = []
    for k in range(1, max_k + 1):
        data = _Data(results, steepness=2 * k - 1.0)
        start, data.scale = data.fit(), free.scale  # one yardstick for all k
        theta, cost = data.minimise(start[None], data.target, data.prior)
        error = np.median(np.abs(np.expm1(data.log_value(theta[0])[0] - data.target)))
        fits.append(TheoryFit(k, float(np.exp(theta[0, 3])), float(error), float(cost[0])))
    return sorted(fits, key=lambda fit: fit.cost)


def effective_sizes(count: ArrayLike, sigma: ArrayLike, k: int) -> tuple[float, float]:
    """The paper's effective sample sizes n_d and n_l of `count` (m,) samples of noise `sigma` (m,).

    n_d = sum 1 / sigma_i^4 / max 1 / sigma_i^4 for finding the subspace, and the same with the power 4k - 2
    for n_l, the estimation of k atoms inside it. A sample of the least noise counts as one.
    """
    count, sigma = np.asarray(count, float), np.asarray(sigma, float)
    if k < 1:
        raise ValueError(f"k = {k}: a mixture has at least one atom")
    if not ((sigma > 0) & np.isfinite(sigma)).all() or not (count >= 0).all() or not sigma.size:
        raise ValueError(
            "effective sizes need counts >= 0 and noise levels > 0, which the theory's clean samples have too"
        )
    ratio = sigma[count > 0].min(initial=np.inf) / sigma
    return float(count @ ratio**4), float(count @ ratio ** (4 * k - 2))


def _weight(theta: Array, sigma: Array) -> Array:
    """c(sigma) for parameters (..., 6), elementwise in sigma (...)."""
    return (1 + (sigma / theta[..., 3]) ** 2) ** -theta[..., 4]


def _value(theta: Array, clean: Array | float, effective: Array) -> Array:
    """The law for parameters (..., 6) and sizes (...) in units of num_images; infinite without clean images."""
    with np.errstate(divide="ignore"):
        return theta[..., 0] + theta[..., 1] * effective ** -theta[..., 2] + theta[..., 5] / clean


class _Data:
    """A table as the fit sees it, and batched Levenberg-Marquardt for many fits to it at once.

    theta (..., 6) are logarithms of the parameters. The cost is sum of rho((log value - target) / scale) plus
    the prior, with rho(z) = 2 (sqrt(1 + z^2) - 1).
    """

    def __init__(self, results: Comparable, steepness: float | None = None) -> None:
        if len(results) > _MAX_ROWS:
            order = np.lexsort([results.num_noisy, results.num_clean, results.sigma])
            results = results.take(order[np.linspace(0, len(order) - 1, _MAX_ROWS).astype(int)])
        self.num_images = float((results.num_clean + results.num_noisy).max())
        self.clean, self.noisy = results.num_clean / self.num_images, results.num_noisy / self.num_images
        self.sigma, self.target = results.sigma, np.log(results.value)
        self.scale = np.hypot(_USUAL_SCATTER, results.std / results.value)
        lowest, levels = results.value.min(), results.sigma[results.num_noisy > 0]
        level = np.median(levels) if levels.size else 0.1
        self.prior = np.log([0.9 * lowest, 0.2 * lowest, 1.5, level, 0.5, 0.005 * lowest])
        self.prior_std = _PRIOR_STD.copy()
        if steepness is not None:
            self.prior[4], self.prior_std[4] = np.log(steepness), 1e-6

    def log_value(self, theta: Array) -> tuple[Array, Array]:
        """log value (..., n) of the rows and its derivatives (..., n, 6) by theta (..., 6)."""
        columns = np.moveaxis(np.exp(theta)[..., None], -2, 0)
        floor, amplitude, exponent, sigma_floor, steepness, details = columns
        ratio = (self.sigma / sigma_floor) ** 2
        worth = (1 + ratio) ** -steepness * self.noisy
        size = self.clean + worth
        learned, unseen = amplitude * size**-exponent, details / self.clean
        value = floor + learned + unseen
        by_weight = -exponent * learned * worth / size * steepness
        slopes = [
            np.broadcast_to(floor, value.shape), learned, -exponent * np.log(size) * learned,
            by_weight * 2 * ratio / (1 + ratio), -by_weight * np.log1p(ratio), unseen,
        ]  # fmt: skip
        return np.log(value), np.stack(slopes, -1) / value[..., None]

    def fit(self) -> Array:
        """The best theta (6,) from a few starts, at the scatter that the table itself shows."""
        shift = np.zeros((8, len(PARAMETERS)))
        shift[:, [2, 3, 4]] = np.array(np.meshgrid([-0.5, 0.5], [-1, 1], [-0.5, 0.5])).reshape(3, -1).T
        theta, cost = self.minimise(self.prior + shift, self.target, self.prior)
        theta = theta[cost.argmin()]
        freedom = max(len(self.target) - len(PARAMETERS), 0)
        scatter = 1.48 * np.median(np.abs(self.target - self.log_value(theta)[0]))  # of a Gaussian: its std
        if freedom:
            scatter *= np.sqrt(len(self.target) / freedom)
        self.scale = np.sqrt((_USUAL_ROWS * self.scale**2 + freedom * scatter**2) / (_USUAL_ROWS + freedom))
        return self.minimise(theta[None], self.target, self.prior)[0][0]

    def minimise(self, theta: Array, target: Array, prior: Array, num_steps: int = 200) -> tuple[Array, Array]:
        """Minimise from theta (R, 6) for targets (R, n) or (n,); returns theta (R, 6) and the cost (R,)."""
        theta, damping = theta.copy(), np.full(len(theta), 1e-2)
        target, prior = (np.broadcast_to(v, (len(theta), v.shape[-1])) for v in (target, prior))
        cost, gradient, hessian = self._cost(theta, target, prior)
        active = np.arange(len(theta))
        for _ in range(num_steps):
            lifted = hessian[active] + damping[active, None, None] * (hessian[active] * np.eye(theta.shape[1]))
            step = -np.linalg.solve(lifted, gradient[active][..., None])[..., 0]
            trial = np.clip(theta[active] + step.clip(-1, 1), self.prior - 12, self.prior + 12)
            new_cost, new_gradient, new_hessian = self._cost(trial, target[active], prior[active])
            better = new_cost < cost[active]
            converged = np.abs(cost[active] - new_cost) <= 1e-9 * cost[active]
            moved = active[better]
            theta[moved], cost[moved] = trial[better], new_cost[better]
            gradient[moved], hessian[moved] = new_gradient[better], new_hessian[better]
            damping[active] *= np.where(better, 0.2, 5.0)
            active = active[~converged & (damping[active] < 1e9)]
            if not active.size:
                break
        return theta, cost

    def _cost(self, theta: Array, target: Array, prior: Array) -> tuple[Array, Array, Array]:
        """Cost (R,), its gradient (R, 6) and the Gauss-Newton Hessian (R, 6, 6), the last two halved."""
        fitted, slope = self.log_value(theta)
        residual = (fitted - target) / self.scale
        root, away = np.sqrt(1 + residual**2), (theta - prior) / self.prior_std
        slope = slope / self.scale[:, None]
        gradient = np.einsum("rn,rnp->rp", residual / root, slope) + away / self.prior_std
        hessian = np.swapaxes(slope / root[..., None], 1, 2) @ slope + np.diag(self.prior_std**-2.0)
        return 2 * (root - 1).sum(-1) + (away**2).sum(-1), gradient, hessian


def _seen(results: Comparable, theta: Array) -> dict[str, tuple[float, float]]:
    """The range of what the table shows: clean counts, effective sizes and sigmas."""
    size = results.num_clean + _weight(theta, results.sigma) * results.num_noisy
    columns = {"clean images": results.num_clean, "effective size": size, "noise": results.sigma}
    return {name: (float(values.min()), float(values.max())) for name, values in columns.items()}


def _extrapolates(
    seen: dict[str, tuple[float, float]], num_clean: float, size: float, sigma: float
) -> tuple[str, ...]:
    """Why a prediction at this setting is an extrapolation; empty if it is not."""
    reasons = []
    for (name, (low, high)), value in zip(seen.items(), (num_clean, size, sigma), strict=True):
        if not low - 1e-9 * high <= value <= high * (1 + 1e-9):
            side, end = ("below", low) if value < low else ("above", high)
            reasons.append(f"{name} {value:,.4g} {side} the table's {end:,.4g}")
    return tuple(reasons)
