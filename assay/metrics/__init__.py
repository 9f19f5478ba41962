"""Metrics: the held-out loss in nats (`held_out_loss`), and distances between images and generated ones.

Distances go images -> features -> statistics -> distance, each step saying what was measured. Only the
Inception-v3 of 2015-12-05 gives FID; every other extractor gives FD-<name>.
"""

from assay.metrics.distance import frechet_distance, kernel_distance, manifold_overlap
from assay.metrics.evaluate import Evaluation, compare, evaluate
from assay.metrics.extract import Extractor, ExtractorName, images_to_features, load_extractor
from assay.metrics.generated import Samples, open_images
from assay.metrics.held_out import HeldOutConfig, HeldOutLoss, held_out_loss, losses_by_band
from assay.metrics.measure import MeasureConfig, measure
from assay.metrics.reference import Reference, reference_from_images, reference_from_statistics
from assay.metrics.statistics import FeatureStatistics, features_to_statistics

__all__ = [
    "Evaluation",
    "Extractor",
    "ExtractorName",
    "FeatureStatistics",
    "HeldOutConfig",
    "HeldOutLoss",
    "MeasureConfig",
    "Reference",
    "Samples",
    "compare",
    "evaluate",
    "features_to_statistics",
    "frechet_distance",
    "held_out_loss",
    "images_to_features",
    "kernel_distance",
    "load_extractor",
    "losses_by_band",
    "manifold_overlap",
    "measure",
    "open_images",
    "reference_from_images",
    "reference_from_statistics",
]
