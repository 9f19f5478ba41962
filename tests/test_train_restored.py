"""Restore and retrain: restored images are what theory says, are never clean, and rounds resume bit for bit."""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from assay.checkpoint import CheckpointInfo, load_checkpoint
from assay.data import Loader, Restored, open_store, simulate
from assay.data.arrays import from_arrays
from assay.data.store import Parents
from assay.generate import lowest_learnt, restore
from assay.train import RunConfig, read_config, train
from assay.train.restored import round_ends, round_path, snapshot_at
from tests.commands import failing, run
from tests.points import ORACLE, Points
from tests.test_train import FINAL, ended, in_child, metrics, same_file


def config(**settings: Any) -> RunConfig:
    chosen = {"num_steps": 20, "batch_size": 8, "log_every": 5, "state_every": 4, "rounds": 2, **settings}
    net = {"kind": "mlp", "width": 16, "num_blocks": 1, "dropout": 0.2}
    return read_config({"data": {"store": "unused"}, "net": net, "train": chosen})


def test_a_restored_store_knows_its_parents_and_is_not_clean(tmp_path: Path) -> None:
    source = Points(50, 0.2)
    store = open_store(restore(ORACLE, source, tmp_path / "store", "sha").path)
    method = {"num_steps": 16, "stop_at": 0.002}
    assert store.meta.restored_from == Parents(images=source.fingerprint, checkpoint="sha", method=method)
    assert store.meta.num_clean == 10
    assert store.usable_from.tolist() == source.sigma_tn.tolist()
    assert store.sigma_tn.tolist() == [0] * 50 and store.label.tolist() == source.label.tolist()
    index = torch.arange(50)
    assert torch.equal(store.read(index[:10]), source.read(index[:10]))  # clean images stay as they are
    with pytest.raises(ValueError, match="noisy already"):
        simulate(store, 0.5, 0.3)


def test_the_flow_keeps_the_law_and_the_mean_is_the_oracles(tmp_path: Path) -> None:
    source = Points(4000, 0.0)
    flow = restore(ORACLE, source, tmp_path / "flow", "sha").read(torch.arange(4000))
    clean = Points(4000, seed=3).x_tn
    # The flow carries the law of the noisy points to that of the clean ones, the mean shrinks it.
    mean = restore(ORACLE, source, tmp_path / "mean", "sha", stop_at=0.3).read(torch.arange(4000))
    assert torch.allclose(mean, ORACLE(source.x_tn, source.sigma_tn), atol=1e-6)
    left = (flow - clean).flatten(1)
    assert left.mean(0).abs().max() < 0.03 and abs(flow.var() / clean.var() - 1) < 0.02
    assert mean.var() < 0.97 * clean.var()


def test_each_level_is_trained_on_the_image_that_can_teach_it(tmp_path: Path) -> None:
    source = Points(50, 0.2)
    store = restore(ORACLE, source, tmp_path / "store", "sha")
    both = Restored(source, store)
    assert both.sigma_tn is source.sigma_tn
    index, sigma_t = torch.tensor([3, 20, 20, 20]), torch.tensor([0.01, 0.1, 0.3, 0.31])
    x, sigma_tn = both.read_at(index, sigma_t)
    assert sigma_tn.tolist() == [0, 0, 0, source.sigma_tn[20].item()]
    assert torch.equal(x[1:3], store.read(index[1:3])) and torch.equal(x[3], source.x_tn[20])
    batches = [Loader(both, 50).batch(step) for step in range(40)]
    drawn = torch.cat([batch.sigma_t for batch in batches])
    alone = torch.cat([Loader(Points(50), 50).batch(step).sigma_t for step in range(40)])
    assert torch.equal(drawn, alone)  # the law of clean images: no level is left out
    assert all(bool((batch.sigma_t > batch.sigma_tn).all()) for batch in batches)
    with pytest.raises(ValueError, match="not restored from"):
        Restored(Points(50, 0.3), store)


def test_a_model_is_trusted_below_the_noise_once_something_taught_it() -> None:
    noisy = CheckpointInfo(sigma_tn=((0.1, 0.5), (0.3, 0.5)))
    assert lowest_learnt(noisy) == 0.1
    for other in ({"rounds": 1}, {"consistency": True}, {"sigma_tn": ((0.0, 0.1), (0.3, 0.9))}):
        assert lowest_learnt(noisy.model_copy(update=other)) == 0.002


def kill_until_finished(call: Callable[[], object], num_kills: int) -> None:
    """Train in child processes, `num_kills` of which are killed at random moments."""
    rng, killed = random.Random(0), 0
    while True:
        child = in_child(call)
        if killed < num_kills:
            time.sleep(rng.uniform(0.0, 0.25))
            os.kill(child, signal.SIGKILL)
        status = ended(child)
        if status == 0:
            return
        assert status == -signal.SIGKILL, "the child failed by itself"
        killed += 1


def test_killed_at_random_moments_loops_equal_the_undisturbed(tmp_path: Path) -> None:
    chosen, source = config(), Points(50, 0.2)
    whole = train(chosen, tmp_path / "whole", source)
    assert whole.finished and whole.step == 40 and round_ends(chosen.train) == [20, 30, 40]
    kill_until_finished(lambda: train(chosen, tmp_path / "killed", source), num_kills=12)
    for name in (FINAL, "restored-2/images.npy", "restored-2/meta.json"):
        assert same_file(tmp_path / "killed", tmp_path / "whole", name)
    for number in range(3):
        logs = [metrics(round_path(tmp_path / name, number)) for name in ("killed", "whole")]
        assert logs[0] == logs[1]
    info = load_checkpoint(whole.checkpoint).info
    assert (info.rounds, info.num_images_seen, info.clean_fraction) == (2, 40 * 8, pytest.approx(0.2))
    parents = open_store(tmp_path / "whole/restored-2").meta.restored_from
    assert parents is not None and parents.images == source.fingerprint


def test_stopping_between_and_within_loops_resumes_and_snapshots_are_counted_over_all(tmp_path: Path) -> None:
    chosen, source = config(), Points(50, 0.0)
    train(chosen, tmp_path / "whole", source, snapshot_steps=(7, 26))
    steps: list[int] = []
    for _ in range(30):  # stops after a few steps each time, also while restoring
        budget = iter([False] * 9)
        calls: Any = {"on_progress": lambda now: steps.append(now.step)}
        calls["should_stop"] = lambda budget=budget: next(budget, True)
        result = train(chosen, tmp_path / "stopped", source, snapshot_steps=(7, 26), **calls)
        if result.finished:
            break
    assert result.finished and steps == list(range(1, 41))
    for step in (7, 20, 26, 30, 40):
        kept = [snapshot_at(chosen.train, tmp_path / name, step) for name in ("whole", "stopped")]
        assert kept[0].read_bytes() == kept[1].read_bytes()
        assert load_checkpoint(kept[0]).info.num_images_seen == 8 * step
    assert not (round_path(tmp_path / "whole", 1) / "state").exists()
    # The first loop of three is the first of two.
    train(config(rounds=1), tmp_path / "one", source)
    assert (tmp_path / "one" / FINAL).read_bytes() == snapshot_at(
        chosen.train, tmp_path / "whole", 30
    ).read_bytes()


def test_the_command_restores_a_store_and_refuses_to_overwrite(tmp_path: Path) -> None:
    source = Points(50, 0.2)
    train(config(rounds=0), tmp_path / "run", source)
    from_arrays(source.x_tn, source.sigma_tn, source.label).save(tmp_path / "store")
    arguments = ["denoise", tmp_path / "run", tmp_path / "store", "-o", tmp_path / "restored", "--restore"]
    assert "40 of 50 images restored" in run(*arguments)
    made = open_store(tmp_path / "restored")
    assert made.meta.restored_from is not None
    assert made.meta.restored_from.images == open_store(tmp_path / "store").fingerprint
    assert failing(*arguments).path == str(tmp_path / "restored")
