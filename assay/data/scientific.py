"""Formats of the field: stacks of images in one file, each read by its own library, one image at a time.

    FITS            astropy    the first image extension; noise from a keyword or an extension
    HDF5            h5py       a data set (N, H, W[, C]); noise from another data set or an attribute
    zarr, OME-Zarr  zarr       an array, or the full resolution of an OME image
    TIFF, OME-TIFF  tifffile   pages and channels by the axes that the file names
    DICOM           pydicom    rescaled to the units that the file states
    NIfTI           nibabel    slices along the last axes
    MRC             mrcfile    an image or a stack
    .npy            numpy      one image in each file of a folder

`open_stack` returns the images of one file; `assay.data.readers` joins the files of a folder.
"""

import io
import logging
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from assay.archives import check_gzip, check_unpacked, read_npy
from assay.data.decode import native
from assay.files import naming

_SUFFIXES = {
    ".fits": "fits", ".fit": "fits", ".fts": "fits", ".h5": "hdf5", ".hdf5": "hdf5", ".zarr": "zarr",
    ".tif": "tiff", ".tiff": "tiff", ".dcm": "dicom", ".dicom": "dicom", ".nii": "nifti", ".mrc": "mrc",
    ".mrcs": "mrc", ".rec": "mrc", ".npy": "npy",
}  # fmt: skip
_LIBRARIES = {
    "fits": "astropy", "hdf5": "h5py", "zarr": "zarr", "dicom": "pydicom", "nifti": "nibabel", "mrc": "mrcfile"
}  # fmt: skip
_MAX_CHANNELS = 64


@dataclass(frozen=True)
class Stack:
    """The images of one file: `read(k)` returns image k as (H, W, C); `sigma` (N,) if the file has it.

    If its noise is an image, `sigma_map(k)` is the noise of each pixel of image k, (H, W, C or 1).
    """

    num_images: int
    read: Callable[[int], np.ndarray]
    sigma: np.ndarray | None = None
    sigma_map: Callable[[int], np.ndarray] | None = None


def stack_format(path: Path) -> str | None:
    """The format that a file's name says, or None; `.gz` of FITS and NIfTI counts."""
    name = path.name.lower().removesuffix(".gz")
    suffix = Path(name).suffix
    if name != path.name.lower() and suffix not in (".fits", ".fit", ".fts", ".nii"):
        return None
    if path.is_dir() and not any((path / mark).exists() for mark in ("zarr.json", ".zgroup", ".zarray")):
        return None
    return "zarr" if path.is_dir() else _SUFFIXES.get(suffix)


def is_tiff_stack(path: Path) -> bool:
    """Whether a TIFF file holds more than one page; errors in it are reported when it is read."""
    try:
        with _raising_logs(), _tiff(path) as file:
            return len(file.pages) > 1
    except Exception:
        return False


def _tiff(path: Path) -> Any:
    return import_module("tifffile").TiffFile(path)


@contextmanager
def _raising_logs() -> Iterator[None]:
    """tifffile logs damage and continues with the rest; here it is an error."""
    found: list[str] = []
    handler, logger = logging.Handler(logging.ERROR), logging.getLogger("tifffile")
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    before = logger.propagate, logger.level
    logger.propagate = False
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = before[0]
        logger.setLevel(before[1])
    if found:
        raise ValueError(found[0])


def open_stack(path: Path, dataset: str | None = None, noise: str | None = None) -> Stack:
    """Open one file. `dataset` names the array inside an HDF5 or zarr file, or the extension of a FITS file.

    `noise` names where the file keeps the standard deviation of its noise: a keyword or extension (FITS), a
    data set or attribute (HDF5, zarr), a keyword (DICOM).
    """
    kind = stack_format(path)
    _require(kind or "")
    with naming(path, "check that the file is whole, or leave it out"):
        if path.suffix == ".gz":
            check_gzip(path)
        match kind:
            case "fits":
                return _open_fits(path, dataset, noise)
            case "hdf5":
                return _open_tree(path, import_module("h5py").File(path, "r"), dataset, noise)
            case "zarr":
                return _open_zarr(path, dataset, noise)
            case "tiff":
                return _open_tiff(path)
            case "dicom":
                return _open_dicom(path, noise)
            case "nifti":
                return _open_nifti(path)
            case "mrc":
                values = _open_mrc(path)
                return _planes(values, "YX" if values.ndim == 2 else "IYX")
            case "npy":
                return _open_npy(path)
    raise ValueError(f"{path} is none of the formats {', '.join(sorted(set(_SUFFIXES)))}")


def _require(kind: str) -> None:
    if kind in _LIBRARIES and find_spec(_LIBRARIES[kind]) is None:
        raise ImportError(f"{kind} files are read by {_LIBRARIES[kind]}: pip install 'assay[{kind}]'")


def _planes(values: Any, axes: str, sigma: np.ndarray | None = None) -> Stack:
    """Images of an array whose `axes` are named: Y and X, C or S for channels; all others count images.

    `values` needs a shape and slices only, so that nothing is read before an image is asked for.
    """
    axes = axes.upper()
    if "Y" not in axes or "X" not in axes or len(axes) != len(values.shape):
        raise ValueError(
            f"it has the axes {axes} and the shape {tuple(values.shape)}; images need axes Y and X"
        )
    channels = [axis for axis in axes if axis in "CS"]
    if len(channels) > 1:
        raise ValueError(f"it has the axes {axes}, two of them channels: save one kind of channel")
    counted = [at for at, axis in enumerate(axes) if axis not in "YXCS"]
    lengths = [values.shape[at] for at in counted]
    num_channels = values.shape[axes.index(channels[0])] if channels else 1
    if num_channels > _MAX_CHANNELS:
        raise ValueError(
            f"it has {num_channels} channels, more than {_MAX_CHANNELS}: are these images of a stack?"
        )
    if min(values.shape) < 1:
        raise ValueError(f"it has the shape {tuple(values.shape)}: there are no images in it")
    rest = [axis for axis in axes if axis in "YXCS"]
    order = [rest.index(axis) for axis in ("Y", "X", *channels)]

    def read(k: int) -> np.ndarray:
        place: list[Any] = [slice(None)] * len(axes)
        for at, number in zip(counted, np.unravel_index(k, lengths) if lengths else (), strict=True):
            place[at] = int(number)
        return to_pixels(np.asarray(values[tuple(place)]).transpose(order))

    return Stack(math.prod(lengths), read, sigma)


def to_pixels(values: np.ndarray) -> np.ndarray:
    """(H, W[, C]) of any numbers -> (H, W, C) uint8, uint16 or float32, without loss where these allow it."""
    if values.dtype.kind not in "uifb":
        raise ValueError(f"it holds {values.dtype} values; images are real numbers")
    if values.dtype.kind in "ib" or values.dtype.itemsize > 2:
        values = values.astype(np.float32)
    return native(values.astype(np.float32) if values.dtype == np.float16 else values)


def _open_fits(path: Path, dataset: str | None, noise: str | None) -> Stack:
    fits = import_module("astropy.io.fits")
    # Scaled integers cannot be memory-mapped; astropy then reads the one extension.
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # astropy only warns of a file that is cut short
        file = fits.open(path, memmap=False)
        len(file)  # reads all headers
    with file:
        images = [hdu for hdu in file if hdu.is_image and hdu.data is not None]
        chosen = [hdu for hdu in images if dataset in (None, hdu.name) and hdu.name != (noise or "").upper()]
        if not chosen:
            names = ", ".join(hdu.name or "PRIMARY" for hdu in images) or "none"
            raise ValueError(f"it has no image extension {dataset or ''}; its images are: {names}")
        hdu = chosen[0]
        values = hdu.data
        if values.ndim not in (2, 3):
            raise ValueError(f"its image has the shape {values.shape}; expected (H, W) or (N, H, W)")
        stack = _planes(values, "YX" if values.ndim == 2 else "IYX")
        if noise is not None:
            headers = [hdu.header, file[0].header]
            found = next((header[noise] for header in headers if noise in header), None)
            if found is None and noise.upper() in [each.name for each in file]:
                extension = file[noise.upper()]
                found = extension.data if extension.is_image else extension.data.field(0)
            stack = _with_noise(stack, found, noise)
    return stack


def _with_noise(stack: Stack, found: Any, noise: str) -> Stack:
    """The images with their noise: one level for all images or one each, or maps of levels likewise."""
    if found is None:
        raise ValueError(f"it says nothing about its noise under {noise!r}: give `sigma` instead")
    try:
        levels = np.asarray(found, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"its noise {noise!r} is {found!r}, not a number") from None
    num_images = stack.num_images
    if levels.size in (1, num_images):
        return replace(stack, sigma=np.broadcast_to(levels.reshape(-1), num_images).copy())
    maps = _planes(levels, _array_axes(levels.shape)) if 2 <= levels.ndim <= 4 else None
    if maps is None or maps.num_images not in (1, num_images):
        raise ValueError(
            f"its noise {noise!r} has the shape {levels.shape} for {num_images} images: give one level or one "
            "map of levels, or one each"
        )
    several = maps.num_images > 1
    return replace(stack, sigma_map=lambda k: maps.read(k if several else 0))


def _open_tree(
    path: Path, group: Any, dataset: str | None, noise: str | None, axes: str | None = None
) -> Stack:
    """A data set of an HDF5 file or zarr group: the one named, or the only one with three or four axes."""
    if dataset is not None:
        if dataset not in group:
            raise ValueError(f"it has no data set {dataset!r}; it has {', '.join(_arrays(group)) or 'none'}")
        values = group[dataset]
    else:
        arrays = {name: array for name, array in _arrays(group).items() if name != noise}
        stacks = [name for name, array in arrays.items() if len(array.shape) in (3, 4)]
        if len(stacks) != 1:
            raise ValueError(
                f"it has {len(stacks)} data sets that could be images ({', '.join(stacks[:5]) or 'none'}): "
                "choose one with `dataset`"
            )
        dataset, values = stacks[0], group[stacks[0]]
    if not hasattr(values, "shape") or len(values.shape) not in (2, 3, 4, 5):
        raise ValueError(f"{dataset} is not an array of images (N, H, W[, C])")
    _check_size(path, values)
    stack = _planes(values, axes or _array_axes(tuple(values.shape)))
    if noise is not None:
        if noise in group:
            _check_size(path, group[noise])
            return _with_noise(stack, group[noise][...], noise)
        return _with_noise(stack, values.attrs.get(noise, group.attrs.get(noise)), noise)
    return stack


def _check_size(path: Path, values: Any) -> None:
    """Reject an array, or chunks of one, that declare far more than is stored: missing chunks cost nothing."""
    files = path.rglob("*") if path.is_dir() else [path]
    stored = sum(file.stat().st_size for file in files if file.is_file())
    parts = values.shape, values.chunks or (), getattr(values, "shards", None) or ()
    check_unpacked(path, max(map(math.prod, parts)) * values.dtype.itemsize, stored)


def _array_axes(shape: tuple[int, ...]) -> str:
    """The meaning of a bare array's axes; of four the shorter of the outer two is the channels."""
    if len(shape) == 4:
        return "IYXC" if shape[3] <= shape[1] else "ICYX"
    return {2: "YX", 3: "IYX", 5: "IZCYX"}[len(shape)]


def _arrays(group: Any, prefix: str = "", depth: int = 8) -> dict[str, Any]:
    """The arrays below a group by their paths."""
    found: dict[str, Any] = {}
    for name in group if depth else ():
        item = group[name]
        if hasattr(item, "shape"):
            found[f"{prefix}{name}"] = item
        elif hasattr(item, "keys"):
            found |= _arrays(item, f"{prefix}{name}/", depth - 1)
    return found


def _open_zarr(path: Path, dataset: str | None, noise: str | None) -> Stack:
    opened = import_module("zarr").open(str(path), mode="r")
    if hasattr(opened, "shape"):
        _check_size(path, opened)
        return _planes(opened, _array_axes(tuple(opened.shape)))
    multiscales = opened.attrs.get("multiscales") or opened.attrs.get("ome", {}).get("multiscales")
    if multiscales and dataset is None:  # OME-Zarr: the first resolution is the full one
        image = multiscales[0]
        axes = "".join(axis["name"] if isinstance(axis, dict) else axis for axis in image.get("axes", "tczyx"))
        return _open_tree(path, opened, image["datasets"][0]["path"], noise, axes)
    return _open_tree(path, opened, dataset, noise)


def _open_tiff(path: Path) -> Stack:
    with _raising_logs():
        file = _tiff(path)  # stays open while its images are read
        num_pages = len(file.pages)
    with _raising_logs():  # pages that lead to each other are an error by now: their series would never end
        series = file.series[0]
    axes, shape = series.axes.replace("Q", "I"), series.shape
    pages = [at for at, axis in enumerate(axes) if axis not in "YXS"]  # the axes over which pages are laid out
    lengths = [shape[at] for at in pages]
    if math.prod(lengths) > num_pages:
        raise ValueError(f"it has {num_pages} pages where its axes {axes} {shape} need {math.prod(lengths)}")

    class Pages:
        """The series as an array that reads only the pages of one image."""

        def __init__(self) -> None:
            self.shape = shape

        def __getitem__(self, place: tuple[Any, ...]) -> np.ndarray:
            chosen = [
                range(shape[at])[place[at]] if place[at] != slice(None) else range(shape[at]) for at in pages
            ]
            many = [each if isinstance(each, range) else [each] for each in chosen]
            numbers = [np.ravel_multi_index(each, lengths) for each in product(*many)] if lengths else [0]
            read = [_page(path, series, int(number)) for number in numbers]
            kept = [len(each) for each in chosen if isinstance(each, range)]
            return np.stack(read).reshape(*kept, *read[0].shape)

    return _planes(Pages(), axes)


def _page(path: Path, series: Any, number: int) -> np.ndarray:
    page = series.pages[number]
    if page is None:
        raise ValueError(f"page {number} is missing")
    check_unpacked(path, math.prod(page.shape) * series.dtype.itemsize, path.stat().st_size)
    return np.asarray(page.asarray())


def _open_mrc(path: Path) -> np.ndarray:
    with open(path, "rb") as file:  # mrcfile allocates as much memory as this number says
        header = file.read(1024)
    byte_order: Any = "big" if header[212:213] == b"\x11" else "little"
    if int.from_bytes(header[92:96], byte_order, signed=True) > path.stat().st_size:
        raise ValueError("its extended header is longer than the file")
    return import_module("mrcfile").mmap(path, mode="r", permissive=False).data


def _open_dicom(path: Path, noise: str | None) -> Stack:
    pydicom = import_module("pydicom")
    file = pydicom.dcmread(io.BytesIO(path.read_bytes()))  # a wrong length cannot make it read on
    sizes = [int(file.get(key, 1) or 1) for key in ("Rows", "Columns", "NumberOfFrames", "SamplesPerPixel")]
    check_unpacked(path, math.prod(sizes) * int(file.get("BitsAllocated", 8)) // 8, path.stat().st_size)
    values = file.pixel_array
    slope, intercept = float(file.get("RescaleSlope", 1)), float(file.get("RescaleIntercept", 0))
    if (slope, intercept) != (1, 0):
        values = values.astype(np.float32) * np.float32(slope) + np.float32(intercept)
    colour = int(file.get("SamplesPerPixel", 1)) > 1
    stack = _planes(values, ("I" if values.ndim == 3 + colour else "") + "YX" + "C" * colour)
    return stack if noise is None else _with_noise(stack, file.get(noise), noise)


def _open_nifti(path: Path) -> Stack:
    image = import_module("nibabel").load(path)
    axes = "XYZT"[: len(image.shape)]
    return _planes(image.dataobj, axes)


def _open_npy(path: Path) -> Stack:
    values = read_npy(path)
    if values.ndim not in (2, 3):
        raise ValueError(
            f"it has the shape {values.shape}; a file of a folder holds one image, (H, W) or (H, W, C)"
        )
    return _planes(values, "YX" if values.ndim == 2 else "YXC")
