"""Kills commands at random moments, runs them again, and compares what comes out.

Training, packing, sampling and studies are killed while they start, work and write: by SIGKILL after a random
time, or by themselves at a random call of `os.fsync` or `os.replace`, in the middle of a write. In a study the
driver, a worker or both are killed, stopped or paused. A command that was killed is run again until it ends.
Then every bit must be that of an undisturbed run, nothing may be left over, and no process may have outlived
its driver by 5 seconds.

    python -m tests.soak           200 kills, 50 of each command
    python -m tests.soak -n 8 train pack
"""

import argparse
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from assay.cli import app
from tests.processes import children, seconds_until_gone, workers_of
from tests.studies import SPEC

MAX_ORPHAN_SECONDS = 5.0
_SAID = Path(tempfile.gettempdir()) / f"soak-{os.getpid()}.txt"  # by the command that runs
_TRAIN = (
    "data.sigma=0.5 data.clean_fraction=0.1 net.preset=mlp net.width=32 train.num_steps=60 train.batch_size=64 "
    "train.state_every=5 train.log_every=1 train.snapshot_every=10 train.picture_every=20"
)


@dataclass(frozen=True)
class Command:
    """A command that is killed: its arguments, and what it makes that must not depend on kills."""

    name: str
    prepare: Callable[[Path], None]  # once, in the folder that all lives of the command share
    arguments: Callable[[Path], list[str]]  # for an output folder in it
    contents: Callable[[Path], dict[str, bytes]]
    has_workers: bool = False
    target: str | None = None  # in the output folder; once it is there the command refuses to run


@dataclass
class Report:
    """What happened: kills, finished commands, and the longest life of an orphan."""

    num_kills: int = 0
    num_in_writes: int = 0
    num_finished: int = 0
    orphan_seconds: float = 0.0
    faults: list[str] = field(default_factory=list)


def _pack_digits(folder: Path) -> None:
    _run(["data", "get", "digits", "-o", str(folder / "digits")])


def _train(folder: Path) -> list[str]:
    settings = [f"--set={each}" for each in (f"data.store={folder / 'digits'}", *_TRAIN.split())]
    return ["train", *settings, "-o", str(folder / "out" / "run")]


def _trained(out: Path) -> dict[str, bytes]:
    kept = _files(out, lambda path: "tensorboard" not in path.parts and path.name != "config.json")
    for name in [name for name in kept if name.endswith("metrics.jsonl")]:  # speeds differ
        kept[name] = re.sub(rb'"images_per_second": [^,]*', b"", kept[name])
    return kept


def _make_images(folder: Path) -> None:
    rng = np.random.default_rng(0)
    np.savez(folder / "images.npz", images=rng.integers(0, 256, (3000, 16, 16, 3), dtype=np.uint8))


def _make_checkpoint(folder: Path) -> None:
    _pack_digits(folder)
    _run(_train(folder))
    shutil.move(folder / "out" / "run", folder / "trained")
    shutil.rmtree(folder / "out")


def _sample(folder: Path) -> list[str]:
    options = "--seeds 0-199 --batch-size 20 --num-steps 6".split()
    return ["sample", str(folder / "trained"), *options, "-o", str(folder / "out" / "samples")]


def _make_study(folder: Path) -> None:
    (folder / "study.toml").write_text(SPEC.replace("[1, 0.1, 0]", "[1, 0.1]"))


def _study(folder: Path) -> list[str]:
    return ["study", "run", str(folder / "study.toml"), "-o", str(folder / "out" / "study"), "--workers", "2"]


def _studied(out: Path) -> dict[str, bytes]:
    kept = _files(out, lambda path: path.name == "final.safetensors" or path.parent.name == "data")
    rows = next(out.rglob("results.csv")).read_text().splitlines()
    assert rows[0].endswith("train_seconds,sample_seconds,held_out_loss_seconds")
    return {**kept, "results": "\n".join(row.rsplit(",", 3)[0] for row in rows).encode()}


def _files(out: Path, wanted: Callable[[Path], bool] = lambda path: True) -> dict[str, bytes]:
    found = sorted(path for path in out.rglob("*") if path.is_file() and wanted(path))
    return {str(path.relative_to(out)): path.read_bytes() for path in found}


def _pack(folder: Path) -> list[str]:
    return ["data", "pack", str(folder / "images.npz"), "-o", str(folder / "out" / "store")]


COMMANDS = [
    Command("train", _pack_digits, _train, _trained),
    Command("pack", _make_images, _pack, _files, target="store"),
    Command("sample", _make_checkpoint, _sample, _files),
    Command("study", _make_study, _study, _studied, has_workers=True),
]


def _start(arguments: Sequence[str], dies_at_write: int | None = None) -> int:
    """Run a command of `assay` in a child that has everything imported; its process number."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        said = os.open(_SAID, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(said, 1)
        os.dup2(said, 2)
        if dies_at_write is not None:
            _die_at_write(dies_at_write)
        app(list(arguments))
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        os._exit(code)


def _die_at_write(number: int) -> None:
    """Kill this process at the `number`-th time that it flushes or renames a file, before or after."""
    left = number

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments)

        return call

    os.fsync, os.replace = counted(os.fsync), counted(os.replace)


def _run(arguments: Sequence[str], expected_status: int = 0) -> float:
    """Run a command undisturbed; the seconds that it took."""
    started = time.monotonic()
    status = os.waitstatus_to_exitcode(os.waitpid(_start(arguments), 0)[1])
    assert status == expected_status, f"{arguments} ended with {status}: {_SAID.read_text()[-1000:]}"
    return time.monotonic() - started


def soak(command: Command, num_kills: int, seed: int = 0) -> Report:
    """Kill a command `num_kills` times, and compare whenever it ends."""
    torch.set_num_threads(1)
    rng, report = random.Random(f"{command.name} {seed}"), Report()
    with tempfile.TemporaryDirectory(prefix="soak-") as temporary:
        folder = Path(temporary)
        out = folder / "out"
        command.prepare(folder)
        seconds = _run(command.arguments(folder))
        expected = command.contents(out)

        def is_there() -> bool:
            return command.target is not None and (out / command.target).exists()

        while report.num_kills < num_kills:
            shutil.rmtree(out)
            ended = False
            while report.num_kills < num_kills and not ended and not is_there():
                ended = _disturb(command, folder, seconds, rng, report)
            if not ended:  # the last of its lives is left in peace
                _run(command.arguments(folder), expected_status=int(is_there()))
            report.num_finished += 1
            _compare(command, out, expected, report)
    _SAID.unlink()
    return report


def _disturb(command: Command, folder: Path, seconds: float, rng: random.Random, report: Report) -> bool:
    """Let a command live until it is killed or ends; whether it ended."""
    at_write = rng.randrange(1, 40) if not command.has_workers and rng.random() < 0.4 else None
    pid = _start(command.arguments(folder), at_write)
    if at_write is not None:
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        report.num_kills += status == -signal.SIGKILL
        report.num_in_writes += status == -signal.SIGKILL
        return _ended(status, report)
    moment = time.monotonic() + rng.uniform(0, seconds)
    while time.monotonic() < moment:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return _ended(os.waitstatus_to_exitcode(status), report)
        time.sleep(0.005)
    workers, everybody = workers_of(pid), children(pid)
    how = rng.choice(("driver", "worker", "both", "stopped", "paused")) if workers else "driver"
    match how:
        case "paused":
            _signal((pid, *workers), signal.SIGSTOP)
            time.sleep(0.5)
            _signal((*workers, pid), signal.SIGCONT)
        case "stopped":
            _signal([rng.choice(workers)], signal.SIGSTOP)
        case "worker":
            _signal([rng.choice(workers)], signal.SIGKILL)
        case "both":
            _signal(workers, signal.SIGKILL)
    if how in ("worker", "paused"):  # the driver goes on and does what is left
        report.num_kills += 1
        return _ended(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), report)
    _signal([pid], signal.SIGKILL)
    os.waitpid(pid, 0)
    report.num_kills += 1
    report.orphan_seconds = max(report.orphan_seconds, seconds_until_gone(everybody))
    return False


def _signal(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, number)


def _ended(status: int, report: Report) -> bool:
    if status not in (0, -signal.SIGKILL):
        report.faults.append(f"the command ended with {status}: {_SAID.read_text()[-1000:]}")
    return status == 0


def _compare(command: Command, out: Path, expected: dict[str, bytes], report: Report) -> None:
    """Bits, leftovers, orphans."""
    found = command.contents(out)
    names = sorted(found.keys() | expected.keys())
    report.faults += [f"{name} differs" for name in names if found.get(name) != expected.get(name)]
    hidden = [str(path.relative_to(out)) for path in out.rglob(".*")]
    report.faults += [f"{name} is left over" for name in hidden if Path(name).name != ".job.json"]
    if report.orphan_seconds > MAX_ORPHAN_SECONDS:
        report.faults.append(f"an orphan lived for {report.orphan_seconds:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("commands", nargs="*", help="which of train, pack, sample and study; default: all")
    parser.add_argument("-n", type=int, default=50, help="kills of each command")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    num_faults = 0
    for command in COMMANDS:
        if options.commands and command.name not in options.commands:
            continue
        report = soak(command, options.n, options.seed)
        num_faults += len(report.faults)
        kills = f"{report.num_kills} kills ({report.num_in_writes} in writes)"
        ends = f"{report.num_finished} times finished, longest orphan {report.orphan_seconds:.2f} s"
        print(f"{command.name:8} {kills}, {ends}, {len(report.faults)} faults", flush=True)
        for fault in report.faults[:10]:
            print(f"    {fault}", flush=True)
    sys.exit(1 if num_faults else 0)


if __name__ == "__main__":
    main()
