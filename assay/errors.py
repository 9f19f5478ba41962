"""What a user can correct: one error with fields, which the library fills and the command line renders."""

import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
DISTRIBUTION = "assay-diffusion"  # what pip installs; `assay` on the package index is somebody else's


class AssayError(ValueError):
    """Something that a user can correct. Tests and callers read its fields, never its text.

    what : what is wrong, as a clause without a full stop: "has 3 channels, but the store has 1".
    path : the file, folder or address that it is about.
    key : the argument or setting that it is about, by its name in Python or TOML: "num_images", "train.lr".
    cure : what to do, as a clause: "pack it with colour = grey"; the command line shows `--colour grey`.

    >>> print(assay.AssayError("has 3 channels, but the store has 1", path="a.png", cure="pack it in grey"))
    a.png: has 3 channels, but the store has 1; pack it in grey
    """

    def __init__(
        self, what: str, *, path: Path | str | None = None, key: str | None = None, cure: str | None = None
    ) -> None:
        super().__init__(what)
        self.what, self.key, self.cure = what, key, cure
        self.path = None if path is None else str(path)

    def __str__(self) -> str:
        places = [place for place in (self.path, self.key) if place]
        return ": ".join([*places, self.what]) + (f"; {self.cure}" if self.cure else "")


class AssayWarning(UserWarning):
    """Something that looks wrong: check it, and go on if it is not."""


def warn(text: str, category: type[AssayWarning] = AssayWarning) -> None:
    """Warn at the line outside of Assay that led here: the user's own."""
    depth, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals["__name__"].split(".")[0] in ("assay", "contextlib"):
        depth, frame = depth + 1, frame.f_back
    warnings.warn(text, category, stacklevel=depth)


Rules = Iterable[tuple[Any, AssayError]]  # whether one is broken, and what to say then


def check(rules: Rules) -> None:
    """Raise the error of the first rule that is broken; a rule may rely on those before it."""
    for error in (error for is_broken, error in rules if is_broken):
        raise error


def check_enough(number: int, least: int, what: str, key: str) -> None:
    """Reject fewer than `least` of `what`: "clean images of digits"."""
    if number < least:
        raise AssayError(f"{number} {what}; at least {least} are needed", key=key, cure="give more of them")


def check_same(ours: object, theirs: object, what: str, **where: Any) -> None:
    """Reject two values that differ, although `what` says that they should not; `where` as for an error."""
    if ours != theirs:
        raise AssayError(f"{what}: {ours} and {theirs}", **where)


def choose(name: str, known: Mapping[str, T], key: str, path: Path | str | None = None) -> T:
    """What a name stands for among all that are `known`; `key` is the setting that names it."""
    if name not in known:
        cure = f"choose one of {', '.join([*known][:40])}"
        raise AssayError(f"nothing is called {name!r:.80}", path=path, key=key, cure=cure)
    return known[name]


@contextmanager
def about(path: Path | str | None) -> Iterator[None]:
    """Errors of ours that name no path are about this one."""
    try:
        yield
    except AssayError as error:
        error.path = error.path or (None if path is None else str(path))
        raise


def extra(module: str, name: str, purpose: str) -> Any:
    """Import an optional library that the extra `name` installs; a clear error where it is missing."""
    try:
        return import_module(module)
    except ImportError as error:
        cure = f"pip install '{DISTRIBUTION}[{name}]'"
        raise AssayError(f"{purpose} needs the package {module.split('.')[0]}", cure=cure) from error
