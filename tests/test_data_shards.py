"""Stores of several shards and stores elsewhere give the images of a plain one, in little memory."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch

from assay.data import Loader, Store, open_store, simulate
from assay.data.convert import PackConfig
from assay.data.pack import pack, pack_shards
from assay.data.readers import read_any
from assay.data.shards import address_of
from assay.data.spec import SourceSpec
from assay.data.store import PackedImage, write_store
from tests.commands import failing, run
from tests.errors import rejects


def arrays(folder: Path, num_images: int = 23, side: int = 8) -> Path:
    images = np.random.default_rng(0).integers(0, 256, (num_images, side, side), dtype=np.uint8)
    np.save(folder / "images.npy", images)
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


def test_shards_hold_the_images_of_a_plain_store_and_packing_resumes(tmp_path: Path) -> None:
    source, path = arrays(tmp_path), tmp_path / "store"
    plain = pack(read_any(str(source)), tmp_path / "plain").store
    command = "data", "pack", source, "-o", path, "--shards"
    run(*command, "2/3")
    run(*command, "3/3")
    with rejects(path):
        open_store(path)
    made = {file: file.stat().st_mtime_ns for file in path.rglob("images.npy")}
    assert len(made) == 2
    run(*command, "3")  # makes what is missing
    assert made.items() <= {file: file.stat().st_mtime_ns for file in path.rglob("images.npy")}.items()
    assert_same(open_store(path), plain)
    assert "23 " in run("data", "show", path)

    for changed in ("3", "3 --all sigma=1", "x/3"):
        failing(*command, *changed.split())  # it is complete
    (path / "shards.json").unlink()
    for changed in ("4", "3 --colour colour", "4/3", "x/3"):
        failing(*command, *changed.split())


@pytest.mark.parametrize("what", "images folder levels map classes quantile".split())
def test_shards_of_other_contents_or_settings_are_not_mixed(tmp_path: Path, what: str) -> None:
    source = arrays(tmp_path, 6)
    np.save(tmp_path / "map.npy", np.arange(64.0).reshape(8, 8) + 1)
    lines = "".join(f"images.npy[{i}],0.222\n" for i in range(6))
    (tmp_path / "levels.csv").write_text("filename,sigma\n" + lines)
    noise: dict[str, object] = {
        "levels": {"levels": tmp_path / "levels.csv"},
        "map": {"map": tmp_path / "map.npy"},
        "quantile": {"map": tmp_path / "map.npy"},
    }.get(what, {"sigma": 9.0})  # type: ignore[assignment]
    settings = {"range": (0, 255), **noise}
    if what in ("folder", "classes"):
        (tmp_path / "in/a").mkdir(parents=True)
        for i, image in enumerate(np.load(source)):
            np.save(tmp_path / f"in/{i}.npy", image)
        source = tmp_path / "in"
    config = PackConfig(dtype="float32")

    def make(part: int, config: PackConfig = config, **more: object) -> None:
        spec = SourceSpec(path=str(source), **settings | more)  # type: ignore[arg-type]
        pack_shards(spec, tmp_path / "store", 2, part, config)

    make(1)
    make(1)  # the same again is no change
    file = {"folder": tmp_path / "in/5.npy", "levels": tmp_path / "levels.csv"}.get(
        what, tmp_path / f"{what}.npy"
    )
    before, time = (file.read_bytes(), file.stat().st_mtime_ns) if file.exists() else (b"", 0)
    other = config.model_copy(update={"classes": what == "classes"})
    if what == "levels":
        file.write_bytes(before.replace(b"0.222", b"0.022"))
    elif before:  # other contents of the same length
        file.write_bytes(before[:-4] + bytes(byte ^ 3 for byte in before[-4:]))
    if before:  # as of a copy that keeps the times
        os.utime(file, ns=(time, time))
    with rejects(tmp_path / "store", "shards"):
        make(2, other, **{"quantile": 0.5} if what == "quantile" else {})
    if before:
        file.write_bytes(before)  # with another time
    make(2)
    assert len(open_store(tmp_path / "store")) == 6


def test_shards_of_other_data_sets_are_not_mixed(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    kinds = datasets.Features({"image": datasets.Image()})
    for name, value in (("a", 1), ("b", 2)):
        rows = [{"image": np.full((8, 8), value, np.uint8)}] * 4
        datasets.Dataset.from_list(rows, features=kinds).save_to_disk(str(tmp_path / name))
    pack_shards(SourceSpec(path=f"hf:{tmp_path / 'a'}"), tmp_path / "store", 2, 1)
    with rejects(tmp_path / "store", "shards"):
        pack_shards(SourceSpec(path=f"hf:{tmp_path / 'b'}"), tmp_path / "store", 2, 2)


def test_images_read_from_files_are_those_of_the_mapping(tmp_path: Path) -> None:
    source = SourceSpec(path=str(arrays(tmp_path)))
    for dtype in ("uint8", "float32"):
        config = PackConfig(dtype=dtype)  # type: ignore[arg-type]
        plain = pack(source, tmp_path / dtype, config).store
        pack_shards(source, tmp_path / f"{dtype} parts", 3, config=config)
        for name in (dtype, f"{dtype} parts"):
            assert_same(open_store(tmp_path / name), plain)
    opened = open_store(tmp_path / "float32")
    opened.read(torch.arange(23))
    with open(tmp_path / "float32/images.npy", "r+b") as file:
        file.truncate(300)
    with pytest.raises(ValueError, match="has changed since it was packed"):
        opened.read(torch.arange(23))


def test_patches_of_a_picture_stay_in_one_shard(tmp_path: Path) -> None:
    sources, config = SourceSpec(path=str(arrays(tmp_path, 5, 16))), PackConfig(patch=(8, 8))  # four of each
    pack_shards(sources, tmp_path / "store", 3, config=config)
    found = open_store(tmp_path / "store")
    assert found.group is not None
    assert found.group.unique(return_counts=True)[1].tolist() == [4] * 5
    plain, every = pack(sources, tmp_path / "plain", config).store, torch.arange(20)
    assert torch.equal(found.read(every), plain.read(every))
    with rejects(key="shards"):
        pack_shards(sources, tmp_path / "many", 18, config=config)


def test_damaged_and_unlike_shards_are_noticed(tmp_path: Path) -> None:
    pack_shards(SourceSpec(path=str(arrays(tmp_path))), tmp_path / "store", 2)
    images = tmp_path / "store/shard-00002-of-00002/images.npy"
    opened = open_store(tmp_path / "store")
    opened.read(torch.arange(23))
    content = bytearray(images.read_bytes())
    content[-1] ^= 1
    images.write_bytes(content)
    with rejects(images):
        opened.read(torch.tensor([22]))  # although it was compared before
    with rejects(images):
        open_store(tmp_path / "store").read(torch.tensor([22]))
    meta = tmp_path / "store/shard-00001-of-00002/meta.json"
    meta.write_text(meta.read_text() + " ")
    with rejects("shards.json"):
        open_store(tmp_path / "store")


def large(path: Path, num_images: int = 3000) -> Store:
    """Images of 768 bytes, so that a block of 64 KiB has 85 of them."""
    values = np.random.default_rng(1).integers(0, 256, (num_images, 3, 16, 16), dtype=np.uint8)
    images = (PackedImage(str(i), each, 0.0, -1) for i, each in enumerate(values))
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
    found.verify()  # which fetches the others
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
    with rejects(address + "-not"):
        open_store(address + "-not")


def test_shards_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    pack_shards(SourceSpec(path=str(arrays(tmp_path))), tmp_path / "store", 3)
    plain = pack(read_any(str(tmp_path / "images.npy")), tmp_path / "plain").store
    assert_same(open_store(f"file://{tmp_path}/store"), plain)


def test_addresses_and_folders_are_told_apart() -> None:
    known = {
        "s3:/bucket/a": "s3://bucket/a",
        "s3://bucket/a": "s3://bucket/a",
        "file:/data/a": "file:///data/a",
    }
    for given in (*known, "stores/digits", "/data/a", "C:/stores", "hf:me/model"):
        assert address_of(Path(given)) == known.get(given)


def test_reading_a_large_file_keeps_little_of_it_in_memory(tmp_path: Path) -> None:
    large(tmp_path / "store", 40_000)  # 29 MiB
    code = """
import sys, torch
from assay.data import open_store
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
