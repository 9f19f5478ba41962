"""What a run is: one frozen config, from TOML, presets and `--set`, with unknown keys refused by name.

    [data]   which images to train on, and what noise to add to them
    [net]    a preset with overrides, or a whole network
    [train]  Algorithm 1 and its surroundings
    [sample] how the pictures of a run are sampled

The config names the run: its hash, with the fingerprint of the data, says whether two runs are the same.
"""

import difflib
import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from assay.data import Augmentation, ImageSource, open_store, view
from assay.data.augment import NUM_AUGMENT_LABELS
from assay.data.known import KNOWN, get_once
from assay.data.loader import Pairing
from assay.files import read_text
from assay.nets import NET_CONFIG, NetConfig, preset
from assay.sample import SampleConfig

_MIN_HELD_OUT, _MAX_HELD_OUT = 20, 3000  # images, where nothing is said: a score needs 20


class Strict(BaseModel):
    """A config section: frozen, no unknown keys, no silent conversions."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class DataConfig(Strict):
    """The images: where they are, which of them are trained on, and what noise is added. The same in studies.

    Keys act in the order of this list, each on what the ones before it left.
    """

    store: Path | tuple[Path, ...] = Field(
        description="A store, a data set that Assay knows by name (digits, fashion-mnist, cifar10), or a list "
        "of stores taken together."
    )
    size: int | None = Field(None, ge=1, description="Scale a known data set to size x size pixels.")
    classes: tuple[str, ...] = Field((), description="Keep only these classes of a known data set.")
    num_images: int | None = Field(None, ge=1, description="Keep only the first images of a known data set.")
    held_out: int | float | Path | None = Field(
        None,
        description="Images set aside for evaluation and never trained on: a share (0.1) or a number (500) of "
        "the clean images, or of the noisy ones if none is clean; or the path of another store. With "
        "num_images they are the images after the first num_images. Default: none; in studies a tenth.",
    )
    raise_to: float | None = Field(
        None, gt=0, description="Add noise to the noisy images below this level, up to it."
    )
    clean: int | float = Field(
        1.0, ge=0, description="The clean images to train on: a share (0.5) or a number (500) of them."
    )
    noisy: int | float = Field(
        1.0, ge=0, description="The noisy images to train on: a share (0.5) or a number (500) of them."
    )
    levels: tuple[float, float] | None = Field(
        None, description="Keep only noisy images with a noise level between these two (or equal to one)."
    )
    clean_fraction: float | None = Field(
        None, ge=0, le=1, description="Simulate: this share of clean images stays clean, the others get noise."
    )
    sigma: float | tuple[tuple[float, float], ...] | None = Field(
        None, description="Simulate: the level of that noise, or a list of (share, level) for several levels."
    )
    keep_noisy: bool = Field(True, description="Simulate: false drops the images that would get noise.")
    seed: int = Field(0, description="Decides which images are chosen, and their noise.")

    def open(self) -> ImageSource:
        """The images to train on."""
        self._check()
        source = self._split()[0]
        if self.raise_to is not None:
            source = view.raised(source, self.raise_to, self.seed)
        if (self.clean, self.noisy, self.levels) != (1.0, 1.0, None):
            source = view.part(source, self.clean, self.noisy, self.levels, self.seed)
        if self.clean_fraction is None:
            return source
        if self.sigma is None:
            return view.simulate(source, self.clean_fraction, 1.0, self.seed, keep_noisy=False)
        return view.simulate(source, self.clean_fraction, self.sigma, self.seed, self.keep_noisy)

    def open_held_out(self) -> ImageSource | None:
        """The images set aside, if any."""
        return self._split()[1]

    def _split(self) -> tuple[ImageSource, ImageSource | None]:
        data = self.resolved()
        stores = [open_store(path) for path in data.paths]
        source = view.usable(stores[0] if len(stores) == 1 else view.Joined(stores), self.seed)
        if not data.held_out:
            return source, None
        if isinstance(data.held_out, Path):
            held_out = view.usable(open_store(data.held_out), self.seed)
            view.Joined([source, held_out])  # an error if their images differ in shape or classes
            if held_out.fingerprint == source.fingerprint:
                raise ValueError(f"data.held_out = {str(data.held_out)!r} is the store that is trained on")
            return source, held_out
        kind: Literal["clean", "noisy"] = "clean" if bool((source.sigma_tn == 0).any()) else "noisy"
        group = getattr(source, "group", None)  # patches of one picture are held out together
        return view.split_held_out(source, data.held_out, self.seed, kind, group)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The stores."""
        return (self.store,) if isinstance(self.store, Path) else self.store

    @property
    def all_paths(self) -> tuple[Path, ...]:
        """The stores, and the one that is held out, if it is one."""
        return (*self.paths, self.held_out) if isinstance(self.held_out, Path) else self.paths

    def moved(self, places: Sequence[Path]) -> "DataConfig":
        """The same images with `all_paths` at other places."""
        stores = tuple(places[: len(self.paths)])
        held_out = places[-1] if isinstance(self.held_out, Path) else self.held_out
        return self.model_copy(update={"store": stores if len(stores) > 1 else stores[0], "held_out": held_out})

    def resolved(self, folder: Path = Path("stores"), hold_out: bool = False) -> "DataConfig":
        """The same images with paths alone: known data sets are packed into `folder`, once.

        `hold_out`: unless `held_out` says otherwise, hold out the images that follow the first `num_images`,
        or a tenth.
        """
        known = [path for path in self.paths if str(path) in KNOWN and not (path / "meta.json").exists()]
        if (self.size or self.classes or self.num_images) and (len(self.paths) > 1 or not known):
            raise ValueError(
                "data.size, data.classes and data.num_images take a part of one known data set "
                f"({', '.join(KNOWN)}); data.store is a store of yours or a list: pack the images you want"
            )
        held_out, num_following = self.held_out, 0
        fewest = _MIN_HELD_OUT if held_out is None else None
        if self.num_images is not None and not isinstance(held_out, Path):
            number = _MAX_HELD_OUT * hold_out if held_out is None else held_out
            num_following = view.count_of(number, self.num_images)
        stores = []
        for path in self.paths:
            if path not in known:
                if not path.exists():
                    names = ", ".join(KNOWN)
                    raise ValueError(f"data.store = {str(path)!r} is neither a store here nor one of {names}")
                stores.append(path)
                continue
            try:
                packed = get_once(
                    str(path), folder, self.size, self.classes, self.num_images, num_following, fewest
                )
            except ValueError as error:
                raise ValueError(f"data.store: {error}") from None
            stores.append(packed[0])
            held_out = packed[1] or held_out
        store = stores[0] if len(stores) == 1 else tuple(stores)
        plain = {"store": store, "size": None, "classes": (), "num_images": None, "held_out": held_out}
        resolved = self.model_copy(update=plain)
        if held_out is None and hold_out:
            sigma_tn = resolved.open().sigma_tn
            num_there = int((sigma_tn == 0).sum()) or len(sigma_tn)
            number = min(max(num_there // 10, _MIN_HELD_OUT), _MAX_HELD_OUT)
            return resolved.model_copy(update={"held_out": number if num_there >= 5 * number else 0})
        return resolved

    def _check(self) -> None:
        """Reject keys that contradict each other."""
        for key in ("clean", "noisy", "held_out"):
            value = getattr(self, key)
            if isinstance(value, int) and value == 1:
                raise ValueError(f"data.{key} = 1 would be one image: write 1.0 for all of them")
        if self.levels is not None and not 0 < self.levels[0] <= self.levels[1]:
            raise ValueError(
                f"data.levels = {list(self.levels)}: give the lowest level and the highest, both > 0"
            )
        if self.clean_fraction is None:
            if self.sigma is not None or not self.keep_noisy:
                raise ValueError(
                    "data.sigma and data.keep_noisy are for simulated noise: set data.clean_fraction too "
                    "(data.noisy = 0 drops images that really are noisy)"
                )
        elif self.clean_fraction < 1 and self.keep_noisy and self.sigma is None:
            raise ValueError("data.clean_fraction below 1 needs data.sigma, the noise of the other images")


class AugmentConfig(Strict):
    """What may be done to images; see `assay.data.Augmentation` for what is safe on noisy ones."""

    flip_x: bool = False
    flip_y: bool = False
    turn: bool = False
    shift: int = Field(0, ge=0)
    geometric: float = Field(0.0, ge=0, le=1)
    interpolate_noisy: bool = False

    def build(self) -> Augmentation:
        """The same as the loader wants it."""
        return Augmentation(**self.model_dump())


class ConsistencyConfig(Strict):
    """The consistency loss: below sigma_tn learn from one's own predictions above (see `assay.loss`).

    "product" is ours. "published" is the paper's, at levels as published, and "original_code" what its code
    computes (one level drawn for both ends, so that only draws below sigma_tn count; gradient through the
    sampling): both to be compared with, at the paper's `num_steps = 8` and `num_samples = 32`.
    """

    coefficient: float = Field(0.0, ge=0)
    method: Literal["product", "published", "original_code"] = "product"
    sub_batch: float = Field(0.125, gt=0, le=1)  # share of each batch it is computed on
    num_steps: int = Field(3, ge=1)  # of the walk down to s'
    num_samples: int = Field(32, ge=1)  # to estimate the expectation at s''; "product" takes two
    start: float = Field(0.0, ge=0, lt=1)  # share of training before it is switched on; configuration D: 0.8
    sigma_min: float = Field(0.002, gt=0)
    spacing: Literal["log", "linear"] = "log"
    min_ratio: float = Field(0.5, gt=0, lt=1)

    def is_on(self, step: int, num_steps: int) -> bool:
        """Whether it is part of the loss at this step of a run."""
        return self.coefficient > 0 and step >= self.start * num_steps

    @property
    def num_draws(self) -> int:
        """How often it draws noise for an image."""
        match self.method:
            case "product":
                return 1 + 2
            case "published":
                return 1 + self.num_steps + self.num_samples
            case "original_code":
                return 1 + self.num_steps * self.num_samples


class TrainConfig(Strict):
    """Algorithm 1 and its surroundings. What is counted in images keeps its meaning when batches change."""

    num_steps: int = Field(10_000, ge=1)
    batch_size: int = Field(128, ge=1)  # over all devices
    accumulate: int = Field(1, ge=1)  # backward passes per step
    seed: int = 0
    precision: Literal["32", "bf16", "fp16"] = "32"
    init_from: Path | None = None  # a checkpoint to fine-tune
    continue_from: Path | None = None  # a run's folder: go on from its last state, under these settings

    lr: float = Field(1e-3, gt=0)
    lr_ramp_images: int = Field(10_000, ge=0)
    lr_decay: Literal["none", "cosine"] = "none"
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = Field(0.0, ge=0)  # configuration E
    weight_decay_kind: Literal["decoupled", "l2"] = "decoupled"  # AdamW; l2 in Adam's gradient is the original
    clip_grad: float | None = Field(None, gt=0)
    ema_half_life_images: int = Field(500_000, ge=0)
    ema_ramp: float | None = Field(0.05, gt=0)  # the half-life is at most this share of the images seen

    compile: bool = False  # torch.compile: minutes at the start, then faster steps on most GPUs
    tf32: bool = False  # faster float32 products on GPUs, with 10 bits of mantissa; EDM's choice is off
    cudnn_benchmark: bool = True  # on GPUs, try which convolution is fastest

    pairing: Pairing = "image_first"
    sigma_mean: float = -1.2  # of log sigma_t
    sigma_std: float = Field(1.2, gt=0)
    weight: Literal["x_tn", "x_0"] = "x_tn"
    class_conditional: bool = False
    augment: AugmentConfig = AugmentConfig()
    consistency: ConsistencyConfig = ConsistencyConfig()

    log_every: int = Field(100, ge=1)
    state_every: int = Field(1000, ge=1)
    snapshot_every: int | None = Field(None, ge=1)  # EMA weights besides the final ones
    average_every: int | None = Field(None, ge=1)  # averages to choose the EMA's length from afterwards
    picture_every: int | None = Field(None, ge=1)


class RunConfig(Strict):
    """Everything that decides the result of a run, and how its pictures are sampled, which does not."""

    data: DataConfig
    net: dict[str, Any] = {"preset": "unet-small"}
    train: TrainConfig = TrainConfig()
    sample: SampleConfig = SampleConfig()

    def net_config(self, source: ImageSource) -> NetConfig:
        """The network for these images: preset and overrides, with shapes and classes from the data."""
        fixed = {
            "image_shape": source.image_shape,
            "num_classes": source.num_classes if self.train.class_conditional else 0,
            "augment_dim": NUM_AUGMENT_LABELS if self.train.augment.geometric > 0 else 0,
        }
        keys = dict(self.net)
        name = keys.pop("preset", None)
        if taken := fixed.keys() & keys.keys():
            raise ValueError(f"net.{min(taken)} follows from the data and from [train]: leave it out")
        if self.train.class_conditional and source.num_classes == 0:
            raise ValueError(f"train.class_conditional: the images of {source.name} have no classes")
        base = {} if name is None else preset(name, source.image_shape).model_dump()
        try:
            return NET_CONFIG.validate_python({**base, **fixed, **keys})
        except ValidationError as error:
            faults = [_explain_net(dict(fault)) for fault in error.errors()]
            raise ValueError("; ".join(dict.fromkeys(faults))) from None

    def fingerprint(self, source: ImageSource) -> str:
        """Hash of all that decides the result, independent of where the store lies."""
        tree = self.model_dump(mode="json", exclude={"sample"})
        tree["data"] = source.fingerprint
        return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]


def read_config(tree: Mapping[str, Any], name: str = "config") -> RunConfig:
    """Check a tree of plain values; every fault is listed with its key and, if near one, the valid name."""
    try:
        # As JSON, where strict types still take a list for a tuple and a string for a path.
        return RunConfig.model_validate_json(json.dumps(tree, default=str))
    except ValidationError as error:
        faults = [explain(dict(fault), RunConfig) for fault in error.errors()]
        raise ValueError(f"{name}: " + "; ".join(dict.fromkeys(faults))) from None


def explain(fault: Mapping[str, Any], model: type[BaseModel]) -> str:
    """One of pydantic's errors about `model` as a phrase, with the nearest valid name of a misspelt key."""
    path = [str(part) for part in fault["loc"]]
    key = ".".join(path)
    if fault["type"] != "extra_forbidden":
        given = "" if fault["type"] == "missing" else f" (got {fault['input']!r})"
        return f"{key}: {fault['msg'].lower()}{given}"
    for part in fault["loc"][:-1]:
        if isinstance(part, str):
            annotation = model.model_fields[part].annotation
            inner = [annotation, *get_args(annotation)]  # a section, or a tuple of sections
            model = next(kind for kind in inner if isinstance(kind, type) and issubclass(kind, BaseModel))
    near = difflib.get_close_matches(path[-1], model.model_fields, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(model.model_fields)}"
    return f"{key} is not a setting; {hint}"


def _explain_net(fault: Mapping[str, Any]) -> str:
    """The same for a network, whose errors name its kind first."""
    kinds = {kind.model_fields["kind"].default: kind for kind in get_args(get_args(NetConfig)[0])}
    if not fault["loc"]:
        return f"net.kind is none of {', '.join(kinds)}: set it, or net.preset"
    kind, *key = fault["loc"]
    if not key:
        return "net: " + fault["msg"].removeprefix("Value error, ")
    return "net." + explain({**fault, "loc": key}, kinds[kind])


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as a tree; a mistake in it is reported with file and line."""
    try:
        return tomllib.loads(read_text(path, "give a TOML file"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: {error}") from None


def override(tree: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Apply settings like train.lr=3e-4; values are TOML, or strings if they are not."""
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"settings = {setting}: expected KEY=VALUE, e.g. train.lr=3e-4")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        *sections, last = key.strip().split(".")
        branch: Any = tree
        for section in sections:
            if isinstance(branch, list) and section.isdigit() and int(section) < len(branch):
                branch = branch[int(section)]  # extra.0 is the first [[extra]]
                continue
            if not isinstance(branch, dict):
                raise ValueError(f"settings = {setting}: {section} is not a part of a list or section")
            branch = branch.setdefault(section, {})
        if not isinstance(branch, dict):
            raise ValueError(f"settings = {setting}: {sections[-1]} is a value, not a section")
        branch[last] = value
    return tree
