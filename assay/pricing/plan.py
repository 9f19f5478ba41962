"""Which images to buy: the mix with the best predicted result for a budget, or the cheapest for a target.

The law depends on n_clean and on n_eff = n_clean + sum c(sigma) n_noisy(sigma) alone. So money for noisy
images goes to the kind with the most c per dollar first, then to the next when that one runs out: n_eff is a
concave, piecewise linear function of the money m spent on clean images. The law is convex and falling in both
counts, hence convex in m: on each linear piece its minimum is an end or the root of its derivative.

The planner uses the whole law, with its weight c and its term in n_clean, and not the price that `assay price`
shows for the mixes of the table: what one more image is worth depends on those already bought.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import brentq

from assay.pricing.law import Law, Prediction
from assay.pricing.table import Array


@dataclass(frozen=True)
class Offer:
    """Images for sale: their noise level (0 for clean ones), unit price, and how many there are."""

    sigma: float
    unit_price: float
    max_images: float = math.inf

    def __post_init__(self) -> None:
        what = f"noisy images at {self.sigma:g}" if self.sigma else "clean images"
        if not (0 <= self.sigma < math.inf):
            raise ValueError(f"sigma = {self.sigma:g}: a noise level is finite and >= 0")
        if not (0 < self.unit_price < math.inf):
            raise ValueError(f"unit price {self.unit_price:g} of {what}: a price is finite and above 0")
        if not self.max_images >= 0:
            raise ValueError(f"at most {self.max_images:g} {what}: a number of images is at least 0")


@dataclass(frozen=True)
class Purchase:
    """What to buy of one offer, and what it is worth there.

    `next_dollar` is the fall in the result that one more dollar on this kind buys (0 when it is sold out).
    `break_even` is the unit price above which none of it is worth buying, all other prices unchanged.
    """

    offer: Offer
    num_images: float
    next_dollar: float
    break_even: float

    @property
    def cost(self) -> float:
        """What it costs."""
        return self.num_images * self.offer.unit_price


@dataclass(frozen=True)
class Plan:
    """The best mix: purchases (clean first), their cost, and the result it should reach."""

    purchases: tuple[Purchase, ...]
    have_clean: float
    cost: float
    prediction: Prediction


@dataclass(frozen=True)
class Market:
    """Offers of clean and of noisy images, and the clean images that you have already."""

    clean: Offer
    noisy: tuple[Offer, ...] = ()
    have_clean: float = 0.0

    def __post_init__(self) -> None:
        sigmas = [offer.sigma for offer in self.noisy]
        if self.clean.sigma != 0 or 0 in sigmas:
            raise ValueError(
                f"sigmas {[self.clean.sigma, *sigmas]}: clean images have sigma 0, noisy ones more"
            )
        if len(set(sigmas)) < len(sigmas):
            raise ValueError(f"sigmas {sigmas} of the offers: each noise level is offered once")
        if not 0 <= self.have_clean < math.inf:
            raise ValueError(f"{self.have_clean:g} clean images: a number of images is at least 0")


def best_plan(law: Law, market: Market, budget: float) -> Plan:
    """The mix that minimises the predicted result for at most `budget`."""
    if not 0 <= budget < math.inf:
        raise ValueError(f"budget = {budget:g}: a budget is finite and at least 0")
    counts = _solve(law, market, budget)
    if counts[0] + market.have_clean <= 0:
        raise ValueError(f"budget = {budget:g} buys no clean image and you have none: the law needs some")
    gains = _gains(law, market, counts)
    purchases = []
    for which, offer in enumerate((market.clean, *market.noisy)):
        sold_out = counts[which] >= offer.max_images
        next_dollar = 0.0 if sold_out else gains[which] / offer.unit_price
        break_even = _break_even(law, market, budget, which)
        purchases.append(Purchase(offer, float(counts[which]), float(next_dollar), break_even))
    noisy = [(purchase.num_images, purchase.offer.sigma) for purchase in purchases[1:]]
    cost = sum(purchase.cost for purchase in purchases)
    prediction = law.predict(float(counts[0]) + market.have_clean, noisy)
    return Plan(tuple(purchases), market.have_clean, cost, prediction)


def cheapest_plan(law: Law, market: Market, target: float) -> Plan:
    """The mix of least cost whose predicted result is `target` or better."""
    floor = law.as_dict()["floor"]
    if not target > floor:
        raise ValueError(
            f"a target of {target:g} is out of reach: by the law no amount of data gets below {floor:.4g}"
        )

    def excess(budget: float) -> float:
        return _value(law, market, _solve(law, market, budget)) - target

    if excess(0.0) <= 0:
        return best_plan(law, market, 0.0)
    low = high = market.clean.unit_price
    while excess(high) > 0:
        high *= 2
        if high > 1e30:
            raise ValueError(
                f"a target of {target:g} is out of reach: too close to the law's floor {floor:.6g}"
            )
    while excess(low) <= 0:
        low /= 2
    budget = brentq(excess, low, high, xtol=1e-12 * low, rtol=1e-14)
    while excess(budget) > 0:  # the root may lie a rounding error short of the target
        budget *= 1 + 1e-12
    return best_plan(law, market, budget)


def budget_line(law: Law, market: Market, budget: float, share: ArrayLike) -> Array:
    """Results (n,) when these shares (n,) of the budget go to clean images, the rest to the best noisy ones."""
    parts = budget * np.asarray(share, float)
    return np.array([_value(law, market, _spend(law, market, budget, part)) for part in parts])


def _spend(law: Law, market: Market, budget: float, on_clean: float) -> Array:
    """Counts (1 + num offers,), clean first, when `on_clean` is spent on clean images."""
    counts, money = [on_clean / market.clean.unit_price] + [0.0] * len(market.noisy), budget - on_clean
    for which in _order(law, market.noisy):
        offer = market.noisy[which]
        # Rounding must neither leave a fraction of a kind that is sold out nor buy a fraction of the next.
        all_of_it = money >= offer.max_images * offer.unit_price - 1e-12 * budget
        counts[1 + which] = offer.max_images if all_of_it else money / offer.unit_price
        money -= counts[1 + which] * offer.unit_price
        if money <= 1e-12 * budget:
            break
    return np.array(counts)


def _order(law: Law, offers: Sequence[Offer]) -> list[int]:
    """Indices of the noisy offers, most effective images per dollar first."""
    return sorted(range(len(offers)), key=lambda i: -float(law.weight(offers[i].sigma)) / offers[i].unit_price)


def _sizes(law: Law, market: Market, counts: Array) -> tuple[float, float]:
    num_clean = market.have_clean + counts[0]
    return num_clean, num_clean + float(law.weight([offer.sigma for offer in market.noisy]) @ counts[1:])


def _value(law: Law, market: Market, counts: Array) -> float:
    num_clean, effective = _sizes(law, market, counts)
    return float(law.value_of_sizes(num_clean, effective)) if num_clean > 0 else math.inf


def _gains(law: Law, market: Market, counts: Array) -> Array:
    """Fall in the result per image of each offer (1 + num offers,)."""
    by_clean, by_effective = law.slopes(*_sizes(law, market, counts))
    noisy = law.weight([offer.sigma for offer in market.noisy]) * by_effective
    return -np.append(by_clean + by_effective, noisy)


def _solve(law: Law, market: Market, budget: float) -> Array:
    """Counts (1 + num offers,) that minimise the result within the budget."""
    ends, left = [0.0, min(budget, market.clean.max_images * market.clean.unit_price)], budget
    for which in _order(law, market.noisy):
        left -= market.noisy[which].max_images * market.noisy[which].unit_price
        if 0 < left < ends[1]:  # spending more than this on clean images takes from the kinds up to `which`
            ends.append(left)
    ends = sorted(set(ends))
    best: list[Array] = [_spend(law, market, budget, end) for end in ends]
    for low, high in zip(ends, ends[1:], strict=False):
        on_piece = _spend(law, market, budget, (low + high) / 2)
        inside = [w for w in _order(law, market.noisy) if 0 < on_piece[1 + w] < market.noisy[w].max_images]

        def slope(on_clean: float, inside: list[int] = inside) -> float:
            """Fall in the result per unit of money moved from the noisy kind in play to clean images."""
            gains = _gains(law, market, _spend(law, market, budget, on_clean))
            lost = max((gains[1 + w] / market.noisy[w].unit_price for w in inside), default=0.0)
            return float(gains[0] / market.clean.unit_price - lost)

        start = max(low, 1e-12 * high) if market.have_clean == 0 else low  # without clean images it is infinite
        if slope(start) > 0 > slope(high):
            best.append(_spend(law, market, budget, brentq(slope, start, high, xtol=1e-14 * high, rtol=1e-14)))
    return min(best, key=lambda counts: _value(law, market, counts))


def _break_even(law: Law, market: Market, budget: float, which: int) -> float:
    """Price at which offer `which` earns per dollar what the best other one does where none of it is bought."""
    if which == 0:
        without = replace(market, clean=replace(market.clean, max_images=0.0))
    else:
        noisy = list(market.noisy)
        noisy[which - 1] = replace(noisy[which - 1], max_images=0.0)
        without = replace(market, noisy=tuple(noisy))
    counts = _solve(law, without, budget)
    if counts[0] + market.have_clean <= 0:
        return math.inf  # clean images at any price: there is no model without
    gains, offers = _gains(law, without, counts), (without.clean, *without.noisy)
    per_dollar = [
        gain / o.unit_price for gain, o, n in zip(gains, offers, counts, strict=True) if n < o.max_images
    ]
    return float(gains[which] / max(per_dollar)) if per_dollar else math.inf
