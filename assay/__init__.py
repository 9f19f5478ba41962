"""Assay trains diffusion models on imperfect images and says what each image is worth.

The modules, in the order in which they build on each other: `files`, `unpickle`, `noise`,
`denoise`, `nets`, `loss`, `sample`, `data`, `checkpoint`, `train`, `metrics`, `pricing`,
`mixture`, `study`, `cli`. Importing `assay` alone loads none of them.
"""

__version__ = "0.1.0"
