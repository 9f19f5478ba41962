"""Checkpoints: round trips are exact, published files load, and what does not fit is named."""

import json
import os
import shutil
import struct
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from assay.checkpoint import (
    FORMAT_VERSION,
    Checkpoint,
    CheckpointInfo,
    config_to_edm,
    export_checkpoint,
    info_from_name,
    load_checkpoint,
    load_tensors,
    save_checkpoint,
    save_tensors,
)
from assay.nets import ADMConfig, DiTConfig, MLPConfig, NetConfig, UNetConfig, build_denoiser, preset
from tests.commands import failing, run
from tests.errors import fault

GOLDEN = Path(__file__).parent / "golden"
SNAPSHOT = GOLDEN / "edm_pickle" / "network-snapshot-000123.pkl"
AMBIENT = "ambient_laws_celeba_sigma_0.05_corruption_0.1_keep_1.0"
CONFIGS: list[NetConfig] = [
    UNetConfig(image_shape=(1, 8, 8), model_channels=8, channel_mult=(1, 2), num_blocks=1, augment_dim=3),
    UNetConfig(
        image_shape=(2, 8, 8), num_classes=4, model_channels=8, channel_mult=(1, 2), num_blocks=1, dropout=0.0,
        embedding_type="fourier", encoder_type="residual", resample_filter=(1, 3, 3, 1),
    ),
    ADMConfig(image_shape=(3, 8, 8), num_classes=4, model_channels=32, channel_mult=(1, 1), num_blocks=1),
    DiTConfig(image_shape=(1, 8, 12), width=64, num_blocks=1),
    MLPConfig(image_shape=(1, 8, 8), width=32, num_blocks=1, sigma_data=0.7),
]  # fmt: skip
each_config = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)


def same_weights(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    one, two = first.state_dict(), second.state_dict()
    return one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


@each_config
def test_round_trip_is_exact_and_needs_only_the_file(tmp_path: Path, config: NetConfig) -> None:
    denoiser = build_denoiser(config, seed=3)
    info = CheckpointInfo(
        sigma_tn=((0.0, 0.25), (0.2, 0.75)), clean_fraction=0.25, num_images_seen=10, label_names=("a", "b")
    )
    path = tmp_path / "x.safetensors"
    save_checkpoint(path, denoiser, config, info)
    loaded = load_checkpoint(path)
    assert (loaded.config, loaded.info) == (config, info)
    assert same_weights(loaded.denoiser, denoiser) and not loaded.denoiser.training
    assert loaded.denoiser.sigma_data == config.sigma_data
    assert all(parameter.requires_grad for parameter in loaded.denoiser.parameters())
    x, sigma = torch.randn(2, *config.image_shape), torch.tensor([0.1, 3.0])
    with torch.no_grad():
        assert torch.equal(loaded.denoiser(x, sigma), denoiser.eval()(x, sigma))
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


def test_weights_can_be_read_as_the_umask_says(tmp_path: Path) -> None:
    save_tensors(tmp_path / "a.safetensors", {"a": torch.zeros(2)}, {})
    (tmp_path / "plain").touch()
    assert (tmp_path / "a.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, path = CONFIGS[4], tmp_path / "x.safetensors"
    save_checkpoint(path, build_denoiser(config), config)
    before = path.read_bytes()

    def full(tensors: object, file: Path, metadata: object) -> None:
        file.write_bytes(before[:100])
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("assay.checkpoint.save_file", full)
    with pytest.raises(OSError, match=r"x\.safetensors could not be written: the disk is full"):
        save_checkpoint(path, build_denoiser(config, seed=1), config)
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_any_change_to_a_checkpoint_is_noticed(tmp_path: Path) -> None:
    config, path = CONFIGS[4], tmp_path / "x.safetensors"
    save_checkpoint(path, build_denoiser(config), config, CheckpointInfo(dataset="digits"))
    whole = path.read_bytes()
    (header_size,) = struct.unpack("<Q", whole[:8])
    for at in (8 + header_size, len(whole) - 1, *(8 + i for i in range(0, header_size, 7))):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert fault(lambda: load_checkpoint(path)).path == str(path)
    path.write_bytes(whole.replace(b"digits", b"widgit"))
    assert "checksum" in fault(lambda: load_checkpoint(path)).what
    for end in (0, 5, 100, len(whole) - 1):
        path.write_bytes(whole[:end])
        assert fault(lambda: load_checkpoint(path)).path == str(path)
    save_file({"x": torch.zeros(1)}, path)
    assert fault(lambda: load_checkpoint(path)).path == str(path)
    assert fault(lambda: load_checkpoint(tmp_path / "none")).path == str(tmp_path / "none")


def rewritten(tmp_path: Path, change: Any) -> Path:
    """A checkpoint after `change(weights, header)`."""
    config, path = CONFIGS[1], tmp_path / "x.safetensors"
    save_checkpoint(path, build_denoiser(config), config)
    weights, header = load_tensors(path)
    change(weights, header)
    save_tensors(path, weights, header)
    return path


LAYER, FILTER = "model.enc.4x4_block0.conv0.weight", "model.dec.8x8_up.skip.resample_filter"


def set_value(weights: dict[str, torch.Tensor], value: float) -> None:
    weights[LAYER] = weights[LAYER].clone()
    weights[LAYER].view(-1)[7] = value


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda weights, header: weights.pop(LAYER), LAYER),
        (lambda weights, header: weights.update({LAYER: torch.zeros(2, 3)}), LAYER),
        (lambda weights, header: weights.update({LAYER: weights[LAYER].int()}), f"{LAYER} has values"),
        (lambda weights, header: set_value(weights, float("nan")), f"{LAYER} has values that are not finite"),
        (lambda weights, header: set_value(weights, float("-inf")), f"{LAYER} has values that are not finite"),
        (lambda weights, header: weights.update(more=torch.zeros(1)), '"more"'),
        (lambda weights, header: weights[FILTER].mul_(2), f"{FILTER} is not what its config says"),
        (lambda weights, header: header.update(format_version=FORMAT_VERSION + 1), "format is 3"),
        (lambda weights, header: header.pop("format_version"), "format_version"),
        (lambda weights, header: header["config"].update(kind="gan"), "gan"),
        (lambda weights, header: header["config"].update(colour=1), "colour"),
        (lambda weights, header: header.pop("info"), "info"),
        (lambda weights, header: header["config"].update(model_channels=130), "130 channels"),
        (lambda weights, header: header["config"].update(model_channels=10**30), "cannot be read"),
        (lambda weights, header: header["config"].update(num_blocks=10**9), "num_blocks"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, change: Any, what: str) -> None:
    path = rewritten(tmp_path, change)
    found = fault(lambda: load_checkpoint(path))
    assert found.path == str(path) and what in str(found)


def test_imports_edms_snapshot_and_matches_its_outputs() -> None:
    checkpoint = load_checkpoint(SNAPSHOT)
    io = {key: torch.from_numpy(value) for key, value in np.load(SNAPSHOT.parent / "io.npz").items()}
    with torch.no_grad():
        output = checkpoint.denoiser(io["x"], io["sigma"])
    assert float((output - io["expected"]).abs().max() / io["expected"].abs().max()) < 1e-5
    assert checkpoint.info == CheckpointInfo(num_images_seen=123_000, dataset="x", source=SNAPSHOT.name)


class Persistent:
    """Pickles as EDM's persistent objects do."""

    def __init__(self, class_name: str, state: dict[str, Any]) -> None:
        self.meta: dict[str, Any] = dict(type="class", version=6, module_src="raise SystemExit")
        self.meta |= dict(class_name=class_name, state=state)

    def __reduce__(self) -> Any:
        return (sys.modules["torch_utils.persistence"]._reconstruct_persistent_obj, (self.meta,))  # type: ignore[attr-defined]


def as_edm_object(checkpoint: Checkpoint, class_name: str = "EDMPrecond") -> Persistent:
    """The nested modules that EDM would pickle for these weights."""

    def module(weights: dict[str, torch.Tensor]) -> dict[str, Any]:
        own = {key: value for key, value in weights.items() if "." not in key}
        children: dict[str, dict[str, torch.Tensor]] = {}
        for key, value in weights.items():
            if "." in key:
                children.setdefault(key.partition(".")[0], {})[key.partition(".")[2]] = value
        return {
            "_parameters": {k: torch.nn.Parameter(v) for k, v in own.items() if "filter" not in k},
            "_buffers": {k: v for k, v in own.items() if "filter" in k} | {"none": None},
            "_modules": {k: Persistent("Layer", module(v)) for k, v in children.items()},
            "_non_persistent_buffers_set": set(),
        }

    arguments = config_to_edm(checkpoint.config)
    shape = (arguments.pop("img_resolution"), arguments.pop("img_channels"))
    state = module(checkpoint.denoiser.state_dict())
    return Persistent(class_name, state | {"_init_args": shape, "_init_kwargs": arguments})


@pytest.fixture
def fake_edm(monkeypatch: pytest.MonkeyPatch) -> None:
    """EDM's names, so that pickle can write them; reading happens without."""
    module = types.ModuleType("torch_utils.persistence")

    def _reconstruct_persistent_obj(meta: Any) -> None:
        raise AssertionError("a checkpoint's own function was called")

    _reconstruct_persistent_obj.__module__ = module.__name__
    _reconstruct_persistent_obj.__qualname__ = "_reconstruct_persistent_obj"
    module._reconstruct_persistent_obj = _reconstruct_persistent_obj  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_utils", types.ModuleType("torch_utils"))
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.parametrize("config", CONFIGS[:3], ids=["ddpmpp", "ncsnpp", "adm"])
def test_imports_a_training_state(tmp_path: Path, fake_edm: None, config: NetConfig) -> None:
    original = Checkpoint(build_denoiser(config, seed=2), config, CheckpointInfo())
    path = tmp_path / "training-state-000050.pt"
    data = dict(path="data/faces-64.zip", sigma=0.2, corruption_probability_per_image=0.9)
    optimizer = torch.optim.Adam(original.denoiser.parameters()).state_dict()
    torch.save(dict(net=as_edm_object(original), optimizer_state=optimizer, dataset_kwargs=data), path)
    read = load_checkpoint(path)
    assert read.config == config and same_weights(read.denoiser, original.denoiser)
    assert read.info.num_images_seen == 50_000 and read.info.dataset == "faces-64"
    assert read.info.sigma_tn == ((0.0, 0.1), (0.2, 0.9)) and read.info.clean_fraction == 0.1


def test_other_contents_are_explained(tmp_path: Path, fake_edm: None) -> None:
    config, path = CONFIGS[0], tmp_path / "x.pt"
    original = Checkpoint(build_denoiser(config), config, CheckpointInfo())
    edm = as_edm_object(original)
    edm.meta["state"]["_modules"]["again"] = as_edm_object(original).meta["state"]["_modules"]["model"]
    deep = Persistent("Layer", dict(_parameters={}, _buffers={}, _modules={}))
    for _ in range(60):  # each module holds the one before twice
        deep = Persistent("Layer", dict(_parameters={}, _buffers={}, _modules={"a": deep, "b": deep}))
    nested = as_edm_object(original)
    nested.meta["state"]["_modules"]["deep"] = deep
    for content, complaint in [
        (dict(ema=as_edm_object(original, "VPPrecond")), "VPPrecond"),
        (dict(ema=Persistent("EDMPrecond", {})), "_init_args"),
        (dict(ema=edm), "again."),
        (dict(ema=3), "a int"),
        ([1], "a list"),
        ({}, "a NoneType"),
    ]:
        torch.save(content, path)
        found = fault(lambda: load_checkpoint(path))
        assert complaint in str(found) and found.path == str(path)
    torch.save(dict(ema=nested), path)
    assert same_weights(load_checkpoint(path).denoiser, original.denoiser)


@pytest.mark.parametrize("name", ["edm_ddpmpp", "edm_ncsnpp_cond", "edm_adm_cond"])
def test_published_directories_survive_the_round_trip(tmp_path: Path, name: str) -> None:
    out = tmp_path / AMBIENT
    export_checkpoint(load_checkpoint(GOLDEN / name), out)
    assert load_checkpoint(out).info == info_from_name(AMBIENT)
    before, after = (load_file(path / "model.safetensors") for path in (GOLDEN / name, out))
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    given_arguments = json.loads((GOLDEN / name / "config.json").read_text())
    written = json.loads((out / "config.json").read_text())
    assert given_arguments.items() <= written.items()


@pytest.mark.parametrize("config", CONFIGS[3:], ids=["dit", "mlp"])
def test_networks_that_edm_lacks_are_not_exported(tmp_path: Path, config: NetConfig) -> None:
    checkpoint = Checkpoint(build_denoiser(config), config, CheckpointInfo())
    assert fault(lambda: export_checkpoint(checkpoint, tmp_path / "x")).key == "checkpoint"
    oblong = CONFIGS[0].model_copy(update={"image_shape": (1, 8, 16)})
    assert fault(lambda: config_to_edm(oblong)).key == "checkpoint"
    assert fault(lambda: config_to_edm(preset("unet-small"))).key == "checkpoint"
    assert not list(tmp_path.iterdir())


@settings(max_examples=30, deadline=None)
@given(
    dataset=st.sampled_from(["cifar", "celeba", "imagenet_64"]),
    sigma=st.sampled_from([0.0, 0.05, 0.1, 0.2, 1.0]),
    corrupted=st.integers(0, 100).map(lambda n: n / 100),
    keep=st.sampled_from([0.1, 0.5, 1.0]),
)
def test_repository_names_tell_the_mix(dataset: str, sigma: float, corrupted: float, keep: float) -> None:
    info = info_from_name(f"someone/ambient_laws_{dataset}_sigma_{sigma}_corruption_{corrupted}_keep_{keep}")
    assert (info.dataset, info.dataset_fraction) == (dataset, keep)
    assert sum(fraction for _, fraction in info.sigma_tn) == pytest.approx(1)
    assert info.clean_fraction == pytest.approx(1 if sigma == 0 else 1 - corrupted)
    assert dict(info.sigma_tn).get(sigma, 0.0) == pytest.approx(1 if sigma == 0 else corrupted)
    assert info_from_name("someone/model") == CheckpointInfo(source="someone/model")


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)  # takes no room on the disk


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_hostile_repositories_are_named_and_nothing_outside_them_is_used(tmp_path: Path, name: str) -> None:
    secret, folder = tmp_path / "secret", tmp_path / "<script>\x1b[31m"
    secret.write_text("password")
    shutil.copytree(GOLDEN / "edm_ddpmpp", folder)
    imported = load_checkpoint(folder)
    save_checkpoint(tmp_path / "x.safetensors", imported.denoiser, imported.config, imported.info)
    assert load_checkpoint(tmp_path / "x.safetensors").info.source == r"<script>\x1b[31m"
    for spoil in (
        lambda path: path.symlink_to(secret),
        lambda path: path.symlink_to(path),
        lambda path: path.symlink_to("/dev/zero"),
        os.mkfifo,
        huge,
    ):
        (folder / name).unlink()
        spoil(folder / name)
        found = fault(lambda: load_checkpoint(folder))
        assert str(found.path).startswith(str(folder)) and "password" not in str(found)


def test_directories_that_are_no_networks_are_explained(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    assert fault(lambda: load_checkpoint(tmp_path)).path == str(tmp_path)
    shutil.copy(GOLDEN / "edm_ddpmpp" / "model.safetensors", tmp_path)
    assert fault(lambda: load_checkpoint(tmp_path)).path == str(tmp_path / "model.safetensors")
    for text in ("{", "[]"):
        file.write_text(text)
        assert fault(lambda: load_checkpoint(tmp_path)).path == str(file)
    for argument, key in (
        ({"img_channels": None}, "image_shape.0"),
        ({"colour": 1}, "colour"),
        ({"model_type": ["SongUNet"]}, "model_type"),
        ({"decoder_type": "skip"}, "decoder_type"),
    ):
        file.write_text(json.dumps(config_to_edm(CONFIGS[0]) | argument))
        found = fault(lambda: load_checkpoint(tmp_path))
        assert (found.path, found.key) == (str(file), key)
    file.write_text(json.dumps(config_to_edm(CONFIGS[0])))
    assert fault(lambda: load_checkpoint(tmp_path)).path == str(tmp_path / "model.safetensors")


def test_commands_import_export_and_refuse(tmp_path: Path) -> None:
    first, exported, second = tmp_path / "a.safetensors", tmp_path / "a-hf", tmp_path / "b.safetensors"
    output = run("model", "import", SNAPSHOT, first)
    assert "9,633 parameters" in output and "num_images_seen: 123000" in output
    run("model", "export", first, exported)
    run("model", "import", exported, second)
    assert same_weights(load_checkpoint(first).denoiser, load_checkpoint(second).denoiser)
    assert failing("model", "import", SNAPSHOT, first).path == str(first)
    assert failing("model", "export", first, exported).path == str(exported)


def test_net_list_shows_presets_with_their_published_numbers_of_parameters() -> None:
    lines = [line.split("│") for line in run("model", "list").splitlines() if "│" in line]
    rows = {line[1].strip(): line[3].strip() for line in lines}
    assert rows["ddpmpp-cifar10"] == "55.7 M" and rows["adm-imagenet64"] == "295.9 M" and "dit-small" in rows
