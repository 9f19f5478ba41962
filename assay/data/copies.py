"""Which images show what others show: one scene in other noise or brightness, or the same pixels elsewhere.

Scenes are compared by small copies of the images, up to noise. Pixels are compared exactly, by hashes of small
blocks: overlapping crops have blocks in common, and so have an image and its shifted, flipped or turned copy.
Sets of images are compared by the mean and the spread of their values. Held-out images must not be among those
trained on (`check_overlap`).
"""

import math
import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from assay.data.audit.level import spread
from assay.data.source import ImageSource
from assay.errors import AssayError, warn
from assay.files import content_hash

SMALL = 8  # the side of small copies
_MAX_SHARE = 0.05  # of images that may be in a set twice: photographs do
FEWEST = 16  # images, for twins to be looked for
NUM_KNOWN = 2**16  # images that others are compared with: some seconds
_MAX_HASHES = 64  # of the blocks of an image
_NUM_HASHED = 2**12  # images of a set whose blocks are compared: a second
_NUM_ASKED = 256  # images whose twins are looked for
_NEAR = 0.01  # root mean squared difference of two copies, where black to white is 2: one grey step
_BRIGHTER = 2e-4  # 1 - correlation of two copies, of which one may be brighter
_ALL = 0.8  # of the pairs of images that are near, if all show one scene
_BLOCK, _LEAST_BLOCK = 8, 6  # sides; smaller ones are alike by chance
_FEWEST_SHARED = 3  # blocks
_MAX_SIDE = 256  # of the middle of an image in which blocks are looked at
_LIKE, _UNLIKE = 0.9, 0.5  # correlations of mean images
_FARTHER = 20  # times farther from 1 than that of moved images
SCENES = "hold whole scenes out (`--patch`, or `group` of arrays)"
_BATCH = 1024
_MAX_BYTES = 2**32  # of training images as float32; some ten seconds
_WEIGHTS = np.random.default_rng(0).integers(2**62, size=_BLOCK // 2) * 2 + 1

Pair = tuple[str, int, int]  # how many of how many, and the first two


def small_copy(x: Tensor) -> Tensor:
    """Small grey copies of images (B, C, H, W)."""
    height, width = (min(side, SMALL) for side in x.shape[2:])
    return functional.adaptive_avg_pool2d(x.mean(1), (height, width))


def find_twins(
    small: Tensor, noise: Tensor, asked: Tensor, known: Tensor, brighter: bool = False
) -> Pair | None:
    """How many images of those `asked` show the scene of another that is `known`, and the first such pair.

    None if few do, or if that may be by chance. Small copies (N, H, W) of one scene, with noise of variance
    (N,), differ by little more than it. `brighter`: of clean images, copies that are brighter or darker.
    """
    if brighter:
        small = small - small.mean((1, 2), keepdim=True)
        size = small.square().mean((1, 2), keepdim=True).sqrt()
        small, fits = small / size, (noise == 0) & (size.flatten() > _NEAR)
        asked, known = asked[fits[asked]], known[fits[known]]
    if min(len(asked), len(known)) < FEWEST:
        return None
    asked, known = asked[spread(len(asked), _NUM_ASKED)], known[spread(len(known), NUM_KNOWN)]
    num_cells = small[0].numel()
    unit = 1 + 2 * math.sqrt(2 / num_cells)  # of the noise: two deviations above its mean
    limit = 2 * _BRIGHTER if brighter else unit * (noise[asked][:, None] + noise[known] + _NEAR**2)
    distance = torch.cdist(small[asked].flatten(1), small[known].flatten(1)).square() / num_cells
    is_near = (distance < limit) & (asked[:, None] != known)
    almost = limit * (10 if brighter else 2 / unit)
    is_almost = ~is_near.any(1) & ((distance < almost) & (asked[:, None] != known)).any(1)
    num_near, contrast = is_near.sum(1), small[asked].var((1, 2)).mean()
    of_a_kind = (noise[asked][:, None] > 0) == (noise[known] > 0)
    if not brighter and is_near[of_a_kind].double().mean() > _ALL and contrast > torch.as_tensor(limit).mean():
        is_twin = num_near > 0  # all show one scene, in noise that does not hide it
    elif (num_twins := twins_of_most(num_near.numpy(), int(is_almost.sum()))) is not None:
        is_twin = num_near == num_twins
    else:
        return None
    found = is_twin.nonzero()[:, 0]
    first = int(found[0])
    twin = distance[first].masked_fill(~is_near[first], math.inf).argmin()
    return f"{len(found)} of {len(asked)}", int(asked[first]), int(known[twin])


def twins_of_most(num_near: np.ndarray, num_almost: int) -> int | None:
    """How many twins many images have, from the numbers of others that are near to them (N,).

    None if those may be near by chance. Of scenes that are drawn independently, the number of near ones is a
    mixture of Poisson distributions, the rates of which depend on the scene. Their probabilities obey
    (k! P_k)^2 <= (k - 1)! P_{k-1} (k + 1)! P_{k+1} (Cauchy-Schwarz), so that a peak at k is one of twins.
    Where some have one near by chance, others have none, but several that are almost near: `num_almost`.
    """
    num = np.bincount(num_near, minlength=2).astype(float)
    k = np.arange(1, len(num))
    at_most = num + 3 * np.sqrt(num) + 2  # of what would be expected
    by_chance = np.sqrt((k + 1) / k * at_most[:-1] * np.append(at_most[2:], 2))
    by_chance[0] = min(by_chance[0], 4 * num_almost)
    peak = num[1:] - by_chance
    return int(k[peak.argmax()]) if peak.max() > max(_MAX_SHARE * len(num_near), 2) else None


def content(image: Tensor) -> str:
    """A hash that is the same of one picture in stores of 8 bits, 16 bits and float32."""
    return content_hash(_on_grid(image.double().numpy()).tobytes())


def _on_grid(x: np.ndarray) -> np.ndarray:
    """Whole numbers of the steps that values of 8 bits, 16 bits and, nearly, float32 are on."""
    return np.rint((x.astype(np.float64) + 1) * (16 * 65535 / 2)).astype(np.int64)


def has_blocks(i: int, num_images: int) -> bool:
    """Whether the blocks of image i are compared: a random choice, as copies may follow at equal distances."""
    return zlib.crc32(str(i).encode()) * num_images < _NUM_HASHED * 2**32


def blocks_of(x: np.ndarray) -> np.ndarray:
    """Hashes of blocks of an image (C, H, W) that are not flat: the lowest, which any image with them keeps.

    A block is summed with symmetric weights, modulo 2^64: flipped or turned, it has the same hash.
    """
    side = min(_BLOCK, 3 * min(x.shape[1:]) // 4)
    if side < _LEAST_BLOCK:
        return np.zeros(0, np.int64)
    top, left = (max(0, length - _MAX_SIDE) // 2 for length in x.shape[1:])
    values = _on_grid(x[:, top : top + _MAX_SIDE, left : left + _MAX_SIDE]).sum(0)
    weights = np.concatenate([_WEIGHTS[: side // 2], _WEIGHTS[: -(-side // 2)][::-1]])
    height, width = (length - side + 1 for length in values.shape)
    rows = np.sum([w * values[:, j : j + width] for j, w in enumerate(weights)], 0)
    hashes = np.sum([w * rows[i : i + height] for i, w in enumerate(weights)], 0)
    num = np.pad((values[:, 1:] != values[:, :-1]).cumsum(0).cumsum(1), ((1, 0), (1, 0)))  # that differ
    down = num[side:] - num[:-side]
    is_flat = down[:, side - 1 :] - down[:, : 1 - side] < side * (side - 1) / 2
    return np.unique(hashes[~is_flat])[:_MAX_HASHES]


def find_shared(
    blocks: Mapping[int, np.ndarray], group: np.ndarray, asked: np.ndarray | None = None
) -> Pair | None:
    """How many images share `blocks` with one of another group (N,), and the first such pair; None if few do.

    Only those `asked` count. Images are known by their numbers.
    """
    owner = np.repeat(list(blocks), list(map(len, blocks.values()))).astype(int)
    counted = np.array(list(blocks)) if asked is None else np.intersect1d(list(blocks), asked)
    if not owner.size:
        return None
    _, block = np.unique(np.concatenate(list(blocks.values())), return_inverse=True)
    first, last = (np.full(block.max() + 1, end) for end in (group.max(), group.min()))
    np.minimum.at(first, block, group[owner])
    np.maximum.at(last, block, group[owner])
    num_shared = np.bincount(owner[(first != last)[block]], minlength=len(group))
    found = counted[num_shared[counted] >= _FEWEST_SHARED]
    if len(found) < 3 or len(found) <= _MAX_SHARE * len(counted):
        return None
    others = owner[np.isin(block, block[owner == found[0]]) & (group[owner] != group[found[0]])]
    return f"{len(found)} of {len(counted)}", int(found[0]), int(np.bincount(others).argmax())


def check_overlap(training: ImageSource, held_out: ImageSource) -> None:
    """Reject held-out images many of which are trained on; warn of a few, and of those that nearly are.

    A model that memorised them would look good. Images are compared by hashes of their pixels and by
    the distance of small copies. Of a training set that would take long to read, an even selection is compared.
    """
    every = -(-len(training) * 4 * math.prod(training.image_shape) // _MAX_BYTES)
    index = torch.arange(0, len(training), every)
    small, known, blocks = _read(training, index)
    small_there, seen, blocks_there = _read(held_out, torch.arange(len(held_out)))
    share = small[0].numel() / math.prod(training.image_shape)  # of the variance of noise, in small copies
    sources = (small_there, held_out), (small, training)
    kinds = [(each, share * float(of.sigma_tn.square().mean())) for each, of in sources]
    num_scenes = min(len(of) if of.group is None else len(of.group.unique()) for _, of in sources)
    if num_scenes >= FEWEST and (differ := unlike(*kinds)):
        warn(f"images held out and those trained on have {differ}")
    trained_on = set(known)
    is_same = torch.tensor([each in trained_on for each in seen])
    num_same = int(is_same.sum())
    what = f"{num_same} of the {len(held_out)} held-out images are also trained on"
    if num_same > _MAX_SHARE * len(held_out):
        first = int(is_same.nonzero()[0])
        where = int(index[known.index(seen[first])])
        what += f": image {first} of {held_out.name} is image {where} of {training.name}"
        raise AssayError(what, key="data.held_out", cure="remove duplicates, or hold others out")
    if num_same:
        warn(f"{what}: a model that memorises them looks better than it is")
    noise = share * torch.cat([training.sigma_tn[::every], held_out.sigma_tn]).square()
    copies, asked = torch.cat([small, small_there]), len(small) + (~is_same).nonzero()[:, 0]
    trained = torch.arange(len(small))
    blocks |= {len(small) + i: each for i, each in blocks_there.items() if not is_same[i]}
    is_held_out = np.arange(len(copies)) >= len(small)
    for what, found in (
        ("show the scene of one trained on", find_twins(copies, noise, asked, trained)),
        ("are one trained on, brighter or darker", find_twins(copies, noise, asked, trained, brighter=True)),
        ("share pixels with one trained on", find_shared(blocks, is_held_out, asked.numpy())),
    ):
        if found:
            pair = f"image {found[1] - len(small)} and image {every * found[2]} of those"
            return warn(f"{found[0]} held-out images {what} ({pair}): {SCENES}")


def _read(source: ImageSource, index: Tensor) -> tuple[Tensor, list[str], dict[int, np.ndarray]]:
    """Small copies of images (N,), hashes of their contents, and those of the blocks of some."""
    copies, contents, blocks = [], list[str](), dict[int, np.ndarray]()
    for part in index.split(_BATCH):
        x = source.read(part)
        copies.append(small_copy(x))
        for image in x:
            if has_blocks(len(contents), len(index)):
                blocks[len(contents)] = blocks_of(image.numpy())
            contents.append(content(image))
    return torch.cat(copies), contents, blocks


def unlike(*kinds: tuple[Tensor, float]) -> str:
    """What to say of two sets of small copies (N, H, W), each with its noise's variance, if values differ much.

    Nothing of few copies, nor of those in which noise prevails.
    """
    variances = [float(copies.double().var()) - noise for copies, noise in kinds]
    if any(v <= noise or len(copies) < FEWEST for v, (copies, noise) in zip(variances, kinds, strict=True)):
        return ""
    (mean, mean_there), (deviation, deviation_there) = [float(x.mean()) for x, _ in kinds], np.sqrt(variances)
    low, high = sorted((deviation, deviation_there))
    if not (abs(mean - mean_there) > deviation_there / 2 or high > 1.5 * low):
        return ""
    values = f"values of {mean:.2g} ± {deviation:.2g} and {mean_there:.2g} ± {deviation_there:.2g}"
    return f"{values}, where black is -1 and white 1: are they scaled alike, and of one kind?"


def are_turned(one: Tensor, other: Tensor) -> bool:
    """Whether mean images of small copies (N, H, W) and (M, H, W) agree only if those of one are moved."""
    if min(len(one), len(other)) < 2 * FEWEST or one.shape[1] != one.shape[2]:
        return False

    def like(a: Tensor, b: Tensor) -> float:
        return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])

    halves = [(copies[::2].mean(0), copies[1::2].mean(0)) for copies in (one, other)]
    mean, there = one.mean(0), other.mean(0)
    moved = [turned.rot90(k) for turned in (there, there.T) for k in range(4)]
    upright, best = like(mean, there), max(like(mean, each) for each in moved)
    surely = upright < _UNLIKE or 1 - upright > _FARTHER * (1 - best)
    return all(like(*half) > _LIKE for half in halves) and best > _LIKE and surely


def are_versions(pairs: Sequence[Sequence[Tensor]]) -> bool:
    """Whether most second small copies (H, W) are more like their own first ones than like other first ones."""
    if len(pairs) < FEWEST // 2 or len({copy.shape for pair in pairs for copy in pair}) > 1:
        return False
    one, other = (torch.stack(each).flatten(1).double() for each in zip(*pairs, strict=True))
    like = torch.corrcoef(torch.cat([one, other])).nan_to_num(-1)[len(one) :, : len(one)]
    return float((like.argmax(1) == torch.arange(len(like))).double().mean()) > 0.5
