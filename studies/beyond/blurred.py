"""Blurred images: annotate them, train with 200 clean and 1,800 blurred ones, and compare with other uses.

    python studies/beyond/blurred.py OUT       writes OUT/blurred.csv, one row as soon as a model is measured

Images are Fashion-MNIST at 8x8 as in the demo. A blur of strength s mixes each pixel with the mean of the 3 x 3
pixels around it, (1 - s) x + s mean(x). Models are compared by FD-classifier with 2,000 clean images, and by
the score on 1,000 held-out ones at the best stopping time.
"""

import csv
import sys
from pathlib import Path

import torch
from torch.nn import functional as F

from assay.data.arrays import from_arrays
from assay.data.known import get_once
from assay.data.store import ImageSource, PackedImage, open_store, write_store
from assay.data.view import usable
from assay.metrics import evaluate, load_extractor, reference_from_images
from assay.metrics.annotate import annotate
from assay.metrics.generated import sample_checkpoint
from assay.metrics.score import find_stopping, stopping_steps
from assay.train import read_config, train
from assay.train.run import snapshot_path

NUM_CLEAN, NUM_STEPS = 200, 2500
TRAIN = {"num_steps": NUM_STEPS, "batch_size": 128, "lr": 2e-3, "lr_decay": "cosine", "state_every": 500}
TRAIN |= {"ema_half_life_images": 20_000}


def blurred(x: torch.Tensor, strength: float) -> torch.Tensor:
    """`x` (N, C, H, W) with each pixel mixed with the mean of the 3 x 3 pixels around it."""
    return (1 - strength) * x + strength * F.avg_pool2d(F.pad(x, [1] * 4, mode="replicate"), 3, stride=1)


def with_levels(path: Path, x: torch.Tensor, level: float) -> ImageSource:
    """A store of clean images and, after the first `NUM_CLEAN`, images usable from `level` on, raised to it."""
    if not (path / "meta.json").exists():
        images = (
            PackedImage(str(i), x[i].numpy(), 0.0, -1, 0.0 if i < NUM_CLEAN else level) for i in range(len(x))
        )
        write_store(path, path.name, images, tuple(x.shape[1:]), "float32", (-1, 1), ())
    return usable(open_store(path))


def main(out: Path, seeds: tuple[int, ...] = (0, 1)) -> None:
    """Measure every arm of every seed."""
    store, held_out_path = get_once("fashion-mnist", out / "data", 8, (), 2000, 1000)
    clean, held_out = open_store(store), open_store(held_out_path)
    x = clean.read(torch.arange(len(clean)))
    extractor = load_extractor("classifier", out / "shared", reference=clean)
    reference = reference_from_images(clean, extractor, out / "shared")
    arms: dict[str, tuple[float, ImageSource]] = {"all clean": (0.0, clean)}
    arms["200 clean"] = (0.0, from_arrays(x[:NUM_CLEAN], name="200 clean"))
    for strength in (0.2, 0.5):
        mixed = torch.cat([x[:NUM_CLEAN], blurred(x[NUM_CLEAN:], strength)])
        found = annotate(from_arrays(mixed[NUM_CLEAN:]), from_arrays(x[:NUM_CLEAN]))
        name = f"blur {strength}"
        print(name, "is usable from", found.level, found.auc.round(3).tolist(), flush=True)
        arms[f"{name}, annotated"] = (found.level, with_levels(out / f"{name}, annotated", mixed, found.level))
        arms[f"{name}, as if clean"] = (0.0, from_arrays(mixed, name=f"{name}, as if clean"))
    rows = []
    for seed in seeds:
        for name, (level, source) in arms.items():
            tree = {"data": {"store": "unused"}, "net": {"preset": "mlp", "width": 128, "num_blocks": 3}}
            config = read_config({**tree, "train": {**TRAIN, "seed": seed}})
            folder, steps = out / "runs" / f"{name} {seed}", stopping_steps(NUM_STEPS)
            trained = train(config, folder, source, snapshot_steps=steps)
            snapshots = {step: snapshot_path(folder, step) for step in steps[:-1]}
            scored = find_stopping({**snapshots, NUM_STEPS: trained.checkpoint}, held_out)
            samples, settings = sample_checkpoint(trained.checkpoint, 3000)
            measured = evaluate(samples, reference, extractor, 1000, 3, sampler=settings).evaluation
            row = {"arm": name, "usable_from": f"{level:.3g}", "seed": seed, "fd": measured.fd}
            row |= {"fd_std": measured.fd_std, "precision": measured.precision, "recall": measured.recall}
            row |= {"score": scored.best.nats_per_dim.value, "score_step": scored.step}
            row |= {"score_final": scored.final.nats_per_dim.value}
            rows.append(
                {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in row.items()}
            )
            print(rows[-1], flush=True)
            with open(out / "blurred.csv", "w", newline="") as file:
                writer = csv.DictWriter(file, rows[0], lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
