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
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t as student_t

from assay.mixture.rates import Curve
from assay.outcome import CURRENCIES, FD, SCORE, Outcome, Setting, metric, read_outcomes
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
    DOCS / "galaxies.md",
    *sorted(HERE.glob("*/README.md")),
]
HEADLINE = {
    "digits": "digits, 8x8",
    "fashion-mnist": "Fashion-MNIST, 12x12",
    "cifar10": "CIFAR-10 vehicles, 8x8",
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


def headline() -> str:
    """The headline settings of all data sets beside the paper's."""
    columns = {title: _outcomes(study) for study, title in HEADLINE.items()}
    paper = [each for each in read_outcomes(PAPER).values() if each.setting.dataset == "cifar10"]
    columns["the paper's CIFAR-10 (FID: other metric, other scale), 32x32"] = paper
    titles = {role: headline_title(setting) for role, setting in headline_settings(_settings(paper)).items()}
    values = [_headline_values(outcomes) for outcomes in columns.values()]
    rows = [(titles[role], *(str(value[role]) for value in values)) for role in ROLES]
    header = ("available data", *(_with_noise(title, outcomes) for title, outcomes in columns.items()))
    title = "FD-classifier, mean and deviation over three training seeds"
    return format_table(Table(title, header, tuple(rows)), "markdown").rstrip()


def _settings(outcomes: list[Outcome]) -> list[Setting]:
    return [outcome.setting for outcome in outcomes]


def _headline_values(outcomes: list[Outcome]) -> dict[Role, Average]:
    values = averages(outcomes)
    return {role: values[setting] for role, setting in headline_settings(values).items()}


def _with_noise(title: str, outcomes: list[Outcome]) -> str:
    return f"{title}, noise {headline_sigma(_settings(outcomes)):g}"


def ordering(study: str) -> str:
    """Each inequality of the paper's ordering, and whether it holds by more than the seeds' deviation."""
    values = _headline_values(_outcomes(study))
    mix, clean, noisy = values["mix"], values["all_clean"], values["noisy"]
    truncated, consistent = values["noisy_truncated"], values["noisy_consistent"]
    better = min(truncated, consistent, key=lambda value: value.mean)
    claims = [
        ("all clean", clean, "mix", mix),
        ("mix", mix, "noisy-only at its best (truncated or consistent)", better),
        ("noisy-only at its best", better, "noisy-only, full sampling", noisy),
        ("mix", mix, "clean-only 10 %", values["few_clean"]),
    ]
    return "\n".join(f"- {a} < {b}: {x} against {y}: {_verdict(x, y)}" for a, x, b, y in claims)


def by_score(study: str) -> str:
    """All settings in the order of their held-out score, and how many standard errors neighbours are apart."""
    lines = []
    moments = {
        "at the end of training": ("score_final", "score_final_error"),
        "at the best stopping time": ("score", "score_paired_error"),
    }
    for moment, names in moments.items():
        values: dict[Setting, list[tuple[float, ...]]] = {}
        for outcome in _outcomes(study):
            if outcome.setting.sampling == "full":
                found = tuple(getattr(outcome.evaluation, name) for name in names)
                values.setdefault(outcome.setting.without_seed, []).append(found)
        order = sorted({(*_mean_and_error(each), headline_title(setting)) for setting, each in values.items()})
        text = f"{order[0][2]} {order[0][0]:.3f}"
        for (low, low_error, _), (high, high_error, title) in pairwise(order):
            apart = (high - low) / math.hypot(low_error, high_error)
            text += f" < {title} {high:.3f} ({apart:.1f} standard errors above)"
        lines.append(f"- {moment}: {text}")
    return "\n".join(lines)


def _mean_and_error(found: list[tuple[float, ...]]) -> tuple[float, float]:
    """The mean over seeds; the error of the held-out images, which all seeds share, and that of the seeds."""
    values, errors = zip(*found, strict=True)
    between_seeds = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return statistics.fmean(values), math.hypot(statistics.fmean(errors), between_seeds)


def _verdict(low: Average, high: Average) -> str:
    assert low.std is not None and high.std is not None
    gap, spread = high.mean - low.mean, (low.std**2 + high.std**2) ** 0.5
    if gap > spread:
        return "holds"
    return "level within the deviation" if abs(gap) <= spread else "**does not hold**"


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


def beyond(data: str) -> str:
    """Restore and retrain beside controls of as many steps, in every measure."""
    outcomes = _outcomes("beyond", f"{data}.csv")
    columns = {"FD-classifier": FD, **{name: metric(name) for name in ("precision", "recall")}}
    columns |= {
        "score": replace(metric("score"), form=".3f"),
        "at the end": replace(metric("score_final"), form=".3f"),
    }
    found = {title: averages(outcomes, currency) for title, currency in columns.items()}
    rows = []
    for setting in found["FD-classifier"]:
        if setting.table != "clean_mix" or setting.num_clean:  # noisy images alone stand in two tables
            name = f"{setting.table}: " * (setting.table not in ("clean_mix", "only_noisy", "loops"))
            rows.append((name + setting.words(shares=True), *(str(each[setting]) for each in found.values())))
    num_seeds = len({outcome.setting.seed for outcome in outcomes})
    return format_table(Table(f"{num_seeds} seed(s)", ("setting", *columns), tuple(rows)), "markdown").rstrip()


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


def masks() -> str:
    """Every method with missing pixels, in every measure: the mean over seeds."""
    with open(HERE / "beyond" / "masks.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    rows = []
    for missing, method in dict.fromkeys((line["missing"], line["method"]) for line in lines):
        mine = [line for line in lines if (line["missing"], line["method"]) == (missing, method)]
        cells = [f"{statistics.fmean(float(line[key]) for line in mine):.3g}" for key in _MASKS]
        rows.append((f"{float(missing):.0%}", method, *cells))
    header = ("missing", "method", "FD-classifier", "precision", "recall", "score", "at the end")
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


_MASKS = ("fd", "precision", "recall", "score", "score_final")
BLOCKS: dict[str, Callable[..., str]] = {
    "beyond": beyond,
    "bad_images": bad_images,
    "masks": masks,
    "one_step": one_step,
    "tables": tables,
    "headline": headline,
    "ordering": ordering,
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


if __name__ == "__main__":
    main()
