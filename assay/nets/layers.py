"""Layers shared by the networks.

Images are stored channels-last, which is faster on CPUs and tensor cores. Weight names, channel order inside
`qkv`, epsilons and group counts are those of EDM's published networks, so that their state dicts load.
"""

import math
from abc import abstractmethod
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, Strict
from torch import Tensor, nn

from assay.errors import AssayError
from assay.settings import Strict as Settings

Direction = Literal["up", "down"]
MOST_BLOCKS = 200  # in a level of a network: a damaged config is not built for ever
Size = Annotated[int, Field(ge=1)]
Shape = Annotated[tuple[Size, Size, Size], Strict(False)]
Ints = Annotated[tuple[int, ...], Strict(False)]  # lists too, as JSON and TOML have them


class BaseConfig(Settings):
    """Settings that every network shares: the image shape, and what it is conditioned on.

    A subclass with a `kind` of its own is a network that `[net]` and checkpoints know (see `assay.registry`).
    """

    output_weights: ClassVar[tuple[str, ...]] = ()  # ends of the names of those that write the image
    kind: str

    image_shape: Shape = Field(description="Channels, height and width. Follows from the data.")
    num_classes: int = Field(0, ge=0, description="Classes, 0 for none. Follows from train.class_conditional.")
    augment_dim: int = Field(0, ge=0, description="Inputs of the augmentation. Follows from train.augment.")
    sigma_data: float = Field(0.5, gt=0, le=1e6, description="The data's deviation in EDM's preconditioning.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Probability of dropout.")
    label_dropout: float = Field(0.0, ge=0, lt=1, description="How often training hides the class.")

    @abstractmethod
    def build(self) -> nn.Module:
        """A new network, called as `assay.denoise.Preconditioned` says."""


class Network(nn.Module):
    """What the networks share: a config, and how labels become class vectors."""

    def __init__(self, config: BaseConfig) -> None:
        super().__init__()
        self.config = config

    def class_vector(self, label: Tensor | None, like: Tensor) -> Tensor:
        """Labels as vectors (B, num_classes): one-hot for integers, zeros for none (-1 or no label at all).

        In training a class is hidden with probability `label_dropout`, drawn as dropout draws.
        """
        if label is None:
            return like.new_zeros(len(like), self.config.num_classes)
        if not label.is_floating_point():
            # Not one_hot, which looks at the values.
            label = label[:, None] == torch.arange(self.config.num_classes, device=label.device)
        vector = label.to(like.dtype)
        if self.training and self.config.label_dropout:
            vector = vector * (torch.rand_like(vector[:, :1]) >= self.config.label_dropout)
        return vector


class PositionalEmbedding(nn.Module):
    """Noise levels as [cos(f c), sin(f c)], f falling geometrically from 1 to about `1 / max_period`.

    With `endpoint` the last frequency is exactly that (DDPM++), without it the next would be (ADM).
    """

    def __init__(self, num_channels: int, endpoint: bool = False, max_period: float = 10000) -> None:
        super().__init__()
        self.num_frequencies, self.max_period = num_channels // 2, max_period
        self.last = self.num_frequencies - endpoint

    def forward(self, c_noise: Tensor) -> Tensor:
        """(B,) -> (B, num_channels)."""
        exponent = torch.arange(self.num_frequencies, dtype=torch.float32, device=c_noise.device) / self.last
        angle = torch.outer(c_noise.float(), (1 / self.max_period) ** exponent)
        return torch.cat([angle.cos(), angle.sin()], dim=1).to(c_noise.dtype)


class FourierEmbedding(nn.Module):
    """Noise levels as [cos(2 pi f c), sin(2 pi f c)], frequencies drawn once from N(0, 16^2) (NCSN++)."""

    freqs: Tensor

    def __init__(self, num_channels: int) -> None:
        super().__init__()
        self.register_buffer("freqs", torch.randn(num_channels // 2) * 16)

    def forward(self, c_noise: Tensor) -> Tensor:
        """(B,) -> (B, num_channels)."""
        angle = torch.outer(c_noise, 2 * math.pi * self.freqs.to(c_noise.dtype))
        return torch.cat([angle.cos(), angle.sin()], dim=1)


class GroupNorm(nn.GroupNorm):
    """Group normalisation in at most 32 groups of at least four channels."""

    def __init__(self, num_channels: int, eps: float) -> None:
        num_groups = min(32, num_channels // 4)
        if num_groups == 0 or num_channels % num_groups:
            what = f"{num_channels} channels cannot be normalised in {num_groups} groups of equal size"
            cure = "each level needs a multiple of 4 channels, of 32 beyond 128"
            raise AssayError(what, key="model_channels", cure=cure)
        super().__init__(num_groups, num_channels, eps)


def resample_kernel(taps: tuple[int, ...]) -> Tensor:
    """The separable smoothing filter (1, 1, K, K) of 1-d `taps`, with sum 1.

    It has values also on the meta device: with these, what a checkpoint says of them is compared.
    """
    line = torch.tensor(taps, dtype=torch.float32, device="cpu")
    return (line.outer(line) / line.sum() ** 2)[None, None]


def resample(x: Tensor, kernel: Tensor, direction: Direction, box: bool) -> Tensor:
    """Smooth with `kernel` and halve or double the sides. `box` says that the kernel is a 2x2 mean."""
    if box:
        return F.avg_pool2d(x, 2) if direction == "down" else F.interpolate(x, scale_factor=2.0, mode="nearest")
    num_channels, padding = x.shape[1], (kernel.shape[-1] - 1) // 2
    kernel = kernel.to(x).expand(num_channels, 1, -1, -1)
    if direction == "down":
        return F.conv2d(x, kernel, stride=2, padding=padding, groups=num_channels)
    return F.conv_transpose2d(x, 4 * kernel, stride=2, padding=padding, groups=num_channels)


class Resample(nn.Module):
    """Smooths and halves or doubles the sides, without weights."""

    resample_filter: Tensor

    def __init__(self, direction: Direction, taps: tuple[int, ...]) -> None:
        super().__init__()
        self.direction, self.box = direction, taps == (1, 1)
        self.register_buffer("resample_filter", resample_kernel(taps))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, H/2, W/2) or (B, C, 2H, 2W)."""
        return resample(x, self.resample_filter, self.direction, self.box)


class ResampleConv(nn.Conv2d):
    """Resamples, then convolves.

    Where pixels are repeated (a 2x2 mean upwards) a 1x1 convolution goes before it, at a quarter of the work; a
    3x3 one joins it in one transposed 4x4 convolution of stride 2, at 16/36.
    """

    resample_filter: Tensor

    def __init__(
        self, in_channels: int, out_channels: int, kernel: int, direction: Direction, taps: tuple[int, ...]
    ) -> None:
        super().__init__(in_channels, out_channels, kernel, padding=kernel // 2)
        self.direction, self.box = direction, taps == (1, 1)
        self.register_buffer("resample_filter", resample_kernel(taps))

    def forward(self, x: Tensor) -> Tensor:
        """(B, I, H, W) -> (B, O, H/2, W/2) or (B, O, 2H, 2W)."""
        if self.box and self.direction == "up":
            if self.kernel_size == (1, 1):
                return resample(super().forward(x), self.resample_filter, "up", self.box)
            weight = _compose(self.weight, 4 * self.resample_filter).flip(2, 3).transpose(0, 1)
            return F.conv_transpose2d(x, weight, self.bias, stride=2, padding=1)
        return super().forward(resample(x, self.resample_filter, self.direction, self.box))


class ConvDown(nn.Conv2d):
    """Convolves, then smooths and halves (NCSN++'s residual branch), as one strided convolution.

    The two kernels compose into one of size 3 + K - 1: sum_k f[k] sum_j w[j] x[2 n + k + j].
    """

    resample_filter: Tensor

    def __init__(self, in_channels: int, out_channels: int, taps: tuple[int, ...]) -> None:
        super().__init__(in_channels, out_channels, 3, stride=2, padding=1 + (len(taps) - 1) // 2)
        self.register_buffer("resample_filter", resample_kernel(taps))

    def forward(self, x: Tensor) -> Tensor:
        """(B, I, H, W) -> (B, O, H/2, W/2)."""
        return self._conv_forward(x, _compose(self.weight, self.resample_filter), self.bias)


def _compose(weight: Tensor, kernel: Tensor) -> Tensor:
    """Convolving with `weight` (O, I, J, J) and with `kernel` (1, 1, K, K) as one: (O, I, J+K-1, J+K-1)."""
    kernel = kernel.to(weight).flip(2, 3)
    flat = F.conv2d(weight.flatten(0, 1)[:, None], kernel, padding=kernel.shape[-1] - 1)
    return flat[:, 0].unflatten(0, weight.shape[:2])


def attend(qkv: Tensor, num_heads: int) -> Tensor:
    """Self-attention over pixels: `qkv` (B, 3C, H, W), q, k and v in turn -> (B, C, H, W), channels-last."""
    batch, channels, height, width = qkv.shape
    tokens = qkv.permute(0, 2, 3, 1).reshape(batch, height * width, 3, num_heads, -1)
    query, key, value = tokens.permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2)
    return mixed.reshape(batch, height, width, channels // 3).permute(0, 3, 1, 2)


class Block(nn.Module):
    """The residual block of DDPM++, NCSN++ and ADM, optionally resampling, optionally with attention:

        h = conv1(silu(norm1(conv0(silu(norm0(x))), emb)))
        x = skip_scale (skip(x) + h)
        x = skip_scale (x + proj(attention(norm2(x))))

    In DDPM++ and NCSN++ (`song`) the embedding shifts channels before `norm1`, skip_scale is sqrt(1/2) and
    every resampling skip has a 1x1 convolution; in ADM it scales and shifts them after it, and skip_scale is 1.
    The factor is applied to the small weights, not to the images.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        emb_channels: int,
        song: bool,
        num_heads: int = 0,  # 0: no attention
        dropout: float = 0.0,
        taps: tuple[int, ...] = (1, 1),
        direction: Direction | None = None,
    ) -> None:
        super().__init__()
        eps, self.skip_scale = (1e-6, math.sqrt(0.5)) if song else (1e-5, 1.0)
        self.out_channels, self.num_heads, self.dropout = out_channels, num_heads, dropout
        self.adaptive_scale = not song
        self.norm0 = GroupNorm(in_channels, eps)
        if direction:
            self.conv0: nn.Conv2d = ResampleConv(in_channels, out_channels, 3, direction, taps)
        else:
            self.conv0 = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.affine = nn.Linear(emb_channels, out_channels * (1 if song else 2))
        self.norm1 = GroupNorm(out_channels, eps)
        self.conv1 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.skip: nn.Module | None = None
        if direction and (song or in_channels != out_channels):
            self.skip = ResampleConv(in_channels, out_channels, 1, direction, taps)
        elif direction:
            self.skip = Resample(direction, taps)
        elif in_channels != out_channels:
            self.skip = nn.Conv2d(in_channels, out_channels, 1)
        if num_heads:
            self.norm2 = GroupNorm(out_channels, eps)
            self.qkv = nn.Conv2d(out_channels, out_channels * 3, 1)
            self.proj = nn.Conv2d(out_channels, out_channels, 1)

    def forward(self, x: Tensor, emb: Tensor, more: Tensor | None = None) -> Tensor:
        """`x` (B, I, H, W), `emb` (B, E) -> (B, O, H', W'). `more` are further channels of the input."""
        if more is not None and isinstance(self.skip, nn.Conv2d) and _cheaper_apart(x, more):
            hidden, skip = self._enter_apart(x, more, self.skip)
        else:
            x = x if more is None else torch.cat([x, more], dim=1)
            hidden = self.conv0(F.silu(self.norm0(x)))
            skip = x if self.skip is None else self.skip(x)
        shift = self.affine(emb)[:, :, None, None]
        if self.adaptive_scale:
            scale, shift = shift.chunk(2, dim=1)
            hidden = torch.addcmul(shift, self.norm1(hidden), 1 + scale)
        else:
            hidden = self.norm1(hidden.add_(shift))
        hidden = F.dropout(F.silu(hidden), self.dropout, self.training)
        x = self.add(skip, self.conv1, hidden)
        if self.num_heads:
            # Published weights order the channels of qkv as (head, channel, q/k/v).
            order = (self.num_heads, self.out_channels // self.num_heads, 3)
            weight = self.qkv.weight.unflatten(0, order).movedim(2, 0).flatten(0, 2)
            bias = _bias(self.qkv).view(order).movedim(2, 0).flatten()
            x = self.add(x, self.proj, attend(F.conv2d(self.norm2(x), weight, bias), self.num_heads))
        return x

    def _enter_apart(self, x: Tensor, more: Tensor, skip: nn.Conv2d) -> tuple[Tensor, Tensor]:
        """conv0(silu(norm0([x, more]))) and skip([x, more]), as sums over the two parts."""
        group = self.norm0.num_channels // self.norm0.num_groups
        sums, start = [_bias(self.conv0).view(-1, 1, 1), _bias(skip).view(-1, 1, 1)], 0
        for part in (x, more):
            mine = slice(start, start := start + part.shape[1])
            scale, shift = self.norm0.weight[mine], self.norm0.bias[mine]
            normed = F.silu(F.group_norm(part, part.shape[1] // group, scale, shift, self.norm0.eps))
            sums[0] = F.conv2d(normed, self.conv0.weight[:, mine], padding=1).add_(sums[0])
            sums[1] = F.conv2d(part, skip.weight[:, mine]).add_(sums[1])
        return sums[0], sums[1]

    def add(self, x: Tensor, conv: nn.Conv2d, hidden: Tensor) -> Tensor:
        """skip_scale (x + conv(hidden))."""
        if self.skip_scale == 1:
            return conv(hidden).add_(x)
        weight, bias = conv.weight * self.skip_scale, _bias(conv) * self.skip_scale
        return conv._conv_forward(hidden, weight, bias).add_(x, alpha=self.skip_scale)


def _cheaper_apart(x: Tensor, more: Tensor) -> bool:
    """Whether two narrow images are faster normalised and convolved one by one: on CPUs, by a fifth."""
    return x.device.type == "cpu" and x.shape[1] == more.shape[1] == 32 and x.shape[2] * x.shape[3] >= 784


def _bias(conv: nn.Conv2d) -> Tensor:
    assert conv.bias is not None
    return conv.bias
