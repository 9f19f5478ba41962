"""`assay train` and `assay sample`: learn from images of any quality, and draw new ones."""

import math
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from assay.data import ImageSource
    from assay.train import Progress as RunProgress
    from assay.train import RunConfig

_BAR = (
    TextColumn("{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TimeRemainingColumn(),
    TextColumn("{task.fields[rate]}"),
)

Devices = Annotated[str, typer.Option(help="How many devices, or 'auto' for all.")]
Accelerator = Annotated[Literal["auto", "cpu", "gpu", "mps"], typer.Option(help="Where to compute.")]


def train(
    config: Annotated[
        Path | None, typer.Argument(help="A TOML file with [data], [net] and [train]; may be left out.")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="Start from these settings; `assay train --preset list` shows them.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, e.g. train.lr=3e-4."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The run's folder. Default: runs/<hash of the config>."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be done, and what it takes.")
    ] = False,
    accelerator: Accelerator = "auto",
    devices: Devices = "1",
    num_nodes: Annotated[int, typer.Option(help="Machines, when started by torchrun.")] = 1,
    wandb: Annotated[
        str | None, typer.Option(metavar="PROJECT", help="Copy the curves to Weights & Biases (an extra).")
    ] = None,
) -> None:
    """Train a denoiser on clean and noisy images. The same command again continues.

    Example: `assay train --preset digits --set data.store=stores/digits --set data.clean_fraction=0.1
    --set data.sigma=0.5 -o runs/mix`
    """
    from assay.train import read_config
    from assay.train import train as run_training
    from assay.train.config import DataConfig, override, read_toml
    from assay.train.presets import PRESETS, preset_tree
    from assay.train.run import check_run

    console = Console()
    if preset == "list":
        for name, chosen in PRESETS.items():
            console.print(f"[bold]{name:12}[/] {chosen.about} (source: {chosen.origin})")
        return
    tree: dict[str, Any] = preset_tree(preset) if preset else {}
    for section, values in (read_toml(config) if config else {}).items():
        tree[section] = {**tree.get(section, {}), **values} if isinstance(values, dict) else values
    num_devices = parse_devices(devices)
    data = override(tree, settings or []).get("data", {})
    if isinstance(data, dict) and data.keys() <= DataConfig.model_fields.keys() - {"store"}:  # nothing misspelt
        raise ValueError("which images to train on? Give --set data.store=PATH, a store of `assay data pack`")
    resolved = read_config(tree, str(config or "settings"))
    source = resolved.data.open()
    run_dir = output or Path("runs") / resolved.fingerprint(source)
    if dry_run:
        check_run(resolved, source)
        _describe(resolved, source, run_dir, console)
        return
    if wandb is not None:
        _copy_to_wandb(wandb, run_dir)
    with Progress(*_BAR, console=console) as bar, stop_on_signal() as stopped:
        task = bar.add_task(str(run_dir), total=resolved.train.num_steps, rate="")
        result = run_training(
            resolved,
            run_dir,
            source,
            accelerator,
            num_devices,
            num_nodes,
            on_progress=partial(_show_progress, bar, task),
            should_stop=lambda: bool(stopped),
        )
    if result.finished:
        console.print(f"Finished. The checkpoint is {result.checkpoint}", soft_wrap=True)
    else:
        console.print(
            f"Stopped at step {result.step} of {resolved.train.num_steps}, saved. The same command continues.",
            soft_wrap=True,
        )
        raise typer.Exit(130)


def _show_progress(bar: Progress, task: TaskID, now: "RunProgress") -> None:
    """Move the bar. The loss is read twice a second at most: reading makes a GPU wait."""
    clock, fields = time.perf_counter(), bar.tasks[task].fields
    if clock - fields.get("read_at", 0) > 0.5 or now.step == now.num_steps:
        fields |= {"read_at": clock, "rate": f"{now.images_per_second:.0f} images/s, loss {now.loss:.4f}"}
    bar.update(task, completed=now.step)


def _copy_to_wandb(project: str, run_dir: Path) -> None:
    """Weights & Biases follows the TensorBoard events, so the loop knows nothing of it."""
    try:
        import wandb
    except ImportError:
        raise ImportError("--wandb needs an extra package: pip install 'assay[wandb]'") from None
    run_dir.mkdir(parents=True, exist_ok=True)
    wandb.init(project=project, name=run_dir.name, dir=run_dir, sync_tensorboard=True)


def _describe(config: "RunConfig", source: "ImageSource", run_dir: Path, console: Console) -> None:
    import json

    from assay.nets import measure_cost

    cost = measure_cost(config.net_config(source))
    train, num_noisy = config.train, int((source.sigma_tn > 0).sum())
    console.print_json(json.dumps(config.model_dump(mode="json")))
    num_images = train.num_steps * train.batch_size
    micro_batch = train.batch_size // train.accumulate
    console.print(
        f"images      {len(source)}, {num_noisy} of them noisy; {num_images / len(source):.0f} epochs\n"
        f"network     {cost.num_parameters:,} parameters\n"
        f"steps       {train.num_steps} of {train.batch_size} images\n"
        f"memory      about {cost.step_bytes(micro_batch) / 2**20:.0f} MiB\n"
        f"folder      {run_dir}",
        soft_wrap=True,
    )


@contextmanager
def stop_on_signal() -> Iterator[list[int]]:
    """Yield a list that SIGINT and SIGTERM append to, for a loop to save and end; a second SIGINT kills."""
    received: list[int] = []

    def note(number: int, frame: object) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def sample(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, a .safetensors file.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="A folder for PNGs, a .npz, or a .png for one grid picture.")
    ],
    seeds: Annotated[str, typer.Option(help="Seeds, one image each: 0-63, or 3,5,10-19.")] = "0-63",
    steps: Annotated[int, typer.Option(min=2, help="Steps from noise to image.")] = 18,
    solver: Annotated[Literal["heun", "euler"], typer.Option(help="Second or first order.")] = "heun",
    churn: Annotated[float, typer.Option(min=0, help="Noise added back on the way (EDM's S_churn).")] = 0.0,
    truncate: Annotated[
        str | None,
        typer.Option(
            metavar="SIGMA|auto", help="Stop at this level and return the prediction; auto: the data's."
        ),
    ] = None,
    extra_steps: Annotated[int, typer.Option(min=0, help="More steps below the data's noise level.")] = 0,
    label: Annotated[
        int | None, typer.Option("--class", help="Generate one class. Default: the classes in turn.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Images at once; changes the speed, not the images.")] = 64,
    accelerator: Accelerator = "auto",
    devices: Devices = "1",
) -> None:
    """Generate images from a checkpoint. The same command again makes only what is missing.

    Example: `assay sample runs/mix/snapshots/final.safetensors --seeds 0-49999 -o samples/`
    """
    import torch
    from lightning_fabric import Fabric

    from assay.checkpoint import load_checkpoint
    from assay.data.export import check_job, missing_seeds, read_pngs, write_job, write_npz, write_pngs
    from assay.data.picture import image_grid
    from assay.files import sha256, write_whole
    from assay.sample import SampleConfig, spread_labels

    console = Console()
    wanted, num_devices = parse_seeds(seeds), parse_devices(devices)
    level = None if truncate is None or truncate == "auto" else parse_level(truncate)
    loaded = load_checkpoint(checkpoint)
    levels = [sigma for sigma, _ in loaded.info.sigma_tn if sigma > 0]
    if truncate == "auto" and not levels:
        raise ValueError(f"{checkpoint} does not say which noise its data had: give --truncate a number")
    if extra_steps and not levels:
        raise ValueError(f"{checkpoint} does not say which noise its data had: --extra-steps needs to know")
    if loaded.info.clean_fraction == 0 and truncate is None and levels:
        console.print(
            f"[yellow]This model saw no clean image (sigma_tn >= {min(levels):g}): `--truncate auto` is "
            "likely better than full sampling, unless it was trained with consistency.[/]"
        )
    config = SampleConfig(
        num_steps=steps,
        solver=solver,
        churn=churn,
        truncate_at=min(levels) if truncate == "auto" else level,
        refine_at=max(levels) if extra_steps else None,
        num_extra=extra_steps,
    )
    num_classes = loaded.config.num_classes
    if label is not None and not 0 <= label < num_classes:
        raise ValueError(f"--class {label}: {checkpoint} has {num_classes or 'no'} classes, counted from 0")

    fabric = Fabric(accelerator=accelerator, devices=num_devices)
    fabric.launch()
    denoiser = loaded.denoiser.to(fabric.device).eval()
    folder = output.with_name(output.name + ".parts") if output.suffix in (".npz", ".png") else output
    job = {"checkpoint": sha256(checkpoint)[:16], "class": label, **config.model_dump(mode="json")}
    check_job(folder, job)
    fabric.barrier()  # so that no rank takes another's first images for those of another job
    if fabric.is_global_zero:
        write_job(folder, job)
    mine = missing_seeds(folder, wanted[fabric.global_rank :: fabric.world_size])

    def classes(of: list[int]) -> "torch.Tensor | None":
        if not num_classes:
            return None
        return spread_labels([1.0] * num_classes, of) if label is None else torch.full((len(of),), label)

    with Progress(*_BAR, console=console, disable=not fabric.is_global_zero) as bar:
        task = bar.add_task("sampling", total=len(mine), rate="")
        shape = loaded.config.image_shape
        for done in config.generate(denoiser, mine, shape, classes(mine), batch, fabric.device):
            write_pngs(folder, done.seeds, done.images)
            bar.advance(task, len(done.seeds))
    fabric.barrier()
    if not fabric.is_global_zero:
        return
    match output.suffix:
        case ".npz":
            write_npz(output, folder, wanted, classes(wanted))
        case ".png":
            pixels = torch.from_numpy(read_pngs(folder, wanted)).permute(0, 3, 1, 2)
            with write_whole(output) as partial:
                image_grid(pixels.float() / 127.5 - 1, max(1, round(len(wanted) ** 0.5))).save(partial)
    if folder != output:
        shutil.rmtree(folder)
    console.print(f"{len(wanted)} images in {output}", soft_wrap=True)


def parse_seeds(text: str) -> list[int]:
    """`0-3,7` -> [0, 1, 2, 3, 7]."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or (dash and int(last) < int(first)):
            raise ValueError(f"--seeds {text}: expected numbers and ranges, e.g. 0-49999 or 3,5,10-19")
        found.extend(range(int(first), int(last if dash else first) + 1))
    if len(set(found)) < len(found):
        raise ValueError(f"--seeds {text}: a seed occurs twice")
    return found


def parse_devices(text: str) -> int | str:
    """`2` -> 2; `auto` stays."""
    if text != "auto" and not (text.isdecimal() and int(text) > 0):
        raise ValueError(f"--devices {text}: expected a number of devices, or auto for all")
    return text if text == "auto" else int(text)


def parse_level(text: str) -> float:
    """`0.2` -> 0.2, a noise level."""
    try:
        level = float(text)
    except ValueError:
        level = math.nan
    if not 0 < level < math.inf:
        raise ValueError(f"--truncate {text}: expected a noise level > 0, or auto for the data's")
    return level
