"""A first study file, fitted to a store, to what you have and could buy, and to the time that you have.

The design is a ladder of clean sizes from the images in hand upwards, and one mix per noise level, in blocks.
In trials the worth of a noisy image at each level hardly depended on the share of clean ones; where there are
too few images for a ladder above those in hand, or too little time to train on them, the design moves to fewer.
Steps are timed on this machine. The text is opened as a study before it is returned.
"""

import json
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from assay.cost import WITH_GRADIENT, seconds_per_evaluation
from assay.data import ImageSource
from assay.data.config import DataConfig
from assay.data.picture import levels_text
from assay.errors import AssayError
from assay.metrics.held_out import num_evaluations
from assay.metrics.reference import MIN_IMAGES
from assay.study.folder import OpenStudy, open_study
from assay.study.runs import level_bins
from assay.study.stages import can_measure
from assay.train.presets import PRESETS, Preset, suited_preset

_LADDER = (1.0, 1.7, 3.0, 5.0, 10.0)
_BLOCKS = 3
_FEWEST = 40  # clean images that a design begins with, unless told otherwise
_MIN_EPOCHS = 60  # of the largest size: with fewer, training and not data limits the result
_MIN_STEPS = 100


@dataclass(frozen=True)
class _Draft:
    """Everything that the file says; its text is `page/study.toml.j2`."""

    store: str
    name: str
    about: str
    preset: Preset
    have_clean: int
    noisy: tuple[float, ...]  # to be simulated; none if the store has noisy images
    ladder: tuple[float, ...] = _LADDER
    blocks: int = _BLOCKS
    batch_size: int = 1
    num_steps: int = _MIN_STEPS
    timing: str = "not timed yet"

    def text(self) -> str:
        """The file."""
        loader = FileSystemLoader(Path(__file__).with_name("page"))
        environment = Environment(
            loader=loader, trim_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined
        )
        environment.filters["toml"] = lambda value: json.dumps(value, ensure_ascii=False)
        return environment.get_template("study.toml.j2").render(vars(self))

    def opened(self, folder: Path) -> OpenStudy:
        """The study in a folder."""
        spec = folder / "draft.toml"
        spec.write_text(self.text(), encoding="utf-8")
        return open_study(spec, folder)


def draft_study(
    store: Path,
    have_clean: int | None = None,
    noisy: Sequence[float] = (),
    minutes: float = 30.0,
    cores: int | None = None,
) -> str:
    """The text of a study of `store` whose first blocks take about `minutes` on `cores` (default: all) here.

    `have_clean` are the clean images in hand, by default a tenth of those in the store; `noisy` the levels of
    images that could be had, which are simulated where all images of the store are clean.
    """
    if not minutes > 0:
        raise AssayError(f"{minutes:g} is no time", key="minutes", cure="give those that the study may take")
    cores = cores or os.cpu_count() or 1
    with tempfile.TemporaryDirectory(prefix="assay-init-") as temporary:
        folder = Path(temporary)
        data = DataConfig(store=store).prepared(folder / "data", hold_out=True)
        draft = _first_draft(store, data.open(), have_clean, tuple(noisy))
        if not can_measure(data.open_held_out()):
            cure = "pack 200 clean images or more"
            raise AssayError("has too few clean images: a study holds 40 of them out", path=store, cure=cure)
        opened = replace(draft, batch_size=_batch(draft)).opened(folder)
        config = opened.runs[0].config
        per_image = WITH_GRADIENT * seconds_per_evaluation(config, opened.source, num_threads=1)
        assert opened.held_out is not None
        measured = num_evaluations(len(opened.held_out)) / WITH_GRADIENT
        num_mixes = len(opened.runs) // _BLOCKS - len(draft.ladder)
        draft, note = _in_time(draft, 60 * minutes * cores / per_image, measured, num_mixes)
        num_runs = len(draft.opened(folder).runs)
        seconds = per_image * num_runs * (draft.num_steps * draft.batch_size + measured)
    timing = (
        f"Time: one core of this machine trains on an image in {1000 * per_image:.3g} ms. {num_runs} trainings "
        f"on {draft.num_steps * draft.batch_size:,} images\n# each take about {seconds / 60 / cores:.2g} "
        f"minutes on {cores} core(s).{note}"
    )
    return replace(draft, timing=timing).text()


def _first_draft(store: Path, source: ImageSource, have_clean: int | None, noisy: tuple[float, ...]) -> _Draft:
    """What follows from the images alone."""
    clean = source.sigma_tn == 0
    num_clean, num_noisy = int(clean.sum()), int((~clean).sum())
    if num_clean < 3 * MIN_IMAGES:
        raise AssayError(
            f"{source.name} has {num_clean} clean and {num_noisy} noisy images to train on, and a price needs "
            f"at least {3 * MIN_IMAGES} clean ones", path=store, cure="pack more images",
        )  # fmt: skip
    if num_noisy and noisy:
        raise AssayError(
            f"{num_noisy} images of {source.name} are noisy already", key="noisy", cure="leave it out"
        )
    most = num_clean // 3 if num_clean < 10 * _FEWEST else num_clean // 10
    have_clean = min(max(have_clean or most, MIN_IMAGES), num_clean // 3)
    shape = " x ".join(map(str, source.image_shape))
    about = f"A study of {source.name}: {num_clean:,} clean images of {shape} (C x H x W) to train on"
    if num_noisy:
        bins = level_bins(source.sigma_tn)
        about += f",\n# and {num_noisy:,} noisy ones, with noise of {levels_text(bins[0][0], bins[-1][1])}"
    return _Draft(
        store=str(store),
        name=re.sub(r"[^\w.-]+", "-", store.resolve().name).strip(".-") or "study",
        about=about + ".",
        preset=PRESETS[suited_preset(source.image_shape)],
        have_clean=have_clean,
        noisy=() if num_noisy else noisy or (0.2,),
        ladder=tuple(rung for rung in _LADDER if rung * have_clean <= num_clean),
    )


def _batch(draft: _Draft) -> int:
    """The preset's batch, or the largest power of two that the smallest training fills."""
    return 1 << (min(draft.have_clean, draft.preset.train["batch_size"]).bit_length() - 1)


def _in_time(draft: _Draft, affordable: float, measured: float, num_mixes: int) -> tuple[_Draft, str]:
    """Fill the time with steps; with too few for the largest size, train on fewer images, and say so.

    `affordable` are the images of training that the time allows, `measured` those that measuring a run takes.
    """
    train, have_clean, ladder, note = draft.preset.train, draft.have_clean, draft.ladder, ""

    def each(ladder: Sequence[float]) -> float:
        """Images that each run may be trained on."""
        possible = affordable / _BLOCKS / (len(ladder) + num_mixes) - measured
        return min(possible, train["num_steps"] * train["batch_size"])

    while len(ladder) > 3 and _MIN_EPOCHS * ladder[-1] * have_clean > each(ladder):
        ladder = ladder[:-1]
    num_images = each(ladder)
    if _MIN_EPOCHS * ladder[-1] * have_clean > num_images:
        have_clean = max(min(have_clean, _FEWEST), int(num_images / _MIN_EPOCHS / ladder[-1]))
        note = (
            f"\n# That is too short to train on {draft.have_clean:,} or more images, so {have_clean:,} stand "
            "for them. In trials,\n# worth by level hardly depended on the share of clean images."
        )
    draft = replace(draft, have_clean=have_clean, ladder=ladder)
    batch_size = _batch(draft)
    return replace(draft, batch_size=batch_size, num_steps=max(_MIN_STEPS, int(num_images / batch_size))), note
