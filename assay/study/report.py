"""The report of a study: tables, figures, and one page that opens anywhere, offline.

    results.csv, levels.csv          what was measured, by configuration and by band of noise levels
    figures/*.png                    the same figures as in the page, noise levels and samples
    tables.md                        the paper's tables
    report.html                      all of it in one file, which runs no script

`write_report` lays out the files of a study that was run, `report_from_table` shows any `results.csv`. Outcomes
that differ only in the training seed are repeats: tables and sentences show their mean, with the deviation over
seeds (or over ranges of samples, if there is one seed).
"""

import base64
import hashlib
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from assay.data.picture import noise_picture
from assay.errors import AssayError
from assay.figure import COLOURS, Panel, Series, draw_svg, save_png
from assay.files import differences, hold_lock, write_text, write_whole
from assay.metrics.evaluate import titles
from assay.outcome import METRICS, Configuration, Outcome, Sampling, percent, read_outcomes, write_outcomes
from assay.pricing.paper import PAPER, PAPER_CONFIGURATIONS, PAPER_STUDIES
from assay.pricing.price import Prices, price_all
from assay.pricing.quote import Quote, quote
from assay.pricing.results import write_levels
from assay.pricing.words import GOALS, Table, amount, detail_table, doubts, price_panels, sentence
from assay.pricing.words import headline as price_headline
from assay.study.spec import Run, read_study
from assay.study.stages import OpenStudy

Role = Literal["all_clean", "noisy", "noisy_truncated", "noisy_consistent", "few_clean", "mix"]
_PAGE = Path(__file__).with_name("page")
SPREAD = (
    "± is the standard deviation over seeds or blocks; where there is one, that over sets of samples, or the "
    "standard error of a held-out loss."
)


@dataclass(frozen=True)
class Written:
    """The main results of a report, and its path: the first table of each data set, and the answer in words."""

    path: Path
    tables: list[Table]
    answer: list[str]
    prices: list[Prices]

    def __repr__(self) -> str:
        curves = sorted((self.path.parent / "figures").glob("*worth-by-level.png"))
        files = [*(f"The worth curve is {curve}" for curve in curves), f"The report is {self.path}"]
        return "\n".join([*map(str, self.tables), *self.answer, *files])


def write_report(opened: OpenStudy) -> Written | None:
    """Write everything that the finished results of a study say; None if there is none. Others wait."""
    with hold_lock(opened.folder / "report"):
        return _write_report(opened, found) if (found := opened.outcomes()) else None


def _write_report(opened: OpenStudy, found: Sequence[tuple[Run, Outcome]]) -> Written:
    outcomes = [outcome for _, outcome in found]
    write_outcomes(opened.folder / "results.csv", outcomes)
    write_levels(opened.folder / "levels.csv", opened.levels())
    figures = opened.folder / "figures"
    runs = {outcome.configuration.without_seed: run for run, outcome in reversed(found)}  # of the first seed
    for of in _shown(list(runs)):
        picture = opened.work(runs[of]).path("samples", runs[of].samples[0]).with_suffix(".png")
        if picture.exists():
            with write_whole(figures / _sample_name(of)) as partial:
                partial.write_bytes(picture.read_bytes())
    if levels := sorted({level for of in runs for level in of.levels}):
        with write_whole(figures / "noise_levels.png") as partial:
            is_real = bool((opened.source.sigma_tn > 0).any())
            noise_picture(opened.source, () if is_real else tuple(levels)).save(partial)
    followed = [each for each in outcomes if any(point.fd is not None for point in each.evaluation.along)]
    quoted = quote(opened.source, levels) if levels and opened.study.design else None
    return report_from_table(opened.folder / "results.csv", opened.folder, followed, quoted, opened.to_finish())


def report_from_table(
    table: Path, folder: Path, followed: Sequence[Outcome] = (), quoted: Quote | None = None, left: str = ""
) -> Written:
    """Write tables, figures and page into `folder`, from a results.csv and the pictures there.

    A study.toml beside the table names the images and the network. The curves of the outcomes that were
    `followed` along training are in no table. What was `quoted` is drawn beside the worth curve;
    what is `left` to do is told.
    """
    outcomes = list(read_outcomes(table).values())
    about, caution = _about(table.with_name("study.toml"))
    subjects: dict[str, dict[str, Any]] = {}
    names = list(dict.fromkeys(outcome.configuration.dataset for outcome in outcomes))
    for name in names:
        mine = [outcome for outcome in outcomes if outcome.configuration.dataset == name]
        found = subjects[name] = {"name": name, "prices": None, "cards": {}, "details": None, "doubts": []}
        found["notes"] = [SPREAD, caution]
        found |= {"facts": _facts(mine, about), "answer": [*filter(None, [headline(mine)])]}
        found["tables"] = [*study_tables(mine), *filter(None, [_beside_paper(mine)])]
        prefix = "" if len(names) == 1 else f"{_slug(name)}-"
        panels = _add_prices(found, table, name, quoted, left) + _along_panels(followed)
        for panel in panels:
            save_png([panel], folder / "figures" / f"{prefix}{_slug(panel.title)}.png")
        found["figures"] = [(each.title, _data_url("svg+xml", draw_svg(each))) for each in panels]
        found["samples"] = _samples(folder / "figures", name, mine) if len(names) == 1 else []
    tables = [each for found in subjects.values() for each in found["tables"]]
    write_text(folder / "tables.md", "\n".join(each.markdown() for each in tables))
    is_paper = table.resolve() == PAPER.resolve()
    title = names[0] if len(names) == 1 else "The paper's tables" if is_paper else table.stem
    write_text(folder / "report.html", _page(title, subjects))
    answer = [line for found in subjects.values() for line in found["answer"]]
    first = [found["tables"][0] for found in subjects.values() if found["tables"]]
    priced = [found["prices"] for found in subjects.values() if found["prices"]]
    return Written(folder / "report.html", first, answer, priced)


def _about(spec: Path) -> tuple[str, str]:
    """The images and the network of a study file, if it is there, and with what not to compare its losses."""
    with suppress(AssayError, OSError):
        study = read_study(spec)
        network = study.net.get("kind") or study.net.get("preset")
        return f"{', '.join(map(str, study.data.paths))}; network {network}", study.caution
    return "", ""


def _add_prices(
    subject: dict[str, Any], table: Path, name: str, quoted: Quote | None, left: str
) -> list[Panel]:
    """Answer with prices, if the results allow any; a card is a goal with (level, rate, sentence) of each."""
    try:
        (prices,) = price_all(table, name, quote=quoted)
    except AssayError as error:
        subject["answer"].append(f"Nothing to price yet: {left or error}")
        return []
    subject["answer"] += [price_headline(prices), *[f"{left}."] * bool(left)]
    subject |= {"prices": prices, "doubts": doubts(prices), "details": detail_table(prices)}
    for price in prices.prices:
        row = f"{price.sigma:.3g}", amount(price), sentence(price)
        subject["cards"].setdefault(GOALS[price.goal], []).append(row)
    return price_panels(prices)


def _samples(figures: Path, name: str, outcomes: Sequence[Outcome]) -> list[tuple[str, str, str, bool]]:
    """The pictures that are there: a title, what is shown in words, a data URL, and whether it is wide."""
    found = []
    for of in _shown(list(dict.fromkeys(outcome.configuration.without_seed for outcome in outcomes))):
        title, words = of.words(shares=True, levels=False), f"Samples of the model trained on {of}"
        found.append((title, words, figures / _sample_name(of), False))
    noise = f"Images of {name} at each noise level of the study"
    found.append(("Noise levels", noise, figures / "noise_levels.png", True))
    there = [each for each in found if each[2].exists()]
    return [(title, words, _data_url("png", path.read_bytes()), wide) for title, words, path, wide in there]


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


def _page(title: str, subjects: Mapping[str, Mapping[str, Any]]) -> str:
    """The report as one HTML file; its policy forbids every script, and every style but its own."""
    style = (_PAGE / "report.css").read_text(encoding="utf-8")
    environment = Environment(
        loader=FileSystemLoader(_PAGE), autoescape=True, trim_blocks=True, undefined=StrictUndefined
    )
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return environment.get_template("report.html.j2").render(
        title=title, style=style, style_hash=f"sha256-{digest}", subjects=list(subjects.values())
    )


def _data_url(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


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
    if dataset is None or outcomes[0].evaluation.title("fd") != "FID":
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


def _along_panels(outcomes: Sequence[Outcome]) -> list[Panel]:
    """The paper's figure of FD against training steps, and the same of the held-out loss."""
    panels = []
    for name, label in (("fd", "FD"), ("held_out_loss", "held-out loss")) if outcomes else ():
        panel = Panel(f"{label} against training steps", "step", label, log_y=name == "fd")
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


@dataclass(frozen=True)
class Average:
    """A mean over repeats and their standard deviation, if known; `form` is how both are written."""

    mean: float
    std: float | None
    form: str = ".2f"

    def __str__(self) -> str:
        size, form = abs(self.mean), self.form
        if form == ".2f" and (0 < size < 0.1 or 1000 <= size < math.inf):  # three digits, or no decimals
            form = ".0f" if size >= 1000 else f".{2 - math.floor(math.log10(size))}f"
        return f"{self.mean:{form}}" + ("" if self.std is None else f" ± {self.std:{form}}")


def averages(outcomes: Iterable[Outcome], metric: str = "fd") -> dict[Configuration, Average]:
    """The mean over seeds of each configuration that was measured by this metric; they have no seed."""
    repeats: dict[Configuration, dict[int | None, tuple[float, float | None]]] = {}
    for outcome in outcomes:
        if (value := outcome.value(metric)) is not None:
            of = outcome.configuration
            repeats.setdefault(of.without_seed, {})[of.seed] = value, outcome.evaluation.error(metric)
    found = {}
    for of, pairs in repeats.items():
        values = [value for value, _ in pairs.values()]
        std = next(iter(pairs.values()))[1] if len(pairs) == 1 else statistics.stdev(values)
        found[of] = Average(statistics.fmean(values), std, METRICS.get(metric, ".3g"))
    return found


def study_tables(outcomes: Sequence[Outcome]) -> list[Table]:
    """The paper's tables (headline, only noisy, clean and noisy mixed) by each metric, and all results."""
    found = []
    for metric in reversed(METRICS):
        values, name = averages(outcomes, metric), outcomes[0].evaluation.title(metric)
        found += [make(values, name) for make in (_headline_table, _only_noisy_table, _clean_mix_table)]
    names = titles(each.evaluation for each in outcomes)
    columns = {outcomes[0].evaluation.title(name): averages(outcomes, name) for name in names}
    return [*(table for table in found if table), _configurations_table("All metrics", columns)]


def headline_configurations(configurations: Iterable[Configuration]) -> dict[Role, Configuration]:
    """Those of the paper's grid that its headline compares, by their role; not all of them need to be there.

    The noise level is the highest of the grid, and few clean images are its smallest fraction.
    """
    there: dict[tuple[object, ...], Configuration] = {}
    for of in configurations:
        part = of.clean_fraction if of.table == "clean_mix" else None
        there.setdefault((of.table, part, of.sigma, of.sampling, of.consistency), of)
    grid = [of for of in there.values() if of.table == "clean_mix" and of.clean_fraction is not None]
    sigma = max((of.sigma for of in grid if of.sigma), default=math.nan)
    few = min({of.clean_fraction for of in grid if of.clean_fraction} - {1.0}, default=math.nan)
    roles: dict[Role, tuple[object, ...]] = {
        "all_clean": ("clean_mix", 1.0, None, "full", False),
        "noisy": ("only_noisy", None, sigma, "full", False),
        "noisy_truncated": ("only_noisy", None, sigma, "truncated", False),
        "noisy_consistent": ("only_noisy", None, sigma, "full", True),
        "few_clean": ("clean_mix", few, None, "full", False),
        "mix": ("clean_mix", few, sigma, "full", False),
    }
    return {role: there[key] for role, key in roles.items() if key in there}


def headline(outcomes: Sequence[Outcome]) -> str:
    """The result of the paper's grid in words; nothing of other studies."""
    values = averages(outcomes)
    roles = headline_configurations(values)
    if "mix" not in roles:
        return ""
    mix, name = roles["mix"], outcomes[0].evaluation.title("fd")
    parts = [
        f"{mix.words(shares=True, levels=False)} images at noise {mix.sigma:.3g} reach {name} {values[mix]}"
    ]
    if clean := roles.get("all_clean"):
        parts.append(f"all clean ones {values[clean]}")
    if few := roles.get("few_clean"):
        parts.append(f"the {few.words(shares=True, levels=False)} ones alone {values[few]}")
    noisy = [values[of] for role, of in roles.items() if role.startswith("noisy")]
    if noisy:
        parts.append(f"noisy ones alone {min(noisy, key=lambda value: value.mean)} at best")
    return "; ".join(parts) + "."


def _headline_table(values: Mapping[Configuration, Average], name: str) -> Table | None:
    """Table 1: the headline configurations at the highest noise of the grid."""
    roles = headline_configurations(values).values()
    rows = tuple((of.words(shares=True, levels=False), str(values[of])) for of in roles)
    at_noise = "".join(f" at noise {sigma:.3g}" for sigma in {of.sigma for of in roles if of.sigma})
    header = ("available data", *{of.dataset for of in roles})
    return Table(f"{name}{at_noise}", header, rows) if len(rows) > 1 else None


def _only_noisy_table(values: Mapping[Configuration, Average], name: str) -> Table | None:
    """Table 2: noisy images alone, by noise level and way of sampling or training."""
    here = {of: str(value) for of, value in values.items() if of.table == "only_noisy"}
    alone = {(of.levels, of.sampling, of.consistency): text for of, text in here.items()}
    clean = headline_configurations(values).get("all_clean")
    rows: list[tuple[str, ...]] = [] if clean is None else [("0", str(values[clean]), "NA", "NA")]
    ways: list[tuple[Sampling, bool]] = [("full", False), ("truncated", False), ("full", True)]
    for levels in sorted({of.levels for of in here}):
        rows.append((_levels(levels), *(alone.get((levels, *way), "NA") for way in ways)))
    header = ("noise level", "full sampling", "truncated sampling", "consistency + full sampling")
    return Table(f"{name} from noisy images alone", header, tuple(rows)) if here else None


def _clean_mix_table(values: Mapping[Configuration, Average], name: str) -> Table | None:
    """Table 3: clean images alone and mixed with noisy ones, by clean fraction."""
    mixed = {
        (of.levels, of.clean_fraction): str(value)
        for of, value in values.items()
        if of.table == "clean_mix" and of.clean_fraction is not None
    }
    fractions = sorted({p for _, p in mixed}, reverse=True)
    rows = []
    for levels in sorted({levels for levels, _ in mixed} | {()}):
        # All images are clean: the same model for every noise level.
        cells = [mixed.get((() if p == 1 else levels, p), "NA") for p in fractions]
        rows.append((f"p clean, rest noisy at {_levels(levels)}" if levels else "p clean", *cells))
    header = ("available data", *(f"p = {percent(p)}" for p in fractions))
    title = f"{name} as the mix of clean and noisy images changes"
    return Table(title, header, tuple(rows)) if fractions else None


def compared_table(first: Sequence[Outcome], second: Sequence[Outcome], names: tuple[str, str]) -> Table:
    """Two studies side by side: the configurations of either, by the metrics that both have."""
    columns = {}
    for metric in METRICS:
        if all(any(each.value(metric) for each in outcomes) for outcomes in (first, second)):
            for name, outcomes in zip(names, (first, second), strict=True):
                found = averages(outcomes, metric).items()
                alike = {of.model_copy(update={"dataset": ""}): value for of, value in found}
                columns[f"{first[0].evaluation.title(metric)}, {name}"] = alike
    return _configurations_table(f"{names[0]} and {names[1]}", columns)


def compared_settings(first: Path, second: Path) -> list[str]:
    """How the studies of two tables differ, by the study.toml beside each."""
    specs = [table.with_name("study.toml") for table in (first, second)]
    for spec in (spec for spec in specs if not spec.exists()):
        return [f"Which settings differ is not known: there is no {spec}."]
    there, here = (read_study(spec).model_dump(mode="json", exclude={"name"}) for spec in specs)
    found = differences(there, here)
    if any("pairing" in line for line in found):
        found.append("So models learn in different ways: compare losses within a study, not between the two.")
    return [f"Settings that differ, of {first.parent} there and {second.parent} here:", *(found or ["none"])]


def _configurations_table(title: str, columns: Mapping[str, Mapping[Configuration, Average]]) -> Table:
    rows: dict[object, tuple[str, ...]] = {}
    for of in dict.fromkeys(of for column in columns.values() for of in column):
        cells = (str(column.get(of, "")) for column in columns.values())
        rows.setdefault((of.title, of.noisy), (of.title, *cells))  # noisy images alone are in two tables
    return Table(title, ("configuration", *columns), tuple(rows.values()))


def _levels(levels: Sequence[float]) -> str:
    return " + ".join(f"{level:.3g}" for level in levels)
