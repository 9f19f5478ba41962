"""Mixtures for studies: some images of a clean source stay clean, the others get noise.

    x_tn = x_0 + sigma z,        z ~ N(0, I) drawn once per image from (seed, index) alone.

A mixture is a view: nothing is copied to disk. The policy makes differences between runs differences
in the data: the number of clean images is exact; with the same seed the clean images of a smaller
fraction are among those of a larger one; the same z, scaled, serves every sigma; and z never changes
from epoch to epoch, which would leak the clean image.
"""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from assay.data.store import ImageSource, hash_of

_MAX_CACHE_BYTES = 2**30


def mix(
    source: ImageSource,
    clean_fraction: float,
    sigma: float | Sequence[tuple[float, float]],
    seed: int = 0,
    keep_noisy: bool = True,
) -> "Mixture":
    """Keep `clean_fraction` of a clean source and add noise to the rest.

    `sigma` is the level of all noisy images, or a list of (fraction, sigma) whose fractions and
    `clean_fraction` sum to 1. `keep_noisy=False` drops the noisy images: the clean-only baseline.
    """
    levels = [(1 - clean_fraction, sigma)] if isinstance(sigma, int | float) else list(sigma)
    if not 0 <= clean_fraction <= 1:
        raise ValueError(f"clean_fraction = {clean_fraction}: a fraction lies between 0 and 1")
    for fraction, level in levels:
        if not 0 <= fraction <= 1 or not (math.isfinite(level) and level > 0):
            raise ValueError(
                f"(fraction, sigma) = ({fraction}, {level}): need a fraction in [0, 1] and sigma > 0"
            )
    total = clean_fraction + sum(fraction for fraction, _ in levels)
    if abs(total - 1) > 1e-9:
        raise ValueError(f"clean_fraction and the fractions of the noisy levels sum to {total:g}, not to 1")
    if bool((source.sigma_tn > 0).any()):
        first = int((source.sigma_tn > 0).nonzero()[0])
        raise ValueError(
            f"image {first} of {source.name} is noisy already (sigma_tn = {source.sigma_tn[first].item():g}): "
            "mix simulates noise on clean images only"
        )
    order = torch.randperm(len(source), generator=stream(seed, "clean set"))
    level_of = torch.zeros(len(source))
    cumulative, start = clean_fraction, _nearest(clean_fraction * len(source))
    num_clean = start
    for fraction, level in levels:
        cumulative += fraction
        stop = _nearest(cumulative * len(source))
        level_of[order[start:stop]] = level
        start = stop
    kept = torch.arange(len(source)) if keep_noisy else order[:num_clean].sort().values
    if len(kept) == 0:
        raise ValueError(
            f"clean_fraction = {clean_fraction:g} of {len(source)} images keeps none: nothing to train on"
        )
    levels_text = ", ".join(f"{fraction:.3g} at sigma {level:g}" for fraction, level in levels if fraction > 0)
    rest = (levels_text or "none") if keep_noisy else "none"
    name = f"{source.name} ({clean_fraction:.3g} clean, noisy: {rest})"
    return Mixture(source, kept, level_of[kept], seed, name)


def _nearest(count: float) -> int:
    return math.floor(count + 0.5 + 1e-9)  # 1e-9: 0.29 * 50 is 14.499999999999998


class Mixture:
    """A view of `source`: its images `index` (M,) with noise of level `sigma_tn` (M,). An `ImageSource`."""

    def __init__(self, source: ImageSource, index: Tensor, sigma_tn: Tensor, seed: int, name: str) -> None:
        self.source = source
        self.index = index
        self.sigma_tn = sigma_tn
        self.label = source.label[index]
        self.name = name
        self.image_shape = source.image_shape
        self.class_names = source.class_names
        self.num_classes = source.num_classes
        self._seeds = image_seeds(seed, index)
        columns = [hashlib.sha256(column.numpy().tobytes()).hexdigest() for column in (index, sigma_tn)]
        self.fingerprint = hash_of(source.fingerprint, columns, seed)
        # Images are remembered as they are first read; larger mixtures are computed anew each time.
        num_bytes = 4 * len(index) * math.prod(source.image_shape)
        self._cache = torch.empty(len(index), *source.image_shape) if num_bytes <= _MAX_CACHE_BYTES else None
        self._known = torch.zeros(len(index), dtype=torch.bool)

    def __len__(self) -> int:
        return len(self.index)

    def read(self, index: Tensor) -> Tensor:
        """`index` (B,) -> `x_tn` (B, C, H, W) float32, the same bits whenever it is read."""
        if self._cache is None:
            return self._compute(index)
        if not bool(self._known[index].all()):
            missing = index[~self._known[index]].unique()
            self._cache[missing] = self._compute(missing)
            self._known[missing] = True
        return self._cache[index]

    def _compute(self, index: Tensor) -> Tensor:
        x = self.source.read(self.index[index])
        generator, z = torch.Generator(), torch.empty(self.image_shape)
        sigmas = self.sigma_tn[index].tolist()
        for row, (sigma, seed) in enumerate(zip(sigmas, self._seeds[index].tolist(), strict=True)):
            if sigma > 0:
                torch.randn(self.image_shape, generator=generator.manual_seed(seed), out=z)
                x[row].add_(z, alpha=sigma)
        return x


def stream(seed: int, *names: str | int) -> torch.Generator:
    """A generator for one purpose, e.g. `stream(seed, "noise", step)`: other names, other numbers."""
    return torch.Generator().manual_seed(_hash32(seed, *names))


def image_seeds(seed: int, index: Tensor) -> Tensor:
    """One 32-bit seed per image index (N,) -> (N,) int64, no two alike.

    torch keeps 32 bits of a seed, so hashing a million indices would give a hundred pairs of images the
    same noise. The steps below permute the 32-bit numbers (odd factors and xor-shifts can be undone).
    """
    mask = 0xFFFFFFFF
    value = (index.long() ^ _hash32(seed, "nature")) & mask
    for factor, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13)):
        value = ((value ^ (value >> shift)) * factor) & mask
    return value ^ (value >> 16)


def _hash32(*parts: str | int) -> int:
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")
