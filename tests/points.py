"""Two-dimensional points as images of shape (2, 1, 1): data whose exact denoiser is known."""

import torch
from torch import Tensor, nn

from assay.data import ImageSource


class MixtureDenoiser(nn.Module):
    """The exact denoiser of a Gaussian mixture sum_k w_k N(atom_k, std_k^2 I), also for std 0."""

    num_classes = 0
    atoms: Tensor
    log_weights: Tensor
    variance: Tensor

    def __init__(self, atoms: Tensor, weights: Tensor | None = None, std: float | Tensor = 0.0) -> None:
        """`atoms` (K, ...), `weights` (K,) (uniform if None), `std` a number or (K,)."""
        super().__init__()
        num_atoms = len(atoms)
        weights = torch.full((num_atoms,), 1 / num_atoms, dtype=atoms.dtype) if weights is None else weights
        std = torch.as_tensor(std, dtype=atoms.dtype).expand(num_atoms)
        self.register_buffer("atoms", atoms)
        self.register_buffer("log_weights", (weights / weights.sum()).log())
        self.register_buffer("variance", std**2)

    def forward(self, x_t: Tensor, sigma_t: Tensor, label: Tensor | None = None) -> Tensor:
        """E[x_0 | x_t] for `x_t` (B, ...) and `sigma_t` (B,) > 0; mixtures have no classes."""
        atoms = self.atoms.flatten(1)
        total = self.variance + sigma_t.to(x_t.dtype)[:, None] ** 2  # (B, K)
        difference = x_t.flatten(1)[:, None] - atoms  # (B, K, D)
        log_density = -0.5 * difference.square().sum(-1) / total - 0.5 * atoms.shape[1] * total.log()
        responsibility = (self.log_weights + log_density).softmax(-1)[..., None]
        posterior = atoms + (self.variance / total)[..., None] * difference
        return (responsibility * posterior).sum(1).view_as(x_t)


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
