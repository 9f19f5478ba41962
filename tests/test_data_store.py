"""Files of images with checksums, and stores elsewhere that several processes open at once."""

import hashlib
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch

from assay.data import Loader, Store, open_store
from assay.data.config import DataConfig
from assay.data.store import ImageFile, PackedImage, address_of, write_store
from tests.commands import run
from tests.errors import rejected, rejects


def make_store(path: Path, num_images: int = 300) -> Store:
    """Images of 3,072 bytes: some lie in two blocks."""
    values = np.random.default_rng(0).integers(0, 256, (num_images, 3, 32, 32), dtype=np.uint8)
    images = (PackedImage(f"{i}.png", v, 0.0, -1) for i, v in enumerate(values))
    return write_store(path, "noise", images, (3, 32, 32), "uint8", (0, 255), ())


@pytest.mark.parametrize("index", [[], [5], [-1, 0], list(range(300)), [7, 8, 9, 3, 3, 299, 0], [250, 249]])
def test_rows_are_those_of_the_array(index: list[int], tmp_path: Path) -> None:
    make_store(tmp_path / "store")
    path = tmp_path / "store" / "images.npy"
    file, rows = ImageFile(path, path.with_name("blocks.npy")), np.array(index, dtype=np.int64)
    np.testing.assert_array_equal(file.read(rows), np.load(path)[rows])
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(file)).read(rows), np.load(path)[rows])


@pytest.mark.parametrize("protocol", ["memory", "file"])
def test_a_store_elsewhere_is_copied_once_and_compared(
    protocol: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    every, plain = torch.arange(300), make_store(tmp_path / "origin")
    address = f"memory://{tmp_path.name}/origin" if protocol == "memory" else f"file://{tmp_path}/origin"
    files, root = fsspec.core.url_to_fs(address)
    if protocol == "memory":
        files.put(str(tmp_path / "origin"), root, recursive=True)
    expected = plain.read(every)
    found = open_store(Path(address))  # as a config file gives it, with a slash less
    assert torch.equal(found.read(every), expected) and found.fingerprint == plain.fingerprint
    assert "300" in run("data", "show", address, "--verify")
    trained_on = DataConfig(store=Path(address), held_out=50).prepared().open()
    assert len(Loader(trained_on, 4).batch(0).x_tn) == 4 and len(trained_on) == 250

    files.rm(f"{root}/images.npy")  # what is here needs no origin
    files.pipe(f"{root}/images.npy", bytes(3072 * 300))
    assert torch.equal(open_store(address).read(every), expected)
    shutil.rmtree(tmp_path / "cache")
    with rejects(f"{address}/images.npy"):
        open_store(address)
    with rejects(address + "-not"):
        open_store(address + "-not")


def test_a_copy_of_a_store_that_changed_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    make_store(tmp_path / "origin")
    before = open_store(f"file://{tmp_path}/origin")
    shutil.rmtree(tmp_path / "origin")
    after = make_store(tmp_path / "origin", 200)
    assert torch.equal(
        open_store(f"file://{tmp_path}/origin").read(torch.arange(200)), after.read(torch.arange(200))
    )
    assert len(before.read(torch.arange(300))) == 300  # whoever has the old one open keeps it


def test_addresses_and_folders_are_told_apart() -> None:
    known = {
        "s3:/bucket/a": "s3://bucket/a",
        "s3://bucket/a": "s3://bucket/a",
        "file:/data/a": "file:///data/a",
    }
    for given in (*known, "stores/digits", "/data/a", "C:/stores", "hf:me/model"):
        assert address_of(Path(given)) == known.get(given)


def test_processes_that_open_a_store_elsewhere_at_once_read_the_same(tmp_path: Path) -> None:
    expected = make_store(tmp_path / "origin").read(torch.arange(300)).numpy().tobytes()
    code = (
        "import hashlib, sys, torch\nfrom assay.data import open_store\n"
        "sys.stdin.readline()\n"  # all begin at once
        "x = open_store(sys.argv[1]).read(torch.arange(300))\n"
        "print(hashlib.sha256(x.numpy().tobytes()).hexdigest())"
    )
    env = {**os.environ, "ASSAY_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", code, f"file://{tmp_path}/origin"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    processes = [subprocess.Popen(command, env=env, text=True, **pipes) for _ in range(3)]  # type: ignore[call-overload]
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    found = {process.communicate()[0].strip() for process in processes}
    assert found == {hashlib.sha256(expected).hexdigest()}


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    for name in ("images.npy", "label.npy", "blocks.npy"):
        store = make_store(tmp_path / name, 3)
        (store.path / name).unlink()
        with rejected(path=store.path / name):
            open_store(store.path)
    with rejected(path=tmp_path / "nowhere"):
        open_store(tmp_path / "nowhere")


def test_images_that_change_while_a_store_is_open_are_noticed(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store")
    store.read(torch.arange(300))
    images = tmp_path / "store/images.npy"
    content = bytearray(images.read_bytes())
    content[-1] ^= 1
    images.write_bytes(content)
    for opened in (store, open_store(tmp_path / "store")):  # although it was compared before
        with rejects(images):
            opened.read(torch.tensor([299]))
    os.truncate(images, 300)
    with rejects(images):
        store.read(torch.arange(300))


def test_reading_a_large_file_keeps_little_of_it_in_memory(tmp_path: Path) -> None:
    make_store(tmp_path / "store", 10_000)  # 29 MiB
    code = """
import sys, torch
from assay.data import open_store
opened = open_store(sys.argv[1])
def mapped():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssFile")) // 1024
parts = torch.randperm(10_000).split(32)
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
