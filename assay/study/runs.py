"""From a study to its runs, given its images.

A `Run` is one training with the ways in which its model is sampled; each way gives one row of the results, with
the configuration that says what the model was trained on. The configurations of a design are plain numbers of
clean and noisy images (`design_mixes`); those of the paper's grid are fractions of the data set.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from assay.data import ImageSource
from assay.data.config import DataConfig
from assay.data.view import count_of
from assay.errors import AssayError
from assay.files import reason, sha256
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
    if study.design is not None:
        found = _design_runs(study, study.design, data, source, blocks or study.design.blocks)
    else:
        found = _grid_runs(study, data, source)
    shared: dict[tuple[str, str], list[_Row]] = {}
    there: dict[Configuration, tuple[RunConfig, SampleConfig]] = {}
    for config, of, sample, first in found:
        if there.setdefault(of, (config, sample)) != (config, sample):
            raise AssayError(f"two of them are called {of.title!r}", key="extra", cure="give one another table")
        key = config.model_dump_json(), "" if first is None else first.model_dump_json()
        shared.setdefault(key, []).append((config, of, sample, first))
    about = study.evaluate, source.fingerprint, held_out_fingerprint
    continued = {first for _, first in shared}
    runs = []
    for (name, _), same in shared.items():
        ways = tuple(dict.fromkeys((of, sample) for _, of, sample, _ in same))
        first = same[0][3]
        goes_on = None if first is None else Run(first, (), *about, is_continued=True)
        runs.append(Run(same[0][0], ways, *about, goes_on, name in continued))
    return runs


# A configuration: what is trained, its words, how it is sampled, and the training that it continues, if any.
_Row = tuple[RunConfig, Configuration, SampleConfig, RunConfig | None]


@dataclass(frozen=True)
class Mix:
    """Numbers of images: clean ones, and noisy ones with simulated noise `sigma`, or real noise in `levels`."""

    num_clean: int
    num_noisy: int = 0
    sigma: float | None = None
    levels: Levels | None = None

    @property
    def keys(self) -> dict[str, Any]:
        """The same as settings of a run's data."""
        noise = {"sigma": self.sigma, "levels": self.levels}
        return {"clean": self.num_clean, "noisy": self.num_noisy} | {k: v for k, v in noise.items() if v}


def design_mixes(design: Design, source: ImageSource) -> list[Mix]:
    """What a design trains on: the ladder of clean sizes, then a mix for each level of noise."""
    num_clean = int((source.sigma_tn == 0).sum())
    real = [] if design.noisy else level_bins(source.sigma_tn)
    if not design.noisy and not real:
        raise AssayError(
            f"all images of {source.name} are clean",
            key="design.noisy",
            cure="give the noise levels to simulate",
        )
    if design.noisy and num_clean < len(source):
        raise AssayError(
            f"simulates noise, but {len(source) - num_clean} images of {source.name} are noisy already",
            key="design.noisy", cure="leave it out to study these, or set data.noisy = 0 to leave them out",
        )  # fmt: skip
    sizes = sorted({round(design.have_clean * rung) for rung in design.ladder})
    ladder = [size for size in sizes if size <= num_clean]
    if len(ladder) < 3:
        raise AssayError(
            f"{source.name} has {num_clean} clean images to train on, too few for three sizes from "
            f"{design.have_clean} up", key="design.have_clean",
            cure="lower it: in trials worth by level hardly depended on the share of clean images",
        )  # fmt: skip
    mixes = [Mix(size) for size in ladder]
    for clean in (round(design.have_clean * rung) for rung in design.mixes):
        num_noisy = design.num_noisy or max(ladder[-1] - clean, 0)
        if design.noisy and not 0 < num_noisy <= num_clean - clean:
            what = f"{clean} clean images of {num_clean} leave {num_clean - clean} to get noise"
            raise AssayError(what, key="design.num_noisy", cure="lower it, or lower design.mixes")
        mixes += [Mix(clean, num_noisy, sigma) for sigma in design.noisy]
        for low, high in real:
            inside = (source.sigma_tn >= torch.tensor(low)) & (source.sigma_tn <= torch.tensor(high))
            mixes.append(Mix(clean, min(num_noisy, int(inside.sum())), levels=(low, high)))
    return mixes


def _design_runs(
    study: Study, design: Design, data: DataConfig, source: ImageSource, blocks: int
) -> Iterator[_Row]:
    train = {"pairing": "level_first"} | study.train.model_dump(mode="json", exclude_unset=True)
    for block in range(blocks):
        for mix in design_mixes(design, source):
            images = data.model_dump(mode="json") | mix.keys | {"block": block}
            config = read_config({"data": images, "net": study.net, "train": train | {"seed": block}}, "train")
            level = mix.sigma or _middle(source.sigma_tn, mix.levels)
            noisy = ((level, mix.num_noisy),) if mix.num_noisy else ()
            of = Configuration(dataset=study.name, num_clean=mix.num_clean, noisy=noisy, seed=block)
            yield config, of, study.evaluate.sample, None


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


def _middle(sigma_tn: Tensor, levels: Levels | None) -> float:
    """The level that stands for a bin: the geometric mean of its images."""
    if levels is None or levels[0] == levels[1]:
        return levels[0] if levels else math.nan
    inside = (sigma_tn >= torch.tensor(levels[0])) & (sigma_tn <= torch.tensor(levels[1]))
    return float(f"{sigma_tn[inside].double().log().mean().exp().item():.3g}")


def _grid_runs(study: Study, data: DataConfig, source: ImageSource) -> Iterator[_Row]:
    """The rows of the paper's tables, in their order, then the extras."""
    grid = study.grid
    assert grid is not None
    if num_noisy := int((source.sigma_tn > 0).sum()):
        raise AssayError(
            f"simulates noise, but {num_noisy} of the {len(source)} images of {source.name} are noisy already",
            key="grid.sigmas", cure="write a [design] for these, or set data.noisy = 0 to leave them out",
        )  # fmt: skip
    for seed in grid.seeds:
        for p in grid.clean_fractions:
            if p == 1 or (p > 0 and "clean_only" in grid.baselines):
                yield _grid_run(study, data, source, seed, Extra(table="clean_mix", clean_fraction=p))
            for sigma in grid.sigmas if p < 1 else ():
                yield _grid_run(
                    study, data, source, seed, Extra(table="clean_mix", clean_fraction=p, sigma=sigma)
                )
                if p == 0:
                    only: dict[str, Any] = {"table": "only_noisy", "clean_fraction": 0.0, "sigma": sigma}
                    ways: list[dict[str, Any]] = [{}]
                    ways += [{"sampling": "truncated"}] * ("truncated" in grid.baselines)
                    ways += [{"consistency": True}] * ("consistency" in grid.baselines)
                    yield from (_grid_run(study, data, source, seed, Extra(**only, **way)) for way in ways)
    for extra in study.extra:
        yield from (_grid_run(study, data, source, seed, extra) for seed in extra.seeds or grid.seeds)


def _grid_run(study: Study, data: DataConfig, source: ImageSource, seed: int, row: Extra) -> _Row:
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
        first = _grid_run(study, data, source, seed, same_images)[0]
    try:
        return config, of, SampleConfig(**sample), first
    except ValidationError as error:
        raise AssayError(f"{of.title} cannot be sampled ({reason(error)})", key="evaluate.sample") from None


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
