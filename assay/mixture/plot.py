"""The picture of a rates experiment."""

from pathlib import Path

import numpy as np

from assay.files import write_whole
from assay.mixture.rates import Rates


def plot_rates(rates: Rates, path: Path) -> None:
    """Error against number of samples, log-log, with the theory's slope through each curve; a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for curve in rates.curves:
        (line,) = axes.loglog(curve.num_samples, curve.error, "o-", label=f"{curve.name}: n^-{curve.slope:.3f}")
        middle = np.exp(np.log(curve.num_samples).mean()), np.exp(np.log(curve.error).mean())
        expected = middle[1] * (curve.num_samples / middle[0]) ** -curve.theory_slope
        axes.loglog(curve.num_samples, expected, "--", color=line.get_color(), alpha=0.6)
    axes.set_xlabel("samples")
    axes.set_ylabel("W1 error")
    measured, theory = rates.measured_exchange, rates.theory_exchange
    axes.set_title(f"{measured:,.0f} noisy samples replace a clean one (theory: {theory:,.0f})")
    axes.grid(True, which="both", alpha=0.2)
    axes.legend(title="solid: measured, dashed: slope of the theory", fontsize="small")
    with write_whole(path) as partial:
        figure.savefig(partial, dpi=120, format="png")
