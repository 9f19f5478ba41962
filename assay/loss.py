"""Losses for images of any quality; each returns one value per image, `(B,)`, averaged over pixels.

One loss serves clean and noisy images. With r = sigma_tn^2 / sigma_t^2 and h the denoiser,

    ambient loss:  || (1 - r) h(x_t) + r x_t - x_tn ||^2,

whose minimiser is h = E[x_0 | x_t] for every sigma_tn < sigma_t (Lemma 2.1). With sigma_tn = 0 it is
the ordinary denoising loss, so there is no branch for "clean" and "noisy".

Below sigma_tn a noisy image has nothing to regress on. There the consistency loss asks that the
denoiser agree with itself along its own reverse process: h(x_s', s') = E[h(x_s'', s'') | x_s'].
`consistency_loss` is ours, `released_consistency_loss` what the paper's code computes, to be compared with.
"""

import torch
from torch import Tensor

from assay.denoise import Denoiser, x_tn_from_x_0
from assay.noise import add_noise, per_image
from assay.sample import solve


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

    `x_tn` and unit noise `eps` (B, ...); `sigma_tn < sigma_t` and `weight` (B,) -> loss (B,). `sigma_tn` may be
    a map (B, C or 1, H, W); then only pixels with sigma_tn < sigma_t count. The minimiser is E[x_0 | x_t] if
    all do; a pixel that does not is noisier than the level given to the denoiser.
    """
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
    ratio = (sigma_tn / sigma_t) ** 2
    return edm_weight(sigma_t, sigma_data) * (1 - ratio).pow(-2).clamp_max(cap)


def consistency_levels(
    sigma_start: Tensor, uniform: Tensor, sigma_min: float = 0.002, min_ratio: float = 0.5
) -> tuple[Tensor, Tensor]:
    """The levels s' > s'' (B,) between which the denoiser is compared with itself, from `uniform` (2, B).

    s' is log-uniform between `sigma_min` and `sigma_start` (B,) above it, s'' / s' uniform in [min_ratio, 1).
    """
    position, fraction = uniform.to(sigma_start)
    sigma_high = sigma_min * (sigma_start / sigma_min) ** (1 - position)
    sigma_high = torch.minimum(sigma_high, sigma_start)  # rounding may land above it,
    sigma_low = sigma_high * (min_ratio + (1 - min_ratio) * fraction)  # and here on sigma_high
    return sigma_high, torch.minimum(sigma_low, torch.nextafter(sigma_high, torch.zeros_like(sigma_high)))


def consistency_loss(
    denoiser: Denoiser,
    x_start: Tensor,
    sigma_start: Tensor,
    sigma_high: Tensor,
    sigma_low: Tensor,
    eps: Tensor,
    label: Tensor | None = None,
    num_steps: int = 3,
) -> Tensor:
    """Unbiased estimate of || h(x_s', s') - E[h(x_s'', s'') | x_s'] ||^2 per image, (B,); may be negative.

    `x_start` (B, ...) are exact samples at `sigma_start` (B,): any image after `add_noise`. They follow the
    flow without gradient to s' = `sigma_high`, then take two independent draws at s'' = `sigma_low` by
    `kernel_step`, with unit noise `eps` (2, B, ...). The product <h' - h''_1, h' - h''_2> has no Var/K bias.
    The higher level teaches: h' is detached, and so is h''_2, whose expected gradient is that of h''_1.

    For the exact denoiser of Gaussian data the loss is zero in expectation. Three steps reach sigma_start / 10
    with at least 95% of the true deviation; other data has E[h''] off by O((1 - (s''/s')^2)^2).
    """
    with torch.no_grad():
        # The flow keeps the distribution, where a stochastic walk of the same few steps (`kernel_step`) arrives
        # with three quarters of the spread: every kernel step loses the spread of x_0 around its mean.
        ratio, levels = (sigma_high / sigma_start) ** (1 / num_steps), [sigma_start]
        for _ in range(num_steps - 1):
            levels.append(levels[-1] * ratio)
        x = solve(denoiser, x_start, torch.stack([*levels, sigma_high]), "multistep", label)
        teacher = denoiser(x, sigma_high, label)
        low_1, low_2 = (kernel_step(x, teacher, sigma_high, sigma_low, draw) for draw in eps)
        residual = teacher - denoiser(low_2, sigma_low, label)
    student = denoiser(low_1, sigma_low, label)
    product = residual * (teacher - student)
    # The value of the product with twice its gradient.
    return (2 * product - product.detach()).flatten(1).mean(1)


def released_consistency_loss(
    denoiser: Denoiser,
    x_high: Tensor,
    sigma_high: Tensor,
    sigma_low: Tensor,
    eps: Tensor,
    label: Tensor | None = None,
    walker: Denoiser | None = None,
) -> Tensor:
    """|| h(x_s', s') - 1/K sum_k h(x_s''^k, s'') ||^2 per image, (B,), as the paper's code computes it.

    K draws go from `x_high` (B, ...) at s' to s'' on levels whose seventh root falls linearly, by

        x <- x - 2 (s - s_next) (x - h(x, s)) / s + sqrt(2 s (s - s_next)) eps,

    with `eps` (num_levels - 1, K, B, ...); the code counts levels, so its "8 steps" are 7 intervals. The
    gradient flows through everything, and the mean of K draws makes the loss biased upwards by Var / K.
    `walker` is the denoiser on the way and at s'', where the code leaves out augmentation labels.
    """
    walker = walker or denoiser

    def many(values: Tensor) -> Tensor:
        return values.repeat(eps.shape[1], *[1] * (values.ndim - 1))  # whole batches one after the other

    labels = None if label is None else many(label)
    ends = many(sigma_high ** (1 / 7)), many(sigma_low ** (1 / 7))
    levels = [(ends[0] + (ends[1] - ends[0]) * (i / len(eps))) ** 7 for i in range(len(eps) + 1)]
    x = many(x_high)
    for sigma, to, draw in zip(levels[:-1], levels[1:], eps.flatten(1, 2), strict=True):
        gone = (sigma - to).clamp_min(0)
        pull = per_image(2 * gone / sigma, x) * (walker(x, sigma, labels) - x)
        x = x + pull + per_image((2 * sigma * gone).sqrt(), x) * draw
    at_high, at_low = denoiser(x_high, sigma_high, label), walker(x, many(sigma_low), labels)
    return (at_high - at_low.unflatten(0, (eps.shape[1], -1)).mean(0)).square().flatten(1).mean(1)


def kernel_step(x: Tensor, x_0_hat: Tensor, sigma: Tensor, sigma_next: Tensor, eps: Tensor) -> Tensor:
    """One step down the reverse process: a draw of x_s'' given x_s' and x_0 = x_0_hat.

    x_s'' = x_0_hat + (s''^2 / s'^2)(x_s' - x_0_hat) + s'' sqrt(1 - s''^2 / s'^2) eps.
    """
    ratio = (sigma_next / sigma) ** 2
    spread = sigma_next * (1 - ratio).clamp_min(0).sqrt()
    return x_0_hat + per_image(ratio, x) * (x - x_0_hat) + per_image(spread, x) * eps
