"""`assay sample` and `assay denoise` on real, small checkpoints."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner, Result

from assay.checkpoint import CheckpointInfo, load_checkpoint, save_checkpoint
from assay.cli import app
from assay.cli.generate import parse_seeds
from assay.cli.options import _SAMPLING
from assay.data.picture import to_uint8
from assay.data.readers import read_folder
from assay.nets import MLPConfig, build_denoiser
from assay.sample import SampleConfig, edm_sigmas, generate, refined_sigmas, spread_labels


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, num_classes, info in [
        ("mixed", 0, CheckpointInfo(sigma_tn=((0.0, 0.1), (0.2, 0.9)), clean_fraction=0.1)),
        ("noisy", 0, CheckpointInfo(sigma_tn=((0.3, 1.0),), clean_fraction=0.0)),
        ("classes", 4, CheckpointInfo()),
    ]:
        config = MLPConfig(image_shape=(1, 8, 8), num_classes=num_classes, width=16, num_blocks=1)
        denoiser = build_denoiser(config)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():  # a new network predicts zeros: give the last layers some weight
            for parameter in denoiser.parameters():
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
        save_checkpoint(folder / f"{name}.safetensors", denoiser, config, info)
    return folder


def sample(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["sample", *map(str, arguments)], env={"COLUMNS": "300"})


def test_folder_npz_and_grid_hold_the_images_of_their_seeds(checkpoints: Path, tmp_path: Path) -> None:
    path = checkpoints / "classes.safetensors"
    label = spread_labels([1.0] * 4, [3, 8, 10, 14])
    assert len(label.unique()) == 3
    expected = next(
        generate(load_checkpoint(path).denoiser.eval(), [3, 8, 10, 14], (1, 8, 8), edm_sigmas(5), label=label)
    )
    for target in ("folder", "images.npz", "grid.png"):
        done = sample(path, "-o", tmp_path / target, "--seeds", "3,8,10,14", "--steps", "5")
        assert done.exit_code == 0, done.output
    pixels = to_uint8(expected.images).permute(0, 2, 3, 1).numpy()
    for seed, image in zip([3, 8, 10, 14], pixels, strict=True):
        np.testing.assert_array_equal(
            np.asarray(Image.open(tmp_path / f"folder/{seed:06d}.png")), image[..., 0]
        )
    archive = np.load(tmp_path / "images.npz")
    np.testing.assert_array_equal(archive["images"], pixels)
    assert archive["seeds"].tolist() == [3, 8, 10, 14] and archive["label"].tolist() == label.tolist()
    assert Image.open(tmp_path / "grid.png").size == (130, 130)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "grid.png", "images.npz"]


def test_every_setting_of_a_sampler_is_an_option() -> None:
    assert _SAMPLING.keys() == SampleConfig.model_fields.keys()
    for name, (_, _, default, *_) in _SAMPLING.items():
        assert default == getattr(SampleConfig(), name)
    for command in ("sample", "evaluate"):
        text = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "300"}).output
        assert all(option in text for option, *_ in _SAMPLING.values())


def test_settings_reach_the_grid() -> None:
    assert torch.equal(SampleConfig(num_steps=9, truncate_at=0.2).sigmas(), edm_sigmas(9, 0.2))
    assert torch.equal(
        SampleConfig(num_steps=9, refine_at=0.2, num_extra=4).sigmas(), refined_sigmas(9, 0.2, 4)
    )
    assert torch.equal(SampleConfig(num_steps=9, rho=5).sigmas(), edm_sigmas(9, rho=5))
    with pytest.raises(ValueError, match="choose one"):
        SampleConfig(truncate_at=0.2, refine_at=0.2).sigmas()


def test_truncation_is_suggested_to_noisy_only_models_and_auto_uses_their_level(
    checkpoints: Path, tmp_path: Path
) -> None:
    noisy = checkpoints / "noisy.safetensors"
    done = sample(noisy, "-o", tmp_path / "full", "--seeds", "0", "--steps", "4")
    assert "--truncate auto is" in done.output and "0.3" in done.output
    for name, value in [("auto", "auto"), ("number", "0.3")]:
        done = sample(noisy, "-o", tmp_path / name, "--seeds", "0", "--steps", "4", "--truncate", value)
        assert "is likely" not in done.output
    images = {p.name: (p / "000000.png").read_bytes() for p in tmp_path.iterdir()}
    assert images["auto"] == images["number"] != images["full"]
    assert (
        "--truncate"
        not in sample(checkpoints / "mixed.safetensors", "-o", tmp_path / "m", "--seeds", "0").output
    )


def test_an_interrupted_job_makes_only_what_is_missing(checkpoints: Path, tmp_path: Path) -> None:
    path, whole, parts = checkpoints / "mixed.safetensors", tmp_path / "whole", tmp_path / "parts"
    assert sample(path, "-o", whole, "--seeds", "0-47", "--steps", "40").exit_code == 0
    arguments = ["sample", str(path), "-o", str(parts)]
    arguments += ["--seeds", "0-47", "--steps", "40", "--batch-size", "4"]
    process = subprocess.Popen(
        [sys.executable, "-c", "from assay.cli import main; main()", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )
    while len(list(parts.glob("0*.png"))) < 8:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = {p.name: p.stat().st_mtime_ns for p in parts.glob("??????.png")}
    assert 8 <= len(before) < 48
    assert sample(*arguments[1:]).exit_code == 0
    for image in whole.iterdir():
        assert image.read_bytes() == (parts / image.name).read_bytes()
    assert all((parts / name).stat().st_mtime_ns == when for name, when in before.items())


def test_images_of_another_job_are_neither_returned_nor_replaced(checkpoints: Path, tmp_path: Path) -> None:
    folder, path = tmp_path / "out", checkpoints / "mixed.safetensors"
    assert sample(path, "-o", folder, "--seeds", "0-3", "--steps", "4").exit_code == 0
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert read_folder(folder).names == [f"00000{seed}.png" for seed in range(4)]
    for arguments, message in [
        ((path, "--steps", "5"), r"other settings \(num_steps: 4 there, 5 here\): choose another folder"),
        ((checkpoints / "noisy.safetensors", "--steps", "4"), r"\(checkpoint: \w{16} there, \w{16} here\)"),
    ]:
        done = sample(*arguments, "-o", folder, "--seeds", "0-9")
        assert done.exit_code == 1 and re.search(message, done.output), done.output
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    (folder / ".job.json").unlink()
    done = sample(path, "-o", folder, "--seeds", "2-9", "--steps", "4")
    assert done.exit_code == 1 and "000000.png exists already" in done.output


def test_other_files_in_a_folder_are_no_hindrance(checkpoints: Path, tmp_path: Path) -> None:
    (tmp_path / "photo.png").write_text("not of a seed")
    arguments = (checkpoints / "mixed.safetensors", "-o", tmp_path, "--seeds", "0", "--steps", "4")
    assert sample(*arguments, "--truncate", "99").exit_code == 1  # it made no image
    done = sample(*arguments)
    assert done.exit_code == 0 and (tmp_path / "000000.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("classes", "--class", "4"), "--class 4: .* has 4 classes"),
        (("mixed", "--class", "0"), "--class 0: .* without classes"),
        (("mixed", "--seeds", "5-2"), "--seeds 5-2: expected numbers and ranges"),
        (("mixed", "--seeds", "0,0"), "a seed occurs twice"),
        (("mixed", "--truncate", "soon"), "--truncate soon: expected a noise level .* or auto"),
        (("mixed", "--truncate", "-1"), "--truncate -1 is not between 0 and"),
        (("mixed", "--truncate", "1000"), "--truncate 1000 is not between 0 and --sigma-max 80"),
        (("mixed", "--refine", "0.2", "--truncate", "0.2"), "--truncate stops .* --refine .*choose one"),
        (("mixed", "--devices", "two"), "--devices two: expected a number"),
        (("mixed", "--devices", "64000"), "--devices 64000: this machine has .* core"),
        (("mixed", "--device", "cuda:999"), "--device cuda:999 cannot be used here"),
        (("mixed", "--solver", "magic"), "--solver magic: .*'euler'"),
        (("classes", "--truncate", "auto"), "--truncate auto: no noise level of the training data is known"),
        (("classes", "--extra-steps", "4"), "--refine auto: no noise level of the training data is known"),
        (("nothing",), "nothing.safetensors"),
    ],
)
def test_bad_input_is_named(
    arguments: tuple[str, ...], message: str, checkpoints: Path, tmp_path: Path
) -> None:
    done = sample(checkpoints / f"{arguments[0]}.safetensors", "-o", tmp_path / "out", *arguments[1:])
    assert done.exit_code == 1, done.output
    assert re.search(message, done.output), done.output


@pytest.mark.parametrize(("option", "least"), [("--steps", 2), ("--churn", 0), ("--extra-steps", 0)])
def test_numbers_out_of_range_are_rejected_by_their_option(
    option: str, least: int, checkpoints: Path, tmp_path: Path
) -> None:
    done = sample(checkpoints / "mixed.safetensors", "-o", tmp_path / "out", option, str(least - 1))
    assert done.exit_code == 1 and re.search(rf"{option} {least - 1}\S*: input should be", done.output), (
        done.output
    )


def test_seeds_are_parsed() -> None:
    assert parse_seeds("0-3, 7,10-11") == [0, 1, 2, 3, 7, 10, 11]
