"""`assay mixture`: every command on every format, and what it says when the input is wrong."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from assay.cli import app
from assay.mixture.samples import check_mixture, read_mixture, read_samples, write_samples

ATOMS = "0,0; 4,0; 0,5"


def run(*arguments: object, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["mixture", *map(str, arguments)], env={"COLUMNS": "200"})
    assert done.exit_code == code, done.output
    return " ".join(done.output.split())


@pytest.mark.parametrize("suffix", ["npy", "npz", "csv", "parquet"])
def test_simulate_and_fit(tmp_path: Path, suffix: str) -> None:
    samples, result = tmp_path / f"samples.{suffix}", tmp_path / "fit.json"
    assert "20,000 samples" in run("simulate", samples, "--atoms", ATOMS, "-n", 20_000, "--sigma", 2)
    said = run("fit", samples, "--k", 3, "--json", result)
    assert "noise 1 to 2" in said and "20,000.0 for the subspace (n_d)" in said and "warning" not in said
    assert "the atoms' radius, counts as that" in said
    found = read_mixture(result)
    order = np.lexsort(np.round(found.atoms).T)
    np.testing.assert_allclose(found.atoms[order], [[0, 0], [4, 0], [0, 5]], atol=0.15)
    again = tmp_path / f"again.{suffix}"
    run("simulate", again, "--mixture", result, "-n", 100, "--clean-fraction", 0.5)
    x, sigma = read_samples(again)
    assert x.shape == (100, 2) and (sigma == 1).sum() == 50 and (sigma == 3).sum() == 50


def test_files_come_back_as_written(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, sigma = rng.normal(size=(50, 3)), rng.uniform(size=50)
    for suffix in ("npy", "npz", "csv", "parquet"):
        write_samples(tmp_path / f"s.{suffix}", x, sigma)
        found = read_samples(tmp_path / f"s.{suffix}")
        np.testing.assert_array_equal(found[0], x)
        np.testing.assert_array_equal(found[1], sigma)
    np.save(tmp_path / "plain.npy", x)
    plain = read_samples(tmp_path / "plain.npy", sigma=0.5)
    assert plain[0].shape == (50, 3) and (plain[1] == 0.5).all() and isinstance(plain[0].base, np.memmap)
    named = np.zeros(4, dtype=[("a", float), ("noise", float)])
    np.save(tmp_path / "named.npy", named)
    assert read_samples(tmp_path / "named.npy", "noise")[0].shape == (4, 1)


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
    assert "on a line, with probability 0.75" in run("bounds", "--k", 3, "-n", 1000)


def test_rates_draws_its_picture(tmp_path: Path) -> None:
    out = tmp_path / "plots" / "rates.png"
    said = run("rates", "--sigma", 1.5, "--num-samples", "100,400", "--num-repeats", 5, "--out", out)
    assert "replace a clean one" in said and "sigma^6 = 11.4" in said and "0.167" in said
    with Image.open(out) as picture:
        assert picture.width > 500
    options = ["--sigma", 1.2, "--num-samples", "100,400", "--num-repeats", 2, "--out", out, "-d", 4]
    said = run("rates", *options, "--csv", tmp_path / "rates.csv")
    assert "sigma^4 = 2.07" in said and "d = 4 .. 32" in said and "0.250 in d" in said
    assert "curve,num_samples,error,standard_error" in (tmp_path / "rates.csv").read_text()


def test_worth_draws_its_curve(tmp_path: Path) -> None:
    out = tmp_path / "worth.png"
    said = run("worth", "--sigma", "1.5,2", "--num-samples", "100,400", "--num-repeats", 5, "--out", out)
    assert "sigma^6" in said and "11.4" in said and " to " in said and "sigma^4" in said
    with Image.open(out) as picture:
        assert picture.width > 500


def test_number_of_atoms_is_chosen_with_its_evidence(tmp_path: Path) -> None:
    samples, result = tmp_path / "s.csv", tmp_path / "fit.json"
    run("simulate", samples, "--atoms", "0;6", "-n", 2000, "--sigma", 2)
    said = run("fit", samples, "--json", result)
    assert "duality gap" in said and "probability" in said and "±" in said
    assert len(read_mixture(result).weights) == 2
    assert max(json.loads(result.read_text())["evidence"], key=lambda row: row["probability"])["num_atoms"] == 2


def test_noise_per_feature_and_missing_values(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    label, sigma = rng.integers(2, size=400), rng.uniform(0.3, 1, (400, 2))
    x = 5 * label[:, None] * [1, 0] + sigma * rng.normal(size=(400, 2))
    sigma[::5, 1] = np.inf
    table = np.column_stack([x, sigma])
    path = tmp_path / "s.csv"
    np.savetxt(path, table, delimiter=",", header="a,b,sigma_b,sigma_a", comments="")
    read, levels = read_samples(path)
    np.testing.assert_array_equal(levels, sigma[:, ::-1])
    np.savez(tmp_path / "s.npz", x=x, sigma=sigma)
    said = run("fit", tmp_path / "s.npz", "--k", 2, "--json", tmp_path / "fit.json")
    assert "noise 0.3" in said and "to inf" in said
    np.testing.assert_allclose(np.sort(read_mixture(tmp_path / "fit.json").atoms[:, 0]), [0, 5], atol=0.2)
    said = run("fit", tmp_path / "s.npz", "--k", 2, "--covariance", "--json", tmp_path / "fit.json")
    assert "mean" in said and len(json.loads((tmp_path / "fit.json").read_text())["covariances"]) == 2
    assert read.shape == (400, 2)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["fit", "missing.csv"], "missing.csv"),
        (["fit", "samples.txt"], ".npy, .npz, .csv, .parquet"),
        (["fit", "good.csv", "--sigma-column", "noise"], "no column 'noise', only x0, x1, sigma"),
        (["fit", "good.csv", "--k", "3", "--search", "all"], "'scalable' or 'exhaustive'"),
        (["fit", "good.csv", "--k", "40"], "too few for 40 atoms"),
        (["fit", "bad.csv"], "bad.csv cannot be read"),
        (["fit", "short.csv"], "3 columns and 2 names"),
        (["fit", "flat.npy"], "the last column sigma"),
        (["fit", "lonely.npz"], "no samples"),
        (["simulate", "out.csv"], "either --atoms"),
        (["simulate", "out.csv", "--atoms", "0,0;1"], "different numbers of coordinates"),
        (["simulate", "out.csv", "--atoms", "a,b"], "not a list of numbers"),
        (["simulate", "out.csv", "--atoms", "0;1", "--weights", "0.5,0.6"], "sum to 1"),
        (["simulate", "out.csv", "--mixture", "empty.json"], "not an object"),
        (["simulate", "out.csv", "--atoms", "0;1", "--sigma", "-1"], "finite and >= 0"),
        (["fit", "gone.csv", "--k", "2"], "gone.csv does not exist: check the path"),
        (["bounds", "--delta", "2"], "--delta 2"),
        (["bounds", "--delta", "0.3"], "lower bound is proved for delta <= 0.25"),
        (["rates", "--sigma", "0.5"], "sigma >= 1"),
    ],
)
def test_errors_are_sentences(tmp_path: Path, monkeypatch, arguments: list[str], message: str) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    write_samples(Path("good.csv"), rng.normal(size=(50, 2)), np.ones(50))
    Path("bad.csv").write_text("x,sigma\n1,a\n")
    Path("short.csv").write_text("x,sigma\n1,2,3\n")
    np.save("flat.npy", np.zeros(5))
    np.savez("lonely.npz", sigma=np.ones(5))
    Path("empty.json").write_text(json.dumps([1]))
    said = run(*arguments, code=1)
    assert message in said and "Traceback" not in said
    assert not Path("out.csv").exists()


def test_mixture_checks() -> None:
    assert check_mixture([0.0, 1.0]).atoms.shape == (2, 1)
    for atoms, weights in (([[np.nan]], None), ([], None), ([[0.0]], [0.5]), ([[0.0], [1.0]], [1.5, -0.5])):
        with pytest.raises(ValueError):
            check_mixture(atoms, weights)
