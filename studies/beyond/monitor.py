"""Does the distance between samples with noise and noisy images fall with the distance from clean images?

    python studies/beyond/monitor.py OUT       after the studies of this folder, with their folders in OUT

Writes OUT/monitor.csv: both distances of the model after each loop, for noisy images alone and the mix.
"""

import csv
import json
import sys
from pathlib import Path

import torch

from assay.data import Store, open_store, simulate, split_held_out
from assay.data.arrays import from_arrays
from assay.metrics import evaluate, load_extractor, reference_from_images
from assay.metrics.generated import Noised, sample_checkpoint
from assay.train.restored import loop_path

NUM_IMAGES = 1000


def main(out: Path) -> None:
    """Measure every loop of every run with the default settings of loops."""
    rows = []
    for name in ("digits", "fashion-mnist", "cifar10"):
        stores = [path for path in (out / name / "data").glob("*") if "held-out" not in path.name]
        store: Store | None = open_store(stores[0]) if stores else None
        for path in sorted((out / name / "runs").glob("*")):
            config = json.loads((path / "config.json").read_text())["config"]
            data, settings = config["data"], config["train"]
            restore = settings["restore"]
            if store is None or not settings["loops"] or restore["keep"] or restore["trust"] == "everywhere":
                continue
            source = split_held_out(store, 297, 0)[0] if name == "digits" else store
            noisy = simulate(source, 0.0, data["sigma"])
            for loop in range(settings["loops"] + 1):
                samples, _ = sample_checkpoint(loop_path(path, loop), 2 * NUM_IMAGES)
                images = from_arrays(samples.read(torch.arange(2 * NUM_IMAGES)))
                row = {"data": name, "clean": data["clean_fraction"], "seed": settings["seed"], "loop": loop}
                for kind in ("classifier", "pixels"):
                    extractor = load_extractor(kind, out / "shared", reference=source)
                    for title, candidate, real in (
                        ("clean", images, reference_from_images(source, extractor, out / "shared")),
                        (
                            "noised",
                            Noised(images, noisy.sigma_tn),
                            reference_from_images(noisy, extractor, out / "shared", noisy=True),
                        ),
                    ):
                        found = evaluate(candidate, real, extractor, NUM_IMAGES, 2, fd_only=True).evaluation
                        row[f"{title} {kind}"] = f"{found.fd:.4g}"
                rows.append(row)
                print(row, flush=True)
                with open(out / "monitor.csv", "w", newline="") as file:
                    writer = csv.DictWriter(file, rows[0], lineterminator="\n")
                    writer.writeheader()
                    writer.writerows(rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
