"""Images from memory: an array and a noise level are enough, no files are needed."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from assay.data.decode import check_finite
from assay.data.notes import Note, Notes, measure, odd_axes
from assay.data.source import ImageSource
from assay.data.spec import MIN_LEVEL
from assay.data.store import PackedImage, Store, write_store
from assay.errors import AssayError
from assay.files import content_hash
from assay.noise import check_sigma

Ends = tuple[float, float]  # black and white
_MIN_SPAN = 0.02  # of black to white that all images together must have


class Arrays(ImageSource):
    """Images in memory (see `from_arrays`)."""

    def __init__(
        self, x_tn: Tensor, sigma_tn: Tensor, label: Tensor, class_names: tuple[str, ...], name: str, ends: Ends
    ) -> None:
        self.x_tn, self.sigma_tn, self.label = x_tn, sigma_tn, label
        self.class_names, self.name, self.physical_range = class_names, name, ends
        channels, height, width = x_tn.shape[1:]
        self.image_shape = (channels, height, width)
        columns = [column.numpy().tobytes() for column in (x_tn, sigma_tn, label)]
        self.fingerprint = content_hash(columns, self.image_shape, class_names)

    def __len__(self) -> int:
        return len(self.x_tn)

    def read(self, index: Tensor) -> Tensor:
        """`index` (B,) -> `x_tn` (B, C, H, W) float32, scaled to [-1, 1] but never clipped to it."""
        return self.x_tn[index]

    def save(self, path: Path | str) -> Store:
        """Write the images to a store, for the command line or for later."""
        columns = zip(self.x_tn.numpy(), self.sigma_tn.tolist(), self.label.tolist(), strict=True)
        images = (
            PackedImage(f"{i:06d}", x, sigma, label, physical_range=self.physical_range)
            for i, (x, sigma, label) in enumerate(columns)
        )
        layout = self.image_shape, "float32", (-1, 1)
        return write_store(Path(path), self.name, images, *layout, self.class_names)  # type: ignore[arg-type]


def from_arrays(
    images: Any,
    sigma: float | Sequence[float] | Any = 0.0,
    label: Sequence[int] | Any | None = None,
    value_range: Ends | None = None,
    name: str = "arrays",
) -> Arrays:
    """Images (N, H, W), (N, C, H, W) or (N, H, W, 1, 3 or 4) with their noise levels, as a source to train on.

    `sigma` is the standard deviation of the noise, one number for all images or one per image (0 is clean), in
    the units of `images`; `value_range` are the values of black and white, which become -1 and 1 (by default
    0 and 255 of uint8, -1 and 1 of floats). `label` (N,) are classes numbered from 0, or -1 for none.

    >>> import numpy as np, assay
    >>> assay.from_arrays(np.random.rand(100, 8, 8), sigma=0.1, value_range=(0, 1))
    <arrays: 100 images of 1 x 8 x 8, 0 clean, 100 noisy>
    """
    values = _channels_first(images)
    low, high = _black_and_white(values, value_range)
    levels = _array(sigma, "sigma", np.float64) * 2 / (high - low)
    if levels.shape not in ((), (len(values),)):
        what = f"has shape {levels.shape}, not one level for all {len(values)} images or one each"
        raise AssayError(what, key="sigma", cure="give one number, or one for each image")
    x_tn = (2 * (values.astype(np.float64) - low) / (high - low) - 1).astype(np.float32)
    levels = np.broadcast_to(levels, len(values))
    check_sigma("sigma", torch.from_numpy(levels.astype(np.float32)))
    if bool((tiny := (levels > 0) & (levels < MIN_LEVEL)).any()):
        what = f"image {int(tiny.argmax())} has a level of {levels[tiny][0]:g}, too small to be that of noise"
        raise AssayError(what, key="sigma", cure="give 0 for clean images")
    share_outside = float((np.abs(x_tn) > 2 + 5 * levels.max()).mean())
    if share_outside > 0.5 or 0 < float(np.ptp(x_tn)) / 2 < _MIN_SPAN:
        ends = f"{float(values.min()):g} to {float(values.max()):g}"
        what = f"{low:g} to {high:g} cannot be black to white of values from {ends}"
        raise AssayError(what, key="value_range", cure="give the values of black and white in these images")
    classes = np.full(len(values), -1) if label is None else np.asarray(label)
    if classes.shape != (len(values),) or not np.issubdtype(classes.dtype, np.integer) or classes.min() < -1:
        raise AssayError("has not one class per image, numbered from 0, or -1 for none", key="label")
    told = _warnings(values, x_tn, levels, (low, high), name) if len(values) > 1 else []
    if value_range is None and not told and (np.abs(x_tn) > 1.1 + 5 * levels.max()).mean() > 0.01:
        found = f"{name} has values from {x_tn.min():.3g} to {x_tn.max():.3g}"
        told.append(f"{found}, where black is -1 and white 1: give `value_range`, e.g. (0, 1)")
    if classes.max() >= len(values) > 1:
        told.append(f"{classes.max() + 1:,} classes for {len(values):,} images: are classes numbered from 0?")
    for text in told:
        warnings.warn(text, stacklevel=2)
    class_names = tuple(str(number) for number in range(int(classes.max()) + 1))
    columns = torch.from_numpy(levels.astype(np.float32)), torch.from_numpy(classes.astype(np.int64))
    return Arrays(torch.from_numpy(x_tn), *columns, class_names, name, (low, high))


def _array(values: Any, key: str, dtype: type | None = None) -> np.ndarray:
    try:
        return np.asarray(values, dtype=dtype)
    except (ValueError, TypeError) as error:
        raise AssayError(f"are not numbers in one array ({error})", key=key, cure="give one array") from None


def _channels_first(images: Any) -> np.ndarray:
    """Images as (N, C, H, W), all of them finite numbers."""
    if isinstance(images, np.ma.MaskedArray) and np.ma.is_masked(images):
        cure = "fill them with plausible values, save files with a map of a high level there, and pack these"
        raise AssayError("have masked pixels, which would be taken for the image", key="images", cure=cure)
    values = _array(images, "images")
    values = values[:, None] if values.ndim == 3 else values
    if values.ndim != 4 or 0 in values.shape or values.dtype.kind not in "biuf":
        what = f"are {values.dtype} of shape {np.shape(images)}, not numbers (N, H, W) or (N, C, H, W)"
        raise AssayError(what, key="images", cure="reshape them, the images first")
    if values.shape[1] > 4 and values.shape[3] <= 4:
        values = values.transpose(0, 3, 1, 2)
    check_finite(values, key="images", cure="remove those images")
    return values


def _black_and_white(values: np.ndarray, value_range: Ends | None) -> Ends:
    if value_range is None and values.dtype != np.uint8 and values.dtype.kind != "f":
        what = f"black and white of images of {values.dtype} are not known"
        raise AssayError(what, key="value_range", cure="give their values")
    ends = value_range or ((0.0, 255.0) if values.dtype == np.uint8 else (-1.0, 1.0))
    if np.shape(ends) != (2,) or not ends[0] < ends[1]:
        raise AssayError(f"{value_range} are not black and white, the lower one first", key="value_range")
    return float(ends[0]), float(ends[1])


def _warnings(
    values: np.ndarray, x: np.ndarray, levels: np.ndarray, black_and_white: Ends, name: str
) -> list[str]:
    """What looks wrong about images (N, C, H, W), scaled to `x`: what packing warns of, and shapes."""
    notes, axes = Notes([name]), (1, 2, 3)
    ends = zip(values.min(axes).tolist(), values.mean(axes).tolist(), values.max(axes).tolist(), strict=True)
    for i, seen in enumerate(ends):
        content, measured = hash(x[i].tobytes()), measure(x[i], i, len(x))
        notes.add(Note(float(levels[i]), seen, black_and_white, content, {}, measured))
    told = notes.warnings()
    num, channels, height, width = values.shape
    if axes_told := odd_axes((num, height, width)):
        told.append(f"{name} {axes_told}")
    if channels in (2, 4) and np.ptp(values[:, -1]) == 0:
        told.append(f"the last of {channels} channels is {values[0, -1, 0, 0]:g} everywhere: leave opacity out")
    return told
