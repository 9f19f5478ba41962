"""From a checkpoint to files: new images from seeds, and a store's own noisy images denoised.

An image depends on its seed alone, so a job gives the same files on any number of devices and in any batch
size, and one that was interrupted makes only what is missing.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.checkpoint import find_checkpoint, load_checkpoint
from assay.data.export import ExportDType, Format, Target, ValueRange, open_target
from assay.devices import NumDevices, open_fabric
from assay.files import sha256
from assay.sample import SampleConfig, spread_labels

Progress = Callable[[int, int], None]  # images made, images to make


@dataclass(frozen=True)
class Generated:
    """A finished job: where its images are, and how many were made now."""

    path: Path
    num_images: int
    num_made: int


def sample_to_files(
    checkpoint: Path,
    output: Path,
    seeds: Sequence[int],
    sample: SampleConfig = SampleConfig(),  # noqa: B008
    label: int | None = None,
    format: Format = "png",
    dtype: ExportDType | None = None,
    value_range: ValueRange | None = None,
    batch_size: int = 64,
    device: str = "auto",
    devices: NumDevices = 1,
    progress: Progress = lambda done, total: None,
) -> Generated:
    """Generate one image per seed; files are named by seed (see `open_target` for `output` and formats).

    `label` generates one class; by default classes are drawn evenly. `value_range` overrides the one that
    the checkpoint records.
    """
    checkpoint = find_checkpoint(checkpoint)
    loaded = load_checkpoint(checkpoint)
    warn_of_full_sampling(sample, loaded.info.lowest_sigma_tn)
    sample = sample.for_levels(level for level, _ in loaded.info.sigma_tn)
    num_classes = loaded.config.num_classes
    if label is not None and not 0 <= label < num_classes:
        raise ValueError(
            f"label = {label}: {checkpoint} has {num_classes} classes, numbered from 0"
            if num_classes
            else f"label = {label}: {checkpoint} was trained without classes"
        )
    shape = loaded.config.image_shape
    target = open_target(output, shape[0], value_range or loaded.info.value_range, format, dtype)
    classes = None
    if num_classes:
        even = spread_labels([1.0] * num_classes, seeds)
        classes = even if label is None else torch.full_like(even, label)
    job = {"checkpoint": sha256(checkpoint)[:16], "class": label, **sample.model_dump(mode="json")}

    def make(mine: list[int], on: torch.device) -> Iterator[Tensor]:
        of_mine = None if classes is None else classes[mine]
        denoiser = loaded.denoiser.to(on).eval()
        for batch in sample.generate(denoiser, [seeds[i] for i in mine], shape, of_mine, batch_size, on):
            yield batch.images

    columns = {"seeds": list(seeds)} | ({} if classes is None else {"label": classes.numpy()})
    names = [f"{seed:06d}" for seed in seeds]
    return _run(target, job, names, columns, make, device, devices, progress)


def warn_of_full_sampling(sample: SampleConfig, lowest_sigma_tn: float | None) -> None:
    """Warn where truncated sampling would likely be better: the data's lowest noise level is above 0."""
    if lowest_sigma_tn and sample.truncate_at is None:
        warnings.warn(
            f"this model saw no clean image (the lowest noise was {lowest_sigma_tn:g}): truncate_at = auto is "
            "likely better than full sampling, unless it was trained with the consistency loss",
            stacklevel=1,
        )


def _run(
    target: Target,
    job: Mapping[str, Any],
    names: Sequence[str],
    columns: Mapping[str, Any],
    make: Callable[[list[int], torch.device], Iterator[Tensor]],
    device: str,
    devices: NumDevices,
    progress: Progress,
) -> Generated:
    """Write the images that `make(positions, device)` yields in batches, split over the devices."""
    fabric = open_fabric(device, devices)
    target.check_job(job)
    fabric.barrier()  # no device may take another's first images for those of another job
    if fabric.is_global_zero:
        target.write_job(job)
    missing = target.missing(names)
    mine = missing[fabric.global_rank :: fabric.world_size]
    fabric.barrier()  # all devices list what is missing before any writes
    done = 0
    for images in make(mine, fabric.device):
        target.write([names[i] for i in mine[done : done + len(images)]], images)
        done += len(images)
        if fabric.is_global_zero:
            progress(done, len(mine))
    fabric.barrier()
    if fabric.is_global_zero:
        target.collect(names, columns)
    return Generated(target.path, len(names), len(missing))
