"""A step of training or sampling reads no value back from the device, so that a GPU never waits for the CPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from assay.nets import build_denoiser, preset
from assay.sample import Churn, Solver, edm_sigmas, solve
from assay.train import Progress, train
from tests.points import Points
from tests.test_train import config

# What tells the CPU a value, or a shape that depends on values.
READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select", "aten::_unique")


class Reads(TorchDispatchMode):
    """Counts reads by name while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        by_mask = name.startswith("aten::index") and any(
            index is not None and index.dtype == torch.bool
            for index in (args[1] if isinstance(args[1], list) else [])
        )
        if name.startswith(READS) or by_mask:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def reads(call: Callable[[], object]) -> list[str]:
    with Reads() as counter:
        call()
    return counter.found


def test_the_counter_sees_reads() -> None:
    x = torch.tensor([1.0, 0.0])
    calls = [
        x.sum().item,
        lambda: bool((x > 0).all()),
        x.nonzero,
        lambda: x[x > 0],
        lambda: x.equal(x),
        x.unique,
    ]
    assert [len(reads(call)) for call in calls] == [1] * len(calls)
    assert reads(lambda: torch.where(x > 0, x, -x).mean()) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"clip_grad": 1.0, "class_conditional": True},
        {"max_per_device": 4, "weight": "x_0", "pairing": "level_first"},
        {"consistency": {"coefficient": 1.0}},
        {"consistency": {"coefficient": 1.0, "method": "original_code", "num_steps": 2, "num_samples": 2}},
    ],
    ids=["plain", "pieces", "consistency", "original_code"],
)
def test_a_training_step_reads_nothing_until_logging_asks(settings: dict[str, Any], tmp_path: Path) -> None:
    """Steps 2 to 8 are counted; the ninth is logged. Progress is told after every step, without its loss."""
    counter, counted = Reads(), []

    def on_progress(progress: Progress) -> None:
        if progress.step == 1:
            counter.__enter__()
        elif progress.step == 8:
            counter.__exit__(None, None, None)
            counted.extend(counter.found)
            assert reads(lambda: progress.loss) == ["aten::_local_scalar_dense"]

    chosen = config(num_steps=9, log_every=9, state_every=9, **settings)
    train(chosen, tmp_path / "run", Points(50, 0.2), on_progress=on_progress)
    assert counted == []


@pytest.mark.parametrize("name", ["unet-small", "adm-imagenet64", "dit-small", "mlp"])
def test_the_networks_read_nothing(name: str) -> None:
    small: dict[str, Any] = {"model_channels": 32} if name.startswith("adm") else {}
    net = preset(name, (3, 8, 8), 10).model_copy(update={"label_dropout": 0.1, **small})
    denoiser, label = build_denoiser(net), torch.arange(4)
    x, sigma_t = torch.randn(4, 3, 8, 8), torch.rand(4)
    assert reads(lambda: denoiser(x, sigma_t, label).sum().backward()) == []


@pytest.mark.parametrize("solver", ["euler", "heun", "multistep"])
def test_a_sampler_step_reads_nothing(solver: Solver) -> None:
    churn = Churn(10) if solver != "multistep" else None
    denoiser = build_denoiser(preset("mlp", (1, 8, 8), 10)).eval()
    x, label = torch.randn(4, 1, 8, 8), torch.arange(4)
    noise = lambda: torch.randn(4, 1, 8, 8)  # noqa: E731
    with torch.no_grad():
        assert reads(lambda: solve(denoiser, x, edm_sigmas(4), solver, label, churn, noise)) == []
