"""What a user should know about a store that could be packed: values, levels and copies that look wrong.

Each image leaves a `Note`; `Notes` turns them into sentences that name what was stated and what was found.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from assay.data.audit.level import MIN_SIDE, blind_net
from assay.data.units import Stabilised

_NUM_MEASURED = 16  # images of each source whose noise is measured
_USED = 1 / 8  # of the range from black to white that all images of a source should use
_NOISE_OF_CLEAN = 0.05  # the noise, where black to white is 2, that an image called clean should not have

# What images may have, and what to say of the `num` that do: the values that were noted are `mean` on average.
FAINT, CLIPPED, FLATTENED, OPAQUE, DARK = "faint clipped flattened opaque dark".split()
_SENTENCES = {
    DARK: "about {mean:.1%} of the noisy pixels have a mean below {fewest:.1f} photons: their stabilised noise "
    "differs from its level by more than 3%",
    CLIPPED: "{num:,} noisy images come from 8-bit files: rounding to 256 steps and clipping at black and "
    "white ({mean:.1%} of their values) break the Gaussian noise that training assumes. Pack the float "
    "originals if you have them.",
    FAINT: "{num:,} noisy images vary less by their content than by their noise: is `sigma` (or are `gain`, "
    "`read_noise` and `black`) in the units of the files, and `range` right?",
    FLATTENED: "{num:,} images have a channel of opacity, which was laid on white",
    OPAQUE: "{num:,} images have a channel of opacity, which was left out: nothing is transparent",
}


@dataclass(frozen=True)
class Note:
    """What was seen while an image was packed. Values are in the units of the file."""

    sigma: float  # noise, where black to white is 2
    values: tuple[float, float, float]  # lowest, mean and highest
    black_and_white: tuple[float, float]
    content: int  # a hash
    is_deep: bool  # a 16-bit file without a range
    found: dict[str, float]  # what of the above, with a number
    measured: tuple[float, float, float] | None  # its noise and 95% interval, where black to white is 2
    source: int = 0  # the number of its source


def measure(x: np.ndarray, i: int, num_images: int) -> tuple[float, float, float] | None:
    """The noise of image i (C, H, W) of a source and its 95% interval, quickly; None for most, or if small."""
    chosen = np.linspace(0, num_images - 1, min(num_images, _NUM_MEASURED)).round()  # evenly spread
    if i not in chosen or min(x.shape[1:]) < MIN_SIDE:
        return None
    sigma, low, high = blind_net().levels(torch.from_numpy(x.astype(np.float32))[None]).flatten().tolist()
    return sigma, low, high


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

    def add(self, note: Note) -> None:
        """Take in the note of one of its images."""
        self.lowest, self.highest = min(self.lowest, note.values[0]), max(self.highest, note.values[2])
        self.num_beyond += _is_beyond(note)
        self.last = note
        self.levels += [(note.sigma, *note.measured)] if note.measured else []

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
                    "units of the files? `assay data noise` measures it"
                )
        return found


class Notes:
    """The notes of all images, as warnings. `sensor`: the images are stabilised."""

    def __init__(self, sources: Sequence[str], sensor: Stabilised | None) -> None:
        self.sensor = sensor
        self._sources = [_Seen(name) for name in sources]
        self._num_images = 0
        self._contents: set[int] = set()
        self._found: dict[str, list[float]] = defaultdict(list)

    def add(self, note: Note) -> None:
        """Take in the note of an image that was packed."""
        self._sources[note.source].add(note)
        self._num_images += 1
        self._contents.add(note.content)
        for what, value in note.found.items():
            self._found[what].append(value)

    def warnings(self) -> list[str]:
        """What looks wrong, in sentences."""
        told = [text for source in self._sources for text in source.warnings(self.sensor is None)]
        fewest = self.sensor.smallest_count() if self.sensor else 0.0
        for what, sentence in _SENTENCES.items():
            values = self._found[what]
            if values and (what != DARK or any(values)):
                told.append(sentence.format(num=len(values), mean=np.mean(values), fewest=fewest))
        if num_copies := self._num_images - len(self._contents):
            told.append(f"{num_copies:,} of the {self._num_images:,} images are copies: leave them out")
        return told


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
