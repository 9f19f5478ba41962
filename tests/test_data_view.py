"""Views and augmentation: exact counts, nested parts, fixed noise, and noise that stays white."""

import json
import math
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

import assay.data.arrays
import assay.data.view
from assay.data import Augmentation, ImageSource, Joined, Loader, View, part, raised, simulate, split_held_out
from assay.data.augment import NUM_UNIFORMS, augment
from assay.data.view import block_seed, image_seeds, noised
from tests.errors import rejected


class Arrays(assay.data.arrays.Arrays):
    """Images in memory, clean unless told otherwise."""

    def __init__(self, images: Tensor, sigma_tn: Tensor | None = None) -> None:
        levels = torch.zeros(len(images)) if sigma_tn is None else sigma_tn
        super().__init__(images, levels, torch.arange(len(images)) % 2, ("even", "odd"), "arrays", (-1.0, 1.0))


class Ramps(ImageSource):
    """What a user's own source must have, and no more."""

    image_shape = (1, 2, 3)

    def __len__(self) -> int:
        return 20

    def read(self, index: Tensor) -> Tensor:
        return index.view(-1, 1, 1, 1) / 10 - torch.arange(6).view(1, 2, 3) / 10


def test_three_methods_make_a_source() -> None:
    ramps, every = Ramps(), torch.arange(20)
    assert repr(ramps) == "<images: 20 images of 1 x 2 x 3, 20 clean, 0 noisy>"
    assert torch.equal(ramps.usable_from, torch.zeros(20)) and ramps.label.tolist() == [-1] * 20
    assert not ramps.has_map
    assert torch.equal(ramps.read_levels(every), torch.zeros(20, 1, 2, 3))
    x, sigma_tn = ramps.read_at(every, torch.ones(20))
    assert torch.equal(x, ramps.read(every)) and not sigma_tn.any()
    noisy = simulate(ramps, 0.25, 0.3)
    assert len(Loader(noisy, 8).batch(3).x_tn) == 8 and split_held_out(noisy, 3)[1].num_classes == 0
    changed = Ramps()
    changed.sigma_tn = torch.ones(20)
    shifted = type("Shifted", (Ramps,), {"read": lambda self, index: Ramps.read(self, index) + 0.01})()
    assert Ramps().fingerprint == ramps.fingerprint
    assert len({ramps.fingerprint, changed.fingerprint, shifted.fingerprint}) == 3
    huge = type("Huge", (Ramps,), {"__len__": lambda self: 2**40})()
    with rejected("fingerprint"):
        _ = huge.fingerprint


def test_groups_stay_together_in_parts_and_joined_sources() -> None:
    first, second = source(6), source(4)
    first.group = torch.tensor([0, 0, 1, 1, 2, 2])
    both = Joined([first, second])
    assert both.group is not None and both.group.tolist() == [0, 0, 1, 1, 2, 2, 3, 4, 5, 6]
    chosen = View(both, torch.tensor([4, 5, 9]))
    assert chosen.group is not None and chosen.group.tolist() == [2, 2, 6] and Joined([second]).group is None


def source(count: int = 50, shape: tuple[int, int, int] = (3, 6, 6), seed: int = 0) -> Arrays:
    return Arrays(torch.rand(count, *shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1)


def real(count: int = 40, shape: tuple[int, int, int] = (1, 2, 2)) -> Arrays:
    """A quarter clean images, the others with noise of 0.1, 0.2 or 0.4, as far as anyone can tell."""
    images = source(count, shape).x_tn
    return Arrays(images, torch.tensor([0.0, 0.1, 0.2, 0.4])[torch.arange(count) * 4 // count])


def classified(*class_names: str) -> Arrays:
    images = source(3)
    images.class_names = class_names
    images.label = torch.arange(3) % 2 if class_names else torch.full((3,), -1)
    return images


def test_simulated_noise_is_that_of_the_first_version() -> None:
    """Committed studies stay reproducible: the golden file was made before views replaced mixtures."""
    golden = np.load(Path(__file__).parent / "golden" / "simulated_noise.npz")
    images = Arrays((torch.arange(512.0).view(16, 2, 4, 4) * 37 % 101) / 50.5 - 1)
    images.fingerprint = "golden"
    for number, setting in enumerate(json.loads(str(golden["settings"]))):
        view = simulate(images, **setting)
        assert view.index.tolist() == golden[f"index_{number}"].tolist()
        assert view.sigma_tn.tolist() == golden[f"sigma_tn_{number}"].tolist()
        assert view.fingerprint == str(golden[f"fingerprint_{number}"])
        x = view.read(torch.arange(len(view)))
        # Processors may round the last bit of a normal number differently; seeds and levels are exact.
        np.testing.assert_allclose(x.numpy(), golden[f"images_{number}"], rtol=0, atol=1e-6)
        seeds = image_seeds(setting["seed"], view.index).tolist()
        for row, (sigma, seed) in enumerate(zip(golden[f"sigma_tn_{number}"].tolist(), seeds, strict=True)):
            z = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(seed))
            assert torch.equal(x[row], images.x_tn[view.index[row]].clone().add_(z, alpha=sigma))


@settings(deadline=None)
@given(st.integers(1, 400), st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 2**40))
def test_clean_counts_are_exact_and_clean_sets_nested(count: int, a: int, b: int, seed: int) -> None:
    few, many = min(a, b) / 1000, max(a, b) / 1000
    images = source(count, (1, 1, 1))
    small, large = simulate(images, few, 0.2, seed), simulate(images, many, 0.7, seed)
    # Half away from zero, in whole numbers.
    assert int((small.sigma_tn == 0).sum()) == (2 * min(a, b) * count + 1000) // 2000
    assert int((large.sigma_tn == 0).sum()) == (2 * max(a, b) * count + 1000) // 2000
    assert bool((large.sigma_tn == 0)[small.sigma_tn == 0].all())
    assert small.sigma_tn.unique().tolist() in ([0.0], [pytest.approx(0.2)], [0.0, pytest.approx(0.2)])


def test_several_levels_and_clean_images_alone() -> None:
    images = source(40)
    mixed, clean = simulate(images, 0.25, [(0.5, 0.1), (0.25, 0.4)], 3), simulate(images, 0.25, 0.5, 3, False)
    levels, counts = mixed.sigma_tn.unique(return_counts=True)
    assert levels.tolist() == [0, pytest.approx(0.1), pytest.approx(0.4)] and counts.tolist() == [10, 20, 10]
    kept = (simulate(images, 0.25, 0.9, seed=3).sigma_tn == 0).nonzero()[:, 0]
    assert torch.equal((mixed.sigma_tn == 0).nonzero()[:, 0], kept) and torch.equal(clean.index, kept)
    assert torch.equal(mixed.label, images.label) and torch.equal(clean.label, images.label[kept])
    assert torch.equal(clean.read(torch.arange(10)), images.x_tn[kept]) and not clean.sigma_tn.any()
    for size in (0.25, 10):  # a part of clean images is what simulation keeps clean
        assert torch.equal(part(images, size, seed=3).index, kept)


def test_noise_is_fixed_and_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    images, every = source(), torch.arange(50)
    half, one = simulate(images, 0, 0.5, 7), simulate(images, 0, 1.0, 7)
    z = one.read(every) - images.x_tn
    assert torch.allclose(half.read(every) - images.x_tn, 0.5 * z, atol=1e-6)
    # Whatever is read together, in whatever order, again and again: the same bits.
    first = half.read(every)
    assert torch.equal(half.read(every), first)
    assert torch.equal(simulate(images, 0, 0.5, 7).read(torch.tensor([40, 3, 40])), first[[40, 3, 40]])
    # The noise of an image depends on the seed and its index, not on the rest of the mixture.
    part = simulate(images, 0.4, [(0.3, 0.5), (0.3, 2.0)], 7)
    noisy = part.sigma_tn == 0.5
    assert torch.equal(part.read(every)[noisy], first[noisy])
    assert torch.equal(part.read(every)[part.sigma_tn == 0], images.x_tn[part.sigma_tn == 0])
    assert not torch.allclose(simulate(images, 0, 0.5, 8).read(every), first)
    # A mixture too large for memory computes what a small one remembers.
    monkeypatch.setattr(assay.data.view, "_MAX_CACHE_BYTES", 0)
    assert torch.equal(simulate(images, 0, 0.5, 7).read(every), first)


def test_fingerprints_tell_mixtures_apart() -> None:
    images = source()
    settings = [(0.3, 0.5, 0), (0.4, 0.5, 0), (0.3, 0.6, 0), (0.3, 0.5, 1), (0.3, 0.5, 0, False)]
    mixtures = [simulate(images, *setting) for setting in settings] + [simulate(source(seed=1), 0.3, 0.5)]
    assert len({mixed.fingerprint for mixed in mixtures}) == len(mixtures)
    assert simulate(images, 0.3, 0.5).fingerprint == mixtures[0].fingerprint


def test_no_two_images_share_a_seed() -> None:
    number = torch.arange(2**20)
    seeds = image_seeds(5, number)
    all_seeds = torch.cat([seeds, image_seeds(5, number, 1), image_seeds(5, number, 2)])
    assert len(all_seeds.unique()) == 3 * 2**20 and 0 <= int(seeds.min()) and int(seeds.max()) < 2**32
    assert torch.equal(image_seeds(5, torch.tensor([77, 3])), seeds[[77, 3]])


@pytest.mark.parametrize(
    ("build", "key"),
    [
        (lambda: simulate(source(), 1.5, 0.2), "clean_fraction"),
        (lambda: simulate(source(), 0.5, 0.0), "sigma"),
        (lambda: simulate(source(), 0.5, float("nan")), "sigma"),
        (lambda: simulate(source(), 0.5, [(0.2, 0.1)]), "clean_fraction"),
        (lambda: simulate(source(), 0.0, 0.1, keep_noisy=False), None),
        (lambda: simulate(Arrays(torch.zeros(2, 1, 2, 2), torch.tensor([0, 0.3])), 0.5, 0.1), "clean_fraction"),
        (lambda: part(real(), clean=11), "clean"),
        (lambda: part(real(), noisy=1.5), "noisy"),
        (lambda: part(real(), clean=-1), "clean"),
        (lambda: part(real(), clean=0.01), "clean"),
        (lambda: part(real(), noisy=1, levels=(0.35, 0.39)), "levels"),
        (lambda: part(real(), levels=(60, 100)), "levels"),
        (lambda: part(source(), levels=(0.1, 0.2)), "levels"),
        (lambda: part(real(), levels=0.2), "levels"),  # type: ignore[arg-type]
        (lambda: part(real(), clean=0, noisy=0), None),
        (lambda: split_held_out(real(), 11), "held_out"),
        (lambda: split_held_out(real(), 0), None),
        (lambda: split_held_out(real(), "6"), "held_out"),  # type: ignore[arg-type]
        (lambda: split_held_out(real(), math.nan), "held_out"),
        (lambda: split_held_out(source(), 1.0), "held_out"),
        (lambda: View(real(), torch.tensor([12]), torch.tensor([0.05])), "target"),
        (lambda: View(real(), torch.tensor([12]), torch.tensor([math.nan])), "target"),
        (lambda: Joined([source(), source(3, (3, 6, 5))]), "image_shape"),
        (lambda: Joined([source(), classified("cat", "dog")]), "class_names"),
    ],
)
def test_bad_views(build: Callable[[], object], key: str | None) -> None:
    with rejected(key):
        build()


@settings(deadline=None)
@given(
    st.integers(4, 300),
    st.integers(0, 1000),
    st.integers(0, 1000),
    st.integers(0, 2**40),
    st.sampled_from([0.1, 0.2]),
)
def test_parts_are_nested_and_exact(count: int, a: int, b: int, seed: int, low: float) -> None:
    images = real(count)
    is_clean, is_inside = images.sigma_tn == 0, images.sigma_tn >= low

    def chosen(share: int) -> set[int]:
        num_clean, num_noisy = ((2 * share * int(mask.sum()) + 1000) // 2000 for mask in (is_clean, is_inside))
        if num_clean + num_noisy == 0:
            return set()
        view = part(images, num_clean and share / 1000, num_noisy and share / 1000, (low, 0.4), seed)
        assert int((view.sigma_tn == 0).sum()) == num_clean and int((view.sigma_tn > 0).sum()) == num_noisy
        assert bool((is_clean | is_inside)[view.index].all())
        assert torch.equal(view.read(torch.arange(len(view))), images.x_tn[view.index])
        assert torch.equal(part(images, num_clean, num_noisy, (low, 0.4), seed).index, view.index)
        return set(view.index.tolist())

    assert chosen(min(a, b)) <= chosen(max(a, b))


@settings(deadline=None)
@given(
    st.integers(200, 300),
    st.integers(1, 30),
    st.integers(1, 30),
    st.integers(0, 2**40),
    st.booleans(),
    st.integers(1, 7),
)
def test_held_out_images_are_nested_and_never_trained_on(
    count: int, a: int, b: int, seed: int, clean: bool, group_size: int
) -> None:
    images = real(count)
    candidates = (images.sigma_tn == 0) == clean
    group = torch.arange(count) // group_size
    images.group = None if group_size == 1 else group
    held: list[set[int]] = []
    for size in sorted((a, b)):
        rest, held_out = split_held_out(images, size, seed, "clean" if clean else "noisy")
        assert bool(candidates[held_out.index].all()) and size <= len(held_out) < size + group_size
        assert group_size > 1 or len(rest) + size == count
        assert not set(group[rest.index].tolist()) & set(group[held_out.index].tolist())
        trained = part(rest, seed=seed).image_number.tolist()
        trained += simulate(part(rest, noisy=0), 0.5, 0.3, seed).image_number.tolist()
        assert not set(trained) & set(held_out.image_number.tolist())
        held.append(set(held_out.index.tolist()))
    assert held[0] <= held[1]


def test_held_out_shares_are_exact() -> None:
    rest, held_out = split_held_out(real(), 0.25, seed=3)
    assert len(held_out) == 3 and int((rest.sigma_tn == 0).sum()) == 7 and len(rest) == 37
    assert len(split_held_out(real(), 0.5, kind="noisy")[1]) == 15


@pytest.mark.parametrize("target", [0.3, 2.0])
def test_raised_images_have_the_noise_of_their_level(target: float) -> None:
    """Images that are nothing but noise: what is measured after raising is the target."""
    sigma_tn = torch.tensor([0.0, 0.1, 0.2, 1.0])[torch.arange(2000) % 4]
    noise = torch.randn(2000, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    images = Arrays(noise * sigma_tn[:, None, None, None], sigma_tn)
    view = raised(images, target, seed=5)
    x = view.read(torch.arange(2000))
    levels = view.sigma_tn.unique()
    assert levels.tolist() == pytest.approx([0, target] if target > 1 else [0, target, 1])
    for level in levels[1:].tolist():
        z = x[view.sigma_tn == level].double() / level
        assert max(abs(deviation) for deviation in whiteness(z)) < 4
    assert torch.equal(x[sigma_tn == 0], images.x_tn[sigma_tn == 0])


def test_views_of_views_compose() -> None:
    images, every = source(60, (2, 4, 4)), torch.arange(60)
    # A choice among chosen images is a choice among all, with the noise that each image would get anyway.
    some = View(images, every[10:40])
    direct = View(images, every[15:30], torch.full((15,), 0.5), 3)
    nested = View(some, torch.arange(5, 20), torch.full((15,), 0.5), 3)
    assert nested.fingerprint == direct.fingerprint
    assert torch.equal(nested.read(torch.arange(15)), direct.read(torch.arange(15)))
    noisy = simulate(images, 0, 0.5, 3)
    assert torch.equal(direct.read(torch.arange(15)), noisy.read(every[15:30]))
    # A choice among noisy images leaves their noise alone.
    chosen = View(noisy, every[15:30])
    assert torch.equal(chosen.read(torch.arange(15)), direct.read(torch.arange(15)))
    assert chosen.image_number.tolist() == list(range(15, 30)) and chosen.label.tolist() == [1, 0] * 7 + [1]


def test_noise_added_twice_is_independent() -> None:
    """Even with the same seed: 0.3 z + 0.4 z would have a deviation of 0.7 instead of 0.5."""
    images = Arrays(torch.zeros(2000, 1, 8, 8))
    x = raised(raised(simulate(images, 0, 0.3, 3), 0.5, 3), 1.3, 3).read(torch.arange(2000))
    assert max(abs(deviation) for deviation in whiteness(x.double() / 1.3)) < 4
    joined = raised(Joined([simulate(images, 0, 0.3, 3), simulate(images, 0, 0.3, 4)]), 0.5, 3)
    z = joined.read(torch.arange(4000)).double() / 0.5
    assert max(abs(deviation) for deviation in whiteness(z)) < 4
    assert abs((z[:2000] * z[2000:]).mean().item()) * math.sqrt(z[:2000].numel()) < 4


def test_joined_sources() -> None:
    first, second = source(5), real(8, (3, 6, 6))
    joined = Joined([first, second, classified()])
    index = torch.tensor([12, 0, 7, 4, 5, 15])
    expected = torch.cat([first.x_tn, second.x_tn, classified().x_tn])[index]
    assert torch.equal(joined.read(index), expected) and len(joined) == 16
    assert torch.equal(joined.sigma_tn, torch.cat([torch.zeros(5), second.sigma_tn, torch.zeros(3)]))
    assert joined.label[index].tolist() == [1, 0, 0, 0, 0, -1] and joined.class_names == ("even", "odd")
    others = [Joined([first, second]), Joined([second, first]), Joined([first])]
    assert len({each.fingerprint for each in [joined, *others]}) == 4
    # The first source keeps its noise; the others get noise of their own.
    both = simulate(Joined([first, first]), 0, 0.5, 7)
    added = both.read(torch.arange(10)) - first.x_tn.repeat(2, 1, 1, 1)
    assert torch.equal(both.read(torch.arange(5)), simulate(first, 0, 0.5, 7).read(torch.arange(5)))
    assert not torch.allclose(added[5:], added[:5])


def whiteness(z: Tensor) -> list[float]:
    """Deviations from unit white Gaussian noise (N, C, H, W), each in standard errors."""
    n = z.numel()
    pairs = [z[..., 1:] * z[..., :-1], z[..., 1:, :] * z[..., :-1, :], z[:, 1:] * z[:, :-1], z[1:] * z[:-1]]
    return [
        z.mean().item() * math.sqrt(n),
        (z.var().item() - 1) * math.sqrt(n / 2),
        (z**3).mean().item() * math.sqrt(n / 15),
        ((z**4).mean().item() - 3) * math.sqrt(n / 96),
        *[pair.mean().item() * math.sqrt(pair.numel()) for pair in pairs],
    ]


MOVES = {
    "none": Augmentation(),
    "flip": Augmentation(flip_x=True, flip_y=True),
    "turn": Augmentation(turn=True),
    "shift": Augmentation(shift=3),
    "all": Augmentation(flip_x=True, flip_y=True, turn=True, shift=5, geometric=1.0),
}


@pytest.mark.parametrize("sigma", [0.05, 2.0])
@pytest.mark.parametrize("moves", MOVES)
def test_noise_is_white_before_and_after_augmentation(moves: str, sigma: float) -> None:
    images = Arrays(torch.zeros(1500, 3, 16, 16))
    mixed = simulate(images, 0, sigma, seed=11)
    index = torch.arange(1500)
    uniform = torch.rand(1500, NUM_UNIFORMS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x, _ = augment(mixed.read(index), mixed.sigma_tn, uniform, MOVES[moves])
    z = (x / sigma).double()
    assert max(abs(deviation) for deviation in whiteness(z)) < 3
    assert stats.kstest(z.flatten()[:20_000].numpy(), "norm").pvalue > 0.001
    # Every pixel of the noisy image is still there, once.
    assert torch.equal(x.flatten(2).sort().values, mixed.read(index).flatten(2).sort().values)


def uniforms(**columns: float) -> Tensor:
    """Random numbers (1, NUM_UNIFORMS) that do nothing but what is asked for."""
    names = ["flip_x", "flip_y", "turn", "down", "right", "p1", "p2", "p3", "p45", "p67"]
    names += [f"a{i}" for i in range(8)]
    neutral = dict.fromkeys(names, 0.75) | {"turn": 0.0, "down": 0.5, "right": 0.5}
    return torch.tensor([[(neutral | columns)[name] for name in names]], dtype=torch.float64)


def test_moves_are_the_ones_named() -> None:
    x = torch.arange(2 * 25.0).view(1, 2, 5, 5)
    noisy = torch.tensor([0.3])

    def moved(move: Augmentation, **columns: float) -> Tensor:
        return augment(x, noisy, uniforms(**columns), move)[0]

    assert torch.equal(moved(Augmentation(flip_x=True), flip_x=0.2), x.flip(-1))
    assert torch.equal(moved(Augmentation(flip_y=True), flip_y=0.2), x.flip(-2))
    for quarter in range(4):
        turned = moved(Augmentation(turn=True), turn=quarter / 4 + 0.1)
        assert any(torch.equal(turned, x.rot90(k, (-2, -1))) for k in ([0], [1, 3], [2], [1, 3])[quarter])
    turns = [moved(Augmentation(turn=True), turn=quarter / 4) for quarter in range(4)]
    assert len({tuple(turn.flatten().tolist()) for turn in turns}) == 4
    for down in range(-2, 3):
        for right in range(-2, 3):
            uniform = {"down": (down + 2.5) / 5, "right": (right + 2.5) / 5}
            assert torch.equal(moved(Augmentation(shift=2), **uniform), x.roll((down, right), (-2, -1)))


def test_only_square_images_turn() -> None:
    with rejected("turn"):
        augment(torch.zeros(1, 1, 4, 5), torch.zeros(1), uniforms(), Augmentation(turn=True))
    with pytest.raises(ValueError, match="shift"):
        Augmentation(shift=-1)


def normal_quantile(value: float) -> float:
    return float(stats.norm.cdf(value))


def angle(value: float) -> float:
    return (value / math.pi + 1) / 2


def turned(value: float) -> float:
    """Of the number that turns half of the stretches."""
    return 0.5 + angle(value) / 2


PIPE = Augmentation(geometric=0.5)


def drawn(a: dict[str, float]) -> Tensor:
    """The random numbers that make the geometric pipe draw these parameters."""
    chances = {"p1": "a1", "p2": "a2", "p3": "a3", "p45": "a5", "p67": "a6"}
    columns = {chance: 0.1 for chance, name in chances.items() if a[name]}
    columns |= {name: 0.2 if a[name] else 0.75 for name in ("a0", "a1")}
    columns |= {name: normal_quantile(a[name]) for name in ("a2", "a5", "a6", "a7")}
    columns |= {"a3": angle(a["a3"]), "a4": turned(a["a4"]) if a["a4"] else 0.3}
    return uniforms(**columns)


GEOMETRIC = {
    "nothing": {},
    "x-flip": {"a0": 1},
    "y-flip": {"a1": 1},
    "scale": {"a2": 0.7},
    "rotation": {"a3": 0.4},
    "stretch": {"a4": 0.9, "a5": -0.8},
    "stretch along an axis": {"a4": 0.0, "a5": -0.8},
    "translation": {"a6": 0.3, "a7": -0.5},
    "all": {"a0": 1, "a1": 1, "a2": 0.5, "a3": -0.6, "a4": 0.3, "a5": 0.4, "a6": 0.2, "a7": 0.1},
}


@pytest.mark.parametrize("case", GEOMETRIC)
@pytest.mark.parametrize("size", [(40, 40), (32, 48)])
def test_geometric_pipe_against_a_smooth_picture(case: str, size: tuple[int, int]) -> None:
    """A picture given by a formula, seen through the transformation, written with plain matrices."""
    a = {f"a{i}": 0.0 for i in range(8)} | GEOMETRIC[case]
    height, width = size

    def picture(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.sin(0.2 * x + 0.4) * np.cos(0.15 * y) + 0.3 * np.sin(0.1 * y + 0.05 * x)

    def rotate(angle: float) -> np.ndarray:
        return np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])

    stretch = 2 ** (0.2 * a["a5"])
    forward = (
        rotate(-a["a4"]) @ np.diag([stretch, 1 / stretch]) @ rotate(a["a4"])
        @ rotate(-a["a3"]) @ (np.eye(2) * 2 ** (0.2 * a["a2"])) @ np.diag([1 - 2 * a["a0"], 1 - 2 * a["a1"]])
    )  # fmt: skip
    y, x = np.mgrid[:height, :width] - np.array([(height - 1) / 2, (width - 1) / 2])[:, None, None]
    centred = np.stack([x - a["a6"] * width / 8, y - a["a7"] * height / 8]).reshape(2, -1)
    from_x, from_y = (np.linalg.inv(forward) @ centred).reshape(2, height, width)
    inside = (np.abs(from_x) < width / 2 - 3) & (np.abs(from_y) < height / 2 - 3)
    assert inside.mean() > 0.25

    image = torch.from_numpy(picture(x, y)).float().expand(1, 2, -1, -1)
    out, label = augment(image, torch.zeros(1), drawn(a), PIPE)
    np.testing.assert_allclose(out[0, 1].numpy()[inside], picture(from_x, from_y)[inside], atol=2e-3)
    assert label is not None
    expected = [a["a0"], a["a1"], a["a2"], math.cos(a["a3"]) - 1, math.sin(a["a3"])]
    expected += [a["a5"] * math.cos(a["a4"]), a["a5"] * math.sin(a["a4"]), a["a6"], a["a7"]]
    assert label[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_geometric_pipe_is_for_clean_images_only() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4000, 1, 8, 8, generator=generator)
    sigma_tn = (torch.arange(4000) % 2).float() * 0.1
    uniform = torch.rand(4000, NUM_UNIFORMS, dtype=torch.float64, generator=generator)
    before = x.clone()
    out, label = augment(x, sigma_tn, uniform, Augmentation(geometric=0.12))
    assert torch.equal(x, before)  # the caller's images are left alone
    assert label is not None
    noisy = sigma_tn > 0
    # Each operation as often as it should be: x-flips half the time, y-flips 0.12 / 2, the others 0.12; half of
    # the stretches have no sine. Of noisy images, no scale and no stretch, three of four quarter turns, and
    # shifts of N(0, 1) pixels that are not rounded to none.
    moved = 0.12 * 2 * stats.norm.sf(0.5)
    for chosen, expected in (
        (~noisy, [0.5, 0.06, 0.12, 0.12, 0.12, 0.12, 0.06, 0.12, 0.12]),
        (noisy, [0.5, 0.06, 0, 0.09, 0.06, 0, 0, moved, moved]),
    ):
        share, count = (label[chosen] != 0).double().mean(0), torch.tensor(expected, dtype=torch.float64)
        assert bool(((share - count).abs() <= 4 * (count * (1 - count) / 2000).sqrt()).all())
    untouched = ~(label != 0).any(1)
    assert torch.equal(out[untouched], x[untouched])
    flipped = (label[:, 0] == 1) & ~(label[:, 1:] != 0).any(1)
    assert torch.equal(out[flipped], x[flipped].flip(-1))  # exactly, without interpolation
    # Every noisy image keeps its own values: noise stays white, of its own strength.
    assert torch.equal(out[noisy].flatten(1).sort(1).values, x[noisy].flatten(1).sort(1).values)


@pytest.mark.parametrize("size", [(8, 8), (8, 16)])
def test_what_noisy_images_get_is_what_their_labels_say(size: tuple[int, int]) -> None:
    """The same operation by the whole pipe on a clean image, away from edges that a shift wraps around."""
    height, width = size
    y, x = np.mgrid[:height, :width]
    bump = torch.from_numpy(np.exp(-((x - width / 2 + 1) ** 2 + (y - height / 2 - 0.4) ** 2) / 4)).float()
    quarters = ((0.1, 0.0), (0.3, math.pi / 2), (0.6, math.pi), (0.9, -math.pi / 2))
    for place, radians in quarters if height == width else quarters[::2]:
        for flips in ((0.2, 0.7), (0.7, 0.2)):
            shifts = {"p67": 0.1, "a6": normal_quantile(2 * 8 / width), "a7": normal_quantile(-8 / height)}
            moves = {"a0": flips[0], "p1": 0.1, "a1": flips[1], "p3": 0.1, **shifts}
            (exact, label), (wanted, expected) = (
                augment(bump[None, None], torch.tensor([sigma]), uniforms(**moves, a3=turn), PIPE)
                for sigma, turn in ((1.0, place), (0.0, angle(radians)))
            )
            assert label is not None and expected is not None
            torch.testing.assert_close(label, expected, atol=1e-6, rtol=0)
            inside = slice(2, height - 2), slice(3, width - 3)
            torch.testing.assert_close(exact[0, 0][inside], wanted[0, 0][inside], atol=5e-3, rtol=0)


def test_interpolating_noisy_images_spoils_their_noise() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(4000, 1, 8, 8, generator=generator)
    uniform = torch.rand(4000, NUM_UNIFORMS, dtype=torch.float64, generator=generator)
    original = Augmentation(geometric=1.0, interpolate_noisy=True)
    out, label = augment(noise, torch.ones(4000), uniform, original)
    assert label is not None and bool(label.any(1).all())
    assert noise.var().item() == pytest.approx(1, abs=0.01)
    neighbours = (out[..., 1:] * out[..., :-1]).mean().item()
    assert out.var().item() < 0.9 and neighbours > 0.1  # no longer white, nor as strong as sigma_tn says


def test_the_example_of_a_kind_of_data_in_contributing() -> None:
    text = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
    blocks = re.findall(r"  ```python\n(.*?)  ```", text[text.index("**a kind of data**") :], re.DOTALL)[:2]
    names = {**vars(assay.data.view), **globals()}
    for block in blocks:
        exec(textwrap.dedent(block), names)
    assert len(blocks) == 2 and "assert " in blocks[1]
    names["test_each_class_has_its_noise"]()


def test_numbers_of_images_are_nested_within_a_block_and_drawn_anew_in_another() -> None:
    source = Arrays(torch.rand(50, 1, 4, 4, generator=torch.Generator().manual_seed(0)))
    seeds = [block_seed(0, block) for block in range(2)]
    mix, ladder = noised(source, 5, 20, 0.3, seeds[1]), part(source, clean=5, seed=seeds[1])
    assert sorted(mix.index[mix.sigma_tn == 0].tolist()) == ladder.index.tolist()
    assert set(mix.index.tolist()) == set(part(source, clean=25, seed=seeds[1]).index.tolist())
    assert mix.sigma_tn.unique().tolist() == pytest.approx([0, 0.3]) and len(mix) == 25
    assert seeds[0] == 0 and set(ladder.index.tolist()) != set(part(source, clean=5, seed=0).index.tolist())
