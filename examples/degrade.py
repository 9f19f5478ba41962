"""Does the distance get worse when images do? Real images, made worse step by step, against other real images.

    python examples/degrade.py STORE [EXTRACTOR ...] [--num-images 1000] [--csv FILE]

Half of the store is the reference; images from the other half are noised, blurred, or taken from fewer
and fewer classes (equal counts throughout). Prints a Markdown table, a column per extractor; the
CSV has a row for each of its numbers.
"""

import argparse
import csv
from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image, ImageFilter
from torch import Tensor

from assay.data import ImageSource, open_store
from assay.metrics.distance import features_to_statistics, frechet_distance
from assay.metrics.extract import images_to_features, load_extractor, to_bytes


class Degraded(ImageSource):
    """Images of a source after `change` (B, C, H, W) -> (B, C, H, W)."""

    def __init__(self, source: ImageSource, change: Callable[[Tensor], Tensor], name: str) -> None:
        self.source, self.change, self.name, self.image_shape = source, change, name, source.image_shape

    def __len__(self) -> int:
        return len(self.source)

    def read(self, index: Tensor) -> Tensor:
        """`index` (B,) -> damaged images (B, C, H, W)."""
        return self.change(self.source.read(index))


def blurred(x: Tensor, radius: float) -> Tensor:
    """Gaussian blur of each channel, `radius` pixels wide."""
    planes = to_bytes(x).flatten(0, 1).numpy()
    soft = [torch.frombuffer(bytearray(_blur(plane, radius)), dtype=torch.uint8) for plane in planes]
    return torch.stack(soft).view(x.shape).float() / 127.5 - 1


def _blur(plane: object, radius: float) -> bytes:
    return Image.fromarray(plane).filter(ImageFilter.GaussianBlur(radius)).tobytes()


def distances(
    source: ImageSource, extractor_name: str, num_images: int, cache: Path
) -> dict[str, dict[str, float]]:
    """Kind of damage -> how much -> Frechet distance to the undamaged half."""
    extractor = load_extractor(extractor_name, cache, reference=source)
    reference = torch.arange(0, len(source), 2)
    other = torch.arange(1, len(source), 2)
    truth = features_to_statistics(images_to_features(extractor, source, reference))

    def distance(change: Callable[[Tensor], Tensor], index: Tensor, name: str) -> float:
        chosen = index[torch.linspace(0, len(index) - 1, num_images).long()]
        found = images_to_features(extractor, Degraded(source, change, name), chosen)
        return frechet_distance(features_to_statistics(found), truth)

    def noised(sigma: float) -> Callable[[Tensor], Tensor]:
        generator = torch.Generator().manual_seed(0)
        return lambda x: x + sigma * torch.randn(x.shape, generator=generator)

    real = distance(lambda x: x, other, "real")
    noise = {f"sigma {s:g}": distance(noised(s), other, "noised") for s in (0.1, 0.2, 0.4)}
    blur = {f"radius {r:g}": distance(lambda x, r=r: blurred(x, r), other, "blurred") for r in (0.5, 1, 2)}
    num = source.num_classes
    kept = {f"{k} of {num}": other[source.label[other] < k] for k in (round(0.8 * num), num // 2, num // 5)}
    classes = {name: distance(lambda x: x, index, "real") for name, index in kept.items()}
    return {"noise": {"none": real} | noise, "blur": {"none": real} | blur, "classes": {"all": real} | classes}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("extractors", nargs="*", default=["classifier", "pixels"])
    parser.add_argument("--num-images", type=int, default=1000)
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/assay").expanduser())
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    source = open_store(arguments.store)
    columns = [distances(source, name, arguments.num_images, arguments.cache) for name in arguments.extractors]
    print(f"| {source.name} |" + "".join(f" FD-{name} |" for name in arguments.extractors))
    print("|---|" + "---:|" * len(columns))
    for kind, amounts in columns[0].items():
        for amount in amounts:
            print(f"| {kind}: {amount} |" + "".join(f" {column[kind][amount]:.3g} |" for column in columns))
    if arguments.csv:
        with open(arguments.csv, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("damage", "amount", "extractor", "fd"))
            for name, column in zip(arguments.extractors, columns, strict=True):
                for kind, amounts in column.items():
                    writer.writerows((kind, amount, name, fd) for amount, fd in amounts.items())


if __name__ == "__main__":
    main()
