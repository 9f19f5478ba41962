"""The Inception-v3 of 2015-12-05, the one network whose Frechet distance is called FID.

It is the graph that TensorFlow published on that day. It differs from later definitions, and FID needs these
differences:

- images of 0..255 are resized to 299 x 299 with corners aligned to the origin (TensorFlow 1: output pixel
  i samples input i * in / out, without half-pixel centres and without antialiasing), then (x - 128) / 128;
- average pools inside the blocks do not count the padding;
- the last block pools by maximum where the paper and the block before pool by average;
- there are 1008 logits, eight of them unused.

Weight names are those of the published file `pt_inception-2015-12-05-6726825d.pth`.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Conv(nn.Module):
    """Convolution without bias, batch norm (eps 1e-3), ReLU."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int | tuple[int, int], stride: int = 1, same: bool = True
    ) -> None:
        super().__init__()
        height, width = kernel if isinstance(kernel, tuple) else (kernel, kernel)
        padding = (height // 2, width // 2) if same else (0, 0)
        self.conv = nn.Conv2d(inputs, outputs, (height, width), stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, H, W) -> (B, outputs, H', W')."""
        return F.relu(self.bn(self.conv(x)), inplace=True)


def _average_pool(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)


class BlockA(nn.Module):
    """35 x 35: 1x1, 5x5, two 3x3, pool."""

    def __init__(self, inputs: int, pool_outputs: int) -> None:
        super().__init__()
        self.branch1x1 = Conv(inputs, 64, 1)
        self.branch5x5_1 = Conv(inputs, 48, 1)
        self.branch5x5_2 = Conv(48, 64, 5)
        self.branch3x3dbl_1 = Conv(inputs, 64, 1)
        self.branch3x3dbl_2 = Conv(64, 96, 3)
        self.branch3x3dbl_3 = Conv(96, 96, 3)
        self.branch_pool = Conv(inputs, pool_outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, H, W) -> (B, 224 + pool_outputs, H, W)."""
        one = self.branch1x1(x)
        five = self.branch5x5_2(self.branch5x5_1(x))
        three = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return torch.cat([one, five, three, self.branch_pool(_average_pool(x))], 1)


class BlockB(nn.Module):
    """35 x 35 -> 17 x 17."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.branch3x3 = Conv(inputs, 384, 3, stride=2, same=False)
        self.branch3x3dbl_1 = Conv(inputs, 64, 1)
        self.branch3x3dbl_2 = Conv(64, 96, 3)
        self.branch3x3dbl_3 = Conv(96, 96, 3, stride=2, same=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, H, W) -> (B, 480 + inputs, H', W')."""
        double = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return torch.cat([self.branch3x3(x), double, F.max_pool2d(x, 3, stride=2)], 1)


class BlockC(nn.Module):
    """17 x 17: 7x7 kernels split into 1x7 and 7x1."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.branch1x1 = Conv(inputs, 192, 1)
        self.branch7x7_1 = Conv(inputs, width, 1)
        self.branch7x7_2 = Conv(width, width, (1, 7))
        self.branch7x7_3 = Conv(width, 192, (7, 1))
        self.branch7x7dbl_1 = Conv(inputs, width, 1)
        self.branch7x7dbl_2 = Conv(width, width, (7, 1))
        self.branch7x7dbl_3 = Conv(width, width, (1, 7))
        self.branch7x7dbl_4 = Conv(width, width, (7, 1))
        self.branch7x7dbl_5 = Conv(width, 192, (1, 7))
        self.branch_pool = Conv(inputs, 192, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, H, W) -> (B, 768, H, W)."""
        seven = self.branch7x7_3(self.branch7x7_2(self.branch7x7_1(x)))
        double = self.branch7x7dbl_3(self.branch7x7dbl_2(self.branch7x7dbl_1(x)))
        double = self.branch7x7dbl_5(self.branch7x7dbl_4(double))
        return torch.cat([self.branch1x1(x), seven, double, self.branch_pool(_average_pool(x))], 1)


class BlockD(nn.Module):
    """17 x 17 -> 8 x 8."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.branch3x3_1 = Conv(inputs, 192, 1)
        self.branch3x3_2 = Conv(192, 320, 3, stride=2, same=False)
        self.branch7x7x3_1 = Conv(inputs, 192, 1)
        self.branch7x7x3_2 = Conv(192, 192, (1, 7))
        self.branch7x7x3_3 = Conv(192, 192, (7, 1))
        self.branch7x7x3_4 = Conv(192, 192, 3, stride=2, same=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, H, W) -> (B, 512 + inputs, H', W')."""
        three = self.branch3x3_2(self.branch3x3_1(x))
        seven = self.branch7x7x3_4(self.branch7x7x3_3(self.branch7x7x3_2(self.branch7x7x3_1(x))))
        return torch.cat([three, seven, F.max_pool2d(x, 3, stride=2)], 1)


class BlockE(nn.Module):
    """8 x 8: 3x3 kernels fanned out into 1x3 and 3x1. The last of the two pools by maximum."""

    def __init__(self, inputs: int, max_pool: bool) -> None:
        super().__init__()
        self.max_pool = max_pool
        self.branch1x1 = Conv(inputs, 320, 1)
        self.branch3x3_1 = Conv(inputs, 384, 1)
        self.branch3x3_2a = Conv(384, 384, (1, 3))
        self.branch3x3_2b = Conv(384, 384, (3, 1))
        self.branch3x3dbl_1 = Conv(inputs, 448, 1)
        self.branch3x3dbl_2 = Conv(448, 384, 3)
        self.branch3x3dbl_3a = Conv(384, 384, (1, 3))
        self.branch3x3dbl_3b = Conv(384, 384, (3, 1))
        self.branch_pool = Conv(inputs, 192, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, H, W) -> (B, 2048, H, W)."""
        three = self.branch3x3_1(x)
        double = self.branch3x3dbl_2(self.branch3x3dbl_1(x))
        pooled = F.max_pool2d(x, 3, stride=1, padding=1) if self.max_pool else _average_pool(x)
        branches = [
            self.branch1x1(x),
            self.branch3x3_2a(three),
            self.branch3x3_2b(three),
            self.branch3x3dbl_3a(double),
            self.branch3x3dbl_3b(double),
            self.branch_pool(pooled),
        ]
        return torch.cat(branches, 1)


class Inception(nn.Module):
    """Images in 0..255 -> 2048 features and 1008 logits."""

    def __init__(self) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = Conv(3, 32, 3, stride=2, same=False)
        self.Conv2d_2a_3x3 = Conv(32, 32, 3, same=False)
        self.Conv2d_2b_3x3 = Conv(32, 64, 3)
        self.Conv2d_3b_1x1 = Conv(64, 80, 1)
        self.Conv2d_4a_3x3 = Conv(80, 192, 3, same=False)
        self.Mixed_5b = BlockA(192, 32)
        self.Mixed_5c = BlockA(256, 64)
        self.Mixed_5d = BlockA(288, 64)
        self.Mixed_6a = BlockB(288)
        self.Mixed_6b = BlockC(768, 128)
        self.Mixed_6c = BlockC(768, 160)
        self.Mixed_6d = BlockC(768, 160)
        self.Mixed_6e = BlockC(768, 192)
        self.Mixed_7a = BlockD(768)
        self.Mixed_7b = BlockE(1280, max_pool=False)
        self.Mixed_7c = BlockE(2048, max_pool=True)
        self.fc = nn.Linear(2048, 1008)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`x` (B, 3, H, W) in 0..255 -> features (B, 2048), logits (B, 1008) without the last bias.

        The Inception score is defined on logits without the bias; add `fc.bias` to classify.
        """
        x = (resize_like_tensorflow(x, 299) - 128) / 128
        x = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x)))
        x = F.max_pool2d(x, 3, stride=2)
        x = self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(x))
        x = F.max_pool2d(x, 3, stride=2)
        x = self.Mixed_5d(self.Mixed_5c(self.Mixed_5b(x)))
        x = self.Mixed_6e(self.Mixed_6d(self.Mixed_6c(self.Mixed_6b(self.Mixed_6a(x)))))
        x = self.Mixed_7c(self.Mixed_7b(self.Mixed_7a(x)))
        features = x.mean((2, 3))
        return features, features @ self.fc.weight.T


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
