"""Pictures of images: grids, and rows with a caption each. Shared by every command that shows images."""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from assay.errors import AssayError

_GAP = 2
_MIN_TILE = 64  # smaller images are enlarged, by whole factors so that pixels stay pixels


def to_uint8(images: Tensor) -> Tensor:
    """Images in [-1, 1] as an 8-bit file holds them: rounded to 0..255, values outside clipped."""
    return (images * 127.5 + 128).clamp(0, 255).to(torch.uint8)


def image_grid(images: Tensor, num_columns: int) -> Image.Image:
    """`images` (N, C, H, W) in [-1, 1], C = 1 or 3, row by row; values beyond are clipped for display."""
    if images.ndim != 4 or images.shape[1] not in (1, 3) or len(images) == 0:
        raise AssayError(f"have shape {tuple(images.shape)}, not (N, 1 or 3, H, W) with N > 0", key="images")
    factor = -(-_MIN_TILE // min(images.shape[2:])) if min(images.shape[2:]) < _MIN_TILE else 1
    pixels = to_uint8(images.detach().float().cpu())
    tiles = pixels.repeat_interleave(factor, 2).repeat_interleave(factor, 3).expand(-1, 3, -1, -1)
    num_columns = min(num_columns, len(tiles))
    num_rows = -(-len(tiles) // num_columns)
    height, width = tiles.shape[2:]
    canvas = np.full(
        (num_rows * (height + _GAP) - _GAP, num_columns * (width + _GAP) - _GAP, 3), 255, dtype=np.uint8
    )
    for i, tile in enumerate(tiles.permute(0, 2, 3, 1).numpy()):
        top, left = i // num_columns * (height + _GAP), i % num_columns * (width + _GAP)
        canvas[top : top + height, left : left + width] = tile
    return Image.fromarray(canvas)


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
