"""Studies: grids of (clean fraction, sigma) runs, their tables, prices and report."""

from assay.study.run import run_local
from assay.study.spec import Study, read_study
from assay.study.stages import OpenStudy, open_study

__all__ = ["OpenStudy", "Study", "open_study", "read_study", "run_local"]
