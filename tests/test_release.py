"""What a release must hold: a small wheel with everything the demo needs, and versions that agree."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import assay

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (found,) = folder.glob("*.whl")
    return found


def test_the_wheel_holds_the_demo_and_is_small(wheel: Path) -> None:
    assert wheel.name.startswith(f"assay-{assay.__version__}-py3-none-any")
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
        "assay/study/page/report.js",
    } <= names
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "assay").rglob("*.py")}
    assert modules <= names
    assert all(name.startswith(("assay/", "assay-")) for name in names)


def test_the_citation_names_this_version() -> None:
    assert f"\nversion: {assay.__version__}\n" in (ROOT / "CITATION.cff").read_text()
