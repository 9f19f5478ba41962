"""How many evaluations of the network samples need: the distance of each arm of a study, by solver and steps.

    python bench/sampling.py [FOLDER]      (a finished study; default: the demo's, run first if it is missing)

Heun with 18 steps takes 35 evaluations; the multistep solver takes one a step. Each model is sampled from the
same ranges of seeds by every solver, so that the differences from Heun are paired. In brackets: the
difference from Heun and its standard error over the ranges.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from statistics import fmean, stdev

import torch

from assay.checkpoint import load_checkpoint
from assay.data import open_store
from assay.metrics.distance import features_to_statistics, frechet_distance
from assay.metrics.extract import images_to_features, load_extractor, reference_from_images
from assay.metrics.generated import sample_checkpoint
from assay.sample import SampleConfig

HEUN = "Heun 18 steps (35)"
SAMPLERS = {HEUN: SampleConfig()} | {
    f"multistep ({number})": SampleConfig(solver="multistep", num_steps=number) for number in (8, 10, 12, 18)
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=Path, default=Path("out/demo"))
    parser.add_argument("--ranges", type=int, default=6)
    parser.add_argument("--images", type=int, default=1000)
    args = parser.parse_args()
    if not (args.folder / "runs").exists():
        subprocess.run([Path(sys.executable).with_name("assay"), "demo"], check=True)
    stores = [path for path in (args.folder / "data").iterdir() if "held-out" not in path.name]
    source = open_store(stores[0])
    extractor = load_extractor("classifier", args.folder / "shared", reference=source, batch_size=250)
    reference = reference_from_images(source, extractor, args.folder / "shared")
    print("| arm | " + " | ".join(SAMPLERS) + " |\n|---" + "|---" * len(SAMPLERS) + "|")
    for run in sorted((args.folder / "runs").iterdir()):
        checkpoint = run / "snapshots" / "final.safetensors"
        info = load_checkpoint(checkpoint).info
        noisy_only = bool(info.lowest_sigma_tn) and not info.consistency
        for truncate_at in (None, "auto") if noisy_only else (None,):
            distances = {}
            for name, sample in SAMPLERS.items():
                chosen = sample.model_copy(update={"truncate_at": truncate_at})
                images, settings = sample_checkpoint(checkpoint, args.ranges * args.images, 0, chosen)
                distances[name] = [
                    frechet_distance(
                        features_to_statistics(images_to_features(extractor, images, index)),
                        reference.statistics,
                    )
                    for index in torch.arange(len(images)).split(args.images)
                ]
            cells = [f"{info.clean_fraction:.0%} clean" + ", truncated" * bool(settings.sample.truncate_at)]
            for found in distances.values():
                change = [a - b for a, b in zip(found, distances[HEUN], strict=True)]
                error = stdev(change) / len(change) ** 0.5
                cells.append(f"{fmean(found):.2f}" + f" ({fmean(change):+.2f} ± {error:.2f})" * any(change))
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
