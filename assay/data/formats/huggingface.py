"""Hugging Face data sets: `hf:NAME[:SPLIT]`, or a folder that `save_to_disk` wrote."""

from pathlib import Path
from typing import Any

import numpy as np

from assay.data.decode import decode_pixels
from assay.data.levels import Level
from assay.data.readers import Format, RawImages
from assay.data.spec import SourceSpec
from assay.errors import AssayError, extra
from assay.files import decoding

_CURE = "save the data set again"


def _is_dataset(path: Path) -> bool:
    marks = ("dataset_info.json", "dataset_dict.json")
    return str(path).startswith("hf:") or any((path / mark).exists() for mark in marks)


def _load(datasets: Any, name: str, split: str) -> Any:
    if not Path(name).exists():
        return datasets.load_dataset(name, split=split)
    with decoding(name, _CURE):
        data = datasets.load_from_disk(name)
    if isinstance(data, datasets.DatasetDict):
        if split not in data:
            raise AssayError(f"has no split {split!r}", path=name, cure=f"name one: hf:NAME:{'|'.join(data)}")
        return data[split]
    return data


def _open(path: Path, spec: SourceSpec) -> RawImages:
    datasets = extra("datasets", "huggingface", "reading Hugging Face datasets")
    name, _, split = spec.path.removeprefix("hf:").partition(":")
    data = _load(datasets, name, split or "train")
    columns = {kind: [key for key, of in data.features.items() if isinstance(of, kind)]
               for kind in (datasets.Image, datasets.ClassLabel)}  # fmt: skip
    if len(columns[datasets.Image]) != 1:
        raise AssayError(f"has the image columns {columns[datasets.Image]}", path=name, cure="keep one of them")
    (column,), labels = columns.values()
    fields: dict[str, Any] = {}
    with decoding(name, _CURE):
        data.data.validate(full=True)  # a damaged file must not lead outside its own memory
        data = data.cast_column(column, datasets.Image(decode=False))
        if labels:
            label = np.array([-1 if number is None else number for number in data[labels[0]][:]], np.int64)
            fields = {"label": label, "class_names": tuple(data.features[labels[0]].names)}
            if not ((label >= -1) & (label < len(fields["class_names"]))).all():
                raise ValueError(f"its labels are not all among its {len(fields['class_names'])} classes")
        if "sigma_tn" in data.features:
            fields["levels"] = [Level(float(level), None, scaled=True) for level in data["sigma_tn"][:]]
    names = [f"{name}[{i}]" for i in range(len(data))]

    def pixels(i: int) -> np.ndarray:
        with decoding(names[i], _CURE):
            cell = data[i][column]
        if cell is None or not (cell["bytes"] or cell["path"]):
            raise AssayError(f"has no image in its column {column}", path=names[i], cure="remove the row")
        if cell["bytes"]:
            return decode_pixels(cell["bytes"], names[i])
        file = Path(cell["path"])
        if Path(name).exists() and not file.resolve().is_relative_to(Path(name).resolve()):
            cure = "save the data set with its images"
            raise AssayError(f"is a file outside the data set, {file}", path=names[i], cure=cure)
        return decode_pixels(file.read_bytes(), names[i])

    return RawImages(Path(name).name, names, pixels, has_opacity=True, **fields)


FORMAT = Format("a Hugging Face data set", _is_dataset, _open)
