"""The picture of a rates experiment."""

import numpy as np

from assay.figure import COLOURS, Panel, Series
from assay.mixture.rates import Curve, Rates


def rates_panels(rates: Rates) -> list[Panel]:
    """Error against numbers of samples and of dimensions, with the theory's slope (dashed) for each curve."""
    measured, theory = rates.measured_exchange, rates.theory_exchange
    title = f"{measured:,.0f} noisy samples replace a clean one (theory: {theory:,.0f})"
    panels = [_panel(rates.curves, title, "samples, n")]
    if rates.dimension is not None:
        panels.append(_panel([rates.dimension], "The price of the dimension", "dimension, d"))
    return panels


def _panel(curves: list[Curve], title: str, label: str) -> Panel:
    panel = Panel(title, label, "W1 error (dashed: slope of the theory)", log_x=True, log_y=True)
    for which, curve in enumerate(curves):
        size, error, colour = curve.num_samples, curve.error, COLOURS[which % len(COLOURS)]
        expected = np.exp(np.log(error).mean() - curve.theory_slope * (np.log(size) - np.log(size).mean()))
        deviation = np.zeros(len(size)) if curve.standard_error is None else curve.standard_error
        panel.series.extend(
            [
                Series(f"{curve.name}: {label[-1]}^{-curve.slope:.3f}", "line", size, error, colour=colour),
                Series("", "bars", size, error, error - deviation, error + deviation, colour=colour, width=1.0),
                Series("", "dashed", size, expected, colour=colour, width=1.0),
            ]
        )
    return panel
