"""Taking a study to its end: its runs, more blocks until the price is decided, and the report.

Workers are real processes, so a crash, an out-of-memory kill or a diverging run ends one run and not the
study. Nobody hands out runs: a worker locks one that has no result, and the lock ends with its process. So
the workers of all processes and machines that share a folder divide the work, and take over what a dead one
left.

Each worker has one thread: another number of threads would give other last bits, and results must not depend on
how many workers there happened to be.
"""

import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from assay.data import Store, View
from assay.data.arrays import Arrays
from assay.data.config import DataConfig
from assay.data.source import as_source
from assay.devices import limit_threads
from assay.errors import AssayError, Rules, check
from assay.files import read_json, read_text, remove, remove_leftovers, write_text
from assay.nets import NetConfig
from assay.pricing.price import Price
from assay.pricing.words import amount
from assay.processes import Ended, Workers, stop_on_signal
from assay.progress import Tell, open_progress
from assay.registry import name_of
from assay.study.report import Written, write_report
from assay.study.sizing import draft_study, heading, study_name, warn_of_few_epochs
from assay.study.spec import Run, Study
from assay.study.stages import ENDS_ALL, OpenStudy, Update, Work, attempt, find_reference, open_study
from assay.train.run import check_ranks

_MAX_LOSSES = 2  # of workers at one run: then it has failed
_SECONDS_BETWEEN_UPDATES = 0.2
_SECONDS_BETWEEN_LOOKS = 1.0  # for a run that no other process holds any more


def run_local(
    opened: OpenStudy,
    num_workers: int | None = None,
    on_update: Callable[[Update], None] = lambda update: None,
    should_stop: Callable[[], bool] = lambda: False,
    gpus_per_run: int | None = None,
) -> None:
    """Take every unfinished run to its end, `num_workers` at a time; wait for those that others hold.

    Each worker has `gpus_per_run` GPUs for itself. Failures are recorded; a run whose worker dies is taken up
    again, and has failed if that happens twice. A full disk, or images that change, end all of them.
    """
    shares = gpu_shares(gpus_per_run)
    num_ranks = shares[0].count(",") + 1 if shares else 1
    for run in opened.runs:
        check_ranks(run.config, num_ranks)  # before any work
    # The longest first, so that none is left for the end, alone.
    runs = sorted(opened.missing(), key=lambda run: -run.config.train.total_steps * run.config.train.batch_size)
    for run in runs:
        with suppress(OSError):
            opened.work(run).failure_path.unlink()  # it is tried again, by whichever process
    shares = shares or [""] * (num_workers or os.cpu_count() or 1)
    doing, losses, stopping, why = dict[Connection, tuple[str, str]](), Counter[str](), False, ""
    with Workers() as workers:

        def start(share: str) -> None:
            where = opened.study, opened.folder, opened.data
            variables = {"CUDA_VISIBLE_DEVICES": share}
            doing[workers.start(_work, num_ranks, where, runs, environment=variables)] = share, ""

        for share in shares[: min(num_workers or len(shares), len(runs))]:
            start(share)
        while doing:
            if not stopping and (why or should_stop()):
                stopping = True
                workers.tell_all(None)  # any message means stop
            for worker, message in workers.heard():
                share, key = doing.pop(worker)
                if not isinstance(message, Ended):
                    doing[worker] = share, "" if message.is_end else message.run
                    why = why or message.phase * (message.phase in ENDS_ALL)
                    on_update(message)
                elif message.exit_code and not stopping:
                    losses[key] += 1
                    again, code = losses[key] < _MAX_LOSSES, message.exit_code
                    if not (key or again):
                        what, cure = "workers die before they begin", "see what they print"
                        raise AssayError(what, path=opened.folder, cure=cure)
                    how = f"(exit code {code}{', killed: is there enough memory?' * (code == -signal.SIGKILL)})"
                    for work in (opened.work(run) for run in runs if run.key == key):
                        resumed = Update(key, "lost", reason=f"its worker died {how}; another one resumes it")
                        on_update(resumed if again else work.fail(f"{_MAX_LOSSES} workers died of it {how}"))
                    start(share)
    if why:
        raise _end_of_all(opened, why)


def _end_of_all(opened: OpenStudy, why: str) -> AssayError:
    """What ended all runs of a study: a phase of `ENDS_ALL`."""
    if why == "changed":
        stores = ", ".join(map(str, np.atleast_1d(opened.study.data.store)))  # type: ignore[arg-type]
        cure = "put its images back and repeat the command; a study of others needs another folder (-o)"
        return AssayError("has changed while the study ran", path=stores, cure=cure)
    space = f" (`assay study clean {opened.folder}` helps)" if opened.unneeded() else ""
    cure = f"free some space{space}, and repeat the command to resume"
    return AssayError("the disk is full", path=opened.folder, cure=cure)


def _work(
    connection: Connection, num_ranks: int, where: tuple[Study, Path, DataConfig], runs: Sequence[Run]
) -> None:
    """Take runs that nobody holds, and tell how they go, until none is left or a message says stop."""
    limit_threads(1)
    told, when = ("", ""), 0.0

    def tell(update: Update) -> None:
        nonlocal told, when
        news = (update.run, update.phase) != told or update.done == update.total
        if news or time.monotonic() - when > _SECONDS_BETWEEN_UPDATES:
            told, when = (update.run, update.phase), time.monotonic()
            with suppress(OSError):  # the parent is gone: `should_stop` notices, and the run is saved
                connection.send(update)

    left = [Work(*where, run, tell, connection.poll, num_ranks) for run in runs]
    while left := [each for each in left if not (each.is_finished or each.failure_path.exists())]:
        for work in left:
            if connection.poll():
                return
            tell(end := attempt(work))
            if end.phase in ENDS_ALL:
                return
            if end.phase != "held":
                left.remove(work)
                break
        else:
            connection.poll(_SECONDS_BETWEEN_LOOKS)


def gpu_shares(gpus_per_run: int | None = None) -> list[str]:
    """The GPUs that this process may use in shares of `gpus_per_run`, as CUDA_VISIBLE_DEVICES has them."""
    num_gpus = torch.cuda.device_count()
    size = min(1, num_gpus) if gpus_per_run is None else gpus_per_run
    if size > num_gpus:
        what = f"this machine has {num_gpus} GPUs"
        raise AssayError(what, key="gpus_per_run", cure=f"give a number from 0 to {num_gpus}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(num_gpus)))
    names = [name.strip() for name in visible.split(",")][:num_gpus]
    return [",".join(names[i : i + size]) for i in range(0, num_gpus - size + 1, size)] if size else []


def drive(
    opened: OpenStudy,
    until: float | None = None,
    minutes: float | None = None,
    tell: Tell = lambda *progress: None,
    say: Callable[[str], None] = lambda line: None,
    should_stop: Callable[[], bool] = lambda: False,
    **how: int | None,
) -> tuple[OpenStudy, tuple[Price, ...], dict[str, str]]:
    """Run all that is missing, and add blocks to a design until its price is sure enough, or time is over.

    `until` is the factor by which the ends of an interval may differ; no block is added where training, not
    data, is the limit, nor one that would end after `minutes`, by what the last ones took. Returns the study
    with its blocks, the prices of its goal, if it is complete, and why runs have failed, by their titles. `say`
    gets a line for each run and block that ends; `how` is for `run_local`.
    """
    started, reasons = time.monotonic(), dict[str, str]()
    theirs = {"results.csv", "levels.csv", "tables.md", "report.html"} & {*os.listdir(opened.folder)}
    if theirs and not (opened.folder / "runs").is_dir():
        what, cure = f"holds {min(theirs)}, which no run here made", "choose another folder with -o"
        raise AssayError(what, path=opened.folder, cure=cure)
    remove_leftovers(opened.folder)
    warn_of_few_epochs(opened)
    if opened.missing():  # what is wrong with the reference is told before any work
        find_reference(opened.study, opened.data, opened.folder)
    while True:
        num_missing, begun = len(opened.missing()), time.monotonic()
        hear = _display(opened, reasons, tell, say)
        run_local(opened, on_update=hear, should_stop=should_stop, **how)
        if left := opened.missing():
            failed = {run.title: reasons.get(run.key) or opened.failure(run) or "" for run in left}
            return opened, (), {} if should_stop() else failed
        if prices := goal_prices(opened):
            rates = ", ".join(f"{amount(price)} at noise {price.sigma:.3g}" for price in prices)
            say(f"{opened.num_blocks} blocks, for {prices[0].goal}, noisy images per clean one: {rates}")
        now, runs_per_block = time.monotonic(), len(opened.runs) // opened.num_blocks
        pace = opened.seconds() / len(opened.runs) / min(os.cpu_count() or 1, runs_per_block)  # as recorded
        pace = (now - begun) / num_missing if num_missing else pace
        late = minutes is not None and now - started + pace * runs_per_block > 60 * minutes
        sure = until is not None and bool(prices) and all(width(price) <= until for price in prices)
        sure = sure or any(price.limited for price in prices)  # training is the limit: more blocks do not help
        unlimited = until is None and minutes is None
        if should_stop() or opened.study.design is None or unlimited or late or sure:
            return opened, prices, {}
        opened = opened.with_blocks(opened.num_blocks + 1)


def _display(
    opened: OpenStudy, reasons: dict[str, str], tell: Tell, say: Callable[[str], None]
) -> Callable[[Update], None]:
    """Shows updates: how many runs are finished, and what the others do. Keeps reasons of failures."""
    titles, doing = {run.key: run.title for run in opened.runs}, dict[str, Update]()
    num_done = len(titles) - len(opened.missing())

    def hear(update: Update) -> None:
        nonlocal num_done
        doing[update.run] = update
        if update.is_end:
            del doing[update.run]
            num_done = len(titles) - len(opened.missing())  # others may have finished some, too
            if update.phase != "held":
                say(f"{update.phase:7} {titles[update.run]}" + f": {update.reason}" * bool(update.reason))
            if update.phase == "failed":
                reasons[update.run] = update.reason
        notes = "; ".join(f"{titles[each.run]}: {each.phase} {each.share:.0%}" for each in doing.values())
        # What follows training is short.
        trained = sum(each.share if each.phase == "training" else 1.0 for each in doing.values())
        tell(opened.study.name, num_done + trained, len(titles), notes)

    return hear


def width(price: Price) -> float:
    """The factor by which the ends of an interval differ."""
    return float("inf") if price.low <= 0 or price.limited else price.high / price.low


def goal_prices(opened: OpenStudy) -> tuple[Price, ...]:
    """The prices of a design's goal, one for each noise level, from all that is measured."""
    if opened.study.design is None:
        return ()
    return tuple(price for price in opened.prices().prices if price.goal == opened.study.design.goal)


def run_study(
    study: Path | str | Any,
    folder: Path | str | None = None,
    *,
    have_clean: int | None = None,
    noisy: float | Sequence[float] = (),
    until: float | None = None,
    minutes: float | None = None,
    net: str | type[NetConfig] | None = None,
    num_workers: int | None = None,
    progress: bool = True,
) -> Written:
    """Find out what a noisy image is worth: train and measure every configuration, and write the report.

    `study` is a TOML file, as of `assay study init`, or a study's folder; or images, as the path of a store, an
    array (N, ...) in [-1, 1] or any source (`assay.from_arrays`, `assay.part`), for which one is drafted:
    `have_clean` clean images are in hand, by default a tenth, and images with noise `noisy` could be had, by
    default 0.2 where black to white is 2. Leave `noisy` out if the source has noisy images: these are studied.
    `net` is a preset or, if workers can find it (see `assay.registry`), the kind of a network of your own.

    Results go to `folder`, by default out/NAME. Call it again to resume; other images or arguments are
    rejected. A drafted study is planned to take about `minutes`, by default 30, on an idle machine, and a
    warning tells if that is too short for a price. `until` adds blocks to it until the ends of the interval are
    within this factor; only these are not begun after `minutes`. What is finished stays if you stop it, and
    `assay.open_study(folder, claim=False).prices()` tells what it says so far. `num_workers` processes share
    the work, by default one for each core.

    >>> found = assay.run_study("study.toml", num_workers=1, progress=False)
    >>> found.path
    PosixPath('out/mine/report.html')
    """
    check(_rules(until, num_workers))
    asked = {
        "have_clean": have_clean,
        "noisy": _levels(noisy),
        "minutes": minutes,
        "net": _kind(net),
    }
    asked = {key: value for key, value in asked.items() if value not in (None, [])}
    given = Path(study) if isinstance(study, str | Path) else None
    if given is None or not (given.suffix == ".toml" or (given / "study.toml").exists()):
        study, folder = _drafted(study, folder, asked, num_workers)
        if progress:
            print(f"{heading(read_text(study))}\nThe study is {study}.", file=sys.stderr)
    elif key := next((key for key in asked if key != "minutes" or until is None), None):
        cure = "give until, whose blocks it limits" if key == "minutes" else "set it in its file"
        raise AssayError("is for images, not for a study", path=given, key=key, cure=cure)
    opened = open_study(study, folder)
    with open_progress(progress) as tell, stop_on_signal() as stopped:
        how: Any = {"should_stop": lambda: bool(stopped), "num_workers": num_workers}
        limit = minutes if until is not None else None
        opened, _, failed = drive(opened, until, limit, tell, **how)
    if stopped:
        raise KeyboardInterrupt(f"stopped and saved: run_study({str(opened.folder)!r}) resumes it")
    for title, reason in failed.items():
        raise AssayError(f"{title} failed: {reason}", path=opened.folder, cure="correct it, and call again")
    written = write_report(opened)
    assert written is not None
    return written


def _rules(until: float | None, num_workers: int | None) -> Rules:
    cure = "give e.g. 2, and the upper end of an interval is at most twice the lower one"
    error = AssayError(f"{until} is no factor above 1", key="until", cure=cure)
    yield until is not None and not until > 1, error
    error = AssayError(f"{num_workers} processes do no work", key="num_workers", cure="give 1 or more")
    yield num_workers is not None and num_workers < 1, error


def _kind(net: str | type[NetConfig] | None) -> str | None:
    if net is None or isinstance(net, str | type):
        return None if net is None else name_of(net, "net")
    what = "workers build their network themselves"
    cure = "give the kind of its config (docs/howto/own_parts.md)"
    raise AssayError(f"is a {type(net).__name__}, but {what}", key="net", cure=cure)


def _levels(noisy: float | Sequence[float]) -> list[float]:
    try:
        found: list[float] = np.asarray(noisy, float).ravel().tolist()
        return found
    except (ValueError, TypeError):
        cure = "give numbers, where black to white is 2, e.g. 0.2"
        raise AssayError(f"{noisy!r:.80} is no noise level", key="noisy", cure=cure) from None


def _drafted(
    images: Path | str | Any, folder: Path | str | None, asked: dict[str, Any], num_workers: int | None
) -> tuple[Path, Path]:
    """The file of a study of images, drafted once as it is `asked` for, and its folder."""
    path = images.path if isinstance(images, Store) else images
    given = Path(path) if isinstance(path, str | Path) else None
    source: Any = None if given else as_source(images)
    source = source if given or isinstance(source, Arrays) else View(source)  # which can be saved
    name = given.name if given else study_name(source.name)
    place = Path(folder or Path("out", name))
    spec, record, store = place / "drafted.toml", place / "drafted.json", given or place / "images"
    wanted = asked | {"images": str(given.resolve()) if given else f"{source} {source.fingerprint[:16]}"}
    if not spec.exists():
        cure = f"choose another folder, or resume it: run_study({str(place)!r})"
        error = AssayError("holds another study", path=place, cure=cure)
        check([((place / "study.toml").exists(), error)])
        made = None if given or store.exists() else source.save(store)
        try:
            text = draft_study(store, **asked, name=name, num_workers=num_workers)
        except BaseException:
            if made:
                remove(store)
                with suppress(OSError):
                    place.rmdir()  # unless there is something else
            raise
        write_text(record, json.dumps(wanted, default=float))
        write_text(spec, text)
    known = read_json(record) if record.exists() else wanted
    if differ := [key for key in wanted if wanted[key] != known.get(key)]:
        told = ", ".join(f"{key} = {known.get(key, 'the default')} and not {wanted[key]}" for key in differ)
        cure = f"choose another folder, or resume it as it is: run_study({str(place)!r})"
        raise AssayError(f"holds a study with {told}", path=place, key=differ[0], cure=cure)
    return spec, place
