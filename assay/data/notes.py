"""What a user should know about a store that could be packed: values, levels and copies that look wrong.

Each image leaves a `Note`; `Notes` turns them into sentences that name what was stated and what was found.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from assay.data.audit.level import MIN_SIDE, blind_net
from assay.data.units import Stabilised

_NUM_MEASURED = 16  # images of each source whose noise is measured
_USED = 1 / 8  # of the range from black to white that all images of a source should use
_NOISE_OF_CLEAN = 0.05  # the noise, where black to white is 2, that an image called clean should not have


@dataclass(frozen=True)
class Note:
    """What was seen while an image was packed. Values are in the units of the file."""

    source: int  # the number of its source
    sigma: float  # noise, where black to white is 2
    values: tuple[float, float, float]  # lowest, mean and highest
    black_and_white: tuple[float, float]
    content: int  # a hash
    is_faint: bool = False  # its content varies less than its noise
    opacity: str = ""  # what became of it
    clipped: float | None = None  # share of values at the ends, of noisy 8-bit files
    kernel_sum: float | None = None  # if it is not 1
    dark: float | None = None  # share of pixels with too few photons
    is_deep: bool = False  # a 16-bit file without a range
    measured: tuple[float, float, float] | None = None  # its noise and 95 % interval, where black to white is 2


def measure(x: np.ndarray) -> tuple[float, float, float] | None:
    """The noise of an image (C, H, W) and its 95 % interval, quickly; None if it is too small."""
    if min(x.shape[1:]) < MIN_SIDE:
        return None
    found = blind_net().levels(torch.from_numpy(x.astype(np.float32))[None])
    return float(found.sigma), float(found.low), float(found.high)


def share_at(x: np.ndarray, ends: tuple[float, float], black_and_white: tuple[float, float]) -> float:
    """The share of an image from -1 to 1 at two values of its file, where noise may have been clipped."""
    black, white = black_and_white
    scaled = [(end - black) * (2 / (white - black)) - 1 for end in ends]
    return float((np.isclose(x, scaled[0]) | np.isclose(x, scaled[1])).mean())


@dataclass
class _Seen:
    """The notes of one source."""

    name: str
    lowest: float = math.inf
    highest: float = -math.inf
    num_beyond: int = 0
    last: Note | None = None
    levels: list[tuple[float, float, float, float]] = field(default_factory=list)  # stated, measured, interval

    def warnings(self, in_files: bool) -> list[str]:
        """What of its values and levels looks wrong."""
        if self.last is None:
            return []
        black, white = self.last.black_and_white
        found, between = [], f"between {self.lowest:.4g} and {self.highest:.4g}"
        stated = f"where black and white are {black:g} and {white:g}: is `range` right?"
        if self.num_beyond:
            found.append(f"{self.num_beyond:,} images of {self.name} have values {between}, {stated}")
        elif self.highest - self.lowest < _USED * (white - black):
            deep = " 12-bit data in 16-bit files have a range of 0,4095." if self.last.is_deep else ""
            found.append(f"all pixels of {self.name} lie {between}, {stated}{deep}")
        unit = (white - black) / 2 if in_files else 1
        for is_clean in (True, False):
            levels = [level for level in self.levels if (level[0] == 0) == is_clean]
            wrong = [level for level in levels if _is_wrong(*level)]
            if len(wrong) > len(levels) / 2:
                sigma, measured = (float(np.median([level[at] for level in wrong])) * unit for at in (0, 1))
                words = "counts as clean" if is_clean else f"is said to have noise of {sigma:.3g}"
                found.append(
                    f"{self.name} {words}, but its noise measures {measured:.3g}: is `sigma` right, and in the "
                    "units of the files? `assay data noise` tells more"
                )
        return found


class Notes:
    """The notes of all images, as warnings. `sensor`: the images are stabilised."""

    def __init__(self, sources: Sequence[str], sensor: Stabilised | None) -> None:
        self.sensor = sensor
        self._sources = [_Seen(name) for name in sources]
        self._num_images = self._num_faint = 0
        self._contents: set[int] = set()
        self._clipped: list[float] = []
        self._dark: list[float] = []
        self._sums: list[float] = []
        self._opacity: Counter[str] = Counter()

    def add(self, note: Note) -> None:
        """Take in the note of an image that was packed."""
        seen = self._sources[note.source]
        seen.lowest, seen.highest = min(seen.lowest, note.values[0]), max(seen.highest, note.values[2])
        seen.num_beyond += _is_beyond(note)
        seen.last = note
        if note.measured is not None:
            seen.levels.append((note.sigma, *note.measured))
        self._num_images += 1
        self._num_faint += note.is_faint
        self._contents.add(note.content)
        for value, values in (
            (note.clipped, self._clipped),
            (note.dark, self._dark),
            (note.kernel_sum, self._sums),
        ):
            values.extend([] if value is None else [value])
        self._opacity.update([note.opacity] if note.opacity else [])

    def warnings(self) -> list[str]:
        """What looks wrong, in sentences."""
        found = [text for source in self._sources for text in source.warnings(self.sensor is None)]
        if self.sensor is not None and any(self._dark):
            found.append(
                f"about {np.mean(self._dark):.1%} of the noisy pixels have a mean below "
                f"{self.sensor.smallest_count():.1f} photons: their stabilised noise differs from its level by "
                "more than 3 %"
            )
        if self._clipped:
            found.append(
                f"{len(self._clipped):,} noisy images come from 8-bit files: rounding to 256 steps and "
                f"clipping at black and white ({np.mean(self._clipped):.1%} of their values) break the "
                "Gaussian noise that training assumes. Pack the float originals if you have them."
            )
        if self._num_faint:
            check = "is `sigma`" if self.sensor is None else "are `gain`, `read_noise` and `black`"
            found.append(
                f"{self._num_faint:,} noisy images vary less by their content than by their noise: {check} in "
                "the units of the files, and `range` right?"
            )
        if self._sums:
            ends = sorted({f"{end:.4g}" for end in (min(self._sums), max(self._sums))}, key=float)
            found.append(
                f"{len(self._sums):,} images have a kernel that sums to {' to '.join(ends)}, not to 1: divide "
                "it by its sum, unless the optics also lose light"
            )
        for what, count in self._opacity.items():
            found.append(f"{count:,} images have a channel of opacity, which was {what}")
        if num_copies := self._num_images - len(self._contents):
            found.append(
                f"{num_copies:,} of the {self._num_images:,} images are copies of others: leave them out"
            )
        return found


def _is_wrong(sigma: float, measured: float, low: float, high: float) -> bool:
    """Whether a stated level is far from the measured one and its interval."""
    return low > _NOISE_OF_CLEAN if sigma == 0 else not low / 2 <= sigma <= 2 * high


def _is_beyond(note: Note) -> bool:
    """Whether values are far beyond black and white: of noisy images their mean, of clean ones any."""
    black, white = note.black_and_white
    middle, span = (black + white) / 2, white - black
    if note.sigma > 0:
        return abs(note.values[1] - middle) > 0.75 * span
    return max(note.values[2] - middle, middle - note.values[0]) > span


def chosen(num_images: int) -> set[int]:
    """The images of a source whose noise is measured, evenly spread."""
    return set(np.linspace(0, num_images - 1, min(num_images, _NUM_MEASURED)).round().astype(int).tolist())
