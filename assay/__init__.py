"""Assay trains diffusion models on clean and noisy images; it finds how many noisy ones replace a clean one.

For a notebook or a script these names are enough; each has an example in its docstring:

    from_arrays, open_store         images with their noise levels, from arrays or from files
    measure_noise                   the noise levels of an array, if you do not know them
    part, simulate, split_held_out  which of them to use; noise to simulate; images kept for evaluation
    fit, load                       train a `Model`, or open one; it samples, denoises, and is evaluated
    run_study, open_study           a grid of trainings and its report
    quote, price                    how many noisy images replace a clean one: before training, from results
    plan, Vendor                    which images to buy for a budget
    NoisyMixture                    the theory's estimator
    ImageSource                     what your own source of images must offer

They are imported when first used. CONTRIBUTING.md lists the modules in the order in which they build on each
other.
"""

from importlib import import_module
from typing import Any

__version__ = "0.2.0"

_MODULE_OF = {
    "AssayError": "assay.errors",
    "from_arrays": "assay.data.arrays",
    "measure_noise": "assay.data.arrays",
    "open_store": "assay.data",
    "part": "assay.data",
    "simulate": "assay.data",
    "split_held_out": "assay.data",
    "ImageSource": "assay.data",
    "Model": "assay.model",
    "fit": "assay.model",
    "load": "assay.model",
    "run_study": "assay.study.run",
    "open_study": "assay.study",
    "price": "assay.pricing",
    "quote": "assay.pricing",
    "plan": "assay.pricing",
    "Vendor": "assay.pricing",
    "NoisyMixture": "assay.mixture",
}
__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'assay' has no attribute {name!r}; it has {', '.join(_MODULE_OF)}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(["__version__", *_MODULE_OF])
