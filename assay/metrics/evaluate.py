"""Evaluation: generated images against a reference, with everything needed to say what was measured.

The paper's protocol: several disjoint ranges of images (seeds 0-49,999, 50,000-99,999, 100,000-149,999), each
measured on its own, then mean and standard deviation. The number of images is part of the result, because the
distance depends on it: `compare` rejects unequal counts.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL.Image import Image
from pydantic import BaseModel, ConfigDict, Field, model_validator

import assay
from assay.data import ImageSource
from assay.data.picture import captioned_rows
from assay.errors import AssayError, check_enough
from assay.files import Name, sha256, write_whole
from assay.metrics.distance import (
    Memorisation,
    Neighbours,
    frechet_distance,
    kernel_distance,
    leave_one_out,
    manifold_overlap,
    memorisation,
    nearest_neighbours,
)
from assay.metrics.extract import CountImages, Extractor, images_to_features
from assay.metrics.generated import SamplerSettings
from assay.metrics.held_out import BandLoss, BandLosses, HeldOutLoss, load_held_out_loss, save_held_out_loss
from assay.metrics.reference import MIN_IMAGES, Reference
from assay.metrics.statistics import FeatureStatistics, features_to_statistics


class Measures(BaseModel):
    """The metrics of one set of images; None where a metric was not measured.

    Every field is a column of `results.csv`, and its title heads the column of a table. `NAME_error` is the
    standard error of `NAME`. A new metric is a field here and a line in `_measures`.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)  # earlier versions had more metrics

    fd: float | None = Field(None, title="FD")
    kid: float | None = Field(None, title="KID")
    kid_error: float | None = None
    precision: float | None = Field(None, title="precision")
    recall: float | None = Field(None, title="recall")
    density: float | None = Field(None, title="density")
    coverage: float | None = Field(None, title="coverage")

    def cell(self, name: str) -> str:
        """A metric as text with its error, or nothing if it was not measured."""
        value, errors = getattr(self, name), (getattr(self, name + end, None) for end in ("_error", "_std"))
        if value is None:
            return ""
        return f"{value:.3g}" + "".join(f" ± {error:.2g}" for error in errors if error is not None)


class RangeMeasures(Measures):
    """One range of images, measured on its own."""

    first: int  # the first seed, or the first image of a folder


class Details(BaseModel):
    """What an evaluation depends on besides the images, and its ranges one by one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    extractor_sha256: str
    extractor_accuracy: float | None
    num_features: int
    generated: Name
    reference: Name
    reference_fingerprint: str
    num_reference: int | None
    sampler: SamplerSettings | None
    ranges: tuple[RangeMeasures, ...]
    training: Name | None  # where the nearest training images were looked for
    held_out: Name | None  # whose distances they are compared with
    memorisation: Memorisation | None  # over all ranges together
    assay_version: str


class Along(BaseModel):
    """The model after `step` steps: the distance of its samples, and the loss by which stopping is chosen."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    step: int
    fd: float | None = None
    held_out_loss: float | None = None


# Fields of files of earlier versions, and their errors.
_RETIRED = ["fd_infinity", "inception_score", "fd_step", "held_out_loss_paired", "held_out_loss_split"]
_RETIRED += ["held_out_loss_below", "held_out_loss_above"]


class Evaluation(Measures):
    """The means over all ranges, and what was measured; `details` are not known of a row of `results.csv`.

    Errors are means as well: the ranges share a reference, so averaging does not shrink them for certain.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_retired(cls, tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        return {name: value for name, value in tree.items() if name.removesuffix("_error") not in _RETIRED}

    fd_std: float | None = None  # standard deviation over the ranges (n - 1), None if there is one
    metric: Name = ""  # FID only for `inception`
    extractor: Name = ""
    num_images: int | None = None  # in each range
    held_out_loss: float | None = Field(None, title="held-out loss")  # nats per dimension, a stop per band
    held_out_loss_error: float | None = None  # standard error over the held-out images
    held_out_loss_images: int | None = None
    held_out_loss_step: int | None = None  # the one stop with the best loss on other held-out images
    held_out_loss_one_stop: float | None = None  # the loss with one stop for all levels, `held_out_loss_step`
    held_out_loss_final: float | None = None  # the loss at the end of training
    held_out_loss_final_error: float | None = None
    memorised: float | None = Field(None, title="memorised")  # share of the images
    details: Details | None = None
    bands: tuple[BandLoss, ...] = ()  # the held-out loss by bands of levels, each at its own stop
    held_out_loss_arrays: str | None = None  # SHA-256 of the file with the losses of each image
    held_out_loss_record: HeldOutLoss | None = Field(None, exclude=True)  # what that file holds
    along: tuple[Along, ...] = ()

    def __repr__(self) -> str:
        found = titles([self]) | ({"fd": self.metric} if self.fd is not None else {})
        cells = [f"{title} {self.cell(name)}" for name, title in found.items()]
        images = [f"{self.num_images:,} images"] if self.num_images else []
        return f"<{', '.join([*cells, *images])}>"

    __str__ = __repr__


NOT_COLUMNS = ("details", "bands", "held_out_loss_arrays", "held_out_loss_record", "along")  # of `results.csv`


def titles(measures: Iterable[Measures]) -> dict[str, str]:
    """Name and title of the metrics that at least one of these has."""
    measures = list(measures)
    fields = {name: field.title for each in measures for name, field in type(each).model_fields.items()}
    return {
        name: title
        for name, title in fields.items()
        if title is not None and any(getattr(each, name) is not None for each in measures)
    }


@dataclass(frozen=True)
class Measured:
    """The result, and the training image nearest to each generated one (None without training images)."""

    evaluation: Evaluation
    neighbours: Neighbours | None


def evaluate(
    generated: ImageSource,
    reference: Reference,
    extractor: Extractor,
    num_images: int | None = None,
    num_ranges: int = 1,
    fd_only: bool = False,
    training: Reference | None = None,
    held_out: Reference | None = None,
    sampler: SamplerSettings | None = None,
    progress: CountImages = lambda num_images: None,
) -> Measured:
    """Measure `num_ranges` ranges of `num_images` images each (None: all there are); no image is kept.

    `fd_only` leaves out what compares every image with every other. Copies are looked for among `training`
    images (default: the reference); too close is closer than `held_out` images are, which were not trained on
    (default: training images, each left out in turn). `sampler` is for the record.
    """
    num_images, training = num_images or len(generated) // num_ranges, training or reference
    _check(generated, [reference, training, held_out or reference], extractor, num_images, num_ranges)
    first = 0 if sampler is None else sampler.first_seed
    real, known = (None if fd_only else each.features for each in (reference, training))
    ranges, nearest = [], []
    for start in range(0, num_ranges * num_images, num_images):
        found = images_to_features(extractor, generated, torch.arange(start, start + num_images), progress)
        ranges.append(_measures(found, reference.statistics, real, first + start))
        if known is not None:
            nearest.append(nearest_neighbours(found, known))
    neighbours, memorised = None, None
    if known is not None:
        neighbours = Neighbours(*map(np.concatenate, zip(*map(astuple, nearest), strict=True)))
        fresh = None if held_out is None else held_out.features
        unseen = leave_one_out(known) if fresh is None else nearest_neighbours(fresh, known)
        memorised = memorisation(neighbours, unseen)
    details = Details(
        extractor_sha256=extractor.sha256,
        extractor_accuracy=extractor.accuracy,
        num_features=len(reference.statistics.mean),
        generated=generated.name,
        reference=reference.name,
        reference_fingerprint=reference.fingerprint,
        num_reference=reference.statistics.num_images,
        sampler=sampler,
        ranges=tuple(ranges),
        training=training.name if memorised else None,
        held_out=(held_out.name if held_out else "leave one out") if memorised else None,
        memorisation=memorised,
        assay_version=assay.__version__,
    )
    columns = {name: [getattr(part, name) for part in ranges] for name in Measures.model_fields}
    evaluation = Evaluation(
        **{name: None if None in values else statistics.fmean(values) for name, values in columns.items()},
        fd_std=statistics.stdev(columns["fd"]) if num_ranges > 1 else None,
        metric=extractor.metric,
        extractor=extractor.name,
        num_images=num_images,
        memorised=None if memorised is None else memorised.share,
        details=details,
    )
    return Measured(evaluation, neighbours)


def _check(
    generated: ImageSource, others: list[Reference], extractor: Extractor, num_images: int, num_ranges: int
) -> None:
    """Before any long work: is this going to be a measurement?"""
    check_enough(num_images, MIN_IMAGES, f"images of {generated.name} in each range", "num_images")
    check_enough(len(generated), num_ranges * num_images, f"images of {generated.name}", "num_images")
    num_features = extractor(generated.read(torch.tensor([0]))).shape[1]
    for real in others:
        shape = generated.image_shape if real.source is None else real.source.image_shape
        if generated.image_shape != shape:
            what = f"{generated.name} has images of shape {generated.image_shape}, {real.name} of {shape}"
            raise AssayError(what, cure="pack one of them at the size and colours of the other")
        if num_features != len(real.statistics.mean):
            what = f"{real.name} has {len(real.statistics.mean)} features, {extractor.name} {num_features}"
            raise AssayError(what, key="extractor", cure="choose the one that the reference was made with")


def _measures(
    found: np.ndarray, reference: FeatureStatistics, real: np.ndarray | None, first: int
) -> RangeMeasures:
    """The metrics of features (N, D): FD to the reference, and the others if its features are known."""
    fd = frechet_distance(features_to_statistics(found), reference)
    if real is None:
        return RangeMeasures(first=first, fd=fd)
    kid, overlap = kernel_distance(found, real), vars(manifold_overlap(found, real))
    return RangeMeasures(first=first, fd=fd, kid=kid.value, kid_error=kid.standard_error, **overlap)


def nearest_picture(
    generated: ImageSource, training: Reference, neighbours: Neighbours, num_images: int = 10
) -> Image:
    """The generated images closest to a training image, and these training images under them."""
    assert training.source is not None and training.index is not None, "neighbours are images of a source"
    closest = np.argsort(neighbours.distance, kind="stable")[:num_images]
    nearest = training.index[torch.from_numpy(neighbours.index[closest])]
    made, real = generated.read(torch.from_numpy(closest)), training.source.read(nearest)
    return captioned_rows([("generated", made), ("nearest\ntraining image", real)])


def with_held_out_loss(evaluation: Evaluation, record: HeldOutLoss) -> Evaluation:
    """The evaluation with a held-out loss."""
    loss = record.nats_per_dim
    return evaluation.model_copy(
        update={
            "held_out_loss": loss.value,
            "held_out_loss_error": loss.standard_error,
            "held_out_loss_images": len(record.index),
            "held_out_loss_record": record,
        }
    )


def with_band_losses(evaluation: Evaluation, found: BandLosses) -> Evaluation:
    """The evaluation with the losses of a run: each band at its best stop, all at one stop, and at the end."""
    final = found.at_end.nats_per_dim
    update = {
        "held_out_loss_final": final.value,
        "held_out_loss_final_error": final.standard_error,
        "held_out_loss_step": found.one_step,
        "held_out_loss_one_stop": found.with_one_stop.nats_per_dim.value,
        "bands": found.bands(),
    }
    return with_held_out_loss(evaluation, found.best).model_copy(update=update)


def save_evaluation(path: Path, evaluation: Evaluation) -> None:
    """Write the result as JSON, and next to it the held-out losses of each image, which it names by content."""
    if evaluation.held_out_loss_record is not None:
        save_held_out_loss(_arrays_path(path), evaluation.held_out_loss_record)
        evaluation = evaluation.model_copy(update={"held_out_loss_arrays": sha256(_arrays_path(path))})
    with write_whole(path) as partial:
        partial.write_text(evaluation.model_dump_json(indent=2) + "\n")


def load_arrays(path: Path, evaluation: Evaluation) -> Evaluation:
    """The evaluation in the JSON file `path` with the held-out losses of each image, if they are there."""
    arrays = _arrays_path(path)
    if evaluation.held_out_loss_arrays is None or not arrays.exists():
        return evaluation
    if sha256(arrays) != evaluation.held_out_loss_arrays:
        raise AssayError(f"does not belong to {path.name}", path=arrays, cure="measure again, or remove it")
    return evaluation.model_copy(update={"held_out_loss_record": load_held_out_loss(arrays)})


def _arrays_path(path: Path) -> Path:
    return path.with_suffix(".held_out.npz")


def compare(evaluations: Mapping[str, Evaluation]) -> list[str]:
    """The names of the evaluations, best first; an error unless all were measured in the same way."""
    (name, first), *others = evaluations.items()
    for other_name, other in others:
        pairs: list[tuple[Any, Any, Sequence[str]]] = [(first, other, ("metric", "extractor", "num_images"))]
        if first.details and other.details:
            pairs.append((first.details, other.details, ("extractor_sha256", "reference_fingerprint")))
        for here, there, names in pairs:
            for what in names:
                if (a := getattr(here, what)) != (b := getattr(there, what)):
                    message = f"{a} of {name}, {b} of {other_name}: they cannot be compared"
                    raise AssayError(message, key=what, cure="measure both alike")
        if first.held_out_loss_record and other.held_out_loss_record:
            first.held_out_loss_record.check_alike(other.held_out_loss_record)
    measure = "held_out_loss" if all(each.fd is None for each in evaluations.values()) else "fd"
    values = {name: getattr(each, measure) for name, each in evaluations.items()}
    return sorted(values, key=lambda name: math.inf if values[name] is None else values[name])
