"""A price in words, as rows of a table and as figures; commands and reports show these and compute nothing."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from assay.figure import COLOURS, Panel, Series
from assay.outcome import read_outcomes
from assay.pricing.law import Law, robust_values
from assay.pricing.paper import PAPER, PAPER_BOXES, pair_bounds
from assay.pricing.plan import Mix, Plan
from assay.pricing.price import Price, Prices
from assay.pricing.quote import Quote, interval
from assay.pricing.results import Goal, Measured

GOALS: dict[Goal, str] = {
    "structure": "structure, the levels above the noise",
    "everything": "everything, down to one grey step",
    "looks": "how samples look",
}
_UNLIKELY = 0.01  # a lack of fit that counts
_VAGUE = 0.7  # width of an interval of a worth that says too little for a line
_ASSUMED = "no configuration was repeated, so the scatter around the law stands for the error of a run"
_WORTH = "worth of a noisy image, in clean ones"
Sheet = tuple[tuple[str, ...], list[tuple[str, ...]]]  # header and rows


def amount(price: Price) -> str:
    """The replacement rate with its interval: "3.1 (2.4 to 4.2)", "at least 12", "undecided"."""
    rate, low, high = price.rate
    match price.verdict:
        case "estimate":
            return f"{rate:.3g} ({low:.3g} to {high:.3g})"
        case "at least":
            return f"at least {low:.3g}"
        case "at most":
            return f"at most {high:.3g}"
    return "undecided"


def reason(price: Price) -> str:
    """Why a price is undecided, and what would decide it."""
    if price.limited:
        return f"training, not data, is the limit here; it takes at least {price.limited:.0f} times the steps"
    if price.rises:
        return f"{price.results.metric} rises with the number of images; give a result of which lower is better"
    if price.high == 0:
        return (
            "the mixes did worse than their clean images alone, so noisy images took training from clean ones; "
            "train longer, with the same number of draws at every level"
        )
    if odd := _odd_one(price):
        return odd
    if price.flat:
        what = f"more clean images may not improve {price.results.metric} here"
        return f"{what}; train longer, on sizes that differ more, or in more blocks"
    more = price.blocks_for(4.0)
    runs = math.ceil(more * price.law.num_runs / max(price.law.num_blocks, 1))
    ends = _ends(*price.rate[1:])
    return f"{ends} of them may replace a clean one; about {more} more blocks ({runs:,} runs) would decide"


def _odd_one(price: Price) -> str:
    """The result that is farthest from its repeats, or else from the law, if far enough to be a slip."""
    results = price.results
    if results.value.min() <= 0:
        return ""
    expected = robust_values(results)
    images = np.column_stack([results.num_clean, results.num_noisy])
    for which in map(np.flatnonzero, (images[:, None] == images).all(2)):
        if len(which) > 2:  # of two, either may be wrong
            expected[which] = np.median(results.value[which])
    off = np.log(results.value / expected)
    worst = int((off := abs(off - np.median(off))).argmax())
    if not off[worst] >= max(math.log(1.4), 8 * np.median(off)):
        return ""
    words = f"{results.num_clean[worst]:,.0f} clean and {results.num_noisy[worst].sum():,.0f} noisy images"
    value = f"{results.metric} of {results.value[worst]:.4g} with {words}"
    return f"the {value} is far from the other results, which suggest about {expected[worst]:.3g}: is it right?"


def cautions(prices: Sequence[Price]) -> list[str]:
    """What to check before acting on prices of one goal: a result that may be a slip, or why none is sure."""
    law = prices[0].law
    said = [odd] if (odd := _odd_one(prices[0])) else []
    if not said and law.lack_of_fit is not None and law.lack_of_fit < _UNLIKELY:
        said = [f"the scaling law does not fit the results (p = {law.lack_of_fit:.2g}): is every row right?"]
    return said or [reason(price) for price in prices if price.verdict == "undecided"]


def sentence(price: Price) -> str:
    """The price in a sentence, with its interval and the number of runs."""
    law, noisy = price.law, f"noisy images at noise {price.sigma:.3g}"
    goal = f"For {GOALS[price.goal]} ({price.results.metric}), "
    number, _, ends = amount(price).partition(" (")
    sure = f"{price.confidence:.0%} interval{f' {ends[:-1]}' if ends else ''}, {law.num_runs} runs"
    sure += f" in {law.num_blocks} blocks" * (law.num_blocks > 1) + f"; {_ASSUMED}" * (not law.repeated)
    if price.verdict == "undecided":
        return f"{goal}what {noisy} are worth is undecided: {reason(price)} ({sure})."
    return f"{goal}{number} {noisy} replace a clean one ({sure})."


def headline(prices: Prices) -> str:
    """What to act on: the decided price at the highest noise, structure first, and how samples look there."""
    order = {"structure": 0, "looks": 1, "everything": 2}
    best = min(prices.prices, key=lambda p: (p.verdict == "undecided", order[p.goal], -p.sigma))
    looks = (p for p in prices.prices if (p.goal, p.sigma, p.verdict) == ("looks", best.sigma, "estimate"))
    said = [*map(sentence, (best, *(p for p in looks if p is not best)))]
    others = [p for p in prices.prices if p.goal == best.goal and p is not best]
    if others:
        said.append(
            f"{', '.join(f'At noise {p.sigma:.3g}: {amount(p)}' for p in others)}.".replace(", At", ", at")
        )
    return " ".join([*said, *training_limits(prices)])


def price_lines(prices: Prices) -> list[str]:
    """At most three lines, one for each goal: the rate at each noise level."""
    lines = []
    for goal in GOALS:
        if found := [price for price in prices.prices if price.goal == goal]:
            each = ", ".join(f"{amount(price)} at noise {price.sigma:.3g}" for price in found)
            each += "".join(f"; {caution}" for caution in dict.fromkeys(cautions(found)))
            metric = found[0].results.metric if goal == "looks" else "held-out loss"
            lines.append(f"{prices.dataset}, for {goal} ({metric}), noisy images per clean one: {each}")
    return lines + training_limits(prices)


def doubts(prices: Prices) -> list[str]:
    """What a reader must know: reasons for what is undecided, assumptions, and where the law does not fit."""
    open_ones = [price for price in prices.prices if price.verdict == "undecided"]
    said = [f"For {price.goal} at noise {price.sigma:.3g}: {reason(price)}." for price in open_ones]
    for goal, law in {price.goal: price.law for price in prices.prices}.items():
        if not law.repeated:
            said.append(f"For {goal}, {_ASSUMED}.")
        elif law.lack_of_fit is None:
            said.append(f"For {goal}, there are too few configurations to test the scaling law.")
        else:
            fits = "does not fit" if law.lack_of_fit < _UNLIKELY else "fits"
            said.append(f"For {goal}, the scaling law {fits} (p = {law.lack_of_fit:.2g} for lack of fit).")
    return said + training_limits(prices)


def training_limits(prices: Prices) -> list[str]:
    """At which noise levels longer training, not more data, would tell more; nothing if at none."""
    bands = {f"{c.levels[b]:.2g}" for c in prices.curves for b in np.flatnonzero(c.limited)}
    limited = ", ".join(sorted(bands, key=float))
    return [f"Training, not data, is the limit at these noise levels: {limited}."] if limited else []


def extremes(prices: Prices) -> list[str]:
    """What the law says of the paper's two extreme mixes, which no fit has seen."""
    said = []
    for each in read_outcomes(PAPER).values() if prices.from_paper else ():
        if each.configuration.table == "extreme" and each.configuration.dataset == prices.dataset:
            setting, law = each.configuration, prices.of("looks").law
            levels, counts = np.transpose(setting.noisy)
            shown = f"beyond the noise levels of the fit, {law.sigmas[-1]:.3g} at most"
            if levels.max() <= law.sigmas[-1]:
                values = law.values(law.size([setting.num_clean], [counts], levels))[:, 0]
                low, middle, high = np.quantile(values, [0.025, 0.5, 0.975])
                shown = f"predicted {middle:.3g} ({low:.3g} to {high:.3g})"
            said.append(f"Not in the fit, {setting}: measured {each.evaluation.fd:.3g}, {shown}.")
    return said


def price_rows(prices: Prices) -> list[dict[str, Any]]:
    """One flat row for each goal and noise level; the pairs' bounds and the paper's boxes as cross-checks."""
    rows = []
    for price in prices.prices:
        rate, low, high = price.rate
        least, most = pair_bounds(price.results)[price.sigma]
        row: dict[str, Any] = {
            "dataset": prices.dataset, "goal": price.goal, "metric": price.results.metric, "sigma": price.sigma,
            "verdict": price.verdict, "rate": rate, "rate_low": low, "rate_high": high, "worth": price.worth,
            "worth_low": price.low, "worth_high": price.high, "lack_of_fit": price.law.lack_of_fit,
            "num_runs": price.law.num_runs, "num_blocks": price.law.num_blocks,
            "pairs_low": 1 / most if most > 0 else math.inf, "pairs_high": 1 / least if least > 0 else math.inf,
        }  # fmt: skip
        if price.verdict in ("at least", "at most"):
            row["rate"] = math.nan  # there is only a bound
        if price.verdict == "undecided":
            row |= {"reason": reason(price)} | dict.fromkeys(("rate", "rate_low", "rate_high"), math.nan)
        if prices.from_paper and (box := PAPER_BOXES.get((prices.dataset, price.sigma))):
            row |= {"box_low": box[0], "box_high": box[1]}
        rows.append(row)
    return rows


def detail_table(prices: Prices) -> Sheet:
    """The table behind `--details`."""
    header = ["goal", "noise", "noisy per clean", "worth", "by pairs alone"]
    header += ["paper's box"] * prices.from_paper
    rows = []
    for row, price in zip(price_rows(prices), prices.prices, strict=True):
        worth = f"{price.worth:.3g} ({price.low:.3g} to {price.high:.3g})"
        pairs = _ends(row["pairs_low"], row["pairs_high"])
        cells = [price.goal, f"{price.sigma:.3g}", amount(price), worth, pairs]
        box = _ends(row["box_low"], row["box_high"]) if "box_low" in row else "-"
        rows.append((*cells, *[box] * prices.from_paper))
    return tuple(header), rows


def _ends(low: float, high: float) -> str:
    if low > high or math.isinf(low):
        return "contradictory"
    return f"{low:.4g} to {high:.4g}" if math.isfinite(high) else f"{low:.4g} or more"


def quote_lines(quote: Quote) -> list[str]:
    """A quote in three lines for each noise level; the last says whether a study would pay."""
    goals: tuple[Goal, ...] = ("structure", "everything")
    lines = []
    for sigma in quote.sigmas.tolist():
        for goal in goals:
            worth, low, high = quote.goal(goal, sigma)
            rate = f"{1 / worth:.3g} noisy images at noise {sigma:.3g} replace a clean one"
            lines.append(f"For {GOALS[goal]}: about {rate} ({1 / high:.3g} to {1 / low:.3g} in 95% of quotes).")
        _, low, high = quote.goal("structure", sigma)
        advice = "A study would hardly narrow that."
        if high / low > 2.5:
            advice = f"If that is too wide, run a study: it narrows a factor of {high / low:.2g} to about two."
        if quote.num_images < quote.num_values:
            few = f"{quote.num_images:,} clean images are few for {quote.num_values:,} values each"
            advice = f"But {few}: with more, noisy images may turn out to be worth less."
        elif high < 0.02 or low > 0.8:
            advice = f"They are {'too noisy' if high < 0.02 else 'as good as clean'}: a study would not pay."
        lines.append(advice)
    return lines


def quote_rows(quote: Quote) -> list[dict[str, Any]]:
    """One flat row for each noise level and goal."""
    goals: tuple[Goal, ...] = ("structure", "everything")
    rows = []
    for sigma, goal in itertools.product(quote.sigmas.tolist(), goals):
        worth, low, high = quote.goal(goal, sigma)
        row = {"goal": goal, "sigma": sigma, "rate": 1 / worth, "rate_low": 1 / high, "rate_high": 1 / low}
        rows.append(row | {"worth": worth, "worth_low": low, "worth_high": high})
    return rows


def price_panels(prices: Prices) -> list[Panel]:
    """The worth curve; without results by level, each metric against the clean images, with its law."""
    if not prices.curves:
        by_goal = {price.goal: price for price in prices.prices}
        return [_law_panel(prices.dataset, price.results, price.law) for price in by_goal.values()]
    panel = Panel(f"{prices.dataset}: worth by level", "noise level", _WORTH, log_x=True)
    for which, curve in enumerate(prices.curves):
        colour, name = COLOURS[(which + 1) % len(COLOURS)], f"noise {curve.sigma:.3g}"
        vague = curve.high - curve.low > _VAGUE  # the band shows it; a line would suggest more
        known = np.where(curve.limited.astype(bool) | vague, np.nan, curve.worth)
        panel.series.append(Series("", "band", curve.levels, curve.worth, curve.low, curve.high, colour))
        panel.series.append(Series(name, "line", curve.levels, known, colour=colour))
        if curve.quoted is not None:
            panel.series.append(Series(f"{name}, quoted", "dashed", curve.levels, curve.quoted, colour=colour))
    return [panel]


def _law_panel(dataset: str, measured: Measured, law: Law) -> Panel:
    """Results and the law: the paper's Figure 1 if all mixes have one size, else against effective images."""
    total = measured.num_noisy.sum(1)
    size = (measured.num_clean + total).max()
    if np.ptp((measured.num_clean + total)[total > 0]) > 0.01 * size:
        return _size_panel(dataset, measured, law)
    unit = "images that are noisy, or (clean only) left out, in %"
    panel = Panel(f"{dataset}: {measured.metric}, and the law", unit, measured.metric, log_y=True)
    for which, sigma in enumerate([0.0, *measured.sigmas]):
        rows = total == 0 if not sigma else (total > 0) & (measured.num_noisy[:, which - 1] == total)
        order = np.flatnonzero(rows)[np.argsort(-measured.num_clean[rows])]
        x, colour = 100 * (1 - measured.num_clean[order] / size), COLOURS[which % len(COLOURS)]
        sizes = law.size(measured.num_clean[order], measured.num_noisy[order], measured.sigmas)
        alone = [value for level, value in measured.alone if level == sigma]
        points = np.append(x, np.full(len(alone), 100.0)), np.append(measured.value[order], alone)
        name = f"noise {sigma:.3g}" if sigma else "clean only"
        panel.series.append(Series(name, "points", *points, colour=colour))
        panel.series.append(Series("", "line", x, np.median(law.values(sizes), 0), colour=colour))
    return panel


def _size_panel(dataset: str, measured: Measured, law: Law) -> Panel:
    """Results against the clean images that their training images count as, and the law with its band."""
    unit = "training images, noisy ones counted by their worth"
    panel = Panel(f"{dataset}: {measured.metric}, and the law", unit, measured.metric, log_x=True, log_y=True)
    size = np.median(law.size(measured.num_clean, measured.num_noisy, measured.sigmas), 0)
    grid = np.geomspace(size.min(), size.max(), 60)
    low, middle, high = np.quantile(law.values(grid[None]), [0.025, 0.5, 0.975], axis=0)
    panel.series.append(Series("", "band", grid, middle, low, high, COLOURS[0]))
    panel.series.append(Series("the law", "line", grid, middle, colour=COLOURS[0]))
    for which, sigma in enumerate([0.0, *measured.sigmas]):
        rows = measured.num_noisy.sum(1) == 0 if not sigma else measured.num_noisy[:, which - 1] > 0
        name = f"with noise {sigma:.3g}" if sigma else "clean only"
        panel.series.append(
            Series(name, "points", size[rows], measured.value[rows], colour=COLOURS[which % len(COLOURS)])
        )
    return panel


def quote_panels(quote: Quote) -> list[Panel]:
    """The quoted worth by level, with its stated accuracy."""
    panel = Panel("quoted worth by level", "noise level", _WORTH, log_x=True)
    for which, (sigma, worth) in enumerate(zip(quote.sigmas, quote.worth, strict=True)):
        colour = COLOURS[(which + 1) % len(COLOURS)]
        low, high = np.transpose([interval(w)[1:] for w in worth])
        panel.series.append(Series("", "band", quote.levels, worth, low, high, colour))
        panel.series.append(Series(f"noise {sigma:.3g}", "line", quote.levels, worth, colour=colour))
    return [panel]


def plan_lines(plan: Plan) -> list[str]:
    """What to buy, and how sure that is."""
    best = plan.mixes[0]
    moves = zip(plan.names, best.counts, plan.count_intervals, strict=True)
    ends = ", ".join(f"{a:,.0f} to {b:,.0f} {name}" for name, count, (a, b) in moves if count or b)
    more = max((mix.chance for mix in plan.mixes[1:]), default=0.0)
    others = f"; another is so in {more:.0%}, but this one is best on average" if more > best.chance else ""
    first = _bought(plan, best)
    return [
        f"Buy {first}." if plan.decided else f"Undecided, see the notes. If you must buy now: {first}.",
        f"It is the best mix in {best.chance:.0%} of the cases that the results allow{others}. "
        f"The best mix lies within {ends} ({plan.confidence:.0%}).",
        *(f"Note: {note.rstrip('?')}{'?' if note.endswith('?') else '.'}" for note in plan.notes),
    ]


def runners_up(plan: Plan) -> list[str]:
    """The other mixes, a line each."""
    return [f"Or {_bought(plan, mix)}; the best mix in {mix.chance:.0%}." for mix in plan.mixes[1:]]


def _bought(plan: Plan, mix: Mix) -> str:
    counts = ", ".join(f"{n:,.0f} {name}" for name, n in zip(plan.names, mix.counts, strict=True) if n)
    result = f"{plan.metric} {mix.value:.4g} on average ({mix.low:.4g} to {mix.high:.4g})"
    return f"{counts} for {mix.cost:,.2f}: {result}"


def plan_table(plan: Plan) -> Sheet:
    """The best few mixes side by side, their predicted results, and the chance that each is best."""
    names = *plan.names, "cost", plan.metric, f"its {plan.confidence:.0%} interval", "chance to be best"
    columns = [
        (*(f"{count:,.0f}" for count in mix.counts), f"{mix.cost:,.2f}", f"{mix.value:.4g}",
         f"{mix.low:.4g} to {mix.high:.4g}", f"{mix.chance:.0%}")
        for mix in plan.mixes
    ]  # fmt: skip
    return ("", "best", "2nd", "3rd", "4th")[: len(columns) + 1], list(zip(names, *columns, strict=True))


def plan_rows(plan: Plan) -> list[dict[str, Any]]:
    """One flat row for each of the best few mixes."""
    return [
        dict(zip(plan.names, mix.counts, strict=True))
        | {name: value for name, value in vars(mix).items() if name != "counts"}
        | {"decided": plan.decided, "notes": list(plan.notes)}
        for mix in plan.mixes
    ]
