"""Averages of the weights: EDM's moving average (EMA), and those whose length is chosen after training.

For the latter (Karras et al. 2024) a power-function average gives the weights of time tau, counted in steps,
the density

    p(tau; t, gamma) = (gamma + 1) tau^gamma / t^(gamma + 1),        0 <= tau <= t,

whose standard deviation is a fixed share of the training so far, its `length`:

    length^2 = (gamma + 1) / ((gamma + 2)^2 (gamma + 3)).

Training tracks two of them and stores both now and then. Any other density is close to a combination of
the stored ones, with the coefficients x that minimise || sum_i x_i p_i - p ||^2: A x = b with
A_ij = <p_i, p_j>, b_i = <p_i, p>. The same combination of the stored weights is the average wanted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from assay.checkpoint import load_checkpoint, load_tensors, save_checkpoint, save_tensors
from assay.errors import AssayError
from assay.train.config import TrainConfig
from assay.train.folder import pack_tensors

LENGTHS = (0.05, 0.10)  # those that are tracked
_FOLDER = "averages"


def gamma_of(length: float) -> float:
    """The exponent of the profile with this relative standard deviation."""
    if not 0 < length < 12**-0.5:
        what = f"{length} is not a share of the training between 0 and 0.288"
        raise AssayError(what, key="length", cure="give e.g. 0.1")
    roots = np.roots([1, 7, 16 - length**-2, 12 - length**-2])
    return float(roots[np.abs(roots.imag) < 1e-9].real.max())


@torch.no_grad()
def update_average(average: nn.Module, model: nn.Module, step: int, length: float) -> None:
    """Take in the weights after `step` >= 1 steps; the weight of step k is then the mass of (k - 1, k)."""
    _blend(average, model, keep=(1 - 1 / step) ** (gamma_of(length) + 1))


@torch.no_grad()
def update_ema(ema: nn.Module, model: nn.Module, step: int, settings: TrainConfig) -> None:
    """EDM's moving average: weights lose half their share every half-life, counted in images."""
    half_life = float(settings.ema_half_life_images)
    if settings.ema_ramp is not None:
        half_life = min(half_life, (step + 1) * settings.batch_size * settings.ema_ramp)
    _blend(ema, model, keep=0.5 ** (settings.batch_size / max(half_life, 1e-8)))


def _blend(average: nn.Module, model: nn.Module, keep: float) -> None:
    torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - keep)
    for target, buffer in zip(average.buffers(), model.buffers(), strict=True):
        target.copy_(buffer)


@dataclass(frozen=True)
class Profile:
    """A power-function average: over how many steps, with which exponent."""

    step: int
    gamma: float

    def dot(self, other: "Profile") -> float:
        """The integral of the product of both densities."""
        first = min(self.step, other.step)
        scale = (self.gamma + 1) * (other.gamma + 1) / (self.gamma + other.gamma + 1) / first
        shares = (first / self.step) ** (self.gamma + 1) * (first / other.step) ** (other.gamma + 1)
        return scale * shares


def coefficients(stored: Sequence[Profile], wanted: Profile) -> np.ndarray:
    """How to combine the stored averages (num_stored,), so that the densities' distance is least."""
    gram = np.array([[one.dot(other) for other in stored] for one in stored])
    scale = 1 / np.sqrt(np.diag(gram))  # of unit norm: profiles of early steps are far denser than late ones
    found, *_ = np.linalg.lstsq(
        gram * scale * scale[:, None], scale * [one.dot(wanted) for one in stored], rcond=1e-12
    )
    return scale * found


def save_averages(run_dir: Path, step: int, averages: Sequence[nn.Module], keep: bool = True) -> None:
    """Store the tracked averages after `step` steps; ranks that do not `keep` them give their parts."""
    tensors = pack_tensors({str(number): average for number, average in enumerate(averages)}, keep=keep)
    if keep:
        path = run_dir / _FOLDER / f"{step:09d}.safetensors"
        save_tensors(path, tensors, {"step": step, "lengths": LENGTHS})


def average_checkpoint(run_dir: Path, length: float, output: Path, step: int | None = None) -> None:
    """Write a checkpoint of the average of this length over the first `step` steps of a run (default: all)."""
    files = sorted((run_dir / _FOLDER).glob("*.safetensors"))
    if not files:
        cure = "train with train.average_every, e.g. 1000"
        raise AssayError("has no stored averages", path=run_dir, cure=cure)
    first_step, last_step = int(files[0].stem), int(files[-1].stem)
    step = last_step if step is None else step
    if not first_step <= step <= last_step:
        what = f"averages are stored from step {first_step} to {last_step}, not at {step}"
        raise AssayError(what, path=run_dir, key="step")
    if output.exists() and output.resolve().is_relative_to(run_dir.resolve()):
        what = f"is a file of the run {run_dir}, which would be overwritten"
        raise AssayError(what, path=output, key="output", cure="choose another name")
    files = [file for file in files if int(file.stem) <= step]
    stored = [Profile(int(file.stem), gamma_of(tracked)) for file in files for tracked in LENGTHS]
    found = coefficients(stored, Profile(step, gamma_of(length)))
    checkpoint = load_checkpoint(run_dir)
    weights = {name for name, _ in checkpoint.denoiser.named_parameters()}
    averaged: dict[str, Tensor] = {}
    for file, shares in zip(files, found.reshape(-1, len(LENGTHS)), strict=True):
        tensors, _ = load_tensors(file)
        for key, value in tensors.items():
            number, _, name = key.partition("/")
            if name in weights:  # else a buffer, of which the last counts
                value = averaged.get(name, 0) + float(shares[int(number)]) * value.double()
            averaged[name] = value
    checkpoint.denoiser.load_state_dict(averaged)
    num_images_seen = (checkpoint.info.num_images_seen or 0) * step // last_step
    info = checkpoint.info.model_copy(update={"num_images_seen": num_images_seen})
    save_checkpoint(output, checkpoint.denoiser, checkpoint.config, info)
