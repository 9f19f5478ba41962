"""Metrics: the held-out loss in nats (`held_out`), and distances between images and generated ones.

Distances go images -> features (`extract`) -> statistics -> distance (`distance`), and `evaluate` makes one
record of what was measured.
"""
