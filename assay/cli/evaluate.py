"""`assay evaluate`, with `compare` and `reference` under it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table
from typer.core import TyperGroup

from assay.cli.options import Device, open_console, output_option, takes
from assay.data import open_store
from assay.devices import find_devices
from assay.errors import AssayError
from assay.metrics.distance import Measurement, save_statistics
from assay.metrics.evaluate import Evaluation, Measures, save_evaluation, titles
from assay.metrics.evaluate import compare as compare_evaluations
from assay.metrics.held_out import SURELY
from assay.metrics.measure import DEFAULT_CACHE, MeasureConfig, find_reference, measure
from assay.outcome import load_evaluations
from assay.progress import open_progress
from assay.sample import SampleConfig

Cache = Annotated[
    Path,
    typer.Option(
        envvar="ASSAY_CACHE",
        help="Folder that keeps weights, classifiers and features of references.",
        show_default="~/.cache/assay",
    ),
]
Results = Annotated[
    list[Path], typer.Argument(help="JSON files of `assay evaluate --output` or of a study, or results.csv.")
]


class EvaluateGroup(TyperGroup):
    """`assay evaluate MODEL` measures; the other commands have names."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """What is not the name of a command begins the arguments of `model`."""
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = ["model", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=EvaluateGroup,
    help="Measure a model, or images: `assay evaluate PATH`; options: `assay evaluate model --help`.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
)


@app.command("model", short_help="Measure a model, or images. The word model may be left out.")
@takes("sample", SampleConfig, panel="Sampling")
@takes("config", MeasureConfig)
def evaluate(
    path: Annotated[
        Path,
        typer.Argument(
            help="A checkpoint, a run folder, a published model (hf:OWNER/NAME), a store, or images: a folder, "
            "zip or npz."
        ),
    ],
    config: MeasureConfig,
    sample: SampleConfig,
    output: Annotated[Path | None, output_option("Save the result as JSON.")] = None,
    cache: Cache = DEFAULT_CACHE,
    device: Device = "auto",
) -> None:
    """Measure how close generated images are to real ones, and how well a model denoises held-out images.

    A checkpoint is sampled, by default in three ranges of seeds as in the paper. No image is saved. The
    held-out loss needs no samples, no extractor and no labels. Noisy images count at the noise levels above
    their own. Without options, it is that of the images that `assay train --held-out` set aside.

    Examples:

        assay evaluate samples/ --reference stores/digits --output result.json

        assay evaluate runs/mix --reference stores/digits --num-images 1000

        assay evaluate runs/mix --held-out stores/test --output loss.json

        assay evaluate runs/mix

        assay evaluate runs/rounds --reference stores/scans --noised

    A published model: `assay evaluate
    hf:giannisdaras/ambient_laws_cifar_sigma_0.2_corruption_0.9_keep_1.0 --reference cifar10-32x32.npz
    --extractor inception`
    """
    with open_progress() as tell:
        found = measure(path, config, sample, cache, find_devices(device), tell)
    console = open_console()
    _print(console, found)
    if output is not None:
        save_evaluation(output, found)
        console.print(f"wrote {output}")


@app.command()
def compare(results: Results) -> None:
    """Rank results, best first. They must have been measured in the same way.

    Example: `assay evaluate compare clean.json mixed.json noisy.json`
    """
    found = load_evaluations(results)
    order = compare_evaluations(found)
    best, records = found[order[0]], [each for name in order if (each := found[name].held_out_loss_record)]
    behind = ["", *(str(each.minus(records[0])) for each in records[1:])] if len(records) == len(order) else []
    console = open_console()
    console.print(_table("result", [(name, found[name]) for name in order], best.metric, behind))
    for name, each in zip(order[1:], records[1:] if behind else (), strict=False):
        if level := each.split(records[0]):
            below, above = map(_place, (each.minus(records[0], 0.0, level), each.minus(records[0], level)))
            console.print(f"{name} is {below} at noise levels below {level:.2g}, and {above} above")
    if best.num_images:
        against = f", against {best.details.reference}" if best.details else ""
        console.print(f"{best.num_images:,} images each{against}")


def _place(difference: Measurement) -> str:
    """Where a loss that is this much higher puts a model."""
    if abs(difference.in_errors) < SURELY:
        return "not surely different"
    return f"{'behind' if difference.value > 0 else 'ahead'} by {abs(difference.value):.3g}"


@app.command()
@takes("config", MeasureConfig, "extractor", "weights", "batch_size")
def reference(
    store: Annotated[Path, typer.Argument(help="A store of real images; noisy ones are left out.")],
    config: MeasureConfig,
    output: Annotated[Path, output_option("The npz file to write.", suffix=".npz")],
    cache: Cache = DEFAULT_CACHE,
    device: Device = "auto",
) -> None:
    """Save the feature statistics of a store, so that others can evaluate against it without its images.

    EDM's tools read the file too.

    Example: `assay evaluate reference stores/digits -o digits.npz --extractor pixels`
    """
    if config.extractor in (None, "classifier"):
        what = "a classifier is trained on the images of the store, which others do not have"
        raise AssayError(what, key="extractor", cure="choose inception or pixels")
    with open_progress() as tell:
        found = find_reference(open_store(store), config, cache, find_devices(device), tell)[1].statistics
    save_statistics(output, found)
    open_console().print(f"{output}: {len(found.mean)} features of {found.num_images:,} images")


def _print(console: Console, found: Evaluation) -> None:
    num_images = found.num_images or 0
    if details := found.details:
        spread = "" if found.fd_std is None else f" ± {found.fd_std:.2g}"
        against = "?" if details.num_reference is None else f"{details.num_reference:,}"
        console.print(f"{found.metric} {found.fd:.4g}{spread}", style="bold")
        console.print(f"{len(details.ranges)} x {num_images:,} images against {against} of {details.reference}")
        console.print(_table("first", [(f"{part.first:,}", part) for part in details.ranges], found.metric))
        if num_images <= details.num_features:
            few = f"{num_images:,} images are few for {details.num_features:,} features"
            console.print(f"note: {few}; the distance is mostly bias", style="yellow")
    if record := found.held_out_loss_record:
        low, high = record.covers
        console.print(f"held-out loss {record.nats_per_dim} nats per dimension; lower is better", style="bold")
        images = f"{len(record.index):,} images of {record.held_out}"
        console.print(f"denoising error of {images} at noise levels {low:.3g} to {high:g}")
        if low > record.config.sigma_min:
            text = f"The held-out images are noisy: levels below {low:.3g} are not measured."
            console.print(text, style="yellow")


def _table(
    first: str, rows: Sequence[tuple[str, Measures]], metric: str = "FD", behind: Sequence[str] = ()
) -> Table:
    """The metrics of each row, and how far `behind` that of the first its loss is, on the same noise."""
    names = titles(each for _, each in rows)
    headers = [metric if name == "fd" else title for name, title in names.items()]
    headers += ["loss behind the first"] * bool(behind)
    table = Table(Column(first, overflow="fold"), *headers, box=None, header_style="bold")  # paths stay whole
    for place, (title, each) in enumerate(rows):
        table.add_row(title, *(each.cell(name) for name in names), *behind[place : place + 1])
    return table
