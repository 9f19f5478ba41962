"""`assay import`, `export`, `push`, `pull` and `average`: weights from and for other code and people."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from assay.cli.options import Device, open_console, output_argument, output_option


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


def push(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint (.safetensors), or the folder of a run.")],
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
    """Publish a model with a card that tells its data, noise levels, results, prices and licence.

    Hugging Face needs the extra `hub` and a login (`hf auth login`).

    Example: `assay push runs/mix hf:me/digits-mix --license cc-by-4.0 --result score.json`
    """
    from assay.hub import push as publish

    open_console().print(f"published to {publish(checkpoint, destination, license, results or [], prices)}")


def pull(
    source: Annotated[
        str, typer.Argument(help="hf:OWNER/NAME on Hugging Face, or the folder of a published model.")
    ],
    out: Annotated[Path, output_argument("The checkpoint to write.", suffix=".safetensors")],
) -> None:
    """Fetch a published model, of Assay or of ambient-laws, into a checkpoint.

    Commands that take a checkpoint take `hf:OWNER/NAME` as well, without this step.

    Example: `assay pull hf:me/digits-mix digits-mix.safetensors`
    """
    from assay.hub import pull as fetch

    if out.exists():
        raise FileExistsError(f"{out} exists already: remove it, or choose another name")
    with open_console().status(f"reading {source}"):
        fetch(source, out)
    open_console().print(f"wrote {out}")


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
            help="Real images not trained on: the length with the best score on half of them is chosen."
        ),
    ] = None,
    device: Device = "auto",
) -> None:
    """Choose the length of the weights' moving average (EMA) after training.

    Examples:

        assay average runs/mix --held-out stores/test -o runs/mix/average.safetensors

        assay average runs/mix --length 0.08 -o runs/mix/average.safetensors
    """
    from assay.data import open_store
    from assay.devices import find_devices
    from assay.metrics.score import choose_average
    from assay.train.average import average_checkpoint

    console = open_console()
    if held_out is None:
        average_checkpoint(run, length or 0.1, output, step)
        console.print(f"wrote {output}, the average of length {length or 0.1:g}")
        return
    if length is not None:
        raise ValueError("--length and --held-out both decide the length: give one of them")
    with console.status("scoring averages of several lengths ..."):
        found = choose_average(run, open_store(held_out), output, step=step, devices=find_devices(device))
    for tried, value in zip(found.lengths, found.chosen_by, strict=True):
        console.print(f"  length {tried:<5g} score {value:.4f}{'  best' if tried == found.length else ''}")
    score = found.best.nats_per_dim
    console.print(
        f"wrote {output}, the average of length {found.length:g}: {score.value:.4g} ± "
        f"{score.standard_error:.2g} nats per dimension on the other half of the held-out images"
    )
