"""What users may add: a network, a solver, a noise distribution, each a subclass with a name.

Defining the subclass is all: from then on configs and checkpoints of this process know its `kind`. For other
processes (commands, the workers of a study) the package that holds it names its module in an entry point of
the group `assay`:

    [project.entry-points.assay]
    mine = "my_package.my_module"
"""

from collections.abc import Iterator
from functools import cache
from importlib.metadata import entry_points
from typing import Any

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
        cure = f"choose one of {', '.join(known)}, or install the package that has it (an entry point)"
        raise AssayError(f"nothing is called {kind!r:.80}", key=key, cure=cure)
    return known[kind]


def registered(base: type) -> dict[str, Any]:
    """`base` and its subclasses that have a `kind` of their own, by it."""
    return {kind: found for found in (base, *_subclasses(base)) if (kind := kind_of(found))}


def kind_of(found: type) -> str | None:
    """The kind of a subclass, if it has one."""
    fields = getattr(found, "model_fields", {})  # a config of pydantic has it as a field
    kind = fields["kind"].default if "kind" in fields else vars(found).get("kind")
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
