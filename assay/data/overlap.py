"""Images that are trained on and held out at once: a model that memorised them would look good."""

import math
import warnings

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


def check_overlap(training: ImageSource, held_out: ImageSource) -> None:
    """Reject held-out images many of which are trained on; warn of a few, and of those that nearly are.

    Images are compared by a hash of their pixels and by the distance of small copies. Of a training set that
    would take long to read, an even selection is compared.
    """
    known: dict[str, int] = {}
    copies, numbers, distances = [], [], []
    every = -(-len(training) * 4 * math.prod(training.image_shape) // _MAX_BYTES)
    for part in torch.arange(0, len(training), every).split(_BATCH):
        x = training.read(part)
        copies.append(_copy(x))
        for number, image in zip(part.tolist(), x, strict=True):
            known.setdefault(_hash(image), number)
    small = torch.cat(copies)
    for part in torch.arange(len(held_out)).split(_BATCH):
        x = held_out.read(part)
        numbers += [known.get(_hash(image), -1) for image in x]
        nearest = [torch.cdist(_copy(x), each).min(1).values for each in small.split(2**14)]
        distances.append(torch.stack(nearest).min(0).values / math.sqrt(small.shape[1]))
    is_same = torch.tensor(numbers) >= 0
    num_same, num_near = int(is_same.sum()), int(((torch.cat(distances) < _NEAR) & ~is_same).sum())
    what = f"{num_same} of the {len(held_out)} held-out images are also trained on"
    if num_same > _MAX_SHARE * len(held_out):
        first = int(is_same.nonzero()[0])
        what += f": image {first} of {held_out.name} is image {numbers[first]} of {training.name}"
        raise AssayError(what, key="data.held_out", cure="remove duplicates, or hold others out")
    if num_same:
        warnings.warn(f"{what}: a model that memorises them looks better than it is", stacklevel=2)
    if num_near > _MAX_SHARE * len(held_out):
        near = f"{num_near} of the {len(held_out)} held-out images"
        warnings.warn(f"{near} are nearly the same as one trained on: hold whole scenes out", stacklevel=2)


def _hash(image: Tensor) -> str:
    """The same of one picture in stores of 8 bits, 16 bits and float32: their values are on this grid."""
    return content_hash(((image.double() + 1) * (16 * 65535 / 2)).round().long().numpy().tobytes())


def _copy(x: Tensor) -> Tensor:
    """Small grey copies (B, D) of images (B, C, H, W)."""
    height, width = (min(side, _SIDE) for side in x.shape[2:])
    return functional.adaptive_avg_pool2d(x.mean(1, keepdim=True), (height, width)).flatten(1)
