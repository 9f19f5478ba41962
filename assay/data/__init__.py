"""Data: stores of (image, sigma_tn, label), readers of other formats, views, augmentation, loading."""

from assay.data.augment import Augmentation
from assay.data.loader import Batch, Loader
from assay.data.source import ImageSource
from assay.data.store import Store, open_store
from assay.data.view import Joined, Restored, View, part, raised, simulate, split_held_out, usable

__all__ = [
    "Augmentation",
    "Batch",
    "ImageSource",
    "Joined",
    "Loader",
    "Restored",
    "Store",
    "View",
    "open_store",
    "part",
    "raised",
    "simulate",
    "split_held_out",
    "usable",
]
