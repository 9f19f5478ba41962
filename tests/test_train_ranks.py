"""One training in several processes that another program starts, one of which is killed."""

import os
import signal
from pathlib import Path

import pytest
import torch
from lightning_fabric.strategies import ModelParallelStrategy
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from assay.data.config import DataConfig
from assay.data.known import get
from assay.devices import open_fabric, shard
from assay.errors import AssayError
from assay.nets import build_denoiser, preset
from assay.train import read_config, train
from assay.train.ranks import train_on_ranks
from assay.train.run import Progress
from tests.errors import rejected
from tests.processes import seconds_until_gone, workers_of
from tests.test_train import command, wait_for_log


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_others_and_two_ranks_equal_one(tmp_path: Path) -> None:
    get("digits", tmp_path / "digits")
    data = DataConfig(store=tmp_path / "digits", clean_fraction=0.5, sigma=0.5)
    net = {"kind": "mlp", "width": 32, "num_blocks": 1}
    settings = {"num_steps": 300, "batch_size": 64, "lr_ramp_images": 0, "state_every": 20, "log_every": 10}
    tree = {"data": data.model_dump(mode="json"), "net": net}
    ddp, fsdp = (read_config({**tree, "train": {**settings, "strategy": each}}) for each in ("ddp", "fsdp"))
    mine: list[int] = []

    def kill_one(progress: Progress) -> None:
        if progress.step > 20 and not mine:
            mine.extend(workers_of(os.getpid()))
            os.kill(mine[1], signal.SIGKILL)

    with pytest.raises(AssayError) as caught:
        train_on_ranks(2, ddp, tmp_path / "two", data, on_progress=kill_one)
    assert "exit code -9" in caught.value.what and caught.value.path == str(tmp_path / "two")
    assert len(mine) == 2
    seconds_until_gone(mine)
    steps: list[int] = []
    tell = lambda progress: steps.append(progress.step)  # noqa: E731
    stopped = train_on_ranks(2, fsdp, tmp_path / "two", data, on_progress=tell, should_stop=lambda: True)
    assert not stopped.finished and not steps and "RANK" not in os.environ
    assert train_on_ranks(2, fsdp, tmp_path / "two", data, [7, 290], tell).finished
    assert 20 < steps[0] and steps[-1] == 300  # it went on from a saved state, with split weights
    assert {path.stem for path in (tmp_path / "two/snapshots").iterdir()} == {"final", "000000290"}
    train(ddp, tmp_path / "one", data.open())
    for file in ("snapshots/final", "state/000000300"):
        one, two = (load_file(tmp_path / name / f"{file}.safetensors") for name in ("one", "two"))
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_command_of_which_a_process_dies_says_so(rank: int, tmp_path: Path) -> None:
    get("digits", tmp_path / "digits")
    words = ["train", tmp_path / "digits", "--num-steps", "1000000", "--log-every", "1", "--devices", "2"]
    words += ["--set", "net.width=16", "--set", "net.num_blocks=1", "-o", tmp_path / "run"]
    process = command(tmp_path / "assay_command.py", *words)
    wait_for_log(process, tmp_path / "run")
    os.kill(workers_of(process.pid)[rank], signal.SIGKILL)
    said = " ".join(process.communicate(timeout=120)[0].split())
    assert process.returncode == 1 and "on 2 devices died with exit code -9" in said and "Traceback" not in said


@pytest.mark.slow
def test_errors_of_ranks_are_those_of_training(tmp_path: Path) -> None:
    get("digits", tmp_path / "digits")
    data = DataConfig(store=tmp_path / "digits")
    tree = {"data": data.model_dump(mode="json"), "net": {"preset": "mlp"}, "train": {"batch_size": 7}}
    with rejected("train.batch_size"):
        train_on_ranks(2, read_config(tree), tmp_path / "run", data)


@pytest.mark.slow
def test_a_network_of_convolutions_split_over_two_ranks_trains_the_same(tmp_path: Path) -> None:
    get("digits", tmp_path / "digits")
    data = DataConfig(store=tmp_path / "digits", clean_fraction=0.5, sigma=0.5)
    net = {"preset": "unet-small", "model_channels": 16, "channel_mult": [1, 2], "num_blocks": 1}
    # Adam's first steps are signs, which rounding may turn: hence the low rate.
    settings = {"num_steps": 4, "batch_size": 16, "max_per_device": 4, "lr_ramp_images": 0, "lr": 1e-5}
    settings |= {"clip_grad": 1.0, "consistency": {"coefficient": 1.0}}
    tree = {"data": data.model_dump(mode="json"), "net": net, "train": {**settings, "strategy": "fsdp"}}
    train(read_config(tree), tmp_path / "one", data.open())
    train_on_ranks(2, read_config(tree), tmp_path / "two", data, [2])
    assert (tmp_path / "two/snapshots/000000002.safetensors").exists()
    one, two = (load_file(tmp_path / run / "snapshots/final.safetensors") for run in ("one", "two"))
    torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


def test_fsdp_gives_each_rank_its_share_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}
    monkeypatch.setattr("lightning_fabric.Fabric", lambda **options: asked.update(options) or 1 / 0)
    for num_devices, expected in ((1, str), (2, ModelParallelStrategy)):
        with pytest.raises(ZeroDivisionError):
            open_fabric("cpu", num_devices, strategy="fsdp")
        assert isinstance(asked["strategy"], expected)
    denoiser = build_denoiser(preset("dit-small", (1, 16, 16)))
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        names = "data_parallel", "tensor_parallel"
        mesh = torch.distributed.init_device_mesh("cpu", (4, 1), mesh_dim_names=names)
        weights = list(shard(denoiser, mesh).parameters())
        assert all(isinstance(weight, DTensor) for weight in weights)
        local = sum(weight.to_local().numel() for weight in weights if isinstance(weight, DTensor))
    finally:
        torch.distributed.destroy_process_group()
    assert local == pytest.approx(sum(weight.numel() for weight in weights) / 4, rel=0.01)
