"""The held-out loss: how well a model denoises images it never saw, in nats.

For data p and the model q whose exact denoiser is h (the I-MMSE identity: Guo, Shamai and Verdu 2005, Verdu
2010, Kong et al. 2023),

    KL(p || q) = integral of (mse_q(sigma) - mmse_p(sigma)) / sigma^2  d log sigma      (nats),
    mse_q(sigma) = E || h(x_0 + sigma eps, sigma) - x_0 ||^2                 (summed over dimensions).

The loss is the integral of mse_q / sigma^2 over a stated range of levels: lower is better, and between two
models the unknown mmse_p cancels, so the difference of their losses is the difference of their divergences.
It needs no samples, no extractor and no labels. It is a likelihood: it punishes memorising, and says little
about looks.

Levels lie in bands of equal width in log sigma, from one grey step of an 8-bit image (finer levels carry no
image) to 80. Each image is denoised once in each band, at a level spread evenly over the images, so that the
integral is unbiased for any number of bands. Levels and noise depend on (seed, image) alone: two models see the
same numbers, and their difference has a small error.

A noisy image x_tn = x_0 + sigma_tn z counts in the bands above its own level. With r = sigma_tn^2 / sigma_t^2,

    (1 - r) h(x_t) + r x_t - x_tn = (1 - r) (h(x_t) - x_0) - u,      u = x_tn - x_0 - r (x_t - x_0),

and u is Gaussian, uncorrelated with x_t - x_0 and hence independent of x_0 and x_t, of variance
sigma_tn^2 (1 - r) per dimension. Taking out that known excess leaves the error in x_0:

    E || h(x_t) - x_0 ||^2 = (E || (1 - r) h + r x_t - x_tn ||^2 - D sigma_tn^2 (1 - r)) / (1 - r)^2.

One stop does not fit all levels: low levels overfit long before high ones are learnt. `losses_by_band` gives
each band the stop that is best for it, chosen on one half of the held-out images and measured on the other.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, Field
from scipy import linalg, optimize
from torch import Tensor

from assay.archives import read_npz
from assay.checkpoint import Checkpoint, CheckpointInfo, load_checkpoint
from assay.data import ImageSource, usable
from assay.data.config import DataConfig
from assay.data.copies import check_overlap
from assay.data.view import View, image_seeds, stream, with_uniform_noise
from assay.denoise import Denoiser, check_converged, copy_to, x_tn_from_x_0
from assay.devices import spread
from assay.errors import AssayError, check_enough, check_same, warn
from assay.files import Name, decoding, write_whole
from assay.metrics.distance import Array, Measurement
from assay.noise import add_noise
from assay.sample import SeededNoise
from assay.settings import Record, Strict
from assay.train.folder import read_run

GREY_STEP = 2 / 255  # of an 8-bit image in [-1, 1]
MIN_IMAGES = 20  # that cover a band, for its loss to have a standard error
# A noisy image counts from here times its own level: the standard deviation of the excess that is taken out is
# sqrt(2 D) r / (1 - r), in nats per unit of log sigma, and grows without bound as sigma_t falls to sigma_tn.
_MARGIN = 1.25
_CPU_PIXELS = 2**16  # evaluated at once on a CPU: of 32x32 images 64 at a time go 1.4 times as fast as 1,024
SURELY = 3.0  # standard errors, as the level is chosen among many
_GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples fill [0, 1) evenly, whichever images are measured


class HeldOutConfig(Strict):
    """The range of levels, the number of bands in it, and the seed of the noise."""

    sigma_min: float = Field(GREY_STEP, gt=0, lt=1)
    sigma_max: float = Field(80.0, ge=1, allow_inf_nan=False)
    num_bands: int = Field(14, ge=1)
    seed: int = 0

    @property
    def width(self) -> float:
        """Of each band, in log sigma."""
        return math.log(self.sigma_max / self.sigma_min) / self.num_bands

    @property
    def edges(self) -> Array:
        """The levels (num_bands + 1,) at which one band ends and the next begins."""
        return np.geomspace(self.sigma_min, self.sigma_max, self.num_bands + 1)

    def levels(self, index: NDArray[np.int64]) -> Array:
        """The levels (N, num_bands) at which the images `index` (N,) are denoised, one in each band."""
        shift = torch.rand(self.num_bands, dtype=torch.float64, generator=stream(self.seed, "levels")).numpy()
        position = (shift + index[:, None] * _GOLDEN) % 1
        return self.sigma_min * np.exp((np.arange(self.num_bands) + position) * self.width)


def denoising_error(
    denoiser: Denoiser, x_tn: Tensor, sigma_tn: Tensor, sigma_t: Tensor, eps: Tensor, label: Tensor | None
) -> Tensor:
    """|| h(x_t) - x_0 ||^2 (B,), unbiased also where only `x_tn` (B, C, H, W) with its noise is known."""
    x_t = add_noise(x_tn, sigma_tn, sigma_t, eps)
    x_0_hat = denoiser(x_t, sigma_t.to(x_t.dtype), label)
    residual = (x_tn_from_x_0(x_0_hat, x_t, sigma_tn, sigma_t) - x_tn).double().flatten(1)
    known = 1 - (sigma_tn / sigma_t) ** 2
    return (residual.square().sum(1) - residual.shape[1] * sigma_tn**2 * known) / known**2


class HeldOutLoss(Record, frozen=True, extra="forbid", arbitrary_types_allowed=True):
    """A model's errors on held-out images, and all that is needed to compare it with another model.

    Losses and their parts are in nats per dimension.
    """

    model: Name
    held_out: Name
    fingerprint: str  # of the held-out images
    num_dims: int = Field(ge=1)
    config: HeldOutConfig
    info: CheckpointInfo | None = None  # what is known of the model's training
    index: NDArray[np.int64] = Field(exclude=True)  # (N,) which held-out images
    sigma_tn: Array = Field(exclude=True)  # (N,) their own noise
    errors: NDArray[np.float32] = Field(exclude=True)  # (N, num_bands): each band's share of an image's loss

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HeldOutLoss) or self.model_dump() != other.model_dump():
            return False
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in _ARRAYS)

    def __repr__(self) -> str:
        what = f"held-out loss of {self.model} on {len(self.index)} images of {self.held_out}"
        low = self.covers[0]
        which = f", of levels above {low:.3g} only, for their noise" if low > self.config.sigma_min else ""
        return f"<{what}: {self.nats_per_dim} nats per dimension{which}>"

    __str__ = __repr__

    @cached_property
    def nats_per_dim(self) -> Measurement:
        """The loss: the integral over all bands that are covered."""
        return self.part()

    def part(self, low: float = 0.0, high: float = math.inf) -> Measurement:
        """The part of the loss from the levels in [low, high)."""
        value, own = self._influence(low, high)
        return Measurement(value, float(np.linalg.norm(own)))

    def minus(self, other: "HeldOutLoss", low: float = 0.0, high: float = math.inf) -> Measurement:
        """How much higher (worse) the loss of this model is than another's on the same images and noise."""
        self.check_alike(other)
        return self.model_copy(update={"errors": self.errors - other.errors}).part(low, high)

    def split(self, other: "HeldOutLoss") -> float | None:
        """The level above which two models differ otherwise than below; None if they do not, or it is not sure.

        One is better below and the other above, or one is better on one side and no difference is sure beyond.
        """
        levels = self.config.edges[1:-1].tolist()
        parts = [(self.minus(other, 0.0, x).in_errors, self.minus(other, x).in_errors, x) for x in levels]
        turns = [(min(abs(below), abs(above)), x) for below, above, x in parts if below * above < 0]
        if turns and max(turns)[0] > SURELY:
            return max(turns)[1]
        ends = [x for below, above, x in parts if abs(below) > SURELY >= abs(above)]
        begins = [x for below, above, x in parts if abs(above) > SURELY >= abs(below)]
        return min(ends) if ends else max(begins, default=None)

    def check_alike(self, other: "HeldOutLoss") -> None:
        """Reject a loss on other images, or with other levels or noise."""
        for what in ("fingerprint", "config", "index", "sigma_tn"):
            if not np.array_equal(getattr(self, what), getattr(other, what)):
                message = f"{self.model} and {other.model} were not measured in the same way"
                raise AssayError(message, key=what, cure="measure both on the same images, with one config")

    def rates(self) -> Array:
        """(num_bands, 2): mse / sigma^2 per dimension, averaged over each band, and its standard error.

        The area under it over log sigma is the loss. It is 0 in bands that are not covered.
        """
        ends = pairwise([*self.config.edges[:-1], math.inf])
        return np.array([astuple(self.part(*band)) for band in ends]) / self.config.width

    @property
    def covers(self) -> tuple[float, float]:
        """The levels that are measured: the bands that at least `MIN_IMAGES` images are clean enough for."""
        return float(self.config.edges[:-1][self._covered.any(0)][0]), self.config.sigma_max

    @cached_property
    def _covered(self) -> NDArray[np.bool_]:
        """Which bands each image counts in (N, num_bands): those above its noise, if enough images do."""
        covered = _MARGIN * self.sigma_tn[:, None] <= self.config.edges[:-1]
        return covered & (covered.sum(0) >= MIN_IMAGES)

    def _influence(self, low: float, high: float) -> tuple[float, Array]:
        """A part of the loss is the sum over bands of the mean m over the n images that are clean enough.

        So image i adds (e_i - m) / n in each band that it counts in, up to the mean, and N / (N - 1) makes the
        sum of their squares unbiased. Sums of products of two models' are the covariance of their losses.
        """
        levels, covered = self.config.levels(self.index), self._covered
        inside = covered & (levels >= low) & (levels < high)
        count = covered.sum(0).clip(1)
        share = np.where(inside, self.errors.astype(np.float64), 0.0) / count / self.num_dims
        mean = share.sum(0)
        own = (share - covered * (mean / count)).sum(1)
        return float(mean.sum()), own * math.sqrt(len(own) / (len(own) - 1))


_ARRAYS = ("index", "sigma_tn", "errors")


def save_held_out_loss(path: Path, found: HeldOutLoss) -> None:
    """Write a loss as an npz: its arrays, and the rest as JSON in `about`."""
    arrays = {name: getattr(found, name) for name in _ARRAYS}
    with write_whole(path) as partial, open(partial, "wb") as file:
        np.savez_compressed(file, allow_pickle=False, about=np.array(found.model_dump_json()), **arrays)


def load_held_out_loss(path: Path) -> HeldOutLoss:
    """Read a loss written by `save_held_out_loss`."""
    arrays = read_npz(path)
    with decoding(path, "remove it, and measure again"):
        about = json.loads(str(arrays["about"]))
        found = HeldOutLoss.model_validate(about | {name: arrays[name] for name in _ARRAYS})
        shape = len(found.index), found.config.num_bands
        if (found.index.shape, found.sigma_tn.shape, found.errors.shape) != (shape[:1], shape[:1], shape):
            raise AssayError("its arrays do not belong together")
        return found


def held_out_loss(
    denoiser: Denoiser,
    source: ImageSource,
    config: HeldOutConfig = HeldOutConfig(),  # noqa: B008
    index: Tensor | None = None,
    wanted: Tensor | None = None,
    model: str = "model",
    batch_size: int = 1024,
    devices: Sequence[torch.device | str] = ("cpu",),
    progress: Callable[[int], None] = lambda num_images: None,
) -> HeldOutLoss:
    """Measure a model on the held-out images `index` (N,) of `source`, by default all, on `devices`.

    Images with a map of noise levels get noise up to their highest level first. A class-conditional denoiser
    (one with `num_classes`) gets the labels of the images. `wanted` (N, num_bands) leaves out some bands of
    some images, whose errors stay 0.
    """
    source = with_uniform_noise(usable(source))
    index = torch.arange(len(source)) if index is None else index
    sigma_tn, levels = source.sigma_tn[index].double(), torch.from_numpy(config.levels(index.numpy()))
    num_classes = getattr(denoiser, "num_classes", 0)
    top = float(config.edges[-2]) / _MARGIN
    what = f"images of {source.name} with noise of at most {top:.3g}"
    check_enough(int((sigma_tn <= top).sum()), MIN_IMAGES, what, "held_out")
    what, cure = f"the model and {source.name} differ in classes", "give images with the labels it knows"
    check_same(num_classes or source.num_classes, source.num_classes, what, key="held_out", cure=cure)
    covered = _MARGIN * sigma_tn[:, None] <= torch.from_numpy(config.edges[:-1])
    covered = covered if wanted is None else covered & wanted
    if torch.device(devices[0]).type == "cpu":
        batch_size = min(batch_size, max(1, _CPU_PIXELS // math.prod(source.image_shape[1:])))
    errors = torch.zeros_like(levels)
    copies = [denoiser] if len(devices) == 1 else [copy_to(denoiser, device) for device in devices]

    @torch.no_grad()
    def measure(rows: Tensor, device_number: int) -> int:
        device = devices[device_number]
        images = source.read(index[rows]).to(device)
        seeds = image_seeds(config.seed, index[rows]).tolist()
        eps = SeededNoise(seeds, (config.num_bands, *source.image_shape), device)()
        for pairs in covered[rows].nonzero().split(batch_size):  # (image, band)
            image, band = pairs.T
            chosen, own, sigma_t = rows[image], sigma_tn[rows[image]], levels[rows[image], band]
            label = source.label[index[chosen]].to(device) if num_classes else None
            x_tn, noise = images[image.to(device)], eps[image.to(device), band.to(device)]
            mse = denoising_error(copies[device_number], x_tn, own.to(device), sigma_t.to(device), noise, label)
            errors[chosen, band] = config.width * mse.cpu() / sigma_t**2
        return len(rows)

    parts = torch.arange(len(index)).split(max(1, batch_size // config.num_bands))
    for num_done in spread(measure, parts, len(devices)):
        progress(num_done)
    check_converged(errors.float(), model)
    arrays = {"index": index.numpy(), "sigma_tn": sigma_tn.numpy(), "errors": errors.float().numpy()}
    about = {"model": model, "held_out": source.name, "fingerprint": source.fingerprint, "config": config}
    return HeldOutLoss.model_validate(about | arrays | {"num_dims": math.prod(source.image_shape)})


def checkpoint_loss(checkpoint: Checkpoint | Path, source: ImageSource, **options: Any) -> HeldOutLoss:
    """Measure a checkpoint; `options` as for `held_out_loss`."""
    if isinstance(checkpoint, Path):
        return checkpoint_loss(
            load_checkpoint(checkpoint, to_measure=True), source, **{"model": checkpoint.name, **options}
        )
    what, cure = f"the model and {source.name} differ in shape", "give images of the size it was trained on"
    check_same(checkpoint.config.image_shape, source.image_shape, what, key="held_out", cure=cure)
    denoiser = checkpoint.denoiser.to(options.get("devices", ("cpu",))[0]).eval()
    return held_out_loss(denoiser, source, **options).model_copy(update={"info": checkpoint.info})


def check_unseen(trained_on: ImageSource | Path | None, held_out: ImageSource) -> None:
    """Reject held-out images that a model was trained on, given its training images or its run's folder.

    A warning tells where one cannot know.
    """
    why = "" if trained_on is not None else "the model does not know its training images"
    if isinstance(trained_on, Path):
        trained_on, why = _training_images(trained_on)
    if why:
        warn(f"Assay cannot tell whether images of {held_out.name} were trained on: {why}")
    if trained_on is not None and trained_on.image_shape == held_out.image_shape:
        try:
            check_overlap(_before_noise(trained_on), held_out)
        except AssayError as error:
            cure = "give images that it was not trained on"
            raise AssayError(error.what, path=held_out.name, key="held_out", cure=cure) from None


def _training_images(run: Path) -> tuple[ImageSource | None, str]:
    """The images that a run was trained on, if they are here; or why one cannot know."""
    if not (run / "config.json").is_file():
        return None, f"{run} is not the folder of a run, which knows its training images"
    record = read_run(run / "config.json")
    try:
        data = _data_of(record).prepared()
        images = data.open()
    except (OSError, ValueError):
        return None, f"the training images of {run} were not in a store, or it is gone"
    is_same = usable(images, data.seed).fingerprint == record["fingerprint"]["data"]
    return images, "" if is_same else f"the images that {run} was trained on have changed"


def set_aside(run: Path) -> ImageSource | None:
    """The images that a run set aside for evaluation, if it did."""
    path = run / "config.json"
    with decoding(path, "give held-out images"):
        data = _data_of(read_run(path)) if path.is_file() and (run / "snapshots").is_dir() else None
        return data.prepared().open_held_out() if data and data.held_out else None


def _data_of(record: Mapping[str, Any]) -> DataConfig:
    """The images of a run by its config.json."""
    return DataConfig.model_validate_json(json.dumps(record["config"]["data"]))


def _before_noise(source: ImageSource) -> ImageSource:
    """The images of a view without the noise that it adds."""
    if not isinstance(source, View):
        return source
    inner = _before_noise(source.source)
    return View(inner, source.index, inner.sigma_tn[source.index])


_NUM_STOPS = 8
# Images that choose the stop of a band: differences on the same noise are precise. In a trial of 120 clean and
# 1,080 noisy digits, 128 chose stops whose loss (3.60) is 0.003 nats above that of all images' choice.
_NUM_CHOOSING = 128


class BandLoss(BaseModel, frozen=True, extra="ignore"):
    """One band of levels [`low`, `high`) of one run: its best stop and its losses, in nats per dimension.

    If the best stop is the last, training, not data, is the limit there.
    """

    low: float
    high: float
    step: int
    loss: float
    error: float
    loss_at_end: float
    num_images: int


@dataclass(frozen=True)
class BandLosses:
    """The losses of a run with a stop per band of levels (`best`), with one stop for all, and at its end.

    All three are of the same half of the held-out images. `chosen_by` (num_stops, num_bands) are the losses
    of the other half after each of `steps`, by which the stops `step` (num_bands,) and `one_step` are chosen.
    """

    steps: tuple[int, ...]
    chosen_by: Array
    step: tuple[int, ...]
    one_step: int
    best: HeldOutLoss
    with_one_stop: HeldOutLoss
    at_end: HeldOutLoss

    def bands(self) -> tuple[BandLoss, ...]:
        """The bands that are covered, lowest first."""
        edges, num_images = self.best.config.edges, self.best._covered.sum(0)
        best, at_end = (found.rates() * found.config.width for found in (self.best, self.at_end))
        columns: dict[str, Any] = {"low": edges[:-1], "high": edges[1:], "step": self.step, "loss": best[:, 0]}
        columns |= {"error": best[:, 1], "loss_at_end": at_end[:, 0], "num_images": num_images}
        rows = ({name: column[band] for name, column in columns.items()} for band in np.flatnonzero(num_images))
        return tuple(BandLoss.model_validate(row) for row in rows)


def stopping_steps(num_steps: int) -> list[int]:
    """Steps after which to compare a run of `num_steps`: each 2^(2/3) times the one before, up to the last."""
    return sorted({max(1, round(num_steps * 2 ** (-2 * k / 3))) for k in range(_NUM_STOPS)})


def num_evaluations(num_images: int, num_stops: int = _NUM_STOPS) -> int:
    """Evaluations of the network by `losses_by_band` on `num_images` held-out images, at most."""
    num_bands, half = HeldOutConfig().num_bands, num_images // 2
    choosing = num_stops * math.ceil(half / _stride(half))
    return num_bands * (choosing + min(3, num_stops) * half)


def _stride(num_images: int) -> int:
    return max(1, num_images // _NUM_CHOOSING)


def losses_by_band(
    snapshots: Mapping[int, Path],
    held_out: ImageSource,
    config: HeldOutConfig = HeldOutConfig(),  # noqa: B008
    progress: Callable[[int], None] = lambda num_images: None,
    **options: Any,
) -> BandLosses:
    """The losses of a run, each band at its best stop, given its weights after some steps (`stopping_steps`).

    Even held-out images choose, at most about 128 of them for each band, and odd ones are measured. `progress`
    counts to `len(snapshots) * len(held_out)`; `options` as for `held_out_loss`.
    """
    steps, options = sorted(snapshots), options | {"config": config, "progress": progress}
    first, second = torch.arange(0, len(held_out), 2), torch.arange(1, len(held_out), 2)
    turn = torch.arange(len(first))[:, None] + torch.arange(config.num_bands)
    wanted = turn % _stride(len(first)) == 0
    chosen_by = []
    for step in steps:
        found = checkpoint_loss(snapshots[step], held_out, index=first, wanted=wanted, **options)
        seen = found._covered & wanted.numpy()
        chosen_by.append((found.errors / found.num_dims * seen).sum(0) / seen.sum(0).clip(1))
    losses, last = np.array(chosen_by, dtype=np.float64), steps[-1]
    one_step = steps[int(losses.sum(1).argmin())]
    best = [steps[at] if seen[:, band].any() else one_step for band, at in enumerate(losses.argmin(0))]

    measured = {}
    for step in sorted({*best, one_step, last}):
        bands = torch.tensor([step in (one_step, last, mine) for mine in best]).expand(len(second), -1)
        measured[step] = checkpoint_loss(snapshots[step], held_out, index=second, wanted=bands, **options)
    progress((len(steps) - len(measured)) * len(second))
    columns = np.stack([measured[step].errors[:, band] for band, step in enumerate(best)], 1)
    at_best = measured[last].model_copy(update={"errors": columns})
    return BandLosses(tuple(steps), losses, tuple(best), one_step, at_best, measured[one_step], measured[last])


def covariance(losses: Sequence[HeldOutLoss], low: float = 0.0, high: float = math.inf) -> Array:
    """The covariance (R, R) of models' losses in [low, high) over the held-out images, the same for all.

    For two models i and j, C_ii + C_jj - 2 C_ij is the squared error of their difference (`HeldOutLoss.minus`).
    """
    for other in losses[1:]:
        losses[0].check_alike(other)
    own = np.stack([each._influence(low, high)[1] for each in losses])
    return own @ own.T


def paired_errors(losses: Sequence[HeldOutLoss], low: float = 0.0, high: float = math.inf) -> list[float]:
    """The standard error of each loss in comparisons: of two models they add in squares to the error of the
    direct difference, as nearly as one number for each model can.

    Easy and hard images are so for every model, and that part of the error cancels. With V_ij the variance of
    the difference, the squares v_i minimise the sum over pairs of ((v_i + v_j) / V_ij - 1)^2. None is below a
    quarter of the smallest V_ij: models on a line, of which the middle one would get 0, are no less certain.
    """
    found = covariance(losses, low, high)
    if len(losses) == 1:
        return [math.sqrt(found[0, 0])]
    variance = np.diag(found)[:, None] + np.diag(found) - 2 * found
    scale = float(variance.max()) or 1.0
    variance = np.maximum(variance / scale, 1e-6)
    np.fill_diagonal(variance, np.inf)
    weight, least = 1 / variance, variance.min(1) / 4
    normal = np.square(weight) + np.diag(np.square(weight).sum(1) * (1 + 1e-6))  # two models get equal shares
    root = linalg.cholesky(normal)
    right = linalg.solve_triangular(root, weight.sum(1) - normal @ least, trans="T")
    squares = least + optimize.nnls(root, right)[0]
    return np.sqrt(scale * squares).tolist()
