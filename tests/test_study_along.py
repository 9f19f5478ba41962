"""Models measured along their training, and the best snapshot as the result."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from assay.metrics import evaluate, load_extractor, reference_from_images
from assay.metrics.generated import sample_checkpoint
from assay.study import read_study
from assay.study.arms import hash_tree
from assay.study.report import write_report
from assay.study.run import Update, along_steps, execute, run_path
from assay.train.run import final_path, snapshot_path
from tests.studies import SPEC, prepared


def test_steps_are_evenly_spaced_and_end_with_the_last() -> None:
    assert along_steps(20, 4) == [5, 10, 15, 20]
    assert along_steps(3, 8) == [1, 2, 3]
    assert along_steps(20, 0) == []


def measured(spec: str) -> str:
    """One short training, measured four times, with 200 held-out images."""
    spec = spec.replace("[1, 0.1, 0]", "[1]").replace("num_steps = 120", "num_steps = 20")
    spec = spec.replace('store = "digits"', 'store = "digits"\nheld_out = 200')
    return spec.replace("num_ranges = 2", 'num_ranges = 2\nalong = 4\nresult = "best_fd"')


def test_the_best_snapshot_is_the_result_and_what_was_measured_is_kept(tmp_path: Path) -> None:
    opened = prepared(tmp_path, measured)
    (job,) = opened.jobs
    run_dir = run_path(opened.folder, job)
    sampled = 0

    def stop_after_two(update: Update) -> None:
        nonlocal sampled
        sampled = update.done if update.phase == "sampling" else 0

    arguments = opened.study, opened.folder, opened.data, job
    assert not execute(*arguments, stop_after_two, lambda: sampled > 120)
    (kept,) = run_dir.glob("along-*.json")
    found = json.loads(kept.read_text())
    assert list(found) == ["5", "10"]
    kept.write_text(json.dumps(found | {"10": 0.0}))  # as if it had been the best
    assert execute(*arguments)
    ((arm, outcome),) = opened.outcomes()
    evaluation = outcome.evaluation
    by_step = {point.step: point for point in evaluation.along}
    assert {5, 10, 15, 20} < by_step.keys()  # and the steps at which stopping was compared
    assert [by_step[step].fd for step in (5, 10)] == [found["5"], 0.0]
    assert all(point.score is not None for point in by_step.values()) and by_step[3].fd is None
    assert evaluation.fd_step == 10 and {path.stem for path in (run_dir / "snapshots").iterdir()} >= {
        "000000010"
    }

    # The same by the commands: the result is of the snapshot's first seeds, a point of those after them.
    extractor = load_extractor("pixels", tmp_path)
    reference = reference_from_images(opened.source, extractor, tmp_path)
    for path, num_images, num_ranges, first_seed, expected in (
        (snapshot_path(run_dir, 10), 60, 2, 0, evaluation.fd),
        (final_path(run_dir), 60, 1, 120, by_step[20].fd),
    ):
        samples, _ = sample_checkpoint(
            path, num_images * num_ranges, first_seed, arm.sample, reference.frequencies
        )
        again = evaluate(samples, reference, extractor, num_images, num_ranges).evaluation
        assert again.fd == pytest.approx(expected, rel=1e-6)

    report = write_report(opened)
    assert report is not None
    with open(opened.folder / "training.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["fd"]]
    assert [int(row["step"]) for row in rows] == [5, 10, 15, 20] and all(row["score"] for row in rows)
    figures = {path.stem for path in (opened.folder / "figures").iterdir()}
    assert {"fd_by_step", "score-score_by_step"} <= figures


def test_results_without_it_keep_their_names(tmp_path: Path) -> None:
    job = prepared(tmp_path).jobs[0]
    (sample,) = job.samples
    protocol = job.evaluate.model_dump(
        mode="json", include={"extractor", "reference", "num_images", "num_ranges"}
    )
    assert job.result_key(sample) == hash_tree(
        [job.key, sample.model_dump(mode="json"), protocol, job.held_out_fingerprint]
    )
    for change in ({"along": 3}, {"result": "best_score"}):
        other = replace(job, evaluate=job.evaluate.model_copy(update=change))
        assert other.key == job.key and other.result_key(sample) != job.result_key(sample)


def test_best_needs_something_to_choose_from(tmp_path: Path) -> None:
    for change, message in (
        ('result = "best_fd"', "set evaluate.along"),
        ("along = -1", "greater than or equal to 0"),
    ):
        (tmp_path / "spec.toml").write_text(SPEC.replace("[evaluate]", f"[evaluate]\n{change}"))
        with pytest.raises(ValueError, match=message):
            read_study(tmp_path / "spec.toml")
    with pytest.raises(ValueError, match="best_score needs more held-out images"):
        prepared(
            tmp_path,
            lambda s: s.replace("[evaluate]", '[evaluate]\nresult = "best_score"').replace(
                '"digits"', '"digits"\nheld_out = 0'
            ),
        )
