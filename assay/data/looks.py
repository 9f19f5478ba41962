"""What is seen in one image, quickly: its values, noise, small copy and blocks, for `assay.data.notes`."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from assay.data.audit.kind import detail
from assay.data.audit.level import MIN_SIDE, blind_net, spread
from assay.data.copies import NUM_KNOWN, SMALL, blocks_of, has_blocks, small_copy

_NUM_MEASURED = 192  # images of each source whose noise is measured
_MAX_SIDE = 256  # of their parts in which its kind is looked at
_LONGEST = 8  # times as long as wide that images may be
_MAX_AT_ENDS = 0.1  # of the values of a noisy image that may equal its lowest or highest
_SELDOM = 0.05  # of the values in the middle of an image
_SMOOTH = 0.05  # deviation of the finest detail of the log of a map

# What images may have: what to say of the `num` that do. {0} and {1} are the means of what was noted.
CLIPPED = (
    "{num:,} noisy images are 8-bit: rounding to 256 steps and clipping at black and white "
    "({0:.1%} of their values) break the Gaussian noise that training assumes. Use the float originals if you "
    "have them."
)
CUT = (
    "{num:,} noisy images have {0:.1%} of their values at their lowest or highest: clipped noise is not "
    "the Gaussian noise that training assumes. Use the originals if you have them."
)
EQUAL = "{num:,} noisy images have {0:.0f} equal channels, whose noise is not independent: save one channel"
LOSSY = "{num:,} noisy images were compressed with loss (JPEG), which removes noise: use the originals"
BORDER = (
    "{num:,} noisy images have a border of one value, which has no noise: if it was added, cut it off, or "
    "training takes it for noisy"
)
FLAT = "{num:,} images have one value everywhere: they show nothing"
OPACITY = "{num:,} images have a channel of opacity, left out; what is transparent is laid on white"
DARKER = (
    "{0:.1%} of values of {num:,} images are far below `black` ({1:g}): is it right, or subtracted already?"
)


class Looks(NamedTuple):
    """What is seen in an image itself."""

    values: tuple[float, float, float]  # lowest, mean and highest, as in the file
    dtype: str  # of these
    found: dict[str, tuple[float, ...]]  # which of the above, with numbers
    small: Tensor | None  # copy (H, W)
    noise: float  # its variance in the small copy
    blocks: np.ndarray | None  # their hashes, of some images
    tint: float  # of colours: by how much the first exceeds the third, else NaN
    jumps: tuple[float, float, float]  # see `_jumps`
    levels: Sequence[float] = ()  # of some images: as stated, as measured and 95% interval; black to white is 2
    middle: Tensor = torch.empty(0)  # of those (C, H, W)
    sigma_map: Tensor | None = None  # of the noise there, if it varies


def look_at(x: np.ndarray, sigma: float | np.ndarray, i: int, num_images: int, files: np.ndarray) -> Looks:
    """What is seen in image i (C, H, W) of a source with these values, quickly.

    Levels are measured of few images.
    """
    found, noisy = dict[str, tuple[float, ...]](), np.max(sigma) > 0
    low, high = files.min(), files.max()
    if noisy and files.dtype == np.uint8:
        found[CLIPPED] = (float(np.isin(files, (0, 255)).mean()),)
    elif noisy and np.ndim(sigma) == 0:
        at_ends = int(np.isin(files, (low, high)).sum())
        if at_ends - 2 > _MAX_AT_ENDS * files.size and at_ends < files.size:  # two values always are
            found[CUT] = (at_ends / files.size,)
    if noisy and len(x) > 2 and (x == x[:1]).all():
        found[EQUAL] = (len(x),)
    if low == high:
        found[FLAT] = ()
    elif noisy and np.ndim(sigma) == 0 and _has_border(x):
        found.pop(CUT, None)  # these are its values
        found[BORDER] = ()
    image = torch.from_numpy(x.astype(np.float32))[None]
    small = small_copy(image)[0] if i % -(-num_images // NUM_KNOWN) == 0 else None
    noise = float(np.square(sigma).mean()) * min(x.shape[1], SMALL) * min(x.shape[2], SMALL) / x.size
    blocks = blocks_of(x) if has_blocks(i, num_images) else None
    tint = float(x[0].mean() - x[2].mean()) if len(x) == 3 else math.nan
    values = float(low), float(files.mean()), float(high)
    looks = Looks(values, files.dtype.name, found, small, noise, blocks, tint, _jumps(files))
    if i not in spread(num_images, _NUM_MEASURED) or min(x.shape[1:]) < MIN_SIDE:
        return looks
    levels = _levels(image, sigma)
    rows, columns = (slice(max(0, side - _MAX_SIDE) // 2, (side + _MAX_SIDE) // 2) for side in x.shape[1:])
    sigma_map = None if np.ndim(sigma) == 0 else torch.tensor(sigma, dtype=torch.float32)[:, rows, columns]
    middle = image[0, :, rows, columns].clone()
    return looks._replace(levels=levels, middle=middle, sigma_map=sigma_map)


def _has_border(x: np.ndarray) -> bool:
    """Whether all sides of an image (C, H, W) have one value that hardly occurs in its middle."""
    sides = np.concatenate([side.ravel() for side in (x[:, 0], x[:, -1], x[..., 0], x[..., -1])])
    top, left = (side // 4 for side in x.shape[1:])
    middle = x[:, top : x.shape[1] - top, left : x.shape[2] - left]
    return bool(np.ptp(sides) == 0 and (middle == sides[0]).mean() < _SELDOM)


def _levels(x: Tensor, sigma: float | np.ndarray) -> list[float]:
    """The noise of an image (1, C, H, W) as stated and as measured, with its interval.

    Divided by a smooth map, the noise has one level. A rough map would make structure rough: of what it states,
    the nearest to the measured level counts.
    """
    level_map = torch.as_tensor(sigma, dtype=torch.float32)
    if level_map.ndim == 3 and level_map.min() > 0 and detail(level_map[None].log()).std() < _SMOOTH:
        stated = float(level_map.square().mean().sqrt())
        return [stated, *blind_net().levels(x / level_map * stated).flatten().tolist()]
    levels = blind_net().levels(x).flatten().tolist()
    return [float(np.clip(levels[0], *np.quantile(sigma, (0.05, 0.95)))), *levels]


def _jumps(files: np.ndarray) -> tuple[float, float, float]:
    """Of whole numbers: the shares at the ends of their type, that jump far between them, and all the way."""
    if files.dtype.kind not in "iu":
        return 0.0, 0.0, 0.0
    ends = np.iinfo(files.dtype)
    inside, span = (files > ends.min) & (files < ends.max), float(ends.max) - ends.min
    jump = abs(np.diff(files.astype(np.float64), axis=1)) * (inside[:, 1:] & inside[:, :-1])  # along any side
    return 1 - inside.mean(), (jump > 0.78 * span).mean(), (jump > 0.94 * span).mean()


def rules_out(x: np.ndarray, sigma: float) -> bool:
    """Whether an image varies by less than noise of this level does.

    The variance of n pixels with noise sigma alone is sigma^2 up to sigma^2 sqrt(2 / n); less by six of these
    deviations rules the level out. Clipping or a border of a share s takes away up to 2 s of the variance.
    """
    if np.var(x) >= sigma**2:
        return False
    counts = np.unique(x, return_counts=True)[1]
    repeated = counts[list({0, int(counts.argmax()), len(counts) - 1})].sum() if len(counts) > 1 else 0
    return bool(np.var(x) < sigma**2 * (1 - (2 * repeated) / x.size - 6 * math.sqrt(2 / x.size)))


def odd_axes(shape: tuple[int, ...]) -> str | None:
    """What to say of an array (N, H, W, ...) whose images are perhaps not the first axis."""
    num, height, width = shape[:3]
    if num < 2 or not (num == height != width or max(height, width) > _LONGEST * min(height, width)):
        return None
    read = f"is read as {num} images of {height} x {width} pixels"
    if width in (3, 4):
        return f"{read}. If it is one colour image, add an axis in front (`image[None]`)"
    return f"{read}. If it holds {width} images of {num} x {height}, move its last axis to the front"
