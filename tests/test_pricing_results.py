"""`levels.csv` comes back as it was written; tables that cannot be read say which column is at fault."""

from pathlib import Path

import numpy as np
import pytest

from assay.errors import AssayError
from assay.pricing.results import LevelResults, read_levels, write_levels


def example(num_runs: int = 6, num_bands: int = 4, table: str = "clean_mix") -> LevelResults:
    rng = np.random.default_rng(0)
    num_noisy = np.zeros((num_runs, 2))
    num_noisy[2, 0], num_noisy[3, 1], num_noisy[4] = 700, 700, (300, 400)
    loss = rng.random((num_runs, num_bands))
    return LevelResults(
        dataset="=shoes", table=table, sigmas=np.array([0.1, 0.3]), block=np.arange(num_runs) % 2,
        num_clean=np.array([100.0, 300, 100, 100, 100, 1000])[:num_runs], num_noisy=num_noisy,
        edges=np.geomspace(2 / 255, 80, num_bands + 1), loss=loss, error=0.01 * loss,
        step=rng.integers(1, 100, (num_runs, num_bands)), last_step=np.full(num_runs, 111), loss_last=loss + 1,
    )  # fmt: skip


def test_levels_come_back(tmp_path: Path) -> None:
    written = [example(), example(table="consistency")]
    write_levels(tmp_path / "levels.csv", written)
    for ours, theirs in zip(written, read_levels(tmp_path / "levels.csv"), strict=True):
        for name, value in vars(ours).items():
            assert np.array_equal(value, getattr(theirs, name)), name


def test_totals_sum_the_bands_above() -> None:
    results = example()
    above = results.total("structure", results.centres[1])  # half of the band that it is the middle of
    assert np.allclose(above.value, results.loss[:, 1] / 2 + results.loss[:, 2:].sum(1))
    assert np.allclose(above.error, np.sqrt(np.square(results.error[:, 1:]) @ [0.25, 1, 1]))
    assert np.allclose(results.total("structure", results.edges[2]).value, results.loss[:, 2:].sum(1))
    assert np.allclose(results.total("everything").value, results.loss.sum(1))


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("loss,", "lass,", "table"),
        (",111,", ",nan,", "last_step"),
        ("0.1", "zero", None),
        ("80.0,", "81.0,", None),
    ],
)
def test_damaged_levels(tmp_path: Path, old: str, new: str, key: str | None) -> None:
    path = tmp_path / "levels.csv"
    write_levels(path, [example()])
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(AssayError) as caught:
        read_levels(path)
    assert (caught.value.path, caught.value.key) == (str(path), key)
