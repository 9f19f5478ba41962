"""Sensors that count photons: stabilised noise, the unbiased way back, and stores that remember both."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

from assay.checkpoint import CheckpointInfo, load_checkpoint
from assay.data.audit import audit, images_of
from assay.data.export import open_target, to_values
from assay.data.known import get
from assay.data.pack import pack
from assay.data.readers import read_any
from assay.data.spec import SourceSpec
from assay.data.units import Stabilised, _expected
from assay.sample import edm_sigmas, generate
from tests.commands import failing, run
from tests.test_generate import gaussian_checkpoint

SENSORS = [(1.0, 0.0, 0.0), (2.0, 1.0, 100.0), (0.5, 1.5, -3.0), (3.0, 30.0, 0.0)]  # gain, read noise, black


def anscombe(y: np.ndarray, s: float) -> np.ndarray:
    return 2 * np.sqrt(np.maximum(0, y + 3 / 8 + s**2))


@pytest.mark.parametrize("s", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("count", [0.0, 0.3, 4.0, 40.0, 130.0])
def test_expected_value_is_that_of_the_two_laws(count: float, s: float) -> None:
    k = np.arange(250)
    chance = stats.poisson.pmf(k, count)
    if s == 0:
        wanted = chance @ anscombe(k, 0)
    else:
        kink = np.clip(-(k + 3 / 8 + s**2) / s, -9, 9)  # where f begins to grow

        def mean(i: int) -> float:
            of_z = lambda z: float(anscombe(np.array(k[i] + s * z), s)) * stats.norm.pdf(z)  # noqa: E731
            return integrate.quad(of_z, kink[i], 9, limit=200)[0]

        wanted = sum(chance[i] * mean(i) for i in range(250) if chance[i] > 1e-9)
    assert float(_expected(np.array(count), s)) == pytest.approx(wanted, abs=2e-5)


@pytest.mark.parametrize(("gain", "read_noise", "black"), SENSORS)
def test_stabilised_noise_has_its_level_above_five_photons(
    gain: float, read_noise: float, black: float
) -> None:
    sensor = Stabilised(black, black + 1000 * gain, gain, read_noise, black)
    rng = np.random.default_rng(0)
    for count in (5, 7, 12, 40, 300):
        values = black + gain * rng.poisson(count, 200_000) + read_noise * rng.standard_normal(200_000)
        images = sensor.noisy_to_images(values)
        assert images.std() == pytest.approx(sensor.sigma_tn, rel=0.03)
        clean = sensor.clean_to_images(np.array([black + gain * count]))
        error = 5 * sensor.sigma_tn / math.sqrt(len(images))
        assert images.mean() == pytest.approx(clean[0], abs=error)  # noisy images scatter around clean ones
        mean = sensor.to_physical(images.mean(keepdims=True))[0]
        assert mean == pytest.approx(black + gain * count, rel=0.01)


@given(st.sampled_from(SENSORS), st.lists(st.floats(0, 60_000), min_size=1, max_size=20))
def test_the_way_back_is_the_inverse(sensor: tuple[float, float, float], counts: list[float]) -> None:
    gain, read_noise, black = sensor
    units = Stabilised(black - 5, black + 4000 * gain, gain, read_noise, black)
    values = black + gain * np.array(counts)
    back = units.to_physical(units.clean_to_images(values))
    np.testing.assert_allclose(back, values, rtol=1e-5, atol=2e-3 * gain)
    ends = units.clean_to_images(np.array([black, units.high]))
    np.testing.assert_allclose(ends, [-1, 1], atol=1e-12)


def test_settings_that_make_no_sensor() -> None:
    for wrong in ((0, 1, 0.0), (0, 1, -1), (0, 1, math.nan), (0, 1, 1, -1), (0, 1, 1, 0, 2), (1, 0, 1)):
        with pytest.raises(ValueError):
            Stabilised(*wrong)


def write_photons(folder: Path, num_images: int = 120) -> tuple[np.ndarray, Stabilised]:
    """Clean and noisy exposures of clothes, as two arrays; at most 60 photons."""
    rng, sensor = np.random.default_rng(0), Stabilised(100, 250, 2.0, 3.0, 100)
    clothes = get("fashion-mnist", folder / "x", num_images=num_images).store
    x = clothes.read(torch.arange(num_images))[:, 0].numpy()
    light = 5 + 30 * (x + 1)
    np.save(folder / "clean.npy", (100 + 2 * light).astype(np.float32))
    noisy = 100 + 2 * rng.poisson(light) + 3 * rng.standard_normal(light.shape)
    np.save(folder / "noisy.npy", noisy.astype(np.float32))
    return light, sensor


def photons(path: Path, sensor: Stabilised) -> SourceSpec:
    ends, noise = (sensor.low, sensor.high), {"read_noise": sensor.read_noise, "black": sensor.black}
    return SourceSpec(path=str(path), range=ends, gain=sensor.gain, **noise)


def test_packed_noise_has_its_label(tmp_path: Path) -> None:
    light, sensor = write_photons(tmp_path)
    sources = [
        photons(tmp_path / "clean.npy", sensor).model_copy(update={"sigma": 0.0}),
        photons(tmp_path / "noisy.npy", sensor),
    ]
    store = pack(sources, tmp_path / "s").store
    n = len(light)
    assert store.physical_range == sensor and store.meta.dtype == "float32"
    assert store.sigma_tn.tolist() == pytest.approx([0] * n + [sensor.sigma_tn] * n)
    x = store.read(torch.arange(2 * n))[:, 0].numpy()
    noise = x[n:] - x[:n]
    for low, high in ((5, 6), (6, 12), (12, 25), (25, 45), (45, 66)):
        inside = (light >= low) & (light < high)
        assert noise[inside].std() == pytest.approx(sensor.sigma_tn, rel=0.03)
        assert abs(noise[inside].mean()) < 5 * sensor.sigma_tn / math.sqrt(inside.sum())
    # The physical mean comes back, in files too, and the checkpoint remembers the units.
    values = to_values(torch.from_numpy(x[:n, None]), "float32", store.physical_range)[..., 0]
    np.testing.assert_allclose(values, 100 + 2 * light, rtol=1e-4)
    target = open_target(tmp_path / "out", 1, sensor, "npy", "float32")
    target.write_job({"a": 1})
    target.check_job({"a": 1})
    info = CheckpointInfo(sigma_tn=((0.0, 1.0),), clean_fraction=1.0, physical_range=sensor)
    assert CheckpointInfo.model_validate_json(info.model_dump_json()) == info
    # Measured again, the noise no longer depends on the signal.
    before = audit(read_any(str(tmp_path / "noisy.npy")))
    after = audit(images_of(store))
    assert before.sensor is not None and before.sensor.dependence() > 2
    assert any("gain" in text for text in before.warnings())
    assert after.sensor is None or after.sensor.dependence() < 1.3


def test_samples_and_denoised_images_are_in_the_units_of_the_files(tmp_path: Path) -> None:
    sensor, rng = Stabilised(100, 250, 2.0, 3.0, 100), np.random.default_rng(0)
    light = np.tile(rng.uniform(6, 60, (8, 6)), (300, 1, 1))
    noisy = 100 + 2 * rng.poisson(light) + 3 * rng.standard_normal(light.shape)
    np.save(tmp_path / "noisy.npy", noisy.astype(np.float32))
    store = pack(photons(tmp_path / "noisy.npy", sensor), tmp_path / "s").store
    checkpoint = gaussian_checkpoint(tmp_path, physical_range=sensor)
    run("sample", checkpoint, "--seeds", "0-3", "--num-steps", 4, "-o", tmp_path / "a.npy")
    run("denoise", checkpoint, store.path, "-o", tmp_path / "b.npy")
    sampled, denoised = np.load(tmp_path / "a.npy"), np.load(tmp_path / "b.npy")
    denoiser = load_checkpoint(checkpoint).denoiser.eval()
    x = next(generate(denoiser, range(4), (1, 8, 6), edm_sigmas(4)))
    np.testing.assert_allclose(sampled, sensor.to_physical(x.numpy())[:, 0], rtol=1e-5)
    shrink = 0.25 / (0.25 + sensor.sigma_tn**2)  # the exact denoiser of this network's images
    x_0_hat = shrink * store.read(torch.arange(300)).numpy()
    np.testing.assert_allclose(denoised, sensor.to_physical(x_0_hat)[:, 0], rtol=1e-5)
    # Of the mean of noisy images, which is what a denoiser sees at best, the inverse has no bias.
    mean = store.read(torch.arange(300)).double().mean(0).numpy()
    error = (sensor.to_physical(mean)[0] - (100 + 2 * light[0])) / np.sqrt((4 * light[0] + 9) / 300)
    assert abs(error.mean()) < 4 / math.sqrt(48) and np.square(error).mean() < 1.6


def test_the_command(tmp_path: Path) -> None:
    write_photons(tmp_path, 20)
    clean, noisy, store = (tmp_path / name for name in ("clean.npy", "noisy.npy", "s"))
    settings = "range=100,250,gain=2,read_noise=3,black=100"
    text = run("data", "pack", f"{clean}:sigma=0", noisy, "--all", settings, "-o", store)
    assert "40 grey images" in text
    assert "gain 2, read noise 3 and 100 for no light" in run("data", "show", store)
    for words in ((f"{noisy}:{settings}", clean), (f"{noisy}:{settings}", "--dtype", "uint8")):  # beside linear
        failing("data", "pack", *words, "-o", tmp_path / "t")
