"""Noise levels and the checks of the Gaussian model, on images whose noise is known."""

import csv
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import tifffile
import torch
from astropy.io import fits
from PIL import Image
from scipy.ndimage import gaussian_filter
from skimage.data import brick
from skimage.restoration import estimate_sigma
from sklearn.datasets import load_digits
from torch import Tensor

from assay.data import open_store
from assay.data.arrays import measure_noise
from assay.data.audit import Audit, audit, report
from assay.data.audit.group import (
    Measured,
    Sensor,
    fit_sensor,
    group_level,
    mean_around,
    neighbour_correlation,
    sensor_from_repeats,
)
from assay.data.audit.level import LevelNet, blind_net, flattest, train_on_examples, windows
from assay.data.audit.report import rounding_step
from assay.data.known import get
from assay.data.readers import RawImages, read_any
from assay.data.spec import Level
from bench.scenes import draw_scene
from tests.commands import failing, run
from tests.errors import rejected

SIGMAS = (0.05, 0.1, 0.2, 0.4)


@cache
def fashion() -> Tensor:
    with TemporaryDirectory() as folder:
        return get("fashion-mnist", Path(folder) / "s", num_images=1300).store.read(torch.arange(1300))


@cache
def scenes() -> Tensor:
    """Colour scenes that the network has not seen."""
    rng = np.random.default_rng(77)
    return torch.from_numpy(np.stack([draw_scene(rng, 32, 32, 3) for _ in range(80)]))


def noise(x: Tensor, seed: int = 0) -> Tensor:
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(1, 40, 31), (3, 32, 32)])
def test_choosing_flat_windows_does_not_change_their_noise(shape: tuple[int, int, int]) -> None:
    found = windows(0.3 * noise(torch.empty(400, *shape)), 6)
    assert found.energy.mean().item() == pytest.approx(0.09, rel=0.01)  # an orthonormal basis
    detail, structure = flattest(found, 0.05)
    assert structure.mean().item() < 0.6 * 0.09
    assert detail.mean().item() == pytest.approx(0.09, rel=0.01)
    chosen = found.structure_around() < 0.08
    assert found.detail[chosen].mean().item() == pytest.approx(0.09, rel=0.02)


def check_levels(net: LevelNet, x: Tensor, bars: Sequence[float], num_seeds: int, peer: bool = False) -> None:
    """Median errors below the bars and scikit-image's, seed by seed; intervals hold 90 to 99% of levels."""
    inside = []
    for seed in range(num_seeds):
        for i, (sigma, bar) in enumerate(zip(SIGMAS, bars, strict=True)):
            y = x + sigma * noise(x, 10 * seed + i)
            level, low, high = net.levels(y)
            error = (level / sigma - 1).abs().median().item()
            assert error <= bar
            if peer:
                theirs = [estimate_sigma(image.numpy(), channel_axis=0, average_sigmas=True) for image in y]
                assert error <= (torch.tensor(theirs) / sigma - 1).abs().median().item()
            inside.append(((low <= sigma) & (sigma <= high)).double().mean().item())
    assert 0.9 <= np.mean(inside) <= 0.99


def test_levels_from_each_image_alone() -> None:
    check_levels(blind_net(), fashion()[300:450], (0.06, 0.06, 0.05, 0.05), num_seeds=3, peer=True)
    check_levels(blind_net(), scenes(), (0.06, 0.06, 0.05, 0.05), num_seeds=1, peer=True)


def test_levels_from_clean_examples() -> None:
    net = train_on_examples(list(fashion()[:300]))
    check_levels(net, fashion()[300:500], (0.06, 0.05, 0.05, 0.04), num_seeds=3)
    with rejected("clean"):
        train_on_examples([torch.ones(1, 8, 8)] * 20)


def test_levels_follow_the_units_and_clean_images_have_none() -> None:
    x = fashion()[:20] + 0.1 * noise(fashion()[:20])
    one, other, clean = (blind_net().levels(y)[0] for y in (x, 500 + 300 * x, fashion()[:100]))
    torch.testing.assert_close(other, 300 * one, rtol=2e-3, atol=0)
    assert (clean == 0).double().mean() > 0.8 and clean.max() < 0.05


def test_a_shared_level_is_within_one_percent() -> None:
    x = fashion()[300:]
    for i, sigma in enumerate((0.05, 0.2)):
        level = group_level(list(x + sigma * noise(x, 20 + i)))
        assert level.value == pytest.approx(sigma, rel=0.01) and level.low < sigma < level.high
    small = torch.nn.functional.interpolate(x, size=(12, 12), mode="area")  # all texture: examples tell
    noisy = list(small[100:] + 0.3 * noise(small[100:], 30))
    level = group_level(noisy, clean=list(small[:100]))
    assert level.value == pytest.approx(0.3, rel=0.02) and level.low < 0.3 < level.high
    assert group_level(noisy).value > 1.01 * level.value


@pytest.mark.parametrize("seed", [3, 4, 5])
def test_gain_and_read_noise_within_five_percent(seed: int) -> None:
    rng = np.random.default_rng(seed)
    images = []
    for _ in range(20):
        scene = draw_scene(rng, 128, 128, 1)
        light = 200 * (scene - scene.min()) / max(np.ptp(scene), 1e-6)
        values = 0.5 * rng.poisson(light) + 2 * rng.standard_normal(light.shape) + 10
        images.append(torch.from_numpy(values.astype(np.float32)))
    sensor = fit_sensor(images)
    assert sensor is not None
    assert sensor.gain.value == pytest.approx(0.5, rel=0.05)
    assert math.sqrt(sensor.offset.value + 0.5 * 10) == pytest.approx(2, rel=0.05)  # black is 10
    known = fit_sensor(images, black=10)
    assert known is not None and math.sqrt(known.offset.value) == pytest.approx(2, rel=0.05)
    assert known.gain.value == pytest.approx(sensor.gain.value) and str(known).endswith(",black=10")
    assert fit_sensor([torch.zeros(1, 32, 32)]) is None  # flat windows of different brightness are needed


def test_correlated_noise_is_recognised() -> None:
    x = fashion()[:100]
    for blur, low, high in ((0.0, -0.03, 0.03), (0.4, 0.05, 0.13), (0.5, 0.18, 0.35), (0.7, 0.5, 0.7)):
        z = np.asarray(noise(x))
        z = gaussian_filter(z, (0, 0, blur, blur), mode="wrap") if blur else z
        y = x + 0.2 * torch.from_numpy(z / z.std())
        found = neighbour_correlation(list(y), blind_net().levels(y)[0].tolist())
        assert low < found.value < high  # the true ones: 0, 0.09, 0.26, 0.58


def test_repeated_exposures_are_exact(tmp_path: Path) -> None:
    rng, truth = np.random.default_rng(0), {"a": [1.0, 2.0, 5.0], "b": [3.0, 3.0]}
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
    np.save(tmp_path / "same.npy", np.stack([scene, scene]).astype(np.float32))
    with rejected("repeats", "same.npy[0]"):  # one exposure twice
        audit(read_any(str(tmp_path / "same.npy")), repeats=True)
    tifffile.imwrite(tmp_path / "in" / "c.tif", scene.astype(np.float32))
    for clean, key in ((None, "repeats"), (read_any(str(tmp_path / "in")), "clean")):
        with rejected(key):
            audit(read_any(str(tmp_path / "in")), clean, repeats=True)


def test_a_line_through_repeats_is_the_sensor() -> None:
    rng = np.random.default_rng(1)
    mean = rng.uniform(5, 200, 20_000)
    sensor = sensor_from_repeats(mean, (2 * mean + 9) * rng.chisquare(7, mean.shape) / 7, mean)
    assert sensor is not None and sensor.gain.value == pytest.approx(2, rel=0.02)
    assert sensor.gain.low < 2 < sensor.gain.high
    assert sensor.offset.low < 9 < sensor.offset.high
    ends = sensor.mean.max(), sensor.mean.min()
    assert sensor.dependence() == pytest.approx((2 * ends[0] + 9) / (2 * ends[1] + 9), rel=0.05)
    assert sensor_from_repeats(mean, np.zeros_like(mean), mean) is None
    for low, ratio in ((0.3, 1.0), (0.5, 2.0)):  # at the low end 1.65 / 1.35 = 1.22 may be chance, and 1.4 not
        found = Sensor(Measured(1.0, low, 2.0), Measured(1.0, 0.5, 1.5), np.array([0.0, 1.0]))
        assert found.dependence() == ratio
    assert replace(found, mean=np.zeros(0)).dependence() == 1


def raw_images(images: Sequence[np.ndarray], names: Sequence[str] | None = None) -> RawImages:
    names = [f"{i}.tif" for i in range(len(images))] if names is None else names
    return RawImages("images", names, lambda i: np.asarray(images[i], np.float32)[..., None])


def test_odd_images_get_no_odd_numbers() -> None:
    rng, flat = np.random.default_rng(0), [np.full((32, 32), 7.0)]
    scene = 120 * (fashion()[0, 0].numpy() + 1)
    cases = {
        "constant": audit(raw_images(flat * 5)),
        "one constant": audit(raw_images(flat)),
        "one": audit(raw_images([scene + 10 * rng.normal(size=scene.shape)])),
        "no light": audit(raw_images(flat * 3, ["a/1", "a/2", "a/3"]), repeats=True),
    }
    scenes = [scene, scene.T, scene[::-1]]
    with np.errstate(all="raise"):
        told = audit(raw_images(scenes, ["a/1", "a/2", "a/3"]), repeats=True).warnings()
    assert "does each folder hold exposures of one scene" in " ".join(told)
    with pytest.warns(UserWarning, match="noise measures 20.1 in images, and 0 in"):
        audit(raw_images(scenes), raw_images([scene + 20 * rng.normal(size=scene.shape) for _ in range(20)]))
    for found in cases.values():
        rows = dict(found.rows())
        assert not re.search(r"nan|inf|[1-9]\d\d+\.?\d*%", " ".join(rows.values()))
        assert found.clipped.max() <= 1 and np.isfinite(found.sigma).all()
        assert "if all share one level" not in rows
    assert all(cases[name].sigma.max() == 0 for name in ("constant", "one constant", "no light"))
    assert cases["constant"].clipped.max() == 0


def test_two_exposures_of_faint_galaxies_give_the_gain_without_bias() -> None:
    """Whose mean is as noisy as the images: a line through the noisy means finds 17% too little."""
    rng, (row, column) = np.random.default_rng(0), np.mgrid[:16, :16] - 8.0
    pixels: list[list[np.ndarray]] = [[], [], []]
    for width, peak in zip(rng.uniform(1.2, 3, 2000), rng.uniform(5, 40, 2000), strict=True):
        light = 7 + peak * np.exp(-(row**2 + column**2) / (2 * width**2))
        counts = rng.poisson(light / 0.6, (2, 16, 16))
        images = torch.from_numpy(0.6 * counts + 2 * rng.normal(size=(2, 16, 16)))
        mean = images.mean(0)[None]
        for part, found in zip(pixels, (mean, images.var(0), mean_around(mean)), strict=True):
            part.append(found.flatten().numpy())
    mean_, variance, around = map(np.concatenate, pixels)
    sensor = sensor_from_repeats(mean_, variance, around)
    naive = sensor_from_repeats(mean_, variance, mean_)
    assert sensor is not None and naive is not None
    assert sensor.gain.low < 0.6 < sensor.gain.high and sensor.gain.value == pytest.approx(0.6, rel=0.03)
    assert sensor.offset.low < 4 < sensor.offset.high and sensor.offset.value == pytest.approx(4, rel=0.05)
    assert naive.gain.value < 0.9 * 0.6


def test_the_pixels_beside_each() -> None:
    found = mean_around(torch.arange(9.0).reshape(1, 3, 3))
    assert found[0, 1, 1] == 4 and found[0, 0, 0] == (4 * 4 + 2 * 1 + 2 * 3) / 8


def test_rounding() -> None:
    x = 50 * noise(torch.empty(1, 32, 32))
    assert [rounding_step(y) for y in (x, (9 * x).round(), (x / 4).round() * 4)] == [0, 1, 4]
    assert rounding_step((x / 0.5).round() * 0.5) == 0.5 and rounding_step(torch.ones(1, 9, 9)) == math.inf


def test_from_unknown_noise_to_a_store(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    truth = {}
    (tmp_path / "in").mkdir()
    for i, image in enumerate(fashion()[:60, 0].numpy()):
        truth[f"{i:02}.tif"] = sigma = float(rng.choice([20, 100]))
        values = 500 * (image + 1) + sigma * rng.standard_normal(image.shape)
        tifffile.imwrite(tmp_path / "in" / f"{i:02}.tif", values.astype(np.float32))
    text = run("data", "noise", tmp_path / "in", "--levels", tmp_path / "l.csv")
    assert "they do not" in text and "not rounded" in text and "warning" not in text
    rows = list(csv.DictReader((tmp_path / "l.csv").open()))
    errors = [abs(float(row["sigma"]) / truth[row["filename"]] - 1) for row in rows]
    assert np.median(errors) < 0.06
    run("data", "pack", f"{tmp_path}/in:range=0,1000,levels={tmp_path}/l.csv", "-o", tmp_path / "s")
    store = open_store(tmp_path / "s")
    assert store.sigma_tn.tolist() == pytest.approx([float(row["sigma"]) / 500 for row in rows], rel=1e-5)


def test_clean_examples_in_other_units_are_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "train_on_examples", partial(train_on_examples, num_draws=1000))
    x = fashion()
    np.save(tmp_path / "clean.npy", np.rint((x[:100, 0].numpy() + 1) * 127.5).astype(np.uint8))
    np.save(tmp_path / "noisy.npy", ((x[300:360] + 0.2 * noise(x[300:360]) + 1) / 2)[:, 0].numpy())
    noisy, clean, levels = tmp_path / "noisy.npy", tmp_path / "clean.npy", ("--levels", tmp_path / "l.csv")
    for one in (noisy, f"{noisy}:range=0,1"):
        assert failing("data", "noise", one, "--clean", clean, *levels).key == "range"
    run("data", "noise", f"{noisy}:range=0,1", "--clean", f"{clean}:range=0,255", *levels)
    found = [float(row["sigma"]) for row in csv.DictReader((tmp_path / "l.csv").open())]
    assert np.median(found) == pytest.approx(0.1, rel=0.03)


def test_repeated_fits_exposures_to_a_stabilised_store(tmp_path: Path) -> None:
    """Gain and read noise as options of pack, the values for --range, and the store's own noise."""
    rng, (row, column) = np.random.default_rng(0), np.mgrid[:16, :16] - 8.0
    for number in range(30):
        light = 10 + 60 * np.exp(-(row**2 + column**2) / (2 * rng.uniform(1.5, 3) ** 2))
        for folder, count in ((f"repeats/{number}", 6), ("clean", 0)):
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
            images = 0.5 * rng.poisson(light / 0.5, (count, 16, 16)) + 2 * rng.normal(size=(count, 16, 16))
            for i, image in enumerate(images if count else [light]):
                fits.writeto(tmp_path / folder / f"{number}-{i}.fits", image.astype(np.float32))
    text = run("data", "noise", tmp_path / "repeats", "--repeats")
    found = re.search(r":range=-?\d+,\d+,gain=([\d.]+),read_noise=([\d.]+)`", text)
    assert found and [float(number) for number in found.groups()] == pytest.approx([0.5, 2], rel=0.1)
    text = run("data", "noise", tmp_path / "repeats", "--repeats", "--black", 3)
    assert all(part in text for part in (f"gain={found[1]},read_noise=", ",black=3`", "noise, if 3 is black"))
    assert re.search(r"values of the pixels +\S+ to \S+ \(\S+ to \S+ for 98% of them\)", text)
    assert "`repeats`" in run("data", "noise", tmp_path / "clean")  # no flat parts: how to measure the gain
    sensor = f"range=10,70,gain={found[1]},read_noise={found[2]}"
    clean = f"{tmp_path}/clean:sigma=0"
    run("data", "pack", clean, tmp_path / "repeats", "--all", sensor, "-o", tmp_path / "s")
    assert len(open_store(tmp_path / "s").sigma_tn.unique()) == 2
    outside = re.search(r"recorded levels +(\d+)% are outside", run("data", "noise", tmp_path / "s"))
    assert outside and int(outside[1]) < 25


def test_dark_frames_tell_black_and_read_noise_only(tmp_path: Path) -> None:
    (tmp_path / "dark").mkdir()
    for i, frame in enumerate(np.random.default_rng(0).normal(256.3, 9, (5, 32, 32))):
        tifffile.imwrite(tmp_path / "dark" / f"{i}.tif", np.rint(frame).astype(np.uint16))
    for repeats in (False, True):
        found = audit(read_any(str(tmp_path / "dark")), repeats=repeats)
        rows = dict(found.rows())
        assert found.mean == pytest.approx(256.3, abs=0.4) and found.group.value == pytest.approx(9, rel=0.05)
        assert rows["mean value"] == f"{found.mean:.5g}" and "unknown" in rows["gain and read noise"]


def test_images_that_break_the_model(tmp_path: Path) -> None:
    rng, light = np.random.default_rng(0), 100 * (fashion()[:100, 0].numpy() + 1.2)
    np.save(tmp_path / "a.npy", rng.poisson(light).clip(0, 210).astype(np.uint16))
    text = run("data", "noise", tmp_path / "a.npy", "--shared", "--levels", tmp_path / "l.csv")
    assert "leave out `shared`" in text
    assert "are clipped" in text and re.search("rounded to steps of +1 ", text)
    assert "depends on the signal" in text and re.search(r"Pack with `:range=\d+,210,gain=[\d.]+,", text)
    rows = list(csv.DictReader((tmp_path / "l.csv").open()))
    assert len({row["sigma"] for row in rows}) == 1
    small = np.zeros((3, 7, 7), np.uint8)
    np.save(tmp_path / "b.npy", small)
    assert "8 x 8 and more" in str(failing("data", "noise", tmp_path / "b.npy"))
    assert failing("data", "noise", tmp_path / "a.npy", "--clean", tmp_path / "b.npy").key == "clean"
    smooth = gaussian_filter(rng.standard_normal((40, 32, 32)), (0, 0.7, 0.7), mode="wrap").astype(np.float32)
    np.save(tmp_path / "c.npy", smooth)
    assert "neighbouring pixels is correlated" in run("data", "noise", tmp_path / "c.npy")
    rows, columns = np.mgrid[:32, :32]
    wave, turn, phase = rng.uniform([0.8, 0, 0], [2.2, np.pi, 6], (48, 3)).T[..., None, None]
    waves = 5 * np.sin(wave * (rows * np.sin(turn) + columns * np.cos(turn)) + phase)
    found = measure_noise(waves + rng.standard_normal(waves.shape))
    assert "but not to within a factor of 10:" in dict(found.rows())["measured"] and found.warnings() == []
    rounded = (rng.standard_normal((40, 32, 32)) / 5).round() * 10 + 50
    np.save(tmp_path / "d.npy", rounded.astype(np.float32))
    assert "rounded to steps of" in run("data", "noise", tmp_path / "d.npy")


def test_the_noise_of_a_store_is_that_of_its_noisy_images() -> None:
    """Nor do levels of images that differ with their brightness pass for noise that depends on the signal."""
    rng, bright = np.random.default_rng(0), np.linspace(0.1, 0.9, 80)[:, None, None]
    light = bright + np.linspace(-0.1, 0.1, 32)[:, None] + np.zeros(32)
    x = light + np.where(bright < 0.5, 0.02, 0.04) * rng.standard_normal(light.shape)
    assert "Pack with" not in repr(audit(raw_images(x)))
    known = replace(raw_images(x), noise=lambda i: Level(0.02 if i < 40 else 0.0))
    assert audit(known).warnings() == []


def sky(sigma: float, num_images: int = 40) -> np.ndarray:
    """Smooth images (N, 24, 24) with noise."""
    ramp, rng = np.linspace(0, 1, 24), np.random.default_rng(0)
    scenes = np.add.outer(rng.uniform(50, 150, num_images), np.add.outer(20 * ramp, 40 * ramp))
    return scenes + sigma * rng.normal(size=scenes.shape)


def test_stripes_are_told_and_texture_is_none() -> None:
    offset = np.random.default_rng(1).normal(size=(40, 24, 1))
    assert not measure_noise(sky(5)).stripes
    for shared, which in ((5 * offset, "rows"), (5 * offset.swapaxes(1, 2), "columns")):
        (told,) = measure_noise(sky(5) + shared).warnings()
        assert told.startswith(f"{which} of pixels share noise of about 1 times that of a pixel")
    textured = brick()[:384, :384].reshape(16, 24, 16, 24).swapaxes(1, 2).reshape(-1, 24, 24)
    assert not measure_noise(textured + np.random.default_rng(2).normal(0, 4, (256, 24, 24))).stripes


def test_files_that_lost_their_noise_are_told(tmp_path: Path) -> None:
    for i, image in enumerate(sky(10)):
        Image.fromarray(np.rint(image).astype(np.uint8)).save(tmp_path / f"{i}.jpg", quality=90)
    told = audit(read_any(str(tmp_path))).warnings()
    assert any("40 files are compressed with loss (0.jpg)" in text for text in told)
    assert not any("Pack with" in text for text in told)


def test_recorded_levels_that_are_not_those_measured_are_told() -> None:
    def records(sigma: list[float]) -> Audit:
        return audit(replace(raw_images(sky(5)), noise=lambda i: Level(sigma[i])))

    assert not records([5.0] * 40).warnings()
    (told,) = records([6.5] * 40).warnings()
    assert re.search(r"^\d+% of recorded levels .* \(typically 6.5, where (4.9\d|5|5.0\d) is measured\)", told)
    some = dict(records([0.0] * 10 + [2.0] * 30).rows())
    assert re.match(r"(9|10) of 10 surely have more noise than the least level, 2$", some["recorded as clean"])


@pytest.mark.parametrize("sigma", [0.8, 1.6, 2.4, 5.0])
def test_the_level_of_images_without_flat_parts_is_known_by_clean_ones(sigma: float) -> None:
    rng = np.random.default_rng(0)
    digits = load_digits().images[rng.permutation(1797)]
    noisy = digits[898:] + sigma * rng.normal(size=(899, 8, 8))
    assert measure_noise(noisy).group.low == 0 and measure_noise(noisy).group.high > sigma
    by_clean = measure_noise(noisy, clean=digits[:898]).group
    assert by_clean.low < sigma < by_clean.high and (by_clean.low == 0) == (sigma < 2)


def test_clean_examples_of_another_size_are_rejected() -> None:
    with rejected("clean"):
        measure_noise(sky(5), clean=sky(0)[:, :16, :16])


@pytest.mark.parametrize("num_images", [1, 3])
def test_few_frames_tell_the_gain_as_vaguely_as_they_do(num_images: int) -> None:
    """Residuals of a line through one image add up to 0, which passed for certainty."""
    rng, held, invented, shape = np.random.default_rng(0), 0, 0, (num_images, 192, 192)
    y, x = np.mgrid[:192, :192] / 192
    for _ in range(6):
        light = 80 + 60 * np.sin(6 * x + rng.uniform(0, 6)) * np.cos(5 * y + rng.uniform(0, 6))
        dark = 137 + 5.2 * rng.standard_normal(shape)
        lit, unlit = (
            measure_noise(np.round(frames), black=137)
            for frames in (dark + 1.7 * rng.poisson(light, shape), dark)
        )
        assert lit.sensor is not None
        held += lit.sensor.gain.low <= 1.7 <= lit.sensor.gain.high
        invented += unlit.sensor is not None and unlit.sensor.gain.low > 0
    assert held >= 5 and invented <= 1
