"""Reading samples and mixtures: both formats, what spreadsheets write, and files that would lose data."""

from pathlib import Path

import numpy as np
import pytest

from assay.errors import AssayError
from assay.mixture.samples import SUFFIXES, check_mixture, check_sigma, read_samples, two_levels, write_samples
from tests.errors import rejected


def test_files_come_back_as_written(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, sigma = rng.normal(size=(50, 3)), rng.uniform(size=50)
    for suffix in SUFFIXES:
        write_samples(tmp_path / f"s{suffix}", x, sigma)
        found = read_samples(tmp_path / f"s{suffix}")
        np.testing.assert_array_equal(found[0], x)
        np.testing.assert_array_equal(found[1], sigma)
    np.savez(tmp_path / "plain.npz", x)
    plain = read_samples(tmp_path / "plain.npz", sigma=0.5)
    assert plain[0].shape == (50, 3) and (plain[1] == np.full(50, 0.5)).all()


def test_csv_of_a_spreadsheet(tmp_path: Path) -> None:
    (tmp_path / "s.csv").write_bytes("sigma, x, y\r\n0.5, 1, 2\r\n0.25, 3, 4\r\n".encode("utf-8-sig"))
    x, sigma = read_samples(tmp_path / "s.csv")
    np.testing.assert_array_equal(x, [[1, 2], [3, 4]])
    np.testing.assert_array_equal(sigma, [0.5, 0.25])


@pytest.mark.parametrize(
    "text, sigma, what",
    [
        ("x,x,sigma\n1,2,3\n", None, "twice"),
        ("1,1\n3,4\n", 1.0, "begins with numbers"),
        ("x,sigma\n", None, "no rows"),
        ("", 1.0, "no rows"),
        ("x,sigma\n1,2,3\n", None, "3 columns and 2 names"),
        ("x,sigma\n1,a\n", None, "cannot be read"),
        ("x,y\n1,2\n", None, "no column"),
        ("sigma\n1\n", None, "no samples"),
    ],
)
def test_csv_that_would_lose_data_is_rejected(tmp_path: Path, text: str, sigma, what: str) -> None:
    path = tmp_path / "s.csv"
    path.write_text(text)
    with pytest.raises(AssayError) as caught:
        read_samples(path, sigma=sigma)
    assert caught.value.path == str(path) and what in caught.value.what


@pytest.mark.parametrize(
    "arrays",
    [
        {"x": np.zeros((5, 2)), "y": np.zeros((5, 2)), "sigma": np.ones(5)},
        {"x": np.zeros((5, 2)), "sigma": np.ones(4)},
        {"x": np.zeros((5, 2)), "sigma": np.array(1.0)},
        {"x": np.zeros((5, 2, 2)), "sigma": np.ones(5)},
        {"x": np.ones((5, 2), complex), "sigma": np.ones(5)},
        {"x": np.array(["a"] * 5), "sigma": np.array(["b"] * 5)},
        {"sigma": np.ones(5)},
    ],
)
def test_npz_holds_one_array_beside_sigma(tmp_path: Path, arrays: dict) -> None:
    np.savez(tmp_path / "s.npz", **arrays)
    with rejected(path=tmp_path / "s.npz"):
        read_samples(tmp_path / "s.npz")


@pytest.mark.parametrize(
    "call, key",
    [
        (lambda: check_mixture([[1, 2], [3]]), "atoms"),
        (lambda: check_mixture([]), "atoms"),
        (lambda: check_mixture([[np.nan]]), "atoms"),
        (lambda: check_mixture([[10**400]]), "atoms"),
        (lambda: check_mixture([[1], [2]], [0.5, 0.6]), "weights"),
        (lambda: check_mixture([[1]], [0.5, 0.5]), "weights"),
        (lambda: check_sigma([]), "sigma"),
        (lambda: check_sigma(np.ones(3), 4), "sigma"),
        (lambda: check_sigma(np.ones((4, 2)), 4), "sigma"),
        (lambda: check_sigma([1.0, np.nan]), "sigma[1]"),
        (lambda: check_sigma([1.0, 1e200]), "sigma[1]"),
        (lambda: two_levels(10, 1.5, 1, 2), "clean_fraction"),
        (lambda: read_samples(Path("s.txt")), None),
    ],
)
def test_what_is_no_mixture_or_noise_is_named(call, key: str | None) -> None:
    with rejected(key):
        call()
    assert check_mixture([0.0, 1.0]).atoms.shape == (2, 1) and check_sigma(0.5, 3).tolist() == [0.5] * 3
