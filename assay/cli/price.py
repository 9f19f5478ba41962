"""`assay price` and `assay plan`: what a noisy image is worth, and what to buy."""

import csv
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from assay.cli.options import output_option

if TYPE_CHECKING:
    from assay.pricing.bounds import Pair
    from assay.pricing.plan import Plan
    from assay.pricing.report import PriceReport
    from assay.pricing.table import Comparable

TableFile = Annotated[
    Path | None,
    typer.Argument(
        help="CSV of results: of a study, of `assay gather`, or with sigma, fd, num_clean and num_noisy."
    ),
]
Paper = Annotated[bool, typer.Option("--paper", help="Use the paper's tables, which ship with the package.")]
Dataset = Annotated[str | None, typer.Option(help="Only this data set (column `dataset`).")]
TableName = Annotated[
    str | None,
    typer.Option("--table", help="Only rows of this table (column `table`); clean_mix if it is there."),
]
MinClean = Annotated[float, typer.Option(help="Only rows with at least this fraction of clean images.")]
Confidence = Annotated[float, typer.Option(help="Confidence of the intervals.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
AsCsv = Annotated[bool, typer.Option("--csv", help="Print CSV instead of tables.")]
Plot = Annotated[Path | None, output_option("Also draw a figure.", "--plot", suffix=".png", metavar="FILE.png")]


def price(
    table: TableFile = None,
    paper: Paper = False,
    dataset: Dataset = None,
    table_name: TableName = None,
    min_clean_fraction: MinClean = 0.1,
    confidence: Confidence = 0.95,
    joint: Annotated[
        bool, typer.Option("--joint", help="Also bound all prices at once, from all pairs.")
    ] = False,
    rows: Annotated[bool, typer.Option("--rows", help="Also show every row beside the law.")] = False,
    effective: Annotated[
        list[str] | None,
        typer.Option(metavar="COUNT@SIGMA", help="Only the theory: n_d and n_l of samples. Repeat; needs --k."),
    ] = None,
    k: Annotated[int | None, typer.Option("--k", help="Number of atoms of the theory's mixture.")] = None,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    plot: Plot = None,
) -> None:
    """How many noisy images replace a clean one, from a table of results.

    Bounds come from comparing clean-only with mixed rows; the law is fitted to all rows.

    Examples:

        assay price --paper

        assay price results.csv --dataset digits --plot price.png

        assay price --effective 6000@1 --effective 54000@2 --k 3
    """
    from assay.pricing import PAPER, price_report, read_comparable

    console = Console()
    _check_form(as_json, as_csv)
    if effective:
        _effective(console, effective, k, as_json, as_csv)
        return
    path = _table_path(table, paper)
    found = read_comparable(path, table=table_name, dataset=dataset, min_clean_fraction=min_clean_fraction)
    with console.status("pricing"):
        reports = [price_report(results, confidence, joint) for results in found]
    if plot:
        from assay.figure import save_png
        from assay.pricing.plot import price_panels

        save_png([panel for report in reports for panel in price_panels(report)], plot)
    if as_json or as_csv:
        flat = [row for report in reports for row in report.price_rows()]
        _print_values(flat, [report.as_dict() for report in reports], as_json)
        return
    for report in reports:
        _print_report(console, report)
        if rows:
            _print_rows(console, report)
    if path == PAPER:
        _print_extremes(console, reports)
    if plot:
        console.print(f"wrote {plot}", soft_wrap=True)


def plan(
    table: TableFile = None,
    paper: Paper = False,
    dataset: Dataset = None,
    table_name: TableName = None,
    min_clean_fraction: MinClean = 0.1,
    num_images: Annotated[
        float | None, typer.Option(help="Size of the full data set, for tables that give fractions.")
    ] = None,
    budget: Annotated[float | None, typer.Option(help="Money to spend.")] = None,
    target_fd: Annotated[float | None, typer.Option(help="Not a budget: the cheapest mix for this FD.")] = None,
    clean_price: Annotated[float, typer.Option(help="Price of a clean image.")] = 1.0,
    noisy_price: Annotated[
        list[str] | None, typer.Option(metavar="PRICE@SIGMA", help="Price of noisy images at a level. Repeat.")
    ] = None,
    have_clean: Annotated[float, typer.Option(help="Clean images at hand already.")] = 0.0,
    max_noisy: Annotated[
        list[str] | None, typer.Option(metavar="COUNT@SIGMA", help="No more than this many of a level. Repeat.")
    ] = None,
    confidence: Confidence = 0.95,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    plot: Plot = None,
) -> None:
    """Which images to buy: the best mix for a budget, or the cheapest mix for a target FD.

    Predicts with the law fitted to a table of results; without a table, to the paper's CIFAR-10.

    Examples:

        assay plan --budget 10000 --clean-price 1.0 --noisy-price 0.2@0.1 --noisy-price 0.05@0.2

        assay plan results.csv --num-images 5000 --target-fd 9.5 --noisy-price 0.1@0.5 --max-noisy 4000@0.5
    """
    from assay.pricing import Market, Offer, best_plan, cheapest_plan, fit_law, read_comparable
    from assay.pricing.report import plan_rows
    from assay.pricing.table import PAPER, PAPER_NUM_IMAGES

    _check_form(as_json, as_csv)
    path = _table_path(table, paper or table is None)
    if path == PAPER:
        dataset = dataset or "cifar10"
        num_images = num_images or PAPER_NUM_IMAGES.get(dataset)
    limits = dict(_at(text, "--max-noisy", "COUNT@SIGMA") for text in max_noisy or [])
    prices = [_at(text, "--noisy-price", "PRICE@SIGMA") for text in noisy_price or []]
    if unknown := set(limits) - {sigma for sigma, _ in prices}:
        raise ValueError(f"--max-noisy for sigma {min(unknown):g}, but no --noisy-price offers that level")
    offers = tuple(Offer(sigma, unit_price, limits.get(sigma, math.inf)) for sigma, unit_price in prices)
    market = Market(Offer(0.0, clean_price), offers, have_clean)
    found = read_comparable(
        path, table=table_name, dataset=dataset, num_images=num_images, min_clean_fraction=min_clean_fraction
    )
    if len(found) > 1:
        names = ", ".join(results.name for results in found)
        if len({results.dataset for results in found}) > 1:
            raise ValueError(f"{path} has several data sets ({names}): choose one with --dataset")
        raise ValueError(
            f"{path} has rows of several extractors ({names}): keep one extractor's rows in the file"
        )
    if not found[0].counted:
        raise ValueError(f"{path} gives fractions in column clean_fraction: say of how many with --num-images")
    law = fit_law(found[0], confidence)
    if budget is not None and target_fd is None:
        best = best_plan(law, market, budget)
    elif target_fd is not None and budget is None:
        best = cheapest_plan(law, market, target_fd)
    else:
        raise ValueError("give either --budget or --target-fd")
    if plot:
        from assay.figure import save_png
        from assay.pricing.plot import plan_panels

        save_png(plan_panels(law, market, best.cost if budget is None else budget, best), plot)
    if as_json or as_csv:
        everything = {
            "dataset": found[0].name, "cost": best.cost, "have_clean": have_clean, "purchases": plan_rows(best),
            "fd": best.prediction.fd, "fd_low": best.prediction.low, "fd_high": best.prediction.high,
            "confidence": confidence, "extrapolates": best.prediction.extrapolates, "law": law.as_dict(),
        }  # fmt: skip
        _print_values(plan_rows(best), everything, as_json)
        return
    console = Console()
    _print_plan(console, best, found[0].name, confidence)
    _warn_of_rows(console, found[0])
    if plot:
        console.print(f"wrote {plot}", soft_wrap=True)


def _effective(console: Console, samples: list[str], k: int | None, as_json: bool, as_csv: bool) -> None:
    from assay.pricing import effective_sizes

    if k is None:
        raise ValueError("--effective needs --k, the number of atoms of the mixture")
    sigma, count = zip(*(_at(text, "--effective", "COUNT@SIGMA") for text in samples), strict=True)
    n_d, n_l = effective_sizes(count, sigma, k)
    if as_json or as_csv:
        values = {"num_samples": sum(count), "k": k, "n_d": n_d, "n_l": n_l}
        _print_values([values], values, as_json)
        return
    console.print(f"{sum(count):,.0f} samples are worth, in samples of the least noise,")
    console.print(
        f"n_d = {n_d:,.1f} for finding the subspace, n_l = {n_l:,.1f} for estimating {k} atoms in it."
    )


def _check_form(as_json: bool, as_csv: bool) -> None:
    if as_json and as_csv:
        raise ValueError("--json and --csv are two forms of the same output: give one of them")


def _table_path(table: Path | None, paper: bool) -> Path:
    from assay.pricing import PAPER

    if (table is None) != paper:
        raise ValueError("give either a CSV file of results or --paper")
    return table or PAPER


def _at(text: str, option: str, form: str) -> tuple[float, float]:
    """Read VALUE@SIGMA as (sigma, value)."""
    value, _, sigma = text.partition("@")
    try:
        return float(sigma), float(value)
    except ValueError:
        raise ValueError(f"{option} {text!r}: expected {form}, as in 0.2@0.1") from None


def _print_values(rows: Sequence[dict[str, Any]], everything: Any, as_json: bool) -> None:
    """Print flat rows as CSV, or everything as JSON, in which infinity is null."""
    if as_json:
        typer.echo(json.dumps(_finite(everything), indent=2, allow_nan=False))
        return
    from assay.outcome import csv_cell

    text = io.StringIO()
    names = dict.fromkeys(name for row in rows for name in row)
    writer = csv.DictWriter(text, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: csv_cell(value) for name, value in row.items()} for row in rows)
    typer.echo(text.getvalue(), nl=False)


def _finite(value: Any) -> Any:
    match value:
        case dict():
            return {name: _finite(inner) for name, inner in value.items()}
        case list() | tuple():
            return [_finite(inner) for inner in value]
        case float() if not math.isfinite(value):
            return None
    return value


def _print_report(console: Console, report: "PriceReport") -> None:
    from assay.pricing.report import inverse

    results, law, percent = report.results, report.law, f"{report.confidence:.0%}"
    columns = {
        "sigma": [f"{b.sigma:g}" for b in report.bounds],
        "bounds": [_ends(inverse(b.lower, b.upper)) for b in report.bounds],
        f"interval {percent}": [_ends(inverse(*b.interval)) if b.interval else "-" for b in report.bounds],
    }
    if joint := report.joint:
        columns["joint"] = [_ends(inverse(*ends)) for ends in zip(joint.lower, joint.upper, strict=True)]
    if law:
        columns["law"] = [f"{1 / law.price(b.sigma):.3f}" for b in report.bounds]
        columns[f"law {percent}"] = [_ends(inverse(*law.price_interval(b.sigma)), 3) for b in report.bounds]
    if any(boxes := [report.box(b) for b in report.bounds]):
        columns["paper's box"] = [_ends(box) if box else "-" for box in boxes]
    title = f"{results.name}: noisy images for one clean image, 1/c"
    console.print(_sheet(title, columns))
    _warn_of_rows(console, results)
    for b in report.bounds:
        low, high = inverse(b.lower, b.upper)
        for sign, end, pair in ((">=", low, b.upper_pair), ("<=", high, b.lower_pair)):
            if pair:
                _say(console, f"sigma {b.sigma:g}: 1/c {sign} {end:.4g}, since {_pair(results, pair)}")
    for b in report.bounds:
        if b.contradiction:
            _warn(console, f"sigma {b.sigma:g}: the evidence contradicts itself: {b.contradiction}.")
        if (box := report.box(b)) and report.differs_from_box(b):
            ours = _ends(inverse(b.lower, b.upper))
            _warn(console, f"sigma {b.sigma:g}: the paper's box says {_ends(box)}, but its table gives {ours}.")
    if joint and joint.violated:
        unit = "standard errors" if results.has_std else "in FD"
        _warn(
            console,
            f"All pairs together contradict each other; the joint bounds take only those more than "
            f"{joint.margin:.2g} {unit} apart. The clearest that do not fit:",
        )
        for pair in joint.violated:
            _say(console, f"  {_pair(results, pair)}")
    if not law or not report.left_out:
        _say(console, f"{len(results)} rows are too few for a law.")
        return
    p, error, outside = law.as_dict(), report.left_out.error, report.left_out.extrapolates
    unit = f"units of {law.num_images:,.0f} images" if results.counted else "parts of the data set"
    _say(
        console,
        f"law: FD = {p['floor']:.4g} + {p['amplitude']:.4g} n_eff^-{p['exponent']:.3g} + "
        f"{p['details']:.3g} / n_clean,  n_eff = n_clean + c n_noisy,\n"
        f"     c = (1 + (sigma / {p['sigma_floor']:.3g})^2)^-{p['steepness']:.3g},  n in {unit}",
    )
    inside = max((e for e, reasons in zip(error, outside, strict=True) if not reasons), default=math.nan)
    _say(
        console,
        f"Left out one at a time, rows are missed by {sorted(error)[len(error) // 2]:.2%} in the median and by "
        f"{inside:.1%} at most, not counting {sum(map(bool, outside))} that are extrapolations "
        f"(up to {max(error):.0%}).",
    )
    theory = report.theory[0]
    _say(
        console,
        f"theory: among whole k, k = {theory.k} fits best (sigma_floor {theory.sigma_floor:.3g}, median error "
        f"{theory.error:.2%}); the law's own steepness would be k = {(p['steepness'] + 1) / 2:.2f}.",
    )


def _print_rows(console: Console, report: "PriceReport") -> None:
    rows = report.fitted_rows()
    names = {"line": "line", "clean": "num_clean", "noisy": "num_noisy", "sigma": "sigma"}
    names |= {"FD": "fd", "law": "fitted", "left out": "left_out"}
    columns = {title: [f"{row[name]:,.4g}" for row in rows] for title, name in names.items()}
    columns["error"] = [f"{row['left_out'] / row['fd'] - 1:+.1%}" for row in rows]
    columns["note"] = ["extrapolation" if row["extrapolates"] else "" for row in rows]
    console.print(_sheet(f"{report.results.name}: every row beside the law", columns))


def _print_extremes(console: Console, reports: "list[PriceReport]") -> None:
    """The paper's two extreme settings, which no fit has seen, beside the prediction."""
    from assay.pricing import PAPER, read_comparable

    laws = {report.results.name: report.law for report in reports}
    for results in read_comparable(PAPER, table="extreme", min_clean_fraction=0.0):
        law = laws.get(results.name)
        for i in range(len(results)) if law else ():
            assert law is not None
            guess = law.predict(results.num_clean[i], [(results.num_noisy[i], results.sigma[i])])
            _say(
                console,
                f"not in the fit, {results.name}, {results.setting(i)}: predicted {guess.fd:.2f} "
                f"{_ends((guess.low, guess.high), 3)}, measured {results.fd[i]:.2f} "
                f"({guess.fd / results.fd[i] - 1:+.1%})",
            )
            _warn(console, *guess.extrapolates, before="  an extrapolation: ")


def _print_plan(console: Console, best: "Plan", name: str, confidence: float) -> None:
    kinds = best.purchases
    columns = {
        "kind": [f"noise {kind.offer.sigma:g}" if kind.offer.sigma else "clean" for kind in kinds],
        "unit price": [f"{kind.offer.unit_price:g}" for kind in kinds],
        "buy": [f"{math.floor(kind.num_images + 1e-6):,}" for kind in kinds],
        "cost": [f"{kind.cost:,.2f}" for kind in kinds],
        "FD per next 1.00": [f"-{kind.next_dollar:.3g}" if kind.next_dollar else "sold out" for kind in kinds],
        "not worth it above": [
            f"{p:.3g}" if math.isfinite(p := kind.break_even) else "any price" for kind in kinds
        ],
    }
    console.print(_sheet(f"What to buy for {best.cost:,.2f} (law of {name})", columns))
    if best.have_clean:
        _say(console, f"The {best.have_clean:,.0f} clean images at hand are used as well.")
    fd = best.prediction
    _say(console, f"Predicted FD {fd.fd:.3f}; {confidence:.0%} of runs in [{fd.low:.3f}, {fd.high:.3f}].")
    _warn(console, *fd.extrapolates, before="This is an extrapolation: ")


def _sheet(title: str, columns: dict[str, list[str]]) -> Table:
    sheet = Table(*columns, title=title, box=SIMPLE_HEAD)
    for row in zip(*columns.values(), strict=True):
        sheet.add_row(*row)
    return sheet


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False)


def _warn(console: Console, *texts: str, before: str = "") -> None:
    if texts:
        console.print(before + "; ".join(texts), style="yellow", markup=False, highlight=False)


def _warn_of_rows(console: Console, results: "Comparable") -> None:
    if results.num_many_levels:
        _warn(
            console,
            f"{results.num_many_levels} row(s) of {results.name} have several noise levels and are left out: a "
            "price compares clean images with noisy ones of one level.",
        )
    if results.num_without_std:
        _warn(
            console,
            f"{results.num_without_std} row(s) of {results.name} have no standard deviation and were given the "
            "largest of the others: fill them in for narrower intervals.",
        )


def _ends(ends: tuple[float, float], digits: int = 4) -> str:
    return "[" + ", ".join(f"{end:.{digits}g}" for end in ends) + "]"


def _pair(results: "Comparable", pair: "Pair") -> str:
    sure = "" if pair.probability is None else f", p = {pair.probability:.2f}"
    better, worse = (f"{results.fd[i]:.4g} ({results.setting(i)})" for i in (pair.better, pair.worse))
    return f"FD {better} <= {worse}{sure}"
