"""IDX, MNIST's format, also gzipped. `x-images-idx3-ubyte` has labels beside it, in `x-labels-idx1-ubyte`."""

import math
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np

from assay.archives import MAX_DIMENSIONS, check_unpacked, open_unpacked
from assay.data.formats.npy import stacked
from assay.data.readers import Format, RawImages, numbered_classes
from assay.data.spec import SourceSpec
from assay.errors import AssayError

_TYPES = {8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}


def _is_idx(path: Path) -> bool:
    if not path.is_file():
        return False
    with open_unpacked(path) as file:
        head = file.read(4)
    return head[:2] == b"\0\0" and len(head) == 4 and head[2] in _TYPES and head[3] in (3, 4)


def read_idx(path: Path, spec: SourceSpec | None = None) -> RawImages:
    """The images of a file, and their labels if they are beside it."""
    raw = stacked(path.name.split(".")[0], path.name, _array(path), spec)
    beside = path.with_name(path.name.replace("images", "labels").replace("idx3", "idx1"))
    if beside == path or not beside.exists():
        return raw
    label, class_names = numbered_classes(_array(beside), beside, len(raw.names))
    return replace(raw, label=label, class_names=class_names)


def _array(path: Path) -> np.ndarray:
    with open_unpacked(path) as file:
        head = file.read(4)
        if len(head) < 4 or head[2] not in _TYPES or not 1 <= head[3] <= MAX_DIMENSIONS:
            raise AssayError("has no header of the IDX format", cure="get it again")
        dtype, num_dimensions = np.dtype(_TYPES[head[2]]), head[3]
        shape = struct.unpack(f">{num_dimensions}I", file.read(4 * num_dimensions))
        size = math.prod(shape) * dtype.itemsize
        check_unpacked(path, size, file.packed)
        data = file.read(size)
        if len(data) < size or file.read(1):  # at the end gzip's checksum is compared
            there = "more" if len(data) == size else len(data)
            raise AssayError(f"declares {dtype} {shape}, {size} bytes, and holds {there}", cure="get it again")
    return np.frombuffer(data, dtype).reshape(shape)


FORMAT = Format("IDX", _is_idx, read_idx)
