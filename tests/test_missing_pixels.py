"""Missing pixels: the posterior is exact on Gaussian data, and rounds begin with a Gaussian."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from assay.data import Restored, Store, open_store
from assay.data.pack import pack
from assay.data.spec import SourceSpec
from assay.data.store import PackedImage, write_store
from assay.data.view import with_uniform_noise
from assay.denoise import Conditioned, GaussianDenoiser
from assay.generate import RestoreConfig, restore, restore_store
from assay.metrics.held_out import held_out_loss
from assay.train import read_config, train
from assay.train.gaussian import fit_gaussian
from tests.errors import rejects

SHAPE, DIMS, NOISE = (1, 3, 3), 9, 0.05
INF = float("inf")


def gaussian(num_factors: int = 2, dtype: torch.dtype = torch.float32) -> tuple[GaussianDenoiser, Tensor]:
    """The denoiser of Gaussian images, and their covariance (D, D)."""
    factors = torch.randn(num_factors, *SHAPE, generator=torch.Generator().manual_seed(1), dtype=dtype) / 2
    mean, variance = torch.linspace(-0.5, 0.5, DIMS, dtype=dtype), torch.linspace(0.02, 0.1, DIMS, dtype=dtype)
    model = GaussianDenoiser(mean.view(SHAPE), factors, variance.view(SHAPE))
    return model, factors.flatten(1).T @ factors.flatten(1) + variance.diag()


def draws(num: int, seed: int = 0) -> Tensor:
    model, cov = gaussian()
    root = torch.linalg.cholesky(cov)
    eps = torch.randn(num, DIMS, generator=torch.Generator().manual_seed(seed))
    return model.mean + (eps @ root.T).view(num, *SHAPE)


def store_of(path: Path, y: Tensor, levels: Tensor) -> Store:
    """Images with maps of levels; the level of an image is the highest that is finite."""
    finite = levels.where(levels.isfinite(), 0).flatten(1).amax(1)
    images = (
        PackedImage(str(i), y[i].numpy(), float(finite[i]), -1, sigma_map=levels[i].numpy())
        for i in range(len(y))
    )
    return write_store(path, path.name, images, SHAPE, "float32", (-1, 1), ())


def masked(path: Path, num: int, rate: float = 0.5) -> Store:
    generator = torch.Generator().manual_seed(5)
    seen = torch.rand(num, *SHAPE, generator=generator) >= rate
    seen[:, 0, 0, 0] = True
    y = draws(num) + NOISE * torch.randn(num, *SHAPE, generator=generator)
    return store_of(path, y.where(seen, 7.0), torch.where(seen, NOISE, INF))


def test_the_gaussian_denoiser_is_exact() -> None:
    model, cov = gaussian(dtype=torch.float64)
    x_t = torch.randn(5, *SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sigma_t = torch.tensor([0.01, 0.3, 1, 5, 80], dtype=torch.float64)
    mean = model.mean.flatten()
    for found, x, sigma in zip(model(x_t, sigma_t), x_t, sigma_t, strict=True):
        gain = cov @ torch.linalg.inv(cov + sigma**2 * torch.eye(DIMS, dtype=torch.float64))
        torch.testing.assert_close(found.flatten(), mean + gain @ (x.flatten() - mean))


@pytest.mark.parametrize(
    "operator",
    [
        lambda x: F.avg_pool2d(F.pad(x, [1] * 4, mode="replicate"), 3, stride=1),
        lambda x: F.avg_pool2d(x, 2, stride=1),
        lambda x: torch.view_as_real(torch.fft.fft2(x, norm="ortho"))[..., 0],
    ],
    ids=["blur", "fewer pixels", "half of the k-space"],
)
def test_a_linear_operator_gives_the_gaussian_posterior(operator: Any) -> None:
    model, cov = gaussian(dtype=torch.float64)
    mean, unit = model.mean.flatten(), torch.eye(DIMS, dtype=torch.float64)
    matrix = torch.stack([operator(each.view(1, *SHAPE)).flatten() for each in unit], 1)  # (M, D)
    y = operator(torch.randn(1, *SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    noise = 0.1 + 0.1 * torch.arange(y.numel(), dtype=torch.float64).view_as(y) / y.numel()
    noise[0, 0, 0, 0] = INF
    used = noise.flatten().isfinite()
    a, s = matrix[used], noise.flatten()[used]
    gain = cov @ a.T @ torch.linalg.inv(a @ cov @ a.T + torch.diag(s**2))
    mean_y, cov_y = mean + gain @ (y.flatten()[used] - a @ mean), cov - gain @ a @ cov
    x_t = torch.randn(1, *SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for sigma in (0.1, 1.0, 10.0):
        exact = mean_y + cov_y @ torch.linalg.inv(cov_y + sigma**2 * unit) @ (x_t.flatten() - mean_y)
        known = Conditioned(model, y, noise, num_steps=12, operator=operator)
        found = known(x_t, torch.tensor([sigma]).double())
        torch.testing.assert_close(found.flatten(), exact, rtol=1e-6, atol=1e-6)


def test_a_derivative_that_is_no_covariance_does_no_harm() -> None:
    slopes = torch.tensor([0.5, -0.01, 0.3, -0.2, 0.1, 0.0, 0.4, -0.0101, 0.2]).view(SHAPE)
    y, noise = (
        torch.ones(2, *SHAPE),
        torch.full((2, *SHAPE), 0.1),
    )  # noise^2 cancels -0.01: the system is singular
    for num_steps in (1, 2, 5, 20):
        given = Conditioned(lambda x, sigma, label=None: slopes * x, y, noise, num_steps)
        assert given(torch.zeros_like(y), torch.ones(2)).abs().max() < 2


def test_restored_images_are_draws_from_the_gaussian_posterior(tmp_path: Path) -> None:
    model, cov = gaussian()
    seen = torch.tensor([True, False, True, False, False, True, False, True, False])
    y, noise = draws(1, seed=3)[0].flatten(), torch.where(seen, NOISE, INF)
    num = 3000
    source = store_of(
        tmp_path / "one", y.expand(num, DIMS).view(num, *SHAPE), noise.expand(num, 9).view(num, *SHAPE)
    )
    made = restore(model, source, tmp_path / "made", "exact", RestoreConfig(num_steps=24), batch_size=1000)
    drawn = made.read(torch.arange(num)).flatten(1)
    gain = cov[:, seen] @ torch.linalg.inv(cov[seen][:, seen] + NOISE**2 * torch.eye(int(seen.sum())))
    mean = model.mean.flatten() + gain @ (y - model.mean.flatten())[seen]
    cov_y = cov - gain @ cov[seen]
    assert (drawn.mean(0) - mean).abs().max() < 0.03
    assert (drawn.T.cov() - cov_y).abs().max() < 0.08 * cov_y.max()
    assert made.meta.num_clean == 0 and made.usable_from.min() == 80 and not made.sigma_tn.any()


def test_without_missing_pixels_images_are_restored_as_before(tmp_path: Path) -> None:
    model, _ = gaussian()
    y = draws(40) + 0.3 * torch.randn(40, *SHAPE, generator=torch.Generator().manual_seed(2))
    levels = torch.full((40, *SHAPE), 0.3)
    plain = write_store(
        tmp_path / "plain", "plain", [PackedImage(str(i), y[i].numpy(), 0.3, -1) for i in range(40)], SHAPE,
        "float32", (-1, 1), (),
    )  # fmt: skip
    expected = restore(model, plain, tmp_path / "expected", "exact").read(torch.arange(40))
    mapped = with_uniform_noise(store_of(tmp_path / "mapped", y, levels), allow_incomplete=True)
    assert torch.equal(restore(model, mapped, tmp_path / "a", "exact").read(torch.arange(40)), expected)
    # One image with a missing pixel changes nothing for the others.
    levels[7, 0, 1, 1] = INF
    mixed = store_of(tmp_path / "mixed", y, levels)
    found = restore(model, mixed, tmp_path / "b", "exact").read(torch.arange(40))
    changed = ((found - expected).abs() > 1e-4).flatten(1).any(1).nonzero()[:, 0].tolist()
    assert mixed.incomplete.nonzero()[:, 0].tolist() == changed == [7]
    with pytest.raises(ValueError, match="missing pixels"):
        restore(model, mixed, tmp_path / "c", "exact", RestoreConfig(keep=0.5))


def test_the_gaussian_is_found_from_a_part_of_the_pixels(tmp_path: Path) -> None:
    _, cov = gaussian()
    found = fit_gaussian(masked(tmp_path / "store", 3000), num_factors=3)
    factors = found.factors.flatten(1)
    assert (found.mean - draws(3000).mean(0)).abs().max() < 0.03  # of the same images, complete
    got = factors.T @ factors + found.variance.flatten().diag()
    assert torch.linalg.norm(got - cov) < 0.1 * torch.linalg.norm(cov)


def test_views_keep_pixels_missing_and_scores_reject_them(tmp_path: Path) -> None:
    store = masked(tmp_path / "store", 30)
    levels, every = torch.full((30, *SHAPE), 0.1), torch.arange(30)
    before = store.read_levels(every)
    uneven = store_of(
        tmp_path / "uneven", store.read(every), torch.where(before.isinf(), INF, levels * torch.rand(1))
    )
    even = with_uniform_noise(uneven, allow_incomplete=True)
    after = even.read_levels(every)
    assert torch.equal(after.isinf(), before.isinf())
    assert torch.equal(after[0][after[0].isfinite()].unique(), even.sigma_tn[:1])
    assert torch.equal(even.read(every)[before.isinf()], store.read(every)[before.isinf()])
    with pytest.raises(ValueError, match="missing pixels"):
        held_out_loss(gaussian()[0], store)


def test_packing_reads_masks_as_infinite_levels(tmp_path: Path) -> None:
    images = np.random.default_rng(0).uniform(0, 1, (4, 6, 6)).astype(np.float32)
    levels = np.where(np.random.default_rng(1).uniform(size=(4, 6, 6)) < 0.75, np.inf, 0.01).astype(np.float32)
    np.save(tmp_path / "images.npy", images)

    def packed(levels: np.ndarray) -> Store:
        np.save(tmp_path / "maps.npy", levels)
        spec = SourceSpec(path=str(tmp_path / "images.npy"), range=(0, 1), map=tmp_path / "maps.npy")
        return pack(spec, tmp_path / f"store{len(list(tmp_path.iterdir()))}").store

    store = packed(levels)
    assert store.incomplete.all() and torch.allclose(store.sigma_tn, torch.tensor(0.02))
    found = store.read_levels(torch.arange(4))
    assert torch.equal(found[:, 0].isinf(), torch.from_numpy(levels).isinf())
    for bad in (np.where(np.isinf(levels), np.inf, 0), levels * np.inf):  # would be clean; nothing is left
        with rejects("images.npy[0]", "map"):
            packed(bad.astype(np.float32))
    # What fills missing pixels does not matter: neither constants nor 1000 say anything about the noise.
    noisy = (0.5 + 0.2 * np.random.default_rng(2).normal(size=(4, 30, 30))).astype(np.float32)
    levels = np.tile(levels, (1, 5, 5))
    for fill in (0.5, 1000.0):
        np.save(tmp_path / "images.npy", np.where(np.isinf(levels), fill, noisy).astype(np.float32))
        assert torch.allclose(packed(levels * 20).sigma_tn, torch.tensor(0.4))
        with rejects("images.npy[0]", "sigma"):
            packed(levels * 100)  # noise of 1 where the pixels vary by 0.2


def test_loops_begin_with_a_gaussian_and_resume(tmp_path: Path) -> None:
    store = masked(tmp_path / "store", 40)
    net = {"kind": "mlp", "width": 16, "num_blocks": 1}
    settings = {"num_steps": 8, "batch_size": 8, "state_every": 4, "rounds": 1}
    config = read_config({"data": {"store": str(store.path)}, "net": net, "train": settings})
    whole = train(config, tmp_path / "whole")
    first = open_store(tmp_path / "whole/restored-0")
    assert first.meta.restored_from is not None and first.meta.restored_from.checkpoint == "a Gaussian"
    # What was measured with little noise stays, up to that noise.
    seen = store.read_levels(torch.arange(40))
    difference = (first.read(torch.arange(40)) - store.read(torch.arange(40)))[seen.isfinite()]
    assert difference.square().mean().sqrt() < 2 * NOISE
    source = with_uniform_noise(store, allow_incomplete=True)
    x, sigma_tn = Restored(source, first).read_at(torch.arange(4), torch.tensor([0.01, 0.3, 3, 50]))
    assert torch.equal(x, first.read(torch.arange(4))) and not sigma_tn.any()
    calls = 0

    def stop() -> bool:
        nonlocal calls
        calls += 1
        return calls in (2, 5, 9)

    while not train(config, tmp_path / "stopped", should_stop=stop).finished:
        pass
    name = "snapshots/final.safetensors"
    assert (tmp_path / "stopped" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    made = restore_store(whole.checkpoint, store.path, tmp_path / "made", RestoreConfig(num_steps=3))
    assert made.usable_from.min() == 80
