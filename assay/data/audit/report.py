"""`audit`: what noise is in these images, and does the Gaussian model of training hold for them?"""

import csv
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from torch import Tensor

from assay.data.audit.camera import (
    Estimate,
    Sensor,
    fit_sensor,
    group_level,
    neighbour_correlation,
    sensor_from_repeats,
)
from assay.data.audit.level import MIN_SIDE, blind_net, train_on_examples
from assay.data.readers import RawImages

Progress = Callable[[int, int], None]
_BATCH = 64
_MAX_VALUES = 2**26  # of the images kept for what all have in common
_MIN_EXAMPLES = 20
_MAX_EXAMPLES = 1000
_AGREEMENT = 1.5  # mean squared deviation, in standard errors, of images that may share a level


@dataclass(frozen=True)
class Audit:
    """The noise of N images, in the units of their files; arrays are (N,).

    `correlation` is that of neighbouring pixels' noise, NaN where the image has no flat part to measure it in.
    `clipped` is the share of values at the lowest or the highest value of all images. `step` is the distance
    of neighbouring values (1 for whole numbers), 0 if they are not rounded.
    """

    names: tuple[str, ...]
    sigma: np.ndarray
    low: np.ndarray  # of the 95 % interval
    high: np.ndarray
    correlation: np.ndarray
    clipped: np.ndarray
    method: str
    group: Estimate  # the level, if all images share one
    agree: bool  # whether the images' own levels allow that
    whiteness: Estimate  # correlation of neighbours over all images
    step: float
    sensor: Sensor | None
    examples: Tensor | None  # up to 24 images (M, C, H, W) from the least to the most noise, if of one size

    def warnings(self) -> list[str]:
        """What of the Gaussian model does not hold, in words."""
        found, typical = [], float(np.median(self.sigma))
        if typical == 0:
            found.append(
                "most images have perfectly flat parts: there is no noise in them, or it was removed or clipped"
            )
        share = float(self.clipped.mean())
        if share > 0.01 and typical > 0:
            found.append(
                f"{share:.1%} of the values are clipped at the lowest or highest value, which cuts off their "
                "noise: levels come out too low"
            )
        if self.step > typical > 0:
            found.append(
                f"values are rounded to steps of {self.step:.3g}, more than the noise ({typical:.3g}): it is no "
                "longer Gaussian"
            )
        if self.whiteness.low > 0.05 and self.whiteness.value > 0.1:
            found.append(
                f"the noise of neighbouring pixels is correlated ({self.whiteness.value:.2f}; white noise: 0), as "
                "it is after resizing, sharpening, compression or demosaicing. Training assumes white noise, and "
                "the true levels are higher than these: use unprocessed images if you can"
            )
        ratio = self.signal_dependence()
        if ratio > 1.5 and self.sensor is not None:
            gain, offset = self.sensor.gain.value, self.sensor.offset.value
            found.append(
                f"the noise depends on the signal: its variance is {ratio:.1f} times as large in bright parts "
                f"as in dark ones (variance = {gain:.4g} * value + {offset:.4g})"
            )
        return found

    def signal_dependence(self) -> float:
        """Variance of the noise at the bright end over that at the dark end; 1 if the gain may be zero."""
        if self.sensor is None or self.sensor.gain.low <= 0:
            return 1.0
        dark, bright = self.sensor.mean.min(), self.sensor.mean.max()
        line = [self.sensor.gain.value * mean + self.sensor.offset.value for mean in (dark, bright)]
        return line[1] / line[0] if line[0] > 0 else math.inf


def audit(
    raw: RawImages,
    clean: RawImages | None = None,
    repeats: bool = False,
    shared: bool = False,
    progress: Progress | None = None,
) -> Audit:
    """Measure the noise of `raw`, image by image and as a whole.

    With `clean` examples of the same kind of images, levels are read by a network trained on them. With
    `repeats`, images in the same folder are exposures of the same scene, and levels are exact. `shared`: all
    images have one level, and each is given that of the group.
    """
    if repeats and clean is not None:
        raise ValueError("repeated exposures need no clean examples: give one of the two")
    measured = _from_repeats(raw, progress) if repeats else _from_each(raw, clean, progress)
    if not shared:
        return measured
    level = measured.group
    one = {name: np.full(len(raw.names), getattr(level, key)) for name, key in _SHARED_COLUMNS}
    return replace(measured, **one)  # type: ignore[arg-type]


_SHARED_COLUMNS = (("sigma", "value"), ("low", "low"), ("high", "high"))


def _from_each(raw: RawImages, clean: RawImages | None, progress: Progress | None) -> Audit:
    examples: list[Tensor] = []
    if clean is not None:
        if len(clean.names) < _MIN_EXAMPLES:
            raise ValueError(
                f"{clean.name} has {len(clean.names)} images: give {_MIN_EXAMPLES} clean examples or more, or none"
            )
        examples = [_image(clean, i) for i in _spread(len(clean.names), _MAX_EXAMPLES)]
    net = train_on_examples(examples) if examples else blind_net()
    kept = _spread(len(raw.names), max(1, _MAX_VALUES // _image(raw, 0).numel()))
    looked_at, values, images, levels = set(kept), _Values(len(raw.names)), [], []
    for batch in _batches(raw, progress):
        found = net.levels(torch.stack([image for _, image in batch]))
        levels.append((found.sigma, found.low, found.high))
        images += [image for i, image in batch if i in looked_at]
        for i, image in batch:
            values.add(i, image)
    sigma, low, high = (torch.cat(column).double().numpy() for column in zip(*levels, strict=True))
    correlation = np.full(len(sigma), np.nan)
    correlation[kept], whiteness = neighbour_correlation(images, sigma[kept].tolist())
    with np.errstate(divide="ignore", invalid="ignore"):
        deviation = np.nan_to_num(np.log(sigma / np.median(sigma)) / (np.log(high / low) / (2 * 1.96)))
    return Audit(
        names=tuple(raw.names),
        sigma=sigma,
        low=low,
        high=high,
        correlation=correlation,
        clipped=values.clipped(),
        method=f"from {len(examples):,} clean examples" if examples else "from each image alone",
        group=group_level(images, examples),
        agree=bool(np.median(sigma) > 0 and np.square(deviation).mean() < _AGREEMENT),
        whiteness=whiteness,
        step=values.step,
        sensor=fit_sensor(images),
        examples=_gallery(images, sigma[kept]),
    )


def _from_repeats(raw: RawImages, progress: Progress | None) -> Audit:
    """What differs between exposures of the same scene is noise."""
    scenes: dict[PurePosixPath, list[int]] = {}
    for i, name in enumerate(raw.names):
        scenes.setdefault(PurePosixPath(name).parent, []).append(i)
    variance, error, correlation = (np.zeros(len(raw.names)) for _ in range(3))
    values, firsts, means, variances, num_values = _Values(len(raw.names)), [], [], [], 0
    for members in scenes.values():
        if len(members) < 2:
            raise ValueError(
                f"{raw.names[members[0]]} is alone in its folder: with repeats, each folder holds two or more "
                "exposures of one scene"
            )
        stack = [_image(raw, i) for i in members]
        for i, image in zip(members, stack, strict=True):
            if image.shape != stack[0].shape:
                raise ValueError(
                    f"{raw.names[i]} and {raw.names[members[0]]} differ in size: repeats have one size"
                )
            values.add(i, image)
        y = torch.stack(stack).double()
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
        means.append(y.mean(0).flatten().numpy())
        variances.append(y.var(0).flatten().numpy())
        num_values += y.numel() - y[0].numel()
        firsts.append(stack[0])
        if progress is not None:
            progress(len(means), len(scenes))
    sigma = np.sqrt(variance)
    relative = error / (2 * np.maximum(variance, 1e-300))
    level = math.sqrt(np.concatenate(variances).mean())
    half, white = 1.96 / math.sqrt(2 * num_values), float(correlation.mean())
    deviation = (variance - level**2) / np.maximum(error, 1e-300)
    return Audit(
        names=tuple(raw.names),
        sigma=sigma,
        low=sigma * np.exp(-1.96 * relative),
        high=sigma * np.exp(1.96 * relative),
        correlation=correlation,
        clipped=values.clipped(),
        method=f"from repeated exposures of {len(scenes):,} scene{'s' if len(scenes) > 1 else ''}",
        group=Estimate(level, level * math.exp(-half), level * math.exp(half)),
        agree=bool(level > 0 and np.square(deviation).mean() < _AGREEMENT),
        whiteness=Estimate(white, white - 2 / math.sqrt(num_values), white + 2 / math.sqrt(num_values)),
        step=values.step,
        sensor=sensor_from_repeats(np.concatenate(means), np.concatenate(variances)),
        examples=_gallery(firsts, np.array([sigma[members[0]] for members in scenes.values()])),
    )


class _Values:
    """Extremes and rounding of the values, gathered image by image."""

    def __init__(self, num_images: int) -> None:
        self._extreme = np.zeros((2, num_images))  # lowest and highest value
        self._share = np.zeros((2, num_images))  # of the image's values that equal it
        self._every = max(1, num_images // 16)
        self.step = math.inf

    def add(self, i: int, image: Tensor) -> None:
        """Look at image number `i`."""
        if i % self._every == 0:
            self.step = min(self.step, rounding_step(image))
        for row, value in enumerate((image.min(), image.max())):
            self._extreme[row, i] = value
            self._share[row, i] = (image == value).double().mean()

    def clipped(self) -> np.ndarray:
        """The share (N,) of each image's values that lie at the lowest or highest value of all images."""
        bound = np.array([self._extreme[0].min(), self._extreme[1].max()])[:, None]
        return np.where(self._extreme == bound, self._share, 0).sum(0)


def rounding_step(image: Tensor) -> float:
    """The step between the values of a rounded image; 0 if they are not rounded, inf if all are equal."""
    values = image.double().unique()
    if len(values) == 1:
        return math.inf
    if len(values) > image.numel() / 2 and len(values) > 256:
        return 0.0
    gaps = values.diff()
    step = gaps.min()
    return float(step) if bool(((gaps / step - (gaps / step).round()).abs() < 1e-3).all()) else 0.0


def _image(raw: RawImages, i: int) -> Tensor:
    """Image (C, H, W), float32, in the units of its file."""
    pixels = raw.load(i)
    if min(pixels.shape[:2]) < MIN_SIDE:
        raise ValueError(
            f"{raw.names[i]} has {pixels.shape[0]} x {pixels.shape[1]} pixels: noise is measured in images of "
            f"{MIN_SIDE} x {MIN_SIDE} and more"
        )
    if not np.isfinite(pixels).all():
        raise ValueError(f"{raw.names[i]} has pixels that are NaN or infinite: replace them first")
    return torch.from_numpy(pixels.astype(np.float32).transpose(2, 0, 1).copy())


def _batches(raw: RawImages, progress: Progress | None) -> Iterator[list[tuple[int, Tensor]]]:
    """Runs of images of one shape, each with its number."""
    batch: list[tuple[int, Tensor]] = []
    for i in range(len(raw.names)):
        image = _image(raw, i)
        if batch and (image.shape != batch[0][1].shape or len(batch) * image.numel() > _BATCH * 4096):
            yield batch
            batch = []
        batch.append((i, image))
        if progress is not None:
            progress(i + 1, len(raw.names))
    yield batch


def _spread(total: int, count: int) -> list[int]:
    """At most `count` of the numbers 0 .. total - 1, evenly spread."""
    return np.unique(np.linspace(0, total - 1, min(total, count)).round().astype(int)).tolist()


def _gallery(images: Sequence[Tensor], sigma: np.ndarray) -> Tensor | None:
    if len({image.shape for image in images}) != 1 or images[0].shape[0] not in (1, 3):
        return None
    order = np.argsort(sigma, kind="stable")
    return torch.stack([images[order[i]] for i in _spread(len(order), 24)])


def write_levels(found: Audit, path: Path) -> None:
    """A CSV that `assay data pack --sigma-file` takes; levels are in the files' units."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["filename", "sigma", "low", "high", "correlation", "clipped"])
        for name, *numbers in zip(
            found.names, found.sigma, found.low, found.high, found.correlation, found.clipped, strict=True
        ):
            writer.writerow([name, *("" if math.isnan(number) else f"{number:.6g}" for number in numbers)])


def draw_audit(found: Audit, path: Path) -> None:
    """A picture: the levels with their intervals, variance against signal, images from low to high noise."""
    import matplotlib.pyplot as plt

    from assay.data.picture import image_grid

    figure, (levels, line, gallery) = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    order = np.argsort(found.sigma, kind="stable")
    place = np.arange(len(order))
    levels.fill_between(place, found.low[order], found.high[order], alpha=0.3, label="95 % interval", lw=0)
    levels.plot(place, found.sigma[order], label="noise level")
    levels.axhline(found.group.value, color="black", ls=":", label="level of the group")
    levels.set(xlabel="images, sorted", ylabel="sigma, in the files' units", ylim=(0, None))
    levels.legend()
    if found.sensor is not None:
        mean = found.sensor.mean
        line.plot(mean, found.sensor.variance, "o")
        line.plot(mean, found.sensor.gain.value * mean + found.sensor.offset.value)
    line.set(xlabel="mean of flat parts", ylabel="variance of their noise", ylim=(0, None))
    if found.examples is not None:
        low, high = found.examples.quantile(0.005), found.examples.quantile(0.995)
        scaled = (found.examples - low) / (high - low).clamp_min(1e-12) * 2 - 1
        gallery.imshow(image_grid(scaled, 6))
        gallery.set_title("from the least to the most noise")
    gallery.axis("off")
    figure.savefig(path, format="png", dpi=110)
    plt.close(figure)
