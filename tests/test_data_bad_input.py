"""Bad input: an error with the file, the setting and the cure, and no half-written store left behind."""

import json
import os
import resource
import struct
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from assay.data import open_store
from assay.data.pack import PackConfig, pack
from assay.data.readers import read_any
from assay.data.spec import Level, SourceSpec, read_levels
from assay.errors import AssayError
from assay.files import csv_cell
from tests.commands import run
from tests.errors import rejected
from tests.stores import grey


def good_folder(folder: Path) -> Path:
    for i in range(3):
        grey(folder / f"good{i}.png", i)
    return folder


def bomb(path: Path, width: int, depth: int = 8) -> None:
    """A PNG whose header claims width x width pixels."""
    header = struct.pack(">IIBBBBB", width, width, depth, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(bytes(100))), (b"IEND", b"")]
    body = b"".join(struct.pack(">I", len(c)) + n + c + struct.pack(">I", zlib.crc32(n + c)) for n, c in chunks)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + body)


def tiff(folder: Path, *shape: int, **options: Any) -> None:
    tifffile.imwrite(folder / "bad.tiff", np.zeros(shape, dtype=np.uint16), **options)


def deep_tiff_bomb(folder: Path) -> None:
    """Float colour, which only tifffile reads, with a width of 30,000 written into its header."""
    tifffile.imwrite(folder / "bad.tiff", np.zeros((4, 4, 3), dtype=np.float32), photometric="rgb")
    data = bytearray((folder / "bad.tiff").read_bytes())
    (start,) = struct.unpack("<I", data[4:8])
    for entry in range(start + 2, start + 2 + 12 * struct.unpack("<H", data[start : start + 2])[0], 12):
        if struct.unpack("<H", data[entry : entry + 2])[0] in (256, 257):  # width and height
            data[entry + 2 : entry + 12] = struct.pack("<HII", 4, 1, 30_000)
    (folder / "bad.tiff").write_bytes(data)


def two_frames(folder: Path) -> None:
    frames = [Image.new("RGB", (4, 4), (i, 0, 0)) for i in (0, 200)]
    frames[0].save(folder / "bad.webp", save_all=True, append_images=frames[1:], lossless=True)


BAD_IMAGES: dict[str, tuple[Callable[[Path], object], str | None]] = {  # and the setting that it is about
    "text": (lambda f: (f / "bad.png").write_text("hello"), None),
    "size": (lambda f: grey(f / "bad.png", 1, (4, 5)), "size"),
    "colour": (lambda f: Image.new("RGB", (4, 4)).save(f / "bad.png"), "colour"),
    "bomb": (lambda f: bomb(f / "bad.png", 12_000), None),
    "16-bit bomb": (lambda f: bomb(f / "bad.png", 12_000, 16), None),
    "large bomb": (lambda f: bomb(f / "bad.png", 40_000), None),
    "pages": (lambda f: tiff(f, 2, 4, 4, 3, photometric="rgb"), None),
    "tiff bomb": (deep_tiff_bomb, None),
    "channels": (lambda f: tiff(f, 4, 4, 5, planarconfig="contig", photometric="minisblack"), None),
    "frames": (two_frames, None),
    "float": (lambda f: Image.fromarray(np.zeros((4, 4), np.float32)).save(f / "bad.tiff"), "range"),
}


@pytest.mark.parametrize("case", BAD_IMAGES)
def test_a_bad_image_is_named_and_can_be_skipped(tmp_path: Path, case: str) -> None:
    folder, out = good_folder(tmp_path / "in"), tmp_path / "out"
    make, key = BAD_IMAGES[case]
    make(folder)
    # Sorted first, the bad one is found before writing; sorted last, while writing.
    for name in ["zbad"] if case in ("size", "colour") else ["bad", "zbad"]:
        for file in folder.glob("*bad.*"):
            file.rename(bad := folder / f"{name}{file.suffix}")
        failing(folder, out, bad.name, key)
    report = pack(read_any(str(folder)), out / "store", PackConfig(skip_bad=True))
    assert len(report.store) == 3 and os.listdir(out) == ["store"]
    assert [*report.skipped] == [bad.name]


def failing(
    source: Path, out: Path, path: object = None, key: str | None = None, config: Any = None, **settings: Any
) -> None:
    """Packing raises an error about this path and key, and leaves nothing behind."""
    with rejected(key, path):
        pack(SourceSpec(path=str(source), **settings), out / "store", PackConfig(**config or {}))
    assert not out.exists() or os.listdir(out) == []


def test_nothing_to_pack(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/readme.txt").write_text("no images here")
    for name in ("in", "gone", "in/readme.txt"):
        failing(tmp_path / name, tmp_path / "out", name)
    for i in range(12):
        (tmp_path / f"in/{i}.png").write_text("x")
    failing(tmp_path / "in", tmp_path / "out", "in", config={"skip_bad": True})
    grey(tmp_path / "in/good.png")
    text = run("data", "pack", tmp_path / "in", "--skip-bad", "-o", tmp_path / "some")
    assert text.count("skipped: ") == 11 and "skipped: 2 more" in text
    np.save(tmp_path / "in/b.npy", np.zeros((4, 4)))
    failing(tmp_path / "in", tmp_path / "out", "in")  # of two kinds


def test_stores_are_replaced_if_that_is_asked_for(tmp_path: Path) -> None:
    folder, path, overwrite = good_folder(tmp_path / "in"), tmp_path / "store", PackConfig(overwrite=True)
    before = pack(read_any(str(folder)), path).store.fingerprint
    grey(folder / "good0.png", 200)
    (tmp_path / "other").mkdir()
    (path / "notes.txt").write_text("mine")
    for target, config in ((path, None), (path, overwrite), (tmp_path / "other", overwrite)):
        with rejected(path=target):  # not asked for; holds more than a store; is none
            pack(read_any(str(folder)), target, config)
    (path / "notes.txt").unlink()
    with rejected(path="good0.png"):  # nothing is lost by a failure
        pack(SourceSpec(path=str(folder), levels=folder / "good0.png"), path, overwrite)
    assert open_store(path).fingerprint == before
    (path / "images.npy").write_bytes(b"damaged")
    (tmp_path / "link").symlink_to(path)
    after = pack(read_any(str(folder)), tmp_path / "link", overwrite).store
    assert after.fingerprint == open_store(path).fingerprint != before
    assert sorted(os.listdir(tmp_path)) == ["in", "link", "other", "store"]


def make_zip(path: Path, names: list[str], extra: dict[str, str] | None = None) -> Path:
    grey(path.parent / "scratch.png")
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, (path.parent / "scratch.png").read_bytes())
        for name, text in (extra or {}).items():
            archive.writestr(name, text)
    return path


def test_bad_zips(tmp_path: Path) -> None:
    out, file = tmp_path / "out", tmp_path / "a.zip"
    for name in ("../evil.png", "/etc/evil.png", "a/../../evil.png", "..\\evil.png"):
        failing(make_zip(file, ["a.png", name]), out, file)
    failing(make_zip(file, [], {"a.txt": ""}), out, file)
    for labels in ({"labels": [["a.png", 0]]}, {"labels": [["a.png", 0], ["b.png", 2]]}, []):
        broken = make_zip(file, ["a.png", "b.png"], {"dataset.json": json.dumps(labels)})
        failing(broken, out, "a.zip:dataset.json")
    huge = tmp_path / "huge.zip"
    with zipfile.ZipFile(huge, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.png", bytes(2**27))
    failing(huge, out, "huge.zip:a.png")


def test_files_that_cannot_be_read_or_named_are_bad_images(tmp_path: Path) -> None:
    folder, out = good_folder(tmp_path / "in"), tmp_path / "out"
    raw = read_any(str(folder))
    (folder / "good1.png").rename(tmp_path / "good1.png")  # stands for every OSError: root may read all files
    with rejected(path="good1.png"):
        pack(raw, out / "store")
    assert [*pack(raw, tmp_path / "two", PackConfig(skip_bad=True)).skipped] == ["good1.png"]
    (tmp_path / "good1.png").rename(folder / "good1.png")
    (folder / "good0.png").rename(folder / os.fsdecode(b"caf\xe9.png"))
    failing(folder, out, r"caf\xe9.png")
    report = pack(read_any(str(folder)), out / "store", PackConfig(skip_bad=True))
    assert len(report.store) == 2 and str(*report.skipped.values()).isascii()
    (folder / os.fsdecode(b"caf\xe9.png")).unlink()
    grey(folder / os.fsdecode(b"caf\xe9") / "a.png")
    failing(folder, out / "2", r"caf\xe9", config={"skip_bad": True, "classes": True})


def test_huggingface_splits_and_empty_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=["no", "yes"])})
    columns = {"img": [Image.new("L", (4, 4)), None], "label": [1, None]}
    data = datasets.DatasetDict(train=datasets.Dataset.from_dict(columns, features))
    data.save_to_disk(tmp_path / "hf")
    with rejected("split", "hf"):
        read_any(f"hf:{tmp_path / 'hf'}:nosplit")
    failing(tmp_path / "hf", tmp_path / "out", "hf[1]")
    config = PackConfig(skip_bad=True, classes=True)
    report = pack(read_any(str(tmp_path / "hf")), tmp_path / "out" / "store", config)
    assert report.store.label.tolist() == [1] and len(report.skipped) == 1
    # A saved data set leads to no file outside it.
    grey(tmp_path / "private.png")
    columns = {"img": [str(tmp_path / "private.png")]}
    one = datasets.Dataset.from_dict(columns, datasets.Features(img=datasets.Image()))
    monkeypatch.setattr("datasets.arrow_writer.embed_table_storage", lambda table, **_: table)
    one.save_to_disk(tmp_path / "outside")
    failing(tmp_path / "outside", tmp_path / "out2", "outside[0]")


# The last is found without counting up to it.
@pytest.mark.parametrize("labels", [[0, 2, 2], [1, 1, 2], [-2, 0, 1], [0.5, 1, 2], [0, 1, 4_000_000_000]])
def test_labels_that_skip(tmp_path: Path, labels: list[float]) -> None:
    np.savez(tmp_path / "a.npz", images=np.zeros((3, 5, 5), np.uint8), label=np.array(labels))
    failing(tmp_path / "a.npz", tmp_path / "out", "a.npz")


@pytest.mark.parametrize(
    ("values", "path", "key"),
    [
        (np.zeros((3, 5, 5), np.float32), "a.npy[0]", "range"),
        (np.zeros((3, 5, 5), np.int64), "a.npy[0]", "range"),
        (np.zeros((5, 5), np.uint8), "a.npy", None),
        (np.zeros((0, 5, 5), np.uint8), "a.npy", None),
        (np.zeros((2, 0, 5), np.uint8), "a.npy", None),
        (np.zeros((3, 5, 5), np.complex64), "a.npy", None),
        (np.array([{}], dtype=object), "a.npy", None),
    ],
)
def test_bad_arrays(tmp_path: Path, values: np.ndarray, path: str, key: str | None) -> None:
    np.save(tmp_path / "a.npy", values, allow_pickle=True)
    failing(tmp_path / "a.npy", tmp_path / "out", path, key)


def test_bad_values_and_levels_of_arrays(tmp_path: Path) -> None:
    out, ones = tmp_path / "out", np.ones((5, 5), np.float32)
    np.save(tmp_path / "a.npy", np.array([0, np.nan, np.inf], np.float32)[:, None, None] * ones)
    failing(tmp_path / "a.npy", out, "a.npy[1]", range=(0, 1))
    np.save(tmp_path / "a.npy", np.array([1, 70_000], np.float32)[:, None, None] * ones)
    failing(tmp_path / "a.npy", out, "a.npy[1]", "dtype", {"dtype": "float16"}, range=(-1, 1))
    images = np.zeros((3, 5, 5), np.uint8)
    np.savez(tmp_path / "a.npz", images=images, sigma_tn=np.zeros(2))
    failing(tmp_path / "a.npz", out, "a.npz", "sigma_tn")
    np.savez(tmp_path / "a.npz", images=images, other=images)
    failing(tmp_path / "a.npz", out, "a.npz")
    np.savez(tmp_path / "a.npz", images=images, sigma_tn=np.array([0, -1.0, np.nan]))
    failing(tmp_path / "a.npz", out, "a.npz[1]")
    report = pack(read_any(str(tmp_path / "a.npz")), out / "store", PackConfig(skip_bad=True))
    assert [*report.skipped] == ["a.npz[1]", "a.npz[2]"] and len(report.store) == 1
    for shape in ((4, 6, 6), (2**31, 2**15, 2**15), (2, 5, 5)):  # more than there is, or less
        header = bytes([0, 0, 8, 3]) + struct.pack(">3I", *shape)
        (tmp_path / "a-idx3").write_bytes(header + bytes(100))
        failing(tmp_path / "a-idx3", tmp_path / "out2", "a-idx3")


GONE = "good0.png,0\ngood1.png,0.1\n"


@pytest.mark.parametrize(
    ("rows", "skipped"),
    [
        (GONE, "good2.png"),
        (GONE + "x.png,0\n", "good2.png"),  # names an image that is not there
        (GONE + "good2.png,0\ngood1.png,0.2\n", "good1.png"),
        *((f"good0.png,0\ngood1.png{wrong}\ngood2.png,0\n", "good1.png")
          for wrong in (",-0.1", ",nan", ",low", ",inf", ",1e-300", "")),
    ],
)  # fmt: skip
def test_bad_levels(tmp_path: Path, rows: str, skipped: str) -> None:
    folder, out = good_folder(tmp_path / "in"), tmp_path / "out"
    (tmp_path / "a.csv").write_text("filename,sigma\n" + rows)
    spec = SourceSpec(path=str(folder), levels=tmp_path / "a.csv", scaled=True)
    with pytest.raises(AssayError) as caught:
        pack(spec, out / "store")
    assert skipped in str(caught.value) and caught.value.cure and not (out / "store").exists()
    report = pack(spec, out / "store", PackConfig(skip_bad=True))
    assert [*report.skipped] == [skipped]
    kept = [f"good{i}.png" for i in range(3) if f"good{i}.png" != skipped]
    assert report.store.source_names(range(len(report.store))) == kept


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("a.csv", b"good0.png,0.1\n"),
        ("a.csv", b"\xff\xfe\x00x"),
        ("a.csv", b"filename,sigma,sigma\ngood0.png,0.1,0.2\n"),
        ("a.csv", b"filename,sigma,sigma_tn\ngood0.png,25,0.2\n"),
        ("a.csv", b"filename,sigma\ngood0.png,29,9\n"),  # a decimal comma
        ("a.jsonl", b'{"filename": "good0.png", "sigma": 0.1}\n{"file": 3}\n'),
        ("a.jsonl", b'{"filename": "good0.png", "probabilities": [0.1]}\n'),
        ("a.jsonl", b'{"filename": "good0.png", "sigma": 0.1, "sigma": 0.2}\n'),
        ("a.jsonl", b'{"filename": "good0.png", "sigma": true}\n'),
        ("a.csv", b"filename,sigma\nsame.png,0.1\n"),  # which of the two?
        ("gone.csv", None),
    ],
)
def test_level_files_that_cannot_be_used(tmp_path: Path, file: str, text: bytes | None) -> None:
    folder = good_folder(tmp_path / "in")
    grey(folder / "x/same.png")
    grey(folder / "y/same.png")
    if text is not None:
        (tmp_path / file).write_bytes(text)
    with pytest.raises((AssayError, FileNotFoundError)) as caught:
        pack(SourceSpec(path=str(folder), levels=tmp_path / file), tmp_path / "out/store")
    assert file in str(caught.value) and not (tmp_path / "out").exists()


def test_levels_are_in_the_units_that_their_names_say(tmp_path: Path) -> None:
    """`sigma` in those of the files; `sigma_tn`, and ambient-omni's, where black to white is 2."""
    names = ["a.png", "b.png", "c\u2028d.png"]
    rows = "a.png,25.5,,,\nb.png,,0.2,,0.5\nc\u2028d.png,0,,51,\n"
    (tmp_path / "a.csv").write_text("\ufefffilename,sigma,sigma_tn,usable_from,sigma_min\n" + rows)
    found = read_levels(tmp_path / "a.csv", names)
    scaled = [level.in_range(0, 255) for level in found if isinstance(level, Level)]
    assert np.allclose(scaled, [(0.2, 0.2), (0.2, 0.5), (0, 0.4)])
    with rejected():
        Level(50, 0.2, usable_scaled=True).in_range(0, 255)  # noise of 0.39


def test_odd_names_have_levels(tmp_path: Path) -> None:
    """Names that a spreadsheet would run stand behind an apostrophe; long ones and double spaces are kept."""
    names = ["=1.png", "a" * 250 + "/" + "b" * 100 + ".png", "c  d.png"]
    rows = "".join(f"{csv_cell(name)},0.{i}\n" for i, name in enumerate(names, 1))
    (tmp_path / "a.csv").write_text(f"filename,sigma\n{rows}")
    assert read_levels(tmp_path / "a.csv", names) == [Level(0.1), Level(0.2), Level(0.3)]


def test_what_would_change_the_noise_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.npy"
    np.save(file, np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype(np.float32))
    for key, config in {
        "fit": {"size": (4, 4), "fit": "resize"},
        "colour": {"colour": "grey"},
        "dtype": {"dtype": "uint8"},
    }.items():
        failing(file, tmp_path / "out", "a.npy[0]", key, config, range=(-1, 1), sigma=0.2)


def test_noisy_or_float_images_with_transparency_are_rejected(tmp_path: Path) -> None:
    out, folder = tmp_path / "out", tmp_path / "in"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 255, (2, 8, 8, 4), dtype=np.uint8)
    pixels[..., 3] = 255
    pixels[1, 0, 0, 3] = 254
    for i, image in enumerate(pixels):
        Image.fromarray(image).save(folder / f"{i}.png")
    failing(folder, out, "1.png", sigma=2.0)
    told = pack(read_any(str(folder)), tmp_path / "clean").warnings
    assert "2 images have a channel of opacity" in told[-1]
    for i, image in enumerate(pixels):
        tifffile.imwrite(folder / f"{i}.tiff", (image / 255).astype(np.float32), extrasamples=["unassalpha"])
        (folder / f"{i}.png").unlink()
    failing(folder, out, "1.tiff", range=(0, 4))
    spec = SourceSpec(path=str(folder), range=(0, 4))
    opaque = pack(spec, tmp_path / "opaque", PackConfig(skip_bad=True)).store
    assert opaque.image_shape == (3, 8, 8)
    expected = torch.from_numpy(pixels[0, ..., :3] / 510 - 1).permute(2, 0, 1).float()
    assert torch.allclose(opaque.read(torch.tensor([0]))[0], expected)


@pytest.mark.parametrize(
    "settings",
    [
        {"fit": "crop"}, {"size": (0, 3)}, {"size": "4x4x4"}, {"size": (2**20, 2**20)}, {"stride": 4},
        {"range": (1, 1)}, {"range": "0;1"}, {"range": (0, np.inf)}, {"sigma": -0.5}, {"sigma": np.nan},
        {"sigma": 1, "levels": Path("a.csv")},
        {"gain": 1.0}, {"black": 1.0}, {"gain": 1.0, "range": (0, 10), "black": 10},
        {"gain": 1.0, "range": (0, 10), "sigma": 3}, {"gain": 0, "range": (0, 10)},
    ],
)  # fmt: skip
def test_settings_that_make_no_sense(settings: dict[str, Any]) -> None:
    with pytest.raises(AssayError):
        if settings.keys() & PackConfig.model_fields.keys():
            PackConfig(**settings)
        else:
            SourceSpec(path="x", **settings)


def test_crops_of_small_images_and_mixed_depths(tmp_path: Path) -> None:
    folder = good_folder(tmp_path / "in")
    failing(folder, tmp_path / "out", "good0.png", "size", {"size": (5, 4), "fit": "crop"})
    Image.fromarray(np.zeros((4, 4), dtype=np.uint16)).save(folder / "z.png")
    failing(folder, tmp_path / "out", "z.png", "dtype")


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((200, 16, 16, 3), dtype=np.uint8))
    code = "import sys\nfrom assay.cli import app\napp(['data', 'pack', sys.argv[1], '-o', sys.argv[2]])"
    command = [sys.executable, "-c", code, str(tmp_path / "a.npy"), str(tmp_path / "out/store")]
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))  # noqa: E731
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit)
    assert done.returncode == 1
    assert "the disk is full" in done.stderr and "store" in done.stderr and "Traceback" not in done.stderr
    assert os.listdir(tmp_path / "out") == []


def test_a_tiff_of_which_tifffile_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As it does, without an error, where damage leaves open how the pixels are stored.
    tifffile.imwrite(tmp_path / "lost.tif", np.full((4, 4, 3), 7, np.uint16), photometric="rgb")
    monkeypatch.setattr(tifffile.TiffPage, "asarray", lambda page: np.empty(0, np.uint16))
    with rejected(path="lost.tif"):
        pack(read_any(str(tmp_path)), tmp_path / "store")
