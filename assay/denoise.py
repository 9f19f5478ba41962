"""The one seam: a denoiser maps a noisy image and its level to the expected clean image,

    x_0_hat = D(x_t, sigma_t, label) ~ E[x_0 | x_t].

Losses train it, samplers call it, and neither asks what is inside. A network F becomes a denoiser
through EDM's preconditioning,

    D(x, sigma) = c_skip x + c_out F(c_in x, c_noise),

and the Lemma of the paper translates between E[x_0 | x_t] and E[x_tn | x_t].
"""

import copy
import math
from typing import Protocol

import torch
from torch import Tensor, nn

from assay.errors import AssayError, warn
from assay.noise import check_shape, per_image, same_axes


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
    ratio = _ratio(x_t, sigma_tn, sigma_t)
    return (x_tn_hat - ratio * x_t) / (1 - ratio)


def x_tn_from_x_0(x_0_hat: Tensor, x_t: Tensor, sigma_tn: Tensor, sigma_t: Tensor) -> Tensor:
    """Lemma 2.1 the other way: E[x_tn|x_t] = (1 - r) E[x_0|x_t] + r x_t, with r = sigma_tn^2 / sigma_t^2."""
    if x_0_hat.shape != x_t.shape:  # of a network of your own: broadcasting would hide the mistake
        raise AssayError(f"has shape {tuple(x_0_hat.shape)}; expected {tuple(x_t.shape)}", key="x_0_hat")
    ratio = _ratio(x_t, sigma_tn, sigma_t)
    return (1 - ratio) * x_0_hat + ratio * x_t


def _ratio(x_t: Tensor, sigma_tn: Tensor, sigma_t: Tensor) -> Tensor:
    """r = sigma_tn^2 / sigma_t^2 as images `x_t` have it: the share of their noise that `x_tn` had."""
    sigma_tn, sigma_t = same_axes(sigma_tn, sigma_t, x_t)
    return per_image((sigma_tn / sigma_t) ** 2, x_t)


class Preconditioned(nn.Module):
    """A network F behind EDM's preconditioning, so that input, output and target have unit variance.

    The network is called as `model(x, c_noise, label, augment_label)`. It is named `model`, as in
    published checkpoints, whose weights therefore load without renaming.
    """

    def __init__(self, model: nn.Module, sigma_data: float = 0.5, num_classes: int = 0) -> None:
        super().__init__()
        self.model = model
        self.sigma_data, self.num_classes = sigma_data, num_classes

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
        output = self.model(per_image(c_in, x_t) * x_t, c_noise.to(x_t.dtype), label, augment_label)
        return per_image(c_skip, x_t) * x_t + per_image(c_out, x_t) * output.to(x_t.dtype)


def changes(x_tn: Tensor, x_0_hat: Tensor, sigma_tn: Tensor) -> Tensor:
    """By how much denoising changed the noisy ones of some images: ||x_0_hat - x_tn||^2 / (D sigma_tn^2)."""
    change = (x_0_hat - x_tn).double().square().flatten(1).mean(1) / sigma_tn.double().square()
    return change[sigma_tn > 0].cpu()


def warn_if_worse(changed: Tensor) -> None:
    """Warn if most images have changed by so much that they are farther from the truth than before.

    With noise z of variance sigma^2 in D dimensions,

        E ||x_0_hat - x_0||^2 = E ||x_0_hat - x_tn||^2 - D sigma^2 + 2 E <x_0_hat - x_0, z>,

    and the last term is positive if the denoiser moves with its input. So with `changed` above 2 the error is
    larger than D sigma^2, that of the noisy images themselves.
    """
    if len(changed) and (typical := float(changed.median())) > 2:
        what = f"denoising changed most images by {math.sqrt(typical):.2g} times their noise"
        cure = "is the model for images of this kind and scale, and are the levels right?"
        warn(f"{what}, which makes them worse: {cure}")


def check_converged(values: Tensor, model: str) -> None:
    """Reject a model whose predictions, or what is made of them, are not finite."""
    if not bool(values.isfinite().all()):
        cure = (
            "train it again with a lower train.lr, or take an earlier snapshot; is a network of your own finite"
        )
        raise AssayError(
            f"{model} does not predict finite numbers", cure=f"{cure} at all noise levels, 80 as well?"
        )


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
