"""A few kills of each command; `make soak` does 200 (see `tests/soak.py`). Studies: `test_study_pool.py`."""

import pytest

from tests.soak import COMMANDS, Command, soak


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS[:3], ids=lambda command: command.name)
def test_killed_commands_end_as_if_undisturbed(command: Command) -> None:
    report = soak(command, 4, seed=1)
    assert report.num_kills == 4 and not report.faults, report
