"""A module that was passed in: any `torch.nn.Module` as the network of `assay.fit`.

Its checkpoints hold its weights and the name of its class, and open where the module is passed again:
`assay.load(path, net=module)`. A network that commands and studies find by themselves is a subclass of
`NetConfig` with a kind (see `assay.registry`).
"""

import copy
import inspect
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from assay.errors import AssayError
from assay.nets.layers import BaseConfig

_passed: dict[str, nn.Module] = {}  # by the name of the class


class PassedConfig(BaseConfig):
    """The config of a module that was passed in."""

    kind: Literal["passed"] = Field("passed", description="A module that is passed in Python.")
    name: str = Field(description="Its class.")

    def build(self) -> nn.Module:
        """A copy of the module."""
        if self.name not in _passed:
            cure = f"call assay.load(path, net={self.name}(...))"
            raise AssayError(f"the network is a {self.name} of your own", key="net", cure=cure)
        return _Adapted(_passed[self.name])


def pass_module(module: nn.Module) -> dict[str, str]:
    """Make a module known in this process; returns the `[net]` that stands for it."""
    if not any(weight.requires_grad for weight in module.parameters()):
        raise AssayError(f"{type(module).__name__} has no weights to train", key="net")
    _passed[type(module).__name__] = module
    return {"kind": "passed", "name": type(module).__name__}


class _Adapted(nn.Module):
    """Calls a module with as many of (x, c_noise, label, augment_label) as it takes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(module).to(torch.empty(0).device)  # that of a surrounding torch.device
        parameters = inspect.signature(module.forward).parameters.values()
        self.takes_all = any(each.kind == each.VAR_POSITIONAL for each in parameters)
        self.num_inputs = len(parameters)

    def forward(self, *inputs: Tensor | None) -> Tensor:
        """`x` (B, C, H, W), `c_noise` (B,), `label` (B,) or None, `augment_label` (B, A) or None."""
        output: Tensor = self.module(*inputs if self.takes_all else inputs[: self.num_inputs])
        return output
