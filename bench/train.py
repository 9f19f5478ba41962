"""What the training loop costs on top of the network, what consistency costs, and what the law saves.

Bars: a step with consistency at its default settings <= 1.25 times a plain one (the paper says 2 to 3 of
its own, which is measured beside it on the same share of each batch, with its 8 steps and 32 samples);
a step of the loop <= 1.05 times bare forward + backward + optimizer of the same network; at sigma_tn = 0.2
every draw carries gradient (with the original's clamped levels 0.63 of the noisy ones do). After every
step of the loop a bare one is timed, so that both meet the same load; ratios are medians over such pairs.
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from assay.data import Loader, open_store, simulate
from assay.data.known import get
from assay.loss import ambient_loss, edm_weight
from assay.nets import build_denoiser
from assay.noise import LogNormal, draw_sigma, draw_sigma_clamped
from assay.train import RunConfig, read_config, train
from assay.train.run import Progress

NUM_STEPS, BATCH_SIZE = 42, 64


CONSISTENCY: dict[str, dict[str, Any]] = {
    "consistency": {"coefficient": 1.0},
    "the paper's, as its code": {"coefficient": 1.0, "method": "original_code", "num_steps": 8},
}


def make_config(consistency: dict[str, Any], num_steps: int = NUM_STEPS) -> RunConfig:
    settings: dict[str, Any] = {"num_steps": num_steps, "batch_size": BATCH_SIZE, "consistency": consistency}
    return read_config({"data": {"store": "-"}, "net": {"preset": "unet-small"}, "train": settings})


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        get("fashion-mnist", Path(folder) / "store")
        source = simulate(open_store(Path(folder) / "store"), 0.1, 0.2)

        denoiser = build_denoiser(make_config({}).net_config(source)).train()
        optimizer = torch.optim.AdamW(denoiser.parameters(), 1e-4, weight_decay=0.0, fused=True)
        batch = Loader(source, BATCH_SIZE).batch(0)

        def bare_step() -> None:
            weight = edm_weight(batch.sigma_t)
            loss = ambient_loss(denoiser, batch.x_tn, batch.sigma_tn, batch.sigma_t, batch.eps, weight)
            loss.mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        def measure(consistency: dict[str, Any], num_steps: int) -> tuple[list[float], list[float]]:
            """Seconds of the loop's steps, and of the bare steps between them."""
            loop, bare, mark = [], [], time.perf_counter()

            def on_progress(progress: Progress) -> None:
                nonlocal mark
                started = time.perf_counter()
                loop.append(started - mark)
                bare_step()
                mark = time.perf_counter()
                bare.append(mark - started)

            with tempfile.TemporaryDirectory() as run_dir:
                train(make_config(consistency, num_steps), Path(run_dir), source, on_progress=on_progress)
            return loop[2:], bare[2:]  # the first ones warm up

        plain, bare = measure({}, NUM_STEPS)
        beside = {
            name: measure(loss, NUM_STEPS if name == "consistency" else 4) for name, loss in CONSISTENCY.items()
        }

    noisy = torch.full((100_000,), 0.2)
    share, clamped = (
        (draw(LogNormal(), noisy, torch.Generator().manual_seed(0)) > 0.2000001).double().mean()
        for draw in (draw_sigma, draw_sigma_clamped)
    )
    overhead = statistics.median(a / b for a, b in zip(plain, bare, strict=True))
    print(f"Fashion-MNIST 28x28, unet-small, batch {BATCH_SIZE}, {torch.get_num_threads()} threads")
    steps = {"bare forward + backward + optimizer": bare, "Assay's loop": plain}
    steps |= {f"with {name}": loop for name, (loop, _) in beside.items()}
    for name, seconds in steps.items():
        print(f"{name:36} {statistics.median(seconds) * 1e3:7.1f} ms a step")
    print(f"loop / bare             {overhead:.3f}  (bar: <= 1.05)")
    for name, (loop, between) in beside.items():
        ratio = statistics.median(a / b for a, b in zip(loop, between, strict=True)) / overhead
        print(f"with {name} / loop {ratio:.3f}" + ("  (bar: <= 1.25)" if name == "consistency" else ""))
    print(f"noisy draws with gradient at sigma_tn 0.2: {share:.3f}; with the original's clamp {clamped:.3f}")


if __name__ == "__main__":
    main()
