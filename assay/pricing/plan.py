"""Which images to buy: the mix with the best predicted result for a budget, or the cheapest for a target.

A forecast gives each mix as many predicted results as there are draws from what is known: of the scaling law
(summed over bands of levels where results by level were measured, so that fine detail asks for clean images),
or of a quote within its stated accuracy. By one law the best mix of a draw has the most effective images,
sum_v w_v n_v, for the money. That is a linear programme, so it is a corner of what can be bought: all offers
but two are at none, their smallest or their largest order, and the budget and the share of clean images decide
those two. Sums over bands may also be best between corners. All of these are compared draw by draw: that says
which is best on average, how often each of them is, and how far the best one moves. Mixes stay within the
shares of clean images that were measured: beyond them the law was never tested.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from assay.errors import AssayError, check
from assay.files import decoding
from assay.noise import warn_of_units
from assay.outcome import OTHER_NAMES, read_table
from assay.pricing.law import Law, check_confidence, interval
from assay.pricing.price import Prices, price
from assay.pricing.quote import SPREAD, Quote
from assay.pricing.results import Array, Goal
from assay.settings import Config, Rules

Flags = NDArray[np.bool_]
_NUM_SHOWN, _MAX_DRAWS, _MAX_CORNERS = 4, 200, 10_000
_MOST_MONEY = 1e15  # that anybody has
_UNSPENT = 0.05  # of a budget, of which a plan tells
_RARE = 0.02  # cases that are not worth a line
_STEP = 0.02  # of the costs of the cheapest mixes by each draw
_ALIKE = 0.02  # of the images of a mix: others that differ by less are the same
_TIE = 0.01  # of a cost, below which the likelier mix comes first
_MAX_ENDS, _PARTS = 6, 10  # mixes between which others are tried, and into how many parts a way is divided


class Vendor(Config):
    """Images for sale: their noise level (0 for clean ones), unit price, and the smallest and largest order.

    >>> assay.Vendor(name="lab", sigma=0.2, price=0.05, max_images=5000).title
    'noisy at 0.2 from lab'
    """

    name: str = ""
    sigma: float = Field(0.0, ge=0, allow_inf_nan=False)
    price: float = Field(gt=0, allow_inf_nan=False)
    min_images: float = Field(0.0, ge=0, allow_inf_nan=False)
    max_images: float = Field(math.inf, ge=0)

    def rules(self) -> Rules:
        """The smallest order is not above the largest."""
        what = f"{self.min_images:g} is more than the largest order, {self.max_images:g}"
        yield self.min_images > self.max_images, AssayError(what, key="min_images")

    @property
    def title(self) -> str:
        """What is bought there."""
        kind = f"noisy at {self.sigma:.3g}" if self.sigma else "clean"
        return f"{kind} from {self.name}" if self.name else kind


@dataclass(frozen=True)
class Mix:
    """What to buy of each vendor, its cost, and the predicted result on average with its interval.

    `chance` is that it is best; for a target, that its vendors are the cheapest, and `reached` that it is.
    """

    counts: tuple[float, ...]
    cost: float
    value: float
    low: float
    high: float
    chance: float
    reached: float = math.nan


@dataclass(frozen=True)
class Plan:
    """The best few mixes, best first, and the interval of the best number of each vendor's images.

    `basis` is what it was read from. The first mix is within `close` of the very best at this confidence.
    For a target, mixes reach it on average, and `sure` (if any can) at this confidence; the first costs at most
    a share `close` more than the cheapest, and the intervals are those of the cheapest mix of each likely law.
    """

    names: tuple[str, ...]
    metric: str
    mixes: tuple[Mix, ...]
    count_intervals: tuple[tuple[float, float], ...]
    cost_interval: tuple[float, float]
    confidence: float
    goal: Goal
    basis: str
    notes: tuple[str, ...]
    decided: bool = True  # whether a price that it rests on is
    close: float = 0.0
    target: float | None = None
    sure: Mix | None = None

    def __repr__(self) -> str:
        from assay.pricing.words import plan_lines

        return "\n".join(plan_lines(self))


@dataclass(frozen=True)
class Forecast:
    """Predicts results (R, m) of mixes, clean images (m,) and noisy ones (m, V) at levels (V,), for a goal."""

    goal: Goal
    metric: str
    basis: str  # what it was read from
    predict: Callable[[Array, Array, Array], Array]
    law: Law | None = None  # of the results, if there are any
    doubts: tuple[str, ...] = ()  # about the results
    decided: bool = True  # whether any price is


def plan(
    source: Prices | Quote | Any,
    vendors: Sequence[Vendor] | Path | str | Any,
    budget: float | None = None,
    target: float | None = None,
    have_clean: float = 0.0,
    goal: Goal | None = None,
    confidence: float = 0.95,
) -> Plan:
    """The mix of images to buy, for a budget or a target, from a price, a quote or what `price` takes.

    `vendors` are `Vendor`s, or a CSV file or DataFrame with columns name, sigma (0 or empty for clean), price
    and, where they apply, min_images and max_images. `goal` is by default the first of structure, looks and
    everything whose price is decided; of a quote it is structure.

    >>> offers = [assay.Vendor(price=1.0), assay.Vendor(sigma=0.2, price=0.1)]
    >>> assay.plan(assay.price(), offers, budget=10_000)
    For ...
    """
    is_table = isinstance(vendors, str | Path) or hasattr(vendors, "to_csv")
    offers: Any = read_vendors(vendors) if is_table else vendors
    if not (isinstance(offers, Sequence) and offers and all(isinstance(offer, Vendor) for offer in offers)):
        cure = "give a list of `Vendor`s with one or more, or their CSV file"
        raise AssayError("are not offers", key="vendors", cure=cure)
    check([
        ((budget is None) == (target is None), AssayError("give either a budget or a target", key="budget")),
        (not 0 <= (budget or 0) < math.inf, AssayError(f"{budget} is no sum of money", key="budget")),
        (not (have_clean == 0 or have_clean >= 1),
         AssayError(f"{have_clean:g} is no number of images", key="have_clean", cure="count them")),
    ])  # fmt: skip
    check_confidence(confidence)
    levels = np.array([offer.sigma for offer in offers])
    warn_of_units(levels.max())
    if twice := [offer.title for offer in set(offers) if offers.count(offer) > 1]:
        raise AssayError(f"{twice[0]} is offered twice", key="vendors", cure="list each offer once")
    known = source if isinstance(source, Prices | Quote) else price(source)
    market = _Market(forecast_of(known, goal, levels), offers, have_clean)
    if target is not None:
        return market.for_target(target, confidence)
    return market.for_budget(budget or 0.0, confidence)


def read_vendors(table: Any) -> list[Vendor]:
    """The vendors of a CSV file or a DataFrame."""
    path, header, rows = read_table(table)
    names, offers = [OTHER_NAMES.get(name, name) for name in header], []
    if "sigma" not in names:
        cure = "add it, and leave it empty for clean images"
        raise AssayError("has no column for the noise level of each offer", path=path, key="sigma", cure=cure)
    for line, row in rows.items():
        with decoding(f"{path}, line {line}", "correct the line"):
            cells = zip(names, map(str.strip, row), strict=True)
            offers.append(Vendor(**{name: cell for name, cell in cells if cell}))
    return offers


def forecast_of(source: Prices | Quote, goal: Goal | None, offered: Array) -> Forecast:
    """What predicts the results of mixes for a goal, with noise of the levels that are `offered`."""
    from assay.pricing.words import cautions, extremes, far_row, quote_doubts, training_limits

    if isinstance(source, Quote):
        cure = "choose structure or everything, or run a study"
        check([(goal == "looks", AssayError("a quote does not know how images look", key="goal", cure=cure))])
        chosen: Goal = goal or "structure"
        power = np.exp(SPREAD * np.random.default_rng(0).standard_normal(_MAX_DRAWS // 4))

        def closed_form(clean: Array, noisy: Array, sigmas: Array) -> Array:
            return source.excess(clean, noisy, sigmas, chosen, power)

        unsure = tuple(quote_doubts(source, offered))
        return Forecast(chosen, "excess loss", "a quote", closed_form, doubts=unsure)

    goal = goal or source.leading.goal
    seen = [each.sigma for each in source.goals.get(goal, ()) if each.sigma >= 0.99 * offered.max()]
    found = source.of(goal, min(seen, default=None))  # structure is what lies above the noise on offer
    if found.has_slip:
        raise AssayError(far_row(found), key="table", cure="correct its row, or remove it")
    law, laws = found.law, [found.law]
    if source.curves and goal != "looks":
        low = found.sigma if goal == "structure" else 0.0
        laws = [band for band, level in zip(source.bands, source.curves[0].levels, strict=True) if level > low]
    thin = slice(None, None, max(1, len(law.floor) // _MAX_DRAWS))

    def by_law(clean: Array, noisy: Array, sigmas: Array) -> Array:
        return sum((each.values(each.size(clean, noisy, sigmas))[thin] for each in laws), np.zeros(()))

    prices, whose = source.goals[goal], "the paper's" if source.from_paper else "the"
    decided = any(each.verdict != "undecided" for each in prices)
    doubts = *cautions(prices), *extremes(source), *(text.rstrip(".") for text in training_limits(source))
    basis = f"{whose} results of {source.dataset}"
    return Forecast(goal, found.results.metric, basis, by_law, law, doubts, decided)


class _Market:
    """What can be bought beside the clean images in hand: arrays (V,) of the offers, and a forecast."""

    def __init__(self, forecast: Forecast, offers: Sequence[Vendor], have_clean: float) -> None:
        self.forecast, self.offers, self.have_clean = forecast, offers, have_clean
        columns = zip(*((o.price, o.min_images, o.max_images, o.sigma) for o in offers), strict=True)
        self.price, self.least, self.most, self.sigma = (np.array(column, float) for column in columns)
        self.least, self.most, self.clean = np.ceil(self.least), np.floor(self.most), self.sigma == 0
        self.least_share = forecast.law.least_share(self.sigma) if forecast.law else 0.0  # of clean images

    def split(self, counts: Array) -> tuple[Array, Array, Array]:
        """Clean images (m,), noisy ones (m, S) and their levels (S,) of mixes (m, V)."""
        numbers = self.have_clean + counts[:, self.clean].sum(1), counts[:, ~self.clean]
        return *numbers, self.sigma[~self.clean]

    def predict(self, counts: Array) -> Array:
        """Draws (R, m) of the results of mixes (m, V)."""
        return self.forecast.predict(*self.split(counts))

    def corners(self, budget: float) -> Array:
        """The corners (m, V) of what the budget buys, in whole images; what is left buys some more."""
        num, share = len(self.price), self.least_share
        limits = np.stack([self.price, share - self.clean])  # times counts, at most these
        ends = np.array([budget, (1 - share) * self.have_clean])
        known = zip(self.least, np.where(self.most * self.price <= budget, self.most, 0), strict=True)
        orders = [sorted({0.0, *each}) for each in known]
        if math.prod(map(len, orders)) * num**2 > 50 * _MAX_CORNERS:
            cure = "leave out those that are dearer at the same noise"
            raise AssayError(f"{num} offers have too many mixes", key="vendors", cure=cure)
        grid = np.stack(np.meshgrid(*orders, indexing="ij"), -1).reshape(-1, num)
        grid = grid[grid @ self.price <= budget * (1 + 1e-9)]
        found = [grid]
        for some in itertools.chain(*(itertools.combinations(range(num), size) for size in (1, 2))):
            rest = grid[(grid[:, some] == 0).all(1)]
            left = ends - rest @ limits.T
            for which in ((0, 1),) if len(some) == 2 else ((0,), (1,)):
                inside = limits[np.ix_(which, some)]
                if np.linalg.cond(inside) < 1e12:
                    rest[:, some] = np.linalg.solve(inside, left[:, which, None])[..., 0]
                    found.append(rest.copy())
        exact = np.concatenate(found).clip(0, self.most)
        up = np.minimum(np.where(self.clean, np.ceil(exact - 1e-6), exact), self.most)
        counts = np.floor(np.concatenate([exact, up]) + 1e-6)  # whole images, with one clean one less or more
        if share and not self.clean.all():  # and as many noisy ones less as the limits then ask for
            rows, most = np.arange(len(counts)), np.argmax(np.where(self.clean, -1, counts), axis=1)
            over = np.ceil(((counts @ limits.T - ends) / limits[:, most].T).max(1) - 1e-6)
            counts[rows, most] -= over.clip(0, counts[rows, most])
        counts = np.concatenate([counts, self.at_cheaper(counts)])
        for vendor in np.argsort(-self.price, kind="stable"):
            need = limits[:, vendor]
            room = ((ends - counts @ limits.T)[:, need > 0] / need[need > 0]).min(1)
            more = np.minimum(np.floor(room + 1e-9), self.most[vendor] - counts[:, vendor]).clip(0)
            is_order = (counts[:, vendor] > 0) | (more * self.price[vendor] > 0.01 * budget)  # not one image
            counts[:, vendor] += more * (is_order & (counts[:, vendor] + more >= self.least[vendor]))
        return np.unique(self.allowed(counts, budget), axis=0)

    def at_cheaper(self, counts: Array) -> Array:
        """Mixes (m, V) of the same images, as far as they can be had from cheaper offers of their level."""
        counts = counts.copy()
        for dear, cheap in itertools.permutations(np.argsort(-self.price, kind="stable"), 2):
            if self.sigma[dear] == self.sigma[cheap] and self.price[dear] > self.price[cheap]:
                room, whole = self.most[cheap] - counts[:, cheap], counts[:, dear]
                rest = np.minimum(room, (whole - self.least[dear]).clip(0))  # what stays is an order, too
                moved = np.where(whole <= room, whole, rest)
                counts[:, cheap] += moved
                counts[:, dear] -= moved
        return counts

    def allowed(self, counts: Array, budget: float) -> Array:
        """Those of mixes (m, V) that can be bought, within the measured shares."""
        clean, noisy, _ = self.split(counts)
        is_order = (counts == 0) | ((counts >= self.least) & (counts <= self.most))
        share = clean + 1e-6 >= self.least_share * (clean + noisy.sum(1))
        return counts[is_order.all(1) & share & (counts @ self.price <= budget * (1 + 1e-9))]

    def mixes(self, budget: float) -> tuple[Array, Array]:
        """The mixes (m, V) that may be best for the budget, and draws (R, m) of their results."""
        counts = self.corners(budget)
        values = self.predict(counts)
        for _ in range(2):
            often = np.bincount(values.argmin(1), minlength=len(counts)) / len(values)
            often[np.median(values, 0).argmin()] += 1
            ends = counts[np.argsort(-often, kind="stable")[: min(_MAX_ENDS, np.count_nonzero(often))]]
            parts = np.linspace(0, 1, _PARTS + 1)[1:-1, None]
            ways = [one + parts * (other - one) for one, other in itertools.combinations(ends, 2)]
            if ways:
                more = self.allowed(np.floor(np.concatenate(ways)), budget)
                counts, values = np.concatenate([counts, more]), np.hstack([values, self.predict(more)])
        return counts, values

    def check_budget(self, budget: float) -> None:
        """Reject less than the cheapest order that can be bought alone costs."""
        order, share, have = np.maximum(self.least, 1), self.least_share, self.have_clean
        alone = (have + order * self.clean >= share * (have + order)) & (order <= self.most)
        cost = np.where(alone, order * self.price, math.inf)
        first, least = int(cost.argmin()), float(cost.min())
        what = f"mixes need clean images, a share of {share:.2g} or more, and none are for sale"
        cure = "offer some, or say how many you have, e.g. have_clean = 400"
        enough = f" with clean images in a share of {share:.2g} or more, as measured," * bool(share)
        less = f"the cheapest order{enough} is {order[first]:,.0f} {self.offers[first].title} for {least:,.2f}"
        check([
            (math.isinf(least), AssayError(what, key="vendors", cure=cure)),
            (least > budget * (1 + 1e-9), AssayError(f"{less}, more than {budget:,.2f}", key="budget",
                                                     cure="raise it; are prices those of one image?")),
        ])  # fmt: skip

    def for_budget(self, budget: float, confidence: float) -> Plan:
        """The best mixes for a budget, and how sure that is."""
        self.check_budget(budget)
        counts, values = self.mixes(budget)
        first, winners = int(np.median(values, 0).argmin()), values.argmin(1)
        chance = np.bincount(winners, minlength=len(counts)) / len(winners)
        shown = [first]
        for i in np.argsort(-chance, kind="stable").tolist():
            apart = np.abs(counts[shown] - counts[i]).sum(1) / counts[i].sum()
            if i != first and apart.min() < _ALIKE:  # a few images more or less are one answer
                same = shown[int(apart.argmin())]
                chance[same], chance[i] = chance[same] + chance[i], 0
            elif i != first and chance[i] and len(shown) < _NUM_SHOWN:
                shown.append(i)
        found = self.plan(counts[shown], chance[shown], counts[winners], confidence)
        if (left := budget - found.mixes[0].cost) > _UNSPENT * budget:
            most = "the largest orders and the share of clean images allow no more"
            found = replace(found, notes=(*found.notes, f"{left:,.2f} of the budget are left: {most}"))
        large = [offer for offer in self.offers if math.ceil(offer.min_images) * offer.price > budget]
        least = "the smallest order of {0.title} costs {1:,.2f}, more than the budget: it is left out"
        dear = (least.format(offer, math.ceil(offer.min_images) * offer.price) for offer in large)
        close = float(np.quantile(values[:, first] - values.min(1), confidence))
        return replace(found, close=close, notes=(*found.notes, *dear))

    def for_target(self, target: float, confidence: float) -> Plan:
        """The cheapest mixes that reach a target on average, one that surely does, and how sure that is."""
        self.check_budget(math.inf)
        if np.median(self.predict(np.zeros((1, len(self.price))))) <= target:
            what = f"{max(self.have_clean, 1):,.0f} clean images reach {target:g} already: no more are needed"
            raise AssayError(what, key="target", cure="lower it")
        average, sure = self.cheapest(target, lambda v: np.quantile(v, [0.5, confidence], axis=0))
        if np.isinf(average).any():
            best = float(np.median(self.mixes(_MOST_MONEY)[1], 0).min())
            what = f"a target of {target:g} is out of reach of these vendors, who allow {best:.4g}"
            raise AssayError(what, key="target", cure="raise it, or find more offers")
        likely = self.cheapest(target, lambda v: v, _STEP)
        used, number = np.unique((likely > 0) & np.isfinite(likely), axis=0, return_counts=True)
        often, mixes = number / number.sum(), [average]
        for i in np.argsort(-number, kind="stable")[:_NUM_SHOWN]:
            mix = self.only(used[i]).cheapest(target, lambda v: np.quantile(v, [0.5], axis=0))[0]
            if often[i] >= _RARE and ((mix > 0) == used[i]).all() and (used[i] != (average > 0)).any():
                mixes.append(mix)
        found, costs = np.array([*mixes, sure]), np.array(mixes) @ self.price
        chance = np.array([often[((mix > 0) == used).all(1)].sum() for mix in found])
        first = int(np.where(costs <= (1 + _TIE) * costs[0], chance[:-1], -1).argmax())
        shown = [first, *np.delete(np.arange(len(mixes)), first)][:_NUM_SHOWN]
        shown += [-1] * bool(np.isfinite(sure).all())
        plan = self.plan(found[shown], chance[shown], likely, confidence, target)
        plan = replace(plan, close=float(costs[first] / costs[0] - 1))
        return replace(plan, mixes=plan.mixes[:-1], sure=plan.mixes[-1]) if shown[-1] == -1 else plan

    def plan(
        self, counts: Array, chance: Array, likely: Array, confidence: float, target: float | None = None
    ) -> Plan:
        """A plan of mixes (k, V), best first; by each draw the best is in `likely` (R, V), inf if none is."""
        values, tail = self.predict(counts), 50 * (1 - confidence)
        low, middle, high = np.percentile(values, [tail, 50, 100 - tail], axis=0).clip(0)
        ends, spent = (
            np.percentile(each, [tail, 100 - tail], axis=0, method="nearest")
            for each in (likely[np.isfinite(likely).all(1)], likely @ self.price)
        )
        reached = np.full(len(counts), math.nan) if target is None else (values <= target).mean(0)
        numbers = np.column_stack([counts @ self.price, middle, low, high, chance, reached]).tolist()
        of, notes = self.forecast, self.notes(counts[0])
        return Plan(
            tuple(self.titles()), of.metric,
            tuple(Mix(tuple(each), *known) for each, known in zip(counts.tolist(), numbers, strict=True)),
            tuple((float(a), float(b)) for a, b in ends.T), (float(spent[0]), float(spent[1])), confidence,
            of.goal, of.basis, tuple(dict.fromkeys((*of.doubts, *notes))), of.decided, target=target,
        )  # fmt: skip

    def notes(self, counts: Array) -> Iterable[str]:
        """What the reader of a plan must know of a mix (V,) and of the offers."""
        clean, noisy, levels = self.split(counts[None])
        if self.least_share and clean[0] - 1 <= 1.01 * self.least_share * (clean[0] + noisy.sum()):
            share = (
                f"the smallest share of clean images that was measured with such noise ({self.least_share:.3g})"
            )
            yield f"this is {share}, which decides the mix: a smaller one might be better, or not"
        if self.forecast.goal == "structure" and len(set(levels.tolist())) > 1:
            yield f"structure counts the levels above {levels.max():.3g}, the highest noise for sale"
        if clean[0] == 0:
            yield "a mix without clean images learns nothing finer than its noise"
        if law := self.forecast.law:
            size, (fewest, most) = float(np.median(law.size(clean, noisy, levels))), law.seen
            if not fewest <= size <= most:
                units = " (are budget and prices in the same unit, and per image?)" * bool(size < fewest / 10)
                seen = f"measured were {fewest:,.0f} to {most:,.0f}"
                yield f"an extrapolation{units}: this mix counts as {size:,.0f} clean images, and {seen}"
            for level in np.unique(self.sigma[~self.clean]):
                if not law.is_measured(level):
                    worth, low, high = (float(end[0]) for end in interval(law.worth_at(level)))
                    rate = f"about {1 / worth:.3g} ({1 / high:.3g} to {1 / max(low, 1e-9):.3g})"
                    replaces = f"{rate} of its images are taken to replace a clean one"
                    yield f"no result has noise {level:.3g}: {replaces}, from the levels around it"
        cheapest = self.price[self.clean].min(initial=math.inf)
        if (spent := float(counts @ self.price)) < cheapest < math.inf:
            yield f"this costs {spent:g}, and one clean image {cheapest:g}: are budget and prices in one unit?"
        for offer in self.offers:
            if offer.sigma and cheapest < math.inf and not cheapest / 1000 < offer.price <= cheapest:
                yield f"{offer.title} costs {offer.price:g}, a clean image {cheapest:g}: are both per image?"

    def titles(self) -> Iterable[str]:
        """The titles of the offers, with the price of those of one title."""
        names = [offer.title for offer in self.offers]
        for name, offer in zip(names, self.offers, strict=True):
            yield name if names.count(name) == 1 else f"{name} at {offer.price:g} each"

    def only(self, vendors: Flags) -> "_Market":
        """The offers of some vendors (V,)."""
        other = copy(self)
        other.least, other.most = np.where(vendors, self.least, 0), np.where(vendors, self.most, 0)
        return other

    def cheapest(self, target: float, scores: Callable[[Array], Array], step: float = 1e-4) -> Array:
        """The cheapest mixes (k, V) that reach a target by each of k scores, inf if none does.

        `scores` makes (k, m) of draws (R, m), e.g. their median; costs are found to a factor 1 + step.
        """

        def reach(budget: float) -> tuple[Flags, Array]:
            counts, values = self.mixes(budget)
            score = scores(values)
            return np.asarray(score.min(1) <= target), counts[score.argmin(1)]

        high = float(self.price.min())
        reached, mixes = reach(high)
        found, ways = np.where(reached[:, None], mixes, math.inf), list[tuple[float, float, Flags]]()
        while not reached.all() and high < _MOST_MONEY:
            low, high = high, 4 * high
            now, mixes = reach(high)
            now &= ~reached
            found[now], reached = mixes[now], reached | now
            ways.append((low, high, now))
        while ways:  # each of scores that reach the target at the higher budget, not at the lower one
            low, high, which = ways.pop()
            if which.any() and high > low * (1 + step):
                middle = math.sqrt(low * high)
                now, mixes = reach(middle)
                now &= which
                found[now] = mixes[now]
                ways += [(low, middle, now), (middle, high, which & ~now)]
        return found
