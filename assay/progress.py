"""A progress bar for calls from a notebook, a terminal or a script."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress


@contextmanager
def progress_bar(title: str, shown: bool = True) -> Iterator[Callable[[float], None]]:
    """Yield a function that takes the share done, from 0 to 1.

    In a notebook the bar is a line of text: rich's own needs ipywidgets there.
    """
    if shown and Console().is_jupyter:
        started = last = time.monotonic()

        def tell(share: float) -> None:
            nonlocal last
            if time.monotonic() - last > 0.5 or share >= 1:
                last = time.monotonic()
                left = (last - started) * (1 - share) / max(share, 1e-3)
                print(f"\r{title}: {share:4.0%}, {left:.0f} s left   ", end="" if share < 1 else "\n")

        yield tell
        return
    with Progress(disable=not shown, transient=True) as bar:
        task = bar.add_task(title, total=1.0)
        yield lambda share: bar.update(task, completed=share)
