"""TIFF stacks and OME-TIFF: pages and channels by the axes that the file names."""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import tifffile

from assay.archives import check_unpacked
from assay.data.readers import Format, RawImages
from assay.data.scientific import named, planes
from assay.data.spec import SourceSpec
from assay.errors import AssayError


def is_stack(path: Path) -> bool:
    """Whether a TIFF file holds more than one page; errors in it are reported when it is read."""
    try:
        with _raising_logs(), tifffile.TiffFile(path) as file:
            return len(file.pages) > 1
    except Exception:
        return False


@contextmanager
def _raising_logs() -> Iterator[None]:
    """tifffile logs damage and continues with the rest; here it is an error."""
    found: list[str] = []
    handler, logger = logging.Handler(logging.ERROR), logging.getLogger("tifffile")
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    before = logger.propagate, logger.level
    logger.propagate = False
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = before[0]
        logger.setLevel(before[1])
    if found:
        raise ValueError(found[0])


class _Pages:
    """A series as an array that reads only the pages of one image."""

    def __init__(self, path: Path, series: Any, axes: str) -> None:
        self.path, self.series, self.shape = path, series, series.shape
        self.at = [at for at, axis in enumerate(axes) if axis not in "YXS"]  # over which pages are laid out
        self.lengths = [self.shape[at] for at in self.at]

    def __getitem__(self, place: tuple[Any, ...]) -> np.ndarray:
        chosen = [range(self.shape[at])[place[at]] for at in self.at]
        many = [each if isinstance(each, range) else [each] for each in chosen]
        numbers = [np.ravel_multi_index(each, self.lengths) for each in product(*many)] if self.at else [0]
        read = [self._page(int(number)) for number in numbers]
        kept = [len(each) for each in chosen if isinstance(each, range)]
        return np.stack(read).reshape(*kept, *read[0].shape)

    def _page(self, number: int) -> np.ndarray:
        page = self.series.pages[number]
        if page is None:
            raise AssayError(f"lacks page {number}", cure="save it again")
        size = math.prod(page.shape) * self.series.dtype.itemsize
        check_unpacked(self.path, size, self.path.stat().st_size)
        return np.asarray(page.asarray())


def _open(path: Path, spec: SourceSpec) -> RawImages:
    with _raising_logs():
        file = tifffile.TiffFile(path)  # stays open while its images are read
        num_pages = len(file.pages)
    with _raising_logs():  # pages that lead to each other are an error by now: their series would never end
        series = file.series[0]
    pages = _Pages(path, series, axes := series.axes.replace("Q", "I"))
    if math.prod(pages.lengths) > num_pages:
        what = f"has {num_pages} pages where its axes {axes} {series.shape} need {math.prod(pages.lengths)}"
        raise AssayError(what, cure="save it again")
    return planes(path, pages, axes)


FORMAT = Format("TIFF", named(".tif", ".tiff"), _open, _open)
