"""The U-Nets of EDM: DDPM++ and NCSN++ (Song et al., one network with options) and ADM (Dhariwal & Nichol).

Both remember each image on the way down the levels of resolution and join it on the way up:

    level 0   conv, block 0 .. n-1  ---------------------->  block 0 .. n, output
    level 1     down, block 0 .. n-1  ---------->  block 0 .. n, up
    level 2       down, block 0 .. n-1 -> in0, in1 -> block 0 .. n, up

`enc` and `dec` name their blocks `{height}x{width}_{role}`, as published checkpoints do.
"""

import math
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from assay.errors import AssayError, Rules
from assay.nets.layers import (
    MOST_BLOCKS,
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

Channels = Annotated[int, Field(ge=1, description="Channels at the finest level.")]
Multiples = Annotated[
    Ints, Field(min_length=1, max_length=16, description="Multiples of model_channels per level, finest first.")
]
Blocks = Annotated[int, Field(ge=1, le=MOST_BLOCKS, description="Blocks per level.")]
Attention = Annotated[Ints, Field(description="Levels with attention, by the longer side of their images.")]


class PyramidConfig(BaseConfig):
    """What the two U-Nets have in common; names and defaults as in EDM."""

    model_channels: Channels = 128
    channel_mult: Multiples = (1, 2, 2, 2)
    channel_mult_emb: int = Field(4, ge=1, description="Channels of the embedding, times model_channels.")
    num_blocks: Blocks = 4
    attn_resolutions: Attention = (16,)
    dropout: float = Field(0.10, ge=0, lt=1, description="Probability of dropout.")

    def rules(self) -> Rules:
        """The levels halve the sides, and the noise level has a cosine for each sine."""
        _, height, width = self.image_shape
        step = 2 ** (len(self.channel_mult) - 1)
        what = f"{len(self.channel_mult)} levels cannot halve images of {height} x {width} pixels"
        cure = f"pad both sides to multiples of {step}, or use fewer channel_mult or a dit"
        yield height % step or width % step, AssayError(what, key="channel_mult", cure=cure)
        what, cure = f"{self.model_channels} is odd", "give an even number"
        yield self.noise_channels % 2, AssayError(what, key="model_channels", cure=cure)

    def build(self) -> "UNet":
        """The network."""
        return UNet(self)

    @property
    def noise_channels(self) -> int:
        """How many channels the noise level is embedded in."""
        return self.model_channels

    def name(self, level: int) -> str:
        """The level's prefix in the names of blocks: height and width of its images."""
        return f"{self.image_shape[1] >> level}x{self.image_shape[2] >> level}"

    def attends(self, level: int) -> bool:
        """Whether blocks of this level have attention."""
        return max(self.image_shape[1:]) >> level in self.attn_resolutions


class UNetConfig(PyramidConfig):
    """DDPM++ by default; NCSN++ is fourier, residual, channel_mult_noise 2, resample_filter (1, 3, 3, 1)."""

    output_weights = ("aux_conv.weight",)
    kind: Literal["unet"] = Field("unet", description="DDPM++, NCSN++ and the lean U-Nets.")
    embedding_type: Literal["positional", "fourier"] = Field("positional", description="Of the noise level.")
    channel_mult_noise: int = Field(1, ge=1, description="Channels of that embedding, times model_channels.")
    encoder_type: Literal["standard", "residual"] = Field(
        "standard", description="residual adds a resampled copy of its input, which grows with the levels."
    )
    decoder_type: Literal["standard"] = Field("standard", description="What published networks have.")
    resample_filter: Ints = Field((1, 1), description="Taps of the filter that halves and doubles images.")
    resample_with: Literal["block", "pointwise"] = Field("block", description="pointwise makes lean levels.")

    def rules(self) -> Rules:
        """Filters halve and double exactly, too."""
        yield from super().rules()
        odd, what = len(self.resample_filter) % 2, f"{self.resample_filter} cannot halve images"
        error = AssayError(what, key="resample_filter", cure="give an even number")
        yield odd or not sum(self.resample_filter), error

    @property
    def noise_channels(self) -> int:
        """How many channels the noise level is embedded in."""
        return self.model_channels * self.channel_mult_noise


class ADMConfig(PyramidConfig):
    """ADM: heads of 64 channels, attention at more levels, scale and shift after the norm."""

    output_weights = ("out_conv.weight",)
    kind: Literal["adm"] = Field("adm", description="ADM, the U-Net of class-conditional ImageNet.")
    model_channels: Channels = 192
    channel_mult: Multiples = (1, 2, 3, 4)
    num_blocks: Blocks = 3
    attn_resolutions: Attention = (32, 16, 8)


class UNet(Network):
    """DDPM++, NCSN++ (`song`) and ADM: one path with other blocks.

    NCSN++'s encoder carries, beside the main path, a resampled copy of its input that grows with the levels.
    """

    config: PyramidConfig

    def __init__(self, config: PyramidConfig) -> None:
        super().__init__(config)
        self.song = isinstance(config, UNetConfig)
        noise_channels, emb_channels = config.noise_channels, config.model_channels * config.channel_mult_emb
        fourier = isinstance(config, UNetConfig) and config.embedding_type == "fourier"
        positional = PositionalEmbedding(noise_channels, endpoint=self.song)
        self.map_noise = FourierEmbedding(noise_channels) if fourier else positional
        self.map_label: nn.Linear | None = None  # in the order in which each network draws its initial weights
        if config.num_classes and self.song:
            self.map_label = nn.Linear(config.num_classes, noise_channels)
        augment_dim = config.augment_dim
        self.map_augment = nn.Linear(augment_dim, noise_channels, bias=False) if augment_dim else None
        self.map_layer0 = nn.Linear(noise_channels, emb_channels)
        self.map_layer1 = nn.Linear(emb_channels, emb_channels)
        if config.num_classes and not self.song:
            self.map_label = nn.Linear(config.num_classes, emb_channels, bias=False)
        self.enc, self.dec = nn.ModuleDict(), nn.ModuleDict()
        channels = self._build_decoder(self._build_encoder())
        if self.song:
            self.apply(_initialise_song)
        else:
            self.out_norm = GroupNorm(channels, eps=1e-5)
            self.out_conv = nn.Conv2d(channels, config.image_shape[0], 3, padding=1)
            self._initialise_adm()

    def _block(self, inputs: int, outputs: int, attention: bool = False, **options: Any) -> Block:
        # Fewer channels than one head of ADM has: the published networks then have no attention at all.
        num_heads = (1 if self.song else outputs // 64) if attention else 0
        taps = self.config.resample_filter if isinstance(self.config, UNetConfig) else (1, 1)
        emb_channels = self.map_layer1.out_features
        return Block(inputs, outputs, emb_channels, self.song, num_heads, self.config.dropout, taps, **options)

    def _build_encoder(self) -> list[int]:
        """Fill `enc`; returns the channels of the images to remember, in order."""
        config, image_channels, remembered = self.config, self.config.image_shape[0], list[int]()
        channels = config.model_channels * (1 if self.song else config.channel_mult[0])
        for level, mult in enumerate(config.channel_mult):
            name, outputs = config.name(level), config.model_channels * mult
            if level == 0:
                self.enc[f"{name}_conv"] = nn.Conv2d(image_channels, channels, 3, padding=1)
            elif isinstance(config, UNetConfig) and config.resample_with == "pointwise":
                self.enc[f"{name}_down"] = Resample("down", config.resample_filter)
            else:
                self.enc[f"{name}_down"] = self._block(channels, channels, direction="down")
            if level and isinstance(config, UNetConfig) and config.encoder_type == "residual":
                before = config.channel_mult[max(level - 2, 0)]
                carried = image_channels if level == 1 else config.model_channels * before
                self.enc[f"{name}_aux_residual"] = ConvDown(carried, channels, config.resample_filter)
            remembered.append(channels)
            for index in range(config.num_blocks):
                self.enc[f"{name}_block{index}"] = self._block(channels, outputs, config.attends(level))
                channels = outputs
                remembered.append(channels)
        return remembered

    def _build_decoder(self, remembered: list[int]) -> int:
        """Fill `dec`; returns its channels at the end. ADM has attention in all blocks of a level."""
        config, channels = self.config, remembered[-1]
        for level, mult in reversed(list(enumerate(config.channel_mult))):
            name, outputs = config.name(level), config.model_channels * mult
            if level == len(config.channel_mult) - 1:
                self.dec[f"{name}_in0"] = self._block(channels, channels, attention=True)
                self.dec[f"{name}_in1"] = self._block(channels, channels)
            elif isinstance(config, UNetConfig) and config.resample_with == "pointwise":
                self.dec[f"{name}_up"] = ResampleConv(channels, outputs, 1, "up", config.resample_filter)
                channels = outputs
            else:
                self.dec[f"{name}_up"] = self._block(channels, channels, direction="up")
            for index in range(config.num_blocks + 1):
                attention = config.attends(level) and (not self.song or index == config.num_blocks)
                self.dec[f"{name}_block{index}"] = self._block(channels + remembered.pop(), outputs, attention)
                channels = outputs
        if self.song:
            self.dec[f"{name}_aux_norm"] = GroupNorm(channels, eps=1e-6)
            self.dec[f"{name}_aux_conv"] = nn.Conv2d(channels, config.image_shape[0], 3, padding=1)
        return channels

    def _initialise_adm(self) -> None:
        # torch's own initial weights, U(-1, 1) / sqrt(fan_in), are ADM's; what ends a residual starts at zero.
        for name, module in self.named_modules():
            if name.endswith(("conv1", "proj", "out_conv", "map_augment")):
                for parameter in module.parameters():
                    nn.init.zeros_(parameter)
        if self.map_label is not None:
            nn.init.normal_(self.map_label.weight)

    def embed(self, c_noise: Tensor, label: Tensor | None, augment_label: Tensor | None) -> Tensor:
        """(B,) -> (B, emb_channels): noise level, class and augmentation. ADM adds the class last."""
        emb = self.map_noise(c_noise)
        if self.song:
            cos, sin = emb.chunk(2, dim=1)
            emb = torch.cat([sin, cos], dim=1)  # DDPM++ puts the sines first
            if self.map_label is not None:
                emb = emb + self.map_label(self.class_vector(label, emb) * math.sqrt(self.config.num_classes))
        if self.map_augment is not None and augment_label is not None:
            emb = emb + self.map_augment(augment_label.to(emb.dtype))
        emb = self.map_layer1(F.silu(self.map_layer0(emb)))
        if self.map_label is not None and not self.song:
            emb = emb + self.map_label(self.class_vector(label, emb))
        return F.silu(emb)

    def forward(
        self, x: Tensor, c_noise: Tensor, label: Tensor | None = None, augment_label: Tensor | None = None
    ) -> Tensor:
        """`x` (B, C, H, W), `c_noise` (B,), `label` (B,) or (B, K), `augment_label` (B, A) -> (B, C, H, W)."""
        emb = self.embed(c_noise, label, augment_label)
        x = x.contiguous(memory_format=torch.channels_last)
        carried, remembered = x, list[Tensor]()
        for name, layer in self.enc.items():
            if "aux_residual" in name:
                x = remembered[-1] = carried = (x + layer(carried)) * math.sqrt(0.5)
            else:
                x = layer(x, emb) if isinstance(layer, Block) else layer(x)
                remembered.append(x)
        for name, layer in self.dec.items():
            if isinstance(layer, Block):
                x = layer(x, emb, remembered.pop() if "block" in name else None)
            else:
                x = F.silu(layer(x)) if "aux_norm" in name else layer(x)
        return (x if self.song else self.out_conv(F.silu(self.out_norm(x)))).contiguous()


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
