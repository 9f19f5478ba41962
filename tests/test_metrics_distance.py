"""Feature statistics and distances: closed forms, 50-digit arithmetic, and independent implementations."""

from pathlib import Path

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import linalg
from sklearn.neighbors import NearestNeighbors

from assay.errors import AssayError
from assay.metrics.distance import (
    frechet_distance,
    frechet_infinity,
    inception_score,
    kernel_distance,
    leave_one_out,
    manifold_overlap,
    memorisation,
    nearest_neighbours,
)
from assay.metrics.statistics import (
    FeatureStatistics,
    features_to_statistics,
    load_statistics,
    merge_statistics,
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


@given(st.lists(st.integers(1, 60), min_size=2, max_size=8), st.integers(0, 2**16), st.floats(-1e3, 1e3))
def test_merged_shards_equal_the_whole_in_any_order_and_split(
    sizes: list[int], seed: int, shift: float
) -> None:
    sizes = [size + 1 for size in sizes]
    features = random_features(sum(sizes), 4, seed, shift)
    shards = np.split(features, np.cumsum(sizes)[:-1])
    whole = features_to_statistics(features, batch_size=len(features))
    merged = merge_statistics(*[features_to_statistics(shard, batch_size=3) for shard in shards])
    turned = merge_statistics(*[features_to_statistics(shard[::-1]) for shard in reversed(shards)])
    scale = np.trace(whole.cov)
    for other in (merged, turned):
        assert other.num_images == whole.num_images
        assert np.abs(other.mean - whole.mean).max() <= 1e-12 * max(np.abs(whole.mean).max(), 1)
        assert np.abs(other.cov - whole.cov).max() <= 1e-12 * scale
        assert frechet_distance(other, whole) <= 1e-12 * scale


@pytest.mark.parametrize("edm_names", [False, True])
def test_statistics_survive_a_file(tmp_path: Path, edm_names: bool) -> None:
    statistics = features_to_statistics(random_features(50, 5))
    save_statistics(tmp_path / "a.npz", statistics, edm_names)
    read = load_statistics(tmp_path / "a.npz")
    np.testing.assert_array_equal(read.mean, statistics.mean)
    np.testing.assert_array_equal(read.cov, statistics.cov)
    assert read.num_images == 50
    names = set(np.load(tmp_path / "a.npz").files)
    assert names == ({"mu", "sigma", "num_images"} if edm_names else {"mean", "cov", "num_images"})


def test_edm_reference_without_a_count_is_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "cifar10-32x32.npz", mu=np.zeros(3), sigma=np.eye(3))
    read = load_statistics(tmp_path / "cifar10-32x32.npz")
    assert read.num_images is None
    with rejected():
        merge_statistics(read, read)


def test_bad_statistics_are_refused(tmp_path: Path) -> None:
    with rejected("num_images"):
        features_to_statistics(np.ones((1, 3)))
    bad = np.ones((5, 3))
    bad[3, 1] = np.nan
    with pytest.raises(AssayError) as caught:
        features_to_statistics(bad, batch_size=2)
    assert "image 3 " in caught.value.what
    (tmp_path / "text.npz").write_text("no")
    with rejected(path=tmp_path / "text.npz"):
        load_statistics(tmp_path / "text.npz")
    np.savez(tmp_path / "other.npz", images=np.zeros(3))
    with rejected(path=tmp_path / "other.npz"):
        load_statistics(tmp_path / "other.npz")
    with rejected():
        gaussian(np.zeros(2), np.eye(3))
    with rejected():
        gaussian(np.array([np.nan]), np.eye(1))


# --- Frechet distance ------------------------------------------------------------------------------------


def test_golden_frechet_distance() -> None:
    golden = np.load(GOLDEN / "frechet.npz")
    a, b = features_to_statistics(golden["a"]), features_to_statistics(golden["b"])
    assert frechet_distance(a, b) == pytest.approx(float(golden["expected"]), rel=1e-8)


def test_commuting_gaussians_have_the_closed_form() -> None:
    rng = np.random.default_rng(1)
    basis = linalg.qr(rng.standard_normal((20, 20)))[0]
    lambda_a, lambda_b = rng.uniform(0.1, 5, 20), rng.uniform(0.1, 5, 20)
    mean = rng.standard_normal(20)
    a, b = gaussian(np.zeros(20), basis * lambda_a @ basis.T), gaussian(mean, basis * lambda_b @ basis.T)
    expected = mean @ mean + np.square(np.sqrt(lambda_a) - np.sqrt(lambda_b)).sum()
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-12)


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


@pytest.mark.parametrize(("num_a", "num_b"), [(4, 5), (4, 30), (30, 3), (2, 2), (30, 40)])
def test_rank_deficient_covariances_agree_with_50_digits(num_a: int, num_b: int) -> None:
    a, b = random_features(num_a, 10, 3), random_features(num_b, 10, 4, shift=0.3)
    expected = exact_frechet_distance(a, b)
    found = frechet_distance(features_to_statistics(a), features_to_statistics(b))
    assert found == pytest.approx(expected, rel=1e-11)


def test_nested_and_duplicate_directions_agree_with_50_digits() -> None:
    a = np.repeat(random_features(12, 3, 5), 3, axis=1)  # 9 dimensions of rank 3
    b = np.repeat(random_features(9, 3, 6), 3, axis=1)
    b[:, 0] = 0.0  # a constant feature
    expected = exact_frechet_distance(a, b)
    assert frechet_distance(features_to_statistics(a), features_to_statistics(b)) == pytest.approx(
        expected, rel=1e-11
    )


@pytest.mark.parametrize("decades", [1, 3, 12], ids=["flat", "falling", "beyond the fast way"])
def test_large_covariances_have_the_closed_form(decades: int) -> None:
    rng = np.random.default_rng(2)
    basis = linalg.qr(rng.standard_normal((600, 600)))[0]
    lambda_a, lambda_b = np.logspace(0, -decades, 600), np.logspace(0, -decades, 600) * rng.uniform(0.5, 2, 600)
    a, b = (gaussian(np.zeros(600), basis * values @ basis.T) for values in (lambda_a, lambda_b))
    expected = np.square(np.sqrt(lambda_a) - np.sqrt(lambda_b)).sum()
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-7)


def test_zero_covariance_and_wrong_covariance() -> None:
    zero = gaussian(np.zeros(3), np.zeros((3, 3)))
    assert frechet_distance(zero, gaussian(np.ones(3), np.eye(3))) == pytest.approx(6.0, rel=1e-12)
    with rejected():
        frechet_distance(zero, gaussian(np.zeros(3), [[1, 2, 0], [2, 1, 0], [0, 0, 1]]))
    with rejected("extractor"):
        frechet_distance(zero, gaussian(np.zeros(2), np.eye(2)))


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


def test_extrapolation_to_infinity_removes_the_bias() -> None:
    rng = np.random.default_rng(2)
    mean = np.full(10, 0.1)
    truth = gaussian(np.zeros(10), np.eye(10))
    plain, infinite = [], []
    for _ in range(20):
        features = rng.standard_normal((2000, 10)) * 1.1 + mean
        plain.append(frechet_distance(features_to_statistics(features), truth))
        infinite.append(frechet_infinity(features, truth).value)
    exact = mean @ mean + 10 * 0.1**2  # 0.2; the bias at 2,000 images is about 0.02
    error = np.std(infinite) / np.sqrt(len(infinite))
    assert abs(np.mean(infinite) - exact) < 3 * error
    assert np.mean(plain) - exact > 4 * np.std(plain) / np.sqrt(len(plain))
    with rejected("infinity"):
        frechet_infinity(features[:100], truth)


# --- kernel distance, precision and recall, Inception score ----------------------------------------------


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
    losses = [
        (found.value / found.standard_error)
        for found in (
            kernel_distance(rng.standard_normal((400, 4)), rng.standard_normal((500, 4))) for _ in range(200)
        )
    ]
    assert abs(np.mean(losses)) < 3 * np.std(losses) / np.sqrt(len(losses))  # centred on zero
    assert 0.8 < np.std(losses) < 1.5  # a t statistic with 9 degrees of freedom has 1.13
    far = kernel_distance(rng.standard_normal((400, 4)), rng.standard_normal((400, 4)) + 1)
    assert far.value > 5 * far.standard_error > 0
    with rejected("num_images"):
        kernel_distance(np.ones((5, 2)), np.ones((50, 2)))


def test_precision_recall_density_coverage_against_scikit_learn() -> None:
    rng = np.random.default_rng(7)
    real = rng.standard_normal((300, 3)).astype(np.float32) + 50
    generated = (0.5 * rng.standard_normal((300, 3)) + [50.5, 50, 50]).astype(np.float32)

    def radius(points: np.ndarray, k: int) -> np.ndarray:
        return NearestNeighbors(n_neighbors=k + 1).fit(points).kneighbors(points)[0][:, k]

    across = np.linalg.norm(real[:, None].astype(float) - generated[None], axis=2)
    found = manifold_overlap(generated, real)
    assert found.precision == (across < radius(real, 3)[:, None]).any(0).mean()
    assert found.recall == (across < radius(generated, 3)).any(1).mean()
    assert found.density == pytest.approx((across < radius(real, 5)[:, None]).sum(0).mean() / 5, rel=1e-12)
    assert found.coverage == (across.min(1) < radius(real, 5)).mean()
    assert found.recall < found.precision  # the generated cloud is narrower
    with rejected("num_images"):
        manifold_overlap(real[:4], real)


def test_equal_sets_and_disjoint_sets_overlap_fully_and_not_at_all() -> None:
    real = random_features(500, 4, 0)
    twin = manifold_overlap(random_features(400, 4, 0), real)
    assert twin == manifold_overlap(random_features(400, 4, 0), real[np.linspace(0, 499, 400).astype(int)])
    far = manifold_overlap(real + 1000, real)
    assert (far.precision, far.recall, far.density, far.coverage) == (0, 0, 0, 0)
    same = manifold_overlap(real, real)
    assert (same.precision, same.recall, same.coverage) == (1, 1, 1)


def test_inception_score_of_known_predictions() -> None:
    # Certain and evenly spread over 5 classes: the loss is 5; all alike: 1. Huge logits stay finite.
    certain = 1e4 * np.eye(5)[np.arange(100) % 5]
    assert inception_score(certain).value == pytest.approx(5, rel=1e-12)
    assert inception_score(np.zeros((100, 5))).value == pytest.approx(1, rel=1e-12)
    logits = np.random.default_rng(0).standard_normal((50, 7)).astype(np.float32)
    p = np.exp(logits.astype(float)) / np.exp(logits.astype(float)).sum(1, keepdims=True)
    losses = [np.exp(np.mean([divergence(row, part.mean(0)) for row in part])) for part in np.split(p, 10)]
    found = inception_score(logits)
    assert found.value == pytest.approx(np.mean(losses), rel=1e-12)
    assert found.standard_error == pytest.approx(np.std(losses), rel=1e-10)
    with rejected("num_images"):
        inception_score(logits[:12])


def divergence(p: np.ndarray, q: np.ndarray) -> float:
    return float((p * np.log(p / q)).sum())


# --- memorisation ----------------------------------------------------------------------------------------


def test_memorisation_tells_copies_from_fresh_draws() -> None:
    rng = np.random.default_rng(0)
    training, held_out, fresh = (rng.standard_normal((n, 6)) for n in (9000, 1000, 2000))
    real, left_out = nearest_neighbours(held_out, training), leave_one_out(training)
    assert len(left_out.distance) == 5000
    for held_out_distances in (real, left_out):
        honest = memorisation(nearest_neighbours(fresh, training), held_out_distances)
        assert honest.share == pytest.approx(0.05, abs=0.02)
        assert honest.num_held_out == len(held_out_distances.distance)
    generated = np.concatenate([training[8500:8600] + 1e-9, fresh[:100]])
    neighbours = nearest_neighbours(generated, training)
    assert memorisation(neighbours, real).share == pytest.approx(0.525, abs=0.03)
    np.testing.assert_array_equal(neighbours.index[:100], np.arange(8500, 8600))
    assert neighbours.distance[:100].max() < 1e-6


def test_nearest_neighbours_against_scikit_learn() -> None:
    rng = np.random.default_rng(3)
    generated, training = rng.standard_normal((700, 5)) + 20, rng.standard_normal((9000, 5)) + 20
    distance, index = NearestNeighbors(n_neighbors=1).fit(training).kneighbors(generated)
    found = nearest_neighbours(generated, training)
    np.testing.assert_array_equal(found.index, index[:, 0])
    np.testing.assert_allclose(found.distance, distance[:, 0], rtol=1e-8)
    own = np.linspace(0, 8999, 5000).astype(int)
    distance, index = NearestNeighbors(n_neighbors=2).fit(training).kneighbors(training[own])
    np.testing.assert_array_equal(leave_one_out(training).index, index[:, 1])
    np.testing.assert_allclose(leave_one_out(training).distance, distance[:, 1], rtol=1e-8)
    last = training[:8193]  # whose last row is alone in its chunk
    found = nearest_neighbours(last[-1:], last, np.array([8192]))
    distance = np.linalg.norm(last[:-1] - last[-1], axis=1)
    assert (found.index[0], found.distance[0]) == (distance.argmin(), pytest.approx(distance.min()))
