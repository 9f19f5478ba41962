"""A study in its folder, and the stages of its runs, so that nothing that is there is repeated.

    study.toml                    the spec, copied
    data/, shared/                known data sets, extractor and reference features, made once
    runs/<key>/snapshots/         train: weights at the steps that are compared, and the final ones
    runs/<key>/losses-*.json      measure: held-out loss by bands of noise levels, with a stop per band
    runs/<key>/samples-*.json     sample: distances of samples, one file per way of sampling, and a picture
    runs/<key>/outcome-*.json     record: one row of results.csv
    results.csv, levels.csv       all outcomes, and what prices are made of: see `assay.study.report`

`execute` goes through the stages, and `attempt` does so if no other process is at the same run. An outcome's
file is all that counts: with it nothing is repeated, even if the checkpoint is gone.
"""

import errno
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from assay.data import ImageSource
from assay.data.config import DataConfig
from assay.data.picture import image_grid
from assay.devices import find_devices
from assay.errors import AssayError, about, check_same
from assay.files import Busy, decoding, differences, hold_lock, is_held, read_text, write_text, write_whole
from assay.metrics import measure
from assay.metrics.classifier import has_labels
from assay.metrics.evaluate import Along, Evaluation, evaluate, load_arrays, save_evaluation, with_held_out_loss
from assay.metrics.extract import Extractor, Reference
from assay.metrics.generated import sample_checkpoint
from assay.metrics.held_out import MIN_IMAGES, losses_by_band, paired_errors, stopping_steps
from assay.metrics.measure import MeasureConfig, counter
from assay.outcome import METRICS, Outcome
from assay.pricing.price import Prices, price_results
from assay.pricing.results import LevelResults
from assay.sample import SampleConfig
from assay.study.spec import (
    SETTINGS,
    Run,
    Study,
    check_against_data,
    hash_tree,
    read_study,
    remembered,
    study_folder,
    study_runs,
)
from assay.train import train
from assay.train.config import TrainConfig, read_config
from assay.train.folder import final_path, read_run, remove_states
from assay.train.ranks import train_on_ranks
from assay.train.restored import restored_path, round_ends, round_path, snapshot_at
from assay.train.run import Progress

_NUM_PICTURED = 64
ENDS_ALL = ("full", "changed")  # of phases: the disk is, the images have
_FULL = (errno.ENOSPC, errno.EDQUOT)
_WEIGHTS = r"(round-\d+/)?(snapshots|state)/(\d{9,}|final)\.safetensors"


@dataclass(frozen=True)
class Update:
    """What a run is doing and how far it is, or how it ended, and if not well, why."""

    run: str
    phase: str
    done: int = 1
    total: int = 1
    reason: str = ""

    @property
    def share(self) -> float:
        """How much of the phase is over."""
        return self.done / max(self.total, 1)

    @property
    def is_end(self) -> bool:
        """Whether no more is heard of this attempt."""
        return self.phase in ("done", "stopped", "held", "failed", "lost", *ENDS_ALL)


class Changed(AssayError):
    """The images are others than those that the study began with."""


class Interrupted(Exception):
    """Measuring or sampling was asked to stop; it starts again next time."""


@dataclass(frozen=True)
class Work:
    """One run of a study, in its folder. It is trained on `num_ranks` devices, each with its own process.

    `data` are all images of the study; `tell` hears how far it is, and `should_stop` ends it early.
    """

    study: Study
    folder: Path
    data: DataConfig
    run: Run
    tell: Callable[[Update], None] = lambda update: None
    should_stop: Callable[[], bool] = lambda: False
    num_ranks: int = 1

    @property
    def run_dir(self) -> Path:
        """The run's own folder."""
        return self.folder / "runs" / self.run.key

    @property
    def losses_path(self) -> Path:
        """The file of the measuring stage."""
        return self.run_dir / f"losses-{hash_tree([self.run.key, self.run.held_out_fingerprint])}.json"

    def path(self, stage: Literal["samples", "outcome"], sample: SampleConfig) -> Path:
        """The file of a stage for one way of sampling the run; a grid of samples stands beside the samples'."""
        return self.run_dir / f"{stage}-{self.run.result_key(sample)}.json"

    @property
    def failure_path(self) -> Path:
        """Why the run failed the last time."""
        return self.run_dir / "failure.txt"

    @property
    def is_finished(self) -> bool:
        """Whether every outcome is there."""
        return all(self.path("outcome", sample).exists() for sample in self.run.samples)

    def fail(self, reason: str) -> Update:
        """Record why the run failed, if there is room on the disk."""
        with suppress(OSError):
            write_text(self.failure_path, reason)
        return Update(self.run.key, "failed", 0, 1, reason)

    def hear(self, phase: str, done: int, total: int) -> None:
        """Tell how far measuring or sampling is; raises `Interrupted` when the run should stop."""
        self.tell(Update(self.run.key, phase, done, total))
        if self.should_stop():
            raise Interrupted


def attempt(work: Work) -> Update:
    """Execute a run and tell how that ended; "held" if another process is at it, or was until now."""
    held = Update(work.run.key, "held")
    try:
        with hold_lock(work.run_dir / "run", "{holder} is at it"):
            if work.is_finished:
                return held
            work.tell(Update(work.run.key, "training", 0, work.run.config.train.total_steps))
            return Update(work.run.key, "done" if execute(work) else "stopped")
    except Busy:
        return held
    except Changed as error:
        return Update(work.run.key, "changed", 0, 1, str(error))
    except Exception as error:
        if isinstance(error, OSError) and (error.errno in _FULL or "the disk is full" in str(error)):
            return Update(work.run.key, "full", 0, 1, str(error))  # no fault of the run
        return work.fail(str(error) if isinstance(error, AssayError) else f"{type(error).__name__}: {error}")


def execute(work: Work) -> bool:
    """Take a run through its stages to the end, or until it should stop; True if finished."""
    missing = [sample for sample in work.run.samples if not work.path("outcome", sample).exists()]
    if not missing:
        return True
    check_images(work)
    if not train_stage(work):
        return False
    try:
        check_images(work)
        measured = measure_stage(work)
        for sample in missing:
            sampled = sample_stage(work, sample)
            check_images(work)
            record_stage(work, sample, measured, sampled)
    except Interrupted:
        return False
    settings = work.run.config.train
    kept, every = {settings.total_steps, *round_ends(settings)}, settings.snapshot_every
    for step, path in snapshots(work).items():  # not those that the run's own settings ask for
        if step not in kept and not (every and step % every == 0):
            path.unlink()
    return True


def check_images(work: Work) -> None:
    """Reject other images than those the study began with: their results would pass for those of these."""
    source, held_out = work.data.open(), work.data.open_held_out()
    now = source.fingerprint, held_out.fingerprint if held_out else ""
    if now != (work.run.data_fingerprint, work.run.held_out_fingerprint):
        raise Changed("the images have changed")


def compared_steps(work: Work) -> list[int]:
    """The steps whose weights are kept until the run is measured: for a stop per band, and along training."""
    last, steps = work.run.config.train.total_steps, {*along_steps(work)}
    if can_measure(work.data.open_held_out()):
        steps |= {*stopping_steps(last), *round_ends(work.run.config.train)}
    return sorted(steps | {last})


def along_steps(work: Work) -> list[int]:
    """The steps after each of `evaluate.along` equal parts of training; the last is its end."""
    last, num_parts = work.run.config.train.total_steps, work.study.evaluate.along
    return sorted({max(1, round(last * part / num_parts)) for part in range(1, num_parts + 1)})


def snapshots(work: Work) -> dict[int, Path]:
    """The weights to compare, by step, as far as they are there."""
    *steps, last = compared_steps(work)
    found = {step: snapshot_at(work.run.config.train, work.run_dir, step) for step in steps}
    return {step: path for step, path in found.items() if path.exists()} | {last: final_path(work.run_dir)}


def train_stage(work: Work) -> bool:
    """Train the run, or resume it; True if it is finished."""
    config, run_dir = work.run.config, work.run_dir
    if final_path(run_dir).exists() and (run_dir / "train.seconds").exists():
        return True
    if work.run.continues is not None:
        first = replace(work, run=work.run.continues)
        with hold_lock(first.run_dir / "run", "{holder} is at it"):
            if not train_stage(first):
                return False
        goes_on = {"continue_from": first.run_dir}
        config = config.model_copy(update={"train": config.train.model_copy(update=goes_on)})
    steps = compared_steps(work)

    def tell(progress: Progress) -> None:
        work.tell(Update(work.run.key, "training", progress.step, progress.num_steps))

    how: Any = {"snapshot_steps": steps, "on_progress": tell, "should_stop": work.should_stop}
    with _timed(run_dir / "train.seconds"):
        if work.num_ranks > 1:
            result = train_on_ranks(work.num_ranks, config, run_dir, config.data, **how)
        else:
            result = train(config, run_dir, config.data.open(), **how)
    if result.finished:
        if not work.run.is_continued:
            remove_states(run_dir / "state")
        for number in range(config.train.rounds + 1):  # by a finished model
            shutil.rmtree(restored_path(run_dir, number), ignore_errors=True)
    return result.finished


@contextmanager
def _timed(path: Path) -> Iterator[None]:
    """Add the seconds of a block to those in a file, over all interrupted attempts."""
    before, started = read_seconds(path), time.perf_counter()
    try:
        yield
    finally:
        write_text(path, f"{before + time.perf_counter() - started:.3f}")


def read_seconds(path: Path) -> float:
    """The seconds in a file, 0 without it."""
    with decoding(path, "remove it; the seconds before are then not counted"):
        return float(path.read_text()) if path.exists() else 0.0


def can_measure(held_out: ImageSource | None) -> bool:
    """Whether each half of the held-out images is enough for a loss."""
    return held_out is not None and len(held_out) >= 2 * MIN_IMAGES


def measure_stage(work: Work) -> Evaluation:
    """The held-out loss by bands of levels; nothing without enough held-out images."""
    path, held_out = work.losses_path, work.data.open_held_out()
    if path.exists():
        return read_measures(path)
    if held_out is None or not can_measure(held_out):
        return Evaluation()
    with _timed(path.with_suffix(".seconds")):
        weights = snapshots(work)
        advance = counter(work.hear, "measuring", len(weights) * len(held_out))
        batch_size = 4 * work.study.evaluate.batch_size  # evaluations, of which sampling has two per step
        found = losses_by_band(
            weights, held_out, progress=advance, devices=find_devices(), batch_size=batch_size
        )
    by_step = zip(found.steps, found.chosen_by.sum(1).tolist(), strict=True)
    along = tuple(Along(step=step, held_out_loss=loss) for step, loss in by_step)
    save_evaluation(path, with_held_out_loss(Evaluation(), found).model_copy(update={"along": along}))
    return read_measures(path)


def read_measures(path: Path) -> Evaluation:
    """Read what the measuring or the sampling stage wrote, with the losses of each image."""
    with decoding(path, "remove it, and it is measured again"):
        return load_arrays(path, Evaluation.model_validate_json(path.read_bytes()))


def find_reference(study: Study, data: DataConfig, folder: Path) -> tuple[Extractor, Reference] | None:
    """What samples are compared with; None if the study measures none, or there are no labels for that."""
    chosen, source = study.evaluate, data.open()
    labelled = "extractor" in chosen.model_fields_set or has_labels(source)
    if chosen.num_images == 0 or not (labelled or isinstance(chosen.reference, Path)):
        return None
    real = chosen.reference if isinstance(chosen.reference, Path) else source
    how = MeasureConfig(extractor=chosen.extractor, batch_size=chosen.batch_size)
    return measure.find_reference(real, how, folder / "shared", find_devices())


def sample_stage(work: Work, sample: SampleConfig) -> Evaluation:
    """Sample the final model, and on other seeds those along training; measure them, and draw samples."""
    path, protocol, weights, along = work.path("samples", sample), work.study.evaluate, snapshots(work), []
    if path.exists():
        return read_measures(path)
    compared, device = find_reference(work.study, work.data, work.folder), find_devices()[0]
    frequencies = compared[1].frequencies if compared else None
    advance = counter(work.hear, "sampling", max(work.run.num_sampled, 1))
    num_images, last, result = protocol.num_images, work.run.config.train.total_steps, Evaluation()
    first_seed = num_images * protocol.num_ranges  # of the points along training
    with _timed(path.with_suffix(".seconds")):
        for step in (each for each in along_steps(work) if compared and each in weights):
            kept = path.with_name(f"{path.stem}-{step}.json")
            if compared and not kept.exists():
                samples, _ = sample_checkpoint(
                    weights[step], num_images, first_seed, sample, frequencies, device
                )
                found = evaluate(samples, compared[1], compared[0], num_images, progress=advance, fd_only=True)
                save_evaluation(kept, found)
            along.append(Along(step=step, fd=read_measures(kept).fd))
        number = max(first_seed, _NUM_PICTURED)
        samples, settings = sample_checkpoint(weights[last], number, 0, sample, frequencies, device)
        if compared:
            result = evaluate(
                samples, compared[1], compared[0], num_images, protocol.num_ranges, sampler=settings,
                progress=advance, fd_only=protocol.fd_only,
            )  # fmt: skip
        pictured = samples.read(torch.arange(_NUM_PICTURED))
    with write_whole(path.with_suffix(".png")) as partial:
        image_grid(pictured, 8).save(partial)
    save_evaluation(path, result.model_copy(update={"along": tuple(along)}))
    return read_measures(path)


def record_stage(work: Work, sample: SampleConfig, measured: Evaluation, sampled: Evaluation) -> None:
    """Write the outcome of one way of sampling the run: all that was measured, as one record."""
    losses = {point.step: point.held_out_loss for point in measured.along}
    distances = {point.step: point.fd for point in sampled.along}
    steps = sorted(losses.keys() | distances.keys())
    along = (Along(step=step, fd=distances.get(step), held_out_loss=losses.get(step)) for step in steps)
    update = {name: value for name, value in measured if name.startswith("held_out_loss") or name == "bands"}
    found = Outcome(
        configuration=next(of for of, way in work.run.ways if way == sample),
        evaluation=sampled.model_copy(update=update | {"along": tuple(along)}),
        train_seconds=read_seconds(work.run_dir / "train.seconds"),
        sample_seconds=read_seconds(work.path("samples", sample).with_suffix(".seconds")),
        held_out_loss_seconds=read_seconds(work.losses_path.with_suffix(".seconds")),
    )
    write_text(work.path("outcome", sample), found.model_dump_json(indent=2) + "\n")


@dataclass(frozen=True)
class OpenStudy:
    """A study in its folder, with its data."""

    study: Study
    folder: Path
    data: DataConfig  # with paths of stores alone
    source: ImageSource  # the images to train on
    held_out: ImageSource | None  # those set aside, which no run is trained on
    runs: list[Run]

    def __repr__(self) -> str:
        num_finished = len(self.runs) - len(self.missing())
        return f"<{self.study.name} in {self.folder}: {num_finished} of {len(self.runs)} runs finished>"

    def with_blocks(self, blocks: int) -> "OpenStudy":
        """The same design with this number of blocks."""
        return replace(self, runs=study_runs(self.study, self.data, self.source, self.held_out, blocks))

    def with_added_blocks(self, is_there: Callable[[Work], bool]) -> "OpenStudy":
        """With those blocks, too, that were added to a design: of each one run or more `is_there`."""
        if self.study.design is None:
            return self
        more = self.with_blocks(self.num_blocks + 1)
        added = map(more.work, more.runs[len(self.runs) :])
        return more.with_added_blocks(is_there) if any(map(is_there, added)) else self

    @property
    def num_blocks(self) -> int:
        """The blocks of a design, or the seeds of a grid."""
        return len({run.config.train.seed for run in self.runs})

    def work(self, run: Run) -> Work:
        """One of its runs, with the paths of its files."""
        return Work(self.study, self.folder, self.data, run)

    def outcomes(self) -> list[tuple[Run, Outcome]]:
        """The finished rows with their runs, in the order of the spec."""
        found = []
        for run in self.runs:
            for of, sample in run.ways:
                if (path := self.work(run).path("outcome", sample)).exists():
                    found.append((run, _read_outcome(path).model_copy(update={"configuration": of})))
        return found

    def levels(self) -> list[LevelResults]:
        """The losses of all finished runs by bands of levels, for each table of configurations."""
        tables: dict[str, list[tuple[Run, Evaluation]]] = {}
        for run in self.runs:
            if self.work(run).is_finished and (path := self.work(run).losses_path).exists():
                tables.setdefault(run.ways[0][0].table, []).append((run, read_measures(path)))
        return [_level_results(self.study.name, table, rows) for table, rows in tables.items()]

    def prices(self) -> Prices:
        """What the finished runs say a noisy image is worth.

        >>> assay.open_study("out/mine", claim=False).prices()
        """
        levels = {each.table: each for each in self.levels()}
        by_level = levels.get("clean_mix", next(iter(levels.values()), None))
        return price_results([outcome for _, outcome in self.outcomes()], by_level)

    def seconds(self) -> float:
        """What all outcomes took together, on one core."""
        return sum(_seconds(outcome) for _, outcome in self.outcomes())

    def left_out(self) -> list[Path]:
        """Folders of runs in its own that it would not show: begun with other settings, or on other images."""
        known = self.with_added_blocks(lambda work: work.run_dir.exists()).runs  # perhaps not finished
        outcomes = {self.work(run).path("outcome", sample) for run in known for sample in run.samples}
        keys = {each.key for run in known for each in (run, run.continues) if each is not None}
        found = {path.parent for path in {*self.folder.glob("runs/*/outcome-*.json")} - outcomes}
        begun = (path for path in self.folder.glob("runs/*") if any(path.glob("**/config.json")))
        return sorted(found | {path for path in begun if path.name not in keys})

    def unneeded(self) -> list[Path]:
        """Weights of its finished runs, which no result needs."""
        runs = [run for run in self.runs if not (run.is_continued and self.missing())]
        folders = [work.run_dir for work in map(self.work, runs) if work.is_finished]
        files = ((folder, path) for folder in folders for path in folder.rglob("*"))
        return sorted(path for folder, path in files if re.fullmatch(_WEIGHTS, str(path.relative_to(folder))))

    def missing(self) -> list[Run]:
        """The runs without all of their results."""
        return [run for run in self.runs if not self.work(run).is_finished]

    def to_finish(self) -> str:
        """What is left to do, as a clause; empty if nothing is."""
        left, num_runs = len(self.missing()), len(self.runs)
        done = f"{num_runs - left} of {num_runs} runs are finished"
        others = f"repeat `assay study run {self.folder}` to run the others"
        return f"{done}; {others}, or `assay study report {self.folder}` to see what is there" if left else ""

    def failure(self, run: Run) -> str | None:
        """Why the run failed the last time, if it did."""
        path = self.work(run).failure_path
        return path.read_text(errors="replace") if path.exists() else None


def _read_outcome(path: Path) -> Outcome:
    with decoding(path, "remove it, and it is measured again"):
        return Outcome.model_validate_json(path.read_bytes())


def _seconds(of: Outcome) -> float:
    return sum(part or 0.0 for part in (of.train_seconds, of.sample_seconds, of.held_out_loss_seconds))


def _level_results(dataset: str, table: str, rows: Sequence[tuple[Run, Evaluation]]) -> LevelResults:
    configurations, bands = [run.ways[0][0] for run, _ in rows], rows[0][1].bands
    sigmas = sorted({level for of in configurations for level in of.levels})
    num_noisy = np.array([[dict(of.noisy).get(level, 0.0) for level in sigmas] for of in configurations])
    records = [found.held_out_loss_record for _, found in rows if found.held_out_loss_record]
    ends = [(band.low, math.inf if band == bands[-1] else band.high) for band in bands]
    errors = np.array([paired_errors(records, *each) for each in ends])

    def column(name: str) -> np.ndarray:
        return np.array([[getattr(band, name) for band in found.bands] for _, found in rows])

    return LevelResults(
        dataset=dataset,
        table=table,
        sigmas=np.array(sigmas),
        block=np.array([of.seed or 0 for of in configurations]),
        num_clean=np.array([of.num_clean for of in configurations]),
        num_noisy=num_noisy.reshape(len(rows), len(sigmas)),
        edges=np.array([bands[0].low, *(band.high for band in bands)]),
        loss=column("loss"),
        error=errors.T,
        step=column("step"),
        last_step=np.array([run.config.train.total_steps for run, _ in rows]),
        loss_last=column("loss_at_end"),
    )


def open_study(
    spec: Path | str, folder: Path | str | None = None, settings: Sequence[str] = (), claim: bool = True
) -> OpenStudy:
    """Check a study against its data, before any work, and open its folder (by default out/NAME).

    `spec` is its file, or the folder of a study that was begun. `settings` change the file as
    `assay train --set` does; the folder remembers them. It must not hold runs of other settings or images,
    unless it is only looked at, without a `claim`. Blocks that were added to a design are found again.

    >>> opened = assay.open_study("study.toml")
    >>> opened.source
    <mine: 160 images of 1 x 8 x 8, 160 clean, 0 noisy>
    >>> [run.title for run in opened.runs]
    ['160 clean (seed 0)', '80 clean (seed 0)', '80 clean + 80 noisy at 0.3 (seed 0)']
    """
    spec, folder = Path(spec), Path(folder) if folder else None
    if spec.is_dir():
        spec, folder = spec / "study.toml", folder or spec
    if not spec.is_file():
        raise AssayError("does not exist", path=spec, cure="give the TOML file of a study, or its folder")
    settings = settings or remembered(spec)
    study = read_study(spec, settings)
    folder = folder or Path("out") / study.name
    if (folder / "study.toml").exists():
        other = read_study(folder / "study.toml").name
        check_same(study.name, other, "holds another study", path=folder, cure="choose another folder")
    with about(spec):
        data = study.data.prepared(folder / "data", hold_out=True)
        source, held_out = data.open(), data.open_held_out()
        if study.design is not None and not can_measure(held_out):
            raise AssayError("a design needs at least 40 held-out images", key="data.held_out", cure="set it")
        runs = study_runs(study, data, source, held_out)
        check_against_data(runs)
    opened = OpenStudy(study, folder, data, source, held_out, runs)
    opened = opened.with_added_blocks(lambda work: work.is_finished)
    if claim:
        _check_runs_of_others(opened, spec, settings)
        if spec.resolve() != (folder / "study.toml").resolve():
            write_text(folder / "study.toml", read_text(spec))
        if settings:
            write_text(folder / SETTINGS, "\n".join(settings) + "\n")
    return opened


def _check_runs_of_others(opened: OpenStudy, spec: Path, settings: Sequence[str]) -> None:
    """Reject a folder with runs that a report of this study would not show."""
    study, folder, lost = opened.study, opened.folder, len(opened.left_out())
    if not lost:
        return
    there, begun_with = folder / "study.toml", remembered(folder / "study.toml")
    if there.exists() and read_text(there) == read_text(spec) and begun_with == list(settings):
        changed = f"{study.data.store}, or code or arguments of your own classes, has changed"
        what = f"holds {lost} runs from before {changed}"
        cure = "undo that, or run the study anew in another folder with -o"
    elif begun_with and not settings:
        what = f"was run with --set {' --set '.join(begun_with)}"
        cure = f"give {folder} instead of the file, or another with -o"
    else:
        begun = read_study(there) if there.exists() else study
        differ = differences(begun.model_dump(mode="json"), study.model_dump(mode="json"))
        what = f"holds {lost} runs of other settings, which a report would not show"
        what += f" ({'; '.join(differ[:3])}{'; ...' * (len(differ) > 3)})" * bool(differ)
        cure = "choose another with -o"
    raise AssayError(what, path=folder, cure=cure)


def disk_use(folder: Path) -> int:
    """Bytes of all files below a folder, in which others may be at work."""
    files = (Path(place, name) for place, _, names in os.walk(folder) for name in names)
    return sum(file.stat().st_size for file in files if file.exists())


def study_status(spec: Path, folder: Path | None = None) -> dict[str, Any]:
    """How far a study and its runs are, as plain values; nothing is written.

    Without its images it does not list all runs: those that have not begun are missing, and `notes` say why.
    """
    study = read_study(spec)
    folder = folder or study_folder(spec)
    notes, found, opened, num_others = list[str](), [], None, 0
    try:
        if not (folder / "data").exists():
            study.data.open()  # fails where a known data set would have to be packed first
        opened = open_study(spec, folder, claim=False)
        runs = {run.key: (run.title, run.config.train) for run in opened.runs}
        outcomes = {run.key: outcome for run, outcome in opened.outcomes() if opened.work(run).is_finished}
        if num_others := len(opened.left_out()):
            others = "runs of other settings or images are not shown, and no study goes on beside them."
            notes.append(f"{num_others} {others}")
    except (AssayError, OSError) as error:
        why = str(error).removesuffix("; call prepared()")  # a cure for Python alone
        notes.append(f"Only runs that have begun are shown, those without a result by their folder: {why}.")
        outcomes = {path.parent.name: _read_outcome(path) for path in folder.glob("runs/*/outcome-*.json")}
        begun = sorted(folder.glob("runs/*/config.json"))
        runs = {path.parent.name: ("", read_config(read_run(path)["config"]).train) for path in begun}
    took = [(each.train_seconds or 0.0, _seconds(each)) for each in outcomes.values()]
    training, whole = np.mean(sorted(took) or [(0, 0)], 0).tolist()  # whatever the order of files
    for key, (title, settings) in runs.items():
        run_dir, outcome = folder / "runs" / key, outcomes.get(key)
        running, failure = is_held(run_dir / "run"), run_dir / "failure.txt"
        trained = 1.0 if outcome else _last_step(settings, run_dir, running) / settings.total_steps
        state = "training" if running else "stopped" if trained else "to do"
        if trained == 1:
            state = "finished" if outcome else "being measured" if running else "to be measured"
        reason = failure.read_text(errors="replace") if failure.exists() and not outcome else None
        row: dict[str, Any] = {"key": key, "title": title or (outcome.configuration.title if outcome else key)}
        row |= {"state": "failed" if reason else state, "trained": trained, "failure": reason}
        row |= {name: getattr(outcome and outcome.evaluation, name, None) for name in METRICS}
        left = 0.0 if outcome else whole - trained * training  # seconds on one core
        found.append(row | {"seconds_left": left if took else None})
    notes += [study.caution] * any(row["held_out_loss"] for row in found)
    general = {"name": study.name, "folder": str(folder), "lists_all_runs": opened is not None}
    general |= {"num_others": num_others, "num_bytes": disk_use(folder)}
    return general | {"runs": found, "notes": notes}


def _last_step(settings: TrainConfig, run_dir: Path, running: bool) -> int:
    """The last step of a training that is saved, or of one that is `running` recorded, over all rounds."""
    last, start = 0, 0
    for number, end in enumerate(round_ends(settings)):
        folder = round_path(run_dir, number) if settings.rounds else run_dir
        path = folder / "metrics.jsonl"
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        whole = [line for line in lines[-2:] if line.endswith("}")]  # one may be cut
        steps = [start + json.loads(line)["step"] for line in whole]
        saved = [path.stem for path in folder.glob("state/*.safetensors")]
        steps = [step for step in steps if running or step == end] + [start + int(step) for step in saved]
        last, start = max([last, *steps]), end
    return last
