"""How far quotes are from measured worth curves: the constant `assay.pricing.quote.SPREAD`.

python bench/quote.py

The measurements are the bands of the registered studies in studies/ that say something (an interval below 0.7,
a worth away from 0 and 1), and single trainings from before results by level were kept: two MLPs and a U-Net,
worth by level as the mean over mixes of 10 to 50% clean.
"""

import gzip
import sys
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits

import assay
from assay.pricing.quote import Quote, quoted_at

ROOT = Path(assay.__file__).parent
sys.path.insert(0, str(Path(__file__).parent.parent / "studies"))
import findings  # noqa: E402

# (data, images, noise) -> worth by level sigma_t
BY_HAND = {
    ("fashion 8x8, MLP", 8, 2000, 0.1): {0.059: 0.13, 0.13: 0.34, 0.30: 0.60, 0.66: 0.71, 1.5: 0.78},
    ("fashion 8x8, MLP", 8, 2000, 0.3): {0.13: 0.02, 0.30: 0.12, 0.66: 0.31, 1.5: 0.59},
    ("digits, MLP", 0, 1400, 0.15): {0.30: 0.34, 0.66: 0.50},
    ("digits, MLP", 0, 1400, 0.5): {0.30: 0.04},
    ("fashion 16x16, U-Net", 16, 400, 0.1): {0.026: 0.24, 0.059: 0.29, 0.13: 0.34, 0.30: 0.50, 0.66: 0.59},
    ("fashion 16x16, U-Net", 16, 400, 0.3): {0.026: 0.07, 0.059: 0.09, 0.13: 0.11, 0.30: 0.17, 0.66: 0.19},
}


def pictures(size: int, number: int) -> np.ndarray:
    """Fashion-MNIST at a size, or digits at size 0, scaled to [-1, 1]."""
    if not size:
        return (load_digits().images[:number] / 8 - 1).astype(np.float32)
    raw = gzip.decompress((ROOT / "data/embedded/t10k-images-idx3-ubyte.gz").read_bytes())
    whole = torch.tensor(np.frombuffer(raw, np.uint8, offset=16).reshape(-1, 1, 28, 28)[:number] / 127.5 - 1)
    return torch.nn.functional.interpolate(whole, size=(size, size), mode="area").numpy()


def compare(name: str, quoted: Quote, sigma: float, measured: dict[float, float]) -> list[float]:
    found = quoted_at(quoted, sigma, list(measured))
    ratios = np.log(np.log(list(measured.values())) / np.log(found))
    pairs = "  ".join(
        f"{level:.2g}: {w:.2f} / {q:.2f}" for (level, w), q in zip(measured.items(), found, strict=True)
    )
    print(f"{name:<24} noise {sigma:<5.3g} measured / quoted {pairs}")
    return ratios.tolist()


def main() -> None:
    ratios = []
    for (name, size, number, sigma), measured in BY_HAND.items():
        ratios += compare(name, assay.quote(pictures(size, number), sigma), sigma, measured)
    for study in findings.measured_studies():
        for curve in findings.prices_of(study).curves:
            known = ~curve.limited.astype(bool) & (curve.high - curve.low < 0.7)
            known &= (curve.worth > 0.01) & (curve.worth < 0.98)
            measured = dict(zip(curve.levels[known].tolist(), curve.worth[known].tolist(), strict=True))
            ratios += compare(findings.STUDIES[study], findings.quote_of(study), curve.sigma, measured)
    spread = float(np.sqrt(np.mean(np.square(ratios))))
    print(f"{len(ratios)} points: log(log w measured / log w quoted) {np.mean(ratios):+.2f} +- {spread:.2f}")
    for sign in (-1, 1):
        print(f"a quote of 0.3 holds from or to {0.3 ** np.exp(sign * 1.96 * spread):.2f} in 95% of cases")


if __name__ == "__main__":
    main()
