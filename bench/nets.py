"""How fast the CPU presets are: images/s, share of this machine's sgemm peak, ratio to diffusers' U-Net.

Run it as `OMP_NUM_THREADS=$(nproc) python bench/nets.py [--rounds 5] [--batch 64] [preset ...]`.

Every round times sgemm, our network and diffusers' one after the other, in training (forward, backward,
Adam) and in evaluation, so that all meet the same load; each figure is the median over rounds of the
ratio inside a round. Operations are counted by torch on the real step, for both networks alike.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
from diffusers import UNet2DModel
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from assay.nets import build_denoiser, preset

CPU_PRESETS = "unet-small unet-medium dit-small dit-medium mlp".split()
SGEMM_SIDE = 2048


class Peer(nn.Module):
    """diffusers' U-Net of the nearest shape: levels, widths, blocks and attention alike, all else default."""

    def __init__(self, image_shape: tuple[int, int, int], base: int, num_levels: int) -> None:
        super().__init__()
        channels, side, _ = image_shape
        self.net = UNet2DModel(
            sample_size=side,
            in_channels=channels,
            out_channels=channels,
            block_out_channels=(base, 2 * base, 2 * base)[:num_levels],
            layers_per_block=1,
            down_block_types=("DownBlock2D",) * (num_levels - 1) + ("AttnDownBlock2D",),
            up_block_types=("AttnUpBlock2D",) + ("UpBlock2D",) * (num_levels - 1),
        )

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        """As a denoiser's; diffusers wants a time, for which any number serves here."""
        return self.net(x, sigma.log() / 4).sample


def peer_of(name: str, image_shape: tuple[int, int, int]) -> Peer:
    if name == "mlp":
        return Peer(image_shape, base=32, num_levels=2)
    return Peer(image_shape, base=64 if name.endswith("medium") else 32, num_levels=3)


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def training_step(net: nn.Module, x: Tensor, sigma: Tensor) -> Callable[[], object]:
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        (net(x, sigma) - x).square().mean().backward()
        optimizer.step()

    return step


def evaluation(net: nn.Module, x: Tensor, sigma: Tensor) -> Callable[[], object]:
    def evaluate() -> Tensor:
        with torch.no_grad():
            return net(x, sigma)

    return evaluate


def flops_of(work: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


def compare(name: str, batch: int, rounds: int, sgemm: Callable[[], object]) -> None:
    config = preset(name)
    ours, peer = build_denoiser(config), peer_of(name, config.image_shape)
    x, sigma = torch.randn(batch, *config.image_shape), torch.rand(batch) + 0.1
    for title, make in (("train", training_step), ("evaluate", evaluation)):
        works = [make(ours, x, sigma), make(peer, x, sigma)]
        flops = [flops_of(work) for work in works]
        for work in works:
            seconds(work)
        rows = [[seconds(sgemm), *(seconds(work) for work in works), seconds(sgemm)] for _ in range(rounds)]
        peak = [2 * 2 * SGEMM_SIDE**3 / (row[0] + row[3]) for row in rows]
        share = [
            statistics.median(flops[i] / row[1 + i] / top for row, top in zip(rows, peak, strict=True))
            for i in range(2)
        ]
        rate = [batch / statistics.median(row[1 + i] for row in rows) for i in range(2)]
        ratio = statistics.median(row[2] / row[1] for row in rows)
        columns = [
            f"{rate[i]:8.1f} images/s {share[i]:5.2f} of peak {flops[i] / batch / 1e9:6.2f} GFLOP/image"
            for i in range(2)
        ]
        print(f"{name:<12} {title:<9}{columns[0]} | diffusers{columns[1]} | ratio {ratio:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("presets", nargs="*", default=CPU_PRESETS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64)
    arguments = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    left, right = torch.randn(2, SGEMM_SIDE, SGEMM_SIDE)
    best = min(seconds(lambda: left @ right) for _ in range(10))
    peak = f"{2 * SGEMM_SIDE**3 / best / 1e9:.0f} GFLOP/s on {torch.get_num_threads()} threads"
    print(f"sgemm: {peak}; batches of {arguments.batch}, medians of {arguments.rounds} rounds")
    for name in arguments.presets:
        compare(name, arguments.batch, arguments.rounds, lambda: left @ right)


if __name__ == "__main__":
    main()
