"""Named settings: the paper's three data sets with EDM's hyper-parameters, and small ones for CPUs.

The paper gives training lengths as "steps", but they are EDM's unit, thousands of images (`total_kimg`).
`max_per_device` is the share of a GPU on EDM's machines. EDM mirrors images only inside its geometric pipe.
"""

import copy
import math
from dataclasses import dataclass, field
from typing import Any

from assay.errors import AssayError, choose
from assay.nets import PRESETS as NETS

_MILLION = 1_000_000


@dataclass(frozen=True)
class Preset:
    """Settings with a name, where they come from, and the sampler that their source evaluates with."""

    about: str
    origin: str
    net: dict[str, Any]
    train: dict[str, Any]
    sample: dict[str, Any] = field(default_factory=dict)


def _edm(num_images: int, batch_size: int, **more: Any) -> dict[str, Any]:
    """EDM's training on at least `num_images` images; its `lr_rampup_kimg` is 10,000."""
    num_steps = -(-num_images // batch_size)
    settings = dict(lr_ramp_images=10 * _MILLION, ema_half_life_images=_MILLION // 2, **more)
    return dict(num_steps=num_steps, batch_size=batch_size) | settings


PRESETS: dict[str, Preset] = {
    "digits": Preset(
        "8x8 images on a CPU: about a minute",
        "chosen on scikit-learn's digits",
        dict(preset="mlp"),
        dict(num_steps=6000, batch_size=128, lr=1e-3, lr_decay="cosine", ema_half_life_images=20_000),
    ),
    "tiny": Preset(
        "images of about 16x16 on a CPU: ten minutes",
        "chosen on Fashion-MNIST at 16x16 (bench/recipe)",
        dict(preset="unet-tiny"),
        dict(num_steps=8000, batch_size=32, optimizer="muon", lr=2e-3, lr_decay="cosine")
        | dict(lr_ramp_images=12_800, ema_half_life_images=2560),
    ),
    "small": Preset(
        "16x16 to 32x32 images on a CPU: about an hour",
        "chosen on CIFAR-10 at 16x16; the optimizer on Fashion-MNIST at 16x16 (bench/recipe)",
        dict(preset="unet-small"),
        dict(num_steps=20_000, batch_size=64, optimizer="muon", lr=2e-3, lr_decay="cosine")
        | dict(ema_half_life_images=50_000, clip_grad=1.0),
    ),
    "cifar10": Preset(
        "the paper's CIFAR-10 (EDM, DDPM++)",
        "EDM's CIFAR-10: the defaults of its train.py with --arch=ddpmpp",
        dict(preset="ddpmpp-cifar10"),
        _edm(200 * _MILLION, 512, max_per_device=64, lr=1e-3, augment=dict(geometric=0.12)),
        dict(num_steps=18),
    ),
    "celeba": Preset(
        "the paper's CelebA-HQ at 64x64 (EDM's FFHQ settings)",
        "EDM's FFHQ at half the length: --batch=256 --cres=1,2,2,2 --lr=2e-4 --dropout=0.05 --augment=0.15",
        dict(preset="ddpmpp-ffhq64"),
        _edm(100 * _MILLION, 256, max_per_device=32, lr=2e-4, augment=dict(geometric=0.15)),
        dict(num_steps=40),
    ),
    "imagenet64": Preset(
        "the paper's ImageNet at 64x64 (EDM, ADM)",
        "EDM's ImageNet: --arch=adm --duration=2500 --batch=4096 --lr=1e-4 --ema=50 --augment=0 --fp16=1",
        dict(preset="adm-imagenet64"),
        _edm(2500 * _MILLION, 4096, max_per_device=128, lr=1e-4, precision="fp16", class_conditional=True)
        | dict(ema_half_life_images=50 * _MILLION),
        dict(num_steps=256, churn=40.0, churn_low=0.05, churn_high=50.0, churn_noise=1.003),
    ),
}


def preset_tree(name: str, **given: Any) -> dict[str, Any]:
    """The network and the training of a preset, with the settings of training that were `given`.

    Where these make it shorter, the ramp of the learning rate and the average of the weights do so alike.
    """
    if name in NETS and name not in PRESETS:
        what, cure = f"{name} is a network, not a whole training", f"leave it out, and --set net.preset={name}"
        raise AssayError(what, key="preset", cure=cure)
    chosen = choose(name, PRESETS, "preset")
    train = copy.deepcopy(chosen.train)
    amounts = [given.get(key, train[key]) for key in ("num_steps", "batch_size")]
    if all(isinstance(amount, int) for amount in amounts):  # else an error of the config's
        share = min(1.0, math.prod(amounts) / (train["num_steps"] * train["batch_size"]))
        for key in {"lr_ramp_images", "ema_half_life_images"} & train.keys():
            train[key] = max(1, round(train[key] * share))
    return {"net": dict(chosen.net), "train": {**train, **given}}


def suited_preset(image_shape: tuple[int, int, int]) -> str:
    """The small preset for images of this size."""
    side = max(image_shape[1:])
    return "digits" if side <= 12 else "tiny" if side <= 20 else "small"


def smaller_preset(name: str) -> str:
    """The largest of the small presets below this one, if there is any."""
    return ("", "digits", "tiny", "small")[min([*PRESETS].index(name), 3)]
