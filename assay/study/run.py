"""Running a study: each job trains, samples, evaluates, and writes its outcomes whole.

    <folder>/study.toml      the spec, copied
    <folder>/data/           known data sets, packed once
    <folder>/shared/         extractor and reference features, computed once
    <folder>/runs/<job>/     training runs; for each way of sampling `samples-*.png` and `outcome-*.json`
    <folder>/results.csv     all outcomes

An outcome's file is all that counts: with it nothing is repeated, even if the checkpoint is gone.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from assay.data import ImageSource
from assay.data.picture import image_grid
from assay.data.view import check_complete
from assay.devices import find_devices
from assay.files import hold_lock, naming, read_json, read_text, remove_leftovers, write_whole
from assay.metrics import (
    Extractor,
    Reference,
    evaluate,
    load_extractor,
    reference_from_images,
    reference_from_statistics,
)
from assay.metrics.classifier import has_labels
from assay.metrics.distance import frechet_distance
from assay.metrics.evaluate import Along, Evaluation, with_stopping
from assay.metrics.extract import images_to_features
from assay.metrics.generated import sample_checkpoint
from assay.metrics.score import MIN_IMAGES, Stopping, find_stopping, stopping_steps
from assay.metrics.statistics import features_to_statistics
from assay.outcome import Outcome, load_outcome, save_outcome, trained_setting, with_paired_errors
from assay.sample import SampleConfig
from assay.study.arms import Arm, Job, check_against_data, study_arms, study_jobs
from assay.study.spec import EvaluateConfig, Study, naming_line, read_study
from assay.train import train
from assay.train.config import DataConfig
from assay.train.ranks import train_on_ranks
from assay.train.restored import loop_ends, snapshot_at
from assay.train.run import check_ranks, final_path

_NUM_PICTURED = 64
_SETTINGS = "settings.txt"  # next to study.toml: what was changed on the command line


@dataclass(frozen=True)
class Update:
    """What a job is doing ("training", "scoring", "sampling") and how far it is, or how it ended.

    Ends are "done", "stopped" and "failed", which has a reason.
    """

    job: str
    phase: str
    done: int
    total: int
    reason: str = ""


@dataclass(frozen=True)
class OpenStudy:
    """A study in its folder, with its data."""

    study: Study
    folder: Path
    data: DataConfig  # with paths of stores alone
    source: ImageSource  # the images to train on
    held_out: ImageSource | None  # those set aside, which no arm is trained on
    arms: list[Arm]
    jobs: list[Job]

    def outcomes(self) -> list[tuple[Arm, Outcome]]:
        """The finished arms with their outcomes, in the order of the spec."""
        found = []
        for arm in self.arms:
            if (path := self._path(arm)).exists():
                outcome = load_outcome(path)
                assert isinstance(outcome, Outcome)
                setting = arm.setting if arm.setting.counted else arm.setting.with_counts(outcome.setting)
                found.append((arm, outcome.model_copy(update={"setting": setting})))
        compared = with_paired_errors([outcome for _, outcome in found])
        return [(arm, outcome) for (arm, _), outcome in zip(found, compared, strict=True)]

    def picture(self, arm: Arm) -> Path:
        """The grid of samples of an arm."""
        return picture_path(self._path(arm))

    def _path(self, arm: Arm) -> Path:
        fingerprint = self.held_out.fingerprint if self.held_out else ""
        job = Job(arm.config, self.source.fingerprint, (), self.study.evaluate, "", fingerprint)
        return outcome_path(self.folder, job, arm.sample)

    def is_finished(self, job: Job) -> bool:
        """Whether every outcome of a job is there."""
        return all(outcome_path(self.folder, job, sample).exists() for sample in job.samples)

    def failure(self, job: Job) -> str | None:
        """Why the job failed the last time, if it did."""
        path = failure_path(self.folder, job)
        return path.read_text(errors="replace") if path.exists() else None


def open_study(spec: Path | str, folder: Path | None = None, settings: Sequence[str] = ()) -> OpenStudy:
    """Check a study against its data, before any work, and open its folder (by default out/NAME).

    `settings` change the file as `assay train --set` does; the folder remembers them.

    >>> opened = assay.open_study("study.toml")
    >>> opened.source
    <mine: 160 images of 1 x 8 x 8, 160 clean, 0 noisy>
    >>> [job.title for job in opened.jobs]
    ['100% clean (seed 0)', '50% clean (seed 0)', '50% clean + 50% noisy at 0.3 (seed 0)']
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
            raise ValueError(f"{folder} holds the study {other!r}, not {study.name!r}: choose another folder")
    with naming_line(spec):
        data = study.data.resolved(folder / "data", hold_out=True)
        source, held_out = data.open(), data.open_held_out()
        arms = study_arms(study, data, source)
        check_against_data(arms, source)
        if held_out is not None:
            check_complete(held_out, "cannot be scored: set data.held_out to a store of complete images")
        if study.evaluate.result == "best_score" and not can_score(held_out):
            raise ValueError("evaluate.result = best_score needs more held-out images: set data.held_out")
    if spec.resolve() != (folder / "study.toml").resolve():
        with write_whole(folder / "study.toml") as partial:
            partial.write_text(spec.read_text())
        if settings:
            with write_whole(folder / _SETTINGS) as partial:
                partial.write_text("\n".join(settings) + "\n")
    jobs = study_jobs(study, arms, source.fingerprint, held_out.fingerprint if held_out else "")
    return OpenStudy(study, folder, data, source, held_out, arms, jobs)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let one process at a time run a study; the lock ends with the process, however that ends."""
    with hold_lock(folder / ".lock", f"{folder} is being run by {{holder}}: wait for it, or stop it"):
        remove_leftovers(folder)
        yield


def prepare_shared(opened: OpenStudy) -> None:
    """What all jobs use, computed once before they start: the extractor and the reference's features."""
    _reference(opened.study, opened.data, opened.folder)


def _reference(study: Study, data: DataConfig, folder: Path) -> tuple[Extractor, Reference] | None:
    """What samples are compared with; None for images without labels, where the score alone is measured."""
    source, held_out, chosen = data.open(), data.open_held_out(), study.evaluate
    if "extractor" not in chosen.model_fields_set and can_score(held_out) and not has_labels(source):
        return None
    devices = find_devices()
    extractor = load_extractor(chosen.extractor, folder / "shared", reference=source, device=devices[0])
    if isinstance(chosen.reference, Path):
        return extractor, reference_from_statistics(chosen.reference, extractor)
    if chosen.reference == "held_out":
        if held_out is None:
            raise ValueError("evaluate.reference is held_out, but no image is: set data.held_out")
        source = held_out
    return extractor, reference_from_images(source, extractor, folder / "shared", devices=devices)


def can_score(held_out: ImageSource | None) -> bool:
    """Whether each half of the held-out images is enough for a score."""
    return held_out is not None and len(held_out) >= 2 * MIN_IMAGES


def check_ranks_of_jobs(jobs: Sequence[Job], num_ranks: int) -> None:
    """Reject, before any work, batches that do not split evenly over the devices of a run."""
    for job in jobs:
        check_ranks(job.config, num_ranks)


def execute(
    study: Study,
    folder: Path,
    data: DataConfig,
    job: Job,
    on_update: Callable[[Update], None] = lambda update: None,
    should_stop: Callable[[], bool] = lambda: False,
    num_ranks: int = 1,
) -> bool:
    """Run one job to the end, or until `should_stop()`; True if finished. Repeats nothing that is there.

    It is trained on `num_ranks` devices, each with a process of its own, and measured on all that are visible.
    """
    run_dir = run_path(folder, job)
    paths = {sample: outcome_path(folder, job, sample) for sample in job.samples}
    if all(path.exists() for path in paths.values()):
        return True
    images, held_out = job.config.data.with_stores(data.all_paths), data.open_held_out()
    protocol, training, last = study.evaluate, job.config.train, job.config.train.total_steps
    stops = stopping_steps(last) if can_score(held_out) else []
    passed = along_steps(last, protocol.along)
    steps = sorted({*stops, *passed})
    clock = _Clock(run_dir / "seconds.json")

    def tell(step: int, num_steps: int) -> None:
        on_update(Update(job.key, "training", step, num_steps))

    if num_ranks > 1:
        finished = train_on_ranks(num_ranks, job.config, run_dir, images, steps, tell, should_stop)
    else:
        finished = train(
            job.config,
            run_dir,
            images.open(),
            snapshot_steps=steps,
            on_progress=lambda progress: tell(progress.step, progress.num_steps),
            should_stop=should_stop,
        ).finished
    train_seconds, final = clock.stop(), final_path(run_dir)
    if not finished:
        return False
    for unneeded in (run_dir / "state", *run_dir.glob("restored-*")):  # by a finished model
        shutil.rmtree(unneeded, ignore_errors=True)

    def counter(phase: str, total: int) -> Callable[[int], None]:
        done = 0

        def advance(num_images: int) -> None:
            nonlocal done
            done += num_images
            on_update(Update(job.key, phase, done, total))
            if should_stop():
                raise Interrupted

        return advance

    num_total = protocol.num_images * protocol.num_ranges
    compared = sorted({*steps, *loop_ends(training)}) if steps else []
    snapshots = {step: path for step in compared if (path := snapshot_at(training, run_dir, step)).exists()}
    snapshots[last] = final
    scored, score_seconds, devices = None, None, find_devices()
    kept_steps = {last, *loop_ends(training)}
    try:
        if held_out is not None and stops:
            started = time.perf_counter()
            advance = counter("scoring", (len(snapshots) + 2) * len(held_out) // 2)
            batch_size = 4 * protocol.batch_size  # evaluations, of which sampling has two per step
            scored = find_stopping(
                snapshots, held_out, progress=advance, devices=devices, batch_size=batch_size
            )
            score_seconds = time.perf_counter() - started
            kept_steps.add(scored.step)
        compared_with = _reference(study, data, folder)
        for sample, path in paths.items():
            if path.exists():
                continue
            started = time.perf_counter()
            frequencies = compared_with[1].frequencies if compared_with else None
            advance = counter("sampling", job.num_sampled)
            fd_along: dict[int, float] = {}
            if compared_with:
                kept = path.with_name(path.name.replace("outcome-", "along-"))
                there = {step: snapshots[step] for step in passed if step in snapshots}
                fd_along = _fd_along(kept, there, sample, protocol, *compared_with, devices, advance)
            step = last
            if protocol.result == "best_score" and scored:
                step = scored.step
            elif protocol.result == "best_fd" and fd_along:
                step = min(fd_along, key=lambda step: fd_along[step])
            kept_steps.add(step)
            samples, settings = sample_checkpoint(
                snapshots[step], num_total, 0, sample, frequencies, devices[0]
            )
            found = Evaluation()
            if compared_with:
                found = evaluate(
                    samples,
                    compared_with[1],
                    compared_with[0],
                    protocol.num_images,
                    protocol.num_ranges,
                    sampler=settings,
                    batch_size=protocol.batch_size,
                    progress=advance,
                    devices=devices,
                    fd_only=protocol.fd_only,
                ).evaluation
            along = _along(fd_along, scored) if protocol.along else ()
            found = found.model_copy(update={"fd_step": None if step == last else step, "along": along})
            with write_whole(picture_path(path)) as partial:
                image_grid(samples.read(torch.arange(min(_NUM_PICTURED, num_total))), 8).save(partial)
            outcome = Outcome(
                setting=trained_setting(settings.info, study.name, settings.sample),
                evaluation=with_stopping(found, scored, _split(study, data)) if scored else found,
                train_seconds=train_seconds,
                sample_seconds=time.perf_counter() - started,
                score_seconds=score_seconds,
            )
            save_outcome(path, outcome)
    except Interrupted:
        return False
    every = training.snapshot_every
    for step, path in snapshots.items():  # nor the weights that were only compared
        if step not in kept_steps and not (every and step % every == 0):
            path.unlink()
    return True


def along_steps(num_steps: int, num_parts: int) -> list[int]:
    """The steps after each of `num_parts` equal parts of a training; the last is its end."""
    return sorted({max(1, round(num_steps * part / num_parts)) for part in range(1, num_parts + 1)})


def _fd_along(
    kept: Path,
    snapshots: dict[int, Path],
    sample: SampleConfig,
    protocol: EvaluateConfig,
    extractor: Extractor,
    reference: Reference,
    devices: Sequence[torch.device],
    progress: Callable[[int], None],
) -> dict[int, float]:
    """The distance after each step, on seeds that no result uses, so that the best is chosen without bias.

    What was measured before an interruption is in the file `kept`.
    """
    found = read_along(kept)
    num_images, index = protocol.num_images, torch.arange(protocol.num_images)
    for step, path in snapshots.items():
        if step in found:
            continue
        first_seed = num_images * protocol.num_ranges
        samples, _ = sample_checkpoint(path, num_images, first_seed, sample, reference.frequencies, devices[0])
        features = images_to_features(
            extractor, samples, index, protocol.batch_size, progress, devices
        ).features
        found[step] = frechet_distance(features_to_statistics(features), reference.statistics)
        with write_whole(kept) as partial:
            partial.write_text(json.dumps(found))
    return found


def read_along(path: Path) -> dict[int, float]:
    """The distances by step that were measured before an interruption, if there was one."""
    if not path.exists():
        return {}
    with naming(path, "remove it, and it is measured again"):
        return {int(step): float(fd) for step, fd in read_json(path).items()}


def _along(fd: dict[int, float], scored: Stopping | None) -> tuple[Along, ...]:
    """What is known of the model by step."""
    scores = dict(zip(scored.steps, scored.chosen_by, strict=True)) if scored else {}
    return tuple(
        Along(step=step, fd=fd.get(step), score=scores.get(step)) for step in sorted(fd.keys() | scores.keys())
    )


def _split(study: Study, data: DataConfig) -> float | None:
    """The level at which scores are split: the highest noise, below which only cleaner images can teach."""
    return max(study.grid.sigmas, default=float(data.open().sigma_tn.max())) or None


class Interrupted(Exception):
    """Scoring or sampling was asked to stop; it starts again next time, since it takes little time."""


class _Clock:
    """Seconds spent on a job over all its interrupted attempts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with naming(path, "remove it; the seconds before are then not counted"):
            self.before = float(path.read_text()) if path.exists() else 0.0
        self.started = time.perf_counter()

    def stop(self) -> float:
        seconds = self.before + time.perf_counter() - self.started
        with write_whole(self.path) as partial:
            partial.write_text(f"{seconds:.3f}")
        return seconds


def run_path(folder: Path, job: Job) -> Path:
    """The folder of a job."""
    return folder / "runs" / job.key


def outcome_path(folder: Path, job: Job, sample: SampleConfig) -> Path:
    """The file with the outcome of one way of sampling a job."""
    return run_path(folder, job) / f"outcome-{job.result_key(sample)}.json"


def picture_path(outcome: Path) -> Path:
    """The grid of samples next to an outcome."""
    return outcome.with_name(outcome.name.replace("outcome-", "samples-")).with_suffix(".png")


def failure_path(folder: Path, job: Job) -> Path:
    """Why a job failed the last time it ran."""
    return run_path(folder, job) / "failure.txt"
