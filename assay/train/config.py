"""What a run is: one frozen config, from TOML, presets and `--set`, with unknown keys rejected by name.

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
from assay.devices import Strategy
from assay.files import read_text
from assay.generate import RestoreConfig
from assay.nets import NET_CONFIG, NetConfig, preset
from assay.sample import SampleConfig

MIN_HELD_OUT, _MAX_HELD_OUT = 20, 3000  # by default: a score needs 20 images, the two halves of a study 40


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

    def with_stores(self, paths: Sequence[Path]) -> "DataConfig":
        """The same images read from other paths, in the order of `all_paths`."""
        stores = tuple(paths[: len(self.paths)])
        held_out = paths[-1] if isinstance(self.held_out, Path) else self.held_out
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
        fewest = MIN_HELD_OUT if held_out is None else None
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
            number = next((n for n in (2 * MIN_HELD_OUT, MIN_HELD_OUT) if num_there >= 5 * n), 0)
            number = min(max(num_there // 10, number), _MAX_HELD_OUT) if number else 0
            return resolved.model_copy(update={"held_out": number})
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

    flip_x: bool = Field(False, description="Mirror half of the images left to right.")
    flip_y: bool = Field(False, description="Mirror half of the images top to bottom.")
    turn: bool = Field(False, description="Rotate images by 0, 90, 180 or 270 degrees.")
    shift: int = Field(
        0, ge=0, description="Shift images by up to this number of whole pixels, wrapping around."
    )
    geometric: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Probability of each operation of EDM's augmentation pipeline; clean images only.",
    )
    interpolate_noisy: bool = Field(
        False,
        description="Apply geometric to noisy images too, as the original code does. For comparison only.",
    )

    def build(self) -> Augmentation:
        """The same in the form that the loader takes."""
        return Augmentation(**self.model_dump())


class ConsistencyConfig(Strict):
    """The consistency loss: below sigma_tn the model learns from its own predictions above it (`assay.loss`).

    "product" is ours. "published" is the paper's, at levels as published, and "original_code" what its code
    computes (one level drawn for both ends, so that only draws below sigma_tn count; gradient through the
    sampling): both to be compared with, at the paper's `num_steps = 8` and `num_samples = 32`.
    """

    coefficient: float = Field(0.0, ge=0, description="Weight of this loss; 0 turns it off.")
    method: Literal["product", "published", "original_code"] = Field(
        "product", description="Which form of the loss: ours, the paper's, or that of the paper's code."
    )
    sub_batch: float = Field(
        0.0625, gt=0, le=1, description="Share of each batch on which this loss is computed."
    )
    num_steps: int = Field(3, ge=1, description="Steps of the walk from an image's own level down to s'.")
    num_samples: int = Field(
        32, ge=1, description="Samples that estimate the expectation at s''; product always uses two."
    )
    start: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of training before this loss is switched on; the paper's configuration D: 0.8.",
    )
    sigma_min: float = Field(0.002, gt=0, description="The lowest level s'.")
    spacing: Literal["log", "linear"] = Field("log", description="Draw s' uniformly in log sigma or in sigma.")
    min_ratio: float = Field(0.5, gt=0, lt=1, description="The smallest ratio s'' / s'.")

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


class LoopConfig(RestoreConfig):
    """How noisy images are restored between two loops of training, and what is trained on them.

    SFBD is `trust = "everywhere"` with `method = "sample"`, Ambient Dataloops are `trust = "everywhere"` with
    `keep = 0.5`; `studies/beyond` compares them with the defaults.
    """

    trust: Literal["below", "everywhere"] = Field(
        "below",
        description="Train on restored images below the noise level of their originals and on the originals "
        "above it, or on restored images at all levels.",
    )
    length: float = Field(0.5, gt=0, description="Steps of a loop, as a share of num_steps.")


# Settings of a run that do not decide its weights.
NOT_DECISIVE: Any = {"sample": True, "train": {"max_per_device", "strategy"}}


class TrainConfig(Strict):
    """How to train (Algorithm 1). Amounts counted in images keep their meaning when the batch size changes."""

    num_steps: int = Field(10_000, ge=1, description="Steps of training.")
    batch_size: int = Field(128, ge=1, description="Images per step, over all devices.")
    max_per_device: int | None = Field(
        None,
        ge=1,
        description="Most images at a time on a device (EDM's batch-gpu): a larger share of the batch takes "
        "several backward passes. Changes memory and speed, and the result by rounding and dropout only.",
    )
    strategy: Strategy = Field(
        "ddp",
        description="On several devices, ddp keeps all weights on each; fsdp splits weights, averages and the "
        "optimizer's state over them, for networks that do not fit. Changes the result by rounding only.",
    )
    accumulate: int = Field(
        1, ge=1, description="Backward passes per step, for batches that do not fit in memory."
    )
    seed: int = Field(0, description="Decides the initial weights, the batches and the noise of training.")
    precision: Literal["32", "bf16", "fp16"] = Field(
        "32", description="Number format of the network; bf16 and fp16 are mixed precision."
    )
    init_from: Path | None = Field(None, description="A checkpoint to fine-tune.")
    continue_from: Path | None = Field(
        None, description="The folder of another run: continue from its last state, with these settings."
    )

    loops: int = Field(
        0,
        ge=0,
        description="Restore the noisy images with the trained model and train on, this many times.",
    )
    restore: LoopConfig = Field(LoopConfig(), description="How loops restore images and train on them.")

    optimizer: Literal["adam", "muon"] = Field(
        "adam",
        description="muon moves the matrices of the network by orthogonal momentum, at ten times the learning "
        "rate, and the rest by Adam: dearer steps, but far fewer of them.",
    )
    lr: float = Field(1e-3, gt=0, description="Learning rate of Adam.")
    lr_ramp_images: int = Field(
        10_000, ge=0, description="The learning rate rises linearly over this number of images."
    )
    lr_decay: Literal["none", "cosine"] = Field(
        "none", description="cosine lets the learning rate fall to 0 at the end."
    )
    betas: tuple[float, float] = Field((0.9, 0.999), description="The two betas of Adam.")
    weight_decay: float = Field(0.0, ge=0, description="Weight decay; the paper uses it in configuration E.")
    weight_decay_kind: Literal["decoupled", "l2"] = Field(
        "decoupled", description="decoupled is AdamW; l2 adds to Adam's gradient, as the original code does."
    )
    clip_grad: float | None = Field(None, gt=0, description="Largest norm of the gradient. Default: no limit.")
    ema_half_life_images: int = Field(
        500_000, ge=0, description="Half-life of the moving average of the weights (EMA), in images."
    )
    ema_ramp: float | None = Field(
        0.05, gt=0, description="The half-life is at most this share of the images seen so far."
    )

    compile: bool = Field(
        False, description="Use torch.compile: minutes at the start, then faster steps on most GPUs."
    )
    tf32: bool = Field(
        False, description="Faster float32 products on GPUs, with 10 bits of mantissa. EDM leaves it off."
    )
    cudnn_benchmark: bool = Field(True, description="On GPUs, try which convolution is fastest.")

    pairing: Pairing = Field(
        "image_first",
        description="image_first draws an image, then a level above its own (Algorithm 1); sigma_first draws "
        "the level first; clamped raises levels that are too low, as the original code does.",
    )
    sigma_mean: float = Field(-1.2, description="Mean of log sigma_t in training.")
    sigma_std: float = Field(1.2, gt=0, description="Standard deviation of log sigma_t in training.")
    weight: Literal["x_tn", "x_0"] = Field(
        "x_tn", description="Whether EDM's weight applies to the error of x_tn or to that of x_0."
    )
    class_conditional: bool = Field(False, description="Tell the network the class of each image.")
    augment: AugmentConfig = Field(AugmentConfig(), description="Augmentation of the images.")
    consistency: ConsistencyConfig = Field(ConsistencyConfig(), description="The consistency loss.")

    log_every: int = Field(100, ge=1, description="Steps between two records of the loss.")
    state_every: int = Field(
        1000, ge=1, description="Steps between two saved states, from which a run resumes."
    )
    snapshot_every: int | None = Field(
        None, ge=1, description="Steps between two checkpoints. Default: only the final one."
    )
    average_every: int | None = Field(
        None,
        ge=1,
        description="Steps between two saved averages, from which assay average makes an EMA of any length.",
    )
    picture_every: int | None = Field(
        None, ge=1, description="Steps between two pictures of samples. Default: none."
    )

    @property
    def num_loop_steps(self) -> int:
        """Steps of one loop."""
        return max(1, round(self.restore.length * self.num_steps))

    @property
    def total_steps(self) -> int:
        """Steps of the first training and of all loops."""
        return self.num_steps + self.loops * self.num_loop_steps


class RunConfig(Strict):
    """Everything that decides the result of a run, and how its pictures are sampled, which does not."""

    data: DataConfig = Field(description="The images to train on.")
    net: dict[str, Any] = Field(
        {"preset": "unet-small"},
        description="The network: a preset (`assay net list`) with overrides, or kind and its settings.",
    )
    train: TrainConfig = Field(TrainConfig(), description="How to train.")
    sample: SampleConfig = Field(
        SampleConfig(), description="How the pictures of the run are sampled; no influence on the weights."
    )

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
        """Hash of everything that decides the result; the path of the store does not."""
        tree = self.model_dump(mode="json", exclude=NOT_DECISIVE)
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
        raise ValueError(f"{path} is not valid TOML: {error}: correct it there") from None


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
