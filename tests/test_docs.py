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
    assert "--sigma-units" in (site / "reference/commands.html").read_text()
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
