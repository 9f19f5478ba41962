"""Writes what the reference studies found into the pages about them, from their results.csv alone.

    python studies/findings.py

A block between `<!-- findings: WHAT -->` and `<!-- end -->` is replaced; a test compares every block with what
the committed numbers give, so no figure on a page can differ from them.
"""

import csv
import math
import re
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from judged import Measured
from scipy.stats import t as student_t

from assay.figure import COLOURS, Panel, Series, save_png
from assay.mixture.rates import Curve
from assay.outcome import (
    CURRENCIES,
    FD,
    SCORE,
    SCORE_ABOVE,
    Outcome,
    Setting,
    metric,
    percent,
    read_outcomes,
)
from assay.pricing.curve import CurvePrice, curve_prices
from assay.pricing.report import between, price_report
from assay.pricing.table import PAPER, PAPER_NUM_IMAGES, read_comparable
from assay.study.report import report_from_table
from assay.study.tables import (
    Average,
    Role,
    Table,
    averages,
    format_table,
    headline_settings,
    headline_sigma,
    headline_title,
)

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
PAGES = [
    HERE.parent / "README.md",
    DOCS / "findings.md",
    DOCS / "worth.md",
    DOCS / "galaxies.md",
    *sorted(HERE.glob("*/README.md")),
]
HEADLINE = {
    "digits-unet": "digits, 8x8",
    "fashion-mnist": "Fashion-MNIST, 16x16",
    "cifar10": "CIFAR-10, 16x16",
}
ROLES: tuple[Role, ...] = (
    "all_clean",
    "mix",
    "few_clean",
    "noisy_truncated",
    "noisy_consistent",
    "noisy",
)
ABLATION = {"digits": "digits 8x8", "fashion-mnist": "Fashion-MNIST 8x8"}
ARMS = {
    "truncated law, image first, x_tn weights": "clean_mix",
    "levels clamped (the original)": "clamped levels",
    "sigma first": "sigma first",
    "x_0 weights": "x_0 weights",
    "augmentation of clean images only": "augmentation, clean images only",
    "augmentation that interpolates noise (the original)": "augmentation, interpolating noise",
    "noisy images only": "noisy only",
    "noisy images only, with consistency": "noisy only, consistency",
}


def tables(study: str, file: str = "results.csv") -> str:
    """The paper's tables, the result in words, and the price."""
    with tempfile.TemporaryDirectory() as folder:
        written = report_from_table(HERE / study / file, Path(folder))
    parts = [format_table(table, "markdown") for table in written.tables]
    return "\n".join([*parts, written.headline, "", written.prices])


def headline(currency: str = "fd") -> str:
    """The headline settings of all data sets, and of the paper where it measured the same."""
    columns = {title: _outcomes(study) for study, title in HEADLINE.items()}
    name, roles = "held-out score in nats per dimension, at the best stopping time", ROLES
    if currency == "fd":
        paper = [each for each in read_outcomes(PAPER).values() if each.setting.dataset == "cifar10"]
        columns["the paper's CIFAR-10 (FID: other metric, other scale), 32x32"] = paper
        name = "FD-classifier"
    else:
        roles = tuple(role for role in ROLES if role != "noisy_truncated")  # the same model, sampled otherwise
    values = [averages(outcomes, CURRENCIES[currency]) for outcomes in columns.values()]
    settings = [headline_settings(each) for each in values]
    rows = [
        (headline_title(settings[0][role]), *(str(v[s[role]]) for v, s in zip(values, settings, strict=True)))
        for role in roles
    ]
    header = ("available data", *(_with_noise(title, outcomes) for title, outcomes in columns.items()))
    title = f"{name[0].upper()}{name[1:]}: mean and deviation over three training seeds or more"
    return format_table(Table(title, header, tuple(rows)), "markdown").rstrip()


def _settings(outcomes: list[Outcome]) -> list[Setting]:
    return [outcome.setting for outcome in outcomes]


def _with_noise(title: str, outcomes: list[Outcome]) -> str:
    return f"{title}, noise {headline_sigma(_settings(outcomes)):g}"


KID = replace(metric("kid"), form=".4f")


def claims(study: str) -> str:
    """Each claim of the paper in each currency, by noise level: holds, fails or undecided."""
    outcomes = _outcomes(study)
    currencies = {"FD-classifier": FD, "KID": KID, "score": SCORE, "score above the noise": SCORE_ABOVE}
    measured = {title: Measured(outcomes, currency) for title, currency in currencies.items()}
    parts = []
    for sigma in _judged_levels(outcomes):
        columns = {title: each.claims(sigma) for title, each in measured.items() if each.values}
        parts.append(_claims_table(f"The paper's claims at noise {sigma:g}", columns))
    return "\n\n".join(parts)


def _judged_levels(outcomes: list[Outcome]) -> list[float]:
    """The noise levels that have settings with and without clean images, highest first."""
    alone = {outcome.setting.sigma for outcome in outcomes if outcome.setting.table == "only_noisy"}
    return sorted((sigma for sigma in alone if sigma is not None), reverse=True)


def all_claims(currency: str, level: str) -> str:
    """Each claim of the paper about a noise level on each data set, in one currency."""
    columns = {
        title: Measured(_outcomes(study), CURRENCIES[currency]).claims(float(level))
        for study, title in HEADLINE.items()
    }
    name = "FD-classifier" if currency == "fd" else "the held-out score"
    return _claims_table(f"The paper's claims at noise {level}, by {name}", columns)


def _claims_table(title: str, columns: dict[str, dict[str, str]]) -> str:
    every = list(columns.values())
    rows = [(claim, *(each[claim] for each in every)) for claim in every[0]]
    judged = tuple(row for row in rows if any(row[1:]))
    found = Table(f"{title} (difference and its 95 % interval)", ("claim", *columns), judged)
    return format_table(found, "markdown").rstrip()


def by_score(study: str) -> str:
    """Settings with several seeds in the order of their score, and how far neighbours are apart."""
    final = replace(
        SCORE,
        value=lambda outcome: outcome.evaluation.score_final,
        error=lambda outcome: outcome.evaluation.score_final_error,
    )
    outcomes = [each for each in _outcomes(study) if each.setting.sampling == "full"]
    lines = []
    for sigma in _judged_levels(outcomes):
        for moment, currency in {"at the end of training": final, "at the best stopping time": SCORE}.items():
            measured = Measured(outcomes, currency)
            there = [s for s, values in measured.values.items() if len(values) > 1]
            grid = [s for s in there if s.table in ("clean_mix", "only_noisy") and s.levels in ((), (sigma,))]
            once = {headline_title(setting): setting for setting in grid}  # noisy-only is in two tables
            order = sorted(once.values(), key=measured.mean)
            text = f"{headline_title(order[0])} {measured.mean(order[0]):.3f}"
            for low, high in pairwise(order):
                gain = measured.gain(low, high)
                apart = f"{gain.value / gain.error:.1f} standard errors above"
                text += f" < {headline_title(high)} {measured.mean(high):.3f} ({apart})"
            lines.append(f"- noise {sigma:g}, {moment}: {text}")
    return "\n".join(lines)


def worth(study: str) -> str:
    """What a noisy image is worth in clean ones, by noise level and clean fraction, in every currency."""
    cells: dict[tuple[float, float], dict[str, str]] = {}
    for by, points in worth_points(study).items():
        for point in points:
            cells.setdefault((point.sigma, point.clean_fraction), {})[by] = str(point)
    columns = {"score": "score", "score_above": "score above the noise", "fd": "FD-classifier"}
    rows = tuple(
        (f"{sigma:g}", percent(part), *(found.get(by, "") for by in columns))
        for (sigma, part), found in sorted(cells.items())
    )
    header = ("noise", "clean images", *(f"by {name} (95 %)" for name in columns.values()))
    return format_table(Table("Worth of a noisy image in clean ones", header, rows), "markdown").rstrip()


@dataclass(frozen=True)
class Worth:
    """What a noisy image of one mix is worth in clean ones, from 0 to 1, and the 95 % interval.

    A mix that is surely better than all clean images makes it 1, one that is surely worse than the fewest 0.
    """

    sigma: float
    clean_fraction: float
    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if self.low == self.high:
            return "1 or more" if self.low else "nothing"
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


def worth_points(study: str) -> dict[str, list[Worth]]:
    """The worth by each mix of a study, by the learning curve of clean images alone, in every currency."""
    found: dict[str, list[Worth]] = {}
    for by, currency in CURRENCIES.items():
        (results,) = read_comparable(HERE / study / "results.csv", min_clean_fraction=0, currency=currency)
        for price in curve_prices(results):
            for mix in price.mixes:
                clean, noisy = results.num_clean[mix.row], results.num_noisy[mix.row]
                equal = mix.num_images if mix.outside is None else mix.low  # 0 or infinity: beyond an end
                ends = (min(max((each - clean) / noisy, 0.0), 1.0) for each in (equal, mix.low, mix.high))
                found.setdefault(by, []).append(Worth(price.sigma, clean / (clean + noisy), *ends))
    return found


_WIDEST = 0.5  # interval of a worth that is drawn; wider ones are in the tables


def worth_figure() -> list[Panel]:
    """What noisy images are worth, and at which noise levels they teach."""
    panels = []
    for study, title in HEADLINE.items():
        drawn: dict[tuple[str, str], list[Worth]] = {}
        for by, points in worth_points(study).items():
            for point in points:
                if by != "score_above" and point.high - point.low <= _WIDEST:
                    kind = percent(point.clean_fraction), "FD" if by == "fd" else "score"
                    drawn.setdefault(kind, []).append(point)
        name = f"{title}: worth of a noisy image in clean ones"
        panel = Panel(name, "noise of the noisy images", "worth, with its 95 % interval", log_x=True)
        for number, ((part, by), mine) in enumerate(sorted(drawn.items())):
            x = [point.sigma * 1.05 ** (number - len(drawn) / 2) for point in mine]  # side by side
            value, low, high = ([getattr(point, end) for point in mine] for end in ("value", "low", "high"))
            colour = COLOURS[1 + number % (len(COLOURS) - 1)]
            series = Series(f"{part} clean images, by {by}", "bars", x, value, low, high, colour=colour)
            panel.series.append(series)
        panels += [panel, _level_panel(study, title)]
    return panels


def _level_panel(study: str, title: str) -> Panel:
    """How much better all clean images, and mixes, are than few clean images alone, by noise level."""
    with open(HERE / study / "levels.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["kind"] == "difference"]
    name = f"{title}: what other images add to 10 % clean ones"
    panel = Panel(name, "noise level", "gain in score per unit of log noise (nats per dimension)", log_x=True)
    for name, colour in zip(dict.fromkeys(row["setting"] for row in rows), cycle(COLOURS[1:]), strict=False):
        points = [(row["sigma"], row["value"], row["error"]) for row in rows if row["setting"] == name]
        x, y, error = np.array(points, float).T
        panel.series.append(Series("", "band", x, -y, -y - 2 * error, -y + 2 * error, colour=colour))
        panel.series.append(Series(name, "line", x, -y, colour=colour))
        if level := re.search(r"noisy at (\S+)", name):  # the noise of these images
            panel.series.append(
                Series("", "dashed", [float(level[1])] * 2, [0, max(-y)], colour=colour, width=1)
            )
    return panel


def ablation() -> str:
    """Every arm on both data sets, with its ratio to the first."""
    rows = []
    for title, table in ARMS.items():
        base = "noisy only" if table.startswith("noisy") else "clean_mix"
        pairs = [(_arm(data, table), _arm(data, base)) for data in ABLATION]
        rows.append((title, *(f"{value} ({value.mean / first.mean:.2f}x)" for value, first in pairs)))
    titles = [_with_noise(title, _outcomes("ablation", f"{data}.csv")) for data, title in ABLATION.items()]
    found = Table("FD-classifier, three seeds", ("choice", *titles), tuple(rows))
    return format_table(found, "markdown").rstrip()


def additions() -> str:
    """What Assay adds over the original code, with the effect that the ablation measured."""

    def effect(original: str, ours: str) -> str:
        pairs = [(_arm(data, original).mean, _arm(data, ours).mean, title) for data, title in ABLATION.items()]
        return "; ".join(f"FD {before:.2f} -> {after:.2f} ({title})" for before, after, title in pairs)

    clamped = effect("clamped levels", "clean_mix")
    interpolated = effect("augmentation, interpolating noise", "augmentation, clean images only")
    rows = [
        ("levels below an image's noise clamped to it", "the law truncated to levels it may serve", clamped),
        ("augmentation interpolates noisy images", "noisy images are never resampled", interpolated),
        (
            "consistency loss biased, gradient into both levels, 2 to 3 times the cost",
            "unbiased, the higher level teaches, the cost is in bench/",
            "both can be trained (`train.consistency.method`)",
        ),
        ("one noise level, rounded to 8 bits", "any level per image, float files", "exact in tests"),
        (
            "a restart repeats or loses work",
            "an interrupted run finishes with the same bits",
            "over 100 interruptions in a test",
        ),
        ("a box of prices", "bounds, law, planner, all with intervals", "`assay price --paper`"),
        ("FID of counts that differ", "rejected; KID and others beside it", "`assay evaluate`"),
        ("no code for the theory", "estimators and bounds", "studies/mixture-rates"),
        ("EDM's networks", "the same weights, and fast small ones", "bench/"),
    ]
    return format_table(
        Table("Over the original", ("original", "Assay", "effect"), tuple(rows)), "markdown"
    ).rstrip()


def _arm(data: str, table: str) -> Average:
    found = averages(_outcomes("ablation", f"{data}.csv"))
    (value,) = (value for setting, value in found.items() if setting.table == table)
    return value


def rates() -> str:
    """Measured exponents beside the theory's."""
    with open(HERE / "mixture-rates" / "results.csv", newline="") as file:
        points = list(csv.DictReader(file))
    rows = []
    for name in dict.fromkeys(point["curve"] for point in points):
        mine = [point for point in points if point["curve"] == name]
        size, error = ([float(point[key]) for point in mine] for key in ("num_samples", "error"))
        theory = 0.5 if "separated" in name else 1 / 6
        curve = Curve(name, np.array(size), np.array(error), theory)
        rows.append((name, f"{size[0]:,.0f} to {size[-1]:,.0f}", f"{curve.slope:.3f}", f"{theory:.3f}"))
    return format_table(
        Table("error ~ n^-b, k = 2", ("samples", "n", "b measured", "b in theory"), tuple(rows)), "markdown"
    ).rstrip()


def distortions(study: str) -> str:
    """How far real images move from other real ones when they are made worse (`examples/degrade.py`)."""
    with open(HERE / study / "distortions.csv", newline="") as file:
        measured = list(csv.DictReader(file))
    extractors = dict.fromkeys(line["extractor"] for line in measured)
    found = {(line["damage"], line["amount"], line["extractor"]): float(line["fd"]) for line in measured}
    rows = [
        (f"{damage}: {amount}", *(f"{found[damage, amount, name]:.3g}" for name in extractors))
        for damage, amount in dict.fromkeys((line["damage"], line["amount"]) for line in measured)
    ]
    header = ("real images", *(f"FD-{name}" for name in extractors))
    return format_table(Table("Real images, made worse", header, tuple(rows)), "markdown").rstrip()


def costs(study: str) -> str:
    """What the study took."""
    found = _outcomes(study)
    trained, sampled = ({getattr(each, f"{what}_seconds") for each in found} for what in ("train", "sample"))
    return (
        f"{len(found)} settings from {len(trained)} trainings of {statistics.median(trained):.0f} s "
        f"(median, one core), {(sum(trained) + sum(sampled)) / 60:.0f} core-minutes in all."
    )


def prices(study: str) -> str:
    """Noisy images that replace a clean one, by bounds, learning curve and law, beside the paper's CIFAR-10."""
    tables = {
        study: read_comparable(HERE / study / "results.csv")[0],
        "the paper's CIFAR-10": read_comparable(
            PAPER, dataset="cifar10", num_images=PAPER_NUM_IMAGES["cifar10"]
        )[0],
    }
    rows = []
    for name, results in tables.items():
        for row in price_report(results).price_rows():
            bounds = row["contradiction"] or _range(row, "noisy_per_clean")
            fits = [f"{row[fit]:.2f} ({_range(row, fit)})" for fit in ("curve", "law")]
            rows.append((name, f"{row['sigma']:g}", bounds, _range(row, "interval"), *fits))
    header = ("data", "noise", "bounds", "95 % of the bounds", "learning curve (95 %)", "law (95 %)")
    return format_table(Table("Noisy images for one clean image", header, tuple(rows)), "markdown").rstrip()


def prices_by(study: str) -> str:
    """The price in every currency, in words, from all mixes."""
    lines = []
    for by in ("score", "score_above", "fd"):
        (results,) = read_comparable(
            HERE / study / "results.csv", min_clean_fraction=0, currency=CURRENCIES[by]
        )
        report = price_report(results)
        lines += [f"- {report.sentence(bounds.sigma)}" for bounds in report.bounds]
    return "\n".join(lines)


def noise(study: str) -> str:
    """What `assay data noise` measured, beside what the simulator knows."""
    with open(HERE / study / "noise.csv", newline="") as file:
        measured = list(csv.DictReader(file))
    rows = []
    for line in measured:
        truth, value, low, high = (float(line[name]) for name in ("truth", "measured", "low", "high"))
        ends = f"{value:.4g} ({low:.4g} to {high:.4g})"
        rows.append(
            (line["quantity"], f"`{line['command']}`", f"{truth:.4g}", ends, f"{value / truth - 1:+.1%}")
        )
    header = ("in ADU", "`assay data noise`", "truth", "measured (95 %)", "error")
    return format_table(Table("Measured noise", header, tuple(rows)), "markdown").rstrip()


def _range(row: dict[str, Any], name: str) -> str:
    return between(row[f"{name}_low"], row[f"{name}_high"])


def methods(study: str, file: str = "results.csv") -> str:
    """Other methods beside the headline's, in every measure."""
    outcomes = _outcomes(study, file)
    columns = {"FD-classifier": FD, **{name: metric(name) for name in ("precision", "recall")}}
    columns |= {"score": SCORE, "at the end": replace(metric("score_final"), form=".3f")}
    found = {title: averages(outcomes, currency) for title, currency in columns.items()}
    shown = [*headline_settings(found["FD-classifier"]).values()]
    shown += [setting for setting in found["FD-classifier"] if setting.table not in ("clean_mix", "only_noisy")]
    rows = []
    for setting in shown:
        name = f"{setting.table}: " * (setting.table not in ("clean_mix", "only_noisy", "loops"))
        rows.append((name + setting.words(shares=True), *(str(each[setting]) for each in found.values())))
    num_seeds = {len(values) for setting, values in Measured(outcomes, FD).values.items() if setting in shown}
    title = f"Seeds per setting: {' or '.join(map(str, sorted(num_seeds)))}"
    return format_table(Table(title, ("setting", *columns), tuple(rows)), "markdown").rstrip()


def gap_closed(currency: str) -> str:
    """How much of the gap between the original recipe with 10 % clean images and all clean ones is closed."""
    rows: dict[str, list[str]] = {}
    for study in HEADLINE:
        measured = Measured(_outcomes(study), CURRENCIES[currency])
        roles = headline_settings(measured.values)
        extra = {setting.table: setting for setting in measured.values if setting.num_clean}
        gap = measured.gain(roles["all_clean"], extra["original recipe"])
        mine = {"ours": roles["mix"], "ours, images drawn first": extra["image first"]}
        for name, setting in (mine | {"ours, 2 loops": extra["loops"]}).items():
            gain = measured.gain(setting, extra["original recipe"])
            share = gain.value / gap.value
            error = math.hypot(gain.interval, share * gap.interval) / abs(gap.value)  # to first order
            rows.setdefault(name, []).append(f"{share:.2f} ± {error:.2f}")
    name = "FD-classifier" if currency == "fd" else "the held-out score"
    title = f"Share of the gap between the original recipe and all clean images that is closed, by {name}"
    cells = tuple((method, *found) for method, found in rows.items())
    return format_table(Table(title, ("method", *HEADLINE.values()), cells), "markdown").rstrip()


def bad_images() -> str:
    """What 1,800 bad images of each kind add to 200 clean ones, and what one is worth by the learning curve."""
    outcomes, path = _outcomes("beyond", "bad_images.csv"), HERE / "beyond" / "bad_images.csv"
    worth = {
        (each.dataset, currency.name): price
        for currency in (SCORE, FD)
        for each in read_comparable(path, currency=currency)
        for price in curve_prices(each)
    }
    fd, score = averages(outcomes, FD), averages(outcomes, SCORE)
    rows, kinds = [], sorted({setting.dataset for setting in fd})
    for setting in fd:
        cells = ["", ""]
        if setting.noisy:
            use = ", as if clean" if setting.table == "as if clean" else f", used from {setting.sigma:.3g}"
            name = f"200 clean + 1,800 with {setting.dataset}{use}"
            if setting.table == "clean_mix":
                cells = [_worth(worth[setting.dataset, currency.name]) for currency in (SCORE, FD)]
        elif setting.dataset == kinds[0]:  # the same for each kind
            name = setting.words()
        else:
            continue
        rows.append((bool(setting.noisy), (name, f"{fd[setting]}", f"{score[setting]}", *cells)))
    header = ("images", "FD-classifier", "score", "worth by score (95 %)", "worth by FD (95 %)")
    num_seeds = len({outcome.setting.seed for outcome in outcomes})
    in_order = tuple(row for _, row in sorted(rows, key=lambda row: row[0]))
    return format_table(Table(f"{num_seeds} seed(s)", header, in_order), "markdown").rstrip()


def _worth(price: CurvePrice) -> str:
    """What a bad image is worth in clean ones."""
    if price.worth is None:
        return "outside the curve"
    low, high = price.interval or (0.0, 1.0)
    return f"{max(price.worth, 0.0):.2f} ({low:.2f} to {high:.2f})"


def incomplete(file: str) -> str:
    """Every method on incomplete images, in every measure: the mean over seeds."""
    with open(HERE / "beyond" / file, newline="") as opened:
        lines = list(csv.DictReader(opened))
    what, rows = next(iter(lines[0])), []
    for images, method in dict.fromkeys((line[what], line["method"]) for line in lines):
        mine = [line for line in lines if (line[what], line["method"]) == (images, method)]
        cells = [f"{statistics.fmean(float(line[key]) for line in mine):.3g}" for key in _INCOMPLETE]
        rows.append((f"{float(images):.0%}" if what == "missing" else images, method, *cells))
    header = (what, "method", "FD-classifier", "precision", "recall", "score", "at the end")
    num_seeds = len({line["seed"] for line in lines})
    return format_table(Table(f"{num_seeds} seed(s)", header, tuple(rows)), "markdown").rstrip()


def one_step() -> str:
    """Students beside their teachers, and along their distillation: mean and deviation over seeds."""
    with open(HERE / "beyond" / "one_step.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    seeds, names = (dict.fromkeys(line[key] for line in lines) for key in ("seed", "data"))
    steps = dict.fromkeys(line["step"] for line in lines if line["method"] == "student")
    rows, students = list[tuple[str, ...]](), dict[tuple[str, str], list[dict[str, str]]]()
    gains = list[str]()
    for data in names:
        mine = [line for line in lines if line["data"] == data]
        groups = {name: [line for line in mine if line["method"] == name] for name in _TEACHERS}
        along = [
            [line for line in mine if (line["method"], line["seed"]) == ("student", seed)] for seed in seeds
        ]
        groups["student, at the end"] = [found[-1] for found in along]
        for name, key in (
            ("chosen by noisy images", "fd_noised"),
            ("lowest FD, which needs clean images", "fd"),
        ):
            groups[f"student, {name}"] = [min(found, key=lambda line: float(line[key])) for found in along]
        for name, found in groups.items():
            ratio = [
                {"ratio": str(float(one["fd"]) / float(other["fd"]))}
                for one, other in zip(found, groups["teacher, truncated"], strict=True)
            ]
            places = ", ".join(line["step"] for line in (found[:1] if name in _TEACHERS else found))
            cells = [_over_seeds(found, key) for key in ("fd", "precision", "recall")]
            cost = _over_seeds(found, "train_seconds", 0)
            cells[1:1] = [_over_seeds(ratio, "ratio")]
            rows.append((data, name, found[0]["evaluations"], *cells, places, cost))
        chosen = groups["student, chosen by noisy images"]
        parts = (f"{_paired(groups[name], chosen)} below {name.split(', ')[1]} sampling" for name in _TEACHERS)
        gains.append(f"- {data}: the student chosen by noisy images is {' and '.join(parts)} in FD.")
        made = [line for line in mine if line["method"] == "student"]
        students |= {(data, step): [line for line in made if line["step"] == step] for step in steps}
    header = ("data", "samples", "evaluations", "FD-classifier", "of truncated", "precision", "recall")
    one = Table(f"{len(seeds)} seeds", (*header, "steps", "seconds"), tuple(rows))
    columns = [(data, key, title) for data in names for key, title in (("fd", "FD"), ("fd_noised", "noised"))]
    during = [
        (step, *(_over_seeds(students[data, step], key, 2 + (key != "fd")) for data, key, _ in columns))
        for step in steps
    ]
    titles = ("step of distillation", *(f"{data}: {title}" for data, _, title in columns))
    two = Table(f"The student along its distillation, {one.title}", titles, tuple(during))
    return "\n".join([format_table(one, "markdown"), *gains, "", format_table(two, "markdown")]).rstrip()


_TEACHERS = ("teacher, full", "teacher, truncated")


def _paired(high: list[dict[str, str]], low: list[dict[str, str]]) -> str:
    """The mean difference in FD over seeds, with its 95 % interval by Student's t."""
    found = [float(one["fd"]) - float(other["fd"]) for one, other in zip(high, low, strict=True)]
    mean, error = statistics.fmean(found), statistics.stdev(found) / math.sqrt(len(found))
    reach = float(student_t.ppf(0.975, len(found) - 1)) * error
    return f"{mean:.2f} (95 %: {mean - reach:.2f} to {mean + reach:.2f})"


def _over_seeds(lines: list[dict[str, str]], key: str, digits: int = 2) -> str:
    values = [float(line[key]) for line in lines]
    return f"{statistics.fmean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


_INCOMPLETE = ("fd", "precision", "recall", "score", "score_final")
BLOCKS: dict[str, Callable[..., str]] = {
    "methods": methods,
    "gap_closed": gap_closed,
    "bad_images": bad_images,
    "incomplete": incomplete,
    "one_step": one_step,
    "tables": tables,
    "headline": headline,
    "claims": claims,
    "all_claims": all_claims,
    "worth": worth,
    "by_score": by_score,
    "ablation": ablation,
    "additions": additions,
    "rates": rates,
    "costs": costs,
    "prices": prices,
    "prices_by": prices_by,
    "noise": noise,
    "distortions": distortions,
}


def _outcomes(study: str, file: str = "results.csv") -> list[Outcome]:
    return list(read_outcomes(HERE / study / file).values())


def renew(text: str) -> str:
    """The text with every block as the committed results give it."""

    def block(match: re.Match[str]) -> str:
        name, *arguments = match[1].split()
        return f"<!-- findings: {match[1]} -->\n{BLOCKS[name](*arguments)}\n<!-- end -->"

    return re.sub(r"<!-- findings: (.*?) -->\n.*?<!-- end -->", block, text, flags=re.DOTALL)


def main() -> None:
    """Renew every page."""
    for path in PAGES:
        path.write_text(renew(path.read_text()))
    save_png(worth_figure(), DOCS / "worth.png")


if __name__ == "__main__":
    main()
