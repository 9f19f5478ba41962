"""`assay gather` and `assay compare`: results of single evaluations as one table."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column, Table

from assay.cli.options import open_console, output_option

Results = Annotated[
    list[Path], typer.Argument(help="JSON files of `assay evaluate --output` or of a study, or results.csv.")
]


def gather(
    results: Results,
    output: Annotated[Path, output_option("The CSV file to write.", suffix=".csv")],
) -> None:
    """Collect results in one table for `assay price`, `plan` and `study report`.

    Numbers of images, noise levels and seeds are read from the evaluated checkpoints.

    Example: `assay gather clean.json mixed.json -o results.csv`
    """
    from assay.outcome import CURRENCIES, write_outcomes
    from assay.outcome import gather as gather_outcomes

    outcomes = gather_outcomes(results)
    write_outcomes(output, outcomes)
    found = [
        each for each in CURRENCIES.values() if any(each.value(outcome) is not None for outcome in outcomes)
    ]
    table = Table("setting", *(each.title(outcomes[0]) for each in found), box=None, header_style="bold")
    for outcome in outcomes:
        table.add_row(outcome.setting.title, *(outcome.evaluation.cell(each.name) for each in found))
    console = open_console()
    console.print(table)
    console.print(f"wrote {output}")


def compare(results: Results) -> None:
    """Rank results, best first. They must have been measured in the same way.

    Example: `assay compare clean.json mixed.json noisy.json`
    """
    from assay.metrics.evaluate import compare as compare_evaluations
    from assay.metrics.evaluate import titles
    from assay.outcome import load_evaluations

    found = load_evaluations(results)
    names = titles(found.values())
    best, *_ = order = compare_evaluations(found)
    first = Column("result", overflow="fold")  # a path must survive copy and paste
    titled = {name: found[best].metric if name == "fd" else title for name, title in names.items()}
    records = {name: each.score_record for name, each in found.items()}
    if all(records.values()):
        titled["behind"] = "score behind the first"
    table = Table(first, *titled.values(), box=None, header_style="bold")
    for name in order:
        mine, its = records[name], records[best]
        cells = [found[name].cell(metric) for metric in names]
        if "behind" in titled and mine and its:
            behind = mine.minus(its)  # on the same images and noise, so the error is much smaller
            cells.append("" if name == best else f"{behind.value:.3g} ± {behind.standard_error:.2g}")
        table.add_row(name, *cells)
    console = open_console()
    console.print(table)
    details = found[best].details
    against = "" if details is None else f", against {details.reference}"
    if found[best].num_images:
        console.print(f"{found[best].num_images:,} images each{against}")
