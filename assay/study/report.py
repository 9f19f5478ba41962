"""The report of a study: tables, figures, and one page that opens anywhere, offline.

    results.csv, levels.csv          what was measured, by configuration and by band of noise levels
    along.csv                        FD and held-out loss along training, where they were measured
    figures/*.png                    the same figures as in the page, noise levels and samples
    tables.md, tables.tex            the paper's tables
    report.html                      all of it in one file

`write_report` lays out the files of a study that was run; `report_from_table` makes the tables, figures and
page from `results.csv` and the files next to it, so that a study without its runs, gathered results, or
the paper's own table can be shown. Prices come from `assay.pricing`; nothing is computed here.
"""

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from assay.data.show import noise_picture
from assay.errors import AssayError
from assay.figure import COLOURS, Panel, Series, save_png
from assay.files import csv_cell, decoding, write_whole
from assay.outcome import FD, HELD_OUT_LOSS, METRICS, Configuration, Outcome, read_outcomes, write_outcomes
from assay.pricing.paper import PAPER, PAPER_CONFIGURATIONS, PAPER_STUDIES
from assay.pricing.price import Prices, price_all
from assay.pricing.results import write_levels
from assay.pricing.words import headline as price_headline
from assay.pricing.words import price_panels
from assay.study.render import Picture, Subject, page
from assay.study.run import OpenStudy
from assay.study.tables import (
    Table,
    averages,
    format_table,
    headline,
    headline_configurations,
    headline_title,
    study_tables,
)


@dataclass(frozen=True)
class Written:
    """The main results of a report, and its path: the first table of each data set, and the answer in words."""

    path: Path
    tables: list[Table]
    answer: list[str]
    prices: list[Prices]

    def __repr__(self) -> str:
        tables = [format_table(table, "text") for table in self.tables]
        return "\n".join([*tables, *self.answer, f"The report is {self.path}"])


def write_report(opened: OpenStudy) -> Written | None:
    """Write everything that the finished results of a study say; None if there is none."""
    found = opened.outcomes()
    if not found:
        return None
    write_outcomes(opened.folder / "results.csv", [outcome for _, outcome in found])
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
    _write_along(opened.folder / "along.csv", [outcome for _, outcome in found])
    net = opened.runs[0].config.net_config(opened.source)
    shape = " x ".join(map(str, opened.source.image_shape))
    about = f"{opened.source.name}, images of {shape}; network {net.kind}"
    return report_from_table(opened.folder / "results.csv", opened.folder, about)


def report_from_table(table: Path, folder: Path, about: str = "") -> Written:
    """Write tables, figures and page into `folder`, from a results.csv and the pictures and curves there.

    `about` names the images and the network, which a table does not.
    """
    outcomes = list(read_outcomes(table).values())
    names = list(dict.fromkeys(outcome.configuration.dataset for outcome in outcomes))
    subjects = []
    for name in names:
        mine = [outcome for outcome in outcomes if outcome.configuration.dataset == name]
        subjects.append(_subject(table, folder, name, mine, len(names) == 1, about))
    tables = [each for subject in subjects for each in subject.tables]
    for file, form in (("tables.md", "markdown"), ("tables.tex", "latex")):
        with write_whole(folder / file) as partial:
            partial.write_text("\n".join(format_table(each, form) for each in tables))  # type: ignore[arg-type]
    for subject in subjects:
        for name, panel in subject.panels.items():
            save_png([panel], folder / "figures" / f"{name}.png")
    title = names[0] if len(names) == 1 else "The paper's tables" if _is_paper(table) else table.stem
    with write_whole(folder / "report.html") as partial:
        partial.write_text(page(title, subjects), encoding="utf-8")
    answer = [line for subject in subjects for line in subject.answer]
    first = [subject.tables[0] for subject in subjects if subject.tables]
    priced = [subject.prices for subject in subjects if isinstance(subject.prices, Prices)]
    return Written(folder / "report.html", first, answer, priced)


def _subject(table: Path, folder: Path, name: str, outcomes: list[Outcome], alone: bool, about: str) -> Subject:
    """One data set of a report."""
    metrics = [metric for metric in METRICS.values() if any(map(metric.value, outcomes))]
    prices: Prices | str
    try:
        (prices,) = price_all(table, name)
    except AssayError as error:
        prices = f"Nothing to price yet: {error}"
    tables = [each for metric in reversed(metrics) for each in study_tables(outcomes, metric)]
    tables = list({(each.title, each.rows): each for each in tables}.values())
    if FD in metrics and (beside := _beside_paper(outcomes)) is not None:
        tables.append(beside)
    slug = "" if alone else f"{_slug(name)}-"
    panels = {}
    if isinstance(prices, Prices):
        panels = {f"{slug}{_slug(panel.title)}": panel for panel in price_panels(prices)}
    for panel in along_panels(folder / "along.csv") if alone else ():
        panels[_slug(panel.title)] = panel
    shown = _shown(list(averages(outcomes, metrics[0]))) if alone else []
    samples = [
        Picture(headline_title(of), f"Samples of the model trained on {of}", path)
        for of in shown
        if (path := folder / "figures" / _sample_name(of)).exists()
    ]
    noise = folder / "figures" / "noise_levels.png"
    if alone and noise.exists():
        samples.append(
            Picture("Noise levels", f"Images of {name} at each noise level of the study", noise, wide=True)
        )
    said = [line for line in [headline(outcomes, FD)] if line]
    said += [prices if isinstance(prices, str) else price_headline(prices)]
    return Subject(name, about, outcomes, prices, said, tables, panels, samples)


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


def _is_paper(table: Path) -> bool:
    return table.resolve() == PAPER.resolve()


def _write_along(path: Path, outcomes: Sequence[Outcome]) -> None:
    """`along.csv`: FD and held-out loss by step, of each outcome whose training was followed."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(("configuration", "step", FD.name, HELD_OUT_LOSS.name))
    for outcome in outcomes:
        if any(point.fd is not None for point in outcome.evaluation.along):
            title = csv_cell(outcome.configuration.title)
            writer.writerows(
                (title, each.step, each.fd, each.held_out_loss) for each in outcome.evaluation.along
            )
    with write_whole(path) as partial:
        partial.write_text(buffer.getvalue(), encoding="utf-8")


def along_panels(path: Path) -> list[Panel]:
    """Curves of `along.csv`: the paper's figure of FD against training steps, and the held-out loss."""
    if not path.exists():
        return []
    with decoding(path, "remove it, and run `assay study report` again"):
        rows = list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"), newline="")))
        panels = []
        for name, label in ((FD.name, "FD"), (HELD_OUT_LOSS.name, "held-out loss")):
            panel = Panel(f"{label} against training steps", "step", label, log_y=name == FD.name)
            for which, title in enumerate(dict.fromkeys(row["configuration"] for row in rows)):
                mine = [row for row in rows if row["configuration"] == title and row[name]]
                x, y = np.array([(row["step"], row[name]) for row in mine], float).reshape(-1, 2).T
                panel.series.append(Series(title, "line", x, y, colour=COLOURS[which % len(COLOURS)]))
            if panel.series:
                panels.append(panel)
        return panels


def _slug(text: str) -> str:
    """A safe part of a file name."""
    return re.sub(r"[^\w.]+", "-", text).strip("-.").lower() or "unnamed"
