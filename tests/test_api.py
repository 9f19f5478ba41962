"""The names for notebooks: their examples run, and arrays become the same images as files."""

import doctest
import inspect
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import assay
import assay.data.arrays
import assay.model


@pytest.mark.parametrize("module", [assay.model, assay.data.arrays], ids=lambda module: module.__name__)
def test_examples_run(module: object) -> None:
    found = doctest.testmod(module, extraglobs={"np": np, "torch": torch, "assay": assay})  # type: ignore[arg-type]
    assert found.attempted > 1 and found.failed == 0


def test_the_first_example_is_at_most_fifteen_lines() -> None:
    assert sum(line.startswith(">>>") for line in (assay.model.__doc__ or "").splitlines()) <= 15


def test_every_name_exists_has_a_docstring_and_loads_lazily() -> None:
    for name in assay.__all__:
        assert inspect.getdoc(getattr(assay, name)), name
        assert name in dir(assay)
    with pytest.raises(AttributeError, match="from_arrays"):
        assay.fourier  # noqa: B018
    code = "import assay, sys; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@given(
    low=st.floats(-100, 100),
    width=st.floats(0.1, 1000),
    sigma=st.floats(0, 50),
    shape=st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4)),
)
def test_arrays_are_scaled_with_their_noise(
    low: float, width: float, sigma: float, shape: tuple[int, int, int, int]
) -> None:
    images = np.random.default_rng(0).uniform(low, low + width, shape)
    source = assay.from_arrays(images, sigma, value_range=(low, low + width))
    assert len(source) == shape[0] and source.image_shape == shape[1:]
    back = (source.read(torch.arange(shape[0])).double().numpy() + 1) / 2 * width + low
    assert np.abs(back - images).max() < 1e-5 * width
    assert np.allclose(source.sigma_tn.numpy(), 2 * sigma / width, rtol=1e-6)


def test_arrays_saved_as_a_store_are_the_same_source(tmp_path: Path) -> None:
    images, sigma = np.random.default_rng(0).normal(0, 1, (30, 5, 4)), np.linspace(0, 1, 30)
    source = assay.from_arrays(images, sigma, np.arange(30) % 3)
    store = source.save(tmp_path / "store")
    index = torch.arange(30)
    assert torch.equal(store.read(index), source.read(index))
    assert torch.equal(store.sigma_tn, source.sigma_tn) and torch.equal(store.label, source.label)
    assert store.class_names == source.class_names == ("0", "1", "2")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": np.zeros((3, 4))}, "shape"),
        ({"images": np.zeros((0, 4, 4))}, "shape"),
        ({"images": np.full((3, 4, 4), np.nan)}, "finite"),
        ({"sigma": -1.0}, "sigma"),
        ({"sigma": [0.1, 0.2]}, "shape"),
        ({"label": [0, 1]}, "label"),
        ({"label": [0.5, 1, 2]}, "label"),
        ({"value_range": (1, 0)}, "value_range"),
    ],
)
def test_bad_arrays_are_rejected(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        assay.from_arrays(**{"images": np.zeros((3, 4, 4)), **change})  # type: ignore[arg-type]


def test_a_kept_run_is_resumed_and_loaded_again(tmp_path: Path) -> None:
    images = assay.from_arrays(np.random.default_rng(0).uniform(-1, 1, (64, 8, 8)))
    settings = {"num_steps": 3, "batch_size": 16, "net": {"preset": "mlp", "width": 16, "num_blocks": 1}}
    model = assay.fit(images, tmp_path / "run", progress=False, **settings)
    again = assay.load(tmp_path / "run")
    assert torch.equal(model.sample(3, seed=5), again.sample(5, seed=3)[2:])
    assert "mlp" in repr(again) and model.plot(4).size[0] > 8
    x_tn = images.read(torch.arange(2))
    expected = again.denoiser(x_tn, torch.full((2,), 0.3))
    assert torch.equal(again.denoise(x_tn, 0.3), expected.detach())
    draws = again.denoise(x_tn, 0.3, posterior_sample=True)
    assert draws.shape == x_tn.shape and not torch.equal(draws, expected)
    found = again.evaluate(images, num_images=40, extractor="pixels", cache=tmp_path / "cache", num_steps=3)
    assert found.fd > 0 and found.num_images == 40
