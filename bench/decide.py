"""How long until a price is decided: CPU time until the interval for structure spans a factor of two.

python bench/decide.py

Blocks of the committed studies are added one after another, as `assay study run --until 2` does, and priced
with what there is. Times are what `assay study cost` says of their trainings and measurements on one core
here, for studies whose images come with Assay.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

from assay.pricing import price_results
from assay.study import open_study
from assay.study.run import width
from assay.study.sizing import study_cost

sys.path.insert(0, str(Path(__file__).parent.parent / "studies"))
import findings


def minutes(study: str) -> float:
    """Of one core, for one run of a study; nan if its images are not here."""
    path = findings.HERE / study / "study.toml"
    with tempfile.TemporaryDirectory() as folder:
        try:
            opened = open_study(path, Path(folder))
        except ValueError:
            return float("nan")
        return float(np.mean([each.seconds for each in study_cost(opened.study, opened)])) / 60


def main() -> None:
    print("structure: core-minutes so far, and the factor between the ends of the interval, after each block")
    for study in findings.measured_studies():
        levels, each = findings.levels_of(study), minutes(study)
        for which, sigma in enumerate(levels.sigmas):
            own = (levels.num_noisy.sum(1) == 0) | (levels.num_noisy[:, which] > 0)
            cells = []
            for block in np.unique(levels.block):
                runs = findings.at_level(findings.take(levels, own & (levels.block <= block)), which)
                price = price_results([], runs).of("structure")
                cells.append(f"{len(runs.block)} runs, {len(runs.block) * each:.0f} min: {width(price):.2f}")
            print(f"{findings.title_of(study):<24} noise {sigma:<6.3g} {';  '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
