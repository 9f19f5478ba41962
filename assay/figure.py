"""Figures, described once as panels; matplotlib draws them as PNG, or as SVG for a page."""

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike
from PIL import Image

from assay.files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")

_PLAIN: dict[Any, Any] = {"text.parse_math": False}  # names are names, whatever they contain


@dataclass(frozen=True)
class Series:
    """Values y at x (n,). A band lies between `low` and `high`; bars reach from `low` to `high` around y.

    A series without a name is not in the legend.
    """

    name: str
    kind: Literal["line", "dashed", "points", "band", "bars"]
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


def save_png(panels: Sequence[Panel], path: Path) -> None:
    """Draw the panels, two in a row, into a PNG."""
    with write_whole(path) as partial:
        draw(panels).save(partial, format="png")


def draw(panels: Sequence[Panel]) -> Image.Image:
    """Draw the panels, two in a row. A notebook shows the picture."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with rc_context(_PLAIN):
        canvas = FigureCanvasAgg(_figure(panels))
        canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")


def draw_svg(panel: Panel) -> bytes:
    """One panel as SVG."""
    from matplotlib import rc_context

    buffer = io.BytesIO()
    with rc_context(_PLAIN | {"svg.hashsalt": panel.title, "svg.fonttype": "none"}):
        _figure([panel]).savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def _figure(panels: Sequence[Panel]) -> "Figure":
    """The panels, two in a row, in letters that can be read where one of them is 360 pixels wide."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    columns = min(2, len(panels))
    num_rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5.0 * columns, 3.8 * num_rows), dpi=130, layout="constrained")
    for i, panel in enumerate(panels):
        axes = figure.add_subplot(num_rows, columns, i + 1)
        for s in panel.series:
            name = s.name or "_nolegend_"  # matplotlib's word for none
            x, y, low, high = (np.asarray(v, float) for v in (s.x, s.y, s.low, s.high))
            match s.kind:
                case "band":
                    axes.fill_between(x, low, high, color=s.colour, alpha=0.15, lw=0, label=name)
                case "line" | "dashed":
                    axes.plot(x, y, "-" if s.kind == "line" else "--", color=s.colour, lw=s.width, label=name)
                case "points":
                    axes.plot(x, y, "o", ms=5, color=s.colour, label=name)
                case "bars":
                    error = np.maximum([y - low, high - y], 0)  # an interval need not hold its estimate
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
    return figure
