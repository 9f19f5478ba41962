"""One record from evaluation to report: a `Configuration`, its measurements, and the time they took.

A study writes one `Outcome` as JSON for each way of sampling each model. All tables, prices and reports are
functions of outcomes, which travel between commands as `results.csv`, written and read here alone
(docs/howto/deciding.md lists its columns).
"""

import csv
import io
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, field_validator

from assay.errors import AssayError, Rules, about, check, warn
from assay.files import Name, csv_cell, csv_text, decoding, is_number, one_line, write_text
from assay.metrics.evaluate import NOT_COLUMNS, Evaluation, load_arrays
from assay.noise import warn_of_units
from assay.settings import Level, explaining

Sampling = Literal["full", "truncated", "refined"]
Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
# Sizes of the paper's data sets (caption of its clean-mix table); ImageNet is stated as "about 1.3M".
NUM_IMAGES = {"cifar10": 60_000, "celeba_hq": 30_000, "imagenet": 1_300_000}
_MAX_LEVELS_IN_WORDS = 3


class Configuration(BaseModel):
    """What a model was trained on, and how it was trained and sampled.

    `noisy` has one (noise level, number of images) per level. `clean_fraction` is the part of the data set that
    is clean where that was simulated. `table` names the table or the extra of a study, and `seed` the seed of
    training, or the block of a design.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    dataset: Name = ""
    table: Name = ""
    num_clean: Number
    noisy: tuple[tuple[Level, Number], ...] = ()
    clean_fraction: float | None = Field(None, ge=0, le=1)
    consistency: bool = False
    rounds: NonNegativeInt = 0
    sampling: Sampling = "full"
    seed: int | None = None

    @field_validator("noisy")
    @classmethod
    def _in_order(cls, noisy: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
        if len({level for level, _ in noisy}) < len(noisy):
            raise ValueError("a noise level is named twice")
        return tuple(sorted(part for part in noisy if part[1] > 0))

    @property
    def num_noisy(self) -> float:
        """Noisy images of all levels together."""
        return sum(number for _, number in self.noisy)

    @property
    def sigma(self) -> float | None:
        """The noise level, if the noisy images have one only."""
        return self.noisy[0][0] if len(self.noisy) == 1 else None

    @property
    def levels(self) -> tuple[float, ...]:
        """The noise levels, lowest first."""
        return tuple(level for level, _ in self.noisy)

    @property
    def without_seed(self) -> "Configuration":
        """What repeats with other seeds have in common."""
        return self.model_copy(update={"seed": None})

    def words(self, shares: bool = False, levels: bool = True) -> str:
        """The configuration in words, "200 clean + 1,800 noisy at 0.3, consistency".

        `shares`: as parts of the data set where those are known, "10% clean + 90% noisy at 0.3". Without
        `levels` the noise levels are left out.
        """
        text: Callable[[float], str] = "{:,.0f}".format
        clean, noisy = self.num_clean, dict(self.noisy)
        if self.clean_fraction is not None and shares:
            scale = (1 - self.clean_fraction) / max(self.num_noisy, 1)
            text, clean = percent, self.clean_fraction
            noisy = {level: scale * number for level, number in self.noisy}
        parts = [f"{text(number)} noisy at {level:.3g}" for level, number in noisy.items()]
        if noisy and (len(noisy) > _MAX_LEVELS_IN_WORDS or not levels):
            at_levels = f" at {min(noisy):.3g} to {max(noisy):.3g}" if levels else ""
            parts = [f"{text(sum(noisy.values()))} noisy{at_levels}"]
        parts = [f"{text(clean)} clean"] * (clean > 0 or not parts) + parts
        marks = [f"{self.sampling} sampling"] * (self.sampling != "full") + ["consistency"] * self.consistency
        marks += [f"{self.rounds} round" + "s" * (self.rounds > 1)] * (self.rounds > 0)
        return ", ".join([" + ".join(parts), *marks])

    def __str__(self) -> str:
        return self.words()

    @property
    def title(self) -> str:
        """The words with the name of the extra and the seed."""
        extra = f"{self.table}: " if self.table not in ("", "clean_mix", "only_noisy") else ""
        return f"{extra}{self}" + ("" if self.seed is None else f" (seed {self.seed})")


def percent(part: float) -> str:
    """A part as a percentage with the digits it takes: "10%", "0.1%", "99.95%"; only all of it is "100%"."""
    slack = 0.5 * min(part, 1 - part)  # percentage points: 0.5% of the part, or of the rest
    decimals = next(n for n in range(16) if n == 15 or abs(round(100 * part, n) - 100 * part) <= slack)
    return f"{round(100 * part, decimals):.{decimals}f}%"


class Outcome(BaseModel):
    """A configuration, what was measured of its model, and the seconds of training, sampling and measuring."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    configuration: Configuration
    evaluation: Evaluation
    train_seconds: float | None = None
    sample_seconds: float | None = None
    held_out_loss_seconds: float | None = None

    def value(self, metric: str) -> float | None:
        """What was measured by this metric, None if nothing was."""
        return getattr(self.evaluation, metric)


METRICS = {"held_out_loss": ".3f", "fd": ".2f"}  # what results are compared by, and how it is written


def load_outcome(path: Path) -> Outcome | Evaluation:
    """Read an outcome of a study, or a result of `assay evaluate`."""
    with decoding(path, "give a result of `assay evaluate` or of a study"):
        tree = json.loads(path.read_bytes())
        if isinstance(tree, dict) and "configuration" in tree:
            return Outcome.model_validate(tree)
        if not isinstance(tree, dict) or "metric" not in tree:
            raise AssayError("is not a result")
        return load_arrays(path, Evaluation.model_validate(tree))


def load_evaluations(paths: Iterable[Path]) -> dict[str, Evaluation]:
    """Evaluations from JSON files and tables by where they come from."""
    found: dict[str, Outcome | Evaluation] = {}
    for path in paths:
        if path.suffix == ".csv":
            found |= {f"{path}, line {line}": outcome for line, outcome in read_outcomes(path).items()}
        else:
            found[str(path)] = load_outcome(path)
    return {name: each.evaluation if isinstance(each, Outcome) else each for name, each in found.items()}


_CONFIGURATION = ["table", "dataset", "sigma", "clean_fraction", "sampling", "consistency", "rounds"]
_COUNTS = ["seed", "num_clean", "num_noisy"]
_FIRST = ["fd", "fd_std", "metric", "extractor", "num_images"]
_MEASURED = _FIRST + [name for name in Evaluation.model_fields if name not in (*_FIRST, *NOT_COLUMNS)]
_SECONDS = ["train_seconds", "sample_seconds", "held_out_loss_seconds"]
COLUMNS = _CONFIGURATION + _MEASURED + _COUNTS + _SECONDS
OTHER_NAMES = {"fid": "fd", "fid_std": "fd_std", "n_clean": "num_clean", "n_noisy": "num_noisy"}
OTHER_NAMES |= {"clean": "num_clean", "noisy": "num_noisy", "clean_images": "num_clean"}
OTHER_NAMES |= {"noisy_images": "num_noisy", "noise": "sigma", "noise_level": "sigma"}
OTHER_NAMES |= {"block": "seed", "loss": "held_out_loss"}
_OTHER_MARKS = {";": "semicolons", "\t": "tabs"}
_TEXT = ("dataset", "table", "metric", "extractor", "sampling")


def write_outcomes(path: Path, outcomes: Iterable[Outcome]) -> None:
    """Write `results.csv`; numbers in full, so that equal outcomes are equal files but for the seconds."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    for outcome in outcomes:
        configuration = outcome.configuration
        values = configuration.model_dump(exclude={"noisy"}) | {"consistency": int(configuration.consistency)}
        values |= {name: getattr(outcome.evaluation, name) for name in _MEASURED}
        values |= {name: getattr(outcome, name) for name in _SECONDS}
        values["sigma"] = " ".join(map(repr, configuration.levels))
        values["num_clean"] = _number(configuration.num_clean)
        values["num_noisy"] = " ".join(_number(number) for _, number in configuration.noisy) or "0"
        writer.writerow({name: csv_cell(value) for name, value in values.items()})
    write_text(path, buffer.getvalue())


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() and value < 1e15 else repr(value)


def read_table(table: Path | str | Any) -> tuple[Path, list[str], dict[int, list[str]]]:
    """The name of a CSV file, a DataFrame or columns; its header in plain spelling, and its cells by line."""
    if isinstance(table, str | Path):
        path = Path(table)
        with decoding(path, "give a CSV file"), open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            header = next(reader, [])
            rows = {line: row for row in reader if (line := reader.line_num) and any(map(str.strip, row))}
    else:
        path = Path("the table")
        try:
            columns = {str(name): list(values) for name, values in dict(table).items()}
        except (TypeError, ValueError):
            cure = "give a DataFrame, or columns: {'sigma': [...], ...}"
            raise AssayError("is no table", key="table", cure=cure) from None
        if len({len(values) for values in columns.values()}) > 1:
            raise AssayError("has columns of unequal length", path=path, cure="fill the shorter ones")
        cells = zip(*columns.values(), strict=True)
        filled = [["" if cell is None or cell != cell else str(cell) for cell in row] for row in cells]
        header, rows = [*columns], dict(enumerate(filled, 2))
    header = [name.strip().lower().replace(" ", "_") for name in header]
    check(_table_rules(path, header, rows))
    return path, header, rows


def _table_rules(path: Path, header: Sequence[str], rows: Mapping[int, Sequence[str]]) -> Rules:
    """There are rows, with as many cells as the header has, and commas between them."""
    yield not rows, AssayError("has no rows", path=path, cure="give a header and rows")
    mark = next((name for sign, name in _OTHER_MARKS.items() if len(header) == 1 and sign in header[0]), "")
    cure = "save it with commas, and decimals with a point"
    yield mark, AssayError(f"has {mark} between its cells", path=path, cure=cure)
    for line, row in rows.items():
        what = f"{len(row)} values, but the header names {len(header)}"
        cure = "correct the line; cells are separated by commas, and decimals have a point"
        yield len(row) != len(header), AssayError(what, path=f"{path}, line {line}", cure=cure)


def warn_if_stale(folder: Path) -> None:
    """Warn if a study has results that its results.csv lacks: it is written when the study ends or stops."""
    written = (folder / "results.csv").stat().st_mtime
    if num := sum(path.stat().st_mtime > written for path in folder.glob("runs/*/outcome-*.json")):
        what = f"{folder} has {num} newer results than its results.csv, which do not count here"
        warn(f"{what}: `assay study report {folder}` adds them")


def read_outcomes(table: Path | str | Any, num_images: float | None = None) -> dict[int, Outcome]:
    """Read a table of results; the keys are the lines that the outcomes stand on.

    `num_images` is the size of the data set if the table gives fractions; it is known for those of the paper.
    """
    path, header, rows = read_table(table)
    names = [OTHER_NAMES.get(name, name) for name in header]
    check(_column_rules(path, header, names))
    default = {"dataset": "" if "dataset" in names else path.stem, "metric": "FID" if "fid" in header else "FD"}
    found = {}
    for line, row in rows.items():
        cells = {name: text for name, value in zip(names, row, strict=True) if (text := value.strip())}
        cells |= {name: csv_text(cells[name]) for name in _TEXT if name in cells}
        try:
            with about(f"{path}, line {line}"), explaining(Outcome):
                found[line] = _read_outcome(default | cells, num_images)
        except AssayError as error:
            key = (error.key or "").removeprefix("configuration.").removeprefix("evaluation.").split(".")[0]
            theirs = dict(zip(names, header, strict=True)).get(key, key)
            error.key = key if theirs == key else f"column {theirs}"
            raise
    if num_copies := len(rows) - len(set(map(tuple, rows.values()))):
        what = f"{num_copies} of the {len(rows)} rows of {path.name} are copies"
        warn(f"{what}, which make intervals too narrow: remove them")
    _warn_of_equal_seeds(path.name, found.values())
    repeats: dict[Configuration, list[int]] = {}
    for line, outcome in found.items():
        repeats.setdefault(outcome.configuration, []).append(line)
    for of, lines in repeats.items():  # rows that name no seed are repeats in their order
        for seed, line in enumerate(lines if of.seed is None and len(lines) > 1 else ()):
            numbered = of.model_copy(update={"seed": seed})
            found[line] = found[line].model_copy(update={"configuration": numbered})
    _warn_of_numbers(path.name, found.values())
    warn_of_units(max((level for each in found.values() for level in each.configuration.levels), default=0))
    return found


def _column_rules(path: Path, header: Sequence[str], names: Sequence[str]) -> Rules:
    """The columns say what the results are."""
    needed = [] if {"clean_fraction", "noisy_fraction"} <= set(names) else ["num_clean", "num_noisy"]
    missing = [name for name in ("sigma", *needed) if name not in names]
    missing += ["fd or held_out_loss"] * (not {"fd", "held_out_loss"} & set(names))
    what = f"has no column {', '.join(missing)}; its header has {one_line(', '.join(header))}"
    cure = "see the columns in docs/howto/deciding.md"
    yield missing, AssayError(what, path=path, key=[*missing, ""][0], cure=cure)
    twice = min((name for name in names if names.count(name) > 1), default=None)
    yield twice, AssayError("is named twice", path=path, key=twice, cure="remove one of the columns")


def _warn_of_equal_seeds(name: str, outcomes: Iterable[Outcome]) -> None:
    """Warn of two seeds, or blocks, all of whose results are equal: one was copied."""
    by_seed: dict[int, dict[Configuration, tuple[float | None, ...]]] = {}
    for each in outcomes:
        if (seed := each.configuration.seed) is not None:
            values = tuple(each.value(metric) for metric in METRICS)
            by_seed.setdefault(seed, {})[each.configuration.without_seed] = values
    for one, other in combinations(by_seed, 2):
        both = by_seed[one].keys() & by_seed[other].keys()
        if len(both) > 2 and all(by_seed[one][of] == by_seed[other][of] for of in both):
            copied = f"{name} has the same {len(both)} results for seeds {one} and {other}"
            warn(f"{copied}: copies make intervals too narrow")


def _warn_of_numbers(name: str, outcomes: Collection[Outcome]) -> None:
    """Warn of numbers of images that may be thousands, and of results that get worse with more clean images."""
    parts = [(each.configuration.num_clean, *dict(each.configuration.noisy).values()) for each in outcomes]
    if (fewest := min(number for part in parts for number in part if number)) < 20:
        warn(f"{name} has results of {fewest:g} images: are its numbers in thousands?")
    for metric, dataset in product(METRICS, {each.configuration.dataset for each in outcomes}):
        of = [o for o in outcomes if o.configuration.dataset == dataset and not o.configuration.noisy]
        values = [(o.configuration.num_clean, value) for o in of if (value := o.value(metric))] or [(0, 0.0)]
        if max(values)[1] > 1.3 * min(values)[1]:
            ends = (f"{value:.4g} with {number:g}" for number, value in (min(values), max(values)))
            warn(f"{metric} in {name} is {' and '.join(ends)} clean images: is lower better?")


def _read_outcome(cells: Mapping[str, str], num_images: float | None) -> Outcome:
    size = num_images or NUM_IMAGES.get(cells["dataset"])
    clean, noisy = _numbers(cells, "num_clean"), _numbers(cells, "num_noisy")
    if not clean and size:
        parts = (_numbers(cells, name) for name in ("clean_fraction", "noisy_fraction"))
        clean, noisy = ([float(round(size * each)) for each in part] for part in parts)
    levels = _numbers(cells, "sigma") if any(noisy) else []
    if clean and not noisy and any(is_number(text) and float(text) for text in cells.get("sigma", "").split()):
        cure = "give it, 0 if there are none"
        raise AssayError("is not given, but there is a noise level", key="num_noisy", cure=cure)
    measured = {name: cells[name] for name in _MEASURED if name in cells}
    check(_row_rules(clean, noisy, levels, measured))
    fields: dict[str, Any] = {name: cells[name] for name in Configuration.model_fields if name in cells}
    fields |= {"num_clean": clean[0], "noisy": tuple(zip(levels, noisy, strict=False))}
    seconds = {name: cells[name] for name in _SECONDS if name in cells}
    return Outcome.model_validate({"configuration": fields, "evaluation": measured, **seconds})


def _row_rules(clean: list[float], noisy: list[float], levels: list[float], measured: dict[str, str]) -> Rules:
    """A row has images, a level for each number of noisy ones, and a possible result."""
    cure = "give numbers of images, or num_images, the size of the whole data set"
    what = "is not given" if len(clean) != 1 else "and num_noisy are 0: no images at all"
    yield len(clean) != 1 or not any((*clean, *noisy)), AssayError(what, key="num_clean", cure=cure)
    what = f"{len(levels)} levels, but {len(noisy)} numbers of noisy images" if levels else "is not given"
    error = AssayError(what, key="sigma", cure="give one for each (are num_clean and num_noisy swapped?)")
    yield any(noisy) and len(levels) != len(noisy), error
    what = f"{min(levels, default=1):g} is no noise level of noisy images"
    yield min(levels, default=1) <= 0, AssayError(what, key="sigma", cure="give it, or count them as clean")
    for name, text in measured.items():
        number, positive = float(text) if is_number(text) else 1.0, name in METRICS
        least = 0.0 if positive or name.endswith(("_error", "_std")) else -math.inf
        error = AssayError(f"{text} is impossible", key=name, cure="correct it, or leave it empty")
        yield not least <= number < math.inf or (positive and not number), error
    error = AssayError("there is no result", key="fd or held_out_loss", cure="give one, or remove the line")
    yield not METRICS.keys() & measured.keys(), error


def _numbers(cells: Mapping[str, str], name: str) -> list[float]:
    """The numbers in a cell, which has spaces between them."""
    texts = cells.get(name, "").split()
    if not all(is_number(text) and math.isfinite(float(text)) for text in texts):
        raise AssayError(f"{cells[name]!r} is not a number", key=name, cure="correct it, or leave it empty")
    return [float(text) for text in texts]
