"""Distances, bounds, the lemmas on numbers, hard instances and rates."""

import math
import sys
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy.stats import norm, wasserstein_distance

from assay.mixture import NoisyMixture, bounds, lemmas
from assay.mixture.distance import sliced_wasserstein, wasserstein, wasserstein_line
from assay.mixture.moments import Atoms, denoised_moments, moment_weights, project_moments, quadrature
from assay.mixture.samples import simulate
from assay.mixture.search import simplex_net, sphere_net
from tests.errors import rejected

sys.path.insert(0, str(Path(__file__).parent.parent / "studies" / "mixture-rates"))
import rates


def random_mixture(rng: np.random.Generator, k: int, d: int) -> Atoms:
    """Atoms in the unit ball."""
    atoms = rng.normal(size=(k, d))
    return Atoms(atoms / np.linalg.norm(atoms, axis=1).max(), rng.dirichlet(np.ones(k)))


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
        one, two = random_mixture(rng, k, d), random_mixture(rng, k, d)
        sup = sliced_wasserstein(one, two, net).max()
        assert sup <= wasserstein(one, two) * (1 + 1e-9) <= 16 * k**2 * math.sqrt(d) * sup


def test_effective_sample_sizes() -> None:
    """Of samples listed one by one, or counted by level: the corollary at two levels."""
    p, n, sigma, k = 0.1, 1000, 1.7, 3
    expected = n * (p + (1 - p) / sigma**4), n * (p + (1 - p) / sigma ** (4 * k - 2))
    assert bounds.effective_sizes(np.repeat([1.0, sigma], [100, 900]), k) == pytest.approx(expected, rel=1e-12)
    assert bounds.effective_sizes([5.0, 5 * sigma], k, [p * n, (1 - p) * n]) == pytest.approx(expected)
    assert bounds.effective_sizes([2.0, 1.0], 2, [5, 0]) == (5, 5)  # in units of the least noise that occurs
    assert bounds.effective_sizes([0.0, 0.0, 1.0], 2) == (2, 2)
    assert bounds.effective_sizes([0.0, 0.0, 1.0], 2, radius=1.0) == (3, 3)
    assert bounds.effective_sizes([1.0, 1e100], 3) == (1, 1)
    assert bounds.noisy_per_clean(2.0, 2) == (16, 64) and bounds.noisy_per_clean(3.0, 1000)[1] == math.inf


@given(st.integers(10, 2000), st.floats(0, 1), st.floats(1, 10), st.integers(1, 50), st.integers(1, 5))
def test_corollary_is_the_theorem_at_two_levels(n: int, p: float, sigma: float, d: int, k: int) -> None:
    clean = round(p * n)
    theorem = bounds.upper_bound(np.repeat([1.0, sigma], [clean, n - clean]), d, k, 0.1)
    corollary = bounds.upper_bound([1.0, sigma], d, k, 0.1, count=[clean, n - clean])
    share, log = clean / n, math.log(10)
    by_hand = k * ((d + log) / (n * (share + (1 - share) / sigma**4))) ** 0.25
    assert theorem.subspace == pytest.approx(corollary.subspace) == pytest.approx(by_hand)
    assert sum(theorem) == pytest.approx(sum(corollary))


def test_bounds_by_hand() -> None:
    sigma = np.full(1000, 2.0)
    log = math.log(1 / 0.05)
    upper = bounds.upper_bound(sigma, 20, 2)
    assert upper.subspace == pytest.approx(2 * ((20 + log) / (1000 / 16)) ** 0.25)
    assert upper.low_dim == pytest.approx(8 * ((2 * math.log(2) + log) / (1000 / 64)) ** (1 / 6))
    lower = bounds.lower_bound(sigma, 20, 2)
    assert lower.subspace == pytest.approx(((20 + log) / (1000 / 16)) ** 0.25)
    assert lower.low_dim == pytest.approx(0.5 * (log / (1000 / 64)) ** (1 / 6))
    # In the plane the high-probability bound holds alone; on a line there is no subspace.
    assert bounds.lower_bound(sigma, 2, 2).subspace == pytest.approx((log / (1000 / 16)) ** 0.25)
    assert bounds.lower_bound(sigma, 1, 2).subspace == bounds.lower_bound(sigma, 3, 1).subspace == 0
    # Homogeneous: units do not matter.
    smaller = bounds.lower_bound(0.1 * sigma, 20, 3).low_dim
    assert smaller == pytest.approx(0.1 * bounds.lower_bound(sigma, 20, 3).low_dim)
    assert bounds.upper_bound_line(sigma, 3) == pytest.approx(9 * (1000 / 2**10) ** (-1 / 10))


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
    assert sum(bounds.upper_bound(sigma, 1, 2)) > np.quantile(errors, 0.95)
    assert bounds.upper_bound_line(sigma, 2) > np.quantile(errors, 0.75)
    assert bounds.upper_bound(sigma, 1, 2) == bounds.upper_bound(np.ones(1000), 1, 2)


def test_conditions_say_what_is_missing() -> None:
    good = bounds.upper_conditions(np.ones(1000), 20, 3)
    assert all(c.holds for c in good) and good[0].need == pytest.approx(20 + math.log(20))
    bad = bounds.upper_conditions([1.0, *[10.0] * 1000], 20, 3)
    assert [c.holds for c in bad] == [False, False, True] and bad[0].have == pytest.approx(1.1)
    assert "FAILS" in str(bad[0]) and "n_d" in str(bad[0])
    below = bounds.upper_conditions([1e-3, *[1.0] * 1000], 20, 3, radius=0.5)
    assert [c.holds for c in below] == [True, False, False] and below[1].have == pytest.approx(1 + 1000 / 2**10)
    lower = bounds.lower_conditions(np.full(1000, 2.0), 3, 2)
    assert lower[1].have == pytest.approx(1000 / 64) and lower[1].need == pytest.approx(8 * math.log(20))
    assert bounds.lower_conditions(np.full(1000, 0.5), 3, 2)[1].have == pytest.approx(1000)
    assert not bounds.lower_conditions([0.0, 1.0], 3, 2)[0].holds


@pytest.mark.parametrize(
    "call, key",
    [
        (lambda: bounds.upper_bound([1.0], 1, 0), "k"),
        (lambda: bounds.upper_bound([1.0], 0, 1), "num_features"),
        (lambda: bounds.upper_bound([1.0], 1, 1, 0.7), "delta"),
        (lambda: bounds.lower_bound([1.0], 3, 2, 0.3), "delta"),
        (lambda: bounds.upper_bound([-1.0], 1, 1), "sigma[0]"),
        (lambda: bounds.effective_sizes([1.0], 1, [0]), "count"),
        (lambda: lemmas.hard_packing(2, 50, 1.0, np.random.default_rng(0)), "num_members"),
    ],
)
def test_bad_questions_are_named(call, key: str) -> None:
    with rejected(key):
        call()


def test_second_moments_concentrate() -> None:
    """Lemmas "spec_conc_noise_term" and "cov_conc": at most 5% beyond a constant of 3, over three settings."""
    rng = np.random.default_rng(0)
    for d, levels, n in ((3, (1.0, 4.0), 400), (20, (1.0, 2.0), 2000), (40, (0.3, 1.0), 300)):
        sigma = np.repeat(levels, n // 2)
        alpha, ratios = sigma**-4.0 / (sigma**-4.0).sum(), []
        for _ in range(40):
            truth = random_mixture(rng, 3, d)
            g = rng.standard_normal((len(sigma), d))
            noise = np.linalg.norm((alpha[:, None] * g).T @ g - np.eye(d), 2)
            x = simulate(truth, sigma, rng)
            second = (truth.weights[:, None] * truth.atoms).T @ truth.atoms
            found = (alpha[:, None] * x).T @ x - (alpha @ sigma**2) * np.eye(d)
            error = np.linalg.norm(found - second, 2)
            bound = lemmas.noise_deviation(alpha, d, 0.05), lemmas.covariance_deviation(sigma, d, 3, 0.05)
            ratios.append([noise / bound[0], error / bound[1]])
        beyond = np.quantile(ratios, 0.95, axis=0)
        assert (beyond < 3).all() and (beyond > 0.1).all()  # neither violated nor far from the truth


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 8), st.floats(0, 2))
def test_projection_moves_atoms_little(seed: int, k: int, d: int, size: float) -> None:
    """Lemma "spec_norm_wass", for any symmetric estimate of the second moment."""
    rng = np.random.default_rng(seed)
    truth = random_mixture(rng, k, d)
    error = size * rng.normal(size=(d, d))
    estimate = (truth.weights[:, None] * truth.atoms).T @ truth.atoms + error + error.T
    num_dims = int(rng.integers(0, d + 1))
    top = np.linalg.eigh(estimate)[1][:, d - num_dims :]
    moved = wasserstein(truth, Atoms(truth.atoms @ top @ top.T, truth.weights))
    assert moved <= lemmas.projection_error(truth, estimate, num_dims) + 1e-9


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 3), st.integers(1, 4), st.floats(0.05, 0.5))
def test_a_candidate_is_near(seed: int, k: int, d: int, size: float) -> None:
    """Lemma "comp_disc_solution": within 2 d nu, for estimates of the marginals that are nu away."""
    rng = np.random.default_rng(seed)
    truth = random_mixture(rng, k, d)
    marginals = np.clip(truth.atoms.T + size * rng.normal(size=(d, k)), -1, 1)
    weights = [rng.dirichlet(20 * truth.weights + 0.1) for _ in range(d)]
    nu = max(wasserstein_line(truth.atoms[:, i], truth.weights, marginals[i], weights[i]) for i in range(d))
    net = simplex_net(k, max(nu / (2 * k - 2), 0.02))
    assume(np.abs(net - truth.weights).sum(1).min() <= nu)
    found = lemmas.nearest_candidate(truth, marginals, net)
    assert wasserstein(found, truth) <= 2 * d * nu + 1e-9
    assert all(found.atoms[j, i] in marginals[i] for i in range(d) for j in range(k))


@pytest.mark.parametrize("k, sigma", [(2, 1.0), (2, 2.0), (3, 1.0), (4, 1.5)])
def test_shared_moments_hide_a_pair(k: int, sigma: float) -> None:
    """Lemma "mm_chi_squared": chi^2 is below 4 times the bound, and falls with the same power of epsilon."""
    values = []
    for epsilon in (0.5, 0.25):
        chi_squared, kl = lemmas.divergences(*lemmas.hard_pair(k, epsilon), sigma)
        assert -1e-15 <= kl <= chi_squared + 1e-15 <= 4 * lemmas.chi_squared_bound(epsilon, 2 * k - 2, sigma)
        values.append(chi_squared)
    assert values[0] / values[1] == pytest.approx(2 ** (4 * k - 2), rel=0.3)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.05, 1), st.floats(1, 3), st.integers(2, 6))
def test_members_of_a_packing_are_alike(seed: int, scale: float, sigma: float, d: int) -> None:
    """Lemma "kl_hd_dist" with C = 2, for any two unit vectors."""
    u, v = np.random.default_rng(seed).normal(size=(2, d))
    u, v = u / np.linalg.norm(u), v / np.linalg.norm(v)
    first, second = (Atoms(scale * np.stack([w, -w]), np.full(2, 0.5)) for w in (u, v))
    kl = lemmas.divergences(first, second, sigma, 40)[1]
    assert -1e-12 <= kl <= 2 * lemmas.kl_bound(u, v, scale, sigma) + 1e-12


def test_divergences_are_those_of_gaussians() -> None:
    """Two single atoms a distance m apart: KL = m^2 / 2 and chi^2 = exp(m^2) - 1; TV obeys the inequality."""
    for m in (0.1, 1.0, 2.0):
        one, two = (Atoms(np.array([[a, 0.0, 1.0]]), np.ones(1)) for a in (0.0, 3 * m))
        chi_squared, kl = lemmas.divergences(one, two, 3.0)
        assert kl == pytest.approx(m**2 / 2) and chi_squared == pytest.approx(math.expm1(m**2), rel=1e-6)
        tv = 2 * norm.cdf(m / 2) - 1
        assert tv <= lemmas.bretagnolle_huber(kl)
    assert 1 - 0.5 * math.exp(kl) < 0 < tv  # as printed, with exp(+KL), the inequality is false
    same = Atoms(np.zeros((1, 2)), np.ones(1))
    assert lemmas.divergences(same, same) == (0, 0)


@pytest.mark.parametrize("delta", [0.2, 0.05])
def test_two_directions_in_the_plane_are_confused(delta: float) -> None:
    """Theorem "lb_hd_high_prob": at c = 1 even the best test errs with probability delta."""
    rng = np.random.default_rng(0)
    sigma = np.repeat([1.0, 2.0], [90, 210])
    scale = bounds.lower_bound(sigma, 2, 2, delta).subspace
    errors = []
    for _ in range(400):
        x = simulate(Atoms(scale * np.array([[1.0, 0.0], [-1.0, 0.0]]), np.full(2, 0.5)), sigma, rng)
        first, second = np.log(np.cosh(scale * x.T / sigma**2)).sum(1)
        errors.append(second >= first)
    assert np.mean(errors) >= delta
    pair = [Atoms(scale * np.stack([u, -u]), np.full(2, 0.5)) for u in np.eye(2)]
    assert wasserstein(*pair) / 2 >= 0.7 * scale  # an estimate is this far from one of them


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_hard_pairs_match_their_moments(k: int) -> None:
    one, two = lemmas.hard_pair(k, 0.5)
    for r in range(2 * k - 1):
        assert one.weights @ one.atoms**r == pytest.approx(two.weights @ two.atoms**r, abs=1e-14)
    last = [(p.weights * p.atoms ** (2 * k - 1)).sum() for p in (one, two)]
    assert abs(last[0] - last[1]) > 1e-5
    assert len(one.atoms) == len(two.atoms) == k and np.abs([one.atoms, two.atoms]).max() <= 0.5
    assert wasserstein(one, two) > 0.5 * 0.5 / k
    np.testing.assert_allclose(one.atoms, -two.atoms[::-1], atol=1e-15)
    np.testing.assert_allclose(one.weights, two.weights[::-1], atol=1e-12)


def test_packing_cannot_be_told_apart() -> None:
    """Members are s / 4 apart, and at the theorem's scale their samples are nearly of one likelihood."""
    rng = np.random.default_rng(0)
    d, sigma = 8, np.full(4000, 2.0)
    scale = 0.3 * (d / (sigma**-4).sum()) ** 0.25
    members = lemmas.hard_packing(d, 30, scale, rng)
    distances = [wasserstein(one, two) for i, one in enumerate(members) for two in members[:i]]
    assert min(distances) >= scale / 4 and len(members) == 30
    x = simulate(members[0], sigma, rng)

    def log_likelihood(member: Atoms) -> float:
        inner = x @ member.atoms[0] / sigma**2
        return float(np.log(np.cosh(inner)).sum())

    gains = [log_likelihood(members[0]) - log_likelihood(other) for other in members[1:]]
    assert np.mean(gains) < math.log(4) * (d - 1) / 2  # what Fano's inequality would need


def test_errors_at_all_scales_are_those_of_separate_experiments() -> None:
    """The shortcut through sums per atom gives the same distribution of errors as drawing samples anew."""
    shape, sigma = lemmas.hard_pair(2)[0], np.repeat([1.0, 1.5], [120, 280])
    rng = np.random.default_rng(0)
    quick = rates.line_errors(shape, np.array([0.5, 1.0]), sigma, 600, rng, 2.0)
    alpha = moment_weights(sigma, 2, 2.0)
    for column, scale in enumerate((0.5, 1.0)):
        truth = Atoms(scale * shape.atoms[:, None] / 2, shape.weights)
        draws = [simulate(truth, sigma / 2, rng)[:, 0] for _ in range(600)]
        moments = np.array([denoised_moments(x, sigma / 2, 3, alpha)[1:] for x in draws])
        atoms, mass = quadrature(project_moments(moments))
        slow = 2 * wasserstein_line(atoms, mass, truth.atoms[:, 0], truth.weights)
        error = math.hypot(quick[:, column].std(), slow.std()) / math.sqrt(600)
        assert abs(quick[:, column].mean() - slow.mean()) < 4 * error


def test_exponents_and_exchange_rate_follow_the_theory() -> None:
    """Within 20%, and a factor of 3 in the number of samples, which is 20% of error (3^(1/6))."""
    result = rates.measure_rates(rates.Config(sigma=1.6, clean_fraction=0.2, num_repeats=100))
    for curve, theory in zip(result.curves, [1 / 6, 1 / 6, 1 / 6, 1 / 2], strict=True):
        assert curve.power_law()[0] == pytest.approx(theory, rel=0.2) and curve.theory_slope == theory
    (row,) = result.exchanges
    assert row.theory == pytest.approx(1.6**6) and 1 / 3 < row.measured / row.theory < 3
    assert row.interval[0] < row.measured < row.interval[1] and not result.dimensions


def test_both_terms_are_measured_in_space() -> None:
    """The subspace's error grows like d^(1/4) and its exchange rate is sigma^4; inside it d does not matter."""
    config = rates.Config(sigma=1.5, num_features=8, num_samples=(500, 4000), num_repeats=4)
    result = rates.measure_rates(config)
    subspace, inside, _ = result.dimensions
    assert subspace.power_law()[0] == pytest.approx(-0.25, abs=0.1) and subspace.num_samples == [8, 16, 32, 64]
    assert abs(inside.power_law()[0]) < 0.3 and inside.theory_slope == 0
    assert [curve.theory_slope for curve in result.curves[:2]] == [0.25, 1 / 6] and len(result.curves) == 9
    low, high = result.curves[0].slope_interval()
    assert low < result.curves[0].power_law()[0] < high and low < 0.45
    measured = {row.term: row for row in result.exchanges}
    assert 0.3 < measured["subspace"].measured / 1.5**4 < 3
    assert measured["inside it"].theory == pytest.approx(1.5**6) and math.isnan(measured["together"].theory)


def test_draws_give_standard_errors_and_new_curves() -> None:
    rng = np.random.default_rng(0)
    draws = [scale * rng.gamma(4, size=(400, 3)) * [0.1, 1.0, 0.2] for scale in (2.0, 1.0)]
    curve = rates.Curve("c", [100, 1600], draws, 0.25)
    np.testing.assert_allclose(curve.error, [draw[:, 1].mean() for draw in draws])
    np.testing.assert_allclose(curve.standard_error, [draw[:, 1].std() / np.sqrt(399) for draw in draws])
    again = np.array([curve.redrawn(rng).error for _ in range(200)])
    np.testing.assert_allclose(again.std(0), curve.standard_error, rtol=0.2)
    assert curve.power_law()[0] == pytest.approx(0.25, abs=0.05)


def test_tables_and_figures_are_written(tmp_path, capsys) -> None:
    config = rates.Config(sigma=1.5, num_features=4, num_samples=(100, 400), num_repeats=2)
    rates.write(config, tmp_path, "rates.png", "rates.csv")
    assert "in theory 0.167" in capsys.readouterr().out and Image.open(tmp_path / "rates.png").width > 500
    rows = np.genfromtxt(tmp_path / "rates.csv", delimiter=",", skip_header=1)[:, 1:]
    assert rows.shape == (30, 3) and (rows > 0).all()
