"""The training loop: Algorithm 1 of the paper, visible.

Every random number is a function of (seed, step) and of an image's place in the global batch, so a run that
was killed and resumed, or split over other devices, is the same run, but for the dropout masks of each rank.
What surrounds the loop (folders, resuming, recording) is in `assay.train.run`.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from assay.data import Batch
from assay.data.view import stream
from assay.denoise import Denoiser
from assay.errors import AssayError
from assay.loss import (
    ambient_loss,
    consistency_levels,
    consistency_loss,
    edm_weight,
    edm_weight_x_0,
    released_consistency_loss,
)
from assay.noise import add_noise
from assay.train.config import TrainConfig
from assay.train.optimizer import lr_factor, update_ema
from assay.train.run import Progress, Run, TrainResult

_RAISED = 1.15  # where a walk begins, over the level it begins below


def train_run(
    run: Run, on_progress: Callable[[Progress], None], should_stop: Callable[[], bool]
) -> TrainResult:
    """Train a run until it is finished or `should_stop()`."""
    with run.batches() as batches:
        settings, fabric, model, optimizer = run.config.train, run.fabric, run.model, run.optimizer
        while run.step < settings.num_steps and not run.agree_to_stop(should_stop()):
            # Dropout draws from torch's own generator: seeded by the step, there is no state to save.
            torch.manual_seed(stream(run.seed, "dropout", run.step, fabric.global_rank).initial_seed())
            for group, rate in zip(optimizer.param_groups, run.rates, strict=True):
                group["lr"] = rate * lr_factor(run.step, settings)
            batch, loss = next(batches), list[Tensor]()
            pieces = batch.pieces(settings.max_per_device)
            for number, piece in enumerate(pieces, 1):
                with fabric.no_backward_sync(model, enabled=number < len(pieces)):
                    loss.append(losses(model, piece, settings, run.net_config.sigma_data))
                    total = loss[-1].mean() * (len(piece.index) / len(batch.index))
                    if batch.walk_eps is not None and number == 1:
                        total = total + consistency(model, batch, run.highest_level, settings)
                    fabric.backward(total)
            limit = settings.clip_grad or math.inf
            grad_norm = fabric.clip_gradients(model, optimizer, max_norm=limit, error_if_nonfinite=False)
            run.note_step(batch, torch.cat(loss), grad_norm)
            optimizer.step()
            update_ema(run.ema, run.denoiser, run.step, settings)
            optimizer.zero_grad()
            run.finish_step(on_progress)
        return run.finish()


def losses(model: nn.Module, batch: Batch, settings: TrainConfig, sigma_data: float) -> Tensor:
    """The weighted ambient loss of a batch, or a user's own, (B,)."""
    label = batch.label if settings.class_conditional else None
    denoiser = with_augment_label(model, batch.augment_label)
    if (own := settings.own_loss()) is not None:
        loss = own(denoiser, batch, label)
        if not isinstance(loss, Tensor) or loss.shape != batch.sigma_t.shape or not loss.requires_grad:
            given = f"{tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            given += " with" if getattr(loss, "requires_grad", False) else " without"
            what = f"gives {given} gradient; expected ({len(batch.x_tn)},) with gradient, one per image"
            raise AssayError(what, key="train.loss", cure=f"correct {type(own).__name__}")
        return loss
    weight = edm_weight(batch.sigma_t, sigma_data)
    if settings.weight == "x_0":
        weight = edm_weight_x_0(batch.sigma_t, batch.sigma_tn, sigma_data)
    return ambient_loss(denoiser, batch.x_tn, batch.levels, batch.sigma_t, batch.eps, weight, label)


def consistency(model: nn.Module, batch: Batch, highest_level: float, settings: TrainConfig) -> Tensor:
    """The consistency loss on the first images of a batch, times its coefficient."""
    assert batch.walk_eps is not None and batch.walk_uniform is not None
    chosen, eps, uniform = settings.consistency, batch.walk_eps, batch.walk_uniform
    mine = slice(eps.shape[1])
    x_tn, sigma_tn, own = batch.x_tn[mine], batch.sigma_tn[mine], batch.levels[mine]
    denoiser = with_augment_label(model, None if batch.augment_label is None else batch.augment_label[mine])
    label = batch.label[mine] if settings.class_conditional else None
    match chosen.method:
        case "product":
            # Clean images get noise up to the data's highest level, so that every image can serve. All get a
            # little on top: an image's own noise never changes, and would start it on the same way each time.
            top = torch.where(sigma_tn > chosen.sigma_min, sigma_tn, torch.full_like(sigma_tn, highest_level))
            high, low = consistency_levels(top, uniform, chosen.sigma_min)
            start = _RAISED * top
            x_start = add_noise(x_tn, own, start, eps[0])
            loss = consistency_loss(denoiser, x_start, start, high, low, eps[1:], label, chosen.num_steps)
        case "original_code":
            low = settings.noise_distribution().inverse_survival(uniform[0].clamp_min(2.0**-24))
            high = torch.maximum(low, sigma_tn)
            x_high = add_noise(x_tn, own, high, eps[0])
            draw_eps = eps[1:].unflatten(0, (chosen.num_steps - 1, chosen.num_samples))
            loss = released_consistency_loss(denoiser, x_high, high, low, draw_eps, label, walker=model)
            loss = loss * (len(loss) / len(batch.index))  # its code sums over these images, divides by them all
    return chosen.coefficient * loss.mean()


def with_augment_label(model: nn.Module, augment_label: Tensor | None) -> Denoiser:
    """The model with augmentation labels filled in, repeated if it is called with copies of the batch."""
    if augment_label is None:
        return model

    def denoiser(x_t: Tensor, sigma_t: Tensor, label: Tensor | None = None) -> Tensor:
        return model(x_t, sigma_t, label, augment_label.repeat(len(x_t) // len(augment_label), 1))

    return denoiser
