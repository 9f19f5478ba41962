"""Annotation: from which noise level on can bad images not be told from clean ones?

Blur, compression or low resolution change an image in ways that noise hides. Let a classifier see clean images
and bad ones, both with noise of level sigma. From the level on where it can no longer tell them apart, the bad
images teach what clean ones would: they are usable from there (Ambient Diffusion Omni). Noise only removes
information, so the best classifier gets no better as sigma grows.

One small network is trained on all levels. Each half of the images is judged by a network that was trained on
the other half. The measure is the area under the ROC curve (AUC), the probability that a clean image looks
cleaner than a bad one: 0.5 is chance, and a group is told apart where the AUC, made to fall, is above

    0.5 + max(0.1, 3 standard errors).
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.isotonic import IsotonicRegression
from sklearn.metrics import roc_auc_score
from torch import Tensor
from torch.nn import functional as F

from assay.data import ImageSource, Store
from assay.data.view import check_complete, stream
from assay.devices import one_thread
from assay.errors import AssayError, check_enough
from assay.files import write_whole
from assay.metrics.classifier import Classifier, initialise
from assay.noise import per_image

Array = NDArray[np.float64]
MIN_IMAGES = 40  # of each kind: 20 to learn from, 20 to judge by, and the same the other way round
_SIGMA_MIN, _SIGMA_MAX, _NUM_LEVELS = 0.02, 20.0, 21  # a factor of 1.41 between two
_SIGMA_DATA = 0.5
_TOLERANCE, _NUM_ERRORS = 0.1, 3.0
_LOOKS_CLEAN = 0.45  # ambient-omni's threshold for a single image


@dataclass(frozen=True)
class Annotation:
    """The level from which bad images are usable: of the group and of each image, (N,); and how it was found.

    `auc` and `error` (num_levels,) tell how well clean and bad images are told apart at each of `sigmas`.
    """

    level: float
    levels: Array
    sigmas: Array
    auc: Array
    error: Array


def annotate(
    bad: ImageSource,
    clean: ImageSource,
    num_steps: int = 600,
    batch_size: int = 128,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Annotation:
    """Find from which level on the images of `bad` cannot be told from those of `clean`.

    A level of 0 means that they look clean at every level. A single image's level is the one from which it
    looks clean, at most that of the group.
    """
    _check(bad, clean)
    sources, done = (clean, bad), 0
    order = [
        torch.randperm(len(source), generator=stream(seed, "halves", i)) for i, source in enumerate(sources)
    ]
    halves = [(places[0::2], places[1::2]) for places in order]
    sigmas = np.geomspace(_SIGMA_MIN, _SIGMA_MAX, _NUM_LEVELS)
    logits = [np.zeros((_NUM_LEVELS, len(source))) for source in sources]

    def advance() -> None:
        nonlocal done
        done += 1
        progress(done, 2 * (num_steps + _NUM_LEVELS))

    with one_thread():  # sums in one order, whatever the number of cores
        for fold in range(2):
            learn, judge = ([pair[(fold + k) % 2] for pair in halves] for k in range(2))
            generator = stream(seed, "annotate", fold)
            network = _train(sources, learn, num_steps, batch_size, generator, advance)
            for number, sigma in enumerate(sigmas.tolist()):
                for source, places, found in zip(sources, judge, logits, strict=True):
                    found[number, places.numpy()] = _judge(network, source, places, sigma, generator)
                advance()
    # The two networks' logits are not on one scale, so each half has its own AUC.
    auc = np.zeros(_NUM_LEVELS)
    for half in zip(*halves, strict=True):
        both = np.concatenate([found[:, part.numpy()] for found, part in zip(logits, half, strict=True)], 1)
        is_clean = np.arange(both.shape[1]) < len(half[0])
        auc += [roc_auc_score(is_clean, each) / 2 for each in both]
    num_clean, num_bad = len(clean) / 2, len(bad) / 2
    # Of an AUC of 0.5 by halves (Mann and Whitney), averaged over two.
    error = np.full(_NUM_LEVELS, math.sqrt((num_clean + num_bad + 1) / (12 * num_clean * num_bad) / 2))
    falling = IsotonicRegression(increasing=False).fit_transform(np.arange(_NUM_LEVELS), auc)
    level = _first_level(falling <= 0.5 + np.maximum(_TOLERANCE, _NUM_ERRORS * error), sigmas)
    if level == math.inf:
        what = f"the images of {bad.name} are told from clean ones even with noise of {sigmas[-1]:g}"
        raise AssayError(what, key="store", cure="leave them out: they show something else")
    looks_clean = 1 / (1 + np.exp(-logits[1]))
    single = [
        _first_level(IsotonicRegression().fit_transform(np.arange(_NUM_LEVELS), each) >= _LOOKS_CLEAN, sigmas)
        for each in looks_clean.T
    ]
    return Annotation(level, np.minimum(single, level), sigmas, auc, error)


def _check(bad: ImageSource, clean: ImageSource) -> None:
    for source, key in ((bad, "store"), (clean, "clean")):
        check_enough(len(source), MIN_IMAGES, f"images of {source.name}", key)
        check_complete(source, "cannot be annotated: train on them with train.rounds, or leave them out")
    if bool((clean.sigma_tn > 0).any()):
        raise AssayError(f"{clean.name} has noisy images", key="clean", cure="compare with clean images alone")
    if bad.image_shape != clean.image_shape:
        what = f"{bad.name} has images of shape {bad.image_shape}, {clean.name} of {clean.image_shape}"
        raise AssayError(what, key="clean", cure="pack them at one size")


def _first_level(alike: NDArray[np.bool_], sigmas: Array) -> float:
    """The lowest of `sigmas` from which all are `alike`; 0 if all are, infinity if the last is not."""
    told_apart = np.flatnonzero(~alike)
    return 0.0 if len(told_apart) == 0 else float([*sigmas, math.inf][told_apart[-1] + 1])


def _inputs(x: Tensor, sigma: Tensor, generator: torch.Generator) -> Tensor:
    """Images (B, C, H, W) with noise, scaled to unit variance, and a channel that tells the level."""
    eps = torch.randn(x.shape, generator=generator)
    x_t = (x + per_image(sigma, x) * eps) / per_image((sigma**2 + _SIGMA_DATA**2).sqrt(), x)
    told = per_image(sigma.log() / 4, x).expand(-1, 1, *x.shape[2:])
    return 127.5 * (torch.cat([x_t, told], 1) + 1)  # the network takes 0 and 255 for -1 and 1


def _train(
    sources: tuple[ImageSource, ImageSource],
    places: list[Tensor],
    num_steps: int,
    batch_size: int,
    generator: torch.Generator,
    advance: Callable[[], None],
) -> Classifier:
    """A network that tells the two sources apart, trained on the images `places` of each at all levels."""
    channels, *size = sources[0].image_shape
    network = Classifier((channels + 1, size[0], size[1]), 1)
    initialise(network, generator)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=num_steps)
    half = batch_size // 2
    target = torch.cat([torch.ones(half), torch.zeros(half)])
    low, high = math.log(_SIGMA_MIN), math.log(_SIGMA_MAX)
    for _ in range(num_steps):
        drawn = [p[torch.randint(len(p), (half,), generator=generator)] for p in places]
        x = torch.cat([source.read(index) for source, index in zip(sources, drawn, strict=True)])
        sigma = (low + (high - low) * torch.rand(2 * half, generator=generator)).exp()
        logit = network.logits(_inputs(x, sigma, generator))[:, 0]
        loss = F.binary_cross_entropy_with_logits(logit, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        advance()
    return network.eval().requires_grad_(False)


def _judge(
    network: Classifier, source: ImageSource, places: Tensor, sigma: float, generator: torch.Generator
) -> Array:
    """The logit of "clean" of each of the images `places` with noise of a level."""
    found = []
    for part in places.split(256):
        x, level = source.read(part), torch.full((len(part),), sigma)
        found.append(network.logits(_inputs(x, level, generator))[:, 0])
    return torch.cat(found).double().numpy()


def write_annotations(path: Path, store: Store, levels: Array) -> None:
    """Write `annotations.jsonl` for `levels=` of `assay data pack`, one line per image of the store.

    The levels are those of images from -1 to 1, as in ambient-omni, whose keys these are.
    """
    with write_whole(Path(path)) as partial, open(partial, "w", encoding="utf-8") as file:
        for name, level in zip(store.source_names(range(len(store))), levels.tolist(), strict=True):
            file.write(json.dumps({"filename": name, "annotation": level}) + "\n")
