"""The lemmas between the estimator and its bounds, each in a form that can be tried on numbers.

Upwards: the weighted second moment is near that of the atoms (`covariance_deviation`), projecting onto its top
eigenvectors then moves the atoms little (`projection_error`), and among the candidates of the low-dimensional
search is a good one (`nearest_candidate`). Downwards: mixtures that are far apart (`hard_pair`, `hard_packing`)
have samples that are nearly alike (`divergences`, `chi_squared_bound`, `kl_bound`), so that no test tells them
apart (`bretagnolle_huber`). Constants that the paper leaves open are 1.
"""

import math

import numpy as np
from numpy.polynomial.hermite_e import hermegauss
from numpy.typing import ArrayLike
from scipy.special import logsumexp

from assay.errors import AssayError
from assay.mixture.moments import Array, Atoms, inverse_weights


def noise_deviation(alpha: Array, num_features: int, delta: float) -> float:
    """Lemma "spec_conc_noise_term": |sum_i alpha_i g_i g_i' - I| is below a multiple of this, up to delta."""
    size = num_features + math.log(1 / delta)
    return max(math.sqrt(size * float(alpha @ alpha)), size * float(alpha.max()))


def covariance_deviation(sigma: ArrayLike, num_features: int, k: int, delta: float) -> float:
    """Lemma "cov_conc": |Sigma_hat - E[y y']| is below a multiple of this with probability 1 - delta.

    Sigma_hat = sum_i alpha_i x_i x_i' - sigma_bar^2 I with alpha_i ~ sigma_i^-4, for atoms in the unit ball.
    """
    level, size = np.asarray(sigma, np.float64), num_features + math.log(1 / delta)
    alpha = inverse_weights(level**4)
    noise = float((alpha * level) ** 2 @ np.maximum(level**2, 1))
    drawn = k * math.sqrt(math.log(k / delta) * float(alpha @ alpha))
    return max(math.sqrt(size * noise), size * float((alpha * level**2).max()), drawn)


def projection_error(mixture: Atoms, estimate: Array, num_dims: int) -> float:
    """Lemma "spec_norm_wass": an upper bound on W1 between a mixture (k, d) and its projection.

    The projection is onto the top `num_dims` eigenvectors of a symmetric `estimate` (d, d) of the second moment
    Sigma of the atoms: W1^2 <= k (lambda_{r+1} + 2 |Sigma - estimate|).
    """
    second = (mixture.weights[:, None] * mixture.atoms).T @ mixture.atoms
    value = np.append(np.linalg.eigvalsh(second)[::-1], 0.0)
    distance = float(np.linalg.norm(second - estimate, 2))
    return math.sqrt(len(mixture.weights) * (max(value[num_dims], 0) + 2 * distance))


def nearest_candidate(mixture: Atoms, axis_atoms: Array, net: Array) -> Atoms:
    """Lemma "comp_disc_solution": a candidate of the search within W1 2 d nu of a mixture (k, d).

    Each coordinate of an atom goes to the nearest of that axis' atoms, `axis_atoms` (d, l), and the weights to
    the nearest vector of `net` (W, k). nu is the largest W1 between a marginal along an axis and its estimate;
    axis atoms must lie in the same ball as the mixture, and the net be as fine as nu over its radius.
    """
    nearest = np.abs(mixture.atoms[:, :, None] - axis_atoms).argmin(-1)  # (k, d)
    weights = net[np.abs(net - mixture.weights).sum(1).argmin()]
    return Atoms(axis_atoms[np.arange(len(axis_atoms)), nearest], weights)


def divergences(first: Atoms, second: Atoms, sigma: float = 1.0, num_nodes: int = 60) -> tuple[float, float]:
    """(chi^2(P || Q), KL(P || Q)) for P and Q the mixtures under noise `sigma`, by Gauss-Hermite quadrature.

    Along the directions in which all atoms agree P and Q are alike; the others may be three.
    """
    points = [np.reshape(each.atoms, (len(each.weights), -1)) / sigma for each in (first, second)]
    both = np.concatenate(points) - points[0][0]
    _, size, axes = np.linalg.svd(both, full_matrices=False)
    axes = axes[(size > 1e-12 * size[0]) | (np.arange(len(size)) == 0)]
    node, mass = hermegauss(num_nodes)
    nodes = np.stack(np.meshgrid(*[node] * len(axes), indexing="ij"), -1).reshape(-1, len(axes))
    masses = np.prod(np.meshgrid(*[mass / mass.sum()] * len(axes), indexing="ij"), axis=0).ravel()
    p, q = ((each - points[0][0]) @ axes.T for each in points)

    def log_ratio(at: Array) -> Array:
        logs = [
            logsumexp(-0.5 * ((at[:, None] - places) ** 2).sum(-1), axis=1, b=each.weights)
            for places, each in ((p, first), (q, second))
        ]
        return np.asarray(logs[0] - logs[1])

    chi_squared = sum(
        w * (masses @ np.expm1(log_ratio(nodes + a)) ** 2) for a, w in zip(q, second.weights, strict=True)
    )
    kl = sum(w * (masses @ log_ratio(nodes + a)) for a, w in zip(p, first.weights, strict=True))
    return float(chi_squared), float(kl)


def chi_squared_bound(epsilon: float, num_moments: int, sigma: float = 1.0) -> float:
    """Lemma and corollary "mm_chi_squared": chi^2 is below a multiple of (e eps^2 / ((l+1) sigma^2))^(l+1).

    For centred distributions on [-epsilon, epsilon] that share their first l = `num_moments` moments.
    """
    order = num_moments + 1
    return (math.e * epsilon**2 / (order * sigma**2)) ** order


def kl_bound(u: Array, v: Array, scale: float, sigma: float = 1.0) -> float:
    """Lemma and corollary "kl_hd_dist": KL of members +-scale u and +-scale v is below a multiple of this."""
    return float(((u - v) ** 2).sum()) * (scale / sigma) ** 4


def bretagnolle_huber(kl: float) -> float:
    """Lemma "bh_inequality": TV(P, Q) <= 1 - exp(-KL(P || Q)) / 2 (printed without this minus)."""
    return 1 - 0.5 * math.exp(-kl)


def hard_pair(k: int, epsilon: float = 1.0) -> tuple[Atoms, Atoms]:
    """Lemma "mom_match": two k-atomic distributions on [-epsilon, epsilon] with the same first 2k - 2 moments,
    W1 of order epsilon / k.

    On 2k points the divided difference of order 2k - 1 vanishes for polynomials of degree <= 2k - 2; its
    coefficients alternate in sign, and the positive and the negative ones are the two distributions. The
    points are the Chebyshev extrema, symmetric, so that one is the mirror image of the other and (for k >= 2)
    both have mean 0.
    """
    points = -np.cos(np.pi * np.arange(2 * k) / (2 * k - 1))
    gaps = points[:, None] - points
    np.fill_diagonal(gaps, 1)
    coefficient = 1 / gaps.prod(1)
    pair = []
    for sign in (1, -1):
        chosen = coefficient * sign > 0
        weights = np.abs(coefficient[chosen])
        pair.append(Atoms(epsilon * points[chosen], weights / weights.sum()))
    return pair[0], pair[1]


def hard_packing(num_features: int, num_members: int, scale: float, rng: np.random.Generator) -> list[Atoms]:
    """The family of Theorem "lb_hd": (delta_theta + delta_-theta) / 2 for theta in a packing of a sphere.

    theta = scale u for `num_members` unit vectors u, drawn at random, of which no two, nor one and the negative
    of another, are closer than 1/4: W1 between two members is at least scale / 4. The theorem takes the scale
    c (d / sum_i sigma_i^-4)^(1/4), at which the samples cannot tell the members apart.
    """
    found = np.empty((0, num_features))
    for _ in range(1000):
        u = rng.standard_normal(num_features)
        u /= np.linalg.norm(u)
        # |u - v|^2 = 2 - 2 <u, v>, and of v and -v the closer counts.
        if (2 - 2 * np.abs(found @ u) >= 0.25**2).all():
            found = np.concatenate([found, u[None]])
            if len(found) == num_members:
                return [Atoms(scale * np.stack([u, -u]), np.full(2, 0.5)) for u in found]
    reason = f"only {len(found)} directions 1/4 apart were found in {num_features} dimensions"
    raise AssayError(reason, key="num_members", cure="ask for fewer members")
