"""A study file that suits a store and the time: its ladder, mixes and steps; and what cannot be studied."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import pytest

from assay.nets import MLPConfig
from assay.study import OpenStudy, open_study, sizing
from assay.study.sizing import draft_study
from tests.commands import failing, run
from tests.errors import rejected
from tests.studies import mixes, noise_store


def drafted(tmp_path: Path, seconds: float, monkeypatch: pytest.MonkeyPatch, **options: object) -> OpenStudy:
    """The study drafted for a store, where an image of training takes `seconds`."""
    per_evaluation = seconds / sizing.WITH_GRADIENT
    monkeypatch.setattr(sizing, "seconds_per_evaluation", lambda *arguments, **options: per_evaluation)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    text = draft_study(tmp_path / "store", **options)  # type: ignore[arg-type]
    (tmp_path / "study.toml").write_text(text)
    return open_study(tmp_path / "study.toml", tmp_path / "out")


def test_what_is_in_hand_and_could_be_bought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noise_store(tmp_path / "store", [0.0] * 5000)  # 500 are held out
    study = drafted(tmp_path, 1e-5, monkeypatch, have_clean=400, noisy=(0.1, 0.2))
    assert mixes(study) == [(n, ()) for n in (400, 680, 1200, 2000, 4000)] + [
        (400, ((level, 3600),)) for level in (0.1, 0.2)
    ]
    assert study.num_blocks == 3 and study.study.evaluate.num_images == 0
    text = (tmp_path / "study.toml").read_text()
    assert 'pairing = "level_first"' in text and "left out" not in text and "too few" not in text
    assert mixes(drafted(tmp_path, 1e-5, monkeypatch))[0][0] == 450  # a tenth, if nothing is said


def test_little_time_trains_on_fewer_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noise_store(tmp_path / "store", [0.0] * 5000)
    study = drafted(tmp_path, 5e-3, monkeypatch, have_clean=400, noisy=(0.2,), minutes=30)
    ladder = [clean for clean, noisy in mixes(study) if not noisy]
    train = study.study.train
    num_trained = train.num_steps * train.batch_size
    assert num_trained + train.batch_size >= 100 * ladder[-1] and ladder[0] < 400
    assert ladder[-1] == pytest.approx(10 * ladder[0], rel=0.02)  # sizes stay far apart
    seconds = 5e-3 * num_trained * len(study.runs)
    assert 0.5 * 3600 < seconds <= 3600  # of two workers; the rest measures
    alone = drafted(tmp_path, 5e-3, monkeypatch, have_clean=400, noisy=(0.2,), minutes=60, num_workers=1)
    assert alone.study.train.num_steps == train.num_steps and mixes(alone) == mixes(study)
    assert "minutes with 1 worker." in (tmp_path / "study.toml").read_text()
    assert "stand for them" in (tmp_path / "study.toml").read_text().replace("\n# ", " ")


@pytest.mark.parametrize(
    ("have_clean", "seconds", "ladder", "words"),
    [(400, 0.05, (1, 3, 10), "1.7 and 5 are left out"), (900, 1e-5, (1, 1.7, 3, 5), "too few clean images")],
)
def test_a_short_ladder_is_explained(
    have_clean: int, seconds: float, ladder: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise_store(tmp_path / "store", [0.0] * 5000)
    with pytest.warns(UserWarning, match="too few for a price") if seconds > 0.01 else nullcontext():
        study = drafted(tmp_path, seconds, monkeypatch, have_clean=have_clean)
    text, train = (tmp_path / "study.toml").read_text(), study.study.train
    epochs = round(train.num_steps * train.batch_size / max(clean for clean, _ in mixes(study)))
    assert (epochs < 100) == (seconds > 0.01) and f"({epochs} epochs of the largest size)" in text
    assert ("1.7 and 5" not in text) or f"for {epochs} epochs in this time" in text
    assert study.study.design is not None and study.study.design.ladder == ladder
    assert words in text


class NarrowConfig(MLPConfig):
    kind: Literal["narrow"] = "narrow"  # type: ignore[assignment]
    width: int = 16


def test_a_network_by_preset_kind_or_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noise_store(tmp_path / "store", [0.0] * 500)
    for net, found in (
        ("dit-small", {"preset": "dit-small"}),
        ("narrow", {"kind": "narrow"}),
        (NarrowConfig, {"kind": "narrow"}),
    ):
        assert drafted(tmp_path, 1e-5, monkeypatch, net=net).runs[0].config.net == found


@pytest.mark.parametrize(
    ("sigma", "options", "key"),
    [
        ([0.0] * 50, {}, None),
        ([0.5] * 500, {}, "store"),
        ([0.0] * 500 + [0.5] * 500, {"noisy": (0.2,)}, "noisy"),
        ([0.0] * 500, {"minutes": 0}, "minutes"),
        ([0.0] * 500, {"noisy": (0.2, 80.0)}, "noisy"),
        ([0.0] * 500, {"net": "narow"}, "net"),
        ([0.0] * 500, {"net": 3}, "net"),
        ([0.0] * 500, {"have_clean": 200}, "have_clean"),  # a ladder of three sizes needs images above those
    ],
)
def test_what_cannot_be_priced_is_rejected(
    sigma: list[float], options: dict[str, Any], key: str | None, tmp_path: Path
) -> None:
    store = noise_store(tmp_path / "store", sigma)
    with rejected(key):
        draft_study(store, **options)


def test_the_command_writes_the_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    noise_store(tmp_path / "store", [0.0] * 600)
    said = run("study", "init", "store", "--have-clean", 60, "--noisy", 0.2, "--minutes", 0.001)
    assert "540 clean images" in said and "assay study run study.toml" in said
    assert "minutes here, not 0.001" in " ".join(said.split())
    assert failing("study", "init", "store").path == "study.toml"
    assert open_study("study.toml").study.design is not None
