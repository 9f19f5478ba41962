"""The nonparametric maximum likelihood estimate: against a general solver, its certificate, awkward noise."""

import math

import cvxpy
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import multivariate_normal

from assay.mixture.likelihood import log_constant, place_vectors, sample_vectors
from assay.mixture.moments import Atoms
from assay.mixture.npmle import _grid_scores, grid_axes, npmle
from tests.errors import rejected


def densities(x: np.ndarray, sigma: np.ndarray, places: np.ndarray) -> np.ndarray:
    return np.exp(sample_vectors(x, sigma) @ place_vectors(places).T + log_constant(sigma, x.shape[1])[:, None])


def log_likelihood(x: np.ndarray, sigma: np.ndarray, mixture: Atoms) -> float:
    return float(np.log(densities(x, sigma, mixture.atoms) @ mixture.weights).sum())


def points(axes: list[np.ndarray]) -> np.ndarray:
    return np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, len(axes))


def instance(seed: int, n: int, d: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    y, sigma = 2 * rng.normal(size=(4, d))[rng.integers(4, size=n)], rng.uniform(0.3, 1.3, n)
    return y + sigma[:, None] * rng.normal(size=(n, d)), sigma


@pytest.mark.parametrize("d", [1, 3])
def test_one_product_gives_every_density(d: int) -> None:
    x, sigma = instance(d, 20, d)
    places = np.random.default_rng(d).normal(size=(5, d))
    pairs = zip(x, sigma, strict=True)
    expected = [[multivariate_normal(mu, s**2).pdf(row) for mu in places] for row, s in pairs]
    np.testing.assert_allclose(densities(x, sigma, places), expected, rtol=1e-9)


@pytest.mark.parametrize("d, count", [(1, 40), (2, 9)])
def test_weights_on_a_grid_are_those_of_a_general_solver(d: int, count: int) -> None:
    x, sigma = instance(d, 300, d)
    ours = npmle(x, sigma, count**d, free=False)
    table = densities(x, sigma, points([np.linspace(column.min(), column.max(), count) for column in x.T]))
    weights = cvxpy.Variable(count**d, nonneg=True)
    problem = cvxpy.Problem(cvxpy.Maximize(cvxpy.sum(cvxpy.log(table @ weights))), [cvxpy.sum(weights) == 1])
    problem.solve(solver="CLARABEL")
    assert ours.log_likelihood == pytest.approx(log_likelihood(x, sigma, ours.mixture), abs=1e-6)
    assert problem.value - 1e-3 <= ours.log_likelihood <= problem.value + ours.gap + 1e-3
    assert ours.gap <= 1e-6 * len(x)
    score = (table / (densities(x, sigma, ours.mixture.atoms) @ ours.mixture.weights)[:, None]).sum(0)
    assert len(x) * math.log(score.max() / len(x)) == pytest.approx(ours.gap, abs=1e-7 * len(x))


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3))
def test_no_mixture_is_more_likely_than_the_certificate_allows(seed: int, d: int) -> None:
    """Free atoms beat the grid, and nothing near them beats them by more than the gap."""
    x, sigma = instance(seed, 150, d)
    fixed, free = npmle(x, sigma, 400, free=False), npmle(x, sigma, 400)
    assert free.log_likelihood >= fixed.log_likelihood - free.gap - 1e-6
    assert free.gap <= 1e-6 * len(x) + 1e-12 and free.mixture.weights.sum() == pytest.approx(1)
    rng, highest = np.random.default_rng(seed), free.log_likelihood + free.gap_everywhere + 1e-6
    for _ in range(20):
        moved = free.mixture.atoms + rng.choice([0.001, 0.03, 1.0]) * rng.normal(size=free.mixture.atoms.shape)
        weights = rng.dirichlet(50 * free.mixture.weights + 0.1)
        assert log_likelihood(x, sigma, Atoms(moved, weights)) <= highest
    assert free.gap_everywhere >= free.gap


def test_gap_everywhere_is_small_on_a_line_and_holds_between_the_places() -> None:
    x, sigma = instance(5, 2000, 1)
    found = npmle(x, sigma)
    assert found.gap_everywhere < 1e-4 * len(x)
    fine = np.linspace(x.min(), x.max(), 100_000)[:, None]
    inverse = 1 / (densities(x, sigma, found.mixture.atoms) @ found.mixture.weights)
    largest = max((inverse @ densities(x, sigma, part)).max() for part in np.array_split(fine, 50))
    assert len(x) * math.log(largest / len(x)) <= found.gap_everywhere
    assert npmle(x, sigma, 20).gap_everywhere > found.gap_everywhere


@pytest.mark.parametrize("d", [1, 2, 3])
def test_scores_on_the_grid_are_sums_over_samples(d: int) -> None:
    """A spline on a line, products of axes in space, against the definition, noise of three decades."""
    x, sigma = instance(d, 200, d)
    sigma = np.geomspace(0.01, 10, 200) if d == 1 else sigma
    axes = grid_axes(x, sigma, 8000 if d == 1 else 500)
    log_density = np.random.default_rng(0).normal(size=len(x)) - 5
    found = _grid_scores(sample_vectors(x, sigma), log_density, axes)
    exponent = -(((x[:, None] - points(axes)) / sigma[:, None, None]) ** 2).sum(-1) / 2 - log_density[:, None]
    np.testing.assert_allclose(found.ravel(), np.exp(exponent).mean(0), rtol=1e-8, atol=1e-8)


def test_samples_of_extreme_noise() -> None:
    """One sample next to no noise, one that is all noise, and equal samples."""
    rng = np.random.default_rng(2)
    sigma = np.r_[1e-3, np.ones(200), 1e9]
    x = np.r_[0.5, rng.normal(size=200), 1e9][:, None]
    found = npmle(x, sigma)
    assert found.gap <= 1e-6 * len(x) and np.abs(found.mixture.atoms).max() < 10
    assert np.abs(found.mixture.atoms - 0.5).min() < 0.01
    same = npmle(np.full((50, 2), 3.0), np.ones(50))
    np.testing.assert_allclose(same.mixture.weights @ same.mixture.atoms, [3, 3], atol=1e-3)
    with rejected("X"):  # a grid in 4 dimensions
        npmle(np.zeros((5, 4)), np.ones(5))
