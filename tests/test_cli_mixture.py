"""`assay mixture`: every command, and what it says when the input is wrong."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from assay.cli import app


def run(*arguments: object, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["mixture", *map(str, arguments)], env={"COLUMNS": "200"})
    assert done.exit_code == code, done.output
    return " ".join(done.output.split())


def write(path: Path, atoms: list, num_samples: int, noisy: float = 2.0) -> Path:
    """Samples of equally heavy atoms; every other one has noise 1."""
    rng = np.random.default_rng(0)
    sigma = np.tile([1.0, noisy], num_samples // 2)
    x = rng.choice(atoms, num_samples) + sigma[:, None] * rng.normal(size=(num_samples, len(atoms[0])))
    header = ",".join([*(f"x{i}" for i in range(len(atoms[0]))), "sigma"])
    np.savetxt(path, np.c_[x, sigma], delimiter=",", header=header, comments="")
    return path


def test_fit(tmp_path: Path) -> None:
    samples = write(tmp_path / "samples.csv", [[0, 0], [4, 0], [0, 5]], 20_000)
    said = run("fit", samples, "--k", 3, "--json", tmp_path / "fit.json")
    assert "noise 1 to 2" in said and "20,000.0 for the subspace (n_d)" in said and "warning" not in said
    assert "the atoms' radius, counts as that" in said
    atoms = np.array(json.loads((tmp_path / "fit.json").read_text())["atoms"])
    np.testing.assert_allclose(atoms[np.lexsort(np.round(atoms).T)], [[0, 0], [4, 0], [0, 5]], atol=0.15)


def test_bounds() -> None:
    said = run("bounds", "--k", 3, "-d", 20, "-n", 1000, "--clean-fraction", 0.1, "--sigma", 2)
    assert "156.2" in said and "1,024.0" in said and "n_d: have 156.2, need 23: holds" in said
    assert "FAILS" in run("bounds", "--k", 3, "-d", 2000, "-n", 1000)
    assert "FAILS" not in run("bounds", "--k", 3, "-d", 2000, "-n", 10**12)
    assert "on a line, probability 0.75" in run("bounds", "--k", 3, "-n", 1000)


def test_number_of_atoms_is_chosen_with_its_evidence(tmp_path: Path) -> None:
    said = run("fit", write(tmp_path / "s.csv", [[0], [6]], 2000), "--json", tmp_path / "fit.json")
    assert "duality gap" in said and "probability" in said and "±" in said
    found = json.loads((tmp_path / "fit.json").read_text())
    assert len(found["weights"]) == 2
    assert max(found["evidence"], key=lambda row: row["probability"])["num_atoms"] == 2


@pytest.mark.parametrize(
    "arguments, names",
    [
        (["fit", "missing.csv"], "missing.csv"),
        (["fit", "good.csv", "--sigma-column", "noise"], "--sigma-column"),
        (["fit", "good.csv", "--k", "40"], "at least 80"),
        (["fit", "good.csv", "--sigma", "1e300"], "sigma"),
        (["fit", "bad.csv"], "bad.csv"),
        (["bounds", "--delta", "0.3"], "--delta"),
        (["bounds", "--k", "0"], "--k"),
    ],
)
def test_errors_are_sentences(tmp_path: Path, monkeypatch, arguments: list[str], names: str) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("good.csv"), [[0, 0]], 50)
    Path("bad.csv").write_text("x,sigma\n1,a\n")
    said = run(*arguments, code=1)
    assert names in said and "Traceback" not in said
