"""How long a study will take here: a few training steps of each network, timed."""

import time

import torch

from assay.data import Loader
from assay.loss import ambient_loss, edm_weight
from assay.metrics.score import NUM_EVALUATIONS
from assay.nets import NetConfig, build_denoiser
from assay.study.run import OpenStudy

_NUM_STEPS = 3
_EVALUATIONS_PER_STEP = 3.0  # a training step costs about three evaluations


def estimate_seconds(opened: OpenStudy) -> dict[str, float]:
    """Seconds of one core for each job, by its key: training, two evaluations per sampling step, scoring."""
    protocol = opened.study.evaluate
    seconds: dict[str, float] = {}
    per_image: dict[NetConfig, float] = {}
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for job in opened.jobs:
            config = job.config.net_config(opened.source)
            if config not in per_image:
                per_image[config] = _seconds_per_image(opened, job.config.train.batch_size, config)
            num_evaluated = protocol.num_images * protocol.num_ranges * len(job.samples)
            num_sampled = num_evaluated * 2 * protocol.sample.num_steps
            num_scored = NUM_EVALUATIONS * len(opened.held_out) if opened.held_out else 0
            num_more = (num_sampled + num_scored) / _EVALUATIONS_PER_STEP
            seconds[job.key] = per_image[config] * (job.work + num_more)
    finally:
        torch.set_num_threads(num_threads)
    return seconds


def _seconds_per_image(opened: OpenStudy, batch_size: int, config: NetConfig) -> float:
    """The fastest of a few training steps, divided by the batch."""
    denoiser = build_denoiser(config)
    batch = Loader(opened.source, min(batch_size, len(opened.source))).batch(0)
    label = batch.label if config.num_classes else None
    fastest = float("inf")
    for _ in range(_NUM_STEPS):
        started = time.perf_counter()
        weight = edm_weight(batch.sigma_t)
        loss = ambient_loss(denoiser, batch.x_tn, batch.sigma_tn, batch.sigma_t, batch.eps, weight, label)
        loss.mean().backward()
        fastest = min(fastest, time.perf_counter() - started)
    return fastest / len(batch.index)
