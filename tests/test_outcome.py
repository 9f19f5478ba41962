"""Outcomes: words for settings, records through JSON and CSV, old tables."""

import csv
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.metrics.evaluate import NOT_COLUMNS, Evaluation
from assay.outcome import (
    COLUMNS,
    Configuration,
    Outcome,
    load_outcome,
    percent,
    read_outcomes,
    write_outcomes,
)
from assay.pricing import PAPER
from assay.study.report import averages
from tests.errors import fault, rejected

# --- words -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "words", "shares"),
    [
        (Configuration(num_clean=200, noisy=((0.3, 1800),), clean_fraction=0.1),
         "200 clean + 1,800 noisy at 0.3", "10% clean + 90% noisy at 0.3"),
        (Configuration(num_clean=0, noisy=((0.3, 2000),), clean_fraction=0, sampling="truncated"),
         "2,000 noisy at 0.3, truncated sampling", "100% noisy at 0.3, truncated sampling"),
        (Configuration(num_clean=2, noisy=((0.3, 1998),), clean_fraction=0.001, consistency=True),
         "2 clean + 1,998 noisy at 0.3, consistency", "0.1% clean + 99.9% noisy at 0.3, consistency"),
        (Configuration(num_clean=50, noisy=((0.5, 30), (0.1, 20), (0.2, 0)), clean_fraction=0.5),
         "50 clean + 20 noisy at 0.1 + 30 noisy at 0.5", "50% clean + 20% noisy at 0.1 + 30% noisy at 0.5"),
        (Configuration(num_clean=50, noisy=tuple((level / 10, 25) for level in range(1, 5))),
         "50 clean + 100 noisy at 0.1 to 0.4", "50 clean + 100 noisy at 0.1 to 0.4"),
    ],
)  # fmt: skip
def test_words(setting: Configuration, words: str, shares: str) -> None:
    assert str(setting) == words and setting.words(shares=True) == shares
    assert setting.model_copy(update={"table": "clamped", "seed": 3}).title == f"clamped: {words} (seed 3)"


@given(st.floats(1e-12, 1 - 1e-12))
def test_no_part_is_written_as_none_or_all_of_it(part: float) -> None:
    value = float(percent(part).removesuffix("%")) / 100
    assert 0 < value < 1 and value == pytest.approx(part, rel=0.006)
    assert 1 - value == pytest.approx(1 - part, rel=0.006)


def test_percentages_are_short() -> None:
    parts = {0: "0%", 1: "100%", 0.29: "29%", 1 / 3: "33.3%", 0.9995: "99.95%"}
    assert {part: percent(part) for part in parts} == parts


def test_repeats_are_settings_alike_but_for_the_seed() -> None:
    first, second = (Configuration(num_clean=10, noisy=((0.1, 5),), seed=seed) for seed in (0, 1))
    assert first != second and first.without_seed == second.without_seed
    assert hash(first.without_seed) == hash(second.without_seed)
    for noisy in (((0.1, 1), (0.1, 2)), ((0.0, 1),), ((0.1, -1),)):
        with pytest.raises(ValueError, match="noisy"):
            Configuration(num_clean=1, noisy=noisy)


# --- records -----------------------------------------------------------------------------------------------

amounts = st.one_of(st.integers(1, 10**9).map(float), st.floats(1e-3, 1e9))
levels = st.dictionaries(st.floats(1e-4, 1e3), amounts, max_size=4).map(lambda found: tuple(found.items()))
names = st.text(max_size=12) | st.sampled_from(["=1+1", "'=x", "''@x", "-1", "+", "'quoted'", "a,b", 'c"d'])
common = {
    "dataset": names, "table": names, "consistency": st.booleans(),
    "sampling": st.sampled_from(["full", "truncated", "refined"]), "seed": st.none() | st.integers(0, 2**31),
}  # fmt: skip
configurations = st.builds(
    Configuration, num_clean=amounts, noisy=levels, clean_fraction=st.none() | st.floats(0, 1), **common
)
finite = st.none() | st.floats(allow_nan=False, allow_infinity=False)
measured = {name: finite for name in Evaluation.model_fields if name not in NOT_COLUMNS}
measured |= {"fd": st.floats(1e-9, 1e9), "held_out_loss": st.none() | st.floats(1e-9, 1e9)}
measured |= {name: st.none() | st.floats(0, 1e9) for name in measured if name.endswith(("_error", "_std"))}
measured |= dict.fromkeys(("held_out_loss_images", "held_out_loss_step"), st.none() | st.integers(1, 10**6))
measured |= {"metric": st.just("FD-pixels"), "extractor": st.just("pixels")}
measured |= {"num_images": st.none() | st.integers(1, 10**6)}
outcomes = st.builds(
    Outcome,
    configuration=configurations,
    evaluation=st.builds(Evaluation, **measured),
    train_seconds=finite,
    sample_seconds=finite,
)


@given(st.lists(outcomes, min_size=1, max_size=4, unique_by=lambda outcome: outcome.configuration))
def test_records_survive_json_and_csv(tmp_path_factory: pytest.TempPathFactory, written: list[Outcome]) -> None:
    folder = tmp_path_factory.mktemp("records")
    (folder / "one.json").write_text(written[0].model_dump_json())
    assert load_outcome(folder / "one.json") == written[0]
    path = folder / "results.csv"
    write_outcomes(path, written)
    back = list(read_outcomes(path).values())
    assert back == written
    before = path.read_bytes()
    write_outcomes(path, back)
    assert path.read_bytes() == before


def test_copies_of_rows_and_levels_in_other_units_are_told(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("num_clean,num_noisy,sigma,fd\n" + "200,9,38,4.1\n" * 2)
    with pytest.warns(UserWarning, match="1 of the 2 rows"), pytest.warns(UserWarning, match="level of 38"):
        read_outcomes(tmp_path / "t.csv")


@pytest.mark.parametrize(
    ("rows", "numbers"),
    [
        ("0.5,0,,9\n4,0,,5\n0.5,3,0.2,7\n", "results of 0.5 images"),  # thousands
        ("500,0,,0.6\n4000,0,,0.9\n500,3000,0.2,0.8\n", "0.6 with 500 and 0.9 with 4000"),  # an accuracy
        ("500,0,,9\n4000,0,,5\n500,3000,0.2,7\n", None),
    ],
)
def test_numbers_in_thousands_and_results_that_rise_are_told(
    rows: str, numbers: str | None, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    (tmp_path / "t.csv").write_text("num_clean,num_noisy,sigma,fd\n" + rows)
    read_outcomes(tmp_path / "t.csv")
    assert [numbers in str(each.message) for each in recwarn.list] == ([True] if numbers else [])


def test_cells_that_a_spreadsheet_would_run_are_text(tmp_path: Path) -> None:
    of = Configuration(dataset="=HYPERLINK(1)", num_clean=1)
    write_outcomes(tmp_path / "t.csv", [Outcome(configuration=of, evaluation=Evaluation(fd=1.0))])
    with open(tmp_path / "t.csv", newline="") as file:
        assert next(csv.DictReader(file))["dataset"] == "'=HYPERLINK(1)"


def test_the_papers_table_is_read() -> None:
    found = read_outcomes(PAPER)
    assert len(found) == len(PAPER.read_text().splitlines()) - 1
    first = found[2]
    assert first.configuration == Configuration(
        dataset="cifar10", table="clean_mix", num_clean=60_000, clean_fraction=1
    )
    assert (first.evaluation.metric, first.evaluation.fd, first.evaluation.fd_std) == ("FID", 1.99, 0.02)
    mixed = next(each for each in found.values() if each.configuration.sigma == 0.2)
    assert mixed.configuration.words(shares=True) == "90% clean + 10% noisy at 0.2"


def test_headers_may_be_in_any_case_and_other_columns_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("Noise, N_Clean ,n_noisy,FID,data\n,10,0,2.5,x\n\n0.1 0.2,10,5 6,1.5,\n")
    found = read_outcomes(path)
    assert list(found) == [2, 4]  # the line, not the row
    assert found[4].configuration == Configuration(dataset="mine", num_clean=10, noisy=((0.1, 5), (0.2, 6)))
    assert (found[2].evaluation.fd, found[2].evaluation.metric) == (2.5, "FID")


def test_fractions_need_the_size_of_the_data_set(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("sigma,clean_fraction,noisy_fraction,fd\n0.2,0.1,0.9,2.5\n")
    with rejected("num_clean"):
        read_outcomes(path)
    (found,) = read_outcomes(path, num_images=2000).values()
    assert (found.configuration.num_clean, found.configuration.noisy) == (200, ((0.2, 1800),))


@pytest.mark.parametrize(
    ("row", "key"),
    [
        (",10,0,2.5,full,0,0.5", "seed"),
        (",10,0,2.5,slow,0,0", "sampling"),
        ("0.1 0.2,10,5,2.5,full,0,0", "sigma"),
        ("0.1,-1,5,2.5,full,0,0", "num_clean"),
        ("-0.1,1,5,2.5,full,0,0", "sigma"),
        ("0.1,5,,2.5,full,0,0", "num_noisy"),
        ("0,1,5,2.5,full,0,0", "sigma"),
        ("0.1,1,five,2.5,full,0,0", "num_noisy"),
        (",0,0,2.5,full,0,0", "num_clean"),
        (",1,0,inf,full,0,0", "fd"),
        (",1,0,-2,full,0,0", "fd"),
        (",1,0,,full,0,0", "fd or held_out_loss"),
    ],
)
def test_bad_cells_are_named(tmp_path: Path, row: str, key: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"sigma,num_clean,num_noisy,fd,sampling,consistency,seed\n{row}\n")
    with rejected(key, f"{path}, line 2"):
        read_outcomes(path)


@pytest.mark.parametrize(
    ("header", "key"),
    [
        ("sigma,num_clean,num_noisy,fd,FD", "fd"),
        ("sigma,num_clean,fd,a,b", "num_noisy"),
        ("sigma,num_clean,num_noisy,a,b", "fd or held_out_loss"),
    ],
)
def test_columns_that_are_missing_or_named_twice_are_rejected(tmp_path: Path, header: str, key: str) -> None:
    (tmp_path / "t.csv").write_text(f"{header}\n,1,0,2,3\n")
    with rejected(key):
        read_outcomes(tmp_path / "t.csv")


def test_errors_name_the_separator_and_the_column_as_the_table_has_it(tmp_path: Path) -> None:
    path, text = tmp_path / "t.csv", "n_clean,n_noisy,noise,fid\n10,5,0,2.5\n"
    for mark, name in ((";", "semicolons"), ("\t", "tabs")):
        path.write_text(text.replace(",", mark))
        assert f"has {name} between" in fault(lambda: read_outcomes(path)).what
    path.write_text(text)
    assert fault(lambda: read_outcomes(path)).key == "column noise"


def test_every_metric_is_a_column() -> None:
    assert set(Evaluation.model_fields) - set(NOT_COLUMNS) <= set(COLUMNS)
    evaluation = Evaluation(fd=2.0, fd_std=0.5, kid=0.01, kid_error=0.002, metric="FD-x", extractor="x")
    outcome = Outcome(configuration=Configuration(num_clean=1), evaluation=evaluation)
    assert (evaluation.title("kid"), outcome.value("kid"), evaluation.error("kid")) == ("KID", 0.01, 0.002)
    assert outcome.value("recall") is None and averages([outcome], "recall") == {}
    assert str(averages([outcome], "kid")[outcome.configuration]) == "0.01 ± 0.002"


def test_a_seed_that_is_another_copied_is_told() -> None:
    table = {
        "num_clean": [100, 200, 400] * 2,
        "num_noisy": [0] * 6,
        "sigma": [None] * 6,
        "seed": [0] * 3 + [1] * 3,
    }
    with pytest.warns(UserWarning, match="same 3 results for seeds 0 and 1"):
        read_outcomes(table | {"fd": [9.0, 6.0, 4.0] * 2})
    with warnings.catch_warnings(action="error"):
        read_outcomes(table | {"fd": [9.0, 6.0, 4.0, 9.0, 6.1, 4.0]})
