"""A few mutants of every format; `make fuzz` reads 10,000 of each (see `tests/fuzz/run.py`)."""

import pytest

from tests.fuzz.formats import FORMATS, Format
from tests.fuzz.run import check


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_damaged_files_are_read_right_or_named(format: Format) -> None:
    _, faults = check(format, 200)
    assert not faults, faults[:3]


# What longer runs found: more memory or time than allowed, or a sentence without the file.
FOUND = [
    ("zip", 342),
    ("torch archive", 2921),
    ("published model", 1140),
    ("a.nii", 2399),
    ("a.ome.tif", 1990),
    ("a.ome.tif", 5766),
]


@pytest.mark.parametrize(("name", "number"), FOUND)
def test_what_longer_runs_found_stays_corrected(name: str, number: int) -> None:
    (format,) = (each for each in FORMATS if each.name == name)
    _, faults = check(format, 1, number)
    assert not faults
