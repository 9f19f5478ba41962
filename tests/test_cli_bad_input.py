"""What a user may give a command by mistake ends in one sentence that names it, not in a traceback."""

import os
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from assay.cli import app


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store, an empty folder, and noise that calls itself CSV, TOML and JSON."""
    folder = tmp_path_factory.mktemp("place")
    assert CliRunner().invoke(app, ["data", "get", "digits", "-o", str(folder / "digits")]).exit_code == 0
    (folder / "folder").mkdir()
    noise = b"\x89\xff\x00\xfe" + np.random.default_rng(0).bytes(500)
    for name in ("bin.csv", "bin.toml", "bin.json"):
        (folder / name).write_bytes(noise)
    return folder


TRAIN = ("train", "--preset", "digits", "--set", "data.store=digits", "-o", "run")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*TRAIN, "--device", "cuda:999"), "--device cuda:999 cannot be used here"),
        ((*TRAIN, "--device", "abacus"), "--device abacus cannot be used here"),
        ((*TRAIN, "--devices", "64000"), "--devices 64000: this machine has"),
        ((*TRAIN, "--devices", "0"), "--devices 0: this machine has"),
        ((*TRAIN, "--set", "sample.truncate_at=auto"), "truncate_at = auto: no noise level"),
        (("train", "folder"), "folder is a folder, but a file is needed"),
        (("train", "bin.toml"), "bin.toml cannot be read"),
        (("train", "absent.toml"), "absent.toml does not exist"),
        (("study", "run", "folder"), "folder/study.toml does not exist"),
        (("study", "cost", "bin.toml"), "bin.toml cannot be read"),
        (("study", "report", "bin.csv"), "bin.csv cannot be read"),
        (("price", "folder"), "folder is a folder, but a file is needed"),
        (("price", "bin.csv"), "bin.csv cannot be read"),
        (("plan", "bin.csv", "--budget", "1"), "bin.csv cannot be read"),
        (("price", "--paper", "--json", "--csv"), "give one of them"),
        (("plan", "--paper", "--budget", "9", "--json", "--csv"), "give one of them"),
        (("compare", "folder"), "folder is a folder, but a file is needed"),
        (("compare", "bin.json"), "bin.json cannot be read"),
        (("gather", "bin.json", "-o", "all.csv"), "bin.json cannot be read"),
        (("mixture", "fit", "bin.csv"), "bin.csv cannot be read"),
        (("data", "pack", "digits/images.npy", "--sigma-file", "bin.csv", "-o", "x"), "bin.csv"),
        (("data", "pack", "digits/images.npy", "--sigma-file", "folder", "-o", "x"), "folder is a folder"),
        (("data", "pack", "digits/images.npy", "--range", "-1;1", "-o", "x"), "two numbers with a comma"),
        (("data", "show", "digits", "--png", "q.txt"), "--png q.txt: give the file a name that ends in .png"),
        (("data", "get", "digits", "-o", "/proc/foo"), "--output /proc/foo: nothing can be written to /proc"),
        (("sample", "run", "-o", "/proc/foo/bar.png"), "--output /proc/foo/bar.png: nothing can be written"),
        (("price", "--paper", "--plot", "bin.csv/a.png"), "bin.csv (it is not a folder)"),
        (("mixture", "simulate", "/proc/x.csv", "--atoms", "0;1"), "/proc/x.csv: nothing can be written"),
        (("mixture", "rates", "--out", "x.gif"), "--out x.gif: give the file a name that ends in .png"),
        (("sample", "folder", "-o", "x"), "folder is a folder without snapshots/final.safetensors"),
        (("denoise", "bin.json", "digits", "-o", "x"), "bin.json"),
        (
            (
                "evaluate",
                "digits",
                "-r",
                "digits",
                "--extractor",
                "pixels",
                "--cache",
                "c",
                "--num-images",
                "0",
            ),
            "0 image(s) in each of 1 range(s) are too few",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_mistakes_are_named(
    arguments: tuple[str, ...], words: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    before = sorted(os.listdir(place))
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "300"})
    assert done.exit_code == 1 and words in done.output, done.output
    assert "Traceback" not in done.output and done.output.count("error:") == 1
    made = set(os.listdir(place)) - set(before)
    assert made <= {"c"}, "nothing is left behind but the cache of features"


@pytest.mark.parametrize(
    "arguments",
    [("plan", "--paper", "--budget", "10", "--num-images", "0"), ("net", "list", "--batch-size", "0")],
)
def test_zero_is_not_the_same_as_nothing(arguments: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "300"})
    assert done.exit_code == 2 and "Invalid value for '--" in done.output, done.output


def test_ranges_are_given_as_the_help_says(place: Path, tmp_path: Path) -> None:
    text = CliRunner().invoke(app, ["data", "pack", "--help"], env={"COLUMNS": "300"}).output
    assert "LOW,HIGH" in text and "-1,1" in text
    np.save(tmp_path / "a.npy", np.zeros((3, 8, 8), dtype=np.float32))
    arguments = ["data", "pack", str(tmp_path / "a.npy"), "--range", "-1,1", "-o", str(tmp_path / "store")]
    assert CliRunner().invoke(app, arguments).exit_code == 0
