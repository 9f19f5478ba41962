"""What can be evaluated besides a store: a folder or archive of images, and samples made as they are read."""

from collections.abc import Mapping, Sequence
from copy import copy
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from assay.checkpoint import CheckpointInfo, find_checkpoint, load_checkpoint
from assay.data import ImageSource, open_store
from assay.data.readers import RawImages, read_any
from assay.data.shards import is_store
from assay.data.view import image_seeds
from assay.denoise import Denoiser, copy_to
from assay.errors import AssayError
from assay.files import sha256
from assay.metrics.held_out import BandLoss
from assay.noise import per_image
from assay.sample import SampleConfig, SeededNoise, spread_labels


class Samples(ImageSource):
    """Image i is sampled from seed `first_seed` + i when it is read, and is the same image every time.

    `label` (num_images,) names the classes, if there are any.
    """

    def __init__(
        self,
        name: str,
        denoiser: Denoiser,
        image_shape: tuple[int, int, int],
        num_images: int,
        first_seed: int = 0,
        sample: SampleConfig | None = None,
        label: Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.name, self.denoiser, self.image_shape, self.device = name, denoiser, image_shape, device
        self.num_images, self.first_seed = num_images, first_seed
        self.sample = SampleConfig() if sample is None else sample
        self._given = label

    def __len__(self) -> int:
        return self.num_images

    def on(self, device: torch.device) -> "Samples":
        """The same images, sampled on another device."""
        there = copy(self)
        there.denoiser, there.device = copy_to(self.denoiser, device), device
        return there

    def read(self, index: Tensor) -> Tensor:
        """`index` (B,) -> (B, C, H, W), sampled in one batch."""
        seeds = [self.first_seed + int(i) for i in index]
        label = None if self._given is None else self._given[index]
        batches = self.sample.generate(
            self.denoiser, seeds, self.image_shape, label, max(len(index), 1), self.device
        )
        return torch.cat([batch.images for batch in batches]).cpu()


class SamplerSettings(BaseModel):
    """How a checkpoint was sampled, and what it knows of its training."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sample: SampleConfig
    first_seed: int
    checkpoint_sha256: str
    info: CheckpointInfo


def sample_checkpoint(
    path: Path,
    num_images: int,
    first_seed: int = 0,
    sample: SampleConfig = SampleConfig(),  # noqa: B008
    frequencies: Sequence[float] | None = None,
    device: str | torch.device = "cpu",
) -> tuple[Samples, SamplerSettings]:
    """Samples of a checkpoint or of a finished run's folder, and the settings for the record.

    `frequencies` (num_classes,) are the classes' shares, uniform by default.
    """
    checkpoint = load_checkpoint(path)
    sample = sample.for_levels(level for level, _ in checkpoint.info.sigma_tn)
    label = None
    if num_classes := checkpoint.config.num_classes:
        if frequencies is None or len(frequencies) != num_classes:
            frequencies = [1.0] * num_classes
        label = spread_labels(frequencies, range(first_seed, first_seed + num_images))
    samples = Samples(
        name=path.name,
        denoiser=checkpoint.sampler(sample, device),
        image_shape=checkpoint.config.image_shape,
        num_images=num_images,
        first_seed=first_seed,
        sample=sample,
        label=label,
        device=device,
    )
    settings = SamplerSettings(
        sample=sample,
        first_seed=first_seed,
        checkpoint_sha256=sha256(find_checkpoint(path)),
        info=checkpoint.info,
    )
    return samples, settings


class BandedDenoiser(nn.Module):
    """A denoiser for each band of levels: `denoisers[k]` below `edges[k]`, the last from the last edge up.

    So sampling can use the weights of each band's own stop (`snapshots_by_level`), or one model with another's
    predictions in a single band, which shows which levels a distance minds (`with_band_of`).
    """

    def __init__(self, edges: Sequence[float], denoisers: Sequence[nn.Module]) -> None:
        super().__init__()
        if len(denoisers) != len(edges) + 1 or list(edges) != sorted(edges):
            raise AssayError(f"{len(denoisers)} denoisers need {len(denoisers) - 1} rising edges", key="edges")
        self.denoisers = nn.ModuleList(denoisers)
        self.register_buffer("edges", torch.tensor(edges, dtype=torch.float64), persistent=False)
        self.num_classes = getattr(denoisers[0], "num_classes", 0)

    def forward(self, x_t: Tensor, sigma_t: Tensor, label: Tensor | None = None) -> Tensor:
        """`x_t` (B, C, H, W), `sigma_t` (B,); images of one batch may be in different bands."""
        band = torch.bucketize(sigma_t.double(), self.get_buffer("edges"), right=True)
        x_0_hat = torch.empty_like(x_t)
        for number in band.unique().tolist():
            mine = band == number
            x_0_hat[mine] = self.denoisers[number](
                x_t[mine], sigma_t[mine], None if label is None else label[mine]
            )
        return x_0_hat


def snapshots_by_level(snapshots: Mapping[int, Path], bands: Sequence[BandLoss]) -> BandedDenoiser:
    """The weights of a run, those of each band's best stop in that band; below and above, those next to it."""
    edges, steps = [band.low for band in bands[1:]], [band.step for band in bands]
    kept = [at for at, (one, next_one) in enumerate(pairwise(steps)) if one != next_one]
    used = [steps[at] for at in kept] + steps[-1:]
    return BandedDenoiser(
        [edges[at] for at in kept], [load_checkpoint(snapshots[s]).denoiser.eval() for s in used]
    )


def with_band_of(denoiser: nn.Module, other: nn.Module, low: float, high: float) -> BandedDenoiser:
    """One model, but with another's predictions at the levels in [low, high)."""
    return BandedDenoiser([low, high], [denoiser, other, denoiser])


class ImageFiles(ImageSource):
    """The images of a folder, zip, npy or npz, decoded as they are read; the first decides the shape."""

    def __init__(self, raw: RawImages) -> None:
        self.raw, self.name = raw, raw.name
        height, width, channels = raw.load(0).shape
        self.image_shape = (channels, height, width)

    def __len__(self) -> int:
        return len(self.raw.names)

    def read(self, index: Tensor) -> Tensor:
        """`index` (B,) -> (B, C, H, W) float32 in [-1, 1]."""
        return torch.stack([self._read_one(int(i)) for i in index])

    def _read_one(self, i: int) -> Tensor:
        pixels = self.raw.load(i)
        if pixels.dtype not in (np.uint8, np.uint16):
            what = f"has {pixels.dtype} pixels, whose black and white are not known"
            cure = "pack the images with their range, and evaluate the store"
            raise AssayError(what, path=self.raw.names[i], cure=cure)
        x = torch.from_numpy(pixels.astype(np.float32)).permute(2, 0, 1) * (2 / np.iinfo(pixels.dtype).max) - 1
        if tuple(x.shape) != self.image_shape:
            what = f"has shape {tuple(x.shape)}, the first image {self.image_shape}"
            raise AssayError(
                what, path=self.raw.names[i], cure="give images of one size and number of channels"
            )
        return x


def open_images(path: Path) -> ImageSource:
    """A store, or images in any format that `assay data pack` reads."""
    return open_store(path) if is_store(path) else ImageFiles(read_any(str(path)))


class Noised(ImageSource):
    """Images with noise added when they are read: image i gets level i of `levels` (N,), which repeat.

    A good model of the images behind noisy data, with the levels of that data, gives images like it. So the
    distance between the two measures a model without any clean image.
    """

    def __init__(self, images: ImageSource, levels: Tensor, seed: int = 0) -> None:
        self.images, self.levels, self.seed = images, levels, seed
        self.name, self.image_shape = f"{images.name}, with noise", images.image_shape

    def __len__(self) -> int:
        return len(self.images)

    def on(self, device: torch.device) -> "Noised":
        """The same images, made on another device if they are sampled."""
        return Noised(self.images.on(device), self.levels, self.seed)

    def read(self, index: Tensor) -> Tensor:
        """`index` (B,) -> (B, C, H, W), the same bits whenever it is read."""
        eps = SeededNoise(image_seeds(self.seed, index).tolist(), self.image_shape, "cpu")()
        return self.images.read(index) + per_image(self.levels[index % len(self.levels)], eps) * eps
