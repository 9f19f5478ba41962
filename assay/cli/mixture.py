"""`assay mixture`: estimate mixtures from samples with unequal noise, and evaluate the theory's bounds."""

import json
import warnings
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from assay.cli.options import output_argument, output_option

app = typer.Typer(no_args_is_help=True, help="The theory: mixtures estimated from samples with unequal noise.")

Seed = Annotated[int, typer.Option(help="Seed of all random draws.")]
NumAtoms = Annotated[int, typer.Option("--k", "-k", help="Number of atoms (components).", min=1)]
Delta = Annotated[float, typer.Option(help="Probability with which the bounds may fail.")]


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.replace(",", " ").split()]
    except ValueError as error:
        raise ValueError(f"{text!r} is not a list of numbers such as 0.5,0.5") from error


@app.command()
def fit(
    path: Annotated[Path, typer.Argument(help="Samples: .npy, .npz, .csv or .parquet with a sigma column.")],
    k: Annotated[
        int | None, typer.Option("--k", "-k", help="Number of atoms. Default: chosen by the likelihood.", min=1)
    ] = None,
    sigma_column: Annotated[
        str, typer.Option(help="Column with noise levels, or prefix of one per feature: sigma_x0.")
    ] = "sigma",
    sigma: Annotated[float | None, typer.Option(help="One noise level for all samples.")] = None,
    covariance: Annotated[
        bool, typer.Option("--covariance", help="Components with a covariance each instead of atoms.")
    ] = False,
    polish: Annotated[bool, typer.Option(help="Refine the estimate by maximum likelihood.")] = True,
    search: Annotated[
        str, typer.Option(help="'scalable', or 'exhaustive' (the paper's algorithm, k <= 3).")
    ] = "scalable",
    seed: Seed = 0,
    json_path: Annotated[
        Path | None, output_option("Also write the result to this JSON file.", "--json")
    ] = None,
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
    with warnings.catch_warnings(record=True) as caught, console.status(f"learning from {len(x):,} samples"):
        warnings.simplefilter("always")
        kind = "full" if covariance else "zero"
        model = NoisyMixture(k, covariance=kind, search=search, polish=polish, random_state=seed)  # type: ignore[arg-type]
        model.fit(x, sigma=level)
        few = slice(None, None, max(1, len(x) // 100_000))
        errors = model.standard_errors(x[few], sigma=level[few]) if polish and x.shape[1] <= 8 else None
        shrink = (len(x[few]) / len(x)) ** 0.5
    console.print(f"{len(x):,} samples in {x.shape[1]} dimensions, noise {level.min():g} to {level.max():g}")
    result: dict[str, object] = {"atoms": model.means_.tolist(), "weights": model.weights_.tolist()}
    if model.conditions_:
        sizes = [condition.have for condition in model.conditions_[:2]]
        raised = f"; noise below {model.radius_:.3g}, the atoms' radius, counts as that"
        console.print(
            f"effective samples: {sizes[0]:,.1f} for the subspace (n_d), {sizes[1]:,.1f} inside it (n_l)"
            + (raised if level.min() < model.radius_ else "")
        )
        result |= {"n_d": sizes[0], "n_l": sizes[1]}
    if k is None:
        best = model.npmle_
        evidence = Table("atoms", "log-likelihood", "penalised", "probability")
        for row in model.evidence_:
            numbers = f"{row.log_likelihood:,.2f}", f"{row.penalised:,.2f}", f"{row.probability:.3f}"
            evidence.add_row(f"{row.num_atoms}", *numbers)
        console.print(evidence)
        console.print(
            f"no mixture on {best.num_places:,} places has a log-likelihood above "
            f"{best.log_likelihood + best.gap:,.2f} (duality gap {best.gap:.2g} nats)",
            soft_wrap=True,
        )
        result["evidence"] = [
            {"num_atoms": row.num_atoms, "probability": row.probability} for row in model.evidence_
        ]
    if model.covariances_ is not None:
        result["covariances"] = model.covariances_.tolist()
    table = Table("weight", "mean" if covariance else "atom")
    for j, (weight, atom) in enumerate(zip(model.weights_, model.means_, strict=True)):
        shown = [f"{value:.4g}" for value in atom[:8]]
        if errors is not None:
            shown = [f"{value} ± {shrink * e:.2g}" for value, e in zip(shown, errors[0][j], strict=True)]
        deviation = "" if errors is None else f" ± {shrink * errors[1][j]:.2g}"
        more = f" .. ({len(atom)} numbers)" if len(atom) > 8 else ""
        table.add_row(f"{weight:.4f}{deviation}", "  ".join(shown) + more)
    console.print(table)
    for warning in caught:
        console.print(f"warning: {warning.message}", style="yellow", soft_wrap=True)
    if json_path:
        with write_whole(json_path) as partial:
            partial.write_text(json.dumps(result, indent=1))


@app.command()
def simulate(
    out: Annotated[Path, output_argument("File to write: .npy, .npz, .csv or .parquet.")],
    atoms: Annotated[str, typer.Option(help="Atoms separated by semicolons: '0,0; 3,1; -2,4'.")] = "",
    weights: Annotated[str, typer.Option(help="Weights of the atoms: '0.5,0.3,0.2'. Default: equal.")] = "",
    mixture: Annotated[Path | None, typer.Option(help="Or a mixture from a JSON file of `fit --json`.")] = None,
    num_samples: Annotated[int, typer.Option("--num-samples", "-n", help="Number of samples.", min=1)] = 10_000,
    clean_fraction: Annotated[float, typer.Option(help="Fraction of clean samples.")] = 0.1,
    clean_sigma: Annotated[float, typer.Option(help="Noise level of clean samples.")] = 1.0,
    sigma: Annotated[float, typer.Option(help="Noise level of the other samples.")] = 3.0,
    seed: Seed = 0,
) -> None:
    """Draw clean and noisy samples from a mixture.

    Example: `assay mixture simulate samples.csv --atoms "0,0; 4,0; 0,5" -n 20000 --sigma 2`
    """
    import numpy as np

    from assay.mixture.samples import check_mixture, read_mixture, two_levels, write_samples
    from assay.mixture.samples import simulate as draw

    if (mixture is None) == (not atoms):
        raise ValueError("give either --atoms (and --weights) or --mixture FILE")
    if mixture is not None:
        truth = read_mixture(mixture)
    else:
        rows = [_numbers(row) for row in atoms.split(";")]
        if len({len(row) for row in rows}) != 1:
            raise ValueError(f"the atoms in {atoms!r} have different numbers of coordinates")
        truth = check_mixture(rows, _numbers(weights) if weights else None)
    level = two_levels(num_samples, clean_fraction, clean_sigma, sigma)
    write_samples(out, draw(truth, level, np.random.default_rng(seed)), level)
    Console().print(
        f"wrote {num_samples:,} samples in {truth.atoms.shape[1]} dimensions to {out}", soft_wrap=True
    )


@app.command()
def rates(
    k: NumAtoms = 2,
    sigma: Annotated[float, typer.Option(help="Noise level of noisy samples; that of clean ones is 1.")] = 2.0,
    clean_fraction: Annotated[float, typer.Option(help="Fraction of clean samples in the mixed curve.")] = 0.1,
    num_features: Annotated[
        int,
        typer.Option("--num-features", "-d", help="Dimension; above 1 measures the subspace.", min=1),
    ] = 1,
    num_samples: Annotated[str, typer.Option(help="Numbers of clean samples to try.")] = "300,1000,3000,10000",
    num_repeats: Annotated[int, typer.Option(help="Repeats per number of samples.", min=2)] = 40,
    seed: Seed = 0,
    out: Annotated[Path, output_option("File of the plot.", "--out", suffix=".png")] = Path("rates.png"),
    csv: Annotated[Path | None, output_option("Also write the curves with standard errors.", "--csv")] = None,
) -> None:
    """Measure how the error falls with the number of samples, and how many noisy samples replace a clean one.

    In one dimension this is the error of the mixture in the worst case, in d dimensions the error of the
    subspace of the atoms, also as a function of d.

    Example: `assay mixture rates --k 2 --sigma 2 --out rates.png`
    """
    import numpy as np

    from assay.figure import save_png
    from assay.files import write_whole
    from assay.mixture.plot import rates_panels
    from assay.mixture.rates import measure_rates

    sizes = [round(value) for value in _numbers(num_samples)]
    with Progress(transient=True) as progress:
        task = progress.add_task("measuring", total=1.0)
        result = measure_rates(
            k,
            sigma,
            clean_fraction,
            sizes,
            num_repeats,
            seed,
            lambda share: progress.update(task, completed=share),
            num_features,
        )
    power = 4 * k - 2 if num_features == 1 else 4
    table = Table("curve", "samples", "error", "exponent", "theory")
    for curve in result.curves:
        samples = f"{curve.num_samples[0]:,.0f} .. {curve.num_samples[-1]:,.0f}"
        errors = f"{curve.error[0]:.3f} .. {curve.error[-1]:.3f}"
        table.add_row(curve.name, samples, errors, f"{curve.slope:.3f}", f"{curve.theory_slope:.3f}")
    if (grown := result.dimension) is not None:
        dims = f"d = {grown.num_samples[0]:.0f} .. {grown.num_samples[-1]:.0f}"
        errors = f"{grown.error[0]:.3f} .. {grown.error[-1]:.3f}"
        table.add_row(grown.name, dims, errors, f"{-grown.slope:.3f} in d", f"{-grown.theory_slope:.3f} in d")
    console = Console()
    console.print(table)
    rate = result.exchange
    promised = rate.inside if num_features == 1 else rate.subspace
    console.print(
        f"{rate.measured:,.3g} samples of noise {sigma:g} replace a clean one (90 %: {rate.low:,.3g} to "
        f"{rate.high:,.3g}; k = {k}); the theory says sigma^{power} = {promised:,.3g}. "
        f"(10 % more or less error is a factor of {1.1**power:.1f} in samples.)"
    )
    if csv is not None:
        lines = [
            f"{curve.name.replace(',', '')},{n:.0f},{error!r},{deviation!r}"
            for curve in result.curves
            for n, error, deviation in np.transpose(
                [curve.num_samples, curve.error, curve.standard_error]
            ).tolist()
        ]
        with write_whole(csv) as partial:
            partial.write_text("\n".join(["curve,num_samples,error,standard_error", *lines]) + "\n")
    save_png(rates_panels(result), out)
    console.print(f"wrote {out}", soft_wrap=True)


@app.command()
def worth(
    k: NumAtoms = 2,
    num_features: Annotated[int, typer.Option("--num-features", "-d", help="Dimension.", min=1)] = 1,
    sigma: Annotated[
        str, typer.Option(help="Noise levels, relative to clean samples: '1.5,2,3'.")
    ] = "1.25,1.5,2,2.5",
    num_samples: Annotated[
        str, typer.Option(help="Numbers of clean samples to compare with.")
    ] = "500,1500,4500",
    num_repeats: Annotated[int, typer.Option(help="Repeats per number of samples.", min=2)] = 20,
    seed: Seed = 0,
    out: Annotated[Path, output_option("File of the plot.", "--out", suffix=".png")] = Path("worth.png"),
) -> None:
    """Measure how many noisy samples replace a clean one, and compare with the theorem.

    A sample of noise sigma is worth 1 / sigma^4 of a clean one for finding the subspace of the atoms, and
    1 / sigma^(4k-2) for telling the atoms apart inside it. Both hold in the worst case, up to constants, for
    atoms in a ball whose radius is the clean noise. The measured number is the one at which the theorem's
    estimator has the same error, in the worst case, from noisy samples as from clean ones.

    Example: `assay mixture worth --k 2 -d 5 --sigma 1.5,2,3`
    """
    from assay.figure import save_png
    from assay.mixture.plot import worth_panel
    from assay.mixture.rates import measure_worth

    levels, sizes = _numbers(sigma), [round(value) for value in _numbers(num_samples)]
    with Progress(transient=True) as progress:
        task = progress.add_task("measuring", total=1.0)
        result = measure_worth(
            k,
            levels,
            num_features,
            sizes,
            num_repeats,
            seed,
            lambda share: progress.update(task, completed=share),
        )
    table = Table("noise", "noisy per clean", "90 % interval", "sigma^4", f"sigma^{4 * k - 2}")
    for row in result:
        interval = f"{row.low:,.3g} to {row.high:,.3g}"
        theory = f"{row.subspace:,.3g}", f"{row.inside:,.3g}"
        table.add_row(f"{row.sigma:g}", f"{row.measured:,.3g}", interval, *theory)
    console = Console()
    console.print(table)
    save_png([worth_panel(result, k, num_features)], out)
    console.print(f"wrote {out}", soft_wrap=True)


@app.command()
def bounds(
    k: NumAtoms = 2,
    num_features: Annotated[int, typer.Option("--num-features", "-d", help="Dimension.", min=1)] = 1,
    num_samples: Annotated[
        int, typer.Option("--num-samples", "-n", help="Number of samples.", min=1)
    ] = 100_000,
    clean_fraction: Annotated[float, typer.Option(help="Fraction of samples with noise level 1.")] = 0.1,
    sigma: Annotated[float, typer.Option(help="Noise level of the others, relative to clean ones.")] = 3.0,
    delta: Delta = 0.05,
    constant: Annotated[
        float, typer.Option(help="The absolute constant of the bounds; the paper does not give it.")
    ] = 1.0,
) -> None:
    """Compute effective sample sizes, upper and lower bounds on W1, and whether their conditions hold.

    Example: `assay mixture bounds --k 3 -d 20 -n 100000 --clean-fraction 0.1 --sigma 3`
    """
    from assay.mixture import bounds as theory
    from assay.mixture.samples import two_levels

    upper = theory.upper_bound_two_levels(num_samples, clean_fraction, sigma, num_features, k, delta, constant)
    level = two_levels(num_samples, clean_fraction, 1.0, sigma)
    lower = theory.lower_bound(level, num_features, k, delta, constant)
    per_clean = theory.noisy_per_clean(sigma, k)
    table = Table("", "subspace", "inside it", "together")
    sizes = [theory.effective_sample_size(level, power) for power in (4, 4 * k - 2)]
    table.add_row("effective samples", *(f"{size:,.1f}" for size in sizes), "")
    table.add_row("noisy samples per clean one", *(f"{value:,.1f}" for value in per_clean), "")
    table.add_row("upper bound on W1", f"{upper.subspace:.4g}", f"{upper.low_dim:.4g}", f"{upper.total:.4g}")
    if num_features == 1:
        line = theory.upper_bound_line(level, k, constant)
        table.add_row("upper bound on a line, with probability 0.75", "", f"{line:.4g}", f"{line:.4g}")
    table.add_row("lower bound on W1", f"{lower.subspace:.4g}", f"{lower.low_dim:.4g}", f"{lower.largest:.4g}")
    console = Console()
    console.print(table)
    console.print(
        f"bounds for atoms in the unit ball, up to the absolute constant, here {constant:g}; "
        f"upper: with probability {1 - delta:g}",
        soft_wrap=True,
    )
    for name, conditions in (
        ("upper", theory.upper_conditions(level, num_features, k, delta)),
        ("lower", theory.lower_conditions(level, num_features, k, delta)),
    ):
        for condition in conditions:
            console.print(f"{name}: {condition}", style=None if condition.holds else "yellow", soft_wrap=True)
