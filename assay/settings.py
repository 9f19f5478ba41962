"""Settings: a default, a description and a constraint written once, in the field of a pydantic model.

TOML files, Python, `--set`, `--help` and the site read the same field. A tree of plain values becomes a model
through `checked`, whose errors name every key that is wrong and, if it is misspelt, the nearest valid one.
"""

import difflib
import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from assay.errors import AssayError, fault_to_error
from assay.files import read_text

Level = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]  # of noise; images are in [-1, 1]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class Strict(BaseModel):
    """A section of settings: frozen, no unknown keys, no silent conversions."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        """What differs from the defaults."""
        fields = type(self).model_fields
        return [(name, value) for name, value in super().__repr_args__() if value != fields[str(name)].default]

    def __dir__(self) -> list[str]:
        """The settings and what is computed from them; pydantic's own names would hide them."""
        return sorted(set(super().__dir__()) - set(dir(BaseModel)) | {"model_copy", "model_dump"})


Model = TypeVar("Model", bound=BaseModel)


def checked(model: type[Model], tree: Mapping[str, Any], path: Path | str | None = None) -> Model:
    """`tree` as a `model`; an error lists every fault, and its key is that of the first."""
    try:
        # As JSON, where strict types still take a list for a tuple and a string for a path.
        return model.model_validate_json(json.dumps(tree, default=str))
    except ValidationError as error:
        raise faults_to_error(error, model, path=path) from None


def faults_to_error(
    error: ValidationError, model: type[BaseModel], section: str = "", path: Path | str | None = None
) -> AssayError:
    """Pydantic's errors about `model` as one, with keys below `section`: the first, and the others after it."""
    found: dict[str | None, AssayError] = {}
    for fault in sorted(error.errors(), key=lambda fault: fault["type"] != "extra_forbidden"):  # slips first
        names, where = _place(fault["loc"], model)
        if unknown := fault["type"] == "extra_forbidden":
            names.append(str(fault["loc"][-1]))
        key = ".".join(name for name in (section, *names) if name) or None
        one = fault_to_error(fault, key)
        if "." not in (one.key or ""):  # of a section it names the setting itself
            one.key = key
        if unknown:
            near = difflib.get_close_matches(names[-1], where.model_fields, n=1)
            cure = f"did you mean {near[0]}?" if near else f"known are {', '.join(where.model_fields)}"
            one = AssayError("is not a setting", key=key, cure=cure)
        found.setdefault(one.key, one)  # of a value that may be of several types the first is told
    first, *others = found.values()
    what = "; ".join([first.what, *(f"{one.key}: {one.what}" for one in others)])
    return AssayError(what, path=path, key=first.key, cure=first.cure)


def _place(loc: Sequence[str | int], model: type[BaseModel]) -> tuple[list[str], type[BaseModel]]:
    """The settings and places of lists along a location, and the innermost section there."""
    names = []
    for part in loc:
        if isinstance(part, int):
            names.append(str(part))
        elif part in model.model_fields:  # else pydantic's word for one type of a union
            names.append(part)
            annotation = model.model_fields[part].annotation
            inner = [annotation, *get_args(annotation)]  # a section, or a tuple of sections
            sections = [kind for kind in inner if isinstance(kind, type) and issubclass(kind, BaseModel)]
            model = sections[0] if sections else model
    return names, model


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as a tree; a mistake in it is reported with file and line."""
    try:
        return tomllib.loads(read_text(path, "give a TOML file").removeprefix("\ufeff"))
    except tomllib.TOMLDecodeError as error:
        raise AssayError(f"is not valid TOML: {error}", path=path, cure="correct it there") from None


def override(tree: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Apply settings like train.lr=3e-4; values are TOML, or strings if they are not."""
    for setting in settings:
        key, equals, text = setting.partition("=")
        *sections, last = key.strip().split(".")
        if not equals or not last:
            raise AssayError(f"{setting!r} is not KEY=VALUE", key="settings", cure="write e.g. train.lr=3e-4")
        branch: Any = tree
        for section in sections:
            if isinstance(branch, list) and section.isdigit() and int(section) < len(branch):
                branch = branch[int(section)]  # extra.0 is the first [[extra]]
            elif isinstance(branch, dict):
                branch = branch.setdefault(section, {})
            else:
                branch = None
        if not isinstance(branch, dict):
            raise AssayError(f"{setting!r}: {key.strip().rpartition('.')[0]} is not a section", key="settings")
        try:
            branch[last] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            branch[last] = text
    return tree
