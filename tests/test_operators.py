"""Images seen through kernels: exact on Gaussian data, and known to stores, packing and rounds."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from assay.data import Joined, Restored, Store, View, open_store, raised
from assay.data.convert import PackConfig
from assay.data.pack import PackReport, pack, pack_shards
from assay.data.spec import SourceSpec
from assay.data.store import PackedImage, write_store
from assay.data.view import with_uniform_noise
from assay.denoise import GaussianDenoiser, convolution
from assay.errors import AssayError
from assay.files import content_hash, sha256
from assay.generate import RestoreConfig, restore, restore_store
from assay.metrics.held_out import held_out_loss
from assay.train import read_config, train
from assay.train.gaussian import fit_gaussian
from tests.errors import rejects
from tests.test_sigma_maps import run

SHAPE, SIDE, DIMS, NOISE = (1, 4, 4), 4, 16, 0.05
INF = float("inf")


def gaussian() -> tuple[GaussianDenoiser, Tensor]:
    """The denoiser of Gaussian images, and their covariance (D, D)."""
    factors = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(1)) / 2
    mean, variance = torch.linspace(-0.5, 0.5, DIMS), torch.linspace(0.02, 0.1, DIMS)
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


def store_of(path: Path, y: Tensor, kernel: Tensor, levels: Tensor | None = None) -> Store:
    maps = [None] * len(y) if levels is None else [each.numpy() for each in levels]
    images = (
        PackedImage(str(i), y[i].numpy(), NOISE, -1, sigma_map=maps[i], kernel=kernel[i].numpy())
        for i in range(len(y))
    )
    return write_store(path, path.name, images, SHAPE, "float32", (-1, 1), ())


def seen_through(path: Path, kernel: Tensor) -> tuple[Store, Tensor]:
    """Gaussian images through kernels with noise, and the images."""
    generator = torch.Generator().manual_seed(5)
    x = draws(len(kernel), generator)
    y = convolution(kernel)(x) + NOISE * torch.randn(x.shape, generator=generator)
    return store_of(path, y, kernel), x


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


EVERY_SECOND = torch.zeros(SIDE, SIDE, dtype=torch.bool)
EVERY_SECOND[::2, ::2] = True
BORDER = torch.ones(SIDE, SIDE, dtype=torch.bool)
BORDER[:, 0] = False


@pytest.mark.parametrize(
    ("kernel", "seen"),
    [
        (blurs(2), torch.ones(SIDE, SIDE, dtype=torch.bool)),
        (blurs(2), BORDER),
        (lines(2), torch.ones(SIDE, SIDE, dtype=torch.bool)),
        (torch.cat([box(), torch.eye(1, DIMS).view(1, SIDE, SIDE)]), EVERY_SECOND),
        (torch.eye(1, DIMS).view(1, SIDE, SIDE).repeat(2, 1, 1), torch.ones(SIDE, SIDE, dtype=torch.bool)),
    ],
    ids=["blur", "blur without a border", "k-space", "fewer pixels", "identity"],
)
def test_restored_images_are_draws_from_the_gaussian_posterior(
    tmp_path: Path, kernel: Tensor, seen: Tensor
) -> None:
    model, cov = gaussian()
    num, generator = 2000, torch.Generator().manual_seed(6)
    x = draws(2, generator)
    y = convolution(kernel)(x) + NOISE * torch.randn(x.shape, generator=generator)
    levels = torch.where(seen, NOISE, INF).expand(2 * num, *SHAPE)
    many = (each.repeat_interleave(num, 0) for each in (y, kernel))
    source = store_of(tmp_path / "two", *many, None if bool(seen.all()) else levels)
    made = restore(model, source, tmp_path / "made", "exact", RestoreConfig(num_steps=64), batch_size=1000)
    assert made.usable_from.min() == 80 and not made.sigma_tn.any()
    for n in range(2):
        drawn = made.read(torch.arange(n * num, (n + 1) * num)).flatten(1)
        a = circulant(kernel[n])[seen.flatten()]
        gain = cov @ a.T @ torch.linalg.inv(a @ cov @ a.T + NOISE**2 * torch.eye(len(a)))
        mean = model.mean.flatten() + gain @ (y[n].flatten()[seen.flatten()] - a @ model.mean.flatten())
        cov_y = cov - gain @ a @ cov
        assert ((drawn.mean(0) - mean) / cov_y.diagonal().sqrt()).abs().max() < 0.15
        assert (drawn.T.cov() - cov_y).abs().max() < 0.12 * cov_y.max()


def test_a_kernel_that_does_nothing_changes_nothing_about_missing_pixels(tmp_path: Path) -> None:
    model, generator = gaussian()[0], torch.Generator().manual_seed(7)
    y = draws(20, generator)
    seen = torch.rand(20, *SHAPE, generator=generator) < 0.5
    levels, kernel = torch.where(seen, NOISE, INF), torch.eye(1, DIMS).view(1, SIDE, SIDE).repeat(20, 1, 1)
    images = [PackedImage(str(i), y[i].numpy(), NOISE, -1, sigma_map=levels[i].numpy()) for i in range(20)]
    plain = write_store(tmp_path / "plain", "plain", images, SHAPE, "float32", (-1, 1), ())
    through = store_of(tmp_path / "through", y, kernel, levels)
    made = [restore(model, each, tmp_path / f"{each.name} made", "exact") for each in (plain, through)]
    expected, found = (each.read(torch.arange(20)) for each in made)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_the_gaussian_is_found_through_kernels(tmp_path: Path) -> None:
    _, cov = gaussian()
    for name, kernel in (("lines", lines(1500)), ("blur", blurs(1500))):
        store, x = seen_through(tmp_path / name, kernel)
        found = fit_gaussian(store, num_factors=3)
        factors = found.factors.flatten(1)
        got = factors.T @ factors + found.variance.flatten().diag()
        assert torch.linalg.norm(got - cov) < 0.1 * torch.linalg.norm(cov), name
        assert (found.mean - x.mean(0)).abs().max() < 0.05, name
    # A frequency that the same kernel hides in all images stays unknown, and the others are found.
    mask = torch.ones(SIDE, SIDE)
    mask[2] = 0
    store, _ = seen_through(tmp_path / "hidden", torch.fft.ifft2(mask).real.expand(1500, SIDE, SIDE))
    factors = (found := fit_gaussian(store, num_factors=3)).factors.flatten(1)
    got = factors.T @ factors + found.variance.flatten().diag()
    seen = circulant(torch.fft.ifft2(mask).real)
    assert torch.linalg.norm(seen @ (got - cov) @ seen) < 0.08 * torch.linalg.norm(cov)


def test_stores_views_and_shards_have_kernels(tmp_path: Path) -> None:
    store, every = seen_through(tmp_path / "store", blurs(2)[[0, 1, 0, 1, 0, 1]])[0], torch.arange(6)
    store.verify()
    assert np.load(tmp_path / "store/kernel.npy").shape == (2, SIDE, SIDE)  # equal ones once
    expected = blurs(2)[[0, 1, 0, 1, 0, 1]]
    assert torch.equal(store.read_kernel(every), expected) and not store.has_map  # type: ignore[arg-type]
    images = [PackedImage(str(i), np.zeros(SHAPE, np.float32), 0.1 * i, -1) for i in range(2)]
    plain = write_store(tmp_path / "plain", "plain", images, SHAPE, "float32", (-1, 1), ())
    assert plain.read_kernel(every[:2]) is None and Joined([plain, plain]).read_kernel(every[:2]) is None
    assert Joined([plain, store]).incomplete.tolist() == [False] * 2 + [True] * 6
    found = Joined([plain, store]).read_kernel(torch.tensor([1, 3]))
    delta = torch.eye(1, DIMS).view(SIDE, SIDE)
    assert found is not None and torch.equal(found, torch.stack([delta, expected[1]]))
    chosen = raised(View(store, torch.tensor([5, 0])), 0.3)
    assert torch.equal(chosen.read_kernel(torch.tensor([0, 1])), expected[[5, 0]])  # type: ignore[arg-type]
    assert bool(chosen.incomplete.all()) and torch.equal(chosen.sigma_tn, torch.full((2,), 0.3))
    assert torch.equal(chosen.read_levels(every[:1]), torch.full((1, 1, SIDE, SIDE), 0.3))
    for reject in (with_uniform_noise, lambda source: held_out_loss(gaussian()[0], source)):
        with pytest.raises(AssayError):
            reject(store)
    with pytest.raises(AssayError):
        restore(gaussian()[0], store, tmp_path / "kept", "exact", RestoreConfig(keep=0.5))

    for bad in (np.full((SIDE, SIDE), np.nan), np.ones((3, 3))):
        image = PackedImage("a", np.zeros(SHAPE, np.float32), 0.1, -1, kernel=bad)
        with pytest.raises(AssayError):
            write_store(tmp_path / "bad", "bad", [image], SHAPE, "float32", (-1, 1), ())
    clean = PackedImage("a", np.zeros(SHAPE, np.float32), 0.0, -1, kernel=delta.numpy())
    with pytest.raises(AssayError):  # counts as clean
        write_store(tmp_path / "clean", "clean", [clean], SHAPE, "float32", (-1, 1), ())

    np.save(tmp_path / "images.npy", np.random.default_rng(0).uniform(0, 1, (6, 5, 5)).astype(np.float32))
    np.save(tmp_path / "psf.npy", np.full((6, 1, 3), 1 / 3) + np.arange(6)[:, None, None] / 1000)
    source = SourceSpec(
        path=str(tmp_path / "images.npy"), sigma=0.01, range=(0, 1), kernel=tmp_path / "psf.npy"
    )
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
    levels = torch.full((4, *SHAPE), 0.1)
    path = store_of(tmp_path / "s", torch.zeros(4, *SHAPE), blurs(2)[[0, 1, 0, 1]], levels).path
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
        assert "error" in run(*f"data pack {one},{wrong},range=0,100 -o x".split(), code=1)


def test_kernels_that_do_not_sum_to_one_are_mentioned(files: np.ndarray) -> None:
    np.save("psf.npy", np.array([[1, 2, 1]]) * np.arange(1, 5)[:, None, None])
    np.save("near.npy", np.full((1, 3), 1 / 3) * 1.005)
    np.save("mask.npy", np.arange(6)[:, None] * np.ones((4, 6, 8)) == np.arange(4)[:, None, None])
    (warning,) = packed(kernel="psf.npy").warnings
    assert "4 to 16" in warning
    for more in ({"kernel": "near.npy"}, {"kspace": "mask.npy"}, {"downsampled": 2}):
        assert not packed(**more).warnings


def test_a_mask_of_kspace_in_another_order_is_noticed(files: np.ndarray) -> None:
    """Where it calls frequencies measured, zero-filled data have less than the noise, in any depth."""
    rng, mask = np.random.default_rng(1), np.zeros((16, 16), bool)
    mask[[0, 1, 2, 3, 8, -3, -2, -1]] = True
    y = rng.uniform(0, 100, (4, 16, 16)) + rng.normal(size=(4, 16, 16))
    zero_filled = np.fft.ifft2(mask * np.fft.fft2(y)).real
    for dtype in (np.float32, np.uint16):
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
        found = run(*f"evaluate {name} --reference clean --extractor pixels --cache .".split(), code=1)
        assert "40 of the 40 images" in found and "cannot be compared" in found
        found = run(*f"denoise run {name} -o made".split(), code=1)
        assert "cannot be denoised: complete them with `assay denoise --restore`" in found
        assert "hold complete images out" in run(*f"evaluate run --held-out {name}".split(), code=1)
        assert "give complete images" in run(*f"data noise {name}".split(), code=1)
        assert "cannot be annotated" in run(*f"data annotate {name} --clean clean".split(), code=1)


def test_loops_learn_through_kernels_and_resume(tmp_path: Path) -> None:
    store, x = seen_through(tmp_path / "store", lines(40))
    net = {"kind": "mlp", "width": 16, "num_blocks": 1}
    settings = {"num_steps": 8, "batch_size": 8, "state_every": 4, "rounds": 1}
    tree: dict[str, Any] = {"data": {"store": str(store.path)}, "net": net, "train": settings}
    with rejects(key="train.rounds"):
        train(read_config({**tree, "train": {**settings, "rounds": 0}}), tmp_path / "none")
    config = read_config(tree)
    whole = train(config, tmp_path / "whole")
    first, every = open_store(tmp_path / "whole/restored-0"), torch.arange(40)
    assert first.meta.restored_from is not None and first.meta.restored_from.checkpoint == "a Gaussian"
    # What was measured stays, up to its noise, and the rest is nearer than zeros.
    through = convolution(lines(40))
    difference = through(first.read(every)) - store.read(every)
    assert difference.square().mean().sqrt() < 2 * NOISE
    assert (first.read(every) - x).square().mean() < 0.7 * (store.read(every) - x).square().mean()
    twin, sigma_tn = Restored(store, first).read_at(every[:2], torch.tensor([0.01, 50]))
    assert torch.equal(twin, first.read(every[:2])) and not sigma_tn.any()
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
