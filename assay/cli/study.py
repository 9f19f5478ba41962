"""`assay study`: which data should I use, and what is it worth?"""

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from assay.cli.options import open_console, output_option
from assay.cli.train import stop_on_signal
from assay.progress import duration, open_progress

if TYPE_CHECKING:
    from assay.pricing.price import Price
    from assay.progress import Tell
    from assay.study.drive import Runner
    from assay.study.folder import OpenStudy
    from assay.study.report import Written
    from assay.study.stages import Update

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Studies: train on clean images and on mixes with noisy ones, and find out what a noisy one is worth.",
)

Spec = Annotated[Path, typer.Argument(help="TOML file of a study, or the folder of one that was run.")]
Folder = Annotated[
    Path | None, output_option("Folder of the study. Default: out/NAME, with the name in the file.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of the file, e.g. train.num_steps=100."),
]
_RATE = 60.0  # TFLOP/s that one data-centre GPU of 2020 sustains in mixed precision: an assumption, stated


def _open(spec: Path, output: Path | None, settings: Sequence[str] = ()) -> "OpenStudy":
    from assay.study import open_study

    return open_study(spec / "study.toml", spec) if spec.is_dir() else open_study(spec, output, settings)


@app.command()
def init(
    store: Annotated[Path, typer.Argument(help="The store to study, or a known data set (`assay data get`).")],
    output: Annotated[Path, output_option("The study file to write.", suffix=".toml")] = Path("study.toml"),
    have_clean: Annotated[
        int | None,
        typer.Option(min=20, help="The clean images you have. Default: a tenth of those in the store."),
    ] = None,
    noisy: Annotated[
        list[float] | None,
        typer.Option(
            metavar="SIGMA",
            help="A noise level that you could buy; repeat it for several. It is simulated, where all images "
            "of the store are clean. Default there: 0.2.",
        ),
    ] = None,
    minutes: Annotated[float, typer.Option(help="How long the first blocks may take on this machine.")] = 30.0,
) -> None:
    """Write a commented study file that decides what a noisy image is worth, sized for the time you have.

    It trains on a ladder of clean sizes and on mixes with noisy images, in blocks that draw other images. If
    all images of the store are clean, noise is simulated. A few training steps are timed on this machine.

    Example: `assay study init stores/scans --have-clean 400 --noisy 0.2 --minutes 30`
    """
    from assay.errors import AssayError
    from assay.files import write_whole
    from assay.study.init import draft_study

    if output.exists():
        raise AssayError("exists already", path=output, cure="remove it or choose another name with -o")
    console = open_console()
    with console.status("timing a few steps ..."):
        text = draft_study(store, have_clean, noisy or (), minutes)
    with write_whole(output) as partial:
        partial.write_text(text)
    heading = text[: text.index("\nname = ")]
    console.print("\n".join(line.removeprefix("#").strip() for line in heading.splitlines()), markup=False)
    console.print(f"Wrote {output}. Read it, then: assay study run {output} --until 2", markup=False)


@app.command()
def run(
    spec: Spec,
    output: Folder = None,
    settings: Settings = None,
    until: Annotated[
        float | None,
        typer.Option(
            min=1.05,
            metavar="FACTOR",
            help="Add blocks to a design until the ends of the price's interval differ by this factor at most.",
        ),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Add blocks to a design for at most this long.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Trainings at a time. Default: one per GPU, or per core without GPUs."),
    ] = None,
    threads: Annotated[
        int,
        typer.Option(min=1, help="Threads per process. Changing it may change the last bits of results."),
    ] = 1,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Run on a Ray cluster; auto finds a running one.")
    ] = None,
    gpus_per_run: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="GPUs of each training, which uses all of them; 0 for the CPU. On a Ray cluster also part of "
            "one, e.g. 0.5. Default: 1 if there are any.",
        ),
    ] = None,
) -> None:
    """Train and measure every configuration that has no result yet, then write tables, figures and the report.

    Press Ctrl-C to stop, and repeat the command to resume.

    Examples:

        assay study run study.toml -o out/scans --until 2

        assay study run study.toml --gpus-per-run 4
    """
    from assay.study.cluster import run_on_ray
    from assay.study.pool import run_local

    opened = _open(spec, output, settings or [])
    runner: Runner = partial(run_local, num_workers=workers, num_threads=threads, gpus_per_run=gpus_per_run)
    if ray is not None:
        runner = partial(run_on_ray, address=ray, gpus_per_run=gpus_per_run)
    _run(opened, runner, until, minutes)


def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder of the demo.")] = Path("out/demo"),
    workers: Annotated[int | None, typer.Option(min=1, help="Processes. Default: one per core.")] = None,
    settings: Settings = None,
) -> None:
    """Run a small study from start to end: seven models of clothes at 8x8, in minutes on two cores.

    The images ship with Assay, so it needs no network. Repeat the command to resume.

    Example: `assay demo`
    """
    from assay.study.pool import run_local
    from assay.study.spec import DEMO

    _run(_open(DEMO, output, settings or []), partial(run_local, num_workers=workers))


def _run(
    opened: "OpenStudy", runner: "Runner", until: float | None = None, minutes: float | None = None
) -> None:
    from assay.study.drive import drive, to_halve, width
    from assay.study.report import write_report

    console = open_console()
    if left := len(opened.missing()):
        num_runs, name = len(opened.runs), opened.study.name
        text = f"{name}: {num_runs} trainings, {num_runs - left} of them finished, into {opened.folder}"
        console.print(text, soft_wrap=True)
    with stop_on_signal() as stopped, open_progress(console=console) as tell:
        board = _Board(opened, console, tell)
        driven = drive(opened, runner, until, minutes, board.update, board.show, lambda: bool(stopped))
    if driven.stopped:
        console.print("Stopped and saved. Repeat the command to resume.")
        raise typer.Exit(130)
    for title, reason in driven.failed.items():  # before the report, which a full disk has no room for either
        console.print(f"failed: {title}: {reason}", style="red", soft_wrap=True, markup=False)
    _print_report(write_report(driven.opened), console)
    if driven.prices:
        blocks, seconds = to_halve(driven.opened, max(driven.prices, key=width))
        runs = blocks * len(driven.opened.runs) // driven.opened.num_blocks
        time = f"{runs} runs, {duration(seconds)} of one core"
        text = f"About {blocks} more blocks ({time}) would halve the interval; --until adds blocks."
        console.print(text, soft_wrap=True, markup=False)
    if driven.failed:
        console.print(f"{len(driven.failed)} trainings failed. Run the same command to try them again.")
        raise typer.Exit(1)


class _Board:
    """One line for the whole study: how many runs are finished, and what the others are doing."""

    def __init__(self, opened: "OpenStudy", console: Console, tell: "Tell") -> None:
        self.opened, self.console, self.tell = opened, console, tell
        self.titles = {run.key: run.title for run in opened.runs}
        self.num_done = sum(map(opened.is_finished, opened.runs))
        self.doing: dict[str, str] = {}

    def update(self, update: "Update") -> None:
        """Show an update from a worker."""
        if update.run not in self.titles:  # of a block that was added
            self.opened = self.opened.with_blocks(self.opened.num_blocks + 1)
            self.titles = {run.key: run.title for run in self.opened.runs}
        title = self.titles[update.run]
        self.doing[update.run] = f"{title}: {update.phase} {update.done / max(update.total, 1):.0%}"
        if update.phase in ("done", "failed", "stopped"):
            del self.doing[update.run]
            self.num_done += update.phase == "done"
            style = "green" if update.phase == "done" else "red"
            self.console.print(f"{update.phase:7} {title}", style=style, markup=False)
        self.tell(self.opened.study.name, self.num_done, len(self.titles), "; ".join(self.doing.values()))

    def show(self, num_blocks: int, prices: "Sequence[Price]") -> None:
        """Show the prices after a block."""
        from assay.pricing.words import amount

        rates = ", ".join(f"{amount(price)} at noise {price.sigma:.3g}" for price in prices)
        text = f"{num_blocks} blocks, for {prices[0].goal}, noisy images per clean one: {rates}"
        self.console.print(text, soft_wrap=True, markup=False)


@app.command()
def cost(
    spec: Spec,
    output: Folder = None,
    settings: Settings = None,
    rate: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            metavar="TFLOPS",
            help="Cost on devices that sustain this rate, in hours and storage. Needs no data; the default, "
            "with 60, where the study cannot start here.",
        ),
    ] = None,
) -> None:
    """List the unfinished runs and estimate how long they will take on this machine.

    Example: `assay study cost study.toml`

    On GPUs: `assay study cost studies/paper/cifar10.toml --rate 60`
    """
    from assay.study.cost import cost_elsewhere, cost_here, missing_parts
    from assay.study.spec import read_study

    console = open_console()
    study = read_study(spec / "study.toml" if spec.is_dir() else spec, settings or [])
    missing = missing_parts(study)
    if rate is None and not missing:
        with console.status("timing a few steps ..."):
            found = cost_here(_open(spec, output, settings or []))
        hours = [(each.seconds or 0) / 3600 for each in found]
        basis = "on one core, of which each worker takes one"
    else:
        found, rate = cost_elsewhere(study), rate or _RATE
        hours = [each.flops / (rate * 1e12) / 3600 for each in found]
        basis = f"of one device at {rate:g} TFLOP/s sustained. Counted, not measured"
    rows = []
    for each, time in zip(found, hours, strict=True):
        counts = f"{each.num_trained:,}", f"{each.num_sampled:,}"
        rows.append((each.title, *counts, duration(3600 * time), f"{each.num_bytes / 1e9:.1f}"))
    _print_table(study.name, ("run", "images trained on", "images sampled", "time", "GB"), rows, console)
    size = sum(each.num_bytes for each in found) / 1e9
    text = f"{len(found)} trainings, {size:,.0f} GB if all run at once: about {sum(hours):,.3g} hours"
    console.print(f"{text} {basis}.", soft_wrap=True)
    for line in missing:
        console.print(f"missing: {line}", style="yellow", soft_wrap=True, markup=False)


@app.command()
def status(spec: Spec, output: Folder = None) -> None:
    """Show how far each run is, its held-out loss, and the time that is left.

    Example: `assay study status out/demo`
    """
    from assay.study.folder import disk_use, study_status

    console = open_console()
    opened = _open(spec, output)
    found = study_status(opened)
    rows = []
    for each in found:
        numbers = ["" if value is None else f"{value:.4g}" for value in (each.loss, each.fd)]
        left = duration(each.seconds_left) if each.seconds_left else ""
        rows.append((each.title, each.state, *numbers, left))
    header = ("run", "state", "held-out loss", "FD", "left on one core")
    _print_table(opened.study.name, header, rows, console)
    done = sum(each.state == "finished" for each in found)
    text = f"{done} of {len(found)} runs finished in {opened.num_blocks} blocks or seeds"
    console.print(f"{text}; {opened.folder} takes {disk_use(opened.folder) / 1e6:,.0f} MB.", soft_wrap=True)
    if others := len(opened.left_out()):
        console.print(f"{others} results of other settings are in this folder too (`assay study clean`).")


@app.command()
def report(spec: Spec, output: Folder = None) -> None:
    """Write results.csv, tables, figures and report.html from the finished runs.

    A CSV file of results can be given instead of a study: your own, or the paper's tables.

    Examples:

        assay study report out/demo

        assay study report my.csv --output out/mine
    """
    from assay.study.report import report_from_table, write_report

    if spec.suffix == ".csv":
        folder = output or (spec.parent if spec.name == "results.csv" else Path("out") / spec.stem)
        written: Written | None = report_from_table(spec, folder)
    else:
        written = write_report(_open(spec, output))
    _print_report(written, open_console())


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="The folder of a study, or a results.csv.")],
    second: Annotated[Path, typer.Argument(help="Another one.")],
) -> None:
    """Show the results of two studies side by side, configuration by configuration.

    Example: `assay study compare out/demo out/mine`
    """
    from assay.outcome import read_outcomes
    from assay.study.tables import compared_table

    found = [read_outcomes(path / "results.csv" if path.is_dir() else path) for path in (first, second)]
    mine, theirs = (list(each.values()) for each in found)
    table = compared_table(mine, theirs, (str(first), str(second)))
    _print_table(table.title, table.header, table.rows, open_console())


@app.command()
def clean(
    spec: Spec,
    yes: Annotated[bool, typer.Option("--yes", help="Remove it, instead of listing it.")] = False,
) -> None:
    """List what results and report do not need, and how much room it takes; remove it with --yes.

    Weights and logs of finished runs, and runs of other settings; results and pictures stay.

    Example: `assay study clean out/demo`
    """
    from assay.study.folder import disk_use, remove, unneeded

    console = open_console()
    found = unneeded(_open(spec, None))
    total = 0
    for path in found:
        size = disk_use(path)
        total += size
        console.print(f"{size / 1e6:10,.1f} MB  {path}", soft_wrap=True, markup=False, highlight=False)
    if yes:
        remove(found)
    console.print(f"{'Removed' if yes else 'Would free'} {total / 1e6:,.1f} MB.")


def _print_report(written: "Written | None", console: Console) -> None:
    console.print(written or "No run is finished yet.", soft_wrap=True, markup=False, highlight=False)


def _print_table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]], console: Console) -> None:
    from assay.study.tables import Table, format_table

    text = format_table(Table(title, tuple(header), tuple(map(tuple, rows))), "text")
    console.print(text, soft_wrap=True, markup=False, highlight=False)
