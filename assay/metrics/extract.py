"""Extractors turn images into features; a reference is real images as an extractor sees them, kept in a cache.

Every extractor sees what an 8-bit file would hold: images in [-1, 1] are clipped and rounded to 0..255.
So samples in memory and the PNG files made of them measure the same.

Only `inception` gives FID. Every other extractor gives FD-<name>, and the two are never compared.
"""

import copy
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

from assay.archives import read_npy
from assay.checkpoint import load_tensors, save_tensors
from assay.data import ImageSource
from assay.data.view import View, with_uniform_noise
from assay.devices import spread
from assay.errors import AssayError, check_enough, check_same
from assay.files import check_sha256, content_hash, hold_lock, sha256, write_whole_directory
from assay.metrics.classifier import VERSION, Classifier, train_classifier
from assay.metrics.distance import FeatureStatistics, features_to_statistics, load_statistics, save_statistics
from assay.metrics.inception import Inception
from assay.metrics.weights import FeatureNetwork, find_weights, to_bytes
from assay.registry import find, make, own_code

BUILT_IN = (Classifier, Inception)  # imported so that their names are known
MIN_IMAGES = 20  # for a distance
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
    """A network with the hash of its weights. It works on `devices`, `batch_size` images at a time."""

    name: str
    network: FeatureNetwork
    sha256: str
    accuracy: float | None = None  # of a trained classifier, on held-out images
    devices: tuple[torch.device | str, ...] = ("cpu",)
    batch_size: int = 128

    @property
    def metric(self) -> str:
        """What its Frechet distance is called."""
        return "FID" if self.name == "inception" else f"FD-{self.name}"

    @torch.inference_mode()
    def __call__(self, images: Tensor, index: Tensor | None = None) -> np.ndarray:
        """Images (B, C, H, W) in [-1, 1] -> features (B, D) float32; `index` (B,) as for `to_bytes`."""
        x = to_bytes(images, index).to(self.devices[0]).float()
        if self.network.takes_colour:
            if x.shape[1] not in (1, 3):
                what = f"images have {x.shape[1]} channels; {self.name} takes 1 (grey) or 3 (colour)"
                raise AssayError(what, key="extractor", cure="choose pixels")
            x = x.expand(-1, 3, -1, -1)
        size = (x.device.type == "cpu" and self.network.num_on_cpu) or len(x)
        parts = x.contiguous(memory_format=torch.channels_last).split(size)
        features = torch.cat([self.network(part) for part in parts])
        if features.ndim != 2 or len(features) != len(x):
            what = f"{self.name} gives features {list(features.shape)} for {len(x)} images, not a row for each"
            raise AssayError(what, key="extractor", cure="flatten them to (B, D)")
        return features.cpu().numpy()


def images_to_features(
    extractor: Extractor, source: ImageSource, index: Tensor, progress: CountImages = lambda num_images: None
) -> np.ndarray:
    """Features (N, D) of the images `index` of a source, read batch by batch; no image is kept."""
    features, extractors, sources = [], [extractor], [source]
    if len(extractor.devices) > 1:
        extractors = [
            replace(extractor, network=copy.deepcopy(extractor.network).to(device), devices=(device,))
            for device in extractor.devices
        ]
        sources = [source.on(torch.device(device)) for device in extractor.devices]

    def extract(part: Tensor, device_number: int) -> np.ndarray:
        return extractors[device_number](sources[device_number].read(part), part)

    for found in spread(extract, index.split(extractor.batch_size), len(sources)):
        features.append(found)
        progress(len(found))
    whole = np.concatenate(features)
    if not 1e-5 * np.abs(whole[0]).max() < np.ptp(whole, axis=0).max() < np.inf:  # more than rounding
        what = f"all {len(index)} images of {source.name} are the same to {extractor.name}, or not finite"
        raise AssayError(f"{what}: a distance to them says nothing", cure="look at the images")
    return whole


def load_extractor(
    name: str,
    cache: Path,
    weights: Path | None = None,
    reference: ImageSource | Path | None = None,
    devices: Sequence[torch.device | str] = ("cpu",),
    batch_size: int = 128,
    progress: CountImages = lambda num_images: None,
) -> Extractor:
    """Make an extractor ready: use `weights`, find or fetch them into `cache`, or train it on `reference`."""
    kind = find(FeatureNetwork, name, "extractor")
    if weights is not None and kind.weights is None:
        raise AssayError(f"the extractor {name} does not load weights from a file", key="weights")
    if kind is Classifier:
        if not isinstance(reference, ImageSource):
            what = "the classifier is trained on the labelled images of a store"
            cure = "give the store as reference, or the extractor of the statistics (inception for EDM's)"
            raise AssayError(what, key="extractor", cure=cure)
        found = _classifier(reference, cache, progress)
    elif kind.weights is None:
        network = make(FeatureNetwork, name, "extractor")
        own = {key: value.numpy().tobytes() for key, value in network.state_dict().items()}
        identity = content_hash(type(network).__module__, type(network).__qualname__, own | own_code(kind))
        found = Extractor(name, network.eval().requires_grad_(False), identity)
    else:
        network, path = kind(), find_weights(kind.weights, cache, weights)
        network.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))  # its hash is known
        found = Extractor(name, fold_norms(network.eval()).requires_grad_(False), kind.weights.sha256)
    return replace(found, network=found.network.to(devices[0]), devices=tuple(devices), batch_size=batch_size)


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
    with hold_lock(cache / path.stem):  # a second process waits, then reads the file
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
    return Extractor("classifier", folded, sha256(path), header["accuracy"])


@dataclass(frozen=True)
class Reference:
    """Real images as an extractor sees them; without `features` (N, D) only the Frechet distance is known."""

    name: str
    fingerprint: str
    statistics: FeatureStatistics
    features: np.ndarray | None = None
    source: ImageSource | None = None

    @property
    def frequencies(self) -> list[float] | None:
        """How often each class occurs, or None if there are no classes."""
        if self.source is None or self.source.num_classes == 0:
            return None
        label = self.source.label[self.source.label >= 0]
        return label.bincount(minlength=self.source.num_classes).tolist()


def reference_from_statistics(path: Path, extractor: Extractor) -> Reference:
    """A reference of ours or EDM's from an npz. EDM's do not say so, but are of `inception`."""
    found = load_statistics(path)
    what, cure = f"is of another extractor than this {extractor.name}", "choose that one, or make it again"
    if found.extractor_sha256 is not None:
        check_same(extractor.sha256, found.extractor_sha256, what, path=path, key="extractor", cure=cure)
    return Reference(path.name, sha256(path), found)


def reference_from_images(
    source: ImageSource,
    extractor: Extractor,
    cache: Path,
    progress: CountImages = lambda num_images: None,
    noisy: bool = False,
) -> Reference:
    """Features and statistics of the clean (or the `noisy`) images of a store, kept in `cache`."""
    known_noise = (source.sigma_tn > 0) & (source.usable_from == source.sigma_tn)
    index = torch.nonzero(known_noise if noisy else source.usable_from == 0)[:, 0]
    kind = "noisy" if noisy else "clean"
    check_enough(len(index), MIN_IMAGES, f"{kind} images of {source.name}", "reference")
    if noisy:
        source = with_uniform_noise(View(source, index, source.sigma_tn[index], name=f"{source.name}, noisy"))
        index = torch.arange(len(source))
    key = content_hash(extractor.sha256, source.fingerprint)[:16]
    folder = cache / f"features-{extractor.name}-{key}"
    with hold_lock(cache / f"making-{folder.name}"):  # a second process waits, then reads these
        if not folder.is_dir():
            features = images_to_features(extractor, source, index, progress)
            with write_whole_directory(folder) as partial:
                np.save(partial / "features.npy", features)
                (partial / "features.sha256").write_text(sha256(partial / "features.npy"))
                found = replace(features_to_statistics(features), extractor_sha256=extractor.sha256)
                save_statistics(partial / "statistics.npz", found)
    features_file = folder / "features.npy"
    expected, cure = (folder / "features.sha256").read_text(), f"remove {folder}, and it is computed again"
    check_sha256(features_file, expected, "is damaged", cure=cure)
    known = load_statistics(folder / "statistics.npz")
    return Reference(source.name, source.fingerprint, known, read_npy(features_file), source)
