"""What can be evaluated besides a store: a folder or archive of images, and samples made as they are read."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor

from assay.checkpoint import Checkpoint, CheckpointInfo, find_checkpoint, load_checkpoint
from assay.data import ImageSource, open_store
from assay.data.readers import RawImages, read_any
from assay.data.store import is_store
from assay.data.view import image_seeds
from assay.denoise import Denoiser, copy_to
from assay.errors import AssayError, check_same
from assay.files import sha256
from assay.noise import per_image
from assay.sample import SampleConfig, SeededNoise, spread_labels


@dataclass(eq=False, repr=False)
class Samples(ImageSource):
    """Image i is sampled from seed `first_seed` + i when it is read, and is the same image every time.

    `classes` (num_images,) names the class of each, if there are any.
    """

    name: str = field()
    denoiser: Denoiser
    image_shape: tuple[int, int, int]
    num_images: int
    first_seed: int = 0
    sample: SampleConfig = SampleConfig()  # noqa: RUF009
    classes: Tensor | None = None
    device: torch.device | str = "cpu"

    def __len__(self) -> int:
        return self.num_images

    def on(self, device: torch.device) -> "Samples":
        """The same images, sampled on another device."""
        return replace(self, denoiser=copy_to(self.denoiser, device), device=device)

    def read(self, index: Tensor) -> Tensor:
        """`index` (B,) -> (B, C, H, W), sampled in one batch."""
        seeds = (self.first_seed + index).tolist()
        classes = None if self.classes is None else self.classes[index]
        how = self.image_shape, classes, max(len(index), 1), self.device
        return torch.cat(list(self.sample.generate(self.denoiser, seeds, *how))).cpu()


def samples_of(
    checkpoint: Checkpoint,
    name: str,
    num_images: int,
    first_seed: int = 0,
    sample: SampleConfig = SampleConfig(),  # noqa: B008
    frequencies: Sequence[float] | None = None,
    device: str | torch.device = "cpu",
) -> Samples:
    """Samples of a model; `frequencies` (num_classes,) are the classes' shares, uniform by default."""
    sample = sample.for_levels(level for level, _ in checkpoint.info.sigma_tn)
    classes, shape = None, checkpoint.config.image_shape
    if num_classes := checkpoint.config.num_classes:
        shares = frequencies if frequencies and len(frequencies) == num_classes else [1.0] * num_classes
        classes = spread_labels(shares, range(first_seed, first_seed + num_images))
    denoiser = checkpoint.denoiser.to(device).eval()
    return Samples(name, denoiser, shape, num_images, first_seed, sample, classes, device)


class SamplerSettings(BaseModel, extra="forbid", frozen=True):
    """How a checkpoint was sampled, and what it knows of its training."""

    sample: SampleConfig
    first_seed: int
    checkpoint_sha256: str
    info: CheckpointInfo


def sample_checkpoint(path: Path, *how: Any, **named: Any) -> tuple[Samples, SamplerSettings]:
    """Samples of a checkpoint or of a finished run's folder (see `samples_of`), and settings for the record."""
    checkpoint, digest = load_checkpoint(path, to_measure=True), sha256(find_checkpoint(path))
    samples = samples_of(checkpoint, path.name, *how, **named)
    about = {"sample": samples.sample, "first_seed": samples.first_seed, "info": checkpoint.info}
    return samples, SamplerSettings.model_validate(about | {"checkpoint_sha256": digest})


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
        found = []
        for pixels, path in ((self.raw.load(i), self.raw.names[i]) for i in index.tolist()):
            if pixels.dtype not in (np.uint8, np.uint16):
                what = f"has {pixels.dtype} pixels, whose black and white are not known"
                raise AssayError(what, path=path, cure="pack the images with their range, and give the store")
            white = np.iinfo(pixels.dtype).max
            found.append(torch.from_numpy(pixels.astype(np.float32)).permute(2, 0, 1) * (2 / white) - 1)
            cure = "give images of one size and number of channels"
            check_same(tuple(found[-1].shape), self.image_shape, "differs from the first", path=path, cure=cure)
        return torch.stack(found)


def open_images(path: Path) -> ImageSource:
    """A store, or images in any format that `assay data pack` reads."""
    return open_store(path) if is_store(path) else ImageFiles(read_any(str(path)))


class Noised(ImageSource):
    """Images with noise added when they are read: image i gets level i of `levels` (N,), which repeat.

    With the levels of noisy data, a good model of the images behind it gives images like it.
    """

    def __init__(self, images: ImageSource, levels: Tensor) -> None:
        self.images, self.levels = images, levels
        self.name, self.image_shape = f"{images.name}, with noise", images.image_shape

    def __len__(self) -> int:
        return len(self.images)

    def on(self, device: torch.device) -> "Noised":
        """The same images, made on another device if they are sampled."""
        return Noised(self.images.on(device), self.levels)

    def read(self, index: Tensor) -> Tensor:
        """`index` (B,) -> (B, C, H, W), the same bits whenever it is read."""
        eps = SeededNoise(image_seeds(0, index).tolist(), self.image_shape, "cpu")()
        return self.images.read(index) + per_image(self.levels[index % len(self.levels)], eps) * eps
