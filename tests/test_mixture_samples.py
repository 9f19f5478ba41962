"""Reading samples and mixtures: what spreadsheets write, and a sentence for files that would lose data."""

from pathlib import Path

import numpy as np
import pytest

from assay.mixture.samples import read_mixture, read_samples


def test_csv_of_a_spreadsheet(tmp_path: Path) -> None:
    path = tmp_path / "s.csv"
    path.write_bytes("sigma, x, y\r\n0.5, 1, 2\r\n0.25, 3, 4\r\n".encode("utf-8-sig"))
    x, sigma = read_samples(path)
    np.testing.assert_array_equal(x, [[1, 2], [3, 4]])
    np.testing.assert_array_equal(sigma, [0.5, 0.25])


@pytest.mark.parametrize(
    "text, sigma, message",
    [
        ("x,x,sigma\n1,2,3\n", None, "names a column twice in x,x,sigma"),
        ("x, x,sigma\n1,2,3\n", None, "names a column twice"),
        ("1,1\n3,4\n", 1.0, "begins with numbers: put a header line above"),
        ("1.5,-2e3\n3,4\n", None, "begins with numbers"),
        ("x,sigma\n", None, "has no rows"),
        ("x,sigma\n\n", None, "has no rows"),
        ("", 1.0, "has no rows"),
    ],
)
def test_csv_that_would_lose_data_is_refused(tmp_path: Path, text: str, sigma, message: str) -> None:
    path = tmp_path / "s.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"s.csv {message}"):
        read_samples(path, sigma=sigma)


def test_npz_holds_one_array_beside_sigma(tmp_path: Path) -> None:
    path, x = tmp_path / "s.npz", np.zeros((5, 2))
    np.savez(path, x=x, y=x, sigma=np.ones(5))
    with pytest.raises(ValueError, match="several arrays of samples, x, y: keep one"):
        read_samples(path)
    for sigma in (np.ones(4), np.array(1.0)):
        np.savez(path, x=x, sigma=sigma)
        with pytest.raises(ValueError, match=r"has 5 samples, levels of shape .*: give one per sample"):
            read_samples(path)


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"atoms": [[1, 2], [3', "m.json cannot be read .* mixture fit --json"),
        ('{"atoms": [[1, 2], [3]]}', "m.json: atoms must be rows of equally many numbers"),
        ('{"atoms": 3}', "m.json: atoms must be rows"),
        ('{"atoms": [[1], [2]], "weights": {"a": 1}}', "weights one number per atom"),
        ('{"atoms": [[1], [2]], "weights": [0.5, 0.6]}', "m.json: weights .* sum to 1"),
    ],
)
def test_bad_mixture_names_its_file(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "m.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_mixture(tmp_path / "m.json")
