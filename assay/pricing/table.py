"""Tables of results: one row per trained model, with what it was trained on and the FD it reached.

Columns (the paper's `fid_tables.csv`, or a study's `results.csv`; others are ignored):

    fid or fd, fid_std or fd_std      Frechet distance and its standard deviation (optional, may be empty)
    sigma                             noise of the noisy images; may be empty in clean-only rows
    clean_fraction, noisy_fraction    parts of the data set, or
    num_clean, num_noisy              numbers of images, which win when both are there
    dataset, extractor                rows are compared only where these agree (optional)
    table, sampling, consistency      choose rows: see `read_results` (optional)
    seed                              rows alike but for the seed are repeats: averaged (optional)
"""

import csv
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.files import is_number

Array = NDArray[np.float64]

PAPER = Path(__file__).with_name("fid_tables.csv")
# Sizes the paper gives (caption of its clean-mix table); ImageNet is stated as "about 1.3M".
PAPER_NUM_IMAGES = {"cifar10": 60_000, "celeba_hq": 30_000, "imagenet": 1_300_000}
# Boxed bounds on 1 / c in the paper's section on pricing, by data set and sigma.
PAPER_BOXES = {
    ("cifar10", 0.05): (1.17, 1.25), ("celeba_hq", 0.05): (1.17, 1.25), ("imagenet", 0.05): (1.125, 1.17),
    ("cifar10", 0.1): (1.25, 1.5), ("celeba_hq", 0.1): (1.25, 1.5), ("imagenet", 0.1): (1.125, 1.17),
    ("cifar10", 0.2): (1.5, 1.75), ("celeba_hq", 0.2): (1.5, 1.75), ("imagenet", 0.2): (1.5, 1.75),
}  # fmt: skip


@dataclass(frozen=True)
class Results:
    """Comparable rows, all arrays (n,): each setting once, clean-only rows with sigma 0 and no noisy images.

    `num_clean` and `num_noisy` are images if `counted`, else parts of the data set. `line` is the line
    of the file a row stands on. `has_std` is false when the table gives no standard deviations; where it gives
    some, the `num_without_std` rows of the file that lack one have the largest of the others. `dataset` is
    the column of that name, "" without one, and `from_paper` says whether the file is the paper's.
    """

    name: str
    line: NDArray[np.int64]
    sigma: Array
    num_clean: Array
    num_noisy: Array
    fd: Array
    fd_std: Array
    counted: bool
    has_std: bool
    num_without_std: int = 0
    dataset: str = ""
    from_paper: bool = False

    def __len__(self) -> int:
        return len(self.line)

    def take(self, keep: NDArray[np.bool_] | NDArray[np.int64]) -> "Results":
        """The rows of a mask or of indices."""
        columns: dict[str, Any] = {n: v[keep] for n, v in vars(self).items() if isinstance(v, np.ndarray)}
        return replace(self, **columns)

    def setting(self, row: int) -> str:
        """A row in words: "0.3 clean + 0.7 at 0.2", or "300 clean only" where images are counted."""
        form = ",.0f" if self.counted else ".3g"
        clean, noisy = format(self.num_clean[row], form), format(self.num_noisy[row], form)
        return f"{clean} clean" + (f" + {noisy} at {self.sigma[row]:g}" if self.num_noisy[row] else " only")


def read_results(
    path: Path,
    *,
    table: str | None = None,
    dataset: str | None = None,
    num_images: float | None = None,
    min_clean_fraction: float = 0.1,
) -> list[Results]:
    """Read the comparable rows of a CSV file, one `Results` for each data set (and extractor).

    Kept are rows with clean images, at least `min_clean_fraction` of them, full sampling and no consistency
    loss; of `dataset`, if given; and of `table`, which is `clean_mix` where the file has one and none
    is given. `num_images` turns fractions into numbers of images.
    """
    sheet = _Sheet(path)
    fd_name, std_name = sheet.either("fid", "fd"), sheet.either("fid_std", "fd_std", required=False)
    fd = sheet.numbers(fd_name)
    std = sheet.numbers(std_name) if std_name else np.full(len(fd), np.nan)
    clean, noisy, fraction, counted = _read_counts(sheet)
    sigma = np.where(noisy > 0, sheet.numbers("sigma", blank=0.0), 0.0)
    sheet.check(fd_name, fd, np.isfinite(fd) & (fd > 0), "a Frechet distance is finite and > 0")
    sheet.check(std_name, std, ~((std < 0) | np.isinf(std)), "a standard deviation is at least 0")
    sheet.check(
        "sigma", sigma, np.isfinite(sigma) & ((sigma > 0) | (noisy == 0)), "noisy images need a level > 0"
    )

    keep = (fraction >= min_clean_fraction - 1e-9) & (clean > 0)
    if "sampling" in sheet:
        keep &= np.isin(sheet.text("sampling"), ("", "full"))
    if "consistency" in sheet:
        keep &= sheet.numbers("consistency", blank=0.0) == 0
    if table is None and "table" in sheet and "clean_mix" in sheet.text("table"):
        table = "clean_mix"
    for name, wanted in (("table", table), ("dataset", dataset)):
        if wanted is not None:
            column = np.array(sheet.text(name))
            if wanted not in column:
                known = ", ".join(sorted(set(column)))
                raise ValueError(f"{path}: column {name} has no {wanted!r}; it has {known}")
            keep &= column == wanted
    if not keep.any():
        raise ValueError(
            f"{path}: none of the lines {sheet.line[0]} to {sheet.line[-1]} has full sampling, no consistency "
            f"loss, clean images and clean_fraction >= {min_clean_fraction:g}"
        )
    group = np.full(len(fd), path.stem)
    if names := [sheet.text(name) for name in ("dataset", "extractor") if name in sheet]:
        group = np.array([" ".join(parts) for parts in zip(*names, strict=True)])
    seed = np.array(sheet.text("seed")) if "seed" in sheet else np.full(len(fd), "")
    scale = 1.0 if counted else (num_images or 1.0)
    counted = counted or num_images is not None
    found = []
    for name in dict.fromkeys(group[keep]):
        i = np.flatnonzero(keep & (group == name))
        sizes = clean[i] * scale, noisy[i] * scale
        results = Results(str(name), sheet.line[i], sigma[i], *sizes, fd[i], std[i], counted, True)
        results = _merge_repeats(results, seed[i], f"{path}: column {fd_name}")
        origin = sheet.text("dataset")[i[0]] if "dataset" in sheet else ""
        results = replace(results, dataset=origin, from_paper=path.resolve() == PAPER.resolve())
        first, last = results.line.min(), results.line.max()
        if len(results) < 2:
            raise ValueError(f"{path}: {name} has one usable row (line {first}): there is nothing to compare")
        if np.ptp(results.fd) == 0:
            raise ValueError(
                f"{path}: column {fd_name} is {results.fd[0]:g} in every usable row of {name} (lines {first} "
                f"to {last}): the table cannot tell its settings apart"
            )
        found.append(results)
    return found


def _read_counts(sheet: "_Sheet") -> tuple[Array, Array, Array, bool]:
    """Clean and noisy images (n,), the clean fraction (n,), and whether the first two are counts."""
    counted = "num_clean" in sheet and "num_noisy" in sheet
    if counted:
        clean, noisy = sheet.numbers("num_clean"), sheet.numbers("num_noisy")
        for name, values in (("num_clean", clean), ("num_noisy", noisy)):
            sheet.check(name, values, (values >= 0) & np.isfinite(values), "a number of images is at least 0")
        sheet.check("num_clean", clean, clean + noisy > 0, "with no noisy images either, there is no data")
        if "clean_fraction" not in sheet:
            return clean, noisy, clean / (clean + noisy), True
    fraction, other = sheet.numbers("clean_fraction"), sheet.numbers("noisy_fraction")
    for name, values in (("clean_fraction", fraction), ("noisy_fraction", other)):
        sheet.check(name, values, (values >= 0) & (values <= 1), "a fraction lies in [0, 1]")
    return (clean, noisy, fraction, True) if counted else (fraction, other, fraction, False)


def _rounding_std(fd: Array) -> float:
    """Standard deviation of the rounding: a value given as 2.40 may be anything from 2.395 to 2.405."""
    for decimals in range(7):
        if np.array_equal(np.round(fd, decimals), fd):
            return float(10.0**-decimals / np.sqrt(12))
    return 0.0


def _merge_repeats(results: Results, seed: NDArray[np.str_], where: str) -> Results:
    """Average rows of one setting that differ in their seed; refuse those that contradict each other.

    Here `fd_std` of a row may be NaN, for unknown; of what is returned it is known, if the table has any.
    """
    settings = np.stack([results.sigma, results.num_clean, results.num_noisy], 1)
    _, first, which, count = np.unique(settings, True, True, True, axis=0)
    which = which.reshape(-1)
    rows_of = np.split(np.argsort(which, kind="stable"), np.cumsum(count)[:-1])
    spread, num_runs = np.zeros(len(count)), np.ones(len(count))
    for setting in np.flatnonzero(count > 1):
        rows = rows_of[setting]
        if len(set(seed[rows])) == len(rows):
            spread[setting], num_runs[setting] = results.fd[rows].var(ddof=1), len(rows)
        elif np.ptp(results.fd[rows]) > 0:
            lines, values = (", ".join(f"{v:g}" for v in column[rows]) for column in (results.line, results.fd))
            raise ValueError(
                f"{where}: lines {lines} give {values} for the same setting ({results.setting(rows[0])}); keep "
                "one of them, or tell repeats apart in a column `seed`"
            )
    rounding, std = _rounding_std(results.fd), np.nan_to_num(results.fd_std)
    # A 0 is a rounded value beside values no finer, as 0.00 is beside 2.06; elsewhere nobody measured it.
    zeros_are_rounded = 0 < _rounding_std(std) <= rounding
    unknown = np.isnan(results.fd_std) | ((std == 0) & (not zeros_are_rounded))
    unknown &= spread[which] == 0
    largest = max(float(std.max()), float(np.sqrt(spread.max())))
    if largest > 0:  # taken for exact, these rows would make every comparison with them certain
        std[unknown] = largest
    var = np.maximum(np.bincount(which, std**2 + rounding**2) / count, spread) / num_runs
    order = np.argsort(first)
    return replace(
        results.take(first[order]),
        fd=(np.bincount(which, results.fd) / count)[order],
        fd_std=np.sqrt(var[order]),
        has_std=largest > 0,
        num_without_std=int(unknown.sum()) if largest > 0 else 0,
    )


class _Sheet:
    """A CSV file by columns, which knows the line of every row so that complaints can name it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            self.header = [name.strip() for name in next(reader, [])]
            lines, rows = [], []
            for row in filter(None, reader):
                lines.append(reader.line_num)
                rows.append(row)
                if len(row) != len(self.header):
                    where = f"{path}, line {reader.line_num}"
                    raise ValueError(f"{where}: {len(row)} values, but the header names {len(self.header)}")
        if not rows:
            raise ValueError(f"{path} has no rows: expected a header and at least two results")
        self.line = np.array(lines)
        self._columns = dict(zip(self.header, zip(*rows, strict=True), strict=True))

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def either(self, *names: str, required: bool = True) -> str:
        """The first of these columns that is there; "" if none is and none is required."""
        found = next((name for name in names if name in self), "")
        if required and not found:
            known = ", ".join(self.header)
            raise ValueError(f"{self.path}: column {' or '.join(names)} is missing; the header has {known}")
        return found

    def text(self, name: str) -> list[str]:
        """A column as stripped strings."""
        return [value.strip() for value in self._columns[self.either(name)]]

    def numbers(self, name: str, blank: float = np.nan) -> Array:
        """A column as floats; empty cells become `blank`."""
        text = [value or repr(blank) for value in self.text(name)]
        try:
            return np.array(text, dtype=np.float64)
        except ValueError:
            bad = next(row for row, value in enumerate(text) if not is_number(value))
            where = f"{self.path}, line {self.line[bad]}, column {name}"
            raise ValueError(f"{where}: {text[bad]!r} is not a number") from None

    def check(self, name: str, values: Array, good: NDArray[np.bool_], rule: str) -> None:
        """Refuse the first row of a column that breaks a rule."""
        if not good.all():
            bad = int(np.flatnonzero(~good)[0])
            shown = "empty" if np.isnan(values[bad]) else f"{values[bad]:g}"
            raise ValueError(f"{self.path}, line {self.line[bad]}, column {name} is {shown}: {rule}")
