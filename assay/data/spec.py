"""What to pack: sources of images, each with all that is known about it.

On the command line a source is a path, with settings after a colon: `noisy/:sigma=38,range=0,255`. Longer
lists stand in a TOML file, whose paths are relative to it:

    [all]                     # for every source that does not say otherwise
    range = [0, 4095]

    [[source]]
    path = "clean/"

    [[source]]
    path = "noisy/"
    levels = "levels.csv"

In Python they are `SourceSpec(path="noisy/", sigma=38, range=(0, 255))`.
"""

import re
import tomllib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from assay.data.units import Stabilised
from assay.errors import AssayError, explained
from assay.files import decoding

FILES = ("path", "levels", "map")  # settings that name one
_NOISE = ("sigma", "levels", "map", "noise")  # one of them


def _rising(pair: tuple[float, float]) -> tuple[float, float]:
    if not pair[0] < pair[1]:
        raise AssayError(f"black ({pair[0]:g}) must be below white ({pair[1]:g})")
    return pair


_Finite = Annotated[float, Field(allow_inf_nan=False)]
_Split = BeforeValidator(lambda value: value.split(",") if isinstance(value, str) else value)
Range = Annotated[tuple[_Finite, _Finite], _Split, AfterValidator(_rising)]


class SourceSpec(BaseModel):
    """One source of images: where it is, what its pixels mean, how noisy they are."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str = Field(
        description="A folder of images, a zip, .npy, .npz, IDX, CIFAR-10, FITS, HDF5, zarr, TIFF, DICOM, "
        "NIfTI or MRC file, or hf:NAME[:SPLIT]."
    )
    range: Range | None = Field(
        None, description="The pixel values of black and white, e.g. 0,4095; 8-bit and 16-bit files need none."
    )
    sigma: float | None = Field(
        None, ge=0, allow_inf_nan=False, description="Noise: its standard deviation, in the units of the files."
    )
    levels: Path | None = Field(
        None,
        description="Noise: CSV or JSONL with `filename` and `sigma` of each image, or ambient-omni's "
        "annotations.jsonl.",
    )
    map: Path | None = Field(
        None,
        description="Noise: .npy with the level of each pixel, (H, W) for all images or (N, H, W).",
    )
    noise: str | None = Field(
        None, description="Noise: the keyword, extension or data set of a scientific file that holds it."
    )
    scaled: bool = Field(
        False, description="Noise is stated for images scaled to [-1, 1], not in the units of the files."
    )
    quantile: float = Field(
        1.0,
        gt=0,
        le=1,
        description="With a map, the share of pixels that decides an image's level. Below 1, noisier pixels "
        "(dead or hot ones) are left out of training at lower levels.",
    )
    gain: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="Noise of a sensor that counts photons: values per photon, the inverse of the electrons "
        "per ADU that FITS headers call GAIN. Images are stabilised. Needs range.",
    )
    read_noise: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="With gain: standard deviation of the read noise."
    )
    black: _Finite = Field(0.0, description="With gain: the value of no light.")
    dataset: str | None = Field(
        None, description="The images inside an HDF5 or zarr file, or a FITS extension."
    )
    layout: Literal["NHWC", "NCHW"] | None = Field(
        None, description="Channels last or first, if the shape of an array does not decide."
    )
    split: Literal["train", "test"] = Field("train", description="Which part of CIFAR-10.")

    @model_validator(mode="after")
    def _agree(self) -> "SourceSpec":
        given = [key for key in _NOISE if getattr(self, key) is not None]
        pairs = list(pairwise(given))
        if self.gain is not None:  # with which a sigma of 0 says that images are clean
            pairs += [("gain", key) for key in given if getattr(self, key) != 0]
        if pairs:
            raise AssayError(f"cannot be combined with {pairs[0][0]}", key=pairs[0][1], cure="give one")
        if self.gain is None and (self.read_noise or self.black):
            raise AssayError("read_noise and black describe a sensor that counts photons", key="gain")
        if self.gain is not None and (self.range is None or self.black >= self.range[1]):
            raise AssayError("a sensor's values of black and, above it, white are needed", key="range")
        return self

    @property
    def sensor(self) -> Stabilised | None:
        """The sensor that counts photons, if the images are of one."""
        if self.gain is None or self.range is None:
            return None
        return Stabilised(*self.range, self.gain, self.read_noise, self.black)


def read_sources(words: Sequence[str], shared: str | None = None) -> list[SourceSpec]:
    """Sources as a command line names them: PATH, PATH:KEY=VALUE,... or a TOML file of sources.

    `shared` holds settings of all sources, KEY=VALUE,...; a source's own win.
    """
    for_all = _settings(shared or "")
    found = []
    for word in words:
        if word.endswith(".toml"):
            found += _from_toml(Path(word), for_all)
            continue
        path, settings = word, ""
        if not Path(word).exists() and (colon := re.search(r":(?=[a-z_]+=)", word)):
            path, settings = word[: colon.start()], word[colon.end() :]
        found.append(_spec({"path": path, **_settings(settings)}, for_all))
    return found


def _settings(text: str) -> dict[str, Any]:
    """`sigma=38,range=0,255` -> {"sigma": "38", "range": "0,255"}: a comma before KEY= separates."""
    pairs = [part.partition("=") for part in re.split(r",(?=[a-z_]+=)", text) if part]
    found = {key: value for key, equals, value in pairs if equals}
    if len(found) < len(pairs):
        raise AssayError(f"expected KEY=VALUE,... with each key once, not {text!r}")
    return found


def _from_toml(file: Path, for_all: dict[str, Any]) -> list[SourceSpec]:
    with decoding(file, "correct it"):
        tree = tomllib.loads(file.read_text(encoding="utf-8-sig"))
        if not isinstance(tree.get("source"), list) or tree.keys() - {"all", "source"}:
            raise AssayError("expected [[source]] for each source, and [all] for what they share")

        def here(settings: dict[str, Any]) -> dict[str, Any]:
            local = {key: file.parent / value for key, value in settings.items() if key in FILES}
            return settings | {
                key: str(p) for key, p in local.items() if not str(settings[key]).startswith("hf:")
            }

        shared = {**for_all, **here(tree.get("all", {}))}
        return [_spec(here(dict(settings)), shared) for settings in tree["source"]]


def _spec(own: dict[str, Any], for_all: dict[str, Any]) -> SourceSpec:
    """A source's own settings before those of all; its own noise replaces another kind of it."""
    replaced = set(_NOISE) if own.keys() & set(_NOISE) else set()
    if own.keys() & {"levels", "map", "noise"} or own.get("sigma") not in (None, "0", 0):
        replaced |= {"gain", "read_noise", "black"} - own.keys()
    try:
        return SourceSpec(**{key: value for key, value in for_all.items() if key not in replaced} | own)
    except ValidationError as error:
        raise explained(error, path=own.get("path")) from None
