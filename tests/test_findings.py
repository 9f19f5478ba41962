"""Every figure that a page takes from a study is what the committed results give."""

import csv
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_rel

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "studies"))
import findings  # noqa: E402

TEXTS = [path for path in findings.PAGES if "<!-- findings:" in path.read_text()]


def test_there_are_findings() -> None:
    assert len(TEXTS) >= 3


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


def test_claims_are_judged_by_the_paired_test_of_scipy() -> None:
    better, worse = np.array([3.0, 3.2, 3.1]), np.array([3.3, 3.9, 3.5])
    claim = findings.Claim("digits", "", worse - better)
    assert claim.p_value == pytest.approx(ttest_rel(worse, better).pvalue)
    low, high = ttest_rel(worse, better).confidence_interval(0.95)
    assert claim.interval == pytest.approx((low, high))


def test_a_family_of_claims_is_corrected_by_holms_method() -> None:
    """Its textbook example: sorted p-values are compared with 0.05 / 4, / 3, / 2, / 1, until one is above."""
    assert findings.holm([0.01, 0.04, 0.03, 0.005]) == [True, False, False, True]
    assert findings.holm([0.2, 0.001]) == [False, True] and findings.holm([]) == []


def test_claims_in_a_fixed_order_end_with_the_first_undecided_one() -> None:
    """Each at 2.5%, in the order of the earlier p-values, whatever their own."""
    assert findings.in_order([0.02, 0.001, 0.03, 0.001], [0.2, 0.1, 0.3, 0.4]) == [True, True, False, False]
    assert findings.in_order([0.03, 0.001], [0.1, 0.2]) == [False, False]
