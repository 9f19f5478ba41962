"""What is a noisy image worth, and what should I buy? Works on any table of results.

Outcomes -> arrays, `table.Comparable` -> `bounds` on the price c(sigma), from comparisons alone -> a `law` of
FD in the counts of clean and noisy images -> a `plan` for a budget. `report.price_report` takes the arrays to
bounds and law; `plot` draws. The paper's tables ship with the package as `table.PAPER`.
"""

from assay.pricing.bounds import joint_bounds, price_bounds
from assay.pricing.law import effective_sizes, fit_law, fit_theory, leave_one_out
from assay.pricing.plan import Market, Offer, best_plan, budget_line, cheapest_plan
from assay.pricing.report import price_report
from assay.pricing.table import PAPER, Comparable, comparable, read_comparable

__all__ = [
    "PAPER", "Comparable", "Market", "Offer", "best_plan", "budget_line", "cheapest_plan", "comparable",
    "effective_sizes", "fit_law", "fit_theory", "joint_bounds", "leave_one_out", "price_bounds", "price_report",
    "read_comparable",
]  # fmt: skip
