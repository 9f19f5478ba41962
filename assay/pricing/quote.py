"""A quote: what noisy images will be worth, from the spectrum of clean images alone, before any training.

Let images be Gaussian with mean mu and covariance Sigma, of eigenvalues lambda, and let a learner estimate both
by maximum likelihood from n_clean clean images and n_k noisy ones at each level sigma_k. Write

    g_ik = lambda_i / (lambda_i + sigma_k^2),        the share of the variance of mode i that is image.

A clean image carries Fisher information 1 / (lambda_i lambda_j) on entry (i, j) of Sigma, in its own basis, and
a noisy one 1 / ((lambda_i + sigma^2)(lambda_j + sigma^2)): it counts as w_ij = g_i g_j clean ones (far out as
sigma^-4, the paper's n_d), and as g_i for entry i of the mean. So the estimate has the errors

    E dSigma_ij^2 = (1 + [i = j]) lambda_i lambda_j / n_ij,    n_ij = n_clean + sum_k g_ik g_jk n_k,
    E dmu_i^2     = lambda_i / n_i,                            n_i  = n_clean + sum_k g_ik n_k.

At level s = sigma_t^2 the best denoiser is mu + Sigma (Sigma + s)^-1 (x_t - mu). An error dSigma changes it by
s (Sigma + s)^-1 dSigma (Sigma + s)^-1 (x_t - mu), and x_t has covariance Sigma + s; an error dmu by
s (Sigma + s)^-1 dmu. So the mean squared error exceeds the smallest possible one, to first order, by

    excess(s) = sum_ij c_ij / n_ij + sum_i c_i / n_i,
    c_ij = (1 + [i = j]) s^2 lambda_i lambda_j / ((lambda_i + s)^2 (lambda_j + s)),
    c_i  = s^2 lambda_i / (lambda_i + s)^2,

and the held-out loss by the integral of excess / s over log sigma_t. The worth of a noisy image, at a level or
for a goal, is the w with which n_clean + w n_noisy clean images alone have the same excess. It depends on the
ratio of noisy to clean images, not on their number, and little on that.

Levels that vary from pixel to pixel mix the modes of different images differently; a map is taken as noisy
images at its pixels' levels, in proportion to their number, which is exact if modes are local and shift-free.

The eigenvalues are variances of an eighth of the images along the eigenvectors of the others, each eighth in
turn: those of a sample covariance spread too far when images are few. Variance outside of the vectors' span is
shared by the modes that are left. Of images above 3,072 values, patches are used.

Real images are not Gaussian and networks are not maximum likelihood, so a quote states its accuracy:
`SPREAD`, from the comparison with measured curves in bench/quote.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike

from assay.data import ImageSource
from assay.data.arrays import Ends, from_arrays
from assay.data.source import as_source
from assay.errors import AssayError, check_enough, choose, warn
from assay.noise import MOST_NOISE, warn_of_units
from assay.pricing.results import GREY_STEP, Array, Goal

SPREAD = 0.39  # root mean square of log(log w measured / log w quoted), over 59 measured worths
_HIGHEST_LEVEL = 80.0
_MAX_VALUES, _MAX_IMAGES, _MAX_MODES = 3072, 4000, 160
_FEW_IMAGES = 4  # times as many as there are, or more, are needed for one per value
_LEAST_IMAGES, _NUM_PARTS, _FEW_VALUES, _MAX_LEVELS = 16, 8, 1024, 100


@dataclass(frozen=True)
class Quote:
    """Worth by level of noisy images of each of `sigmas` (S,), for a mix with `share` clean images.

    `levels` (L,) are sigma_t, `worth` (S, L) the closed form there. `modes` are the eigenvalues and how many
    modes each stands for, of images with `num_values` values; `num_images` of them were read.
    """

    sigmas: Array
    levels: Array
    worth: Array
    modes: tuple[Array, Array]
    share: float
    num_images: int
    num_values: int

    def __repr__(self) -> str:
        from assay.pricing.words import quote_lines

        return "\n".join(quote_lines(self))

    def goal(self, goal: Goal, sigma: ArrayLike) -> tuple[float, float, float]:
        """The worth of a noisy image for structure or everything, and its 95% interval.

        `sigma` is its level where black to white is 2, as in `sigmas`; or the levels of many images, or of the
        pixels of a map: then it is an average.
        """
        levels, count = np.unique(np.asarray(sigma, float).round(6), return_counts=True)
        _check_levels(levels[levels != 0])  # pixels of a map may be clean
        cost = self._cost(goal, float(np.median(levels)))
        worth, low, high = interval(_worth(cost, self.modes, levels, count / count.sum(), self.share))
        has_few = _FEW_IMAGES * self.num_images < self.num_values  # a quote of more would be far lower
        return worth, 0.0 if has_few else low, high

    def excess(
        self, num_clean: ArrayLike, num_noisy: ArrayLike, sigmas: ArrayLike, goal: Goal, power: Array
    ) -> Array:
        """Excess loss (R, m) in nats of mixes (m,), (m, V) at levels (V,), with worths w^power (R,)."""
        levels = np.asarray(sigmas, float)
        cost = self._cost(goal, levels.max(initial=GREY_STEP))
        information = _information(self.modes, levels)  # (V, k, k + 1)
        found = []
        for exponent in power:
            effective = np.tensordot(np.asarray(num_noisy, float), information**exponent, 1)
            size = np.asarray(num_clean, float)[:, None, None] + effective
            found.append((cost / np.maximum(size, 1)).sum((1, 2)))  # not below one image: no pole at none
        return np.array(found) / self.num_values

    def _cost(self, goal: Goal, noise: float) -> Array:
        low = choose(goal, {"structure": noise, "everything": GREY_STEP}, "goal")
        return _costs(self.modes, np.geomspace(low, _HIGHEST_LEVEL, 40))


def quote(
    images: ImageSource | np.ndarray, sigma: ArrayLike, share: float = 0.1, value_range: Ends | None = None
) -> Quote:
    """What noisy images will be worth: from clean images alone, in seconds.

    `images` are a source, of which the clean ones are used, or an array as `from_arrays` takes it; `sigma` is
    a noise level or several, e.g. of several vendors, for images scaled to [-1, 1] (of 8-bit grey levels,
    divide by 127.5). With `value_range`, the values of black and white in an array, `sigma` is in its units;
    the quote has it scaled. `share` of the images in the mix are clean.

    >>> from sklearn.datasets import load_digits
    >>> quoted = assay.quote(load_digits().images, 1.6, value_range=(0, 16))
    >>> worth, low, high = quoted.goal("structure", 0.2)
    """
    if value_range is not None and isinstance(images, ImageSource):
        raise AssayError("is for arrays; a source knows its own", key="value_range", cure="leave it out")
    source = as_source(images) if value_range is None else from_arrays(images, value_range=value_range)
    black, white = value_range or (-1, 1)
    levels = np.unique(np.asarray(sigma, float) * 2 / (white - black))
    _check_levels(levels)
    if not 0 < levels.size <= _MAX_LEVELS:
        what = f"there are {levels.size:,} noise levels, and 1 to {_MAX_LEVELS} can be quoted"
        raise AssayError(what, key="sigma", cure="give a few; `goal` of the quote averages over many")
    if not 0 < share < 1:
        raise AssayError(f"{share:g} is not a share between 0 and 1", key="share", cure="give e.g. 0.1")
    warn_of_units(levels[0])
    _warn_of_own_units(source, levels)
    x = _read(source)
    modes, at = spectrum(x), np.geomspace(GREY_STEP, 20.0, 48)
    costs = [_costs(modes, np.array([level])) for level in at]
    worth = [[_worth(cost, modes, np.array([s]), np.ones(1), share) for cost in costs] for s in levels]
    return Quote(levels, at, np.array(worth), modes, share, len(x), x.shape[1])


def _warn_of_own_units(source: ImageSource, levels: Array) -> None:
    """Warn of levels that images of the source have in their own units only."""
    units, known = getattr(source, "physical_range", None), source.sigma_tn.unique().numpy()
    if not isinstance(units, tuple):  # of files that differ, or of a sensor
        return
    for level, own in zip(levels, levels * 2 / (units[1] - units[0]), strict=True):
        if np.isclose(known, own, rtol=0.01).any() and not np.isclose(known, level, rtol=0.01).any():
            what = f"a quote of noise {level:.4g}, where black to white is 2: images of {source.name} have"
            warn(f"{what} {own:.4g}, which is {level:.4g} in their own units; is {own:.4g} meant?")


def _check_levels(levels: Array) -> None:
    """Reject what cannot be noise levels of images from -1 to 1."""
    wrong = levels[~((levels > 0) & (levels <= MOST_NOISE))]
    if wrong.size:
        what = f"a noise level of {wrong[-1]:.4g} is not between 0 and {MOST_NOISE:g}"
        cure = "give e.g. 0.2 (of 8-bit grey levels, divide by 127.5), or `value_range` of an array to `quote`"
        raise AssayError(f"{what}, where black to white is 2", key="sigma", cure=cure)


def interval(worth: float) -> tuple[float, float, float]:
    """A quoted worth with its 95% interval: log w is right up to a factor exp(+-1.96 `SPREAD`)."""
    low, high = (worth ** np.exp(sign * 1.96 * SPREAD) for sign in (1, -1))
    return worth, float(low), float(high)


def spectrum(x: Array) -> tuple[Array, Array]:
    """Eigenvalues of the covariance of images (N, d), and how many modes each stands for; at most 160."""
    part = np.arange(len(x)) % (_NUM_PARTS if x.shape[1] <= _FEW_VALUES else 2)
    found = []
    for which in np.unique(part):
        one, other = x[part != which], x[part == which] - x[part != which].mean(0)
        vectors = np.linalg.svd(one - one.mean(0), full_matrices=False)[2][: min(len(one) - 1, x.shape[1])]
        along, left = np.square(other @ vectors.T).mean(0), x.shape[1] - len(vectors)
        rest = max(np.square(other).sum(1).mean() - along.sum(), 0.0)
        found.append(np.append(along, np.full(left, rest / max(left, 1))))
    eigenvalues = np.maximum(np.sort(np.mean(found, 0))[::-1], 1e-9)
    first = min(_MAX_MODES // 2, len(eigenvalues))
    further = np.geomspace(first, len(eigenvalues), _MAX_MODES // 2).astype(int)
    edges = np.unique(np.r_[np.arange(first), further])
    edges = edges[edges < len(eigenvalues)]
    count = np.diff(np.append(edges, len(eigenvalues)))
    return np.add.reduceat(eigenvalues, edges) / count, count.astype(float)


def _read(source: ImageSource) -> Array:
    """Clean images, or patches of them, as (N, d)."""
    clean = (source.sigma_tn == 0).nonzero()[:, 0]
    check_enough(len(clean), _LEAST_IMAGES, "clean images for a spectrum", "images")
    x = source.read(clean[torch.linspace(0, len(clean) - 1, min(len(clean), _MAX_IMAGES)).long()]).numpy()
    flat = x.reshape(len(x), -1).astype(np.float64)
    if np.ptp(flat, axis=0).max() == 0:
        raise AssayError(f"all {len(x)} clean images are the same", key="images", cure="give others")
    if flat.shape[1] <= _MAX_VALUES:
        return flat
    side = min(int(np.sqrt(_MAX_VALUES / x.shape[1])), *x.shape[-2:])
    rng, parts = np.random.default_rng(0), []
    for image in x:
        top, left = (rng.integers(size - side + 1) for size in x.shape[-2:])
        parts.append(image[:, top : top + side, left : left + side].reshape(-1))
    return np.stack(parts).astype(np.float64)


def _costs(modes: tuple[Array, Array], levels: Array) -> Array:
    """c_ij / s summed over levels, with c_i of the mean as a last column (k, k + 1), by groups of modes."""
    value, count = modes
    total = np.zeros((len(value), len(value) + 1))
    for s in np.square(levels):
        one, two = value / (value + s) ** 2, value / (value + s)
        pairs = count[:, None] * count + np.diag(count)
        total += s * np.column_stack([pairs * one[:, None] * two, count * one])
    return total


def _information(modes: tuple[Array, Array], sigmas: Array) -> Array:
    """w_ij of levels (V,) with g_i as a last column (V, k, k + 1)."""
    g = modes[0] / (modes[0] + np.square(sigmas)[:, None])
    return np.concatenate([g[:, :, None] * g[:, None], g[:, :, None]], 2)


def _worth(cost: Array, modes: tuple[Array, Array], sigmas: Array, part: Array, share: float) -> float:
    """The w with sum c / (share + w (1 - share)) = sum c / (share + w_ij (1 - share))."""
    each = np.tensordot(part, _information(modes, sigmas), 1)
    excess = (cost / (share + (1 - share) * each)).sum() / cost.sum()
    return float((1 / excess - share) / (1 - share))


def quoted_at(found: Quote, sigma: float, levels: Sequence[float] | Array) -> Array:
    """The quote's curve at other levels, by log sigma_t."""
    which = int(np.abs(np.log(found.sigmas / sigma)).argmin())
    return np.interp(np.log(levels), np.log(found.levels), found.worth[which])
