"""A study of five short trainings for tests, and what must be equal between two ways of running it."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from assay.outcome import write_outcomes
from assay.study import OpenStudy, open_study
from assay.study.stages import find_reference
from tests.stores import stored

SPEC = """\
name = "tiny"

[data]
store = "digits"

[net]
preset = "mlp"
width = 32
num_blocks = 1

[train]
num_steps = 120
batch_size = 64
lr = 2e-3
lr_ramp_images = 0
ema_half_life_images = 2000
state_every = 20
log_every = 1

[evaluate]
extractor = "pixels"
num_images = 60
num_ranges = 2

[evaluate.sample]
num_steps = 4

[grid]
clean_fractions = [1, 0.1, 0]
sigmas = [0.5]
"""

# The same images and training with a design: five clean sizes and a mix, in two blocks.
DESIGN = (
    SPEC[: SPEC.index("[evaluate]")]
    + """\
[evaluate]
num_images = 0

[design]
have_clean = 80
noisy = [0.3]
blocks = 2
"""
)


# One more training, which diverges.
WILD = '[[extra]]\ntable = "wild"\nclean_fraction = 1\ntrain = {lr = 1e6}\n'


def mixes(study: OpenStudy, block: int = 0) -> list[tuple[float, tuple[tuple[float, float], ...]]]:
    """Clean and noisy images of every run of a block."""
    found = [run.ways[0][0] for run in study.runs]
    return [(each.num_clean, each.noisy) for each in found if each.seed == block]


def noise_store(path: Path, sigma_tn: Sequence[float], seed: int = 0) -> Path:
    """A store of images whose content matters to no test."""
    stored(path, np.random.default_rng(seed).uniform(-1, 1, (len(sigma_tn), 1, 8, 8)), sigma_tn)
    return path


def fewer(spec: str) -> str:
    """Three trainings: clean, noisy, noisy with consistency."""
    return spec.replace("[1, 0.1, 0]", "[1, 0]")


def short(spec: str) -> str:
    """One short training on clean images."""
    return spec.replace("[1, 0.1, 0]", "[1]").replace("num_steps = 120", "num_steps = 20")


def prepared(folder: Path, change: Callable[[str], str] = lambda spec: spec) -> OpenStudy:
    """The study in its folder, its data and reference made."""
    folder.mkdir(parents=True, exist_ok=True)
    spec = change(SPEC)
    assert spec != SPEC or change("x") == "x", "the change did not apply"
    (folder / "spec.toml").write_text(spec)
    opened = open_study(folder / "spec.toml", folder / "out")
    find_reference(opened.study, opened.data, opened.folder)
    return opened


def outcome(opened: OpenStudy) -> str:
    """`results.csv` without the seconds."""
    path = opened.folder / "results.csv"
    write_outcomes(path, [found for _, found in opened.outcomes()])
    rows = [line.split(",") for line in path.read_text().splitlines()]
    assert rows[0][-3:] == ["train_seconds", "sample_seconds", "held_out_loss_seconds"]
    return "\n".join(",".join(row[:-3]) for row in rows)


def weights(opened: OpenStudy) -> dict[str, bytes]:
    """The final weights of every finished training, by run."""
    found = opened.folder.glob("runs/*/snapshots/final.safetensors")
    return {path.parents[1].name: path.read_bytes() for path in found}


def kept(opened: OpenStudy) -> dict[Path, int]:
    """When each result and final checkpoint was written: what is kept is not written again."""
    found = [*opened.folder.glob("runs/*/outcome-*.json"), *opened.folder.glob("runs/*/snapshots/final.*")]
    return {path: path.stat().st_mtime_ns for path in found}
