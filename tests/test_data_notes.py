"""Mistakes of scale, unit and copying are told, with what was stated and found; right data pass quietly."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from skimage.data import astronaut
from sklearn.datasets import load_digits

from assay.data import open_store, split_held_out
from assay.data.arrays import from_arrays
from assay.data.export import names_like
from assay.data.notes import check_overlap
from assay.data.pack import PackConfig, pack
from assay.data.spec import SourceSpec, read_sources
from assay.data.units import Stabilised
from assay.errors import AssayError
from tests.errors import rejected


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


def digits(num_images: int, first: int = 0) -> np.ndarray:
    return load_digits().images[first : first + num_images] / 8 - 1


@pytest.mark.parametrize(
    ("images", "words"),
    [
        (np.concatenate([digits(90), digits(90) + 0.2 * NORMAL[:90]]), "of 90 noisy images show the scene of"),
        (digits(1).repeat(180, 0) + 0.2 * NORMAL, "90 of 90 noisy images show the scene of another"),
        (np.concatenate([digits(90), 0.9 * digits(90)[:, ::-1]]), "180 of 180 clean images are others flipped"),
        (
            np.concatenate([digits(90), digits(90).swapaxes(1, 2) + 0.1]),
            "(image 0 and image 90): leave them out",
        ),
        (np.linspace(-1, 1, 180)[:, None, None] * np.ones((8, 8)), "180 images have one value everywhere"),
    ],
)
def test_twins_are_told_by_what_they_show(images: np.ndarray, words: str) -> None:
    sigma = [0.0] * 90 + [0.2] * 90 if "noisy" in words else 0.0
    with pytest.warns(UserWarning, match=re.escape(words)):
        from_arrays(images, sigma)


@pytest.mark.parametrize("sigma", [0.1, 0.2, 0.35, 0.5])
def test_other_scenes_are_no_twins(recwarn: pytest.WarningsRecorder, sigma: float) -> None:
    noisy = digits(898, 898) + sigma * np.random.default_rng(1).normal(size=(898, 8, 8))
    images = from_arrays(np.concatenate([digits(898), noisy]), [0.0] * 898 + [sigma] * 898)
    check_overlap(*split_held_out(images, 200))
    assert not [each for each in recwarn.list if "show the scene" in str(each) or "flipped" in str(each)]


def test_held_out_scenes_that_are_trained_on_in_noise_or_mirrored_are_told() -> None:
    noisy = from_arrays(digits(90) + 0.2 * NORMAL[:90], 0.2)
    for training, held_out in ((noisy, from_arrays(digits(90))), (from_arrays(digits(90)), noisy)):
        with pytest.warns(UserWarning, match=r"of 90 held-out images show the scene .*image 0 and image 0"):
            check_overlap(training, held_out)
    with pytest.warns(UserWarning, match="90 of 90 held-out images are one trained on flipped"):
        check_overlap(from_arrays(digits(90)), from_arrays(digits(90)[:, :, ::-1]))


def test_what_packing_told_is_told_again(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    text = told(tmp_path, crops(20).astype(np.float32), range=(0, 255), sigma=10)
    store = next(tmp_path.glob("store*"))
    for _ in range(2):
        assert open_store(store).meta.warnings == (text,)
    assert [str(each.message) for each in recwarn.list] == [f"{store} was packed with a warning: {text}"]
    levels = np.linspace(17, 29, 24)
    with pytest.warns(UserWarning, match="rank correlation -0.[0-9]+.: are they in the order of the images"):
        from_arrays(crops(levels[:, None, None]), np.roll(levels, 12), value_range=(0, 255))


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
