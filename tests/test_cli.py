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
from assay.errors import AssayError
from assay.nets import DiTConfig
from assay.pricing import Vendor
from assay.settings import Config, Strict, checked
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
