"""One record from evaluation to report: a `Setting`, its measurements, and the time they took.

A study writes one `Outcome` as JSON for each way of sampling each model; `gather` makes the same record from
a result of `assay evaluate`. All tables, prices and reports are functions of outcomes, which travel between
commands as `results.csv`, written and read here alone. Its columns:

    dataset, table                    the data set, and the table or extra of a study (optional)
    sigma                             noise level of the noisy images; empty without any
    num_clean, num_noisy              numbers of images, or if these are not known
    clean_fraction, noisy_fraction    parts of the data set
    sampling, consistency, seed       full, truncated or refined; 0 or 1; of training (optional)
    loops                             how often images were restored and trained on again (optional)
    fd, fd_std, metric                the distance, its deviation over ranges of samples, and its name
    score, score_error, ...           the held-out score in nats per dimension (see `Evaluation`)
    extractor, num_images, kid, ...   the other fields of `Evaluation`; empty where not measured
    train_seconds, sample_seconds,    what it took: training, sampling and measuring, and scoring
    score_seconds

A cell may hold several noise levels, separated by spaces; `num_noisy` then holds as many numbers. The paper's
tables, with `fid` and `fid_std`, are read as well; columns not named here are ignored.
"""

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from assay.checkpoint import CheckpointInfo
from assay.files import Name, csv_cell, csv_text, is_number, naming, one_line, write_whole
from assay.metrics.evaluate import NOT_COLUMNS, Evaluation, compare
from assay.metrics.score import Score, paired_errors
from assay.sample import SampleConfig

Sampling = Literal["full", "truncated", "refined"]
_MAX_LEVELS_IN_WORDS = 3


class Setting(BaseModel):
    """What a model was trained on and how it was trained and sampled.

    `num_clean` and the numbers in `noisy`, one (noise level, number) per level, are images if `counted`, else
    parts of the data set. `clean_fraction` is the part of the data set that is clean where that was simulated.
    `table` names the table of a study or the variant of training that the setting belongs to.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    dataset: Name = ""
    table: Name = ""
    num_clean: float = Field(ge=0, allow_inf_nan=False)
    noisy: tuple[tuple[float, float], ...] = ()
    counted: bool = True
    clean_fraction: float | None = Field(None, ge=0, le=1)
    consistency: bool = False
    loops: int = Field(0, ge=0)
    sampling: Sampling = "full"
    seed: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _parts_say_the_fraction(cls, values: Any) -> Any:
        if isinstance(values, dict) and not values.get("counted", True):
            return values | {"clean_fraction": values["num_clean"]}
        return values

    @field_validator("noisy")
    @classmethod
    def _in_order(cls, noisy: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
        if not all(0 < level < math.inf and 0 <= number < math.inf for level, number in noisy):
            raise ValueError("noisy images have a level > 0, and their number is at least 0")
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
    def without_seed(self) -> "Setting":
        """What repeats with other seeds have in common."""
        return self.model_copy(update={"seed": None})

    def in_images(self, num_images: float) -> "Setting":
        """Parts of a data set of `num_images` as numbers of images; counts stay as they are."""
        return self if self.counted else self._with(num_images * self.num_clean, self.noisy, num_images)

    def with_counts(self, counts: "Setting") -> "Setting":
        """The same setting with the numbers of images of another record of it."""
        return self._with(counts.num_clean, counts.noisy, 1.0)

    def _with(self, num_clean: float, noisy: Iterable[tuple[float, float]], scale: float) -> "Setting":
        numbers = tuple((level, scale * number) for level, number in noisy)
        return self.model_copy(update={"num_clean": num_clean, "noisy": numbers, "counted": True})

    def words(self, shares: bool = False, levels: bool = True) -> str:
        """The setting in words, "200 clean + 1,800 noisy at 0.3, consistency".

        `shares`: as parts of the data set where those are known, "10% clean + 90% noisy at 0.3". Without
        `levels` the noise levels are left out.
        """
        text: Callable[[float], str] = "{:,.0f}".format
        clean, noisy = self.num_clean, dict(self.noisy)
        if self.clean_fraction is not None and (shares or not self.counted):
            text = percent
            if self.counted:
                scale = (1 - self.clean_fraction) / max(self.num_noisy, 1)
                clean, noisy = self.clean_fraction, {level: scale * number for level, number in self.noisy}
        if len(noisy) > _MAX_LEVELS_IN_WORDS or not levels:
            at_levels = f" at {min(noisy):g} to {max(noisy):g}" if noisy and levels else ""
            parts = [f"{text(sum(noisy.values()))} noisy{at_levels}"] if noisy else []
        else:
            parts = [f"{text(number)} noisy at {level:g}" for level, number in noisy.items()]
        parts = [f"{text(clean)} clean"] * (clean > 0 or not parts) + parts
        marks = [f"{self.sampling} sampling"] * (self.sampling != "full") + ["consistency"] * self.consistency
        marks += [f"{self.loops} loop" + "s" * (self.loops > 1)] * (self.loops > 0)
        return ", ".join([" + ".join(parts), *marks])

    def __str__(self) -> str:
        return self.words()

    @property
    def title(self) -> str:
        """The words with the name of the extra and the seed."""
        extra = f"{self.table}: " if self.table not in ("", "clean_mix", "only_noisy") else ""
        return f"{extra}{self}" + ("" if self.seed is None else f" (seed {self.seed})")

    def __lt__(self, other: "Setting") -> bool:
        return self._order() < other._order()

    def _order(self) -> tuple[Any, ...]:
        """Clean-only settings first, then by noise; more clean images first; repeats together."""
        seed = -1 if self.seed is None else self.seed
        way = self.sampling, self.consistency, self.loops
        return self.dataset, self.table, self.noisy != (), self.noisy, -self.num_clean, *way, seed


def percent(part: float) -> str:
    """A part as a percentage with the digits it takes: "10%", "0.1%", "99.95%"; only all of it is "100%"."""
    slack = 0.5 * min(part, 1 - part)  # percentage points: 0.5 % of the part, or of the rest
    decimals = next(n for n in range(16) if n == 15 or abs(round(100 * part, n) - 100 * part) <= slack)
    return f"{round(100 * part, decimals):.{decimals}f}%"


class Outcome(BaseModel):
    """A setting, what was measured of its model, and the seconds of training, sampling and scoring."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    setting: Setting
    evaluation: Evaluation
    train_seconds: float | None = None
    sample_seconds: float | None = None
    score_seconds: float | None = None


@dataclass(frozen=True)
class Currency:
    """What a table, a price or a report counts in: a number of each outcome with its error; less is better.

    `name` is that of its column and in the names of files, `title` in words, and `form` is how numbers are
    written; `about` says what was measured. `num_images` must agree where outcomes are compared. A
    `shared_error` is one of images that all models were measured on, which more runs do not shrink.
    """

    name: str
    value: Callable[[Outcome], float | None]
    error: Callable[[Outcome], float | None]
    title: Callable[[Outcome], str]
    num_images: Callable[[Outcome], int | None] = lambda outcome: outcome.evaluation.num_images
    shared_error: bool = False
    form: str = ".3g"
    about: str = ""


def metric(name: str) -> Currency:
    """A metric of `Evaluation` by its name there."""
    error = next((e for e in (f"{name}_error", f"{name}_std") if e in Evaluation.model_fields), None)
    title = Evaluation.model_fields[name].title or name
    return Currency(
        name,
        value=lambda outcome: getattr(outcome.evaluation, name),
        error=lambda outcome: None if error is None else getattr(outcome.evaluation, error),
        title=lambda outcome: title,
    )


FD = replace(
    metric("fd"),
    title=lambda outcome: outcome.evaluation.metric,
    form=".2f",
    about="The distance between samples of each model, at the end of its training (or at the step `fd_step` in "
    "results.csv, where the study asks for the best snapshot), and real images.",
)
SCORE = replace(
    metric("score"),
    error=lambda outcome: outcome.evaluation.score_paired_error or outcome.evaluation.score_error,
    num_images=lambda outcome: outcome.evaluation.score_images,
    shared_error=True,
    form=".3f",
    about="The error of denoising held-out images, over all noise levels, in nats per dimension: differences "
    "are differences of KL divergence. Each model is scored at its best stopping time, which was chosen on "
    "other held-out images. The score punishes memorising and says little about looks.",
)
SCORE_ABOVE = replace(
    SCORE,
    name="score_above",
    value=lambda outcome: outcome.evaluation.score_above,
    error=lambda outcome: outcome.evaluation.score_above_error,
    title=lambda outcome: f"score above {outcome.evaluation.score_split or 0:.3g}",
    about="The part of the held-out score at levels above the highest noise of the study: what noisy images "
    "can teach directly.",
)
CURRENCIES = {currency.name: currency for currency in (SCORE, SCORE_ABOVE, FD)}


def trained_setting(info: CheckpointInfo, dataset: str, sample: SampleConfig | None = None) -> Setting:
    """The setting of a checkpoint, from what it records of its training, and of how it was sampled."""
    sample = sample or SampleConfig()
    if info.num_images is None or not info.sigma_tn:
        raise ValueError("its checkpoint does not say how many images of which noise it was trained on")
    ends = [0, *(round(part * info.num_images) for part in accumulate(part for _, part in info.sigma_tn))]
    # Levels were float32: 0.3 and not 0.30000001192.
    levels = [float(f"{level:.7g}") for level, _ in info.sigma_tn]
    numbers = dict(zip(levels, (stop - start for start, stop in pairwise(ends)), strict=True))
    return Setting(
        dataset=dataset,
        num_clean=numbers.pop(0.0, 0),
        noisy=tuple(numbers.items()),
        consistency=bool(info.consistency),
        loops=info.loops,
        sampling="truncated" if sample.truncate_at else "refined" if sample.refine_at else "full",
        seed=info.seed,
    )


def save_outcome(path: Path, outcome: Outcome) -> None:
    """Write an outcome as JSON."""
    with write_whole(path) as partial:
        partial.write_text(outcome.model_dump_json(indent=2) + "\n")


def load_outcome(path: Path) -> Outcome | Evaluation:
    """Read an outcome of a study, or a result of `assay evaluate`."""
    with naming(path, "give a result of `assay evaluate` or of a study"):
        tree = json.loads(path.read_bytes())
        is_outcome = isinstance(tree, dict) and "setting" in tree
        return Outcome.model_validate(tree) if is_outcome else Evaluation.model_validate(tree)


def _load_all(paths: Iterable[Path]) -> dict[str, Outcome | Evaluation]:
    """The contents of JSON files and tables by where they come from."""
    found: dict[str, Outcome | Evaluation] = {}
    for path in paths:
        if path.suffix == ".csv":
            found |= {f"{path}, line {line}": outcome for line, outcome in read_outcomes(path).items()}
        else:
            found[str(path)] = load_outcome(path)
    return found


def load_evaluations(paths: Iterable[Path]) -> dict[str, Evaluation]:
    """Evaluations from JSON files and tables by where they come from."""
    found = _load_all(paths).items()
    return {name: each.evaluation if isinstance(each, Outcome) else each for name, each in found}


def gather(paths: Iterable[Path]) -> list[Outcome]:
    """Outcomes from JSON files and tables, sorted.

    Of a result of `assay evaluate` the checkpoint must know its training. An error if some results of one data
    set and extractor cannot be compared.
    """
    found = {
        name: each if isinstance(each, Outcome) else _outcome_of(each, name)
        for name, each in _load_all(paths).items()
    }
    groups: dict[tuple[str, str], dict[str, Evaluation]] = {}
    for name, outcome in found.items():
        group = groups.setdefault((outcome.setting.dataset, outcome.evaluation.extractor), {})
        group[name] = outcome.evaluation
    for group in groups.values():
        compare(group)
    return sorted(with_paired_errors(list(found.values())), key=lambda outcome: outcome.setting)


def with_paired_errors(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The outcomes with the errors of their scores in comparisons with each other, where those are known.

    Models scored on the same images and noise share most of their error (see `paired_errors`).
    """
    alike: dict[object, dict[str, Score]] = {}
    for outcome in outcomes:
        if record := outcome.evaluation.score_record:
            key = record.fingerprint, record.config, record.index
            alike.setdefault(key, {})[record.errors] = record  # a model sampled in several ways counts once
    splits = {outcome.evaluation.score_split for outcome in outcomes}
    lows = {"score_paired_error": 0.0}
    if len(splits) == 1 and (split := splits.pop()) is not None:
        lows["score_above_error"] = split
    errors: dict[str, dict[str, float]] = {}
    for records in alike.values():
        for name, low in lows.items() if len(records) > 1 else ():
            for model, error in zip(records, paired_errors(list(records.values()), low), strict=True):
                errors.setdefault(model, {})[name] = error
    found = []
    for outcome in outcomes:
        record = outcome.evaluation.score_record
        update = errors.get(record.errors, {}) if record else {}
        found.append(outcome.model_copy(update={"evaluation": outcome.evaluation.model_copy(update=update)}))
    return found


def _outcome_of(evaluation: Evaluation, name: str) -> Outcome:
    details, record = evaluation.details, evaluation.score_record
    sampler = details.sampler if details else None
    try:
        if details and sampler:
            setting = trained_setting(sampler.info, details.reference, sampler.sample)
        elif record and record.info:
            setting = trained_setting(record.info, record.held_out)
        else:
            raise ValueError("it does not say what its model was trained on, as a checkpoint would")
    except ValueError as error:
        raise ValueError(f"{name}: {error}; add a row for it by hand") from error
    return Outcome(setting=setting, evaluation=evaluation)


# --- results.csv -------------------------------------------------------------------------------------------

_SETTING = ["table", "dataset", "sigma", "clean_fraction", "noisy_fraction", "sampling", "consistency", "loops"]
_COUNTS = ["seed", "num_clean", "num_noisy"]
_FIRST = ["fd", "fd_std", "metric", "extractor", "num_images"]
_MEASURED = _FIRST + [name for name in Evaluation.model_fields if name not in (*_FIRST, *NOT_COLUMNS)]
_SECONDS = ["train_seconds", "sample_seconds", "score_seconds"]
COLUMNS = _SETTING + _MEASURED + _COUNTS + _SECONDS


def write_outcomes(path: Path, outcomes: Iterable[Outcome]) -> None:
    """Write `results.csv`; numbers in full, so that equal outcomes are equal files but for the seconds."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    for outcome in outcomes:
        setting, evaluation = outcome.setting, outcome.evaluation
        values = {name: getattr(setting, name) for name in _SETTING if name in Setting.model_fields}
        values |= {name: getattr(evaluation, name) for name in _MEASURED}
        values |= {name: getattr(outcome, name) for name in _SECONDS}
        values |= {"consistency": int(setting.consistency), "seed": setting.seed}
        values |= {"sigma": " ".join(repr(level) for level, _ in setting.noisy)}
        numbers = " ".join(_number(number) for _, number in setting.noisy) or "0"
        if setting.counted:
            values |= {"num_clean": _number(setting.num_clean), "num_noisy": numbers}
        else:
            values["noisy_fraction"] = numbers
        writer.writerow({name: csv_cell(value) for name, value in values.items()})
    with write_whole(path) as partial:
        partial.write_text(buffer.getvalue(), encoding="utf-8")


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() and value < 1e15 else repr(value)


def read_outcomes(path: Path) -> dict[int, Outcome]:
    """Read a table of results; the keys are the lines that the outcomes stand on."""
    cure = "give a CSV file of results"
    with naming(path, cure), open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file)
        header = [name.strip().lower() for name in next(reader, [])]
        rows = {line: row for row in reader if row and (line := reader.line_num)}
    if not rows:
        raise ValueError(f"{path} has no rows: expected a header and results")
    called = {name: name.replace("fd", "fid") for name in ("fd", "fd_std") if name not in header}
    names = [next((ours for ours, theirs in called.items() if theirs == name), name) for name in header]
    _check_header(path, names, header)
    dataset, found = "" if "dataset" in header else path.stem, {}
    for line, row in rows.items():
        if len(row) != len(header):
            raise ValueError(f"{path}, line {line}: {len(row)} values, but the header names {len(header)}")
        filled = {name: text for name, value in zip(names, row, strict=True) if (text := value.strip())}
        try:
            found[line] = _read_outcome(_Cells(f"{path}, line {line}", filled, called), dataset)
        except ValidationError as error:
            fault = error.errors()[0]
            raise ValueError(f"{path}, line {line}, column {fault['loc'][0]}: {fault['msg']}") from None
    return found


def _check_header(path: Path, names: list[str], header: list[str]) -> None:
    needed = ["sigma"] if "score" in names else ["fd", "sigma"]
    if not {"num_clean", "num_noisy"} <= set(names):
        needed += ["clean_fraction", "noisy_fraction"]
    if missing := [name for name in needed if name not in names]:
        name = "score, fd or fid" if missing[0] == "fd" else missing[0]
        raise ValueError(f"{path}: column {name} is missing; the header has {one_line(', '.join(header))}")
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{path}: column {one_line(min(twice))} is named twice: remove one of them")


def _read_outcome(cells: "_Cells", dataset: str) -> Outcome:
    names = {"metric": "FID" if "fd" in cells.called and "fd" in cells.cells else "FD", "extractor": ""}
    measured = {name: cells.number(name) for name in _MEASURED if name in cells.cells and name not in names}
    needs_fd, rule = "score" not in measured, "a Frechet distance is finite and > 0"
    cells.check("fd", measured.get("fd"), lambda v: v > 0, rule, required=needs_fd)
    cells.check("score", measured.get("score"), lambda v: v > 0, "a score is finite and > 0")
    for name in ("fd_std", "score_error", "score_paired_error", "score_above_error"):
        cells.check(name, measured.get(name), lambda v: v >= 0, "a standard deviation is at least 0")
    evaluation: dict[str, Any] = measured | {name: cells.text(name) or known for name, known in names.items()}
    return Outcome(
        setting=_read_setting(cells, dataset),
        evaluation=Evaluation(**evaluation),
        train_seconds=cells.number("train_seconds"),
        sample_seconds=cells.number("sample_seconds"),
        score_seconds=cells.number("score_seconds"),
    )


def _read_setting(cells: "_Cells", dataset: str) -> Setting:
    part, count = "a fraction lies in [0, 1]", "a number of images is at least 0"
    fraction = cells.number("clean_fraction")
    cells.check("clean_fraction", fraction, lambda v: 0 <= v <= 1, part)
    counted = fraction is None or cells.number("num_clean") is not None
    first, second = ("num_clean", "num_noisy") if counted else ("clean_fraction", "noisy_fraction")
    most, rule = (math.inf, count) if counted else (1.0, part)
    clean, noisy, levels = cells.number(first), list(cells.numbers(second)), list(cells.numbers("sigma"))
    cells.check(first, clean, lambda v: 0 <= v <= most, rule, required=True)
    for number in noisy:
        cells.check(second, number, lambda v: 0 <= v <= most, rule)
    if sum(noisy) == 0:
        levels, noisy = [], []
        cells.check(first, clean, lambda v: v > 0, "with no noisy images either, there is no data")
    cells.check(
        "sigma", min(levels, default=None), lambda v: v > 0, "noisy images need a level > 0", bool(noisy)
    )
    if len(levels) != len(noisy):
        raise ValueError(f"{cells.where}: {len(levels)} levels in sigma, {len(noisy)} numbers in {second}")
    known: dict[str, Any] = {
        "noisy": tuple(zip(levels, noisy, strict=True)),
        "num_clean": clean,
        "counted": counted,
    }
    known |= {"dataset": cells.text("dataset") or dataset, "table": cells.text("table")}
    known |= {"clean_fraction": fraction, "sampling": cells.text("sampling") or "full"}
    known |= {"consistency": bool(cells.number("consistency")), "seed": cells.number("seed")}
    known |= {"loops": cells.number("loops") or 0}
    return Setting.model_validate(known)


@dataclass(frozen=True)
class _Cells:
    """The filled cells of a row by column; every error names the line and the column as in the file."""

    where: str
    cells: Mapping[str, str]
    called: Mapping[str, str]  # columns that have another name in this file

    def text(self, name: str) -> str:
        """A cell, "" if it is empty."""
        return csv_text(self.cells.get(name, ""))

    def number(self, name: str) -> float | None:
        """A cell as a number, None if it is empty."""
        return next(self.numbers(name), None) if name in self.cells else None

    def numbers(self, name: str) -> Iterator[float]:
        """The numbers of a cell."""
        for text in self.text(name).split():
            if not is_number(text):
                raise ValueError(
                    f"{self.where}, column {self.called.get(name, name)}: {text!r} is not a number"
                )
            self.check(name, value := float(text), lambda v: True, "expected a finite number")
            yield value

    def check(
        self, name: str, value: float | None, good: Callable[[float], bool], rule: str, required: bool = False
    ) -> None:
        """Reject a value that breaks a rule, or that is not finite."""
        if (value is None and not required) or (value is not None and math.isfinite(value) and good(value)):
            return
        shown = "empty" if value is None else f"{value:g}"
        raise ValueError(f"{self.where}, column {self.called.get(name, name)} is {shown}: {rule}")
