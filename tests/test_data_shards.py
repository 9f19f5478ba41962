"""Stores of several shards and stores elsewhere give the images of a plain one, in little memory."""

import shutil
import subprocess
import sys
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from assay.cli import app
from assay.data import Loader, Store, open_store, simulate
from assay.data.pack import Conversion, PackSource, pack, pack_shards
from assay.data.readers import cut_patches, read_any
from assay.data.shards import address_of
from assay.data.store import PackedImage, hash_of, write_store


def arrays(folder: Path, num_images: int = 23, side: int = 8) -> Path:
    images = np.random.default_rng(0).integers(0, 256, (num_images, side, side), dtype=np.uint8)
    np.save(folder / "images.npy", images)
    (folder / "levels.csv").write_text(
        "filename,sigma\n" + "".join(f"{i},{0.5 * (i % 3)}\n" for i in range(num_images))
    )
    return folder / "images.npy"


def assert_same(found: Store, expected: Store) -> None:
    assert len(found) == len(expected) and found.meta.num_clean == expected.meta.num_clean
    for name in ("sigma_tn", "label", "usable_from"):
        assert torch.equal(getattr(found, name), getattr(expected, name))
    index = torch.tensor([5, 0, 22, -1, 5, 7, 15, -23])
    assert torch.equal(found.read(index), expected.read(index))
    assert found.source_names(index.tolist()) == expected.source_names(index.tolist())
    assert found.physical_range == expected.physical_range
    found.verify()
    # An epoch's order and noise depend on the seed and the step alone.
    ours, theirs = (Loader(simulate(s, 0.5, 0.7), 4, seed=3).batch(11) for s in (found, expected))
    assert torch.equal(ours.index, theirs.index) and torch.equal(ours.x_tn, theirs.x_tn)


def run(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done.output


def test_shards_hold_the_images_of_a_plain_store_and_packing_resumes(tmp_path: Path) -> None:
    source, path = arrays(tmp_path), tmp_path / "store"
    plain = pack(read_any(str(source)), tmp_path / "plain").store
    command = "data", "pack", source, "-o", path, "--shards"
    run(*command, "2/3")
    run(*command, "3/3")
    with pytest.raises(FileNotFoundError, match="lacks shards: run the same"):
        open_store(path)
    made = {file: file.stat().st_mtime_ns for file in path.rglob("images.npy")}
    assert len(made) == 2
    run(*command, "3")  # makes what is missing
    assert made.items() <= {file: file.stat().st_mtime_ns for file in path.rglob("images.npy")}.items()
    assert_same(open_store(path), plain)
    assert "23 " in run("data", "show", path)

    for changed, message in (
        ((*command, "3"), "complete"),
        ((*command, "3", "--sigma", "1"), "complete"),
        ((*command, "x/3"), "complete"),
    ):
        done = CliRunner().invoke(app, [str(word) for word in changed])
        assert done.exit_code == 1 and message in done.output
    (path / "shards.json").unlink()
    for changed, message in (
        ((*command, "4"), "another number of shards"),
        ((*command, "3", "--colour", "colour"), "other images or settings"),
        ((*command, "4/3"), "give a part of at most"),
        ((*command, "x/3"), "expected a number such as 64"),
    ):
        done = CliRunner().invoke(app, [str(word) for word in changed])
        assert done.exit_code == 1 and message in " ".join(done.output.split())


def test_shards_of_other_operators_and_maps_are_not_mixed(tmp_path: Path) -> None:
    source = arrays(tmp_path, 6)
    for number in (1, 2):
        np.save(tmp_path / f"psf{number}.npy", np.full((1, 2 * number + 1), 1 / (2 * number + 1)))
        np.save(tmp_path / f"mask{number}.npy", np.arange(64).reshape(8, 8) % 5 < number)
        np.save(tmp_path / f"levels{number}.npy", np.arange(64.0).reshape(8, 8) + number)
    changes = [
        ("--sigma 9 --kernel psf{}.npy", 1, 2),
        ("--sigma 9 --kspace mask{}.npy --dtype float32", 1, 2),
        ("--sigma 9 --downsampled {}", 2, 3),
        ("--sigma-map levels{}.npy", 1, 2),
        ("--sigma-map levels1.npy --map-quantile {}", 0.5, 0.75),
    ]
    for number, (options, *values) in enumerate(changes):
        asked = [[*options.format(value).split()] for value in values]
        mine = [[str(tmp_path / w) if w.endswith(".npy") else w for w in words] for words in asked]
        command = "data", "pack", source, "-o", tmp_path / f"store{number}"
        run(*command, *mine[0], "--shards", "1/2")
        done = CliRunner().invoke(app, [*map(str, command), *mine[1], "--shards", "2/2"])
        assert done.exit_code == 1 and "shards of other images or settings" in done.output
        run(*command, *mine[0], "--shards", "2/2")


def test_shards_without_operators_resume_what_was_packed_before(tmp_path: Path) -> None:
    """The record of a shard as it was before images could have operators."""
    pack_shards([PackSource(read_any(str(arrays(tmp_path, 6))), 0.5, (0, 255))], tmp_path / "s", 2, only=1)
    found = (tmp_path / "s/shard-00001-of-00002.json").read_text()
    expected = hash_of([f"images.npy[{i}]" for i in range(6)], "None", ["(0.5, (0, 255), 'files')"])
    assert found == expected


def test_images_read_from_files_are_those_of_the_mapping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, float32 = read_any(str(arrays(tmp_path))), Conversion(dtype="float32")
    plain = pack(source, tmp_path / "plain").store
    sharp = pack(source, tmp_path / "sharp", float32).store
    pack_shards([PackSource(source)], tmp_path / "store", 3)
    pack_shards([PackSource(source)], tmp_path / "floats", 2, conversion=float32)
    monkeypatch.setattr("assay.data.blocks._MAX_MAPPED_BYTES", 0)
    for name, expected in {"plain": plain, "store": plain, "sharp": sharp, "floats": sharp}.items():
        assert_same(open_store(tmp_path / name), expected)
    opened = open_store(tmp_path / "sharp")
    opened.read(torch.arange(23))
    with open(tmp_path / "sharp/images.npy", "r+b") as file:
        file.truncate(300)
    with pytest.raises(ValueError, match="has changed since it was packed"):
        opened.read(torch.arange(23))
    with pytest.raises(ValueError, match="shorter"):
        opened.rows.read(np.arange(23))


def test_patches_of_a_picture_stay_in_one_shard(tmp_path: Path) -> None:
    patches = cut_patches(read_any(str(arrays(tmp_path, 5, 16))), (8, 8), 8)  # four of each picture
    sources = [PackSource(patches)]
    pack_shards(sources, tmp_path / "store", 3)
    found = open_store(tmp_path / "store")
    assert found.group is not None
    assert found.group.unique(return_counts=True)[1].tolist() == [4] * 5
    assert torch.equal(
        found.read(torch.arange(20)), pack(sources, tmp_path / "plain").store.read(torch.arange(20))
    )
    with pytest.raises(ValueError, match="more than the pictures"):
        pack_shards(sources, tmp_path / "many", 18)


def test_damaged_and_unlike_shards_are_noticed(tmp_path: Path) -> None:
    pack_shards([PackSource(read_any(str(arrays(tmp_path))))], tmp_path / "store", 2)
    images = tmp_path / "store/shard-00002-of-00002/images.npy"
    opened = open_store(tmp_path / "store")
    opened.read(torch.arange(23))
    content = bytearray(images.read_bytes())
    content[-1] ^= 1
    images.write_bytes(content)
    with pytest.raises(ValueError, match=r"images\.npy has changed since it was packed"):
        opened.read(torch.tensor([22]))  # although it was compared before
    with pytest.raises(ValueError, match=r"images\.npy has changed since it was packed"):
        open_store(tmp_path / "store").read(torch.tensor([22]))
    meta = tmp_path / "store/shard-00001-of-00002/meta.json"
    meta.write_text(meta.read_text() + " ")
    with pytest.raises(ValueError, match="not the shard that was packed"):
        open_store(tmp_path / "store")


def large(path: Path, num_images: int = 3000) -> Store:
    """Images of 768 bytes, so that a block of 64 KiB has 85 of them."""
    generator = np.random.default_rng(1)
    images = (
        PackedImage(str(i), generator.integers(0, 256, (3, 16, 16), dtype=np.uint8), 0.0, -1)
        for i in range(num_images)
    )
    return write_store(path, "large", images, (3, 16, 16), "uint8", (0, 255), ())


@pytest.mark.parametrize("protocol", ["memory", "file"])
def test_a_store_elsewhere_is_copied_as_it_is_read(
    protocol: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    plain = large(tmp_path / "origin")
    address = f"memory://{tmp_path.name}/large" if protocol == "memory" else f"file://{tmp_path}/origin"
    files, root = fsspec.core.url_to_fs(address)
    if protocol == "memory":
        files.put(str(tmp_path / "origin"), root, recursive=True)
    found = open_store(Path(address))  # as a config file gives it, with a slash less
    copy = next((tmp_path / "cache").rglob("images.npy"))
    few = torch.tensor([2999, 0, 1500])
    assert torch.equal(found.read(few), plain.read(few))
    assert copy.stat().st_size == (tmp_path / "origin/images.npy").stat().st_size
    assert copy.stat().st_blocks * 512 <= 5 * 2**16  # of 36 blocks
    every = torch.randperm(3000, generator=torch.Generator().manual_seed(0))
    expected = plain.read(every)
    assert torch.equal(found.read(every), expected) and found.fingerprint == plain.fingerprint
    assert copy.read_bytes() == (tmp_path / "origin/images.npy").read_bytes()

    files.rm(f"{root}/images.npy")  # what is here needs no origin
    files.pipe(f"{root}/images.npy", bytes(copy.stat().st_size))
    assert torch.equal(open_store(address).read(every), expected)
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(ValueError):
        open_store(address).read(every)
    with pytest.raises(FileNotFoundError, match="is not a store: it has neither"):
        open_store(address + "-not")


def test_shards_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    pack_shards([PackSource(read_any(str(arrays(tmp_path))))], tmp_path / "store", 3)
    plain = pack(read_any(str(tmp_path / "images.npy")), tmp_path / "plain").store
    assert_same(open_store(f"file://{tmp_path}/store"), plain)


def test_addresses_and_folders_are_told_apart() -> None:
    for given, expected in {
        "s3:/bucket/a": "s3://bucket/a",
        "s3://bucket/a": "s3://bucket/a",
        "file:/data/a": "file:///data/a",
        "stores/digits": None,
        "/data/a": None,
        "C:/stores": None,
        "hf:me/model": None,
    }.items():
        assert address_of(Path(given)) == expected


def test_reading_a_large_file_keeps_little_of_it_in_memory(tmp_path: Path) -> None:
    large(tmp_path / "store", 40_000)  # 29 MiB
    code = """
import sys, torch
from assay.data import blocks, open_store
blocks._MAX_MAPPED_BYTES = 4 * 2**20
opened = open_store(sys.argv[1])
def mapped():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssFile")) // 1024
parts = torch.randperm(40_000).split(128)
opened.read(parts[0])  # libraries are files in memory as well
before = mapped()
highest = 0
for index in parts:
    opened.read(index)
    highest = max(highest, mapped())
print(highest - before)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 8  # MiB
