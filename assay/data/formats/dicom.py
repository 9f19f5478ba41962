"""DICOM: rescaled to the units that the file states; its noise is a keyword."""

import io
import math
from pathlib import Path

import numpy as np

from assay.archives import check_unpacked
from assay.data.readers import Format, RawImages
from assay.data.scientific import named, planes, with_noise
from assay.data.spec import SourceSpec
from assay.errors import extra


def _open(path: Path, spec: SourceSpec) -> RawImages:
    pydicom = extra("pydicom", "dicom", "reading DICOM files")
    file = pydicom.dcmread(io.BytesIO(path.read_bytes()))  # a wrong length cannot make it read on
    sizes = [int(file.get(key, 1) or 1) for key in ("Rows", "Columns", "NumberOfFrames", "SamplesPerPixel")]
    check_unpacked(path, math.prod(sizes) * int(file.get("BitsAllocated", 8)) // 8, path.stat().st_size)
    values = file.pixel_array
    slope, intercept = float(file.get("RescaleSlope", 1)), float(file.get("RescaleIntercept", 0))
    if (slope, intercept) != (1, 0):
        values = values.astype(np.float32) * np.float32(slope) + np.float32(intercept)
    colour = int(file.get("SamplesPerPixel", 1)) > 1
    raw = planes(path, values, ("I" if values.ndim == 3 + colour else "") + "YX" + "C" * colour)
    return raw if spec.noise is None else with_noise(raw, file.get(spec.noise), spec.noise)


FORMAT = Format("DICOM", named(".dcm", ".dicom"), _open, _open)
