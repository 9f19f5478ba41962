"""Views: some images of a source, each raised to a noise level.

    x = x_tn + sqrt(target^2 - sigma_tn^2) z,        z ~ N(0, I) drawn once from (seed, image number) alone.

Everything that is trained on is a view: noise simulated on clean images (`simulate`), the clean or the noisy
part of a store or a share of either (`part`), noisy images made noisier (`raised`), images that may be used
only from some level on (`usable`), several stores taken together (`Joined`), and images with restored twins
(`Restored`). Nothing is copied to disk, and views of views compose.

Differences between runs should be differences in the data. So counts are exact; with the same seed a smaller
part is contained in a larger one; the same z, scaled, serves every level; and z never changes from epoch to
epoch, which would leak the clean image.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from assay.data.source import ImageSource, as_source
from assay.data.store import PackedImage, Store, write_store
from assay.errors import AssayError, Rules, check, check_same
from assay.files import content_hash
from assay.noise import check_sigma, warn_of_units

_MAX_CACHE_BYTES = 2**30
_BATCH = 64  # images written at once


class View(ImageSource):
    """Images `index` (M,) of `source` with noise added up to the levels `target` (M,).

    Without `index` all images, without `target` at the level from which each may be used. An image with a map
    of levels keeps it unless it is raised, then each pixel gets noise up to the target; `even` does so to all.
    """

    def __init__(
        self,
        source: ImageSource,
        index: Tensor | None = None,
        target: Tensor | None = None,
        seed: int = 0,
        name: str | None = None,
        even: bool = False,
    ) -> None:
        index = torch.arange(len(source)) if index is None else index
        target = source.usable_from[index] if target is None else target
        self.described_like(source).name = source.name if name is None else name
        if len(index) == 0:
            raise AssayError(f"there are no images in {self.name}", cure="take a larger part")
        if isinstance(source, View) and not source.num_raised:  # a choice among chosen images
            index, source = source.index[index], source.source
        before = source.sigma_tn[index]
        check_sigma("target", target, before)
        self.source: ImageSource = source
        self.index: Tensor = index
        self.sigma_tn, self.label = target, source.label[index]
        self.group = None if source.group is None else source.group[index]
        # In double precision: then sqrt(target^2) is target, bit for bit.
        self._added = (target.double() ** 2 - before.double() ** 2).sqrt()
        self.image_number = source.image_number[index]
        # Noise added to noisy images is independent of what an earlier view added with the same seed.
        self._seeds = image_seeds(seed, self.image_number, torch.where(before > 0, 1 + source.num_raised, 0))
        self._even = source.has_map and even
        self.has_map = source.has_map and not even
        is_raised = bool((self._added > 0).any()) or self._even
        self.num_raised = source.num_raised + is_raised
        columns = [column.numpy().tobytes() for column in (index, target)]
        self.fingerprint = content_hash(source.fingerprint, columns, seed, *(["even"] if self._even else []))
        # Noisy images are remembered when first read; views too large for that compute them every time.
        num_bytes = 4 * len(index) * math.prod(source.image_shape)
        cached = is_raised and num_bytes <= _MAX_CACHE_BYTES
        self._cache = torch.empty(len(index), *source.image_shape) if cached else None
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

    def read_levels(self, index: Tensor) -> Tensor:
        """`index` (B,) -> the noise level of each pixel (B, C or 1, H, W), `sigma_tn` without maps."""
        if not self.has_map:
            return super().read_levels(index)
        before, target = self.source.read_levels(self.index[index]), self.sigma_tn[index]
        return torch.maximum(before, target.where(self._added[index] > 0, 0)[:, None, None, None])

    def save(self, path: Path | str) -> Store:
        """Write the images to a store, with the noise that they have here."""
        return save(self, path)

    def _compute(self, index: Tensor) -> Tensor:
        x, added = self.source.read(self.index[index]), self._added[index]
        if self.source.has_map:
            before = self.source.read_levels(self.index[index])
            target = self.sigma_tn[index][:, None, None, None].double()
            by_pixel = (target**2 - before.double() ** 2).clamp_min(0).sqrt().to(x.dtype)
        generator = torch.Generator()
        for row in ((added > 0) | self._even).nonzero()[:, 0].tolist():
            z = torch.randn(self.image_shape, generator=generator.manual_seed(int(self._seeds[index[row]])))
            if self.source.has_map:
                x[row] += by_pixel[row] * z
            else:
                x[row].add_(z, alpha=added[row].item())
        return x


def save(source: ImageSource, path: Path | str, warnings: Sequence[str] = ()) -> Store:
    """Write images that are used from their own levels on to a store, with what looks wrong about them."""

    def images() -> Iterator[PackedImage]:
        group = torch.full_like(source.label, -1) if source.group is None else source.group
        for index in torch.arange(len(source)).split(_BATCH):
            maps = source.read_levels(index).numpy() if source.has_map else [None] * len(index)
            for i, x, levels in zip(index.tolist(), source.read(index).numpy(), maps, strict=True):
                about = float(source.sigma_tn[i]), int(source.label[i]), None, source.physical_range
                yield PackedImage(f"{i:06d}", x, *about, int(group[i]), levels)

    layout = source.image_shape, "float32", (-1, 1), source.class_names
    return write_store(Path(path), source.name, images(), *layout, warnings=lambda: warnings)  # type: ignore[arg-type]


class Joined(ImageSource):
    """Several sources of one shape taken together, their images numbered on.

    Sources without classes may join those with classes; their images have no label.
    """

    def __init__(self, sources: Sequence[ImageSource]) -> None:
        first = sources[0]
        classes = next((source for source in sources if source.class_names), first)
        for source in sources:
            what, cure = f"{first.name} and {source.name} differ in shape (C, H, W)", "pack both at one size"
            check_same(first.image_shape, source.image_shape, what, key="image_shape", cure=cure)
            what, names = f"{classes.name} and {source.name} differ in classes", classes.class_names
            check_same(names, source.class_names or names, what, key="class_names", cure="pack both alike")
        self.sources = tuple(sources)
        self.name = " + ".join(source.name for source in sources)
        self.image_shape, self.class_names = first.image_shape, classes.class_names
        ranges = {source.physical_range for source in sources}
        self.physical_range = ranges.pop() if len(ranges) == 1 else None
        columns = zip(*((each.sigma_tn, each.usable_from, each.label) for each in sources), strict=True)
        self.sigma_tn, self.usable_from, self.label = map(torch.cat, columns)
        self.num_raised = max(source.num_raised for source in sources)
        if any(source.group is not None for source in sources):  # no two sources share one
            groups = [torch.arange(len(each)) if each.group is None else each.group for each in sources]
            offsets = accumulate((int(group.max()) + 1 for group in groups), initial=0)
            self.group = torch.cat([group + offset for group, offset in zip(groups, offsets, strict=False)])
        self.fingerprint = content_hash([source.fingerprint for source in sources])
        self._ends = torch.tensor([len(source) for source in sources]).cumsum(0)
        self.has_map = any(source.has_map for source in sources)

    def __len__(self) -> int:
        return len(self.sigma_tn)

    def read(self, index: Tensor) -> Tensor:
        """`index` (B,) -> `x_tn` (B, C, H, W) float32."""
        return self._gathered(index, lambda source, place: source.read(place))

    def read_levels(self, index: Tensor) -> Tensor:
        """`index` (B,) -> the noise level of each pixel (B, C, H, W)."""
        return self._gathered(index, lambda source, place: source.read_levels(place))

    def _gathered(self, index: Tensor, read: Callable[[ImageSource, Tensor], Tensor]) -> Tensor:
        """What each source has for its own of the images `index` (B,)."""
        index = index % len(self)  # -1 is the last
        number = torch.bucketize(index, self._ends, right=True)
        found = torch.empty(len(index), *self.image_shape)
        for chosen in number.unique().tolist():
            start, mine = int(self._ends[chosen - 1]) if chosen else 0, number == chosen
            found[mine] = read(self.sources[chosen], index[mine] - start)
        return found


class Restored(ImageSource):
    """Images, each with a twin that a model restored from it; read as the images themselves.

    `read_at` chooses between the two: the image for levels above its own noise, where it is exact, its twin
    below, where it has nothing to say.
    """

    def __init__(self, source: ImageSource, twins: Store) -> None:
        parents = twins.meta.restored_from
        if parents is None or parents.images != source.fingerprint:
            what = f"was not restored from {source.name}"
            raise AssayError(what, path=twins.path, cure="restore these images again")
        self.source, self.twins = source, twins
        self.described_like(source)
        self.sigma_tn, self.label = source.sigma_tn, source.label
        self.lowest_level = twins.sigma_tn  # (N,) from which the image or its twin can be trained on
        self.fingerprint = content_hash(source.fingerprint, twins.fingerprint)

    def __len__(self) -> int:
        return len(self.source)

    def read(self, index: Tensor) -> Tensor:
        """`index` (B,) -> `x_tn` (B, C, H, W), the images that were restored."""
        return self.source.read(index)

    def read_at(self, index: Tensor, sigma_t: Tensor) -> tuple[Tensor, Tensor]:
        """`index` and `sigma_t` (B,) -> images or twins (B, C, H, W), their noise (B,)."""
        own = self.source.sigma_tn[index]
        twin = (own > 0) & (sigma_t <= own)
        x, sigma_tn = self.source.read(index), own.where(~twin, self.twins.sigma_tn[index])
        x[twin] = self.twins.read(index[twin])
        return x, sigma_tn


def simulate(
    source: ImageSource | Any,
    clean_fraction: float,
    sigma: float | Sequence[tuple[float, float]],
    seed: int = 0,
    keep_noisy: bool = True,
) -> View:
    """Keep `clean_fraction` of a clean source, or array as of `from_arrays`, and add noise to the rest.

    `sigma` is the level of all noisy images, or a list of (fraction, sigma) whose fractions and
    `clean_fraction` sum to 1. `keep_noisy=False` drops the noisy images: the clean-only baseline.

    >>> images = assay.from_arrays(np.random.rand(100, 8, 8), value_range=(0, 1))
    >>> assay.simulate(images, clean_fraction=0.1, sigma=0.3)
    <arrays (0.1 clean, noisy: 0.9 at sigma 0.3): 100 images of 1 x 8 x 8, 10 clean, 90 noisy>
    """
    source = as_source(source)
    levels = [(1 - clean_fraction, sigma)] if isinstance(sigma, int | float) else list(sigma)
    fractions = [clean_fraction, *(fraction for fraction, _ in levels)]
    are_shares = all(0 <= fraction <= 1 for fraction in fractions) and abs(sum(fractions) - 1) <= 1e-9
    warn_of_units(max((level for _, level in levels), default=0))
    are_levels, noisy = all(0 < level < math.inf for _, level in levels), int((source.usable_from > 0).sum())
    what = f"{noisy} images of {source.name} are noisy already: noise is simulated on clean images only"
    check([
        (not are_shares, AssayError(f"{fractions} are not fractions that sum to 1", key="clean_fraction")),
        (not are_levels, AssayError(f"simulated noise of {sigma} is not finite and > 0", key="sigma")),
        (noisy, AssayError(what, key="clean_fraction")),
    ])  # fmt: skip
    ends = [count_of(share, len(source)) for share in accumulate(map(float, fractions))]
    levels_text = ", ".join(f"{fraction:.3g} at sigma {level:g}" for fraction, level in levels if fraction > 0)
    rest = (levels_text or "none") if keep_noisy else "none"
    name = f"{source.name} ({clean_fraction:.3g} clean, noisy: {rest})"
    steps = list(zip(ends, [0.0, *(level for _, level in levels)], strict=True))
    return _mixed(source, steps if keep_noisy else steps[:1], seed, name)


def noised(source: ImageSource, num_clean: int, num_noisy: int, sigma: float, seed: int = 0) -> View:
    """Simulate numbers of images: `num_clean` of a clean source as they are, and `num_noisy` others with noise.

    The clean ones are those of `part(source, clean=num_clean)`, and the noisy ones follow them in the same
    order: so a ladder of clean sizes and all mixes of one seed are nested.
    """
    _size("clean + noisy", num_clean + num_noisy, len(source), f"images of {source.name}")
    name = f"{source.name} ({num_clean} clean, {num_noisy} at {sigma:g})"
    return _mixed(source, [(num_clean, 0.0), (num_clean + num_noisy, sigma)], seed, name)


def _mixed(source: ImageSource, steps: Sequence[tuple[int, float]], seed: int, name: str) -> View:
    """The first images of a random order; `steps` are (number of images up to here, level of these)."""
    order, target, start = _order(source, seed), torch.zeros(len(source)), 0
    for end, level in steps:
        target[order[start:end]] = level
        start = end
    kept = order[:start].sort().values
    return View(source, kept, target[kept], seed, name)


def block_seed(seed: int, block: int) -> int:
    """The seed of one block of a study, which draws other images and noise; block 0 has the seed itself."""
    return _hash32(seed, "block", block) if block else seed


def part(
    source: ImageSource | Any,
    clean: float | int = 1.0,
    noisy: float | int = 1.0,
    levels: tuple[float, float] | None = None,
    seed: int = 0,
) -> View:
    """Some of the clean and some of the noisy images: a share of each (float) or a number (int).

    `levels` (low, high) keeps only noisy images with low <= sigma_tn <= high; `noisy` is a share of these.
    If all images are clean, the clean images are those that `simulate` keeps clean with the same seed.

    >>> sigma = np.repeat([0.0, 0.2], 50)
    >>> images = assay.from_arrays(np.random.rand(100, 8, 8), sigma, value_range=(0, 1))
    >>> assay.part(images, clean=20, noisy=0.5)
    <arrays (20 clean, 25 noisy): 45 images of 1 x 8 x 8, 20 clean, 25 noisy>
    """
    source = usable(as_source(source), seed)
    is_noisy = source.sigma_tn > 0
    if levels is not None:
        check(_level_rules(source.sigma_tn[is_noisy], levels, source.name))
        low, high = torch.tensor(levels)
        is_noisy &= (source.sigma_tn >= low) & (source.sigma_tn <= high)
    order = _order(source, seed)
    chosen: list[Tensor] = []
    for key, size, mask in (("clean", clean, source.sigma_tn == 0), ("noisy", noisy, is_noisy)):
        there = order[mask[order]]
        within = f" with levels in [{levels[0]:g}, {levels[1]:g}]" if key == "noisy" and levels else ""
        chosen.append(there[: _size(key, size, len(there), f"{key} images{within} of {source.name}")])
    name = f"{source.name} ({len(chosen[0])} clean, {len(chosen[1])} noisy)"
    return View(source, torch.cat(chosen).sort().values, seed=seed, name=name)


def _level_rules(sigma_tn: Tensor, levels: Any, name: str) -> Rules:
    """There are images between these levels; `sigma_tn` are those of all noisy images."""
    what = f"{levels!r:.80} is not the lowest level and the highest"
    is_pair = isinstance(levels, tuple | list) and len(levels) == 2 and levels[0] <= levels[1]
    yield not is_pair, AssayError(what, key="levels", cure="give both, e.g. (0.1, 0.3)")
    yield not len(sigma_tn), AssayError(f"no image of {name} is noisy", key="levels", cure="leave it out")
    low, high = torch.tensor(levels)
    what = f"no image of {name} has a level from {low:g} to {high:g}, where black to white is 2"
    cure = f"choose others: they go from {sigma_tn.min():.3g} to {sigma_tn.max():.3g}"
    is_inside = (sigma_tn >= low) & (sigma_tn <= high)
    yield not is_inside.any(), AssayError(what, key="levels", cure=cure)


def raised(source: ImageSource, level: float, seed: int = 0) -> View:
    """Noisy images made noisier: those below `level` are raised to it. Clean images stay clean."""
    warn_of_units(level)
    source = usable(source, seed)
    target = torch.where(source.sigma_tn > 0, source.sigma_tn.clamp(min=level), source.sigma_tn)
    return View(source, None, target, seed, f"{source.name}, noise raised to {level:g}")


def usable(source: ImageSource, seed: int = 0) -> ImageSource:
    """The source with every image raised to the level from which it may be used; itself if all are."""
    return View(source, seed=seed) if bool((source.usable_from > source.sigma_tn).any()) else source


def with_uniform_noise(source: ImageSource, seed: int = 0) -> ImageSource:
    """The source with the same noise in all pixels of an image, `sigma_tn`; itself if it has no maps."""
    return View(source, None, source.sigma_tn, seed, even=True) if source.has_map else source


def split_held_out(
    source: ImageSource | Any, held_out: float | int, seed: int = 0, kind: Literal["clean", "noisy"] = "clean"
) -> tuple[View, View]:
    """Set images aside for evaluation: (the rest, the held-out images), which have none in common.

    `held_out` is a share (float) or a number (int) of the clean images, or of the noisy ones. A smaller
    held-out part is contained in a larger one. Images of one group, e.g. patches of one picture, stay together:
    whole groups are set aside until there are at least that many images, and images of the other kind in these
    groups are in neither view.

    >>> images = assay.from_arrays(np.random.rand(100, 8, 8), np.repeat([0.0, 0.2], 50), value_range=(0, 1))
    >>> assay.split_held_out(images, 10)                            # doctest: +NORMALIZE_WHITESPACE
    (<arrays: 90 images of 1 x 8 x 8, 40 clean, 50 noisy>,
     <arrays (held out): 10 images of 1 x 8 x 8, 10 clean, 0 noisy>)
    """
    source = usable(as_source(source), seed)
    candidate = (source.sigma_tn == 0) == (kind == "clean")
    num_held_out = _size("held_out", held_out, int(candidate.sum()), f"{kind} images of {source.name}")
    group = torch.arange(len(source)) if source.group is None else source.group.unique(return_inverse=True)[1]
    order = torch.randperm(int(group.max()) + 1, generator=stream(seed, "held out"))
    num_in_group = torch.zeros(len(order), dtype=torch.long).index_add(0, group, candidate.long())
    order = order[num_in_group[order] > 0]
    num_before = num_in_group[order].cumsum(0) - num_in_group[order]
    away = torch.isin(group, order[num_before < num_held_out])
    if bool(away.all()):
        what = f"{held_out} leaves no image of {source.name} to train on"
        raise AssayError(what, key="held_out", cure="hold out fewer")
    return (
        View(source, (~away).nonzero()[:, 0], seed=seed),
        View(source, (away & candidate).nonzero()[:, 0], seed=seed, name=f"{source.name} (held out)"),
    )


def count_of(size: float | int, num_there: int) -> int:
    """How many images a share (float) or a number (int) of `num_there` images is; halves are rounded up."""
    if isinstance(size, Integral):
        return int(size)
    return math.floor(size * num_there + 0.5 + 1e-9)  # 1e-9: 0.29 * 50 is 14.499999999999998


def _size(key: str, size: float | int, num_there: int, what: str) -> int:
    """`count_of` with checks, for a number that a user gave; `what` describes the images."""
    limit = num_there if isinstance(size, Integral) else 1
    is_possible = isinstance(size, Real) and 0 <= size <= limit
    count = count_of(size, num_there) if is_possible else -1
    if count < 0 or count == 0 < size < 1:
        cure = "give a share between 0.0 and 1.0, or a whole number of images"
        raise AssayError(f"{size!r:.80} cannot be had: there are only {num_there} {what}", key=key, cure=cure)
    return count


def _order(source: ImageSource, seed: int) -> Tensor:
    """A random order of all images (N,); parts take its first images, so that they are nested."""
    return torch.randperm(len(source), generator=stream(seed, "clean set"))


def stream(seed: int, *names: str | int) -> torch.Generator:
    """A generator for one purpose, e.g. `stream(seed, "noise", step)`: other names, other numbers."""
    return torch.Generator().manual_seed(_hash32(seed, *names))


def image_seeds(seed: int, number: Tensor, stage: Tensor | int = 0) -> Tensor:
    """One 32-bit seed per image number (N,) and stage < 16 -> (N,) int64, all different below 2^28 images.

    torch keeps 32 bits of a seed, so hashing a million numbers would give a hundred pairs of images the
    same noise. The steps below permute the 32-bit numbers (odd factors and xor-shifts can be undone).
    """
    mask = 0xFFFFFFFF
    # The word "nature" only seeds the hash. It stays because another would change the noise of every study.
    value = (number.long() ^ (torch.as_tensor(stage) << 28) ^ _hash32(seed, "nature")) & mask
    for factor, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13)):
        value = ((value ^ (value >> shift)) * factor) & mask
    return value ^ (value >> 16)


def _hash32(*parts: str | int) -> int:
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")
