"""Runs on a Ray cluster: one remote task each, on machines that need not share a file system.

The packed store and the shared files travel through Ray's object store, once to each node. A task
unpacks them into a folder of its own, with what there is of its run, and does there what a local worker
does; its run's files come back as its value, and the driver writes them into the study's folder, outcomes
last. So the folder looks as if the study had run here, and either way continues what the other began.
A task whose node dies is started again on another one. A run that fails is repeated on another node
if there is one, from its last state; if it fails again, that is reported. A task that takes several GPUs, or is
to train with several processes, starts them on its node: a training does not span nodes.
"""

import math
import re
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from assay.archives import check_member_name
from assay.data.config import DataConfig
from assay.data.shards import address_of
from assay.devices import limit_threads
from assay.files import write_whole
from assay.study.pool import record_failure
from assay.study.run import OpenStudy, check_ranks_of_runs
from assay.study.runs import Run
from assay.study.spec import Study
from assay.study.stages import Update, Work, execute, failure_path, run_path

_MAX_RETRIES = 10  # of a task whose node dies; clusters of cheap machines lose them often
_SECONDS_TO_ANSWER = 10.0  # for the address
_SECONDS_TO_SAVE = 60.0  # for running tasks after a stop; then they are cancelled


@dataclass(frozen=True)
class _Ended:
    """How a task ended, the files of its run, and the node it ran on."""

    end: Update
    files: dict[str, np.ndarray]
    node: str


def run_on_ray(
    opened: OpenStudy,
    address: str,
    gpus_per_run: float | None = None,
    on_update: Callable[[Update], None] = lambda update: None,
    should_stop: Callable[[], bool] = lambda: False,
    ranks_per_run: int | None = None,
) -> None:
    """Take every unfinished run to its end on the Ray cluster at `address`; failures are recorded.

    Each takes `gpus_per_run` GPUs of a node (default: 1 if a node has any), or a part of one, and trains with
    `ranks_per_run` processes, by default one per GPU.
    """
    try:
        import ray
    except ImportError:
        raise ImportError("studies on a Ray cluster need an extra package: pip install 'assay[ray]'") from None

    was_connected = ray.is_initialized()
    if not was_connected:
        _connect(ray, address)
    try:
        if gpus_per_run is None:
            gpus_per_run = float(any(node["Alive"] and node["Resources"].get("GPU") for node in ray.nodes()))
        num_ranks = ranks_per_run or max(1, int(gpus_per_run))
        check_ranks_of_runs(opened.runs, num_ranks)
        _check_resources(ray, address, gpus_per_run, num_ranks)
        _run(ray, opened, gpus_per_run, num_ranks, on_update, should_stop)
    finally:
        if not was_connected:
            ray.shutdown()


def _connect(ray: Any, address: str) -> None:
    """Join the cluster, and keep this process's own way of stopping, which Ray would replace."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        if host_and_port := re.fullmatch(r"([\w.-]+):(\d+)", address):
            with socket.create_connection((host_and_port[1], int(host_and_port[2])), _SECONDS_TO_ANSWER):
                pass  # the address answers; Ray itself would try for minutes if it did not
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, ValueError, RuntimeError) as error:
        raise ConnectionError(
            f"no Ray cluster at {address!r} ({str(error).splitlines()[0]}): start one with `ray start --head` "
            "and give its address"
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _check_resources(ray: Any, address: str, gpus_per_run: float, num_ranks: int) -> None:
    """A task that fits on no node would wait for ever."""
    if not _nodes(ray, gpus_per_run, num_ranks):
        most = max(node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"])
        raise ValueError(
            f"a run that takes {num_ranks} CPUs and {gpus_per_run:g} GPUs fits on no node of the cluster at "
            f"{address!r}: the most GPUs a node has are {most:g}; ask for fewer, or add nodes"
        )


def _nodes(ray: Any, gpus_per_run: float, num_ranks: int) -> list[str]:
    """The nodes that a run fits on."""
    needed = {"CPU": num_ranks, "GPU": gpus_per_run}
    return [
        node["NodeID"]
        for node in ray.nodes()
        if node["Alive"] and all(node["Resources"].get(key, 0) >= count for key, count in needed.items())
    ]


def _run(
    ray: Any,
    opened: OpenStudy,
    gpus_per_run: float,
    num_ranks: int,
    on_update: Callable[[Update], None],
    should_stop: Callable[[], bool],
) -> None:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    board = ray.remote(_Board).options(num_cpus=0, max_restarts=-1, scheduling_strategy=here).remote()
    task = ray.remote(num_cpus=num_ranks, num_gpus=gpus_per_run, max_retries=_MAX_RETRIES)(_task)
    packed = [{} if address_of(path) else _pack(path) for path in opened.data.all_paths]
    together = {f"{i}/{name}": values for i, files in enumerate(packed) for name, values in files.items()}
    stores, shared = ray.put(together), ray.put(_pack(opened.folder / "shared"))
    running: dict[Any, Run] = {}
    failed_on: dict[str, str] = {}  # run -> node

    def submit(run: Run) -> None:
        strategy: Any = "SPREAD"
        if run.key in failed_on:
            others = [node for node in _nodes(ray, gpus_per_run, num_ranks) if node != failed_on[run.key]]
            strategy = NodeAffinitySchedulingStrategy(others[0], soft=True) if others else strategy
        there = _pack(run_path(opened.folder, run))
        arguments = board, opened.study, opened.data, run, gpus_per_run > 0, num_ranks, stores, shared, there
        running[task.options(scheduling_strategy=strategy).remote(*arguments)] = run

    for run in opened.runs:
        if not opened.is_finished(run):
            submit(run)
    started: set[str] = set()
    deadline = math.inf
    while running:
        with suppress(ray.exceptions.RayError):  # the board restarts if it was killed
            for update in ray.get(board.take.remote(deadline < math.inf)):
                started.add(update.run)
                on_update(update)
        if should_stop() and deadline == math.inf:
            deadline = time.monotonic() + _SECONDS_TO_SAVE
            for future, run in running.items():
                if run.key not in started:
                    ray.cancel(future)
        if time.monotonic() > deadline:
            for future in running:
                ray.cancel(future, force=True)
        for future in ray.wait(list(running), timeout=0.2)[0]:
            run = running.pop(future)
            try:
                ended = ray.get(future)
                _keep(ended, opened.folder, run)
                end = ended.end
                if end.phase == "failed" and run.key not in failed_on and deadline == math.inf:
                    failed_on[run.key] = ended.node
                    submit(run)
                    continue
            except (ray.exceptions.RayError, OSError) as error:  # out of retries, cancelled; or no room here
                cancelled = isinstance(error, ray.exceptions.RayError) and deadline < math.inf
                reason = "" if cancelled else f"{type(error).__name__}: {error}"
                end = Update(run.key, "stopped" if cancelled else "failed", 0, 1, reason)
            if end.phase == "failed":
                record_failure(opened.folder, run, end.reason)
            on_update(end)


class _Board:
    """An actor that runs with the driver: tasks report progress to it and ask whether to stop."""

    def __init__(self) -> None:
        self.updates: dict[str, Update] = {}
        self.stopping = False

    def post(self, update: Update) -> bool:
        """Take an update in, and tell whether to stop."""
        self.updates[update.run] = update
        return self.stopping

    def take(self, stopping: bool) -> list[Update]:
        """The latest update of every run that has any news; `stopping` asks the runs to save and end."""
        self.stopping = stopping
        updates, self.updates = list(self.updates.values()), {}
        return updates


def _task(
    board: Any,
    study: Study,
    data: DataConfig,
    run: Run,
    on_gpu: bool,
    num_ranks: int,
    stores: Mapping[str, np.ndarray],
    shared: Mapping[str, np.ndarray],
    there: Mapping[str, np.ndarray],
) -> _Ended:
    """One run on a node, in a folder that goes when it ends."""
    import ray

    if not on_gpu:
        limit_threads(1)  # as the local workers, so that results agree to the last bit
    stopping, last_told = False, 0.0

    def tell(update: Update) -> None:
        nonlocal stopping, last_told
        if time.monotonic() - last_told > 0.2 or update.done == update.total:
            last_told = time.monotonic()
            with suppress(ray.exceptions.RayError):  # the board is gone; the results still count
                stopping = ray.get(board.post.remote(update), timeout=10)

    node = ray.get_runtime_context().get_node_id()
    tell(Update(run.key, "training", 0, run.config.train.total_steps))
    if stopping:  # cancelled too late
        return _Ended(Update(run.key, "stopped", 0, 1), {}, node)
    end, files = Update(run.key, "stopped", 1, 1), dict[str, np.ndarray]()
    try:
        with tempfile.TemporaryDirectory(prefix="assay-") as temporary:
            folder = Path(temporary)
            run_dir = run_path(folder, run)
            for source, target in ((stores, folder / "stores"), (shared, folder / "shared"), (there, run_dir)):
                _unpack(source, target)
            failure_path(folder, run).unlink(missing_ok=True)
            try:
                places = [
                    path if address_of(path) else folder / "stores" / str(i)
                    for i, path in enumerate(data.all_paths)
                ]
                if execute(
                    Work(study, folder, data.with_stores(places), run, tell, lambda: stopping, num_ranks)
                ):
                    end = Update(run.key, "done", 1, 1)
            finally:
                files = _pack(run_dir)
    except Exception as error:
        end = Update(run.key, "failed", 0, 1, f"{type(error).__name__}: {error}")
    return _Ended(end, files, node)


def _keep(ended: _Ended, folder: Path, run: Run) -> None:
    """Write a task's files into the study's folder, outcomes last: they are all that counts."""
    run_dir = run_path(folder, run)
    failure_path(folder, run).unlink(missing_ok=True)
    _unpack(ended.files, run_dir)
    if ended.end.phase == "done":
        shutil.rmtree(run_dir / "state", ignore_errors=True)
        for path in (run_dir / "snapshots").glob("*.safetensors"):  # of an earlier attempt, used by this one
            if str(path.relative_to(run_dir)) not in ended.files:
                path.unlink()


def _pack(folder: Path) -> dict[str, np.ndarray]:
    """All files below a folder as bytes: arrays, which the tasks of a node share without a copy each.

    Not the hidden ones, which are locks and leftovers of killed writers.
    """
    found = {path.relative_to(folder): path for path in sorted(folder.rglob("*")) if path.is_file()}
    seen = {name: path for name, path in found.items() if not any(part.startswith(".") for part in name.parts)}
    return {str(name): np.fromfile(path, np.uint8) for name, path in seen.items()}


def _unpack(files: Mapping[str, np.ndarray], folder: Path) -> None:
    """Write what `_pack` took, each file whole, outcomes last."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in sorted(files, key=lambda name: (name.startswith("outcome-"), name)):
        check_member_name(folder, name)
        with write_whole(folder / name) as partial:
            files[name].tofile(partial)
