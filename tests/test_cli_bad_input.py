"""What a user may give a command by mistake ends in one sentence that names it, not in a traceback."""

import os
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from assay.cli import app
from tests.commands import failing


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store, an empty folder, and noise that calls itself CSV, TOML and JSON."""
    folder = tmp_path_factory.mktemp("place")
    assert CliRunner().invoke(app, ["data", "get", "digits", "-o", str(folder / "digits")]).exit_code == 0
    (folder / "folder").mkdir()
    noise = b"\x89\xff\x00\xfe" + np.random.default_rng(0).bytes(500)
    for name in ("bin.csv", "bin.toml", "bin.json", "bin.npy", "bin.png"):
        (folder / name).write_bytes(noise)
    return folder


TRAIN = ("train", "--preset", "digits", "--set", "data.store=digits", "-o", "run")


@pytest.mark.parametrize(
    ("arguments", "path", "key"),
    [
        ((*TRAIN, "--device", "cuda:999"), None, "device"),
        ((*TRAIN, "--device", "abacus"), None, "device"),
        ((*TRAIN, "--devices", "64000"), None, "devices"),
        ((*TRAIN, "--devices", "0"), None, "devices"),
        (("train", "bin.toml"), "bin.toml", None),
        (("study", "cost", "bin.toml"), "bin.toml", None),
        (("study", "report", "bin.csv"), "bin.csv", None),
        (("price", "bin.csv"), "bin.csv", None),
        (("plan", "bin.csv", "--budget", "1", "--vendors", "1"), "bin.csv", None),
        (("evaluate", "compare", "bin.json"), "bin.json", None),
        (("mixture", "fit", "bin.csv"), "bin.csv", None),
        (("data", "show", "digits", "--png", "q.txt"), "q.txt", "--png"),
        (("data", "get", "digits", "-o", "/proc/foo"), "/proc/foo", "--output"),
        (("sample", "run", "-o", "/proc/foo/bar.png"), "/proc/foo/bar.png", "--output"),
        (("price", "--paper", "--plot", "bin.csv/a.png"), "bin.csv/a.png", "--plot"),
        (("sample", "run", "-o", "bin.npy"), "bin.npy", None),
        (("denoise", "run", "digits", "-o", "bin.png"), "bin.png", None),
        (("data", "noise", "digits", "--levels", "bin.csv"), "bin.csv", None),
        (("evaluate", "run", "--held-out", "digits", "-o", "bin.json"), "bin.json", None),
        (("sample", "folder", "-o", "x"), "folder", None),
        (("denoise", "bin.json", "digits", "-o", "x"), "bin.json", None),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_mistakes_are_named(
    arguments: tuple[str, ...], path: str | None, key: str | None, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    before = sorted(os.listdir(place))
    error = failing(*arguments)
    assert (error.path, error.key) == (path, key) and error.what, error
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "300"})
    assert done.exit_code == 1 and "Traceback" not in done.output and done.output.count("error:") == 1
    assert sorted(os.listdir(place)) == before, "nothing is left behind"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("train", "absent.toml"), "absent.toml: does not exist"),
        (("study", "run", "folder"), "folder/study.toml: does not exist"),
        (("price", "folder"), "folder: has no results.csv"),
        (("evaluate", "compare", "folder"), "folder: is a folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_the_system_says_of_a_file_is_rephrased(
    arguments: tuple[str, ...], words: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "300"})
    assert done.exit_code == 1 and words in done.output, done.output


@pytest.mark.parametrize(
    "arguments", [("plan", "--budget", "10", "--num-images", "0"), ("model", "list", "--batch-size", "0")]
)
def test_zero_is_not_the_same_as_nothing(arguments: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "300"})
    assert done.exit_code == 2 and "Invalid value for '--" in done.output, done.output
