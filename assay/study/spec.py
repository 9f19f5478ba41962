"""A study is one TOML file: data, network, training, evaluation, and what to train on.

    name = "scans"
    [data]      store = "stores/scans"                 the words of `assay train`: see `DataConfig`
    [net]       preset = "unet-tiny"
    [train]     num_steps = 4000                       any setting of `assay train`, or preset = "cifar10"
    [evaluate]  num_images = 0                         1000 also measures how samples look
    [design]    have_clean = 400                       a ladder of clean sizes, and mixes with noisy images
                noisy = [0.2]                          in blocks: what decides a price

The paper's own studies have a [grid] of clean fractions and noise levels instead of [design], and [[extra]]
configurations (studies/paper). `study_runs` makes trainings of both. A `Run` is one training with the ways in
which its model is sampled; each way gives one row of the results.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from assay.data import ImageSource
from assay.data.config import DataConfig
from assay.data.view import count_of
from assay.errors import AssayError, Rules, check
from assay.files import read_text, sha256
from assay.metrics.extract import ExtractorName, FeatureNetwork
from assay.noise import warn_of_units
from assay.outcome import Configuration, Sampling
from assay.pricing.results import Goal
from assay.registry import find, own_code
from assay.sample import SampleConfig, Solver
from assay.settings import Level, Strict, checked, override, read_toml
from assay.train.config import ConsistencyConfig, RunConfig, TrainConfig, read_config
from assay.train.presets import PRESETS, preset_tree
from assay.train.run import check_run

SETTINGS = "settings.txt"  # next to study.toml: what was changed on the command line
DEMO = Path(__file__).parent / "demo.toml"  # the study of `assay demo`
Fraction = Annotated[float, Field(ge=0, le=1)]
Rung = Annotated[float, Field(ge=1)]


class EvaluateConfig(Strict):
    """The paper's protocol: `num_ranges` disjoint ranges of `num_images` seeds each, mean and deviation."""

    extractor: ExtractorName = Field("classifier", description="The features to compare; inception gives FID.")
    reference: Literal["training"] | Path = Field(
        "training",
        union_mode="left_to_right",
        description="What to compare samples with: the images that are not held out, or an npz of statistics.",
    )
    num_images: int = Field(1000, ge=0, description="Samples per range of seeds; 0 does not sample.")
    num_ranges: int = Field(3, ge=1, description="Disjoint ranges of seeds.")
    sample: SampleConfig = Field(SampleConfig(), description="How to sample.")
    batch_size: int = Field(256, ge=1, description="Images computed at a time; no influence on the result.")
    fd_only: bool = Field(False, description="Leave out KID, precision and recall, which compare all pairs.")
    along: int = Field(0, ge=0, description="Also measure this many snapshots along training.")


class Design(Strict):
    """What decides the price of noisy images: a ladder of clean sizes, and mixes, each in several blocks.

    A block draws other images, nested across its configurations, and has its own training seed.
    """

    have_clean: int = Field(ge=20, description="The clean images in hand, the unit of the design.")
    ladder: tuple[Rung, ...] = Field(
        (1.0, 1.7, 3.0, 5.0, 10.0), min_length=3, description="Clean-only sizes, in units of have_clean."
    )
    mixes: tuple[Rung, ...] = Field((1.0,), min_length=1, description="Clean images of mixes, in these units.")
    noisy: tuple[Level, ...] = Field(
        (), description="Noise levels to simulate. Default: the store's, in three bins if there are many."
    )
    num_noisy: int | None = Field(None, ge=1, description="Noisy images of a mix. Default: up to the top.")
    blocks: int = Field(3, ge=2, description="Blocks at the start; `assay study run --until` adds more.")
    goal: Goal = Field("structure", description="The goal whose price decides when there are enough blocks.")


class Grid(Strict):
    """The paper's grid: shares of the images stay clean, the others get simulated noise or are left out."""

    clean_fractions: tuple[Fraction, ...] = Field(min_length=1, description="The shares that stay clean.")
    sigmas: tuple[Level, ...] = Field((), description="The levels of simulated noise.")
    baselines: tuple[Literal["clean_only", "truncated", "consistency"], ...] = Field(
        ("clean_only", "truncated", "consistency"),
        description="clean_only: the clean images of each fraction alone. truncated and consistency: the noisy "
        "images alone (fraction 0), sampled down to their noise only, or trained with the consistency loss.",
    )
    seeds: tuple[int, ...] = Field((0,), min_length=1, description="The seeds of training.")

    def rules(self) -> Rules:
        """Images that are not clean have a level."""
        needed = any(p == 0 or "clean_only" not in self.baselines for p in self.clean_fractions if p < 1)
        error = AssayError("sigmas is empty", cure="give the noise levels of the images that are not clean")
        yield needed and not self.sigmas, error


class Extra(Strict):
    """One more configuration: another fraction or noise, or the same with other training or sampling."""

    table: str = Field("extreme", description="The table of the report in which it is shown.")
    clean_fraction: Fraction = Field(description="As in grid.clean_fractions.")
    sigma: Level | None = Field(None, description="The level of simulated noise; none is clean images alone.")
    consistency: bool = Field(False, description="Train with the consistency loss.")
    sampling: Sampling = Field("full", description="To the end, down to the noise level, or refined below it.")
    num_extra: int = Field(0, ge=0, description='Steps below the noise level, with sampling = "refined".')
    train: TrainConfig = Field(TrainConfig(), description="Settings of training that override the study's.")
    continues: bool = Field(False, description="Continue the grid's training on the same images.")

    def rules(self) -> Rules:
        """What is for noisy images has their level."""
        error = AssayError("consistency and truncation are for noisy images", cure="give sigma")
        yield self.sigma is None and (self.consistency or self.sampling != "full"), error


class Study(Strict):
    """The keys of the whole file."""

    name: str = Field(pattern=r"^[\w-][\w.-]*$", description="The study's name; its folder is out/NAME.")
    data: DataConfig = Field(description="The images.")
    net: dict[str, Any] = Field(description="The network, as in the file of a run.")
    train: TrainConfig = Field(TrainConfig(), description="How to train every configuration.")
    consistency: ConsistencyConfig = Field(
        ConsistencyConfig(coefficient=1.0, start=0.5), description="The consistency loss, where it is used."
    )
    evaluate: EvaluateConfig = Field(EvaluateConfig(), description="How results are measured.")
    design: Design | None = Field(None, description="A design that decides a price.")
    grid: Grid | None = Field(None, description="The paper's grid, instead of a design.")
    extra: tuple[Extra, ...] = Field((), description="Further configurations beside a grid.")
    scale: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Below 1, a dry run: this share of the steps and samples, and a thin network. E.g. 1e-5.",
    )

    @property
    def caution(self) -> str:
        """With which losses those of this study cannot be compared."""
        own, usual = self.train.pairing, TrainConfig().pairing
        learns = f" and by default learns with pairing = {usual!r}, not {own!r}" if own != usual else ""
        measured = f"a model of `assay train` is measured at its last step, not its best{learns}"
        return f"Compare these losses with each other only: {measured}."

    def scaled(self) -> "Study":
        """The study that `scale` asks for."""
        if self.scale == 1:
            return self
        whole, number, sample = self.train.num_steps, self.evaluate.num_images, self.evaluate.sample
        steps = max(2, round(whole * self.scale))
        train = {"num_steps": steps, "batch_size": min(self.train.batch_size, 4), "max_per_device": None}
        few = {"num_steps": min(sample.num_steps, 4), "num_extra": 0}
        evaluate = {
            "num_images": max(20, round(number * self.scale)) if number else 0,
            "along": min(self.evaluate.along, 2),
            "sample": sample.model_copy(update=few),
        }
        extras = []
        for extra in self.extra:
            longer = {"num_steps": steps + (extra.train.num_steps > whole)}
            own = longer if "num_steps" in extra.train.model_fields_set else {}
            short = {"num_extra": min(extra.num_extra, 2), "train": extra.train.model_copy(update=own)}
            extras.append(extra.model_copy(update=short))
        thin = {"model_channels": 8, "num_blocks": 1} if "preset" in self.net else {}
        update = {
            "net": {**self.net, **thin},
            "train": self.train.model_copy(update=train | {"precision": "32"}),
            "evaluate": self.evaluate.model_copy(update=evaluate),
            "extra": tuple(extras),
        }
        return self.model_copy(update=update)

    def rules(self) -> Rules:
        """There is one plan."""
        error = AssayError("has not one plan", cure="give [design], or [grid] and perhaps [[extra]]")
        yield (self.design is None) == (self.grid is None) or (self.design and self.extra), error
        for name, values in self.design or self.grid or ():
            key = f"{'design' if self.design else 'grid'}.{name}"
            error = AssayError(f"{values} has a value twice", key=key, cure="give each once")
            yield isinstance(values, tuple) and len({*values}) < len(values), error


# Settings that the design or the grid decides, and what to set instead.
_DECIDED = {
    "train.seed": "design.blocks or grid.seeds",
    "data.clean_fraction": "grid.clean_fractions",
    "data.sigma": "design.noisy or grid.sigmas",
    "data.keep_noisy": "grid.baselines",
    "data.block": "design.blocks",
}


def read_study(path: Path, settings: Sequence[str] = ()) -> Study:
    """Read and check a study file, or that in a study's folder, changed by `settings` ("train.lr=1e-3").

    Without any, they are those with which the study was begun.
    """
    path = path / "study.toml" if path.is_dir() else path
    tree = with_preset(override(read_toml(path), settings or remembered(path)))
    if "design" in tree and isinstance(tree.setdefault("train", {}), dict):
        tree["train"].setdefault("pairing", "level_first")  # every mix trains equally often at each level
    for key, cure in _DECIDED.items():
        section, name = key.split(".")
        if name in tree.get(section, {}):
            cure = f"leave it out, and set {cure}"
            raise AssayError("is decided by the study", path=path, key=key, cure=cure)
    return checked(Study, tree, path).scaled()


def study_folder(spec: Path) -> Path:
    """The folder of a study: itself, or out/NAME of its file."""
    return spec if spec.is_dir() else Path("out", read_study(spec).name)


def remembered(spec: Path) -> list[str]:
    """The settings with which a study was begun, beside its file."""
    return read_text(kept).splitlines() if (kept := spec.with_name(SETTINGS)).exists() else []


def with_preset(tree: dict[str, Any]) -> dict[str, Any]:
    """Fill in `[train] preset`: its network, training and sampler, each changed by what the file says."""
    train, net, evaluate = (tree.get(name, {}) for name in ("train", "net", "evaluate"))
    if not isinstance(train, dict) or "preset" not in train:
        return tree
    name = train["preset"]
    chosen = preset_tree(name, **{key: value for key, value in train.items() if key != "preset"})
    sample = {**PRESETS[name].sample, **evaluate.get("sample", {})}
    net = net if "preset" in net else {**chosen["net"], **net}
    return {**tree, "net": net, "train": chosen["train"], "evaluate": {**evaluate, "sample": sample}}


@dataclass(frozen=True)
class Run:
    """One training, and its configuration for each way of sampling. Named by what decides its results."""

    config: RunConfig
    ways: tuple[tuple[Configuration, SampleConfig], ...]
    evaluate: EvaluateConfig
    data_fingerprint: str = ""
    held_out_fingerprint: str = ""  # of the images it is measured on, if any
    continues: "Run | None" = None  # the training that it goes on from
    is_continued: bool = False  # by another, which needs its last state

    @cached_property
    def key(self) -> str:
        """Where the run's results lie; depends on the images, not on where their store does."""
        tree = self.config.decisive()
        if self.continues is not None:
            tree["continues"] = self.continues.key
        tree["data"]["store"] = self.data_fingerprint
        if isinstance(self.config.data.held_out, Path):  # another store: it decides nothing about training
            del tree["data"]["held_out"]
        return hash_tree(tree)

    @property
    def title(self) -> str:
        """What the model is trained on, in words."""
        return self.ways[0][0].title

    @property
    def samples(self) -> tuple[SampleConfig, ...]:
        """The ways of sampling."""
        return tuple(dict.fromkeys(sample for _, sample in self.ways))

    @property
    def num_sampled(self) -> int:
        """Images sampled in each way of sampling."""
        return self.evaluate.num_images * (self.evaluate.num_ranges + self.evaluate.along)

    def result_key(self, sample: SampleConfig) -> str:
        """Hash of one result: the training, the sampling, the protocol and what it compares with."""
        evaluate = self.evaluate.model_dump(mode="json", exclude={"batch_size", "sample"})
        if isinstance(self.evaluate.reference, Path) and self.evaluate.reference.exists():
            evaluate["reference"] = sha256(self.evaluate.reference)
        evaluate |= own_code(find(FeatureNetwork, self.evaluate.extractor, "evaluate.extractor"))
        evaluate |= own_code(find(Solver, sample.solver, "evaluate.sample.solver"))
        return hash_tree([self.key, sample.model_dump(mode="json"), evaluate, self.held_out_fingerprint])


def hash_tree(tree: Any) -> str:
    """A short name for a tree of plain values."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]


def study_runs(
    study: Study, data: DataConfig, source: ImageSource, held_out: ImageSource | None = None, blocks: int = 0
) -> list[Run]:
    """Every training of a study on the images `source` of `data`, those of a design in `blocks` blocks.

    Configurations that differ only in how they are sampled share a run.
    """
    about = study.evaluate, source.fingerprint, held_out.fingerprint if held_out else ""
    if study.design is not None:
        found = _design_rows(study, data, source, blocks or study.design.blocks)
    else:
        found = _grid_rows(study, data, source)
    runs: dict[str, Run] = {}
    there: dict[Configuration, tuple[str, SampleConfig]] = {}
    for config, of, sample, before in found:
        goes_on = None if before is None else Run(before, (), *about, is_continued=True)
        run = Run(config, (), *about, goes_on)
        if there.setdefault(of, (run.key, sample)) != (run.key, sample):
            raise AssayError(f"two of them are called {of.title!r}", key="extra", cure="give one another table")
        ways = (*runs.get(run.key, run).ways, (of, sample))
        runs[run.key] = replace(run, ways=tuple(dict.fromkeys(ways)))
    continued = {run.continues.key for run in runs.values() if run.continues}
    return [replace(run, is_continued=key in continued) for key, run in runs.items()]


# What is trained, its words, how it is sampled, and the training that it continues, if any.
_Row = tuple[RunConfig, Configuration, SampleConfig, RunConfig | None]


def _design_rows(study: Study, data: DataConfig, source: ImageSource, blocks: int) -> Iterator[_Row]:
    """The ladder of clean sizes, then a mix for each level of noise; all of it in each block."""
    design, num_clean = study.design, int((source.sigma_tn == 0).sum())
    assert design is not None
    sizes = {round(design.have_clean * rung) for rung in design.ladder}
    ladder = [size for size in sorted(sizes) if size <= num_clean]
    bins = [] if design.noisy else level_bins(source.sigma_tn)
    if design.noisy:
        warn_of_units(max(design.noisy))
        _check_clean(source, "design.noisy", "leave it out to study these")
    what, cure = f"all images of {source.name} are clean", "give the noise levels to simulate"
    few = f"{source.name} has {num_clean} clean images: no three sizes from {design.have_clean} up"
    lower = "lower it: in trials worth by level hardly depended on the share of clean images"
    check([
        (not design.noisy and not bins, AssayError(what, key="design.noisy", cure=cure)),
        (len(ladder) < 3, AssayError(few, key="design.have_clean", cure=lower)),
    ])  # fmt: skip
    mixes: list[tuple[dict[str, Any], float | None]] = [({"clean": size, "noisy": 0}, None) for size in ladder]
    for clean in (round(design.have_clean * rung) for rung in design.mixes):
        num_noisy = design.num_noisy or max(ladder[-1] - clean, 0)
        if design.noisy and not 0 < num_noisy <= num_clean - clean:
            what = f"{clean} clean images of {num_clean} leave {num_clean - clean} to get noise"
            raise AssayError(what, key="design.num_noisy", cure="lower it, or lower design.mixes")
        mixes += [({"clean": clean, "noisy": num_noisy, "sigma": sigma}, sigma) for sigma in design.noisy]
        for levels in bins:
            num_there, middle = bin_size(source.sigma_tn, levels)
            mixes.append(({"clean": clean, "noisy": min(num_noisy, num_there), "levels": levels}, middle))
    train = study.train.model_dump(mode="json", exclude_unset=True)
    for block in range(blocks):
        for images, level in mixes:
            tree = {"data": data.model_dump(mode="json") | images | {"block": block}, "net": study.net}
            config = read_config({**tree, "train": train | {"seed": block}}, "train")
            noisy = ((level, images["noisy"]),) if level and images["noisy"] else ()
            of = Configuration(dataset=study.name, num_clean=images["clean"], noisy=noisy, seed=block)
            yield config, of, study.evaluate.sample, None


def _check_clean(source: ImageSource, key: str, cure: str) -> None:
    if num_noisy := int((source.sigma_tn > 0).sum()):
        what = f"simulates noise, but {num_noisy} images of {source.name} are noisy already"
        raise AssayError(what, key=key, cure=f"{cure}, or set data.noisy = 0 to leave them out")


def level_bins(sigma_tn: Tensor, max_bins: int = 3) -> list[tuple[float, float]]:
    """Bins (low, high) of the noise levels: one per level, or `max_bins` with about as many images each."""
    levels, numbers = sigma_tn[sigma_tn > 0].unique(return_counts=True)
    bin_of = torch.arange(len(levels))
    if len(levels) > max_bins:
        bin_of = (numbers.cumsum(0) - numbers) * max_bins // numbers.sum()
    inside = (levels[bin_of == each][[0, -1]].numpy() for each in bin_of.unique())
    return [(float(str(low)), float(str(high))) for low, high in inside]  # 0.3 and not 0.30000001192


def bin_size(sigma_tn: Tensor, levels: tuple[float, float]) -> tuple[int, float]:
    """The images of a bin, and the level that stands for all of theirs."""
    low, high = torch.tensor(levels)
    inside = sigma_tn[(sigma_tn >= low) & (sigma_tn <= high)]
    middle = float(f"{inside.double().log().mean().exp().item():.3g}")
    return len(inside), levels[0] if levels[0] == levels[1] else middle


def _grid_rows(study: Study, data: DataConfig, source: ImageSource) -> Iterator[_Row]:
    """The rows of the paper's tables, in their order, then the extras."""
    grid = study.grid
    assert grid is not None
    _check_clean(source, "grid.sigmas", "write a [design] for these")
    rows: list[Extra] = []
    alone: dict[str, Any] = {"truncated": {"sampling": "truncated"}, "consistency": {"consistency": True}}
    for p in grid.clean_fractions:
        if p == 1 or (p > 0 and "clean_only" in grid.baselines):
            rows.append(Extra(table="clean_mix", clean_fraction=p))
        for sigma in grid.sigmas if p < 1 else ():
            rows.append(Extra(table="clean_mix", clean_fraction=p, sigma=sigma))
            ways = [{}, *(how for name, how in alone.items() if name in grid.baselines)] if p == 0 else []
            rows += [Extra(table="only_noisy", clean_fraction=p, sigma=sigma, **how) for how in ways]
    for group in (rows, *([extra] for extra in study.extra)):
        yield from (_grid_row(study, data, source, seed, row) for seed in grid.seeds for row in group)


def _grid_row(study: Study, data: DataConfig, source: ImageSource, seed: int, row: Extra) -> _Row:
    general, own = (part.model_dump(mode="json", exclude_unset=True) for part in (study.train, row.train))
    train, p, sigma = {**general, **own, "seed": seed}, row.clean_fraction, row.sigma
    if row.consistency:
        train["consistency"] = {**study.consistency.model_dump(mode="json"), **own.get("consistency", {})}
    num_clean = count_of(p, len(source))
    if num_clean == 0 and p > 0:
        key = "grid.clean_fractions" if row.table in ("clean_mix", "only_noisy") else "extra"
        raise AssayError(f"{p:g} of {len(source)} images is none", key=key, cure="use a larger fraction")
    images = {"clean_fraction": p} | ({"sigma": sigma} if sigma else {"keep_noisy": False})
    ways = {"truncated": {"truncate_at": sigma}, "refined": {"refine_at": sigma, "num_extra": row.num_extra}}
    sample = SampleConfig(**study.evaluate.sample.model_dump() | ways.get(row.sampling, {}))
    tree = {"data": data.model_dump(mode="json") | images, "net": study.net, "train": train}
    config = read_config(tree, "train")
    of = Configuration(
        dataset=study.name, table=row.table, num_clean=num_clean, clean_fraction=p, seed=seed,
        noisy=((sigma, len(source) - num_clean),) if sigma else (), rounds=config.train.rounds,
        consistency=row.consistency, sampling=row.sampling,
    )  # fmt: skip
    first = None
    if row.continues:
        same_images = Extra(table="clean_mix", clean_fraction=p, sigma=sigma)
        first = _grid_row(study, data, source, seed, same_images)[0]
    return config, of, sample, first


def check_against_data(runs: list[Run]) -> None:
    """Reject, before any work, runs that this data cannot give."""
    for run in runs:
        images = run.config.data.open()
        check_run(run.config, images)
        levels = images.sigma_tn.unique().tolist()
        for sample in run.samples:
            try:
                sample.for_levels(levels).sigmas()
            except ValueError as error:
                raise AssayError(f"{run.title} cannot be sampled: {error}", key="evaluate.sample") from None
