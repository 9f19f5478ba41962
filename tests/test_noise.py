import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from assay.noise import (
    LevelFirst,
    LogNormal,
    NoiseDistribution,
    Uniform,
    add_noise,
    check_distribution,
    draw_sigma,
    draw_sigma_clamped,
    snr_db,
)
from tests.errors import fault

LEVELS = [1e-3, 0.01, 0.05, 0.2, 0.5, 1.0, 5.0, 20.0, 50.0]
EDM = stats.lognorm(s=1.2, scale=math.exp(-1.2))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("sigma_tn", [0.0, *LEVELS])
@pytest.mark.parametrize(
    ("distribution", "scipys", "seed"), [(LogNormal(), EDM, 1), (Uniform(0.0, 80.0), stats.uniform(0, 80), 2)]
)
def test_draws_follow_the_truncated_distribution(
    distribution: NoiseDistribution, scipys: Any, seed: int, sigma_tn: float
) -> None:
    levels = torch.full((20_000,), sigma_tn, dtype=torch.float64)
    draws = draw_sigma(distribution, levels, generator(seed)).numpy()
    assert stats.kstest(draws, lambda x: 1 - scipys.sf(x) / scipys.sf(sigma_tn)).pvalue > 1e-3
    assert (draws > sigma_tn).all()


def test_the_clamp_of_the_original_would_fail_that_test() -> None:
    levels = draw_sigma_clamped(LogNormal(), torch.full((20_000,), 0.2), torch.Generator().manual_seed(0))
    clamped = levels.double().numpy()
    assert (clamped < 0.2000001).mean() == pytest.approx(0.37, abs=0.01)  # the share of draws wasted
    assert stats.kstest(clamped, lambda x: 1 - EDM.sf(x) / EDM.sf(0.2)).pvalue < 1e-10


@given(st.floats(0, 1e6), st.sampled_from([torch.float32, torch.float64]), st.integers(0, 2**31))
def test_draws_are_finite_and_strictly_above_even_far_in_the_tail(
    sigma_tn: float, dtype: torch.dtype, seed: int
) -> None:
    levels = torch.full((64,), sigma_tn, dtype=dtype)
    sigma_t = draw_sigma(LogNormal(), levels, generator(seed))
    assert sigma_t.dtype == dtype
    assert sigma_t.isfinite().all() and (sigma_t > levels).all()


def test_tail_mass_of_1e_12_stays_exact() -> None:
    sigma_tn = float(EDM.isf(1e-12))
    draws = draw_sigma(LogNormal(), torch.full((20_000,), sigma_tn, dtype=torch.float64), generator(3)).numpy()
    assert stats.kstest(EDM.sf(draws) / 1e-12, stats.uniform.cdf).pvalue > 1e-3
    assert len(np.unique(draws)) > 19_990


def test_a_level_beyond_the_distribution_is_rejected_before_drawing() -> None:
    levels = torch.tensor([1.0, 90.0])
    for distribution in (Uniform(0, 80), Uniform(2, 2)):
        assert fault(lambda of=distribution: check_distribution(of, levels)).key == "sigma_tn"


@pytest.mark.parametrize(
    ("survival", "inverse"),
    [
        (lambda s: 1 - s, lambda p: p),  # the CDF
        (lambda s: 3 * s, lambda p: p),
        (lambda s: s**2, lambda p: p),
        (lambda s: s, lambda p: 1 - p),
        (lambda s: s * math.nan, lambda p: p),
    ],
)
def test_a_survival_function_that_is_none_is_rejected(survival: Any, inverse: Any) -> None:
    class Wrong(LogNormal):
        def survival(self, sigma: torch.Tensor) -> torch.Tensor:
            return survival(super().survival(sigma))

        def inverse_survival(self, probability: torch.Tensor) -> torch.Tensor:
            return super().inverse_survival(inverse(probability))

    found = fault(lambda: check_distribution(Wrong(), torch.tensor([0.2])))
    assert found.key == "train.noise" and "Wrong" in found.what
    for right in (LogNormal(), LogNormal(3.0, 0.01), Uniform(0.5, 80)):
        check_distribution(right, torch.tensor([0.0, 0.2]))


def test_level_first_keeps_the_law_and_draws_uniformly_among_usable_images() -> None:
    sigma_tn = torch.tensor([0.5, 0.0, 0.2, 0.2, 0.0, 1.0], dtype=torch.float64)
    index, sigma_t = LevelFirst(LogNormal(), sigma_tn).draw(60_000, generator(5))
    assert (sigma_t > sigma_tn[index]).all()
    assert stats.kstest(sigma_t.numpy(), EDM.cdf).pvalue > 1e-3
    high = index[sigma_t > 1.0]
    assert stats.chisquare(torch.bincount(high, minlength=6).numpy()).pvalue > 1e-3
    low = index[sigma_t <= 0.2]
    assert set(low.tolist()) == {1, 4}


def test_level_first_without_clean_images_draws_above_the_least_noisy() -> None:
    index, sigma_t = LevelFirst(LogNormal(), torch.tensor([0.7, 0.3])).draw(1_000, generator(6))
    assert sigma_t.min() > 0.3
    assert set(index[sigma_t <= 0.7].tolist()) == {1}


@given(st.floats(0, 10), st.floats(1e-3, 10), st.integers(0, 1000))
def test_added_noise_has_the_missing_variance(sigma_tn: float, gap: float, seed: int) -> None:
    eps = torch.randn(2, 3, 4, 4, generator=generator(seed), dtype=torch.float64)
    x_tn = torch.zeros_like(eps)
    low = torch.full((2,), sigma_tn, dtype=torch.float64)
    x_t = add_noise(x_tn, low, low + gap, eps)
    expected = math.sqrt((sigma_tn + gap) ** 2 - sigma_tn**2)
    torch.testing.assert_close(x_t, expected * eps, rtol=1e-6, atol=1e-9)


def test_snr_is_the_papers() -> None:
    assert snr_db(0.2) == pytest.approx(14.15, abs=0.005)
    assert snr_db(0.0) == math.inf
    assert snr_db(0.1, signal_power=0.25) == pytest.approx(10 * math.log10(26))


X = torch.zeros(4, 1, 2, 2)


@pytest.mark.parametrize(
    ("sigma_tn", "sigma_t", "key"),
    [
        (torch.zeros(4, 1, 1, 1), torch.ones(4), "sigma_tn"),
        (torch.zeros(4), torch.ones(4, 1), "sigma_t"),
        (torch.zeros(3), torch.ones(4), "sigma_tn"),
        (torch.zeros(4), torch.ones(()), "sigma_t"),
        (torch.zeros(4, dtype=torch.int64), torch.ones(4), "sigma_tn"),
    ],
)
def test_levels_of_another_shape_are_named(sigma_tn: Any, sigma_t: Any, key: str) -> None:
    assert fault(lambda: add_noise(X, sigma_tn, sigma_t, X)).key == key


@pytest.mark.parametrize("levels", [[], [0, 0, -0.1, 0], [0, 0, math.nan, 0], [0, 0, math.inf, 0]])
def test_a_data_set_with_bad_levels_is_rejected(levels: list[float]) -> None:
    assert fault(lambda: check_distribution(LogNormal(), torch.tensor(levels))).key == "sigma_tn"
