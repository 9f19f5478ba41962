"""Stores of images from memory, for tests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from assay.data import Store
from assay.data.store import PackedImage, write_store


def grey(path: Path, value: int = 100, size: tuple[int, int] = (4, 4)) -> None:
    """A picture (H, W) of one value."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", size[::-1], value).save(path)


def stored(
    path: Path,
    values: Any,
    sigma: float | Sequence[float] | Any = 0.0,
    usable_from: float | None = None,
    maps: Any = None,
) -> Store:
    """A store of images (N, C, H, W) from -1 to 1; levels of all or each, a map (or None) of each."""
    values = np.asarray(values, np.float32)
    levels = np.broadcast_to(sigma, len(values)).tolist()
    usable = [None if usable_from is None else max(level, usable_from) for level in levels]
    columns = zip(values, levels, usable, [None] * len(values) if maps is None else maps, strict=True)
    images = [
        PackedImage(str(i), pixels, level, -1, lowest, sigma_map=None if each is None else np.asarray(each))
        for i, (pixels, level, lowest, each) in enumerate(columns)
    ]
    return write_store(path, path.name, images, values.shape[1:], "float32", (-1, 1), ())
