"""Metrics: the held-out loss in nats (`held_out_loss`), and distances between images and generated ones.

Distances go images -> features -> statistics -> distance, each step saying what was measured. Only the
Inception-v3 of 2015-12-05 gives FID; every other extractor gives FD-<name>.
"""

from assay.metrics.distance import frechet_distance, frechet_infinity, kernel_distance, manifold_overlap
from assay.metrics.evaluate import (
    Evaluation,
    compare,
    evaluate,
)
from assay.metrics.extract import Extractor, ExtractorName, images_to_features, load_extractor
from assay.metrics.generated import BandedDenoiser, ImageFiles, Samples, open_images
from assay.metrics.held_out import (
    BandLoss,
    BandLosses,
    HeldOutConfig,
    HeldOutLoss,
    covariance,
    held_out_loss,
    load_held_out_loss,
    losses_by_band,
    paired_errors,
    save_held_out_loss,
)
from assay.metrics.measure import MeasureConfig, measure
from assay.metrics.reference import Reference, reference_from_images, reference_from_statistics
from assay.metrics.statistics import FeatureStatistics, features_to_statistics, merge_statistics

__all__ = [
    "BandLoss",
    "BandLosses",
    "BandedDenoiser",
    "Evaluation",
    "Extractor",
    "ExtractorName",
    "FeatureStatistics",
    "HeldOutConfig",
    "HeldOutLoss",
    "ImageFiles",
    "MeasureConfig",
    "Reference",
    "Samples",
    "compare",
    "covariance",
    "evaluate",
    "features_to_statistics",
    "frechet_distance",
    "frechet_infinity",
    "held_out_loss",
    "images_to_features",
    "kernel_distance",
    "load_extractor",
    "load_held_out_loss",
    "losses_by_band",
    "manifold_overlap",
    "measure",
    "merge_statistics",
    "open_images",
    "paired_errors",
    "reference_from_images",
    "reference_from_statistics",
    "save_held_out_loss",
]
