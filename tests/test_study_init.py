"""From files to a price: packing, a study file that suits the store and the time, and the report."""

import re
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image
from sklearn.datasets import load_digits
from typer.testing import CliRunner

from assay.cli import app
from assay.data.store import PackedImage, write_store
from assay.outcome import read_outcomes
from assay.study import OpenStudy, init, open_study
from assay.study.init import draft_study
from assay.study.timing import sampling_work


def run(*arguments: object, code: int = 0) -> str:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "300"})
    assert done.exit_code == code, done.output + str(done.exception)
    return done.output


def packed(
    path: Path, sigma: list[float], side: int = 8, num_classes: int = 0, kernel: np.ndarray | None = None
) -> Path:
    """A store of flat images, whose content matters to no test here; the noisy ones may have a kernel."""
    classes = [f"class {number}" for number in range(num_classes)]
    values = np.zeros((1, side, side), dtype=np.float32)
    images = (
        PackedImage(
            str(n), values, level, n % num_classes if num_classes else -1, kernel=kernel if level else None
        )
        for n, level in enumerate(sigma)
    )
    write_store(path, path.name, images, values.shape, "float32", (-1, 1), classes)
    return path


def test_from_files_to_a_price(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    digits = load_digits().images[:400] * 15  # 0 to 240
    rng = np.random.default_rng(0)
    for folder in ("clean", "noisy"):
        (tmp_path / folder).mkdir()
    levels = ["filename,sigma"]
    for number, pixels in enumerate(digits):
        if number < 160:
            Image.fromarray(pixels.astype(np.uint8)).save(f"clean/{number}.png")
            continue
        sigma = 25.5 if number < 280 else 51  # in the files' units: 0.2 and 0.4 of images from -1 to 1
        noisy = pixels + sigma * rng.standard_normal(pixels.shape)
        tifffile.imwrite(f"noisy/{number}.tiff", noisy.astype(np.float32))
        levels.append(f"{number}.tiff,{sigma}")
    Path("levels.csv").write_text("\n".join(levels) + "\n")
    pack = "data pack clean/ --sigma 0 noisy/ --sigma-file levels.csv --range 0,255 -o scans"
    run(*pack.split())
    said = run("study", "init", "scans", "--minutes", 0.01)
    assert "140 clean images of 1 x 8 x 8" in said and "240 noisy ones, with noise of 0.2 to 0.4" in said
    assert "That is short" in said and "assay study run study.toml" in said
    assert "exists already" in run("study", "init", "scans", code=1)

    text = Path("study.toml").read_text()
    assert 'extractor = "pixels"' in text and "# All noisy images together" in text
    assert "4 trainings" in text
    short = re.sub(r"num_steps = \d+", "num_steps = 6", text).replace("num_images = 50", "num_images = 20")
    Path("study.toml").write_text(short.replace("[evaluate]\n", "[evaluate]\nsample = {num_steps = 3}\n"))
    said = run("study", "run", "study.toml", "--workers", 1)
    settings = [each.setting for each in read_outcomes(Path("out/scans/results.csv")).values()]
    assert {(each.num_clean, each.num_noisy) for each in settings} == {
        (number, noisy) for number in (140, 70) for noisy in (0, 240)
    }
    assert Path("out/scans/report.html").stat().st_size > 10_000
    priced = [line for line in said.splitlines() if line.startswith("By FD-pixels")]
    assert len(priced) == 1 and re.search("replace a clean one|do not decide what noisy images", priced[0])


def test_a_store_without_clean_images_is_studied_above_its_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    sigma = np.where(np.arange(400) < 200, 1.6, 3.2)  # 0.2 and 0.4 of images from -1 to 1
    digits = load_digits().images[:400] + sigma[:, None, None] * rng.standard_normal((400, 8, 8))
    np.save("scans.npy", digits.astype(np.float32))
    lines = [f"scans.npy[{i}],{level}" for i, level in enumerate(sigma)]
    Path("levels.csv").write_text("\n".join(["filename,sigma", *lines]) + "\n")
    run("data", "pack", "scans.npy", "--range", "0,16", "--sigma-file", "levels.csv", "-o", "scans")
    said = run("study", "init", "scans", "--minutes", 0.01)
    assert "no clean images of 1 x 8 x 8" in said and "360 noisy ones, with noise of 0.2 to 0.4" in said
    text = Path("study.toml").read_text()
    assert "noisy_fractions = [1, 0.5, 0.25]" in text and "extractor" not in text
    short = re.sub(r"num_steps = \d+", "num_steps = 6", text).replace("num_images = 50", "num_images = 20")
    Path("study.toml").write_text(short + "[evaluate.sample]\nnum_steps = 3\n")
    said = run("study", "run", "study.toml", "--workers", 1)
    outcomes = read_outcomes(Path("out/scans/results.csv")).values()
    assert {each.setting.num_noisy for each in outcomes} == {360, 180, 90}
    assert all(each.setting.num_clean == 0 and each.evaluation.score is not None for each in outcomes)
    assert "360 noisy images reach" in said and "180 of them" in said and "no row has clean images" in said
    assert Path("out/scans/report.html").stat().st_size > 10_000
    tables = Path("out/scans/tables.md").read_text()
    assert all(f"{number} images" in tables for number in (360, 180, 90))


def test_the_store_and_the_time_decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that says 1 ms per image, whatever the machine."""
    monkeypatch.setattr(init, "seconds_per_image", lambda *arguments: 1e-3)
    monkeypatch.chdir(tmp_path)

    def drafted(name: str, minutes: float) -> OpenStudy:
        text = draft_study(Path(name), minutes, cores=2)
        assert max(map(len, text.splitlines())) <= 112
        Path(f"{name}.toml").write_text(text)
        return open_study(Path(f"{name}.toml"), tmp_path / "out" / name)

    def minutes_of(study: OpenStudy) -> float:
        return sum(job.work + sampling_work(job) for job in study.jobs) * 1e-3 / 60 / 2

    packed(tmp_path / "mixed", [0.0] * 400 + [0.1, 0.2] * 200, num_classes=2)
    lean, rich = drafted("mixed", 20), drafted("mixed", 1000)
    assert minutes_of(lean) == pytest.approx(20, rel=0.01)
    assert minutes_of(rich) <= 1000 and len(rich.jobs) > 4 * len(lean.jobs)
    assert rich.study.grid.seeds == (0, 1, 2) and rich.study.evaluate.num_images == 1000
    assert rich.study.evaluate.extractor == "classifier" and rich.study.net == {"preset": "mlp"}
    # A tenth of 360 clean images is 36: the lowest share, and batches of 32.
    assert min(arm.setting.num_clean for arm in rich.arms if arm.setting.num_clean) == 36
    assert rich.study.train.batch_size == 32

    packed(tmp_path / "clean", [0.0] * 300, side=16)
    simulated = drafted("clean", 0.05)
    assert simulated.study.grid.sigmas == (0.2,) and simulated.study.net == {"preset": "unet-tiny"}
    assert (simulated.study.train.optimizer, simulated.study.train.lr) == ("muon", 2e-3)
    assert simulated.study.train.num_steps == 100 and "That is short" in Path("clean.toml").read_text()

    # 24 clean images: no share of them is large enough, and too few at 0.4 to train on alone.
    packed(tmp_path / "few", [0.0] * 24 + [0.2] * 100 + [0.4] * 5)
    few = drafted("few", 2000)
    assert few.study.grid.clean_fractions == (1,) and few.study.train.batch_size == 16

    packed(tmp_path / "noisy", [0.1, 0.2, 0.3, 0.4] * 200)
    lean, rich = drafted("noisy", 20), drafted("noisy", 2000)
    assert {arm.setting.num_noisy for arm in lean.arms} == {720, 360, 180}
    assert len(rich.jobs) > 4 * len(lean.jobs) and rich.study.grid.noisy_fractions == (1, 0.5, 0.25, 0.1)
    for name, sigma in (("faint", [0.2] * 190), ("mostly", [0.0] * 5 + [0.2] * 300)):
        packed(tmp_path / name, sigma)
        with pytest.raises(ValueError, match="pack more"):
            draft_study(Path(name))
    with pytest.raises(ValueError, match="minutes"):
        draft_study(Path("clean"), 0)


def test_incomplete_images_are_rejected_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(init, "seconds_per_image", lambda *arguments: 1e-3)
    monkeypatch.chdir(tmp_path)
    kernel = np.eye(1, 64, dtype=np.float32).reshape(8, 8)
    packed(tmp_path / "mixed", [0.0] * 100 + [0.2] * 60, kernel=kernel)
    with pytest.raises(ValueError, match=r"60 of the 140 images of mixed have missing.*need train\.loops"):
        draft_study(Path("mixed"))
    packed(tmp_path / "clean", [0.0] * 100)
    Path("study.toml").write_text(draft_study(Path("clean")).replace("[net]", 'held_out = "mixed"\n\n[net]'))
    with pytest.raises(ValueError, match=r"60 of the 160 images of mixed .*cannot be scored: set data"):
        open_study(Path("study.toml"))
