"""`assay net`: the available networks."""

from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

app = typer.Typer(no_args_is_help=True, help="Available networks and what they cost.")


@app.callback()
def net() -> None:
    """Available networks and what they cost."""


@app.command("list")
def list_networks(
    batch_size: Annotated[int, typer.Option(min=1, help="Images in the training step.")] = 32,
) -> None:
    """List the presets with their parameters, operations per image and memory of a training step.

    Costs are computed from shapes, without allocating anything. Presets adapt to other image shapes.

    Example: `assay net list --batch-size 64`
    """
    from assay.nets import PRESETS, measure_cost, preset

    table = Table("name", "image", "parameters", "GFLOP", "memory", "for")
    table.caption = f"GFLOP to evaluate one image; memory of a training step with {batch_size} images"
    table.columns[0].no_wrap = True
    for column in table.columns[2:5]:
        column.justify = "right"
    console = Console()
    for name, chosen in track(PRESETS.items(), "counting", console=console, transient=True):
        cost = measure_cost(preset(name))
        table.add_row(
            name,
            "x".join(map(str, chosen.image_shape)),
            f"{cost.num_parameters / 1e6:.1f} M",
            f"{cost.flops / 1e9:.2f}",
            f"{cost.step_bytes(batch_size) / 2**30:.2f} GiB",
            chosen.about,
        )
    console.print(table)
