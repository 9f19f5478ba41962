"""Feature statistics: the mean and covariance of the features of a set of images.

    mean = 1/n sum_i f_i,      cov = 1/(n - 1) sum_i (f_i - mean)(f_i - mean)^T      (unbiased)

They are accumulated in float64, batch by batch, and parts merge exactly (Chan, Golub and LeVeque):

    scatter = scatter_a + scatter_b + n_a n_b / (n_a + n_b) (mean_b - mean_a)(mean_b - mean_a)^T,

so that the order of the images and the split into batches do not matter.
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

    `num_images` and `extractor_sha256` are None where a file does not say, as in EDM's references.
    """

    mean: Array
    cov: Array
    num_images: int | None
    extractor_sha256: str | None = None


def features_to_statistics(features: np.ndarray, batch_size: int = 1024) -> FeatureStatistics:
    """Statistics of features (N, D), also of a memory-mapped array larger than memory."""
    num_dims = features.shape[1]
    num_images, mean, scatter = 0, np.zeros(num_dims), np.zeros((num_dims, num_dims))
    for start in range(0, len(features), batch_size):
        batch = features[start : start + batch_size].astype(np.float64)
        if len(bad := np.flatnonzero(~np.isfinite(batch).all(1))):
            what = f"the features of image {start + bad[0]} are NaN or infinite"
            raise AssayError(what, cure="look at that image")
        here, total = batch.mean(0), num_images + len(batch)
        batch -= here
        shift = here - mean
        scatter += batch.T @ batch
        scatter += np.outer(shift * (num_images * len(batch) / total), shift)
        mean = mean + shift * (len(batch) / total)
        num_images = total
    return FeatureStatistics(mean, scatter / max(num_images - 1, 1), num_images)


def save_statistics(path: Path, statistics: FeatureStatistics) -> None:
    """Write an npz with the names of EDM's references, `mu` and `sigma`, so that its tools read it too."""
    arrays: dict[str, Any] = {"mu": statistics.mean, "sigma": statistics.cov}
    arrays |= {name: getattr(statistics, name) for name in ("num_images", "extractor_sha256")}
    with write_whole(path) as partial, open(partial, "wb") as file:
        np.savez(file, **{name: value for name, value in arrays.items() if value is not None})


def load_statistics(path: Path) -> FeatureStatistics:
    """Read an npz of ours, or a reference of EDM's."""
    arrays = read_npz(path)
    with decoding(path, "make it with `assay evaluate reference`"):
        if "mean" in arrays:  # as files of ours were once written
            arrays |= {"mu": arrays["mean"], "sigma": arrays["cov"]}
        if not {"mu", "sigma"} <= arrays.keys():
            raise AssayError(f"holds {sorted(arrays)}, not feature statistics: mu and sigma")
        mean, cov = (arrays[name].astype(np.float64) for name in ("mu", "sigma"))
        if mean.ndim != 1 or cov.shape != 2 * mean.shape:
            raise AssayError(f"mu has shape {mean.shape} and sigma {cov.shape}, not (D,) and (D, D)")
        if not (np.isfinite(mean).all() and np.isfinite(cov).all()):
            raise AssayError("holds NaN or infinite values")
        num_images = int(arrays["num_images"]) if "num_images" in arrays else None
        extractor_sha256 = str(arrays["extractor_sha256"]) if "extractor_sha256" in arrays else None
        return FeatureStatistics(mean, cov, num_images, extractor_sha256)
