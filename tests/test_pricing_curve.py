"""The clean-only curve, inverted: exact for power laws, honest where it is noisy; and what is claimed of it."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.isotonic import IsotonicRegression

from assay.denoise import MixtureDenoiser
from assay.metrics.score import ScoreConfig, paired_errors, score
from assay.pricing import Comparable, curve_prices, price_report, read_comparable
from assay.pricing.curve import _falling
from assay.pricing.law import Law
from assay.pricing.report import between
from tests.points import Points
from tests.test_pricing import run


def table(rows: list[tuple[float, float, float, float]], std: float = 0.0, **fields: object) -> Comparable:
    """A table of (sigma, num_clean, num_noisy, value)."""
    sigma, clean, noisy, value = np.array(rows, float).T
    line, runs = np.arange(2, 2 + len(rows)), np.ones(len(rows), int)
    made = Comparable("made", line, sigma, clean, noisy, value, np.full(len(rows), std), True, std > 0, runs)
    return replace(made, **fields)


def power(alpha: float, size: float) -> float:
    return 1 + 30 * size**-alpha


@pytest.mark.parametrize("alpha", [0.25, 0.6, 1.0])
@pytest.mark.parametrize("worth", [0.2, 0.5, 0.9])
def test_the_curve_of_a_power_law_is_inverted(alpha: float, worth: float) -> None:
    rows = [(0.0, n, 0.0, power(alpha, n)) for n in (200, 600, 2000)]
    rows += [(0.3, n, 2000 - n, power(alpha, n + worth * (2000 - n))) for n in (200, 600)]
    (found,) = curve_prices(table(rows, std=1e-6))
    assert found.worth == pytest.approx(worth, rel=0.05)  # the prior on alpha pulls a little
    assert found.interval is not None and found.interval[0] < worth < found.interval[1]
    for mix, clean in zip(found.mixes, (200, 600), strict=True):
        assert mix.num_images == pytest.approx(clean + worth * (2000 - clean), rel=0.05)
        assert mix.low <= mix.num_images <= mix.high
    assert found.num_runs == 5


def test_there_is_no_curve_beyond_its_ends() -> None:
    rows = [
        (0.0, 200, 0, 4.0),
        (0.0, 600, 0, 3.0),
        (0.3, 100, 500, 5.0),
        (0.3, 500, 500, 2.0),
        (0.3, 300, 300, 3.5),
    ]
    (found,) = curve_prices(table(rows, std=0.01))
    worse, better, inside = found.mixes
    assert "worse" in str(worse.outside) and "fewer" in str(worse.outside) and math.isnan(worse.num_images)
    assert "better" in str(better.outside) and "more" in str(better.outside)
    assert inside.outside is None and found.worth == pytest.approx((inside.num_images - 300) / 300)
    assert found.num_runs == 3  # those that say nothing do not count
    (none,) = curve_prices(table([*rows[:2], rows[2]], std=0.01))
    assert none.worth is None and none.interval is None
    assert curve_prices(table(rows[1:], std=0.01)) == []
    assert curve_prices(table(rows))[0].interval is None  # no errors, no interval


def test_the_curve_falls() -> None:
    values = np.random.default_rng(0).standard_normal((20, 7))
    theirs = [IsotonicRegression(increasing=False).fit_transform(np.arange(7), row) for row in values]
    np.testing.assert_allclose(_falling(values), theirs, atol=1e-12)


def test_a_hundred_clean_rows_make_one_curve() -> None:
    sizes = np.geomspace(100, 10_000, 100)
    rows = [(0.0, n, 0.0, power(0.5, n)) for n in sizes] + [(0.1, 500, 4500, power(0.5, 500 + 0.4 * 4500))]
    (found,) = curve_prices(table(rows, std=0.001))
    assert found.worth == pytest.approx(0.4, abs=0.02)


class Cloud(Points):
    """Points of N(0, 0.5^2 I) in 64 dimensions."""

    image_shape = (64, 1, 1)

    def __init__(self, num: int, seed: int) -> None:
        super().__init__(num, seed=seed)
        self.x_tn = 0.5 * torch.randn(num, 64, 1, 1, generator=torch.Generator().manual_seed(seed))
        self.fingerprint = f"cloud {num} {seed}"


# The mean of the cloud is learned from clean points and from points of noise 0.5. The best estimate has a
# variance of 0.25 / (num_clean + num_noisy / 2) in each dimension: with noise as strong as the signal, two
# noisy points replace a clean one, exactly and in every mix. The divergence from the truth is a chi-square over
# twice that size.
SETTINGS = [(10, 0), (30, 0), (100, 0), (10, 90), (30, 70)]
SIZES = np.array([clean + 0.5 * noisy for clean, noisy in SETTINGS])


def coverage(values: np.ndarray, errors: np.ndarray, num_runs: int) -> tuple[float, float]:
    """How often the interval holds the true worth, 0.5, and its median width; both arrays are (studies, 5)."""
    held, width = [], []
    for value, error in zip(values, errors, strict=True):
        rows = [(0.5 * (noisy > 0), clean, noisy, v) for (clean, noisy), v in zip(SETTINGS, value, strict=True)]
        (found,) = curve_prices(replace(table(rows, 1.0), std=error, num_runs=np.full(5, num_runs)))
        if found.interval is not None:
            held.append(found.interval[0] <= 0.5 <= found.interval[1])
            width.append(found.interval[1] - found.interval[0])
    assert len(held) > 0.9 * len(values)
    return float(np.mean(held)), float(np.median(width))


def test_the_interval_covers_the_true_price_with_real_scores() -> None:
    rng, values, errors = np.random.default_rng(0), [], []
    for study in range(100):
        held_out, runs = Cloud(200, seed=study), []
        for size in SIZES:
            mean = torch.from_numpy(0.5 / math.sqrt(size) * rng.standard_normal((1, 64, 1, 1))).float()
            runs.append(score(MixtureDenoiser(mean, std=0.5), held_out, ScoreConfig(num_levels=4)))
        values.append([run.nats_per_dim.value for run in runs])
        errors.append(paired_errors(runs))
    assert np.median(errors) < 0.5 * runs[0].nats_per_dim.standard_error  # most of the error is shared
    rate, width = coverage(np.array(values), np.array(errors), 1)
    assert 0.80 <= rate <= 0.99 and width < 0.9


@pytest.mark.parametrize("num_seeds", [2, 3, 5])
def test_the_interval_covers_the_true_price_with_seeds(num_seeds: int) -> None:
    rng = np.random.default_rng(num_seeds)
    runs = 3 + rng.chisquare(64, (200, 5, num_seeds)) / (2 * 64 * SIZES[:, None])
    rate, width = coverage(runs.mean(2), runs.std(2, ddof=1) / math.sqrt(num_seeds), num_seeds)
    assert 0.80 <= rate <= 0.99 and width < 0.6


# --- claims ------------------------------------------------------------------------------------------------


def test_the_law_gives_the_quantity_of_the_bounds() -> None:
    theta = np.array([1.8, 0.24, 1.8, 0.055, 0.34, 0.0])
    seen = dict.fromkeys(("clean images", "effective size", "noise"), (0.0, math.inf))
    law = Law(theta, theta[None], np.zeros(1), 60_000.0, 0.95, seen)
    clean, noisy = np.array([6000.0, 18000.0]), np.array([54000.0, 42000.0])
    equal, draws = law.equal_clean(clean, noisy, 0.2)
    np.testing.assert_allclose(equal, clean + law.weight(0.2) * noisy, rtol=1e-9)  # without details: n_eff
    np.testing.assert_allclose(draws, equal[None])
    detailed = replace(law, parameters=np.array([*theta[:5], 0.01]))
    equal, _ = detailed.equal_clean(clean, noisy, 0.2)
    np.testing.assert_allclose(detailed.value(equal, 0.0, 0.2), detailed.value(clean, noisy, 0.2), rtol=1e-9)
    prices = noisy / (equal - clean)
    assert (prices > 1 / detailed.weight(0.2)).all() and prices[0] > prices[1]  # fewer clean, higher price


def test_a_difference_within_the_noise_decides_nothing() -> None:
    rows = [(0.0, 2000, 0, 580.0), (0.0, 200, 0, 620.72), (0.3, 200, 1800, 621.88)]
    undecided = price_report(replace(table(rows), std=np.array([1.5, 1.44, 1.85]), has_std=True)).sentence(0.3)
    assert "at most" in undecided and "at least" in undecided and "worth nothing" not in undecided
    sure = price_report(replace(table(rows), std=np.array([0.15, 0.14, 0.18]), has_std=True)).sentence(0.3)
    assert "are worth nothing" in sure
    for said in (undecided, sure):
        assert "95% interval from 3 runs" in said and "each setting ran once" in said


def test_a_currency_that_rises_with_more_images_prices_nothing() -> None:
    rows = [(0.0, 2000, 0, 28.1), (0.0, 200, 0, 18.6), (0.4, 200, 1800, 66.8)]
    report = price_report(table(rows, std=0.5))
    assert "18.6 (200 clean) and 28.1 (2,000 clean)" in report.sentence(0.4)
    assert "more clean images make it worse" in report.doubts()[0]
    assert price_report(table(rows, std=5.0)).rises() is None  # within the noise


def test_ends_that_look_alike_are_one_number() -> None:
    assert between(1.0, 1.0004) == "about 1"
    assert (between(1.0, 4.5), between(2.0, math.inf)) == ("1 to 4.5", "2 or more")
    one = price_report(table([(0.0, 200, 0, 9.0), (0.0, 2000, 0, 7.0), (0.4, 200, 1800, 6.0)], std=0.1))
    assert "about 1 noisy image at noise 0.4 replaces a clean one" in one.sentence(0.4)


def test_results_with_few_clean_images_are_left_out_in_words(tmp_path: Path) -> None:
    rows = [(0, 240, 0, 2.26, 0.01), (0, 60, 0, 2.34, 0.01), (0.2, 240, 2000, 2.25, 0.01)]
    path = write(tmp_path / "few.csv", [*rows, (0.2, 60, 2000, 2.30, 0.01)])
    said = run("price", str(path))
    assert "1 result(s) with a small part of clean images are left out" in " ".join(said.split())
    assert "left out" not in run("price", str(path), "--min-clean-fraction", "0")


def write(
    path: Path, rows: list[tuple[object, ...]], header: str = "sigma,num_clean,num_noisy,fd,fd_std"
) -> Path:
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path


ROWS: list[tuple[object, ...]] = [
    ("", 2000, 0, 2.6543, 0.021), ("", 600, 0, 5.4321, 0.032), ("", 200, 0, 9.9876, 0.121),
    (0.3, 600, 1400, 3.1234, 0.043), (0.3, 200, 1800, 4.0123, 0.054), (0.3, 1000, 1000, 2.9123, 0.02),
]  # fmt: skip


def test_plan_refuses_what_price_refuses(tmp_path: Path) -> None:
    path = write(tmp_path / "few.csv", ROWS[:4])
    assert "4 usable rows" in json.loads(run("price", str(path), "--json"))[0]["fit"]
    refused = run("plan", str(path), "--budget", "100", "--noisy-price", "0.1@0.3", code=1)
    assert "4 usable rows" in refused and "at least 5 settings" in refused


def test_plan_says_how_well_the_law_fits_and_which_rows_it_misses(tmp_path: Path) -> None:
    law = [(s, c, n, 2 + 900 / (c + 0.4 * n), 0.01) for s, c, n in
           [("", 3000, 0), ("", 2000, 0), ("", 600, 0), ("", 400, 0), ("", 200, 0), (0.3, 600, 1400),
            (0.3, 200, 1800), (0.3, 1000, 1000), (0.3, 400, 1600)]]  # fmt: skip
    good, bad = write(tmp_path / "good.csv", law), list(law)
    bad[7] = (0.3, 1000, 1000, 5.0, 0.01)
    arguments = ("--budget", "1000", "--noisy-price", "0.1@0.3")
    for command in ("price", "plan"):
        extra = arguments if command == "plan" else ()
        said = " ".join(run(command, str(good), *extra).split())
        assert "median error" in said and "badly" not in said
        said = " ".join(run(command, str(write(tmp_path / "bad.csv", bad)), *extra).split())
        assert "badly" in said and "1,000 clean + 1,000 noisy at 0.3 (5 measured" in said


def test_either_currency_is_named(tmp_path: Path) -> None:
    header = "sigma,num_clean,num_noisy,fd,fd_std,score,score_error"
    scores = [3.8, 4.1, 4.5, 4.0, 4.2, 3.95]
    rows = [(*row, score, 0.01) for row, score in zip(ROWS, scores, strict=True)]
    path = write(tmp_path / "both.csv", rows, header)
    by_score, by_fd = (run("price", str(path), "--by", by) for by in ("score", "fd"))
    assert "By the held-out score," in by_score and "By FD," in by_fd
    assert run("price", str(path)) == by_score  # the default, where there is one
    plan = json.loads(run("plan", str(path), "--budget", "900", "--noisy-price", "0.1@0.3", "--json"))
    assert plan["by"] == "score" and 3 < plan["value"] < 6 and "median error" in plan["fit"]
    (tmp_path / "alone").mkdir()
    scores_only = [(*row[:3], *row[5:]) for row in rows]
    only = write(tmp_path / "alone/both.csv", scores_only, header.replace("fd,fd_std,", ""))
    assert json.loads(run("price", str(only), "--json")) == json.loads(run("price", str(path), "--json"))
    assert "column fd" in run("price", str(only), "--by", "fd", code=1)


def test_the_error_of_held_out_images_does_not_shrink_with_seeds(tmp_path: Path) -> None:
    header = "sigma,num_clean,num_noisy,score,score_paired_error,seed"
    values = {("", 2000, 0): (3.81, 3.83), ("", 200, 0): (4.51, 4.55), (0.3, 200, 1800): (4.25, 4.25)}
    rows = [(*key, v, 0.01, seed) for key, pair in values.items() for seed, v in enumerate(pair)]
    (found,) = read_comparable(write(tmp_path / "seeds.csv", rows, header))
    rounding = 0.01**2 / 12
    np.testing.assert_allclose(found.std, np.sqrt(1e-4 + rounding + np.array([2e-4, 8e-4, 0]) / 2), rtol=1e-9)
    assert found.num_runs.tolist() == [2, 2, 2] and found.metric == "score"
