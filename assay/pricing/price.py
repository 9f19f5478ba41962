"""One answer: what a noisy image is worth by level, and one price for each goal, from the same law.

Three goals, each a metric: structure, the held-out loss above the noise level; everything, that loss down to
one grey step; looks, FD. Results with a `levels.csv` have all three and the worth curve; a table of
results has those that its columns allow. A price has a verdict of three kinds: an estimate with its interval,
one end of it ("at least", "at most"), or undecided, with the reason and what would decide it.
"""

import math
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Image

from assay.errors import AssayError, about, choose
from assay.figure import draw
from assay.outcome import Outcome, read_outcomes
from assay.pricing.law import Law, check_confidence, fit_laws, interval
from assay.pricing.paper import PAPER
from assay.pricing.quote import Quote, quoted_at
from assay.pricing.results import Array, Goal, LevelResults, Measured, read_levels

Verdict = Literal["estimate", "at least", "at most", "undecided"]
_MOST_FACTOR = 10.0  # between the ends of an interval that is an estimate
_LEAST_RATE = 1.5  # "at least" this many says something
_MOST_RATE = 30.0  # "at most" this many says something


@dataclass(frozen=True)
class Price:
    """The worth of a noisy image of a level for a goal, with its interval within [0, 1].

    `results` are what it was read from, by `law`. `limited` is how many times the training steps it would take
    to see what data is worth; 0 if data is the limit.
    """

    results: Measured
    law: Law
    sigma: float
    worth: float
    low: float
    high: float
    confidence: float
    limited: float = 0.0

    @property
    def goal(self) -> Goal:
        """What the noisy images are for."""
        return self.results.goal

    @property
    def rate(self) -> tuple[float, float, float]:
        """The replacement rate, noisy images per clean one, and its interval; infinite where w may be 0."""
        rate, low, high = (1 / w if w > 0 else math.inf for w in (self.worth, self.high, self.low))
        return rate, low, high

    @property
    def rises(self) -> bool:
        """Whether results surely rise with the number of images, where a price needs them to fall."""
        return self.law.gain < 0.01

    @property
    def flat(self) -> bool:
        """Whether more clean images may not improve results: then these do not say what any image is worth."""
        return self.law.gain < self.confidence

    @property
    def verdict(self) -> Verdict:
        """What kind of answer this is."""
        _, low, high = self.rate
        if self.limited or self.high == 0 or self.flat:
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

    def of(self, goal: Goal, sigma: float | None = None) -> Price:
        """The price for a goal at a noise level, by default the highest."""
        found = [price for price in self.prices if price.goal == goal and sigma in (None, price.sigma)]
        if not found:
            have = ", ".join(f"{price.goal} at {price.sigma:.3g}" for price in self.prices)
            wanted = goal if sigma is None else f"{goal} at noise {sigma:.3g}"
            key = "sigma" if goal in {price.goal for price in self.prices} else "goal"
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
    `quote`, of its clean images, is drawn beside the measured curve.

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
        names = dict.fromkeys(
            [*(each.configuration.dataset for each in outcomes), *(each.dataset for each in levels)]
        )
        if dataset is not None:
            choose(dataset, names, "dataset")
        found = []
        for name in [dataset] if dataset is not None else names:
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
        for which, (results, law) in enumerate(zip(goals, fitted, strict=False)):
            everything = results.goal == "everything"
            above = levels.centres > (0.0 if everything else levels.sigmas[which])
            for level in range(len(levels.sigmas)) if everything else (which,):
                limited = _limited(levels, law, level, above)
                found.append(_price(results, law, level, confidence, limited))
        curves = tuple(_curves(levels, bands, confidence, quote))
    for goal, metric in _goals(outcomes, bool(found)):
        results = measure(outcomes, goal, metric)
        (law,) = fit_laws([results], relative=goal == "looks")
        found += [_price(results, law, level, confidence, 0.0) for level in range(len(results.sigmas))]
    if not found:
        raise AssayError("no result has a held-out loss or an FD", key="table", cure="add such a column")
    return Prices(found[0].results.dataset, tuple(found), curves, tuple(bands))


def _goals(outcomes: list[Outcome], have_levels: bool) -> list[tuple[Goal, str]]:
    """The goals that a table has columns for."""
    known: list[tuple[Goal, str]] = [("looks", "fd")]
    if not have_levels:
        known = [("everything", "held_out_loss"), *known]
    return [(goal, name) for goal, name in known if any(one.value(name) is not None for one in outcomes)]


def measure(outcomes: Iterable[Outcome], goal: Goal, metric: str) -> Measured:
    """The outcomes of one data set that a price compares, as arrays.

    These have a value by the metric, clean images, full sampling, no consistency loss and no rounds; and the
    table `clean_mix` where there is one.
    """
    plain = [
        (each, each.configuration)
        for each in outcomes
        if each.value(metric) is not None
        and (each.configuration.sampling, each.configuration.consistency, each.configuration.rounds)
        == ("full", False, 0)
    ]
    if any(setting.table == "clean_mix" for _, setting in plain):
        plain = [(each, setting) for each, setting in plain if setting.table == "clean_mix"]
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
        try:
            columns = {str(name): list(values) for name, values in dict(table).items()}
        except (TypeError, ValueError):
            cure = "give a DataFrame, or columns: {'sigma': [...], ...}"
            raise AssayError("is no table", key="table", cure=cure) from None
        if len({len(values) for values in columns.values()}) > 1:
            raise AssayError("has columns of unequal length", path="the table", cure="fill the shorter ones")
        with tempfile.TemporaryDirectory() as folder:
            path, rows = Path(folder) / "table.csv", [columns, *zip(*columns.values(), strict=True)]
            path.write_text("".join(",".join(map(_cell, row)) + "\n" for row in rows))
            try:
                return list(read_outcomes(path, num_images).values()), []
            except AssayError as error:
                error.path = str(error.path).replace(str(path), "the table")
                raise
    path = Path(table)
    folder_of = path if path.is_dir() else path.parent
    results, levels = folder_of / "results.csv", folder_of / "levels.csv"
    if not path.is_dir() and path.name != "levels.csv":
        results, levels = path, levels if path.name == "results.csv" else path.with_suffix(".levels.csv")
    by_level = read_levels(levels) if levels.exists() and "level_low" in _first_line(levels) else []
    tables = {each.table for each in by_level}
    by_level = [each for each in by_level if "clean_mix" not in tables or each.table == "clean_mix"]
    if by_level and not results.exists():
        return [], by_level
    if path.is_dir() and not results.exists():
        again = "call `run_study` or `assay study run` again"
        cure = f"if its study is not finished, {again}, or `assay study report` for what is there"
        raise AssayError("has no results.csv", path=path, cure=cure)
    return list(read_outcomes(results, num_images).values()), by_level


def _first_line(path: Path) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.readline()


def _cell(value: object) -> str:
    text = "" if value is None or value != value else str(value)
    return f'"{text}"' if "," in text else text


def _price(results: Measured, law: Law, level: int, confidence: float, limited: float) -> Price:
    worth, low, high = (float(end[level]) for end in interval(law.worth, confidence))
    return Price(results, law, float(results.sigmas[level]), worth, low, high, confidence, limited)


def _limited(levels: LevelResults, law: Law, level: int, bands: NDArray[np.bool_]) -> float:
    """How many times the steps it would take if training is the limit in these bands (B,), else 0.

    It is where most runs are best at their last stop (bands count by their part of the loss) and either more
    clean images do not help or mixes do no better than their clean images alone. Where runs did stop early,
    stops grow as the number of images.
    """
    step, last = levels.step[:, bands], levels.last_step[:, None]
    late = step >= last
    useless = interval(law.worth)[0][level] == 0
    if np.average(late.mean(0), weights=levels.loss[:, bands].mean(0)) < 0.5 or not (law.gain < 0.9 or useless):
        return 0.0
    size = levels.num_clean + levels.num_noisy.sum(1)
    if late.all():
        return 4.0
    pace = np.median((step / size[:, None])[~late])
    return float(np.clip(np.ceil(pace * size.max() / levels.last_step.max()), 2, 10))


def _curves(levels: LevelResults, bands: list[Law], confidence: float, quote: Quote | None) -> list[WorthCurve]:
    """The worth in each band by the law of that band, nothing shared between them."""
    worth, low, high = np.stack([np.stack(interval(law.worth, confidence)) for law in bands], 2)  # (S, B) each
    only = np.eye(len(bands), dtype=bool)
    found = []
    for level, sigma in enumerate(levels.sigmas.tolist()):
        limited = [bool(_limited(levels, law, level, one)) for law, one in zip(bands, only, strict=True)]
        quoted = None if quote is None else quoted_at(quote, sigma, levels.centres)
        ends = worth[level], low[level], high[level]
        found.append(WorthCurve(sigma, levels.centres, *ends, np.array(limited), quoted))
    return found
