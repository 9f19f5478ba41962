"""From a study to its arms and jobs, given its images.

An `Arm` is one setting: a number of clean images, a number of noisy ones per level, a variant of training and
a way of sampling. With `grid.sigmas` the noisy images are simulated on clean ones. Without, they are the noisy
images of the store, together and in bins of levels. Arms that differ only in how they are sampled share one
training, a `Job`.
"""

import hashlib
import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from assay.data import ImageSource
from assay.data.view import count_of
from assay.outcome import Setting
from assay.sample import SampleConfig
from assay.study.spec import EvaluateConfig, Extra, Study
from assay.train.config import NOT_DECISIVE, DataConfig, RunConfig, read_config
from assay.train.run import check_run

Levels = tuple[float, float]


@dataclass(frozen=True)
class Arm:
    """One model and one way of sampling it.

    With simulated noise the setting is in parts of the data set, as the study has it; else in images.
    """

    setting: Setting
    config: RunConfig
    sample: SampleConfig


def study_arms(study: Study, data: DataConfig, source: ImageSource) -> list[Arm]:
    """Every arm, in the order of the paper's tables. `source` holds the images of `data`."""
    grid, arms = study.grid, list[Arm]()
    noisy = None if bool((source.sigma_tn == 0).all()) else NoisyImages(source, grid.levels)
    _check_kind_of_noise(study, source, noisy is not None)
    kinds: list[dict[str, Any]] = [{"sigma": sigma} for sigma in grid.sigmas]
    if noisy is not None:
        kinds = [{"levels": b, "noisy_fraction": q} for b in noisy.compared for q in grid.noisy_fractions]

    def add(seed: int, **setting: Any) -> None:
        arms.append(_arm(study, data, seed, Extra(**setting), noisy))

    for seed in grid.seeds:
        for fraction in grid.clean_fractions:
            if fraction == 1 or (fraction > 0 and "clean_only" in grid.baselines):
                add(seed, table="clean_mix", clean_fraction=fraction, noisy=False)
            if fraction == 1 and noisy is None:  # no image is left to get noise
                continue
            for kind in kinds:
                add(seed, table="clean_mix", clean_fraction=fraction, **kind)
                if fraction == 0:
                    only = {"table": "only_noisy", "clean_fraction": 0.0, **kind}
                    add(seed, **only)
                    if "truncated" in grid.baselines:
                        add(seed, **only, sampling="truncated")
                    if "consistency" in grid.baselines:
                        add(seed, **only, consistency=True)
    for extra in study.extra:
        for seed in extra.seeds or grid.seeds:
            arms.append(_arm(study, data, seed, extra, noisy))
    there: dict[Setting, Arm] = {}
    for arm in arms:
        if there.setdefault(arm.setting, arm) != arm:
            raise ValueError(f"two settings are called {arm.setting.title!r}: give the extra another table")
    return arms


def _check_kind_of_noise(study: Study, source: ImageSource, real: bool) -> None:
    """Reject words for simulated noise where it is real, and the other way round."""
    grid = study.grid
    if real and grid.sigmas:
        num_noisy = int((source.sigma_tn > 0).sum())
        raise ValueError(
            f"grid.sigmas simulates noise, but {num_noisy} of the {len(source)} images of {source.name} are "
            "noisy already: leave grid.sigmas out to study these, or set data.noisy = 0 to leave them out"
        )
    if not real and (grid.levels or "noisy_fractions" in grid.model_fields_set):
        raise ValueError(
            f"grid.levels and grid.noisy_fractions are for real noise, but all images of {source.name} are "
            "clean: simulate noise with grid.sigmas"
        )
    needs_noise = any(p == 0 or "clean_only" not in grid.baselines for p in grid.clean_fractions if p < 1)
    if not real and not grid.sigmas and needs_noise:
        raise ValueError("grid.sigmas is empty: give the noise levels of the images that are not clean")
    for number, extra in enumerate(study.extra):
        is_noisy = extra.noisy and (real or extra.clean_fraction < 1)
        if is_noisy and not real and extra.sigma is None:
            raise ValueError(f"extra.{number}.sigma is missing: give the noise level of its noisy images")
        if extra.sigma is not None and real:
            raise ValueError(f"extra.{number}.sigma simulates noise, but the images are noisy: use levels")
        if not is_noisy and (extra.consistency or extra.sampling != "full"):
            raise ValueError(f"extra.{number}: consistency and truncation are for noisy images")


class NoisyImages:
    """The noisy images of a source in bins of levels, `bins`; in settings a bin has its geometric mean level.

    `compared` are the bins whose images are compared; None stands for all of them together.
    """

    def __init__(self, source: ImageSource, levels: tuple[Levels, ...] = ()) -> None:
        self.sigma_tn = source.sigma_tn
        self.num_clean = int((source.sigma_tn == 0).sum())
        self.bins = levels or level_bins(source.sigma_tn)
        self.compared: tuple[Levels | None, ...] = self.bins
        if not levels:
            self.compared = (None, *self.bins) if len(self.bins) > 1 else (None,)
        for each in levels:
            if not self.inside(each).any():
                raise ValueError(f"grid.levels has {list(each)}, but no image of {source.name} has such noise")

    def inside(self, levels: Levels | None, sigma_tn: Tensor | None = None) -> Tensor:
        """Which images (N,) are noisy, with a level in the bin."""
        sigma_tn = self.sigma_tn if sigma_tn is None else sigma_tn
        low, high = torch.tensor(levels or (0.0, math.inf))
        return (sigma_tn > 0) & (sigma_tn >= low) & (sigma_tn <= high)

    def counts(self, levels: Levels | None, sigma_tn: Tensor) -> tuple[tuple[float, float], ...]:
        """(level, number) in each bin of images with levels `sigma_tn`."""
        found = []
        for low, high in self.bins if levels is None else (levels,):
            middle = self.sigma_tn[self.inside((low, high))].double().log().mean().exp().item()
            number = int(self.inside((low, high), sigma_tn).sum())
            found.append((low if low == high else float(f"{middle:.3g}"), float(number)))
        return tuple(found)


def level_bins(sigma_tn: Tensor, max_bins: int = 3) -> tuple[Levels, ...]:
    """Bins (low, high) of the noise levels: one per level, or `max_bins` with about as many images each."""
    levels, numbers = sigma_tn[sigma_tn > 0].unique(return_counts=True)
    bin_of = torch.arange(len(levels))
    if len(levels) > max_bins:
        bin_of = (numbers.cumsum(0) - numbers) * max_bins // numbers.sum()
    inside = [levels[bin_of == each] for each in bin_of.unique()]
    return tuple((_plain(each[0]), _plain(each[-1])) for each in inside)


def _plain(level: Tensor) -> float:
    """A float32 as the shortest number that gives it: 0.3 and not 0.30000001192."""
    return float(str(np.float32(level.item())))


def _arm(study: Study, data: DataConfig, seed: int, setting: Extra, noisy: NoisyImages | None) -> Arm:
    general, own = (part.model_dump(mode="json", exclude_unset=True) for part in (study.train, setting.train))
    train = {**general, **own, "seed": seed}
    if setting.consistency:
        train["consistency"] = {**study.consistency.model_dump(mode="json"), **own.get("consistency", {})}
    is_noisy = setting.noisy and (noisy is not None or setting.clean_fraction < 1)
    lowest: float | None = None  # level of noise
    images: dict[str, Any]
    counts: dict[str, Any]
    if noisy is None:
        p = setting.clean_fraction
        lowest = setting.sigma if is_noisy else None
        images = {"clean_fraction": p} | ({"sigma": lowest} if is_noisy else {"keep_noisy": False})
        counts = {"num_clean": p, "noisy": ((lowest, round(1 - p, 9)),) if is_noisy else (), "counted": False}
    else:
        num_clean, inside = count_of(setting.clean_fraction, noisy.num_clean), noisy.inside(setting.levels)
        num_noisy = count_of(setting.noisy_fraction, int(inside.sum())) if is_noisy else 0
        if (setting.clean_fraction > 0 and num_clean == 0) or (is_noisy and num_noisy == 0):
            few, key = (noisy.num_clean, "clean") if num_clean == 0 else (int(inside.sum()), "noisy")
            fraction = getattr(setting, f"{key}_fraction")
            raise ValueError(
                f"grid.{key}_fractions: {fraction:g} of {few} {key} images is none; use a larger one"
            )
        images = {"clean": num_clean, "noisy": num_noisy}
        counts = {"num_clean": num_clean, "noisy": ()}
        if is_noisy:
            lowest = _plain(noisy.sigma_tn[inside].min())
            images |= {"levels": setting.levels} if setting.levels else {}
            chosen = data.model_copy(update=images).open().sigma_tn
            counts["noisy"] = noisy.counts(setting.levels, chosen)
    sample = study.evaluate.sample.model_dump()
    match setting.sampling:
        case "truncated":
            sample["truncate_at"] = lowest
        case "refined":
            sample |= {"refine_at": lowest, "num_extra": setting.num_extra}
    tree = {"data": data.model_dump(mode="json") | images, "net": study.net, "train": train}
    same = {name: getattr(setting, name) for name in ("table", "consistency", "sampling")}
    config = read_config(tree, "train")
    return Arm(
        Setting(dataset=study.name, seed=seed, loops=config.train.loops, **same, **counts),
        config,
        SampleConfig(**sample),
    )


@dataclass(frozen=True)
class Job:
    """One training and the ways its model is sampled. Named by the hash of what decides its results."""

    config: RunConfig
    data_fingerprint: str
    samples: tuple[SampleConfig, ...]
    evaluate: EvaluateConfig
    title: str
    held_out_fingerprint: str = ""  # of the images it is scored on, if any

    @cached_property
    def key(self) -> str:
        """Where the job's results lie; depends on the images, not on where their store does."""
        tree = self.config.model_dump(mode="json", exclude=NOT_DECISIVE)
        tree["data"]["store"] = self.data_fingerprint
        if isinstance(self.config.data.held_out, Path):  # another store: it decides nothing about training
            del tree["data"]["held_out"]
        return hash_tree(tree)

    @property
    def work(self) -> float:
        """Images of training it amounts to, those that consistency costs on top included."""
        train = self.config.train
        return train.total_steps * train.batch_size * (1.4 if train.consistency.coefficient else 1.0)

    @property
    def num_sampled(self) -> int:
        """Images sampled in each way of sampling."""
        return self.evaluate.num_images * (self.evaluate.num_ranges + self.evaluate.along)

    def result_key(self, sample: SampleConfig) -> str:
        """Hash of one result: the training, the sampling and the protocol."""
        evaluate = self.evaluate.model_dump(mode="json", exclude={"batch_size", "sample"})
        for name in ("along", "result", "fd_only"):  # newer than results that were measured without them
            if evaluate[name] in (0, "final"):
                del evaluate[name]
        return hash_tree([self.key, sample.model_dump(mode="json"), evaluate, self.held_out_fingerprint])


def hash_tree(tree: Any) -> str:
    """A short name for a tree of plain values."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]


def study_jobs(study: Study, arms: list[Arm], data_fingerprint: str, held_out_fingerprint: str) -> list[Job]:
    """The trainings behind the arms; arms with the same training share one."""
    grouped: dict[str, list[Arm]] = {}
    for arm in arms:
        grouped.setdefault(arm.config.model_dump_json(), []).append(arm)
    jobs = []
    for same in grouped.values():
        samples = tuple(dict.fromkeys(arm.sample for arm in same))
        title = same[0].setting.title
        jobs.append(Job(same[0].config, data_fingerprint, samples, study.evaluate, title, held_out_fingerprint))
    return jobs


def check_against_data(arms: list[Arm], source: ImageSource) -> None:
    """Reject, before any work, settings that this data cannot give."""
    for arm in arms:
        setting, batch_size = arm.setting, arm.config.train.batch_size
        if not setting.counted and setting.num_clean > 0 and count_of(setting.num_clean, len(source)) == 0:
            raise ValueError(
                f"{setting.title}: {setting.num_clean:g} of {len(source)} images is none; use a larger fraction"
                + (" in grid.clean_fractions" if setting.table in ("clean_mix", "only_noisy") else "")
            )
        images = arm.config.data.open()
        if batch_size > len(images):
            raise ValueError(
                f"{setting.title}: its {len(images)} images are fewer than train.batch_size = {batch_size}; "
                "lower it, or use a larger fraction"
            )
        check_run(arm.config, images)
        try:
            arm.sample.for_levels(images.sigma_tn.unique().tolist()).sigmas()
        except ValueError as error:
            raise ValueError(f"{setting.title} cannot be sampled: {error}") from None
