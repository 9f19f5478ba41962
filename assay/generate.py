"""From a checkpoint to files: new images from seeds, and a store's own noisy images denoised or restored.

An image depends on its seed alone, so a job gives the same files on any number of devices and in any batch
size, and one that was interrupted makes only what is missing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from pydantic import Strict as Lax
from torch import Tensor

from assay.checkpoint import Checkpoint, CheckpointInfo, find_checkpoint, load_checkpoint
from assay.data import ImageSource, Store, open_store, usable
from assay.data.export import ExportDType, Format, Target, names_like, open_target
from assay.data.spec import Range
from assay.data.store import PackedImage, Parents, write_store
from assay.data.units import as_settings
from assay.data.view import image_seeds, stream, with_uniform_noise
from assay.denoise import Denoiser, changes, warn_if_worse
from assay.devices import NumDevices, find_device, open_fabric
from assay.errors import AssayError, check_same, choose, warn
from assay.files import sha256
from assay.noise import per_image
from assay.sample import (
    Level,
    SampleConfig,
    SeededNoise,
    flow_down,
    padded_batches,
    padded_rows,
    sample_posterior,
    spread_labels,
)
from assay.settings import DEVICE, DEVICES, Strict

SIGMA_MIN = 0.002  # the end of EDM's grid
RESTORE_STEPS = 16  # of the flow from an image's own level down
Progress = Callable[[int, int], None]  # images made, images to make


class FilesConfig(Strict):
    """How images are written (see `assay.data.export`)."""

    format: Format | None = Field(None, description="Kind of files. Default: png; tiff for denoised images.")
    dtype: ExportDType | None = Field(
        None,
        description="uint8 is 0 to 255, others are in the data's units. Default: uint8 for PNG and samples.",
    )
    range: Annotated[Range | None, Lax(False)] = Field(
        None, description="Black and white of what is written; values are rescaled. Default: the data's."
    )


class ComputeConfig(Strict):
    """Where images are computed, and how many at a time."""

    batch_size: int = Field(64, ge=1, description="Images at a time. Changes the speed, not the result.")
    device: str = Field("auto", description=DEVICE)
    devices: NumDevices = Field("auto", description=DEVICES, examples=["N", "auto"])


def sample_to_files(
    checkpoint: Path,
    output: Path,
    seeds: Sequence[int],
    sample: SampleConfig = SampleConfig(),  # noqa: B008
    label: int | str | None = None,
    files: FilesConfig = FilesConfig(),  # noqa: B008
    compute: ComputeConfig = ComputeConfig(),  # noqa: B008
    progress: Progress = lambda done, total: None,
) -> int:
    """Generate one image per seed, by which files are named (see `open_target` for formats); returns how many.

    `label` generates one class, a name or a number; by default classes are drawn evenly.
    """
    loaded = load_checkpoint(checkpoint)
    warn_of_full_sampling(sample, loaded.info)
    sample = sample.for_levels(level for level, _ in loaded.info.sigma_tn)
    num_classes = loaded.config.num_classes
    label = None if label is None else class_number(loaded, label)
    shape, units = loaded.config.image_shape, files.range or loaded.info.physical_range
    target = open_target(output, shape[0], units, files.format or "png", files.dtype)
    classes = None
    if num_classes:
        even = spread_labels([1.0] * num_classes, seeds)
        classes = even if label is None else torch.full_like(even, label)
    job = {"checkpoint": _hash(checkpoint), "class": label, **sample.model_dump(mode="json")}

    def make(mine: list[int], on: torch.device) -> Iterator[Tensor]:
        of_mine = None if classes is None else classes[mine]
        denoiser, its_seeds = loaded.denoiser.to(on).eval(), [seeds[i] for i in mine]
        yield from sample.generate(denoiser, its_seeds, shape, of_mine, compute.batch_size, on)

    columns = {"seeds": list(seeds)} | ({} if classes is None else {"label": classes.numpy()})
    return _run(target, job, [f"{seed:06d}" for seed in seeds], columns, make, compute, progress)


def class_number(loaded: Checkpoint, label: int | str) -> int:
    """The number of the class that a name or a number stands for."""
    if not (num_classes := loaded.config.num_classes):
        cure = "leave it out, or train with class_conditional = true"
        raise AssayError("the model was trained without classes", key="label", cure=cure)
    known = {str(k): k for k in range(num_classes)}
    return choose(str(label), known | {name: k for k, name in enumerate(loaded.info.label_names)}, "label")


class DenoiseConfig(Strict):
    """What denoised images are: posterior means, or draws from the posterior."""

    num_samples: int = Field(0, ge=0, description="Draws from the posterior of each image. 0: its mean.")
    num_steps: int = Field(18, ge=2, description="Steps of a draw, from an image's own noise level down.")
    truncate_at: Level | None = Field(None, description="End draws at this level; auto is the data's lowest.")
    seed: int = Field(0, description="Seed of the draws.")


def denoise_to_files(
    checkpoint: Path,
    store: Path,
    output: Path,
    config: DenoiseConfig = DenoiseConfig(),  # noqa: B008
    files: FilesConfig = FilesConfig(),  # noqa: B008
    compute: ComputeConfig = ComputeConfig(),  # noqa: B008
    progress: Progress = lambda done, total: None,
) -> int:
    """Denoise the images of a store, each from its own noise level, in the store's own units; returns how many.

    Each becomes its posterior mean E[x_0 | x_tn], or `num_samples` draws from the posterior. Clean images stay
    as they are. Images with a map of noise levels get noise up to their highest level first. Files are named
    like those that the images came from (and by draw), as `images.csv` or columns of an npz also tell.
    """
    loaded, images = _opened(checkpoint, store)
    if not images.sigma_tn.any():
        warn(f"all images of {images.name} count as clean, and stay as they are")
    noisy = with_uniform_noise(images, config.seed)
    levels = (level for level, _ in loaded.info.sigma_tn)
    stop = SampleConfig(truncate_at=config.truncate_at).for_levels(levels).truncate_at
    lowest = stop if isinstance(stop, float) else SIGMA_MIN
    label = None
    if num_classes := loaded.config.num_classes:
        label = images.label if images.num_classes == num_classes else torch.full((len(images),), -1)
    channels, units = images.image_shape[0], files.range or images.physical_range
    dtype = files.dtype or ("float32" if output.suffix.lower() == ".npz" else None)  # not a picture, as samples
    target = open_target(output, channels, units, files.format or "tiff", dtype)
    job: dict[str, Any] = {"checkpoint": _hash(checkpoint), "store": images.fingerprint[:16]}
    job |= {**config.model_dump(), "lowest": lowest} if config.num_samples else {"num_samples": 0}
    num_draws, every = max(config.num_samples, 1), torch.arange(len(images))
    number = every.repeat_interleave(num_draws)  # one position for each image and draw, and a seed
    streams = [stream(config.seed, "posterior", k).initial_seed() for k in range(num_draws)]
    seeds = torch.stack([image_seeds(each, every) for each in streams], 1).flatten()
    changed = [torch.empty(0)]

    @torch.no_grad()
    def make(mine: list[int], on: torch.device) -> Iterator[Tensor]:
        denoiser = loaded.denoiser.to(on).eval()
        for index, padded in padded_batches(len(mine), compute.batch_size):
            at = torch.tensor([mine[i] for i in padded])
            x_tn, sigma_tn = noisy.read(number[at]).to(on), images.sigma_tn[number[at]].to(on)
            level = sigma_tn.where(sigma_tn > 0, lowest)  # a clean image goes along, and is put back below
            classes = None if label is None else label[number[at]].to(on)
            if config.num_samples:
                noise = SeededNoise(seeds[at].tolist(), images.image_shape, on)
                x_0 = sample_posterior(denoiser, x_tn, level, noise, config.num_steps, lowest, label=classes)
            else:
                x_0 = denoiser(x_tn, level, classes)
                whole = slice(len(index))  # the last batch is filled up
                changed.append(changes(x_tn[whole], x_0[whole], sigma_tn[whole]))
            yield x_0.where(per_image(sigma_tn, x_tn) > 0, x_tn)[: len(index)]

    sources = images.source_names(range(len(images)))
    draws = [f"-{k:03d}" for k in range(num_draws)] if config.num_samples else [""]
    names = [name + draw for name in names_like(sources) for draw in draws]
    columns = {"source": [sources[i] for i in number.tolist()], "sigma_tn": images.sigma_tn[number].numpy()}
    num_made = _run(target, job, names, columns, make, compute, progress)
    warn_if_worse(torch.cat(changed))
    return num_made


@torch.no_grad()
def restore(
    denoiser: Denoiser,
    source: ImageSource,
    path: Path,
    checkpoint: str,
    stop_at: float = SIGMA_MIN,
    batch_size: int = 64,
    device: torch.device | str = "cpu",
    progress: Progress = lambda done, total: None,
) -> Store:
    """Write a store of restored images, one for each image of `source`, in the same order.

    Each follows the flow from its own noise level down to `stop_at`, where the prediction is taken, and is
    usable from the level of the noise that was removed: it is not clean. The store records how they were made,
    and `checkpoint`, the SHA-256 of the denoiser's file.
    """
    num_classes = getattr(denoiser, "num_classes", 0)
    label = source.label if source.num_classes == num_classes else torch.full((len(source),), -1)
    is_noisy = source.sigma_tn > 0

    def restored(mine: Tensor) -> Tensor:
        padded = torch.tensor(padded_rows(mine.tolist()))
        x_tn, sigma_tn = source.read(padded).to(device), source.sigma_tn[padded].to(device)
        classes, end = label[padded].to(device) if num_classes else None, sigma_tn.clamp(max=stop_at)
        if bool((end < sigma_tn).any()):
            x_tn = flow_down(denoiser, x_tn, sigma_tn, end, RESTORE_STEPS, classes)
        return denoiser(x_tn, end, classes)[: len(mine)].cpu()

    def images() -> Iterator[PackedImage]:
        num_done = 0
        for index in torch.arange(len(source)).split(batch_size):
            x = source.read(index)
            if len(mine := index[is_noisy[index]]):
                x[mine - index[0]] = restored(mine)
                num_done += len(mine)
            for row, i in zip(x.numpy(), index.tolist(), strict=True):
                about = 0.0, int(source.label[i]), float(source.sigma_tn[i]), source.physical_range
                yield PackedImage(f"{i:06d}", row, *about)
            progress(num_done, int(is_noisy.sum()))

    method = {"num_steps": RESTORE_STEPS, "stop_at": stop_at}
    parents = Parents(images=source.fingerprint, checkpoint=checkpoint, method=method)
    name, shape = f"{source.name}, restored", source.image_shape
    return write_store(path, name, images(), shape, "float32", (-1, 1), source.class_names, parents)


def lowest_learnt(info: CheckpointInfo) -> float:
    """The level below which nothing taught a model: that of the cleanest image, unless it learnt otherwise."""
    if info.rounds or info.consistency:
        return SIGMA_MIN
    return max(info.lowest_sigma_tn or 0.0, SIGMA_MIN)


def restore_store(
    checkpoint: Path,
    store: Path,
    output: Path,
    seed: int = 0,
    compute: ComputeConfig = ComputeConfig(),  # noqa: B008
    progress: Progress = lambda done, total: None,
) -> Store:
    """Restore the noisy images of a store with a checkpoint, into a store of their own (see `restore`)."""
    loaded, images = _opened(checkpoint, store)
    on, source = find_device(compute.device), with_uniform_noise(usable(images, seed), seed)
    how = sha256(find_checkpoint(checkpoint)), lowest_learnt(loaded.info), compute.batch_size, on, progress
    return restore(loaded.denoiser.to(on).eval(), source, output, *how)


def _hash(checkpoint: Path) -> str:
    return sha256(find_checkpoint(checkpoint))[:16]


def _opened(checkpoint: Path, store: Path) -> tuple[Checkpoint, Store]:
    """A model and images that it is for; a warning if their values may mean something else to it."""
    loaded, images = load_checkpoint(checkpoint), open_store(store)
    shape, trained_on = loaded.config.image_shape, loaded.info.physical_range
    what = "its images and the network differ in shape"
    cure = "pack them at that size; `assay data pack --patch` cuts larger ones"
    check_same(images.image_shape, shape, what, path=store, cure=cure)
    if trained_on not in (None, images.physical_range):
        units = as_settings(images.physical_range) if images.physical_range else "several ranges"
        what = f"{store} was packed with {units}, the training images with {as_settings(trained_on)}"
        warn(f"{what}: pack it with the latter, unless its values mean something else")
    return loaded, images


def warn_of_full_sampling(sample: SampleConfig, info: CheckpointInfo) -> None:
    """Warn where nothing taught the model the lowest levels; which way samples better depends on the model."""
    if (lowest := lowest_learnt(info)) > SIGMA_MIN and sample.truncate_at is None:
        seen = f"this model saw no clean image (the lowest noise was {lowest:g})"
        warn(f"{seen}: detail below that is a guess, and truncate_at = auto stops there")


def _run(
    target: Target,
    job: Mapping[str, Any],
    names: Sequence[str],
    columns: Mapping[str, Any],
    make: Callable[[list[int], torch.device], Iterator[Tensor]],
    compute: ComputeConfig,
    progress: Progress,
) -> int:
    """Write the images that `make(positions, device)` yields in batches, split over the devices."""
    fabric = open_fabric(compute.device, compute.devices)
    target.check_job(job, names)
    fabric.barrier()  # no device may take another's first images for those of another job
    if fabric.is_global_zero:
        target.write_job(job)
    mine = target.missing(names)[fabric.global_rank :: fabric.world_size]
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
    return len(names)
