"""Arrays of images: npy, npz and IDX, and what formats share whose files hold an array, read image by image.

npy: images (N, H, W), (N, H, W, C) or (N, C, H, W); in a folder of such files one image each. npz: one such
array, and besides it `label(s)` and `sigma_tn`, one for each image. IDX is MNIST's format, also gzipped;
`x-images-idx3-ubyte` has labels beside it, in `x-labels-idx1-ubyte`.
"""

import math
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from assay.archives import check_unpacked, open_unpacked, read_npy, read_npz
from assay.data.decode import native
from assay.data.looks import odd_axes
from assay.data.readers import Format, RawImages, numbered_classes
from assay.data.spec import Level, SourceSpec
from assay.errors import AssayError, warn
from assay.files import decoding

_MAX_CHANNELS = 64
_CHANNELS = (1, 3, 4)  # of an array whose axes have no names
_LONGEST_STRIP = 16  # longer side over shorter side; beyond it the sizes are more likely something else
_IDX_TYPES = {8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}


def named(*suffixes: str) -> Callable[[Path], bool]:
    """Whether a file's name ends in one of these, whatever its case."""
    return lambda path: path.name.lower().endswith(suffixes) and path.is_file()


def planes(path: Path, values: Any, axes: str) -> RawImages:
    """Images of an array whose `axes` are named: Y and X, C or S for channels; all others count images.

    `values` needs a shape and slices only, so that nothing is read before an image is asked for.
    """
    axes, shape = axes.upper(), tuple(values.shape)
    channels = [axis for axis in axes if axis in "CS"]
    is_image = {"Y", "X"} <= set(axes) and len(axes) == len(shape) and len(channels) <= 1 and min(shape) >= 1
    if not is_image or (channels and shape[axes.index(channels[0])] > _MAX_CHANNELS):
        what = f"has the axes {axes} and the shape {shape}"
        raise AssayError(what, cure=f"save images with axes Y and X, and 1 to {_MAX_CHANNELS} channels")
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


def stacked(name: str, file: str, images: np.ndarray, layout: str | None = None) -> RawImages:
    """Images that are one array: (N, H, W), or of four dimensions with the channels first or last."""
    if images.size == 0 or images.dtype.kind not in "uifb" or images.ndim not in (3, 4):
        cure = "give images of real numbers, (N, H, W), (N, H, W, C) or (N, C, H, W)"
        raise AssayError(f"holds {images.dtype} {images.shape}", path=file, cure=cure)
    if images.ndim == 3:
        if told := odd_axes(images.shape):
            warn(f"{file} {told}")
        images = images[..., None]
    elif (layout or _guess_layout(images.shape, file)) == "NCHW":
        images = images.transpose(0, 2, 3, 1)
    if min(images.shape[1:3]) <= 4 < images.shape[3]:
        warn(f"{file} holds images (H, W, C) of {images.shape[1:]}: is `layout` right?")
    names = [f"{file}[{i}]" for i in range(len(images))]
    return RawImages(name, names, lambda i: to_pixels(np.asarray(images[i])))


def _guess_layout(shape: tuple[int, ...], file: str) -> str:
    """Where the channels are: read the one way that fits, else the one way that gives squares, else ask."""
    sides = {"NHWC": shape[1:3]} if shape[3] in _CHANNELS else {}
    sides |= {"NCHW": shape[2:4]} if shape[1] in _CHANNELS else {}
    square = [layout for layout, (height, width) in sides.items() if height == width]
    if len(square) == 1:
        return square[0]
    if len(sides) != 1 or any(max(side) > _LONGEST_STRIP * min(side) for side in sides.values()):
        what = f"has the shape {shape}, which may mean several things"
        raise AssayError(what, path=file, key="layout", cure="give NHWC (channels last) or NCHW")
    return next(iter(sides))


def _open_one(path: Path, spec: SourceSpec) -> RawImages:
    """A file of a folder holds one image, (H, W) or (H, W, C)."""
    values = read_npy(path)
    return planes(path, values, "YXC"[: values.ndim] if values.ndim > 1 else "")


def _open_npz(path: Path, spec: SourceSpec) -> RawImages:
    arrays = read_npz(path)
    stacks = [key for key, array in arrays.items() if array.ndim in (3, 4)]
    columns = {key.removesuffix("s"): array for key, array in arrays.items() if key not in (*stacks, "seeds")}
    if len(stacks) != 1 or columns.keys() - {"label", "sigma_tn"}:
        found = ", ".join(f"{key} {arrays[key].shape}" for key in sorted(arrays))
        cure = "give one array of images, (N, H, W[, C]), and besides it label and sigma_tn alone"
        raise AssayError(f"holds {found or 'nothing'}", cure=cure)
    raw = stacked(path.stem, path.name, arrays[stacks[0]], spec.layout)
    if "label" in columns:
        raw = numbered_classes(raw, columns["label"], path)
    if (sigma := columns.get("sigma_tn")) is not None:
        if sigma.shape != (len(raw.names),) or sigma.dtype.kind not in "iuf":
            cure = f"give one number per image, ({len(raw.names)},)"
            raise AssayError(f"has sigma_tn {sigma.dtype} {sigma.shape}", key="sigma_tn", cure=cure)
        raw = replace(raw, noise=lambda i: Level(float(sigma[i]), None, scaled=True))
    return raw


def _is_idx(path: Path) -> bool:
    if not path.is_file():
        return False
    with open_unpacked(path) as file:
        head = file.read(4)
    return head[:2] == b"\0\0" and len(head) == 4 and head[2] in _IDX_TYPES and head[3] in (3, 4)


def read_idx(path: Path, layout: str | None = None) -> RawImages:
    """The images of an IDX file, and their labels if they are beside it."""
    raw = stacked(path.name.split(".")[0], path.name, _idx_array(path), layout)
    beside = path.with_name(path.name.replace("images", "labels").replace("idx3", "idx1"))
    return raw if beside == path or not beside.exists() else numbered_classes(raw, _idx_array(beside), beside)


def _idx_array(path: Path) -> np.ndarray:
    with open_unpacked(path) as file:
        head = file.read(4)
        dtype, num_dimensions = np.dtype(_IDX_TYPES[head[2]]), head[3]
        shape = struct.unpack(f">{num_dimensions}I", file.read(4 * num_dimensions))
        size = math.prod(shape) * dtype.itemsize
        check_unpacked(path, size, file.packed)
        data = file.read(size)
        if len(data) < size or file.read(1):  # at the end gzip's checksum is compared
            there = "more" if len(data) == size else len(data)
            raise AssayError(f"declares {dtype} {shape}, {size} bytes, and holds {there}", cure="get it again")
        return np.frombuffer(data, dtype).reshape(shape)


FORMATS = (
    Format("npy", named(".npy"), lambda p, spec: stacked(p.stem, p.name, read_npy(p), spec.layout), _open_one),
    Format("npz", named(".npz"), _open_npz),
    Format("IDX", _is_idx, lambda path, spec: read_idx(path, spec.layout)),
)
