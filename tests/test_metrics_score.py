import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import integrate
from torch import Tensor, nn

from assay.checkpoint import save_checkpoint
from assay.denoise import MixtureDenoiser, Preconditioned
from assay.metrics.score import (
    MIN_IMAGES,
    ScoreConfig,
    find_stopping,
    load_score,
    save_score,
    score,
    score_checkpoint,
    stopping_steps,
)
from assay.nets import build_denoiser, preset
from tests.points import ATOMS, ORACLE, STD, WEIGHTS, Points


class Gaussian(Points):
    """Points of N(0, std^2 I) in four dimensions, all clean."""

    image_shape = (4, 1, 1)

    def __init__(self, num: int, std: float, seed: int = 0) -> None:
        self.x_tn = std * torch.randn(num, 4, 1, 1, generator=torch.Generator().manual_seed(seed))
        self.sigma_tn, self.label = torch.zeros(num), torch.zeros(num, dtype=torch.long)
        self.name, self.fingerprint = "gaussian", f"{num} {std} {seed}"


class Images(Points):
    """Grey images of 8x8 noise, all clean."""

    image_shape, num_classes, class_names = (1, 8, 8), 0, ()

    def __init__(self, num: int) -> None:
        super().__init__(num)
        self.x_tn = 0.5 * torch.randn(num, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def gaussian_denoiser(mean: float, std: float) -> MixtureDenoiser:
    return MixtureDenoiser(torch.full((1, 4, 1, 1), mean), std=std)


def gaussian_rate(sigma: float, std: float, mean_q: float, std_q: float) -> float:
    """mse_q / sigma^2 in one dimension, for data N(0, std^2) and the exact denoiser of N(mean_q, std_q^2)."""
    gain = std_q**2 / (std_q**2 + sigma**2)
    return ((1 - gain) ** 2 * (std**2 + mean_q**2) + gain**2 * sigma**2) / sigma**2


def gaussian_kl(std: float, mean_q: float, std_q: float) -> float:
    """KL(N(0, std^2) || N(mean_q, std_q^2)) in one dimension."""
    return math.log(std_q / std) + (std**2 + mean_q**2) / (2 * std_q**2) - 0.5


def excess(std: float, mean_q: float, std_q: float, low: float, high: float) -> float:
    """The identity's integral between two levels, by quadrature."""

    def rate(log_sigma: float) -> float:
        sigma = math.exp(log_sigma)
        return gaussian_rate(sigma, std, mean_q, std_q) - gaussian_rate(sigma, std, 0.0, std)

    return integrate.quad(rate, math.log(low), math.log(high), limit=200, epsabs=1e-12)[0]


@pytest.mark.parametrize(("mean_q", "std_q"), [(0.0, 0.8), (0.3, 0.5), (-0.2, 0.3)])
def test_the_identity_for_gaussians(mean_q: float, std_q: float) -> None:
    assert excess(0.5, mean_q, std_q, 1e-6, 1e6) == pytest.approx(gaussian_kl(0.5, mean_q, std_q), abs=1e-6)


@pytest.mark.parametrize(("mean_q", "std_q"), [(0.0, 0.8), (0.3, 0.5), (-0.2, 0.3)])
def test_a_difference_of_scores_is_a_difference_of_divergences(mean_q: float, std_q: float) -> None:
    held_out = Gaussian(4000, 0.5)
    right, wrong = (score(gaussian_denoiser(*law), held_out) for law in ((0.0, 0.5), (mean_q, std_q)))
    gap = wrong.minus(right)
    assert gap.value == pytest.approx(gaussian_kl(0.5, mean_q, std_q), abs=3 * gap.standard_error)
    assert gap.standard_error < 0.1 * gap.value + 0.002
    # Paired on the same images and noise, the error is far below that of two scores side by side.
    assert gap.standard_error < 0.7 * math.hypot(
        wrong.nats_per_dim.standard_error, right.nats_per_dim.standard_error
    )
    mmse = integrate.quad(lambda u: gaussian_rate(math.exp(u), 0.5, 0, 0.5), math.log(0.002), math.log(80))[0]
    assert right.nats_per_dim.value == pytest.approx(mmse, abs=3 * right.nats_per_dim.standard_error)


def test_a_difference_of_scores_is_a_difference_of_log_likelihoods_for_mixtures() -> None:
    # Point by point the identity gives log densities, so that only the noise's error remains here.
    other = MixtureDenoiser(ATOMS.view(-1, 2, 1, 1) * 0.8, torch.tensor([0.2, 0.5, 0.3]), 0.3)
    held_out = Points(2000)

    def log_density(law: MixtureDenoiser) -> Tensor:
        square = (held_out.x_tn.flatten(1)[:, None] - law.atoms.flatten(1)).square().sum(-1)
        component = law.log_weights - square / (2 * law.variance) - torch.log(2 * math.pi * law.variance)
        return component.double().logsumexp(1)

    expected = float((log_density(ORACLE) - log_density(other)).mean()) / 2
    gap = score(other, held_out).minus(score(ORACLE, held_out))
    assert expected > 0.1
    assert gap.value == pytest.approx(expected, abs=3 * gap.standard_error)
    assert gap.standard_error < 0.1 * expected


@pytest.mark.parametrize(("mean_q", "std_q"), [(0.2, 0.7), (-0.3, 0.3), (0.0, 0.05)])
@pytest.mark.parametrize("std", [0.1, 0.5, 1.0])
def test_the_default_range_misses_next_to_nothing(std: float, mean_q: float, std_q: float) -> None:
    # For images in [-1, 1] whose details are not finer than 0.05, that is 6 of 255 grey values.
    config = ScoreConfig()
    missed = gaussian_kl(std, mean_q, std_q) - excess(std, mean_q, std_q, config.sigma_min, config.sigma_max)
    assert abs(missed) < 3e-3 * gaussian_kl(std, mean_q, std_q) + 1e-4


@pytest.mark.parametrize("num_levels", [1, 4, 16])
def test_few_levels_are_not_biased(num_levels: int) -> None:
    # Errors without any noise over images: the exact rate at each level, here as a residual of zero images.
    class Rate(nn.Module):
        def forward(self, x_t: Tensor, sigma_t: Tensor, label: Tensor | None = None) -> Tensor:
            rate = 1 / (1 + sigma_t.double() ** 2 / 0.25)  # that of a Gaussian
            return (rate * sigma_t**2).sqrt().float().view(-1, 1, 1, 1).expand_as(x_t)

    held_out = Gaussian(1000, 0.0)
    found = score(Rate(), held_out, ScoreConfig(num_levels=num_levels)).nats_per_dim.value
    exact = integrate.quad(lambda u: 1 / (1 + math.exp(2 * u) / 0.25), math.log(0.002), math.log(80))[0]
    assert found == pytest.approx(exact, rel=2e-3)
    # Fixed levels in the middle of the intervals would be biased by as much as the model differences we seek.
    edges = np.linspace(math.log(0.002), math.log(80), 5)
    fixed = np.mean([1 / (1 + np.exp(edges[1:] + edges[:-1]) / 0.25)]) * math.log(80 / 0.002)
    assert abs(fixed - exact) > 0.02


def test_parts_add_up_and_the_curve_is_their_density() -> None:
    found = score(gaussian_denoiser(0.0, 0.5), Gaussian(3000, 0.5))
    below, above = found.part(high=0.3), found.part(low=0.3)
    assert below.value + above.value == pytest.approx(found.nats_per_dim.value, rel=1e-9)
    exact = integrate.quad(lambda u: gaussian_rate(math.exp(u), 0.5, 0, 0.5), math.log(0.3), math.log(80))[0]
    assert above.value == pytest.approx(exact, abs=3 * above.standard_error)
    curve = found.curve()
    assert curve.value.sum() * math.log(80 / 0.002) / 32 == pytest.approx(found.nats_per_dim.value, rel=1e-6)
    rate = [gaussian_rate(sigma, 0.5, 0, 0.5) for sigma in curve.sigma]
    other = score(gaussian_denoiser(0.2, 0.5), Gaussian(3000, 0.5))
    gap = other.curve(minus=found)
    np.testing.assert_allclose(gap.value, other.curve().value - curve.value, atol=1e-9)
    assert (gap.standard_error < other.curve().standard_error).all()
    miss = (curve.value - rate) / np.hypot(curve.standard_error, 0.01)
    assert abs(miss).max() < 4
    assert set(curve.num_images) == {3000}
    assert found.bits_per_dim.value == pytest.approx(found.nats_per_dim.value / math.log(2))
    assert found.nats.value == pytest.approx(4 * found.nats_per_dim.value)


@pytest.mark.parametrize("law", [(ATOMS, WEIGHTS, STD), (ATOMS * 0.7, WEIGHTS.flip(0), 0.35)])
def test_noisy_images_score_the_levels_above_their_own(law: tuple[Tensor, Tensor, float]) -> None:
    atoms, weights, std = law
    denoiser = MixtureDenoiser(atoms.view(-1, 2, 1, 1), weights, std)
    noisy = score(denoiser, Points(10_000, clean_fraction=0.0, sigma=0.3, seed=1))
    clean = score(denoiser, Points(10_000, seed=2))
    low, high = noisy.covers
    assert (low, high) == (pytest.approx(0.375), 80)
    expected = clean.part(low)
    assert noisy.nats_per_dim.value == pytest.approx(
        expected.value, abs=3 * math.hypot(expected.standard_error, noisy.nats_per_dim.standard_error)
    )
    assert noisy.nats_per_dim.standard_error < 0.05 * expected.value
    assert noisy.part(high=low) == noisy.part(0, 0)  # nothing is claimed below


def test_images_of_several_levels_share_the_levels_they_cover() -> None:
    held_out = Points(10_000, clean_fraction=0.1, sigma=0.3, seed=3)
    mixed, clean = score(ORACLE, held_out), score(ORACLE, Points(10_000, seed=2))
    assert mixed.covers == (0.002, 80)
    for ends in ((0.0, 0.375), (0.375, math.inf), (0.0, math.inf)):
        part, expected = mixed.part(*ends), clean.part(*ends)
        error = math.hypot(part.standard_error, expected.standard_error)
        assert part.value == pytest.approx(expected.value, abs=3 * error)
    counts = mixed.curve().num_images
    assert set(counts) == {1000, 10_000}
    # Below, a tenth of the images; above, all of them, though each is noisier: both beat the clean tenth alone.
    alone = score(ORACLE, held_out, index=torch.arange(1000)).part(2.0).standard_error
    assert mixed.part(2.0).standard_error < 0.5 * alone


@pytest.mark.parametrize("clean_fraction", [1.0, 0.1])
def test_the_standard_error_is_the_spread_over_held_out_sets(clean_fraction: float) -> None:
    other = MixtureDenoiser(ATOMS.view(-1, 2, 1, 1) * 0.8, WEIGHTS, 0.3)
    found, gaps = [], []
    for seed in range(60):
        held_out = Points(300, clean_fraction, 0.3, seed)
        config = ScoreConfig(num_levels=8, seed=seed)
        one, two = score(ORACLE, held_out, config), score(other, held_out, config)
        found.append(one.nats_per_dim)
        gaps.append(two.minus(one))
    for estimates in (found, gaps):
        spread = np.std([estimate.value for estimate in estimates], ddof=1)
        claimed = np.mean([estimate.standard_error for estimate in estimates])
        assert claimed == pytest.approx(spread, rel=0.3)  # 60 sets know the spread to 9 %


def test_batches_and_subsets_do_not_matter() -> None:
    held_out = Points(100, clean_fraction=0.5)
    whole = score(ORACLE, held_out)
    done: list[int] = []
    small = score(ORACLE, held_out, batch_size=7, progress=done.append)
    assert small.nats_per_dim.value == pytest.approx(whole.nats_per_dim.value, rel=1e-5)
    assert sum(done) == 100
    on_two = score(ORACLE, held_out, batch_size=7, devices=["cpu", "cpu"])
    assert on_two.errors == small.errors
    even = np.arange(100) % 2 == 0
    half = score(ORACLE, held_out, index=torch.arange(0, 100, 2))
    assert whole.take(even).nats_per_dim.value == pytest.approx(half.nats_per_dim.value, rel=1e-5)
    assert whole.take(even).index == half.index


def test_a_class_conditional_model_sees_the_labels() -> None:
    class ByLabel(nn.Module):
        num_classes = 2

        def forward(self, x_t: Tensor, sigma_t: Tensor, label: Tensor) -> Tensor:
            return label.view(-1, 1, 1, 1).expand_as(x_t).float()

    held_out = Points(50)
    held_out.x_tn = held_out.label.view(-1, 1, 1, 1).expand(-1, 2, 1, 1).float()
    assert score(ByLabel(), held_out).nats_per_dim.value == 0
    held_out.num_classes = 3
    with pytest.raises(ValueError, match="2 classes"):
        score(ByLabel(), held_out)


def test_an_augmented_network_is_scored_as_it_samples() -> None:
    class Augmented(nn.Module):
        def forward(self, x: Tensor, c_noise: Tensor, label: None, augment_label: Tensor | None) -> Tensor:
            assert augment_label is None  # images as they are
            return torch.zeros_like(x)

    found = score(Preconditioned(Augmented(), sigma_data=0.5), Gaussian(1000, 0.5))
    assert found.minus(score(gaussian_denoiser(0.0, 0.5), Gaussian(1000, 0.5))).value == pytest.approx(
        0, abs=1e-6
    )


def test_a_run_is_scored_where_it_should_have_been_stopped(tmp_path: Path) -> None:
    """Weights that get better and then worse: chosen on even images, reported on odd ones."""
    config = preset("mlp", (1, 8, 8))
    denoiser, held_out, snapshots = build_denoiser(config), Images(200), {}
    for step, wrong in ((10, 0.5), (20, 0.0), (40, 1.0)):
        dict(denoiser.named_parameters())["model.token_out.bias"].data.fill_(wrong)
        snapshots[step] = tmp_path / f"{step}.safetensors"
        save_checkpoint(snapshots[step], denoiser, config)
    done: list[int] = []
    found = find_stopping(snapshots, held_out, progress=done.append)
    assert found.steps == (10, 20, 40) and found.step == 20
    assert found.chosen_by[1] == min(found.chosen_by)
    odd = torch.arange(1, 200, 2)
    assert found.best == score_checkpoint(snapshots[20], held_out, index=odd)
    assert found.final.minus(found.best).value > 0
    assert sum(done) == 100 * (3 + 2)


def test_stopping_times_are_spread_over_a_run() -> None:
    assert stopping_steps(2500) == [248, 394, 625, 992, 1575, 2500]
    assert stopping_steps(3) == [1, 2, 3]


def test_a_score_survives_its_file(tmp_path: Path) -> None:
    found = score(ORACLE, Points(40, clean_fraction=0.5), model="oracle")
    save_score(tmp_path / "score.json", found)
    again = load_score(tmp_path / "score.json")
    assert again == found
    assert again.minus(found).value == 0
    summary = json.loads((tmp_path / "score.json").read_text())
    assert summary["nats_per_dim"]["value"] == found.nats_per_dim.value
    assert summary["covers"] == [0.002, 80]
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match=r"other\.json"):
        load_score(tmp_path / "other.json")


def test_scores_that_cannot_be_compared_or_made_are_named() -> None:
    found = score(ORACLE, Points(40))
    for other, what in (
        (score(ORACLE, Points(40, seed=1)), "fingerprint"),
        (score(ORACLE, Points(40), ScoreConfig(seed=1)), "config"),
        (score(ORACLE, Points(40), index=torch.arange(30)), "index"),
    ):
        with pytest.raises(ValueError, match=what):
            found.minus(other)
    with pytest.raises(ValueError, match=f"at least {MIN_IMAGES}"):
        score(ORACLE, Points(10))
    with pytest.raises(ValueError, match="sigma_min"):
        ScoreConfig(sigma_min=1.0, sigma_max=0.5)
