"""Incomplete images, with missing pixels or seen through kernels: exact on Gaussian data, and known to stores,
packing and rounds.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from assay.data import Joined, Restored, Store, View, open_store, raised
from assay.data.convert import PackConfig
from assay.data.pack import PackReport, pack, pack_shards
from assay.data.spec import SourceSpec
from assay.data.store import PackedImage, write_store
from assay.data.view import with_uniform_noise
from assay.denoise import Conditioned, GaussianDenoiser, convolution
from assay.errors import AssayError
from assay.files import content_hash, sha256
from assay.generate import RestoreConfig, restore, restore_store
from assay.metrics.held_out import held_out_loss
from assay.train import read_config, train
from assay.train.gaussian import fit_gaussian
from tests.commands import failing, run
from tests.errors import rejects
from tests.stores import stored

SHAPE, SIDE, DIMS, NOISE = (1, 4, 4), 4, 16, 0.05
INF = float("inf")


def gaussian(dtype: torch.dtype = torch.float32) -> tuple[GaussianDenoiser, Tensor]:
    """The denoiser of Gaussian images, and their covariance (D, D)."""
    factors = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(1), dtype=dtype) / 2
    mean, variance = torch.linspace(-0.5, 0.5, DIMS, dtype=dtype), torch.linspace(0.02, 0.1, DIMS, dtype=dtype)
    model = GaussianDenoiser(mean.view(SHAPE), factors, variance.view(SHAPE))
    return model, factors.flatten(1).T @ factors.flatten(1) + variance.diag()


def draws(num: int, generator: torch.Generator) -> Tensor:
    model, cov = gaussian()
    eps = torch.randn(num, DIMS, generator=generator)
    return model.mean + (eps @ torch.linalg.cholesky(cov).T).view(num, *SHAPE)


def circulant(kernel: Tensor) -> Tensor:
    """The matrix (H W, H W) of the circular convolution with a kernel (H, W), entry by entry."""
    height, width = kernel.shape
    matrix = torch.empty(height, width, height, width, dtype=kernel.dtype)
    for i, j, p, q in np.ndindex(height, width, height, width):
        matrix[i, j, p, q] = kernel[(i - p) % height, (j - q) % width]
    return matrix.view(height * width, -1)


def blurs(num: int) -> Tensor:
    """Kernels (num, H, W) of positive values that sum to 1, without a frequency that is lost."""
    kernel = torch.rand(num, SIDE, SIDE, generator=torch.Generator().manual_seed(2)) / 20
    kernel[:, 0, 0] += 0.5
    return kernel / kernel.sum((1, 2), keepdim=True)


def lines(num: int, rate: float = 0.5) -> Tensor:
    """Kernels of random lines of k-space, and of the mean."""
    mask = torch.rand(num, SIDE, 1, generator=torch.Generator().manual_seed(3)) < rate
    mask[:, 0] = True
    mask = (mask | mask.flip(1).roll(1, 1)).expand(num, SIDE, SIDE)
    return torch.fft.ifft2(mask.float()).real


def box() -> Tensor:
    kernel = torch.zeros(1, SIDE, SIDE)
    kernel[0, torch.tensor([0, 0, -1, -1]), torch.tensor([0, -1, 0, -1])] = 0.25
    return kernel


DELTA = torch.eye(1, DIMS).view(1, SIDE, SIDE)
EVERYTHING, EVERY_SECOND, BORDER = (torch.ones(SIDE, SIDE, dtype=torch.bool) for _ in range(3))
EVERY_SECOND[1::2], EVERY_SECOND[:, 1::2], BORDER[:, 0] = False, False, False


def seen_through(path: Path, kernel: Tensor) -> tuple[Store, Tensor]:
    """Gaussian images through kernels with noise, and the images."""
    generator = torch.Generator().manual_seed(5)
    x = draws(len(kernel), generator)
    y = convolution(kernel)(x) + NOISE * torch.randn(x.shape, generator=generator)
    return stored(path, y, NOISE, kernels=kernel), x


def masked(path: Path, num: int) -> tuple[Store, Tensor]:
    """Gaussian images with noise, half of whose pixels are missing, and the images."""
    generator = torch.Generator().manual_seed(5)
    seen = torch.rand(num, *SHAPE, generator=generator) >= 0.5
    seen[:, 0, 0, 0] = True
    x = draws(num, generator)
    y = x + NOISE * torch.randn(num, *SHAPE, generator=generator)
    return stored(path, y.where(seen, 7.0), NOISE, maps=torch.where(seen, NOISE, INF)), x


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 3), st.integers(0, 2**31 - 1))
def test_the_convolution_is_a_circulant_matrix(height: int, width: int, channels: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    kernel = torch.randn(2, height, width, generator=generator, dtype=torch.float64)
    x, v = torch.randn(2, 2, channels, height, width, generator=generator, dtype=torch.float64).unbind()
    x.requires_grad_(True)
    found = convolution(kernel)(x)
    (adjoint,) = torch.autograd.grad(found, x, v)
    for n in range(2):
        matrix = circulant(kernel[n])
        for c in range(channels):
            torch.testing.assert_close(found[n, c].flatten(), matrix @ x[n, c].flatten())
            torch.testing.assert_close(adjoint[n, c].flatten(), matrix.T @ v[n, c].flatten())


def test_the_gaussian_denoiser_is_exact() -> None:
    model, cov = gaussian(torch.float64)
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
    model, cov = gaussian(torch.float64)
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
        known = Conditioned(model, y, noise, num_steps=24, operator=operator)
        found = known(x_t, torch.tensor([sigma]).double())
        torch.testing.assert_close(found.flatten(), exact, rtol=1e-6, atol=1e-6)


def test_a_derivative_that_is_no_covariance_does_no_harm() -> None:
    slopes = torch.tensor([0.5, -0.01, 0.3, -0.2, 0.1, 0.0, 0.4, -0.0101] * 2).view(SHAPE)
    y, noise = torch.ones(2, *SHAPE), torch.full((2, *SHAPE), 0.1)  # noise^2 cancels -0.01: it is singular
    for num_steps in (1, 2, 5, 20):
        given = Conditioned(lambda x, sigma, label=None: slopes * x, y, noise, num_steps)
        assert given(torch.zeros_like(y), torch.ones(2)).abs().max() < 2


@pytest.mark.parametrize(
    ("kernel", "seen"),
    [
        (blurs(2), EVERYTHING),
        (blurs(2), BORDER),
        (lines(2), EVERYTHING),
        (torch.cat([box(), DELTA]), EVERY_SECOND),
        (DELTA.repeat(2, 1, 1), EVERYTHING),
        (None, EVERY_SECOND),
    ],
    ids=["blur", "blur without a border", "k-space", "fewer pixels", "identity", "missing pixels"],
)
def test_restored_images_are_draws_from_the_gaussian_posterior(
    tmp_path: Path, kernel: Tensor | None, seen: Tensor
) -> None:
    model, cov = gaussian()
    num, generator = 2000, torch.Generator().manual_seed(6)
    x, operator = draws(2, generator), DELTA.repeat(2, 1, 1) if kernel is None else kernel
    y = convolution(operator)(x) + NOISE * torch.randn(x.shape, generator=generator)
    maps = None if bool(seen.all()) else torch.where(seen, NOISE, INF).expand(2 * num, *SHAPE)
    kernels = None if kernel is None else kernel.repeat_interleave(num, 0)
    source = stored(tmp_path / "two", y.repeat_interleave(num, 0), NOISE, maps=maps, kernels=kernels)
    made = restore(model, source, tmp_path / "made", "exact", RestoreConfig(num_steps=64), batch_size=1000)
    assert made.meta.num_clean == 0 and made.usable_from.min() == 80 and not made.sigma_tn.any()
    for n in range(2):
        drawn = made.read(torch.arange(n * num, (n + 1) * num)).flatten(1)
        a = circulant(operator[n])[seen.flatten()]
        gain = cov @ a.T @ torch.linalg.inv(a @ cov @ a.T + NOISE**2 * torch.eye(len(a)))
        mean = model.mean.flatten() + gain @ (y[n].flatten()[seen.flatten()] - a @ model.mean.flatten())
        cov_y = cov - gain @ a @ cov
        assert ((drawn.mean(0) - mean) / cov_y.diagonal().sqrt()).abs().max() < 0.15
        assert (drawn.T.cov() - cov_y).abs().max() < 0.12 * cov_y.max()


def test_a_kernel_that_does_nothing_changes_nothing_about_missing_pixels(tmp_path: Path) -> None:
    model, (plain, _) = gaussian()[0], masked(tmp_path / "plain", 20)
    every = torch.arange(20)
    maps, kernels = plain.read_levels(every), DELTA.repeat(20, 1, 1)
    through = stored(tmp_path / "through", plain.read(every), NOISE, maps=maps, kernels=kernels)
    made = [restore(model, each, tmp_path / f"{each.name} made", "exact") for each in (plain, through)]
    expected, found = (each.read(every) for each in made)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_without_missing_pixels_images_are_restored_as_before(tmp_path: Path) -> None:
    (model, _), every, generator = gaussian(), torch.arange(40), torch.Generator().manual_seed(2)
    y = draws(40, generator) + 0.3 * torch.randn(40, *SHAPE, generator=generator)
    levels = torch.full((40, *SHAPE), 0.3)
    expected = restore(model, stored(tmp_path / "plain", y, 0.3), tmp_path / "expected", "exact").read(every)
    mapped = with_uniform_noise(stored(tmp_path / "mapped", y, 0.3, maps=levels), allow_incomplete=True)
    assert torch.equal(restore(model, mapped, tmp_path / "a", "exact").read(every), expected)
    # One image with a missing pixel changes nothing for the others.
    levels[7, 0, 1, 1] = INF
    mixed = stored(tmp_path / "mixed", y, 0.3, maps=levels)
    found = restore(model, mixed, tmp_path / "b", "exact").read(every)
    changed = ((found - expected).abs() > 1e-4).flatten(1).any(1).nonzero()[:, 0].tolist()
    assert mixed.incomplete.nonzero()[:, 0].tolist() == changed == [7]
    with rejects(key="keep"):
        restore(model, mixed, tmp_path / "c", "exact", RestoreConfig(keep=0.5))


def test_the_gaussian_is_found_from_incomplete_images(tmp_path: Path) -> None:
    _, cov = gaussian()

    def fitted(store: Store) -> tuple[Tensor, Tensor]:
        found = fit_gaussian(store, num_factors=3)
        factors = found.factors.flatten(1)
        return found.mean, factors.T @ factors + found.variance.flatten().diag()

    for store, x in (
        masked(tmp_path / "masked", 3000),
        seen_through(tmp_path / "lines", lines(1500)),
        seen_through(tmp_path / "blur", blurs(1500)),
    ):
        mean, got = fitted(store)
        assert torch.linalg.norm(got - cov) < 0.1 * torch.linalg.norm(cov), store.name
        assert (mean - x.mean(0)).abs().max() < (0.03 if store.has_map else 0.05), store.name
    # A frequency that the same kernel hides in all images stays unknown, and the others are found.
    mask = torch.ones(SIDE, SIDE)
    mask[2] = 0
    kernel = torch.fft.ifft2(mask).real
    _, got = fitted(seen_through(tmp_path / "hidden", kernel.expand(1500, SIDE, SIDE))[0])
    seen = circulant(kernel)
    assert torch.linalg.norm(seen @ (got - cov) @ seen) < 0.08 * torch.linalg.norm(cov)


def test_views_keep_pixels_missing_and_losses_reject_them(tmp_path: Path) -> None:
    store, every = masked(tmp_path / "store", 30)[0], torch.arange(30)
    missing = store.read_levels(every).isinf()
    levels = torch.rand(30, *SHAPE, generator=torch.Generator().manual_seed(0)).where(~missing, INF)
    uneven = stored(tmp_path / "uneven", store.read(every), 1.0, maps=levels)
    even = with_uniform_noise(uneven, allow_incomplete=True)
    after = even.read_levels(every)
    assert torch.equal(after.isinf(), missing) and bool((after[~missing] == 1).all())
    assert torch.equal(even.read(every)[missing], store.read(every)[missing])
    with pytest.raises(AssayError):
        held_out_loss(gaussian()[0], store)


def test_stores_views_and_shards_have_kernels(tmp_path: Path) -> None:
    store, every = seen_through(tmp_path / "store", blurs(2)[[0, 1, 0, 1, 0, 1]])[0], torch.arange(6)
    store.verify()
    assert np.load(tmp_path / "store/kernel.npy").shape == (2, SIDE, SIDE)  # equal ones once
    expected = blurs(2)[[0, 1, 0, 1, 0, 1]]
    assert torch.equal(store.read_kernel(every), expected) and not store.has_map  # type: ignore[arg-type]
    plain = stored(tmp_path / "plain", np.zeros((2, *SHAPE)), [0, 0.1])
    assert plain.read_kernel(every[:2]) is None and Joined([plain, plain]).read_kernel(every[:2]) is None
    assert Joined([plain, store]).incomplete.tolist() == [False] * 2 + [True] * 6
    found = Joined([plain, store]).read_kernel(torch.tensor([1, 3]))
    assert found is not None and torch.equal(found, torch.stack([DELTA[0], expected[1]]))
    chosen = raised(View(store, torch.tensor([5, 0])), 0.3)
    assert torch.equal(chosen.read_kernel(torch.tensor([0, 1])), expected[[5, 0]])  # type: ignore[arg-type]
    assert bool(chosen.incomplete.all()) and torch.equal(chosen.sigma_tn, torch.full((2,), 0.3))
    assert torch.equal(chosen.read_levels(every[:1]), torch.full((1, 1, SIDE, SIDE), 0.3))
    for reject in (with_uniform_noise, lambda source: held_out_loss(gaussian()[0], source)):
        with pytest.raises(AssayError):
            reject(store)
    with rejects(key="keep"):
        restore(gaussian()[0], store, tmp_path / "kept", "exact", RestoreConfig(keep=0.5))
    for sigma, kernel in ((0.1, np.full((SIDE, SIDE), np.nan)), (0.1, np.ones((3, 3))), (0.0, DELTA[0])):
        with pytest.raises(AssayError):  # the last counts as clean
            stored(tmp_path / "bad", np.zeros((1, *SHAPE)), sigma, kernels=[kernel])
        assert not (tmp_path / "bad").exists()

    np.save(tmp_path / "images.npy", np.random.default_rng(0).uniform(0, 1, (6, 5, 5)).astype(np.float32))
    np.save(tmp_path / "psf.npy", np.full((6, 1, 3), 1 / 3) + np.arange(6)[:, None, None] / 1000)
    images, psf = str(tmp_path / "images.npy"), tmp_path / "psf.npy"
    source = SourceSpec(path=images, sigma=0.01, range=(0, 1), kernel=psf)
    whole = pack(source, tmp_path / "whole").store
    pack_shards(source, tmp_path / "shards", 2)
    parts = open_store(tmp_path / "shards")
    for read in (Store.read, Store.read_levels, Store.read_kernel):
        at = torch.tensor([4, 0, 3])
        assert torch.equal(getattr(parts, read.__name__)(at), read(whole, at))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("file", "spoil"),
    [
        ("sigma_map.npy", lambda v: np.where(v == v.max(), np.nan, v)),
        ("sigma_map.npy", lambda v: -v),
        ("sigma_map.npy", lambda v: v.repeat(2, 1)),
        ("map_index.npy", lambda v: v - 2),
        ("kernel.npy", lambda v: v * np.array([1, 0])[:, None, None]),
        ("kernel_index.npy", lambda v: v - 2 * (v == 0)),
        ("kernel_index.npy", lambda v: v + 1),
        ("kernel_index.npy", None),
        ("kernel.npy", None),
        ("map_index.npy", None),
        ("kernel.npy", "absent"),
        ("images.npy", "absent"),
    ],
)
def test_stores_that_make_no_sense_are_rejected(tmp_path: Path, file: str, spoil: Any) -> None:
    """Also if their checksums are right."""
    maps, kernels = torch.full((4, *SHAPE), 0.1), blurs(2)[[0, 1, 0, 1]]
    path = stored(tmp_path / "s", torch.zeros(4, *SHAPE), NOISE, maps=maps, kernels=kernels).path
    tree = json.loads((path / "meta.json").read_text())
    del tree["checksum"]
    if callable(spoil):
        values = np.load(path / file)
        np.save(path / file, spoil(values).astype(values.dtype))
        tree["checksums"][file] = sha256(path / file)
    elif spoil is None:
        del tree["checksums"][file]
    else:
        (path / file).unlink()
    (path / "meta.json").write_text(json.dumps(tree | {"checksum": content_hash(tree)}))
    with pytest.raises(AssayError) as caught:
        open_store(path)
    assert Path(caught.value.path or "").parent == path and caught.value.cure


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


def test_stores_without_kernels_keep_their_fingerprint(tmp_path: Path) -> None:
    """That of a store with all other columns, as it was before stores had kernels."""
    values = np.arange(48, dtype=np.float32).reshape(4, 1, 3, 4) / 48
    levels = np.where(np.arange(12).reshape(1, 3, 4) % 5 == 0, np.inf, 0.1).astype(np.float32)
    images = [
        PackedImage(str(i), values[i], 0.1, i % 2, 0.1 + 0.1 * (i == 3), None, i // 2, levels if i else None)
        for i in range(4)
    ]
    store = write_store(tmp_path / "s", "s", images, (1, 3, 4), "float32", (-1, 1), ("a", "b"))
    assert store.fingerprint == "36b2a8f0d2c2935c9ae19a30566134482ebaa9223acc3dc4fa6a5f610997480d"
    kernel = np.eye(3, 4, dtype=np.float32)
    through = [PackedImage(str(i), values[i], 0.1, -1, kernel=kernel * (i + 1)) for i in range(2)]
    stores = [
        write_store(tmp_path / f"{n}", "s", through[::step], (1, 3, 4), "float32", (-1, 1), ())
        for n, step in enumerate((1, -1))
    ]
    assert stores[0].fingerprint != stores[1].fingerprint


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Images of 6 x 8 from 0 to 100 in the current folder."""
    monkeypatch.chdir(tmp_path)
    images = np.random.default_rng(0).uniform(0, 100, (4, 6, 8)).astype(np.float32)
    np.save("images.npy", images)
    return images


def packed(file: str = "images.npy", config: PackConfig | None = None, **settings: Any) -> PackReport:
    settings = {"range": (0, 100), "sigma": None if "map" in settings else 1.0} | settings
    return pack(SourceSpec(path=file, **settings), Path(f"store{len(list(Path().iterdir()))}"), config)


def test_packing_reads_masks_as_infinite_levels(files: np.ndarray) -> None:
    levels = np.where(np.random.default_rng(1).uniform(size=(4, 6, 8)) < 0.75, np.inf, 1.0)

    def packed_with(levels: np.ndarray) -> Store:
        np.save("maps.npy", levels.astype(np.float32))
        return packed(map="maps.npy").store

    store = packed_with(levels)
    assert store.incomplete.all() and torch.allclose(store.sigma_tn, torch.tensor(0.02))
    assert np.array_equal(store.read_levels(torch.arange(4))[:, 0].isinf(), np.isinf(levels))
    for bad in (np.where(np.isinf(levels), np.inf, 0), levels * np.inf):  # would be clean; nothing is left
        with rejects("images.npy[0]", "map"):
            packed_with(bad)
    # What fills missing pixels does not matter: neither constants nor 1e5 say anything about the noise.
    noisy = 50 + 20 * np.random.default_rng(2).normal(size=(4, 30, 40))
    levels = np.tile(levels, (1, 5, 5))
    for fill in (50, 1e5):
        np.save("images.npy", np.where(np.isinf(levels), fill, noisy).astype(np.float32))
        assert torch.allclose(packed_with(levels * 20).sigma_tn, torch.tensor(0.4))
        with rejects("images.npy[0]", "sigma"):
            packed_with(levels * 100)  # noise of 100 where the pixels vary by 20


@pytest.mark.parametrize("low", [0, -100])
def test_packing_keeps_the_model_true(files: np.ndarray, low: int) -> None:
    """y = k * x for images between -1 and 1, also if the kernel does not sum to 1 and black is not 0."""
    truth = np.random.default_rng(1).uniform(low, 100, (4, 6, 8))
    small = np.random.default_rng(2).uniform(0, 0.2, (4, 3, 5))
    kernel = np.zeros((4, 6, 8))
    kernel[:, :3, :5] = small
    kernel = np.roll(kernel, (-1, -2), (1, 2))
    np.save("images.npy", np.fft.ifft2(np.fft.fft2(kernel) * np.fft.fft2(truth)).real.astype(np.float32))
    np.save("psf.npy", small)
    store, every = packed(kernel="psf.npy", range=(low, 100)).store, torch.arange(4)
    found, levels = store.read_kernel(every), store.read_levels(every)
    assert found is not None and torch.allclose(found, torch.from_numpy(kernel).float())
    x = torch.from_numpy((truth - low) * 2 / (100 - low) - 1).float()[:, None]
    torch.testing.assert_close(store.read(every), convolution(found)(x), atol=1e-5, rtol=1e-4)
    assert bool(store.incomplete.all())
    seen = torch.zeros(6, 8, dtype=torch.bool)
    seen[1:-1, 2:-2] = True  # the kernel reaches one row and two columns far
    assert torch.equal(levels[:, 0].isfinite(), seen.expand(4, 6, 8))


def test_what_lies_outside_an_image_does_not_matter(files: np.ndarray) -> None:
    """Pixels that a blur cut from a larger scene calls seen are those of the circular convolution."""
    scene = np.random.default_rng(1).uniform(0, 100, (20, 20))
    small = np.array([[0, 0, 0], [0.1, 0.6, 0.3], [0, 0, 0]])
    blurred = sum(small[1, 1 + b] * np.roll(scene, b, 1) for b in (-1, 0, 1))
    np.save("images.npy", blurred[None, 5:11, 5:13].astype(np.float32))
    np.save("psf.npy", small)
    for config, (height, width) in ((PackConfig(), (6, 8)), (PackConfig(patch=(4, 4)), (4, 4))):
        store = packed(config=config, kernel="psf.npy").store
        kernel, levels = store.read_kernel(torch.tensor([0])), store.read_levels(torch.tensor([0]))
        assert kernel is not None
        x = torch.from_numpy(scene[5 : 5 + height, 5 : 5 + width] / 50 - 1).float()[None, None]
        seen = levels[0, 0].isfinite()
        assert seen.all(0).tolist() == [False] + [True] * (width - 2) + [False]
        difference = store.read(torch.tensor([0])) - convolution(kernel)(x)
        assert difference[0, 0][seen].abs().max() < 1e-5 < difference[0, 0][~seen].abs().max()


def test_packing_kspace(files: np.ndarray) -> None:
    """A mask in the order of fft2 is completed by its conjugates; the kernel gives the image with zeros."""
    truth = np.random.default_rng(1).uniform(0, 100, (4, 6, 8))
    mask = np.random.default_rng(2).uniform(size=(4, 6, 8)) < 0.3
    mask[3] = np.arange(6)[:, None] == 1  # without the mean
    both = mask | mask[:, (-np.arange(6)) % 6][:, :, (-np.arange(8)) % 8]
    zero_filled = np.fft.ifft2(both * np.fft.fft2(truth))
    assert np.abs(zero_filled.imag).max() < 1e-9
    np.save("images.npy", zero_filled.real.astype(np.float32))
    np.save("mask.npy", mask)
    store, every = packed(kspace="mask.npy").store, torch.arange(4)
    kernel = store.read_kernel(every)
    assert kernel is not None and not store.has_map
    torch.testing.assert_close(torch.fft.fft2(kernel).real, torch.from_numpy(both).float(), atol=1e-5, rtol=0)
    x = torch.from_numpy(truth / 50 - 1).float()[:, None]
    torch.testing.assert_close(store.read(every), convolution(kernel)(x), atol=1e-5, rtol=1e-4)


def test_packing_fewer_pixels(files: np.ndarray) -> None:
    truth = np.random.default_rng(1).uniform(0, 100, (4, 12, 16))
    small = truth.reshape(4, 6, 2, 8, 2).mean((2, 4)).astype(np.float32)
    np.save("images.npy", small)
    np.save("levels.npy", np.where(np.arange(8) == 3, np.inf, 1.0) * np.ones((6, 1)))
    for more in ({}, {"map": "levels.npy"}):
        store, every = packed(downsampled=2, **more).store, torch.arange(4)
        kernel, levels = store.read_kernel(every), store.read_levels(every)
        assert kernel is not None and store.image_shape == (1, 12, 16)
        seen = torch.zeros(12, 16, dtype=torch.bool)
        seen[::2, ::2] = True
        seen[:, 6] &= not more
        assert torch.equal(levels[:, 0].isfinite(), seen.expand(4, 12, 16))
        assert torch.equal(levels[levels.isfinite()].unique(), torch.tensor([0.02]))
        x = torch.from_numpy(truth / 50 - 1).float()[:, None]
        difference = store.read(every) - convolution(kernel)(x)
        assert difference[:, :, seen].abs().max() < 1e-5
    patches = packed(config=PackConfig(patch=(3, 4)), downsampled=2).store
    assert patches.image_shape == (1, 6, 8)


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("kernel", np.ones((3, 4))),
        ("kernel", np.ones((3, 3, 3))),  # for four images
        ("kernel", np.ones(3)),
        ("kernel", np.full((3, 3), np.nan)),
        ("kernel", np.zeros((3, 3))),
        ("kernel", np.arange(4)[::-1, None, None] * np.ones((4, 3, 3))),
        ("kernel", np.full((3, 3), 1e-300)),
        ("kernel", np.full((3, 3), 1e300)),
        ("kernel", np.ones((7, 3))),
        ("kspace", np.zeros((6, 8))),
        ("kspace", np.arange(4)[:, None, None] * np.ones((4, 6, 8)) > 0),
        ("kspace", np.full((6, 8), 0.5)),
        ("kspace", np.ones((5, 8))),
        ("kspace", np.full((6, 8), "a")),
    ],
)
def test_what_cannot_be_a_kernel_is_named(files: np.ndarray, key: str, values: Any) -> None:
    np.save("file.npy", values)
    with rejects(key=key):
        packed(**{key: "file.npy"})


def test_images_that_do_not_fit_kernels_are_named(files: np.ndarray) -> None:
    np.save("psf.npy", np.full((1, 3), 1 / 3))
    np.save("half.npy", np.full((1, 3), 1 / 6))
    np.save("mask.npy", np.eye(6, 8))
    np.save("line.npy", np.arange(6)[:, None] * np.ones(8) == 1)
    np.save("bytes.npy", files.astype(np.uint8))
    np.save("levels.npy", np.where(np.arange(8) == 0, 1.0, np.inf) * np.ones((6, 1)))
    crop = PackConfig(size=(4, 4), fit="crop")
    assert packed(config=crop, kernel="psf.npy").store.image_shape == (1, 4, 4)
    assert packed("bytes.npy", kernel="psf.npy").store.meta.dtype == "uint8"
    for key, config, more in (
        ("kspace", crop, {"kspace": "mask.npy"}),
        ("downsampled", crop, {"downsampled": 2}),
        ("downsampled", None, {"downsampled": 100_000}),
        ("kspace", PackConfig(patch=(4, 4)), {"kspace": "mask.npy"}),
        ("sigma", None, {"kernel": "psf.npy", "sigma": 0.0}),  # would be treated as clean
        (None, None, {"kernel": "psf.npy", "map": "levels.npy"}),  # all pixels are missing
        ("dtype", None, {"file": "bytes.npy", "kernel": "half.npy"}),
        ("dtype", None, {"file": "bytes.npy", "kspace": "line.npy"}),  # leaves out the mean
    ):
        with rejects(key=key):
            packed(config=config, **more)  # type: ignore[arg-type]


def test_the_command_packs_and_shows_kernels(files: np.ndarray) -> None:
    np.save("psf.npy", np.full((1, 3), 1 / 3))
    np.save("mask.npy", np.arange(6)[:, None] * np.ones(8) < 2)
    one = "images.npy:sigma=1"
    run(*f"data pack {one},kernel=psf.npy {one},kspace=mask.npy images.npy --all range=0,100 -o both".split())
    store = open_store("both")
    assert store.convolved.tolist() == [True] * 8 + [False] * 4 and store.incomplete.sum() == 8
    assert np.load("both/kernel.npy").shape == (2, 6, 8)
    shown = run("data", "show", "both")
    assert "map of noise levels" not in shown
    assert "8 images were convolved with a kernel" in shown and "train with train.rounds" in shown
    run(*f"data pack {one},downsampled=3,range=0,100 -o small".split())
    assert open_store("small").image_shape == (1, 18, 24)
    Path("text.npy").write_text("0.1 0.2")
    for wrong in ("kernel=text.npy", "kernel=psf.npy,downsampled=2", "downsampled=2.7", "downsampled=-2"):
        failing(*f"data pack {one},{wrong},range=0,100 -o x".split())


def test_kernels_that_do_not_sum_to_one_are_mentioned(files: np.ndarray) -> None:
    np.save("psf.npy", np.array([[1, 2, 1]]) * np.arange(1, 5)[:, None, None])
    np.save("near.npy", np.full((1, 3), 1 / 3) * 1.005)
    np.save("mask.npy", np.arange(6)[:, None] * np.ones((4, 6, 8)) == np.arange(4)[:, None, None])
    (warning,) = packed(kernel="psf.npy").warnings
    assert "4 images" in warning and "sums to 10 on average" in warning
    for more in ({"kernel": "near.npy"}, {"kspace": "mask.npy"}, {"downsampled": 2}):
        assert not packed(**more).warnings


def test_a_mask_of_kspace_in_another_order_is_noticed(files: np.ndarray) -> None:
    """Where it calls frequencies measured, zero-filled data have less than the noise, in any depth."""
    rng, few, most = np.random.default_rng(1), np.zeros((16, 16), bool), np.ones((16, 16), bool)
    few[[0, 1, 2, 3, 8, -3, -2, -1]], most[8] = True, False
    y = rng.uniform(0, 100, (4, 16, 16)) + rng.normal(size=(4, 16, 16))
    for mask, dtype in ((few, np.float32), (few, np.uint16), (most, np.float32)):
        zero_filled = np.fft.ifft2(mask * np.fft.fft2(y)).real
        np.save(
            "images.npy", zero_filled.clip(0).astype(dtype) if dtype == np.uint16 else zero_filled.astype(dtype)
        )
        for name, order in (("right", mask), ("shifted", np.fft.fftshift(mask))):
            np.save(f"{name}.npy", order)
        sigma, white = (1.0, 100) if dtype == np.float32 else (5.0, 100)
        assert packed(kspace="right.npy", sigma=sigma, range=(0, white)).store.convolved.all()
        with rejects("images.npy[0]", "kspace"):
            packed(kspace="shifted.npy", sigma=sigma, range=(0, white))


def test_incomplete_images_are_not_compared_denoised_or_measured(files: np.ndarray, tmp_path: Path) -> None:
    images = np.random.default_rng(0).uniform(0, 100, (40, 8, 8)).astype(np.float32)
    np.save("images.npy", images)
    np.save("psf.npy", np.full((1, 3), 1 / 3))
    np.save("levels.npy", np.where(np.arange(8) == 3, np.inf, 1.0) * np.ones((8, 1)))
    one = "data pack images.npy:range=0,100"
    run(*f"{one} -o clean".split())
    config = {"data": {"store": "clean"}, "net": {"preset": "mlp", "width": 8}}
    train(read_config({**config, "train": {"num_steps": 1, "batch_size": 8}}), Path("run"))
    for name, option in (("blurred", "sigma=1,kernel=psf.npy"), ("gaps", "map=levels.npy")):
        run(*f"{one},{option} -o {name}".split())
        for command, words in (
            (f"evaluate {name} --reference clean --extractor pixels --cache .", "cannot be compared"),
            (f"denoise run {name} -o made", "cannot be denoised: complete them with `assay denoise --restore`"),
            (f"evaluate run --held-out {name}", "hold complete images out"),
            (f"data noise {name}", "give complete images"),
            (f"data annotate {name} --clean clean", "cannot be annotated"),
        ):
            assert words in (found := str(failing(*command.split()))) and "40 of the 40 images" in found


@pytest.mark.parametrize("kind", ["missing pixels", "k-space"])
def test_rounds_learn_from_incomplete_images_and_resume(tmp_path: Path, kind: str) -> None:
    through, every = convolution(lines(40)) if kind == "k-space" else (lambda x: x), torch.arange(40)
    make = masked if kind == "missing pixels" else lambda path, num: seen_through(path, lines(num))
    store, x = make(tmp_path / "store", 40)
    net = {"kind": "mlp", "width": 16, "num_blocks": 1}
    settings = {"num_steps": 8, "batch_size": 8, "state_every": 4, "rounds": 1}
    tree: dict[str, Any] = {"data": {"store": str(store.path)}, "net": net, "train": settings}
    if kind == "k-space":
        with rejects(key="train.rounds"):
            train(read_config({**tree, "train": {**settings, "rounds": 0}}), tmp_path / "none")
    config = read_config(tree)
    whole, first = train(config, tmp_path / "whole"), open_store(tmp_path / "whole/restored-0")
    assert first.meta.restored_from is not None and first.meta.restored_from.checkpoint == "a Gaussian"
    # What was measured with little noise stays, up to that noise, and the rest is nearer than what fills it.
    difference = (through(first.read(every)) - store.read(every))[store.read_levels(every).isfinite()]
    assert difference.square().mean().sqrt() < 2 * NOISE
    assert (first.read(every) - x).square().mean() < 0.7 * (store.read(every) - x).square().mean()
    source = with_uniform_noise(store, allow_incomplete=True)
    twin, sigma_tn = Restored(source, first).read_at(every[:4], torch.tensor([0.01, 0.3, 3, 50]))
    assert torch.equal(twin, first.read(every[:4])) and not sigma_tn.any()
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
    assert made.usable_from.min() == 80 and not made.has_map and not made.convolved.any()
