"""Generated images back to files: a folder of PNGs, or one npz.

Each file is written whole and under the seed of its image, so an interrupted job that is started again
makes only what is missing. What job that is stands in a hidden file, which no reader of images sees.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from assay.files import differences, read_json, remove_leftovers, write_whole

_JOB = ".job.json"


def to_pixels(images: Tensor) -> np.ndarray:
    """(B, C, H, W) in [-1, 1] -> (B, H, W, C) uint8; values beyond are clipped."""
    pixels = ((images.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return pixels.permute(0, 2, 3, 1).cpu().numpy()


def png_path(folder: Path, seed: int) -> Path:
    """Where the image of a seed goes."""
    return folder / f"{seed:06d}.png"


def check_job(folder: Path, job: Mapping[str, Any]) -> None:
    """Refuse a folder with images of seeds that are, or may be, of another job; `job` holds plain values."""
    remove_leftovers(folder)
    # Whatever their seeds: once there is a job in the folder, they pass for images of it.
    present = sorted(path for path in folder.glob("??????*.png") if path.stem.isdigit())
    if not present:
        return
    if not (folder / _JOB).exists():
        raise ValueError(
            f"{present[0]} exists, and nothing says how it was made: choose another folder, or remove this one"
        )
    if different := differences(read_json(folder / _JOB), dict(job)):
        raise ValueError(
            f"{folder} holds images that were made otherwise ({'; '.join(different)}): choose another folder, "
            "or remove this one"
        )


def write_job(folder: Path, job: Mapping[str, Any]) -> None:
    """Say in a folder which job its images are of."""
    with write_whole(folder / _JOB) as partial:
        partial.write_text(json.dumps(job, indent=2))


def missing_seeds(folder: Path, seeds: Sequence[int]) -> list[int]:
    """The seeds whose image is not in the folder yet."""
    present = {path.stem for path in folder.glob("*.png")} if folder.exists() else set()
    return [seed for seed in seeds if f"{seed:06d}" not in present]


def write_pngs(folder: Path, seeds: Sequence[int], images: Tensor) -> None:
    """One PNG per image, lossless."""
    for seed, pixels in zip(seeds, to_pixels(images), strict=True):
        with write_whole(png_path(folder, seed)) as partial:
            Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels).save(partial)


def read_pngs(folder: Path, seeds: Iterable[int]) -> np.ndarray:
    """The images of these seeds as (N, H, W, C) uint8."""
    pixels = [np.asarray(Image.open(png_path(folder, seed))) for seed in seeds]
    return np.stack([image[..., None] if image.ndim == 2 else image for image in pixels])


def write_npz(path: Path, folder: Path, seeds: Sequence[int], label: Tensor | None) -> None:
    """Gather a folder of PNGs into one npz of `images` (N, H, W, C) uint8, `seeds` and, if any, `label`."""
    columns: dict[str, Any] = {"images": read_pngs(folder, seeds), "seeds": np.array(seeds)}
    if label is not None:
        columns["label"] = label.numpy()
    with write_whole(path) as partial:
        np.savez(partial, **columns)
