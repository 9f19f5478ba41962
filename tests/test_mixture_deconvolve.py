"""Components under any noise: densities, steps, posterior means and standard errors, against closed forms."""

import numpy as np
import pytest
from scipy.special import logsumexp
from scipy.stats import multivariate_normal

from assay.mixture.deconvolve import _step, deconvolve, log_joint, posterior_means, scores, standard_errors
from assay.mixture.likelihood import _gather, log_likelihood, polish
from assay.mixture.moments import Atoms
from assay.mixture.noise import Noise, along_axes, make_noise
from tests.mixtures import KINDS, add_noise


def instance(seed: int, n: int, kind: str, spread: bool) -> tuple[np.ndarray, Noise, Atoms]:
    """Two components in two dimensions, seen through noise of this kind."""
    rng = np.random.default_rng(seed)
    means = np.array([[-2.0, 0.0], [1.0, 1.5]])
    covariances = np.array([[[1.0, 0.6], [0.6, 0.8]], [[0.3, -0.1], [-0.1, 0.5]]]) * spread
    truth = Atoms(means, np.array([0.6, 0.4]), covariances if spread else None)
    label = rng.choice(2, n, p=truth.weights)
    root = np.linalg.cholesky(covariances + 1e-12 * np.eye(2))
    y = means[label] + np.einsum("nab,nb->na", root[label], rng.normal(size=(n, 2)))
    x, sigma = add_noise(y, kind, rng)
    return np.nan_to_num(x), make_noise(sigma, 2, 0.0), truth


def observed(noise: Noise, i: int) -> np.ndarray:
    return np.flatnonzero(noise.axis_precision()[i] > 0)


@pytest.mark.parametrize("kind", [*KINDS, "missing"])
@pytest.mark.parametrize("spread", [True, False])
def test_densities_and_posterior_means_are_those_of_gaussians(kind: str, spread: bool) -> None:
    x, noise, truth = instance(0, 40, kind, spread)
    joint, denoised = log_joint(x, noise, truth), posterior_means(x, noise, truth)
    for i in range(len(x)):
        seen = observed(noise, i)
        own = np.linalg.inv(noise.matrices()[i][np.ix_(seen, seen)])
        means, total = [], []
        spreads = np.zeros((2, 2, 2)) if truth.covariances is None else truth.covariances
        for weight, mean, covariance in zip(truth.weights, truth.atoms, spreads, strict=True):
            both = covariance[np.ix_(seen, seen)] + own
            total.append(np.log(weight) + multivariate_normal(mean[seen], both).logpdf(x[i, seen]))
            means.append(mean + covariance[:, seen] @ np.linalg.solve(both, x[i, seen] - mean[seen]))
        np.testing.assert_allclose(joint[i], total, rtol=1e-9)
        np.testing.assert_allclose(denoised[i], np.exp(total - logsumexp(total)) @ means, atol=1e-9)


@pytest.mark.parametrize("kind", [*KINDS, "missing"])
@pytest.mark.parametrize("spread", [True, False])
def test_every_step_raises_the_likelihood_and_the_end_is_a_maximum(kind: str, spread: bool) -> None:
    x, noise, truth = instance(1, 800, kind, spread)
    now, heights = Atoms(truth.atoms + 0.5, np.full(2, 0.5), truth.covariances), []
    for _ in range(15):
        if spread:
            now, height = _step(x, noise, now)
        else:
            here = _gather(x, noise, now)
            now, height = here.em, here.log_likelihood
        heights.append(height)
    assert (np.diff(heights) > -1e-9).all()
    found = deconvolve(x, noise, now)[0] if spread else polish(x, noise, now)
    reached = logsumexp(log_joint(x, noise, found), axis=1).sum()
    assert reached >= heights[-1] - 1e-9 and (
        spread or reached == pytest.approx(log_likelihood(x, noise, found))
    )
    gradient = scores(x, noise, found).sum(0)
    deviation = np.sqrt((scores(x, noise, found) ** 2).sum(0))
    assert (np.abs(gradient) < 0.1 * deviation).all()


@pytest.mark.parametrize("kind", [*KINDS, "missing"])
def test_scores_are_the_derivatives(kind: str) -> None:
    x, noise, truth = instance(2, 60, kind, True)

    def height(weights: np.ndarray, means: np.ndarray, covariances: np.ndarray) -> float:
        weights = np.exp(weights) / np.exp(weights).sum()
        return float(logsumexp(log_joint(x, noise, Atoms(means, weights, covariances)), axis=1).sum())

    at = np.log(truth.weights), truth.atoms, truth.covariances
    found, numeric, step = scores(x, noise, truth).sum(0), [], 1e-5

    def slope(which: int, *entries: tuple[int, ...]) -> None:
        ends = []
        for sign in (1, -1):
            moved = [part.copy() for part in at]
            for entry in entries:
                moved[which][entry] += sign * step
            ends.append(height(*moved))
        numeric.append((ends[0] - ends[1]) / (2 * step))

    for j in range(2):
        slope(1, (j, 0))
        slope(1, (j, 1))
        slope(0, (j,))
    for j in range(2):
        slope(2, (j, 0, 0))
        slope(2, (j, 0, 1), (j, 1, 0))
        slope(2, (j, 1, 1))
    np.testing.assert_allclose(found, numeric, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind, spread", [("isotropic", False), ("missing", True)])
def test_standard_errors_are_the_spread_of_repeated_fits(kind: str, spread: bool) -> None:
    fits, claims = [], []
    for seed in range(40):
        x, noise, truth = instance(100 + seed, 600, kind, spread)
        found = deconvolve(x, noise, truth)[0] if spread else polish(x, noise, truth)
        fits.append(np.column_stack([found.atoms, found.weights]))
        means, weights = standard_errors(x, noise, found)
        claims.append(np.column_stack([means, weights]))
    np.testing.assert_allclose(np.mean(claims, 0), np.std(fits, 0), rtol=0.4)


def test_nothing_is_known_of_a_coordinate_that_no_sample_observed() -> None:
    rng = np.random.default_rng(0)
    noise = along_axes(np.column_stack([np.ones(50), np.full(50, np.inf)]))
    x = np.column_stack([rng.normal(size=50), np.zeros(50)])
    means, _ = standard_errors(x, noise, Atoms(np.zeros((1, 2)), np.ones(1)))
    assert means[0, 0] == pytest.approx(1 / np.sqrt((x[:, 0] ** 2).sum())) and np.isinf(means[0, 1])
