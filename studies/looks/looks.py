"""Mixes of clean and noisy images, trained image first: what is a noisy image worth for how samples look?

    python studies/looks/looks.py OUT [DATA]       writes OUT/DATA.csv after every training, and resumes

README.md says what was registered. Images, blocks, network and training are those of the studies of the same
names, whose runs on clean images alone are the other half of this one; only `train.pairing` differs.
"""

import sys
from dataclasses import replace
from pathlib import Path

from assay.outcome import write_outcomes
from assay.study import open_study
from assay.study.run import run_local
from assay.study.stages import Update

STUDIES = Path(__file__).parents[1]
DATA = ("digits", "fashion-mnist")


def main(out: Path, data: str) -> None:
    """Train and measure what is missing of one data set."""
    opened = open_study(STUDIES / data / "study.toml", out / data, ["train.pairing=image_first"])
    mixes = replace(opened, runs=[run for run in opened.runs if run.ways[0][0].noisy])

    def on_update(update: Update) -> None:
        if update.is_end:
            write_outcomes(out / f"{data}.csv", (outcome for _, outcome in mixes.outcomes()))
            print(f"{data}: {len(mixes.outcomes())} of {len(mixes.runs)}", flush=True)

    run_local(mixes, num_workers=1, on_update=on_update)


if __name__ == "__main__":
    for name in sys.argv[2:] or DATA:
        main(Path(sys.argv[1]), name)
