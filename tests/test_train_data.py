"""The words of [data]: each key takes the images that it names, and contradictions are sentences."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from assay.checkpoint import load_checkpoint
from assay.data import ImageSource, Store, View, open_store, simulate
from assay.data.config import DataConfig
from assay.data.known import get
from assay.train import train as run_training
from assay.train.config import RunConfig, read_config
from tests.errors import rejected
from tests.stores import stored


def make_store(path: Path, sigma_tn: list[float], usable_from: float | None = None, seed: int = 0) -> Store:
    values = np.random.default_rng(seed).uniform(-1, 1, (len(sigma_tn), 1, 4, 4))
    return stored(path, values, sigma_tn, usable_from)


@pytest.fixture
def real(tmp_path: Path) -> Store:
    """20 clean images, 30 with noise of 0.1, 30 of 0.2, 20 of 0.4."""
    return make_store(tmp_path / "real", [0.0] * 20 + [0.1] * 30 + [0.2] * 30 + [0.4] * 20)


def config_of(**data: Any) -> DataConfig:
    """As a TOML file gives it."""
    return read_config({"data": data}).data


def open_data(store: Store, **data: Any) -> ImageSource:
    return config_of(store=str(store.path), **data).open()


def counts(source: ImageSource) -> dict[float, int]:
    levels, numbers = source.sigma_tn.unique(return_counts=True)
    return {round(level, 6): number for level, number in zip(levels.tolist(), numbers.tolist(), strict=True)}


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({}, {0: 20, 0.1: 30, 0.2: 30, 0.4: 20}),
        ({"noisy": 0}, {0: 20}),
        ({"clean": 0}, {0.1: 30, 0.2: 30, 0.4: 20}),
        ({"clean": 5}, {0: 5, 0.1: 30, 0.2: 30, 0.4: 20}),
        ({"clean": 0.5, "noisy": 0}, {0: 10}),
        ({"clean": 0, "noisy": 1.0, "levels": [0.2, 0.2]}, {0.2: 30}),
        ({"clean": 2, "noisy": 0.5, "levels": [0.3, 1]}, {0: 2, 0.4: 10}),
        ({"raise_to": 0.3}, {0: 20, 0.3: 60, 0.4: 20}),
        ({"clean": 0, "levels": [0.3, 0.3], "raise_to": 0.3}, {0.3: 60}),
        ({"held_out": 8}, {0: 12, 0.1: 30, 0.2: 30, 0.4: 20}),
        ({"held_out": 0.25, "clean": 0.2, "noisy": 0}, {0: 3}),
        ({"held_out": 0}, {0: 20, 0.1: 30, 0.2: 30, 0.4: 20}),
        ({"noisy": 0, "clean_fraction": 0.1, "sigma": 0.5}, {0: 2, 0.5: 18}),
        ({"noisy": 0, "clean_fraction": 0.1, "keep_noisy": False}, {0: 2}),
        ({"noisy": 0, "clean_fraction": 0.5, "sigma": [[0.25, 0.3], [0.25, 0.6]]}, {0: 10, 0.3: 5, 0.6: 5}),
    ],
)
def test_each_key_takes_the_images_it_names(
    real: Store, data: dict[str, Any], expected: dict[float, int]
) -> None:
    assert counts(open_data(real, **data)) == expected


def test_a_config_means_the_same_after_it_was_written_and_read(real: Store) -> None:
    for data in ({}, {"clean": 5, "levels": [0.1, 0.2]}, {"held_out": 4, "noisy": 0}):
        config = RunConfig(data=config_of(store=str(real.path), **data))
        again = RunConfig.model_validate_json(config.model_dump_json())
        assert again.data.open().fingerprint == config.data.open().fingerprint
        assert again == config
    assert open_data(real).fingerprint == real.fingerprint  # a store as it is needs no view


def test_every_key_is_described() -> None:
    for name, field in DataConfig.model_fields.items():
        assert field.description and field.description.endswith("."), name


@pytest.mark.parametrize("held_out", [7, 0.35])
def test_held_out_images_are_never_trained_on(real: Store, held_out: float) -> None:
    data = config_of(store=str(real.path), held_out=held_out, seed=3)
    aside = data.open_held_out()
    assert isinstance(aside, View) and len(aside) == 7 and counts(aside) == {0: 7}
    for words in ({}, {"clean": 5}, {"noisy": 0, "clean_fraction": 0.5, "sigma": 0.3}):
        trained = data.model_copy(update=words).open()
        assert isinstance(trained, View)
        assert not set(trained.image_number.tolist()) & set(aside.image_number.tolist())


def test_held_out_images_of_a_store_without_clean_ones_are_noisy(tmp_path: Path) -> None:
    data = config_of(store=str(make_store(tmp_path / "noisy", [0.2] * 30).path), held_out=0.1)
    aside = data.open_held_out()
    assert aside is not None and counts(aside) == {0.2: 3} and len(data.open()) == 27


def test_another_store_can_be_held_out(tmp_path: Path, real: Store) -> None:
    other = make_store(tmp_path / "other", [0.0] * 4, seed=1)
    data = config_of(store=str(real.path), held_out=str(other.path))
    aside = data.open_held_out()
    assert aside is not None and aside.fingerprint == other.fingerprint
    assert data.open().fingerprint == real.fingerprint
    with rejected("data.held_out"):
        config_of(store=str(real.path), held_out=str(real.path)).open()


def test_stores_are_taken_together(tmp_path: Path, real: Store) -> None:
    other = make_store(tmp_path / "other", [0.0] * 4 + [0.3] * 2, seed=1)
    both = config_of(store=[str(real.path), str(other.path)], noisy=0).open()
    assert counts(both) == {0: 24}
    assert torch.equal(both.read(torch.tensor([23])), other.read(torch.tensor([3])))


def test_annotated_images_are_trained_on_with_noise(tmp_path: Path) -> None:
    store = make_store(tmp_path / "annotated", [0.0] * 3 + [0.5] * 2, usable_from=0.3)
    source = open_data(store)
    assert counts(source) == {0.3: 3, 0.5: 2}
    assert not torch.equal(source.read(torch.arange(3)), store.read(torch.arange(3)))
    # The same for whoever gives the store itself to the library.
    train = {"num_steps": 1, "batch_size": 2}
    config = read_config({"data": {"store": str(store.path)}, "net": {"preset": "mlp"}, "train": train})
    trained = run_training(config, tmp_path / "run", store)
    levels = np.array(load_checkpoint(trained.checkpoint).info.sigma_tn)
    np.testing.assert_allclose(levels, [(0.3, 0.6), (0.5, 0.4)], rtol=1e-6)


def test_known_data_sets_are_packed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = config_of(store="digits", size=4, num_images=50, held_out=30, clean_fraction=0.1, sigma=0.3)
    with rejected("data.store"):
        data.open()
    assert not Path("stores").exists()  # reading a config writes nothing
    plain = data.prepared()
    trained, aside = plain.open(), plain.open_held_out()
    path, aside_path = Path("stores/digits-4x4-50"), Path("stores/digits-4x4-50-held-out-30")
    written = path.stat().st_mtime_ns
    assert data.prepared() == plain and path.stat().st_mtime_ns == written
    # The images trained on are those of a study without held-out images; those held out follow.
    whole = get("digits", tmp_path / "whole", size=4, num_images=80).store
    assert trained.fingerprint == simulate(open_store(path), 0.1, 0.3).fingerprint
    assert torch.equal(open_store(path).read(torch.arange(50)), whole.read(torch.arange(50)))
    assert aside is not None and len(aside) == 30
    assert torch.equal(aside.read(torch.arange(30)), whole.read(torch.arange(50, 80)))
    assert plain.store == path and plain.held_out == aside_path
    assert plain.open().fingerprint == trained.fingerprint
    # A store here wins over a known name.
    whole.path.rename("digits")
    assert len(config_of(store="digits").open()) == 80


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"clean": 1}, "data.clean"),
        ({"held_out": 1}, "data.held_out"),
        ({"clean": 21}, "clean"),
        ({"noisy": 1.5}, "noisy"),
        ({"noisy": 25, "levels": [0.4, 0.4]}, "noisy"),
        ({"store": ("stores/a", "stores/a")}, "data.store"),
        ({"levels": [0.4, 0.1]}, "data.levels"),
        ({"clean_fraction": 0.5, "sigma": 0.3}, "clean_fraction"),
        ({"sigma": 0.3}, "data.sigma"),
        ({"keep_noisy": False}, "data.keep_noisy"),
        ({"clean_fraction": 0.5}, "data.clean_fraction"),
        ({"held_out": 21}, "held_out"),
        ({"held_out": "nowhere"}, None),
        ({"store": "nowhere"}, "data.store"),
        ({"size": 4}, "data.size"),
        ({"store": ["digits", "cifar10"], "num_images": 4}, "data.num_images"),
        ({"store": "digits", "num_images": 1797, "held_out": 100}, "num_images"),
    ],
)
def test_contradictions_name_their_key(
    real: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: dict[str, Any], key: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    with rejected(key, None if key else "nowhere"):
        config_of(**({"store": str(real.path)} | data)).prepared().open()


@pytest.mark.parametrize("data", [{"clean": -1}, {"held_out": True}, {"cleen": 3}])
def test_settings_of_other_types_and_names_are_rejected(data: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"data.{next(iter(data))}"):
        config_of(store="digits", **data)
