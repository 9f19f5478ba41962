"""Outcomes as the paper's tables and as sentences, counted in any `Currency`.

Outcomes that differ only in the training seed are repeats: tables and sentences show their mean, with the
deviation over seeds (or over ranges of samples, if there is one seed).
"""

import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from assay.metrics.evaluate import titles
from assay.outcome import FD, SCORE, Currency, Outcome, Setting, metric, percent

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


def averages(outcomes: Iterable[Outcome], currency: Currency = FD) -> dict[Setting, Average]:
    """The mean over seeds of each setting that was measured in this currency; settings have no seed."""
    repeats: dict[Setting, dict[int | None, tuple[float, float | None]]] = {}
    for outcome in outcomes:
        if (value := currency.value(outcome)) is not None:
            setting = outcome.setting
            repeats.setdefault(setting.without_seed, {})[setting.seed] = value, currency.error(outcome)
    return {setting: _average(list(found.values()), currency.form) for setting, found in repeats.items()}


def _average(found: Sequence[tuple[float, float | None]], form: str) -> Average:
    values = [value for value, _ in found]
    return Average(statistics.fmean(values), found[0][1] if len(found) == 1 else statistics.stdev(values), form)


@dataclass(frozen=True)
class Table:
    """A table as text cells, to be set in any format."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def study_tables(outcomes: Sequence[Outcome], currency: Currency = FD) -> list[Table]:
    """The paper's tables (headline, only noisy, clean and noisy mixed), the extras, and all metrics."""
    values, name = averages(outcomes, currency), currency.title(outcomes[0])
    found = [
        _headline_table(values, name),
        _only_noisy_table(values, name),
        _clean_mix_table(values, name),
        _extras_table(values, name),
    ]
    tables = [table for table in found if table is not None]
    if currency is SCORE:
        return [*tables, score_table(outcomes)]
    every = metrics_table(outcomes)
    return [*tables, every] if len(every.header) > 2 or not tables else tables


def headline_sigma(settings: Iterable[Setting]) -> float:
    """The noise level of the headline: the highest of the grid."""
    return max((s.sigma for s in settings if s.table == "clean_mix" and s.sigma), default=math.nan)


def headline_settings(settings: Iterable[Setting]) -> dict[Role, Setting]:
    """Those of the settings that the headline compares, by their role; not all of them need to be there."""
    settings = list(settings)
    sigma = headline_sigma(settings)
    grid = [s for s in settings if s.table == "clean_mix"]
    most = max((s.num_clean for s in grid), default=math.nan)

    def clean_part(setting: Setting) -> float:  # of the data set, or where noise is real of the clean images
        return setting.num_clean / (most or 1) if setting.clean_fraction is None else setting.clean_fraction

    few = min({clean_part(s) for s in grid if s.num_clean} - {1.0}, default=math.nan)

    def in_grid(setting: Setting, part: float, noisy: bool) -> bool:
        found = setting.table, clean_part(setting), setting.sigma
        return found == ("clean_mix", part, sigma if noisy else None) and bool(setting.noisy) == noisy

    def only_noisy(setting: Setting, sampling: str = "full", consistency: bool = False) -> bool:
        found = setting.table, setting.sigma, setting.sampling, setting.consistency
        return found == ("only_noisy", sigma, sampling, consistency)

    roles: dict[Role, Callable[[Setting], bool]] = {
        "all_clean": lambda s: in_grid(s, 1.0, noisy=False),
        "noisy": only_noisy,
        "noisy_truncated": lambda s: only_noisy(s, sampling="truncated"),
        "noisy_consistent": lambda s: only_noisy(s, consistency=True),
        "few_clean": lambda s: in_grid(s, few, noisy=False),
        "mix": lambda s: in_grid(s, few, noisy=True),
    }
    found = {role: list(filter(has_role, settings)) for role, has_role in roles.items()}
    return {role: max(each, key=lambda s: s.num_noisy) for role, each in found.items() if each}


def headline_title(setting: Setting) -> str:
    """A setting of the headline, whose noise level is named elsewhere: "10% clean + 90% noisy"."""
    return setting.words(shares=True, levels=False)


def headline(outcomes: Sequence[Outcome], currency: Currency = FD) -> str:
    """The result in words."""
    values = averages(outcomes, currency)
    roles = headline_settings(values)
    if "mix" not in roles:
        if not any(setting.num_clean for setting in values):
            return _noisy_ladder(values, currency.title(outcomes[0]))
        if any(setting.table == "clean_mix" for setting in values):
            return "The headline setting has not been run yet."
        best = min(values, key=lambda setting: values[setting].mean)
        name = currency.title(outcomes[0])
        return f"The best of {len(values)} settings is {best.title}: {name} {values[best]}."
    mix = roles["mix"]
    parts = [
        f"{headline_title(mix)} images at noise {mix.sigma:g} reach {currency.title(outcomes[0])} {values[mix]}"
    ]
    if clean := roles.get("all_clean"):
        title = "all clean ones" if clean.clean_fraction == 1 else f"{headline_title(clean)} ones alone"
        parts.append(f"{title} {values[clean]}")
    if "few_clean" in roles:
        parts.append(f"the {headline_title(roles['few_clean'])} ones alone {values[roles['few_clean']]}")
    noisy = [values[setting] for role, setting in roles.items() if role.startswith("noisy")]
    if noisy:
        parts.append(f"noisy ones alone {min(noisy, key=lambda value: value.mean)} at best")
    return "; ".join(parts) + "."


def _noisy_ladder(values: Mapping[Setting, Average], name: str) -> str:
    """What more noisy images give where no model saw a clean one, in words."""
    plain = {s: v for s, v in values.items() if s.table == "only_noisy" and s.sampling == "full"}
    plain = {s: v for s, v in plain.items() if not s.consistency} or dict(values)
    widest = max(len(s.levels) for s in plain)
    steps = sorted((s for s in plain if len(s.levels) == widest), key=lambda s: -s.num_noisy)
    parts = [f"{setting.num_noisy:,.0f} of them {plain[setting]}" for setting in steps[1:]]
    first = f"{headline_title(steps[0])} images reach {name} {plain[steps[0]]}"
    return "; ".join([first, *parts]) + ". No clean image was used, so there is none to price."


def _headline_table(values: Mapping[Setting, Average], name: str) -> Table | None:
    """Table 1: the headline settings at the highest noise of the grid."""
    roles = headline_settings(values).values()
    if len(roles) < 2:
        return None
    rows = tuple((headline_title(setting), str(values[setting])) for setting in roles)
    dataset = next(iter(roles)).dataset
    return Table(f"{name} at noise {headline_sigma(values):g}", ("available data", dataset), rows)


def _only_noisy_table(values: Mapping[Setting, Average], name: str) -> Table | None:
    """Table 2: noisy images alone, by noise level and way of sampling or training."""
    alone: dict[tuple[tuple[float, ...], float, str, bool], Average] = {
        (s.levels, s.num_noisy, s.sampling, s.consistency): value
        for s, value in values.items()
        if s.table == "only_noisy"
    }
    if not alone:
        return None
    clean = headline_settings(values).get("all_clean")
    rows: list[tuple[str, ...]] = [] if clean is None else [("0", str(values[clean]), "NA", "NA")]
    kinds = sorted({key[:2] for key in alone}, key=lambda kind: (kind[0], -kind[1]))
    for levels, number in kinds:
        ways = [("full", False), ("truncated", False), ("full", True)]
        several = sum(kind[0] == levels for kind in kinds) > 1
        title = f"{_levels(levels)}, {number:,.0f} images" if several else _levels(levels)
        rows.append((title, *(str(alone.get((levels, number, *way), "NA")) for way in ways)))
    header = ("noise level", "full sampling", "truncated sampling", "consistency + full sampling")
    return Table(f"{name} from noisy images alone", header, tuple(rows))


def _clean_mix_table(values: Mapping[Setting, Average], name: str) -> Table | None:
    """Table 3: clean images alone and mixed with noisy ones, by clean fraction."""
    grid = {s: value for s, value in values.items() if s.table == "clean_mix"}
    mixed = {(s.levels, s.clean_fraction): v for s, v in grid.items() if s.clean_fraction is not None}
    fractions = sorted({p for _, p in mixed}, reverse=True)
    if not fractions:
        return _real_mix_table(grid, name)
    rows = []
    for levels in sorted({levels for levels, _ in mixed} | {()}):
        # All images are clean: the same model for every noise level.
        cells = [str(mixed.get((() if p == 1 else levels, p), "NA")) for p in fractions]
        rows.append((f"p clean, rest noisy at {_levels(levels)}" if levels else "p clean", *cells))
    header = ("available data", *(f"p = {percent(p)}" for p in fractions))
    return Table(f"{name} as the mix of clean and noisy images changes", header, tuple(rows))


def _real_mix_table(grid: Mapping[Setting, Average], name: str) -> Table | None:
    """The same where noise is real: numbers of clean images, alone and with numbers of noisy ones."""
    numbers = sorted({s.num_clean for s in grid}, reverse=True)
    cells = {(s.noisy, s.num_clean): str(value) for s, value in grid.items()}
    rows = []
    for noisy in sorted({s.noisy for s in grid}, key=lambda noisy: (len(noisy), noisy)):
        words = next(s for s in grid if s.noisy == noisy).model_copy(update={"num_clean": 0}).words()
        row = (cells.get((noisy, number), "NA") for number in numbers)
        rows.append(("n clean" if not noisy else f"n clean + {words}", *row))
    header = ("available data", *(f"n = {number:,.0f}" for number in numbers))
    return Table(f"{name} as the mix of clean and noisy images changes", header, tuple(rows)) if rows else None


def _extras_table(values: Mapping[Setting, Average], name: str) -> Table | None:
    """What the spec's `[[extra]]` settings gave."""
    rows = []
    for s, value in values.items():
        if s.table not in ("", "clean_mix", "only_noisy"):
            fraction = "" if s.clean_fraction is None else f"{s.clean_fraction:.3g}"
            way = "consistency" if s.consistency else f"{s.loops} loops" if s.loops else s.sampling
            rows.append((s.table, fraction, _levels(s.levels), way, str(value)))
    header = ("setting", "clean fraction", "noise level", "way", name)
    return Table(f"{name} of further settings", header, tuple(rows)) if rows else None


def metrics_table(outcomes: Sequence[Outcome]) -> Table:
    """Every setting with all that was measured of it."""
    names = titles(outcome.evaluation for outcome in outcomes)
    columns = {name: averages(outcomes, FD if name == "fd" else metric(name)) for name in names}
    header = ("setting", *(FD.title(outcomes[0]) if name == "fd" else title for name, title in names.items()))
    return Table("All metrics", header, _rows_of_settings(list(columns.values())))


def score_table(outcomes: Sequence[Outcome]) -> Table:
    """Every setting with its score: at the best stopping time, when that was, its parts, and at the end."""
    split = next((o.evaluation.score_split for o in outcomes if o.evaluation.score_split), None)
    columns = {"score": SCORE, "at step": replace(metric("score_step"), form=".0f")}
    if split is not None:
        columns |= {
            f"{side} {split:g}": replace(metric(f"score_{side}"), form=".3f") for side in ("below", "above")
        }
    columns["at the end"] = replace(metric("score_final"), form=".3f")
    known = {title: averages(outcomes, currency) for title, currency in columns.items()}
    known = {title: column for title, column in known.items() if column}
    return Table(
        "Held-out score, nats per dimension", ("setting", *known), _rows_of_settings(list(known.values()))
    )


def _rows_of_settings(columns: Sequence[Mapping[Setting, Average]]) -> tuple[tuple[str, ...], ...]:
    rows: dict[Setting, tuple[str, ...]] = {}
    for setting in dict.fromkeys(setting for column in columns for setting in column):
        # Noisy images alone are in two of the paper's tables.
        same = setting.model_copy(update={"table": ""}) if setting.table == "only_noisy" else setting
        same = same.model_copy(update={"table": ""}) if same.table == "clean_mix" else same
        rows[same] = (same.title, *(str(column.get(setting, "")) for column in columns))
    return tuple(rows.values())


def _levels(levels: Sequence[float]) -> str:
    return " + ".join(f"{level:g}" for level in levels)


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
