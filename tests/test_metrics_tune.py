"""Tuning finds the sampler with the lower distance, judges it on fresh images and stores it."""

from pathlib import Path

import pytest
import torch

from assay.checkpoint import CheckpointInfo, load_checkpoint, save_checkpoint
from assay.data.arrays import Arrays, from_arrays
from assay.metrics.extract import load_extractor
from assay.metrics.tune import load_tuned, search_space, tune, tuned_path
from assay.nets import MLPConfig, build_denoiser
from assay.sample import SampleConfig
from tests.commands import run
from tests.errors import rejected

NET = MLPConfig(image_shape=(1, 4, 4), width=16, num_blocks=1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    denoiser, generator = build_denoiser(NET), torch.Generator().manual_seed(0)
    with torch.no_grad():  # a new network predicts zeros: give the last layers some weight
        for parameter in denoiser.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    save_checkpoint(path, denoiser, NET, CheckpointInfo(sigma_tn=((0.0, 1.0),)))
    return path


def images_of(checkpoint: Path, sample: SampleConfig, num_images: int) -> Arrays:
    """Images that a sampler of the model makes: the reference that it alone can match."""
    denoiser, seeds = load_checkpoint(checkpoint).denoiser.eval(), range(5000, 5000 + num_images)
    batches = sample.generate(denoiser, seeds, NET.image_shape, None, 500)
    return from_arrays(torch.cat(list(batches)))


def test_the_space_is_what_is_stated() -> None:
    space = search_space(SampleConfig())
    assert space[0] == SampleConfig() and len(space) == len(set(space)) == 10
    assert {each.solver for each in space} == {"heun", "multistep"}
    cut = search_space(SampleConfig(), may_truncate=True)
    assert len(cut) == 20 and {each.truncate_at for each in cut} == {None, "auto"}
    assert len(search_space(SampleConfig(truncate_at=0.3), may_truncate=True)) == 10


def test_the_sampler_that_made_the_images_wins(checkpoint: Path, tmp_path: Path) -> None:
    truth = SampleConfig(solver="multistep", num_steps=10)
    held_out, pixels = images_of(checkpoint, truth, 1500), load_extractor("pixels", tmp_path)
    found = tune(checkpoint, held_out, pixels, SampleConfig(churn=7.5, churn_noise=1.2), num_images=100)
    assert found.sample.solver == "multistep" and found.fd < found.fd_before
    assert sorted(number for _, _, number in found.trials) == [100] * 5 + [200] * 2 + [400] + [800] * 2
    assert tuned_path(checkpoint).parent == checkpoint.parent and load_tuned(checkpoint) == found
    run("sample", checkpoint, "--tuned", "--seeds", "0-9", "-o", tmp_path / "tuned.npz")
    assert (tmp_path / "tuned.npz").exists()


def test_luck_is_not_kept(checkpoint: Path, tmp_path: Path) -> None:
    start = SampleConfig()
    held_out = images_of(checkpoint, start, 400)
    found = tune(checkpoint, held_out, load_extractor("pixels", tmp_path), start, num_images=40)
    assert found.fd <= found.fd_before and (found.sample == start) == (found.fd == found.fd_before)


def test_the_command_tunes_and_other_weights_are_rejected(checkpoint: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(checkpoint.read_bytes())
    with rejected(path=tuned_path(copy)):
        load_tuned(copy)
    images_of(checkpoint, SampleConfig(), 120).save(tmp_path / "held-out")
    options = ["--held-out", tmp_path / "held-out", "--extractor", "pixels", "--num-images", 20]
    assert "On fresh seeds" in run("model", "tune", copy, *options)
    assert load_tuned(copy).num_images == 320
    save_checkpoint(copy, build_denoiser(NET, 1), NET)
    with rejected(path=tuned_path(copy)):
        load_tuned(copy)
    with rejected("held_out"):
        tune(checkpoint, images_of(checkpoint, SampleConfig(), 50), load_extractor("pixels", tmp_path))
