"""Partition, median of means, nets, linear programme and both searches."""

import heapq
import math

import numpy as np
import pytest

from assay.mixture import search
from assay.mixture.distance import wasserstein, wasserstein_line
from assay.mixture.moments import Atoms, denoised_moments
from assay.mixture.samples import simulate
from tests.errors import rejected


def greedy(alpha: np.ndarray, num_groups: int) -> np.ndarray:
    """Algorithm "Partition Mass", word for word: each sample to the lightest group so far."""
    heap = [(0.0, group) for group in range(num_groups)]
    groups = []
    for value in alpha:
        mass, group = heapq.heappop(heap)
        groups.append(group)
        heapq.heappush(heap, (mass + value, group))
    return np.array(groups)


def test_partition_keeps_the_lemma_on_ten_thousand_weight_vectors() -> None:
    rng = np.random.default_rng(0)
    checked = 0
    while checked < 10_000:
        num_groups = int(rng.integers(1, 12))
        size = int(rng.integers(4 * num_groups, 40 * num_groups))
        alpha = rng.uniform(0, 1, size) ** rng.uniform(0, 6)
        if rng.random() < 0.3:
            alpha = rng.choice([1.0, rng.uniform()], size)
        if alpha.max() > alpha.sum() / (4 * num_groups):
            continue  # the lemma does not speak of these
        mass = np.bincount(search.partition_mass(alpha, num_groups), alpha, num_groups)
        assert mass.min() >= alpha.sum() / (2 * num_groups)
        assert mass.max() - mass.min() <= alpha.max() * (1 + 1e-9)
        if checked % 20 == 0:
            paper = np.bincount(greedy(alpha, num_groups), alpha, num_groups)
            assert paper.min() >= alpha.sum() / (2 * num_groups)
        checked += 1


def test_selection_ignores_a_minority_of_wild_groups() -> None:
    rng = np.random.default_rng(0)
    atoms = np.tile([-0.5, 0.5], (10, 3, 1)) + 0.01 * rng.normal(size=(10, 3, 2))
    weights = np.full((10, 3, 2), 0.5)
    atoms[[0, 4, 9, 7]] = rng.uniform(-1, 1, (4, 3, 2)) * 30
    chosen = search.select_group(atoms, weights)
    distance = wasserstein_line(atoms[chosen, np.arange(3)], weights[0], np.array([-0.5, 0.5]), np.full(2, 0.5))
    assert chosen.shape == (3,) and (distance < 0.05).all()
    assert search.select_group(atoms[:1], weights[:1]).tolist() == [0, 0, 0]


@pytest.mark.parametrize("num_dims, radius", [(2, 0.05), (3, 0.1), (4, 0.3)])
def test_net_covers_the_sphere(num_dims: int, radius: float) -> None:
    rng = np.random.default_rng(num_dims)
    net = search.sphere_net(num_dims, radius)
    points = rng.normal(size=(2000, num_dims))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    both = np.concatenate([net, -net])
    assert (np.linalg.norm(points[:, None] - both, axis=-1).min(1) <= radius).all()
    for axis in np.eye(num_dims):
        assert np.linalg.norm(net - axis, axis=1).min() < 1e-12


def test_simplex_net_has_every_multiple() -> None:
    net = search.simplex_net(3, 0.25)
    assert len(net) == math.comb(4 + 2, 2) == len(np.unique(net, axis=0))
    np.testing.assert_allclose(net.sum(1), 1)
    rng = np.random.default_rng(0)
    for point in rng.dirichlet(np.ones(3), 200):
        assert np.abs(net - point).sum(1).min() <= 2 * 0.25


def test_linear_programme_finds_the_best_weights() -> None:
    """Against a fine scan of the only free weight of two atoms, and exactly on consistent marginals."""
    rng = np.random.default_rng(1)
    candidates, directions = rng.normal(size=(2, 3)), rng.normal(size=(5, 3))
    marginals = rng.normal(size=(5, 4)), rng.dirichlet(np.ones(4), 5)
    found = search.linear_weights(candidates, directions, marginals)
    scan = np.linspace(0, 1, 2001)
    options = np.stack([scan, 1 - scan], 1)
    worst = search.worst_marginal(candidates, options, directions, marginals)
    assert search.worst_marginal(candidates, found, directions, marginals) <= worst.min() + 1e-9
    true = np.array([0.2, 0.5, 0.3])
    atoms = rng.normal(size=(3, 2))
    v = search.sphere_net(2, 0.5)
    exact = search.linear_weights(atoms, v, (v @ atoms.T, np.tile(true, (len(v), 1))))
    np.testing.assert_allclose(exact, true, atol=1e-7)


def test_moments_of_the_groups_are_those_of_the_truth() -> None:
    rng = np.random.default_rng(2)
    truth = Atoms(rng.uniform(-0.5, 0.5, (3, 2)), np.array([0.2, 0.3, 0.5]))
    sigma = rng.choice([0.1, 0.2], 20_000)
    marginals = search.Marginals(simulate(truth, sigma, rng), sigma, 3, 4)
    directions = search.sphere_net(2, 0.2)
    pooled = np.tensordot(marginals.mass, marginals.moments(directions), 1)
    z, level, alpha = (np.concatenate(part) for part in zip(*marginals.groups, strict=True))
    assert len(marginals.groups) == 4 and len(z) == 20_000
    np.testing.assert_allclose(pooled, denoised_moments(z @ directions.T, level, 5, alpha)[1:].T, atol=1e-10)
    truth_moments = [(truth.weights * (directions @ truth.atoms.T) ** r).sum(1) for r in range(1, 6)]
    assert (np.abs(pooled - np.transpose(truth_moments)) < 6 * marginals.standard_error).all()


@pytest.mark.parametrize("k, num_dims, noise", [(2, 1, 0.2), (3, 1, 0.05), (3, 2, 0.08), (2, 2, 0.3)])
def test_searches_find_the_atoms(k: int, num_dims: int, noise: float) -> None:
    """As the paper writes it, up to the spacing of its net of weights, and the one that scales."""
    rng = np.random.default_rng(k + num_dims)
    angle = 2 * np.pi * np.arange(k) / k + 0.4
    atoms = 0.7 * np.stack([np.cos(angle), np.sin(angle)], 1)[:, :num_dims]
    truth = Atoms(atoms, np.arange(1.0, k + 1) / np.arange(1, k + 1).sum())
    sigma = np.where(np.arange(200_000) < 20_000, noise, 2 * noise)
    marginals = search.Marginals(simulate(truth, sigma, rng), sigma, k, 5)
    assert wasserstein(search.exhaustive_search(marginals), truth) < 200_000 ** (-1 / (4 * k - 2))
    assert wasserstein(search.scalable_search(marginals), truth) < 0.03


def test_exhaustive_search_refuses_what_it_cannot_finish() -> None:
    rng = np.random.default_rng(0)
    for k, num_dims in ((2, 3), (4, 2)):  # too many directions, too many candidates
        with rejected("search"):
            search.exhaustive_search(search.Marginals(rng.normal(size=(500, num_dims)), np.ones(500), k, 2))


@pytest.mark.parametrize("k", [4, 6, 8])
def test_scalable_search_with_many_atoms(k: int) -> None:
    """Well separated atoms are found to a tenth of their distance, also where moments go along directions."""
    rng = np.random.default_rng(k)
    atoms = np.array([[x, y, z] for x in (-0.5, 0.5) for y in (-0.45, 0.55) for z in (-0.55, 0.4)])[:k]
    atoms = atoms + 0.05 * rng.normal(size=atoms.shape)
    truth = Atoms(atoms, np.full(k, 1 / k))
    sigma = np.full(100_000, 0.01)
    found = search.scalable_search(search.Marginals(simulate(truth, sigma, rng), sigma, k, 5))
    assert wasserstein(found, truth) < 0.1
