"""What a release must hold: a small wheel that works in a new environment, and versions that agree."""

import itertools
import json
import os
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

import assay

ROOT = Path(__file__).parent.parent
EXECUTE = """
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[2])
"""
FIRST_EXAMPLE = """
import doctest, assay.model
example = doctest.DocTestParser().get_doctest(assay.model.__doc__, {}, "example", None, 0)
assert len(example.examples) > 5 and doctest.DocTestRunner().run(example).failed == 0
"""


def test_the_wheel_holds_the_demo_and_is_small(wheel: Path) -> None:
    assert wheel.name.startswith(f"assay_diffusion-{assay.__version__}-py3-none-any")
    assert wheel.stat().st_size < 10_000_000
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {
        "assay/py.typed",
        "assay/study/demo.toml",
        "assay/data/embedded/t10k-images-idx3-ubyte.gz",
        "assay/data/embedded/t10k-labels-idx1-ubyte.gz",
        "assay/pricing/fid_tables.csv",
        "assay/study/page/report.html.j2",
        "assay/study/page/report.css",
    } <= names
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "assay").rglob("*.py")}
    assert modules <= names
    assert all(name.startswith(("assay/", "assay_diffusion-")) for name in names)


def test_the_first_example_runs_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [installed / "python", "-c", FIRST_EXAMPLE], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["modeller", "theorist"])
def test_notebooks_run_from_the_wheel_and_are_small(name: str, installed: Path, tmp_path: Path) -> None:
    notebook = ROOT / f"docs/notebooks/{name}.ipynb"
    assert notebook.stat().st_size < 250_000
    done = subprocess.run(
        [installed / "python", "-c", EXECUTE, notebook, "executed.ipynb"],
        cwd=tmp_path,
        env={**os.environ, "IPYTHONDIR": str(tmp_path), "PYDEVD_DISABLE_FILE_VALIDATION": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    kept, found = (
        [output_kinds(cell) for cell in json.loads(text)["cells"]]
        for text in (notebook.read_text(), (tmp_path / "executed.ipynb").read_text())
    )
    assert kept == found  # what the site shows is what the cells print today


def output_kinds(cell: dict[str, Any]) -> list[tuple[str, str | None]]:
    """What a cell shows, in order; a slow machine may split one stream into several outputs."""
    kinds = [(output["output_type"], output.get("name")) for output in cell.get("outputs", [])]
    return [kind for kind, _ in itertools.groupby(kinds)]


def test_the_citation_names_this_version() -> None:
    assert f"\nversion: {assay.__version__}\n" in (ROOT / "CITATION.cff").read_text()
