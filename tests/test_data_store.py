"""Files of images with checksums, and stores elsewhere that several processes open at once."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from assay.data import Store, open_store
from assay.data.store import ImageFile, PackedImage, write_store
from assay.errors import AssayError
from assay.files import content_hash, sha256
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
