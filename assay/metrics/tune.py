"""Tuning the sampler of one checkpoint against held-out images, on a small budget.

`tune` tries the settings of `search_space` by halving: all of them on few samples, the better half on twice as
many, and so on; every setting draws from the same seeds. The winner and the settings one started with are then
measured on fresh seeds against the other half of the held-out images, because the best of many is lucky.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

from assay.checkpoint import find_checkpoint, load_checkpoint
from assay.data import ImageSource
from assay.errors import AssayError, check_enough
from assay.files import check_sha256, decoding, sha256, write_text
from assay.generate import lowest_learnt
from assay.metrics.distance import features_to_statistics
from assay.metrics.evaluate import evaluate
from assay.metrics.extract import Extractor, Reference, images_to_features
from assay.metrics.generated import sample_checkpoint
from assay.sample import SampleConfig

MIN_IMAGES = 100  # held out: half of them choose, half of them judge
_FRESH = 10**6  # the first seed of the samples that judge


class Tuned(BaseModel, frozen=True, extra="forbid"):
    """The chosen sampler, its distance on fresh seeds and images, and that of the settings one started with.

    `trials` are all settings that were tried, each with its distance and number of samples in its last round.
    """

    sample: SampleConfig
    fd: float
    fd_before: float
    num_images: int
    extractor: str
    held_out: str
    checkpoint_sha256: str
    trials: tuple[tuple[SampleConfig, float, int], ...]


def search_space(start: SampleConfig, may_truncate: bool = False) -> list[SampleConfig]:
    """The settings that are tried, `start` first, each of at most 35 evaluations: those of 18 steps of Heun.

    All keep the other settings of `start`. With `may_truncate`, for models that saw no clean image, each is
    also tried truncated. More churn than 7.5 adds no more noise to any step: EDM limits it.
    """
    heun: list[dict[str, Any]]
    heun = [{"solver": "heun", "num_steps": 18, "churn": churn} for churn in (0.0, 1.0, 2.5, 5.0, 7.5)]
    heun.append(heun[-1] | {"churn_low": 0.05, "churn_high": 50.0})  # as EDM confines it
    multistep = [{"solver": "multistep", "num_steps": number, "churn": 0.0} for number in (10, 12, 18, 24)]
    found = [start, *(SampleConfig(**start.model_dump() | each) for each in heun + multistep)]
    if may_truncate and start.truncate_at is None and start.refine_at is None:
        found += [each.model_copy(update={"truncate_at": "auto"}) for each in found]
    return list(dict.fromkeys(found))


def tune(
    checkpoint: Path,
    held_out: ImageSource,
    extractor: Extractor,
    start: SampleConfig = SampleConfig(),  # noqa: B008
    num_images: int = 250,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Tuned:
    """Choose among `search_space` by the Frechet distance to held-out clean images; written to `tuned_path`.

    `num_images` samples of each setting in the first round, twice as many in each further one.
    """
    clean = torch.nonzero(held_out.usable_from == 0)[:, 0]
    check_enough(len(clean), MIN_IMAGES, f"clean images of {held_out.name}", "held_out")
    checkpoint = find_checkpoint(checkpoint)
    lowest = lowest_learnt(load_checkpoint(checkpoint).info)
    left = search_space(start, may_truncate=lowest > SampleConfig().sigma_min)
    rounds, done = [(len(left), num_images)], 0  # settings, and samples of each
    while rounds[-1][0] > 2:
        rounds.append((math.ceil(rounds[-1][0] / 2), 2 * rounds[-1][1]))
    total = sum(number * images for number, images in rounds) + 2 * 2 * rounds[-1][1]
    halves = (features_to_statistics(images_to_features(extractor, held_out, clean[k::2])) for k in range(2))
    choosing, judging = (Reference(held_out.name, "", half, source=held_out) for half in halves)

    def distance(sample: SampleConfig, reference: Reference, images: int, first_seed: int) -> float:
        nonlocal done
        samples, _ = sample_checkpoint(checkpoint, images, first_seed, sample, device=extractor.devices[0])
        fd = evaluate(samples, reference, extractor, fd_only=True).fd
        assert fd is not None
        done += images
        progress(done, total)
        return fd

    trials: dict[SampleConfig, tuple[float, int]] = {}
    for number, images in rounds:
        left = left[:number]
        trials |= {sample: (distance(sample, choosing, images, 0), images) for sample in left}
        left = sorted(left, key=lambda sample: trials[sample][0])
    images = 2 * rounds[-1][1]
    fd, fd_before = (distance(sample, judging, images, _FRESH) for sample in (left[0], start))
    tuned = Tuned(
        sample=left[0] if fd < fd_before else start,  # else the search found only luck
        fd=min(fd, fd_before),
        fd_before=fd_before,
        num_images=images,
        extractor=extractor.name,
        held_out=held_out.name,
        checkpoint_sha256=sha256(checkpoint),
        trials=tuple((sample, *found) for sample, found in trials.items()),
    )
    write_text(tuned_path(checkpoint), tuned.model_dump_json(indent=2) + "\n")
    return tuned


def tuned_path(checkpoint: Path) -> Path:
    """Where the tuned sampler of a checkpoint, or of a run's folder, lies."""
    return find_checkpoint(checkpoint).with_suffix(".sampler.json")


def load_tuned(checkpoint: Path) -> Tuned:
    """The tuned sampler of a checkpoint; rejected if it was tuned for other weights."""
    path, cure = tuned_path(checkpoint), f"choose a sampler with `assay model tune {checkpoint}`"
    if not path.exists():
        raise AssayError("does not exist", path=path, cure=cure)
    with decoding(path, cure):
        tuned = Tuned.model_validate_json(path.read_bytes())
    what = f"was chosen for other weights than those of {checkpoint}"
    check_sha256(find_checkpoint(checkpoint), tuned.checkpoint_sha256, what, path=path, cure=cure)
    return tuned
