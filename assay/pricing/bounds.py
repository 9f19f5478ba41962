"""Bounds on the worth of a noisy image, from comparisons of trained models alone.

A noisy image is worth w clean ones when n_clean clean and n_noisy noisy images give the result of
a = n_clean + w n_noisy clean images alone; 1 / w noisy images then replace a clean one. This is the paper's c.
If w depends on sigma alone and results (FD, the score: lower is better) fall with more clean images, a
clean-only row with a images and a mixed row give

    v_clean <= v_mixed:  a >= n_clean + w n_noisy,   so   w <= (a - n_clean) / n_noisy,
    v_clean >  v_mixed:  a <= n_clean + w n_noisy,   so   w >= (a - n_clean) / n_noisy.

A tie is taken for the larger clean-only row (the paper's convention): it counts for the upper bound only, and
where a <= n_clean, as when noisy images neither helped nor harmed, it says nothing. The tightest of all
pairs is reported.

With standard deviations, a pair holds with probability Phi(z), z = |v_clean - v_mixed| / sqrt(std_clean^2 +
std_mixed^2). The interval at a confidence 1 - alpha uses only the pairs with z above the quantile of
alpha / K, where K counts the pairs that could exclude a worth in (0, 1): the true one violates at most
one direction of each, so the interval misses it with probability at most alpha.
"""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog
from scipy.stats import norm

from assay.pricing.table import Array, Comparable, Rows

_MAX_STD_LEVELS = 64  # more distinct standard deviations are rounded up, which only widens the interval
_NUM_SHOWN = 10  # contradicting pairs to show


@dataclass(frozen=True)
class Pair:
    """Two rows of a table, the better one first, and the probability that it is truly better."""

    better: int
    worse: int
    probability: float | None


@dataclass(frozen=True)
class PriceBounds:
    """lower <= w(sigma) <= upper, with the pair that gives each; no pair where only 0 <= w <= 1 is known.

    `interval` covers w at the confidence asked for; None without standard deviations, or when
    even pairs beyond doubt contradict each other. `contradiction` says in words what does not fit.
    """

    sigma: float
    lower: float
    upper: float
    lower_pair: Pair | None
    upper_pair: Pair | None
    interval: tuple[float, float] | None
    contradiction: str | None


@dataclass(frozen=True)
class JointBounds:
    """Bounds on the worth at all levels at once: lower and upper (S,) for `sigma` (S,).

    `margin` is the smallest difference between two results, in standard errors (in plain units without them),
    that had to be asked of a comparison to make all of them agree; `violated` are those that did not.
    """

    sigma: Array
    lower: Array
    upper: Array
    margin: float
    violated: tuple[Pair, ...]


def price_bounds(results: Comparable, confidence: float = 0.95) -> list[PriceBounds]:
    """Bounds on w for each sigma of the table, from all pairs of a clean-only and a mixed row."""
    if not 0 < confidence < 1:
        raise ValueError(f"confidence = {confidence:g}: a confidence is between 0 and 1")
    clean, sigmas = _clean_rows(results), np.unique(results.sigma[results.num_noisy > 0])
    if not sigmas.size or not clean.size:
        kind = "mixed" if clean.size else "clean-only"
        raise ValueError(
            f"{results.name}: no {kind} row among lines {results.line.min()} to {results.line.max()} (columns "
            "clean_fraction and noisy_fraction): a price compares clean-only with mixed settings"
        )
    return [_bounds_of(results, clean, np.flatnonzero(results.sigma == sigma), confidence) for sigma in sigmas]


def _bounds_of(results: Comparable, clean: Rows, mixed: Rows, confidence: float) -> PriceBounds:
    lower, upper, lower_pair, upper_pair = _tightest(results, clean, mixed, 0.0)
    contradiction, interval = None, None
    if upper < 0:
        contradiction = f"noisy images made the model worse: each is worth {upper:.3g} clean ones at most"
    elif lower > 1:
        contradiction = f"a noisy image did better than a clean one: it is worth {lower:.3g} of them at least"
    elif lower > upper:
        contradiction = (
            "the runs contradict each other: by one pair a noisy image is worth at least "
            f"{lower:.3g} clean ones, by another at most {upper:.3g}"
        )
    if results.has_std:
        z = norm.isf((1 - confidence) / max(1, _num_informative(results, clean, mixed)))
        sure_lower, sure_upper, *_ = _tightest(results, clean, mixed, float(z))
        if max(sure_lower, 0.0) <= min(sure_upper, 1.0):
            interval = max(sure_lower, 0.0), min(sure_upper, 1.0)
        else:
            contradiction = contradiction or "the runs contradict each other: no worth of a noisy image fits"
            contradiction += f" (beyond doubt at {confidence:.0%})"
    sigma = float(results.sigma[mixed[0]])
    return PriceBounds(sigma, lower, upper, lower_pair, upper_pair, interval, contradiction)


def _clean_rows(results: Comparable) -> Rows:
    return np.flatnonzero(results.num_noisy == 0)


def _num_informative(results: Comparable, clean: Rows, mixed: Rows) -> int:
    """Number of pairs with n_clean < a < n_clean + n_noisy; all others agree with every w in (0, 1)."""
    a, slack = np.sort(results.num_clean[clean]), 1e-9 * results.num_clean.max()
    low, high = results.num_clean[mixed], results.num_clean[mixed] + results.num_noisy[mixed]
    return int((np.searchsorted(a, high - slack) - np.searchsorted(a, low + slack)).clip(0).sum())


def _tightest(
    results: Comparable, clean: Rows, mixed: Rows, z: float
) -> tuple[float, float, Pair | None, Pair | None]:
    """Tightest lower and upper bound from pairs that differ by more than z standard errors, and the pairs.

    Rows sorted by result make this O(n log n): among the clean-only rows that beat a mixed one the smallest
    matters, among those that it beats the largest. One pass for each distinct standard deviation.
    """
    lower, upper = 0.0, 1.0
    lower_pair = upper_pair = None
    std = results.std[clean] if z else np.zeros(len(clean))
    levels = np.unique(std)
    if len(levels) > _MAX_STD_LEVELS:
        levels = np.quantile(std, np.linspace(0, 1, _MAX_STD_LEVELS + 1)[1:], method="higher")
    level_of = np.searchsorted(levels, std)
    value, num_clean, num_noisy = results.value[mixed], results.num_clean[mixed], results.num_noisy[mixed]
    for level, level_std in enumerate(levels):
        rows = clean[level_of == level]
        rows = rows[np.lexsort([results.num_clean[rows], results.value[rows]])]
        if not rows.size:
            continue
        a, clean_value = results.num_clean[rows], results.value[rows]
        margin = z * np.hypot(level_std, results.std[mixed])
        num_beat = np.searchsorted(clean_value, value - margin)
        num_not_beaten = np.searchsorted(clean_value, value + margin, side="right")
        smallest = np.append(np.inf, np.minimum.accumulate(a))[num_beat]
        # Complex numbers are ordered by (real, imaginary): the first row that ties and is larger than n_clean.
        tie = np.searchsorted(clean_value + 1j * a, value - margin + 1j * num_clean, side="right").clip(
            max=len(a) - 1
        )
        tied = (clean_value[tie] == value - margin) & (a[tie] > num_clean)
        smallest = np.where(tied, np.minimum(smallest, a[tie]), smallest)
        largest = np.append(np.maximum.accumulate(a[::-1])[::-1], -np.inf)[num_not_beaten]
        above, below = (smallest - num_clean) / num_noisy, (largest - num_clean) / num_noisy
        if above.min() < upper or (upper_pair is None and above.min() <= upper):
            best = int(above.argmin())
            row = rows[(a == smallest[best]) & (clean_value <= value[best])][0]
            upper, upper_pair = float(above[best]), _pair(results, int(row), int(mixed[best]))
        if below.max() > lower or (lower_pair is None and below.max() >= lower):
            best = int(below.argmax())
            row = rows[(a == largest[best]) & (clean_value > value[best])][-1]
            lower, lower_pair = float(below[best]), _pair(results, int(mixed[best]), int(row))
    return lower, upper, lower_pair, upper_pair


def _pair(results: Comparable, better: int, worse: int) -> Pair:
    if not results.has_std:
        return Pair(better, worse, None)
    std = np.hypot(results.std[better], results.std[worse])
    gap = results.value[worse] - results.value[better]
    return Pair(better, worse, float(norm.cdf(gap / std)) if std > 0 else float(gap > 0))


def joint_bounds(results: Comparable) -> JointBounds:
    """Bounds from all comparisons, also between two mixtures, with w(sigma) falling in sigma.

    A better result means a larger effective size, which is linear in the worths: each bound is a linear
    programme. When the comparisons contradict each other, the smallest margin at which they agree is used.
    """
    price_bounds(results)  # rejects tables without pairs
    programme = _Programme(results, 0.0)
    point, margin, too_small = programme.solve(), 0.0, 0.0
    if point is None:
        std = results.std if results.has_std else np.ones(len(results))
        if not std.all():  # rows without any doubt would contradict each other at every margin
            raise ValueError(
                f"{results.name}: line {results.line[std.argmin()]} has a standard deviation of 0, but the "
                "comparisons contradict each other: give it the standard deviation of a row like it"
            )
        margin = float(2 * np.ptp(results.value) / std.min())  # nothing is compared: surely feasible
        while margin > 1.01 * too_small:
            middle = float(np.sqrt(margin * max(too_small, 1e-4 * margin)))
            trial = _Programme(results, middle)
            if (found := trial.solve()) is None:
                too_small = middle
            else:
                programme, point, margin = trial, found, middle
    assert point is not None, "without comparisons any worth is feasible"
    ends = [[programme.solve(which, sign) for which in range(len(point))] for sign in (1, -1)]
    lower, upper = (np.array([end[w] for w, end in enumerate(row) if end is not None]) for row in ends)
    pairs = zip(*_Programme(results, 0.0).violated(point, _NUM_SHOWN), strict=True)
    violated = sorted(
        (_pair(results, int(i), int(j)) for i, j in pairs), key=lambda pair: -(pair.probability or 0)
    )
    return JointBounds(programme.sigma, lower, upper, margin, tuple(violated))


class _Programme:
    """The linear programme over the worths w (S,): surely better rows have the larger effective size.

    Row i is surely better than row j if v_i + w_i < v_j - w_j. Of these up to n^2 constraints only those
    that a solution violates are added, the worst ones first, until it violates none.
    """

    def __init__(self, results: Comparable, margin: float) -> None:
        self.sigma = np.unique(results.sigma[results.num_noisy > 0])
        scale, num_sigmas = results.num_clean.max(), len(self.sigma)
        self._size = results.num_clean / scale
        self._noisy = (results.sigma[:, None] == self.sigma) * results.num_noisy[:, None] / scale  # (n, S)
        std = results.std if results.has_std else np.ones(len(results))
        half = margin * std / np.sqrt(2)  # two rows alike then differ by `margin` standard errors
        self._best, self._worst = results.value - half, results.value + half
        self._order = np.argsort(-self._best, kind="stable")
        clean = _clean_rows(results)
        # Pairs with clean-only rows enter as limits on w, which also carries the convention on ties.
        mixed = [np.flatnonzero(results.sigma == level) for level in self.sigma]
        self._box = [_tightest(results, clean, rows, margin)[:2] for rows in mixed]
        # w falls in sigma: w_2 - w_1 <= 0 and so on.
        self._matrix = (np.eye(num_sigmas, k=1) - np.eye(num_sigmas))[:-1]
        self._limit = np.zeros(num_sigmas - 1)

    def solve(self, which: int = 0, sign: int = 0) -> Array | None:
        """Worths (S,) that make `which` smallest (sign 1) or largest (-1); None if none is feasible."""
        if any(low > high for low, high in self._box):
            return None
        objective = np.zeros(len(self.sigma))
        objective[which] = sign
        while True:
            done = linprog(objective, self._matrix, self._limit, bounds=self._box, method="highs")
            if done.status != 0:
                return None
            better, worse = self.violated(done.x)
            if not better.size:
                return done.x
            # n_worse + w n_noisy,worse <= n_better + w n_noisy,better
            self._matrix = np.vstack([self._matrix, self._noisy[worse] - self._noisy[better]])
            self._limit = np.append(self._limit, self._size[better] - self._size[worse])

    def violated(self, worth: Array, num_pairs: int = 20) -> tuple[Rows, Rows]:
        """The pairs (better, worse) that these worths order most wrongly, at most one for each better row."""
        size = self._size + self._noisy @ worth
        largest = np.maximum.accumulate(size[self._order])  # among the rows of the worst results
        holder = np.maximum.accumulate(np.where(size[self._order] == largest, np.arange(len(size)), 0))
        num_beaten = np.searchsorted(-self._best[self._order], -self._worst)
        beaten = np.flatnonzero(num_beaten)
        worse = self._order[holder[num_beaten[beaten] - 1]]
        gap = size[worse] - size[beaten]
        top = np.argsort(-gap, kind="stable")[:num_pairs]
        top = top[gap[top] > 1e-6]  # well above the solver's own tolerance
        return beaten[top], worse[top]
