"""Measuring a model or images by path, as `assay evaluate` does: what is measured follows from what is given.

With a reference the distance of samples, or of images that exist, to real images; with held-out images the
loss of a model, in nats; with neither the loss on those that its run set aside. Images with noise added
(`noised`) are compared by FD alone, because every image of theirs is as far from a noisy one as its noise.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from pydantic import Field

from assay.checkpoint import is_model
from assay.data import ImageSource, open_store
from assay.errors import AssayError, warn
from assay.generate import warn_of_full_sampling
from assay.metrics import extract
from assay.metrics.classifier import NUM_IMAGES_SEEN, has_labels
from assay.metrics.evaluate import Evaluation, evaluate, with_held_out_loss
from assay.metrics.generated import Noised, open_images, sample_checkpoint
from assay.metrics.held_out import check_unseen, checkpoint_loss, set_aside
from assay.sample import SampleConfig
from assay.settings import Config

DEFAULT_CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "assay"
Phases = Callable[[str, int, int], None]  # called with what is being done, images done, and all of them


class MeasureConfig(Config):
    """What to measure, and with which images."""

    reference: Path | None = Field(
        None, description="Real images: a store, or an npz of feature statistics (ours or EDM's)."
    )
    held_out: Path | None = Field(
        None,
        description="A store of real images not trained on: a checkpoint is measured on them, in nats. "
        "Default: without a reference, those that `assay train --held-out` set aside.",
    )
    extractor: extract.ExtractorName | None = Field(
        None,
        description="Whose features to compare: inception, which alone gives FID, or classifier, "
        "pixels or one of yours, which give FD-NAME. Default: classifier, or pixels without labels.",
    )
    weights: Path | None = Field(None, description="The official weights of inception.")
    num_images: int | None = Field(
        None,
        ge=extract.MIN_IMAGES,
        description="Images in each range. Default: all, or the reference's number.",
    )
    num_ranges: int | None = Field(None, ge=1, description="Disjoint ranges. Default: 3 for a model, else 1.")
    first_seed: int = Field(0, ge=0, le=2**62, description="Seed of the first sampled image.")
    noised: bool = Field(
        False,
        description="Add noise to the generated images and compare them with the reference's noisy images.",
    )
    fd_only: bool = Field(False, description="Leave out KID, precision and recall, which compare all pairs.")
    batch_size: int = Field(128, ge=1, description="Images at a time. Changes the speed, not the result.")


def measure(
    path: Path,
    config: MeasureConfig,
    sample: SampleConfig = SampleConfig(),  # noqa: B008
    cache: Path = DEFAULT_CACHE,
    devices: Sequence[torch.device | str] = ("cpu",),
    on_progress: Phases = lambda phase, done, total: None,
) -> Evaluation:
    """Measure a checkpoint, run folder or published model, which is sampled, or images that exist.

    By default samples as in the paper: three ranges of as many images as the reference has, at most 50,000.
    """
    images = None if is_model(path) else open_images(path)
    given = config.reference
    real: ImageSource | Path | None = open_store(given) if given and given.suffix != ".npz" else given
    if config.noised and not isinstance(real, ImageSource):
        what = "measures the distance from the noisy images of a store"
        raise AssayError(what, key="noised", cure="give a store as reference")
    loss, fresh = None, None if given or config.held_out or images is not None else set_aside(path)
    if images is None and config.held_out is not None:
        fresh = open_store(config.held_out)
    if fresh is not None:
        batch_size = 8 * config.batch_size
        check_unseen(path, fresh)
        count = counter(on_progress, "measuring", len(fresh))
        loss = checkpoint_loss(path, fresh, batch_size=batch_size, devices=devices, progress=count)
    if real is None:
        if loss is not None:
            return with_held_out_loss(Evaluation(), loss)
        cure = "give a reference for a distance, or a checkpoint and held-out images for a loss"
        what = "there is nothing to measure with, and no run here that set images aside"
        raise AssayError(what, key="reference", cure=cure)
    extractor, reference = find_reference(real, config, cache, devices, on_progress)
    sampler, num_ranges = None, config.num_ranges or (3 if images is None else 1)
    if images is None:
        num_images = config.num_images or min(reference.statistics.num_images or 50_000, 50_000)
        how = config.first_seed, sample, reference.frequencies, extractor.devices[0]
        images, sampler = sample_checkpoint(path, num_ranges * num_images, *how)
        warn_of_full_sampling(sample, sampler.info)
    else:
        num_images = config.num_images or len(images) // num_ranges
    if config.noised and reference.source is not None:
        images = Noised(images, reference.source.sigma_tn)
    count = counter(on_progress, "sampling" if sampler else "measuring", num_ranges * num_images)
    fd_only = config.fd_only or config.noised
    distance = evaluate(images, reference, extractor, num_images, num_ranges, fd_only, sampler, count)
    if distance.fd is not None and distance.fd < 1e-3:  # no two samples are that near
        warn(f"a distance of {distance.fd:.3g}: are these the images of the reference?")
    return distance if loss is None else with_held_out_loss(distance, loss)


def find_reference(
    real: ImageSource | Path,
    config: MeasureConfig,
    cache: Path = DEFAULT_CACHE,
    devices: Sequence[torch.device | str] = ("cpu",),
    on_progress: Phases = lambda phase, done, total: None,
) -> tuple[extract.Extractor, extract.Reference]:
    """The extractor of the config, and real images (or the file of their statistics) as it sees them."""
    without_labels = isinstance(real, ImageSource) and not has_labels(real)
    name = config.extractor or ("pixels" if without_labels else "classifier")
    count = counter(on_progress, "training the classifier", NUM_IMAGES_SEEN)
    extractor = extract.load_extractor(name, cache, config.weights, real, devices, config.batch_size, count)
    if isinstance(real, Path):
        return extractor, extract.reference_from_statistics(real, extractor)
    count = counter(on_progress, f"features of {real.name}", len(real))
    return extractor, extract.reference_from_images(real, extractor, cache, count, config.noised)


def counter(on_progress: Phases, phase: str, total: int) -> extract.CountImages:
    """Adds up images, and tells how many are done."""
    done = 0

    def count(num_images: int) -> None:
        nonlocal done
        done += num_images
        on_progress(phase, done, total)

    return count
