"""The one-step student: its loss on closed forms, and a distillation that was killed."""

import math
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from assay.checkpoint import load_checkpoint
from assay.data.known import get
from assay.train import read_config, train
from assay.train.folder import final_path
from tests.points import MixtureDenoiser

SCRIPT = Path(__file__).parent.parent / "examples" / "one_step.py"
MEAN, STD = 0.3, 0.5  # of the clean images


@pytest.fixture(scope="module")
def one_step() -> ModuleType:
    module = ModuleType("one_step")
    exec(compile(SCRIPT.read_text(), SCRIPT, "exec"), vars(module))
    return module


def gaussian(mean: float, std: float) -> MixtureDenoiser:
    return MixtureDenoiser(torch.full((1, 1, 1, 1), mean, dtype=torch.float64), std=std)


def quadrature() -> tuple[Tensor, Tensor, Tensor]:
    """z, eps and weights (9,): expectations of quadratic functions of both, exactly."""
    nodes, weights = (torch.from_numpy(part) for part in np.polynomial.hermite_e.hermegauss(3))
    z, eps = torch.cartesian_prod(nodes, nodes).T
    return z.view(-1, 1, 1, 1), eps.view(-1, 1, 1, 1), torch.outer(weights, weights).flatten() / math.tau


def value_and_gradient(
    one_step: ModuleType, mean: float, std: float, sigma: float, alpha: float
) -> tuple[float, float, float]:
    """The expected loss of x_g = mean + std z with its exact denoiser, and its gradient by mean and by std."""
    z, eps, weights = quadrature()
    parameters = torch.tensor([mean, std], dtype=torch.float64, requires_grad=True)
    x_g = parameters[0] + parameters[1] * z
    sigma_t = torch.full((len(z),), sigma, dtype=torch.float64)
    loss = one_step.sid_loss(gaussian(MEAN, STD), gaussian(mean, std), x_g, sigma_t, eps, alpha)
    assert loss.shape == (len(z),)
    total = weights @ loss
    (gradient,) = torch.autograd.grad(total, parameters)
    return total.item(), gradient[0].item(), gradient[1].item()


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 1.2])
@pytest.mark.parametrize("sigma", [0.4, 1.0, 5.0])
@pytest.mark.parametrize(
    ("mean", "std"), [(0.3, 0.5), (0.1, 0.5), (0.6, 0.5), (0.3, 0.35), (0.3, 0.7), (0.0, 0.6)]
)
def test_loss_and_gradient_of_gaussian_images(
    one_step: ModuleType, mean: float, std: float, sigma: float, alpha: float
) -> None:
    """With a = sigma^2 / (s^2 + sigma^2) of the data, b the same of the student and d = m_g - m, the loss is
    (1 - alpha) ((b - a)^2 (s_g^2 + sigma^2) + a^2 d^2). The gradient by the mean is
    a d (a + (2 alpha - 1)(b - a)), by the standard deviation 2 s_g (a - b)(a + alpha (b - a)).
    """
    a, b = (sigma**2 / (each**2 + sigma**2) for each in (STD, std))
    distance = (b - a) ** 2 * (std**2 + sigma**2) + (a * (mean - MEAN)) ** 2
    by_mean = a * (mean - MEAN) * (a + (2 * alpha - 1) * (b - a))
    by_std = 2 * std * (a - b) * (a + alpha * (b - a))
    found = value_and_gradient(one_step, mean, std, sigma, alpha)
    assert found == pytest.approx(((1 - alpha) * distance, by_mean, by_std), rel=1e-9, abs=1e-12)
    for gradient, error in ((found[1], mean - MEAN), (found[2], std - STD)):
        assert gradient * error > 0 or abs(error) < 1e-12  # descending it makes the error smaller


def test_equal_denoisers_leave_every_image_in_place(one_step: ModuleType) -> None:
    """Not in expectation alone: loss and gradient are zero for each image, also of a mixture."""
    generator = torch.Generator().manual_seed(0)
    exact = MixtureDenoiser(torch.randn(5, 1, 4, 4, generator=generator), std=0.2)
    x_g = torch.randn(16, 1, 4, 4, generator=generator).requires_grad_()
    eps, sigma_t = torch.randn(16, 1, 4, 4, generator=generator), torch.linspace(0.4, 20, 16)
    loss = one_step.sid_loss(exact, exact, x_g, sigma_t, eps, 1.2)
    (gradient,) = torch.autograd.grad(loss.sum(), x_g)
    assert loss.abs().max() == 0 and gradient.abs().max() == 0


def test_descending_it_finds_the_law_of_the_clean_images(one_step: ModuleType) -> None:
    """From levels above 0.4 alone: the mean and the spread of images without noise."""
    mean, std = -0.5, 1.2
    for step in range(400):
        _, by_mean, by_std = value_and_gradient(one_step, mean, std, (0.4, 1.0, 3.0)[step % 3], 1.0)
        mean, std = mean - 0.3 * by_mean, std - 0.3 * by_std
    assert (mean, std) == pytest.approx((MEAN, STD), abs=1e-3)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run on noisy digits."""
    folder = tmp_path_factory.mktemp("one-step")
    get("digits", folder / "digits")
    data = {"store": str(folder / "digits"), "clean_fraction": 0.0, "sigma": 0.3}
    net = {"preset": "mlp", "width": 32, "num_blocks": 1}
    config = read_config({"data": data, "net": net, "train": {"num_steps": 100, "batch_size": 64, "lr": 2e-3}})
    assert train(config, folder / "run").finished
    return folder / "run"


def test_a_killed_distillation_ends_with_the_same_bits(run: Path, tmp_path: Path) -> None:
    def start(folder: str) -> subprocess.Popen[str]:
        asked = [run, "-o", tmp_path / folder / "student.safetensors", "--cache", tmp_path / "cache"]
        command = [sys.executable, SCRIPT, *asked, "--num-steps", "45", "--every", "15", "--seed", "3"]
        return subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True)

    whole, _ = (process := start("whole")).communicate()
    assert process.returncode == 0
    assert "step 45 of 45" in whole
    assert re.search(r"teacher, 35 evaluations: fd [\d.]+ ± [\d.]+, precision [\d.]+, recall [\d.]+", whole)
    assert "student, 1 evaluation: fd" in whole
    process = start("killed")
    assert process.stdout is not None
    while not process.stdout.readline().startswith("step 30"):
        pass
    process.send_signal(signal.SIGKILL)
    process.communicate()
    again, _ = (process := start("killed")).communicate()
    assert process.returncode == 0 and "step 15 of" not in again  # it resumed
    for name in ("student.safetensors", "student.png"):
        first, second = ((tmp_path / folder / name).read_bytes() for folder in ("whole", "killed"))
        assert first == second
    student, teacher = (load_checkpoint(path) for path in (tmp_path / "whole" / "student.safetensors", run))
    assert student.config == teacher.config and "one step from 2.5" in (student.info.source or "")


def test_what_cannot_be_distilled_is_rejected_before_any_work(
    one_step: ModuleType, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """In one sentence."""
    small = {"net": {"preset": "mlp", "width": 8}, "train": {"num_steps": 1, "batch_size": 16}}
    train(read_config({**small, "data": {"store": str(run.parent / "digits")}}), tmp_path / "clean")
    (tmp_path / "begun").mkdir()
    shutil.copy(run / "config.json", tmp_path / "begun")
    cases: list[tuple[Path, str, str]] = [
        (tmp_path / "clean", "", "give a run of noisy images alone"),
        (tmp_path / "absent", "", "absent is not the folder of a run"),
        (final_path(run), "", "is not the folder of a run: give one that `assay train` wrote"),
        (tmp_path / "begun", "", "is a folder without snapshots/final.safetensors; give a finished run"),
        (run, "--num-steps 0", "--num-steps 0 --every 250: both are whole numbers from 1 on"),
        (run, "--every 0", "--num-steps 2000 --every 0: both are whole numbers from 1 on"),
    ]
    for given, options, words in cases:
        command = ["one_step.py", given, "-o", tmp_path / "student.safetensors", *options.split()]
        monkeypatch.setattr(sys, "argv", list(map(str, command)))
        with pytest.raises(SystemExit):
            one_step.main()
        assert words in capsys.readouterr().err.splitlines()[-1] and not list(tmp_path.glob("student*"))
