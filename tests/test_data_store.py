"""Files of images with checksums, and stores elsewhere that several processes open at once."""

import hashlib
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from assay.data import Store, open_store
from assay.data.blocks import ImageFile
from assay.data.store import PackedImage, write_store
from assay.files import write_whole
from tests.errors import rejected


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
    monkeypatch.setattr("assay.data.blocks._MAX_MAPPED_BYTES", max_mapped)
    make_store(tmp_path / "store")
    path = tmp_path / "store" / "images.npy"
    file, rows = ImageFile(path, path.with_name("blocks.npy")), np.array(index, dtype=np.int64)
    np.testing.assert_array_equal(file.read(rows), np.load(path)[rows])
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(file)).read(rows), np.load(path)[rows])


def test_a_copy_that_another_process_replaces_is_still_read_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    every, plain = torch.arange(300), make_store(tmp_path / "origin")
    found = open_store(f"file://{tmp_path}/origin")
    copy = next((tmp_path / "cache").rglob("images.npy"))
    with write_whole(copy) as partial:  # as a process does that found no copy yet
        partial.write_bytes(copy.read_bytes()[:4096])
        os.truncate(partial, copy.stat().st_size)
    assert torch.equal(found.read(every), plain.read(every))
    assert torch.equal(open_store(f"file://{tmp_path}/origin").read(every), plain.read(every))


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
