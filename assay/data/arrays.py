"""Images from memory: an array and a noise level are enough, no files are needed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from assay.data.audit import Audit, audit
from assay.data.looks import look_at, odd_axes, rules_out
from assay.data.notes import Note, Notes
from assay.data.readers import RawImages
from assay.data.source import ImageSource
from assay.data.spec import MIN_LEVEL
from assay.data.store import Store
from assay.data.view import save
from assay.errors import AssayError, Rules, check, warn
from assay.files import content_hash

Ends = tuple[float, float]  # black and white
_MIN_SPAN = 0.02  # of black to white that all images together must have


class Arrays(ImageSource):
    """Images in memory (see `from_arrays`)."""

    physical_range: Ends
    warnings: tuple[str, ...] = ()  # what looks wrong

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
        return save(self, path, self.warnings)


def from_arrays(
    images: Any,
    sigma: float | Sequence[float] | Any = 0.0,
    label: Sequence[int] | Any | None = None,
    value_range: Ends | None = None,
    name: str = "arrays",
    group: Sequence[int] | Any | None = None,
) -> Arrays:
    """Images (N, H, W), (N, C, H, W) or (N, H, W, 1, 3 or 4) with their noise levels, as a source to train on.

    `sigma` is the standard deviation of the noise, one number for all images or one per image (0 is clean), in
    the units of `images`; `value_range` are the values of black and white, which become -1 and 1 (by default
    0 and 255 of uint8, -1 and 1 of floats). `label` (N,) are classes numbered from 0, or -1 for none.
    Images of one `group` (N,), e.g. parts of one scene, are held out together.

    >>> import numpy as np, assay
    >>> assay.from_arrays(np.random.rand(100, 8, 8), sigma=0.1, value_range=(0, 1))
    <arrays: 100 images of 1 x 8 x 8, 0 clean, 100 noisy>
    """
    values = _images(images, value_range)
    low, high = map(float, value_range or ((0, 255) if values.dtype == np.uint8 else (-1, 1)))
    x_tn = (2 * (values.astype(np.float64) - low) / (high - low) - 1).astype(np.float32)
    levels = _array(sigma, "sigma", np.float64) * 2 / (high - low)
    classes = np.full(len(values), -1) if label is None else np.asarray(label)
    parts = np.arange(len(values)) if group is None else _array(group, "group", np.int64)
    check(_column_rules(x_tn, levels, classes, parts, (low, high)))
    levels = np.broadcast_to(levels, len(values))
    told = _warnings(values, x_tn, levels, (low, high), name, parts) if len(values) > 1 else []
    if value_range is None and not told and (np.abs(x_tn) > 1.1 + 5 * levels.max()).mean() > 0.01:
        found = f"{name} has values from {x_tn.min():.3g} to {x_tn.max():.3g}"
        told.append(f"{found}, where black is -1 and white 1: give `value_range`, e.g. (0, 1)")
    from_one = set(range(1, classes.max() + 1)) == set(classes.tolist()) - {-1} != set()
    if classes.max() >= len(values) > 1 or from_one:
        num = f"{classes.max() + 1:,} classes for {len(values):,} images{', none of class 0' * from_one}"
        told.append(f"{num}: are classes numbered from 0?")
    for text in told:
        warn(text)
    class_names = tuple(map(str, range(int(classes.max()) + 1)))
    columns = torch.from_numpy(levels.astype(np.float32)), torch.from_numpy(classes.astype(np.int64))
    arrays = Arrays(torch.from_numpy(x_tn), *columns, class_names, name, (low, high))
    arrays.warnings = tuple(told)
    if group is not None:
        arrays.group = torch.from_numpy(parts)
    return arrays


def measure_noise(images: Any, clean: Any | None = None, shared: bool = False, black: float = 0.0) -> Audit:
    """Measure the noise of images, an array as for `from_arrays`, in its units, as `assay data noise` does.

    `clean` are examples of the same kind and in the same units, without noise: with them levels are surer.
    `shared` gives all images the one level that they share; `black` is the value of no light.

    >>> slope = np.linspace(0, 1, 32)
    >>> scenes = np.add.outer(np.linspace(0, 1, 100), np.add.outer(slope, slope))
    >>> noise = assay.measure_noise(scenes + np.random.default_rng(0).normal(0, 0.2, scenes.shape), shared=True)
    >>> print(noise.low[0] < 0.2 < noise.high[0])
    True
    """

    def raw(given: Any, key: str) -> RawImages:
        values = _images(given, (0, 1), key).transpose(0, 2, 3, 1)
        names = [f"image {i}" for i in range(len(values))]
        return RawImages(key, names, lambda i: values[i], value_range=(0, 1))

    examples = None if clean is None else raw(clean, "clean")
    return audit(raw(images, "images"), examples, shared=shared, black=black)


def _images(images: Any, value_range: Ends | None, key: str = "images") -> np.ndarray:
    """Images (N, C, H, W) of an array with any axes that `from_arrays` takes."""
    values = _array(images, key)
    values = values[:, None] if values.ndim == 3 else values
    check(_image_rules(images, values, value_range, key))
    return values.transpose(0, 3, 1, 2) if values.shape[1] > 4 and values.shape[3] <= 4 else values


def _array(values: Any, key: str, dtype: type | None = None) -> np.ndarray:
    try:
        if np.asarray(values).dtype.kind in "US":
            raise ValueError("they are text")
        return np.asarray(values, dtype=dtype)
    except (ValueError, TypeError) as error:
        raise AssayError(f"are not numbers in one array ({error})", key=key, cure="give one array") from None


def _image_rules(images: Any, values: np.ndarray, value_range: Ends | None, key: str) -> Rules:
    """Images are finite numbers, whose black and white are known."""
    yield isinstance(images, str | Path), AssayError("are a path", key=key, cure="use open_store(path)")
    yield not values.size, AssayError("are none", key=key, cure="give one or more")
    masked = isinstance(images, np.ma.MaskedArray) and np.ma.is_masked(images)
    cure = "fill them with plausible values, save files with a map of a high level there, and pack these"
    yield masked, AssayError("have masked pixels, which would be taken for the image", key=key, cure=cure)
    what = f"are {values.dtype} of shape {np.shape(images)}, not numbers (N, H, W) or (N, C, H, W)"
    is_wrong = values.ndim != 4 or values.dtype.kind not in "biuf"
    yield is_wrong, AssayError(what, key=key, cure="reshape them, the images first")
    bad = ~np.isfinite(values).all((1, 2, 3))
    what = f"have pixels that are NaN or infinite: image {bad.argmax()}, of {bad.sum()} in all"
    yield bad.any(), AssayError(what, key=key, cure="remove those images")
    ends: Any = value_range or ((0, 1) if values.dtype == np.uint8 or values.dtype.kind == "f" else None)
    what = f"{ends} is not black and, above it, white"
    what = what if ends else f"is missing: {values.dtype} does not say which values are black and white"
    are_ends = np.shape(ends) == (2,) and ends[0] < ends[1]
    yield not are_ends, AssayError(what, key="value_range", cure="give both, e.g. value_range=(0, 4095)")


def _column_rules(
    x_tn: np.ndarray, levels: np.ndarray, classes: np.ndarray, parts: np.ndarray, ends: Ends
) -> Rules:
    """Levels, black and white, classes and groups are possible for these images."""
    unit = (ends[1] - ends[0]) / 2
    what = f"has shape {levels.shape}, not one level for all {len(x_tn)} images or one each"
    error = AssayError(what, key="sigma", cure="give one number, or one for each image")
    yield levels.shape not in ((), (len(x_tn),)), error
    bad = np.atleast_1d(~((levels == 0) | ((levels >= MIN_LEVEL) & (levels < np.finfo(np.float32).max))))
    first = int(bad.argmax())
    what = f"image {first} has a level of {np.atleast_1d(levels)[first] * unit:g}, which is not that of noise"
    yield bad.any(), AssayError(what, key="sigma", cure="give numbers >= 0, 0 for clean images")
    are_far = (np.abs(x_tn) > 2 + 5 * levels.max()).mean() > 0.5 or 0 < np.ptp(x_tn) / 2 < _MIN_SPAN
    what = f"{ends} cannot be black and white of these values, which become {x_tn.min():g} to {x_tn.max():g}"
    cure = (
        "scale them, or give `value_range=(black, white)`, here or to `assay.from_arrays` (of files: pack them)"
    )
    yield are_far, AssayError(what, key="value_range", cure=cure)
    is_class = classes.shape == (len(x_tn),) and np.issubdtype(classes.dtype, np.integer)
    what = f"is {classes.dtype} of shape {classes.shape}, for {len(x_tn)} images"
    cure = "give one whole number for each, classes counted from 0, or -1 for none"
    yield not is_class or classes.min() < -1, AssayError(what, key="label", cure=cure)
    for i in np.flatnonzero(levels > x_tn.std((1, 2, 3))).tolist():
        level = float(levels if levels.ndim == 0 else levels[i])
        what = f"image {i} varies by {x_tn[i].std() * unit:.3g}, less than its noise of {level * unit:.3g}"
        cure = "check it and `value_range`; both are in the units of the images"
        yield rules_out(x_tn[i], level), AssayError(what, key="sigma", cure=cure)
    what = f"has shape {parts.shape}, not one number for each of {len(x_tn)} images"
    yield parts.shape != (len(x_tn),), AssayError(what, key="group", cure="give one each")


def _warnings(
    values: np.ndarray, x: np.ndarray, levels: np.ndarray, black_and_white: Ends, name: str, group: np.ndarray
) -> list[str]:
    """What looks wrong about images (N, C, H, W), scaled to `x`: what packing warns of, and shapes."""
    cure = " `value_range=(black, white)` states another."
    notes = Notes([name, name], cure=cure)
    for i, level in enumerate(levels.tolist()):
        looks, is_noisy = look_at(x[i], level, i, len(x), values[i]), level > 0  # judged apart from clean ones
        columns = level, black_and_white, hash(x[i].tobytes()), int(is_noisy), int(group[i])
        notes.add(Note(f"image {i}", *columns, looks))
    told, (num, channels, height, width) = notes.warnings(), values.shape
    if channels > 4 and 3 in (num, height, width):
        read = f"is read as {num} images with {channels} channels of {height} x {width} pixels"
        told.append(f"{name} {read}: give axes (N, C, H, W) or (N, H, W, C)")
    elif axes_told := odd_axes((num, height, width)):
        told.append(f"{name} {axes_told}")
    if channels in (2, 4) and np.ptp(values[:, -1]) == 0:
        told.append(f"the last of {channels} channels is {values[0, -1, 0, 0]:g} everywhere: leave opacity out")
    return told
