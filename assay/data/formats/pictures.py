"""Pictures (PNG, JPEG, TIFF, WebP): folders, whose subfolders are classes, and zips as EDM's tool makes them.

EDM's labels, in `dataset.json`, come before the names of subfolders.
"""

import json
import zipfile
from pathlib import Path, PurePosixPath

import numpy as np

from assay.archives import open_zip, read_member
from assay.data.decode import PICTURES, decode_pixels
from assay.data.readers import Format, RawImages, numbered_classes
from assay.data.spec import SourceSpec
from assay.errors import AssayError
from assay.files import decoding, one_line

_LABELS = "dataset.json"


def open_pictures(path: Path, files: list[Path]) -> RawImages:
    """The pictures of a folder; those in a folder directly under it belong to the class of that name."""
    names = [file.relative_to(path).as_posix() for file in files]

    def pixels(i: int) -> np.ndarray:
        return decode_pixels(files[i].read_bytes(), str(files[i]))

    tops = [PurePosixPath(name).parts[0] if "/" in name else None for name in names]
    class_names = tuple(sorted({top for top in tops if top is not None}))
    number = {top: i for i, top in enumerate(class_names)}
    label = np.array([-1 if top is None else number[top] for top in tops], dtype=np.int64)
    raw = RawImages(path.name, _some(names, path), pixels, label, class_names, has_opacity=True)
    if not (path / _LABELS).exists():
        return raw
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


FORMATS = (Format("a zip of pictures", lambda p: p.is_file() and zipfile.is_zipfile(p), _open_zip),)
