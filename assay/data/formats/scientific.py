"""Formats of the field: FITS, HDF5, zarr, TIFF, DICOM, NIfTI, MRC. Stacks are read one image at a time.

FITS: the first image extension, or the one named. HDF5 and zarr: a data set (N, H, W[, C]); of OME-Zarr the
full resolution. TIFF stacks and OME-TIFF: pages and channels by the axes that the file names. DICOM: rescaled
to the units that the file states. NIfTI: slices along the last axes. Noise is in a keyword, an extension, an
attribute or another data set.
"""

import io
import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tifffile

from assay.archives import check_gzip, check_unpacked
from assay.data.formats.arrays import named, planes
from assay.data.readers import Format, RawImages
from assay.data.spec import Level, SourceSpec
from assay.errors import AssayError, extra


def _with_noise(raw: RawImages, found: Any, noise: str) -> RawImages:
    """The images with their noise: one level for all images or one each, or maps of levels likewise."""
    num_images = len(raw.names)
    try:
        levels = np.asarray(found, dtype=np.float64)
    except (TypeError, ValueError):
        levels = np.full((), math.nan)
    if levels.size in (1, num_images) and not (levels.ndim == 0 and math.isnan(levels)):
        each = np.broadcast_to(levels.reshape(-1), num_images)
        return replace(raw, noise=lambda k: Level(float(each[k])))
    maps = planes(Path(noise), levels, _axes(levels.shape)) if 1 < levels.ndim < 5 else None
    if maps is None or len(maps.names) not in (1, num_images):
        what = f"has no noise level under {noise!r}, or not one for each of {num_images} images"
        cure = "give sigma, or write there a number, a map of numbers, or one of these for each image"
        raise AssayError(what, key="noise", cure=cure)
    several = len(maps.names) > 1
    return replace(raw, noise=lambda k: Level(maps.pixels(k if several else 0)))


def _axes(shape: tuple[int, ...]) -> str:
    """The meaning of a bare array's axes; of four the shorter of the outer two is the channels."""
    if len(shape) == 4:
        return "IYXC" if shape[3] <= shape[1] else "ICYX"
    return {2: "YX", 3: "IYX", 5: "IZCYX"}.get(len(shape), "?")


def _open_fits(path: Path, spec: SourceSpec) -> RawImages:
    fits = extra("astropy.io.fits", "fits", "reading FITS files")
    if path.suffix == ".gz":
        check_gzip(path)
    # Scaled integers cannot be memory-mapped; astropy then reads the one extension.
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # astropy only warns of a file that is cut short
        file = fits.open(path, memmap=False)
        len(file)  # reads all headers
    with file:
        noise = spec.noise or ""
        images = [hdu for hdu in file if hdu.is_image and hdu.data is not None]
        chosen = [h for h in images if spec.dataset in (None, h.name) and h.name != noise.upper()]
        if not chosen:
            names = ", ".join(hdu.name or "PRIMARY" for hdu in images) or "none"
            what = f"has no image extension {spec.dataset or ''}"
            raise AssayError(what, key="dataset", cure=f"name one of {names}")
        values = chosen[0].data
        raw = planes(path, values, "YX" if values.ndim == 2 else "IYX")
        if not noise:
            return raw
        headers = [chosen[0].header, file[0].header]
        found = next((header[noise] for header in headers if noise in header), None)
        if found is None and noise.upper() in [each.name for each in file]:
            extension = file[noise.upper()]
            found = extension.data if extension.is_image else extension.data.field(0)
        return _with_noise(raw, found, noise)


def _open_hdf5(path: Path, spec: SourceSpec) -> RawImages:
    return _open_tree(path, extra("h5py", "hdf5", "reading HDF5 files").File(path, "r"), spec)


def _is_zarr(path: Path) -> bool:
    return path.is_dir() and any((path / mark).exists() for mark in ("zarr.json", ".zgroup", ".zarray"))


def _open_zarr(path: Path, spec: SourceSpec) -> RawImages:
    opened = extra("zarr", "zarr", "reading zarr files").open(str(path), mode="r")
    if hasattr(opened, "shape"):
        _check_chunks(path, opened)
        return planes(path, opened, _axes(tuple(opened.shape)))
    multiscales = opened.attrs.get("multiscales") or opened.attrs.get("ome", {}).get("multiscales")
    if multiscales and spec.dataset is None:  # the first resolution is the full one
        image = multiscales[0]
        axes = "".join(axis["name"] if isinstance(axis, dict) else axis for axis in image.get("axes", "tczyx"))
        first = spec.model_copy(update={"dataset": image["datasets"][0]["path"]})
        return _open_tree(path, opened, first, axes)
    return _open_tree(path, opened, spec)


def _open_tree(path: Path, group: Any, spec: SourceSpec, axes: str | None = None) -> RawImages:
    """A data set of an HDF5 file or zarr group: the one named, or the only one with three or four axes."""
    arrays = _arrays(group)
    chosen = [name for name, array in arrays.items() if name != spec.noise and len(array.shape) in (3, 4)]
    if spec.dataset is not None:
        chosen = [spec.dataset] if spec.dataset in arrays else []
    if len(chosen) != 1:
        what = f"has {len(chosen)} data sets that could be the images"
        raise AssayError(what, key="dataset", cure=f"name one of {', '.join([*arrays][:20]) or 'none'}")
    values = arrays[chosen[0]]
    _check_chunks(path, values)
    raw = planes(path, values, axes or _axes(tuple(values.shape)))
    if spec.noise is None:
        return raw
    found = values.attrs.get(spec.noise, group.attrs.get(spec.noise))
    if spec.noise in arrays:
        _check_chunks(path, arrays[spec.noise])
        found = arrays[spec.noise][...]
    return _with_noise(raw, found, spec.noise)


def _check_chunks(path: Path, values: Any) -> None:
    """Reject an array, or chunks of one, that declare far more than is stored: missing chunks cost nothing."""
    files = path.rglob("*") if path.is_dir() else [path]
    stored = sum(file.stat().st_size for file in files if file.is_file())
    parts = values.shape, values.chunks or (), getattr(values, "shards", None) or ()
    check_unpacked(path, max(map(math.prod, parts)) * values.dtype.itemsize, stored)


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


def is_stack(path: Path) -> bool:
    """Whether a TIFF file holds more than one page; errors in it are reported when it is read."""
    try:
        with _raising_logs(), tifffile.TiffFile(path) as file:
            return len(file.pages) > 1
    except Exception:
        return False


@contextmanager
def _raising_logs() -> Iterator[None]:
    """tifffile logs damage and continues with the rest; here it is an error."""
    found: list[str] = []
    handler, logger = logging.Handler(logging.ERROR), logging.getLogger("tifffile")
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    before = logger.propagate, logger.level
    logger.addHandler(handler)
    logger.propagate, logger.level = False, logging.ERROR
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate, logger.level = before
    if found:
        raise ValueError(found[0])


class _Pages:
    """A series of TIFF pages as an array that reads only those of one image."""

    def __init__(self, path: Path, series: Any, axes: str) -> None:
        self.path, self.series, self.shape = path, series, series.shape
        self.at = [at for at, axis in enumerate(axes) if axis not in "YXS"]  # over which pages are laid out

    def __getitem__(self, place: tuple[Any, ...]) -> np.ndarray:
        numbers = np.arange(self.num_pages).reshape([self.shape[at] for at in self.at])
        chosen = np.asarray(numbers[tuple(place[at] for at in self.at)])
        read = [self._page(number) for number in chosen.flatten().tolist()]
        return np.stack(read).reshape(*chosen.shape, *read[0].shape)

    @property
    def num_pages(self) -> int:
        """How many there should be."""
        return math.prod(self.shape[at] for at in self.at)

    def _page(self, number: int) -> np.ndarray:
        page = self.series.pages[number]
        if page is None:
            raise AssayError(f"lacks page {number}", cure="save it again")
        size = math.prod(page.shape) * self.series.dtype.itemsize
        check_unpacked(self.path, size, self.path.stat().st_size)
        return np.asarray(page.asarray())


def _open_tiff(path: Path, spec: SourceSpec) -> RawImages:
    with _raising_logs():
        file = tifffile.TiffFile(path)  # stays open while its images are read
        num_pages = len(file.pages)
    with _raising_logs():  # pages that lead to each other are an error by now: their series would never end
        series = file.series[0]
    pages = _Pages(path, series, axes := series.axes.replace("Q", "I"))
    if pages.num_pages > num_pages:
        what = f"has {num_pages} pages where its axes {axes} {series.shape} need {pages.num_pages}"
        raise AssayError(what, cure="save it again")
    return planes(path, pages, axes)


def _open_dicom(path: Path, spec: SourceSpec) -> RawImages:
    pydicom = extra("pydicom", "dicom", "reading DICOM files")
    file = pydicom.dcmread(io.BytesIO(path.read_bytes()))  # a wrong length cannot make it read on
    sizes = [int(file.get(key, 1) or 1) for key in ("Rows", "Columns", "NumberOfFrames", "SamplesPerPixel")]
    check_unpacked(path, math.prod(sizes) * int(file.get("BitsAllocated", 8)) // 8, path.stat().st_size)
    values = file.pixel_array
    slope, intercept = float(file.get("RescaleSlope", 1)), float(file.get("RescaleIntercept", 0))
    if (slope, intercept) != (1, 0):
        values = values.astype(np.float32) * np.float32(slope) + np.float32(intercept)
    colour = sizes[3] > 1
    raw = planes(path, values, ("I" if values.ndim == 3 + colour else "") + "YX" + "C" * colour)
    return raw if spec.noise is None else _with_noise(raw, file.get(spec.noise), spec.noise)


def _open_nifti(path: Path, spec: SourceSpec) -> RawImages:
    if path.suffix == ".gz":
        check_gzip(path)
    image = extra("nibabel", "nifti", "reading NIfTI files").load(path)
    return planes(path, image.dataobj, "XYZT"[: len(image.shape)])


def _open_mrc(path: Path, spec: SourceSpec) -> RawImages:
    mrcfile = extra("mrcfile", "mrc", "reading MRC files")
    with open(path, "rb") as file:  # mrcfile allocates as much memory as this number says
        header = file.read(1024)
    byte_order: Any = "big" if header[212:213] == b"\x11" else "little"
    if int.from_bytes(header[92:96], byte_order, signed=True) > path.stat().st_size:
        raise AssayError("has an extended header that is longer than the file", cure="get it again")
    values = mrcfile.mmap(path, mode="r", permissive=False).data
    return planes(path, values, "YX" if values.ndim == 2 else "IYX")


_FITS = tuple(f".{kind}{packed}" for kind in ("fits", "fit", "fts") for packed in ("", ".gz"))
FORMATS = (
    Format("FITS", named(*_FITS), _open_fits, _open_fits),
    Format("HDF5", named(".h5", ".hdf5"), _open_hdf5, _open_hdf5),
    Format("zarr", _is_zarr, _open_zarr, _open_zarr),
    Format("TIFF", named(".tif", ".tiff"), _open_tiff, _open_tiff),
    Format("DICOM", named(".dcm", ".dicom"), _open_dicom, _open_dicom),
    Format("NIfTI", named(".nii", ".nii.gz"), _open_nifti, _open_nifti),
    Format("MRC", named(".mrc", ".mrcs", ".rec"), _open_mrc, _open_mrc),
)
