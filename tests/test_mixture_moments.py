"""Denoised moments, the moment space and quadrature, against closed forms and a general solver."""

import itertools
import math

import cvxpy
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.polynomial.hermite_e import hermegauss

from assay.mixture.moments import (
    denoised_moments,
    hermite,
    hermite_variance,
    inverse_weights,
    moment_constraints,
    moment_weights,
    project_moments,
    quadrature,
)

INTERVALS = [(-1.0, 1.0), (0.0, 1.0), (-2.0, 3.0)]


def moments_of(atoms: np.ndarray, weights: np.ndarray, order: int) -> np.ndarray:
    return np.array([(weights * atoms**r).sum() for r in range(1, order + 1)])


def random_mixture(rng: np.random.Generator, k: int, interval: tuple[float, float] = (-1.0, 1.0)):
    return np.sort(rng.uniform(*interval, k)), rng.dirichlet(np.ones(k))


def test_hermite_is_the_explicit_sum() -> None:
    x, sigma = np.linspace(-3, 3, 7), np.linspace(0.1, 2, 7)
    values = hermite(x, sigma**2, 9)
    for r in range(10):
        terms = [
            math.factorial(r) * (-0.5) ** j / (math.factorial(j) * math.factorial(r - 2 * j))
            * sigma ** (2 * j) * x ** (r - 2 * j)
            for j in range(r // 2 + 1)
        ]  # fmt: skip
        np.testing.assert_allclose(values[r], np.sum(terms, 0), rtol=1e-10, atol=1e-10)


def test_hermite_denoises_exactly() -> None:
    """E gamma_r(mu + sigma g) = mu^r and E gamma_r^2 is the variance formula, by Gauss-Hermite quadrature."""
    nodes, mass = hermegauss(40)
    mass = mass / mass.sum()
    mu, sigma = 0.7, 1.3
    values = hermite(mu + sigma * nodes, np.full(40, sigma**2), 7)
    np.testing.assert_allclose(values @ mass, mu ** np.arange(8), rtol=1e-9)
    expected = [hermite_variance(r, np.array([sigma**2]), mu)[0] for r in range(8)]
    np.testing.assert_allclose(values**2 @ mass, expected, rtol=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_moments_are_unbiased_for_mixed_noise(seed: int) -> None:
    rng = np.random.default_rng(seed)
    atoms, weights = np.array([-1.0, 0.2, 0.8]), np.array([0.3, 0.5, 0.2])
    sigma = rng.choice([0.3, 1.0, 2.5], 200_000)
    x = rng.choice(atoms, len(sigma), p=weights) + sigma * rng.standard_normal(len(sigma))
    alpha = moment_weights(sigma, 3, 1.0)
    found = denoised_moments(x, sigma, 5, alpha)
    standard_error = np.sqrt(((hermite(x, sigma**2, 5) - found[:, None]) ** 2) @ alpha**2)
    assert (np.abs(found[1:] - moments_of(atoms, weights, 5)) < 4 * standard_error[1:]).all()


@given(
    st.lists(st.one_of(st.just(0.0), st.floats(0.01, 100)), min_size=1, max_size=20),
    st.integers(1, 4),
    st.floats(0.1, 10),
    st.floats(1, 1000),
)
def test_one_more_sample_lowers_the_variance_bound(
    levels: list[float], k: int, radius: float, caution: float
) -> None:
    """alpha_i ~ 1 / v_i minimises sum alpha_i^2 v_i, at 1 / sum 1 / v_i, which falls with every sample."""

    def bound(sigma: np.ndarray) -> float:
        spread = radius ** (4 * k - 2)
        variance = spread + caution * (hermite_variance(2 * k - 1, sigma**2, radius) - spread)
        alpha = moment_weights(sigma, k, radius, caution)
        assert alpha.sum() == pytest.approx(1) and (np.diff(alpha[np.argsort(sigma)]) <= 1e-15).all()
        assert alpha**2 @ variance == pytest.approx(1 / (1 / variance).sum())
        return float(alpha**2 @ variance)

    sigma = np.array(levels)
    assert bound(np.append(sigma, 1.0)) < bound(sigma) * (1 + 1e-9)


def test_weights_are_those_of_the_paper_far_above_the_radius() -> None:
    sigma = np.array([1.0, 1.3, 2.0])
    for k in (2, 3):
        expected = sigma ** -(4.0 * k - 2)
        np.testing.assert_allclose(moment_weights(sigma, k, 1e-3), expected / expected.sum(), rtol=1e-4)
        np.testing.assert_allclose(moment_weights(1e-4 * sigma, k, 1.0), 1 / 3, rtol=1e-5)
    assert inverse_weights(np.array([0.0, 0.0, 1.0])).tolist() == [0.5, 0.5, 0.0]


def test_streaming_gives_the_same_sums(tmp_path) -> None:
    rng = np.random.default_rng(1)
    x, sigma = rng.normal(size=(10_000, 2)).astype(np.float32), rng.uniform(0.5, 2, 10_000)
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    whole = denoised_moments(mapped, sigma, 5, sigma**-6)
    direct = hermite(x.T.astype(float), sigma**2, 5) @ (sigma**-6 / (sigma**-6).sum())
    np.testing.assert_allclose(whole, direct, rtol=1e-10)
    assert whole.shape == (6, 2) and (whole[0] == 1).all()
    directions = np.array([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]])
    along = denoised_moments(mapped, sigma, 5, sigma**-6, directions)
    np.testing.assert_allclose(along[:, [0, 2]], whole, rtol=1e-10)
    by_hand = denoised_moments(x.astype(float) @ directions[1], sigma, 5, sigma**-6)
    np.testing.assert_allclose(along[:, 1], by_hand, rtol=1e-10)


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("interval", INTERVALS)
def test_exact_moments_give_back_atoms_and_weights(k: int, interval: tuple[float, float]) -> None:
    rng = np.random.default_rng(k)
    a, b = interval
    atoms = a + (b - a) * (np.arange(k) + 0.5 + rng.uniform(-0.2, 0.2, k)) / k
    weights = rng.dirichlet(np.full(k, 5.0))
    found = quadrature(project_moments(moments_of(atoms, weights, 2 * k - 1), interval), interval)
    np.testing.assert_allclose(found[0], atoms, atol=1e-8)
    np.testing.assert_allclose(found[1], weights, atol=1e-8)


@pytest.mark.parametrize("k", [2, 3, 4, 5])
@pytest.mark.parametrize("fewer", [1, 2])
def test_quadrature_of_fewer_atoms(k: int, fewer: int) -> None:
    atoms, weights = np.array([-0.4, 0.7])[:fewer], np.array([0.35, 0.65])[:fewer]
    weights = weights / weights.sum()
    moments = moments_of(atoms, weights, 2 * k - 1)
    places, mass = quadrature(project_moments(moments))
    kept = mass > 1e-6
    merged = [mass[np.abs(places - atom) < 1e-5].sum() for atom in atoms]
    assert np.abs(places[kept][:, None] - atoms).min(1).max() < 1e-5
    np.testing.assert_allclose(merged, weights, atol=1e-6)
    np.testing.assert_allclose(moments_of(places, mass, 2 * k - 1), moments, atol=1e-9)


def reference_projection(target: np.ndarray, interval: tuple[float, float]) -> np.ndarray:
    """The same problem in plain Hankel matrices, as the paper prints it (plus its missing a), by Clarabel."""
    a, b = interval
    order = len(target)
    m = cvxpy.Variable(order)
    full = cvxpy.hstack([np.ones(1), m])

    def hankel(i: int, j: int) -> cvxpy.Expression:
        size = (j - i) // 2 + 1
        return cvxpy.bmat([[full[i + p + q] for q in range(size)] for p in range(size)])

    if order % 2:
        cones = [b * hankel(0, order - 1) - hankel(1, order), hankel(1, order) - a * hankel(0, order - 1)]
    else:
        inner = (a + b) * hankel(1, order - 1) - a * b * hankel(0, order - 2) - hankel(2, order)
        cones = [hankel(0, order), inner]
    problem = cvxpy.Problem(cvxpy.Minimize(cvxpy.sum_squares(m - target)), [cone >> 0 for cone in cones])
    problem.solve(solver="CLARABEL")
    return np.asarray(m.value)


@pytest.mark.parametrize("order", [2, 3, 4, 5, 7])
@pytest.mark.parametrize("interval", INTERVALS)
def test_projection_agrees_with_a_general_solver(order: int, interval: tuple[float, float]) -> None:
    rng = np.random.default_rng(order)
    scale = max(abs(end) for end in interval) ** np.arange(1, order + 1)
    for _ in range(3):
        target = moments_of(*random_mixture(rng, 3, interval), order) + 0.1 * scale * rng.normal(size=order)
        found, expected = project_moments(target, interval), reference_projection(target, interval)
        np.testing.assert_allclose(found / scale, expected / scale, atol=2e-4)
        distance = np.linalg.norm(found - target)
        assert distance <= np.linalg.norm(expected - target) * (1 + 1e-6) + 1e-9


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.floats(0.001, 1.0))
def test_projection_is_the_nearest_valid_vector(seed: int, k: int, size: float) -> None:
    """p is the projection of t onto a convex set iff <t - p, q - p> <= 0 for every q in the set."""
    rng = np.random.default_rng(seed)
    order = 2 * k - 1
    target = moments_of(*random_mixture(rng, k), order) + size * rng.normal(size=order)
    found = project_moments(target)
    valid = np.array([moments_of(*random_mixture(rng, k + 1), order) for _ in range(100)])
    assert ((valid - found) @ (target - found)).max() < 1e-6 * max(1, size)
    for stack in moment_constraints(order, (-1.0, 1.0)):
        assert np.linalg.eigvalsh(stack[0] + np.tensordot(found, stack[1:], 1))[0] > -1e-9
    atoms, weights = quadrature(found)
    np.testing.assert_allclose(moments_of(atoms, weights, order), found, atol=1e-5)


def test_projection_leaves_valid_moments_alone_and_works_in_batches() -> None:
    rng = np.random.default_rng(0)
    valid = np.array([moments_of(*random_mixture(rng, 4), 5) for _ in range(10)])
    np.testing.assert_array_equal(project_moments(valid), valid)
    targets = rng.normal(size=(4, 3, 5))
    batch = project_moments(targets)
    for i, j in itertools.product(range(4), range(3)):
        np.testing.assert_allclose(batch[i, j], project_moments(targets[i, j]), atol=1e-6)


@pytest.mark.parametrize("order", [2, 3, 4, 5])
def test_constraints_hold_inside_and_fail_outside(order: int) -> None:
    """(MOM-CHAR) on [0.5, 2]: without the factor a, valid distributions near a would be refused."""
    rng = np.random.default_rng(order)

    def margin(atoms: np.ndarray, weights: np.ndarray) -> float:
        moments = moments_of(atoms, weights, order)
        cones = [s[0] + np.tensordot(moments, s[1:], 1) for s in moment_constraints(order, (0.5, 2.0))]
        return min(np.linalg.eigvalsh(cone)[0] for cone in cones)

    assert all(margin(*random_mixture(rng, 5, (0.5, 2.0))) > -1e-10 for _ in range(50))
    assert margin(np.array([0.55]), np.ones(1)) > -1e-10
    assert margin(np.array([0.4]), np.ones(1)) < -1e-3
    assert margin(np.array([2.1]), np.ones(1)) < -1e-3
