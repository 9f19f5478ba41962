"""A transformer over image patches (DiT, Peebles & Xie) and its one-token relative, an MLP.

    tokens = patches W + position
    tokens = tokens + gate attention(adapt(tokens))      for each block (DiT only)
    tokens = tokens + gate mlp(adapt(tokens))
    adapt(h) = layer_norm(h) (1 + scale) + shift

where gate, scale and shift are linear in the embedding of noise level, class and augmentation, from zero.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from assay.errors import AssayError, Rules
from assay.nets.layers import MOST_BLOCKS, BaseConfig, Network, PositionalEmbedding


class TokenConfig(BaseConfig):
    """What both networks have: a width and a number of blocks."""

    output_weights = ("token_out.weight", "position")

    width: int = Field(192, ge=4, description="Features per token.")
    num_blocks: int = Field(8, ge=1, le=MOST_BLOCKS, description="Blocks.")


class DiTConfig(TokenConfig):
    """A patch transformer. Sides must be multiples of `patch`, otherwise any image shape."""

    kind: Literal["dit"] = Field("dit", description="A patch transformer.")
    patch: int = Field(4, ge=1, description="Side of a patch in pixels; both sides of the image are multiples.")
    channels_per_head: int = Field(64, ge=1, description="Features per attention head.")

    def rules(self) -> Rules:
        """Patches tile the images, and heads share the width."""
        what = f"patches of {self.patch} do not tile images of {self.image_shape[1:]} pixels"
        yield any(side % self.patch for side in self.image_shape[1:]), AssayError(what, key="patch")
        what = f"{self.width} is no multiple of channels_per_head and of 4"
        yield self.width % self.channels_per_head or self.width % 4, AssayError(what, key="width")

    def build(self) -> "TokenNetwork":
        """The network."""
        return TokenNetwork(self, (self.patch, self.patch), self.width // self.channels_per_head)


class MLPConfig(TokenConfig):
    """Residual layers on the flattened image: for images of about 8x8, of any shape."""

    kind: Literal["mlp"] = Field("mlp", description="Residual layers on the flattened image.")

    def rules(self) -> Rules:
        """Cosines and sines of the noise level share the width."""
        yield self.width % 2, AssayError(f"{self.width} is odd", key="width", cure="give an even number")

    def build(self) -> "TokenNetwork":
        """The network."""
        return TokenNetwork(self, self.image_shape[1:], num_heads=0)


class TokenBlock(nn.Module):
    """One block: attention unless `num_heads` is 0, then an MLP of two layers, each adapted and gated."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.adapt = nn.Linear(width, width * (6 if num_heads else 3))
        if num_heads:
            self.qkv = nn.Linear(width, width * 3)
            self.proj = nn.Linear(width, width)
        self.mlp0 = nn.Linear(width, width * 4)
        self.mlp1 = nn.Linear(width * 4, width)

    def forward(self, tokens: Tensor, emb: Tensor) -> Tensor:
        """`tokens` (B, N, width), `emb` (B, width) -> (B, N, width)."""
        gate, scale, shift, *attention = self.adapt(emb)[:, None].chunk(6 if self.num_heads else 3, dim=-1)
        if self.num_heads:
            tokens = torch.addcmul(tokens, attention[0], self.attend(_adapt(tokens, *attention[1:])))
        hidden = F.gelu(self.mlp0(_adapt(tokens, scale, shift)), approximate="tanh")
        return torch.addcmul(tokens, gate, self.mlp1(F.dropout(hidden, self.dropout, self.training)))

    def attend(self, tokens: Tensor) -> Tensor:
        """Multi-head self-attention, (B, N, width) -> (B, N, width)."""
        query, key, value = self.qkv(tokens).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


class TokenNetwork(Network):
    """Cuts images into patches, one token each, embeds the conditions, runs the blocks and joins the patches.

    With attention each token has a learned position, which starts as sines of row and column.
    """

    def __init__(self, config: TokenConfig, patch: tuple[int, int], num_heads: int) -> None:
        super().__init__(config)
        width, (channels, *sides) = config.width, config.image_shape
        self.rows, self.columns = (side // length for side, length in zip(sides, patch, strict=True))
        self.patch = patch
        self.map_noise = PositionalEmbedding(width, max_period=100)
        self.map_label = nn.Linear(config.num_classes, width, bias=False) if config.num_classes else None
        self.map_augment = nn.Linear(config.augment_dim, width, bias=False) if config.augment_dim else None
        self.map_layer0 = nn.Linear(width, width)
        self.map_layer1 = nn.Linear(width, width)
        self.token_in = nn.Linear(channels * math.prod(patch), width)
        blocks = (TokenBlock(width, num_heads, config.dropout) for _ in range(config.num_blocks))
        self.blocks = nn.ModuleList(blocks)
        self.adapt = nn.Linear(width, width * 2)
        self.token_out = nn.Linear(width, channels * math.prod(patch))
        self.apply(_initialise)
        if num_heads:
            self.position = nn.Parameter(_grid_position(self.rows, self.columns, width))
        self.has_position = num_heads > 0

    def forward(
        self, x: Tensor, c_noise: Tensor, label: Tensor | None = None, augment_label: Tensor | None = None
    ) -> Tensor:
        """`x` (B, C, H, W), `c_noise` (B,), `label` (B,) or (B, K), `augment_label` (B, A) -> (B, C, H, W)."""
        cut = x.reshape(len(x), x.shape[1], self.rows, self.patch[0], self.columns, self.patch[1])
        grid = cut.permute(0, 2, 4, 1, 3, 5)
        tokens = self.token_in(grid.flatten(3).flatten(1, 2))
        if self.has_position:
            tokens = tokens + self.position
        emb = self.embed(c_noise, label, augment_label)
        for block in self.blocks:
            tokens = block(tokens, emb)
        patches = self.token_out(_adapt(tokens, *self.adapt(emb)[:, None].chunk(2, dim=-1)))
        return patches.view(grid.shape).permute(0, 3, 1, 4, 2, 5).reshape(x.shape)

    def embed(self, c_noise: Tensor, label: Tensor | None, augment_label: Tensor | None) -> Tensor:
        """(B,) -> (B, width): noise level, class and augmentation."""
        # log(sigma) / 4 spans about -1.6 .. 1.1: angles up to tens of radians tell its levels apart.
        emb = self.map_noise(32 * c_noise)
        if self.map_label is not None:
            emb = emb + self.map_label(self.class_vector(label, emb))
        if self.map_augment is not None and augment_label is not None:
            emb = emb + self.map_augment(augment_label.to(emb.dtype))
        return F.silu(self.map_layer1(F.silu(self.map_layer0(emb))))


def _adapt(tokens: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """layer_norm(tokens) (1 + scale) + shift."""
    return torch.addcmul(shift, F.layer_norm(tokens, tokens.shape[-1:]), 1 + scale)


def _grid_position(rows: int, columns: int, width: int) -> Tensor:
    """Half of the channels tell the row, half the column: (rows * columns, width)."""
    embedding = PositionalEmbedding(width // 2)
    row, column = embedding(torch.arange(rows).float()), embedding(torch.arange(columns).float())
    grid = torch.cat([row[:, None].expand(-1, columns, -1), column[None].expand(rows, -1, -1)], dim=-1)
    return grid.flatten(0, 1)


def _initialise(module: nn.Module) -> None:
    """Xavier-uniform weights, zero biases; residuals and the output start at zero."""
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    for name, child in module.named_children():
        if isinstance(child, nn.Linear) and name in ("adapt", "token_out"):
            nn.init.zeros_(child.weight)
