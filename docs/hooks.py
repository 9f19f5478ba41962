"""Pages of the site that are made from the code and from notebooks, and equations as MathML.

`mkdocs` calls `on_files` to add these pages and `on_page_markdown` to render equations: `$...$` and `$$...$$`
become MathML, which browsers draw without any script.
"""

import inspect
import json
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import griffe
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

GENERATED = {"reference/commands.md": "commands_page", "reference/settings.md": "settings_page"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made from the code."""
    for path, maker in GENERATED.items():
        files.append(File.generated(config, path, content=globals()[maker]()))
    for notebook in sorted(Path(config.docs_dir, "notebooks").glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{notebook.stem}.md", content=notebook_page(notebook)))
    return files


def notebook_page(path: Path) -> str:
    """A notebook with the outputs that are stored in it; the file itself can be downloaded."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "image/png" in data:
                encoded = "".join(data["image/png"]).replace("\n", "")
                parts.append(f'<img alt="Output of the cell above" src="data:image/png;base64,{encoded}">')
            else:
                text = "".join(data["text/plain"])
                parts.append(f"```text\n{text}\n```")
    parts.append(f"[Download this notebook]({path.name})")
    return "\n\n".join(parts)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace equations outside of code by MathML."""
    parts = re.split(r"(```.*?```|`[^`\n]*`)", markdown, flags=re.DOTALL)
    return "".join(part if part.startswith("`") else _equations(part) for part in parts)


def _equations(text: str) -> str:
    def block(found: re.Match[str]) -> str:
        return f'<div class="equation">{convert(found[1].strip(), display="block")}</div>'

    # In a span, because Markdown takes a line that starts with <math> for a paragraph of its own.
    text = re.sub(r"\$\$(.+?)\$\$", block, text, flags=re.DOTALL)
    return re.sub(r"\$([^$\n]+)\$", lambda found: f"<span>{convert(found[1])}</span>", text)


class Examples(griffe.Extension):
    """Shows the examples in docstrings as code; Markdown takes `>>>` for a quotation."""

    def on_instance(self, *, obj: griffe.Object, **unused: Any) -> None:
        """Put fences around every example."""
        if obj.docstring:
            blocks = re.sub(r"(?m)^ *>>> .*(?:\n(?! *$).*)*", _fenced, obj.docstring.value)
            obj.docstring.value = blocks


def _fenced(found: re.Match[str]) -> str:
    return f"```pycon\n{inspect.cleandoc(found[0])}\n```"


def walk(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Every command that can be run, with its full name; untyped, since typer may bring a click of its own."""
    if not hasattr(command, "commands"):
        yield name, command
        return
    for key, child in command.commands.items():
        yield from walk(child, f"{name} {key}")


def commands() -> list[tuple[str, Any]]:
    """Every command of Assay with its full name."""
    from assay.cli import COMMANDS, load_command

    return [found for name in COMMANDS for found in walk(load_command(name), f"assay {name}")]


def commands_page() -> str:
    """Every command with its arguments and options."""
    lines = ["# Commands", "", "Generated from the program itself; `assay COMMAND --help` prints the same.", ""]
    for name, command in commands():
        lines += [f"## {name}", "", _prose(command.help or ""), ""]
        shown = [parameter for parameter in command.params if parameter.name != "help"]
        if shown:
            lines += ["| argument | meaning | default |", "|---|---|---|"]
            lines += [
                f"| {_usage(each)} | {_cell(parameter_help(each))} | {_default(each)} |" for each in shown
            ]
        lines.append("")
    return "\n".join(lines)


def parameter_help(parameter: Any) -> str:
    """The sentence that explains an argument or option; empty if nobody wrote one."""
    return getattr(parameter, "help", None) or ""


def _usage(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{(parameter.metavar or parameter.name or '').upper()}`"
    names = ", ".join([*parameter.opts, *parameter.secondary_opts])
    return f"`{names}`"


def _default(parameter: Any) -> str:
    value = parameter.default
    if value is None or value == () or callable(value) or value is False or value == "":
        return ""
    return f"`{str(value).replace(str(Path.home()), '~')}`"


def settings_models() -> dict[str, tuple[str, list[tuple[str, type[BaseModel]]]]]:
    """The TOML files, and for each the models of its sections by the section's name."""
    from assay.nets import NetConfig
    from assay.registry import registered
    from assay.study.spec import Study
    from assay.train.config import RunConfig

    # "passed" is a module given in Python, which no file can name. Other packages document their own networks.
    networks = [
        (f'net, kind = "{kind}"', found)
        for kind, found in registered(NetConfig).items()
        if kind != "passed" and found.__module__.startswith("assay.")
    ]
    return {
        "A run": (
            "The file that `assay train` takes, and the keys of `--set`.",
            [*sections(RunConfig), *networks],
        ),
        "A study": ("The file that `assay study` takes.", sections(Study)),
    }


def sections(model: type[BaseModel], name: str = "") -> list[tuple[str, type[BaseModel]]]:
    """A model and the models inside it, each with the name of its section."""
    found = [(name, model)]
    for key, field in model.model_fields.items():
        inner = _model_in(field.annotation)
        if inner is not None:
            found += sections(inner, f"{name}.{key}" if name else key)
    return found


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _model_in(part))), None)


def settings_page() -> str:
    """Every key of every TOML file; a section that stands in several places is listed once."""
    lines = ["# Settings", "", "Generated from the models that check the files.", ""]
    listed: dict[type[BaseModel], str] = {}
    for title, (about, parts) in settings_models().items():
        lines += [f"## {title}", "", about, ""]
        for name, model in parts:
            lines += [f"### [{name}]", ""] if name else []
            if model in listed:
                lines += [f"The keys of `[{listed[model]}]` above.", ""]
                continue
            listed[model] = name
            lines += [
                _prose(model.__doc__ or ""),
                "",
                "| key | meaning | type | default |",
                "|---|---|---|---|",
            ]
            lines += [_settings_row(key, field) for key, field in model.model_fields.items()]
            lines.append("")
    return "\n".join(lines)


def _settings_row(key: str, field: FieldInfo) -> str:
    cells = (f"`{key}`", _cell(field.description or ""), _cell(_type(field.annotation)), _default_of(field))
    return f"| {' | '.join(cells)} |"


def _default_of(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "" if field.default_factory is not None else "required"
    if isinstance(field.default, BaseModel):
        return "see its section"
    return f"`{field.default!r}`" if field.default is not None else ""


def _type(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(_type(part) for part in get_args(annotation) if part is not type(None))
    if origin is Literal:
        return ", ".join(f"`{value!r}`" for value in get_args(annotation))
    if origin is tuple:
        return "list of " + _type(get_args(annotation)[0])
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    names = {"int": "whole number", "float": "number", "str": "text", "bool": "true or false", "Path": "path"}
    name = getattr(annotation, "__name__", str(annotation))
    return names.get(name, name)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _prose(text: str) -> str:
    """A docstring as Markdown: indented blocks stay code."""
    return inspect.cleandoc(text)
