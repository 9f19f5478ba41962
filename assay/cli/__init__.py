"""The `assay` command: each subcommand is one call of the library, plus printing and progress.

Heavy modules (torch and all that needs it) are imported inside the commands, so that `assay --help`
answers at once. Commands raise as the library does; `ExplainingGroup` turns what a user can mend
into one sentence and leaves bugs their traceback.
"""

from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

import assay
from assay.cli import checkpoint, data, evaluate, mixture, net, price, study, train


class ExplainingGroup(TyperGroup):
    """Prints errors that a user can mend as a sentence, without a traceback, and exits with 1."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; bad values, file trouble, missing extras and divergence are explained on stderr."""
        try:
            return super().invoke(ctx)
        except (ValueError, OSError, ImportError, FloatingPointError) as error:
            text = str(error)
            if isinstance(error, FileNotFoundError) and error.filename is not None:  # the system's own words
                text = f"{error.filename} does not exist: check the path"
            # soft_wrap: a path in a message must survive copy and paste.
            Console(stderr=True).print("error:", text, style="red", markup=False, soft_wrap=True)
            raise typer.Exit(1) from error


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
    """Trains diffusion models on imperfect images and says what each image is worth."""


app.add_typer(data.app, name="data")
app.add_typer(study.app, name="study")
app.command("train")(train.train)
app.command("sample")(train.sample)
app.add_typer(net.app, name="net")
app.command("import")(checkpoint.import_)
app.command("export")(checkpoint.export)
for command in (evaluate.evaluate, evaluate.compare, evaluate.reference):
    app.command()(command)
app.command("price")(price.price)
app.command("plan")(price.plan)
app.add_typer(mixture.app, name="mixture")


def main() -> None:
    """Entry point of the `assay` script."""
    app()
