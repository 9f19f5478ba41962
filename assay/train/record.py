"""What a run tells of itself: `metrics.jsonl`, and a diagnosis when it diverges."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
        ends, names = [*self.edges[:-1], None], ("above", "up_to", "loss", "count")
        rows = zip(ends[:-1], ends[1:], *self.totals[:2].tolist(), strict=True)
        return [dict(zip(names, (a, b, s / n, int(n)), strict=True)) for a, b, s, n in rows if n]


def trim_log(path: Path, last_step: int) -> None:
    """Forget the steps after `last_step`; the last line of a killed run may be cut short."""
    *lines, _ = path.read_bytes().split(b"\n") if path.exists() else [b""]
    kept = []
    for number, line in enumerate(lines, 1):
        with decoding(path, f"remove line {number}"):
            if json.loads(line)["step"] <= last_step:
                kept.append(line + b"\n")
    with write_whole(path) as partial:
        partial.write_bytes(b"".join(kept))


def add_to_log(path: Path, line: Mapping[str, Any]) -> None:
    """Append the numbers of a step."""
    with explain_full_disk(path), open(path, "a") as file:
        file.write(json.dumps(line) + "\n")
