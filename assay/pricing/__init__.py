"""What is a noisy image worth, and what should I buy?

Before any training: `quote`, from the spectrum of clean images. From results: `results` by level or a table of
outcomes -> the scaling `law` -> one `price` for each goal and the worth curve -> a `plan` for a budget. `words`
renders them; `paper` has the paper's tables, which ship with the package, and its own bounds.
"""

from assay.pricing.law import Law, fit_laws
from assay.pricing.paper import PAPER
from assay.pricing.plan import Plan, Vendor, plan
from assay.pricing.price import Price, Prices, WorthCurve, price, price_all, price_results
from assay.pricing.quote import Quote, quote
from assay.pricing.results import LevelResults, Measured, read_levels, write_levels

__all__ = [
    "PAPER", "Law", "LevelResults", "Measured", "Plan", "Price", "Prices", "Quote", "Vendor", "WorthCurve",
    "fit_laws", "plan", "price", "price_all", "price_results", "quote", "read_levels", "write_levels",
]  # fmt: skip
