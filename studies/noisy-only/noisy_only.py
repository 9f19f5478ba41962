"""Noisy images alone, at the same compute: truncated sampling, consistency, rounds, one-step students.

    python studies/noisy-only/noisy_only.py OUT        writes OUT/noisy_only.csv after every model, and resumes

README.md says what was registered. Images, blocks, network and training are those of the studies of the same
names; compute is counted in evaluations of the network (`assay.cost`).
"""

import csv
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from one_step import OneStep, distil

from assay.checkpoint import load_checkpoint
from assay.cost import WITH_GRADIENT, training_evaluations
from assay.data import ImageSource
from assay.metrics.evaluate import evaluate
from assay.metrics.generated import sample_checkpoint
from assay.metrics.held_out import losses_by_band
from assay.sample import SampleConfig
from assay.study import open_study
from assay.study.stages import find_reference
from assay.train import read_config, train
from assay.train.config import TrainConfig

STUDIES = Path(__file__).parents[1]
DATA, BLOCKS, NOISE, NUM_IMAGES = ("digits", "fashion-mnist"), range(3), 0.3, 400
STEPS = 2400  # of the plain training, whose evaluations are everyone's budget
CONSISTENCY = {"coefficient": 1.0, "start": 0.5}  # a study's default
METHODS: dict[str, dict[str, Any]] = {
    "plain": {},
    "consistency": {"consistency": CONSISTENCY},
    "rounds": {"rounds": 2, "round_length": 0.5},
    "student": {},  # of a teacher that was trained with half of the budget
}
STUDENT = 4 * WITH_GRADIENT  # evaluations per image of a step: student, fake, and both denoisers of the loss
STUDENT_BATCH = 32
COLUMNS = ("data", "block", "method", "sampling", "fd", "held_out_loss", "steps", "evaluations", "seconds")


def longest(train: dict[str, Any], budget: float) -> dict[str, Any]:
    """These settings with the most steps that the budget allows."""

    def cost(steps: int) -> float:
        return training_evaluations(TrainConfig(**train | {"num_steps": steps}), NUM_IMAGES)

    steps = round(STEPS * budget / cost(STEPS))
    while steps > 1 and cost(steps) > budget:
        steps -= 1
    return train | {"num_steps": steps}


def measure(out: Path, data: str, done: set[tuple[str, str]], num_samples: int) -> Iterator[dict[str, object]]:
    """The rows of one data set."""
    folder = out / data
    opened = open_study(STUDIES / data / "study.toml", folder)
    compared = find_reference(opened.study, opened.data, folder)
    assert compared is not None and opened.held_out is not None
    extractor, reference = compared
    shared = opened.study.train.model_dump(mode="json", exclude_unset=True) | {"num_steps": STEPS}
    budget = training_evaluations(TrainConfig(**shared), NUM_IMAGES)
    for block in BLOCKS:
        images = {"clean": 0, "noisy": NUM_IMAGES, "sigma": NOISE, "block": block}
        for method, settings in METHODS.items():
            if (str(block), method) in done:
                continue
            started, path = time.process_time(), folder / f"{method}-{block}"
            settings = longest(shared | settings | {"seed": block}, budget / (2 if method == "student" else 1))
            tree = {"data": opened.data.model_dump(mode="json") | images, "net": opened.study.net}
            trained = train(read_config({**tree, "train": settings}, "train"), path)
            used = training_evaluations(TrainConfig(**settings), NUM_IMAGES)
            made: dict[str, ImageSource] = {}
            if method == "student":
                steps = int((budget - used) / STUDENT / STUDENT_BATCH)
                teacher = load_checkpoint(trained.checkpoint)
                how = teacher.config.image_shape, NOISE, steps, block, path / "student", steps, STUDENT_BATCH
                for _, student in distil(teacher.denoiser, *how):
                    made["one step"] = OneStep(student.eval(), teacher.config.image_shape, num_samples)
                used += steps * STUDENT * STUDENT_BATCH
            else:
                for name in ("full", "truncated"):
                    above = {"truncate_at": "auto"} if name == "truncated" else {}
                    sample = SampleConfig(**opened.study.evaluate.sample.model_dump(mode="json") | above)
                    made[name], _ = sample_checkpoint(trained.checkpoint, num_samples, sample=sample)
            loss = losses_by_band({settings["num_steps"]: trained.checkpoint}, opened.held_out).at_end
            seconds = time.process_time() - started
            for name, samples in made.items():
                fd = evaluate(samples, reference, extractor, num_samples, fd_only=True).fd
                known = "" if method == "student" else loss.nats_per_dim.value
                cells = (data, block, method, name, fd, known, settings["num_steps"], used / budget, seconds)
                yield dict(zip(COLUMNS, cells, strict=True))


def main(out: Path, num_samples: int = 1000) -> None:
    """Measure what is missing."""
    out.mkdir(parents=True, exist_ok=True)
    table = out / "noisy_only.csv"
    rows = list(csv.DictReader(table.open(newline=""))) if table.exists() else []
    for data in DATA:
        done = {(row["block"], row["method"]) for row in rows if row["data"] == data}
        for row in measure(out, data, done, num_samples):
            with table.open("a", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                if file.tell() == 0:
                    writer.writeheader()
                writer.writerow(row)
            print(row, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
