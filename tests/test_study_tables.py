"""Tables of results: the paper's own numbers come out in the paper's own places."""

import re
from pathlib import Path

import pytest

from assay.metrics.evaluate import Evaluation
from assay.outcome import Configuration, Metric, Outcome, read_outcomes
from assay.pricing import PAPER
from assay.study.report import (
    Average,
    Table,
    averages,
    headline,
    headline_configurations,
    study_tables,
)

DEMO = Path(__file__).parent.parent / "studies" / "demo" / "results.csv"
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


@pytest.fixture(scope="module")
def paper() -> list[Outcome]:
    return [each for each in read_outcomes(PAPER).values() if each.configuration.dataset == "cifar10"]


def cells(text: str) -> list[list[str]]:
    return [line.split(" & ") for line in text.strip().splitlines()]


def test_papers_numbers_stand_where_the_paper_has_them(paper: list[Outcome]) -> None:
    first, only_noisy, clean_mix, extras = study_tables(paper)
    assert [list(row) for row in only_noisy.rows] == cells(ONLY_NOISY)
    assert [list(row) for row in clean_mix.rows] == cells(CLEAN_MIX)
    assert clean_mix.header == ("available data", *(f"p = {p}%" for p in (100, 90, 70, 50, 30, 10, 0)))
    values = dict(first.rows)
    assert values["100% clean"] == "1.99 ± 0.02" and values["10% clean"] == "17.30 ± 0.14"
    assert values["10% clean + 90% noisy"] == "2.81 ± 0.02"
    assert values["100% noisy, consistency"] == "11.93 ± 0.09"  # the paper's "100% noisy" is its best variant
    assert first.title == "FID at noise 0.2"
    assert extras.rows[-2:] == (
        ("extreme: 6,000 clean + 54,000 noisy at 0.4", "3.56 ± 0.03"),
        ("extreme: 600 clean + 59,400 noisy at 0.2", "3.53 ± 0.03"),
    )
    assert headline(paper) == (
        "10% clean + 90% noisy images at noise 0.2 reach FID 2.81 ± 0.02; all clean ones 1.99 ± 0.02; the 10% "
        "clean ones alone 17.30 ± 0.14; noisy ones alone 11.93 ± 0.09 at best."
    )


def test_tables_read_back_from_every_format(paper: list[Outcome]) -> None:
    for table in study_tables(paper):
        rows = [list(table.header), *map(list, table.rows)]
        marked = table.markdown().splitlines()
        assert marked[:2] == [f"**{table.title}**", ""] and marked[3] == "|" + "---|" * len(table.header)
        assert [line.strip("| ").split(" | ") for line in (marked[2], *marked[4:])] == rows
        assert [re.split(r"\s{2,}", line) for line in str(table).splitlines()[2:]] == rows
    aligned = Table("t", ("a", "bb"), (("longer", "1"), ("x", "22")))
    assert str(aligned) == "t\n\na       bb\nlonger  1\nx       22\n"


def made(fd: float = 1.0, seed: int | None = 0, **setting: object) -> Outcome:
    evaluation = Evaluation(fd=fd, fd_std=0.25, metric="FD-pixels", extractor="pixels")
    return Outcome(
        configuration=Configuration.model_validate({"num_clean": 10, "seed": seed, **setting}),
        evaluation=evaluation,
    )


def test_repeats_are_averaged_over_seeds() -> None:
    (value,) = averages([made(fd, seed) for seed, fd in enumerate((2.0, 3.0, 7.0))]).values()
    assert value.mean == 4 and value.std == pytest.approx(7**0.5)  # sqrt(((-2)^2 + (-1)^2 + 3^2) / 2)
    (twice,) = averages([made(2.0), made(2.0)]).values()  # the same line in two tables
    assert (twice.mean, twice.std) == (2.0, 0.25)


def test_the_demos_numbers() -> None:
    """Golden: the table and the sentence that the README shows of the demo, whose seed is 0."""
    demo = [each for each in read_outcomes(DEMO).values() if each.configuration.seed == 0]
    first, only_noisy, clean_mix, _ = study_tables(demo)
    assert dict(first.rows) == {
        "100% clean": "2.67 ± 0.25",
        "100% noisy": "10.73 ± 0.49",
        "100% noisy, truncated sampling": "6.05 ± 0.55",
        "100% noisy, consistency": "5.51 ± 0.39",
        "10% clean": "9.14 ± 1.12",
        "10% clean + 90% noisy": "3.92 ± 0.43",
    }
    assert only_noisy.rows[1] == ("0.3", "10.73 ± 0.49", "6.05 ± 0.55", "5.51 ± 0.39")
    assert clean_mix.rows[1][1:] == ("2.67 ± 0.25", "3.14 ± 0.38", "3.92 ± 0.43", "10.73 ± 0.49")
    assert headline(demo) == (
        "10% clean + 90% noisy images at noise 0.3 reach FD-classifier 3.92 ± 0.43; all clean ones 2.67 ± "
        "0.25; the 10% clean ones alone 9.14 ± 1.12; noisy ones alone 5.51 ± 0.39 at best."
    )


def test_small_fractions_are_told_apart() -> None:
    mixes = [
        made(1 / p, table="clean_mix", num_clean=1e6 * p, noisy=((0.3, 1e6 - 1e6 * p),), clean_fraction=p)
        for p in (0.001, 0.002, 0.1)
    ]
    assert headline_configurations(each.configuration for each in mixes)["mix"].num_clean == 1000
    assert headline(mixes).startswith("0.1% clean + 99.9% noisy images at noise 0.3 reach FD-pixels 1000")
    (table,) = study_tables(mixes)
    assert table.header == ("available data", "p = 10%", "p = 0.2%", "p = 0.1%")


def test_other_metrics_stand_beside_the_distance() -> None:
    measured = {"kid": 0.0123, "kid_error": 0.001, "precision": 0.7, "recall": 0.25, "memorised": 0.05}
    outcomes = [
        each.model_copy(update={"evaluation": each.evaluation.model_copy(update=measured)})
        for each in (made(2.0, 0), made(3.0, 1), made(4.0, table="x_0 weights"))
    ]
    outcomes.append(made(5.0, num_clean=20))  # an older result, without them
    table = study_tables(outcomes)[-1]
    assert table.header == ("configuration", "FD-pixels", "KID", "precision", "recall", "memorised")
    assert table.rows == (
        ("10 clean", "2.50 ± 0.71", "0.0123 ± 0", "0.7 ± 0", "0.25 ± 0", "0.05 ± 0"),
        ("x_0 weights: 10 clean", "4.00 ± 0.25", "0.0123 ± 0.001", "0.7", "0.25", "0.05"),
        ("20 clean", "5.00 ± 0.25", "", "", "", ""),
    )


def test_tables_go_by_any_metric() -> None:
    outcomes = []
    for p, kid in ((1.0, 0.01), (0.1, 0.04)):
        one = made(table="clean_mix", num_clean=100 * p, clean_fraction=p)
        evaluation = one.evaluation.model_copy(update={"kid": kid, "kid_error": 0.001})
        outcomes.append(one.model_copy(update={"evaluation": evaluation}))
    first = study_tables(outcomes, Metric("kid"))[0]
    assert first.rows == (("100% clean", "0.01 ± 0.001"), ("10% clean", "0.04 ± 0.001"))
    assert first.title == "KID"


def test_names_are_escaped() -> None:
    table = Table("a|b", ("x",), ((r"50% of $x_0$ & {y}~^#\ | <b>*",),))
    assert table.markdown() == "**a\\|b**\n\n| x |\n|---|\n| 50% of $x_0$ & {y}~^#\\\\ \\| &lt;b>\\* |\n"


def test_small_and_large_values_keep_their_digits() -> None:
    assert str(Average(9.662, 0.7)) == "9.66 ± 0.70"
    assert str(Average(0.00312, 0.00041)) == "0.00312 ± 0.00041"
    assert str(Average(123456.7, 89.1)) == "123457 ± 89"
    assert str(Average(0.0, None)) == "0.00"
