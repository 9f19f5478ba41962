"""Figures of the theory's experiments and of a fitted mixture."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from assay.figure import COLOURS, Panel, Series
from assay.mixture.moments import Atoms
from assay.mixture.rates import Curve, Exchange, Rates

_MAX_SAMPLES = 2000  # of a figure
_GREY = "#BBBBBB"


def rates_panels(rates: Rates) -> list[Panel]:
    """Error against numbers of samples and of dimensions, with the theory's slope (dashed) for each curve."""
    rate = rates.exchange
    theory = rate.inside if rates.dimension is None else rate.subspace
    title = f"{rate.measured:,.3g} noisy samples replace a clean one (theory: {theory:,.3g})"
    panels = [_curves(rates.curves, title, "samples, n")]
    if rates.dimension is not None:
        panels.append(_curves([rates.dimension], "The price of the dimension", "dimension, d"))
    return panels


def _curves(curves: list[Curve], title: str, label: str) -> Panel:
    panel = Panel(title, label, "W1 error (dashed: slope of the theory)", log_x=True, log_y=True)
    for which, curve in enumerate(curves):
        size, error, colour = curve.num_samples, curve.error, COLOURS[which % len(COLOURS)]
        expected = np.exp(np.log(error).mean() - curve.theory_slope * (np.log(size) - np.log(size).mean()))
        low, high = error - curve.standard_error, error + curve.standard_error
        panel.series.extend(
            [
                Series(f"{curve.name}: {label[-1]}^{-curve.slope:.3f}", "line", size, error, colour=colour),
                Series("", "bars", size, error, low, high, colour=colour, width=1.0),
                Series("", "dashed", size, expected, colour=colour, width=1.0),
            ]
        )
    return panel


def worth_panel(worth: Sequence[Exchange], k: int, num_features: int) -> Panel:
    """Noisy samples that replace a clean one, against their noise: measured, and the theorem's exponents."""
    title = f"How many noisy samples replace a clean one (k = {k}, d = {num_features})"
    panel = Panel(
        title, "noise, in units of the clean samples' noise", "noisy per clean", log_x=True, log_y=True
    )
    sigma, measured, low, high = np.transpose([[w.sigma, w.measured, w.low, w.high] for w in worth])
    fine = np.geomspace(1, sigma.max(), 50)
    panel.series.append(Series("measured, with 90 % intervals", "bars", sigma, measured, low, high))
    inside = f"theorem, telling atoms apart: sigma^{4 * k - 2}"
    panel.series.append(Series(inside, "dashed", fine, fine ** (4 * k - 2), colour=COLOURS[1]))
    if num_features > 1:
        panel.series.append(Series("theorem, subspace: sigma^4", "dashed", fine, fine**4, colour=COLOURS[2]))
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
