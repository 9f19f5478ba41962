"""Image first or level first, with one stop or a stop per band of levels: by held-out loss and by FD.

    python studies/recipe/recipe.py OUT        writes OUT/recipe.csv after every training, and resumes

README.md says what was registered. Images, blocks, network and training are those of the studies of the same
names; only `train.pairing` differs between the two recipes.
"""

import csv
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from assay.checkpoint import load_checkpoint
from assay.denoise import Denoiser
from assay.metrics.evaluate import evaluate
from assay.metrics.generated import sample_checkpoint
from assay.metrics.held_out import BandLosses, losses_by_band, stopping_steps
from assay.study import open_study
from assay.study.stages import find_reference
from assay.train import train
from assay.train.folder import final_path, snapshot_path

STUDIES = Path(__file__).parents[1]
DATA, PAIRINGS, NOISE = ("digits", "fashion-mnist"), ("image_first", "level_first"), 0.3
COLUMNS = ("data", "pairing", "block", "stops", "held_out_loss", "fd", "seconds")


def by_band(weights: dict[int, Path], found: BandLosses) -> Denoiser:
    """A denoiser with other weights in each band of levels: those with the best loss there."""
    denoisers = {step: load_checkpoint(weights[step]).denoiser.eval() for step in set(found.step)}
    edges = found.best.config.edges[1:-1]

    def denoise(x_t: Tensor, sigma_t: Tensor, label: Tensor | None = None) -> Tensor:
        step = found.step[int(np.searchsorted(edges, float(sigma_t[0]), side="right"))]
        return denoisers[step](x_t, sigma_t, label)

    return denoise


def measure(out: Path, data: str, pairing: str, done: set[str]) -> Iterator[dict[str, object]]:
    """The rows of the mix with the fewest clean images, in each block of a study."""
    folder = out / f"{data}-{pairing}"
    opened = open_study(STUDIES / data / "study.toml", folder, [f"train.pairing={pairing}"])
    compared = find_reference(opened.study, opened.data, folder)
    design, held_out = opened.study.design, opened.held_out
    assert design is not None and held_out is not None and compared is not None
    extractor, reference = compared
    for run in opened.runs:
        of = run.ways[0][0]
        if (of.num_clean, of.levels) != (design.have_clean, (NOISE,)) or str(of.seed) in done:
            continue
        started, path = time.process_time(), folder / run.key
        last = run.config.train.num_steps
        train(run.config, path, snapshot_steps=stopping_steps(last))
        weights = {step: snapshot_path(path, step) for step in stopping_steps(last)} | {last: final_path(path)}
        found = losses_by_band(weights, held_out)
        seconds = time.process_time() - started
        end, _ = sample_checkpoint(weights[last], 1000, 0, opened.study.evaluate.sample, reference.frequencies)
        one, _ = sample_checkpoint(weights[found.one_step], 1000, 0, end.sample, reference.frequencies)
        banded = replace(end, denoiser=by_band(weights, found))
        for stops, loss, images in (
            ("at the end", found.at_end, end),
            ("one stop", found.with_one_stop, one),
            ("a stop per band", found.best, banded),
        ):
            fd = evaluate(images, reference, extractor, 1000, fd_only=True).fd
            cells = (data, pairing, of.seed, stops, loss.nats_per_dim.value, fd, seconds)
            yield dict(zip(COLUMNS, cells, strict=True))


def main(out: Path) -> None:
    """Measure what is missing."""
    out.mkdir(parents=True, exist_ok=True)
    table = out / "recipe.csv"
    rows = list(csv.DictReader(table.open(newline=""))) if table.exists() else []
    for data in DATA:
        for pairing in PAIRINGS:
            done = {row["block"] for row in rows if (row["data"], row["pairing"]) == (data, pairing)}
            for row in measure(out, data, pairing, done):
                with table.open("a", newline="") as file:
                    writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                    if file.tell() == 0:
                        writer.writeheader()
                    writer.writerow(row)
                print(row, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
