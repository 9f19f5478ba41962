"""Synthetic scenes without noise, on which the network that measures noise is trained.

A scene is a background and shapes that cover each other, flat, shaded, striped or rough, slightly
blurred as by a lens: the statistics of edges and textures, of few large objects as well as of many small ones.
"""

import math

import numpy as np
from scipy.ndimage import gaussian_filter

_OVERSAMPLING = 2


def draw_scene(rng: np.random.Generator, height: int, width: int, num_channels: int) -> np.ndarray:
    """One scene (C, H, W), float32, of unit standard deviation."""
    shape = (height * _OVERSAMPLING, width * _OVERSAMPLING)
    y, x = np.mgrid[: shape[0], : shape[1]]
    alike = 1 - math.exp(rng.uniform(-5, 0))  # how much the channels have in common

    def colour() -> np.ndarray:
        own = rng.normal(size=(num_channels, 1, 1))
        return math.sqrt(alike) * rng.normal() + math.sqrt(1 - alike) * own

    def surface() -> np.ndarray:
        tint = math.sqrt(alike) + math.sqrt(1 - alike) * rng.normal(size=(num_channels, 1, 1))
        return colour() + tint * _texture(rng, *shape)

    surfaces = [surface() for _ in range(4)]
    image = colour() + np.zeros((num_channels, *shape)) if rng.random() < 0.4 else surface()
    few = rng.random() < 0.3
    for _ in range(rng.integers(1, 4) if few else int(80 ** rng.random())):
        radius = rng.uniform(1 / 6, 1 / 2) * shape[0] if few else 2 * (shape[0] / 4) ** rng.random()
        inner = (1 / 3, 2 / 3) if few else (0, 1)
        centre_y, centre_x = rng.uniform(*inner) * shape[0], rng.uniform(*inner) * shape[1]
        turn, aspect = rng.uniform(0, math.pi), rng.uniform(0.4, 1)
        along = (math.cos(turn) * (y - centre_y) + math.sin(turn) * (x - centre_x)) / radius
        across = (math.cos(turn) * (x - centre_x) - math.sin(turn) * (y - centre_y)) / (radius * aspect)
        round_shape = rng.random() < 0.5
        inside = along**2 + across**2 < 1 if round_shape else np.maximum(abs(along), abs(across)) < 0.8
        image = np.where(inside, surfaces[rng.integers(4)] + 0.7 * colour(), image)
    blur = rng.choice([0.5, 0.8, 1.2, 2.0])
    image = gaussian_filter(image, (0, blur, blur))[:, ::_OVERSAMPLING, ::_OVERSAMPLING]
    if rng.random() < 0.2:  # over- and underexposed
        image = image.clip(*np.quantile(image, [rng.uniform(0, 0.4), rng.uniform(0.7, 1)]))
    spread = image.std()
    return (image / (spread if spread > 1e-6 else 1)).astype(np.float32)


def _texture(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    kind, strength = rng.random(), math.exp(rng.normal(-2, 1))
    y, x = np.mgrid[:height, :width]
    if kind < 0.35:
        return np.zeros((height, width))
    if kind < 0.55:
        slope = rng.normal(size=2) / max(height, width)
        return slope[0] * y + slope[1] * x
    if kind < 0.9:  # rough, with a power law for its spectrum
        frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width))
        frequency[0, 0] = 1
        spectrum = np.fft.rfft2(rng.standard_normal((height, width))) * frequency ** -rng.uniform(0.3, 2.2)
        field = np.fft.irfft2(spectrum, s=(height, width))
        return strength * (field - field.mean()) / field.std()
    turn, frequency = rng.uniform(0, math.pi), rng.uniform(0.05, 0.5)
    phase = 2 * math.pi * (frequency * (math.cos(turn) * y + math.sin(turn) * x) + rng.random())
    return strength * np.sign(np.sin(phase))
