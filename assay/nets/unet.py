"""The U-Nets of EDM: DDPM++ and NCSN++ (Song et al., one network with options) and ADM (Dhariwal & Nichol).

Both walk down the levels of resolution and up again, remembering each image on the way down and
joining it on the way up:

    level 0   conv, block 0 .. n-1  ---------------------->  block 0 .. n, output
    level 1     down, block 0 .. n-1  ---------->  block 0 .. n, up
    level 2       down, block 0 .. n-1 -> in0, in1 -> block 0 .. n, up

`enc` and `dec` name their blocks `{height}x{width}_{role}`, as published checkpoints do.
"""

import math
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from assay.nets.layers import (
    BaseConfig,
    Block,
    ConvDown,
    FourierEmbedding,
    GroupNorm,
    Ints,
    Network,
    PositionalEmbedding,
    Resample,
    ResampleConv,
)

_CHANNELS = "Channels at the finest level."
_MULT = "Multiples of model_channels, one per level, finest first."
_BLOCKS = "Blocks per level."
_ATTENTION = "Levels that get attention, by the longer side of their images in pixels."


class PyramidConfig(BaseConfig):
    """What the two U-Nets have in common; names as in EDM, whose defaults each of them keeps."""

    model_channels: int = Field(ge=1, description=_CHANNELS)
    channel_mult: Ints = Field(min_length=1, description=_MULT)
    channel_mult_emb: int = Field(4, ge=1, description="Channels of the embedding, times model_channels.")
    num_blocks: int = Field(ge=1, description=_BLOCKS)
    attn_resolutions: Ints = Field(description=_ATTENTION)
    dropout: float = Field(0.10, ge=0, lt=1, description="Probability of dropout.")

    def model_post_init(self, context: Any, /) -> None:
        """Reject sides that the levels cannot halve, and noise levels without a cosine for each sine."""
        super().model_post_init(context)
        _, height, width = self.image_shape
        step = 2 ** (len(self.channel_mult) - 1)
        if height % step or width % step:
            raise ValueError(
                f"image_shape = {self.image_shape}: with {len(self.channel_mult)} levels both sides must be "
                f"multiples of {step}; pad the images, or use fewer channel_mult or a dit"
            )
        if self.noise_channels % 2:
            raise ValueError(f"model_channels = {self.model_channels}: must be even")

    @property
    def noise_channels(self) -> int:
        """How many channels the noise level is embedded in."""
        return self.model_channels

    def side(self, level: int) -> tuple[int, int]:
        """Height and width at a level."""
        return self.image_shape[1] >> level, self.image_shape[2] >> level

    def name(self, level: int) -> str:
        """The level's prefix in the names of blocks."""
        return "{}x{}".format(*self.side(level))

    def attends(self, level: int) -> bool:
        """Whether blocks of this level have attention."""
        return max(self.side(level)) in self.attn_resolutions


class UNetConfig(PyramidConfig):
    """DDPM++ by default; NCSN++ is fourier, residual, channel_mult_noise 2, resample_filter (1, 3, 3, 1)."""

    kind: Literal["unet"] = Field("unet", description="DDPM++, NCSN++ and the lean U-Nets.")
    model_channels: int = Field(128, ge=1, description=_CHANNELS)
    channel_mult: Ints = Field((1, 2, 2, 2), min_length=1, description=_MULT)
    num_blocks: int = Field(4, ge=1, description=_BLOCKS)
    attn_resolutions: Ints = Field((16,), description=_ATTENTION)
    embedding_type: Literal["positional", "fourier"] = Field(
        "positional", description="How the noise level is embedded."
    )
    channel_mult_noise: int = Field(
        1, ge=1, description="Channels of the noise level's embedding, times model_channels."
    )
    encoder_type: Literal["standard", "skip", "residual"] = Field(
        "standard", description="How the encoder carries a resampled copy of its input, if at all."
    )
    decoder_type: Literal["standard", "skip"] = Field(
        "standard", description="skip adds up one output per level instead of computing only the last."
    )
    resample_filter: Ints = Field((1, 1), description="Taps of the filter that halves and doubles images.")
    resample_with: Literal["block", "pointwise"] = Field(
        "block", description="pointwise makes lean levels, which published networks do not have."
    )

    def model_post_init(self, context: Any, /) -> None:
        """Reject filters that do not halve and double exactly."""
        super().model_post_init(context)
        if len(self.resample_filter) % 2 or not self.resample_filter or not sum(self.resample_filter):
            raise ValueError(
                f"resample_filter = {self.resample_filter}: an even number of taps, with a sum, halves images"
            )

    @property
    def noise_channels(self) -> int:
        """How many channels the noise level is embedded in."""
        return self.model_channels * self.channel_mult_noise


class ADMConfig(PyramidConfig):
    """ADM: heads of 64 channels, attention at more levels, scale and shift after the norm."""

    kind: Literal["adm"] = Field("adm", description="ADM, the U-Net of class-conditional ImageNet.")
    model_channels: int = Field(192, ge=1, description=_CHANNELS)
    channel_mult: Ints = Field((1, 2, 3, 4), min_length=1, description=_MULT)
    num_blocks: int = Field(3, ge=1, description=_BLOCKS)
    attn_resolutions: Ints = Field((32, 16, 8), description=_ATTENTION)


class UNet(Network):
    """DDPM++ and NCSN++.

    Beside the main path an encoder may carry a resampled copy of its input: added to each level through
    a 1x1 convolution (`skip`), or growing with the levels (`residual`). A `skip` decoder adds up one
    output per level instead of computing only the last.
    """

    config: UNetConfig

    def __init__(self, config: UNetConfig) -> None:
        super().__init__(config)
        image_channels, width = config.image_shape[0], config.model_channels
        noise_channels, emb_channels = config.noise_channels, width * config.channel_mult_emb
        self.map_noise = (
            PositionalEmbedding(noise_channels, endpoint=True)
            if config.embedding_type == "positional"
            else FourierEmbedding(noise_channels)
        )
        self.map_label = nn.Linear(config.num_classes, noise_channels) if config.num_classes else None
        self.map_augment = (
            nn.Linear(config.augment_dim, noise_channels, bias=False) if config.augment_dim else None
        )
        self.map_layer0 = nn.Linear(noise_channels, emb_channels)
        self.map_layer1 = nn.Linear(emb_channels, emb_channels)
        taps, blocks_resample = config.resample_filter, config.resample_with == "block"
        block = partial(
            Block,
            emb_channels=emb_channels,
            taps=taps,
            dropout=config.dropout,
            skip_scale=math.sqrt(0.5),
            eps=1e-6,
            adaptive_scale=False,
            project_skip=True,
        )

        self.enc = nn.ModuleDict()
        channels, aux_channels = width, image_channels
        remembered = []
        for level, mult in enumerate(config.channel_mult):
            name = config.name(level)
            if level == 0:
                self.enc[f"{name}_conv"] = nn.Conv2d(image_channels, width, 3, padding=1)
            else:
                self.enc[f"{name}_down"] = (
                    block(channels, channels, direction="down") if blocks_resample else Resample("down", taps)
                )
                if config.encoder_type == "skip":
                    self.enc[f"{name}_aux_down"] = Resample("down", taps)
                    self.enc[f"{name}_aux_skip"] = nn.Conv2d(aux_channels, channels, 1)
                elif config.encoder_type == "residual":
                    self.enc[f"{name}_aux_residual"] = ConvDown(aux_channels, channels, taps)
                    aux_channels = channels
            remembered.append(channels)
            for index in range(config.num_blocks):
                num_heads = int(config.attends(level))
                self.enc[f"{name}_block{index}"] = block(channels, width * mult, num_heads=num_heads)
                channels = width * mult
                remembered.append(channels)

        self.dec = nn.ModuleDict()
        for level, mult in reversed(list(enumerate(config.channel_mult))):
            name = config.name(level)
            if level == len(config.channel_mult) - 1:
                self.dec[f"{name}_in0"] = block(channels, channels, num_heads=1)
                self.dec[f"{name}_in1"] = block(channels, channels)
            elif blocks_resample:
                self.dec[f"{name}_up"] = block(channels, channels, direction="up")
            else:
                self.dec[f"{name}_up"] = ResampleConv(channels, width * mult, 1, "up", taps)
                channels = width * mult
            for index in range(config.num_blocks + 1):
                num_heads = int(index == config.num_blocks and config.attends(level))
                self.dec[f"{name}_block{index}"] = block(
                    channels + remembered.pop(), width * mult, num_heads=num_heads
                )
                channels = width * mult
            if config.decoder_type == "skip" or level == 0:
                if config.decoder_type == "skip" and level < len(config.channel_mult) - 1:
                    self.dec[f"{name}_aux_up"] = Resample("up", taps)
                self.dec[f"{name}_aux_norm"] = GroupNorm(channels, eps=1e-6)
                self.dec[f"{name}_aux_conv"] = nn.Conv2d(channels, image_channels, 3, padding=1)
        self.apply(_initialise_song)

    def forward(
        self, x: Tensor, c_noise: Tensor, label: Tensor | None = None, augment_label: Tensor | None = None
    ) -> Tensor:
        """`x` (B, C, H, W), `c_noise` (B,), `label` (B,) or (B, K), `augment_label` (B, A) -> (B, C, H, W)."""
        self.check(x, augment_label)
        cos, sin = self.map_noise(c_noise).chunk(2, dim=1)
        emb = torch.cat([sin, cos], dim=1)  # DDPM++ puts the sines first
        if self.map_label is not None:
            emb = emb + self.map_label(self.class_vector(label, emb) * math.sqrt(self.config.num_classes))
        if self.map_augment is not None and augment_label is not None:
            emb = emb + self.map_augment(augment_label.to(emb.dtype))
        emb = F.silu(self.map_layer1(F.silu(self.map_layer0(emb))))

        x = x.contiguous(memory_format=torch.channels_last)
        aux = x
        remembered: list[Tensor] = []
        for name, layer in self.enc.items():
            if "aux_down" in name:
                aux = layer(aux)
            elif "aux_skip" in name:
                x = remembered[-1] = x + layer(aux)
            elif "aux_residual" in name:
                x = remembered[-1] = aux = (x + layer(aux)) * math.sqrt(0.5)
            else:
                x = layer(x, emb) if isinstance(layer, Block) else layer(x)
                remembered.append(x)
        output: Tensor | None = None
        for name, layer in self.dec.items():
            if "aux_up" in name:
                output = layer(output)
            elif "aux_norm" in name:
                normed = F.silu(layer(x))
            elif "aux_conv" in name:
                output = layer(normed) if output is None else output + layer(normed)
            elif isinstance(layer, Block):
                x = layer(x, emb, remembered.pop() if "block" in name else None)
            else:
                x = layer(x)
        assert output is not None
        return output.contiguous()


class ADM(Network):
    """ADM, the network of the paper's ImageNet models."""

    config: ADMConfig

    def __init__(self, config: ADMConfig) -> None:
        super().__init__(config)
        image_channels, width = config.image_shape[0], config.model_channels
        emb_channels = width * config.channel_mult_emb
        self.map_noise = PositionalEmbedding(width)
        self.map_augment = nn.Linear(config.augment_dim, width, bias=False) if config.augment_dim else None
        self.map_layer0 = nn.Linear(width, emb_channels)
        self.map_layer1 = nn.Linear(emb_channels, emb_channels)
        self.map_label = nn.Linear(config.num_classes, emb_channels, bias=False) if config.num_classes else None

        def block(inputs: int, outputs: int, attention: bool = False, **options: Any) -> Block:
            # Fewer channels than one head has: the published networks then have no attention at all.
            num_heads = outputs // 64 if attention else 0
            return Block(inputs, outputs, emb_channels, num_heads, dropout=config.dropout, **options)

        self.enc = nn.ModuleDict()
        channels = width * config.channel_mult[0]
        remembered = []
        for level, mult in enumerate(config.channel_mult):
            name, attention = config.name(level), config.attends(level)
            if level == 0:
                self.enc[f"{name}_conv"] = nn.Conv2d(image_channels, channels, 3, padding=1)
            else:
                self.enc[f"{name}_down"] = block(channels, channels, direction="down")
            remembered.append(channels)
            for index in range(config.num_blocks):
                self.enc[f"{name}_block{index}"] = block(channels, width * mult, attention)
                channels = width * mult
                remembered.append(channels)

        self.dec = nn.ModuleDict()
        for level, mult in reversed(list(enumerate(config.channel_mult))):
            name, attention = config.name(level), config.attends(level)
            if level == len(config.channel_mult) - 1:
                self.dec[f"{name}_in0"] = block(channels, channels, attention=True)
                self.dec[f"{name}_in1"] = block(channels, channels)
            else:
                self.dec[f"{name}_up"] = block(channels, channels, direction="up")
            for index in range(config.num_blocks + 1):
                self.dec[f"{name}_block{index}"] = block(channels + remembered.pop(), width * mult, attention)
                channels = width * mult
        self.out_norm = GroupNorm(channels, eps=1e-5)
        self.out_conv = nn.Conv2d(channels, image_channels, 3, padding=1)

        # torch's own initial weights, U(-1, 1) / sqrt(fan_in), are ADM's; what ends a residual starts at zero.
        for name, module in self.named_modules():
            if name.endswith(("conv1", "proj", "out_conv", "map_augment")):
                for parameter in module.parameters():
                    nn.init.zeros_(parameter)
        if self.map_label is not None:
            nn.init.normal_(self.map_label.weight)

    def forward(
        self, x: Tensor, c_noise: Tensor, label: Tensor | None = None, augment_label: Tensor | None = None
    ) -> Tensor:
        """`x` (B, C, H, W), `c_noise` (B,), `label` (B,) or (B, K), `augment_label` (B, A) -> (B, C, H, W)."""
        self.check(x, augment_label)
        emb = self.map_noise(c_noise)
        if self.map_augment is not None and augment_label is not None:
            emb = emb + self.map_augment(augment_label.to(emb.dtype))
        emb = self.map_layer1(F.silu(self.map_layer0(emb)))
        if self.map_label is not None:
            emb = emb + self.map_label(self.class_vector(label, emb))
        emb = F.silu(emb)

        x = x.contiguous(memory_format=torch.channels_last)
        remembered: list[Tensor] = []
        for layer in self.enc.values():
            x = layer(x, emb) if isinstance(layer, Block) else layer(x)
            remembered.append(x)
        for name, layer in self.dec.items():
            x = layer(x, emb, remembered.pop() if "block" in name else None)
        return self.out_conv(F.silu(self.out_norm(x))).contiguous()


def _initialise_song(module: nn.Module) -> None:
    """Xavier-uniform weights and zero biases; nearly zero where a residual ends, smaller for attention."""
    if isinstance(module, nn.Linear | nn.Conv2d):
        nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    for name, child in module.named_children():
        if isinstance(child, nn.Conv2d) and (name in ("conv1", "proj") or name.endswith("aux_conv")):
            nn.init.xavier_uniform_(child.weight, gain=1e-5)
        elif isinstance(child, nn.Conv2d) and name == "qkv":
            nn.init.xavier_uniform_(child.weight, gain=math.sqrt(0.2))
