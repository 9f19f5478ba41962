"""References: real images as an extractor sees them, computed once and kept."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from assay.archives import read_npy
from assay.data import ImageSource
from assay.data.view import View, with_uniform_noise
from assay.errors import AssayError, check_enough
from assay.files import content_hash, hold_lock, sha256, write_whole_directory
from assay.metrics.extract import CountImages, Extractor, images_to_features
from assay.metrics.statistics import (
    FeatureStatistics,
    features_to_statistics,
    load_statistics,
    save_statistics,
)

MIN_IMAGES = 20


@dataclass(frozen=True)
class Reference:
    """Real images as an extractor sees them; without `features` (N, D) only the Frechet distance is known."""

    name: str
    fingerprint: str
    statistics: FeatureStatistics
    features: np.ndarray | None = None
    source: ImageSource | None = None
    index: Tensor | None = None  # of the images of `source` that the features belong to

    @property
    def frequencies(self) -> list[float] | None:
        """How often each class occurs, or None if there are no classes."""
        if self.source is None or self.source.num_classes == 0:
            return None
        label = self.source.label[self.source.label >= 0]
        return label.bincount(minlength=self.source.num_classes).tolist()


def reference_from_statistics(path: Path, extractor: Extractor) -> Reference:
    """A reference of ours or EDM's from an npz. EDM's do not say so, but are of `inception`."""
    found = load_statistics(path)
    if found.extractor_sha256 not in (None, extractor.sha256):
        what = f"was made with another extractor than this {extractor.name}"
        raise AssayError(what, path=path, key="extractor", cure="choose that one, or make it again")
    return Reference(path.name, sha256(path), found)


def reference_from_images(
    source: ImageSource,
    extractor: Extractor,
    cache: Path,
    progress: CountImages = lambda num_images: None,
    noisy: bool = False,
) -> Reference:
    """Features and statistics of the clean images of a store, from `cache` if they were taken before.

    `noisy` takes the noisy images instead, to compare generated images with the same noise with them
    (`assay.metrics.generated.Noised`).
    """
    known_noise = (source.sigma_tn > 0) & (source.usable_from == source.sigma_tn)
    index = torch.nonzero(known_noise if noisy else source.usable_from == 0)[:, 0]
    kind = "noisy" if noisy else "clean"
    check_enough(len(index), MIN_IMAGES, f"{kind} images of {source.name}", "reference")
    if noisy:
        source = with_uniform_noise(View(source, index, source.sigma_tn[index], name=f"{source.name}, noisy"))
        index = torch.arange(len(source))
    key = content_hash(extractor.sha256, source.fingerprint)[:16]
    folder = cache / f"features-{extractor.name}-{key}"
    with hold_lock(cache / f"making-{folder.name}", "", math.inf):  # a second process waits, then reads these
        if not folder.is_dir():
            features = images_to_features(extractor, source, index, progress)
            with write_whole_directory(folder) as partial:
                np.save(partial / "features.npy", features)
                (partial / "features.sha256").write_text(sha256(partial / "features.npy"))
                found = replace(features_to_statistics(features), extractor_sha256=extractor.sha256)
                save_statistics(partial / "statistics.npz", found)
    features_file, checksum = folder / "features.npy", folder / "features.sha256"
    if checksum.exists() and sha256(features_file) != checksum.read_text():
        raise AssayError("is damaged", path=features_file, cure=f"remove {folder}, and it is computed again")
    known = load_statistics(folder / "statistics.npz")
    return Reference(source.name, source.fingerprint, known, read_npy(features_file), source, index)
