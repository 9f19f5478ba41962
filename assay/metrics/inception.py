"""The Inception-v3 of 2015-12-05, the one network whose Frechet distance is called FID.

It is the graph that TensorFlow published on that day. It differs from later definitions, and FID needs these
differences:

- images of 0..255 are resized to 299 x 299 with corners aligned to the origin (TensorFlow 1: output pixel
  i samples input i * in / out, without half-pixel centres and without antialiasing), then (x - 128) / 128;
- average pools inside the blocks do not count the padding;
- the last block pools by maximum where the paper and the block before pool by average.

Weight names are those of the published file `pt_inception-2015-12-05-6726825d.pth`.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from assay.metrics.weights import FeatureNetwork, WeightsFile

Size = int | tuple[int, int]
Kernel = Size | None
Branches = Mapping[str, Sequence[tuple[int, Kernel]]]


def _conv(inputs: int, outputs: int, kernel: Size, stride: int = 1, same: bool = True) -> nn.Sequential:
    """Convolution without bias, batch norm (eps 1e-3), ReLU."""
    height, width = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    padding = (height // 2, width // 2) if same else (0, 0)
    conv = nn.Conv2d(inputs, outputs, (height, width), stride, padding, bias=False)
    norm = nn.BatchNorm2d(outputs, eps=0.001)
    return nn.Sequential(OrderedDict(conv=conv, bn=norm, relu=nn.ReLU(inplace=True)))


class Block(nn.Module):
    """Branches side by side, joined: chains of convolutions (outputs, kernel), and a pool.

    A kernel of None is a 3x3 fanned out into 1x3 and 3x1, side by side. `pool` is "average" or "max", followed
    by a convolution to `pool_outputs`, or "down", which halves the image as the last convolutions then do.
    """

    def __init__(self, inputs: int, branches: Branches, pool: str, pool_outputs: int = 0) -> None:
        super().__init__()
        self.pool, self.chains = pool, list[list[list[str]]]()
        for branch, convs in branches.items():
            width, chain = inputs, []
            for number, (outputs, kernel) in enumerate(convs, 1):
                name = f"branch{branch}" + (f"_{number}" if len(convs) > 1 else "")
                is_down = pool == "down" and number == len(convs)
                fan = {name + "a": (1, 3), name + "b": (3, 1)} if kernel is None else {name: kernel}
                for each, size in fan.items():
                    self.add_module(each, _conv(width, outputs, size, 1 + is_down, same=not is_down))
                chain.append(list(fan))
                width = outputs
            self.chains.append(chain)
        if pool_outputs:
            self.branch_pool = _conv(inputs, pool_outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, H, W) -> (B, all outputs, H', W')."""
        found = []
        for chain in self.chains:
            ends = [x]
            for names in chain:
                ends = [self.get_submodule(name)(ends[-1]) for name in names]
            found += ends
        if self.pool == "down":
            return torch.cat([*found, F.max_pool2d(x, 3, stride=2)], 1)
        if self.pool == "max":
            pooled = F.max_pool2d(x, 3, stride=1, padding=1)
        else:
            pooled = F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)
        return torch.cat([*found, self.branch_pool(pooled)], 1)


_DOUBLE_3X3: Sequence[tuple[int, Kernel]] = [(64, 1), (96, 3), (96, 3)]
_WIDE, _HIGH = (1, 7), (7, 1)
A: Branches = {"1x1": [(64, 1)], "5x5": [(48, 1), (64, 5)], "3x3dbl": _DOUBLE_3X3}  # 35 x 35
B: Branches = {"3x3": [(384, 3)], "3x3dbl": _DOUBLE_3X3}  # 35 x 35 -> 17 x 17
D: Branches = {  # 17 x 17 -> 8 x 8
    "3x3": [(192, 1), (320, 3)],
    "7x7x3": [(192, 1), (192, _WIDE), (192, _HIGH), (192, 3)],
}
E: Branches = {  # 8 x 8
    "1x1": [(320, 1)],
    "3x3": [(384, 1), (384, None)],
    "3x3dbl": [(448, 1), (384, 3), (384, None)],
}


def _c(width: int) -> Branches:
    """17 x 17: 7x7 kernels split into 1x7 and 7x1."""
    return {
        "1x1": [(192, 1)],
        "7x7": [(width, 1), (width, _WIDE), (192, _HIGH)],
        "7x7dbl": [(width, 1), (width, _HIGH), (width, _WIDE), (width, _HIGH), (192, _WIDE)],
    }


class Inception(FeatureNetwork):
    """Images in 0..255 -> 2048 features. The last layer, to 1008 classes, is not used."""

    kind, takes_colour, num_on_cpu = "inception", True, 8
    weights = WeightsFile(
        name="pt_inception-2015-12-05-6726825d.pth",
        sha256="6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2",
        address="https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/"
        "pt_inception-2015-12-05-6726825d.pth",
    )

    def __init__(self) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = _conv(3, 32, 3, stride=2, same=False)
        self.Conv2d_2a_3x3 = _conv(32, 32, 3, same=False)
        self.Conv2d_2b_3x3 = _conv(32, 64, 3)
        self.Conv2d_3b_1x1 = _conv(64, 80, 1)
        self.Conv2d_4a_3x3 = _conv(80, 192, 3, same=False)
        self.Mixed_5b = Block(192, A, "average", 32)
        self.Mixed_5c = Block(256, A, "average", 64)
        self.Mixed_5d = Block(288, A, "average", 64)
        self.Mixed_6a = Block(288, B, "down")
        self.Mixed_6b = Block(768, _c(128), "average", 192)
        self.Mixed_6c = Block(768, _c(160), "average", 192)
        self.Mixed_6d = Block(768, _c(160), "average", 192)
        self.Mixed_6e = Block(768, _c(192), "average", 192)
        self.Mixed_7a = Block(768, D, "down")
        self.Mixed_7b = Block(1280, E, "average", 192)
        self.Mixed_7c = Block(2048, E, "max", 192)
        self.fc = nn.Linear(2048, 1008)

    def forward(self, x: Tensor) -> Tensor:
        """`x` (B, 3, H, W) in 0..255 -> features (B, 2048)."""
        x = (resize_like_tensorflow(x, 299) - 128) / 128
        x = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x)))
        x = F.max_pool2d(x, 3, stride=2)
        x = self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(x))
        x = F.max_pool2d(x, 3, stride=2)
        x = self.Mixed_5d(self.Mixed_5c(self.Mixed_5b(x)))
        x = self.Mixed_6e(self.Mixed_6d(self.Mixed_6c(self.Mixed_6b(self.Mixed_6a(x)))))
        x = self.Mixed_7c(self.Mixed_7b(self.Mixed_7a(x)))
        return x.mean((2, 3))


def resize_like_tensorflow(x: Tensor, size: int) -> Tensor:
    """TensorFlow 1's bilinear resize of (B, C, H, W) to (B, C, size, size), corners not aligned."""
    return _interpolate(_interpolate(x, size, 3), size, 2)


def _interpolate(x: Tensor, size: int, dim: int) -> Tensor:
    position = torch.arange(size, dtype=torch.float32, device=x.device) * (x.shape[dim] / size)
    low = position.long()
    high = (low + 1).clamp_max(x.shape[dim] - 1)
    fraction = (position - low).view(-1, *[1] * (3 - dim)).to(x.dtype)
    first = x.index_select(dim, low)
    return first + (x.index_select(dim, high) - first) * fraction
