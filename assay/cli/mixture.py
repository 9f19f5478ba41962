"""`assay mixture`: estimate mixtures from samples with unequal noise, and evaluate the theory's bounds."""

import csv as tables
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from assay.cli.options import output_argument, output_option, takes
from assay.mixture.rates import RatesConfig

app = typer.Typer(no_args_is_help=True, help="The theory: mixtures estimated from samples with unequal noise.")

Seed = Annotated[int, typer.Option(help="Seed of all random draws.", min=0)]
NumSamples = Annotated[int, typer.Option("--num-samples", "-n", help="Number of samples.", min=1)]
CleanFraction = Annotated[float, typer.Option(help="Share of clean samples.", min=0, max=1)]
Atoms = Annotated[int | None, typer.Option("--k", "-k", help="Number of atoms. Default: by likelihood.", min=1)]


@app.command()
def fit(
    path: Annotated[Path, typer.Argument(help="Samples: .npz, or .csv with a sigma column.")],
    k: Atoms = None,
    sigma_column: Annotated[str, typer.Option(help="Column with noise levels.")] = "sigma",
    sigma: Annotated[float | None, typer.Option(help="One noise level for all samples.")] = None,
    polish: Annotated[bool, typer.Option(help="Climb the likelihood to a local maximum.")] = True,
    num_restarts: Annotated[int, typer.Option(help="More places to climb from.", min=0)] = 2,
    seed: Seed = 0,
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
        said = f"no mixture on the grid has a log-likelihood above {highest}"
        console.print(table, said, soft_wrap=True)
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
def simulate(
    out: Annotated[Path, output_argument("File to write: .npz or .csv.")],
    atoms: Annotated[str, typer.Option(help="Atoms separated by semicolons: '0,0; 3,1; -2,4'.")],
    weights: Annotated[str, typer.Option(help="Weights of the atoms: '0.5,0.3,0.2'. Default: equal.")] = "",
    num_samples: NumSamples = 10_000,
    clean_fraction: CleanFraction = 0.1,
    clean_sigma: Annotated[float, typer.Option(help="Noise level of clean samples.")] = 1.0,
    sigma: Annotated[float, typer.Option(help="Noise level of the other samples.")] = 3.0,
    seed: Seed = 0,
) -> None:
    """Draw clean and noisy samples from a mixture.

    Example: `assay mixture simulate samples.csv --atoms "0,0; 4,0; 0,5" -n 20000 --sigma 2`
    """
    import numpy as np

    from assay.mixture.samples import check_mixture, two_levels, write_samples
    from assay.mixture.samples import simulate as draw

    rows = [row.replace(",", " ").split() for row in atoms.split(";")]
    truth = check_mixture(rows, weights.replace(",", " ").split() if weights else None)
    level = two_levels(num_samples, clean_fraction, clean_sigma, sigma)
    write_samples(out, draw(truth, level, np.random.default_rng(seed)), level)
    said = f"wrote {num_samples:,} samples in {truth.atoms.shape[1]} dimensions to {out}"
    Console().print(said, soft_wrap=True)


@app.command()
@takes("config", RatesConfig, panel="Experiment")
def rates(
    config: RatesConfig,
    out: Annotated[Path, output_option("File of the plot.", "--out", suffix=".png")] = Path("rates.png"),
    csv: Annotated[Path | None, output_option("Also write the curves with standard errors.", "--csv")] = None,
) -> None:
    """Measure how the error falls with the number of samples, and how many noisy samples replace a clean one.

    All errors are those of the theorem's estimator in the worst case, for atoms in a ball whose radius is the
    clean noise. Above one dimension each term of the theorem is measured: the error of the subspace of the
    atoms, also as a function of the dimension, and the error inside it. Intervals hold 90%.

    Example: `assay mixture rates --k 2 --sigma 1.5,2 --out rates.png`
    """
    from assay.figure import save_png
    from assay.files import write_whole
    from assay.mixture.rates import measure_rates, rates_panels

    console = Console()
    with console.status("measuring") as status:
        result = measure_rates(config, lambda name: status.update(f"measuring: {name}"))
    curves = Table("curve", "n or d", "error", "exponent", "90% interval", "theory")
    for sign, curve in [(1, each) for each in result.curves] + [(-1, each) for each in result.dimensions]:
        at = f"{curve.num_samples[0]:,.0f} .. {curve.num_samples[-1]:,.0f}"
        low, high = sorted(sign * end for end in curve.slope_interval())
        error, theory = f"{curve.error[0]:.3f} .. {curve.error[-1]:.3f}", sign * curve.theory_slope
        exponent, interval = f"{sign * curve.power_law()[0]:.3f}", f"{low:.3f} to {high:.3f}"
        curves.add_row(curve.name, at, error, exponent, interval, _or_dash(theory, ".3f"))
    rows = Table("noise", "error", "noisy samples for a clean one", "90% interval", "theory")
    for row in result.exchanges:
        interval = "{:,.3g} to {:,.3g}".format(*row.interval)
        rows.add_row(f"{row.sigma:g}", row.term, f"{row.measured:,.3g}", interval, _or_dash(row.theory, ",.3g"))
    console.print(curves, rows)
    if csv is not None:
        with write_whole(csv) as partial, open(partial, "w", newline="") as file:
            writer = tables.writer(file, lineterminator="\n")
            writer.writerow(["curve", "num_samples", "error", "standard_error"])
            for curve in [*result.curves, *result.dimensions]:
                columns = curve.num_samples, curve.error, curve.standard_error
                writer.writerows([curve.name.replace(",", ""), *row] for row in zip(*columns, strict=True))
    save_png(rates_panels(result), out)
    console.print(f"wrote {out}", soft_wrap=True)


def _or_dash(value: float, form: str) -> str:
    return "-" if value != value else format(value + 0.0, form)


@app.command()
def bounds(
    k: Annotated[int, typer.Option("--k", "-k", help="Number of atoms.")] = 2,
    num_features: Annotated[int, typer.Option("--num-features", "-d", help="Dimension.")] = 1,
    num_samples: NumSamples = 100_000,
    clean_fraction: CleanFraction = 0.1,
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
