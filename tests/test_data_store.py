"""Files of images with checksums, and stores elsewhere that several processes open at once."""

import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch

from assay.data import Loader, Store, open_store
from assay.data.config import DataConfig
from assay.data.store import ImageFile, PackedImage, address_of, write_store
from assay.errors import AssayError
from assay.files import content_hash, sha256
from tests.commands import run
from tests.errors import rejected
from tests.stores import stored


def make_store(path: Path, num_images: int = 300) -> Store:
    """Images of 3,072 bytes: some lie in two blocks."""
    values = np.random.default_rng(0).integers(0, 256, (num_images, 3, 32, 32), dtype=np.uint8)
    images = (PackedImage(f"{i}.png", v, 0.0, -1) for i, v in enumerate(values))
    return write_store(path, "noise", images, (3, 32, 32), "uint8", (0, 255), ())


@pytest.mark.parametrize("max_mapped", [0, 2**24])
@pytest.mark.parametrize("index", [[], [5], [-1, 0], list(range(300)), [7, 8, 9, 3, 3, 299, 0], [250, 249]])
def test_rows_are_those_of_the_array(
    index: list[int], max_mapped: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("assay.data.store._MAX_MAPPED_BYTES", max_mapped)
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
    with rejected(path=f"{address}/images.npy"):
        open_store(address)
    with rejected(path=address + "-not"):
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
    for name in ("label.npy", "images.npy"):  # what is lost is copied again
        next((tmp_path / "cache").rglob(name)).unlink()
    assert open_store(f"file://{tmp_path}/origin").fingerprint == after.fingerprint


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


def test_a_damaged_image_is_noticed_when_it_or_its_neighbours_are_read(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", 40)
    expected = store.read(torch.arange(40))
    file = store.path / "images.npy"
    whole = file.read_bytes()
    damaged = bytearray(whole)
    damaged[128 + 30 * 3072 + 5] ^= 1  # in the second block, as are images 21 to 39
    file.write_bytes(damaged)
    with rejected(path=file):
        store.read(torch.tensor([30]))  # although it was compared before
    opened = open_store(store.path)
    for _ in range(2):  # a block that failed is not taken for checked
        assert torch.equal(opened.read(torch.tensor([3, 20, 0])), expected[[3, 20, 0]])
        for index in ([30], [22], [21], [0, 39], [-1]):
            with rejected(path=file):
                opened.read(torch.tensor(index))
    damaged = bytearray(whole)
    damaged[100] ^= 1  # the header
    file.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"images\.npy"):
        open_store(store.path)
    file.write_bytes(whole)
    opened = open_store(store.path)
    assert torch.equal(opened.read(torch.arange(40)), expected)
    (store.path / "names.npy").write_bytes((store.path / "names.npy").read_bytes().replace(b"7.png", b"7.pnk"))
    with rejected(path="names.npy"):
        opened.source_names([0])


@pytest.mark.parametrize(
    ("file", "value"),
    [
        ("sigma_tn.npy", np.array([0, -1, 0, 0], np.float32)),
        ("sigma_tn.npy", np.array([0, np.nan, 0, 0], np.float32)),
        ("label.npy", np.array([0, -1, -1, -1])),
        ("meta.json", {"format_version": 0}),
        ("meta.json", {"format_version": 3, "more": 1}),
        ("meta.json", {"\x7fname": 1}),
        *(("sigma_map.npy", np.full((2, 1, 4, 4), wrong, np.float32)) for wrong in (np.nan, np.inf, -1)),
        ("sigma_map.npy", np.ones((2, 2, 4, 4), np.float32)),
        ("map_index.npy", np.array([-2, 0, 1, 0])),
        ("map_index.npy", np.array([0, 1, 2, 1])),
        ("map_index.npy", None),
    ],
)
def test_stores_of_other_versions_or_impossible_values_are_rejected(
    tmp_path: Path, file: str, value: Any
) -> None:
    """Also if their checksums are right."""
    levels = [np.full((1, 4, 4), level) for level in (0.1, 0.2, 0.1, 0.2)]
    path = stored(tmp_path / "store", np.zeros((4, 1, 4, 4)), 0.2, maps=levels).path
    tree = json.loads((path / "meta.json").read_text())
    del tree["checksum"]
    if isinstance(value, dict):
        tree |= value
    elif value is None:
        del tree["checksums"][file]
    else:
        np.save(path / file, value)
        tree["checksums"][file] = sha256(path / file)
    (path / "meta.json").write_text(json.dumps(tree | {"checksum": content_hash(tree)}))
    with pytest.raises(AssayError) as caught:
        open_store(path)
    assert str(path) in (caught.value.path or "") and caught.value.cure and str(caught.value).isprintable()


def test_the_fingerprint_of_a_store_stays(tmp_path: Path) -> None:
    """Runs are named by it."""
    values = np.arange(48, dtype=np.float32).reshape(4, 1, 3, 4) / 48
    levels = np.where(np.arange(12).reshape(1, 3, 4) % 5 == 0, 0.3, 0.1).astype(np.float32)
    images = [
        PackedImage(str(i), values[i], 0.1, i % 2, 0.1 + 0.1 * (i == 3), None, i // 2, levels if i else None)
        for i in range(4)
    ]
    store = write_store(tmp_path / "s", "s", images, (1, 3, 4), "float32", (-1, 1), ("a", "b"))
    assert store.fingerprint == "f993f1f1957c41efcafe87c6dec59ab32451abfe75206d866ff0ba89a2f6c004"
