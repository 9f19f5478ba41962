"""`assay train`: learn from images of any quality."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import Field

from assay.cli.options import open_console, output_option, takes
from assay.data.config import DataConfig
from assay.devices import NumDevices, count_devices
from assay.errors import AssayError
from assay.processes import stop_on_signal
from assay.progress import duration, open_progress
from assay.settings import DEVICE, DEVICES, Strict, override, read_toml
from assay.train.config import TrainConfig

if TYPE_CHECKING:
    from assay.data import ImageSource
    from assay.train import Progress, RunConfig
    from assay.train.run import TrainResult


class Launch(Strict):
    """How a training is started; none of it changes what is learnt, but for `preset` and `minutes`."""

    preset: str | None = Field(None, description="Settings to start from; `list` shows them. Default: by size.")
    minutes: float | None = Field(
        None, ge=0.01, description="Train for about this long on this machine, if it is idle."
    )
    dry_run: bool = Field(False, description="Show what the settings cost and how long they take.")
    device: str = Field("auto", description=DEVICE)
    devices: NumDevices = Field(1, description=DEVICES, examples=["N", "auto"])
    num_nodes: int = Field(1, ge=1, description="Number of machines, when started by torchrun.")


class _Images(DataConfig):
    """The settings of `[data]`, of which the command's argument may be the first."""

    store: Path = Field(Path(), description="A store.")


# Sections and lists are changed by --set.
_OTHER = {"augment", "consistency", "betas", "store", "classes", "levels"}
_TRAIN = [name for name in TrainConfig.model_fields if name not in _OTHER]
_DATA = [name for name in DataConfig.model_fields if name not in _OTHER | {"seed"}]


@takes("training", TrainConfig, *_TRAIN, panel="Training (a preset comes before these defaults)")
@takes("images", _Images, *_DATA, panel="Images")
@takes("launch", Launch, panel="Options")
def train(
    what: Annotated[
        Path | None,
        typer.Argument(help="The images: a store, or digits, fashion-mnist, cifar10. Or a TOML file with all."),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any: net.num_blocks=2. Repeat.")
    ] = None,
    output: Annotated[Path | None, output_option("Folder of the run. Default: runs/HASH.")] = None,
    *,
    launch: Launch,
    images: _Images,
    training: TrainConfig,
) -> None:
    """Train a denoiser on clean and noisy images. Repeat the command to resume.

    Unless a TOML file says all, a preset for images of this size sets network and training; --dry-run names it.

    Example: `assay train digits --clean-fraction 0.1 --sigma 0.5 --minutes 2 -o runs/mix`

    All noisy and 500 clean images of a store: `assay train stores/scans --clean 500`
    """
    from assay.train.run import pairing_note

    console = open_console()
    if launch.preset == "list":
        from assay.train.presets import PRESETS

        for name, chosen in PRESETS.items():
            console.print(f"[bold]{name:12}[/] {chosen.about} (source: {chosen.origin})")
        return
    config, source, run_dir, preset = _opened(
        _tree(what, settings or [], images, training), what, launch, output
    )
    if launch.dry_run:
        _describe(config, source, run_dir, launch.device, preset)
        return
    if note := pairing_note(config, source):
        console.print(f"note: {note}", style="yellow")
    result = _run(config, source, run_dir, launch, not console.quiet)
    if not result.finished:
        total = config.train.total_steps
        console.print(f"Stopped and saved at step {result.step} of {total}. Repeat the command to resume.")
        raise typer.Exit(130)
    console.print(f"Finished. The checkpoint is {result.checkpoint}")


def _run(
    config: "RunConfig", source: "ImageSource", run_dir: Path, launch: Launch, visible: bool
) -> "TrainResult":
    """Train on the devices that were asked for, with progress, until the end or a signal."""
    from assay.train import train as run_training
    from assay.train.ranks import train_on_ranks

    with open_progress(visible) as tell, stop_on_signal() as stopped:
        shown_at = 0.0

        def show(now: "Progress") -> None:
            nonlocal shown_at
            if time.perf_counter() - shown_at > 0.5 or now.step == now.num_steps:  # reading makes a GPU wait
                shown_at = time.perf_counter()
                note = f"{now.images_per_second:.0f} images/s, loss {now.loss:.4f}"
                tell(str(run_dir), now.step, now.num_steps, note)

        how: Any = {"device": launch.device, "on_progress": show, "should_stop": lambda: bool(stopped)}
        num_devices = count_devices(launch.device, launch.devices)
        if num_devices > 1 and launch.num_nodes == 1 and "WORLD_SIZE" not in os.environ:  # which torchrun sets
            return train_on_ranks(num_devices, config, run_dir, config.data, **how)
        return run_training(config, run_dir, source, devices=launch.devices, num_nodes=launch.num_nodes, **how)


def _tree(what: Path | None, settings: list[str], images: _Images, training: TrainConfig) -> dict[str, Any]:
    """All settings that were given: those of the file, changed by those of the command line."""
    own = {"data": images, "train": training}
    given = {name: part.model_dump(mode="json", exclude_unset=True) for name, part in own.items()}
    tree = {}
    if what is not None and what.suffix == ".toml":
        tree = read_toml(what)
    elif what is not None:
        given["data"]["store"] = str(what)
    return override(tree | {name: {**tree.get(name, {}), **part} for name, part in given.items()}, settings)


def _opened(
    tree: dict[str, Any], what: Path | None, launch: Launch, output: Path | None
) -> tuple["RunConfig", "ImageSource", Path, str]:
    """The run's config, images, folder and preset. A file alone says all; else one for these images helps."""
    from assay.cost import choose_config
    from assay.train import read_config
    from assay.train.presets import suited_preset

    preset, minutes = launch.preset, launch.minutes
    if minutes is not None and (launch.devices, launch.num_nodes) != (1, 1):  # ranks would measure other times
        raise AssayError("the time is measured on one device", key="minutes", cure="give --num-steps")
    if not tree["data"].get("store"):
        cure = "name a store made by `assay data pack`, or digits, fashion-mnist, cifar10"
        raise AssayError("there are no images to train on", key="data.store", cure=cure)
    source = read_config({"data": tree["data"]}, what).data.prepared().open()
    if what is not None and what.suffix == ".toml" and preset is None and minutes is None:
        config, preset = read_config(tree, what), f"none, as {what} says all"
    else:
        preset = preset or suited_preset(source.image_shape)
        config = choose_config(tree, source, preset, device=launch.device)
    name = config.fingerprint(source) + (f"-{minutes:g}min" if minutes else "")
    run_dir = output or Path("runs") / name
    if minutes is not None:
        config = choose_config(tree, source, preset, minutes, run_dir, launch.device)
    return config, source, run_dir, preset


def _describe(config: "RunConfig", source: "ImageSource", run_dir: Path, device: str, preset: str) -> None:
    from assay.cost import training_seconds
    from assay.nets import measure_cost
    from assay.train.run import check_run, pairing_note

    check_run(config, source)
    cost = measure_cost(config.net_config(source))
    train, num_noisy, console = config.train, int((source.sigma_tn > 0).sum()), open_console()
    num_images, at_once = train.total_steps * train.batch_size, train.max_per_device or train.batch_size
    console.print(
        f"images      {len(source)}, of which {num_noisy} are noisy; {num_images / len(source):.0f} epochs\n"
        f"preset      {preset}\n"
        f"network     {cost.num_parameters:,} parameters\n"
        f"steps       {train.total_steps} of {train.batch_size} images\n"
        f"memory      about {cost.step_bytes(min(at_once, train.batch_size)) / 2**20:.0f} MiB\n"
        f"time        about {duration(training_seconds(config, source, device))} on one device here\n"
        f"folder      {run_dir}"
    )
    if note := pairing_note(config, source):
        console.print(f"note: {note}", style="yellow")
