"""Sampling: follow the probability flow from noise to an image.

    dx / dsigma = (x - D(x, sigma)) / sigma                              (equation 2)

The caller owns the sigma grid, a decreasing tensor that ends with 0; stepping onto 0 returns the
denoiser's prediction from the level before. So truncated sampling (Appendix, Algorithm 2) is only a
grid: one whose last level before 0 is sigma_tn returns D(x, sigma_tn) exactly.
Images own their seeds: image 17 is the same bits in any batch size.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from assay.denoise import Denoiser, check_converged, check_label, check_label_shape
from assay.errors import AssayError, Rules
from assay.noise import per_image
from assay.registry import find, make
from assay.settings import Strict

Precision = Literal["32", "64", "bf16"]
Level = Annotated[float, Field(gt=0)] | Literal["auto"]  # a noise level, or the training data's
Sigma = Any  # a float, one level for all images, or a tensor of levels that broadcast with them
Predict = Callable[[Tensor, Sigma], Tensor]


def edm_sigmas(
    num_steps: int,
    sigma_min: float = 0.002,
    sigma_max: float = 80.0,
    rho: float = 7.0,
    refine_at: float | None = None,
    num_extra: int = 0,
) -> Tensor:
    """EDM's grid (num_steps + 1,): sigma^(1/rho) falls linearly from sigma_max to sigma_min, then 0. float64.

    `refine_at` = sigma_tn puts that level on it, with `num_extra` more steps below (paper's configuration C).
    """
    end = torch.zeros(1, dtype=torch.float64)
    if refine_at is None:
        return torch.cat([_rho_ramp(sigma_max, sigma_min, num_steps, rho), end])
    high, middle, low = (level ** (1 / rho) for level in (sigma_max, refine_at, sigma_min))
    position = (high - middle) / (high - low)
    num_above = min(max(round(position * (num_steps - 1)), 1), num_steps - 2)  # steps that end on it
    above = _rho_ramp(sigma_max, refine_at, num_above + 1, rho)
    below = _rho_ramp(refine_at, sigma_min, num_steps - num_above + num_extra, rho)
    return torch.cat([above, below[1:], end])


def _rho_ramp(first: float, last: float, num_levels: int, rho: float) -> Tensor:
    if num_levels < 2 or not 0 < last < first < math.inf or not rho > 0:
        what = f"{num_levels} levels from {first:g} to {last:g} with rho = {rho:g} make no grid"
        raise AssayError(what, key="num_steps", cure="give 2 or more, that fall and stay above 0, and rho > 0")
    position = torch.linspace(0, 1, num_levels, dtype=torch.float64)
    ramp = (first ** (1 / rho) + position * (last ** (1 / rho) - first ** (1 / rho))) ** rho
    ramp[0], ramp[-1] = first, last  # the ends exactly, not up to rounding
    return ramp


@dataclass(frozen=True)
class Churn:
    """Noise added back before each step (EDM's stochastic sampler), between the levels `low` and `high`."""

    gamma: float  # the share by which the level rises: EDM's S_churn / num_steps
    low: float = 0.0
    high: float = math.inf
    noise: float = 1.0

    def raised(self, sigma: float) -> float:
        """The level to return to before stepping down from `sigma`."""
        return sigma * (1 + min(self.gamma, math.sqrt(2) - 1)) if self.low <= sigma <= self.high else sigma


class Solver(ABC):
    """Steps down the flow; one object walks one path. `SampleConfig.solver` names a subclass by its `kind`."""

    kind: ClassVar[str]
    has_memory: ClassVar[bool] = False  # of earlier steps, which noise added back would make wrong

    @abstractmethod
    def step(self, predict: Predict, x: Tensor, sigma: Sigma, to: Sigma) -> Tensor:
        """From `x` (B, ...) at the level `sigma` to the level `to` > 0; `predict(x, sigma)` is D(x, sigma)."""


class Euler(Solver):
    """Of first order, one evaluation a step."""

    kind = "euler"

    def step(self, predict: Predict, x: Tensor, sigma: Sigma, to: Sigma) -> Tensor:
        """Along the slope at the beginning."""
        return x + (to - sigma) * ((x - predict(x, sigma)) / sigma)


class Heun(Solver):
    """Of second order, two evaluations a step."""

    kind = "heun"

    def step(self, predict: Predict, x: Tensor, sigma: Sigma, to: Sigma) -> Tensor:
        """Along the mean of the slopes at the beginning and at the end of Euler's step."""
        slope = (x - predict(x, sigma)) / sigma
        x_next = x + (to - sigma) * slope
        slope_next = (x_next - predict(x_next, to)) / to
        return x + (to - sigma) * (slope + slope_next) / 2


class Multistep(Solver):
    """DPM-Solver++ (2M): of second order, one evaluation a step.

    x_next = q x + (1 - q) (D + h / (2 h_before) (D - D_before)),    q = sigma_next / sigma, h = -log q.
    """

    kind = "multistep"
    has_memory = True

    def __init__(self) -> None:
        self.before: tuple[Tensor, Sigma] | None = None

    def step(self, predict: Predict, x: Tensor, sigma: Sigma, to: Sigma) -> Tensor:
        """The formula above."""
        log = torch.log if isinstance(sigma, Tensor) else math.log
        x_0_hat, ratio = predict(x, sigma), to / sigma
        now = x_0_hat, sigma
        if self.before is not None:
            x_0_before, sigma_before = self.before
            x_0_hat = x_0_hat + log(ratio) / (2 * log(sigma / sigma_before)) * (x_0_hat - x_0_before)
        self.before = now
        return ratio * x + (1 - ratio) * x_0_hat


def solve(
    denoiser: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    solver: str | Solver = "heun",
    label: Tensor | None = None,
    churn: Churn | None = None,
    noise: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Integrate the flow along `sigmas` from `x` (B, ...) at sigmas[0] to sigmas[-1].

    The grid is (num_steps + 1,), or (num_steps + 1, B) with levels > 0 of its own for each image. `churn` needs
    one grid for all, and `noise`, which returns unit noise of x's shape.
    """
    walker: Solver = make(Solver, solver, "solver") if isinstance(solver, str) else solver
    shared = sigmas.ndim == 1
    levels: list[Any] = sigmas.tolist() if shared else [per_image(row, x) for row in sigmas]

    def predict(x: Tensor, sigma: Sigma) -> Tensor:
        if isinstance(sigma, Tensor):
            return denoiser(x, sigma.flatten(), label)
        return denoiser(x, torch.full((len(x),), sigma, dtype=x.dtype, device=x.device), label)

    for sigma, sigma_next in zip(levels[:-1], levels[1:], strict=True):
        if churn is not None and noise is not None:
            raised = churn.raised(sigma)
            x = x + math.sqrt(raised**2 - sigma**2) * churn.noise * noise()
            sigma = raised
        if shared and sigma_next == 0:
            return predict(x, sigma)
        x_next = walker.step(predict, x, sigma, sigma_next)
        if not isinstance(x_next, Tensor) or x_next.shape != x.shape:
            found = list(x_next.shape) if isinstance(x_next, Tensor) else type(x_next).__name__
            what = f"{type(walker).__name__}.step does not give images {list(x.shape)} as it gets, but {found}"
            raise AssayError(what, key="solver", cure="correct it")
        x = x_next
    return x


class SeededNoise:
    """Unit noise for a batch in which each image draws from its own seed."""

    def __init__(self, seeds: Sequence[int], image_shape: Sequence[int], device: torch.device | str) -> None:
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.image_shape, self.device = tuple(image_shape), device

    def __call__(self) -> Tensor:
        """(B, *image_shape). Drawn on the CPU, so that every device starts from the same noise."""
        images = [torch.randn(self.image_shape, generator=generator) for generator in self.generators]
        return torch.stack(images).to(self.device)


@torch.no_grad()
def generate(
    denoiser: Denoiser,
    seeds: Sequence[int],
    image_shape: Sequence[int],
    sigmas: Tensor,
    solver: str | type[Solver] = "heun",
    label: Tensor | None = None,
    churn: Churn | None = None,
    batch_size: int = 64,
    device: torch.device | str = "cpu",
    precision: Precision = "32",
) -> Iterator[Tensor]:
    """Yield one image per seed, in batches (B, ...), so that the caller can show progress and save as it goes.

    `label` (num_seeds,) names the class of each seed's image. The same seed gives the same bits in
    every batch size on the CPU. With `precision` "64" the flow is integrated in float64 (as EDM does) around
    a network in float32; with "bf16" the network computes in bfloat16 where that is safe.
    """
    if len(sigmas) < 2 or not bool((sigmas.diff() < 0).all()) or not 0 <= sigmas[-1] <= sigmas[0] < math.inf:
        raise AssayError(f"levels must fall strictly and stay >= 0; got {sigmas.tolist()!s:.200}", key="sigmas")
    num_classes = getattr(denoiser, "num_classes", None)  # a plain function need not tell
    if label is not None and num_classes is not None:
        check_label_shape(label, num_classes, len(seeds))
        check_label(label, num_classes)

    walker = partial(make, Solver, solver, "solver") if isinstance(solver, str) else solver

    def predict(x_t: Tensor, sigma_t: Tensor, label: Tensor | None = None) -> Tensor:
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=precision == "bf16"):
            return denoiser(x_t.float(), sigma_t.float(), label).to(x_t.dtype)

    for index, padded in padded_batches(len(seeds), batch_size):
        noise = SeededNoise([seeds[i] for i in padded], image_shape, device)
        batch_label = None if label is None else label[padded].to(device)
        start = noise().to(torch.float64 if precision == "64" else torch.float32) * sigmas[0].item()
        images = solve(predict, start, sigmas, walker(), batch_label, churn, noise).float()[: len(index)]
        check_converged(images, "the model")
        yield images


def padded_batches(num_images: int, batch_size: int) -> Iterator[tuple[list[int], list[int]]]:
    """Positions of batches, and the same padded (see `padded_rows`)."""
    for start in range(0, num_images, batch_size):
        index = list(range(start, min(start + batch_size, num_images)))
        yield index, padded_rows(index)


def padded_rows(index: list[int]) -> list[int]:
    """The positions of a batch, with copies of the last, whose images are to be dropped.

    Matrix products of few rows, or of rows that do not split evenly over threads, sum in another order: which
    depends on the CPU. With 16 a thread, or a multiple, an image has the same bits in every batch size.
    """
    return index + index[-1:] * (-len(index) % (16 * torch.get_num_threads()))


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
    """A draw of x_0 given x_tn (B, ...) with noise of levels `sigma_tn` (B,) > 0, by the reverse diffusion.

    Between levels a > b of EDM's grid it is the flow from a to b, independent noise back to a, and again the
    flow: a symmetric splitting, of second order; flows that follow each other are joined. An image at or below
    `sigma_min` gets its posterior mean. `noise` returns unit noise of x_tn's shape.
    """
    low = sigma_tn.clamp(max=sigma_min)
    # Powers as exp and log: torch rounds a power differently at the end of a batch than inside it.
    first, last = ((level.cpu().double().log() / rho).exp() for level in (sigma_tn, low))
    position = torch.linspace(0, 1, num_steps, dtype=first.dtype)[:, None]
    levels = ((first + position * (last - first)).log() * rho).exp().to(sigma_tn)
    levels[0], levels[-1] = sigma_tn, low  # exactly, not up to rounding

    x = solve(denoiser, x_tn, levels[:2], label=label)
    for above, here, below in zip(levels[:-1], levels[1:], [*levels[2:], levels[-1]], strict=True):
        x = x + per_image((above**2 - here**2).clamp(min=0).sqrt(), x) * noise()
        x = solve(denoiser, x, torch.stack([above, below]), label=label)
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
    """Follow the flow from x_tn (B, ...) at `sigma_tn` (B,) to `sigma_end` (B,) > 0, by equal ratios."""
    log_ratio = (sigma_end.cpu().double() / sigma_tn.cpu().double()).log()
    position = torch.linspace(0, 1, num_steps + 1, dtype=torch.float64)[:, None]
    levels = (sigma_tn.cpu().double() * (position * log_ratio).exp()).to(sigma_tn)
    levels[0], levels[-1] = sigma_tn, sigma_end  # exactly, not up to rounding
    return solve(denoiser, x_tn, levels, label=label)


def spread_labels(frequencies: Sequence[float] | Tensor, seeds: Sequence[int]) -> Tensor:
    """A class for each seed (num_seeds,), in the proportions of `frequencies` (num_classes,).

    Seed s sits at the fractional part of s times the golden ratio, which fills [0, 1) evenly from any start:
    every range of seeds has the right proportions, and a seed's class does not depend on the range.
    """
    share = torch.as_tensor(frequencies, dtype=torch.float64)
    position = (torch.tensor(seeds, dtype=torch.float64) * 0.6180339887498949) % 1
    return torch.searchsorted((share / share.sum()).cumsum(0)[:-1].contiguous(), position, right=True)


class SampleConfig(Strict):
    """How to sample, in one place: for `assay sample`, pictures of a run, evaluation and studies.

    num_steps, solver, precision : how the flow is followed; `solver` is "heun", "multistep" or "euler".
    sigma_max, sigma_min, rho : the grid of noise levels: its ends, and how dense it is at low ones.
    truncate_at, truncate : the level at which to stop; "auto" is the lowest of the training images.
    refine_at, num_extra : a level to put on the grid, and more steps below it; "auto" is their highest.
    churn, churn_low, churn_high, churn_noise : noise added back at each step, as EDM's stochastic sampler does.

    `for_levels` gives "auto" a value.
    """

    num_steps: int = Field(18, ge=2, description="Steps from noise to image.")
    solver: str = Field("heun", description="heun, multistep (half the evaluations), euler or your own.")
    sigma_min: float = Field(0.002, gt=0, description="Lowest level of the grid.")
    sigma_max: float = Field(80.0, gt=0, le=1e6, description="Level at which sampling starts.")
    rho: float = Field(7.0, gt=0, description="Spacing of the grid: higher puts more steps at low levels.")
    truncate_at: Level | None = Field(None, description="Stop at this level; auto is the data's lowest.")
    truncate: Literal["exact", "algorithm"] = Field(
        "exact", description="Stop on that level, or, as the paper's code does, on the grid's last above it."
    )
    refine_at: Level | None = Field(None, description="Put this level on the grid; auto is the data's highest.")
    num_extra: int = Field(0, ge=0, description="More steps below refine_at, which is auto unless given.")
    churn: float = Field(0.0, ge=0, description="Noise added back at each step (EDM's S_churn).")
    churn_low: float = Field(0.0, ge=0, description="Lowest level at which noise is added back (S_min).")
    churn_high: float = Field(1000.0, gt=0, description="Highest level at which it is added back (S_max).")
    churn_noise: float = Field(1.0, ge=0, description="Scale of the noise added back (S_noise).")
    precision: Precision = Field("32", description="64: steps in float64, as EDM; bf16: network in bfloat16.")

    @model_validator(mode="before")
    @classmethod
    def _refine_where_the_noise_is(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("num_extra") and values.get("refine_at") is None:
            return values | {"refine_at": "auto"}
        return values

    def rules(self) -> Rules:
        """Churn needs a solver without memory, and levels are in order."""
        remembers = find(Solver, self.solver, "solver").has_memory and self.churn
        what = f"churn disturbs what {self.solver} remembers"
        yield remembers, AssayError(what, key="churn", cure="use heun or euler")
        both = self.truncate_at is not None and self.refine_at is not None
        yield both, AssayError("continues below the level where truncate_at stops", key="refine_at")
        what = f"is not below sigma_max = {self.sigma_max:g}"
        yield self.sigma_min >= self.sigma_max, AssayError(what, key="sigma_min", cure="lower it")
        for name, lowest in (("truncate_at", 0.0), ("refine_at", self.sigma_min)):
            level = getattr(self, name)
            outside = isinstance(level, float) and not lowest < level < self.sigma_max
            what = f"{level} is not between {lowest:g} and {self.sigma_max:g}, where sampling starts"
            yield outside, AssayError(what, key=name, cure="give that of the training data, e.g. 0.2")

    def for_levels(self, sigma_tn: Iterable[float]) -> "SampleConfig":
        """The same for data with these noise levels: "auto" becomes the lowest (to stop at) or the highest."""
        noisy, chosen = [level for level in sigma_tn if level > 0], {}
        for name, choose in (("truncate_at", min), ("refine_at", max)):
            if getattr(self, name) == "auto":
                if not noisy:
                    what = "the training data has no known noise level"
                    raise AssayError(what, key=name, cure="give a number")
                chosen[name] = choose(noisy)
        found = self.model_copy(update=chosen)
        found.model_post_init(None)
        return found

    def sigmas(self) -> Tensor:
        """The grid these settings describe."""
        assert not isinstance(self.truncate_at, str) and not isinstance(self.refine_at, str), "see for_levels"
        plain = partial(edm_sigmas, self.num_steps, sigma_max=self.sigma_max, rho=self.rho)
        if self.truncate_at is None:
            return plain(self.sigma_min, refine_at=self.refine_at, num_extra=self.num_extra)
        if self.truncate == "exact":
            return plain(self.truncate_at)
        grid = plain(self.sigma_min)
        return torch.cat([grid[grid >= self.truncate_at], grid[-1:]])

    def num_evaluations(self) -> int:
        """How often the network is evaluated for an image, with `truncate_at` and `refine_at` as numbers."""
        num_calls = 0

        def denoiser(x_t: Tensor, sigma_t: Tensor, label: Tensor | None = None) -> Tensor:
            nonlocal num_calls
            num_calls += 1
            return x_t

        solve(denoiser, torch.zeros(1, 1), self.sigmas(), self.solver)
        return num_calls

    def generate(
        self,
        denoiser: Denoiser,
        seeds: Sequence[int],
        image_shape: Sequence[int],
        label: Tensor | None = None,
        batch_size: int = 64,
        device: torch.device | str = "cpu",
    ) -> Iterator[Tensor]:
        """One image per seed, in batches (see `generate`)."""
        low = self.churn_low
        if self.truncate == "exact" and isinstance(self.truncate_at, float):  # predict there, not from above
            low = max(low, math.nextafter(self.truncate_at, math.inf))
        # Per step of the plain grid: extra steps at some levels change nothing at the others.
        churn = Churn(self.churn / self.num_steps, low, self.churn_high, self.churn_noise)
        chosen = self.solver, label, churn if self.churn else None, batch_size, device, self.precision
        return generate(denoiser, seeds, image_shape, self.sigmas(), *chosen)
