"""Pricing a table of 100,000 rows: seconds for each stage, and the bounds against looking at every pair.

python bench/pricing.py
"""

import csv
import tempfile
import time
from pathlib import Path

import numpy as np

from assay.pricing import (
    Comparable,
    Market,
    Offer,
    best_plan,
    fit_law,
    joint_bounds,
    price_bounds,
    read_comparable,
)


def make_rows(num_rows: int) -> list[tuple[float, float, float, float, float]]:
    """Rows (sigma, num_clean, num_noisy, fd, fd_std) of a known law with noise of 1 %."""
    rng = np.random.default_rng(0)
    sigma = rng.choice([0.0, 0.05, 0.1, 0.2], num_rows)
    clean = rng.uniform(1000, 60_000, num_rows)
    noisy = np.where(sigma > 0, rng.uniform(1000, 60_000, num_rows), 0.0)
    size = (clean + (1 + (sigma / 0.06) ** 2) ** -0.35 * noisy) / 60_000
    fd = (1.8 + 0.24 * size**-1.8) * np.exp(0.01 * rng.standard_normal(num_rows))
    return list(zip(sigma, clean, noisy, fd, 0.01 * fd, strict=True))


def all_pairs(results: Comparable) -> list[tuple[float, float]]:
    """Bounds on c for each sigma from the full matrix of pairs."""
    clean, found = results.take(results.num_noisy == 0), []
    for sigma in np.unique(results.sigma[results.sigma > 0]):
        mixed = results.take(results.sigma == sigma)
        bound = (clean.num_clean - mixed.num_clean[:, None]) / mixed.num_noisy[:, None]
        clean_wins = clean.value <= mixed.value[:, None]
        found.append((max(bound[~clean_wins].max(), 0.0), min(bound[clean_wins].min(), 1.0)))
    return found


def timed(name, function, *arguments):
    start = time.perf_counter()
    value = function(*arguments)
    seconds = time.perf_counter() - start
    print(f"{name:<38}{seconds:8.2f} s")
    return value, seconds


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        for num_rows in (8_000, 100_000):
            print(f"-- {num_rows:,} rows")
            path = Path(directory) / "table.csv"
            with open(path, "w", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(["sigma", "num_clean", "num_noisy", "fd", "fd_std"])
                writer.writerows(make_rows(num_rows))
            (results,), _ = timed("read", read_comparable, path)
            bounds, ours = timed("bounds and intervals", price_bounds, results)
            if num_rows == 8_000:
                pairs, theirs = timed("bounds from all pairs", all_pairs, results)
                np.testing.assert_allclose([(b.lower, b.upper) for b in bounds], pairs)
                print(f"all pairs / ours: {theirs / ours:.0f}x (without intervals)")
            timed("joint bounds", joint_bounds, results)
            law, _ = timed("law with 400 bootstrap refits", fit_law, results)
            market = Market(Offer(0.0, 1.0), (Offer(0.1, 0.2), Offer(0.2, 0.05)), 500)
            timed("plan", best_plan, law, market, 10_000)


if __name__ == "__main__":
    main()
