"""npz: one array of images as in npy, and besides it `label(s)` and `sigma_tn`, one for each image."""

from dataclasses import replace
from pathlib import Path

from assay.archives import read_npz
from assay.data.formats.npy import stacked
from assay.data.levels import Level
from assay.data.readers import Format, RawImages, numbered_classes
from assay.data.scientific import named
from assay.data.spec import SourceSpec
from assay.errors import AssayError


def _open(path: Path, spec: SourceSpec) -> RawImages:
    arrays = read_npz(path)
    stacks = [key for key, array in arrays.items() if array.ndim in (3, 4)]
    columns = {key.removesuffix("s"): array for key, array in arrays.items() if key not in stacks}
    if len(stacks) != 1 or columns.keys() - {"label", "sigma_tn"}:
        found = ", ".join(f"{key} {arrays[key].shape}" for key in sorted(arrays))
        cure = "give one array of images, (N, H, W[, C]), and besides it label and sigma_tn alone"
        raise AssayError(f"holds {found or 'nothing'}", cure=cure)
    raw = stacked(path.stem, path.name, arrays[stacks[0]], spec)
    num_images = len(raw.names)
    if "label" in columns:
        label, class_names = numbered_classes(columns["label"], path, num_images)
        raw = replace(raw, label=label, class_names=class_names)
    if "sigma_tn" in columns:
        sigma = columns["sigma_tn"]
        if sigma.shape != (num_images,) or sigma.dtype.kind not in "iuf":
            cure = f"give one number per image, ({num_images},)"
            raise AssayError(f"has sigma_tn {sigma.dtype} {sigma.shape}", key="sigma_tn", cure=cure)
        raw = replace(raw, levels=[Level(float(level), None, scaled=True) for level in sigma])
    return raw


FORMAT = Format("npz", named(".npz"), _open)
