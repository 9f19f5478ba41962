"""The noise level of one image, with an interval, from small windows and their finest detail.

Every k x k window of an image is written in the cosine basis. White noise has the same variance sigma^2
in each coefficient, and coefficients are independent of each other; images put most of their energy into
the coarse ones. So the coarse coefficients of a window tell whether it is flat, without any effect on the
noise in its fine ones, and the fine coefficients of flat windows measure sigma:

    sigma^2 ~ mean detail of the windows with the least structure.

This gives a first guess s of sigma and a few dozen numbers in units of s: how detail and structure grow from
the flattest windows to all of them. A small network turns them into the mean and the standard deviation of
log(sigma / s). It is trained on noisy copies of drawn scenes (`bench/scenes.py`; its weights come with Assay),
or of a user's own clean examples, in seconds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from assay.errors import AssayError

MIN_SIDE = 8  # pixels; smaller images have too few windows
_SIDES = (3, 4, 6)
_SHARES = (0.03, 0.1, 0.2, 0.4, 0.7, 1.0)
_FIRST_GUESS = 2 * (len(_SHARES) + 2)  # the detail of the flattest 20% of the 4 x 4 windows
_FLATTEST = [2 * len(_SHARES) * i for i in range(len(_SIDES))]  # the detail of the flattest windows
_WIDTH = 48
_NUM_FEATURES = 2 * len(_SIDES) * len(_SHARES) + 3
_WEIGHTS = Path(__file__).parent.parent / "embedded" / "noise_level.safetensors"
_TINY = 1e-24
_MAX_WINDOWS = 2**16  # of one image; larger images are seen on a coarser grid of windows


@cache
def cosines(num: int) -> Tensor:
    """The orthonormal cosine basis of `num` values, (num, num), one vector per row."""
    rows, place = torch.arange(num, dtype=torch.float64)[:, None], torch.arange(num, dtype=torch.float64)
    basis = torch.cos(math.pi * rows * (2 * place + 1) / (2 * num)) * math.sqrt(2 / num)
    basis[0] = math.sqrt(1 / num)
    return basis.float()


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
        once, twice = self.apart, 2 * self.apart
        places = [(once, once), (0, once), (twice, once), (once, 0), (once, twice)]
        return torch.stack([padded[:, y : y + rows, x : x + columns] for y, x in places]).nanmean(0).flatten(1)


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


def features(x: Tensor, unit: float | None = None) -> tuple[Tensor, Tensor]:
    """Images (N, C, H, W) -> what the network sees (N, F), and log of the first guess (N,).

    `unit` is a size of pixel values that the network may know: the spread of the clean examples.
    """
    energies: list[Tensor] = []
    for k in _SIDES:
        found = windows(x, k)
        for share in _SHARES:
            energies += flattest(found, share)
    logs = torch.stack(energies, 1).double().clamp_min(_TINY).log() / 2
    guess = logs[:, _FIRST_GUESS]
    num_pixels, num_channels = x.shape[2] * x.shape[3], x.shape[1]
    size = torch.tensor([math.log(num_pixels / 1000) / 4, math.log(num_channels) / 2]).expand(len(x), 2)
    scale = guess[:, None] - math.log(unit) if unit else torch.zeros(len(x), 1)
    # A window without any structure has the log of zero: as good as 1e-4 of the noise.
    return torch.cat([(logs - guess[:, None]).clamp(-9, 9), size, scale], 1).float(), guess


class LevelNet(nn.Module):
    """Two hidden layers from `features` to the mean and the log standard deviation of log(sigma / guess)."""

    mean: Tensor
    std: Tensor
    unit: Tensor
    widen: Tensor

    def __init__(self) -> None:
        super().__init__()
        sizes = (_NUM_FEATURES, _WIDTH), (_WIDTH, _WIDTH), (_WIDTH, 2)
        first, second, last = (nn.utils.skip_init(nn.Linear, *size) for size in sizes)  # `fit` draws weights
        self.layers = nn.Sequential(first, nn.SiLU(), second, nn.SiLU(), last)
        self.register_buffer("mean", torch.zeros(_NUM_FEATURES))
        self.register_buffer("std", torch.ones(_NUM_FEATURES))
        self.register_buffer("unit", torch.zeros(()))  # 0: knows no unit
        self.register_buffer("widen", torch.ones(()))  # of intervals, so that they cover what they should

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Features (N, F) -> mean and standard deviation (N,) of log(sigma / guess)."""
        mean, log_std = self.layers((inputs - self.mean) / self.std).unbind(1)
        return 0.1 * mean, self.widen * (log_std.clamp(-3, 5) - 3).exp()

    @torch.no_grad()
    def levels(self, x: Tensor) -> Tensor:
        """The noise levels of images (N, C, H, W) and their 95% intervals, (3, N): level, low, high."""
        inputs, guess = features(x, self.unit.item() or None)
        mean, std = self(inputs)
        centre = guess + mean
        # Where some windows are perfectly flat, but for rounding in float32, there is no noise.
        flat = inputs[:, _FLATTEST].amin(1)
        rounding = (1e-6 * x.flatten(1).abs().amax(1).double()).clamp_min(_TINY).log()
        found = (flat > -5) & (guess + flat > rounding)
        return torch.stack([found * (centre + z * std).exp() for z in (0, -1.96, 1.96)])


def spread(total: int, count: int) -> list[int]:
    """At most `count` of the numbers 0 .. total - 1, evenly spread."""
    return np.unique(np.linspace(0, total - 1, min(total, count)).round().astype(int)).tolist()


@cache
def blind_net() -> LevelNet:
    """The network that comes with Assay, for images of which no clean examples exist."""
    net = LevelNet()
    net.load_state_dict(load_file(_WEIGHTS))
    return net.eval()


def train_on_examples(clean: Sequence[Tensor], seed: int = 0, num_draws: int = 6000) -> LevelNet:
    """A network that knows what clean images look like, from images (C, H, W) without noise; some seconds.

    Every fifth image is kept aside to check that the intervals cover 95%, and to widen them if not.
    """
    unit = float(torch.cat([image.flatten() for image in clean]).double().std())
    if not unit > 0:
        raise AssayError("the clean examples are all of one value", key="clean", cure="give other examples")
    generator = torch.Generator().manual_seed(seed)
    copies = max(2, num_draws // len(clean))
    inputs, target = noisy_features(clean, (0.01 * unit, 2 * unit), copies, generator, unit)
    held_out = torch.arange(len(clean)).repeat_interleave(copies) % 5 == 0
    net = fit(inputs[~held_out], target[~held_out], generator, num_steps=num_draws // 2)
    net.unit.fill_(unit)
    with torch.no_grad():
        mean, std = net(inputs[held_out])
        net.widen.mul_(max(1.0, ((target[held_out] - mean) / std).abs().quantile(0.95).item() / 1.96))
    return net


def noisy_features(
    images: Sequence[Tensor],
    sigmas: tuple[float, float],
    copies: int,
    generator: torch.Generator,
    unit: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Features of noisy copies of each image, some transposed, and log(sigma / guess), image by image.

    Levels are log-uniform between the two `sigmas`.
    """
    inputs, targets = [], []
    for image in images:
        level = torch.empty(copies).uniform_(*map(math.log, sigmas), generator=generator).exp()
        turned = image if torch.rand((), generator=generator) < 0.5 else image.transpose(1, 2)
        x = turned + level[:, None, None, None] * torch.randn(copies, *turned.shape, generator=generator)
        seen, guess = features(x, unit)
        inputs.append(seen)
        targets.append(level.log() - guess)
    return torch.cat(inputs), torch.cat(targets).float()


def fit(inputs: Tensor, target: Tensor, generator: torch.Generator, num_steps: int) -> LevelNet:
    """Train a network by the Gaussian likelihood of `target` (N,) given `inputs` (N, F)."""
    net = LevelNet()
    for parameter in net.parameters():
        bound = 1 / math.sqrt(parameter.shape[-1])
        nn.init.uniform_(parameter, -bound, bound, generator=generator)
    net.mean.copy_(inputs.mean(0))
    net.std.copy_(inputs.std(0) + 0.01)
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, num_steps)
    for _ in range(num_steps):
        chosen = torch.randint(len(inputs), (256,), generator=generator)
        mean, std = net(inputs[chosen])
        loss = (((target[chosen] - mean) / std).square() / 2 + std.log()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return net.eval()
