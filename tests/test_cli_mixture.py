"""`assay mixture`: every command on both formats, and what it says when the input is wrong."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from assay.cli import app
from assay.mixture.samples import read_samples, write_samples


def run(*arguments: object, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["mixture", *map(str, arguments)], env={"COLUMNS": "200"})
    assert done.exit_code == code, done.output
    return " ".join(done.output.split())


@pytest.mark.parametrize("suffix", ["npz", "csv"])
def test_simulate_and_fit(tmp_path: Path, suffix: str) -> None:
    samples, result = tmp_path / f"samples.{suffix}", tmp_path / "fit.json"
    options = ["--atoms", "0,0; 4,0; 0,5", "-n", 20_000, "--sigma", 2, "--clean-fraction", 0.5]
    assert "20,000 samples" in run("simulate", samples, *options)
    x, sigma = read_samples(samples)
    assert x.shape == (20_000, 2) and (sigma == 1).sum() == (sigma == 2).sum() == 10_000
    said = run("fit", samples, "--k", 3, "--json", result)
    assert "noise 1 to 2" in said and "20,000.0 for the subspace (n_d)" in said and "warning" not in said
    assert "the atoms' radius, counts as that" in said
    atoms = np.array(json.loads(result.read_text())["atoms"])
    np.testing.assert_allclose(atoms[np.lexsort(np.round(atoms).T)], [[0, 0], [4, 0], [0, 5]], atol=0.15)


def test_fit_warns_about_failing_conditions(tmp_path: Path) -> None:
    run("simulate", tmp_path / "s.csv", "--atoms", "0;1", "-n", 12)
    assert "the theorem's guarantee does not apply" in run("fit", tmp_path / "s.csv", "--k", 2, "--no-polish")


def test_many_features_are_shortened(tmp_path: Path) -> None:
    atoms = ";".join(",".join(map(str, row)) for row in 5 * np.eye(2, 20))
    run("simulate", tmp_path / "s.npz", "--atoms", atoms, "--weights", "0.25,0.75", "-n", 4000)
    assert ".. (20 numbers)" in run("fit", tmp_path / "s.npz", "--k", 2)


def test_bounds(tmp_path: Path) -> None:
    said = run("bounds", "--k", 3, "-d", 20, "-n", 1000, "--clean-fraction", 0.1, "--sigma", 2)
    assert "156.2" in said and "1,024.0" in said and "n_d: have 156.2, need 23: holds" in said
    assert "FAILS" in run("bounds", "--k", 3, "-d", 2000, "-n", 1000)
    assert "FAILS" not in run("bounds", "--k", 3, "-d", 2000, "-n", 10**12)
    assert "on a line, probability 0.75" in run("bounds", "--k", 3, "-n", 1000)


@pytest.mark.parametrize("d, terms", [(1, ["inside it"]), (4, ["subspace", "inside it", "together"])])
def test_rates_prints_intervals_and_draws(tmp_path: Path, d: int, terms: list[str]) -> None:
    out, table = tmp_path / "plots" / "rates.png", tmp_path / "rates.csv"
    options = ["--sigma", "1.5,1.2" if d == 1 else "1.5", "--num-samples", "100,400", "--num-repeats", 2]
    options += ["--num-features", d]
    said = run("rates", *options, "--out", out, "--csv", table)
    assert "90% interval" in said and "0.167" in said and "11.4" in said and " to " in said
    with Image.open(out) as picture:
        assert picture.width > 500
    with open(table, newline="") as file:
        rows = list(csv.DictReader(file))
    assert {"curve", "num_samples", "error", "standard_error"} == set(rows[0])
    assert all(float(row["error"]) > 0 for row in rows)
    assert all(term in said for term in terms)


def test_number_of_atoms_is_chosen_with_its_evidence(tmp_path: Path) -> None:
    samples, result = tmp_path / "s.csv", tmp_path / "fit.json"
    run("simulate", samples, "--atoms", "0;6", "-n", 2000, "--sigma", 2)
    said = run("fit", samples, "--json", result)
    assert "duality gap" in said and "probability" in said and "±" in said
    found = json.loads(result.read_text())
    assert len(found["weights"]) == 2
    assert max(found["evidence"], key=lambda row: row["probability"])["num_atoms"] == 2


@pytest.mark.parametrize(
    "arguments, names",
    [
        (["fit", "missing.csv"], "missing.csv"),
        (["fit", "good.csv", "--sigma-column", "noise"], "--sigma-column"),
        (["fit", "good.csv", "--k", "40"], "too few"),
        (["fit", "good.csv", "--sigma", "1e300"], "sigma"),
        (["fit", "bad.csv"], "bad.csv"),
        (["simulate", "out.csv", "--atoms", "0,0;1"], "--atoms"),
        (["simulate", "out.csv", "--atoms", "0;1", "--weights", "0.5,0.6"], "--weights"),
        (["simulate", "out.csv", "--atoms", "0;1", "--sigma", "-1"], "sigma"),
        (["simulate", "out.txt", "--atoms", "0;1"], "out.txt"),
        (["bounds", "--delta", "0.3"], "--delta"),
        (["bounds", "--k", "0"], "--k"),
        (["rates", "--sigma", "0.5"], "--sigma"),
        (["rates", "--sigma", ""], "--sigma"),
        (["rates", "--num-samples", "10"], "--num-samples"),
        (["rates", "--num-samples", "3,3000"], "--num-samples"),
        (["rates", "--k", "1"], "--k"),
    ],
)
def test_errors_are_sentences(tmp_path: Path, monkeypatch, arguments: list[str], names: str) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    write_samples(Path("good.csv"), rng.normal(size=(50, 2)), np.ones(50))
    Path("bad.csv").write_text("x,sigma\n1,a\n")
    said = run(*arguments, code=1)
    assert names in said and "Traceback" not in said
    assert not Path("out.csv").exists()
