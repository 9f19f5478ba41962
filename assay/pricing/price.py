"""One answer: what a noisy image is worth by level, and one price for each goal, from the same law.

Three goals, each a metric: structure, the held-out loss above the noise level; everything, that loss down to
one grey step; looks, FD. Results with a `levels.csv` have all three and the worth curve; a table of
results has those that its columns allow. A price has a verdict of three kinds: an estimate with its interval,
one end of it ("at least", "at most"), or undecided, with the reason and what would decide it.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL.Image import Image

from assay.errors import AssayError, about, check, choose
from assay.figure import draw
from assay.outcome import Outcome, read_outcomes, warn_if_stale
from assay.pricing.law import Farthest, Law, check_confidence, farthest, fit_laws, interval
from assay.pricing.paper import PAPER
from assay.pricing.quote import Quote, quoted_at
from assay.pricing.results import Array, Goal, LevelResults, Measured, read_levels

Verdict = Literal["estimate", "at least", "at most", "undecided"]
_AS_PRINTED = 0.005  # by which a level with three digits may be off
_MOST_FACTOR = 10.0  # between the ends of an interval that is an estimate
_LEAST_RATE = 1.5  # "at least" this many says something
_MOST_RATE = 30.0  # "at most" this many says something


@dataclass(frozen=True)
class Price:
    """The worth of a noisy image of a level for a goal, with its interval within [0, 1].

    `results` are what it was read from, by `law`. `limited` is how many times the training steps it would take
    to see what data is worth; 0 if data is the limit. `late` is the share of runs that were best at their last
    step, if that is known. A slip among the results, the `farthest` of them, spoils the law.
    """

    results: Measured
    law: Law
    sigma: float
    worth: float
    low: float
    high: float
    confidence: float
    farthest: Farthest | None = None
    limited: float = 0.0
    late: float = 0.0

    def __repr__(self) -> str:
        from assay.pricing.words import sentence

        return sentence(self)

    @property
    def has_slip(self) -> bool:
        """Whether one of the results is too far from the others to be right."""
        return self.farthest is not None and self.farthest.is_slip

    @property
    def goal(self) -> Goal:
        """What the noisy images are for."""
        return self.results.goal

    @property
    def rate(self) -> tuple[float, float, float]:
        """The replacement rate, noisy images per clean one, and its interval; infinite where w may be 0.

        NaN, with an interval from 1 to infinity, where the results do not tell.
        """
        if not self.tells:
            return math.nan, 1.0, math.inf
        rate, low, high = (1 / w if w > 0 else math.inf for w in (self.worth, self.high, self.low))
        return rate, low, high

    @property
    def tells(self) -> bool:
        """Whether the results say anything about what a noisy image is worth."""
        return not (self.has_slip or self.limited or self.too_few or self.high == 0 or self.flat)

    @property
    def too_few(self) -> int:
        """How many runs the law would need at least, if there are fewer; else 0."""
        needed = 4 + len(self.results.sigmas)  # one more than it has unknown numbers
        return needed if self.law.num_runs < needed else 0

    @property
    def flat(self) -> bool:
        """Whether more clean images may not improve results: then these do not say what any image is worth."""
        return self.law.gain < self.confidence

    @property
    def verdict(self) -> Verdict:
        """What kind of answer this is."""
        _, low, high = self.rate
        if not self.tells:
            return "undecided"
        if high <= _MOST_FACTOR * low:
            return "estimate"
        if low >= _LEAST_RATE:
            return "at least"
        return "at most" if high <= _MOST_RATE else "undecided"

    def blocks_for(self, factor: float) -> int:
        """About how many more blocks bring the ends of the interval within a factor of each other."""
        if self.low > 0 and self.high <= factor * self.low:
            return 0
        width, middle = self.high - self.low, max(self.worth, self.high / 4, 0.02)
        wanted = middle * 2 * (factor - 1) / (factor + 1)
        return max(1, math.ceil(self.law.num_blocks * ((width / wanted) ** 2 - 1) - 1e-6))


@dataclass(frozen=True)
class WorthCurve:
    """Worth by level of noisy images of one noise level, arrays (B,) by band; `quoted` if there is a quote.

    `limited` are the bands where training, not data, is the limit.
    """

    sigma: float
    levels: Array
    worth: Array
    low: Array
    high: Array
    limited: Array
    quoted: Array | None = None


@dataclass(frozen=True)
class Prices:
    """All that the results of one data set say about the worth of noisy images."""

    dataset: str
    prices: tuple[Price, ...]
    curves: tuple[WorthCurve, ...] = ()
    bands: tuple[Law, ...] = ()  # of the levels of a curve
    from_paper: bool = False

    def __repr__(self) -> str:
        from assay.pricing.words import price_lines

        return "\n".join(price_lines(self))

    @property
    def goals(self) -> dict[Goal, list[Price]]:
        """The prices of each goal, lowest noise first."""
        names = dict.fromkeys(price.goal for price in self.prices)
        return {goal: [price for price in self.prices if price.goal == goal] for goal in names}

    @property
    def leading(self) -> Price:
        """The price to act on: decided, for structure before looks before everything, at the highest noise."""
        order = ["structure", "looks", "everything"]
        return min(self.prices, key=lambda p: (p.verdict == "undecided", order.index(p.goal), -p.sigma))

    def of(self, goal: Goal, sigma: float | None = None) -> Price:
        """The price for a goal at a noise level, by default the highest."""
        known = self.goals.get(goal, ())
        found = [price for price in known if sigma is None or abs(price.sigma - sigma) < _AS_PRINTED * sigma]
        if not found:
            have = ", ".join(f"{price.goal} at {price.sigma:.3g}" for price in self.prices)
            wanted = goal if sigma is None else f"{goal} at noise {sigma:.3g}"
            key = "sigma" if goal in self.goals else "goal"
            raise AssayError(f"{self.dataset} has no price for {wanted}; it has {have}", key=key)
        return found[-1]

    def plot(self) -> Image:
        """The worth curve with its bands, the quote beside it; or the results with their law."""
        from assay.pricing.words import price_panels

        return draw(price_panels(self))


def price(
    table: Path | str | Any = PAPER,
    dataset: str | None = None,
    num_images: float | None = None,
    confidence: float = 0.95,
    quote: Quote | None = None,
) -> Prices:
    """How many noisy images replace a clean one, from results such as a study's folder or `results.csv`.

    `table` is a path, a DataFrame or a mapping of columns; without one the paper's tables are used, CIFAR-10
    unless `dataset` names another. `num_images` is the size of the data set if the table gives fractions.
    `quote`, of its clean images, is drawn beside the measured curve. Beside the `results.csv` of a study lie
    its losses by level, which a DataFrame of it lacks: structure has a price by path only.

    >>> prices = assay.price()
    >>> prices.of("looks", 0.2).verdict
    'estimate'
    >>> rate, low, high = prices.of("looks", 0.2).rate          # noisy images per clean one
    >>> picture = prices.plot()
    """
    if isinstance(table, str | Path) and Path(table) == PAPER:
        dataset = dataset or "cifar10"
    found = price_all(table, dataset, num_images, confidence, quote)
    if len(found) > 1:
        names = ", ".join(each.dataset for each in found)
        raise AssayError(f"there are several data sets ({names})", key="dataset", cure="choose one of them")
    return found[0]


def price_all(
    table: Path | str | Any,
    dataset: str | None = None,
    num_images: float | None = None,
    confidence: float = 0.95,
    quote: Quote | None = None,
) -> list[Prices]:
    """The same for each data set of a table."""
    check_confidence(confidence)
    with about(table if isinstance(table, str | Path) else None):
        outcomes, levels = read_results(table, num_images)
        is_paper = isinstance(table, str | Path) and Path(table).resolve() == PAPER.resolve()
        names = [each.configuration.dataset for each in outcomes] + [each.dataset for each in levels]
        if dataset is not None:
            choose(dataset, dict.fromkeys(names), "dataset")
        found = []
        for name in dict.fromkeys(names) if dataset is None else [dataset]:
            chosen = [each for each in outcomes if each.configuration.dataset == name]
            by_level = next((each for each in levels if each.dataset == name), None)
            found.append(replace(price_results(chosen, by_level, confidence, quote), from_paper=is_paper))
        return found


def price_results(
    outcomes: Iterable[Outcome],
    levels: LevelResults | None = None,
    confidence: float = 0.95,
    quote: Quote | None = None,
) -> Prices:
    """Prices of one data set, from its outcomes and, where there are any, its results by level."""
    outcomes, found = list(outcomes), list[Price]()
    curves: tuple[WorthCurve, ...] = ()
    bands: list[Law] = []
    if levels is not None:
        levels = levels.with_clean()
        goals = [levels.total("structure", sigma) for sigma in levels.sigmas] + [levels.total("everything")]
        fitted = fit_laws([*goals, *(levels.band(band) for band in range(len(levels.centres)))])
        bands = fitted[len(goals) :]
        is_limited = _is_limited(levels, bands)
        for which, (results, law) in enumerate(zip(goals, fitted, strict=False)):
            everything = results.goal == "everything"
            weights = levels.loss.mean(0) * levels.above(0.0 if everything else levels.sigmas[which])
            late = float(np.average(levels.is_late.mean(0), weights=weights))
            limited = np.average(is_limited, axis=1, weights=weights) > 0.5
            mine = _prices(results, law, confidence, limited * _times_the_steps(levels, weights > 0), late)
            found += mine if everything else [mine[which]]
        curves = tuple(_curves(levels, bands, is_limited, confidence, quote))
    metrics: dict[Goal, str] = {"looks": "fd"} if found else {"everything": "held_out_loss", "looks": "fd"}
    for goal, metric in metrics.items():
        if any(each.value(metric) is not None for each in outcomes):
            results = measure(outcomes, goal, metric)
            (law,) = fit_laws([results], relative=goal == "looks")
            found += _prices(results, law, confidence)
    if not found:
        raise AssayError("no result has a held-out loss or an FD", key="table", cure="add such a column")
    return Prices(found[0].results.dataset, tuple(found), curves, tuple(bands))


def measure(outcomes: Iterable[Outcome], goal: Goal, metric: str) -> Measured:
    """The outcomes of one data set that a price compares, as arrays.

    These have a value by the metric, clean images, full sampling, no consistency loss and no rounds; and the
    table `clean_mix` where there is one.
    """
    measured = [(each, each.configuration) for each in outcomes if each.value(metric) is not None]
    plain = [
        each for each in measured if each[1].sampling == "full" and not (each[1].consistency or each[1].rounds)
    ]
    plain = [each for each in plain if each[1].table == "clean_mix"] or plain
    kept = [each for each, setting in plain if setting.num_clean > 0]
    if not kept:
        what = f"no result with clean images and full sampling has a value by {metric}"
        raise AssayError(what, key="table", cure="add such results")
    for what, values in (
        ("num_images", {each.evaluation.num_images for each in kept}),
        ("metric", {each.evaluation.title(metric) for each in kept}),
    ):
        if len(values) > 1:
            listed = f"results differ in how they were measured: {' and '.join(sorted(map(str, values)))}"
            raise AssayError(listed, key=what, cure="keep those measured alike")
    settings = [each.configuration for each in kept]
    sigmas = sorted({level for setting in settings for level in setting.levels})
    blocks = [setting.seed or 0 for setting in settings]
    return Measured(
        settings[0].dataset, goal, kept[0].evaluation.title(metric), np.array(sigmas), np.array(blocks),
        np.array([setting.num_clean for setting in settings]),
        np.array([[dict(setting.noisy).get(level, 0.0) for level in sigmas] for setting in settings]),
        np.array([each.value(metric) for each in kept], float),
        np.array([each.evaluation.error(metric) or 0.0 for each in kept], float),
        tuple((one.noisy[0][0], each.value(metric) or 0.0) for each, one in plain if one.num_clean == 0),
    )  # fmt: skip


def read_results(
    table: Path | str | Any, num_images: float | None = None
) -> tuple[list[Outcome], list[LevelResults]]:
    """Outcomes and results by level of a folder, a file, a DataFrame or columns."""
    if not isinstance(table, str | Path):
        return list(read_outcomes(table, num_images).values()), []
    path = results = Path(table)
    if path.is_dir() or path.name == "levels.csv":
        results = (path if path.is_dir() else path.parent) / "results.csv"
    levels = results.with_name("levels.csv" if results.name == "results.csv" else f"{path.stem}.levels.csv")
    of_bands = levels.exists() and "level_low" in levels.read_text(errors="replace")  # not levels of images
    by_level = read_levels(levels) if of_bands else []
    by_level = [each for each in by_level if each.table == "clean_mix"] or by_level
    if by_level and not results.exists():
        return [], by_level
    if path.is_dir():
        again = "call `run_study` or `assay study run` again"
        cure = f"if its study is not finished, {again}, or `assay study report` for what is there"
        cure += f" (in Python: assay.open_study({str(path)!r}, claim=False).prices())"
        check([(not results.exists(), AssayError("has no results.csv", path=path, cure=cure))])
        warn_if_stale(path)
    return list(read_outcomes(results, num_images).values()), by_level


def _prices(
    results: Measured, law: Law, confidence: float, limited: ArrayLike = 0.0, late: float = 0.0
) -> list[Price]:
    """The price of each noise level."""
    ends, worst = interval(law.worth, confidence), farthest(results)
    columns = np.transpose(np.broadcast_arrays(results.sigmas, *ends, limited)).tolist()
    return [
        Price(results, law, sigma, worth, low, high, confidence, worst, times, late)
        for sigma, worth, low, high, times in columns
    ]


def _is_limited(levels: LevelResults, bands: Sequence[Law]) -> NDArray[np.bool_]:
    """Whether training, not data, is the limit, by noise of the images and by band (S, B).

    That is where most runs are best at their last stop and either more clean images do not help or mixes do
    no better than their clean images alone. A goal is limited if such bands hold most of its loss.
    """
    useless = np.transpose([(interval(law.worth)[0] == 0) | (law.gain < 0.9) for law in bands])
    return useless & (levels.is_late.mean(0) >= 0.5)


def _times_the_steps(levels: LevelResults, used: NDArray[np.bool_]) -> float:
    """How many times the steps it takes at least in these bands (B,): stops grow as the number of images."""
    step, late = levels.step[:, used], levels.is_late[:, used]
    size = levels.num_clean + levels.num_noisy.sum(1)
    if late.all():
        return 4.0
    pace = np.median((step / size[:, None])[~late])
    return float(np.clip(np.ceil(pace * size.max() / levels.last_step.max()), 2, 10))


def _curves(
    levels: LevelResults,
    bands: list[Law],
    is_limited: NDArray[np.bool_],
    confidence: float,
    quote: Quote | None,
) -> list[WorthCurve]:
    """The worth in each band by the law of that band, nothing shared between them."""
    worth, low, high = np.stack([np.stack(interval(law.worth, confidence)) for law in bands], 2)  # (S, B) each
    found = []
    for level, sigma in enumerate(levels.sigmas.tolist()):
        quoted = None if quote is None else quoted_at(quote, sigma, levels.centres)
        ends = worth[level], low[level], high[level]
        found.append(WorthCurve(sigma, levels.centres, *ends, is_limited[level], quoted))
    return found
