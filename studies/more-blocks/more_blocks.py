"""Four more blocks of the digits study: what they say of the paper's claims.

    python studies/more-blocks/more_blocks.py OUT      writes OUT/*.csv after every training, and resumes

README.md says what was registered. Mixes are trained level first, as in studies/digits, and image first, as in
studies/looks.
"""

import sys
from dataclasses import replace
from pathlib import Path

from assay.outcome import write_outcomes
from assay.pricing.results import write_levels
from assay.study import open_study
from assay.study.run import run_local
from assay.study.stages import Update

STUDY = Path(__file__).parents[1] / "digits" / "study.toml"
BLOCKS = range(3, 7)
SIZES = (40, 68, 200, 400)


def main(out: Path) -> None:
    """Train and measure what is missing, block by block."""
    settings = {"level_first": [], "image_first": ["train.pairing=image_first"]}
    opened = {
        name: open_study(STUDY, out / name, each).with_blocks(BLOCKS.stop) for name, each in settings.items()
    }
    for block in BLOCKS:
        for name, study in opened.items():
            wanted = []
            for run in study.runs:
                of = run.ways[0][0]
                few = of.num_clean == SIZES[0] if of.noisy else name == "level_first" and of.num_clean in SIZES
                if few and of.seed is not None and BLOCKS.start <= of.seed <= block:
                    wanted.append(run)
            mine = replace(study, runs=wanted)

            def on_update(update: Update, name: str = name, mine=mine) -> None:
                if update.is_end:
                    write_outcomes(out / f"{name}.csv", (outcome for _, outcome in mine.outcomes()))
                    print(f"{name}: {len(mine.outcomes())} of {len(mine.runs)}", flush=True)

            run_local(mine, num_workers=1, on_update=on_update)
            if name == "level_first":
                write_levels(out / "levels.csv", mine.levels())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
