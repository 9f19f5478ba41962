"""Studies on a real Ray cluster on this machine, one of whose nodes is killed."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from safetensors.torch import load_file

from assay.errors import AssayError
from assay.study import OpenStudy, run_local
from assay.study.cluster import run_on_ray
from assay.study.stages import Update, run_path
from tests.errors import rejected
from tests.studies import WILD, fewer, kept, outcome, prepared, short, weights

NODE_OF_TWO: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 80_000_000}
NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80_000_000}  # bytes; the least that Ray takes


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head with one core."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_worker_niceness", "0")  # 15 by default: they would starve on a busy machine
        running = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
        yield running
        running.shutdown()


def longer(spec: str) -> str:
    """Three trainings: clean, noisy, noisy with consistency."""
    return fewer(spec).replace("num_steps = 120", "num_steps = 400")


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> OpenStudy:
    """The same study without Ray."""
    opened = prepared(tmp_path_factory.mktemp("local"), longer)
    run_local(opened, 1)
    assert all(opened.is_finished(run) for run in opened.runs) and len(opened.runs) == 3
    return opened


def assert_same(opened: OpenStudy, local: OpenStudy) -> None:
    assert outcome(opened) == outcome(local) and outcome(opened).count("\n") == sum(
        len(run.ways) for run in opened.runs
    )
    assert weights(opened) == weights(local)
    for run in opened.runs:  # the folder looks as if the study had run here
        mine, theirs = (
            {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file() and path.name[0] != "."}
            for run in (run_path(opened.folder, run), run_path(local.folder, run))
        )
        assert {name for name in mine ^ theirs if "tensorboard" not in name} == set()


@pytest.mark.slow
def test_two_processes_per_run_and_a_node_that_dies_change_nothing(
    cluster: Cluster, local: OpenStudy, tmp_path: Path
) -> None:
    opened = prepared(tmp_path, longer)
    opened = replace(opened, runs=opened.runs[:2])
    nodes = [cluster.add_node(**NODE_OF_TWO) for _ in range(2)]  # the head has no room for two processes
    cluster.wait_for_nodes()
    steps: dict[str, list[int]] = {}
    killed_at: dict[str, int] = {}
    ends = []

    def kill_when_both_train(update: Update) -> None:
        if update.phase == "training":
            steps.setdefault(update.run, []).append(update.done)
        elif update.phase not in ("sampling", "measuring"):
            ends.append((update.phase, update.reason))
        if not killed_at and len([run for run in steps if steps[run][-1] > 0]) == 2:
            killed_at.update({run: len(steps[run]) for run in steps})
            cluster.remove_node(nodes[0], allow_graceful=False)  # SIGKILL
            nodes.append(cluster.add_node(**NODE_OF_TWO))  # another joins while the study runs

    run_on_ray(opened, cluster.address, on_update=kill_when_both_train, num_ranks=2)
    assert not ray.is_initialized()
    assert ends == [("done", "")] * 2
    # Of the two that were training, the one on the dead node began again at its first step.
    assert sorted(0 in steps[run][number:] for run, number in killed_at.items()) == [False, True]
    # Two processes add their gradients in another order than one does: equal but for rounding.
    for run in opened.folder.glob("runs/*"):
        ours, theirs = (
            load_file(folder / "snapshots/final.safetensors")
            for folder in (run, local.folder / "runs" / run.name)
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    finished = {outcome.configuration: outcome for _, outcome in opened.outcomes()}
    assert len(finished) >= 2
    for setting, ours in finished.items():
        (theirs,) = (outcome for _, outcome in local.outcomes() if outcome.configuration == setting)
        assert ours.evaluation.fd == pytest.approx(theirs.evaluation.fd, rel=1e-4)
    for node in nodes[1:]:
        cluster.remove_node(node)


DRIVER = """
import sys
from pathlib import Path
from assay.study import open_study
from assay.study.cluster import run_on_ray
folder = Path(sys.argv[1])
tell = lambda update: print(update.phase, update.done, flush=True)
run_on_ray(open_study(folder / "study.toml", folder), sys.argv[2], on_update=tell)
"""


@pytest.mark.slow
def test_a_killed_driver_and_a_stop_change_nothing(cluster: Cluster, local: OpenStudy, tmp_path: Path) -> None:
    opened = prepared(tmp_path, longer)
    command = [sys.executable, "-c", DRIVER, str(opened.folder), cluster.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        for line in driver.stdout:
            if line.startswith("training ") and line != "training 0\n":
                driver.kill()
                break
        else:
            pytest.fail("the driver ended before it was killed")
    assert not kept(opened)

    seen: list[Update] = []
    handler = signal.getsignal(signal.SIGTERM)
    run_on_ray(opened, cluster.address, 0, seen.append, lambda: any(u.done > 50 for u in seen))
    assert signal.getsignal(signal.SIGTERM) is handler
    ends = [update.phase for update in seen if update.is_end]
    assert ends == ["stopped"] * 3 and not kept(opened)
    (state,) = {path.parent for path in opened.folder.glob("runs/*/state/*.safetensors")}
    step = max(int(path.stem) for path in state.iterdir())
    assert 50 < step < 400

    begun = next(run for run in opened.runs if run.key == state.parent.name)
    other = next(run for run in opened.runs if run is not begun)
    again: list[Update] = []
    run_on_ray(replace(opened, runs=[begun, other]), cluster.address, on_update=again.append)
    assert [update.phase for update in again if update.is_end] == ["done"] * 2
    trained = [update.done for update in again if (update.phase, update.run) == ("training", begun.key)]
    assert min(done for done in trained if done) > step  # continued; of the steps it tells some, not all
    before = kept(opened)
    run_local(opened, 1)  # and this machine does the rest
    assert before.items() <= kept(opened).items()
    assert_same(opened, local)


@pytest.mark.slow
def test_failures_are_recorded_and_impossible_requests_refused(cluster: Cluster, tmp_path: Path) -> None:
    opened = prepared(tmp_path, lambda spec: short(spec) + WILD)
    seen: list[Update] = []
    with rejected("gpus_per_run"):
        run_on_ray(opened, cluster.address, 2, seen.append)
    assert not ray.is_initialized() and not seen
    run_on_ray(opened, cluster.address, 0, seen.append)
    good, bad = opened.runs
    assert opened.is_finished(good) and opened.failure(good) is None
    assert "10 steps in a row without a finite gradient" in (opened.failure(bad) or "")
    (failed,) = (update for update in seen if update.phase == "failed")
    assert failed.run == bad.key and failed.reason == opened.failure(bad)


def test_no_cluster_and_no_ray_are_said_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = prepared(tmp_path)
    with rejected(path="127.0.0.1:1"):
        run_on_ray(opened, "127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(AssayError) as caught:
        run_on_ray(opened, "auto")
    assert (caught.value.cure or "").startswith("pip install")
