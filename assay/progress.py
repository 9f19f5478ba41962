"""How far a long call is: a bar in a terminal, a line of text in a notebook, now and then a line elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

Tell = Callable[..., None]  # (name, done, total, note="")


@contextmanager
def open_progress(shown: bool = True, console: Console | None = None) -> Iterator[Tell]:
    """Yield `tell(name, done, total, note="")`, to be called as often as one likes; each name has its line.

    Without a terminal there is a line every half minute; in a notebook, text: rich's bar needs ipywidgets.
    """
    console = console or Console(stderr=True)
    if not shown:
        yield lambda name, done, total, note="": None
    elif not console.is_terminal or console.is_jupyter:
        yield _lines(console)
    else:
        note = TextColumn("{task.fields[note]}")
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, note, console=console) as bar:
            tasks: dict[str, TaskID] = {}

            def move(name: str, done: float, total: float, note: str = "") -> None:
                if name not in tasks:
                    tasks[name] = bar.add_task(name, total=total, note=note)
                bar.update(tasks[name], completed=done, total=total, note=note)

            yield move


def _lines(console: Console) -> Tell:
    """Prints `name: 40%, 120 of 300, 17 s left` when a line is due."""
    seconds = 0.5 if console.is_jupyter else 30.0  # between two lines
    first, last = dict[str, tuple[float, float]](), dict[str, float]()  # when and where each began

    def tell(name: str, done: float, total: float, note: str = "") -> None:
        now = time.monotonic()
        began, start = first.setdefault(name, (now, done))
        if now - last.setdefault(name, now) < seconds and done < total:
            return
        last[name] = now
        left = f"{duration((now - began) * (total - done) / (done - start))} left" if done > start else ""
        parts = [f"{done / max(total, 1):.0%}", f"{int(done)} of {total:g}", left, note]
        text = f"{name}: " + ", ".join(part for part in parts if part)
        if console.is_jupyter:
            print("\r" + text.ljust(60), end="" if done < total else "\n")
        else:
            console.print(text, soft_wrap=True, highlight=False)

    return tell


def duration(seconds: float) -> str:
    """A time in the unit that suits it: 40 s, 12 min, 3.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.3g} h"
