"""Encoders: a change of coordinates between the images and the network, chosen by `net.encoder`.

A network may work on coefficients z = E x instead of pixels. If E is orthonormal, white noise stays white, at
the same level, and a denoiser of coefficients is one of images, E[x_0 | x_t] = E^T E[z_0 | z_t], with the same
losses. `assay.denoise.Preconditioned` encodes before the network and decodes after it: the rest sees images.
"""

import math
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from assay.errors import AssayError


class Encoder:
    """An orthonormal map of images (B, C, H, W) to coefficients of any shape; here the identity.

    A subclass with a `kind` is found by that name (see `assay.registry`).
    """

    kind: ClassVar[str] = "pixels"

    def shape(self, image_shape: tuple[int, int, int]) -> tuple[int, int, int]:
        """The shape of the coefficients of an image."""
        return image_shape

    def encode(self, x: Tensor) -> Tensor:
        """Images -> coefficients."""
        return x

    def decode(self, z: Tensor) -> Tensor:
        """Coefficients -> images: the transposed map, which is the inverse."""
        return z


class BlockCosines(Encoder):
    """The orthonormal cosine transform of each block of `side` x `side` pixels; with side 2 the Haar wavelet.

    (C, H, W) becomes (C side^2, H / side, W / side): the means of the blocks first, then finer detail.
    """

    kind = "dct"

    def __init__(self, side: int = 2) -> None:
        self.side = side

    def shape(self, image_shape: tuple[int, int, int]) -> tuple[int, int, int]:
        """(C side^2, H / side, W / side)."""
        channels, height, width = image_shape
        if height % self.side or width % self.side:
            what = f"images of {height} x {width} pixels have no whole blocks of {self.side} x {self.side}"
            raise AssayError(what, key="net.encoder", cure="crop the images, or leave it out")
        return channels * self.side**2, height // self.side, width // self.side

    def encode(self, x: Tensor) -> Tensor:
        """Images (B, C, H, W) -> coefficients (B, C side^2, H / side, W / side)."""
        blocks = x.unflatten(-1, (-1, self.side)).unflatten(-3, (-1, self.side))  # (B, C, rows, i, columns, j)
        basis = cosines(self.side).to(x)
        return torch.einsum("ai,bj,ncrisj->nabcrs", basis, basis, blocks).flatten(1, 3)

    def decode(self, z: Tensor) -> Tensor:
        """Coefficients -> images (B, C, H, W)."""
        basis = cosines(self.side).to(z)
        coefficients = z.unflatten(1, (self.side, self.side, -1))
        return torch.einsum("ai,bj,nabcrs->ncrisj", basis, basis, coefficients).flatten(-2).flatten(-3, -2)


@cache
def cosines(num: int) -> Tensor:
    """The orthonormal cosine basis of `num` values, (num, num), one vector per row."""
    rows, place = torch.arange(num, dtype=torch.float64)[:, None], torch.arange(num, dtype=torch.float64)
    basis = torch.cos(math.pi * rows * (2 * place + 1) / (2 * num)) * math.sqrt(2 / num)
    basis[0] = math.sqrt(1 / num)
    return basis.float()
