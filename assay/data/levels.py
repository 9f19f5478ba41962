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
from typing import NamedTuple

from assay.errors import AssayError
from assay.files import csv_text, decoding, one_line

_SIGMA = {"sigma": False, "sigma_tn": True}  # whether a key is always in units of images from -1 to 1
_USABLE = {"usable_from": False, "sigma_min": True, "annotation": True}


class Level(NamedTuple):
    """Two numbers per image: the noise in it, and the level from which it may be used.

    Each in the units of the files, or of images from -1 to 1 if scaled.
    """

    sigma: float
    usable_from: float | None = None  # the same as sigma
    scaled: bool = False
    usable_scaled: bool = False

    def in_range(self, low: float, high: float) -> tuple[float, float]:
        """Both in units of images from -1 to 1, where pixels are black at `low` and white at `high`.

        The one place where levels are converted, and checked to be levels.
        """
        factor = 2 / (high - low)
        sigma = self.sigma * (1 if self.scaled else factor)
        if self.usable_from is None:
            usable_from = sigma
        else:
            usable_from = self.usable_from * (1 if self.usable_scaled else factor)
        if not 0 <= sigma < math.inf or not 0 <= usable_from < math.inf:
            wrong = self.sigma if not 0 <= sigma < math.inf else self.usable_from
            raise AssayError(f"has a noise level of {wrong:g}", cure="give a finite number >= 0")
        if 0 < sigma < 1e-9:  # would pass for clean, or for a typing error of it
            raise AssayError(f"has a noise level of {self.sigma:g}", cure="give 0 for a clean image")
        if usable_from < sigma * (1 - 1e-9):
            raise AssayError(
                f"has noise of {sigma:g} and cannot be usable from {usable_from:g} (black to white is 2)",
                cure="give a level that is not below its noise",
            )
        return sigma, max(sigma, usable_from)


def read_levels(path: Path, names: Sequence[str], scaled: bool = False) -> list[Level | AssayError]:
    """The level of each image, or what is wrong with it, from a CSV or a JSONL (see the top of this module).

    File names are relative to the source; the last part alone will do if no two images share it. Lines of
    images that are not in the source do not matter. `scaled`: all levels are for images from -1 to 1.
    """
    number = {name: i for i, name in enumerate(names)}
    by_last_part: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        by_last_part.setdefault(PurePosixPath(name).name, []).append(i)
    found: dict[int, Level | AssayError] = {}
    for line, row in _rows(path):
        name = str(row["filename"])
        images = [number[name]] if name in number else by_last_part.get(name, [])
        for i in images:
            if len(images) > 1:
                what = f"line {line}: {len(images)} images are called {one_line(name)}"
                found[i] = AssayError(what, path=path, cure="write their folders too")
            elif i in found:
                what = f"line {line}: {one_line(name)} has another line"
                found[i] = AssayError(what, path=path, cure="keep one of them")
            else:
                found[i] = _level_of(row, path, line, scaled)
    return [
        found.get(i)
        or AssayError(f"has no sigma for {one_line(name)}", path=path, cure="add a line (0 if it is clean)")
        for i, name in enumerate(names)
    ]


def _level_of(row: dict[str, object], path: Path, line: int, scaled: bool) -> Level | AssayError:
    """The level of a row; an error where it has none."""
    numbers, units = [], []
    for keys in (_SIGMA, _USABLE):
        given = [key for key in keys if row.get(key) not in (None, "")]
        try:
            if len(given) > 1:
                raise AssayError(f"{given[0]} and {given[1]} are the same")
            numbers.append(float(row[given[0]]) if given else None)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError) as error:
            what = one_line(f"line {line}: {row['filename']}: {error}")
            return AssayError(what, path=path, cure="write one number for each")
        units.append(scaled or (bool(given) and keys[given[0]]))
    if numbers == [None, None]:
        known = ", ".join((*_SIGMA, *_USABLE))
        what = f"line {line}: {one_line(str(row['filename']))} has no level"
        return AssayError(what, path=path, cure=f"write one of {known}")
    return Level(numbers[0] or 0.0, numbers[1], *units)


def _rows(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    """The lines of a CSV or JSONL by their numbers; each row has a `filename`."""
    with decoding(path, "save it as UTF-8 text, CSV or JSONL"):
        text = path.read_text(encoding="utf-8-sig")
    if path.suffix.lower() in (".jsonl", ".json"):
        for line, content in enumerate(text.split("\n"), 1):
            if content.strip():
                with decoding(path, f'write line {line} like {{"filename": "a.png", "sigma": 0.2}}'):
                    row = json.loads(content)
                    row["filename"]
                yield line, row
        return
    with decoding(path, "correct it"):
        reader = csv.reader(io.StringIO(text, newline=""), skipinitialspace=True)
        columns = [column.strip() for column in next(reader, [])]
        if "filename" not in columns or not {*_SIGMA, *_USABLE} & set(columns):
            raise AssayError(
                f"has the columns {one_line(', '.join(columns))}",
                cure="name filename and sigma in its first line",
            )
        if repeated := {column for column in columns if column and columns.count(column) > 1}:
            raise AssayError(f"has two columns {one_line(repeated.pop())}", cure="keep one of them")
        for cells in reader:
            if len(cells) > len(columns):
                raise AssayError(
                    f"line {reader.line_num} has {len(cells)} cells for {len(columns)} columns",
                    cure="write decimals with a point",
                )
            row = dict(zip(columns, cells, strict=False))
            if cells:
                yield reader.line_num, {**row, "filename": csv_text(row.get("filename", ""))}
