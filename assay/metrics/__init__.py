"""Metrics: images -> features -> statistics -> distances, each step saying what was measured."""
