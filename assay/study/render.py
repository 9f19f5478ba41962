"""The page of a report: one HTML file that opens offline and runs no script but its own.

Figures are described once, as `assay.figure.Panel`; here some 150 lines of JavaScript draw them. Those
instead of plotly's bundle keep the page near 100 KB instead of 5 MB, follow the reader's light or dark, reflow
at phone width, and let the page forbid all other scripts (by their hash).
"""

import base64
import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from assay.figure import COLOURS, Panel
from assay.outcome import Currency, Outcome
from assay.pricing.law import Law
from assay.pricing.report import PriceReport, between, inverse
from assay.study.tables import Table, averages, headline, headline_settings, headline_sigma, headline_title

_PAGE = Path(__file__).with_name("page")


@dataclass(frozen=True)
class Picture:
    """A PNG for the page; `alt` says in words what it shows."""

    title: str
    alt: str
    path: Path

    @property
    def data(self) -> str:
        """The file as a data URL."""
        return "data:image/png;base64," + base64.b64encode(self.path.read_bytes()).decode()


@dataclass(frozen=True)
class Subject:
    """One data set of a report. `priced` is a sentence when the table allows no comparison at all.

    `above`, beside the score: the same by its part above the noise.
    """

    name: str
    slug: str
    outcomes: list[Outcome]
    currency: Currency
    priced: PriceReport | str
    above: PriceReport | None
    command: str
    tables: list[Table]
    panels: dict[str, Panel]
    samples: list[Picture]
    noise: Picture | None

    @property
    def metric(self) -> str:
        """What the currency is called."""
        return self.currency.title(self.outcomes[0])

    @property
    def called(self) -> str:
        """The same in a sentence."""
        return self.metric if isinstance(self.priced, str) else self.priced.results.called


def price_sentence(subject: Subject) -> str:
    """What a clean image is worth at the headline's noise, or why that is not known."""
    priced = subject.priced
    if isinstance(priced, str):
        return priced
    sigma = priced.bounds[-1].sigma
    said = priced.sentence(sigma)
    if priced.law and not priced.law_is_open(sigma):
        worth, ends = priced.law_worth(sigma)
        said += f" The law fitted to all settings says {1 / worth:.3g} ({between(*inverse(*ends))})."
    return said + (f" {subject.above.sentence(sigma)}" if subject.above else "")


def page(title: str, subjects: list[Subject]) -> str:
    """The page. It may run and load nothing but what it carries: its policy names its script by hash."""
    style, script = ((_PAGE / name).read_text() for name in ("report.css", "report.js"))
    environment = Environment(
        loader=FileSystemLoader(_PAGE), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template("report.html.j2").render(
        title=title,
        style=style,
        script=script,
        style_hash=_csp_hash(style),
        script_hash=_csp_hash(script),
        subjects=[_shown(subject) for subject in subjects],
    )


def _csp_hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _shown(subject: Subject) -> dict[str, Any]:
    """A subject in the form that the template takes: words, cells, and plain values for the script."""
    priced, values = subject.priced, averages(subject.outcomes, subject.currency)
    roles = headline_settings(values)
    shown_values = {role: (headline_title(setting), values[setting]) for role, setting in roles.items()}
    worst = max((value.mean for _, value in shown_values.values()), default=1.0)
    data: dict[str, Any] = {
        "panels": {name: _plain_panel(panel) for name, panel in subject.panels.items()},
        "metric": subject.metric, "command": subject.command, "law": None, "bounds": [],
    }  # fmt: skip
    shown: dict[str, Any] = {
        "subject": subject, "metric": subject.metric, "called": subject.called, "sigma": headline_sigma(values),
        "headline": headline(subject.outcomes, subject.currency),
        "bars": [
            (title, str(value), f"{100 * value.mean / worst:.2f}", role == "mix")
            for role, (title, value) in shown_values.items()
        ],
        "mix": shown_values.get("mix"), "alone": shown_values.get("few_clean"),
        "prices": price_sentence(subject), "worth": None, "price_rows": [], "fitted": [], "notes": [],
        "law": None, "missing": priced if isinstance(priced, str) else "",
        "facts": _facts(subject.outcomes), "data": data,
    }  # fmt: skip
    if isinstance(priced, str):
        return shown
    sigma = priced.bounds[-1].sigma
    if (
        (ends := priced.estimate(sigma).ends)
        and math.isfinite(ends[0])
        and (ends[0] > 1 or math.isfinite(ends[1]))
    ):
        shown["worth"] = _ends(ends), sigma
    shown |= {"price_rows": _price_rows(priced), "percent": f"{priced.confidence:.0%}"}
    shown["notes"] = [f"At noise {b.sigma:g}: {b.contradiction}." for b in priced.bounds if b.contradiction]
    shown["notes"] += [
        f"At noise {b.sigma:g} the paper's box and the paper's table differ; the bounds are the table's."
        for b in priced.bounds
        if priced.differs_from_box(b)
    ]
    data["bounds"] = [
        {"sigma": b.sigma, "low": ends[0], "high": ends[1]}
        for b in priced.bounds
        if (ends := b.interval or ((b.lower, b.upper) if not b.contradiction else None))
    ]
    if priced.law and priced.left_out:
        error, outside = priced.left_out.error, priced.left_out.extrapolates
        shown["law"] = priced.law.as_dict()
        shown["left_out"] = f"{np.median(error):.1%}", len(error), sum(map(bool, outside))
        shown["fitted"] = [
            (str(priced.results.setting(i)), *(f"{row[k]:.4g}" for k in ("value", "fitted", "left_out")),
             f"{row['left_out'] / row['value'] - 1:+.1%}", "extrapolation" if row["extrapolates"] else "")
            for i, row in enumerate(priced.fitted_rows())
        ]  # fmt: skip
        sigmas = [b.sigma for b in priced.bounds if not priced.law_is_open(b.sigma)]
        if not priced.results.counted:
            shown["missing"] = "The table gives fractions: a plan must know of how many images."
        elif sigmas:
            data["law"] = _plain_law(priced.law, sigmas)
        else:
            shown["missing"] = (
                "The law fitted to these results leaves open what a noisy image is worth, so any plan would be "
                "a guess. More training, more seeds or more values in grid.clean_fractions would tell."
            )
    else:
        shown["missing"] = (
            f"A planner needs a fitted law. {priced.no_law[0].upper()}{priced.no_law[1:]}: more values in "
            "grid.clean_fractions give it both."
        )
    return shown


def _facts(outcomes: Sequence[Outcome]) -> list[str]:
    """How the numbers came about."""
    facts = ["1 result" if len(outcomes) == 1 else f"{len(outcomes)} results"]
    settings = [outcome.setting for outcome in outcomes]
    if num_images := outcomes[0].evaluation.num_images:
        seeds = len({setting.seed for setting in settings})
        facts.append(f"{seeds} training seed{'s' if seeds > 1 else ''}")
        facts.append(f"{num_images:,} samples for each distance")
    if total := max((s.num_clean + s.num_noisy for s in settings if s.counted), default=0):
        facts.append(f"up to {total:,.0f} training images")
    if seconds := sum((o.train_seconds or 0) + (o.sample_seconds or 0) for o in outcomes):
        spent = f"{seconds / 3600:.1f} hours" if seconds > 5400 else f"{seconds / 60:.0f} minutes"
        facts.append(f"{spent if seconds > 90 else f'{seconds:.0f} seconds'} of computing")
    return facts


def _price_rows(priced: PriceReport) -> list[tuple[str, ...]]:
    rows = []
    for b, curve in zip_longest(priced.bounds, priced.curve):
        bounds = "contradictory" if b.contradiction else _ends(inverse(b.lower, b.upper))
        cells = [f"{b.sigma:g}", bounds, "–", "–", "–", ""]
        if b.interval:
            cells[2] = _ends(inverse(*b.interval))
        if curve and curve.worth is not None:
            ends = f" ({_ends(inverse(*curve.interval))})" if curve.interval else ""
            cells[3] = f"{_price(curve.worth)}{ends}"
        if priced.law:
            worth, interval = priced.law_worth(b.sigma)
            cells[4] = (
                "undecided" if priced.law_is_open(b.sigma) else f"{_price(worth)} ({_ends(inverse(*interval))})"
            )
        if box := priced.box(b):
            cells[5] = _ends(box)
        rows.append(tuple(cells))
    return rows


def _price(worth: float) -> str:
    return f"{1 / worth:.3g}" if worth > 0 else "worth nothing"


def _ends(ends: tuple[float, float]) -> str:
    if math.isinf(ends[0]):
        return "worth nothing"
    low, high = (f"{end:.3g}" for end in ends)
    if low == high:
        return f"about {low}"
    return f"{low} – {high}" if math.isfinite(ends[1]) else f"≥ {low}"


def _plain_law(law: Law, sigmas: Iterable[float]) -> dict[str, Any]:
    """What the page needs to predict and plan as `assay.pricing.plan` does.

    `ranks` are the places of an interval's ends among the sorted draws.
    """
    return {
        "parameters": law.as_dict(), "confidence": law.confidence, "seen": law.seen,
        "ranks": law.interval(np.arange(len(law.draws), dtype=float)),
        "sigmas": [(sigma, float(law.weight(sigma))) for sigma in sigmas],
        "draws": [[float(f"{v:.9g}") for v in draw] for draw in law.draws],
        "scatter": [float(f"{v:.9g}") for v in law.scatter],
    }  # fmt: skip


def _plain_panel(panel: Panel) -> dict[str, Any]:
    """A panel as plain, finite values; colours by number, because light and dark pages differ."""
    plain = asdict(panel)
    for series in plain["series"]:
        series["colour"] = COLOURS.index(series["colour"])
        for key in ("x", "y", "low", "high"):
            values = np.asarray(series[key], float).tolist()
            series[key] = [float(f"{v:.6g}") if math.isfinite(v) else None for v in values]
    return plain
