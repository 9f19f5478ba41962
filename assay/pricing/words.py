"""A price in words, as rows of a table and as figures; commands and reports show these and compute nothing."""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from assay.figure import COLOURS, Panel, Series
from assay.outcome import Configuration, read_outcomes
from assay.pricing.paper import PAPER, PAPER_BOXES, pair_bounds
from assay.pricing.plan import Mix, Plan
from assay.pricing.price import Price, Prices, WorthCurve
from assay.pricing.quote import Quote, interval
from assay.pricing.results import Array, Goal

GOALS: dict[Goal, str] = {
    "structure": "structure, the levels above the noise",
    "everything": "everything, down to one grey step",
    "looks": "how samples look",
}
_MOST = 0.5  # of the runs
_UNLIKELY = 0.01  # a lack of fit that counts
_FEW = 3  # mixes
_VAGUE = 0.7  # width of an interval of a worth that says too little for a line
_ASSUMED = "no configuration was repeated, so the scatter around the law stands for the error of a run"
_WORTH = "worth of a noisy image, in clean ones"


@dataclass(frozen=True)
class Table:
    """A table as text cells."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        rows = [self.header, *self.rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return "\n".join([self.title, "", *lines]) + "\n"

    def markdown(self) -> str:
        """The table in Markdown; its texts are neither tags nor links nor bold."""
        marked = ["| " + " | ".join(map(_markdown, row)) + " |" for row in (self.header, *self.rows)]
        rule = "|" + "---|" * len(self.header)
        return "\n".join([f"**{_markdown(self.title)}**", "", marked[0], rule, *marked[1:]]) + "\n"


_IN_MARKDOWN = str.maketrans({"\\": r"\\", "|": r"\|", "*": r"\*"})


def _markdown(text: str) -> str:
    return re.sub("<(?=[A-Za-z/!?])", "&lt;", text.translate(_IN_MARKDOWN)).replace("](", r"]\(")


def amount(price: Price) -> str:
    """The replacement rate with its interval: "3.1 (2.4 to 4.2)", "at least 12", "undecided"."""
    rate, low, high = price.rate
    bounds = {"at least": f"at least {low:.3g}", "at most": f"at most {high:.3g}", "undecided": "undecided"}
    return bounds.get(price.verdict, f"{rate:.3g} ({low:.3g} to {high:.3g})")


def reason(price: Price) -> str:
    """Why a price is undecided, and what would decide it."""
    if price.has_slip:
        return f"{far_row(price)}: is it right?"
    if price.too_few:
        return f"{price.law.num_runs} runs are too few for a law, which takes {price.too_few} or more"
    if price.limited:
        return f"training, not data, is the limit here; it takes at least {price.limited:.0f} times the steps"
    if price.law.gain < 0.01:  # surely not falling, as a price needs it
        return f"{price.results.metric} rises with the number of images; give a result of which lower is better"
    if price.high == 0:
        return (
            "the mixes did worse than their clean images alone, so noisy images took training from clean ones; "
            "train longer, with the same number of draws at every level"
        )
    if price.flat:
        what = f"more clean images may not improve {price.results.metric} here"
        return f"{what}; train longer, on sizes that differ more, or in more blocks"
    more = price.blocks_for(4.0)
    runs = math.ceil(more * price.law.num_runs / max(price.law.num_blocks, 1))
    ends = _ends(*price.rate[1:])
    return f"{ends} of them may replace a clean one; about {more} more blocks ({runs:,} runs) would decide"


def far_row(price: Price, others: str = "the other results, which suggest") -> str:
    """The result that is farthest from others, and what these suggest."""
    results, far = price.results, price.farthest
    if far is None:
        return "a row may be wrong"
    noisy = tuple(zip(results.sigmas.tolist(), results.num_noisy[far.run].tolist(), strict=True))
    of = Configuration(num_clean=results.num_clean[far.run], noisy=noisy)
    value = f"the {results.metric} of {results.value[far.run]:.4g} with {of}"
    return f"{value} is far from {others} about {far.expected:.3g}"


def _misfit(price: Price) -> str:
    doubt = f"the scaling law does not fit the results (p = {price.law.lack_of_fit:.2g} for lack of fit)"
    return f"{doubt}; {far_row(price, 'it, which suggests')}: is it right?"


def _odd_levels(prices: Sequence[Price]) -> str:
    """Two levels of which the higher is surely worth more: noise only takes worth away, so one is a slip."""
    one_metric = [p for p in prices if p.goal != "structure" and p.verdict != "undecided"]
    for less, more in itertools.combinations(one_metric, 2):
        if more.low > less.high:
            both = f"{more.worth:.2g} at noise {more.sigma:.3g}, but {less.worth:.2g} at noise {less.sigma:.3g}"
            return f"a noisy image is worth {both}, which has less noise: are both levels typed right?"
    return ""


def cautions(prices: Sequence[Price]) -> list[str]:
    """What to check before acting on prices of one goal: what may be a slip, or why none is sure."""
    first, law = prices[0], prices[0].law
    said = [reason(first)] if first.has_slip else list(filter(None, [_odd_levels(prices)]))
    said = list(filter(None, [_harmful(prices)])) or said
    if not said and law.lack_of_fit is not None and law.lack_of_fit < _UNLIKELY:
        said = [_misfit(first)]
    if said:
        return said
    reasons = dict[str, list[str]]()
    for price in (price for price in prices if price.verdict == "undecided"):
        reasons.setdefault(reason(price), []).append(f"{price.sigma:.3g}")
    if len(prices) == 1:
        return [*reasons]
    return [f"at noise {' and '.join(levels)}: {why}" for why, levels in reasons.items()]


def _harmful(prices: Sequence[Price]) -> str:
    """What to say of mixes that are worse than the law for their clean images alone."""
    levels = []
    for price in (price for price in prices if not price.limited):
        results, law = price.results, price.law
        rows = results.num_noisy[:, results.sigmas == price.sigma].ravel() > 0
        clean, none = results.num_clean[rows], np.zeros_like(results.num_noisy[rows])
        alone = np.median(law.values(law.size(clean, none, results.sigmas)), axis=0)
        error = law.scatter * (alone if price.goal == "looks" else 1)
        if rows.sum() >= _FEW and 0 < law.scatter and (results.value[rows] > alone + 3 * error).mean() > 0.5:
            levels.append(f"{price.sigma:.3g}")
    what = f"at noise {' and '.join(levels)}, most mixes are worse than their clean images alone would be"
    doubt = "do clean images count the noisy ones, too, or are results of another kind?"
    return f"{what}: {doubt}" if levels else ""


def sentence(price: Price) -> str:
    """The price in a sentence, with its interval and the number of runs."""
    law, noisy = price.law, f"noisy images at noise {price.sigma:.3g}"
    goal = f"For {GOALS[price.goal]} ({price.results.metric}), "
    if price.has_slip:
        return f"{goal}what {noisy} are worth is undecided: {reason(price)}"
    number, _, ends = amount(price).partition(" (")
    sure = f"{price.confidence:.0%} interval{f' {ends[:-1]}' if ends else ''}, {law.num_runs} runs"
    sure += f" in {law.num_blocks} blocks" * (law.num_blocks > 1) + f"; {_ASSUMED}" * (not law.repeated)
    if price.verdict == "undecided":
        return f"{goal}what {noisy} are worth is undecided: {reason(price)} ({sure})."
    return f"{goal}{number} {noisy} replace a clean one ({sure})."


def headline(prices: Prices) -> str:
    """What to act on: the leading price, how samples look at its noise, and its goal at other levels."""
    best, others = prices.leading, [p for p in prices.prices if p is not prices.leading]
    looks = [p for p in others if (p.goal, p.sigma, p.verdict) == ("looks", best.sigma, "estimate")]
    rates = ", at noise ".join(f"{p.sigma:.3g}: {amount(p)}" for p in others if p.goal == best.goal)
    said = [*map(sentence, [best, *looks]), *[f"At noise {rates}."] * bool(rates)]
    return " ".join([*said, *training_limits(prices)])


def price_lines(prices: Prices) -> list[str]:
    """At most three lines, one for each goal: the rate at each noise level."""
    lines = []
    for goal, found in prices.goals.items():
        each = ", ".join(f"{amount(price)} at noise {price.sigma:.3g}" for price in found)
        each += "".join(f"; {caution}" for caution in cautions(found))
        metric = found[0].results.metric if goal == "looks" else "held-out loss"
        lines.append(f"{prices.dataset}, for {goal} ({metric}), noisy images per clean one: {each}")
    return lines + training_limits(prices)


def doubts(prices: Prices) -> list[str]:
    """What a reader of the headline must know: reasons for what is undecided, assumptions, and lack of fit."""
    said = []
    for goal, found in prices.goals.items():
        law = found[-1].law
        if found[0].has_slip:  # it spoils the law: nothing else can be said
            said += [f"For {goal}: {reason(found[0])}"] * (goal != prices.leading.goal)
            continue
        open_ones = [price for price in found if price.verdict == "undecided"]
        said += [f"For {goal} at noise {price.sigma:.3g}: {reason(price)}." for price in open_ones]
        if not law.repeated:
            said.append(f"For {goal}, {_ASSUMED}.")
        elif law.lack_of_fit is None:
            said.append(f"For {goal}, there are too few configurations to test the scaling law.")
        elif law.lack_of_fit < _UNLIKELY:
            said.append(f"For {goal}, {_misfit(found[0])}")
        else:
            said.append(f"For {goal}, the scaling law fits (p = {law.lack_of_fit:.2g} for lack of fit).")
    return said + training_limits(prices)


def training_limits(prices: Prices) -> list[str]:
    """Where longer training, not more data, would tell more: goals, and noise levels; nothing if nowhere."""
    late = {p.goal: f"{p.goal}: {p.late:.0%}" for p in prices.prices if p.late >= _MOST and not p.limited}
    said = []
    if late:
        what = f"Most runs were best at their last step ({', '.join(late.values())})"
        said = [f"{what}: longer training may change these rates by more than their intervals."]
    bands = {f"{c.levels[b]:.2g}" for c in prices.curves for b in np.flatnonzero(c.limited)}
    limited = ", ".join(sorted(bands, key=float))
    return [*said, *[f"Training, not data, is the limit at these noise levels: {limited}."] * bool(limited)]


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
            said.append(f"not in the fit, {setting}: measured {each.evaluation.fd:.3g}, {shown}")
    return said


def price_rows(prices: Prices) -> list[dict[str, Any]]:
    """One flat row for each goal and noise level; the pairs' bounds and the paper's boxes as cross-checks."""
    rows = []
    limited = {curve.sigma: curve.levels[np.flatnonzero(curve.limited)].tolist() for curve in prices.curves}
    notes = {goal: cautions(found) for goal, found in prices.goals.items()}
    for price in prices.prices:
        rate, low, high = price.rate
        least, most = pair_bounds(price.results)[price.sigma]
        row: dict[str, Any] = {
            "dataset": prices.dataset, "goal": price.goal, "metric": price.results.metric, "sigma": price.sigma,
            "verdict": price.verdict, "rate": rate, "rate_low": low, "rate_high": high, "worth": price.worth,
            "worth_low": price.low, "worth_high": price.high, "lack_of_fit": price.law.lack_of_fit,
            "num_runs": price.law.num_runs, "num_blocks": price.law.num_blocks,
            "pairs_low": 1 / most if most > 0 else math.inf, "pairs_high": 1 / least if least > 0 else math.inf,
            "levels_limited_by_training": limited.get(price.sigma, []), "best_at_last_step": price.late,
            "notes": notes[price.goal],
        }  # fmt: skip
        if price.verdict in ("at least", "at most"):
            row["rate"] = math.nan  # there is only a bound
        if price.verdict == "undecided":
            row |= {"reason": reason(price)} | dict.fromkeys(("rate", "rate_low", "rate_high"), math.nan)
        if not price.tells:
            row |= dict.fromkeys(("worth", "worth_low", "worth_high"), math.nan)
        if price.has_slip:
            row["lack_of_fit"] = math.nan
        if prices.from_paper and (box := PAPER_BOXES.get((prices.dataset, price.sigma))):
            row |= {"box_low": box[0], "box_high": box[1]}
        rows.append(row)
    return rows


def detail_table(prices: Prices) -> Table:
    """The table behind `--details`."""
    header = ["goal", "noise", "noisy per clean", "worth", "by pairs of runs, errors ignored"]
    header += ["paper's box"] * prices.from_paper
    rows = []
    for row, price in zip(price_rows(prices), prices.prices, strict=True):
        worth = f"{price.worth:.3g} ({price.low:.3g} to {price.high:.3g})" if price.tells else "-"
        pairs = _ends(row["pairs_low"], row["pairs_high"])
        box = _ends(row["box_low"], row["box_high"]) if "box_low" in row else "-"
        cells = price.goal, f"{price.sigma:.3g}", amount(price), worth, pairs, box
        rows.append(cells[: len(header)])
    return Table("Prices and their cross-checks", tuple(header), tuple(rows))


def _ends(low: float, high: float) -> str:
    if low > high or math.isinf(low):
        return "contradictory"
    first, last = f"{low:.4g}", f"{high:.4g}"
    if math.isinf(high):
        return f"{first} or more"
    return f"about {first}" if first == last else f"{first} to {last}"


def quote_lines(quote: Quote) -> list[str]:
    """A quote in three lines for each noise level; the last says whether a study would pay."""
    lines, rows = [], quote_rows(quote)
    for structure, everything in zip(rows[::2], rows[1::2], strict=True):
        for row in (structure, everything):
            rate = f"{row['rate']:.3g} noisy images at noise {row['sigma']:.3g} replace a clean one"
            ends = f"{row['rate_low']:.3g} to {row['rate_high']:.3g} in 95% of quotes"
            if math.isinf(row["rate_high"]):
                ends = f"{row['rate_low']:.3g} or more"
            lines.append(f"For {GOALS[row['goal']]}: about {rate} ({ends}).")
        low, high = structure["worth_low"], structure["worth_high"]
        advice = "A study would hardly narrow the range for structure."
        if high > 2.5 * low > 0:
            factor = f"If the range for structure, a factor of {high / low:.2g}, is too wide, run a study"
            advice = f"{factor}, which narrows it to about two."
        if few := _few(quote):
            advice = f"But {few}."
        elif high < 0.02 or low > 0.8:
            advice = f"They are {'too noisy' if high < 0.02 else 'as good as clean'}: a study would not pay."
        lines.append(advice)
    return [*lines, f"These rates are for mixes in which {quote.share:.0%} of the images are clean."]


def _few(quote: Quote) -> str:
    if quote.num_images >= quote.num_values:
        return ""
    few = f"{quote.num_images:,} clean images are few for {quote.num_values:,} values each"
    return f"{few}: with more, noisy images may turn out to be worth less"


def quote_doubts(quote: Quote, offered: Array) -> Iterator[str]:
    """What the reader of a plan by a quote must know."""
    yield "a quote takes images for Gaussian, which they are not: before you spend much, run a study"
    if few := _few(quote):
        yield few
    for sigma in np.unique(offered[offered > 0]):
        if np.abs(quote.sigmas / sigma - 1).min() > 0.01:
            quoted = ", ".join(f"{level:.3g}" for level in quote.sigmas)
            yield f"noise {sigma:.3g} is offered, and {quoted} was quoted: are both where black to white is 2?"


def quote_rows(quote: Quote) -> list[dict[str, Any]]:
    """One flat row for each noise level and goal."""
    goals: tuple[Goal, ...] = ("structure", "everything")
    rows = []
    for sigma, goal in itertools.product(quote.sigmas.tolist(), goals):
        worth, low, high = quote.goal(goal, sigma)
        rates = {"rate": 1 / worth, "rate_low": 1 / high, "rate_high": 1 / low if low else math.inf}
        worths = {"worth": worth, "worth_low": low, "worth_high": high}
        rows.append({"goal": goal, "sigma": sigma} | rates | worths)
    return rows


def price_panels(prices: Prices) -> list[Panel]:
    """The worth curve; without results by level, each metric against the clean images, with its law."""
    if not prices.curves:
        return [_law_panel(prices.dataset, each[-1]) for each in prices.goals.values()]
    return [_worth_panel(f"{prices.dataset}: worth by level", prices.curves)]


def quote_panels(quote: Quote) -> list[Panel]:
    """The quoted worth by level, with its stated accuracy."""
    curves = []
    for sigma, worth in zip(quote.sigmas.tolist(), quote.worth, strict=True):
        low, high = np.transpose([interval(w)[1:] for w in worth])
        curves.append(WorthCurve(sigma, quote.levels, worth, low, high, np.zeros(len(worth))))
    return [_worth_panel("quoted worth by level", curves)]


def _worth_panel(title: str, curves: Sequence[WorthCurve]) -> Panel:
    panel = Panel(title, "noise level", _WORTH, log_x=True)
    for which, curve in enumerate(curves):
        colour, name = COLOURS[(which + 1) % len(COLOURS)], f"noise {curve.sigma:.3g}"
        vague = curve.high - curve.low > _VAGUE  # the band shows it; a line would suggest more
        known = np.where(curve.limited.astype(bool) | vague, np.nan, curve.worth)
        panel.series.append(Series("", "band", curve.levels, curve.worth, curve.low, curve.high, colour))
        panel.series.append(Series(name, "line", curve.levels, known, colour=colour))
        if curve.quoted is not None:
            panel.series.append(Series(f"{name}, quoted", "dashed", curve.levels, curve.quoted, colour=colour))
    return panel


def _law_panel(dataset: str, price: Price) -> Panel:
    """Results and the law: the paper's Figure 1 if all mixes have one size, else against effective images.

    A slip spoils the law: then there are the results alone, against all images.
    """
    measured, law, has_law = price.results, price.law, not price.has_slip
    num_clean, num_noisy, total = measured.num_clean, measured.num_noisy, measured.num_noisy.sum(1)
    sizes, whole = law.size(num_clean, num_noisy, measured.sigmas), (num_clean + total).max()
    one_size = np.ptp((num_clean + total)[total > 0]) <= 0.01 * whole
    x, unit = np.median(sizes, 0), "training images, noisy ones counted by their worth"
    if not has_law:
        x, unit = num_clean + total, "training images, clean and noisy"
    if one_size:
        x, unit = 100 * (1 - num_clean / whole), "images that are noisy, or (clean only) left out, in %"
    title = f"{dataset}: {measured.metric}" + ", and the law" * has_law
    panel = Panel(title, unit, measured.metric, log_x=not one_size, log_y=True)
    if has_law and not one_size:
        grid = np.geomspace(x.min(), x.max(), 60)
        low, middle, high = np.quantile(law.values(grid[None]), [0.025, 0.5, 0.975], axis=0)
        panel.series.append(Series("", "band", grid, middle, low, high, COLOURS[0]))
        panel.series.append(Series("the law", "line", grid, middle, colour=COLOURS[0]))
    for which, sigma in enumerate([0.0, *measured.sigmas]):
        colour, noisy = COLOURS[which % len(COLOURS)], num_noisy[:, which - 1]
        name, rows = "clean only", total == 0
        if sigma:
            name = f"noise {sigma:.3g}" if one_size else f"with noise {sigma:.3g}"
            rows = (noisy > 0) & ((noisy == total) | (not one_size))
        order = np.flatnonzero(rows)[np.argsort(-num_clean[rows])]
        alone = [value for level, value in measured.alone if level == sigma and one_size]
        points = np.append(x[order], np.full(len(alone), 100.0)), np.append(measured.value[order], alone)
        panel.series.append(Series(name, "points", *points, colour=colour))
        if has_law and one_size:
            line = np.median(law.values(sizes[:, order]), 0)
            panel.series.append(Series("", "line", x[order], line, colour=colour))
    return panel


def plan_lines(plan: Plan) -> list[str]:
    """What it is for, what to buy, how sure that is, the runners-up, and notes."""
    best, *others = plan.mixes
    moves = zip(plan.names, best.counts, plan.count_intervals, strict=True)
    ends = ", ".join(f"{_outward(*ends)} {name}" for name, count, ends in moves if count or ends[1])
    sure, first = f"{plan.confidence:.0%}", _bought(plan, best)
    lines = [
        f"For {GOALS[plan.goal]}, by {plan.basis}:",
        f"Buy {first}." if plan.decided else f"Undecided, see the notes. If you must buy now: {first}.",
    ]
    if plan.target is None:
        hedge = f", but within {plan.close:.2g} of that in {sure}" * (best.chance < plan.confidence)
        is_open = best.chance < 0.3 and plan.close > best.value / 4
        lines += [
            "What is known hardly decides between mixes: look at the others, too." * is_open,
            f"This is the best mix on average: {_often(plan, best)}{hedge}.",
            f"The very best lies within {ends} ({sure}).",
        ]
    else:
        tie = f", to {math.ceil(1000 * plan.close) / 10:g}%" * (plan.close > 0)
        surely = f"no mix is {sure} sure to reach it"
        if plan.sure:
            often = f" ({_often(plan, plan.sure)})" * (plan.sure.chance >= 0.02)
            surely = f"to be {sure} sure, buy {_bought(plan, plan.sure)}{often}"
        lines += [
            f"This is the cheapest mix that reaches {plan.target:g} on average{tie}; {_often(plan, best)}.",
            f"The cheapest mix lies within {ends}, for {_outward(*plan.cost_interval)} ({sure}).",
            f"The target is reached in {best.reached:.0%} of the likely cases; {surely}.",
        ]
    lines = [line for line in lines if line]
    lines += [f"Or {_bought(plan, mix)}; {_often(plan, mix)}." for mix in others]
    told = {  # mixes of the same vendors are cheapest together
        mix.counts if plan.target is None else tuple(np.sign(mix.counts)): mix.chance
        for mix in (*plan.mixes, *filter(None, [plan.sure]))
    }
    if (rest := 1 - sum(told.values())) >= 0.02:
        are = "other mixes are the best" if plan.target is None else "other vendors are the cheapest"
        lines.append(f"In {rest:.0%} of them, {are}.")
    return lines + [f"Note: {note}{'' if note.endswith('?') else '.'}" for note in plan.notes]


def _outward(low: float, high: float) -> str:
    """An interval with three digits, rounded outward."""

    def end(value: float, away: Callable[[float], int]) -> str:
        unit = 10.0 ** max(math.floor(math.log10(max(value, 1))) - 2, 0)
        return f"{away(value / unit) * unit:,.0f}"

    first = end(low, math.floor)
    return f"{first} or more" if math.isinf(high) else f"{first} to {end(high, math.ceil)}"


def _bought(plan: Plan, mix: Mix) -> str:
    counts = ", ".join(f"{n:,.0f} {name}" for name, n in zip(plan.names, mix.counts, strict=True) if n)
    ends = f" on average ({mix.low:.4g} to {mix.high:.4g})" * (mix.high > 1.001 * mix.low)
    return f"{counts} for {mix.cost:,.2f}: {plan.metric} of {mix.value:.4g}{ends}"


def _often(plan: Plan, mix: Mix) -> str:
    often = f"in {f'{mix.chance:.0%}' if mix.chance >= 0.02 else 'few'} of the likely cases"
    return f"the very best {often}" if plan.target is None else f"its vendors are the cheapest {often}"


def plan_rows(plan: Plan) -> list[dict[str, Any]]:
    """One flat row for each of the best few mixes, and for that which surely reaches a target."""
    same = {"goal": plan.goal, "basis": plan.basis, "decided": plan.decided, "notes": list(plan.notes)}
    rows = []
    for mix in (*plan.mixes, *filter(None, [plan.sure])):
        told = {name: value for name, value in vars(mix).items() if name != "counts"}
        told["surely"] = mix is plan.sure
        rows.append(dict(zip(plan.names, mix.counts, strict=True)) | told | same)
    return rows
