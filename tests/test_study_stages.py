"""The stages of a run, each alone: what it writes, that it resumes, and that nothing is repeated."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from assay.files import hold_lock
from assay.metrics.evaluate import evaluate, save_evaluation
from assay.metrics.extract import load_extractor, reference_from_images
from assay.metrics.generated import sample_checkpoint
from assay.metrics.held_out import losses_by_band, stopping_steps
from assay.pricing.results import read_levels, write_levels
from assay.study.report import write_report
from assay.study.stages import (
    OpenStudy,
    Update,
    Work,
    along_steps,
    compared_steps,
    execute,
    measure_stage,
    read_measures,
    record_stage,
    sample_stage,
    snapshots,
    study_status,
    train_stage,
)
from assay.train.folder import final_path, snapshot_path
from tests.commands import failing, run
from tests.studies import DESIGN, prepared, short


def measured(spec: str) -> str:
    """One short training, measured four times, with 200 held-out images."""
    spec = short(spec).replace('store = "digits"', 'store = "digits"\nheld_out = 200')
    return spec.replace("num_ranges = 2", "num_ranges = 2\nalong = 4")


def status(opened: OpenStudy) -> tuple[str, float]:
    (found,) = study_status(opened.folder)["runs"]
    return found["state"], found["trained"]


def work_of(folder: Path) -> Work:
    opened = prepared(folder, measured)
    return opened.work(opened.runs[0])


def test_each_stage_resumes_and_repeats_nothing(tmp_path: Path) -> None:
    opened = prepared(tmp_path, measured)
    work = opened.work(opened.runs[0])
    assert along_steps(work) == [5, 10, 15, 20]
    assert compared_steps(work) == sorted({*stopping_steps(20), 5, 10, 15, 20})
    steps: list[int] = []
    stopping = replace(work, tell=lambda update: steps.append(update.done), should_stop=lambda: len(steps) >= 7)
    assert not train_stage(stopping) and steps[-1] == 7
    assert status(opened) == ("stopped", 7 / 20)
    with hold_lock(work.run_dir / "run"):
        assert status(opened) == ("training", 7 / 20)
    work.fail("a long reason")
    assert status(opened) == ("failed", 7 / 20)
    lines = run("study", "status", opened.folder).splitlines()
    assert lines[3].split()[-2:] == ["failed", "35%"] and lines[5] == f"failed: {work.run.title}: a long reason"
    work.failure_path.unlink()
    assert train_stage(work) and set(snapshots(work)) == set(compared_steps(work))
    told: list[Update] = []
    assert train_stage(replace(work, tell=told.append)) and not told

    found = measure_stage(work)
    held_out = work.data.open_held_out()
    assert held_out is not None
    again = losses_by_band(snapshots(work), held_out)
    assert found.bands == again.bands() and found.held_out_loss == again.best.nats_per_dim.value
    assert found.held_out_loss_record == again.best
    assert found.held_out_loss == pytest.approx(sum(band.loss for band in found.bands), rel=1e-6)
    assert [point.step for point in found.along] == compared_steps(work)
    assert measure_stage(replace(work, tell=told.append)) == found and not told

    (sample,) = work.run.samples
    sampled = 0

    def count(update: Update) -> None:
        nonlocal sampled
        sampled = update.done

    assert not execute(replace(work, tell=count, should_stop=lambda: sampled > 120))
    ten, five = sorted(work.run_dir.glob("samples-*-*.json"))
    save_evaluation(ten, read_measures(ten).model_copy(update={"fd": 0.0}))  # what is there is taken
    evaluation = sample_stage(work, sample)
    assert [point.fd for point in evaluation.along][:2] == [read_measures(five).fd, 0.0]

    # The same by the library: the result is of the first seeds, a point along training of those after them.
    extractor = load_extractor("pixels", tmp_path)
    reference = reference_from_images(work.data.open(), extractor, tmp_path)
    for path, num_ranges, first_seed, expected in (
        (final_path(work.run_dir), 2, 0, evaluation.fd),
        (snapshot_path(work.run_dir, 15), 1, 120, evaluation.along[2].fd),
    ):
        samples, _ = sample_checkpoint(path, 60 * num_ranges, first_seed, sample, reference.frequencies)
        assert evaluate(samples, reference, extractor, 60, num_ranges).fd == pytest.approx(expected, rel=1e-6)
    record_stage(work, sample, found, evaluation)
    assert execute(replace(work, tell=told.append)) and not told
    outcome_files = list(work.run_dir.glob("outcome-*.json"))
    assert len(outcome_files) == 1


def test_what_was_only_compared_goes_at_the_end(tmp_path: Path) -> None:
    work = work_of(tmp_path)
    theirs = [work.run_dir / name for name in ("state/notes.txt", "restored-by-hand/notes.txt", ".lock")]
    for path in theirs:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    assert execute(work)
    assert [path.name for path in (work.run_dir / "snapshots").iterdir()] == ["final.safetensors"]
    assert list((work.run_dir / "state").iterdir()) == theirs[:1]
    assert all(path.read_text() == "mine" for path in theirs)


def test_results_by_level_are_written_and_read_again(tmp_path: Path) -> None:
    few = DESIGN.replace("num_steps = 120", "num_steps = 8").replace(
        "blocks = 2", "blocks = 2\nladder = [1, 2, 4]"
    )
    opened = prepared(tmp_path, lambda spec: few)
    assert all(execute(opened.work(each)) for each in opened.runs[:3])
    assert opened.to_finish().startswith("3 of 8 runs are finished") and (written := write_report(opened))
    assert written.answer[-1] == f"Nothing to price yet: {opened.to_finish()}"
    assert failing("price", opened.folder).cure == opened.to_finish()
    (levels,) = opened.levels()
    assert levels.num_clean.tolist() == [80, 160, 320] and levels.num_noisy.shape == (3, 0)
    assert levels.edges[0] == pytest.approx(2 / 255) and levels.edges[-1] == pytest.approx(80)
    assert set(levels.step.ravel().tolist()) <= set(stopping_steps(8)) and set(levels.last_step.tolist()) == {8}
    write_levels(tmp_path / "levels.csv", [levels])
    (again,) = read_levels(tmp_path / "levels.csv")
    for name in ("block", "num_clean", "edges", "loss", "error", "step", "loss_last"):
        np.testing.assert_array_equal(getattr(again, name), getattr(levels, name))
    for path in opened.work(opened.runs[0]).run_dir.glob("outcome-*.json"):
        path.unlink()  # measured, but not finished: every number of a report counts it alike
    assert opened.to_finish().startswith("2 of 8 runs") and len(opened.levels()[0].block) == 2
