"""The report of a study: tables, figures, and one page that opens anywhere, offline.

    results.csv, levels.csv          what was measured, by configuration and by band of noise levels
    along.csv                        FD and held-out loss along training, where they were measured
    figures/*.png                    the same figures as in the page, noise levels and samples
    tables.md, tables.tex            the paper's tables
    report.html                      all of it in one file, which runs no script

`write_report` lays out the files of a study that was run; `report_from_table` makes the tables, figures and
page from `results.csv` and the files next to it, so that a study without its runs, gathered results, or
the paper's own table can be shown. Prices and their words come from `assay.pricing`; nothing is computed here,
nor in the page.
"""

import base64
import csv
import hashlib
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from assay.data.picture import noise_picture
from assay.errors import AssayError
from assay.figure import COLOURS, Panel, Series, draw_svg, save_png
from assay.files import csv_cell, write_whole
from assay.outcome import FD, HELD_OUT_LOSS, METRICS, Configuration, Outcome, read_outcomes, write_outcomes
from assay.pricing.paper import PAPER, PAPER_CONFIGURATIONS, PAPER_STUDIES
from assay.pricing.price import Prices, price_all
from assay.pricing.results import write_levels
from assay.pricing.words import GOALS, amount, detail_table, doubts, price_panels, sentence
from assay.pricing.words import headline as price_headline
from assay.study.folder import OpenStudy
from assay.study.tables import (
    Table,
    averages,
    format_table,
    headline,
    headline_configurations,
    headline_title,
    study_tables,
)

_PAGE = Path(__file__).with_name("page")


@dataclass(frozen=True)
class Written:
    """The main results of a report, and its path: the first table of each data set, and the answer in words."""

    path: Path
    tables: list[Table]
    answer: list[str]
    prices: list[Prices]

    def __repr__(self) -> str:
        tables = [format_table(table, "text") for table in self.tables]
        curves = sorted((self.path.parent / "figures").glob("*worth-by-level.png"))
        files = [*(f"The worth curve is {curve}" for curve in curves), f"The report is {self.path}"]
        return "\n".join([*tables, *self.answer, *files])


@dataclass(frozen=True)
class Subject:
    """What the page shows of one data set.

    `facts` say how the numbers came about, `answer` are sentences; `prices` is None if the results allow none.
    A card is a goal with (noise level, rate, sentence) for each of its prices; a sample is a title, what it
    shows in words, its data URL, and whether it is wide.
    """

    name: str
    facts: list[str]
    answer: list[str]
    prices: Prices | None
    cards: dict[str, list[tuple[str, str, str]]]
    doubts: list[str]
    details: Table | None
    tables: list[Table]
    panels: dict[str, Panel]
    samples: list[tuple[str, str, str, bool]]

    @property
    def figures(self) -> list[tuple[str, str]]:
        """The title and the data URL of each figure, the worth curve first."""
        return [(panel.title, _data_url("image/svg+xml", draw_svg(panel))) for panel in self.panels.values()]


def write_report(opened: OpenStudy) -> Written | None:
    """Write everything that the finished results of a study say; None if there is none."""
    found = opened.outcomes()
    if not found:
        return None
    outcomes = [outcome for _, outcome in found]
    write_outcomes(opened.folder / "results.csv", outcomes)
    write_levels(opened.folder / "levels.csv", opened.levels())
    figures = opened.folder / "figures"
    runs = {outcome.configuration.without_seed: run for run, outcome in reversed(found)}  # of the first seed
    for of in _shown(list(runs)):
        if opened.picture(runs[of]).exists():
            with write_whole(figures / _sample_name(of)) as partial:
                partial.write_bytes(opened.picture(runs[of]).read_bytes())
    if levels := sorted({level for of in runs for level in of.levels}):
        with write_whole(figures / "noise_levels.png") as partial:
            is_real = bool((opened.source.sigma_tn > 0).any())
            noise_picture(opened.source, () if is_real else tuple(levels)).save(partial)
    followed = [each for each in outcomes if any(point.fd is not None for point in each.evaluation.along)]
    _write_along(opened.folder / "along.csv", followed)
    net = opened.runs[0].config.net_config(opened.source)
    shape = " x ".join(map(str, opened.source.image_shape))
    about = f"{opened.source.name}, images of {shape}; network {net.kind}"
    return report_from_table(opened.folder / "results.csv", opened.folder, about, followed)


def report_from_table(table: Path, folder: Path, about: str = "", followed: Sequence[Outcome] = ()) -> Written:
    """Write tables, figures and page into `folder`, from a results.csv and the pictures there.

    `about` names the images and the network, which a table does not; nor does it have the curves of the
    outcomes that were `followed` along training.
    """
    outcomes = list(read_outcomes(table).values())
    names = list(dict.fromkeys(outcome.configuration.dataset for outcome in outcomes))
    subjects = []
    for name in names:
        mine = [outcome for outcome in outcomes if outcome.configuration.dataset == name]
        subjects.append(_subject(table, folder, name, mine, len(names) == 1, about, followed))
    tables = [each for subject in subjects for each in subject.tables]
    for file, form in (("tables.md", "markdown"), ("tables.tex", "latex")):
        with write_whole(folder / file) as partial:
            partial.write_text("\n".join(format_table(each, form) for each in tables))  # type: ignore[arg-type]
    for subject in subjects:
        for name, panel in subject.panels.items():
            save_png([panel], folder / "figures" / f"{name}.png")
    is_paper = table.resolve() == PAPER.resolve()
    title = names[0] if len(names) == 1 else "The paper's tables" if is_paper else table.stem
    with write_whole(folder / "report.html") as partial:
        partial.write_text(_page(title, subjects), encoding="utf-8")
    answer = [line for subject in subjects for line in subject.answer]
    first = [subject.tables[0] for subject in subjects if subject.tables]
    priced = [subject.prices for subject in subjects if subject.prices]
    return Written(folder / "report.html", first, answer, priced)


def _subject(
    table: Path,
    folder: Path,
    name: str,
    outcomes: list[Outcome],
    alone: bool,
    about: str,
    followed: Sequence[Outcome],
) -> Subject:
    """One data set of a report; pictures and curves are those of the only one."""
    metrics = [metric for metric in METRICS.values() if any(map(metric.value, outcomes))]
    tables = [each for metric in reversed(metrics) for each in study_tables(outcomes, metric)]
    tables = list({(each.title, each.rows): each for each in tables}.values())
    if FD in metrics and (beside := _beside_paper(outcomes)) is not None:
        tables.append(beside)
    said = [line for line in [headline(outcomes, FD)] if line]
    prices, cards, details, unsure = None, dict[str, list[tuple[str, str, str]]](), None, list[str]()
    panels = {_slug(panel.title): panel for panel in _along_panels(followed)}
    try:
        (prices,) = price_all(table, name)
    except AssayError as error:
        said.append(f"Nothing to price yet: {error}")
    else:
        said.append(price_headline(prices))
        slug, unsure, (header, rows) = "" if alone else f"{_slug(name)}-", doubts(prices), detail_table(prices)
        panels = {f"{slug}{_slug(panel.title)}": panel for panel in price_panels(prices)} | panels
        details = Table("Prices and their cross-checks", tuple(header), tuple(rows))
        for price in prices.prices:
            row = f"{price.sigma:.3g}", amount(price), sentence(price)
            cards.setdefault(GOALS[price.goal], []).append(row)
    pictures = [
        (headline_title(of), f"Samples of the model trained on {of}", _sample_name(of), False)
        for of in _shown(list(averages(outcomes, metrics[0])))
    ]
    pictures.append(
        ("Noise levels", f"Images of {name} at each noise level of the study", "noise_levels.png", True)
    )
    samples = [
        (title, words, _data_url("image/png", path.read_bytes()), wide)
        for title, words, file, wide in pictures
        if alone and (path := folder / "figures" / file).exists()
    ]
    return Subject(name, _facts(outcomes, about), said, prices, cards, unsure, details, tables, panels, samples)


def _facts(outcomes: Sequence[Outcome], about: str) -> list[str]:
    """How the numbers came about."""
    configurations = [outcome.configuration for outcome in outcomes]
    facts = [about] if about else []
    facts += [f"{len(set(configurations))} results"]
    facts += [f"{len({of.seed for of in configurations})} training seeds or blocks"]
    if clean := sorted({of.num_clean for of in configurations if of.noisy}):
        most = max(of.num_clean + of.num_noisy for of in configurations)
        few = " to ".join(f"{number:,.0f}" for number in sorted({clean[0], clean[-1]}))
        facts.append(f"{few} clean images in mixes of up to {most:,.0f}")
    if num_images := outcomes[0].evaluation.num_images:
        facts.append(f"{num_images:,} samples for each distance")
    if seconds := sum((each.train_seconds or 0) + (each.sample_seconds or 0) for each in outcomes):
        facts.append(f"{seconds / 3600:.1f} core-hours")
    return facts


def _page(title: str, subjects: Sequence[Subject]) -> str:
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


def _shown(configurations: list[Configuration]) -> list[Configuration]:
    """Whose samples are shown: those of the paper's headline, or the ends of a ladder and the mixes."""
    if roles := headline_configurations(configurations):
        return list(dict.fromkeys(roles.values()))
    ladder = sorted((of for of in configurations if not of.noisy), key=lambda of: of.num_clean)
    return [*ladder[:1], *(of for of in configurations if of.noisy), *ladder[1:][-1:]]


def _sample_name(of: Configuration) -> str:
    return f"samples-{_slug(str(of))}.png"


def _beside_paper(outcomes: Sequence[Outcome]) -> Table | None:
    """The FID of one of the paper's own studies beside the paper's, where it has the same configuration."""
    dataset = PAPER_STUDIES.get(outcomes[0].configuration.dataset.removesuffix("-published"))
    if dataset is None or FD.title(outcomes[0]) != "FID":
        return None

    def key(of: Configuration) -> tuple[object, ...]:
        table = of.table if of.table in PAPER_CONFIGURATIONS else ""
        return table, of.clean_fraction, of.levels, of.sampling, of.consistency

    theirs = averages(each for each in read_outcomes(PAPER).values() if each.configuration.dataset == dataset)
    known = {key(of): str(average) for of, average in theirs.items()}
    rows = []
    for of, average in averages(outcomes).items():
        text = known.get(key(of))
        if dataset == "imagenet" and of.table in PAPER_CONFIGURATIONS:
            text = f"{PAPER_CONFIGURATIONS[of.table]:.2f}"
        if text is not None:
            rows.append((of.words(shares=True), str(average), text))
    header = ("available data", "FID", "FID in the paper")
    return Table("Beside the paper's numbers", header, tuple(dict.fromkeys(rows))) if rows else None


def _write_along(path: Path, outcomes: Sequence[Outcome]) -> None:
    """`along.csv`: FD and held-out loss by step, of each outcome whose training was followed."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(("configuration", "step", FD.name, HELD_OUT_LOSS.name))
    for outcome in outcomes:
        title, points = csv_cell(outcome.configuration.title), outcome.evaluation.along
        writer.writerows((title, each.step, each.fd, each.held_out_loss) for each in points)
    with write_whole(path) as partial:
        partial.write_text(buffer.getvalue(), encoding="utf-8")


def _along_panels(outcomes: Sequence[Outcome]) -> list[Panel]:
    """The paper's figure of FD against training steps, and the same of the held-out loss."""
    panels = []
    for name, label in ((FD.name, "FD"), (HELD_OUT_LOSS.name, "held-out loss")) if outcomes else ():
        panel = Panel(f"{label} against training steps", "step", label, log_y=name == FD.name)
        for which, outcome in enumerate(outcomes):
            points = [(each.step, getattr(each, name)) for each in outcome.evaluation.along]
            x, y = np.array([point for point in points if point[1] is not None]).reshape(-1, 2).T
            colour = COLOURS[which % len(COLOURS)]
            panel.series.append(Series(outcome.configuration.title, "line", x, y, colour=colour))
        panels.append(panel)
    return panels


def _slug(text: str) -> str:
    """A safe part of a file name."""
    return re.sub(r"[^\w.]+", "-", text).strip("-.").lower() or "unnamed"
