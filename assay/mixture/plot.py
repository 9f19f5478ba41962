"""Figures of the theory's experiments and of a fitted mixture."""

import numpy as np
from numpy.typing import ArrayLike

from assay.figure import COLOURS, Panel, Series
from assay.mixture.moments import Atoms
from assay.mixture.rates import Curve, Rates

_MAX_SAMPLES = 2000  # of a figure
_GREY = "#BBBBBB"


def rates_panels(rates: Rates) -> list[Panel]:
    """Errors against numbers of samples and of dimensions, and how many noisy samples replace a clean one."""
    panels = [_curves(rates.curves, "Error against the number of samples", "samples, n")]
    if rates.dimensions:
        panels.append(_curves(rates.dimensions, "The price of the dimension", "dimension, d"))
    worth = Panel(
        "Noisy samples for a clean one", "noise (clean: 1)", "noisy per clean", log_x=True, log_y=True
    )
    for which, term in enumerate(dict.fromkeys(row.term for row in rates.exchanges)):
        rows = [row for row in rates.exchanges if row.term == term]
        sigma, measured, low, high, theory = np.transpose(
            [[row.sigma, row.measured, row.low, row.high, row.theory] for row in rows]
        )
        colour = COLOURS[which]
        worth.series.append(Series(f"{term}, measured", "bars", sigma, measured, low, high, colour=colour))
        if np.isfinite(theory).all():
            power = float(np.log(theory[-1]) / np.log(sigma[-1])) if sigma[-1] > 1 else 0.0
            fine = np.geomspace(1, sigma.max(), 50)
            worth.series.append(
                Series(f"{term}: noise^{power:.0f}", "dashed", fine, fine**power, colour=colour)
            )
    return [*panels, worth]


def _curves(curves: list[Curve], title: str, label: str) -> Panel:
    panel = Panel(title, label, "W1 error (dashed: slope of the theory)", log_x=True, log_y=True)
    for which, curve in enumerate(curves):
        size, error, colour = curve.num_samples, curve.error, COLOURS[which % len(COLOURS)]
        low, high = error - curve.standard_error, error + curve.standard_error
        name = f"{curve.name}: {label[-1]}^{-curve.slope:.3f}"
        panel.series.append(Series(name, "line", size, error, colour=colour))
        panel.series.append(Series("", "bars", size, error, low, high, colour=colour, width=1.0))
        if np.isfinite(curve.theory_slope):
            expected = np.exp(np.log(error).mean() - curve.theory_slope * (np.log(size) - np.log(size).mean()))
            panel.series.append(Series("", "dashed", size, expected, colour=colour, width=1.0))
    return panel


def mixture_panel(mixture: Atoms, samples: ArrayLike | None = None) -> Panel:
    """Atoms, each with its weight, over samples (n, d); the first two dimensions, or a line."""
    panel = Panel("Atoms and their weights", "dimension 1", "dimension 2")

    def add(points: ArrayLike, name: str, colour: str) -> None:
        x = np.atleast_2d(points)
        y = x[:, 1] if x.shape[1] > 1 else np.zeros(len(x))
        panel.series.append(Series(name, "points", x[:, 0], y, colour=colour))

    if samples is not None:
        x = np.asarray(samples)
        add(x[:: -(-len(x) // _MAX_SAMPLES)], "samples", _GREY)
    for which, (atom, weight) in enumerate(zip(mixture.atoms, mixture.weights, strict=True)):
        add(atom, f"weight {weight:.3g}", COLOURS[1:][which % (len(COLOURS) - 1)])
    return panel
