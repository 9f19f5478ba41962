"""Random sequences of the real commands in one folder, against a small model of what must be true.

A user packs, trains, samples, measures and studies, edits an input in between, kills a command, starts
it twice at once, renames or removes what was made, and keeps own files in every folder. After each step

- every file of the user is there, with its contents;
- a command that succeeded made what it makes in an empty folder from the inputs as they are now, to the bit;
- a command that failed said why in a sentence, had a reason that the model knows, and changed no result.

    python -m tests.stateful            10,000 steps
    python -m tests.stateful -n 500
"""

import argparse
import atexit
import hashlib
import io
import json
import os
import shutil
import signal
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import hypothesis
import numpy as np
import tifffile
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from typer.testing import CliRunner

from assay.cli import app
from assay.data import open_store
from assay.processes import Workers
from tests.processes import fork_worker, start_command

NUM_CLEAN, NUM_NOISY, SIDE = 24, 16, 4
STORES, RUNS = ("a", "b"), ("one", "two")
MINE = "notes.txt .x.lock .lock .training .z.partial/keep.txt .assay-partial/keep.txt images.npy.bak".split()
SETTINGS = (
    "net.preset=mlp net.width=8 net.num_blocks=1 train.batch_size=8 train.state_every=1 train.log_every=1"
)
SPEC = """\
name = "tiny"
[data]
store = "{store}"
noisy = 0
[net]
preset = "mlp"
width = 8
num_blocks = 1
[train]
num_steps = 2
batch_size = 8
[evaluate]
extractor = "pixels"
num_images = 20
num_ranges = 1
sample = {{num_steps = 2}}
[grid]
clean_fractions = [1]
sigmas = [0.2]
"""


def ran(*words: object) -> tuple[int, str]:
    """Run a command; its exit code and what it said. Anything but an orderly end is a fault."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exception is None or isinstance(done.exception, SystemExit), (words, repr(done.exception))
    if done.exit_code:
        assert done.output.strip() and "Traceback" not in done.output, (words, done.output)
    return done.exit_code, done.output


def digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def pictures(values: bytes) -> np.ndarray:
    return np.frombuffer(values, np.uint8).reshape(NUM_CLEAN, SIDE, SIDE)


def noisy_images() -> np.ndarray:
    """Noisy images as files hold them, float, in grey levels."""
    rng = np.random.default_rng(0)
    return (128 + 40 * rng.standard_normal((NUM_NOISY, SIDE, SIDE))).astype(np.float32)


class Inputs:
    """What a user packs: a folder of clean pictures, an array of noisy ones and a table of their levels."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.files = folder, dict[Path, bytes]()
        self.clean = bytearray(np.random.default_rng(1).integers(0, 256, NUM_CLEAN * SIDE * SIDE, np.uint8))
        self.sigma = 20
        (folder / "clean").mkdir(parents=True)
        for number in range(NUM_CLEAN):
            self.write_picture(number)
        np.save(noisy := folder / "noisy.npy", noisy_images())
        self.files[noisy] = noisy.read_bytes()
        self.write_levels()

    def write_picture(self, number: int) -> None:
        path = self.folder / "clean" / f"{number:02}.tif"
        tifffile.imwrite(path, pictures(bytes(self.clean))[number])
        self.files[path] = path.read_bytes()

    def write_levels(self) -> None:
        rows = "".join(f"noisy.npy[{number}],{self.sigma}\n" for number in range(NUM_NOISY))
        (path := self.folder / "levels.csv").write_text(f"filename,sigma\n{rows}")
        self.files[path] = path.read_bytes()

    @property
    def words(self) -> list[str]:
        where = self.folder
        return [
            f"{where / 'clean'}:range=0,255",
            f"{where / 'noisy.npy'}:levels={where / 'levels.csv'},range=0,255",
        ]

    @property
    def contents(self) -> tuple[bytes, int]:
        return bytes(self.clean), self.sigma


def expected_store(contents: tuple[bytes, int]) -> tuple[np.ndarray, np.ndarray]:
    """Images scaled to [-1, 1] and their levels, computed here."""
    clean, sigma = contents
    images = np.concatenate([pictures(clean).astype(np.float64), noisy_images().astype(np.float64)])
    levels = np.r_[np.zeros(NUM_CLEAN), np.full(NUM_NOISY, sigma / 127.5)]
    return images / 127.5 - 1, levels


@cache
def fresh(kind: str, contents: tuple[bytes, int], steps: int = 0) -> Any:
    """What a command makes of these inputs in an empty folder."""
    with tempfile.TemporaryDirectory(prefix="fresh-") as temporary:
        folder = Path(temporary)
        inputs = Inputs(folder / "inputs")
        inputs.clean[:], inputs.sigma = contents
        for number in range(NUM_CLEAN):
            inputs.write_picture(number)
        inputs.write_levels()
        assert ran("data", "pack", *inputs.words, "-o", folder / "store")[0] == 0
        if kind == "study":
            (folder / "study.toml").write_text(SPEC.format(store=folder / "store"))
            assert ran("study", "run", folder / "study.toml", "-o", folder / "out", "--workers", 1)[0] == 0
            return results_of(folder / "out")
        assert ran(*train_words(folder / "store", folder / "run", steps))[0] == 0
        if kind == "weights":
            return weights_of(folder / "run")
        if kind == "samples":
            assert ran(*sample_words(folder / "run", folder / "samples.npy"))[0] == 0
            return (folder / "samples.npy").read_bytes()
        return loss_of(folder / "run", other_images())


@cache
def other_images() -> Path:
    """Images that no model has seen."""
    folder = Path(tempfile.mkdtemp(prefix="other-"))
    atexit.register(shutil.rmtree, folder)
    values = np.random.default_rng(7).integers(0, 256, (60, SIDE, SIDE), np.uint8)
    np.save(folder / "other.npy", values)
    assert ran("data", "pack", folder / "other.npy", "-o", folder / "other")[0] == 0
    return folder / "other"


def train_words(store: Path, run: Path, steps: int) -> list[object]:
    return ["train", store, *(f"--set={each}" for each in SETTINGS.split()), "--num-steps", steps, "-o", run]


def sample_words(run: Path, to: Path, *more: object) -> list[object]:
    return ["sample", run, "--seeds", "0-3", "--num-steps", 2, "-o", to, *more]


RUN, STORE, STEPS = st.sampled_from(RUNS), st.sampled_from(STORES), st.sampled_from([2, 3])
MOMENTS = st.integers(1, 40) | st.floats(0, 0.3)  # the number of a write, or seconds


def kill(words: list[object], when: int | float) -> None:
    """A command is killed in the middle of a write, or after a while, or ends before that."""
    child = start_command(words, when if isinstance(when, int) else None)
    if isinstance(when, float):
        time.sleep(when)
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def weights_of(run: Path) -> str:
    return digest((run / "snapshots" / "final.safetensors").read_bytes()) if finished(run) else ""


def finished(run: Path) -> bool:
    return (run / "snapshots" / "final.safetensors").exists()


def loss_of(run: Path, held_out: Path) -> tuple[str, str]:
    """The held-out loss of a model, empty if there is none, and what the command said."""
    with tempfile.TemporaryDirectory(prefix="loss-") as folder:
        to = Path(folder) / "loss.json"
        code, said = ran("evaluate", run, "--held-out", held_out, "-o", to, "--cache", Path(folder) / "cache")
        return str(json.loads(to.read_text())["held_out_loss"]) if code == 0 else "", said


def results_of(out: Path) -> str:
    """The table of a study, without what depends on the machine."""
    header, *rows = (out / "results.csv").read_text().splitlines()
    kept = [name for name in header.split(",") if not name.endswith("_seconds")]
    return digest(
        [[dict(zip(header.split(","), row.split(","), strict=True))[name] for name in kept] for row in rows]
    )


class Folder(RuleBasedStateMachine):
    """One folder of a user, and what must be true of it."""

    studies = False  # one of each sequence is trained, which takes seconds
    num_steps = 0  # of all sequences

    @initialize()
    def begin(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="stateful-"))
        self.inputs = Inputs(self.home / "inputs")
        self.other = other_images()
        self.mine: dict[Path, bytes] = {}
        self.stores: dict[str, tuple[bytes, int]] = {}  # what each holds
        self.runs: dict[str, set[tuple[tuple[bytes, int], int]]] = {name: set() for name in RUNS}  # begun there
        self.trained: dict[str, tuple[tuple[bytes, int], int]] = {}  # finished there
        self.origin: dict[str, str] = {}  # the store that each was begun with
        self.studied: tuple[bytes, int] | None = None
        type(self).num_steps -= 1  # the beginning is none

    def teardown(self) -> None:
        if hasattr(self, "home"):
            shutil.rmtree(self.home)

    def store(self, name: str) -> Path:
        return self.home / "stores" / name

    def run(self, name: str) -> Path:
        return self.home / "runs" / name

    @invariant()
    def nothing_of_the_user_is_lost(self) -> None:
        """Files of the user, inputs, and stores that were made."""
        if not hasattr(self, "home"):
            return
        type(self).num_steps += 1
        for path, content in {**self.mine, **self.inputs.files}.items():
            assert path.exists() and path.read_bytes() == content, f"{path} is gone or changed"
        for name, contents in self.stores.items():
            assert self.holds(name, contents), f"{self.store(name)} has changed"
        for name, this in self.trained.items():
            assert weights_of(self.run(name)) == fresh("weights", *this), f"{self.run(name)} has changed"

    def holds(self, name: str, contents: tuple[bytes, int]) -> bool:
        found, (images, levels) = open_store(self.store(name)), expected_store(contents)
        x = found.read(torch.arange(len(found))).numpy()[:, 0]
        same = x.shape == images.shape and np.allclose(x, images, atol=2e-6)
        return bool(same and np.allclose(found.sigma_tn.numpy(), levels, atol=1e-6))

    # What the user does by hand.

    @rule(number=st.sampled_from([0, NUM_CLEAN - 1]), value=st.sampled_from([0, 255]))  # few, to know them soon
    def edit_a_picture(self, number: int, value: int) -> None:
        """Another value of one pixel; same file name, same size."""
        self.inputs.clean[number * SIDE * SIDE] = value
        self.inputs.write_picture(number)

    @rule(sigma=st.sampled_from([10, 20, 38]))
    def edit_the_levels(self, sigma: int) -> None:
        self.inputs.sigma = sigma
        self.inputs.write_levels()

    @rule(
        where=st.sampled_from(["", "stores", "stores/a", "runs", "runs/one", "runs/one/state"]),
        name=st.sampled_from(MINE),
    )
    def keep_a_file(self, where: str, name: str) -> None:
        """A file of the user, in a folder where commands write."""
        path = self.home / where / name
        if (self.home / where).is_dir() and not path.exists():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"mine")
            self.mine[path] = b"mine"

    @rule(name=RUN)
    def remove_a_run(self, name: str) -> None:
        if self.run(name).exists():
            shutil.rmtree(self.run(name))
            self.forget(self.run(name))
            self.runs[name] = set()
            for known in (self.trained, self.origin):
                known.pop(name, None)

    @rule(name=STORE)
    def remove_a_store(self, name: str) -> None:
        if self.store(name).exists():
            shutil.rmtree(self.store(name))
            self.forget(self.store(name))
            self.stores.pop(name, None)

    @rule()
    def swap_the_stores(self) -> None:
        if len(self.stores) == 2 and not any("stores" in path.parts for path in self.mine):
            a, b = (self.store(name) for name in STORES)
            a.rename(a.with_name("c"))
            b.rename(a)
            a.with_name("c").rename(b)
            self.stores = {"a": self.stores["b"], "b": self.stores["a"]}

    def forget(self, folder: Path) -> None:
        self.mine = {path: content for path, content in self.mine.items() if not path.is_relative_to(folder)}

    # Commands.

    @rule(name=STORE, overwrite=st.booleans())
    def pack(self, name: str, overwrite: bool) -> None:
        """A store, or an error if there is one; replaced only if asked, and if nothing else lies in it."""
        there = self.store(name).exists()
        code, said = ran(
            "data", "pack", *self.inputs.words, "-o", self.store(name), *["--overwrite"] * overwrite
        )
        foreign = any(path.is_relative_to(self.store(name)) for path in self.mine)
        if code == 0:
            assert not there or (overwrite and not foreign), said
            self.stores[name] = self.inputs.contents
        else:
            assert there and (not overwrite or foreign), said

    @rule(name=RUN, store=STORE, steps=STEPS)
    def train(self, name: str, store: str, steps: int) -> None:
        """A finished model belongs to its inputs; what was trained otherwise there is not replaced."""
        self.expect_trained(name, store, steps, ran(*train_words(self.store(store), self.run(name), steps)))

    def expect_trained(self, name: str, store: str, steps: int, ended: tuple[int, str]) -> None:
        code, said = ended
        self.note_begun(name, store, steps)
        if store not in self.stores:
            assert code != 0 and str(self.store(store)) in said.replace("\n", ""), said
            return
        this = self.stores[store], steps
        if code == 0:
            assert weights_of(self.run(name)) == fresh("weights", *this), (name, store, steps, said)
            self.runs[name], self.trained[name] = {this}, this
        else:
            assert self.runs[name] - {this}, said

    def note_begun(self, name: str, store: str, steps: int) -> None:
        """A training that was perhaps killed: its folder may belong to it now, and it may be finished."""
        run = self.run(name)
        if store in self.stores and (run / "config.json").exists():
            self.origin.setdefault(name, store)
            self.runs[name].add((self.stores[store], steps))
        if name not in self.trained and finished(run):
            found = [this for this in self.runs[name] if weights_of(run) == fresh("weights", *this)]
            assert found, f"{run} holds a model of other inputs"
            self.trained[name] = found[0]

    @rule(name=RUN, store=STORE, steps=STEPS, when=MOMENTS)
    def kill_a_training(self, name: str, store: str, steps: int, when: int | float) -> None:
        kill(train_words(self.store(store), self.run(name), steps), when)
        self.note_begun(name, store, steps)

    @rule(name=STORE, overwrite=st.booleans(), when=MOMENTS)
    def kill_a_packing(self, name: str, overwrite: bool, when: int | float) -> None:
        """The store is whole, the one before or the new one; between these two it is called NAME-old."""
        path, before, asked = self.store(name), self.stores.get(name), ["--overwrite"] * overwrite
        kill(["data", "pack", *self.inputs.words, "-o", path, *asked], when)
        old, new = (path.with_name(f"{name}-{word}") for word in ("old", "new"))
        if old.exists() and not path.exists():
            old.rename(path)
        for left in (old, new):
            assert overwrite or not left.exists()
            shutil.rmtree(left, ignore_errors=True)
        if path.exists():
            possible = [before or self.inputs.contents, *([self.inputs.contents] * overwrite)]
            found = [contents for contents in possible if self.holds(name, contents)]
            assert found, f"{path} holds neither the old nor the new images"
            self.stores[name] = found[0]

    def trained_one(self, name: str) -> str:
        """This run, or another one if only that is trained."""
        return name if name in self.trained else next(iter(self.trained), name)

    @rule(name=RUN, when=MOMENTS)
    def kill_a_sampling(self, name: str, when: int | float) -> None:
        name, to = self.trained_one(name), self.home / "samples"
        words = sample_words(self.run(name), to, "--format", "npy")
        kill(words, when)
        code, said = ran(*words)
        assert (code == 0) == (name in self.trained), said
        if name in self.trained:
            made = [np.load(file)[0] for file in sorted(to.glob("*.npy"))]
            assert np.array_equal(made, np.load(io.BytesIO(fresh("samples", *self.trained[name])))[:, 0])
            shutil.rmtree(to)
        assert not to.exists()

    @rule(name=RUN, store=STORE, steps=STEPS)
    def train_twice_at_once(self, name: str, store: str, steps: int) -> None:
        """Two processes with one command: both end, and a third finds the model or makes it."""
        words = train_words(self.store(store), self.run(name), steps)
        for child in [start_command(words), start_command(words)]:
            os.waitpid(child, 0)
        self.expect_trained(name, store, steps, ran(*words))

    @rule(name=RUN)
    def sample(self, name: str) -> None:
        name, to = self.trained_one(name), self.home / "samples.npy"
        code, said = ran(*sample_words(self.run(name), to))
        assert (code == 0) == to.exists() == (name in self.trained), said
        if name in self.trained:
            assert to.read_bytes() == fresh("samples", *self.trained[name])
            to.unlink()

    @rule(name=RUN)
    def evaluate(self, name: str) -> None:
        """A model is measured on images it has not seen, and rejected on those it has."""
        name = self.trained_one(name)
        loss, said = loss_of(self.run(name), self.other)
        assert loss == (fresh("loss", *self.trained[name])[0] if name in self.trained else ""), said
        for store in self.stores if name in self.trained else ():  # all share images
            loss, said = loss_of(self.run(name), self.store(store))
            gone = not self.store(self.origin[name]).exists()  # then it is measured, with a warning
            assert ("cannot tell whether" if gone else "trained on") in said.replace("\n", " "), said
            assert bool(loss) == gone, said

    @precondition(lambda self: self.studies)
    @rule(store=STORE, killed=st.none() | MOMENTS)
    def study(self, store: str, killed: int | float | None) -> None:
        """The first is trained. Later ones find its results, or are rejected: they are of other images."""
        spec, out, this = self.home / "study.toml", self.home / "out", self.stores.get(store)
        spec.write_text(SPEC.format(store=self.store(store)))
        words = ["study", "run", spec, "-o", out, "--workers", 1]
        if killed is not None:
            kill(words, killed)
        if any(out.glob("runs/*/outcome-*.json")):
            self.studied = self.studied or this
        code, said = ran(*words)
        if this is None:
            assert code != 0 and str(self.store(store)) in said.replace("\n", ""), said
        else:
            self.studied = self.studied or this
            assert (code == 0) == (this == self.studied), said
        if code == 0 or (out / "results.csv").exists():
            assert self.studied and results_of(out) == fresh("study", self.studied), said


def check(num_steps: int, seed: int = 0, studies: bool = False) -> int:
    """Run sequences of 50 steps, about `num_steps` in all; the first fault is raised, as short as it gets.

    No rule draws what depends on the folder, nor is possible only then: how far a killed command came is
    decided by time, and hypothesis repeats what it has drawn. Returns how many steps were made.
    """
    machine = type("Folder", (Folder,), {"studies": studies})
    chosen = settings(
        max_examples=1 + max(1, num_steps // 50),  # the first has one step
        stateful_step_count=50,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    with patch.object(Workers, "start", fork_worker):
        run_state_machine_as_test(hypothesis.seed(seed)(machine), settings=chosen)
    return machine.num_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-n", type=int, default=10_000, help="steps")
    parser.add_argument("--seed", type=int, default=0, help="of the first 1,000 steps; the next have the next")
    options = parser.parse_args()
    done, seed = 0, options.seed
    while done < options.n:
        done += check(min(1_000, options.n - done), seed, studies=True)
        print(f"seed {seed}, {done} steps: no fault", flush=True)
        seed += 1


if __name__ == "__main__":
    main()
