"""Study files: bad ones are refused before any work, with line and cure; good ones give the paper's rows."""

from pathlib import Path

import numpy as np
import pytest

from assay.data.store import PackedImage, write_store
from assay.study import open_study, read_study
from assay.study.spec import study_arms, study_jobs
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
        ("[1, 0.1, 0]", "[1, 1.5]", "clean_fractions", "has 1.5; a fraction lies between 0 and 1"),
        ("[1, 0.1, 0]", "[1, -0.1]", "clean_fractions", "has -0.1; a fraction lies between 0 and 1"),
        ("[1, 0.1, 0]", "[1, 0.1, 0.1]", "clean_fractions", "grid.clean_fractions names a value twice"),
        ("[1, 0.1, 0]", "[]", "clean_fractions", "should have at least 1 item"),
        ("[1, 0.1, 0]", "[1, 0.0001]", "clean_fractions", "is none; use a larger fraction"),
        (
            "[1, 0.1, 0]",
            "[1, 0.01]",
            "batch_size",
            "18 images are fewer than train.batch_size = 64; lower it",
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
            "5000 images asked of digits, which has 1797: ask for",
        ),
        ('"digits"', '"digits"\nclasses = ["ten"]', "store", "digits has no class 'ten'; it has 0, 1, 2"),
        (
            '"digits"',
            '"."\nsize = 4',
            "store",
            "'.' is a store of yours; size, classes and num_images take",
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
        read_study(path)
    path.write_text(SPEC + EXTRA + EXTRA)  # the same setting twice is one line
    study = read_study(path)
    assert len(study_jobs(study, study_arms(study, tmp_path), "data")) == 6


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
    assert str(caught.value).startswith(f"{path}: ") and said in str(caught.value)


def test_more_clean_images_than_exist_are_refused(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (100, 1, 8, 8)).astype(np.float32)
    images = (PackedImage(str(i), pixels[i], 0.0 if i < 70 else 0.2, -1) for i in range(100))
    write_store(tmp_path / "store", "half", images, (1, 8, 8), "float32", (0, 255), ())
    path = tmp_path / "spec.toml"
    path.write_text(SPEC.replace("digits", str(tmp_path / "store")))
    with pytest.raises(ValueError, match=r"line 4: data.store: 70 of the 100 images of half are.*pack those"):
        open_study(path, tmp_path / "out")


def test_rows_are_the_papers_and_share_trainings(tmp_path: Path) -> None:
    path = tmp_path / "spec.toml"
    extra = "[[extra]]\nclean_fraction = 0.01\nsigma = 0.2\ntrain = {num_steps = 7}\n"
    grid = "clean_fractions = [1, 0.5, 0]\nsigmas = [0.1, 0.2]\nseeds = [3, 4]"
    path.write_text(SPEC.replace("clean_fractions = [1, 0.1, 0]\nsigmas = [0.5]", grid) + extra)
    study = read_study(path)
    rows = study_arms(study, tmp_path)
    # Of each seed: all clean; 0.5 clean alone and with two noises; noisy alone, for each noise once as the
    # mix of nothing clean and in three ways; and the extra.
    assert len(rows) == 2 * (1 + 3 + 2 * 4 + 1)
    jobs = study_jobs(study, rows, "data")
    assert len(jobs) == 2 * (1 + 3 + 2 * 2 + 1)  # plain and truncated share one, consistency has its own
    assert len({job.key for job in jobs}) == len(jobs)
    assert {row.config.train.num_steps for row in rows if row.setting.table == "extreme"} == {7}
    assert {row.config.train.num_steps for row in rows if row.setting.table != "extreme"} == {120}
    assert {row.config.train.batch_size for row in rows} == {64}  # what the extra does not set stays
    assert all((row.config.train.consistency.coefficient > 0) == row.setting.consistency for row in rows)
    assert {row.sample.truncate_at for row in rows if row.setting.sampling == "truncated"} == {0.1, 0.2}


def test_names_of_jobs_depend_on_what_matters_alone(tmp_path: Path) -> None:
    def keys(spec: str, store: str, data: str = "data") -> list[str]:
        path = tmp_path / "spec.toml"
        path.write_text(spec)
        study = read_study(path)
        return [job.key for job in study_jobs(study, study_arms(study, tmp_path / store), data)]

    usual = keys(SPEC, "here")
    assert keys(SPEC, "elsewhere") == usual
    assert not set(keys(SPEC, "here", "other images")) & set(usual)
    assert keys(SPEC.replace("num_images = 60", "num_images = 80"), "here") == usual  # measured, not trained
    assert not set(keys(SPEC.replace("lr = 2e-3", "lr = 1e-3"), "here")) & set(usual)
    assert set(keys(SPEC.replace("[1, 0.1, 0]", "[1, 0.2, 0]"), "here")) & set(usual) == {
        usual[i] for i in (0, 3, 4)
    }
