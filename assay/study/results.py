"""Results as rows, as the paper's tables, and as sentences.

`results.csv` has the columns of the paper's tables, so that `assay price` reads both, and more: counts,
extractor, seed and seconds. Rows alike but for the training seed are repeats; tables and sentences show
their mean, with the deviation over seeds (or over ranges of samples, if there is one seed).
"""

import csv
import io
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from assay.files import write_whole
from assay.study.run import OpenStudy


class Line(BaseModel):
    """One line of `results.csv`; the fields are its columns."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    table: str
    dataset: str
    data: str
    sigma: float | None
    clean_fraction: float
    noisy_fraction: float
    sampling: str
    consistency: bool
    fid: float
    fid_std: float
    seed: int
    num_clean: int
    num_noisy: int
    num_images: int
    metric: str
    extractor: str
    train_seconds: float
    sample_seconds: float


def gather(opened: OpenStudy) -> list[Line]:
    """All results that are there, in the order of the spec."""
    lines = []
    for row in opened.rows:
        result = opened.result(row)
        if result is not None:
            lines.append(
                Line(
                    table=row.table,
                    dataset=opened.study.name,
                    data=row.data,
                    sigma=row.sigma,
                    clean_fraction=row.clean_fraction,
                    noisy_fraction=row.noisy_fraction,
                    sampling=row.sampling,
                    consistency=row.consistency,
                    fid=result.fd,
                    fid_std=result.fd_std,
                    seed=row.seed,
                    num_clean=result.num_clean,
                    num_noisy=result.num_noisy,
                    num_images=result.num_images,
                    metric=result.metric,
                    extractor=result.extractor,
                    train_seconds=result.train_seconds,
                    sample_seconds=result.sample_seconds,
                )
            )
    return lines


def write_results(path: Path, lines: Sequence[Line]) -> None:
    """Write `results.csv`; numbers in full, so that equal results are equal files but for the seconds."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(Line.model_fields)
    for line in lines:
        writer.writerow(["" if v is None else int(v) if isinstance(v, bool) else v for _, v in line])
    with write_whole(path) as partial:
        partial.write_text(buffer.getvalue())


def read_lines(path: Path) -> list[Line]:
    """Read what `write_results` wrote."""
    with open(path, newline="") as file:
        return [Line.model_validate({**row, "sigma": row["sigma"] or None}) for row in csv.DictReader(file)]


@dataclass(frozen=True)
class Value:
    """A distance over repeats: mean and standard deviation."""

    mean: float
    std: float
    num_repeats: int

    def __str__(self) -> str:
        return f"{self.mean:.2f} ± {self.std:.2f}"


def value_of(lines: Iterable[Line], **wanted: object) -> Value | None:
    """Mean over the seeds of the setting with these columns; None if it was not run."""
    found = [line for line in lines if has_columns(line, wanted)]
    distances = list({line.seed: line.fid for line in found}.values())
    if not distances:
        return None
    if len(distances) == 1:
        return Value(distances[0], found[0].fid_std, 1)
    return Value(statistics.fmean(distances), statistics.stdev(distances), len(distances))


def has_columns(row: object, wanted: Mapping[str, object]) -> bool:
    """Whether a line of results, or a row of the spec, has these columns."""
    return all(_same(getattr(row, key), value) for key, value in wanted.items())


def _same(found: object, wanted: object) -> bool:
    if isinstance(found, float) and isinstance(wanted, int | float):
        return math.isclose(found, wanted, abs_tol=1e-9)
    return found == wanted


@dataclass(frozen=True)
class Table:
    """A table as text cells, to be set in any format."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def paper_tables(lines: Sequence[Line]) -> list[Table]:
    """The paper's tables with these results: headline, only noisy, clean and noisy mixed, and the extras."""
    tables = [headline_table(lines), only_noisy_table(lines), clean_mix_table(lines), extras_table(lines)]
    return [table for table in tables if table is not None]


def headline_table(lines: Sequence[Line]) -> Table | None:
    """Table 1: the four headline settings at the highest noise of the grid."""
    sigma = headline_sigma(lines)
    rows = []
    for title, value in headline_values(lines).items():
        rows.append((title, str(value)))
    if len(rows) < 2:
        return None
    return Table(f"{_metric(lines)} at noise {sigma:g}", ("available data", lines[0].dataset), tuple(rows))


def headline_sigma(lines: Sequence[Line]) -> float:
    """The noise level the headline speaks of: the highest of the grid."""
    return max((line.sigma for line in lines if line.table == "clean_mix" and line.sigma), default=math.nan)


def headline_fraction(lines: Sequence[Line]) -> float:
    """The clean fraction the headline speaks of: the smallest above 0 of the grid."""
    fractions = [line.clean_fraction for line in lines if line.table == "clean_mix" and line.clean_fraction > 0]
    return min(fractions, default=math.nan)


def headline_settings(lines: Sequence[Line]) -> dict[str, dict[str, object]]:
    """Columns of the settings the headline compares, by title; not all of them need to have been run."""
    sigma, p = headline_sigma(lines), headline_fraction(lines)
    noisy = dict(table="only_noisy", sigma=sigma)
    return {
        "100% clean": dict(table="clean_mix", data="clean_only", clean_fraction=1.0),
        "100% noisy": dict(**noisy, sampling="full", consistency=False),
        "100% noisy, truncated sampling": dict(**noisy, sampling="truncated", consistency=False),
        "100% noisy, consistency": dict(**noisy, sampling="full", consistency=True),
        f"{p:.0%} clean": dict(table="clean_mix", data="clean_only", clean_fraction=p),
        f"{p:.0%} clean + {1 - p:.0%} noisy": dict(
            table="clean_mix", data="mix", clean_fraction=p, sigma=sigma
        ),
    }


def headline_values(lines: Sequence[Line]) -> dict[str, Value]:
    """Distances of those settings that were run."""
    wanted = headline_settings(lines)
    values = {title: value_of(lines, **columns) for title, columns in wanted.items()}
    return {title: value for title, value in values.items() if value is not None}


def headline(lines: Sequence[Line]) -> str:
    """The result in words."""
    sigma, p = headline_sigma(lines), headline_fraction(lines)
    values = headline_values(lines)
    mixed, alone, clean = (
        values.get(title) for title in (f"{p:.0%} clean + {1 - p:.0%} noisy", f"{p:.0%} clean", "100% clean")
    )
    if mixed is None:
        return "The headline setting has not been run yet."
    parts = [f"{p:.0%} clean + {1 - p:.0%} noisy images at noise {sigma:g} reach {_metric(lines)} {mixed}"]
    if clean is not None:
        parts.append(f"all clean ones {clean}")
    if alone is not None:
        parts.append(f"the {p:.0%} clean ones alone {alone}")
    noisy = [value for title, value in values.items() if title.startswith("100% noisy")]
    if noisy:
        parts.append(f"noisy ones alone {min(noisy, key=lambda value: value.mean)} at best")
    return "; ".join(parts) + "."


def only_noisy_table(lines: Sequence[Line]) -> Table | None:
    """Table 2: noisy images alone, by noise level and way of sampling or training."""
    sigmas = sorted({line.sigma for line in lines if line.table == "only_noisy" and line.sigma})
    if not sigmas:
        return None
    clean = value_of(lines, table="clean_mix", data="clean_only", clean_fraction=1.0)
    rows: list[tuple[str, ...]] = [] if clean is None else [("0", str(clean), "NA", "NA")]
    for sigma in sigmas:
        ways: list[tuple[str, bool]] = [("full", False), ("truncated", False), ("full", True)]
        cells = [
            value_of(lines, table="only_noisy", sigma=sigma, sampling=sampling, consistency=consistency)
            for sampling, consistency in ways
        ]
        rows.append((f"{sigma:g}", *(str(cell) if cell else "NA" for cell in cells)))
    header = ("noise level", "full sampling", "truncated sampling", "consistency + full sampling")
    return Table(f"{_metric(lines)} from noisy images alone", header, tuple(rows))


def clean_mix_table(lines: Sequence[Line]) -> Table | None:
    """Table 3: clean images alone and mixed with noisy ones, by clean fraction."""
    mixed = [line for line in lines if line.table == "clean_mix"]
    fractions = sorted({line.clean_fraction for line in mixed}, reverse=True)
    if not fractions:
        return None

    def row(title: str, sigma: float | None) -> tuple[str, ...]:
        cells = []
        for p in fractions:
            data = "clean_only" if sigma is None or p == 1 else "mix"
            value = value_of(
                mixed, data=data, clean_fraction=p, **({} if data == "clean_only" else {"sigma": sigma})
            )
            cells.append(str(value) if value else "NA")
        return title, *cells

    rows = [row("p clean", None)]
    for level in sorted({line.sigma for line in mixed if line.sigma}):
        rows.append(row(f"p clean, rest noisy at {level:g}", level))
    header = ("available data", *(f"p = {p:.0%}" for p in fractions))
    return Table(f"{_metric(lines)} as the mix of clean and noisy images changes", header, tuple(rows))


def extras_table(lines: Sequence[Line]) -> Table | None:
    """What the spec's `[[extra]]` settings gave."""
    extras = [line for line in lines if line.table not in ("clean_mix", "only_noisy")]
    rows: dict[tuple[str, ...], str] = {}
    for line in extras:
        noise = "" if line.sigma is None else f"{line.sigma:g}"
        way = "consistency" if line.consistency else line.sampling
        same = dict(sampling=line.sampling, consistency=line.consistency, data=line.data, sigma=line.sigma)
        value = value_of(extras, table=line.table, clean_fraction=line.clean_fraction, **same)
        rows[(line.table, f"{line.clean_fraction:.3g}", noise, way)] = str(value)
    if not rows:
        return None
    header = ("setting", "clean fraction", "noise level", "way", _metric(lines))
    return Table(
        f"{_metric(lines)} of further settings", header, tuple((*key, cell) for key, cell in rows.items())
    )


def _metric(lines: Sequence[Line]) -> str:
    return lines[0].metric


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
            marked = ["| " + " | ".join(row) + " |" for row in rows]
            rule = "|" + "---|" * len(table.header)
            return "\n".join([f"**{table.title}**", "", marked[0], rule, *marked[1:]]) + "\n"
        case "latex":
            body = [" & ".join(_latex(cell) for cell in row) + r" \\" for row in rows]
            columns = "l" + "c" * (len(table.header) - 1)
            lines = [
                r"\begin{table}",
                rf"\caption{{{_latex(table.title)}}}",
                rf"\begin{{tabular}}{{{columns}}}",
            ]
            lines += [
                r"\toprule",
                body[0],
                r"\midrule",
                *body[1:],
                r"\bottomrule",
                r"\end{tabular}",
                r"\end{table}",
            ]
            return "\n".join(lines) + "\n"


def _latex(text: str) -> str:
    for plain, escaped in (("\\", r"\textbackslash{}"), ("%", r"\%"), ("&", r"\&"), ("_", r"\_"), ("#", r"\#")):
        text = text.replace(plain, escaped)
    return text.replace("±", r"$\pm$")
