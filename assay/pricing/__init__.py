"""What is a noisy image worth, and what should I buy? Works on any table of results.

Rows of a CSV file -> `table.Results` -> `bounds` on the price c(sigma), from comparisons alone -> a `law` of FD
in the counts of clean and noisy images -> a `plan` for a budget. `report.price_report` does the first
three at once; `plot` draws. The paper's tables ship with the package as `table.PAPER`.
"""

from assay.pricing.bounds import joint_bounds, price_bounds
from assay.pricing.law import effective_sizes, fit_law, fit_theory, leave_one_out
from assay.pricing.plan import Market, Offer, best_plan, budget_line, cheapest_plan
from assay.pricing.report import price_report
from assay.pricing.table import PAPER, Results, read_results

__all__ = [
    "PAPER", "Market", "Offer", "Results", "best_plan", "budget_line", "cheapest_plan", "effective_sizes",
    "fit_law", "fit_theory", "joint_bounds", "leave_one_out", "price_bounds", "price_report", "read_results",
]  # fmt: skip
