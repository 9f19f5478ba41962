"""Outcomes as the paper's tables and as sentences, by any `Metric`.

Outcomes that differ only in the training seed are repeats: tables and sentences show their mean, with the
deviation over seeds (or over ranges of samples, if there is one seed).
"""

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from assay.metrics.evaluate import titles
from assay.outcome import FD, METRICS, Configuration, Metric, Outcome, percent

Role = Literal["all_clean", "noisy", "noisy_truncated", "noisy_consistent", "few_clean", "mix"]


@dataclass(frozen=True)
class Average:
    """A mean over repeats and their standard deviation, if known; `form` is how both are written."""

    mean: float
    std: float | None
    form: str = ".2f"

    def __str__(self) -> str:
        return self.value + ("" if self.std is None else f" ± {self.std:{self._digits}}")

    @property
    def value(self) -> str:
        """The mean alone, as text."""
        return f"{self.mean:{self._digits}}"

    @property
    def _digits(self) -> str:
        """`form`, but three digits of a mean below 0.1 and no decimals from 1,000 on."""
        size = abs(self.mean)
        if self.form != ".2f" or not 0 < size < math.inf or 0.1 <= size < 1000:
            return self.form
        return ".0f" if size >= 1000 else f".{2 - math.floor(math.log10(size))}f"


def averages(outcomes: Iterable[Outcome], metric: Metric = FD) -> dict[Configuration, Average]:
    """The mean over seeds of each configuration that was measured by this metric; they have no seed."""
    repeats: dict[Configuration, dict[int | None, tuple[float, float | None]]] = {}
    for outcome in outcomes:
        if (value := metric.value(outcome)) is not None:
            of = outcome.configuration
            repeats.setdefault(of.without_seed, {})[of.seed] = value, metric.error(outcome)
    found = {}
    for of, pairs in repeats.items():
        values = [value for value, _ in pairs.values()]
        std = next(iter(pairs.values()))[1] if len(pairs) == 1 else statistics.stdev(values)
        found[of] = Average(statistics.fmean(values), std, metric.form)
    return found


@dataclass(frozen=True)
class Table:
    """A table as text cells, to be set in any format."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def study_tables(outcomes: Sequence[Outcome], metric: Metric = FD) -> list[Table]:
    """The paper's tables (headline, only noisy, clean and noisy mixed), and all that they do not show."""
    values, name = averages(outcomes, metric), metric.title(outcomes[0])
    makers = _headline_table, _only_noisy_table, _clean_mix_table
    found = [table for make in makers if (table := make(values, name)) is not None]
    every = metrics_table(outcomes)
    more = len(every.header) > 2 or any(of.table not in ("clean_mix", "only_noisy") for of in values)
    return [*found, every] if more or not found else found


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


def headline_title(of: Configuration) -> str:
    """A configuration of the headline, whose noise level is named elsewhere: "10% clean + 90% noisy"."""
    return of.words(shares=True, levels=False)


def headline(outcomes: Sequence[Outcome], metric: Metric = FD) -> str:
    """The result of the paper's grid in words; nothing of other studies."""
    values = averages(outcomes, metric)
    roles = headline_configurations(values)
    if "mix" not in roles:
        return ""
    mix, name = roles["mix"], metric.title(outcomes[0])
    parts = [f"{headline_title(mix)} images at noise {mix.sigma:.3g} reach {name} {values[mix]}"]
    if clean := roles.get("all_clean"):
        parts.append(f"all clean ones {values[clean]}")
    if few := roles.get("few_clean"):
        parts.append(f"the {headline_title(few)} ones alone {values[few]}")
    noisy = [values[of] for role, of in roles.items() if role.startswith("noisy")]
    if noisy:
        parts.append(f"noisy ones alone {min(noisy, key=lambda value: value.mean)} at best")
    return "; ".join(parts) + "."


def _headline_table(values: Mapping[Configuration, Average], name: str) -> Table | None:
    """Table 1: the headline configurations at the highest noise of the grid."""
    roles = headline_configurations(values).values()
    rows = tuple((headline_title(of), str(values[of])) for of in roles)
    at_noise = "".join(f" at noise {sigma:.3g}" for sigma in {of.sigma for of in roles if of.sigma})
    header = ("available data", *{of.dataset for of in roles})
    return Table(f"{name}{at_noise}", header, rows) if len(rows) > 1 else None


def _only_noisy_table(values: Mapping[Configuration, Average], name: str) -> Table | None:
    """Table 2: noisy images alone, by noise level and way of sampling or training."""
    alone: dict[tuple[tuple[float, ...], str, bool], str] = {
        (of.levels, of.sampling, of.consistency): str(value)
        for of, value in values.items()
        if of.table == "only_noisy"
    }
    if not alone:
        return None
    clean = headline_configurations(values).get("all_clean")
    rows: list[tuple[str, ...]] = [] if clean is None else [("0", str(values[clean]), "NA", "NA")]
    ways = [("full", False), ("truncated", False), ("full", True)]
    for levels in sorted({levels for levels, _, _ in alone}):
        rows.append((_levels(levels), *(alone.get((levels, *way), "NA") for way in ways)))
    header = ("noise level", "full sampling", "truncated sampling", "consistency + full sampling")
    return Table(f"{name} from noisy images alone", header, tuple(rows))


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


def metrics_table(outcomes: Sequence[Outcome]) -> Table:
    """Every configuration with all that was measured of it."""
    metrics = [METRICS.get(name, Metric(name)) for name in titles(each.evaluation for each in outcomes)]
    columns = [(metric.title(outcomes[0]), averages(outcomes, metric)) for metric in metrics]
    return _configurations_table("All metrics", columns)


def compared_table(first: Sequence[Outcome], second: Sequence[Outcome], names: tuple[str, str]) -> Table:
    """Two studies side by side: the configurations of either, by the metrics that both have."""
    columns = []
    for metric in METRICS.values():
        if any(map(metric.value, first)) and any(map(metric.value, second)):
            for name, outcomes in zip(names, (first, second), strict=True):
                found = averages(outcomes, metric).items()
                alike = {of.model_copy(update={"dataset": ""}): value for of, value in found}
                columns.append((f"{metric.title(first[0])}, {name}", alike))
    return _configurations_table(f"{names[0]} and {names[1]}", columns)


def _configurations_table(title: str, columns: Sequence[tuple[str, Mapping[Configuration, Average]]]) -> Table:
    rows: dict[object, tuple[str, ...]] = {}
    for of in dict.fromkeys(of for _, column in columns for of in column):
        cells = (str(column.get(of, "")) for _, column in columns)
        rows.setdefault(
            (of.title, of.noisy), (of.title, *cells)
        )  # noisy images alone are in two of the paper's tables
    return Table(title, ("configuration", *(name for name, _ in columns)), tuple(rows.values()))


def _levels(levels: Sequence[float]) -> str:
    return " + ".join(f"{level:.3g}" for level in levels)


def format_table(table: Table, form: Literal["text", "markdown", "latex"]) -> str:
    """The table as plain text, Markdown or LaTeX (booktabs)."""
    rows = [table.header, *table.rows]
    match form:
        case "text":
            widths = [max(len(row[i]) for row in rows) for i in range(len(table.header))]
            body = [
                "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
            ]
            return "\n".join([table.title, "", *(line.rstrip() for line in body)]) + "\n"
        case "markdown":
            marked = ["| " + " | ".join(_markdown(cell) for cell in row) + " |" for row in rows]
            rule = "|" + "---|" * len(table.header)
            return "\n".join([f"**{_markdown(table.title)}**", "", marked[0], rule, *marked[1:]]) + "\n"
        case "latex":
            head, *body = [" & ".join(_latex(cell) for cell in row) + r" \\" for row in rows]
            lines = [r"\begin{table}", rf"\caption{{{_latex(table.title)}}}"]
            lines += [rf"\begin{{tabular}}{{l{'c' * (len(table.header) - 1)}}}", r"\toprule", head, r"\midrule"]
            lines += [*body, r"\bottomrule", r"\end{tabular}", r"\end{table}"]
            return "\n".join(lines) + "\n"


_IN_MARKDOWN = str.maketrans({"\\": r"\\", "|": r"\|", "*": r"\*"})
_IN_LATEX = str.maketrans(
    {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"}
    | {special: f"\\{special}" for special in "%&_#${}"}
)


def _markdown(text: str) -> str:
    """Text that is neither a tag nor a link nor bold."""
    return re.sub("<(?=[A-Za-z/!?])", "&lt;", text.translate(_IN_MARKDOWN)).replace("](", r"]\(")


def _latex(text: str) -> str:
    return text.translate(_IN_LATEX)
