"""`assay evaluate` and `assay reference`: how close are generated images to real ones?"""

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from assay.cli.options import (
    BatchSize,
    Device,
    Tuned,
    advance,
    count,
    open_console,
    open_progress,
    output_option,
    read_tuned,
    takes_sampling,
)

if TYPE_CHECKING:
    from assay.data import Store
    from assay.metrics.evaluate import Evaluation, Reference
    from assay.metrics.extract import Extractor
    from assay.metrics.score import Score
    from assay.sample import SampleConfig

Name = Literal["classifier", "inception", "mobilenet_v2", "pixels"]
ExtractorOption = Annotated[
    Name,
    typer.Option(help="Network whose features are compared. `inception` gives FID, others FD-NAME."),
]
Weights = Annotated[
    Path | None, typer.Option(help="File with the official weights of `inception` or `mobilenet_v2`.")
]
Cache = Annotated[
    Path,
    typer.Option(
        envvar="ASSAY_CACHE",
        help="Folder that keeps weights, classifiers and features of references.",
        show_default="~/.cache/assay",
    ),
]
DEFAULT_CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "assay"


@takes_sampling()
def evaluate(
    generated: Annotated[
        Path,
        typer.Argument(
            help="A checkpoint, a run folder, a published model (hf:OWNER/NAME), a store, or images: a folder, "
            "zip or npz."
        ),
    ],
    sample: "SampleConfig",
    reference: Annotated[
        Path | None,
        typer.Option(
            "--reference", "-r", help="Real images: a store, or an npz of feature statistics (ours or EDM's)."
        ),
    ] = None,
    extractor: Annotated[
        Name | None,
        typer.Option(
            help="Whose features to compare. Only `inception` gives FID, the others FD-NAME. "
            "Default: classifier, or the held-out score alone if the reference has no labels."
        ),
    ] = None,
    num_images: Annotated[
        int | None,
        typer.Option(help="Images in each range. Default: all; of a checkpoint as many as the reference has."),
    ] = None,
    num_ranges: Annotated[
        int | None,
        typer.Option("--ranges", min=1, help="Disjoint ranges of images. Default: 3 for a checkpoint, else 1."),
    ] = None,
    first_seed: Annotated[int, typer.Option(min=0, help="Seed of the first sampled image.")] = 0,
    tuned: Tuned = False,
    noised: Annotated[
        bool,
        typer.Option(
            "--noised",
            help="Add noise to the generated images and measure their distance from the noisy images of the "
            "reference. Needs no clean image.",
        ),
    ] = False,
    infinity: Annotated[
        bool, typer.Option("--infinity", help="Also extrapolate the distance to infinitely many images.")
    ] = False,
    fd_only: Annotated[
        bool,
        typer.Option(
            "--fd-only", help="Leave out what compares every image with every other: KID, copies, ..."
        ),
    ] = False,
    training: Annotated[
        Path | None,
        typer.Option(help="Training images, to look for copies. Default: the reference."),
    ] = None,
    held_out: Annotated[
        Path | None,
        typer.Option(
            help="Real images not trained on: a checkpoint is scored on them, in nats; they also decide what "
            "is a copy (default for that: leave-one-out)."
        ),
    ] = None,
    quantile: Annotated[
        float,
        typer.Option(
            min=0.001,
            max=0.999,
            help="Copies are closer than this share of held-out images.",
        ),
    ] = 0.05,
    nearest: Annotated[
        Path | None,
        output_option("Save a picture of the images closest to training images.", "--nearest", suffix=".png"),
    ] = None,
    output: Annotated[Path | None, output_option("Save the result as JSON.")] = None,
    weights: Weights = None,
    cache: Cache = DEFAULT_CACHE,
    device: Device = "auto",
    batch_size: BatchSize = 128,
) -> None:
    """Measure how close generated images are to real ones, and how well a model denoises held-out images.

    A checkpoint is sampled, by default in three ranges of seeds as in the paper. No image is saved. The
    held-out score needs no samples, no extractor and no labels. Noisy images score the noise levels above
    their own.

    Examples:

        assay evaluate samples/ --reference stores/digits --output result.json

        assay evaluate runs/mix --reference stores/digits --num-images 1000

        assay evaluate runs/mix --held-out stores/test --output score.json

        assay evaluate runs/loops --reference stores/scans --noised

    A published model: `assay evaluate
    hf:giannisdaras/ambient_laws_cifar_sigma_0.2_corruption_0.9_keep_1.0 --reference cifar10-32x32.npz
    --extractor inception`
    """
    from assay.checkpoint import is_model
    from assay.data import open_store
    from assay.devices import find_devices
    from assay.files import write_whole
    from assay.metrics.classifier import has_labels
    from assay.metrics.evaluate import Evaluation, nearest_picture, with_score
    from assay.metrics.evaluate import evaluate as evaluate_images
    from assay.metrics.generated import Noised, open_candidate

    if tuned:
        sample = read_tuned(generated)
    console = open_console()
    is_sampled = is_model(generated)
    is_labelled = reference is None or reference.suffix == ".npz" or has_labels(open_store(reference))
    if noised:
        if reference is None or reference.suffix == ".npz" or training or nearest:
            raise ValueError(
                "--noised measures the distance from noisy images: give a store with --reference, and leave "
                "out --training and --nearest"
            )
        extractor, fd_only = extractor or ("classifier" if is_labelled else "pixels"), True
    if is_sampled and extractor is None and not is_labelled:
        text = f"{reference} has no labels to train a classifier on: the model is scored on held-out images"
        if held_out is None:
            text += f", here on {reference} itself, which must not be what it was trained on"
        console.print(f"{text}. For a distance, choose an --extractor.", style="yellow")
        reference, held_out = None, held_out or reference
    record = None
    if held_out is not None and is_sampled:
        record = _score(generated, held_out, device, batch_size)
    if reference is None:
        if record is None:
            raise ValueError("give --reference for a distance, or a checkpoint and --held-out for a score")
        _finish(console, with_score(Evaluation(), record, _split_of(record)), output)
        return
    if nearest is not None and training is None and reference.suffix == ".npz":
        raise ValueError("--nearest shows training images: give them as a store with --training")
    with open_progress() as bar:
        network, real = _open_reference(
            bar, reference, extractor or "classifier", weights, cache, device, batch_size, noised
        )
        trained, fresh = (
            None
            if path is None or fd_only
            else _features(bar, open_store(path), network, cache, device, batch_size)
            for path in (training, held_out)
        )
        found = open_candidate(
            generated,
            num_images,
            num_ranges,
            real.statistics.num_images,
            first_seed,
            sample,
            real.frequencies,
            network.device,
        )
        measured = evaluate_images(
            Noised(found.images, real.source.sigma_tn) if noised and real.source else found.images,
            real,
            network,
            found.num_images,
            found.num_ranges,
            infinity,
            trained,
            fresh,
            quantile,
            found.sampler,
            batch_size,
            count(bar, "sampling" if found.sampler else "measuring", found.num_ranges * found.num_images),
            find_devices(device),
            fd_only,
        )
    evaluation = measured.evaluation
    if record is not None:
        evaluation = with_score(evaluation, record, _split_of(record))
    _finish(console, evaluation, output)
    if nearest is not None and measured.neighbours is not None:
        picture = nearest_picture(found.images, trained or real, measured.neighbours)
        with write_whole(nearest) as partial:
            picture.save(partial, format="PNG")
        console.print(f"wrote {nearest}")


@takes_sampling()
def tune(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint (.safetensors), or the folder of a run.")],
    sample: "SampleConfig",
    held_out: Annotated[Path, typer.Option(help="A store of clean images that were not trained on.")],
    extractor: ExtractorOption = "classifier",
    num_images: Annotated[
        int, typer.Option(min=20, help="Samples of each setting in the first round; twice as many in the next.")
    ] = 250,
    weights: Weights = None,
    cache: Cache = DEFAULT_CACHE,
    device: Device = "auto",
    batch_size: BatchSize = 128,
) -> None:
    """Choose the sampler of a checkpoint by the distance of its samples to held-out images.

    Tries Heun's method with several amounts of churn, the multistep solver with several numbers of steps, and
    the settings given here. The choice is stored beside the checkpoint; `--tuned` of `assay sample` and `assay
    evaluate` uses it. Compare models with one sampler, or tune each of them alike.

    Example: `assay tune runs/mix --held-out stores/test`
    """
    from assay.data import open_store
    from assay.devices import find_device
    from assay.metrics.extract import load_extractor
    from assay.metrics.tune import save_tuned
    from assay.metrics.tune import tune as run_tuning

    store, console = open_store(held_out), open_console()
    with open_progress() as bar:
        network = load_extractor(extractor, cache, weights, store, find_device(device))
        found = run_tuning(
            checkpoint, store, network, sample, num_images, network.device, batch_size, advance(bar, "tuning")
        )
    table = Table("solver", "steps", "churn", "truncated", network.metric, "samples")
    for trial in sorted(found.trials, key=lambda trial: (-trial.num_images, trial.fd)):
        tried = trial.sample
        churn = f"{tried.churn:g}" + " in the middle" * (tried.churn_low > 0)
        cut = "" if tried.truncate_at is None else str(tried.truncate_at)
        table.add_row(tried.solver, str(tried.num_steps), churn, cut, f"{trial.fd:.4g}", str(trial.num_images))
    console.print(table)
    path = save_tuned(checkpoint, found)
    console.print(
        f"On fresh seeds and images: {found.fd:.4g} with the chosen sampler, {found.fd_before:.4g} before. "
        f"wrote {path}"
    )


def _score(path: Path, held_out: Path, device: str, batch_size: int) -> "Score":
    from assay.data import open_store
    from assay.devices import find_devices
    from assay.metrics.score import score_checkpoint

    store = open_store(held_out)
    with open_progress() as bar:
        task = count(bar, "scoring", len(store))
        devices = find_devices(device)
        return score_checkpoint(path, store, batch_size=8 * batch_size, devices=devices, progress=task)


def _split_of(record: "Score") -> float | None:
    """The highest noise of the training images, below which only cleaner ones can teach."""
    return max((level for level, _ in record.info.sigma_tn if level > 0), default=None) if record.info else None


def _finish(console: Console, evaluation: "Evaluation", output: Path | None) -> None:
    from assay.metrics.evaluate import save_evaluation

    if evaluation.fd is not None:
        _print_result(console, evaluation)
    if evaluation.score_record is not None:
        _print_score(console, evaluation)
    if output is not None:
        save_evaluation(output, evaluation)
        console.print(f"wrote {output}")


def _print_score(console: Console, found: "Evaluation") -> None:
    record = found.score_record
    assert record is not None
    score, bits, (low, high) = record.nats_per_dim, record.bits_per_dim, record.covers
    console.print(
        f"score {score.value:.4g} ± {score.standard_error:.2g} nats per dimension "
        f"({bits.value:.4g} ± {bits.standard_error:.2g} bits); lower is better",
        style="bold",
    )
    console.print(
        f"denoising error of {len(record.index):,} held-out images of {record.held_out} over noise levels "
        f"{low:.3g} to {high:g}"
    )
    if low > record.config.sigma_min:
        console.print(f"The held-out images are noisy: levels below {low:.3g} are not scored.", style="yellow")
    if split := found.score_split:
        sides = {"below": record.part(high=split), "above": record.part(split)}
        parts = [f"{e.value:.4g} ± {e.standard_error:.2g} {side} {split:.3g}" for side, e in sides.items()]
        known = parts if found.score_below is not None else parts[1:]
        console.print(f"of it {' and '.join(known)}, the highest noise of the training images")


def reference(
    store: Annotated[Path, typer.Argument(help="A store of real images; noisy ones are left out.")],
    output: Annotated[Path, output_option("The npz file to write.", suffix=".npz")],
    extractor: ExtractorOption = "classifier",
    edm_names: Annotated[
        bool, typer.Option("--edm-names", help="Name the arrays mu and sigma, as EDM's tools expect.")
    ] = False,
    weights: Weights = None,
    cache: Cache = DEFAULT_CACHE,
    device: Device = "auto",
    batch_size: BatchSize = 128,
) -> None:
    """Save the feature statistics of a store, so that others can evaluate against it without its images.

    Statistics of the `classifier` can be used only with the classifier in the same cache.

    Example: `assay reference stores/digits -o digits.npz --extractor pixels`
    """
    from assay.metrics.statistics import save_statistics

    with open_progress() as bar:
        network, real = _open_reference(bar, store, extractor, weights, cache, device, batch_size)
    save_statistics(output, replace(real.statistics, image_shape=network.image_shape), edm_names)
    open_console().print(
        f"{output}: {len(real.statistics.mean)} features of {real.statistics.num_images:,} images"
    )


def _open_reference(
    bar: Progress,
    path: Path,
    name: Name,
    weights: Path | None,
    cache: Path,
    device: str,
    batch_size: int,
    noised: bool = False,
) -> "tuple[Extractor, Reference]":
    from assay.data import open_store
    from assay.devices import find_devices
    from assay.metrics.classifier import NUM_IMAGES_SEEN
    from assay.metrics.evaluate import reference_from_statistics
    from assay.metrics.extract import load_extractor

    found = find_devices(device)[0]
    store = None if path.suffix == ".npz" else open_store(path)
    task = count(bar, "training the classifier", NUM_IMAGES_SEEN)
    network = load_extractor(name, cache, weights, path if store is None else store, found, task)
    if store is None:
        return network, reference_from_statistics(path, network)
    return network, _features(bar, store, network, cache, device, batch_size, noised)


def _features(
    bar: Progress,
    store: "Store",
    network: "Extractor",
    cache: Path,
    device: str,
    batch_size: int,
    noised: bool = False,
) -> "Reference":
    from assay.devices import find_devices
    from assay.metrics.evaluate import reference_from_images

    number = int((store.sigma_tn > 0).sum()) if noised else store.meta.num_clean
    task = count(bar, f"features of {store.name}", number)
    return reference_from_images(store, network, cache, batch_size, task, find_devices(device), noised)


def _print_result(console: Console, found: "Evaluation") -> None:
    from assay.metrics.evaluate import titles

    details = found.details
    assert details is not None
    spread = "" if found.fd_std is None else f" ± {found.fd_std:.2g}"
    ranges = f"{len(details.ranges)} x " if len(details.ranges) > 1 else ""
    against = "?" if details.num_reference is None else f"{details.num_reference:,}"
    console.print(f"{found.metric} {found.fd:.4g}{spread}", style="bold")
    console.print(f"{ranges}{found.num_images:,} images against {against} of {details.reference}")
    names = titles(details.ranges)
    table = Table("first", *(names | {"fd": found.metric}).values(), box=None, header_style="bold")
    for part in details.ranges:
        table.add_row(f"{part.first:,}", *(part.cell(name) for name in names))
    console.print(table)
    if details.memorisation is not None:
        console.print(
            f"memorised: {found.memorised:.1%} of the images are as close to a training image as the closest "
            f"{details.memorisation.quantile:.0%} of held-out ones ({details.held_out})"
        )
    if (found.num_images or 0) <= details.num_features:
        console.print(
            f"note: {found.num_images:,} images are few for {details.num_features:,} features; the distance is "
            "mostly bias",
            style="yellow",
        )
