"""Learning mixtures from samples of unequal noise: Assay beside its peers, in one run.

    python bench/mixture.py            all parts
    python bench/mixture.py packages   one of: packages, em, million, growth

Times are ratios measured in the same run, beside the W1 error of each method. Instances: k = 3 atoms at
distance 2 (overlapping) or 8 (well separated) from the origin in random directions, 10 % of the samples with
noise 1, 90 % with noise 3. The packages come with `pip install -e '.[bench]'`; each runs in a process of its
own, with a limit on time and memory, and what it says when it fails is printed.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
from sklearn.cluster import KMeans

from assay.mixture.distance import wasserstein
from assay.mixture.likelihood import _pass_in_space
from assay.mixture.model import NoisyMixture
from assay.mixture.moments import Atoms
from assay.mixture.samples import simulate, two_levels

SEPARATIONS = {"overlapping": 2.0, "separated": 8.0}
MEMORY_LIMIT = 10 << 30


def instance(seed: int, n: int, d: int, k: int, separation: float) -> tuple[np.ndarray, np.ndarray, Atoms]:
    rng = np.random.default_rng(seed)
    atoms = rng.normal(size=(k, d))
    atoms *= separation / np.linalg.norm(atoms, axis=1, keepdims=True)
    truth = Atoms(atoms, rng.dirichlet(np.full(k, 5.0)))
    sigma = rng.permutation(two_levels(n, 0.1, 1.0, 3.0))
    return simulate(truth, sigma, rng), sigma, truth


def timed(run: Callable[..., Atoms], *arguments: object, repeats: int = 1) -> tuple[Atoms, float]:
    best = np.inf
    for _ in range(repeats):
        start = time.perf_counter()
        found = run(*arguments)
        best = min(best, time.perf_counter() - start)
    return found, best


def assay(x: np.ndarray, sigma: np.ndarray, k: int) -> Atoms:
    return NoisyMixture(k, random_state=0).fit(x, sigma=sigma).mixture_


def em(x: np.ndarray, sigma: np.ndarray, k: int) -> Atoms:
    """k-means, then EM with the known sigma until the mean log-likelihood gains less than 1e-6.

    Its passes are those of Assay's own polish: chunked, threaded, BLAS-3. No weaker baseline than need be.
    """
    clusters = KMeans(k, n_init=1, random_state=0).fit(x)
    guess = Atoms(clusters.cluster_centers_, np.bincount(clusters.labels_, minlength=k) / len(x))
    last = -np.inf
    for _ in range(500):
        _, cross, count, mass, likelihood = _pass_in_space(x, sigma**-2, guess)
        guess = Atoms(cross / mass[:, None], count / len(x))
        if likelihood / len(x) - last < 1e-6:
            break
        last = likelihood / len(x)
    return guess


def run_pygmmis(x: np.ndarray, sigma: np.ndarray, k: int) -> Atoms:
    import pygmmis

    model = pygmmis.GMM(K=k, D=x.shape[1])
    covariance = sigma[:, None, None] ** 2 * np.eye(x.shape[1])
    pygmmis.fit(model, x, covar=covariance, init_method="kmeans", rng=np.random.RandomState(0))
    return Atoms(np.asarray(model.mean), np.asarray(model.amp))


def run_astroml(x: np.ndarray, sigma: np.ndarray, k: int) -> Atoms:
    from astroML.density_estimation import XDGMM

    model = XDGMM(k, random_state=0)
    model.fit(x, sigma[:, None, None] ** 2 * np.eye(x.shape[1]))
    return Atoms(model.mu, model.alpha)


def run_npeb(x: np.ndarray, sigma: np.ndarray, k: int) -> Atoms:
    from npeb import GLMixture

    np.random.seed(0)  # its own subsample of atoms
    model = GLMixture(prec_type="diagonal")
    model.initialize_atoms_subsample(x, 100)
    model.fit(x, np.tile(sigma[:, None] ** -2, x.shape[1]), row_condition=True, score_every=None)
    return Atoms(np.asarray(model.atoms), np.asarray(model.weights))


PEERS = {"pygmmis": run_pygmmis, "astroML": run_astroml, "npeb": run_npeb}


def peer_process(name: str, path: str) -> None:
    """The child: run one package on stored samples within the limits and print what it found."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    with np.load(path) as stored:
        x, sigma = stored["x"], stored["sigma"]
    found, seconds = timed(PEERS[name], x, sigma, 3)
    answer = {"atoms": found.atoms.tolist(), "weights": found.weights.tolist(), "seconds": seconds}
    print("\n" + json.dumps(answer))


def ask_peer(name: str, x: np.ndarray, sigma: np.ndarray, truth: Atoms, limit: int) -> tuple[float | None, str]:
    """Seconds that a package took (None if it failed) and a line about the outcome."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "samples.npz"
        np.savez(path, x=x, sigma=sigma)
        command = [sys.executable, __file__, "peer", name, str(path)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
        except subprocess.TimeoutExpired:
            return float(limit), f"stopped after {limit} s"
    if done.returncode:
        return None, f"failed: {(done.stderr.strip() or f'exit {done.returncode}').splitlines()[-1][:160]}"
    answer = json.loads(done.stdout.splitlines()[-1])
    weights = np.maximum(answer["weights"], 0)
    error = wasserstein(Atoms(np.array(answer["atoms"]), weights / weights.sum()), truth)
    return answer["seconds"], f"{answer['seconds']:8.2f} s   W1 {error:.4f}"


def packages() -> None:
    # At 100,000 samples none of them ends within minutes: a smaller size compares the errors.
    for n, limit in ((100_000, 30), (500, 60)):
        for name, separation in SEPARATIONS.items():
            x, sigma, truth = instance(0, n, 20, 3, separation)
            found, ours = timed(assay, x, sigma, 3, repeats=3)
            print(f"n = {n:,}, d = 20, {name}")
            print(f"  {'assay':10} {ours:8.2f} s   W1 {wasserstein(found, truth):.4f}", flush=True)
            for peer in PEERS:
                seconds, line = ask_peer(peer, x, sigma, truth, limit)
                least = "at least " if "stopped" in line else ""
                ratio = f"   assay is {least}{seconds / ours:,.0f}x faster" if seconds else ""
                print(f"  {peer:10} {line}{ratio}", flush=True)


def em_from_kmeans() -> None:
    for d in (20, 100):
        for name, separation in SEPARATIONS.items():
            rows = []
            for seed in range(8):
                x, sigma, truth = instance(seed, 100_000, d, 3, separation)
                found, ours = timed(assay, x, sigma, 3, repeats=3)
                peer, theirs = timed(em, x, sigma, 3)
                rows.append([ours, theirs, theirs / ours, wasserstein(found, truth), wasserstein(peer, truth)])
            ours, theirs, ratio, median, median_em = np.median(rows, 0)
            mean, mean_em = np.mean(rows, 0)[3:]
            print(
                f"n = 100,000, d = {d}, {name}: assay {ours:.3f} s, EM from k-means {theirs:.3f} s: "
                f"{ratio:.1f}x faster; W1 mean {mean:.4f} against {mean_em:.4f}, "
                f"median {median:.4f} against {median_em:.4f}",
                flush=True,
            )


def million() -> None:
    for name, separation in SEPARATIONS.items():
        x, sigma, truth = instance(0, 1_000_000, 100, 3, separation)
        _, gram = timed(lambda x, w: (x * w[:, None]).T @ x, x, sigma**-4, repeats=3)
        found, ours = timed(assay, x, sigma, 3, repeats=3)
        print(
            f"n = 1,000,000, d = 100, {name}: assay {ours:.2f} s, one weighted Gram product {gram:.2f} s: "
            f"{ours / gram:.2f}x; W1 {wasserstein(found, truth):.4f}",
            flush=True,
        )


def growth() -> None:
    """Exponents of time in n and in d, on separated instances, where every size takes the same passes."""
    for name, sizes in {
        "n (d = 50)": [(n, 50) for n in (400_000, 800_000, 1_600_000, 3_200_000)],
        "d (n = 100,000)": [(100_000, d) for d in (200, 400, 800, 1600)],
    }.items():
        seconds = []
        for n, d in sizes:
            x, sigma, _ = instance(0, n, d, 3, 12.0)
            seconds.append(timed(assay, x, sigma, 3, repeats=3)[1])
            del x
        swept = np.array([n if name.startswith("n") else d for n, d in sizes])
        slope = np.polyfit(np.log(swept), np.log(seconds), 1)[0]
        shown = ", ".join(f"{size:,}: {value:.2f} s" for size, value in zip(swept, seconds, strict=True))
        print(f"time against {name}: {shown}; exponent {slope:.2f}", flush=True)


PARTS = {"packages": packages, "em": em_from_kmeans, "million": million, "growth": growth}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if sys.argv[1:2] == ["peer"]:
        peer_process(*sys.argv[2:])
    else:
        for part in sys.argv[1:] or PARTS:
            PARTS[part]()
