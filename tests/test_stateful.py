"""Random sequences of commands in one folder; see tests/stateful.py."""

import pytest

from tests.stateful import check


def test_300_steps() -> None:
    check(300)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 9))
def test_10_000_steps_in_all(seed: int) -> None:
    check(1250, seed, studies=1)
