"""A Gaussian fitted to incomplete images: what rounds begin with where pixels are missing, or behind a kernel.

    x_0 = mean + F^T z + e,    z ~ N(0, I),    e ~ N(0, diag(variance)),    F a few factors (K, D).

Expectation-maximisation for factor analysis (Rubin and Thayer 1982), in which every image counts where it was
measured: a pixel with noise of level s has the precision 1 / (variance + s^2), a missing one 0. The cost of a
step is that of a few products of (N, D) with (D, K^2), whatever is missing.

Through a kernel, y = k * x_0 + s z', pixels are no longer independent given z. The fit then goes on by
stochastic expectation-maximisation (Celeux and Diebolt 1985): every image is completed by a draw from its
posterior, by perturbation and correction,

    x = x' + C A^T (A C A^T + diag(s^2))^-1 (y - y'),    x' ~ N(mean, C),    y' = A x' + s z',

and the Gaussian is fitted further to these images, in turn.
"""

import torch
from torch import Tensor

from assay.data import ImageSource
from assay.data.view import stream
from assay.denoise import Conditioned, GaussianDenoiser, convolution

_MIN_VARIANCE = 1e-4
_NUM_ROUNDS, _STEPS_PER_ROUND = 10, 5  # of completing images seen through kernels, and fitting to them
_NUM_SOLVER_STEPS = 50
_BATCH_SIZE = 512  # images completed at a time


def fit_gaussian(
    source: ImageSource, num_factors: int = 32, num_steps: int = 50, max_images: int = 5000, seed: int = 0
) -> GaussianDenoiser:
    """The denoiser of the Gaussian that explains at most `max_images` images of `source` best."""
    generator = stream(seed, "gaussian")
    chosen = torch.randperm(len(source), generator=generator)[:max_images]
    levels, kernel, y = source.read_levels(chosen), source.read_kernel(chosen), source.read(chosen)
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
    if kernel is not None:
        observed = y.view(-1, *image), levels.double(), kernel.double()
        for _ in range(_NUM_ROUNDS):
            model = _denoiser(weights, variance, image)
            batches = zip(*(each.split(_BATCH_SIZE) for each in observed), strict=True)
            x = torch.cat([_draw(model, generator, *batch) for batch in batches]).flatten(1)
            for _ in range(_STEPS_PER_ROUND):
                weights, variance = _complete_step(x, weights, variance)
    return _denoiser(weights, variance, image).float()


def _denoiser(weights: Tensor, variance: Tensor, image: tuple[int, int, int]) -> GaussianDenoiser:
    """The denoiser of images of shape `image` from `weights` (D, K + 1) and `variance` (D,)."""
    columns = weights.T.reshape(-1, *image)
    return GaussianDenoiser(columns[-1], columns[:-1], variance.view(image))


def _draw(
    model: GaussianDenoiser, generator: torch.Generator, y: Tensor, levels: Tensor, kernel: Tensor
) -> Tensor:
    """A draw of each x given `y` (B, C, H, W) = k * x + noise of the `levels`, and `kernel` (B, H, W)."""
    operator = convolution(kernel)
    z = torch.randn(len(y), len(model.factors), generator=generator, dtype=y.dtype)
    e, noise = (torch.randn(y.shape, generator=generator, dtype=y.dtype) for _ in range(2))
    mean = model.mean.expand_as(y)
    x = mean + torch.tensordot(z, model.factors, 1) + model.variance.sqrt() * e
    gap = y - operator(x) - levels.where(levels.isfinite(), 0.0) * noise
    # At a high level x_t says nothing, and E[x_0 | y] = mean + C A^T (A C A^T + diag(s^2))^-1 (y - A mean).
    given = Conditioned(model, operator(mean) + gap, levels, _NUM_SOLVER_STEPS, operator)
    return x + given(mean, torch.full((len(y),), 1e3, dtype=y.dtype)) - mean


def _complete_step(x: Tensor, weights: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """One step towards the largest likelihood from complete images `x` (N, D) without noise (Lawley 1940).

    With P = diag(variance), U and L the leading eigenvectors and eigenvalues of P^-1/2 cov P^-1/2, the best
    factors are F^T = P^1/2 U (L - I)^1/2, and the best variance is the diagonal of cov - F^T F.
    """
    mean, root = x.mean(0), variance.sqrt()[:, None]
    centred = (x - mean) / len(x) ** 0.5
    scaled = centred / root.T
    basis = torch.linalg.qr(scaled.T @ (scaled @ (weights[:, :-1] / root)))[0]  # nearer to U in every step
    inside = scaled @ basis
    values, turn = torch.linalg.eigh(inside.T @ inside)
    factors = root * (basis @ turn) * (values - 1).clamp_min(0).sqrt()
    variance = (centred.square().sum(0) - factors.square().sum(1)).clamp_min(_MIN_VARIANCE)
    return torch.cat([factors, mean[:, None]], 1), variance


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
