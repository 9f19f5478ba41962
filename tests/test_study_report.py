"""The report of a study: its files, its words, and its page in a real browser."""

import csv
import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from assay.cli import app
from assay.data import simulate
from assay.data.known import get
from assay.data.store import PackedImage, write_store
from assay.metrics.score import stopping_steps
from assay.outcome import metric, read_outcomes
from assay.pricing import PAPER, Market, Offer, best_plan, fit_law, read_comparable
from assay.study import open_study
from assay.study.report import report_from_table, write_report
from assay.study.run import execute
from assay.study.tables import averages

COLUMNS = "table,dataset,data,sigma,clean_fraction,noisy_fraction,sampling,consistency,fid,fid_std".split(",")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
TINY = """
name = "tiny"
[data]
store = "digits"
[net]
preset = "mlp"
width = 16
num_blocks = 1
[train]
num_steps = 20
batch_size = 32
log_every = 5
[evaluate]
extractor = "classifier"
num_images = 40
num_ranges = 2
sample = {num_steps = 4}
[grid]
clean_fractions = [1, 0.1, 0]
sigmas = [0.5]
[[extra]]
table = "longer"
clean_fraction = 0.1
sigma = 0.5
train = {num_steps = 40}
"""


@pytest.fixture(scope="module")
def paper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report_from_table(PAPER, tmp_path_factory.mktemp("paper")).path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real study of seven short trainings, finished and reported; its folder."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "spec.toml").write_text(TINY)
    opened = open_study(folder / "spec.toml", folder / "out")
    assert write_report(opened) is None, "no result, no report"
    for job in opened.jobs:
        assert execute(opened.study, opened.folder, opened.data, job)
    written = write_report(opened)
    assert written is not None and written.path == folder / "out" / "report.html"
    return folder / "out"


def test_a_store_with_noisy_images_from_study_to_report(tmp_path: Path) -> None:
    digits = simulate(get("digits", tmp_path / "digits").store, 0.3, 0.5, seed=9)
    images = digits.read(torch.arange(400)).numpy()
    columns = zip(images, digits.sigma_tn.tolist(), digits.label.tolist(), strict=False)
    packed = (PackedImage(str(i), *column) for i, column in enumerate(columns))
    write_store(tmp_path / "scans", "scans", packed, (1, 8, 8), "float32", (-1, 1), digits.class_names)
    spec = TINY[: TINY.index("[[extra]]")].replace('"digits"', f'"{tmp_path / "scans"}"')
    spec = spec.replace("[1, 0.1, 0]\nsigmas = [0.5]", '[1, 0.4]\nbaselines = ["clean_only"]')
    (tmp_path / "spec.toml").write_text(spec.replace('"classifier"', '"pixels"'))
    opened = open_study(tmp_path / "spec.toml", tmp_path / "out")
    for job in opened.jobs:
        assert execute(opened.study, opened.folder, opened.data, job)
    written = write_report(opened)
    assert written is not None and (tmp_path / "out/figures/noise_levels.png").exists()
    many, noisy = (int((opened.source.sigma_tn == level).sum()) for level in (0, 0.5))
    few = round(0.4 * many)
    assert f"{few} clean + {noisy} noisy images at noise 0.5 reach FD-pixels" in written.headline
    settings = [each.setting for each in read_outcomes(tmp_path / "out/results.csv").values()]
    found = {(setting.num_clean, setting.noisy) for setting in settings}
    assert found == {(number, kind) for number in (many, few) for kind in ((), ((0.5, noisy),))}
    panel = embedded(written.path)[0]["panels"]["fd_by_clean_fraction"]
    curves = {series["name"]: series["x"] for series in panel["series"] if series["name"]}
    assert curves == {"clean images alone": [few, many], f"with {noisy} noisy at 0.5": [few, many]}


def table(path: Path, rows: list[tuple[str, str, float | None, float, float]], dataset: str = "x") -> Path:
    """A CSV of (table, data, sigma, clean fraction, fd)."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for name, data, sigma, p, fd in rows:
            noisy = 0 if data == "clean_only" else round(1 - p, 6)
            writer.writerow([name, dataset, data, sigma, p, noisy, "full", 0, fd, 0.01])
    return path


def embedded(page: Path) -> list[dict[str, Any]]:
    found = re.findall(
        r'<script type="application/json" class="data">(.*?)</script>', page.read_text(), re.DOTALL
    )
    return [json.loads(text) for text in found]


def test_paper_words_and_tables(paper: Path) -> None:
    written = report_from_table(PAPER, paper.parent)
    cifar, celeba, imagenet = written.headline.splitlines()
    assert "10% clean + 90% noisy images at noise 0.2 reach FID 2.81 ± 0.02" in cifar
    assert "the 10% clean ones alone 11.92" in celeba and "all clean ones 1.41" in imagenet
    # The paper's boxes hold for CelebA and ImageNet; for CIFAR-10 its table gives other bounds.
    for line, price in zip(written.prices.splitlines(), ("3.36", "1.73", "1.54"), strict=True):
        assert f"By FID, {price} noisy images at noise 0.2 replace a clean one (" in line
        assert "95% interval from 11 runs" in line and "each setting ran once" in line
    cells = re.findall(r"<th scope=\"row\">0\.2</th><td>(.*?)</td>", paper.read_text())
    assert [cell for cell in cells if "–" in cell] == ["3.5 – 4.5", "1.5 – 1.75", "1.5 – 1.75"]
    markdown, latex = ((paper.parent / name).read_text() for name in ("tables.md", "tables.tex"))
    assert "| p clean, rest noisy at 0.2 | 1.99 ± 0.02 |" in markdown and r"2.81 $\pm$ 0.02" in latex
    assert len(written.tables) == 10  # four of CIFAR-10, three each of the others


def test_the_papers_own_study_stands_beside_its_numbers(tmp_path: Path) -> None:
    rows = [
        ("clean_mix", "clean_only", None, 1.0, 1.5),
        ("clean_mix", "mix", 0.2, 0.1, 1.7),
        ("x", "mix", 0.3, 0.1, 2),
    ]
    rows += [("B: more training", "mix", 0.2, 0.1, 1.65)]
    found = report_from_table(table(tmp_path / "fid.csv", rows, "paper-imagenet"), tmp_path)
    assert found.tables[-1].rows == (
        ("100% clean", "1.50 ± 0.01", "1.41 ± 0.03"),
        ("10% clean + 90% noisy at 0.2", "1.70 ± 0.01", "1.68 ± 0.02"),
        ("10% clean + 90% noisy at 0.2", "1.65 ± 0.01", "1.63"),
    )
    elsewhere = report_from_table(table(tmp_path / "fid.csv", rows, "digits"), tmp_path)
    assert not any("paper" in each.title for each in elsewhere.tables)


def test_paper_figure_shows_the_tables_values(paper: Path) -> None:
    panel = embedded(paper)[0]["panels"]["fd_by_clean_fraction"]
    points = {s["name"]: dict(zip(s["x"], s["y"], strict=True)) for s in panel["series"] if s["name"]}
    assert points["clean images alone"][10] == 17.3 and points["clean images alone"][100] == 1.99
    assert points["the rest at noise 0.2"][10] == 2.81 and points["the rest at noise 0.2"][100] == 1.99
    png = Image.open(paper.parent / "figures" / "cifar10-fd_by_clean_fraction.png")
    assert png.width > 500 and np.asarray(png.convert("L")).std() > 10


def test_page_is_one_small_file_that_loads_nothing(paper: Path) -> None:
    text = paper.read_text()
    assert len(text) < 400_000
    without_names = text.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|@import|url\(", without_names)
    assert not re.search(r"<[^>]* (src|href)=\"(?!data:|#)", text)
    assert not re.search(r"<[^>]* (on\w+|style)=", text), (
        "inline handlers and styles are against the page's policy"
    )


@pytest.mark.slow
def test_tiny_study_writes_everything(tiny: Path) -> None:
    names = {str(path.relative_to(tiny)) for path in tiny.rglob("*") if "runs" not in path.parts}
    figures = "fd_by_clean_fraction loss_by_step fd_by_step noise_levels samples samples-all_clean".split()
    figures += ["samples-few_clean", "samples-mix", "samples-noisy"]
    assert {f"figures/{name}.png" for name in figures} <= names
    figures = [f"score-{name}_by_{by}" for name, by in (("score", "clean_fraction"), ("error", "level"))]
    assert {f"figures/{name}.png" for name in figures} <= names
    assert {"results.csv", "training.csv", "levels.csv", "tables.md", "tables.tex", "report.html"} <= names
    text = (tiny / "report.html").read_text()
    assert text.count('<img src="data:image/png;base64,') == 7  # six settings and the noise levels
    assert 'alt="Samples of the model trained on 10% clean + 90% noisy, FD-classifier' in text
    by_score, data = embedded(tiny / "report.html")
    assert by_score["metric"] == "score" and by_score["command"].endswith("--by score")
    differences = by_score["panels"]["difference_by_level"]["series"]
    assert [series["name"] for series in differences if series["name"]] == [
        "100% clean",
        "10% clean + 90% noisy at 0.5",
    ]
    lengths = data["panels"]["fd_by_step"]["series"][0]
    assert lengths["name"] == "10% clean + 90% noisy at 0.5" and lengths["x"] == [20, 40]
    assert data["panels"]["loss_by_step"]["series"][0]["x"] == [5, 10, 15, 20]
    outcomes = list(read_outcomes(tiny / "results.csv").values())
    mix = next(each for each in outcomes if str(each.setting) == "162 clean + 1,456 noisy at 0.5")
    scored = mix.evaluation
    assert scored.score is not None and scored.score_error is not None and scored.score_paired_error is not None
    assert scored.score_images == 89 and scored.score_step in stopping_steps(20) and scored.score_split == 0.5
    assert (scored.score_below or 0) + (scored.score_above or 0) == pytest.approx(scored.score, rel=1e-9)
    assert mix.score_seconds is not None and scored.score_final is not None
    for name in ("kid", "precision", "memorised"):
        assert f"<td>{averages(outcomes, metric(name))[mix.setting.without_seed]}</td>" in text


def test_results_alone_give_the_same_report(tiny: Path, tmp_path: Path) -> None:
    for name in ("results.csv", "training.csv", "levels.csv"):
        shutil.copy(tiny / name, tmp_path)
    shutil.copytree(tiny / "figures", tmp_path / "figures")
    done = CliRunner().invoke(app, ["study", "report", str(tmp_path / "results.csv")])
    assert done.exit_code == 0, done.output
    ours, theirs = (folder.joinpath("report.html").read_text() for folder in (tmp_path, tiny))
    assert ours.replace(str(tmp_path), "") == theirs.replace(str(tiny), "")


def test_too_few_settings_say_what_is_missing(tiny: Path) -> None:
    written = report_from_table(tiny / "results.csv", tiny)
    text = written.path.read_text()
    assert "3 usable rows" in text and "at least 5 settings" in text
    assert embedded(written.path)[0]["law"] is None


def test_bounds_stand_in_for_a_law(tmp_path: Path) -> None:
    rows = [("clean_mix", "clean_only", None, p, fd) for p, fd in ((1.0, 2.0), (0.5, 4.0), (0.1, 9.0))]
    written = report_from_table(
        table(tmp_path / "t.csv", [*rows, ("clean_mix", "mix", 0.5, 0.1, 3.0)]), tmp_path
    )
    # Better than half the images clean, worse than all: 0.5 <= 0.1 + 0.9 w <= 1.
    assert ">1 – 2.25<" in written.path.read_text()
    assert "1.5 noisy images at noise 0.5 replace a clean one" in written.prices
    (bounds,) = embedded(written.path)[0]["bounds"]
    assert bounds["low"] == pytest.approx(4 / 9) and bounds["high"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([("clean_mix", "clean_only", None, 1.0, 2.0), ("clean_mix", "mix", 0.5, 0.1, 3.0)], "do not decide"),
        ([("clean_mix", "clean_only", None, 1.0, 2.0)], "Nothing to price yet"),
        ([("only_noisy", "mix", 0.5, 0.0, 9.0), ("only_noisy", "mix", 1.0, 0.0, 20.0)], "Nothing to price yet"),
        ([("clean_mix", "clean_only", None, p, 5 * p) for p in (0.1, 0.5, 1.0)]
         + [("clean_mix", "mix", 0.5, 0.1, 9.0)], "more clean images make it worse"),
        ([("clean_mix", "clean_only", None, p, 2 / p) for p in (0.1, 0.5, 1.0)]
         + [("clean_mix", "mix", 0.5, 0.1, 10.0), ("clean_mix", "mix", 0.5, 0.5, 1.9)], "contradict"),
    ],
)  # fmt: skip
def test_tables_that_say_little_are_reported_all_the_same(rows: Any, said: str, tmp_path: Path) -> None:
    written = report_from_table(table(tmp_path / "t.csv", rows), tmp_path / "out")
    assert said in written.prices and "nan" not in written.headline
    assert written.path.exists()


def test_bad_table_names_line_and_column(tmp_path: Path) -> None:
    path = table(tmp_path / "t.csv", [("clean_mix", "clean_only", None, 1.0, 2.0)])
    path.write_text(path.read_text().replace("2.0,0.01", "good,0.01"))
    with pytest.raises(ValueError, match=r"t\.csv, line 2, column fid: .*number"):
        report_from_table(path, tmp_path)


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
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.on("request", lambda request: request.url.startswith("http") and page.complaints.append(request.url))
    page.goto(path.as_uri())
    page.wait_for_selector(".chart svg")
    return page


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_page_opens_at_any_width(browser: Any, paper: Path, width: int, scheme: str) -> None:
    page = visit(browser, paper, width, scheme)
    assert page.complaints == []
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.locator(".chart svg").count() == 3 * 4  # curve, law, price and budget of three data sets
    colours = [page.evaluate(f"getComputedStyle(document.body).{k}") for k in ("color", "backgroundColor")]
    ink, ground = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in colours)
    assert abs(ink - ground) > 500 and (ground > ink) == (scheme == "light")
    page.close()


def test_figures_can_be_saved_and_printed(browser: Any, paper: Path, tmp_path: Path) -> None:
    page = visit(browser, paper, scheme="dark")
    with page.expect_download() as saved:
        page.locator(".save").first.click()
    saved.value.save_as(tmp_path / saved.value.suggested_filename)
    (file,) = tmp_path.glob("*.svg")
    words = [element.text for element in ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}text")]
    assert {"clean images alone", "the rest at noise 0.2"} <= set(words)
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(251, 250, 248)"
    assert page.locator(".legend").first.is_visible() and not page.locator(".save").first.is_visible()
    assert page.complaints == []
    page.close()


def number(page: Any, name: str, subject: int = 1) -> float:
    return float(page.locator(f'#subject-{subject} data[data-name="{name}"]').get_attribute("value"))


def agrees_with_the_command(page: Any, subject: int) -> dict[str, Any]:
    """Run the command that the page shows; all its numbers must be the page's."""
    command = shlex.split(page.locator(f"#subject-{subject} .command").inner_text())
    done = CliRunner().invoke(app, [*command[1:], "--json"])
    assert done.exit_code == 0, done.output
    plan: dict[str, Any] = json.loads(done.output)
    for name, key in (("value", "value"), ("low", "value_low"), ("high", "value_high")):
        assert number(page, name, subject) == pytest.approx(plan[key], rel=1e-6)
    for kind in plan["purchases"]:
        sigma = f"{kind['sigma']:g}"
        assert number(page, f"buy-{sigma}", subject) == pytest.approx(kind["num_images"], rel=1e-6, abs=1e-3)
        even = np.inf if kind["break_even"] is None else kind["break_even"]
        assert number(page, f"break-even-{sigma}", subject) == pytest.approx(even, rel=1e-6)
    extrapolates = page.locator(f"#subject-{subject} .answer .warn").count() > 0
    assert extrapolates == bool(plan["extrapolates"])
    return plan


@pytest.mark.slow
def test_planner_gives_what_assay_plan_gives(browser: Any, paper: Path) -> None:
    page = visit(browser, paper)
    for subject in (1, 2, 3):
        agrees_with_the_command(page, subject)
    form = page.locator("#subject-1 form")
    before = number(page, "value")
    slider = form.get_by_label("Budget", exact=True).and_(page.locator("[type=range]"))
    slider.focus()
    for _ in range(60):
        page.keyboard.press("ArrowRight")
    assert agrees_with_the_command(page, 1)["value"] < before, "more money, better models"
    # Nothing at hand, no limits, and one level off the market.
    form.get_by_label("Clean images at hand").fill("0")
    for box in form.get_by_label("At most").all():
        box.fill("")
    form.get_by_label("Noise 0.1 is on offer").press("Space")
    plan = agrees_with_the_command(page, 1)
    assert [kind["sigma"] for kind in plan["purchases"]] == [0, 0.05, 0.2]
    assert plan["purchases"][0]["num_images"] > 0, "there is no model without clean images"
    # Another price, and a limit that leaves money for a second kind.
    form.locator("fieldset").nth(2).get_by_label("Price of an image").and_(page.locator("[type=number]")).fill(
        "0.05"
    )
    form.locator("fieldset").nth(2).get_by_label("At most").fill("12345")
    plan = agrees_with_the_command(page, 1)
    assert plan["purchases"][2]["num_images"] == 12345
    form.get_by_label("Budget", exact=True).and_(page.locator("[type=number]")).fill("-5")
    assert "above 0" in form.locator("p[role=status]").inner_text()
    assert page.complaints == []
    page.close()


def test_planner_of_the_library_agrees_with_the_page(browser: Any, paper: Path) -> None:
    """The same once more without the command line: ImageNet at the prices that the page opens with."""
    page = visit(browser, paper)
    fieldsets = page.locator("#subject-3 fieldset").all()
    offers = tuple(
        Offer(sigma, *(float(box.input_value()) for box in fieldset.locator("[type=number]").all()))
        for sigma, fieldset in zip((0.05, 0.1, 0.2), fieldsets, strict=True)
    )
    budget, clean, have = (
        float(page.locator("#subject-3 .fields > .field [type=number]").nth(i).input_value()) for i in range(3)
    )
    law = fit_law(read_comparable(PAPER, dataset="imagenet", num_images=1_300_000)[0])
    plan = best_plan(law, Market(Offer(0.0, clean), offers, have), budget)
    assert number(page, "value", 3) == pytest.approx(plan.prediction.value, rel=1e-9)
    assert [number(page, f"buy-{kind.offer.sigma:g}", 3) for kind in plan.purchases] == pytest.approx(
        [kind.num_images for kind in plan.purchases], rel=1e-9
    )
    page.close()


def test_figures_answer_to_the_keyboard_and_the_mouse(browser: Any, paper: Path) -> None:
    page = visit(browser, paper)
    chart = page.locator("#subject-1 [data-panel=fd_by_clean_fraction]")
    chart.locator("svg").focus()
    page.keyboard.press("ArrowRight")
    assert (
        "clean images alone: FID 17.3 (17.16 to 17.44) at clean part, % 10"
        in chart.locator(".tip").inner_text()
    )
    page.keyboard.press("Escape")
    assert chart.locator(".tip").is_hidden()
    button = chart.get_by_role("button", name="clean images alone")
    button.press("Enter")
    assert button.get_attribute("aria-pressed") == "false"
    circle = chart.locator("svg circle").first
    circle.hover(force=True)
    assert "the rest at noise 0.05" in chart.locator(".tip").inner_text()
    assert page.complaints == []
    page.close()


def test_tiny_study_opens(browser: Any, tiny: Path, tmp_path: Path) -> None:
    page = visit(browser, tiny / "report.html", 360)
    assert page.complaints == [] and page.evaluate("document.documentElement.scrollWidth") == 360
    broken = page.evaluate("[...document.images].filter(i => !(i.complete && i.naturalWidth)).length")
    assert broken == 0 and page.locator("img").count() == 7
    page.close()


def test_bounds_answer_what_to_pay(browser: Any, tmp_path: Path) -> None:
    rows = [("clean_mix", "clean_only", None, p, fd) for p, fd in ((1.0, 2.0), (0.5, 4.0), (0.1, 9.0))]
    path = table(tmp_path / "t.csv", [*rows, ("clean_mix", "mix", 0.5, 0.1, 3.0)])
    page = visit(browser, report_from_table(path, tmp_path).path)
    page.get_by_label("Price of a clean image").and_(page.locator("[type=number]")).fill("9")
    assert number(page, "below-0.5") == pytest.approx(4) and number(page, "above-0.5") == pytest.approx(9)
    assert page.complaints == []
    page.close()


def test_names_cannot_break_out_of_the_page(browser: Any, tmp_path: Path) -> None:
    name = "</script><b id=out>&\"'<img src=x onerror=alert(1)>"
    rows = [("clean_mix", "clean_only", None, p, 2 / p) for p in (1.0, 0.5, 0.3, 0.1)]
    rows += [("clean_mix", "mix", 0.5, p, 2 / (0.5 + 0.5 * p)) for p in (0.5, 0.3, 0.1)]
    path = table(tmp_path / "t.csv", [*rows, (name, "mix", 0.5, 0.2, 3.0)], name)  # type: ignore[list-item]
    page = visit(browser, report_from_table(path, tmp_path).path)
    assert page.locator("h1").inner_text() == name and page.locator("#out").count() == 0
    assert page.locator("td,th").filter(has_text="onerror").count() == 2  # a column's head and a setting's name
    assert page.complaints == []
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
            writer.writerow("table dataset sigma clean_fraction noisy_fraction fd metric extractor".split())
            for p in (1.0, 0.5, 0.3, 0.1):
                writer.writerow([text, text, "", p, 0, 2 / p, text, text])
            for p in (0.5, 0.3, 0.1):
                writer.writerow([text, text, 0.5, p, 1 - p, 2 / (0.5 + 0.5 * p), text, text])
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
        for file in folder.glob("*.csv"):
            with open(file, newline="") as opened:
                cells = [cell for row in csv.reader(opened) for cell in row]
            if file != path:
                assert not [cell for cell in cells if cell[:1] in ("=", "+", "@")]
