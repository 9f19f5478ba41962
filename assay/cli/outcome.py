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
    from assay.outcome import gather as gather_outcomes
    from assay.outcome import write_outcomes

    outcomes = gather_outcomes(results)
    write_outcomes(output, outcomes)
    table = Table("setting", outcomes[0].evaluation.metric, box=None, header_style="bold")
    for outcome in outcomes:
        table.add_row(outcome.setting.title, outcome.evaluation.cell("fd"))
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
    table = Table(first, *(names | {"fd": found[best].metric}).values(), box=None, header_style="bold")
    for name in order:
        table.add_row(name, *(found[name].cell(metric) for metric in names))
    console = open_console()
    console.print(table)
    details = found[best].details
    against = "" if details is None else f", against {details.reference}"
    if found[best].num_images:
        console.print(f"{found[best].num_images:,} images each{against}")
