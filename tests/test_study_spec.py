"""Study files: bad ones are refused before any work, with line and cure; good ones give the paper's rows."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.data import View, open_store, simulate
from assay.data.known import get
from assay.data.store import PackedImage, write_store
from assay.study import OpenStudy, open_study, read_study
from assay.study.arms import level_bins
from tests.studies import SPEC

EXTRA = "[[extra]]\nclean_fraction = 0.1\nsigma = 0.3\n"
TWO_EXTRAS = "[[extra]]\nclean_fraction = 0.5\nsigma = 0.2\n[[extra]]\nclean_fraction = 0.5\nsigma = {sigma}\n"


def line_of(text: str, start: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if line.startswith(start))


@pytest.mark.parametrize(
    ("old", "new", "at", "cure"),
    [
        ('name = "tiny"', 'nmae = "tiny"', "nmae", "nmae is not a setting; did you mean name?"),
        ("sigmas =", "sigma =", "sigma =", "grid.sigma is not a setting; did you mean sigmas?"),
        ("[grid]", "[gird]", "[gird]", "gird is not a setting; did you mean grid?"),
        ("batch_size", "batchsize", "batchsize", "train.batchsize is not a setting; did you mean batch_size?"),
        ("width", "widht", "widht", "net.widht is not a setting; did you mean width?"),
        (
            "num_steps = 120",
            "num_steps = 0",
            "num_steps = 0",
            "train.num_steps: input should be greater",
        ),
        (
            "num_steps = 4",
            "num_steps = 0",
            "num_steps = 0",
            "evaluate.sample.num_steps: input should be",
        ),
        ("lr = 2e-3", "seed = 3", "seed", "train.seed is decided by grid.seeds: leave it out"),
        ("[1, 0.1, 0]", "[1, 1.5]", "clean_fractions", "has 1.5; a fraction"),
        ("[1, 0.1, 0]", "[1, -0.1]", "clean_fractions", "has -0.1; a fraction"),
        ("[1, 0.1, 0]", "[1, 0.1, 0.1]", "clean_fractions", "grid.clean_fractions names a value twice"),
        ("[1, 0.1, 0]", "[]", "clean_fractions", "should have at least 1 item"),
        ("[1, 0.1, 0]", "[1, 0.0001]", "clean_fractions", "is none; use a larger fraction"),
        (
            "[1, 0.1, 0]",
            "[1, 0.01]",
            "batch_size",
            "16 images are fewer than train.batch_size = 64; lower it",
        ),
        ("[0.5]", "[0]", "sigmas", "grid.sigmas has 0; a noise level is > 0"),
        ("[0.5]", "[-0.5]", "sigmas", "grid.sigmas has -0.5; a noise level is > 0"),
        ("[0.5]", "[inf]", "sigmas", "grid.sigmas has inf; a noise level is > 0"),
        ("sigmas = [0.5]", "baselines = []", "[grid]", "grid.sigmas is empty: give the noise levels"),
        ("[1, 0.1, 0]\nsigmas = [0.5]", "[0]", "[grid]", "grid.sigmas is empty: give the noise levels"),
        ('"digits"', '"digitz"', "store", "is neither a store here nor one of digits, fashion-mnist, cifar10"),
        (
            '"digits"',
            '"digits"\nnum_images = 5000',
            "store",
            "5000 images requested from digits, which has 1797",
        ),
        ('"digits"', '"digits"\nclasses = ["ten"]', "store", "digits has no class 'ten'; it has 0, 1, 2"),
        (
            '"digits"',
            '"."\nsize = 4',
            "size",
            "data.store is a store of yours or a list: pack the images you want",
        ),
        ('"pixels"', '"pixel"', "extractor", "'classifier' or 'pixels' (got 'pixel')"),
        (
            "[grid]",
            TWO_EXTRAS.format(sigma="-1") + "[grid]",
            "sigma = -1",
            "extra.1.sigma: input should be greater",
        ),
        ("[1, 0.1, 0]\nsigmas = [0.5]", "[1, 0.1, 0]", "[grid]", "grid.sigmas is empty: give the noise levels"),
        ("[grid]", EXTRA + "seeds = []\n[grid]", "seeds = []", "extra.0.seeds: tuple should have at least 1"),
        ("[grid]", EXTRA + "train = {seed = 3}\n[grid]", "train = {", "extra.0.train: its seed is decided"),
        (
            "[grid]",
            EXTRA + "noisy = false\nsampling = 'truncated'\n[grid]",
            "[[extra]]",
            "are for noisy images",
        ),
    ],
)
def test_bad_spec_is_refused_with_line_and_cure(old: str, new: str, at: str, cure: str, tmp_path: Path) -> None:
    assert old in SPEC
    text = SPEC.replace(old, new, 1)
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        open_study(path, tmp_path / "out")
    assert str(caught.value).startswith(f"{path}: ")
    assert f"line {line_of(text, at)}: " in str(caught.value) and cure in str(caught.value)
    assert not (tmp_path / "out" / "runs").exists() and not (tmp_path / "out" / "study.toml").exists()


def test_settings_that_the_results_could_not_tell_apart_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(SPEC + EXTRA + EXTRA + "train = {lr = 0.1}\n")
    with pytest.raises(ValueError, match=r"two settings are called 'extreme: 10% clean .* another table"):
        open_study(path, tmp_path / "out")
    path.write_text(SPEC + EXTRA + EXTRA)  # the same setting twice is one line
    assert len(open_study(path, tmp_path / "out").jobs) == 6


def test_a_folder_of_another_study_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "spec.toml"
    path.write_text(SPEC)
    name = read_study(path).name
    assert open_study(path).folder == Path("out") / name
    path.write_text(SPEC.replace(f'name = "{name}"', 'name = "other"'))
    with pytest.raises(ValueError, match=f"holds the study '{name}', not 'other': choose another folder"):
        open_study(path, Path("out") / name)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (SPEC.replace("[grid]", "[grid").encode(), f"at line {line_of(SPEC, '[grid]')}, column"),
        (b'name = "\xff"\n', "can't decode byte 0xff in position 8"),
        (SPEC[: SPEC.index("[grid]")].encode(), "grid: field required"),
        (SPEC.replace('"mlp"', '"mpl"').encode(), "no network preset is called 'mpl'; there are"),
        (
            SPEC.replace("[0.5]", "[100]").encode(),
            "100% noisy at 100, truncated sampling (seed 0) cannot be sampled: truncate_at = 100",
        ),
        (
            SPEC.encode() + b"[[extra]]\nclean_fraction = 0.5\n",
            "extra.0.sigma is missing: give the noise level",
        ),
    ],
)
def test_unreadable_or_incomplete_files_are_refused(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        open_study(path, tmp_path / "out")
    assert str(caught.value).startswith(str(path)) and said in str(caught.value)


def make_store(path: Path, sigma_tn: Sequence[float], seed: int = 0) -> Path:
    pixels = np.random.default_rng(seed).uniform(-1, 1, (len(sigma_tn), 1, 8, 8)).astype(np.float32)
    images = (PackedImage(str(i), pixels[i], sigma, -1) for i, sigma in enumerate(sigma_tn))
    write_store(path, path.name, images, (1, 8, 8), "float32", (-1, 1), ())
    return path


def opened(
    tmp_path: Path, spec: str, sigma_tn: Sequence[float], name: str = "store", seed: int = 0
) -> OpenStudy:
    """A study of a store with these noise levels."""
    store = tmp_path / name
    if not store.exists():
        make_store(store, sigma_tn, seed)
    (tmp_path / "spec.toml").write_text(spec.replace('"digits"', f'"{store}"'))
    return open_study(tmp_path / "spec.toml", tmp_path / "out")


CLEAN = [0.0] * 1000


def test_rows_are_the_papers_and_share_trainings(tmp_path: Path) -> None:
    extra = "[[extra]]\nclean_fraction = 0.1\nsigma = 0.2\ntrain = {num_steps = 7}\n"
    grid = "clean_fractions = [1, 0.5, 0]\nsigmas = [0.1, 0.2]\nseeds = [3, 4]"
    study = opened(tmp_path, SPEC.replace("clean_fractions = [1, 0.1, 0]\nsigmas = [0.5]", grid) + extra, CLEAN)
    arms, jobs = study.arms, study.jobs
    # Of each seed: all clean; 0.5 clean alone and with two noises; noisy alone, for each noise once as the
    # mix of nothing clean and in three ways; and the extra.
    assert len(arms) == 2 * (1 + 3 + 2 * 4 + 1)
    assert len(jobs) == 2 * (1 + 3 + 2 * 2 + 1)  # plain and truncated share one, consistency has its own
    assert len({job.key for job in jobs}) == len(jobs)
    assert {arm.config.train.num_steps for arm in arms if arm.setting.table == "extreme"} == {7}
    assert {arm.config.train.num_steps for arm in arms if arm.setting.table != "extreme"} == {120}
    assert {arm.config.train.batch_size for arm in arms} == {64}  # what the extra does not set stays
    assert all((arm.config.train.consistency.coefficient > 0) == arm.setting.consistency for arm in arms)
    assert {arm.sample.truncate_at for arm in arms if arm.setting.sampling == "truncated"} == {0.1, 0.2}


def test_names_of_jobs_depend_on_what_matters_alone(tmp_path: Path) -> None:
    def keys(spec: str, store: str = "here", seed: int = 0) -> list[str]:
        return [job.key for job in opened(tmp_path, spec, CLEAN, store, seed).jobs]

    usual = keys(SPEC)
    assert keys(SPEC, "elsewhere") == usual
    assert not set(keys(SPEC, "other images", seed=1)) & set(usual)
    assert keys(SPEC.replace("num_images = 60", "num_images = 80")) == usual  # measured, not trained
    assert not set(keys(SPEC.replace("lr = 2e-3", "lr = 1e-3"))) & set(usual)
    assert set(keys(SPEC.replace("[1, 0.1, 0]", "[1, 0.2, 0]"))) & set(usual) == {usual[i] for i in (0, 3, 4)}
    assert not set(keys(SPEC.replace('"digits"', '"digits"\nheld_out = 50'))) & set(usual)
    # Another store of held-out images changes nothing that is trained on.
    aside = [
        keys(SPEC.replace('"digits"', f'"digits"\nheld_out = "{make_store(tmp_path / name, [0.0] * 30, 2)}"'))
        for name in ("aside", "beside")
    ]
    assert aside[0] == aside[1]


@pytest.mark.parametrize(
    ("sigma_tn", "words", "num_held_out", "num_left"),
    [
        (CLEAN, "", 100, 900),
        (CLEAN, "held_out = 0", None, 1000),
        (CLEAN, "held_out = 0.3", 300, 700),
        ([0.0] * 120 + [0.5] * 80, "", 20, 180),
        ([0.0] * 90 + [0.5] * 10, "", None, 100),  # too few to set any aside
        ([0.5] * 300, "", 40, 260),
        ([0.0] * 300 + [0.5] * 100, "noisy = 0", 40, 260),
    ],
)
def test_images_are_held_out_by_default(
    sigma_tn: list[float], words: str, num_held_out: int | None, num_left: int, tmp_path: Path
) -> None:
    path = tmp_path / "spec.toml"
    grid = "clean_fractions = [0]" if 0 not in sigma_tn else "clean_fractions = [1]"
    spec = SPEC.replace("clean_fractions = [1, 0.1, 0]\nsigmas = [0.5]", grid)
    path.write_text(spec.replace('"digits"', f'"{make_store(tmp_path / "store", sigma_tn)}"\n{words}'))
    study = open_study(path, tmp_path / "out")
    assert (
        len(study.source) == num_left
        and (None if study.held_out is None else len(study.held_out)) == num_held_out
    )
    if study.held_out is not None:
        assert isinstance(study.held_out, View)
        aside = set(study.held_out.image_number.tolist())
        for arm in study.arms:
            trained = arm.config.data.open()
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
            assert study.arms[1].config.data.open().fingerprint == ten.fingerprint
            rest = get("digits", tmp_path / "everything").store.read(torch.arange(1500, 1797))
            assert torch.equal(study.held_out.read(torch.arange(297)), rest)


REAL = [0.0] * 200 + [0.1] * 100 + [0.2] * 300
REAL_GRID = "clean_fractions = [1, 0.4, 0]"


def real_spec(grid: str = REAL_GRID, extra: str = "") -> str:
    return SPEC.replace("clean_fractions = [1, 0.1, 0]\nsigmas = [0.5]", grid) + extra


def test_a_store_with_noisy_images_gives_the_same_rows(tmp_path: Path) -> None:
    study = opened(tmp_path, real_spec(REAL_GRID + "\nnoisy_fractions = [1, 0.5]").replace("64", "8"), REAL)
    assert study.held_out is not None and len(study.held_out) == 40 and len(study.source) == 560
    full = {
        (arm.setting.num_clean, arm.setting.noisy)
        for arm in study.arms
        if arm.setting.table == "clean_mix" and arm.setting.sampling == "full"
    }
    # 160 clean images are left, 40 % of them are 64; noisy ones together and by level, all and half of them.
    noisy = [((0.1, 100), (0.2, 300)), ((0.1, 100),), ((0.2, 300),), ((0.1, 50),), ((0.2, 150),)]
    for num_clean in (160, 64, 0):
        assert {(num_clean, each) for each in noisy} <= full
        half = [each for number, each in full if number == num_clean and len(each) == 2 and each != noisy[0]]
        assert len(half) == 1 and sum(number for _, number in half[0]) == 200
    assert {(160, ()), (64, ())} <= full and len(full) == 3 * 6 + 2
    for arm in study.arms:
        images = arm.config.data.open()
        assert (arm.setting.num_clean, arm.setting.num_noisy) == (
            int((images.sigma_tn == 0).sum()),
            int((images.sigma_tn > 0).sum()),
        )
        assert arm.setting.counted and arm.config.train.batch_size <= len(images)
    only = [arm for arm in study.arms if arm.setting.table == "only_noisy"]
    assert len(only) == 6 * 3 and sum(arm.setting.consistency for arm in only) == 6
    truncated = [arm for arm in only if arm.setting.sampling == "truncated"]
    assert sorted(arm.sample.truncate_at or 0 for arm in truncated) == [0.1] * 4 + [0.2] * 2
    assert len({job.key for job in study.jobs}) == len(study.jobs) == 3 * 6 + 2 + 6


def test_many_levels_are_binned(tmp_path: Path) -> None:
    levels = np.geomspace(0.05, 0.8, 300).round(4).tolist()
    study = opened(tmp_path, real_spec("clean_fractions = [1]\nbaselines = []"), [0.0] * 200 + levels)
    noisy = [arm.setting.noisy for arm in study.arms if arm.setting.noisy]
    assert [len(each) for each in noisy] == [3, 1, 1, 1] and noisy[0] == tuple(each[0] for each in noisy[1:])
    assert [number for _, number in noisy[0]] == [100, 100, 100]
    middle = [float(np.exp(np.log(levels[i : i + 100]).mean())) for i in (0, 100, 200)]
    assert [level for level, _ in noisy[0]] == pytest.approx(middle, rel=0.01)
    own = opened(
        tmp_path, real_spec("clean_fractions = [1]\nbaselines = []\nlevels = [[0.05, 0.1], [0.4, 2]]"), []
    )
    noisy = [arm.setting.noisy for arm in own.arms if arm.setting.noisy]
    assert [sum(number for _, number in each) for each in noisy] == [
        sum(0.05 <= level <= 0.1 for level in levels),
        sum(0.4 <= level <= 2 for level in levels),
    ]


@settings(deadline=None)
@given(st.lists(st.floats(0.015625, 2, width=32), max_size=40), st.integers(1, 5))
def test_bins_cover_every_noisy_image_once(levels: list[float], max_bins: int) -> None:
    sigma_tn = torch.tensor([0.0, *levels])
    bins = level_bins(sigma_tn, max_bins)
    assert len(bins) <= max_bins and list(bins) == sorted(bins)
    inside = [(sigma_tn >= torch.tensor(low)) & (sigma_tn <= torch.tensor(high)) for low, high in bins]
    assert bins == () if not levels else torch.stack(inside).sum(0).tolist() == [0] + [1] * len(levels)


@pytest.mark.parametrize(
    ("spec", "sigma_tn", "at", "cure"),
    [
        (SPEC, REAL, "sigmas", "400 of the 560 images of store are noisy already: leave grid.sigmas out"),
        (real_spec(REAL_GRID + "\nlevels = [[0.3, 0.4]]"), REAL, "levels", "no image of store has such noise"),
        (real_spec(REAL_GRID + "\nlevels = [[0.4, 0.3]]"), REAL, "levels", "the lowest level and the highest"),
        (real_spec(REAL_GRID + "\nlevels = [[0.1, 0.2]]"), CLEAN, "levels", "are for real noise"),
        (real_spec("clean_fractions = [1]\nnoisy_fractions = [0.5]"), CLEAN, "[grid]", "are for real noise"),
        (real_spec(REAL_GRID + "\nnoisy_fractions = [0]"), REAL, "noisy_fractions", "is > 0 and <= 1"),
        (
            real_spec("clean_fractions = [1, 0.001]"),
            REAL,
            "clean_fractions",
            "0.001 of 160 clean images is none",
        ),
        (real_spec("clean_fractions = [1]"), [0.2] * 300, "clean_fractions", "1 of 0 clean images is none"),
        (
            real_spec(extra=EXTRA),
            REAL,
            "sigma = 0.3",
            "extra.0.sigma simulates noise, but the images are noisy",
        ),
        (
            SPEC.replace('"digits"', '"digits"\nsigma = 0.3'),
            CLEAN,
            "sigma",
            "data.sigma is decided by grid.sigmas",
        ),
    ],
)
def test_words_for_the_other_kind_of_noise_are_rejected(
    spec: str, sigma_tn: list[float], at: str, cure: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError) as caught:
        opened(tmp_path, spec, sigma_tn)
    assert f"line {line_of(spec, at)}: " in str(caught.value) and cure in str(caught.value), str(caught.value)


def test_extras_of_a_store_with_noisy_images(tmp_path: Path) -> None:
    extra = "[[extra]]\nclean_fraction = 0.5\nlevels = [0.2, 0.2]\nnoisy_fraction = 0.1\nsampling = 'refined'\n"
    study = opened(tmp_path, real_spec(extra=extra + "num_extra = 4\n"), REAL)
    arm = study.arms[-1]
    assert (arm.setting.num_clean, arm.setting.noisy) == (80, ((0.2, 30),)) and arm.setting.table == "extreme"
    assert (arm.sample.refine_at, arm.sample.num_extra) == (0.2, 4)


def test_noise_can_be_simulated_on_the_clean_part(tmp_path: Path) -> None:
    spec = SPEC.replace('"digits"', '"digits"\nnoisy = 0\nheld_out = 0\nclean = 150').replace("64", "8")
    study = opened(tmp_path, spec, REAL)
    assert len(study.source) == 150
    assert {len(arm.config.data.open()) for arm in study.arms if arm.setting.noisy} == {150}
