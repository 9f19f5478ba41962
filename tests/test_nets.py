"""Networks against the original code's outputs, a plain reading of their equations, and closed forms."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from assay.checkpoint import config_from_edm, load_checkpoint
from assay.denoise import Preconditioned
from assay.nets import (
    ADMConfig,
    DiTConfig,
    MLPConfig,
    NetConfig,
    UNetConfig,
    build_denoiser,
    measure_cost,
    net_kind,
    preset,
)
from assay.nets.layers import Block
from tests.errors import fault

GOLDEN = Path(__file__).parent / "golden"
CONDITIONS: dict[str, Any] = dict(image_shape=(2, 8, 8), num_classes=3, augment_dim=4)
SMALL: list[NetConfig] = [
    UNetConfig(**CONDITIONS, model_channels=8, channel_mult=(1, 2), num_blocks=1),
    ADMConfig(**CONDITIONS, model_channels=64, channel_mult=(1, 1), num_blocks=1),
    DiTConfig(**CONDITIONS, width=64, num_blocks=2),
    MLPConfig(**CONDITIONS, width=32, num_blocks=2),
]


def randomise(module: torch.nn.Module, seed: int = 0) -> None:
    """Weights of ordinary size everywhere: initial ones hide what residuals do by starting near zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            fan_in = max(1, parameter[0].numel())
            parameter.copy_(1 + 0.2 * noise if parameter.ndim == 1 else noise / math.sqrt(fan_in))


def inputs(config: NetConfig, batch: int = 3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch, *config.image_shape, generator=generator)
    label = torch.arange(batch) % max(1, config.num_classes)
    augment = torch.randn(batch, config.augment_dim, generator=generator)
    return x, torch.tensor([0.01, 0.5, 20.0])[:batch], label, augment


@pytest.fixture(params=SMALL, ids=lambda config: config.kind)
def config(request: pytest.FixtureRequest) -> NetConfig:
    """A small network of each kind."""
    chosen: NetConfig = request.param
    return chosen


@pytest.fixture
def denoiser(config: NetConfig) -> Preconditioned:
    """That network with weights of ordinary size."""
    built = build_denoiser(config).eval()
    randomise(built)
    return built


def relative(value: Tensor, expected: Tensor) -> float:
    """The largest error over images, relative to the image."""
    difference = (value.double() - expected.double()).flatten(1).norm(dim=1)
    return float((difference / expected.double().flatten(1).norm(dim=1)).detach().max())


@pytest.mark.parametrize("name", ["edm_ddpmpp", "edm_ncsnpp_cond", "edm_adm_cond"])
def test_matches_the_original_code(name: str) -> None:
    denoiser = load_checkpoint(GOLDEN / name).denoiser
    io = {key: torch.from_numpy(value) for key, value in np.load(GOLDEN / name / "io.npz").items()}
    with torch.no_grad():
        output = denoiser(io["x"], io["sigma"], io.get("labels"), io.get("augment_labels"))
    assert relative(output, io["expected"]) < 5e-6


def plain_u_net(config: UNetConfig | ADMConfig, weights: dict[str, Tensor], emb: Tensor, x: Tensor) -> Tensor:
    """The U-Nets read off their equations in float64, one unfused operation at a time, by weight name."""
    song = isinstance(config, UNetConfig)
    eps, scale = (1e-6, math.sqrt(0.5)) if song else (1e-5, 1.0)

    def conv(name: str, x: Tensor) -> Tensor:
        weight = weights[f"{name}.weight"]
        return F.conv2d(x, weight, weights[f"{name}.bias"], padding=weight.shape[-1] // 2)

    def norm(name: str, x: Tensor) -> Tensor:
        groups = x.unflatten(1, (min(32, x.shape[1] // 4), -1))
        mean = groups.mean((2, 3, 4), keepdim=True)
        variance = (groups - mean).square().mean((2, 3, 4), keepdim=True)
        normal = ((groups - mean) / (variance + eps).sqrt()).flatten(1, 2)
        return normal * weights[f"{name}.weight"][:, None, None] + weights[f"{name}.bias"][:, None, None]

    def smooth(x: Tensor, kernel: Tensor, role: str, padding: int | None = None) -> Tensor:
        padding = (kernel.shape[-1] - 1) // 2 if padding is None else padding
        kernel = kernel.expand(x.shape[1], -1, -1, -1)
        if "down" in role:
            return F.conv2d(x, kernel, stride=2, padding=padding, groups=x.shape[1])
        return F.conv_transpose2d(x, 4 * kernel, stride=2, padding=padding, groups=x.shape[1])

    def resampled(name: str, role: str, x: Tensor) -> Tensor:
        kernel = weights.get(f"{name}.resample_filter")
        return x if kernel is None else smooth(x, kernel, role)

    def attention(name: str, x: Tensor, heads: int) -> Tensor:
        batch, channels, height, width = x.shape
        qkv, shape = conv(f"{name}.qkv", norm(f"{name}.norm2", x)), (batch, heads, channels // heads, 3)
        query, key, value = qkv.view(*shape, height * width).unbind(3)
        logits = torch.einsum("bhcq,bhck->bhqk", query, key) / math.sqrt(channels // heads)
        mixed = torch.einsum("bhqk,bhck->bhcq", logits.softmax(-1), value)
        return conv(f"{name}.proj", mixed.reshape(x.shape))

    def block(name: str, role: str, x: Tensor) -> Tensor:
        if f"{name}.norm0.weight" not in weights:  # levels that change without a block
            x = resampled(name, role, x)
            return conv(name, x) if f"{name}.weight" in weights else x
        hidden = conv(f"{name}.conv0", resampled(f"{name}.conv0", role, F.silu(norm(f"{name}.norm0", x))))
        change = (emb @ weights[f"{name}.affine.weight"].T + weights[f"{name}.affine.bias"])[:, :, None, None]
        if song:
            hidden = norm(f"{name}.norm1", hidden + change)
        else:
            factor, shift = change.chunk(2, dim=1)
            hidden = norm(f"{name}.norm1", hidden) * (1 + factor) + shift
        hidden = conv(f"{name}.conv1", F.silu(hidden))
        skip = resampled(f"{name}.skip", role, x)
        skip = conv(f"{name}.skip", skip) if f"{name}.skip.weight" in weights else skip
        x = scale * (skip + hidden)
        if f"{name}.qkv.weight" in weights:
            heads = 1 if song else x.shape[1] // 64
            x = scale * (x + attention(name, x, heads))
        return x

    names: dict[str, list[str]] = {"enc": [], "dec": []}
    for key in weights:
        part, _, rest = key.partition(".")
        name = rest.partition(".")[0]
        if part in names and name not in names[part]:
            names[part].append(name)
    aux, remembered = x, []
    for name in names["enc"]:
        where = f"enc.{name}"
        if "aux_residual" in name:
            kernel = weights[f"{where}.resample_filter"]
            padded = F.pad(aux, [1 + (kernel.shape[-1] - 1) // 2] * 4)
            wide = F.conv2d(padded, weights[f"{where}.weight"], weights[f"{where}.bias"])
            x = remembered[-1] = aux = (x + smooth(wide, kernel, "down", padding=0)) / math.sqrt(2)
        else:
            x = conv(where, x) if name.endswith("_conv") else block(where, name, x)
            remembered.append(x)
    output = torch.zeros(())
    for name in names["dec"]:
        where = f"dec.{name}"
        if "aux_conv" in name:
            output = conv(where, F.silu(norm(where.replace("conv", "norm"), x)))
        elif "aux_norm" not in name:
            x = block(where, name, torch.cat([x, remembered.pop()], 1) if "block" in name else x)
    return output if song else conv("out_conv", F.silu(norm("out_norm", x)))


def plain_embedding(
    config: UNetConfig | ADMConfig, weights: dict[str, Tensor], c_noise: Tensor, label: Tensor, augment: Tensor
) -> Tensor:
    def linear(name: str, vector: Tensor) -> Tensor:
        return vector @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", torch.zeros(()))

    song = isinstance(config, UNetConfig)
    if "map_noise.freqs" in weights:
        frequencies = 2 * math.pi * weights["map_noise.freqs"]
    else:
        count = weights["map_layer0.weight"].shape[1] // 2
        frequencies = 10000.0 ** (-torch.arange(count).double() / (count - song))
    angle = c_noise[:, None] * frequencies
    emb = torch.cat([angle.sin(), angle.cos()] if song else [angle.cos(), angle.sin()], dim=1)
    classes = F.one_hot(label, config.num_classes).double() if config.num_classes else None
    if song and classes is not None:
        emb = emb + linear("map_label", classes * math.sqrt(config.num_classes))
    if config.augment_dim:
        emb = emb + linear("map_augment", augment)
    emb = linear("map_layer1", F.silu(linear("map_layer0", emb)))
    if not song and classes is not None:
        emb = emb + linear("map_label", classes)
    return F.silu(emb)


common = dict(
    image_shape=st.sampled_from([(1, 8, 8), (3, 16, 16), (2, 12, 20)]),
    num_classes=st.sampled_from([0, 3]),
    augment_dim=st.sampled_from([0, 5]),
    channel_mult=st.sampled_from([(1,), (1, 2), (2, 1), (1, 2, 3)]),
    channel_mult_emb=st.sampled_from([2, 4]),
    num_blocks=st.sampled_from([1, 2]),
    attn_resolutions=st.sets(st.sampled_from([20, 16, 10, 8, 5, 4]), max_size=3).map(tuple),
    dropout=st.sampled_from([0.0, 0.13]),
    label_dropout=st.sampled_from([0.0, 0.2]),
    sigma_data=st.sampled_from([0.5, 1.0]),
)
unets = st.builds(
    UNetConfig,
    **common,
    model_channels=st.sampled_from([8, 12]),
    embedding_type=st.sampled_from(["positional", "fourier"]),
    channel_mult_noise=st.sampled_from([1, 2]),
    encoder_type=st.sampled_from(["standard", "residual"]),
    resample_filter=st.sampled_from([(1, 1), (1, 3, 3, 1), (1, 2)]),
    resample_with=st.sampled_from(["block", "block", "pointwise"]),
)
adms = st.builds(ADMConfig, **common, model_channels=st.sampled_from([32, 64]))


@settings(max_examples=30, deadline=None)
@given(config=st.one_of(unets, adms))
def test_u_nets_follow_their_equations(config: UNetConfig | ADMConfig) -> None:
    model = build_denoiser(config).model.eval()
    randomise(model)
    x, sigma, label, augment = inputs(config)
    c_noise = sigma.log() / 4
    weights = {key: value.double() for key, value in model.state_dict().items()}
    emb = plain_embedding(config, weights, c_noise.double(), label, augment.double())
    expected = plain_u_net(config, weights, emb, x.double())
    told = label if config.num_classes else None, augment if config.augment_dim else None
    with torch.no_grad():
        output = model(x, c_noise, *told)
    assert relative(output, expected) < 2e-5


def test_operations_are_counted_right() -> None:
    cost = measure_cost(DiTConfig(image_shape=(3, 16, 8), width=64, num_blocks=3, patch=4))
    tokens, width, token_size = 4 * 2, 64, 3 * 16
    on_tokens = tokens * (12 * width**2 + 2 * tokens * width)
    ends = 2 * tokens * width * token_size + (2 + 2) * width**2
    assert cost.flops == 2 * (3 * (on_tokens + 6 * width**2) + ends)


@pytest.mark.parametrize("net", ["unet-small", "dit-small", "mlp"])
def test_memory_is_counted_right(net: str) -> None:
    config = preset(net, None if net == "mlp" else (3, 16, 16))
    cost, denoiser, batch = measure_cost(config), build_denoiser(config), 7
    assert cost.num_parameters == sum(parameter.numel() for parameter in denoiser.parameters())
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = denoiser.model(torch.randn(batch, *config.image_shape), torch.zeros(batch))
    assert output.requires_grad
    for parameter in denoiser.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    adam = 16 * cost.num_parameters
    assert adam + sum(kept.values()) == pytest.approx(cost.step_bytes(batch), rel=0.02)


def test_labels_may_be_integers_vectors_or_absent(config: NetConfig, denoiser: Preconditioned) -> None:
    x, sigma, label, _ = inputs(config)
    with torch.no_grad():
        by_integer = denoiser(x, sigma, label)
        assert torch.equal(by_integer, denoiser(x, sigma, F.one_hot(label, 3).float()))
        none = denoiser(x, sigma)
        assert torch.equal(none, denoiser(x, sigma, torch.full((3,), -1)))
        assert relative(by_integer, none) > 1e-3
        assert torch.equal(none, denoiser(x, sigma, augment_label=torch.zeros(3, 4)))
        assert relative(denoiser(x, sigma, augment_label=torch.ones(3, 4)), none) > 1e-3


def test_dropout_and_label_dropout_act_in_training_only(config: NetConfig) -> None:
    x, sigma, label, _ = inputs(config)
    for change in ({"dropout": 0.5, "label_dropout": 0.0}, {"dropout": 0.0, "label_dropout": 0.5}):
        denoiser = build_denoiser(config.model_copy(update=change))
        randomise(denoiser)
        plain = build_denoiser(config.model_copy(update={"dropout": 0.0}))
        plain.load_state_dict(denoiser.state_dict())
        with torch.no_grad():
            trained = [denoiser.train()(x, sigma, label) for _ in range(10)]
            assert any(not torch.equal(trained[0], other) for other in trained)
            assert torch.equal(denoiser.eval()(x, sigma, label), plain.eval()(x, sigma, label))


def test_builds_the_same_weights_from_the_same_seed_and_leaves_other_randomness_alone(
    config: NetConfig,
) -> None:
    state = torch.get_rng_state()
    first, again, other = (build_denoiser(config, seed).state_dict() for seed in (5, 5, 6))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


def test_a_new_network_returns_nearly_nothing(config: NetConfig) -> None:
    x, sigma, label, augment = inputs(config)
    output = build_denoiser(config).eval().model(x, sigma.log() / 4, label, augment)
    assert float(output.detach().abs().max()) < 1e-3  # residuals and outputs start at zero or within 1e-5 of it


def test_initial_weights_have_their_published_scale() -> None:
    config = UNetConfig(image_shape=(3, 16, 16), model_channels=64, channel_mult=(1, 1), attn_resolutions=(8,))
    weights = build_denoiser(config).model.state_dict()
    bound = {key: float(value.abs().max()) for key, value in weights.items()}
    xavier = math.sqrt(6 / (64 * 9 * 2))
    assert bound["enc.8x8_block0.conv0.weight"] == pytest.approx(xavier, rel=0.01)
    assert bound["enc.8x8_block0.conv1.weight"] == pytest.approx(xavier * 1e-5, rel=0.01)
    assert bound["enc.8x8_block0.qkv.weight"] == pytest.approx(math.sqrt(0.2 * 6 / (64 * 4)), rel=0.01)
    assert bound["enc.8x8_block0.conv0.bias"] == 0
    config_of_adm = ADMConfig(image_shape=(3, 16, 16), num_classes=50, model_channels=64)
    adm = build_denoiser(config_of_adm).model.state_dict()
    assert float(adm["map_layer1.weight"].abs().max()) == pytest.approx(1 / 16, rel=0.01)
    assert float(adm["map_label.weight"].std()) == pytest.approx(1, rel=0.05)
    assert not adm["enc.8x8_block0.conv1.weight"].any() and not adm["out_conv.weight"].any()


def test_trains_every_parameter_also_in_bfloat16(config: NetConfig, denoiser: Preconditioned) -> None:
    x, sigma, label, augment = inputs(config)
    full = denoiser(x, sigma, label, augment)
    full.square().mean().backward()
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in denoiser.parameters())
    with torch.autocast("cpu", torch.bfloat16):
        mixed = denoiser(x, sigma, label, augment)
    assert mixed.dtype == torch.float32
    assert 1e-6 < relative(mixed, full) < 0.05


def test_gradients_are_right(config: NetConfig, denoiser: Preconditioned) -> None:
    x, sigma, label, augment = inputs(config)
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    x.requires_grad_()
    value = (denoiser(x, sigma, label, augment) * direction).sum()
    (gradient,) = torch.autograd.grad(value, x)
    step = 1e-2 * direction
    with torch.no_grad():
        ahead, behind = (denoiser(x + s * step, sigma, label, augment) for s in (1, -1))
    expected = ((ahead - behind) * direction).sum()
    assert float((gradient * 2 * step).sum()) == pytest.approx(float(expected), rel=2e-2)


def test_layout_of_weights_and_images_does_not_matter(config: NetConfig, denoiser: Preconditioned) -> None:
    x, sigma, label, augment = inputs(config)
    with torch.no_grad():
        expected = denoiser(x, sigma, label, augment)
        assert expected.is_contiguous()
        plain = denoiser.to(memory_format=torch.contiguous_format)
        other = plain(x.contiguous(memory_format=torch.channels_last), sigma, label, augment)
    assert relative(other, expected) < 1e-5


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(["unet-small", "dit-small", "mlp"]),
    shape=st.tuples(st.integers(1, 5), st.integers(1, 14), st.integers(1, 14)),
    num_classes=st.integers(0, 3),
)
def test_cpu_presets_adapt_to_any_image(name: str, shape: tuple[int, int, int], num_classes: int) -> None:
    config = preset(name, shape, num_classes)
    tree = config.model_dump(mode="json")
    assert net_kind(tree).model_validate(tree) == config
    x = torch.randn(2, *shape)
    with torch.no_grad():
        assert build_denoiser(config).eval()(x, torch.tensor([0.1, 2.0])).shape == x.shape


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: UNetConfig(image_shape=(3, 20, 32)), "channel_mult"),
        (lambda: preset("ddpmpp-cifar10", (3, 30, 32)), "channel_mult"),
        (lambda: DiTConfig(image_shape=(3, 30, 32)), "patch"),
        (lambda: DiTConfig(image_shape=(3, 32, 32), width=100), "width"),
        (lambda: UNetConfig(image_shape=(0, 32, 32)), "image_shape.0"),
        (lambda: UNetConfig(image_shape=(3, 32, 32), model_channels=5), "model_channels"),
        (lambda: ADMConfig(image_shape=(3, 32, 32), model_channels=5), "model_channels"),
        (lambda: MLPConfig(image_shape=(3, 32, 32), width=5), "width"),
        (lambda: UNetConfig(image_shape=(3, 32, 32), resample_filter=(1, 2, 1)), "resample_filter"),
        (lambda: UNetConfig(image_shape=(3, 32, 32), colour=True), "colour"),
        (lambda: UNetConfig(image_shape=(3, 32, 32), num_blocks="4"), "num_blocks"),
        (lambda: build_denoiser(UNetConfig(image_shape=(3, 32, 32), model_channels=6)), "model_channels"),
        (lambda: build_denoiser(UNetConfig(image_shape=(3, 32, 32), model_channels=136)), "model_channels"),
        (lambda: preset("unet-huge"), "net.preset"),
        (lambda: net_kind({"kind": "gan"}), "net.kind"),
        (lambda: net_kind({}), "net.kind"),
        (lambda: config_from_edm({"model_type": "EDM2"}, "x.json"), "model_type"),
    ],
)
def test_impossible_networks_are_explained(make: Any, key: str) -> None:
    assert fault(make).key == key


def test_edm_arguments_have_edms_defaults() -> None:
    least = {"img_resolution": 32, "img_channels": 3}
    adm = config_from_edm(least, "x")
    assert adm == ADMConfig(
        image_shape=(3, 32, 32), model_channels=192, channel_mult=(1, 2, 3, 4), num_blocks=3,
        attn_resolutions=(32, 16, 8), dropout=0.1, channel_mult_emb=4, sigma_data=0.5,
    )  # fmt: skip
    unet = config_from_edm(least | {"model_type": "SongUNet", "sigma_max": math.inf, "use_fp16": True}, "x")
    assert unet == UNetConfig(
        image_shape=(3, 32, 32), model_channels=128, channel_mult=(1, 2, 2, 2), num_blocks=4,
        attn_resolutions=(16,), dropout=0.1, embedding_type="positional", encoder_type="standard",
        decoder_type="standard", channel_mult_noise=1, resample_filter=(1, 1), channel_mult_emb=4,
        sigma_data=0.5,
    )  # fmt: skip
    golden = json.loads((GOLDEN / "edm_ncsnpp_cond" / "config.json").read_text())
    assert config_from_edm(golden, "x").num_classes == 10
    lacking = fault(lambda: config_from_edm({"img_channels": 3}, "x.json"))
    assert lacking.path == "x.json" and "img_resolution" in lacking.what


@pytest.mark.parametrize("outputs", [32, 64])  # with 64 there is no convolution beside the block
def test_two_inputs_apart_are_the_two_together(outputs: int) -> None:
    torch.manual_seed(0)
    block = Block(64, outputs, 16, song=True)
    x, more, emb = torch.randn(3, 32, 28, 28), torch.randn(3, 32, 28, 28) * 2 + 1, torch.randn(3, 16)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    results = []
    for inputs in ((x, emb, more), (torch.cat([x, more], 1), emb)):
        block.zero_grad()
        out = block(*inputs)
        out.square().mean().backward()
        results.append([out, *(parameter.grad for parameter in block.parameters())])
    for apart, together in zip(*results, strict=True):
        torch.testing.assert_close(apart, together, rtol=1e-4, atol=1e-5)
