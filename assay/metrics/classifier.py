"""A small classifier trained on the reference images' own labels: features that fit any labelled data.

Its penultimate layer holds what separates the classes of the data, on images of any size and channel count, at
thousands of images a second on a CPU. Training takes seconds and is a function of the images alone: the same
store gives the same bits (on one kind of machine) for any number of threads.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from assay.data import ImageSource
from assay.devices import one_thread
from assay.errors import AssayError
from assay.metrics.weights import FeatureNetwork, to_bytes

NUM_FEATURES = 128
NUM_IMAGES_SEEN = 25_600  # in training; an image may be seen several times
_BATCH = 128
VERSION = 2  # part of the cache key: raise it when the network or its training changes


class Classifier(FeatureNetwork):
    """Convolutions that halve the image until a side is at most 4, then a dense layer: 128 features.

    The dense layer sees where things are: an average over the image would hardly notice noise, a missing
    class or a few images repeated.
    """

    kind = "classifier"

    def __init__(self, image_shape: tuple[int, int, int], num_classes: int) -> None:
        super().__init__()
        channels, height, width = image_shape
        layers: list[nn.Module] = []
        outputs = 32
        while min(height, width) > 4:
            layers += self._conv(channels, outputs, kernel=4, stride=2)
            channels, outputs, height, width = outputs, min(2 * outputs, 128), height // 2, width // 2
        layers += self._conv(channels, 128, kernel=3, stride=1)
        self.layers = nn.Sequential(
            *layers, nn.Flatten(), nn.Linear(128 * height * width, NUM_FEATURES), nn.ReLU()
        )
        self.head = nn.Linear(NUM_FEATURES, num_classes)

    @staticmethod
    def _conv(inputs: int, outputs: int, kernel: int, stride: int) -> list[nn.Module]:
        conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=1, bias=False)
        return [conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]

    def forward(self, x: Tensor) -> Tensor:
        """`x` (B, C, H, W) in 0..255 -> features (B, 128)."""
        features: Tensor = self.layers((x / 127.5 - 1).contiguous(memory_format=torch.channels_last))
        return features

    def logits(self, x: Tensor) -> Tensor:
        """`x` (B, C, H, W) in 0..255 -> (B, num_classes)."""
        found: Tensor = self.head(self(x))
        return found


def initialise(network: nn.Module, generator: torch.Generator) -> None:
    """Draw the weights of convolutions and dense layers; norms start at the identity."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu", generator=generator)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def _labelled(source: ImageSource) -> Tensor:
    """The clean images with a label, (N,)."""
    return torch.nonzero((source.usable_from == 0) & (source.label >= 0))[:, 0]


def has_labels(source: ImageSource) -> bool:
    """Whether a classifier can be trained on these images."""
    labelled = _labelled(source)
    return len(labelled) >= 20 and len(source.label[labelled].unique()) >= 2


def train_classifier(
    source: ImageSource, progress: Callable[[int], None] = lambda num_images: None
) -> tuple[Classifier, float]:
    """Train on the clean, labelled images of `source`; a tenth of them is held out for the accuracy.

    Returns the network, ready to use, and its accuracy.
    """
    usable = _labelled(source)
    if not has_labels(source):
        what = f"{source.name} has {len(usable)} clean images with labels; 20, of two classes, are needed"
        cure = "choose inception or pixels, or measure the held-out loss, which needs no labels"
        raise AssayError(what, key="extractor", cure=cure)
    generator = torch.Generator().manual_seed(0)
    order = usable[torch.randperm(len(usable), generator=generator)]
    held_out, training = order[: len(order) // 10], order[len(order) // 10 :]
    network = Classifier(source.image_shape, source.num_classes)
    initialise(network, generator)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3, weight_decay=0.05)
    num_steps = NUM_IMAGES_SEEN // _BATCH
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=num_steps)

    def logits(index: Tensor) -> Tensor:
        return network.logits(to_bytes(source.read(index)).float())

    with one_thread():  # sums in one order: the weights do not depend on the number of cores
        for _ in range(num_steps):
            index = training[torch.randint(len(training), (_BATCH,), generator=generator)]
            loss = F.cross_entropy(logits(index), source.label[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            progress(_BATCH)
        network.eval().requires_grad_(False)
        right = [logits(part).argmax(1) == source.label[part] for part in held_out.split(512)]
    return network, float(torch.cat(right).double().mean())
