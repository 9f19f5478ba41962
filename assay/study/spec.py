"""A study is one TOML file: data, network, training, evaluation, and a grid of what to train on.

    name = "digits"
    [data]      store = "digits"                       a known data set, or the path of a store
    [net]       preset = "mlp"
    [train]     num_steps = 4000                       any setting of `assay train`
    [evaluate]  extractor = "classifier"
    [grid]      clean_fractions = [1, 0.1, 0]          x sigmas = [0.5]
                baselines = ["clean_only", "truncated", "consistency"]
                seeds = [0, 1, 2]
    [[extra]]   table = "extreme"                      one more setting, with overrides of its own
                clean_fraction = 0.01
                sigma = 0.2

Each setting becomes an `Arm`, which gives one outcome. Arms that differ only in how they are sampled share
one training, a `Job`.
"""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, ValidationError

from assay.data import ImageSource, open_store
from assay.data.known import KnownName, get
from assay.metrics import ExtractorName
from assay.outcome import Sampling, Setting
from assay.sample import SampleConfig
from assay.train.config import (
    ConsistencyConfig,
    RunConfig,
    Strict,
    TrainConfig,
    explain,
    read_config,
    read_toml,
)
from assay.train.run import check_run

Baseline = Literal["clean_only", "truncated", "consistency"]
_KNOWN = get_args(KnownName)


class StudyData(Strict):
    """Clean images: a known data set by name, or the path of a store.

    Of a known data set a part may be taken: scaled to `size` x `size`, some `classes`, the first `num_images`.
    """

    store: str
    size: int | None = Field(None, ge=1)
    classes: tuple[str, ...] = ()
    num_images: int | None = Field(None, ge=1)
    seed: int = 0  # which images are clean, and their noise


class EvaluateConfig(Strict):
    """The paper's protocol: `num_ranges` disjoint ranges of `num_images` seeds each, mean and deviation."""

    extractor: ExtractorName = "classifier"
    num_images: int = Field(1000, ge=20)
    num_ranges: int = Field(3, ge=1)
    sample: SampleConfig = SampleConfig()
    batch_size: int = Field(256, ge=1)


class Grid(Strict):
    """Clean fractions x sigmas, and the baselines beside them.

    `clean_only`: the clean images of each fraction alone. `truncated` and `consistency`: noisy images
    alone (fraction 0), sampled down to sigma_tn only, or trained with the consistency loss.
    """

    clean_fractions: tuple[float, ...] = Field(min_length=1)
    sigmas: tuple[float, ...] = ()
    baselines: tuple[Baseline, ...] = ("clean_only", "truncated", "consistency")
    seeds: tuple[int, ...] = Field((0,), min_length=1)


class Extra(Strict):
    """One more setting: other fractions or noise, or the same with other training or sampling."""

    table: str = "extreme"
    clean_fraction: float = Field(ge=0, le=1)
    sigma: float | None = Field(None, gt=0)
    noisy: bool = True  # False: the clean images alone
    consistency: bool = False
    sampling: Sampling = "full"
    num_extra: int = Field(0, ge=0)  # steps below sigma_tn, with sampling = "refined"
    train: TrainConfig = TrainConfig()  # what is set here wins over the study's
    seeds: tuple[int, ...] | None = Field(None, min_length=1)


class Study(Strict):
    """The whole file."""

    name: str = Field(pattern=r"^[\w.-]+$")
    data: StudyData
    net: dict[str, Any]
    train: TrainConfig = TrainConfig()
    consistency: ConsistencyConfig = ConsistencyConfig(coefficient=1.0, start=0.5)
    evaluate: EvaluateConfig = EvaluateConfig()
    grid: Grid
    extra: tuple[Extra, ...] = ()


@dataclass(frozen=True)
class Arm:
    """One model and one way of sampling it. The setting is in parts of the data set, as the study has it."""

    setting: Setting
    config: RunConfig
    sample: SampleConfig


def read_study(path: Path) -> Study:
    """Read and check a study file; every fault is named with its line and, if near one, the valid name."""
    tree, text = read_toml(path), path.read_text()
    try:
        study = Study.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        faults = [_where(text, fault["loc"]) + explain(dict(fault), Study) for fault in error.errors()]
        raise ValueError(f"{path}: " + "; ".join(dict.fromkeys(faults))) from None
    with named(path):
        _check(study)
        _check_settings_differ(study_arms(study, Path("unused")))
    return study


def _check(study: Study) -> None:
    grid = study.grid
    for value in grid.clean_fractions:
        if not 0 <= value <= 1:
            raise ValueError(f"grid.clean_fractions has {value:g}; a fraction lies between 0 and 1")
    for value in grid.sigmas:
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"grid.sigmas has {value:g}; a noise level is > 0")
    for key in ("clean_fractions", "sigmas", "seeds"):
        if len(set(getattr(grid, key))) < len(getattr(grid, key)):
            raise ValueError(f"grid.{key} names a value twice")
    only_noisy = any(p == 0 or "clean_only" not in grid.baselines for p in grid.clean_fractions if p < 1)
    if not grid.sigmas and only_noisy:
        raise ValueError("grid.sigmas is empty: give the noise levels of the images that are not clean")
    if "seed" in study.train.model_fields_set:
        raise ValueError("train.seed is decided by grid.seeds: leave it out")
    for number, extra in enumerate(study.extra):
        noisy = extra.noisy and extra.clean_fraction < 1
        if noisy and extra.sigma is None:
            raise ValueError(f"extra.{number}.sigma is missing: give the noise level of its noisy images")
        if not noisy and (extra.consistency or extra.sampling != "full"):
            raise ValueError(f"extra.{number}: consistency and truncation are for noisy images")
        if "seed" in extra.train.model_fields_set:
            raise ValueError(f"extra.{number}.train: its seed is decided by extra.{number}.seeds: leave it out")
    if study.data.store not in _KNOWN and not Path(study.data.store).exists():
        raise ValueError(
            f"data.store = {study.data.store!r} is neither a store here nor one of {', '.join(_KNOWN)}"
        )
    if study.data.store not in _KNOWN and study.data.model_fields_set & {"size", "classes", "num_images"}:
        raise ValueError(
            f"data.store = {study.data.store!r} is a store of yours; size, classes and num_images take parts "
            f"of {', '.join(_KNOWN)} alone: pack the images you want"
        )


def _check_settings_differ(arms: list[Arm]) -> None:
    """Reject arms that the results could not tell apart."""
    there: dict[Setting, Arm] = {}
    for arm in arms:
        if there.setdefault(arm.setting, arm) != arm:
            raise ValueError(f"two settings are called {arm.setting.title!r}: give the extra another table")


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Add the file, and the line of the first `section.key` that a ValueError names, to its message."""
    try:
        yield
    except ValueError as error:
        key = re.search(r"\b[a-z_]+(\.\w+)+", str(error))
        parts = key[0].split(".") if key else ()
        where = _where(path.read_text(), tuple(int(part) if part.isdigit() else part for part in parts))
        raise ValueError(f"{path}: {where}{error}") from None


def _where(text: str, loc: tuple[Any, ...]) -> str:
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


def study_arms(study: Study, store: Path) -> list[Arm]:
    """Every arm, in the order of the paper's tables."""
    arms: list[Arm] = []
    for seed in study.grid.seeds:
        for fraction in study.grid.clean_fractions:
            if fraction == 1 or (fraction > 0 and "clean_only" in study.grid.baselines):
                arms.append(
                    _arm(study, store, seed, Extra(table="clean_mix", clean_fraction=fraction, noisy=False))
                )
            if fraction == 1:
                continue
            for sigma in study.grid.sigmas:
                setting = Extra(table="clean_mix", clean_fraction=fraction, sigma=sigma)
                arms.append(_arm(study, store, seed, setting))
                if fraction == 0:
                    only: dict[str, Any] = {"table": "only_noisy", "clean_fraction": 0.0, "sigma": sigma}
                    arms.append(_arm(study, store, seed, Extra(**only)))
                    if "truncated" in study.grid.baselines:
                        arms.append(_arm(study, store, seed, Extra(**only, sampling="truncated")))
                    if "consistency" in study.grid.baselines:
                        arms.append(_arm(study, store, seed, Extra(**only, consistency=True)))
    for extra in study.extra:
        for seed in extra.seeds or study.grid.seeds:
            arms.append(_arm(study, store, seed, extra))
    return arms


def _arm(study: Study, store: Path, seed: int, setting: Extra) -> Arm:
    noisy = setting.noisy and setting.clean_fraction < 1
    sigma = setting.sigma if noisy else None
    general, own = (part.model_dump(mode="json", exclude_unset=True) for part in (study.train, setting.train))
    train = {**general, **own, "seed": seed}
    if setting.consistency:
        train["consistency"] = {**study.consistency.model_dump(mode="json"), **own.get("consistency", {})}
    data = {"store": str(store), "clean_fraction": setting.clean_fraction, "seed": study.data.seed}
    data |= {"sigma": sigma} if noisy else {"keep_noisy": False}
    sample = study.evaluate.sample.model_dump()
    match setting.sampling:
        case "truncated":
            sample["truncate_at"] = sigma
        case "refined":
            sample |= {"refine_at": sigma, "num_extra": setting.num_extra}
    fraction = setting.clean_fraction
    return Arm(
        Setting(
            dataset=study.name,
            table=setting.table,
            num_clean=fraction,
            noisy=((sigma, round(1 - fraction, 9)),) if sigma is not None else (),
            counted=False,
            consistency=setting.consistency,
            sampling=setting.sampling,
            seed=seed,
        ),
        read_config({"data": data, "net": study.net, "train": train}, "train"),
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

    @cached_property
    def key(self) -> str:
        """Where the job's results lie; depends on the images, not on where their store does."""
        tree = self.config.model_dump(mode="json", exclude={"sample"})
        tree["data"]["store"] = self.data_fingerprint
        return hash_tree(tree)

    @property
    def work(self) -> float:
        """Images of training it amounts to, those that consistency costs on top included."""
        train = self.config.train
        return train.num_steps * train.batch_size * (1.4 if train.consistency.coefficient else 1.0)

    def result_key(self, sample: SampleConfig) -> str:
        """Hash of one result: the training, the sampling and the protocol."""
        evaluate = self.evaluate.model_dump(mode="json", exclude={"batch_size", "sample"})
        return hash_tree([self.key, sample.model_dump(mode="json"), evaluate])


def hash_tree(tree: Any) -> str:
    """A short name for a tree of plain values."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]


def study_jobs(study: Study, arms: list[Arm], data_fingerprint: str) -> list[Job]:
    """The trainings behind the arms; arms with the same training share one."""
    grouped: dict[str, list[Arm]] = {}
    for arm in arms:
        grouped.setdefault(arm.config.model_dump_json(), []).append(arm)
    jobs = []
    for same in grouped.values():
        samples = tuple(dict.fromkeys(arm.sample for arm in same))
        jobs.append(Job(same[0].config, data_fingerprint, samples, study.evaluate, same[0].setting.title))
    return jobs


def prepare_store(study: Study, folder: Path) -> tuple[Path, ImageSource]:
    """The study's clean images: a known data set is packed into `folder` once."""
    data = study.data
    if data.store not in _KNOWN:
        path = Path(data.store)
    else:
        size = [] if data.size is None else [f"{data.size}x{data.size}"]
        number = [] if data.num_images is None else [str(data.num_images)]
        path = folder / "-".join([data.store, *data.classes, *size, *number])
        if not path.exists():
            try:
                get(data.store, path, size=data.size, classes=data.classes, num_images=data.num_images)  # type: ignore[arg-type]
            except ValueError as error:
                raise ValueError(f"data.store: {error}") from None
    return path, open_store(path)


def check_against_data(arms: list[Arm], source: ImageSource) -> None:
    """Reject, before any work, settings that this data cannot give."""
    num_there = int((source.sigma_tn == 0).sum())
    if num_there < len(source):
        raise ValueError(
            f"data.store: {num_there} of the {len(source)} images of {source.name} are clean; a study needs "
            "all of them clean, to add the noise itself: pack those alone"
        )
    for arm in arms:
        setting, batch_size = arm.setting, arm.config.train.batch_size
        num_clean = round(setting.num_clean * len(source))
        if setting.num_clean > 0 and num_clean == 0:
            raise ValueError(
                f"{setting.title}: {setting.num_clean:g} of {len(source)} images is none; use a larger fraction"
                + (" in grid.clean_fractions" if setting.table in ("clean_mix", "only_noisy") else "")
            )
        num_images = len(source) if setting.noisy else num_clean
        if batch_size > num_images:
            raise ValueError(
                f"{setting.title}: its {num_images} images are fewer than train.batch_size = {batch_size}; "
                "lower it, or use a larger fraction"
            )
        images = arm.config.data.open()
        check_run(arm.config, images)
        try:
            arm.sample.for_levels(images.sigma_tn.unique().tolist()).sigmas()
        except ValueError as error:
            raise ValueError(f"{setting.title} cannot be sampled: {error}") from None
