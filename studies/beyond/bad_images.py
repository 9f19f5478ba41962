"""Blurred, compressed and small images: annotate them, train with them, and compare with other uses of them.

    python studies/beyond/bad_images.py OUT [SEED ...]       writes OUT/bad_images.csv after every model

Images are Fashion-MNIST at 8x8 as in the demo: 2,000 clean ones, and 1,800 others made worse. A model sees 200
clean and 1,800 bad images, annotated, with both values of `train.pairing`, or as if they were clean; others see
clean images alone. The table has the columns of a study's results, one `dataset` per kind: `assay price` tells
what a bad image is worth. Models that were measured are not measured again.
"""

import io
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from assay.data import ImageSource, open_store
from assay.data.arrays import from_arrays
from assay.data.known import get_once
from assay.data.view import Joined, View, simulate
from assay.metrics.annotate import annotate
from assay.metrics.evaluate import evaluate, with_held_out_loss
from assay.metrics.extract import load_extractor, reference_from_images
from assay.metrics.generated import sample_checkpoint
from assay.metrics.held_out import losses_by_band, stopping_steps
from assay.outcome import Configuration, Outcome, save_outcome, write_outcomes
from assay.train import read_config, train
from assay.train.folder import snapshot_path

NUM_CLEAN, NUM_BAD, NUM_STEPS, NOISE = 200, 1800, 2000, 0.3
LADDER = (200, 500, 1000, 2000)  # clean images alone
TRAIN = {"num_steps": NUM_STEPS, "batch_size": 128, "lr": 2e-3, "lr_decay": "cosine", "state_every": 500}
TRAIN |= {"ema_half_life_images": 20_000}


def blurred(x: Tensor) -> Tensor:
    """`x` (N, C, H, W), each pixel half itself and half the mean of the 3 x 3 pixels around it."""
    return 0.5 * x + 0.5 * F.avg_pool2d(F.pad(x, [1] * 4, mode="replicate"), 3, stride=1)


def compressed(x: Tensor) -> Tensor:
    """`x` (N, 1, H, W) written as JPEG of quality 20 and read again."""
    found = []
    for values in ((x[:, 0] + 1) * 127.5).round().clamp(0, 255).byte().numpy():
        Image.fromarray(values).save(file := io.BytesIO(), "JPEG", quality=20)
        found.append(np.asarray(Image.open(file)))
    return torch.from_numpy(np.stack(found))[:, None].float() / 127.5 - 1


def smaller(x: Tensor) -> Tensor:
    """`x` (N, C, H, W) at half the resolution, interpolated to its size again."""
    return F.interpolate(F.avg_pool2d(x, 2), scale_factor=2, mode="bilinear", align_corners=False)


BAD: dict[str, Callable[[Tensor], Tensor]] = {
    "blur": blurred,
    "JPEG of quality 20": compressed,
    "half the resolution": smaller,
}


def main(out: Path, seeds: tuple[int, ...]) -> None:
    """Measure every arm of every seed."""
    store, held_out_path = get_once("fashion-mnist", out / "data", 8, (), 3800, 1000)
    whole, held_out = open_store(store), open_store(held_out_path)
    clean, others = View(whole, torch.arange(2000)), View(whole, torch.arange(2000, 3800))
    few, x = View(clean, torch.arange(NUM_CLEAN)), others.read(torch.arange(NUM_BAD))
    extractor = load_extractor("classifier", out / "shared", reference=clean)
    reference = reference_from_images(clean, extractor, out / "shared")
    arms: list[tuple[str, str, ImageSource, float]] = []  # kind, table, images, level
    arms += [("", "clean_mix", View(clean, torch.arange(number)), 0.0) for number in LADDER]
    arms += [("noise of 0.3", "clean_mix", Joined([few, simulate(others, 0, NOISE)]), NOISE)]
    for kind, worse in BAD.items():
        bad = from_arrays(worse(x), name=kind)
        level = annotate(bad, few).level
        print(f"{kind}: usable from {level:.3g}", flush=True)
        raised = View(bad, target=torch.full((NUM_BAD,), level))
        arms += [(f"{kind}, sigma first", "clean_mix", Joined([few, raised]), level)]
        arms += [(kind, "as if clean", Joined([few, bad]), level)]
    # Image first, the default, as a contrast; from 2.5 on it would hardly train the other levels at all.
    arms += [(kind.split(",")[0], *arm) for kind, *arm in arms if kind.endswith("first") and arm[2] < 2]
    kinds, found = dict.fromkeys(kind for kind, *_ in arms if kind), list[Outcome]()
    for seed in seeds:
        for kind, table, source, level in arms:
            name = f"{kind} {table} {len(source)} {seed}"
            tree = {"data": {"store": "unused"}, "net": {"preset": "mlp", "width": 128, "num_blocks": 3}}
            pairing = "level_first" if kind.endswith("sigma first") else "image_first"
            config = read_config({**tree, "train": {**TRAIN, "seed": seed, "pairing": pairing}})
            folder, steps = out / "runs" / name, stopping_steps(NUM_STEPS)
            if not (folder / "outcome.json").exists():
                trained = train(config, folder, source, snapshot_steps=steps)
                snapshots = {step: snapshot_path(folder, step) for step in steps[:-1]}
                losses = losses_by_band({**snapshots, NUM_STEPS: trained.checkpoint}, held_out)
                samples, settings = sample_checkpoint(trained.checkpoint, 3000)
                measured = evaluate(samples, reference, extractor, 1000, 3, sampler=settings)
                setting = Configuration(
                    table=table,
                    num_clean=NUM_CLEAN if kind else len(source),
                    noisy=((round(level, 4), NUM_BAD),) if kind else (),
                    seed=seed,
                )
                made = Outcome(configuration=setting, evaluation=with_held_out_loss(measured, losses))
                save_outcome(folder / "outcome.json", made)
            made = Outcome.model_validate_json((folder / "outcome.json").read_text())
            for dataset in [kind] if kind else kinds:  # clean images alone are compared with every kind
                of_kind = made.configuration.model_copy(update={"dataset": dataset})
                found.append(made.model_copy(update={"configuration": of_kind}))
            print(f"{name}: FD {made.evaluation.fd:.2f}, loss {made.evaluation.held_out_loss:.3f}", flush=True)
            outcomes = sorted(found, key=lambda each: each.configuration.order())
            write_outcomes(out / "bad_images.csv", outcomes)


if __name__ == "__main__":
    main(Path(sys.argv[1]), tuple(map(int, sys.argv[2:])) or (0,))
