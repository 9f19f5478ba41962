"""How large a study is: a first study file, fitted to your images and your time; and what any study costs.

The design is a ladder of clean sizes from the images in hand upwards, and one mix per noise level, in blocks.
In trials the worth of a noisy image at each level hardly depended on the share of clean ones; where there are
too few images for a ladder above those in hand, or too little time to train on them, the design moves to fewer.
Steps are timed on this machine.

Costs are counted in evaluations of the network (see `assay.cost`), of which some are timed here; or in
operations, so that a study for a large machine can be planned on a small one, without its data.
"""

import json
import os
import re
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from assay.cost import WITH_GRADIENT, seconds_per_evaluation, training_evaluations
from assay.data import ImageSource, View
from assay.data.arrays import from_arrays
from assay.data.config import DataConfig
from assay.data.picture import levels_text
from assay.devices import one_thread
from assay.errors import AssayError, check_enough, choose, warn
from assay.metrics.extract import MIN_IMAGES
from assay.metrics.held_out import num_evaluations, stopping_steps
from assay.nets import PRESETS as NETS
from assay.nets import NetConfig, measure_cost
from assay.noise import MOST_NOISE
from assay.registry import find, name_of, registered
from assay.study.spec import Study, level_bins, study_runs
from assay.study.stages import OpenStudy, can_measure, open_study
from assay.train.presets import PRESETS, suited_preset

_LADDER = (1.0, 1.7, 3.0, 5.0, 10.0)
_BLOCKS = 3
_FEWEST = 24  # clean images that a design begins with, where time is short
_MIN_EPOCHS = 100  # of the largest size: with fewer, training and not data limits the result
_MIN_STEPS = 100
_STATE_BYTES = 2 * 16  # per weight: two states of the weights, their average and two moments, in float32
_NUM_ASSUMED = 50_000  # images, where they are not here


def draft_study(
    store: Path,
    have_clean: int | None = None,
    noisy: Sequence[float] = (),
    minutes: float = 30.0,
    net: str | type[NetConfig] | None = None,
    name: str | None = None,
    num_workers: int | None = None,
) -> str:
    """The text of a study of `store` whose first blocks take about `minutes` here.

    It is called like the store's folder, unless it has a `name`. `have_clean` are the clean images in hand, by
    default a tenth of those in the store; `noisy` the levels of images that could be had, which are simulated
    where all images of the store are clean. `net` is a preset, or the kind of a network of your own. It is for
    `num_workers` that train at a time, by default one for each core.
    """
    if not minutes > 0:
        raise AssayError(f"{minutes:g} is no time", key="minutes", cure="give those that the study may take")
    workers, name = num_workers or os.cpu_count() or 1, name or Path(store).resolve().name
    with tempfile.TemporaryDirectory(prefix="assay-init-") as temporary:
        folder = Path(temporary)
        data = DataConfig(store=store).prepared(folder / "data", hold_out=True)
        if not can_measure(data.open_held_out()):
            cure = "give 200 clean images or more"
            raise AssayError("has too few clean images: a study holds 40 of them out", path=store, cure=cure)
        draft = _first_draft(store, name, data.open(), have_clean, tuple(noisy), net)
        opened = _opened(draft, folder)
        assert opened.held_out is not None
        with one_thread():  # as each worker has
            per_image = WITH_GRADIENT * seconds_per_evaluation(opened.runs[0].config, opened.source)
        measured = num_evaluations(len(opened.held_out)) / WITH_GRADIENT
        num_mixes = len(opened.runs) // _BLOCKS - len(draft["ladder"])
        num_clean = int((opened.source.sigma_tn == 0).sum())
        note = _fit(draft, num_clean, 60 * minutes * workers / per_image, measured, num_mixes)
        num_runs, num_images = len(_opened(draft, folder).runs), draft["num_steps"] * draft["batch_size"]
        taken = per_image * num_runs * (num_images + measured) / 60 / workers
    largest = draft["ladder"][-1] * draft["have_clean"]
    if (epochs := round(num_images / largest)) < _MIN_EPOCHS:
        needed = taken + per_image * num_runs * (_MIN_EPOCHS * largest - num_images) / 60 / workers
        warn(
            f"{_too_few(epochs)}: {_MIN_EPOCHS} epochs take about {needed:.3g} minutes here, not {minutes:.3g}"
        )
    draft["timing"] = (
        f"Time: one core of this machine trains on an image in {1000 * per_image:.3g} ms. {num_runs} trainings "
        f"on {num_images:,} images\n# each ({epochs} epochs of the largest size) take about {taken:.2g} "
        f"minutes with {workers} {'worker' if workers == 1 else 'workers'}.{note}"
    )
    return _text(draft)


def warn_of_few_epochs(opened: OpenStudy) -> None:
    """Warn if the runs of a design are too short for a price, whatever its file says."""
    if opened.study.design is not None and opened.missing():
        config, largest = max(
            ((run.config, run.ways[0][0].num_clean) for run in opened.runs), key=itemgetter(1)
        )
        epochs = round(config.train.total_steps * config.train.batch_size / largest)
        if epochs < _MIN_EPOCHS:
            warn(f"{_too_few(epochs)}: train longer (train.num_steps), or on fewer images")


def _too_few(epochs: int) -> str:
    return f"{epochs} epochs of the largest size are too few for a price, for which data must be the limit"


def heading(text: str) -> str:
    """What the file of a study says of itself at its top: images, time, and what was left out for it."""
    lines = text[: text.index("\nname = ")].splitlines()
    return "\n".join(line.removeprefix("#").strip() for line in lines)


def study_name(name: str) -> str:
    """What a study of images with this name, and its folder, are called."""
    return re.sub(r"[^\w.-]+", "-", name).strip(".-") or "study"


def _first_draft(
    store: Path,
    name: str,
    source: ImageSource,
    have_clean: int | None,
    noisy: tuple[float, ...],
    net: str | type[NetConfig] | None,
) -> dict[str, Any]:
    """What follows from the images alone: the values of `page/study.toml.j2`."""
    clean = source.sigma_tn == 0
    num_clean, num_noisy = int(clean.sum()), int((~clean).sum())
    check_enough(num_clean, 3 * MIN_IMAGES, f"clean images of {source.name} to train on", "store")
    if num_noisy and noisy:
        what = f"{num_noisy} images of {source.name} are noisy already"
        raise AssayError(what, key="noisy", cure="leave it out")
    if wrong := [level for level in noisy if not 0 < level <= MOST_NOISE]:
        what = f"{wrong[0]:.4g} is not a level between 0 and {MOST_NOISE:g}, where black to white is 2"
        raise AssayError(what, key="noisy", cure="give e.g. 0.2 (of 8-bit grey levels, divide by 127.5)")
    if have_clean and not MIN_IMAGES <= have_clean <= num_clean // 3:
        what = f"{have_clean} is not between {MIN_IMAGES} and {num_clean // 3}, a third of the {num_clean} "
        cure = "choose one: a study compares it with three times as many"
        raise AssayError(f"{what}clean images to train on", key="have_clean", cure=cure)
    have_clean = have_clean or min(max(num_clean // 10, MIN_IMAGES), num_clean // 3)
    shape = " x ".join(map(str, source.image_shape))
    about = f"A study of {name}: {num_clean:,} clean images of {shape} (C x H x W) to train on"
    if num_noisy:
        bins = level_bins(source.sigma_tn)
        about += f",\n# and {num_noisy:,} noisy ones, with noise of {levels_text(bins[0][0], bins[-1][1])}"
    preset = PRESETS[suited_preset(source.image_shape)]
    chosen = preset.net["preset"] if net is None else name_of(net, "net")
    if chosen not in NETS:
        with suppress(AssayError):
            find(NetConfig, chosen, "net")  # of a package that is imported now
        choose(chosen, {**NETS, **registered(NetConfig)}, "net")
    return {
        "store": str(store),
        "name": study_name(name),
        "about": about + ".",
        "preset": preset,
        "net": {"preset" if chosen in NETS else "kind": chosen},
        "have_clean": have_clean,
        "noisy": () if num_noisy else noisy or (0.2,),  # to be simulated
        "ladder": _sizes(_LADDER, have_clean, num_clean),
        "blocks": _BLOCKS,
        "batch_size": _batch(have_clean, preset.train["batch_size"]),
        "num_steps": _MIN_STEPS,
        "timing": "not timed yet",
    }


def _sizes(rungs: Sequence[float], have_clean: int, num_clean: int) -> tuple[float, ...]:
    """The rungs that there are images for; if these are few, of the whole ladder, whose first three fit."""
    found = tuple(rung for rung in rungs if rung * have_clean <= num_clean)
    return found if len(found) > 2 else _sizes(_LADDER, have_clean, num_clean)


def _batch(have_clean: int, largest: int) -> int:
    """The preset's batch, or the largest power of two that the smallest training fills."""
    return 1 << (min(have_clean, largest).bit_length() - 1)


def _fit(draft: dict[str, Any], num_clean: int, affordable: float, measured: float, num_mixes: int) -> str:
    """Fill the time with steps; with too few for the largest size, train on fewer images, and say so.

    `affordable` are the images of training that the time allows, `measured` those that measuring a run takes.
    A price needs sizes that are far apart: of too many, those in between go.
    """
    train, have_clean, note = draft["preset"].train, draft["have_clean"], ""
    fewest = min(have_clean, _FEWEST)
    most = max(train["num_steps"] * train["batch_size"], _MIN_EPOCHS * _LADDER[-1] * have_clean)
    for rungs in (_LADDER, _LADDER[::2]):
        num_images = min(affordable / _BLOCKS / (len(rungs) + num_mixes) - measured, most)
        fewer = min(have_clean, int(num_images / _MIN_EPOCHS / rungs[-1]))
        if fewer >= fewest:
            break
    fewer = max(fewer, fewest)
    if fewer < have_clean:
        note = (
            f"\n# That is too short to train on {have_clean:,} or more images, so {fewer:,} stand "
            "for them. In trials,\n# worth by level hardly depended on the share of clean images."
        )
    batch_size = _batch(fewer, train["batch_size"])
    draft |= {
        "have_clean": fewer,
        "ladder": _sizes(rungs, fewer, num_clean),
        "batch_size": batch_size,
        "num_steps": max(_MIN_STEPS, int(num_images / batch_size)),
    }
    return note


def _text(draft: dict[str, Any]) -> str:
    loader = FileSystemLoader(Path(__file__).with_name("page"))
    environment = Environment(
        loader=loader, trim_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined
    )
    environment.filters["toml"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.get_template("study.toml.j2").render(draft)


def _opened(draft: dict[str, Any], folder: Path) -> OpenStudy:
    spec = folder / "draft.toml"
    spec.write_text(_text(draft), encoding="utf-8")
    return open_study(spec, folder)


# --- cost ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunCost:
    """One training with the ways its model is sampled; of `megabytes` on disk while it runs some are `kept`.

    `flops` counts its training and samples; `seconds` are those of one core here, or counted by a rate.
    """

    title: str
    num_trained: int
    num_sampled: int
    flops: float
    megabytes: float
    kept: float
    seconds: float


def study_cost(study: Study, opened: OpenStudy | None = None, rate: float = 60.0) -> list[RunCost]:
    """The cost of the unfinished runs of a study, timed here; or of all, of images like those of its preset.

    Then the time is that of a device that sustains `rate` TFLOP/s.
    """
    source = opened.source if opened else _assumed_images(study)
    runs = opened.missing() if opened else study_runs(study, study.data, source)
    timed = dict[tuple[NetConfig, str], float]()
    measured = num_evaluations(len(opened.held_out)) if opened and opened.held_out else 0
    found = []
    for run in runs:
        train, net = run.config.train, run.config.net_config(source)
        key, cost = (net, train.optimizer), measure_cost(net)
        if opened is not None and key not in timed:
            with one_thread():
                timed[key] = seconds_per_evaluation(run.config, source)
        forwards = training_evaluations(train, len(source))
        forwards += sum(run.num_sampled * sample.num_evaluations() for sample in run.samples)
        if run.continues is not None:
            forwards -= training_evaluations(run.continues.config.train, len(source))
        num_kept = 1 + train.rounds + (train.total_steps - 1) // (train.snapshot_every or train.total_steps)
        num_compared = run.evaluate.along + (len(stopping_steps(train.total_steps)) if measured else 0)
        found.append(
            RunCost(
                run.title,
                num_trained=train.total_steps * train.batch_size,
                num_sampled=run.num_sampled * len(run.samples),
                flops=forwards * cost.flops,
                megabytes=cost.num_parameters * (_STATE_BYTES + 4 * (num_kept + num_compared)) / 1e6,
                kept=cost.num_parameters * 4 * num_kept / 1e6,
                seconds=timed[key] * (forwards + measured) if opened else forwards * cost.flops / rate / 1e12,
            )
        )
    return found


def _assumed_images(study: Study) -> ImageSource:
    """Images of the shape of the network's preset."""
    preset = NETS.get(str(study.net.get("preset")))
    if preset is None:
        raise AssayError("is not known, so neither is the size of the images", key="net.preset")
    num_classes = preset.make(image_shape=preset.image_shape).num_classes
    labels = [num_classes - 1] if study.train.class_conditional and num_classes else None
    one = from_arrays(np.zeros((1, *preset.image_shape), np.float32), label=labels, name=study.name)
    return View(one, torch.zeros(_NUM_ASSUMED, dtype=torch.long))
