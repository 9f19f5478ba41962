"""Networks whose features are compared, and the published files that hold their weights.

Whatever the way a file of weights is found, its SHA-256 must be the published one. What is fetched stays in the
cache.
"""

import shutil
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from assay.data.picture import to_uint8
from assay.errors import AssayError
from assay.files import check_sha256, write_whole


@dataclass(frozen=True)
class WeightsFile:
    """A published file of weights: its name, its SHA-256, and where to download it."""

    name: str
    sha256: str
    address: str


class FeatureNetwork(nn.Module):
    """Images (B, C, H, W) in 0..255 -> features (B, D).

    A subclass with a `kind` of its own is an extractor that commands and studies know by it (see
    `assay.registry`); it is made without arguments, and its distance is called FD-<kind>.
    """

    kind: ClassVar[str]
    weights: ClassVar[WeightsFile | None] = None  # None: it has none, or comes with them
    takes_colour: ClassVar[bool] = False  # grey images then get three equal channels
    num_on_cpu: ClassVar[int | None] = None  # a large network is almost twice as fast on what fits the cache


def to_bytes(images: Tensor, index: Tensor | None = None) -> Tensor:
    """Images in [-1, 1] as an 8-bit file holds them: clipped, and rounded to 0..255 (uint8).

    `index` (B,) are the images' numbers, for messages.
    """
    if len(bad := (~images.isfinite()).flatten(1).any(1).nonzero()):
        number = int(bad[0] if index is None else index[bad[0]])
        cure = "look at what made it; a model that makes such images diverged: train it with a lower train.lr"
        raise AssayError(f"image {number} holds NaN or infinite values", cure=cure)
    return to_uint8(images)


def find_weights(file: WeightsFile, cache: Path, path: Path | None = None) -> Path:
    """The file at `path`, in `cache`, in torch's own cache, or at its address."""
    places = (cache / file.name, Path(torch.hub.get_dir()) / "checkpoints" / file.name)
    if (found := path or next((place for place in places if place.is_file()), None)) is not None:
        cure = "give the official file, or remove it and run again"
        check_sha256(found, file.sha256, f"is not the official {file.name}", key="weights", cure=cure)
        return found
    try:
        with write_whole(cache / file.name) as partial:
            with urllib.request.urlopen(file.address, timeout=30) as response, open(partial, "wb") as output:
                shutil.copyfileobj(response, output)
            check_sha256(partial, file.sha256, "is not the official file", cure="do not trust its source")
        return cache / file.name
    except (OSError, ValueError) as error:
        what = f"the weights {file.name} are not on this machine and could not be fetched ({error})"
        cure = f"download {file.address} elsewhere, then give its path or put it into {cache}"
        raise AssayError(what, key="weights", cure=cure) from None
