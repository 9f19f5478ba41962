"""What a run is: one frozen config, whose fields say what each setting does, its default and its limits.

Its hash, with the fingerprint of the data, says whether two runs are the same.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from assay.checkpoint import find_checkpoint
from assay.data import Augmentation, Batch, ImageSource
from assay.data.augment import NUM_AUGMENT_LABELS
from assay.data.config import DataConfig
from assay.data.loader import Pairing
from assay.denoise import Denoiser
from assay.devices import Strategy
from assay.errors import AssayError, Rules
from assay.files import content_hash, sha256
from assay.nets import NetConfig, net_code, net_kind, preset
from assay.noise import LogNormal, NoiseDistribution
from assay.registry import find, make, own_code
from assay.settings import Seed, Strict, checked
from assay.train.presets import PRESETS, suited_preset


class ConsistencyConfig(Strict):
    """The consistency loss: below sigma_tn the model learns from its own predictions above it (`assay.loss`).

    "product" is ours, "original_code" what the paper's code computes (one level drawn for both ends, so that
    only draws below sigma_tn count; gradient through the sampling), with the paper's `num_steps = 8`. As
    there, it is a sum over the images of sub_batch, divided by batch_size.
    """

    coefficient: float = Field(0.0, ge=0, description="Weight of this loss; 0 turns it off.")
    method: Literal["product", "original_code"] = Field("product", description="Ours, or the paper's code.")
    sub_batch: float = Field(0.0625, gt=0, le=1, description="Share of each batch that it is computed on.")
    num_steps: int = Field(3, ge=1, description="Steps down to s'; original_code counts levels.")
    num_samples: int = Field(32, ge=1, description="Samples for the expectation at s''; product uses two.")
    start: float = Field(0.0, ge=0, lt=1, description="Share of training before it is on; the paper: 0.8333.")
    sigma_min: float = Field(0.002, gt=0, description="The lowest level s'.")

    @property
    def num_draws(self) -> int:
        """How often it draws noise for an image."""
        return 1 + (2 if self.method == "product" else (self.num_steps - 1) * self.num_samples)

    @property
    def num_evaluations(self) -> tuple[int, int]:
        """How often it evaluates the network for an image: without gradient, and with."""
        if self.method == "product":
            return self.num_steps + 2, 1
        return 0, 1 + self.num_samples * self.num_steps  # on the way, and at its end


class OwnLoss(ABC):
    """A loss of your own: a subclass with a `kind`, by which `train.loss` names it (see `assay.registry`)."""

    kind: ClassVar[str] = "ambient"  # the paper's own; those of subclasses are found by theirs

    @abstractmethod
    def __call__(self, denoiser: Denoiser, batch: Batch, label: Tensor | None) -> Tensor:
        """The loss of each image of a batch, (B,); `label` is what to tell the denoiser."""


class TrainConfig(Strict):
    """How to train (Algorithm 1). Amounts counted in images keep their meaning when the batch size changes."""

    num_steps: int = Field(10_000, ge=1, description="Steps of training.")
    batch_size: int = Field(128, ge=1, description="Images per step, over all devices.")
    max_per_device: int | None = Field(None, ge=1, description="Most images at a time on a device (batch-gpu).")
    strategy: Strategy = Field("ddp", description="ddp keeps all weights on each device; fsdp splits them.")
    seed: Seed = Field(0, description="Decides the initial weights, the batches and the noise of training.")
    precision: Literal["32", "bf16", "fp16"] = Field("32", description="bf16 and fp16 are mixed precision.")
    init_from: Path | None = Field(None, description="A checkpoint to fine-tune.")
    continue_from: Path | None = Field(None, description="A run's folder: continue it with these settings.")

    rounds: int = Field(0, ge=0, description="How often to restore the noisy images and train on.")
    round_length: float = Field(0.5, gt=0, description="Steps of a round, as a share of num_steps.")

    optimizer: Literal["adam", "muon"] = Field(
        "adam", description="muon moves matrices by orthogonal momentum: dearer steps, but far fewer of them."
    )
    lr: float = Field(1e-3, gt=0, le=1e6, description="Learning rate of Adam.")
    lr_ramp_images: int | None = Field(
        None, ge=0, description="The rate rises over these. Default: 10,000, at most a tenth of the training."
    )
    lr_decay: Literal["none", "cosine"] = Field("none", description="cosine: the rate falls to 0 at the end.")
    betas: tuple[float, float] = Field((0.9, 0.999), description="The two betas of Adam.")
    weight_decay: float = Field(0.0, ge=0, description="Weight decay, in the unit of its kind.")
    weight_decay_kind: Literal["decoupled", "l2_sum"] = Field(
        "decoupled", description="decoupled is AdamW; l2_sum adds to the gradient of EDM's sum over pixels."
    )
    clip_grad: float | None = Field(None, gt=0, description="Largest norm of the gradient. Default: no limit.")
    ema_half_life_images: int = Field(500_000, ge=0, description="Half-life of the weights' average.")
    ema_ramp: float | None = Field(0.05, gt=0, description="The half-life is at most this share of those seen.")

    compile: bool = Field(False, description="Use torch.compile: minutes at first, then faster on most GPUs.")
    tf32: bool = Field(False, description="Faster products on GPUs, with 10 bits of mantissa. Off in EDM.")

    pairing: Pairing = Field(
        "image_first",
        description="image_first draws an image, then a level above its own (Algorithm 1); level_first draws "
        "the level first; clamped raises levels that are too low, as the original code does.",
    )
    noise: str = Field(
        "lognormal", description="Distribution of sigma_t: lognormal (EDM's), uniform (0 to 80), or your own."
    )
    sigma_mean: float = Field(-1.2, allow_inf_nan=False, description="Mean of log sigma_t, if lognormal.")
    sigma_std: float = Field(1.2, gt=0, allow_inf_nan=False, description="Deviation of log sigma_t.")
    weight: Literal["x_tn", "x_0"] = Field("x_tn", description="Whose error EDM's weight applies to.")
    loss: str = Field("ambient", description="ambient, or a loss of your own (`assay.train.OwnLoss`).")
    class_conditional: bool = Field(False, description="Tell the network the class of each image.")
    augment: Augmentation = Field(Augmentation(), description="Augmentation of the images.")
    consistency: ConsistencyConfig = Field(ConsistencyConfig(), description="The consistency loss.")

    log_every: int = Field(100, ge=1, description="Steps between two records of the loss.")
    state_every: int = Field(1000, ge=1, description="Steps between two saved states, to resume from.")
    snapshot_every: int | None = Field(None, ge=1, description="Steps between checkpoints. Default: the last.")

    def noise_distribution(self) -> NoiseDistribution:
        """The distribution that `noise` names."""
        if self.noise == LogNormal.kind:
            return LogNormal(self.sigma_mean, self.sigma_std)
        found: NoiseDistribution = make(NoiseDistribution, self.noise, "train.noise")
        return found

    def own_loss(self) -> OwnLoss | None:
        """The user's own loss that `loss` names, if it does."""
        return None if self.loss == "ambient" else make(OwnLoss, self.loss, "train.loss")

    @property
    def num_round_steps(self) -> int:
        """Steps of one round."""
        return max(1, round(self.round_length * self.num_steps))

    @property
    def total_steps(self) -> int:
        """Steps of the first training and of all rounds."""
        return self.num_steps + self.rounds * self.num_round_steps

    @property
    def ramp_images(self) -> int:
        """Images over which the learning rate rises."""
        default = min(10_000, self.num_steps * self.batch_size // 10)
        return default if self.lr_ramp_images is None else self.lr_ramp_images

    def rules(self) -> Rules:
        """Muon, fp16, a loss and a noise distribution of your own do without what they cannot have."""
        muon, decay = self.optimizer == "muon", self.weight_decay_kind != "decoupled" and self.weight_decay
        what, cure = "adds to Adam's gradient, which muon has not", "decay decoupled, or use adam"
        yield muon and decay, AssayError(what, key="train.weight_decay_kind", cure=cure)
        what = "splits the matrices that muon needs whole, and cannot scale the gradients of fp16"
        cannot = self.strategy == "fsdp" and (muon or self.precision == "fp16")
        cure = "use adam with precision 32 or bf16, or strategy ddp"
        yield cannot, AssayError(what, key="train.strategy", cure=cure)
        what, own = "belongs to the ambient loss; your own is used as it is", self.loss != "ambient"
        yield own and self.weight != "x_tn", AssayError(what, key="train.weight", cure="leave it out")
        is_set = LogNormal(self.sigma_mean, self.sigma_std) != LogNormal() and self.noise != LogNormal.kind
        what = f"belongs to {LogNormal.kind}; your own distribution is used as it is"
        yield is_set, AssayError(what, key="train.sigma_mean", cure="leave it out")


class RunConfig(Strict):
    """Everything that decides the result of a run."""

    data: DataConfig = Field(description="The images to train on.")
    net: dict[str, Any] = Field({}, description="A preset with changes, or kind and settings.")
    train: TrainConfig = Field(TrainConfig(), description="How to train.")

    def net_config(self, source: ImageSource) -> NetConfig:
        """The network for these images: preset and overrides, with shapes and classes from the data."""
        fixed = {
            "image_shape": source.image_shape,
            "num_classes": source.num_classes if self.train.class_conditional else 0,
            "augment_dim": NUM_AUGMENT_LABELS if self.train.augment.geometric > 0 else 0,
        }
        suited = {} if "kind" in self.net else PRESETS[suited_preset(source.image_shape)].net
        keys: dict[str, Any] = {**suited, **self.net}
        name = keys.pop("preset", None)
        if taken := fixed.keys() & keys.keys():
            what = "follows from the data and from [train]"
            raise AssayError(what, key=f"net.{min(taken)}", cure="leave it out")
        if self.train.class_conditional and source.num_classes == 0:
            raise AssayError(f"the images of {source.name} have no classes", key="train.class_conditional")
        base = {} if name is None else preset(name, source.image_shape).model_dump()
        tree = {**base, **fixed, **keys}
        return checked(net_kind(tree), tree, section="net")

    def decisive(self) -> dict[str, Any]:
        """All settings that decide the result, as plain values; files and own code by their contents."""
        tree = self.model_dump(mode="json", exclude={"train": {"max_per_device", "strategy"}})
        if self.train.init_from is not None:
            path = find_checkpoint(self.train.init_from)
            if not path.is_file():
                raise AssayError("does not exist", path=path, key="train.init_from", cure="check the path")
            tree["train"]["init_from"] = sha256(path)
        if self.train.continue_from is not None:  # wherever it lies; a study names runs by their contents
            tree["train"]["continue_from"] = self.train.continue_from.name
        parts = (
            find(NoiseDistribution, self.train.noise, "train.noise"),
            find(OwnLoss, self.train.loss, "train.loss"),
        )
        own = [code for code in (*map(own_code, parts), net_code(self.net)) if code]
        return tree | ({"code": content_hash(own)} if own else {})

    def fingerprint(self, source: ImageSource) -> str:
        """Hash of everything that decides the result; the path of the store does not."""
        return content_hash(self.decisive() | {"data": source.fingerprint})[:16]


def read_config(tree: Mapping[str, Any], path: Path | str | None = None) -> RunConfig:
    """Check a tree of plain values; every fault is listed with its key and, if near one, the valid name."""
    return checked(RunConfig, tree, path)
