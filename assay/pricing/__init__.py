"""What is a noisy image worth, and what should I buy? Works on any table of results.

Outcomes, by the held-out score or by FD -> arrays, `table.Comparable` -> the price of a noisy image: `bounds`
from comparisons alone, the clean-only learning `curve` inverted, a `law` in the counts of clean and noisy
images -> a `plan` for a budget. `report.price_report` does all but the last at once; `plot` draws. The
paper's tables ship with the package as `table.PAPER`.
"""

from assay.pricing.bounds import joint_bounds, price_bounds
from assay.pricing.curve import curve_prices
from assay.pricing.law import effective_sizes, fit_law, fit_theory, leave_one_out
from assay.pricing.plan import Market, Offer, best_plan, budget_line, cheapest_plan
from assay.pricing.report import price, price_report
from assay.pricing.table import PAPER, Comparable, comparable, read_comparable

__all__ = [
    "PAPER", "Comparable", "Market", "Offer", "best_plan", "budget_line", "cheapest_plan", "comparable",
    "curve_prices", "effective_sizes", "fit_law", "fit_theory", "joint_bounds", "leave_one_out", "price",
    "price_bounds", "price_report", "read_comparable",
]  # fmt: skip
