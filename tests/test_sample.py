import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from assay.denoise import Preconditioned
from assay.sample import (
    Churn,
    Multistep,
    SampleConfig,
    SeededNoise,
    edm_sigmas,
    flow_down,
    generate,
    sample_posterior,
    solve,
)
from tests.errors import fault
from tests.points import MixtureDenoiser

F64 = torch.float64
GOLDEN = np.load(Path(__file__).parent / "golden" / "edm_sampler.npz")


@pytest.mark.parametrize(
    ("name", "num_steps", "solver"),
    [("heun_18", 18, "heun"), ("heun_40", 40, "heun"), ("euler_40", 40, "euler")],
)
def test_samplers_match_edms(name: str, num_steps: int, solver: str) -> None:
    oracle = MixtureDenoiser(torch.tensor(GOLDEN["mu"]), torch.tensor(GOLDEN["w"]), float(GOLDEN["std"]))
    x = solve(oracle, 80 * torch.tensor(GOLDEN["latents"]), edm_sigmas(num_steps), solver)
    np.testing.assert_allclose(x.numpy(), GOLDEN[name], rtol=0, atol=1e-9)


@pytest.mark.parametrize(("solver", "order"), [("euler", 1), ("heun", 2), ("multistep", 2)])
def test_order_of_convergence_against_the_exact_flow(solver: str, order: int) -> None:
    """For N(m, s^2) the flow is x(sigma) = m + (x(max) - m) sqrt((s^2 + sigma^2) / (s^2 + sigma_max^2))."""
    mean, std, sigma_max, sigma_end = 0.3, 0.5, 20.0, 0.05
    gaussian = MixtureDenoiser(torch.tensor([[mean]], dtype=F64), std=std)
    start = torch.linspace(-30, 30, 7, dtype=F64)[:, None]
    exact = mean + (start - mean) * math.sqrt((std**2 + sigma_end**2) / (std**2 + sigma_max**2))
    steps, errors = [32, 64, 128, 256], []
    for num_steps in steps:
        sigmas = edm_sigmas(num_steps + 1, sigma_end, sigma_max)[:-1]  # stop at sigma_end, not at 0
        errors.append((solve(gaussian, start, sigmas, solver) - exact).abs().max().item())
    slope = -np.polyfit(np.log(steps), np.log(errors), 1)[0]
    assert slope == pytest.approx(order, abs=0.12)


@pytest.mark.parametrize(("solver", "order"), [("euler", 1), ("heun", 2), ("multistep", 2)])
def test_order_of_convergence_on_a_mixture(solver: str, order: int) -> None:
    atoms = torch.tensor([[-1.0, 0.5], [0.8, 0.8], [0.2, -1.0]], dtype=F64)
    oracle = MixtureDenoiser(atoms, torch.tensor([0.2, 0.5, 0.3], dtype=F64), 0.3)
    start = 20 * torch.randn(16, 2, dtype=F64, generator=torch.Generator().manual_seed(0))
    exact = solve(oracle, start, edm_sigmas(1500, 0.05, 20)[:-1])
    steps = [48, 96, 192]
    ends = [solve(oracle, start, edm_sigmas(n + 1, 0.05, 20)[:-1], solver) for n in steps]
    errors = [(end - exact).abs().mean() for end in ends]
    assert -np.polyfit(np.log(steps), np.log(errors), 1)[0] == pytest.approx(order, abs=0.25)


def test_the_multistep_solver_is_exact_where_the_flow_is_linear() -> None:
    """One atom: the prediction stays, and x - atom shrinks with sigma, in however few steps."""
    atom = torch.tensor([[0.3, -0.7]], dtype=F64)
    start = 80 * torch.randn(5, 2, dtype=F64, generator=torch.Generator().manual_seed(0))
    x = solve(MixtureDenoiser(atom), start, torch.tensor([80.0, 7.0, 1.0, 0.1], dtype=F64), "multistep")
    torch.testing.assert_close(x, atom + (start - atom) * 0.1 / 80)


def test_a_multistep_is_dpm_solver_2m() -> None:
    """Against the formula of the paper with alpha = 1, lambda = -log sigma, r = h_before / h."""
    generator = torch.Generator().manual_seed(1)
    x, now, earlier = torch.randn(3, 4, 2, generator=generator, dtype=F64)
    before, sigma, after = 3.0, 1.2, 0.7
    h, r = math.log(sigma / after), math.log(before / sigma) / math.log(sigma / after)
    extrapolated = (1 + 1 / (2 * r)) * now - earlier / (2 * r)
    expected = after / sigma * x - math.expm1(-h) * extrapolated
    for level in (float, lambda value: torch.full((4, 1), value, dtype=F64)):  # for all images, or for each
        solver = Multistep()
        solver.before = earlier, level(before)
        found = solver.step(lambda x, sigma: now, x, level(sigma), level(after))
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("solver", "num_evaluations"), [("euler", 12), ("heun", 23), ("multistep", 12)])
def test_what_a_solver_costs(solver: str, num_evaluations: int) -> None:
    assert SampleConfig(num_steps=12, solver=solver).num_evaluations() == num_evaluations


def test_twelve_multisteps_beat_heun_with_as_many_evaluations() -> None:
    """The distance from the exact flow's end; measured 0.08 and 0.4."""
    atoms = torch.randn(6, 2, dtype=F64, generator=torch.Generator().manual_seed(0)) * 0.8
    oracle = MixtureDenoiser(atoms, std=0.1)
    start = 80 * torch.randn(200, 2, dtype=F64, generator=torch.Generator().manual_seed(1))
    exact = solve(oracle, start, edm_sigmas(200))
    multistep, heun = solve(oracle, start, edm_sigmas(12), "multistep"), solve(oracle, start, edm_sigmas(7))
    assert (multistep - exact).abs().mean() < 0.5 * (heun - exact).abs().mean()


def test_precision_of_sampling() -> None:
    gaussian = MixtureDenoiser(torch.tensor([[0.3]]), std=0.5)
    torch.manual_seed(0)
    net = Preconditioned(Net())

    def image(denoiser: nn.Module, precision: str, shape: tuple[int, ...]) -> Tensor:
        sample = SampleConfig(num_steps=12, precision=precision)  # type: ignore[arg-type]
        return next(sample.generate(denoiser, range(8), shape))

    single, double = image(gaussian, "32", (1,)), image(gaussian, "64", (1,))
    assert single.dtype == double.dtype == torch.float32
    start = torch.stack([torch.randn(1, generator=torch.Generator().manual_seed(s)) for s in range(8)]).double()
    exact = solve(lambda x, s, label: gaussian(x.float(), s.float()).double(), 80 * start, edm_sigmas(12))
    assert torch.equal(double, exact.float())
    torch.testing.assert_close(single, double, rtol=1e-4, atol=1e-4)
    half = image(net, "bf16", (1, 8, 8))
    assert not torch.equal(half, image(net, "32", (1, 8, 8)))
    torch.testing.assert_close(half, image(net, "32", (1, 8, 8)), rtol=0, atol=0.05)


def test_edm_grid_is_the_formula() -> None:
    grid = edm_sigmas(5, 0.01, 10, 3).tolist()
    for i in range(5):
        assert grid[i] == pytest.approx((10 ** (1 / 3) + i / 4 * (0.01 ** (1 / 3) - 10 ** (1 / 3))) ** 3)
    assert grid[-1] == 0 and grid[0] == 10 and grid[4] == 0.01


@given(st.floats(0.003, 70), st.integers(3, 200), st.integers(0, 50))
def test_refined_grid_holds_sigma_tn_and_falls_strictly(
    sigma_tn: float, num_steps: int, num_extra: int
) -> None:
    grid = edm_sigmas(num_steps, refine_at=sigma_tn, num_extra=num_extra)
    assert len(grid) == num_steps + num_extra + 1
    assert (grid == sigma_tn).sum() == 1
    assert (grid.diff() < 0).all() and grid[0] == 80 and grid[-2] == 0.002 and grid[-1] == 0


def test_extra_steps_are_spent_below_sigma_tn() -> None:
    plain, refined = edm_sigmas(18, refine_at=0.2), edm_sigmas(18, refine_at=0.2, num_extra=12)
    assert (refined >= 0.2).sum() == (plain >= 0.2).sum()
    assert (refined < 0.2).sum() == (plain < 0.2).sum() + 12


def test_truncated_sampling_returns_the_prediction_at_sigma_tn() -> None:
    """On point masses it ends on the posterior mean at sigma_tn of the flow's own end point."""
    atoms = torch.tensor([[-1.0, 0.0], [1.0, 0.5], [0.0, -1.0]], dtype=F64)
    oracle = MixtureDenoiser(atoms, torch.tensor([0.3, 0.3, 0.4], dtype=F64))
    sigma_tn, seen = 0.2, []

    def watched(x_t: Tensor, sigma_t: Tensor, label: Tensor | None = None) -> Tensor:
        seen.append((x_t, sigma_t[0].item()))
        return oracle(x_t, sigma_t)

    start = 80 * torch.randn(32, 2, dtype=F64, generator=torch.Generator().manual_seed(0))
    x = solve(watched, start, edm_sigmas(18, sigma_min=sigma_tn))
    last_x, last_sigma = seen[-1]
    assert last_sigma == sigma_tn  # on the grid exactly, not the 0.296 of an untouched 18-step grid
    assert torch.equal(x, oracle(last_x, torch.full((32,), sigma_tn, dtype=F64)))
    assert min(sigma for _, sigma in seen) == sigma_tn


class Net(nn.Module):
    """A small real network: matrix products and a convolution, whose bits could depend on the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.linear_1, self.linear_2 = nn.Linear(8 * 64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor, c_noise: Tensor, label: Tensor | None, augment_label: Tensor | None) -> Tensor:
        hidden = torch.relu(self.conv(x)).flatten(1)
        shift = 0 if label is None else label[:, None].to(x.dtype)
        hidden = torch.tanh(self.linear_1(hidden) + c_noise[:, None] + shift)
        return self.linear_2(hidden).view_as(x)


@pytest.mark.parametrize("churn", [None, Churn(8, 0.05, 50, 1.003)], ids=["deterministic", "churn"])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_image_17_is_the_same_bits_in_any_batch(churn: Churn | None, num_threads: int) -> None:
    denoiser = Preconditioned(Net(), num_classes=10)
    seeds, label = list(range(64)), torch.arange(64) % 10

    def images(batch_size: int, chosen: list[int]) -> dict[int, Tensor]:
        how: Any = {"churn": churn, "label": label[chosen], "batch_size": batch_size}
        batches = generate(denoiser, chosen, (1, 8, 8), edm_sigmas(5), **how)
        return dict(zip(chosen, torch.cat(list(batches)), strict=True))

    previous = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        whole = images(64, seeds)
        assert list(whole) == seeds
        for other in (images(1, [17, 63]), images(7, seeds[:24]), images(64, [40, 17])):
            for seed, image in other.items():
                assert torch.equal(image, whole[seed])
    finally:
        torch.set_num_threads(previous)


def test_generate_yields_as_it_goes_and_seeds_differ() -> None:
    calls = []

    def denoiser(x_t: Tensor, sigma_t: Tensor, label: Tensor | None = None) -> Tensor:
        calls.append(len(x_t))
        return x_t / (1 + sigma_t.view(-1, 1, 1, 1))

    batches = generate(denoiser, [5, 6, 7, 8, 9], (1, 4, 4), edm_sigmas(3), batch_size=2)
    first = next(batches)
    assert first.shape == (2, 1, 4, 4)
    assert len(calls) == 5  # two Heun steps and the last one, of the first batch only
    assert [len(batch) for batch in batches] == [2, 1] and not torch.equal(first[0], first[1])


def test_churn_keeps_the_distribution() -> None:
    """With the exact denoiser, noise added back and removed leaves N(m, s^2); the noise is really drawn."""
    gaussian = MixtureDenoiser(torch.tensor([[0.3]], dtype=torch.float32), std=0.5)
    churn = Churn(20 / 40)
    batches = generate(gaussian, range(4000), (1,), edm_sigmas(40), churn=churn, batch_size=1000)
    images = torch.cat(list(batches))
    assert images.mean().item() == pytest.approx(0.3, abs=4 * 0.5 / math.sqrt(4000))
    assert images.std().item() == pytest.approx(0.5, rel=0.05)
    plain = next(generate(gaussian, range(1000), (1,), edm_sigmas(40), batch_size=1000))
    assert (plain - images[:1000]).abs().mean() > 0.1


def test_churn_formula() -> None:
    churn = Churn(gamma=0.1, low=0.1, high=5)
    assert churn.raised(1.0) == pytest.approx(1.1) and Churn(1.0).raised(1.0) == pytest.approx(math.sqrt(2))
    assert churn.raised(0.05) == 0.05 and churn.raised(6) == 6


def levels_seen(**settings: Any) -> list[float]:
    """The levels at which a sampler asks the denoiser."""
    seen: list[float] = []

    def denoiser(x_t: Tensor, sigma_t: Tensor, label: Tensor | None = None) -> Tensor:
        seen.append(sigma_t[0].item())
        return 0 * x_t

    list(SampleConfig(precision="64", solver="euler", **settings).generate(denoiser, [0], (1,)))
    return seen


@pytest.mark.parametrize("churn", [0.0, 40.0])
def test_truncated_samples_are_the_prediction_at_their_level_or_that_of_the_papers_algorithm(
    churn: float,
) -> None:
    """18 steps of EDM's grid hold 0.2964 and 0.1698 around 0.2: the released code predicts from the first."""
    exact = levels_seen(truncate_at=0.2, churn=churn)
    assert exact[-1] == pytest.approx(0.2, rel=1e-6)  # also where churn raises the levels before
    published = levels_seen(truncate_at=0.2, truncate="algorithm", churn=churn)
    raised = 1 + min(churn / 18, math.sqrt(2) - 1)
    grid = edm_sigmas(18)
    assert published == pytest.approx((raised * grid[grid >= 0.2]).tolist(), rel=1e-6)
    assert published[-1] == pytest.approx(raised * 0.29644, rel=1e-4)
    assert levels_seen(truncate_at=grid[7].item(), truncate="algorithm")[-1] == pytest.approx(grid[7].item())


def test_extra_steps_leave_churn_as_it_was() -> None:
    """EDM's ImageNet sampler: 40 / 256 = 0.156 of the level, with 64 extra steps below 0.2 or without."""
    settings = dict(num_steps=256, churn=40.0, churn_low=0.05, churn_high=50.0)
    for num_extra in (0, 64):
        grid = edm_sigmas(256, refine_at=0.2, num_extra=num_extra)[:-1]
        seen = torch.tensor(levels_seen(**settings, refine_at=0.2, num_extra=num_extra), dtype=F64)
        churned = (0.05 <= grid) & (grid <= 50)
        torch.testing.assert_close(seen, grid * (1 + 40 / 256 * churned), rtol=1e-6, atol=0)


def test_a_diverged_model_is_not_sampled() -> None:
    def broken(x_t: Tensor, sigma_t: Tensor, label: Tensor | None = None) -> Tensor:
        return x_t / 0

    assert "finite" in fault(lambda: next(generate(broken, [0], (1,), edm_sigmas(3)))).what
    assert fault(lambda: SampleConfig(sigma_max=1e39)).key == "sigma_max"


def test_the_flow_of_images_at_levels_of_their_own_is_that_of_each_alone() -> None:
    """For N(m, s^2) the flow keeps (x - m) / sqrt(s^2 + sigma^2); each image goes its own way down."""
    gaussian = MixtureDenoiser(torch.tensor([[0.3]], dtype=F64), std=0.5)
    x, first = torch.tensor([[1.0], [-2.0], [0.4]], dtype=F64), torch.tensor([0.8, 3.0, 0.01], dtype=F64)
    last = torch.tensor([0.1, 0.02, 0.01], dtype=F64)
    found = flow_down(gaussian, x, first, last, num_steps=64)
    ratio = ((0.25 + last**2) / (0.25 + first**2)).sqrt()[:, None]
    torch.testing.assert_close(found, 0.3 + (x - 0.3) * ratio, rtol=1e-3, atol=1e-3)
    assert torch.equal(found[2], x[2])
    for i in range(3):
        alone = flow_down(gaussian, x[i : i + 1], first[i : i + 1], last[i : i + 1], num_steps=64)
        torch.testing.assert_close(found[i : i + 1], alone)


def test_seeded_noise_belongs_to_the_image() -> None:
    one, many = SeededNoise([17], (2, 3), "cpu"), SeededNoise([3, 17, 99], (2, 3), "cpu")
    for _ in range(3):
        assert torch.equal(one()[0], many()[1])


def labelled(label: list[int]) -> object:
    denoiser = Preconditioned(Net(), num_classes=5)
    return next(generate(denoiser, [0], (1, 8, 8), edm_sigmas(3), label=torch.tensor(label)))


def at_levels(*sigmas: float) -> object:
    return next(generate(nn.Identity(), [0], (1,), torch.tensor(sigmas)))


@pytest.mark.parametrize(
    ("call", "key"),
    [
        (lambda: edm_sigmas(1), "num_steps"),
        (lambda: edm_sigmas(10, sigma_min=0), "num_steps"),
        (lambda: edm_sigmas(10, sigma_min=90), "num_steps"),
        (lambda: edm_sigmas(18, refine_at=0.001), "num_steps"),
        (lambda: edm_sigmas(2, refine_at=0.2), "num_steps"),
        (lambda: at_levels(1.0, 2.0, 0.0), "sigmas"),
        (lambda: at_levels(1.0, math.nan, 0.0), "sigmas"),
        (lambda: at_levels(1.0, -1.0), "sigmas"),
        (lambda: at_levels(1.0), "sigmas"),
        (lambda: SampleConfig(solver="multistep", churn=1.0), "churn"),
        (lambda: SampleConfig(solver="magic"), "solver"),
        (lambda: SampleConfig(guide=Path("weak.safetensors")), "guide"),
        (lambda: SampleConfig(truncate_at=0.2, refine_at=0.2), "refine_at"),
        (lambda: SampleConfig(truncate_at=1000.0), "truncate_at"),
        (lambda: SampleConfig(refine_at=0.001), "refine_at"),
        (lambda: SampleConfig(sigma_min=80.0), "sigma_min"),
        (lambda: SampleConfig(truncate_at="auto").for_levels([0.0]), "truncate_at"),
        (lambda: SampleConfig(truncate_at="auto").for_levels([90.0]), "truncate_at"),
        (lambda: SampleConfig(num_extra=3).for_levels([0.0]), "refine_at"),
        (lambda: labelled([5]), "label"),
        (lambda: labelled([-2]), "label"),
        (lambda: labelled([0, 1]), "label"),
    ],
)
def test_bad_input_is_named(call: Any, key: str) -> None:
    assert fault(call).key == key


def gaussian_posterior(std: float, sigma: float, num_steps: int) -> tuple[float, float]:
    """Mean (as a factor of x_tn) and variance that `sample_posterior` gives data from N(0, std^2).

    All is linear in x_tn and in the noise of each step, so one unit in each gives both exactly.
    """
    oracle = MixtureDenoiser(torch.zeros(1, 1, dtype=F64), std=std)
    units = torch.eye(num_steps, dtype=F64).unbind(1)  # row 0: x_tn; row k: the noise of step k
    draws = iter([unit[:, None] for unit in units[1:]])
    x_tn = units[0][:, None]
    found = sample_posterior(
        oracle, x_tn, torch.full((num_steps,), sigma, dtype=F64), lambda: next(draws), num_steps
    )
    return found[0].item(), found[1:].square().sum().item()


@pytest.mark.parametrize(("std", "sigma"), [(0.5, 0.2), (0.5, 0.5), (0.1, 0.5), (0.05, 0.05)])
def test_posterior_draws_have_the_posterior_mean_and_variance_to_second_order(std: float, sigma: float) -> None:
    mean = std**2 / (std**2 + sigma**2)
    variance = mean * sigma**2 - 0.002**2  # the last step drops the noise that is left at sigma_min
    error = [gaussian_posterior(std, sigma, num_steps) for num_steps in (16, 32, 64)]
    of_mean = [abs(found / mean - 1) for found, _ in error]
    of_variance = [abs(found / variance - 1) for _, found in error]
    assert max(of_mean[2], of_variance[2]) < 0.02
    for errors in (of_mean, of_variance):
        assert all(small < 1e-3 or large / small > 3 for large, small in itertools.pairwise(errors)), errors


def test_posterior_draws_of_a_mixture_follow_bayes() -> None:
    """Between two atoms: the draws choose each as often as the posterior does, and spread around it."""
    atoms, weights = torch.tensor([[-0.6], [0.6]], dtype=F64), torch.tensor([0.3, 0.7], dtype=F64)
    std, sigma = 0.2, 0.5
    oracle = MixtureDenoiser(atoms, weights, std)
    x_tn, num_draws = torch.full((40_000, 1), -0.1, dtype=F64), 40_000
    generator = torch.Generator().manual_seed(0)
    noise = lambda: torch.randn(num_draws, 1, generator=generator, dtype=F64)  # noqa: E731
    x_0 = sample_posterior(oracle, x_tn, torch.full((num_draws,), sigma, dtype=F64), noise, num_steps=40)[:, 0]
    total = std**2 + sigma**2
    odds = weights * torch.exp(-((x_tn[0] - atoms[:, 0]) ** 2) / (2 * total))
    share = (odds / odds.sum())[1].item()
    centre = atoms[:, 0] + std**2 / total * (x_tn[0] - atoms[:, 0])
    spread = std * sigma / math.sqrt(total)
    edges = torch.linspace(-1.2, 1.2, 25, dtype=F64)
    below = torch.special.ndtr((edges[:, None] - centre) / spread)
    expected = (below @ torch.tensor([1 - share, share], dtype=F64)).diff()
    observed = torch.histogram(x_0.float(), edges.float()).hist / num_draws
    # Sampling error of a bin is sqrt(p / n) < 0.0025; the rest is the error of 40 steps.
    assert (observed - expected).abs().max() < 0.008
    assert (x_0 > 0).double().mean().item() == pytest.approx(share, abs=0.02)


def test_posterior_of_mixed_levels_is_that_of_each_alone() -> None:
    oracle = MixtureDenoiser(torch.tensor([[-0.5, 0.2], [0.4, -0.3]]), std=0.3)
    x_tn, sigma_tn = torch.tensor([[0.3, 0.1], [-0.7, 0.9], [0.2, -0.4]]), torch.tensor([0.2, 0.8, 0.001])
    together = sample_posterior(oracle, x_tn, sigma_tn, SeededNoise([1, 2, 3], (2,), "cpu"), 6)
    for i in range(3):
        noise = SeededNoise([i + 1], (2,), "cpu")
        alone = sample_posterior(oracle, x_tn[i : i + 1], sigma_tn[i : i + 1], noise, 6)
        torch.testing.assert_close(together[i : i + 1], alone)
    torch.testing.assert_close(together[2:], oracle(x_tn[2:], sigma_tn[2:]))  # below sigma_min: the mean
