"""What training and sampling cost, in evaluations of the network and in seconds; settings that fit a time.

An evaluation is a forward pass of one image. With a backward pass it counts three times. Operations of an
evaluation follow from shapes (`assay.nets.measure_cost`), seconds from a few training steps here.
"""

import math
import time
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from assay.data import ImageSource, Loader
from assay.devices import find_device
from assay.errors import AssayError, warn
from assay.generate import RESTORE_STEPS
from assay.nets import build_denoiser
from assay.progress import duration
from assay.train.config import RunConfig, TrainConfig, read_config
from assay.train.folder import final_path, read_run
from assay.train.loop import losses
from assay.train.optimizer import make_optimizer
from assay.train.presets import PRESETS, preset_tree, smaller_preset, suited_preset

WITH_GRADIENT = 3.0  # evaluations that a forward and a backward pass amount to
_NUM_TIMED = 3  # steps
_MOST_SECONDS = 20.0  # that these may take, if their batch can be smaller
_FEWEST_STEPS = 100  # of a training, however little time there is


def training_evaluations(settings: TrainConfig, num_images: int) -> float:
    """Evaluations of a whole training on `num_images` images, with the consistency loss and all rounds."""
    walk, learnt = settings.consistency.num_evaluations
    share = settings.consistency.sub_batch * (1 - settings.consistency.start)
    more = share * (walk + WITH_GRADIENT * learnt) if settings.consistency.coefficient else 0.0
    restored = settings.rounds * num_images * (2 * RESTORE_STEPS + 1)  # two a step, and the last prediction
    return settings.total_steps * settings.batch_size * (WITH_GRADIENT + more) + restored


def seconds_per_evaluation(config: RunConfig, source: ImageSource, device: str = "auto") -> float:
    """Seconds of an evaluation: the fastest of a few training steps, without consistency loss.

    A step of one image tells how many images there is time for, if a whole batch would take too long. Other
    work on the machine's cores does not count.
    """
    settings, net, place = config.train, config.net_config(source), find_device(device)
    clock = time.thread_time if place.type == "cpu" else time.perf_counter
    denoiser = build_denoiser(net).train().to(place)
    optimizer = make_optimizer(denoiser, net, settings)

    def seconds(num_images: int, num_steps: int) -> float:
        """The fastest of some steps, for each image."""
        batch = Loader(source, num_images, augmentation=settings.augment).batch(0).to(place)
        fastest = math.inf
        for _ in range(num_steps):
            started = clock()
            loss = losses(denoiser, batch, settings, net.sigma_data).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss.item()  # waits for the device
            fastest = min(fastest, clock() - started)
        return fastest / num_images

    affordable = max(1, int(_MOST_SECONDS / _NUM_TIMED / seconds(1, 2)))
    return seconds(min(settings.batch_size, len(source), affordable), _NUM_TIMED) / WITH_GRADIENT


def training_seconds(config: RunConfig, source: ImageSource, device: str = "auto") -> float:
    """Seconds that a training will take here."""
    return training_evaluations(config.train, len(source)) * seconds_per_evaluation(config, source, device)


def choose_config(
    tree: Mapping[str, Any],
    source: ImageSource,
    preset: str | None = None,
    minutes: float | None = None,
    run_dir: Path | None = None,
    device: str = "auto",
) -> RunConfig:
    """The config of `tree`, with a preset where it says nothing: by default one for images of this size.

    With `minutes` it trains for about that long here. A run that has begun in `run_dir` keeps its length.
    """
    given = dict(tree.get("train", {}))
    name = preset or suited_preset(source.image_shape)
    if name in PRESETS:
        given.setdefault("batch_size", min(PRESETS[name].train["batch_size"], len(source)))

    def read(**more: int) -> RunConfig:
        chosen = preset_tree(name, **given, **more)
        net = tree.get("net", {})
        return read_config(
            {**tree, "net": net if "kind" in net else chosen["net"] | net, "train": chosen["train"]}
        )

    config = read()
    if minutes is None:
        return config
    if not isinstance(minutes, Real) or not 0 < minutes < math.inf:
        raise AssayError(f"{minutes!r:.80} is no time", key="minutes", cure="give those that it may train")
    if "num_steps" in given:
        raise AssayError("num_steps says already how long to train", key="minutes", cure="give one of both")
    begun = None if run_dir is None else run_dir / "config.json"
    if begun is not None and begun.is_file():
        num_steps = read_run(begun)["config"]["train"]["num_steps"]
        if final_path(begun.parent).exists():
            done = f"{begun.parent} is finished, after {num_steps:,} steps"
            warn(f"{done}; for other minutes, choose another folder")
        return read(num_steps=num_steps)
    share = 60 * minutes / training_seconds(config, source, device)
    if (num_steps := int(config.train.num_steps * share)) < _FEWEST_STEPS:
        least = duration(60 * minutes * _FEWEST_STEPS / (config.train.num_steps * share))
        faster = f"; the preset {smaller} is faster" if (smaller := smaller_preset(name)) else ""
        told = f"the shortest training, of {_FEWEST_STEPS} steps, takes about {least} here, not {minutes:g} min"
        warn(told + faster)
    return read(num_steps=max(_FEWEST_STEPS, num_steps))
