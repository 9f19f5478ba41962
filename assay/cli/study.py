"""`assay study`: which data should I use, and what is it worth?"""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from assay.cli.options import output_option
from assay.cli.train import stop_on_signal

if TYPE_CHECKING:
    from assay.study.report import Written
    from assay.study.run import OpenStudy, Update
    from assay.study.spec import Study

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Studies: train and measure a grid of clean fractions and noise levels, and report prices.",
)

Spec = Annotated[Path, typer.Argument(help="TOML file of a study, or the folder of one that was run.")]
Folder = Annotated[
    Path | None, output_option("Folder of the study. Default: out/NAME, with the name in the file.")
]

_RATE = 60.0  # TFLOP/s that one data-centre GPU of 2020 sustains in mixed precision: an assumption, stated

Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of the file, e.g. train.num_steps=100."),
]


def _open(spec: Path, output: Path | None, settings: Sequence[str] = ()) -> "OpenStudy":
    from assay.study import open_study

    if spec.is_dir():
        return open_study(spec / "study.toml", spec)
    if not spec.exists():
        raise FileNotFoundError(f"{spec} does not exist: give a study's TOML file or folder")
    return open_study(spec, output, settings)


@app.command()
def init(
    store: Annotated[Path, typer.Argument(help="The store to study, or a known data set (`assay data get`).")],
    output: Annotated[Path, output_option("The study file to write.", suffix=".toml")] = Path("study.toml"),
    minutes: Annotated[float, typer.Option(help="How long the study may take on this machine.")] = 30.0,
) -> None:
    """Write a commented study file for a store, sized for the time you have.

    The study compares mixes of clean and noisy images. If all images are clean, it simulates the noise.
    A few training steps are timed on this machine to choose how many each training gets.

    Example: `assay study init stores/scans --minutes 30`
    """
    from assay.files import write_whole
    from assay.study.init import draft_study

    if output.exists():
        raise FileExistsError(f"{output} exists already; remove it or choose another name with -o")
    console = Console()
    with console.status("timing a few steps ..."):
        text = draft_study(store, minutes)
    with write_whole(output) as partial:
        partial.write_text(text)
    heading = text[: text.index("\nname = ")]
    console.print("\n".join(line.removeprefix("#").strip() for line in heading.splitlines()), markup=False)
    console.print(f"Wrote {output}. Read it, then: assay study run {output}", soft_wrap=True, markup=False)


@app.command()
def run(
    spec: Spec,
    output: Folder = None,
    settings: Settings = None,
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
    ranks_per_run: Annotated[
        int | None,
        typer.Option(
            "--processes-per-run",
            min=1,
            help="Processes that share the batches of a training. Default: one per GPU of it.",
        ),
    ] = None,
) -> None:
    """Train and measure every setting that has no result yet, then write tables, figures and the report.

    Press Ctrl-C to stop, and repeat the command to resume.

    Examples:

        assay study run study.toml -o out/scans

        assay study run study.toml --gpus-per-run 4
    """
    from assay.study.pool import run_local
    from assay.study.run import locked, prepare_shared

    console = Console()
    opened = _open(spec, output, settings or [])
    reasons: dict[str, str] = {}
    with locked(opened.folder):
        num_finished = sum(opened.is_finished(job) for job in opened.jobs)
        if num_finished < len(opened.jobs):
            console.print(
                f"{opened.study.name}: {len(opened.arms)} settings from {len(opened.jobs)} trainings, "
                f"{num_finished} of them finished, into {opened.folder}",
                soft_wrap=True,
            )
            with console.status("preparing the extractor and the reference ..."):
                prepare_shared(opened)
            board = _Board(opened, console)
            with stop_on_signal() as stopped, board.live:
                if ray is None:
                    if gpus_per_run is not None and gpus_per_run % 1:
                        raise ValueError(f"gpus_per_run = {gpus_per_run:g}: only Ray shares out parts of a GPU")
                    num_gpus = None if gpus_per_run is None else int(gpus_per_run)
                    how = board.update, lambda: bool(stopped), threads, num_gpus, ranks_per_run
                    run_local(opened, workers, *how)
                else:
                    from assay.study.cluster import run_on_ray

                    how_on_ray = gpus_per_run, board.update, lambda: bool(stopped), ranks_per_run
                    run_on_ray(opened, ray, *how_on_ray)
            reasons = board.reasons
            if stopped:
                console.print("Stopped and saved. Repeat the command to resume.")
                raise typer.Exit(130)
        failed = [job for job in opened.jobs if not opened.is_finished(job)]
        for job in failed:  # before the report, which a full disk has no room for either
            reason = reasons.get(job.key) or opened.failure(job)
            console.print(f"failed: {job.title}: {reason}", style="red", soft_wrap=True, markup=False)
        _report(opened, console)
    if failed:
        console.print(
            f"{len(failed)} of {len(opened.jobs)} trainings failed. Run the same command to try them again."
        )
        raise typer.Exit(1)


def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder of the demo.")] = Path("out/demo"),
    workers: Annotated[int | None, typer.Option(min=1, help="Processes. Default: one per core.")] = None,
    settings: Settings = None,
) -> None:
    """Run a small study from start to end: seven models of clothes at 8x8, in minutes on two cores.

    The images ship with Assay, so it needs no network. Repeat the command to resume.

    Example: `assay demo`
    """
    from assay.study.spec import DEMO

    run(DEMO, output, settings, workers=workers)


class _Board:
    """A live table of the jobs: what each is doing and how much time is left."""

    def __init__(self, opened: "OpenStudy", console: Console) -> None:
        self.opened = opened
        self.state: dict[str, tuple[str, float, float]] = {}  # phase, share done, since when
        self.reasons: dict[str, str] = {}  # of failures, also of those that the disk has no room for
        self.live = Live(self.render(), console=console, refresh_per_second=2, transient=True)
        self.started = time.monotonic()

    def update(self, update: "Update") -> None:
        """Show an update from a worker."""
        phase, _, since = self.state.get(update.job, ("", 0.0, time.monotonic()))
        since = since if phase == update.phase else time.monotonic()
        self.state[update.job] = update.phase, update.done / max(update.total, 1), since
        if update.phase == "failed":
            self.reasons[update.job] = update.reason
        if update.phase in ("done", "failed"):
            title = next(job.title for job in self.opened.jobs if job.key == update.job)
            self.live.console.print(
                f"{update.phase:7} {title}", style="green" if update.phase == "done" else "red"
            )
        self.live.update(self.render())

    def render(self) -> Group:
        """The current table: what is running, and a line for the rest."""
        table = Table("setting", "", "", "left", box=None, padding=(0, 1))
        num_done = sum(self.opened.is_finished(job) for job in self.opened.jobs)
        for job in self.opened.jobs:
            phase, share, since = self.state.get(job.key, ("", 0.0, 0.0))
            if phase not in ("training", "sampling"):
                continue
            left = (time.monotonic() - since) * (1 - share) / share if share > 0.01 else None
            bar = ProgressBar(total=1.0, completed=share, width=24)
            table.add_row(job.title, phase, bar, "" if left is None else f"{left:.0f} s")
        return Group(table, f"{num_done} of {len(self.opened.jobs)} trainings finished")


def _print_cost(study: "Study", rate: float, console: Console) -> None:
    from assay.study.cost import study_cost

    cost = study_cost(study)
    table = Table("setting", "images trained on", "images sampled", "hours", "GB")
    for job in cost.jobs:
        hours = job.flops / (rate * 1e12) / 3600
        table.add_row(
            job.title,
            f"{job.num_trained:,}",
            f"{job.num_sampled:,}",
            f"{hours:,.1f}",
            f"{job.num_bytes / 1e9:.1f}",
        )
    console.print(table)
    console.print(
        f"{len(cost.jobs)} trainings: {cost.hours(rate * 1e12):,.0f} hours of one device at {rate:g} TFLOP/s "
        f"sustained, {cost.num_bytes / 1e9:,.0f} GB if all run at once. Counted, not measured.",
        soft_wrap=True,
    )
    for sentence in cost.missing:
        console.print(f"missing: {sentence}", style="yellow", soft_wrap=True, markup=False)


@app.command("plan", hidden=True)  # its name in version 0.1
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
    """List the settings and estimate how long the unfinished ones will take on this machine.

    Example: `assay study cost study.toml`

    On GPUs: `assay study cost studies/paper/cifar10.toml --rate 60`
    """
    from assay.study.cost import missing_parts
    from assay.study.spec import read_study
    from assay.study.timing import estimate_seconds

    console = Console()
    file = spec / "study.toml" if spec.is_dir() else spec
    study = read_study(file, settings or [])
    if rate is not None or missing_parts(study):
        _print_cost(study, rate or _RATE, console)
        return
    opened = _open(spec, output, settings or [])
    table = Table("setting", "images", "state", "time")
    total = 0.0
    with console.status("timing a few steps ..."):
        seconds = estimate_seconds(opened)
    for job in opened.jobs:
        finished = opened.is_finished(job)
        total += 0 if finished else seconds[job.key]
        state = "finished" if finished else "failed" if opened.failure(job) else "to do"
        num_images = job.config.train.num_steps * job.config.train.batch_size
        table.add_row(job.title, f"{num_images:,}", state, "" if finished else _duration(seconds[job.key]))
    console.print(table)
    cores = os.cpu_count() or 1
    console.print(f"About {_duration(total)} on one core, {_duration(total / cores)} with {cores} workers.")


@app.command()
def status(spec: Spec, output: Folder = None) -> None:
    """Show finished settings and their results.

    Example: `assay study status out/demo`
    """
    console = Console()
    opened = _open(spec, output)
    table = Table("setting", "state", "distance")
    for job in opened.jobs:
        if not opened.is_finished(job):
            table.add_row(job.title, opened.failure(job) or "to do", "")
    found = opened.outcomes()
    for _, outcome in found:
        evaluation = outcome.evaluation
        table.add_row(outcome.setting.title, "finished", f"{evaluation.metric} {evaluation.cell('fd')}")
    console.print(table)
    console.print(f"{len(found)} of {len(opened.arms)} results")


@app.command()
def report(
    spec: Spec,
    output: Folder = None,
    tables: Annotated[
        Literal["text", "markdown", "latex"] | None,
        typer.Option(help="Only print the tables of the paper, in this format."),
    ] = None,
) -> None:
    """Write results.csv, figures and report.html from the finished settings.

    A CSV file of results can be given instead of a study, such as the paper's tables.

    Examples:

        assay study report out/demo --tables latex

        assay study report assay/pricing/fid_tables.csv --output out/paper
    """
    from assay.study.report import report_from_table
    from assay.study.tables import format_table, study_tables

    if spec.suffix == ".csv":
        folder = output or (spec.parent if spec.name == "results.csv" else Path("out") / spec.stem)
        _print_report(report_from_table(spec, folder), Console())
        return
    opened = _open(spec, output)
    if tables is not None:
        if found := [outcome for _, outcome in opened.outcomes()]:
            for table in study_tables(found):
                typer.echo(format_table(table, tables))
        return
    _report(opened, Console())


def _report(opened: "OpenStudy", console: Console) -> None:
    from assay.study.report import write_report

    written = write_report(opened)
    if written is None:
        console.print("No setting is finished yet.")
        return
    _print_report(written, console)


def _print_report(written: "Written", console: Console) -> None:
    for table in written.headline_tables:
        shown = Table(*table.header, title=table.title)
        for row in table.rows:
            shown.add_row(*row)
        console.print(shown)
    console.print(written.headline, soft_wrap=True)
    if written.prices:
        console.print(written.prices, soft_wrap=True)
    console.print(f"The report is {written.path}", soft_wrap=True)


def _duration(seconds: float) -> str:
    if seconds > 5400:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.1f} min" if seconds > 90 else f"{seconds:.0f} s"
