"""The paper's own studies: their cost without any data, and each run in small, from folders to the table."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from assay.cost import training_evaluations
from assay.data import open_store
from assay.metrics.distance import features_to_statistics, save_statistics
from assay.metrics.extract import images_to_features, load_extractor
from assay.outcome import read_outcomes
from assay.pricing.paper import PAPER_CONFIGURATIONS, PAPER_STUDIES
from assay.study import open_study, read_study
from assay.study.report import _beside_paper, write_report
from assay.study.run import run_local
from assay.study.sizing import study_cost
from assay.study.stages import find_reference
from tests.commands import run

SPECS = Path(__file__).parent.parent / "studies" / "paper"
NAMES = ("cifar10", "celeba", "imagenet")
MODES = ("", "-published")


@pytest.mark.parametrize("name", NAMES)
def test_cost_is_counted_without_the_data(name: str) -> None:
    studies = [read_study(SPECS / f"{name}{mode}.toml") for mode in MODES]
    ours, published = map(study_cost, studies)
    # 6 clean-only and 18 mixed configurations, 3 noise levels with and without consistency, and the extras; the
    # noisy-only models of the two tables share their trainings, and C samples B's model.
    num_extra = {"cifar10": 2, "celeba": 0, "imagenet": 3}[name]
    assert len(ours) == len(published) == 6 + 15 + 6 + num_extra
    millions = {"cifar10": 200, "celeba": 100, "imagenet": 2500}[name]
    assert ours[0].num_trained == pytest.approx(millions * 1e6, rel=1e-5)
    # EDM's networks take about 21, 42 and 104 billion multiply-adds for an image, so twice as many operations.
    per_image = ours[0].flops / (3 * ours[0].num_trained)
    assert 1 < per_image / {"cifar10": 40e9, "celeba": 80e9, "imagenet": 200e9}[name] < 1.3
    # 32 images x (1 + 32 draws x 8 evaluations), all with gradient, beside a batch of 512, 256 or 4096.
    study = studies[1]
    with_it = study.train.model_copy(update={"consistency": study.consistency})
    ratio = training_evaluations(with_it, 0) / training_evaluations(study.train, 0)
    assert ratio == pytest.approx(1 + 32 * 257 / study.train.batch_size)
    assert sum(run.flops for run in published) > sum(run.flops for run in ours)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_the_two_modes_say_what_they_are(name: str, mode: str) -> None:
    study = read_study(SPECS / f"{name}{mode}.toml")
    tables = {extra.table for extra in study.extra}  # by these names their reports find the paper's numbers
    assert study.name == f"paper-{name}{mode}" and f"paper-{name}" in PAPER_STUDIES
    assert name != "imagenet" or tables == PAPER_CONFIGURATIONS.keys()
    assert all(extra.continues for extra in study.extra) or name != "imagenet"
    loss, train, sample = study.consistency, study.train, study.evaluate.sample
    pairing, truncate = ("clamped", "algorithm") if mode else ("image_first", "exact")
    assert (train.pairing, sample.truncate) == (pairing, truncate)
    assert loss.method == ("original_code" if mode else "product")
    assert train.augment.interpolate_noisy == (bool(mode) and name != "imagenet")
    if mode:
        sub_batch = 32 / {"cifar10": 512, "celeba": 256, "imagenet": 4096}[name]
        assert (loss.num_steps, loss.num_samples, loss.sub_batch) == (8, 32, sub_batch)
        assert (train.augment.geometric > 0) == (name != "imagenet")
        kinds = {extra.train.weight_decay_kind for extra in study.extra if extra.train.weight_decay}
        assert kinds <= {"l2_sum"}


def toy_folder(folder: Path, name: str) -> list[str]:
    """A few images laid out like the real data set, and the options that its file gives for packing it."""
    rng = np.random.default_rng(0)
    for number in range(40):
        place = folder / f"n{number % 4:08d}" if name == "imagenet" else folder
        place.mkdir(parents=True, exist_ok=True)
        shape = {"cifar10": (16, 16), "celeba": (24, 24), "imagenet": (20 + number, 25)}[name]
        noise = rng.integers(0, 256, (*shape, 3), dtype=np.uint8)
        Image.fromarray(noise).save(place / f"{number:05d}.png")
    return {"cifar10": [], "celeba": ["--size", "64", "--fit", "resize"]}.get(
        name, ["--size", "64", "--fit", "resize", "--classes"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_the_papers_studies_run_to_the_end_in_small(tmp_path: Path, name: str, mode: str) -> None:
    options, spec = toy_folder(tmp_path / "images", name), SPECS / f"{name}{mode}.toml"
    if options:  # as the file itself says
        assert " ".join(options) in spec.read_text()
    options = ["16" if option == "64" else option for option in options]  # where distances of pixels are quick
    store = tmp_path / "store"
    run("data", "pack", tmp_path / "images", "-o", store, *options)
    source, pixels = open_store(store), load_extractor("pixels", tmp_path)
    features = images_to_features(pixels, source, torch.arange(len(source)))
    statistics = replace(features_to_statistics(features), extractor_sha256=pixels.sha256)
    save_statistics(tmp_path / "reference.npz", statistics)
    settings = [
        "scale=1e-5",
        f"data.store={store}",
        f"evaluate.reference={tmp_path / 'reference.npz'}",
        'evaluate.extractor="pixels"',  # no package carries the weights of Inception
        "evaluate.num_ranges=2",
        "grid.clean_fractions=[1, 0.1, 0]",
        "grid.sigmas=[0.2]",
        "consistency.num_samples=2",
    ]
    if name == "cifar10":
        settings += ["extra.1.clean_fraction=0.05"]  # 1% of 40 images is none
    opened = open_study(spec, tmp_path / "out", settings)
    find_reference(opened.study, opened.data, opened.folder)
    run_local(opened, 1)
    assert not opened.missing()
    assert write_report(opened) is not None
    outcomes = list(read_outcomes(tmp_path / "out" / "results.csv").values())
    # The same table with FID, which needs Inception: every configuration finds the paper's number beside it.
    fid = {"metric": "FID"}
    as_fid = [one.model_copy(update={"evaluation": one.evaluation.model_copy(update=fid)}) for one in outcomes]
    table = _beside_paper(as_fid)
    assert table is not None
    titles = {one.configuration.words(shares=True) for one in outcomes if one.configuration.table != "extreme"}
    assert titles <= {row[0] for row in table.rows}
    if name == "imagenet":
        assert {f"{value:.2f}" for value in PAPER_CONFIGURATIONS.values()} <= {row[2] for row in table.rows}
        continued = [run for run in opened.runs if run.continues is not None]
        first = {run.continues.key for run in continued if run.continues}
        assert len(continued) == 3 and first <= {run.key for run in opened.runs}
    again = open_study(tmp_path / "out" / "study.toml", tmp_path / "out")
    assert [run.key for run in again.runs] == [run.key for run in opened.runs]  # the settings are remembered
