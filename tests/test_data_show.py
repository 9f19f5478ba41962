"""Pictures and `assay data`, used as a newcomer would."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from assay.data import open_store
from assay.data.picture import captioned_rows, image_grid, noise_histogram
from tests.commands import failing, run
from tests.errors import rejected


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_image_grid_places_and_clips() -> None:
    images = torch.tensor([-1.0, 0.0, 1.0, 5.0, -3.0]).view(5, 1, 1, 1).expand(-1, 1, 32, 64)
    grid = np.asarray(image_grid(images, 2))  # tiles of 64 x 128 with a gap of 2
    assert grid.shape == (3 * 66 - 2, 2 * 130 - 2, 3)
    centres = [grid[66 * (i // 2) + 32, 130 * (i % 2) + 64].tolist() for i in range(6)]
    assert [centre[0] for centre in centres] == [0, 128, 255, 255, 0, 255]
    assert np.asarray(image_grid(torch.zeros(2, 3, 100, 100), 5)).shape == (100, 202, 3)


def test_image_grid_refuses_what_is_no_image() -> None:
    for shape in ((2, 2, 4, 4), (4, 4), (0, 1, 4, 4)):
        with rejected("images"):
            image_grid(torch.zeros(shape), 2)


def test_captioned_rows_keep_the_images() -> None:
    white, black = torch.ones(3, 3, 64, 64), -torch.ones(2, 3, 64, 64)
    picture = np.asarray(captioned_rows([("one\ntwo", white), ("a longer caption", black)]))
    assert picture.shape[0] == 130 and picture.shape[1] > 3 * 66 - 2
    left = picture.shape[1] - (3 * 66 - 2)
    assert (picture[66:, left : left + 130].max(2) == 0).mean() > 0.97  # two black tiles and a gap
    assert (picture[:64, :left] < 128).any() and (picture[66:, :left] < 128).any()  # ink of both captions


def test_noise_histogram() -> None:
    few = noise_histogram(torch.tensor([0.0, 0.2, 0.2, 0.0, 0.1]))
    assert [(round(low, 6), num) for low, _, num in few] == [(0, 2), (0.1, 1), (0.2, 2)]
    many = torch.cat([torch.zeros(7), torch.logspace(-3, 1, 500)])
    bins = noise_histogram(many)
    assert len(bins) == 12 and bins[0][2] == 7 and sum(num for _, _, num in bins) == 507
    assert all(a[1] < b[0] for a, b in zip(bins, bins[1:], strict=False))


def test_get_and_show(in_folder: Path) -> None:
    assert "digits: 1,797 grey images of 8 x 8, uint8" in run(*"data get digits -o digits".split())
    text = run(*"data show digits --png a.png --noise 0.2 --noise 1 --verify".split())
    assert "digits, checksums are correct: 1,797 grey images" in text
    assert "10 classes: 0 178, 1 182" in text and "clean" in text
    assert Image.open("a.png").height == 3 * 66 - 2
    assert failing(*"data get digits -o digits".split()).path == "digits"  # exists already
    assert failing(*"data show digits --noise 0.2".split()).key == "noise"
    assert "is not a store" in failing("data", "show", ".").what


def test_pack_files_of_mixed_quality(in_folder: Path) -> None:
    generator, lines = np.random.default_rng(0), ["filename,sigma"]
    Path("in/cells").mkdir(parents=True)
    for i, sigma in enumerate([0, 0, 0.1, 0.4]):
        values = generator.normal(0.5, 0.2 + sigma, (8, 8)).astype(np.float32)
        Image.fromarray(values).save(f"in/cells/{i}.tiff")
        lines.append(f"cells/{i}.tiff,{sigma}")
    Path("in/cells/broken.tiff").write_text("oops")
    Path("sigma.csv").write_text("\n".join([*lines, "cells/broken.tiff,0"]))
    command = "data pack in -o store --all levels=sigma.csv,range=0,1,scaled=true --classes".split()
    assert "broken.tiff" in str(failing(*command).path)
    text = run(*command, "--skip-bad")
    assert "skipped: " in text and "store (1 skipped): 4 grey images of 8 x 8, float32" in text
    assert "0.4       0.2" in text  # where black to white is 2, and in the files
    store = open_store("store")
    assert store.sigma_tn.tolist() == pytest.approx([0, 0, 0.1, 0.4]) and store.class_names == ("cells",)
    assert store.meta.num_clean == 2 and store.physical_range == (0, 1)
    text = run(*"data show store --png a.png".split())
    assert "0.4" in text and "8.6 dB" in text and "20.0 dB" in text
    assert "black and white are 0 and 1 in the files: a sigma of 1 is 0.5 there" in text
    assert "--png" in str(failing(*"data show store --png q.txt".split()))


def test_pack_options_reach_the_store(in_folder: Path) -> None:
    np.save("a.npy", np.random.default_rng(0).integers(0, 256, (3, 12, 10, 3), dtype=np.uint8))
    text = run(*"data pack a.npy:sigma=30 -o store --size 6x5 --fit crop --dtype float16".split())
    assert "3 colour images of 6 x 5, float16" in text
    assert "warning: 3 noisy images are 8-bit" in text
    assert open_store("store").meta.dtype == "float16"
    run(*"data pack a.npy -o grey --size 4 --fit resize --colour grey".split())
    assert open_store("grey").image_shape == (1, 4, 4)
    assert "size" in str(failing(*"data pack x -o new --size 4by4".split()))
    assert "give one" in str(failing(*"data pack a.npy:sigma=1,levels=x -o new".split()))
    assert not Path("new").exists()
