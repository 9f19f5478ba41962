"""The clean-only learning curve, inverted: how many clean images alone give the result of a mix?

If a clean images do, a noisy image of the mix is worth w = (a - n_clean) / n_noisy clean ones (as in `bounds`),
and 1 / w of them replace a clean one. Over several mixes of a level, w = sum (a - n_clean) / sum n_noisy.

The curve goes through the clean-only rows, made to fall by isotonic regression. Between two of them it is
linear in n^-alpha, with the alpha that brings all rows nearest to one line: 0 stands for log n, 1 for the rate
of classical statistics. There is no curve beyond the rows: of a mix that is surely better or worse than all of
them only the side is known.

The interval is that of many draws. In each, the results move by their errors (of held-out images and seeds, or
of samples), alpha is fitted again, and then moves by `_ALPHA_STD`, since a real curve is not quite a power law.
A simulation in the tests counts how often the interval holds the truth.
"""

from dataclasses import dataclass

import numpy as np

from assay.pricing.table import Array, Comparable, Rows

_NUM_DRAWS = 2000
_MAX_POINTS = 32  # of the curve; more clean-only rows are averaged with their neighbours
_ALPHAS = np.linspace(0.0, 2.0, 41)
_ALPHA_PRIOR, _ALPHA_PRIOR_STD = 0.75, 0.5
_ALPHA_STD = 0.2
_MISFIT = 0.02  # of a power law at a row, as a share of the curve's height


@dataclass(frozen=True)
class EqualClean:
    """A mixed row of the table, and how many clean images alone give its result: NaN, and why, if unknown."""

    row: int
    num_images: float
    low: float
    high: float
    outside: str | None


@dataclass(frozen=True)
class CurvePrice:
    """What a noisy image of a level is worth by the curve; None if no mix of the level lies on it.

    `interval` is None without standard deviations. `num_runs` trainings are behind it.
    """

    sigma: float
    worth: float | None
    interval: tuple[float, float] | None
    mixes: tuple[EqualClean, ...]
    num_runs: int


def curve_prices(results: Comparable, confidence: float = 0.95, seed: int = 0) -> list[CurvePrice]:
    """Price each sigma of the table by the curve of its clean-only rows; empty if there are fewer than two."""
    clean_rows = np.flatnonzero(results.num_noisy == 0)
    size, value, std = _points(results, clean_rows)
    if len(size) < 2:
        return []
    curve = _Curve(size, value, std, np.random.default_rng(seed))
    prices = []
    for sigma in np.unique(results.sigma[results.num_noisy > 0]):
        rows = np.flatnonzero(results.sigma == sigma)
        mixes, draws = [], []
        for row in rows:
            equal, drawn = curve.invert(results.value[row], results.std[row])
            low, high = _ends(drawn, confidence)
            # Beyond an end, but not surely: then the end is the best guess, and the interval is open there.
            surely = not results.has_std or high <= 0 or low == np.inf
            outside = _outside(results, int(row), equal) if surely else None
            equal = np.nan if outside else min(max(equal, size[0]), size[-1])
            mixes.append(EqualClean(int(row), equal, low, high, outside))
            if not outside:
                # A noisy image is worth a clean one at most: draws beyond the curve count as that.
                draws.append(drawn.clip(max=results.num_clean[row] + results.num_noisy[row]))
        inside = rows[[mix.outside is None for mix in mixes]]
        worth, interval = None, None
        if inside.size:
            sizes = np.array([mix.num_images for mix in mixes if mix.outside is None])
            worth = float(pooled_worth(results, inside, sizes))
            if results.has_std:
                low, high = _ends(pooled_worth(results, inside, np.stack(draws, -1)), confidence)
                interval = max(low, 0.0), min(high, 1.0)
        num_runs = int(results.num_runs[clean_rows].sum() + results.num_runs[inside].sum())
        prices.append(CurvePrice(float(sigma), worth, interval, tuple(mixes), num_runs))
    return prices


def pooled_worth(results: Comparable, rows: Rows, equal: Array) -> Array:
    """w over the mixes `rows` (m,) from the clean images `equal` (..., m) that give their results."""
    return (equal - results.num_clean[rows]).sum(-1) / results.num_noisy[rows].sum()


def _points(results: Comparable, rows: Rows) -> tuple[Array, Array, Array]:
    """Size, result and error of the curve's points (K,), smallest first."""
    rows = rows[np.argsort(results.num_clean[rows], kind="stable")]
    groups = np.array_split(rows, min(len(rows), _MAX_POINTS)) if rows.size else []
    size = np.array([np.exp(np.log(results.num_clean[group]).mean()) for group in groups])
    value = np.array([results.value[group].mean() for group in groups])
    std = np.array([np.sqrt(np.square(results.std[group]).sum()) / len(group) for group in groups])
    return size, value, std


def _outside(results: Comparable, row: int, equal: float) -> str | None:
    if 0 < equal < np.inf:
        return None
    sizes = results.num_clean[results.num_noisy == 0]
    kind, end, wanted = ("worse", sizes.min(), "fewer") if equal <= 0 else ("better", sizes.max(), "more")
    setting = f"{end:,.0f} images" if results.counted else f"{end:.3g} of the data"
    return (
        f"{results.setting(row)} is {kind} than every clean-only run, to {setting}: the curve is not extended; "
        f"add a clean-only run with {wanted}"
    )


def _ends(draws: Array, confidence: float) -> tuple[float, float]:
    tail = 50 * (1 - confidence)
    low, high = np.percentile(draws, [tail, 100 - tail], method="inverted_cdf")
    return float(low), float(high)


class _Curve:
    """The curve through points (K,), and through each of many draws of them: row 0 is the curve itself."""

    def __init__(self, size: Array, value: Array, std: Array, generator: np.random.Generator) -> None:
        self.generator, self.scale = generator, size.max()
        self.size = size / self.scale
        moved = value + std * generator.standard_normal((_NUM_DRAWS, len(size)))
        values = np.vstack([value, moved])  # (1 + R, K)
        if len(size) > 2:
            alpha = _fit_alpha(self.size, values, np.hypot(std, _MISFIT * np.ptp(value)))
        else:  # two points do not determine the curve between them
            alpha = np.full(len(values), _ALPHA_PRIOR)
            alpha[1:] += _ALPHA_PRIOR_STD * generator.standard_normal(_NUM_DRAWS)
        alpha[1:] += _ALPHA_STD * generator.standard_normal(_NUM_DRAWS)
        self.alpha = alpha.clip(_ALPHAS[1], _ALPHAS[-1])  # the lowest is log n, for all that can be told
        self.values = _falling(values)

    def invert(self, value: float, std: float) -> tuple[float, Array]:
        """The size at which the curve has this value, and the draws (R,); 0 or infinity beyond its ends."""
        target = np.append(value, value + std * self.generator.standard_normal(_NUM_DRAWS))
        row, last = np.arange(len(target)), self.values.shape[1] - 2
        left = ((self.values > target[:, None]).sum(1) - 1).clip(0, last)
        high, low = self.values[row, left], self.values[row, left + 1]
        level = high > low
        part = np.where(level, (high - target) / np.where(level, high - low, 1.0), 0.5)
        start, end = (self.size[at] ** -self.alpha for at in (left, left + 1))
        size = (start + part.clip(0, 1) * (end - start)) ** (-1 / self.alpha) * self.scale
        size = np.where(target > self.values[:, 0], 0.0, size)
        size = np.where(target < self.values[:, -1], np.inf, size)
        return float(size[0]), size[1:]


def _fit_alpha(size: Array, values: Array, scale: Array) -> Array:
    """For each row of values (R, K) the alpha with which it is most nearly linear in size^-alpha."""
    weight = scale**-2.0
    centred = values - (values @ weight / weight.sum())[:, None]
    costs = []
    for alpha in _ALPHAS:
        x = -np.log(size) if alpha == 0 else size**-alpha
        x = x - x @ weight / weight.sum()
        slope = (centred * weight) @ x / (weight @ x**2)
        misfit = np.square(centred - slope[:, None] * x) @ weight
        costs.append(misfit + ((alpha - _ALPHA_PRIOR) / _ALPHA_PRIOR_STD) ** 2)
    return _ALPHAS[np.argmin(costs, 0)]


def _falling(values: Array) -> Array:
    """The nearest rows (R, K) that never rise: min over a <= i of max over b >= i of the mean of a ... b."""
    total = np.concatenate([np.zeros((len(values), 1)), values.cumsum(1)], 1)
    num = values.shape[1]
    falling = np.empty_like(values)
    for i in range(num):
        first, last = np.arange(i + 1)[:, None], np.arange(i, num)
        means = (total[:, None, last + 1] - total[:, first]) / (last + 1 - first)
        falling[:, i] = means.max(2).min(1)
    return falling
