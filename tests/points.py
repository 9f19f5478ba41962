"""Two-dimensional points as images of shape (2, 1, 1): data whose exact denoiser is known."""

import torch
from torch import Tensor

from assay.data import ImageSource
from assay.denoise import MixtureDenoiser

ATOMS = torch.tensor([[-0.8, -0.3], [0.6, 0.7], [0.5, -0.7]])
WEIGHTS = torch.tensor([0.4, 0.35, 0.25])
STD = 0.2
ORACLE = MixtureDenoiser(ATOMS.view(-1, 2, 1, 1), WEIGHTS, STD)


class Points(ImageSource):
    """Mixture points, a fraction of them clean, the others at one noise level."""

    image_shape = (2, 1, 1)
    class_names = ("left", "right")
    physical_range = (-1.0, 1.0)

    def __init__(self, num: int, clean_fraction: float = 1.0, sigma: float = 0.3, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        component = torch.multinomial(WEIGHTS, num, replacement=True, generator=generator)
        x_0 = ATOMS[component] + STD * torch.randn(num, 2, generator=generator)
        self.sigma_tn = torch.full((num,), sigma)
        self.sigma_tn[: round(clean_fraction * num)] = 0
        noise = self.sigma_tn[:, None] * torch.randn(num, 2, generator=generator)
        self.x_tn = (x_0 + noise).view(num, 2, 1, 1)
        self.label = (component > 0).long()
        self.name = f"{num} points"
        self.fingerprint = f"{num} {clean_fraction} {sigma} {seed}"

    def __len__(self) -> int:
        return len(self.x_tn)

    def read(self, index: Tensor) -> Tensor:
        return self.x_tn[index].clone()
