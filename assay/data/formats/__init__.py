"""The formats that images are read from: each module has `FORMATS` (see `assay.data.readers`)."""
