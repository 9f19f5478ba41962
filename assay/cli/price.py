"""`assay price` and `assay plan`: what is a noisy image worth, and which images should I buy?"""

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from assay.cli.options import output_option
from assay.errors import AssayError, check

if TYPE_CHECKING:
    from assay.pricing import Prices, Quote, Vendor

Source = Annotated[
    Path | None,
    typer.Argument(
        metavar="[IMAGES|RESULTS]",
        help="For a quote: a store with clean images, or an array of them (.npy, scaled to [-1, 1]). For a "
        "price: the folder of a study, or a CSV with sigma, num_clean, num_noisy and fd or held_out_loss "
        "(usual names will do: noise, n_clean, n_noisy, fid).",
    ),
]
_LAW_OR_PAIRS = (
    "The law fits one curve to the whole table, pairs compare two runs, and the paper's boxes are its own "
    "reading of pairs. Where they disagree, single runs cannot tell which is right (docs/errata.md)."
)
Paper = Annotated[bool, typer.Option("--paper", help="Use the tables of the paper.")]
Dataset = Annotated[str | None, typer.Option(help="Only this data set (column `dataset`).")]
NumImages = Annotated[float | None, typer.Option(min=1, help="Full size, for tables that give fractions.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Plot = Annotated[Path | None, output_option("Also draw a figure.", "--plot", suffix=".png", metavar="FILE.png")]


def price(
    source: Source = None,
    noise: Annotated[
        list[float] | None,
        typer.Option(min=0, help="Quote noisy images of this level. Repeatable. Default: the store's own."),
    ] = None,
    paper: Paper = False,
    dataset: Dataset = None,
    num_images: NumImages = None,
    confidence: Annotated[float, typer.Option(min=0.5, max=0.999, help="Of the intervals.")] = 0.95,
    details: Annotated[bool, typer.Option("--details", help="Also print cross-checks and reasons.")] = False,
    as_json: AsJson = False,
    plot: Plot = None,
) -> None:
    """Find how many noisy images replace a clean one.

    From images: a quote in seconds, from the clean ones alone, at the levels of --noise or of the store's noisy
    images, of which three stand for many. From results: one price with its interval for each goal.

    Examples:

        assay price stores/scans

        assay price stores/clean --noise 0.2

        assay price out/scans --details --plot worth.png

        assay price --paper
    """
    from assay.figure import save_png
    from assay.pricing import words

    console, found = Console(), list["Prices"]()
    if noise or (source and _are_images(source)):
        quoted = _quote(source, noise or None)
        panels, rows, lines = words.quote_panels(quoted), words.quote_rows(quoted), words.quote_lines(quoted)
    else:
        found, lines = _price_all(_results(source, paper), dataset, num_images, confidence), []
        panels = [panel for each in found for panel in words.price_panels(each)]
        rows = [row for each in found for row in words.price_rows(each)]
    if plot:
        save_png(panels, plot)
        console.print(f"wrote {plot}", soft_wrap=True)
    if as_json:
        _print_json(rows)
        return
    _say(console, *lines)
    for each in found:
        _say(console, *words.price_lines(each))
        if details:
            table = words.detail_table(each)
            sheet = Table(*table.header, box=SIMPLE_HEAD)
            for row in table.rows:
                sheet.add_row(*map(Text, row))  # not markup, as "[1, 2]" would be
            console.print(sheet)
            _say(console, *words.doubts(each), *words.extremes(each), *[_LAW_OR_PAIRS] * each.from_paper)


def plan(
    source: Source = None,
    paper: Paper = False,
    dataset: Dataset = None,
    num_images: NumImages = None,
    goal: Annotated[
        Literal["structure", "everything", "looks"] | None,
        typer.Option(
            help="What to buy for. Default: the first of structure, looks, everything that is decided."
        ),
    ] = None,
    vendors: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE.csv|PRICE[@SIGMA]",
            help="A CSV with name, sigma (empty for clean), price, min_images, max_images; or an offer: 1 for "
            "clean images, 0.2@0.1 for noisy ones. Repeatable.",
        ),
    ] = None,
    budget: Annotated[float | None, typer.Option(min=0, help="Money to spend on images.")] = None,
    target: Annotated[float | None, typer.Option(help="Instead of a budget: the result to reach.")] = None,
    have_clean: Annotated[float, typer.Option(min=0, help="Clean images you already have.")] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Find which images to buy: the best mix for a budget, or the cheapest mix for a target.

    It plans by results, or by a quote for the clean images of a store, and says how sure the mix is: the best
    few, the chance that each is best or reaches the target, and where the best counts lie. With --paper it
    plans by the paper's results, of CIFAR-10 unless --dataset names another.

    Examples:

        assay plan --paper --budget 10000 --vendors 1 --vendors 0.2@0.1 --vendors 0.05@0.2

        assay plan stores/scans --vendors vendors.csv --budget 500 --have-clean 400
    """
    from assay.pricing import plan as find_plan
    from assay.pricing import price as find_price
    from assay.pricing.words import plan_lines, plan_rows

    offers = [offer for text in vendors or [] for offer in _vendors(text)]
    cure = "give what is for sale, e.g. vendors = 1 for clean images and vendors = 0.2@0.1, or a CSV file"
    check([(not offers, AssayError("there are no offers", key="vendors", cure=cure))])
    known: Quote | Prices
    if _are_images(results := _results(source, paper)):
        known = _quote(results, [offer.sigma for offer in offers if offer.sigma])
    else:
        known = find_price(results, dataset, num_images)
    found = find_plan(known, offers, budget, target, have_clean, goal)
    if as_json:
        _print_json(plan_rows(found))
    else:
        _say(Console(), *plan_lines(found))


def _are_images(source: Path) -> bool:
    """Whether a quote is asked for, not a price from results."""
    return source.suffix == ".npy" or (source / "meta.json").is_file()


def _results(source: Path | None, paper: bool) -> Path:
    """The results to read, perhaps the paper's."""
    from assay.pricing import PAPER

    if (source is None) != paper:
        raise AssayError("give results, or images for a quote, or --paper", key="source")
    return source or PAPER


def _price_all(
    results: Path, dataset: str | None, num_images: float | None, confidence: float
) -> "list[Prices]":
    """The prices of all data sets; of a study with too few results, an error says what is left to run."""
    from assay.pricing import price_all

    try:
        return price_all(results, dataset, num_images, confidence)
    except AssayError as error:
        from assay.study import open_study

        with suppress(AssayError, OSError):  # of what is no study
            if error.key == "table":
                error.cure = open_study(results / "study.toml", results).to_finish() or error.cure
        raise


def _quote(source: Path | None, noise: Sequence[float] | None) -> "Quote":
    """A quote at these levels; without any, at those of a store's noisy images, as a study has them."""
    import numpy as np

    from assay.data import open_store
    from assay.files import decoding
    from assay.pricing import quote
    from assay.study.spec import bin_size, level_bins

    if source is None:
        raise AssayError("a quote needs clean images", key="source", cure="give a store or an .npy file")
    if source.suffix == ".csv" or (source / "results.csv").is_file():
        cure = "leave it out; `assay plan` reads the worth of a level between two that have results"
        raise AssayError("is for quotes from images; results have levels of their own", key="noise", cure=cure)
    store = None if source.suffix == ".npy" else open_store(source)
    if noise is None:
        noise = [bin_size(store.sigma_tn, each)[1] for each in level_bins(store.sigma_tn)] if store else ()
        what, cure = "has no noisy images, whose level could be quoted", "give the level: noise = 0.2"
        check([(not noise, AssayError(what, path=source, key="noise", cure=cure))])
    if store:
        return quote(store, noise)
    with decoding(source, "give an array of images"):
        images = np.load(source, mmap_mode="r")
    return quote(images, noise)


def _vendors(text: str) -> "list[Vendor]":
    """Read a file of vendors, or PRICE or PRICE@SIGMA."""
    from assay.pricing import Vendor
    from assay.pricing.plan import read_vendors

    if text.lower().endswith(".csv"):
        return read_vendors(text)
    amount, _, sigma = text.partition("@")
    try:
        return [Vendor(price=float(amount), sigma=float(sigma or 0))]
    except ValueError:
        raise AssayError(f"{text!r} is neither a CSV file nor PRICE or PRICE@SIGMA", key="vendors") from None


def _print_json(rows: Sequence[dict[str, Any]]) -> None:
    """In JSON infinity is null."""

    def plain(value: Any) -> Any:
        return None if isinstance(value, float) and not math.isfinite(value) else value

    rows = [{name: plain(value) for name, value in row.items()} for row in rows]
    typer.echo(json.dumps(rows, indent=2, allow_nan=False))


def _say(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
