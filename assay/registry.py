"""What users may add: a network, a solver, a noise distribution, each a subclass with a name.

Defining the subclass is all: from then on configs and checkpoints of this process know its `kind`. For other
processes (commands, the workers of a study) the package that holds it names its module in an entry point of
the group `assay`:

    [project.entry-points.assay]
    mine = "my_package.my_module"
"""

import ast
import gc
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib.metadata import entry_points
from types import FunctionType
from typing import Any, get_args

from assay.errors import AssayError


def find(base: type, kind: str, key: str) -> Any:
    """The class of this kind; `key` is the setting that asks for it.

    Entry points are imported only for kinds that are not known yet: they import us, and we look for our own
    while we are imported ourselves.
    """
    if kind not in registered(base):
        _load_entry_points()
    known = registered(base)
    if kind not in known:
        names = ", ".join(name for name in known if name != "passed")  # which no setting asks for
        cure = f"choose one of {names}, or install the package that has it (an entry point)"
        cure = "give a class that has a `kind`, not an object or a function" if " at 0x" in kind else cure
        raise AssayError(f"nothing is called {kind!r:.80}", key=key, cure=cure)
    return known[kind]


def make(base: type, kind: str, key: str) -> Any:
    """An instance of the class of this kind, which is made without arguments."""
    found = find(base, kind, key)
    try:
        return found()
    except TypeError as error:
        raise AssayError(
            f"{found.__name__}() fails ({error})", key=key, cure="give defaults to all arguments"
        ) from error


def name_of(part: Any, key: str) -> str:
    """The name by which a setting asks for `part`, a class: its kind, or that name itself."""
    kind = kind_of(part) if isinstance(part, type) else part
    if not isinstance(kind, str):
        cure = "give a class that has a `kind`"
        cure += ', a module such as MyNet(), or {"kind": "mine", ...} with settings' * (key == "net")
        raise AssayError(f"{part!r:.80} is neither a name nor a class with a `kind`", key=key, cure=cure)
    return kind


def is_own(part: type) -> bool:
    """Whether a class is the user's own."""
    return part.__module__.split(".")[0] not in ("assay", "torch")


@cache
def own_code(part: type) -> dict[str, str]:
    """The source of a class of the user's own, and of what it names of its package or folder, by name.

    With other code results are others, so it is part of their identity. It is read when the class is first
    used; what was typed into an interpreter has none.
    """
    found, pending = dict[str, str](), [(part.__name__, part, part.__module__)] if is_own(part) else []
    while pending:
        name, value, where = pending.pop()
        found[name] = repr(value) if isinstance(value, int | float | str) else ""
        if isinstance(value, type | FunctionType) and _is_near(value.__module__, part.__module__):
            where = value.__module__
            with suppress(OSError, TypeError):
                found[name] = _plain(inspect.getsource(value))
        known = getattr(sys.modules.get(where), "__dict__", {})
        words = known.keys() & set(re.findall(r"\w+", found[name])) - found.keys()
        pending += [(word, known[word], where) for word in words]
    return found


def _plain(source: str) -> str:
    """Code without its comments, docstrings and layout, which decide no results."""
    try:
        tree = ast.parse(textwrap.dedent(source))
    except SyntaxError:  # part of a statement, as a lambda is
        return source
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def _is_near(name: str, other: str) -> bool:
    """Whether two modules are of one package, or lie in one folder."""
    if name.split(".")[0] == other.split(".")[0]:
        return True
    files = (getattr(sys.modules.get(each), "__file__", None) for each in (name, other))
    folders = {os.path.dirname(file) if file else None for file in files}
    return len(folders) == 1 and None not in folders


def registered(base: type) -> dict[str, Any]:
    """`base` and its subclasses that have a `kind` of their own, by it; of a class defined anew, the last."""
    if _clash(base):
        gc.collect()  # a class that was replaced, in a notebook, lives until then
    if what := _clash(base):
        raise AssayError(what, key="kind", cure="choose another name")
    return {kind: part for part in (base, *_subclasses(base)) if (kind := kind_of(part))}


def _clash(base: type) -> str:
    """What to say of a class of the user's own that has the kind of one of ours."""
    ours = {kind_of(part): part.__name__ for part in (base, *_subclasses(base)) if not is_own(part)}
    own = (part for part in _subclasses(base) if is_own(part) and kind_of(part) in ours.keys() - {None})
    return next((f"{part.__name__} has the kind of Assay's own {ours[kind_of(part)]}" for part in own), "")


def kind_of(found: type) -> str | None:
    """The kind of a subclass, if it has one."""
    fields = getattr(found, "model_fields", {})  # a config of pydantic has it as a field
    kind = fields["kind"].default if "kind" in fields else vars(found).get("kind")
    kind = (
        kind if isinstance(kind, str) or "kind" not in fields else [*get_args(fields["kind"].annotation), 0][0]
    )
    return kind if isinstance(kind, str) else None


def _subclasses(base: Any) -> Iterator[Any]:
    for found in base.__subclasses__():
        yield found
        yield from _subclasses(found)


@cache
def _load_entry_points() -> None:
    for entry in entry_points(group="assay"):
        try:
            entry.load()
        except Exception as error:
            what = f"its entry point {entry.name} = {entry.value} cannot be imported ({error})"
            name = entry.dist.name if entry.dist else None
            raise AssayError(what, path=name, cure="correct or uninstall it") from error
