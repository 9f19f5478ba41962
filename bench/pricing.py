"""Coverage of prices in simulated tables with a known worth, and seconds for a fit.

python bench/pricing.py [TABLES]

Nominal 95%. Designs with one, some and three runs of each configuration, held-out loss and FD, worths from
0.03 to 0.9, a truth that the law fits and one whose exponent drifts by a third; then the worth curve.
"""

import sys
import time

import numpy as np

from assay.pricing import fit_laws
from assay.pricing.law import interval
from assay.pricing.price import price_results
from tests.test_pricing import DESIGNS, by_level, simulate


def goals(num: int) -> None:
    print("design  metric drift  worth: coverage (truth above), median interval")
    for design in DESIGNS:
        for metric in ("loss", "fd"):
            for drift in (0.0, 0.08):
                start, cells = time.perf_counter(), []
                for worth in ((0.03, 0.4), (0.1, 0.9)):
                    laws = fit_laws(simulate(design, metric, worth, num, drift), relative=metric == "fd")
                    _, low, high = np.moveaxis([interval(law.worth) for law in laws], 1, 0)
                    for level, truth in enumerate(worth):
                        inside = (low[:, level] <= truth) & (truth <= high[:, level])
                        ends = f"{np.median(low[:, level]):.3f} to {np.median(high[:, level]):.3f}"
                        above = (truth > high[:, level]).mean()
                        cells.append(f"{truth:g}: {inside.mean():.3f} ({above:.3f}) {ends}")
                each = (time.perf_counter() - start) / num / 2
                print(
                    f"{design:<8}{metric:<7}{drift:<7g}{'  '.join(cells)}  {1000 * each:.0f} ms a fit",
                    flush=True,
                )


def curves(num: int) -> None:
    """Pointwise coverage of the worth curve, in bands with correlated errors."""
    inside, width = [], []
    for seed in range(num):
        for curve in price_results([], by_level(seed=seed)).curves:
            truth = 1 / (1 + (2 * curve.sigma / curve.levels) ** 2)
            inside.append((curve.low <= truth) & (truth <= curve.high))
            width.append(curve.high - curve.low)
    for sigma, rows, wide in ((s, inside[i::2], width[i::2]) for i, s in enumerate((0.1, 0.3))):
        print(f"curve at noise {sigma}: coverage by band {np.mean(rows, 0).round(2)}, all {np.mean(rows):.3f}")
        print(f"  median width {np.median(wide, 0).round(2)}", flush=True)


if __name__ == "__main__":
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 400
    goals(number)
    curves(number // 4)
