"""A study is one TOML file: data, network, training, evaluation, and what to train on.

    name = "scans"
    [data]      store = "stores/scans"                 the words of `assay train`: see `DataConfig`
    [net]       preset = "unet-tiny"
    [train]     num_steps = 4000                       any setting of `assay train`, or preset = "cifar10"
    [evaluate]  num_images = 0                         1000 also measures how samples look
    [design]    have_clean = 400                       a ladder of clean sizes, and mixes with noisy images
                noisy = [0.2]                          in blocks: what decides a price

The paper's own grid has the sections below instead of [design]; `assay.study.runs` makes trainings of both.

    [grid]      clean_fractions = [1, 0.1, 0]          x sigmas = [0.5]
                baselines = ["clean_only", "truncated", "consistency"]
                seeds = [0, 1, 2]
    [[extra]]   table = "extreme"                      one more configuration, with overrides of its own
                clean_fraction = 0.01
                sigma = 0.2
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from assay.data.config import DataConfig
from assay.errors import AssayError
from assay.metrics.extract import ExtractorName
from assay.outcome import Sampling
from assay.pricing.results import Goal
from assay.sample import SampleConfig
from assay.settings import Level, Strict, checked, override, read_toml
from assay.train.config import ConsistencyConfig, TrainConfig
from assay.train.presets import PRESETS, preset_tree

DEMO = Path(__file__).parent / "demo.toml"  # the study of `assay demo`
Baseline = Literal["clean_only", "truncated", "consistency"]
Fraction = Annotated[float, Field(ge=0, le=1)]


class EvaluateConfig(Strict):
    """The paper's protocol: `num_ranges` disjoint ranges of `num_images` seeds each, mean and deviation."""

    extractor: ExtractorName = Field(
        "classifier", description="The features to compare; only inception gives FID, others give FD-NAME."
    )
    reference: Literal["training", "held_out"] | Path = Field(
        "training",
        union_mode="left_to_right",
        description="The real images that samples are compared with: all that are not held out, those "
        "that are, or an npz of statistics (of `assay evaluate reference`, or EDM's fid-refs).",
    )
    num_images: int = Field(
        1000, ge=0, description="Samples per range of seeds; 0 leaves out how samples look, which takes time."
    )
    num_ranges: int = Field(3, ge=1, description="Disjoint ranges of seeds.")
    sample: SampleConfig = Field(SampleConfig(), description="How to sample.")
    batch_size: int = Field(256, ge=1, description="Images computed at a time; no influence on the result.")
    fd_only: bool = Field(
        False,
        description="Leave out KID, precision and recall, which compare images pair by pair.",
    )
    along: int = Field(
        0,
        ge=0,
        description="Also measure this many snapshots, evenly spaced over training, each on num_images samples "
        "of other seeds: the paper's figure of FID against steps. Set it before training.",
    )


class Design(Strict):
    """What decides the price of noisy images: a ladder of clean sizes, and mixes, each in several blocks.

    A block draws other images, nested across its configurations, and has its own training seed. Every band of
    noise levels gets the same number of draws in every configuration (`train.pairing` = level_first).
    """

    have_clean: int = Field(ge=20, description="The clean images in hand, the unit of the design.")
    ladder: tuple[Annotated[float, Field(ge=1)], ...] = Field(
        (1.0, 1.7, 3.0, 5.0, 10.0),
        min_length=3,
        description="Sizes of the clean-only trainings in units of have_clean, as far as there are images.",
    )
    mixes: tuple[Annotated[float, Field(ge=1)], ...] = Field(
        (1.0,),
        min_length=1,
        description="Clean images of the mixes, in units of have_clean: several show whether the worth of a "
        "noisy image depends on the share of clean ones.",
    )
    noisy: tuple[Level, ...] = Field(
        (),
        description="Noise levels to simulate. Without any, the noisy images of the store are studied, by "
        "level, or in three bins of levels if there are many.",
    )
    num_noisy: int | None = Field(
        None, ge=1, description="Noisy images of each mix. Default: up to the largest size of the ladder."
    )
    blocks: int = Field(3, ge=2, description="Blocks at the start; `assay study run --until` adds more.")
    goal: Goal = Field("structure", description="The goal whose price decides when there are enough blocks.")


class Grid(Strict):
    """The paper's grid: shares of the images stay clean, the others get simulated noise or are left out."""

    clean_fractions: tuple[Fraction, ...] = Field(min_length=1, description="The shares that stay clean.")
    sigmas: tuple[Level, ...] = Field((), description="The levels of simulated noise.")
    baselines: tuple[Baseline, ...] = Field(
        ("clean_only", "truncated", "consistency"),
        description="clean_only: the clean images of each fraction alone. truncated and consistency: the noisy "
        "images alone (fraction 0), sampled down to their noise only, or trained with the consistency loss.",
    )
    seeds: tuple[int, ...] = Field((0,), min_length=1, description="The seeds of training.")

    @field_validator("clean_fractions", "sigmas", "seeds")
    @classmethod
    def _once(cls, values: tuple[float, ...]) -> tuple[float, ...]:
        if len(set(values)) < len(values):
            raise ValueError("a value is named twice")
        return values

    @model_validator(mode="after")
    def _has_noise(self) -> "Grid":
        needed = any(p == 0 or "clean_only" not in self.baselines for p in self.clean_fractions if p < 1)
        if needed and not self.sigmas:
            raise ValueError("sigmas is empty: give the noise levels of the images that are not clean")
        return self


class Extra(Strict):
    """One more configuration: another fraction or noise, or the same with other training or sampling."""

    table: str = Field("extreme", description="The table of the report in which it is shown.")
    clean_fraction: Fraction = Field(description="As in grid.clean_fractions.")
    sigma: Level | None = Field(None, description="The level of simulated noise; none is clean images alone.")
    consistency: bool = Field(False, description="Train with the consistency loss.")
    sampling: Sampling = Field(
        "full", description="Sample to the end, stop at the noise level, or refine below it."
    )
    num_extra: int = Field(0, ge=0, description='Steps below the noise level, with sampling = "refined".')
    train: TrainConfig = Field(TrainConfig(), description="Settings of training that override the study's.")
    continues: bool = Field(
        False,
        description="Continue the grid's training on the same images with these settings, instead of starting "
        "anew; train.num_steps counts from its beginning.",
    )
    seeds: tuple[int, ...] | None = Field(
        None, min_length=1, description="The seeds of training. Default: those of the grid."
    )

    @model_validator(mode="after")
    def _noisy_if_needed(self) -> "Extra":
        if self.sigma is None and (self.consistency or self.sampling != "full"):
            raise ValueError("consistency and truncation are for noisy images: give sigma")
        return self


class Study(Strict):
    """The keys of the whole file."""

    name: str = Field(
        pattern=r"^[\w-][\w.-]*$", description="The study's name; its default folder is out/NAME."
    )
    data: DataConfig = Field(description="The images.")
    net: dict[str, Any] = Field(description="The network, as in the file of a run.")
    train: TrainConfig = Field(TrainConfig(), description="How to train every configuration.")
    consistency: ConsistencyConfig = Field(
        ConsistencyConfig(coefficient=1.0, start=0.5),
        description="The consistency loss of the configurations that use it.",
    )
    evaluate: EvaluateConfig = Field(EvaluateConfig(), description="How results are measured.")
    design: Design | None = Field(None, description="A design that decides a price.")
    grid: Grid | None = Field(None, description="The paper's grid, instead of a design.")
    extra: tuple[Extra, ...] = Field((), description="Further configurations beside a grid.")
    scale: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Below 1 everything runs as it is written, but in small: this share of the steps and of "
        "the samples, at least a few of each, and a thin network. For a dry run, e.g. 1e-5.",
    )

    def scaled(self) -> "Study":
        """The study that `scale` asks for."""
        if self.scale == 1:
            return self
        whole, number, sample = self.train.num_steps, self.evaluate.num_images, self.evaluate.sample
        steps = max(2, round(whole * self.scale))
        train = {"num_steps": steps, "batch_size": min(self.train.batch_size, 4), "max_per_device": None}
        evaluate = {
            "num_images": max(20, round(number * self.scale)) if number else 0,
            "along": min(self.evaluate.along, 2),
            "sample": sample.model_copy(update={"num_steps": min(sample.num_steps, 4), "num_extra": 0}),
        }
        extras = []
        for extra in self.extra:
            longer = {"num_steps": steps + (extra.train.num_steps > whole)}
            own = longer if "num_steps" in extra.train.model_fields_set else {}
            few = {"num_extra": min(extra.num_extra, 2), "train": extra.train.model_copy(update=own)}
            extras.append(extra.model_copy(update=few))
        update = {
            "net": {**self.net, **({"model_channels": 8, "num_blocks": 1} if "preset" in self.net else {})},
            "train": self.train.model_copy(update=train | {"precision": "32"}),
            "evaluate": self.evaluate.model_copy(update=evaluate),
            "extra": tuple(extras),
        }
        return self.model_copy(update=update)

    @model_validator(mode="after")
    def _one_plan(self) -> "Study":
        if (self.design is None) == (self.grid is None) or (self.design and self.extra):
            raise ValueError("give [design], or [grid] and perhaps [[extra]]")
        return self


# Settings that the design or the grid decides, and what to set instead.
_DECIDED = {
    "train.seed": "design.blocks or grid.seeds",
    "data.clean_fraction": "grid.clean_fractions",
    "data.sigma": "design.noisy or grid.sigmas",
    "data.keep_noisy": "grid.baselines",
    "data.block": "design.blocks",
}


def read_study(path: Path, settings: Sequence[str] = ()) -> Study:
    """Read and check a study file; a fault is named with its key and, if near one, the valid name.

    `settings` change it as `assay train --set` does, e.g. "train.num_steps=100".
    """
    tree = with_preset(override(read_toml(path), settings))
    for key, cure in _DECIDED.items():
        section, name = key.split(".")
        if name in tree.get(section, {}):
            what = "is decided by the study"
            raise AssayError(what, path=path, key=key, cure=f"leave it out, and set {cure}")
    return checked(Study, tree, path).scaled()


def with_preset(tree: dict[str, Any]) -> dict[str, Any]:
    """Fill in `[train] preset`: its network, training and sampler, each changed by what the file says."""
    train = tree.get("train")
    if not isinstance(train, dict) or "preset" not in train:
        return tree
    name = train["preset"]
    chosen = preset_tree(name, **{key: value for key, value in train.items() if key != "preset"})
    evaluate = dict(tree.get("evaluate", {}))
    evaluate["sample"] = {**PRESETS[name].sample, **evaluate.get("sample", {})}
    net = tree.get("net", {})
    return {
        **tree,
        "net": net if "preset" in net else {**chosen["net"], **net},
        "train": chosen["train"],
        "evaluate": evaluate,
    }
