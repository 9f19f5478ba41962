"""Bad input: an error that names the file and the cure, and no half-written store left behind."""

import json
import os
import resource
import signal
import struct
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from assay.data import open_store
from assay.data.levels import read_annotations
from assay.data.pack import Conversion, PackReport, pack
from assay.data.readers import read_any
from assay.files import csv_cell, sha256


def grey(path: Path, value: int = 100, size: tuple[int, int] = (4, 4)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", size[::-1], value).save(path)


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


def truncated_png(folder: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (4, 4), dtype=np.uint8)
    Image.fromarray(noise).save(folder / "bad.png")
    (folder / "bad.png").write_bytes((folder / "bad.png").read_bytes()[:-30])


def truncated_deep_png(folder: Path) -> None:
    bomb(folder / "bad.png", 5, depth=16)


def truncated_tiff(folder: Path) -> None:
    import tifffile

    tifffile.imwrite(folder / "bad.tiff", np.zeros((4, 4, 3), dtype=np.uint16))
    (folder / "bad.tiff").write_bytes((folder / "bad.tiff").read_bytes()[:60])


def two_pages(folder: Path) -> None:
    import tifffile

    tifffile.imwrite(folder / "bad.tiff", np.zeros((2, 4, 4, 3), dtype=np.uint16), photometric="rgb")


def deep_tiff_bomb(folder: Path) -> None:
    """Float colour, which only tifffile reads, with a width of 2^30 written into its header."""
    import tifffile

    tifffile.imwrite(folder / "bad.tiff", np.zeros((4, 4, 3), dtype=np.float32), photometric="rgb")
    data = bytearray((folder / "bad.tiff").read_bytes())
    (start,) = struct.unpack("<I", data[4:8])
    for entry in range(start + 2, len(data), 12):
        (tag,) = struct.unpack("<H", data[entry : entry + 2])
        if tag in (256, 257):
            data[entry + 2 : entry + 12] = struct.pack("<HII", 4, 1, 30_000)
            if tag == 257:
                break
    (folder / "bad.tiff").write_bytes(data)


def five_channels(folder: Path) -> None:
    import tifffile

    tifffile.imwrite(
        folder / "bad.tiff",
        np.zeros((4, 4, 5), dtype=np.uint16),
        planarconfig="contig",
        photometric="minisblack",
    )


def two_frames(folder: Path) -> None:
    frames = [Image.new("RGB", (4, 4), (i, 0, 0)) for i in (0, 200)]
    frames[0].save(folder / "bad.webp", save_all=True, append_images=frames[1:], lossless=True)


def float_tiff(folder: Path) -> None:
    Image.fromarray(np.zeros((4, 4), dtype=np.float32)).save(folder / "bad.tiff")


BAD_IMAGES: list[tuple[str, Callable[[Path], object], str]] = [
    ("truncated", truncated_png, r"bad\.png cannot be read \(.*get it again"),
    ("truncated 16-bit", truncated_deep_png, r"bad\.png cannot be read \(.*get it again"),
    ("truncated tiff", truncated_tiff, r"bad\.tiff (is damaged|cannot be read).*(get|save) it"),
    ("text", lambda f: (f / "bad.png").write_text("hello"), r"bad\.png is not an image.*remove it"),
    ("empty", lambda f: (f / "bad.png").write_bytes(b""), r"bad\.png is not an image.*remove it"),
    ("size", lambda f: grey(f / "bad.png", 1, (4, 5)), r"bad\.png has 4 x 5 pixels, not 4 x 4: give `size`"),
    ("colour", lambda f: Image.new("RGB", (4, 4)).save(f / "bad.png"), r"bad\.png is in colour.*`colour`"),
    ("bomb", lambda f: bomb(f / "bad.png", 12_000), r"bad\.png unpacks to too many pixels.*smaller first"),
    ("16-bit bomb", lambda f: bomb(f / "bad.png", 12_000, 16), r"bad\.png unpacks to too many pixels.*smaller"),
    (
        "large bomb",
        lambda f: bomb(f / "bad.png", 40_000),
        r"bad\.png unpacks to too many pixels.*smaller first",
    ),
    (
        "pages",
        two_pages,
        r"bad\.tiff holds 2 pictures: save them as one file each; `skip_bad`",
    ),
    (
        "tiff bomb",
        deep_tiff_bomb,
        r"bad\.tiff unpacks (to too many|from \d+ to \d+ bytes)",
    ),
    ("channels", five_channels, r"bad\.tiff has the axes"),
    ("frames", two_frames, r"bad\.webp holds 2 pictures: save them as one file each"),
    (
        "float",
        float_tiff,
        r"bad\.tiff has float32 pixels: .* black and white with `value_range`",
    ),
]


@pytest.mark.parametrize(
    ("make", "message"), [case[1:] for case in BAD_IMAGES], ids=[case[0] for case in BAD_IMAGES]
)
def test_a_bad_image_is_named_and_can_be_skipped(
    tmp_path: Path, make: Callable[[Path], object], message: str
) -> None:
    folder, out = good_folder(tmp_path / "in"), tmp_path / "out"
    make(folder)
    # Sorted first, the bad one is found before writing; sorted last, while writing.
    first_decides = "not 4 x 4" in message or "in colour" in message
    for name in ["zbad"] if first_decides else ["bad", "zbad"]:
        for file in folder.glob("*bad.*"):
            file.rename(folder / f"{name}{file.suffix}")
        failing(folder, out, message)
    report = pack(read_any(str(folder)), out / "store", skip_bad=True)
    assert len(report.store) == 3 and os.listdir(out) == ["store"]
    assert [problem.name.startswith("zbad") for problem in report.skipped] == [True]


def failing(source: Path, out: Path, message: str, **options: object) -> None:
    """Packing raises with this message and leaves nothing behind."""
    with pytest.raises((ValueError, OSError), match=message):
        pack(read_any(str(source)), out / "store", **options)  # type: ignore[arg-type]
    assert not out.exists() or os.listdir(out) == []


def test_nothing_to_pack(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/readme.txt").write_text("no images here")
    failing(tmp_path / "in", tmp_path / "out", "in holds no images .*check the path")
    failing(tmp_path / "gone", tmp_path / "out", "gone does not exist: give a folder")
    failing(tmp_path / "in/readme.txt", tmp_path / "out", "none of the formats Assay reads")
    (tmp_path / "in/a.png").write_text("x")
    failing(
        tmp_path / "in",
        tmp_path / "out",
        "none of its 1 images can be packed: .*a.png is not an",
        skip_bad=True,
    )


def test_existing_stores_are_not_replaced(tmp_path: Path) -> None:
    folder = good_folder(tmp_path / "in")
    before = pack(read_any(str(folder)), tmp_path / "store").store
    with pytest.raises(FileExistsError, match="store exists already"):
        pack(read_any(str(folder)), tmp_path / "store")
    assert open_store(tmp_path / "store").fingerprint == before.fingerprint


def make_zip(path: Path, names: list[str], extra: dict[str, str] | None = None) -> Path:
    grey(path.parent / "scratch.png")
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, (path.parent / "scratch.png").read_bytes())
        for name, text in (extra or {}).items():
            archive.writestr(name, text)
    return path


def test_bad_zips(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for name in ("../evil.png", "/etc/evil.png", "a/../../evil.png", "..\\evil.png"):
        failing(
            make_zip(tmp_path / "a.zip", ["a.png", name]),
            out,
            r"a\.zip has a member .*evil.*a source you trust",
        )
    failing(make_zip(tmp_path / "a.zip", [], {"a.txt": ""}), out, r"a\.zip holds no images")
    labels = json.dumps({"labels": [["a.png", 0]]})
    failing(
        make_zip(tmp_path / "a.zip", ["a.png", "b.png"], {"dataset.json": labels}),
        out,
        r"no label for b\.png .*add",
    )
    labels = json.dumps({"labels": [["a.png", 0], ["b.png", 2]]})
    failing(
        make_zip(tmp_path / "a.zip", ["a.png", "b.png"], {"dataset.json": labels}),
        out,
        "labels skip 1: number the",
    )
    failing(
        make_zip(tmp_path / "a.zip", ["a.png"], {"dataset.json": "[]"}),
        out,
        r"dataset\.json cannot be read \(.*write it as EDM does",
    )
    damaged = make_zip(tmp_path / "a.zip", ["a.png"])
    data = bytearray(damaged.read_bytes())
    data[50] ^= 255
    damaged.write_bytes(data)
    failing(damaged, out, r"a\.zip:a\.png (cannot be read|is not an image)")
    huge = tmp_path / "huge.zip"
    with (
        zipfile.ZipFile(huge, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("a.png", "w", force_zip64=True) as file,
    ):
        for _ in range(513):
            file.write(bytes(2**20))
    failing(huge, out, r"huge\.zip:a\.png unpacks from \d+ to \d+ bytes, as decompression bombs do")


def test_damaged_zips_are_named(tmp_path: Path) -> None:
    labels = json.dumps({"labels": [["a.png", 0]]})
    whole = make_zip(tmp_path / "a.zip", ["a.png"], {"dataset.json": labels}).read_bytes()
    (tmp_path / "a.zip").write_bytes(whole.replace(b'"labels"', b'"lapels"'))
    failing(tmp_path / "a.zip", tmp_path / "out", r"a\.zip:dataset\.json cannot be read \(Bad CRC.*again")
    (tmp_path / "a.zip").write_bytes(whole.replace(b"PK\x01\x02", b"PK\xff\xff"))
    failing(tmp_path / "a.zip", tmp_path / "out", r"a\.zip cannot be read \(.*\): copy or make the zip again")


def test_files_that_cannot_be_read_are_bad_images(tmp_path: Path) -> None:
    folder, out = good_folder(tmp_path / "in"), tmp_path / "out"
    raw = read_any(str(folder))
    (folder / "good1.png").unlink()  # stands for every OSError: the tests may run as root, who may read all
    with pytest.raises(
        ValueError, match=r"good1\.png cannot be read \(No such file .*make it readable; `skip_bad`"
    ):
        pack(raw, out / "store")
    report = pack(raw, out / "store", skip_bad=True)
    assert len(report.store) == 2 and [problem.name for problem in report.skipped] == ["good1.png"]


def test_names_that_are_not_utf_8(tmp_path: Path) -> None:
    folder, out = good_folder(tmp_path / "in"), tmp_path / "out"
    (folder / "good0.png").rename(folder / os.fsdecode(b"caf\xe9.png"))
    failing(folder, out, r"caf\\xe9\.png has a name that is not UTF-8: rename it; `skip_bad`")
    report = pack(read_any(str(folder)), out / "store", skip_bad=True)
    assert len(report.store) == 2 and report.skipped[0].reason.isascii()
    (folder / os.fsdecode(b"caf\xe9.png")).unlink()
    grey(folder / os.fsdecode(b"caf\xe9") / "a.png")
    failing(folder, out / "2", r"caf\\xe9: the name of this folder is not UTF-8: rename it", skip_bad=True)


def test_huggingface_splits_and_empty_cells(tmp_path: Path) -> None:
    import datasets

    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=["no", "yes"])})
    columns = {"img": [Image.new("L", (4, 4)), None], "label": [1, None]}
    data = datasets.DatasetDict(train=datasets.Dataset.from_dict(columns, features))
    data.save_to_disk(tmp_path / "hf")
    with pytest.raises(ValueError, match=r"hf has no split 'nosplit': name one of train as hf:.*:SPLIT"):
        read_any(f"hf:{tmp_path / 'hf'}:nosplit")
    failing(tmp_path / "hf", tmp_path / "out", r"hf\[1\] has no image in its column img: remove the row")
    report = pack(read_any(str(tmp_path / "hf")), tmp_path / "out" / "store", skip_bad=True)
    assert report.store.label.tolist() == [1] and len(report.skipped) == 1


def test_a_saved_data_set_leads_to_no_file_outside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    grey(tmp_path / "private.png")
    features = datasets.Features({"img": datasets.Image()})
    data = datasets.Dataset.from_dict({"img": [str(tmp_path / "private.png")]}, features)
    monkeypatch.setattr("datasets.arrow_writer.embed_table_storage", lambda table, **_: table)
    data.save_to_disk(tmp_path / "hf")
    failing(tmp_path / "hf", tmp_path / "out", r"hf\[0\] is a file outside it.*save the data set")


def test_labels_that_skip(tmp_path: Path) -> None:
    cases = [([0, 2, 2], "skip 1"), ([1, 1, 2], "skip 0"), ([-2, 0, 1], "go down to -2")]
    cases += [([0, 1, 4_000_000_000], "skip 2")]  # found without counting up to it
    for labels, message in cases:
        np.savez(tmp_path / "a.npz", images=np.zeros((3, 5, 5), np.uint8), label=np.array(labels))
        failing(
            tmp_path / "a.npz", tmp_path / "out", rf"a\.npz:label: labels {message}: number the classes 0 \.\. "
        )


def test_bad_arrays(tmp_path: Path) -> None:
    out = tmp_path / "out"
    np.save(tmp_path / "a.npy", np.zeros((3, 5, 5), dtype=np.float32))
    failing(tmp_path / "a.npy", out, r"a\.npy\[0\] has float32 pixels: .*`value_range`")
    np.save(
        tmp_path / "a.npy", np.array([0, np.nan, np.inf], dtype=np.float32)[:, None, None] * np.ones((5, 5))
    )
    options = Conversion(value_range=(0, 1))
    failing(tmp_path / "a.npy", out, r"a\.npy\[1\] has pixels that are NaN or infinite", conversion=options)
    np.save(tmp_path / "a.npy", np.zeros((3, 5, 5, 7), dtype=np.uint8))
    failing(tmp_path / "a.npy", out, r"a\.npy has shape \(3, 5, 5, 7\): give layout = ")
    np.save(tmp_path / "a.npy", np.array([{}], dtype=object), allow_pickle=True)
    failing(tmp_path / "a.npy", out, r"a\.npy cannot be read \(it holds object .*plain array")
    np.savez(tmp_path / "a.npz", images=np.zeros((3, 5, 5), np.uint8), sigma_tn=np.zeros(2))
    failing(tmp_path / "a.npz", out, r"sigma_tn is float64 of shape \(2,\); expected numbers \(3,\)")
    np.savez(tmp_path / "a.npz", images=np.zeros((3, 5, 5), np.uint8), sigma_tn=np.array([0, -1.0, np.nan]))
    failing(tmp_path / "a.npz", out, r"a\.npz\[1\]: sigma_tn = -1\.0: a noise level is a finite number >= 0")
    report = pack(read_any(str(tmp_path / "a.npz")), out / "store", skip_bad=True)
    assert [problem.name for problem in report.skipped] == ["a.npz[1]", "a.npz[2]"] and len(report.store) == 1


def test_bad_idx(tmp_path: Path) -> None:
    header = bytes([0, 0, 8, 3]) + struct.pack(">3I", 4, 6, 6)
    (tmp_path / "a-idx3").write_bytes(header + bytes(100))
    failing(
        tmp_path / "a-idx3",
        tmp_path / "out",
        r"a-idx3 cannot be read \(it ends after 116 bytes, 160 are expected\): get it again",
    )
    (tmp_path / "a-idx3").write_bytes(bytes([0, 0, 8, 3]) + struct.pack(">3I", 2**31, 2**15, 2**15))
    failing(tmp_path / "a-idx3", tmp_path / "out", r"a-idx3 unpacks from 16 to \d+ bytes")


ANNOTATIONS = [
    (
        "missing",
        "good0.png,0\ngood1.png,0.1\n",
        r"a\.csv has no sigma for good2\.png: add a line",
        ["good2.png"],
    ),
    (
        "double",
        "good0.png,0\ngood1.png,0.1\ngood2.png,0\ngood1.png,0.2\n",
        r"a\.csv line 5: good1\.png is annotated twice: keep one line",
        ["good1.png"],
    ),
    (
        "negative",
        "good0.png,0\ngood1.png,-0.1\ngood2.png,0\n",
        r"line 3: good1\.png: sigma = -0\.1",
        ["good1.png"],
    ),
    ("nan", "good0.png,0\ngood1.png,nan\ngood2.png,0\n", r"line 3: good1\.png: sigma = nan", ["good1.png"]),
    (
        "word",
        "good0.png,0\ngood1.png,low\ngood2.png,0\n",
        r"line 3: good1\.png: sigma = 'low': write a finite number >= 0",
        ["good1.png"],
    ),
    (
        "infinite",
        "good0.png,0\ngood1.png,inf\ngood2.png,0\n",
        r"line 3: good1\.png: sigma = inf",
        ["good1.png"],
    ),
    ("no cell", "good0.png,0\ngood1.png\ngood2.png,0\n", r"good1\.png has no sigma", ["good1.png"]),
    (
        "stranger",
        "good0.png,0\ngood1.png,0\ngood2.png,0\nx.png,0\n",
        r"line 5: x\.png: no such image: names are relative to the source; correct it, or remove the line",
        ["x.png"],
    ),
]


@pytest.mark.parametrize(
    ("rows", "message", "skipped"), [a[1:] for a in ANNOTATIONS], ids=[a[0] for a in ANNOTATIONS]
)
def test_bad_annotations(tmp_path: Path, rows: str, message: str, skipped: list[str]) -> None:
    folder, out = good_folder(tmp_path / "in"), tmp_path / "out"
    (tmp_path / "a.csv").write_text("filename,sigma\n" + rows)
    failing(folder, out, message, sigma=tmp_path / "a.csv")
    report = pack(read_any(str(folder)), out / "store", sigma=tmp_path / "a.csv", skip_bad=True, units="scaled")
    assert [problem.name for problem in report.skipped] == skipped
    assert report.store.source_names(range(len(report.store))) == [
        f"good{i}.png" for i in range(3) if f"good{i}.png" not in skipped
    ]


def test_annotation_files_that_cannot_be_read(tmp_path: Path) -> None:
    folder, out = good_folder(tmp_path / "in"), tmp_path / "out"
    (tmp_path / "a.csv").write_text("good0.png,0.1\n")
    failing(folder, out, r"a\.csv has the columns .*expected filename and sigma", sigma=tmp_path / "a.csv")
    (tmp_path / "a.csv").write_bytes(b"\xff\xfe\x00x")
    failing(folder, out, r"a\.csv is not UTF-8 text", sigma=tmp_path / "a.csv")
    (tmp_path / "a.jsonl").write_text('{"filename": "good0.png", "sigma": 0.1}\n{"file": 3}\n')
    failing(folder, out, r"a\.jsonl line 2: expected", sigma=tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_text('{"filename": "good0.png", "probabilities": [0.1]}\n')
    failing(folder, out, r"good0\.png has no sigma; expected one of the keys", sigma=tmp_path / "a.jsonl")
    lines = [f'{{"filename": "good{i}.png", "sigma": 50, "sigma_min": 0.2}}' for i in range(3)]
    (tmp_path / "b.jsonl").write_text("\n".join(lines))  # sigma_min is in units of images from -1 to 1
    failing(folder, out, r"good0\.png: .* not below its noise", sigma=tmp_path / "b.jsonl")
    failing(folder, out, r"gone\.csv", sigma=tmp_path / "gone.csv")
    grey(folder / "x/same.png")
    grey(folder / "y/same.png")
    (tmp_path / "a.csv").write_text("filename,sigma\nsame.png,0.1\n")
    failing(
        folder, out, r"same\.png: 2 images have this name: write their folders too", sigma=tmp_path / "a.csv"
    )
    for sigma in (-0.5, float("nan"), float("inf")):
        failing(folder, out, "sigma = .*: a noise level is a finite number >= 0", sigma=sigma)


def test_odd_names_are_annotated(tmp_path: Path) -> None:
    """Names that a spreadsheet would run stand behind an apostrophe; long ones and double spaces are kept."""
    names = ["=1.png", "a" * 250 + "/" + "b" * 100 + ".png", "c  d.png"]
    rows = "".join(f"{csv_cell(name)},0.{i}\n" for i, name in enumerate(names, 1))
    (tmp_path / "a.csv").write_text(f"filename,sigma\n{rows}")
    levels, problems = read_annotations(tmp_path / "a.csv", names)
    assert not problems and [levels[i].sigma_tn for i in range(3)] == [0.1, 0.2, 0.3]


def test_what_would_change_the_noise_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    np.save(tmp_path / "a.npy", np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype(np.float32))

    def refused(message: str, **options: object) -> None:
        conversion = Conversion(value_range=(-1, 1), **options)  # type: ignore[arg-type]
        failing(tmp_path / "a.npy", out, message, conversion=conversion, sigma=0.2)

    refused("noisy, and resizing would change its noise: use fit = crop", size=(4, 4), fit="resize")
    refused("noisy, and making it grey would change its noise", colour="grey")
    refused("noisy, and 8 bits would round and clip its noise: use dtype = float32", dtype="uint8")


def test_noisy_or_float_images_with_transparency_are_rejected(tmp_path: Path) -> None:
    out, folder = tmp_path / "out", tmp_path / "in"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 255, (2, 8, 8, 4), dtype=np.uint8)
    pixels[..., 3] = 255
    pixels[1, 0, 0, 3] = 254
    for i, image in enumerate(pixels):
        Image.fromarray(image).save(folder / f"{i}.png")
    failing(folder, out, r"1\.png is noisy, and flattening its transparency would", sigma=2.0)
    assert len(pack(read_any(str(folder)), tmp_path / "clean").store) == 2
    for i, image in enumerate(pixels):
        tifffile.imwrite(folder / f"{i}.tiff", (image / 255).astype(np.float32), extrasamples=["unassalpha"])
        (folder / f"{i}.png").unlink()
    options = Conversion(value_range=(0, 4))
    message = (
        r"1\.tiff is transparent and has float32 pixels, whose white is not known: save it without opacity"
    )
    failing(folder, out, message, conversion=options)
    opaque = pack(read_any(str(folder)), tmp_path / "opaque", options, skip_bad=True).store
    assert opaque.image_shape == (3, 8, 8)
    expected = torch.from_numpy(pixels[0, ..., :3] / 510 - 1).permute(2, 0, 1).float()
    assert torch.allclose(opaque.read(torch.tensor([0]))[0], expected)


def test_values_too_large_for_the_dtype_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([1, 70_000], np.float32)[:, None, None] * np.ones((5, 5), np.float32))
    options = Conversion(value_range=(-1, 1), dtype="float16")
    message = r"a\.npy\[1\] has values up to 7e\+04 .*, too large for float16: check `value_range`, or"
    failing(tmp_path / "a.npy", tmp_path / "out", message, conversion=options)


def test_conversions_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="needs a size"):
        Conversion(fit="crop")
    with pytest.raises(ValueError, match="at least one pixel"):
        Conversion(size=(0, 3))
    with pytest.raises(ValueError, match="black must be below white"):
        Conversion(value_range=(1, 1))


def test_crop_of_a_small_image(tmp_path: Path) -> None:
    failing(
        good_folder(tmp_path / "in"),
        tmp_path / "out",
        r"good0\.png has 4 x 4 pixels: too small",
        conversion=Conversion(size=(5, 4), fit="crop"),
    )


def test_mixed_depths_ask_for_a_dtype(tmp_path: Path) -> None:
    folder = good_folder(tmp_path / "in")
    Image.fromarray(np.zeros((4, 4), dtype=np.uint16)).save(folder / "z.png")
    failing(folder, tmp_path / "out", r"z\.png is not 8-bit like those before it.*dtype = float32")


def test_noisy_8_bit_files_warn(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for i in range(3):  # a third of the pixels are black
        pixels = np.random.default_rng(i).integers(1, 255, (6, 6), dtype=np.uint8)
        pixels[::3] = 0
        Image.fromarray(pixels).save(folder / f"{i}.png")
    report = pack(read_any(str(folder)), tmp_path / "store", sigma=0.1, units="scaled")
    (warning,) = report.warnings
    assert warning.startswith("3 noisy images come from 8-bit files: rounding") and "(33.3% of their" in warning
    report = pack(
        read_any(str(folder)),
        tmp_path / "cropped",
        Conversion(size=(3, 2), fit="crop"),
        sigma=0.1,
        units="scaled",
    )
    assert "(33.3% of their" in report.warnings[0]  # of what is stored, not of what was cut off


def child(code: str, *arguments: Path, limit: int | None = None) -> subprocess.Popen[str]:
    def set_limit() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=set_limit
    )


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((200, 16, 16, 3), dtype=np.uint8))
    code = "import sys\nfrom assay.cli import app\napp(['data', 'pack', sys.argv[1], '-o', sys.argv[2]])"
    process = child(code, tmp_path / "a.npy", tmp_path / "out" / "store", limit=50_000)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "the disk is full" in error and "store" in error and "free some space" in error
    assert "Traceback" not in error
    assert os.listdir(tmp_path / "out") == []


SLOW_PACK = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # also if the tests run in the background of a shell
from pathlib import Path
from assay.data.pack import pack
from assay.data.readers import read_any
def dawdle(done, total):
    print(done, flush=True)
    time.sleep(1 if done > 2 else 0)
pack(read_any(sys.argv[1]), Path(sys.argv[2]), progress=dawdle)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_pack_starts_clean(tmp_path: Path, how: signal.Signals) -> None:
    np.save(tmp_path / "a.npy", np.random.default_rng(0).integers(0, 256, (9, 8, 8), dtype=np.uint8))
    process = child(SLOW_PACK, tmp_path / "a.npy", tmp_path / "out" / "store")
    assert process.stdout is not None
    while process.stdout.readline().strip() != "3":  # some images are written, some are not
        assert process.poll() is None
    process.send_signal(how)
    process.communicate(timeout=60)
    assert not (tmp_path / "out" / "store").exists()
    if how == signal.SIGINT:
        assert os.listdir(tmp_path / "out") == []
    else:
        assert len(os.listdir(tmp_path / "out")) == 2  # the leftovers of a process that had no last word
    report: PackReport = pack(read_any(str(tmp_path / "a.npy")), tmp_path / "out" / "store")
    assert os.listdir(tmp_path / "out") == ["store"]
    report.store.verify()
    whole = pack(read_any(str(tmp_path / "a.npy")), tmp_path / "whole").store
    assert sha256(whole.path / "images.npy") == sha256(report.store.path / "images.npy")


def test_a_tiff_of_which_tifffile_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As it does, without an error, where damage leaves open how the pixels are stored.
    tifffile.imwrite(tmp_path / "lost.tif", np.full((4, 4, 3), 7, np.uint16), photometric="rgb")
    monkeypatch.setattr(tifffile.TiffPage, "asarray", lambda page: np.empty(0, np.uint16))
    with pytest.raises(ValueError, match=r"lost\.tif has pixels of shape \(0,\): save it"):
        pack(read_any(str(tmp_path)), tmp_path / "store")
