"""Formats of the field: what their own libraries write is what is packed, image by image."""

import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import mrcfile
import nibabel
import numpy as np
import pydicom
import pytest
import tifffile
import torch
import zarr
from astropy.io import fits

from assay.data import Store, readers
from assay.data.pack import PackConfig, pack
from assay.data.readers import read_any
from assay.data.spec import SourceSpec
from tests.commands import run
from tests.errors import fault, rejected

IMAGES = np.random.default_rng(0).uniform(0, 1000, (5, 6, 7)).astype(np.float32)  # (N, H, W)


def write_fits(path: Path) -> None:
    header = fits.Header({"RDNOISE": 3.5})
    noise = fits.ImageHDU(np.arange(5.0), name="NOISE")
    fits.HDUList([fits.PrimaryHDU(IMAGES, header), noise]).writeto(path)


def write_hdf5(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["group/images"] = IMAGES
        file["levels"] = np.arange(5.0)
        file["group/images"].attrs["rms"] = 3.5


def write_zarr(path: Path) -> None:
    group = zarr.open_group(str(path), mode="w")
    group.create_array("images", data=IMAGES)
    group.create_array("levels", data=np.arange(5.0))


def write_ome_zarr(path: Path) -> None:
    group = zarr.open_group(str(path), mode="w")
    group.create_array("0", data=IMAGES.reshape(5, 1, 6, 7))
    group.create_array("1", data=IMAGES.reshape(5, 1, 6, 7)[..., ::2, ::2])
    axes = [{"name": name} for name in "tcyx"]
    group.attrs["multiscales"] = [{"axes": axes, "datasets": [{"path": "0"}, {"path": "1"}]}]


def write_tiff(path: Path) -> None:
    tifffile.imwrite(path, IMAGES, photometric="minisblack", metadata={"axes": "TYX"}, ome=True)


def write_dicom(path: Path) -> None:
    file = pydicom.Dataset()
    file.file_meta = pydicom.dataset.FileMetaDataset()
    file.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    file.SOPClassUID, file.SOPInstanceUID = pydicom.uid.SecondaryCaptureImageStorage, "1.2.3"
    file.Rows, file.Columns, file.NumberOfFrames = 6, 7, 5
    file.SamplesPerPixel, file.PhotometricInterpretation = 1, "MONOCHROME2"
    file.BitsAllocated = file.BitsStored = 16
    file.HighBit, file.PixelRepresentation = 15, 0
    file.RescaleSlope, file.RescaleIntercept = "0.02", "-10"
    file.PixelData = np.rint((IMAGES + 10) / 0.02).astype(np.uint16).tobytes()
    file.save_as(path, enforce_file_format=True)


def write_nifti(path: Path) -> None:
    nibabel.save(nibabel.Nifti1Image(IMAGES.transpose(2, 1, 0), np.eye(4)), path)


def write_mrc(path: Path) -> None:
    with mrcfile.new(path) as file:
        file.set_data(IMAGES)


WRITERS: dict[str, Callable[[Path], None]] = {
    "a.fits": write_fits,
    "a.h5": write_hdf5,
    "a.zarr": write_zarr,
    "ome.zarr": write_ome_zarr,
    "a.ome.tif": write_tiff,
    "a.dcm": write_dicom,
    "a.nii.gz": write_nifti,
    "a.mrc": write_mrc,
}


def packed(folder: Path, name: str, config: PackConfig | None = None, **settings: Any) -> Store:
    """The store of a file or folder, whose values are from 0 to 1000 unless the settings say otherwise."""
    known = {"range": (0, 1000), "dataset": "images" if name == "a.zarr" else None}
    return pack(SourceSpec(path=str(folder / name), **known | settings), folder / "store", config).store


@pytest.mark.parametrize("name", WRITERS)
def test_what_is_written_is_packed(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    store = packed(tmp_path, name)
    values = (store.read(torch.arange(5)).numpy() + 1) * 500
    assert values.shape == (5, 1, 6, 7)
    assert np.abs(values[:, 0] - IMAGES).max() < (0.011 if name == "a.dcm" else 1e-3)
    assert store.physical_range == (0, 1000)
    assert store.group is not None and store.group.tolist() == [0] * 5


@pytest.mark.parametrize(
    ("name", "noise"),
    [("a.fits", "RDNOISE"), ("a.fits", "noise"), ("a.h5", "levels"), ("a.h5", "rms"), ("a.zarr", "levels")],
)
def test_noise_levels_in_the_files_are_in_their_units(tmp_path: Path, name: str, noise: str) -> None:
    WRITERS[name](tmp_path / name)
    expected = [3.5] * 5 if noise in ("RDNOISE", "rms") else [0, 1, 2, 3, 4]
    assert np.allclose(packed(tmp_path, name, noise=noise).sigma_tn.numpy() * 500, expected)


def write_each(folder: Path, images: np.ndarray) -> None:
    folder.mkdir()
    for i, image in enumerate(images):
        np.save(folder / f"{i}.npy", image)


def test_a_folder_of_arrays_has_an_image_in_each_file(tmp_path: Path) -> None:
    colours = np.random.default_rng(0).uniform(0, 1, (3, 6, 7, 4)).astype(np.float32)
    write_each(tmp_path / "in", colours)
    store = packed(tmp_path, "in", range=(-1, 1))
    assert store.image_shape == (4, 6, 7)  # the fourth channel is a channel, not transparency
    assert np.allclose(store.read(torch.arange(3)).numpy(), colours.transpose(0, 3, 1, 2))
    assert store.source_names([0, 2]) == ["0.npy", "2.npy"]


def test_folders_of_arrays_are_classes_too(tmp_path: Path) -> None:
    for folder in ("in", "in/disk", "in/bulge"):
        write_each(tmp_path / folder, IMAGES[:2])
    store = packed(tmp_path, "in", PackConfig(classes=True))
    assert store.class_names == ("bulge", "disk")
    found = dict(zip(store.source_names(range(6)), store.label.tolist(), strict=True))
    labels = {"": -1, "bulge/": 0, "disk/": 1}
    assert found == {f"{folder}{i}.npy": label for folder, label in labels.items() for i in range(2)}
    write_each(tmp_path / "flat", IMAGES[:2])
    with rejected("classes", "flat"):
        pack(
            SourceSpec(path=str(tmp_path / "flat"), range=(0, 1000)),
            tmp_path / "none",
            PackConfig(classes=True),
        )


def test_tiff_axes_say_what_is_a_channel(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 65535, (4, 3, 6, 7), dtype=np.uint16)
    tifffile.imwrite(tmp_path / "a.tif", values, metadata={"axes": "ZCYX"}, ome=True)
    raw = read_any(str(tmp_path / "a.tif"))
    assert len(raw.names) == 4
    for k in range(4):
        assert np.array_equal(raw.pixels(k), values[k].transpose(1, 2, 0))


def test_patches_cover_an_image_and_stay_one_group(tmp_path: Path) -> None:
    large = np.arange(2 * 10 * 13, dtype=np.float32).reshape(2, 10, 13)
    write_each(tmp_path / "in", large)
    with rejected("patch", "0.npy"):
        packed(tmp_path, "in", PackConfig(patch=(11, 5)))
    store = packed(tmp_path, "in", PackConfig(patch="4x5", stride=4), range=(0, 300))  # type: ignore[arg-type]
    assert len(store) == 2 * 3 * 3 and store.group is not None and store.group.tolist() == [0] * 9 + [1] * 9
    values = (store.read(torch.arange(18)).numpy()[:, 0] + 1) * 150
    assert np.allclose(values[4], large[0, 4:8, 4:9], atol=1e-3)
    assert store.source_names([4, 8]) == ["0.npy[4,4]", "0.npy[6,8]"]  # the last ends at the border
    assert {*values.round().ravel()} == {*large.ravel()}


def test_several_sources_keep_their_own_ranges_and_levels(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    clean = generator.integers(0, 256, (4, 6, 6), dtype=np.uint8)
    noisy = generator.uniform(0, 4095, (3, 6, 6)).astype(np.float32)
    np.save(tmp_path / "clean.npy", clean)
    np.save(tmp_path / "noisy.npy", noisy)
    lines = "".join(f"noisy.npy[{i}],{100 * i}\n" for i in range(3))
    (tmp_path / "levels.csv").write_text(f"filename,sigma\n{lines}")
    sources = [
        SourceSpec(path=str(tmp_path / "clean.npy"), sigma=0),
        SourceSpec(path=str(tmp_path / "noisy.npy"), levels=tmp_path / "levels.csv", range=(0, 4095)),
    ]
    store = pack(sources, tmp_path / "store").store
    x = store.read(torch.arange(7)).numpy()[:, 0]
    assert np.allclose(x[:4], clean / 127.5 - 1, atol=1e-6)
    assert np.allclose(x[4:], noisy / 2047.5 - 1, atol=1e-6)
    assert np.allclose(store.sigma_tn.numpy(), [0] * 5 + [100 / 2047.5, 200 / 2047.5])
    assert store.source_names([0, 6]) == ["clean/clean.npy[0]", "noisy/noisy.npy[2]"]
    assert store.physical_range is None  # the two sources have different units, so files need a range
    assert "different values of black and white" in run("data", "show", store.path)


def test_levels_that_the_pixels_rule_out_are_rejected(tmp_path: Path) -> None:
    images = np.random.default_rng(0).normal(100, 2, (3, 16, 16)).astype(np.float32)
    np.save(tmp_path / "a.npy", images)
    noisy = SourceSpec(path=str(tmp_path / "a.npy"), range=(0, 200), sigma=4)
    assert fault(lambda: pack(noisy, tmp_path / "store")).what == (
        "varies by 2.02, less than its noise of 4 (it measures 2.07)"
    )
    odd = np.random.default_rng(0).normal([[[250]], [[100]]], 25, (2, 32, 32)).clip(0, 255)
    odd[1, :16] = 100  # the first is clipped, the second has a border
    np.save(tmp_path / "odd.npy", odd.round().astype(np.uint8))
    assert len(pack(SourceSpec(path=f"{tmp_path}/odd.npy", sigma=25), tmp_path / "odd").store) == 2
    told = pack(noisy.model_copy(update={"sigma": 1.9}), tmp_path / "store").warnings[-1]  # all noise: possible
    assert re.search(r"between 92.2 and 106.1, where black and white are 0 and 200:", told)


def test_an_array_whose_images_are_the_last_axis_is_told(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((16, 16, 40), np.uint8))
    with pytest.warns(UserWarning, match="read as 16 images of 16 x 40.* 40 images of 16 x 16,"):
        read_any(str(tmp_path / "a.npy"))


def test_the_example_of_a_format_in_contributing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a package that adds an entry point gives it."""
    text = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
    section = text[text.index("**a format**") : text.index("**a metric**")]
    (block,) = re.findall(r"  ```python\n(.*?)  ```", section, re.S)
    names: dict[str, Any] = {}
    exec(textwrap.dedent(block), names)
    entry = SimpleNamespace(load=lambda: names["FORMAT"])
    monkeypatch.setattr(readers, "entry_points", lambda group: [entry] if group == "assay.formats" else [])
    readers.formats.cache_clear()
    try:
        (tmp_path / "in/deep").mkdir(parents=True)
        for i, name in enumerate(("a.txt", "deep/b.txt")):
            np.savetxt(tmp_path / "in" / name, IMAGES[i])
        store = packed(tmp_path, "in")
        assert store.source_names([0, 1]) == ["a.txt", "deep/b.txt"]
        assert np.allclose((store.read(torch.arange(2)).numpy()[:, 0] + 1) * 500, IMAGES[:2], atol=1e-3)
        (tmp_path / "in/a.txt").write_text("1 2\n3\n")
        with rejected(path="a.txt"):
            read_any(str(tmp_path / "in"))
    finally:
        readers.formats.cache_clear()
