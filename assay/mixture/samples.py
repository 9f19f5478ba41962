"""Samples with a noise level each: checking their noise, drawing them from a mixture, reading them."""

import csv
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from assay.errors import AssayError, check
from assay.files import decoding, is_number, one_line
from assay.mixture.moments import Array, Atoms

LARGEST = 1e140  # its square, and that of a millionth of its inverse, are still floating-point numbers


def check_sigma(sigma: ArrayLike, num_samples: int | None = None) -> Array:
    """Noise levels as a float64 vector, of `num_samples` if given; a number is the level of every sample."""
    levels = np.asarray(sigma, np.float64)
    levels = np.full(1 if num_samples is None else num_samples, levels) if levels.ndim == 0 else levels
    if levels.ndim != 1 or not len(levels) or num_samples not in (None, len(levels)):
        what = f"has shape {levels.shape}, but there are {num_samples or 'no'} samples"
        raise AssayError(what, key="sigma", cure="give one noise level per sample, (n,)")
    bad = ~((levels >= 0) & (levels < LARGEST))
    if bad.any():
        first = int(bad.argmax())
        cure = f"give levels from 0 to {LARGEST:g}"
        raise AssayError(f"is {levels[first]}, which is no noise level", key=f"sigma[{first}]", cure=cure)
    return levels


def simulate(mixture: Atoms, sigma: ArrayLike, rng: np.random.Generator) -> Array:
    """x_i = y_i + sigma_i g_i, (n, d), with y_i from `mixture` and one level per sample in `sigma` (n,)."""
    level = check_sigma(sigma)
    noise = level[:, None] * rng.standard_normal((len(level), mixture.atoms.shape[1]))
    return noise + mixture.atoms[rng.choice(len(mixture.weights), len(level), p=mixture.weights)]


def read_samples(path: Path, sigma_column: str = "sigma", sigma: float | None = None) -> tuple[Array, Array]:
    """Samples (n, d) and their levels (n,) from a CSV file: a header, then one row of numbers per sample.

    One column holds the levels, the others the features; with `sigma` every column is a feature.
    """
    cure = "save a header line, such as x0,x1,sigma, and one line of numbers per sample below it"
    with decoding(path, cure), open(path, newline="", encoding="utf-8-sig") as file:  # spreadsheets put a mark
        names = [name.strip() for name in next(csv.reader(file), [])]
        lines = [line for line in file if line.strip()]
        all_names, twice = one_line(", ".join(names)), len(set(names)) < len(names)
        values = np.loadtxt(lines, delimiter=",", ndmin=2) if lines else np.empty((0, len(names)))
        what = f"has no column {sigma_column!r} beside those of samples, only {all_names}"
        missing = sigma is None and (sigma_column not in names or len(names) < 2)
        columns = f"has {values.shape[1]} columns and {len(names)} names above them"
        check([
            (not lines, AssayError("has no rows")),
            (all(is_number(name) for name in names), AssayError("begins with numbers")),
            (twice, AssayError(f"names a column twice in {all_names}")),
            (values.shape[1] != len(names), AssayError(columns)),
            (missing, AssayError(what, key="sigma_column", cure="name it, or give sigma")),
        ])  # fmt: skip
        if sigma is not None:
            return values, np.full(len(values), sigma)
        place = names.index(sigma_column)
        return np.delete(values, place, axis=1), values[:, place]
