"""Arrays from memory: their scale, shape and levels are checked; images in both halves of a split are found."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from assay.data import split_held_out
from assay.data.arrays import from_arrays
from assay.data.copies import check_overlap
from tests.errors import fault, rejected

RNG = np.random.default_rng(0)
BYTES = RNG.integers(0, 256, (20, 16, 16), dtype=np.uint8)
UNIT = RNG.random((20, 16, 16))


def test_the_default_range_is_that_of_the_type() -> None:
    assert torch.equal(from_arrays(BYTES).x_tn, from_arrays(BYTES, value_range=(0, 255)).x_tn)
    assert from_arrays(BYTES).physical_range == (0, 255) and from_arrays(2 * UNIT - 1).physical_range == (-1, 1)


def test_channels_may_be_last() -> None:
    colour = RNG.random((5, 16, 12, 3))
    for images in (colour, colour.transpose(0, 3, 1, 2)):
        assert from_arrays(images, value_range=(0, 1)).image_shape == (3, 16, 12)
    last = from_arrays(colour, value_range=(0, 1)).x_tn
    np.testing.assert_allclose(last.numpy(), 2 * colour.transpose(0, 3, 1, 2) - 1, atol=1e-6)
    assert from_arrays(UNIT[..., None], value_range=(0, 1)).image_shape == (1, 16, 16)
    assert from_arrays(np.zeros((2, 12, 5, 5))).image_shape == (12, 5, 5)


@pytest.mark.parametrize(
    ("images", "options", "key"),
    [
        (BYTES, {"value_range": (-1, 1)}, "value_range"),
        (BYTES.astype(np.float32), {}, "value_range"),
        (BYTES.astype(np.float32), {"value_range": (0, 1)}, "value_range"),
        *((BYTES.astype(kind), {}, "value_range") for kind in (np.int64, np.uint16, bool)),
        (UNIT, {"value_range": (0, 255)}, "value_range"),
        (UNIT, {"value_range": (1, 0)}, "value_range"),
        (np.ma.masked_less(UNIT, 0.1), {}, "images"),
        (np.where(UNIT < 0.1, np.nan, UNIT), {}, "images"),
        (UNIT[0], {}, "images"),
        (UNIT[:0], {}, "images"),
        ("stores/scans", {}, "images"),
        (UNIT.astype(complex), {}, "images"),
        (UNIT, {"sigma": 1e-300}, "sigma"),
        (UNIT, {"sigma": -1.0}, "sigma"),
        (UNIT, {"sigma": [0.1, 0.2]}, "sigma"),
        (UNIT, {"sigma": "low"}, "sigma"),
        (UNIT, {"value_range": 1}, "value_range"),
        ([UNIT[0], UNIT[1, :8]], {}, "images"),
        (UNIT, {"label": [0, 1]}, "label"),
        (UNIT, {"label": [0.5] * 20}, "label"),
        (UNIT, {"label": [-2] * 20}, "label"),
    ],
)
def test_what_cannot_be_right_is_rejected(images: np.ndarray, options: dict[str, Any], key: str) -> None:
    with rejected(key):
        from_arrays(images, **options)


@pytest.mark.parametrize(
    ("images", "options"),
    [
        (UNIT + 5 * RNG.normal(size=UNIT.shape), {"value_range": (0, 1), "sigma": 5.0}),  # buried in noise
        (RNG.normal(size=UNIT.shape), {}),  # standardised
        (UNIT / 16, {"value_range": (0, 1)}),  # 12 bits in 16
        (np.zeros((4, 8, 8)), {"sigma": 0.1}),
        (np.ma.masked_less(UNIT, -1), {"value_range": (0, 1)}),  # nothing is masked
    ],
)
def test_what_may_be_right_is_accepted(images: np.ndarray, options: dict[str, Any]) -> None:
    assert len(from_arrays(images, **options)) == len(images)


SMOOTH = np.linspace(0, 1, 16)[:, None] * RNG.random((20, 16, 16)).cumsum(2) / 16
GRAINY = SMOOTH + 0.08 * RNG.normal(size=SMOOTH.shape)
MIXED = np.where(np.arange(20)[:, None, None] % 2, GRAINY, SMOOTH)


@pytest.mark.parametrize(
    ("images", "options", "words"),
    [
        (SMOOTH, {}, "where black and white are -1 and 1"),
        (2.8 * SMOOTH - 1.2, {}, "from -1.2 to 0.722, where black is -1"),
        (GRAINY, {"value_range": (0, 1)}, "count as clean, but the noise measures 0.0[78]"),
        (GRAINY, {"value_range": (0, 1), "sigma": [0, 0.08] * 10}, "as clean, but the noise measures 0.0[78]"),
        (GRAINY * 255, {"value_range": (0, 255), "sigma": 0.16}, "of 0.16, but the noise measures [12]"),
        (GRAINY, {"value_range": (0, 1), "sigma": 0.15}, "noise of 0.15, but the noise measures 0.0[78]"),
        (SMOOTH / 16, {"value_range": (0, 1)}, "where black and white are 0 and 1:"),
        (np.repeat(SMOOTH[:1], 9, 0), {"value_range": (0, 1)}, "8 of the 9 .* .image 1 of image 0, image 2 of"),
        (SMOOTH.repeat(10, 2), {"value_range": (0, 1)}, "If it holds 160 images of 20 x 16"),
        (SMOOTH[0][..., None].repeat(3, 2), {"value_range": (0, 1)}, "If it is one colour image"),
        (np.stack([SMOOTH] * 3, 2), {"value_range": (0, 1)}, "20 images with 16 channels of 3 x 16 pixels"),
        (np.stack([SMOOTH] * 3), {"value_range": (0, 1)}, "3 images with 20 channels of 16 x 16 pixels"),
        (
            MIXED,
            {"value_range": (0, 1), "sigma": [0, 0.16] * 10},
            "noise of 0.16, but the noise measures 0.0[78]",
        ),
        (SMOOTH, {}, r"`value_range=\(black, white\)` states"),
        (np.stack([SMOOTH] * 3 + [SMOOTH * 0 + 1], 3), {"value_range": (0, 1)}, "leave opacity out"),
        (SMOOTH, {"value_range": (0, 1), "label": np.arange(20) * 50}, "951 classes for 20 images"),
        (SMOOTH, {"value_range": (0, 1), "label": np.arange(20) % 3 + 1}, "20 images, none of class 0"),
        (BYTES, {"sigma": 20}, "20 noisy images are 8-bit: .*[(]0.[0-9]% of"),
        (np.stack([GRAINY] * 3, 3), {"value_range": (0, 1), "sigma": 0.08}, "20 noisy .* 3 equal channels"),
    ],
)
def test_what_looks_wrong_is_told(images: np.ndarray, options: dict[str, Any], words: str) -> None:
    with pytest.warns(UserWarning, match=words):
        from_arrays(images, **options)


def test_faults_are_told_with_the_image_and_in_the_units_that_were_given() -> None:
    sigma = np.where(np.arange(20) == 4, -15.5, 1.0)
    broken = np.where(np.arange(20)[:, None, None] == 7, np.nan, UNIT)
    assert "image 4 has a level of -15.5," in fault(lambda: from_arrays(BYTES, sigma)).what
    assert "image 7, of 1 in all" in fault(lambda: from_arrays(broken)).what


def test_ordinary_images_give_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    from_arrays(SMOOTH, value_range=(0, 1))
    several = np.concatenate([GRAINY[:10], GRAINY[10:, :, ::-1]])  # in noise, all others show one scene
    from_arrays(several[..., None], sigma=0.08, value_range=(0, 1))
    assert not recwarn.list


def test_images_on_both_sides_of_a_split_are_found() -> None:
    images = RNG.random((200, 12, 12))
    training, others = (from_arrays(part, value_range=(0, 1)) for part in (images[:150], images[150:]))
    check_overlap(training, others)  # no warning
    with pytest.warns(UserWarning, match=r"0.5 ± 0.15 and -0.00\d+ ± 0.29"):
        check_overlap(training, from_arrays(images[150:], value_range=(-1, 1)))  # half as bright
    mixed = np.concatenate([images[150:], images[7:9], images[20:25] + 0.002])
    with pytest.warns(UserWarning, match="2 of the 57"), pytest.warns(UserWarning, match="5 of 55"):
        check_overlap(training, from_arrays(mixed, value_range=(0, 1)))
    eight_bit = RNG.integers(0, 256, (40, 12, 12), np.uint8)  # the same pictures, stored in another type
    with rejected("data.held_out"):
        check_overlap(from_arrays(eight_bit), from_arrays(eight_bit / 127.5 - 1))
    with rejected("data.held_out"):
        check_overlap(*split_held_out(from_arrays(np.repeat(images[:3], 20, 0), value_range=(0, 1)), 12))


def test_groups_of_arrays_are_held_out_together(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images = from_arrays(rng.uniform(-1, 1, (60, 8, 8)), group=np.arange(60) // 3)
    for source in (images, images.save(tmp_path / "store")):
        rest, held_out = split_held_out(source, 9)
        assert len(held_out) == 9 and not set(rest.group.tolist()) & set(held_out.group.tolist())
    with rejected("group"):
        from_arrays(rng.uniform(-1, 1, (60, 8, 8)), group=[1, 2])


def test_levels_of_the_noisy_half_of_an_array_are_judged_apart() -> None:
    rng = np.random.default_rng(0)
    scenes = rng.uniform(20, 230, (200, 4, 4)).repeat(4, 1).repeat(4, 2) + rng.uniform(0, 5, (200, 1, 1))
    scenes[100:] += rng.normal(0, 10, (100, 16, 16))
    with pytest.warns(UserWarning, match="said to have noise of 20, but the noise measures"):
        from_arrays(scenes, np.repeat([0.0, 20.0], 100), value_range=(0, 255))
