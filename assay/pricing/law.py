"""The scaling law, and all that measured results say about it: one estimator for every price.

    value = F + A n^-beta,    n = n_clean + sum_j w_j n_noisy,j

is the result (held-out loss, FD: lower is better) of a run on n_clean clean images and n_noisy,j noisy ones of
level j. w_j, the worth of a noisy image in clean ones, is what is asked for; 1 / w_j noisy images replace a
clean one. All configurations are fitted together.

Errors. Runs of a block share an image draw and a training seed, so their errors have three parts: one of the
block, one of the configuration (a law is not quite true, and held-out images are the same in every block) and
one of the run, pooled over configurations, all relative to the value for FD. Their ratios are averaged over
their posterior under the law made linear (restricted maximum likelihood); their common scale has a Student t.
If no configuration ran twice, runs and configurations cannot be told apart: then the scatter around the law is
taken for the error of a run, which is an assumption, and is stated.

Interval. Given beta and w the law is linear, so F, A and the scale are integrated exactly, with flat priors on
the value at the smallest and the largest clean-only size; what is left, beta and the worths, is sampled by an
affine-invariant ensemble (Goodman and Weare, 2010). Priors are weak: beta within a factor of 4 of 0.7, w from a
little below 0 to a little above 1 with a density falling as 1 / (|w| + 0.1). Worths outside of [0, 1] exist in
the sampling only, so that estimates near an end are not bent away from it; intervals are cut to [0, 1], and one
that reaches 0 spends its 5% on the other end. Simulations in tests/test_pricing.py and bench/pricing.py count
how often intervals hold the truth.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import least_squares
from scipy.special import betaincinv, expit, logit, stdtr
from scipy.stats import f as f_distribution

from assay.errors import AssayError
from assay.pricing.results import Array, Measured

_BETA, _BETA_SPREAD = 0.7, 0.7  # prior of log beta
_MOST_WORTH, _LEAST_WORTH = 1.3, -0.3
_SCALE_DF, _SCALE = 1.0, 0.02  # prior of the error of a run: weak, 2% of the range of the results
_BLOCK_RATIOS = (0.0, 0.3, 1.0, 3.0, 10.0)  # variance between blocks, over that between runs
_MISFIT_RATIOS = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)  # variance between configurations, alike
_GROWTHS = (0.0, 1.0, 4.0)  # of the variance of a run, from the largest clean-only size to the smallest
_NUM_WALKERS, _NUM_STEPS, _EVERY = 64, 1000, 24
_TINY_WORTH = 1e-3  # the smallest that walkers begin with
_SURE_PLACE = (
    20.0  # as many draws: levels lie within a fifth of the way where such a line has them; quotes, 0.05
)
_DIGITS = 6  # of where walkers are: the last bits, which differ between CPUs, would lead them elsewhere


@dataclass(frozen=True)
class Law:
    """The law of one metric as R draws from what the results leave possible.

    `worth` (R, S) are of the levels `sigmas`; `exponent`, `floor` and `amplitude` (R,). `scatter` is the error
    of a run (for FD, a share of its value). `lack_of_fit` is the probability of results at least this far
    from a law if one held; None if no configuration ran twice. `gain` is the probability that more clean
    images help at all. `seen` are the smallest and largest size n of the configurations, `shares` (S,) the
    smallest share of clean images in mixes with each level.
    """

    sigmas: Array
    worth: Array
    exponent: Array
    floor: Array
    amplitude: Array
    scatter: float
    lack_of_fit: float | None
    gain: float
    num_runs: int
    num_blocks: int
    repeated: bool
    seen: tuple[float, float]
    shares: Array

    def __repr__(self) -> str:
        each = zip(np.median(self.worth, 0), self.sigmas, strict=True)
        worths = ", ".join(f"{worth:.3g} at {sigma:.3g}" for worth, sigma in each)
        return f"Law(worth {worths}; exponent {np.median(self.exponent):.2g}; {self.num_runs} runs)"

    def worth_at(self, sigmas: ArrayLike) -> Array:
        """Draws (R, m) of the worth at levels (m,): 1 at 0, else between the levels measured.

        There log (w / (1 - w)) is taken for a line in log sigma, as it is of one mode of an image (w = g). How
        far along it a level lies is drawn, too: curves may bend.
        """
        wanted = np.atleast_1d(np.asarray(sigmas, float))
        outside = (wanted > 0) & ((wanted < 0.99 * self.sigmas[0]) | (wanted > 1.01 * self.sigmas[-1]))
        if outside.any():
            measured = ", ".join(f"{level:.3g}" for level in self.sigmas)
            what = f"no results near noise {wanted[outside][0]:.3g}: measured are {measured}"
            cure = "leave out offers of it, measure it, or plan from a quote of clean images"
            raise AssayError(what, key="sigma", cure=cure)
        worth, uniform = self.worth.clip(0, 1), np.random.default_rng(0).random(len(self.worth))
        found = np.ones((len(worth), len(wanted)))
        for column, level in enumerate(wanted):
            if level > 0 and self.is_measured(level):
                found[:, column] = worth[:, np.abs(np.log(self.sigmas / level)).argmin()]
            elif level > 0:
                right = int(np.searchsorted(self.sigmas, level))
                ends = np.log(self.sigmas[[right - 1, right]])
                place = _SURE_PLACE * (np.log(level) - ends[0]) / (ends[1] - ends[0])
                part = betaincinv(place, _SURE_PLACE - place, uniform)
                both = logit(worth[:, [right - 1, right]].clip(_TINY_WORTH, 1 - _TINY_WORTH))
                found[:, column] = expit((1 - part) * both[:, 0] + part * both[:, 1])
        return found

    def is_measured(self, sigma: float) -> bool:
        """Whether there are results of this noise level."""
        return bool(np.abs(self.sigmas / sigma - 1).min() <= 0.01)

    def size(self, num_clean: ArrayLike, num_noisy: ArrayLike, sigmas: ArrayLike) -> Array:
        """Draws (R, m) of the size n of mixes: clean images (m,), noisy ones (m, V) at levels (V,)."""
        return np.asarray(num_clean, float) + self.worth_at(sigmas) @ np.asarray(num_noisy, float).T

    def least_share(self, offered: Array) -> float:
        """The smallest share of clean images measured with noise of the levels `offered`, or around them."""
        noisy = offered[offered > 0]
        near = [self.sigmas[self.sigmas <= 1.01 * level].max(initial=0) for level in noisy]
        near += [self.sigmas[self.sigmas >= 0.99 * level].min(initial=np.inf) for level in noisy]
        return float(self.shares[np.isin(self.sigmas, near)].min()) if len(noisy) else 0.0

    def values(self, size: Array) -> Array:
        """Draws (R, m) of the results at sizes (R, m); less than one image counts as one: no pole at none."""
        size = np.maximum(size, min(1.0, self.seen[0]))
        return self.floor[:, None] + self.amplitude[:, None] * size ** -self.exponent[:, None]


def check_confidence(confidence: float) -> None:
    """Of an interval, a share."""
    if not 0 < confidence < 1:
        raise AssayError(f"{confidence:g} is not between 0 and 1", key="confidence", cure="give e.g. 0.95")


def interval(draws: Array, confidence: float = 0.95) -> tuple[Array, Array, Array]:
    """Median and interval of worths from draws (R, ...): within [0, 1], one-sided where it reaches an end."""
    tail = (1 - confidence) / 2
    low, middle, last, high = np.quantile(draws, [tail, 0.5, 1 - 2 * tail, 1 - tail], axis=0)
    low, high = low.clip(0, 1), np.where(low <= 0, last, high).clip(0, 1)
    return np.asarray(middle.clip(low, high)), low, high


@dataclass(frozen=True)
class Farthest:
    """The run that is farthest from what others suggest, and whether that is far enough to be a slip."""

    run: int
    expected: float
    is_slip: bool


def farthest(runs: Measured) -> Farthest | None:
    """The run farthest from a law that is fitted so that a few wrong results do not count."""
    if runs.value.min() <= 0:
        return None
    value, most = np.log(runs.value), runs.value.min()

    def law(theta: Array) -> Array:
        floor, slope, amplitude, *worth = np.exp(theta.clip(-50, 50))
        size = np.maximum(runs.num_clean + runs.num_noisy @ np.minimum(worth, 1), 1)
        rest = amplitude * (size / size.max()) ** -min(slope, 20)
        return np.asarray(np.log(most * floor / (1 + floor) + rest))

    start = np.array([-1.0, np.log(_BETA), np.log(np.median(runs.value)), *[-1.0] * len(runs.sigmas)])
    by_law = law(least_squares(lambda theta: law(theta) - value, start, loss="cauchy", f_scale=0.05).x)
    off = value - by_law - np.median(value - by_law)
    worst, limit = int(abs(off).argmax()), max(np.log(1.4), 8 * np.median(abs(off)))
    counts = np.column_stack([runs.num_clean, runs.num_noisy])
    repeats = np.delete(off, worst)[np.delete(counts == counts[worst], worst, 0).all(1)]
    is_confirmed = bool((repeats / off[worst] > 0.5).any())  # by a repeat, which is off as well
    is_slip = bool(abs(off[worst]) >= limit) and not is_confirmed
    return Farthest(worst, float(np.exp(by_law[worst])), is_slip)


def fit_laws(metrics: Sequence[Measured], relative: bool = False, seed: int = 0) -> list[Law]:
    """Fit the law to metrics of the same runs, each on its own."""
    values, errors = (np.stack([getattr(each, name) for each in metrics]) for name in ("value", "error"))
    return _Design(metrics[0]).fit(values, errors, relative, metrics[0].sigmas, seed)


class _Design:
    """What the runs were trained on: C configurations, n runs, and arrays of T metrics at once."""

    def __init__(self, runs: Measured) -> None:
        counts = np.column_stack([runs.num_clean, runs.num_noisy])
        configurations, which = np.unique(counts, axis=0, return_inverse=True)
        self.clean, self.noisy = configurations[:, 0], configurations[:, 1:]
        self.of_run: Array = np.eye(len(configurations))[which.reshape(-1)]  # (n, C)
        blocks = np.unique(runs.block, return_inverse=True)[1]
        self.of_block: Array = np.eye(int(blocks.max()) + 1)[blocks]  # (n, K)
        sizes = np.unique(self.clean[self.noisy.sum(1) == 0])
        if len(sizes) < 2 or not (runs.num_noisy.sum(0) > 0).all() or not self.noisy.size:
            have = f"{len(sizes)} clean-only sizes and mixes with noisy images at {len(runs.sigmas)} levels"
            cure = "add runs: clean images alone in two numbers or more, and mixes of them with noisy ones"
            raise AssayError(f"{runs.dataset} has {have}: too few for a price", key="table", cure=cure)
        self.ends = sizes[0], sizes[-1]
        with np.errstate(divide="ignore"):
            share = np.where(self.noisy > 0, self.clean[:, None] / self.noisy, np.inf).min(0)
        self.least = np.maximum(_LEAST_WORTH, -0.8 * share)  # a mix has some size
        both = np.column_stack([self.of_run, self.of_block])
        basis, strength, _ = np.linalg.svd(both, full_matrices=False)
        self.repeats: Array = basis[:, strength > 1e-9 * strength[0]]  # what configuration and block explain
        self.repeat_df = len(both) - self.repeats.shape[1]

    def fit(self, values: Array, errors: Array, relative: bool, sigmas: Array, seed: int) -> list[Law]:
        """Laws of T metrics (T, n)."""
        num_runs = self.of_run.sum(0)
        means, known = values @ self.of_run / num_runs, errors @ self.of_run / num_runs
        unit = means if relative else np.ones_like(means)
        spread = np.maximum(_SCALE * np.ptp(means, axis=1), 1e-12 * np.abs(means).max(1)) / unit.mean(1)
        prior = _SCALE_DF * np.maximum(spread**2, np.square(known / unit).mean(1))
        problem = _Problem(self, unit, values / (unit @ self.of_run.T), np.eye(len(self.of_run)))
        rough = np.median(problem.sample(prior, seed, _NUM_WALKERS // 2, 60), 1)
        if relative:  # to the law, not to results: one that happens to be low would count for more
            _, _, last, slope, *_ = problem.project(rough[:, None])
            unit = (last + slope * self.columns(rough)).clip(means / 2, means * 2)
        scaled, known = values / (unit @ self.of_run.T), known / unit
        problem = _Problem(self, unit, scaled, np.eye(len(self.of_run)))
        rise = np.zeros_like(means) if relative else self.columns(rough).clip(0, 2)
        covariance = self._variances(scaled, problem.slopes(rough), prior, known, rise)
        problem = _Problem(self, unit, scaled, np.asarray(np.linalg.inv(covariance)))
        theta = problem.sample(np.full(len(values), _SCALE_DF), seed + 1, _NUM_WALKERS, _NUM_STEPS)
        floor, slope, gain = problem.linear(theta, np.random.default_rng(seed + 2))
        beta = np.exp(theta[..., 0])
        first, last = (end**-beta for end in self.ends)
        amplitude = slope / (first - last)
        scatter, doubt = self._lack_of_fit(scaled, unit, theta, known)
        share = self.clean / (self.clean + self.noisy.sum(1))
        shares = np.where(self.noisy > 0, share[:, None], 1.0).min(0)
        found = []
        for t, worth in enumerate(theta[..., 1:]):
            size = self.clean + self.noisy @ np.median(worth, 0).clip(0, 1)
            found.append(Law(
                sigmas, worth, beta[t], floor[t] - amplitude[t] * last[t], amplitude[t], float(scatter[t]),
                None if doubt is None else float(doubt[t]), float(gain[t]), len(self.of_run),
                self.of_block.shape[1], self.repeat_df > 0,
                (size.min(), size.max()), shares,
            ))  # fmt: skip
        return found

    def columns(self, theta: Array) -> Array:
        """The law's shape (..., C) for theta (..., 1 + S) = (log beta, w): 1 and 0 at the clean-only ends."""
        beta, size = np.exp(theta[..., :1]), self.clean + theta[..., 1:] @ self.noisy.T
        first, last = (end**-beta for end in self.ends)
        return (size**-beta - last) / (first - last)

    def _variances(self, scaled: Array, slopes: Array, prior: Array, known: Array, rise: Array) -> Array:
        """Covariance (T, n, n) of the errors, averaged over ratios of its parts by their posterior.

        The variance of a run grows with `rise` (T, C), its configuration's place between the two ends.
        """
        num, df = len(self.of_run), max(len(self.of_run) - slopes.shape[-1], 0) + _SCALE_DF
        same_run, same_block = self.of_run @ self.of_run.T, self.of_block @ self.of_block.T
        blocks = _BLOCK_RATIOS if self.of_block.shape[1] > 1 else (0.0,)
        misfits = _MISFIT_RATIOS if self.repeat_df else (0.0,)
        weights, parts = [], []
        for block, misfit, growth in itertools.product(blocks, misfits, _GROWTHS if rise.any() else (0.0,)):
            unit = np.sqrt(1 + growth * rise) @ self.of_run.T  # (T, n)
            root = np.linalg.cholesky(np.eye(num) + block * same_block + misfit * same_run)
            left = np.linalg.solve(root, self.of_run @ slopes / unit[..., None])
            right = np.linalg.solve(root, (scaled / unit)[..., None])
            moment = np.swapaxes(left, 1, 2) @ left
            moment += 1e-9 * np.trace(moment, axis1=1, axis2=2)[:, None, None] * np.eye(moment.shape[1])
            rest = right - left @ np.linalg.solve(moment, np.swapaxes(left, 1, 2) @ right)
            total = np.square(rest).sum((1, 2)) + prior
            log_weight = -np.log(np.diag(root)).sum() - np.log(unit).sum(1) - np.linalg.slogdet(moment)[1] / 2
            # A misfit must show itself: its prior falls as the square of its variance.
            weights.append(log_weight - df / 2 * np.log(total) - 2 * np.log1p(misfit))
            parts.append((block, misfit, unit, total / df))
        weight = np.exp(np.array(weights) - np.max(weights, 0))
        covariance = np.zeros((len(scaled), num, num))
        for share, (block, misfit, unit, scale) in zip(weight / weight.sum(0), parts, strict=True):
            own = np.maximum(misfit * scale[:, None], known**2 if self.repeat_df else 0)  # (T, C)
            both = unit[:, None] * unit[..., None]
            covariance += (share * scale)[:, None, None] * (np.eye(num) + block * same_block) * both
            covariance += np.einsum("t,nc,tc,mc->tnm", share, self.of_run, own, self.of_run)
        return covariance

    def _lack_of_fit(
        self, scaled: Array, unit: Array, theta: Array, known: Array
    ) -> tuple[Array, Array | None]:
        """The error of a run (T,), and the F-test of the law against one mean for each configuration (T,)."""
        num, df = len(self.of_run), len(self.clean) - theta.shape[-1] - 2
        if not self.repeat_df:
            return np.sqrt(self._misfit(scaled, unit, theta, np.eye(num)) / max(df, 1)), None
        inside = np.square(scaled - (scaled @ self.repeats) @ self.repeats.T).sum(1)
        variance = inside / self.repeat_df
        if df < 1:
            return np.sqrt(variance), None
        blocks = self.of_block - self.of_block.mean(0)
        without = np.eye(num) - blocks @ np.linalg.pinv(blocks)  # deviations from the mean of each block
        between = self._misfit(scaled, unit, theta, without) - inside
        allowed = variance + np.square(known).mean(1) * num / len(self.clean)
        return np.sqrt(variance), f_distribution.sf(between / df / allowed, df, self.repeat_df)

    def _misfit(self, scaled: Array, unit: Array, theta: Array, projection: Array) -> Array:
        """The least sum of squares (T,) of a law, projected: one Gauss-Newton step from the best draw."""
        problem = _Problem(self, unit, scaled, projection)
        best = theta[np.arange(len(theta)), problem.project(theta)[0].argmin(1)]
        slopes, target = projection @ (self.of_run @ problem.slopes(best)), projection @ scaled[..., None]
        return np.asarray(np.square(target - slopes @ (np.linalg.pinv(slopes) @ target)).sum((1, 2)))


class _Problem:
    """Density of theta (T, K, 1 + S), F, A and the scale integrated, for runs of a precision ([T,] n, n)."""

    def __init__(self, design: _Design, unit: Array, scaled: Array, precision: Array) -> None:
        self.design, self.unit, self.df = design, unit, len(scaled.T) - 2 + _SCALE_DF
        half = design.of_run.T @ precision
        weight = half @ design.of_run
        self.weight = np.broadcast_to(weight, (len(unit), *weight.shape[-2:]))  # (T, C, C)
        self.target = (half @ scaled[..., None])[..., 0]  # (T, C)
        self.total = (scaled * (precision @ scaled[..., None])[..., 0]).sum(1)  # (T,)

    def project(self, theta: Array) -> tuple[Array, ...]:
        """Least squares on the law's two columns for theta (T, K, 1 + S).

        Returns (T, K) each: residual, determinant, value at the last end, slope, and the products of the first
        column with itself and with the second.
        """
        one, shape = 1 / self.unit, self.design.columns(theta) / self.unit[:, None]
        weighted = (self.weight @ one[..., None])[..., 0]
        oo, ot = (one * weighted).sum(-1)[:, None], (one * self.target).sum(-1)[:, None]
        os, st = (shape @ weighted[..., None])[..., 0], (shape @ self.target[..., None])[..., 0]
        ss = ((shape @ self.weight) * shape).sum(-1)
        determinant = np.maximum(oo * ss - os**2, 1e-300)
        slope, floor = (oo * st - os * ot) / determinant, (ss * ot - os * st) / determinant
        residual = np.maximum(self.total[:, None] - floor * ot - slope * st, 0)
        return residual, determinant, floor, slope, oo, os

    def log_density(self, theta: Array, prior: Array) -> Array:
        """Log posterior density (T, K) of theta (T, K, 1 + S)."""
        worth = theta[..., 1:]
        inside = ((worth > self.design.least) & (worth < _MOST_WORTH)).all(-1) & (np.abs(theta[..., 0]) < 4)
        residual, determinant, _, slope, oo, _ = self.project(np.where(inside[..., None], theta, 0.3))
        total = residual + prior[:, None]
        falling = stdtr(self.df, slope / np.sqrt(oo / determinant * total / self.df))
        value = -0.5 * np.log(determinant) - self.df / 2 * np.log(total) + np.log(np.maximum(falling, 1e-12))
        value -= 0.5 * np.square((theta[..., 0] - np.log(_BETA)) / _BETA_SPREAD)
        value -= np.log(np.abs(worth) + 0.1).sum(-1)
        return np.where(inside, value, -np.inf)

    def sample(self, prior: Array, seed: int, num_walkers: int, num_steps: int) -> Array:
        """Draws (T, R, 1 + S) by stretch moves of `num_walkers`, which begin at draws by importance.

        Among those are worths of every size: with few clean and many noisy images the likely ones are tiny, and
        walkers that begin far from them would not find them.
        """
        rng, shape = np.random.default_rng(seed), (len(self.unit), 40 * num_walkers)
        start = [np.log(_BETA) + _BETA_SPREAD * rng.standard_normal(shape)]
        start += [np.exp(rng.uniform(np.log(_TINY_WORTH), 0, shape)) for _ in self.design.least]
        theta = np.stack(start, -1)
        chance = self.log_density(theta, prior) + np.log(theta[..., 1:]).sum(-1)  # over their own density
        chosen = np.argmax(chance[:, None] + rng.gumbel(size=(len(self.unit), num_walkers, shape[1])), -1)
        theta = np.take_along_axis(theta, chosen[..., None], 1)
        theta *= np.exp(-0.1 * np.abs(rng.standard_normal(theta.shape)))  # apart, and still within their bounds
        theta = theta.round(_DIGITS)
        density = self.log_density(theta, prior)
        half, kept = num_walkers // 2, []
        for step in range(num_steps):
            for mine, theirs in ((slice(half), slice(half, None)), (slice(half, None), slice(half))):
                partner = theta[:, theirs][:, rng.integers(half, size=half)]
                stretch = (rng.random(half) + 1) ** 2 / 2
                trial = (partner + stretch[:, None] * (theta[:, mine] - partner)).round(_DIGITS)
                new = self.log_density(trial, prior)
                chance = (theta.shape[-1] - 1) * np.log(stretch) + new - density[:, mine]
                moved = np.log(rng.random(chance.shape)) < chance
                theta[:, mine] = np.where(moved[..., None], trial, theta[:, mine])
                density[:, mine] = np.where(moved, new, density[:, mine])
            if step >= num_steps // 3 and step % _EVERY == 0:
                kept.append(theta.copy())
        return np.concatenate(kept, 1)

    def slopes(self, theta: Array) -> Array:
        """Derivatives (T, C, 3 + S) of the law at theta (T, 1 + S) by F, A and theta, in scaled units."""
        at, step = theta[:, None], 1e-4 * np.eye(theta.shape[1])
        size = np.maximum(np.abs(self.project(at)[3]), 1e-9)[..., None]
        change = self.design.columns(at + step) - self.design.columns(at - step)  # (T, 1 + S, C)
        columns = [np.ones_like(size * self.unit[:, None]), self.design.columns(at), size * change / 2e-4]
        return np.swapaxes(np.concatenate(columns, 1) / self.unit[:, None], 1, 2)

    def linear(self, theta: Array, rng: np.random.Generator) -> tuple[Array, Array, Array]:
        """Draws (T, R) of the value at the last end and the slope, and the chance (T,) that results fall."""
        residual, determinant, floor, slope, oo, os = self.project(theta)
        total, variance = residual + _SCALE_DF, oo / determinant
        scale = np.sqrt(total / rng.chisquare(self.df, residual.shape))
        drawn = slope + np.sqrt(variance) * scale * rng.standard_normal(slope.shape)
        drawn = np.where(drawn > 0, drawn, 1e-9 * np.abs(floor))
        floor = floor - os / oo * (drawn - slope)  # which moves with the slope
        floor += scale / np.sqrt(oo) * rng.standard_normal(slope.shape)
        return floor, drawn, stdtr(self.df, slope / np.sqrt(variance * total / self.df)).mean(1)
