"""Evaluation: generated images against a reference, with everything needed to say what was measured.

The paper's protocol: several disjoint ranges of images (seeds 0-49,999, 50,000-99,999, 100,000-149,999), each
measured on its own, then mean and standard deviation. The number of images is part of the result, because the
distance depends on it: `compare` rejects unequal counts.
"""

import math
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, Field

import assay
from assay.data import ImageSource
from assay.errors import check_enough, check_same
from assay.files import Name, check_sha256, sha256, write_text
from assay.metrics.distance import features_to_statistics, frechet_distance, kernel_distance, precision_recall
from assay.metrics.extract import MIN_IMAGES, CountImages, Extractor, Reference, images_to_features
from assay.metrics.generated import SamplerSettings
from assay.metrics.held_out import BandLoss, BandLosses, HeldOutLoss, load_held_out_loss, save_held_out_loss
from assay.settings import Record


class Measures(Record, extra="ignore", frozen=True):
    """The metrics of one set of images; None where a metric was not measured.

    Every field is a column of `results.csv`, and its title heads the column of a table. `NAME_error` is the
    standard error of `NAME`. A new metric is a field here and a line in `_measures`.
    """

    fd: float | None = Field(None, title="FD")
    kid: float | None = Field(None, title="KID")
    kid_error: float | None = None
    precision: float | None = Field(None, title="precision")
    recall: float | None = Field(None, title="recall")

    def error(self, name: str) -> float | None:
        """The standard error of a metric, or of a distance the deviation over ranges of images, if known."""
        fields = dict(self)
        return fields.get(f"{name}_error", fields.get(f"{name}_std"))

    def cell(self, name: str) -> str:
        """A metric as text with its error, or nothing if it was not measured."""
        value, error = getattr(self, name), self.error(name)
        return "" if value is None else f"{value:.3g}" + ("" if error is None else f" ± {error:.2g}")


class RangeMeasures(Measures):
    """One range of images, measured on its own."""

    first: int  # the first seed, or the first image of a folder


class Details(BaseModel, extra="ignore", frozen=True):
    """What an evaluation depends on besides the images, and its ranges one by one."""

    extractor_sha256: str
    extractor_accuracy: float | None
    num_features: int
    generated: Name
    reference: Name
    reference_fingerprint: str
    num_reference: int | None
    sampler: SamplerSettings | None
    ranges: tuple[RangeMeasures, ...]
    assay_version: str


class Along(BaseModel, extra="forbid", frozen=True):
    """The model after `step` steps: the distance of its samples, and the loss by which stopping is chosen."""

    step: int
    fd: float | None = None
    held_out_loss: float | None = None


class Evaluation(Measures):
    """The means over all ranges, and what was measured; `details` are not known of a row of `results.csv`.

    Errors are means as well: the ranges share a reference, so averaging does not shrink them for certain.
    """

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
    details: Details | None = None
    bands: tuple[BandLoss, ...] = ()  # the held-out loss by bands of levels, each at its own stop
    held_out_loss_arrays: str | None = None  # SHA-256 of the file with the losses of each image
    held_out_loss_record: HeldOutLoss | None = Field(None, exclude=True)  # what that file holds
    along: tuple[Along, ...] = ()

    def title(self, name: str) -> str:
        """What a metric is called; FD after its extractor."""
        return self.metric or "FD" if name == "fd" else str(Evaluation.model_fields[name].title)

    def __repr__(self) -> str:
        cells = [f"{self.title(name)} {self.cell(name)}" for name in titles([self])]
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


def evaluate(
    generated: ImageSource,
    reference: Reference,
    extractor: Extractor,
    num_images: int | None = None,
    num_ranges: int = 1,
    fd_only: bool = False,
    sampler: SamplerSettings | None = None,
    progress: CountImages = lambda num_images: None,
) -> Evaluation:
    """Measure `num_ranges` ranges of `num_images` images each (None: all); `sampler` is for the record."""
    num_images = num_images or len(generated) // num_ranges
    check_enough(num_images, MIN_IMAGES, f"images of {generated.name} in each range", "num_images")
    check_enough(len(generated), num_ranges * num_images, f"images of {generated.name}", "num_images")
    shape = generated.image_shape if reference.source is None else reference.source.image_shape
    what, cure = f"{generated.name} and {reference.name} differ in shape", "pack both at one size and colour"
    check_same(generated.image_shape, shape, what, cure=cure)
    found, wanted = extractor(generated.read(torch.tensor([0]))).shape[1], len(reference.statistics.mean)
    what, cure = f"{extractor.name} and {reference.name} differ in features", "choose that of the reference"
    check_same(found, wanted, what, key="extractor", cure=cure)
    ranges, first_seed = [], 0 if sampler is None else sampler.first_seed
    for start in range(0, num_ranges * num_images, num_images):
        features = images_to_features(extractor, generated, torch.arange(start, start + num_images), progress)
        ranges.append(RangeMeasures(first=first_seed + start, **_measures(features, reference, fd_only)))
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
        assay_version=assay.__version__,
    )
    columns = {name: [getattr(part, name) for part in ranges] for name in Measures.model_fields}
    return Evaluation(
        **{name: None if None in values else statistics.fmean(values) for name, values in columns.items()},
        fd_std=statistics.stdev(columns["fd"]) if num_ranges > 1 else None,
        metric=extractor.metric,
        extractor=extractor.name,
        num_images=num_images,
        details=details,
    )


def _measures(found: np.ndarray, reference: Reference, fd_only: bool) -> dict[str, float]:
    """The metrics of features (N, D): FD to the reference, and the others if its features are known."""
    fd = frechet_distance(features_to_statistics(found), reference.statistics)
    if fd_only or (real := reference.features) is None:
        return {"fd": fd}
    kid, (precision, recall) = kernel_distance(found, real), precision_recall(found, real)
    return {
        "fd": fd, "kid": kid.value, "kid_error": kid.standard_error, "precision": precision, "recall": recall
    }  # fmt: skip


def with_held_out_loss(evaluation: Evaluation, found: HeldOutLoss | BandLosses) -> Evaluation:
    """The evaluation with a held-out loss; of a run each band at its best stop, all at one, and at the end."""
    record = found if isinstance(found, HeldOutLoss) else found.best
    update: dict[str, Any] = {
        "held_out_loss": record.nats_per_dim.value,
        "held_out_loss_error": record.nats_per_dim.standard_error,
        "held_out_loss_images": len(record.index),
        "held_out_loss_record": record,
    }
    if isinstance(found, BandLosses):
        update |= {
            "held_out_loss_final": found.at_end.nats_per_dim.value,
            "held_out_loss_final_error": found.at_end.nats_per_dim.standard_error,
            "held_out_loss_step": found.one_step,
            "held_out_loss_one_stop": found.with_one_stop.nats_per_dim.value,
            "bands": found.bands(),
        }
    return evaluation.model_copy(update=update)


def save_evaluation(path: Path, evaluation: Evaluation) -> None:
    """Write the result as JSON, and next to it the held-out losses of each image, which it names by content."""
    if evaluation.held_out_loss_record is not None:
        save_held_out_loss(_arrays_path(path), evaluation.held_out_loss_record)
        evaluation = evaluation.model_copy(update={"held_out_loss_arrays": sha256(_arrays_path(path))})
    write_text(path, evaluation.model_dump_json(indent=2) + "\n")


def load_arrays(path: Path, evaluation: Evaluation) -> Evaluation:
    """The evaluation in the JSON file `path` with the held-out losses of each image, if they are there."""
    arrays = _arrays_path(path)
    if evaluation.held_out_loss_arrays is None or not arrays.exists():
        return evaluation
    what, cure = f"does not belong to {path.name}", "measure again, or remove it"
    check_sha256(arrays, evaluation.held_out_loss_arrays, what, cure=cure)
    return evaluation.model_copy(update={"held_out_loss_record": load_held_out_loss(arrays)})


def _arrays_path(path: Path) -> Path:
    return path.with_suffix(".held_out.npz")


def compare(evaluations: Mapping[str, Evaluation]) -> list[str]:
    """The names of the evaluations, best first; an error unless all were measured in the same way."""
    (name, first), *others = evaluations.items()
    here = _protocol(first)
    for other_name, other in others:
        for what, value in _protocol(other).items():
            message = f"{name} and {other_name} cannot be compared"
            check_same(here.get(what, value), value, message, key=what, cure="measure both alike")
        if first.held_out_loss_record and other.held_out_loss_record:
            first.held_out_loss_record.check_alike(other.held_out_loss_record)
    measure = "held_out_loss" if all(each.fd is None for each in evaluations.values()) else "fd"
    values = {name: getattr(each, measure) for name, each in evaluations.items()}
    return sorted(values, key=lambda name: math.inf if values[name] is None else values[name])


def _protocol(found: Evaluation) -> dict[str, Any]:
    """What must be the same of two results, as far as it is known."""
    known = found.model_dump(include={"metric", "extractor", "num_images"})
    if found.details:
        known |= found.details.model_dump(include={"extractor_sha256", "reference_fingerprint"})
    return known
