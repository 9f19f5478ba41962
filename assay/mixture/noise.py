"""Gaussian noise that differs from sample to sample: isotropic, along the axes, or with a full covariance.

What the likelihood needs of sample i with noise N(0, S_i) is its precision P_i = S_i^-1. In

    log N(x_i; mu, S_i) = constant_i + [-x_i' P_i x_i / 2, P_i x_i, -P_i / 2] . [1, mu, mu mu']

the sample enters by the first vector and the place mu by the second, so that the log-densities of many samples
at many places are one matrix product, whatever the noise. A coordinate that was not observed has infinite
variance: its precision is 0, and so is its share of everything.
"""

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from assay.errors import AssayError
from assay.mixture.moments import Array

LARGEST = 1e140  # its square, and that of a millionth of its inverse, are still floating-point numbers
LEAST_NOISE = 1e-6  # of the radius: a sample without noise would have infinite precision


@dataclass(frozen=True)
class Noise:
    """The noise of n samples in d dimensions."""

    precision: Array = field(repr=False)
    """(n, 1) for isotropic noise, (n, d) for noise along the axes, or (n, d, d)."""
    constant: Array = field(repr=False)
    """(n,): log det P_i^(1/2) minus log (2 pi) / 2, over the coordinates that were observed."""
    num_features: int

    def __len__(self) -> int:
        return len(self.precision)

    def __getitem__(self, rows: slice | NDArray) -> "Noise":
        return Noise(self.precision[rows], self.constant[rows], self.num_features)

    def axis_precision(self) -> Array:
        """The diagonals of the precisions: (n, d)."""
        diagonal = np.einsum("naa->na", self.precision) if self.precision.ndim == 3 else self.precision
        return np.broadcast_to(diagonal, (len(self), self.num_features))

    def matrices(self) -> Array:
        """The precisions as matrices: (n, d, d)."""
        if self.precision.ndim == 3:
            return self.precision
        return self.precision[:, :, None] * np.eye(self.num_features)

    def _pairs(self) -> tuple[NDArray, NDArray]:
        """The entries of a precision that may differ from 0 and from each other."""
        axes = np.arange(self.num_features)
        return (axes, axes) if self.precision.ndim == 2 else np.triu_indices(self.num_features)

    @property
    def quadratics(self) -> Array:
        """Symmetric matrices Q (s, d, d) such that mu' P_i mu is a combination of mu' Q_s mu for every i."""
        units = np.eye(self.num_features)
        if self.precision.shape[1] == 1:
            return units[None]
        first, second = (units[entry] for entry in self._pairs())
        outer = first[:, :, None] * second[:, None]
        return (outer + outer.swapaxes(1, 2)) / 2

    def features(self, x: Array) -> Array:
        """The vectors of samples `x` (n, d) in the product above: (n, 1 + d + s)."""
        if self.precision.ndim == 2:
            linear, quadratic = self.precision * x, self.precision
        else:
            first, second = self._pairs()
            linear = np.einsum("nab,nb->na", self.precision, x)
            quadratic = self.precision[:, first, second] * (1 + (first != second))
        return np.concatenate([-0.5 * (x * linear).sum(1)[:, None], linear, -0.5 * quadratic], axis=1)

    def places(self, mu: Array) -> Array:
        """The vectors of places `mu` (m, d): (m, 1 + d + s)."""
        quadratic = np.einsum("ma,sab,mb->ms", mu, self.quadratics, mu, optimize=True)
        return np.concatenate([np.ones((len(mu), 1)), mu, quadratic], axis=1)

    def slopes(self, mu: Array) -> Array:
        """Derivatives of `places` with respect to mu: (m, 1 + d + s, d)."""
        m, d = mu.shape
        linear = np.broadcast_to(np.eye(d), (m, d, d))
        quadratic = 2 * np.einsum("sab,mb->msa", self.quadratics, mu)
        return np.concatenate([np.zeros((m, 1, d)), linear, quadratic], axis=1)

    def total_precision(self, sums: Array) -> Array:
        """Weighted sums of precisions (m, d, d), from those of the samples' vectors (m, 1 + d + s)."""
        return -2 * np.einsum("ms,sab->mab", sums[:, 1 + self.num_features :], self.quadratics)


def isotropic(sigma: Array, num_features: int) -> Noise:
    """Noise of one level per sample, `sigma` (n,) > 0."""
    constant = -num_features * (np.log(sigma) + 0.5 * math.log(2 * math.pi))
    return Noise(sigma[:, None] ** -2.0, constant, num_features)


def along_axes(sigma: Array) -> Noise:
    """Noise of one level per sample and coordinate, `sigma` (n, d) > 0; infinite where nothing was observed."""
    seen = np.isfinite(sigma)
    logs = np.log(np.where(seen, sigma, 1.0)) + 0.5 * math.log(2 * math.pi) * seen
    return Noise(np.where(seen, sigma, np.inf) ** -2.0, -logs.sum(1), sigma.shape[1])


def with_covariance(covariance: Array) -> Noise:
    """Noise of covariance S_i, (n, d, d); an infinite variance marks a coordinate that was not observed."""
    d = covariance.shape[1]
    seen = np.isfinite(np.einsum("naa->na", covariance))
    both = seen[:, :, None] & seen[:, None, :]
    # An unobserved coordinate is given variance 1 and no covariance, inverted along, and then taken out.
    known = np.where(both, covariance, np.eye(d))
    precision = np.where(both, np.linalg.inv(known), 0.0)
    constant = -0.5 * np.linalg.slogdet(known)[1] - 0.5 * math.log(2 * math.pi) * seen.sum(1)
    return Noise((precision + precision.swapaxes(1, 2)) / 2, constant, d)


def axis_levels(sigma: Array) -> Array:
    """Along each axis, the levels (n,), (n, d) or variances (n, d) of noise as `read_sigma` returns it."""
    return np.einsum("naa->na", sigma) if sigma.ndim == 3 else sigma


def read_sigma(sigma: ArrayLike, num_samples: int, num_features: int) -> Array:
    """The noise of samples as given: (n,) levels, (n, d) levels along the axes, or (n, d, d) covariances.

    One number is the level of every sample; levels that are the same along all axes are isotropic. Rejects what
    is no noise, with the first sample at fault.
    """
    values = np.asarray(sigma, np.float64)
    values = np.full(num_samples, values) if values.ndim == 0 else values
    shapes = {1: (num_samples,), 2: (num_samples, num_features), 3: (num_samples, num_features, num_features)}
    if values.shape != shapes.get(values.ndim) or not num_samples:
        what = f"has shape {values.shape}, but X has {num_samples} samples in {num_features} dimensions"
        cure = "give a level per sample (n,), per sample and coordinate (n, d), or covariances (n, d, d)"
        raise AssayError(what, key="sigma", cure=cure)
    levels = axis_levels(values).reshape(num_samples, -1)
    bad = np.isnan(values).reshape(num_samples, -1).any(1) | np.isinf(levels).all(1)
    bad |= ((levels < 0) | (np.isfinite(levels) & (levels >= LARGEST))).any(1)
    if values.ndim == 3:
        seen = np.isfinite(levels)
        known = np.where(seen[:, :, None] & seen[:, None], values, np.eye(num_features))
        scale = np.maximum(np.abs(known).max((1, 2)), np.finfo(float).tiny)
        off = np.abs(known - known.swapaxes(1, 2)).max((1, 2)) > 1e-8 * scale
        bad |= off | (np.linalg.eigvalsh(np.nan_to_num(known))[:, 0] < -1e-8 * scale)
    if bad.any():
        first = int(bad.argmax())
        cure = f"give levels from 0 to {LARGEST:g}, or symmetric covariances without negative eigenvalues"
        raise AssayError(f"is {values[first].tolist()}, which is no noise", key=f"sigma[{first}]", cure=cure)
    same = values.ndim == 2 and (values == values[:, :1]).all()
    return values[:, 0] if same else values


def check_sigma(sigma: ArrayLike) -> Array:
    """Noise levels as a float64 vector; rejects none at all, negative ones, NaN and infinity."""
    return read_sigma(np.atleast_1d(sigma), np.size(sigma), 1)


def make_noise(sigma: Array, num_features: int, least: float) -> Noise:
    """The noise that `read_sigma` returned, with levels raised to `least`: every precision is then finite."""
    if sigma.ndim == 1:
        return isotropic(np.maximum(sigma, least), num_features)
    if sigma.ndim == 2:
        return along_axes(np.maximum(sigma, least))
    return with_covariance(sigma + least**2 * np.eye(num_features))
