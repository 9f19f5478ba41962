"""Noise levels of images from a file: CSV or JSON lines, one line per image.

    filename,sigma,usable_from
    a.png,12.5,
    b.png,0,40

`sigma` is the noise in an image, `usable_from` the level from which it may be used (of blurred or compressed
images, say). One of them will do. ambient-omni's `annotations.jsonl` is read as well.
"""

import csv
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from assay.data.readers import printable
from assay.files import csv_text, one_line

_SIGMA_COLUMNS = ("sigma", "sigma_tn")
_USABLE_COLUMNS = ("usable_from", "sigma_min", "annotation")  # the last two are ambient-omni's


@dataclass(frozen=True)
class Problem:
    """Something in the input that cannot be packed: the file, and what is wrong and what to do."""

    name: str
    reason: str


class Level(NamedTuple):
    """Two numbers per image: the noise in it, and the level from which it may be used.

    In the units of the files, or of images from -1 to 1 if `scaled`; ambient-omni's levels are `usable_scaled`.
    """

    sigma_tn: float
    usable_from: float
    scaled: bool = False
    usable_scaled: bool = False

    def in_range(self, low: float, high: float) -> "Level":
        """The same in units of images from -1 to 1, for pixels that are black at `low` and white at `high`."""
        factor = 2 / (high - low)
        sigma = self.sigma_tn * (1 if self.scaled else factor)
        usable = self.usable_from * (1 if self.scaled or self.usable_scaled else factor)
        return Level(sigma, usable, True)


def check_level(sigma: float, where: str) -> float:
    """Reject a noise level that is not a finite number >= 0."""
    if not (math.isfinite(sigma) and sigma >= 0):
        raise ValueError(f"{where} = {sigma}: a noise level is a finite number >= 0")
    return sigma


def read_annotations(
    path: Path, names: list[str], scaled: bool = False
) -> tuple[dict[int, Level], list[Problem]]:
    """The levels of each image from a CSV (columns filename, sigma, usable_from) or a JSONL with these keys.

    They are in the units of the files, or of images from -1 to 1 if `scaled`; ambient-omni's always are.

    One of sigma and usable_from will do: without `sigma` the image has no noise of its own, without
    `usable_from` it may be used from its own noise on. ambient-omni's annotations.jsonl calls the latter
    `sigma_min` or `annotation`. File names are relative to the source; the last part alone will do if no
    two images share it. Returns image number -> levels, and what is wrong with the file.
    """
    number = {name: i for i, name in enumerate(names)}
    by_last_part: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        by_last_part.setdefault(PurePosixPath(name).name, []).append(i)
    levels: dict[int, Level] = {}
    bad: set[int] = set()
    problems: list[Problem] = []
    for where, row in _annotation_rows(path):
        name = str(row["filename"])
        filename = one_line(name)  # as a message may quote it
        candidates = by_last_part.get(name, [])
        i = number.get(name, candidates[0] if len(candidates) == 1 else -1)
        if i < 0:
            reason = (
                f"{len(candidates)} images have this name: write their folders too"
                if candidates
                else "no such image: names are relative to the source; correct it, or remove the line"
            )
            problems.append(Problem(filename, f"{where}: {filename}: {reason}"))
            continue
        try:
            level = _level_of(row, f"{where}: {filename}", scaled)
            if i in levels or i in bad:
                raise ValueError(f"{where}: {filename} is annotated twice: keep one line")
            levels[i] = level
        except ValueError as error:
            problems.append(Problem(filename, str(error)))
            levels.pop(i, None)
            bad.add(i)
    for i, name in enumerate(names):
        if i not in levels and i not in bad:
            problems.append(
                Problem(
                    name, f"{path} has no sigma for {printable(name)}: add a line for it (0 if it is clean)"
                )
            )
    return levels, problems


def _level_of(row: dict[str, object], where: str, scaled: bool) -> Level:
    found: list[float | None] = []
    key = None
    for keys in (_SIGMA_COLUMNS, _USABLE_COLUMNS):
        key = next((key for key in keys if row.get(key) not in (None, "")), None)
        try:
            level = None if key is None else float(row[key])  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"{where}: {key} = {row[str(key)]!r}: write a finite number >= 0") from None
        found.append(None if level is None else check_level(level, f"{where}: {key}"))
    sigma, usable_from = found
    if sigma is None and usable_from is None:
        known = ", ".join(_SIGMA_COLUMNS + _USABLE_COLUMNS)
        raise ValueError(f"{where} has no sigma; expected one of the keys {known}")
    sigma = sigma or 0.0
    usable_scaled = scaled or key in _USABLE_COLUMNS[1:]
    return Level(sigma, sigma if usable_from is None else usable_from, scaled, usable_scaled)


def _annotation_rows(path: Path) -> Iterator[tuple[str, dict[str, object]]]:
    """(file and line, row) of a CSV or JSONL; each row has a `filename`."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: save it as CSV or JSONL") from error
    if Path(path).suffix.lower() in (".jsonl", ".json"):
        for line, content in enumerate(text.splitlines(), 1):
            if content.strip():
                try:
                    row = json.loads(content)
                    row["filename"]
                except (ValueError, KeyError, TypeError) as error:
                    raise ValueError(
                        f'{path} line {line}: expected {{"filename": "a.png", "sigma": 0.2}}, '
                        f"got {content[:80]!r}"
                    ) from error
                yield f"{path} line {line}", row
        return
    reader = csv.DictReader(text.splitlines(), skipinitialspace=True)
    columns = reader.fieldnames or []
    if "filename" not in columns or not {*_SIGMA_COLUMNS, *_USABLE_COLUMNS} & set(columns):
        raise ValueError(
            f"{path} has the columns {list(columns)}; expected filename and sigma in the first line"
        )
    for row in reader:
        yield f"{path} line {reader.line_num}", {**row, "filename": csv_text(row["filename"] or "")}
