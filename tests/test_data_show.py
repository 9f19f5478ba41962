"""Pictures and `assay data`, used as a newcomer would."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from assay.cli import app
from assay.data import open_store
from assay.data.picture import captioned_rows, image_grid
from assay.data.show import noise_histogram
from assay.errors import AssayError
from assay.noise import snr_db


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["data", *map(str, arguments)], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result.output


def test_image_grid_places_and_clips() -> None:
    images = torch.tensor([-1.0, 0.0, 1.0, 5.0, -3.0]).view(5, 1, 1, 1).expand(-1, 1, 32, 64)
    grid = np.asarray(image_grid(images, 2))  # tiles of 64 x 128 with a gap of 2
    assert grid.shape == (3 * 66 - 2, 2 * 130 - 2, 3)
    centres = [grid[66 * (i // 2) + 32, 130 * (i % 2) + 64].tolist() for i in range(6)]
    assert [centre[0] for centre in centres] == [0, 128, 255, 255, 0, 255]
    assert np.asarray(image_grid(torch.zeros(2, 3, 100, 100), 5)).shape == (100, 202, 3)


def test_image_grid_refuses_what_is_no_image() -> None:
    for shape in ((2, 2, 4, 4), (4, 4), (0, 1, 4, 4)):
        with pytest.raises(AssayError) as caught:
            image_grid(torch.zeros(shape), 2)
        assert caught.value.key == "images"


def test_captioned_rows_keep_the_images() -> None:
    rows = [
        ("one\ntwo", torch.full((3, 3, 64, 64), 1.0)),
        ("a longer caption", torch.full((2, 3, 64, 64), -1.0)),
    ]
    picture = np.asarray(captioned_rows(rows))
    assert picture.shape[0] == 130 and picture.shape[1] > 3 * 66 - 2
    left = picture.shape[1] - (3 * 66 - 2)
    assert (
        picture[66:, left : left + 130].reshape(-1, 3).max(1) == 0
    ).mean() > 0.97  # two black tiles and a gap
    assert (picture[:64, :left] < 128).any() and (picture[66:, :left] < 128).any()  # ink of both captions


def test_noise_histogram() -> None:
    few = noise_histogram(torch.tensor([0.0, 0.2, 0.2, 0.0, 0.1]))
    assert [(round(b.low, 6), b.num_images) for b in few] == [(0, 2), (0.1, 1), (0.2, 2)]
    assert few[0].snr_db == float("inf") and few[2].snr_db == pytest.approx(snr_db(0.2), abs=1e-5)
    many = torch.cat([torch.zeros(7), torch.logspace(-3, 1, 500)])
    bins = noise_histogram(many)
    assert len(bins) == 12 and bins[0].num_images == 7 and sum(b.num_images for b in bins) == 507
    assert all(a.high < b.low for a, b in zip(bins, bins[1:], strict=False))


def test_get_and_show(tmp_path: Path) -> None:
    assert "1,797 images of 1 x 8 x 8" in run("get", "digits", "-o", tmp_path / "digits")
    text = run(
        "show", tmp_path / "digits", "--png", tmp_path / "a.png", "--noise", "0.2", "--noise", 1, "--verify"
    )
    assert "digits: 1,797 grey images of 8 x 8, uint8" in text and "checksums are correct" in text
    assert "10 classes: 0 178, 1 182" in text and "clean" in text
    assert Image.open(tmp_path / "a.png").height == 3 * 66 - 2
    assert "exists already" in run("get", "digits", "-o", tmp_path / "digits", code=1)
    assert "give its file with --png" in run("show", tmp_path / "digits", "--noise", "0.2", code=1)
    assert "is not a store" in run("show", tmp_path, code=1)


def test_pack_files_of_mixed_quality(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    lines = ["filename,sigma"]
    (tmp_path / "in/cells").mkdir(parents=True)
    for i, sigma in enumerate([0, 0, 0.1, 0.4]):
        Image.fromarray(generator.normal(0.5, 0.2 + sigma, (8, 8)).astype(np.float32)).save(
            tmp_path / f"in/cells/{i}.tiff"
        )
        lines.append(f"cells/{i}.tiff,{sigma}")
    (tmp_path / "in/cells/broken.tiff").write_text("oops")
    (tmp_path / "sigma.csv").write_text("\n".join([*lines, "cells/broken.tiff,0"]))
    command = [
        "pack",
        tmp_path / "in",
        "-o",
        tmp_path / "store",
        "--all",
        f"levels={tmp_path / 'sigma.csv'},range=0,1,scaled=true",
        "--classes",
    ]
    assert "broken.tiff: is not an image" in run(*command, code=1)
    text = run(*command, "--skip-bad")
    assert (
        "skipped: " in text
        and "0.05 to 0.2 in the files' units), 1 skipped" in text
        and "4 images of 1 x 8 x 8, 2 of them noisy (sigma 0.1 to 0.4" in text
    )
    store = open_store(tmp_path / "store")
    assert store.sigma_tn.tolist() == pytest.approx([0, 0, 0.1, 0.4]) and store.class_names == ("cells",)
    assert json.loads((store.path / "meta.json").read_text())["num_clean"] == 2
    text = run("show", store.path, "--png", tmp_path / "a.png")
    assert "0.4" in text and "8.6 dB" in text and "20.0 dB" in text
    assert "black and white are 0 and 1 in the files: a sigma of 1 is 0.5 there" in text
    assert store.physical_range == (0, 1)
    assert "--png" in run("show", store.path, "--png", tmp_path / "q.txt", code=1)


def test_pack_options_reach_the_store(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.random.default_rng(0).integers(0, 256, (3, 12, 10, 3), dtype=np.uint8))
    options = ["--size", "6x5", "--fit", "crop", "--dtype", "float16"]
    text = run("pack", f"{tmp_path}/a.npy:sigma=30", "-o", tmp_path / "store", *options)
    assert (
        "3 images of 3 x 6 x 5, 3 of them noisy" in text
        and "warning: 3 noisy images come from 8-bit files" in text
    )
    assert open_store(tmp_path / "store").meta.dtype == "float16"
    run(
        "pack",
        tmp_path / "a.npy",
        "-o",
        tmp_path / "grey",
        "--size",
        "4",
        "--fit",
        "resize",
        "--colour",
        "grey",
    )
    assert open_store(tmp_path / "grey").image_shape == (1, 4, 4)
    assert "--size: expected a number" in run("pack", "x", "-o", tmp_path / "new", "--size", "4by4", code=1)
    assert "give one" in run("pack", f"{tmp_path}/a.npy:sigma=1,levels=x", "-o", tmp_path / "new", code=1)
    assert not (tmp_path / "new").exists()


def test_sources_of_different_units_are_told(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name, white in (("a", 1.0), ("b", 255.0)):
        np.save(tmp_path / f"{name}.npy", (white * rng.random((4, 8, 8))).astype(np.float32))
    sources = (f"{tmp_path}/a.npy:range=0,1", f"{tmp_path}/b.npy:range=0,255")
    run("pack", *sources, "-o", tmp_path / "both")
    run("pack", sources[0], "-o", tmp_path / "one")
    assert "different values of black and white" in run("show", tmp_path / "both")
    assert "a sigma of 1 is 0.5" in run("show", tmp_path / "one")
