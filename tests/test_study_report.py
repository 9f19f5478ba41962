"""The report of a study: its tables, files and words, and its page in a real browser.

The paper's own numbers come out in the paper's own places.
"""

import csv
import html
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from assay.figure import Panel, Series, draw_svg
from assay.metrics.evaluate import Evaluation
from assay.nets import measure_cost
from assay.outcome import Configuration, Outcome, read_outcomes
from assay.pricing import price
from assay.pricing.paper import PAPER
from assay.study import open_study
from assay.study.report import (
    Average,
    Table,
    averages,
    compared_table,
    headline,
    report_from_table,
    study_tables,
    write_report,
)
from assay.study.sizing import study_cost
from assay.study.spec import read_study
from assay.study.stages import execute
from tests.commands import failing, run
from tests.studies import DESIGN, SPEC

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def run_all(spec: str, folder: Path) -> Path:
    """The folder of a study that was run and reported."""
    (folder / "spec.toml").write_text(spec)
    opened = open_study(folder / "spec.toml", folder / "out")
    assert write_report(opened) is None, "no result, no report"
    assert all(execute(opened.work(each)) for each in opened.runs)
    written = write_report(opened)
    assert written is not None and written.path == folder / "out" / "report.html"
    return folder / "out"


@pytest.fixture(scope="module")
def paper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report_from_table(PAPER, tmp_path_factory.mktemp("paper")).path


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real study of five short trainings of the paper's grid."""
    spec = SPEC.replace("num_steps = 120", "num_steps = 20").replace("num_images = 60", "num_images = 40")
    return run_all(spec.replace("num_ranges = 2", "num_ranges = 2\nalong = 2"), tmp_path_factory.mktemp("grid"))


@pytest.fixture(scope="module")
def design(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real study of eight short trainings of a design."""
    spec = DESIGN.replace("num_steps = 120", "num_steps = 20")
    return run_all(spec + "ladder = [1, 2, 4]\n", tmp_path_factory.mktemp("design"))


Rows = list[tuple[str, float | None, int, int, float]]


def table(path: Path, rows: Rows, dataset: str = "x", metric: str = "FID") -> Path:
    """A CSV of (table, sigma, clean images, noisy images, FD)."""
    names = "table,dataset,sigma,num_clean,num_noisy,clean_fraction,fd,fd_std,metric,extractor"
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names.split(","))
        for name, sigma, clean, noisy, fd in rows:
            share = clean / (clean + noisy)
            writer.writerow([name, dataset, sigma, clean, noisy, share, fd, 0.01, metric, metric])
    return path


LADDER: Rows = [("clean_mix", None, n, 0, 1 + 200 / n) for n in (100, 200, 400, 1000)]
MIXES: Rows = [("clean_mix", 0.5, n, 1000 - n, 1 + 200 / (n + 0.5 * (1000 - n))) for n in (100, 200, 400)]


def test_the_papers_prices(paper: Path) -> None:
    written = report_from_table(PAPER, paper.parent)
    assert [prices.dataset for prices in written.prices] == ["cifar10", "celeba_hq", "imagenet"]
    for prices in written.prices:
        rate, low, high = prices.of("looks", 0.2).rate
        assert 1 < low <= rate <= high
    assert "| p clean, rest noisy at 0.2 | 1.99 ± 0.02 |" in (paper.parent / "tables.md").read_text()


def test_the_papers_own_study_stands_beside_its_numbers(tmp_path: Path) -> None:
    rows = [*LADDER[-1:], ("clean_mix", 0.2, 100, 900, 1.7), ("x", 0.3, 100, 900, 2.0)]
    rows += [("B: more training", 0.2, 100, 900, 1.65)]
    report_from_table(table(tmp_path / "fid.csv", rows, "paper-imagenet"), tmp_path)
    text = (tmp_path / "tables.md").read_text()
    assert "| 10% clean + 90% noisy at 0.2 | 1.70 ± 0.01 | 1.68 ± 0.02 |" in text
    assert "| 10% clean + 90% noisy at 0.2 | 1.65 ± 0.01 | 1.63 |" in text
    report_from_table(table(tmp_path / "fid.csv", rows, "digits"), tmp_path)
    assert "paper" not in (tmp_path / "tables.md").read_text()


def test_a_grid_writes_everything(grid: Path) -> None:
    names = {path.name for path in (grid / "figures").iterdir()}
    assert {"noise_levels.png", "fd-against-training-steps.png", "samples-1-618-clean.png"} <= names
    assert {"results.csv", "levels.csv", "tables.md", "report.html"} <= {path.name for path in grid.iterdir()}
    assert len(read_outcomes(grid / "results.csv")) == 7  # noisy images alone are in two tables
    text = (grid / "report.html").read_text()
    assert 'alt="Samples of the model trained on 162 clean + 1,456 noisy at 0.5"' in text


def test_a_design_opens_with_its_goals(design: Path) -> None:
    text = (design / "report.html").read_text()
    assert "For structure, the levels above the noise" in text and "For everything, down to" in text
    assert "For how samples look" not in text  # nothing was sampled
    assert text.count("data:image/svg+xml") == 1, "one picture, the worth curve"
    assert text.index('class="stats"') < text.index("<figure") < text.index("<table")
    assert "digits; network mlp" in text and "2 training seeds or blocks" in text


@pytest.mark.parametrize("rows", [LADDER[:1], [("only_noisy", 0.5, 0, 900, 9.0)], LADDER + MIXES])
def test_tables_that_say_little_are_reported_all_the_same(rows: Any, tmp_path: Path) -> None:
    written = report_from_table(table(tmp_path / "t.csv", rows), tmp_path / "out")
    assert written.path.exists() and bool(written.prices) == (len(rows) > 1)
    assert not re.search(r"\bnan\b", " ".join(written.answer))


def test_commands_on_a_finished_study(design: Path) -> None:
    status = run("study", "status", design)
    assert "8 of 8 runs are finished; " in status and "\n80 clean (seed 0)  " in status
    caution = "learns with pairing = 'image_first', not 'level_first'"
    assert caution in status and caution in html.unescape((design / "report.html").read_text())
    assert "0 trainings" in run("study", "cost", design)
    everything = run("study", "cost", design, "--set", "train.lr=0.1")  # what it would cost, without a start
    assert "8 trainings" in everything and not (design / "settings.txt").exists()
    assert "8 trainings" in run("study", "cost", design, "--rate", 60)
    opened = open_study(design, settings=["train.lr=0.1"], claim=False)
    for each, run_of in zip(study_cost(opened.study, opened), opened.runs, strict=True):
        weights = run_of.config.net_config(opened.source)
        assert each.kept == 4e-6 * measure_cost(weights).num_parameters and each.megabytes > 9 * each.kept
    assert "held-out loss" in run("study", "compare", design, design)
    before = (design / "results.csv").read_bytes()
    first = next(design.glob("runs/*/outcome-*.json")).parent
    shutil.copytree(first, other := first.with_name("other"))  # of other settings, or other images
    mine = [folder / "mine.txt" for folder in (first.parent, first / "snapshots", other, other / "snapshots")]
    for path in mine:
        path.write_text("not of the study")
    for command in ("report", "run"):  # also of the folder itself: nothing is replaced
        assert failing("study", command, design).what.startswith("holds 1 runs from before digits")
    assert json.loads(run("study", "status", design, "--json"))["num_others"] == 1
    listed = run("study", "clean", design)
    assert listed.count("snapshots") == 8 and len([*design.glob("runs/*/snapshots/final.*")]) == 9
    kept = {path: path.read_bytes() for path in other.rglob("*") if path.is_file()}
    assert "Removed" in run("study", "clean", design, "--yes")
    assert sorted(design.glob("runs/*/snapshots/*")) == sorted([mine[1], *(other / "snapshots").iterdir()])
    assert all(path.read_bytes() == content for path, content in kept.items()) and mine[0].exists()
    shutil.rmtree(other)
    for path in mine[:2]:
        path.unlink()
    newest = max(path.stat().st_mtime for path in design.glob("runs/*/outcome-*.json"))
    os.utime(design / "results.csv", (newest - 1, newest - 1))  # as while the study runs on
    for command in (("price", design), ("study", "compare", design, design)):
        told = " ".join(run(*command).split())
        assert "newer results than its results.csv" in told and f"`assay study report {design}` adds" in told
    run("study", "report", design)
    assert (design / "results.csv").read_bytes() == before
    other = "study", "run", design.parent / "spec.toml", "-o", design, "--set", "train.lr=0.1"
    assert failing(*other).path == str(design)  # its results are not replaced
    (changed := design.parent / "changed.toml").write_text(
        (design / "study.toml").read_text().replace("lr = 2e-3", "lr = 1e-3")
    )
    assert "Would free 0.0 MB" in run("study", "clean", changed, "-o", design)
    told = failing("study", "run", changed, "-o", design).what
    assert "8 runs of other settings" in told and " there, " in told
    (design / "settings.txt").write_text("train.lr=0.1\n")  # as if it had been run so
    error = failing("study", "run", changed, "-o", design)
    assert (error.path, error.what) == (str(design), "was run with --set train.lr=0.1")
    (design / "settings.txt").unlink()
    assert failing("study", "compare", design, design / "no").cure == "check the path"


def test_status_writes_nothing_and_does_without_the_images(design: Path, tmp_path: Path) -> None:
    shutil.copytree(design, study := tmp_path / "copy")
    unfinished = next(study.glob("runs/*/outcome-*.json"))
    title = json.loads(unfinished.read_text())["configuration"]["num_clean"]
    unfinished.unlink()
    (lock := unfinished.parent / ".assay-partial" / "run.lock").parent.mkdir(exist_ok=True)
    lock.write_text("of a process that was killed")

    def status() -> dict[str, Any]:
        before = {path: path.stat().st_mtime_ns for path in [tmp_path, *tmp_path.rglob("*")]}
        found: dict[str, Any] = json.loads(run("study", "status", study, "--json"))
        assert {path: path.stat().st_mtime_ns for path in [tmp_path, *tmp_path.rglob("*")]} == before
        assert len(found["runs"]) == 8 and found["folder"] == str(study)
        return {run["key"]: run for run in found["runs"]} | found

    there = status()
    row = there[unfinished.parent.name]
    assert there["lists_all_runs"] and (row["state"], row["trained"]) == ("to be measured", 1)
    assert (
        row["title"].startswith(f"{title:.0f} clean")
        and row["held_out_loss"] is None
        and row["seconds_left"] > 0
    )
    finished = {run["title"]: run["held_out_loss"] for run in there["runs"] if run["state"] == "finished"}
    measured = {each.configuration.title: each for each in read_outcomes(study / "results.csv").values()}
    assert len(finished) == 7 and finished == {
        title: measured[title].value("held_out_loss") for title in finished
    }
    shutil.rmtree(study / "data")
    without = status()
    assert not without["lists_all_runs"] and without["notes"][0].endswith("is known but not packed yet.")
    assert without[unfinished.parent.name] == {**row, "title": unfinished.parent.name}
    assert all(without[run["key"]] == run for run in there["runs"] if run["state"] == "finished")
    told = run("study", "status", design.parent / "spec.toml", "-o", study)
    assert f"`assay study run {study}` resumes it" in told
    assert "0 of 0 runs" in run("study", "status", design.parent / "spec.toml", "-o", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_settings_of_two_studies_are_compared(
    design: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
        for name in ("results.csv", "study.toml"):
            shutil.copy(design / name, folder)
    assert run("study", "compare", *folders).endswith("here:\nnone\n")
    (folders[1] / "settings.txt").write_text("train.lr=0.001\ntrain.pairing=image_first\n")
    said = run("study", "compare", *folders).splitlines()
    assert said[-3:-1] == [
        "train.lr: 0.002 there, 0.001 here",
        "train.pairing: level_first there, image_first here",
    ]
    assert "compare losses within a study" in said[-1] and any(line.startswith("± is") for line in said)
    monkeypatch.chdir(tmp_path)  # of a study's file its folder, out/NAME, is meant
    name = str(read_study(folders[0]).name)
    shutil.copytree(folders[0], tmp_path / "out" / name)
    assert run("study", "compare", folders[0] / "study.toml", folders[0]).endswith("here:\nnone\n")
    (folders[0] / "study.toml").unlink()
    assert f"there is no {folders[0] / 'study.toml'}" in run("study", "compare", *folders)


def test_prices_of_finished_runs_need_no_report(design: Path, tmp_path: Path) -> None:
    shutil.copytree(design, study := tmp_path / "copy")
    (study / "results.csv").unlink()
    (study / "levels.csv").unlink()
    assert "open_study" in (failing("price", study).cure or "")
    whole, again = price(design), open_study(study, claim=False).prices()
    assert [(each.goal, each.worth) for each in again.prices] == [
        (each.goal, pytest.approx(each.worth, rel=1e-6, nan_ok=True)) for each in whole.prices
    ]


@pytest.mark.parametrize(("low", "advised"), [(0.25, True), (0.0, False)])
def test_more_blocks_are_advised_where_they_help(
    low: float, advised: bool, design: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    price = SimpleNamespace(low=low, high=0.5, limited=0.0, law=SimpleNamespace(num_blocks=2))
    monkeypatch.setattr("assay.study.run.drive", lambda opened, *_, **how: (opened, (price,), {}))
    assert ("6 more blocks (24 runs, " in run("study", "run", design)) == advised


def test_figures_are_the_same_in_every_report() -> None:
    panel = Panel("t", "x", "y", [Series("a", "line", [1, 2], [3, 4])], log_x=True)
    assert draw_svg(panel) == draw_svg(panel)


def test_page_is_one_small_file_that_loads_nothing(paper: Path, design: Path) -> None:
    for path in (paper, design / "report.html"):
        text = path.read_text()
        assert len(text) < 400_000 and "<script" not in text
        assert not re.search(r"https?://|@import|url\(", text)
        assert not re.search(r"<[^>]* (src|href)=\"(?!data:|#)", text)
        assert not re.search(r"<[^>]* (on\w+|style)=", text), "against the page's policy"


# --- tables ------------------------------------------------------------------------------------------------

GRID = Path(__file__).parent / "golden" / "grid_results.csv"  # of the grid that was the demo of version 0.2
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
def cifar10() -> list[Outcome]:
    return [each for each in read_outcomes(PAPER).values() if each.configuration.dataset == "cifar10"]


def cells(text: str) -> list[list[str]]:
    return [line.split(" & ") for line in text.strip().splitlines()]


def test_papers_numbers_stand_where_the_paper_has_them(cifar10: list[Outcome]) -> None:
    first, only_noisy, clean_mix, extras = study_tables(cifar10)
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
    assert headline(cifar10) == (
        "10% clean + 90% noisy images at noise 0.2 reach FID 2.81 ± 0.02; all clean ones 1.99 ± 0.02; the 10% "
        "clean ones alone 17.30 ± 0.14; noisy ones alone 11.93 ± 0.09 at best."
    )


def made(fd: float = 1.0, seed: int = 0, more: Any = {}, **setting: object) -> Outcome:  # noqa: B006
    evaluation = Evaluation(fd=fd, fd_std=0.25, metric="FD-pixels", extractor="pixels", **more)
    of = Configuration.model_validate({"num_clean": 10, "seed": seed, **setting})
    return Outcome(configuration=of, evaluation=evaluation)


def test_repeats_are_averaged_over_seeds() -> None:
    (value,) = averages([made(fd, seed) for seed, fd in enumerate((2.0, 3.0, 7.0))]).values()
    assert value.mean == 4 and value.std == pytest.approx(7**0.5)  # sqrt(((-2)^2 + (-1)^2 + 3^2) / 2)
    (twice,) = averages([made(2.0), made(2.0)]).values()  # the same line in two tables
    assert (twice.mean, twice.std) == (2.0, 0.25)


def test_the_tables_of_a_grid() -> None:
    """Golden: the paper's three tables, of one seed of a grid of clothes at 8x8."""
    grid = [each for each in read_outcomes(GRID).values() if each.configuration.seed == 0]
    first, only_noisy, clean_mix, *_ = study_tables(grid)
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


def test_two_studies_stand_side_by_side() -> None:
    first = [made(2.0, 0, dataset="a"), made(4.0, 1, dataset="a"), made(1.0, dataset="a", num_clean=20)]
    table = compared_table(first, [made(5.0, 0, dataset="b")], ("a", "b"))
    assert table.header == ("configuration", "FD-pixels, a", "FD-pixels, b")
    assert table.rows == (("10 clean", "3.00 ± 1.41", "5.00 ± 0.25"), ("20 clean", "1.00 ± 0.25", ""))


def test_other_metrics_stand_beside_the_distance() -> None:
    more = {"kid": 0.0123, "kid_error": 0.001, "precision": 0.7, "recall": 0.25}
    outcomes = [made(2.0, 0, more), made(3.0, 1, more), made(4.0, 0, more, table="x_0 weights")]
    table = study_tables([*outcomes, made(5.0, num_clean=20)])[-1]  # the last is an older result, without them
    assert table.header == ("configuration", "FD-pixels", "KID", "precision", "recall")
    assert table.rows == (
        ("10 clean", "2.50 ± 0.71", "0.0123 ± 0", "0.7 ± 0", "0.25 ± 0"),
        ("x_0 weights: 10 clean", "4.00 ± 0.25", "0.0123 ± 0.001", "0.7", "0.25"),
        ("20 clean", "5.00 ± 0.25", "", "", ""),
    )


def test_names_are_escaped() -> None:
    table = Table("a|b", ("x",), ((r"50% of $x_0$ & {y}~^#\ | <b>*",),))
    assert table.markdown() == "**a\\|b**\n\n| x |\n|---|\n| 50% of $x_0$ & {y}~^#\\\\ \\| &lt;b>\\* |\n"


def test_small_and_large_values_keep_their_digits() -> None:
    assert str(Average(9.662, 0.7)) == "9.66 ± 0.70"
    assert str(Average(0.00312, 0.00041)) == "0.00312 ± 0.00041"
    assert str(Average(123456.7, 89.1)) == "123457 ± 89"
    assert str(Average(0.0, None)) == "0.00"


# --- in a browser -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        reason = "no Chromium here to open the report in: apt-get install chromium"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


def visit(browser: Any, path: Path, width: int = 1280, scheme: str = "light") -> Any:
    """The page, offline; whatever it complains about is kept in `page.complaints`."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.complaints = []
    page.context.set_offline(True)
    page.on("console", lambda message: page.complaints.append(message.text))
    page.on("request", lambda request: request.url.startswith("http") and page.complaints.append(request.url))
    page.goto(path.as_uri())
    return page


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_page_opens_at_any_width_and_prints(
    browser: Any, paper: Path, design: Path, width: int, scheme: str
) -> None:
    for path in (paper, design / "report.html"):
        page = visit(browser, path, width, scheme)
        assert page.complaints == []
        assert page.evaluate("document.documentElement.scrollWidth") == width
        wide = "[...document.querySelectorAll('.scroll')].filter(each => each.scrollWidth > each.clientWidth)"
        assert page.evaluate(f"{wide}.map(each => each.ariaLabel)") == []
        broken = page.evaluate("[...document.images].filter(i => !(i.complete && i.naturalWidth)).length")
        assert broken == 0 and page.locator("img").count() >= 1
        colours = [page.evaluate(f"getComputedStyle(document.body).{k}") for k in ("color", "backgroundColor")]
        ink, ground = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in colours)
        assert abs(ink - ground) > 500 and (ground > ink) == (scheme == "light")
        page.emulate_media(media="print")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        page.close()


def test_a_table_of_hostile_strings_only(browser: Any, tmp_path: Path) -> None:
    """Every text of a table in turn: quotes, tags, templates, formulas, links, escape sequences."""
    evil = [
        "</script><img src=x onerror=alert(1)>",
        "\"'><svg/onload=alert(1)>",
        "{{7*7}}${7*7}<%= 7 %>",
        "=HYPERLINK(1)|cmd",
        "[x](javascript:alert(1))|`a`",
        "\u202e\u2028\x1b[31mred",
    ]
    for number, text in enumerate(evil):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = table(folder / "results.csv", [(text, *rest) for _, *rest in LADDER + MIXES], text, text)
        written = report_from_table(path, folder)
        page = visit(browser, written.path)
        assert page.complaints == [], text
        assert page.locator("img[src=x], svg[onload], a[href^=javascript]").count() == 0
        assert "49" not in page.locator("h1").inner_text()
        page.close()
        for file in folder.iterdir():
            if file.suffix in (".md", ".csv", ".html"):
                assert "\x1b" not in file.read_text() or file == path
        marked = (folder / "tables.md").read_text()
        assert "<img" not in marked and "](javascript" not in marked
