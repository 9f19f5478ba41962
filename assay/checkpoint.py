"""Checkpoints: Assay's own format, and those of EDM and ambient-laws.

Ours is one `.safetensors` file: the weights under their published names, and in its header, as JSON, a
format version, the network's config and what is known of its training, and a checksum over all of these,
which is compared whenever the file is opened. EDM and ambient-laws keep a network as flat constructor arguments
(`img_resolution`, `model_type`, ...) with weights of the same names.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from assay.archives import check_unpacked
from assay.data.picture import levels_text
from assay.data.units import PhysicalRange
from assay.denoise import Preconditioned
from assay.errors import AssayError, choose, extra, warn
from assay.files import (
    Name,
    content_hash,
    decoding,
    one_line,
    read_json,
    reason,
    write_whole,
    write_whole_directory,
)
from assay.nets import (
    ADMConfig,
    NetConfig,
    PassedConfig,
    UNetConfig,
    build_denoiser,
    channels_last,
    is_own_net,
    net_class,
    net_code,
    net_kind,
    pass_module,
)
from assay.registry import is_own
from assay.settings import Config, checked
from assay.unpickle import Plain, PlainTensor, read_pickle

FORMAT_VERSION = 2
WEIGHTS_NAME = "model.safetensors"  # of a published model
_PICKLES = (".pkl", ".pt")  # of EDM
_MAX_TOLD = 12  # noise levels, one by one
_HEADER = "assay"  # the key of our JSON in a safetensors header
_CHECKSUM = "sha256"  # the key of the checksum in that JSON


class CheckpointInfo(Config):
    """What sampling and the record of a result want to know of training; everything may be unknown."""

    sigma_tn: tuple[tuple[float, float], ...] = ()  # (noise level, fraction of the images), lowest level first
    clean_fraction: float | None = None
    num_images: int | None = None  # of the training set
    seed: int | None = None  # of training
    loss: Name | None = None  # its kind, and that of the distribution of levels
    noise: Name | None = None
    code: Name | None = None  # a hash of that of a network of the user's own
    consistency: bool | None = None  # whether the consistency loss was used
    rounds: int = 0  # how often its training images were restored and trained on again
    num_images_seen: int | None = None
    dataset: Name | None = None
    dataset_fraction: float | None = None  # how much of the data set was kept
    label_names: tuple[Name, ...] = ()
    physical_range: PhysicalRange | None = None  # what -1 and 1 are in the units of the data
    source: Name | None = None  # where foreign weights came from

    @property
    def lowest_sigma_tn(self) -> float | None:
        """The lowest noise level of the training images, if known."""
        return self.sigma_tn[0][0] if self.sigma_tn else None

    def levels_in_words(self, form: str = ".3g") -> list[tuple[str, float]]:
        """Noise levels as text, and the fraction of the images at each; many levels are told as one range."""
        noisy = [(level, part) for level, part in self.sigma_tn if level > 0]
        if len(noisy) <= _MAX_TOLD:
            return [(f"{level:{form}}", part) for level, part in self.sigma_tn]
        clean = [("0", part) for level, part in self.sigma_tn if level == 0]
        return [*clean, (levels_text(noisy[0][0], noisy[-1][0], form), sum(part for _, part in noisy))]


@dataclass(frozen=True)
class Checkpoint:
    """A denoiser ready to evaluate, with its config and history."""

    denoiser: Preconditioned
    config: NetConfig
    info: CheckpointInfo


def save_checkpoint(
    path: Path, denoiser: Preconditioned, config: NetConfig, info: CheckpointInfo | None = None
) -> None:
    """Write the denoiser to one file, whole or not at all; an older file of that name is replaced."""
    info = info or CheckpointInfo()
    about = {"config": config, "info": info.model_copy(update={"code": info.code or _code(config)})}
    plain = {name: part.model_dump(mode="json") for name, part in about.items()}
    save_tensors(Path(path), _state(denoiser), {"format_version": FORMAT_VERSION, **plain})


def save_tensors(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Write tensors and a header of plain values to a safetensors file, with a checksum over both."""
    signed = {**header, _CHECKSUM: _digest(tensors, header)}
    with write_whole(path) as partial:
        mode = partial.stat().st_mode  # by the umask; safetensors would let only the owner read
        try:  # in one text: several are written in any order, and the same tensors must give the same bytes
            save_file(dict(tensors), partial, {_HEADER: json.dumps(signed)})
        except SafetensorError as error:
            raise OSError(str(error)) from error
        partial.chmod(mode)


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the header that `save_tensors` wrote, unchanged; no header if others wrote them."""
    if not path.is_file():
        raise AssayError("does not exist or is not a file", path=path, cure="check the path")
    with decoding(path, "it is truncated, damaged or not a safetensors file; get it again"):
        with safe_open(path, framework="pt") as file:
            tensors, metadata = {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118
        if _HEADER not in metadata:
            return tensors, {}
        header = json.loads(metadata[_HEADER])
        if header.pop(_CHECKSUM, None) != _digest(tensors, header):
            raise AssayError("is damaged: its checksum does not match")
        return tensors, header


def _digest(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> str:
    shapes = {name: [str(value.dtype), *value.shape] for name, value in tensors.items()}
    digest = hashlib.sha256(json.dumps([header, shapes], sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def hub_name(path: str | Path) -> str | None:
    """OWNER/NAME of `hf:OWNER/NAME`, a model on Hugging Face; None of paths of files."""
    text = str(path)
    if not text.startswith("hf:"):
        return None
    found = re.fullmatch(r"hf:/*(\w[\w.-]*/\w[\w.-]*)", Path(text).as_posix(), re.ASCII)
    if found is None:
        raise AssayError("is no name of a model on Hugging Face", path=text, cure="write it as hf:OWNER/NAME")
    return found[1]


def is_model(path: Path) -> bool:
    """Whether this names a model: a checkpoint, a run folder, or a published model."""
    folder = (path / "snapshots").is_dir() or (path / WEIGHTS_NAME).is_file()
    return path.suffix in (".safetensors", *_PICKLES) or folder or hub_name(path) is not None


def find_checkpoint(path: Path) -> Path:
    """The file itself, the final checkpoint of a run folder, or the weights of a published model."""
    if (repository := hub_name(path)) is not None:
        return _download(repository, WEIGHTS_NAME)
    if not path.is_dir():
        return path
    snapshots = sorted((path / "snapshots").glob("*.safetensors"))
    for final in (path / WEIGHTS_NAME, path / "snapshots" / "final.safetensors"):
        if final.is_file():
            return final
    if not snapshots and not (path / "state").is_dir():
        what = "is a folder without snapshots/final.safetensors"
        raise AssayError(what, path=path, cure="give a finished run")
    cure = "repeat its command to resume it (in Python call `fit` again with the same run_dir), or end it at "
    cure += f"step N: `assay train IMAGES --continue-from {path} --num-steps N -o OTHER`"
    cure += f", or give its last snapshot, {snapshots[-1]}" if snapshots else ""
    raise AssayError("is a run that has not finished", path=path, cure=cure)


def load_checkpoint(path: Path, to_measure: bool = False, net: torch.nn.Module | None = None) -> Checkpoint:
    """Open a checkpoint of ours, the final one of a run folder, a published model, or weights of EDM.

    One of a module that was passed in needs it, as `net`, unless the last one of its name here is the same.

    Other code of the user's own network than it was trained with is told, and is an error where the model is
    `to_measure`: the result would pass for its own.

    Of EDM: a `network-snapshot-*.pkl` (EMA weights) or a `training-state-*.pt` (raw weights). Nothing in a file
    is run.
    """
    repository, path = hub_name(path), find_checkpoint(Path(path))
    if net is not None:
        pass_module(net)
    if path.suffix in _PICKLES:
        return _load_pickle(path)
    weights, header = load_tensors(path)
    if not header:
        config_path = path.with_name("config.json")
        if repository is not None:
            config_path = _download(repository, "config.json")
        cure = "write the network's arguments to it as JSON"
        if not config_path.is_file():
            raise AssayError(f"is not of Assay, and has no {config_path.name} beside it", path=path, cure=cure)
        check_unpacked(config_path, config_path.stat().st_size, 0)  # some hundred bytes are enough
        edm_config = config_from_edm(read_json(config_path, cure), config_path)
        info = info_from_name(repository or path.resolve().parent.name)
        return Checkpoint(_fill(edm_config, weights, path, config_path), edm_config, info)
    with decoding(path, "make it again with this version, or upgrade Assay"):
        if header["format_version"] != FORMAT_VERSION:
            raise ValueError(f"its format is {header['format_version']!r:.20}, not {FORMAT_VERSION}")
        config = checked(net_kind(header["config"]), header["config"])
        info = checked(CheckpointInfo, header["info"])
    is_passed = isinstance(config, PassedConfig)
    name = config.name if isinstance(config, PassedConfig) else config.kind
    if net is not None and not (is_passed and name == type(net).__name__):
        what = f"holds weights of {name}, not of {type(net).__name__}"
        raise AssayError(what, path=path, key="net", cure=f"give a {name}" if is_passed else "leave it out")
    if what := code_change(config, info):
        cure = "undo that, or train anew"
        if isinstance(config, PassedConfig) and net is None:
            what, cure = f"has weights of a {name} of your own, not of the one given before", config.cure
        if to_measure or (is_passed and net is None):
            raise AssayError(what, path=path, key="net", cure=cure)
        warn(f"{path} {what}")
    return Checkpoint(_fill(config, weights, path), config, info)


def code_change(config: NetConfig, info: CheckpointInfo) -> str:
    """What to say of a network of the user's own that is not the one that was trained."""
    if not is_own(its_class := _net_class(config)) or info.code in (None, _code(config)):
        return ""
    which = f"code, arguments or plain tensors of {its_class.__name__}"
    return f"was trained with another network: {which} have changed since (register_buffer keeps tensors)"


def export_checkpoint(checkpoint: Checkpoint, folder: Path) -> None:
    """Write `config.json` and `model.safetensors`, as ambient-laws' `from_pretrained` reads them."""
    config = json.dumps(config_to_edm(checkpoint.config), indent=1)
    with write_whole_directory(Path(folder)) as partial:
        (partial / "config.json").write_text(config)
        save_file(_state(checkpoint.denoiser), partial / WEIGHTS_NAME, {"format": "pt"})
        (partial / WEIGHTS_NAME).chmod((partial / "config.json").stat().st_mode)


_MODEL_TYPES: dict[str, type[UNetConfig | ADMConfig]] = {"SongUNet": UNetConfig, "DhariwalUNet": ADMConfig}


def config_from_edm(arguments: Mapping[str, Any], where: str | Path) -> UNetConfig | ADMConfig:
    """The config for flat arguments of `EDMPrecond`, with EDM's defaults; errors say `where` they stand."""
    unused = ("use_fp16", "sigma_min", "sigma_max")  # how EDM runs and samples, not what the network is
    given = {key: value for key, value in arguments.items() if key not in unused}
    kind = choose(str(given.pop("model_type", "DhariwalUNet")), _MODEL_TYPES, "model_type", where)
    with decoding(where, "write all arguments of the network to it"):
        resolution, given["num_classes"] = given.pop("img_resolution"), given.pop("label_dim", 0)
        given["image_shape"] = (given.pop("img_channels"), resolution, resolution)
        return kind(**given)


def config_to_edm(config: NetConfig) -> dict[str, Any]:
    """Flat arguments of `EDMPrecond` for a config; a network that EDM does not have is rejected."""
    channels, height, width = config.image_shape
    lean = isinstance(config, UNetConfig) and config.resample_with != "block"
    if lean or not isinstance(config, (UNetConfig, ADMConfig)) or height != width:
        what = f"EDM has no network of this kind ({config.kind}) for {height} x {width} pixels"
        raise AssayError(what, key="checkpoint", cure="train one of the presets named ddpmpp, ncsnpp or adm")
    ours = {"kind", "image_shape", "num_classes", "resample_with"}
    arguments = config.model_dump(mode="json", exclude=ours)
    model_type = next(name for name, kind in _MODEL_TYPES.items() if isinstance(config, kind))
    shape = dict(img_resolution=height, img_channels=channels, label_dim=config.num_classes)
    return {**shape, "use_fp16": False, "model_type": model_type, **arguments}


def info_from_name(name: str) -> CheckpointInfo:
    """What `ambient_laws_{dataset}_sigma_{s}_corruption_{q}_keep_{k}` says; q is the corrupted fraction."""
    number = r"(\d+(?:\.\d+)?)"
    found = re.search(rf"ambient_laws_(\w+?)_sigma_{number}_corruption_{number}_keep_{number}$", name)
    if found is None:
        return CheckpointInfo(source=name)
    sigma, corrupted, kept = map(float, found.groups()[1:])
    return CheckpointInfo(**_mix(sigma, corrupted), dataset=found[1], dataset_fraction=kept, source=name)


def _mix(sigma: float, corrupted: float) -> dict[str, Any]:
    """Two kinds of images: clean ones, and a fraction `corrupted` at noise level `sigma`."""
    if sigma == 0:
        corrupted = 0.0
    shares = ((0.0, round(1 - corrupted, 9)), (sigma, corrupted))
    return dict(sigma_tn=tuple(share for share in shares if share[1] > 0), clean_fraction=shares[0][1])


def import_hub() -> Any:
    """The package that talks to Hugging Face, with its errors."""
    extra("huggingface_hub.errors", "hub", "Hugging Face")
    return extra("huggingface_hub", "hub", "Hugging Face")


def _download(repository: str, name: str) -> Path:
    """A file of a Hugging Face repository: in the local cache, or fetched into it."""
    hub = import_hub()
    try:
        try:
            return Path(hub.hf_hub_download(repository, name, local_files_only=True))
        except hub.errors.LocalEntryNotFoundError:
            return Path(hub.hf_hub_download(repository, name))
    except (OSError, ValueError) as error:
        what = f"is neither in the local cache nor reachable on Hugging Face ({reason(error)})"
        raise AssayError(what, path=f"hf:{repository}", cure="check its name and the connection") from error


def _load_pickle(path: Path) -> Checkpoint:
    """An EDM snapshot, whose network is its `ema`, or a training state, whose network is its `net`."""
    content = read_pickle(path.read_bytes(), path)
    network = content.get("ema", content.get("net")) if isinstance(content, dict) else content
    if not isinstance(network, Plain) or network.name != "EDMPrecond":
        found = network.name if isinstance(network, Plain) else type(network).__name__
        cure = "give an EDM snapshot or training state, whose 'ema' or 'net' is an EDMPrecond"
        raise AssayError(f"holds no EDMPrecond, but a {one_line(found)}", path=path, cure=cure)
    with decoding(path, "it is not laid out as EDM does; get it again"):
        arguments = dict(zip(_EDM_ORDER.split(), network.state["_init_args"], strict=False))
        config = config_from_edm(arguments | network.state["_init_kwargs"], path)
        weights = dict(_tensors(network, "", set()))
    return Checkpoint(_fill(config, weights, path), config, _info_from_snapshot(path, content))


# The order of EDMPrecond's arguments, for networks that were built without naming them.
_EDM_ORDER = "img_resolution img_channels label_dim use_fp16 sigma_min sigma_max sigma_data model_type"


def _info_from_snapshot(path: Path, content: dict[str, Any]) -> CheckpointInfo:
    """The file's name counts thousands of images; `dataset_kwargs` names the data and perhaps its noise."""
    seen = re.fullmatch(r"(?:network-snapshot|training-state)-(\d+)", path.stem)
    known: dict[str, Any] = dict(source=path.name, num_images_seen=int(seen[1]) * 1000 if seen else None)
    data = content.get("dataset_kwargs")
    if isinstance(data, dict) and isinstance(data.get("path"), str):
        known["dataset"] = Path(data["path"]).stem
        sigma, corrupted = data.get("sigma"), data.get("corruption_probability_per_image")
        if isinstance(sigma, int | float) and isinstance(corrupted, int | float):
            known |= _mix(sigma, corrupted)
    return CheckpointInfo(**known)


def _tensors(module: Plain, prefix: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Names and values of a module's parameters and buffers, as its state dict would have them.

    A module counts once: a small file can hold one in another in endless ways.
    """
    seen.add(id(module))
    for name, value in {**module.state["_parameters"], **module.state["_buffers"]}.items():
        if isinstance(value, PlainTensor):
            yield f"{prefix}{name}", value.values
    for name, child in module.state["_modules"].items():
        if isinstance(child, Plain) and id(child) not in seen:
            yield from _tensors(child, f"{prefix}{name}.", seen)


def _fill(
    config: NetConfig, weights: Mapping[str, Tensor], path: Path, config_path: Path | None = None
) -> Preconditioned:
    """The config's network with these weights, in evaluation mode; what does not fit is named."""
    cure = "no network can be built from its config; correct it"
    own = is_own_net(config)
    with decoding(config_path or path, cure), torch.device("cpu" if own else "meta"):
        denoiser = build_denoiser(config)  # also sizes that overflow fail
    cure = "give the network the code that it was trained with" if own else "get it again"
    with decoding(path, f"{cure}{f', or {config_path.name}' if config_path else ''}"):
        slots, trained = denoiser.state_dict(), dict(denoiser.named_parameters(remove_duplicate=False))
        found = {key: value.to(slots[key].dtype) if key in slots else value for key, value in weights.items()}
        denoiser.load_state_dict(found, assign=not own)  # which may have tensors that are not in the file
        for key, value in weights.items():
            if key in trained and not (value.is_floating_point() and bool(value.isfinite().all())):
                raise ValueError(f"{key} has values that are not finite numbers")
            if not own and not slots[key].is_meta and not torch.allclose(found[key], slots[key]):
                raise ValueError(f"{key} is not what its config says")
    return channels_last(denoiser).eval()


def _net_class(config: NetConfig) -> type:
    return net_class(config.model_dump(include={"kind", "name"}))


def _code(config: NetConfig) -> str | None:
    """A hash of what `net_code` tells."""
    code = net_code(config.model_dump(include={"kind", "name"}))
    return content_hash(code) if code else None


def _state(denoiser: Preconditioned) -> dict[str, Tensor]:
    state = denoiser.state_dict().items()  # copies: a network of your own may use a weight twice
    return {key: value.detach().cpu().clone(memory_format=torch.contiguous_format) for key, value in state}
