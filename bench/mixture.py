"""Learning mixtures from samples of unequal noise: Assay beside its peers, in one run.

    python bench/mixture.py            all parts
    python bench/mixture.py packages   one of: packages, em, million, growth, npmle

Times are ratios measured in the same run, beside the W1 error of each method. Instances: k = 3 atoms at
distance 2 (overlapping) or 8 (well separated) from the origin in random directions, 10% of the samples with
noise 1, 90% with noise 3. npeb comes with `pip install -e '.[bench]'`; it runs in a process of its own, with a
limit on time and memory, and what it says when it fails is printed.
"""

import json
import resource
import shutil
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
from assay.mixture.likelihood import _gather_in_space, log_constant, place_vectors, sample_vectors
from assay.mixture.model import NoisyMixture
from assay.mixture.moments import Atoms
from assay.mixture.npmle import npmle
from assay.mixture.samples import simulate

SEPARATIONS = {"overlapping": 2.0, "separated": 8.0}
MEMORY_LIMIT = 10 << 30


def instance(seed: int, n: int, d: int, k: int, separation: float) -> tuple[np.ndarray, np.ndarray, Atoms]:
    rng = np.random.default_rng(seed)
    atoms = rng.normal(size=(k, d))
    atoms *= separation / np.linalg.norm(atoms, axis=1, keepdims=True)
    truth = Atoms(atoms, rng.dirichlet(np.full(k, 5.0)))
    sigma = rng.permutation(np.where(np.arange(n) < round(0.1 * n), 1.0, 3.0))
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
        here = _gather_in_space(x, sigma, guess, np.zeros(x.shape[1]))
        guess = here.em
        if here.log_likelihood / len(x) - last < 1e-6:
            break
        last = here.log_likelihood / len(x)
    return guess


def run_npeb(x: np.ndarray, sigma: np.ndarray, k: int) -> Atoms:
    from npeb import GLMixture

    np.random.seed(0)  # its own subsample of atoms
    model = GLMixture(prec_type="diagonal")
    model.initialize_atoms_subsample(x, 100)
    model.fit(x, np.tile(sigma[:, None] ** -2, x.shape[1]), row_condition=True, score_every=None)
    return Atoms(np.asarray(model.atoms), np.asarray(model.weights))


def peer_process(path: str) -> None:
    """The child: run npeb on stored samples within the limits and print what it found."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    with np.load(path) as stored:
        x, sigma = stored["x"], stored["sigma"]
    found, seconds = timed(run_npeb, x, sigma, 3)
    answer = {"atoms": found.atoms.tolist(), "weights": found.weights.tolist(), "seconds": seconds}
    print("\n" + json.dumps(answer))


def ask_npeb(x: np.ndarray, sigma: np.ndarray, truth: Atoms, limit: int) -> tuple[float | None, str]:
    """Seconds that npeb took (None if it failed) and a line about the outcome."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "samples.npz"
        np.savez(path, x=x, sigma=sigma)
        command = [sys.executable, __file__, "peer", str(path)]
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
    # At 100,000 samples npeb does not end within minutes: a smaller size compares the errors.
    for n, limit in ((100_000, 30), (500, 60)):
        for name, separation in SEPARATIONS.items():
            x, sigma, truth = instance(0, n, 20, 3, separation)
            found, ours = timed(assay, x, sigma, 3, repeats=3)
            print(f"n = {n:,}, d = 20, {name}")
            print(f"  {'assay':10} {ours:8.2f} s   W1 {wasserstein(found, truth):.4f}", flush=True)
            seconds, line = ask_npeb(x, sigma, truth, limit)
            least = "at least " if "stopped" in line else ""
            ratio = f"   assay is {least}{seconds / ours:,.0f}x faster" if seconds else ""
            print(f"  {'npeb':10} {line}{ratio}", flush=True)


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


def line_instance(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Samples on a line of a smooth distribution, each with its own noise between 0.5 and 2."""
    rng = np.random.default_rng(seed)
    sigma = rng.uniform(0.5, 2, n)
    return (2 * rng.normal(size=n) + sigma * rng.normal(size=n))[:, None], sigma


def kernel(x: np.ndarray, sigma: np.ndarray, places: np.ndarray) -> np.ndarray:
    return np.exp(sample_vectors(x, sigma) @ place_vectors(places).T + log_constant(sigma, x.shape[1])[:, None])


def describe(
    x: np.ndarray, sigma: np.ndarray, places: np.ndarray, weights: np.ndarray, table: np.ndarray
) -> str:
    """Log-likelihood per sample of a mixture, and its duality gap over the columns of `table`."""
    weights = np.maximum(weights, 0) / np.maximum(weights, 0).sum()
    density = kernel(x, sigma, places) @ weights
    gap = np.log(((1 / density) @ table).max() / len(x))
    return f"log-likelihood / n {np.log(density).mean():.9f}   gap / n {gap:.1e}"


MIXSQP = """
suppressMessages(library(mixsqp))
a <- commandArgs(TRUE); n <- as.integer(a[2]); m <- as.integer(a[3])
L <- matrix(readBin(a[1], "double", n * m), n, m)
t <- system.time(fit <- mixsqp(L, control = list(verbose = FALSE)))
writeBin(c(t[["user.self"]] + t[["sys.self"]], fit$x), a[4])
"""


def run_mixsqp(table: np.ndarray) -> tuple[float, np.ndarray]:
    """CPU seconds and weights of R's mixsqp; the matrix of densities is made for it."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("table", "found", "run.R")]
        np.asfortranarray(table).T.tofile(paths[0])
        paths[2].write_text(MIXSQP)
        sizes = [str(size) for size in table.shape]
        subprocess.run(["Rscript", paths[2], paths[0], *sizes, paths[1]], check=True, capture_output=True)
        answer = np.fromfile(paths[1])
    return float(answer[0]), answer[1:]


def peer_npeb(path: str) -> None:
    """The child: npeb on a fixed grid, with cvxpy's solver."""
    from npeb import GLMixture

    with np.load(path) as stored:
        x, sigma, places = stored["x"], stored["sigma"], stored["places"]
    model = GLMixture(prec_type="diagonal", atoms_init=places)
    start = time.process_time()
    model.fit(x, sigma[:, None] ** -2, max_iter_em=0, row_condition=True, score_every=None)
    seconds = time.process_time() - start
    np.savez(path, atoms=model.atoms, weights=model.weights, seconds=seconds)


def nonparametric() -> None:
    """The nonparametric estimate beside R's mixsqp and npeb on one grid, and alone at a million samples."""
    for n, m, peers in ((20_000, 400, ["mixsqp"]), (1_000, 100, ["mixsqp", "npeb"])):
        x, sigma = line_instance(n)
        axis = np.linspace(x.min(), x.max(), m)
        places, table = axis[:, None], kernel(x, sigma, axis[:, None])
        print(f"n = {n:,}, {m} places on a line (seconds of CPU)")
        start = time.process_time()
        found = npmle(x, sigma, m, free=False)
        ours = time.process_time() - start
        line = describe(x, sigma, found.mixture.atoms, found.mixture.weights, table)
        print(f"  {'assay':10} {ours:8.2f} s   {line}")
        start = time.process_time()
        free = npmle(x, sigma)
        seconds = time.process_time() - start
        line = describe(x, sigma, free.mixture.atoms, free.mixture.weights, table)
        print(
            f"  {'free atoms':10} {seconds:8.2f} s   {line}, everywhere {free.gap_everywhere / n:.1e}",
            flush=True,
        )
        for peer in peers:
            if peer == "mixsqp":
                if shutil.which("Rscript") is None:
                    print("  mixsqp     needs R: apt-get install r-cran-mixsqp")
                    continue
                theirs, weights = run_mixsqp(table)
                atoms = places
            else:
                with tempfile.TemporaryDirectory() as folder:
                    path = Path(folder) / "samples.npz"
                    np.savez(path, x=x, sigma=sigma, places=places)
                    command = [sys.executable, __file__, "peer_npeb", str(path)]
                    subprocess.run(command, check=True, capture_output=True, timeout=600)
                    with np.load(path) as stored:
                        atoms, weights, theirs = stored["atoms"], stored["weights"], float(stored["seconds"])
            line = describe(x, sigma, atoms, weights, table)
            print(f"  {peer:10} {theirs:8.2f} s   {line}   assay is {theirs / ours:,.0f}x faster", flush=True)
    for d in (1, 2, 3):
        seconds = []
        for n in (100_000, 1_000_000):
            rng = np.random.default_rng(0)
            sigma = rng.uniform(0.5, 2, n)
            x = simulate(Atoms(3 * rng.normal(size=(5, d)), np.full(5, 0.2)), sigma, rng)
            start = time.process_time()
            found = npmle(x, sigma)
            seconds.append(time.process_time() - start)
            print(
                f"n = {n:,}, d = {d}, 10,000 places and free atoms: {seconds[-1]:.1f} s of CPU, gap / n "
                f"{found.gap / n:.1e}, {len(found.mixture.weights)} atoms",
                flush=True,
            )
        print(f"  exponent of the time in n: {np.log10(seconds[1] / seconds[0]):.2f}")


PARTS = {
    "packages": packages,
    "em": em_from_kmeans,
    "million": million,
    "growth": growth,
    "npmle": nonparametric,
}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if sys.argv[1:2] == ["peer"]:
        peer_process(sys.argv[2])
    elif sys.argv[1:2] == ["peer_npeb"]:
        peer_npeb(sys.argv[2])
    else:
        for part in sys.argv[1:] or PARTS:
            PARTS[part]()
