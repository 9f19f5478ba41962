"""Mistakes of scale, unit and copying are told, with what was stated and found; right data pass quietly."""

import re
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.ndimage import zoom
from skimage.data import astronaut
from sklearn.datasets import load_digits

from assay.data import open_store, split_held_out
from assay.data.arrays import from_arrays
from assay.data.copies import are_versions, blocks_of, check_overlap, find_shared, has_blocks, twins_of_most
from assay.data.export import names_like
from assay.data.known import get
from assay.data.pack import PackConfig, pack
from assay.data.spec import SourceSpec, read_levels, read_sources
from assay.data.units import Stabilised
from assay.errors import AssayError
from tests.errors import fault, rejected


def crops(sigma: float | np.ndarray = 0.0) -> np.ndarray:
    """Parts (24, 32, 32) of a photograph, 0 to 255, with noise."""
    grey = astronaut().mean(2)
    parts = [grey[y : y + 32, x : x + 32] for y in range(0, 384, 96) for x in range(0, 384, 64)]
    return np.stack(parts) + sigma * np.random.default_rng(0).normal(size=(24, 32, 32))


NORMAL = np.random.default_rng(5).normal(size=(180, 8, 8))
BUSY = np.argsort(crops().std((1, 2)))[12:]  # in none of these are levels ruled out by flat parts


def told(path: Path, values: np.ndarray, **settings: Any) -> str:
    """The warnings of packing an array."""
    np.save(path / "scans.npy", values)
    np.save(path / "map.npy", settings.get("map", 0))
    settings |= {"map": path / "map.npy"} if "map" in settings else {}
    spec = SourceSpec(path=str(path / "scans.npy"), **settings)
    return "\n".join(pack(spec, path / f"store{len(list(path.iterdir()))}").warnings)


def warned(images: np.ndarray, sigma: Any = 0.0, ends: tuple[float, float] = (0, 255), **settings: Any) -> str:
    """The warnings of an array."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return "\n".join(from_arrays(images, sigma, value_range=ends, **settings).warnings)


def test_right_data_pass_quietly(tmp_path: Path) -> None:
    assert told(tmp_path, crops().astype(np.float32), range=(0, 255)) == ""
    assert told(tmp_path, np.rint(crops()).astype(np.uint8)) == ""
    level = np.linspace(10, 30, 32) * np.ones((32, 1))
    assert "noise" not in told(tmp_path, crops(level).astype(np.float32), range=(0, 255), map=level)
    for sigma in (4.0, 20.0, 60.0):
        for unit in (1.0, 255.0):
            values = (crops(sigma) / unit).astype(np.float32)
            text = told(tmp_path, values, range=(0, 255 / unit), sigma=sigma / unit)
            assert "measures" not in text and "between" not in text and "copies" not in text


@pytest.mark.parametrize(
    ("values", "settings", "numbers"),
    [
        (crops(20).astype(np.float32), {"range": (0, 1), "sigma": 20}, ["between", " 0 and 1:"]),
        ((crops() / 255).astype(np.float32), {"range": (0, 255)}, ["between", " 0 and 255:"]),
        (np.rint(16 * crops()).astype(np.uint16), {}, [" 0 and 65535:", "0,4095"]),  # 12 bits in 16
        (crops().astype(np.float32), {"range": (0, 1023)}, ["0 and 244", "0 and 1023:"]),  # 8 bits of 10
        ((crops() / 255).astype(np.float32), {"range": (-1, 1)}, ["between 0 and 0.9569", "-1 and 1:"]),
        ((crops(20) / 255).astype(np.float32), {"range": (-1, 1), "sigma": 0.078}, ["1.099", "-1 and 1:"]),
        (crops(20).astype(np.float32), {"range": (0, 255), "sigma": 0.157}, ["0.157", "19.8"]),  # scaled units
        (crops(20).astype(np.float32), {"range": (0, 255), "sigma": 10}, ["10", "19.8"]),
        (crops(20).astype(np.float32), {"range": (0, 255), "sigma": 13}, ["13", "19.8"]),
        (crops(20)[BUSY].astype(np.float32), {"range": (0, 255), "sigma": 30}, ["30", "measures 20"]),
        (crops(20).astype(np.float32), {"range": (0, 255)}, ["clean", "19.8"]),  # the level was forgotten
        (np.rint(crops()[:1]).astype(np.uint8).repeat(60, 0), {}, ["59 of the 60"]),
        (crops(20).astype("f4") / 255, {"range": (0, 1), "map": np.full((32, 32), 6e-3)}, ["0.006,", "0.07"]),
        ((crops() / 122 - 1).astype(np.float32)[BUSY], {"range": (-1, 1), "sigma": 0.2}, ["0.2", "measures 0"]),
    ],
)
def test_mistakes_of_scale_are_told(tmp_path: Path, values: Any, settings: Any, numbers: list[str]) -> None:
    text = told(tmp_path, values, **settings)
    assert all(number in text for number in numbers), text


def test_few_noisy_images_and_turned_ones_are_told() -> None:
    rng, x = np.random.default_rng(0), 255 * zoom(load_digits().images[:400] / 16, (1, 2, 2), order=1)
    clean, noise = x[:200], 25 * rng.standard_normal((200, 16, 16))
    levels = np.repeat([0.0, 25.0], 200)
    strayed = clean.copy()
    strayed[::20] += noise[::20]
    framed = np.pad(np.concatenate([clean, x[200:] + noise]), ((0, 0), (2, 2), (2, 2)))
    for images, stated, words in (
        ([clean, x[200:] + noise], levels, ""),
        ([strayed, x[200:] + noise], levels, "10 of the 200 clean images of arrays have values below black"),
        ([clean, np.rot90(x[200:] + noise, 1, (1, 2))], levels, "if one kind is turned"),
        ([framed[:200], framed[200:]], levels, "200 noisy images have a border of one value"),
    ):
        found = from_arrays(np.concatenate(images), stated, value_range=(0, 255)).warnings
        assert words in " ".join(found) and bool(found) == bool(words), found


def test_wrong_settings_of_a_sensor_are_told(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values = 256 + 3.2 * rng.poisson(2 * crops() + 4) + 9 * rng.normal(size=(24, 32, 32))
    right = {"range": (200, 2200), "gain": 3.2, "read_noise": 9, "black": 256}
    frames = np.rint(values).astype(np.uint16)
    for same in ({}, {"black": 231, "read_noise": 0}):  # as dark frames tell them, and as the frames alone
        assert told(tmp_path, frames, **right | same) == ""
    text = told(tmp_path, frames, **right | {"gain": 1 / 3.2})  # as astronomers state it
    stated = Stabilised(200, 2200, 1 / 3.2, 9, 256).sigma_tn
    assert re.search(f"noise of {stated:.3g} once .* gain .* read_noise and black", text)
    assert re.search(r"are far below `black` \(400\)", told(tmp_path, frames, **right | {"black": 400}))
    scenes = np.concatenate([crops()[BUSY], crops()[BUSY][:, ::-1]])  # 1.5 electrons per value
    counts = 3 * rng.normal(size=(24, 32, 32)) + 100 + rng.poisson(3.6 * scenes) / 1.5
    for gain, is_told in ((1 / 1.5, False), (1.5, True)):
        settings = {"range": (90, 800), "gain": gain, "read_noise": 3, "black": 100}
        text = told(tmp_path, np.rint(counts).astype(np.uint16), **settings)
        assert ("noise of 0.0508 once it is stabilised, but the noise measures 0.03" in text) == is_told, text
    dark = np.rint(256 + 9 * rng.normal(size=(2, 32, 32))).astype(np.uint16)
    with rejected("gain", "scans.npy[0]"):
        told(tmp_path, dark, **right | {"black": 0})


def test_noisy_versions_are_held_out_with_the_clean_images(tmp_path: Path) -> None:
    for name, images in {"clean": crops(), "twins": crops(20), "others": crops(20)[::-1]}.items():
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "a.npy", images.astype(np.float32))
    words = [[f"{tmp_path}/clean/a.npy", f"{tmp_path}/{name}/a.npy:sigma=20"] for name in ("twins", "others")]
    twins, others = (
        pack(read_sources(each, "range=0,255"), tmp_path / Path(each[1]).parts[-2] / "store") for each in words
    )
    assert "24 images show scenes of" in twins.warnings[-1] and others.store.group is None
    rest, held_out = split_held_out(twins.store, 6)
    assert len(rest) == 36 and not {i % 24 for i in rest.index.tolist()} & {*held_out.index.tolist()}


SHARE = "share pixels with another"


def digits(num_images: int, first: int = 0) -> np.ndarray:
    return load_digits().images[first : first + num_images] / 8 - 1


@pytest.mark.parametrize(
    ("images", "words"),
    [
        (
            np.concatenate([digits(90), digits(90) + 0.2 * NORMAL[:90]]),
            "of 90 images show the scene of another",
        ),
        (digits(1).repeat(180, 0) + 0.2 * NORMAL, "of 90 images show the scene of another"),
        (
            np.concatenate([digits(90), 0.9 * digits(90) + 0.1]),
            "180 of 180 clean images are others, brighter or darker (image 0 and image 90): leave them out",
        ),
        (
            np.concatenate([digits(90), digits(90)[:, ::-1]]),
            f"180 of 180 images {SHARE} (image 0 and image 90)",
        ),
        (np.concatenate([digits(90), digits(90).swapaxes(1, 2)]), f"images {SHARE} (image 0 and image 90)"),
        (np.concatenate([digits(90), np.roll(digits(90), 1, 2)]), f"images {SHARE} (image 0 and image 90)"),
        (np.linspace(-1, 1, 180)[:, None, None] * np.ones((8, 8)), "180 images have one value everywhere"),
    ],
)
def test_twins_are_told_by_what_they_show(images: np.ndarray, words: str) -> None:
    sigma = [0.0] * 90 + [0.2] * 90 if "scene" in words else 0.0
    assert words in warned(images, sigma, (-1, 1))


@pytest.mark.parametrize(("side", "sigma"), [(16, 25), (16, 50), (32, 50), (32, 90)])
def test_noisy_versions_of_clean_crops_are_told(side: int, sigma: float) -> None:
    """Also where much of a photograph is so smooth that its crops look like one another in this noise."""
    picture, rng = astronaut().mean(2), np.random.default_rng(side)
    clean = np.stack([picture[y : y + side, x : x + side] for y, x in rng.integers(512 - side, size=(600, 2))])
    level = np.where(np.arange(600) < 300, 0, sigma)
    for first, is_told in ((300, False), (0, True)):  # noisy images of other crops, and of these
        noisy = clean[first : first + 300] + sigma * rng.normal(size=(300, side, side))
        text = warned(np.concatenate([clean[:300], noisy]), level)
        assert ("show the scene of another" in text) == is_told


def test_numbers_of_near_images_tell_twins_from_chance() -> None:
    """Mixtures of Poisson distributions have a peak by a rare chance only; k twins of each image are found."""
    rng, num_wrong = np.random.default_rng(0), 0
    for _ in range(1000):
        num, spread, k = rng.integers(16, 257), rng.uniform(0, 3), int(rng.integers(1, 6))
        rate = np.exp(rng.normal(rng.uniform(-3, 3), spread, num)).clip(0, 1e4)
        num_wrong += twins_of_most(rng.poisson(rate), 10**6) is not None
        assert twins_of_most(k + rng.poisson(0.2, num), 10**6) == k
    assert num_wrong <= 10


def test_copies_as_jpeg_are_told(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for i, picture in enumerate(crops().astype(np.uint8)):
        Image.fromarray(picture).save(tmp_path / "in" / f"{i}.png")
        Image.fromarray(picture).save(tmp_path / "in" / f"copy{i}.jpg", quality=92)
    report = pack(SourceSpec(path=str(tmp_path / "in")), tmp_path / "store")
    assert "of 48 images show the scene of another" in str(report.warnings)


def test_channels_axes_and_rows_in_another_order_are_told() -> None:
    """Red and blue that change places, transposed images, and rows cut at the wrong width."""
    image = astronaut()[:256, 128:384].astype(float)
    parts = np.stack([image[y : y + 32, x : x + 32] for y in range(0, 225, 16) for x in range(0, 225, 16)])
    warm = 0.7 * parts + [70, 30, 0]
    noise = 25 * np.random.default_rng(0).normal(size=warm.shape)
    level = np.where(np.arange(len(warm)) % 2, 25.0, 0.0)
    grainy = np.where(level[:, None, None, None] > 0, noise, 0)
    swapped = np.where(level[:, None, None, None] > 0, warm[..., ::-1], warm)
    turned = np.concatenate([digits(90), digits(90, 90).swapaxes(1, 2) + 0.1 * NORMAL[:90]])
    straight = np.concatenate([digits(90), digits(90, 90) + 0.1 * NORMAL[:90]])
    rows = parts.mean(3).reshape(-1, 32 * 32)[:, : 32 * 30].reshape(-1, 48, 20)
    for given, sigma, ends, words, is_told in (
        (warm + grainy, level, (0, 255), "is one BGR?", False),
        (swapped + grainy, level, (0, 255), "is one BGR?", True),
        (straight, [0.0] * 90 + [0.1] * 90, (-1, 1), "turned, flipped or transposed", False),
        (turned, [0.0] * 90 + [0.1] * 90, (-1, 1), "turned, flipped or transposed", True),
        (parts.mean(3), 0.0, (0, 255), "are width and height", False),
        (rows, 0.0, (0, 255), "are width and height", True),
    ):
        assert (words in warned(given, sigma, ends)) == is_told, words


def test_levels_that_differ_are_no_gain() -> None:
    """Brighter images that happen to be noisier, each at its own level, are not the noise of a sensor."""
    bright = np.linspace(0.1, 0.9, 80)[:, None, None]
    light = bright + np.linspace(-0.1, 0.1, 32)[:, None] + np.zeros(32)
    level = np.where(bright < 0.5, 0.02, 0.04)
    x = light + level * np.random.default_rng(0).standard_normal(light.shape)
    for sigma in (level.flatten(), 0.03):
        assert "depends on the signal" not in warned(x, sigma, (0, 1))
    steep = light + 0.3 * (np.arange(32) - 15.5) / 32  # so that parts of an image differ
    within = steep + 0.06 * np.sqrt(steep.clip(0)) * np.random.default_rng(0).standard_normal(light.shape)
    assert "depends on the signal" in warned(within, 0.04, (0, 1))


@pytest.mark.parametrize("sigma", [0.1, 0.2, 0.35, 0.5])
def test_other_scenes_are_no_twins(recwarn: pytest.WarningsRecorder, sigma: float) -> None:
    noisy = digits(898, 898) + sigma * np.random.default_rng(1).normal(size=(898, 8, 8))
    images = from_arrays(np.concatenate([digits(898), noisy]), [0.0] * 898 + [sigma] * 898)
    check_overlap(*split_held_out(images, 200))
    words = "show the scene", "brighter", "share pixels"
    assert not [each for each in recwarn.list if any(word in str(each) for word in words)]


def around_the_centre(off: float) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns (300, 32, 32) of pixels, from a centre that is `off` that of the image."""
    rows, columns = np.mgrid[:32, :32][:, None] - 15.5 + off * NORMAL.flatten()[:600].reshape(2, 300, 1, 1)
    return rows, columns


@pytest.mark.parametrize(("kind", "off"), [("discs", 0.0), ("round", 0.05), ("oval", 0.0), ("oval", 0.1)])
def test_round_things_are_not_called_brighter(kind: str, off: float) -> None:
    """Any two of them look like one another brighter, and as much like its mirror image."""
    (rows, columns), rng = around_the_centre(off), np.random.default_rng(0)
    size, turn, axis, light = rng.uniform([2, 0, 0.4, 0.6], [7, np.pi, 1, 2], (300, 4)).T[..., None, None]
    turn, axis = (turn, axis) if kind == "oval" else (0.0, 1.0)
    along, across = columns * np.cos(turn) + rows * np.sin(turn), rows * np.cos(turn) - columns * np.sin(turn)
    radius = np.hypot(along, across / axis)
    images = light * (1 / (1 + np.exp(radius - 2 * size)) if kind == "discs" else np.exp(-radius / size)) - 1
    assert "brighter" not in warned(images, ends=(-1, 1))
    if off == 0.1:  # most are not round enough to hide their copies
        twice = np.concatenate([images[:150], 0.9 * images[:150] - 0.1])
        assert "clean images are others, brighter" in warned(twice, ends=(-1, 1))


def test_held_out_scenes_that_are_trained_on_in_noise_or_mirrored_are_told() -> None:
    noisy = from_arrays(digits(90) + 0.2 * NORMAL[:90], 0.2)
    for training, held_out in ((noisy, from_arrays(digits(90))), (from_arrays(digits(90)), noisy)):
        with pytest.warns(UserWarning, match=r"of 90 held-out images show the scene .*image 0 and image 0"):
            check_overlap(training, held_out)
    with pytest.warns(UserWarning, match="90 of 90 held-out images are one trained on, brighter"):
        check_overlap(from_arrays(digits(90)), from_arrays(0.9 * digits(90)))
    for other in (digits(90)[:, :, ::-1], np.roll(digits(90), 1, 1)):
        with pytest.warns(UserWarning, match=r"90 of 90 held-out images share pixels .*image 0 and image 0"):
            check_overlap(from_arrays(digits(90)), from_arrays(other))


def test_overlapping_crops_are_told_unless_they_are_held_out_together(tmp_path: Path) -> None:
    """Crops of 24 x 24 pixels at a distance of 8, with noise, as files and as patches of one picture."""
    scene = astronaut().mean(2)[:120, :120] + 20 * np.random.default_rng(0).normal(size=(120, 120))
    places = [(y, x) for y in range(0, 97, 8) for x in range(0, 97, 8)]
    parts = np.stack([scene[y : y + 24, x : x + 24] for y, x in places]).astype(np.float32)
    text = told(tmp_path, parts, range=(0, 255), sigma=20)
    assert re.search(rf"169 of 169 images {SHARE} .scans.npy.0. and scans.npy.[0-9]+.*: are they overl", text)
    assert SHARE in warned(parts, 20) and SHARE not in warned(parts, 20, group=np.zeros(169, int))
    np.save(tmp_path / "scene.npy", scene.astype(np.float32)[None])
    spec = SourceSpec(path=str(tmp_path / "scene.npy"), range=(0, 255), sigma=20)
    patches = pack(spec, tmp_path / "patches", PackConfig(patch=(24, 24), stride=8))
    assert len(patches.store) == 169 and SHARE not in str(patches.warnings)


def test_blocks_of_different_images_differ() -> None:
    """Of Fashion-MNIST, of textures, and of discs of two colours, whose blocks are too flat to count."""
    with TemporaryDirectory() as folder:
        store = get("fashion-mnist", Path(folder) / "s", num_images=2000).store
        fashion = store.read(torch.arange(2000)).numpy()
    rng, (rows, columns) = np.random.default_rng(0), np.mgrid[:32, :32]
    centre, radius = rng.integers(8, 24, (2, 500, 1, 1)), rng.integers(2, 8, (500, 1, 1))
    discs = np.hypot(rows - centre[0], columns - centre[1]) < radius
    for images in (fashion, rng.integers(0, 9, (500, 1, 32, 32)) / 4 - 1, 2.0 * discs[:, None] - 1):
        assert find_shared(dict(enumerate(map(blocks_of, images))), np.arange(len(images))) is None
    twice = np.concatenate([fashion[:300], np.roll(fashion[:300], (1, 2), (2, 3))])
    found = find_shared(dict(enumerate(map(blocks_of, twice))), np.arange(600))
    assert found is not None and found[1:] == (0, 300) and int(found[0].split()[0]) > 570
    assert len(blocks_of(fashion[0, :, :7, :7])) == 0  # too small
    assert 3700 < sum(has_blocks(i, 40_000) for i in range(40_000)) < 4500


def test_what_packing_told_is_told_again(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    text = told(tmp_path, crops(20).astype(np.float32), range=(0, 255), sigma=10)
    store = next(tmp_path.glob("store*"))
    for _ in range(2):
        assert open_store(store).meta.warnings == (text,)
    assert [str(each.message) for each in recwarn.list] == [f"{store} was packed with a warning: {text}"]
    levels = np.linspace(17, 29, 24)
    slope, noise = np.linspace(-60, 60, 32), crops(levels[:, None, None])  # so that no level is ruled out
    wrong = "rank correlation -0.[0-9]+.: are they in the order of the images"
    assert re.search(wrong, warned(slope + noise, np.roll(levels, 12)))


def test_levels_of_other_images_are_told(tmp_path: Path) -> None:
    sigma = np.resize([8.0, 16.0, 32.0], 12)
    noise = sigma[:, None, None] * np.random.default_rng(0).normal(size=(12, 32, 32))
    np.save(tmp_path / "scans.npy", (crops()[BUSY] + noise).astype(np.float32))
    for by in (0, 1):
        rows = [f"scans.npy[{i}],{level}" for i, level in enumerate(np.roll(sigma, by))]
        (tmp_path / "levels.csv").write_text("\n".join(["filename,sigma", *rows]))
        spec = SourceSpec(path=str(tmp_path / "scans.npy"), range=(0, 255), levels=tmp_path / "levels.csv")
        assert len(pack(spec, tmp_path / f"store{by}").warnings) == by


def test_noisy_8_bit_files_are_told_with_the_share_that_is_stored(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(1, 255, (3, 6, 6), dtype=np.uint8)
    pixels[:, ::3] = 0  # a third of the pixels are black
    np.save(tmp_path / "a.npy", pixels)
    spec = SourceSpec(path=str(tmp_path / "a.npy"), sigma=12)
    for config in (PackConfig(), PackConfig(size=(3, 2), fit="crop")):  # of what is stored, not of what was cut
        found = pack(spec, tmp_path / f"store{config.fit}", config).warnings
        assert "3 noisy" in found[0] and "33.3%" in found[0]


def test_sources_are_read_from_words_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["clean/", "a,b/:sigma=38,range=-1,-0.5", r"C:\scans:levels=C:\l,1.csv"]
    found = read_sources(words, "range=0,255,gain=2")
    assert found[0] == SourceSpec(path="clean/", range=(0, 255), gain=2)
    assert found[1] == SourceSpec(path="a,b/", sigma=38, range=(-1, -0.5))  # own noise, not that of the sensor
    assert found[2] == SourceSpec(path=r"C:\scans", levels=Path(r"C:\l,1.csv"), range=(0, 255))
    Path("odd:sigma=3").mkdir()
    for word in ("hf:me/data:test", "s3://b/c?d=e", "odd:sigma=3"):
        assert read_sources([word]) == [SourceSpec(path=word)]
    for wrong, key in {"a:sgima=3": "sgima", "a:sigma=-1": "sigma", "a:range=5,1": "range"}.items():
        with pytest.raises(AssayError) as caught:
            read_sources([wrong])
        assert (caught.value.path, caught.value.key) == ("a", key)


def test_denoised_files_are_named_like_their_sources() -> None:
    assert names_like(["cells/a.tif", "cells/b 2.PNG", "x.fits.gz"]) == ["cells-a", "cells-b 2", "x"]
    assert names_like(["s.npy[3]", "s.npy[10]", "p.png[0,64]"]) == ["s-000003", "s-000010", "p-0-64"]
    assert names_like(["a.png", "a.jpg", "."]) == ["000000-a", "000001-a", "000002"]  # each once
    assert names_like(["../..\\x\u2028y.png"]) == ["x-y"]


def test_clipped_float_noise_is_told(tmp_path: Path) -> None:
    """Values cut at black and white, in files of floats; the same noise in full passes."""
    noisy = crops(40.0)[BUSY]
    assert "clipped noise" not in told(tmp_path, noisy, range=(0, 255), sigma=40)
    cut = noisy.clip(60, 180)
    share = np.mean([np.isin(image, (image.min(), image.max())).mean() for image in cut])
    said = told(tmp_path, cut, range=(0, 255), sigma=40)
    assert f"{len(cut)} noisy images have {share:.1%} of their values" in said


def test_kinds_of_noise_that_one_level_does_not_describe_are_told(tmp_path: Path) -> None:
    rng, photos = np.random.default_rng(1), np.repeat(crops(), 2, 1).repeat(2, 2)  # flat parts of two pixels
    white = rng.normal(size=photos.shape)
    smooth = (white + np.roll(white, 1, 1) + np.roll(white, 1, 2) + np.roll(white, 1, (1, 2))) / 2
    photons = np.sqrt(100 + 4 * photos) * white  # 10 in the dark, which rules no image out
    for noise, sigma, words in (
        (20 * white, 20, ""),
        (20 * smooth, 20, "correlates (0."),
        (photons, 10, "`gain`"),
    ):
        values, folder = (photos + noise).astype(np.float32), tmp_path / f"{words[:5]}-files"
        folder.mkdir()
        text = told(folder, values, range=(0, 255), sigma=sigma)
        assert words in text and ("correlates" in text or "depends on" in text) == bool(words), text


def test_levels_are_compared_whatever_the_kind_of_noise(tmp_path: Path) -> None:
    """Clipped at black, noise is less in dark parts, which is no photon noise and hides no wrong level."""
    noise = 30 * np.random.default_rng(1).normal(size=(24, 64, 64))
    clipped = (crops().repeat(2, 1).repeat(2, 2) + noise).clip(0).astype(np.float32)
    for sigma in (30, 3):
        text = told(tmp_path, clipped, range=(0, 255), sigma=sigma)
        assert "depends on" not in text and ("noise of 3, but the noise measures 2" in text) == (sigma == 3)


def test_maps_that_the_noise_does_not_follow_are_told(tmp_path: Path) -> None:
    level = np.linspace(5, 60, 32) * np.ones((32, 1))
    values = crops(level).astype(np.float32)
    for given, is_told in ((level, False), (level.T, True), (level[:, ::-1], True)):
        text = told(tmp_path, values, range=(0, 255), map=given)
        found = re.search(r"follows its map .correlation over pixels (.*?)\)", text)
        assert (found is not None) == is_told and (found is None or float(found[1]) < 0.2)
    assert "follows" not in told(tmp_path, crops(20).astype(np.float32), range=(0, 255), map=16 + level / 10)


def test_pages_that_are_read_as_colours_are_told() -> None:
    places = [(y, x) for y in range(0, 480, 96) for x in range(0, 480, 96)]
    colour = np.stack([astronaut()[y : y + 24, x : x + 24] for y, x in places])
    pages = np.stack([np.roll(colour[..., c], 7 * c, 0) for c in range(3)], 1)
    assert "three channels" not in warned(colour)
    assert re.search(r"three channels .* hardly correlate \(-?0.[01]\d\): .* pages of a stack", warned(pages))


@pytest.mark.parametrize("seed", range(4))
def test_texture_is_not_called_noise_of_another_kind(seed: int) -> None:
    """Waves of any direction and wavelength in white noise, without any flat part."""
    rng, (rows, columns) = np.random.default_rng(seed), np.mgrid[:32, :32]
    wave, turn, phase = rng.uniform([0.8, 0, 0], [2.2, np.pi, 6], (48, 3)).T[..., None, None]
    waves = 0.5 * np.sin(wave * (rows * np.sin(turn) + columns * np.cos(turn)) + phase)
    assert "the noise of" not in warned(waves + 0.1 * rng.normal(size=waves.shape), 0.1, (-1, 1))


def test_images_scaled_one_by_one_are_told(tmp_path: Path) -> None:
    noisy = crops(20)
    lowest, span = noisy.min((1, 2), keepdims=True), np.ptp(noisy, (1, 2))[:, None, None]
    scaled = ((noisy - lowest) / span).astype(np.float32)
    assert "between 0 and 1, exactly" in told(tmp_path, scaled, range=(0, 1), sigma=0.1)


def test_sources_of_another_brightness_are_told(tmp_path: Path) -> None:
    clean, noisy = crops()[::2].repeat(2, 0), crops(20)
    np.save(tmp_path / "noisy.npy", noisy.astype(np.float32))
    for gamma, is_told in ((1.0, False), (0.3, True)):
        other = 255 * (clean / 255) ** gamma + np.arange(24)[:, None, None] / 8  # no copies
        np.save(tmp_path / "clean.npy", other.astype(np.float32))
        both = read_sources([f"{tmp_path}/clean.npy", f"{tmp_path}/noisy.npy:sigma=20"], "range=0,255")
        text = "\n".join(pack(both, tmp_path / f"store-{gamma}").warnings)
        assert ("scaled alike" in text) == is_told, text


def test_levels_are_found_by_names_as_people_write_them(tmp_path: Path) -> None:
    names, path = ["a/One.png", "a/two.png", "b/two.png"], tmp_path / "levels.csv"
    path.write_text("filename,sigma\n one ,1\na/two.png,2\nb/two.png,3\nother.png,4\n")
    assert [level.sigma for level in read_levels(path, names)] == [1, 2, 3]  # type: ignore[union-attr]
    path.write_text("filename,sigma\none.PNG,1\ntwo,2\nelse.png,4\n")
    found = read_levels(path, [*names, "c/three.png"])
    assert found[0].sigma == 1  # type: ignore[union-attr]
    assert [str(error).count("ambiguous") for error in found[1:3]] == [1, 1]
    assert "no sigma for c/three.png (it has one for else.png)" in str(found[3])


def colours(sigma: Any = 0.0, seed: int = 0) -> np.ndarray:
    """Parts (48, 3, 32, 32) of a photograph, with noise."""
    rng = np.random.default_rng(seed)
    picture = astronaut()[::2, ::2].transpose(2, 0, 1).astype(float)
    parts = [picture[:, y : y + 32, x : x + 32] for y, x in rng.integers(224, size=(48, 2))]
    return np.stack(parts) + sigma * rng.normal(size=(48, 3, 32, 32))


REPEATED, SHARED = "share their noise (correlation", "the channels of arrays share their noise"


def test_noise_that_is_not_drawn_for_each_value_is_told() -> None:
    rng, clean = np.random.default_rng(1), colours()
    grey, pattern = clean.mean(1), 30 * rng.normal(size=(4, 32, 32))
    assert REPEATED not in warned(colours(30), 30.0) and SHARED not in warned(colours(30), 30.0)
    assert f"images of arrays {REPEATED}" in warned(grey + pattern[0], 30.0)
    assert f"images of arrays {REPEATED}" in warned(grey + pattern[np.arange(48) % 4], 30.0)
    assert SHARED in warned(clean + 30 * rng.normal(size=(48, 1, 32, 32)), 30.0)
    level = np.array([10.0, 25.0, 50.0])[:, None, None]
    said = warned(colours(level), float(np.sqrt(np.square(level).mean())))
    assert re.search(r"channels of arrays differ in noise by a factor of [345]\.", said)


def test_bytes_that_overflowed_are_told_and_clipped_ones_are_not() -> None:
    noisy, bright = np.rint(colours(25)), np.rint(colours() + 40)
    wrap = "did values beyond them wrap round?"
    assert wrap in warned(noisy.astype(int).astype(np.uint8), 25.0)
    assert wrap in warned(bright.astype(int).astype(np.uint8))
    signed = bright.clip(0, 255).astype(np.uint8).view(np.int8)
    assert wrap in warned(signed, ends=(-128, 127))
    assert wrap not in warned(noisy.clip(0, 255).astype(np.uint8), 25.0)
    sharp = 250.0 * (np.indices((32, 32)).sum(0) % 8 < 4) * np.ones((48, 1, 1))
    assert wrap not in warned(sharp.astype(np.uint8))


@pytest.mark.parametrize("off", [-4, -1, 1, 4])
def test_a_width_that_is_off_by_little_is_told(off: int) -> None:
    pixels, width = crops().reshape(-1), 32 + off
    torn = pixels[: len(pixels) // (32 * width) * 32 * width].reshape(-1, 32, width)
    assert f"is the width 32 instead of {width}?" in warned(torn)
    assert "is the width" not in warned(crops())
    slope = np.linspace(0, 200, 32)  # moves to the side from row to row, and is no error
    wave = np.sin(np.linspace(0.05, 0.15, 30)[:, None, None] * np.add.outer(slope, slope))
    assert "is the width" not in warned(127 + 100 * wave)


def test_maps_of_other_levels_are_told(tmp_path: Path) -> None:
    level = np.linspace(5, 40, 32) * np.ones((32, 1))
    images = crops(level).astype(np.float32)
    assert "measures" not in told(tmp_path, images, range=(0, 255), map=level)
    assert "said to have noise of 12.4" in told(tmp_path, images, range=(0, 255), map=level / 2)
    variances = np.square(level / 255)
    assert "said to have noise" in told(tmp_path, images / 255, range=(0, 1), map=variances)


@pytest.mark.parametrize("share", [0.1, 0.2])
def test_a_few_images_of_the_other_kind_are_told(share: float) -> None:
    rng, images = np.random.default_rng(2), colours().mean(1)
    is_other = rng.random(48) < share
    noise = 40 * rng.normal(size=images.shape)
    assert "are noisy ones among them?" in warned(images + noise * is_other[:, None, None])
    textured = images + 60 * np.sin(np.arange(32))  # so that no level is ruled out
    assert "are clean ones among them?" in warned(textured + noise * ~is_other[:, None, None], 40.0)


def test_levels_that_pixels_rule_out_are_rejected_as_in_files(tmp_path: Path) -> None:
    with rejected("sigma"):
        from_arrays(crops(10), 200.0, value_range=(0, 255))
    error = fault(lambda: told(tmp_path, crops(10), range=(0, 255), sigma=200.0))
    assert error.key == "sigma" and re.search(r"\(it measures (9|10)\b", error.what)
    assert "skip_bad" not in str(error.cure)


@pytest.mark.parametrize(
    ("stated", "words"),
    [(20.0, "multiply it by 128.5"), (20 / 127.5, "from -1 to 1, multiply it by 1.638e+04")],
)
def test_levels_in_other_units_are_told_with_the_factor(tmp_path: Path, stated: float, words: str) -> None:
    files = np.rint((crops(20) + 100) * 128.5).astype(np.uint16)
    assert words in told(tmp_path, files, range=(12850, 12850 + 255 * 128.5), sigma=stated)
    said = told(tmp_path, crops(20).astype(np.float32) / 255, range=(0, 1), sigma=(20 / 255) ** 2)
    assert "If it is a variance, give its square root" in said


def test_numbered_files_of_other_scenes_are_no_versions() -> None:
    rng = np.random.default_rng(0)
    scenes = torch.from_numpy(rng.normal(size=(20, 8, 8)))
    bright = torch.linspace(-1, 1, 20)[:, None, None]  # sources are sorted alike
    noisy, others = scenes + 0.5 * torch.randn(20, 8, 8), torch.from_numpy(rng.normal(size=(20, 8, 8)))
    assert are_versions(list(zip(scenes + bright, noisy + bright, strict=True)))
    assert not are_versions(list(zip(scenes + bright, others + bright, strict=True)))


def test_colours_that_were_the_first_axis_are_told() -> None:
    words = "were colours the first axis of each image?"
    assert words in warned(colours().reshape(48, 32, 32, 3)) and words not in warned(colours())
