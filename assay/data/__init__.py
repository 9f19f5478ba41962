"""Data: stores of (image, sigma_tn, label), readers of other formats, mixtures, augmentation, loading."""

from assay.data.augment import Augmentation
from assay.data.loader import Batch, Loader
from assay.data.mixing import Mixture, mix
from assay.data.store import ImageSource, Store, open_store

__all__ = ["Augmentation", "Batch", "ImageSource", "Loader", "Mixture", "Store", "mix", "open_store"]
