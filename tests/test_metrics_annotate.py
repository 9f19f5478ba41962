"""Bad images are annotated with the level from which noise hides what is wrong with them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from assay.data import ImageSource, open_store
from assay.data.arrays import from_arrays
from assay.data.known import get
from assay.data.levels import Level, read_levels
from assay.metrics.annotate import Annotation, annotate
from tests.commands import run
from tests.errors import rejected


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tensor, Tensor]:
    """Two halves of the digits, (N, 1, 8, 8)."""
    store = get("digits", tmp_path_factory.mktemp("digits") / "store").store
    x = store.read(torch.randperm(len(store), generator=torch.Generator().manual_seed(0)))
    return x[:500], x[500:1000]


def blurred(x: Tensor, share: float) -> Tensor:
    """Each pixel mixed with the mean of the 3 x 3 pixels around it."""
    return (1 - share) * x + share * F.avg_pool2d(F.pad(x, [1] * 4, mode="replicate"), 3, stride=1)


def found(clean: Tensor, bad: Tensor) -> Annotation:
    return annotate(from_arrays(bad), from_arrays(clean), num_steps=200, batch_size=64)


def test_images_like_the_clean_ones_are_usable_everywhere(digits: tuple[Tensor, Tensor]) -> None:
    same = found(*digits)
    assert same.level == 0 and not same.levels.any()
    assert np.abs(same.auc - 0.5).max() < 0.12


def test_noise_is_found_at_its_level_or_above_and_blur_in_order(digits: tuple[Tensor, Tensor]) -> None:
    clean, other = digits
    noise = torch.randn(other.shape, generator=torch.Generator().manual_seed(1))
    assert 0.8 * 0.3 <= found(clean, other + 0.3 * noise).level < 3
    weak, strong = (found(clean, blurred(other, share)) for share in (0.2, 0.6))
    assert 0 < weak.level < strong.level
    assert weak.auc[0] > 0.7 and strong.auc[0] > 0.9 and abs(strong.auc[-1] - 0.5) < 0.1
    assert strong.levels.max() <= strong.level and strong.levels.mean() > weak.levels.mean()


def test_the_command_writes_what_pack_reads(digits: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    clean, other = digits
    from_arrays(clean).save(tmp_path / "clean")
    from_arrays(blurred(other, 1.0)).save(tmp_path / "bad")
    path = tmp_path / "annotations.jsonl"
    options = ["--clean", tmp_path / "clean", "-o", path, "--num-steps", 20]
    assert "look like clean ones" in run("data", "annotate", tmp_path / "bad", *options)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    levels = read_levels(path, open_store(tmp_path / "bad").source_names(range(len(other))))
    assert levels == [Level(0.0, line["annotation"], usable_scaled=True) for line in lines]


class Far(ImageSource):
    """Images that no noise of the range makes look clean."""

    image_shape = (1, 8, 8)

    def __len__(self) -> int:
        return 100

    def read(self, index: Tensor) -> Tensor:
        return torch.full((len(index), 1, 8, 8), 20.0)


def test_what_cannot_be_compared_is_rejected(digits: tuple[Tensor, Tensor]) -> None:
    clean = from_arrays(digits[0])
    cases: list[tuple[ImageSource, ImageSource, str]] = [
        (from_arrays(digits[1][:30]), clean, "store"),
        (from_arrays(digits[1][:, :, :4]), clean, "clean"),
        (clean, from_arrays(digits[1], 0.3), "clean"),
    ]
    for bad, good, key in cases:
        with rejected(key):
            annotate(bad, good)
    with rejected("store"):
        annotate(Far(), clean, num_steps=60, batch_size=64)
