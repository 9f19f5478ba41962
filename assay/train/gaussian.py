"""A Gaussian fitted to incomplete images: what loops begin with where pixels are missing.

    x_0 = mean + F^T z + e,    z ~ N(0, I),    e ~ N(0, diag(variance)),    F a few factors (K, D).

Expectation-maximisation for factor analysis (Rubin and Thayer 1982), in which every image counts where it was
measured: a pixel with noise of level s has the precision 1 / (variance + s^2), a missing one 0. The cost of a
step is that of a few products of (N, D) with (D, K^2), whatever is missing.
"""

import torch
from torch import Tensor

from assay.data import ImageSource
from assay.data.view import read_map, stream
from assay.denoise import GaussianDenoiser

_MIN_VARIANCE = 1e-4


def fit_gaussian(
    source: ImageSource, num_factors: int = 32, num_steps: int = 50, max_images: int = 5000, seed: int = 0
) -> GaussianDenoiser:
    """The denoiser of the Gaussian that explains at most `max_images` images of `source` best."""
    generator = stream(seed, "gaussian")
    chosen = torch.randperm(len(source), generator=generator)[:max_images]
    levels = read_map(source, chosen)
    levels = source.sigma_tn[chosen][:, None, None, None] if levels is None else levels
    y = source.read(chosen)
    noise = levels.expand_as(y).flatten(1).double()
    seen, y = noise.isfinite().double(), y.flatten(1).double()
    y, noise = torch.where(seen > 0, y, 0.0), torch.where(seen > 0, noise, 0.0)
    count = seen.sum(0).clamp_min(1)
    mean = y.sum(0) / count
    variance = ((seen * (y - mean) ** 2).sum(0) / count).clamp_min(_MIN_VARIANCE)
    num = max(1, min(num_factors, y.shape[1] // 2, len(y) // 4))
    # (D, K + 1): the factors, and the mean as one more, whose z is 1.
    weights = torch.randn(y.shape[1], num + 1, generator=generator, dtype=y.dtype) * variance.sqrt()[:, None]
    weights[:, :num] /= num**0.5
    weights[:, num] = mean
    for _ in range(num_steps):
        weights, variance = _step(y, noise, seen, weights, variance)
    image = source.image_shape
    factors, mean = weights[:, :-1].T, weights[:, -1]
    return GaussianDenoiser(
        mean.float().view(image), factors.float().reshape(num, *image), variance.float().view(image)
    )


def _step(y: Tensor, noise: Tensor, seen: Tensor, weights: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """One step of EM from images `y` (N, D): the law of each z, then each pixel's regression on it."""
    factors, num = weights[:, :-1], weights.shape[1] - 1
    precision = seen / (variance + noise**2)
    pairs = (factors[:, :, None] * factors[:, None]).flatten(1)  # (D, K K)
    spread = torch.linalg.inv(torch.eye(num).to(y) + (precision @ pairs).view(-1, num, num))
    z = (spread @ ((precision * (y - weights[:, -1])) @ factors)[..., None])[..., 0]
    z = torch.cat([z, torch.ones_like(z[:, :1])], 1)  # (N, K + 1)
    second = z[:, :, None] * z[:, None]
    second[:, :num, :num] += spread
    matrix = (precision.T @ second.flatten(1)).view(-1, num + 1, num + 1)
    ridge = 1e-6 * matrix.diagonal(dim1=1, dim2=2).mean(1)
    matrix = matrix + (ridge[:, None, None] + 1e-9) * torch.eye(num + 1).to(y)
    weights = torch.linalg.solve(matrix, (precision * y).T @ z)
    # E (y - w z)^2 over the pixels seen, of which the noise is known.
    residual = (
        y**2
        - 2 * y * (z @ weights.T)
        + second.flatten(1) @ (weights[:, :, None] * weights[:, None]).flatten(1).T
    )
    variance = (seen * (residual - noise**2)).sum(0) / seen.sum(0).clamp_min(1)
    return weights, variance.clamp_min(_MIN_VARIANCE)
