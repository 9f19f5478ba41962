"""Losses for images of any quality; each returns one value per image, `(B,)`, averaged over pixels.

One loss serves clean and noisy images alike. With r = sigma_tn^2 / sigma_t^2 and h the denoiser,

    ambient loss:  || (1 - r) h(x_t) + r x_t - x_tn ||^2,

whose minimiser is h = E[x_0 | x_t] for every sigma_tn < sigma_t (Lemma 2.1). With sigma_tn = 0 it is
the ordinary denoising loss, so there is no branch for "clean" and "noisy".

Below sigma_tn a noisy image has nothing to regress on. There the consistency loss asks that the
denoiser agree with itself along its own reverse process: h(x_s', s') = E[h(x_s'', s'') | x_s'].
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from assay.denoise import Denoiser, x_tn_from_x_0
from assay.noise import add_noise, check_pixels, check_shape, per_image


def ambient_loss(
    denoiser: Denoiser,
    x_tn: Tensor,
    sigma_tn: Tensor,
    sigma_t: Tensor,
    eps: Tensor,
    weight: Tensor | None = None,
    label: Tensor | None = None,
) -> Tensor:
    """Ambient denoising score matching (equation 3, Algorithm 1), with a noise level of its own per image.

    `x_tn` and unit noise `eps` (B, ...); `sigma_tn < sigma_t` and `weight` (B,) -> loss (B,).
    """
    if weight is not None and weight.shape != (len(x_tn),):
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}; expected ({len(x_tn)},), one weight per image"
        )
    x_t = add_noise(x_tn, sigma_tn, sigma_t, eps)
    x_tn_hat = x_tn_from_x_0(denoiser(x_t, sigma_t, label), x_t, sigma_tn, sigma_t)
    loss = (x_tn_hat - x_tn).square().flatten(1).mean(1)
    return loss if weight is None else weight * loss


def edm_weight(sigma_t: Tensor, sigma_data: float = 0.5) -> Tensor:
    """EDM's weight (sigma_t^2 + sigma_data^2) / (sigma_t sigma_data)^2, as the paper uses it: in x_tn space."""
    return (sigma_t**2 + sigma_data**2) / (sigma_t * sigma_data) ** 2


def edm_weight_x_0(sigma_t: Tensor, sigma_tn: Tensor, sigma_data: float = 0.5, cap: float = 10.0) -> Tensor:
    """EDM's weight on the error in x_0: the ambient residual is (1 - r) times it, so divide by (1 - r)^2.

    The factor 1 / (1 - r)^2 grows without bound as sigma_t falls to sigma_tn; `cap` bounds it.
    """
    if sigma_tn.shape != sigma_t.shape:
        raise ValueError(
            f"sigma_tn has shape {tuple(sigma_tn.shape)}, sigma_t {tuple(sigma_t.shape)}; "
            "expected (B,) for both, one level per image"
        )
    ratio = (sigma_tn / sigma_t) ** 2
    return edm_weight(sigma_t, sigma_data) * (1 - ratio).pow(-2).clamp_max(cap)


@dataclass(frozen=True)
class ConsistencyLevels:
    """The law of the two levels s' > s'' between which the denoiser is compared with itself.

    s' is drawn between `sigma_min` and the level the walk starts from, log-uniformly or uniformly;
    s'' / s' is uniform in [min_ratio, 1).
    """

    sigma_min: float = 0.002
    spacing: Literal["log", "linear"] = "log"
    min_ratio: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.sigma_min < math.inf:
            raise ValueError(f"sigma_min = {self.sigma_min}: the lowest level is finite and > 0")
        if self.spacing not in ("log", "linear"):
            raise ValueError(f"spacing = {self.spacing!r}: levels are spaced 'log' or 'linear'")
        if not 0 < self.min_ratio < 1:
            raise ValueError(f"min_ratio = {self.min_ratio}: the least s'' / s' lies between 0 and 1")

    def draw(self, sigma_start: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """`sigma_start` (B,) and `uniform` (2, B) in [0, 1) -> (s', s''), with s'' < s' <= sigma_start.

        Every `sigma_start` must be above `sigma_min`.
        """
        position, fraction = uniform.to(sigma_start)
        match self.spacing:
            case "log":
                sigma_high = self.sigma_min * (sigma_start / self.sigma_min) ** (1 - position)
            case "linear":
                sigma_high = sigma_start - position * (sigma_start - self.sigma_min)
        sigma_high = torch.minimum(sigma_high, sigma_start)  # rounding may land above it,
        sigma_low = sigma_high * (self.min_ratio + (1 - self.min_ratio) * fraction)  # and here on sigma_high
        return sigma_high, torch.minimum(sigma_low, torch.nextafter(sigma_high, torch.zeros_like(sigma_high)))


def consistency_loss(
    denoiser: Denoiser,
    x_start: Tensor,
    sigma_start: Tensor,
    sigma_high: Tensor,
    sigma_low: Tensor,
    eps: Tensor,
    label: Tensor | None = None,
) -> Tensor:
    """Unbiased estimate of || h(x_s', s') - E[h(x_s'', s'') | x_s'] ||^2 per image, (B,); may be negative.

    `x_start` (B, ...) are exact samples at `sigma_start` (B,): a noisy image at its own sigma_tn, or any
    image after `add_noise`. They walk without gradient to s' = `sigma_high`, then take two independent
    draws at s'' = `sigma_low`; the product <h' - h''_1, h' - h''_2> has no Var/K bias. The higher level
    teaches: h' is detached, the gradient flows into h''_1 and h''_2 alone.

    `eps` (num_steps + 2, B, ...) is the unit noise of the walk's steps and of the two draws. The walk's
    levels are spaced geometrically, and 0 < s'' < s' <= sigma_start. The kernel replaces
    x_0 by its mean (`kernel_step`): exact for Gaussian data, otherwise up to O((1 - (s''/s')^2)^2).
    """
    for name, level in (("sigma_start", sigma_start), ("sigma_high", sigma_high), ("sigma_low", sigma_low)):
        check_shape(name, level, len(x_start))
    num_steps = len(eps) - 2
    if num_steps < 1 or eps.shape[1:] != x_start.shape:
        raise ValueError(
            f"eps has shape {tuple(eps.shape)}; expected (num_steps + 2, *{tuple(x_start.shape)}) with "
            "num_steps >= 1"
        )
    with torch.no_grad():
        x, sigma = x_start, sigma_start
        shrink = (sigma_high / sigma_start) ** (1 / num_steps)
        for step in range(num_steps):
            target = sigma_high if step == num_steps - 1 else sigma * shrink
            x = kernel_step(x, denoiser(x, sigma, label), sigma, target, eps[step])
            sigma = target
        teacher = denoiser(x, sigma_high, label)
        low_1 = kernel_step(x, teacher, sigma_high, sigma_low, eps[-2])
        low_2 = kernel_step(x, teacher, sigma_high, sigma_low, eps[-1])

    both_labels = None if label is None else torch.cat([label, label])
    both_low = torch.cat([low_1, low_2])
    student = denoiser(both_low, torch.cat([sigma_low, sigma_low]), both_labels)
    check_pixels("x_0_hat", student, both_low)
    student_1, student_2 = student.chunk(2)
    return ((teacher - student_1) * (teacher - student_2)).flatten(1).mean(1)


def kernel_step(x: Tensor, x_0_hat: Tensor, sigma: Tensor, sigma_next: Tensor, eps: Tensor) -> Tensor:
    """One step down the reverse process: a draw of x_s'' given x_s' and x_0 = x_0_hat.

    x_s'' = x_0_hat + (s''^2 / s'^2)(x_s' - x_0_hat) + s'' sqrt(1 - s''^2 / s'^2) eps.
    """
    check_pixels("x_0_hat", x_0_hat, x)
    check_pixels("eps", eps, x)
    ratio = (sigma_next / sigma) ** 2
    spread = sigma_next * (1 - ratio).clamp_min(0).sqrt()
    return x_0_hat + per_image(ratio, x) * (x - x_0_hat) + per_image(spread, x) * eps
