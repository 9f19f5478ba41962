"""Four more blocks of the studies: what they say of the paper's claims.

    python studies/more-blocks/more_blocks.py OUT [DATA] [BLOCK ...]

writes OUT/DATA/*.csv after every training, and resumes. README.md says what was registered. Mixes are trained
as in the studies of the same names; those that draw the level first also image first, as in studies/looks, if
they have an FD.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from assay.outcome import write_outcomes
from assay.pricing.results import write_levels
from assay.settings import read_toml
from assay.study import open_study
from assay.study.run import run_local
from assay.study.spec import Run
from assay.study.stages import OpenStudy, Update

STUDIES = Path(__file__).parents[1]
DATA = ("digits", "fashion-mnist", "galaxies", "cifar10")
BLOCKS = range(3, 7)


def main(out: Path, data: str, blocks: Sequence[int]) -> None:
    """Train and measure what is missing of one data set, block by block."""
    path = STUDIES / data / "study.toml"
    own = read_toml(path)["train"].get("pairing", "level_first")
    settings = {own: [], "image_first": ["train.pairing=image_first"]}
    opened = {
        name: open_study(path, out / name, each, claim=False).with_blocks(BLOCKS.stop)
        for name, each in settings.items()
    }
    if own != "image_first" and not opened[own].study.evaluate.num_images:
        del opened["image_first"]  # it differs in how samples look
    for i in range(len(blocks)):
        for name, study in opened.items():
            mine = replace(study, runs=needed(study, name == own, blocks[: i + 1]))

            def on_update(update: Update, name: str = name, mine=mine) -> None:
                if update.is_end:
                    write_outcomes(out / f"{name}.csv", (outcome for _, outcome in mine.outcomes()))
                    print(f"{name}: {len(mine.outcomes())} of {len(mine.runs)}", flush=True)

            run_local(mine, num_workers=1, on_update=on_update)
            if name == own:
                write_levels(out / "levels.csv", mine.levels())


def needed(study: OpenStudy, clean_too: bool, blocks: Sequence[int]) -> list[Run]:
    """The runs of some blocks that a claim needs: the mixes with the fewest clean images, and, if clean runs
    are wanted too, the ends of their ladder."""
    runs = [(run, run.ways[0][0]) for run in study.runs if run.ways[0][0].seed in blocks]
    sizes = sorted({of.num_clean for _, of in runs if not of.noisy})
    ends = [*sizes[:2], *sizes[-2:]] if clean_too else []
    return [run for run, of in runs if of.num_clean in ([sizes[0]] if of.noisy else ends)]


if __name__ == "__main__":
    out, *rest = sys.argv[1:]
    for data in rest[:1] or DATA:
        main(Path(out) / data, data, [int(block) for block in rest[1:]] or BLOCKS)
