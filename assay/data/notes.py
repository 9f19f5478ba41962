"""What a user should know about images before training: values, levels, axes and copies that look wrong.

Each image that is packed leaves a `Note`; `Notes` turns them into sentences that name what was stated and what
was found.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
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
_SPREAD = math.log(1.5)  # of stated levels whose order is compared with that of measured ones
_MIN_ORDER = 0.3  # their rank correlation
_LONGEST = 8  # times as long as wide that images may be
_MAX_AT_ENDS = 0.1  # of the values of a noisy image that may equal its lowest or highest
_SIDE = 8  # of the small copies that near-duplicates are looked for in
_NEAR = 0.01  # root mean squared difference of two copies, where black to white is 2: one grey step
_TURNED = 2e-4  # 1 - correlation of two copies, of which one may be turned, flipped or brighter
_TURNED_WORDS = "flipped, turned, brighter or darker"
_FEWEST = 16  # images, for twins and orders to be looked for
_NUM_ASKED, _NUM_KNOWN = 256, 2**16  # images whose twins are looked for, and among which: some seconds
_MAX_SHARE = 0.05  # of held-out images that may be in the training set: photographs do occur twice
_BATCH = 1024
_MAX_BYTES = 2**32  # of training images as float32; some ten seconds

# What images may have, and what to say of the `num` that do: {0} and {1} are the means of what was noted.
CLIPPED, CUT, OPACITY, DARKER, EQUAL, FLAT = "clipped cut opacity darker equal flat".split()
_SENTENCES = {
    CLIPPED: "{num:,} noisy images are 8-bit: rounding to 256 steps and clipping at black and white "
    "({0:.1%} of their values) break the Gaussian noise that training assumes. Use the float originals if you "
    "have them.",
    CUT: "{num:,} noisy images have {0:.1%} of their values at their lowest or highest: clipped noise is not "
    "the Gaussian noise that training assumes. Use the originals if you have them.",
    EQUAL: "{num:,} noisy images have {0:.0f} equal channels, so that their noise is not independent: save one "
    "channel, as grey images",
    FLAT: "{num:,} images have one value everywhere: they show nothing",
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
    kind: tuple[int, str]  # the number of its source, and the type of its file's values
    found: Mapping[str, tuple[float, ...]]  # what of the above, with numbers
    levels: list[float] | None  # its noise as stated and as measured, 95% interval, where black to white is 2
    small: Tensor | None  # copy (H, W)
    noise: float  # its variance in the small copy


_Looks = tuple[dict[str, tuple[float, ...]], list[float] | None, Tensor | None, float]


def look_at(x: np.ndarray, sigma: float | np.ndarray, i: int, num_images: int, files: np.ndarray) -> _Looks:
    """`found`, `levels`, `small` and `noise` of image i (C, H, W) of a source with these values, quickly.

    Levels are measured of few images; of a map the nearest level counts.
    """
    found, noisy = dict[str, tuple[float, ...]](), np.max(sigma) > 0
    if noisy and files.dtype == np.uint8:
        found[CLIPPED] = (float(np.isin(files, (0, 255)).mean()),)
    elif noisy and np.ndim(sigma) == 0:
        at_ends = int(np.isin(files, (files.min(), files.max())).sum())
        if at_ends - 2 > _MAX_AT_ENDS * files.size and at_ends < files.size:  # two values always are
            found[CUT] = (at_ends / files.size,)
    if noisy and len(x) > 2 and (x == x[:1]).all():
        found[EQUAL] = (len(x),)
    if files.min() == files.max():
        found[FLAT] = ()
    image = torch.from_numpy(x.astype(np.float32))[None]
    small = _copy(image)[0] if i % -(-num_images // _NUM_KNOWN) == 0 else None
    noise = float(np.square(sigma).mean()) * min(x.shape[1], _SIDE) * min(x.shape[2], _SIDE) / x.size
    if i not in spread(num_images, _NUM_MEASURED) or min(x.shape[1:]) < MIN_SIDE:
        return found, None, small, noise
    measured = blind_net().levels(image).flatten().tolist()
    return found, [float(np.clip(measured[0], *np.quantile(sigma, (0.05, 0.95)))), *measured], small, noise


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
        elif self.levels and (order := self.order()) < _MIN_ORDER:
            words = f"the levels of {self.name} hardly follow those that the noise measures"
            found.append(f"{words} (rank correlation {order:.2f}): are they in the order of the images?")
        return found

    def order(self) -> float:
        """The rank correlation of stated and measured levels, if these spread well beyond their errors."""
        stated, measured, low, high = np.array([each for each in self.levels if each[0] > 0]).reshape(-1, 4).T
        if len(stated) < _FEWEST or np.ptp(np.log(stated)) < _SPREAD:
            return 1.0
        error = np.median(np.log(np.maximum([low, high], 1e-9)), axis=1) @ (-1, 1) / (2 * 1.96)
        ranks = np.argsort(np.argsort([stated, measured]))
        return float(np.corrcoef(*ranks).min()) if np.log(stated).std() > error else 1.0


class Notes:
    """The notes of all images, as warnings. `in_files`: levels are told in the units of the files.

    `cure` says how to give a range, and `twins` what is known of images that show one scene.
    """

    def __init__(self, sources: Sequence[str], in_files: bool = True, cure: str = "", twins: str = "") -> None:
        self._in_files, self._cure, self._named, self._num_images = in_files, cure, twins, 0
        self._names, self._seen = sources, dict[tuple[int, str], _Seen]()
        self._first: dict[int, str] = {}  # of each content
        self._different: list[tuple[str, Tensor, float]] = []  # names, small copies and their noise
        self._copies: list[str] = []
        self._found: dict[str, list[tuple[float, ...]]] = defaultdict(list)

    def add(self, note: Note) -> None:
        """Take in the note of an image that was packed."""
        self._seen.setdefault(note.kind, _Seen(self._names[note.kind[0]], note.kind[1])).add(note)
        self._num_images += 1
        if (first := self._first.setdefault(note.content, note.name)) != note.name:
            self._copies.append(f"{note.name} of {first}")
        elif note.small is not None:
            self._different.append((note.name, note.small, note.noise))
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
        return [*told, *self._twins()]

    def _twins(self) -> Iterator[str]:
        """Noisy images of one scene, and clean images that are others turned or brighter."""
        if not self._different:
            return
        names, copies, noise = zip(*self._different, strict=True)
        small, variance, every = torch.stack(copies), torch.tensor(noise), torch.arange(len(copies))
        if self._named:
            yield self._named
        elif found := find_twins(small, variance, every[variance > 0], every):
            which = (
                f"{found[0]} noisy images show the scene of another ({names[found[1]]} and {names[found[2]]})"
            )
            yield f"{which}: they teach no new scene, and what is held out must show others"
        if found := find_twins(small, variance, every, every, True):
            which = f"{_TURNED_WORDS} ({names[found[1]]} and {names[found[2]]})"
            yield f"{found[0]} clean images are others {which}: leave them out"


_Twins = tuple[str, int, int] | None


def find_twins(small: Tensor, noise: Tensor, asked: Tensor, known: Tensor, turned: bool = False) -> _Twins:
    """How many images of those `asked` show the scene of another that is `known`, and the first such pair.

    None if few do, or if that may be by chance.
    Of small copies (N, H, W) with noise of variance (N,), two of one scene differ by a chi-squared number times
    their noise. That others differ by more is seen in how many differ by little more, and in mirror images,
    which show no scene of the set. `turned`: of clean images, copies that are turned, flipped or brighter.
    """
    num_cells, unit = small[0].numel(), 1 + 2 * math.sqrt(2 / small[0].numel())  # two deviations above the mean
    if turned:
        small = small - small.mean((1, 2), keepdim=True)
        size = small.flatten(1).norm(dim=1)
        small, fits = small / size[:, None, None], (noise == 0) & (size > _NEAR * math.sqrt(num_cells))
        asked, known = asked[fits[asked]], known[fits[known]]
    if min(len(asked), len(known)) < _FEWEST:
        return None
    asked, known = asked[spread(len(asked), _NUM_ASKED)], known[spread(len(known), _NUM_KNOWN)]
    variance = noise[asked][:, None] + noise[known] + _NEAR**2
    scale, far = (2 * _TURNED, 10.0) if turned else (num_cells * unit * variance, 2 / unit)
    found = []
    for turn in range(0, 8, 1 if turned and small.shape[1] == small.shape[2] else 2):
        other = small[known].rot90(turn % 4, (1, 2))
        other = (other if turn < 4 else other.flip(2)).flatten(1)
        distance = torch.cdist(small[asked].flatten(1), other).square() / scale
        found.append(distance.masked_fill_(asked[:, None] == known, math.inf).min(1))
    values = torch.stack([each.values for each in found])
    best = values.argmin(0) if turned else torch.zeros(len(asked), dtype=torch.long)
    nearest = values.gather(0, best[None])[0]
    is_twin, chance = nearest < 1, 0.0 if turned else float((values[1:] < 1).double().mean(1).max())
    almost = float(((nearest >= 1) & (nearest < far)).double().mean())
    num, limit = int(is_twin.sum()), _MAX_SHARE + 4 * almost + 2 * chance
    if num < 3 or num <= limit * len(asked):
        return None
    first = int(is_twin.nonzero()[0])
    twin = known[found[int(best[first])].indices[first]]
    return f"{num} of {len(asked)}", int(asked[first]), int(twin)


def check_overlap(training: ImageSource, held_out: ImageSource) -> None:
    """Reject held-out images many of which are trained on; warn of a few, and of those that nearly are.

    A model that memorised them would look good. Images are compared by a hash of their pixels and by the
    distance of small copies. Of a training set that would take long to read, an even selection is compared.
    """
    known: dict[str, int] = {}
    copies, others, numbers = [], [], []
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
    (mean, spread_of), (other, spread_there) = _scale(training, small), _scale(held_out, torch.cat(others))
    if abs(mean - other) > spread_of / 2 or max(spread_of, spread_there) > 1.5 * min(spread_of, spread_there):
        values = f"values of {other:.2g} ± {spread_there:.2g}, those trained on of {mean:.2g} ± {spread_of:.2g}"
        warn(f"held-out images have {values}: are they scaled alike, and of one kind?")
    is_same = torch.tensor(numbers) >= 0
    num_same = int(is_same.sum())
    what = f"{num_same} of the {len(held_out)} held-out images are also trained on"
    if num_same > _MAX_SHARE * len(held_out):
        first = int(is_same.nonzero()[0])
        what += f": image {first} of {held_out.name} is image {numbers[first]} of {training.name}"
        raise AssayError(what, key="data.held_out", cure="remove duplicates, or hold others out")
    if num_same:
        warn(f"{what}: a model that memorises them looks better than it is")
    num_trained, levels = len(small), torch.cat([training.sigma_tn[::every], held_out.sigma_tn])
    small, index = torch.cat([small, *others]), torch.arange(len(levels))
    noise = levels.square() * small[0].numel() / math.prod(training.image_shape)
    asked = index[num_trained:][~is_same]
    for turned, what in enumerate(("show the scene of one trained on", f"are one trained on {_TURNED_WORDS}")):
        if found := find_twins(small, noise, asked, index[:num_trained], bool(turned)):
            pair = f"image {found[1] - num_trained} and image {every * found[2]} of those"
            cure = "hold whole scenes out (`--patch`, or `group` of arrays)"
            return warn(f"{found[0]} held-out images {what} ({pair}): {cure}")


def _hash(image: Tensor) -> str:
    """The same of one picture in stores of 8 bits, 16 bits and float32: their values are on this grid."""
    return content_hash(((image.double() + 1) * (16 * 65535 / 2)).round().long().numpy().tobytes())


def _scale(source: ImageSource, copies: Tensor) -> tuple[float, float]:
    """Mean and standard deviation of the values of small copies, without that of noise; NaN if it prevails."""
    noise = float(source.sigma_tn.square().mean()) * copies[0].numel() / math.prod(source.image_shape)
    variance = float(copies.double().var()) - noise
    return (float(copies.mean()), math.sqrt(variance)) if variance > noise else (math.nan, math.nan)


def _copy(x: Tensor) -> Tensor:
    """Small grey copies of images (B, C, H, W)."""
    height, width = (min(side, _SIDE) for side in x.shape[2:])
    return functional.adaptive_avg_pool2d(x.mean(1), (height, width))
