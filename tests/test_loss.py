import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from assay.loss import (
    ambient_loss,
    consistency_levels,
    consistency_loss,
    edm_weight,
    edm_weight_x_0,
    kernel_step,
    released_consistency_loss,
)
from assay.noise import LogNormal, draw_sigma
from tests.errors import fault
from tests.points import MixtureDenoiser

F64 = torch.float64
ATOMS = torch.tensor([[-1.0, 0.5], [0.8, 0.8], [0.2, -1.0]], dtype=F64)
WEIGHTS = torch.tensor([0.2, 0.5, 0.3], dtype=F64)
STD = 0.1


def oracle() -> MixtureDenoiser:
    return MixtureDenoiser(ATOMS, WEIGHTS, STD)


def clean_points(num: int, generator: torch.Generator) -> Tensor:
    which = torch.multinomial(WEIGHTS, num, replacement=True, generator=generator)
    return ATOMS[which] + STD * torch.randn(num, 2, generator=generator, dtype=F64)


class Perturbed(nn.Module):
    """The oracle plus a smooth error with six parameters, all zero at the oracle itself.

    Losses are quadratic in the parameters' effect, so gradients at any point test the whole loss.
    """

    def __init__(self, size: float = 0.0) -> None:
        super().__init__()
        self.oracle = oracle()
        self.theta = nn.Parameter(size * torch.tensor([1.0, -0.5, 0.3, 0.7, -0.2, 0.4], dtype=F64))

    def forward(self, x_t: Tensor, sigma_t: Tensor, label: Tensor | None = None) -> Tensor:
        shrink = 1 / (1 + sigma_t[:, None] ** 2)
        features = torch.stack([x_t.sin(), x_t * shrink, shrink.expand_as(x_t)], -1)  # (B, 2, 3)
        return self.oracle(x_t, sigma_t) + (features * self.theta.view(2, 3)).sum(-1)


def gradient_mean_and_error(loss: Tensor, model: nn.Module, num_chunks: int = 50) -> tuple[Tensor, Tensor]:
    """Mean gradient over the batch and its standard error, from the gradients of equal chunks."""
    (theta,) = model.parameters()
    chunks = loss.chunk(num_chunks)
    gradients = torch.stack([torch.autograd.grad(each.mean(), theta, retain_graph=True)[0] for each in chunks])
    return gradients.mean(0), gradients.std(0) / math.sqrt(num_chunks)


def test_without_nature_noise_it_is_the_ordinary_loss_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    layers = nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 48)
    net = nn.Sequential(nn.Flatten(), *layers, nn.Unflatten(1, (3, 4, 4)))
    x_0, eps = torch.randn(2, 64, 3, 4, 4, generator=generator)
    sigma_t = draw_sigma(LogNormal(), torch.zeros(64), generator)

    def denoiser(x_t: Tensor, sigma_t: Tensor, label: Tensor | None = None) -> Tensor:
        return net(x_t)

    x_t = x_0 + sigma_t.view(-1, 1, 1, 1) * eps
    ordinary = edm_weight(sigma_t) * (net(x_t) - x_0).square().flatten(1).mean(1)
    ambient = ambient_loss(denoiser, x_0, torch.zeros(64), sigma_t, eps, edm_weight(sigma_t))
    assert torch.equal(ambient, ordinary)


@pytest.mark.parametrize("size", [0.0, 0.3])
def test_noisy_points_give_the_gradient_of_clean_points(size: float) -> None:
    """In x_0 space the residuals differ by noise alone: expected gradients agree, sigma_tn mixed."""
    generator = torch.Generator().manual_seed(1)
    num = 200_000
    model = Perturbed(size)
    sigma_tn = torch.tensor([0.1, 0.3, 0.6, 1.0], dtype=F64).repeat(num // 4)
    sigma_t = sigma_tn * 1.5 + 0.2
    x_0 = clean_points(num, generator)
    x_tn = x_0 + sigma_tn[:, None] * torch.randn(num, 2, generator=generator, dtype=F64)
    eps_1, eps_2 = torch.randn(2, num, 2, generator=generator, dtype=F64)

    # || (1-r) h + r x_t - x_tn ||^2 / (1-r) has the gradient of || h - x_0 ||^2 times (1 - r); undo both.
    weight = (1 - (sigma_tn / sigma_t) ** 2) ** -2
    noisy = ambient_loss(model, x_tn, sigma_tn, sigma_t, eps_1, weight)
    clean = ambient_loss(model, clean_points(num, generator), torch.zeros(num, dtype=F64), sigma_t, eps_2)
    noisy_mean, noisy_error = gradient_mean_and_error(noisy, model)
    clean_mean, clean_error = gradient_mean_and_error(clean, model)
    assert ((noisy_mean - clean_mean).abs() < 4 * (noisy_error**2 + clean_error**2).sqrt()).all()
    if size:  # and that is a statement: away from the oracle the gradient is far from zero
        assert (clean_mean.abs() / clean_error).max() > 30


def test_the_oracle_is_a_stationary_point_of_the_ambient_loss() -> None:
    generator = torch.Generator().manual_seed(2)
    num = 100_000
    model = Perturbed()
    sigma_tn = torch.tensor([0.0, 0.05, 0.2, 0.8], dtype=F64).repeat(num // 4)
    x_0 = clean_points(num, generator)
    x_tn = x_0 + sigma_tn[:, None] * torch.randn(num, 2, generator=generator, dtype=F64)
    sigma_t = draw_sigma(LogNormal(), sigma_tn, generator)
    eps = torch.randn(num, 2, generator=generator, dtype=F64)
    for weight in (edm_weight(sigma_t), edm_weight_x_0(sigma_t, sigma_tn)):
        mean, error = gradient_mean_and_error(ambient_loss(model, x_tn, sigma_tn, sigma_t, eps, weight), model)
        assert (mean.abs() < 4 * error).all()


def test_weights_are_edms_and_differ_by_the_capped_factor() -> None:
    sigma_t, sigma_tn = torch.tensor([0.5, 0.5, 0.5]), torch.tensor([0.0, 0.3, 0.499])
    assert edm_weight(sigma_t, 0.25)[0].item() == pytest.approx((0.25 + 0.0625) / (0.5 * 0.25) ** 2)
    factor = edm_weight_x_0(sigma_t, sigma_tn, cap=7.0) / edm_weight(sigma_t)
    torch.testing.assert_close(factor, torch.tensor([1.0, (1 - 0.36) ** -2, 7.0]))


def gaussian_batch(num: int, seed: int) -> tuple[Tensor, Tensor, torch.Generator]:
    """Exact samples of N(0.3, 0.5^2) + N(0, 0.8^2): data for which the kernel is exact at any step size."""
    generator = torch.Generator().manual_seed(seed)
    sigma_start = torch.full((num,), 0.8, dtype=F64)
    x = 0.3 + math.hypot(0.5, 0.8) * torch.randn(num, 2, generator=generator, dtype=F64)
    return x, sigma_start, generator


GAUSSIAN = MixtureDenoiser(torch.full((1, 2), 0.3, dtype=F64), std=0.5)


def consistency_of(denoiser: nn.Module, num: int, seed: int, num_steps: int = 3) -> Tensor:
    x, sigma_start, generator = gaussian_batch(num, seed)
    high, low = consistency_levels(sigma_start, torch.rand(2, num, generator=generator), 0.02)
    eps = torch.randn(2, num, 2, generator=generator, dtype=F64)
    return consistency_loss(denoiser, x, sigma_start, high, low, eps, num_steps=num_steps)


class Shifted(nn.Module):
    """The exact denoiser of the Gaussian plus an error that differs between levels."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.size = nn.Parameter(torch.tensor(size, dtype=F64))

    def forward(self, x_t: Tensor, sigma_t: Tensor, label: Tensor | None = None) -> Tensor:
        return GAUSSIAN(x_t, sigma_t) + self.size * (0.8 - sigma_t[:, None])


@pytest.mark.parametrize("num_steps", [1, 3, 8])
def test_consistency_is_zero_in_expectation_at_the_oracle(num_steps: int) -> None:
    loss = consistency_of(GAUSSIAN, 100_000, 3, num_steps)
    assert abs(loss.mean()) < 4 * loss.std() / math.sqrt(len(loss))
    assert (loss < 0).any()  # the unbiased product is not a square


def test_the_oracle_is_a_stationary_point_of_the_consistency_loss() -> None:
    model = Shifted(0.0)
    mean, error = gradient_mean_and_error(consistency_of(model, 100_000, 4), model)
    assert abs(mean) < 4 * error


def test_consistency_is_positive_away_from_the_oracle_and_points_back() -> None:
    model = Shifted(0.4)
    loss = consistency_of(model, 50_000, 5)
    assert loss.mean() > 20 * loss.std() / math.sqrt(len(loss))
    assert torch.autograd.grad(loss.mean(), model.size)[0] > 0


def test_consistency_on_a_mixture_is_small_beside_a_perturbed_denoiser() -> None:
    """The kernel ignores the spread of x_0 given x_s', an error of second order in the step (see docstring)."""
    generator = torch.Generator().manual_seed(6)
    num = 100_000
    sigma_start = torch.full((num,), 0.5, dtype=F64)
    x = clean_points(num, generator) + 0.5 * torch.randn(num, 2, generator=generator, dtype=F64)
    means = []
    for min_ratio in (0.5, 0.9):
        uniform = torch.rand(2, num, generator=generator)
        high, low = consistency_levels(sigma_start, uniform, 0.02, min_ratio)
        eps = torch.randn(2, num, 2, generator=generator, dtype=F64)
        at_oracle = consistency_loss(oracle(), x, sigma_start, high, low, eps)
        means.append(at_oracle.mean().abs().item())
        error = (at_oracle.std() / math.sqrt(num)).item()
    perturbed = consistency_loss(Perturbed(0.2), x, sigma_start, high, low, eps).mean().item()
    assert means[0] < 0.0004 and means[1] < means[0] / 3  # measured: 1.6e-4 and 2e-5, beside 1.8e-3 perturbed
    assert means[1] < 4 * error and perturbed > means[1]


def test_consistency_does_not_depend_on_the_sub_batch_in_expectation() -> None:
    model = Shifted(0.4)
    loss = consistency_of(model, 60_000, 7)
    for size in (1, 7, 64):
        means = loss[: 60_000 // size * size].view(-1, size).mean(1)
        error = means.std() / math.sqrt(len(means))
        assert abs(means.mean() - loss.mean()) < 4 * error
    other = consistency_of(model, 2_000, 8)  # a genuinely smaller batch
    assert abs(other.mean() - loss.mean()) < 4 * other.std() / math.sqrt(len(other))


def test_the_higher_level_teaches_and_the_lower_learns() -> None:
    class TwoLevels(nn.Module):
        """Separate parameters for levels above and below 0.1."""

        def __init__(self) -> None:
            super().__init__()
            self.above = nn.Parameter(torch.tensor(0.5, dtype=F64))
            self.below = nn.Parameter(torch.tensor(0.1, dtype=F64))

        def forward(self, x_t: Tensor, sigma_t: Tensor, label: Tensor | None = None) -> Tensor:
            return torch.where(sigma_t[:, None] > 0.1, self.above, self.below).expand_as(x_t)

    model = TwoLevels()
    x, sigma_start, generator = gaussian_batch(16, 9)
    high, low = torch.full((16,), 0.2, dtype=F64), torch.full((16,), 0.05, dtype=F64)
    eps = torch.randn(2, 16, 2, generator=generator, dtype=F64)
    loss = consistency_loss(model, x, sigma_start, high, low, eps)
    torch.testing.assert_close(loss, torch.full((16,), 0.16, dtype=F64))
    loss.mean().backward()
    assert model.above.grad is None or model.above.grad == 0
    assert model.below.grad.item() == pytest.approx(2 * (0.1 - 0.5))


@pytest.mark.parametrize(
    ("start", "end", "num_steps", "least"),
    [(0.2, 0.02, 3, 0.955), (0.23, 0.02, 3, 0.95), (0.2, 0.02, 4, 0.975)],
)
def test_the_walk_keeps_the_spread_of_gaussian_detail_within_5_percent(
    start: float, end: float, num_steps: int, least: float
) -> None:
    """For Gaussian data the walk is linear: a point one deviation from the mean ends as far as the spread."""
    std = torch.logspace(-3, 0.5, 100, dtype=F64)[:, None]  # of the data: every kind of detail
    true_start, true_end = (std**2 + start**2).sqrt(), (std**2 + end**2).sqrt()

    def exact(x_t: Tensor, sigma_t: Tensor, label: Tensor | None = None) -> Tensor:
        return x_t * std**2 / (std**2 + sigma_t[:, None] ** 2)

    seen: list[Tensor] = []

    def watched(x_t: Tensor, sigma_t: Tensor, label: Tensor | None = None) -> Tensor:
        seen.append(x_t)
        return exact(x_t, sigma_t)

    first, last = (torch.full((100,), level, dtype=F64) for level in (start, end))
    eps = torch.zeros(2, 100, 1, dtype=F64)
    consistency_loss(watched, true_start, first, last, 0.9 * last, eps, num_steps=num_steps)
    kept = seen[num_steps] / true_end  # what the teacher sees
    assert least < kept.min() < least + 0.005 and kept.max() < 1.001

    x = torch.ones_like(std)  # the stochastic walk that this replaced, in three kernel steps from 0.2 to 0.02
    levels = torch.logspace(math.log10(0.2), math.log10(0.02), 4, dtype=F64)
    variance = std**2 + 0.2**2
    for high, low in zip(levels[:-1], levels[1:], strict=True):
        gain = kernel_step(x, exact(x, high.expand(100)), high.expand(100), low.expand(100), 0 * x)
        spread = kernel_step(0 * x, 0 * x, high.expand(100), low.expand(100), x)
        variance = gain**2 * variance + spread**2
    assert (variance / (std**2 + 0.02**2)).sqrt().min() == pytest.approx(0.736, abs=0.002)


def test_only_one_draw_carries_the_gradient_of_both() -> None:
    """Doubling one draw's gradient has the expectation of the product's own."""
    model = Shifted(0.4)
    x, sigma_start, generator = gaussian_batch(20_000, 12)
    high, low = 0.5 * sigma_start, 0.3 * sigma_start
    eps = torch.randn(2, 20_000, 2, generator=generator, dtype=F64)
    ours = torch.autograd.grad(consistency_loss(model, x, 1.0001 * high, high, low, eps).mean(), model.size)[0]
    teacher = model(x, high).detach()
    first, second = (teacher - model(kernel_step(x, teacher, high, low, draw), low) for draw in eps)
    full = torch.autograd.grad((first * second).mean(), model.size)[0]
    assert ours.item() == pytest.approx(full.item(), rel=0.02)


@pytest.mark.parametrize(("num_levels", "num_samples"), [(2, 1), (8, 1), (8, 32), (6, 6)])
def test_the_released_loss_has_the_expectation_of_its_recursion(num_levels: int, num_samples: int) -> None:
    """On Gaussian data all is linear: h(x, s) = g(s) x, so the walk is x' = a x + noise of variance v.

    The recursion is that of the released sampler, level by level on a grid of rho = 7; then the loss is
    (g(s') - g(s'') a)^2 E[x^2] + g(s'')^2 v / K.
    """
    std, high, low, num = 0.5, 0.8, 0.2, 40_000

    def gain(sigma: float) -> float:
        return std**2 / (std**2 + sigma**2)

    first, last = high ** (1 / 7), low ** (1 / 7)
    grid = [(first + i / (num_levels - 1) * (last - first)) ** 7 for i in range(num_levels)]
    a, variance = 1.0, 0.0
    for sigma, to in itertools.pairwise(grid):
        factor = 1 + 2 * (to - sigma) * (1 - gain(sigma)) / sigma
        a, variance = a * factor, variance * factor**2 + 2 * (sigma - to) * sigma
    expected = (gain(high) - gain(low) * a) ** 2 * (std**2 + high**2) + gain(low) ** 2 * variance / num_samples

    def exact(x_t: Tensor, sigma_t: Tensor, label: Tensor | None = None) -> Tensor:
        return x_t * std**2 / (std**2 + sigma_t[:, None] ** 2)

    generator = torch.Generator().manual_seed(num_levels)
    x = math.hypot(std, high) * torch.randn(num, 1, generator=generator, dtype=F64)
    eps = torch.randn(num_levels - 1, num_samples, num, 1, generator=generator, dtype=F64)
    levels = [torch.full((num,), level, dtype=F64) for level in (high, low)]
    loss = released_consistency_loss(exact, x, *levels, eps)
    assert abs(loss.mean() - expected) < 4 * loss.std() / math.sqrt(num)


def test_the_released_loss_teaches_nothing_where_its_levels_coincide_and_walks_without_augmentation() -> None:
    x, start, generator = gaussian_batch(8, 14)
    eps = torch.randn(3, 4, 8, 2, generator=generator, dtype=F64)
    loss = released_consistency_loss(Shifted(0.4), x, start, start, eps)
    torch.testing.assert_close(loss, torch.zeros(8, dtype=F64))
    calls: list[tuple[str, int]] = []

    def recorded(name: str) -> Any:
        def denoiser(x_t: Tensor, sigma_t: Tensor, label: Tensor | None = None) -> Tensor:
            calls.append((name, len(x_t)))
            return GAUSSIAN(x_t, sigma_t)

        return denoiser

    released_consistency_loss(recorded("labels"), x, start, start / 2, eps, walker=recorded("none"))
    assert sorted(calls) == [("labels", 8)] + [("none", 32)] * 4  # three intervals, then the level below


def test_kernel_step_draws_the_exact_gaussian_posterior() -> None:
    """For x_0 known, x_s'' given x_s' has the mean and variance of conditioning two Gaussian noises."""
    generator = torch.Generator().manual_seed(10)
    num, high, low = 400_000, 0.9, 0.4
    x_0 = torch.full((num, 1), 0.7, dtype=F64)
    x_low = x_0 + low * torch.randn(num, 1, generator=generator, dtype=F64)
    x_high = x_low + math.sqrt(high**2 - low**2) * torch.randn(num, 1, generator=generator, dtype=F64)
    eps = torch.randn(num, 1, generator=generator, dtype=F64)
    levels = (torch.full((num,), level, dtype=F64) for level in (high, low))
    drawn = kernel_step(x_high, x_0, *levels, eps)
    real, ours = torch.cov(torch.cat([x_low, x_high], 1).T), torch.cov(torch.cat([drawn, x_high], 1).T)
    torch.testing.assert_close(ours, real, rtol=0, atol=0.006)
    torch.testing.assert_close(drawn.mean(), x_low.mean(), rtol=0, atol=0.004)


def test_a_prediction_that_would_broadcast_is_rejected() -> None:
    x, levels = torch.zeros(4, 1, 2, 2), torch.ones(4)
    found = fault(lambda: ambient_loss(lambda x_t, *_: x_t.mean((1, 2, 3), True), x, 0 * levels, levels, x))
    assert found.key == "x_0_hat"


@pytest.mark.parametrize("last", [0.0, 1 - 2**-24])
def test_the_ends_of_the_unit_interval_give_levels_in_order(last: float) -> None:
    """float32 rounds the ratio of the largest uniform number to 1, and powers to above their base."""
    start = torch.linspace(0.01, 3, 500)
    high, low = consistency_levels(start, torch.full((2, 500), last))
    assert ((0 < low) & (low < high) & (high <= start)).all()
    expected = start if last == 0 else torch.full((500,), 0.002)
    torch.testing.assert_close(high, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(low / high, torch.full((500,), 0.5 if last == 0 else 1.0))
