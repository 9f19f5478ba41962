"""The report of a study: its files, its words, and its page in a real browser."""

import csv
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from assay.figure import Panel, Series, draw_svg
from assay.outcome import read_outcomes
from assay.pricing.paper import PAPER
from assay.study import open_study
from assay.study.report import report_from_table, write_report
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


def table(path: Path, rows: list[tuple[str, float | None, int, int, float]], dataset: str = "x") -> Path:
    """A CSV of (table, sigma, clean images, noisy images, FID)."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow("table,dataset,sigma,num_clean,num_noisy,clean_fraction,fid,fid_std".split(","))
        for name, sigma, clean, noisy, fid in rows:
            writer.writerow([name, dataset, sigma, clean, noisy, clean / (clean + noisy), fid, 0.01])
    return path


LADDER: list[tuple[str, float | None, int, int, float]] = [
    ("clean_mix", None, n, 0, 1 + 200 / n) for n in (100, 200, 400, 1000)
]
MIXES: list[tuple[str, float | None, int, int, float]] = [
    ("clean_mix", 0.5, n, 1000 - n, 1 + 200 / (n + 0.5 * (1000 - n))) for n in (100, 200, 400)
]


def test_paper_words_and_tables(paper: Path) -> None:
    written = report_from_table(PAPER, paper.parent)
    said = " ".join(written.answer)
    assert "10% clean + 90% noisy images at noise 0.2 reach FID 2.81 ± 0.02" in said
    assert "the 10% clean ones alone 11.92" in said and "all clean ones 1.41" in said
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
    assert "digits, images of 1 x 8 x 8; network mlp" in text and "2 training seeds or blocks" in text


@pytest.mark.parametrize("rows", [LADDER[:1], [("only_noisy", 0.5, 0, 900, 9.0)], LADDER + MIXES])
def test_tables_that_say_little_are_reported_all_the_same(rows: Any, tmp_path: Path) -> None:
    written = report_from_table(table(tmp_path / "t.csv", rows), tmp_path / "out")
    assert written.path.exists() and bool(written.prices) == (len(rows) > 1)
    assert not re.search(r"\bnan\b", " ".join(written.answer))


def test_commands_on_a_finished_study(design: Path) -> None:
    status = run("study", "status", design)
    assert "8 of 8 runs finished in 2 blocks" in status and status.count("finished") == 9
    assert "0 trainings" in run("study", "cost", design)
    before = (design / "results.csv").read_bytes()
    for weights in design.glob("runs/*/snapshots"):
        shutil.rmtree(weights)  # as users may
    run("study", "report", design)
    assert (design / "results.csv").read_bytes() == before
    other = "study", "run", design.parent / "spec.toml", "-o", design, "--set", "train.lr=0.1"
    assert failing(*other).path == str(design)  # its results are not replaced


def test_figures_are_the_same_in_every_report() -> None:
    panel = Panel("t", "x", "y", [Series("a", "line", [1, 2], [3, 4])], log_x=True)
    assert draw_svg(panel) == draw_svg(panel)
    words = [each.text for each in ElementTree.fromstring(draw_svg(panel)).iter() if each.tag.endswith("text")]
    assert {"t", "x", "y", "a"} <= set(words)


def test_page_is_one_small_file_that_loads_nothing(paper: Path, design: Path) -> None:
    for path in (paper, design / "report.html"):
        text = path.read_text()
        assert len(text) < 400_000 and "<script" not in text
        assert not re.search(r"https?://|@import|url\(", text)
        assert not re.search(r"<[^>]* (src|href)=\"(?!data:|#)", text)
        assert not re.search(r"<[^>]* (on\w+|style)=", text), "against the page's policy"


# In a browser.


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
        broken = page.evaluate("[...document.images].filter(i => !(i.complete && i.naturalWidth)).length")
        assert broken == 0 and page.locator("img").count() >= 1
        colours = [page.evaluate(f"getComputedStyle(document.body).{k}") for k in ("color", "backgroundColor")]
        ink, ground = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in colours)
        assert abs(ink - ground) > 500 and (ground > ink) == (scheme == "light")
        page.emulate_media(media="print")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        page.close()


def test_a_table_of_hostile_strings_only(browser: Any, tmp_path: Path) -> None:
    """Every text of a table in turn: quotes, tags, templates, formulas, links, LaTeX, escape sequences."""
    evil = [
        "</script><img src=x onerror=alert(1)>",
        "\"'><svg/onload=alert(1)>",
        "{{7*7}}${7*7}<%= 7 %>",
        "=HYPERLINK(1)|cmd",
        "[x](javascript:alert(1))|`a`",
        "\\input{/etc/passwd}%&_#$",
        "\u202e\u2028\x1b[31mred",
    ]
    for number, text in enumerate(evil):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = folder / "results.csv"
        with open(path, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow("table dataset sigma num_clean num_noisy fd metric extractor".split())
            for _, sigma, clean, noisy, fd in LADDER + MIXES:
                writer.writerow([text, text, sigma, clean, noisy, fd, text, text])
        written = report_from_table(path, folder)
        page = visit(browser, written.path)
        assert page.complaints == [], text
        assert page.locator("img[src=x], svg[onload], a[href^=javascript]").count() == 0
        assert "49" not in page.locator("h1").inner_text()
        page.close()
        for file in folder.iterdir():
            if file.suffix in (".md", ".tex", ".csv", ".html"):
                assert "\x1b" not in file.read_text() or file == path
        for file in folder.glob("*.tex"):
            assert "\\input{" not in file.read_text()
        for file in folder.glob("*.md"):
            assert "<img" not in file.read_text() and "](javascript" not in file.read_text()
