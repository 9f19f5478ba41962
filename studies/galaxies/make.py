"""Simulates a small survey with GalSim and writes its exposures as FITS files.

    pip install 'assay[galaxies]'
    python studies/galaxies/make.py survey              for studies/galaxies
    python studies/galaxies/make.py survey-2 --kinds    for studies/galaxies-looks

    survey/short/    one exposure of each of 2,000 galaxies: noisy
    survey/deep/     300 other galaxies, each the mean of 400 exposures: nearly clean
    survey/repeats/  eight single exposures of each of 50 of the deep galaxies, a folder for each

Images have 16 x 16 pixels in ADU, the units of the camera, rounded as its converter does. The bias is
subtracted, the sky is not. Galaxies have a bulge, an inclined disk and knots of young stars, seen through a
Moffat PSF. With --kinds, other galaxies lie in a folder for each of four kinds, 1,440 short and 2,000 deep.
"""

import sys
from pathlib import Path

import galsim
import numpy as np
from astropy.io import fits

GAIN = 1.5  # electrons per ADU
READ_NOISE = 3.1  # electrons, each exposure
SKY = 10.0  # electrons per pixel and exposure
PIXEL = 0.4  # arcseconds
SIZE = 16
NUM_SHORT, NUM_DEEP = 2000, 300
NUM_COADDED = 400  # exposures, in each deep image
NUM_REPEATED, NUM_REPEATS = 50, 8
WITH_KINDS = {"short": (1440, 1), "deep": (2000, NUM_COADDED)}  # galaxies, exposures of each


def galaxy(rng: np.random.Generator) -> tuple[galsim.GSObject, str]:
    """A galaxy as the telescope sees it, with its flux in electrons per exposure, and its kind."""
    flux = 10 ** rng.uniform(3.2, 3.7)
    bulge, radius = rng.beta(1, 3), rng.uniform(0.9, 1.8)
    knots = (1 - bulge) * rng.uniform(0, 0.5)
    axis_ratio = rng.uniform(0.25, 1)
    tilt = galsim.Shear(q=axis_ratio, beta=rng.uniform(0, 180) * galsim.degrees)
    disk = galsim.Exponential(half_light_radius=radius)
    stars = galsim.RandomKnots(12, profile=disk, rng=galsim.BaseDeviate(int(rng.integers(1, 2**31))))
    flat = ((1 - bulge - knots) * disk + knots * stars).shear(tilt)
    round_part = bulge * galsim.DeVaucouleurs(half_light_radius=0.6 * radius)
    seen = galsim.Convolve(flat + round_part, galsim.Moffat(beta=3, fwhm=0.8))
    kind = f"{'inclined' if axis_ratio < 0.6 else 'round'}-{'bulge' if bulge > 0.25 else 'disk'}"
    return seen.shift(*rng.uniform(-PIXEL / 2, PIXEL / 2, 2)) * flux, kind


def expose(light: galsim.GSObject, num_exposures: int, rng: np.random.Generator) -> np.ndarray:
    """The mean (16, 16) of exposures, in ADU; their sum is simulated, with the noise of all of them."""
    noise_seed = galsim.BaseDeviate(int(rng.integers(1, 2**31)))
    image = light.drawImage(nx=SIZE, ny=SIZE, scale=PIXEL, dtype=float)
    total = galsim.Image((image.array + SKY) * num_exposures / GAIN, scale=PIXEL)
    read_noise = READ_NOISE * np.sqrt(num_exposures)
    total.addNoise(galsim.CCDNoise(noise_seed, gain=GAIN, read_noise=read_noise))
    if num_exposures == 1:
        total.quantize()  # the camera's converter
        return total.array.astype(np.int16)
    return (total.array / num_exposures).astype(np.float32)


def save(path: Path, pixels: np.ndarray, num_exposures: int) -> None:
    """One FITS file, with what the observatory would write into its header."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = fits.Header([("BUNIT", "adu"), ("NCOMBINE", num_exposures, "exposures averaged")])
    header["GAIN"], header["RDNOISE"] = (GAIN, "electrons per ADU"), (READ_NOISE, "electrons")
    fits.writeto(path, pixels, header)


def main(folder: Path) -> None:
    """Simulate everything, from one seed."""
    rng = np.random.default_rng(0)
    for number in range(NUM_SHORT):
        save(folder / "short" / f"{number:04}.fits", expose(galaxy(rng)[0], 1, rng), 1)
    for number in range(NUM_DEEP):
        light, _ = galaxy(rng)
        save(folder / "deep" / f"{number:04}.fits", expose(light, NUM_COADDED, rng), NUM_COADDED)
        for repeat in range(NUM_REPEATS if number < NUM_REPEATED else 0):
            save(folder / "repeats" / f"{number:04}" / f"{repeat}.fits", expose(light, 1, rng), 1)


def main_with_kinds(folder: Path) -> None:
    """Simulate other galaxies, each in the folder of its kind."""
    rng = np.random.default_rng(1)
    for name, (num_galaxies, num_exposures) in WITH_KINDS.items():
        for number in range(num_galaxies):
            light, kind = galaxy(rng)
            image = expose(light, num_exposures, rng)
            save(folder / name / kind / f"{number:04}.fits", image, num_exposures)


if __name__ == "__main__":
    (main_with_kinds if "--kinds" in sys.argv else main)(Path(sys.argv[1]))
