"""`assay study`: which data should I use, and what is it worth?"""

import json
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from assay.cli.options import open_console, output_option
from assay.errors import AssayError
from assay.processes import stop_on_signal
from assay.progress import duration, open_progress

if TYPE_CHECKING:
    from assay.study.stages import OpenStudy

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
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of the file, e.g. train.num_steps=100."),
]
Workers = Annotated[
    int | None, typer.Option(min=1, help="Trainings at a time. Default: one per GPU, or per core without GPUs.")
]
_NOTHING = "No run is finished yet."


def _open(spec: Path, output: Path | None, settings: Sequence[str] = (), claim: bool = True) -> "OpenStudy":
    from assay.study import open_study

    return open_study(spec, None if spec.is_dir() else output, settings, claim)


@app.command()
def init(
    store: Annotated[Path, typer.Argument(help="The store to study, or a known data set (`assay data get`).")],
    output: Annotated[Path, output_option("The study file to write.", suffix=".toml")] = Path("study.toml"),
    have_clean: Annotated[
        int | None, typer.Option(min=20, help="Clean images in each mix. Default: a tenth of the store's.")
    ] = None,
    noisy: Annotated[
        list[float], typer.Option(metavar="SIGMA", help="A noise level on offer; repeat it. Default: 0.2.")
    ] = [],  # noqa: B006
    minutes: Annotated[float, typer.Option(help="How long the first blocks may take here.")] = 30.0,
    net: Annotated[
        str | None, typer.Option(metavar="NAME", help="A preset, or a kind of your own. Default: by size.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Trainings at a time that it is planned for. Default: one per core."),
    ] = None,
) -> None:
    """Write a commented study file that decides what a noisy image is worth, sized for the time you have.

    It trains on a ladder of clean sizes and on mixes with noisy images, in blocks that draw other images. If
    all images of the store are clean, noise is simulated. A few training steps are timed on this machine.

    Example: `assay study init stores/scans --have-clean 400 --noisy 0.2 --minutes 30`
    """
    from assay.files import write_text
    from assay.study.sizing import draft_study, heading

    console = open_console(markup=False)
    with console.status("timing a few steps ..."):
        text = draft_study(store, have_clean, noisy, minutes, net, num_workers=workers)
    write_text(output, text)
    console.print(heading(text))
    alone = f" --workers {workers}" if workers else ""
    console.print(f"Wrote {output}. Read it, then: assay study run {output} --until 2{alone}")


@app.command()
def run(
    spec: Spec,
    output: Folder = None,
    settings: Settings = [],  # noqa: B006
    until: Annotated[
        float | None,
        typer.Option(min=1.05, help="Add blocks until the interval's ends are within this factor."),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Add no block that would end later. The first always run.")
    ] = None,
    workers: Workers = None,
    gpus_per_run: Annotated[
        int | None,
        typer.Option(min=0, help="GPUs of each training; 0 for the CPU. Default: 1 if there is any."),
    ] = None,
) -> None:
    """Train and measure every configuration that has no result yet, then write tables, figures and the report.

    Press Ctrl-C to stop, and repeat the command to resume. Start it several times, also on other machines that
    share the folder, to divide the work.

    Examples:

        assay study run study.toml -o out/scans --until 2

        assay study run study.toml --gpus-per-run 4
    """
    how = {"num_workers": workers, "gpus_per_run": gpus_per_run}
    _run(_open(spec, output, settings), how, until, minutes)


def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder of the demo.")] = Path("out/demo"),
    workers: Workers = None,
    settings: Settings = [],  # noqa: B006
) -> None:
    """Run a small study from start to end: 14 models of clothes at 8x8, in minutes on two cores.

    The images ship with Assay, so it needs no network. Repeat the command to resume.

    Example: `assay demo`
    """
    from assay.study.spec import DEMO

    _run(_open(DEMO, output, settings), {"num_workers": workers})


def _run(
    opened: "OpenStudy", how: dict[str, Any], until: float | None = None, minutes: float | None = None
) -> None:
    from assay.study.report import write_report
    from assay.study.run import drive, width

    console = open_console(markup=False)
    if left := len(opened.missing()):
        done = f"{len(opened.runs)} trainings, {len(opened.runs) - left} of them finished"
        console.print(f"{opened.study.name}: {done}, into {opened.folder}")
    with stop_on_signal() as stopped, open_progress(console=console) as tell:
        how |= {"should_stop": lambda: bool(stopped)}
        opened, prices, failed = drive(opened, until, minutes, tell, console.print, **how)
    if stopped:
        console.print("Stopped and saved. Repeat the command to resume.")
        raise typer.Exit(130)
    for title, reason in failed.items():
        console.print(f"failed: {title}: {reason}", style="red")
    console.print(write_report(opened) or _NOTHING)
    if prices and all(math.isfinite(width(price)) for price in prices):
        # An interval shrinks as the square root of the blocks: half of it takes four times as many.
        blocks = 3 * max(prices, key=width).law.num_blocks
        runs = blocks * len(opened.runs) // opened.num_blocks
        time = f"{runs} runs, {duration(3 * opened.seconds())} of one core"
        console.print(f"About {blocks} more blocks ({time}) would halve the interval; --until adds blocks.")
    if until is not None and prices and (reached := max(map(width, prices))) > until:
        why = "training is the limit" if any(price.limited for price in prices) else "time is over"
        console.print(
            f"--until {until:g} is not reached ({why}): the ends differ by a factor of {reached:.3g}."
        )
    if failed:
        console.print(f"{len(failed)} trainings failed. Run the same command to try them again.")
        raise typer.Exit(1)


@app.command()
def cost(
    spec: Spec,
    output: Folder = None,
    settings: Settings = [],  # noqa: B006
    rate: Annotated[
        float | None,
        typer.Option(
            min=0.001, help="Count for a device of these TFLOP/s, without images. A GPU has about 60."
        ),
    ] = None,
) -> None:
    """List the unfinished runs and estimate how long they will take on this machine. Starts nothing.

    Example: `assay study cost study.toml`

    On GPUs: `assay study cost studies/paper/cifar10.toml --rate 60`
    """
    from assay.pricing.words import Table
    from assay.study.sizing import study_cost, warn_of_few_epochs
    from assay.study.spec import read_study

    console, opened = open_console(markup=False), None
    study = read_study(spec, settings)
    if rate is None:
        try:
            opened = _open(spec, output, settings, claim=False)
        except AssayError as error:
            error.cure = f"{error.cure}; --rate 60 counts without images" if error.cure else "see --rate"
            raise
        warn_of_few_epochs(opened)
    with console.status("timing a few steps ..."):
        found = study_cost(study, opened, rate or 1.0)
    rows = tuple(
        (of.title, f"{of.num_trained:,}", f"{of.num_sampled:,}", duration(of.seconds), f"{of.megabytes:,.0f}")
        for of in found
    )
    header = ("run", "images trained on", "images sampled", "time", "disk, MB")
    console.print(str(Table(study.name, header, rows)))
    hours, kept = sum(of.seconds for of in found) / 3600, sum(of.kept for of in found)
    of_what = "of one core, of which each worker takes one"
    if rate:
        of_what = f"of one device at {rate:g} TFLOP/s sustained. Counted, not measured"
    console.print(f"{len(found)} trainings: about {hours:,.3g} hours {of_what}.")
    most = max((of.megabytes for of in found), default=0)
    console.print(f"On disk, each worker needs up to {most:,.0f} MB; {kept:,.0f} MB of weights remain in all.")


@app.command()
def status(
    spec: Spec,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder of the study.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Show how far each run is, its held-out loss, and the time that is left. Writes nothing.

    Example: `assay study status out/demo`
    """
    from assay.outcome import METRICS
    from assay.pricing.words import Table
    from assay.study.stages import study_status

    console, found = open_console(markup=False), study_status(spec, output)
    if as_json:
        typer.echo(json.dumps(found, indent=2, allow_nan=False))
        return
    rows = []
    for run in found["runs"]:
        numbers = (f"{run[name]:.4g}" if run[name] else "" for name in METRICS)
        left = duration(run["seconds_left"]) if run["seconds_left"] else ""
        rows.append((run["title"], run["state"], f"{run['trained']:.0%}", *numbers, left))
    header = ("run", "state", "trained", "held-out loss", "FD", "left on one core")
    console.print(str(Table(found["name"], header, tuple(rows))))
    for run in (run for run in found["runs"] if run["failure"]):
        console.print(f"failed: {run['title']}: {run['failure']}", style="red")
    num_done = sum(run["state"] == "finished" for run in found["runs"])
    size = f"{found['folder']} takes {found['num_bytes'] / 1e6:,.0f} MB"
    console.print(f"{num_done} of {len(rows)} runs are finished; {size}.", *found["notes"], sep="\n")
    if num_running := sum(run["state"] in ("training", "being measured") for run in found["runs"]):
        console.print(f"The study is running: {num_running} now.")
    elif num_done < len(rows) and not found["num_others"]:
        place = found["folder"] if Path(found["folder"], "study.toml").exists() else spec
        console.print(
            f"`assay study run {place}` resumes it, and `assay study cost {place}` estimates the time."
        )


@app.command()
def report(
    spec: Annotated[Path, typer.Argument(help="The folder of a study, its TOML file, or a CSV of results.")],
    output: Folder = None,
) -> None:
    """Write results.csv, tables, figures and report.html from the finished runs.

    A CSV file of results can be given instead of a study: your own, or the paper's tables. Its report goes to
    out/NAME, too.

    Examples:

        assay study report out/demo

        assay study report my.csv --output out/mine
    """
    from assay.study.report import report_from_table, write_report

    if spec.suffix == ".csv":
        folder = output or (spec.parent if spec.with_name("study.toml").exists() else Path("out") / spec.stem)
        written = report_from_table(spec, folder) or None
    else:
        written = write_report(_open(spec, output))
    open_console(markup=False).print(written or _NOTHING)


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="The folder of a study, its TOML file, or a results.csv.")],
    second: Annotated[Path, typer.Argument(help="Another one.")],
) -> None:
    """Show the results of two studies side by side, configuration by configuration, and how they differ.

    Example: `assay study compare out/demo out/mine`
    """
    from assay.outcome import read_outcomes, warn_if_stale
    from assay.study.report import SPREAD, compared_settings, compared_table
    from assay.study.spec import study_folder

    places = [study_folder(path) if path.suffix == ".toml" else path for path in (first, second)]
    tables = [path / "results.csv" if path.is_dir() else path for path in places]
    for given, path in zip(places, tables, strict=True):
        if not path.exists():
            cure = f"`assay study report {given}` writes it once a training is finished"
            raise AssayError("does not exist", path=path, cure=cure if given.is_dir() else "check the path")
        if given.is_dir():
            warn_if_stale(given)
    mine, theirs = (list(read_outcomes(path).values()) for path in tables)
    table = compared_table(mine, theirs, (str(places[0]), str(places[1])))
    open_console(markup=False).print(str(table), SPREAD, *compared_settings(*tables), sep="\n")


@app.command()
def clean(
    spec: Spec,
    output: Folder = None,
    yes: Annotated[bool, typer.Option("--yes", help="Remove it, instead of listing it.")] = False,
) -> None:
    """List what results and report do not need, and how much room it takes; remove it with --yes.

    That is the weights of its finished runs. Results and pictures stay.

    Example: `assay study clean out/demo`
    """
    console, opened = open_console(markup=False), _open(spec, output, claim=False)
    found = opened.unneeded()
    sizes = [path.stat().st_size / 1e6 for path in found]
    for size, path in zip(sizes, found, strict=True):
        console.print(f"{size:10,.1f} MB  {path}")
        if yes:
            path.unlink(missing_ok=True)
            with suppress(OSError):  # up to the first that is not empty
                os.removedirs(path.parent)
    console.print(f"{'Removed' if yes else 'Would free'} {sum(sizes):,.1f} MB.")
