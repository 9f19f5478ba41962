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

import csv
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from assay.errors import AssayError, check
from assay.files import decoding
from assay.noise import warn_of_units
from assay.pricing.law import check_confidence
from assay.pricing.quote import SPREAD, Quote
from assay.pricing.results import Array, Goal
from assay.settings import Config, Rules

if TYPE_CHECKING:
    from assay.pricing.price import Prices

_NUM_SHOWN, _MAX_DRAWS, _MAX_CORNERS = 4, 200, 10_000
_MAX_ENDS, _PARTS = 6, 20  # mixes between which others are tried, and into how many parts a way is divided


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
    """What to buy of each vendor, its cost, the predicted result on average, the chance that it is best."""

    counts: tuple[float, ...]
    cost: float
    value: float
    low: float
    high: float
    chance: float


@dataclass(frozen=True)
class Plan:
    """The best few mixes, best first, and the interval of the best number of each vendor's images."""

    names: tuple[str, ...]
    metric: str
    mixes: tuple[Mix, ...]
    count_intervals: tuple[tuple[float, float], ...]
    confidence: float
    have_clean: float
    notes: tuple[str, ...]
    decided: bool = True  # whether a price that it rests on is

    def __repr__(self) -> str:
        from assay.pricing.words import plan_lines, runners_up

        return "\n".join([*plan_lines(self), *runners_up(self)])


@dataclass(frozen=True)
class Forecast:
    """Predicts results (R, m) of mixes, clean images (m,) and noisy ones (m, V) at levels (V,)."""

    metric: str
    predict: Callable[[Array, Array, Array], Array]
    least_share: float = 0.0
    size: Callable[[Array, Array, Array], Array] | None = None  # effective images (R, m) of mixes
    sizes: tuple[float, float] = (0.0, math.inf)  # the smallest and the largest size that was measured
    levels: tuple[float, ...] = ()  # of noise that were measured
    doubts: tuple[str, ...] = ()  # about the results
    decided: bool = True  # whether any price is


def plan(
    source: "Prices | Quote | Any",
    vendors: "Sequence[Vendor] | Path | str | Any",
    budget: float | None = None,
    target: float | None = None,
    have_clean: float = 0.0,
    goal: Goal | None = None,
    confidence: float = 0.95,
) -> Plan:
    """The mix of images to buy, for a budget or a target, from a price, a quote or what `price` takes.

    `vendors` are `Vendor`s, or a CSV file or DataFrame with columns name, sigma (0 or empty for clean), price
    and, where they apply, min_images and max_images. `goal` is by default what samples look like, if measured,
    else everything.

    >>> offers = [assay.Vendor(price=1.0), assay.Vendor(sigma=0.2, price=0.1)]
    >>> assay.plan(assay.price(), offers, budget=10_000)
    Buy ...
    """
    offers: Any = vendors
    if isinstance(vendors, str | Path) or hasattr(vendors, "to_csv"):
        offers = read_vendors(Path(vendors) if isinstance(vendors, str | Path) else vendors)
    if not (isinstance(offers, Sequence) and offers and all(isinstance(offer, Vendor) for offer in offers)):
        raise AssayError("are not offers", key="vendors", cure="give a list of `Vendor`s, or their CSV file")
    check([
        ((budget is None) == (target is None), AssayError("give either a budget or a target", key="budget")),
        (not 0 <= (budget or 0) < math.inf, AssayError(f"{budget} is no sum of money", key="budget")),
        (not (have_clean == 0 or have_clean >= 1),
         AssayError(f"{have_clean:g} is no number of images", key="have_clean", cure="count them")),
    ])  # fmt: skip
    check_confidence(confidence)
    warn_of_units(max(offer.sigma for offer in offers))
    if twice := [offer.title for offer in set(offers) if offers.count(offer) > 1]:
        raise AssayError(f"{twice[0]} is offered twice", key="vendors", cure="list each offer once")
    from assay.pricing.price import Prices, price

    forecast = forecast_of(source if isinstance(source, Prices | Quote) else price(source), goal)
    market = _Market(forecast, offers, have_clean)
    if budget is None:
        assert target is not None
        budget = market.cheapest(target)
    return market.plan(budget, confidence)


def read_vendors(table: Any) -> list[Vendor]:
    """The vendors of a CSV file or a DataFrame."""
    path = table if isinstance(table, Path) else "the table of vendors"
    cure = "give a CSV file with columns name, sigma, price, min_images, max_images"
    with decoding(path, cure):
        text = table.read_text("utf-8-sig") if isinstance(table, Path) else table.to_csv(index=False)
        read = list(csv.DictReader(text.splitlines()))
        if any(None in row for row in read):
            cure = "separate cells by commas, and write decimals with a point"
            raise AssayError("has rows with more cells than its header", cure=cure)
        names = {name: name.strip().lower().replace(" ", "_") for row in read for name in row}
        names = {name: "sigma" if known in ("noise", "noise_level") else known for name, known in names.items()}
        rows = [{names[name]: (cell or "").strip() for name, cell in row.items()} for row in read]
        if rows and "sigma" not in rows[0]:
            cure = "add it, and leave it empty for clean images"
            raise AssayError("has no column for the noise level of each offer", key="sigma", cure=cure)
    offers = []
    for line, row in enumerate(rows, 2):
        with decoding(f"{path}, line {line}", "correct the line"):
            offers.append(Vendor(**{key: cell for key, cell in row.items() if cell}))
    return offers


def forecast_of(source: "Prices | Quote", goal: Goal | None = None) -> Forecast:
    """What predicts the results of mixes for a goal."""
    if isinstance(source, Quote):
        chosen: Goal = goal or "everything"
        power = np.exp(SPREAD * np.random.default_rng(0).standard_normal(_MAX_DRAWS // 4))

        def closed_form(clean: Array, noisy: Array, sigmas: Array) -> Array:
            return source.excess(clean, noisy, sigmas, chosen, power)

        return Forecast("excess loss", closed_form)
    from assay.pricing.words import cautions

    goal = goal or ("looks" if any(price.goal == "looks" for price in source.prices) else "everything")
    price = source.of(goal)
    law, laws = price.law, [price.law]
    if source.curves and goal != "looks":
        low = price.sigma if goal == "structure" else 0.0
        laws = [band for band, level in zip(source.bands, source.curves[0].levels, strict=True) if level > low]
    thin = slice(None, None, max(1, len(law.floor) // _MAX_DRAWS))

    def by_law(clean: Array, noisy: Array, sigmas: Array) -> Array:
        return sum((each.values(each.size(clean, noisy, sigmas))[thin] for each in laws), np.zeros(()))

    prices, ((share, _), sizes) = [each for each in source.prices if each.goal == goal], law.seen
    decided, doubts = any(each.verdict != "undecided" for each in prices), tuple(cautions(prices))
    return Forecast(price.results.metric, by_law, share, law.size, sizes, tuple(law.sigmas), doubts, decided)


class _Market:
    """What can be bought beside the clean images in hand: arrays (V,) of the offers, and a forecast."""

    def __init__(self, forecast: Forecast, offers: Sequence[Vendor], have_clean: float) -> None:
        self.forecast, self.offers, self.have_clean = forecast, offers, have_clean
        columns = zip(*((o.price, o.min_images, o.max_images, o.sigma) for o in offers), strict=True)
        self.price, self.least, self.most, self.sigma = (np.array(column, float) for column in columns)
        self.clean = self.sigma == 0

    def split(self, counts: Array) -> tuple[Array, Array, Array]:
        """Clean images (m,), noisy ones (m, S) and their levels (S,) of mixes (m, V)."""
        numbers = self.have_clean + counts[:, self.clean].sum(1), counts[:, ~self.clean]
        return *numbers, self.sigma[~self.clean]

    def predict(self, counts: Array) -> Array:
        """Draws (R, m) of the results of mixes (m, V)."""
        return self.forecast.predict(*self.split(counts))

    def corners(self, budget: float) -> Array:
        """The corners (m, V) of what the budget buys, in whole images; what is left buys some more."""
        num, share = len(self.price), self.forecast.least_share
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
        for vendor in np.argsort(-self.price, kind="stable"):
            need = limits[:, vendor]
            room = ((ends - counts @ limits.T)[:, need > 0] / need[need > 0]).min(1)
            more = np.minimum(np.floor(room + 1e-9), self.most[vendor] - counts[:, vendor]).clip(0)
            is_order = (counts[:, vendor] > 0) | (more * self.price[vendor] > 0.01 * budget)  # not one image
            counts[:, vendor] += more * (is_order & (counts[:, vendor] + more >= self.least[vendor]))
        return np.unique(self.allowed(counts, budget), axis=0)

    def allowed(self, counts: Array, budget: float) -> Array:
        """Those of mixes (m, V) that can be bought, within the measured shares."""
        clean, noisy, _ = self.split(counts)
        is_order = (counts == 0) | ((counts >= self.least) & (counts <= self.most))
        share = clean + 1e-6 >= self.forecast.least_share * (clean + noisy.sum(1))
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
                counts = np.concatenate([counts, self.allowed(np.floor(np.concatenate(ways)), budget)])
                values = self.predict(counts)
        return counts, values

    def plan(self, budget: float, confidence: float) -> Plan:
        """The best mixes for a budget, and how sure that is."""
        cost = self.price * np.maximum(self.least, 1)
        if not (cost <= budget * (1 + 1e-9)).any():
            first = int(cost.argmin())
            order = f"the cheapest order, {max(self.least[first], 1):,.0f} {self.offers[first].title}"
            what = f"{order}, costs {cost[first]:,.2f}, more than {budget:,.2f}"
            raise AssayError(what, key="budget", cure="raise it; are prices those of one image?")
        counts, values = self.mixes(budget)
        if not counts.any():
            what = f"no mix within {budget:,.2f} has the least measured share of clean images, "
            what += f"{self.forecast.least_share:.2g}"
            raise AssayError(what, key="budget", cure="raise the budget, or offer clean images")
        middle, winners = np.median(values, 0).clip(0), values.argmin(1)
        tail = 50 * (1 - confidence)
        ends = np.percentile(counts[winners], [tail, 100 - tail], axis=0, method="nearest")
        low, high = np.percentile(values, [tail, 100 - tail], axis=0).clip(0)
        chance = np.bincount(winners, minlength=len(counts)) / len(winners)
        first = int(middle.argmin())
        others = [i for i in np.argsort(-chance, kind="stable").tolist() if i != first and chance[i] > 0]
        shown = [first, *others[: _NUM_SHOWN - 1]]
        numbers = np.column_stack([counts @ self.price, middle, low, high, chance])
        return Plan(
            tuple(offer.title for offer in self.offers), self.forecast.metric,
            tuple(Mix(tuple(counts[i].tolist()), *numbers[i].tolist()) for i in shown),
            tuple((float(a), float(b)) for a, b in ends.T), confidence, self.have_clean,
            tuple(dict.fromkeys((*self.forecast.doubts, *self.notes(counts[first])))), self.forecast.decided,
        )  # fmt: skip

    def notes(self, counts: Array) -> Iterable[str]:
        """What the reader of a plan must know of a mix (V,) and of the offers."""
        forecast, (clean, noisy, levels) = self.forecast, self.split(counts[None])
        num_clean, total = float(clean[0]), float(clean[0] + noisy.sum())
        if forecast.least_share and num_clean <= 1.1 * forecast.least_share * total:
            share = f"the smallest measured share of clean images ({forecast.least_share:.2g})"
            yield f"this is {share}, which decides the mix: a smaller one might be better, or not"
        size = float(np.median(forecast.size(clean, noisy, levels))) if forecast.size else total
        fewest, most = forecast.sizes
        if not fewest / 1.5 <= size <= 1.5 * most:
            units = " (are budget and prices in the same unit, and per image?)" * bool(size < fewest / 10)
            seen = f"measured were {fewest:,.0f} to {most:,.0f}"
            yield f"an extrapolation{units}: this mix counts as {size:,.0f} clean images, and {seen}"
        if num_clean == 0:
            yield "a mix without clean images learns nothing finer than its noise"
        for level in dict.fromkeys(self.sigma[(counts > 0) & ~self.clean].tolist()):
            if forecast.levels and np.abs(np.array(forecast.levels) / level - 1).min() > 0.01:
                read = "its worth is read between the levels that have"
                yield f"no result has noise {level:.3g}: {read}, and the interval leaves out what that adds"
        cheapest = self.price[self.clean].min(initial=math.inf)
        if (spent := float(counts @ self.price)) < cheapest < math.inf:
            yield f"this costs {spent:g}, and one clean image {cheapest:g}: are budget and prices in one unit?"
        for offer in self.offers:
            if offer.sigma and offer.price > cheapest:
                yield f"{offer.title} costs {offer.price:g}, and a clean image {cheapest:g}: is that per image?"

    def cheapest(self, target: float) -> float:
        """The least budget whose best mix is predicted to reach the target."""

        def result(budget: float) -> float:
            return float(np.median(self.mixes(budget)[1], 0).min())

        have = float(np.median(self.predict(np.zeros((1, len(self.price))))))
        if self.have_clean and have <= target:
            what = f"{self.have_clean:,.0f} clean images reach {target:g} already: nothing needs to be bought"
            raise AssayError(what, key="target", cure="lower it")
        high, reached, most = min(self.price), math.inf, 1e15
        while (reached := result(high)) > target:
            high *= 2
            if high > most:
                what = f"a target of {target:g} is out of reach of these vendors, who allow {reached:.4g}"
                raise AssayError(what, key="target", cure="raise it, or find more offers")
        low = high / 2
        for _ in range(20):
            middle = math.sqrt(low * high)
            low, high = (low, middle) if result(middle) <= target else (middle, high)
        return high
