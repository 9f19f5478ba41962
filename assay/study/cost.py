"""The cost of a study before it is started: operations, device-hours and storage, and what is missing.

Operations are counted on the meta device (`assay.nets.measure_cost`): a training step takes three times the
forward pass of each image, a sample one forward pass per evaluation of the denoiser. Hours follow from a
stated rate. Nothing is timed and no image is read, so a study for a large machine can be planned on a
small one, without its data.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from assay.data import ImageSource
from assay.data.known import KNOWN
from assay.data.shards import is_store
from assay.data.units import PhysicalRange
from assay.metrics.extract import INCEPTION_WEIGHTS, MOBILENET_WEIGHTS, local_weights
from assay.nets import PRESETS as NETS
from assay.nets import measure_cost
from assay.sample import SampleConfig
from assay.study.arms import Job, study_arms, study_jobs
from assay.study.spec import Study

_STEP = 3.0  # a training step in forward passes
_WITH_CONSISTENCY = 1.25  # how much longer a step with the consistency loss takes
_STATE_BYTES = 16  # per weight: the weights, their average and two moments, in float32
_NUM_STATES = 2  # kept during a run


@dataclass(frozen=True)
class JobCost:
    """One training with the ways its model is sampled. `num_bytes` are on disk while it runs."""

    title: str
    num_trained: int
    num_sampled: int
    flops: float
    num_bytes: int


@dataclass(frozen=True)
class StudyCost:
    """All jobs of a study, and what is missing before it can start, as sentences."""

    jobs: tuple[JobCost, ...]
    missing: tuple[str, ...]

    @property
    def flops(self) -> float:
        """Operations of all jobs."""
        return sum(job.flops for job in self.jobs)

    @property
    def num_bytes(self) -> int:
        """On disk if all jobs run at once."""
        return sum(job.num_bytes for job in self.jobs)

    def hours(self, flops_per_second: float) -> float:
        """Hours of one device that sustains this rate."""
        return self.flops / flops_per_second / 3600


@dataclass(frozen=True)
class _Assumed:
    """Stands for clean images that are not here: of the shape and classes the network's preset was made for."""

    name: str
    image_shape: tuple[int, int, int]
    num_classes: int
    num_images: int = 50_000
    class_names: tuple[str, ...] = ()
    physical_range: PhysicalRange | None = None
    fingerprint: str = ""

    @property
    def sigma_tn(self) -> torch.Tensor:
        return torch.zeros(self.num_images)

    @property
    def label(self) -> torch.Tensor:
        return torch.full((self.num_images,), -1)

    def __len__(self) -> int:
        return self.num_images

    def read(self, index: torch.Tensor) -> torch.Tensor:
        raise ValueError(f"{self.name} is not here")


def study_cost(study: Study, source: ImageSource | None = None) -> StudyCost:
    """Count every job; without the images, `source`, they are taken to be those of the network's preset."""
    missing = missing_parts(study)
    if source is None:
        preset = NETS.get(str(study.net.get("preset")))
        if preset is None:
            raise ValueError(f"{missing[0] if missing else 'the data is missing'}; and net.preset is not known")
        conditional = study.train.class_conditional
        assumed = _Assumed(study.name, preset.image_shape, preset.num_classes if conditional else 0)
        source = cast(ImageSource, assumed)
    jobs = study_jobs(study, study_arms(study, study.data, source), "", "")
    return StudyCost(tuple(_job_cost(job, source) for job in jobs), tuple(missing))


def _job_cost(job: Job, source: ImageSource) -> JobCost:
    train, cost = job.config.train, measure_cost(job.config.net_config(source))
    num_trained = train.total_steps * train.batch_size
    forwards = num_trained * _STEP * (_WITH_CONSISTENCY if train.consistency.coefficient else 1.0)
    forwards += sum(job.num_sampled * num_evaluations(sample) for sample in job.samples)
    # Each loop keeps its final weights, and restores every image: two evaluations a step of the flow.
    num_snapshots = 1 + train.loops + (train.total_steps - 1) // (train.snapshot_every or train.total_steps)
    num_snapshots += job.evaluate.along
    forwards += train.loops * len(source) * (2 * train.restore.num_steps + 1)
    num_bytes = cost.num_parameters * (_STATE_BYTES * _NUM_STATES + 4 * num_snapshots)
    return JobCost(job.title, num_trained, job.num_sampled * len(job.samples), forwards * cost.flops, num_bytes)


def num_evaluations(sample: SampleConfig) -> int:
    """How often the denoiser is called for one image: Heun calls it twice a step, except for the last."""
    num_steps = len(sample.sigmas()) - 1
    return 2 * num_steps - 1 if sample.solver == "heun" else num_steps


def missing_parts(study: Study) -> list[str]:
    """What has to be there before the study can start: the store, the reference, the extractor's weights."""
    found = [
        f"{path} is missing: pack the images with `assay data pack ... -o {path}`"
        for path in study.data.paths
        if str(path) not in KNOWN and not is_store(Path(path))
    ]
    reference = study.evaluate.reference
    if isinstance(reference, Path) and not reference.exists():
        found.append(f"{reference} is missing: get EDM's fid-refs, or make it with `assay reference`")
    weights = {"inception": INCEPTION_WEIGHTS, "mobilenet_v2": MOBILENET_WEIGHTS}.get(study.evaluate.extractor)
    if weights is not None and local_weights(weights, Path("cache")) is None:
        found.append(
            f"{weights.name} is missing, the weights of {study.evaluate.extractor}: put it into cache/"
        )
    return found
