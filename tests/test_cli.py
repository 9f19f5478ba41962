"""Options made from configs, and errors rendered in the names of a command's options."""

import re
from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field
from typer.testing import CliRunner

from assay.cli import COMMANDS, app
from assay.cli.options import config_from
from assay.errors import AssayError


class Settings(BaseModel):
    """A config like ours: frozen, strict, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

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
    with pytest.raises(AssayError) as caught:
        config_from(Settings, given)
    assert caught.value.key == key and next(iter(given.values())) in caught.value.what


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
