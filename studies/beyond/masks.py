"""Missing pixels: rounds that complete the images, beside imputation by the mean and ambient masking.

    python studies/beyond/masks.py OUT [SEED ...]       writes OUT/masks.csv after every model

Of every digit a random half, or three quarters, of the pixels is missing; the others have noise of 0.02. All
methods take 4,500 steps.

rounds     `train.rounds = 3`: complete the images, first by a Gaussian, then by the posterior of the model, and
          train on
mean      missing pixels get the mean of their place, and the images are trained on as if they were clean
no rounds  `assay train` on the same store: pixels that are missing have no part in the loss
ambient   Ambient Diffusion (Daras et al. 2023): a tenth of the pixels seen is hidden from a network that knows
          the mask, and predicts all that were seen; samples with one mask per image, or with none
"""

import csv
import json
import sys
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn

from assay.checkpoint import load_checkpoint
from assay.data import ImageSource, open_store, split_held_out
from assay.data.arrays import from_arrays
from assay.data.known import get_once
from assay.data.store import PackedImage, Store, write_store
from assay.denoise import Denoiser
from assay.loss import edm_weight
from assay.metrics.evaluate import evaluate
from assay.metrics.extract import load_extractor, reference_from_images
from assay.metrics.generated import Samples
from assay.metrics.held_out import HeldOutConfig, held_out_loss, stopping_steps
from assay.nets import build_denoiser
from assay.noise import per_image
from assay.train import read_config, train
from assay.train.restored import snapshot_at

NOISE, NUM_STEPS, LOOPS = 0.02, 4500, 3
NET = {"preset": "mlp", "width": 128, "num_blocks": 3}
TRAIN = {
    "batch_size": 128,
    "lr": 2e-3,
    "lr_decay": "cosine",
    "ema_half_life_images": 20_000,
    "state_every": 500,
}


def with_masks(path: Path, x: Tensor, seen: Tensor) -> Store:
    """A store of images (N, C, H, W) with missing pixels: an infinite level where they were not `seen`."""
    if not (path / "meta.json").exists():
        maps = torch.where(seen, NOISE, float("inf")).numpy()
        packed = (PackedImage(str(i), x[i].numpy(), NOISE, -1, sigma_map=maps[i]) for i in range(len(x)))
        write_store(path, path.name, packed, tuple(x.shape[1:]), "float32", (-1, 1), ())
    return open_store(path)


class Masked(nn.Module):
    """A denoiser that is told which pixels of its images it may use, by default all; `share`: a random part."""

    num_classes = 0

    def __init__(self, network: nn.Module, share: float = 1.0) -> None:
        super().__init__()
        self.network, self.share = network, share

    def forward(
        self, x_t: Tensor, sigma_t: Tensor, label: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """`x_t` (B, 1, H, W), `sigma_t` (B,), `mask` (B, 1, H, W) of 0 and 1."""
        if mask is None:  # one mask for each place in a batch, the same at all levels
            generator = torch.Generator().manual_seed(0)
            mask = (torch.rand(x_t.shape, generator=generator) < self.share).to(x_t)
        scale = (sigma_t**2 + 0.25).sqrt()  # undoes the preconditioning of the mask
        both = torch.cat([mask * x_t, per_image(scale, mask) * mask], 1)
        found: Tensor = self.network(both, sigma_t)[:, :1]
        return found


class Study:
    """What studies of incomplete digits share: the digits, how a model is trained, what is measured of it."""

    def __init__(self, out: Path, table: str, column: str, num_steps: int = NUM_STEPS) -> None:
        """Results go to the file `table` in `out`; its `column` says what was done to the images."""
        store, _ = get_once("digits", out / "data")
        training, self.held_out = split_held_out(open_store(store), 297, 0)
        self.extractor = load_extractor("classifier", out / "shared", reference=training)
        self.reference = reference_from_images(training, self.extractor, out / "shared")
        self.x, self.rows = training.read(torch.arange(len(training))), list[dict[str, str]]()
        self.out, self.table, self.column, self.num_steps = out, table, column, num_steps

    def fit(self, name: str, source: ImageSource, seed: int, rounds: int = 0) -> dict[int, Denoiser]:
        """Models after some steps of training, by step; with rounds as many steps in all."""
        steps = stopping_steps(self.num_steps)
        first = self.num_steps * 2 // (2 + rounds)  # a loop is half as long as the first training
        chosen = {**TRAIN, "num_steps": first, "rounds": rounds, "seed": seed}
        config = read_config({"data": {"store": "unused"}, "net": NET, "train": chosen})
        folder = self.out / "runs" / name
        final = train(config, folder, source, snapshot_steps=steps).checkpoint
        paths = {step: snapshot_at(config.train, folder, step) for step in steps[:-1]} | {self.num_steps: final}
        return {step: load_checkpoint(path).denoiser.eval() for step, path in paths.items()}

    def measure(
        self, method: str, images: str, seed: int, trained: Callable[[], Mapping[int, Denoiser]]
    ) -> None:
        """Add a row with the measures of a method, unless they were taken before."""
        file = self.out / f"{method} {images} {seed}.json"
        if not file.exists():
            row = {self.column: images, "method": method, "seed": f"{seed}"}
            file.write_text(json.dumps({**row, **self.measures(method, trained())}))
        self.rows.append(json.loads(file.read_text()))
        print(self.rows[-1], flush=True)
        with open(self.out / self.table, "w", newline="") as table:
            writer = csv.DictWriter(table, self.rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)

    def measures(self, method: str, after: Mapping[int, Denoiser]) -> dict[str, str]:
        """FD and its relatives after the last step; losses at the best stopping time and after the last."""
        final, quick = after[self.num_steps], HeldOutConfig(num_bands=16)
        first, second = (torch.arange(start, len(self.held_out), 2) for start in (0, 1))
        samples = Samples(method, final, self.held_out.image_shape, 3000)
        found = evaluate(samples, self.reference, self.extractor, 1000, 3)
        best = min(
            after, key=lambda step: held_out_loss(after[step], self.held_out, quick, first).nats_per_dim.value
        )
        value, last = (
            held_out_loss(after[step], self.held_out, index=second).nats_per_dim
            for step in (best, self.num_steps)
        )
        row = {"fd": found.fd, "fd_std": found.fd_std, "precision": found.precision, "recall": found.recall}
        row |= {
            "held_out_loss": value.value,
            "held_out_loss_error": value.standard_error,
            "held_out_loss_final": last.value,
        }
        return {key: f"{number:.4g}" for key, number in row.items() if number is not None}


def train_ambient(y: Tensor, seen: Tensor, seed: int) -> dict[int, Masked]:
    """Networks after some steps of training with further masks, by step: averages, as in `assay train`."""
    config = read_config({"data": {"store": "unused"}, "net": NET, "train": {"num_steps": NUM_STEPS}})
    network = Masked(build_denoiser(config.net_config(from_arrays(torch.cat([y, seen], 1))), seed))
    average, kept, steps = deepcopy(network), dict[int, Masked](), stopping_steps(NUM_STEPS)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_STEPS)
    decay = 0.5 ** (128 / 20_000)
    for step in range(1, NUM_STEPS + 1):
        at = torch.randint(len(y), (128,), generator=generator)
        sigma_t = (1.2 * torch.randn(128, generator=generator) - 1.2).exp()
        eps = torch.randn(y[at].shape, generator=generator)
        mask = seen[at] * (torch.rand(y[at].shape, generator=generator) < 0.9)
        error = seen[at] * (network(y[at] + per_image(sigma_t, eps) * eps, sigma_t, mask=mask) - y[at])
        loss = (edm_weight(sigma_t) * error.square().flatten(1).mean(1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for mine, theirs in zip(average.parameters(), network.parameters(), strict=True):
                mine.lerp_(theirs, 1 - min(decay, step / (step + 10)))
        if step in steps:
            kept[step] = deepcopy(average).eval().requires_grad_(False)
    return kept


def with_part(networks: Callable[[], Mapping[int, Masked]], share: float) -> dict[int, Denoiser]:
    """The same networks, which see a random part of each image."""
    return {step: Masked(each.network, share) for step, each in networks().items()}


def main(out: Path, seeds: tuple[int, ...]) -> None:
    """Measure every method at both rates."""
    study = Study(out, "masks.csv", "missing")
    x = study.x
    for seed in seeds:
        for rate in (0.5, 0.75):
            generator = torch.Generator().manual_seed(seed)
            seen = torch.rand(x.shape, generator=generator) >= rate
            y = x + NOISE * torch.randn(x.shape, generator=generator)
            filled = y.where(seen, (y * seen).sum(0) / seen.sum(0).clamp_min(1))
            name = f"{rate} {seed}"
            masked = with_masks(out / f"masks {name}", filled, seen)
            ambient = cache(partial(train_ambient, y, seen.float(), seed))
            methods: dict[str, Callable[[], Mapping[int, Denoiser]]] = {
                "rounds": partial(study.fit, f"rounds {name}", masked, seed, LOOPS),
                "mean": partial(study.fit, f"mean {name}", from_arrays(filled), seed),
                "ambient, no mask": ambient,
                "ambient, one mask": partial(with_part, ambient, 0.9 * (1 - rate)),
                "no rounds": partial(study.fit, f"plain {name}", masked, seed),
            }
            for method, trained in methods.items():
                study.measure(method, f"{rate}", seed, trained)


if __name__ == "__main__":
    main(Path(sys.argv[1]), tuple(map(int, sys.argv[2:])) or (0,))
