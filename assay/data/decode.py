"""Image files to pixels: PNG, JPEG, TIFF and WebP in their own depth, within the limits of `assay.archives`.

Pixels are (H, W, C) uint8, uint16 or float32: grey (C = 1) or colour (C = 3), or either with the opacity
as one channel more. Any problem with a file is an error that names it.
"""

import io
import logging
import math
import struct
import warnings
import zlib
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from assay.archives import check_unpacked
from assay.errors import AssayError
from assay.files import decoding

PICTURES = {".png", ".jpg", ".jpeg", ".tif", ".tiff", ".webp"}  # what their names end in


def decode_image(data: bytes, where: str) -> np.ndarray:
    """The pixels (H, W, 1 or 3) of an image file, in the file's own depth, flattened on white."""
    return flatten(decode_pixels(data, where), where)


def decode_pixels(data: bytes, where: str) -> np.ndarray:
    """The pixels (H, W, 1 .. 4) of an image file, in the file's own depth."""
    with decoding(where, "get it again, or make it smaller if it has too many pixels"):
        if data[:8] == _PNG:
            _check_png(data)
        image = _open_image(data, where)
        if image is None:
            return native(_read_tiff(data, where))
        _check_single(getattr(image, "n_frames", 1))
        if data[:8] == _PNG and data[24] == 16 and data[25] in _DEEP_PNG:
            return native(_deep_png(data))
        pixels = np.asarray(_plain_mode(image))
        if pixels.dtype == np.int32:  # 16 bits in 32
            low, high = int(pixels.min()), int(pixels.max())
            if not -(2**15) <= low <= high < 2**16:
                raise AssayError("has 32-bit pixels", cure="save it as 16-bit or float")
            pixels = pixels.astype(np.uint16 if low >= 0 else np.float32)  # black is not 0 if some are below it
        return native(pixels)


def _check_single(num_pictures: int) -> None:
    if num_pictures != 1:
        raise AssayError(f"holds {num_pictures} pictures", cure="save them as one file each")


def _open_image(data: bytes, where: str) -> Image.Image | None:
    """The picture as Pillow loads it; None for a TIFF that only tifffile reads."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what matters is raised
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data))
            bits = image.tag_v2.get(258, (8,)) if image.format == "TIFF" else (8,)  # type: ignore[attr-defined]
            if len(bits) > 1 and max(bits) > 8:  # Pillow would cut its colours down to 8
                return None
            check_unpacked(where, math.prod(image.size) * len(image.getbands()), len(data))
            image.load()
            ImageOps.exif_transpose(image, in_place=True)  # phones note how they were held
    except Image.UnidentifiedImageError as error:
        if data[:2] in (b"II", b"MM"):
            return None
        raise AssayError("is not an image, despite its name", cure="remove it") from error
    return image


def _plain_mode(image: Image.Image) -> Image.Image:
    """Undo palettes, single bits and the colour spaces of printing."""
    if image.mode == "1":
        return image.convert("L")
    if image.mode in ("L", "RGB") and "transparency" in image.info:
        return image.convert("LA" if image.mode == "L" else "RGBA")
    if image.mode in ("P", "PA"):
        colours = image.convert("RGBA" if image.has_transparency_data else "RGB")
        is_grey = colours.mode == "RGB" and not np.ptp(np.asarray(colours), axis=2).any()
        return colours.convert("L") if is_grey else colours
    if image.mode in ("L", "LA", "RGB", "RGBA", "F", "I") or image.mode.startswith("I;16"):
        return image
    return image.convert("RGB")


def native(pixels: np.ndarray) -> np.ndarray:
    """(H, W[, 1 .. 4]) -> (H, W, 1 .. 4) in native byte order and no more than float32."""
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    pixels = pixels.astype(pixels.dtype.newbyteorder("="), copy=False)
    return pixels.astype(np.float32) if pixels.dtype == np.float64 else pixels


def check_finite(pixels: np.ndarray, **where: Any) -> None:
    """Reject values that are no numbers; `where` as for an error."""
    if not np.isfinite(pixels).all():
        raise AssayError("has pixels that are NaN or infinite", **where)


def is_transparent(pixels: np.ndarray) -> bool:
    """Whether anything shines through (H, W, C): the last of 2 or 4 channels is the opacity."""
    return pixels.shape[-1] in (2, 4) and not bool((pixels[..., -1] == _opaque(pixels.dtype)).all())


def _opaque(dtype: np.dtype) -> float:
    return 1.0 if dtype.kind == "f" else float(np.iinfo(dtype).max)


def flatten(pixels: np.ndarray, where: str) -> np.ndarray:
    """(H, W, 1 .. 4) -> (H, W, 1 or 3): what is transparent is laid on white."""
    if pixels.shape[-1] in (1, 3):
        return pixels
    colour, opacity = pixels[..., :-1], pixels[..., -1:]
    if not is_transparent(pixels):
        return colour
    if pixels.dtype.kind == "f":
        what = f"is transparent and has {pixels.dtype} pixels, whose white is not known"
        raise AssayError(what, path=where, cure="save it without opacity")
    white = _opaque(pixels.dtype)
    share = opacity.astype(np.float64) / white
    return np.rint(colour * share + white * (1 - share)).astype(pixels.dtype)


def _read_tiff(data: bytes, where: str) -> np.ndarray:
    import tifffile

    logging.getLogger("tifffile").setLevel(logging.CRITICAL)  # what matters is raised
    with tifffile.TiffFile(io.BytesIO(data)) as file:
        _check_single(len(file.pages))
        page, axes = file.pages[0], file.series[0].axes
        check_unpacked(where, math.prod(page.shape) * (page.dtype.itemsize if page.dtype else 1), len(data))
        is_plain = axes in ("YX", "YXS", "SYX") and (len(axes) == 2 or page.shape[axes.index("S")] <= 4)
        pixels = page.asarray() if is_plain else np.empty(0)
        if pixels.ndim != len(axes):  # tifffile gives nothing where it cannot tell how pixels are stored
            raise AssayError(f"has the axes {axes} {page.shape}", cure="save it as plain TIFF or PNG")
    return np.moveaxis(pixels, 0, -1) if axes == "SYX" else pixels


_PNG = b"\x89PNG\r\n\x1a\n"
# The bytes of 16-bit colour by the PNG's type of colour: as Pillow reads them, or as if in the other order.
_DEEP_PNG = {2: ("RGB;16B", "RGB;16L"), 4: ("RGBA",), 6: ("RGBA;16B", "RGBA;16L")}


def _check_png(data: bytes) -> None:
    """Compare the checksum of every chunk, which Pillow does not for the pixels."""
    at, kind = len(_PNG), b""
    while kind != b"IEND":
        if at + 12 > len(data):
            raise ValueError("it is cut short")
        (length,) = struct.unpack(">I", data[at : at + 4])
        kind, end = data[at + 4 : at + 8], at + 8 + length
        if data[end : end + 4] != struct.pack(">I", zlib.crc32(data[at + 4 : end])):
            raise ValueError(f"the checksum of its chunk {kind!r} is wrong")
        at = end + 4


def _deep_png(data: bytes) -> np.ndarray:
    """16-bit colour (H, W, 2 .. 4), which Pillow reads as 8 bits: once the upper ones, once the lower ones."""
    halves = []
    for raw_mode in _DEEP_PNG[data[25]]:
        image = Image.open(io.BytesIO(data))
        image.tile = [(*image.tile[0][:3], raw_mode)]  # type: ignore[list-item]
        halves.append(np.asarray(image))
    height, width = halves[0].shape[:2]
    return np.stack(halves, -1).reshape(height, width, -1, 2).view(">u2")[..., 0]


def is_lossy(name: str) -> bool:
    """Whether a file (of which a patch may be cut) is of a kind that compresses with loss."""
    return name.partition("[")[0].lower().endswith((".jpg", ".jpeg"))
