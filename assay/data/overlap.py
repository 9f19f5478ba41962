"""Images that are trained on and held out at once: a model that memorised them would look good."""

import math
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from assay.data.source import ImageSource
from assay.errors import AssayError
from assay.files import content_hash

_SIDE = 8  # of the small copies that near-duplicates are looked for in
_NEAR = 0.01  # root mean squared difference of two copies, where black to white is 2: one grey step
_MAX_SHARE = 0.05  # of held-out images that may be in the training set: photographs do occur twice
_BATCH = 1024
_MAX_BYTES = 2**32  # of training images as float32; some ten seconds


@dataclass(frozen=True)
class Overlap:
    """How many of `num_images` held-out images are also trained on, or nearly so; the first pair that is."""

    num_images: int
    num_same: int
    num_near: int
    pair: tuple[int, int] | None  # numbers of the training image and of the held-out one


def find_overlap(training: ImageSource, held_out: ImageSource) -> Overlap:
    """Compare images by a hash of their pixels and by the distance of small copies.

    Of a training set that would take long to read, an even selection is compared.
    """
    known: dict[str, int] = {}
    copies = []
    every = -(-len(training) * 4 * math.prod(training.image_shape) // _MAX_BYTES)
    for part in torch.arange(0, len(training), every).split(_BATCH):
        x = training.read(part)
        for number, image in zip(part.tolist(), x, strict=True):
            known.setdefault(content_hash(image.numpy().tobytes()), number)
        copies.append(_copy(x))
    small, num_same, num_near, pair = torch.cat(copies), 0, 0, None
    for part in torch.arange(len(held_out)).split(_BATCH):
        x = held_out.read(part)
        found = [known.get(content_hash(image.numpy().tobytes()), -1) for image in x]
        distance = [torch.cdist(_copy(x), each).min(1).values for each in small.split(2**14)]
        is_same = torch.tensor(found) >= 0
        is_near = (torch.stack(distance).min(0).values / math.sqrt(small.shape[1]) < _NEAR) & ~is_same
        num_same, num_near = num_same + int(is_same.sum()), num_near + int(is_near.sum())
        if pair is None and bool(is_same.any()):
            first = int(is_same.nonzero()[0])
            pair = found[first], int(part[first])
    return Overlap(len(held_out), num_same, num_near, pair)


def check_overlap(training: ImageSource, held_out: ImageSource) -> None:
    """Reject held-out images many of which are trained on; warn of a few, and of those that nearly are."""
    found = find_overlap(training, held_out)
    what = f"{found.num_same} of the {found.num_images} held-out images are also trained on"
    if found.num_same > _MAX_SHARE * found.num_images and found.pair is not None:
        pair = f"image {found.pair[1]} of {held_out.name} is image {found.pair[0]} of {training.name}"
        raise AssayError(f"{what}: {pair}", key="data.held_out", cure="remove duplicates, or hold others out")
    if found.num_same:
        warnings.warn(f"{what}: a model that memorises them looks better than it is", stacklevel=2)
    if found.num_near > _MAX_SHARE * found.num_images:
        near = f"{found.num_near} of the {found.num_images} held-out images"
        warnings.warn(f"{near} are nearly the same as one trained on: hold whole scenes out", stacklevel=2)


def _copy(x: Tensor) -> Tensor:
    """Small grey copies (B, D) of images (B, C, H, W)."""
    grey = x.mean(1, keepdim=True)
    height, width = (min(side, _SIDE) for side in x.shape[2:])
    return functional.adaptive_avg_pool2d(grey, (height, width)).flatten(1)
