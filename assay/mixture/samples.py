"""Samples with a noise level each: drawing them from a mixture, reading and writing them."""

import csv
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from assay.archives import read_npy, read_npz
from assay.errors import AssayError, extra
from assay.files import decoding, is_number, one_line, read_json, write_whole
from assay.mixture.moments import Array, Atoms
from assay.mixture.noise import check_sigma

SUFFIXES = (".npy", ".npz", ".csv", ".parquet")


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


def read_mixture(path: Path) -> Atoms:
    """The JSON that `assay mixture fit --json` writes: {"atoms": [[..], ..], "weights": [..]}."""
    cure = "give a file of `assay mixture fit --json`"
    content = read_json(path, cure)
    with decoding(path, cure):
        return check_mixture(content["atoms"], content.get("weights"))


def write_samples(path: Path, x: Array, sigma: Array) -> None:
    """Write samples (n, d) and levels (n,), in the layout that `read_samples` reads, by the name's suffix."""
    names = [*(f"x{i}" for i in range(x.shape[1])), "sigma"]
    suffix, table = _suffix(path), np.column_stack([x, sigma])
    with write_whole(Path(path)) as partial:
        match suffix:
            case ".npz":
                np.savez(partial, x=x, sigma=sigma)
            case ".npy":
                np.save(partial, table)
            case ".csv":
                np.savetxt(partial, table, delimiter=",", header=",".join(names), comments="", fmt="%.17g")
            case _:
                arrow = extra("pyarrow", "parquet", "a parquet file").table(
                    dict(zip(names, table.T, strict=True))
                )
                extra("pyarrow.parquet", "parquet", "a parquet file").write_table(arrow, partial)


def read_samples(path: Path, sigma_column: str = "sigma", sigma: float | None = None) -> tuple[NDArray, Array]:
    """Samples (n, d) and their levels (n,) from a file; with `sigma` every column is data and has that level.

    - npz: an array named like the sigma column, (n,), (n, d) or (n, d, d), and one other array (n, d);
    - npy: (n, d + 1), whose last column is sigma; it stays on disk as a memory-map;
    - csv (with a header) and parquet: one column per feature and the sigma column, or a column per feature with
      its noise, named sigma_ and the feature's name.
    """
    columns, level = _read_columns(Path(path), sigma_column, sigma is not None), None
    with decoding(path, "save columns of numbers, one value per sample"):
        each = [name for name in columns if f"{sigma_column}_{name}" in columns]
        if sigma is None and sigma_column in columns:
            level = columns.pop(sigma_column)
        elif sigma is None and 2 * len(each) == len(columns) > 0:
            level = np.column_stack([columns.pop(f"{sigma_column}_{name}") for name in each])
        elif sigma is None:
            what = f"has no column {sigma_column!r}, only {one_line(', '.join(columns))}"
            raise AssayError(what, key="sigma_column", cure="name it, or give sigma")
        if not columns:
            raise AssayError("holds noise levels and no samples")
        x = next(iter(columns.values())) if len(columns) == 1 else np.column_stack(list(columns.values()))
        x = x[:, None] if x.ndim == 1 else x
        if x.dtype.kind not in "iuf":
            raise AssayError(f"holds samples of type {x.dtype}, not numbers")
        level = np.full(len(x), sigma) if level is None else level.astype(np.float64)
        if x.ndim != 2 or level.ndim == 0 or len(level) != len(x):
            what = f"has samples of shape {x.shape} and levels of shape {level.shape}"
            raise AssayError(what, cure="give one row and one level per sample")
    return x, level


def _read_columns(path: Path, sigma_column: str, all_data: bool) -> dict[str, NDArray]:
    """The arrays of a file by name; unless `all_data`, one may be the levels."""
    match _suffix(path):
        case ".npz":
            arrays = read_npz(path)
            if len(arrays) > 2 - all_data:
                what = f"holds several arrays of samples: {one_line(', '.join(arrays))}"
                raise AssayError(what, path=path, cure="keep one, (n, d)")
            return arrays
        case ".npy":
            array = read_npy(path)
            if array.dtype.names or array.ndim != 2 or array.shape[1] < 2 - all_data:
                what = f"has shape {array.shape}, not (n, d + 1) with sigma in the last column"
                raise AssayError(what, path=path, cure="save it so, or give sigma")
            return {"x": array} if all_data else {"x": array[:, :-1], sigma_column: array[:, -1]}
        case ".csv":
            names = _header(path)
            with decoding(path, "save it as a table of numbers under one header line"):
                values = np.loadtxt(path, delimiter=",", skiprows=1, ndmin=2, encoding="utf-8-sig")
                if values.shape[1] != len(names):
                    raise AssayError(f"has {values.shape[1]} columns and {len(names)} names above them")
            return dict(zip(names, values.T, strict=True))
        case _:
            parquet = extra("pyarrow.parquet", "parquet", "a parquet file")
            with decoding(path, "save it again"):
                table = parquet.read_table(path)
                return {name: table[name].to_numpy() for name in table.column_names}


def _header(path: Path) -> list[str]:
    """The names in the first line of a csv file; rejects those that would lose a row or a column."""
    # Spreadsheets put a byte order mark first.
    with decoding(path, "give a CSV file"), open(path, newline="", encoding="utf-8-sig") as file:
        names = [name.strip() for name in next(csv.reader(file), [])]
        if not any(line.strip() for line in file):
            raise AssayError("has no rows", cure="write a header line and one line per sample below it")
        if names and all(is_number(name) for name in names):
            raise AssayError("begins with numbers", cure="put a header line above them, such as x0,x1,sigma")
        if len(set(names)) < len(names):
            what = f"names a column twice in {one_line(','.join(names))}"
            raise AssayError(what, cure="give each a name of its own")
    return names


def _suffix(path: Path) -> str:
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        what = f"samples are kept in {', '.join(SUFFIXES)} files"
        raise AssayError(what, path=path, cure="choose one of these")
    return suffix
