"""A fitted mixture: denoising, labels, scores, draws; choosing k; scikit-learn's rules."""

import warnings

import numpy as np
import pytest
import sklearn
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, MaxAbsScaler, MinMaxScaler, RobustScaler, StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from assay.errors import AssayError
from assay.mixture import NoisyMixture
from assay.mixture.distance import wasserstein
from assay.mixture.moments import Atoms
from assay.mixture.samples import simulate
from tests.errors import rejected

TRUTH = Atoms(np.array([[-2.0, 0.0], [1.0, 1.5], [1.5, -2.0]]), np.array([0.5, 0.3, 0.2]))


def instance(seed: int = 0, n: int = 3000) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    sigma = rng.uniform(0.2, 1.2, n)
    return simulate(TRUTH, sigma, rng), sigma


def fitted() -> tuple[NoisyMixture, np.ndarray, np.ndarray]:
    x, sigma = instance()
    return NoisyMixture(3, random_state=0).fit(x, sigma=sigma), x, sigma


def test_answers_agree_with_bayes_rule() -> None:
    model, x, sigma = fitted()
    distance = ((x[:, None] - model.means_) ** 2).sum(-1)
    density = model.weights_ * np.exp(-distance / (2 * sigma[:, None] ** 2)) / (2 * np.pi * sigma[:, None] ** 2)
    total = density.sum(1)
    np.testing.assert_allclose(model.score_samples(x, sigma=sigma), np.log(total))
    assert model.score(x, sigma=sigma) == pytest.approx(np.log(total).mean())
    posterior = density / total[:, None]
    np.testing.assert_allclose(model.predict_proba(x, sigma=sigma), posterior, atol=1e-12)
    np.testing.assert_array_equal(model.predict(x, sigma=sigma), posterior.argmax(1))
    np.testing.assert_allclose(model.posterior_mean(x, sigma=sigma), posterior @ model.means_, atol=1e-12)
    # One number stands for all, and cleaner samples are trusted more.
    np.testing.assert_allclose(model.posterior_mean(x, sigma=1e-3), model.means_[model.predict(x, sigma=1e-3)])


def test_draws_are_from_the_mixture() -> None:
    model, _, _ = fitted()
    x, label = model.sample(4000)
    np.testing.assert_array_equal(x, model.means_[label])
    np.testing.assert_allclose(np.bincount(label) / 4000, model.weights_, atol=0.03)
    noisy, label = model.sample(4000, sigma=0.5)
    assert (noisy - model.means_[label]).std() == pytest.approx(0.5, rel=0.05)
    with rejected("n_samples"):
        model.sample(0)


def test_standard_errors_cover_the_truth() -> None:
    covered = []
    for seed in range(20):
        x, sigma = instance(seed, 1500)
        model = NoisyMixture(3, random_state=0).fit(x, sigma=sigma)
        means, weights = model.standard_errors(x, sigma=sigma)
        order = [int(np.linalg.norm(TRUTH.atoms - mean, axis=1).argmin()) for mean in model.means_]
        covered.append(np.abs(model.means_ - TRUTH.atoms[order]) < 2 * means)
        covered.append(np.abs(model.weights_ - TRUTH.weights[order])[:, None] < 2 * weights[:, None])
    share = np.concatenate([part.ravel() for part in covered]).mean()
    assert 0.88 < share < 0.99
    one = NoisyMixture(1).fit(x, sigma=sigma)  # one atom: the scores are (x - mu) / sigma^2
    scores = (x - one.means_) / sigma[:, None] ** 2
    expected = np.sqrt(np.diag(np.linalg.inv(scores.T @ scores)))
    np.testing.assert_allclose(one.standard_errors(x, sigma=sigma)[0][0], expected)


@pytest.mark.parametrize("d, k", [(1, 1), (1, 3), (2, 3), (6, 2), (8, 5)])
def test_number_of_atoms_is_chosen(d: int, k: int) -> None:
    rng = np.random.default_rng(d + k)
    atoms = 3 * np.eye(max(k, d))[:k, :d] if d > 1 else 3 * np.arange(k)[:, None]
    truth = Atoms(atoms, np.full(k, 1 / k))
    sigma = rng.uniform(0.3, 1.5, 4000)
    model = NoisyMixture(None, random_state=0).fit(simulate(truth, sigma, rng), sigma=sigma)
    assert len(model.means_) == k and wasserstein(model.mixture_, truth) < 0.15
    best = max(model.evidence_, key=lambda row: row.penalised)
    assert best.num_atoms == k and best.probability > 0.9
    assert sum(row.probability for row in model.evidence_) == pytest.approx(1)
    # The certificate: no number of atoms has a higher likelihood than the nonparametric estimate.
    highest = model.npmle_.log_likelihood + model.npmle_.gap + 1e-6
    assert max(row.log_likelihood for row in model.evidence_) <= highest


def test_scikit_learns_own_checks() -> None:
    """They call `fit(X)`, so the noise is given to the constructor: then none of them fails."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = check_estimator(NoisyMixture(2, sigma=0.5, random_state=0), on_fail=None)
    failed = {row["check_name"]: str(row["exception"])[:300] for row in results if row["status"] == "failed"}
    assert not failed, failed
    assert len(results) > 40


def test_sigma_passes_through_pipelines_and_searches() -> None:
    x, sigma = instance(n=600)
    with sklearn.config_context(enable_metadata_routing=True):
        mixture = NoisyMixture(3, random_state=0).set_fit_request(sigma=True).set_score_request(sigma=True)
        mixture.set_predict_request(sigma=True)
        pipeline = make_pipeline(FunctionTransformer(), mixture).fit(x, sigma=sigma)
        plain = clone(mixture).fit(x, sigma=sigma)
        np.testing.assert_array_equal(pipeline[-1].means_, plain.means_)
        assert pipeline.score(x, sigma=sigma) == plain.score(x, sigma=sigma)
        np.testing.assert_array_equal(pipeline.predict(x, sigma=sigma), plain.predict(x, sigma=sigma))
        search = GridSearchCV(mixture, {"n_components": [1, 2, 3]}, cv=3).fit(x, sigma=sigma)
        assert search.best_params_ == {"n_components": 3}
    with rejected("sigma"):
        make_pipeline(FunctionTransformer(), NoisyMixture(3)).fit(x)


@pytest.mark.parametrize("scaler", [StandardScaler(), MinMaxScaler(), MaxAbsScaler(), RobustScaler()])
def test_a_scaler_in_front_is_rejected(scaler) -> None:
    x, sigma = instance(n=600)
    with pytest.raises(AssayError) as caught:
        make_pipeline(scaler, NoisyMixture(3)).fit(x, noisymixture__sigma=sigma)
    assert caught.value.key == "X" and type(scaler).__name__ in caught.value.what
    NoisyMixture(3, check_units=False).fit(scaler.fit_transform(x), sigma=0.01 * sigma)
