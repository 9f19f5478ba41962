"""One training in several processes that another program starts, one of which is killed."""

import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from assay.data.known import get
from assay.train import read_config, train
from assay.train.config import DataConfig
from assay.train.ranks import train_on_ranks
from tests.processes import seconds_until_gone, workers_of


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_others_and_two_ranks_equal_one(tmp_path: Path) -> None:
    get("digits", tmp_path / "digits")
    data = DataConfig(store=tmp_path / "digits", clean_fraction=0.5, sigma=0.5)
    net = {"kind": "mlp", "width": 32, "num_blocks": 1}
    settings = {"num_steps": 300, "batch_size": 64, "lr_ramp_images": 0, "state_every": 20, "log_every": 10}
    config = read_config({"data": data.model_dump(mode="json"), "net": net, "train": settings})
    mine: list[int] = []

    def kill_one(step: int, num_steps: int) -> None:
        if step > 20 and not mine:
            mine.extend(workers_of(os.getpid()))
            os.kill(mine[1], signal.SIGKILL)

    with pytest.raises(ChildProcessError, match="training on 2 devices died with exit code -9"):
        train_on_ranks(2, config, tmp_path / "two", data, on_step=kill_one)
    assert len(mine) == 2
    seconds_until_gone(mine)
    steps: list[int] = []
    stopped = train_on_ranks(
        2, config, tmp_path / "two", data, on_step=lambda step, _: steps.append(step), should_stop=lambda: True
    )
    assert not stopped and not steps and "RANK" not in os.environ
    assert train_on_ranks(2, config, tmp_path / "two", data, [7, 290], lambda step, _: steps.append(step))
    assert 20 < steps[0] and steps[-1] == 300  # it went on from a saved state
    assert {path.stem for path in (tmp_path / "two/snapshots").iterdir()} == {"final", "000000290"}
    train(config, tmp_path / "one", data.open())
    one, two = (load_file(tmp_path / name / "snapshots/final.safetensors") for name in ("one", "two"))
    torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_errors_of_ranks_are_those_of_training(tmp_path: Path) -> None:
    get("digits", tmp_path / "digits")
    data = DataConfig(store=tmp_path / "digits")
    tree = {"data": data.model_dump(mode="json"), "net": {"preset": "mlp"}, "train": {"batch_size": 7}}
    with pytest.raises(ValueError, match="do not split evenly over 2 devices"):
        train_on_ranks(2, read_config(tree), tmp_path / "run", data)
