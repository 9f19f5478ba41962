"""Named settings: the paper's three data sets with EDM's hyper-parameters, and small ones for CPUs."""

import copy
from typing import Any

PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "digits": (
        "8x8 images on a CPU: about a minute",
        {
            "net": {"preset": "mlp"},
            "train": {
                "num_steps": 6000,
                "batch_size": 128,
                "lr": 1e-3,
                "lr_decay": "cosine",
                "ema_half_life_images": 20_000,
                "state_every": 1000,
            },
        },
    ),
    "small": (
        "16x16 to 32x32 images on a CPU: about an hour",
        {
            "net": {"preset": "unet-small"},
            "train": {
                "num_steps": 20_000,
                "batch_size": 64,
                "lr": 5e-4,
                "lr_decay": "cosine",
                "ema_half_life_images": 50_000,
                "clip_grad": 1.0,
            },
        },
    ),
    "cifar10": (
        "the paper's CIFAR-10 (EDM, DDPM++)",
        {
            "net": {"preset": "ddpmpp-cifar10"},
            "train": {
                "num_steps": 200_000,
                "batch_size": 512,
                "lr": 1e-3,
                "lr_ramp_images": 10_000_000,
                "augment": {"flip_x": True, "geometric": 0.12},
            },
        },
    ),
    "celeba": (
        "the paper's CelebA-HQ at 64x64 (EDM's FFHQ settings)",
        {
            "net": {"preset": "ddpmpp-ffhq64"},
            "train": {
                "num_steps": 100_000,
                "batch_size": 256,
                "lr": 2e-4,
                "lr_ramp_images": 10_000_000,
                "augment": {"flip_x": True, "geometric": 0.15},
            },
        },
    ),
    "imagenet64": (
        "the paper's ImageNet at 64x64 (EDM, ADM)",
        {
            "net": {"preset": "adm-imagenet64"},
            "train": {
                "num_steps": 2_500_000,
                "batch_size": 4096,
                "lr": 1e-4,
                "lr_ramp_images": 10_000_000,
                "ema_half_life_images": 50_000_000,
                "precision": "fp16",
                "class_conditional": True,
                "augment": {"flip_x": True},
            },
        },
    ),
}


def preset_tree(name: str) -> dict[str, Any]:
    """A copy of the preset's settings, to be completed by a config."""
    if name not in PRESETS:
        raise ValueError(f"no training preset is called {name!r}; there are {', '.join(PRESETS)}")
    return copy.deepcopy(PRESETS[name][1])
