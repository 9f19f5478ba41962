"""What the formats of the field share: stacks of images in one file, read one image at a time."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from assay.archives import check_unpacked
from assay.data.decode import native
from assay.data.levels import Level
from assay.data.readers import RawImages
from assay.data.spec import SourceSpec
from assay.errors import AssayError
from assay.files import decoding

_MAX_CHANNELS = 64


def named(*suffixes: str) -> Callable[[Path], bool]:
    """Whether a file's name ends in one of these, whatever its case."""
    return lambda path: path.name.lower().endswith(suffixes) and path.is_file()


def planes(path: Path, values: Any, axes: str) -> RawImages:
    """Images of an array whose `axes` are named: Y and X, C or S for channels; all others count images.

    `values` needs a shape and slices only, so that nothing is read before an image is asked for.
    """
    axes, shape = axes.upper(), tuple(values.shape)
    if "Y" not in axes or "X" not in axes or len(axes) != len(shape):
        raise AssayError(f"has the axes {axes} and the shape {shape}", cure="give images with axes Y and X")
    channels = [axis for axis in axes if axis in "CS"]
    num_channels = shape[axes.index(channels[0])] if channels else 1
    if len(channels) > 1 or num_channels > _MAX_CHANNELS or min(shape) < 1:
        what = f"has the axes {axes} and the shape {shape}"
        raise AssayError(what, cure=f"save images with one axis of 1 to {_MAX_CHANNELS} channels")
    counted = [at for at, axis in enumerate(axes) if axis not in "YXCS"]
    lengths = [shape[at] for at in counted]
    rest = [axis for axis in axes if axis in "YXCS"]
    order = [rest.index(axis) for axis in ("Y", "X", *channels)]

    def pixels(k: int) -> np.ndarray:
        place: list[Any] = [slice(None)] * len(axes)
        for at, number in zip(counted, np.unravel_index(k, lengths) if lengths else (), strict=True):
            place[at] = int(number)
        with decoding(path, "check that the file is whole"):
            return to_pixels(np.asarray(values[tuple(place)]).transpose(order))

    num_images = math.prod(lengths)
    names = [path.name] if num_images == 1 else [f"{path.name}[{k}]" for k in range(num_images)]
    return RawImages(path.stem, names, pixels, group=np.zeros(num_images, np.int64))


def to_pixels(values: np.ndarray) -> np.ndarray:
    """(H, W[, C]) of any numbers -> (H, W, C) uint8, uint16 or float32, without loss where these allow it."""
    if values.dtype.kind not in "uifb":
        raise AssayError(f"holds {values.dtype} values", cure="save images as real numbers")
    if values.dtype.kind in "ib" or values.dtype.itemsize > 2 or values.dtype == np.float16:
        values = values.astype(np.float32)
    return native(values)


def with_noise(raw: RawImages, found: Any, noise: str) -> RawImages:
    """The images with their noise: one level for all images or one each, or maps of levels likewise."""
    num_images = len(raw.names)
    cure = f"give sigma, or a number, a map of numbers, or one of these for each image under {noise!r}"
    try:
        levels = np.asarray(found, dtype=np.float64)
    except (TypeError, ValueError):
        levels = np.full((), math.nan)
    if found is None or levels.ndim > 4 or (levels.ndim == 0 and math.isnan(levels)):
        raise AssayError(f"has no noise level under {noise!r}", cure=cure)
    if levels.size in (1, num_images):
        each = np.broadcast_to(levels.reshape(-1), num_images)
        return replace(raw, levels=[Level(float(level)) for level in each])
    maps = planes(Path(noise), levels, array_axes(levels.shape)) if levels.ndim > 1 else None
    if maps is None or len(maps.names) not in (1, num_images):
        raise AssayError(f"has noise {levels.shape} under {noise!r} for {num_images} images", cure=cure)
    several = len(maps.names) > 1
    return replace(raw, sigma_map=lambda k: maps.pixels(k if several else 0))


def array_axes(shape: tuple[int, ...]) -> str:
    """The meaning of a bare array's axes; of four the shorter of the outer two is the channels."""
    if len(shape) == 4:
        return "IYXC" if shape[3] <= shape[1] else "ICYX"
    return {2: "YX", 3: "IYX", 5: "IZCYX"}.get(len(shape), "?")


def open_tree(path: Path, group: Any, spec: SourceSpec, axes: str | None = None) -> RawImages:
    """A data set of an HDF5 file or zarr group: the one named, or the only one with three or four axes."""
    arrays = _arrays(group)
    chosen = [name for name, array in arrays.items() if name != spec.noise and len(array.shape) in (3, 4)]
    if spec.dataset is not None:
        chosen = [spec.dataset] if spec.dataset in arrays else []
    if len(chosen) != 1:
        what = f"has {len(chosen)} data sets that could be the images"
        raise AssayError(what, key="dataset", cure=f"name one of {', '.join([*arrays][:20]) or 'none'}")
    values = arrays[chosen[0]]
    check_chunks(path, values)
    raw = planes(path, values, axes or array_axes(tuple(values.shape)))
    if spec.noise is None:
        return raw
    if spec.noise in arrays:
        check_chunks(path, arrays[spec.noise])
        return with_noise(raw, arrays[spec.noise][...], spec.noise)
    return with_noise(raw, values.attrs.get(spec.noise, group.attrs.get(spec.noise)), spec.noise)


def check_chunks(path: Path, values: Any) -> None:
    """Reject an array, or chunks of one, that declare far more than is stored: missing chunks cost nothing."""
    files = path.rglob("*") if path.is_dir() else [path]
    stored = sum(file.stat().st_size for file in files if file.is_file())
    parts = values.shape, values.chunks or (), getattr(values, "shards", None) or ()
    check_unpacked(path, max(map(math.prod, parts)) * values.dtype.itemsize, stored)


def _arrays(group: Any, prefix: str = "", depth: int = 8) -> dict[str, Any]:
    """The arrays below a group by their paths."""
    found: dict[str, Any] = {}
    for name in group if depth else ():
        item = group[name]
        if hasattr(item, "shape"):
            found[f"{prefix}{name}"] = item
        elif hasattr(item, "keys"):
            found |= _arrays(item, f"{prefix}{name}/", depth - 1)
    return found
