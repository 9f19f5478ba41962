"""Runs on a Ray cluster: one remote task each, on machines that need not share a file system.

The packed store and the shared files travel through Ray's object store, once to each node. A task
unpacks them into a folder of its own, with what there is of its run, and does there what a local worker
does; its run's files come back as its value, and the driver writes them into the study's folder, outcomes
last. So the folder looks as if the study had run here, and either way continues what the other began.
A task whose node dies is started again on another one. A task that takes several GPUs trains with one process
for each, all on its node: a training does not span nodes.
"""

import math
import re
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from assay.archives import check_member_name
from assay.data.config import DataConfig
from assay.data.store import address_of
from assay.devices import limit_threads
from assay.errors import AssayError, extra
from assay.files import write_whole
from assay.study.folder import OpenStudy
from assay.study.pool import run_all
from assay.study.runs import Run
from assay.study.spec import Study
from assay.study.stages import Update, Work, attempt, failure_path, now_and_then, run_path
from assay.train.folder import remove_states

_MAX_RETRIES = 10  # of a task whose node dies; clusters of cheap machines lose them often
_SECONDS_TO_ANSWER = 10.0  # for the address
_SECONDS_TO_SAVE = 60.0  # for running tasks after a stop; then they are cancelled

Files = Mapping[str, np.ndarray]  # by their paths below a folder, as bytes


def run_on_ray(
    opened: OpenStudy,
    address: str,
    gpus_per_run: float | None = None,
    on_update: Callable[[Update], None] = lambda update: None,
    should_stop: Callable[[], bool] = lambda: False,
    num_ranks: int | None = None,
) -> None:
    """Take every unfinished run to its end on the Ray cluster at `address`; failures are recorded.

    Each takes `gpus_per_run` GPUs of a node (default: 1 if a node has any), or a part of one, and trains with
    `num_ranks` processes, by default one per GPU.
    """
    ray = extra("ray", "ray", "a study on a Ray cluster")
    was_connected = ray.is_initialized()
    if not was_connected:
        _connect(ray, address)
    try:
        if gpus_per_run is None:
            gpus_per_run = float(any(node["Alive"] and node["Resources"].get("GPU") for node in ray.nodes()))
        place = _RayTasks(ray, opened, gpus_per_run, num_ranks or max(1, int(gpus_per_run)))
        run_all(opened, place, on_update, should_stop)
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
        what, cure = f"no Ray cluster ({str(error).splitlines()[0]})", "start one with `ray start --head`"
        raise AssayError(what, path=address, cure=f"{cure}, and give its address") from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


class _RayTasks:
    """A task for each run; Ray starts it when a node has room."""

    def __init__(self, ray: Any, opened: OpenStudy, gpus_per_run: float, num_ranks: int) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self.ray, self.opened, self.num_ranks, self.on_gpu = ray, opened, num_ranks, gpus_per_run > 0
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        needed = {"CPU": num_ranks, "GPU": gpus_per_run}
        if not any(all(node.get(key, 0) >= needed[key] for key in needed) for node in nodes):
            most = max(node.get("GPU", 0) for node in nodes)  # a task would wait for ever
            raise AssayError(
                f"a run that takes {num_ranks} CPUs and {gpus_per_run:g} GPUs fits on no node of the cluster: "
                f"the most GPUs of a node are {most:g}", key="gpus_per_run", cure="ask for fewer, or add nodes",
            )  # fmt: skip
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self.board = ray.remote(_Board).options(num_cpus=0, max_restarts=-1, scheduling_strategy=here).remote()
        options = {"max_retries": _MAX_RETRIES, "scheduling_strategy": "SPREAD"}
        self.task = ray.remote(num_cpus=num_ranks, num_gpus=gpus_per_run, **options)(_task)
        packed = [{} if address_of(path) else _pack(path) for path in opened.data.all_paths]
        stores = {f"{i}/{name}": values for i, files in enumerate(packed) for name, values in files.items()}
        self.shared = ray.put(stores), ray.put(_pack(opened.folder / "shared"))
        self.running: dict[Any, Run] = {}
        self.started: set[str] = set()
        self.deadline = math.inf

    def __enter__(self) -> "_RayTasks":
        return self

    def __exit__(self, *error: object) -> None:
        for future in self.running:
            self.ray.cancel(future, force=True)

    def begin(self, run: Run) -> bool:
        """Submit the run's task."""
        work = self.opened.study, self.opened.data, run, self.on_gpu, self.num_ranks
        there = _pack(run_path(self.opened.folder, run))
        self.running[self.task.remote(self.board, *work, *self.shared, there)] = run
        return True

    def stop(self) -> None:
        """Those that have begun are told to save by the board, and are cancelled if that takes too long."""
        self.deadline = time.monotonic() + _SECONDS_TO_SAVE
        for future, run in self.running.items():
            if run.key not in self.started:
                self.ray.cancel(future)

    def news(self) -> Iterator[Update]:
        """What is on the board, and the ends of tasks."""
        ray = self.ray
        with suppress(ray.exceptions.RayError):  # the board restarts if it was killed
            for update in ray.get(self.board.take.remote(self.deadline < math.inf)):
                self.started.add(update.run)
                yield update
        if time.monotonic() > self.deadline:
            for future in self.running:
                ray.cancel(future, force=True)
        for future in ray.wait(list(self.running), timeout=0.2)[0]:
            run = self.running.pop(future)
            try:
                end, files = ray.get(future)
                _keep(end, files, self.opened.folder, run)
                yield end
            except (ray.exceptions.RayError, OSError) as error:  # out of retries, cancelled; or no room here
                yield Update(run.key, "lost", 0, 1, f"{type(error).__name__}: {error}")


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
    stores: Files,
    shared: Files,
    there: Files,
) -> tuple[Update, Files]:
    """One run on a node, in a folder that goes when it ends: its end, and its files."""
    import ray

    if not on_gpu:
        limit_threads(1)  # as the local workers, so that results agree to the last bit
    stopping = False

    def tell(update: Update) -> None:
        nonlocal stopping
        with suppress(ray.exceptions.RayError):  # the board is gone; the results still count
            stopping = ray.get(board.post.remote(update), timeout=10)

    tell(Update(run.key, "training", 0, run.config.train.total_steps))
    if stopping:  # cancelled too late
        return Update(run.key, "stopped"), {}
    with tempfile.TemporaryDirectory(prefix="assay-") as temporary:
        folder = Path(temporary)
        _unpack(stores, folder / "stores")
        _unpack(shared, folder / "shared")
        _unpack(there, run_path(folder, run))
        paths = [
            path if address_of(path) else folder / "stores" / str(i) for i, path in enumerate(data.all_paths)
        ]
        images = data.with_stores(paths)
        end = attempt(Work(study, folder, images, run, now_and_then(tell), lambda: stopping, num_ranks))
        return end, _pack(run_path(folder, run))


def _keep(end: Update, files: Files, folder: Path, run: Run) -> None:
    """Write a task's files into the study's folder, outcomes last: they are all that counts."""
    run_dir = run_path(folder, run)
    failure_path(folder, run).unlink(missing_ok=True)
    _unpack(files, run_dir)
    if end.phase == "done":
        remove_states(run_dir / "state")
        for path in (run_dir / "snapshots").glob("*.safetensors"):  # of an earlier attempt, used by this one
            if str(path.relative_to(run_dir)) not in files:
                path.unlink()


def _pack(folder: Path) -> Files:
    """All files below a folder as bytes: arrays, which the tasks of a node share without a copy each.

    Not the hidden ones, which are locks and leftovers of killed writers.
    """
    found = {path.relative_to(folder): path for path in sorted(folder.rglob("*")) if path.is_file()}
    seen = {name: path for name, path in found.items() if not any(part.startswith(".") for part in name.parts)}
    return {str(name): np.fromfile(path, np.uint8) for name, path in seen.items()}


def _unpack(files: Files, folder: Path) -> None:
    """Write what `_pack` took, each file whole, outcomes last."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in sorted(files, key=lambda name: (name.startswith("outcome-"), name)):
        check_member_name(folder, name)
        with write_whole(folder / name) as partial:
            files[name].tofile(partial)
