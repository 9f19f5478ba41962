"""Sampling: follow the probability flow from noise to an image.

    dx / dsigma = (x - D(x, sigma)) / sigma                              (equation 2)

The caller owns the sigma grid, a decreasing tensor that ends with 0; stepping onto 0 returns the
denoiser's prediction from the level before. So truncated sampling (Appendix, Algorithm 2) is only a
grid: one whose last level before 0 is sigma_tn returns D(x, sigma_tn) exactly.

`sample_posterior` starts from a noisy image instead and returns a clean image that could be behind it;
`flow_down` follows the flow from a noisy image, without chance.

Images own their seeds: image 17 is the same bits in any batch size.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from assay.denoise import Denoiser, check_label, check_label_shape
from assay.noise import per_image

Solver = Literal["euler", "heun", "multistep"]
Precision = Literal["32", "64", "bf16"]
Level = float | Literal["auto"]  # a noise level, or the training data's

_NO_CHURN = "churn disturbs the flow that the multistep solver follows: use solver = heun or euler"


def edm_sigmas(num_steps: int, sigma_min: float = 0.002, sigma_max: float = 80.0, rho: float = 7.0) -> Tensor:
    """EDM's grid (num_steps + 1,): sigma^(1/rho) falls linearly from sigma_max to sigma_min, then 0.

    With `sigma_min` = sigma_tn this is the grid of truncated sampling. float64.
    """
    return torch.cat([_rho_ramp(sigma_max, sigma_min, num_steps, rho), torch.zeros(1, dtype=torch.float64)])


def refined_sigmas(
    num_steps: int,
    sigma_tn: float,
    num_extra: int = 0,
    sigma_min: float = 0.002,
    sigma_max: float = 80.0,
    rho: float = 7.0,
) -> Tensor:
    """EDM's grid with sigma_tn on it and `num_extra` more steps below it (the paper's configuration C).

    (num_steps + num_extra + 1,), strictly decreasing. Below sigma_tn only clean images taught the
    denoiser; more steps there trade its larger error against less discretisation error.
    """
    if not sigma_min < sigma_tn < sigma_max:
        raise ValueError(
            f"sigma_tn = {sigma_tn:g} is not between {sigma_min:g} and {sigma_max:g}, the grid's ends"
        )
    if num_steps < 3 or num_extra < 0:
        raise ValueError(f"num_steps = {num_steps}, num_extra = {num_extra}: need at least 3 and at least 0")
    power = 1 / rho
    position = (sigma_max**power - sigma_tn**power) / (sigma_max**power - sigma_min**power)
    num_above = min(max(round(position * (num_steps - 1)), 1), num_steps - 2)  # steps that end on sigma_tn
    above = _rho_ramp(sigma_max, sigma_tn, num_above + 1, rho)
    below = _rho_ramp(sigma_tn, sigma_min, num_steps - num_above + num_extra, rho)
    return torch.cat([above, below[1:], torch.zeros(1, dtype=torch.float64)])


def _rho_ramp(first: float, last: float, num_levels: int, rho: float) -> Tensor:
    if num_levels < 2:
        raise ValueError(f"num_steps = {num_levels}: a grid needs at least 2 steps")
    if not 0 < last < first < math.inf or not rho > 0:
        raise ValueError(f"levels {first:g} to {last:g}, rho = {rho:g}: levels must fall and stay > 0, rho > 0")
    position = torch.linspace(0, 1, num_levels, dtype=torch.float64)
    ramp = (first ** (1 / rho) + position * (last ** (1 / rho) - first ** (1 / rho))) ** rho
    ramp[0], ramp[-1] = first, last  # the ends exactly, not up to rounding
    return ramp


@dataclass(frozen=True)
class Churn:
    """Noise added back before each step (EDM's stochastic sampler), between the levels `low` and `high`."""

    amount: float
    low: float = 0.0
    high: float = math.inf
    noise: float = 1.0

    def raised(self, sigma: float, num_steps: int) -> float:
        """The level to return to before stepping down from `sigma`."""
        if not self.low <= sigma <= self.high:
            return sigma
        return sigma * (1 + min(self.amount / num_steps, math.sqrt(2) - 1))


def solve(
    denoiser: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    solver: Solver = "heun",
    label: Tensor | None = None,
    churn: Churn | None = None,
    noise: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Integrate the flow along `sigmas` (num_steps + 1,) from `x` (B, ...) at sigmas[0] to sigmas[-1].

    Euler's method is of first order. Heun's is of second order and evaluates the denoiser twice in each step
    that does not end on 0. "multistep" is of second order with one evaluation a step (see `flow_step`).
    `churn` needs `noise`, a callable that returns unit noise of x's shape, and a solver without memory.
    """
    if sigmas.ndim != 1 or len(sigmas) < 2:
        raise ValueError(
            f"sigmas has shape {tuple(sigmas.shape)}; expected (num_steps + 1,), at least 2 levels"
        )
    if churn is not None and noise is None:
        raise ValueError("churn adds noise: give `noise`, a callable that returns unit noise like x")
    if churn is not None and solver == "multistep":
        raise ValueError(_NO_CHURN)
    levels = sigmas.tolist()
    before: tuple[Tensor, float] | None = None

    def predict(x: Tensor, sigma: float) -> Tensor:
        return denoiser(x, torch.full((len(x),), sigma, dtype=x.dtype, device=x.device), label)

    for sigma, sigma_next in zip(levels[:-1], levels[1:], strict=True):
        if churn is not None and noise is not None:
            raised = churn.raised(sigma, len(levels) - 1)
            x = x + math.sqrt(raised**2 - sigma**2) * churn.noise * noise()
            sigma = raised
        x_0_hat = predict(x, sigma)
        if sigma_next == 0:
            return x_0_hat
        slope = (x - x_0_hat) / sigma
        match solver:
            case "euler":
                x = x + (sigma_next - sigma) * slope
            case "heun":
                x_next = x + (sigma_next - sigma) * slope
                slope_next = (x_next - predict(x_next, sigma_next)) / sigma_next
                x = x + (sigma_next - sigma) * (slope + slope_next) / 2
            case "multistep":
                x = flow_step(x, x_0_hat, sigma, sigma_next, before)
                before = x_0_hat, sigma
    return x


Sigma = TypeVar("Sigma", float, Tensor)


def flow_step(
    x: Tensor, x_0_hat: Tensor, sigma: Sigma, sigma_next: Sigma, before: tuple[Tensor, Sigma] | None = None
) -> Tensor:
    """One step of the flow from `sigma` to `sigma_next` > 0 by DPM-Solver++ (2M), from `x` and D(x, sigma).

    x_next = q x + (1 - q) (D + h / (2 h_before) (D - D_before)),    q = sigma_next / sigma, h = -log q.

    `before` holds the prediction and the level one step earlier; without it the step is of first order. It
    is exact where the prediction stays the same. Levels are numbers, or tensors that broadcast with `x`.
    """
    ratio = sigma_next / sigma
    if before is not None:
        x_0_before, sigma_before = before
        x_0_hat = x_0_hat + _log(ratio) / (2 * _log(sigma / sigma_before)) * (x_0_hat - x_0_before)
    return ratio * x + (1 - ratio) * x_0_hat


def _log(value: Sigma) -> Sigma:
    return value.log() if isinstance(value, Tensor) else math.log(value)


def check_sigmas(sigmas: Tensor) -> None:
    """Reject a grid that does not fall strictly to a level >= 0. Reads values: for a grid on the CPU."""
    if not bool(sigmas.isfinite().all()) or not bool((sigmas.diff() < 0).all()) or bool(sigmas.min() < 0):
        raise ValueError(f"sigmas must fall strictly and stay >= 0; got {sigmas.tolist()}")


class SeededNoise:
    """Unit noise for a batch in which each image draws from its own seed."""

    def __init__(self, seeds: Sequence[int], image_shape: Sequence[int], device: torch.device | str) -> None:
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.image_shape = tuple(image_shape)
        self.device = device

    def __call__(self) -> Tensor:
        """(B, *image_shape). Drawn on the CPU, so that every device starts from the same noise."""
        images = [torch.randn(self.image_shape, generator=generator) for generator in self.generators]
        return torch.stack(images).to(self.device)


@dataclass(frozen=True)
class SampledBatch:
    """Finished images (B, ...) and the seeds they grew from."""

    seeds: list[int]
    images: Tensor


@torch.no_grad()
def generate(
    denoiser: Denoiser,
    seeds: Sequence[int],
    image_shape: Sequence[int],
    sigmas: Tensor,
    solver: Solver = "heun",
    label: Tensor | None = None,
    churn: Churn | None = None,
    batch_size: int = 64,
    device: torch.device | str = "cpu",
    precision: Precision = "32",
) -> Iterator[SampledBatch]:
    """Yield one image per seed, in batches, so that the caller can show progress and save as it goes.

    `label` (num_seeds,) names the class of each seed's image. The same seed gives the same bits in
    every batch size on the CPU. With `precision` "64" the flow is integrated in float64 (as EDM does) around
    a network in float32; with "bf16" the network computes in bfloat16 where that is safe.
    """
    if label is not None and len(label) != len(seeds):
        raise ValueError(f"label has {len(label)} entries for {len(seeds)} seeds; expected one per seed")
    check_sigmas(sigmas)
    num_classes = getattr(denoiser, "num_classes", None)  # a plain function need not tell
    if label is not None and num_classes is not None:
        check_label_shape(label, num_classes, len(seeds))
        check_label(label, num_classes)

    def predict(x_t: Tensor, sigma_t: Tensor, label: Tensor | None = None) -> Tensor:
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=precision == "bf16"):
            return denoiser(x_t.float(), sigma_t.float(), label).to(x_t.dtype)

    for index, padded in padded_batches(len(seeds), batch_size):
        noise = SeededNoise([seeds[i] for i in padded], image_shape, device)
        batch_label = None if label is None else label[padded].to(device)
        start = noise().to(torch.float64 if precision == "64" else torch.float32) * sigmas[0].item()
        images = solve(predict, start, sigmas, solver, batch_label, churn, noise).float()
        yield SampledBatch([seeds[i] for i in index], images[: len(index)])


class Guided(nn.Module):
    """A denoiser pushed away from a weaker one: D_weak + scale (D - D_weak), for scale > 1.

    The weaker one is `guide` (auto-guidance: a smaller network, or an earlier snapshot of the same run), or
    the denoiser itself without the class (classifier-free guidance).
    """

    def __init__(self, denoiser: Denoiser, scale: float, guide: Denoiser | None = None) -> None:
        super().__init__()
        self.denoiser, self.scale, self.guide = denoiser, scale, guide
        self.num_classes = getattr(denoiser, "num_classes", None)

    def forward(self, x_t: Tensor, sigma_t: Tensor, label: Tensor | None = None) -> Tensor:
        """`x_t` (B, ...), `sigma_t` (B,), `label` (B,) -> guided `x_0_hat` (B, ...)."""
        guide, guide_label = (self.denoiser, None) if self.guide is None else (self.guide, label)
        weak = guide(x_t, sigma_t, guide_label if getattr(guide, "num_classes", 1) else None)
        return weak + self.scale * (self.denoiser(x_t, sigma_t, label) - weak)


def padded_batches(num_images: int, batch_size: int) -> Iterator[tuple[list[int], list[int]]]:
    """Positions of batches, and the same padded with copies of the last, whose images are to be dropped.

    Matrix products of fewer than four rows a thread sum in another order. Padded, an image has the same bits
    in every batch size on the CPU.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size = {batch_size}: need at least 1")
    smallest = 8 * torch.get_num_threads()
    for start in range(0, num_images, batch_size):
        index = list(range(start, min(start + batch_size, num_images)))
        yield index, index + index[-1:] * (smallest - len(index))


@torch.no_grad()
def sample_posterior(
    denoiser: Denoiser,
    x_tn: Tensor,
    sigma_tn: Tensor,
    noise: Callable[[], Tensor],
    num_steps: int = 18,
    sigma_min: float = 0.002,
    rho: float = 7.0,
    label: Tensor | None = None,
) -> Tensor:
    """A draw of x_0 given x_tn (B, ...), images with noise of levels `sigma_tn` (B,) > 0.

    The reverse diffusion started at x_tn ends in such a draw. Between levels a > b it is a step of the flow
    from a to b, independent noise back to a, and again the flow from a to b: a symmetric splitting, whose
    error falls with the square of the number of steps. Flows that follow each other are joined, so each
    step costs two evaluations. The levels of an image fall from sigma_tn to `sigma_min` as in EDM's grid; an
    image at or below `sigma_min` gets its posterior mean. `noise` returns unit noise of x_tn's shape.
    """
    if num_steps < 2:
        raise ValueError(f"num_steps = {num_steps}: need at least 2")
    low = sigma_tn.clamp(max=sigma_min)
    # Powers as exp and log: torch rounds a power differently at the end of a batch than inside it.
    first, last = ((level.cpu().double().log() / rho).exp() for level in (sigma_tn, low))
    position = torch.linspace(0, 1, num_steps, dtype=first.dtype)[:, None]
    levels = ((first + position * (last - first)).log() * rho).exp().to(sigma_tn)
    levels[0], levels[-1] = sigma_tn, low  # exactly, not up to rounding

    x = _heun_step(denoiser, x_tn, levels[0], levels[1], label)
    for above, here, below in zip(levels[:-1], levels[1:], [*levels[2:], levels[-1]], strict=True):
        x = x + per_image((above**2 - here**2).clamp(min=0).sqrt(), x) * noise()
        x = _heun_step(denoiser, x, above, below, label)
    return denoiser(x, levels[-1], label)


@torch.no_grad()
def flow_down(
    denoiser: Denoiser,
    x_tn: Tensor,
    sigma_tn: Tensor,
    sigma_end: Tensor,
    num_steps: int = 16,
    label: Tensor | None = None,
) -> Tensor:
    """Follow the flow from images x_tn (B, ...) at levels `sigma_tn` (B,) down to `sigma_end` (B,) > 0.

    Heun steps of equal ratio. The flow carries the law at sigma_tn to the law at `sigma_end`; an image whose
    two levels are equal stays as it is.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps = {num_steps}: need at least 1")
    log_ratio = (sigma_end.cpu().double() / sigma_tn.cpu().double()).log()
    position = torch.linspace(0, 1, num_steps + 1, dtype=torch.float64)[:, None]
    levels = (sigma_tn.cpu().double() * (position * log_ratio).exp()).to(sigma_tn)
    levels[0], levels[-1] = sigma_tn, sigma_end  # exactly, not up to rounding
    x = x_tn
    for sigma, sigma_next in zip(levels[:-1], levels[1:], strict=True):
        x = _heun_step(denoiser, x, sigma, sigma_next, label)
    return x


def _heun_step(
    denoiser: Denoiser, x: Tensor, sigma: Tensor, sigma_next: Tensor, label: Tensor | None
) -> Tensor:
    """One step of the flow from levels `sigma` (B,) to `sigma_next` (B,) > 0, each image at its own."""

    def slope(x: Tensor, sigma: Tensor) -> Tensor:
        return (x - denoiser(x, sigma, label)) / per_image(sigma, x)

    step, first = per_image(sigma_next - sigma, x), slope(x, sigma)
    return x + step * (first + slope(x + step * first, sigma_next)) / 2


def spread_labels(frequencies: Sequence[float] | Tensor, seeds: Sequence[int]) -> Tensor:
    """A class for each seed (num_seeds,), in the proportions of `frequencies` (num_classes,).

    Seed s sits at the fractional part of s times the golden ratio, which fills [0, 1) evenly from any start:
    every range of seeds has the right proportions, and a seed's class does not depend on the range.
    """
    share = torch.as_tensor(frequencies, dtype=torch.float64)
    position = (torch.tensor(seeds, dtype=torch.float64) * 0.6180339887498949) % 1
    return torch.searchsorted((share / share.sum()).cumsum(0)[:-1].contiguous(), position, right=True)


class SampleConfig(BaseModel):
    """How to sample, in one place: for `assay sample`, pictures of a run, evaluation and studies.

    `truncate_at` = sigma_tn stops there and returns the prediction (Appendix, Algorithm 2). `refine_at` =
    sigma_tn puts it on the grid and spends `num_extra` more steps below it (configuration C). Both may be
    "auto": the lowest, or the highest, noise level of the training data (see `for_levels`).

    `guidance` > 1 pushes images away from those of a weaker model (see `Guided`): the checkpoint `guide`, or
    the same model without its class. `Checkpoint.sampler` applies it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    num_steps: int = Field(18, ge=2, description="Steps from noise to image.")
    solver: Solver = Field(
        "heun", description="How to step; multistep needs half of heun's evaluations for the same steps."
    )
    sigma_min: float = Field(0.002, gt=0, description="Lowest level of the grid.")
    sigma_max: float = Field(80.0, gt=0, description="Level at which sampling starts.")
    rho: float = Field(7.0, gt=0, description="Spacing of the grid: higher puts more steps at low levels.")
    truncate_at: Level | None = Field(
        None,
        description="Stop at this level and return the prediction; auto is the training data's lowest level.",
    )
    refine_at: Level | None = Field(
        None, description="Put this level on the grid; auto is the highest level of the training data."
    )
    num_extra: int = Field(0, ge=0, description="More steps below refine_at.")
    churn: float = Field(0.0, ge=0, description="Noise added back at each step (EDM's S_churn).")
    churn_low: float = Field(0.0, ge=0, description="Lowest level at which noise is added back (S_min).")
    churn_high: float = Field(  # the default lies above every grid; JSON has no infinity
        1000.0, gt=0, description="Highest level at which noise is added back (S_max)."
    )
    churn_noise: float = Field(1.0, ge=0, description="Scale of the noise added back (S_noise).")
    guidance: float = Field(
        1.0, ge=1, description="Push images away from those of a weaker model: 1 is off, 2 strong."
    )
    guide: Path | None = Field(
        None, description="The weaker model's checkpoint. Default: this model without the class."
    )
    precision: Precision = Field(
        "32", description="64: steps in float64, as EDM; bf16: the network in bfloat16."
    )

    def model_post_init(self, context: Any, /) -> None:
        """Reject settings that contradict each other."""
        if self.solver == "multistep" and self.churn:
            raise ValueError(_NO_CHURN)
        if self.guide is not None and self.guidance == 1:
            raise ValueError(f"guide = {self.guide} has no effect at guidance = 1: give e.g. guidance = 2")

    def for_levels(self, sigma_tn: Iterable[float]) -> "SampleConfig":
        """The same for a model of data with these noise levels: "auto" becomes a number. Checks the grid."""
        noisy, chosen = [level for level in sigma_tn if level > 0], {}
        for name, choose in (("truncate_at", min), ("refine_at", max)):
            if getattr(self, name) == "auto":
                if not noisy:
                    raise ValueError(
                        f"{name} = auto: no noise level of the training data is known; give a number"
                    )
                chosen[name] = choose(noisy)
        found = self.model_copy(update=chosen)
        found.sigmas()
        return found

    def sigmas(self) -> Tensor:
        """The grid these settings describe."""
        low, high = self.sigma_min, self.sigma_max
        for name in ("truncate_at", "refine_at"):
            level = getattr(self, name)
            if level == "auto":
                raise ValueError(f"{name} = auto is a level of the training data: call `for_levels` first")
            lowest = low if name == "refine_at" else 0
            if level is not None and not lowest < level < high:
                raise ValueError(
                    f"{name} = {level:g} is not between {lowest:g} and sigma_max = {high:g}, where sampling "
                    "starts: give the noise level of the training data, e.g. 0.2"
                )
        if self.truncate_at is not None and self.refine_at is not None:
            raise ValueError("`truncate_at` stops at sigma_tn, `refine_at` continues below it: choose one")
        if self.num_extra and self.refine_at is None:
            raise ValueError(f"num_extra = {self.num_extra} adds steps below `refine_at`: set it too")
        if not low < high:
            raise ValueError(f"sigma_min = {low:g} is not below sigma_max = {high:g}")
        if isinstance(self.truncate_at, float):
            return edm_sigmas(self.num_steps, self.truncate_at, high, self.rho)
        if isinstance(self.refine_at, float):
            return refined_sigmas(self.num_steps, self.refine_at, self.num_extra, low, high, self.rho)
        return edm_sigmas(self.num_steps, low, high, self.rho)

    def generate(
        self,
        denoiser: Denoiser,
        seeds: Sequence[int],
        image_shape: Sequence[int],
        label: Tensor | None = None,
        batch_size: int = 64,
        device: torch.device | str = "cpu",
    ) -> Iterator[SampledBatch]:
        """One image per seed, in batches (see `generate`)."""
        churn = Churn(self.churn, self.churn_low, self.churn_high, self.churn_noise) if self.churn else None
        return generate(
            denoiser,
            seeds,
            image_shape,
            self.sigmas(),
            self.solver,
            label,
            churn,
            batch_size,
            device,
            self.precision,
        )
