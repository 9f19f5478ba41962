"""Study files: bad ones are rejected before any work, with file and key; good ones give the right runs."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.data import View, open_store, simulate
from assay.data.known import get
from assay.study import OpenStudy, open_study, read_study
from assay.study.spec import level_bins
from tests.errors import rejected
from tests.studies import DESIGN, SPEC, mixes, noise_store

EXTRA = "[[extra]]\nclean_fraction = 0.1\nsigma = 0.3\n"
TWO_EXTRAS = "[[extra]]\nclean_fraction = 0.5\nsigma = 0.2\n[[extra]]\nclean_fraction = 0.5\nsigma = {sigma}\n"


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ('name = "tiny"', 'nmae = "tiny"', "nmae"),
        ('name = "tiny"', 'name = "a/b"', "name"),
        ("sigmas =", "sigma =", "grid.sigma"),
        ("[grid]", "[grid", None),
        ("[grid]\nclean_fractions = [1, 0.1, 0]\nsigmas = [0.5]", "", None),
        ("batch_size", "batchsize", "train.batchsize"),
        ("num_steps = 120", "num_steps = 0", "train.num_steps"),
        ("num_steps = 4", "num_steps = 0", "evaluate.sample.num_steps"),
        ("lr = 2e-3", "seed = 3", "train.seed"),
        ("[1, 0.1, 0]", "[1, 1.5]", "grid.clean_fractions.1"),
        ("[1, 0.1, 0]", "[]", "grid.clean_fractions"),
        ("[1, 0.1, 0]", "[1, 0.0001]", "grid.clean_fractions"),
        ("[0.5]", "[0]", "grid.sigmas.0"),
        ("[0.5]", "[inf]", "grid.sigmas.0"),
        ("[0.5]", "[0.5, 0.5]", "grid.sigmas"),
        ("[0.5]", "[100]", "truncate_at"),
        ("sigmas = [0.5]", "baselines = []", "grid"),
        ("[1, 0.1, 0]\nsigmas = [0.5]", "[0]", "grid"),
        ('"pixels"', '"pixel"', "evaluate.extractor"),
        ("[grid]", TWO_EXTRAS.format(sigma="-1") + "[grid]", "extra.1.sigma"),
        ("[grid]", EXTRA.replace("sigma = 0.3\n", "") + "sampling = 'truncated'\n[grid]", "extra.0"),
        ("[grid]", EXTRA + EXTRA + "train = {lr = 0.1}\n[grid]", "extra"),  # results could not tell them apart
        ('"digits"', '"digits"\nsigma = 0.3', "data.sigma"),
    ],
)
def test_bad_spec_is_rejected_with_file_and_key(old: str, new: str, key: str | None, tmp_path: Path) -> None:
    assert old in SPEC
    path = tmp_path / "bad.toml"
    path.write_text(SPEC.replace(old, new, 1))
    with rejected(key, path):
        open_study(path, tmp_path / "out")
    assert not (tmp_path / "out" / "runs").exists() and not (tmp_path / "out" / "study.toml").exists()


def test_a_folder_of_another_study_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "spec.toml"
    path.write_text(SPEC, encoding="utf-8-sig")  # a byte order mark, as some editors write it
    name = read_study(path).name
    assert open_study(path).folder == Path("out") / name
    path.write_text(SPEC.replace(f'name = "{name}"', 'name = "other"'))
    with rejected(path=f"out/{name}"):
        open_study(path, Path("out") / name)


def opened(
    tmp_path: Path, spec: str, sigma_tn: Sequence[float], name: str = "store", seed: int = 0
) -> OpenStudy:
    """A study of a store with these noise levels."""
    store = tmp_path / name
    if not store.exists():
        noise_store(store, sigma_tn, seed)
    (tmp_path / "spec.toml").write_text(spec.replace('"digits"', f'"{store}"'))
    return open_study(tmp_path / "spec.toml", tmp_path / "out")


CLEAN = [0.0] * 1000


def test_rows_are_the_papers_and_share_trainings(tmp_path: Path) -> None:
    extra = "[[extra]]\nclean_fraction = 0.1\nsigma = 0.2\ntrain = {num_steps = 7}\n"
    grid = "clean_fractions = [1, 0.5, 0]\nsigmas = [0.1, 0.2]\nseeds = [3, 4]"
    study = opened(tmp_path, SPEC.replace("clean_fractions = [1, 0.1, 0]\nsigmas = [0.5]", grid) + extra, CLEAN)
    rows, runs = [way for run in study.runs for way in run.ways], study.runs
    # Of each seed: all clean; 0.5 clean alone and with two noises; noisy alone, for each noise once as the
    # mix of nothing clean and in three ways; and the extra.
    assert len(rows) == 2 * (1 + 3 + 2 * 4 + 1)
    assert len(runs) == 2 * (1 + 3 + 2 * 2 + 1)  # plain and truncated share one, consistency has its own
    assert len({run.key for run in runs}) == len(runs)
    extreme = [run for run in runs if run.ways[0][0].table == "extreme"]
    assert {run.config.train.num_steps for run in extreme} == {7}
    assert {run.config.train.num_steps for run in runs if run not in extreme} == {120}
    assert {run.config.train.batch_size for run in runs} == {64}  # what the extra does not set stays
    for run in runs:
        coefficient = run.config.train.consistency.coefficient
        assert {of.consistency for of, _ in run.ways} == {coefficient > 0}
    assert {sample.truncate_at for setting, sample in rows if setting.sampling == "truncated"} == {0.1, 0.2}
    for run in runs:
        sigma_tn, setting = run.config.data.open().sigma_tn, run.ways[0][0]
        assert (setting.num_clean, setting.num_noisy) == (int((sigma_tn == 0).sum()), int((sigma_tn > 0).sum()))


def test_names_of_runs_depend_on_what_matters_alone(tmp_path: Path) -> None:
    def keys(spec: str, store: str = "here", seed: int = 0) -> list[str]:
        return [run.key for run in opened(tmp_path, spec, CLEAN, store, seed).runs]

    usual = keys(SPEC)
    assert keys(SPEC, "elsewhere") == usual
    assert not set(keys(SPEC, "other images", seed=1)) & set(usual)
    assert keys(SPEC.replace("num_images = 60", "num_images = 80")) == usual  # measured, not trained
    assert not set(keys(SPEC.replace("lr = 2e-3", "lr = 1e-3"))) & set(usual)
    assert set(keys(SPEC.replace("[1, 0.1, 0]", "[1, 0.2, 0]"))) & set(usual) == {usual[i] for i in (0, 3, 4)}
    assert not set(keys(SPEC.replace('"digits"', '"digits"\nheld_out = 50'))) & set(usual)
    # Another store of held-out images changes nothing that is trained on.
    aside = [
        keys(SPEC.replace('"digits"', f'"digits"\nheld_out = "{noise_store(tmp_path / name, [0.0] * 30, 2)}"'))
        for name in ("aside", "beside")
    ]
    assert aside[0] == aside[1]


@pytest.mark.parametrize(
    ("sigma_tn", "words", "num_held_out", "num_left"),
    [
        (CLEAN, "", 100, 900),
        (CLEAN, "held_out = 0", None, 1000),
        (CLEAN, "held_out = 0.3", 300, 700),
        ([0.0] * 120, "", 20, 100),
        ([0.0] * 90, "", None, 90),  # too few to set any aside
        ([0.0] * 300 + [0.5] * 100, "noisy = 0", 40, 260),
    ],
)
def test_images_are_held_out_by_default(
    sigma_tn: list[float], words: str, num_held_out: int | None, num_left: int, tmp_path: Path
) -> None:
    spec = SPEC.replace("clean_fractions = [1, 0.1, 0]\nsigmas = [0.5]", "clean_fractions = [1]")
    study = opened(tmp_path, spec.replace('"digits"', f'"digits"\n{words}'), sigma_tn)
    assert len(study.source) == num_left and len(study.held_out or ()) == (num_held_out or 0)
    if study.held_out is not None:
        assert isinstance(study.held_out, View)
        aside = set(study.held_out.image_number.tolist())
        for run in study.runs:
            trained = run.config.data.open()
            assert isinstance(trained, View) and not set(trained.image_number.tolist()) & aside


def test_held_out_images_of_a_part_of_a_known_data_set_follow_it(tmp_path: Path) -> None:
    path = tmp_path / "spec.toml"
    for number, num_held_out in ((1500, 297), (1790, 179)):  # fewer than 20 follow: a tenth
        path.write_text(SPEC.replace('"digits"', f'"digits"\nnum_images = {number}'))
        study = open_study(path, tmp_path / "out")
        assert study.held_out is not None and len(study.held_out) == num_held_out
        if number == 1500:
            trained = open_store(tmp_path / "out/data/digits-1500")
            assert study.source.fingerprint == trained.fingerprint and len(trained) == 1500
            ten = simulate(trained, 0.1, 1.0, 0, keep_noisy=False)
            assert study.runs[1].config.data.open().fingerprint == ten.fingerprint
            rest = get("digits", tmp_path / "everything").store.read(torch.arange(1500, 1797))
            assert torch.equal(study.held_out.read(torch.arange(297)), rest)


REAL = [0.0] * 200 + [0.1] * 100 + [0.2] * 300


def test_a_design_is_a_ladder_and_mixes_in_nested_blocks(tmp_path: Path) -> None:
    study = opened(tmp_path, DESIGN, CLEAN)
    assert mixes(study, 0) == [(n, ()) for n in (80, 136, 240, 400, 800)] + [(80, ((0.3, 720),))]
    assert mixes(study, 0) == mixes(study, 1) and len(study.runs) == 12 and study.num_blocks == 2
    assert {run.config.train.pairing for run in study.runs} == {"level_first"}
    assert study.held_out is not None
    aside = set(study.held_out.image_number.tolist())
    drawn = []
    for run in study.runs:
        images = run.config.data.open()
        assert isinstance(images, View) and not set(images.image_number.tolist()) & aside
        drawn.append(images)
    for block in (0, 1):
        *ladder, mix = drawn[6 * block : 6 * block + 6]
        sets = [set(each.image_number.tolist()) for each in ladder]
        assert all(small < large for small, large in zip(sets, sets[1:], strict=False))
        assert set(mix.image_number[mix.sigma_tn == 0].tolist()) == sets[0]
        assert set(mix.image_number.tolist()) == sets[-1]
    assert set(drawn[0].image_number.tolist()) != set(drawn[6].image_number.tolist())
    assert {run.config.train.seed for run in study.runs[6:]} == {1}
    more = study.with_blocks(3)
    assert [run.key for run in more.runs[:12]] == [run.key for run in study.runs] and len(more.runs) == 18


def test_a_design_in_grey_steps_is_told(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="level of 38"):
        mixes(opened(tmp_path, DESIGN.replace("noisy = [0.3]", "noisy = [38]"), CLEAN), 0)


def test_a_design_of_real_noise_lies_below_what_is_in_hand(tmp_path: Path) -> None:
    spec = (
        DESIGN.replace("noisy = [0.3]\n", "").replace("have_clean = 80", "have_clean = 30").replace("64", "16")
    )
    study = opened(tmp_path, spec, REAL)  # 160 clean images are left to train on
    assert mixes(study, 1) == [(n, ()) for n in (30, 51, 90, 150)] + [
        (30, ((0.1, 100),)),
        (30, ((0.2, 120),)),
    ]
    levels = np.geomspace(0.05, 0.8, 300).round(4).tolist()
    many = mixes(opened(tmp_path, spec, [0.0] * 200 + levels, "many"), 0)[4:]
    middle = [float(np.exp(np.log(levels[i : i + 100]).mean())) for i in (0, 100, 200)]
    assert [noisy[0][0] for _, noisy in many] == pytest.approx(middle, rel=0.01)
    assert [noisy[0][1] for _, noisy in many] == [100, 100, 100]


@settings(deadline=None)
@given(st.lists(st.floats(0.015625, 2, width=32), max_size=40), st.integers(1, 5))
def test_bins_cover_every_noisy_image_once(levels: list[float], max_bins: int) -> None:
    sigma_tn = torch.tensor([0.0, *levels])
    bins = level_bins(sigma_tn, max_bins)
    assert len(bins) <= max_bins and list(bins) == sorted(bins)
    inside = [(sigma_tn >= torch.tensor(low)) & (sigma_tn <= torch.tensor(high)) for low, high in bins]
    assert bins == [] if not levels else torch.stack(inside).sum(0).tolist() == [0] + [1] * len(levels)


@pytest.mark.parametrize(
    ("spec", "sigma_tn", "key"),
    [
        (SPEC, REAL, "grid.sigmas"),
        (DESIGN, REAL, "design.noisy"),
        (DESIGN.replace("noisy = [0.3]\n", ""), CLEAN, "design.noisy"),
        (DESIGN.replace("have_clean = 80", "have_clean = 500"), CLEAN, "design.have_clean"),
        (DESIGN + "num_noisy = 2000\n", CLEAN, "design.num_noisy"),
        (DESIGN + "mixes = [1, 1]\n", CLEAN, "design.mixes"),
        (DESIGN, CLEAN[:60], "data.held_out"),
    ],
)
def test_designs_that_the_images_cannot_give_are_rejected(
    spec: str, sigma_tn: list[float], key: str, tmp_path: Path
) -> None:
    with rejected(key, tmp_path / "spec.toml"):
        opened(tmp_path, spec, sigma_tn)
