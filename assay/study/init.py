"""A first study file, fitted to a store and to the time that you have.

The noise of the store decides the grid: with noisy images, a ladder of its clean images with and without them;
with clean images alone, simulated noise; with noisy images alone, a ladder of them, scored on held-out noisy
ones at the levels above their noise. The richest grid is taken whose trainings get enough steps in the
time. Steps are timed on this machine. The text is opened as a study before it is returned.
"""

import json
import math
import os
import re
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from assay.data import ImageSource
from assay.data.show import levels_text
from assay.data.view import check_complete
from assay.metrics.evaluate import MIN_IMAGES
from assay.study.arms import level_bins
from assay.study.run import OpenStudy, can_score, open_study
from assay.study.timing import NUM_TIMED_STEPS, sampling_work, seconds_per_image
from assay.train.config import MIN_HELD_OUT, DataConfig
from assay.train.presets import PRESETS

_PRESETS = {12: "digits", 20: "tiny", math.inf: "small"}  # by the longer side in pixels, at most
_MORE = ("optimizer", "clip_grad")  # of a preset, where it sets them
_MIN_STEPS = 100
_MIN_PART = 32  # images; smaller parts of the data are left out
_ENOUGH = 0.25  # share of the images that the preset trains on; with less, a smaller grid is used
_SAMPLING_SHARE = 1 / 3  # of the time, at most
_NUM_SAMPLED = (1000, 500, 200, 100, 50)


@dataclass(frozen=True)
class _Grid:
    """What is trained."""

    fractions: tuple[float, ...]
    baselines: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)
    by_level: bool = True  # noisy images also in bins of levels, or simulated at three levels


_BASELINES = ("clean_only", "truncated", "consistency")
_GRIDS = (
    _Grid((1, 0.5, 0.25, 0.1, 0), _BASELINES, (0, 1, 2)),
    _Grid((1, 0.5, 0.25, 0.1, 0), _BASELINES),
    _Grid((1, 0.5, 0.25, 0.1, 0), ("clean_only",), by_level=False),
    _Grid((1, 0.5, 0.2), ("clean_only",), by_level=False),
)
_NOISY_GRIDS = (  # of stores without clean images; fractions are of the noisy ones
    _Grid((1, 0.5, 0.25, 0.1), ("truncated", "consistency"), (0, 1, 2)),
    _Grid((1, 0.5, 0.25), ("truncated", "consistency")),
    _Grid((1, 0.5, 0.25), ("truncated",), by_level=False),
)


@dataclass(frozen=True)
class _Draft:
    """Everything that the file says."""

    store: str
    name: str
    about: str
    grid: _Grid
    fractions: tuple[float, ...]  # of the clean images, or without any of the noisy ones
    levels: tuple[float, float] | None  # of the noisy images; None: all are clean
    extractor: Literal["classifier", "pixels", "none"]  # none: there are no clean images to compare with
    preset: str
    batch_size: int = 1
    num_steps: int = _MIN_STEPS
    num_sampled: int = _NUM_SAMPLED[-1]
    timing: str = "not timed yet"

    def text(self) -> str:
        """The file."""
        train = PRESETS[self.preset].train
        num_images = self.num_steps * self.batch_size
        net = PRESETS[self.preset].net["preset"]
        more = "".join(f"{key} = {json.dumps(train[key])}\n" for key in _MORE if key in train)
        num_ranges, how_often = (1, "to look at") if self.extractor == "none" else (3, "three times")
        return f"""\
# {self.about}
# Written by `assay study init`; change what you like. `assay study cost` says how long it will take, and
# `assay study run` runs it and writes results.csv, report.html and prices.
#
# {self.timing}
name = {_quoted(self.name)}              # results go to out/{self.name}

[data]
store = {_quoted(self.store)}
# A tenth of the {"noisy" if self.extractor == "none" else "clean"} images, at least 40, is held out and never \
trained on;
# held_out = 0.2 or 500 changes that.

[net]
preset = {_quoted(net)}           # for images of this size; `assay net list` shows others

[train]
num_steps = {self.num_steps}
batch_size = {self.batch_size}
lr = {train["lr"]}
lr_ramp_images = {min(10_000, num_images // 10)}
lr_decay = "cosine"
ema_half_life_images = {train["ema_half_life_images"]}
{more}state_every = {min(1000, self.num_steps // 4)}        # steps; an interrupted run resumes from there

[evaluate]
{_EXTRACTORS[self.extractor]}
num_images = {self.num_sampled}          # sampled from each model, {how_often}
num_ranges = {num_ranges}

[grid]
{self._grid_text()}
seeds = {list(self.grid.seeds)}              # of training; with three, results have an uncertainty between runs
"""

    def _grid_text(self) -> str:
        fractions, baselines = list(self.fractions), _listed(self.grid.baselines)
        if self.levels is None:
            sigmas = [0.1, 0.2, 0.4] if self.grid.by_level else [0.2]
            return f"""\
# All images are clean, so noise is simulated: for each fraction, that share stays clean and the others get
# noise. Choose levels like those of the images you could get; black is -1 and white is 1, so 0.2 is a tenth
# of the range.
clean_fractions = {fractions}
sigmas = {sigmas}
# clean_only: the clean share alone. truncated, consistency: two ways to use noisy images alone (fraction 0).
baselines = {baselines}"""
        low, high = self.levels
        bins = (
            "# Noisy images together, and in bins of levels, which levels = [[low, high], ...] would set."
            if self.grid.by_level
            else "# All noisy images together; without this line also in bins of levels, which takes longer.\n"
            f"levels = [[{low}, {high}]]"
        )
        if self.extractor == "none":
            return f"""\
clean_fractions = [0]
noisy_fractions = {fractions}   # shares of the noisy images: what more of them would give
{bins}
# truncated, consistency: two ways to sample and train with noisy images alone.
baselines = {baselines}"""
        return f"""\
# Shares of the clean images, each with and without the noisy ones; 0 is the noisy ones alone.
clean_fractions = {fractions}
noisy_fractions = [1.0]        # shares of the noisy images; [1.0, 0.5] shows what half of them would give
{bins}
# clean_only: the clean images of each share alone. truncated, consistency: two ways to use noisy images alone.
baselines = {baselines}"""


_EXTRACTORS = {
    "classifier": 'extractor = "classifier"   # trained on the clean images and their labels',
    "pixels": "# The clean images have no labels to train a classifier on. For photographs choose\n"
    "# mobilenet_v2, whose weights are downloaded.\n"
    'extractor = "pixels"',
    "none": "# There are no clean images to compare samples with. Models are scored on held-out noisy images,\n"
    "# at levels above their noise; the score says nothing about finer detail.",
}


def draft_study(store: Path, minutes: float = 30.0, cores: int | None = None) -> str:
    """The text of a study of `store` that takes about `minutes` on `cores` (default: all) cores here."""
    if not minutes > 0:
        raise ValueError(f"minutes = {minutes:g}: give the time that the study may take, > 0")
    cores = cores or os.cpu_count() or 1
    with tempfile.TemporaryDirectory(prefix="assay-init-") as temporary:
        folder = Path(temporary)
        data = DataConfig(store=store).resolved(folder / "data", hold_out=True)
        draft, per_image = _first_draft(store, data.open(), data.open_held_out()), 0.0
        for grid in _NOISY_GRIDS if draft.extractor == "none" else _GRIDS:
            draft, opened = _on_grid(draft, grid, folder)
            if not per_image:
                config = opened.jobs[0].config
                per_image = seconds_per_image(
                    opened.source, draft.batch_size, config.net_config(opened.source), config.train
                )
            draft, enough = _in_time(draft, opened, 60 * minutes * cores / per_image)
            if enough:
                break
        jobs = _open(draft, folder).jobs
    work, num_trained = sum(job.work + sampling_work(job) for job in jobs), draft.num_steps * draft.batch_size
    timing = (
        f"Time: one core of this machine trains on an image in {1000 * per_image:.3g} ms (the fastest of "
        f"{NUM_TIMED_STEPS} steps of\n# {draft.batch_size} images). {len(jobs)} trainings on {num_trained:,} "
        f"images each, and their samples, take about\n# {work * per_image / 60 / cores:.2g} minutes on {cores} "
        "core(s)."
    )
    if not enough:
        usual = PRESETS[draft.preset].train["num_steps"] * PRESETS[draft.preset].train["batch_size"]
        timing += (
            f" That is short: a model of such images usually sees {usual:,} of them.\n"
            "# Give it more --minutes before you trust a price."
        )
    return replace(draft, timing=timing).text()


def _first_draft(store: Path, source: ImageSource, held_out: ImageSource | None) -> _Draft:
    """What follows from the images alone."""
    check_complete(
        source,
        "need train.loops, whose models have no price: leave them out, or write a study with train.loops",
    )
    clean = source.sigma_tn == 0
    num_clean, num_noisy = int(clean.sum()), int((~clean).sum())
    if 0 < num_clean < MIN_IMAGES or (not num_clean and not can_score(held_out)):
        raise ValueError(
            f"{source.name} has {num_clean} clean and {num_noisy} noisy images, and a study needs at least "
            f"{MIN_IMAGES} clean images to compare samples with, or {10 * MIN_HELD_OUT} noisy ones and no "
            "clean one: pack more images"
        )
    labelled = source.label[clean & (source.label >= 0)]
    has_labels = len(labelled) >= MIN_IMAGES and len(labelled.unique()) > 1
    bins = level_bins(source.sigma_tn)
    shape = " x ".join(map(str, source.image_shape))
    counted = f"{num_clean:,}" if num_clean else "no"
    about = f"A study of {source.name}: {counted} clean images of {shape} (C x H x W) to train on"
    if num_noisy:
        about += f",\n# and {num_noisy:,} noisy ones, with noise of {levels_text(bins[0][0], bins[-1][1])}"
    return _Draft(
        store=str(store),
        name=re.sub(r"[^\w.-]+", "-", store.resolve().name).strip(".-") or "study",
        about=about + ".",
        grid=_GRIDS[0],
        fractions=_GRIDS[0].fractions,
        levels=(bins[0][0], bins[-1][1]) if num_noisy else None,
        extractor="none" if not num_clean else "classifier" if has_labels else "pixels",
        preset=next(name for side, name in _PRESETS.items() if max(source.image_shape[1:]) <= side),
    )


def _on_grid(draft: _Draft, grid: _Grid, folder: Path) -> tuple[_Draft, OpenStudy]:
    """The draft on a grid: without fractions that keep too few images, and batches that every part can fill."""
    draft = replace(draft, grid=grid, fractions=(1,), batch_size=1)
    sigma_tn = _open(draft, folder).source.sigma_tn
    num_clean = int((sigma_tn == 0).sum())
    fractions = tuple(p for p in grid.fractions if p in (0, 1) or p * (num_clean or len(sigma_tn)) >= _MIN_PART)
    draft = replace(draft, fractions=fractions)
    opened = _open(draft, folder)
    if 0 in fractions and _smallest(opened) < min(_MIN_PART, num_clean):  # a level with few images
        draft = replace(draft, fractions=fractions[:-1])
        opened = _open(draft, folder)
    most = min(_smallest(opened), PRESETS[draft.preset].train["batch_size"])
    return replace(draft, batch_size=1 << (most.bit_length() - 1)), opened


def _smallest(opened: OpenStudy) -> int:
    """How many images the arm with the fewest is trained on."""
    return min(len(arm.config.data.open()) for arm in opened.arms)


def _in_time(draft: _Draft, opened: OpenStudy, affordable: float) -> tuple[_Draft, bool]:
    """Fill the time with steps and samples; False if every training gets too few steps.

    `affordable` is the work that the time allows, in images of training.
    """
    per_sample = sum(map(sampling_work, opened.jobs)) / opened.study.evaluate.num_images
    counts = _NUM_SAMPLED[-1:] if draft.extractor == "none" else _NUM_SAMPLED  # few, if only to look at
    num_sampled = next((n for n in counts if n * per_sample <= _SAMPLING_SHARE * affordable), counts[-1])
    per_step = draft.batch_size * sum(job.work for job in opened.jobs) / opened.study.train.num_steps
    train = PRESETS[draft.preset].train
    most = train["num_steps"] * train["batch_size"] // draft.batch_size
    num_steps = int(min(max((affordable - num_sampled * per_sample) / per_step, _MIN_STEPS), most))
    return replace(draft, num_steps=num_steps, num_sampled=num_sampled), num_steps >= _ENOUGH * most


def _open(draft: _Draft, folder: Path) -> OpenStudy:
    spec = folder / "draft.toml"
    spec.write_text(draft.text())
    return open_study(spec, folder)


def _quoted(text: str) -> str:
    """A TOML string."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _listed(words: tuple[str, ...]) -> str:
    return "[" + ", ".join(map(_quoted, words)) + "]"
