"""One-step students of models of noisy images, beside the samples of these models.

    python studies/beyond/one_step.py OUT [SEED ...]       writes OUT/one_step.csv after every model

Fashion-MNIST at 8x8 as in the demo, and digits as in digits.toml; all images have noise of 0.3. Seeds change
training and distillation; the images and their noise are the same. `examples/one_step.py` distils, and its
student is measured every 250 steps: by its distance from clean images, and by the distance of its images, with
noise added, from the noisy ones (`fd_noised`, in pixels), which needs no clean image. `train_seconds` are those
of one core; a student's are without its teacher's. What was measured is not measured again.
"""

import csv
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from one_step import OneStep, distil, noised_distance

from assay.checkpoint import load_checkpoint
from assay.data import ImageSource
from assay.metrics.evaluate import evaluate
from assay.metrics.extract import load_extractor, reference_from_images
from assay.metrics.generated import sample_checkpoint
from assay.sample import SampleConfig
from assay.train import read_config, train

CHOICE = 10**6  # the first seed of samples that choose the stopping time
NOISE, NUM_STEPS, MEASURES = 0.3, 3000, ("fd", "fd_std", "precision", "recall")
DATA: dict[str, dict[str, Any]] = {
    "Fashion-MNIST": {"store": "fashion-mnist", "size": 8, "num_images": 2000, "held_out": 1000},
    "digits": {"store": "digits", "held_out": 297},
}
TEACHER_STEPS = {"Fashion-MNIST": 2500, "digits": 6250}
NET = {"preset": "mlp", "width": 128, "num_blocks": 3}
TRAIN = {
    "batch_size": 128,
    "lr": 2e-3,
    "lr_decay": "cosine",
    "ema_half_life_images": 20_000,
    "state_every": 500,
}


def measure(out: Path, name: str, seed: int) -> list[dict[str, Any]]:
    """The rows of one teacher and its student."""
    simulated = {"clean_fraction": 0.0, "sigma": NOISE}
    settings = {**TRAIN, "num_steps": TEACHER_STEPS[name], "seed": seed}
    config = read_config({"data": {**DATA[name], **simulated}, "net": NET, "train": settings})
    files = config.data.prepared(out / "stores")
    source = files.open()
    clean = files.model_copy(update=dict.fromkeys(simulated)).open()
    extractor = load_extractor("classifier", out / "shared", reference=clean)
    pixels = load_extractor("pixels", out / "shared")
    reference = reference_from_images(clean, extractor, out / "shared")
    noisy = reference_from_images(source, pixels, out / "shared", noisy=True)
    file, run = out / f"one_step {name} {seed}.json", out / "runs" / f"{name} {seed}"
    rows: list[dict[str, Any]] = json.loads(file.read_text()) if file.exists() else []
    known = {(row["method"], row["step"]): row for row in rows}

    def add(
        method: str, step: int, evaluations: int, images: ImageSource, noised: float, seconds: float
    ) -> None:
        found = evaluate(images, reference, extractor, 1000, 3)
        cells = {key: getattr(found, key) for key in MEASURES} | {"fd_noised": noised, "train_seconds": seconds}
        row = {"data": name, "seed": seed, "method": method, "step": step, "evaluations": evaluations}
        known[method, step] = row | {key: f"{value:.4g}" for key, value in cells.items()}
        file.write_text(json.dumps(list(known.values())))
        print(known[method, step], flush=True)

    if ("teacher, truncated", TEACHER_STEPS[name]) not in known:
        started = time.process_time()
        train(config, run, source)
        seconds = time.process_time() - started
        for method, level in (("teacher, full", None), ("teacher, truncated", NOISE)):
            images, _ = sample_checkpoint(run, 3000, sample=SampleConfig(truncate_at=level))
            few = replace(images, num_images=len(source), first_seed=CHOICE)
            noised = noised_distance(few, noisy, pixels)
            add(method, TEACHER_STEPS[name], 2 * images.sample.num_steps - 1, images, noised, seconds)
    before = max((float(row["train_seconds"]) for row in rows if row["method"] == "student"), default=0.0)
    started = time.process_time() - before
    teacher, states = load_checkpoint(run).denoiser, out / "students" / f"{name} {seed}"
    for step, student in distil(teacher, source.image_shape, NOISE, NUM_STEPS, seed, states):
        seconds = time.process_time() - started
        made, few = (OneStep(student, source.image_shape, *part) for part in ((3000,), (len(source), CHOICE)))
        add("student", step, 1, made, noised_distance(few, noisy, pixels), seconds)
        started = time.process_time() - seconds
    return list(known.values())


def main(out: Path, seeds: tuple[int, ...]) -> None:
    """Measure teachers and students of every seed."""
    rows = list[dict[str, Any]]()
    for seed in seeds:
        for name in DATA:
            rows += measure(out, name, seed)
            with open(out / "one_step.csv", "w", newline="") as table:
                writer = csv.DictWriter(table, rows[0], lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), tuple(map(int, sys.argv[2:])) or (0, 1, 2))
