"""Encoders: orthonormal, so that noise of sigma in pixels is noise of sigma in coefficients, exactly."""

import math

import pytest
import torch

from assay.data import Augmentation, Encoded, Loader, simulate
from assay.data.arrays import from_arrays
from assay.denoise import GaussianDenoiser
from assay.encode import BlockCosines, InPixels
from assay.errors import AssayError
from assay.metrics.held_out import held_out_loss


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
    with pytest.raises(AssayError):
        BlockCosines(3).shape((1, 4, 4))


def test_a_model_of_coefficients_is_a_model_of_images() -> None:
    """The exact denoisers of a Gaussian in both coordinates agree, and so do their losses."""
    generator, encoder = torch.Generator().manual_seed(0), BlockCosines(2)
    mean, factors = torch.rand(1, 4, 4, generator=generator), torch.randn(5, 1, 4, 4, generator=generator) / 4
    x = mean + torch.einsum("nk,kchw->nchw", torch.randn(400, 5, generator=generator), factors)
    images = from_arrays((x + 0.1 * torch.randn(x.shape, generator=generator)).numpy())
    of_pixels = GaussianDenoiser(mean, factors, torch.full((1, 4, 4), 0.01))
    encoded = encoder.encode(mean[None])[0], encoder.encode(factors)
    of_coefficients = GaussianDenoiser(*encoded, torch.full((4, 2, 2), 0.01))
    sigma = torch.linspace(0.05, 3, 400)
    found = InPixels(of_coefficients, encoder)(images.read(torch.arange(400)), sigma)
    torch.testing.assert_close(found, of_pixels(images.read(torch.arange(400)), sigma), atol=1e-4, rtol=0)
    losses = [
        held_out_loss(denoiser, source).nats_per_dim
        for denoiser, source in ((of_pixels, images), (of_coefficients, Encoded(images, encoder)))
    ]
    error = math.hypot(*(loss.standard_error for loss in losses))
    assert abs(losses[0].value - losses[1].value) < 3 * error


def test_encoded_sources_keep_levels_and_noise() -> None:
    encoder = BlockCosines(2)
    pixels = torch.rand(50, 6, 6, generator=torch.Generator().manual_seed(0))
    images = from_arrays(pixels.numpy(), value_range=(0, 1))
    noisy = simulate(images, 0.2, 0.3)
    encoded = Encoded(noisy, encoder)
    assert encoded.image_shape == (4, 3, 3) and torch.equal(encoded.sigma_tn, noisy.sigma_tn)
    batch, plain = Loader(encoded, 16).batch(3), Loader(noisy, 16).batch(3)
    assert torch.equal(batch.index, plain.index) and torch.equal(batch.sigma_t, plain.sigma_t)
    torch.testing.assert_close(encoder.decode(batch.x_tn), plain.x_tn)
    assert encoded.fingerprint != noisy.fingerprint
    with pytest.raises(AssayError) as caught:
        Loader(encoded, 16, augmentation=Augmentation(flip_x=True))
    assert caught.value.key == "augment"
