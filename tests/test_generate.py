"""`assay sample` and `assay denoise` on real, small checkpoints."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from astropy.io import fits
from PIL import Image

from assay.checkpoint import CheckpointInfo, load_checkpoint, save_checkpoint
from assay.cli.generate import parse_seeds
from assay.data import Store, open_store
from assay.data.pack import pack
from assay.data.picture import to_uint8
from assay.data.readers import read_any
from assay.data.spec import SourceSpec
from assay.data.units import PhysicalRange
from assay.nets import MLPConfig, build_denoiser
from assay.sample import edm_sigmas, generate, spread_labels
from tests.commands import failing, run


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, num_classes, info in [
        ("mixed", 0, CheckpointInfo(sigma_tn=((0.0, 0.1), (0.2, 0.9)), clean_fraction=0.1)),
        ("noisy", 0, CheckpointInfo(sigma_tn=((0.3, 1.0),), clean_fraction=0.0)),
        ("classes", 4, CheckpointInfo(label_names=("shoe", "bag", "coat", "hat"))),
    ]:
        config = MLPConfig(image_shape=(1, 8, 8), num_classes=num_classes, width=16, num_blocks=1)
        denoiser = build_denoiser(config)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():  # a new network predicts zeros: give the last layers some weight
            for parameter in denoiser.parameters():
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
        save_checkpoint(folder / f"{name}.safetensors", denoiser, config, info)
    return folder


def test_folder_npz_and_grid_hold_the_images_of_their_seeds(checkpoints: Path, tmp_path: Path) -> None:
    path = checkpoints / "classes.safetensors"
    denoiser, seeds = load_checkpoint(path).denoiser.eval(), [3, 8, 10, 14]
    label = spread_labels([1.0] * 4, seeds)
    assert len(label.unique()) == 3
    expected = next(generate(denoiser, seeds, (1, 8, 8), edm_sigmas(5), label=label))
    for target in ("folder", "images.npz", "grid.png"):
        run("sample", path, "-o", tmp_path / target, "--seeds", "3,8,10,14", "--num-steps", 5)
    pixels = to_uint8(expected).permute(0, 2, 3, 1).numpy()
    for seed, image in zip(seeds, pixels, strict=True):
        assert np.array_equal(np.asarray(Image.open(tmp_path / f"folder/{seed:06d}.png")), image[..., 0])
    archive = np.load(tmp_path / "images.npz")
    np.testing.assert_array_equal(archive["images"], pixels)
    assert archive["seeds"].tolist() == [3, 8, 10, 14] and archive["label"].tolist() == label.tolist()
    assert Image.open(tmp_path / "grid.png").size == (130, 130)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "grid.png", "images.npz"]


def test_a_class_is_a_name_or_a_number(checkpoints: Path, tmp_path: Path) -> None:
    command = "sample", checkpoints / "classes.safetensors", "--seeds", "0-1", "--num-steps", 3, "--class"
    for word in ("coat", "2"):
        run(*command, word, "-o", tmp_path / f"{word}.npz")
        assert np.load(tmp_path / f"{word}.npz")["label"].tolist() == [2, 2]
    assert "shoe, bag, coat, hat" in str(failing(*command, "cat", "-o", tmp_path / "x.npz").cure)


def test_truncation_is_suggested_to_noisy_only_models_and_auto_uses_their_level(
    checkpoints: Path, tmp_path: Path
) -> None:
    noisy, options = checkpoints / "noisy.safetensors", ("--seeds", 0, "--num-steps", 4)
    output = run("sample", noisy, "-o", tmp_path / "full", *options)
    assert "truncate_at = auto" in output and "0.3" in output
    for name, value in [("auto", "auto"), ("number", "0.3")]:
        output = run("sample", noisy, "-o", tmp_path / name, *options, "--truncate-at", value)
        assert "warning" not in output
    images = {p.name: (p / "000000.png").read_bytes() for p in tmp_path.iterdir()}
    assert images["auto"] == images["number"] != images["full"]
    mixed = checkpoints / "mixed.safetensors"
    assert "truncate_at" not in run("sample", mixed, "-o", tmp_path / "mixed", *options)


def test_an_interrupted_job_makes_only_what_is_missing(checkpoints: Path, tmp_path: Path) -> None:
    """Killed jobs are in tests/stateful.py."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder, batch_size in ((whole, 64), (parts, 4)):
        job = "sample", checkpoints / "mixed.safetensors", "--seeds", "0-15", "--num-steps", 5, "-o", folder
        run(*job, "--batch-size", batch_size)
    for name in ("000003", "000011"):
        (parts / f"{name}.png").unlink()
    before = {path: path.stat().st_mtime_ns for path in parts.glob("0*.png")}
    run(*job)
    assert all(image.read_bytes() == (parts / image.name).read_bytes() for image in whole.iterdir())
    assert all(path.stat().st_mtime_ns == when for path, when in before.items())


def test_images_of_another_job_are_neither_returned_nor_replaced(checkpoints: Path, tmp_path: Path) -> None:
    folder, path = tmp_path / "out", checkpoints / "mixed.safetensors"
    run("sample", path, "-o", folder, "--seeds", "0-3", "--num-steps", 4)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert read_any(str(folder)).names == [f"00000{seed}.png" for seed in range(4)]
    for other, num_steps, message in [
        (path, 5, r"other settings \(num_steps: 4 there, 5 here\)"),
        (checkpoints / "noisy.safetensors", 4, r"\(checkpoint: \w{16} there, \w{16} here\)"),
    ]:
        error = failing("sample", other, "--num-steps", num_steps, "-o", folder, "--seeds", "0-9")
        assert re.search(message, error.what) and "choose another folder" in (error.cure or "")
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    (folder / ".job.json").unlink()
    error = failing("sample", path, "-o", folder, "--seeds", "2-9", "--num-steps", 4)
    assert error.path == str(folder / "000000.png") and "exists already" in error.what
    for image in folder.glob("*.png"):
        image.unlink()
    (folder / "images.csv").write_text("a table of the user")
    error = failing("sample", path, "-o", folder, "--seeds", "2-9", "--num-steps", 4)
    assert error.path == str(folder / "images.csv")


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("classes --class 4", "label"),
        ("mixed --class 0", "label"),
        ("mixed --seeds 5-2", "seeds"),
        ("mixed --seeds 0,0", "seeds"),
        ("mixed --seeds 0-99999999999999999999", "seeds"),
        ("mixed --seeds 99999999999999999999", "seeds"),
        ("mixed --seeds 0-99999999", "seeds"),
        ("mixed --truncate-at soon", "truncate_at"),
        ("mixed --sigma-max 1e39", "sigma_max"),
        ("mixed --num-steps 1", "num_steps"),
        ("mixed --devices two", "devices"),
        ("mixed --devices -1", "devices"),
        ("mixed --devices 64000", "devices"),
        ("mixed --device cuda:999", "device"),
        ("classes --truncate-at auto", "truncate_at"),
    ],
)
def test_bad_input_is_named(words: str, key: str, checkpoints: Path, tmp_path: Path) -> None:
    name, *options = words.split()
    assert failing("sample", checkpoints / f"{name}.safetensors", "-o", tmp_path / "out", *options).key == key


# --- in the units of the data --------------------------------------------------------------------------------


def gaussian_checkpoint(
    folder: Path, channels: int = 1, physical_range: PhysicalRange | None = (0, 4095)
) -> Path:
    """A new network predicts zeros, so its denoiser is exact for images of independent pixels N(0, 0.5^2)."""
    config = MLPConfig(image_shape=(channels, 8, 6), width=8, num_blocks=1)
    info = CheckpointInfo(sigma_tn=((0.0, 0.5), (0.2, 0.5)), clean_fraction=0.5, physical_range=physical_range)
    path = folder / f"gaussian-{channels}.safetensors"
    save_checkpoint(path, build_denoiser(config), config, info)
    return path


def noisy_store(folder: Path, channels: int = 1) -> Store:
    """Images in units of 0 .. 4095, clean or with noise of several levels."""
    generator = np.random.default_rng(0)
    np.save(folder / "scans.npy", generator.uniform(0, 4095, (12, 8, 6, channels)).astype(np.float32))
    levels = [0, 0.05, 0.2, 0.8] * 3  # in the files these are multiples of 4095 / 2
    lines = [f"scans.npy[{i}],{level * 4095 / 2}" for i, level in enumerate(levels)]
    (folder / "levels.csv").write_text("\n".join(["filename,sigma", *lines]) + "\n")
    spec = SourceSpec(path=str(folder / "scans.npy"), range=(0, 4095), levels=folder / "levels.csv")
    return pack(spec, folder / "store").store


def posterior_mean(store: Store) -> np.ndarray:
    """E[x_0 | x_tn] in the store's units, (N, H, W, C)."""
    x, sigma = store.read(torch.arange(len(store))).double(), store.sigma_tn.double().view(-1, 1, 1, 1)
    return ((0.25 / (0.25 + sigma**2) * x + 1) * 4095 / 2).permute(0, 2, 3, 1).numpy()


@pytest.mark.parametrize("channels", [1, 3])
def test_denoised_images_are_the_posterior_mean_in_every_format(channels: int, tmp_path: Path) -> None:
    checkpoint, store = gaussian_checkpoint(tmp_path, channels), noisy_store(tmp_path, channels)
    expected = posterior_mean(store)
    np.testing.assert_allclose(expected[0], np.load(tmp_path / "scans.npy")[0], rtol=1e-5)  # a clean image
    read = {
        "npy": np.load,
        "tiff": tifffile.imread,
        "fits": lambda path: fits.getdata(path) if channels == 1 else np.moveaxis(fits.getdata(path), -3, -1),
    }
    for name, suffix in (("npy", "npy"), ("tiff", "tif"), ("fits", "fits")):
        folder, file = tmp_path / name, tmp_path / f"all.{suffix}"
        run("denoise", checkpoint, store.path, "-o", folder, "--format", name)
        assert "12 images" in run("denoise", checkpoint, store.path, "-o", file, "--batch-size", 5)
        stack = np.stack([read[name](folder / f"scans-{i:06d}.{suffix}") for i in range(12)])
        assert stack.dtype.newbyteorder("=") == np.float32
        np.testing.assert_allclose(stack.reshape(expected.shape), expected, rtol=1e-5, atol=0.01)
        np.testing.assert_array_equal(read[name](file), stack)
    table = (tmp_path / "npy" / "images.csv").read_text().splitlines()
    assert table[0] == "filename,source,sigma_tn" and table[2].startswith("scans-000001.npy,scans.npy[1],0.05")
    run("denoise", checkpoint, store.path, "-o", tmp_path / "a.npz", "--dtype", "uint16")
    archive = np.load(tmp_path / "a.npz")
    assert archive["images"].dtype == np.uint16 and archive["sigma_tn"].tolist() == store.sigma_tn.tolist()
    np.testing.assert_array_equal(archive["images"], np.rint(expected.clip(0, 65535)))


def test_posterior_draws_spread_as_the_posterior_and_keep_their_seeds(tmp_path: Path) -> None:
    checkpoint, store = gaussian_checkpoint(tmp_path), noisy_store(tmp_path)
    options = ("denoise", checkpoint, store.path, "--num-steps", 24)
    run(*options, "-o", tmp_path / "draws.npy", "--num-samples", 25, "--batch-size", 999)
    draws = np.load(tmp_path / "draws.npy").reshape(12, 25, 48)
    mean, sigma = posterior_mean(store).reshape(12, 1, 48), store.sigma_tn.double().numpy()
    spread = np.sqrt(0.25 * sigma**2 / (0.25 + sigma**2)) * 4095 / 2
    np.testing.assert_array_equal(draws[::4], np.repeat(draws[::4, :1], 25, 1))  # clean images have no spread
    for level in np.unique(sigma[sigma > 0]):  # 3600 values each: standard errors 0.017 and 0.012
        error = (draws - mean)[sigma == level] / spread[sigma == level, None, None]
        assert error.mean() == pytest.approx(0, abs=0.08) and error.std() == pytest.approx(1, abs=0.07)
    # Fewer draws, in a folder and in other batches, are the first of these.
    folder = ("-o", tmp_path / "few", "--num-samples", 2, "--format", "npy", "--batch-size", 5)
    run(*options, *folder)
    for i, k in ((1, 0), (1, 1), (11, 1)):
        np.testing.assert_array_equal(np.load(tmp_path / f"few/scans-{i:06d}-{k:03d}.npy").ravel(), draws[i, k])
    assert not np.array_equal(draws[1, 0], draws[1, 1])
    assert "seed: 0 there, 1 here" in failing(*options, *folder, "--seed", 1).what


def test_samples_are_written_in_the_units_of_the_data(tmp_path: Path) -> None:
    path = gaussian_checkpoint(tmp_path)
    options = "sample", path, "--seeds", "0-7", "--num-steps", 5
    denoiser = load_checkpoint(path).denoiser.eval()
    images = next(generate(denoiser, range(8), (1, 8, 6), edm_sigmas(5)))[:, 0]
    for name, low, high, more in [
        ("own.tif", 0, 4095, ()),
        ("given.tif", -7, 3, ("--range", "-7,3")),
        ("small.npy", -1, 1, ("--range", "-1,1")),
    ]:
        run(*options, "-o", tmp_path / name, *more)
        found = (tifffile.imread if name.endswith("tif") else np.load)(tmp_path / name)
        np.testing.assert_allclose(found, low + (images.numpy() + 1) / 2 * (high - low), rtol=1e-5, atol=1e-5)
    run(*options, "-o", tmp_path / "deep.tif", "--dtype", "uint16")
    assert tifffile.imread(tmp_path / "deep.tif").dtype == np.uint16


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("-o x.bmp", "x.bmp"),
        ("-o x --dtype float32", "dtype"),
        ("-o x.npy --range 0,1 --dtype uint16", "dtype"),
        ("-o x.npy --range 0;1", "range"),
        ("-o x.npy --range 1,0", "range"),
    ],
)
def test_files_that_cannot_hold_the_images_are_rejected_before_any_work(
    words: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = gaussian_checkpoint(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert named in str(failing("sample", path, *words.split()))
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_units_must_be_known_and_shapes_must_agree(tmp_path: Path) -> None:
    unknown, store = gaussian_checkpoint(tmp_path, physical_range=None), noisy_store(tmp_path)
    assert "as the range" in str(failing("sample", unknown, "-o", tmp_path / "x.npy"))
    other = gaussian_checkpoint(tmp_path, 3)
    error = failing("denoise", other, store.path, "-o", tmp_path / "y")
    assert "(1, 8, 6) and (3, 8, 6)" in error.what
    elsewhere = gaussian_checkpoint(tmp_path, physical_range=(0, 1))
    output = run("denoise", elsewhere, store.path, "-o", tmp_path / "y")
    assert "packed with range=0,4095, the training images with range=0,1: pack" in " ".join(output.split())
    options = ("denoise", elsewhere, store.path, "-o", tmp_path / "z")
    assert failing(*options, "--num-samples", -1).key == "num_samples"


def test_a_run_folder_stands_for_its_final_checkpoint(checkpoints: Path, tmp_path: Path) -> None:
    final = tmp_path / "run/snapshots/final.safetensors"
    options = "sample", tmp_path / "run", "-o", tmp_path / "x"
    final.parent.mkdir(parents=True)
    assert "without snapshots/final.safetensors" in str(failing(*options))
    (tmp_path / "run/state").mkdir()
    assert f"--continue-from {tmp_path / 'run'} --num-steps N" in (failing(*options).cure or "")
    shutil.copy(checkpoints / "mixed.safetensors", final.with_name("000000100.safetensors"))
    unfinished = str(failing(*options))
    assert "has not finished" in unfinished and "000000100.safetensors" in unfinished
    final.with_name("000000100.safetensors").rename(final)
    run(*options, "--seeds", 0, "--num-steps", 4)


def test_a_restored_store_is_the_same_in_every_batch_size(tmp_path: Path) -> None:
    config = MLPConfig(image_shape=(1, 8, 6), width=16, num_blocks=1)
    denoiser = build_denoiser(config)
    torch.manual_seed(0)
    for parameter in denoiser.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    checkpoint, store = tmp_path / "x.safetensors", noisy_store(tmp_path)
    save_checkpoint(checkpoint, denoiser, config, CheckpointInfo(sigma_tn=((0.0, 1.0),)))
    values = []
    for size in (1, 2, 5, 64):
        made = tmp_path / f"made-{size}"
        run("denoise", checkpoint, store.path, "-o", made, "--restore", "--batch-size", size)
        values.append(open_store(made).read(torch.arange(12)))
    assert all(torch.equal(value, values[0]) for value in values)


def test_seeds_are_parsed() -> None:
    assert parse_seeds("0-3, 7,10-11") == [0, 1, 2, 3, 7, 10, 11]
