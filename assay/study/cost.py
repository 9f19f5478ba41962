"""The cost of a study before it is started: here, by timing a few steps, or elsewhere, by counting operations.

Both count in evaluations of the network (see `assay.cost`). Operations are counted on the meta device
(`assay.nets.measure_cost`): no image is read, so that a study for a large machine can be planned on a small
one, without its data; hours then follow from a stated rate.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from assay.cost import seconds_per_evaluation, training_evaluations
from assay.data import ImageSource, View
from assay.data.arrays import from_arrays
from assay.data.known import KNOWN
from assay.data.store import is_store
from assay.errors import AssayError
from assay.metrics.held_out import num_evaluations
from assay.metrics.weights import FeatureNetwork, local_weights
from assay.nets import PRESETS, NetConfig, measure_cost
from assay.registry import find
from assay.study.folder import OpenStudy
from assay.study.runs import Run, study_runs
from assay.study.spec import Study

_STATE_BYTES = 16  # per weight: the weights, their average and two moments, in float32
_NUM_STATES = 2  # kept during a run
_NUM_ASSUMED = 50_000  # images, where they are not here


@dataclass(frozen=True)
class RunCost:
    """One training with the ways its model is sampled. `num_bytes` are on disk while it runs.

    `flops` counts its training and samples; `seconds` is measured on one core here, None if it was not.
    """

    title: str
    num_trained: int
    num_sampled: int
    flops: float
    num_bytes: int
    seconds: float | None = None


def cost_here(opened: OpenStudy) -> list[RunCost]:
    """What the unfinished runs of a study take on one core here: training, sampling, measuring."""
    measured: dict[tuple[NetConfig, str], float] = {}
    num_measured = num_evaluations(len(opened.held_out)) if opened.held_out else 0
    found = []
    for run in opened.missing():
        key = run.config.net_config(opened.source), run.config.train.optimizer
        if key not in measured:
            measured[key] = seconds_per_evaluation(run.config, opened.source, num_threads=1)
        found.append(_run_cost(run, opened.source, measured[key], num_measured))
    return found


def cost_elsewhere(study: Study) -> list[RunCost]:
    """The operations of every run, of images that are taken to be those of the network's preset."""
    preset = PRESETS.get(str(study.net.get("preset")))
    if preset is None:
        raise AssayError("is not known, so neither is the size of the images", key="net.preset")
    labels = [preset.num_classes - 1] if study.train.class_conditional and preset.num_classes else None
    one = from_arrays(np.zeros((1, *preset.image_shape), np.float32), label=labels, name=study.name)
    source = View(one, torch.zeros(_NUM_ASSUMED, dtype=torch.long))
    return [_run_cost(run, source) for run in study_runs(study, study.data, source)]


def _run_cost(
    run: Run, source: ImageSource, per_evaluation: float | None = None, num_measured: int = 0
) -> RunCost:
    train, cost = run.config.train, measure_cost(run.config.net_config(source))
    sampled = sum(run.num_sampled * sample.num_evaluations() for sample in run.samples)
    before = 0.0 if run.continues is None else training_evaluations(run.continues.config.train, len(source))
    forwards = training_evaluations(train, len(source)) - before + sampled
    num_snapshots = 1 + train.rounds + (train.total_steps - 1) // (train.snapshot_every or train.total_steps)
    num_snapshots += run.evaluate.along
    return RunCost(
        run.title,
        num_trained=train.total_steps * train.batch_size,
        num_sampled=run.num_sampled * len(run.samples),
        flops=forwards * cost.flops,
        num_bytes=cost.num_parameters * (_STATE_BYTES * _NUM_STATES + 4 * num_snapshots),
        seconds=None if per_evaluation is None else per_evaluation * (forwards + num_measured),
    )


def missing_parts(study: Study) -> list[str]:
    """What has to be there before the study can start: the store, the reference, the extractor's weights."""
    found = [
        f"{path} is missing: pack the images with `assay data pack ... -o {path}`"
        for path in study.data.paths
        if str(path) not in KNOWN and not is_store(Path(path))
    ]
    reference = study.evaluate.reference
    if isinstance(reference, Path) and not reference.exists():
        found.append(f"{reference} is missing: get EDM's fid-refs, or make it with `assay evaluate reference`")
    weights = find(FeatureNetwork, study.evaluate.extractor, "evaluate.extractor").weights
    if weights is not None and local_weights(weights, Path("cache")) is None:
        found.append(
            f"{weights.name} is missing, the weights of {study.evaluate.extractor}: put it into cache/"
        )
    return found
