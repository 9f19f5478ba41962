"""What is in a source of images: a histogram of its noise levels, and a picture of them."""

from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor

from assay.data.picture import captioned_rows
from assay.data.source import ImageSource
from assay.data.view import simulate
from assay.noise import snr_db

_MAX_BINS = 12


@dataclass(frozen=True)
class NoiseBin:
    """How many images have a noise level in [low, high]; `snr_db` at the geometric middle."""

    low: float
    high: float
    num_images: int
    snr_db: float


def noise_histogram(sigma_tn: Tensor) -> list[NoiseBin]:
    """One bin per distinct level if there are few; else one for clean images and logarithmic bins above."""
    levels, counts = sigma_tn.unique(return_counts=True)
    if len(levels) > _MAX_BINS:
        noisy = levels[levels > 0].double()
        edges = torch.logspace(
            noisy[0].log10().item(), noisy[-1].log10().item(), _MAX_BINS, dtype=torch.float64
        )
        bin_of = torch.where(levels > 0, torch.bucketize(levels.double(), edges[1:-1], right=True) + 1, 0)
    else:
        bin_of = torch.arange(len(levels))
    bins = []
    for number in bin_of.unique().tolist():
        inside = levels[bin_of == number].double()
        low, high = inside[0].item(), inside[-1].item()
        bins.append(NoiseBin(low, high, int(counts[bin_of == number].sum()), snr_db((low * high) ** 0.5)))
    return bins


def noise_picture(source: ImageSource, add_noise: tuple[float, ...] = (), num_columns: int = 8) -> Image.Image:
    """A row of images for each noise level, like the paper's figure of them.

    `add_noise` shows the same images of a clean source with simulated noise of these levels instead.
    """
    if add_noise:
        index = _spread(torch.arange(len(source)), num_columns)
        rows = [(0.0, source.read(index))]
        rows += [(sigma, simulate(source, 0, sigma).read(index)) for sigma in sorted(add_noise)]
    else:
        rows = []
        for noise in noise_histogram(source.sigma_tn):
            inside = (source.sigma_tn >= noise.low) & (source.sigma_tn <= noise.high)
            index = _spread(inside.nonzero()[:, 0], num_columns)
            rows.append(((noise.low * noise.high) ** 0.5, source.read(index)))
    return captioned_rows([(f"sigma {sigma:.3g}\n{snr_text(snr_db(sigma))}", images) for sigma, images in rows])


def levels_text(low: float, high: float, form: str = ".3g", to: str = " to ") -> str:
    """Noise levels from `low` to `high`; one number if both look the same."""
    ends = f"{low:{form}}", f"{high:{form}}"
    return ends[0] if ends[0] == ends[1] else to.join(ends)


def snr_text(decibels: float) -> str:
    """An SNR as people read it."""
    return "clean" if decibels == float("inf") else f"{decibels:.1f} dB"


def _spread(index: Tensor, count: int) -> Tensor:
    """At most `count` entries, evenly spread over `index`."""
    return index[torch.linspace(0, len(index) - 1, min(count, len(index))).round().long()]
