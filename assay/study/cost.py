"""The cost of a study before it is started: here, by timing a few steps, or elsewhere, by counting operations.

Both count in evaluations of the network (see `assay.cost`). `estimate_seconds` times a step here. `study_cost`
counts operations on the meta device (`assay.nets.measure_cost`), and hours follow from a stated rate: no image
is read, so that a study for a large machine can be planned on a small one, without its data.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from assay.cost import seconds_per_evaluation, training_evaluations
from assay.data import ImageSource, View
from assay.data.arrays import from_arrays
from assay.data.known import KNOWN
from assay.data.shards import is_store
from assay.errors import AssayError
from assay.metrics.held_out import num_evaluations
from assay.metrics.weights import FeatureNetwork, local_weights
from assay.nets import PRESETS as NETS
from assay.nets import NetConfig, measure_cost
from assay.registry import find
from assay.study.run import OpenStudy
from assay.study.runs import Run, study_runs
from assay.study.spec import Study

_STATE_BYTES = 16  # per weight: the weights, their average and two moments, in float32
_NUM_STATES = 2  # kept during a run
_NUM_ASSUMED = 50_000  # images, where they are not here


def run_evaluations(run: Run, num_images: int) -> float:
    """Evaluations that a run takes: its training on `num_images` images, and its samples."""
    sampled = sum(run.num_sampled * sample.num_evaluations() for sample in run.samples)
    before = 0.0 if run.continues is None else training_evaluations(run.continues.config.train, num_images)
    return training_evaluations(run.config.train, num_images) - before + sampled


def estimate_seconds(opened: OpenStudy) -> dict[str, float]:
    """Seconds of one core for each run, by its key: training, sampling, measuring."""
    seconds: dict[str, float] = {}
    measured: dict[tuple[NetConfig, str], float] = {}
    num_measured = num_evaluations(len(opened.held_out)) if opened.held_out else 0
    for run in opened.runs:
        key = run.config.net_config(opened.source), run.config.train.optimizer
        if key not in measured:
            measured[key] = seconds_per_evaluation(run.config, opened.source, num_threads=1)
        seconds[run.key] = measured[key] * (run_evaluations(run, len(opened.source)) + num_measured)
    return seconds


@dataclass(frozen=True)
class RunCost:
    """One training with the ways its model is sampled. `num_bytes` are on disk while it runs."""

    title: str
    num_trained: int
    num_sampled: int
    flops: float
    num_bytes: int


@dataclass(frozen=True)
class StudyCost:
    """All runs of a study, and what is missing before it can start, as sentences."""

    runs: tuple[RunCost, ...]
    missing: tuple[str, ...]

    @property
    def flops(self) -> float:
        """Operations of all runs."""
        return sum(run.flops for run in self.runs)

    @property
    def num_bytes(self) -> int:
        """On disk if all runs go on at once."""
        return sum(run.num_bytes for run in self.runs)

    def hours(self, flops_per_second: float) -> float:
        """Hours of one device that sustains this rate."""
        return self.flops / flops_per_second / 3600


def study_cost(study: Study, source: ImageSource | None = None) -> StudyCost:
    """Count every run; without the images, `source`, they are taken to be those of the network's preset."""
    missing = missing_parts(study)
    if source is None:
        preset = NETS.get(str(study.net.get("preset")))
        if preset is None:
            raise AssayError("is not known, so neither is the size of the images", key="net.preset")
        labels = [preset.num_classes - 1] if study.train.class_conditional and preset.num_classes else None
        one = from_arrays(np.zeros((1, *preset.image_shape), np.float32), label=labels, name=study.name)
        source = View(one, torch.zeros(_NUM_ASSUMED, dtype=torch.long))
    runs = study_runs(study, study.data, source)
    return StudyCost(tuple(_run_cost(run, source) for run in runs), tuple(missing))


def _run_cost(run: Run, source: ImageSource) -> RunCost:
    train, cost = run.config.train, measure_cost(run.config.net_config(source))
    forwards = run_evaluations(run, len(source))
    num_snapshots = 1 + train.rounds + (train.total_steps - 1) // (train.snapshot_every or train.total_steps)
    num_snapshots += run.evaluate.along
    num_bytes = cost.num_parameters * (_STATE_BYTES * _NUM_STATES + 4 * num_snapshots)
    num_trained, num_sampled = train.total_steps * train.batch_size, run.num_sampled * len(run.samples)
    return RunCost(run.title, num_trained, num_sampled, forwards * cost.flops, num_bytes)


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
