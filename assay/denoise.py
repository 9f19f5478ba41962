"""The one seam: a denoiser maps a noisy image and its level to the expected clean image,

    x_0_hat = D(x_t, sigma_t, label) ~ E[x_0 | x_t].

Losses train it, samplers call it, and neither asks what is inside. A network F becomes a denoiser
through EDM's preconditioning,

    D(x, sigma) = c_skip x + c_out F(c_in x, c_noise),

and the Lemma of the paper translates between E[x_0 | x_t] and E[x_tn | x_t].
"""

import copy
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from assay.encode import Encoder
from assay.errors import AssayError
from assay.noise import check_pixels, check_shape, per_image, same_axes


class Denoiser(Protocol):
    """Anything that estimates clean images: a trained network, a closed form, a function."""

    def __call__(self, x_t: Tensor, sigma_t: Tensor, label: Tensor | None = None) -> Tensor:
        """`x_t` (B, ...), `sigma_t` (B,), optional class `label` (B,) -> `x_0_hat` (B, ...)."""
        ...


def copy_to(denoiser: Denoiser, device: torch.device | str) -> Denoiser:
    """A copy of a denoiser on another device; a plain function works on any."""
    return copy.deepcopy(denoiser).to(device) if isinstance(denoiser, nn.Module) else denoiser


def x_0_from_x_tn(x_tn_hat: Tensor, x_t: Tensor, sigma_tn: Tensor, sigma_t: Tensor) -> Tensor:
    """Lemma 2.1: E[x_0|x_t] = (sigma_t^2 E[x_tn|x_t] - sigma_tn^2 x_t) / (sigma_t^2 - sigma_tn^2)."""
    check_pixels("x_tn_hat", x_tn_hat, x_t)
    ratio = per_image(variance_ratio(x_t, sigma_tn, sigma_t), x_t)
    return (x_tn_hat - ratio * x_t) / (1 - ratio)


def x_tn_from_x_0(x_0_hat: Tensor, x_t: Tensor, sigma_tn: Tensor, sigma_t: Tensor) -> Tensor:
    """Lemma 2.1 the other way: E[x_tn|x_t] = (1 - r) E[x_0|x_t] + r x_t, with r = sigma_tn^2 / sigma_t^2."""
    check_pixels("x_0_hat", x_0_hat, x_t)
    ratio = per_image(variance_ratio(x_t, sigma_tn, sigma_t), x_t)
    return (1 - ratio) * x_0_hat + ratio * x_t


def variance_ratio(x_t: Tensor, sigma_tn: Tensor, sigma_t: Tensor) -> Tensor:
    """r = sigma_tn^2 / sigma_t^2, (B,): the share of the noise in `x_t` that was there when measured.

    Of a map `sigma_tn` it is a map, too.
    """
    sigma_tn, sigma_t = same_axes(sigma_tn, sigma_t, x_t)
    return (sigma_tn / sigma_t) ** 2


class Preconditioned(nn.Module):
    """A network F behind EDM's preconditioning, so that input, output and target have unit variance.

    The network is called as `model(x, c_noise, label, augment_label)`. It is named `model`, as in
    published checkpoints, whose weights therefore load without renaming. An `encoder` stands before and after
    it (see `assay.encode`).
    """

    def __init__(
        self, model: nn.Module, sigma_data: float = 0.5, num_classes: int = 0, encoder: Encoder | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self.encoder = encoder or Encoder()
        self.sigma_data = sigma_data
        self.num_classes = num_classes

    def forward(
        self, x_t: Tensor, sigma_t: Tensor, label: Tensor | None = None, augment_label: Tensor | None = None
    ) -> Tensor:
        """`x_t` (B, C, H, W), `sigma_t` (B,), `label` (B,) or None, `augment_label` (B, A) or None."""
        check_shape("sigma_t", sigma_t, len(x_t))
        check_label_shape(label, self.num_classes, len(x_t))
        total = sigma_t**2 + self.sigma_data**2
        c_skip = self.sigma_data**2 / total
        c_out = sigma_t * self.sigma_data / total.sqrt()
        c_in = 1 / total.sqrt()
        c_noise = sigma_t.log() / 4
        z = self.encoder.encode(per_image(c_in, x_t) * x_t)
        output = self.encoder.decode(self.model(z, c_noise.to(x_t.dtype), label, augment_label))
        return per_image(c_skip, x_t) * x_t + per_image(c_out, x_t) * output.to(x_t.dtype)


def check_label_shape(label: Tensor | None, num_classes: int, num_images: int) -> None:
    """Reject labels that are neither integers (B,) nor class probabilities (B, num_classes)."""
    if label is None:
        return
    expected = (num_images, num_classes) if label.is_floating_point() else (num_images,)
    if num_classes == 0 or label.shape != expected:
        what = f"has shape {tuple(label.shape)}; {num_images} images of {num_classes} classes need {expected}"
        raise AssayError(what, key="label", cure="give one integer per image, or class probabilities")


def check_label(label: Tensor, num_classes: int) -> None:
    """Reject a class outside 0 .. num_classes - 1; -1 is "no class". Reads values: for data coming in."""
    bad = (label < -1) | (label >= num_classes)
    if not label.is_floating_point() and bool(bad.any()):
        first = int(bad.nonzero()[0])
        raise AssayError(f"[{first}] = {label[first].item()} is outside 0 .. {num_classes - 1}", key="label")


def convolution(kernel: Tensor) -> Callable[[Tensor], Tensor]:
    """The operator x -> k * x of images (B, C, H, W), each with its kernel (B, H, W), all channels alike:

    (k * x)[i, j] = sum_ab k[a, b] x[i - a, j - b],    indices modulo H and W.
    """
    transfer = torch.fft.rfft2(kernel)[:, None]
    return lambda x: torch.fft.irfft2(transfer * torch.fft.rfft2(x), kernel.shape[-2:])


class Conditioned:
    """A denoiser that also knows an observation y = A x_0 + s z of each image, with a noise level s per value.

    With h = E[x_0 | x_t] and the posterior covariance V = sigma_t^2 dh/dx_t (Tweedie), matching both moments by
    a Gaussian (Rozet et al. 2024) gives, over the values that were observed,

        E[x_0 | x_t, y] = h + V A^T (A V A^T + diag(s^2))^-1 (y - A h).

    A is any linear operator, e.g. a `convolution`, by default the identity. Missing values have
    s = infinity: a mask is a map of noise levels. Exact where x_0 is Gaussian. The system is solved by
    `num_steps` steps of conjugate gradients, each of which differentiates the denoiser once. The derivative of
    a network is not quite a covariance: an image stops where the system curves less than its noise alone does.
    """

    def __init__(
        self,
        denoiser: Denoiser,
        y: Tensor,
        noise: Tensor,
        num_steps: int = 5,
        operator: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """`y` (B, C, H, W), its value where `noise` (B, C or 1, H, W) is infinite without meaning.

        `operator` takes images (B, C, H, W) to the shape of `y`, and is written in torch.
        """
        self.denoiser, self.num_steps, self.operator = denoiser, num_steps, operator
        noise = noise.expand_as(y)
        self.seen = noise.isfinite().to(y.dtype)
        self.variance = noise.where(noise.isfinite(), 0.0) ** 2
        self.y = y.where(noise.isfinite(), 0.0)
        least = (noise**2).flatten(1).amin(1)
        self.least = per_image(0.5 * least.where(least.isfinite(), 0.0), y)  # half: rounding may fall below
        self.num_classes = getattr(denoiser, "num_classes", 0)

    def __call__(self, x_t: Tensor, sigma_t: Tensor, label: Tensor | None = None) -> Tensor:
        """E[x_0 | x_t, y] for `x_t` (B, C, H, W) and `sigma_t` (B,)."""
        with torch.enable_grad():
            x_t = x_t.detach().requires_grad_(True)
            h = self.denoiser(x_t, sigma_t, label)
            at = torch.zeros_like(x_t, requires_grad=True)
            measured = at if self.operator is None else self.operator(at)
        square = per_image(sigma_t**2, x_t)

        def adjoint(v: Tensor) -> Tensor:  # A^T v: A is linear, so its derivative is the same everywhere
            return v if self.operator is None else torch.autograd.grad(measured, at, v, retain_graph=True)[0]

        def covariance(v: Tensor) -> Tensor:  # V A^T v; the derivative of an exact denoiser is symmetric
            return square * torch.autograd.grad(h, x_t, adjoint(v), retain_graph=True)[0]

        def observe(x: Tensor) -> Tensor:
            return self.seen * (x if self.operator is None else self.operator(x))

        def system(v: Tensor) -> Tensor:
            return observe(covariance(v)) + self.variance * v

        def dot(a: Tensor, b: Tensor) -> Tensor:
            return per_image((a * b).flatten(1).sum(1), self.y)

        residual = self.seen * self.y - observe(h.detach())
        solution, direction, length = torch.zeros_like(residual), residual, dot(residual, residual)
        best, shortest, going = solution, length, torch.ones_like(length, dtype=torch.bool)
        for _ in range(self.num_steps):
            image = system(direction)
            curvature = dot(direction, image)
            going = going & (curvature > self.least * dot(direction, direction))
            step = torch.where(going, length / curvature.clamp_min(1e-30), 0.0)
            solution = solution + step * direction
            residual = residual - step * image
            before, length = length, dot(residual, residual)
            best, shortest = solution.where(length < shortest, best), torch.minimum(length, shortest)
            direction = residual + length / before.clamp_min(1e-30) * direction
        return h.detach() + covariance(best).detach()


class GaussianDenoiser(nn.Module):
    """The exact denoiser of Gaussian images x_0 ~ N(mean, C), C = F^T F + diag(variance), with few factors F.

    E[x_0 | x_t] = x_t - sigma_t^2 (C + sigma_t^2)^-1 (x_t - mean)
    """

    num_classes = 0
    mean: Tensor
    factors: Tensor
    variance: Tensor

    def __init__(self, mean: Tensor, factors: Tensor, variance: Tensor) -> None:
        """`mean` and `variance` (...), the shape of an image, `factors` (K, ...)."""
        super().__init__()
        for name, value in {"mean": mean, "factors": factors, "variance": variance}.items():
            self.register_buffer(name, value)

    def forward(self, x_t: Tensor, sigma_t: Tensor, label: Tensor | None = None) -> Tensor:
        """E[x_0 | x_t] for `x_t` (B, ...) and `sigma_t` (B,) > 0; there are no classes."""
        check_shape("sigma_t", sigma_t, len(x_t))
        factors, num = self.factors.flatten(1), len(self.factors)
        # (F^T F + D)^-1 r = D^-1 r - D^-1 F^T (I + F D^-1 F^T)^-1 F D^-1 r, with D = variance + sigma_t^2.
        inverse = 1 / (self.variance.flatten() + sigma_t.to(x_t.dtype)[:, None] ** 2)
        pairs = (factors[:, None] * factors).flatten(0, 1)  # (K K, D)
        inner = torch.eye(num).to(x_t) + (inverse @ pairs.T).view(-1, num, num)
        r = inverse * (x_t - self.mean).flatten(1)
        r = r - inverse * (torch.linalg.solve(inner, r @ factors.T) @ factors)
        return x_t - per_image(sigma_t**2, x_t) * r.view_as(x_t)


class MixtureDenoiser(nn.Module):
    """The exact denoiser of a Gaussian mixture sum_k w_k N(atom_k, std_k^2 I), also for std 0.

    The posterior mean given component k is atom_k + std_k^2 / (std_k^2 + sigma_t^2) (x_t - atom_k), and
    component k is responsible with probability proportional to w_k N(x_t; atom_k, (std_k^2 + sigma_t^2) I).
    """

    num_classes = 0
    atoms: Tensor
    log_weights: Tensor
    variance: Tensor

    def __init__(self, atoms: Tensor, weights: Tensor | None = None, std: float | Tensor = 0.0) -> None:
        """`atoms` (K, ...), `weights` (K,) (uniform if None), `std` a number or (K,)."""
        super().__init__()
        num_atoms = len(atoms)
        weights = torch.full((num_atoms,), 1 / num_atoms, dtype=atoms.dtype) if weights is None else weights
        std = torch.as_tensor(std, dtype=atoms.dtype).expand(num_atoms)
        self.register_buffer("atoms", atoms)
        self.register_buffer("log_weights", (weights / weights.sum()).log())
        self.register_buffer("variance", std**2)

    def forward(self, x_t: Tensor, sigma_t: Tensor, label: Tensor | None = None) -> Tensor:
        """E[x_0 | x_t] for `x_t` (B, ...) and `sigma_t` (B,) > 0; mixtures have no classes."""
        check_shape("sigma_t", sigma_t, len(x_t))
        atoms = self.atoms.flatten(1)
        total = self.variance + sigma_t.to(x_t.dtype)[:, None] ** 2  # (B, K)
        difference = x_t.flatten(1)[:, None] - atoms  # (B, K, D)
        log_density = -0.5 * difference.square().sum(-1) / total - 0.5 * atoms.shape[1] * total.log()
        responsibility = (self.log_weights + log_density).softmax(-1)[..., None]
        posterior = atoms + (self.variance / total)[..., None] * difference
        return (responsibility * posterior).sum(1).view_as(x_t)
