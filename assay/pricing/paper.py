"""The paper's tables, sizes and boxes, and its own way to a price: bounds from pairs, as a cross-check.

If results fall with more clean images, a clean-only result of a images and one of a mix give

    v_clean <= v_mixed:  a >= n_clean + w n_noisy,   so   w <= (a - n_clean) / n_noisy,
    v_clean >  v_mixed:  a <= n_clean + w n_noisy,   so   w >= (a - n_clean) / n_noisy.

A tie is taken for the larger clean-only result: it counts for the upper bound only, and says nothing where
a <= n_clean. Each bound comes from one pair and knows no errors; the law uses all results.
"""

from pathlib import Path

import numpy as np

from assay.pricing.results import Measured

PAPER = Path(__file__).with_name("fid_tables.csv")
# The studies of studies/paper by name, and the paper's name of their data.
PAPER_STUDIES = {"paper-cifar10": "cifar10", "paper-celeba": "celeba_hq", "paper-imagenet": "imagenet"}
# FID of its configurations B to E on ImageNet, by the names that studies/paper/imagenet.toml gives them.
PAPER_CONFIGURATIONS = {
    "B: more training": 1.63,
    "C: more steps below the noise": 1.60,
    "D: consistency": 1.58,
    "E: weight decay": 1.55,
}
# Boxed bounds on noisy images per clean one (1 / c) in the paper's section on pricing, by data set and sigma.
PAPER_BOXES = {
    ("cifar10", 0.05): (1.17, 1.25), ("celeba_hq", 0.05): (1.17, 1.25), ("imagenet", 0.05): (1.125, 1.17),
    ("cifar10", 0.1): (1.25, 1.5), ("celeba_hq", 0.1): (1.25, 1.5), ("imagenet", 0.1): (1.125, 1.17),
    ("cifar10", 0.2): (1.5, 1.75), ("celeba_hq", 0.2): (1.5, 1.75), ("imagenet", 0.2): (1.5, 1.75),
}  # fmt: skip


def pair_bounds(results: Measured) -> dict[float, tuple[float, float]]:
    """The tightest bounds on the worth w by noise level, from pairs of clean-only and mixed configurations."""
    counts = np.column_stack([results.num_clean, results.num_noisy])
    configurations, which = np.unique(counts, axis=0, return_inverse=True)
    which = which.reshape(-1)
    value = np.bincount(which, results.value) / np.bincount(which)
    clean, noisy = configurations[:, 0], configurations[:, 1:]
    alone, found = noisy.sum(1) == 0, {}
    for level, sigma in enumerate(results.sigmas):
        mixed = ~alone & (noisy[:, level] == noisy.sum(1))
        bound = (clean[alone] - clean[mixed, None]) / noisy[mixed, level, None]
        gap = value[mixed, None] - value[alone]
        above = np.where((gap > 0) | ((gap == 0) & (bound > 0)), bound, np.inf)
        below = np.where(gap < 0, bound, -np.inf)
        found[float(sigma)] = float(below.max(initial=0.0)), float(above.min(initial=1.0))
    return found
