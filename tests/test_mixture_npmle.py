"""The nonparametric maximum likelihood estimate: against a general solver, its certificate, awkward noise."""

import math

import cvxpy
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import multivariate_normal

from assay.mixture.moments import Atoms
from assay.mixture.noise import Noise, along_axes, isotropic, make_noise, read_sigma, with_covariance
from assay.mixture.npmle import _grid_scores, _Samples, default_axes, npmle
from tests.errors import rejected
from tests.mixtures import KINDS, add_noise


def densities(x: np.ndarray, noise: Noise, places: np.ndarray) -> np.ndarray:
    return np.exp(noise.features(x) @ noise.places(places).T + noise.constant[:, None])


def log_likelihood(x: np.ndarray, noise: Noise, mixture: Atoms) -> float:
    return float(np.log(densities(x, noise, mixture.atoms) @ mixture.weights).sum())


def points(axes: list[np.ndarray]) -> np.ndarray:
    return np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, len(axes))


def instance(seed: int, n: int, d: int, kind: str = "isotropic") -> tuple[np.ndarray, Noise]:
    rng = np.random.default_rng(seed)
    x, sigma = add_noise(2 * rng.normal(size=(4, d))[rng.integers(4, size=n)], kind, rng)
    return x, make_noise(sigma, d, 0.0)


# noise -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [1, 2, 3])
def test_one_product_gives_every_density(d: int) -> None:
    rng = np.random.default_rng(d)
    for kind in KINDS:
        x, noise = instance(d, 20, d, kind)
        places = rng.normal(size=(5, d))
        covariance = np.linalg.inv(noise.matrices())
        expected = [
            [multivariate_normal(mu, c).pdf(row) for mu in places] for row, c in zip(x, covariance, strict=True)
        ]
        np.testing.assert_allclose(densities(x, noise, places), expected, rtol=1e-9)
        step = 1e-6 * np.eye(d)
        slopes = [(noise.places(places + e) - noise.places(places - e)) / 2e-6 for e in step]
        np.testing.assert_allclose(noise.slopes(places), np.stack(slopes, -1), atol=1e-7)


def test_a_missing_coordinate_is_left_out() -> None:
    rng = np.random.default_rng(0)
    x, mu = rng.normal(size=(1, 3)), rng.normal(size=(1, 3))
    covariance = np.array([[2.0, 0.3, 0.7], [0.3, 1.0, 0.1], [0.7, 0.1, 0.5]])
    expected = multivariate_normal(mu[0, [0, 2]], covariance[np.ix_([0, 2], [0, 2])]).pdf(x[0, [0, 2]])
    covariance[1, 1] = np.inf
    assert densities(x, with_covariance(covariance[None]), mu)[0, 0] == pytest.approx(expected)
    axes = along_axes(np.array([[1.0, np.inf, 2.0]]))
    product = multivariate_normal(mu[0, [0, 2]], np.diag([1.0, 4.0])).pdf(x[0, [0, 2]])
    assert densities(x, axes, mu)[0, 0] == pytest.approx(product)


@pytest.mark.parametrize(
    "sigma, shape",
    [
        (0.5, (4,)),
        (np.full((4, 2), 0.5), (4,)),
        (np.full((4, 2), 0.5) * [1, 2], (4, 2)),
        (np.tile(np.eye(2), (4, 1, 1)), (4, 2, 2)),
    ],
)
def test_noise_in_every_form(sigma, shape: tuple[int, ...]) -> None:
    read = read_sigma(sigma, 4, 2)
    assert read.shape == shape
    assert np.isfinite(make_noise(0 * read, 2, 0.1).precision).all()


@pytest.mark.parametrize(
    "sigma, key",
    [
        (np.ones(3), "sigma"),
        (np.ones((4, 3)), "sigma"),
        (-np.ones((4, 2)), "sigma[0]"),
        (np.where(np.arange(8).reshape(4, 2) == 5, np.nan, 1.0), "sigma[2]"),
        (np.where(np.arange(4)[:, None] == 1, np.inf, [1.0, 2.0]), "sigma[1]"),
        (np.array([[1.0, 2.0], [1.0, 1e200], [1.0, 1.0], [1.0, 1.0]]), "sigma[1]"),
        (np.tile([[1.0, 2.0], [2.0, 1.0]], (4, 1, 1)), "sigma[0]"),  # a negative eigenvalue
        (np.tile([[1.0, 0.5], [0.2, 1.0]], (4, 1, 1)), "sigma[0]"),  # not symmetric
    ],
)
def test_what_is_no_noise_is_named(sigma, key: str) -> None:
    with rejected(key):
        read_sigma(sigma, 4, 2)


# the estimate ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("d, count", [(1, 40), (2, 9)])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_on_a_grid_are_those_of_a_general_solver(d: int, count: int, kind: str) -> None:
    x, noise = instance(d, 300, d, kind)
    axes = [np.linspace(column.min(), column.max(), count) for column in x.T]
    ours = npmle(x, noise, axes, free=False)
    table = densities(x, noise, points(axes))
    weights = cvxpy.Variable(count**d, nonneg=True)
    problem = cvxpy.Problem(cvxpy.Maximize(cvxpy.sum(cvxpy.log(table @ weights))), [cvxpy.sum(weights) == 1])
    problem.solve(solver="CLARABEL")
    assert ours.log_likelihood == pytest.approx(log_likelihood(x, noise, ours.mixture), abs=1e-6)
    assert problem.value - 1e-3 <= ours.log_likelihood <= problem.value + ours.gap + 1e-3
    assert ours.gap <= 1e-6 * len(x) and ours.num_places == count**d
    score = (table / (densities(x, noise, ours.mixture.atoms) @ ours.mixture.weights)[:, None]).sum(0)
    assert len(x) * math.log(score.max() / len(x)) == pytest.approx(ours.gap, abs=1e-7 * len(x))


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3), st.sampled_from(KINDS))
def test_no_mixture_is_more_likely_than_the_certificate_allows(seed: int, d: int, kind: str) -> None:
    """Free atoms beat the grid, and nothing near them beats them by more than the gap."""
    x, noise = instance(seed, 150, d, kind)
    axes = default_axes(x, noise, 400)
    fixed, free = npmle(x, noise, axes, free=False), npmle(x, noise, axes)
    assert free.log_likelihood >= fixed.log_likelihood - free.gap - 1e-6
    assert free.gap <= 1e-6 * len(x) + 1e-12 and free.mixture.weights.sum() == pytest.approx(1)
    rng = np.random.default_rng(seed)
    for _ in range(20):
        moved = free.mixture.atoms + rng.choice([0.001, 0.03, 1.0]) * rng.normal(size=free.mixture.atoms.shape)
        weights = rng.dirichlet(50 * free.mixture.weights + 0.1)
        assert (
            log_likelihood(x, noise, Atoms(moved, weights)) <= free.log_likelihood + free.gap_everywhere + 1e-6
        )
    assert free.gap_everywhere >= free.gap


def test_gap_everywhere_is_small_on_a_line_and_holds_between_the_places() -> None:
    x, noise = instance(5, 2000, 1)
    found = npmle(x, noise)
    assert found.gap_everywhere < 1e-4 * len(x)
    fine = np.linspace(x.min(), x.max(), 100_000)[:, None]
    inverse = 1 / (densities(x, noise, found.mixture.atoms) @ found.mixture.weights)
    largest = max((inverse @ densities(x, noise, part)).max() for part in np.array_split(fine, 50))
    assert len(x) * math.log(largest / len(x)) <= found.gap_everywhere
    coarse = npmle(x, noise, [np.linspace(x.min(), x.max(), 20)])
    assert coarse.gap_everywhere > found.gap_everywhere


@pytest.mark.parametrize("d, kind", [(1, "isotropic"), (2, "axes"), (3, "isotropic"), (2, "covariance")])
def test_scores_on_the_grid_are_sums_over_samples(d: int, kind: str) -> None:
    """A spline on a line, products of axes in space, against the definition, noise of three decades."""
    x, noise = instance(d, 200, d, kind)
    if d == 1:
        sigma = np.geomspace(0.01, 10, 200)
        noise = isotropic(sigma, 1)
    axes = default_axes(x, noise, 8000 if d == 1 else 500)
    log_density = np.random.default_rng(0).normal(size=len(x)) - 5
    found = _grid_scores(_Samples(x, noise, noise.features(x)), log_density, axes)
    exponent = noise.features(x) @ noise.places(points(axes)).T - log_density[:, None]
    np.testing.assert_allclose(found.ravel(), np.exp(exponent).mean(0), rtol=1e-8, atol=1e-8)


def test_samples_of_extreme_noise() -> None:
    """One sample next to no noise, one that is all noise, and equal samples."""
    rng = np.random.default_rng(2)
    sigma = np.r_[1e-3, np.ones(200), 1e9]
    x = np.r_[0.5, rng.normal(size=200), 1e9][:, None]
    found = npmle(x, isotropic(sigma, 1))
    assert found.gap <= 1e-6 * len(x) and np.abs(found.mixture.atoms).max() < 10
    assert np.abs(found.mixture.atoms - 0.5).min() < 0.01
    same = npmle(np.full((50, 2), 3.0), isotropic(np.ones(50), 2))
    np.testing.assert_allclose(same.mixture.weights @ same.mixture.atoms, [3, 3], atol=1e-3)


@pytest.mark.parametrize("axes, d", [(None, 4), ([np.arange(5.0)], 2), ([np.array([1.0, 0.0])], 1)])
def test_bad_grids_are_named(axes, d: int) -> None:
    with rejected("axes"):
        npmle(np.zeros((5, d)), isotropic(np.ones(5), d), axes)
