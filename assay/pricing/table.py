"""Outcomes as arrays: what each model was trained on and the result it reached, where these can be compared.

A result is in a `Currency`, the held-out score or FD; lower is better in both.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.outcome import FD, SCORE, Currency, Outcome, Setting, read_outcomes

Array = NDArray[np.float64]
Rows = NDArray[np.int64]

PAPER = Path(__file__).with_name("fid_tables.csv")
# Sizes the paper gives (caption of its clean-mix table); ImageNet is stated as "about 1.3M".
PAPER_NUM_IMAGES = {"cifar10": 60_000, "celeba_hq": 30_000, "imagenet": 1_300_000}
# The studies of studies/paper by name, and the paper's name of their data.
PAPER_STUDIES = {"paper-cifar10": "cifar10", "paper-celeba": "celeba_hq", "paper-imagenet": "imagenet"}
# FID of its configurations B to E on ImageNet, by the names that studies/paper/imagenet.toml gives them.
PAPER_CONFIGURATIONS = {
    "B: more training": 1.63,
    "C: more steps below the noise": 1.60,
    "D: consistency": 1.58,
    "E: weight decay": 1.55,
}
# Boxed bounds on 1 / c in the paper's section on pricing, by data set and sigma.
PAPER_BOXES = {
    ("cifar10", 0.05): (1.17, 1.25), ("celeba_hq", 0.05): (1.17, 1.25), ("imagenet", 0.05): (1.125, 1.17),
    ("cifar10", 0.1): (1.25, 1.5), ("celeba_hq", 0.1): (1.25, 1.5), ("imagenet", 0.1): (1.125, 1.17),
    ("cifar10", 0.2): (1.5, 1.75), ("celeba_hq", 0.2): (1.5, 1.75), ("imagenet", 0.2): (1.5, 1.75),
}  # fmt: skip


@dataclass(frozen=True)
class Comparable:
    """Outcomes that can be compared, all arrays (n,): each setting once, clean-only ones with sigma 0.

    `num_clean` and `num_noisy` are images if `counted`, else parts of the data set. `value` is the result, in
    the currency `metric`, and `std` its error in comparisons with the other rows. `line` is the line of the
    file an outcome stands on, and `num_runs` how many trainings it averages. `has_std` is false when no
    standard deviation is known; where some are, the `num_without_std` outcomes that lack one have the largest
    of the others; `num_many_levels` others with several noise levels were left out, and `num_few_clean` with
    too small a part of clean images. `from_paper` says whether the file is the paper's.
    """

    name: str
    line: NDArray[np.int64]
    sigma: Array
    num_clean: Array
    num_noisy: Array
    value: Array
    std: Array
    counted: bool
    has_std: bool
    num_runs: Rows
    num_without_std: int = 0
    num_many_levels: int = 0
    num_few_clean: int = 0
    metric: str = "FD"
    dataset: str = ""
    from_paper: bool = False

    @property
    def called(self) -> str:
        """The currency in a sentence."""
        return f"the held-out {self.metric}" if self.metric.startswith("score") else self.metric

    def __len__(self) -> int:
        return len(self.line)

    def take(self, keep: NDArray[np.bool_] | NDArray[np.int64]) -> "Comparable":
        """The rows of a mask or of indices."""
        columns: dict[str, Any] = {n: v[keep] for n, v in vars(self).items() if isinstance(v, np.ndarray)}
        return replace(self, **columns)

    def setting(self, row: int) -> Setting:
        """What a row was trained on; its `str` are words for it."""
        noisy = ((float(self.sigma[row]), float(self.num_noisy[row])),) if self.num_noisy[row] else ()
        return Setting(num_clean=float(self.num_clean[row]), noisy=noisy, counted=self.counted)


def read_comparable(path: Path, **choice: Any) -> list[Comparable]:
    """The comparable outcomes of a CSV file; `choice` as for `comparable`.

    Without a currency they are compared by the score if the file has it, else by FD.
    """
    outcomes = read_outcomes(path)
    if choice.get("currency") is None:
        choice["currency"] = SCORE if any(map(SCORE.value, outcomes.values())) else FD
    found = comparable(outcomes, str(path), **choice)
    return [replace(each, from_paper=path.resolve() == PAPER.resolve()) for each in found]


def read_one(path: Path, **choice: Any) -> Comparable:
    """The same for a file with one data set, measured with one extractor; others are rejected."""
    found = read_comparable(path, **choice)
    if len(found) > 1:
        names = ", ".join(results.name for results in found)
        if len({results.dataset for results in found}) > 1:
            raise ValueError(f"{path} has several data sets ({names}): choose one with dataset")
        raise ValueError(f"{path} has rows of several extractors ({names}): keep the rows of one extractor")
    return found[0]


def comparable(
    outcomes: Mapping[int, Outcome],
    where: str,
    *,
    table: str | None = None,
    dataset: str | None = None,
    num_images: float | None = None,
    min_clean_fraction: float = 0.1,
    currency: Currency = FD,
) -> list[Comparable]:
    """The outcomes by line that can be compared, as arrays for each data set (and extractor, by FD).

    Kept are those that were measured in the currency, with clean images, at least `min_clean_fraction` of them,
    full sampling, no consistency loss and no loops; of `dataset`, if given; and of `table`, which is
    `clean_mix` where there is one and none is given. `num_images` turns parts of the data set into numbers of
    images. `where` the outcomes come from is for error messages.
    """
    settings = {line: outcome.setting for line, outcome in outcomes.items()}
    if table is None and any(setting.table == "clean_mix" for setting in settings.values()):
        table = "clean_mix"
    for name, wanted in (("table", table), ("dataset", dataset)):
        known = {getattr(setting, name) for setting in settings.values()}
        if wanted is not None and wanted not in known:
            raise ValueError(f"{where}: column {name} has no {wanted!r}; it has {', '.join(sorted(known))}")
    usable = [
        line
        for line, setting in settings.items()
        if setting.num_clean > 0
        and (setting.sampling, setting.consistency, setting.loops) == ("full", False, 0)
        and table in (None, setting.table)
        and dataset in (None, setting.dataset)
        and currency.value(outcomes[line]) is not None
    ]
    kept = [line for line in usable if _clean_fraction(settings[line]) >= min_clean_fraction - 1e-9]
    if not any(setting.num_clean > 0 for setting in settings.values()):
        raise ValueError(f"{where}: no row has clean images, and a price compares noisy images with clean ones")
    if not kept:
        raise ValueError(
            f"{where}: none of the lines {min(settings)} to {max(settings)} has full sampling, no consistency "
            f"loss, clean images, clean_fraction >= {min_clean_fraction:g} and a value in "
            f"column {currency.name}"
        )
    groups: dict[tuple[str, str], list[int]] = {}
    for line in usable:
        extractor = "" if currency.shared_error else outcomes[line].evaluation.extractor
        groups.setdefault((settings[line].dataset, extractor), []).append(line)
    found = []
    for group, lines in groups.items():
        chosen = {line: outcomes[line] for line in lines if line in kept}
        if chosen:
            results = _arrays(chosen, " ".join(filter(None, group)), where, num_images, currency)
            found.append(replace(results, num_few_clean=len(lines) - len(chosen)))
    return found


def _clean_fraction(setting: Setting) -> float:
    """The clean part of the data set, or of the training images if that is not known."""
    if setting.clean_fraction is not None:
        return setting.clean_fraction
    return setting.num_clean / (setting.num_clean + setting.num_noisy)


def _arrays(
    outcomes: Mapping[int, Outcome], name: str, where: str, num_images: float | None, currency: Currency
) -> Comparable:
    """Outcomes of one data set and extractor as arrays, repeats averaged."""
    num_all = len(outcomes)
    outcomes = {line: outcome for line, outcome in outcomes.items() if len(outcome.setting.noisy) <= 1}
    if not outcomes:
        raise ValueError(f"{where}: all usable rows of {name} have several noise levels; a price needs one")
    settings = [outcome.setting for outcome in outcomes.values()]
    if num_images is not None:
        settings = [setting.in_images(num_images) for setting in settings]
    lines = list(outcomes)
    for what, values in (
        ("num_images", [currency.num_images(outcome) for outcome in outcomes.values()]),
        ("metric", [currency.title(outcome) for outcome in outcomes.values()]),
        ("num_clean", ["given" if setting.counted else "empty" for setting in settings]),
    ):
        if other := next((i for i, value in enumerate(values) if value != values[0]), 0):
            raise ValueError(
                f"{where}: {name} cannot be compared, column {what} is {values[0]} in line {lines[0]} and "
                f"{values[other]} in line {lines[other]}; keep rows that were measured in the same way"
            )
    columns: dict[str, list[float | None]] = {
        "sigma": [setting.sigma or 0.0 for setting in settings],
        "num_clean": [setting.num_clean for setting in settings],
        "num_noisy": [setting.num_noisy for setting in settings],
        "value": [currency.value(outcome) for outcome in outcomes.values()],
        "std": [currency.error(outcome) for outcome in outcomes.values()],
    }
    arrays: dict[str, Any] = {
        key: np.array(column, dtype=np.float64) for key, column in columns.items()
    }  # None is NaN
    found = Comparable(
        name=name,
        line=np.array(lines),
        **arrays,
        counted=settings[0].counted,
        has_std=True,
        num_runs=np.ones(len(lines), dtype=np.int64),
        metric=currency.title(outcomes[lines[0]]),
        num_many_levels=num_all - len(outcomes),
        dataset=settings[0].dataset,
    )
    seeds = np.array([setting.seed for setting in settings], dtype=object)
    found = _merge_repeats(found, seeds, where, currency.shared_error)
    first, last = found.line.min(), found.line.max()
    if len(found) < 2:
        raise ValueError(f"{where}: {name} has one usable row (line {first}): add others to compare it with")
    if np.ptp(found.value) == 0:
        raise ValueError(
            f"{where}: {found.metric} is {found.value[0]:g} in every usable row of {name} (lines {first} to "
            f"{last}): the table cannot tell its settings apart"
        )
    return found


def _rounding_std(values: Array) -> float:
    """Standard deviation of the rounding: a value given as 2.40 may be anything from 2.395 to 2.405."""
    for decimals in range(7):
        if np.array_equal(np.round(values, decimals), values):
            return float(10.0**-decimals / np.sqrt(12))
    return 0.0


def _merge_repeats(found: Comparable, seed: NDArray[np.object_], where: str, shared_error: bool) -> Comparable:
    """Average rows of one setting that differ in their seed; reject those that contradict each other.

    Here `std` of a row may be NaN, for unknown; of what is returned it is known, if the table has any.

    The deviation of an FD comes from its samples, which every run draws again: the mean over runs has a smaller
    one, and the spread between runs contains it. A `shared_error`, as that of a score, comes from held-out
    images that are the same for all runs: it stays, and the spread between runs is added. Single runs are
    given the largest spread that is known.
    """
    settings = np.stack([found.sigma, found.num_clean, found.num_noisy], 1)
    _, first, which, count = np.unique(settings, True, True, True, axis=0)
    which = which.reshape(-1)
    rows_of = np.split(np.argsort(which, kind="stable"), np.cumsum(count)[:-1])
    spread, num_runs = np.zeros(len(count)), np.ones(len(count), dtype=np.int64)
    for setting in np.flatnonzero(count > 1):
        rows = rows_of[setting]
        if len(set(seed[rows])) == len(rows):
            spread[setting], num_runs[setting] = found.value[rows].var(ddof=1), len(rows)
        elif np.ptp(found.value[rows]) > 0:
            lines, values = (", ".join(f"{v:g}" for v in column[rows]) for column in (found.line, found.value))
            raise ValueError(
                f"{where}: lines {lines} give {found.metric} {values} for the same setting "
                f"({found.setting(rows[0])}); keep one of them, or tell repeats apart in a column `seed`"
            )
    rounding, std = _rounding_std(found.value), np.nan_to_num(found.std)
    # A 0 next to values of the same precision is rounded, as 0.00 next to 2.06; otherwise it is missing.
    zeros_are_rounded = 0 < _rounding_std(std) <= rounding
    unknown = np.isnan(found.std) | ((std == 0) & (not zeros_are_rounded))
    unknown &= spread[which] == 0
    largest = max(float(std.max()), float(np.sqrt(spread.max())))
    if largest > 0:  # taken for exact, these rows would make every comparison with them certain
        std[unknown] = largest
    var = np.bincount(which, std**2 + rounding**2) / count
    if shared_error:
        var += np.where(num_runs > 1, spread, spread.max()) / num_runs
    else:
        var = np.maximum(var, spread) / num_runs
    order = np.argsort(first)
    return replace(
        found.take(first[order]),
        value=(np.bincount(which, found.value) / count)[order],
        std=np.sqrt(var[order]),
        has_std=largest > 0,
        num_runs=num_runs[order],
        num_without_std=int(unknown.sum()) if largest > 0 else 0,
    )
