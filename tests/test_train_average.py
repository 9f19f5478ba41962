"""Averages of any length, put together after training, are those that training would have tracked."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from scipy import integrate
from torch import nn

from assay.checkpoint import load_checkpoint
from assay.errors import AssayError
from assay.metrics.held_out import HeldOutConfig, checkpoint_loss, choose_average
from assay.train import train
from assay.train.average import LENGTHS, Profile, average_checkpoint, coefficients, gamma_of, update_average
from tests.commands import failing, run
from tests.errors import rejected
from tests.points import Points
from tests.test_train import config


def density(profile: Profile, tau: np.ndarray) -> np.ndarray:
    inside = (profile.gamma + 1) * tau**profile.gamma / profile.step ** (profile.gamma + 1)
    return np.where(tau <= profile.step, inside, 0.0)


def weights_of_steps(step: int, length: float) -> np.ndarray:
    """(step,): what a tracked average gives the weights after steps 1 to `step`."""
    edges = (np.arange(step + 1) / step) ** (gamma_of(length) + 1)
    return np.diff(edges)


@given(st.floats(0.01, 0.28))
def test_length_is_the_relative_deviation_of_the_profile(length: float) -> None:
    profile = Profile(1, gamma_of(length))
    mean, square = (integrate.quad(lambda t, k=k: t**k * density(profile, t), 0, 1)[0] for k in (1, 2))
    assert np.sqrt(square - mean**2) == pytest.approx(length, rel=1e-3)


def test_edm2s_exponents() -> None:
    assert gamma_of(0.05) == pytest.approx(16.97, abs=0.01) and gamma_of(0.10) == pytest.approx(6.94, abs=0.01)
    for bad in (0.0, 0.3, float("nan")):
        with pytest.raises(AssayError, match="share"):
            gamma_of(bad)


@given(st.integers(1, 500), st.integers(1, 500), st.floats(0.03, 0.2), st.floats(0.03, 0.2))
def test_dot_is_the_integral(a: int, b: int, length_a: float, length_b: float) -> None:
    one, other = Profile(a, gamma_of(length_a)), Profile(b, gamma_of(length_b))
    end = min(a, b)
    expected = integrate.quad(lambda t: density(one, t) * density(other, t), 0, end, epsabs=0)[0]
    assert one.dot(other) == pytest.approx(expected, rel=1e-5) == other.dot(one)


@pytest.mark.parametrize("length", [0.02, 0.05, 0.1, 0.2])
def test_tracking_gives_each_step_its_share(length: float) -> None:
    generator = torch.Generator().manual_seed(0)
    average, model, seen = nn.Linear(2, 1).double(), nn.Linear(2, 1).double(), []
    for step in range(1, 41):
        model.weight.data = torch.randn(1, 2, generator=generator, dtype=torch.float64)
        seen.append(model.weight.data.clone())
        update_average(average, model, step, length)
    direct = sum(share * value for share, value in zip(weights_of_steps(40, length), seen, strict=True))
    torch.testing.assert_close(average.weight.data, direct)


def test_a_stored_profile_is_found_again_and_others_come_close() -> None:
    steps = range(50, 801, 50)
    stored = [Profile(step, gamma_of(length)) for step in steps for length in LENGTHS]
    for number in (0, 7, len(stored) - 1):
        np.testing.assert_allclose(coefficients(stored, stored[number]), np.eye(len(stored))[number], atol=1e-5)
    tau = np.linspace(0, 800, 20_001)
    for length, bar in [(0.06, 0.01), (0.08, 0.01), (0.15, 0.03), (0.2, 0.05), (0.03, 0.25)]:
        wanted = Profile(800, gamma_of(length))
        found = coefficients(stored, wanted)
        made = sum(x * density(one, tau) for x, one in zip(found, stored, strict=True))
        error = np.sqrt(np.mean((made - density(wanted, tau)) ** 2) / np.mean(density(wanted, tau) ** 2))
        assert error < bar, length
        assert found.sum() == pytest.approx(1, abs=0.05)


def test_a_run_gives_the_average_that_was_not_tracked(tmp_path: Path) -> None:
    points, length = Points(50, 0.2), 0.08
    chosen = config(num_steps=120, state_every=1, average_every=10, lr=1e-2, lr_ramp_images=0)
    path: list[dict[str, torch.Tensor]] = []

    def keep(progress: object) -> None:
        newest = sorted((tmp_path / "run/state").glob("*.safetensors"))
        if newest:
            path.append({k: v for k, v in load_file(newest[-1]).items() if k.startswith("model/")})

    steps = iter(range(1000))  # stopped on the way: the averages resume too
    train(chosen, tmp_path / "run", points, on_progress=keep, should_stop=lambda: next(steps) == 33)
    train(chosen, tmp_path / "run", points, on_progress=keep)
    last = load_file(tmp_path / f"run/state/{120:09d}.safetensors")
    path.append({k: v for k, v in last.items() if k.startswith("model/")})
    by_step = {json.dumps(float(sum(v.double().sum() for v in state.values()))): state for state in path}
    assert len(by_step) == 120  # every state was seen
    trajectory = list(by_step.values())

    average_checkpoint(tmp_path / "run", length, tmp_path / "average.safetensors")
    made = load_checkpoint(tmp_path / "average.safetensors").denoiser.state_dict()
    shares = weights_of_steps(120, length)
    for key in made:
        values = torch.stack([state[f"model/{key}"].double() for state in trajectory])
        direct = (torch.tensor(shares).view(-1, *[1] * (values.ndim - 1)) * values).sum(0)
        spread = values.std(0).max()
        assert (made[key] - direct).abs().max() <= 0.02 * spread + 1e-6, key
    assert load_checkpoint(tmp_path / "average.safetensors").info.num_images_seen == 120 * 8
    average_checkpoint(tmp_path / "run", length, tmp_path / "half.safetensors", step=60)
    assert load_checkpoint(tmp_path / "half.safetensors").info.num_images_seen == 60 * 8
    for step in (5, 121, 99_999):
        with rejected("step"):
            average_checkpoint(tmp_path / "run", length, tmp_path / "x.safetensors", step=step)
    final = tmp_path / "run/snapshots/final.safetensors"
    before = final.read_bytes()
    with pytest.raises(AssayError) as caught:
        average_checkpoint(tmp_path / "run", length, final)
    assert (caught.value.key, caught.value.path) == ("output", str(final)) and final.read_bytes() == before
    said = run("model", "average", tmp_path / "run", "--length", length, "-o", tmp_path / "cli.safetensors")
    assert "cli.safetensors" in said
    assert (tmp_path / "cli.safetensors").read_bytes() == (tmp_path / "average.safetensors").read_bytes()


def test_the_length_with_the_best_score_is_chosen(tmp_path: Path) -> None:
    chosen = config(num_steps=120, average_every=10, lr=1e-2, lr_ramp_images=0)
    train(chosen, tmp_path / "run", Points(50, 0.2))
    held_out, lengths = Points(60, seed=5), (0.02, 0.1, 0.25)
    chosen_by, best = choose_average(tmp_path / "run", held_out, tmp_path / "best.safetensors", lengths)
    first, second = torch.arange(0, 60, 2), torch.arange(1, 60, 2)
    quick, losses = HeldOutConfig(num_bands=HeldOutConfig().num_bands // 4), []
    for length in lengths:
        average_checkpoint(tmp_path / "run", length, tmp_path / "one.safetensors")
        one = checkpoint_loss(tmp_path / "one.safetensors", held_out, config=quick, index=first)
        losses.append(one.nats_per_dim.value)
    assert chosen_by == dict(zip(lengths, losses, strict=True))
    average_checkpoint(tmp_path / "run", lengths[losses.index(min(losses))], tmp_path / "one.safetensors")
    assert (tmp_path / "best.safetensors").read_bytes() == (tmp_path / "one.safetensors").read_bytes()
    assert best == checkpoint_loss(tmp_path / "best.safetensors", held_out, index=second)
    both = ("--length", 0.1, "--held-out", "x", "-o", tmp_path / "y.safetensors")
    assert "give one of them" in str(failing("model", "average", tmp_path / "run", *both))


def test_what_lacks_averages_is_named(tmp_path: Path) -> None:
    train(config(num_steps=5), tmp_path / "run", Points(50))
    with rejected(path=str(tmp_path / "run")):
        average_checkpoint(tmp_path / "run", 0.1, tmp_path / "x.safetensors")
    chosen = config(num_steps=10, average_every=5, continue_from=str(tmp_path / "run"))
    with rejected("train.continue_from", tmp_path / "run"):
        train(chosen, tmp_path / "on", Points(50))
