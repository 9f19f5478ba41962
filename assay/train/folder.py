"""The folder of a run: what it holds, to which config it belongs, how a run resumes, and the one it continues.

config.json    what was asked, the network, the fingerprint of the data
state/         the last two states: weights, EMA, optimizer, counters
metrics.jsonl  one line every `log_every` steps (see `assay.train.record`)
snapshots/     EMA weights as checkpoints; `final.safetensors` means finished

With `train.rounds` all but config.json and the final snapshot lies in `round-0/`, `round-1/` and so on, beside
the restored images of each round (see `assay.train.restored`).

A state is all that a run needs to continue bit for bit: the loader and all randomness are functions of
(seed, step). It is one file with a checksum.
"""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import assay
from assay.checkpoint import load_tensors, save_tensors
from assay.data import ImageSource
from assay.errors import AssayError, warn
from assay.files import decoding, differences, write_whole
from assay.train.config import RunConfig

_KEPT = 2  # states
State = tuple[dict[str, Tensor], dict[str, Any]]  # tensors by name, and plain values


def final_path(run_dir: Path) -> Path:
    """Where the weights of a finished run are."""
    return run_dir / "snapshots" / "final.safetensors"


def snapshot_path(run_dir: Path, step: int) -> Path:
    """Where the weights after a step are kept, if that was asked for."""
    return run_dir / "snapshots" / f"{step:09d}.safetensors"


def read_run(path: Path) -> dict[str, Any]:
    """A run's config.json, with at least `fingerprint` (`data`, `run`), `config` (`train`) and `net`."""
    with decoding(path, "restore it, or train into another folder"):
        found = json.loads(path.read_bytes())
        parts = found["fingerprint"], found["config"], found["config"]["train"], found["net"]
        if not all(isinstance(part, dict) for part in parts):
            raise ValueError("its parts are not objects")
        found["fingerprint"]["data"], found["fingerprint"]["run"]
    return dict(found)


def claim_folder(config: RunConfig, run_dir: Path, source: ImageSource) -> None:
    """Write config.json, or make sure that the folder belongs to this very run."""
    path, first = run_dir / "config.json", config.train.continue_from
    identity = {"data": source.fingerprint, "run": config.fingerprint(source)}
    there_still = first is not None and (first / "config.json").is_file()
    continued = read_run(first / "config.json")["fingerprint"] if first and there_still else None
    if not path.exists():
        _check_nobodys(run_dir, "snapshots", "round-*/snapshots")
        record = {
            "assay": assay.__version__,
            "fingerprint": identity,
            "data": {"name": source.name, "num_images": len(source)},
            "config": config.model_dump(mode="json"),
            "net": config.net_config(source).model_dump(mode="json"),
            "continued": continued,
        }
        with write_whole(path) as partial:
            partial.write_text(json.dumps(record, indent=2))
        return
    found = read_run(path)
    known, there = found["fingerprint"], found["config"]
    what, key = f"was trained on other images: {source.name} has changed since the run began", "data"
    is_another = None not in (continued, found.get("continued")) and continued != found["continued"]
    if known["data"] == identity["data"]:
        here = config.model_dump(mode="json") | {"data": there["data"]}  # wherever the images lie
        files = {"train.continue_from": first, "train.init_from": config.train.init_from}
        changed = [f"{key}: {path} has changed" for key, path in files.items() if path]
        code = "code: that of your own classes, or their arguments, have changed"
        different = differences(there, here) or changed or [code]
        what, key = f"holds a run with another config ({'; '.join(different)})", different[0].partition(":")[0]
    if known != identity or is_another:
        raise AssayError(what, path=run_dir, key=key, cure="train into another folder")


def take_state(config: RunConfig, run_dir: Path, source: ImageSource) -> None:
    """Copy the last state of the run to continue, if there is one and this one has not started."""
    folder = config.train.continue_from
    if not (run_dir / "config.json").exists():
        _check_nobodys(run_dir, "state")
    if folder is None or (run_dir / "config.json").exists():
        return
    state = load_state(folder / "state", remove_damaged=False)
    if state is None or not (folder / "config.json").is_file():
        what = "there is no run with a saved state in that folder"
        raise AssayError(what, path=folder, key="train.continue_from", cure="give a run's folder")
    theirs, step, here = read_run(folder / "config.json"), state[1]["step"], config.model_dump(mode="json")
    different = differences(theirs["net"], config.net_config(source).model_dump(mode="json"), "net")
    for same in ("batch_size", "optimizer"):  # steps are counted in batches, moments are its
        different += differences(theirs["config"]["train"].get(same), here["train"][same], f"train.{same}")
    if (aside := theirs["config"]["data"].get("held_out")) and not config.data.held_out:
        what = f"set images aside (held_out = {aside}), which this run would train on"
        raise AssayError(what, path=folder, key="data.held_out", cure=f"give held_out = {aside}, too")
    if step >= config.train.num_steps:
        different += [f"train.num_steps is not above {step}, where it is already"]
    if different:
        what, cure = f"cannot be continued ({'; '.join(different)})", "change these settings, or start anew"
        raise AssayError(what, path=folder, key="train.continue_from", cure=cure)
    same_data = theirs["fingerprint"]["data"] == source.fingerprint
    save_state(run_dir / "state", step, state[0], state[1] | ({} if same_data else {"by_sigma": None}))


def _check_nobodys(run_dir: Path, *parts: str) -> None:
    """Reject weights in a folder without config.json: they would pass for those of the run that begins."""
    for found in (path for part in parts for path in run_dir.glob(f"{part}/*.safetensors")):
        raise AssayError("has no config.json that says whose", path=found, cure="train into another folder")


def check_claim(run_dir: Path, claim: bytes) -> None:
    """Reject to save into a folder that is not the run's any more; `claim` is what its config.json said."""
    if not (path := run_dir / "config.json").exists() or path.read_bytes() != claim:
        raise AssayError("was moved or replaced while it was trained", path=run_dir, cure="use its new name")


def save_state(folder: Path, step: int, tensors: Mapping[str, Tensor], info: Mapping[str, Any]) -> None:
    """Write the state after `step` steps and remove all but the last two."""
    target = folder / f"{step:09d}.safetensors"
    if target.exists():  # a run that was stopped twice at the same step
        return
    save_tensors(target, tensors, {"step": step, **info})
    for old in _states(folder)[:-_KEPT]:
        old.unlink()


def load_state(folder: Path, remove_damaged: bool = True) -> State | None:
    """The newest undamaged state as (tensors, info), or None. A warning tells of damaged ones."""
    for path in reversed(_states(folder)):
        try:
            tensors, info = load_tensors(path)
            if info.get("step") != int(path.stem):
                raise ValueError(f"it is the state of step {info.get('step')}")
            return tensors, info
        except (OSError, ValueError) as error:
            warn(f"{path} is damaged ({error}): resuming from the state before")
            if remove_damaged:
                path.unlink()
    return None


def remove_states(folder: Path) -> None:
    """Remove the states of a finished run, and their folder if nothing else is in it."""
    for state in _states(folder):
        state.unlink()
    with suppress(OSError):
        folder.rmdir()


def _states(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.safetensors") if re.fullmatch("[0-9]{9,}", path.stem))


def whole(tensor: Tensor) -> Tensor:
    """A tensor, gathered from all ranks if it is sharded: then every rank must call this."""
    from torch.distributed.tensor import DTensor  # which takes long to import

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _like(tensor: Tensor, target: Tensor) -> Tensor:
    """A tensor laid out in memory as `target`: fused optimizers pair weights and moments by their place there.

    This rank's part of it, if `target` is sharded.
    """
    from torch.distributed.tensor import DTensor, distribute_tensor

    if tensor.shape != target.shape:  # counts of steps
        return tensor
    if not isinstance(target, DTensor):
        return torch.empty_like(target, dtype=tensor.dtype).copy_(tensor)
    place = target.device_mesh, target.placements
    part = distribute_tensor(tensor.to(target.device), *place, src_data_rank=None).to_local()
    laid_out = torch.empty_like(target.to_local(), dtype=tensor.dtype).copy_(part)
    return DTensor.from_local(laid_out, *place, run_check=False, shape=target.shape, stride=target.stride())


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
    for part, module in modules.items():
        targets = module.state_dict().items()
        module.load_state_dict({key: _like(tensors[f"{part}/{key}"], target) for key, target in targets})
    moments: dict[int, dict[str, Tensor]] = {}
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    for key, value in tensors.items():
        part, _, rest = key.partition("/")
        if part == "optimizer":
            number, _, name = rest.partition("/")
            moments.setdefault(int(number), {})[name] = _like(value, weights[int(number)])
    optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})
