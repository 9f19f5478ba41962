"""The loader: a function of (seed, step), independent of ranks, faithful to both pairing orders."""

import math
import threading
from contextlib import closing

import pytest
import torch
from scipy import stats

from assay.data import Augmentation, Batch, Loader, simulate
from assay.data.loader import prepared_ahead
from assay.noise import LogNormal, Uniform
from tests.errors import rejected
from tests.test_data_view import Arrays, source, whiteness

FIELDS = "index x_tn sigma_tn sigma_t eps label augment_label walk_eps walk_uniform".split()
EVERYTHING = Augmentation(flip_x=True, flip_y=True, turn=True, shift=1, geometric=0.3)


def equal(a: Batch, b: Batch) -> bool:
    return all(torch.equal(getattr(a, field), getattr(b, field)) for field in FIELDS)


@pytest.mark.parametrize("pairing", ["image_first", "level_first"])
def test_batches_are_a_function_of_seed_and_step(pairing: str) -> None:
    mixed = simulate(source(), 0.3, 0.5)

    def loader(seed: int) -> Loader:
        return Loader(mixed, 16, seed, pairing=pairing, augmentation=EVERYTHING)  # type: ignore[arg-type]

    straight = loader(4)
    batches = [straight.batch(step, 5, 3) for step in range(20)]
    resumed = loader(4)
    for step in (18, 3, 16, 0):  # a fresh loader at any step, in any order
        assert equal(resumed.batch(step, 5, 3), batches[step])
    assert not equal(batches[0], batches[1]) and not equal(loader(5).batch(0, 5, 3), batches[0])


@pytest.mark.parametrize("pairing", ["image_first", "level_first"])
@pytest.mark.parametrize("world_size", [2, 3, 8, 12])
@pytest.mark.parametrize("batch_size", [13, 24])
@pytest.mark.parametrize("side", [6, 64])  # noise in one draw, and in blocks
def test_ranks_share_one_global_batch(pairing: str, world_size: int, batch_size: int, side: int) -> None:
    mixed = simulate(source(20, (3, side, side)), 0.3, 0.5)
    whole = Loader(mixed, batch_size, 1, pairing=pairing, augmentation=EVERYTHING)  # type: ignore[arg-type]
    batch = whole.batch(5, world_size, 2)
    for rank in range(world_size):
        share = Loader(mixed, batch_size, 1, None, pairing, EVERYTHING, rank, world_size)  # type: ignore[arg-type]
        part, mine = share.batch(5, 1, 2), slice(rank, None, world_size)
        for field in FIELDS:
            column = getattr(batch, field)
            wanted = column[:, mine] if field.startswith("walk") else column[mine]
            assert torch.equal(getattr(part, field), wanted), field


@pytest.mark.parametrize("batch_size", [7, 20, 45])
def test_every_epoch_shows_every_image_once(batch_size: int) -> None:
    loader = Loader(source(20), batch_size)
    stream = torch.cat([loader.batch(step).index for step in range(40)])
    epochs = stream[: len(stream) // 20 * 20].view(-1, 20)
    assert bool((epochs.sort(1).values == torch.arange(20)).all())
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == len(epochs)


def test_batches_hold_what_the_source_says() -> None:
    mixed = simulate(source(), 0.3, 0.5)
    batch = Loader(mixed, 64, 2).batch(3)
    assert torch.equal(batch.x_tn, mixed.read(batch.index))
    assert torch.equal(batch.label, mixed.label[batch.index])
    assert torch.equal(batch.sigma_tn, mixed.sigma_tn[batch.index]) and batch.augment_label is None
    assert bool((batch.sigma_t > batch.sigma_tn).all())


def test_noise_is_white_and_its_streams_differ() -> None:
    loader = Loader(source(10, (3, 16, 16)), 256, 9)  # in blocks
    draws = [loader.batch(0).eps, loader.batch(1).eps, *loader.batch(0, 256, 2).walk_eps]  # type: ignore[misc]
    for draw in draws:
        assert max(abs(deviation) for deviation in whiteness(draw.double())) < 3.5
    size = draws[0].numel()
    for i in range(4):
        for j in range(i):
            assert abs((draws[i] * draws[j]).double().mean().item()) < 4 / math.sqrt(size)
    uniform = torch.stack([loader.batch(step, 256, 1).walk_uniform for step in range(20)]).flatten()  # type: ignore
    assert stats.kstest(uniform.numpy(), "uniform").pvalue > 0.001


def test_levels_follow_the_law_of_each_pairing() -> None:
    distribution = LogNormal(-0.5, 1.0)
    mixed = simulate(source(400, (1, 1, 1)), 0.25, 0.5)

    def levels(pairing: str) -> tuple[torch.Tensor, torch.Tensor]:
        loader = Loader(mixed, 400, 3, distribution, pairing)  # type: ignore[arg-type]
        batches = [loader.batch(step) for step in range(50)]
        return torch.cat([b.sigma_t for b in batches]).double(), torch.cat([b.sigma_tn for b in batches])

    sigma_t, sigma_tn = levels("image_first")
    assert (sigma_tn == 0).double().mean().item() == 0.25  # whole epochs
    survival = distribution.survival(torch.tensor(0.5, dtype=torch.float64)).item()
    for noisy, mass in ((sigma_tn > 0, survival), (sigma_tn == 0, 1.0)):
        uniform = distribution.survival(sigma_t[noisy]) / mass
        assert stats.kstest(uniform.numpy(), "uniform").pvalue > 0.001

    sigma_t, sigma_tn = levels("level_first")
    uniform = distribution.survival(sigma_t)  # EDM's distribution is kept
    assert stats.kstest(uniform.numpy(), "uniform").pvalue > 0.001
    assert not bool((sigma_tn[sigma_t <= 0.5] > 0).any())
    above = (sigma_tn[sigma_t > 0.5] == 0).double()
    assert abs(above.mean().item() - 0.25) < 4 * math.sqrt(0.25 * 0.75 / len(above))

    sigma_t, sigma_tn = levels("clamped")  # the original's: what falls below its own level is raised to it
    assert (sigma_tn == 0).double().mean().item() == 0.25
    raised = (sigma_t[sigma_tn > 0] <= 0.5000001).double()
    assert abs(raised.mean().item() - (1 - survival)) < 4 * math.sqrt(0.25 / len(raised))
    assert bool((sigma_t > sigma_tn).all())
    uniform = distribution.survival(sigma_t[sigma_t > 0.5000001]) / survival
    assert stats.kstest(uniform.numpy(), "uniform").pvalue > 0.001


def test_bad_levels_and_labels_are_named_when_the_loader_is_built() -> None:
    images = torch.zeros(4, 1, 2, 2)
    wrong = Arrays(images)
    wrong.label[3] = 2
    for bad, key in (
        (Arrays(images, torch.tensor([0, 0, -0.1, 0])), "sigma_tn"),
        (Arrays(images, torch.tensor([0, 0, 0, 90.0])), "sigma_tn"),
        (wrong, "label"),
    ):
        with rejected(key):
            Loader(bad, 2, distribution=Uniform(0, 80))


def test_batches_prepared_in_a_thread_are_the_same_in_the_same_order() -> None:
    num_running = threading.active_count()
    loader = Loader(simulate(source(), 0.3, 0.5), 16, augmentation=EVERYTHING)
    with closing(prepared_ahead(lambda step: loader.batch(step, 4, 3), range(3, 23))) as batches:
        for step, batch in enumerate(batches, start=3):
            assert equal(batch, loader.batch(step, 4, 3))
    assert step == 22 and list(prepared_ahead(str, [])) == []

    taken: list[int] = []
    with closing(prepared_ahead(taken.append, range(100))) as left_early:
        next(left_early)
        next(left_early)
    assert taken == [0, 1, 2]  # one ahead
    with closing(prepared_ahead(lambda step: 1 // (2 - step), range(5))) as failing:
        assert [next(failing), next(failing)] == [0, 1]
        with pytest.raises(ZeroDivisionError):
            next(failing)
    assert threading.active_count() == num_running


def test_a_batch_moves_to_a_device_whole() -> None:
    batch = Loader(simulate(source(), 0.3, 0.5), 16, augmentation=EVERYTHING).batch(0, 4, 2)
    assert batch.to(torch.device("cpu")) is batch
    moved = batch.to(torch.device("meta"))
    for field in FIELDS:
        assert getattr(moved, field).is_meta and getattr(moved, field).shape == getattr(batch, field).shape


def test_bad_shares() -> None:
    for batch_size, rank, world_size in ((0, 0, 1), (2, 0, 3), (4, 2, 2), (4, -1, 2)):
        with rejected("batch_size"):
            Loader(source(4), batch_size, rank=rank, world_size=world_size)
