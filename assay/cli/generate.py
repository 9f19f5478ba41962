"""`assay sample`, `assay denoise` and `assay restore`: images from a checkpoint."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from assay.cli.options import (
    BatchSize,
    Device,
    Devices,
    Tuned,
    advance,
    open_console,
    open_progress,
    output_option,
    parse_devices,
    parse_pair,
    read_tuned,
    takes_sampling,
)

if TYPE_CHECKING:
    from assay.sample import SampleConfig

Checkpoint = Annotated[Path, typer.Argument(help="A checkpoint, the folder of a run, or hf:OWNER/NAME.")]
Output = Annotated[
    Path,
    output_option("A folder; one .npz, .npy, .tif or .fits file; or a .png with a grid of pictures."),
]
Format = Annotated[Literal["png", "tiff", "npy", "fits"], typer.Option(help="Kind of files in a folder.")]
DType = Annotated[
    Literal["uint8", "uint16", "float32"] | None,
    typer.Option(
        help="uint8: black is 0, white 255. uint16 and float32: the units of the training data. "
        "Default: uint8 for PNG and npz, float32 for the others."
    ),
]
PhysicalRange = Annotated[
    str | None,
    typer.Option(
        "--range",
        metavar="LOW,HIGH",
        help="Values of black and white in the files. Default: those of the training data.",
    ),
]


@takes_sampling()
def sample(
    checkpoint: Checkpoint,
    output: Output,
    sample: "SampleConfig",
    seeds: Annotated[str, typer.Option(help="One image per seed: 0-63, or 3,5,10-19.")] = "0-63",
    tuned: Tuned = False,
    label: Annotated[
        int | None, typer.Option("--class", help="Generate only this class. Default: all classes evenly.")
    ] = None,
    format: Format = "png",
    dtype: DType = None,
    physical_range: PhysicalRange = None,
    batch_size: BatchSize = 64,
    device: Device = "auto",
    devices: Devices = "auto",
) -> None:
    """Generate images. Repeat the command to resume: only missing images are made.

    Examples:

        assay sample runs/mix --seeds 0-49999 -o samples/

        assay sample runs/mix --seeds 0-99 -o samples.tif --dtype uint16
    """
    from assay.generate import sample_to_files

    if tuned:
        sample = read_tuned(checkpoint)
    console = open_console()
    with open_progress(console) as bar:
        done = sample_to_files(
            checkpoint,
            output,
            parse_seeds(seeds),
            sample,
            label,
            format,
            dtype,
            parse_pair(physical_range, "physical_range"),
            batch_size,
            device,
            parse_devices(devices),
            advance(bar, "sampling"),
        )
    console.print(f"{done.num_images} images in {done.path}")


@takes_sampling("num_steps", "truncate_at", "sigma_min", "rho")
def denoise(
    checkpoint: Checkpoint,
    store: Annotated[Path, typer.Argument(help="A store of noisy images.")],
    output: Output,
    sample: "SampleConfig",
    num_samples: Annotated[
        int,
        typer.Option("--samples", help="Draws from the posterior of each image. Default: its mean instead."),
    ] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    format: Format = "tiff",
    dtype: DType = None,
    batch_size: BatchSize = 64,
    device: Device = "auto",
    devices: Devices = "auto",
) -> None:
    """Remove the noise from a store's images, each at its own noise level. Run again to resume.

    Writes the posterior mean of each image (the best guess in squared error), or with --samples several
    clean images that could be behind it. Values are in the units of the store.

    Examples:

        assay denoise runs/mix stores/scans -o denoised/

        assay denoise runs/mix stores/scans -o draws.npz --samples 8 --dtype float32
    """
    from assay.generate import denoise_to_files

    console = open_console()
    with open_progress(console) as bar:
        done = denoise_to_files(
            checkpoint,
            store,
            output,
            num_samples,
            sample,
            seed,
            format,
            dtype,
            batch_size,
            device,
            parse_devices(devices),
            advance(bar, "denoising"),
        )
    console.print(f"{done.num_images} images in {done.path}")


def restore(
    checkpoint: Checkpoint,
    store: Annotated[Path, typer.Argument(help="A store of noisy images.")],
    output: Annotated[Path, output_option("The store to write.")],
    method: Annotated[
        Literal["flow", "sample"],
        typer.Option(help="Follow the probability flow from each image, or draw from its posterior."),
    ] = "flow",
    num_steps: Annotated[int, typer.Option("--steps", min=2, help="Steps from an image's noise down.")] = 16,
    keep: Annotated[
        float, typer.Option(help="Share of the noise level that stays in the images, e.g. 0.5 for half.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    batch_size: BatchSize = 64,
    device: Device = "auto",
) -> None:
    """Restore the noisy images of a store into a new store, each from its own noise level.

    The store records what it was made from. Its images are not taken for clean ones: they are usable from the
    level of the noise that was removed. `train.loops` does the same within a training.

    Example: `assay restore runs/mix stores/scans -o stores/scans-restored`
    """
    from assay.generate import RestoreConfig, restore_store

    console = open_console()
    config = RestoreConfig(method=method, num_steps=num_steps, keep=keep)
    with open_progress(console) as bar:
        made = restore_store(
            checkpoint, store, output, config, seed, batch_size, device, advance(bar, "restoring")
        )
    num_noisy = int((made.usable_from > 0).sum())
    console.print(f"{num_noisy} of {len(made)} images restored in {made.path}")


def parse_seeds(text: str) -> list[int]:
    """`0-3,7` -> [0, 1, 2, 3, 7]."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or (dash and int(last) < int(first)):
            raise ValueError(f"seeds = {text}: expected numbers and ranges, e.g. 0-49999 or 3,5,10-19")
        found.extend(range(int(first), int(last if dash else first) + 1))
    if len(set(found)) < len(found):
        raise ValueError(f"seeds = {text}: a seed occurs twice")
    return found
