"""Samples with a noise level each: drawing them from a mixture, checking, reading and writing them."""

import csv
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from assay.archives import read_npz
from assay.errors import AssayError
from assay.files import decoding, is_number, one_line, write_whole
from assay.mixture.moments import Array, Atoms

SUFFIXES = (".npz", ".csv")
LARGEST = 1e140  # its square, and that of a millionth of its inverse, are still floating-point numbers


def check_sigma(sigma: ArrayLike, num_samples: int | None = None) -> Array:
    """Noise levels as a float64 vector, of `num_samples` if given; rejects what is no noise level.

    One number is then the level of every sample.
    """
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


def check_mixture(atoms: ArrayLike, weights: ArrayLike | None = None) -> Atoms:
    """A distribution with atoms (k, d) and weights (k,) that sum to 1 (equal if None); rejects others."""
    try:
        places = np.asarray(atoms, np.float64)
        places = places[:, None] if places.ndim == 1 else places
        mass = np.full(len(places), 1 / len(places)) if weights is None else np.asarray(weights, np.float64)
    except (TypeError, ValueError, ArithmeticError) as error:  # the last of none, or of numbers too large
        raise AssayError("are not rows of equally many numbers, with one weight each", key="atoms") from error
    if places.ndim != 2 or 0 in places.shape or not np.isfinite(places).all():
        raise AssayError(f"have shape {places.shape}: write finite numbers, a row for each atom", key="atoms")
    if mass.shape != places.shape[:1] or not (mass >= 0).all() or not np.isclose(mass.sum(), 1, atol=1e-6):
        what = f"must be {len(places)} numbers >= 0 that sum to 1, one per atom (given: {mass.tolist()})"
        raise AssayError(what, key="weights")
    return Atoms(places, mass / mass.sum())


def simulate(mixture: Atoms, sigma: ArrayLike, rng: np.random.Generator) -> Array:
    """x_i = y_i + sigma_i g_i, (n, d), with y_i from `mixture` and one level per sample in `sigma` (n,)."""
    level = check_sigma(sigma)
    x = rng.standard_normal((len(level), mixture.atoms.shape[1]))
    x *= level[:, None]
    x += mixture.atoms[rng.choice(len(mixture.weights), len(level), p=mixture.weights)]
    return x


def two_levels(num_samples: int, clean_fraction: float, clean: float, noisy: float) -> Array:
    """Noise levels (n,): round(p n) samples at `clean`, the others at `noisy`."""
    if not 0 <= clean_fraction <= 1:
        raise AssayError(f"is {clean_fraction}, not a fraction between 0 and 1", key="clean_fraction")
    return np.where(np.arange(num_samples) < round(clean_fraction * num_samples), clean, noisy)


def write_samples(path: Path, x: Array, sigma: Array) -> None:
    """Write samples (n, d) and levels (n,), in the layout that `read_samples` reads, by the name's suffix."""
    suffix = _suffix(path)
    with write_whole(Path(path)) as partial:
        if suffix == ".npz":
            np.savez(partial, x=x, sigma=sigma)
        else:
            header = ",".join([*(f"x{i}" for i in range(x.shape[1])), "sigma"])
            table = np.column_stack([x, sigma])
            np.savetxt(partial, table, delimiter=",", header=header, comments="", fmt="%.17g")


def read_samples(path: Path, sigma_column: str = "sigma", sigma: float | None = None) -> tuple[NDArray, Array]:
    """Samples (n, d) and their levels (n,) from a file; with `sigma` every column is data and has that level.

    - npz: an array named like the sigma column, (n,), and one other array (n, d);
    - csv, with a header: one column per feature, and the sigma column.
    """
    columns = read_npz(path) if _suffix(path) == ".npz" else _read_csv(path)
    with decoding(path, "give one row of numbers and one noise level per sample"):
        if sigma is None and sigma_column not in columns:
            what = f"has no column {sigma_column!r}, only {one_line(', '.join(columns))}"
            raise AssayError(what, key="sigma_column", cure="name it, or give sigma")
        level = None if sigma is not None else columns.pop(sigma_column).astype(np.float64)
        if not columns:
            raise AssayError("holds noise levels and no samples")
        x = np.column_stack(list(columns.values()))
        level = np.full(len(x), sigma) if level is None else level
        several = _suffix(path) == ".npz" and len(columns) > 1
        if several or x.dtype.kind not in "iuf" or x.ndim != 2 or level.shape != (len(x),):
            shapes = ", ".join(f"{name} {array.shape} of {array.dtype}" for name, array in columns.items())
            raise AssayError(f"holds {one_line(shapes)}, and levels of shape {level.shape}")
    return x, level


def _read_csv(path: Path) -> dict[str, NDArray]:
    """The columns of a table by name; rejects what would lose a row or a column."""
    cure = "save a header line, such as x0,x1,sigma, and one line of numbers per sample below it"
    with decoding(path, cure), open(path, newline="", encoding="utf-8-sig") as file:  # spreadsheets put a mark
        names = [name.strip() for name in next(csv.reader(file), [])]
        lines = [line for line in file if line.strip()]
        if not lines:
            raise AssayError("has no rows", cure=cure)
        if names and all(is_number(name) for name in names):
            raise AssayError("begins with numbers", cure=cure)
        if len(set(names)) < len(names):
            raise AssayError(f"names a column twice in {one_line(','.join(names))}", cure=cure)
        values = np.loadtxt(lines, delimiter=",", ndmin=2)
        if values.shape[1] != len(names):
            raise AssayError(f"has {values.shape[1]} columns and {len(names)} names above them", cure=cure)
    return dict(zip(names, values.T, strict=True))


def _suffix(path: Path) -> str:
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        what = f"samples are kept in {' and '.join(SUFFIXES)} files"
        raise AssayError(what, path=path, cure="choose one of these")
    return suffix
