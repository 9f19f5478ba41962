"""The networks behind a denoiser: their names, how they are built, and their cost.

A network is described by a frozen config, one per architecture; `kind` says which. Presets are
configs with a name: the paper's for its data sets, and small ones that are fast on CPUs.
"""

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from assay.denoise import Preconditioned
from assay.errors import AssayError, Rules, check, check_same, choose
from assay.files import reason
from assay.nets.dit import DiTConfig, MLPConfig
from assay.nets.layers import BaseConfig as NetConfig
from assay.nets.unet import ADMConfig, UNetConfig
from assay.registry import find, is_own, own_code

__all__ = ["ADMConfig", "DiTConfig", "MLPConfig", "NetConfig", "PassedConfig", "UNetConfig"]
Shape = tuple[int, int, int]


# Modules that were passed in, by the name of the class. Their checkpoints hold their weights and that name.
_passed: dict[str, nn.Module] = {}


class PassedConfig(NetConfig):
    """The config of a module that was passed in."""

    kind: Literal["passed"] = Field("passed", description="A module that is passed in Python.")
    name: str = Field(description="Its class.")

    def build(self) -> nn.Module:
        """A copy of the module."""
        if self.name not in _passed:
            raise AssayError(f"the network is a {self.name} of your own", key="net", cure=self.cure)
        return copy.deepcopy(_passed[self.name])

    @property
    def cure(self) -> str:
        """How to open a checkpoint of it."""
        return f"give the module, net={self.name}(...), as in assay.load(path, net={self.name}(...))"


def pass_module(module: nn.Module) -> dict[str, str]:
    """Make a module known in this process; returns the `[net]` that stands for it."""
    _passed[type(module).__name__] = module
    return {"kind": "passed", "name": type(module).__name__}


def is_own_net(config: NetConfig) -> bool:
    """Whether the network is the user's own."""
    return isinstance(config, PassedConfig) or is_own(type(config))


def build_net(config: NetConfig) -> nn.Module:
    """A new network. One of the user's own is called with what it takes, and tried on two images of zeros."""
    if not is_own_net(config):
        return config.build()
    name = config.name if isinstance(config, PassedConfig) else type(config).__name__
    x, label = torch.zeros(2, *config.image_shape), torch.zeros(2, dtype=torch.long)
    cure = "see docs/howto/own_parts.md: how a network is called, and what it returns"
    try:
        network = _Adapted(config.build()).eval()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            given = network(x, torch.zeros(2), label if config.num_classes else None, None)
    except AssayError:
        raise
    except Exception as error:
        raise AssayError(f"the network of {name} fails ({reason(error)})", key="net", cure=cure) from error
    shape = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
    check_same(shape, tuple(x.shape), f"{name} does not give images as it gets", key="net", cure=cure)
    takes_class = "add a third argument to forward: label, int64 (B,)"
    what = f"{name} takes no class"
    check([(config.num_classes > 0 and network.num_inputs < 3,
            AssayError(what, key="train.class_conditional", cure=takes_class))])  # fmt: skip
    return network.train()


def _leaves(value: Any) -> list[Any]:
    """What lists in lists hold."""
    held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else None
    return [value] if held is None else [leaf for each in held for leaf in _leaves(each)]


class _Adapted(nn.Module):
    """Calls a module with as many of (x, c_noise, label, augment_label) as it takes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module.to(torch.empty(0).device)  # that of a surrounding torch.device
        parameters = inspect.signature(module.forward).parameters.values()
        takes_all = any(each.kind == each.VAR_POSITIONAL for each in parameters)
        self.num_inputs = 4 if takes_all else len(parameters)
        check(self._rules(module))

    def _rules(self, module: nn.Module) -> Rules:
        """It takes the noise level, and torch knows its weights."""
        name, seen = type(module).__name__, {*map(id, (*module.modules(), *module.parameters()))}
        cure = "define forward(self, x, c_noise), even if it is not used"
        error = AssayError(f"{name} does not take the noise level", key="net", cure=cure)
        yield self.num_inputs < 2, error
        yield (
            not any(weight.requires_grad for weight in module.parameters()),
            AssayError(f"{name} has no weights to train", key="net"),
        )
        cure = "make it an nn.ModuleList, nn.ModuleDict or nn.ParameterList"
        for part in module.modules():
            for key, value in vars(part).items():
                held = _leaves(value) if not key.startswith("_") else []
                lost = any(isinstance(x, nn.Module | nn.Parameter) and id(x) not in seen for x in held)
                what = f"{type(part).__name__}.{key} has layers that torch does not train or save"
                yield lost, AssayError(what, key="net", cure=cure)

    def forward(self, *inputs: Tensor | None) -> Tensor:
        """`x` (B, C, H, W), `c_noise` (B,), `label` (B,) or None, `augment_label` (B, A) or None."""
        output: Tensor = self.module(*inputs[: self.num_inputs])
        return output


def net_kind(tree: Mapping[str, Any]) -> type[NetConfig]:
    """The class of the config that a tree of plain values describes: ours, or a user's own."""
    found: type[NetConfig] = find(NetConfig, kind := str(tree.get("kind")), "net.kind")
    what, cure = f"{found.__name__} has the kind of a preset, {kind}", "choose another name"
    check([(is_own(found) and kind in PRESETS, AssayError(what, key="kind", cure=cure))])
    return found


def net_class(tree: Mapping[str, Any]) -> type:
    """The class that a `[net]` names: of the module that was passed in, or of a config."""
    module = _passed.get(str(tree.get("name"))) if tree.get("kind") == "passed" else None
    return type(module) if module is not None else net_kind({"kind": "mlp", **tree})


def net_code(tree: Mapping[str, Any]) -> dict[str, str]:
    """What decides the results of a network of the user's own besides its settings and weights.

    That is its code and, of a module that was passed in, the values that it was made with.
    """
    module = _passed.get(str(tree.get("name"))) if tree.get("kind") == "passed" else None
    parts = dict(module.named_modules()) if module is not None else {}
    return own_code(net_class(tree)) | {f"values of {name}": _values(part) for name, part in parts.items()}


def _values(part: nn.Module) -> str:
    """The numbers, texts and functions that a part of a module holds."""
    held = {name: value for name, value in vars(part).items() if name[0] != "_" and name != "training"}
    shown = {name: getattr(value, "__qualname__", None) or repr(value) for name, value in held.items()}
    return str({name: text for name, text in shown.items() if " at 0x" not in text})


def build_denoiser(config: NetConfig, seed: int = 0) -> Preconditioned:
    """A new network behind EDM's preconditioning, its weights a function of `seed` alone.

    Follows `torch.device` as a context.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        denoiser = Preconditioned(build_net(config), config.sigma_data, config.num_classes)
    return channels_last(denoiser)


def channels_last(denoiser: Preconditioned) -> Preconditioned:
    """Lay out the weights as the networks lay out images; changes no value."""
    return denoiser.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


@dataclass(frozen=True)
class Cost:
    """What a network takes: operations to evaluate one image, bytes for a training step with Adam."""

    num_parameters: int
    flops: int  # per image, forward; a training step takes about three times as many
    bytes_fixed: int  # weights, gradients, two moments, and what is kept for any batch size
    bytes_per_image: int  # what the forward pass keeps for the backward pass

    def step_bytes(self, batch_size: int) -> int:
        """Memory of one training step."""
        return self.bytes_fixed + batch_size * self.bytes_per_image


@cache
def measure_cost(config: NetConfig) -> Cost:
    """Count operations and bytes by forward passes on the meta device, which allocates nothing.

    A network of the user's own may compute with numbers when it is made, which that device does not have.
    Operations are those of matrix products and convolutions, a multiplication and an addition being two.
    """
    with torch.device("cpu" if is_own_net(config) else "meta"):
        model = build_net(config)
    with FlopCounterMode(display=False) as counter:
        kept_by_one = _bytes_kept(model, config, batch_size=1)
    kept_by_two = _bytes_kept(model, config, batch_size=2)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    fixed, per_image = 4 * 4 * num_parameters + 2 * kept_by_one - kept_by_two, kept_by_two - kept_by_one
    return Cost(num_parameters, counter.get_total_flops(), fixed, per_image)


def _bytes_kept(model: nn.Module, config: NetConfig, batch_size: int) -> int:
    """The bytes that autograd keeps of a forward pass besides the weights themselves."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    device = next(model.parameters()).device
    x = torch.zeros(batch_size, *config.image_shape, device=device)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(x, torch.zeros(batch_size, device=device))
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    del output  # alive until here: its graph holds the storages that `kept` tells apart
    return sum(size for storage, size in kept.items() if storage not in weights)


@dataclass(frozen=True)
class Preset:
    """A named config, for the image shape it was made for and for others like it."""

    about: str
    image_shape: Shape
    make: Callable[..., NetConfig]  # (image_shape=, ...) -> config


def preset(name: str, image_shape: Shape | None = None, num_classes: int | None = None) -> NetConfig:
    """The preset's config, for these images and classes or for those it was made for."""
    chosen = choose(name, PRESETS, "net.preset")
    classes = {} if num_classes is None else {"num_classes": num_classes}
    return chosen.make(image_shape=image_shape or chosen.image_shape, **classes)


def _small_unet(image_shape: Shape, model_channels: int, **options: Any) -> UNetConfig:
    """Three levels (fewer where a side is odd too soon), one block each, attention on the coarsest.

    For images of 8 or less two levels of twice the width, without attention: they learn more per second there.
    """
    small = max(image_shape[1:]) <= 8
    num_levels = min(2 if small else 3, *(1 + _halvings(side) for side in image_shape[1:]))
    options |= dict(image_shape=image_shape, num_blocks=1, dropout=0.0, resample_with="pointwise")
    return UNetConfig(
        model_channels=model_channels,
        channel_mult=((2, 2) if small else (1, 2, 2))[:num_levels],
        attn_resolutions=() if small else (max(image_shape[1:]) >> (num_levels - 1),),
        **options,
    )


def _small_dit(image_shape: Shape, **options: Any) -> DiTConfig:
    """Patches of 4, or the largest smaller power of two that tiles the image; 2 for images of 8 or less."""
    largest = 4 if max(image_shape[1:]) > 8 else 2
    patch = min(largest, *(2 ** _halvings(side) for side in image_shape[1:]))
    return DiTConfig(image_shape=image_shape, patch=patch, **options)


def _halvings(side: int) -> int:
    """How often a side can be halved."""
    return (side & -side).bit_length() - 1


_CIFAR, _FACES = (3, 32, 32), (3, 64, 64)
_NCSN: dict[str, Any] = dict(
    embedding_type="fourier", encoder_type="residual", channel_mult_noise=2, resample_filter=(1, 3, 3, 1)
)
_CIFAR_UNET = partial(UNetConfig, channel_mult=(2, 2, 2), dropout=0.13, augment_dim=9)
_FACES_UNET = partial(UNetConfig, channel_mult=(1, 2, 2, 2), dropout=0.05, augment_dim=9)
PRESETS = {
    "ddpmpp-cifar10": Preset("the paper's for CIFAR-10", _CIFAR, _CIFAR_UNET),
    "ncsnpp-cifar10": Preset("EDM's for CIFAR-10", _CIFAR, partial(_CIFAR_UNET, **_NCSN)),
    "ddpmpp-ffhq64": Preset("the paper's for CelebA, EDM's for FFHQ", _FACES, _FACES_UNET),
    "ncsnpp-ffhq64": Preset("EDM's for FFHQ", _FACES, partial(_FACES_UNET, **_NCSN)),
    "adm-imagenet64": Preset("the paper's for ImageNet", _FACES, partial(ADMConfig, num_classes=1000)),
    "unet-tiny": Preset("CPUs, images of about 16x16", (1, 16, 16), partial(_small_unet, model_channels=16)),
    "unet-small": Preset("CPUs", _CIFAR, partial(_small_unet, model_channels=32)),
    "unet-medium": Preset("CPUs, with time", _CIFAR, partial(_small_unet, model_channels=64)),
    "dit-small": Preset("CPUs, fastest", _CIFAR, partial(_small_dit, width=192, num_blocks=8)),
    "dit-medium": Preset("CPUs, with time", _CIFAR, partial(_small_dit, width=384, num_blocks=12)),
    "mlp": Preset("images of about 8x8", (1, 8, 8), partial(MLPConfig, width=256, num_blocks=4)),
}
