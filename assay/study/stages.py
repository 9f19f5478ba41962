"""The stages of a run, each a function with a file of its own, so that nothing that is there is repeated.

    train     runs/<key>/snapshots/       weights at the steps that are compared, and the final ones
    measure   runs/<key>/losses-*.json    held-out loss by bands of noise levels, with a stop per band
    sample    runs/<key>/samples-*.json   distances of samples, one file per way of sampling, and a picture
    record    runs/<key>/outcome-*.json   one row of results.csv

`execute` goes through them, and `attempt` does so if no other process is at the same run. An outcome's file is
all that counts: with it nothing is repeated, even if the checkpoint is gone.
"""

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
from assay.files import Busy, decoding, hold_lock, write_whole
from assay.metrics import (
    Extractor,
    Reference,
    evaluate,
    load_extractor,
    reference_from_images,
    reference_from_statistics,
)
from assay.metrics.classifier import has_labels
from assay.metrics.evaluate import Along, Evaluation, load_arrays, save_evaluation, with_band_losses
from assay.metrics.generated import sample_checkpoint
from assay.metrics.held_out import MIN_IMAGES, losses_by_band, stopping_steps
from assay.outcome import Outcome, save_outcome
from assay.sample import SampleConfig
from assay.study.spec import Run, Study, hash_tree
from assay.train import train
from assay.train.folder import final_path, remove_states
from assay.train.ranks import train_on_ranks
from assay.train.restored import restored_path, round_ends, snapshot_at

_NUM_PICTURED = 64


@dataclass(frozen=True)
class Update:
    """What a run is doing ("training", "measuring", "sampling") and how far it is.

    Or how it ended: "done", "stopped", "failed" for a `reason`, or "held" by another process.
    """

    run: str
    phase: str
    done: int = 1
    total: int = 1
    reason: str = ""

    @property
    def is_end(self) -> bool:
        """Whether no more is heard of this attempt."""
        return self.phase in ("done", "stopped", "failed", "held")


class Interrupted(Exception):
    """Measuring or sampling was asked to stop; it starts again next time, since it takes little time."""


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

    def outcome_path(self, sample: SampleConfig) -> Path:
        """The file with the outcome of one way of sampling the run."""
        return self.run_dir / f"outcome-{self.run.result_key(sample)}.json"

    def samples_path(self, sample: SampleConfig) -> Path:
        """The file of the sampling stage; a grid of samples stands beside it."""
        return self.run_dir / f"samples-{self.run.result_key(sample)}.json"

    @property
    def failure_path(self) -> Path:
        """Why the run failed the last time."""
        return self.run_dir / "failure.txt"

    @property
    def is_finished(self) -> bool:
        """Whether every outcome is there."""
        return all(self.outcome_path(sample).exists() for sample in self.run.samples)

    def fail(self, reason: str) -> Update:
        """Record why the run failed, if there is room on the disk."""
        with suppress(OSError), write_whole(self.failure_path) as partial:
            partial.write_text(reason)
        return Update(self.run.key, "failed", 0, 1, reason)

    def counter(self, phase: str, total: int) -> Callable[[int], None]:
        """Adds up images and tells; raises `Interrupted` when the run should stop."""
        done = 0

        def advance(num_images: int) -> None:
            nonlocal done
            done += num_images
            self.tell(Update(self.run.key, phase, done, total))
            if self.should_stop():
                raise Interrupted

        return advance


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
    except Exception as error:
        return work.fail(f"{type(error).__name__}: {error}")


def execute(work: Work) -> bool:
    """Take a run through its stages to the end, or until it should stop; True if finished."""
    missing = [sample for sample in work.run.samples if not work.outcome_path(sample).exists()]
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

    def tell(step: int, num_steps: int) -> None:
        work.tell(Update(work.run.key, "training", step, num_steps))

    with _timed(run_dir / "train.seconds"):
        if work.num_ranks > 1:
            ranks = work.num_ranks, config, run_dir, config.data
            finished = train_on_ranks(*ranks, steps, tell, work.should_stop)
        else:
            finished = train(
                config, run_dir, config.data.open(), snapshot_steps=steps, should_stop=work.should_stop,
                on_progress=lambda progress: tell(progress.step, progress.num_steps),
            ).finished  # fmt: skip
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
    path, held_out = work.losses_path, work.data.open_held_out()
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
    save_evaluation(path, with_band_losses(Evaluation(), found).model_copy(update={"along": along}))
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
    """Sample the final model, and those along training, and measure their distances; draw a grid of samples.

    Points along training are measured on seeds that no result uses, each with a file of its own.
    """
    path, protocol, weights, along = work.samples_path(sample), work.study.evaluate, snapshots(work), []
    if path.exists():
        return read_measures(path)
    compared, device = find_reference(work.study, work.data, work.folder), find_devices()[0]
    frequencies = compared[1].frequencies if compared else None
    advance = work.counter("sampling", max(work.run.num_sampled, 1))
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
                save_evaluation(kept, found.evaluation)
            along.append(Along(step=step, fd=read_measures(kept).fd))
        number = max(first_seed, _NUM_PICTURED)
        samples, settings = sample_checkpoint(weights[last], number, 0, sample, frequencies, device)
        if compared:
            result = evaluate(
                samples, compared[1], compared[0], num_images, protocol.num_ranges, sampler=settings,
                progress=advance, fd_only=protocol.fd_only,
            ).evaluation  # fmt: skip
        pictured = samples.read(torch.arange(_NUM_PICTURED))
    with write_whole(path.with_suffix(".png")) as partial:
        image_grid(pictured, 8).save(partial)
    save_evaluation(path, result.model_copy(update={"along": tuple(along)}))
    return read_measures(path)


# --- record ------------------------------------------------------------------------------------------------


def record_stage(work: Work, sample: SampleConfig, measured: Evaluation, sampled: Evaluation) -> None:
    """Write the outcome of one way of sampling the run: all that was measured, as one record."""
    losses = {point.step: point.held_out_loss for point in measured.along}
    distances = {point.step: point.fd for point in sampled.along}
    steps = sorted(losses.keys() | distances.keys())
    along = (Along(step=step, fd=distances.get(step), held_out_loss=losses.get(step)) for step in steps)
    update = {name: value for name, value in measured if name.startswith("held_out_loss") or name == "bands"}
    outcome = Outcome(
        configuration=next(of for of, way in work.run.ways if way == sample),
        evaluation=sampled.model_copy(update=update | {"along": tuple(along)}),
        train_seconds=read_seconds(work.run_dir / "train.seconds"),
        sample_seconds=read_seconds(work.samples_path(sample).with_suffix(".seconds")),
        held_out_loss_seconds=read_seconds(work.losses_path.with_suffix(".seconds")),
    )
    save_outcome(work.outcome_path(sample), outcome)
