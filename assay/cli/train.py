"""`assay train`: learn from images of any quality."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, TaskID, TextColumn

from assay.cli.options import Device, Devices, open_console, open_progress, output_option, parse_devices

if TYPE_CHECKING:
    from assay.data import ImageSource
    from assay.train import Progress as RunProgress
    from assay.train import RunConfig


def train(
    config: Annotated[
        Path | None, typer.Argument(help="A TOML file with [data], [net], [train] and [sample]; optional.")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="Settings to start from; `assay train --preset list` lists them.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, e.g. train.lr=3e-4. Repeatable."),
    ] = None,
    output: Annotated[
        Path | None, output_option("Folder of the run. Default: runs/HASH, by its settings.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the settings and what they cost, without training.")
    ] = False,
    device: Device = "auto",
    devices: Devices = "1",
    num_nodes: Annotated[int, typer.Option(min=1, help="Number of machines, when started by torchrun.")] = 1,
    wandb: Annotated[
        str | None,
        typer.Option(metavar="PROJECT", help="Also log to Weights & Biases (extra `wandb`)."),
    ] = None,
) -> None:
    """Train a denoiser on clean and noisy images. Repeat the command to resume.

    Example: `assay train --preset digits --set data.store=stores/digits --set data.clean_fraction=0.1
    --set data.sigma=0.5 -o runs/mix`

    All noisy and 500 clean images of a store: `assay train --set data.store=stores/scans --set data.clean=500`
    """
    from assay.train import read_config
    from assay.train import train as run_training
    from assay.train.config import DataConfig, override, read_toml
    from assay.train.presets import PRESETS, preset_tree
    from assay.train.run import check_run

    console = open_console()
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
        raise ValueError("no images to train on: give --set data.store=PATH, a store made by `assay data pack`")
    resolved = read_config(tree, str(config or "settings"))
    source = resolved.data.open()
    run_dir = output or Path("runs") / resolved.fingerprint(source)
    if dry_run:
        check_run(resolved, source)
        _describe(resolved, source, run_dir, console)
        return
    if wandb is not None:
        _copy_to_wandb(wandb, run_dir)
    rate = TextColumn("{task.fields[rate]}")
    with open_progress(console, rate) as bar, stop_on_signal() as stopped:
        task = bar.add_task(str(run_dir), total=resolved.train.total_steps, rate="", visible=False)
        result = run_training(
            resolved,
            run_dir,
            source,
            device,
            num_devices,
            num_nodes,
            on_progress=partial(_show_progress, bar, task),
            should_stop=lambda: bool(stopped),
        )
    if result.finished:
        console.print(f"Finished. The checkpoint is {result.checkpoint}")
    else:
        console.print(
            f"Stopped and saved at step {result.step} of {resolved.train.total_steps}. "
            "Repeat the command to resume."
        )
        raise typer.Exit(130)


def _show_progress(bar: Progress, task: TaskID, now: "RunProgress") -> None:
    """Move the bar. The loss is read at most twice a second, because reading makes a GPU wait."""
    clock, fields = time.perf_counter(), bar.tasks[task].fields
    if clock - fields.get("read_at", 0) > 0.5 or now.step == now.num_steps:
        fields |= {"read_at": clock, "rate": f"{now.images_per_second:.0f} images/s, loss {now.loss:.4f}"}
    bar.update(task, completed=now.step, visible=True)


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
    num_images = train.total_steps * train.batch_size
    micro_batch = train.batch_size // train.accumulate
    console.print(
        f"images      {len(source)}, of which {num_noisy} are noisy; {num_images / len(source):.0f} epochs\n"
        f"network     {cost.num_parameters:,} parameters\n"
        f"steps       {train.total_steps} of {train.batch_size} images\n"
        f"memory      about {cost.step_bytes(micro_batch) / 2**20:.0f} MiB\n"
        f"folder      {run_dir}"
    )


@contextmanager
def stop_on_signal() -> Iterator[list[int]]:
    """Yield a list that SIGINT and SIGTERM append to, so that a loop can stop; a second SIGINT kills."""
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
