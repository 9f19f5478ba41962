"""One-step students: distil a model of noisy images into a generator that needs one evaluation per image.

The denoiser of a model that was trained on noisy images alone, the teacher h, was trained at levels above
sigma_tn and is used there alone. The student G begins with its weights and makes an image from noise z:

    x_g = G(z) = D(sigma_init z, sigma_init),        x_t = x_g + sigma_t eps,        sigma_t > sigma_tn.

If the exact denoiser f of G's images equals h at one level, the law of x_g is that of the clean images. Since
f = E[x_g | x_t], E <h - f, f - x_g> = 0, and the distance of the two denoisers can be written in two ways:

    E ||h - f||^2 = E <h - f, h - x_g>.

Score identity distillation (SiD, Zhou et al. 2024) descends the second minus alpha times the first,

    <h - f, h - x_g> - alpha ||h - f||^2,

with the weights of h and f fixed and the gradient through x_g and x_t. It is (1 - alpha) E ||h - f||^2 in
expectation, so its value tells little, and 0 for every x_t if h = f. Where x_0 and x_g are Gaussian with means
m and m_g and the same variance s^2, its gradient by m_g is (sigma_t^2 / (s^2 + sigma_t^2))^2 (m_g - m).

f is learnt along the way as h was (Chen et al. 2025): by the ambient loss, from images x_g with noise of
sigma_tn.
"""

import copy
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from assay.data import ImageSource
from assay.data.view import stream
from assay.denoise import Denoiser, Preconditioned
from assay.loss import ambient_loss, edm_weight
from assay.noise import LogNormal, draw_sigma, per_image
from assay.sample import generate
from assay.train.folder import load_state, pack_tensors, save_state, unpack_tensors

SIGMA_INIT, ALPHA = 2.5, 1.0
LOWEST, HIGHEST = 1.33, 20.0  # of the levels at which h and f are compared, in sigma_tn; and in all
LR, FAKE_LR, BETAS, BATCH_SIZE = 5e-4, 1e-3, (0.0, 0.999), 128
HALF_LIFE = 20_000  # of the average of weights, in images; at most a tenth of the distillation


def sid_loss(
    teacher: Denoiser, fake: Denoiser, x_g: Tensor, sigma_t: Tensor, eps: Tensor, alpha: float = ALPHA
) -> Tensor:
    """<h - f, h - x_g> - alpha ||h - f||^2 for each generated image, (B,), averaged over pixels."""
    x_t = x_g + per_image(sigma_t, x_g) * eps
    h, f = teacher(x_t, sigma_t), fake(x_t, sigma_t)
    return ((h - f) * (h - x_g) - alpha * (h - f).square()).flatten(1).mean(1)


def distil(
    teacher: Preconditioned,
    image_shape: tuple[int, int, int],
    sigma_tn: float,
    num_steps: int,
    seed: int,
    states: Path,
    every: int = 250,
    batch_size: int = BATCH_SIZE,
) -> Iterator[tuple[int, Preconditioned]]:
    """Yield the student, an average of its weights, every `every` steps; resumes from the last of `states`."""
    teacher = copy.deepcopy(teacher).eval().requires_grad_(False)
    student, fake, average = (copy.deepcopy(teacher).requires_grad_(part < 2) for part in range(3))
    groups = [{"params": student.parameters(), "lr": LR}, {"params": fake.parameters(), "lr": FAKE_LR}]
    optimizer = torch.optim.Adam(groups, betas=BETAS, fused=True)  # a weight without a gradient stays as it is
    modules, first = {"student": student, "fake": fake, "average": average}, 0
    if (found := load_state(states)) is not None:
        tensors, info = found
        unpack_tensors(tensors, modules, optimizer)
        first = info["step"]
    level, sigma_init = (torch.full((batch_size,), value) for value in (sigma_tn, SIGMA_INIT))
    share = 1 - 0.5 ** (batch_size / min(HALF_LIFE, num_steps * batch_size / 10))
    for step in range(first, num_steps):
        generator = stream(seed, "one step", step)
        z, z_tn, *eps = torch.randn(4, batch_size, *image_shape, generator=generator)
        x_g = student(SIGMA_INIT * z, sigma_init)
        x_tn = x_g.detach() + sigma_tn * z_tn
        sigma_t = draw_sigma(LogNormal(), level, generator)
        ambient_loss(fake, x_tn, level, sigma_t, eps[0], edm_weight(sigma_t)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        sigma_t = draw_sigma(LogNormal(), LOWEST * level, generator).clamp(max=HIGHEST)
        sid_loss(teacher, fake, x_g, sigma_t, eps[1]).mean().backward(inputs=list(student.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        torch._foreach_lerp_(list(average.parameters()), [p.detach() for p in student.parameters()], share)
        if (step + 1) % every == 0 or step + 1 == num_steps:
            yield step + 1, average  # and then the state: a caller that was stopped here gets it again
            save_state(states, step + 1, pack_tensors(modules, optimizer), {})


class OneStep(ImageSource):
    """Image i is what the student makes of the noise of seed `first_seed` + i."""

    name = "student"

    def __init__(
        self, student: Denoiser, image_shape: tuple[int, int, int], num_images: int, first_seed: int = 0
    ) -> None:
        self.student, self.image_shape = student, image_shape
        self.num_images, self.first_seed = num_images, first_seed

    def __len__(self) -> int:
        return self.num_images

    def read(self, index: Tensor) -> Tensor:
        """`index` (B,) -> (B, C, H, W)."""
        seeds, grid = [self.first_seed + int(i) for i in index], torch.tensor([SIGMA_INIT, 0.0])
        batches = generate(self.student, seeds, self.image_shape, grid, batch_size=len(seeds))
        return torch.cat(list(batches))
