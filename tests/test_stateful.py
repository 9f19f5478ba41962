"""Random sequences of commands in one folder; see tests/stateful.py, which runs 10,000 steps in `make soak`."""

import pytest

from tests.stateful import check


def test_300_steps() -> None:
    check(300)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 6])
def test_1_000_steps_with_studies(seed: int) -> None:
    check(500, seed, studies=True)
