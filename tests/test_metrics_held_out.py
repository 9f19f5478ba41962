import math
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import integrate
from torch import Tensor, nn

from assay.denoise import Preconditioned
from assay.errors import AssayError
from assay.metrics.held_out import (
    GREY_STEP,
    MIN_IMAGES,
    HeldOutConfig,
    covariance,
    held_out_loss,
    load_held_out_loss,
    losses_by_band,
    num_evaluations,
    paired_errors,
    save_held_out_loss,
    stopping_steps,
)
from tests.errors import rejected
from tests.points import ATOMS, ORACLE, STD, WEIGHTS, MixtureDenoiser, Points


class Gaussian(Points):
    """Points of N(0, std^2 I) in four dimensions, all clean."""

    image_shape = (4, 1, 1)

    def __init__(self, num: int, std: float, seed: int = 0) -> None:
        self.x_tn = std * torch.randn(num, 4, 1, 1, generator=torch.Generator().manual_seed(seed))
        self.sigma_tn, self.label = torch.zeros(num), torch.zeros(num, dtype=torch.long)
        self.name, self.fingerprint = "gaussian", f"{num} {std} {seed}"


def gaussian_denoiser(mean: float, std: float) -> MixtureDenoiser:
    return MixtureDenoiser(torch.full((1, 4, 1, 1), mean), std=std)


def gaussian_rate(sigma: float, std: float, mean_q: float, std_q: float) -> float:
    """mse_q / sigma^2 in one dimension, for data N(0, std^2) and the exact denoiser of N(mean_q, std_q^2)."""
    gain = std_q**2 / (std_q**2 + sigma**2)
    return ((1 - gain) ** 2 * (std**2 + mean_q**2) + gain**2 * sigma**2) / sigma**2


def gaussian_loss(low: float) -> float:
    """The loss of the exact denoiser of N(0, 0.5^2) from a level up, in one dimension."""
    return integrate.quad(lambda u: gaussian_rate(math.exp(u), 0.5, 0, 0.5), math.log(low), math.log(80))[0]


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
def test_a_difference_of_losses_is_a_difference_of_divergences(mean_q: float, std_q: float) -> None:
    assert excess(0.5, mean_q, std_q, 1e-6, 1e6) == pytest.approx(gaussian_kl(0.5, mean_q, std_q), abs=1e-6)
    held_out = Gaussian(4000, 0.5)
    right, wrong = (held_out_loss(gaussian_denoiser(*law), held_out) for law in ((0.0, 0.5), (mean_q, std_q)))
    gap = wrong.minus(right)
    assert gap.value == pytest.approx(gaussian_kl(0.5, mean_q, std_q), abs=3 * gap.standard_error)
    assert gap.standard_error < 0.1 * gap.value + 0.002
    # Paired on the same images and noise, the error is far below that of two losses side by side.
    assert gap.standard_error < 0.7 * math.hypot(
        wrong.nats_per_dim.standard_error, right.nats_per_dim.standard_error
    )
    mmse = gaussian_loss(GREY_STEP)
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
    gap = held_out_loss(other, held_out).minus(held_out_loss(ORACLE, held_out))
    assert expected > 0.1
    assert gap.value == pytest.approx(expected, abs=3 * gap.standard_error)
    assert gap.standard_error < 0.1 * expected


@pytest.mark.parametrize(
    ("mean_q", "std_q", "sigma_min"), [(0.2, 0.7, GREY_STEP), (-0.3, 0.3, GREY_STEP), (0.0, 0.05, 0.002)]
)
@pytest.mark.parametrize("std", [0.1, 0.5, 1.0])
def test_the_range_misses_next_to_nothing(std: float, mean_q: float, std_q: float, sigma_min: float) -> None:
    # For images in [-1, 1], down to about a thirtieth of their finest detail.
    missed = gaussian_kl(std, mean_q, std_q) - excess(std, mean_q, std_q, sigma_min, HeldOutConfig().sigma_max)
    assert abs(missed) < 3e-3 * gaussian_kl(std, mean_q, std_q) + 1e-4


@pytest.mark.parametrize("num_bands", [1, 4, 16])
def test_few_levels_are_not_biased(num_bands: int) -> None:
    # Errors without any noise over images: the exact rate at each level, here as a residual of zero images.
    class Rate(nn.Module):
        def forward(self, x_t: Tensor, sigma_t: Tensor, label: Tensor | None = None) -> Tensor:
            rate = 1 / (1 + sigma_t.double() ** 2 / 0.25)  # that of a Gaussian
            return (rate * sigma_t**2).sqrt().float().view(-1, 1, 1, 1).expand_as(x_t)

    held_out = Gaussian(1000, 0.0)
    found = held_out_loss(Rate(), held_out, HeldOutConfig(num_bands=num_bands)).nats_per_dim.value
    exact = integrate.quad(lambda u: 1 / (1 + math.exp(2 * u) / 0.25), math.log(GREY_STEP), math.log(80))[0]
    assert found == pytest.approx(exact, rel=2e-3)
    # Fixed levels in the middle of the intervals would be biased by as much as the model differences we seek.
    edges = np.linspace(math.log(GREY_STEP), math.log(80), 5)
    fixed = np.mean([1 / (1 + np.exp(edges[1:] + edges[:-1]) / 0.25)]) * math.log(80 / GREY_STEP)
    assert abs(fixed - exact) > 0.02


def test_parts_add_up_and_the_curve_is_their_density() -> None:
    found = held_out_loss(gaussian_denoiser(0.0, 0.5), Gaussian(3000, 0.5))
    below, above = found.part(high=0.3), found.part(low=0.3)
    assert below.value + above.value == pytest.approx(found.nats_per_dim.value, rel=1e-9)
    exact, edges = gaussian_loss(0.3), found.config.edges
    assert above.value == pytest.approx(exact, abs=3 * above.standard_error)
    rates, errors = found.rates().T
    assert rates.sum() * found.config.width == pytest.approx(found.nats_per_dim.value, rel=1e-6)
    expected = [gaussian_rate(sigma, 0.5, 0, 0.5) for sigma in np.sqrt(edges[:-1] * edges[1:])]
    assert (abs(rates - expected) < 4 * np.hypot(errors, 0.01)).all()


@pytest.mark.parametrize("law", [(ATOMS, WEIGHTS, STD), (ATOMS * 0.7, WEIGHTS.flip(0), 0.35)])
def test_noisy_images_score_the_levels_above_their_own(law: tuple[Tensor, Tensor, float]) -> None:
    atoms, weights, std = law
    denoiser = MixtureDenoiser(atoms.view(-1, 2, 1, 1), weights, std)
    noisy = held_out_loss(denoiser, Points(10_000, clean_fraction=0.0, sigma=0.3, seed=1))
    clean = held_out_loss(denoiser, Points(10_000, seed=2))
    low, high = noisy.covers
    assert (low, high) == (min(edge for edge in noisy.config.edges if edge >= 1.25 * 0.3), 80)
    expected = clean.part(low)
    assert noisy.nats_per_dim.value == pytest.approx(
        expected.value, abs=3 * math.hypot(expected.standard_error, noisy.nats_per_dim.standard_error)
    )
    assert noisy.nats_per_dim.standard_error < 0.05 * expected.value
    assert noisy.part(high=low) == noisy.part(0, 0)  # nothing is claimed below


def test_images_of_several_levels_share_the_levels_they_cover() -> None:
    held_out = Points(10_000, clean_fraction=0.1, sigma=0.3, seed=3)
    mixed, clean = held_out_loss(ORACLE, held_out), held_out_loss(ORACLE, Points(10_000, seed=2))
    assert mixed.covers == (GREY_STEP, 80)
    for ends in ((0.0, 0.375), (0.375, math.inf), (0.0, math.inf)):
        part, expected = mixed.part(*ends), clean.part(*ends)
        error = math.hypot(part.standard_error, expected.standard_error)
        assert part.value == pytest.approx(expected.value, abs=3 * error)
    # Below, a tenth of the images; above, all of them, though each is noisier: both beat the clean tenth alone.
    alone = held_out_loss(ORACLE, held_out, index=torch.arange(1000)).part(2.0).standard_error
    assert mixed.part(2.0).standard_error < 0.5 * alone


@pytest.mark.parametrize("clean_fraction", [1.0, 0.1])
def test_the_standard_error_is_the_spread_over_held_out_sets(clean_fraction: float) -> None:
    other = MixtureDenoiser(ATOMS.view(-1, 2, 1, 1) * 0.8, WEIGHTS, 0.3)
    found, gaps = [], []
    for seed in range(60):
        held_out = Points(300, clean_fraction, 0.3, seed)
        config = HeldOutConfig(num_bands=8, seed=seed)
        one, two = held_out_loss(ORACLE, held_out, config), held_out_loss(other, held_out, config)
        found.append(one.nats_per_dim)
        gaps.append(two.minus(one))
    for estimates in (found, gaps):
        spread = np.std([estimate.value for estimate in estimates], ddof=1)
        claimed = np.mean([estimate.standard_error for estimate in estimates])
        assert claimed == pytest.approx(spread, rel=0.3)  # 60 sets know the spread to 9%


def test_batches_and_subsets_do_not_matter() -> None:
    held_out = Points(100, clean_fraction=0.5)
    whole = held_out_loss(ORACLE, held_out)
    done: list[int] = []
    small = held_out_loss(ORACLE, held_out, batch_size=7, progress=done.append)
    assert small.nats_per_dim.value == pytest.approx(whole.nats_per_dim.value, rel=1e-5)
    assert sum(done) == 100
    on_two = held_out_loss(ORACLE, held_out, batch_size=7, devices=["cpu", "cpu"])
    assert on_two == small
    half = held_out_loss(ORACLE, held_out, index=torch.arange(0, 100, 2))
    np.testing.assert_allclose(half.errors, whole.errors[::2], rtol=1e-5, atol=1e-6)
    wanted = torch.rand(100, whole.config.num_bands, generator=torch.Generator().manual_seed(0)) < 0.3
    some = held_out_loss(ORACLE, held_out, wanted=wanted)
    np.testing.assert_allclose(some.errors, np.where(wanted, whole.errors, 0), rtol=1e-5, atol=1e-6)


def test_a_class_conditional_model_sees_the_labels() -> None:
    class ByLabel(nn.Module):
        num_classes = 2

        def forward(self, x_t: Tensor, sigma_t: Tensor, label: Tensor) -> Tensor:
            return label.view(-1, 1, 1, 1).expand_as(x_t).float()

    held_out = Points(50)
    held_out.x_tn = held_out.label.view(-1, 1, 1, 1).expand(-1, 2, 1, 1).float()
    assert held_out_loss(ByLabel(), held_out).nats_per_dim.value == 0
    held_out.class_names = ("left", "middle", "right")
    with rejected("held_out"):
        held_out_loss(ByLabel(), held_out)


def test_an_augmented_network_is_scored_as_it_samples() -> None:
    class Augmented(nn.Module):
        def forward(self, x: Tensor, c_noise: Tensor, label: None, augment_label: Tensor | None) -> Tensor:
            assert augment_label is None  # images as they are
            return torch.zeros_like(x)

    found = held_out_loss(Preconditioned(Augmented(), sigma_data=0.5), Gaussian(1000, 0.5))
    assert found.minus(held_out_loss(gaussian_denoiser(0.0, 0.5), Gaussian(1000, 0.5))).value == pytest.approx(
        0, abs=1e-6
    )


class ByLevel(nn.Module):
    """One model below a level of 0.5, another above."""

    def __init__(self, below: nn.Module, above: nn.Module) -> None:
        super().__init__()
        self.below, self.above = below, above

    def forward(self, x_t: Tensor, sigma_t: Tensor, label: None = None) -> Tensor:
        is_below = (sigma_t < 0.5).view(-1, 1, 1, 1)
        return torch.where(is_below, self.below(x_t, sigma_t), self.above(x_t, sigma_t))


RIGHT, WRONG = gaussian_denoiser(0.0, 0.5), gaussian_denoiser(0.4, 0.5)
# Low levels are best early, high ones at the end, and after 20 steps all are halfway.
ALONG = {10: ByLevel(RIGHT, WRONG), 20: gaussian_denoiser(0.2, 0.5), 40: ByLevel(WRONG, RIGHT)}


@pytest.fixture
def snapshots(monkeypatch: pytest.MonkeyPatch) -> dict[int, Path]:
    def load(path: Path, to_measure: bool) -> SimpleNamespace:
        """A checkpoint whose weights are a closed form."""
        config = SimpleNamespace(image_shape=(4, 1, 1))
        return SimpleNamespace(denoiser=ALONG[int(path.name)], config=config, info=None)

    monkeypatch.setattr("assay.metrics.held_out.load_checkpoint", load)
    return {step: Path(str(step)) for step in ALONG}


def test_each_band_is_measured_where_it_should_have_been_stopped(snapshots: dict[int, Path]) -> None:
    held_out, config, done = Gaussian(600, 0.5), HeldOutConfig(sigma_min=0.1, num_bands=6), list[int]()
    found = losses_by_band(snapshots, held_out, config, progress=done.append)
    edges = config.edges
    assert sum(done) == 3 * 600
    assert edges[1] < 0.5 < edges[2]  # the second band has levels on both sides of the change
    assert found.step[0] == 10 and found.step[2:5] == (40, 40, 40)
    odd = torch.arange(1, 600, 2)
    best, at_end = (held_out_loss(model, held_out, config, odd) for model in (RIGHT, ALONG[40]))
    np.testing.assert_allclose(found.at_end.errors, at_end.errors, rtol=1e-6)
    for band, low, high in zip(found.bands(), edges[:-1], edges[1:], strict=True):
        assert (band.low, band.high, band.num_images) == (low, high, 300)
        loss, end = found.best.part(low, high), at_end.part(low, high).value
        assert (band.loss, band.error) == pytest.approx((loss.value, loss.standard_error))
        assert band.loss_at_end == pytest.approx(end)
        if high < 0.5 or low > 0.5:
            assert band.loss == pytest.approx(best.part(low, high).value, rel=1e-5)
    losses = [held_out_loss(each, held_out, config, odd - 1).nats_per_dim.value for each in ALONG.values()]
    assert found.one_step == list(ALONG)[int(np.argmin(losses))]
    assert found.best.nats_per_dim.value < found.with_one_stop.nats_per_dim.value


def test_few_images_choose_the_stops(snapshots: dict[int, Path]) -> None:
    held_out, config, calls = Gaussian(2000, 0.5), HeldOutConfig(), list[int]()
    for model in ALONG.values():
        model.register_forward_hook(lambda *call: calls.append(len(call[-1])))
    found = losses_by_band(snapshots, held_out, config)
    assert sum(calls) <= num_evaluations(2000, 3) < 0.6 * 3 * 2000 * config.num_bands
    assert sum(calls) > 0.8 * num_evaluations(2000, 3)
    quick, all_even = found.chosen_by, torch.arange(0, 2000, 2)
    for row, model in zip(quick, ALONG.values(), strict=True):
        whole = held_out_loss(model, held_out, config, all_even)
        losses, errors = whole.rates().T * config.width
        assert (abs(row - losses) < 4 * errors * math.sqrt(1000 / 125)).all()


def test_errors_in_comparisons_are_those_of_direct_differences() -> None:
    held_out = Gaussian(400, 0.5)
    laws = [(0.0, 0.5), (0.05, 0.5), (0.0, 0.52), (0.6, 0.2)]  # the last is far worse
    runs = [held_out_loss(gaussian_denoiser(*law), held_out) for law in laws]
    found, errors = covariance(runs, 0.1, 3.0), paired_errors(runs, 0.1, 3.0)
    for i, j in combinations(range(len(laws)), 2):
        direct = runs[i].minus(runs[j], 0.1, 3.0).standard_error
        assert found[i, i] + found[j, j] - 2 * found[i, j] == pytest.approx(direct**2, rel=1e-6)
        assert math.hypot(errors[i], errors[j]) == pytest.approx(direct, rel=0.2)
    assert errors[3] > 10 * max(errors[:3])  # one bad model does not make the others' errors large
    one, two = paired_errors(runs[:2])
    assert one == pytest.approx(two) == pytest.approx(runs[0].minus(runs[1]).standard_error / math.sqrt(2))
    assert paired_errors(runs[:1]) == [pytest.approx(runs[0].nats_per_dim.standard_error)]


def test_stopping_times_are_spread_over_a_run() -> None:
    assert stopping_steps(2500) == [98, 156, 248, 394, 625, 992, 1575, 2500]
    assert stopping_steps(3) == [1, 2, 3]


def test_a_loss_survives_its_file(tmp_path: Path) -> None:
    found = held_out_loss(ORACLE, Points(40, clean_fraction=0.5), model="oracle")
    save_held_out_loss(tmp_path / "loss.npz", found)
    again = load_held_out_loss(tmp_path / "loss.npz")
    assert again == found and again.minus(found).value == 0
    assert again != held_out_loss(ORACLE, Points(40, clean_fraction=0.5), HeldOutConfig(seed=1), model="oracle")
    np.savez(tmp_path / "other.npz", about="{}")
    with rejected(path=tmp_path / "other.npz"):
        load_held_out_loss(tmp_path / "other.npz")


def test_losses_that_cannot_be_compared_or_made_are_named() -> None:
    found = held_out_loss(ORACLE, Points(40))
    for other, key in (
        (held_out_loss(ORACLE, Points(40, seed=1)), "fingerprint"),
        (held_out_loss(ORACLE, Points(40), HeldOutConfig(seed=1)), "config"),
        (held_out_loss(ORACLE, Points(40), index=torch.arange(30)), "index"),
    ):
        with rejected(key):
            found.minus(other)
    with rejected("held_out"):
        held_out_loss(ORACLE, Points(MIN_IMAGES - 1))
    with pytest.raises(ValueError, match="sigma_min"):
        HeldOutConfig(sigma_min=1.0)
    with pytest.raises(AssayError) as caught:
        held_out_loss(lambda x_t, sigma_t, label=None: x_t / 0, Points(40), model="diverged")
    assert "diverged" in caught.value.what and "train.lr" in (caught.value.cure or "")


def test_two_models_are_compared_below_and_above_a_level() -> None:
    """One is wrong below 0.5, the other above: neither is better as a whole."""
    right, held_out = gaussian_denoiser(0.0, 0.5), Gaussian(400, 0.5)

    def wrong(where: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
        return lambda x, sigma, label=None: (
            right(x, sigma) * (1 - 0.4 * where(sigma).to(x))[:, None, None, None]
        )

    low, high = (held_out_loss(wrong(where), held_out) for where in (lambda s: s < 0.5, lambda s: s >= 0.5))
    level = low.split(high)
    assert level is not None and 0.4 < level < 0.8 and level == high.split(low)
    assert low.minus(high, 0.0, level).value > 0 > low.minus(high, level).value
    best = held_out_loss(right, held_out)
    level = low.split(best)
    assert level is not None and 0.4 < level < 0.8
    assert low.minus(best, 0.0, level).in_errors > 5 and abs(low.minus(best, level).in_errors) < 2

    def worse_at_all(x: Tensor, sigma: Tensor, label: Tensor | None = None) -> Tensor:
        return right(x, sigma) + 0.5 * sigma[:, None, None, None]

    everywhere = held_out_loss(worse_at_all, held_out)
    assert everywhere.split(best) is None and best.split(best) is None
