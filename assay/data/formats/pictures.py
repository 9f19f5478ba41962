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
_NO_IMAGES = f"holds no images ({', '.join(sorted(PICTURES))})"


def open_pictures(path: Path, files: list[Path]) -> RawImages:
    """The pictures of a folder; those in a folder directly under it belong to the class of that name."""
    if not files:
        raise AssayError(_NO_IMAGES, path=path, cure="check the path")
    names = [file.relative_to(path).as_posix() for file in files]
    if (path / _LABELS).exists():
        label, class_names = _edm_labels((path / _LABELS).read_bytes(), str(path / _LABELS), names)
    else:
        label, class_names = _classes_of(names)

    def pixels(i: int) -> np.ndarray:
        return decode_pixels(files[i].read_bytes(), str(files[i]))

    return RawImages(path.name, names, pixels, label, class_names, has_opacity=True)


def _open_zip(path: Path, spec: SourceSpec) -> RawImages:
    archive = open_zip(path)
    members = archive.namelist()
    names = sorted(name for name in members if PurePosixPath(name).suffix.lower() in PICTURES)
    if not names:
        raise AssayError(_NO_IMAGES, path=path, cure="check the path")
    with decoding(path, "copy or make the zip again"):
        for other in set(members) - set(names):  # an image that has lost its name is among these
            archive.open(other).close()
    label, class_names = None, tuple[str, ...]()  # EDM's folders are no classes
    if _LABELS in members:
        label, class_names = _edm_labels(read_member(archive, _LABELS), f"{path}:{_LABELS}", names)

    def pixels(i: int) -> np.ndarray:
        return decode_pixels(read_member(archive, names[i]), f"{path}:{names[i]}")

    return RawImages(path.stem, names, pixels, label, class_names, has_opacity=True)


def _classes_of(names: list[str]) -> tuple[np.ndarray | None, tuple[str, ...]]:
    """The topmost folder of each name."""
    tops = [PurePosixPath(name).parts[0] if "/" in name else None for name in names]
    class_names = tuple(sorted({top for top in tops if top is not None}))
    number = {top: i for i, top in enumerate(class_names)}
    return np.array([-1 if top is None else number[top] for top in tops], dtype=np.int64), class_names


def _edm_labels(text: bytes, where: str, names: list[str]) -> tuple[np.ndarray | None, tuple[str, ...]]:
    """`{"labels": [["00000/img00000000.png", 6], ...]}`, or null for none."""
    with decoding(where, 'write it as EDM does, {"labels": [["file.png", class], ...]}'):
        pairs = json.loads(text)["labels"]
        labels = {str(name).replace("\\", "/"): int(label) for name, label in pairs or []}
    if pairs is None:
        return None, ()
    if missing := [name for name in names if name not in labels]:
        what = f"has no label for {one_line(missing[0])} ({len(missing)} in all)"
        raise AssayError(what, path=where, cure="add it, or remove the image")
    return numbered_classes([labels[name] for name in names], where, len(names))


FORMAT = Format("a zip of pictures", lambda path: path.is_file() and zipfile.is_zipfile(path), _open_zip)
