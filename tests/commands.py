"""Running commands in tests: what they print, or the error that they would render."""

from typer.testing import CliRunner

from assay.cli import app, load_command
from assay.errors import AssayError


def run(*arguments: object) -> str:
    """What a command prints; it must succeed."""
    done = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "300"})
    assert done.exit_code == 0, done.output
    return done.output


def failing(*arguments: object) -> AssayError:
    """The error, with its fields, that a command ends in; anything else than an error of ours is a failure."""
    name, *words = map(str, arguments)
    try:
        load_command(name).main(words, standalone_mode=False)
    except AssayError as error:
        return error
    raise AssertionError(f"{arguments} did not fail")
