"""A source: images with a noise level, a class and a name each, as everything here reads them.

Stores, views and `assay.from_arrays` are sources, and so is any class of yours that inherits from
`ImageSource`. It declares all that a source may have, with defaults: nobody needs to ask whether it does.
"""

import math
from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any, Self

import torch
from PIL.Image import Image
from torch import Tensor

from assay.data.units import PhysicalRange
from assay.errors import AssayError
from assay.files import content_hash

_MAX_HASHED_BYTES = 2**30  # of images as float32; a second or two


class ImageSource(ABC):
    """Images with a noise level and a class each, as training, measuring and evaluation read them.

    To read images from somewhere else, inherit from this class and give it `image_shape`, `__len__` and `read`;
    the images are then clean and have no classes. Set the other attributes where that is not so. `read` must
    return the same values whenever it is called.

    >>> class Stripes(assay.ImageSource):
    ...     image_shape = (1, 8, 8)
    ...     def __len__(self):
    ...         return 100
    ...     def read(self, index):
    ...         phase = index[:, None, None, None] + torch.arange(8.0)
    ...         return phase.sin().expand(-1, 1, 8, 8)
    >>> assay.simulate(Stripes(), clean_fraction=0.1, sigma=0.3)
    <images (0.1 clean, noisy: 0.9 at sigma 0.3): 100 images of 1 x 8 x 8, 10 clean, 90 noisy>
    """

    image_shape: tuple[int, int, int]  # (C, H, W), the same for all images
    name: str = "images"  # what to call them in reports
    class_names: tuple[str, ...] = ()
    physical_range: PhysicalRange | None = None  # -1 and 1 in the units of the files; None if these differ
    group: Tensor | None = None  # (N,) int64; images of a group, e.g. parts of a picture, are held out together
    has_map: bool = False  # whether `read_levels` has several levels for one image
    num_raised: int = 0  # how many views have added noise

    @abstractmethod
    def __len__(self) -> int:
        """The number N of images."""

    @abstractmethod
    def read(self, index: Tensor) -> Tensor:
        """`index` (B,) -> `x_tn` (B, C, H, W) float32, scaled to [-1, 1] but never clipped to it."""

    @cached_property
    def sigma_tn(self) -> Tensor:
        """(N,) float32, the noise level of each image as it is scaled to [-1, 1]; 0 is clean."""
        return torch.zeros(len(self))

    @cached_property
    def label(self) -> Tensor:
        """(N,) int64, the class of each image; -1 is none."""
        return torch.full((len(self),), -1)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all that `read`, `sigma_tn` and `label` return. Runs are named by it."""
        if len(self) * 4 * math.prod(self.image_shape) > _MAX_HASHED_BYTES:
            what = f"{self.name} holds too many images to be hashed whenever it is opened"
            raise AssayError(what, key="fingerprint", cure="set it to a string that changes whenever they do")
        every = torch.arange(len(self)).split(1024)
        pixels = [content_hash(self.read(part).numpy().tobytes()) for part in every]
        columns = [column.numpy().tobytes() for column in (self.sigma_tn, self.label)]
        return content_hash(pixels, columns, self.image_shape, self.class_names)

    @cached_property
    def usable_from(self) -> Tensor:
        """(N,) float32, the level from which each image may be used, not below its noise."""
        return self.sigma_tn

    @cached_property
    def lowest_level(self) -> Tensor:
        """(N,) float32, the level above which `read_at` gives something to train on."""
        return self.sigma_tn

    @cached_property
    def image_number(self) -> Tensor:
        """(N,) int64, the number of each image where it is first read; its simulated noise depends on that."""
        return torch.arange(len(self))

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.class_names)

    def read_at(self, index: Tensor, sigma_t: Tensor) -> tuple[Tensor, Tensor]:
        """`index` and `sigma_t` (B,) -> images (B, C, H, W) to train on at these levels, their noise (B,)."""
        return self.read(index), self.sigma_tn[index]

    def read_levels(self, index: Tensor) -> Tensor:
        """`index` (B,) -> the noise level of each pixel (B, C or 1, H, W), `sigma_tn` without maps."""
        return self.sigma_tn[index][:, None, None, None].expand(-1, 1, *self.image_shape[1:])

    def on(self, device: torch.device) -> "ImageSource":
        """The same images, made on that device if they are computed."""
        return self

    def described_like(self, source: "ImageSource") -> Self:
        """Take over what is said of all images of `source`: name, shape, classes, units."""
        self.name, self.image_shape, self.class_names = source.name, source.image_shape, source.class_names
        self.physical_range = source.physical_range
        return self

    def __repr__(self) -> str:
        num_images, num_clean = len(self.sigma_tn), int((self.sigma_tn == 0).sum())
        shape = " x ".join(map(str, self.image_shape))
        counts = f"{num_clean} clean, {num_images - num_clean} noisy"
        return f"<{self.name}: {num_images} images of {shape}, {counts}>"

    def plot(self) -> Image:
        """A picture with a row of images for each noise level; dB are its SNR (`assay.noise.snr_db`)."""
        from assay.data.picture import noise_picture

        return noise_picture(self)


def as_source(images: ImageSource | Any) -> ImageSource:
    """A source as it is, and an array as `from_arrays` takes it."""
    from assay.data.arrays import from_arrays

    return images if isinstance(images, ImageSource) else from_arrays(images)
