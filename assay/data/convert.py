"""An image of a file -> an image of a store: colours, size, depth, noise level.

Nothing is guessed, and what would change the noise of a noisy image (resizing, recolouring, rounding to 8
bits) is rejected, as is a level that the pixels rule out.
"""

import math
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from PIL import Image
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from scipy.ndimage import uniform_filter

from assay.data.decode import flatten, is_transparent
from assay.data.levels import Level
from assay.data.notes import CLIPPED, DARK, FAINT, FLATTENED, OPAQUE, Note, measure, share_at
from assay.data.readers import RawImages
from assay.data.store import DType, PackedImage
from assay.data.units import Stabilised
from assay.errors import AssayError
from assay.files import decoding

MAX_PIXELS = 2**26
_LUMA = np.array([0.299, 0.587, 0.114])
_OUR_RANGE = {"uint8": (0.0, 255.0), "float16": (-1.0, 1.0), "float32": (-1.0, 1.0)}


def _sides(value: Any) -> Any:
    """`64` or `48x64` -> (H, W)."""
    parts = str(value).lower().split("x") if isinstance(value, str | int) else value
    if len(parts) > 2 or not all(str(part).isdecimal() for part in parts):
        raise AssayError("expected a number of pixels such as 64, or HEIGHTxWIDTH such as 48x64")
    return int(parts[0]), int(parts[-1])


def _of_an_image(size: tuple[int, int]) -> tuple[int, int]:
    if not 1 <= math.prod(size) <= MAX_PIXELS:
        raise AssayError(f"an image of a store has 1 to {MAX_PIXELS:,} pixels")
    return size


Pixels = Annotated[tuple[int, int], BeforeValidator(_sides), AfterValidator(_of_an_image)]


class PackConfig(BaseModel):
    """How the images of all sources become a store."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    size: Pixels | None = Field(
        None, examples=["64", "48x64"], description="Size in pixels, (H, W). Default: that of the first image."
    )
    fit: Literal["exact", "crop", "resize"] = Field(
        "exact",
        description="Images of another size: reject them, cut the size out of their centre, or crop them to "
        "its shape and resize (as EDM's center-crop).",
    )
    patch: Pixels | None = Field(
        None, examples=["64", "48x64"], description="Cut large images into patches of this size, (H, W)."
    )
    stride: int | None = Field(None, ge=1, description="Pixels from one patch to the next. Default: its width.")
    colour: Literal["keep", "grey", "colour"] = Field("keep", description="Make images grey or colour.")
    dtype: DType | None = Field(
        None, description="Type of stored values. Default: uint8 if all files have 8 bits, else float32."
    )
    classes: bool = Field(False, description="Keep classes, from labels or from the names of subfolders.")
    skip_bad: bool = Field(False, description="Skip images that cannot be packed, and list them.")
    overwrite: bool = Field(False, description="Replace a store of this name.")

    @model_validator(mode="after")
    def _agree(self) -> "PackConfig":
        if self.fit != "exact" and self.size is None:
            raise AssayError("is needed to crop or resize images", key="size")
        if self.stride is not None and self.patch is None:
            raise AssayError("is the distance of patches", key="stride", cure="give patch too")
        return self


class Layout(NamedTuple):
    """What the first image decides for all images of a store; `shape` is (C, H, W)."""

    shape: tuple[int, int, int]
    dtype: DType
    value_range: tuple[float, float]

    def scaled(self, values: np.ndarray) -> np.ndarray:
        """Values of the store as images from -1 to 1, float64."""
        low, high = self.value_range
        return (values.astype(np.float64) - low) * (2 / (high - low)) - 1


def convert_pixels(
    pixels: np.ndarray, value_range: tuple[float, float], noisy: bool, config: PackConfig, layout: Layout | None
) -> tuple[np.ndarray, Layout]:
    """Pixels (H, W, C) without opacity, black and white at `value_range` -> values (C, H, W) of the store."""
    if pixels.dtype.kind == "f" and not np.isfinite(pixels).all():
        raise AssayError("has pixels that are NaN or infinite", cure="remove the image or repair it")
    eight_bit = pixels.dtype == np.uint8
    size = size_of(pixels.shape, config, layout)
    values = fit(recolour(pixels, config.colour, noisy), size, config.fit, noisy).transpose(2, 0, 1)
    dtype = config.dtype or ("uint8" if eight_bit else "float32")
    if layout is None:
        kept = value_range if dtype == "uint8" and eight_bit else _OUR_RANGE[dtype]
        layout = Layout((values.shape[0], *size), dtype, kept)
    if len(values) != layout.shape[0]:
        what = f"has {len(values)} channels, the images before it {layout.shape[0]}"
        raise AssayError(what, key="colour", cure="choose grey or colour")
    if dtype != layout.dtype:
        what = "is not 8-bit like the images before it, or the other way round"
        raise AssayError(what, key="dtype", cure="use float32")
    return _quantise(values, value_range, noisy, layout), layout


def recolour(pixels: np.ndarray, colour: str, noisy: bool) -> np.ndarray:
    """Grey <-> colour, as asked for."""
    num_channels = pixels.shape[2]
    wanted = {"keep": num_channels, "grey": 1, "colour": 3}[colour]
    if wanted == num_channels:
        return pixels
    if noisy or num_channels not in (1, 3):
        what = f"has {num_channels} channels{' and noise, which would change' if noisy else ''}"
        raise AssayError(f"cannot be made {colour}: it {what}", key="colour", cure="use keep")
    if wanted == 3:
        return pixels.repeat(3, axis=2)
    grey = (pixels @ _LUMA)[..., None]
    return (np.rint(grey) if pixels.dtype.kind == "u" else grey).astype(pixels.dtype)


def size_of(shape: tuple[int, ...], config: PackConfig, layout: Layout | None) -> tuple[int, int]:
    """The size that an image of this shape (H, W, ...) gets."""
    return config.size or (layout.shape[1:] if layout else (shape[0], shape[1]))


def fit(pixels: np.ndarray, size: tuple[int, int], how: str, noisy: bool) -> np.ndarray:
    """Give (H, W, C) the size asked for."""
    height, width, num_channels = pixels.shape
    if (height, width) == size:
        return pixels
    scale = min(height / size[0], width / size[1]) if how == "resize" else 1.0
    box = round(size[0] * scale), round(size[1] * scale)
    top, left = (height - box[0]) // 2, (width - box[1]) // 2
    what = f"has {height} x {width} pixels, not {size[0]} x {size[1]}"
    if how == "exact" or top < 0 or left < 0:
        raise AssayError(what, key="size", cure="give one that fits into the images, with fit = crop or resize")
    if scale != 1 and noisy:
        what = f"{what}; it is noisy, and resizing would change its noise"
        raise AssayError(what, key="fit", cure="use crop")
    cropped = pixels[top : top + box[0], left : left + box[1]]
    if box == size:
        return cropped
    channels = [Image.fromarray(cropped[..., c].astype(np.float32)) for c in range(num_channels)]
    scaled = np.stack([np.asarray(c.resize(size[::-1], Image.Resampling.LANCZOS)) for c in channels], 2)
    if pixels.dtype.kind == "u":
        scaled = np.rint(scaled).clip(0, np.iinfo(pixels.dtype).max)
    return scaled.astype(pixels.dtype)


def _quantise(values: np.ndarray, value_range: tuple[float, float], noisy: bool, layout: Layout) -> np.ndarray:
    """(C, H, W) pixels -> the store's dtype and value range."""
    if layout.dtype == "uint8" and values.dtype == np.uint8 and value_range == layout.value_range:
        return values
    low, high = value_range
    x = (values.astype(np.float64) - low) * (2 / (high - low)) - 1
    if layout.dtype == "uint8" and not noisy:
        black, white = layout.value_range
        return np.rint(black + (x + 1) * (white - black) / 2).clip(0, 255).astype(np.uint8)
    with np.errstate(over="ignore", invalid="ignore"):
        kept = x.astype(layout.dtype)
    if layout.dtype == "uint8" or not np.isfinite(kept).all():
        why = "has noise" if noisy else f"has values up to {np.abs(x).max():.3g} where white is 1"
        raise AssayError(f"{why}, which {layout.dtype} cannot hold", key="dtype", cure="use float32")
    return kept


class Converted(NamedTuple):
    """An image on its way into a store, what was noted, and what all images must be."""

    image: PackedImage
    note: Note
    layout: Layout


def convert_image(raw: RawImages, i: int, config: PackConfig, layout: Layout | None) -> Converted:
    """Image i of a source, with its level where black to white is 2."""
    found: dict[str, float] = {}
    with decoding(raw.names[i], "check the file, or leave it out"):
        pixels = raw.pixels(i)
    level, levels = _level_of(raw, i, pixels)
    noisy = level.sigma > 0
    if raw.has_opacity and pixels.shape[2] in (2, 4):
        pixels = _without_opacity(pixels, noisy, found)
    units = value_range = _range_of(raw, pixels)
    files = pixels
    if raw.sensor is not None:
        pixels, value_range = _stabilised(raw.sensor, pixels, noisy, found), (-1.0, 1.0)
    sigma, usable_from = level.in_range(*value_range)
    size = size_of(pixels.shape, config, layout)
    values, layout = convert_pixels(pixels, value_range, noisy, config, layout)
    sigma_map = None
    if levels is not None:
        unit = 1 if level.scaled else 2 / (value_range[1] - value_range[0])
        sigma_map = fit(levels * unit, size, config.fit, noisy).transpose(2, 0, 1)
    x = layout.scaled(values)
    if noisy and _check_noise(x, sigma, sigma_map):
        found[FAINT] = 1.0
    if noisy and files.dtype == np.uint8:
        found[CLIPPED] = share_at(x, (0, 255), units)
    note = Note(
        sigma,
        (float(files.min()), float(files.mean()), float(files.max())),
        units,
        content=hash(values.tobytes()),
        is_deep=files.dtype == np.uint16 and raw.value_range is None,
        found=found,
        measured=measure(x, i, len(raw.names)) if sigma_map is None else None,
    )
    label = -1 if raw.label is None else int(raw.label[i])
    columns = sigma, label, usable_from, raw.sensor or units
    image = PackedImage(raw.names[i], values, *columns, sigma_map=sigma_map)
    return Converted(image, note, layout)


def _level_of(raw: RawImages, i: int, pixels: np.ndarray) -> tuple[Level, np.ndarray | None]:
    """The level of an image, and the map of its noise (H, W, C or 1) that it is from, if it has one."""
    found = raw.noise(i)
    if isinstance(found, Level):
        return found, None
    levels = found.sigma.astype(np.float64)
    if levels.shape[:2] != pixels.shape[:2] or levels.shape[2] not in (1, pixels.shape[2]):
        what = f"has pixels {pixels.shape} (H, W, C) and a map of the noise {levels.shape}"
        raise AssayError(what, key="map", cure="give a level for each pixel")
    return found._replace(sigma=levels).level(raw.quantile), levels


def _without_opacity(pixels: np.ndarray, noisy: bool, found: dict[str, float]) -> np.ndarray:
    """The pixels of a picture without its opacity."""
    if not is_transparent(pixels):
        found[OPAQUE] = 1.0
        return pixels[..., :-1]
    if noisy:
        what = "is noisy, and flattening its transparency would change its noise"
        raise AssayError(what, cure="save it opaque")
    found[FLATTENED] = 1.0
    return flatten(pixels, "")


def _range_of(raw: RawImages, pixels: np.ndarray) -> tuple[float, float]:
    """The values of black and white in a file."""
    if raw.value_range is not None:
        return raw.value_range
    if pixels.dtype not in (np.uint8, np.uint16):
        what = f"has values from {pixels.min():.4g} to {pixels.max():.4g}, and no known black and white"
        raise AssayError(what, key="range", cure="name the values of black and white, e.g. range=0,255")
    return 0.0, float(np.iinfo(pixels.dtype).max)


def _stabilised(sensor: Stabilised, pixels: np.ndarray, noisy: bool, found: dict[str, float]) -> np.ndarray:
    """Images of a sensor between -1 and 1; of noisy ones the share of pixels with too few photons is noted."""
    if not noisy:
        return sensor.clean_to_images(pixels).astype(np.float32)
    # The mean count of a pixel is not known; that of its neighbourhood is nearer to it than its own count.
    counts = uniform_filter(sensor.counts(pixels), (5, 5, 1))
    found[DARK] = float((counts < sensor.smallest_count()).mean()) if sensor.smallest_count() > 0 else 0.0
    return sensor.noisy_to_images(pixels).astype(np.float32)


def _check_noise(x: np.ndarray, sigma: float, sigma_map: np.ndarray | None) -> bool:
    """Reject noise that the pixels rule out; whether images (C, H, W) vary less by content than by noise.

    The variance of n pixels with noise sigma alone is sigma^2 up to sigma^2 sqrt(2 / n); less by six of these
    deviations rules the level out.
    """
    noise = sigma
    if sigma_map is not None:
        noise = math.sqrt(float(np.square(np.minimum(sigma_map, sigma)).mean()))
    variance = float(np.var(x))
    if variance < noise**2 * (1 - 6 * math.sqrt(2 / x.size)):
        what = f"varies by {math.sqrt(variance):.3g}, less than its noise of {noise:.3g} (black to white is 2)"
        raise AssayError(what, key="sigma", cure="check it and range; sigma is in the units of the files")
    return variance < 2 * noise**2
