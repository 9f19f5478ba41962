"""Packing: any readable images, from one source or several -> a store.

Nothing is guessed. Images keep their size and colours unless you ask otherwise, float pixels need their
value range named, and what would change the noise of a noisy image (resizing, recolouring, flattening
transparency, rounding to 8 bits) is rejected. Noise levels are given in the units of the files and converted
with the value range, sigma_tn = 2 sigma / (high - low); a level that the pixels rule out is rejected.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from assay.data.convert import Converted, Layout, PackConfig, convert_image
from assay.data.levels import Level, read_levels
from assay.data.notes import Notes
from assay.data.readers import RawImages, clean, cut_patches, open_images, printable, with_map
from assay.data.spec import SourceSpec
from assay.data.store import PackedImage, Store, is_store, open_store, write_store
from assay.errors import AssayError
from assay.files import check_absent

Progress = Callable[[int, int], None]
Source = SourceSpec | RawImages
_NUM_AT_ONCE = 64  # images that are converted before they are written


class PackReport(NamedTuple):
    """The finished store, the images that were left out and why, and what the user should know."""

    store: Store
    skipped: dict[str, AssayError]
    warnings: tuple[str, ...]


def pack(
    sources: Source | Sequence[Source],
    path: Path,
    config: PackConfig | None = None,
    progress: Progress | None = None,
) -> PackReport:
    """Write the images of sources to a store at `path`. `progress` is called with (images done, in all)."""
    config, path = config or PackConfig(), Path(path)
    if not config.overwrite:
        check_absent(path)  # before any long work
    images = Images(sources, config)
    return _write(images, path, config, progress)


def open_source(source: Source, config: PackConfig) -> RawImages:
    """Open a source, and add what the user knows about it; patches are cut if asked for."""
    raw = source if isinstance(source, RawImages) else open_images(source)
    spec = SourceSpec(path=raw.name) if isinstance(source, RawImages) else source
    if spec.gain is not None and spec.sigma is None and raw.noise is not clean:
        raise AssayError("has noise levels of its own, and a sensor's", path=spec.path, key="gain")
    if isinstance(source, SourceSpec):
        value_range = spec.range or raw.value_range
        raw = replace(raw, value_range=value_range, sensor=spec.sensor, quantile=spec.quantile)
    if spec.sigma is not None:
        level = Level(spec.sigma, None, spec.scaled)
        raw = replace(raw, noise=lambda i: level)
    elif spec.sensor is not None:
        level = Level(spec.sensor.sigma_tn, None, scaled=True)
        raw = replace(raw, noise=lambda i: level)
    if spec.levels is not None:
        levels = read_levels(spec.levels, raw.names, spec.scaled)
        for each in levels if not config.skip_bad else ():
            _checked(each)  # before any long work
        raw = replace(raw, noise=lambda i: _checked(levels[i]))
    if spec.map is not None:
        raw = with_map(raw, spec.map, spec.scaled)
    if config.patch is not None:
        raw = cut_patches(raw, config.patch, config.stride or config.patch[1])
    return raw if config.classes else replace(raw, label=None, class_names=())


class Images:
    """The images of all sources, one after the other; if there are several, names begin with the source."""

    def __init__(self, sources: Source | Sequence[Source], config: PackConfig) -> None:
        many = [sources] if isinstance(sources, SourceSpec | RawImages) else sources
        self.raws = [open_source(source, config) for source in many]
        names = [raw.name for raw in self.raws]
        self.titles = [n if names.count(n) == 1 else f"{i}-{n}" for i, n in enumerate(names, 1)]
        self.name = "+".join(self.titles)
        self.place = [(n, i) for n, raw in enumerate(self.raws) for i in range(len(raw.names))]
        above = [f"{title}/" if len(self.raws) > 1 else "" for title in self.titles]
        self.names = [above[n] + self.raws[n].names[i] for n, i in self.place]
        groups = [np.arange(len(raw.names)) if raw.group is None else raw.group for raw in self.raws]
        offsets = np.cumsum([0, *(int(group.max(initial=-1)) + 1 for group in groups[:-1])])
        self.group = np.concatenate([group + offset for group, offset in zip(groups, offsets, strict=True)])
        self.class_names = next((raw.class_names for raw in self.raws if raw.class_names), ())
        if any(raw.class_names not in ((), self.class_names) for raw in self.raws):
            what, cure = "has sources with different classes", "pack without classes"
            raise AssayError(what, path=self.name, key="classes", cure=cure)
        if odd := [label for label in (self.name, *self.class_names) if printable(label) != label]:
            what = "is the name of a folder, which is not UTF-8"
            raise AssayError(what, path=printable(odd[0]), cure="rename it")
        if len({raw.sensor for raw in self.raws}) > 1:
            what = "images that are stabilised and others cannot be in one store"
            cure = "give all sources the same gain, read_noise, black and range"
            raise AssayError(what, key="gain", cure=cure)


def _write(images: Images, path: Path, config: PackConfig, progress: Progress | None) -> PackReport:
    """Convert the images, and write those that can be packed."""
    target = path
    if config.overwrite and is_store(path):
        _check_ours(path)
        target = path.with_name(f"{path.name}-new")
    if config.dtype is None and len(images.raws) > 1 and not all(map(_begins_with_bytes, images.raws)):
        config = config.model_copy(update={"dtype": "float32"})
    notes, skipped = Notes(images.titles, images.raws[0].sensor), dict[str, AssayError]()
    converted = _convert_all(images, config, skipped, progress)
    first = next(converted, None)
    if first is None:
        cure = str(next(iter(skipped.values())))
        raise AssayError(f"none of its {len(images.names)} images can be packed", path=images.name, cure=cure)

    def noted() -> Iterator[PackedImage]:
        for each in chain([first], converted):
            notes.add(each.note)
            yield each.image

    store = write_store(target, images.name, noted(), *first.layout, images.class_names)
    if target != path:
        _check_ours(path)  # which may have changed meanwhile
        old = path.with_name(f"{path.name}-old")
        check_absent(old)
        os.replace(path, old)
        os.replace(target, path)
        shutil.rmtree(old)
        store = open_store(path)
    return PackReport(store, skipped, tuple(notes.warnings()))


def _check_ours(path: Path) -> None:
    """Reject to replace a folder that holds more than one store."""
    ours = {"meta.json", *open_store(path).meta.checksums} if (path / "meta.json").is_file() else set()
    if others := sorted(file.name for file in path.iterdir() if file.name not in ours):
        what = f"holds {others[0]}, which is not of a store"
        raise AssayError(what, path=path, cure="move it elsewhere, or choose another name")


def _begins_with_bytes(raw: RawImages) -> bool:
    """Whether the first image that can be read has 8 bits."""
    for i in range(len(raw.names)):
        with suppress(ValueError, OSError):  # reported when its turn comes
            return raw.pixels(i).dtype == np.uint8
    return True


def _convert_all(
    images: Images,
    config: PackConfig,
    skipped: dict[str, AssayError],
    progress: Progress | None,
) -> Iterator[Converted]:
    """Convert images on all cores, in their order; the first that can be packed decides what all must be."""
    layout, numbers = None, range(len(images.names))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        while numbers:
            num_at_once = 1 if layout is None else _NUM_AT_ONCE
            some, numbers = numbers[:num_at_once], numbers[num_at_once:]
            for k, found in zip(some, pool.map(partial(_attempt, images, config, layout), some), strict=True):
                if isinstance(found, Converted):
                    layout = found.layout
                    yield found
                elif config.skip_bad:
                    skipped[images.names[k]] = found
                else:
                    found.cure = "; ".join(filter(None, [found.cure, "or leave it out with skip_bad"]))
                    raise found
                if progress is not None:
                    progress(k + 1, len(images.names))


def _attempt(images: Images, config: PackConfig, layout: Layout | None, k: int) -> Converted | AssayError:
    (source, i), name = images.place[k], images.names[k]
    try:
        if printable(name) != name:
            raise AssayError("has a name that is not UTF-8", path=printable(name), cure="rename it")
        found = convert_image(images.raws[source], i, config, layout)
    except AssayError as error:
        error.path = error.path or printable(name)
        return error
    image, sigma_map = found.image, found.image.sigma_map
    if sigma_map is not None and len(images.raws) > 1:  # other sources may have one for each channel
        sigma_map = np.broadcast_to(sigma_map, image.values.shape)
    image = replace(image, name=name, group=int(images.group[k]), sigma_map=sigma_map)
    return found._replace(image=image, note=replace(found.note, source=source))


def _checked(level: Level | AssayError) -> Level:
    if isinstance(level, AssayError):
        raise level
    return level
