"""The report of a study: tables, figures, and one page that opens anywhere, offline.

    results.csv, training.csv        what was measured, and how training went
    levels.csv                       error by noise level of the headline's models, and what noisy images add
    figures/*.png                    the same figures as in the page, noise levels and samples
    tables.md, tables.tex            the paper's tables
    report.html                      all of it in one file, with a planner that buys the best mix

`write_report` lays out the files of a study that was run; `report_from_table` makes the tables, figures and
page from `results.csv` and the files next to it, so that a study without its runs, gathered results, or
the paper's own table can be shown.
"""

import csv
import io
import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from assay.data.show import noise_picture
from assay.figure import COLOURS, Panel, Series, save_png
from assay.files import csv_cell, naming, write_whole
from assay.metrics import Score
from assay.metrics.score import Curve
from assay.outcome import FD, SCORE, SCORE_ABOVE, Currency, Outcome, Setting, read_outcomes, write_outcomes
from assay.pricing import PAPER, comparable, price_report
from assay.pricing.plot import price_panels
from assay.pricing.report import PriceReport
from assay.pricing.table import PAPER_CONFIGURATIONS, PAPER_NUM_IMAGES, PAPER_STUDIES
from assay.progress import progress_bar
from assay.study.arms import Arm
from assay.study.pool import run_local
from assay.study.render import Picture, Subject, page, price_sentence
from assay.study.run import OpenStudy, Update, locked, open_study, prepare_shared
from assay.study.tables import (
    Average,
    Role,
    Table,
    averages,
    format_table,
    headline,
    headline_settings,
    headline_title,
    study_tables,
)

_NUM_LEVELS = 24  # of a curve by noise level
_MAX_CURVE = 100  # points of a training curve
_MAX_MARKED = 10  # on a curve of fewer points they are marked


@dataclass(frozen=True)
class Written:
    """The main results of a report, and its path. `headline_tables` has one for each data set and currency."""

    path: Path
    tables: list[Table]
    headline_tables: list[Table]
    headline: str
    prices: str

    def __repr__(self) -> str:
        tables = [format_table(table, "text") for table in self.headline_tables]
        return "\n".join([*tables, self.headline, self.prices, f"The report is {self.path}"])


def run_study(
    spec: Path | str, folder: Path | str | None = None, num_workers: int | None = None, progress: bool = True
) -> Written:
    """Train and measure every setting of a study, as `assay study run` does, and write the report.

    `spec` is a TOML file, e.g. one that `assay study init` wrote; the results go to `folder`, by default
    out/NAME. Call it again to resume. `num_workers` processes share the work, by default one for each core.
    They import your script, so start the study below `if __name__ == "__main__":` there.

    >>> found = assay.run_study("study.toml", num_workers=1, progress=False)
    >>> found.path
    PosixPath('out/mine/report.html')
    >>> prices = assay.price("out/mine/results.csv", by="fd")
    """
    opened = open_study(spec, None if folder is None else Path(folder))
    share = {job.key: float(opened.is_finished(job)) for job in opened.jobs}
    with locked(opened.folder), progress_bar(opened.study.name, progress) as tell:
        if not all(share.values()):
            prepare_shared(opened)

        def update(now: Update) -> None:
            share[now.job] = 1.0 if now.phase == "done" else 0.9 * now.done / max(now.total, 1)
            tell(sum(share.values()) / len(share))

        run_local(opened, num_workers or os.cpu_count() or 1, update)
        for job in opened.jobs:
            if not opened.is_finished(job):
                raise RuntimeError(f"{opened.folder}: {job.title} failed: {opened.failure(job)}")
        written = write_report(opened)
        assert written is not None
        return written


def write_report(opened: OpenStudy) -> Written | None:
    """Write everything that the finished results of a study say; None if there is none."""
    found = opened.outcomes()
    if not found:
        return None
    write_outcomes(opened.folder / "results.csv", [outcome for _, outcome in found])
    figures = opened.folder / "figures"
    arms = {outcome.setting.without_seed: arm for arm, outcome in reversed(found)}  # of the first seed
    shown = {role: arms[setting] for role, setting in headline_settings(arms).items()}
    for role, arm in shown.items():
        if opened.picture(arm).exists():
            _copy(opened.picture(arm), figures / _sample_name("", role))
    levels = sorted({level for arm in arms.values() for level in arm.setting.levels})
    if levels:
        with write_whole(figures / "noise_levels.png") as partial:
            is_real = bool((opened.source.sigma_tn > 0).any())
            noise_picture(opened.source, () if is_real else tuple(levels)).save(partial)
    _write_training(opened, found, shown.values())
    records = {outcome.setting.without_seed: outcome.evaluation.score_record for _, outcome in reversed(found)}
    _write_levels(opened.folder / "levels.csv", {setting: each for setting, each in records.items() if each})
    return report_from_table(opened.folder / "results.csv", opened.folder)


def report_from_table(table: Path, folder: Path, currency: Currency | None = None) -> Written:
    """Write tables, figures and page into `folder`, from a results.csv and the pictures and curves there.

    Without a currency the report is in all those that the results have, the held-out score and FD.
    """
    outcomes = read_outcomes(table)
    if _is_paper(table):
        outcomes = {line: _in_images(outcome) for line, outcome in outcomes.items()}
    found = [each for each in (SCORE, FD) if any(map(each.value, outcomes.values()))]
    currencies, subjects = [currency] if currency else found, []
    for each in currencies:
        groups: dict[tuple[str, str], dict[int, Outcome]] = {}
        for line, outcome in outcomes.items():
            extractor = "" if each.shared_error else outcome.evaluation.extractor
            groups.setdefault((outcome.setting.dataset, extractor), {})[line] = outcome
        for group in groups.values():
            subjects.append(_subject(table, folder, group, len(groups) > 1, each, len(currencies) > 1))
    tables = [each for subject in subjects for each in subject.tables]
    for name, form in (("tables.md", "markdown"), ("tables.tex", "latex")):
        with write_whole(folder / name) as partial:
            partial.write_text("\n".join(format_table(each, form) for each in tables))  # type: ignore[arg-type]
    for subject in subjects:
        for name, panel in subject.panels.items():
            save_png([panel], folder / "figures" / f"{subject.slug}{name}.png")
        _write_samples(subject, folder / "figures" / f"{subject.slug}samples.png")
    path = folder / "report.html"
    datasets = {outcome.setting.dataset for outcome in outcomes.values()}
    several = "The paper's tables" if _is_paper(table) else table.stem if len(datasets) > 1 else min(datasets)
    with write_whole(path) as partial:
        partial.write_text(page(several if len(subjects) > 1 else subjects[0].name, subjects))
    before = [f"{subject.name}: " if len(subjects) > 1 else "" for subject in subjects]
    says = [
        name + headline(subject.outcomes, subject.currency)
        for name, subject in zip(before, subjects, strict=True)
    ]
    worth = [name + price_sentence(subject) for name, subject in zip(before, subjects, strict=True)]
    first = [subject.tables[0] for subject in subjects if subject.tables]
    return Written(path, tables, first, "\n".join(says), "\n".join(worth))


def _in_images(outcome: Outcome) -> Outcome:
    """An outcome of the paper's, in numbers of images."""
    setting = outcome.setting
    return outcome.model_copy(update={"setting": setting.in_images(PAPER_NUM_IMAGES[setting.dataset])})


def _subject(
    table: Path,
    folder: Path,
    lines: dict[int, Outcome],
    one_of_many: bool,
    currency: Currency,
    many_currencies: bool,
) -> Subject:
    outcomes = list(lines.values())
    name, metric = outcomes[0].setting.dataset, currency.title(outcomes[0])
    slug = f"{_slug(f'{name} {outcomes[0].evaluation.extractor}')}-" if one_of_many else ""
    slug += "score-" if many_currencies and currency is SCORE else ""
    command = f"assay plan {'--paper' if _is_paper(table) else shlex.quote(str(table))}"
    if one_of_many:
        command += f" --dataset {shlex.quote(name)}"
    if many_currencies:
        command += f" --by {currency.name}"
    priced: PriceReport | str
    try:
        (found,) = comparable(lines, str(table), currency=currency)
        priced = price_report(replace(found, from_paper=_is_paper(table)))
    except ValueError as error:
        priced = f"Nothing to price yet. {error}"
    above = None
    scored = currency is SCORE and all(outcome.evaluation.score_above_error for outcome in outcomes)
    if scored and isinstance(priced, PriceReport):
        (found,) = comparable(lines, str(table), currency=SCORE_ABOVE)
        above = price_report(found)
    tables = study_tables(outcomes, currency)
    if currency is FD and not _is_paper(table) and (beside := _beside_paper(outcomes)) is not None:
        tables.append(beside)
    if one_of_many:
        tables = [replace(each, title=f"{name}: {each.title}") for each in tables]
    fraction = _fraction_panel(outcomes, currency)
    panels = {} if fraction is None else {f"{currency.name}_by_clean_fraction": fraction}
    if isinstance(priced, PriceReport):
        law, price = price_panels(priced)
        law = replace(law, y_label=metric, title=f"{metric} measured (points), and by the law")
        panels |= {"law": law} if priced.law else {}
        if price.series and not (priced.law and priced.law_is_open(priced.bounds[-1].sigma)):
            panels["price"] = replace(price, title="Noisy images that replace a clean one")
    if not one_of_many:
        by_step = training_panels(folder / "training.csv", currency.name, metric)
        if many_currencies and currency is SCORE:
            by_step.pop("loss_by_step", None)  # it is shown with FD
        panels |= by_step | (level_panels(folder / "levels.csv") if currency is SCORE else {})
    values, noise = averages(outcomes, currency), folder / "figures" / f"{slug}noise_levels.png"
    samples = []
    for role, setting in headline_settings(values).items():
        if (path := folder / "figures" / _sample_name(slug, role)).exists():
            title = headline_title(setting)
            alt = f"Samples of the model trained on {title}, {metric} {values[setting]}"
            samples.append(Picture(title, alt, path))
    alt = f"Images of {name} at each noise level of the study"
    levels = Picture("Noise levels", alt, noise) if noise.exists() else None
    title = f"{name}, by {'the held-out score' if currency is SCORE else metric}" if many_currencies else name
    return Subject(title, slug, outcomes, currency, priced, above, command, tables, panels, samples, levels)


def _beside_paper(outcomes: Sequence[Outcome]) -> Table | None:
    """The FID of one of the paper's own studies beside the paper's, where it has the same setting."""
    dataset = PAPER_STUDIES.get(outcomes[0].setting.dataset)
    if dataset is None or FD.title(outcomes[0]) != "FID":
        return None

    def key(setting: Setting) -> tuple[object, ...]:
        table = setting.table if setting.table in PAPER_CONFIGURATIONS else ""
        return table, setting.clean_fraction, setting.levels, setting.sampling, setting.consistency

    theirs = averages(each for each in read_outcomes(PAPER).values() if each.setting.dataset == dataset)
    known = {key(setting): str(average) for setting, average in theirs.items()}
    rows = []
    for setting, average in averages(outcomes).items():
        text = known.get(key(setting))
        if dataset == "imagenet" and setting.table in PAPER_CONFIGURATIONS:
            text = f"{PAPER_CONFIGURATIONS[setting.table]:.2f}"
        if text is not None:
            rows.append((setting.words(shares=True), str(average), text))
    header = ("available data", "FID", "FID in the paper")
    return Table("Beside the paper's numbers", header, tuple(dict.fromkeys(rows))) if rows else None


def _is_paper(table: Path) -> bool:
    return table.resolve() == PAPER.resolve()


def _fraction_panel(outcomes: Sequence[Outcome], currency: Currency) -> Panel | None:
    """The paper's first figure: FD against the clean images, alone and with each kind of noisy ones."""
    grid = {
        s: value for s, value in averages(outcomes, currency).items() if s.table == "clean_mix" and s.num_clean
    }
    simulated = all(setting.clean_fraction is not None for setting in grid)
    curves: dict[str, dict[float, Average]] = {"clean images alone": {}}
    for setting in sorted(grid):
        name, x = "clean images alone", setting.num_clean
        if setting.noisy:
            name = f"with {setting.model_copy(update={'num_clean': 0}).words()}"
        if simulated and setting.clean_fraction is not None:
            x = 100 * setting.clean_fraction
            name = f"the rest at noise {setting.sigma:g}" if setting.sigma else name
        if not (simulated and len(setting.noisy) > 1):
            curves.setdefault(name, {})[x] = grid[setting]
    if simulated and (all_clean := curves["clean images alone"].get(100)):
        for curve in curves.values():  # the same model for every noise level
            curve[100] = all_clean
    metric, x_label = currency.title(outcomes[0]), "clean part, %" if simulated else "clean images"
    title = f"{metric} against the clean " + ("part of the data" if simulated else "images")
    panel = Panel(title, x_label, metric, log_y=True)
    for which, (name, curve) in enumerate(curves.items()):
        if curve:
            points = [
                (x, v.mean, v.mean - (v.std or 0.0), v.mean + (v.std or 0.0)) for x, v in sorted(curve.items())
            ]
            x, y, low, high = np.array(points).T
            colour = COLOURS[which % len(COLOURS)]
            panel.series.append(Series("", "line", x, y, colour=colour))
            panel.series.append(Series(name, "bars", x, y, np.maximum(low, 0.5 * y), high, colour=colour))
    return panel if panel.series else None


def _write_training(opened: OpenStudy, found: Sequence[tuple[Arm, Outcome]], shown: Iterable[Arm]) -> None:
    """`training.csv`: by step the loss of the headline's runs, and FD and score where they were measured.

    They were measured along training, or where lengths of training were compared.
    """
    buffer = io.StringIO()
    writer = csv.DictWriter(
        buffer, ("curve", "setting", "step", "loss", FD.name, SCORE.name), lineterminator="\n"
    )
    writer.writeheader()
    shown, curve = list(shown), -1

    def write(setting: object, points: Iterable[Mapping[str, object]]) -> None:
        nonlocal curve
        curve += 1
        writer.writerows({"curve": curve, "setting": csv_cell(str(setting)), **point} for point in points)

    # Settings that differ only in how they are sampled share a run: the first one represents it.
    runs: dict[Path, Arm] = {}
    for arm in shown:
        runs.setdefault(opened.picture(arm).parent, arm)
    for run_dir, arm in runs.items():
        path = run_dir / "metrics.jsonl"
        with naming(path, "remove it, and the report is written without it"):
            points = [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []
            losses = [{"step": point["step"], "loss": point["loss"]} for point in points]
        write(headline_title(arm.setting), losses[:: -(-len(losses) // _MAX_CURVE) or 1])
    for arm, outcome in found:
        if arm in shown:
            write(headline_title(arm.setting), (point.model_dump() for point in outcome.evaluation.along))
    lengths: dict[tuple[Setting, str], dict[int, list[float]]] = {}
    for arm, outcome in found:
        if (value := FD.value(outcome)) is not None:
            # Runs that differ only in length, seed and the name of their extra are points of one curve.
            other = json.dumps(arm.config.train.model_dump(mode="json", exclude={"num_steps", "seed"}))
            setting = arm.setting.model_copy(update={"seed": None, "table": ""})
            by_step = lengths.setdefault((setting, other), {})
            by_step.setdefault(arm.config.train.num_steps, []).append(value)
    for (setting, _), by_step in lengths.items():
        if len(by_step) > 1:
            write(setting, ({"step": s, FD.name: float(np.mean(v))} for s, v in sorted(by_step.items())))
    with write_whole(opened.folder / "training.csv") as partial:
        partial.write_text(buffer.getvalue())


@contextmanager
def _rows(path: Path) -> Iterator[list[dict[str, str]]]:
    """The rows of a table of a report, none if there is none; an error while they are used names the file."""
    with naming(path, "remove it, and run `assay study report` again"):
        yield list(csv.DictReader(io.StringIO(path.read_text(), newline=""))) if path.exists() else []


def training_panels(path: Path, column: str, metric: str) -> dict[str, Panel]:
    """Curves of `training.csv`: this measure, and the loss."""
    panels = {}
    with _rows(path) as rows:
        for name, label in ((column, metric), ("loss", "Loss")):
            points = [row for row in rows if row.get(name)]
            panel = Panel(f"{label} against training steps", "step", label, log_y=name != SCORE.name)
            for which, curve in enumerate(dict.fromkeys(row["curve"] for row in points)):
                mine = [row for row in points if row["curve"] == curve]
                x, y = np.array([(row["step"], row[name]) for row in mine], float).T
                colour = COLOURS[which % len(COLOURS)]
                panel.series.append(Series(mine[0]["setting"], "line", x, y, colour=colour))
                if len(x) < _MAX_MARKED:
                    panel.series.append(Series("", "points", x, y, colour=colour))
            if points:
                panels[f"{name}_by_step"] = panel
    return panels


def _write_levels(path: Path, records: Mapping[Setting, Score]) -> None:
    """`levels.csv`: error by noise level of the headline's models, and its difference from few clean images'.

    Differences are those of all clean images, and of the few with noisy ones of any level. All are of the first
    seed, at the best stopping time; `error` is the standard error over held-out images.
    """
    roles, rows = headline_settings(records), list[tuple[str, Setting, Curve]]()
    for role, setting in roles.items():
        if role != "noisy_truncated":  # another way of sampling the same model
            rows.append(("error", setting, records[setting].curve(_NUM_LEVELS)))
    if few := roles.get("few_clean"):
        others = [s for s in records if s.table == "clean_mix" and s.noisy and s.num_clean == few.num_clean]
        for setting in [*(s for role, s in roles.items() if role == "all_clean"), *others]:
            rows.append(("difference", setting, records[setting].curve(_NUM_LEVELS, minus=records[few])))
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(("kind", "setting", "sigma", "value", "error"))
    for kind, setting, curve in rows:
        for point in zip(curve.sigma, curve.value, curve.standard_error, strict=True):
            writer.writerow((kind, csv_cell(setting.words(shares=True)), *point))
    with write_whole(path) as partial:
        partial.write_text(buffer.getvalue())


def level_panels(path: Path) -> dict[str, Panel]:
    """Curves of `levels.csv`: errors and their differences by noise level."""
    titles = {
        "error": ("Denoising error by noise level", "error / noise², per dimension"),
        "difference": ("Difference from the few clean images alone", "difference in score"),
    }
    panels = {}
    with _rows(path) as rows:
        for kind, (title, label) in titles.items():
            panel = Panel(title, "noise level", label, log_x=True)
            mine = [row for row in rows if row["kind"] == kind]
            for which, name in enumerate(dict.fromkeys(row["setting"] for row in mine)):
                points = [(row["sigma"], row["value"], row["error"]) for row in mine if row["setting"] == name]
                x, y, error = np.array(points, float).T
                colour = COLOURS[which % len(COLOURS)]
                panel.series.append(Series("", "band", x, y, y - 2 * error, y + 2 * error, colour=colour))
                panel.series.append(Series(name, "line", x, y, colour=colour))
            if mine:
                panels[f"{kind}_by_level"] = panel
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


def _copy(source: Path, target: Path) -> None:
    with write_whole(target) as partial:
        partial.write_bytes(source.read_bytes())


def _sample_name(slug: str, role: Role) -> str:
    return f"{slug}samples-{role}.png"


def _slug(text: str) -> str:
    """A safe part of a file name."""
    return re.sub(r"[^\w.]+", "-", text).strip("-.").lower() or "unnamed"
