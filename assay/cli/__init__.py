"""The `assay` command: each subcommand is one call of the library, plus printing and progress.

Heavy modules (torch and all that needs it) are imported inside the commands, so that `assay --help`
answers at once. The library raises and warns in the names of its arguments; `ExplainingGroup` turns these
into the command's options and prints one sentence. Bugs keep their traceback.
"""

import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

import assay
from assay.cli import checkpoint, data, evaluate, generate, mixture, net, outcome, price, study, train
from assay.cli.options import with_options


class ExplainingGroup(TyperGroup):
    """Prints errors that a user can fix, and warnings of the library, as sentences; such errors exit with 1."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Bad values, files, missing extras and divergence are explained on stderr."""
        command: Any = self
        first = getattr(ctx, "_protected_args", None) or getattr(
            ctx, "protected_args", []
        )  # by click's version
        for word in [*first, *ctx.args]:
            if word not in getattr(command, "commands", {}):
                break
            command = command.commands[word]
        show_others = warnings.showwarning

        def show(
            message: Warning | str, category: type[Warning], filename: str, *rest: Any, **more: Any
        ) -> None:
            if Path(filename).is_relative_to(Path(assay.__file__).parent):
                _print("warning:", with_options(str(message), command), "yellow")
            else:
                show_others(message, category, filename, *rest, **more)

        with warnings.catch_warnings():
            warnings.showwarning = show
            try:
                return super().invoke(ctx)
            except BrokenPipeError:  # of `assay ... | head`, which typer handles
                raise
            except (ValueError, OSError, ImportError, FloatingPointError) as error:
                _print("error:", with_options(_explain(error), command), "red")
                raise typer.Exit(1) from error


def _print(kind: str, text: str, style: str) -> None:
    # soft_wrap: a path in a message must survive copy and paste.
    Console(stderr=True).print(kind, text, style=style, markup=False, soft_wrap=True, highlight=False)


def _explain(error: Exception) -> str:
    """The error as one sentence; the system's own words and pydantic's lists are rephrased."""
    if hasattr(error, "errors"):  # pydantic's, which need not be imported for that
        faults = error.errors()
        return "; ".join(
            fault["msg"].removeprefix("Value error, ")
            if not fault["loc"]
            else f"{fault['loc'][-1]} = {fault['input']}: {fault['msg'][:1].lower()}{fault['msg'][1:]}"
            for fault in faults
        )
    if isinstance(error, OSError) and error.filename is not None:
        match error:
            case FileNotFoundError():
                return f"{error.filename} does not exist: check the path"
            case IsADirectoryError():
                return f"{error.filename} is a folder, but a file is needed: check the path"
            case NotADirectoryError():
                return f"{error.filename} is a file, but a folder is needed: check the path"
            case _:
                return f"{error.filename}: {(error.strerror or str(error)).lower()}"
    return str(error)


app = typer.Typer(
    name="assay",
    cls=ExplainingGroup,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_show_locals=False,
)


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
    """Train diffusion models on imperfect images, and find out what each image is worth."""


app.add_typer(data.app, name="data")
app.add_typer(study.app, name="study")
app.command("demo")(study.demo)
app.command("train")(train.train)
app.command("sample")(generate.sample)
app.command("denoise")(generate.denoise)
app.command("restore")(generate.restore)
app.add_typer(net.app, name="net")
app.command("import")(checkpoint.import_)
app.command("export")(checkpoint.export)
app.command("push")(checkpoint.push)
app.command("pull")(checkpoint.pull)
app.command("average")(checkpoint.average)
for command in (evaluate.evaluate, evaluate.reference, evaluate.tune, outcome.compare, outcome.gather):
    app.command()(command)
app.command("price")(price.price)
app.command("plan")(price.plan)
app.add_typer(mixture.app, name="mixture")


def main() -> None:
    """Entry point of the `assay` script."""
    app()
