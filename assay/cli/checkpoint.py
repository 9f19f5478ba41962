"""`assay import`, `assay export` and `assay average`: weights from and for other code, and averages of them."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from assay.cli.options import open_console, output_argument, output_option


def import_(
    source: Annotated[
        str, typer.Argument(help="EDM's .pkl or .pt, a folder with config.json, or a Hugging Face repository.")
    ],
    out: Annotated[
        Path | None,
        output_argument("The checkpoint to write. Default: the source's name in the current folder."),
    ] = None,
) -> None:
    """Convert weights of EDM or ambient-laws to a checkpoint. No code in the file is run.

    Example: `assay import network-snapshot-000123.pkl cifar10.safetensors`
    """
    from assay.checkpoint import import_checkpoint, save_checkpoint
    from assay.files import check_absent

    out = out or Path(Path(source).resolve().name.removesuffix(".pkl").removesuffix(".pt") + ".safetensors")
    check_absent(out)
    console = open_console()
    with console.status(f"reading {source}"):
        checkpoint = import_checkpoint(source)
        save_checkpoint(out, checkpoint.denoiser, checkpoint.config, checkpoint.info)
    config, num_parameters = checkpoint.config, sum(p.numel() for p in checkpoint.denoiser.parameters())
    console.print(f"{out}: {config.kind} for {config.image_shape}, {num_parameters:,} parameters")
    for name, value in checkpoint.info.model_dump(exclude_defaults=True).items():
        console.print(f"  {name}: {value}")


def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint (.safetensors), or the folder of a run.")],
    out: Annotated[Path, output_argument("A .pt file, or a folder for ambient-laws-hf.")],
    to: Annotated[
        Literal["edm-state-dict", "ambient-laws-hf"], typer.Option(help="The code that will read the weights.")
    ],
) -> None:
    """Convert a checkpoint to weights for EDM or ambient-laws.

    Example: `assay export cifar10.safetensors cifar10-hf --to ambient-laws-hf`
    """
    from assay.checkpoint import export_checkpoint, load_checkpoint
    from assay.files import check_absent

    check_absent(out)
    if to == "edm-state-dict":  # the network's arguments go there
        check_absent(out.with_suffix(".json"))
    export_checkpoint(load_checkpoint(checkpoint), out, to)
    open_console().print(f"wrote {out} for {to}")


def average(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run with train.average_every.")],
    output: Annotated[Path, output_option("The checkpoint to write.", suffix=".safetensors")],
    length: Annotated[
        float, typer.Option(help="Standard deviation of the average in time, as a share of the training.")
    ] = 0.1,
    step: Annotated[
        int | None, typer.Option(help="Average over the first steps only. Default: all of them.")
    ] = None,
) -> None:
    """Choose the length of the weights' moving average (EMA) after training.

    Example: `assay average runs/mix --length 0.08 -o runs/mix/average.safetensors`
    """
    from assay.train.average import average_checkpoint

    average_checkpoint(run, length, output, step)
    open_console().print(f"wrote {output}, the average of length {length:g}")
