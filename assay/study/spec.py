"""A study is one TOML file: data, network, training, evaluation, and a grid of what to train on.

    name = "digits"
    [data]      store = "digits"                       the words of `assay train`: see `DataConfig`
    [net]       preset = "mlp"
    [train]     num_steps = 4000                       any setting of `assay train`, or preset = "cifar10"
    [evaluate]  extractor = "classifier"
    [grid]      clean_fractions = [1, 0.1, 0]          x sigmas = [0.5]
                baselines = ["clean_only", "truncated", "consistency"]
                seeds = [0, 1, 2]
    [[extra]]   table = "extreme"                      one more setting, with overrides of its own
                clean_fraction = 0.01
                sigma = 0.2

A store with noisy images needs no sigmas: then clean_fractions and noisy_fractions are parts of its clean and
of its noisy images. `assay.study.arms` makes trainings of it.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from assay.metrics import ExtractorName
from assay.outcome import Sampling
from assay.sample import SampleConfig
from assay.train.config import (
    ConsistencyConfig,
    DataConfig,
    Strict,
    TrainConfig,
    explain,
    override,
    read_toml,
)
from assay.train.presets import PRESETS, preset_tree

DEMO = Path(__file__).parent / "demo.toml"  # the study of `assay demo`
Baseline = Literal["clean_only", "truncated", "consistency"]


class EvaluateConfig(Strict):
    """The paper's protocol: `num_ranges` disjoint ranges of `num_images` seeds each, mean and deviation."""

    extractor: ExtractorName = Field(
        "classifier", description="The features to compare; only inception gives FID, others give FD-NAME."
    )
    reference: Literal["training", "held_out"] | Path = Field(
        "training",
        union_mode="left_to_right",
        description="The real images that samples are compared with: all that are not held out, those "
        "that are, or an npz of statistics (of `assay reference`, or EDM's fid-refs).",
    )
    num_images: int = Field(1000, ge=20, description="Samples per range of seeds.")
    num_ranges: int = Field(3, ge=1, description="Disjoint ranges of seeds.")
    sample: SampleConfig = Field(SampleConfig(), description="How to sample.")
    batch_size: int = Field(256, ge=1, description="Images computed at a time; no influence on the result.")
    fd_only: bool = Field(
        False,
        description="Leave out KID, precision, recall, coverage and copies, which compare images pair by pair.",
    )
    along: int = Field(
        0,
        ge=0,
        description="Also measure this many snapshots, evenly spaced over training, each on num_images samples "
        "of other seeds. Set it before training.",
    )
    result: Literal["final", "best_fd", "best_score"] = Field(
        "final",
        description="Which weights to sample: the last, those of the snapshot with the lowest distance (among "
        "the snapshots of along), or those with the best score on held-out images.",
    )


class Grid(Strict):
    """What to train on: parts of the clean images, with and without noisy ones, and the baselines.

    With `sigmas` the noise is simulated on clean images; without them the noisy images of the store are used.
    """

    clean_fractions: tuple[float, ...] = Field(
        min_length=1,
        description="With simulated noise: the shares of all images that stay clean; the others get noise. "
        "With real noise: the shares of the clean images that are kept.",
    )
    sigmas: tuple[float, ...] = Field((), description="The levels of simulated noise.")
    noisy_fractions: tuple[float, ...] = Field(
        (1.0,), min_length=1, description="With real noise: the shares of the noisy images that are kept."
    )
    levels: tuple[tuple[float, float], ...] = Field(
        (),
        description="With real noise: bins of noise levels, [low, high], whose images are compared. Default: "
        "all noisy images together, and one bin for each level, or three bins if there are more levels.",
    )
    baselines: tuple[Baseline, ...] = Field(
        ("clean_only", "truncated", "consistency"),
        description="clean_only: the clean images of each fraction alone. truncated and consistency: the noisy "
        "images alone (fraction 0), sampled down to their noise only, or trained with the consistency loss.",
    )
    seeds: tuple[int, ...] = Field((0,), min_length=1, description="The seeds of training.")


class Extra(Strict):
    """One more setting: other fractions or noise, or the same with other training or sampling."""

    table: str = Field("extreme", description="The table of the report in which it is shown.")
    clean_fraction: float = Field(ge=0, le=1, description="As in grid.clean_fractions.")
    sigma: float | None = Field(None, gt=0, description="The level of simulated noise.")
    noisy_fraction: float = Field(
        1.0, gt=0, le=1, description="With real noise: the share of the noisy images that is kept."
    )
    levels: tuple[float, float] | None = Field(
        None, description="With real noise: keep noisy images between these two levels."
    )
    noisy: bool = Field(True, description="false trains on the clean images alone.")
    consistency: bool = Field(False, description="Train with the consistency loss.")
    sampling: Sampling = Field(
        "full", description="Sample to the end, stop at the noise level, or refine below it."
    )
    num_extra: int = Field(0, ge=0, description='Steps below the noise level, with sampling = "refined".')
    train: TrainConfig = Field(TrainConfig(), description="Settings of training that override the study's.")
    seeds: tuple[int, ...] | None = Field(
        None, min_length=1, description="The seeds of training. Default: those of the grid."
    )


class Study(Strict):
    """The keys of the whole file."""

    name: str = Field(pattern=r"^[\w.-]+$", description="The study's name; its default folder is out/NAME.")
    data: DataConfig = Field(description="The images.")
    net: dict[str, Any] = Field(description="The network, as in the file of a run.")
    train: TrainConfig = Field(TrainConfig(), description="How to train every setting.")
    consistency: ConsistencyConfig = Field(
        ConsistencyConfig(coefficient=1.0, start=0.5),
        description="The consistency loss of the settings that use it.",
    )
    evaluate: EvaluateConfig = Field(EvaluateConfig(), description="How results are measured.")
    grid: Grid = Field(description="What to train on.")
    extra: tuple[Extra, ...] = Field((), description="Further settings, each with overrides of its own.")


def read_study(path: Path, settings: Sequence[str] = ()) -> Study:
    """Read and check a study file; every fault is named with its line and, if near one, the valid name.

    `settings` change it as `assay train --set` does, e.g. "train.num_steps=100".
    """
    tree, text = with_preset(override(read_toml(path), settings)), path.read_text()
    try:
        study = Study.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        faults = [_line_of(text, fault["loc"]) + explain(dict(fault), Study) for fault in error.errors()]
        raise ValueError(f"{path}: " + "; ".join(dict.fromkeys(faults))) from None
    with naming_line(path):
        _check(study)
    return study


def with_preset(tree: dict[str, Any]) -> dict[str, Any]:
    """Fill in `[train] preset`: its network, training and sampler, each changed by what the file says."""
    train = tree.get("train")
    if not isinstance(train, dict) or "preset" not in train:
        return tree
    name = train["preset"]
    chosen = preset_tree(name)
    own = {key: value for key, value in train.items() if key != "preset"}
    evaluate = dict(tree.get("evaluate", {}))
    evaluate["sample"] = {**PRESETS[name].sample, **evaluate.get("sample", {})}
    net = tree.get("net", {})
    return {
        **tree,
        "net": net if "preset" in net else {**chosen["net"], **net},
        "train": {**chosen["train"], **own},
        "evaluate": evaluate,
    }


def _check(study: Study) -> None:
    grid = study.grid
    if study.evaluate.result == "best_fd" and study.evaluate.along < 2:
        raise ValueError("evaluate.result = best_fd chooses among snapshots: set evaluate.along, e.g. 10")
    for value in grid.clean_fractions:
        if not 0 <= value <= 1:
            raise ValueError(f"grid.clean_fractions has {value:g}; a fraction is between 0 and 1")
    for value in grid.sigmas:
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"grid.sigmas has {value:g}; a noise level is > 0")
    for value in grid.noisy_fractions:
        if not 0 < value <= 1:
            raise ValueError(
                f"grid.noisy_fractions has {value:g}; a fraction of the noisy images is > 0 and <= 1"
            )
    for low, high in grid.levels:
        if not 0 < low <= high < math.inf:
            raise ValueError(
                f"grid.levels has [{low:g}, {high:g}]; give the lowest level and the highest, both > 0"
            )
    for key in ("clean_fractions", "sigmas", "noisy_fractions", "levels", "seeds"):
        if len(set(getattr(grid, key))) < len(getattr(grid, key)):
            raise ValueError(f"grid.{key} names a value twice")
    if "seed" in study.train.model_fields_set:
        raise ValueError("train.seed is decided by grid.seeds: leave it out")
    for number, extra in enumerate(study.extra):
        if "seed" in extra.train.model_fields_set:
            raise ValueError(f"extra.{number}.train: its seed is decided by extra.{number}.seeds: leave it out")
    for key, now in {"clean_fraction": "clean_fractions", "sigma": "sigmas", "keep_noisy": "baselines"}.items():
        if key in study.data.model_fields_set:
            raise ValueError(f"data.{key} is decided by grid.{now}: leave it out")


@contextmanager
def naming_line(path: Path) -> Iterator[None]:
    """Add the file, and the line of the first `section.key` that a ValueError names, to its message."""
    try:
        yield
    except ValueError as error:
        key = re.search(r"\b[a-z_]+(\.\w+)+", str(error))
        parts = key[0].split(".") if key else ()
        line = _line_of(path.read_text(), tuple(int(part) if part.isdigit() else part for part in parts))
        raise ValueError(f"{path}: {line}{error}") from None


def _line_of(text: str, loc: tuple[Any, ...]) -> str:
    """ "line 7: " of the longest beginning of a location, e.g. ("extra", 1, "sigma"), that the file names."""
    section: tuple[Any, ...] = ()
    num_tables: Counter[str] = Counter()
    longest, found = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        here: tuple[Any, ...]
        if header := re.match(r"\s*(\[+)\s*([\w.-]+)\s*\]", line):
            here = section = tuple(header[2].split("."))
            if header[1] == "[[":
                section = (*here, num_tables[header[2]])
                num_tables[header[2]] += 1
                here = section
        elif key := re.match(r"\s*([\w.-]+)\s*=", line):
            here = (*section, *key[1].split("."))
        else:
            continue
        if here == loc[: len(here)] and len(here) > longest:
            longest, found = len(here), f"line {number}: "
    return found
