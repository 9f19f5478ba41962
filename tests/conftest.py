"""Settings for all tests: one thread each, so that two test processes share two cores fairly."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("assay", deadline=None, derandomize=True)  # timing never decides a test
settings.load_profile("assay")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a new environment that has the wheel, and borrows other packages from this one."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text(str(Path(torch.__file__).parents[1]))
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps"]
    done = subprocess.run([*pip, wheel], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    code = "import assay; print(assay.__file__)"
    found = subprocess.run([python, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    assert Path(found.stdout.strip()).is_relative_to(folder), "this is not the wheel"
    return folder / "bin"
