"""Runs on one machine: worker processes with a fixed number of threads, and GPUs of their own if there are any.

Workers are real processes, so a crash, an out-of-memory kill or a diverging run ends one run and not
the study. If a worker dies, another one repeats its run; a worker ends with the process
that started it.

Each worker has one thread by default: sums of a convolution's gradient are split over
threads, so another number of threads gives other last bits, and results must not depend on how many
workers there happened to be.
"""

import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from assay.data.config import DataConfig
from assay.devices import limit_threads
from assay.errors import AssayError
from assay.files import hold_lock, write_whole
from assay.processes import Ended, Workers
from assay.study.run import OpenStudy, check_ranks_of_runs
from assay.study.runs import Run
from assay.study.spec import Study
from assay.study.stages import Update, Work, execute, failure_path, run_path

_MAX_DEATHS_AT_START = 3  # of workers before their first run: then something is wrong with all of them
_SECONDS_FOR_ORPHANS = 15.0  # for a worker of an earlier study, which was killed, to leave its run
_MAX_DEATHS = 2  # of workers at one run: then the run fails


def run_local(
    opened: OpenStudy,
    num_workers: int | None = None,
    on_update: Callable[[Update], None] = lambda update: None,
    should_stop: Callable[[], bool] = lambda: False,
    num_threads: int = 1,
    gpus_per_run: float | None = None,
    ranks_per_run: int | None = None,
) -> None:
    """Take every unfinished run to its end, `num_workers` at a time; one that fails is recorded.

    On a machine with GPUs each worker sees `gpus_per_run` of them (default: 1; 0 uses the CPU), and there are
    no more workers than that allows. A run trains with `ranks_per_run` processes, by default one per GPU.
    """
    shares = gpu_shares(gpus_per_run)
    num_ranks = ranks_per_run or (shares[0].count(",") + 1 if shares else 1)
    check_ranks_of_runs(opened.runs, num_ranks)
    most = len(shares) if shares else max(1, (os.cpu_count() or 1) // num_ranks)
    num_workers = min(num_workers or most, most) if shares else num_workers or most
    waiting = [run for run in opened.runs if not opened.is_finished(run)]
    waiting.sort(
        key=lambda run: -run.config.train.total_steps * run.config.train.batch_size
    )  # so that no long one is left for the end, alone
    at_work: dict[Connection, tuple[str, Run | None]] = {}  # the GPUs of each worker, and its run
    stopping, num_deaths_at_start = False, 0
    num_deaths: Counter[str] = Counter()  # by run

    def start() -> None:
        taken = {share for share, _ in at_work.values()}
        share = next((share for share in shares if share not in taken), "")
        what = num_threads, num_ranks, opened.study, opened.folder, opened.data
        at_work[workers.start(_work, *what, environment={"CUDA_VISIBLE_DEVICES": share})] = share, None

    def replace_dead(exit_code: int, run: Run | None) -> None:
        nonlocal num_deaths_at_start
        if run is not None:
            num_deaths[run.key] += 1
            if num_deaths[run.key] < _MAX_DEATHS:
                waiting.insert(0, run)
            else:
                reason = f"{_MAX_DEATHS} workers died of it (the last with exit code {exit_code})"
                record_failure(opened.folder, run, reason)
                on_update(Update(run.key, "failed", 0, 1, reason))
        else:
            num_deaths_at_start += 1
            if num_deaths_at_start == _MAX_DEATHS_AT_START:
                raise OSError(f"workers die before they take a run (exit code {exit_code})")
        if waiting and not stopping:
            start()

    with Workers() as workers:  # on an error, not left before the workers have saved what they do
        for _ in range(min(num_workers, len(waiting))):
            start()
        while workers.processes:
            if not stopping and should_stop():
                stopping = True
                workers.tell_all(None)
            for connection, message in workers.heard():
                if isinstance(message, Ended):
                    _, run = at_work.pop(connection)
                    if run is not None or message.exit_code:
                        replace_dead(message.exit_code, run)
                elif isinstance(message, Update):
                    on_update(message)
                else:  # it is ready for another run
                    run = waiting.pop(0) if waiting and not stopping else None
                    at_work[connection] = at_work[connection][0], run
                    with suppress(OSError):  # it has died, and will be replaced
                        connection.send(run)


def record_failure(folder: Path, run: Run, reason: str) -> None:
    """Record why a run failed; if the disk is full, the other runs continue without the record."""
    with suppress(OSError), write_whole(failure_path(folder, run)) as partial:
        partial.write_text(reason)


def gpu_shares(gpus_per_run: float | None = None) -> list[str]:
    """The GPUs of this machine in shares of `gpus_per_run` (default: 1), each as CUDA_VISIBLE_DEVICES has them.

    Without GPUs, or with `gpus_per_run` = 0, there are none. GPUs that this process may not use stay unused.
    """
    num_gpus = torch.cuda.device_count()
    size = min(1, num_gpus) if gpus_per_run is None else int(gpus_per_run)
    if gpus_per_run is not None and gpus_per_run % 1:
        raise AssayError("only Ray shares out parts of a GPU", key="gpus_per_run", cure="give a whole number")
    if size == 0:
        return []
    if size > num_gpus:
        raise AssayError(
            f"this machine has {num_gpus} GPUs", key="gpus_per_run", cure=f"ask for 0 to {num_gpus}"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(num_gpus)))
    names = [name.strip() for name in visible.split(",")][:num_gpus]
    return [",".join(names[i : i + size]) for i in range(0, num_gpus - size + 1, size)]


def _work(
    connection: Connection, num_threads: int, num_ranks: int, study: Study, folder: Path, data: DataConfig
) -> None:
    """The life of a worker: ask for a run, do it, tell how it goes, until there is none.

    A message during a run means stop; so does the end of the connection.
    """
    limit_threads(num_threads)
    last_told = 0.0

    def tell(update: Update) -> None:
        nonlocal last_told
        if time.monotonic() - last_told > 0.2 or update.done == update.total:
            last_told = time.monotonic()
            with suppress(OSError):  # the parent is gone: `should_stop` notices, and the run is saved
                connection.send(update)

    def should_stop() -> bool:
        return connection.poll()

    with suppress(OSError, EOFError):  # the parent is gone
        while True:
            connection.send("ready")
            run: Run | None = connection.recv()
            if run is None:
                return
            end = Update(run.key, "stopped", 1, 1)
            try:
                busy = f"{run_path(folder, run)} is held by {{holder}}, which an earlier study left: end it"
                with hold_lock(run_path(folder, run) / ".lock", busy, _SECONDS_FOR_ORPHANS):
                    failure_path(folder, run).unlink(missing_ok=True)
                    if execute(Work(study, folder, data, run, tell, should_stop, num_ranks)):
                        end = Update(run.key, "done", 1, 1)
            except Exception as error:
                end = Update(run.key, "failed", 0, 1, f"{type(error).__name__}: {error}")
                record_failure(folder, run, end.reason)
            connection.send(end)
