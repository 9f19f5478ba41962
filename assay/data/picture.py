"""Pictures of images: grids, and rows with a caption each; the noise levels of a source, counted and shown."""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from assay.data.audit.level import spread
from assay.data.source import ImageSource
from assay.data.view import simulate
from assay.errors import AssayError
from assay.noise import snr_db

_GAP = 2
_MIN_TILE = 64  # smaller images are enlarged, by whole factors so that pixels stay pixels
_MAX_BINS = 12


def to_uint8(images: Tensor) -> Tensor:
    """Images in [-1, 1] as an 8-bit file holds them: rounded to 0..255, values outside clipped."""
    return (images * 127.5 + 128).clamp(0, 255).to(torch.uint8)


def image_grid(images: Tensor, num_columns: int) -> Image.Image:
    """`images` (N, C, H, W) in [-1, 1], C = 1 or 3, row by row; values beyond are clipped for display."""
    if images.ndim != 4 or images.shape[1] not in (1, 3) or len(images) == 0:
        raise AssayError(f"have shape {tuple(images.shape)}, not (N, 1 or 3, H, W) with N > 0", key="images")
    factor = max(1, -(-_MIN_TILE // min(images.shape[2:])))
    pixels = to_uint8(images.detach().float().cpu())
    tiles = pixels.repeat_interleave(factor, 2).repeat_interleave(factor, 3).expand(-1, 3, -1, -1)
    height, width = (side + _GAP for side in tiles.shape[2:])
    num_columns = min(num_columns, len(tiles))
    canvas = np.full((-(-len(tiles) // num_columns) * height, num_columns * width, 3), 255, dtype=np.uint8)
    for i, tile in enumerate(tiles.permute(0, 2, 3, 1).numpy()):
        top, left = i // num_columns * height, i % num_columns * width
        canvas[top : top + height - _GAP, left : left + width - _GAP] = tile
    return Image.fromarray(canvas[:-_GAP, :-_GAP])


def captioned_rows(rows: Sequence[tuple[str, Tensor]]) -> Image.Image:
    """One row per (caption, images (N, C, H, W)); a caption may have several lines."""
    grids = [image_grid(images, len(images)) for _, images in rows]
    font = ImageFont.load_default(16)
    pen = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    boxes = [pen.multiline_textbbox((0, 0), caption, font=font) for caption, _ in rows]
    margin = int(max(box[2] for box in boxes)) + 16
    heights = [max(grid.height, int(box[3])) + _GAP for grid, box in zip(grids, boxes, strict=True)]
    canvas = Image.new("RGB", (margin + max(grid.width for grid in grids), sum(heights) - _GAP), "white")
    pen, top = ImageDraw.Draw(canvas), 0
    for (caption, _), grid, height in zip(rows, grids, heights, strict=True):
        pen.multiline_text((8, top + (height - _GAP) / 2), caption, fill="black", font=font, anchor="lm")
        canvas.paste(grid, (margin, top))
        top += height
    return canvas


def noise_histogram(sigma_tn: Tensor) -> list[tuple[float, float, int]]:
    """Lowest level, highest and number of images of each level if there are few, else of logarithmic bins."""
    levels, counts = sigma_tn.double().unique(return_counts=True)
    bin_of = torch.arange(len(levels))
    if len(levels) > _MAX_BINS:
        low, high = levels[levels > 0][[0, -1]].log10().tolist()
        edges = torch.logspace(low, high, _MAX_BINS, dtype=torch.float64)
        bin_of = torch.where(levels > 0, torch.bucketize(levels, edges[1:-1], right=True) + 1, 0)
    inside = [bin_of == number for number in bin_of.unique()]
    return [(levels[at][0].item(), levels[at][-1].item(), int(counts[at].sum())) for at in inside]


def noise_picture(source: ImageSource, add_noise: tuple[float, ...] = (), num_columns: int = 8) -> Image.Image:
    """A row of images for each noise level, like the paper's figure of them.

    `add_noise` shows the same images of a clean source with simulated noise of these levels instead.
    """
    if add_noise:
        if num_noisy := int((source.usable_from > 0).sum()):
            what = f"{num_noisy} images of {source.name} are noisy already"
            raise AssayError(what, key="noise", cure="show a store of clean images, or leave it out")
        index = torch.tensor(spread(len(source), num_columns))
        rows = [(0.0, source.read(index))]
        rows += [(sigma, simulate(source, 0, sigma).read(index)) for sigma in sorted(add_noise)]
    else:
        rows = []
        for low, high, _ in noise_histogram(source.sigma_tn):
            inside = ((source.sigma_tn >= low) & (source.sigma_tn <= high)).nonzero()[:, 0]
            rows.append(((low * high) ** 0.5, source.read(inside[spread(len(inside), num_columns)])))
    return captioned_rows([(f"sigma {sigma:.3g}\n{snr_text(sigma)}", images) for sigma, images in rows])


def levels_text(low: float, high: float, form: str = ".3g", to: str = " to ") -> str:
    """Noise levels from `low` to `high`; one number if both look the same."""
    ends = f"{low:{form}}", f"{high:{form}}"
    return ends[0] if ends[0] == ends[1] else to.join(ends)


def snr_text(sigma: float) -> str:
    """The signal-to-noise ratio (`assay.noise.snr_db`)."""
    return "clean" if sigma == 0 else f"{snr_db(sigma):.1f} dB"
