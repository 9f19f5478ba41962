"""What a user should know about images before training: values, levels, axes and copies that look wrong.

Each image that is packed leaves a `Note`; `Notes` turns them into sentences that name what was stated and what
was found.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from assay.data.audit.level import MIN_SIDE, blind_net, spread
from assay.data.source import ImageSource
from assay.errors import AssayError, warn
from assay.files import content_hash

_NUM_MEASURED = 48  # images of each source whose noise is measured
_USED = 0.26  # of the range that all images of a source should use, or half of it: 8 of 10 bits do not
_TEXTURE = 0.05  # what may look like noise in small images, where black to white is 2
_TEXTURE_STABILISED = 0.02  # for a sensor, whose levels are low; errors then count in full
_AGREE = math.log(1.3)  # how far measured levels may be off, beyond their error
_LONGEST = 8  # times as long as wide that images may be
_SIDE = 8  # of the small copies that near-duplicates are looked for in
_NEAR = 0.01  # root mean squared difference of two copies, where black to white is 2: one grey step
_MAX_SHARE = 0.05  # of held-out images that may be in the training set: photographs do occur twice
_BATCH = 1024
_MAX_BYTES = 2**32  # of training images as float32; some ten seconds

# What images may have, and what to say of the `num` that do: {0} and {1} are the means of what was noted.
CLIPPED, OPACITY, DARKER = "clipped opacity darker".split()
_SENTENCES = {
    CLIPPED: "{num:,} noisy images come from 8-bit files: rounding to 256 steps and clipping at black and "
    "white ({0:.1%} of their values) break the Gaussian noise that training assumes. Pack the float "
    "originals if you have them.",
    OPACITY: "{num:,} images have a channel of opacity, left out; what is transparent is laid on white",
    DARKER: "{0:.1%} of the values of {num:,} images are far below `black` ({1:g}): is it right?",
}


class Note(NamedTuple):
    """What was seen while an image was packed. Values are in the units of the file."""

    name: str
    sigma: float  # noise, where black to white is 2
    values: tuple[float, float, float]  # lowest, mean and highest
    black_and_white: tuple[float, float]
    content: int  # a hash
    found: Mapping[str, tuple[float, ...]]  # what of the above, with numbers
    levels: list[float] | None  # its noise as stated and as measured, 95% interval, where black to white is 2
    kind: tuple[int, str]  # the number of its source, and the type of its file's values


def measure(x: np.ndarray, sigma: float | np.ndarray, i: int, num_images: int) -> list[float] | None:
    """`levels` of image i (C, H, W) of a source, quickly; None for most. Of a map the nearest level counts."""
    if i not in spread(num_images, _NUM_MEASURED) or min(x.shape[1:]) < MIN_SIDE:
        return None
    measured = blind_net().levels(torch.from_numpy(x.astype(np.float32))[None]).flatten().tolist()
    return [float(np.clip(measured[0], *np.quantile(sigma, (0.05, 0.95)))), *measured]


def odd_axes(shape: tuple[int, ...]) -> str | None:
    """What to say of an array (N, H, W, ...) whose images are perhaps not the first axis."""
    num, height, width = shape[:3]
    if num < 2 or not (num == height != width or max(height, width) > _LONGEST * min(height, width)):
        return None
    read = f"is read as {num} images of {height} x {width} pixels"
    if width in (3, 4):
        return f"{read}. If it is one colour image, add an axis in front (`image[None]`)"
    return f"{read}. If it holds {width} images of {num} x {height}, move its last axis to the front"


@dataclass
class _Seen:
    """The notes of one source, of files of one type: 8-bit and 12-bit pictures differ in range."""

    name: str
    dtype: str
    lowest: float = math.inf
    highest: float = -math.inf
    noise: float = 0.0  # the highest level
    num_beyond: int = 0
    black_and_white: tuple[float, float] = (0.0, 0.0)
    levels: list[list[float]] = field(default_factory=list)  # stated, measured, interval

    def far_off(self, stabilised: bool) -> tuple[float, float] | None:
        """Stated and measured level, if they differ: those of the source, or of the worst if many images do."""
        both, ends = np.hsplit(np.array(self.levels), 2)
        texture, least = (_TEXTURE_STABILISED, 1.0) if stabilised else (_TEXTURE, 0.0)
        ratio = np.log(np.hypot(both, texture)) @ (1, -1)
        error = np.log(np.maximum(ends, 1e-9)) @ (-1, 1) / (2 * 1.96)
        found = both[[abs(ratio).argmax()]]
        if abs(np.median(ratio)) > _AGREE + max(least, 3.75 / math.sqrt(len(both))) * np.median(error):
            found = both[abs(ratio) > _AGREE]  # of a mix, the clean or the noisy images
        elif (abs(ratio) > _AGREE + 2 * error).mean() <= 0.25:
            return None
        return float(np.quantile(found[:, 0], 0.5, method="lower")), float(np.median(found[:, 1]))

    def add(self, note: Note) -> None:
        """Take in a note; the mean of noisy images and any value of clean ones may lie far beyond the range."""
        (black, white), (lowest, mean, highest) = note.black_and_white, note.values
        self.lowest, self.highest = min(self.lowest, lowest), max(self.highest, highest)
        self.noise = max(self.noise, note.sigma)
        middle, span = (black + white) / 2, white - black
        far = abs(mean - middle) / 0.75 if note.sigma > 0 else max(highest - middle, middle - lowest)
        self.num_beyond += far > span
        self.black_and_white = note.black_and_white
        self.levels += [note.levels] if note.levels else []

    def warnings(self, in_files: bool, cure: str) -> list[str]:
        """What of its values and levels looks wrong; `cure` says how to give a range."""
        black, white = self.black_and_white
        is_bright = black == -white and self.lowest + 5 * min(self.noise, 0.2) * white >= 0  # 0 may be black
        is_bright &= self.lowest + self.highest > white / 4  # and not the middle
        found, between = [], f"between {self.lowest:.4g} and {self.highest:.4g}"
        stated = f"where black and white are {black:g} and {white:g}: is their range right?{cure}"
        if self.num_beyond:
            found.append(f"{self.num_beyond:,} images of {self.name} have values {between}, {stated}")
        elif min(2 * (self.highest - self.lowest), self.highest - black) < _USED * (white - black) or is_bright:
            deep = " 12-bit data in 16-bit files have a range of 0,4095." if white == 65535 else ""
            found.append(f"all {self.dtype} pixels of {self.name} lie {between}, {stated}{deep}")
        stabilised = not in_files and self.noise > 0
        if self.levels and (levels := self.far_off(stabilised)):
            sigma, measured = (level * ((white - black) / 2 if in_files else 1) for level in levels)
            words = f"is said to have noise of {sigma:.3g}" if sigma else "has images that count as clean"
            cure = "is `sigma` right, and in the units of the files? `assay data noise` measures it"
            if stabilised:
                words = f"should have noise of {sigma:.3g} once it is stabilised"
                cure = "are gain (of values, per photon), read_noise and black right? `assay data noise` helps"
            found.append(f"{self.name} {words}, but the noise measures {measured:.3g}: {cure}")
        return found


class Notes:
    """The notes of all images, as warnings. `in_files`: levels are told in the units of the files."""

    def __init__(self, sources: Sequence[str], in_files: bool = True, cure: str = "") -> None:
        self._in_files, self._cure, self._num_images = in_files, cure, 0
        self._names, self._seen = sources, dict[tuple[int, str], _Seen]()
        self._first: dict[int, str] = {}  # of each content
        self._copies: list[str] = []
        self._found: dict[str, list[tuple[float, ...]]] = defaultdict(list)

    def add(self, note: Note) -> None:
        """Take in the note of an image that was packed."""
        self._seen.setdefault(note.kind, _Seen(self._names[note.kind[0]], note.kind[1])).add(note)
        self._num_images += 1
        if (first := self._first.setdefault(note.content, note.name)) != note.name:
            self._copies.append(f"{note.name} of {first}")
        for what, values in note.found.items():
            self._found[what].append(values)

    def warnings(self) -> list[str]:
        """What looks wrong, in sentences."""
        told = [text for seen in self._seen.values() for text in seen.warnings(self._in_files, self._cure)]
        for what, sentence in _SENTENCES.items():
            if values := self._found[what]:
                told.append(sentence.format(*np.mean(values, axis=0), num=len(values)))
        if num := len(self._copies):
            which = ", ".join(self._copies[:3]) + (", ..." if num > 3 else "")
            told.append(f"{num:,} of the {self._num_images:,} images are copies ({which}): leave them out")
        return told


def check_overlap(training: ImageSource, held_out: ImageSource) -> None:
    """Reject held-out images many of which are trained on; warn of a few, and of those that nearly are.

    A model that memorised them would look good. Images are compared by a hash of their pixels and by the
    distance of small copies. Of a training set that would take long to read, an even selection is compared.
    """
    known: dict[str, int] = {}
    copies, others, numbers, distances = [], [], [], []
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
        others.append(_copy(x))
        nearest = [torch.cdist(others[-1], each).min(1).values for each in small.split(2**14)]
        distances.append(torch.stack(nearest).min(0).values / math.sqrt(small.shape[1]))
    (mean, spread_of), (other, spread_there) = _scale(training, small), _scale(held_out, torch.cat(others))
    if abs(mean - other) > spread_of / 2 or max(spread_of, spread_there) > 1.5 * min(spread_of, spread_there):
        values = f"values of {other:.2g} ± {spread_there:.2g}, those trained on of {mean:.2g} ± {spread_of:.2g}"
        warn(f"held-out images have {values}: are they scaled alike, and of one kind?")
    is_same = torch.tensor(numbers) >= 0
    num_same, num_near = int(is_same.sum()), int(((torch.cat(distances) < _NEAR) & ~is_same).sum())
    what = f"{num_same} of the {len(held_out)} held-out images are also trained on"
    if num_same > _MAX_SHARE * len(held_out):
        first = int(is_same.nonzero()[0])
        what += f": image {first} of {held_out.name} is image {numbers[first]} of {training.name}"
        raise AssayError(what, key="data.held_out", cure="remove duplicates, or hold others out")
    if num_same:
        warn(f"{what}: a model that memorises them looks better than it is")
    if num_near > _MAX_SHARE * len(held_out):
        near = f"{num_near} of the {len(held_out)} held-out images"
        warn(f"{near} nearly equal one trained on: hold whole scenes out (`--patch`)")


def _hash(image: Tensor) -> str:
    """The same of one picture in stores of 8 bits, 16 bits and float32: their values are on this grid."""
    return content_hash(((image.double() + 1) * (16 * 65535 / 2)).round().long().numpy().tobytes())


def _scale(source: ImageSource, copies: Tensor) -> tuple[float, float]:
    """Mean and standard deviation of the values of small copies, without that of noise; NaN if it prevails."""
    noise = float(source.sigma_tn.square().mean()) * copies.shape[1] / math.prod(source.image_shape)
    variance = float(copies.double().var()) - noise
    return (float(copies.mean()), math.sqrt(variance)) if variance > noise else (math.nan, math.nan)


def _copy(x: Tensor) -> Tensor:
    """Small grey copies (B, D) of images (B, C, H, W)."""
    height, width = (min(side, _SIDE) for side in x.shape[2:])
    return functional.adaptive_avg_pool2d(x.mean(1, keepdim=True), (height, width)).flatten(1)
