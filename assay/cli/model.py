"""`assay model`: weights from and for other code and people, and what networks there are."""

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import track
from rich.table import Table

from assay.checkpoint import export_checkpoint, load_checkpoint, save_checkpoint
from assay.cli.evaluate import tune
from assay.cli.options import Device, open_console, output_argument, output_option
from assay.data import open_store
from assay.devices import find_devices
from assay.errors import AssayError
from assay.files import check_absent
from assay.hub import push as publish
from assay.metrics.held_out import choose_average
from assay.nets import PRESETS, measure_cost, preset
from assay.train.average import average_checkpoint

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Weights from and for other code and people; their average, their sampler; the networks.",
)
app.command("tune")(tune)
Model = Annotated[Path, typer.Argument(help="A checkpoint, a run folder, or a published model.")]


@app.command("import")
def import_(
    source: Annotated[
        Path, typer.Argument(help="EDM's .pkl or .pt, a folder with config.json, or hf:OWNER/NAME.")
    ],
    out: Annotated[
        Path | None,
        output_argument("The checkpoint to write. Default: the source's name in the current folder."),
    ] = None,
) -> None:
    """Convert weights of EDM or ambient-laws, or a published model, to a checkpoint. No code in it is run.

    Commands that take a checkpoint read these sources as well, without this step.

    Example: `assay model import network-snapshot-000123.pkl cifar10.safetensors`
    """
    console = open_console()
    name = source.name if source.suffix in (".pkl", ".pt") else source.resolve().name + ".safetensors"
    out = out or Path(name).with_suffix(".safetensors")
    check_absent(out)
    with console.status(f"reading {source}"):
        found = load_checkpoint(source)
        save_checkpoint(out, found.denoiser, found.config, found.info)
    num_parameters = sum(parameter.numel() for parameter in found.denoiser.parameters())
    console.print(f"{out}: {found.config.kind} for {found.config.image_shape}, {num_parameters:,} parameters")
    for name, value in found.info.model_dump(exclude_defaults=True).items():
        console.print(f"  {name}: {value}")


@app.command()
def export(checkpoint: Model, out: Annotated[Path, output_argument("The folder to write.")]) -> None:
    """Convert a checkpoint to weights for EDM or ambient-laws: config.json and model.safetensors.

    Example: `assay model export cifar10.safetensors cifar10-hf`
    """
    export_checkpoint(load_checkpoint(checkpoint), out)
    open_console().print(f"wrote {out}")


@app.command()
def push(
    checkpoint: Model,
    destination: Annotated[str, typer.Argument(help="hf:OWNER/NAME on Hugging Face, or a new folder.")],
    license: Annotated[str, typer.Option(help="The licence of the weights, e.g. apache-2.0 or cc-by-4.0.")],
    results: Annotated[
        list[Path] | None,
        typer.Option("--result", help="A result of `assay evaluate --output`, for the card. Repeatable."),
    ] = None,
    prices: Annotated[
        Path | None, typer.Option(help="A results.csv; the card says what its noisy images are worth.")
    ] = None,
) -> None:
    """Publish a model with a card that states its data, noise levels, results, prices and licence.

    Hugging Face needs the extra `hub` and a login (`hf auth login`).

    Example: `assay model push runs/mix hf:me/digits-mix --license cc-by-4.0 --result loss.json`
    """
    open_console().print(f"published to {publish(checkpoint, destination, license, results or [], prices)}")


@app.command()
def average(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run with train.average_every.")],
    output: Annotated[Path, output_option("The checkpoint to write.", suffix=".safetensors")],
    length: Annotated[
        float | None,
        typer.Option(
            help="Standard deviation of the average in time, as a share of the training. Default: 0.1."
        ),
    ] = None,
    step: Annotated[
        int | None, typer.Option(help="Average over the first steps only. Default: all of them.")
    ] = None,
    held_out: Annotated[
        Path | None,
        typer.Option(
            help="Real images not trained on: the length with the best loss on half of them is chosen."
        ),
    ] = None,
    device: Device = "auto",
) -> None:
    """Choose the length of the weights' moving average (EMA) after training.

    Examples:

        assay model average runs/mix --held-out stores/test -o runs/mix/average.safetensors

        assay model average runs/mix --length 0.08 -o runs/mix/average.safetensors
    """
    console = open_console()
    if held_out is None:
        average_checkpoint(run, length or 0.1, output, step)
        console.print(f"wrote {output}, the average of length {length or 0.1:g}")
        return
    if length is not None:
        raise AssayError("decides the length, and so does --held-out", key="length", cure="give one of them")
    with console.status("measuring averages of several lengths ..."):
        losses, best = choose_average(
            run, open_store(held_out), output, step=step, devices=find_devices(device)
        )
    chosen = min(losses, key=lambda tried: losses[tried])
    for tried, value in losses.items():
        console.print(f"  length {tried:<5g} loss {value:.4f}{'  best' if tried == chosen else ''}")
    on = "nats per dimension on the other half of the held-out images"
    console.print(f"wrote {output}, the average of length {chosen:g}: {best.nats_per_dim} {on}")


@app.command("list")
def list_networks(
    batch_size: Annotated[int, typer.Option(min=1, help="Images in the training step.")] = 32,
) -> None:
    """List the networks with their parameters, operations per image and memory of a training step.

    Costs are computed from shapes, without allocating anything. Presets adapt to other image shapes.

    Example: `assay model list --batch-size 64`
    """
    table = Table("name", "image", "parameters", "GFLOP", "memory", "for")
    table.caption = f"GFLOP to evaluate one image; memory of a training step with {batch_size} images"
    table.columns[0].no_wrap = True
    for column in table.columns[2:5]:
        column.justify = "right"
    console = open_console()
    for name, chosen in track(PRESETS.items(), "counting", console=console, transient=True):
        cost = measure_cost(preset(name))
        table.add_row(
            name,
            "x".join(map(str, chosen.image_shape)),
            f"{cost.num_parameters / 1e6:.1f} M",
            f"{cost.flops / 1e9:.2f}",
            f"{cost.step_bytes(batch_size) / 2**30:.2f} GiB",
            chosen.about,
        )
    console.print(table)
