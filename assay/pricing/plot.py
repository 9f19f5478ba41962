"""Figures of prices and plans: described once as panels, drawn as PNG (matplotlib) or HTML (plotly)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from assay.files import write_whole
from assay.pricing.law import Law
from assay.pricing.plan import Market, Offer, Plan, budget_line
from assay.pricing.report import PriceReport, inverse
from assay.pricing.table import Array, Comparable

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MAX_POINTS = 2000


@dataclass(frozen=True)
class Series:
    """Values y at x (n,). A band lies between low and high; bars reach from low to high around y.

    A series without a name is not in the legend.
    """

    name: str
    kind: Literal["line", "points", "band", "bars"]
    x: ArrayLike
    y: ArrayLike
    low: ArrayLike = ()
    high: ArrayLike = ()
    colour: str = COLOURS[0]
    width: float = 2.0


@dataclass(frozen=True)
class Panel:
    """One set of axes."""

    title: str
    x_label: str
    y_label: str
    series: list[Series] = field(default_factory=list)
    log_x: bool = False
    log_y: bool = False


def price_panels(report: PriceReport) -> list[Panel]:
    """FD against clean images, measured (points) and by the law (lines); and the price against sigma."""
    results, law = report.results, report.law
    unit = "clean images" if results.counted else "clean part of the data set"
    fd = Panel(f"{results.name}: FD, and the law (lines)", unit, "FD", log_x=True, log_y=True)
    price = Panel(f"{results.name}: price", "sigma", "noisy images for one clean image")
    for which, sigma in enumerate([0.0, *(bounds.sigma for bounds in report.bounds)]):
        name, colour = f"sigma {sigma:g}" if sigma else "clean only", COLOURS[which % len(COLOURS)]
        rows = results.take(results.sigma == sigma)
        rows = rows.take(np.argsort(rows.num_clean)[:: -(-len(rows) // _MAX_POINTS)])
        fd.series.append(Series(name, "points", rows.num_clean, rows.fd, colour=colour))
        if law:
            clean, noisy = _between(rows)
            fd.series.append(Series("", "line", clean, law.fd(clean, noisy, sigma), colour=colour))
    highest, percent = max(bounds.sigma for bounds in report.bounds), f"{report.confidence:.0%}"
    if law:
        x = np.linspace(0, 1.1 * highest, 60)
        low, high = np.array([inverse(*law.price_interval(s)) for s in x]).T
        price.series.append(Series(f"law, {percent}", "band", x, low, low, high, COLOURS[1]))
        price.series.append(Series("law", "line", x, 1 / law.price(x), colour=COLOURS[1]))
    # Bars side by side around each sigma, so that none hides another.
    for place, name, colour, width, ends in (
        (-1, "paper's box", COLOURS[4], 5.0, [report.box(b) for b in report.bounds]),
        (0, "bounds", COLOURS[0], 5.0, [inverse(b.lower, b.upper) for b in report.bounds]),
        (1, f"interval, {percent}", COLOURS[2], 2.0, [inverse(*(b.interval or (0, 0))) for b in report.bounds]),
    ):
        at = [b.sigma + 0.015 * place * highest for b in report.bounds]
        if bars := [(x, *e) for x, e in zip(at, ends, strict=True) if e and e[0] <= e[1] < np.inf]:
            x, low, high = np.array(bars).T
            price.series.append(Series(name, "bars", x, np.sqrt(low * high), low, high, colour, width))
    return [fd, price]


def plan_panels(law: Law, market: Market, budget: float, plan: Plan) -> list[Panel]:
    """FD along the budget line: the part of the budget that goes to clean images."""
    panel = Panel(f"budget {budget:,.0f}", "part of the budget for clean images", "predicted FD", log_y=True)
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
    panel.series.append(Series(name, "bars", [spent], [best.fd], [best.low], [best.high]))
    return [panel]


def save_plot(panels: Sequence[Panel], path: Path) -> None:
    """Write the panels as a PNG, or as one HTML file that opens offline, by the name of the file."""
    match path.suffix.lower():
        case ".png":
            _save_png(panels, path)
        case ".html":
            with write_whole(path) as partial:
                plotly_figure(panels).write_html(partial, include_plotlyjs=True)
        case suffix:
            raise ValueError(f"{path}: a plot is a .png or .html file, not {suffix or 'one without a suffix'}")


def plotly_figure(panels: Sequence[Panel]) -> Any:
    """The panels as a plotly figure, two in a row."""
    from plotly.graph_objects import Scatter
    from plotly.subplots import make_subplots

    columns, num_rows = _grid(panels)
    figure = make_subplots(rows=num_rows, cols=columns, subplot_titles=[panel.title for panel in panels])
    for i, panel in enumerate(panels):
        place = {"row": i // columns + 1, "col": i % columns + 1}
        for s in panel.series:
            style: dict[str, Any] = {"name": s.name, "showlegend": bool(s.name), "legendgroup": panel.title}
            style["legendgrouptitle_text"] = panel.title
            x, y, low, high = (np.asarray(v, float) for v in (s.x, s.y, s.low, s.high))
            match s.kind:
                case "band":
                    x, y = np.append(x, x[::-1]), np.append(high, low[::-1])
                    style |= {"mode": "lines", "fill": "toself", "fillcolor": s.colour, "opacity": 0.15}
                    style |= {"line_width": 0, "hoverinfo": "skip"}
                case "line":
                    style |= {"mode": "lines", "line": {"color": s.colour, "width": s.width}}
                case "points" | "bars":
                    style |= {"mode": "markers", "marker_color": s.colour}
            if s.kind == "bars":
                error = {"array": high - y, "arrayminus": y - low, "color": s.colour, "thickness": s.width}
                style["error_y"] = error
            figure.add_trace(Scatter(x=x, y=y, **style), **place)
        figure.update_xaxes(title_text=panel.x_label, type="log" if panel.log_x else "linear", **place)
        figure.update_yaxes(title_text=panel.y_label, type="log" if panel.log_y else "linear", **place)
    figure.update_layout(template="plotly_white", height=450 * num_rows)
    return figure


def _save_png(panels: Sequence[Panel], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    columns, num_rows = _grid(panels)
    figure = Figure(figsize=(6.5 * columns, 4.5 * num_rows), layout="constrained")
    for i, panel in enumerate(panels):
        axes = figure.add_subplot(num_rows, columns, i + 1)
        for s in panel.series:
            name = s.name or "_nolegend_"  # matplotlib's word for none
            x, y, low, high = (np.asarray(v, float) for v in (s.x, s.y, s.low, s.high))
            match s.kind:
                case "band":
                    axes.fill_between(x, low, high, color=s.colour, alpha=0.15, lw=0, label=name)
                case "line":
                    axes.plot(x, y, color=s.colour, lw=s.width, label=name)
                case "points":
                    axes.plot(x, y, "o", ms=5, color=s.colour, label=name)
                case "bars":
                    error = np.stack([y - low, high - y])
                    axes.errorbar(x, y, error, fmt="o", ms=3, color=s.colour, elinewidth=s.width, label=name)
        scales = {"xscale": "log" if panel.log_x else "linear", "yscale": "log" if panel.log_y else "linear"}
        axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label, **scales)
        for axis, is_log in ((axes.xaxis, panel.log_x), (axes.yaxis, panel.log_y)):
            if is_log:  # 2, 3, 5 instead of 2 x 10^0; within a decade or so, ticks between the powers of ten
                first, last = axis.get_view_interval()
                axis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7) if last < 30 * first else (1,)))
                axis.set_major_formatter("{x:g}")
                axis.set_minor_formatter("")
        axes.grid(alpha=0.25)
        axes.legend(fontsize=8)
    with write_whole(path) as partial:
        FigureCanvasAgg(figure).print_png(partial)


def _grid(panels: Sequence[Panel]) -> tuple[int, int]:
    columns = min(2, len(panels))
    return columns, -(-len(panels) // columns)


def _between(rows: Comparable) -> tuple[Array, Array]:
    """Clean and noisy counts on straight lines from row to row, for a smooth curve through them."""
    steps = np.linspace(0, len(rows) - 1, max(2, min(50 * len(rows), _MAX_POINTS)))
    at = np.arange(len(rows))
    return np.interp(steps, at, rows.num_clean), np.interp(steps, at, rows.num_noisy)
