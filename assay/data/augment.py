"""Augmentation that respects noise.

Interpolation changes the noise of an image: its variance falls and neighbouring pixels correlate. Images
with noise may therefore only be moved as whole pixels, by flips, quarter turns and shifts that wrap
around (reflecting would repeat pixels, and their noise). A flipped image keeps its own noise, flipped.

Clean images may also go through EDM's geometric pipeline: flips, isotropic scaling, rotation, anisotropic
scaling and translation, each with its own probability, resampled on a grid twice as fine. The
network gets 9 labels that describe what was done, so that sampling with zero labels gives unaltered images:

    x-flip a0, y-flip a1, scale a2, cos a3 - 1, sin a3, a5 cos a4, a5 sin a4, shift a6, a7

with scale 2^(0.2 a2), rotation by a3, stretching by 2^(0.2 a5) along the angle a4, and translation by
(a6, a7) / 8 of the width and height; a2, a5, a6, a7 ~ N(0, 1), a3 ~ U(-pi, pi), a4 likewise half of the time
and else 0. Noisy images get those of these operations that are exact, as often and with their labels. What is
asked for as flips, turns and shifts by name has zero labels.
"""

import math
from functools import lru_cache

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from assay.errors import AssayError
from assay.settings import Strict

NUM_AUGMENT_LABELS = 9
NUM_UNIFORMS = 18  # random numbers that one image uses up


class Augmentation(Strict):
    """What may be done to images; by default nothing. Noisy ones move by whole pixels, and keep their noise."""

    flip_x: bool = Field(False, description="Mirror half of the images left to right.")
    flip_y: bool = Field(False, description="Mirror half of the images top to bottom.")
    turn: bool = Field(False, description="Rotate images by 0, 90, 180 or 270 degrees.")
    shift: int = Field(0, ge=0, le=2**20, description="Shift by up to this many whole pixels, wrapping around.")
    geometric: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Probability of each operation of EDM's pipeline; noisy images get exact ones.",
    )
    interpolate_noisy: bool = Field(
        False, description="Apply geometric to noisy images too, as the original code does."
    )


def augment(
    x: Tensor, sigma_tn: Tensor, uniform: Tensor, augmentation: Augmentation
) -> tuple[Tensor, Tensor | None]:
    """`x` (B, C, H, W), `sigma_tn` (B,), `uniform` (B, NUM_UNIFORMS) in [0, 1) -> x, labels (B, 9).

    The labels are None unless the geometric pipe is on.
    """
    if augmentation.turn and x.shape[-1] != x.shape[-2]:
        what = f"images of {x.shape[-2]} x {x.shape[-1]} pixels cannot be turned by 90 degrees"
        raise AssayError(what, key="turn", cure="set it to false, or crop images to squares")
    flip_x, flip_y, turn, down, right = uniform[:, :5].unbind(1)
    most = augmentation.shift
    moved = _moved(
        x,
        flip_x < 0.5 if augmentation.flip_x else None,
        flip_y < 0.5 if augmentation.flip_y else None,
        (turn * 4).long() if augmentation.turn else None,
        *((draw * (2 * most + 1)).long() - most if most else None for draw in (down, right)),
    )
    if augmentation.geometric == 0:
        return moved, None
    label = x.new_zeros(len(x), NUM_AUGMENT_LABELS)
    x = moved.clone() if moved is x else moved
    may_interpolate = (sigma_tn == 0) | augmentation.interpolate_noisy
    for pipe, mask in ((_geometric, may_interpolate), (_exact, ~may_interpolate)):
        chosen = mask.nonzero()[:, 0]
        if len(chosen):
            x[chosen], label[chosen] = pipe(x[chosen], uniform[chosen, 5:], augmentation.geometric)
    return x, label


def _moved(
    x: Tensor,
    flip_x: Tensor | None,
    flip_y: Tensor | None,
    quarter: Tensor | None = None,
    *shifts: Tensor | None,
) -> Tensor:
    """Images mirrored, rotated by quarter turns, shifted down and right: every output pixel is an input pixel.

    (B,) each, or None for what is off; what leaves at one side enters at the other.
    """
    each = (-1, 1, 1, 1)
    turned = None if quarter is None else quarter >= 2
    for flipped, axes in ((flip_x, (-1,)), (flip_y, (-2,)), (turned, (-2, -1))):
        if flipped is not None:
            x = torch.where(flipped.view(each), x.flip(axes), x)
    if quarter is not None and x.shape[-1] == x.shape[-2]:  # else no turn is odd
        x = torch.where((quarter % 2 == 1).view(each), x.rot90(1, (-2, -1)), x)
    for dimension, shift in zip((2, 3), shifts, strict=False):
        if shift is not None:
            place = torch.arange(x.shape[dimension]).view([-1 if d == dimension else 1 for d in range(4)])
            x = x.gather(dimension, ((place - shift.view(each)) % x.shape[dimension]).expand_as(x))
    return x


def _exact(x: Tensor, uniform: Tensor, probability: float) -> tuple[Tensor, Tensor]:
    """What of EDM's pipe moves pixels as they are: (B, C, H, W), (B, 13) -> images, labels (B, 9)."""
    chance, value = uniform[:, :5] < probability, uniform[:, 5:]
    height, width = x.shape[-2:]
    a0, a1 = value[:, 0] < 0.5, chance[:, 0] & (value[:, 1] < 0.5)
    quarter = torch.where(chance[:, 2], (value[:, 3] * 4).long(), 0)
    if height != width:
        quarter = quarter // 2 * 2
    normal = torch.special.ndtri(value[:, 6:].clamp_min(2.0**-54))
    pixels = (normal * torch.tensor([width / 8, height / 8])).round().long()
    right, down = torch.where(chance[:, 4:], pixels, 0).unbind(1)
    cos, sin = torch.tensor([0.0, -1, -2, -1])[quarter], torch.tensor([0.0, 1, 0, -1])[quarter]
    zero = torch.zeros(len(x))
    columns = [a0, a1, zero, cos, sin, zero, zero, right * (8 / width), down * (8 / height)]
    label = torch.stack([column.to(x.dtype) for column in columns], 1)
    return _moved(x, a0, a1, quarter, down, right), label


def _geometric(x: Tensor, uniform: Tensor, probability: float) -> tuple[Tensor, Tensor]:
    """EDM's pipe: (B, C, H, W), (B, 13) -> images, labels (B, 9)."""
    chance, value = uniform[:, :5] < probability, uniform[:, 5:]
    normal = torch.special.ndtri(value.clamp_min(2.0**-54))  # [0, 1) -> (0, 1)
    angle = (2 * value - 1) * math.pi
    zero = torch.zeros(len(x), dtype=uniform.dtype)
    a0 = (value[:, 0] < 0.5).to(uniform.dtype)  # EDM mirrors half of all images, at any probability
    a1 = torch.where(chance[:, 0], (value[:, 1] < 0.5).to(uniform.dtype), zero)
    a2 = torch.where(chance[:, 1], normal[:, 2], zero)
    a3 = torch.where(chance[:, 2], angle[:, 3], zero)
    # One number decides whether to stretch along an axis of the image, half of the time, and along which else.
    a4 = torch.where(chance[:, 3] & (value[:, 4] >= 0.5), (4 * value[:, 4] - 3) * math.pi, zero)
    a5 = torch.where(chance[:, 3], normal[:, 5], zero)
    a6, a7 = (torch.where(chance[:, 4], normal[:, i], zero) for i in (6, 7))
    label = torch.stack([a0, a1, a2, a3.cos() - 1, a3.sin(), a5 * a4.cos(), a5 * a4.sin(), a6, a7], 1)

    # From output to input coordinates, in pixels from the centre: undo the last operation first.
    height, width = x.shape[-2:]
    scale, stretch = 2 ** (-0.2 * a2), 2 ** (0.2 * a5)
    matrix = _diagonal(1 - 2 * a0, 1 - 2 * a1) @ _diagonal(scale, scale) @ _rotation(a3)
    matrix = matrix @ _rotation(-a4) @ _diagonal(1 / stretch, stretch) @ _rotation(a4)
    offset = -matrix @ torch.stack([a6 * width / 8, a7 * height / 8], 1)[:, :, None]
    moved = _moved(x.clone(), a0 > 0, a1 > 0)
    resampled = (label[:, 2:] != 0).any(1).nonzero()[:, 0]  # flips alone need no interpolation
    if len(resampled):
        # affine_grid counts from the centre to the outermost pixels.
        size = torch.tensor([width - 1, height - 1], dtype=uniform.dtype).clamp_min(1)
        theta = torch.cat([matrix * (size / size[:, None]), offset * (2 / size[:, None])], 2)[resampled]
        grid = functional.affine_grid(theta.to(x.dtype), list(x[resampled].shape), align_corners=True)
        doubled = _doubling(height).T @ x[resampled] @ _doubling(width)
        moved[resampled] = functional.grid_sample(doubled, grid, padding_mode="reflection", align_corners=True)
    return moved, label.to(x.dtype)


@lru_cache(maxsize=4)
def _doubling(width: int) -> Tensor:
    """(W, 2 W - 1): puts a value between every two of a row, exact for polynomials up to degree 7.

    Linear interpolation between pixels blurs; between these it hardly does.
    """
    matrix = torch.zeros(width, 2 * width - 1)
    matrix[range(width), range(0, 2 * width - 1, 2)] = 1
    for left in range(width - 1):
        for reach, weight in enumerate((-5, 49, -245, 1225, 1225, -245, 49, -5)):
            place = abs(left - 3 + reach) % (2 * width - 2)  # mirrored at both ends
            matrix[min(place, 2 * width - 2 - place), 2 * left + 1] += weight / 2048
    return matrix


def _diagonal(x: Tensor, y: Tensor) -> Tensor:
    return torch.diag_embed(torch.stack([x, y], 1))


def _rotation(angle: Tensor) -> Tensor:
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([torch.stack([cos, -sin], 1), torch.stack([sin, cos], 1)], 1)
