"""All that a table says about prices, in one object, in words, and as plain rows for JSON and CSV.

The price of a noisy image has one meaning here: how many of them replace a clean one, 1 / w with the w of
`bounds`. Bounds compare rows, the curve inverts the clean-only rows, the law is fitted to all rows; for the law
it is computed for the mixes of the table, as for the curve. The law's own weight c is shown under its name.
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from assay.figure import draw
from assay.outcome import CURRENCIES
from assay.pricing.bounds import JointBounds, Pair, PriceBounds, joint_bounds, price_bounds
from assay.pricing.curve import CurvePrice, EqualClean, curve_prices, pooled_worth
from assay.pricing.law import (
    MIN_ROWS,
    Law,
    LeftOut,
    TheoryFit,
    fit_law,
    fit_theory,
    leave_one_out,
    too_few_rows,
)
from assay.pricing.plan import Plan
from assay.pricing.table import PAPER, PAPER_BOXES, PAPER_NUM_IMAGES, Comparable, read_one

if TYPE_CHECKING:
    from PIL.Image import Image

_BOX_ROUNDING = 0.005  # the paper rounds 7/6 to 1.17
_MAX_FACTOR = 30.0  # between the ends of an interval that is of practical use
_NUM_DEVIATIONS, _SMALL_MISS = 3.0, 0.05  # a row fits badly beyond both; the latter for results far apart
_NUM_NAMED = 5  # of these rows
_SURELY = 4.0  # standard errors


@dataclass(frozen=True)
class Estimate:
    """The price at a level, as noisy images for one clean one (NaN if only its ends are known)."""

    price: float
    ends: tuple[float, float] | None
    num_runs: int
    how: str
    contradiction: str | None


@dataclass(frozen=True)
class PriceReport:
    """Bounds, curve, law, left-out predictions and the theory's fits of one table; no law with too few rows."""

    results: Comparable
    confidence: float
    bounds: list[PriceBounds]
    curve: list[CurvePrice]  # one for each of the bounds, or none at all
    joint: JointBounds | None
    law: Law | None
    left_out: LeftOut | None
    theory: list[TheoryFit]

    def __repr__(self) -> str:
        doubts = [f"{doubt[0].upper()}{doubt[1:]}." for doubt in self.doubts()]
        return "\n".join([*(self.sentence(bounds.sigma) for bounds in self.bounds), *doubts])

    def plot(self) -> "Image":
        """A figure of the results with the fitted law, and of the price against the noise level."""
        from assay.pricing.plot import price_panels

        return draw(price_panels(self))

    @property
    def no_law(self) -> str:
        """Why there is no law."""
        return too_few_rows(self.results)

    def law_worth(self, sigma: float) -> tuple[float, tuple[float, float]]:
        """What a noisy image of the table's mixes is worth by the law, and its interval."""
        assert self.law is not None
        rows = np.flatnonzero(self.results.sigma == sigma)
        fit, draws = self.law.equal_clean(self.results.num_clean[rows], self.results.num_noisy[rows], sigma)
        worth = pooled_worth(self.results, rows, draws)
        return float(pooled_worth(self.results, rows, fit)), self.law.interval(worth)

    def law_is_open(self, sigma: float) -> bool:
        """Whether the law leaves the price open, because its interval is too wide to be of use."""
        low, high = self.law_worth(sigma)[1]
        return high > _MAX_FACTOR * low

    def estimate(self, sigma: float) -> "Estimate":
        """The price at a level by the learning curve, or else by comparing runs."""
        bounds = next(b for b in self.bounds if b.sigma == sigma)
        curve = next((c for c in self.curve if c.sigma == sigma), None)
        wrong = self.rises()
        if wrong is None and bounds.interval is None and self.results.has_std:
            wrong = f"at noise {sigma:g} {bounds.contradiction}"
        if wrong:
            return Estimate(math.nan, None, int(self.results.num_runs.sum()), "", wrong)
        if curve and curve.worth is not None:
            price, _ = inverse(curve.worth, curve.worth)
            ends = inverse(*curve.interval) if curve.interval else None
            return Estimate(price, ends, curve.num_runs, "by the clean-only learning curve", None)
        ends = inverse(*bounds.interval) if bounds.interval else None
        return Estimate(math.nan, ends, int(self.results.num_runs.sum()), "by comparing runs", None)

    def sentence(self, sigma: float) -> str:
        """The price at a level in a sentence, with its interval and the number of runs."""
        found, noisy = self.estimate(sigma), f"noisy images at noise {sigma:g}"
        by = f"By {self.results.called},"
        if found.contradiction:
            return f"{by} {found.contradiction}."
        if found.ends is None:
            if math.isfinite(found.price):
                about = _replace_one(f"about {found.price:.3g}", sigma)
                return f"{by} {about}; no errors say how sure that is."
            return f"{by} what {noisy} are worth is not known: the table has no errors."
        low, high = found.ends
        sure = f"{self.confidence:.0%} interval from {found.num_runs} runs, {found.how}{self._seeds}"
        if math.isinf(low):
            return f"{by} {noisy} are worth nothing: a mix is no better than its clean images alone ({sure})."
        if low <= 1 and high > _MAX_FACTOR:
            return f"{by} these runs do not decide what {noisy} are worth ({sure}).{self._advice(sigma)}"
        if math.isinf(high):
            return (
                f"{by} a noisy image at noise {sigma:g} is worth at most {1 / low:.2g} clean ones, and perhaps "
                f"nothing: at least {low:.3g} of them replace a clean one ({sure})."
            )
        if math.isnan(found.price):
            return f"{by} {_replace_one(between(low, high), sigma)} ({sure}).{self._advice(sigma)}"
        return f"{by} {_replace_one(f'{found.price:.3g}', sigma)} ({between(low, high)}: {sure})."

    def rises(self) -> str | None:
        """Where results surely get worse with more clean images: then this currency cannot price anything."""
        results = self.results
        rows = np.flatnonzero(results.num_noisy == 0)
        rows = rows[np.argsort(results.num_clean[rows])]
        best = rows[0] if rows.size else 0
        for row in rows:
            best = row if results.value[row] < results.value[best] else best
            if results.value[row] - results.value[best] > _SURELY * np.hypot(
                results.std[row], results.std[best]
            ):
                fewer, more = (f"{results.value[i]:.4g} ({results.setting(int(i))})" for i in (best, row))
                return f"more clean images make it worse, {fewer} and {more}, so that it cannot price images"
        return None

    @property
    def _few_clean(self) -> str:
        return (
            f"{self.results.num_few_clean} result(s) with a small part of clean images are left out; "
            "`assay price --min-clean-fraction 0` uses them"
        )

    @property
    def _seeds(self) -> str:
        """What the interval leaves out."""
        once = self.results.num_runs == 1
        if not once.any():
            return ""
        which = "each setting" if once.all() else "some settings"
        return f"; {which} ran once, and more seeds would show the spread between runs"

    def _advice(self, sigma: float) -> str:
        if self.results.num_few_clean:
            return f" {self._few_clean}."
        if not self.curve:
            return " A learning curve takes two clean-only settings."
        mixes = next(c.mixes for c in self.curve if c.sigma == sigma)
        return "".join(f" {mix.outside[0].upper()}{mix.outside[1:]}." for mix in mixes[:1] if mix.outside)

    def doubts(self) -> list[str]:
        """What a reader of a price or a plan must know: contradictions, missing errors, prices left open."""
        results, said = self.results, []
        if rises := self.rises():
            said.append(f"by {results.called}, {rises}")
        for b in self.bounds:
            where = f"sigma {b.sigma:g}: "
            if b.contradiction:
                said.append(where + b.contradiction)
            if disagreement := self._disagreement(b):
                said.append(where + disagreement)
            if self.law and self.law_is_open(b.sigma):
                said.append(f"{where}the law leaves the price open, so that a plan with it is a guess")
        if results.num_few_clean:
            said.append(self._few_clean)
        if results.num_many_levels:
            said.append(
                f"{results.num_many_levels} row(s) of {results.name} have several noise levels and are left "
                "out: a price compares clean images with noisy ones of one level"
            )
        if results.num_without_std:
            said.append(
                f"{results.num_without_std} row(s) of {results.name} have no standard deviation and were given "
                "the largest of the others: fill them in for narrower intervals"
            )
        return said

    def _disagreement(self, bounds: PriceBounds) -> str | None:
        """Why the law's price is outside the bounds, if it is."""
        if not self.law or bounds.contradiction:
            return None
        worth, (low, high) = self.law_worth(bounds.sigma)
        if bounds.lower <= worth <= bounds.upper:
            return None
        sides = [pair for pair in (bounds.upper_pair, bounds.lower_pair) if pair and pair.probability]
        pair = min(sides, key=lambda pair: pair.probability or 0, default=None)
        weakest = "" if pair is None else f", the weaker of which holds with p = {pair.probability:.2f}"
        agree = (
            "the intervals overlap"
            if _overlap(bounds.interval, (low, high))
            else "the intervals do not overlap"
        )
        return (
            f"the law's {1 / worth:.3g} is outside the bounds {_shown(inverse(bounds.lower, bounds.upper))}; "
            f"it uses all {len(self.results)} rows, while each bound comes from one pair{weakest}; {agree}"
        )

    def fit_sentence(self) -> str:
        """How well the law predicts rows that it was not fitted to, and which ones it predicts badly."""
        if self.left_out is None:
            return self.no_law
        error, outside = (
            self.left_out.error,
            np.array([bool(reasons) for reasons in self.left_out.extrapolates]),
        )
        said = f"Left out one at a time, rows are predicted with a median error of {np.median(error):.2%}"
        if not outside.all():
            said += f" and a largest error of {error[~outside].max():.1%}"
        if outside.any():
            said += f", not counting {outside.sum()} that are extrapolations (up to {error[outside].max():.0%})"
        bad = self.bad_rows()
        worst = "; ".join(
            f"{self.results.setting(row)} ({self.results.value[row]:.4g} measured, "
            f"{self.left_out.predicted[row]:.4g} predicted)"
            for row in bad[:_NUM_NAMED]
        )
        more = f" and {len(bad) - _NUM_NAMED} more" if len(bad) > _NUM_NAMED else ""
        return said + "." + (f" Predicted badly: {worst}{more}." if bad else "")

    def bad_rows(self) -> list[int]:
        """Rows that a law fitted to the others predicts much worse than their errors explain."""
        if self.left_out is None:
            return []
        outside = np.array([bool(reasons) for reasons in self.left_out.extrapolates])
        usual = 1.48 * np.median(self.left_out.error[~outside]) if not outside.all() else 0.0
        value = self.results.value
        allowed = _NUM_DEVIATIONS * np.hypot(self.results.std / value, usual)
        allowed = np.maximum(allowed, _SMALL_MISS * min(1.0, np.ptp(value) / np.median(value)))
        return np.flatnonzero((self.left_out.error > allowed) & ~outside).tolist()

    def box(self, bounds: PriceBounds) -> tuple[float, float] | None:
        """The paper's boxed bounds on 1 / c for this data set and sigma, if this is its table and has one."""
        return PAPER_BOXES.get((self.results.dataset, bounds.sigma)) if self.results.from_paper else None

    def differs_from_box(self, bounds: PriceBounds) -> bool:
        """Whether the table gives other bounds than the paper's box."""
        box = self.box(bounds)
        ours = inverse(bounds.lower, bounds.upper)
        return box is not None and bool(np.abs(np.subtract(ours, box)).max() > _BOX_ROUNDING)

    def price_rows(self) -> list[dict[str, Any]]:
        """One flat row per sigma: noisy images for one clean image by bounds, interval and law."""
        rows = []
        for i, bounds in enumerate(self.bounds):
            row: dict[str, Any] = {
                "dataset": self.results.name,
                "by": self.results.metric,
                "sigma": bounds.sigma,
            }
            row |= _range("noisy_per_clean", inverse(bounds.lower, bounds.upper))
            if bounds.interval:
                row |= _range("interval", inverse(*bounds.interval))
            if self.joint:
                row |= _range("joint", inverse(self.joint.lower[i], self.joint.upper[i]))
            if self.curve:
                curve = self.curve[i]
                row["curve"] = None if curve.worth is None else inverse(curve.worth, curve.worth)[0]
                row |= _range("curve", inverse(*curve.interval)) if curve.interval else {}
            if self.law:
                worth, ends = self.law_worth(bounds.sigma)
                row |= {"law": inverse(worth, worth)[0]} | _range("law", inverse(*ends))
                row |= {"law_weight": float(self.law.weight(bounds.sigma))}
                row |= _range("law_weight", self.law.weight_interval(bounds.sigma))
            if box := self.box(bounds):
                row |= _range("paper_box", box) | {"differs_from_box": self.differs_from_box(bounds)}
            row["contradiction"] = bounds.contradiction
            rows.append(row)
        return rows

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        prices = self.price_rows()
        for row, bounds in zip(prices, self.bounds, strict=True):
            row |= {"lower_pair": self._pair(bounds.lower_pair), "upper_pair": self._pair(bounds.upper_pair)}
            row["sentence"] = self.sentence(bounds.sigma)
        found: dict[str, Any] = {"dataset": self.results.name, "by": self.results.metric}
        found |= {"confidence": self.confidence, "prices": prices, "fit": self.fit_sentence()}
        found["num_without_std"] = self.results.num_without_std
        found["mixes"] = [self._mix(mix) for curve in self.curve for mix in curve.mixes]
        if self.joint:
            violated = [self._pair(pair) for pair in self.joint.violated]
            found["joint"] = {"margin": self.joint.margin, "violated": violated}
        if self.law and self.left_out:
            found["law"] = self.law.as_dict() | {"median_left_out_error": float(np.median(self.left_out.error))}
            found["rows"] = self.fitted_rows()
            found["theory"] = [asdict(fit) for fit in self.theory]
        return found

    def fitted_rows(self) -> list[dict[str, Any]]:
        """One flat row per row of the table: data, law, and the prediction of a law that never saw the row."""
        results, left_out = self.results, self.left_out
        if left_out is None:
            return []
        columns = {n: getattr(results, n) for n in ("line", "num_clean", "num_noisy", "sigma", "value")}
        columns |= {"fitted": left_out.fitted, "left_out": left_out.predicted}
        rows = zip(*(values.tolist() for values in columns.values()), left_out.extrapolates, strict=True)
        return [dict(zip((*columns, "extrapolates"), row, strict=True)) for row in rows]

    def _mix(self, mix: EqualClean) -> dict[str, Any]:
        names = ("line", "num_clean", "num_noisy", "sigma")
        row = {name: getattr(self.results, name)[mix.row].item() for name in names}
        return (
            row | {"equal_clean": mix.num_images, "outside": mix.outside} | _range("equal", (mix.low, mix.high))
        )

    def _pair(self, pair: Pair | None) -> dict[str, Any] | None:
        if pair is None:
            return None
        better, worse = self.results.line[[pair.better, pair.worse]].tolist()
        return {"better_line": better, "worse_line": worse, "probability": pair.probability}


def price(
    table: Path | str = PAPER,
    dataset: str | None = None,
    by: Literal["score", "score_above", "fd"] | None = None,
    num_images: float | None = None,
    confidence: float = 0.95,
) -> PriceReport:
    """How many noisy images replace a clean one, from a table of results such as a study's `results.csv`.

    Without a table the paper's is used, with its CIFAR-10 unless `dataset` names another. `by` is the
    currency: by default the held-out score if the table has it, else FD. `num_images` is the size of the data
    set if the table gives fractions.

    >>> prices = assay.price()
    >>> low, high = prices.estimate(0.2).ends                   # noisy images for a clean one, 95 % interval
    >>> print(f"{low:.1f} to {high:.1f}")
    2.8 to 4.5
    >>> print(prices.sentence(0.2))
    By FID, ... noisy images at noise 0.2 replace a clean one (2.78 to 4.46: ...).
    >>> picture = prices.plot()
    """
    path = Path(table)
    if path == PAPER:
        dataset = dataset or "cifar10"
        num_images = PAPER_NUM_IMAGES.get(dataset) if num_images is None else num_images
    currency = CURRENCIES[by] if by else None
    return price_report(read_one(path, dataset=dataset, num_images=num_images, currency=currency), confidence)


def price_report(results: Comparable, confidence: float = 0.95, joint: bool = False) -> PriceReport:
    """Price a table: bounds, curve and law for each sigma, and what the law predicts for rows it never saw."""
    bounds, curve = price_bounds(results, confidence), curve_prices(results, confidence)
    together = joint_bounds(results) if joint else None
    if len(results) < MIN_ROWS:
        return PriceReport(results, confidence, bounds, curve, together, None, None, [])
    law = fit_law(results, confidence)
    left_out, theory = leave_one_out(results, law), fit_theory(results)
    return PriceReport(results, confidence, bounds, curve, together, law, left_out, theory)


def plan_rows(plan: Plan) -> list[dict[str, Any]]:
    """One flat row per kind of image, clean first."""
    return [
        asdict(purchase.offer)
        | {"num_images": purchase.num_images, "cost": purchase.cost}
        | {"next_dollar": purchase.next_dollar, "break_even": purchase.break_even}
        for purchase in plan.purchases
    ]


def inverse(lower: float, upper: float) -> tuple[float, float]:
    """Bounds on 1 / w from bounds on w; infinite where w may be 0 or less."""
    low, high = (float(1 / w) if w > 0 else np.inf for w in (upper, lower))
    return low, high


def between(low: float, high: float) -> str:
    """A range in words; ends that round to the same number are shown once."""
    if f"{low:.3g}" == f"{high:.3g}":
        return f"about {low:.3g}"
    return f"{low:.3g} to {high:.3g}" if math.isfinite(high) else f"{low:.3g} or more"


def _replace_one(amount: str, sigma: float) -> str:
    if amount.removeprefix("about ") == "1":
        return f"{amount} noisy image at noise {sigma:g} replaces a clean one"
    return f"{amount} noisy images at noise {sigma:g} replace a clean one"


def _shown(ends: tuple[float, float]) -> str:
    return f"[{ends[0]:.3g}, {ends[1]:.3g}]"


def _overlap(one: tuple[float, float] | None, other: tuple[float, float]) -> bool:
    return one is not None and one[0] <= other[1] and other[0] <= one[1]


def _range(name: str, ends: tuple[float, float]) -> dict[str, float]:
    return {f"{name}_low": ends[0], f"{name}_high": ends[1]}
