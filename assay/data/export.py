"""Images back to files, as pictures or in the units of the data they were learned from.

As uint8 they are pictures: black is 0, white 255, values outside are clipped. uint16 and float32 are in the
data's own units, the one in whole numbers. A job that makes many images writes each file whole, under the
image's own name. Started again, it makes only what is missing; the request is kept in a hidden file.
"""

import csv
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from pydantic import TypeAdapter
from torch import Tensor

from assay.archives import read_npy
from assay.data.picture import image_grid, to_uint8
from assay.data.units import PhysicalRange, black_and_white, to_physical
from assay.errors import AssayError, Rules, check, extra
from assay.files import differences, read_json, remove_leftovers, write_text, write_whole

Format = Literal["png", "tiff", "npy", "fits"]
ExportDType = Literal["uint8", "uint16", "float32"]
_SUFFIX = {"png": ".png", "tiff": ".tif", "npy": ".npy", "fits": ".fits"}
_KIND = {".png": "grid", ".npz": "npz", ".npy": "npy", ".tif": "tiff", ".tiff": "tiff", ".fits": "fits"}
_JOB = ".job.json"


def to_values(images: Tensor, dtype: ExportDType, physical_range: PhysicalRange | None) -> np.ndarray:
    """(B, C, H, W) in [-1, 1] -> (B, H, W, C) as a file holds them.

    In the data's units the value is low + (x + 1) (high - low) / 2, with `physical_range` = (low, high), or
    what a sensor that counts photons would show (`assay.data.units`).
    """
    images = images.detach().float().cpu().permute(0, 2, 3, 1)
    if dtype == "uint8":
        return to_uint8(images).numpy()
    assert physical_range is not None, "`open_target` asks for it"
    values = to_physical(images.numpy(), physical_range)
    return np.rint(values.clip(0, 65535)).astype(np.uint16) if dtype == "uint16" else values.astype(np.float32)


@dataclass(frozen=True)
class Target:
    """Where the images of a job go: `path`, one file per image in a folder, or one file made of these parts."""

    path: Path
    kind: Literal["folder", "grid", "npz", "npy", "tiff", "fits"]
    format: Format  # of one image's file
    dtype: ExportDType
    physical_range: PhysicalRange | None

    @property
    def folder(self) -> Path:
        """Where single images are written; parts of one file lie beside it until it is made."""
        return self.path if self.kind == "folder" else self.path.with_name(self.path.name + ".parts")

    def file(self, name: str) -> Path:
        """Where an image of this name goes."""
        return self.folder / (name + _SUFFIX[self.format])

    def check_job(self, job: Mapping[str, Any], names: Sequence[str] = ()) -> None:
        """Reject a folder with images that are, or may be, of another job; `job` holds plain values.

        Images of these `names`, or numbered ones: with a job in the folder, they pass for images of it.
        """
        remove_leftovers(self.folder)
        stems = set(names)
        images = [path for path in sorted(self.folder.glob("*")) if path.suffix in _SUFFIX.values()]
        present = [p for p in images if p.stem in stems or re.fullmatch(r"\d{6,}(-\d+)?", p.stem)]
        present += self.folder.glob("images.csv")  # which a job writes, too
        if not present:
            return
        record, cure = self.folder / _JOB, "choose another folder, or remove it"
        if not record.exists():
            raise AssayError("exists already, and nothing says how it was made", path=present[0], cure=cure)
        if different := differences(read_json(record), self._full(job)):
            what = f"holds images made with other settings ({'; '.join(different)})"
            raise AssayError(what, path=self.folder, cure=cure)

    def write_job(self, job: Mapping[str, Any]) -> None:
        """Record which job the images of the folder belong to."""
        write_text(self.folder / _JOB, json.dumps(self._full(job), indent=2))

    def _full(self, job: Mapping[str, Any]) -> dict[str, Any]:
        units = TypeAdapter(PhysicalRange | None).dump_python(self.physical_range, mode="json")
        values = {"dtype": self.dtype, "physical_range": units}
        return {**job, "format": self.format, **(values if self.dtype != "uint8" else {"dtype": "uint8"})}

    def missing(self, names: Sequence[str]) -> list[int]:
        """The positions in `names` whose image is not in the folder yet, or is empty after a power cut."""
        suffix = _SUFFIX[self.format]
        found = os.scandir(self.folder) if self.folder.exists() else ()
        present = {file.name for file in found if file.is_file() and file.stat().st_size}
        return [position for position, name in enumerate(names) if name + suffix not in present]

    def write(self, names: Sequence[str], images: Tensor) -> None:
        """One file per image (B, C, H, W) in [-1, 1]."""
        for name, values in zip(names, to_values(images, self.dtype, self.physical_range), strict=True):
            with write_whole(self.file(name), flush=False) as partial:
                _save(partial, values, self.format)

    def collect(self, names: Sequence[str], columns: Mapping[str, Any]) -> None:
        """Finish a job. A folder gets `images.csv` with the columns; a file is made of all images.

        An npz holds `images` (N, H, W, C) and the columns; npy, TIFF and FITS hold the images as one stack.
        """
        if self.kind == "folder":
            files = [self.file(name).name for name in names]
            with write_whole(self.path / "images.csv") as part, open(part, "w", newline="") as table:
                writer = csv.writer(table)
                writer.writerow(["filename", *columns])
                writer.writerows(zip(files, *columns.values(), strict=True))
            return
        stack = np.stack([read_npy(self.file(name)) for name in names])
        stack = stack[..., None] if stack.ndim == 3 else stack
        with write_whole(self.path) as partial:
            if self.kind == "npz":
                np.savez(partial, images=stack, **columns)
            elif self.kind == "grid":
                pixels = torch.from_numpy(stack).permute(0, 3, 1, 2).float() / 127.5 - 1
                image_grid(pixels, max(1, round(len(names) ** 0.5))).save(partial)
            else:
                _save(partial, stack, self.kind)
        for file in (*map(self.file, names), self.folder / _JOB):
            file.unlink()
        self.folder.rmdir()


def names_like(sources: Sequence[str]) -> list[str]:
    """Names of files made from these: `cells/a.tif` -> `cells-a`, `s.npy[7]` -> `s-000007`; each once."""
    names = []
    for source in sources:
        name = re.sub(r"\.[a-zA-Z]\w{1,5}(\.gz)?(?=$|\[)", "", source)
        name = re.sub(r"\[(\d+)\]$", lambda found: f"-{int(found[1]):06d}", name)
        name = "".join(char if char.isprintable() and char not in "[]/\\:*?\"<>|,'" else "-" for char in name)
        names.append(name.strip("-. ")[:80])
    is_unique = len({name.casefold() for name in names}) == len(names) and all(names)
    return names if is_unique else [f"{i:06d}-{name}".rstrip("-") for i, name in enumerate(names)]


def open_target(
    path: Path,
    num_channels: int,
    physical_range: PhysicalRange | None,
    format: Format = "png",
    dtype: ExportDType | None = None,
) -> Target:
    """The target that a path describes: .npz, .npy, .tif, .fits or .png (a grid) is one file, else a folder.

    `format` is the kind of files in a folder. `dtype` is by default uint8 for pictures and npz, else float32.
    """
    suffix = path.suffix.lower()
    kind: Any = _KIND.get(suffix, "folder")
    picture = kind == "grid" or (kind == "folder" and format == "png")
    dtype = dtype or ("uint8" if picture or kind == "npz" else "float32")

    def rules() -> Rules:
        is_file = suffix not in _KIND and re.fullmatch(r"\.[a-z]+\d*", suffix) and not path.is_dir()
        cure = f"name a folder, or a {', '.join(sorted(_KIND))} file"
        yield is_file, AssayError(f"{suffix} files are not written", path=path, cure=cure)
        what = f"a PNG holds 8-bit grey or colour, not {num_channels} channels of {dtype}"
        key, cure = "format" if dtype == "uint8" else "dtype", "use format = tiff, npy or fits"
        wrong = picture and (dtype != "uint8" or num_channels not in (1, 3))
        yield wrong, AssayError(what, path=path, key=key, cure=cure)
        what = f"{dtype} is in the units of the data, but values of black and white are not recorded, or differ"
        cure = "give them as the range, or use uint8"
        yield dtype != "uint8" and physical_range is None, AssayError(what, key="dtype", cure=cure)
        low, high = black_and_white(physical_range or (0, 65535))
        what = f"uint16 holds whole numbers from 0 to 65535, but the data ranges from {low:g} to {high:g}"
        wrong = dtype == "uint16" and (low < 0 or high > 65535 or high - low < 255)
        yield wrong, AssayError(what, key="dtype", cure="use float32")

    check(rules())
    if "fits" in (kind, format if kind == "folder" else ""):
        extra("astropy.io.fits", "fits", "writing FITS files")
    return Target(path, kind, format if kind == "folder" else "npy", dtype, physical_range)


def _save(path: Path, values: np.ndarray, format: str) -> None:
    """Write (..., H, W, C) to a file; one channel is left out, and FITS has channels first."""
    grey = values.shape[-1] == 1
    flat = values[..., 0] if grey else values
    match format:
        case "png":
            Image.fromarray(flat).save(path)
        case "tiff":
            import tifffile

            kind: dict[str, Any] = {"photometric": "rgb" if values.shape[-1] == 3 else "minisblack"}
            if not grey:
                kind["planarconfig"] = "contig"
            tifffile.imwrite(path, flat, **kind)
        case "npy":
            np.save(path, flat)
        case "fits":
            fits = extra("astropy.io.fits", "fits", "writing FITS files")
            fits.PrimaryHDU(flat if grey else np.moveaxis(values, -1, -3)).writeto(path)
