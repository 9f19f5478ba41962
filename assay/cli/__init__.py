"""The `assay` command: each subcommand is one call of the library, plus printing and progress.

A command's module, and torch with it, is imported when the command is run, so that `assay --help` answers at
once. The library raises `AssayError` and warns; here these become sentences. Bugs keep their traceback.
"""

import re
import warnings
from importlib import import_module
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

import assay
from assay.errors import AssayError, AssayWarning

# The commands as people look for them: where each lives, and its line in `assay --help`.
COMMANDS = {
    "demo": ("study:demo", "Run a small study from start to end: what is a noisy image worth?"),
    "data": ("data:app", "Make stores of images, look at them, measure their noise."),
    "train": ("train:train", "Train a denoiser on clean and noisy images."),
    "sample": ("generate:sample", "Generate images."),
    "denoise": ("generate:denoise", "Remove the noise from a store's images, or restore them to train on."),
    "evaluate": ("evaluate:app", "Measure a model: held-out loss, FD and its relatives; compare results."),
    "price": ("price:price", "Find how many noisy images replace a clean one."),
    "plan": ("price:plan", "Find which images to buy for a budget."),
    "study": ("study:app", "Run grids of trainings that decide a price."),
    "model": ("model:app", "Weights from and for other code; their sampler; networks."),
    "mixture": ("mixture:app", "Learn mixtures from samples with unequal noise: the theory."),
}


class _Lazy(TyperCommand):
    """A command that is imported when it is run; until then it has its name and its line of help."""

    def __init__(self, name: str) -> None:
        super().__init__(name, help=COMMANDS[name][1], add_help_option=False)

    def make_context(self, *arguments: Any, **more: Any) -> Any:
        """The context of the command itself."""
        return load_command(str(self.name)).make_context(*arguments, **more)


class AssayGroup(TyperGroup):
    """Prints errors that a user can correct, and warnings, as sentences; such errors exit with 1."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of all commands, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, name: str) -> Any:
        """A command by its name."""
        return _Lazy(name) if name in COMMANDS else None

    def invoke(self, ctx: Any) -> Any:
        """Run the command; errors of ours, bad values and files are explained on standard error."""
        words = [*getattr(ctx, "_protected_args", []), *ctx.args]
        show_others = warnings.showwarning

        def show(message: Any, category: type[Warning], filename: str, *rest: Any, **more: Any) -> None:
            if issubclass(category, AssayWarning):
                _print("warning:", str(message), "yellow")
            else:
                show_others(message, category, filename, *rest, **more)

        with warnings.catch_warnings():
            warnings.showwarning = show
            try:
                return super().invoke(ctx)
            except BrokenPipeError:  # of `assay ... | head`, which typer handles
                raise
            except (ValueError, OSError) as error:
                _print("error:", _rendered(error, _leaf(words)), "red")
                raise typer.Exit(1) from error


def load_command(name: str) -> Any:
    """A command, imported."""
    module, attribute = COMMANDS[name][0].split(":")
    found = getattr(import_module(f"assay.cli.{module}"), attribute)
    if not isinstance(found, typer.Typer):
        command, found = found, typer.Typer(**_LOOK)
        found.command(name)(command)
    return typer.main.get_command(found)


def _print(kind: str, text: str, style: str) -> None:
    # soft_wrap: a path in a message must survive copy and paste.
    Console(stderr=True).print(kind, text, style=style, markup=False, soft_wrap=True, highlight=False)


def _leaf(words: list[str]) -> Any:
    """The command that these words call."""
    command = load_command(words[0])
    for word in words[1:]:
        commands = getattr(command, "commands", {})
        word = word if word in commands else getattr(command, "default", "")
        if word not in commands:
            break
        command = commands[word]
    return command


def _rendered(error: Exception, command: Any) -> str:
    """An error as one sentence, in the names of the command's options."""
    if isinstance(error, OSError) and error.filename is not None:
        path, known = error.filename, _ABOUT_PATHS.get(type(error))
        what = known or (error.strerror or str(error)).lower()
        return str(AssayError(what, path=path, cure="check the path" if known else None))
    if isinstance(error, AssayError):
        options = {parameter.name: max(parameter.opts, key=len) for parameter in command.params}
        error.key = options.get(error.key, error.key)
        if error.what == "exists already" and "overwrite" in options:
            error.cure = f"{error.cure}, or give --overwrite"
        for name, option in options.items():  # `fit = crop` is `--fit crop`, and `skip_bad = true` `--skip-bad`
            error.cure = error.cure and re.sub(rf"(?<![\w.]){name} =( true\b)?", option, error.cure)
    return str(error)


_ABOUT_PATHS: dict[type[OSError], str] = {
    FileNotFoundError: "does not exist",
    IsADirectoryError: "is a folder, but a file is needed",
    NotADirectoryError: "is a file, but a folder is needed",
}
_LOOK: dict[str, Any] = dict(rich_markup_mode="markdown", pretty_exceptions_show_locals=False)
_LOOK |= dict(context_settings={"help_option_names": ["-h", "--help"]}, add_completion=False)
app = typer.Typer(name="assay", cls=AssayGroup, no_args_is_help=True, **_LOOK | {"add_completion": True})


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"assay {assay.__version__}")
        raise typer.Exit


@app.callback()
def assay_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Train diffusion models on clean and noisy images; find how many noisy ones replace a clean one.

    Exit codes: 0 done; 1 an error, or failed trainings of a study; 2 wrong arguments; 130 stopped (Ctrl-C).
    """


def main() -> None:
    """Entry point of the `assay` script."""
    app()
