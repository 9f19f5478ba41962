"""Images seen through a known operator: rounds that undo it, beside training on the images as they are.

    python studies/beyond/operators.py OUT [SEED ...]       writes OUT/operators.csv after every model

Every digit was seen through a kernel and has noise of 0.02. All methods take 4,500 steps.

k-space  half of the lines of k-space were measured on average, random ones of each image, and always the one
         with the mean; the others are 0
blur     a quarter of each pixel is its own, the rest comes from the eight around it; borders wrap around

rounds    `train.rounds = 3`: undo the operator, first by a Gaussian, then by the posterior of the model, and
         train on
as is    the images are trained on as if they were clean
"""

import sys
from functools import partial
from pathlib import Path

import torch
from masks import LOOPS, NOISE, NUM_STEPS, Study
from torch import Tensor

from assay.data import Store, open_store
from assay.data.arrays import from_arrays
from assay.data.store import PackedImage, write_store
from assay.denoise import convolution


def lines(num: int, side: int, generator: torch.Generator) -> Tensor:
    """Kernels (num, side, side) of random lines of k-space and their conjugates: half of all, on average."""
    mask = torch.rand(num, side, 1, generator=generator) < (side / 2 - 1) / (side - 1)
    mask[:, 0] = True
    number = torch.arange(side)
    mask = mask[:, torch.minimum(number, side - number)]  # line -n is line n
    return torch.fft.ifft2(mask.expand(num, side, side).float()).real


def blur(num: int, side: int) -> Tensor:
    """The same kernel (num, side, side) for all: 4 in the middle, 2 beside and 1 at the corners, of 16."""
    row = torch.zeros(side)
    row[[-1, 0, 1]] = torch.tensor([0.25, 0.5, 0.25])
    return (row[:, None] * row).expand(num, side, side)


def with_kernels(path: Path, y: Tensor, kernel: Tensor) -> Store:
    """A store of images (N, C, H, W) seen through kernels (N, H, W)."""
    if not (path / "meta.json").exists():
        images = (PackedImage(str(i), y[i].numpy(), NOISE, -1, kernel=kernel[i].numpy()) for i in range(len(y)))
        write_store(path, path.name, images, tuple(y.shape[1:]), "float32", (-1, 1), ())
    return open_store(path)


def main(out: Path, seeds: tuple[int, ...], num_steps: int = NUM_STEPS) -> None:
    """Measure both methods through both operators."""
    study = Study(out, "operators.csv", "operator", num_steps)
    num, side = len(study.x), study.x.shape[-1]
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for operator, kernel in {"k-space": lines(num, side, generator), "blur": blur(num, side)}.items():
            y = convolution(kernel)(study.x) + NOISE * torch.randn(study.x.shape, generator=generator)
            name = f"{operator} {seed}"
            store = with_kernels(out / name, y, kernel)
            for method, source, rounds in (("rounds", store, LOOPS), ("as is", from_arrays(y), 0)):
                trained = partial(study.fit, f"{method} {name}", source, seed, rounds)
                study.measure(method, operator, seed, trained)


if __name__ == "__main__":
    main(Path(sys.argv[1]), tuple(map(int, sys.argv[2:])) or (0,))
