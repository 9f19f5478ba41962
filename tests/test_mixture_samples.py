"""Reading samples: what spreadsheets write, and files that would lose data; noise levels that are none."""

from pathlib import Path

import numpy as np
import pytest

from assay.errors import AssayError
from assay.mixture.samples import check_sigma, read_samples
from tests.errors import rejected


def test_csv_of_numpy_and_of_a_spreadsheet(tmp_path: Path) -> None:
    rng, path = np.random.default_rng(0), tmp_path / "s.csv"
    table = rng.normal(size=(50, 4)) ** 2
    np.savetxt(path, table, delimiter=",", header="x,y,z,sigma", comments="", fmt="%.17g")
    x, sigma = read_samples(path)
    np.testing.assert_array_equal(np.column_stack([x, sigma]), table)
    np.testing.assert_array_equal(read_samples(path, "y")[1], table[:, 1])
    x, sigma = read_samples(path, sigma=0.5)
    assert x.shape == (50, 4) and (sigma == np.full(50, 0.5)).all()
    path.write_bytes("sigma, x, y\r\n0.5, 1, 2\r\n0.25, 3, 4\r\n".encode("utf-8-sig"))
    x, sigma = read_samples(path)
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
        ("sigma\n1\n", None, "no column"),
    ],
)
def test_csv_that_would_lose_data_is_rejected(tmp_path: Path, text: str, sigma, what: str) -> None:
    path = tmp_path / "s.csv"
    path.write_text(text)
    with pytest.raises(AssayError) as caught:
        read_samples(path, sigma=sigma)
    assert caught.value.path == str(path) and what in caught.value.what


def test_what_is_no_noise_is_named() -> None:
    for sigma, num_samples in (([], None), (np.ones(3), 4), (np.ones((4, 2)), 4)):
        with rejected("sigma"):
            check_sigma(sigma, num_samples)
    for level in (np.nan, -1.0, 1e200):
        with rejected("sigma[1]"):
            check_sigma([1.0, level])
    assert check_sigma(0.5, 3).tolist() == [0.5] * 3
