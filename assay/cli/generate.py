"""`assay sample` and `assay denoise`: images from a checkpoint."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from assay.cli.options import open_console, output_option, takes
from assay.errors import AssayError
from assay.generate import (
    ComputeConfig,
    DenoiseConfig,
    FilesConfig,
    denoise_to_files,
    restore_store,
    sample_to_files,
)
from assay.progress import open_progress
from assay.sample import SampleConfig

_MAX_SEEDS = 10_000_000  # of one job
Checkpoint = Annotated[Path, typer.Argument(help="A checkpoint, the folder of a run, or hf:OWNER/NAME.")]
Output = Annotated[Path, output_option("A folder; one .npz, .npy, .tif or .fits file; or a .png with a grid.")]


@takes("sample", SampleConfig, panel="Sampling")
@takes("files", FilesConfig, panel="Files")
@takes("compute", ComputeConfig, panel="Computing")
def sample(
    checkpoint: Checkpoint,
    output: Output,
    sample: SampleConfig,
    files: FilesConfig,
    compute: ComputeConfig,
    seeds: Annotated[str, typer.Option(help="One image per seed: 0-63, or 3,5,10-19.")] = "0-63",
    label: Annotated[
        str | None, typer.Option("--class", metavar="NAME|N", help="Only this class. Default: all evenly.")
    ] = None,
) -> None:
    """Generate images. Repeat the command to resume: only missing images are made.

    Examples:

        assay sample runs/mix --seeds 0-49999 -o samples/

        assay sample runs/mix --seeds 0-99 -o samples.tif --dtype uint16
    """
    console = open_console()
    with open_progress(not console.quiet) as tell:
        what = parse_seeds(seeds), sample, label, files, compute, partial(tell, "sampling")
        number = sample_to_files(checkpoint, output, *what)
    console.print(f"{number} images in {output}")


@takes("config", DenoiseConfig, panel="Draws")
@takes("files", FilesConfig, panel="Files")
@takes("compute", ComputeConfig, panel="Computing")
def denoise(
    checkpoint: Checkpoint,
    store: Annotated[Path, typer.Argument(help="A store of noisy images.")],
    output: Output,
    config: DenoiseConfig,
    files: FilesConfig,
    compute: ComputeConfig,
    restore: Annotated[bool, typer.Option("--restore", help="Write a store to train on instead.")] = False,
) -> None:
    """Remove the noise from a store's images, each at its own noise level. Run again to resume.

    Writes the posterior mean of each image (the best guess in squared error), or with --num-samples several
    clean images that could be behind it. Values are in the units of the store.

    With --restore it follows the probability flow from each image and writes a store of restored images, usable
    from the level of the noise that was removed. `train.rounds` does the same within a training.

    Examples:

        assay denoise runs/mix stores/scans -o denoised/

        assay denoise runs/mix stores/scans -o draws.npz --num-samples 8 --dtype float32

        assay denoise runs/mix stores/scans -o stores/scans-restored --restore
    """
    console = open_console()
    with open_progress(not console.quiet) as tell:
        if not restore:
            told = partial(tell, "denoising")
            number = denoise_to_files(checkpoint, store, output, config, files, compute, told)
            words = f"{number} images in {output}"
        else:
            told = partial(tell, "restoring")
            made = restore_store(checkpoint, store, output, config.seed, compute, told)
            words = f"{int((made.usable_from > 0).sum())} of {len(made)} images restored in {made.path}"
    console.print(words)


def parse_seeds(text: str) -> list[int]:
    """`0-3,7` -> [0, 1, 2, 3, 7]."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        is_range = first.isdecimal() and last.isdecimal() and int(first) <= int(last) < 2**53
        if not is_range or int(last) - int(first) >= _MAX_SEEDS - len(found):
            what = f"{part.strip()!r} is no range of seeds below 2^53, or they are more than {_MAX_SEEDS:,}"
            raise AssayError(what, key="seeds", cure="write e.g. 0-49999 or 3,5,10-19, in several jobs")
        found.extend(range(int(first), int(last) + 1))
    if len(set(found)) < len(found):
        raise AssayError("a seed occurs twice", key="seeds", cure="list each once")
    return found
