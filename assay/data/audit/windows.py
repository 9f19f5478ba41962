"""What can be measured about noise without knowing the image: small windows and their finest detail.

Every k x k window of an image is written in the cosine basis. White noise has the same variance sigma^2
in each coefficient, and coefficients are independent of each other; images put most of their energy into
the coarse ones. So the coarse coefficients of a window tell whether it is flat, without any effect on the
noise in its fine ones, and the fine coefficients of flat windows measure sigma:

    sigma^2 ~ mean detail of the windows with the least structure.

There is no selection bias, which robust estimates from one band (the median of wavelet coefficients) trade
for a bias from texture.
"""

import math
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from assay.encode import cosines

_MAX_WINDOWS = 2**16  # of one image; larger images are seen on a coarser grid of windows


@dataclass(frozen=True)
class Windows:
    """The windows of N images: squared coefficients (N, C k^2, L), and what follows from them, (N, L) each."""

    energy: Tensor
    detail: Tensor  # mean square of the fine coefficients
    structure: Tensor  # of the coarse ones, without the mean
    mean: Tensor  # value
    grid: tuple[int, int]  # L = rows * columns of windows
    apart: int  # steps on that grid to a window that shares no pixel

    def structure_around(self) -> Tensor:
        """Structure (N, L), averaged with that of the up to four windows beside each: finds wide flat parts."""
        rows, columns = self.grid
        padded = F.pad(self.structure.unflatten(1, self.grid), (self.apart,) * 4, value=math.nan)
        places = [(1, 1), (0, 1), (2, 1), (1, 0), (1, 2)]
        shifted = [
            padded[:, a * self.apart : a * self.apart + rows, b * self.apart : b * self.apart + columns]
            for a, b in places
        ]
        return torch.stack(shifted).nanmean(0).flatten(1)


def lag_one(k: int) -> tuple[Tensor, Tensor]:
    """Which coefficients (k, k) of one channel are fine, and the sum over pixel pairs c(n) c(n + 1) of each."""
    products = (cosines(k)[:, 1:] * cosines(k)[:, :-1]).sum(1)
    return _fine(1, k)[0], products[:, None] + products


@cache
def _fine(num_channels: int, k: int) -> Tensor:
    """Which coefficients (C, k, k) count as fine; differences between channels are finer than their mean."""
    order = torch.arange(k)[:, None] + torch.arange(k)
    return torch.stack([order >= k] + [order >= max(1, k - k // 2)] * (num_channels - 1))


def windows(x: Tensor, k: int) -> Windows:
    """The k x k windows of images `x` (N, C, H, W)."""
    num_images, num_channels, height, width = x.shape
    stride = _stride(height, width)
    x = torch.einsum("dc,nchw->ndhw", cosines(num_channels), x) if num_channels > 1 else x
    filters = torch.einsum("ai,bj->abij", cosines(k), cosines(k)).reshape(k * k, 1, k, k)
    coefficients = F.conv2d(x.reshape(-1, 1, height, width), filters, stride=stride)
    grid = (coefficients.shape[2], coefficients.shape[3])
    coefficients = coefficients.reshape(num_images, num_channels * k * k, -1)
    fine = _fine(num_channels, k).flatten()
    coarse = ~fine
    coarse[:: k * k] = False
    mean = coefficients[:, 0] / (k * math.sqrt(num_channels))
    energy = coefficients.square_()
    return Windows(energy, energy[:, fine].mean(1), energy[:, coarse].mean(1), mean, grid, -(-k // stride))


def _stride(height: int, width: int) -> int:
    return max(1, math.isqrt(height * width // _MAX_WINDOWS))


def unclipped(x: Tensor, k: int, bounds: tuple[float, float]) -> Tensor:
    """Which of the windows (N, L) have all their values strictly between the `bounds`."""
    outside = ((x <= bounds[0]) | (x >= bounds[1])).any(1, keepdim=True).float()
    return F.max_pool2d(outside, k, _stride(*x.shape[2:])).flatten(1) == 0


def flattest(found: Windows, share: float) -> tuple[Tensor, Tensor]:
    """Mean detail and structure (N,) of the windows of each image with the least structure."""
    count = max(1, round(share * found.structure.shape[1]))
    structure, place = found.structure.topk(count, dim=1, largest=False)
    return found.detail.gather(1, place).mean(1), structure.mean(1)
