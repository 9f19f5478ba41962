"""Prices against exact Gaussian learners, known laws, simulated coverage, and the paper's own numbers."""

import json
import math
import re
import statistics
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits

import assay
from assay.errors import AssayError
from assay.pricing import (
    LevelResults,
    Measured,
    Price,
    Vendor,
    fit_laws,
    plan,
    price,
    price_all,
    quote,
    write_levels,
)
from assay.pricing.law import Law, _Problem, interval
from assay.pricing.paper import PAPER, PAPER_BOXES, pair_bounds
from assay.pricing.price import Prices, price_results
from assay.pricing.quote import _costs, _information, _worth, spectrum
from assay.pricing.words import (
    _ends,
    amount,
    cautions,
    doubts,
    headline,
    plan_rows,
    price_lines,
    price_panels,
    price_rows,
    reason,
    sentence,
    training_limits,
)
from tests.commands import failing, run
from tests.errors import fault, rejected
from tests.stores import stored

SIGMAS = np.array([0.1, 0.3])


# The quote.


def learned(truth: np.ndarray, counts: dict[float, int], num: int, rng: np.random.Generator) -> tuple[Any, Any]:
    """Maximum likelihood mean (num, d) and covariance (num, d, d) from images of each noise level, by EM."""
    d = len(truth)
    data = [(s, n, rng.standard_normal((num, n, d)) * np.sqrt(truth + s**2)) for s, n in counts.items()]
    moments = [(s, n, x.mean(1), np.einsum("rni,rnj->rij", x, x) / n) for s, n, x in data]
    mean, cov = np.zeros((num, d)), np.broadcast_to(np.diag(truth), (num, d, d))
    total = sum(counts.values())
    for _ in range(300):
        first, second = np.zeros_like(mean), np.zeros_like(cov)
        for s, n, m, c in moments:
            w = cov @ np.linalg.inv(cov + s**2 * np.eye(d))
            away = mean - (w @ mean[..., None])[..., 0]
            one = away + (w @ m[..., None])[..., 0]
            cross = np.einsum("ri,rj->rij", away, (w @ m[..., None])[..., 0])
            two = (
                w @ c @ np.swapaxes(w, 1, 2)
                + cross
                + np.swapaxes(cross, 1, 2)
                + away[:, :, None] * away[:, None]
            )
            first, second = first + n * one, second + n * (two + cov - w @ cov)
        mean, cov = first / total, second / total
        cov = cov - mean[:, :, None] * mean[:, None]
    return mean, cov


def test_the_closed_form_is_what_gaussian_learners_lose() -> None:
    truth, sigma, n_clean, n_noisy, num = np.array([0.6, 0.15, 0.04]), 0.3, 400, 1600, 600
    rng = np.random.default_rng(0)
    mean, cov = learned(truth, {0.0: n_clean, sigma: n_noisy}, num, rng)
    modes = truth, np.ones(3)
    for level in (0.1, 0.3, 1.0):
        s, eye = level**2, np.eye(3)
        best, w = np.diag(truth / (truth + s)), cov @ np.linalg.inv(cov + s * eye)
        change = w - best
        excess = np.einsum("rij,j,rij->r", change, truth + s, change)
        excess += np.square(((eye - w) @ mean[..., None])[..., 0]).sum(1)
        cost, information = _costs(modes, np.array([level])) * s, _information(modes, np.array([sigma]))[0]
        predicted = (cost / (n_clean + information * n_noisy)).sum()
        assert excess.mean() == pytest.approx(predicted, abs=4 * excess.std() / np.sqrt(num) + 0.03 * predicted)
        worth = _worth(cost, modes, np.array([sigma]), np.ones(1), n_clean / (n_clean + n_noisy))
        equal = cost.sum() / excess.mean()  # clean images that alone lose as much
        error = 4 * excess.std() / np.sqrt(num) / excess.mean() * equal / n_noisy
        assert (equal - n_clean) / n_noisy == pytest.approx(worth, abs=error + 0.03)


def test_worth_of_a_quote_rises_with_the_level_and_falls_with_the_noise() -> None:
    rng = np.random.default_rng(0)
    images = rng.standard_normal((400, 1, 6, 6)).cumsum(2).cumsum(3) / 12
    quoted = quote(images, [0.1, 0.3])
    assert (np.diff(quoted.worth, axis=1) > 0).all() and (quoted.worth[0] > quoted.worth[1]).all()
    for goal in ("structure", "everything"):
        worth, low, high = quoted.goal(goal, 0.3)
        assert 0 < low < worth < high < 1
    assert quoted.goal("structure", 0.3)[0] > quoted.goal("everything", 0.3)[0]
    for unknown in ("Structure", "looks"):
        with rejected("goal"):
            quoted.goal(unknown, 0.3)


def test_spectrum_of_few_images_is_not_spread_out() -> None:
    truth = np.geomspace(1, 0.01, 40)
    x = np.random.default_rng(0).standard_normal((60, 40)) * np.sqrt(truth)
    found, count = spectrum(x)
    raw = np.linalg.eigvalsh(np.cov(x.T))[::-1]
    assert count.sum() == 40 and (found @ count) == pytest.approx(truth.sum(), rel=0.15)
    assert np.abs(np.log(found / truth)).mean() < 0.7 * np.abs(np.log(raw / truth)).mean()


@pytest.mark.parametrize(
    ("images", "sigma", "key"),
    [
        (np.zeros((4, 8, 8)), 0.1, "images"),
        (np.zeros((40, 8, 8), np.uint8), 0.1, "images"),
        (np.full((40, 8, 8), 200.0), 0.1, "value_range"),
        (np.zeros((40, 8, 8)), 0.1, "images"),
        (np.zeros((40, 8, 8)), 0.0, "sigma"),
        (np.zeros((40, 8, 8)), 25, "sigma"),
        (np.random.rand(40, 8, 8), np.linspace(0.1, 0.3, 597), "sigma"),
    ],
)
def test_images_that_cannot_be_quoted(images: Any, sigma: float, key: str) -> None:
    with pytest.raises(AssayError) as caught:
        assay.quote(images, sigma)
    assert caught.value.key == key


def test_a_value_range_scales_images_and_noise() -> None:
    images = np.random.default_rng(0).random((60, 4, 4))
    found, scaled = (
        assay.quote(16 * images, [1.6, 4], value_range=(0, 16)),
        assay.quote(2 * images - 1, [0.2, 0.5]),
    )
    assert found.sigmas == pytest.approx([0.2, 0.5]) and found.worth == pytest.approx(scaled.worth, rel=1e-5)
    with rejected("value_range"):
        assay.quote(assay.from_arrays(images, value_range=(0, 1)), 0.2, value_range=(0, 1))
    with pytest.warns(
        UserWarning, match="level of 0.002353, .* a grey step 0.0078: is it in the units of the images"
    ):
        assay.quote(255 * images, [0.3, 20], value_range=(0, 255))


def test_a_level_in_the_units_of_the_source_is_told() -> None:
    rng = np.random.default_rng(0)
    images = np.concatenate([rng.uniform(0, 1, (40, 4, 4)), rng.normal(0.5, 0.4, (40, 4, 4))])
    source = assay.from_arrays(images, [0.0] * 40 + [0.25] * 40, value_range=(0, 1))
    with pytest.warns(UserWarning, match="have 0.5, which is 0.25 in their own units; is 0.5 meant"):
        quote(source, 0.25)
    with warnings.catch_warnings(action="error"):
        quote(source, 0.5)


def test_levels_that_cannot_be_quoted_are_named_in_their_unit() -> None:
    for wrong in (20, -0.1, [0.2, 5]):
        with pytest.raises(AssayError) as caught:
            assay.quote(np.random.default_rng(0).uniform(-1, 1, (40, 4, 4)), wrong)
        assert (
            f"level of {np.max(wrong):g} is not between 0 and 4, where black to white is 2" in caught.value.what
        )
    grey = assay.quote(255 * load_digits().images[:100] / 16, 40, value_range=(0, 255))
    with rejected("sigma"):
        grey.goal("structure", 40)  # in grey levels, which the quote has scaled
    assert 0 < grey.goal("structure", 40 / 127.5)[0] < 1
    with pytest.raises(AssayError, match="597 noise levels, and 1 to 100"):
        assay.quote(np.random.default_rng(0).uniform(-1, 1, (40, 4, 4)), np.linspace(0.1, 0.3, 597))


def test_copies_and_results_that_rise_are_told() -> None:
    images = np.repeat(np.random.default_rng(0).normal(0, 0.4, (6, 4, 4)), 10, 0)
    with pytest.warns(UserWarning, match="54 of the 60"):
        assay.quote(images, 0.3)
    clean, noisy = np.array([100, 200, 400, 800, 100, 100] * 2), np.array([0, 0, 0, 0, 300, 700] * 2)
    rise = 1 - 3 / (clean + noisy / 2) ** 0.5 + 1e-3 * np.sin(np.arange(12))
    table = {"n_clean": clean, "n_noisy": noisy, "noise": np.where(noisy, 0.2, 0.0)}
    rising = assay.price(table | {"fid": rise})
    assert rising.of("looks").verdict == "undecided"
    offers = [assay.Vendor(price=1), assay.Vendor(price=0.1, sigma=0.2)]
    assert "Buy" in repr(plan(table | {"fid": 2 - rise}, offers, budget=500))
    with pytest.raises(AssayError, match="95 is not"):
        plan(rising, offers, budget=500, confidence=95)


def test_bright_images_of_a_known_scale_are_not_told(recwarn: pytest.WarningsRecorder) -> None:
    bright = 0.8 + 0.2 * np.random.default_rng(0).random((40, 4, 4))
    assay.quote(assay.from_arrays(bright, value_range=(0, 1)), 0.3)
    assert not recwarn.list


def test_units_that_look_wrong_are_told() -> None:
    images = np.random.default_rng(0).random((40, 8, 8))
    with pytest.warns(UserWarning, match="-1 and 1:"):
        assay.quote(images, 0.2)


# The law.

LADDER = [(size, 0, 0) for size in (60, 120, 180, 300, 600)]
FEW = [(60, 0, 0), (600, 0, 0), (60, 540, 0), (60, 0, 540)]
MIXES = [(size, *noisy) for size in (60, 120, 180, 300) for noisy in ((600 - size, 0), (0, 600 - size))]
DESIGNS = {
    "one": [(0, *c) for c in LADDER + MIXES],
    "mixed": [(0, *c) for c in LADDER + MIXES] + [(b, *c) for b in (1, 2) for c in FEW],
    "three": [(b, *c) for b in range(3) for c in [*LADDER, (60, 540, 0), (60, 0, 540)]],
}


def simulate(
    design: str, metric: str, worth: tuple[float, float], num: int, drift: float, seed: int = 0
) -> Any:
    """Tables with a known worth; with `drift` the exponent falls by a third along the ladder."""
    block, clean, *noisy = np.array(DESIGNS[design], float).T
    rng = np.random.default_rng(seed)
    size = np.log((clean + np.array(noisy).T @ worth) / 60)
    floor, amplitude, beta, scale, shared = (
        (2.95, 0.6, 0.7, 0.02, 0.6) if metric == "loss" else (8, 15, 1.2, 0.12, 0.3)
    )
    mean = floor + amplitude * np.exp(-beta * size * (1 - drift * size))
    blocks = rng.standard_normal((num, 3))[:, block.astype(int)]
    error = scale * (np.sqrt(shared) * blocks + np.sqrt(1 - shared) * rng.standard_normal((num, len(block))))
    values = mean + error if metric == "loss" else mean * np.exp(error)
    goal: Any = "looks" if metric == "fd" else "everything"
    return [
        Measured("toy", goal, metric, SIGMAS, block.astype(int), clean, np.array(noisy).T, value, 0 * value)
        for value in values
    ]


@pytest.mark.slow
def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """The long form, with more designs, is bench/pricing.py."""
    cells = {}
    for design in DESIGNS:
        for metric in ("loss", "fd"):
            for drift in (0.0, 0.08):
                worth = (0.03, 0.4) if drift else (0.1, 0.9)
                laws = fit_laws(simulate(design, metric, worth, 40, drift), relative=metric == "fd")
                _, low, high = np.moveaxis([interval(law.worth) for law in laws], 1, 0)
                for level, truth in enumerate(worth):
                    cells[design, metric, truth] = ((low[:, level] <= truth) & (truth <= high[:, level])).mean()
    assert 0.93 <= np.mean(list(cells.values())) <= 0.985 and min(cells.values()) >= 0.85, cells


def test_a_law_without_noise_is_found_exactly() -> None:
    (exact,) = simulate("three", "loss", (0.1, 0.4), 1, 0.0)
    block, clean, *noisy = np.array(DESIGNS["three"], float).T
    size = (clean + np.array(noisy).T @ (0.1, 0.4)) / 60
    rng = np.random.default_rng(1)
    value = 2.95 + 0.6 * size**-0.7 + 1e-4 * rng.standard_normal(len(size)) + 0.05 * block
    (law,) = fit_laws([replace(exact, value=value)])
    assert np.median(law.worth, 0) == pytest.approx([0.1, 0.4], rel=0.01)
    assert np.median(law.exponent) == pytest.approx(0.7, rel=0.02)
    assert law.scatter == pytest.approx(1e-4, rel=0.5) and (law.lack_of_fit or 0) > 0.001
    middle = np.median(law.values(law.size([200.0], [[100.0, 0.0]], SIGMAS)))
    assert middle == pytest.approx(2.95 + 0.6 * (210 / 60) ** -0.7 + 0.05, abs=2e-3)


def test_draws_are_those_of_the_density_where_worths_are_tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """24 clean and 2,000 noisy images, as of galaxies: against integration of the density on a grid."""
    problems = []

    def sample(self: Any, prior: Any, *options: Any) -> Any:
        problems.append((self, prior))
        return draw(self, prior, *options)

    draw = _Problem.sample
    monkeypatch.setattr(_Problem, "sample", sample)
    rng, clean = np.random.default_rng(0), np.tile([24.0, 41, 72, 120, 240, 24], 3)
    noisy = np.where(np.arange(18) % 6 == 5, 2000.0, 0.0)
    value = 0.9 + 5 * (clean + 0.008 * noisy) ** -0.8 + 0.02 * rng.standard_normal(18)
    blocks, error = np.arange(18) // 6, np.zeros(18)
    (found,) = fit_laws(
        [Measured("toy", "everything", "loss", np.array([0.2]), blocks, clean, noisy[:, None], value, error)]
    )
    (problem, prior), grid = problems[-1], np.r_[np.linspace(-0.008, 0, 40)[:-1], np.geomspace(1e-4, 1.3, 300)]
    theta = np.stack(np.meshgrid(np.log(0.7) + 0.7 * np.linspace(-4, 4, 81), grid, indexing="ij"), -1)
    density = problem.log_density(theta.reshape(1, -1, 2), prior).reshape(theta.shape[:2])
    mass = np.exp(density - density.max()).sum(0) * np.gradient(grid)
    exact = np.interp([0.05, 0.5, 0.95], np.cumsum(mass) / mass.sum(), grid)
    assert np.quantile(found.worth, [0.05, 0.5, 0.95]) == pytest.approx(exact, rel=0.15)


def test_a_law_that_does_not_hold_is_said() -> None:
    (table,) = simulate("three", "loss", (0.1, 0.4), 1, 0.0)
    bent = table.value + 0.3 * (table.num_clean == 180)
    assert fit_laws([table])[0].lack_of_fit > 0.01 > fit_laws([replace(table, value=bent)])[0].lack_of_fit  # type: ignore[operator]


@pytest.mark.parametrize(
    ("draws", "ends"),
    [
        ((0.2, 0.3), (0.2, 0.3)),
        ((-0.2, 0.1), (0.0, 0.1)),
        ((0.8, 1.25), (0.8, 1.0)),
        ((-0.3, -0.1), (0.0, 0.0)),
    ],
)
def test_intervals_stay_within_0_and_1(draws: tuple[float, float], ends: tuple[float, float]) -> None:
    middle, low, high = interval(np.linspace(*draws, 2001))
    assert (low, high) == pytest.approx(ends, abs=0.02) and low <= middle <= high


# Prices and their verdicts.


def a_price(worth: float, low: float, high: float, goal: Any = "structure", limited: float = 0.0) -> Price:
    (results,) = simulate("one", "fd", (0.5, 0.1), 1, 0.0)
    return Price(replace(results, goal=goal), a_law(), 0.3, worth, low, high, 0.95, limited=limited)


def a_law(worth: tuple[float, ...] = (0.5, 0.1), spread: float = 0.0, share: float = 0.0) -> Law:
    """A law that is known but for the worths, of 28 runs in 4 blocks."""
    rng, one = np.random.default_rng(0), np.ones(200)
    draws = np.clip(np.array(worth) + spread * rng.standard_normal((200, len(worth))), 0, 1)
    known = 0.0, 0.5, 1.0, 28, 4, True, (100.0, 1e6), np.full(len(worth), share)
    return Law(SIGMAS[: len(worth)], draws, 0.5 * one, 2 * one, 30 * one, *known)


@pytest.mark.parametrize(
    ("found", "verdict", "words"),
    [
        (a_price(0.3, 0.2, 0.5), "estimate", "3.33 (2 to 5)"),
        (a_price(0.03, 0.0, 0.1), "at least", "at least 10"),
        (a_price(0.5, 0.05, 1.0), "at most", "at most 20"),
        (a_price(0.3, 0.0, 0.9), "undecided", "undecided"),
        (a_price(0.0, 0.0, 0.0), "undecided", "undecided"),
        (a_price(0.3, 0.2, 0.5, limited=4.0), "undecided", "undecided"),
    ],
)
def test_verdicts_are_of_three_kinds(found: Price, verdict: str, words: str) -> None:
    assert found.verdict == verdict and amount(found) == words
    assert "undecided" not in sentence(found) or reason(found) in sentence(found)
    rate, low, high = found.rate
    assert 1 <= low <= rate <= high if found.tells else math.isnan(rate) and (low, high) == (1, math.inf)


def test_more_blocks_narrow_an_interval_by_their_root() -> None:
    wide = a_price(0.3, 0.1, 0.5)
    assert a_price(0.3, 0.25, 0.35).blocks_for(2) == 0
    assert wide.blocks_for(2) == 12 and wide.blocks_for(1.5) > wide.blocks_for(
        2
    )  # half as wide takes 4 times as many


def by_level(num_blocks: int = 4, noise: float = 0.004, late: bool = False, seed: int = 0) -> LevelResults:
    """A study in which the worth rises from 0 to 1 along the levels, around the noise."""
    configurations = [
        (60, 0, 0),
        (100, 0, 0),
        (180, 0, 0),
        (300, 0, 0),
        (600, 0, 0),
        (60, 540, 0),
        (60, 0, 540),
    ]
    rows = np.array([(b, *c) for b in range(num_blocks) for c in configurations], float)
    edges = np.geomspace(2 / 255, 80, 13)
    centre, rng = np.sqrt(edges[1:] * edges[:-1]), np.random.default_rng(seed)
    worth = 1 / (1 + (2 * SIGMAS[:, None] / centre) ** 2)
    size = rows[:, 1, None] + rows[:, 2:] @ worth
    loss = 0.2 + 0.05 * (size / 60) ** -0.6
    shared = rng.standard_normal((len(rows), 1))  # bands of a run share errors
    loss = loss + noise * (0.7 * shared + 0.7 * rng.standard_normal(loss.shape)) * 0.3
    if late:
        loss = 0.2 + noise * rng.standard_normal(loss.shape)
    last = np.full(len(rows), 1000)
    step = np.full(loss.shape, 1000 if late else 400)
    return LevelResults(
        "toy",
        "",
        SIGMAS,
        rows[:, 0].astype(int),
        rows[:, 1],
        rows[:, 2:],
        edges,
        loss,
        0 * loss,
        step,
        last,
        loss,
    )


def test_worth_curve_and_goals_from_results_by_level(tmp_path: Path) -> None:
    levels = by_level()
    write_levels(tmp_path / "levels.csv", [levels])
    prices = price(tmp_path / "levels.csv")
    for curve in prices.curves:
        truth = 1 / (1 + (2 * curve.sigma / curve.levels) ** 2)
        inside = (curve.low - 1e-3 <= truth) & (truth <= curve.high + 1e-3)
        assert inside.mean() >= 0.8 and np.abs(curve.worth - truth).mean() < 0.12
    structure, everything = prices.of("structure", 0.3), prices.of("everything", 0.3)
    assert prices.of("structure", 0.301) is structure  # as a level is printed
    assert structure.worth > 2 * everything.worth and structure.verdict == "estimate"
    assert len(price_lines(prices)) == 2 and price_panels(prices)[0].series


def test_training_as_the_limit_is_said() -> None:
    prices = price_results([], by_level(late=True))
    assert {found.verdict for found in prices.prices} == {"undecided"}
    assert "training, not data" in reason(prices.of("structure", 0.3))
    # Also where it is the limit in a few bands only, if the loss lies there: high levels have next to none.
    late = by_level(late=True)
    high = late.centres > 2
    late = replace(late, loss=np.where(high, 1e-3, 1) * late.loss, step=np.where(high, 300, late.step))
    assert {found.limited > 0 for found in price_results([], late).prices} == {True}
    # Not where such bands hold little of the loss.
    few = by_level()
    low = few.centres < 0.05
    stuck = replace(few, step=np.where(low, 1000, few.step), loss=np.where(low, late.loss * 0.01, few.loss))
    found = price_results([], stuck)
    assert all(curve.limited[low].all() and not curve.limited[~low].any() for curve in found.curves)
    assert {price.limited for price in found.prices} == {0.0}


def test_runs_that_are_best_at_their_last_step_are_told() -> None:
    levels = by_level()
    assert not price_results([], levels).of("structure").late and not training_limits(price_results([], levels))
    late = np.where(np.arange(len(levels.block))[:, None] % 7 < 5, 1000, levels.step)
    prices = price_results([], replace(levels, step=late))
    assert {round(price.late, 6) for price in prices.prices} == {round(5 / 7, 6)}
    assert {price.verdict for price in prices.goals["structure"]} == {"estimate"}
    (told,) = training_limits(prices)
    assert "best at their last step (structure: 71%, everything: 71%)" in told and told in price_lines(prices)
    assert {row["best_at_last_step"] for row in price_rows(prices)} == {prices.prices[0].late}


def test_levels_limited_by_training_are_in_the_rows() -> None:
    late = by_level(late=True)
    fine = late.centres < 0.05
    prices = price_results([], replace(late, step=np.where(fine, late.step, 300)))
    rows = price_rows(prices)
    told = {level for row in rows for level in row["levels_limited_by_training"]}
    assert told and told <= set(late.centres[fine])
    words = training_limits(prices)[0].removesuffix(".").split(": ")[1].split(", ")
    assert words == [f"{level:.2g}" for level in sorted(told)]
    assert not any(row["levels_limited_by_training"] for row in price_rows(price_results([], by_level())))


def test_a_ladder_without_slope_prices_nothing() -> None:
    flat = replace(a_price(0.03, 0.0, 0.1), law=replace(a_law(), gain=0.94))
    assert flat.verdict == "undecided" and "more clean images" in reason(flat)
    assert replace(flat, confidence=0.9).verdict == "at least"


# Tables.


def columns(**more: Any) -> dict[str, Any]:
    (table,) = simulate("three", "fd", (0.1, 0.4), 1, 0.0)
    noise = [0.1 if a else 0.3 if b else None for a, b in table.num_noisy]
    return {
        "n_clean": table.num_clean,
        "n_noisy": table.num_noisy.sum(1),
        "noise": noise,
        "fid": table.value,
    } | more


def test_columns_files_and_usual_names_give_one_price(tmp_path: Path) -> None:
    given = columns(block=[row[0] for row in DESIGNS["three"]])
    found = price(given)
    lines = [
        ",".join(given),
        *(",".join("" if v is None else str(v) for v in row) for row in zip(*given.values(), strict=True)),
    ]
    (tmp_path / "mine.csv").write_text("\n".join(lines) + "\n")
    assert price(tmp_path / "mine.csv").of("looks", 0.3).rate == pytest.approx(found.of("looks", 0.3).rate)
    assert found.of("looks", 0.1).law.num_blocks == 3


def test_all_missing_columns_are_named_at_once() -> None:
    with pytest.raises(AssayError) as caught:
        price({"a": [1.0], "sigma": [0.1]})
    assert all(name in caught.value.what for name in ("fd", "num_clean", "num_noisy"))
    assert caught.value.path == "the table"
    with rejected(None, "the table"):
        price(columns() | {"noise": [0.1]})
    with rejected("confidence"):
        price(columns(), confidence=95)


def test_a_slip_in_the_table_is_named() -> None:
    given = columns(block=[row[0] for row in DESIGNS["three"]])
    given["fid"] = [10 * value if i == 3 else value for i, value in enumerate(given["fid"])]
    prices = price(given)
    found, (value, clean) = prices.prices[0], (given["fid"][3], given["n_clean"][3])
    assert {each.verdict for each in prices.prices} == {"undecided"}
    assert f"FID of {value:.4g} with {clean:,.0f} clean is far from" in reason(found)
    # No law, no fit and no plan until it is resolved; the reason once.
    assert headline(prices).count(reason(found)) == 1 and repr(prices).count(reason(found)) == 1
    assert not doubts(prices) and {each.kind for each in price_panels(prices)[0].series} == {"points"}
    assert all(math.isnan(row["worth"]) and math.isnan(row["lack_of_fit"]) for row in price_rows(prices))
    with rejected("table"):
        plan(prices, [Vendor(price=1.0), Vendor(sigma=0.1, price=0.1)], budget=500)


def test_the_row_that_fits_least_is_named() -> None:
    (table,) = simulate("three", "fd", (0.4, 0.1), 1, 0.0)
    smooth = (8 + 15 * (table.num_clean + table.num_noisy @ (0.4, 0.1)) ** -0.7) * (1 + 1e-4 * table.block)
    given = {"n_clean": table.num_clean, "n_noisy": table.num_noisy.sum(1), "block": table.block}
    given["noise"] = [0.1 if a else 0.3 if b else None for a, b in table.num_noisy]
    given["fid"] = smooth * np.where(table.num_clean == 180, 1.02, 1 + 1e-4 * np.sin(np.arange(len(smooth))))
    prices = price(given)
    assert (prices.of("looks").law.lack_of_fit or 1) < 0.01
    (said,) = cautions(prices.goals["looks"])
    assert "does not fit" in said and "with 180 clean is far from it" in said and said in doubts(prices)[0]


def test_a_level_typed_wrong_is_asked_about() -> None:
    """Noise of 0.1 typed as 1: worth falls with noise, so it cannot be worth more than 0.3."""
    (table,) = simulate("three", "fd", (0.5, 0.1), 1, 0.0)
    given = {"n_clean": table.num_clean, "n_noisy": table.num_noisy.sum(1), "fid": table.value}
    given["block"] = table.block
    for low, asks in ((0.1, False), (1.0, True)):
        given["noise"] = [low if a else 0.3 if b else None for a, b in table.num_noisy]
        found = price(given)
        offers = [Vendor(price=1.0), Vendor(sigma=0.3, price=0.1)]
        notes = price_rows(found)[0]["notes"], plan(found, offers, budget=500).notes, price_lines(found)
        for said in notes:
            assert ("at noise 1, but" in " ".join(said) and "at noise 0.3" in " ".join(said)) == asks
            assert any("typed right?" in each for each in said) == asks


@pytest.mark.parametrize("table", [PAPER, *sorted(Path(__file__).parents[1].glob("studies/*/levels.csv"))])
def test_no_level_of_ours_is_asked_about(table: Path) -> None:
    assert not [said for each in price_all(table) for said in price_lines(each) if "typed right" in said]


def test_the_headline_says_each_thing_once() -> None:
    assert headline(price(columns())).count("For how samples look") == 1


def test_too_few_results_say_what_to_add() -> None:
    with pytest.raises(AssayError) as caught:
        price({"num_clean": [10, 10], "num_noisy": [0, 90], "sigma": [None, 0.1], "fd": [3, 2]})
    assert caught.value.key == "table" and caught.value.cure


# The paper.


def test_pairs_of_the_papers_table_give_its_boxes() -> None:
    tables = {each.dataset: pair_bounds(each.of("looks").results) for each in price_all(PAPER)}
    for (dataset, sigma), box in PAPER_BOXES.items():
        low, high = (1 / end for end in reversed(tables[dataset][sigma]))
        expected = {0.1: (1.75, 2.25), 0.2: (3.5, 4.5)}.get(sigma, box) if dataset == "cifar10" else box
        assert (low, high) == pytest.approx(expected, abs=0.005)


def test_figure_1_has_all_results_of_the_table_noisy_images_alone_included() -> None:
    (panel,) = price_panels(price(PAPER, "cifar10"))
    points = {series.name: dict(zip(series.x, series.y, strict=True)) for series in panel.series if series.name}
    assert {round(x) for x in points["noise 0.2"]} == {10, 30, 50, 70, 90, 100}
    assert points["noise 0.2"][100.0] == 60.73 and points["clean only"][0.0] == 1.99


def test_price_of_the_paper_on_the_command_line(tmp_path: Path) -> None:
    said = run("price", "--paper", "--plot", tmp_path / "paper.png")
    assert sum(line.startswith(("cifar10", "celeba_hq", "imagenet")) for line in said.splitlines()) == 3
    rows = json.loads(run("price", "--paper", "--json"))
    assert len(rows) == 9 and all(row["rate_low"] <= row["rate"] for row in rows)
    assert [_ends(4, 4), _ends(3, 4), _ends(3, math.inf)] == ["about 4", "3 to 4", "3 or more"]
    details = run("price", "--paper", "--details", "--dataset", "cifar10")
    assert "not in the fit" in details and "paper's box" in details


def test_quote_on_the_command_line(tmp_path: Path) -> None:
    images = np.random.default_rng(0).standard_normal((100, 8, 8)).cumsum(1) / 8
    np.save(tmp_path / "clean.npy", images)
    assert len(run("price", tmp_path / "clean.npy", "--noise", 0.2).splitlines()) == 4
    (structure, _) = json.loads(run("price", tmp_path / "clean.npy", "--noise", 0.2, "--json"))
    assert structure["worth"] == pytest.approx(assay.quote(images, 0.2).goal("structure", 0.2)[0])
    # Without a level: those of the store's own images, of which three stand for many.
    levels = np.repeat([0.0, *np.geomspace(0.1, 0.4, 9)], [64, *[4] * 9])
    stored(tmp_path / "store", images[:, None], levels)
    rows = json.loads(run("price", tmp_path / "store", "--json"))
    assert [row["sigma"] for row in rows[::2]] == [0.119, 0.2, 0.336]
    for path in (tmp_path / "clean.npy", stored(tmp_path / "clean", images[:, None]).path):
        assert (failing("price", path).key, failing("price", path).path) == ("noise", str(path))


# Plans.


def known(worth: tuple[float, ...] = (0.5, 0.1), spread: float = 0.0, share: float = 0.0) -> Prices:
    """Prices by a law that is known but for the worths."""
    price = replace(a_price(worth[0], 0.3, 0.7, "looks"), law=a_law(worth, spread, share), sigma=0.1)
    return Prices("toy", (price,))


def test_plan_buys_the_most_effective_images_per_money() -> None:
    offers = [Vendor(price=1.0), Vendor(sigma=0.1, price=0.2), Vendor(sigma=0.3, price=0.08)]
    best = plan(known(), offers, budget=1000).mixes[0]
    assert best.counts == pytest.approx((0, 5000, 0)) and best.cost == pytest.approx(1000)
    assert best.value == pytest.approx(2 + 30 * 2500**-0.5)
    limited = [offers[0], Vendor(sigma=0.1, price=0.2, max_images=2000), offers[2]]
    assert plan(known(), limited, budget=1000).mixes[0].counts == pytest.approx((0, 2000, 7500))
    least = [offers[0], Vendor(sigma=0.1, price=0.2, min_images=6000), offers[2]]
    assert plan(known(), least, budget=1000).mixes[0].counts == pytest.approx((0, 0, 12500))


@given(
    st.lists(st.tuples(st.floats(0.02, 2), st.floats(1e-3, 1), st.integers(0, 900), st.integers(0, 9000)),
             min_size=1, max_size=4),
    st.floats(50, 5000), st.just(0.0) | st.floats(1e-3, 0.3), st.integers(0, 500),
)  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_no_mix_has_more_effective_images_than_the_plan(
    noisy: list[tuple[float, float, int, int]], budget: float, share: float, have: int
) -> None:
    offers = [Vendor(price=1.0)]
    offers += [
        Vendor(name=str(i), sigma=0.1, price=price * worth, min_images=least, max_images=least + more)
        for i, (price, worth, least, more) in enumerate(noisy)
    ]
    prices = known((0.5, 0.1), share=share)
    best = plan(prices, offers, budget=budget, have_clean=have).mixes[0]
    rng, unit = np.random.default_rng(0), np.array([1.0] + [0.5] * len(noisy))
    cost, least, most = np.array([(o.price, o.min_images, min(o.max_images, 1e9)) for o in offers]).T
    spent = rng.dirichlet(np.full(len(offers), 0.3), 4000) * budget * rng.random((4000, 1)) ** 0.2
    counts = np.minimum(np.floor(spent / cost), most)
    counts[counts < least] = 0
    allowed = have + counts[:, 0] >= share * (have + counts.sum(1))
    assert np.dot(best.counts, unit) >= (counts[allowed] @ unit).max(initial=0) - len(offers)  # whole images


def test_plan_of_one_offer_and_of_the_same_twice() -> None:
    found = plan(known(), [Vendor(price=2.0)], budget=1000)
    assert found.mixes[0].counts == (500,) and not found.notes
    (note,) = plan(known(), [Vendor(price=2.0)], budget=100).notes
    assert "counts as 50 clean images, and measured were 100 to 1,000,000" in note
    dear = [Vendor(price=2.0), Vendor(sigma=0.2, price=20.0), Vendor(sigma=0.2, price=0.2, name="lab")]
    between, odd = plan(known(), dear, budget=1000).notes[-2:]
    assert "no result has noise 0.2" in between and "noisy at 0.2 costs 20, a clean image 2: are both" in odd
    thousand = [Vendor(price=1000.0), Vendor(sigma=0.1, price=0.5)]  # a thousand clean images
    assert (
        "noisy at 0.1 costs 0.5, a clean image 1000: are both" in plan(known(), thousand, budget=1e4).notes[-1]
    )
    fair = [Vendor(price=400.0), Vendor(sigma=0.1, price=0.5)]
    assert not any("per image" in note for note in plan(known(), fair, budget=1e4).notes)
    with rejected("budget"):
        plan(known(), [Vendor(price=2.0, min_images=300)], budget=500)
    shared = [Vendor(price=2.0, min_images=300), Vendor(sigma=0.1, price=0.1)]
    error = fault(lambda: plan(known(share=0.1), shared, budget=500))
    assert error.key == "budget" and "300 clean for 600.00" in error.what
    alone = fault(lambda: plan(known(share=0.1), shared[1:], budget=500))
    assert alone.key == "vendors" and "have_clean" in (alone.cure or "")
    assert plan(known(share=0.1), shared[1:], budget=500, have_clean=100).mixes[0].counts == (900,)
    with pytest.raises(AssayError, match="offered twice"):
        plan(known(), [Vendor(price=2.0)] * 2, budget=1000)
    found = plan(known(), [Vendor(price=2.0, max_images=100), Vendor(price=3.0)], budget=1100)
    assert found.names == ("clean at 2 each", "clean at 3 each") and found.mixes[0].counts == (100, 300)
    large = [Vendor(price=1.0), Vendor(sigma=0.1, price=0.2, min_images=6000)]
    assert (
        "smallest order of noisy at 0.1 costs 1,200.00, more than"
        in plan(known(), large, budget=1000).notes[-1]
    )


def test_images_come_from_the_cheapest_offer_of_their_level() -> None:
    """An offer whose smallest order happens to be wanted must not replace a cheaper one of the same images."""
    offers = [Vendor(price=1.0, max_images=6000), Vendor(sigma=0.1, price=0.4, min_images=500, max_images=8000)]
    offers += [Vendor(sigma=0.3, price=0.15, min_images=1000, max_images=60000)]
    dear = Vendor(name="Lab", price=1.2, min_images=100, max_images=20000)
    digits = load_digits().images[:300] / 8 - 1
    for by in (quote(digits, [0.1, 0.3]), known(share=0.05)):
        for asked in ({"budget": 2000.0}, {"target": plan(by, offers, budget=2000).mixes[0].value}):
            found = [plan(by, some, **asked).mixes[0] for some in (offers, [*offers, dear])]
            assert found[1].counts[3] == 0 and found[1].value <= found[0].value * (1 + 1e-3)


@pytest.mark.parametrize("column", ["fd", "num_clean"])
def test_mixes_that_are_worse_than_their_clean_images_are_asked_about(column: str) -> None:
    rng, rows = np.random.default_rng(0), []
    for seed in range(3):
        for clean, noisy in [(200, 0), (400, 0), (800, 0), (2000, 0), (200, 1800), (400, 1600), (800, 1200)]:
            fd = (3 + 60 * (clean + 0.5 * noisy) ** -0.4) * np.exp(0.01 * rng.standard_normal())
            rows.append({"num_clean": clean, "num_noisy": noisy, "sigma": 0.1, "fd": fd, "seed": seed})
    table = {name: np.array([row[name] for row in rows], float) for name in rows[0]}
    assert not cautions(price(table).prices)
    mixed = table["num_noisy"] > 0
    table[column][mixed] += 9 * table["fd"][mixed] if column == "fd" else table["num_noisy"][mixed]
    (said,) = cautions(price(table).prices)
    assert "most mixes are worse than their clean images alone" in said


def test_the_smallest_share_is_that_of_the_levels_for_sale() -> None:
    law = replace(a_law(), shares=np.array([0.2, 0.02]))
    by = Prices("toy", (replace(known().prices[0], law=law),))
    offers = [Vendor(price=1.0), Vendor(sigma=SIGMAS[0], price=0.1), Vendor(sigma=SIGMAS[1], price=0.1)]
    for some, share in ((offers[:2], 0.2), (offers[::2], 0.02), (offers, 0.02)):
        counts = plan(by, some, budget=1000).mixes[0].counts
        assert counts[0] / sum(counts) == pytest.approx(share, rel=0.01)


def test_worth_between_measured_levels_is_that_of_a_mode_and_as_vague_as_curves_bend() -> None:
    """w = s^2 / (s^2 + sigma^2) is found at the middle of the draws; measured levels stay as they are."""
    one_mode = 0.04 / (0.04 + np.square(SIGMAS))
    law = a_law(tuple(one_mode))
    at = np.sqrt(SIGMAS[0] * SIGMAS[1]), SIGMAS[0], SIGMAS[1], 0.0
    between, *measured = law.worth_at(at).T
    assert [each.tolist() for each in measured] == [[w] * 200 for w in (*one_mode, 1.0)]
    assert np.median(between) == pytest.approx(0.04 / (0.04 + at[0] ** 2), rel=0.03)
    low, high = np.quantile(between, [0.025, 0.975])
    part = (np.log(each / (1 - each)) for each in (low, high, *one_mode))
    low, high, first, last = part
    assert 0.65 < (low - first) / (last - first) < 0.75 and 0.25 < (high - first) / (last - first) < 0.35


def test_a_plan_tells_what_it_takes_a_level_between_for() -> None:
    offers = [Vendor(price=2.0), Vendor(sigma=0.2, price=0.2), Vendor(sigma=0.3, price=0.1)]
    found = plan(known(), offers, budget=1000)
    (note,) = (note for note in found.notes if "no result has noise 0.2" in note)
    rate, low, high = map(float, re.findall(r"about ([\d.]+) \(([\d.]+) to ([\d.]+)\)", note)[0])
    assert 2 < low < rate < high < 10
    assert all(mix.low < mix.value < mix.high for mix in found.mixes if mix.counts[1])
    assert sum(mix.chance for mix in found.mixes) == pytest.approx(1)
    capped = [Vendor(price=2.0, max_images=100)]
    assert "800.00 of the budget are left" in plan(known(), capped, budget=1000).notes[-1]


def test_a_plan_by_a_quote_says_what_a_quote_does_not_know() -> None:
    x = np.random.default_rng(0).uniform(-1, 1, (40, 6, 6)).cumsum(1).cumsum(2) / 9
    quoted = quote(assay.from_arrays(x), 0.2)
    offers = [Vendor(price=1.0), Vendor(sigma=0.2, price=0.1)]
    found = plan(quoted, offers, budget=1000)
    assert ["run a study" in note for note in found.notes] == [True]
    alone = plan(quoted, offers[:1], budget=1000)
    assert " to " not in repr(alone).splitlines()[1]  # its result is not what is uncertain
    other = plan(quoted, [*offers, Vendor(sigma=0.1, price=0.1)], budget=1000)
    assert "noise 0.1 is offered, and 0.2 was quoted" in str(other.notes)
    with rejected("goal"):
        plan(quoted, offers, budget=1000, goal="looks")


def test_plan_stays_within_measured_shares_and_says_so() -> None:
    offers = [Vendor(price=1.0), Vendor(sigma=0.1, price=0.2)]
    found = plan(known(share=0.1), offers, budget=1000)
    clean, noisy = found.mixes[0].counts
    assert clean >= 0.0999 * (clean + noisy) and clean < 0.15 * (clean + noisy)
    assert any("share" in note for note in found.notes)


def test_plan_says_how_sure_the_mix_is() -> None:
    offers = [Vendor(price=1.0), Vendor(sigma=0.1, price=0.45)]
    found = plan(known(spread=0.15), offers, budget=1000)
    assert len(found.mixes) == 2 and sum(mix.chance for mix in found.mixes) == pytest.approx(1)
    assert 0.5 < found.mixes[0].chance < 0.9
    assert found.count_intervals == ((0, 1000), (0, 2222))
    said = repr(found)
    assert (
        f"the very best in {found.mixes[0].chance:.0%} of the likely cases, but within {found.close:.2g}"
        in said
    )
    best, other = found.mixes
    rare = repr(replace(found, mixes=(replace(best, chance=0.0), replace(other, chance=0.2))))
    assert "best in few of" in rare and "best in 20% of" in rare and "In 80% of them, other" in rare
    assert " 0% of" not in rare


def test_a_plan_is_for_the_goal_that_prices_lead_with_and_names_it() -> None:
    prices = price_results([], by_level())
    clean, low, high = Vendor(price=1.0), Vendor(sigma=0.1, price=0.05), Vendor(sigma=0.3, price=0.05)
    found = plan(prices, [clean, low, high], budget=200)
    assert (found.goal, found.metric) == ("structure", prices.of("structure", 0.3).results.metric)
    assert "For structure" in repr(found) and plan_rows(found)[0]["goal"] == "structure"
    # Structure is what lies above the noise that is for sale.
    assert plan(prices, [clean, low], budget=200).metric == prices.of("structure", 0.1).results.metric
    other = plan(prices, [clean, low], budget=200, goal="everything")
    assert other.goal == "everything" and "For everything" in repr(other)
    open_ones = [replace(each, limited=4.0) if each.goal == "structure" else each for each in prices.prices]
    undecided = replace(prices, prices=tuple(open_ones))
    assert plan(undecided, [clean, low], budget=200).goal == "everything"


@given(
    st.lists(st.floats(0.01, 900), min_size=1, max_size=3, unique=True), st.floats(1, 1e5), st.integers(0, 500)
)
@settings(deadline=None, max_examples=40)
def test_plans_buy_whole_images_within_the_budget(prices: list[float], budget: float, most: int) -> None:
    offers = [Vendor(sigma=0.1 * i, price=each, max_images=most if i else 1e9) for i, each in enumerate(prices)]
    try:
        found = plan(known(share=0.05), offers, budget=budget)
    except AssayError as error:
        assert error.key == "budget" and budget < sum(prices)
        return
    for mix in found.mixes:
        assert all(n == round(n) and n <= offer.max_images for n, offer in zip(mix.counts, offers, strict=True))
        assert mix.cost == pytest.approx(np.dot(mix.counts, prices)) and mix.cost <= budget * (1 + 1e-6)
        assert sum(mix.counts) > 0 and mix.counts[0] >= 0.0499 * sum(mix.counts)


def test_cheapest_plan_reaches_its_target() -> None:
    offers = [Vendor(price=1.0), Vendor(sigma=0.1, price=0.2)]
    found = plan(known(), offers, target=3.0)
    assert found.mixes[0].value <= 3.0 and found.mixes[0].cost == pytest.approx(900 / 0.5 * 0.2, rel=1e-3)
    close = [Vendor(price=1.0), Vendor(sigma=0.1, price=0.5)]  # each of two is best about half of the time
    unsure = plan(known(spread=0.15), close, target=3.0)
    assert all(mix.value <= 3.0 for mix in unsure.mixes)
    bought = plan(known(spread=0.15), close, budget=unsure.mixes[0].cost)
    assert max(mix.value for mix in bought.mixes) > 3.0  # these would miss it
    assert unsure.mixes[0].chance == max(mix.chance for mix in unsure.mixes)  # of a tie, the likelier leads
    clean, noisy = unsure.mixes  # 900 clean images, which are sure, or noisy ones that may be worth more
    assert sorted([clean.counts, noisy.counts])[1] == (900, 0) and clean.chance + noisy.chance == pytest.approx(
        1
    )
    assert unsure.sure is not None and unsure.sure.counts == (900, 0) and unsure.sure.reached == 1
    assert 500 < unsure.cost_interval[0] < 750 and unsure.cost_interval[1] == pytest.approx(900, rel=0.02)
    only = plan(known(spread=0.15), close[1:], target=3.0)
    assert only.mixes[0].reached == pytest.approx(0.5, abs=0.02) and only.sure and only.sure.reached >= 0.95
    assert only.sure.cost > 1.5 * only.mixes[0].cost and plan_rows(only)[-1]["cost"] == only.sure.cost
    assert f"reached in {only.mixes[0].reached:.0%}" in repr(only) and "To be" not in repr(only)
    unreached = plan(
        known((0.1, 0.1), spread=0.1), [Vendor(sigma=0.1, price=1.0)], target=3.0
    )  # may be worth 0
    assert unreached.sure is None and "no mix is 95% sure" in repr(unreached)
    assert math.isinf(unreached.cost_interval[1]) and "or more (95%)" in repr(unreached)
    with pytest.raises(AssayError) as caught:
        plan(known(), offers, target=1.0)
    assert caught.value.key == "target"
    with rejected("target"):
        plan(known(), offers, target=3.0, have_clean=901)
    for key, wrong in {"budget": {"budget": -1}, "have_clean": {"budget": 9, "have_clean": 0.5}}.items():
        with rejected(key):
            plan(known(), offers, **wrong)
    with rejected("vendors"):
        plan(known(), 100, offers)  # type: ignore[arg-type]


def test_intervals_of_the_cheapest_mix_hold_it_as_often_as_they_say() -> None:
    """Worths are known up to errors as large as their likely ones."""
    offers = [Vendor(price=1.0, max_images=300), Vendor(sigma=0.1, price=0.3), Vendor(sigma=0.3, price=0.15)]
    rng, held = np.random.default_rng(1), []
    for _ in range(24):
        truth = rng.uniform((0.4, 0.2), (0.6, 0.3))
        found = plan(known(tuple(truth + 0.04 * rng.standard_normal(2)), spread=0.04), offers, target=3.0)
        best = plan(known(tuple(truth)), offers, target=3.0).mixes[0]
        held.append(
            [
                low - 2 <= n <= high + 2
                for n, (low, high) in zip(best.counts, found.count_intervals, strict=True)
            ]
        )
        held[-1].append(0.98 * found.cost_interval[0] <= best.cost <= found.cost_interval[1])
    assert (np.mean(held, 0) >= 0.88).all()


def test_plan_from_a_quote_needs_some_clean_images_for_detail(tmp_path: Path) -> None:
    images = np.random.default_rng(0).standard_normal((300, 6, 6)).cumsum(1).cumsum(2) / 12
    quoted = quote(images, [0.3])
    (tmp_path / "vendors.csv").write_text("name,sigma,price,max_images\nstudio,,1,\nphone,0.3,0.02,\n")
    found = plan(quoted, tmp_path / "vendors.csv", budget=1000, goal="everything")
    clean, noisy = found.mixes[0].counts
    assert clean > 100 and found.names == ("clean from studio", "noisy at 0.3 from phone")
    offers = [Vendor(price=1.0), Vendor(sigma=0.3, price=0.02)]
    structure = plan(quoted, offers, budget=1000)
    assert structure.goal == "structure" and structure.mixes[0].counts[1] > noisy
    assert plan(quoted, offers[:1], budget=1000).mixes[0].counts == (1000,)
    with rejected("goal"):
        plan(quoted, offers, budget=1000, goal="looks")


@pytest.mark.parametrize(
    "text",
    [
        "name,sigma\na,0.1\n",
        "name,sigma,price\na,-1,1\n",
        "name,sigma,price\na,x,1\n",
        "sigma,price,min_images,max_images\n0.1,1,9,8\n",
        "sigma,price\n0,4,0,2\n",
        "name,price\nlab,4\n",
    ],
)
def test_vendor_files_that_cannot_be_used(tmp_path: Path, text: str) -> None:
    (tmp_path / "vendors.csv").write_text(text)
    with pytest.raises(AssayError) as caught:
        plan(known(), tmp_path / "vendors.csv", budget=10)
    assert str(caught.value.path).startswith(str(tmp_path / "vendors.csv"))


def test_plan_on_the_command_line() -> None:
    asked = "--budget", 10000, "--vendors", 1, "--vendors", "0.2@0.1", "--vendors", "0.05@0.2"
    said = run("plan", "--paper", *asked)
    assert "Buy" in said and said.startswith("For how samples look, by the paper's results of cifar10:")
    assert failing("plan", *asked).key == failing("price").key == "source"
    assert failing("plan", "--vendors", "cheap", "--budget", 1).key == "vendors"
    missing = failing("plan", "--budget", 100)
    assert missing.key == "vendors" and "vendors = 0.2@0.1" in str(missing.cure)


def test_a_plan_from_images_is_by_a_quote(tmp_path: Path) -> None:
    np.save(tmp_path / "clean.npy", load_digits().images[:400] / 8 - 1)
    asked = "--budget", 100, "--vendors", 1, "--vendors", "0.2@0.3"
    said = run("plan", tmp_path / "clean.npy", *asked)
    assert said.startswith("For structure") and "by a quote" in said


def test_a_table_of_ones_own_is_read_as_it_was_meant(tmp_path: Path) -> None:
    rng, rows = np.random.default_rng(1), ["n_clean,n_noisy,noise,fid"]
    for clean, noisy in [(1000, 0), (2000, 0), (4000, 0), (8000, 0), (1000, 4000), (1000, 9000)]:
        size = clean + noisy / 4
        rows += [
            f"{clean},{noisy},{0.2 if noisy else ''},{5 + 900 / size**0.5 + rng.normal(0, 0.1):.4f}"
            for _ in "abc"
        ]
    (tmp_path / "results.csv").write_text("\n".join(rows) + "\n")
    told = run("study", "report", tmp_path / "results.csv", "-o", tmp_path / "report")
    mean = statistics.fmean(float(row.split(",")[-1]) for row in rows[1:4])
    assert f"{mean:.2f} ± " in told  # all three repeats, though no column numbers them
    prices = price(tmp_path / "results.csv")
    assert (
        prices.of("looks").law.num_blocks == 3
        and not prices.of("looks").rate[1] > 4 > prices.of("looks").rate[2]
    )
    (panel,) = price_panels(prices)
    points = {each.name: each.x for each in panel.series if each.kind == "points"}
    assert points["with noise 0.2"].max() == pytest.approx(1000 + 9000 / 4, rel=0.05)
    wrong = [*rows[:5], rows[5].rsplit(",", 1)[0] + ",250", *rows[6:]]  # one of three repeats, typed wrong
    (tmp_path / "results.csv").write_text("\n".join(wrong) + "\n")
    offers = [Vendor(price=1.0), Vendor(sigma=0.2, price=0.1)]
    error = fault(lambda: plan(tmp_path / "results.csv", offers, budget=4000))
    for said in (repr(price(tmp_path / "results.csv")), error.what):
        assert "FID of 250 with 2,000 clean" in said and "suggest about 25" in said


def test_a_result_that_a_repeat_confirms_is_no_slip() -> None:
    """A configuration may scatter more than others: two of its four runs are far from the law."""
    sizes = np.repeat([100, 200, 400, 800, 1600], 4)
    value, at = 2 + 60 * sizes**-0.5, np.flatnonzero(sizes == 200)
    value *= np.exp(0.005 * np.random.default_rng(0).standard_normal(len(sizes)))
    for lower, is_slip in (([0.6], True), ([0.6, 0.7], False)):
        found = value.copy()
        found[at[: len(lower)]] *= lower
        table = {"n_clean": sizes, "n_noisy": 0 * sizes, "noise": 0.0 * sizes, "fid": found}
        rows = np.array([[*row] for row in zip(*table.values(), strict=True)] + [[100, 700, 0.2, 2 + 60 / 21]])
        prices = assay.price(dict(zip(table, rows.T, strict=True)))
        assert prices.of("looks").has_slip == is_slip


def test_one_wrong_result_is_named_without_repeats(tmp_path: Path) -> None:
    """A slip of the decimal point bends the law itself; columns may have plain names."""
    rng, rows = np.random.default_rng(3), []
    mixes = ((500, 4500), (1000, 9000), (2000, 8000))
    for clean, noisy in (*((size, 0) for size in (500, 1000, 2000, 4000, 8000)), *mixes):
        fid = (2 + 900 * (clean + noisy / 4) ** -0.6) * np.exp(0.03 * rng.normal())
        rows.append(f"{clean},{noisy},{0.2 if noisy else ''},{fid:.4g}")
    header = "Clean images,Noisy images,Noise level,FID"
    few, many, sigma, result = rows[6].split(",")
    for wrong, words in (
        (f"{few},{many},{sigma},{float(result) * 10:.4g}", "1,000 clean + 9,000 noisy at 0.2"),
        (f"2000,0,,{float(rows[2].split(',')[3]) * 1.7:.4g}", "2,000 clean is far"),
    ):
        at = 6 if "9,000" in words else 2
        table = tmp_path / "results.csv"
        table.write_text("\n".join([header, *rows[:at], wrong, *rows[at + 1 :]]) + "\n")
        said = repr(price(table))
        assert words in said and "is it right?" in said
    table.write_text("\n".join([header, *rows]) + "\n")
    assert "is it right?" not in repr(price(table))
    found = plan(table, [Vendor(price=1.0), Vendor(sigma=0.2, price=0.1)], budget=4000)
    assert [row["decided"] for row in plan_rows(found)] == [True] * len(found.mixes)
    assert plan_rows(found)[0]["notes"] == list(found.notes)
