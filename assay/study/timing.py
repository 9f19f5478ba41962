"""How long a study will take here: a few training steps of each network, timed."""

import time

import torch

from assay.data import ImageSource, Loader
from assay.loss import ambient_loss, edm_weight
from assay.metrics.score import NUM_EVALUATIONS
from assay.nets import NetConfig, build_denoiser
from assay.study.arms import Job
from assay.study.run import OpenStudy
from assay.train.config import TrainConfig
from assay.train.run import make_optimizer

NUM_TIMED_STEPS = 3
_EVALUATIONS_PER_STEP = 3.0  # a training step costs about three evaluations


def estimate_seconds(opened: OpenStudy) -> dict[str, float]:
    """Seconds of one core for each job, by its key: training, two evaluations per sampling step, scoring."""
    seconds: dict[str, float] = {}
    per_image: dict[tuple[NetConfig, str], float] = {}
    for job in opened.jobs:
        config, settings = job.config.net_config(opened.source), job.config.train
        key = config, settings.optimizer
        if key not in per_image:
            per_image[key] = seconds_per_image(opened.source, settings.batch_size, config, settings)
        num_scored = NUM_EVALUATIONS * len(opened.held_out) if opened.held_out else 0
        more = sampling_work(job) + num_scored / _EVALUATIONS_PER_STEP
        seconds[job.key] = per_image[key] * (job.work + more)
    return seconds


def sampling_work(job: Job) -> float:
    """Images of training that a job's sampling amounts to."""
    return job.num_sampled * len(job.samples) * 2 * job.evaluate.sample.num_steps / _EVALUATIONS_PER_STEP


def seconds_per_image(source: ImageSource, batch_size: int, config: NetConfig, settings: TrainConfig) -> float:
    """The fastest of a few training steps on one core, divided by the batch."""
    denoiser = build_denoiser(config)
    optimizer = make_optimizer(denoiser, settings)
    batch = Loader(source, min(batch_size, len(source))).batch(0)
    label = batch.label if config.num_classes else None
    fastest = float("inf")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(NUM_TIMED_STEPS):
            started = time.perf_counter()
            weight = edm_weight(batch.sigma_t)
            loss = ambient_loss(denoiser, batch.x_tn, batch.levels, batch.sigma_t, batch.eps, weight, label)
            loss.mean().backward()
            optimizer.step()
            fastest = min(fastest, time.perf_counter() - started)
    finally:
        torch.set_num_threads(num_threads)
    return fastest / len(batch.index)
