"""Everything a run needs to continue bit for bit: weights, EMA, optimizer, counters.

The loader and all randomness are functions of (seed, step), so the step also gives the data position
and the random state. A state is one file `state/<step>.safetensors`, whole or absent, with a checksum
over all that is in it. The last two are kept; if the newest is damaged, the one before is used.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from assay.checkpoint import load_tensors, save_tensors

_KEPT = 2


def save_state(folder: Path, step: int, tensors: Mapping[str, Tensor], info: Mapping[str, Any]) -> None:
    """Write the state after `step` steps and remove all but the last two."""
    target = folder / f"{step:09d}.safetensors"
    if target.exists():  # a run that was stopped twice at the same step
        return
    save_tensors(target, tensors, {"step": step, **info})
    for old in _states(folder)[:-_KEPT]:
        old.unlink()


def load_state(folder: Path, remove_damaged: bool = True) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The newest undamaged state as (tensors, info), or None. A warning tells of damaged ones."""
    for path in reversed(_states(folder)):
        try:
            tensors, info = load_tensors(path)
            if info.get("step") != int(path.stem):
                raise ValueError(f"it is the state of step {info.get('step')}")
            return tensors, info
        except (OSError, ValueError) as error:
            warnings.warn(f"{path} is damaged ({error}): resuming from the state before", stacklevel=2)
            if remove_damaged:
                path.unlink()
    return None


def _states(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.safetensors") if path.stem.isdigit())


def whole(tensor: Tensor) -> Tensor:
    """A tensor, gathered from all ranks if it is sharded: then every rank must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _like(tensor: Tensor, target: Tensor | None) -> Tensor:
    """This rank's part of a whole tensor, if `target` is sharded."""
    if not isinstance(target, DTensor) or tensor.shape != target.shape:
        return tensor
    return distribute_tensor(
        tensor.to(target.device), target.device_mesh, target.placements, src_data_rank=None
    )


def pack_tensors(
    modules: Mapping[str, nn.Module], optimizer: torch.optim.Optimizer | None = None, keep: bool = True
) -> dict[str, Tensor]:
    """All tensors of modules and optimizer under flat names: `<module>/...`, `optimizer/<parameter>/<name>`.

    Ranks that do not `keep` them only give their parts of sharded tensors to the others.
    """
    parts = {name: module.state_dict() for name, module in modules.items()}
    if optimizer is not None:
        moments = optimizer.state_dict()["state"]
        parts |= {f"optimizer/{number}": values for number, values in moments.items()}
    packed = {}
    for name, part in parts.items():
        for key, value in part.items():
            value = whole(value.detach())
            if keep:
                packed[f"{name}/{key}"] = value.cpu().clone().contiguous()
    return packed


def unpack_tensors(
    tensors: Mapping[str, Tensor], modules: Mapping[str, nn.Module], optimizer: torch.optim.Optimizer
) -> None:
    """Put the tensors of `pack_tensors` back; those of other modules are left out."""
    parts: dict[str, dict[str, Tensor]] = {name: {} for name in (*modules, "optimizer")}
    for key, value in tensors.items():
        part, _, name = key.partition("/")
        parts.setdefault(part, {})[name] = value
    for name, module in modules.items():
        targets = module.state_dict()
        module.load_state_dict({key: _like(value, targets.get(key)) for key, value in parts[name].items()})
    moments: dict[int, dict[str, Tensor]] = {}
    weights = dict(enumerate(weight for group in optimizer.param_groups for weight in group["params"]))
    for key, value in parts["optimizer"].items():
        number, _, name = key.partition("/")
        moments.setdefault(int(number), {})[name] = _like(value, weights.get(int(number)))
    optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})
