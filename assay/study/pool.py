"""Jobs on one machine: worker processes with a fixed number of threads, and GPUs of their own if there are any.

Workers are real processes, so a crash, an out-of-memory kill or a diverging run ends one job and not
the study. If a worker dies, another one repeats its job; a worker ends with the process
that started it.

Each worker has one thread by default: sums of a convolution's gradient are split over
threads, so another number of threads gives other last bits, and results must not depend on how many
workers there happened to be.
"""

import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch

from assay.devices import limit_threads
from assay.files import hold_lock, write_whole
from assay.orphans import start_worker
from assay.study.arms import Job
from assay.study.run import OpenStudy, Update, check_ranks_of_jobs, execute, failure_path, run_path
from assay.study.spec import Study
from assay.train.config import DataConfig

_MAX_DEATHS_AT_START = 3  # of workers before their first job: then something is wrong with all of them
_SECONDS_FOR_ORPHANS = 15.0  # for a worker of an earlier study, which was killed, to leave its run
_MAX_DEATHS = 2  # of workers at one job: then the job fails


def run_local(
    opened: OpenStudy,
    num_workers: int | None = None,
    on_update: Callable[[Update], None] = lambda update: None,
    should_stop: Callable[[], bool] = lambda: False,
    num_threads: int = 1,
    gpus_per_run: int | None = None,
    ranks_per_run: int | None = None,
) -> None:
    """Run every unfinished job, `num_workers` at a time; a job that fails is recorded.

    On a machine with GPUs each worker sees `gpus_per_run` of them (default: 1; 0 uses the CPU), and there are
    no more workers than that allows. A run trains with `ranks_per_run` processes, by default one per GPU.
    """
    shares = gpu_shares(gpus_per_run)
    num_ranks = ranks_per_run or (shares[0].count(",") + 1 if shares else 1)
    check_ranks_of_jobs(opened.jobs, num_ranks)
    most = len(shares) if shares else max(1, (os.cpu_count() or 1) // num_ranks)
    num_workers = min(num_workers or most, most) if shares else num_workers or most
    waiting = [job for job in opened.jobs if not opened.is_finished(job)]
    waiting.sort(key=lambda job: -job.work)  # so that no long one is left for the end, alone
    workers: dict[Connection, tuple[subprocess.Popen[bytes], Job | None]] = {}
    share_of: dict[Connection, str] = {}  # of the GPUs
    stopping, num_deaths_at_start = False, 0
    num_deaths: Counter[str] = Counter()  # by job

    def start() -> None:
        taken = {share_of[connection] for connection in workers}
        share = next((share for share in shares if share not in taken), "")
        what = num_threads, num_ranks, opened.study, opened.folder, opened.data
        process, connection = start_worker(_work, *what, environment={"CUDA_VISIBLE_DEVICES": share})
        workers[connection], share_of[connection] = (process, None), share

    def stop() -> None:
        nonlocal stopping
        stopping = True
        for connection in workers:
            with suppress(OSError):  # it has died
                connection.send(None)

    def assign(connection: Connection) -> None:
        process, _ = workers[connection]
        if waiting and not stopping:
            connection.send(waiting[0])
            workers[connection] = process, waiting.pop(0)
            return
        if not stopping:
            connection.send(None)
        process.wait()
        del workers[connection]

    def replace_dead(connection: Connection) -> None:
        nonlocal num_deaths_at_start
        process, job = workers.pop(connection)
        process.wait()
        if job is not None:
            num_deaths[job.key] += 1
            if num_deaths[job.key] < _MAX_DEATHS:
                waiting.insert(0, job)
            else:
                reason = f"{_MAX_DEATHS} workers died of it (the last with exit code {process.returncode})"
                record_failure(opened.folder, job, reason)
                on_update(Update(job.key, "failed", 0, 1, reason))
        else:
            num_deaths_at_start += 1
            if num_deaths_at_start == _MAX_DEATHS_AT_START:
                raise OSError(f"workers die before they take a job (exit code {process.returncode})")
        if waiting and not stopping:
            start()

    try:
        for _ in range(min(num_workers, len(waiting))):
            start()
        while workers:
            if not stopping and should_stop():
                stop()
            for connection in wait(list(workers), timeout=0.2):
                assert isinstance(connection, Connection)
                try:
                    message = connection.recv()
                    if message == "ready":
                        assign(connection)
                except (EOFError, OSError):  # the process was killed, perhaps for lack of memory
                    replace_dead(connection)
                else:
                    if isinstance(message, Update):
                        on_update(message)
    finally:  # on an error, do not leave before the workers have saved what they do
        for connection in workers:
            connection.close()
        for process, _ in workers.values():
            process.wait()


def record_failure(folder: Path, job: Job, reason: str) -> None:
    """Record why a job failed; if the disk is full, the other jobs continue without the record."""
    with suppress(OSError), write_whole(failure_path(folder, job)) as partial:
        partial.write_text(reason)


def gpu_shares(gpus_per_run: int | None = None) -> list[str]:
    """The GPUs of this machine in shares of `gpus_per_run` (default: 1), each as CUDA_VISIBLE_DEVICES has them.

    Without GPUs, or with `gpus_per_run` = 0, there are none. GPUs that this process may not use stay unused.
    """
    num_gpus = torch.cuda.device_count()
    size = min(1, num_gpus) if gpus_per_run is None else gpus_per_run
    if size == 0:
        return []
    if size > num_gpus:
        raise ValueError(f"gpus_per_run = {size}: this machine has {num_gpus} GPUs; ask for 0 to {num_gpus}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(num_gpus)))
    names = [name.strip() for name in visible.split(",")][:num_gpus]
    return [",".join(names[i : i + size]) for i in range(0, num_gpus - size + 1, size)]


def _work(
    connection: Connection, num_threads: int, num_ranks: int, study: Study, folder: Path, data: DataConfig
) -> None:
    """The life of a worker: ask for a job, do it, tell how it goes, until there is none.

    A message during a job means stop; so does the end of the connection.
    """
    limit_threads(num_threads)
    last_told = 0.0

    def tell(update: Update) -> None:
        nonlocal last_told
        if time.monotonic() - last_told > 0.2 or update.done == update.total:
            last_told = time.monotonic()
            with suppress(OSError):  # the parent is gone: `should_stop` notices, and the job is saved
                connection.send(update)

    def should_stop() -> bool:
        return connection.poll()

    with suppress(OSError, EOFError):  # the parent is gone
        while True:
            connection.send("ready")
            job: Job | None = connection.recv()
            if job is None:
                return
            end = Update(job.key, "stopped", 1, 1)
            try:
                busy = f"{run_path(folder, job)} is held by {{holder}}, which an earlier study left: end it"
                with hold_lock(run_path(folder, job) / ".lock", busy, _SECONDS_FOR_ORPHANS):
                    failure_path(folder, job).unlink(missing_ok=True)
                    if execute(study, folder, data, job, tell, should_stop, num_ranks):
                        end = Update(job.key, "done", 1, 1)
            except Exception as error:
                end = Update(job.key, "failed", 0, 1, f"{type(error).__name__}: {error}")
                record_failure(folder, job, end.reason)
            connection.send(end)
