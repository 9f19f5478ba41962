"""What the commands share: options of the same name for the same thing, and the console they print to."""

import inspect
import os
import tempfile
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from rich.console import Console

from assay.errors import AssayError
from assay.files import check_absent
from assay.settings import DEVICE, explaining

Config = TypeVar("Config", bound=BaseModel)

Device = Annotated[str, typer.Option(help=DEVICE)]


def output_option(help: str, *names: str, suffix: str = "", **settings: Any) -> Any:
    """An option that names a file or folder to write; a file that exists is rejected before any work."""
    names = names or ("--output", "-o")
    return typer.Option(*names, help=help, callback=_check_output(names[0], suffix), **settings)


def output_argument(help: str) -> Any:
    """The same as an argument."""
    return typer.Argument(help=help, callback=_check_output(None, ""))


def _check_output(option: str | None, suffix: str) -> Callable[[Path | None], Path | None]:
    def check(path: Path | None) -> Path | None:
        if path is None:
            return None
        if suffix and path.suffix.lower() != suffix:
            raise AssayError(f"does not end in {suffix}", path=path, key=option, cure="choose another name")
        if path.is_file():
            check_absent(path)
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        try:
            with tempfile.TemporaryFile(dir=folder):
                return path
        except OSError as error:
            reason = (error.strerror or str(error)).lower() if folder.is_dir() else "it is not a folder"
            what = f"nothing can be written to {folder} ({reason})"
            raise AssayError(what, path=path, key=option, cure="choose another place") from None

    return check


def takes(
    argument: str, model: "type[BaseModel]", *only: str, panel: str = "Settings"
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each field of a config, or `only` some; it gets the config as `argument`.

    Names, defaults, descriptions and constraints are those of the fields: `num_steps` is `--num-steps`.
    """
    fields = {name: info for name, info in model.model_fields.items() if not only or name in only}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def wrapped(**values: Any) -> None:
            given = {name: text for name in fields if (text := values.pop(name)) is not None}
            command(**{argument: config_from(model, given)}, **values)

        signature = inspect.signature(command)
        own = [parameter for parameter in signature.parameters.values() if parameter.name != argument]
        options = [_option(name, info, panel) for name, info in fields.items()]
        wrapped.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
        del wrapped.__wrapped__  # typer reads the hints of the wrapper, not of the command
        wrapped.__annotations__ = {p.name: p.annotation for p in [*own, *options]} | {"return": None}
        return wrapped

    return decorate


def config_from(model: "type[Config]", given: dict[str, Any]) -> "Config":
    """A config from the words of a command line: `{"num_steps": "18"}`."""
    try:
        with explaining(model):
            return model.model_validate_strings({name: str(text) for name, text in given.items()}, strict=False)
    except AssayError as error:
        parts = (error.key or "").split(".")  # the option, not its section nor a part of its value
        error.key = next((part for part in parts if part in model.model_fields), error.key)
        raise


def _option(name: str, info: FieldInfo, panel: str) -> inspect.Parameter:
    default = info.get_default(call_default_factory=True)
    shown = "" if default is None or isinstance(default, bool) else f" [default: {default}]"
    word = name.replace("_", "-")
    kind, flag = (bool | None, f"/--no-{word}") if info.annotation is bool else (str | None, "")
    setting = typer.Option(
        f"--{word}{flag}",
        help=f"{info.description or ''}{shown}",
        metavar=None if flag else "|".join(map(str, info.examples or [])) or _metavar(info.annotation),
        rich_help_panel=panel,
        show_default=False,
    )
    only = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, only, default=None, annotation=Annotated[kind, setting])


def _metavar(kind: Any) -> str:
    """What a value looks like: choices by their names, else the type."""
    inner = get_args(kind)
    if get_origin(kind) is Literal:
        return "|".join(map(str, inner))
    if get_origin(kind) is Annotated:
        return _metavar(inner[0])
    parts = [_metavar(part) for part in inner if part not in (type(None), ...)]
    if get_origin(kind) is tuple:
        return ",".join(parts)
    return "|".join(dict.fromkeys(parts)) or kind.__name__.upper()


def open_console(**settings: Any) -> Console:
    """Standard output; silent in all but the first process of a job on several devices."""
    rank = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))
    return Console(quiet=rank != "0", highlight=False, soft_wrap=True, **settings)
