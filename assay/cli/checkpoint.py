"""`assay import`, `assay export` and `assay average`: weights in, out again, and averaged anew."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from assay.cli.options import output_option


def import_(
    source: Annotated[
        str, typer.Argument(help="EDM .pkl or .pt, a directory with config.json, or a Hugging Face repository.")
    ],
    out: Annotated[
        Path | None, typer.Argument(help="The checkpoint to write [default: the source's name, here].")
    ] = None,
) -> None:
    """Turn weights of EDM or ambient-laws into a checkpoint of ours, without running code inside them.

    Example: `assay import network-snapshot-000123.pkl cifar10.safetensors`
    """
    from assay.checkpoint import import_checkpoint, save_checkpoint

    out = out or Path(Path(source).resolve().name.removesuffix(".pkl").removesuffix(".pt") + ".safetensors")
    if out.exists():
        raise FileExistsError(f"{out} exists already; remove it or name another file")
    console = Console()
    with console.status(f"reading {source}"):
        checkpoint = import_checkpoint(source)
        save_checkpoint(out, checkpoint.denoiser, checkpoint.config, checkpoint.info)
    config, num_parameters = checkpoint.config, sum(p.numel() for p in checkpoint.denoiser.parameters())
    console.print(
        f"{out}: {config.kind} for {config.image_shape}, {num_parameters:,} parameters", soft_wrap=True
    )
    for name, value in checkpoint.info.model_dump(exclude_defaults=True).items():
        console.print(f"  {name}: {value}", soft_wrap=True)


def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint of ours.")],
    out: Annotated[Path, typer.Argument(help="A .pt file, or a directory for ambient-laws-hf.")],
    to: Annotated[
        Literal["edm-state-dict", "ambient-laws-hf"], typer.Option(help="Which code the weights are for.")
    ],
) -> None:
    """Write a checkpoint's weights for EDM or for ambient-laws.

    Example: `assay export cifar10.safetensors cifar10-hf --to ambient-laws-hf`
    """
    from assay.checkpoint import export_checkpoint, load_checkpoint

    if out.exists():
        raise FileExistsError(f"{out} exists already; remove it or name another file")
    if to == "edm-state-dict" and out.with_suffix(".json").exists():  # the network's arguments go there
        raise FileExistsError(f"{out.with_suffix('.json')} exists already; remove it or name another file")
    export_checkpoint(load_checkpoint(checkpoint), out, to)
    Console().print(f"{out} written for {to}", soft_wrap=True)


def average(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run with train.average_every.")],
    output: Annotated[Path, output_option("The checkpoint to write.")],
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
    Console().print(f"{output} written: the average of length {length:g}", soft_wrap=True)
