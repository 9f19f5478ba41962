"""Evaluation: generated images against a reference, with everything needed to say what was measured.

The paper's protocol: several disjoint ranges of images (seeds 0-49,999, 50,000-99,999, 100,000-149,999), each
measured on its own, then mean and standard deviation. The number of images is part of the result, because the
distance depends on it: `compare` rejects unequal counts.
"""

import hashlib
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL.Image import Image
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

import assay
from assay.archives import read_npy
from assay.data import ImageSource
from assay.data.picture import captioned_rows
from assay.data.view import View, usable_from, with_uniform_noise
from assay.files import Name, hold_lock, sha256, write_whole, write_whole_directory
from assay.metrics.distance import (
    Estimate,
    Memorisation,
    Neighbours,
    check_extrapolation,
    frechet_distance,
    frechet_infinity,
    inception_score,
    kernel_distance,
    leave_one_out,
    manifold_overlap,
    memorisation,
    nearest_neighbours,
)
from assay.metrics.extract import Extractor, Features, Images, Progress, images_to_features
from assay.metrics.generated import SamplerSettings
from assay.metrics.score import Score, Stopping
from assay.metrics.statistics import (
    FeatureStatistics,
    features_to_statistics,
    load_statistics,
    save_statistics,
)

MIN_IMAGES = 20


@dataclass(frozen=True)
class Reference:
    """Real images as an extractor sees them; without `features` (N, D) only the Frechet distance is known."""

    name: str
    fingerprint: str
    statistics: FeatureStatistics
    features: np.ndarray | None = None
    source: ImageSource | None = None
    index: Tensor | None = None  # of the images of `source` that the features belong to

    @property
    def frequencies(self) -> list[float] | None:
        """How often each class occurs, or None if there are no classes."""
        if self.source is None or self.source.num_classes == 0:
            return None
        label = self.source.label[self.source.label >= 0]
        return label.bincount(minlength=self.source.num_classes).tolist()


def reference_from_statistics(path: Path, extractor: Extractor) -> Reference:
    """A reference of ours or EDM's from an npz. EDM's do not say so, but are of `inception`."""
    found = load_statistics(path)
    if found.extractor_sha256 not in (None, extractor.sha256):
        raise ValueError(f"{path} was made with another extractor than this {extractor.name}: make it again")
    return Reference(path.name, sha256(path), found)


def reference_from_images(
    source: ImageSource,
    extractor: Extractor,
    cache: Path,
    batch_size: int = 128,
    progress: Progress = lambda num_images: None,
    devices: Sequence[torch.device] = (),
    noisy: bool = False,
) -> Reference:
    """Features and statistics of the clean images of a store, from `cache` if they were taken before.

    They are computed on `devices`, by default the one that the extractor is on. `noisy` takes the noisy images
    instead, to compare generated images with the same noise with them (`assay.metrics.generated.Noised`).
    """
    known_noise = (source.sigma_tn > 0) & (usable_from(source) == source.sigma_tn)
    index = torch.nonzero(known_noise if noisy else usable_from(source) == 0)[:, 0]
    if len(index) < MIN_IMAGES:
        kind = "noisy" if noisy else "clean"
        others = "" if noisy else "; noisy images do not count, since a good model does not look like them"
        raise ValueError(
            f"{source.name} has {len(index)} {kind} images: a reference needs at least {MIN_IMAGES}{others}"
        )
    if noisy:
        source = with_uniform_noise(View(source, index, source.sigma_tn[index], name=f"{source.name}, noisy"))
        index = torch.arange(len(source))
    key = hashlib.sha256(f"{extractor.sha256} {source.fingerprint}".encode()).hexdigest()[:16]
    folder = cache / f"features-{extractor.name}-{key}"
    if not folder.is_dir():
        # A second process waits here, then uses what the first one wrote.
        with hold_lock(cache / f".{folder.name}.lock", "", math.inf):
            if not folder.is_dir():
                features = images_to_features(extractor, source, index, batch_size, progress, devices).features
                with write_whole_directory(folder) as partial:
                    np.save(partial / "features.npy", features)
                    (partial / "features.sha256").write_text(sha256(partial / "features.npy"))
                    found = replace(features_to_statistics(features), extractor_sha256=extractor.sha256)
                    save_statistics(partial / "statistics.npz", found)
    features_file, checksum = folder / "features.npy", folder / "features.sha256"
    if checksum.exists() and sha256(features_file) != checksum.read_text():
        raise ValueError(f"{features_file} is damaged: remove {folder}, and it is computed again")
    known = load_statistics(folder / "statistics.npz")
    return Reference(source.name, source.fingerprint, known, read_npy(features_file), source, index)


class Measures(BaseModel):
    """The metrics of one set of images; None where a metric was not measured.

    Every field is a column of `results.csv`, and its title heads the column of a table. `NAME_error` is the
    standard error of `NAME`. A new metric is a field here and a line in `measure`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    fd: float | None = Field(None, title="FD")
    fd_infinity: float | None = Field(None, title="FD at infinity")
    fd_infinity_error: float | None = None
    kid: float | None = Field(None, title="KID")
    kid_error: float | None = None
    precision: float | None = Field(None, title="precision")
    recall: float | None = Field(None, title="recall")
    density: float | None = Field(None, title="density")
    coverage: float | None = Field(None, title="coverage")
    inception_score: float | None = Field(None, title="Inception score")
    inception_score_error: float | None = None

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
    """The model after `step` steps: the distance of its samples, and the score by which stopping is chosen."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    step: int
    fd: float | None = None
    score: float | None = None


class Evaluation(Measures):
    """The means over all ranges, and what was measured; `details` are not known of a row of `results.csv`.

    Errors are means as well: the ranges share a reference, so averaging does not shrink them for certain.
    """

    fd_step: int | None = None  # the step of the weights that were sampled, if not the last
    fd_std: float | None = None  # standard deviation over the ranges (n - 1), None if there is one
    metric: Name = ""  # FID only for `inception`
    extractor: Name = ""
    num_images: int | None = None  # in each range
    score: float | None = Field(None, title="score")  # held-out score, nats per dimension, at `score_step`
    score_error: float | None = None  # standard error over the held-out images
    score_paired_error: float | None = None  # the same without what all models of a study share
    score_split: float | None = None  # a noise level, and the parts of the score below and above it
    score_below: float | None = None
    score_above: float | None = None
    score_above_error: float | None = None  # of comparisons within a study, as `score_paired_error`
    score_images: int | None = None
    score_step: int | None = None  # the stopping time with the best score on other held-out images
    score_final: float | None = None  # the score at the end of training
    score_final_error: float | None = None
    memorised: float | None = Field(None, title="memorised")  # share of the images
    details: Details | None = None
    score_record: Score | None = None
    along: tuple[Along, ...] = ()

    def __repr__(self) -> str:
        found = titles([self]) | ({"fd": self.metric} if self.fd is not None else {})
        cells = [f"{title} {self.cell(name)}" for name, title in found.items()]
        images = [f"{self.num_images:,} images"] if self.num_images else []
        return f"<{', '.join([*cells, *images])}>"

    __str__ = __repr__


NOT_COLUMNS = ("details", "score_record", "along")  # of `results.csv`


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
    generated: Images,
    reference: Reference,
    extractor: Extractor,
    num_images: int | None = None,
    num_ranges: int = 1,
    infinity: bool = False,
    training: Reference | None = None,
    held_out: Reference | None = None,
    quantile: float = 0.05,
    sampler: SamplerSettings | None = None,
    batch_size: int = 128,
    progress: Progress = lambda num_images: None,
    devices: Sequence[torch.device] = (),
    fd_only: bool = False,
) -> Measured:
    """Measure `num_ranges` ranges of `num_images` images each (None: all there are); no image is kept.

    `infinity` adds the distance extrapolated to infinitely many images. The memorisation check looks for
    nearest images in `training` (default: the reference) and compares with `held_out` (default: training
    images, each left out in turn). `sampler` is for the record. Batches are spread over `devices`, by default
    the one that the extractor is on. `fd_only` leaves out what compares every image with every other.
    """
    num_images = len(generated) // max(num_ranges, 1) if num_images is None else num_images
    training = reference if training is None else training
    others = [reference, training] + ([] if held_out is None else [held_out])
    _check(generated, others, extractor, num_images, num_ranges, infinity)
    first = 0 if sampler is None else sampler.first_seed
    ranges, nearest = [], []
    for start in range(0, num_ranges * num_images, num_images):
        index = torch.arange(start, start + num_images)
        found = images_to_features(extractor, generated, index, batch_size, progress, devices)
        ranges.append(measure(found, reference, extractor, first + start, infinity, fd_only))
        if training.features is not None and not fd_only:
            nearest.append(nearest_neighbours(found.features, training.features))
    neighbours, memorised = None, None
    if training.features is not None and not fd_only:
        neighbours = Neighbours(
            np.concatenate([part.index for part in nearest]),
            np.concatenate([part.distance for part in nearest]),
        )
        if held_out is None or held_out.features is None:
            fresh = leave_one_out(training.features)
        else:
            fresh = nearest_neighbours(held_out.features, training.features)
        memorised = memorisation(neighbours, fresh, quantile)
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
        training=None if memorised is None else training.name,
        held_out=None if memorised is None else "leave one out" if held_out is None else held_out.name,
        memorisation=memorised,
        assay_version=assay.__version__,
    )
    evaluation = Evaluation(
        **_means(ranges),
        fd_std=statistics.stdev(part.fd or 0.0 for part in ranges) if num_ranges > 1 else None,
        metric=extractor.metric,
        extractor=extractor.name,
        num_images=num_images,
        memorised=None if memorised is None else memorised.share,
        details=details,
    )
    return Measured(evaluation, neighbours)


def _means(ranges: Sequence[RangeMeasures]) -> dict[str, Any]:
    """The mean of each metric, and of each error, over the ranges."""
    columns = {name: [getattr(part, name) for part in ranges] for name in Measures.model_fields}
    return {name: None if None in values else statistics.fmean(values) for name, values in columns.items()}


def _check(
    generated: Images,
    others: list[Reference],
    extractor: Extractor,
    num_images: int,
    num_ranges: int,
    infinity: bool,
) -> None:
    """Before any long work: is this going to be a measurement?"""
    if num_ranges < 1:
        raise ValueError(f"num_ranges = {num_ranges}: need at least 1")
    if num_images < MIN_IMAGES:
        raise ValueError(
            f"{generated.name}: {num_images} image(s) in each of {num_ranges} range(s) are too few to measure; "
            f"give at least {MIN_IMAGES}, better thousands"
        )
    if len(generated) < num_images * num_ranges:
        raise ValueError(
            f"{generated.name} has {len(generated)} images, not the {num_ranges} x {num_images} asked for: "
            "make more, or ask for fewer"
        )
    num_features = extractor(generated.read(torch.tensor([0])))[0].shape[1]
    for real in others:
        if real.source is not None and generated.image_shape != real.source.image_shape:
            raise ValueError(
                f"{generated.name} has images of shape {generated.image_shape}, {real.name} of "
                f"{real.source.image_shape}: pack one of them at the size and colours of the other"
            )
        if num_features != len(real.statistics.mean):
            raise ValueError(
                f"{real.name} has {len(real.statistics.mean)} features, {extractor.name} {num_features}: "
                "choose the extractor that the reference was made with"
            )
    if infinity:
        check_extrapolation(num_images, num_features)


def measure(
    generated: Features,
    reference: Reference,
    extractor: Extractor,
    first: int = 0,
    infinity: bool = False,
    fd_only: bool = False,
) -> RangeMeasures:
    """All metrics of one set of features against the reference, or FD alone."""
    real, found = None if fd_only else reference.features, generated.features
    logits = generated.logits if extractor.name == "inception" else None
    overlap = None if real is None else manifold_overlap(found, real)
    shares = ("precision", "recall", "density", "coverage")
    return RangeMeasures(
        first=first,
        fd=frechet_distance(features_to_statistics(found), reference.statistics),
        **_named("fd_infinity", frechet_infinity(found, reference.statistics) if infinity else None),
        **_named("kid", None if real is None else kernel_distance(found, real)),
        **({} if overlap is None else {name: getattr(overlap, name) for name in shares}),
        **_named("inception_score", None if logits is None else inception_score(logits)),
    )


def _named(name: str, estimate: Estimate | None) -> dict[str, Any]:
    """An estimate as the two fields of a record."""
    return {} if estimate is None else {name: estimate.value, f"{name}_error": estimate.standard_error}


def nearest_picture(
    generated: Images, training: Reference, neighbours: Neighbours, num_images: int = 10
) -> Image:
    """The generated images closest to a training image, and these training images under them."""
    if training.source is None or training.index is None:
        raise ValueError("the reference is a file of statistics: give the training images as a store")
    closest = np.argsort(neighbours.distance, kind="stable")[:num_images]
    nearest = training.index[torch.from_numpy(neighbours.index[closest])]
    rows = [
        ("generated", generated.read(torch.from_numpy(closest))),
        ("nearest\ntraining image", training.source.read(nearest)),
    ]
    return captioned_rows(rows)


def with_score(evaluation: Evaluation, record: Score, split: float | None = None) -> Evaluation:
    """The evaluation with a held-out score, and its parts below and above the level `split`."""
    parts = {} if split is None else {"score_above": record.part(split).value, "score_split": split}
    if split is not None and split > record.covers[0]:  # else nothing below is covered
        parts["score_below"] = record.part(high=split).value
    found = _named("score", record.nats_per_dim) | parts
    return evaluation.model_copy(update=found | {"score_images": len(record.index), "score_record": record})


def with_stopping(evaluation: Evaluation, found: Stopping, split: float | None) -> Evaluation:
    """The evaluation with the score at the best stopping time, and at the end of training."""
    update = _named("score_final", found.final.nats_per_dim) | {"score_step": found.step}
    return with_score(evaluation, found.best, split).model_copy(update=update)


def save_evaluation(path: Path, evaluation: Evaluation) -> None:
    """Write the result as JSON."""
    with write_whole(path) as partial:
        partial.write_text(evaluation.model_dump_json(indent=2) + "\n")


def compare(evaluations: Mapping[str, Evaluation]) -> list[str]:
    """The names of the evaluations, best first; an error unless all were measured in the same way."""
    (name, first), *others = evaluations.items()
    for other_name, other in others:
        pairs: list[tuple[str, BaseModel, BaseModel]] = [
            (what, first, other) for what in ("metric", "extractor", "num_images")
        ]
        if first.details and other.details:
            pairs += [(w, first.details, other.details) for w in ("extractor_sha256", "reference_fingerprint")]
        for what, here, there in pairs:
            if (a := getattr(here, what)) != (b := getattr(there, what)):
                raise ValueError(
                    f"{name} and {other_name} cannot be compared: {what} is {a} and {b}; measure both alike"
                )
    for _, other in others:
        if first.score_record and other.score_record:
            first.score_record.minus(other.score_record)  # an error if they were not scored alike
    measure = "score" if all(each.fd is None for each in evaluations.values()) else "fd"
    return sorted(evaluations, key=lambda name: _or_infinity(getattr(evaluations[name], measure)))


def _or_infinity(value: float | None) -> float:
    return math.inf if value is None else value
