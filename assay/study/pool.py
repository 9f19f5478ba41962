"""Taking the runs of a study to their ends: one loop for any `Place`, and the place that this machine is.

Workers are real processes, so a crash, an out-of-memory kill or a diverging run ends one run and not
the study. If a worker dies, another one repeats its run; a worker ends with the process that started it.

Each worker has one thread by default: sums of a convolution's gradient are split over
threads, so another number of threads gives other last bits, and results must not depend on how many
workers there happened to be.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch

from assay.data.config import DataConfig
from assay.devices import limit_threads
from assay.errors import AssayError
from assay.processes import Ended, Workers
from assay.study.folder import OpenStudy
from assay.study.runs import Run
from assay.study.spec import Study
from assay.study.stages import Update, Work, attempt, now_and_then, record_failure
from assay.train.run import check_ranks

_MAX_LOSSES = 2  # of one run: then it has failed


class Place(AbstractContextManager[Any], Protocol):
    """Where runs are executed, each by `num_ranks` processes. Leaving the block ends what still runs."""

    num_ranks: int

    def begin(self, run: Run) -> bool:
        """Begin a run; False if there is no room for it now."""

    def news(self) -> Iterable[Update]:
        """What was heard since the last call, after waiting a moment; the last of each run is its end."""

    def stop(self) -> None:
        """Ask all runs to save and end."""


def run_all(
    opened: OpenStudy,
    place: Place,
    on_update: Callable[[Update], None] = lambda update: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Take every unfinished run to its end; one that is lost is begun again, and fails if lost twice."""
    for each in opened.runs:
        check_ranks(each.config, place.num_ranks)  # before any work
    # The longest first, so that none is left for the end, alone.
    waiting = sorted(
        opened.missing(), key=lambda run: -run.config.train.total_steps * run.config.train.batch_size
    )
    running, num_losses, stopping = dict[str, Run](), Counter[str](), False
    with place:
        while waiting or running:
            if not stopping and should_stop():
                stopping, waiting = True, []
                place.stop()
            while waiting and place.begin(waiting[0]):
                begun = waiting.pop(0)
                running[begun.key] = begun
            for update in place.news():
                if update.run not in running:
                    continue  # what was said before its end came late
                run = running.pop(update.run) if update.is_end else running[update.run]
                if update.phase == "lost":
                    num_losses[run.key] += 1
                    if stopping:
                        update = Update(run.key, "stopped")
                    elif num_losses[run.key] < _MAX_LOSSES:
                        waiting.insert(0, run)
                        continue
                    else:
                        update = replace(update, phase="failed")
                        record_failure(opened.folder, run, update.reason)
                on_update(update)


def run_local(
    opened: OpenStudy,
    num_workers: int | None = None,
    on_update: Callable[[Update], None] = lambda update: None,
    should_stop: Callable[[], bool] = lambda: False,
    num_threads: int = 1,
    gpus_per_run: float | None = None,
) -> None:
    """Take every unfinished run to its end on this machine, `num_workers` at a time; failures are recorded.

    On a machine with GPUs each worker sees `gpus_per_run` of them (default: 1; 0 uses the CPU) and trains on
    all of these, and there are no more workers than that allows.
    """
    place = _LocalWorkers(opened, num_workers, num_threads, gpu_shares(gpus_per_run))
    run_all(opened, place, on_update, should_stop)


class _LocalWorkers(Workers):
    """Worker processes; each is given one run after the other, and has one of the `shares` of the GPUs."""

    def __init__(self, opened: OpenStudy, num_workers: int | None, num_threads: int, shares: list[str]) -> None:
        super().__init__()  # on an error, not left before the workers have saved what they do
        most = len(shares) or os.cpu_count() or 1
        self.num_workers = min(num_workers or most, most) if shares else num_workers or most
        self.num_ranks = shares[0].count(",") + 1 if shares else 1
        self.shares = shares
        self.at_work: dict[Connection, tuple[str, Run | None]] = {}  # the GPUs of each worker, and its run
        self.arguments = num_threads, self.num_ranks, opened.study, opened.folder, opened.data

    def begin(self, run: Run) -> bool:
        """Give the run to an idle worker, or to a new one."""
        worker = next((worker for worker, (_, its) in self.at_work.items() if its is None), None)
        if worker is None:
            if len(self.at_work) == self.num_workers:
                return False
            taken = {share for share, _ in self.at_work.values()}
            share = next((share for share in self.shares if share not in taken), "")
            worker = self.start(_work, *self.arguments, environment={"CUDA_VISIBLE_DEVICES": share})
            self.at_work[worker] = share, None
        self.at_work[worker] = self.at_work[worker][0], run
        with suppress(OSError):  # it has died: `news` will tell
            worker.send(run)
        return True

    def news(self) -> Iterator[Update]:
        """What the workers say; the run of one that died is lost."""
        for worker, message in self.heard():
            share, run = self.at_work.pop(worker)
            if not isinstance(message, Ended):
                self.at_work[worker] = share, None if message.is_end else run
                yield message
            elif run is not None:
                yield Update(
                    run.key, "lost", 0, 1, f"workers die of it (the last with exit code {message.exit_code})"
                )

    def stop(self) -> None:
        """Any message during a run means stop."""
        self.tell_all(None)


def gpu_shares(gpus_per_run: float | None = None) -> list[str]:
    """The GPUs of this machine in shares of `gpus_per_run` (default: 1), each as CUDA_VISIBLE_DEVICES has them.

    Without GPUs, or with `gpus_per_run` = 0, there are none. GPUs that this process may not use stay unused.
    """
    num_gpus = torch.cuda.device_count()
    size = min(1, num_gpus) if gpus_per_run is None else gpus_per_run
    if size % 1 or size > num_gpus:
        what = f"this machine has {num_gpus} GPUs, and only Ray shares out parts of one"
        raise AssayError(what, key="gpus_per_run", cure=f"give a whole number from 0 to {num_gpus}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(num_gpus)))
    names, size = [name.strip() for name in visible.split(",")][:num_gpus], int(size)
    return [",".join(names[i : i + size]) for i in range(0, num_gpus - size + 1, size)] if size else []


def _work(
    connection: Connection, num_threads: int, num_ranks: int, study: Study, folder: Path, data: DataConfig
) -> None:
    """The life of a worker: take a run, do it, tell how it goes and ends, until there is none.

    A message during a run means stop; so does the end of the connection.
    """
    limit_threads(num_threads)

    def tell(update: Update) -> None:
        with suppress(OSError):  # the parent is gone: `should_stop` notices, and the run is saved
            connection.send(update)

    with suppress(OSError, EOFError):  # the parent is gone
        while (run := connection.recv()) is not None:
            work = Work(study, folder, data, run, now_and_then(tell), connection.poll, num_ranks)
            connection.send(attempt(work))
