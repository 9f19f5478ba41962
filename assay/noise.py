"""Noise levels.

Every image names its noise level: `x_0` is clean, `x_tn` is the image as it was measured, `x_t` is what
the network sees,

    x_tn = x_0 + sigma_tn z,        x_t = x_tn + sqrt(sigma_t^2 - sigma_tn^2) eps.

Images are scaled to [-1, 1], and sigma is in those units; it takes the place of time, so there is no `t`.
Sigmas are `(B,)`, one per image. Only sigma_tn may also be a map, one level per pixel.

An image can teach only the levels above its own. Its `sigma_t` comes from a distribution truncated to
(sigma_tn, inf), by inverse CDF through the survival function S:

    sigma_t = S^-1(u S(sigma_tn)),        u ~ U(0, 1).

Formulas check shapes only, so that they read no value back from a GPU. Values are checked once, where data
comes in.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from assay.errors import AssayError, warn


class NoiseDistribution(ABC):
    """A distribution of noise levels; `train.noise` names a subclass by its `kind` (see `assay.registry`)."""

    kind: ClassVar[str]

    @abstractmethod
    def survival(self, sigma: Tensor) -> Tensor:
        """P(sigma_t > sigma), elementwise."""

    @abstractmethod
    def inverse_survival(self, probability: Tensor) -> Tensor:
        """The level that `sigma_t` exceeds with this probability, elementwise."""


@dataclass(frozen=True)
class LogNormal(NoiseDistribution):
    """EDM's distribution: log sigma_t ~ N(mean, std^2)."""

    kind = "lognormal"
    mean: float = -1.2
    std: float = 1.2

    def survival(self, sigma: Tensor) -> Tensor:
        """P(sigma_t > sigma), exact far into the tail."""
        return 0.5 * torch.erfc((sigma.log() - self.mean) / (self.std * math.sqrt(2)))  # ndtr is 0 beyond 8.3

    def inverse_survival(self, probability: Tensor) -> Tensor:
        """exp(mean - std * Phi^-1(probability))."""
        return (self.mean - self.std * torch.special.ndtri(probability)).exp()


@dataclass(frozen=True)
class Uniform(NoiseDistribution):
    """Uniform in sigma on [low, high], the paper's U(t_n, T) with sigma as the clock."""

    kind = "uniform"
    low: float = 0.0
    high: float = 80.0

    def survival(self, sigma: Tensor) -> Tensor:
        """P(sigma_t > sigma)."""
        return ((self.high - sigma) / (self.high - self.low)).clamp(0.0, 1.0)

    def inverse_survival(self, probability: Tensor) -> Tensor:
        """Linear between `high` at 0 and `low` at 1."""
        return self.high - probability * (self.high - self.low)


def draw_sigma(distribution: NoiseDistribution, sigma_tn: Tensor, generator: torch.Generator) -> Tensor:
    """Draw `sigma_t` (B,) from `distribution` truncated to (sigma_tn, inf), for each `sigma_tn` (B,).

    Computed in float64, since the survival function of a noisy image may be as small as 1e-12.
    """
    mass = distribution.survival(sigma_tn.double())
    uniform = torch.rand(sigma_tn.shape, dtype=torch.float64, generator=generator, device=generator.device)
    uniform = uniform.to(sigma_tn.device).clamp_min(2.0**-54)  # [0, 1) -> (0, 1)
    sigma_t = distribution.inverse_survival(uniform * mass).to(sigma_tn.dtype)
    return torch.maximum(sigma_t, _just_above(sigma_tn))  # rounding may land on sigma_tn itself


def draw_sigma_clamped(distribution: NoiseDistribution, sigma_tn: Tensor, generator: torch.Generator) -> Tensor:
    """The original code's levels: drawn freely, then raised to just above `sigma_tn`, which teaches nothing."""
    return torch.maximum(draw_sigma(distribution, torch.zeros_like(sigma_tn), generator), _just_above(sigma_tn))


def _just_above(sigma: Tensor) -> Tensor:
    """The next number of this dtype."""
    return torch.nextafter(sigma, torch.full_like(sigma, math.inf))


class LevelFirst:
    """Draws levels first, then for each an image among those that may serve it.

    The levels are distributed as `distribution` says, so the few clean images are trained much harder than
    where images are drawn first (Algorithm 1 of the paper).
    """

    def __init__(self, distribution: NoiseDistribution, sigma_tn: Tensor) -> None:
        self.distribution = distribution
        self.sorted_sigma_tn, self.order = sigma_tn.sort(stable=True)

    def draw(self, num_draws: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Image indices (num_draws,) and their `sigma_t` (num_draws,), each strictly above its `sigma_tn`."""
        lowest = self.sorted_sigma_tn[:1].expand(num_draws)
        sigma_t = draw_sigma(self.distribution, lowest, generator)
        num_usable = torch.searchsorted(self.sorted_sigma_tn, sigma_t)  # how many have sigma_tn < sigma_t
        uniform = torch.rand(num_draws, dtype=torch.float64, generator=generator, device=generator.device)
        rank = (uniform.to(num_usable.device) * num_usable).long()
        return self.order[rank], sigma_t


def add_noise(x_tn: Tensor, sigma_tn: Tensor, sigma_t: Tensor, eps: Tensor) -> Tensor:
    """x_t = x_tn + sqrt(sigma_t^2 - sigma_tn^2) eps, for images (B, ...) and levels sigma_tn < sigma_t (B,).

    `sigma_tn` may be a map (see `same_axes`): then each pixel gets its own amount. The difference of squares is
    factored, which keeps its digits where the two are close.
    """
    sigma_tn, sigma_t = same_axes(sigma_tn, sigma_t, x_tn)
    std = ((sigma_t - sigma_tn) * (sigma_t + sigma_tn)).sqrt()
    return x_tn + per_image(std, x_tn) * eps


def snr_db(sigma: float, signal_power: float = 1.0) -> float:
    """Signal-to-noise ratio as the paper counts it: noisy power over noise power, 10 log10(1 + P / sigma^2).

    With unit signal power, sigma 0.2 is 14.15 dB. Infinite for a clean image.
    """
    return 10 * math.log10(1 + signal_power / sigma**2) if sigma > 0 else math.inf


MOST_NOISE = 4.0  # twice the range from black to white
_LEAST_NOISE = 2 / 255  # a grey step


def warn_of_units(sigma: float) -> None:
    """Warn of a level that is more than the range from black to white, or below one grey step."""
    if sigma > MOST_NOISE / 2 or 0 < sigma < _LEAST_NOISE:
        what = f"a noise level of {sigma:.4g}, where black to white is 2"
        what += f" and a grey step {_LEAST_NOISE:.2g}" if sigma < 1 else ""
        warn(f"{what}: is it in the units of the {'images' if sigma < 1 else 'files'}?")


def same_axes(sigma_tn: Tensor, sigma_t: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Check the levels of images `x` (B, C, H, W), and give both the same number of axes.

    `sigma_t` is (B,), `sigma_tn` (B,) or a map (B, C or 1, H, W). A map is cut off at sigma_t: a pixel that has
    more noise gets none, and with r = 1 there it has no part in the ambient loss.
    """
    check_shape("sigma_t", sigma_t, len(x))
    if sigma_tn.ndim == 1:
        check_shape("sigma_tn", sigma_tn, len(x))
        return sigma_tn, sigma_t
    if sigma_tn.shape not in (x.shape, (len(x), 1, *x.shape[2:])):
        what = f"has shape {tuple(sigma_tn.shape)}; expected ({len(x)},), one level per image, or a map "
        raise AssayError(f"{what}of shape {tuple(x.shape)}, one level per pixel", key="sigma_tn")
    sigma_t = sigma_t.view(-1, *[1] * (x.ndim - 1))
    return torch.minimum(sigma_tn, sigma_t), sigma_t


def per_image(values: Tensor, x: Tensor) -> Tensor:
    """Give `(B,)` values the shape (B, 1, ..., 1), and these or a map the dtype of the images `x` (B, ...)."""
    if values.ndim > 1:
        return values.to(x.dtype)
    return values.to(x.dtype).view(-1, *[1] * (x.ndim - 1))


def check_shape(name: str, values: Tensor, num_images: int | None = None) -> None:
    """Reject anything but one value per image, such as a level: a float tensor of shape (B,)."""
    if not values.is_floating_point() or values.ndim != 1 or num_images not in (None, len(values)):
        what = f"is {values.dtype} {tuple(values.shape)}; expected a floating-point tensor (B,), one per image"
        raise AssayError(what, key=name)


def check_sigma(name: str, sigma: Tensor, least: Tensor | float = 0.0) -> None:
    """Reject anything but finite levels >= `least`, one per image. Reads values: for data coming in."""
    check_shape(name, sigma)
    if bool((bad := ~(sigma.isfinite() & (sigma >= least))).any()):
        first = int(bad.nonzero()[0])
        what = f"a noise level is finite, and not below 0 or the image's noise, but [{first}] is"
        raise AssayError(f"{what} {sigma[first].item()}", key=name)


def check_distribution(distribution: NoiseDistribution, sigma_tn: Tensor) -> None:
    """Reject a data set's levels `sigma_tn` (N,) that are no levels, or above which `distribution` has none.

    Reject also a `distribution` of a user's own whose S is no survival function or S^-1 not its inverse.
    """
    check_sigma("sigma_tn", sigma_tn)
    survival = distribution.survival(torch.logspace(-4, 3, 300, dtype=torch.float64))
    inside = survival[(survival > 0) & (survival < 1)]
    back = distribution.survival(distribution.inverse_survival(inside))
    falls = bool((survival.diff() <= 1e-6).all() and (survival >= -1e-6).all() and (survival <= 1 + 1e-6).all())
    if not (falls and torch.allclose(back, inside, 0, 1e-3)):
        what = f"survival of {type(distribution).__name__} is not P(sigma_t > sigma)"
        what += ", or inverse_survival not its inverse" if falls else ", which falls from 1 to 0"
        raise AssayError(what, key="train.noise", cure="correct that class")
    highest = sigma_tn.max() if len(sigma_tn) else torch.tensor(torch.nan)  # without images there is none
    if not distribution.survival(highest.double()).item() > 0:
        what = f"{highest.item():g} lies beyond every level of {distribution}"
        raise AssayError(what, key="sigma_tn", cure="draw levels from a wider distribution")
