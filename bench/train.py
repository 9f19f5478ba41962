"""What the training loop costs on top of the network, what consistency costs, and what the law saves.

Bars: a step with consistency at its default settings <= 1.6 times a plain one (the paper's takes 2 to 3);
a step of the loop <= 1.05 times bare forward + backward + optimizer of the same network; at sigma_tn = 0.2
every draw carries gradient (with the original's clamped levels 0.63 of the noisy ones do). The jobs take
turns inside one run; each keeps its fastest round.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from assay.data import Loader, mix, open_store
from assay.data.known import get
from assay.loss import ambient_loss, edm_weight
from assay.nets import build_denoiser
from assay.noise import LogNormal, draw_sigma, draw_sigma_clamped
from assay.train import RunConfig, read_config, train

NUM_STEPS, NUM_ROUNDS, BATCH_SIZE = 12, 5, 64


def make_config(coefficient: float) -> RunConfig:
    settings: dict[str, Any] = {"num_steps": NUM_STEPS, "batch_size": BATCH_SIZE}
    settings["consistency"] = {"coefficient": coefficient}
    return read_config({"data": {"store": "-"}, "net": {"preset": "unet-small"}, "train": settings})


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        get("fashion-mnist", Path(folder) / "store")
        source = mix(open_store(Path(folder) / "store"), 0.1, 0.2)

        def loop_seconds(coefficient: float, number: int) -> float:
            times: list[float] = []
            run_dir = Path(folder) / f"{coefficient}-{number}"
            train(
                make_config(coefficient),
                run_dir,
                source,
                on_progress=lambda p: times.append(time.perf_counter()),
            )
            return (times[-2] - times[1]) / (NUM_STEPS - 3)  # the last step also saves

        denoiser = build_denoiser(make_config(0).net_config(source)).train()
        optimizer = torch.optim.AdamW(denoiser.parameters(), 1e-4, weight_decay=0.0, fused=True)
        batch = Loader(source, BATCH_SIZE).batch(0)

        def bare_seconds() -> float:
            for step in range(NUM_STEPS - 1):
                if step == 2:
                    started = time.perf_counter()
                weight = edm_weight(batch.sigma_t)
                loss = ambient_loss(denoiser, batch.x_tn, batch.sigma_tn, batch.sigma_t, batch.eps, weight)
                loss.mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return (time.perf_counter() - started) / (NUM_STEPS - 3)

        bare, plain, consistent = [], [], []
        for number in range(NUM_ROUNDS):
            bare.append(bare_seconds())
            plain.append(loop_seconds(0.0, number))
            consistent.append(loop_seconds(1.0, number))

    noisy = torch.full((100_000,), 0.2)
    share, clamped = (
        (draw(LogNormal(), noisy, torch.Generator().manual_seed(0)) > 0.2000001).double().mean()
        for draw in (draw_sigma, draw_sigma_clamped)
    )
    steps = {"bare forward + backward + optimizer": bare, "Assay's loop": plain, "with consistency": consistent}
    print(f"Fashion-MNIST 28x28, unet-small, batch {BATCH_SIZE}, {torch.get_num_threads()} threads")
    for name, seconds in steps.items():
        print(f"{name:36} {min(seconds) * 1e3:7.1f} ms a step")
    print(f"loop / bare             {min(plain) / min(bare):.3f}  (bar: <= 1.05)")
    print(f"with consistency / loop {min(consistent) / min(plain):.3f}  (bar: <= 1.6)")
    print(f"noisy draws with gradient at sigma_tn 0.2: {share:.3f}; with the original's clamp {clamped:.3f}")


if __name__ == "__main__":
    main()
