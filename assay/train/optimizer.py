"""How weights move: Adam, or Muon (Jordan et al. 2024), the learning rate over time, and EDM's average (EMA).

Muon replaces the momentum of a matrix by the nearest with singular values near 1, by Newton-Schulz steps,

    X <- a X + (b A + c A^2) X,        A = X X^T,        X = M / |M| at the start,

with coefficients (a, b, c) of Jordan et al., which bring singular values to between 0.7 and 1.2 in five steps.
They are computed in float32: torch's own Muon works in bfloat16, which is very slow on most CPUs.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from assay.nets import NetConfig
from assay.train.config import TrainConfig

_COEFFICIENTS, _NUM_STEPS = (3.4445, -4.7750, 2.0315), 5
_MOMENTUM = 0.95
_RATIO = 10.0  # the rate of the matrices, over that of AdamW


def make_optimizer(denoiser: nn.Module, config: NetConfig, settings: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer of a run."""
    options: dict[str, Any] = dict(lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay)
    options["fused"] = settings.precision != "fp16"  # fp16 scales gradients between backward and step
    if settings.optimizer == "muon":
        return Muon(denoiser.named_parameters(), config.output_weights, **options)
    if settings.weight_decay_kind == "decoupled":
        return torch.optim.AdamW(denoiser.parameters(), **options)
    # The gradient of a sum over pixels is larger by their number than that of our mean.
    options["weight_decay"] /= math.prod(config.image_shape)
    return torch.optim.Adam(denoiser.parameters(), **options)


def lr_factor(step: int, settings: TrainConfig) -> float:
    """A linear ramp over the first images, times 1 or half a cosine down to 0."""
    ramp = min(1.0, (step + 1) * settings.batch_size / max(settings.ramp_images, 1))
    if settings.lr_decay == "none":
        return ramp
    return ramp * (1 + math.cos(math.pi * step / settings.num_steps)) / 2


@torch.no_grad()
def update_ema(ema: nn.Module, model: nn.Module, step: int, settings: TrainConfig) -> None:
    """EDM's moving average: weights lose half their share every half-life, counted in images."""
    half_life = float(settings.ema_half_life_images)
    if settings.ema_ramp is not None:
        half_life = min(half_life, (step + 1) * settings.batch_size * settings.ema_ramp)
    keep = 0.5 ** (settings.batch_size / max(half_life, 1e-8))
    torch._foreach_lerp_(list(ema.parameters()), list(model.parameters()), 1 - keep)
    for target, buffer in zip(ema.buffers(), model.buffers(), strict=True):
        target.copy_(buffer)


def orthogonal(matrices: Tensor) -> Tensor:
    """The nearest matrices with singular values near 1, to each of `matrices` (N, rows, columns)."""
    a, b, c = _COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(_NUM_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(torch.optim.AdamW):
    """AdamW, but weight matrices inside the network move by 10 lr sqrt(max(1, rows / columns)) orthogonal(M).

    M is Nesterov's momentum. A convolution is a matrix of its output channels. Biases, norms and what writes
    the image (the weights whose names end in `output_weights`) stay with AdamW.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        output_weights: tuple[str, ...],
        lr: float,
        **options: Any,
    ) -> None:
        groups: list[dict[str, Any]] = [{"params": []}, {"params": [], "lr": _RATIO * lr}]
        for name, weight in named_parameters:
            is_matrix = weight.ndim > 1 and not name.endswith(output_weights)
            groups[is_matrix]["params"].append(weight)
        super().__init__(groups, lr, **options)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One step of both; none if `found_inf` says that the gradient is not finite, as fused AdamW."""
        group = self.param_groups.pop()
        try:
            loss = super().step(closure)
        finally:
            self.param_groups.append(group)
        if not getattr(self, "found_inf", None):
            by_shape: dict[tuple[int, int], list[nn.Parameter]] = {}
            for weight in group["params"]:
                by_shape.setdefault((len(weight), weight[0].numel()), []).append(weight)
            for weights in by_shape.values():
                self._move(weights, group["lr"], group["weight_decay"])
        return loss

    def _move(self, weights: Sequence[nn.Parameter], lr: float, weight_decay: float) -> None:
        """Move matrices of one shape."""
        updates = []
        for weight in weights:
            assert weight.grad is not None
            state = self.state[weight]
            if not state:  # AdamW looks for a count of steps when a state is loaded
                state.update(step=torch.zeros(()), momentum=torch.zeros_like(weight))
            momentum = state["momentum"]
            momentum.lerp_(weight.grad, 1 - _MOMENTUM)
            updates.append(weight.grad.lerp(momentum, _MOMENTUM).flatten(1))
        stacked = torch.stack(updates)
        lr_of_shape = lr * max(1.0, stacked.shape[1] / stacked.shape[2]) ** 0.5
        for weight, update in zip(weights, orthogonal(stacked), strict=True):
            weight.mul_(1 - lr * weight_decay).sub_(update.view(weight.shape), alpha=lr_of_shape)
