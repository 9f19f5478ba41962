"""Options made from configs, and errors rendered in the names of a command's options."""

import inspect
import pickle
import re
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from pydantic import Field
from typer.testing import CliRunner

from assay.cli import COMMANDS, app, load_command
from assay.cli.options import config_from
from assay.cost import choose_config
from assay.data.arrays import from_arrays
from assay.errors import AssayError, AssayWarning
from assay.nets import DiTConfig
from assay.pricing import Vendor
from assay.settings import Config, Strict, checked, override
from assay.train.config import read_config
from tests.commands import run
from tests.errors import rejected


class Settings(Strict):
    """Some settings."""

    num_steps: int = Field(18, ge=2, description="Steps.")
    level: float | Literal["auto"] | None = Field(None, description="A level.")
    solver: Literal["heun", "euler"] = Field("heun", description="How.")


def test_words_become_the_values_of_a_config() -> None:
    found = config_from(Settings, {"num_steps": "7", "level": "0.25", "solver": "euler"})
    assert found == Settings(num_steps=7, level=0.25, solver="euler")
    assert config_from(Settings, {"level": "auto"}).level == "auto" and config_from(Settings, {}) == Settings()


@pytest.mark.parametrize(
    ("given", "key"),
    [({"num_steps": "many"}, "num_steps"), ({"num_steps": "1"}, "num_steps"), ({"solver": "magic"}, "solver")],
)
def test_words_that_are_no_value_name_their_setting(given: dict[str, str], key: str) -> None:
    with rejected(key):
        config_from(Settings, given)


def test_every_config_explains_wrong_values() -> None:
    for name in COMMANDS:
        load_command(name)
    found, waiting = set[type[Config]](), [Config]
    while waiting:
        waiting += (subclasses := waiting.pop().__subclasses__())
        found |= set(subclasses)
    assert {"Vendor", "SampleConfig", "PackConfig", "MeasureConfig"} <= {config.__name__ for config in found}
    for config in [config for config in found if not inspect.isabstract(config)]:
        with rejected("no_such_setting"):
            config(no_such_setting=1)
    with pytest.raises(AssayError) as caught:
        Vendor(price=-1)
    again = pickle.loads(pickle.dumps(caught.value))  # as it crosses processes
    assert (again.key, again.what, again.cure) == ("price", caught.value.what, "correct it")


def test_an_error_of_a_section_names_its_setting_and_the_first_fault_of_each() -> None:
    class Whole(Strict):
        net: DiTConfig
        sizes: tuple[int, ...] = ()

    with pytest.raises(AssayError) as caught:
        checked(Whole, {"net": {"image_shape": [1, 9, 9]}, "sizes": ["a"]}, "a.toml")
    assert (caught.value.path, caught.value.key) == ("a.toml", "net.patch") and "sizes.0" in caught.value.what


def test_every_command_loads_and_helps() -> None:
    for name in COMMANDS:
        done = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "300"})
        assert done.exit_code == 0 and "Usage" in done.output, name


def test_values_of_options_are_named_plainly() -> None:
    for name, word in (("train", "--raise-to FLOAT "), ("sample", "--truncate-at FLOAT|auto ")):
        text = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "300"}).output
        assert word in re.sub(" +", " ", text) and "ANNOTATION" not in text


def test_keys_are_rendered_as_options() -> None:
    done = CliRunner().invoke(app, ["sample", "nothing", "-o", "x.png", "--num-steps", "1"])
    assert done.exit_code == 1 and done.stderr.startswith("error: --num-steps: ")


def test_settings_in_cures_are_rendered_as_options(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((3, 16, 16), np.uint8))
    done = CliRunner().invoke(app, ["data", "pack", str(tmp_path / "a.npy"), "-o", "x", "--size", "64"])
    assert done.exit_code == 1 and "--fit crop" in done.stderr and done.stderr.endswith("--skip-bad\n")


def test_a_store_that_exists_can_be_overwritten(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((3, 16, 16), np.uint8))
    (tmp_path / "store").mkdir()
    done = CliRunner().invoke(app, ["data", "pack", str(tmp_path / "a.npy"), "-o", str(tmp_path / "store")])
    assert done.exit_code == 1 and done.stderr.endswith("or give --overwrite\n")
    done = CliRunner().invoke(app, ["data", "get", "digits", "-o", str(tmp_path / "store")])
    assert done.exit_code == 1 and "exists already" in done.stderr and "--overwrite" not in done.stderr


def test_exit_codes_are_told() -> None:
    text = " ".join(CliRunner().invoke(app, ["--help"], env={"COLUMNS": "300"}).output.split())
    assert "Exit codes: 0 done; 1 an error" in text and "2 wrong arguments; 130 stopped" in text
    assert CliRunner().invoke(app, ["train", "--no-such-option"]).exit_code == 2
    assert CliRunner().invoke(app, ["train", "no-such-store"]).exit_code == 1


def test_the_example_of_a_setting_suits_every_preset() -> None:
    text = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "300"}).output
    assert "a preset comes before these defaults" in text
    (setting,) = re.findall(r"Any: (\S+)\. Repeat", text)
    config = read_config(override({"data": {"store": "x"}}, [setting]))
    for side in (8, 16, 32):
        source = from_arrays(np.random.default_rng(0).uniform(-1, 1, (2, side, side)))
        assert config.net_config(source).num_blocks == 2  # type: ignore[attr-defined]


def test_a_dry_run_names_the_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "\npreset      digits\n" in run("train", "digits", "--dry-run")
    assert "\npreset      tiny\n" in run("train", "digits", "--dry-run", "--preset", "tiny")
    (tmp_path / "run.toml").write_text('data.store = "digits"\nnet.preset = "mlp"\ntrain.num_steps = 2\n')
    assert "\npreset      none, as run.toml says all\n" in run("train", "run.toml", "--dry-run")


@pytest.mark.parametrize(
    ("preset", "smaller"), [("digits", ""), ("tiny", "digits"), ("small", "tiny"), ("celeba", "small")]
)
def test_too_little_time_suggests_a_smaller_preset(
    preset: str, smaller: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("assay.cost.training_seconds", lambda *arguments: 1e6)
    source = from_arrays(np.random.default_rng(0).uniform(-1, 1, (300, 8, 8)))
    with pytest.warns(AssayWarning) as told:
        choose_config({"data": {"store": "x"}}, source, preset, minutes=1)
    assert str(told[0].message).endswith(
        f"not 1 min; the preset {smaller} is faster" if smaller else "not 1 min"
    )
