"""The layout of the package is a promise: each module imports only those above it in CONTRIBUTING.md's list."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import assay

ROOT = Path(assay.__file__).parent
ORDER = re.findall(r"^\| `(\w+)` \|", (ROOT.parent / "CONTRIBUTING.md").read_text(), re.M)
SOURCES = sorted(p.relative_to(ROOT) for p in ROOT.rglob("*.py") if p.name != "__init__.py" or p.parent != ROOT)


def imported_rooms(path: Path) -> set[str]:
    """Names of the modules directly under `assay` that a source file imports, anywhere in it."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("assay.")}
    return rooms & set(ORDER)


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_imports_only_what_stands_above(source: Path) -> None:
    room = source.parts[0].removesuffix(".py")
    assert room in ORDER, f"{source} is not in the list of modules: add it where it belongs"
    below = {other for other in imported_rooms(ROOT / source) if ORDER.index(other) > ORDER.index(room)}
    assert not below, f"assay/{source} imports {below}, which stand below it"


def test_what_is_imported_at_once_is_a_core_dependency() -> None:
    """`make demo` installs no extras, so these are imported inside functions only."""
    with open(ROOT.parent / "pyproject.toml", "rb") as file:
        declared = {
            re.split(r"[^\w-]", text)[0].lower() for text in tomllib.load(file)["project"]["dependencies"]
        }
    called = {"PIL": "pillow", "sklearn": "scikit-learn", "lightning_fabric": "lightning-fabric", "ot": "pot"}
    for source in SOURCES:
        for node in ast.parse((ROOT / source).read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for top in {name.split(".")[0] for name in names} - {"assay"} - sys.stdlib_module_names:
                assert called.get(top, top) in declared, f"assay/{source} imports {top}"


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_answer_without_torch(option: str) -> None:
    code = (
        "import sys\nfrom assay.cli import app\n"
        f"try: app(['{option}'])\nexcept SystemExit as e: assert not e.code\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
    assert "Traceback" not in done.stderr
