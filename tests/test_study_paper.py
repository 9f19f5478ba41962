"""The paper's own studies: their cost without any data, and all three run to the end at toy size."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from assay.data import open_store
from assay.data.known import get
from assay.metrics.extract import images_to_features, load_extractor
from assay.metrics.statistics import features_to_statistics, save_statistics
from assay.pricing.table import PAPER_CONFIGURATIONS, PAPER_STUDIES
from assay.sample import SampleConfig
from assay.study import open_study, read_study
from assay.study.cost import num_evaluations, study_cost
from assay.study.pool import run_local
from assay.study.report import write_report
from assay.study.run import prepare_shared

SPECS = Path(__file__).parent.parent / "studies" / "paper"
NAMES = ("cifar10", "celeba", "imagenet")


@pytest.mark.parametrize("name", NAMES)
def test_cost_is_counted_without_the_data(name: str) -> None:
    cost = study_cost(read_study(SPECS / f"{name}.toml"))
    # 6 clean-only and 18 mixed settings, 3 noise levels with and without consistency, and the extras; the
    # noisy-only models of the two tables share their trainings, and C samples B's model.
    num_extra = {"cifar10": 2, "celeba": 0, "imagenet": 3}[name]
    assert len(cost.jobs) == 6 + 15 + 6 + num_extra
    millions = {"cifar10": 200, "celeba": 100, "imagenet": 2500}[name]
    assert cost.jobs[0].num_trained == pytest.approx(millions * 1e6, rel=1e-5)
    assert any("fid-refs" in sentence for sentence in cost.missing)
    study = read_study(SPECS / f"{name}.toml")
    tables = {extra.table for extra in study.extra}  # by these names their reports find the paper's numbers
    assert study.name in PAPER_STUDIES and (name != "imagenet" or tables == PAPER_CONFIGURATIONS.keys())
    # EDM's networks take about 21, 42 and 104 billion multiply-adds for an image, so twice as many operations.
    per_image = cost.jobs[0].flops / (3 * cost.jobs[0].num_trained)
    assert 1 < per_image / {"cifar10": 40e9, "celeba": 80e9, "imagenet": 200e9}[name] < 1.3
    assert cost.hours(60e12) == pytest.approx(cost.flops / 60e12 / 3600)


def test_evaluations_are_counted_as_the_sampler_makes_them() -> None:
    for config in (SampleConfig(), SampleConfig(num_steps=5, solver="euler"), SampleConfig(truncate_at=0.2)):
        calls = 0

        def denoiser(x: torch.Tensor, sigma: torch.Tensor, label: object = None) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return x * 0

        list(config.generate(denoiser, [0], (1, 2, 2)))
        assert calls == num_evaluations(config)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_papers_studies_run_to_the_end_at_toy_size(tmp_path: Path, name: str) -> None:
    store = tmp_path / "store"
    get("digits", store)
    source = open_store(store)
    pixels = load_extractor("pixels", tmp_path)
    features = images_to_features(pixels, source, torch.arange(len(source))).features
    statistics = replace(features_to_statistics(features), extractor_sha256=pixels.sha256)
    save_statistics(tmp_path / "reference.npz", statistics)
    settings = [
        f"data.store={store}",
        f"evaluate.reference={tmp_path / 'reference.npz'}",
        'evaluate.extractor="pixels"',
        "evaluate.num_images=20",
        "evaluate.num_ranges=2",
        f"evaluate.along={2 if name == 'cifar10' else 0}",
        "evaluate.sample.num_steps=4",
        'net.preset="mlp"',
        "net.width=16",
        "net.num_blocks=1",
        'train.precision="32"',
        "train.num_steps=2",
        "train.batch_size=16",
        "grid.clean_fractions=[1, 0.1, 0]",
        "grid.sigmas=[0.2]",
    ]
    num_extra = {"cifar10": 2, "celeba": 0, "imagenet": 4}[name]
    settings += [f"extra.{number}.train.num_steps=2" for number in range(num_extra)]
    opened = open_study(SPECS / f"{name}.toml", tmp_path / "out", settings)
    assert all(job.config.train.num_steps == 2 for job in opened.jobs)
    prepare_shared(opened)
    run_local(opened, 1)
    assert all(opened.is_finished(job) for job in opened.jobs)
    report = write_report(opened)
    assert report is not None and "100% clean" in report.path.read_text()
    again = open_study(tmp_path / "out" / "study.toml", tmp_path / "out")
    assert [job.key for job in again.jobs] == [job.key for job in opened.jobs]  # the settings are remembered
