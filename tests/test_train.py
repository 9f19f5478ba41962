"""The loop learns what theory says, resumes bit for bit, and rejected what cannot work."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from assay.checkpoint import load_checkpoint
from assay.data import Loader
from assay.data.arrays import from_arrays
from assay.data.known import get
from assay.errors import AssayError
from assay.nets import build_denoiser
from assay.settings import override
from assay.train import RunConfig, read_config, train
from assay.train.loop import losses
from assay.train.optimizer import lr_factor, update_ema
from assay.train.record import trim_log
from assay.train.run import check_ranks, noise_levels
from tests.commands import failing, run
from tests.errors import rejected
from tests.points import ORACLE, Points

TINY_NET = {"kind": "mlp", "width": 16, "num_blocks": 1}


def config(
    net: dict[str, Any] | None = None, consistency: dict[str, Any] | None = None, **train: Any
) -> RunConfig:
    settings = {"num_steps": 20, "batch_size": 8, "log_every": 5, "state_every": 5, **train}
    if consistency:
        settings["consistency"] = consistency
    return read_config({"data": {"store": "unused"}, "net": net or TINY_NET, "train": settings})


FINAL = "snapshots/final.safetensors"


def weights(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path)


def same_file(one: Path, other: Path, name: str = FINAL) -> bool:
    return (one / name).read_bytes() == (other / name).read_bytes()


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "images_per_second"} for line in lines]


# --- it learns -------------------------------------------------------------------------------------------

LEVELS = (0.05, 0.1, 0.2, 0.28, 0.4, 0.7, 1.5)  # the first four lie below the noise of the noisy points, 0.3


def excess(run_dir: Path, clean_fraction: float, **settings: Any) -> list[float]:
    """Train on 20,000 points; how much larger than the oracle's is the error at each level, on fresh points?"""
    chosen = config(
        {"kind": "mlp", "width": 96, "num_blocks": 2},
        **{"num_steps": 1600, "batch_size": 256, "lr": 2e-3, "lr_decay": "cosine", "state_every": 10_000}
        | {"ema_half_life_images": 20_000, **settings},
    )
    result = train(chosen, run_dir, Points(20_000, clean_fraction))
    denoiser = load_checkpoint(result.checkpoint).denoiser.eval()
    fresh, generator, found = Points(10_000, seed=99).x_tn, torch.Generator().manual_seed(5), []
    for sigma in LEVELS:
        x_t = fresh + sigma * torch.randn(fresh.shape, generator=generator)
        sigma_t = torch.full((len(fresh),), sigma)
        with torch.no_grad():
            errors = [(d(x_t, sigma_t) - fresh).square().mean().item() for d in (denoiser, ORACLE)]
        found.append(errors[0] / errors[1] - 1)
    return found


@pytest.mark.slow
def test_clean_and_mixed_points_teach_every_level_and_noisy_ones_those_above(tmp_path: Path) -> None:
    clean, mixed, noisy = (excess(tmp_path / str(p), p) for p in (1.0, 0.1, 0.0))
    assert max(clean) < 0.05
    assert max(mixed) < 0.05
    assert max(noisy[4:]) < 0.05
    assert max(noisy[:3]) > 0.1

    loss = {"coefficient": 1.0, "start": 0.2, "sub_batch": 0.25}
    consistent = excess(tmp_path / "consistent", 0.0, consistency=loss)
    assert max(consistent[4:]) < 0.05
    # Measured at 0.05, 0.1, 0.2: 0.063, 0.086, 0.132 without, 0.015, 0.047, 0.131 with the loss.
    assert sum(consistent[:2]) < 0.65 * sum(noisy[:2])


# --- it resumes ------------------------------------------------------------------------------------------

KILLED_CONFIG = {"num_steps": 60, "state_every": 4, "log_every": 3, "consistency": {"coefficient": 0.5}}
KILLED_NET = {**TINY_NET, "dropout": 0.2}


def in_child(call: Callable[[], object]) -> int:
    """A forked process that trains at once, since everything is imported; it exits with 3 if it is rejected."""
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            call()
            os._exit(0)
        except AssayError:
            os._exit(3)
        except BaseException:
            os._exit(1)
    return child


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_stopping_saves_and_the_same_call_continues(tmp_path: Path) -> None:
    chosen, points = config(KILLED_NET, **KILLED_CONFIG), Points(50, 0.2)
    train(chosen, tmp_path / "whole", points)
    for _ in range(100):
        calls = iter([False, False, True])
        result = train(chosen, tmp_path / "parts", points, should_stop=lambda calls=calls: next(calls))
        if result.finished:
            break
    assert result.step == 60
    for name in (FINAL, f"state/{60:09d}.safetensors"):
        assert same_file(tmp_path / "whole", tmp_path / "parts", name)
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "parts")
    assert len(list((tmp_path / "parts/state").iterdir())) == 2


@pytest.mark.parametrize("damage", ["truncate", "flip", "step", "key", "rename"])
def test_a_damaged_state_falls_back_to_the_one_before(damage: str, tmp_path: Path) -> None:
    chosen, points, steps, run_dir = config(), Points(50, 0.2), iter(range(100)), tmp_path / "run"
    train(chosen, tmp_path / "whole", points)
    train(chosen, run_dir, points, should_stop=lambda: next(steps) == 12)
    newest = sorted((run_dir / "state").iterdir())[-1]
    assert newest.stem == f"{12:09d}"
    data = newest.read_bytes()
    if damage == "rename":
        newest.rename(newest.with_name(f"{14:09d}.safetensors"))
    else:
        damaged = {
            "truncate": data[: len(data) // 2],
            "flip": data[:-10] + bytes([data[-10] ^ 255]) + data[-9:],
            "step": data.replace(rb"\"step\": 12", rb"\"step\": 22"),
            "key": data.replace(rb"\"num_skipped\"", rb"\"num_shipped\""),
        }[damage]
        assert damaged != data
        newest.write_bytes(damaged)
    with pytest.warns(UserWarning, match="00000001[24].* is damaged .*resuming from the state before"):
        train(chosen, run_dir, points)
    assert same_file(run_dir, tmp_path / "whole") and metrics(run_dir) == metrics(tmp_path / "whole")


def test_a_finished_run_is_not_repeated(tmp_path: Path) -> None:
    times = []
    for steps in (list[int](), list[int]()):
        result = train(config(), tmp_path / "run", Points(50), on_progress=lambda p, s=steps: s.append(p.step))
        times.append({path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")})
    assert result.finished and steps == [] and times[0] == times[1]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stores") / "digits"
    get("digits", path)
    return path


def command(script: Path, *arguments: object) -> subprocess.Popen[str]:
    """A command that runs by itself. A launcher re-runs the script by its name, so it is a real one."""
    script.write_text("from assay.cli import main\nmain()\n")
    words = [sys.executable, script, *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.Popen(words, stdout=-1, stderr=subprocess.STDOUT, text=True, env=environment)


def wait_for_log(process: subprocess.Popen[str], run_dir: Path) -> None:
    """Until a run has recorded something."""
    while not (log := run_dir / "metrics.jsonl").exists() or not log.read_text():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)


def digits_settings(store: Path, **settings: Any) -> list[str]:
    values = {"data.store": store, "data.clean_fraction": 0.1, "data.sigma": 0.5, "net.width": 32}
    values |= {"net.num_blocks": 1, **settings}
    pairs = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
    return ["--preset", "digits", *pairs]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_save_and_exit_with_a_clear_line(number: int, digits: Path, tmp_path: Path) -> None:
    settings = digits_settings(digits, **{"train.num_steps": 1_000_000, "train.log_every": 10})
    process = command(tmp_path / "assay_command.py", "train", *settings, "-o", tmp_path / "run")
    wait_for_log(process, tmp_path / "run")
    process.send_signal(number)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 130 and "saved at step" in output and "Traceback" not in output
    assert len(list((tmp_path / "run/state").iterdir())) == 1


# --- it does the same on several ranks ---------------------------------------------------------------------


@pytest.mark.parametrize("coefficient", [0.0, 1.0])
def test_fewer_images_at_a_time_give_the_same_weights(coefficient: float, tmp_path: Path) -> None:
    points, walks = Points(50, 0.5), {"coefficient": coefficient}
    runs = {size: config(consistency=walks, batch_size=16, max_per_device=size) for size in (None, 5)}
    whole, pieces = (train(chosen, tmp_path / str(size), points) for size, chosen in runs.items())
    assert runs[None].fingerprint(points) == runs[5].fingerprint(points)
    torch.testing.assert_close(weights(whole.checkpoint), weights(pieces.checkpoint), rtol=1e-5, atol=1e-6)
    losses = [metrics(tmp_path / name)[-1]["loss"] for name in ("None", "5")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    batch = Loader(points, 16).batch(0)
    assert [len(piece.index) for piece in batch.pieces(5)] == [5, 5, 5, 1] and batch.pieces(16) == [batch]
    assert torch.equal(torch.cat([piece.x_tn for piece in batch.pieces(5)]), batch.x_tn)


@pytest.mark.slow
@pytest.mark.parametrize("coefficient", [0.0, 1.0])
def test_two_ranks_give_the_weights_of_one(coefficient: float, digits: Path, tmp_path: Path) -> None:
    settings = digits_settings(
        digits, **{"train.num_steps": 30, "train.batch_size": 32, "train.consistency.coefficient": coefficient}
    )
    for devices in "12":
        words = ["train", *settings, "-o", tmp_path / devices, f"--devices={devices}"]
        process = command(tmp_path / "assay_command.py", *words)
        assert process.wait() == 0, process.communicate()[0]
    one, two = (weights(tmp_path / d / FINAL) for d in "12")
    torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)
    lines = [metrics(tmp_path / d)[-1] for d in "12"]
    assert lines[0]["loss"] == pytest.approx(lines[1]["loss"], rel=1e-4)
    counts = [[row["count"] for row in line["loss_by_sigma"]] for line in lines]
    assert counts[0] == counts[1]


def test_a_batch_that_does_not_split_over_the_ranks_is_rejected() -> None:
    check_ranks(config(batch_size=24), 2)
    with rejected("train.batch_size"):
        check_ranks(config(batch_size=24), 5)


# --- its parts ---------------------------------------------------------------------------------------------


def test_learning_rate_ramps_and_decays() -> None:
    settings = config(num_steps=100, batch_size=10, lr_ramp_images=100, lr_decay="cosine").train
    assert lr_factor(0, settings) == pytest.approx(0.1)
    assert lr_factor(4, settings) == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.04)) / 2)
    assert lr_factor(50, settings) == pytest.approx(0.5)
    assert lr_factor(99, settings) < 0.001
    assert lr_factor(99, config(num_steps=100, lr_ramp_images=0).train) == 1


def test_ema_halves_in_a_half_life_and_ramps_up() -> None:
    settings = config(batch_size=10, ema_half_life_images=100, ema_ramp=None).train
    ema, model = nn.Linear(1, 1), nn.Linear(1, 1)
    nn.init.constant_(ema.weight, 1.0)
    nn.init.constant_(model.weight, 0.0)
    for step in range(10):
        update_ema(ema, model, step, settings)
    assert ema.weight.item() == pytest.approx(0.5)
    ramped = config(batch_size=10, ema_half_life_images=100, ema_ramp=0.05).train
    nn.init.constant_(ema.weight, 1.0)
    update_ema(ema, model, 0, ramped)  # half-life 0.5 images
    assert ema.weight.item() == pytest.approx(0.5**20)


def test_many_noise_levels_are_kept_as_quantiles_with_exact_ends(tmp_path: Path) -> None:
    points = Points(1000, 0.25)
    points.sigma_tn[250:] = torch.linspace(0.1, 0.7, 750)[torch.randperm(750)]
    info = load_checkpoint(train(config(), tmp_path / "run", points).checkpoint).info
    assert info.clean_fraction == 0.25 and info.num_images_seen == 160
    levels, fractions = zip(*info.sigma_tn, strict=True)
    assert len(levels) == 100 and levels == tuple(sorted(levels))
    assert (levels[0], fractions[0]) == (0.0, 0.25) and sum(fractions) == pytest.approx(1)
    assert levels[1] == points.sigma_tn[250:].min().item() and levels[-1] == points.sigma_tn.max().item()
    assert levels[50] == pytest.approx(0.4, abs=0.01)
    output = ("-o", tmp_path / "images.npz", "--seeds", 0, "--num-steps", 3, "--truncate-at", "auto")
    run("sample", tmp_path / "run" / FINAL, *output)
    assert noise_levels(torch.rand(1000, generator=torch.Generator().manual_seed(0)) + 1)[0][0] >= 1


def test_loss_is_told_apart_below_and_above_the_datas_noise(tmp_path: Path) -> None:
    train(config(batch_size=40, log_every=20), tmp_path / "run", Points(50, 0.5, 0.3))
    rows = metrics(tmp_path / "run")[0]["loss_by_sigma"]
    edges = {row["above"] for row in rows} | {row["up_to"] for row in rows}
    assert any(edge is not None and abs(edge - 0.3) < 1e-6 for edge in edges)
    assert sum(row["count"] for row in rows) == 20 * 40


def test_fine_tuning_starts_from_the_checkpoint(tmp_path: Path) -> None:
    points = Points(50)
    first = train(config(), tmp_path / "first", points)
    chosen = config(num_steps=1, lr=1e-12, init_from=str(first.checkpoint), ema_half_life_images=0)
    second = train(chosen, tmp_path / "second", points)
    torch.testing.assert_close(weights(second.checkpoint), weights(first.checkpoint), rtol=1e-4, atol=1e-6)
    other = config({**TINY_NET, "width": 32}, init_from=str(first.checkpoint))
    with rejected("train.init_from", str(first.checkpoint)):
        train(other, tmp_path / "third", points)


def test_a_checkpoint_to_start_from_counts_by_its_contents(tmp_path: Path) -> None:
    points, start = Points(50), tmp_path / "start.safetensors"
    weights_of = {seed: train(config(num_steps=2, seed=seed), tmp_path / str(seed), points) for seed in (1, 2)}
    start.write_bytes(weights_of[1].checkpoint.read_bytes())
    chosen = config(num_steps=3, init_from=str(start))
    train(chosen, tmp_path / "run", points)
    elsewhere = config(num_steps=3, init_from=str(weights_of[1].checkpoint))
    assert elsewhere.fingerprint(points) == chosen.fingerprint(points)
    start.write_bytes(weights_of[2].checkpoint.read_bytes())
    with rejected("train.init_from", tmp_path / "run"):
        train(chosen, tmp_path / "run", points)


def test_a_run_to_continue_counts_by_its_contents(tmp_path: Path) -> None:
    points, parts = Points(50), [tmp_path / name for name in ("first", "run")]
    chosen = config(num_steps=4, continue_from=str(parts[0]))
    train(config(num_steps=2), parts[0], points)
    train(chosen, parts[1], points)
    assert train(chosen, parts[1], points).finished  # the same again
    shutil.rmtree(parts[0])
    train(config(num_steps=2, seed=1), parts[0], points)
    with rejected("train.continue_from", parts[1]):
        train(chosen, parts[1], points)


def test_weights_without_a_config_are_nobodys(tmp_path: Path) -> None:
    points, run = Points(50), tmp_path / "run"
    train(config(num_steps=2), run, points)
    (run / "config.json").unlink()
    with rejected(path="final.safetensors"):  # else they passed for those of a run that asks for more steps
        train(config(num_steps=4), run, points)
    shutil.rmtree(run / "snapshots")
    with rejected(path=".safetensors"):
        train(config(num_steps=4), run, points)
    shutil.rmtree(run / "state")
    assert train(config(num_steps=4), run, points).step == 4


@pytest.mark.parametrize("follows", [False, True])
def test_a_run_whose_folder_is_moved_ends(follows: bool, tmp_path: Path) -> None:
    """What it saved from then on would be of no run, or of the one that follows it there."""
    points, run, moved, steps = Points(50), tmp_path / "run", tmp_path / "moved", iter(range(100))
    chosen, other = config(num_steps=4, state_every=1), config(num_steps=2, seed=1)

    def move() -> bool:
        if next(steps) == 2:
            run.rename(moved)
            if follows:
                train(other, run, points)
        return False

    with rejected(path="run"):
        train(chosen, run, points, should_stop=move)
    assert [path.stem for path in (run / "state").glob("*")] == ["000000002"] * follows
    assert train(chosen, moved, points).finished
    whole = train(chosen, tmp_path / "whole", points).checkpoint
    assert (moved / "snapshots/final.safetensors").read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_a_continued_run_is_the_long_run_bit_for_bit(optimizer: str, tmp_path: Path) -> None:
    points, net = Points(50, 0.2), {**TINY_NET, "dropout": 0.2}
    settings: dict[str, Any] = {"consistency": {"coefficient": 0.5}, "log_every": 3, "optimizer": optimizer}
    settings["lr_ramp_images"] = 30  # by default it depends on the length
    whole = train(config(net, num_steps=30, **settings), tmp_path / "whole", points)
    train(config(net, num_steps=12, **settings), tmp_path / "first", points)
    again = {"continue_from": str(tmp_path / "first"), **settings}
    steps = iter(range(100))  # stopped once on the way
    train(config(net, num_steps=30, **again), tmp_path / "longer", points, should_stop=lambda: next(steps) == 5)
    shutil.rmtree(tmp_path / "first")  # which is not needed any more
    again["continue_from"] = "elsewhere/first"
    longer = train(config(net, num_steps=30, **again), tmp_path / "longer", points)
    assert longer.finished and longer.checkpoint.read_bytes() == whole.checkpoint.read_bytes()
    assert metrics(tmp_path / "longer") == [line for line in metrics(tmp_path / "whole") if line["step"] > 12]


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
@pytest.mark.parametrize("kind", ["unet", "adm", "dit"])
def test_weights_of_any_layout_in_memory_resume_bit_for_bit(kind: str, optimizer: str, tmp_path: Path) -> None:
    """Convolutions have channels last, and the fused optimizer goes through memory in its order."""
    images = from_arrays(np.random.default_rng(0).uniform(-1, 1, (40, 3, 8, 8)), 0.1)
    small = {"model_channels": 16, "channel_mult": [1, 2], "num_blocks": 1, "attn_resolutions": [4]}
    net = {"kind": kind, **({"width": 64, "num_blocks": 2, "patch": 2} if kind == "dit" else small)}
    chosen = config(net, num_steps=12, optimizer=optimizer)
    whole = train(chosen, tmp_path / "whole", images).checkpoint
    steps = iter(range(100))
    train(chosen, tmp_path / "parts", images, should_stop=lambda: next(steps) == 7)
    assert train(chosen, tmp_path / "parts", images).checkpoint.read_bytes() == whole.read_bytes()


def test_a_run_goes_on_under_other_settings(tmp_path: Path) -> None:
    points = Points(50, 0.2)
    train(config(num_steps=10), tmp_path / "a", points)
    changed = {"lr": 1e-4, "weight_decay": 0.1, "weight_decay_kind": "l2_sum"}
    changed |= {"consistency": {"coefficient": 1.0}}
    train(config(num_steps=15, continue_from=str(tmp_path / "a"), **changed), tmp_path / "b", points)
    last = train(config(num_steps=20, continue_from=str(tmp_path / "b")), tmp_path / "c", Points(60, 0.5))
    assert load_checkpoint(last.checkpoint).info.num_images_seen == 160
    bad: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("nowhere", {}, TINY_NET),
        ("c", {"num_steps": 20}, TINY_NET),
        ("c", {"batch_size": 4, "num_steps": 30}, TINY_NET),
        ("c", {"optimizer": "muon", "num_steps": 30}, TINY_NET),
        ("c", {"num_steps": 30}, {**TINY_NET, "width": 8}),
    ]
    for folder, settings, net in bad:
        with rejected("train.continue_from", str(tmp_path / folder)):
            train(config(net, continue_from=str(tmp_path / folder), **settings), tmp_path / "d", points)


def test_weight_decay_in_adams_gradient_has_the_unit_of_edms_loss(tmp_path: Path) -> None:
    """Beside a loss that is summed over pixels, as EDM's, the gradient and the decay are both larger."""
    points = Points(64)
    chosen = config(num_steps=1, weight_decay=0.3, weight_decay_kind="l2_sum", lr_ramp_images=0, lr=1e-2)
    train(chosen, tmp_path / "run", points)
    num_values = math.prod(points.image_shape)
    denoiser = build_denoiser(chosen.net_config(points), seed=0)
    optimizer = torch.optim.Adam(
        denoiser.parameters(), 1e-2, weight_decay=0.3, fused=True, eps=1e-8 * num_values
    )
    (losses(denoiser, Loader(points, 8).batch(0), chosen.train, 0.5).mean() * num_values).backward()
    optimizer.step()
    state = load_file(tmp_path / f"run/state/{1:09d}.safetensors")
    for key, value in denoiser.state_dict().items():
        torch.testing.assert_close(state[f"model/{key}"], value)


@pytest.mark.slow
def test_a_compiled_network_trains_the_same(tmp_path: Path) -> None:
    points = Points(50, 0.2)
    plain = train(config(num_steps=6), tmp_path / "plain", points)
    compiled = train(config(num_steps=6, compile=True), tmp_path / "compiled", points)
    torch.testing.assert_close(weights(compiled.checkpoint), weights(plain.checkpoint), rtol=1e-5, atol=1e-6)


def test_gpu_switches_are_on_while_training_only(tmp_path: Path) -> None:
    def switches() -> tuple[bool, ...]:
        backends = torch.backends
        return backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32, backends.cudnn.benchmark

    before, seen = switches(), set()
    for tf32 in (True, False):
        chosen = config(num_steps=1, tf32=tf32)
        train(chosen, tmp_path / str(tf32), Points(50), on_progress=lambda p: seen.add(switches()))
    assert seen == {(True, True, True), (False, False, True)} and switches() == before
    assert torch.tensor(1e-310, dtype=torch.float64).mul(1.0).item() == 1e-310  # the caller's small numbers


def test_every_option_trains(tmp_path: Path) -> None:
    options: list[dict[str, Any]] = [
        {"pairing": "level_first"},
        {"weight": "x_0"},
        {"precision": "bf16"},
        {"class_conditional": True},
        {"weight_decay": 0.1, "clip_grad": 0.5},
        {"snapshot_every": 10},
        {"consistency": {"coefficient": 1.0, "num_steps": 1, "start": 0.5}},
        {"consistency": {"coefficient": 1.0, "method": "original_code", "num_steps": 8, "num_samples": 32}},
    ]
    finals = set()
    for number, option in enumerate([{}, *options]):
        result = train(config(**option), tmp_path / str(number), Points(50, 0.2))
        assert all(value.isfinite().all() for value in weights(result.checkpoint).values())
        finals.add(result.checkpoint.read_bytes())
    assert len(finals) == len(options)  # each changes the result; snapshots alone do not
    assert (tmp_path / "6/snapshots/000000010.safetensors").exists()


def test_weights_are_kept_after_the_steps_asked_for(tmp_path: Path) -> None:
    points, asked = Points(50, 0.2), config(num_steps=6)
    result = train(asked, tmp_path / "run", points, snapshot_steps={2, 5, 6})
    names = sorted(path.stem for path in result.checkpoint.parent.iterdir())
    assert names == ["000000002", "000000005", "final"]
    plain = train(config(num_steps=6, snapshot_every=5), tmp_path / "plain", points)
    for name in ("snapshots/000000005.safetensors", FINAL):
        assert same_file(plain.run_dir, result.run_dir, name)


# --- it rejected what cannot work ---------------------------------------------------------------------


class PoisonedPoints(Points):
    """Points that turn to NaN from some call on; indices are remembered."""

    num_reads = 0
    good_reads = 8

    def read(self, index: torch.Tensor) -> torch.Tensor:
        self.num_reads += 1
        x_tn = super().read(index)
        if self.num_reads > self.good_reads:
            x_tn[index == 7] = math.nan
            x_tn[0] = math.nan
        return x_tn


def test_ten_bad_steps_in_a_row_end_the_run_with_a_diagnosis(tmp_path: Path) -> None:
    with pytest.raises(AssayError) as caught:
        train(config(), tmp_path / "run", PoisonedPoints(50, 0.2))
    assert (caught.value.key, caught.value.path) == ("train.lr", str(tmp_path / "run")) and caught.value.cure
    assert re.search(r"step 18: 10 steps .* not finite: sigma_t .* images \d+", caught.value.what)
    assert metrics(tmp_path / "run")[-1]["num_skipped"] == 7  # recorded at step 15
    assert sorted(path.name for path in (tmp_path / "run/state").iterdir())[-1] == f"{15:09d}.safetensors"


@pytest.mark.parametrize(
    "settings", [{"lr": 1000.0}, {"lr": 1e30, "num_steps": 5}, {"lr": 1e3, "optimizer": "muon"}]
)
def test_a_run_that_diverged_is_never_finished(settings: dict[str, Any], tmp_path: Path) -> None:
    for _ in range(2):  # nor when it is repeated
        with pytest.raises(AssayError) as caught:
            train(config(lr_ramp_images=0, **settings), tmp_path / "run", Points(50, 0.2))
        assert caught.value.key == "train.lr" and caught.value.cure
    assert not (tmp_path / "run" / FINAL).exists()


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_a_single_bad_step_is_skipped_and_counted(optimizer: str, tmp_path: Path) -> None:
    class OneBad(Points):
        num_reads = 0

        def read(self, index: torch.Tensor) -> torch.Tensor:
            self.num_reads += 1
            return super().read(index) * (math.nan if self.num_reads == 3 else 1)

    result = train(config(optimizer=optimizer), tmp_path / "run", OneBad(50, 0.2))
    assert all(value.isfinite().all() for value in weights(result.checkpoint).values())
    first, *_, last = metrics(tmp_path / "run")
    assert last["num_skipped"] == 1
    assert math.isfinite(first["loss"]) and sum(row["count"] for row in first["loss_by_sigma"]) == 4 * 8


def test_a_log_line_of_skipped_steps_is_json(tmp_path: Path) -> None:
    points = PoisonedPoints(50)
    points.good_reads = 1
    with pytest.raises(AssayError):
        train(config(batch_size=1, log_every=1), tmp_path / "run", points)
    good, bad, *_ = metrics(tmp_path / "run")
    assert good["loss"] > 0 and good["grad_norm"] > 0
    assert bad["loss"] is None and bad["grad_norm"] is None and bad["loss_by_sigma"] == []
    assert "NaN" not in (tmp_path / "run/metrics.jsonl").read_text()


@pytest.mark.parametrize(
    ("tree", "key", "cure"),
    [
        ({"trian": {}}, "trian", "did you mean train?"),
        ({"train": {"batchsize": 1}}, "train.batchsize", "did you mean batch_size?"),
        ({"train": {"consistency": {"coeff": 1}}}, "train.consistency.coeff", "did you mean coefficient?"),
        ({"train": {"lr": "fast"}}, "train.lr", "correct it"),
        ({"train": {"num_steps": 1.5}}, "train.num_steps", "correct it"),
        ({"train": {"pairing": "both"}}, "train.pairing", "correct it"),
        ({"train": {"seed": 2**63}}, "train.seed", "correct it"),
        (
            {"train": {"optimizer": "muon", "weight_decay": 0.1, "weight_decay_kind": "l2_sum"}},
            "train.weight_decay_kind",
            "decay decoupled, or use adam",
        ),
        (
            {"train": {"optimizer": "muon", "strategy": "fsdp"}},
            "train.strategy",
            "use adam with precision 32 or bf16, or strategy ddp",
        ),
        ({"data": {}}, "data.store", "add it"),
        ({"data": {"store": "x", "clean_fraction": 1.2}}, "data.clean_fraction", "correct it"),
        ({"data": {"store": "x", "clean_fraction": 0.1, "sigma": 1e39}}, "data.sigma", "correct it"),
    ],
)
def test_bad_settings_are_named_with_the_nearest_valid_name(tree: dict[str, Any], key: str, cure: str) -> None:
    with pytest.raises(AssayError) as caught:
        read_config({"data": {"store": "x"}, **tree})
    assert (caught.value.key, caught.value.cure) == (key, cure)


def test_set_takes_toml_values_and_strings() -> None:
    tree = override(
        {"train": {"lr": 1.0}}, ["train.lr=3e-4", "train.augment.flip_x=true", "data.store=some/path"]
    )
    assert tree == {"train": {"lr": 3e-4, "augment": {"flip_x": True}}, "data": {"store": "some/path"}}
    for bad in ("train.lr", "=3", "train.lr.x=1"):
        with rejected("settings"):
            override({"train": {"lr": 1.0}}, [bad])


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"train.batch_size": 5000}, "train.batch_size"),
        ({"train.init_from": "nowhere.safetensors"}, "train.init_from"),
        ({"data.clean_fraction": 1, "train.consistency.coefficient": 1}, "train.consistency.coefficient"),
        ({"net.widht": 3}, "net.widht"),
        ({"net.width": "wide"}, "net.width"),
        ({"net.width": 100_000_000}, "net"),
        ({"net.width": 2**63}, "net"),
        ({"net.sigma_data": 1e300}, "net.sigma_data"),
        ({"train.lr": 1e38}, "train.lr"),
        ({"train.augment.shift": 2**63}, "train.augment.shift"),
        ({"net.kind": "cnn"}, "net.kind"),
        ({"net.num_classes": 3}, "net.num_classes"),
    ],
)
def test_bad_runs_are_rejected_before_any_work(
    settings: dict[str, Any], key: str, digits: Path, tmp_path: Path
) -> None:
    arguments = ["train", *digits_settings(digits, **settings), "-o", tmp_path / "run"]
    assert failing(*arguments).key == failing(*arguments, "--dry-run").key == key
    assert not (tmp_path / "run/state").exists()


def test_what_the_command_lacks_is_asked_for(tmp_path: Path) -> None:
    for arguments, key in [
        (("--preset", "digits"), "data.store"),
        (("--sigma", 0.5), "sigma"),
        (("--set", "data.stor=digits"), "data.store"),
        (("digits", "--minutes", 1, "--num-steps", 5), "minutes"),
        (("digits", "--minutes", 1, "--devices", 2), "minutes"),
        (("digits", "--preset", "digit"), "preset"),
        (("digits", "--devices", "two"), "devices"),
    ]:
        assert failing("train", *arguments, "-o", tmp_path / "run").key == key


def test_a_dry_run_says_how_long_it_takes(digits: Path, tmp_path: Path) -> None:
    said = run("train", *digits_settings(digits), "-o", tmp_path / "run", "--dry-run")
    assert re.search(r"time +about \d+ (s|min)", said) and not (tmp_path / "run").exists()
    assert said.startswith("images ")
    assert "levels below 0.5 are learnt from the 10% clean images only" in " ".join(said.split())
    other = run(
        "train", *digits_settings(digits), "--pairing", "level_first", "-o", tmp_path / "run", "--dry-run"
    )
    assert len(other.splitlines()) == 7 and "level_first" not in other


def test_another_config_or_changed_data_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    result = train(config(), tmp_path / "run", Points(50))
    before = result.checkpoint.read_bytes()
    with rejected("data", str(tmp_path / "run")):
        train(config(), tmp_path / "run", Points(50, seed=1))
    with rejected("net.width", str(tmp_path / "run")):
        train(config({**TINY_NET, "width": 8}, lr=1e-4), tmp_path / "run", Points(50))
    assert result.checkpoint.read_bytes() == before


def test_a_second_process_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    def intrude() -> None:
        with pytest.raises(AssayError, match="is being trained by process"):
            train(config(), tmp_path / "run", Points(50))

    found: list[int] = []
    tell = lambda progress: found.append(ended(in_child(intrude)))  # noqa: E731
    train(config(num_steps=1), tmp_path / "run", Points(50), on_progress=tell)
    assert found == [0]
    with rejected("train.num_steps"):  # and one that failed lets go of the folder
        train(config(), tmp_path / "run", Points(50))
    assert ended(in_child(lambda: train(config(), tmp_path / "run", Points(50)))) == 3


def test_torchrun_without_devices_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(AssayError) as caught:
        train(config(), tmp_path / "run", Points(50))
    assert caught.value.key == "devices" and "devices = 4 and num_nodes = 2" in str(caught.value.cure)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_full_disk_keeps_what_was_saved(tmp_path: Path) -> None:
    """A limit on file size stands in for the disk: the state cannot be written, the older one stays whole."""
    train(config(), tmp_path / "whole", Points(50))
    code = """
import resource, sys, torch
from pathlib import Path
from tests.test_train import config, Points, train
torch.set_num_threads(1)
run_dir = Path(sys.argv[1])
steps = iter(range(100))
train(config(), run_dir, Points(50), should_stop=lambda: next(steps) == 7)
size = next((run_dir / "state").glob("*.safetensors")).stat().st_size
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, size // 2))
try:
    train(config(), run_dir, Points(50))
except Exception as error:
    print(type(error).__name__, error)
"""
    root, words = Path(__file__).parent.parent, [sys.executable, "-c", code, str(tmp_path / "run")]
    done = subprocess.run(words, capture_output=True, text=True, cwd=root)
    said = done.stdout + done.stderr
    assert re.search(r"OSError .* could not be written: the disk is full \(.*File too large", said), said
    assert not list((tmp_path / "run").rglob(".assay-partial"))
    train(config(), tmp_path / "run", Points(50))  # space again: it goes on from step 7
    assert same_file(tmp_path / "run", tmp_path / "whole")


def test_a_damaged_log_is_named_and_a_last_line_cut_short_is_dropped(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    log.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"ste')
    trim_log(log, 2)
    assert log.read_text() == '{"step": 1}\n{"step": 2}\n'
    for line in ("{", "[]", '{"step": "x"}', "\x00"):
        log.write_text('{"step": 1}\n' + line + '\n{"step": 3}\n')
        with pytest.raises(AssayError) as caught:
            trim_log(log, 2)
        assert (caught.value.path, caught.value.cure) == (str(log), "remove line 2")
