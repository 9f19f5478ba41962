"""Samples under every kind of noise, for the tests of mixtures."""

import numpy as np

KINDS = ["isotropic", "axes", "covariance"]


def add_noise(y: np.ndarray, kind: str, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Samples `y` (n, d) with noise of this kind, and that noise as `NoisyMixture` takes it."""
    n, d = y.shape
    if kind == "covariance":
        root = rng.normal(size=(n, d, d)) / np.sqrt(2 * d)
        sigma = root @ root.swapaxes(1, 2) + 0.1 * np.eye(d)
        return y + np.einsum("nab,nb->na", np.linalg.cholesky(sigma), rng.normal(size=(n, d))), sigma
    sigma = rng.uniform(0.3, 1.3, n if kind == "isotropic" else (n, d))
    x = y + sigma.reshape(n, -1) * rng.normal(size=(n, d))
    if kind == "missing":
        gone = rng.random((n, d)) < np.where(np.arange(d) < d - 1, 0.25, 0.0)
        x, sigma = np.where(gone, np.nan, x), np.where(gone, np.inf, sigma)
    return x, sigma
