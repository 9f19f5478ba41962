"""The page of a report: one HTML file that opens offline and runs no script.

Figures are described once, as `assay.figure.Panel`, and stand in the page as SVG; prices are in the words of
`assay.pricing.words`. The page computes nothing.
"""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from assay.figure import Panel, draw_svg
from assay.outcome import Outcome
from assay.pricing.price import Price, Prices
from assay.pricing.words import GOALS, amount, detail_table, doubts, sentence
from assay.study.tables import Table

_PAGE = Path(__file__).with_name("page")


@dataclass(frozen=True)
class Picture:
    """A PNG for the page; `alt` says in words what it shows."""

    title: str
    alt: str
    path: Path
    wide: bool = False

    @property
    def data(self) -> str:
        """The file as a data URL."""
        return _data_url("image/png", self.path.read_bytes())


@dataclass(frozen=True)
class Subject:
    """One data set of a report. `prices` is a sentence when the results allow none; `answer` are sentences."""

    name: str
    about: str
    outcomes: list[Outcome]
    prices: Prices | str
    answer: list[str]
    tables: list[Table]
    panels: dict[str, Panel]
    samples: list[Picture]

    @property
    def cards(self) -> list[tuple[str, list[tuple[str, str, str]]]]:
        """The goals side by side: for each, the rate at each noise level and what it rests on."""
        if isinstance(self.prices, str):
            return []
        found: dict[str, list[Price]] = {}
        for price in self.prices.prices:
            found.setdefault(GOALS[price.goal], []).append(price)
        return [
            (goal, [(f"{price.sigma:g}", amount(price), sentence(price)) for price in prices])
            for goal, prices in found.items()
        ]

    @property
    def details(self) -> Table | None:
        """The cross-checks of the prices."""
        if isinstance(self.prices, str):
            return None
        header, rows = detail_table(self.prices)
        return Table("Prices and their cross-checks", tuple(header), tuple(rows))

    @property
    def doubts(self) -> list[str]:
        """What a reader must know about the prices."""
        return [] if isinstance(self.prices, str) else doubts(self.prices)

    @property
    def figures(self) -> list[tuple[str, str]]:
        """The title and the data URL of each figure, the worth curve first."""
        return [(panel.title, _data_url("image/svg+xml", draw_svg(panel))) for panel in self.panels.values()]

    @property
    def facts(self) -> list[str]:
        """How the numbers came about."""
        configurations = [outcome.configuration for outcome in self.outcomes]
        runs = len({(of.without_seed, of.seed) for of in configurations})
        facts = [self.about] if self.about else []
        facts += [f"{runs} results", f"{len({of.seed for of in configurations})} training seeds or blocks"]
        clean = sorted({of.num_clean for of in configurations if of.noisy})
        if clean:
            most = max(of.num_clean + of.num_noisy for of in configurations)
            few = " to ".join(f"{number:,.0f}" for number in sorted({clean[0], clean[-1]}))
            facts.append(f"{few} clean images in mixes of up to {most:,.0f}")
        if num_images := self.outcomes[0].evaluation.num_images:
            facts.append(f"{num_images:,} samples for each distance")
        if seconds := sum((each.train_seconds or 0) + (each.sample_seconds or 0) for each in self.outcomes):
            facts.append(f"{seconds / 3600:.1f} core-hours")
        return facts


def page(title: str, subjects: Sequence[Subject]) -> str:
    """The report as one HTML file; its policy forbids every script, and every style but its own."""
    style = (_PAGE / "report.css").read_text(encoding="utf-8")
    environment = Environment(
        loader=FileSystemLoader(_PAGE), autoescape=True, trim_blocks=True, undefined=StrictUndefined
    )
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return environment.get_template("report.html.j2").render(
        title=title, style=style, style_hash=f"sha256-{digest}", subjects=subjects
    )


def _data_url(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
