"""All that a table says about prices, in one object, and the same as plain rows for JSON and CSV."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from assay.pricing.bounds import JointBounds, Pair, PriceBounds, joint_bounds, price_bounds
from assay.pricing.law import MIN_ROWS, Law, LeftOut, TheoryFit, fit_law, fit_theory, leave_one_out
from assay.pricing.plan import Plan
from assay.pricing.table import PAPER_BOXES, Comparable

_BOX_ROUNDING = 0.005  # the paper rounds 7/6 to 1.17


@dataclass(frozen=True)
class PriceReport:
    """Bounds, law, left-out predictions and the theory's fits of one table; no law with too few rows."""

    results: Comparable
    confidence: float
    bounds: list[PriceBounds]
    joint: JointBounds | None
    law: Law | None
    left_out: LeftOut | None
    theory: list[TheoryFit]

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
            row: dict[str, Any] = {"dataset": self.results.name, "sigma": bounds.sigma}
            row |= _range("noisy_per_clean", inverse(bounds.lower, bounds.upper))
            if bounds.interval:
                row |= _range("interval", inverse(*bounds.interval))
            if self.joint:
                row |= _range("joint", inverse(self.joint.lower[i], self.joint.upper[i]))
            if self.law:
                row |= {"law": 1 / float(self.law.price(bounds.sigma))}
                row |= _range("law", inverse(*self.law.price_interval(bounds.sigma)))
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
        found: dict[str, Any] = {"dataset": self.results.name, "confidence": self.confidence, "prices": prices}
        found["num_without_std"] = self.results.num_without_std
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
        columns = {n: getattr(results, n) for n in ("line", "num_clean", "num_noisy", "sigma", "fd")}
        columns |= {"fitted": left_out.fitted, "left_out": left_out.predicted}
        rows = zip(*(values.tolist() for values in columns.values()), left_out.extrapolates, strict=True)
        return [dict(zip((*columns, "extrapolates"), row, strict=True)) for row in rows]

    def _pair(self, pair: Pair | None) -> dict[str, Any] | None:
        if pair is None:
            return None
        better, worse = self.results.line[[pair.better, pair.worse]].tolist()
        return {"better_line": better, "worse_line": worse, "probability": pair.probability}


def price_report(results: Comparable, confidence: float = 0.95, joint: bool = False) -> PriceReport:
    """Price a table: bounds on c for each sigma, the law and what it predicts for rows it never saw."""
    bounds = price_bounds(results, confidence)
    together = joint_bounds(results) if joint else None
    if len(results) <= MIN_ROWS:  # leaving one out must leave enough
        return PriceReport(results, confidence, bounds, together, None, None, [])
    law = fit_law(results, confidence)
    return PriceReport(
        results, confidence, bounds, together, law, leave_one_out(results, law), fit_theory(results)
    )


def plan_rows(plan: Plan) -> list[dict[str, Any]]:
    """One flat row per kind of image, clean first."""
    return [
        asdict(purchase.offer)
        | {"num_images": purchase.num_images, "cost": purchase.cost}
        | {"next_dollar": purchase.next_dollar, "break_even": purchase.break_even}
        for purchase in plan.purchases
    ]


def inverse(lower: float, upper: float) -> tuple[float, float]:
    """Bounds on 1 / c from bounds on c; infinite where c may be 0 or less."""
    low, high = (float(1 / c) if c > 0 else np.inf for c in (upper, lower))
    return low, high


def _range(name: str, ends: tuple[float, float]) -> dict[str, float]:
    return {f"{name}_low": ends[0], f"{name}_high": ends[1]}
