"""How far a long call is: a bar in a terminal, a line of text in a notebook, now and then a line elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Tell = Callable[..., None]  # (name, done, total, note="")
_SECONDS = {"notebook": 0.5, "plain": 30.0}  # between two lines


@contextmanager
def open_progress(shown: bool = True, console: Console | None = None) -> Iterator[Tell]:
    """Yield `tell(name, done, total, note="")`, to be called as often as one likes; each name has its line.

    Where there is no terminal, as in `assay train > log`, a line is printed every half minute, and at the end.
    In a notebook the bar is text, too: rich's own needs ipywidgets there.
    """
    console = console or Console(stderr=True)
    if not shown:
        yield lambda name, done, total, note="": None
    elif console.is_terminal and not console.is_jupyter:
        note = TextColumn("{task.fields[note]}")
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, note, console=console) as bar:
            tasks: dict[str, object] = {}

            def move(name: str, done: float, total: float, note: str = "") -> None:
                if name not in tasks:
                    tasks[name] = bar.add_task(name, total=total, note=note)
                bar.update(tasks[name], completed=done, total=total, note=note)  # type: ignore[arg-type]

            yield move
    else:
        yield _Lines(console).tell


class _Lines:
    """Prints `name: 40%, 120 of 300, 17 s left` when a line is due."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.seconds = _SECONDS["notebook" if console.is_jupyter else "plain"]
        self.first: dict[str, tuple[float, float]] = {}  # when and where a name began
        self.last: dict[str, float] = {}

    def tell(self, name: str, done: float, total: float, note: str = "") -> None:
        now = time.monotonic()
        began, start = self.first.setdefault(name, (now, done))
        if now - self.last.setdefault(name, now) < self.seconds and done < total:
            return
        self.last[name] = now
        left = f"{duration((now - began) * (total - done) / (done - start))} left" if done > start else ""
        parts = [f"{done / max(total, 1):.0%}", f"{done:g} of {total:g}", left, note]
        text = f"{name}: " + ", ".join(part for part in parts if part)
        if self.console.is_jupyter:
            print("\r" + text.ljust(60), end="" if done < total else "\n")
        else:
            self.console.print(text, soft_wrap=True, highlight=False)


def duration(seconds: float) -> str:
    """A time in the unit that suits it: 40 s, 12 min, 3.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.3g} h"
