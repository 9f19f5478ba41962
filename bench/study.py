"""Workers with one thread each against one worker with all threads, on a study of equal small runs.

Bar: two workers on two cores finish in <= 0.65 times the time of one worker with two threads. Both ways
run the same study in a folder of its own, start-up of the processes included; they take turns, and each
keeps its fastest round. Their results agree in every column but the seconds if the network has no
convolutions (whose sums are split over threads); an MLP has none. The network is the demo's: wider ones
gain more from a second thread (at width 256 the ratio was 0.675).
"""

import os
import tempfile
import time
from pathlib import Path

from assay.study import open_study, run_local
from assay.study.stages import find_reference

NUM_ROUNDS = 2
SPEC = """
name = "equal-runs"
[data]
store = "digits"
[net]
preset = "mlp"
width = 128
num_blocks = 3
[train]
num_steps = 1000
batch_size = 128
[evaluate]
extractor = "pixels"
num_images = 200
num_ranges = 3
[grid]
clean_fractions = [1]
seeds = [0, 1, 2, 3, 4, 5]
"""


def study_seconds(folder: Path, num_workers: int, num_threads: int) -> tuple[float, list[float]]:
    folder.mkdir(parents=True)
    (folder / "spec.toml").write_text(SPEC)
    opened = open_study(folder / "spec.toml", folder / "out")
    find_reference(opened.study, opened.data, opened.folder)
    started = time.perf_counter()
    run_local(opened, num_workers, num_threads=num_threads)
    seconds = time.perf_counter() - started
    distances = [outcome.evaluation.fd for _, outcome in opened.outcomes()]
    if len(distances) < sum(len(run.ways) for run in opened.runs):
        raise SystemExit(f"a run failed: {opened.failure(opened.runs[-1])}")
    return seconds, distances


def main() -> None:
    num_cores = os.cpu_count() or 1
    alone, together = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(NUM_ROUNDS):
            seconds, threaded = study_seconds(Path(folder) / f"one-{number}", 1, num_cores)
            alone.append(seconds)
            seconds, single = study_seconds(Path(folder) / f"many-{number}", num_cores, 1)
            together.append(seconds)
            load = os.getloadavg()[0]
            print(f"round {number}: {alone[-1]:.1f} s and {together[-1]:.1f} s (load {load:.1f})", flush=True)
    print(f"{len(single)} equal runs of 1000 steps, the network of `make demo`, on {num_cores} cores")
    print(f"one worker, {num_cores} threads        {min(alone):7.1f} s")
    ratio = min(together) / min(alone)
    print(f"{num_cores} workers, one thread each   {min(together):7.1f} s  {ratio:.3f}x  (bar 0.65)")
    print(f"same distances: {threaded == single}")


if __name__ == "__main__":
    main()
