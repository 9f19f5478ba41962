"""What is in the folder of a study: how far each run is, how much room it takes, and what could go."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from assay.study.run import OpenStudy
from assay.study.runs import Run
from assay.study.stages import losses_path, outcome_path, read_losses, run_path


@dataclass(frozen=True)
class RunStatus:
    """How far one run is: finished, failed (with the reason), training, measuring or to do.

    `share` of its training is done; `seconds_left` is None where nothing is known of its speed.
    """

    title: str
    state: str
    share: float
    loss: float | None = None
    fd: float | None = None
    seconds_left: float | None = None
    reason: str = ""


def study_status(opened: OpenStudy) -> list[RunStatus]:
    """Every run of a study; what is not begun is expected to take as long as the others took."""
    outcomes = {run.key: outcome for run, outcome in opened.outcomes()}
    taken = [each.train_seconds for each in outcomes.values() if each.train_seconds]
    usual, found = sum(taken) / len(taken) if taken else None, []
    for run in opened.runs:
        losses = losses_path(opened.folder, run)
        loss = read_losses(losses).held_out_loss if losses.exists() else None
        if opened.is_finished(run):
            fd = outcomes[run.key].evaluation.fd
            found.append(RunStatus(run.title, "finished", 1.0, loss, fd, 0.0))
            continue
        reason, (step, per_second) = opened.failure(run) or "", _last_step(opened.folder, run)
        train = run.config.train
        left = usual if not step else (train.total_steps - step) * train.batch_size / max(per_second, 1e-9)
        state = "failed" if reason else "to do" if not step else "training"
        state = "measuring" if step == train.total_steps and not reason else state
        found.append(RunStatus(run.title, state, step / train.total_steps, loss, None, left, reason))
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


def disk_use(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def unneeded(opened: OpenStudy) -> list[Path]:
    """What results, report and prices do not need: weights and logs of finished runs, runs of other settings.

    Only files that a study itself wrote, in the folders of runs that have an outcome.
    """
    finished = {run_path(opened.folder, run) for run in opened.runs if opened.is_finished(run)}
    of_runs = {run_path(opened.folder, run) for run in opened.runs}
    found = [folder / name for folder in finished for name in ("snapshots", "state", "tensorboard")]
    found += [path.parent for path in opened.left_out() if path.parent not in of_runs]
    mine = {outcome_path(opened.folder, run, sample) for run in opened.runs for sample in run.samples}
    found += [path for path in opened.left_out() if path.parent in of_runs and path not in mine]
    return sorted({path for path in found if path.exists()})


def remove(paths: Sequence[Path]) -> None:
    """Remove what `unneeded` found."""
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
