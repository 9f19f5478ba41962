"""Settings: a default, a description and a constraint written once, in the field of a pydantic model.

TOML files, Python, `--set`, `--help` and the site read the same field. A tree of plain values becomes a model
through `checked`, whose errors name every key that is wrong and, if it is misspelt, the nearest valid one.
"""

import difflib
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from assay.errors import AssayError, Rules, check
from assay.files import decoding, one_line, read_text
from assay.registry import kind_of

Level = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]  # of noise; images are in [-1, 1]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
DEVICE = "cpu, cuda, cuda:1, mps, or auto for GPUs if there are any."
DEVICES = "How many devices to use; auto for all GPUs of the machine."


class Record(BaseModel):
    """A pydantic model that completes to its own names alone."""

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__()} - {*dir(BaseModel)})


class Config(Record):
    """Settings: frozen, no unknown keys; a wrong value raises an `AssayError`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, **values: Any) -> None:
        with explaining(type(self)):
            super().__init__(**values)

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # pydantic itself need not call it

    def rules(self) -> Rules:
        """What settings may not be together, in the order in which it is checked."""
        return ()

    def model_post_init(self, context: Any, /) -> None:
        """Reject settings that break a rule."""
        check(self.rules())

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        """What differs from the defaults."""
        fields = type(self).model_fields
        return [(name, value) for name, value in super().__repr_args__() if value != fields[str(name)].default]


class Strict(Config):
    """Settings without silent conversions."""

    model_config = ConfigDict(strict=True)


Model = TypeVar("Model", bound=BaseModel)


def checked(
    model: type[Model], tree: Mapping[str, Any], path: Path | str | None = None, section: str = ""
) -> Model:
    """`tree` as a `model`; an error lists every fault, and its key, below `section`, is that of the first."""
    with explaining(model, path, section):
        # As JSON, where strict types still take a list for a tuple and a string for a path.
        return model.model_validate_json(json.dumps(tree, default=_plain))


def _plain(value: Any) -> str:
    """A class of the user's own by its kind, anything else as text."""
    return (kind_of(value) if isinstance(value, type) else None) or str(value)


@contextmanager
def explaining(model: type[BaseModel], path: Path | str | None = None, section: str = "") -> Iterator[None]:
    """Turn pydantic's errors about `model` into one of ours: the first fault, misspelt keys before others."""
    try:
        yield
    except ValidationError as error:
        found: dict[str | None, AssayError] = {}
        for fault in sorted(error.errors(), key=lambda fault: fault["type"] != "extra_forbidden"):
            one = _fault_to_error(fault, model, section)
            if not any(f"{key}.".startswith(f"{one.key}.") for key in found):  # of each value the first fault
                found[one.key] = one
        first, *others = found.values()
        what = "; ".join([first.what, *(f"{one.key}: {one.what}" for one in others)])
        hints = [f"{one.key}: {one.cure}" for one in found.values() if one.cure not in ("correct it", "add it")]
        cure = ("; ".join(hints) or "correct them") if others else first.cure
        raise AssayError(what, path=first.path or path, key=first.key, cure=cure) from None


def _fault_to_error(fault: Mapping[str, Any], model: type[BaseModel], section: str) -> AssayError:
    """One fault that pydantic found; what a validator of ours raised keeps its words."""
    names = [section] if section else []
    for part in fault["loc"]:
        if isinstance(part, int):
            names.append(str(part))
        elif part in model.model_fields:  # else pydantic's word for one type of a union, or an unknown key
            names.append(part)
            annotation = model.model_fields[part].annotation
            inner = [annotation, *get_args(annotation)]  # a section, or a tuple of sections
            sections = [kind for kind in inner if isinstance(kind, type) and issubclass(kind, BaseModel)]
            model = sections[0] if sections else model
    inside = fault.get("ctx", {}).get("error")
    if isinstance(inside, AssayError):
        if inside.key and inside.key not in names:
            names = [inside.key] if "." in inside.key else [*names, inside.key]
        return AssayError(inside.what, path=inside.path, key=".".join(names) or None, cure=inside.cure)
    if fault["type"] == "extra_forbidden":
        unknown, known = one_line(str(fault["loc"][-1])), model.model_fields
        near = difflib.get_close_matches(unknown, known, n=1)
        cure = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
        return AssayError("is not a setting", key=".".join([*names, unknown]), cure=cure)
    missing = fault["type"] == "missing"
    given = "" if missing else f" (given: {fault['input']!r:.80})"
    what = fault["msg"].removeprefix("Value error, ")
    cure = "add it" if missing else "correct it"
    return AssayError(what[:1].lower() + what[1:] + given, key=".".join(names) or None, cure=cure)


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as a tree; a mistake in it is reported with file and line."""
    with decoding(path, "correct it there"):
        return tomllib.loads(read_text(path, "give a TOML file").removeprefix("\ufeff"))


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
