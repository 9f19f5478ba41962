"""Maps of noise levels, one per pixel: the loss, views, loading, packing and training."""

from pathlib import Path

import numpy as np
import pytest
import torch
from astropy.io import fits

from assay.data import Augmentation, Loader, Store, open_store
from assay.data.pack import pack
from assay.data.spec import SourceSpec
from assay.data.view import Joined, View, with_uniform_noise
from assay.errors import AssayError
from assay.loss import ambient_loss
from assay.metrics.held_out import held_out_loss
from assay.noise import add_noise
from assay.train import train
from assay.train.config import read_config
from tests.commands import failing, run
from tests.errors import rejected
from tests.stores import stored

SHAPE = (1, 4, 4)


def maps(number: int, seed: int = 0, low: float = 0.1, high: float = 0.5) -> np.ndarray:
    """(number, 1, 4, 4) float32, uniform in [low, high)."""
    return np.random.default_rng(seed).uniform(low, high, (number, *SHAPE)).astype(np.float32)


def mapped_store(path: Path, levels: np.ndarray, num_clean: int = 0, quantile: float = 1.0) -> Store:
    """Images that are nothing but their noise, each with its map, after clean ones."""
    noise = levels * np.random.default_rng(1).standard_normal(levels.shape)
    values = np.concatenate([np.zeros((num_clean, *SHAPE)), noise])
    sigma = [0.0] * num_clean + np.quantile(levels, quantile, (1, 2, 3)).tolist()
    return stored(path, values, sigma, maps=[None] * num_clean + list(levels))


def exact_moments(num_dims: int) -> torch.Tensor:
    """(2 D, D) float64 with mean 0 and covariance I exactly, so that means of quadratics are expectations."""
    eye = num_dims**0.5 * torch.eye(num_dims, dtype=torch.float64)
    return torch.cat([eye, -eye])


def test_the_minimiser_of_the_loss_is_the_posterior_mean() -> None:
    """Gaussian x_0 with correlated pixels: E[x_0 | x_t] = m + S (S + sigma_t^2 I)^-1 (x_t - m)."""
    num_pixels, sigma = 16, 0.7
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(num_pixels, num_pixels, dtype=torch.float64, generator=generator) / 4
    mean = torch.randn(num_pixels, dtype=torch.float64, generator=generator)
    levels = torch.from_numpy(maps(1)[0].astype(np.float64)).flatten()
    u, z, eps = exact_moments(3 * num_pixels).split(num_pixels, 1)
    x_tn = mean + u @ root.T + levels * z
    cov = root @ root.T
    gain = cov @ torch.linalg.inv(cov + sigma**2 * torch.eye(num_pixels, dtype=torch.float64))

    def gradients(sigma_tn: torch.Tensor) -> list[torch.Tensor]:
        weight, bias = gain.clone().requires_grad_(), (mean - gain @ mean).clone().requires_grad_()

        def denoiser(x: torch.Tensor, sigma_t: torch.Tensor, label: object = None) -> torch.Tensor:
            return (x.flatten(1) @ weight.T + bias).view_as(x)

        shaped = [part.view(-1, *SHAPE) for part in (x_tn, eps)]
        sigma_t = torch.full((len(x_tn),), sigma, dtype=torch.float64)
        ambient_loss(denoiser, shaped[0], sigma_tn, sigma_t, shaped[1]).mean().backward()
        assert weight.grad is not None and bias.grad is not None
        return [weight.grad, bias.grad]

    for found in gradients(levels.view(1, *SHAPE).expand(len(x_tn), -1, -1, -1)):
        assert found.abs().max() < 1e-12
    one_level = torch.full((len(x_tn),), float(levels.square().mean().sqrt()), dtype=torch.float64)
    assert gradients(one_level)[0].abs().max() > 1e-3  # what a single level would make of it


def test_a_constant_map_is_a_level_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    x_tn, eps = torch.randn(2, 6, 3, 4, 4, generator=generator)
    sigma_tn = torch.rand(6, generator=generator)
    sigma_t = sigma_tn + torch.rand(6, generator=generator)

    def denoiser(x: torch.Tensor, sigma: torch.Tensor, label: object = None) -> torch.Tensor:
        return 0.5 * x

    for shape in ((6, 1, 4, 4), (6, 3, 4, 4)):
        levels = sigma_tn[:, None, None, None].expand(shape)
        assert torch.equal(add_noise(x_tn, levels, sigma_t, eps), add_noise(x_tn, sigma_tn, sigma_t, eps))
        losses = [ambient_loss(denoiser, x_tn, each, sigma_t, eps) for each in (levels, sigma_tn)]
        assert torch.equal(*losses)
    with pytest.raises(ValueError, match="one level per pixel"):
        add_noise(x_tn, torch.zeros(6, 2, 4, 4), sigma_t, eps)


def test_pixels_noisier_than_the_level_have_no_part_in_the_loss() -> None:
    x_tn, eps = torch.randn(2, 1, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    levels = torch.full((1, 1, 4, 4), 0.1)
    levels[..., 0, 0], levels[..., 3, 3] = 1e30, 0.5
    x_0_hat = torch.zeros_like(x_tn).requires_grad_()
    sigma_t = torch.tensor([0.3])
    loss = ambient_loss(lambda x, sigma, label=None: x_0_hat, x_tn, levels, sigma_t, eps)
    loss.sum().backward()
    assert x_0_hat.grad is not None and bool(loss.isfinite())
    assert torch.equal(x_0_hat.grad[0, 0] == 0, levels[0, 0] > 0.3)
    x_t = add_noise(x_tn, levels, sigma_t, eps)
    assert torch.equal((x_t == x_tn)[0, 0], levels[0, 0] > 0.3)


def test_views_raise_each_pixel_to_the_target(tmp_path: Path) -> None:
    levels = maps(200)
    store = mapped_store(tmp_path / "mapped", levels, num_clean=3)
    every = torch.arange(len(store))
    found = store.read_levels(every)
    assert torch.equal(found[3:], torch.from_numpy(levels)) and found[:3].max() == 0
    assert torch.equal(store.sigma_tn[3:], torch.from_numpy(levels).amax((1, 2, 3)))

    target = torch.where(store.sigma_tn > 0, 0.8, 0.0)
    raised = View(store, target=target)
    added = raised.read(every) - store.read(every)
    z = (added / (0.8**2 - found**2).sqrt())[3:]
    assert abs(z.mean()) < 0.05 and abs(z.std() - 1) < 0.03
    got = raised.read_levels(every)
    assert bool((got[3:] == 0.8).all()) and got[:3].max() == 0

    even = with_uniform_noise(store)
    assert not even.has_map and even.fingerprint != View(store).fingerprint
    unit = even.read(every)[3:] / even.sigma_tn[3:, None, None, None]
    assert abs(unit.std() - 1) < 0.03 and torch.equal(even.read(every)[:3], store.read(every)[:3])

    scalar = stored(tmp_path / "scalar", np.zeros((2, *SHAPE)), 0.3)
    both = Joined([scalar, store]).read_levels(torch.tensor([1, 5]))
    assert bool((both[0] == 0.3).all()) and torch.equal(both[1], found[3])
    assert not scalar.has_map and with_uniform_noise(scalar) is scalar

    hot = with_uniform_noise(mapped_store(tmp_path / "hot", levels[:5], quantile=0.5))
    with rejected("quantile"):
        hot.read(torch.arange(5))


def test_equal_maps_are_stored_once(tmp_path: Path) -> None:
    store = mapped_store(tmp_path / "detector", maps(2)[[0, 1, 0, 0]])
    assert np.load(tmp_path / "detector/sigma_map.npy").shape == (2, *SHAPE)
    assert np.load(tmp_path / "detector/map_index.npy").tolist() == [0, 1, 0, 0]
    store.verify()
    with pytest.raises(AssayError):
        stored(tmp_path / "wrong", np.zeros((1, *SHAPE)), 0.1, maps=np.zeros((1, 1, 2, 2)))


def test_a_map_moves_with_its_image(tmp_path: Path) -> None:
    store = stored(tmp_path / "same", maps(8), 0.5, maps=maps(8))
    moves = Augmentation(flip_x=True, flip_y=True, turn=True, shift=2)
    batch = Loader(store, 8, augmentation=moves).batch(3)
    assert batch.sigma_map is not None and torch.equal(batch.x_tn, batch.sigma_map)
    assert torch.equal(batch.levels, batch.sigma_map) and not torch.equal(batch.x_tn, store.read(batch.index))


def test_training_and_scoring_with_maps(tmp_path: Path) -> None:
    store = mapped_store(tmp_path / "mapped", maps(40), num_clean=24)
    net, settings = {"preset": "mlp", "width": 16, "num_blocks": 1}, {"num_steps": 6, "batch_size": 16}
    more = {"consistency": {"coefficient": 1.0}, "augment": {"flip_x": True}}
    config = read_config({"data": {"store": str(store.path)}, "net": net, "train": {**settings, **more}})
    assert train(config, tmp_path / "run", config.data.open()).finished
    result = held_out_loss(lambda x, sigma, label=None: torch.zeros_like(x), store)
    # The images are 0, so that this denoiser is exact; only the known part of the residual varies.
    assert abs(result.nats_per_dim.value) < 4 * result.nats_per_dim.standard_error


def test_packing_maps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the files' units; for all images, for each, and of a FITS extension; patches cut the map, too."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    levels = rng.uniform(5, 20, (8, 8)).astype(np.float32)  # pixels from 0 to 100: 0.1 to 0.4
    frames = (50 + levels * rng.standard_normal((6, 8, 8))).astype(np.float32)
    np.save("frames.npy", frames[..., None])
    np.save("map.npy", levels)
    np.save("maps.npy", np.stack([levels] * 6))
    of_all = "data pack frames.npy:range=0,100,layout=NHWC,map={}"
    run(*of_all.format("map.npy").split(), "-o", "all")
    run(*of_all.format("maps.npy").split(), "-o", "each")
    scaled = torch.from_numpy(levels / 50)
    for name in ("all", "each"):
        store = open_store(name)
        found = store.read_levels(torch.arange(6))
        assert torch.allclose(found, scaled.expand(6, 1, 8, 8))
        assert torch.allclose(store.sigma_tn, scaled.max().expand(6))
    run(*of_all.format("map.npy,quantile=0.5").split(), "-o", "patches", "--patch", "4x4")
    store = open_store("patches")
    found = store.read_levels(torch.tensor([1]))
    assert torch.allclose(found[0, 0], scaled[:4, 4:])
    assert float(store.sigma_tn[1]) == pytest.approx(float(scaled[:4, 4:].flatten().sort().values[7]))

    fits.HDUList([fits.PrimaryHDU(frames[0]), fits.ImageHDU(levels, name="ERR")]).writeto("frame.fits")
    run(*"data pack frame.fits:range=0,100,noise=ERR -o fits".split())
    found = open_store("fits").read_levels(torch.tensor([0]))
    assert torch.allclose(found[0, 0], scaled)

    assert "6 images have a map of noise levels" in run("data", "show", "all")

    np.save("small.npy", levels[:4])
    for name, value in (("inf.npy", np.inf), ("nan.npy", np.nan), ("negative.npy", -1.0)):
        np.save(name, np.where(levels == levels.max(), value, levels))
        assert failing(*of_all.format(name).split(), "-o", "x").key == "map"
    for wrong in ("small.npy", "map.npy,sigma=3"):
        failing(*of_all.format(wrong).split(), "-o", "x")
    with pytest.raises(FileNotFoundError):
        failing(*of_all.format("nothing.npy").split(), "-o", "x")


def test_maps_of_one_and_of_all_channels_make_one_store(tmp_path: Path) -> None:
    rng, shapes = np.random.default_rng(0), {"one": (4, 4), "all": (3, 4, 4)}
    sources = []
    for name, shape in shapes.items():
        np.save(tmp_path / f"{name}.npy", rng.uniform(0, 1, (5, 4, 4, 3)).astype(np.float32))
        np.save(tmp_path / f"{name}-levels.npy", rng.uniform(0.01, 0.1, shape).astype(np.float32))
        levels = tmp_path / f"{name}-levels.npy"
        sources.append(SourceSpec(path=str(tmp_path / f"{name}.npy"), range=(0, 1), map=levels))
    for number, order in enumerate((sources, sources[::-1])):
        store = pack(order, tmp_path / f"store{number}").store
        found = store.read_levels(torch.arange(10))
        for part, name in zip(found.split(5), list(shapes)[:: 1 - 2 * number], strict=True):
            expected = 2 * torch.from_numpy(np.load(tmp_path / f"{name}-levels.npy"))
            torch.testing.assert_close(part, expected.expand(5, 3, 4, 4))
