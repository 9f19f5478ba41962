"""What a user should know about images before training: values, levels, axes and copies that look wrong.

Each image that is packed leaves a `Note`; `Notes` turns them into sentences that name what was stated and what
was found.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from assay.data.audit.group import stripes
from assay.data.audit.kind import correlates, depends, leaves_its_map, repeats
from assay.data.copies import FEWEST, SCENES, Pair, are_turned, find_shared, find_twins, unlike
from assay.data.looks import Looks
from assay.data.units import ends_around

_USED = 0.26  # of the range that all images of a source should use, or half of it: 8 of 10 bits do not
_BELOW = 0.02  # of the range, by which noise may reach below black
_TEXTURE = 0.05  # what may look like noise in small images, where black to white is 2
_TEXTURE_STABILISED = 0.02  # for a sensor, whose levels are low; errors then count in full
_AGREE = math.log(1.3)  # how far measured levels may be off, beyond their error
_AGREE_STABILISED = math.log(1.2)  # below that of a sensor, which no texture explains
_LEAST_SIDE = 12  # of clean images whose noise is judged
_SURELY_NOISE = 0.2  # low end of the level of a clean image that no texture reaches
_SURELY_LESS = 0.6  # times the stated level of a noisy image, that the high end of its own never falls below
_SPREAD = math.log(1.3)  # of stated levels whose order is compared with that of measured ones
_MIN_ORDER = 0.3  # their rank correlation
_THIRDS = 0.7  # correlation of the thirds of clean images, as of the colours of one
_MIN_COLOURS = 0.2  # correlation of the colours of clean images
_MIN_JUMPS, _JUMPS_PER_END = 1e-3, 0.3  # of pixels, and of those that are black or white, if 8 bits overflowed
_MOST_SHEARED = 16  # pixels by which a width may be wrong
_MIN_SHEAR = 0.03  # by how much the right shift of rows raises their correlation
_SEAM = 0.3, 3.0  # squared difference of the end of a row and the start of the next, over that of neighbours
_TORN = 0.5  # by how much rows of pixels correlate less with those above than columns beside each other


class Note(NamedTuple):
    """What was seen while an image was packed. Values are in the units of the file."""

    name: str
    sigma: float  # noise, where black to white is 2
    black_and_white: tuple[float, float]
    content: int  # a hash
    source: int
    group: int  # images that are held out together
    looks: Looks


def _sheared(x: Tensor) -> int:
    """By how much rows of images (N, C, H, W) of mean 0 and deviation 1 have a wrong width; 0 if not."""
    width = x.shape[-1]
    most = min(_MOST_SHEARED, width // 4)

    def alike(lag: int) -> Tensor:
        below, above = x[:, :, 1:, max(0, lag) :], x[:, :, :-1, max(0, -lag) :]
        width = min(below.shape[-1], above.shape[-1])
        return (below[..., :width] * above[..., :width]).mean((1, 2, 3))

    found = torch.stack([alike(lag) for lag in range(-most, most + 1)])
    best = found.argmax(0)
    mode = int(best.mode().values)
    gain = float((found[mode] - found[most]).mean())
    is_common = float((best == mode).double().mean()) > 0.5
    seam = float((x[:, :, :-1, -1] - x[:, :, 1:, 0]).square().mean() / x.diff().square().mean())
    return mode - most if is_common and gain > _MIN_SHEAR and _SEAM[0] < seam < _SEAM[1] else 0


def _alike(images: Sequence[Tensor]) -> float:
    """How the three rows (3, P) of images correlate on average; NaN of few images."""
    with np.errstate(invalid="ignore"):
        found = np.array([np.corrcoef(x)[np.triu_indices(3, 1)].mean() for x in images])
    found = found[np.isfinite(found)]
    return float(found.mean()) if len(found) >= FEWEST else math.nan


def _other_units(sigma: float, measured: float, span: float) -> str:
    """What to say of a level that is right in other units than those of files with this black to white."""
    if not sigma or not measured:
        return ""
    for name, factor in {"0 to 255": span / 255, "-1 to 1": span / 2, "0 to 1": span}.items():
        if abs(math.log(measured / sigma / factor)) < _AGREE < abs(math.log(factor)):
            return f". If it is of images from {name}, multiply it by {factor:.4g}"
    if abs(math.log(measured**2 / sigma)) < _AGREE:
        return ". If it is a variance, give its square root"
    return ""


class _Seen:
    """The notes of one source, of files of one type: 8-bit and 12-bit pictures differ in range."""

    def __init__(self, name: str, dtype: str, black_and_white: tuple[float, float], in_files: bool) -> None:
        self.name, self.dtype, self.black_and_white, self.in_files = name, dtype, black_and_white, in_files
        self.rows: list[np.ndarray] = []  # of each image: its level, the numbers of its looks
        self.measured: list[Looks] = []

    def add(self, note: Note) -> None:
        """Take in a note."""
        looks = note.looks
        self.rows.append(np.array([note.sigma, *looks.values, looks.tint, *looks.jumps]))
        self.measured += [looks] if looks.levels else []

    @property
    def noise(self) -> float:
        """The highest level."""
        return float(max(row[0] for row in self.rows))

    @property
    def levels(self) -> np.ndarray:
        """Stated, measured and its interval, (N, 4)."""
        return np.array([looks.levels for looks in self.measured]).reshape(-1, 4)

    @property
    def clean(self) -> list[Tensor]:
        """Parts (C, H, W) of the measured images without noise."""
        return [looks.middle for looks in self.measured if looks.noise == 0]

    def far_off(self, stabilised: bool) -> tuple[float, float] | None:
        """Stated and measured level, if they differ: those of the source, or of the worst if many images do."""
        both, ends = np.hsplit(self.levels, 2)
        if self.noise == 0 and min(self.measured[0].middle.shape[1:]) < _LEAST_SIDE:
            return None  # what is clean there may be all texture
        texture, least = (_TEXTURE_STABILISED, 1.0) if stabilised else (_TEXTURE, 0.0)
        ratio = np.log(np.hypot(both, texture)) @ (1, -1)
        error = np.log(np.maximum(ends, 1e-9)) @ (-1, 1) / (2 * 1.96)
        found = both[[abs(ratio).argmax()]]
        (low, middle, high), surely = np.quantile(ratio, (0.25, 0.5, 0.75)), 3.75 / math.sqrt(len(both))
        # No texture makes noise measure less than it is: then the spread of the images is their error.
        is_less = stabilised and len(both) >= FEWEST and middle > _AGREE_STABILISED + surely * (high - low)
        if is_less or abs(middle) > _AGREE + max(least, surely) * np.median(error):
            found = both[abs(ratio) >= min(_AGREE, abs(middle))]  # of a mix, the clean or the noisy images
        elif (abs(ratio) > _AGREE + 2 * error).mean() <= 0.25:
            return None
        return float(np.quantile(found[:, 0], 0.5, method="lower")), float(np.median(found[:, 1]))

    def of_few(self, unit: float, doubt: str) -> Iterator[str]:
        """What of a few of the images, clean or noisy ones, surely has another level than stated."""
        stated, measured, low, high = self.levels.T
        if min(self.measured[0].middle.shape[1:]) < _LEAST_SIDE:
            return
        is_clean = stated == 0
        many = is_clean & (low > _SURELY_NOISE / 2)
        is_noisy = many if many.sum() > max(1, is_clean.sum() / 10) else is_clean & (low > _SURELY_NOISE)
        noisy = "have noise of about {:.3g}, but count as clean: are noisy ones among them?"
        less = f"have far less noise than stated (about {{:.3g}}): {doubt}are clean ones among them?"
        for kind, num_there, is_stray, rest in (
            ("clean", is_clean.sum(), is_noisy, noisy),
            ("noisy", (~is_clean).sum(), high < _SURELY_LESS * stated, less),
        ):
            if (num := int(is_stray.sum())) > 1:
                level = unit * float(np.median(measured[is_stray]))
                what = f"{num} of the {num_there} {kind} images of {self.name} whose noise was measured"
                yield f"{what} {rest.format(level)}"

    def of_values(self, cure: str) -> Iterator[str]:
        """What of its values looks wrong; `cure` says how to give a range."""
        sigma, lowest, mean, highest, _, at_ends, far, farther = np.transpose(self.rows)
        (black, white), low, high, noisy = self.black_and_white, lowest.min(), highest.max(), sigma > 0
        # The mean of noisy images and any value of clean ones may lie far beyond the range.
        middle = (black + white) / 2
        off = np.where(noisy, abs(mean - middle) / 0.75, np.maximum(highest - middle, middle - lowest))
        num_beyond = int((off > white - black).sum())
        is_bright = black == -white and low + 5 * min(self.noise, 0.2) * white >= 0  # 0 may be black
        is_bright &= low + high > white / 4  # and not the middle
        between = f"between {low:.4g} and {high:.4g}"
        stated = f"where black and white are {black:g} and {white:g}: is their range right?{cure}"
        if num_beyond:
            yield f"{num_beyond:,} images of {self.name} have values {between}, {stated}"
        elif min(2 * (high - low), high - black) < _USED * (white - black) or is_bright:
            fits = (
                "" if cure or high <= low else " `range={:g},{:g}` fits them.".format(*ends_around(low, high))
            )
            deep = " 12-bit data have a range of 0,4095." if white == 65535 and 1023 < high < 4096 else ""
            yield f"all {self.dtype} pixels of {self.name} lie {between}, {stated}{fits}{deep}"
        margin = _BELOW * (white - black)
        below, rest = (
            ~noisy & (lowest < black - margin),
            ~noisy & (lowest >= black),
        )  # which mostly are black there
        are_few = 1 < below.sum() <= rest.sum() / 3 and below.sum() + rest.sum() == (~noisy).sum()
        if are_few and np.median(lowest[rest]) < black + margin:
            what = f"{below.sum()} of the {(~noisy).sum()} clean images of {self.name} have values below black"
            yield f"{what}, down to {lowest[below].min():.4g}, and the others none: are they noisy?"
        are_many = noisy.sum() >= FEWEST and self.dtype != "uint8"
        if are_many and np.ptp(lowest[noisy]) == np.ptp(highest[noisy]) == 0:
            what = f"all noisy images of {self.name} have values {between}"
            yield f"{what}, exactly: if each was scaled to these ends, its noise was too; use the originals"
        if far.mean() > max(_MIN_JUMPS, _JUMPS_PER_END * at_ends.mean()) and farther.mean() > _MIN_JUMPS / 5:
            what = f"{far.mean():.1%} of the pixels of {self.name} jump between nearly the ends of {self.dtype}"
            yield f"{what}, but few are there: did values beyond them wrap round? Clip them before rounding"

    def of_rows(self) -> Iterator[str]:
        """Pixels of clean images continue those above hardly less than those beside, if rows are rows."""
        seen = [x for x in self.clean if x.std() > 0]
        if len(seen) < FEWEST:
            return
        found = torch.stack([(x - x.mean()) / x.std() for x in seen])
        less = float((found[..., :-1] * found[..., 1:]).mean() - (found[:, :, :-1] * found[:, :, 1:]).mean())
        width = found.shape[-1]
        if less > _TORN:
            what = f"rows of pixels of {self.name} hardly continue those above (correlation lower by {less:.2f}"
            yield f"{what} than of columns): are width and height in the right order?"
        elif wider := _sheared(found):
            what = f"rows of pixels of {self.name} continue those above best {abs(wider)} to the side, and each"
            yield f"{what} begins where the one above ends: is the width {width + wider} instead of {width}?"

    def of_colours(self) -> Iterator[str]:
        """The three colours of a picture have much in common."""
        seen = [x for x in self.clean if len(x) == 3]
        if (colours := _alike([x.flatten(1) for x in seen])) < _MIN_COLOURS:
            what = f"the three channels of clean images of {self.name} hardly correlate ({colours:.2f})"
            yield f"{what}: are they colours of one picture, or pages of a stack?"
        # Colours that were axis 1 lie behind each other in memory, as thirds of each image.
        if (thirds := _alike([x.movedim(0, -1).reshape(3, -1) for x in seen])) > _THIRDS:
            what = f"the thirds of clean images of {self.name} are alike (correlation {thirds:.2f})"
            yield f"{what}: were colours the first axis of each image? Transpose, instead of a reshape"

    def of_levels(self) -> Iterator[str]:
        """What of its noise looks wrong."""
        (black, white), correlated = self.black_and_white, ""
        unit, stabilised = (white - black) / 2 if self.in_files else 1.0, self.noise > 0 and not self.in_files
        seen = [looks for looks in self.measured if looks.noise > 0 and looks.sigma_map is None]
        if len(seen) >= FEWEST:
            images, (stated, found) = [x.middle for x in seen], np.transpose([x.levels[:2] for x in seen])
            correlated = correlates(self.name, images, found)
            striped = stripes(images)
            kind = correlated or (f"in {self.name}, {striped}" if striped else "")
            if kind := kind or ("" if stabilised else depends(self.name, images, stated)):
                yield f"{kind}. `assay data noise` tells more"
            yield from repeats(self.name, images, stated)
        levels = self.far_off(stabilised) if self.measured else None
        if self.measured and (order := self.order()) < _MIN_ORDER:
            words = f"the levels of {self.name} hardly follow those that the noise measures"
            yield f"{words} (rank correlation {order:.2f}): are they in the order of the images?"
        elif levels and not (correlated and levels[0] > levels[1]):  # which measures less than there is
            sigma, measured = (unit * level for level in levels)
            words = f"is said to have noise of {sigma:.3g}" if sigma else "has images that count as clean"
            doubts = "and in the units of the images" if sigma else "and are the axes in order"
            cure = f"is `sigma` right, {doubts}? `assay data noise` measures it"
            cure += _other_units(sigma, measured, white - black) * self.in_files
            if stabilised:
                words = f"should have noise of {sigma:.3g} once it is stabilised"
                cure = "are gain (of values, per photon), read_noise and black right? `assay data noise` helps"
            yield f"{self.name} {words}, but the noise measures {measured:.3g}: {cure}"
        elif self.measured:
            yield from self.of_few(unit, "are black, gain and read_noise right, or " * stabilised)
        with_map = [(looks.middle, looks.sigma_map) for looks in self.measured if looks.sigma_map is not None]
        if len(with_map) >= FEWEST:
            yield from leaves_its_map(self.name, *map(torch.stack, zip(*with_map, strict=True)))

    def redness(self) -> float:
        """By how much the first channel of colour images exceeds the third; NaN if that is not sure."""
        tints = np.array(self.rows)[:, 4]
        is_sure = len(tints) >= FEWEST and abs(tints.mean()) > 4 * tints.std() / math.sqrt(len(tints))
        return float(tints.mean()) if is_sure else math.nan

    def order(self) -> float:
        """The rank correlation of stated and measured levels, if these spread well beyond their errors."""
        stated, measured, low, high = self.levels[self.levels[:, 0] > 0].T
        if len(stated) < FEWEST or np.ptp(np.log(stated)) < _SPREAD:
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
        self._different: list[Note] = []
        self._copies: list[str] = []
        self._found: dict[str, list[tuple[float, ...]]] = defaultdict(list)  # by what to say of it

    def add(self, note: Note) -> None:
        """Take in the note of an image that was packed."""
        kind, name = (note.source, note.looks.dtype), self._names[note.source]
        if kind not in self._seen:
            self._seen[kind] = _Seen(name, note.looks.dtype, note.black_and_white, self._in_files)
        self._seen[kind].add(note)
        self._num_images += 1
        if (first := self._first.setdefault(note.content, note.name)) != note.name:
            self._copies.append(f"{note.name} of {first}")
        elif note.looks.small is not None:
            self._different.append(note)
        for sentence, values in note.looks.found.items():
            self._found[sentence].append(values)

    def warnings(self) -> list[str]:
        """What looks wrong, in sentences."""
        told = list[str]()
        for seen in self._seen.values():
            told += [*seen.of_values(self._cure), *seen.of_rows(), *seen.of_colours(), *seen.of_levels()]
        for one, other in combinations(self._seen.values(), 2):
            here, there = one.redness(), other.redness()
            if 2 * abs(here + there) < abs(here - there):
                what = f"mean colours of {one.name} and {other.name} agree if red and blue change places"
                told.append(f"{what}: is one BGR?")
        for sentence, values in self._found.items():
            told.append(sentence.format(*np.mean(values, axis=0), num=len(values)))
        if num := len(self._copies):
            which = ", ".join(self._copies[:3]) + (", ..." if num > 3 else "")
            told.append(f"{num:,} of the {self._num_images:,} images are copies ({which}): leave them out")
        return [*told, *self._compared()]

    def _compared(self) -> Iterator[str]:
        """Sources of another scale, images of one scene, and images that share pixels."""
        if not self._different:
            return
        seen = self._different
        small = torch.stack([note.looks.small for note in seen if note.looks.small is not None])
        variance, every = torch.tensor([note.looks.noise for note in seen]), torch.arange(len(seen))
        source = torch.tensor([note.source for note in seen])
        once = torch.from_numpy(np.unique([note.group for note in seen], return_index=True)[1]).sort().values
        noisy, clean = (once[kind[once]] for kind in (variance > 0, variance == 0))  # of groups that are known
        first, *others = [every[source == number] for number in source.unique()]
        for other in others:
            kinds = f"images like {seen[int(first[0])].name} and like {seen[int(other[0])].name}"
            noise = [float(variance[part].mean()) for part in (first, other)]
            if differ := unlike((small[first], noise[0]), (small[other], noise[1])):
                yield f"{kinds} have {differ}"
            elif are_turned(small[first], small[other]):
                what = f"{kinds} are alike on average if one kind is turned, flipped or transposed"
                yield f"{what}: are their axes in the same order?"
        if self._named:
            yield self._named
        elif found := find_twins(small, variance, noisy, once) or find_twins(small, variance, clean, clean):
            which = f"{found[0]} images show the scene of another ({self._pair(found)})"
            yield f"{which}: they teach no new scene, and what is held out must show others"
        if found := find_twins(small, variance, every, every, brighter=True):
            which = f"brighter or darker ({self._pair(found)})"
            yield f"{found[0]} clean images are others, {which}: leave them out"
        group = np.array([note.group for note in seen])
        blocks = {i: note.looks.blocks for i, note in enumerate(seen) if note.looks.blocks is not None}
        if found := find_shared(blocks, group):
            what = f"{found[0]} images share pixels with another ({self._pair(found)})"
            what += ": are they overlapping crops, or shifted, flipped or turned copies?"
            yield f"{what} Images held out must share none: leave copies out, or {SCENES}"

    def _pair(self, found: Pair) -> str:
        return " and ".join(self._different[i].name for i in found[1:])
