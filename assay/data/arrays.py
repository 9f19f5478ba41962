"""Images from memory: an array and a noise level are enough, no files are needed."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from assay.data.store import PackedImage, SourceDisplay, Store, hash_of, write_store
from assay.noise import check_sigma


class Arrays(SourceDisplay):
    """Images in memory (see `from_arrays`). An `ImageSource`."""

    def __init__(
        self,
        x_tn: Tensor,
        sigma_tn: Tensor,
        label: Tensor,
        class_names: tuple[str, ...],
        name: str,
        physical_range: tuple[float, float],
    ) -> None:
        self.x_tn, self.sigma_tn, self.label = x_tn, sigma_tn, label
        self.physical_range = physical_range
        self.class_names, self.num_classes, self.name = class_names, len(class_names), name
        channels, height, width = x_tn.shape[1:]
        self.image_shape = (channels, height, width)
        columns = [hashlib.sha256(column.numpy().tobytes()).hexdigest() for column in (x_tn, sigma_tn, label)]
        self.fingerprint = hash_of(columns, self.image_shape, class_names)

    def __len__(self) -> int:
        return len(self.x_tn)

    def read(self, index: Tensor) -> Tensor:
        """`index` (B,) -> `x_tn` (B, C, H, W) float32, scaled to [-1, 1] but never clipped to it."""
        return self.x_tn[index]

    def save(self, path: Path | str) -> Store:
        """Write the images to a store, for the command line or for later."""
        images = (
            PackedImage(
                f"{i:06d}",
                self.x_tn[i].numpy(),
                float(self.sigma_tn[i]),
                int(self.label[i]),
                physical_range=self.physical_range,
            )
            for i in range(len(self))
        )
        return write_store(
            Path(path), self.name, images, self.image_shape, "float32", (-1, 1), self.class_names
        )


def from_arrays(
    images: Any,
    sigma: float | Sequence[float] | Any = 0.0,
    label: Sequence[int] | Any | None = None,
    value_range: tuple[float, float] = (-1.0, 1.0),
    name: str = "arrays",
) -> Arrays:
    """Images (N, H, W) or (N, C, H, W) with their noise levels, as a source to train on.

    `sigma` is the standard deviation of the noise, one number for all images or one per image (0 is clean), in
    the units of `images`; `value_range` are the values of black and white, which become -1 and 1.
    `label` (N,) are classes numbered from 0, or -1 for none.

    >>> import numpy as np, assay
    >>> assay.from_arrays(np.random.rand(100, 8, 8), sigma=0.1, value_range=(0, 1))
    <arrays: 100 images of 1 x 8 x 8, 0 clean, 100 noisy>
    """
    low, high = value_range
    if not low < high:
        raise ValueError(
            f"value_range = {value_range}: give the values of black and white, the lower one first"
        )
    values = np.asarray(images)
    values = values[:, None] if values.ndim == 3 else values
    if values.ndim != 4 or len(values) == 0:
        raise ValueError(f"images has shape {np.shape(images)}: expected (N, H, W) or (N, C, H, W)")
    if not np.isfinite(values).all():
        raise ValueError("images has values that are not finite numbers: remove those images")
    x_tn = torch.from_numpy((2 * (values.astype(np.float64) - low) / (high - low) - 1).astype(np.float32))
    levels = np.asarray(sigma, dtype=np.float64) * 2 / (high - low)
    if levels.shape not in ((), (len(values),)):
        raise ValueError(
            f"sigma has shape {levels.shape}: give one level for all {len(values)} images, or one each"
        )
    levels = np.broadcast_to(levels, len(values))
    sigma_tn = torch.from_numpy(levels.astype(np.float32))
    check_sigma("sigma", sigma_tn)
    classes = np.full(len(values), -1) if label is None else np.asarray(label)
    if classes.shape != (len(values),) or not np.issubdtype(classes.dtype, np.integer) or classes.min() < -1:
        raise ValueError("label must hold one class per image, numbered from 0, or -1 for none")
    class_names = tuple(str(number) for number in range(int(classes.max()) + 1))
    return Arrays(x_tn, sigma_tn, torch.from_numpy(classes.astype(np.int64)), class_names, name, (low, high))
