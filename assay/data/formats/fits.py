"""FITS: the first image extension, or the one named; its noise is a keyword or an extension."""

import warnings
from pathlib import Path

from assay.archives import check_gzip
from assay.data.readers import Format, RawImages
from assay.data.scientific import named, planes, with_noise
from assay.data.spec import SourceSpec
from assay.errors import AssayError, extra


def _open(path: Path, spec: SourceSpec) -> RawImages:
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
        return with_noise(raw, found, noise)


_SUFFIXES = tuple(f".{kind}{packed}" for kind in ("fits", "fit", "fts") for packed in ("", ".gz"))
FORMAT = Format("FITS", named(*_SUFFIXES), _open, _open)
