"""The figures of prices and plans."""

import numpy as np

from assay.figure import COLOURS, Panel, Series
from assay.pricing.law import Law
from assay.pricing.plan import Market, Offer, Plan, budget_line
from assay.pricing.report import PriceReport, inverse
from assay.pricing.table import Array, Comparable

_MAX_POINTS = 2000


def price_panels(report: PriceReport) -> list[Panel]:
    """Results against clean images, measured (points) and by the law (lines); and the price against sigma."""
    results, law = report.results, report.law
    unit, metric = "clean images" if results.counted else "clean part of the data set", results.metric
    measured = Panel(f"{results.name}: {metric}, and the law (lines)", unit, metric, log_x=True, log_y=True)
    price = Panel(f"{results.name}: price", "sigma", "noisy images for one clean image")
    for which, sigma in enumerate([0.0, *(bounds.sigma for bounds in report.bounds)]):
        name, colour = f"sigma {sigma:g}" if sigma else "clean only", COLOURS[which % len(COLOURS)]
        rows = results.take(results.sigma == sigma)
        rows = rows.take(np.argsort(rows.num_clean)[:: -(-len(rows) // _MAX_POINTS)])
        measured.series.append(Series(name, "points", rows.num_clean, rows.value, colour=colour))
        if law:
            clean, noisy = _between(rows)
            measured.series.append(Series("", "line", clean, law.value(clean, noisy, sigma), colour=colour))
    highest, percent = max(bounds.sigma for bounds in report.bounds), f"{report.confidence:.0%}"
    curve = [inverse(*(c.interval or (0, 0))) for c in report.curve]
    fits = [inverse(*report.law_worth(b.sigma)[1]) if law else None for b in report.bounds]
    # Bars side by side around each sigma, so that none hides another.
    for place, name, colour, width, ends in (
        (-2, "paper's box", COLOURS[4], 5.0, [report.box(b) for b in report.bounds]),
        (-1, "bounds", COLOURS[0], 5.0, [inverse(b.lower, b.upper) for b in report.bounds]),
        (0, f"bounds, {percent}", COLOURS[2], 2.0, [inverse(*(b.interval or (0, 0))) for b in report.bounds]),
        (1, f"learning curve, {percent}", COLOURS[3], 2.0, curve),
        (2, f"law, {percent}", COLOURS[1], 2.0, fits),
    ):
        at = [b.sigma + 0.015 * place * highest for b in report.bounds]
        if bars := [(x, *e) for x, e in zip(at, ends, strict=False) if e and e[0] <= e[1] < np.inf]:
            x, low, high = np.array(bars).T
            price.series.append(Series(name, "bars", x, np.sqrt(low * high), low, high, colour, width))
    return [measured, price]


def plan_panels(law: Law, market: Market, budget: float, plan: Plan) -> list[Panel]:
    """The predicted result along the budget line: the part of the budget that goes to clean images."""
    panel = Panel(f"budget {budget:,.0f}", "part of the budget for clean images", "prediction", log_y=True)
    part = np.concatenate([np.geomspace(1e-3, 0.05, 40), np.linspace(0.05, 1, 120)[1:]])
    if market.have_clean:
        part = np.append(0.0, part)
    mixes: dict[str, tuple[Offer, ...]] = {f"with noise {offer.sigma:g}": (offer,) for offer in market.noisy}
    if not market.noisy:
        mixes["clean only"] = ()
    elif len(mixes) > 1 and any(np.isfinite(offer.max_images) for offer in market.noisy):
        mixes["with all noisy images"] = market.noisy
    for which, (name, offers) in enumerate(mixes.items()):
        only = Market(market.clean, offers, market.have_clean)
        colour = COLOURS[(which + 1) % len(COLOURS)]
        panel.series.append(Series(name, "line", part, budget_line(law, only, budget, part), colour=colour))
    best, spent = plan.prediction, plan.purchases[0].cost / budget if budget else 0.0
    name = f"plan, {law.confidence:.0%}"
    panel.series.append(Series(name, "bars", [spent], [best.value], [best.low], [best.high]))
    return [panel]


def _between(rows: Comparable) -> tuple[Array, Array]:
    """Clean and noisy counts on straight lines from row to row, for a smooth curve through them."""
    steps = np.linspace(0, len(rows) - 1, max(2, min(50 * len(rows), _MAX_POINTS)))
    at = np.arange(len(rows))
    return np.interp(steps, at, rows.num_clean), np.interp(steps, at, rows.num_noisy)
