"""Jobs on one machine: worker processes with a fair share of the threads each.

Workers are real processes, so a crash, an out-of-memory kill or a diverging run ends one job and not
the study. A worker whose parent is gone stops by itself, saved.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from assay.files import write_whole
from assay.study.run import OpenStudy, Update, execute, failure_path
from assay.study.spec import Job, Study


def run_local(
    opened: OpenStudy,
    num_workers: int,
    on_update: Callable[[Update], None] = lambda update: None,
    should_stop: Callable[[], bool] = lambda: False,
    num_threads: int | None = None,
) -> None:
    """Run every unfinished job, `num_workers` at a time; a job that fails is recorded and the others go on."""
    waiting = [job for job in opened.jobs if not opened.is_finished(job)]
    num_workers = max(1, min(num_workers, len(waiting)))
    num_threads = num_threads or max(1, (os.cpu_count() or 1) // num_workers)
    context = multiprocessing.get_context("spawn")
    stopping = context.Event()
    workers: dict[Connection, tuple[Any, Job | None]] = {}

    def start() -> None:
        mine, theirs = context.Pipe()
        process = context.Process(
            target=_work,
            args=(theirs, stopping, os.getpid(), num_threads, opened.study, opened.folder, opened.store),
            daemon=True,
        )
        process.start()
        theirs.close()
        workers[mine] = process, None

    def assign(connection: Connection) -> None:
        process, _ = workers[connection]
        job = waiting.pop(0) if waiting and not stopping.is_set() else None
        workers[connection] = process, job
        connection.send(job)
        if job is None:
            process.join()
            del workers[connection]

    for _ in range(num_workers if waiting else 0):
        start()
    while workers:
        if should_stop():
            stopping.set()
        for connection in wait(list(workers), timeout=0.2):
            assert isinstance(connection, Connection)
            process, job = workers[connection]
            try:
                message = connection.recv()
            except EOFError:  # the process died, killed by somebody or by lack of memory
                process.join()
                del workers[connection]
                if job is not None:
                    record_failure(opened.folder, job, f"the worker died (exit code {process.exitcode})")
                    on_update(Update(job.key, "failed", 0, 1))
                if waiting and not stopping.is_set():
                    start()
                continue
            match message:
                case Update():
                    on_update(message)
                case "ready":
                    assign(connection)


def record_failure(folder: Path, job: Job, reason: str) -> None:
    """Keep why a job failed; if even that cannot be written (a full disk), the others still go on."""
    try:
        with write_whole(failure_path(folder, job)) as partial:
            partial.write_text(reason)
    except OSError:
        pass


def _work(
    connection: Connection,
    stopping: Any,
    parent: int,
    num_threads: int,
    study: Study,
    folder: Path,
    store: Path,
) -> None:
    """The life of a worker: ask for a job, do it, tell how it goes, until there is none."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches everyone; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(num_threads)
    last_told = 0.0

    def tell(update: Update) -> None:
        nonlocal last_told
        if time.monotonic() - last_told > 0.2 or update.done == update.total:
            last_told = time.monotonic()
            connection.send(update)

    def should_stop() -> bool:
        return stopping.is_set() or os.getppid() != parent

    try:
        while True:
            connection.send("ready")
            job: Job | None = connection.recv()
            if job is None:
                return
            try:
                failure_path(folder, job).unlink(missing_ok=True)
                finished = execute(study, folder, store, job, tell, should_stop)
                connection.send(Update(job.key, "done" if finished else "stopped", 1, 1))
            except Exception as error:
                record_failure(folder, job, f"{type(error).__name__}: {error}")
                connection.send(Update(job.key, "failed", 0, 1))
    except (BrokenPipeError, EOFError):  # the parent is gone
        return
