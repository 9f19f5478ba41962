"""The stages of a run, each a function with a file of its own, so that nothing that is there is repeated.

    train     runs/<key>/snapshots/       weights at the steps that are compared, and the final ones
    measure   runs/<key>/losses-*.json    held-out loss by bands of noise levels, with a stop per band
    sample    runs/<key>/samples-*.json   distances of samples, one file per way of sampling, and a picture
    record    runs/<key>/outcome-*.json   one row of results.csv

`execute` goes through them, and `attempt` tells how that ended. An outcome's file is all that counts: with it
nothing is repeated, even if the checkpoint is gone.
"""

import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from assay.data import ImageSource
from assay.data.config import DataConfig
from assay.data.picture import image_grid
from assay.devices import find_devices
from assay.errors import AssayError
from assay.files import decoding, hold_lock, write_whole
from assay.metrics.classifier import has_labels
from assay.metrics.evaluate import Along, Evaluation, evaluate, load_arrays, save_evaluation, with_held_out_loss
from assay.metrics.extract import (
    Extractor,
    Reference,
    load_extractor,
    reference_from_images,
    reference_from_statistics,
)
from assay.metrics.generated import sample_checkpoint
from assay.metrics.held_out import MIN_IMAGES, losses_by_band, stopping_steps
from assay.outcome import Outcome, save_outcome
from assay.sample import SampleConfig
from assay.study.runs import Run, hash_tree
from assay.study.spec import Study
from assay.train import train
from assay.train.folder import final_path, remove_states
from assay.train.ranks import train_on_ranks
from assay.train.restored import restored_path, round_ends, snapshot_at

_NUM_PICTURED = 64
_SECONDS_BETWEEN_UPDATES = 0.2
_SECONDS_FOR_ORPHANS = 15.0  # for a worker of an earlier study, which was killed, to leave its run


@dataclass(frozen=True)
class Update:
    """What a run is doing ("training", "measuring", "sampling") and how far it is, or how it ended.

    Ends are "done", "stopped" and, with a reason, "failed" and "lost": its worker died.
    """

    run: str
    phase: str
    done: int = 1
    total: int = 1
    reason: str = ""

    @property
    def is_end(self) -> bool:
        """Whether no more is heard of this attempt."""
        return self.phase in ("done", "stopped", "failed", "lost")


def now_and_then(tell: Callable[[Update], None]) -> Callable[[Update], None]:
    """The same, but for updates that follow another one closely and do not complete anything."""
    last_told = 0.0

    def tell_some(update: Update) -> None:
        nonlocal last_told
        if time.monotonic() - last_told > _SECONDS_BETWEEN_UPDATES or update.done == update.total:
            last_told = time.monotonic()
            tell(update)

    return tell_some


@dataclass(frozen=True)
class Work:
    """One run of a study, in its folder. It is trained on `num_ranks` devices, each with its own process.

    `data` has paths of stores on this machine; `tell` hears how far it is, and `should_stop` ends it early.
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
        return run_path(self.folder, self.run)

    def counter(self, phase: str, total: int) -> Callable[[int], None]:
        """A function that adds up images and tells; it raises `Interrupted` when the run should stop."""
        done = 0

        def advance(num_images: int) -> None:
            nonlocal done
            done += num_images
            self.tell(Update(self.run.key, phase, done, total))
            if self.should_stop():
                raise Interrupted

        return advance


class Interrupted(Exception):
    """Measuring or sampling was asked to stop; it starts again next time, since it takes little time."""


def attempt(work: Work) -> Update:
    """Execute a run and tell how it ended; the reason of a failure is recorded in its folder."""
    run, run_dir = work.run, work.run_dir
    try:
        busy = f"{run_dir} is held by {{holder}}, which an earlier study left: end it"
        with hold_lock(run_dir / "run", busy, _SECONDS_FOR_ORPHANS):
            failure_path(work.folder, run).unlink(missing_ok=True)
            return Update(run.key, "done" if execute(work) else "stopped")
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        record_failure(work.folder, run, reason)
        return Update(run.key, "failed", 0, 1, reason)


def record_failure(folder: Path, run: Run, reason: str) -> None:
    """Record why a run failed; if the disk is full, the other runs continue without the record."""
    with suppress(OSError), write_whole(failure_path(folder, run)) as partial:
        partial.write_text(reason)


def execute(work: Work) -> bool:
    """Take a run through its stages to the end, or until it should stop; True if finished."""
    missing = [s for s in work.run.samples if not outcome_path(work.folder, work.run, s).exists()]
    if not missing:
        return True
    if not train_stage(work):
        return False
    try:
        measured = measure_stage(work)
        for sample in missing:
            record_stage(work, sample, measured, sample_stage(work, sample))
    except Interrupted:
        return False
    settings = work.run.config.train
    kept, every = {settings.total_steps, *round_ends(settings)}, settings.snapshot_every
    for step, path in snapshots(work).items():  # not those that the run's own settings ask for
        if step not in kept and not (every and step % every == 0):
            path.unlink()
    return True


# --- train -------------------------------------------------------------------------------------------------


def compared_steps(work: Work) -> list[int]:
    """The steps whose weights are compared: for a stop per band, and along training if that is asked for.

    This is the one place that decides which snapshots a run keeps until it is measured.
    """
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
    settings, last = work.run.config.train, work.run.config.train.total_steps
    found = {step: snapshot_at(settings, work.run_dir, step) for step in compared_steps(work)}
    return {step: path for step, path in found.items() if step != last and path.exists()} | {
        last: final_path(work.run_dir)
    }


def train_stage(work: Work) -> bool:
    """Train the run, or resume it; True if it is finished."""
    config, run_dir = work.run.config, work.run_dir
    if final_path(run_dir).exists() and (run_dir / "train.seconds").exists():
        return True
    if work.run.continues is not None:
        first = replace(work, run=work.run.continues)
        with hold_lock(first.run_dir / "training", "", math.inf):
            pass  # another worker may be at it
        if not train_stage(first):
            return False
        goes_on = {"continue_from": first.run_dir}
        config = config.model_copy(update={"train": config.train.model_copy(update=goes_on)})
    images, steps = config.data.with_stores(work.data.all_paths), compared_steps(work)

    def tell(step: int, num_steps: int) -> None:
        work.tell(Update(work.run.key, "training", step, num_steps))

    with _timed(run_dir / "train.seconds"):
        if work.num_ranks > 1:
            finished = train_on_ranks(work.num_ranks, config, run_dir, images, steps, tell, work.should_stop)
        else:
            finished = train(
                config,
                run_dir,
                images.open(),
                snapshot_steps=steps,
                on_progress=lambda progress: tell(progress.step, progress.num_steps),
                should_stop=work.should_stop,
            ).finished
    if finished:
        if not work.run.is_continued:
            remove_states(run_dir / "state")
        for number in range(config.train.rounds + 1):  # by a finished model
            shutil.rmtree(restored_path(run_dir, number), ignore_errors=True)
    return finished


@contextmanager
def _timed(path: Path) -> Iterator[None]:
    """Add the seconds of a block to those in a file, over all interrupted attempts."""
    before, started = read_seconds(path), time.perf_counter()
    try:
        yield
    finally:
        with write_whole(path) as partial:
            partial.write_text(f"{before + time.perf_counter() - started:.3f}")


def read_seconds(path: Path) -> float:
    """The seconds in a file, 0 without it."""
    with decoding(path, "remove it; the seconds before are then not counted"):
        return float(path.read_text()) if path.exists() else 0.0


# --- measure -----------------------------------------------------------------------------------------------


def can_measure(held_out: ImageSource | None) -> bool:
    """Whether each half of the held-out images is enough for a loss."""
    return held_out is not None and len(held_out) >= 2 * MIN_IMAGES


def measure_stage(work: Work) -> Evaluation:
    """The held-out loss by bands of levels; nothing without enough held-out images."""
    path, held_out = losses_path(work.folder, work.run), work.data.open_held_out()
    if path.exists():
        return read_measures(path)
    if held_out is None or not can_measure(held_out):
        return Evaluation()
    with _timed(path.with_suffix(".seconds")):
        weights = snapshots(work)
        advance = work.counter("measuring", len(weights) * len(held_out))
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


# --- sample ------------------------------------------------------------------------------------------------


def find_reference(study: Study, data: DataConfig, folder: Path) -> tuple[Extractor, Reference] | None:
    """What samples are compared with; None if the study measures none, or there are no labels for that."""
    chosen, source = study.evaluate, data.open()
    labelled = "extractor" in chosen.model_fields_set or has_labels(source)
    if chosen.num_images == 0 or not (labelled or isinstance(chosen.reference, Path)):
        return None
    devices, shared = find_devices(), folder / "shared"
    extractor = load_extractor(chosen.extractor, shared, None, source, devices, chosen.batch_size)
    if isinstance(chosen.reference, Path):
        return extractor, reference_from_statistics(chosen.reference, extractor)
    if chosen.reference == "held_out":
        held_out = data.open_held_out()
        if held_out is None:
            raise AssayError("no image is held out", key="evaluate.reference", cure="set data.held_out")
        source = held_out
    return extractor, reference_from_images(source, extractor, shared)


def sample_stage(work: Work, sample: SampleConfig) -> Evaluation:
    """Sample the final model, and those along training, and measure their distances; draw a grid of samples."""
    path = samples_path(outcome_path(work.folder, work.run, sample))
    if not path.exists():
        with _timed(path.with_suffix(".seconds")):
            found, pictured = _measure_samples(work, sample, path)
        with write_whole(path.with_suffix(".png")) as partial:
            image_grid(pictured, 8).save(partial)
        save_evaluation(path, found)
    return read_measures(path)


def _measure_samples(work: Work, sample: SampleConfig, path: Path) -> tuple[Evaluation, torch.Tensor]:
    """What the samples of a run are like, and some of them to look at.

    Points along training are measured on seeds that no result uses, each with a file of its own.
    """
    compared, protocol = find_reference(work.study, work.data, work.folder), work.study.evaluate
    frequencies = compared[1].frequencies if compared else None
    advance = work.counter("sampling", max(work.run.num_sampled, 1))
    num_images, weights, along = protocol.num_images, snapshots(work), []
    first_seed = num_images * protocol.num_ranges  # of the points along training
    for step in (each for each in along_steps(work) if compared and each in weights):
        kept = path.with_name(f"{path.stem}-{step}.json")
        if compared and not kept.exists():
            samples, _ = sample_checkpoint(
                weights[step], num_images, first_seed, sample, frequencies, find_devices()[0]
            )
            found = evaluate(samples, compared[1], compared[0], num_images, progress=advance, fd_only=True)
            save_evaluation(kept, found)
        along.append(Along(step=step, fd=read_measures(kept).fd))
    samples, settings = sample_checkpoint(
        weights[work.run.config.train.total_steps], max(first_seed, _NUM_PICTURED), 0, sample, frequencies,
        find_devices()[0],
    )  # fmt: skip
    result = Evaluation()
    if compared:
        result = evaluate(
            samples, compared[1], compared[0], num_images, protocol.num_ranges, sampler=settings,
            progress=advance, fd_only=protocol.fd_only,
        )  # fmt: skip
    return result.model_copy(update={"along": tuple(along)}), samples.read(torch.arange(_NUM_PICTURED))


# --- record ------------------------------------------------------------------------------------------------


def record_stage(work: Work, sample: SampleConfig, measured: Evaluation, sampled: Evaluation) -> None:
    """Write the outcome of one way of sampling the run: all that was measured, as one record."""
    update: dict[str, object] = {
        name: value for name, value in measured if name.startswith("held_out_loss") or name == "bands"
    }
    losses = {point.step: point.held_out_loss for point in measured.along}
    distances = {point.step: point.fd for point in sampled.along}
    update["along"] = tuple(
        Along(step=step, fd=distances.get(step), held_out_loss=losses.get(step))
        for step in sorted(losses.keys() | distances.keys())
    )
    path = outcome_path(work.folder, work.run, sample)
    outcome = Outcome(
        configuration=next(of for of, way in work.run.ways if way == sample),
        evaluation=sampled.model_copy(update=update),
        train_seconds=read_seconds(work.run_dir / "train.seconds"),
        sample_seconds=read_seconds(samples_path(path).with_suffix(".seconds")),
        held_out_loss_seconds=read_seconds(losses_path(work.folder, work.run).with_suffix(".seconds")),
    )
    save_outcome(path, outcome)


# --- paths -------------------------------------------------------------------------------------------------


def run_path(folder: Path, run: Run) -> Path:
    """The folder of a run."""
    return folder / "runs" / run.key


def losses_path(folder: Path, run: Run) -> Path:
    """The file of the measuring stage."""
    return run_path(folder, run) / f"losses-{hash_tree([run.key, run.held_out_fingerprint])}.json"


def outcome_path(folder: Path, run: Run, sample: SampleConfig) -> Path:
    """The file with the outcome of one way of sampling a run."""
    return run_path(folder, run) / f"outcome-{run.result_key(sample)}.json"


def samples_path(outcome: Path) -> Path:
    """The file of the sampling stage that belongs to an outcome; a grid of samples stands beside it."""
    return outcome.with_name(outcome.name.replace("outcome-", "samples-"))


def failure_path(folder: Path, run: Run) -> Path:
    """Why a run failed the last time."""
    return run_path(folder, run) / "failure.txt"
