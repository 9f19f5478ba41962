"""Muon against singular value decompositions, and beside AdamW."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from assay.nets import build_denoiser, preset
from assay.train.optimizer import Muon, orthogonal


@pytest.mark.parametrize("shape", [(16, 16), (8, 72), (72, 8)])
def test_singular_values_come_near_one_and_singular_vectors_stay(shape: tuple[int, int]) -> None:
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    matrices[1] *= 1e-4
    left, values, right = torch.linalg.svd(matrices, full_matrices=False)
    found = left.mT @ orthogonal(matrices) @ right.mT
    kept = values > 0.05 * values[:, :1]  # far smaller ones would take more steps
    diagonal = found.diagonal(dim1=1, dim2=2)[kept]
    assert 0.6 < diagonal.min() and diagonal.max() < 1.3
    assert (found - torch.diag_embed(found.diagonal(dim1=1, dim2=2))).abs().max() < 1e-3


class Small(nn.Module):
    """A matrix, a convolution, a bias and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 12)
        self.conv = nn.Conv2d(3, 4, 3, bias=False)
        self.token_out = nn.Linear(4, 2, bias=False)


def with_gradients(seed: int = 0) -> Small:
    torch.manual_seed(seed)
    small = Small()
    for parameter in small.parameters():
        parameter.grad = torch.randn_like(parameter)
    return small


OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "fused": True}


def test_matrices_move_by_orthogonal_momentum_and_the_rest_by_adamw() -> None:
    before, moved, beside = with_gradients(), with_gradients(), with_gradients()
    Muon(moved.named_parameters(), ("token_out.weight",), **OPTIONS).step()
    torch.optim.AdamW(beside.parameters(), **OPTIONS).step()
    for name in ("inner.bias", "token_out.weight"):
        assert torch.equal(moved.get_parameter(name), beside.get_parameter(name))
    for name, factor in (("inner.weight", math.sqrt(12 / 6)), ("conv.weight", 1.0)):
        start, end = before.get_parameter(name), moved.get_parameter(name)
        assert start.grad is not None
        direction = orthogonal(start.grad.flatten(1)[None])[0].view(start.shape)  # whatever its scale
        torch.testing.assert_close(end, (1 - 0.1 * 0.1) * start - 0.1 * factor * direction)


def test_momentum_gathers_gradients() -> None:
    moved, gradients = with_gradients(), torch.randn(2, 12, 6)
    optimizer = Muon(moved.named_parameters(), ("token_out.weight",), **OPTIONS)
    start = moved.inner.weight.detach().clone()
    for gradient in gradients:
        moved.inner.weight.grad = gradient.clone()
        start = moved.inner.weight.detach().clone()
        optimizer.step()
    momentum = 0.95 * 0.05 * gradients[0] + 0.05 * gradients[1]
    direction = orthogonal((0.05 * gradients[1] + 0.95 * momentum)[None])[0]
    expected = 0.99 * start - 0.1 * math.sqrt(2) * direction
    torch.testing.assert_close(moved.inner.weight.detach(), expected, rtol=1e-4, atol=1e-5)


def test_a_step_without_a_finite_gradient_changes_nothing() -> None:
    moved, before = with_gradients(), with_gradients()
    optimizer = Muon(moved.named_parameters(), ("token_out.weight",), **OPTIONS)
    moved.inner.weight.grad = torch.full((12, 6), math.nan)
    optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]
    optimizer.step()
    for mine, old in zip(moved.parameters(), before.parameters(), strict=True):
        assert torch.equal(mine, old)


@pytest.mark.parametrize("name", ["unet-small", "dit-small", "mlp"])
def test_networks_have_both_kinds_of_parameters(name: str) -> None:
    config = preset(name, (1, 8, 8))
    with torch.device("meta"):
        denoiser = build_denoiser(config)
    others, matrices = Muon(denoiser.named_parameters(), config.output_weights, lr=1e-3).param_groups
    assert others["params"] and matrices["params"] and matrices["lr"] == pytest.approx(0.01)
    images = [n for n, p in denoiser.named_parameters() if p.ndim > 1 and any(p is o for o in others["params"])]
    found = {n.split(".")[-2] if n.endswith("weight") else "position" for n in images}
    assert found <= {"8x8_aux_conv", "token_out", "position"}
