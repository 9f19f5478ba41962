"""`assay price` and `assay plan`: what is a noisy image worth, and which images should I buy?"""

import csv
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from assay.cli.options import output_option

Currency = Literal["score", "score_above", "fd"]

if TYPE_CHECKING:
    from assay.pricing.bounds import Pair
    from assay.pricing.plan import Plan
    from assay.pricing.report import PriceReport
    from assay.pricing.table import Comparable

TableFile = Annotated[
    Path | None,
    typer.Argument(
        help="CSV of results from a study or `assay gather`, or with sigma, fd or score, num_clean, num_noisy."
    ),
]
By = Annotated[
    Currency | None,
    typer.Option(
        help="Compare runs by the held-out score, by its part above the highest noise (what noisy images can "
        "teach directly), or by FD. Default: the score if the table has it."
    ),
]
Paper = Annotated[bool, typer.Option("--paper", help="Use the tables of the paper, which come with Assay.")]
Dataset = Annotated[str | None, typer.Option(help="Only this data set (column `dataset`).")]
TableName = Annotated[
    str | None,
    typer.Option("--table", help="Only rows of this table (column `table`). Default: clean_mix, if any."),
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
    by: By = None,
    min_clean_fraction: MinClean = 0.1,
    confidence: Confidence = 0.95,
    joint: Annotated[
        bool, typer.Option("--joint", help="Also compute bounds from all pairs of rows together.")
    ] = False,
    rows: Annotated[
        bool, typer.Option("--rows", help="Also list every mix with the curve and every row with the law.")
    ] = False,
    effective: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COUNT@SIGMA",
            help="Only the theory: n_d and n_l of samples. Repeatable; needs --k.",
        ),
    ] = None,
    k: Annotated[int | None, typer.Option("--k", help="Number of atoms of the mixture in the theory.")] = None,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    plot: Plot = None,
) -> None:
    """Estimate how many noisy images replace a clean one, from a table of results.

    Bounds compare clean-only with mixed rows. The curve finds how many clean images alone do as well as a mix.
    The law is fitted to all rows. All three estimate the same number, by the held-out score or by FD.

    Examples:

        assay price --paper

        assay price results.csv --by score --dataset digits --plot price.png

        assay price --effective 6000@1 --effective 54000@2 --k 3
    """
    from assay.outcome import CURRENCIES
    from assay.pricing import PAPER, price_report, read_comparable

    console = Console()
    _check_form(as_json, as_csv)
    if effective:
        _effective(console, effective, k, as_json, as_csv)
        return
    path = _table_path(table, paper)
    found = read_comparable(
        path,
        table=table_name,
        dataset=dataset,
        min_clean_fraction=min_clean_fraction,
        currency=by and CURRENCIES[by],
    )
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
    by: By = None,
    min_clean_fraction: MinClean = 0.1,
    num_images: Annotated[
        float | None, typer.Option(min=1, help="Size of the full data set, for tables that give fractions.")
    ] = None,
    budget: Annotated[float | None, typer.Option(help="Money to spend on images.")] = None,
    target: Annotated[
        float | None,
        typer.Option(help="Instead of a budget: the score or FD to reach at the lowest cost."),
    ] = None,
    clean_price: Annotated[float, typer.Option(help="Price of a clean image.")] = 1.0,
    noisy_price: Annotated[
        list[str] | None,
        typer.Option(metavar="PRICE@SIGMA", help="Price of a noisy image of this level. Repeatable."),
    ] = None,
    have_clean: Annotated[float, typer.Option(help="Clean images you already have.")] = 0.0,
    max_noisy: Annotated[
        list[str] | None,
        typer.Option(metavar="COUNT@SIGMA", help="Most images of this level that can be bought. Repeatable."),
    ] = None,
    confidence: Confidence = 0.95,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    plot: Plot = None,
) -> None:
    """Find which images to buy: the best mix for a budget, or the cheapest mix for a target score or FD.

    Predictions come from the law fitted to a table of results, by default the paper's CIFAR-10.

    Examples:

        assay plan --budget 10000 --clean-price 1.0 --noisy-price 0.2@0.1 --noisy-price 0.05@0.2

        assay plan results.csv --num-images 5000 --target 9.5 --noisy-price 0.1@0.5 --max-noisy 4000@0.5
    """
    from assay.outcome import CURRENCIES
    from assay.pricing import Market, Offer, best_plan, cheapest_plan, price_report
    from assay.pricing.report import plan_rows
    from assay.pricing.table import PAPER, PAPER_NUM_IMAGES, read_one

    _check_form(as_json, as_csv)
    path = _table_path(table, paper or table is None)
    if path == PAPER:
        dataset = dataset or "cifar10"
        num_images = PAPER_NUM_IMAGES.get(dataset) if num_images is None else num_images
    limits = dict(_at(text, "--max-noisy", "COUNT@SIGMA") for text in max_noisy or [])
    prices = [_at(text, "--noisy-price", "PRICE@SIGMA") for text in noisy_price or []]
    if unknown := set(limits) - {sigma for sigma, _ in prices}:
        raise ValueError(f"--max-noisy for sigma {min(unknown):g}, but no --noisy-price offers that level")
    offers = tuple(Offer(sigma, unit_price, limits.get(sigma, math.inf)) for sigma, unit_price in prices)
    market = Market(Offer(0.0, clean_price), offers, have_clean)
    results = read_one(
        path,
        table=table_name,
        dataset=dataset,
        num_images=num_images,
        min_clean_fraction=min_clean_fraction,
        currency=by and CURRENCIES[by],
    )
    if not results.counted:
        raise ValueError(f"{path} gives fractions of a data set: give its size with --num-images")
    report = price_report(results, confidence)
    if report.law is None:
        raise ValueError(report.no_law)
    law = report.law
    if budget is not None and target is None:
        best = best_plan(law, market, budget)
    elif target is not None and budget is None:
        best = cheapest_plan(law, market, target)
    else:
        raise ValueError("give either --budget or --target")
    if plot:
        from assay.figure import save_png
        from assay.pricing.plot import plan_panels

        save_png(plan_panels(law, market, best.cost if budget is None else budget, best), plot)
    if as_json or as_csv:
        everything = {
            "dataset": results.name, "by": results.metric, "cost": best.cost, "have_clean": have_clean,
            "purchases": plan_rows(best), "value": best.prediction.value, "value_low": best.prediction.low,
            "value_high": best.prediction.high, "confidence": confidence, "fit": report.fit_sentence(),
            "extrapolates": best.prediction.extrapolates, "doubts": report.doubts(), "law": law.as_dict(),
        }  # fmt: skip
        _print_values(plan_rows(best), everything, as_json)
        return
    console = Console()
    _print_plan(console, best, report)
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
    from assay.files import csv_cell

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
        f"bounds {percent}": [_ends(inverse(*b.interval)) if b.interval else "-" for b in report.bounds],
    }
    if joint := report.joint:
        columns["joint"] = [_ends(inverse(*ends)) for ends in zip(joint.lower, joint.upper, strict=True)]
    if curve := report.curve:
        columns["curve"] = ["-" if c.worth is None else f"{inverse(c.worth, c.worth)[0]:.3g}" for c in curve]
        columns[f"curve {percent}"] = [_ends(inverse(*c.interval), 3) if c.interval else "-" for c in curve]
    if law:
        worths = [report.law_worth(b.sigma) for b in report.bounds]
        columns["law"] = [f"{inverse(worth, worth)[0]:.3g}" for worth, _ in worths]
        columns[f"law {percent}"] = [_ends(inverse(*ends), 3) for _, ends in worths]
    if any(boxes := [report.box(b) for b in report.bounds]):
        columns["paper's box"] = [_ends(box) if box else "-" for box in boxes]
    console.print(
        _sheet(f"{results.name}, by {results.called}: noisy images that replace a clean one", columns)
    )
    for b in report.bounds:
        _say(console, report.sentence(b.sigma))
    for b in report.bounds:
        low, high = inverse(b.lower, b.upper)
        for sign, end, pair in ((">=", low, b.upper_pair), ("<=", high, b.lower_pair)):
            if pair and math.isfinite(end):
                _say(console, f"sigma {b.sigma:g}: bound {sign} {end:.4g}, since {_pair(results, pair)}")
    _warn(console, *(f"{doubt}." for doubt in report.doubts()), between="\n")
    for b in report.bounds:
        if (box := report.box(b)) and report.differs_from_box(b):
            ours = _ends(inverse(b.lower, b.upper))
            _warn(console, f"sigma {b.sigma:g}: the paper's box says {_ends(box)}, but its table gives {ours}.")
    if joint and joint.violated:
        unit = "standard errors" if results.has_std else f"in {results.metric}"
        _warn(
            console,
            f"All pairs together contradict each other; the joint bounds take only those more than "
            f"{joint.margin:.2g} {unit} apart. The clearest that do not fit:",
        )
        for pair in joint.violated:
            _say(console, f"  {_pair(results, pair)}")
    if not law:
        return
    p = law.as_dict()
    unit = f"units of {law.num_images:,.0f} images" if results.counted else "parts of the data set"
    weights = ", ".join(
        f"{law.weight(b.sigma):.3g} {_ends(law.weight_interval(b.sigma), 3)} at {b.sigma:g}"
        for b in report.bounds
    )
    _say(
        console,
        f"law: {results.metric} = {p['floor']:.4g} + {p['amplitude']:.4g} n_eff^-{p['exponent']:.3g} + "
        f"{p['details']:.3g} / n_clean,  n_eff = n_clean + c n_noisy,\n"
        f"     c = (1 + (sigma / {p['sigma_floor']:.3g})^2)^-{p['steepness']:.3g},  n in {unit}\n"
        f"     The weight c is {weights}: what a noisy image adds to n_eff, and not the price above,\n"
        "     since n_clean also counts in the last term. `assay plan` uses the whole law.",
    )
    _say(console, report.fit_sentence())
    theory = report.theory[0]
    _say(
        console,
        f"theory: among whole k, k = {theory.k} fits best (sigma_floor {theory.sigma_floor:.3g}, median error "
        f"{theory.error:.2%}); the law's own steepness would be k = {(p['steepness'] + 1) / 2:.2f}.",
    )


def _print_rows(console: Console, report: "PriceReport") -> None:
    """Compare every mix with the clean images that do as well, and every row with the law."""
    results, percent = report.results, f"{report.confidence:.0%}"
    if mixes := [mix for curve in report.curve for mix in curve.mixes]:
        columns = {
            "mix": [str(results.setting(mix.row)) for mix in mixes],
            results.metric: [f"{results.value[mix.row]:.4g}" for mix in mixes],
            "clean images that do as well": [
                "beyond the curve" if mix.outside else f"{mix.num_images:,.4g}" for mix in mixes
            ],
            percent: [_ends((mix.low, mix.high)) if results.has_std else "-" for mix in mixes],
        }
        console.print(_sheet(f"{results.name}: every mix on the clean-only curve", columns))
    if not (rows := report.fitted_rows()):
        return
    names = {"line": "line", "clean": "num_clean", "noisy": "num_noisy", "sigma": "sigma"}
    names |= {results.metric: "value", "law": "fitted", "left out": "left_out"}
    columns = {title: [f"{row[name]:,.4g}" for row in rows] for title, name in names.items()}
    columns["error"] = [f"{row['left_out'] / row['value'] - 1:+.1%}" for row in rows]
    columns["note"] = ["extrapolation" if row["extrapolates"] else "" for row in rows]
    console.print(_sheet(f"{results.name}: every row and the law", columns))


def _print_extremes(console: Console, reports: "list[PriceReport]") -> None:
    """Compare the prediction with the paper's two extreme settings, which no fit has seen."""
    from assay.pricing import PAPER, read_comparable

    laws = {report.results.name: report.law for report in reports}
    for results in read_comparable(PAPER, table="extreme", min_clean_fraction=0.0):
        law = laws.get(results.name)
        for i in range(len(results)) if law else ():
            assert law is not None
            guess = law.predict(results.num_clean[i], [(results.num_noisy[i], results.sigma[i])])
            _say(
                console,
                f"not in the fit, {results.name}, {results.setting(i)}: predicted {guess.value:.2f} "
                f"{_ends((guess.low, guess.high), 3)}, measured {results.value[i]:.2f} "
                f"({guess.value / results.value[i] - 1:+.1%})",
            )
            _warn(console, *guess.extrapolates, before="  an extrapolation: ")


def _print_plan(console: Console, best: "Plan", report: "PriceReport") -> None:
    kinds, results = best.purchases, report.results
    columns = {
        "kind": [f"noise {kind.offer.sigma:g}" if kind.offer.sigma else "clean" for kind in kinds],
        "unit price": [f"{kind.offer.unit_price:g}" for kind in kinds],
        "buy": [f"{math.floor(kind.num_images + 1e-6):,}" for kind in kinds],
        "cost": [f"{kind.cost:,.2f}" for kind in kinds],
        f"{results.metric} per next 1.00": [
            f"-{kind.next_dollar:.3g}" if kind.next_dollar else "sold out" for kind in kinds
        ],
        "worth buying up to": [
            f"{p:.3g}" if math.isfinite(p := kind.break_even) else "any price" for kind in kinds
        ],
    }
    console.print(_sheet(f"What to buy for {best.cost:,.2f} (by {results.called} of {results.name})", columns))
    if best.have_clean:
        _say(console, f"The {best.have_clean:,.0f} clean images you have are used as well.")
    guess = best.prediction
    interval = f"{report.confidence:.0%} of runs in [{guess.low:.3f}, {guess.high:.3f}]"
    _say(console, f"Predicted {results.metric} {guess.value:.3f}; {interval}.")
    _say(console, f"By the law fitted to {len(results)} settings. {report.fit_sentence()}")
    _warn(console, *guess.extrapolates, before="This is an extrapolation: ")
    _warn(console, *(f"{doubt}." for doubt in report.doubts()), between="\n")


def _sheet(title: str, columns: dict[str, list[str]]) -> Table:
    sheet = Table(*columns, title=title, box=SIMPLE_HEAD)
    for row in zip(*columns.values(), strict=True):
        sheet.add_row(*map(Text, row))  # not markup, as "[1, 2]" would be
    return sheet


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False)


def _warn(console: Console, *texts: str, before: str = "", between: str = "; ") -> None:
    if texts:
        console.print(before + between.join(texts), style="yellow", markup=False, highlight=False)


def _ends(ends: tuple[float, float], digits: int = 4) -> str:
    if math.isinf(ends[0]):
        return "worth nothing"
    return "[" + ", ".join(f"{end:.{digits}g}" for end in ends) + "]"


def _pair(results: "Comparable", pair: "Pair") -> str:
    sure = "" if pair.probability is None else f", p = {pair.probability:.2f}"
    better, worse = (f"{results.value[i]:.4g} ({results.setting(i)})" for i in (pair.better, pair.worse))
    return f"{results.metric} {better} <= {worse}{sure}"
