"""Components under any noise: densities, steps, posterior means and standard errors, against closed forms."""

import numpy as np
import pytest
from scipy.special import logsumexp
from scipy.stats import multivariate_normal

from assay.mixture.deconvolve import (
    Components,
    _step,
    deconvolve,
    log_joint,
    posterior_means,
    scores,
    standard_errors,
)
from assay.mixture.noise import Noise, along_axes, isotropic, with_covariance

KINDS = ["isotropic", "axes", "covariance"]


def instance(seed: int, n: int, kind: str, spread: bool) -> tuple[np.ndarray, Noise, Components]:
    """Two components in two dimensions, seen through noise of this kind."""
    rng = np.random.default_rng(seed)
    means = np.array([[-2.0, 0.0], [1.0, 1.5]])
    covariances = np.array([[[1.0, 0.6], [0.6, 0.8]], [[0.3, -0.1], [-0.1, 0.5]]]) * spread
    truth = Components(np.array([0.6, 0.4]), means, covariances if spread else None)
    label = rng.choice(2, n, p=truth.weights)
    root = np.linalg.cholesky(covariances + 1e-12 * np.eye(2))
    y = means[label] + np.einsum("nab,nb->na", root[label], rng.normal(size=(n, 2)))
    if kind == "isotropic":
        sigma = rng.uniform(0.3, 1.5, n)
        return y + sigma[:, None] * rng.normal(size=(n, 2)), isotropic(sigma, 2), truth
    if kind == "axes":
        sigma = rng.uniform(0.3, 1.5, (n, 2))
        x = y + sigma * rng.normal(size=(n, 2))
        missing = rng.random((n, 2)) < [0.2, 0.0]
        return np.where(missing, 0, x), along_axes(np.where(missing, np.inf, sigma)), truth
    half = rng.normal(size=(n, 2, 2)) / 2
    covariance = half @ half.swapaxes(1, 2) + 0.1 * np.eye(2)
    noise = np.einsum("nab,nb->na", np.linalg.cholesky(covariance), rng.normal(size=(n, 2)))
    return y + noise, with_covariance(covariance), truth


def observed(noise: Noise, i: int) -> np.ndarray:
    return np.flatnonzero(noise.axis_precision()[i] > 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spread", [True, False])
def test_densities_and_posterior_means_are_those_of_gaussians(kind: str, spread: bool) -> None:
    x, noise, truth = instance(0, 40, kind, spread)
    joint, denoised = log_joint(x, noise, truth), posterior_means(x, noise, truth)
    for i in range(len(x)):
        seen = observed(noise, i)
        own = np.linalg.inv(noise.matrices()[i][np.ix_(seen, seen)])
        means, total = [], []
        for weight, mean, own_spread in truth.parts():
            covariance = np.zeros((2, 2)) if own_spread is None else own_spread
            both = covariance[np.ix_(seen, seen)] + own
            total.append(np.log(weight) + multivariate_normal(mean[seen], both).logpdf(x[i, seen]))
            means.append(mean + covariance[:, seen] @ np.linalg.solve(both, x[i, seen] - mean[seen]))
        np.testing.assert_allclose(joint[i], total, rtol=1e-9)
        np.testing.assert_allclose(denoised[i], np.exp(total - logsumexp(total)) @ means, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spread", [True, False])
def test_every_step_raises_the_likelihood_and_the_end_is_a_maximum(kind: str, spread: bool) -> None:
    x, noise, truth = instance(1, 800, kind, spread)
    wide = None if truth.covariances is None else truth.covariances * 1.5
    now = Components(np.full(2, 0.5), truth.means + 0.5, wide)
    heights = []
    for _ in range(15):
        now, height = _step(x, noise, now)
        heights.append(height)
    assert (np.diff(heights) > -1e-9).all()
    found, height = deconvolve(x, noise, now)
    assert height >= heights[-1] - 1e-9
    gradient = scores(x, noise, found).sum(0)
    deviation = np.sqrt((scores(x, noise, found) ** 2).sum(0))
    assert (np.abs(gradient) < 0.1 * deviation).all()


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_the_derivatives(kind: str) -> None:
    x, noise, truth = instance(2, 60, kind, True)

    def height(weights: np.ndarray, means: np.ndarray, covariances: np.ndarray) -> float:
        weights = np.exp(weights) / np.exp(weights).sum()
        return float(logsumexp(log_joint(x, noise, Components(weights, means, covariances)), axis=1).sum())

    at = np.log(truth.weights), truth.means, truth.covariances
    found, numeric, step = scores(x, noise, truth).sum(0), [], 1e-5
    for j in range(2):
        for a in range(2):
            shift = np.zeros((2, 2))
            shift[j, a] = step
            numeric.append(
                (height(at[0], at[1] + shift, at[2]) - height(at[0], at[1] - shift, at[2])) / (2 * step)
            )
        shift = step * np.eye(2)[j]
        numeric.append((height(at[0] + shift, at[1], at[2]) - height(at[0] - shift, at[1], at[2])) / (2 * step))
    for j in range(2):
        for a, b in ((0, 0), (0, 1), (1, 1)):
            shift = np.zeros((2, 2, 2))
            shift[j, a, b] = shift[j, b, a] = step
            numeric.append(
                (height(at[0], at[1], at[2] + shift) - height(at[0], at[1], at[2] - shift)) / (2 * step)
            )
    np.testing.assert_allclose(found, numeric, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind, spread", [("isotropic", False), ("axes", True)])
def test_standard_errors_are_the_spread_of_repeated_fits(kind: str, spread: bool) -> None:
    fits, claims = [], []
    for seed in range(40):
        x, noise, truth = instance(100 + seed, 600, kind, spread)
        found, _ = deconvolve(x, noise, truth)
        fits.append(np.column_stack([found.means, found.weights]))
        means, weights = standard_errors(x, noise, found)
        claims.append(np.column_stack([means, weights]))
    np.testing.assert_allclose(np.mean(claims, 0), np.std(fits, 0), rtol=0.4)


def test_nothing_is_known_of_a_coordinate_that_no_sample_observed() -> None:
    rng = np.random.default_rng(0)
    noise = along_axes(np.column_stack([np.ones(50), np.full(50, np.inf)]))
    x = np.column_stack([rng.normal(size=50), np.zeros(50)])
    means, _ = standard_errors(x, noise, Components(np.ones(1), np.zeros((1, 2))))
    assert means[0, 0] == pytest.approx(1 / np.sqrt((x[:, 0] ** 2).sum())) and np.isinf(means[0, 1])
