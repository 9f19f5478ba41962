"""Feature statistics and distances: closed forms, 50-digit arithmetic, and independent implementations."""

from pathlib import Path

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import linalg
from sklearn.neighbors import NearestNeighbors

from assay.metrics.distance import (
    FeatureStatistics,
    features_to_statistics,
    frechet_distance,
    kernel_distance,
    load_statistics,
    precision_recall,
    save_statistics,
)
from tests.errors import rejected

GOLDEN = Path(__file__).parent / "golden"


def random_features(num: int, dim: int, seed: int = 0, shift: float = 0.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((num, dim)) @ rng.standard_normal((dim, dim)) + shift


def gaussian(mean: np.ndarray, cov: np.ndarray) -> FeatureStatistics:
    return FeatureStatistics(np.asarray(mean, float), np.asarray(cov, float), 1000)


# --- statistics ------------------------------------------------------------------------------------------


def test_statistics_are_the_mean_and_the_unbiased_covariance() -> None:
    features = random_features(500, 7, shift=100.0)
    statistics = features_to_statistics(features, batch_size=37)
    np.testing.assert_allclose(statistics.mean, features.mean(0), rtol=1e-13)
    np.testing.assert_allclose(statistics.cov, np.cov(features.T), rtol=1e-12, atol=1e-12)
    assert statistics.num_images == 500


@given(st.integers(2, 300), st.integers(1, 300), st.integers(0, 2**16), st.floats(-1e3, 1e3))
def test_statistics_are_the_same_in_any_order_and_split(num: int, size: int, seed: int, shift: float) -> None:
    features = random_features(num, 4, seed, shift)
    whole = features_to_statistics(features, batch_size=num)
    scale = np.trace(whole.cov)
    for other in (features_to_statistics(features, size), features_to_statistics(features[::-1], size)):
        assert other.num_images == num
        assert np.abs(other.mean - whole.mean).max() <= 1e-12 * max(np.abs(whole.mean).max(), 1)
        assert np.abs(other.cov - whole.cov).max() <= 1e-12 * scale
        assert frechet_distance(other, whole) <= 1e-12 * scale


def test_statistics_survive_a_file(tmp_path: Path) -> None:
    statistics = features_to_statistics(random_features(50, 5))
    save_statistics(tmp_path / "ours.npz", statistics)
    np.savez(tmp_path / "edm.npz", mu=statistics.mean, sigma=statistics.cov)
    for name, num_images in (("ours", 50), ("edm", None)):
        read = load_statistics(tmp_path / f"{name}.npz")
        np.testing.assert_array_equal(read.mean, statistics.mean)
        np.testing.assert_array_equal(read.cov, statistics.cov)
        assert read.num_images == num_images
    assert set(np.load(tmp_path / "ours.npz").files) == {"mu", "sigma", "num_images"}  # what EDM's tools read


def test_bad_statistics_are_refused(tmp_path: Path) -> None:
    for arrays in (
        {"images": np.zeros(3)},
        {"mu": np.zeros(2), "sigma": np.eye(3)},
        {"mu": np.array([np.nan]), "sigma": np.eye(1)},
    ):
        np.savez(tmp_path / "bad.npz", **arrays)
        with rejected(path=tmp_path / "bad.npz"):
            load_statistics(tmp_path / "bad.npz")


# --- Frechet distance ------------------------------------------------------------------------------------


def test_golden_frechet_distance() -> None:
    golden = np.load(GOLDEN / "frechet.npz")
    a, b = features_to_statistics(golden["a"]), features_to_statistics(golden["b"])
    assert frechet_distance(a, b) == pytest.approx(float(golden["expected"]), rel=1e-8)


@given(st.integers(1, 12), st.integers(2, 40), st.integers(2, 40), st.integers(0, 2**16))
def test_frechet_distance_is_symmetric_zero_on_itself_and_translates(
    dim: int, num_a: int, num_b: int, seed: int
) -> None:
    a = features_to_statistics(random_features(num_a, dim, seed))
    b = features_to_statistics(random_features(num_b, dim, seed + 1, shift=1.0))
    scale = np.trace(a.cov) + np.trace(b.cov) + 1
    assert frechet_distance(a, b) == pytest.approx(frechet_distance(b, a), abs=1e-11 * scale)
    assert frechet_distance(a, a) <= 1e-11 * scale
    moved = FeatureStatistics(a.mean + 2.0, a.cov, a.num_images)
    assert frechet_distance(a, moved) == pytest.approx(4.0 * dim, abs=1e-11 * scale)


def exact_frechet_distance(a: np.ndarray, b: np.ndarray) -> float:
    """From features, in 50 digits: eigenvalues of the small Gram matrix X_a cov_b X_a^T, zeros included."""
    with mpmath.workdps(50):
        centred, means, traces = [], [], []
        for features in (a, b):
            x = mpmath.matrix(features.tolist())
            mean = mpmath.matrix([mpmath.fsum(x[:, j]) / x.rows for j in range(x.cols)])
            for i in range(x.rows):
                for j in range(x.cols):
                    x[i, j] = (x[i, j] - mean[j]) / mpmath.sqrt(x.rows - 1)
            centred.append(x)
            means.append(mean)
            traces.append(mpmath.fsum(value**2 for value in x))
        product = centred[0] * centred[1].T
        values = mpmath.eigsy(product * product.T, eigvals_only=True)
        root = mpmath.fsum(mpmath.sqrt(abs(value)) for value in values)
        shift = mpmath.fsum(value**2 for value in means[0] - means[1])
        return float(shift + traces[0] + traces[1] - 2 * root)


NESTED = np.repeat(random_features(9, 3, 6), 3, axis=1)  # 9 dimensions of rank 3
NESTED[:, 0] = 0.0  # a constant feature


@pytest.mark.parametrize(
    ("a", "b"),
    [
        *(
            (random_features(num_a, 10, 3), random_features(num_b, 10, 4, shift=0.3))
            for num_a, num_b in [(4, 5), (4, 30), (30, 3), (2, 2), (30, 40)]
        ),
        (np.repeat(random_features(12, 3, 5), 3, axis=1), NESTED),
    ],
)
def test_rank_deficient_covariances_agree_with_50_digits(a: np.ndarray, b: np.ndarray) -> None:
    found = frechet_distance(features_to_statistics(a), features_to_statistics(b))
    assert found == pytest.approx(exact_frechet_distance(a, b), rel=1e-11)


@pytest.mark.parametrize(("dim", "decades"), [(20, 1), (600, 1), (600, 3), (600, 12)])
def test_commuting_gaussians_have_the_closed_form(dim: int, decades: int) -> None:
    rng = np.random.default_rng(2)
    basis, mean = linalg.qr(rng.standard_normal((dim, dim)))[0], rng.standard_normal(dim) * (decades == 1)
    lambda_a = np.logspace(0, -decades, dim)
    lambda_b = lambda_a * rng.uniform(0.5, 2, dim)
    a, b = gaussian(np.zeros(dim), basis * lambda_a @ basis.T), gaussian(mean, basis * lambda_b @ basis.T)
    expected = mean @ mean + np.square(np.sqrt(lambda_a) - np.sqrt(lambda_b)).sum()
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-12 if dim == 20 else 1e-7)


def test_zero_covariance_and_wrong_covariance() -> None:
    zero = gaussian(np.zeros(3), np.zeros((3, 3)))
    assert frechet_distance(zero, gaussian(np.ones(3), np.eye(3))) == pytest.approx(6.0, rel=1e-12)
    with rejected():
        frechet_distance(zero, gaussian(np.zeros(3), [[1, 2, 0], [2, 1, 0], [0, 0, 1]]))


def expected_bias(cov: np.ndarray, num_images: int) -> float:
    """E[FD] of n draws of N(m, cov) against N(m, cov) itself, to first order in 1/n.

    tr cov / n for the mean; for the covariance E, 1/2 sum_ij E_ij^2 / (l_i + l_j) in the eigenbasis of cov
    (the second-order term of the Bures distance), with E[E_ij^2] = l_i l_j (1 + [i = j]) / (n - 1).
    """
    values = np.linalg.eigvalsh(cov)
    spread = np.outer(values, values) * (1 + np.eye(len(values))) / np.add.outer(values, values)
    return float(values.sum() / num_images + spread.sum() / (2 * (num_images - 1)))


@pytest.mark.parametrize("cov", [np.eye(8), np.diag([4.0, 2, 1, 0.5, 0.25, 0.1, 0.1, 0.1])])
def test_bias_at_n_images_follows_the_formula(cov: np.ndarray) -> None:
    rng = np.random.default_rng(0)
    truth, num_images, num_trials = gaussian(np.zeros(8), cov), 400, 300
    found = []
    for _ in range(num_trials):
        features = rng.standard_normal((num_images, 8)) * np.sqrt(np.diag(cov))
        found.append(frechet_distance(features_to_statistics(features), truth))
    error, mean = np.std(found) / np.sqrt(num_trials), np.mean(found)
    assert mean == pytest.approx(expected_bias(cov, num_images), abs=4 * error + 0.02 * mean)
    assert error < 0.05 * mean


# --- kernel distance, precision and recall ----------------------------------------------


def test_kernel_distance_equals_the_sum_over_pairs_in_one_block() -> None:
    a, b = random_features(20, 3, 0), random_features(20, 3, 1)

    def kernel(x: np.ndarray, y: np.ndarray) -> float:
        return float((x @ y / 3 + 1) ** 3)

    pairs = [(i, j) for i in range(20) for j in range(20)]
    within = [kernel(a[i], a[j]) + kernel(b[i], b[j]) for i, j in pairs if i != j]
    across = [kernel(a[i], b[j]) for i, j in pairs]
    whole = np.mean(within) - 2 * np.mean(across)
    # Ten blocks of two images average to the whole over many shuffles.
    shuffled = [kernel_distance(a, b, seed).value for seed in range(4000)]
    assert np.mean(shuffled) == pytest.approx(whole, abs=4 * np.std(shuffled) / np.sqrt(len(shuffled)))


def test_kernel_distance_is_unbiased_and_knows_its_error() -> None:
    rng = np.random.default_rng(5)
    losses = []
    for _ in range(200):
        found = kernel_distance(rng.standard_normal((400, 4)), rng.standard_normal((500, 4)))
        losses.append(found.value / found.standard_error)
    assert abs(np.mean(losses)) < 3 * np.std(losses) / np.sqrt(len(losses))  # centred on zero
    assert 0.8 < np.std(losses) < 1.5  # a t statistic with 9 degrees of freedom has 1.13
    far = kernel_distance(rng.standard_normal((400, 4)), rng.standard_normal((400, 4)) + 1)
    assert far.value > 5 * far.standard_error > 0


def test_precision_and_recall_against_scikit_learn() -> None:
    rng = np.random.default_rng(7)
    real = rng.standard_normal((300, 3)).astype(np.float32) + 50
    generated = (0.5 * rng.standard_normal((300, 3)) + [50.5, 50, 50]).astype(np.float32)

    def radius(points: np.ndarray) -> np.ndarray:
        return NearestNeighbors(n_neighbors=4).fit(points).kneighbors(points)[0][:, 3]

    across = np.linalg.norm(real[:, None].astype(float) - generated[None], axis=2)
    precision, recall = precision_recall(generated, real)
    assert precision == (across < radius(real)[:, None]).any(0).mean()
    assert recall == (across < radius(generated)).any(1).mean()
    assert recall < precision  # the generated cloud is narrower


def test_equal_sets_and_disjoint_sets_overlap_fully_and_not_at_all() -> None:
    real, other = random_features(600, 4, 0), random_features(400, 4, 1)
    cut = real[np.linspace(0, 599, 400).astype(int)]
    assert precision_recall(other, real) == precision_recall(other, cut)
    assert precision_recall(real + 1000, real) == (0, 0)
    assert precision_recall(real, real) == (1, 1)
