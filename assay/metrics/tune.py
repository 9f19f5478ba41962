"""Tuning the sampler of one checkpoint against held-out images, on a small budget.

`tune` tries the settings of `search_space` by halving: all of them on few samples, the better half on twice as
many, and so on; every setting draws from the same seeds. The winner and the settings one started with are then
measured on fresh seeds against the other half of the held-out images, because the best of many is lucky.

The choice is a file beside the checkpoint, `<checkpoint>.sampler.json`, which `--tuned` reads. Compare models
with one sampler, or tune each alike.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from assay.checkpoint import find_checkpoint, load_checkpoint
from assay.data import ImageSource
from assay.errors import AssayError, check_enough
from assay.files import decoding, sha256, write_whole
from assay.generate import lowest_learnt
from assay.metrics.distance import frechet_distance
from assay.metrics.extract import Extractor, images_to_features
from assay.metrics.generated import sample_checkpoint
from assay.metrics.statistics import FeatureStatistics, features_to_statistics
from assay.sample import SampleConfig

MIN_IMAGES = 100  # held out: half of them choose, half of them judge
_CHURN = (0.0, 1.0, 2.5, 5.0, 7.5)  # of 18 steps; with more, no step adds more noise: EDM limits it
_MIDDLE = (0.05, 50.0)  # the levels to which EDM confines churn
_MULTISTEP = (10, 12, 18, 24)  # steps
_SIGMA_MIN = SampleConfig().sigma_min


class Trial(BaseModel):
    """One setting and its distance to the held-out images, over the last round that it took part in."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sample: SampleConfig
    fd: float
    num_images: int


class Tuned(BaseModel):
    """The chosen sampler, its distance on fresh seeds and images, and what it was chosen among.

    `fd_before` is the distance of the settings one started with.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    sample: SampleConfig
    fd: float
    fd_before: float
    num_images: int
    extractor: str
    held_out: str
    checkpoint_sha256: str
    trials: tuple[Trial, ...]


def search_space(start: SampleConfig, may_truncate: bool = False) -> list[SampleConfig]:
    """The settings that are tried, each of at most 35 evaluations, the number of 18 steps of Heun's method.

    18 steps of Heun with churn 0, 1, 2.5, 5 and 7.5 at all levels, and 7.5 at levels from 0.05 to 50 only; the
    multistep solver with 10, 12, 18 and 24 steps; and `start` itself, first. All keep the other settings of
    `start`. With `may_truncate`, for models that saw no clean image, each is also tried truncated.
    """
    given = start.model_dump()
    changes: list[dict[str, Any]]
    changes = [{"solver": "heun", "num_steps": 18, "churn": churn} for churn in _CHURN]
    changes += [{**changes[-1], "churn_low": _MIDDLE[0], "churn_high": _MIDDLE[1]}]
    changes += [{"solver": "multistep", "num_steps": number, "churn": 0.0} for number in _MULTISTEP]
    found = [start, *(SampleConfig(**given | each) for each in changes)]
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
    left = search_space(start, may_truncate=lowest_learnt(load_checkpoint(checkpoint).info) > _SIGMA_MIN)
    rounds, done = _rounds(len(left), num_images), 0
    total = sum(number * images for number, images in rounds) + 2 * 2 * rounds[-1][1]

    def distance(sample: SampleConfig, reference: FeatureStatistics, images: int, first_seed: int) -> float:
        nonlocal done
        samples, _ = sample_checkpoint(checkpoint, images, first_seed, sample, device=extractor.devices[0])
        features = images_to_features(extractor, samples, torch.arange(images))
        done += images
        progress(done, total)
        return frechet_distance(features_to_statistics(features), reference)

    with write_whole(
        tuned_path(checkpoint)
    ) as partial:  # before any work: it may be on a disk that is read only
        choosing, judging = (
            features_to_statistics(images_to_features(extractor, held_out, clean[k::2])) for k in range(2)
        )
        trials: dict[SampleConfig, Trial] = {}
        for number, images in rounds:
            left = left[:number]
            for sample in left:
                fd = distance(sample, choosing, images, 0)
                trials[sample] = Trial(sample=sample, fd=fd, num_images=images)
            left = sorted(left, key=lambda sample: trials[sample].fd)
        fresh, images = 10**6, 2 * rounds[-1][1]
        fd, fd_before = (distance(sample, judging, images, fresh) for sample in (left[0], start))
        tuned = Tuned(
            sample=left[0] if fd < fd_before else start,  # else the search found only luck
            fd=min(fd, fd_before),
            fd_before=fd_before,
            num_images=images,
            extractor=extractor.name,
            held_out=held_out.name,
            checkpoint_sha256=sha256(checkpoint),
            trials=tuple(trials.values()),
        )
        partial.write_text(tuned.model_dump_json(indent=2) + "\n")
    return tuned


def _rounds(number: int, num_images: int) -> list[tuple[int, int]]:
    """(settings, samples of each) in each round, until two or fewer are left."""
    found = [(number, num_images)]
    while found[-1][0] > 2:
        found.append((-(-found[-1][0] // 2), 2 * found[-1][1]))
    return found


def tuned_path(checkpoint: Path) -> Path:
    """Where the tuned sampler of a checkpoint, or of a run's folder, lies."""
    return find_checkpoint(checkpoint).with_suffix(".sampler.json")


def load_tuned(checkpoint: Path) -> Tuned:
    """The tuned sampler of a checkpoint; rejected if it was tuned for other weights."""
    path = tuned_path(checkpoint)
    cure = f"choose a sampler with `assay model tune {checkpoint}`"
    if not path.exists():
        raise AssayError("does not exist", path=path, cure=cure)
    with decoding(path, cure):
        tuned = Tuned.model_validate_json(path.read_bytes())
    if tuned.checkpoint_sha256 != sha256(find_checkpoint(checkpoint)):
        raise AssayError(f"was chosen for other weights than those of {checkpoint}", path=path, cure=cure)
    return tuned
