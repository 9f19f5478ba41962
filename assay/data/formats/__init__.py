"""The formats that images are read from: each module has `FORMATS`, tried in this order."""

MODULES = ("datasets", "scientific", "arrays", "pictures")
