"""Published models: a checkpoint and a card that says what it is, in a folder or on Hugging Face.

A published model is `model.safetensors`, a checkpoint of ours byte for byte, and `README.md`, the card.
Wherever a checkpoint is read, `hf:OWNER/NAME` or such a folder can be given instead. Models of ambient-laws
can be read as well; their names tell their data.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from assay.checkpoint import (
    WEIGHTS_NAME,
    Checkpoint,
    find_checkpoint,
    hub_name,
    import_hub,
    load_checkpoint,
    save_checkpoint,
)
from assay.data.units import black_and_white
from assay.files import write_whole_directory
from assay.metrics.evaluate import Evaluation, titles
from assay.outcome import CURRENCIES, load_evaluations, read_outcomes
from assay.pricing import comparable, price_report


def push(
    checkpoint: Path, destination: str, license: str, results: Sequence[Path] = (), prices: Path | None = None
) -> Path | str:
    """Publish a checkpoint or a finished run to a new folder, or to `hf:OWNER/NAME`; returns where it is.

    `results` are JSON files of `assay evaluate` and `prices` is a table of results, for the card.
    """
    loaded = load_checkpoint(checkpoint)
    repository = hub_name(destination)
    name = repository or Path(destination).resolve().name
    where = f"hf:{repository}" if repository else destination
    measured = list(load_evaluations(results).values())
    sentences = [] if prices is None else price_sentences(prices)
    card = model_card(loaded, name, where, license, measured, sentences)
    files = {WEIGHTS_NAME: find_checkpoint(checkpoint).read_bytes(), "README.md": card.encode()}
    if repository is None:
        if Path(destination).exists():
            raise FileExistsError(f"{destination} exists already: remove it, or choose another name")
        with write_whole_directory(Path(destination)) as partial:
            for file, content in files.items():
                (partial / file).write_bytes(content)
        return Path(destination)
    hub = import_hub(repository)
    api, add = hub.HfApi(), hub.CommitOperationAdd
    try:
        api.create_repo(repository, exist_ok=True)
        done = api.create_commit(
            repository, [add(*file) for file in files.items()], commit_message=f"Add {name}"
        )
    except hub.errors.HfHubHTTPError as error:
        reason = str(error).strip().splitlines()[-1]
        raise OSError(f"{destination} cannot be written ({reason}): log in with `hf auth login`") from error
    return str(done.commit_url)


def pull(source: str, output: Path) -> Checkpoint:
    """Fetch a published model, of ours or of ambient-laws, as a checkpoint of ours; its card stays there."""
    loaded = load_checkpoint(Path(source))
    save_checkpoint(output, loaded.denoiser, loaded.config, loaded.info)
    return loaded


def price_sentences(table: Path) -> list[str]:
    """What noisy images are worth by a table of results, one sentence for each noise level and measure."""
    outcomes, said, failures = read_outcomes(table), list[str](), list[str]()
    for currency in CURRENCIES.values():
        if any(currency.value(outcome) is not None for outcome in outcomes.values()):
            try:
                for found in comparable(outcomes, str(table), currency=currency):
                    priced = price_report(found)
                    said += [priced.sentence(bounds.sigma) for bounds in priced.bounds]
            except ValueError as error:
                failures.append(str(error))
    if not said:
        raise ValueError(failures[0] if failures else f"{table} has no results to price")
    return said


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
    consistency = None if info.consistency is None else "yes" if info.consistency else "no"
    facts = {
        "data set": info.dataset,
        "training images": None if info.num_images is None else f"{info.num_images:,}",
        "part of the data set": info.dataset_fraction,
        "images seen in training": None if info.num_images_seen is None else f"{info.num_images_seen:,}",
        "consistency loss": consistency,
        "classes": config.num_classes or None,
        "values of black and white": units and "{:g} and {:g}".format(*units),
        "imported from": info.source,
    }
    meta = {
        "license": license,
        "library_name": "assay",
        "pipeline_tag": "unconditional-image-generation",
        "tags": ["diffusion", "noisy-data"],
    }
    parts = ["---", *(f"{key}: {json.dumps(value)}" for key, value in meta.items()), "---", f"# {name}", ""]
    parts.append(
        f"A diffusion model of {shape} images ({config.kind}, {num_weights:,} weights), trained with Assay."
    )
    parts += [
        "",
        "## Data",
        "",
        *_table(("what", "value"), [(k, v) for k, v in facts.items() if v is not None]),
    ]
    if info.sigma_tn:
        levels = [("clean" if level == 0 else f"{level:.4g}", f"{share:.4g}") for level, share in info.sigma_tn]
        parts += ["", "Noise levels, for images scaled to [-1, 1]:", ""]
        parts += _table(("noise level", "share of the images"), levels)
    if evaluations:
        parts += ["", "## Results", "", *_table(("measure", "value", "measured on"), _result_rows(evaluations))]
    if prices:
        parts += ["", "## What noisy images are worth here", "", *(f"- {sentence}" for sentence in prices)]
    parts += ["", "## Use", "", "```sh", f"assay sample {where} -o samples/"]
    parts += [f"assay evaluate {where} --held-out STORE", "```", "", "## Licence", ""]
    parts.append(f"The weights are published under {license}. The licences of the training images also apply.")
    return "\n".join(parts) + "\n"


def _result_rows(evaluations: Sequence[Evaluation]) -> list[tuple[str, str, str]]:
    rows = []
    for found in evaluations:
        against = f"{found.num_images:,} samples" if found.num_images else ""
        if found.details is not None:
            against += f", against {found.details.reference}"
        for name, title in titles([found]).items():
            on = (
                f"{found.score_images:,} held-out images" if name == "score" and found.score_images else against
            )
            title = {"fd": found.metric, "score": "score, nats per dimension"}.get(name, title)
            rows.append((title, found.cell(name), on))
    return rows


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    return ["| " + " | ".join(map(str, row)) + " |" for row in (header, ["---"] * len(header), *rows)]
