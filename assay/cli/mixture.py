"""`assay mixture`: estimate mixtures from samples with unequal noise, and evaluate the theory's bounds."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from assay.cli.options import output_option

app = typer.Typer(no_args_is_help=True, help="The theory: mixtures estimated from samples with unequal noise.")


@app.command()
def fit(
    path: Annotated[Path, typer.Argument(help="Samples: a .csv file with a column of noise levels.")],
    k: Annotated[int | None, typer.Option("--k", "-k", help="Number of atoms. Default: chosen.", min=1)] = None,
    sigma_column: Annotated[str, typer.Option(help="Column with noise levels.")] = "sigma",
    sigma: Annotated[float | None, typer.Option(help="One noise level for all samples.")] = None,
    polish: Annotated[bool, typer.Option(help="Climb the likelihood to a local maximum.")] = True,
    num_restarts: Annotated[int, typer.Option(help="More places to climb from.", min=0)] = 2,
    seed: Annotated[int, typer.Option(help="Seed of all random draws.", min=0)] = 0,
    json_path: Annotated[Path | None, output_option("Also write the result to this file.", "--json")] = None,
) -> None:
    """Estimate the atoms and weights of a mixture from noisy samples.

    Without --k the number of atoms is chosen by the likelihood, minus log n / 2 for each fitted parameter.

    Example: `assay mixture fit samples.csv --k 3`
    """
    from assay.files import write_whole
    from assay.mixture.model import NoisyMixture
    from assay.mixture.samples import read_samples

    x, level = read_samples(path, sigma_column, sigma)
    console = Console()
    with console.status(f"learning from {len(x):,} samples"):
        model = NoisyMixture(k, polish=polish, num_restarts=num_restarts, random_state=seed)
        model.fit(x, sigma=level)
        errors = model.standard_errors(x, sigma=level) if polish and x.shape[1] <= 8 else None
    console.print(f"{len(x):,} samples in {x.shape[1]} dimensions, noise {level.min():g} to {level.max():g}")
    n_d, n_l = (condition.have for condition in model.conditions_[:2])
    raised = f"; noise below {model.radius_:.3g}, the atoms' radius, counts as that"
    sizes = f"effective samples: {n_d:,.1f} for the subspace (n_d), {n_l:,.1f} inside it (n_l)"
    console.print(sizes + (raised if level.min() < model.radius_ else ""))
    result = {"atoms": model.means_.tolist(), "weights": model.weights_.tolist(), "n_d": n_d, "n_l": n_l}
    if k is None:
        result["evidence"] = [asdict(row) for row in model.evidence_]
        table, best = Table("atoms", "log-likelihood", "penalised", "probability"), model.npmle_
        for row in model.evidence_:
            numbers = f"{row.log_likelihood:,.2f}", f"{row.penalised:,.2f}", f"{row.probability:.3f}"
            table.add_row(f"{row.num_atoms}", *numbers)
        highest = f"{best.log_likelihood + best.gap:,.2f} (duality gap {best.gap:.2g} nats)"
        console.print(table, f"no mixture on the grid has a log-likelihood above {highest}", soft_wrap=True)
    console.print(_atom_table(model, errors))
    if json_path:
        with write_whole(json_path) as partial:
            partial.write_text(json.dumps(result, indent=1))


def _atom_table(model: Any, errors: Any) -> Table:
    """Weights and atoms, at most 8 numbers of each, with standard errors if there are any."""
    table = Table("weight", "atom")
    for j, (weight, atom) in enumerate(zip(model.weights_, model.means_, strict=True)):
        deviations = [f" ± {e:.2g}" for e in errors[0][j]] if errors else [""] * 8
        shown = "  ".join(f"{value:.4g}{error}" for value, error in zip(atom, deviations, strict=False))
        more = f" .. ({len(atom)} numbers)" if len(atom) > 8 else ""
        table.add_row(f"{weight:.4f}" + (f" ± {errors[1][j]:.2g}" if errors else ""), shown + more)
    return table


@app.command()
def bounds(
    k: Annotated[int, typer.Option("--k", "-k", help="Number of atoms.")] = 2,
    num_features: Annotated[int, typer.Option("--num-features", "-d", help="Dimension.")] = 1,
    num_samples: Annotated[
        int, typer.Option("--num-samples", "-n", help="Number of samples.", min=1)
    ] = 100_000,
    clean_fraction: Annotated[float, typer.Option(help="Share of clean samples.", min=0, max=1)] = 0.1,
    sigma: Annotated[float, typer.Option(help="Noise level of the others; clean ones have 1.", min=1)] = 3.0,
    delta: Annotated[float, typer.Option(help="Probability with which the bounds may fail.")] = 0.05,
) -> None:
    """Compute effective sample sizes, upper and lower bounds on W1, and whether their conditions hold.

    The bounds are for atoms in the unit ball. The paper leaves their absolute constants open: 1 here.

    Example: `assay mixture bounds --k 3 -d 20 -n 100000 --clean-fraction 0.1 --sigma 3`
    """
    from assay.mixture import bounds as theory

    levels, count = [1.0, sigma], [clean_fraction * num_samples, (1 - clean_fraction) * num_samples]
    upper = theory.upper_bound(levels, num_features, k, delta, count=count)
    lower = theory.lower_bound(levels, num_features, k, delta, count=count)
    line = theory.upper_bound_line(levels, k, count=count)
    table = Table("", "subspace", "inside it", "together")
    sizes, per_clean = theory.effective_sizes(levels, k, count), theory.noisy_per_clean(sigma, k)
    table.add_row("effective samples", *(f"{value:,.1f}" for value in sizes))
    table.add_row("noisy samples per clean one", *(f"{value:,.1f}" for value in per_clean))
    table.add_row(f"upper bound on W1, probability {1 - delta:g}", *(f"{v:.4g}" for v in (*upper, sum(upper))))
    if num_features == 1:
        table.add_row("upper bound on a line, probability 0.75", "", f"{line:.4g}", f"{line:.4g}")
    table.add_row("lower bound on W1", *(f"{v:.4g}" for v in (*lower, max(lower))))
    console = Console(soft_wrap=True)
    console.print(table)
    for name, hypotheses in (("upper", theory.upper_conditions), ("lower", theory.lower_conditions)):
        for condition in hypotheses(levels, num_features, k, delta, count=count):
            console.print(f"{name}: {condition}", style=None if condition.holds else "yellow")
