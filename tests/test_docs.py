"""The site builds offline without a warning, and every option and setting has a sentence in the reference."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs"))
import hooks  # noqa: E402


def test_every_option_has_a_sentence() -> None:
    commands = hooks.commands()
    assert {"assay train", "assay data pack", "assay study run", "assay mixture fit"} <= {
        n for n, _ in commands
    }
    for name, command in commands:
        assert command.help, name
        for parameter in command.params:
            assert parameter.name == "help" or hooks.parameter_help(parameter), f"{name}: {parameter.name}"


def test_every_setting_has_a_sentence() -> None:
    keys = [
        (f"{title} [{section}] {key}", field.description)
        for title, (_, sections) in hooks.settings_models().items()
        for section, model in sections
        for key, field in model.model_fields.items()
    ]
    assert len(keys) > 150
    assert [key for key, description in keys if not (description or "").endswith(".")] == []


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(  # strict: a dead link or any other warning is an error
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and not done.stdout + done.stderr, done.stdout + done.stderr
    return folder


def test_the_site_needs_no_network(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 12
    for page in pages:
        loaded = re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"?(https?:[^\s\">]+)", page.read_text())
        assert loaded == [], page


def test_reference_and_equations_are_on_their_pages(site: Path) -> None:
    assert "--skip-bad" in (site / "reference/commands.html").read_text()
    assert "lr_ramp_images" in (site / "reference/settings.html").read_text()
    python = (site / "reference/python.html").read_text()
    assert "ambient_loss" in python and "<blockquote>" not in python  # examples are code
    for name in ("modeller", "theorist"):
        assert "data:image/png" in (site / f"notebooks/{name}.html").read_text()
        assert (site / f"notebooks/{name}.ipynb").exists()
    method = (site / "method.html").read_text()
    assert method.count("<math") > 20 and "$" not in re.sub(
        r"<(script|code).*?</\1>", "", method, flags=re.DOTALL
    )


PAGES = [
    path
    for pattern in ("*.md", "docs/**/*.md", "studies/**/*.md", "examples/*.md")
    for path in ROOT.glob(pattern)
]


def test_every_command_and_option_on_a_page_exists() -> None:
    options = {
        name: {"--help", *(each for p in command.params for each in [*p.opts, *p.secondary_opts])}
        for name, command in hooks.commands()
    }
    groups = {name.rsplit(" ", 1)[0] for name in options}
    found, wrong = 0, []
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        for line in re.findall(r"(?m)^ *(assay [a-z].*)$|`(assay [a-z][^`]*)`", text):
            words = (line[0] or line[1]).split(" #")[0].split()
            # `assay evaluate RUN` is short for `assay evaluate model RUN`.
            names = [" ".join(words[:3]), " ".join(words[:2]), " ".join([*words[:2], "model"])]
            name = next((each for each in names if each in options), None)
            used = {word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)}
            if name is None and " ".join(words[:3]) not in groups and " ".join(words[:2]) not in groups:
                wrong.append(f"{page.name}: {' '.join(words)}")
            elif name is not None and used - options[name]:
                wrong.append(f"{page.name}: {name} {used - options[name]}")
            found += 1
    assert wrong == [] and found > 100


def test_every_setting_on_a_page_exists() -> None:
    known = {
        f"{section.split(',')[0]}.{key}"
        for _, sections in hooks.settings_models().values()
        for section, model in sections
        for key in model.model_fields
    }
    roots, ends = (
        {key.split(".")[0] for key in known},
        ("py", "toml", "csv", "md", "json", "npz", "safetensors"),
    )
    named = {
        (page.name, key)
        for page in PAGES
        for key in re.findall(r"(?:`|--set [\"']?)([a-z]+(?:\.[a-z_]+)+)(?= ?=|`)", page.read_text())
        if key.split(".")[0] in roots and not key.endswith(ends)
    }
    assert len(named) > 10 and sorted(each for each in named if each[1] not in known) == []


def test_pages_are_short() -> None:
    for page in PAGES:
        lines = page.read_text().splitlines()
        assert [line for line in lines if len(line) > 160 and not line.startswith("|")] == [], page
        if page.is_relative_to(ROOT / "docs") and page.name not in ("method.md", "python.md"):
            assert len(lines) <= 150, page
