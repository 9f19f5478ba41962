"""A study in its folder: its runs, how far each is, its results, and what could go.

<folder>/study.toml      the spec, copied
<folder>/data/           known data sets, packed once
<folder>/shared/         extractor and reference features, computed once
<folder>/runs/<key>/     one folder for each training, see `assay.study.stages`
<folder>/results.csv     one row for each way of sampling each run
<folder>/levels.csv      one row for each run and band of noise levels: what prices are made of
"""

import json
import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from assay.data import ImageSource
from assay.data.config import DataConfig
from assay.errors import AssayError, about
from assay.files import hold_lock, read_text, remove_leftovers, write_whole
from assay.metrics.evaluate import Evaluation
from assay.metrics.held_out import paired_errors
from assay.outcome import Outcome, load_outcome
from assay.pricing.results import LevelResults
from assay.study.runs import Run, check_against_data, study_runs
from assay.study.spec import Study, read_study
from assay.study.stages import (
    can_measure,
    failure_path,
    losses_path,
    outcome_path,
    read_measures,
    run_path,
    samples_path,
)

_SETTINGS = "settings.txt"  # next to study.toml: what was changed on the command line


@dataclass(frozen=True)
class OpenStudy:
    """A study in its folder, with its data."""

    study: Study
    folder: Path
    data: DataConfig  # with paths of stores alone
    source: ImageSource  # the images to train on
    held_out: ImageSource | None  # those set aside, which no run is trained on
    runs: list[Run]

    def with_blocks(self, blocks: int) -> "OpenStudy":
        """The same design with this number of blocks."""
        fingerprint = self.held_out.fingerprint if self.held_out else ""
        return replace(self, runs=study_runs(self.study, self.data, self.source, fingerprint, blocks))

    @property
    def num_blocks(self) -> int:
        """The blocks of a design, or the seeds of a grid."""
        return len({run.config.train.seed for run in self.runs})

    def outcomes(self) -> list[tuple[Run, Outcome]]:
        """The finished rows with their runs, in the order of the spec."""
        found = []
        for run in self.runs:
            for of, sample in run.ways:
                if (path := outcome_path(self.folder, run, sample)).exists():
                    outcome = load_outcome(path)
                    assert isinstance(outcome, Outcome)
                    found.append((run, outcome.model_copy(update={"configuration": of})))
        return found

    def levels(self) -> list[LevelResults]:
        """The losses of all measured runs by bands of levels, for each table of configurations."""
        tables: dict[str, list[tuple[Run, Evaluation]]] = {}
        for run in self.runs:
            if (path := losses_path(self.folder, run)).exists():
                tables.setdefault(run.ways[0][0].table, []).append((run, read_measures(path)))
        return [_level_results(self.study.name, table, rows) for table, rows in tables.items()]

    def seconds(self) -> float:
        """What all outcomes took together, on one core."""
        found = [outcome for _, outcome in self.outcomes()]
        parts = [(each.train_seconds, each.sample_seconds, each.held_out_loss_seconds) for each in found]
        return sum(seconds or 0.0 for each in parts for seconds in each)

    def picture(self, run: Run) -> Path:
        """The grid of samples of a run, sampled in its first way."""
        return samples_path(outcome_path(self.folder, run, run.samples[0])).with_suffix(".png")

    def left_out(self) -> list[Path]:
        """The outcomes in the folder that belong to none of its runs: of other settings."""
        mine = {outcome_path(self.folder, run, sample) for run in self.runs for sample in run.samples}
        return sorted(set(self.folder.glob("runs/*/outcome-*.json")) - mine)

    def is_finished(self, run: Run) -> bool:
        """Whether every outcome of a run is there."""
        return all(outcome_path(self.folder, run, sample).exists() for sample in run.samples)

    def missing(self) -> list[Run]:
        """The runs without all of their results."""
        return [run for run in self.runs if not self.is_finished(run)]

    def failure(self, run: Run) -> str | None:
        """Why the run failed the last time, if it did."""
        path = failure_path(self.folder, run)
        return path.read_text(errors="replace") if path.exists() else None


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


def open_study(spec: Path | str, folder: Path | None = None, settings: Sequence[str] = ()) -> OpenStudy:
    """Check a study against its data, before any work, and open its folder (by default out/NAME).

    `settings` change the file as `assay train --set` does; the folder remembers them. Blocks that were added
    to a design are found again.

    >>> opened = assay.open_study("study.toml")
    >>> opened.source
    <mine: 160 images of 1 x 8 x 8, 160 clean, 0 noisy>
    >>> [run.title for run in opened.runs]
    ['160 clean (seed 0)', '80 clean (seed 0)', '80 clean + 80 noisy at 0.3 (seed 0)']
    """
    spec = Path(spec)
    kept = spec.with_name(_SETTINGS)
    if not settings and kept.exists():
        settings = read_text(kept).splitlines()
    study = read_study(spec, settings)
    folder = folder or Path("out") / study.name
    if (folder / "study.toml").exists():
        other = read_study(folder / "study.toml").name
        if other != study.name:
            what = f"holds the study {other!r}, not {study.name!r}"
            raise AssayError(what, path=folder, cure="choose another folder")
    with about(spec):
        data = study.data.prepared(folder / "data", hold_out=True)
        source, held_out = data.open(), data.open_held_out()
        if study.design is not None and not can_measure(held_out):
            raise AssayError("a design needs at least 40 held-out images", key="data.held_out", cure="set it")
        runs = study_runs(study, data, source, held_out.fingerprint if held_out else "")
        check_against_data(runs)
    opened = _with_added_blocks(OpenStudy(study, folder, data, source, held_out, runs))
    if spec.resolve() != (folder / "study.toml").resolve():
        if lost := len(opened.left_out()):
            raise AssayError(
                f"holds {lost} results of other settings, which a report would not show", path=folder,
                cure="choose another folder with -o, or remove them there (`assay study clean`)",
            )  # fmt: skip
        with write_whole(folder / "study.toml") as partial:
            partial.write_text(read_text(spec))
        if settings:
            with write_whole(folder / _SETTINGS) as partial:
                partial.write_text("\n".join(settings) + "\n")
    return opened


def _with_added_blocks(opened: OpenStudy) -> OpenStudy:
    """The study with the blocks that were added to its design."""
    while opened.study.design is not None:
        more = opened.with_blocks(opened.num_blocks + 1)
        if not any(map(more.is_finished, more.runs[len(opened.runs) :])):
            break
        opened = more
    return opened


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let one process at a time run a study; the lock ends with the process, however that ends."""
    theirs = [name for name in ("results.csv", "report.html") if (folder / name).exists()]
    if theirs and not (folder / "runs").is_dir():
        what, cure = f"holds {theirs[0]}, which no run here made", "choose another folder with -o"
        raise AssayError(what, path=folder, cure=cure)
    with hold_lock(folder / "study", f"{folder} is being run by {{holder}}: wait for it, or stop it"):
        remove_leftovers(folder)
        yield


# --- how far it is, and what could go ------------------------------------------------------------------------


@dataclass(frozen=True)
class RunStatus:
    """How far one run is, as words: finished, failed (and why), training (how much of it), measuring or to do.

    `seconds_left` is None where nothing is known of its speed.
    """

    title: str
    state: str
    loss: float | None = None
    fd: float | None = None
    seconds_left: float | None = None


def study_status(opened: OpenStudy) -> list[RunStatus]:
    """Every run of a study; what is not begun is expected to take as long as the others took."""
    outcomes = {run.key: outcome for run, outcome in opened.outcomes()}
    taken = [each.train_seconds for each in outcomes.values() if each.train_seconds]
    usual, found = sum(taken) / len(taken) if taken else None, []
    for run in opened.runs:
        losses, train = losses_path(opened.folder, run), run.config.train
        loss = read_measures(losses).held_out_loss if losses.exists() else None
        step, per_second = _last_step(opened.folder, run)
        left = usual if not step else (train.total_steps - step) * train.batch_size / max(per_second, 1e-9)
        state = f"training {step / train.total_steps:.0%}" if step else "to do"
        state, fd = "measuring" if step == train.total_steps else state, None
        if opened.is_finished(run):
            state, fd, left = "finished", outcomes[run.key].evaluation.fd, 0.0
        elif reason := opened.failure(run):
            state = f"failed: {reason}"
        found.append(RunStatus(run.title, state, loss, fd, left))
    return found


def _last_step(folder: Path, run: Run) -> tuple[int, float]:
    """The last recorded step of a training and its images per second, 0 before the first."""
    path = run_path(folder, run) / "metrics.jsonl"
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    for line in reversed(lines):
        if line.endswith("}"):  # else it is being written
            record = json.loads(line)
            return int(record["step"]), float(record["images_per_second"])
    return 0, 0.0


def disk_use(path: Path) -> int:
    """Bytes of a file, or of all files below a folder."""
    return sum(each.stat().st_size for each in (path, *path.rglob("*")) if each.is_file())


def unneeded(opened: OpenStudy) -> list[Path]:
    """What results, report and prices do not need: weights and logs of finished runs, runs of other settings.

    Only files that a study itself wrote, in the folders of runs that have an outcome.
    """
    finished = {run_path(opened.folder, run) for run in opened.runs if opened.is_finished(run)}
    of_runs = {run_path(opened.folder, run) for run in opened.runs}
    found = [folder / name for folder in finished for name in ("snapshots", "state", "tensorboard")]
    found += [path if path.parent in of_runs else path.parent for path in opened.left_out()]
    return sorted({path for path in found if path.exists()})


def remove(paths: Sequence[Path]) -> None:
    """Remove what `unneeded` found."""
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
