"""Studies in real processes that divide the work, are killed, stopped and starved of disk."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from assay.data.arrays import from_arrays
from assay.errors import AssayError, AssayWarning
from assay.study import OpenStudy, run_local
from assay.study.run import drive, gpu_shares
from assay.study.stages import Update
from tests.errors import rejected
from tests.processes import seconds_until_gone, workers_of
from tests.studies import DESIGN, WILD, fewer, kept, outcome, prepared, short, weights

ASSAY = "from assay.cli import main; main()"


@contextmanager
def started(code: str, *arguments: object, **options: Any) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def test_images_that_change_while_a_study_runs_end_it(tmp_path: Path) -> None:
    """Their results would pass for those of the images that it began with."""
    images = np.random.default_rng(0).uniform(-1, 1, (80, 4, 4))
    store, others = tmp_path / "store", tmp_path / "others"
    from_arrays(images).save(store)
    from_arrays(-images).save(others)
    opened = prepared(
        tmp_path / "study", lambda spec: fewer(spec).replace('store = "digits"', f'store = "{store}"')
    )
    ended = list[Update]()

    def hear(update: Update) -> None:
        if update.phase == "done" and not ended:
            store.rename(tmp_path / "first")
            others.rename(store)
        if update.is_end:
            ended.append(update)

    with pytest.raises(AssayError, match="has changed while the study ran") as caught:
        run_local(opened, 1, on_update=hear)
    assert caught.value.path == str(store) and [each.phase for each in ended] == ["done", "changed"]
    store.rename(others)
    (tmp_path / "first").rename(store)
    run_local(opened, 1)
    assert not opened.missing()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> OpenStudy:
    """The study run by one worker that nothing happened to."""
    opened = prepared(tmp_path_factory.mktemp("undisturbed"), fewer)
    run_local(opened, 1)
    assert not opened.missing() and len(opened.runs) == 3
    return opened


def assert_same(opened: OpenStudy, undisturbed: OpenStudy) -> None:
    assert outcome(opened) == outcome(undisturbed)
    assert weights(opened) == weights(undisturbed)
    assert outcome(opened).count("\n") == sum(len(run.ways) for run in opened.runs) == 5


def test_workers_with_a_gpu_each_one_of_them_killed_give_identical_results(
    undisturbed: OpenStudy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This process believes in two GPUs; its workers look for themselves, find none, and use the CPU.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    opened, updates, victims, seen = prepared(tmp_path, fewer), list[Update](), list[int](), set[str]()

    def look(update: Update) -> None:
        updates.append(update)
        workers = workers_of(os.getpid())
        for pid in workers:
            with suppress(ProcessLookupError):
                lines = Path(f"/proc/{pid}/environ").read_text().split("\0")
                seen.update(line for line in lines if line.startswith("CUDA_VISIBLE_DEVICES="))
        if update.phase == "training" and update.done and not victims:
            victims.append(workers[0])
            os.kill(victims[0], signal.SIGKILL)  # another worker takes its run and its GPU

    run_local(opened, 8, look)
    assert victims and seen == {"CUDA_VISIBLE_DEVICES=4", "CUDA_VISIBLE_DEVICES=6"}
    ends = [(update.run, update.phase) for update in updates if update.is_end and update.phase != "held"]
    assert [phase for _, phase in ends].count("lost") == 1
    assert sorted(end for end in ends if end[1] != "lost") == sorted((run.key, "done") for run in opened.runs)
    assert_same(opened, undisturbed)
    before = kept(opened)
    run_local(opened, 2, updates.append)  # nothing is left to do, and nothing is done
    assert kept(opened) == before and not workers_of(os.getpid())


@pytest.mark.parametrize(
    ("num_gpus", "visible", "gpus_per_run", "expected"),
    [
        (3, "", None, ["0", "1", "2"]),
        (5, "", 2, ["0,1", "2,3"]),  # the fifth would be half of a run
        (3, "7, GPU-5b, 2", 1, ["7", "GPU-5b", "2"]),
        (4, "", 0, []),
        (0, "", None, []),
    ],
)
def test_gpus_are_shared_out(
    num_gpus: int, visible: str, gpus_per_run: int | None, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_shares(gpus_per_run) == expected
    with rejected("gpus_per_run"):
        gpu_shares(6)


def test_threads_are_limited_everywhere() -> None:
    # In a process of its own, for the limits stay. Numpy's and scipy's BLAS count as much as torch.
    code = """
import numpy, scipy.linalg, torch, threadpoolctl
from assay.devices import limit_threads
limit_threads(1)
print(torch.get_num_threads(), *{pool["num_threads"] for pool in threadpoolctl.threadpool_info()})
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"}
    with started(code, env=environment) as process:
        assert process.communicate()[0].split() == ["1", "1"]


@pytest.mark.slow
def test_control_c_changes_nothing(undisturbed: OpenStudy, tmp_path: Path) -> None:
    opened = prepared(tmp_path, fewer)
    with started(ASSAY, "study", "run", opened.folder, "--workers", "2", start_new_session=True) as process:
        while not (states := list(opened.folder.glob("runs/*/state/*.safetensors"))):
            assert process.poll() is None
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers too
        said, _ = process.communicate()
    assert process.returncode == 130
    assert said.rstrip().endswith("Stopped and saved. Repeat the command to resume.")
    begun = states[0].parents[1].name
    step = max(int(state.stem) for state in opened.folder.glob(f"runs/{begun}/state/*.safetensors"))
    updates: list[Update] = []
    run_local(opened, 2, updates.append)
    trained = [each.done for each in updates if (each.run, each.phase) == (begun, "training") and each.done]
    assert trained[0] > step  # it goes on from there; of the steps it tells some, not all
    assert_same(opened, undisturbed)
    for run in opened.runs:  # every step is recorded once: none was lost, none counted twice
        lines = (opened.work(run).run_dir / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == list(range(1, 121))


def test_a_worker_ends_with_its_driver_whatever_it_does(tmp_path: Path) -> None:
    """It imports what the driver can, but not the driver's program, which may take a minute to import."""
    (tmp_path / "work.py").write_text(
        "import time\ndef work(connection): connection.send('ready'); time.sleep(600)\n"
    )
    (tmp_path / "program.py").write_text(
        "import os, signal, time, work\n"
        "if __name__ != '__main__': time.sleep(600)\n"
        "from assay.processes import Workers\n"
        "workers = Workers()\n"
        "connection = workers.start(work.work)\n"
        "worker = workers.processes[connection].pid\n"
        "print(worker, connection.recv(), flush=True)\n"
        "os.kill(worker, signal.SIGSTOP)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, tmp_path / "program.py"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        worker, said = driver.stdout.readline().split()
        assert said == "ready" and driver.wait() == -signal.SIGKILL
        seconds_until_gone([int(worker)])


def test_a_job_that_kills_its_workers_fails_after_the_second(tmp_path: Path) -> None:
    opened = prepared(tmp_path, short)
    ends: list[Update] = []

    def kill(update: Update) -> None:
        if update.phase != "training":
            ends.append(update)
        for worker in workers_of(os.getpid()):
            os.kill(worker, signal.SIGKILL)

    run_local(opened, 1, kill)
    lost, end = ends
    assert (lost.phase, end.phase) == ("lost", "failed") and end.reason.startswith("2 workers died of it")
    assert opened.failure(opened.runs[0]) == end.reason and opened.missing()
    run_local(opened, 1)
    assert not opened.missing() and opened.failure(opened.runs[0]) is None


def test_a_lost_worker_is_told_with_its_run(tmp_path: Path) -> None:
    opened, lines, victims = prepared(tmp_path, short), list[str](), list[int]()

    def kill(name: str, done: int, total: int, note: str) -> None:
        if "training" in note and not victims:
            victims.extend(workers_of(os.getpid()))
            os.kill(victims[0], signal.SIGKILL)

    drive(opened, tell=kill, say=lines.append, num_workers=1)
    title, how = opened.runs[0].title, "its worker died (exit code -9, killed: is there enough memory?)"
    assert lines == [f"lost    {title}: {how}; another one resumes it", f"done    {title}"]


def test_a_full_disk_ends_the_study_at_its_first_run(tmp_path: Path) -> None:
    opened = prepared(tmp_path, fewer)
    limit = 30_000  # bytes: room for results and reasons, none for a state
    options = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))}
    command = ASSAY, "study", "run", opened.folder, "--workers", "1"
    with started(*command, stderr=subprocess.STDOUT, **options) as process:
        lines = process.communicate()[0].splitlines()
    assert process.returncode == 1
    assert lines[-1].startswith(f"error: {opened.folder}: the disk is full; free some space")
    assert [line.split(":")[0] for line in lines if line.startswith(("full", "failed"))] == [
        f"full    {opened.runs[0].title}"
    ]
    assert len([*opened.folder.glob("runs/*/config.json")]) == 1  # the others were not tried
    assert not opened.failure(opened.runs[0])  # it is not the run's fault


@pytest.mark.parametrize("name", ["results.csv", "levels.csv", "tables.md", "report.html"])
def test_results_of_others_are_not_replaced(name: str, tmp_path: Path) -> None:
    opened = prepared(tmp_path, short)
    (opened.folder / name).write_text("mine")
    with rejected(path=opened.folder):
        drive(opened)
    assert (opened.folder / name).read_text() == "mine"


def test_processes_that_share_a_folder_divide_the_runs_and_take_over_from_a_killed_one(
    undisturbed: OpenStudy, tmp_path: Path
) -> None:
    opened = prepared(tmp_path, fewer)
    command = ASSAY, "study", "run", opened.folder, "--workers", "1"
    with started(*command) as victim:
        while not (locks := list(opened.folder.glob("runs/*/.assay-partial/training.lock"))):
            assert victim.poll() is None
            time.sleep(0.02)
        (worker,) = workers_of(victim.pid)
        os.kill(worker, signal.SIGSTOP)  # it keeps its run, and does nothing
        with started(*command) as first, started(*command) as second:
            while len(left := opened.missing()) > 1:
                assert first.poll() is None and second.poll() is None
                time.sleep(0.05)
            assert [opened.work(run).run_dir for run in left] == [locks[0].parents[1]]
            victim.kill()  # and its worker with it
            said = [process.communicate()[0] for process in (first, second)]
    assert first.returncode == second.returncode == 0
    ends = [line for each in said for line in each.splitlines() if line.startswith("done ")]
    assert sorted(ends) == sorted(f"done    {run.title}" for run in opened.runs)  # each by one of them
    assert all(f"The report is {opened.folder / 'report.html'}" in each for each in said)
    assert_same(opened, undisturbed)


def test_a_run_that_diverges_is_recorded_and_the_others_go_on(tmp_path: Path) -> None:
    opened = prepared(tmp_path, lambda spec: short(spec) + WILD)
    updates: list[Update] = []
    run_local(opened, 1, updates.append)
    _, wild = opened.runs
    assert opened.missing() == [wild]
    assert "10 steps in a row without a finite gradient" in (opened.failure(wild) or "")
    reasons = {update.run: update.reason for update in updates if update.phase == "failed"}
    assert reasons == {run.key: opened.failure(run) for run in (wild,)}


@pytest.mark.slow
def test_an_unwritable_run_and_a_full_disk_are_reported_and_keep_the_rest(
    undisturbed: OpenStudy, tmp_path: Path
) -> None:
    opened = prepared(tmp_path, fewer)
    first, blocked, third = opened.runs
    run_local(replace(opened, runs=[first]), 1)
    before = kept(opened)
    opened.work(blocked).run_dir.touch()  # a file where the run's folder should be
    limit = 30_000  # bytes: room for results and reasons, none for a state
    options = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))}
    with started(ASSAY, "study", "run", opened.folder, "--workers", "1", **options) as process:
        said, _ = process.communicate()
    assert process.returncode == 1
    failed, full = (line for line in said.splitlines() if line.startswith(("failed ", "full ")))
    assert "Error: [Errno" in failed and "File too large" in full
    assert blocked.title in failed and third.title in full
    assert kept(opened) == before and len(before) == 2  # an outcome and a checkpoint
    opened.work(blocked).run_dir.unlink()
    run_local(opened, 1)
    assert before.items() <= kept(opened).items()
    assert_same(opened, undisturbed)


@pytest.mark.parametrize(("minutes", "num_blocks"), [(1, 2), (11, 2), (12, 3), (27, 4), (None, 2)])
def test_a_block_that_would_end_too_late_is_not_begun(
    minutes: float | None, num_blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block of four runs takes four minutes, but the fourth, on a machine that is busy, eight."""
    opened = prepared(tmp_path, lambda spec: DESIGN + "ladder = [1, 2, 4]\n")
    finished, now = set[str](), 0.0

    def runner(opened: OpenStudy, **calls: object) -> None:
        nonlocal now
        now += sum(60.0 * (1 + (run.config.train.seed == 3)) for run in opened.missing())
        finished.update(run.key for run in opened.runs)

    monkeypatch.setattr(
        OpenStudy, "missing", lambda self: [run for run in self.runs if run.key not in finished]
    )
    monkeypatch.setattr("assay.study.run.goal_prices", lambda opened: ())
    monkeypatch.setattr("assay.study.run.time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr("assay.study.run.run_local", runner)
    with pytest.warns(AssayWarning, match="epochs of the largest size are too few for a price"):
        end, _, failed = drive(opened, minutes=minutes)
    assert end.num_blocks == num_blocks and not failed
    limited = SimpleNamespace(limited=4.0, low=0.0, high=0.5, worth=0.1, rate=(10, 2, 99), verdict="undecided")
    limited.sigma, limited.goal = 0.3, "structure"
    monkeypatch.setattr("assay.study.run.goal_prices", lambda opened: (limited,))
    assert drive(end, until=2)[0].num_blocks == num_blocks  # more blocks would not decide it
    assert minutes in (None, 1) or now <= 60 * (minutes or 0)
