"""From a checkpoint to files: new images from seeds, and a store's own noisy images denoised or restored.

An image depends on its seed alone, so a job gives the same files on any number of devices and in any batch
size, and one that was interrupted makes only what is missing.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from assay.checkpoint import Checkpoint, CheckpointInfo, find_checkpoint, load_checkpoint
from assay.data import ImageSource, Store, open_store, usable
from assay.data.export import ExportDType, Format, Target, open_target
from assay.data.store import PackedImage, Parents, write_store
from assay.data.units import PhysicalRange
from assay.data.view import (
    check_complete,
    image_seeds,
    incomplete,
    read_kernel,
    read_levels,
    stream,
    with_uniform_noise,
)
from assay.denoise import Denoiser, Given, convolution
from assay.devices import NumDevices, find_device, open_fabric
from assay.files import sha256
from assay.noise import per_image
from assay.sample import (
    SampleConfig,
    SeededNoise,
    edm_sigmas,
    flow_down,
    padded_batches,
    sample_posterior,
    solve,
    spread_labels,
)

SIGMA_MIN, SIGMA_MAX = 0.002, 80.0  # the ends of EDM's grid
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
    physical_range: PhysicalRange | None = None,
    batch_size: int = 64,
    device: str = "auto",
    devices: NumDevices = "auto",
    progress: Progress = lambda done, total: None,
) -> Generated:
    """Generate one image per seed; files are named by seed (see `open_target` for `output` and formats).

    `label` generates one class; by default classes are drawn evenly. `physical_range` overrides the one that
    the checkpoint records.
    """
    loaded, checkpoint = load_checkpoint(checkpoint), find_checkpoint(checkpoint)
    warn_of_full_sampling(sample, loaded.info)
    sample = sample.for_levels(level for level, _ in loaded.info.sigma_tn)
    num_classes = loaded.config.num_classes
    if label is not None and not 0 <= label < num_classes:
        raise ValueError(
            f"label = {label}: {checkpoint} has {num_classes} classes, numbered from 0"
            if num_classes
            else f"label = {label}: {checkpoint} was trained without classes"
        )
    shape = loaded.config.image_shape
    target = open_target(output, shape[0], physical_range or loaded.info.physical_range, format, dtype)
    classes = None
    if num_classes:
        even = spread_labels([1.0] * num_classes, seeds)
        classes = even if label is None else torch.full_like(even, label)
    job = {"checkpoint": sha256(checkpoint)[:16], "class": label, **sample.model_dump(mode="json")}
    if sample.guide is not None:
        job["guide"] = sha256(find_checkpoint(sample.guide))[:16]

    def make(mine: list[int], on: torch.device) -> Iterator[Tensor]:
        of_mine = None if classes is None else classes[mine]
        denoiser = loaded.sampler(sample, on)
        for batch in sample.generate(denoiser, [seeds[i] for i in mine], shape, of_mine, batch_size, on):
            yield batch.images

    columns = {"seeds": list(seeds)} | ({} if classes is None else {"label": classes.numpy()})
    names = [f"{seed:06d}" for seed in seeds]
    return _run(target, job, names, columns, make, device, devices, progress)


def denoise_to_files(
    checkpoint: Path,
    store: Path,
    output: Path,
    num_samples: int = 0,
    sample: SampleConfig = SampleConfig(),  # noqa: B008
    seed: int = 0,
    format: Format = "tiff",
    dtype: ExportDType | None = None,
    batch_size: int = 64,
    device: str = "auto",
    devices: NumDevices = "auto",
    progress: Progress = lambda done, total: None,
) -> Generated:
    """Denoise the images of a store, each from its own noise level, in the store's own units.

    By default each image becomes its posterior mean E[x_0 | x_tn], one evaluation of the network. With
    `num_samples` = K it becomes K draws from the posterior (see `assay.sample.sample_posterior`); `sample`
    gives their `num_steps`, `sigma_min`, `rho` and `truncate_at`. Clean images stay as they are. Images with a
    map of noise levels get noise up to their highest level first: the network knows one level per image.

    Files are named by the image's number in the store (and draw); `images.csv` in the folder, or columns of
    an npz, tell which file each came from.
    """
    loaded, checkpoint = load_checkpoint(checkpoint), find_checkpoint(checkpoint)
    images = open_store(store)
    check_complete(images, "cannot be denoised: complete them with `assay restore`")
    noisy = with_uniform_noise(images, seed)
    _check_denoising(loaded, images, num_samples)
    sample = sample.for_levels(level for level, _ in loaded.info.sigma_tn)
    lowest = sample.truncate_at if isinstance(sample.truncate_at, float) else sample.sigma_min
    label = None
    if num_classes := loaded.config.num_classes:
        label = images.label if images.num_classes == num_classes else torch.full((len(images),), -1)
    target = open_target(output, images.image_shape[0], images.physical_range, format, dtype)
    job = {"checkpoint": sha256(checkpoint)[:16], "store": images.fingerprint[:16], "num_samples": num_samples}
    if num_samples:
        job |= {"seed": seed, "num_steps": sample.num_steps, "lowest": lowest, "rho": sample.rho}
    # One position per image and draw. Seeds are not those of noise that a view may have added to the images.
    num_draws = max(num_samples, 1)
    number = torch.arange(len(images)).repeat_interleave(num_draws)
    draw = torch.arange(num_draws).repeat(len(images))
    seeds = torch.empty_like(number)
    for k in range(num_draws):
        seeds[draw == k] = image_seeds(stream(seed, "posterior", k).initial_seed(), number[draw == k])

    def make(mine: list[int], on: torch.device) -> Iterator[Tensor]:
        denoiser = loaded.denoiser.to(on).eval()
        for index, padded in padded_batches(len(mine), batch_size):
            at = torch.tensor([mine[i] for i in padded])
            x_tn, sigma_tn = noisy.read(number[at]).to(on), images.sigma_tn[number[at]].to(on)
            level = sigma_tn.where(sigma_tn > 0, lowest)  # a clean image goes along, and is put back below
            classes = None if label is None else label[number[at]].to(on)
            if num_samples:
                noise = SeededNoise(seeds[at].tolist(), images.image_shape, on)
                grid = sample.num_steps, lowest, sample.rho
                x_0 = sample_posterior(denoiser, x_tn, level, noise, *grid, classes)
            else:
                with torch.no_grad():
                    x_0 = denoiser(x_tn, level, classes)
            yield x_0.where(per_image(sigma_tn, x_tn) > 0, x_tn)[: len(index)]

    names = [f"{i:06d}" for i in number.tolist()]
    if num_samples:
        names = [f"{name}-{k:03d}" for name, k in zip(names, draw.tolist(), strict=True)]
    columns = {"source": images.source_names(number.tolist()), "sigma_tn": images.sigma_tn[number].numpy()}
    return _run(target, job, names, columns, make, device, devices, progress)


class RestoreConfig(BaseModel):
    """How noisy images are restored, each from its own noise level.

    "flow" follows the probability flow, "sample" draws from the posterior. Below the lowest noise of a data set
    without clean images a model has learnt nothing; `restore` then stops there, with the posterior mean.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    method: Literal["flow", "sample"] = Field(
        "flow", description="Follow the probability flow from each image, or draw from its posterior."
    )
    num_steps: int = Field(16, ge=2, description="Steps from an image's own noise level down.")
    keep: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of the noise level that stays in restored images, to the power of the loop; 0 "
        "removes all noise, 0.5 halves it in each loop.",
    )

    @model_validator(mode="after")
    def _check(self) -> "RestoreConfig":
        if self.keep and self.method == "sample":
            raise ValueError("keep leaves noise in restored images, which only method = flow can")
        return self


def restore(
    denoiser: Denoiser,
    source: ImageSource,
    path: Path,
    checkpoint: str,
    config: RestoreConfig = RestoreConfig(),  # noqa: B008
    stop_at: float = SIGMA_MIN,
    seed: int = 0,
    batch_size: int = 64,
    device: torch.device | str = "cpu",
    progress: Progress = lambda done, total: None,
) -> Store:
    """Write a store of restored images, one for each image of `source`, in the same order.

    The noise falls to `stop_at`, where the model's prediction is taken, or to `config.keep` of an image's
    level. Restored images are usable from the level of the noise that was removed: they are not clean. Images
    with missing pixels or seen through a kernel become draws from their posterior (see `Given`), usable from
    the highest level only. The store records how they were made, and `checkpoint`, the SHA-256 of the
    denoiser's file.
    """
    num_classes = getattr(denoiser, "num_classes", 0)
    label = source.label if source.num_classes == num_classes else torch.full((len(source),), -1)
    noisy = (source.sigma_tn > 0).nonzero()[:, 0]
    seeds = image_seeds(stream(seed, "restored").initial_seed(), torch.arange(len(source)))
    is_incomplete = incomplete(source)
    if config.keep and bool(is_incomplete.any()):
        raise ValueError(
            f"keep = {config.keep:g}: {source.name} has images with missing pixels or a kernel, "
            "which are restored without noise only"
        )

    def images() -> Iterator[PackedImage]:
        done = 0
        for start in range(0, len(source), batch_size):
            index = torch.arange(start, min(start + batch_size, len(source)))
            x = source.read(index)
            for chosen in (~is_incomplete[index], is_incomplete[index]):
                mine = index[chosen & (source.sigma_tn[index] > 0)]
                if len(mine) == 0:
                    continue
                padded = torch.cat([mine, mine[-1:].expand(max(0, batch_size - len(mine)))])
                x_tn, sigma_tn = source.read(padded).to(device), source.sigma_tn[padded].to(device)
                classes = label[padded].to(device) if num_classes else None
                noise = SeededNoise(seeds[padded].tolist(), source.image_shape, device)
                if bool(is_incomplete[mine[0]]):
                    levels, kernel = read_levels(source, padded).to(device), read_kernel(source, padded)
                    operator = None if kernel is None else convolution(kernel.to(device))
                    given = Given(denoiser, x_tn, levels, operator=operator)
                    grid = edm_sigmas(config.num_steps, stop_at, SIGMA_MAX)
                    x_0 = solve(given, SIGMA_MAX * noise(), grid, label=classes)
                else:
                    x_0 = _restore_batch(denoiser, x_tn, sigma_tn, noise, config, stop_at, classes)
                x[mine - start] = x_0[: len(mine)].cpu()
                done += len(mine)
            for row, i in enumerate(index.tolist()):
                level, label_there = float(source.sigma_tn[i]), int(source.label[i])
                values, left = x[row].numpy(), config.keep * level
                usable_from = SIGMA_MAX if bool(is_incomplete[i]) else level
                yield PackedImage(f"{i:06d}", values, left, label_there, usable_from, source.physical_range)
            progress(done, len(noisy))

    method = {**config.model_dump(), "stop_at": stop_at, "seed": seed}
    parents = Parents(images=source.fingerprint, checkpoint=checkpoint, method=method)
    name = f"{source.name}, restored"
    return write_store(
        path, name, images(), source.image_shape, "float32", (-1, 1), source.class_names, parents
    )


@torch.no_grad()
def _restore_batch(
    denoiser: Denoiser,
    x_tn: Tensor,
    sigma_tn: Tensor,
    noise: SeededNoise,
    config: RestoreConfig,
    stop_at: float,
    label: Tensor | None,
) -> Tensor:
    """Images `x_tn` (B, C, H, W) at levels `sigma_tn` (B,) > 0 without their noise, or with `keep` of it."""
    if config.method == "sample":
        return sample_posterior(denoiser, x_tn, sigma_tn, noise, config.num_steps, stop_at, label=label)
    if config.keep:
        return flow_down(denoiser, x_tn, sigma_tn, config.keep * sigma_tn, config.num_steps, label)
    end = sigma_tn.clamp(max=stop_at)
    if bool((end < sigma_tn).any()):
        x_tn = flow_down(denoiser, x_tn, sigma_tn, end, config.num_steps, label)
    return denoiser(x_tn, end, label)


def lowest_learnt(info: CheckpointInfo) -> float:
    """The level below which nothing taught a model: that of the cleanest image, unless it learnt otherwise."""
    if info.loops or info.consistency:
        return SIGMA_MIN
    return max(info.lowest_sigma_tn or 0.0, SIGMA_MIN)


def restore_store(
    checkpoint: Path,
    store: Path,
    output: Path,
    config: RestoreConfig = RestoreConfig(),  # noqa: B008
    seed: int = 0,
    batch_size: int = 64,
    device: str = "auto",
    progress: Progress = lambda done, total: None,
) -> Store:
    """Restore the noisy images of a store with a checkpoint, into a store of their own (see `restore`)."""
    loaded, checkpoint = load_checkpoint(checkpoint), find_checkpoint(checkpoint)
    images = open_store(store)
    _check_denoising(loaded, images, 0)
    if (Path(output) / "meta.json").exists():
        raise ValueError(f"{output} is a store already: choose another name, or remove it")
    on = find_device(device)
    source = with_uniform_noise(usable(images, seed), seed, allow_incomplete=True)
    denoiser, stop_at = loaded.denoiser.to(on).eval(), lowest_learnt(loaded.info)
    made_by = sha256(checkpoint)
    return restore(denoiser, source, output, made_by, config, stop_at, seed, batch_size, on, progress)


def _check_denoising(checkpoint: Checkpoint, store: Store, num_samples: int) -> None:
    """Reject images that the network is not for; warn if their values may mean something else to it."""
    if num_samples < 0:
        raise ValueError(f"num_samples = {num_samples}: expected a number of draws, or 0 for the mean")
    shape, trained_on = checkpoint.config.image_shape, checkpoint.info.physical_range
    if store.image_shape != shape:
        raise ValueError(
            f"{store.path} has images of shape {store.image_shape}, the network is for {shape}: pack them at "
            "that size, or use another checkpoint"
        )
    if trained_on not in (None, store.physical_range):
        warnings.warn(
            f"{store.path} has black and white at {store.physical_range}, the training data had them at "
            f"{trained_on}: make sure that they mean the same",
            stacklevel=1,
        )


def warn_of_full_sampling(sample: SampleConfig, info: CheckpointInfo) -> None:
    """Warn where truncated sampling would likely be better: nothing taught the model the lowest levels."""
    if (lowest := lowest_learnt(info)) > SIGMA_MIN and sample.truncate_at is None:
        warnings.warn(
            f"this model saw no clean image (the lowest noise was {lowest:g}): truncate_at = auto is likely "
            "better than full sampling",
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
