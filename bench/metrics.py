"""How fast the metrics are, as ratios within this run, and how much memory they take.

Bars: Frechet distance at 2048 features >= 5x faster than scipy.linalg.sqrtm of the product; statistics of
50,000 x 2048 features with < 200 MB beyond the matrix; classifier features of >= 2,000 images/s at 32 x 32.
"""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from scipy import linalg

from assay.metrics.classifier import Classifier
from assay.metrics.distance import (
    FeatureStatistics,
    features_to_statistics,
    frechet_distance,
    kernel_distance,
)
from assay.metrics.extract import Extractor, fold_norms
from assay.metrics.inception import Inception


def seconds(run: Callable[[], object], repeats: int = 3) -> float:
    """The shortest of several runs."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def line(what: str, value: str, bar: str = "") -> None:
    print(f"{what:<66} {value:>18}   {bar}", flush=True)


def random_statistics(dim: int, num_images: int, seed: int) -> FeatureStatistics:
    """A spectrum that falls over three decades, as those of image features do."""
    rng = np.random.default_rng(seed)
    turn = rng.standard_normal((dim, dim)) / np.sqrt(dim)
    return features_to_statistics(rng.standard_normal((num_images, dim)) * np.logspace(0, -3, dim) @ turn)


def by_sqrtm(a: FeatureStatistics, b: FeatureStatistics) -> float:
    root = linalg.sqrtm(a.cov @ b.cov)
    shift = a.mean - b.mean
    return float((shift @ shift + np.trace(a.cov) + np.trace(b.cov) - 2 * np.trace(root)).real)


def bench_frechet() -> None:
    a, b = random_statistics(2048, 6000, 0), random_statistics(2048, 5000, 1)
    before = seconds(lambda: frechet_distance(a, b))
    peer = seconds(lambda: by_sqrtm(a, b), repeats=2)
    ours = min(before, seconds(lambda: frechet_distance(a, b)))  # on both sides of the peer: loads change
    line("Frechet distance, 2048 features: seconds, ours / sqrtm", f"{ours:.2f} / {peer:.1f}")
    line("  times faster than sqrtm", f"{peer / ours:.1f}", "bar >= 5")
    few = random_statistics(2048, 500, 2)
    low_rank = seconds(lambda: frechet_distance(few, few))
    line("  with 500 images on both sides: times faster than full rank", f"{ours / low_rank:.1f}")


def memory_mb(field: str) -> float:
    """VmRSS (now) or VmHWM (peak) of this process."""
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{field}:")[1].split()[0]) / 1000


def measured(run: Callable[[], object]) -> tuple[float, float]:
    """Seconds of one run, and the MB it takes beyond what there is."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = memory_mb("VmRSS")
    took = seconds(run, repeats=1)
    return took, memory_mb("VmHWM") - before


def bench_features() -> None:
    features = np.random.default_rng(0).standard_normal((50_000, 2048), dtype=np.float32)
    block = features[:2048]
    squares = {kind: block.astype(kind) for kind in ("f4", "f8")}
    product = {kind: seconds(lambda x=x: x @ x.T) for kind, x in squares.items()}  # type: ignore[misc]
    features_to_statistics(block)  # the linear algebra library takes its buffers
    took, extra = measured(lambda: features_to_statistics(features))
    line("statistics of 50,000 x 2048 features: MB beyond the matrix", f"{extra:.0f}", "bar < 200")
    bare = product["f8"] * len(features) / len(block)
    line("  seconds, and times those of the bare float64 products", f"{took:.1f}, {took / bare:.2f}")
    took, extra = measured(lambda: kernel_distance(features[:10_000], features[10_000:20_000]))
    line("kernel distance of 10,000 and 10,000 x 2048: MB", f"{extra:.0f}")
    bare = product["f8"] * 3 * 10 * 1000**2 / len(block) ** 2
    line("  seconds, and times those of the bare float64 products", f"{took:.1f}, {took / bare:.2f}")


def bench_extractors() -> None:
    networks = {
        "classifier": Classifier((3, 32, 32), 10),
        "inception": Inception(),
    }
    for name, num_images in {"classifier": 512, "inception": 8}.items():
        network = fold_norms(networks[name].eval().requires_grad_(False))
        extractor = Extractor(name, network, "")  # type: ignore[arg-type]
        images = torch.rand(num_images, 3, 32, 32) * 2 - 1
        extractor(images)
        rate = num_images / seconds(lambda: extractor(images), repeats=5)  # noqa: B023
        line(f"{name}: images/s at 32 x 32", f"{rate:,.0f}", "bar >= 2,000" if name == "classifier" else "")


if __name__ == "__main__":
    line(f"{torch.get_num_threads()} threads", "")
    bench_extractors()
    bench_frechet()
    bench_features()
