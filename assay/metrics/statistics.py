"""Feature statistics: the mean and covariance of the features of a set of images.

    mean = 1/n sum_i f_i,      cov = 1/(n - 1) sum_i (f_i - mean)(f_i - mean)^T      (unbiased)

They are accumulated in float64, batch by batch, and parts merge exactly (Chan, Golub and LeVeque):

    scatter = scatter_a + scatter_b + n_a n_b / (n_a + n_b) (mean_b - mean_a)(mean_b - mean_a)^T,

so that the order of the images and the split into batches or shards do not matter.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.archives import read_npz
from assay.errors import AssayError
from assay.files import decoding, write_whole

Array = NDArray[np.float64]


@dataclass(frozen=True)
class FeatureStatistics:
    """`mean` (D,), unbiased `cov` (D, D), and how many images they were taken from.

    `num_images` and `extractor_sha256` are None where a file does not say, as in EDM's references, and
    `image_shape` where the extractor takes any.
    """

    mean: Array
    cov: Array
    num_images: int | None
    extractor_sha256: str | None = None
    image_shape: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        dim = len(self.mean)
        if self.mean.shape != (dim,) or self.cov.shape != (dim, dim):
            raise AssayError(f"mean has shape {self.mean.shape} and cov {self.cov.shape}, not (D,) and (D, D)")
        if self.num_images is not None and self.num_images < 2:
            raise AssayError(
                f"a covariance of {self.num_images} image(s)", key="num_images", cure="give at least 2"
            )
        if not (np.isfinite(self.mean).all() and np.isfinite(self.cov).all()):
            raise AssayError("feature statistics hold NaN or infinite values", cure="compute them again")


class StatisticsStream:
    """Accumulates feature statistics in one pass over batches of features."""

    def __init__(self) -> None:
        self.num_images = 0
        self.mean: Array = np.zeros(0)
        self.scatter: Array = np.zeros((0, 0))

    def add(self, features: np.ndarray) -> None:
        """Take in a batch of features (B, D), any float type."""
        features = features.astype(np.float64)
        if not np.isfinite(features).all():
            bad = self.num_images + int(np.flatnonzero(~np.isfinite(features).all(1))[0])
            raise AssayError(f"the features of image {bad} are NaN or infinite", cure="look at that image")
        mean = features.mean(0)
        features -= mean
        self._merge(len(features), mean, features.T @ features)

    def _merge(self, num_images: int, mean: Array, scatter: Array) -> None:
        if self.num_images == 0:
            self.num_images, self.mean, self.scatter = num_images, mean, scatter
            return
        total = self.num_images + num_images
        shift = mean - self.mean
        self.scatter += scatter
        self.scatter += np.outer(shift * (self.num_images * num_images / total), shift)
        self.mean = self.mean + shift * (num_images / total)
        self.num_images = total

    def statistics(self) -> FeatureStatistics:
        """What the images so far amount to; at least two are needed."""
        return FeatureStatistics(self.mean.copy(), self.scatter / max(self.num_images - 1, 1), self.num_images)


def features_to_statistics(features: np.ndarray, batch_size: int = 1024) -> FeatureStatistics:
    """Statistics of features (N, D), also of a memory-mapped array larger than memory."""
    stream = StatisticsStream()
    for start in range(0, len(features), batch_size):
        stream.add(features[start : start + batch_size])
    return stream.statistics()


def merge_statistics(*parts: FeatureStatistics) -> FeatureStatistics:
    """The statistics of the union of disjoint sets of images, from those of each set."""
    stream = StatisticsStream()
    for part in parts:
        if part.num_images is None:
            raise AssayError("statistics without a number of images cannot be merged")
        stream._merge(part.num_images, part.mean, part.cov * (part.num_images - 1))
    return stream.statistics()


def save_statistics(path: Path, statistics: FeatureStatistics, edm_names: bool = False) -> None:
    """Write an npz with `mean`, `cov`, `num_images`, or with EDM's names `mu` and `sigma` for its tools."""
    if edm_names:
        arrays: dict[str, Any] = {"mu": statistics.mean, "sigma": statistics.cov}
    else:
        arrays = {"mean": statistics.mean, "cov": statistics.cov}
    arrays |= {name: getattr(statistics, name) for name in ("num_images", "extractor_sha256", "image_shape")}
    arrays = {name: value for name, value in arrays.items() if value is not None}
    with write_whole(path) as partial, open(partial, "wb") as file:
        np.savez(file, **arrays)


def load_statistics(path: Path) -> FeatureStatistics:
    """Read an npz of ours or a reference of EDM's (`mu`, `sigma`)."""
    arrays = read_npz(path)
    mean = arrays.get("mean", arrays.get("mu"))
    cov = arrays.get("cov", arrays.get("sigma"))
    if mean is None or cov is None:
        what = f"holds {sorted(arrays)}, not feature statistics: mean, cov (or mu, sigma)"
        raise AssayError(what, path=path, cure="make it with `assay evaluate reference`")
    with decoding(path, "make it again with `assay evaluate reference`"):
        num_images = int(arrays["num_images"]) if "num_images" in arrays else None
        extractor_sha256 = str(arrays["extractor_sha256"]) if "extractor_sha256" in arrays else None
        mean, cov = mean.astype(np.float64), cov.astype(np.float64)
        image_shape = None
        if "image_shape" in arrays:
            channels, height, width = arrays["image_shape"].tolist()
            image_shape = channels, height, width
        return FeatureStatistics(mean, cov, num_images, extractor_sha256, image_shape)
