"""What to pack: sources of images, each with all that is known about it, and the noise levels of images.

On the command line a source is a path, with settings after a colon: `noisy/:sigma=38,range=0,255`. Longer
lists stand in a TOML file: [[source]] with `path` and settings for each, [all] for those they share. The levels
of its images may stand in a CSV, or in JSON lines with the same keys:

    filename,sigma,usable_from
    a.png,12.5,
    b.png,0,40

`sigma` is the noise in an image, `usable_from` the level from which it may be used; one of them will do. Both
are in the units of the files. `sigma_tn` is in those of images from -1 to 1, as everywhere in Assay, and so are
ambient-omni's `sigma_min` and `annotation`, which say from which level an image may be used.
"""

import csv
import io
import json
import math
import re
import tomllib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import AfterValidator, BeforeValidator, Field

from assay.data.units import Stabilised
from assay.errors import AssayError, Rules, about
from assay.files import csv_text, decoding, one_line, read_text
from assay.settings import Config

_NOISE = ("sigma", "levels", "map", "noise")  # settings, of which a source has one
MIN_LEVEL = 1e-6  # of noise, where black to white is 2
_SIGMA = {"sigma": False, "sigma_tn": True}  # whether a column is always in units of images from -1 to 1
_USABLE = {"usable_from": False, "sigma_min": True, "annotation": True}


def _rising(pair: tuple[float, float]) -> tuple[float, float]:
    if not pair[0] < pair[1]:
        raise AssayError(f"black ({pair[0]:g}) must be below white ({pair[1]:g})", cure="swap them")
    return pair


_Finite = Annotated[float, Field(allow_inf_nan=False)]
_Level = Annotated[_Finite, Field(ge=0)]
_Split = BeforeValidator(lambda value: value.split(",") if isinstance(value, str) else value)
Range = Annotated[tuple[_Finite, _Finite], _Split, AfterValidator(_rising)]


class SourceSpec(Config):
    """One source of images: where it is, what its pixels mean, how noisy they are."""

    path: str = Field(
        description="A folder of images, a zip, .npy, .npz, IDX, CIFAR-10, FITS, HDF5, zarr, TIFF, DICOM, "
        "NIfTI or MRC file, or hf:NAME[:SPLIT]."
    )
    range: Range | None = Field(
        None, description="Pixel values of black and white, e.g. 0,4095; 8-bit and full 16-bit files need none."
    )
    sigma: _Level | None = Field(None, description="Noise: its standard deviation, in the units of the files.")
    levels: Path | None = Field(
        None,
        description="Noise: CSV or JSONL with `filename` and `sigma` of each image, or ambient-omni's "
        "annotations.jsonl.",
    )
    map: Path | None = Field(
        None, description="Noise: .npy with the level of each pixel, (H, W) for all images or (N, H, W)."
    )
    noise: str | None = Field(
        None, description="Noise: the keyword, extension or data set of a scientific file that holds it."
    )
    scaled: bool = Field(
        False, description="Noise is stated for images scaled to [-1, 1], not in the units of the files."
    )
    gain: _Finite | None = Field(
        None,
        gt=0,
        description="Noise of a sensor that counts photons: values per photon, the inverse of the electrons "
        "per ADU that FITS headers call GAIN. Images are stabilised. Needs range.",
    )
    read_noise: _Level = Field(0.0, description="With gain: standard deviation of the read noise.")
    black: _Finite = Field(0.0, description="With gain: the value of no light.")
    dataset: str | None = Field(
        None, description="The images inside an HDF5 or zarr file, or a FITS extension."
    )
    layout: Literal["NHWC", "NCHW"] | None = Field(
        None, description="Channels last or first, if the shape of an array does not decide."
    )
    split: Literal["train", "test"] = Field("train", description="Which part of CIFAR-10.")

    def rules(self) -> Rules:
        """There is one kind of noise, and a sensor is described as a whole."""
        given = [key for key in _NOISE if getattr(self, key) is not None]
        pairs = list(pairwise(given))
        if self.gain is not None:  # with which a sigma of 0 says that images are clean
            pairs += [("gain", key) for key in given if getattr(self, key) != 0]
        for first, second in pairs:
            yield True, AssayError(f"cannot be combined with {first}", key=second, cure="give one")
        cure = "give it, or leave these out to measure it"
        error = AssayError("is missing, without which read_noise and black say nothing", key="gain", cure=cure)
        yield self.gain is None and (self.read_noise or self.black), error
        error = AssayError("a sensor's values of black and, above it, white are needed", key="range")
        yield self.gain is not None and (self.range is None or self.black >= self.range[1]), error

    @property
    def sensor(self) -> Stabilised | None:
        """The sensor that counts photons, if the images are of one."""
        if self.gain is None or self.range is None:
            return None
        return Stabilised(*self.range, self.gain, self.read_noise, self.black)


def read_sources(words: Sequence[str], shared: str | None = None) -> list[SourceSpec]:
    """Sources as a command line names them: PATH, PATH:KEY=VALUE,... or a TOML file of sources.

    `shared` holds settings of all sources, KEY=VALUE,...; a source's own win, and its own noise replaces
    another kind of it.
    """
    found = []
    for word in words:
        if word.endswith(".toml"):
            found += _from_toml(Path(word), _settings(shared or ""))
            continue
        path, settings = word, ""
        if not Path(word).exists() and (colon := re.search(r":(?=[a-z_]+=)", word)):
            path, settings = word[: colon.start()], word[colon.end() :]
        found.append(_spec({"path": path, **_settings(settings)}, _settings(shared or "")))
    return found


def _from_toml(file: Path, for_all: dict[str, Any]) -> list[SourceSpec]:
    """The sources of a file; its paths are relative to it."""
    with decoding(file, "give a TOML file with [[source]] for each source, and [all] for what they share"):
        tree = tomllib.loads(file.read_text(encoding="utf-8-sig"))
        if tree.keys() - {"all", "source"}:
            raise ValueError(f"it has the keys {', '.join(tree)}")
        listed = [tree.get("all", {}), *tree["source"]]
        for settings in listed:
            for key in settings.keys() & {"path", "levels", "map"}:
                if not str(settings[key]).startswith("hf:"):
                    settings[key] = str(file.parent / settings[key])
    return [_spec(settings, for_all | listed[0]) for settings in listed[1:]]


def _spec(own: dict[str, Any], for_all: dict[str, Any]) -> SourceSpec:
    replaced = set(_NOISE) if own.keys() & set(_NOISE) else set()
    if own.keys() & {"levels", "map", "noise"} or own.get("sigma") not in (None, "0", 0):
        replaced |= {"gain", "read_noise", "black"}
    with about(own.get("path")):
        return SourceSpec(**{key: value for key, value in for_all.items() if key not in replaced} | own)


def _settings(text: str) -> dict[str, Any]:
    """`sigma=38,range=0,255` -> {"sigma": "38", "range": "0,255"}: a comma before KEY= separates."""
    pairs = [part.partition("=") for part in re.split(r",(?=[a-z_]+=)", text) if part]
    found = {key: value for key, equals, value in pairs if equals}
    if len(found) < len(pairs):
        raise AssayError(f"expected KEY=VALUE,... with each key once, not {text!r}")
    return found


class Level(NamedTuple):
    """The noise in an image, as one number or as a map (H, W, C or 1), and the level from which it may be used.

    Each in the units of the files, or of images from -1 to 1 if scaled.
    """

    sigma: float | np.ndarray = 0.0
    usable_from: float | None = None  # the same as sigma
    scaled: bool = False
    usable_scaled: bool = False

    def highest(self) -> "Level":
        """One number, that of the noisiest pixel of a map."""
        if not isinstance(self.sigma, np.ndarray):
            return self
        levels = self.sigma.astype(np.float64)
        if not levels.size or not bool(((levels >= 0) & (levels <= np.finfo(np.float32).max)).all()):
            what = "has a map of the noise with levels that are negative, NaN or infinite"
            cure = "give pixels that were not measured a plausible value and a high, finite level"
            raise AssayError(what, key="map", cure=cure)
        return self._replace(sigma=float(levels.max()))

    def in_range(self, low: float, high: float) -> tuple[float, float]:
        """Both in units of images from -1 to 1, where pixels are black at `low` and white at `high`.

        The one place where levels are converted, and checked to be levels.
        """
        factor = 2 / (high - low)
        sigma = usable_from = float(self.sigma) * (1 if self.scaled else factor)
        if self.usable_from is not None:
            usable_from = self.usable_from * (1 if self.usable_scaled else factor)
        is_level = sigma == 0 or sigma >= MIN_LEVEL  # less would pass for clean, or is a typing error
        if not is_level or not sigma * (1 - 1e-9) <= usable_from < math.inf:
            what = f"has noise of {sigma:g} and is usable from {usable_from:g}, where black to white is 2"
            cure = "give finite numbers >= 0: 0 for a clean image, and usable_from not below its noise"
            raise AssayError(what, cure=cure)
        return sigma, max(sigma, usable_from)


def read_levels(path: Path, names: Sequence[str], scaled: bool = False) -> list[Level | AssayError]:
    """The level of each image, or what is wrong with it, from a CSV or a JSONL (see the top of this module).

    File names are relative to the source; the last part alone will do if no two images share it, also in other
    case and without its ending. Lines of images that are not in the source do not matter. `scaled`: all levels
    are for images from -1 to 1.
    """
    numbers: dict[str, list[int]] = {}
    for short in (str, lambda name: PurePosixPath(name).name, _stem):  # of names that agree, the longest counts
        longer = set(numbers)
        for i, name in enumerate(names):
            if short(name) not in longer:
                numbers.setdefault(short(name), []).append(i)
    cure = "write one line with one level for each image (0 if it is clean), and folders where names repeat"
    found: dict[int, Level | AssayError] = {}
    others = []
    for line, row in _rows(path):
        name = str(row["filename"]).strip()
        images = numbers.get(name) or numbers.get(_stem(name), [])
        others += [] if images else [name]
        for i in images:
            try:
                if len(images) > 1 or i in found:
                    raise ValueError("is ambiguous or has another line")
                found[i] = _level_of(row, scaled)
            except (TypeError, ValueError, OverflowError) as error:
                found[i] = AssayError(one_line(f"line {line}: {name}: {error}"), path=path, cure=cure)
    instead = f" (it has one for {one_line(others[0])})" if others else ""
    return [
        found.get(i) or AssayError(f"has no sigma for {one_line(name)}{instead}", path=path, cure=cure)
        for i, name in enumerate(names)
    ]


def _stem(name: str) -> str:
    return PurePosixPath(name).stem.lower()


def _level_of(row: dict[str, Any], scaled: bool) -> Level:
    """What a row says of noise and of the level of use, each under one of its keys."""
    found: list[tuple[float | None, bool]] = []
    for keys in (_SIGMA, _USABLE):
        given = {key: float(str(row[key])) for key in keys if row.get(key) not in (None, "")}
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are the same")
        found += [(number, scaled or keys[key]) for key, number in given.items()] or [(None, scaled)]
    (sigma, is_scaled), (usable_from, is_usable_scaled) = found
    if sigma is None and usable_from is None:
        raise ValueError(f"has none of {', '.join((*_SIGMA, *_USABLE))}")
    return Level(sigma or 0.0, usable_from, is_scaled, is_usable_scaled)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(row := dict(pairs)) < len(pairs):
        raise ValueError("it has a key twice")
    return row


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The lines of a CSV or JSONL by their numbers; each row has a `filename`."""
    text = read_text(path, "save it as UTF-8 text, CSV or JSONL")
    if path.suffix.lower() in (".jsonl", ".json"):
        for line, content in enumerate(text.split("\n"), 1):
            if content.strip():
                with decoding(path, f'write line {line} like {{"filename": "a.png", "sigma": 0.2}}'):
                    row = json.loads(content, object_pairs_hook=_each_once)
                    row["filename"]
                yield line, row
        return
    with decoding(path, "name filename and sigma once in its first line; write decimals with a point"):
        reader = csv.DictReader(io.StringIO(text, newline=""), skipinitialspace=True)
        columns = reader.fieldnames = [column.strip() for column in reader.fieldnames or ()]
        used = [column for column in columns if column in ("filename", *_SIGMA, *_USABLE)]
        if "filename" not in columns or len(used) < 2 or len(set(used)) < len(used):
            raise ValueError(f"it has the columns {', '.join(columns)}")
        for row in reader:
            if None in row:
                raise ValueError(f"line {reader.line_num} has more cells than the {len(columns)} columns")
            yield reader.line_num, {**row, "filename": csv_text(row["filename"] or "")}
