"""Noise levels and the checks of the Gaussian model, on images whose noise is known."""

import csv
import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from scipy.ndimage import gaussian_filter
from skimage.restoration import estimate_sigma
from torch import Tensor
from typer.testing import CliRunner

from assay.cli import app
from assay.data import open_store
from assay.data.audit import audit
from assay.data.audit.camera import fit_sensor, group_level, neighbour_correlation, sensor_from_repeats
from assay.data.audit.level import blind_net, train_on_examples
from assay.data.audit.report import rounding_step
from assay.data.audit.scenes import draw_scene
from assay.data.audit.windows import flattest, windows
from assay.data.known import get
from assay.data.readers import read_any

SIGMAS = (0.05, 0.1, 0.2, 0.4)


@cache
def fashion() -> Tensor:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return get("fashion-mnist", Path(folder) / "s", num_images=1000).store.read(torch.arange(1000))


@cache
def scenes() -> Tensor:
    """Colour scenes that the network has not seen."""
    rng = np.random.default_rng(77)
    return torch.from_numpy(np.stack([draw_scene(rng, 32, 32, 3) for _ in range(80)]))


def noise(x: Tensor, seed: int = 0) -> Tensor:
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))


def median_error(found: Tensor, sigma: float) -> float:
    return (found / sigma - 1).abs().median().item()


@pytest.mark.parametrize("shape", [(1, 40, 31), (3, 32, 32)])
def test_choosing_flat_windows_does_not_change_their_noise(shape: tuple[int, int, int]) -> None:
    found = windows(0.3 * noise(torch.empty(400, *shape)), 6)
    assert found.energy.mean().item() == pytest.approx(0.09, rel=0.01)  # an orthonormal basis
    detail, structure = flattest(found, 0.05)
    assert structure.mean().item() < 0.6 * 0.09
    assert detail.mean().item() == pytest.approx(0.09, rel=0.01)
    chosen = found.structure_around() < 0.08
    assert found.detail[chosen].mean().item() == pytest.approx(0.09, rel=0.02)


@pytest.mark.parametrize("name", ["fashion", "scenes"])
def test_levels_from_each_image_alone(name: str) -> None:
    x = fashion()[300:360] if name == "fashion" else scenes()
    covered = []
    for i, sigma in enumerate(SIGMAS):
        y = x + sigma * noise(x, i)
        found = blind_net().levels(y)
        error = median_error(found.sigma, sigma)
        peer = [estimate_sigma(image.numpy(), channel_axis=0, average_sigmas=True) for image in y]
        assert error <= median_error(torch.tensor(peer), sigma)  # 2 to 9 times less at 0.05 and 0.1
        assert error <= 0.07
        covered.append(((found.low <= sigma) & (sigma <= found.high)).double().mean().item())
    assert 0.9 <= np.mean(covered) <= 0.99


def test_levels_from_clean_examples() -> None:
    net = train_on_examples(list(fashion()[:200]), num_draws=2000)
    covered = []
    for i, (sigma, bar) in enumerate(zip(SIGMAS, (0.06, 0.05, 0.05, 0.04), strict=True)):
        x = fashion()[300:500]
        found = net.levels(x + sigma * noise(x, i))
        assert median_error(found.sigma, sigma) <= bar
        covered.append(((found.low <= sigma) & (sigma <= found.high)).double().mean().item())
    assert 0.9 <= np.mean(covered) <= 0.99
    with pytest.raises(ValueError, match="one value"):
        train_on_examples([torch.ones(1, 8, 8)] * 20)


def test_levels_follow_the_units_and_clean_images_have_none() -> None:
    x = fashion()[:20] + 0.1 * noise(fashion()[:20])
    one, other = blind_net().levels(x), blind_net().levels(500 + 300 * x)
    torch.testing.assert_close(other.sigma, 300 * one.sigma, rtol=2e-3, atol=0)
    clean = blind_net().levels(fashion()[:100])
    assert (clean.sigma == 0).double().mean() > 0.8 and clean.sigma.max() < 0.05


def test_a_shared_level_is_within_one_percent() -> None:
    clean, x = list(fashion()[:200]), fashion()[400:]
    for sigma in (0.05, 0.2):
        y = list(x + sigma * noise(x, 6))
        alone, helped = group_level(y), group_level(y, clean=clean)
        assert alone.value == pytest.approx(sigma, rel=0.01) and alone.low < sigma < alone.high
        assert helped.value == pytest.approx(sigma, rel=0.02) and helped.low < sigma < helped.high


def test_gain_and_read_noise_within_five_percent() -> None:
    rng = np.random.default_rng(3)
    images = []
    for _ in range(20):
        scene = draw_scene(rng, 128, 128, 1)
        light = 200 * (scene - scene.min()) / np.ptp(scene)
        images.append(0.5 * rng.poisson(light) + 2 * rng.standard_normal(light.shape) + 10)
    sensor = fit_sensor([torch.from_numpy(image.astype(np.float32)) for image in images])
    assert sensor is not None
    assert sensor.gain.value == pytest.approx(0.5, rel=0.05) and sensor.gain.low < 0.5 < sensor.gain.high
    assert math.sqrt(sensor.offset.value + 0.5 * 10) == pytest.approx(2, rel=0.05)  # black is 10
    assert fit_sensor([torch.zeros(1, 32, 32)]) is None


def test_correlated_noise_is_recognised() -> None:
    x = fashion()[:100]
    for blur, low, high in ((0.0, -0.03, 0.03), (0.4, 0.05, 0.13), (0.5, 0.18, 0.35), (0.7, 0.5, 0.7)):
        z = np.asarray(noise(x))
        z = gaussian_filter(z, (0, 0, blur, blur), mode="wrap") if blur else z
        y = x + 0.2 * torch.from_numpy(z / z.std())
        each, found = neighbour_correlation(list(y), blind_net().levels(y).sigma.tolist())
        assert low < found.value < high and len(each) == 100  # the true ones: 0, 0.09, 0.26, 0.58
        assert np.nanmedian(each) == pytest.approx(found.value, abs=0.08)


def test_repeated_exposures_are_exact(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    truth = {"a": [1.0, 2.0, 5.0], "b": [3.0, 3.0]}
    for folder, sigmas in truth.items():
        (tmp_path / "in" / folder).mkdir(parents=True)
        scene = 100 * rng.random((40, 30))
        for i, sigma in enumerate(sigmas):
            image = scene + sigma * rng.standard_normal(scene.shape)
            tifffile.imwrite(tmp_path / "in" / folder / f"{i}.tif", image.astype(np.float32))
    found = audit(read_any(str(tmp_path / "in")), repeats=True)
    wanted = np.array([*truth["a"], *truth["b"]])
    assert ((found.low < wanted) & (wanted < found.high)).all() and (found.high / found.low)[2:].max() < 1.15
    np.testing.assert_allclose(found.sigma, wanted, rtol=0.1)
    assert found.group.value**2 == pytest.approx((np.mean([1, 4, 25]) + 9) / 2, rel=0.06)
    assert not found.agree and abs(found.whiteness.value) < 0.03
    tifffile.imwrite(tmp_path / "in" / "c.tif", scene.astype(np.float32))
    with pytest.raises(ValueError, match="alone in its folder"):
        audit(read_any(str(tmp_path / "in")), repeats=True)
    with pytest.raises(ValueError, match="give one of the two"):
        audit(read_any(str(tmp_path / "in")), read_any(str(tmp_path / "in")), repeats=True)


def test_a_line_through_repeats_is_the_sensor() -> None:
    rng = np.random.default_rng(1)
    mean = rng.uniform(5, 200, 20_000)
    sensor = sensor_from_repeats(mean, (2 * mean + 9) * rng.chisquare(7, mean.shape) / 7)
    assert sensor.gain.low < 2 < sensor.gain.high and sensor.gain.value == pytest.approx(2, rel=0.02)
    assert sensor.offset.low < 9 < sensor.offset.high


def test_rounding() -> None:
    x = 50 * noise(torch.empty(1, 32, 32))
    assert rounding_step(x) == 0 and rounding_step(x.round()) == 1 and rounding_step((x / 4).round() * 4) == 4
    assert rounding_step((x / 0.5).round() * 0.5) == 0.5 and rounding_step(torch.ones(1, 9, 9)) == math.inf


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["data", *map(str, arguments)], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result.output


def test_from_unknown_noise_to_a_store(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    truth = {}
    (tmp_path / "in").mkdir()
    for i, image in enumerate(fashion()[:60, 0].numpy()):
        truth[f"{i:02}.tif"] = sigma = float(rng.choice([20, 100]))
        values = 500 * (image + 1) + sigma * rng.standard_normal(image.shape)
        tifffile.imwrite(tmp_path / "in" / f"{i:02}.tif", values.astype(np.float32))
    text = run("noise", tmp_path / "in", "--levels", tmp_path / "l.csv", "--png", tmp_path / "l.png")
    assert "but they differ" in text and "not rounded" in text and "warning" not in text
    assert (tmp_path / "l.png").stat().st_size > 5000
    rows = list(csv.DictReader((tmp_path / "l.csv").open()))
    errors = [abs(float(row["sigma"]) / truth[row["filename"]] - 1) for row in rows]
    assert np.median(errors) < 0.06
    run("pack", tmp_path / "in", "--range", "0,1000", "--sigma-file", tmp_path / "l.csv", "-o", tmp_path / "s")
    store = open_store(tmp_path / "s")
    assert store.sigma_tn.tolist() == pytest.approx([float(row["sigma"]) / 500 for row in rows], rel=1e-5)
    assert "outside its measured interval" in run("noise", tmp_path / "s")


def test_images_that_break_the_model(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    light = 100 * (fashion()[:100, 0].numpy() + 1.2)
    np.save(tmp_path / "a.npy", rng.poisson(light).clip(0, 210).astype(np.uint16))
    text = run("noise", tmp_path / "a.npy", "--shared", "--levels", tmp_path / "l.csv")
    assert "are clipped" in text and "depends on the signal" in text
    rows = list(csv.DictReader((tmp_path / "l.csv").open()))
    assert len({row["sigma"] for row in rows}) == 1
    small = np.zeros((3, 7, 7), np.uint8)
    np.save(tmp_path / "b.npy", small)
    assert "8 x 8 and more" in run("noise", tmp_path / "b.npy", code=1)
    assert "20 clean examples" in run("noise", tmp_path / "a.npy", "--clean", tmp_path / "b.npy", code=1)
    smooth = gaussian_filter(rng.standard_normal((40, 32, 32)), (0, 0.7, 0.7), mode="wrap").astype(np.float32)
    np.save(tmp_path / "c.npy", smooth)
    assert "neighbouring pixels is correlated" in run("noise", tmp_path / "c.npy")
    np.save(
        tmp_path / "d.npy", (2 * rng.standard_normal((40, 32, 32)) / 10).round().astype(np.float32) * 10 + 50
    )
    assert "rounded to steps of" in run("noise", tmp_path / "d.npy")
