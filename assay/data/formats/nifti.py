"""NIfTI: slices along the last axes."""

from pathlib import Path

from assay.archives import check_gzip
from assay.data.readers import Format, RawImages
from assay.data.scientific import named, planes
from assay.data.spec import SourceSpec
from assay.errors import extra


def _open(path: Path, spec: SourceSpec) -> RawImages:
    if path.suffix == ".gz":
        check_gzip(path)
    image = extra("nibabel", "nifti", "reading NIfTI files").load(path)
    return planes(path, image.dataobj, "XYZT"[: len(image.shape)])


FORMAT = Format("NIfTI", named(".nii", ".nii.gz"), _open, _open)
