"""What a run tells of itself: `metrics.jsonl`, TensorBoard events, and a diagnosis when it diverges."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from assay.files import decoding, explain_full_disk, write_whole

_EDGES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 20.0, math.inf)


class LossBySigma:
    """Sums and counts of the loss by bins of sigma_t; the data's lowest, median and highest level are edges."""

    def __init__(self, sigma_tn: Tensor) -> None:
        noisy = sigma_tn[sigma_tn > 0]
        levels = {noisy.min().item(), noisy.median().item(), noisy.max().item()} if len(noisy) else set()
        self.edges = sorted({*_EDGES, *levels})
        self._inner = torch.tensor(self.edges[1:-1])
        self.totals = torch.zeros(3, len(self.edges) - 1, dtype=torch.float64)  # sums, counts, of all

    def bin_of(self, sigma_t: Tensor) -> Tensor:
        """(B,) -> the bin (edges[i], edges[i + 1]] of each level."""
        return torch.bucketize(sigma_t.float(), self._inner)

    def add(self, sigma_t: Tensor, loss: Tensor) -> None:
        """Add one batch: levels and losses (B,). One that is not finite belongs to a step that is skipped."""
        loss = loss.detach().double().cpu()
        values = torch.stack([loss.where(loss.isfinite(), 0), loss.isfinite().double(), torch.ones_like(loss)])
        self.totals.index_add_(1, self.bin_of(sigma_t.cpu()), values)

    def diagnose(self, index: Tensor, sigma_t: Tensor, loss: Tensor) -> str:
        """Where a batch went wrong: the bins and the images whose loss is not finite, or is largest."""
        bad = ~loss.isfinite()
        what = "losses that are not finite" if bad.any() else "the largest losses (the gradient is not finite)"
        rows = bad.nonzero()[:, 0] if bad.any() else loss.argsort(descending=True)[:4]
        bins = self.bin_of(sigma_t[rows]).unique().tolist()
        ranges = ", ".join(f"{self.edges[i]:g} to {self.edges[i + 1]:g}" for i in bins)
        return f"{what}: sigma_t {ranges}; images {', '.join(map(str, index[rows][:8].tolist()))}"

    def summary(self) -> list[dict[str, float | None]]:
        """Mean loss and count of every bin that has any; the last bin has no upper end (JSON has no inf)."""
        sums, counts, _ = self.totals.tolist()
        ends = [*self.edges[:-1], None]
        return [
            {"above": ends[i], "up_to": ends[i + 1], "loss": sums[i] / counts[i], "count": int(counts[i])}
            for i in range(len(counts))
            if counts[i]
        ]


class Recorder:
    """Appends lines to `metrics.jsonl` and scalars to TensorBoard; on resume it forgets later steps."""

    def __init__(self, run_dir: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import

        self.path = run_dir / "metrics.jsonl"
        kept = read_lines(self.path, first_step) if self.path.exists() else []
        with write_whole(self.path) as partial:
            partial.write_text("".join(line + "\n" for line in kept))
        self.events = run_dir / "tensorboard"
        with explain_full_disk(self.events):
            self.board = SummaryWriter(self.events, purge_step=first_step + 1)

    def add(self, numbers: Mapping[str, float | None], by_sigma: Sequence[Mapping[str, float | None]]) -> None:
        """The numbers of a step, None where there is none, and `LossBySigma.summary`."""
        with explain_full_disk(self.path), open(self.path, "a") as file:
            file.write(json.dumps({**numbers, "loss_by_sigma": by_sigma}) + "\n")
        bins = {f"loss_by_sigma/above_{row['above']:g}": row["loss"] for row in by_sigma}
        with explain_full_disk(self.events):
            for key, value in {**numbers, **bins}.items():
                if value is not None and key != "step":
                    self.board.add_scalar(key, value, numbers["step"])

    def close(self) -> None:
        """Flush the events."""
        with explain_full_disk(self.events):
            self.board.close()


def read_lines(path: Path, last_step: int) -> list[str]:
    """The lines of the steps up to `last_step`; the last line of a killed run may be cut short."""
    *lines, _ = path.read_bytes().split(b"\n")
    kept = []
    for number, line in enumerate(lines, 1):
        with decoding(path, f"remove line {number}"):
            if json.loads(line)["step"] <= last_step:
                kept.append(line.decode())
    return kept
