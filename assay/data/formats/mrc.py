"""MRC: an image or a stack."""

from pathlib import Path
from typing import Any

from assay.data.readers import Format, RawImages
from assay.data.scientific import named, planes
from assay.data.spec import SourceSpec
from assay.errors import AssayError, extra


def _open(path: Path, spec: SourceSpec) -> RawImages:
    mrcfile = extra("mrcfile", "mrc", "reading MRC files")
    with open(path, "rb") as file:  # mrcfile allocates as much memory as this number says
        header = file.read(1024)
    byte_order: Any = "big" if header[212:213] == b"\x11" else "little"
    if int.from_bytes(header[92:96], byte_order, signed=True) > path.stat().st_size:
        raise AssayError("has an extended header that is longer than the file", cure="get it again")
    values = mrcfile.mmap(path, mode="r", permissive=False).data
    return planes(path, values, "YX" if values.ndim == 2 else "IYX")


FORMAT = Format("MRC", named(".mrc", ".mrcs", ".rec"), _open, _open)
