"""Measuring a model or images by path, as `assay evaluate` does: what is measured follows from what is given.

With a reference the distance of samples, or of images that exist, to real images; with held-out images the
loss of a model, in nats. A reference without labels has no classifier: a model is then measured on held-out
images alone, unless an extractor is named. Images with noise added (`noised`) are compared by FD alone, because
every image of theirs is as far from a noisy one as its noise.
"""

import json
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, Field

from assay.checkpoint import is_model
from assay.data import ImageSource, open_store
from assay.data.config import DataConfig
from assay.data.notes import check_overlap
from assay.errors import AssayError
from assay.files import write_whole
from assay.generate import warn_of_full_sampling
from assay.metrics.classifier import NUM_IMAGES_SEEN, has_labels
from assay.metrics.evaluate import Evaluation, evaluate, nearest_picture, with_held_out_loss
from assay.metrics.extract import CountImages, Extractor, ExtractorName, load_extractor
from assay.metrics.generated import Noised, open_images, sample_checkpoint
from assay.metrics.held_out import checkpoint_loss
from assay.metrics.reference import MIN_IMAGES, Reference, reference_from_images, reference_from_statistics
from assay.metrics.tune import load_tuned
from assay.sample import SampleConfig
from assay.train.folder import read_run

DEFAULT_CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "assay"
Phases = Callable[[str, int, int], None]  # called with what is being done, images done, and all of them


class MeasureConfig(BaseModel):
    """What to measure, and with which images."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    reference: Path | None = Field(
        None, description="Real images: a store, or an npz of feature statistics (ours or EDM's)."
    )
    held_out: Path | None = Field(
        None,
        description="A store of real images not trained on: a checkpoint is measured on them, in nats; they "
        "also decide what is a copy (default for that: leave-one-out).",
    )
    training: Path | None = Field(
        None, description="A store of training images, to look for copies. Default: the reference."
    )
    extractor: ExtractorName | None = Field(
        None,
        description="Whose features to compare: inception, which alone gives FID, or classifier, mobilenet_v2, "
        "pixels or one of yours, which give FD-NAME. Default: classifier, or the held-out loss alone if the "
        "reference has no labels.",
    )
    weights: Path | None = Field(
        None, description="File with the official weights of inception or mobilenet_v2."
    )
    num_images: int | None = Field(
        None,
        ge=MIN_IMAGES,
        description="Images in each range. Default: all; of a checkpoint as many as the reference has.",
    )
    num_ranges: int | None = Field(
        None, ge=1, description="Disjoint ranges of images. Default: 3 for a checkpoint, else 1."
    )
    first_seed: int = Field(0, ge=0, le=2**62, description="Seed of the first sampled image.")
    noised: bool = Field(
        False,
        description="Add noise to the generated images and measure their distance from the noisy images of the "
        "reference. Needs no clean image.",
    )
    fd_only: bool = Field(
        False, description="Leave out what compares every image with every other: KID, copies, ..."
    )
    tuned: bool = Field(False, description="Use the sampler that was tuned for this checkpoint.")
    batch_size: int = Field(
        128, ge=1, description="Images computed at a time. Changes the speed, not the result."
    )

    @property
    def fd_alone(self) -> bool:
        """Whether FD is all that is measured of samples."""
        return self.fd_only or self.noised


@dataclass(frozen=True)
class _Work:
    """How things are computed: where they are kept, on which devices, and who is told."""

    config: MeasureConfig
    cache: Path
    devices: Sequence[torch.device | str]
    on_progress: Phases

    def counter(self, phase: str, total: int) -> CountImages:
        done = 0

        def count(num_images: int) -> None:
            nonlocal done
            done += num_images
            self.on_progress(phase, done, total)

        return count

    def extractor(self, reference: ImageSource | Path) -> Extractor:
        name = self.config.extractor or "classifier"
        if self.config.noised and isinstance(reference, ImageSource) and not has_labels(reference):
            name = self.config.extractor or "pixels"
        count = self.counter("training the classifier", NUM_IMAGES_SEEN)
        weights, batch_size = self.config.weights, self.config.batch_size
        return load_extractor(name, self.cache, weights, reference, self.devices, batch_size, count)

    def reference(self, source: ImageSource | Path, extractor: Extractor) -> Reference:
        if isinstance(source, Path):
            return reference_from_statistics(source, extractor)
        count = self.counter(f"features of {source.name}", len(source))
        return reference_from_images(source, extractor, self.cache, count, self.config.noised)


def measure(
    path: Path,
    config: MeasureConfig,
    sample: SampleConfig = SampleConfig(),  # noqa: B008
    nearest: Path | None = None,
    cache: Path = DEFAULT_CACHE,
    devices: Sequence[torch.device | str] = ("cpu",),
    on_progress: Phases = lambda phase, done, total: None,
) -> Evaluation:
    """Measure a checkpoint, run folder or published model, which is sampled, or images that exist.

    `nearest` is where a picture of the images closest to training images is written; `cache` keeps extractors
    and features.
    """
    work, images = _Work(config, cache, devices, on_progress), None if is_model(path) else open_images(path)
    is_file = config.reference is not None and config.reference.suffix == ".npz"
    real = config.reference if is_file else _open(config.reference)
    trained, fresh = _open(config.training), _open(config.held_out)
    _check(config, real, nearest)
    chooses = config.extractor is None and not config.noised
    if images is None and chooses and isinstance(real, ImageSource) and not has_labels(real):
        _warn_of_no_labels(real, fresh)
        real, fresh = None, fresh or real
    record = None
    if images is None and fresh is not None:
        _check_unseen(path, fresh)
        count, batch_size = work.counter("measuring", len(fresh)), 8 * config.batch_size
        record = checkpoint_loss(path, fresh, batch_size=batch_size, devices=devices, progress=count)
    if real is None and record is None:
        cure = "give a reference for a distance, or a checkpoint and held-out images for a loss"
        raise AssayError("there is nothing to measure with", key="reference", cure=cure)
    evaluation = Evaluation()
    if real is not None:
        evaluation = _distance(work, path, images, sample, real, trained, fresh, nearest)
    return evaluation if record is None else with_held_out_loss(evaluation, record)


def _distance(
    work: _Work,
    path: Path,
    images: ImageSource | None,
    sample: SampleConfig,
    real: ImageSource | Path,
    trained: ImageSource | None,
    fresh: ImageSource | None,
    nearest: Path | None,
) -> Evaluation:
    """The distance of images, or of the samples of a checkpoint.

    Samples are by default as in the paper: three ranges, each with as many images as the reference has, at most
    50,000.
    """
    config, extractor, sampler = work.config, work.extractor(real), None
    against = work.reference(real, extractor)
    training, held_out = (
        None if source is None or config.fd_alone else work.reference(source, extractor)
        for source in (trained, fresh)
    )
    if images is None:
        num_ranges = config.num_ranges or 3
        num_images = config.num_images or min(against.statistics.num_images or 50_000, 50_000)
        sample = load_tuned(path).sample if config.tuned else sample
        how = config.first_seed, sample, against.frequencies, extractor.devices[0]
        images, sampler = sample_checkpoint(path, num_ranges * num_images, *how)
        warn_of_full_sampling(sample, sampler.info)
    else:
        num_ranges = config.num_ranges or 1
        num_images = config.num_images or len(images) // num_ranges
    if config.noised and against.source is not None:
        images = Noised(images, against.source.sigma_tn)
    count = work.counter("sampling" if sampler else "measuring", num_ranges * num_images)
    chosen = num_images, num_ranges, config.fd_alone, training, held_out, sampler
    found = evaluate(images, against, extractor, *chosen, count)
    if nearest is not None and found.neighbours is not None:
        with write_whole(nearest) as partial:
            nearest_picture(images, training or against, found.neighbours).save(partial, format="PNG")
    return found.evaluation


def open_reference(
    path: Path,
    config: MeasureConfig,
    cache: Path = DEFAULT_CACHE,
    devices: Sequence[torch.device | str] = ("cpu",),
    on_progress: Phases = lambda phase, done, total: None,
) -> Reference:
    """A store of real images as an extractor sees them, with statistics that others can evaluate against."""
    if config.extractor in (None, "classifier"):
        what = "a classifier is trained on the images of the store, which others do not have"
        raise AssayError(what, key="extractor", cure="choose inception, mobilenet_v2 or pixels")
    work, source = _Work(config, cache, devices, on_progress), open_store(path)
    return work.reference(source, work.extractor(source))


def _open(path: Path | None) -> ImageSource | None:
    return None if path is None else open_store(path)


def _check(config: MeasureConfig, real: ImageSource | Path | None, nearest: Path | None) -> None:
    """Before any long work: do the things that were given go together?"""
    if config.noised and (not isinstance(real, ImageSource) or config.training or nearest):
        what = "measures the distance from the noisy images of a store"
        raise AssayError(what, key="noised", cure="give a store as reference, and neither training nor nearest")
    if nearest and config.training is None and isinstance(real, Path):
        what = "shows training images, which a file of statistics does not hold"
        raise AssayError(what, key="nearest", cure="give them as a store with training")


def _check_unseen(run: Path, held_out: ImageSource) -> None:
    """Held-out images must not be among those of a run; a warning where these are gone."""
    if not (run / "config.json").is_file():
        return
    data = DataConfig.model_validate_json(json.dumps(read_run(run / "config.json")["config"]["data"]))
    try:
        drawn_from = DataConfig(store=data.store, held_out=data.held_out, seed=data.seed).open()
    except (OSError, ValueError):
        why = f"{data.store}, which {run} was trained on, cannot be opened"
        warnings.warn(f"{why}: it cannot be checked that {held_out.name} has none of its images.", stacklevel=3)
        return
    if drawn_from.image_shape == held_out.image_shape:
        try:
            check_overlap(drawn_from, held_out)
        except AssayError as error:
            cure = "give images that it was not trained on"
            raise AssayError(error.what, path=held_out.name, key="held_out", cure=cure) from None


def _warn_of_no_labels(real: ImageSource, fresh: ImageSource | None) -> None:
    text = f"{real.name} has no labels to train a classifier on: the model is measured on held-out images"
    if fresh is None:
        text += f", here on {real.name} itself, which must not be what it was trained on"
    warnings.warn(f"{text}. For a distance, choose an extractor.", stacklevel=3)
