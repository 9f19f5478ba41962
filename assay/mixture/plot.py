"""The figure of a rates experiment."""

import numpy as np

from assay.figure import COLOURS, Panel, Series
from assay.mixture.rates import Rates


def rates_panel(rates: Rates) -> Panel:
    """Error against number of samples, log-log, with the theory's slope (dashed) through each curve."""
    measured, theory = rates.measured_exchange, rates.theory_exchange
    title = f"{measured:,.0f} noisy samples replace a clean one (theory: {theory:,.0f})"
    panel = Panel(title, "samples", "W1 error (dashed: slope of the theory)", log_x=True, log_y=True)
    for which, curve in enumerate(rates.curves):
        middle = np.exp(np.log(curve.num_samples).mean()), np.exp(np.log(curve.error).mean())
        expected = middle[1] * (curve.num_samples / middle[0]) ** -curve.theory_slope
        name, colour = f"{curve.name}: n^-{curve.slope:.3f}", COLOURS[which % len(COLOURS)]
        panel.series.append(Series(name, "line", curve.num_samples, curve.error, colour=colour))
        panel.series.append(Series("", "points", curve.num_samples, curve.error, colour=colour))
        panel.series.append(Series("", "dashed", curve.num_samples, expected, colour=colour, width=1.0))
    return panel
