"""`audit`: what noise is in these images, and does the Gaussian model of training hold for them?

Images are measured one by one (`assay.data.audit.level`), together (`assay.data.audit.group`), or, if there are
several exposures of each scene, by what differs between these.
"""

import csv
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from assay.data.audit.group import (
    Measured,
    Sensor,
    fit_sensor,
    group_level,
    is_correlated,
    mean_around,
    neighbour_correlation,
    sensor_from_repeats,
    stripes,
)
from assay.data.audit.level import MIN_SIDE, blind_net, spread, train_on_examples
from assay.data.decode import check_finite, is_lossy
from assay.data.readers import RawImages
from assay.data.spec import Level
from assay.data.store import Store
from assay.data.units import Stabilised, ends_around
from assay.devices import one_thread
from assay.errors import AssayError, check, check_enough, warn
from assay.files import csv_cell

Progress = Callable[[int, int], None]
_BATCH = 64
_REPEATS = "from repeated exposures of"  # the method
_MAX_VALUES = 2**26  # of the images kept for what all have in common
_MIN_EXAMPLES = 20
_MAX_EXAMPLES = 1000
_NOISY_EXAMPLES = 0.06  # of an image's range that may look like noise in clean examples
_SAME_UNITS = 8.0  # times larger or smaller that values of images in the same units may be
_VARIED = 2.0  # times the noise that the signal must vary by to show that the noise does not depend on it
_OTHER_KIND = 1.2  # times beyond the interval of an image that a level by examples of its kind is not
_MAX_WRONG = 0.15  # of recorded levels, which may be outside their interval
_MAX_ERROR = 10.0  # of the logarithm of a level; no noise was found then
_ONE_SCENE = 0.6  # correlation of neighbours above which exposures differ by more than noise
_MAX_FACTOR = 10.0  # either way that a level may be off, to be called measured
_AGREEMENT = 1.5  # mean squared deviation, in standard errors, of images that may share a level


@dataclass(frozen=True, repr=False)
class Audit:
    """The noise of N images, in the units of their files; arrays are (N,)."""

    names: tuple[str, ...]
    sigma: np.ndarray
    low: np.ndarray  # of the 95% interval
    high: np.ndarray
    clipped: np.ndarray  # the share of values at the lowest or the highest value of all images
    method: str
    group: Measured  # the level, if all images share one
    agree: bool  # whether the images' own levels allow that
    whiteness: Measured  # correlation of neighbours over all images
    step: float  # between neighbouring values (1 for whole numbers), 0 if they are not rounded
    values: tuple[float, float, float, float]  # the lowest, those that 1% and 99% lie below, the highest
    mean: float  # value
    sensor: Sensor | None
    stripes: str  # what to say of noise that rows or columns share
    recorded: np.ndarray | None  # levels that are stated for the images

    def __repr__(self) -> str:
        warnings = [("warning", text) for text in self.warnings()]
        return "\n".join(f"{title}: {text}" for title, text in [*self.rows(), *warnings])

    def rows(self) -> list[tuple[str, str]]:
        """The audit as a table of two columns."""
        lowest, typical, highest = np.quantile(self.sigma, [0.05, 0.5, 0.95])
        spread = f" ({lowest:.4g} to {highest:.4g} for 90% of them)" if highest > lowest else ""
        darkest, low, high, brightest = (f"{value:.4g}" for value in self.values)
        white, noisy = self.whiteness, self.low > 0
        is_white_known = white.high - white.low < 1
        factor = float(np.median(np.sqrt(self.high[noisy] / self.low[noisy]))) if noisy.any() else 1.0
        sure = f"each to within a factor of {factor:.3g} (95% interval)"
        if not factor <= _MAX_FACTOR:
            sure = f"but not to within a factor of {_MAX_FACTOR:g}: clean examples or `repeats` tell more"
        rows = [
            ("images", f"{len(self.names):,}"),
            ("values of the pixels", f"{darkest} to {brightest} ({low} to {high} for 98% of them)"),
            ("mean value", f"{self.mean:.5g}"),
            ("noise level, in the same units", f"{typical:.4g}{spread}"),
            ("measured", f"{self.method}, {sure}"),
            ("correlation of neighbours", f"{white:.2f}" if is_white_known else "unknown: too few flat parts"),
            ("clipped values", f"{self.clipped.mean():.2%}"),
            ("rounded to steps of", f"{self.step:.4g}" if 0 < self.step < math.inf else "not rounded"),
        ]
        if len(self.names) > 1 and typical > 0:
            rows.append(("if all share one level", f"{self.group:.4g}" if self.agree else "they do not"))
        if self.recorded is not None:
            rows.append(("recorded levels", f"{self._wrong():.0%} are outside their measured interval"))
            least, noisy_there = self.recorded[self.recorded > 0].min(), self.low[self.recorded == 0]
            if num := int((noisy_there > least).sum()):
                what = f"{num:,} of {len(noisy_there):,} surely have more noise than the least level"
                rows.append(("recorded as clean", f"{what}, {least:.3g}"))
        found = self.sensor
        varied = np.ptp(found.mean) if found is not None and len(found.mean) else 0.0
        if found is None or (found.gain.low <= 0 and varied < _VARIED * typical):
            unknown = "unknown: needs different brightness, in flat parts or in `repeats`"
            return [*rows, ("gain and read noise", unknown)]
        if found.gain.low <= 0:
            return [*rows, ("gain", "none found: the noise does not depend on the signal")]
        rows.append(("gain (variance per unit of signal)", f"{found.gain:.4g}"))
        if found.offset.value <= 0:  # black is above
            return rows
        read_noise = Measured(*(math.sqrt(max(end, 0.0)) for end in found.offset))
        return [*rows, (f"read noise, if {found.black:g} is black", f"{read_noise:.4g}")]

    def warnings(self) -> list[str]:
        """What of the Gaussian model does not hold, in words."""
        found, typical, share = [], float(np.median(self.sigma)), float(self.clipped.mean())
        if typical == 0:
            found.append("most images have perfectly flat parts: no noise, or it was removed or clipped")
        if share > 0.01 and typical > 0:
            found.append(f"{share:.1%} of the values are clipped: measured levels are too low")
        if self.step > typical > 0:
            found.append(f"values are rounded to steps of {self.step:.3g}, more than the noise ({typical:.3g})")
        if self.method.startswith(_REPEATS) and self.whiteness.value > _ONE_SCENE:
            what = f"exposures differ by what is smooth (correlation of neighbours {self.whiteness.value:.2f})"
            found.append(f"{what}: does each folder hold exposures of one scene, and are they aligned?")
        elif is_correlated(self.whiteness):
            white = f"{self.whiteness.value:.2f}; white noise: 0"
            what = f"the noise of neighbouring pixels is correlated ({white}), as after resizing, sharpening,"
            what += " compression or demosaicing, if it is not texture. Training assumes white noise, and true"
            found.append(f"{what} levels are higher: use unprocessed images if you can")
        if self.stripes:
            found.append(self.stripes)
        if lossy := [name for name in self.names if is_lossy(name)]:
            what = f"{len(lossy):,} files are compressed with loss ({lossy[0]}), which removes noise"
            found.append(f"{what}: the camera's own noise cannot be measured in them. Use its raw files")
        if self.recorded is not None and (wrong := self._wrong()) > _MAX_WRONG:
            stated, measured = (np.median(each[self.recorded > 0]) for each in (self.recorded, self.sigma))
            what = f"{wrong:.0%} of recorded levels are outside their measured interval"
            found.append(f"{what} (typically {stated:.3g}, where {measured:.3g} is measured): are they right?")
        if self.sensor is not None and (ratio := self.sensor.dependence()) > 1:
            what = f"the noise depends on the signal: its variance is {ratio:.1f} times as large"
            what += " in bright parts as in dark ones"
            if self.recorded is not None:
                what += ", which one recorded level for an image does not say"
            elif not lossy:
                low, high = ends_around(self.values[0], self.values[3])
                what += f". Pack with `:range={low:g},{high:g},{self.sensor}`"
                if not self.sensor.black:
                    what += ", one number for black and read noise; if you know black, measure with `--black`"
            found.append(what)
        return found

    def _wrong(self) -> float:
        """The share of recorded levels that are outside their measured interval."""
        assert self.recorded is not None
        return float(((self.recorded < self.low) | (self.recorded > self.high))[self.recorded > 0].mean())


def audit(
    raw: RawImages,
    clean: RawImages | None = None,
    repeats: bool = False,
    shared: bool = False,
    black: float = 0.0,
    progress: Progress | None = None,
) -> Audit:
    """Measure the noise of `raw`, image by image and as a whole.

    With `clean` examples of the same kind of images, levels are read by a network trained on them. They are
    brought to the units of `raw` by the `value_range` of both. With `repeats`, images in the same folder are
    exposures of the same scene, and levels are exact. `shared`: all images have one level, and each is given
    that of the group. `black`, the value of no light, tells the read noise.
    """
    if repeats and clean is not None:
        raise AssayError("repeated exposures need no clean examples", key="clean", cure="give one of the two")
    stated = [raw.noise(i).sigma for i in range(len(raw.names))]
    recorded = np.array(stated) if all(isinstance(sigma, float) for sigma in stated) and any(stated) else None
    noisy = np.ones(len(stated), bool) if recorded is None else recorded > 0
    with one_thread():
        found = (
            _from_repeats(raw, black, progress) if repeats else _from_each(raw, clean, black, noisy, progress)
        )
    if shared:
        depends = found["sensor"] is not None and found["sensor"].dependence() > 1
        if found["group"].value > 0 and (depends or not found["agree"]):
            warn("levels differ, between images or within them: leave out `shared`, whose level describes few")
        found |= {key: np.full(len(raw.names), end) for key, end in found["group"]._asdict().items()}
        found["sigma"] = found.pop("value")
    return Audit(names=tuple(raw.names), recorded=recorded, **found)


def _from_each(
    raw: RawImages, clean: RawImages | None, black: float, noisy: np.ndarray, progress: Progress | None
) -> dict[str, Any]:
    """What each image says about its own noise, and all of them together; the `noisy` (N,) tell of a camera."""
    examples = [] if clean is None else _examples(raw, clean)
    net = train_on_examples(examples) if examples else blind_net()
    kept = spread(len(raw.names), max(1, _MAX_VALUES // _image(raw, 0).numel()))
    looked_at, images, levels, ends = set(kept), list[Tensor](), list[Tensor](), list[tuple[float, ...]]()
    for start, batch in _batches(raw, progress):
        levels.append(net.levels(torch.stack(batch)))
        images += [image for i, image in enumerate(batch, start) if i in looked_at]
        ends += map(_ends, batch)
    sigma, low, high = torch.cat(levels, 1).double().numpy()
    if examples:
        _check_kind(images, sigma[kept])
    values, seen = _values(np.array(ends), images), [x for i, x in zip(kept, images, strict=True) if noisy[i]]
    bounds = values["values"][0], values["values"][-1]
    known = (sigma > 0) | (values["clipped"] == 0)  # parts that are clipped look perfectly flat
    known |= not known.any()
    with np.errstate(divide="ignore", invalid="ignore"):
        deviation = np.log(sigma / np.median(sigma[known])) / (np.log(high / low) / (2 * 1.96))
    agree = bool(np.median(sigma) > 0 and np.square(np.nan_to_num(deviation[known])).mean() < _AGREEMENT)
    own = sigma[[i for i in kept if noisy[i]]]  # of images that differ, texture is less in the louder half
    loud = [x for x, level in zip(seen, own, strict=True) if agree or level >= np.median(own)]
    return {
        "sigma": sigma,
        "low": low,
        "high": high,
        "method": f"from {len(examples):,} clean examples" if examples else "from each image alone",
        "group": group_level(images, bounds, examples),
        "agree": agree,
        "whiteness": neighbour_correlation(images, sigma[kept].tolist()),
        "stripes": stripes(seen) and stripes(loud),
        "sensor": fit_sensor(seen, bounds, black),
        **values,
    }


def _examples(raw: RawImages, clean: RawImages) -> list[Tensor]:
    """Clean images (C, H, W) in the units of `raw`; an error if their values are of another size."""
    check_enough(len(clean.names), _MIN_EXAMPLES, f"clean examples in {clean.name}", "clean")
    examples = [_image(clean, i) for i in spread(len(clean.names), _MAX_EXAMPLES)]
    if raw.value_range and clean.value_range:
        (low, high), (black, white) = raw.value_range, clean.value_range
        examples = [low + (image - black) * ((high - low) / (white - black)) for image in examples]
    some = [_image(raw, i) for i in spread(len(raw.names), len(examples))]
    sizes = [float(np.median([image.median().abs() + image.std() for image in x])) for x in (some, examples)]
    alike = (raw.value_range is None) == (clean.value_range is None)
    if not alike or not 1 / _SAME_UNITS < sizes[0] / max(sizes[1], 1e-30) < _SAME_UNITS:
        what = f"{raw.name} has values of about {sizes[0]:.3g}, the clean examples of about {sizes[1]:.3g}"
        raise AssayError(
            f"{what}: their units differ",
            key="range",
            cure="give black and white of both sources, or scale arrays alike",
        )
    shapes = [{tuple(image.shape) for image in x} for x in (some, examples)]
    what = f"are {min(shapes[1])}, and the images of {raw.name} {min(shapes[0])} (channels, height, width)"
    cure = "cut both to one size; do not scale them, which changes noise and texture"
    check([(not shapes[0] & shapes[1], AssayError(what, path=clean.name, key="clean", cure=cure))])
    few = [[x[i] for i in spread(len(x), _MIN_EXAMPLES)] for x in (some, examples)]
    own, theirs = (float(np.median([float(blind_net().levels(image[None])[0]) for image in x])) for x in few)
    if theirs > max(own / 2, _NOISY_EXAMPLES * float(np.median([x.max() - x.min() for x in few[1]]))):
        warn(f"noise measures {theirs:.3g} in {clean.name}, and {own:.3g} in {raw.name}: are examples clean?")
    return examples


def _check_kind(images: Sequence[Tensor], sigma: np.ndarray) -> None:
    """Warn if levels (N,) read by clean examples are far from those that images alone give."""
    some = spread(len(images), _MIN_EXAMPLES)
    alone = torch.cat([blind_net().levels(images[i][None]) for i in some], 1).double().numpy()
    outside = (sigma[some] < alone[1] / _OTHER_KIND) | (sigma[some] > alone[2] * _OTHER_KIND)
    if outside.mean() > 0.5:
        by, own = np.median(sigma[some]), np.median(alone[0])
        what = f"noise measures {by:.3g} by the clean examples, and {own:.3g} without"
        warn(f"{what}: do they show the same kind?")


def _from_repeats(raw: RawImages, black: float, progress: Progress | None) -> dict[str, Any]:
    """What differs between exposures of the same scene is noise."""
    scenes: dict[PurePosixPath, list[int]] = {}
    for i, name in enumerate(raw.names):
        scenes.setdefault(PurePosixPath(name).parent, []).append(i)
    variance, error, correlation = (np.zeros(len(raw.names)) for _ in range(3))
    pixels: list[tuple[np.ndarray, ...]] = []  # of each scene: mean, variance, mean of the pixels around
    num_values, ends, firsts = 0, np.zeros((len(raw.names), 5)), []
    for members in scenes.values():
        stack = [_image(raw, i) for i in members]
        if len(stack) < 2 or len({image.shape for image in stack}) > 1:
            what = "is not one of two or more exposures of one scene and one size"
            raise AssayError(what, path=raw.names[members[0]], key="repeats", cure="give each scene a folder")
        ends[members] = list(map(_ends, stack))
        firsts.append(stack[0])
        y = torch.stack(stack).double()
        if any(torch.equal(one, other) and one.min() < one.max() for one, other in pairwise(stack)):
            what = "is an exposure that is there twice, so that nothing differs"
            raise AssayError(what, path=raw.names[members[0]], key="repeats", cure="give other exposures")
        residual, count = y - y.mean(0), len(y)
        power = residual.square().flatten(1).mean(1)
        # E power_i = s_i^2 (1 - 2/n) + T / n^2 with T the sum of all s_j^2, and powers sum to T (1 - 1/n).
        total = power.sum() / (1 - 1 / count)
        own = total.expand(2) / 2 if count == 2 else (power - total / count**2) / (1 - 2 / count)
        variance[members] = own.clamp_min(0)
        error[members] = math.sqrt(2 / y[0].numel()) * power / (0.5 if count == 2 else 1 - 2 / count)
        beside = [residual[..., 1:] * residual[..., :-1], residual[..., 1:, :] * residual[..., :-1, :]]
        near = torch.stack([product.flatten(1).mean(1) for product in beside]).mean(0)
        correlation[members] = near / power.clamp_min(1e-300)
        found = (y.mean(0), y.var(0), mean_around(y.mean(0)))
        pixels.append(tuple(each.flatten().numpy() for each in found))
        num_values += y.numel() - y[0].numel()
        if progress is not None:
            progress(len(pixels), len(scenes))
    mean, variances, around = map(np.concatenate, zip(*pixels, strict=True))
    sigma, level = np.sqrt(variance), math.sqrt(variances.mean())
    relative = np.minimum(error / (2 * np.maximum(variance, 1e-300)), _MAX_ERROR)
    half = 1.96 / math.sqrt(2 * num_values)
    deviation = (variance - level**2) / np.maximum(error, 1e-300)
    return {
        "sigma": sigma,
        "low": sigma * np.exp(-1.96 * relative),
        "high": sigma * np.exp(1.96 * relative),
        "method": f"{_REPEATS} {len(scenes):,} scene{'s' if len(scenes) > 1 else ''}",
        "group": Measured(level, level * math.exp(-half), level * math.exp(half)),
        "agree": bool(level > 0 and np.square(deviation).mean() < _AGREEMENT),
        "whiteness": Measured.around(float(correlation.mean()), 2 / math.sqrt(num_values)),
        "sensor": sensor_from_repeats(mean, variances, around, black),
        "stripes": stripes(firsts),
        **_values(ends, firsts),
    }


def images_of(store: Store) -> RawImages:
    """The images of a store in the units of the files they came from, or stabilised, to be measured again."""
    known = store.physical_range
    low, high = (-1.0, 1.0) if known is None or isinstance(known, Stabilised) else known

    def pixels(i: int) -> np.ndarray:
        return (low + (store.read(torch.tensor([i]))[0] + 1) * ((high - low) / 2)).permute(1, 2, 0).numpy()

    names = store.source_names(range(len(store)))
    sigma = store.sigma_tn.double().numpy() * (high - low) / 2
    return RawImages(store.name, names, pixels, noise=lambda i: Level(float(sigma[i])))


def _ends(image: Tensor) -> tuple[float, ...]:
    """The lowest and the highest value of an image, the share of its values that equal each, and its mean."""
    ends = float(image.min()), float(image.max())
    counts = [int((image == end).sum()) for end in ends]
    low, high = (count / image.numel() if count > 1 else 0.0 for count in counts)  # every image has a brightest
    return *ends, low, high, float(image.double().mean())


def _values(ends: np.ndarray, images: Sequence[Tensor]) -> dict[str, Any]:
    """Extremes, mean, clipping and rounding from the ends (N, 5) of all images, and some of these."""
    low, high = ends[:, 0].min(), ends[:, 1].max()
    clipped = np.where(ends[:, :2] == (low, high), ends[:, 2:4], 0).sum(1)
    some = [images[i] for i in spread(len(images), _MAX_EXAMPLES)]
    sample = np.concatenate([image.flatten()[:: max(1, image.numel() // 4096)].numpy() for image in some])
    return {
        "clipped": clipped if low < high else np.zeros(len(ends)),
        "step": min(rounding_step(images[i]) for i in spread(len(images), 16)),
        "mean": float(ends[:, 4].mean()),
        "values": (float(low), *np.quantile(sample, [0.01, 0.99]).tolist(), float(high)),
    }


def rounding_step(image: Tensor) -> float:
    """The step between the values of a rounded image; 0 if they are not rounded, inf if all are equal."""
    values = image.double().unique()
    if len(values) == 1:
        return math.inf
    if len(values) > max(256, image.numel() / 2) and bool((values % 1 != 0).any()):
        return 0.0
    gaps = values.diff()
    step = gaps.min()
    return float(step) if bool(((gaps / step - (gaps / step).round()).abs() < 1e-3).all()) else 0.0


def _image(raw: RawImages, i: int) -> Tensor:
    """Image (C, H, W), float32, in the units of its file."""
    pixels = raw.load(i)
    if min(pixels.shape[:2]) < MIN_SIDE:
        what = f"has {pixels.shape[0]} x {pixels.shape[1]} pixels, too few for noise to be measured"
        raise AssayError(what, path=raw.names[i], cure=f"give images of {MIN_SIDE} x {MIN_SIDE} and more")
    check_finite(pixels, path=raw.names[i], cure="replace them first")
    return torch.from_numpy(pixels.astype(np.float32).transpose(2, 0, 1).copy())


def _batches(raw: RawImages, progress: Progress | None) -> Iterator[tuple[int, list[Tensor]]]:
    """Runs of images of one shape, each with the number of its first."""
    batch: list[Tensor] = []
    for i in range(len(raw.names)):
        image = _image(raw, i)
        if batch and (image.shape != batch[0].shape or len(batch) * image.numel() > _BATCH * 4096):
            yield i - len(batch), batch
            batch = []
        batch.append(image)
        if progress is not None:
            progress(i + 1, len(raw.names))
    yield len(raw.names) - len(batch), batch


def write_levels(found: Audit, path: Path) -> None:
    """A CSV for `levels=` of `assay data pack`; levels are in the files' units."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["filename", "sigma", "low", "high", "clipped"])
        columns = found.sigma, found.low, found.high, found.clipped
        for name, *numbers in zip(found.names, *columns, strict=True):
            writer.writerow([csv_cell(name), *(f"{number:.6g}" for number in numbers)])
