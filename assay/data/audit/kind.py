"""Kinds of noise that levels do not describe: what to say of the noise of one source, if anything.

The finest detail of an image, its second difference along both axes, is mostly noise unless texture prevails.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from assay.data.audit.group import fit_sensor, is_correlated, neighbour_correlation

_KERNEL = torch.tensor([[[[1.0, -2, 1], [-2, 4, -2], [1, -2, 1]]]]) / 6  # white noise keeps its variance
_ALIKE = 0.5  # correlation of what should be independent
_SURELY = 10.0  # times 1 / sqrt(pixels), the least that this may be in a pair of images
_UNLIKE = 1.5  # times the lowest of the levels of channels
_ONE_LEVEL = 1.3  # times the lowest of the levels of images that count as one
_PREVAILS = 1.7  # times the variance of the noise that its detail may have
_MIN_FOLLOWED = 0.3  # correlation of the levels of a map with those of the noise
_VARIED = 1.7  # times the variance at the quiet end of a map that is compared


def correlates(name: str, images: Sequence[Tensor], measured: Sequence[float]) -> str:
    """What to say of noise that is not white."""
    white = neighbour_correlation(images, measured)
    if not is_correlated(white):
        return ""
    what = f"the noise of neighbouring pixels of {name} correlates ({white.value:.2f}; white: 0)"
    return f"{what}, as after resizing or compression, if it is not texture: use unprocessed images if you can"


def depends(name: str, images: Sequence[Tensor], stated: Sequence[float]) -> str:
    """What to say of noise that grows with the signal, other than by clipping."""
    if max(stated) > _ONE_LEVEL * min(stated):
        return ""
    bounds = min(float(x.min()) for x in images), max(float(x.max()) for x in images)
    sensor = fit_sensor(images, bounds)
    if sensor is None or (ratio := sensor.dependence()) == 1:
        return ""
    what = f"the noise of {name} depends on the signal: its variance is {ratio:.1f} times as large"
    return f"{what} in bright parts as in dark ones, but `sigma` is one level; give `gain` and `read_noise`"


def repeats(name: str, images: Sequence[Tensor], stated: Sequence[float]) -> Iterator[str]:
    """What to say of noise that images share, or channels, and of channels with levels of their own."""
    found = detail(torch.stack(list(images))).flatten(2).double()  # (N, C, pixels)
    is_noise = found.square().mean((1, 2)) < _PREVAILS * torch.tensor(stated).square()
    if is_noise.double().mean() < 0.5:
        return
    variance = (found := found[is_noise]).square().mean(2)
    found = found / variance.sqrt().clamp_min(1e-12)[..., None]
    num_channels, num_pixels = found.shape[1:]
    whole, energy = found.flatten(1), found.square().mean(0).flatten()
    whole = whole[:, energy < 2 * energy.median()]  # without edges that images share, as of a field of view
    whole = whole / whole.square().mean(1, keepdim=True).sqrt().clamp_min(1e-12)
    pairs = (whole @ whole.T / whole.shape[1]).fill_diagonal_(0)
    is_alike = pairs.max(1).values > max(_ALIKE, _SURELY / math.sqrt(whole.shape[1]))
    if is_alike.sum() > 2 or pairs.mean() > _ALIKE:
        what = f"images of {name} share their noise (correlation {float(pairs.max()):.2f}; independent: 0)"
        yield f"{what}: was one pattern added to several, or the seed repeated? Noise must be drawn for each"
    channels = (found @ found.mT / num_pixels).mean(0)
    alike = float((channels.sum() - num_channels) / max(1, num_channels * (num_channels - 1)))
    if alike > _ALIKE:
        what = f"the channels of {name} share their noise (correlation {alike:.2f}; independent: 0)"
        yield f"{what}: was it added to a grey version? Then save one channel"
    levels = variance.mean(0).sqrt()
    if levels.max() > _UNLIKE * levels.min():
        what = f"the channels of {name} differ in noise by a factor of {float(levels.max() / levels.min()):.1f}"
        yield f"{what}, but `sigma` is one level: give a `map` with a level for each channel"


def leaves_its_map(name: str, images: Tensor, maps: Tensor) -> Iterator[str]:
    """What to say of noise that does not follow its maps, of which the highest levels have the most detail."""
    # The median, as edges are in few of the images.
    fine = detail(images).square().mean(1).quantile(0.5, 0)
    stated = detail(maps.square(), _KERNEL.square()).mean((0, 1))
    low, high = np.quantile(stated, (0.1, 0.9))
    follows = float(torch.corrcoef(torch.stack([stated.flatten(), fine.flatten()]).sqrt())[0, 1])
    if high > _VARIED * low and fine.mean() < _PREVAILS * stated.mean() and follows < _MIN_FOLLOWED:
        what = f"the noise of {name} hardly follows its map (correlation over pixels {follows:.2f})"
        yield f"{what}: is the map turned or flipped, or of other images?"


def detail(images: Tensor, kernel: Tensor = _KERNEL) -> Tensor:
    """The finest detail of images (N, C, H, W); the squared `kernel` gives its variance from theirs."""
    return functional.conv2d(images.flatten(0, 1)[:, None], kernel).squeeze(1).unflatten(0, images.shape[:2])
