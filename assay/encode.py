"""Encoders: a change of coordinates between the images and the network.

A model may work on coefficients z = E x instead of pixels. If E is orthonormal, white noise stays white, at the
same level: z_t = E (x + sigma_t eps) = z + sigma_t eps', eps' ~ N(0, I). So everything here holds for
coefficients as it does for pixels, and a denoiser of one is a denoiser of the other:

    E[x_0 | x_t] = E^T E[z_0 | z_t].

`assay.data.Encoded` gives the coefficients of a source, to train on; `InPixels` brings the model back.
"""

import math
from abc import ABC, abstractmethod
from functools import cache

import torch
from torch import Tensor, nn

from assay.denoise import Denoiser
from assay.errors import AssayError


class Encoder(ABC):
    """Images (B, C, H, W) to coefficients of another shape and back, without loss; white noise stays white."""

    name: str  # part of the identity of what is encoded

    @abstractmethod
    def shape(self, image_shape: tuple[int, int, int]) -> tuple[int, int, int]:
        """The shape of the coefficients of an image."""

    @abstractmethod
    def encode(self, x: Tensor) -> Tensor:
        """Images -> coefficients."""

    @abstractmethod
    def decode(self, z: Tensor) -> Tensor:
        """Coefficients -> images."""


class BlockCosines(Encoder):
    """The orthonormal cosine transform of each block of `side` x `side` pixels; with side 2 the Haar wavelet.

    (C, H, W) becomes (C side^2, H / side, W / side): the means of the blocks first, then finer detail.
    """

    def __init__(self, side: int = 2) -> None:
        self.side, self.name = side, f"cosines of {side} x {side} blocks"

    def shape(self, image_shape: tuple[int, int, int]) -> tuple[int, int, int]:
        """The shape of the coefficients of an image."""
        channels, height, width = image_shape
        if height % self.side or width % self.side:
            what = f"images of {height} x {width} pixels have no whole blocks of {self.side} x {self.side}"
            raise AssayError(what, key="side")
        return channels * self.side**2, height // self.side, width // self.side

    def encode(self, x: Tensor) -> Tensor:
        """Images (B, C, H, W) -> coefficients (B, C side^2, H / side, W / side)."""
        blocks = x.unflatten(-1, (-1, self.side)).unflatten(-3, (-1, self.side))  # (B, C, rows, i, columns, j)
        basis = cosines(self.side).to(x)
        found = torch.einsum("ai,bj,ncrisj->nabcrs", basis, basis, blocks)
        return found.flatten(1, 3)

    def decode(self, z: Tensor) -> Tensor:
        """The transposed map."""
        basis = cosines(self.side).to(z)
        coefficients = z.unflatten(1, (self.side, self.side, -1))
        blocks = torch.einsum("ai,bj,nabcrs->ncrisj", basis, basis, coefficients)
        return blocks.flatten(-2).flatten(-3, -2)


class InPixels(nn.Module):
    """A denoiser of coefficients as a denoiser of images: sample from it, measure it, denoise with it."""

    def __init__(self, denoiser: Denoiser, encoder: Encoder, num_classes: int = 0) -> None:
        super().__init__()
        self.denoiser, self.encoder, self.num_classes = denoiser, encoder, num_classes

    def forward(self, x_t: Tensor, sigma_t: Tensor, label: Tensor | None = None) -> Tensor:
        """`x_t` (B, C, H, W) at levels `sigma_t` (B,) -> `x_0_hat`."""
        return self.encoder.decode(self.denoiser(self.encoder.encode(x_t), sigma_t, label))


@cache
def cosines(num: int) -> Tensor:
    """The orthonormal cosine basis of `num` values, (num, num), one vector per row."""
    rows, place = torch.arange(num, dtype=torch.float64)[:, None], torch.arange(num, dtype=torch.float64)
    basis = torch.cos(math.pi * rows * (2 * place + 1) / (2 * num)) * math.sqrt(2 / num)
    basis[0] = math.sqrt(1 / num)
    return basis.float()
