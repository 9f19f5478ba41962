"""Jobs on one machine: worker processes with a fixed number of threads each.

Workers are real processes, so a crash, an out-of-memory kill or a diverging run ends one job and not
the study. If a worker dies, another one repeats its job; a worker ends with the process
that started it.

Each worker has one thread by default: sums of a convolution's gradient are split over
threads, so another number of threads gives other last bits, and results must not depend on how many
workers there happened to be.
"""

import multiprocessing
import os
import pickle
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from threadpoolctl import threadpool_limits

from assay.files import hold_lock, write_whole
from assay.orphans import run_in_worker
from assay.study.arms import Job
from assay.study.run import OpenStudy, Update, execute, failure_path, run_path
from assay.study.spec import Study
from assay.train.config import DataConfig

_MAX_DEATHS_AT_START = 3  # of workers before their first job: then something is wrong with all of them
_SECONDS_FOR_ORPHANS = 15.0  # for a worker of an earlier study, which was killed, to leave its run
_MAX_DEATHS = 2  # of workers at one job: then the job fails


def run_local(
    opened: OpenStudy,
    num_workers: int,
    on_update: Callable[[Update], None] = lambda update: None,
    should_stop: Callable[[], bool] = lambda: False,
    num_threads: int = 1,
) -> None:
    """Run every unfinished job, `num_workers` at a time; a job that fails is recorded."""
    waiting = [job for job in opened.jobs if not opened.is_finished(job)]
    waiting.sort(key=lambda job: -job.work)  # so that no long one is left for the end, alone
    context = multiprocessing.get_context("spawn")
    stopping = context.RawValue("b", 0)  # no lock around it, which a killed worker would keep
    workers: dict[Connection, tuple[Any, Job | None]] = {}
    num_deaths_at_start = 0
    num_deaths: Counter[str] = Counter()  # by job

    def start() -> None:
        mine, theirs = context.Pipe()
        work = pickle.dumps((_work, (num_threads, opened.study, opened.folder, opened.data)))
        process = context.Process(
            target=run_in_worker, args=(os.getpid(), work, theirs, stopping, os.getpid()), daemon=True
        )
        process.start()
        theirs.close()
        workers[mine] = process, None

    def assign(connection: Connection) -> None:
        process, _ = workers[connection]
        job = waiting[0] if waiting and not stopping.value else None
        connection.send(job)
        if job is None:
            process.join()
            del workers[connection]
        else:
            workers[connection] = process, waiting.pop(0)

    def bury(connection: Connection) -> None:
        nonlocal num_deaths_at_start
        process, job = workers.pop(connection)
        process.join()
        if job is not None:
            num_deaths[job.key] += 1
            if num_deaths[job.key] < _MAX_DEATHS:
                waiting.insert(0, job)
            else:
                reason = f"{_MAX_DEATHS} workers died of it (the last with exit code {process.exitcode})"
                record_failure(opened.folder, job, reason)
                on_update(Update(job.key, "failed", 0, 1, reason))
        else:
            num_deaths_at_start += 1
            if num_deaths_at_start == _MAX_DEATHS_AT_START:
                raise OSError(f"workers die before they take a job (exit code {process.exitcode})")
        if waiting and not stopping.value:
            start()

    try:
        for _ in range(min(num_workers, len(waiting))):
            start()
        while workers:
            if should_stop():
                stopping.value = 1
            for connection in wait(list(workers), timeout=0.2):
                assert isinstance(connection, Connection)
                try:
                    message = connection.recv()
                    if message == "ready":
                        assign(connection)
                except (EOFError, OSError):  # the process was killed, perhaps for lack of memory
                    bury(connection)
                else:
                    if isinstance(message, Update):
                        on_update(message)
    finally:  # on an error, do not leave before the workers have saved what they do
        stopping.value = 1
        for connection, (process, _) in workers.items():
            connection.close()
            process.join()


def record_failure(folder: Path, job: Job, reason: str) -> None:
    """Record why a job failed; if the disk is full, the other jobs continue without the record."""
    with suppress(OSError), write_whole(failure_path(folder, job)) as partial:
        partial.write_text(reason)


def limit_threads(num_threads: int) -> None:
    """Give this process a share of the cores: in torch, and in the BLAS and OpenMP of numpy and scipy."""
    torch.set_num_threads(num_threads)
    threadpool_limits(num_threads)


def _work(
    connection: Connection,
    stopping: Any,
    parent: int,
    num_threads: int,
    study: Study,
    folder: Path,
    data: DataConfig,
) -> None:
    """The life of a worker: ask for a job, do it, tell how it goes, until there is none."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches everyone; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    limit_threads(num_threads)
    last_told = 0.0

    def tell(update: Update) -> None:
        nonlocal last_told
        if time.monotonic() - last_told > 0.2 or update.done == update.total:
            last_told = time.monotonic()
            with suppress(OSError):  # the parent is gone: `should_stop` notices, and the job is saved
                connection.send(update)

    def should_stop() -> bool:
        return bool(stopping.value) or os.getppid() != parent

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
                    if execute(study, folder, data, job, tell, should_stop):
                        end = Update(job.key, "done", 1, 1)
            except Exception as error:
                end = Update(job.key, "failed", 0, 1, f"{type(error).__name__}: {error}")
                record_failure(folder, job, end.reason)
            connection.send(end)
