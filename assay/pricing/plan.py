"""Which images to buy: the mix with the best predicted result for a budget, or the cheapest for a target.

A forecast gives each mix as many predicted results as there are draws from what is known: of the scaling law
(summed over bands of levels where results by level were measured, so that fine detail asks for clean images),
or of a quote within its stated accuracy. Mixes on a grid over the budget are compared draw by draw: that says
which is best on average, how often each of them is, and how far the best one moves. Mixes stay within the
shares of clean images that were measured: beyond them the law was never tested.
"""

import csv
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from assay.errors import AssayError, check
from assay.files import decoding
from assay.pricing.law import check_confidence
from assay.pricing.quote import SPREAD, Quote
from assay.pricing.results import Array, Goal
from assay.settings import Config, Rules

if TYPE_CHECKING:
    from assay.pricing.price import Prices

_STEPS = {1: 1, 2: 40, 3: 20, 4: 12, 5: 8}  # parts of the budget on the grid, by number of vendors
_NUM_SHOWN, _MAX_DRAWS = 4, 200


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
    """What to buy of each vendor, its cost, the predicted result, the chance that it is best."""

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

    def __repr__(self) -> str:
        from assay.pricing.words import plan_lines

        return "\n".join(plan_lines(self))


@dataclass(frozen=True)
class Forecast:
    """Predicts results (R, m) of mixes, clean images (m,) and noisy ones (m, V) at levels (V,)."""

    metric: str
    predict: Callable[[Array, Array, Array], Array]
    least_share: float
    sizes: tuple[float, float]  # the smallest and the largest that was measured, in effective images


def plan(
    source: "Prices | Quote | Any",
    vendors: Sequence[Vendor] | Path | str,
    budget: float | None = None,
    target: float | None = None,
    have_clean: float = 0.0,
    goal: Goal | None = None,
    confidence: float = 0.95,
) -> Plan:
    """The mix of images to buy, for a budget or a target, from a price, a quote or what `price` takes.

    `vendors` are `Vendor`s or a CSV file with columns name, sigma (0 or empty for clean), price and, where they
    apply, min_images and max_images. `goal` is by default what samples look like, if measured, else everything.

    >>> offers = [assay.Vendor(price=1.0), assay.Vendor(sigma=0.2, price=0.1)]
    >>> assay.plan(assay.price(), offers, budget=10_000)
    Buy ...
    """
    offers = read_vendors(Path(vendors)) if isinstance(vendors, str | Path) else vendors
    if not (isinstance(offers, Sequence) and offers and all(isinstance(offer, Vendor) for offer in offers)):
        raise AssayError("are not offers", key="vendors", cure="give a list of `Vendor`s, or their CSV file")
    check([
        ((budget is None) == (target is None), AssayError("give either a budget or a target", key="budget")),
        (not 0 <= (budget or 0) < math.inf, AssayError(f"{budget} is no sum of money", key="budget")),
        (not have_clean >= 0, AssayError(f"{have_clean:g} is no number of images", key="have_clean")),
    ])  # fmt: skip
    check_confidence(confidence)
    if twice := [offer.title for offer in set(offers) if offers.count(offer) > 1]:
        raise AssayError(f"{twice[0]} is offered twice", key="vendors", cure="list each offer once")
    from assay.pricing.price import Prices, price

    forecast = forecast_of(source if isinstance(source, Prices | Quote) else price(source), goal)
    if budget is None:
        assert target is not None
        budget = _cheapest(forecast, offers, have_clean, target)
    return _best(forecast, offers, have_clean, budget, confidence)


def read_vendors(path: Path) -> list[Vendor]:
    """The vendors of a CSV file."""
    cure = "give a CSV file with columns name, sigma, price, min_images, max_images"
    with decoding(path, cure), open(path, newline="", encoding="utf-8-sig") as file:
        read = list(csv.DictReader(file))
        if any(None in row for row in read):
            cure = "separate cells by commas, and write decimals with a point"
            raise AssayError("has rows with more cells than its header", cure=cure)
        rows = [{k.strip().lower(): v.strip() for k, v in row.items() if v and v.strip()} for row in read]
    offers = []
    for line, row in enumerate(rows, 2):
        with decoding(f"{path}, line {line}", "correct the line"):
            offers.append(Vendor(**row))
    return offers


def forecast_of(source: "Prices | Quote", goal: Goal | None = None) -> Forecast:
    """What predicts the results of mixes for a goal."""
    if isinstance(source, Quote):
        chosen: Goal = goal or "everything"
        power = np.exp(SPREAD * np.random.default_rng(0).standard_normal(_MAX_DRAWS // 4))

        def closed_form(clean: Array, noisy: Array, sigmas: Array) -> Array:
            return source.excess(clean, noisy, sigmas, chosen, power)

        return Forecast("excess loss", closed_form, 0.0, (0.0, math.inf))
    goal = goal or ("looks" if any(price.goal == "looks" for price in source.prices) else "everything")
    price = source.of(goal)
    law, laws = price.law, [price.law]
    if source.curves and goal != "looks":
        low = price.sigma if goal == "structure" else 0.0
        laws = [band for band, level in zip(source.bands, source.curves[0].levels, strict=True) if level > low]
    thin = slice(None, None, max(1, len(law.floor) // _MAX_DRAWS))

    def by_law(clean: Array, noisy: Array, sigmas: Array) -> Array:
        return sum((each.values(each.size(clean, noisy, sigmas))[thin] for each in laws), np.zeros(()))

    return Forecast(price.results.metric, by_law, law.seen[0][0], law.seen[1])


def _mixes(offers: Sequence[Vendor], budget: float, have_clean: float, least_share: float) -> Array:
    """Numbers of images (m, V) of mixes on a grid over the budget, within supplies and measured shares."""
    num = len(offers)
    parts = _STEPS.get(num, 6)
    chosen = list(itertools.combinations(range(parts + num - 1), num - 1))
    bars = np.array(chosen, int).reshape(len(chosen), num - 1)
    edges = np.column_stack([np.full(len(bars), -1), bars, np.full(len(bars), parts + num - 1)])
    shares = (np.diff(edges, axis=1) - 1) / parts
    price, most, least = (
        np.array([getattr(o, k) for o in offers]) for k in ("price", "max_images", "min_images")
    )
    clean = np.array([offer.sigma == 0 for offer in offers])
    counts = np.minimum(shares * budget / price, most)
    for _ in range(num):  # what one vendor cannot supply goes to the others that were chosen
        left = budget - counts @ price
        room = (counts > 0) & (counts < most)
        extra = room * left[:, None] / np.maximum(room.sum(1, keepdims=True), 1) / price
        counts = np.minimum(counts + extra, most)
    chosen_there, counts = counts > 0, np.floor(counts + 1e-6)  # whole images, for no more than the budget
    for vendor in np.argsort(-price, kind="stable"):  # what is left buys a few more, the dearest first
        more = np.floor((budget - counts @ price) / price[vendor] + 1e-9)
        counts[:, vendor] += chosen_there[:, vendor] * np.minimum(more, most[vendor] - counts[:, vendor])
    counts = counts[((counts == 0) | (counts >= least)).all(1)]
    num_clean = have_clean + counts[:, clean].sum(1)
    total = num_clean + counts[:, ~clean].sum(1)
    allowed = (num_clean >= (least_share - 1e-9) * total) & (total > 0)
    if not allowed.any():
        what = f"no mix within {budget:,.2f} has the least measured share of clean images, {least_share:.2g}"
        raise AssayError(what, key="budget", cure="raise the budget, or offer clean images")
    return np.unique(counts[allowed], axis=0)


def _predict(forecast: Forecast, offers: Sequence[Vendor], have_clean: float, counts: Array) -> Array:
    levels = np.array([offer.sigma for offer in offers])
    clean = levels == 0
    return forecast.predict(have_clean + counts[:, clean].sum(1), counts[:, ~clean], levels[~clean])


def _best(
    forecast: Forecast, offers: Sequence[Vendor], have_clean: float, budget: float, confidence: float
) -> Plan:
    counts = _mixes(offers, budget, have_clean, forecast.least_share)
    values = _predict(forecast, offers, have_clean, counts)  # (R, m)
    middle, winners = np.median(values, 0), values.argmin(1)
    tail = 50 * (1 - confidence)
    ends = np.percentile(counts[winners], [tail, 100 - tail], axis=0, method="nearest")
    low, high = np.percentile(values, [tail, 100 - tail], axis=0)
    chance = np.bincount(winners, minlength=len(counts)) / len(winners)
    price = np.array([offer.price for offer in offers])
    first = int(middle.argmin())
    others = [i for i in np.argsort(-chance, kind="stable").tolist() if i != first and chance[i] > 0]
    numbers = np.column_stack([counts @ price, middle, low, high, chance])
    mixes = [Mix(tuple(counts[i].tolist()), *numbers[i].tolist()) for i in [first, *others[: _NUM_SHOWN - 1]]]
    return Plan(
        tuple(offer.title for offer in offers), forecast.metric, tuple(mixes),
        tuple((float(a), float(b)) for a, b in ends.T), confidence, have_clean,
        _notes(forecast, offers, have_clean, counts[first]),
    )  # fmt: skip


def _notes(
    forecast: Forecast, offers: Sequence[Vendor], have_clean: float, counts: NDArray[Any]
) -> tuple[str, ...]:
    """What the reader of a plan must know of the best mix."""
    noisy = np.array([offer.sigma > 0 for offer in offers])
    num_clean, total, notes = have_clean + counts[~noisy].sum(), have_clean + counts.sum(), []
    if forecast.least_share and num_clean <= 1.1 * forecast.least_share * total:
        share = f"the smallest measured share of clean images ({forecast.least_share:.2g})"
        notes.append(f"this is {share}, which decides the mix: a smaller one might be better, or not")
    fewest, most = forecast.sizes
    if not fewest / 1.5 <= total <= 1.5 * most:
        units = " (are budget and prices in the same unit, and per image?)" * bool(total < fewest / 10)
        notes.append(f"an extrapolation{units}: measured were {fewest:,.0f} to {most:,.0f} effective images")
    if num_clean == 0:
        notes.append("a mix without clean images learns nothing finer than its noise")
    return tuple(notes)


def _cheapest(forecast: Forecast, offers: Sequence[Vendor], have_clean: float, target: float) -> float:
    """The least budget whose best mix is predicted to reach the target."""

    def reached(budget: float) -> bool:
        try:
            counts = _mixes(offers, budget, have_clean, forecast.least_share)
        except AssayError:
            return False
        return bool(np.median(_predict(forecast, offers, have_clean, counts), 0).min() <= target)

    none = np.zeros((1, len(offers)))
    if have_clean and np.median(_predict(forecast, offers, have_clean, none)) <= target:
        what = f"{have_clean:,.0f} clean images reach {target:g} already: nothing needs to be bought"
        raise AssayError(what, key="target", cure="lower it")
    high = min(offer.price for offer in offers)
    while not reached(high):
        high *= 2
        if high > 1e15:
            raise AssayError(f"a target of {target:g} is out of reach of these vendors", key="target")
    low = high / 2
    for _ in range(20):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high
