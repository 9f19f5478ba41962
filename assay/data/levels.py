"""Noise levels: in the units of the files or of images scaled to [-1, 1], and read from CSV or JSON lines.

    filename,sigma,usable_from
    a.png,12.5,
    b.png,0,40

`sigma` is the noise in an image, `usable_from` the level from which it may be used (of blurred or compressed
images, say). One of them will do. Both are in the units of the files. What is called `sigma_tn` is in those of
images from -1 to 1, as everywhere in Assay, and so are ambient-omni's `sigma_min` and `annotation`, which say
from which level an image may be used.
"""

import csv
import io
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from assay.errors import AssayError
from assay.files import csv_text, decoding, one_line, read_text

MIN_LEVEL = 1e-6  # of noise, where black to white is 2
_SIGMA = {"sigma": False, "sigma_tn": True}  # whether a key is always in units of images from -1 to 1
_USABLE = {"usable_from": False, "sigma_min": True, "annotation": True}


class Level(NamedTuple):
    """Two numbers per image: the noise in it, and the level from which it may be used.

    Each in the units of the files, or of images from -1 to 1 if scaled.
    """

    sigma: float = 0.0
    usable_from: float | None = None  # the same as sigma
    scaled: bool = False
    usable_scaled: bool = False

    def in_range(self, low: float, high: float) -> tuple[float, float]:
        """Both in units of images from -1 to 1, where pixels are black at `low` and white at `high`.

        The one place where levels are converted, and checked to be levels.
        """
        factor = 2 / (high - low)
        sigma = usable_from = self.sigma * (1 if self.scaled else factor)
        if self.usable_from is not None:
            usable_from = self.usable_from * (1 if self.usable_scaled else factor)
        is_level = sigma == 0 or sigma >= MIN_LEVEL  # less would pass for clean, or is a typing error
        if not is_level or not sigma * (1 - 1e-9) <= usable_from < math.inf:
            what = f"has noise of {sigma:g} and is usable from {usable_from:g}, where black to white is 2"
            cure = "give finite numbers >= 0: 0 for a clean image, and usable_from not below its noise"
            raise AssayError(what, cure=cure)
        return sigma, max(sigma, usable_from)


class LevelMap(NamedTuple):
    """The noise of each pixel of an image, (H, W, C or 1)."""

    sigma: np.ndarray
    scaled: bool = False

    def level(self, quantile: float) -> Level:
        """The level below which this share of the pixels lie."""
        is_level = (self.sigma >= 0) & (self.sigma <= np.finfo(np.float32).max)
        if not self.sigma.size or not bool(is_level.all()):
            what = "has a map of the noise with levels that are negative, NaN or infinite"
            cure = "give pixels that were not measured a plausible value and a high, finite level"
            raise AssayError(what, key="map", cure=cure)
        return Level(float(np.quantile(self.sigma, quantile, method="inverted_cdf")), None, self.scaled)


def read_levels(path: Path, names: Sequence[str], scaled: bool = False) -> list[Level | AssayError]:
    """The level of each image, or what is wrong with it, from a CSV or a JSONL (see the top of this module).

    File names are relative to the source; the last part alone will do if no two images share it. Lines of
    images that are not in the source do not matter. `scaled`: all levels are for images from -1 to 1.
    """
    number = {name: [i] for i, name in enumerate(names)}
    by_last_part: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        by_last_part.setdefault(PurePosixPath(name).name, []).append(i)
    cure = "write one line with one level for each image (0 if it is clean), and folders where names repeat"
    found: dict[int, Level | AssayError] = {}
    for line, row in _rows(path):
        name = str(row["filename"])
        images = number.get(name) or by_last_part.get(name, [])
        for i in images:
            try:
                if len(images) > 1 or i in found:
                    raise ValueError("is ambiguous or has another line")
                found[i] = _level_of(row, scaled)
            except (TypeError, ValueError, OverflowError) as error:
                found[i] = AssayError(one_line(f"line {line}: {name}: {error}"), path=path, cure=cure)
    return [
        found.get(i) or AssayError(f"has no sigma for {one_line(name)}", path=path, cure=cure)
        for i, name in enumerate(names)
    ]


def _level_of(row: dict[str, Any], scaled: bool) -> Level:
    sigma, is_scaled = _given(row, _SIGMA, scaled)
    usable_from, is_usable_scaled = _given(row, _USABLE, scaled)
    if sigma is None and usable_from is None:
        raise ValueError(f"has none of {', '.join((*_SIGMA, *_USABLE))}")
    return Level(sigma or 0.0, usable_from, is_scaled, is_usable_scaled)


def _given(row: dict[str, Any], keys: dict[str, bool], scaled: bool) -> tuple[float | None, bool]:
    """The number under one of these keys, and whether it is for images from -1 to 1."""
    given = {key: float(str(row[key])) for key in keys if row.get(key) not in (None, "")}
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are the same")
    return next(((number, scaled or keys[key]) for key, number in given.items()), (None, scaled))


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(row := dict(pairs)) < len(pairs):
        raise ValueError("it has a key twice")
    return row


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The lines of a CSV or JSONL by their numbers; each row has a `filename`."""
    text = read_text(path, "save it as UTF-8 text, CSV or JSONL")
    if path.suffix.lower() in (".jsonl", ".json"):
        for line, content in enumerate(text.split("\n"), 1):
            if content.strip():
                with decoding(path, f'write line {line} like {{"filename": "a.png", "sigma": 0.2}}'):
                    row = json.loads(content, object_pairs_hook=_each_once)
                    row["filename"]
                yield line, row
        return
    with decoding(path, "name filename and sigma once in its first line; write decimals with a point"):
        reader = csv.DictReader(io.StringIO(text, newline=""), skipinitialspace=True)
        columns = reader.fieldnames = [column.strip() for column in reader.fieldnames or ()]
        used = [column for column in columns if column in ("filename", *_SIGMA, *_USABLE)]
        if "filename" not in columns or len(used) < 2 or len(set(used)) < len(used):
            raise ValueError(f"it has the columns {', '.join(columns)}")
        for row in reader:
            if None in row:
                raise ValueError(f"line {reader.line_num} has more cells than the {len(columns)} columns")
            yield reader.line_num, {**row, "filename": csv_text(row["filename"] or "")}
