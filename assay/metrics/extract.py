"""Extractors: networks that turn images into features, ready to use.

Every extractor sees what an 8-bit file would hold: images in [-1, 1] are clipped and rounded to 0..255.
So samples in memory and the PNG files made of them measure the same.

Only `inception` gives FID. Every other extractor gives FD-<name>, and the two are never compared.
"""

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from pydantic import AfterValidator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval

from assay.checkpoint import load_tensors, save_tensors
from assay.data import ImageSource
from assay.devices import spread
from assay.errors import AssayError
from assay.files import content_hash, hold_lock, sha256
from assay.metrics.classifier import VERSION, Classifier, train_classifier
from assay.metrics.inception import Inception
from assay.metrics.mobilenet import MobileNetV2
from assay.metrics.weights import FeatureNetwork, find_weights, to_bytes
from assay.registry import find

BUILT_IN = (Classifier, Inception, MobileNetV2)  # imported so that their names are known
CountImages = Callable[[int], None]  # called with the number of images done since the last call


class Pixels(FeatureNetwork):
    """The image itself as features, averaged down to at most 32 x 32 so that the covariance stays small."""

    kind = "pixels"

    def forward(self, x: Tensor) -> Tensor:
        """`x` (B, C, H, W) in 0..255 -> (B, C * min(H, 32) * min(W, 32)) in [-1, 1]."""
        size = (min(x.shape[2], 32), min(x.shape[3], 32))
        return F.adaptive_avg_pool2d(x / 127.5 - 1, size).flatten(1)


def _known(name: str) -> str:
    find(FeatureNetwork, name, "extractor")
    return name


ExtractorName = Annotated[str, AfterValidator(_known)]  # of ours or of an entry point


@dataclass(frozen=True)
class Extractor:
    """A network with the hash of its weights; `image_shape` is what it was made for, None if any will do.

    It works on `devices`, on at most `batch_size` images at a time.
    """

    name: str
    network: FeatureNetwork
    sha256: str
    image_shape: tuple[int, int, int] | None = None
    accuracy: float | None = None  # of a trained classifier, on held-out images
    devices: tuple[torch.device | str, ...] = ("cpu",)
    batch_size: int = 128

    @property
    def metric(self) -> str:
        """What its Frechet distance is called."""
        return "FID" if self.name == "inception" else f"FD-{self.name}"

    def on(self, device: torch.device | str) -> "Extractor":
        """The same on one device."""
        return replace(self, network=copy.deepcopy(self.network).to(device), devices=(device,))

    @torch.inference_mode()
    def __call__(self, images: Tensor, index: Tensor | None = None) -> np.ndarray:
        """Images (B, C, H, W) in [-1, 1] -> features (B, D) float32; `index` (B,) as for `to_bytes`."""
        x = to_bytes(images, index).to(self.devices[0]).float()
        if self.image_shape not in (None, tuple(x.shape[1:])):
            what = f"images of shape {tuple(x.shape[1:])}; this {self.name} was made for {self.image_shape}"
            raise AssayError(what, key="extractor", cure="pack them at that size")
        if self.network.takes_colour:
            if x.shape[1] not in (1, 3):
                what = f"images have {x.shape[1]} channels; {self.name} takes 1 (grey) or 3 (colour)"
                raise AssayError(what, key="extractor", cure="choose pixels")
            x = x.expand(-1, 3, -1, -1)
        size = (x.device.type == "cpu" and self.network.num_on_cpu) or len(x)
        parts = x.contiguous(memory_format=torch.channels_last).split(size)
        return torch.cat([self.network(part) for part in parts]).cpu().numpy()


def images_to_features(
    extractor: Extractor,
    source: ImageSource,
    index: Tensor,
    progress: CountImages = lambda num_images: None,
) -> np.ndarray:
    """Features (N, D) of the images `index` of a source, read batch by batch; no image is kept."""
    features, different = [], False
    first = source.read(index[:1])
    sources, extractors = [source], [extractor]
    if len(extractor.devices) > 1:
        extractors = [extractor.on(device) for device in extractor.devices]
        sources = [source.on(torch.device(device)) for device in extractor.devices]

    def measure(part: Tensor, device_number: int) -> tuple[np.ndarray, bool]:
        images = sources[device_number].read(part)
        return extractors[device_number](images, part), bool((images != first).any())

    for found, differs in spread(measure, index.split(extractor.batch_size), len(sources)):
        features.append(found)
        different = different or differs
        progress(len(found))
    if not different:
        what = f"all {len(index)} images of {source.name} are the same: a distance to them says nothing"
        raise AssayError(what, cure="look at the images and at what made them")
    return np.concatenate(features)


def load_extractor(
    name: str,
    cache: Path,
    weights: Path | None = None,
    reference: ImageSource | Path | None = None,
    devices: Sequence[torch.device | str] = ("cpu",),
    batch_size: int = 128,
    progress: CountImages = lambda num_images: None,
) -> Extractor:
    """Make an extractor ready: find or fetch its weights, or train it on `reference` (classifier).

    `weights` is a file to use instead of looking for one; `cache` is where fetched and trained weights stay.
    """
    kind = find(FeatureNetwork, name, "extractor")
    if weights is not None and kind.weights is None:
        raise AssayError(f"the extractor {name} does not load weights from a file", key="weights")
    if kind is Classifier:
        if not isinstance(reference, ImageSource):
            what = "the classifier is trained on the labelled images of a store"
            cure = "give the store as reference, or the extractor of the statistics (inception for EDM's)"
            raise AssayError(what, key="extractor", cure=cure)
        found = _classifier(reference, cache, progress)
    else:
        network = kind()
        if kind.weights is not None:
            network = _with_weights(network, find_weights(kind.weights, cache, weights))
        identity = kind.weights.sha256 if kind.weights else _identity(network)
        found = Extractor(name, network.eval().requires_grad_(False), identity)
    return replace(found, network=found.network.to(devices[0]), devices=tuple(devices), batch_size=batch_size)


def _identity(network: FeatureNetwork) -> str:
    """By content: the weights, and the class that computes with them."""
    weights = {name: value.numpy().tobytes() for name, value in network.state_dict().items()}
    return content_hash(type(network).__module__, type(network).__qualname__, weights)


def _with_weights(network: FeatureNetwork, path: Path) -> FeatureNetwork:
    network.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))  # its hash is known
    return fold_norms(network.eval())


def fold_norms(network: FeatureNetwork) -> FeatureNetwork:
    """Put each batch norm into the convolution before it: the same function, at twice the speed on a CPU."""
    for module in list(network.modules()):
        for (name, conv), (norm_name, norm) in pairwise(list(module.named_children())):
            if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                setattr(module, name, fuse_conv_bn_eval(conv, norm))
                setattr(module, norm_name, nn.Identity())
    return network


def _classifier(reference: ImageSource, cache: Path, progress: CountImages) -> Extractor:
    key = content_hash(VERSION, reference.fingerprint)[:16]
    path = cache / f"classifier-{key}.safetensors"
    if path.is_file():
        try:
            return read_classifier(path, reference.image_shape)
        except ValueError as error:
            warnings.warn(f"{error}; training the classifier again", stacklevel=2)
            path.unlink(missing_ok=True)
    with hold_lock(cache / path.stem, "", math.inf):  # a second process waits, then reads the file
        if not path.is_file():
            network, accuracy = train_classifier(reference, progress)
            state = {name: tensor.contiguous() for name, tensor in network.state_dict().items()}
            save_tensors(path, state, {"accuracy": accuracy})
    return read_classifier(path, reference.image_shape)


def read_classifier(path: Path, image_shape: tuple[int, int, int]) -> Extractor:
    """The extractor in a file that a training of it left."""
    state, header = load_tensors(path)
    network = Classifier(image_shape, len(state["head.bias"]))
    network.load_state_dict(state)
    folded = fold_norms(network.eval().requires_grad_(False))
    return Extractor("classifier", folded, sha256(path), image_shape, header["accuracy"])
