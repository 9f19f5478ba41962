"""The folder of a run: what it holds, to which config it belongs, and the run that it continues.

config.json    what was asked, the network, the fingerprint of the data
state/         the last two states (see `assay.train.state`)
metrics.jsonl  one line every `log_every` steps
samples/       pictures of what the EMA weights generate
snapshots/     EMA weights as checkpoints; `final.safetensors` means finished
averages/      weights averaged in two ways, to choose the EMA's length from (see `assay.train.average`)

With `train.rounds` all but config.json and the final snapshot lies in `round-0/`, `round-1/` and so on, beside
the restored images of each round (see `assay.train.restored`).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

import assay
from assay.data import ImageSource
from assay.errors import AssayError
from assay.files import decoding, differences, write_whole
from assay.train.config import RunConfig
from assay.train.state import load_state


def final_path(run_dir: Path) -> Path:
    """Where the weights of a finished run are."""
    return run_dir / "snapshots" / "final.safetensors"


def snapshot_path(run_dir: Path, step: int) -> Path:
    """Where the weights after a step are kept, if that was asked for."""
    return run_dir / "snapshots" / f"{step:09d}.safetensors"


def read_run(path: Path) -> dict[str, Any]:
    """A run's config.json, with at least `fingerprint` (`data`, `run`), `config` (`train`) and `net`."""
    with decoding(path, "restore it, or train into another folder"):
        found = json.loads(path.read_bytes())
        parts = found["fingerprint"], found["config"], found["config"]["train"], found["net"]
        if not all(isinstance(part, dict) for part in parts):
            raise ValueError("its parts are not objects")
        found["fingerprint"]["data"], found["fingerprint"]["run"]
    return dict(found)


@dataclass(frozen=True)
class Continued:
    """The state of the run to continue, and what is recorded about it."""

    state: tuple[dict[str, Tensor], dict[str, Any]]
    lineage: list[dict[str, Any]]
    same_data: bool


def claim_folder(
    config: RunConfig, run_dir: Path, source: ImageSource, continued: Continued | None = None
) -> None:
    """Write config.json, or make sure that the folder belongs to this very run."""
    path = run_dir / "config.json"
    identity = {"data": source.fingerprint, "run": config.fingerprint(source)}
    if not path.exists():
        record = {
            "assay": assay.__version__,
            "fingerprint": identity,
            "data": {"name": source.name, "num_images": len(source)},
            "config": config.model_dump(mode="json"),
            "net": config.net_config(source).model_dump(mode="json"),
            "lineage": [] if continued is None else continued.lineage,
        }
        with write_whole(path) as partial:
            partial.write_text(json.dumps(record, indent=2))
        return
    found = read_run(path)
    known, there = found["fingerprint"], found["config"]
    what, key = f"was trained on other images: {source.name} has changed since the run began", "data"
    if known["data"] == identity["data"]:
        # Wherever the images lie, however pictures are sampled.
        here = config.model_dump(mode="json") | {same: there.get(same) for same in ("data", "sample")}
        different = differences(there, here) or [f"{config.train.init_from} has changed"]
        what, key = f"holds a run with another config ({'; '.join(different)})", different[0].partition(":")[0]
    if known != identity:
        raise AssayError(what, path=run_dir, key=key, cure="train into another folder")


def find_continued(config: RunConfig, run_dir: Path, source: ImageSource) -> Continued | None:
    """The run to continue, if there is one and this run has not started; checked against this one."""
    folder = config.train.continue_from
    if folder is None or (run_dir / "config.json").exists():
        return None
    state = load_state(folder / "state", remove_damaged=False)
    if state is None or not (folder / "config.json").is_file():
        what = "there is no run with a saved state in that folder"
        raise AssayError(what, path=folder, key="train.continue_from")
    theirs, step, here = read_run(folder / "config.json"), state[1]["step"], config.model_dump(mode="json")
    different = differences(theirs["net"], config.net_config(source).model_dump(mode="json"), "net")
    for same in ("batch_size", "accumulate", "optimizer"):  # steps are counted in batches, moments are its
        different += differences(theirs["config"]["train"].get(same), here["train"][same], f"train.{same}")
    if step >= config.train.num_steps:
        different += [f"train.num_steps is not above {step}, where it is already"]
    if different:
        what, cure = f"cannot be continued ({'; '.join(different)})", "change these settings, or start anew"
        raise AssayError(what, path=folder, key="train.continue_from", cure=cure)
    changed = differences(theirs["config"], here)
    parent = {"fingerprint": theirs["fingerprint"], "step": step, "changed": changed}
    same_data = theirs["fingerprint"]["data"] == source.fingerprint
    return Continued(state, [*theirs.get("lineage", []), parent], same_data)
