"""Distances, bounds, hard instances and rates."""

import math
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import wasserstein_distance

from assay.mixture import NoisyMixture, bounds
from assay.mixture.distance import sliced_wasserstein, wasserstein, wasserstein_line
from assay.mixture.moments import Atoms, denoised_moments, moment_weights, project_moments, quadrature
from assay.mixture.rates import (
    draw_curve,
    hard_errors,
    line_errors,
    measure_rates,
    measure_worth,
    separated,
)
from assay.mixture.samples import simulate, two_levels
from assay.mixture.search import sphere_net


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 6))
def test_distance_on_a_line(seed: int, k: int, other: int) -> None:
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=k), rng.normal(size=other)
    w, v = rng.dirichlet(np.ones(k)), rng.dirichlet(np.ones(other))
    expected = wasserstein_distance(x, y, w, v)
    assert wasserstein_line(x, w, y, v) == pytest.approx(expected, abs=1e-12)
    assert wasserstein(Atoms(x, w), Atoms(y, v)) == pytest.approx(expected, abs=1e-12)
    assert wasserstein(Atoms(x[:, None], w), Atoms(y[:, None], v)) == pytest.approx(expected, abs=1e-9)


def test_distance_in_space_is_the_best_assignment() -> None:
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(2, 4, 3))
    uniform = np.full(4, 0.25)
    best = min(np.linalg.norm(first - second[list(p)], axis=1).mean() for p in permutations(range(4)))
    one, two = Atoms(first, uniform), Atoms(second, uniform)
    assert wasserstein(one, two) == pytest.approx(best)
    sliced = sliced_wasserstein(one, two, sphere_net(3, 0.1))
    assert 0.3 * best < sliced.max() <= best
    v = sphere_net(3, 0.1)[5]
    assert sliced[5] == pytest.approx(wasserstein_distance(first @ v, second @ v))


@pytest.mark.parametrize("d, k", [(2, 2), (3, 3)])
def test_slices_bound_the_distance(d: int, k: int) -> None:
    """Lemma "sliced_wass_disc": sup over the net <= W1 <= 16 k^2 sqrt(d) sup, here on a coarser net already."""
    rng = np.random.default_rng(d)
    net = sphere_net(d, 0.1)
    for _ in range(20):
        one, two = (Atoms(rng.normal(size=(k, d)), rng.dirichlet(np.ones(k))) for _ in range(2))
        sup = sliced_wasserstein(one, two, net).max()
        assert sup <= wasserstein(one, two) * (1 + 1e-9) <= 16 * k**2 * math.sqrt(d) * sup


def test_effective_sample_sizes() -> None:
    sigma = two_levels(1000, 0.1, 1.0, 2.0)
    assert bounds.effective_sample_size(sigma, 4) == pytest.approx(100 + 900 / 16)
    assert bounds.effective_sample_size(5 * sigma, 6) == pytest.approx(100 + 900 / 64)
    assert bounds.effective_sample_size([0.0, 0.0, 1.0], 6) == 2
    assert bounds.effective_sample_size([0.0, 0.0, 1.0], 6, radius=1.0) == 3
    assert bounds.effective_sample_size([1.0, 1e200], 10) == 1
    assert bounds.noisy_per_clean(2.0, 2) == (16, 64)


@given(st.integers(10, 10**6), st.floats(0, 1), st.floats(1, 10), st.integers(1, 50), st.integers(1, 5))
def test_corollary_is_the_theorem_at_two_levels(n: int, p: float, sigma: float, d: int, k: int) -> None:
    clean = round(p * n)
    n = min(n, 2000)
    clean = min(clean, n)
    levels = two_levels(n, clean / n, 1.0, sigma)
    theorem = bounds.upper_bound(levels, d, k, 0.1, 2.5)
    corollary = bounds.upper_bound_two_levels(n, clean / n, sigma, d, k, 0.1, 2.5)
    assert theorem.subspace == pytest.approx(corollary.subspace, rel=1e-9)
    assert theorem.total == pytest.approx(corollary.total, rel=1e-9)


def test_bounds_by_hand() -> None:
    sigma = np.full(1000, 2.0)
    log = math.log(1 / 0.05)
    upper = bounds.upper_bound(sigma, 20, 2)
    assert upper.subspace == pytest.approx(2 * ((20 + log) / (1000 / 16)) ** 0.25)
    assert upper.low_dim == pytest.approx(8 * ((2 * math.log(2) + log) / (1000 / 64)) ** (1 / 6))
    lower = bounds.lower_bound(sigma, 20, 2, constant=0.1)
    assert lower.subspace == pytest.approx(0.1 * ((20 + log) / (1000 / 16)) ** 0.25)
    assert lower.low_dim == pytest.approx(0.05 * (log / (1000 / 64)) ** (1 / 6))
    assert lower.largest == max(lower.subspace, lower.low_dim)
    assert bounds.lower_bound(sigma, 2, 2).subspace == 0
    # Homogeneous: units do not matter, if the radius has them too.
    smaller = bounds.upper_bound(0.1 * sigma, 20, 3, radius=0.1).low_dim
    assert smaller == pytest.approx(0.1 * bounds.upper_bound(sigma, 20, 3).low_dim)
    smaller = bounds.lower_bound(0.1 * sigma, 20, 3).low_dim
    assert smaller == pytest.approx(0.1 * bounds.lower_bound(sigma, 20, 3).low_dim)
    assert bounds.upper_bound_line(sigma, 3, 0.5) == pytest.approx(0.5 * 9 * (1000 / 2**10) ** (-1 / 10))


@pytest.mark.parametrize("level", [0.0, 1e-4, 0.3])
def test_upper_bounds_hold_below_the_radius(level: float) -> None:
    """At sigma = 1e-4 and n = 1,000 the formula without the radius promises 0.0017; the error is 0.03."""
    sigma, errors = np.full(1000, level), []
    for seed in range(10):
        rng = np.random.default_rng(seed)
        truth = Atoms(np.array([[-1.0], [1.0]]), np.full(2, 0.5))
        found = NoisyMixture(2, random_state=0).fit(simulate(truth, sigma, rng), sigma=sigma).mixture_
        errors.append(wasserstein(found, truth))
    assert np.mean(errors) > 0.01
    assert bounds.upper_bound(sigma, 1, 2).total > np.quantile(errors, 0.95)
    assert bounds.upper_bound_line(sigma, 2) > np.quantile(errors, 0.75)
    assert bounds.upper_bound(sigma, 1, 2) == bounds.upper_bound(np.ones(1000), 1, 2)


def test_conditions_say_what_is_missing() -> None:
    good = bounds.upper_conditions(np.ones(1000), 20, 3)
    assert all(c.holds for c in good) and good[0].need == pytest.approx(20 + math.log(20))
    bad = bounds.upper_conditions([1.0, *[10.0] * 1000], 20, 3, c_1=0.5)
    assert [c.holds for c in bad] == [False, False, True] and bad[0].have == pytest.approx(1.1)
    assert "FAILS" in str(bad[0]) and "n_d" in str(bad[0])
    below = bounds.upper_conditions([1e-3, *[1.0] * 1000], 20, 3, radius=0.5)
    assert [c.holds for c in below] == [True, False, False] and below[1].have == pytest.approx(1 + 1000 / 2**10)
    lower = bounds.lower_conditions(np.full(1000, 2.0), 3, 2, radius=1.0)
    assert lower[1].have == pytest.approx(1000 / 64) and lower[1].need == pytest.approx(8 * math.log(20))
    assert bounds.lower_conditions(np.ones(1000), 3, 2, radius=2.0)[1].have == pytest.approx(1000)
    assert not bounds.lower_conditions([0.0, 1.0], 3, 2)[0].holds


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: bounds.upper_bound([1.0], 1, 0), "at least one atom"),
        (lambda: bounds.upper_bound([1.0], 1, 1, 0.7), "delta"),
        (lambda: bounds.upper_bound([], 1, 1), "one noise level"),
        (lambda: bounds.upper_bound([-1.0], 1, 1), "finite and >= 0"),
        (lambda: bounds.upper_bound_two_levels(10, 0.5, 0.5, 1, 2), "sigma >= 1"),
        (lambda: bounds.hard_pair(0), "at least one atom"),
        (lambda: bounds.lower_bound([1.0], 3, 2, 0.3), "delta <= 0.25"),
        (lambda: bounds.hard_packing(1, 1, 1.0, np.random.default_rng(0)), "two dimensions"),
        (lambda: bounds.hard_packing(2, 50, 1.0, np.random.default_rng(0)), "fewer members"),
        (lambda: measure_rates(1, 2.0), "k >= 2"),
        (lambda: measure_rates(2, 2.0, num_samples=[10]), "two sizes"),
        (lambda: two_levels(10, 1.5, 1, 2), "fraction"),
    ],
)
def test_bad_questions_are_refused(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_hard_pairs_match_their_moments(k: int) -> None:
    one, two = bounds.hard_pair(k, 0.5)
    for r in range(2 * k - 1):
        assert (one.weights * one.atoms**r).sum() == pytest.approx(
            (two.weights * two.atoms**r).sum(), abs=1e-14
        )
    last = [(p.weights * p.atoms ** (2 * k - 1)).sum() for p in (one, two)]
    assert abs(last[0] - last[1]) > 1e-5
    assert (
        len(one.atoms) == len(two.atoms) == k and max(np.abs(one.atoms).max(), np.abs(two.atoms).max()) <= 0.5
    )
    assert wasserstein(one, two) > 0.5 * 0.5 / k
    np.testing.assert_allclose(one.atoms, -two.atoms[::-1], atol=1e-15)
    np.testing.assert_allclose(one.weights, two.weights[::-1], atol=1e-12)


def test_errors_at_all_scales_are_those_of_separate_experiments() -> None:
    """The shortcut through sums per atom gives the same distribution of errors as drawing samples anew."""
    shape, sigma = bounds.hard_pair(2)[0], two_levels(400, 0.3, 1.0, 1.5)
    rng = np.random.default_rng(0)
    quick = line_errors(shape, np.array([0.5, 1.0]), sigma, 600, rng, 2.0)
    alpha = moment_weights(sigma, 2, 2.0)
    for column, scale in enumerate((0.5, 1.0)):
        truth = Atoms(scale * shape.atoms[:, None] / 2, shape.weights)
        draws = [simulate(truth, sigma / 2, rng)[:, 0] for _ in range(600)]
        moments = np.array([denoised_moments(x, sigma / 2, 3, alpha)[1:] for x in draws])
        atoms, mass = quadrature(project_moments(moments))
        slow = 2 * wasserstein_line(atoms, mass, truth.atoms[:, 0], truth.weights)
        error = math.hypot(quick[:, column].std(), slow.std()) / math.sqrt(600)
        assert abs(quick[:, column].mean() - slow.mean()) < 4 * error


def test_worst_case_exponent() -> None:
    """Hard pairs, k = 2: within 20 % of 1 / (4k - 2)."""
    rng = np.random.default_rng(0)
    sizes = [300, 1000, 3000, 10_000, 30_000]
    curve = draw_curve("worst", sizes, [hard_errors(2, np.ones(n), 150, rng) for n in sizes], 1 / 6)
    assert (curve.standard_error < 0.1 * curve.error).all()
    assert curve.slope == pytest.approx(1 / 6, rel=0.2)
    assert curve.samples_for(float(curve.error[2])) == pytest.approx(3000, rel=0.5)


def test_parametric_exponent_when_atoms_are_apart() -> None:
    rng = np.random.default_rng(1)
    sizes = [300, 1000, 3000, 10_000]
    draws = [line_errors(separated(2), np.ones(1), np.ones(n), 150, rng, 9.0) for n in sizes]
    assert draw_curve("easy", sizes, draws, 0.5).slope == pytest.approx(0.5, rel=0.2)


def test_exchange_rate_follows_the_theory() -> None:
    """sigma^(4k-2) noisy samples replace a clean one within a factor of 3, which is 20 % of error (3^(1/6))."""
    shares: list[float] = []
    result = measure_rates(2, 1.6, 0.2, (300, 1000, 3000), 60, progress=shares.append)
    assert result.exchange.inside == pytest.approx(1.6**6)
    assert 1 / 3 < result.exchange.measured / result.exchange.inside < 3
    assert result.exchange.low < result.exchange.measured < result.exchange.high
    assert [curve.theory_slope for curve in result.curves] == [1 / 6] * 3 + [0.5]
    assert shares[-1] == 1 and (np.diff(shares) > 0).all()


def test_packing_cannot_be_told_apart() -> None:
    """Members are s / 4 apart, and at the theorem's scale their samples are nearly of one likelihood."""
    rng = np.random.default_rng(0)
    d, sigma = 8, np.full(4000, 2.0)
    scale = 0.3 * (d / (sigma**-4).sum()) ** 0.25
    members = bounds.hard_packing(d, 30, scale, rng)
    distances = [wasserstein(one, two) for i, one in enumerate(members) for two in members[:i]]
    assert min(distances) >= scale / 4 and len(members) == 30
    x = simulate(members[0], sigma, rng)

    def log_likelihood(member: Atoms) -> float:
        inner = x @ member.atoms[0] / sigma**2
        return float(np.log(np.cosh(inner)).sum())

    gains = [log_likelihood(members[0]) - log_likelihood(other) for other in members[1:]]
    assert np.mean(gains) < math.log(4) * (d - 1) / 2  # what Fano's inequality would need


def test_subspace_term_grows_with_the_fourth_root_of_the_dimension() -> None:
    result = measure_rates(2, 1.5, 0.2, (400, 3200), 8, num_features=8)
    assert result.dimension is not None and result.dimension.slope == pytest.approx(-0.25, abs=0.1)
    assert result.dimension.num_samples.tolist() == [8, 16, 32, 64]
    assert [curve.theory_slope for curve in result.curves] == [0.25] * 3
    assert result.curves[0].slope == pytest.approx(0.25, abs=0.1)
    assert result.exchange.subspace == pytest.approx(1.5**4)
    assert 0.4 < result.exchange.measured / result.exchange.subspace < 2.5


@pytest.mark.parametrize("d", [1, 3])
def test_worth_lies_between_the_exponents(d: int) -> None:
    """On a line it follows sigma^(4k-2); in space it may be as little as sigma^4."""
    shares: list[float] = []
    sizes = (300, 1000, 3000) if d == 1 else (200, 800)
    (row,) = measure_worth(2, [1.5], d, sizes, 60 if d == 1 else 6, progress=shares.append)
    assert (row.subspace, row.inside) == (pytest.approx(1.5**4), pytest.approx(1.5**6))
    assert row.low <= row.measured <= row.high and shares[-1] == 1
    assert 1 / 3 < row.measured / row.inside < 3 if d == 1 else 1 < row.measured < 100


def test_draws_give_standard_errors_and_new_curves() -> None:
    rng = np.random.default_rng(0)
    draws = [scale * rng.gamma(4, size=(400, 3)) * [0.1, 1.0, 0.2] for scale in (2.0, 1.0)]
    curve = draw_curve("c", [100, 1600], draws, 0.25)
    np.testing.assert_allclose(curve.error, [draw[:, 1].mean() for draw in draws])
    np.testing.assert_allclose(curve.standard_error, [draw[:, 1].std() / np.sqrt(399) for draw in draws])
    again = np.array([curve.redrawn(rng).error for _ in range(200)])
    np.testing.assert_allclose(again.std(0), curve.standard_error, rtol=0.2)
    assert curve.slope == pytest.approx(0.25, abs=0.05)
