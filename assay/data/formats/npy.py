"""npy: images (N, H, W), (N, H, W, C) or (N, C, H, W); in a folder of such files one image each."""

from pathlib import Path

import numpy as np

from assay.archives import read_npy
from assay.data.readers import Format, RawImages
from assay.data.scientific import named, planes, to_pixels
from assay.data.spec import SourceSpec
from assay.errors import AssayError

_CHANNELS = (1, 3, 4)
_LONGEST_STRIP = 16  # longer side over shorter side; beyond it the sizes are more likely something else


def stacked(name: str, file: str, images: np.ndarray, spec: SourceSpec | None = None) -> RawImages:
    """Images that are one array: (N, H, W), or of four dimensions with the channels first or last."""
    if images.size == 0 or images.dtype.kind not in "uifb" or images.ndim not in (3, 4):
        cure = "give images of real numbers, (N, H, W), (N, H, W, C) or (N, C, H, W)"
        raise AssayError(f"holds {images.dtype} {images.shape}", path=file, cure=cure)
    if images.ndim == 3:
        images = images[..., None]
    elif ((spec and spec.layout) or _guess_layout(images.shape, file)) == "NCHW":
        images = images.transpose(0, 2, 3, 1)
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
        cure = "give NHWC (channels last) or NCHW (channels first)"
        raise AssayError(
            f"has the shape {shape}, which may mean several things", path=file, key="layout", cure=cure
        )
    return next(iter(sides))


def _open_one(path: Path, spec: SourceSpec) -> RawImages:
    """A file of a folder holds one image, (H, W) or (H, W, C)."""
    values = read_npy(path)
    if values.ndim not in (2, 3):
        raise AssayError(
            f"has the shape {values.shape}", cure="save one image in each file, (H, W) or (H, W, C)"
        )
    return planes(path, values, "YX" if values.ndim == 2 else "YXC")


def _open(path: Path, spec: SourceSpec) -> RawImages:
    return stacked(path.stem, path.name, read_npy(path), spec)


FORMAT = Format("npy", named(".npy"), _open, _open_one)
