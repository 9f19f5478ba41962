"""Metrics: the held-out score in nats (`score`), and distances between images and generated ones.

Distances go images -> features -> statistics -> distance, each step saying what was measured. Only the
Inception-v3 of 2015-12-05 gives FID; every other extractor gives FD-<name>.
"""

from assay.metrics.distance import frechet_distance, frechet_infinity, kernel_distance, manifold_overlap
from assay.metrics.evaluate import (
    Evaluation,
    Reference,
    compare,
    evaluate,
    reference_from_images,
    reference_from_statistics,
)
from assay.metrics.extract import Extractor, ExtractorName, Images, images_to_features, load_extractor
from assay.metrics.generated import ImageFiles, Samples, open_images
from assay.metrics.score import (
    Score,
    ScoreConfig,
    find_stopping,
    load_score,
    paired_errors,
    save_score,
    score,
)
from assay.metrics.statistics import FeatureStatistics, features_to_statistics, merge_statistics

__all__ = [
    "Evaluation",
    "Extractor",
    "ExtractorName",
    "FeatureStatistics",
    "ImageFiles",
    "Images",
    "Reference",
    "Samples",
    "Score",
    "ScoreConfig",
    "compare",
    "evaluate",
    "features_to_statistics",
    "find_stopping",
    "frechet_distance",
    "frechet_infinity",
    "images_to_features",
    "kernel_distance",
    "load_extractor",
    "load_score",
    "manifold_overlap",
    "merge_statistics",
    "open_images",
    "paired_errors",
    "reference_from_images",
    "reference_from_statistics",
    "save_score",
    "score",
]
