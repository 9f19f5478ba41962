"""The feature networks against their published structure and reference outputs."""

import hashlib
import textwrap
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from assay.errors import AssayError
from assay.metrics.extract import load_extractor, to_bytes
from assay.metrics.inception import A, Block, E, Inception, resize_like_tensorflow
from assay.metrics.weights import FeatureNetwork, WeightsFile, find_weights
from tests.errors import rejected

GOLDEN = Path(__file__).parent / "golden"


def random_inception() -> Inception:
    """Weights of a sensible size, drawn from seed 0 in the order of the state dict."""
    network = Inception().eval()
    generator = torch.Generator().manual_seed(0)
    for key, value in network.state_dict().items():
        if "running_var" in key or "bn.weight" in key:
            value.copy_(torch.rand(value.shape, generator=generator) + 0.5)
        elif value.ndim == 4:
            value.copy_(torch.randn(value.shape, generator=generator) * (2 / value[0].numel()) ** 0.5)
        elif value.is_floating_point():
            value.copy_(torch.randn(value.shape, generator=generator) * 0.1)
    return network.requires_grad_(False)


# --- Inception -------------------------------------------------------------------------------------------


def test_inception_has_the_published_names_shapes_and_count() -> None:
    network = Inception()
    found = [
        " ".join([key, *map(str, value.shape)])
        for key, value in network.state_dict().items()
        if not key.endswith("num_batches_tracked")
    ]
    assert found == (GOLDEN / "inception_keys.txt").read_text().splitlines()
    assert len(found) == 472
    assert sum(parameter.numel() for parameter in network.parameters()) == 23_850_960


def test_inception_agrees_with_torch_fidelity_block_by_block() -> None:
    golden = np.load(GOLDEN / "inception.npz")
    network = random_inception()
    outputs: dict[str, Tensor] = {}
    for name, block in network.named_children():
        if name != "fc":
            block.register_forward_hook(lambda _, __, x, name=name: outputs.__setitem__(name, x.double()))
    features = network(torch.from_numpy(golden["images"]).float())
    logits = features @ network.fc.weight.T
    assert sorted(outputs) == sorted(key[6:] for key in golden.files if key.startswith("block_"))
    for name, output in outputs.items():
        spread = output.flatten(2).std(2).mean(1)
        np.testing.assert_allclose(spread, golden[f"block_{name}"], rtol=1e-5, err_msg=name)
    assert features.shape == (2, 2048) and logits.shape == (2, 1008)
    np.testing.assert_allclose(features, golden["features"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(logits, golden["logits"], rtol=1e-3, atol=1e-4)
    resized = resize_like_tensorflow(torch.from_numpy(golden["images"]).float(), 299)
    np.testing.assert_allclose(resized[0, 0, :40], golden["resized"], rtol=1e-6)


def test_resize_samples_at_i_times_the_scale() -> None:
    x = torch.arange(4.0).view(1, 1, 1, 4).expand(1, 1, 3, 4)
    resized = resize_like_tensorflow(x, 8)
    # TensorFlow 1: output i reads input i / 2, and past the end the last pixel; half-pixel centres would
    # start 0, 0.25, 0.75.
    expected = torch.tensor([0, 0.5, 1, 1.5, 2, 2.5, 3, 3])
    torch.testing.assert_close(resized, expected.expand(1, 1, 8, 8))
    same = torch.rand(1, 1, 299, 299)
    assert torch.equal(resize_like_tensorflow(same, 299), same)


@pytest.mark.parametrize(
    ("block", "pool"),
    [(Block(1, branches, pool, 32), pool) for branches, pool in ((A, "average"), (E, "average"), (E, "max"))],
    ids=["A", "E", "last"],
)
def test_pools_do_not_count_the_padding_and_the_last_takes_the_maximum(block: Block, pool: str) -> None:
    torch.nn.init.ones_(block.branch_pool.conv.weight)  # the pool's convolution passes its input through
    block.eval().branch_pool.bn.eps = 0.0
    torch.testing.assert_close(block(torch.ones(1, 1, 5, 5))[:, -1], torch.ones(1, 5, 5))  # 4/9 in corners else
    x, expected = torch.zeros(1, 1, 5, 5), torch.zeros(1, 5, 5)
    x[0, 0, 2, 2], expected[0, 1:4, 1:4] = 9.0, 9.0 if pool == "max" else 1.0
    torch.testing.assert_close(block(x)[:, -1], expected)
    assert (Inception().Mixed_7b.pool, Inception().Mixed_7c.pool) == ("average", "max")


def test_inception_file_is_loaded_only_with_the_right_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file as published (no step counters) loads; the same bytes under the official hash are refused."""
    network = random_inception()
    published = [line.split()[0] for line in (GOLDEN / "inception_keys.txt").read_text().splitlines()]
    state = OrderedDict((key, network.state_dict()[key]) for key in published)
    path = tmp_path / Inception.weights.name
    torch.save(state, path)
    with rejected("weights", path):
        load_extractor("inception", tmp_path, weights=path)
    with rejected("weights", path):
        load_extractor("inception", tmp_path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    fake = WeightsFile(Inception.weights.name, digest, "https://example.invalid/x")
    monkeypatch.setattr(Inception, "weights", fake)
    extractor = load_extractor("inception", tmp_path, weights=path)
    assert (extractor.metric, extractor.sha256) == ("FID", digest)
    images = torch.rand(2, 1, 20, 20) * 2 - 1
    expected = network(to_bytes(images).float().expand(-1, 3, -1, -1))
    np.testing.assert_allclose(extractor(images), expected, rtol=1e-3, atol=1e-4)


def test_official_hashes_begin_with_what_the_file_names_say() -> None:
    file = Inception.weights
    assert Path(file.name).stem.endswith("-" + file.sha256[:8]) and file.address.endswith(file.name)


# --- where weights come from -----------------------------------------------------------------------------


def test_weights_are_fetched_once_checked_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    source, cache = tmp_path / "w.pth", tmp_path / "cache"
    digest = hashlib.sha256(b"weights").hexdigest()
    file = WeightsFile("w.pth", digest, source.as_uri())
    with pytest.raises(AssayError) as caught:
        find_weights(file, cache)
    assert caught.value.key == "weights" and file.address in (caught.value.cure or "")
    source.write_bytes(b"something else")
    with rejected("weights"):
        find_weights(file, cache)
    assert not list(cache.iterdir())
    source.write_bytes(b"weights")
    assert find_weights(file, cache) == cache / "w.pth" and (cache / "w.pth").read_bytes() == b"weights"
    source.unlink()
    assert find_weights(file, cache) == cache / "w.pth"
    with pytest.raises(FileNotFoundError):
        find_weights(file, tmp_path, tmp_path / "missing.pth")
    with rejected("weights"):
        load_extractor("pixels", tmp_path, weights=tmp_path)


def test_bytes_are_what_a_png_holds() -> None:
    levels = torch.arange(256)
    assert torch.equal(to_bytes(levels.float().view(1, 1, 16, 16) / 127.5 - 1).flatten().long(), levels)
    assert to_bytes(torch.tensor([[[[-3.0, 3.0, 0.003, -0.003]]]])).flatten().tolist() == [0, 255, 128, 127]


def test_a_network_of_ones_own_is_an_extractor() -> None:
    """The example of CONTRIBUTING.md; a network with weights is identified by them."""
    text = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
    code = next(part for part in text.split("```") if "class Edges(" in part).removeprefix("python\n")
    exec(textwrap.dedent(code), {"FeatureNetwork": FeatureNetwork, "Tensor": Tensor, "F": torch.nn.functional})
    found = load_extractor("edges", Path("unused"))
    assert found.metric == "FD-edges"
    step = torch.full((1, 1, 9, 9), -1.0)
    step[..., 5:] = 1.0  # the edge lies between columns 4 and 5: in the third of four cells, a column of two
    assert found(step).reshape(4, 4).tolist() == [[0, 0, 0.5, 0]] * 4

    class Weighted(FeatureNetwork):
        kind = "weighted"

        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(scale))

    scale = 2.0
    identity = load_extractor("weighted", Path("unused")).sha256
    assert load_extractor("weighted", Path("unused")).sha256 == identity
    scale = 3.0
    assert load_extractor("weighted", Path("unused")).sha256 != identity
    with rejected("extractor"):
        load_extractor("nobody's", Path("unused"))
