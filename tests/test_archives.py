"""Archives and arrays from elsewhere: sizes are checked before memory is set aside, checksums to the end."""

import io
import json
import pickle
import struct
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from assay.archives import FREE_BYTES, MAX_RATIO, check_unpacked, read_npy, read_npz, read_tar
from assay.data.readers import read_any
from tests.errors import rejected


def test_nothing_unpacks_to_far_more_than_it_takes(tmp_path: Path) -> None:
    check_unpacked("x", FREE_BYTES, 1)
    check_unpacked("x", MAX_RATIO * FREE_BYTES, FREE_BYTES)
    with rejected(path="x"):
        check_unpacked("x", FREE_BYTES + 1, 1)
    path = tmp_path / "bomb.tar.gz"
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        member = tarfile.TarInfo("elsewhere")
        member.size = FREE_BYTES + 2**20
        archive.addfile(member, io.BytesIO(bytes(member.size)))
    with rejected(path="bomb.tar.gz"):
        read_any(str(path))  # also where the large member is none of those that are read


def tar(path: Path, *members: tarfile.TarInfo, **contents: bytes) -> Path:
    with tarfile.open(path, "w") as archive:
        for member in members:
            archive.addfile(member)
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def link(name: str, target: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.SYMTYPE, target
    return member


def test_links_in_tar_archives_are_not_followed(tmp_path: Path) -> None:
    for target in ("nowhere", "data_batch_1", "/etc/passwd"):
        path = tar(tmp_path / "a.tar", link("data_batch_1", target))
        with rejected(path="a.tar"):
            read_any(str(path))
    path = tar(tmp_path / "a.tar", a=b"1", b=b"22")
    assert read_tar(path, {"b", "c"}) == {"b": b"22"}
    whole = path.read_bytes()
    path.write_bytes(whole[:1024] + whole)
    with rejected(path="a.tar"):  # a is held twice
        read_tar(path, {"a"})
    path.write_bytes(whole[: 512 + 512 + 512 + 1])
    with rejected(path="a.tar"):
        read_tar(path, {"b"})


def cifar(tmp_path: Path, **first: Any) -> Path:
    """Five batches of two images; `first` changes the first."""
    batch = {"data": np.zeros((2, 3072), np.uint8), "labels": [3, 9]}
    contents = {f"data_batch_{i}": batch for i in range(1, 6)} | {"data_batch_1": {**batch, **first}}
    return tar(tmp_path / "cifar.tar", **{name: pickle.dumps(content, 3) for name, content in contents.items()})


class Crafted:
    """Pickles as a dtype whose state numpy would trust: an object field, and flags that deny it."""

    def __reduce__(self) -> Any:
        state = (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 8, 0)
        return np.dtype, ("V8", False, True), state


def test_cifar_archives_hold_bytes_and_labels_only(tmp_path: Path) -> None:
    good = read_any(str(cifar(tmp_path)))
    assert good.label.tolist() == [3, 9] * 5 and good.load(0).shape == (32, 32, 3)
    reconstruct = np.zeros(0).__reduce__()[0]
    crafted = type("", (), {"__reduce__": lambda self: (reconstruct, (np.ndarray, (0,), b"b"), STATE)})()
    wrong = [crafted, np.zeros((2, 3072), np.float32), np.zeros((2, 3071), np.uint8), [1, 2]]
    labels = [5, [3], [3, 2**70], [3, 10], [3, 2.5]]
    for change in [*({"data": data} for data in wrong), *({"labels": label} for label in labels)]:
        with pytest.raises(ValueError, match=r"cifar\.tar"):
            read_any(str(cifar(tmp_path, **change)))


STATE = (1, (1,), Crafted(), False, b"\x08" * 8)


@pytest.mark.parametrize("labels", ["5", "[5", '{"a": 1}', "[[1]]", "[1.5]", "[10]", "[" * 100_000])
def test_labels_of_the_npm_package_that_make_no_sense(tmp_path: Path, labels: str) -> None:
    pixels = io.BytesIO()
    Image.fromarray(np.zeros((1, 1024, 3), np.uint8)).save(pixels, "png")
    contents = {f"data_batch_{i}.png": pixels.getvalue() for i in range(1, 6)}
    path = tar(tmp_path / "npm.tgz", **contents, **{"train_lables.json": json.dumps([0] * 5).encode()})
    assert read_any(str(path)).label.tolist() == [0] * 5
    path = tar(tmp_path / "npm.tgz", **contents, **{"train_lables.json": labels.encode()})
    with rejected(path="npm.tgz"):
        read_any(str(path))


def npy(array: np.ndarray, header: bytes = b"", change: bytes = b"") -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    assert header in file.getvalue() and len(header) == len(change)
    return file.getvalue().replace(header, change)


def test_arrays_hold_what_their_header_declares(tmp_path: Path) -> None:
    images = np.arange(300, dtype=np.uint8)[: 2 * 5 * 5].reshape(2, 5, 5)
    for given in (images, np.asfortranarray(images), images.astype(">f4"), images[:0], np.array(2.5)):
        (tmp_path / "a.npy").write_bytes(npy(given))
        np.savez_compressed(tmp_path / "a.npz", a=given, b=given)
        for found in (read_npy(tmp_path / "a.npy"), *read_npz(tmp_path / "a.npz").values()):
            assert found.dtype == given.dtype and np.array_equal(found, given)
    with np.load(tmp_path / "a.npz") as numpys_own:
        assert numpys_own.files == list(read_npz(tmp_path / "a.npz"))
    for header, change in (
        (b"(2, 5, 5)", b"(1, 5, 5)"),
        (b"(2, 5, 5)", b"(9**9**9)"),
        (b"(2, 5, 5)", b"(2, 5, -5"),
        (b"|u1", b"|O1"),
        (b"|u1", b"<u8"),
        (b"'shape'", b"'shave'"),
        (b"{'descr'", b"{{{{{{{{"),
        (b"NUMPY\x01", b"NUMPY\x03"),
        (b"NUMPY\x01\x00v", b"NUMPY\x01\x00\xff"),
    ):
        (tmp_path / "a.npy").write_bytes(npy(images, header, change))
        with rejected(path="a.npy"):
            read_any(str(tmp_path / "a.npy"))
    for shape, change in ((b"(2, 5, 5), }   ", b"(10**12,5,5), }"), (b"(2, 5, 5), }    ", b"(100000000,5,5)}")):
        with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
            archive.writestr("images.npy", npy(images, shape, change))
        with rejected(path="a.npz"):
            read_any(str(tmp_path / "a.npz"))


def test_an_npz_that_has_lost_members_is_rejected(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", images=np.zeros((2, 4, 4, 1), np.uint8), label=[0, 1])
    data = bytearray((tmp_path / "a.npz").read_bytes())
    end = data.rindex(b"PK\x05\x06")
    (size,) = struct.unpack_from("<I", data, end + 12)  # of the directory, whose last entry is label.npy
    struct.pack_into("<I", data, end + 12, size - (46 + len("label.npy")))
    start = end - size
    struct.pack_into("<I", data, end + 16, start)
    (tmp_path / "a.npz").write_bytes(data[: end - 46 - len("label.npy")] + data[end:])
    with rejected(path="a.npz"):
        read_any(str(tmp_path / "a.npz"))


def test_a_layout_that_may_mean_several_things_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    for shape, layout in (
        ((2, 8, 8, 3), "NHWC"),
        ((2, 3, 8, 8), "NCHW"),
        ((2, 1, 4, 4), "NCHW"),
        ((2, 4, 4, 1), "NHWC"),
        ((2, 4, 4, 3), "NHWC"),
        ((2, 8, 6, 1), "NHWC"),
        ((2, 3, 3, 3), None),
        ((2, 3, 32, 3), None),
        ((2, 3, 4, 1), None),
        ((3, 5, 5, 7), None),
        ((3, 2, 200, 4), None),
        ((3, 1000, 4, 4), None),  # a thousand images of 4 x 4 in three colours?
    ):
        np.save(path, np.zeros(shape, np.uint8))
        assert read_any(str(path), layout="NHWC").pixels(0).shape == shape[1:]
        if layout is None:
            with rejected("layout", "a.npy"):
                read_any(str(path))
        else:
            channels_last = shape[1:] if layout == "NHWC" else (*shape[2:], shape[1])
            assert read_any(str(path)).pixels(0).shape == channels_last
    np.save(path, np.zeros((2, 3, 32, 3), np.uint8))
    assert read_any(str(path), layout="NCHW").pixels(0).shape == (32, 3, 3)
