"""The loader: an endless shuffled stream of batches, a function of (seed, step) alone.

Nothing is remembered between batches, so a run that is stopped and resumed at a step continues bit for
bit. A rank takes the strided slice `rank::world_size` of the global batch: the union over ranks is the
same batch for any number of them.
"""

import math
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from operator import itemgetter
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from assay.data.augment import NUM_UNIFORMS, Augmentation, augment
from assay.data.source import ImageSource
from assay.data.view import stream
from assay.denoise import check_label
from assay.errors import AssayError
from assay.noise import (
    LevelFirst,
    LogNormal,
    NoiseDistribution,
    check_distribution,
    draw_sigma,
    draw_sigma_clamped,
)

Pairing = Literal["image_first", "level_first", "clamped"]
T = TypeVar("T")
_NUM_BLOCKS = 8  # the noise of a large batch is drawn in interleaved blocks: a rank draws only those it needs
_NUM_AHEAD = 16  # steps whose images and levels are drawn at once: small draws cost more to start than to do
_SMALL_BATCH = 2**17  # values; below that one draw for all ranks is cheaper


@dataclass(frozen=True)
class Batch:
    """One rank's share of a global batch; all that a loss needs.

    `index` (B,), `x_tn` (B, C, H, W), `sigma_tn` and `sigma_t` (B,), unit noise `eps` (B, C, H, W),
    `label` (B,) with -1 for none, `augment_label` (B, 9) or None. For the consistency loss of the
    first W images, where it is on: unit noise `walk_eps` (num_draws, W, C, H, W) and `walk_uniform` (2, W).
    `sigma_map` (B, C or 1, H, W) has the level of each pixel, if the images have maps.
    """

    index: Tensor
    x_tn: Tensor
    sigma_tn: Tensor
    sigma_t: Tensor
    eps: Tensor
    label: Tensor
    augment_label: Tensor | None
    walk_eps: Tensor | None = None
    walk_uniform: Tensor | None = None
    sigma_map: Tensor | None = None

    @property
    def levels(self) -> Tensor:
        """The noise of the images: `sigma_map`, or `sigma_tn` without one."""
        return self.sigma_tn if self.sigma_map is None else self.sigma_map

    def pieces(self, size: int | None) -> "list[Batch]":
        """The batch in pieces of at most `size` images (None: one), without what the consistency loss needs."""
        if size is None or len(self.index) <= size:
            return [self]
        plain = replace(self, walk_eps=None, walk_uniform=None)
        return [plain._each(itemgetter(slice(i, i + size))) for i in range(0, len(self.index), size)]

    def to(self, device: torch.device) -> "Batch":
        """The batch on a device; to a GPU it is copied from pinned memory, without waiting for the copy."""
        if device.type == "cpu":
            return self
        if device.type != "cuda":
            return self._each(lambda column: column.to(device))
        with torch.cuda.device(device):  # a new thread is on the first GPU
            return self._each(lambda column: column.pin_memory().to(device, non_blocking=True))

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        columns: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: change(each) for name, each in columns.items() if each is not None})


class Loader:
    """Draws batches of images with the levels they are trained at.

    "image_first": every image once per epoch, each with a level above its own (Algorithm 1 of the paper).
    "level_first": levels first, each with an image that may serve it (see `assay.noise.LevelFirst`).
    "clamped": every image once per epoch, its level drawn, then raised to its own (the original code).
    """

    def __init__(
        self,
        source: ImageSource,
        batch_size: int,
        seed: int = 0,
        distribution: NoiseDistribution | None = None,
        pairing: Pairing = "image_first",
        augmentation: Augmentation | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if batch_size < world_size or not 0 <= rank < world_size:
            raise AssayError(f"{batch_size} images for rank {rank} of {world_size}", key="batch_size")
        self.distribution = LogNormal() if distribution is None else distribution
        self._lowest = source.lowest_level
        check_distribution(self.distribution, self._lowest)
        check_label(source.label, source.num_classes)
        self.source, self.batch_size, self.seed, self.pairing = source, batch_size, seed, pairing
        self.augmentation = Augmentation() if augmentation is None else augmentation
        self._mine = slice(rank, None, world_size)  # of the positions in the global batch
        self._world_size = world_size
        self._num_blocks = _NUM_BLOCKS if batch_size * math.prod(source.image_shape) > _SMALL_BATCH else 1
        self._level_first = LevelFirst(self.distribution, self._lowest) if pairing == "level_first" else None
        # Remembered for speed only: both are functions of the seed and their argument.
        self._pairs = lru_cache(maxsize=2)(self._draw_pairs)
        self._order = lru_cache(maxsize=2)(
            lambda epoch: torch.randperm(len(source), generator=stream(seed, "epoch", epoch))
        )

    def batch(self, step: int, num_walks: int = 0, num_draws: int = 0) -> Batch:
        """This rank's share of the batch number `step`, for any step >= 0 in any order.

        With randomness for the consistency loss of `num_walks` images, `num_draws` images of noise each.
        """
        walks, turns = num_walks * self._world_size, stream(self.seed, "uniform", step)
        drawn = self._pairs(step // _NUM_AHEAD)
        index, sigma_t, uniform = (column[step % _NUM_AHEAD, self._mine] for column in drawn)
        sigma_map = self.source.read_levels(index) if self.source.has_map else None
        x_tn, sigma_tn = self.source.read_at(index, sigma_t)
        if sigma_map is None:
            x_tn, augment_label = augment(x_tn, sigma_tn, uniform, self.augmentation)
        else:  # a map moves with its image
            both = torch.cat([x_tn, sigma_map], 1)
            both, augment_label = augment(both, sigma_tn, uniform, self.augmentation)
            x_tn, sigma_map = both.split([x_tn.shape[1], sigma_map.shape[1]], 1)
        return Batch(
            index=index,
            x_tn=x_tn,
            sigma_tn=sigma_tn,
            sigma_t=sigma_t,
            eps=self._draw("eps", step, 1, self.batch_size)[0],
            label=self.source.label[index],
            augment_label=augment_label,
            walk_eps=self._draw("noise", step, num_draws, walks) if num_walks else None,
            walk_uniform=torch.rand(2, walks, generator=turns)[:, self._mine] if num_walks else None,
            sigma_map=sigma_map,
        )

    @property
    def num_mine(self) -> int:
        """How many images of a batch are this rank's."""
        return len(range(self.batch_size)[self._mine])

    def _draw_pairs(self, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
        """Image, level and augmentation for the _NUM_AHEAD global batches of a chunk of steps."""
        generator = stream(self.seed, "pairs", chunk)
        count = _NUM_AHEAD * self.batch_size
        if self._level_first is None:
            index = self._in_epochs(chunk * count, count)
            draw = draw_sigma_clamped if self.pairing == "clamped" else draw_sigma
            sigma_t = draw(self.distribution, self._lowest[index], generator)
        else:
            index, sigma_t = self._level_first.draw(count, generator)
        uniform = torch.rand(count, NUM_UNIFORMS, dtype=torch.float64, generator=generator)
        return tuple(column.unflatten(0, (_NUM_AHEAD, -1)) for column in (index, sigma_t, uniform))

    def _in_epochs(self, start: int, count: int) -> Tensor:
        """A stretch of the endless stream of images, in which each epoch is a fresh permutation of all."""
        pieces: list[Tensor] = []
        while count > 0:
            epoch, place = divmod(start, len(self.source))
            pieces.append(self._order(epoch)[place : place + count])
            start, count = start + len(pieces[-1]), count - len(pieces[-1])
        return torch.cat(pieces)

    def _draw(self, name: str, step: int, num_draws: int, num_images: int) -> Tensor:
        """Unit noise (num_draws, B, C, H, W) for this rank's share of the first `num_images` of a global batch.

        Position p of the global batch lies in block p % num_blocks.
        """
        position = range(num_images)[self._mine]
        noise = torch.empty(num_draws, len(position), *self.source.image_shape)
        period = math.lcm(self._world_size, self._num_blocks)  # after which ranks and blocks meet again
        for local in range(min(period // self._world_size, len(position))):
            block, place = position[local] % self._num_blocks, position[local] // self._num_blocks
            size = len(range(block, num_images, self._num_blocks))
            generator = stream(self.seed, name, step, block)
            drawn = torch.randn(num_draws, size, *self.source.image_shape, generator=generator)
            noise[:, local :: period // self._world_size] = drawn[:, place :: period // self._num_blocks]
        return noise


def prepared_ahead(prepare: Callable[[int], T], steps: Iterable[int]) -> Generator[T, None, None]:
    """`prepare(step)` for each step in turn, the next one in a thread while the caller works on this one."""
    with ThreadPoolExecutor(1, initializer=torch.set_flush_denormal, initargs=(True,)) as pool:
        pending: list[Future[T]] = []
        for step in steps:
            pending.append(pool.submit(prepare, step))
            if len(pending) > 1:
                yield pending.pop(0).result()
        yield from (last.result() for last in pending)
