"""Writes what the reference studies found into the pages about them, from their committed results alone.

    python studies/findings.py            renews the pages and pictures
    python studies/findings.py quotes     also renews the quotes, from the images themselves

A block between `<!-- findings: WHAT -->` and `<!-- end -->` is replaced; a test compares every block with what
the committed numbers give, so no figure on a page can differ from them.
"""

import csv
import itertools
import re
import statistics
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student_t
from scipy.stats import ttest_rel

from assay.figure import Panel, save_png
from assay.outcome import Outcome, read_outcomes
from assay.pricing import (
    PAPER,
    LevelResults,
    Prices,
    Quote,
    price,
    price_all,
    price_results,
    quote,
    read_levels,
)
from assay.pricing.quote import quoted_at
from assay.pricing.words import amount, detail_table, price_panels
from assay.study import open_study

HERE = Path(__file__).parent
ROOT = HERE.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "docs/findings.md",
    ROOT / "docs/galaxies.md",
    ROOT / "docs/howto/restore.md",
    HERE / "README.md",
    *sorted(HERE.glob("*/README.md")),
]
STUDIES = {
    "demo": "Fashion-MNIST, 8x8 (the demo)",
    "digits": "digits, 8x8",
    "fashion-mnist": "Fashion-MNIST, 16x16",
    "cifar10": "CIFAR-10, 32x32",
    "galaxies": "galaxies, 16x16",
    "emoji": "emoji, 16x16 (by `study init`)",
}
UNREGISTERED = ("demo", "emoji")  # no claims are tested on these
# Where the gain of mixes was not predicted, and why.
UNPREDICTED = {
    "cifar10": "probably because training, not data, was the limit (most runs were best at their last step),\n"
    "and mixes, which draw images first there, train below the noise a tenth as often as clean images alone"
}
GALAXIES_LOOKS = (
    "galaxies-looks"  # whose galaxies know their kind, so that a classifier can tell how samples look
)
HEADLINE = "digits"  # the study that page one quotes
ABOUT_HEADLINE = "handwritten digits of 8x8 pixels, 40 to 400 of them, with a small U-Net"
ERROR_RATE = 0.05  # of the whole family of claims
NO_RESULTS = "*No results yet.*"
OF_RUNS = ("block", "num_clean", "num_noisy", "loss", "error", "step", "last_step", "loss_last")
PAIRINGS = ("level_first", "image_first")  # of the mixes of studies/more-blocks
MORE = {
    "digits": "Holm",
    "fashion-mnist": "in order",
    "galaxies": "in order",
    "cifar10": "in order",
}  # its data, and its correction
Array = NDArray[np.float64]


def measured_studies() -> list[str]:
    """The registered studies whose results are committed."""
    found = (name for name in STUDIES if name not in UNREGISTERED)
    return [name for name in found if (HERE / name / "levels.csv").exists()]


@cache
def blocks_of(study: str) -> tuple[int, int]:
    """How many blocks of a registered study have results, and how many were registered."""
    with open(HERE / study / "study.toml", "rb") as file:
        return len(np.unique(levels_of(study).block)), tomllib.load(file)["design"]["blocks"]


def finished_studies() -> list[str]:
    """The registered studies with all of their blocks: those whose claims are tested."""
    return [study for study in measured_studies() if len(set(blocks_of(study))) == 1]


def title_of(study: str) -> str:
    """What a study is about, and how much of it there is."""
    if study not in measured_studies() or study in finished_studies():
        return STUDIES[study]
    have, registered = blocks_of(study)
    return f"{STUDIES[study]} ({have} of {registered} blocks)"


@cache
def levels_of(study: str) -> LevelResults:
    """Held-out losses of a study as registered, by band of levels."""
    (found,) = read_levels(HERE / study / "levels.csv")
    return found


@cache
def outcomes_of(study: str) -> tuple[Outcome, ...]:
    """The results of a study as registered, one per run."""
    return tuple(read_outcomes(HERE / study / "results.csv").values())


def more_blocks(study: str) -> Path | None:
    """The results of studies/more-blocks for this study, if they are there."""
    folder = HERE / "more-blocks" / study
    return folder if (folder / "levels.csv").exists() else None


@cache
def new_outcomes(study: str) -> dict[str, list[Outcome]]:
    """The results of studies/more-blocks for this study, by pairing of the mixes; galaxies have one."""
    tables = {name: HERE / "more-blocks" / study / f"{name}.csv" for name in PAIRINGS}
    return {name: list(read_outcomes(path).values()) for name, path in tables.items() if path.exists()}


@cache
def new_levels(study: str) -> LevelResults:
    """Held-out losses of the new blocks that are complete, image-first mixes included."""
    (found,) = read_levels(HERE / "more-blocks" / study / "levels.csv")
    seeds = ([each.configuration.seed for each in outcomes] for outcomes in new_outcomes(study).values())
    whole = set.intersection(
        *({seed for seed in each if each.count(seed) == max(map(each.count, each))} for each in seeds)
    )
    return take(found, np.isin(found.block, list(whole)))


@cache
def all_levels(study: str) -> LevelResults:
    """Held-out losses of all blocks, by which worths are read."""
    if more_blocks(study) is None:
        return levels_of(study)
    first, more = levels_of(study), new_levels(study)
    joined = {name: np.concatenate([getattr(first, name), getattr(more, name)]) for name in OF_RUNS}
    return replace(first, **joined)


@cache
def looks_of(study: str) -> tuple[Outcome, ...]:
    """The results that tell how samples look: with the mixes that studies/looks trained again, if it did."""
    return *first_looks(study), *(new_looks(study) if more_blocks(study) else ())


@cache
def first_looks(study: str) -> tuple[Outcome, ...]:
    """The same of the registered blocks alone."""
    again, found = HERE / "looks" / f"{study}.csv", outcomes_of(study)
    if not again.exists():
        return found
    clean = (each for each in found if not each.configuration.noisy)
    return *clean, *read_outcomes(again).values()


@cache
def new_looks(study: str) -> tuple[Outcome, ...]:
    """The results of the new blocks that tell how samples look: clean images alone, and mixes image first."""
    both, blocks = new_outcomes(study), set(new_levels(study).block.tolist())
    clean = (each for each in both.get("level_first", ()) if not each.configuration.noisy)
    return tuple(each for each in (*clean, *both.get("image_first", ())) if each.configuration.seed in blocks)


@cache
def quote_of(study: str) -> Quote:
    """The quote of a study's images, as committed; it was made from the images to train on, all clean."""
    with np.load(HERE / study / "quote.npz") as file:
        columns = {name: file[name] for name in file.files}
    modes = columns.pop("eigenvalues"), columns.pop("counts")
    sizes = {name: columns.pop(name).item() for name in ("share", "num_images", "num_values")}
    return Quote(**columns, modes=modes, **sizes)


@cache
def prices_of(study: str) -> Prices:
    """Worth curves and prices of a study, with the quote beside them."""
    return price_results(looks_of(study), all_levels(study), quote=quote_of(study))


def write_quotes() -> None:
    """Quote the images of every study that is here, and keep what the quotes depend on."""
    for study in measured_studies():
        opened = open_study(HERE / study / "study.toml", Path("out") / study)
        sigmas = opened.study.design.noisy if opened.study.design else ()
        found = quote(opened.source, sigmas or levels_of(study).sigmas)
        arrays = {name: getattr(found, name) for name in ("sigmas", "levels", "worth", "share")}
        sizes = {"num_images": found.num_images, "num_values": found.num_values}
        np.savez(
            HERE / study / "quote.npz", **arrays, **sizes, eigenvalues=found.modes[0], counts=found.modes[1]
        )


# --- blocks ------------------------------------------------------------------------------------------------


def answer() -> str:
    """The headline of page one: structure first, how samples look beside it; it reads well with any verdict."""
    prices = prices_of(HEADLINE)
    structure, looks = (prices.of(goal) for goal in ("structure", "looks"))
    first = f"**{amount(structure)}** noisy images replace a clean one"
    if structure.verdict == "undecided":
        first = "how many noisy images replace a clean one is undecided"
    again = looks_of(HEADLINE) != outcomes_of(HEADLINE)  # then its mixes were trained a second time
    others = [price.rate[0] for study in measured_studies() for price in prices_of(study).goals["structure"]]
    num_runs = structure.law.num_runs + again * int((looks.results.num_noisy.sum(1) > 0).sum())
    return (
        f"Measured on {ABOUT_HEADLINE}, at noise {structure.sigma:.3g}:\n"
        f"{first} if you want the right structure,\n"
        f"and **{amount(looks)}** if you want samples that look right "
        f"(95% intervals; {num_runs} trainings;\na rate of 1 is a bound). "
        f"For structure, rates in our studies go from {min(others):.2g} to {max(others):.2g}."
    )


@cache
def unregistered_prices(study: str) -> Prices:
    """Prices of a study without a quote beside it."""
    return price(HERE / study)


def replacement(only: str = "") -> str:
    """Noisy images per clean one: every noise level and goal of every study, or of one."""
    rows = []
    for study in [only] if only else [*UNREGISTERED, *measured_studies()]:
        if study not in (*UNREGISTERED, *measured_studies()):
            continue
        prices = unregistered_prices(study) if study in UNREGISTERED else prices_of(study)
        for sigma in dict.fromkeys(each.sigma for each in prices.prices):
            mine = {each.goal: amount(each) for each in prices.prices if each.sigma == sigma}
            cells = [mine.get(goal, "") for goal in ("structure", "everything", "looks")]
            rows.append((title_of(study), f"{sigma:.3g}", *cells))
    if not only and (outcomes := galaxies_known_by_kind()):
        one = price_results(outcomes).of("looks")
        rows.append(("galaxies, 16x16, another survey", f"{one.sigma:.3g}", "", "", amount(one)))
    return markdown(("images", "noise", "structure", "everything", "looks"), rows)


def pending() -> str:
    """Which registered studies are not finished: the one place that says so."""
    missing = [title_of(name) for name in STUDIES if name not in (*UNREGISTERED, *finished_studies())]
    unseen = (name for name in ("digits", "fashion-mnist") if not (HERE / "looks" / f"{name}.csv").exists())
    missing += [f"looks, image first, of {STUDIES[name]}" for name in unseen]
    missing += ["looks of galaxies"] * (not galaxies_known_by_kind())
    for name in MORE:
        num_new = len(np.unique(new_levels(name).block)) if more_blocks(name) else 0
        missing += [f"more blocks of {STUDIES[name]} ({num_new} of 4)"] if num_new < 4 else []
    if not missing:
        return "All registered studies have been run to the end."
    return "Registered, with results still to come: {}.".format(";\n".join(missing))


def registered() -> str:
    """The conclusions from the registered studies, as far as they have results; `evidence` has the tables."""
    if not measured_studies():
        return pending()
    parts = [
        pending(),
        "## Worth by noise level",
        "What a noisy image is worth at each noise level of the model, with its 95% band (solid), and what a\n"
        "quote predicts (dashed):",
        "![Worth of a noisy image by noise level, for each study](worth.png)",
        "## The paper's claims",
        "How many of the registered claims hold, fail or are undecided (`studies/README.md` has each of them):",
        verdicts(),
        repeated(),
    ]
    return "\n\n".join(filter(None, parts))


def evidence() -> str:
    """The tables behind the conclusions."""
    if not measured_studies():
        return NO_RESULTS
    parts = [
        "### Claims",
        "Each is tested on differences within blocks. All tests are corrected together by Holm's method at 5%.",
        claims(),
        "### The share of clean images",
        "Worth for structure, from mixes with few clean images and with three times as many:",
        shares(),
        "### Quotes",
        "How far the quoted worth is from the measured one, and how well quotes predict the held-out loss of\n"
        "mixes before any noisy image is seen:",
        quoted(),
    ]
    return "\n\n".join(parts)


@dataclass(frozen=True)
class Claim:
    """A claim of the paper about one study: the gain (K,) in each block that it says is above 0."""

    study: str
    words: str
    gain: Array

    @property
    def p_value(self) -> float:
        """Of Student's t-test that the gain is not above 0, if it is; else that it is not below."""
        num, mean, error = len(self.gain), self.gain.mean(), self.gain.std(ddof=1) / np.sqrt(len(self.gain))
        return float(2 * student_t.sf(abs(mean) / max(error, 1e-300), num - 1))

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% interval of the mean gain, not corrected for the number of claims."""
        reach = student_t.ppf(0.975, len(self.gain) - 1) * self.gain.std(ddof=1) / np.sqrt(len(self.gain))
        return float(self.gain.mean() - reach), float(self.gain.mean() + reach)


def claims_of(study: str) -> list[Claim]:
    """The registered claims (studies/README.md) at every noise level of a study."""
    by_fd = {", by FD": outcomes_of(study)}
    by_fd |= {", by FD, image first": first_looks(study)} if first_looks(study) != outcomes_of(study) else {}
    return tested(study, levels_of(study), by_fd)


def tested(study: str, levels: LevelResults, by_fd: Mapping[str, Iterable[Outcome]]) -> list[Claim]:
    """The claims about the blocks of some results, with the FD of one or two ways of training the mixes."""
    found, total = list[Claim](), levels.loss.sum(1)
    few, most = levels.num_clean.min(), levels.num_clean.max()
    sizes = np.unique(levels.num_clean[levels.num_noisy.sum(1) == 0])

    def by_block(values: Array, num_clean: float, sigma: float | None) -> Array:
        """The values of a configuration, one per block."""
        noisy = levels.num_noisy.sum(1) > 0
        level = noisy & (levels.num_noisy[:, levels.sigmas == sigma].sum(1) > 0) if sigma else ~noisy
        rows = np.flatnonzero(level & (levels.num_clean == num_clean))
        return values[rows[np.argsort(levels.block[rows])]]

    for sigma in levels.sigmas.tolist():
        above = levels.loss @ levels.above(sigma)
        mix, alone = by_block(total, few, sigma), by_block(total, few, None)
        at = f"at noise {sigma:.3g}"
        found.append(Claim(study, f"all clean images beat the mix {at}", mix - by_block(total, most, None)))
        gain = by_block(above, few, None) - by_block(above, few, sigma)
        found.append(Claim(study, f"the mix beats its clean images {at}, above the noise", gain))
        found.append(Claim(study, f"the mix beats its clean images {at}", alone - mix))
        for words, outcomes in by_fd.items():
            if len(gain := fd_gain(outcomes, sigma)):
                found.append(Claim(study, f"the mix beats its clean images {at}{words}", gain))
    early, late = (
        (by_block(total, a, None) - by_block(total, b, None)) / (b - a) for a, b in (sizes[:2], sizes[-2:])
    )
    found.append(
        Claim(study, f"one more clean image helps more at {sizes[0]:g} than at {sizes[-2]:g}", early - late)
    )
    return found


def fd_gain(outcomes: Iterable[Outcome], sigma: float) -> Array:
    """By how much (K,) the FD of the mix with the fewest clean images is below theirs alone, in each block."""
    known = {(each.configuration, each.evaluation.fd) for each in outcomes if each.evaluation.fd is not None}
    few = min((of.num_clean for of, _ in known), default=0)
    mixes, clean = (
        {of.seed or 0: fd for of, fd in known if of.num_clean == few and of.levels == levels}
        for levels in ((sigma,), ())
    )
    return np.array([clean[block] - mixes[block] for block in sorted(mixes)])


def holm(p_values: Iterable[float]) -> list[bool]:
    """Which hypotheses are rejected, at ERROR_RATE for the whole family."""
    listed = list(p_values)
    rejected = [False] * len(listed)
    for rank, which in enumerate(np.argsort(listed)):
        if listed[which] > ERROR_RATE / (len(listed) - rank):
            break
        rejected[which] = True
    return rejected


@cache
def judged() -> list[tuple[Claim, str]]:
    """Every claim on every study with its verdict, all corrected as one family."""
    return verdicts_of([claim for study in finished_studies() for claim in claims_of(study)])


def verdicts_of(family: Sequence[Claim]) -> list[tuple[Claim, str]]:
    """Claims with their verdicts, corrected together."""
    return with_words(family, holm(claim.p_value for claim in family))


def with_words(family: Sequence[Claim], decided: Iterable[bool]) -> list[tuple[Claim, str]]:
    """Claims with their verdicts in words."""
    words = [("holds" if claim.gain.mean() > 0 else "fails") for claim in family]
    return [(c, w if d else "undecided") for c, w, d in zip(family, words, decided, strict=True)]


def in_order(p_values: Sequence[float], earlier: Sequence[float]) -> list[bool]:
    """Which hypotheses are rejected at ERROR_RATE / 2, in the order of earlier p-values, until one is not."""
    rejected = [False] * len(p_values)
    for which in np.argsort(earlier, kind="stable"):
        if p_values[which] > ERROR_RATE / 2:
            break
        rejected[which] = True
    return rejected


def gain_of(claim: Claim) -> str:
    """Its mean gain, in words."""
    low, high = claim.interval
    return f", {claim.gain.mean():.3g} ({low:.3g} to {high:.3g})"


def claims() -> str:
    """Every claim with its verdict and its gain."""
    return claims_table(judged())


def claims_table(judged: Sequence[tuple[Claim, str]]) -> str:
    """Claims with their verdicts and gains."""
    rows = []
    for claim, verdict in judged:
        rows.append((STUDIES[claim.study], claim.words, verdict, gain_of(claim).removeprefix(", ")))
    return markdown(("images", "claim", "verdict", "gain (95%, uncorrected)"), rows)


def verdicts() -> str:
    """How many claims have each verdict, by study, and which gains have not the sign that was claimed."""
    rows, wrong = [], [f"{STUDIES[c.study]}: {c.words}{gain_of(c)}" for c, _ in judged() if c.gain.mean() <= 0]
    for study in finished_studies():
        found = [verdict for claim, verdict in judged() if claim.study == study]
        rows.append((STUDIES[study], *(str(found.count(word)) for word in ("holds", "fails", "undecided"))))
    table, right = markdown(("images", "hold", "fail", "undecided"), rows), len(judged()) - len(wrong)
    said = f"In {right} of all {len(judged())} claims the mean gain over three blocks has the sign claimed\n"
    said += "(claims about FD count twice where mixes were trained both level first and image first)."
    if wrong:
        said += "\nThe exceptions, with their gains (95%, uncorrected), are:\n\n- {}".format("\n- ".join(wrong))
    return f"{table}\n\n{said}"


def again(study: str) -> str:
    """The claims about a data set on the new blocks of studies/more-blocks alone."""
    if more_blocks(study) is None:
        return NO_RESULTS
    if (num := len(np.unique(new_levels(study).block))) < 2:
        return f"{num} of 4 blocks is complete. A test needs two at least."
    return f"{num} of 4 blocks are complete.\n\n{claims_table(judged_again(study))}"


def repeated() -> str:
    """How many claims hold on new blocks alone, in a sentence for each data set."""
    said, every = [], list[Claim]()
    for study in filter(more_blocks, MORE):
        if (num := len(np.unique(new_levels(study).block))) < 2:
            continue
        every += [claim for claim, _ in judged_again(study)]
        counts = counted(verdict for _, verdict in judged_again(study))
        said.append(f"- {STUDIES[study]} ({num} new blocks): {counts}")
    if not said:
        return ""
    together = counted(verdict for _, verdict in verdicts_of(every))
    return (
        "Three blocks are few for such a family. The same claims (by FD of mixes that draw the image first)\n"
        "were tested again on new blocks alone, with the corrections that `studies/more-blocks` registered:\n\n"
        + "\n".join(said)
        + f"\n\nIf all {len(every)} of these are corrected together by Holm's method at 5%: {together}."
    )


def counted(verdicts: Iterable[str]) -> str:
    """How many claims hold, fail and are undecided."""
    found, words = list(verdicts), {"holds": "hold", "fails": "fail", "undecided": "undecided"}
    return ", ".join(f"{found.count(verdict)} {word}" for verdict, word in words.items())


@cache
def judged_again(study: str) -> list[tuple[Claim, str]]:
    """The claims on new blocks alone with their verdicts."""
    found = tested(study, new_levels(study), {", by FD": new_looks(study)})
    if MORE[study] == "Holm":
        return verdicts_of(found)
    first = tested(study, levels_of(study), {", by FD": first_looks(study)})
    assert [claim.words for claim in first] == [claim.words for claim in found]
    p_values = ([claim.p_value for claim in family] for family in (found, first))
    return with_words(found, in_order(*p_values))


def shares() -> str:
    """Worth above the noise from mixes of different shares of clean images, each fitted without the other."""
    rows = []
    for study in measured_studies():
        levels = levels_of(study)
        noisy = levels.num_noisy.sum(1) > 0
        sizes = np.unique(levels.num_clean[noisy])
        for sigma in levels.sigmas.tolist() if len(sizes) > 1 else ():
            cells = []
            for size in sizes:
                priced = price_results([], take(levels, ~noisy | (levels.num_clean == size)))
                one = priced.of("structure", sigma)
                cells.append(f"{size:g} clean: {one.worth:.2f} ({one.low:.2f} to {one.high:.2f})")
            rows.append((title_of(study), f"{sigma:.3g}", *cells))
    return markdown(("images", "noise", "few clean images", "three times as many"), rows)


def take(levels: LevelResults, runs: NDArray[np.bool_]) -> LevelResults:
    """Some of the runs."""
    return replace(levels, **{name: getattr(levels, name)[runs] for name in OF_RUNS})


def at_level(levels: LevelResults, which: int) -> LevelResults:
    """Runs on clean images and on noisy ones of a single level, as a study of that level alone."""
    return replace(levels, sigmas=levels.sigmas[[which]], num_noisy=levels.num_noisy[:, [which]])


def quoted() -> str:
    """How far quotes are from measured worth curves, and how well they predict the loss of mixes."""
    rows = []
    for study in measured_studies():
        for curve in prices_of(study).curves:
            assert curve.quoted is not None
            known = ~curve.limited.astype(bool) & (curve.levels < 20)
            rms = np.sqrt(np.square(curve.worth - curve.quoted)[known].mean())
            error = predicted(study, curve.sigma)
            rows.append(
                (
                    title_of(study),
                    f"{curve.sigma:.3g}",
                    f"{rms:.2f}",
                    f"{error.mean():+.0%}",
                    f"{np.abs(error).max():.0%}",
                )
            )
    header = (
        "images",
        "noise",
        "quoted and measured worth differ by (root mean square)",
        "predicted gain is off by (mean, as a share of what the largest clean set gains)",
        "at most",
    )
    return markdown(header, rows)


def predicted(study: str, sigma: float, by_quote: bool = True) -> Array:
    """Errors (m,) of the predicted gain of mixes over their clean images, as a share of that of all clean ones.

    Prediction: in each band the clean-only losses of the same block, interpolated in log n, at the size
    n_clean + w n_noisy with the w of the quote, or else the same w = s^2 / (s^2 + sigma^2) at level s for any
    images. No noisy image enters.
    """
    levels, found = all_levels(study), []
    worth = levels.centres**2 / (levels.centres**2 + sigma**2)
    if by_quote:
        worth = quoted_at(quote_of(study), sigma, levels.centres)
    noisy = levels.num_noisy[:, levels.sigmas == sigma].sum(1)
    for run in np.flatnonzero(noisy > 0):
        clean = np.flatnonzero((levels.num_noisy.sum(1) == 0) & (levels.block == levels.block[run]))
        clean = clean[np.argsort(levels.num_clean[clean])]
        size = np.log(levels.num_clean[run] + worth * noisy[run])
        ladder = np.log(levels.num_clean[clean])
        loss = [np.interp(n, ladder, column) for n, column in zip(size, levels.loss[clean].T, strict=True)]
        alone = levels.loss[clean[levels.num_clean[clean] == levels.num_clean[run]][0]].sum()
        gap = alone - levels.loss[clean[-1]].sum()
        found.append((levels.loss[run].sum() - sum(loss)) / gap)
    return np.array(found)


def prediction() -> str:
    """How well mixes were predicted, and where that failed."""
    cells = {
        study: [predicted(study, sigma) for sigma in levels_of(study).sigmas] for study in measured_studies()
    }
    failed = {study: np.concatenate(found) for study, found in cells.items() if study in UNPREDICTED}
    known = [study for study in cells if study not in failed]
    good = np.concatenate([each for study in known for each in cells[study]])
    plain = [predicted(study, sigma, by_quote=False) for study in known for sigma in levels_of(study).sigmas]
    each = [np.sqrt(np.mean(found**2)) for study in known for found in cells[study]]
    num_low = int((good < 0).sum())
    said = (
        "Runs on clean images and a quote, without any noisy image, predicted the held-out loss of "
        f"{len(good)} mixes:\nthe error was {np.sqrt(np.mean(good**2)):.0%} of what the largest set of clean "
        f"images gains over the few of the mix\n(root mean square; {min(each):.0%} to {max(each):.0%} "
        f"by images and noise level), and at most {np.abs(good).max():.0%};\n"
        f"in {num_low} of them the mix was better than predicted. "
        "Quotes were made from all images to train on.\n"
        "One curve for all images, s²/(s² + σ²) at level s for noise σ, does nearly as well: "
        f"{np.sqrt(np.mean(np.concatenate(plain) ** 2)):.0%}."
    )
    for study, found in failed.items():
        error = np.sqrt(np.mean(found**2))
        said += f"\nIt failed on {title_of(study)}, by {error:.0%}:\n{UNPREDICTED[study]}."
    return said


def costs(study: str) -> str:
    """What a study took."""
    found = outcomes_of(study)
    trained = [each.train_seconds or 0 for each in found]
    rest = sum((each.sample_seconds or 0) + (each.held_out_loss_seconds or 0) for each in found)
    return (
        f"{len(found)} trainings of {statistics.median(trained):.0f} s (median, one core), "
        f"{(sum(trained) + rest) / 60:.0f} core-minutes in all."
    )


def noise(study: str) -> str:
    """What `assay data noise` measured, beside what the simulator knows."""
    with open(HERE / study / "noise.csv", newline="") as file:
        measured = list(csv.DictReader(file))
    rows = []
    for line in measured:
        truth, value, low, high = (float(line[name]) for name in ("truth", "measured", "low", "high"))
        ends = f"{value:.4g} ({low:.4g} to {high:.4g})"
        rows.append(
            (line["quantity"], f"`{line['command']}`", f"{truth:.4g}", ends, f"{value / truth - 1:+.1%}")
        )
    return markdown(("in ADU", "`assay data noise`", "truth", "measured (95%)", "error"), rows)


def published() -> str:
    """What the paper's tables give, by the scaling law and by comparing pairs of runs."""
    titles = {"cifar10": "CIFAR-10", "celeba_hq": "CelebA-HQ", "imagenet": "ImageNet"}
    rows = [
        (titles[prices.dataset], noise, amount, pairs, box)
        for prices in price_all(PAPER)
        for _, noise, amount, _, pairs, box in detail_table(prices).rows
    ]
    return markdown(("images", "noise", "scaling law (95%)", "pairs of runs", "paper's box"), rows)


def rates() -> str:
    """Measured exponents of the mixture estimators beside the theory's."""
    with open(HERE / "mixture-rates" / "results.csv", newline="") as file:
        points = list(csv.DictReader(file))
    rows = []
    for name in dict.fromkeys(point["curve"] for point in points):
        mine = [point for point in points if point["curve"] == name]
        size, error = ([float(point[key]) for point in mine] for key in ("num_samples", "error"))
        theory = 0.5 if "separated" in name else 1 / 6
        part = np.log(size) - np.mean(np.log(size))
        part /= part @ part  # of each point in the slope of least squares
        relative = [float(point["standard_error"]) / float(point["error"]) for point in mine]
        slope = f"{-part @ np.log(error):.3f} ± {np.linalg.norm(part * relative):.3f}"
        rows.append((name, f"{size[0]:,.0f} to {size[-1]:,.0f}", slope, f"{theory:.3f}"))
    return markdown(("samples", "n", "measured exponent b, error ~ n^-b (± standard error)", "in theory"), rows)


def looks() -> str:
    """Replacement rates for looks with mixes trained level first and image first."""
    rows = []
    for study in measured_studies():
        if first_looks(study) == outcomes_of(study):
            continue
        before, after = (price_results(each(study)) for each in (outcomes_of, first_looks))
        for one in (each for each in after.prices if each.goal == "looks"):
            cells = (amount(before.of("looks", one.sigma)), amount(one))
            rows.append((title_of(study), f"{one.sigma:.3g}", *cells))
    return markdown(("images", "noise", "level first", "image first"), rows)


@cache
def galaxies_known_by_kind() -> tuple[Outcome, ...]:
    """The results of studies/galaxies-looks, as far as they are there."""
    table = HERE / GALAXIES_LOOKS / "results.csv"
    return tuple(read_outcomes(table).values()) if table.exists() else ()


def galaxies_looks() -> str:
    """The replacement rate for looks of galaxies that know their kind, and the claim about them."""
    if not (outcomes := galaxies_known_by_kind()):
        return NO_RESULTS
    one = price_results(outcomes).of("looks")
    claim = Claim(GALAXIES_LOOKS, "the mix beats its clean images by FD", fd_gain(outcomes, one.sigma))
    verdict = "undecided" if claim.p_value > ERROR_RATE else "holds" if claim.gain.mean() > 0 else "fails"
    row = STUDIES["galaxies"], f"{one.sigma:.3g}", amount(one), verdict, gain_of(claim).removeprefix(", ")
    header = "images", "noise", "looks", claim.words, "gain in FD (95%)"
    (levels,) = read_levels(HERE / GALAXIES_LOOKS / "levels.csv")
    structure = amount(price_results([], levels).of("structure"))
    return (
        f"{len(claim.gain)} of 4 blocks are complete.\n\n{markdown(header, [row])}\n\n"
        f"For structure, which was not to be reported, the same runs give {structure}: far fewer than the "
        "galaxies\nstudy, whose mix has 83 noisy images for each clean one, and not 9."
    )


def noisy_only() -> str:
    """FD and held-out loss of the methods that use noisy images alone."""
    table = HERE / "noisy-only" / "noisy_only.csv"
    if not table.exists():
        return NO_RESULTS
    with open(table, newline="") as file:
        found = list(csv.DictReader(file))
    rows, values = [], dict[tuple[str, ...], list[dict[str, str]]]()
    for row in sorted(found, key=lambda row: (row["data"], row["block"])):
        values.setdefault((row["data"], row["method"], row["sampling"]), []).append(row)
    for (data, method, way), mine in values.items():
        fd, loss = (np.array([float(row[key] or "nan") for row in mine]) for key in ("fd", "held_out_loss"))
        usual = np.array([float(row["fd"]) for row in values[data, "plain", "truncated"]])
        known = "" if np.isnan(loss).any() else f"{loss.mean():.3f}"
        cells = known, mean_and_spread(fd, ".1f"), f"{(fd / usual).mean():.2f}"
        rows.append((STUDIES[data], method, way, *cells))
    return markdown(("images", "method", "sampled", "held-out loss", "FD", "of plain, truncated"), rows)


def mean_and_spread(values: Sequence[float], form: str) -> str:
    """Mean and standard deviation over blocks."""
    return f"{np.mean(values):{form}} ± {np.std(values, ddof=1):{form}}"


def recipe() -> str:
    """Held-out loss and FD of both pairings with each way of stopping, and the test that was registered."""
    with open(HERE / "recipe" / "recipe.csv", newline="") as file:
        found = list(csv.DictReader(file))
    values: dict[tuple[str, str, str], dict[str, list[float]]] = {}
    for row in sorted(found, key=lambda row: (row["data"], row["pairing"], row["block"])):
        mine = values.setdefault((row["data"], row["pairing"], row["stops"]), {"held_out_loss": [], "fd": []})
        for key, column in mine.items():
            column.append(float(row[key]))
    rows = []
    for (data, pairing, stops), mine in values.items():
        forms = {"held_out_loss": ".3f", "fd": ".1f"}
        cells = (mean_and_spread(mine[key], form) for key, form in forms.items())
        rows.append((STUDIES[data], f"`{pairing}`", stops, *cells))
    tests = []
    for stops in dict.fromkeys(stops for _, _, stops in values):
        for data in dict.fromkeys(data for data, _, _ in values):
            both = (values[data, pairing, stops]["held_out_loss"] for pairing in ("image_first", "level_first"))
            tests.append((STUDIES[data], stops, f"{ttest_rel(*both).pvalue:.2g}"))
    losses = markdown(("images", "stops", "p-value of a difference in held-out loss, uncorrected"), tests)
    return markdown(("images", "pairing", "stops", "held-out loss", "FD"), rows) + "\n\n" + losses


def markdown(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table; a sentence if it is empty."""
    rows = list(rows)
    if not rows:
        return NO_RESULTS
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" if line[0] != "---" else f"|{'|'.join(line)}|" for line in lines)


def worth_panels() -> list[Panel]:
    """The worth curves of all studies, with their bands and quotes."""
    panels = itertools.chain.from_iterable(price_panels(prices_of(study)) for study in measured_studies())
    return [replace(panel, title=title_of(panel.title.split(":")[0])) for panel in panels]


BLOCKS: dict[str, Callable[..., str]] = {
    block.__name__: block
    for block in (
        answer,
        replacement,
        pending,
        registered,
        evidence,
        costs,
        noise,
        published,
        rates,
        recipe,
        looks,
        galaxies_looks,
        noisy_only,
        prediction,
        again,
    )
}


def renew(text: str) -> str:
    """The text with every block as the committed results give it."""

    def block(match: re.Match[str]) -> str:
        name, *arguments = match[1].split()
        return f"<!-- findings: {match[1]} -->\n{BLOCKS[name](*arguments)}\n<!-- end -->"

    return re.sub(r"<!-- findings: (.*?) -->\n.*?<!-- end -->", block, text, flags=re.DOTALL)


def main() -> None:
    """Renew every page."""
    if sys.argv[1:] == ["quotes"]:
        write_quotes()
    for path in PAGES:
        path.write_text(renew(path.read_text()))
    if panels := worth_panels():
        save_png(panels, ROOT / "docs" / "worth.png")


if __name__ == "__main__":
    main()
