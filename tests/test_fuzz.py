"""A few mutants of every format; `make fuzz` reads 10,000 of each (see `tests/fuzz/run.py`)."""

import pytest

from tests.fuzz.formats import FORMATS, Format
from tests.fuzz.run import check


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_damaged_files_are_read_right_or_named(format: Format) -> None:
    _, faults = check(format, 200)
    assert not faults, faults[:3]
