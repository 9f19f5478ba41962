"""What noise is in these images? Levels with intervals, whiteness, clipping, rounding, gain and read noise."""

from assay.data.audit.report import Audit, audit, images_of, write_levels

__all__ = ["Audit", "audit", "images_of", "write_levels"]
