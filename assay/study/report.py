"""The report of a study: tables, figures, and one page that opens anywhere, offline.

    results.csv, training.csv        what was measured, and how training went
    figures/*.png                    the same figures as in the page, noise levels and samples
    tables.md, tables.tex            the paper's tables
    report.html                      all of it in one file, with a planner that buys the best mix

`write_report` lays out the files of a study that was run; `report_from_table` makes the tables, figures and
page from `results.csv` and whatever lies beside it, so that a study without its runs, or the paper's own
table, can be shown. Figures are described once, as `assay.pricing.plot.Panel`: matplotlib draws the PNGs,
some 150 lines of JavaScript the page. Those instead of plotly's bundle keep the page near 100 KB instead of
5 MB, follow the reader's light or dark, reflow at phone width, and let the page forbid all
scripts but its own (by their hash).
"""

import base64
import csv
import hashlib
import io
import json
import math
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from PIL import Image, ImageDraw, ImageFont

from assay.data.show import noise_picture
from assay.files import write_whole
from assay.pricing import PAPER, price_report, read_results
from assay.pricing.law import MIN_ROWS, Law
from assay.pricing.plot import COLOURS, Panel, Series, price_panels, save_plot
from assay.pricing.report import PriceReport, inverse
from assay.pricing.table import PAPER_NUM_IMAGES
from assay.study.results import (
    Line,
    Table,
    format_table,
    gather,
    has_columns,
    headline,
    headline_fraction,
    headline_settings,
    headline_sigma,
    headline_values,
    paper_tables,
    value_of,
    write_results,
)
from assay.study.run import OpenStudy
from assay.study.spec import Row

_PAGE = Path(__file__).with_name("page")
_MAX_FACTOR = 30  # between the ends of a price's interval
_MAX_CURVE = 100  # points of a training curve
_MAX_MARKED = 10  # on a curve of fewer points they are marked


@dataclass(frozen=True)
class Written:
    """What a report says, and where it lies."""

    path: Path
    tables: list[Table]
    headline: str
    prices: str


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
    """One data set of a report. `priced` is a sentence when the table allows no comparison at all."""

    name: str
    slug: str
    lines: list[Line]
    priced: PriceReport | str
    command: str
    tables: list[Table]
    panels: dict[str, Panel]
    samples: list[Picture]
    noise: Picture | None


def write_report(opened: OpenStudy) -> Written | None:
    """Write everything that the finished results of a study say; None if there is none."""
    lines = gather(opened)
    if not lines:
        return None
    write_results(opened.folder / "results.csv", lines)
    figures = opened.folder / "figures"
    shown = {}
    for title, columns in headline_settings(lines).items():
        row = next((row for row in opened.rows if has_columns(row, columns) and opened.result(row)), None)
        if row is not None:
            shown[title] = row
            if opened.picture(row).exists():
                _copy(opened.picture(row), figures / _sample_name("", title))
    levels = sorted({line.sigma for line in lines if line.sigma})
    if levels:
        with write_whole(figures / "noise_levels.png") as partial:
            noise_picture(opened.source, tuple(levels)).save(partial)
    _write_training(opened, shown)
    return report_from_table(opened.folder / "results.csv", opened.folder)


def report_from_table(table: Path, folder: Path) -> Written:
    """Write tables, figures and page into `folder`, from a results.csv and the pictures and curves there."""
    lines = read_table(table)
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        groups.setdefault((line.dataset, line.extractor), []).append(line)
    subjects = [_subject(table, folder, group, len(groups) > 1) for group in groups.values()]
    tables = [each for subject in subjects for each in subject.tables]
    for name, form in (("tables.md", "markdown"), ("tables.tex", "latex")):
        with write_whole(folder / name) as partial:
            partial.write_text("\n".join(format_table(each, form) for each in tables))  # type: ignore[arg-type]
    for subject in subjects:
        for name, panel in subject.panels.items():
            save_plot([panel], folder / "figures" / f"{subject.slug}{name}.png")
        _write_samples(subject, folder / "figures" / f"{subject.slug}samples.png")
    path = folder / "report.html"
    several = "The paper's tables" if _is_paper(table) else table.stem
    with write_whole(path) as partial:
        partial.write_text(_page(several if len(subjects) > 1 else subjects[0].name, subjects))
    before = [f"{subject.name}: " if len(subjects) > 1 else "" for subject in subjects]
    says = [name + headline(subject.lines) for name, subject in zip(before, subjects, strict=True)]
    worth = [name + price_sentence(subject) for name, subject in zip(before, subjects, strict=True)]
    return Written(path, tables, "\n".join(says), "\n".join(worth))


def price_sentence(subject: Subject) -> str:
    """What a clean image is worth at the headline's noise, or why that is not known."""
    priced = subject.priced
    if isinstance(priced, str):
        return priced
    bounds = priced.bounds[-1]
    where, percent = f"at noise {bounds.sigma:g}", f"{priced.confidence:.0%}"
    low, high = inverse(bounds.lower, bounds.upper)
    if bounds.contradiction:
        said = f"The comparisons {where} contradict each other: {bounds.contradiction}."
    elif math.isinf(low):
        said = f"Noisy images {where} were worth nothing: they made no model better."
    elif low <= 1 and math.isinf(high):
        said = (
            f"These settings do not yet say what a noisy image {where} is worth: that takes clean-only results "
            f"between {_percents(priced)}, to be compared with the mix."
        )
    else:
        said = f"One clean image is worth {_between(low, high)} noisy ones {where}"
        said += f" ({percent} interval: {_between(*inverse(*bounds.interval))})." if bounds.interval else "."
    if priced.law and not _is_open(priced.law, bounds.sigma):
        low, high = inverse(*priced.law.price_interval(bounds.sigma))
        said += f" By the fitted law it is {1 / float(priced.law.price(bounds.sigma)):.3g}"
        said += f" ({percent}: {_between(low, high, 3)})."
    return said


def _is_open(law: Law, sigma: float) -> bool:
    """Whether the law leaves the price open, by more than a factor that anybody could act upon."""
    low, high = law.price_interval(sigma)
    return high > _MAX_FACTOR * low


def _between(low: float, high: float, digits: int = 4) -> str:
    return f"between {low:.{digits}g} and {high:.{digits}g}" if math.isfinite(high) else f"at least {low:.4g}"


def _percents(priced: PriceReport) -> str:
    """The part of the data set in which clean-only results would narrow the price: above the mixes' own."""
    mixed = priced.results.num_noisy > 0
    total = (priced.results.num_clean + priced.results.num_noisy)[mixed].max()
    return f"{priced.results.num_clean[mixed].min() / total:.0%} and 100%"


def read_table(path: Path) -> list[Line]:
    """Lines of a results.csv; what only studies record is filled in for tables like the paper's."""
    with open(path, newline="", encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        raise ValueError(f"{path} has no rows: expected a header and results")
    lines = []
    for number, row in enumerate(rows, 2):
        total = PAPER_NUM_IMAGES.get(row.get("dataset", ""), 0)
        filled: dict[str, Any] = {"seed": 0, "metric": "FID", "extractor": "", "num_images": 0}
        filled |= {"train_seconds": 0, "sample_seconds": 0}
        for kind in ("clean", "noisy"):
            filled[f"num_{kind}"] = round(float(row.get(f"{kind}_fraction") or 0) * total)
        known = {name: value for name, value in row.items() if name in Line.model_fields}
        try:
            lines.append(Line.model_validate(filled | known | {"sigma": row.get("sigma") or None}))
        except ValueError as error:
            fault = error.errors()[0] if hasattr(error, "errors") else {"loc": ("?",), "msg": str(error)}
            raise ValueError(f"{path}, line {number}, column {fault['loc'][0]}: {fault['msg']}") from None
    return lines


def _subject(table: Path, folder: Path, lines: list[Line], one_of_many: bool) -> Subject:
    first = lines[0]
    name = first.dataset
    slug = f"{_slug(f'{name} {first.extractor}')}-" if one_of_many else ""
    command = f"assay plan {'--paper' if _is_paper(table) else shlex.quote(str(table))}"
    if one_of_many:
        command += f" --dataset {shlex.quote(name)}"
    priced: PriceReport | str
    try:
        num_images = PAPER_NUM_IMAGES.get(name) if _is_paper(table) else None
        found = read_results(table, dataset=name, num_images=num_images)
        results = next(r for r in found if r.name in (name, f"{name} {first.extractor}"))
        priced = price_report(results)
    except (ValueError, StopIteration) as error:
        priced = f"Nothing to price yet. {error}"
    tables = paper_tables(lines)
    if one_of_many:
        tables = [replace(each, title=f"{name}: {each.title}") for each in tables]
    panels = {} if (fraction := _fraction_panel(lines)) is None else {"fd_by_clean_fraction": fraction}
    if isinstance(priced, PriceReport):
        law, price = price_panels(priced)
        law = replace(law, y_label=first.metric, title=f"{first.metric} measured (points), and by the law")
        panels |= {"law": law} if priced.law else {}
        if price.series and not (priced.law and _is_open(priced.law, priced.bounds[-1].sigma)):
            panels["price"] = replace(price, title="Noisy images that replace a clean one")
    panels |= {} if one_of_many else _training_panels(folder / "training.csv", first.metric)
    values, noise = headline_values(lines), folder / "figures" / f"{slug}noise_levels.png"
    samples = [
        Picture(title, f"Samples of the model trained on {title}, {first.metric} {value}", path)
        for title, value in values.items()
        if (path := folder / "figures" / _sample_name(slug, title)).exists()
    ]
    alt = f"Images of {name} at each noise level of the study"
    levels = Picture("Noise levels", alt, noise) if noise.exists() else None
    return Subject(name, slug, lines, priced, command, tables, panels, samples, levels)


def _is_paper(table: Path) -> bool:
    return table.resolve() == PAPER.resolve()


def _fraction_panel(lines: Sequence[Line]) -> Panel | None:
    """The paper's first figure: FD against the clean fraction, clean-only beside each sigma."""
    mixed = [line for line in lines if line.table == "clean_mix" and line.clean_fraction > 0]
    fractions = sorted({line.clean_fraction for line in mixed})
    levels: list[float | None] = [None, *sorted({line.sigma for line in mixed if line.sigma})]
    metric = lines[0].metric
    panel = Panel(f"{metric} against the clean part of the data", "clean part, %", metric, log_y=True)
    for which, sigma in enumerate(levels):
        points = []
        for p in fractions:
            # All images clean: the same model, whatever the rest would have been.
            clean = sigma is None or p == 1
            data: dict[str, object] = {"data": "clean_only"} if clean else {"data": "mix", "sigma": sigma}
            value = value_of(mixed, clean_fraction=p, sampling="full", consistency=False, **data)
            if value:
                points.append((100 * p, value.mean, value.mean - value.std, value.mean + value.std))
        if points:
            x, y, low, high = np.array(points).T
            name = "clean images alone" if sigma is None else f"the rest at noise {sigma:g}"
            colour = COLOURS[which % len(COLOURS)]
            panel.series.append(Series("", "line", x, y, colour=colour))
            panel.series.append(Series(name, "bars", x, y, np.maximum(low, 0.5 * y), high, colour=colour))
    return panel if panel.series else None


def _write_training(opened: OpenStudy, shown: dict[str, Row]) -> None:
    """`training.csv`: the loss of the headline's runs by step, and FD by step where lengths were compared."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(("setting", "step", "loss", "fd"))
    # Settings that differ only in how they are sampled share a run: the first one stands for it.
    runs = {opened.picture(row).parent: title for title, row in reversed(shown.items())}
    for run_dir, title in reversed(runs.items()):
        path = run_dir / "metrics.jsonl"
        curve = [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []
        for point in curve[:: -(-len(curve) // _MAX_CURVE) or 1]:
            writer.writerow((title, point["step"], point["loss"], ""))
    lengths: dict[str, dict[int, list[float]]] = {}
    for row in opened.rows:
        if result := opened.result(row):
            # Runs alike but for their length and seed are points of one curve.
            tree = row.config.train.model_dump(mode="json", exclude={"num_steps", "seed"})
            setting = json.dumps([row.setting, tree], sort_keys=True)
            by_step = lengths.setdefault(setting, {})
            by_step.setdefault(row.config.train.num_steps, []).append(result.fd)
    for setting, by_step in lengths.items():
        for step, distances in sorted(by_step.items()) if len(by_step) > 1 else ():
            writer.writerow((json.loads(setting)[0], step, "", float(np.mean(distances))))
    with write_whole(opened.folder / "training.csv") as partial:
        partial.write_text(buffer.getvalue())


def _training_panels(path: Path, metric: str) -> dict[str, Panel]:
    if not path.exists():
        return {}
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    panels = {}
    for column, label in (("fd", metric), ("loss", "Loss")):
        points = [row for row in rows if row[column]]
        panel = Panel(f"{label} against training steps", "step", label, log_y=True)
        for which, name in enumerate(dict.fromkeys(row["setting"] for row in points)):
            x, y = np.array([(r["step"], r[column]) for r in points if r["setting"] == name], float).T
            colour = COLOURS[which % len(COLOURS)]
            panel.series.append(Series(name, "line", x, y, colour=colour))
            if len(x) < _MAX_MARKED:
                panel.series.append(Series("", "points", x, y, colour=colour))
        if points:
            panels[f"{column}_by_step"] = panel
    return panels


def _write_samples(subject: Subject, path: Path) -> None:
    """The headline's sample grids side by side, a title above each."""
    if not subject.samples:
        return
    grids = [Image.open(picture.path).convert("RGB") for picture in subject.samples]
    gap, head, font = 16, 28, ImageFont.load_default(16)
    width, height = max(grid.width for grid in grids) + gap, max(grid.height for grid in grids) + gap + head
    num_columns = min(3, len(grids))
    num_rows = -(-len(grids) // num_columns)
    canvas = Image.new("RGB", (num_columns * width - gap, num_rows * height - gap), "white")
    for i, (grid, picture) in enumerate(zip(grids, subject.samples, strict=True)):
        left, top = i % num_columns * width, i // num_columns * height
        ImageDraw.Draw(canvas).text((left, top + 4), picture.title, fill="black", font=font)
        canvas.paste(grid, (left, top + head))
    with write_whole(path) as partial:
        canvas.save(partial)


def _page(title: str, subjects: list[Subject]) -> str:
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
    """A subject as the template wants it: words, cells, and plain values for the script."""
    lines, priced = subject.lines, subject.priced
    values = headline_values(lines)
    worst = max((value.mean for value in values.values()), default=1.0)
    p = headline_fraction(lines)
    mix, alone = f"{p:.0%} clean + {1 - p:.0%} noisy", f"{p:.0%} clean"
    data: dict[str, Any] = {
        "panels": {name: _plain_panel(panel) for name, panel in subject.panels.items()},
        "metric": lines[0].metric, "command": subject.command, "law": None, "bounds": [],
    }  # fmt: skip
    shown: dict[str, Any] = {
        "subject": subject, "metric": lines[0].metric, "sigma": headline_sigma(lines),
        "headline": headline(lines),
        "bars": [(name, str(v), f"{100 * v.mean / worst:.2f}", name == mix) for name, v in values.items()],
        "mix": (mix, values[mix]) if mix in values else None,
        "alone": (alone, values[alone]) if alone in values and p < 1 else None,
        "prices": price_sentence(subject), "worth": None, "price_rows": [], "fitted": [], "notes": [],
        "law": None, "missing": priced if isinstance(priced, str) else "", "facts": _facts(lines), "data": data,
    }  # fmt: skip
    if isinstance(priced, str):
        return shown
    bounds = priced.bounds[-1]
    low, high = inverse(bounds.lower, bounds.upper)
    if not bounds.contradiction and math.isfinite(low) and (low > 1 or math.isfinite(high)):
        shown["worth"] = (f"{low:.3g}–{high:.3g}" if math.isfinite(high) else f"≥ {low:.3g}"), bounds.sigma
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
            (priced.results.setting(i), *(f"{row[k]:.4g}" for k in ("fd", "fitted", "left_out")),
             f"{row['left_out'] / row['fd'] - 1:+.1%}", "extrapolation" if row["extrapolates"] else "")
            for i, row in enumerate(priced.fitted_rows())
        ]  # fmt: skip
        sigmas = [b.sigma for b in priced.bounds if not _is_open(priced.law, b.sigma)]
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
            f"A planner needs a fitted law, and a law at least {MIN_ROWS + 1} comparable settings (clean-only "
            f"and mixed, at least 10% clean); this table has {len(priced.results)}. More values in "
            "grid.clean_fractions give it both."
        )
    return shown


def _facts(lines: Sequence[Line]) -> list[str]:
    """How the numbers came about."""
    facts = [f"{len(lines)} results"]
    if num_images := lines[0].num_images:
        seeds = len({line.seed for line in lines})
        facts.append(f"{seeds} training seed{'s' if seeds > 1 else ''}")
        facts.append(f"{num_images:,} samples for each distance")
    if total := max(line.num_clean + line.num_noisy for line in lines):
        facts.append(f"up to {total:,} training images")
    if hours := sum(line.train_seconds + line.sample_seconds for line in lines) / 3600:
        facts.append(f"{hours:.1f} hours" if hours > 1 else f"{60 * hours:.0f} minutes of computing")
    return facts


def _price_rows(priced: PriceReport) -> list[tuple[str, ...]]:
    rows = []
    for b in priced.bounds:
        bounds = "contradictory" if b.contradiction else _ends(inverse(b.lower, b.upper))
        cells = [f"{b.sigma:g}", bounds, "–", "–", ""]
        if b.interval:
            cells[2] = _ends(inverse(*b.interval))
        if priced.law:
            ends = _ends(inverse(*priced.law.price_interval(b.sigma)))
            price = 1 / float(priced.law.price(b.sigma))
            cells[3] = "open" if _is_open(priced.law, b.sigma) else f"{price:.3g} ({ends})"
        if box := priced.box(b):
            cells[4] = _ends(box)
        rows.append(tuple(cells))
    return rows


def _ends(ends: tuple[float, float]) -> str:
    if math.isinf(ends[0]):
        return "worth nothing"
    return f"{ends[0]:.3g} – {ends[1]:.3g}" if math.isfinite(ends[1]) else f"≥ {ends[0]:.3g}"


def _plain_law(law: Law, sigmas: Iterable[float]) -> dict[str, Any]:
    """What the page needs to predict and plan as `assay.pricing.plan` does.

    `ranks` are the places of an interval's ends among the sorted draws.
    """
    return {
        "parameters": law.as_dict(), "confidence": law.confidence, "seen": law.seen,
        "ranks": law._interval(np.arange(len(law.draws), dtype=float)),
        "sigmas": [(sigma, float(law.price(sigma))) for sigma in sigmas],
        "draws": [[float(f"{v:.9g}") for v in draw] for draw in law.draws],
        "scatter": [float(f"{v:.9g}") for v in law.scatter],
    }  # fmt: skip


def _plain_panel(panel: Panel) -> dict[str, Any]:
    """A panel as plain values for the script; colours by number, for light and dark differ. No infinities."""
    plain = asdict(panel)
    for series in plain["series"]:
        series["colour"] = COLOURS.index(series["colour"])
        for key in ("x", "y", "low", "high"):
            values = np.asarray(series[key], float).tolist()
            series[key] = [float(f"{v:.6g}") if math.isfinite(v) else None for v in values]
    return plain


def _copy(source: Path, target: Path) -> None:
    with write_whole(target) as partial:
        partial.write_bytes(source.read_bytes())


def _sample_name(slug: str, title: str) -> str:
    return f"{slug}samples-{_slug(title)}.png"


def _slug(text: str) -> str:
    """A safe part of a file name."""
    return re.sub(r"[^\w.]+", "-", text).strip("-.").lower() or "unnamed"
