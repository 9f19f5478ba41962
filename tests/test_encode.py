"""Encoders: orthonormal, so that noise of sigma in pixels is noise of sigma in coefficients, exactly."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import assay
from assay.checkpoint import export_checkpoint
from assay.denoise import Preconditioned
from assay.encode import BlockCosines
from assay.nets import build_denoiser, measure_cost
from assay.train import read_config
from tests.commands import failing, run
from tests.errors import rejected

IMAGES = np.random.default_rng(0).uniform(-1, 1, (64, 8, 8))


@pytest.mark.parametrize(("side", "shape"), [(1, (1, 3, 4)), (2, (3, 4, 6)), (4, (2, 8, 4))])
def test_encoding_is_orthonormal(side: int, shape: tuple[int, int, int]) -> None:
    encoder, num = BlockCosines(side), math.prod(shape)
    every = torch.eye(num).view(num, *shape)
    matrix = encoder.encode(every)
    assert matrix.shape[1:] == encoder.shape(shape)
    # Columns of an orthogonal matrix: the covariance sigma^2 I of white noise stays sigma^2 I.
    torch.testing.assert_close(matrix.flatten(1) @ matrix.flatten(1).T, torch.eye(num), atol=1e-6, rtol=0)
    torch.testing.assert_close(encoder.decode(matrix), every, atol=1e-6, rtol=0)


def test_coefficients_are_means_and_differences_of_blocks() -> None:
    x = torch.arange(16.0).view(1, 1, 4, 4)
    z = BlockCosines(2).encode(x)
    a, b, c, d = x[..., ::2, ::2], x[..., ::2, 1::2], x[..., 1::2, ::2], x[..., 1::2, 1::2]
    haar = torch.cat([a + b + c + d, a - b + c - d, a + b - c - d, a - b - c + d], 1) / 2
    torch.testing.assert_close(z, haar)
    with rejected("net.encoder"):
        BlockCosines(3).shape((1, 4, 4))


def gaussian(mean: torch.Tensor, factors: torch.Tensor, x_t: torch.Tensor, sigma: float) -> torch.Tensor:
    """E[x_0 | x_t] = x_t - sigma^2 (C + sigma^2)^-1 (x_t - mean) with C = F^T F + 0.01."""
    f, eye = factors.flatten(1), torch.eye(mean.numel())
    gap = torch.linalg.solve(f.T @ f + (0.01 + sigma**2) * eye, (x_t - mean).flatten(1).T).T
    return x_t - sigma**2 * gap.view_as(x_t)


def test_the_exact_denoiser_of_coefficients_is_that_of_images() -> None:
    """E[x_0 | x_t] = E^T E[z_0 | z_t], here of a Gaussian."""
    generator, encoder = torch.Generator().manual_seed(0), BlockCosines(2)
    mean = torch.rand(1, 1, 4, 4, generator=generator)
    factors = torch.randn(5, 1, 4, 4, generator=generator) / 4
    x_t = torch.randn(40, 1, 4, 4, generator=generator)
    for sigma in (0.05, 0.3, 3.0):
        found = encoder.decode(gaussian(*map(encoder.encode, (mean, factors, x_t)), sigma))
        torch.testing.assert_close(found, gaussian(mean, factors, x_t, sigma), atol=1e-4, rtol=0)


@pytest.mark.parametrize("preset", ["mlp", "unet-tiny", "dit-small"])
def test_a_network_of_coefficients_is_preconditioned_as_one_of_pixels(preset: str) -> None:
    images = assay.from_arrays(IMAGES)
    chosen = read_config({"data": {"store": "-"}, "net": {"preset": preset, "encoder": "dct"}})
    config = chosen.net_config(images)
    inner = config.for_coefficients()
    assert config.image_shape == (1, 8, 8) and inner.image_shape == (4, 4, 4)
    denoiser, encoder = build_denoiser(config, seed=3), config.make_encoder()
    for weight in denoiser.parameters():
        torch.nn.init.normal_(weight, std=0.1, generator=torch.Generator().manual_seed(weight.numel()))
    x_t, sigma_t = images.read(torch.arange(5)), torch.linspace(0.1, 2, 5)
    of_coefficients = Preconditioned(denoiser.model, config.sigma_data)
    expected = encoder.decode(of_coefficients(encoder.encode(x_t), sigma_t))
    torch.testing.assert_close(denoiser(x_t, sigma_t), expected, atol=1e-5, rtol=1e-5)
    assert denoiser.state_dict().keys() == build_denoiser(inner).state_dict().keys()
    assert measure_cost(config) == measure_cost(inner)


def test_a_model_of_coefficients_is_saved_loaded_measured_and_makes_images(tmp_path: Path) -> None:
    images = assay.simulate(assay.from_arrays(IMAGES, name="mine"), clean_fraction=0.5, sigma=0.3)
    net = {"preset": "mlp", "width": 16, "num_blocks": 1, "encoder": "dct"}
    settings = {"num_steps": 3, "batch_size": 16, "augment": {"flip_x": True, "shift": 2}, "progress": False}
    model = assay.fit(images, tmp_path / "run", net=net, **settings)
    again = assay.load(model.save(tmp_path / "saved.safetensors"))
    assert again.checkpoint.config.encoder == "dct"
    found = again.sample(3, num_steps=3)
    assert found.shape == (3, 1, 8, 8) and torch.equal(found, model.sample(3, num_steps=3))
    assert again.denoise(images.read(torch.arange(2)), 0.3).shape == (2, 1, 8, 8)
    assert again.held_out_loss(assay.part(images, noisy=0)).nats_per_dim.value > 0
    assert again.evaluate(images, 40, "pixels", tmp_path / "cache", num_steps=2).fd > 0
    run("sample", tmp_path / "run", "-o", tmp_path / "images.npy", "--seeds", "0-2", "--num-steps", 2)
    assert np.load(tmp_path / "images.npy").shape[:3] == (3, 8, 8)
    with rejected("checkpoint"):
        export_checkpoint(again.checkpoint, tmp_path / "edm")
    assay.from_arrays(IMAGES[:, 1:]).save(tmp_path / "odd")
    for store, encoder in ((tmp_path / "odd", "dct"), ("digits", "jpeg")):
        arguments = ["train", store, "--set", f"net.encoder={encoder}", "-o", tmp_path / "no", "--dry-run"]
        assert failing(*arguments).key == "net.encoder"
