"""The whole idea on one page: learn a 2-D mixture from a few clean and many noisy points.

Trains the same small network on clean points alone, on noisy points alone and on both (and, for
reference, on as many clean points), samples from each and measures the distance to the truth.
Prints a table, writes `out/points.png`.
"""

import math
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

from assay.denoise import Preconditioned
from assay.loss import ambient_loss, edm_weight
from assay.noise import LogNormal, draw_sigma
from assay.sample import edm_sigmas, generate

NUM_POINTS, CLEAN_FRACTION, SIGMA_TN = 1000, 0.1, 0.2
NUM_STEPS, BATCH_SIZE = 2500, 256


def draw_truth(num: int, generator: torch.Generator) -> Tensor:
    """Points (num, 2) of the truth: 25 narrow Gaussians on a grid."""
    component = torch.randint(25, (num,), generator=generator)
    atoms = torch.stack([component % 5 - 2, component // 5 - 2], 1) / 2
    return atoms + 0.05 * torch.randn(num, 2, generator=generator)


class PointNet(nn.Module):
    """A perceptron on sines and cosines of a noisy point and of its noise level."""

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.register_buffer("frequencies", 2.0 ** torch.arange(5))
        self.layers = nn.Sequential(
            *[nn.Linear(3 * 11, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU()],
            *[nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2)],
        )

    def forward(self, x: Tensor, c_noise: Tensor, label: None, augment_label: None) -> Tensor:
        """`x` (B, 2) and `c_noise` (B,) -> (B, 2)."""
        coordinates = torch.cat([x, c_noise[:, None]], 1)
        phase = (coordinates[:, :, None] * self.frequencies).flatten(1)
        return self.layers(torch.cat([coordinates, phase.sin(), phase.cos()], 1))


def train(x_tn: Tensor, sigma_tn: Tensor, title: str) -> Preconditioned:
    """Algorithm 1 of the paper: draw points, a level above each point's own, and take a step."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    denoiser = Preconditioned(PointNet())
    optimizer = torch.optim.Adam(denoiser.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_STEPS)
    for _ in track(range(NUM_STEPS), description=f"{title:22}"):
        index = torch.randint(len(sigma_tn), (BATCH_SIZE,), generator=generator)
        sigma_t = draw_sigma(LogNormal(), sigma_tn[index], generator)
        eps = torch.randn(BATCH_SIZE, 2, generator=generator)
        loss = ambient_loss(denoiser, x_tn[index], sigma_tn[index], sigma_t, eps, edm_weight(sigma_t))
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
        schedule.step()
    return denoiser


def distance(a: Tensor, b: Tensor, num_directions: int = 64) -> float:
    """Sliced Wasserstein-1 distance of two equally large clouds of points."""
    angle = torch.arange(num_directions) * (math.pi / num_directions)
    directions = torch.stack([angle.cos(), angle.sin()])
    return ((a @ directions).sort(0).values - (b @ directions).sort(0).values).abs().mean().item()


def main() -> None:
    """Train, sample, compare, draw."""
    generator = torch.Generator().manual_seed(1)
    x_0 = draw_truth(NUM_POINTS, generator)
    truth = draw_truth(4000, generator)
    num_clean = round(CLEAN_FRACTION * NUM_POINTS)
    sigma_tn = torch.full((NUM_POINTS,), SIGMA_TN)
    nature = torch.randn(NUM_POINTS, 2, generator=generator)

    sigma_mix = sigma_tn.clone()
    sigma_mix[:num_clean] = 0
    settings = {
        f"{num_clean} clean": (x_0[:num_clean], torch.zeros(num_clean)),
        f"{NUM_POINTS} noisy": (x_0 + sigma_tn[:, None] * nature, sigma_tn),
        f"{num_clean} clean + {NUM_POINTS - num_clean} noisy": (x_0 + sigma_mix[:, None] * nature, sigma_mix),
        f"{NUM_POINTS} clean": (x_0, torch.zeros(NUM_POINTS)),
    }

    table = Table("training points", "distance to the truth", title=f"noise of standard deviation {SIGMA_TN}")
    figure, axes = plt.subplots(1, 5, figsize=(15, 3.4), sharex=True, sharey=True, layout="constrained")
    panels = [("truth", truth)]
    for title, (points, sigmas) in settings.items():
        denoiser = train(points, sigmas, title)
        batches = generate(denoiser, range(len(truth)), (2,), edm_sigmas(18), batch_size=1000)
        samples = torch.cat(list(batches))
        result = distance(samples, truth)
        table.add_row(title, f"{result:.4f}")
        panels.append((f"{title}: {result:.3f}", samples))
    table.add_row(
        "[dim]fresh points of the truth[/]", f"[dim]{distance(draw_truth(4000, generator), truth):.4f}[/]"
    )
    for axis, (title, points) in zip(np.ravel(axes), panels, strict=True):
        axis.scatter(*points.T, s=2, alpha=0.3, linewidths=0)
        axis.set(title=title, aspect="equal", xlim=(-1.5, 1.5), ylim=(-1.5, 1.5))
    path = Path("out/points.png")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)
    Console().print(table, f"The picture is in {path}.")


if __name__ == "__main__":
    main()
