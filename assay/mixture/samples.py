"""Samples with a noise level each: drawing them from a mixture, reading and writing them."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from assay.archives import read_npy, read_npz
from assay.files import is_number, naming, one_line, read_json, write_whole
from assay.mixture.moments import Array, Atoms
from assay.mixture.noise import check_sigma

SUFFIXES = (".npy", ".npz", ".csv", ".parquet")
_COLUMNS = "save columns of numbers, one value per sample"


def check_mixture(atoms: ArrayLike, weights: ArrayLike | None = None) -> Atoms:
    """A distribution with atoms (k, d) and weights (k,) that sum to 1 (equal if None); rejects others."""
    try:
        places = np.asarray(atoms, np.float64)
        places = places[:, None] if places.ndim == 1 else places
        equal = np.full(len(places), 1 / max(len(places), 1))
        mass = equal if weights is None else np.asarray(weights, np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError("atoms must be rows of equally many numbers, weights one number per atom") from error
    if places.ndim != 2 or 0 in places.shape or not np.isfinite(places).all():
        raise ValueError(f"atoms have shape {places.shape}: write one row of finite numbers for each atom")
    if mass.shape != places.shape[:1] or not (mass >= 0).all() or not np.isclose(mass.sum(), 1, atol=1e-6):
        raise ValueError(
            f"weights {mass.tolist()} must be {len(places)} numbers >= 0 that sum to 1, one per atom"
        )
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
    if not 0 <= clean_fraction <= 1 or num_samples < 1:
        raise ValueError(
            f"num_samples = {num_samples}, clean_fraction = {clean_fraction}: need >= 1 and a fraction"
        )
    return np.where(np.arange(num_samples) < round(clean_fraction * num_samples), clean, noisy)


def read_mixture(path: Path) -> Atoms:
    """The JSON that `assay mixture fit --json` writes: {"atoms": [[..], ..], "weights": [..]}."""
    content = read_json(path, "give a file of `assay mixture fit --json`")
    if "atoms" not in content:
        raise ValueError(f'{path} holds no mixture: expected {{"atoms": [[..], ..], "weights": [..]}}')
    try:
        return check_mixture(content["atoms"], content.get("weights"))
    except (ValueError, ArithmeticError) as error:  # the latter of numbers that are too large
        raise ValueError(f"{path}: {error}") from error


def write_samples(path: Path, x: Array, sigma: Array) -> None:
    """Write samples (n, d) and levels (n,), in the layout that `read_samples` reads, by the name's suffix."""
    names = [*(f"x{i}" for i in range(x.shape[1])), "sigma"]
    with write_whole(Path(path)) as partial:
        match _suffix(path):
            case ".npz":
                np.savez(partial, x=x, sigma=sigma)
            case ".npy":
                np.save(partial, np.column_stack([x, sigma]))
            case ".csv":
                table = np.column_stack([x, sigma])
                np.savetxt(partial, table, delimiter=",", header=",".join(names), comments="", fmt="%.17g")
            case _:
                arrow, parquet = _pyarrow()
                parquet.write_table(arrow.table(dict(zip(names, [*x.T, sigma], strict=True))), partial)


def read_samples(path: Path, sigma_column: str = "sigma", sigma: float | None = None) -> tuple[NDArray, Array]:
    """Samples (n, d) and their levels (n,) from a file; with `sigma` every column is data and has that level.

    - npz: an array named like the sigma column, (n,), (n, d) or (n, d, d), and one other array (n, d);
    - npy: plain (n, d + 1), whose last column is sigma, or with named fields; it stays on disk as a memory-map;
    - csv (with a header) and parquet: one column per feature and the sigma column, or a column per feature with
      its noise, named sigma_ and the feature's name.
    """
    path = Path(path)
    match _suffix(path):
        case ".npz":
            columns = read_npz(path)
        case ".npy":
            array = read_npy(path)
            if array.dtype.names is None:
                if array.ndim != 2 or (sigma is None and array.shape[1] < 2):
                    raise ValueError(
                        f"{path} has shape {array.shape}: expected (n, d + 1), the last column sigma"
                    )
                return (
                    (array, np.full(len(array), sigma)) if sigma is not None else (array[:, :-1], array[:, -1])
                )
            columns = {name: array[name] for name in array.dtype.names}
        case ".csv":
            with naming(path, "save it as a table of numbers under one header line"):
                names = _header(path)
                values = np.loadtxt(path, delimiter=",", skiprows=1, ndmin=2, encoding="utf-8-sig")
            if not len(values) or values.shape[1] != len(names):
                raise ValueError(
                    f"{path} has {values.shape[1]} columns and {len(names)} names above: correct the header"
                )
            columns = dict(zip(names, values.T, strict=True))
        case _:
            parquet = _pyarrow()[1]
            with naming(path, "save it again"):
                table = parquet.read_table(path)
                columns = {name: table[name].to_numpy() for name in table.column_names}
    if sigma is None and sigma_column not in columns:
        each = [name for name in columns if f"{sigma_column}_{name}" in columns]
        if not each or 2 * len(each) != len(columns):
            there = one_line(", ".join(columns))
            raise ValueError(f"{path} has no column {sigma_column!r}, only {there}: name it or give sigma")
        with naming(path, _COLUMNS):  # one level per feature: x0, x1, sigma_x0, sigma_x1
            levels = np.column_stack([columns.pop(f"{sigma_column}_{name}") for name in each])
            return np.column_stack([columns[name] for name in each]), levels.astype(np.float64)
    level = columns.pop(sigma_column, None) if sigma is None else None
    if not columns:
        raise ValueError(f"{path} holds noise levels and no samples")
    if _suffix(path) == ".npz" and len(columns) > 1:
        raise ValueError(
            f"{path} holds several arrays of samples, {one_line(', '.join(columns))}: keep one, (n, d)"
        )
    with naming(path, _COLUMNS):
        x = np.column_stack(list(columns.values()))
        level = np.full(len(x), sigma) if level is None else np.asarray(level, np.float64)
    if level.ndim == 0 or len(level) != len(x):
        raise ValueError(f"{path} has {len(x)} samples, levels of shape {level.shape}: give one per sample")
    return x, level


def _header(path: Path) -> list[str]:
    """The names in the first line of a csv file; rejects those that would lose a row or a column."""
    # Spreadsheets put a byte order mark first.
    with naming(path, "give a CSV file"), open(path, newline="", encoding="utf-8-sig") as file:
        names = [name.strip() for name in next(csv.reader(file), [])]
        if not any(line.strip() for line in file):
            raise ValueError(f"{path} has no rows: expected a header line and one line per sample below it")
    if names and all(is_number(name) for name in names):
        raise ValueError(f"{path} begins with numbers: put a header line above them, such as x0,x1,sigma")
    if len(set(names)) < len(names):
        raise ValueError(
            f"{path} names a column twice in {one_line(','.join(names))}: give each a name of its own"
        )
    return names


def _suffix(path: Path) -> str:
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(
            f"{path}: samples are kept in {', '.join(SUFFIXES)} files, not {suffix or 'a bare name'}"
        )
    return suffix


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError("parquet files need pyarrow: pip install 'assay[parquet]'") from error
    return pyarrow, pyarrow.parquet
