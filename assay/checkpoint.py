"""Checkpoints: Assay's own format, and import and export of published ones.

Ours is one `.safetensors` file: the weights under their published names, and in its header, as JSON, a
format version, the network's config and what is known of its training, and a checksum over all of these,
which is compared whenever the file is opened. It needs no other file. Files of EDM and
ambient-laws come in through `import_checkpoint` and leave through `export_checkpoint`; both keep a network
as flat constructor arguments (`img_resolution`, `model_type`, ...) with weights of the same names.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from assay.archives import check_unpacked
from assay.data.units import PhysicalRange
from assay.denoise import Denoiser, Preconditioned
from assay.errors import AssayError, explained, extra
from assay.files import (
    Name,
    check_absent,
    decoding,
    one_line,
    read_json,
    reason,
    write_whole,
    write_whole_directory,
)
from assay.nets import ADMConfig, NetConfig, UNetConfig, build_denoiser, channels_last, net_kind
from assay.sample import Guided, SampleConfig
from assay.unpickle import Plain, read_pickle

FORMAT_VERSION = 2
WEIGHTS_NAME = "model.safetensors"  # of a published model
_HEADER = "assay"  # the key of our JSON in a safetensors header
_CHECKSUM = "sha256"  # the key of the checksum in that JSON


class CheckpointInfo(BaseModel):
    """What sampling and the record of a result want to know of training; everything may be unknown."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sigma_tn: tuple[tuple[float, float], ...] = ()  # (noise level, fraction of the images), lowest level first
    clean_fraction: float | None = None
    num_images: int | None = None  # of the training set
    seed: int | None = None  # of training
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


@dataclass(frozen=True)
class Checkpoint:
    """A denoiser ready to evaluate, with its config and history."""

    denoiser: Preconditioned
    config: NetConfig
    info: CheckpointInfo

    def sampler(self, sample: SampleConfig, device: torch.device | str) -> Denoiser:
        """The denoiser on a device, guided if `sample` says so."""
        denoiser = self.denoiser.to(device).eval()
        if sample.guidance == 1:
            return denoiser
        if sample.guide is None:
            if not self.config.num_classes or not self.config.label_dropout:
                what = "the model was trained without classes, or without label_dropout"
                cure = "give `guide`, the checkpoint of a weaker model"
                raise AssayError(what, key="guidance", cure=cure)
            return Guided(denoiser, sample.guidance)
        guide = load_checkpoint(sample.guide)
        theirs, ours = guide.config, self.config
        if theirs.image_shape != ours.image_shape or theirs.num_classes not in (0, ours.num_classes):
            what = "has another image shape or other classes than the model"
            raise AssayError(what, path=sample.guide, key="guide", cure="give a model of the same data")
        return Guided(denoiser, sample.guidance, guide.denoiser.to(device).eval())


def save_checkpoint(
    path: Path, denoiser: Preconditioned, config: NetConfig, info: CheckpointInfo | None = None
) -> None:
    """Write the denoiser to one file, whole or not at all; an older file of that name is replaced."""
    header = {
        "format_version": FORMAT_VERSION,
        "config": config.model_dump(mode="json"),
        "info": (info or CheckpointInfo()).model_dump(mode="json"),
    }
    save_tensors(Path(path), _state(denoiser), header)


def save_tensors(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Write tensors and a header of plain values to a safetensors file, with a checksum over both.

    Whole or not at all; an older file of that name is replaced.
    """
    signed = {**header, _CHECKSUM: _digest(tensors, header)}
    with write_whole(path) as partial:
        try:  # in one text: several are written in any order, and the same tensors must give the same bytes
            save_file(dict(tensors), partial, {_HEADER: json.dumps(signed)})
        except SafetensorError as error:
            number = re.search(r"os error (\d+)", str(error))
            raise OSError(int(number[1]) if number else 0, str(error)) from error


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the header that `save_tensors` wrote; an error if anything has changed."""
    tensors, metadata = _read_safetensors(path)
    if _HEADER not in metadata:
        cure = "use `assay model import` for foreign weights"
        raise AssayError("was not written by Assay", path=path, cure=cure)
    with decoding(path, "restore it, or make it again"):
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
    return path.suffix == ".safetensors" or folder or hub_name(path) is not None


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
    what = "is a run that has not finished" if snapshots else "is a folder without snapshots/final.safetensors"
    cure = f"resume it, or give its last snapshot, {snapshots[-1]}" if snapshots else "give a finished run"
    raise AssayError(what, path=path, cure=cure)


def load_checkpoint(path: Path) -> Checkpoint:
    """Open a file that `save_checkpoint` wrote, the final one of a run folder, or a published model.

    The latter is a folder or `hf:OWNER/NAME`, and may be of ambient-laws. Errors name what is wrong.
    """
    repository, path = hub_name(path), find_checkpoint(Path(path))
    if path.name == WEIGHTS_NAME and not _is_ours(path):
        if repository is not None:
            _download(repository, "config.json")
        if (path.parent / "config.json").is_file():  # as ambient-laws has
            return _import_directory(path.parent, repository or path.resolve().parent.name)
    weights, header = load_tensors(path)
    if header.get("format_version") != FORMAT_VERSION:
        what = f"has checkpoint format {header.get('format_version')!r:.20}; {FORMAT_VERSION} is known here"
        raise AssayError(what, path=path, cure="make it again with this version, or upgrade Assay")
    with decoding(path, "its header does not describe a network; make it again"):
        config = net_kind(header["config"]).model_validate(header["config"])
        info = CheckpointInfo.model_validate(header["info"])
    return Checkpoint(_fill(config, weights, path), config, info)


def import_checkpoint(source: str | Path) -> Checkpoint:
    """Read weights of EDM or ambient-laws, without running anything in them.

    `source` is an EDM `network-snapshot-*.pkl` (its EMA weights), a `training-state-*.pt` (its raw
    weights), a state dict that `export_checkpoint` wrote, a directory with `config.json` and
    `model.safetensors`, or the name of a Hugging Face repository with these two files.
    """
    path = Path(source)
    if path.is_dir():
        return _import_directory(path, path.resolve().name)
    if path.suffix in (".pkl", ".pt", ".pth"):
        return _import_pickle(path)
    if not path.exists() and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(source)):
        _download(str(source), "config.json")
        return _import_directory(_download(str(source), WEIGHTS_NAME).parent, str(source))
    cure = "give an EDM .pkl or .pt file, a directory with config.json, or the name of a repository"
    raise AssayError("cannot be imported" if path.exists() else "does not exist", path=source, cure=cure)


ExportFormat = Literal["edm-state-dict", "ambient-laws-hf"]


def export_checkpoint(checkpoint: Checkpoint, path: Path, to: ExportFormat) -> None:
    """Write weights for EDM or ambient-laws.

    `edm-state-dict`: a `torch.save` file of tensors alone, and beside it a `.json` of the same name with
    the arguments of `EDMPrecond`. `ambient-laws-hf`: a directory for `from_pretrained`.
    """
    path = Path(path)
    config = json.dumps(config_to_edm(checkpoint.config), indent=1)
    check_absent(path)
    match to:
        case "ambient-laws-hf":
            with write_whole_directory(path) as partial:
                (partial / "config.json").write_text(config)
                save_file(_state(checkpoint.denoiser), partial / WEIGHTS_NAME, {"format": "pt"})
        case "edm-state-dict":
            if path.suffix not in (".pt", ".pth"):
                raise AssayError("is no name for a state dict", path=path, cure="end it in .pt or .pth")
            check_absent(path.with_suffix(".json"))
            with write_whole(path) as partial:
                torch.save(_state(checkpoint.denoiser), partial)
            with write_whole(path.with_suffix(".json")) as partial:
                partial.write_text(config)


_MODEL_TYPES: dict[str, type[UNetConfig] | type[ADMConfig]] = {
    "SongUNet": UNetConfig,
    "DhariwalUNet": ADMConfig,
}


def config_from_edm(arguments: Mapping[str, Any], where: str | Path) -> UNetConfig | ADMConfig:
    """The config for flat arguments of `EDMPrecond`, with EDM's defaults; errors say `where` they stand."""
    unused = ("use_fp16", "sigma_min", "sigma_max")  # how EDM runs and samples, not what the network is
    given = {key: value for key, value in arguments.items() if key not in unused}
    model_type = given.pop("model_type", "DhariwalUNet")
    if str(model_type) not in _MODEL_TYPES:
        cure = f"give one of {', '.join(_MODEL_TYPES)}"
        raise AssayError(f"{one_line(repr(model_type))} is not known", path=where, key="model_type", cure=cure)
    with decoding(where, "write all arguments of the network to it"):
        resolution, num_classes = given.pop("img_resolution"), given.pop("label_dim", 0)
        given["image_shape"] = (given.pop("img_channels"), resolution, resolution)
    try:
        return _MODEL_TYPES[model_type].model_validate(given | dict(num_classes=num_classes))
    except ValidationError as error:
        raise explained(error, path=where) from error


def config_to_edm(config: NetConfig) -> dict[str, Any]:
    """Flat arguments of `EDMPrecond` for a config; a network that EDM does not have is rejected."""
    channels, height, width = config.image_shape
    published = isinstance(config, ADMConfig) or (
        isinstance(config, UNetConfig) and config.resample_with == "block"
    )
    if not published or height != width or config.encoder != "pixels":
        what = f"EDM has no network of this kind ({config.kind}) for {height} x {width} {config.encoder}"
        raise AssayError(what, key="to", cure="train one of the presets named ddpmpp, ncsnpp or adm")
    ours = {"kind", "image_shape", "num_classes", "resample_with", "encoder"}
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
    return CheckpointInfo(
        **_mix(sigma=float(found[2]), corrupted=float(found[3])),
        dataset=found[1],
        dataset_fraction=float(found[4]),
        source=name,
    )


def _mix(sigma: float, corrupted: float) -> dict[str, Any]:
    """Two kinds of images: clean ones, and a fraction `corrupted` at noise level `sigma`."""
    if sigma == 0:
        corrupted = 0.0
    shares = ((0.0, round(1 - corrupted, 9)), (sigma, corrupted))
    return dict(sigma_tn=tuple(share for share in shares if share[1] > 0), clean_fraction=shares[0][1])


def _import_directory(directory: Path, name: str) -> Checkpoint:
    """The files of an ambient-laws repository."""
    config_path, weights_path = directory / "config.json", directory / WEIGHTS_NAME
    config = config_from_edm(_read_json(config_path), config_path)
    denoiser = _fill(config, _read_safetensors(weights_path)[0], weights_path, config_path)
    return Checkpoint(denoiser, config, info_from_name(name))


def _read_json(path: Path) -> dict[str, Any]:
    """The arguments of a network."""
    if not path.is_file():
        raise AssayError("is missing", path=path, cure="write the network's arguments to it as JSON")
    check_unpacked(path, path.stat().st_size, 0)  # some hundred bytes are enough
    return read_json(path, "write the network's arguments to it as JSON")


def import_hub() -> Any:
    """The package that talks to Hugging Face."""
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


def _import_pickle(path: Path) -> Checkpoint:
    """An EDM snapshot (`ema`), a training state (`net`) or an exported state dict with its `.json`."""
    content, config_path = read_pickle(path), None
    network = content.get("ema", content.get("net")) if isinstance(content, dict) else content
    if isinstance(network, Plain) and network.class_name == "EDMPrecond":
        with decoding(path, "it is not laid out as EDM does; get it again"):
            arguments = dict(zip(_EDM_ORDER.split(), network.state["_init_args"], strict=False))
            arguments |= network.state["_init_kwargs"]
            weights = dict(_tensors(network, ""))
        config = config_from_edm(arguments, path)
    elif isinstance(content, dict) and content and all(isinstance(value, Tensor) for value in content.values()):
        config_path = path.with_suffix(".json")
        config, weights = config_from_edm(_read_json(config_path), config_path), content
    else:
        found = network.class_name if isinstance(network, Plain) else type(network).__name__
        cure = "give an EDM snapshot or training state, whose 'ema' or 'net' is an EDMPrecond"
        raise AssayError(f"holds no EDMPrecond, but a {one_line(found)}", path=path, cure=cure)
    denoiser = _fill(config, weights, path, config_path)
    return Checkpoint(denoiser, config, _info_from_snapshot(path, content))


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


def _tensors(module: Plain, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Names and values of a module's parameters and buffers, as its state dict would have them."""
    for name, value in {**module.state["_parameters"], **module.state["_buffers"]}.items():
        if isinstance(value, Tensor):
            yield f"{prefix}{name}", value
    for name, child in module.state["_modules"].items():
        if isinstance(child, Plain):
            yield from _tensors(child, f"{prefix}{name}.")


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors of a file and its header's metadata."""
    if not path.is_file():
        raise AssayError("does not exist or is not a file", path=path, cure="check the path")
    cure = "it is truncated, damaged or not a safetensors file; get it again"
    with decoding(path, cure), safe_open(path, framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118


def _is_ours(path: Path) -> bool:
    with decoding(path, "get it again"), safe_open(path, framework="pt") as file:
        return _HEADER in (file.metadata() or {})


def _fill(
    config: NetConfig, weights: Mapping[str, Tensor], path: Path, config_path: Path | None = None
) -> Preconditioned:
    """The config's network with these weights, in evaluation mode; the first key that does not fit is named."""
    cure = "no network can be built from its config; correct it"
    with decoding(config_path or path, cure), torch.device("meta"):
        denoiser = build_denoiser(config)  # also sizes that overflow fail
    if problem := _misfit(weights, denoiser.state_dict()):
        other = "" if config_path is None else f", or {config_path.name}, which describes it"
        raise AssayError(problem, path=path, cure=f"get it again{other}")
    denoiser.load_state_dict({key: weights[key].float() for key in denoiser.state_dict()}, assign=True)
    return channels_last(denoiser).eval()


def _misfit(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str | None:
    """The first weight that is not as the network has it: on the meta device only constants have values."""
    for key, slot in expected.items():
        if key not in weights:
            return f"{key} is missing"
        value = weights[key]
        if value.shape != slot.shape:
            return f"{key} has shape {tuple(value.shape)}; its config says {tuple(slot.shape)}"
        if not value.is_floating_point() or not bool(value.isfinite().all()):
            return f"{key} has values that are not finite numbers"
        if not slot.is_meta and not torch.allclose(value.float(), slot):
            return f"{key} is not what its config says"
    unknown = next((key for key in weights if key not in expected), None)
    return None if unknown is None else f"{one_line(unknown)} has no place in the network of its config"


def _state(denoiser: Preconditioned) -> dict[str, Tensor]:
    return {key: value.detach().cpu().contiguous() for key, value in denoiser.state_dict().items()}
