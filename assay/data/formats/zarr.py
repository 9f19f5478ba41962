"""zarr: an array, one of a group, or the full resolution of an OME-Zarr image."""

from dataclasses import replace
from pathlib import Path

from assay.data.readers import Format, RawImages
from assay.data.scientific import array_axes, check_chunks, open_tree, planes
from assay.data.spec import SourceSpec
from assay.errors import extra


def _is_zarr(path: Path) -> bool:
    return path.is_dir() and any((path / mark).exists() for mark in ("zarr.json", ".zgroup", ".zarray"))


def _open(path: Path, spec: SourceSpec) -> RawImages:
    opened = extra("zarr", "zarr", "reading zarr files").open(str(path), mode="r")
    if hasattr(opened, "shape"):
        check_chunks(path, opened)
        return planes(path, opened, array_axes(tuple(opened.shape)))
    multiscales = opened.attrs.get("multiscales") or opened.attrs.get("ome", {}).get("multiscales")
    if multiscales and spec.dataset is None:  # the first resolution is the full one
        image = multiscales[0]
        axes = "".join(axis["name"] if isinstance(axis, dict) else axis for axis in image.get("axes", "tczyx"))
        first = spec.model_copy(update={"dataset": image["datasets"][0]["path"]})
        return replace(open_tree(path, opened, first, axes), name=path.stem)
    return open_tree(path, opened, spec)


FORMAT = Format("zarr", _is_zarr, _open, _open)
