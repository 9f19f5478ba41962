"""What can be evaluated besides a store: a folder or archive of images, and samples made as they are read."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from assay.checkpoint import CheckpointInfo, find_checkpoint, is_model, load_checkpoint
from assay.data import Store, open_store
from assay.data.readers import RawImages, read_any
from assay.data.shards import is_store
from assay.data.view import check_complete, image_seeds
from assay.denoise import Denoiser, copy_to
from assay.files import sha256
from assay.generate import warn_of_full_sampling
from assay.metrics.extract import Images
from assay.noise import per_image
from assay.sample import SampleConfig, SeededNoise, spread_labels


@dataclass(frozen=True)
class Samples:
    """Image i is sampled from seed `first_seed` + i when it is read, and is the same image every time.

    `label` (num_images,) names the classes, if there are any.
    """

    name: str
    denoiser: Denoiser
    image_shape: tuple[int, int, int]
    num_images: int
    first_seed: int = 0
    sample: SampleConfig = field(default_factory=SampleConfig)
    label: Tensor | None = None
    device: torch.device | str = "cpu"

    def __len__(self) -> int:
        return self.num_images

    def on(self, device: torch.device) -> "Samples":
        """The same images, sampled on another device."""
        return replace(self, denoiser=copy_to(self.denoiser, device), device=device)

    def read(self, index: Tensor) -> Tensor:
        """`index` (B,) -> (B, C, H, W), sampled in one batch."""
        seeds = [self.first_seed + int(i) for i in index]
        label = None if self.label is None else self.label[index]
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


@dataclass(frozen=True)
class ImageFiles:
    """The images of a folder, zip, npy or npz, decoded as they are read; the first decides the shape."""

    raw: RawImages
    image_shape: tuple[int, int, int] = field(init=False)

    def __post_init__(self) -> None:
        height, width, channels = self.raw.load(0).shape
        object.__setattr__(self, "image_shape", (channels, height, width))

    @property
    def name(self) -> str:
        """The name of the folder or file."""
        return self.raw.name

    def __len__(self) -> int:
        return len(self.raw.names)

    def read(self, index: Tensor) -> Tensor:
        """`index` (B,) -> (B, C, H, W) float32 in [-1, 1]."""
        return torch.stack([self._read_one(int(i)) for i in index])

    def _read_one(self, i: int) -> Tensor:
        pixels = self.raw.load(i)
        if pixels.dtype not in (np.uint8, np.uint16):
            raise ValueError(
                f"{self.raw.names[i]} has {pixels.dtype} pixels, whose black and white are not known: pack the "
                "images with `assay data pack --range LOW,HIGH` and evaluate the store"
            )
        x = torch.from_numpy(pixels.astype(np.float32)).permute(2, 0, 1) * (2 / np.iinfo(pixels.dtype).max) - 1
        if tuple(x.shape) != self.image_shape:
            raise ValueError(
                f"{self.raw.names[i]} has shape {tuple(x.shape)}, the first image {self.image_shape}: "
                "all images must have one size and one number of channels"
            )
        return x


def open_images(path: Path) -> Images:
    """A store, or images in any format that `assay data pack` reads."""
    return open_store(path) if is_store(path) else ImageFiles(read_any(str(path)))


@dataclass(frozen=True)
class Noised:
    """Images with noise added when they are read: image i gets level i of `levels` (N,), which repeat.

    A good model of the images behind noisy data, with the levels of that data, gives images like it. So the
    distance between the two measures a model without any clean image.
    """

    images: Images
    levels: Tensor
    seed: int = 0

    @property
    def name(self) -> str:
        """The name of the images."""
        return f"{self.images.name}, with noise"

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W)."""
        return self.images.image_shape

    def __len__(self) -> int:
        return len(self.images)

    def on(self, device: torch.device) -> "Noised":
        """The same images, made on another device if they are sampled."""
        return replace(self, images=self.images.on(device)) if hasattr(self.images, "on") else self

    def read(self, index: Tensor) -> Tensor:
        """`index` (B,) -> (B, C, H, W), the same bits whenever it is read."""
        eps = SeededNoise(image_seeds(self.seed, index).tolist(), self.image_shape, "cpu")()
        return self.images.read(index) + per_image(self.levels[index % len(self.levels)], eps) * eps


@dataclass(frozen=True)
class Candidate:
    """What is measured: images, in `num_ranges` ranges of `num_images` each; `sampler` if they are samples."""

    images: Images
    sampler: SamplerSettings | None
    num_images: int
    num_ranges: int


def open_candidate(
    path: Path,
    num_images: int | None = None,
    num_ranges: int | None = None,
    num_reference: int | None = None,
    first_seed: int = 0,
    sample: SampleConfig = SampleConfig(),  # noqa: B008
    frequencies: Sequence[float] | None = None,
    device: torch.device | str = "cpu",
) -> Candidate:
    """A checkpoint, run folder or published model, which is sampled, or images that exist.

    By default a checkpoint is measured as in the paper: three ranges, each with as many images as the
    reference has, at most 50,000. Images that exist are all measured, in one range.
    """
    if is_model(path):
        num_ranges = 3 if num_ranges is None else num_ranges
        num_images = min(num_reference or 50_000, 50_000) if num_images is None else num_images
        samples, sampler = sample_checkpoint(
            path, num_ranges * num_images, first_seed, sample, frequencies, device
        )
        warn_of_full_sampling(sample, sampler.info)
        return Candidate(samples, sampler, num_images, num_ranges)
    images, num_ranges = open_images(path), 1 if num_ranges is None else num_ranges
    if isinstance(images, Store):
        check_complete(images, "cannot be compared with others: give complete images")
    return Candidate(images, None, len(images) // num_ranges if num_images is None else num_images, num_ranges)
