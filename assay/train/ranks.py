"""Training on several devices of one machine: a process per device, as `torchrun` would start it.

A rank that dies ends the others, and is named.
"""

import math
import socket
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from assay.data.config import DataConfig
from assay.devices import limit_threads
from assay.errors import AssayError
from assay.processes import Ended, Workers
from assay.train.config import RunConfig
from assay.train.folder import final_path
from assay.train.restored import OnProgress, ShouldStop, train
from assay.train.run import Progress, TrainResult

_MEMORY = "see that memory suffices, and repeat the command to resume"
_SECONDS_TO_FAIL = 5.0  # for the other ranks, once one has failed


def train_on_ranks(
    num_ranks: int,
    config: RunConfig,
    run_dir: Path,
    data: DataConfig,
    snapshot_steps: Sequence[int] = (),
    on_progress: OnProgress = lambda progress: None,
    should_stop: ShouldStop = lambda: False,
    device: str = "auto",
) -> TrainResult:
    """Train as `assay.train.train` on `num_ranks` devices, on images of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    # What `torchrun` tells each rank on one machine; Fabric reads it.
    same = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GROUP_RANK": 0, "TORCHELASTIC_RUN_ID": "assay"}
    same |= {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    num_threads = max(1, torch.get_num_threads() // num_ranks)
    what = (device, num_ranks), num_threads, config, run_dir, data, snapshot_steps
    failure: Exception | None = None
    result = TrainResult(run_dir, 0, False, final_path(run_dir))
    stopping, deadline = False, math.inf
    with Workers(patience=0) as ranks:
        for rank in range(num_ranks):
            told = {name: str(value) for name, value in (same | {"RANK": rank, "LOCAL_RANK": rank}).items()}
            ranks.start(_train_rank, *what, environment=told)
        while ranks.processes and time.monotonic() < deadline:
            if not stopping and should_stop():
                stopping = True
                ranks.tell_all("stop")
            for _, message in ranks.heard():
                match message:
                    case Ended(exit_code=0):
                        continue
                    case Ended(exit_code=code):  # killed: the errors of the others are its consequence
                        died = f"a process of a training on {num_ranks} devices died with exit code {code}"
                        failure = AssayError(died, path=run_dir, cure=_MEMORY)
                    case Exception():
                        failure = failure or message
                    case TrainResult():
                        result = message
                    case (step, num_steps, rate, loss):
                        on_progress(Progress(step, num_steps, rate, torch.tensor(loss)))
            if failure is not None:
                deadline = min(deadline, time.monotonic() + _SECONDS_TO_FAIL)
    if failure is not None:
        raise failure
    return result


def _train_rank(
    connection: Connection,
    on: tuple[str, int],
    num_threads: int,
    config: RunConfig,
    run_dir: Path,
    data: DataConfig,
    snapshot_steps: Sequence[int],
) -> None:
    """The life of one rank; the first tells how far it is."""
    limit_threads(num_threads)
    last_told = 0.0

    def tell(progress: Progress) -> None:
        nonlocal last_told
        if time.monotonic() - last_told > 0.5 or progress.step == progress.num_steps:
            last_told = time.monotonic()
            connection.send((progress.step, progress.num_steps, progress.images_per_second, progress.loss))

    try:
        connection.send(train(config, run_dir, data.open(), *on, 1, snapshot_steps, tell, connection.poll))
    except Exception as error:
        # Not every exception can be sent; a plain one with its text always can.
        known = isinstance(error, (ValueError, OSError))
        connection.send(error if known else RuntimeError(f"{type(error).__name__}: {error}"))
