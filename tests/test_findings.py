"""Every figure that a page takes from a study is what the committed results give."""

import csv
import math
import re
import sys
from pathlib import Path

import pytest
from scipy.stats import ttest_ind

from assay.metrics.evaluate import Evaluation
from assay.outcome import FD, SCORE, Outcome, Setting

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "studies"))
import findings  # noqa: E402

TEXTS = [path for path in findings.PAGES if "<!-- findings:" in path.read_text()]


def test_there_are_findings() -> None:
    assert len(TEXTS) >= 2


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_pages_say_what_the_results_say(path: Path) -> None:
    text = path.read_text()
    assert findings.renew(text) == text, f"run `python studies/findings.py`, {path} is out of date"


def test_the_noise_of_the_galaxies_is_compared_with_the_simulators() -> None:
    """The camera of make.py in ADU; rounding, which deep images do not have, adds a variance of 1 / 12."""
    folder = ROOT / "studies" / "galaxies"
    found = re.findall(r"^([A-Z_]+) = ([\d.]+)", (folder / "make.py").read_text(), flags=re.MULTILINE)
    make = {name: float(value) for name, value in found}
    gain, read_noise, sky = (value / make["GAIN"] for value in (1, make["READ_NOISE"], make["SKY"]))
    variance = gain * sky + read_noise**2
    truth = [gain, math.sqrt(read_noise**2 + 1 / 12), math.sqrt(variance + 1 / 12)]
    truth.append(math.sqrt(variance / make["NUM_COADDED"]))
    with open(folder / "noise.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["truth"]) for row in rows] == pytest.approx(truth, rel=1e-5)
    for row in rows[:2]:  # gain and read noise, which the study uses
        assert float(row["low"]) < float(row["truth"]) < float(row["high"])


def outcome(seed: int, num_clean: int, fd: float, score: float = 4.0, error: float = 0.0) -> Outcome:
    noisy = ((0.3, 100.0 - num_clean),) if num_clean < 100 else ()
    setting = Setting(
        table="clean_mix", num_clean=num_clean, noisy=noisy, clean_fraction=num_clean / 100, seed=seed
    )
    measured = Evaluation(fd=fd, metric="FD", extractor="", score=score, score_error=error)
    return Outcome(setting=setting, evaluation=measured)


def test_claims_are_judged_by_welchs_test() -> None:
    """The interval excludes 0 exactly where the p-value of scipy's test is below 0.05."""
    better, worse = (3.0, 3.2, 3.1), (3.3, 3.9, 3.5)
    for shift in (0.0, 0.3):
        rows = [outcome(seed, 100, fd) for seed, fd in enumerate(better)]
        rows += [outcome(seed, 10, fd + shift) for seed, fd in enumerate(worse)]
        measured = findings.Measured(rows, FD)
        all_clean, mix = measured.values
        gain = measured.gain(all_clean, mix)
        test = ttest_ind([fd + shift for fd in worse], better, equal_var=False)
        low, high = test.confidence_interval(0.95)
        assert (gain.value - gain.interval, gain.value + gain.interval) == pytest.approx((low, high))
        assert measured.verdict(gain).startswith("holds" if test.pvalue < 0.05 else "undecided")
        assert measured.verdict(measured.gain(mix, all_clean)).startswith("fails" if shift else "undecided")


def test_the_error_of_held_out_images_does_not_fall_with_seeds() -> None:
    rows = [outcome(seed, clean, 1.0, clean / 10, 0.03) for seed in range(3) for clean in (100, 10)]
    measured = findings.Measured(rows, SCORE)
    gain = measured.gain(*measured.values)
    assert gain.error == pytest.approx(math.hypot(0.03, 0.03))
    assert gain.interval == pytest.approx(1.95996 * gain.error, rel=1e-5)  # known exactly: a normal law
    halved = gain.per(2)
    assert (halved.value, halved.error) == pytest.approx((gain.value / 2, gain.error / 2))
    assert gain.minus(halved).error == pytest.approx(gain.error * math.sqrt(1.25))


def test_a_setting_with_one_seed_is_given_the_usual_deviation() -> None:
    rows = [outcome(seed, clean, fd * clean) for seed, fd in enumerate((2.0, 2.2)) for clean in (100, 10)]
    rows += [outcome(seed, 20, fd) for seed, fd in enumerate((5.0, 50.0))]  # unusual
    measured = findings.Measured([*rows, outcome(0, 50, 4.0)], FD)
    one, two = (next(s for s in measured.values if s.num_clean == number) for number in (50, 100))
    deviation = 0.2 / math.sqrt(2) / 2.1  # of 100 and of 10 clean images
    expected = math.hypot(4.0 * deviation, 210 * deviation / math.sqrt(2))
    assert measured.gain(two, one).error == pytest.approx(expected)
    alone = findings.Measured([outcome(0, 50, 4.0), outcome(0, 100, 3.0)], FD)
    assert set(alone.claims(0.3).values()) == {""}
