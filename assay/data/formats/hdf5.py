"""HDF5: a data set (N, H, W[, C]); its noise is another data set or an attribute."""

from pathlib import Path

from assay.data.readers import Format, RawImages
from assay.data.scientific import named, open_tree
from assay.data.spec import SourceSpec
from assay.errors import extra


def _open(path: Path, spec: SourceSpec) -> RawImages:
    return open_tree(path, extra("h5py", "hdf5", "reading HDF5 files").File(path, "r"), spec)


FORMAT = Format("HDF5", named(".h5", ".hdf5"), _open, _open)
