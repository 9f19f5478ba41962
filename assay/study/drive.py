"""Taking a study to its end: its runs, more blocks until the price is decided, and the report."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from assay.data.arrays import Arrays, from_arrays
from assay.errors import AssayError
from assay.files import write_whole
from assay.pricing.price import Price, price_results
from assay.progress import open_progress
from assay.study.folder import OpenStudy, locked, open_study
from assay.study.init import draft_study
from assay.study.pool import run_local
from assay.study.report import Written, write_report
from assay.study.stages import Update, find_reference

# Takes the unfinished runs of a study to their ends, here (`run_local`) or on a cluster (`run_on_ray`).
Runner = Callable[..., None]  # (opened, on_update=, should_stop=)


@dataclass(frozen=True)
class Driven:
    """Where a study was taken to: with its blocks, the prices of its goal, and the runs that failed."""

    opened: OpenStudy
    stopped: bool
    prices: tuple[Price, ...] = ()
    failed: dict[str, str] = field(default_factory=dict)  # title -> reason


def drive(
    opened: OpenStudy,
    runner: Runner,
    until: float | None = None,
    minutes: float | None = None,
    on_update: Callable[[Update], None] = lambda update: None,
    on_prices: Callable[[int, Sequence[Price]], None] = lambda num_blocks, prices: None,
    should_stop: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
) -> Driven:
    """Run all that is missing, and add blocks to a design until its price is sure enough, or time is over.

    `until` is the factor by which the ends of an interval may differ. A block that would end after `minutes`,
    by what the last ones took, is not begun. `on_prices` hears the prices of the goal after each block.
    """
    started, reasons = clock(), dict[str, str]()

    def hear(update: Update) -> None:
        if update.phase == "failed":
            reasons[update.run] = update.reason
        on_update(update)

    with locked(opened.folder):
        if opened.missing():
            find_reference(opened.study, opened.data, opened.folder)  # once, before all runs use it
        while True:
            num_missing, begun = len(opened.missing()), clock()
            runner(opened, on_update=hear, should_stop=should_stop)
            stopped, left = should_stop(), opened.missing()
            prices = () if stopped or left else goal_prices(opened)
            if prices:
                on_prices(opened.num_blocks, prices)
            runs_per_block = len(opened.runs) // opened.num_blocks
            pace = (clock() - begun) / num_missing if num_missing else _seconds_of_one(opened)
            late = minutes is not None and clock() - started + pace * runs_per_block > 60 * minutes
            sure = until is not None and bool(prices) and all(width(price) <= until for price in prices)
            unlimited = until is None and minutes is None
            if stopped or left or opened.study.design is None or unlimited or late or sure:
                failed = {run.title: reasons.get(run.key) or opened.failure(run) or "" for run in left}
                return Driven(opened, stopped, prices, {} if stopped else failed)
            opened = opened.with_blocks(opened.num_blocks + 1)


def _seconds_of_one(opened: OpenStudy) -> float:
    """Seconds between the ends of two runs, if this machine does what was recorded, one run for each core."""
    num_runs = len(opened.runs)
    return opened.seconds() / num_runs / min(os.cpu_count() or 1, num_runs // opened.num_blocks)


def width(price: Price) -> float:
    """The factor by which the ends of an interval differ."""
    return float("inf") if price.low <= 0 or price.limited else price.high / price.low


def to_halve(opened: OpenStudy, price: Price) -> tuple[int, float]:
    """About how many more blocks would halve an interval, and their seconds on one core, from those that ran.

    An interval shrinks as the square root of the blocks, so it takes three times as many again.
    """
    return 3 * price.law.num_blocks, 3 * opened.seconds()


def goal_prices(opened: OpenStudy) -> tuple[Price, ...]:
    """The prices of a design's goal, one for each noise level, from all that is measured."""
    if opened.study.design is None:
        return ()
    (levels,) = opened.levels()
    found = price_results([outcome for _, outcome in opened.outcomes()], levels)
    return tuple(price for price in found.prices if price.goal == opened.study.design.goal)


def run_study(
    study: Path | str | Any,
    folder: Path | str | None = None,
    *,
    have_clean: int | None = None,
    noisy: Sequence[float] = (),
    until: float | None = None,
    minutes: float | None = None,
    num_workers: int | None = None,
    progress: bool = True,
) -> Written:
    """Find out what a noisy image is worth: train and measure every configuration, and write the report.

    `study` is a TOML file, e.g. one that `assay study init` wrote; or images, as the path of a store, an array
    (N, ...) in [-1, 1] or what `assay.from_arrays` gives, for which a study is drafted: `have_clean` clean
    images are in hand, and images with noise `noisy` could be had. Results go to `folder`, by default out/NAME.
    Call it again to resume. `until` and `minutes` as for `drive`. `num_workers` processes share the work, by
    default one for each core. They import your script, so start the study below `if __name__ == "__main__":`.

    >>> found = assay.run_study("study.toml", num_workers=1, progress=False)
    >>> found.path
    PosixPath('out/mine/report.html')
    """
    opened = open_study(_spec(study, folder, have_clean, noisy, minutes), Path(folder) if folder else None)
    share = {run.key: float(opened.is_finished(run)) for run in opened.runs}
    with open_progress(progress) as tell:

        def update(now: Update) -> None:
            share[now.run] = 1.0 if now.phase == "done" else 0.9 * now.done / max(now.total, 1)
            tell(opened.study.name, sum(share.values()), len(share))

        runner, limit = partial(run_local, num_workers=num_workers), minutes if until is not None else None
        driven = drive(opened, runner, until, limit, update)
    for title, reason in driven.failed.items():
        raise AssayError(f"{title} failed: {reason}", path=opened.folder, cure="correct it, and call again")
    written = write_report(driven.opened)
    assert written is not None
    return written


def _spec(
    study: Path | str | Any,
    folder: Path | str | None,
    have_clean: int | None,
    noisy: Sequence[float],
    minutes: float | None,
) -> Path:
    """The file of a study: the one that is given, or one drafted for images, once."""
    given = Path(study) if isinstance(study, str | Path) else None
    if given is not None and given.suffix == ".toml":
        return given
    place = Path(folder) if folder else Path("out") / (given.name if given else "arrays")
    spec, store = place / "drafted.toml", given or place / "images"
    if not spec.exists():
        if given is None and not store.exists():
            (study if isinstance(study, Arrays) else from_arrays(study)).save(store)
        text = draft_study(store, have_clean, noisy, minutes or 30.0)
        with write_whole(spec) as partial:
            partial.write_text(text)
    return spec
