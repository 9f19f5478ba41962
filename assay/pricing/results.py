"""Measured results as arrays, which is what the scaling law is fitted to, and `levels.csv`.

`LevelResults` are the held-out losses of the runs of a study, band by band of noise levels; `Measured` are the
values of one metric, a goal's: the loss summed over the bands that the goal minds, or FD. A row of
`levels.csv` is one band of one run:

    dataset, table           the data set; the table or variant of a study (optional)
    block                    a draw of images and a training seed that all configurations share
    sigma                    noise level of the noisy images, empty without any; several with spaces between
    num_clean, num_noisy     training images; as many numbers of noisy ones as there are levels
    level_low, level_high    edges of the band, in sigma_t
    loss, error              nats per dimension that the band adds, at the band's best stop, chosen on other
                             images; its standard error over held-out images, without what all runs share
    step, last_step          the stop, and the last one that was measured
    loss_last                the loss at the last step
"""

import csv
import io
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from assay.errors import AssayError
from assay.files import csv_cell, csv_text, decoding, one_line, write_text

Array = NDArray[np.float64]
Whole = NDArray[np.int64]
Goal = Literal["structure", "everything", "looks"]

GREY_STEP = 2 / 255  # of 8-bit images scaled to [-1, 1]: finer levels carry no image
_COLUMNS = (
    "dataset", "table", "block", "sigma", "num_clean", "num_noisy", "level_low", "level_high", "loss", "error",
    "step", "last_step", "loss_last",
)  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """One metric of n runs. Lower is better.

    `num_noisy` (n, S) are the noisy images of each run at the levels `sigmas` (S,); the other arrays are (n,).
    `error` is what is known of the error of a value that more runs do not shrink or show,
    e.g. that of the held-out images; 0 where nothing is known. `alone` are (level, value) of noisy images
    without any clean ones, which no law is fitted to.
    """

    dataset: str
    goal: Goal
    metric: str
    sigmas: Array
    block: Whole
    num_clean: Array
    num_noisy: Array
    value: Array
    error: Array
    alone: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class LevelResults:
    """Held-out losses of n runs in B bands of noise levels, in nats per dimension.

    `num_noisy` (n, S) are the noisy images of each run at the levels `sigmas` (S,); `block` (n,), `num_clean`
    (n,) and `last_step` (n,) belong to runs, `edges` (B + 1,) to bands; `loss`, `error`, `step` and `loss_last`
    are (n, B). All as in `levels.csv`, see above.
    """

    dataset: str
    table: str
    sigmas: Array
    block: Whole
    num_clean: Array
    num_noisy: Array
    edges: Array
    loss: Array
    error: Array
    step: Whole
    last_step: Whole
    loss_last: Array

    def with_clean(self) -> "LevelResults":
        """The runs that have clean images: a price compares noisy images with those."""
        of_runs = {"block", "num_clean", "num_noisy", "loss", "error", "step", "last_step", "loss_last"}
        return replace(self, **{name: getattr(self, name)[self.num_clean > 0] for name in of_runs})

    @property
    def centres(self) -> Array:
        """The middle of each band (B,), in sigma_t."""
        return np.sqrt(self.edges[1:] * self.edges[:-1])

    @property
    def is_late(self) -> NDArray[np.bool_]:
        """Whether runs are best at their last stop, by bands (n, B)."""
        return self.step >= self.last_step[:, None]

    def above(self, low: float) -> Array:
        """The share (B,) of each band, in log sigma_t, that lies above a level."""
        ends = np.log(np.maximum(self.edges, low))
        return np.diff(ends) / np.diff(np.log(self.edges))

    def total(self, goal: Goal, low: float = 0.0) -> Measured:
        """The loss above a level; of the band that holds this level, a share."""
        return self._sum(goal, f"held-out loss above {max(low, self.edges[0]):.2g}", self.above(low))

    def band(self, which: int) -> Measured:
        """One band."""
        only = np.eye(len(self.centres))[which]
        return self._sum("everything", f"held-out loss at {self.centres[which]:.2g}", only)

    def _sum(self, goal: Goal, metric: str, share: Array) -> Measured:
        runs = self.block, self.num_clean, self.num_noisy
        error = np.sqrt(np.square(self.error) @ np.square(share))
        return Measured(self.dataset, goal, metric, self.sigmas, *runs, self.loss @ share, error)


def write_levels(path: Path, results: Iterable[LevelResults]) -> None:
    """Write `levels.csv`; numbers in full."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for each in results:
        for run, band in itertools.product(range(len(each.block)), range(len(each.edges) - 1)):
            used = np.flatnonzero(each.num_noisy[run])
            row = [each.dataset, each.table, each.block[run], _cell(each.sigmas[used])]
            row += [_cell(each.num_clean[[run]]), _cell(each.num_noisy[run, used]) or "0"]
            row += [*each.edges[band : band + 2], each.loss[run, band], each.error[run, band]]
            row += [each.step[run, band], each.last_step[run], each.loss_last[run, band]]
            writer.writerow(map(csv_cell, row))
    write_text(path, buffer.getvalue())


def _cell(values: Array) -> str:
    return " ".join(f"{value:.17g}" for value in values)


def read_levels(path: Path) -> list[LevelResults]:
    """Read `levels.csv`: one record for each data set and table."""
    with decoding(path, "give a `levels.csv` of a study"), open(path, newline="", encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file))
        if missing := [name for name in _COLUMNS if name not in (rows[0] if rows else ()) and name != "table"]:
            raise AssayError(f"has no column {', '.join(missing)}", key="table")
        groups: dict[tuple[str, str], list[dict[str, str]]] = {}
        for row in rows:
            groups.setdefault((csv_text(row["dataset"]), csv_text(row.get("table") or "")), []).append(row)
        return [_level_results(*names, group) for names, group in groups.items()]


def _level_results(dataset: str, table: str, rows: Sequence[dict[str, str]]) -> LevelResults:
    runs: dict[tuple[str, ...], dict[tuple[float, float], dict[str, str]]] = {}
    for row in rows:
        run = tuple(row[name].strip() for name in ("block", "sigma", "num_clean", "num_noisy"))
        runs.setdefault(run, {})[float(row["level_low"]), float(row["level_high"])] = row
    bands = sorted(next(iter(runs.values())))
    whole = all(sorted(found) == bands for found in runs.values()) and len(rows) == len(runs) * len(bands)
    if not whole or any(a[1] != b[0] for a, b in itertools.pairwise(bands)):
        raise AssayError(f"{one_line(dataset)}: runs differ in their bands of levels, or a run is there twice")

    def column(name: str) -> Array:
        values = np.array([[float(found[band][name]) for band in bands] for found in runs.values()])
        if not np.isfinite(values).all():
            raise AssayError(f"{one_line(dataset)} has a value that is not a number", key=name)
        return values

    noisy = [dict(zip(run[1].split(), run[3].split(), strict=False)) for run in runs]
    sigmas = sorted({float(level) for levels in noisy for level in levels})
    num_noisy = np.zeros((len(runs), len(sigmas)))
    for number, levels in zip(num_noisy, noisy, strict=True):
        for level, count in levels.items():
            number[sigmas.index(float(level))] = float(count)
    return LevelResults(
        dataset, table, np.array(sigmas), column("block")[:, 0].astype(int), column("num_clean")[:, 0],
        num_noisy, np.array([bands[0][0], *(high for _, high in bands)]), column("loss"), column("error"),
        column("step").astype(int), column("last_step")[:, 0].astype(int), column("loss_last"),
    )  # fmt: skip
