"""The paper's presets against EDM's published settings, which the paper says it uses."""

from typing import Any

import pytest

from assay.nets import preset
from assay.sample import SampleConfig
from assay.train.config import TrainConfig, read_config
from assay.train.presets import PRESETS, preset_tree, suited_preset
from tests.errors import rejected

# EDM's README: training configurations and sampling commands; durations as the paper's `total_kimg`.
# million images, batch, lr, EMA half-life in million images, dropout, augmentation, channels, multipliers,
# fp16, class-conditional, sampling steps, (S_churn, S_min, S_max, S_noise)
PUBLISHED: dict[str, tuple[Any, ...]] = {
    "cifar10": (200, 512, 1e-3, 0.5, 0.13, 0.12, 128, (2, 2, 2), False, False, 18, None),
    "celeba": (100, 256, 2e-4, 0.5, 0.05, 0.15, 128, (1, 2, 2, 2), False, False, 40, None),
    "imagenet64": (2500, 4096, 1e-4, 50, 0.1, 0, 192, (1, 2, 3, 4), True, True, 256, (40, 0.05, 50, 1.003)),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_papers_presets_are_edms(name: str) -> None:
    millions, batch, lr, ema, dropout, augment, channels, multipliers, fp16, conditional, steps, churn = (
        PUBLISHED[name]
    )
    train = read_config({"data": {"store": "x"}, **preset_tree(name)}).train
    assert 0 <= train.num_steps * train.batch_size - millions * 10**6 < train.batch_size
    assert (train.batch_size, train.lr, train.ema_half_life_images) == (batch, lr, ema * 10**6)
    assert (train.lr_ramp_images, train.ema_ramp, train.betas) == (10_000_000, 0.05, (0.9, 0.999))
    assert (train.sigma_mean, train.sigma_std, train.lr_decay) == (-1.2, 1.2, "none")
    assert train.optimizer == "adam"
    assert train.max_per_device == batch // (32 if name == "imagenet64" else 8)  # on EDM's 32 or 8 GPUs
    assert train.augment.geometric == augment and not train.augment.flip_x  # EDM: xflip=False
    assert (train.precision == "fp16", train.class_conditional) == (fp16, conditional)
    net = preset(PRESETS[name].net["preset"])
    assert (net.dropout, net.model_channels, net.channel_mult) == (dropout, channels, multipliers)
    sample = SampleConfig(**PRESETS[name].sample)
    assert (sample.num_steps, sample.solver) == (steps, "heun")
    assert (sample.sigma_min, sample.sigma_max, sample.rho) == (0.002, 80, 7)
    if churn is None:
        assert sample.churn == 0
    else:
        assert (sample.churn, sample.churn_low, sample.churn_high, sample.churn_noise) == churn


def test_every_preset_is_valid_and_says_where_it_comes_from() -> None:
    for name, chosen in PRESETS.items():
        read_config({"data": {"store": "x"}, **preset_tree(name)})
        assert chosen.about and chosen.origin
    with rejected("preset"):
        preset_tree("imagnet")


def test_a_shortened_preset_has_a_shorter_ramp_and_average() -> None:
    whole, short = (preset_tree("tiny", **given)["train"] for given in ({}, {"num_steps": 300}))
    assert (whole["lr_ramp_images"], whole["ema_half_life_images"]) == (12_800, 2560)
    assert (short["lr_ramp_images"], short["ema_half_life_images"]) == (480, 96)
    assert preset_tree("tiny", num_steps=16_000)["train"]["lr_ramp_images"] == 12_800  # never longer
    assert preset_tree("tiny", num_steps=300, lr_ramp_images=7)["train"]["lr_ramp_images"] == 7
    for num_steps, ramp in ((10, 32), (1000, 3200), (10_000, 10_000)):
        assert TrainConfig(num_steps=num_steps, batch_size=32).ramp_images == ramp
    for side, name in ((8, "mlp"), (16, "unet-tiny"), (32, "unet-small"), (128, "unet-small")):
        assert PRESETS[suited_preset((3, side, side))].net["preset"] == name
