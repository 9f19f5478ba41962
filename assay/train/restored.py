"""Training with rounds: train, restore the noisy images with the model, train on, and again.

In each round a noisy image is trained on as it is at levels above its own noise, and its restored twin below
(`assay.data.Restored`). Every round restores the *original* images, with the model of the round before.

    <run>/round-0/       the first training, a run like any other
    <run>/restored-1/   a store of the images as the first model restores them
    <run>/round-1/       the training on both, from the first model's weights
    <run>/snapshots/    `final.safetensors`, the last round's

Each of these is whole, absent or resumes.
"""

import shutil
from bisect import bisect_left
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from assay.checkpoint import load_checkpoint
from assay.data import ImageSource, Restored, Store, open_store, usable
from assay.data.view import with_uniform_noise
from assay.devices import NumDevices
from assay.files import sha256, write_whole
from assay.generate import lowest_learnt, restore
from assay.train.config import RunConfig, TrainConfig
from assay.train.folder import claim_folder, final_path, remove_states, snapshot_path
from assay.train.loop import train_run
from assay.train.run import Progress, Run, TrainResult, open_run

if TYPE_CHECKING:
    from lightning_fabric import Fabric

_BATCH_SIZE = 256  # images restored at once
OnProgress = Callable[[Progress], None]
ShouldStop = Callable[[], bool]


def train(
    config: RunConfig,
    run_dir: Path,
    source: ImageSource | None = None,
    device: str = "auto",
    devices: NumDevices = 1,
    num_nodes: int = 1,
    snapshot_steps: Collection[int] = (),
    on_progress: OnProgress = lambda progress: None,
    should_stop: ShouldStop = lambda: False,
) -> TrainResult:
    """Train until finished or `should_stop()`; called again with the same arguments it continues.

    Writes the files of `assay.train.folder` into `run_dir`. The same run gives the same bits on a CPU however
    often it is interrupted. Weights are also kept after each of `snapshot_steps`, counted over all rounds.
    """
    source = usable(config.data.prepared().open() if source is None else source, config.data.seed)
    with open_run(config, run_dir, source, device, devices, num_nodes) as fabric:
        final, settings = final_path(run_dir), config.train
        if final.exists():
            if fabric.is_global_zero:
                claim_folder(config, run_dir, source)
            return TrainResult(run_dir, settings.total_steps, True, final)
        if settings.rounds:
            return _train_rounds(config, run_dir, source, fabric, snapshot_steps, on_progress, should_stop)
        run = Run(config, run_dir, source, fabric, snapshot_steps=snapshot_steps)
        return train_run(run, on_progress, should_stop)


def round_path(run_dir: Path, number: int) -> Path:
    """The folder of one round; 0 is the first training."""
    return run_dir / f"round-{number}"


def restored_path(run_dir: Path, number: int) -> Path:
    """Where the images are that a round is trained on."""
    return run_dir / f"restored-{number}"


def round_ends(settings: TrainConfig) -> list[int]:
    """The step at which each round ends, counted over all; the first is the end of the first training."""
    return [settings.num_steps + number * settings.num_round_steps for number in range(settings.rounds + 1)]


def snapshot_at(settings: TrainConfig, run_dir: Path, step: int) -> Path:
    """Where the weights after a step, counted over all rounds, are kept, if that was asked for."""
    if not settings.rounds:
        return snapshot_path(run_dir, step)
    ends = round_ends(settings)
    number = bisect_left(ends, step)
    folder = round_path(run_dir, number)
    if step == ends[number]:
        return final_path(folder)
    return snapshot_path(folder, step - (ends[number - 1] if number else 0))


def _train_rounds(
    config: RunConfig,
    run_dir: Path,
    source: ImageSource,
    fabric: "Fabric",
    snapshot_steps: Collection[int],
    on_progress: OnProgress,
    should_stop: ShouldStop,
) -> TrainResult:
    settings, final, before = config.train, final_path(run_dir), 0
    if fabric.is_global_zero:
        claim_folder(config, run_dir, source)

    def tell(now: Progress) -> None:
        on_progress(replace(now, step=before + now.step, num_steps=settings.total_steps))

    source = with_uniform_noise(source, config.data.seed)
    start: Path | None = None
    for number, end in enumerate(round_ends(settings)):
        folder, images = round_path(run_dir, number), source
        if not final_path(folder).exists():
            if start is not None:
                twins = _restored(source, restored_path(run_dir, number), start, fabric, should_stop)
                if twins is None:
                    return TrainResult(run_dir, before, False, final)
                images = Restored(source, twins)
            steps = {step - before for step in snapshot_steps}
            # As a run of its own, a round is the same whatever the number of rounds to follow.
            changes: dict[str, object] = {"rounds": number}
            if number:
                changes |= {"num_steps": settings.num_round_steps, "init_from": None, "continue_from": None}
            own = config.model_copy(update={"train": settings.model_copy(update=changes)})
            run = Run(own, folder, images, fabric, start, before, steps)
            trained = train_run(run, tell, should_stop)
            if not trained.finished:
                return TrainResult(run_dir, before + trained.step, False, final)
        if fabric.is_global_zero:
            remove_states(folder / "state")  # a finished round needs no optimizer
        start, before = final_path(folder), end
    assert start is not None
    if fabric.is_global_zero:
        with write_whole(final) as partial:
            shutil.copyfile(start, partial)
    fabric.barrier()
    return TrainResult(run_dir, before, True, final)


def _restored(
    source: ImageSource, path: Path, checkpoint: Path, fabric: "Fabric", should_stop: ShouldStop
) -> Store | None:
    """The images as the model of the round before restores them; None if asked to stop meanwhile.

    What was stopped starts over next time, for it is short beside training.
    """
    done = True

    def check(done: int, total: int) -> None:
        if should_stop():
            raise InterruptedError

    if fabric.is_global_zero and not (path / "meta.json").exists():
        loaded = load_checkpoint(checkpoint)
        denoiser, stop_at = loaded.denoiser.to(fabric.device).eval(), lowest_learnt(loaded.info)
        how = sha256(checkpoint), stop_at, _BATCH_SIZE, fabric.device, check
        try:
            restore(denoiser, source, path, *how)
        except InterruptedError:
            done = False
    return open_store(path) if fabric.broadcast(done) else None
