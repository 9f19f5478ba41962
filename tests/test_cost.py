"""Costs are what really happens; settings that fit a time; progress where there is no terminal."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from assay import cost
from assay.data import Loader, part
from assay.denoise import Preconditioned
from assay.progress import duration, open_progress
from assay.train import read_config, train
from tests.errors import rejected
from tests.points import Points

NET = {"kind": "mlp", "width": 16, "num_blocks": 1}


@pytest.mark.parametrize(
    "consistency",
    [
        {},
        {"coefficient": 1.0, "sub_batch": 0.5},
        {"coefficient": 1.0, "sub_batch": 0.25, "start": 0.5, "num_steps": 5},
        {"coefficient": 1.0, "sub_batch": 0.5, "method": "original_code", "num_steps": 2, "num_samples": 3},
    ],
)
def test_evaluations_are_those_that_a_training_makes(
    consistency: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, forward = 0.0, Preconditioned.forward

    def counted(self: Preconditioned, x_t: torch.Tensor, *rest: Any) -> torch.Tensor:
        nonlocal made
        made += len(x_t) * (cost.WITH_GRADIENT if torch.is_grad_enabled() else 1)
        return forward(self, x_t, *rest)

    monkeypatch.setattr(Preconditioned, "forward", counted)
    settings = {"num_steps": 4, "batch_size": 8, "consistency": consistency}
    config = read_config({"data": {"store": "-"}, "net": NET, "train": settings})
    train(config, tmp_path / "run", Points(50, 0.2))
    assert made == cost.training_evaluations(config.train, 50)


def test_settings_fit_the_images_and_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = Points(50, 0.2)
    tree: dict[str, Any] = {"data": {"store": "-"}, "net": {"width": 16, "num_blocks": 1}}
    plain = cost.choose_config(tree, points)
    assert plain.train.batch_size == 50 and plain.train.lr_decay == "cosine" and plain.train.num_steps == 6000
    assert plain.net_config(points).kind == "mlp"
    assert cost.training_seconds(plain, points) > 0
    monkeypatch.setattr(cost, "training_seconds", lambda *_: 600.0)
    half = cost.choose_config(tree, points, minutes=5, run_dir=tmp_path / "run")
    assert half.train.num_steps == 3000
    assert half.train.ema_half_life_images == 20_000 * 3000 * 50 // (6000 * 128)  # shorter alike
    train(half, tmp_path / "run", points, should_stop=lambda: True)
    monkeypatch.setattr(cost, "training_seconds", lambda *_: 300.0)  # the machine is less busy now
    again = cost.choose_config(tree, points, minutes=5, run_dir=tmp_path / "run")
    assert again.fingerprint(points) == half.fingerprint(points)
    with pytest.warns(UserWarning, match="100 steps, takes about 5 s here, not 0.05 min"):
        assert cost.choose_config(tree, points, minutes=0.05).train.num_steps == 100
    with rejected("preset"):  # a network, not a training
        cost.choose_config(tree, points, preset="unet-small")
    with rejected("minutes"):
        cost.choose_config({**tree, "train": {"num_steps": 5}}, points, minutes=5)


def test_level_first_gives_every_level_the_same_draws_whatever_the_images() -> None:
    """So that a difference between configurations is one of data, and not of compute at a level."""
    mixed = Points(200, 0.2)
    drawn = [
        torch.cat([Loader(source, 32, seed=3, pairing="level_first").batch(step).sigma_t for step in range(40)])
        for source in (mixed, part(mixed, clean=20, noisy=0), Points(70, 0.5, 0.1))
    ]
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[0], drawn[2])


def test_progress_is_told_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, text = iter([0.0, 10.0, 20.0, 31.0, 40.0, 62.0, 70.0]), io.StringIO()
    monkeypatch.setattr("assay.progress.time.monotonic", lambda: next(clock))
    with open_progress(console=Console(file=text)) as tell:
        for done in (0, 50, 100, 150, 200, 300, 400):
            tell("runs/a", done, 400, "loss 0.5")
    assert text.getvalue().splitlines() == [
        "runs/a: 38%, 150 of 400, 52 s left, loss 0.5",
        "runs/a: 75%, 300 of 400, 21 s left, loss 0.5",
        "runs/a: 100%, 400 of 400, 0 s left, loss 0.5",
    ]
    assert [duration(seconds) for seconds in (40, 700, 9000)] == ["40 s", "12 min", "2.5 h"]
