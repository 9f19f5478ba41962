"""Missing pixels: expectation-maximisation with posterior samples, beside imputation and a masked loss.

    python studies/beyond/masks.py OUT       writes OUT/masks.csv, one row as soon as a model is measured

Of every digit a random half, or three quarters, of the pixels is missing; the others have noise of 0.02. All
take 4,500 steps.

EM        fit a Gaussian to the pixels seen (itself by EM), draw completions, train 1,500 steps on them; then
          twice: draw completions from the model's posterior (`assay.denoise.Given`), train 1,500 steps on them
mean      missing pixels get the mean of those seen in their place, and the images are trained on as clean ones
masked    the same images; only pixels that were seen count in the loss (a map of noise levels)
"""

import csv
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from assay.checkpoint import load_checkpoint
from assay.data.arrays import from_arrays
from assay.data.known import get_once
from assay.data.store import ImageSource, PackedImage, open_store, write_store
from assay.data.view import split_held_out
from assay.denoise import Given
from assay.metrics import evaluate, load_extractor, reference_from_images
from assay.metrics.generated import sample_checkpoint
from assay.metrics.score import score_checkpoint
from assay.sample import edm_sigmas, solve
from assay.train import read_config, train

NOISE, MISSING = 0.02, 100.0  # of pixels that were seen; more than any level that is trained
NUM_STEPS, NUM_ROUNDS = 1500, 3


def fit_gaussian(y: Tensor, seen: Tensor, num_iterations: int = 15) -> Callable[[torch.Generator], Tensor]:
    """EM for one Gaussian from pixels `y` (N, D) where `seen`; returns a function that draws completions."""
    mean, cov = (y * seen).sum(0) / seen.sum(0), 0.1 * torch.eye(y.shape[1], dtype=y.dtype)

    def posterior(i: int) -> tuple[Tensor, Tensor]:
        at = seen[i].nonzero()[:, 0]
        gain = cov[:, at] @ torch.linalg.inv(cov[at][:, at] + NOISE**2 * torch.eye(len(at), dtype=y.dtype))
        return mean + gain @ (y[i] - mean)[at], cov - gain @ cov[at]

    for _ in range(num_iterations):
        means, covs = map(torch.stack, zip(*(posterior(i) for i in range(len(y))), strict=True))
        mean = means.mean(0)
        cov = covs.mean(0) + (means - mean).T @ (means - mean) / len(y)

    def draw(generator: torch.Generator) -> Tensor:
        found = []
        for i in range(len(y)):
            centre, spread = posterior(i)
            values, vectors = torch.linalg.eigh(spread)
            eps = torch.randn(y.shape[1], generator=generator, dtype=y.dtype)
            found.append(centre + vectors @ (values.clamp_min(0).sqrt() * eps))
        return torch.stack(found)

    return draw


def complete(checkpoint: Path, y: Tensor, seen: Tensor, generator: torch.Generator) -> Tensor:
    """Draws of the images (N, C, H, W) behind `y` from the posterior of a model."""
    denoiser, parts = load_checkpoint(checkpoint).denoiser.eval().requires_grad_(False), []
    for x, mask in zip(y.split(250), seen.split(250), strict=True):
        given = Given(denoiser, x, torch.where(mask, NOISE, float("inf")))
        start = 80 * torch.randn(x.shape, generator=generator)
        parts.append(solve(given, start, edm_sigmas(12)).detach())
    return torch.cat(parts)


def with_maps(path: Path, x: Tensor, seen: Tensor) -> ImageSource:
    """A store of images whose missing pixels are noisier than any level that is trained."""
    if not (path / "meta.json").exists():
        maps = torch.where(seen, NOISE, MISSING).numpy().astype(np.float32)
        packed = (PackedImage(str(i), x[i].numpy(), NOISE, -1, sigma_map=maps[i]) for i in range(len(x)))
        write_store(path, path.name, packed, tuple(x.shape[1:]), "float32", (-1, 1), ())
    return open_store(path)


def main(out: Path) -> None:
    """Measure every method at both rates."""
    store, _ = get_once("digits", out / "data")
    training, held_out = split_held_out(open_store(store), 297, 0)
    extractor = load_extractor("classifier", out / "shared", reference=training)
    reference = reference_from_images(training, extractor, out / "shared")
    x, rows = training.read(torch.arange(len(training))), []

    def fit(name: str, source: ImageSource, num_steps: int, seed: int, start: Path | None = None) -> Path:
        settings = {"num_steps": num_steps, "batch_size": 128, "lr": 2e-3, "lr_decay": "cosine", "seed": seed}
        settings |= {"ema_half_life_images": 20_000, "state_every": 500, "init_from": start}
        tree = {"data": {"store": "unused"}, "net": {"preset": "mlp", "width": 128, "num_blocks": 3}}
        return train(read_config({**tree, "train": settings}), out / "runs" / name, source).checkpoint

    def measure(method: str, rate: float, seed: int, checkpoint: Path) -> None:
        samples, settings = sample_checkpoint(checkpoint, 3000)
        found = evaluate(samples, reference, extractor, 1000, 3, sampler=settings).evaluation
        score = score_checkpoint(checkpoint, held_out).nats_per_dim.value
        row = {"missing": rate, "method": method, "seed": seed, "fd": found.fd, "fd_std": found.fd_std}
        row |= {"precision": found.precision, "recall": found.recall, "score": score}
        rows.append({key: f"{value:.4g}" if isinstance(value, float) else value for key, value in row.items()})
        print(rows[-1], flush=True)
        with open(out / "masks.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)

    for seed in (0, 1):
        for rate in (0.5, 0.75):
            generator = torch.Generator().manual_seed(seed)
            seen = torch.rand(x.shape, generator=generator) >= rate
            y = x + NOISE * torch.randn(x.shape, generator=generator)
            mean = (y * seen).sum(0) / seen.sum(0).clamp_min(1)
            filled, name = y.where(seen, mean), f"{rate} {seed}"
            measure("mean", rate, seed, fit(f"mean {name}", from_arrays(filled), 3 * NUM_STEPS, seed))
            maps = with_maps(out / f"masked {name}", filled, seen)
            measure("masked", rate, seed, fit(f"masked {name}", maps, 3 * NUM_STEPS, seed))
            draw = fit_gaussian(y.flatten(1).double(), seen.flatten(1))
            completed = draw(generator).float().view_as(x)
            checkpoint = None
            for number in range(NUM_ROUNDS):
                source = from_arrays(completed, name=f"completed {name} {number}")
                checkpoint = fit(f"EM {name} {number}", source, NUM_STEPS, seed, checkpoint)
                measure(f"EM, round {number + 1}", rate, seed, checkpoint)
                if number + 1 < NUM_ROUNDS:
                    completed = complete(checkpoint, y, seen, generator)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
