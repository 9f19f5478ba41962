"""From a study to its runs, given its images.

A `Run` is one training with the ways in which its model is sampled; each way gives one row of the results, with
the configuration that says what the model was trained on. The configurations of a design are plain numbers of
clean and noisy images (`design_mixes`); those of the paper's grid are fractions of the data set.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from assay.data import ImageSource
from assay.data.config import DataConfig
from assay.data.view import count_of
from assay.errors import AssayError
from assay.files import sha256
from assay.outcome import Configuration
from assay.sample import SampleConfig
from assay.study.spec import Design, EvaluateConfig, Extra, Study
from assay.train.config import RunConfig, read_config
from assay.train.run import check_run

Levels = tuple[float, float]


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
        return hash_tree([self.key, sample.model_dump(mode="json"), evaluate, self.held_out_fingerprint])


def hash_tree(tree: Any) -> str:
    """A short name for a tree of plain values."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]


def study_runs(
    study: Study, data: DataConfig, source: ImageSource, held_out_fingerprint: str = "", blocks: int = 0
) -> list[Run]:
    """Every training of a study, those of a design in `blocks` blocks (by default as many as it says).

    `source` holds the images of `data`. Configurations that differ only in how they are sampled share a run.
    """
    about = study.evaluate, source.fingerprint, held_out_fingerprint
    if study.design is not None:
        found = _design_rows(study, study.design, data, source, blocks or study.design.blocks)
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


def _design_rows(
    study: Study, design: Design, data: DataConfig, source: ImageSource, blocks: int
) -> Iterator[_Row]:
    """The ladder of clean sizes, then a mix for each level of noise; all of it in each block."""
    num_clean, sizes = int((source.sigma_tn == 0).sum()), [round(design.have_clean * r) for r in design.ladder]
    ladder = [size for size in sorted(set(sizes)) if size <= num_clean]
    bins = [] if design.noisy else level_bins(source.sigma_tn)
    _check_design(design, source, num_clean, ladder, bins)
    mixes: list[tuple[dict[str, Any], float | None]] = [({"clean": size, "noisy": 0}, None) for size in ladder]
    for clean in (round(design.have_clean * rung) for rung in design.mixes):
        num_noisy = design.num_noisy or max(ladder[-1] - clean, 0)
        if design.noisy and not 0 < num_noisy <= num_clean - clean:
            what = f"{clean} clean images of {num_clean} leave {num_clean - clean} to get noise"
            raise AssayError(what, key="design.num_noisy", cure="lower it, or lower design.mixes")
        mixes += [({"clean": clean, "noisy": num_noisy, "sigma": sigma}, sigma) for sigma in design.noisy]
        for levels in bins:
            inside = source.sigma_tn[_between(source.sigma_tn, levels)]
            middle = float(f"{inside.double().log().mean().exp().item():.3g}")  # for all levels of the bin
            images = {"clean": clean, "noisy": min(num_noisy, len(inside)), "levels": levels}
            mixes.append((images, levels[0] if levels[0] == levels[1] else middle))
    train = {"pairing": "level_first"} | study.train.model_dump(mode="json", exclude_unset=True)
    for block in range(blocks):
        for images, level in mixes:
            tree = {"data": data.model_dump(mode="json") | images | {"block": block}, "net": study.net}
            config = read_config({**tree, "train": train | {"seed": block}}, "train")
            noisy = ((level, images["noisy"]),) if level and images["noisy"] else ()
            of = Configuration(dataset=study.name, num_clean=images["clean"], noisy=noisy, seed=block)
            yield config, of, study.evaluate.sample, None


def _check_design(
    design: Design, source: ImageSource, num_clean: int, ladder: list[int], bins: list[Levels]
) -> None:
    """Reject a design that the images cannot give."""
    if not design.noisy and not bins:
        what, cure = f"all images of {source.name} are clean", "give the noise levels to simulate"
        raise AssayError(what, key="design.noisy", cure=cure)
    if design.noisy and num_clean < len(source):
        raise AssayError(
            f"simulates noise, but {len(source) - num_clean} images of {source.name} are noisy already",
            key="design.noisy", cure="leave it out to study these, or set data.noisy = 0 to leave them out",
        )  # fmt: skip
    if len(ladder) < 3:
        raise AssayError(
            f"{source.name} has {num_clean} clean images to train on, too few for three sizes from "
            f"{design.have_clean} up", key="design.have_clean",
            cure="lower it: in trials worth by level hardly depended on the share of clean images",
        )  # fmt: skip


def level_bins(sigma_tn: Tensor, max_bins: int = 3) -> list[Levels]:
    """Bins (low, high) of the noise levels: one per level, or `max_bins` with about as many images each."""
    levels, numbers = sigma_tn[sigma_tn > 0].unique(return_counts=True)
    bin_of = torch.arange(len(levels))
    if len(levels) > max_bins:
        bin_of = (numbers.cumsum(0) - numbers) * max_bins // numbers.sum()
    inside = [levels[bin_of == each] for each in bin_of.unique()]
    return [(_plain(each[0]), _plain(each[-1])) for each in inside]


def _plain(level: Tensor) -> float:
    """A float32 as the shortest number that gives it: 0.3 and not 0.30000001192."""
    return float(str(np.float32(level.item())))


def _between(sigma_tn: Tensor, levels: Levels) -> Tensor:
    low, high = torch.tensor(levels)
    return (sigma_tn >= low) & (sigma_tn <= high)


def _grid_rows(study: Study, data: DataConfig, source: ImageSource) -> Iterator[_Row]:
    """The rows of the paper's tables, in their order, then the extras."""
    grid = study.grid
    assert grid is not None
    if num_noisy := int((source.sigma_tn > 0).sum()):
        raise AssayError(
            f"simulates noise, but {num_noisy} of the {len(source)} images of {source.name} are noisy already",
            key="grid.sigmas", cure="write a [design] for these, or set data.noisy = 0 to leave them out",
        )  # fmt: skip
    for seed in grid.seeds:
        rows = []
        for p in grid.clean_fractions:
            if p == 1 or (p > 0 and "clean_only" in grid.baselines):
                rows.append(Extra(table="clean_mix", clean_fraction=p))
            for sigma in grid.sigmas if p < 1 else ():
                rows.append(Extra(table="clean_mix", clean_fraction=p, sigma=sigma))
                if p == 0:
                    alone = Extra(table="only_noisy", clean_fraction=p, sigma=sigma)
                    rows.append(alone)
                    if "truncated" in grid.baselines:
                        rows.append(alone.model_copy(update={"sampling": "truncated"}))
                    if "consistency" in grid.baselines:
                        rows.append(alone.model_copy(update={"consistency": True}))
        yield from (_grid_row(study, data, source, seed, row) for row in rows)
    for extra in study.extra:
        yield from (_grid_row(study, data, source, seed, extra) for seed in extra.seeds or grid.seeds)


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
    sample = study.evaluate.sample.model_dump()
    match row.sampling:
        case "truncated":
            sample["truncate_at"] = sigma
        case "refined":
            sample |= {"refine_at": sigma, "num_extra": row.num_extra}
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
    try:
        return config, of, SampleConfig(**sample), first
    except AssayError as error:
        raise AssayError(f"{of.title} cannot be sampled ({error})", key="evaluate.sample") from None


def check_against_data(runs: list[Run]) -> None:
    """Reject, before any work, runs that this data cannot give."""
    for run in runs:
        images, batch_size = run.config.data.open(), run.config.train.batch_size
        if batch_size > len(images):
            raise AssayError(
                f"{run.title}: its {len(images)} images are fewer than a batch of {batch_size}",
                key="train.batch_size", cure="lower it, or use more images",
            )  # fmt: skip
        check_run(run.config, images)
        levels = images.sigma_tn.unique().tolist()
        for sample in run.samples:
            try:
                sample.for_levels(levels).sigmas()
            except ValueError as error:
                raise AssayError(f"{run.title} cannot be sampled: {error}", key="evaluate.sample") from None
