"""The formats that Assay reads, one module each; `assay.data.readers` finds every `FORMAT` here."""
