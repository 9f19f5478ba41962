import operator
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats
from torch import Tensor, nn

from assay.denoise import Preconditioned, changes, warn_if_worse, x_0_from_x_tn, x_tn_from_x_0
from tests.errors import fault
from tests.points import MixtureDenoiser

F64 = torch.float64


@given(st.floats(0, 3), st.floats(0.01, 5), st.integers(0, 100))
def test_the_lemma_inverts(sigma_tn: float, gap: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x_t, x_0_hat = torch.randn(2, 3, 2, 4, generator=generator, dtype=F64)
    low = torch.full((3,), sigma_tn, dtype=F64)
    x_tn_hat = x_tn_from_x_0(x_0_hat, x_t, low, low + gap)
    torch.testing.assert_close(x_0_from_x_tn(x_tn_hat, x_t, low, low + gap), x_0_hat, rtol=1e-6, atol=1e-6)


def test_the_lemma_holds_for_the_exact_posterior_means_of_a_mixture() -> None:
    # E[x_tn | x_t] by numerical integration over x_tn; E[x_0 | x_t] by the closed form.
    atoms, weights, std = np.array([-1.0, 0.4, 1.5]), np.array([0.2, 0.5, 0.3]), 0.1
    sigma_tn, sigma_t, x_t = 0.3, 0.8, 0.25
    extra = np.sqrt(sigma_t**2 - sigma_tn**2)

    def joint(x_tn: float) -> float:
        prior = weights @ stats.norm(atoms, np.hypot(std, sigma_tn)).pdf(x_tn)
        return prior * stats.norm(x_tn, extra).pdf(x_t)

    moments = (integrate.quad(lambda x, k=k: x**k * joint(x), -8, 8, epsabs=1e-13)[0] for k in (1, 0))
    mean = operator.truediv(*moments)
    oracle = MixtureDenoiser(torch.tensor(atoms)[:, None], torch.tensor(weights), std)
    point = torch.tensor([[x_t]], dtype=F64)
    levels = torch.tensor([sigma_tn], dtype=F64), torch.tensor([sigma_t], dtype=F64)
    x_0_hat = oracle(point, levels[1])
    assert x_tn_from_x_0(x_0_hat, point, *levels).item() == pytest.approx(mean, abs=1e-9)
    back = x_0_from_x_tn(torch.tensor([[mean]], dtype=F64), point, *levels)
    assert back.item() == pytest.approx(x_0_hat.item(), abs=1e-9)


def test_mixture_denoiser_of_one_gaussian_is_linear_shrinkage() -> None:
    atom = torch.tensor([[0.3, -0.7]], dtype=F64)
    x_t = torch.randn(5, 2, dtype=F64, generator=torch.Generator().manual_seed(0))
    sigma_t = torch.tensor([0.01, 0.1, 1.0, 10.0, 80.0], dtype=F64)
    gain = (0.5**2 / (0.5**2 + sigma_t**2))[:, None]
    torch.testing.assert_close(MixtureDenoiser(atom, std=0.5)(x_t, sigma_t), atom + gain * (x_t - atom))


def test_mixture_denoiser_agrees_with_integration_for_unequal_components() -> None:
    atoms, weights, std = [-1.0, 0.0, 2.0], [0.5, 0.2, 0.3], [0.1, 0.4, 0.05]
    centres, shares = torch.tensor(atoms, dtype=F64)[:, None], torch.tensor(weights, dtype=F64)
    oracle = MixtureDenoiser(centres, shares, torch.tensor(std))
    for sigma_t, x_t in [(0.2, -0.6), (0.5, 0.9), (3.0, 4.0)]:

        def joint(x_0: float, sigma_t: float = sigma_t, x_t: float = x_t) -> float:
            return np.dot(weights, stats.norm(atoms, std).pdf(x_0)) * stats.norm(x_0, sigma_t).pdf(x_t)

        peaks = {"points": atoms, "limit": 500, "epsabs": 1e-14}
        moments = (integrate.quad(lambda x, k=k: x**k * joint(x), -4, 5, **peaks)[0] for k in (1, 0))
        mean = operator.truediv(*moments)
        value = oracle(torch.tensor([[x_t]], dtype=F64), torch.tensor([sigma_t], dtype=F64)).item()
        assert value == pytest.approx(mean, abs=1e-8)


class Recorder(nn.Module):
    """A network that returns a fixed tensor and remembers how it was called."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output

    def forward(self, x: Tensor, c_noise: Tensor, label: Tensor | None, augment_label: Tensor | None) -> Tensor:
        self.call = (x, c_noise, label, augment_label)
        return self.output


@pytest.mark.parametrize("sigma_data", [0.1, 0.5, 2.0])
def test_preconditioning_is_edms(sigma_data: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x_t, output = torch.randn(2, 4, 3, 2, 2, generator=generator, dtype=F64)
    sigma_t = torch.tensor([0.002, 0.3, 5.0, 80.0], dtype=F64)
    net = Recorder(output)
    x_0_hat = Preconditioned(net, sigma_data)(x_t, sigma_t)
    for b, sigma in enumerate(sigma_t.tolist()):
        c_skip = sigma_data**2 / (sigma**2 + sigma_data**2)
        c_out = sigma * sigma_data / np.sqrt(sigma**2 + sigma_data**2)
        c_in = 1 / np.sqrt(sigma**2 + sigma_data**2)
        torch.testing.assert_close(x_0_hat[b], c_skip * x_t[b] + c_out * output[b])
        torch.testing.assert_close(net.call[0][b], c_in * x_t[b])
        assert net.call[1][b].item() == pytest.approx(np.log(sigma) / 4)


def test_weights_carry_the_published_prefix() -> None:
    assert set(Preconditioned(nn.Linear(2, 2)).state_dict()) == {"model.weight", "model.bias"}


X, ONES = torch.zeros(2, 1, 2, 2), torch.ones(2)


@pytest.mark.parametrize(
    ("label", "num_classes"),
    [
        (torch.tensor([0]), 5),
        (torch.tensor([[0], [1]]), 5),
        (torch.zeros(2, 4), 5),
        (torch.tensor([0, 1]), 0),
    ],
)
def test_bad_labels_are_named(label: Tensor, num_classes: int) -> None:
    assert fault(lambda: Preconditioned(Recorder(X), num_classes=num_classes)(X, ONES, label)).key == "label"


@pytest.mark.parametrize("sigma_t", [torch.ones(2, 1, 1, 1), torch.ones(1), torch.ones(())], ids=str)
def test_a_broadcastable_sigma_is_refused(sigma_t: Tensor) -> None:
    assert fault(lambda: Preconditioned(Recorder(X))(X, sigma_t)).key == "sigma_t"


@given(st.floats(0, 1), st.floats(-2, 2), st.floats(0, 2), st.floats(0.05, 2))
def test_images_are_only_called_worse_than_before_if_they_are(
    g: float, c: float, s: float, sigma: float
) -> None:
    """x_0_hat = g x_tn + c of images N(0, s^2 I): its error and its change have closed forms."""
    error = (1 - g) ** 2 * s**2 + g**2 * sigma**2 + c**2
    changed = ((1 - g) ** 2 * (s**2 + sigma**2) + c**2) / sigma**2
    x_0, z = torch.randn(2, 3, 20_000, dtype=F64, generator=torch.Generator().manual_seed(0))
    x_tn, levels = s * x_0 + sigma * z, torch.tensor([sigma, sigma, 0.0])
    assert changes(x_tn, g * x_tn + c, levels).tolist() == pytest.approx([changed] * 2, rel=0.1, abs=0.01)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        warn_if_worse(torch.tensor([changed] * 3 + [0.0, 100.0]))
    assert bool(told) == (changed > 2) and not (told and error < sigma**2)
