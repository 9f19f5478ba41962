"""The held-out score: how well a model denoises images it never saw, in nats.

For data p and the model q whose exact denoiser is h (the I-MMSE identity: Guo, Shamai and Verdu 2005, Verdu
2010, Kong et al. 2023),

    KL(p || q) = integral of (mse_q(sigma) - mmse_p(sigma)) / sigma^2  d log sigma      (nats),
    mse_q(sigma) = E || h(x_0 + sigma eps, sigma) - x_0 ||^2                 (summed over dimensions).

The score is the integral of mse_q / sigma^2 over a stated range of levels: lower is better, and between two
models the unknown mmse_p cancels, so the difference of their scores is the difference of their divergences.
It needs no samples, no extractor and no labels. It is a likelihood: it punishes memorising, and says little
about looks.

Levels are stratified: each image is denoised once in each of `num_levels` equal intervals of log sigma, at a
level spread evenly over the images. So the integral is unbiased for any number of levels. Levels and noise
depend on (seed, image) alone, so that two models see the same numbers and their difference has a small error.

A noisy image x_tn = x_0 + sigma_tn z scores the levels above its own. With r = sigma_tn^2 / sigma_t^2,

    (1 - r) h(x_t) + r x_t - x_tn = (1 - r) (h(x_t) - x_0) - u,      u = x_tn - x_0 - r (x_t - x_0),

and u is Gaussian, uncorrelated with x_t - x_0 and hence independent of x_0 and x_t, of variance
sigma_tn^2 (1 - r) per dimension. Taking out that known excess leaves the error in x_0:

    E || h(x_t) - x_0 ||^2 = (E || (1 - r) h + r x_t - x_tn ||^2 - D sigma_tn^2 (1 - r)) / (1 - r)^2.
"""

import base64
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL.Image import Image
from pydantic import BaseModel, ConfigDict, Field, computed_field, model_validator
from torch import Tensor

from assay.checkpoint import CheckpointInfo, load_checkpoint
from assay.data import ImageSource, usable
from assay.data.view import image_seeds, stream, with_uniform_noise
from assay.denoise import Denoiser, copy_to, x_tn_from_x_0
from assay.devices import spread
from assay.figure import COLOURS, Panel, Series, draw
from assay.files import Name, naming, write_whole
from assay.metrics.distance import Estimate
from assay.noise import add_noise
from assay.sample import SeededNoise
from assay.train.average import average_checkpoint

Array = NDArray[np.float64]

MIN_IMAGES = 20  # that cover a level, for its error to have a standard error
# A noisy image scores from here times its own level: the standard deviation of the excess that is taken out is
# sqrt(2 D) r / (1 - r), in nats per unit of log sigma, and grows without bound as sigma_t falls to sigma_tn.
_MARGIN = 1.25
_NUM_STOPS, _NUM_LEVELS = 6, 8
_GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples fill [0, 1) evenly, whichever images are scored


class ScoreConfig(BaseModel):
    """The range of levels, the number of levels at which each image is denoised, and the seed of the noise."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    sigma_min: float = Field(0.002, gt=0)
    sigma_max: float = Field(80.0, gt=0)
    num_levels: int = Field(_NUM_LEVELS, ge=1)
    seed: int = 0

    @model_validator(mode="after")
    def _check(self) -> "ScoreConfig":
        if not self.sigma_min < self.sigma_max < math.inf:
            raise ValueError(f"sigma_min = {self.sigma_min:g} is not below sigma_max = {self.sigma_max:g}")
        return self

    @property
    def width(self) -> float:
        """Of each interval of log sigma."""
        return math.log(self.sigma_max / self.sigma_min) / self.num_levels

    def levels(self, index: Tensor) -> Array:
        """The levels (N, num_levels) at which the images `index` (N,) are denoised, one in each interval."""
        shift = torch.rand(self.num_levels, dtype=torch.float64, generator=stream(self.seed, "levels")).numpy()
        position = (shift + index.numpy()[:, None] * _GOLDEN) % 1
        return self.sigma_min * np.exp((np.arange(self.num_levels) + position) * self.width)


@dataclass(frozen=True)
class Curve:
    """Error by level: `value` (num_bins,) is mse / sigma^2 per dimension, averaged over a bin around `sigma`.

    The area under it over log sigma is the score. `num_images` (num_bins,) cover the middle of each bin.
    """

    sigma: Array
    value: Array
    standard_error: Array
    num_images: NDArray[np.int64]


class Score(BaseModel):
    """A model's errors on held-out images, and all that is needed to compare it with another model.

    Scores and their parts are in nats per dimension.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")  # the summaries in a file are computed again

    model: Name
    held_out: Name
    fingerprint: str  # of the held-out images
    num_dims: int
    config: ScoreConfig
    index: tuple[int, ...]  # (N,) which held-out images
    sigma_tn: tuple[float, ...]  # (N,) their own noise
    errors: str  # (N, num_levels) float32 in base64: each level's share of an image's score, in nats
    info: CheckpointInfo | None = None  # what is known of the model's training

    def __repr__(self) -> str:
        images = f"{len(self.index)} images of {self.held_out}"
        value = f"{self.nats_per_dim} nats per dimension, lower is better"
        return f"<score of {self.model} on {images}: {value}>"

    __str__ = __repr__

    def plot(self, *others: "Score") -> Image:
        """A figure of the error at each noise level, of this model and of `others` on the same images."""
        panel = Panel(
            "Denoising error", "noise level", "error / sigma^2, per dimension", log_x=True, log_y=True
        )
        for score, colour in zip((self, *others), COLOURS, strict=False):
            self._check_alike(score)
            curve = score.curve(16)
            panel.series.append(Series(score.model, "line", curve.sigma, curve.value, colour=colour))
        return draw([panel])

    @computed_field  # type: ignore[prop-decorator]
    @property
    def nats_per_dim(self) -> Estimate:
        """The score: the integral over all levels that are covered."""
        return self.part()

    @computed_field  # type: ignore[prop-decorator]
    @property
    def bits_per_dim(self) -> Estimate:
        """The same in bits."""
        return Estimate(*(x / math.log(2) for x in (self._whole.value, self._whole.standard_error)))

    @computed_field  # type: ignore[prop-decorator]
    @property
    def nats(self) -> Estimate:
        """The same for a whole image: the unit of the identity."""
        return Estimate(*(x * self.num_dims for x in (self._whole.value, self._whole.standard_error)))

    @computed_field  # type: ignore[prop-decorator]
    @property
    def covers(self) -> tuple[float, float]:
        """The levels that are scored: those that at least `MIN_IMAGES` of the images are clean enough for."""
        return max(self.config.sigma_min, self._floor_order[MIN_IMAGES - 1]), self.config.sigma_max

    def part(self, low: float = 0.0, high: float = math.inf) -> Estimate:
        """The part of the score from the levels in [low, high)."""
        return self._integrate(self._errors, low, high)

    def minus(self, other: "Score", low: float = 0.0, high: float = math.inf) -> Estimate:
        """How much higher (worse) this model scores than another on the same images and noise."""
        self._check_alike(other)
        return self._integrate(self._errors - other._errors, low, high)

    def _check_alike(self, other: "Score") -> None:
        for what in ("fingerprint", "config", "index", "sigma_tn"):
            if getattr(self, what) != getattr(other, what):
                raise ValueError(
                    f"{self.model} and {other.model} were not scored in the same way ({what} differs): score "
                    "both on the same held-out images with the same settings"
                )

    def curve(self, num_bins: int = 32, minus: "Score | None" = None) -> Curve:
        """Error by level, in bins of equal width in log sigma over the levels that are covered.

        With `minus`, the difference from another model on the same images and noise.
        """
        low, high = self.covers
        edges = np.geomspace(low, high, num_bins + 1)
        ends = zip(edges[:-1], [*edges[1:-1], math.inf], strict=True)
        parts = [self.part(*bin) if minus is None else self.minus(minus, *bin) for bin in ends]
        width = math.log(high / low) / num_bins
        middle = np.sqrt(edges[:-1] * edges[1:])
        return Curve(
            sigma=middle,
            value=np.array([part.value for part in parts]) / width,
            standard_error=np.array([part.standard_error for part in parts]) / width,
            num_images=np.searchsorted(self._floor_order, middle, side="right"),
        )

    def take(self, chosen: NDArray[np.bool_]) -> "Score":
        """The score of some of the images, `chosen` (N,)."""
        columns = {
            name: tuple(value for value, keep in zip(getattr(self, name), chosen, strict=True) if keep)
            for name in ("index", "sigma_tn")
        }
        return _record(self.model_dump() | columns, self._errors[chosen])

    @cached_property
    def _whole(self) -> Estimate:
        return self.part()

    @cached_property
    def _errors(self) -> Array:
        flat = np.frombuffer(base64.b64decode(self.errors), dtype="<f4")
        return flat.reshape(len(self.index), self.config.num_levels).astype(np.float64)

    @cached_property
    def _levels(self) -> Array:
        return self.config.levels(torch.tensor(self.index))

    @cached_property
    def _floor(self) -> Array:
        return _MARGIN * np.array(self.sigma_tn)  # the lowest level that each image scores

    @cached_property
    def _floor_order(self) -> Array:
        return np.sort(self._floor)

    def _integrate(self, errors: Array, low: float, high: float) -> Estimate:
        """Sum `errors` (N, num_levels) over the levels in [low, high), each averaged over the images there.

        At a level sigma there are count(sigma) images, so the sum is of y_i = sum of e_il / count(sigma_il).
        An image with a floor f has the expectation c(f) = integral of mse / count above f, and the variance of
        the sum is that of the y_i around their c(f_i). Without noisy images c is the mean of the y_i.
        """
        low, levels = max(low, self.covers[0]), self._levels
        count = np.searchsorted(self._floor_order, levels, side="right").clip(1)
        floor = self._floor
        share = np.where((levels >= low) & (levels < high) & (levels >= floor[:, None]), errors / count, 0.0)
        order = np.argsort(levels, axis=None)
        above = np.append(np.cumsum((share / count).ravel()[order][::-1])[::-1], 0.0)
        expected = above[np.searchsorted(levels.ravel()[order], floor)]
        num_images, mine = len(floor), share.sum(1)
        variance = num_images / (num_images - 1) * np.square(mine - expected).sum()
        return Estimate(float(mine.sum()) / self.num_dims, math.sqrt(variance) / self.num_dims)


def _record(fields: dict[str, object], errors: Array) -> Score:
    return Score.model_validate(fields | {"errors": base64.b64encode(errors.astype("<f4").tobytes()).decode()})


def score(
    denoiser: Denoiser,
    source: ImageSource,
    config: ScoreConfig = ScoreConfig(),  # noqa: B008
    index: Tensor | None = None,
    model: str = "model",
    batch_size: int = 1024,
    devices: Sequence[torch.device | str] = ("cpu",),
    progress: Callable[[int], None] = lambda num_images: None,
) -> Score:
    """Score a model on the held-out images `index` (N,) of `source`, by default all, on `devices`.

    Images with a map of noise levels get noise up to their highest level first. At most `batch_size` images
    are denoised at a time. A class-conditional denoiser (one with `num_classes`)
    gets the labels of the images. `progress` is called with the number of images done.
    """
    source = with_uniform_noise(usable(source))
    index = torch.arange(len(source)) if index is None else index
    sigma_tn = source.sigma_tn[index].double()
    num_usable = int((_MARGIN * sigma_tn < config.sigma_max).sum())
    if num_usable < MIN_IMAGES:
        raise ValueError(
            f"{source.name}: {num_usable} images have noise below {config.sigma_max / _MARGIN:g}; a score "
            f"needs at least {MIN_IMAGES}"
        )
    num_classes = getattr(denoiser, "num_classes", 0)
    if num_classes and num_classes != source.num_classes:
        raise ValueError(
            f"the model knows {num_classes} classes, the images of {source.name} {source.num_classes}: give "
            "held-out images with the labels it was trained with"
        )
    num_dims, levels = math.prod(source.image_shape), torch.from_numpy(config.levels(index))
    covered = levels >= _MARGIN * sigma_tn[:, None]
    errors = torch.zeros(levels.shape, dtype=torch.float64)
    copies = [denoiser] if len(devices) == 1 else [copy_to(denoiser, device) for device in devices]

    @torch.no_grad()
    def measure(rows: Tensor, device_number: int) -> int:
        device = devices[device_number]
        images = source.read(index[rows]).to(device)
        seeds = image_seeds(config.seed, index[rows]).tolist()
        eps = SeededNoise(seeds, (config.num_levels, *source.image_shape), device)()
        for pairs in covered[rows].nonzero().split(batch_size):  # (image, level)
            image, level = pairs.T
            chosen = index[rows[image]]
            x_tn, own = images[image.to(device)], sigma_tn[rows[image]].to(device)
            sigma_t = levels[rows[image], level].to(device)
            x_t = add_noise(x_tn, own, sigma_t, eps[image.to(device), level.to(device)])
            label = source.label[chosen].to(device) if num_classes else None
            x_0_hat = copies[device_number](x_t, sigma_t.to(x_t.dtype), label)
            residual = x_tn_from_x_0(x_0_hat, x_t, own, sigma_t) - x_tn
            known = 1 - (own / sigma_t) ** 2
            mse = (residual.double().square().flatten(1).sum(1) - num_dims * own**2 * known) / known**2
            errors[rows[image], level] = (config.width * mse / sigma_t**2).cpu()
        return len(rows)

    parts = torch.arange(len(index)).split(max(1, batch_size // config.num_levels))
    for num_done in spread(measure, parts, len(devices)):
        progress(num_done)
    fields = dict(
        model=model,
        held_out=source.name,
        fingerprint=source.fingerprint,
        num_dims=num_dims,
        config=config,
        index=tuple(index.tolist()),
        sigma_tn=tuple(sigma_tn.tolist()),
    )
    return _record(fields, errors.numpy())


def score_checkpoint(path: Path, source: ImageSource, **options: Any) -> Score:
    """Score a checkpoint; `options` as for `score`."""
    loaded = load_checkpoint(path)
    if loaded.config.image_shape != source.image_shape:
        raise ValueError(
            f"{path} makes images of shape {loaded.config.image_shape}, those of {source.name} have "
            f"{source.image_shape}: score it on images of the size and colours it was trained on"
        )
    denoiser = loaded.denoiser.to(options.get("devices", ("cpu",))[0]).eval()
    found = score(denoiser, source, **{"model": path.name, **options})
    return found.model_copy(update={"info": loaded.info})


# Of the network by `find_stopping` with default settings, for each held-out image: a half of them chooses among
# the stops, the other half is scored twice.
NUM_EVALUATIONS = (_NUM_STOPS * (_NUM_LEVELS // 4) + 2 * _NUM_LEVELS) / 2


class Stopping(BaseModel):
    """When a run should have been stopped: models trained on few images get worse long before the others.

    The step is chosen on one half of the held-out images, by their scores `chosen_by` after each of `steps`, in
    nats per dimension. `best` and `final`, the scores there and at the end, are of the other half.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: tuple[int, ...]
    chosen_by: tuple[float, ...]
    step: int
    best: Score
    final: Score


def stopping_steps(num_steps: int) -> list[int]:
    """Steps after which to compare a run of `num_steps`: each 2^(2/3) times the one before, up to the last."""
    return sorted({max(1, round(num_steps * 2 ** (-2 * k / 3))) for k in range(_NUM_STOPS)})


def find_stopping(
    snapshots: Mapping[int, Path],
    source: ImageSource,
    config: ScoreConfig = ScoreConfig(),  # noqa: B008
    progress: Callable[[int], None] = lambda num_images: None,
    **options: Any,
) -> Stopping:
    """The best stopping time of a run, given its weights after some steps; `options` as for `score`.

    Choosing takes a quarter of the levels: differences on the same images and noise are precise.
    """
    first, second = torch.arange(0, len(source), 2), torch.arange(1, len(source), 2)
    quick = config.model_copy(update={"num_levels": max(1, config.num_levels // 4)})
    steps = sorted(snapshots)
    options["progress"] = progress
    values = [
        score_checkpoint(snapshots[step], source, config=quick, index=first, **options).nats_per_dim.value
        for step in steps
    ]
    step = steps[int(np.argmin(values))]
    best, final = (
        score_checkpoint(snapshots[at], source, config=config, index=second, **options)
        for at in (step, steps[-1])
    )
    return Stopping(steps=tuple(steps), chosen_by=tuple(values), step=step, best=best, final=final)


@dataclass(frozen=True)
class ChosenAverage:
    """The averages of a run's weights that were compared: their lengths, their scores, and the best one.

    They are compared on one half of the held-out images, `chosen_by` in nats per dimension; `best` is the score
    of the other half.
    """

    lengths: tuple[float, ...]
    chosen_by: tuple[float, ...]
    length: float
    best: Score


def choose_average(
    run_dir: Path,
    source: ImageSource,
    output: Path,
    lengths: Sequence[float] = (0.02, 0.04, 0.06, 0.08, 0.1, 0.13, 0.16, 0.2, 0.25),
    step: int | None = None,
    progress: Callable[[int], None] = lambda num_images: None,
    **options: Any,
) -> ChosenAverage:
    """Write the average of a run's weights with the best held-out score to `output`.

    See `assay.train.average` for their `lengths`; `options` as for `score`.
    """
    first, second = torch.arange(0, len(source), 2), torch.arange(1, len(source), 2)
    quick, options["progress"] = ScoreConfig(num_levels=_NUM_LEVELS // 4), progress
    values = []
    with tempfile.TemporaryDirectory(prefix="assay-") as folder:
        for length in lengths:
            path = Path(folder) / "average.safetensors"
            average_checkpoint(run_dir, length, path, step)
            found = score_checkpoint(path, source, config=quick, index=first, **options)
            values.append(found.nats_per_dim.value)
    length = lengths[int(np.argmin(values))]
    average_checkpoint(run_dir, length, output, step)
    best = score_checkpoint(output, source, index=second, **options)
    return ChosenAverage(tuple(lengths), tuple(values), length, best)


def paired_errors(scores: Sequence[Score], low: float = 0.0) -> list[float]:
    """The standard error of each score (its part above `low`) without what all models share.

    Easy and hard images are so for every model. What remains is the error of the difference from the mean over
    the models. Of two models these add in squares to the error of their difference, or to more.
    """
    first, *others = scores
    for other in others:
        first._check_alike(other)
    shared = sum(each._errors for each in scores) / len(scores)
    inflation = math.sqrt(len(scores) / max(len(scores) - 1, 1))  # the mean has a share of every model
    return [inflation * each._integrate(each._errors - shared, low, math.inf).standard_error for each in scores]


def save_score(path: Path, found: Score) -> None:
    """Write a score as JSON."""
    with write_whole(path) as partial:
        partial.write_text(found.model_dump_json(indent=2) + "\n")


def load_score(path: Path) -> Score:
    """Read a score written by `save_score`."""
    with naming(path, "give a held-out score of `assay evaluate`"):
        found = Score.model_validate_json(path.read_bytes())
        found.nats_per_dim  # noqa: B018  # its numbers belong together
        return found
