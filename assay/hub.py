"""Published models: `model.safetensors`, a checkpoint of ours, and `README.md`, a card that says what it is.

Wherever a checkpoint is read, `hf:OWNER/NAME` or such a folder can be given instead.
"""

import json
import re
import shlex
import tempfile
from collections.abc import Sequence
from importlib.metadata import packages_distributions
from pathlib import Path

from torch import nn

from assay.checkpoint import WEIGHTS_NAME, Checkpoint, hub_name, import_hub, load_checkpoint, save_checkpoint
from assay.data.units import black_and_white
from assay.errors import AssayError
from assay.files import one_line, write_whole_directory
from assay.metrics.evaluate import Evaluation, titles
from assay.nets import PassedConfig
from assay.outcome import load_evaluations
from assay.pricing import price_all
from assay.pricing.words import sentence
from assay.registry import is_own


def push(
    checkpoint: Path | str,
    destination: str,
    license: str,
    results: Sequence[Path] = (),
    prices: Path | None = None,
    net: nn.Module | None = None,
) -> Path | str:
    """Publish a checkpoint or a finished run to a new folder, or to `hf:OWNER/NAME`; returns where it is.

    `results` are JSON files of `assay evaluate` and `prices` is a table of results, for the card. `net` is the
    module of a network that was passed to `fit`.
    """
    if re.match(r"(?!hf:)\w+:|\w+://", destination):
        cure = "give hf:OWNER/NAME, or a folder"
        raise AssayError("is an address", path=destination, key="destination", cure=cure)
    loaded, repository = load_checkpoint(Path(checkpoint), net=net), hub_name(destination)
    name = repository or Path(destination).resolve().name
    where = f"hf:{repository}" if repository else destination
    measured = list(load_evaluations(results).values())
    worth = [] if prices is None else [sentence(each) for found in price_all(prices) for each in found.prices]
    card = model_card(loaded, name, where, license, measured, worth)

    def write(folder: Path) -> list[Path]:
        save_checkpoint(folder / WEIGHTS_NAME, loaded.denoiser, loaded.config, loaded.info)
        (folder / "README.md").write_text(card)
        return [folder / WEIGHTS_NAME, folder / "README.md"]

    if repository is None:
        with write_whole_directory(Path(destination)) as partial:
            write(partial)
        return Path(destination)
    hub = import_hub()
    api, add = hub.HfApi(), hub.CommitOperationAdd
    try:
        api.create_repo(repository, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            changes = [add(file.name, file.read_bytes()) for file in write(Path(folder))]
        done = api.create_commit(repository, changes, commit_message=f"Add {name}")
    except hub.errors.HfHubHTTPError as error:
        what = f"cannot be written ({str(error).strip().splitlines()[-1]})"
        raise AssayError(what, path=destination, cure="log in: hf auth login") from error
    return str(done.commit_url)


def model_card(
    checkpoint: Checkpoint,
    name: str,
    where: str,
    license: str,
    evaluations: Sequence[Evaluation] = (),
    prices: Sequence[str] = (),
) -> str:
    """The text of `README.md`: data, noise levels, results, prices and licence; unknown things are left out."""
    config, info = checkpoint.config, checkpoint.info
    num_weights = sum(weight.numel() for weight in checkpoint.denoiser.parameters())
    shape = " x ".join(map(str, config.image_shape))
    units = None if info.physical_range is None else black_and_white(info.physical_range)
    facts = {
        "data set": info.dataset,
        "training images": None if info.num_images is None else f"{info.num_images:,}",
        "part of the data set": info.dataset_fraction,
        "images seen in training": None if info.num_images_seen is None else f"{info.num_images_seen:,}",
        "consistency loss": {True: "yes", False: "no", None: None}[info.consistency],
        "loss": info.loss,
        "distribution of noise levels": info.noise,
        "classes": config.num_classes or None,
        "values of black and white": units and "{:g} and {:g}".format(*units),
        "imported from": info.source,
    }
    meta = {"license": license, "library_name": "assay", "tags": ["diffusion", "noisy-data"]}
    meta["pipeline_tag"] = "unconditional-image-generation"
    parts = ["---", *(f"{key}: {json.dumps(value)}" for key, value in meta.items()), "---"]
    passed = config.name if isinstance(config, PassedConfig) else None
    what = f"A diffusion model of {shape} images ({passed or config.kind}, {num_weights:,} weights)"
    parts += [f"# {_text(name)}", "", f"{what}, {'imported into' if info.source else 'trained with'} Assay."]
    known = [(fact, value) for fact, value in facts.items() if value is not None]
    parts += ["", "## Data", "", *_table(("what", "value"), known)]
    if info.sigma_tn:
        levels = [
            ("clean" if level == "0" else level, f"{part:.4g}") for level, part in info.levels_in_words(".4g")
        ]
        parts += ["", "Noise levels, for images scaled to [-1, 1]:", ""]
        parts += _table(("noise level", "share of the images"), levels)
    if evaluations:
        parts += ["", "## Results", "", *_table(("measure", "value", "measured on"), _result_rows(evaluations))]
    if prices:
        parts += ["", "## What noisy images are worth here", "", *(f"- {sentence}" for sentence in prices)]
    where = shlex.quote(one_line(where))
    parts += ["", "## Use", ""]
    if is_own(type(config)):
        module = type(config).__module__.split(".")[0]
        package = packages_distributions().get(module, [f"with the module {module}"])[0]
        parts += [f"Install the Python package {_text(package)} first, which has the network.", ""]
    use = ["```sh", f"assay sample {where} -o samples/", f"assay evaluate {where} --held-out STORE", "```"]
    if passed:
        use = ["```python", f"model = assay.load({where!r}, net={passed}(...))  # the authors' module", "```"]
    parts += [*use, "", "## Licence", ""]
    parts.append(f"The weights are published under {_text(license)}. The licences of the images also apply.")
    return "\n".join(parts) + "\n"


def _result_rows(evaluations: Sequence[Evaluation]) -> list[tuple[str, str, str]]:
    rows = []
    for found in evaluations:
        against = f"{found.num_images:,} samples" if found.num_images else ""
        if found.details is not None:
            against += f", against {found.details.reference}"
        for name, title in titles([found]).items():
            is_loss = name == "held_out_loss" and found.held_out_loss_images
            on = f"{found.held_out_loss_images:,} held-out images" if is_loss else against
            title = {"fd": found.metric, "held_out_loss": "loss, nats per dimension"}.get(name, title)
            rows.append((title, found.cell(name), on))
    return rows


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    cells = [[_text(str(cell)) for cell in row] for row in (header, *rows)]
    cells.insert(1, ["---"] * len(header))
    return [f"| {' | '.join(row)} |" for row in cells]


def _text(value: str) -> str:
    """Words from elsewhere as plain text of Markdown: on one line, and nothing in them is markup."""
    return re.sub(r"([\\`*\[\]<>|])|(?<!\w)_|_(?!\w)", lambda mark: "\\" + mark[0], one_line(value))
