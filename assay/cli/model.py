"""`assay model`: weights from and for other code and people, and what networks there are."""

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import track
from rich.table import Table

from assay.checkpoint import export_checkpoint, load_checkpoint, save_checkpoint
from assay.cli.options import open_console, output_argument
from assay.files import check_absent
from assay.hub import push as publish
from assay.nets import PRESETS, measure_cost, preset

_HELP = "Weights from and for other code and people; the networks."
app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown", help=_HELP)
Model = Annotated[Path, typer.Argument(help="A checkpoint, a run folder, or a published model.")]


@app.command("import")
def import_(
    source: Annotated[Path, typer.Argument(help="EDM's .pkl or .pt, a published folder, or hf:OWNER/NAME.")],
    out: Annotated[Path | None, output_argument("The checkpoint to write. Default: the source's name.")] = None,
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

    Only networks of EDM can be converted: imported weights, or the presets cifar10, celeba and imagenet64.

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
        list[Path] | None, typer.Option("--result", help="JSON of `assay evaluate`, for the card. Repeatable.")
    ] = None,
    prices: Annotated[Path | None, typer.Option(help="A results.csv, for prices on the card.")] = None,
) -> None:
    """Publish a model with a card that states its data, noise levels, results, prices and licence.

    Hugging Face needs the extra `hub` and a login (`hf auth login`).

    Example: `assay model push runs/mix hf:me/digits-mix --license cc-by-4.0 --result loss.json`
    """
    open_console().print(f"published to {publish(checkpoint, destination, license, results or [], prices)}")


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
        cost, shape = measure_cost(preset(name)), "x".join(map(str, chosen.image_shape))
        costs = f"{cost.num_parameters / 1e6:.1f} M", f"{cost.flops / 1e9:.2f}"
        table.add_row(name, shape, *costs, f"{cost.step_bytes(batch_size) / 2**30:.2f} GiB", chosen.about)
    console.print(table)
