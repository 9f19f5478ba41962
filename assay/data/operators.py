"""Images seen through a known linear operator: blur, lines of k-space, fewer pixels.

One model covers them. Each image may have a kernel k, and pixels may be missing,

    y = k * x + s z,

with the circular convolution over H x W (`assay.denoise.convolution`) and white noise of level s, which is
infinite where a pixel is missing.

Blur: k is the image of a point. The circular convolution is wrong where the kernel reaches over a border, so
these pixels count as missing. The others are right whatever lies outside.

Lines of k-space: y is the inverse Fourier transform of the frequencies that were measured, with 0 for the
others, and k that of their mask. Frequencies f and -f of a real image are conjugate: if one was measured, both
were. What y has at the others does not matter, since the transform of k is 0 there.

Fewer pixels: k is the mean over F x F pixels, and only every F-th pixel is seen.

`assay.denoise.Conditioned` draws x given y, and `train.rounds` learn from these draws.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from assay.archives import read_npy
from assay.data.convert import MAX_PIXELS
from assay.data.levels import Level, LevelMap
from assay.data.readers import RawImages, Size
from assay.errors import AssayError


def with_kernel(raw: RawImages, path: Path) -> RawImages:
    """Blurred images, their kernel from a `.npy`: (h, w) for all, or (N, h, w) for each; odd and centred."""
    kernels = _read(raw, path, "kernel")
    if not all(side % 2 for side in kernels.shape[1:]):
        what, cure = f"has kernels of {_text(kernels.shape[1:])}", "give odd numbers of rows and columns"
        raise AssayError(what, path=path, key="kernel", cure=f"{cure}, with the centre in the middle")

    def operator(i: int, before: Size, size: Size) -> tuple[np.ndarray, np.ndarray]:
        small = kernels[i % len(kernels)].astype(np.float64)
        if any(mine > whole for mine, whole in zip(small.shape, size, strict=True)):
            what = f"has {_text(size)} pixels, its kernel {_text(small.shape)}"
            raise AssayError(what, path=path, key="kernel", cure="crop the kernel")
        kernel, seen = np.zeros(size), np.zeros(size, bool)
        kernel[: small.shape[0], : small.shape[1]] = small
        kernel = np.roll(kernel, [-(side // 2) for side in small.shape], (0, 1))
        reach = [place - side // 2 for place, side in zip(np.nonzero(small), small.shape, strict=True)]
        inside = (slice(max(0, *each), whole + min(0, *each)) for each, whole in zip(reach, size, strict=True))
        seen[tuple(inside)] = True
        return kernel, ~seen

    return replace(raw, operator=operator)


def with_kspace(raw: RawImages, path: Path) -> RawImages:
    """Images of which some frequencies were measured, their mask from a `.npy`: (H, W) for all, or (N, H, W).

    It is 1 where a frequency was measured, else 0, in the order of `numpy.fft.fft2`: the mean is at [0, 0].
    """
    masks = _read(raw, path, "kspace")
    if not np.isin(masks, (0, 1)).all():
        what = "has values other than 0 and 1"
        raise AssayError(what, path=path, key="kspace", cure="give a mask of what was measured")

    def operator(i: int, before: Size, size: Size) -> tuple[np.ndarray, np.ndarray]:
        mask = masks[i % len(masks)] > 0
        if not mask.shape == before == size:
            what = (
                f"has {_text(before)} pixels, {_text(size)} of them to be packed, its mask {_text(mask.shape)}"
            )
            raise AssayError(what, key="kspace", cure="give a mask of the image's size, and pack whole images")
        mask |= np.roll(mask[::-1, ::-1], 1, (0, 1))
        return np.fft.ifft2(mask).real, np.zeros(size, bool)

    return replace(raw, operator=operator)


def with_fewer_pixels(raw: RawImages, factor: int) -> RawImages:
    """Images whose pixels are the means of `factor` x `factor` others, at the size of these others.

    Each pixel is repeated, and all but the first one count as missing.
    """

    def enlarged(values: np.ndarray) -> np.ndarray:
        return values.repeat(factor, 0).repeat(factor, 1)

    def operator(i: int, before: Size, size: Size) -> tuple[np.ndarray, np.ndarray]:
        if before != size:
            what = f"has {_text(before)} pixels, not {_text(size)}, with those it lacks"
            cure = "make images of low resolution equal before packing, or cut patches"
            raise AssayError(what, key="downsampled", cure=cure)
        kernel, missing = np.zeros(size), np.ones(size, bool)
        kernel[np.ix_(-np.arange(factor), -np.arange(factor))] = 1 / factor**2
        missing[::factor, ::factor] = False
        return kernel, missing

    def pixels(i: int) -> np.ndarray:
        small = raw.pixels(i)
        if small.shape[0] * small.shape[1] * factor**2 > MAX_PIXELS:
            what = f"has {_text(small.shape[:2])} pixels, too many to be enlarged {factor} times"
            raise AssayError(what, key="downsampled", cure="give a smaller factor")
        return enlarged(small)

    def noise(i: int) -> Level | LevelMap:
        found = raw.noise(i)
        return found._replace(sigma=enlarged(found.sigma)) if isinstance(found, LevelMap) else found

    return replace(raw, pixels=pixels, noise=noise, operator=operator)


def _read(raw: RawImages, path: Path, key: str) -> np.ndarray:
    """An array (1, h, w) for all images or (N, h, w) with one for each."""
    found = read_npy(path)
    many = found.reshape(-1, *found.shape[-2:]) if found.ndim in (2, 3) and found.size else found[None]
    if found.dtype.kind not in "fiub" or many.ndim != 3 or len(many) not in (1, len(raw.names)):
        what, cure = f"holds {found.dtype} {found.shape} for {len(raw.names)} images", "give numbers (h, w)"
        raise AssayError(what, path=path, key=key, cure=f"{cure}, or (N, h, w) with one for each image")
    with np.errstate(over="ignore", invalid="ignore"):
        sums = np.abs(many.astype(np.float64)).sum((1, 2)).astype(np.float32)  # as the store has them
    if not ((sums > 0) & np.isfinite(sums)).all():
        what = "is NaN or infinite, 0 everywhere, or too large for float32"
        raise AssayError(what, path=path, key=key, cure="correct it")
    return many


def _text(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
