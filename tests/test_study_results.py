"""Tables of results: the paper's own numbers come out in the paper's own places."""

import csv
import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.pricing import PAPER
from assay.study.results import (
    Line,
    Table,
    format_table,
    headline,
    paper_tables,
    read_lines,
    value_of,
    write_results,
)

# The rows of the paper's Tables 2 and 3 for CIFAR-10, as its source has them, without the typesetting.
ONLY_NOISY = """
0 & 1.99 ± 0.02 & NA & NA
0.05 & 8.78 ± 0.02 & 4.53 ± 0.08 & 2.82 ± 0.02
0.1 & 25.55 ± 0.10 & 7.55 ± 0.07 & 3.63 ± 0.03
0.2 & 60.73 ± 0.21 & 12.12 ± 0.03 & 11.93 ± 0.09
"""
CLEAN_MIX = """
p clean & 1.99 ± 0.02 & 2.07 ± 0.01 & 2.20 ± 0.03 & 2.40 ± 0.02 & 3.99 ± 0.01 & 17.30 ± 0.14 & NA
p clean, rest noisy at 0.05 & 1.99 ± 0.02 & 2.04 ± 0.02 & 2.04 ± 0.03 & 2.06 ± 0.00 & 2.11 ± 0.02 & 2.17 ± 0.04 & 8.78 ± 0.02
p clean, rest noisy at 0.1 & 1.99 ± 0.02 & 2.06 ± 0.03 & 2.14 ± 0.03 & 2.15 ± 0.01 & 2.24 ± 0.02 & 2.34 ± 0.03 & 25.55 ± 0.10
p clean, rest noisy at 0.2 & 1.99 ± 0.02 & 2.06 ± 0.03 & 2.14 ± 0.02 & 2.24 ± 0.01 & 2.42 ± 0.03 & 2.81 ± 0.02 & 60.73 ± 0.21
"""  # noqa: E501
MORE = {"seed": 0, "num_clean": 0, "num_noisy": 0, "num_images": 50_000, "metric": "FID"}
MORE |= {"extractor": "inception", "train_seconds": 0.0, "sample_seconds": 0.0}


@pytest.fixture(scope="module")
def paper() -> list[Line]:
    with open(PAPER, newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["dataset"] == "cifar10"]
    return [Line.model_validate({**row, "sigma": row["sigma"] or None, **MORE}) for row in rows]


def cells(text: str) -> list[list[str]]:
    return [line.split(" & ") for line in text.strip().splitlines()]


def test_papers_numbers_stand_where_the_paper_has_them(paper: list[Line]) -> None:
    first, only_noisy, clean_mix, extras = paper_tables(paper)
    assert [list(row) for row in only_noisy.rows] == cells(ONLY_NOISY)
    assert [list(row) for row in clean_mix.rows] == cells(CLEAN_MIX)
    assert clean_mix.header == ("available data", *(f"p = {p}%" for p in (100, 90, 70, 50, 30, 10, 0)))
    values = dict(first.rows)
    assert values["100% clean"] == "1.99 ± 0.02" and values["10% clean"] == "17.30 ± 0.14"
    assert values["10% clean + 90% noisy"] == "2.81 ± 0.02"
    assert values["100% noisy, consistency"] == "11.93 ± 0.09"  # the paper's "100 % noisy" is its best variant
    assert first.title == "FID at noise 0.2"
    assert [row[1:] for row in extras.rows] == [
        ("0.1", "0.4", "full", "3.56 ± 0.03"),
        ("0.01", "0.2", "full", "3.53 ± 0.03"),
    ]
    assert headline(paper) == (
        "10% clean + 90% noisy images at noise 0.2 reach FID 2.81 ± 0.02; all clean ones 1.99 ± 0.02; the 10% "
        "clean ones alone 17.30 ± 0.14; noisy ones alone 11.93 ± 0.09 at best."
    )


def test_tables_read_back_from_every_format(paper: list[Line]) -> None:
    for table in paper_tables(paper):
        rows = [list(table.header), *map(list, table.rows)]
        marked = format_table(table, "markdown").splitlines()
        assert marked[:2] == [f"**{table.title}**", ""] and marked[3] == "|" + "---|" * len(table.header)
        assert [line.strip("| ").split(" | ") for line in (marked[2], *marked[4:])] == rows
        latex = format_table(table, "latex")
        body = [line.removesuffix(r" \\") for line in latex.splitlines() if line.endswith(r"\\")]
        plain = [line.replace(r"\%", "%").replace(r"\_", "_").replace(r"$\pm$", "±") for line in body]
        assert [line.split(" & ") for line in plain] == rows
        assert latex.count("{") == latex.count("}") and not re.search(r"(?<!\\)[%_#]", latex)
        for begin, end in pairwise(
            (r"\begin{tabular}", r"\toprule", r"\midrule", r"\bottomrule", r"\end{tabular}")
        ):
            assert latex.index(begin) < latex.index(end)
        text = format_table(table, "text").splitlines()
        assert [re.split(r"\s{2,}", line) for line in text[2:]] == rows


def test_text_columns_line_up() -> None:
    table = Table("t", ("a", "bb"), (("longer", "1"), ("x", "22")))
    assert format_table(table, "text") == "t\n\na       bb\nlonger  1\nx       22\n"


def test_repeats_are_averaged_over_seeds(paper: list[Line]) -> None:
    wanted = {"table": "clean_mix", "data": "mix", "sigma": 0.2, "clean_fraction": 0.1}
    line = next(x for x in paper if all(getattr(x, key) == value for key, value in wanted.items()))
    repeats = [line.model_copy(update={"seed": i, "fid": fid}) for i, fid in enumerate((2.0, 3.0, 7.0))]
    value = value_of(repeats, **wanted)
    assert value is not None and (value.mean, value.num_repeats) == (4.0, 3)
    assert value.std == pytest.approx(7**0.5)  # sqrt(((-2)^2 + (-1)^2 + 3^2) / 2)
    assert value_of(repeats, sigma=0.3) is None


numbers = st.floats(allow_nan=False, allow_infinity=False)
lines = st.builds(
    Line,
    table=st.text("abc_", min_size=1),
    dataset=st.text(min_size=1).filter(lambda text: "\r" not in text and "\x00" not in text),
    data=st.sampled_from(["mix", "clean_only"]),
    sigma=st.none() | numbers,
    **{name: numbers for name in ("clean_fraction", "noisy_fraction", "fid", "fid_std")},
    **{name: numbers for name in ("train_seconds", "sample_seconds")},
    **{name: st.integers(0, 10**9) for name in ("seed", "num_clean", "num_noisy", "num_images")},
    sampling=st.sampled_from(["full", "truncated"]),
    consistency=st.booleans(),
    metric=st.just("FD-pixels"),
    extractor=st.just("pixels"),
)


@given(st.lists(lines, max_size=5))
def test_csv_round_trip(tmp_path_factory: pytest.TempPathFactory, written: list[Line]) -> None:
    path = tmp_path_factory.mktemp("csv") / "results.csv"
    write_results(path, written)
    assert read_lines(path) == written
    before = path.read_bytes()
    write_results(path, read_lines(path))
    assert path.read_bytes() == before


def test_columns_begin_with_the_papers(tmp_path: Path, paper: list[Line]) -> None:
    write_results(tmp_path / "results.csv", paper)
    header = (tmp_path / "results.csv").read_text().splitlines()[0].split(",")
    papers = PAPER.read_text().splitlines()[0].split(",")
    assert header[: len(papers)] == papers
