"""What the commands share: options of the same name for the same thing, and the console they print to."""

import inspect
import os
import re
import tempfile
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from assay.sample import SampleConfig

Device = Annotated[
    str, typer.Option(help="Where to compute: cpu, cuda, cuda:1, mps, or auto for GPUs if there are any.")
]
Devices = Annotated[
    str, typer.Option(metavar="N|auto", help="How many devices to use; auto for all GPUs of the machine.")
]
BatchSize = Annotated[
    int, typer.Option(min=1, help="Images computed at a time. Changes the speed, not the result.")
]

Tuned = Annotated[
    bool,
    typer.Option(
        "--tuned",
        help="Use the sampler that `assay tune` chose for this checkpoint, in place of the options below.",
    ),
]


def read_tuned(checkpoint: Path) -> "SampleConfig":
    """The sampler that was tuned for a checkpoint."""
    from assay.metrics.tune import load_tuned

    return load_tuned(checkpoint).sample


def output_option(help: str, *names: str, suffix: str = "", **settings: Any) -> Any:
    """An option that names a file or folder to write; what cannot be written is rejected before any work."""
    names = names or ("--output", "-o")
    return typer.Option(*names, help=help, callback=_check_output(names[0] + " ", suffix), **settings)


def output_argument(help: str, suffix: str = "") -> Any:
    """The same as an argument."""
    return typer.Argument(help=help, callback=_check_output("", suffix))


def _check_output(name: str, suffix: str) -> Callable[[Path | None], Path | None]:
    def check(path: Path | None) -> Path | None:
        if path is None:
            return None
        if suffix and path.suffix.lower() != suffix:
            raise ValueError(f"{name}{path}: give the file a name that ends in {suffix}")
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        try:
            with tempfile.TemporaryFile(dir=folder):
                return path
        except OSError as error:
            reason = (error.strerror or str(error)).lower() if folder.is_dir() else "it is not a folder"
            raise ValueError(f"{name}{path}: nothing can be written to {folder} ({reason})") from None

    return check


_LEVEL = "SIGMA|auto"
_SAMPLING: dict[str, tuple[str, Any, Any, str, str | None]] = {
    # field of SampleConfig: option, type, default, help, metavar
    "num_steps": ("--steps", int, 18, "Steps from noise to image.", None),
    "solver": (
        "--solver",
        str,
        "heun",
        "How to step: heun, multistep (half of heun's evaluations at the same number of steps) or euler.",
        "heun|multistep|euler",
    ),
    "truncate_at": (
        "--truncate",
        str,
        None,
        "Stop at this noise level and return the prediction; auto is the lowest level of the training data.",
        _LEVEL,
    ),
    "refine_at": (
        "--refine",
        str,
        None,
        "Put this noise level on the grid; auto is the highest level of the training data.",
        _LEVEL,
    ),
    "num_extra": ("--extra-steps", int, 0, "More steps below that level (by default auto).", None),
    "churn": ("--churn", float, 0.0, "Noise added back at each step (EDM's S_churn).", None),
    "churn_low": ("--churn-low", float, 0.0, "Lowest level at which noise is added back (S_min).", None),
    "churn_high": ("--churn-high", float, 1000.0, "Highest level at which noise is added back (S_max).", None),
    "churn_noise": ("--churn-noise", float, 1.0, "Scale of the noise added back (S_noise).", None),
    "guidance": ("--guidance", float, 1.0, "Push images away from a weaker model's: 1 is off, 2 strong.", None),
    "guide": (
        "--guide",
        Path,
        None,
        "The weaker model's checkpoint; default: this model without class.",
        None,
    ),
    "precision": (
        "--precision",
        str,
        "32",
        "32, 64 (steps in float64, as EDM) or bf16 (the network in bfloat16).",
        "32|64|bf16",
    ),
    "sigma_min": ("--sigma-min", float, 0.002, "Lowest level of the grid.", None),
    "sigma_max": ("--sigma-max", float, 80.0, "Level at which sampling starts.", None),
    "rho": ("--rho", float, 7.0, "Spacing of the grid: higher puts more steps at low levels.", None),
}


def takes_sampling(*only: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of `SampleConfig`, or `only` some; it gets them as its argument `sample`."""
    fields = only or tuple(_SAMPLING)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        options = []
        for field in fields:
            option, kind, default, text, metavar = _SAMPLING[field]
            setting = typer.Option(option, help=text, metavar=metavar, rich_help_panel="Sampling")
            kind = Annotated[kind | None, setting]
            options.append(
                inspect.Parameter(field, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            )

        @wraps(command)
        def wrapped(**values: Any) -> None:
            command(sample=sample_config({field: values.pop(field) for field in fields}), **values)

        signature = inspect.signature(command)
        own = [parameter for parameter in signature.parameters.values() if parameter.name != "sample"]
        wrapped.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
        del wrapped.__wrapped__  # typer reads the hints of the wrapper, not of the command
        wrapped.__annotations__ = {p.name: p.annotation for p in [*own, *options]} | {"return": None}
        return wrapped

    return decorate


def sample_config(given: dict[str, Any]) -> "SampleConfig":
    """The settings of these options; a level is a number or "auto"."""
    from assay.sample import SampleConfig

    if given.get("num_extra") and given["refine_at"] is None:
        given["refine_at"] = "auto"
    for field in ("truncate_at", "refine_at"):
        if given.get(field, "auto") not in (None, "auto"):
            try:
                given[field] = float(given[field])
            except ValueError:
                raise ValueError(
                    f"{field} = {given[field]}: expected a noise level such as 0.2, or auto"
                ) from None
    return SampleConfig(**given)


def parse_devices(text: str) -> int | Literal["auto"]:
    """`2` -> 2; `auto` stays."""
    if text == "auto":
        return "auto"
    if not text.isdecimal():
        raise ValueError(f"devices = {text}: expected a number such as 2, or auto")
    return int(text)


def parse_pair(text: str | None, name: str) -> tuple[float, float] | None:
    """`0,4095` -> (0.0, 4095.0)."""
    if text is None:
        return None
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{name} = {text}: expected two numbers with a comma, e.g. 0,4095 or -1,1") from None
    if not low < high:
        raise ValueError(f"{name} = {text}: the first number must be below the second")
    return low, high


def with_options(text: str, command: Any) -> str:
    """Arguments as the command's options: `num_images = 0` -> `--num-images 0`, "`seeds`" -> "--seeds"."""
    for parameter in command.params:
        option = max(parameter.opts, key=len)
        if option.startswith("--"):
            text = re.sub(rf"(?<![\w.`]){parameter.name} = ", f"{option} ", text)
            text = text.replace(f"`{parameter.name}`", option)
    return text


def open_console(**settings: Any) -> Console:
    """Standard output; silent in all but the first process of a job on several devices."""
    rank = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))
    return Console(quiet=rank != "0", highlight=False, soft_wrap=True, **settings)


def open_progress(console: Console | None = None, *more: Any) -> Progress:
    """A bar with a count and the time left, on standard error by default."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, *more, console=console or Console(stderr=True))


def count(bar: Progress, name: str, total: int) -> Callable[[int], None]:
    """A callback for images done since the last call; the line appears with the first call."""
    done, show = 0, advance(bar, name)

    def add(num_images: int) -> None:
        nonlocal done
        done += num_images
        show(done, total)

    return add


def advance(bar: Progress, name: str) -> Callable[[int, int], None]:
    """A callback (done, total) that moves a line of the bar; the line appears with the first call."""
    tasks: list[Any] = []

    def update(done: int, total: int) -> None:
        tasks.extend([] if tasks else [bar.add_task(name, total=total)])
        bar.update(tasks[0], completed=done, total=total)

    return update
