"""Evaluation from images to result: extractors, references, checkpoints, the command line, bad input."""

import json
import runpy
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import assay
from assay.checkpoint import CheckpointInfo, save_checkpoint
from assay.data import Store, simulate
from assay.data.arrays import from_arrays
from assay.data.known import get
from assay.data.view import View, raised
from assay.devices import find_devices
from assay.metrics.classifier import Classifier, train_classifier
from assay.metrics.distance import features_to_statistics, frechet_distance, save_statistics
from assay.metrics.evaluate import Evaluation, compare, evaluate, save_evaluation, titles, with_held_out_loss
from assay.metrics.extract import (
    Extractor,
    Reference,
    images_to_features,
    load_extractor,
    reference_from_images,
    reference_from_statistics,
    to_bytes,
)
from assay.metrics.generated import Noised, sample_checkpoint
from assay.metrics.held_out import checkpoint_loss, held_out_loss
from assay.metrics.measure import MeasureConfig, measure
from assay.nets import build_denoiser, preset
from assay.outcome import load_evaluations, load_outcome
from assay.sample import SampleConfig, spread_labels
from assay.train import train
from assay.train.config import read_config
from tests.commands import failing, run
from tests.errors import rejected
from tests.points import Points

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return get("digits", tmp_path_factory.mktemp("stores") / "digits").store


@pytest.fixture(scope="module")
def pixels(cache: Path) -> Extractor:
    return load_extractor("pixels", cache)


@pytest.fixture(scope="module")
def reference(digits: Store, pixels: Extractor, cache: Path) -> Reference:
    return reference_from_images(digits, pixels, cache)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    config = preset("mlp", (1, 8, 8), 10)
    path = tmp_path / "untrained.safetensors"
    save_checkpoint(path, build_denoiser(config), config, CheckpointInfo(sigma_tn=((0.2, 1.0),)))
    return path


def save_pngs(folder: Path, images: np.ndarray) -> Path:
    folder.mkdir()
    for i, image in enumerate(images):
        Image.fromarray(image).save(folder / f"{i:04}.png")
    return folder


def test_classifier_is_deterministic_cached_and_right(digits: Store, cache: Path) -> None:
    first = load_extractor("classifier", cache, reference=digits)
    assert first.metric == "FD-classifier"
    assert first.accuracy is not None and first.accuracy > 0.95
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)  # the number of threads changes nothing
        again, accuracy = train_classifier(digits)
    finally:
        torch.set_num_threads(threads)
    assert torch.get_num_threads() == threads
    assert accuracy == first.accuracy
    images = digits.read(torch.arange(50))
    expected = again(to_bytes(images).float())
    np.testing.assert_allclose(first(images), expected, rtol=1e-4, atol=1e-4)
    (file,) = cache.glob("classifier-*.safetensors")
    stamp = file.stat().st_mtime_ns
    second = load_extractor("classifier", cache, reference=digits)
    assert second.sha256 == first.sha256 and file.stat().st_mtime_ns == stamp
    np.testing.assert_array_equal(second(images), first(images))


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (1, 28, 28), (2, 5, 64), (3, 3, 3)])
def test_classifier_takes_images_of_any_shape(shape: tuple[int, int, int]) -> None:
    network, x = Classifier(shape, 7).eval(), torch.zeros(2, *shape)
    assert network(x).shape == (2, 128) and network.logits(x).shape == (2, 7)


def test_classifier_needs_labels(cache: Path) -> None:
    with rejected("extractor"):
        load_extractor("classifier", cache, reference=from_arrays(torch.zeros(30, 1, 8, 8)))
    with rejected("extractor"):
        load_extractor("classifier", cache)


def test_pixels_are_the_image_averaged_to_32(pixels: Extractor) -> None:
    x = torch.rand(3, 1, 8, 8) * 2 - 1
    np.testing.assert_allclose(pixels(x), x.flatten(1), atol=1 / 255 + 1e-6)
    large = torch.rand(2, 3, 64, 64).round() * 2 - 1
    expected = large.view(2, 3, 32, 2, 32, 2).mean((3, 5)).flatten(1)
    np.testing.assert_allclose(pixels(large), expected, atol=1e-6)


# --- evaluation ------------------------------------------------------------------------------------------


def test_evaluation_says_what_was_measured(digits: Store, reference: Reference, pixels: Extractor) -> None:
    found = evaluate(digits, reference, pixels, num_images=500, num_ranges=3)
    details = found.details
    assert details is not None
    expected = [
        frechet_distance(
            features_to_statistics(images_to_features(pixels, digits, torch.arange(i, i + 500))),
            reference.statistics,
        )
        for i in (0, 500, 1000)
    ]
    assert [part.fd for part in details.ranges] == pytest.approx(expected, rel=1e-9)
    assert [part.first for part in details.ranges] == [0, 500, 1000]
    assert found.fd == pytest.approx(np.mean(expected))
    assert found.fd_std == pytest.approx(np.std(expected, ddof=1))
    for name in ("kid", "kid_error", "precision", "recall"):
        assert getattr(found, name) == pytest.approx(np.mean([getattr(part, name) for part in details.ranges]))
    assert (found.metric, found.num_images, details.num_reference) == ("FD-pixels", 500, 1797)
    assert details.reference_fingerprint == digits.fingerprint


def test_several_devices_measure_the_same_samples(
    checkpoint: Path, reference: Reference, pixels: Extractor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert find_devices() == [torch.device("cuda", i) for i in range(3)]
    samples, sampler = sample_checkpoint(checkpoint, 100, sample=SampleConfig(num_steps=2))
    one, two = (
        evaluate(samples, reference, replace(pixels, batch_size=16, devices=devices), 50, 2, sampler=sampler)
        for devices in (("cpu",), ("cpu", "cpu"))
    )
    assert one == two and one.kid is not None
    alone = evaluate(samples, reference, replace(pixels, batch_size=7), 50, 2, fd_only=True)
    assert alone.fd == pytest.approx(one.fd, rel=1e-6) and titles([alone]).keys() == {"fd"}


def test_reference_is_cached_and_counts_clean_images_only(
    digits: Store, pixels: Extractor, cache: Path
) -> None:
    mixed = simulate(digits, 0.25, 0.5, seed=0)
    first = reference_from_images(mixed, pixels, cache)
    assert first.statistics.num_images == int((mixed.sigma_tn == 0).sum()) == 449
    assert first.statistics.extractor_sha256 == pixels.sha256
    second = reference_from_images(mixed, replace(pixels, network=None), cache)  # nothing is computed
    np.testing.assert_array_equal(second.statistics.cov, first.statistics.cov)
    clean = digits.read(torch.nonzero(mixed.sigma_tn == 0)[:, 0])
    np.testing.assert_allclose(first.features, pixels(clean), atol=1e-6)
    with rejected("reference"):
        reference_from_images(simulate(digits, 0.0, 0.5, seed=0), pixels, cache)


def test_references_from_files_know_their_extractor(
    tmp_path: Path, digits: Store, reference: Reference, pixels: Extractor
) -> None:
    save_statistics(tmp_path / "ours.npz", reference.statistics)
    save_statistics(tmp_path / "edm.npz", replace(reference.statistics, num_images=None, extractor_sha256=None))
    expected = evaluate(digits, reference, pixels)
    for name, count in (("ours.npz", 1797), ("edm.npz", None)):
        found = evaluate(digits, reference_from_statistics(tmp_path / name, pixels), pixels)
        assert found.details is not None and found.details.num_reference == count
        assert found.fd == expected.fd and found.kid is None
    other = replace(pixels, sha256="another")
    with rejected("extractor", tmp_path / "ours.npz"):
        reference_from_statistics(tmp_path / "ours.npz", other)
    small = Reference("small", "", features_to_statistics(np.random.default_rng(0).standard_normal((50, 5))))
    with rejected("extractor"):
        evaluate(digits, small, pixels)


@pytest.mark.parametrize("first_seed", [0, 123_456])
def test_labels_have_the_reference_proportions_in_any_range(first_seed: int) -> None:
    frequencies = torch.tensor([0.5, 0.0, 0.3, 0.2])
    label = spread_labels(frequencies, range(first_seed, first_seed + 1000))
    np.testing.assert_allclose(label.bincount(minlength=4) / 1000, frequencies, atol=0.003)
    assert torch.equal(spread_labels(frequencies, range(first_seed + 5, first_seed + 15)), label[5:15])


def test_results_survive_a_file_and_unequal_ones_are_refused(
    tmp_path: Path, digits: Store, reference: Reference, pixels: Extractor
) -> None:
    few = evaluate(digits, reference, pixels, num_images=100)
    save_evaluation(tmp_path / "few.json", few)
    assert load_outcome(tmp_path / "few.json") == few
    tree = json.loads((tmp_path / "few.json").read_text())
    (tmp_path / "later.json").write_text(json.dumps(tree | {"another_metric": 1.0}))
    assert load_outcome(tmp_path / "later.json") == few
    (tmp_path / "other.json").write_text(json.dumps({"store": "digits"}))
    with rejected(path=tmp_path / "other.json"):
        load_outcome(tmp_path / "other.json")
    worse = few.model_copy(update={"fd": few.fd + 1})
    assert compare({"worse": worse, "few": few}) == ["few", "worse"]
    assert few.details is not None
    others = {what: few.model_copy(update={what: "other"}) for what in ("metric", "extractor", "num_images")}
    for what in ("extractor_sha256", "reference_fingerprint"):
        details = few.details.model_copy(update={what: "other"})
        others[what] = few.model_copy(update={"details": details})
    for what, other in others.items():
        with rejected(what):
            compare({"few": few, "other": other})


@pytest.mark.slow
@pytest.mark.parametrize("extractor", ["classifier", "pixels"])
def test_distance_grows_with_noise_blur_and_dropped_classes(
    extractor: str, cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    distances = runpy.run_path(str(ROOT / "examples" / "degrade.py"))["distances"]
    fashion = get("fashion-mnist", tmp_path_factory.mktemp("stores") / "fashion").store
    for kind, found in distances(fashion, extractor, 500, cache).items():
        values = list(found.values())
        assert len(values) == 4
        assert all(a < b for a, b in zip(values, values[1:], strict=False)), (kind, found)


class Given(Points):
    """Images held in memory, whatever they are."""

    def __init__(self, images: Tensor) -> None:
        self.x_tn, self.image_shape, self.name = images, (*images.shape[1:],), "given"  # type: ignore[assignment]


ONE_NAN = torch.rand(50, 1, 8, 8)
ONE_NAN[37, 0, 2, 2] = torch.nan


@pytest.mark.parametrize(
    ("images", "key"),
    [
        (torch.rand(1, 1, 8, 8), "num_images"),
        (torch.full((50, 1, 8, 8), 0.3), None),
        (ONE_NAN, None),
        (torch.rand(50, 1, 8, 9), None),
        (torch.rand(50, 3, 8, 8), None),
    ],
    ids=["one", "constant", "nan", "size", "channels"],
)
def test_images_that_cannot_be_measured(
    images: Tensor, key: str | None, reference: Reference, pixels: Extractor
) -> None:
    with rejected(key):
        evaluate(Given(images), reference, pixels)
    with rejected("num_images"):
        evaluate(Given(images), reference, pixels, num_images=30, num_ranges=2)


# --- the command line ------------------------------------------------------------------------------------


def test_evaluate_folder_npz_and_store_agree(tmp_path: Path, digits: Store, cache: Path) -> None:
    images = to_bytes(digits.read(torch.arange(0, 1200, 4))).numpy()[:, 0]
    folder = save_pngs(tmp_path / "folder", images)
    np.savez(tmp_path / "images.npz", images=images)
    run("data", "pack", folder, "-o", tmp_path / "store")
    options = ["--reference", digits.path, "--extractor", "pixels", "--cache", cache]
    values = []
    for name in ("folder", "images.npz", "store"):
        result = tmp_path / f"{name}.json"
        output = run("evaluate", tmp_path / name, *options, "--output", result)
        values.append(json.loads(result.read_text())["fd"])
        assert f"FD-pixels {values[-1]:.4g}" in output
    assert values == [values[0]] * 3
    output = run("evaluate", "compare", tmp_path / "folder.json", tmp_path / "store.json")
    assert "300 images each" in output and "FD-pixels" in output


def test_evaluate_checkpoint_in_three_ranges(
    tmp_path: Path, digits: Store, cache: Path, checkpoint: Path
) -> None:
    options = ["--reference", digits.path, "--extractor", "pixels", "--cache", cache, "--num-steps", 4]
    result = tmp_path / "result.json"
    output = run("evaluate", checkpoint, *options, "--num-images", 30)
    assert "truncate_at = auto" in output
    output = run("evaluate", checkpoint, *options, "--num-images", 30, "-o", result, "--truncate-at", 0.1)
    assert "warning" not in output
    found = load_evaluations([result])[str(result)]
    assert found.details is not None and found.details.sampler is not None
    assert [part.first for part in found.details.ranges] == [0, 30, 60] and found.fd_std is not None
    assert found.details.sampler.sample == SampleConfig(num_steps=4, truncate_at=0.1)
    # The second range alone, by its seeds, is the same set of images.
    alone = tmp_path / "alone.json"
    arguments = ["--num-images", 30, "--num-ranges", 1, "--first-seed", 30, "--truncate-at", 0.1, "-o", alone]
    run("evaluate", checkpoint, *options, *arguments)
    assert json.loads(alone.read_text())["fd"] == pytest.approx(found.details.ranges[1].fd, rel=1e-6)


def test_evaluate_scores_a_checkpoint_on_held_out_images(
    tmp_path: Path, digits: Store, cache: Path, checkpoint: Path
) -> None:
    result, worse = tmp_path / "loss.json", tmp_path / "worse.json"
    output = run("evaluate", checkpoint, "--held-out", digits.path, "-o", result)
    (found,) = load_evaluations([result]).values()
    record = found.held_out_loss_record
    assert record is not None and found.fd is None
    expected = checkpoint_loss(checkpoint, digits).nats_per_dim
    assert found.held_out_loss == pytest.approx(expected.value, rel=1e-5)
    assert found.held_out_loss_error == pytest.approx(expected.standard_error, rel=1e-5)
    assert f"held-out loss {found.held_out_loss:.4g} ±" in output and "0.00784 to 80" in output
    # With a reference, both are measured.
    options = ["--reference", digits.path, "--extractor", "pixels", "--cache", cache]
    options += ["--num-steps", 4, "--num-images", 30]
    run("evaluate", checkpoint, *options, "--held-out", digits.path, "-o", tmp_path / "both.json")
    (both,) = load_evaluations([tmp_path / "both.json"]).values()
    assert both.fd is not None and both.held_out_loss == found.held_out_loss
    # Two models are compared in pairs, which makes the difference far more certain than each loss.
    other = held_out_loss(lambda x_t, sigma_t, label=None: 0.9 * x_t, digits, model="worse")
    save_evaluation(worse, with_held_out_loss(Evaluation(), other))
    compared = run("evaluate", "compare", worse, result)
    assert compared.index("loss.json") < compared.index("worse.json")
    assert str(other.minus(record)) in compared


def test_images_that_were_trained_on_are_not_held_out(tmp_path: Path, digits: Store, cache: Path) -> None:
    halves = [digits.read(torch.arange(start, 120, 2)) for start in (0, 1)]
    seen, unseen = (from_arrays(half).save(tmp_path / f"half-{i}") for i, half in enumerate(halves))
    data = {"store": str(seen.path), "clean_fraction": 0.0, "sigma": 0.3}
    settings = {"num_steps": 1, "batch_size": 8}
    config = read_config({"data": data, "net": {"preset": "mlp"}, "train": settings}, "test")
    train(config, tmp_path / "run", config.data.open())
    expected = measure(tmp_path / "run", MeasureConfig(held_out=unseen.path), cache=cache).held_out_loss
    with rejected("held_out"):
        measure(tmp_path / "run", MeasureConfig(held_out=seen.path), cache=cache)
    noisy = raised(simulate(seen, 0.0, 0.2), 0.3)
    fitted = assay.fit(noisy, net={"preset": "mlp"}, progress=False, **settings)
    for model in (assay.load(tmp_path / "run"), fitted):
        with rejected("held_out"):
            model.held_out_loss(seen)
    assert assay.load(tmp_path / "run").held_out_loss(unseen).nats_per_dim.value == pytest.approx(expected)
    assert fitted.held_out_loss(unseen).info == fitted.checkpoint.info
    with rejected("held_out"):
        fitted.held_out_loss(from_arrays(torch.zeros(30, 1, 9, 8)))
    shutil.rmtree(seen.path)
    shutil.copytree(unseen.path, seen.path)  # other images, of which one cannot say that they were not seen
    with pytest.warns(UserWarning, match="have changed"), rejected("held_out"):
        assay.load(tmp_path / "run").held_out_loss(unseen)
    shutil.rmtree(seen.path)
    saved = fitted.save(tmp_path / "fitted.safetensors")
    for unknown in (tmp_path / "run", saved):  # what a file of weights was trained on is not known either
        with pytest.warns(UserWarning, match=f"cannot tell whether images of {unseen.name} were trained on"):
            assay.load(unknown).held_out_loss(unseen)
    with rejected(path="fitted.safetensors"):
        fitted.save(saved)
    with pytest.warns(UserWarning, match="scene|tell"):
        loss = assay.load(saved).held_out_loss(noisy)  # nothing can be said below their noise of 0.3
    assert f"of levels above {loss.covers[0]:.3g} only" in repr(loss) and loss.covers[0] > 0.3


def test_a_run_is_measured_on_the_images_that_it_set_aside(tmp_path: Path, digits: Store, cache: Path) -> None:
    tree = {"data": {"store": str(digits.path), "held_out": 30}, "net": {"preset": "mlp"}}
    config = read_config(tree | {"train": {"num_steps": 1, "batch_size": 8}}, "test")
    train(config, tmp_path / "run", config.data.open())
    found = measure(tmp_path / "run", MeasureConfig(), cache=cache).held_out_loss_record
    expected = checkpoint_loss(tmp_path / "run", assay.split_held_out(digits, 30)[1])
    assert found is not None and found.nats_per_dim.value == expected.nats_per_dim.value
    with rejected("reference"):  # a file of weights knows of no images
        measure(tmp_path / "run/snapshots/final.safetensors", MeasureConfig(), cache=cache)


def test_noisy_and_unlabelled_images(tmp_path: Path, digits: Store, cache: Path) -> None:
    config, checkpoint = preset("mlp", (1, 8, 8)), tmp_path / "without-classes.safetensors"
    save_checkpoint(checkpoint, build_denoiser(config), config)
    plain = from_arrays(digits.read(torch.arange(40))).save(tmp_path / "plain")
    options = ["--num-steps", 2, "--cache", cache]
    assert "FD-pixels" in run("evaluate", checkpoint, "--reference", plain.path, *options)
    # Noisy images count at the levels above their own.
    from_arrays(digits.read(torch.arange(40)), 0.4).save(tmp_path / "noisy")
    output = run("evaluate", checkpoint, "--held-out", tmp_path / "noisy")
    assert "0.792 to 80" in output and "levels below 0.792 are not measured" in output
    assert failing("evaluate", checkpoint).key == "reference"
    assert failing("evaluate", plain.path, "--held-out", digits.path).key == "reference"


def test_reference_command_writes_what_evaluate_reads(tmp_path: Path, digits: Store, cache: Path) -> None:
    options, path = ["--extractor", "pixels", "--cache", cache], tmp_path / "ref.npz"
    output = run("evaluate", "reference", digits.path, "-o", path, *options)
    assert "64 features of 1,797 images" in output
    assert {"mu", "sigma"} <= set(np.load(path).files)
    run("evaluate", digits.path, "--reference", path, *options, "-o", tmp_path / "result.json")
    assert json.loads((tmp_path / "result.json").read_text())["fd"] == pytest.approx(0, abs=1e-9)
    assert failing("evaluate", "reference", digits.path, "-o", tmp_path / "other.npz").key == "extractor"
    no_extractor = failing("evaluate", digits.path, "--reference", path)
    assert no_extractor.key == "extractor" and "inception" in (no_extractor.cure or "")


def test_command_line_errors_say_what_to_do(tmp_path: Path, digits: Store, cache: Path) -> None:
    options = ["--reference", digits.path, "--extractor", "pixels", "--cache", cache]
    (tmp_path / "empty").mkdir()
    np.savez(tmp_path / "float.npz", images=np.zeros((30, 8, 8), dtype=np.float32))
    folder = save_pngs(tmp_path / "sizes", np.zeros((30, 8, 8), dtype=np.uint8))
    Image.fromarray(np.zeros((9, 8), dtype=np.uint8)).save(folder / "0005.png")
    places = (("empty", "empty"), ("float.npz", "[0]"), ("sizes", "0005.png"), ("nothing", "nothing"))
    for images, path in places:
        assert str(failing("evaluate", tmp_path / images, *options).path).endswith(path)
    assert failing("evaluate", folder, "--reference", folder, *options[2:]).path == str(folder)
    assert failing("evaluate", digits.path, *options, "--device", "gpu").key == "device"


def test_with_noise_images_are_compared_with_noisy_ones_alone(
    digits: Store, pixels: Extractor, cache: Path, tmp_path: Path
) -> None:
    noisy = simulate(digits, 0.0, 0.3, seed=0)
    real = reference_from_images(noisy, pixels, cache, noisy=True)
    candidate = Noised(View(digits, torch.arange(1500)), noisy.sigma_tn)
    assert torch.equal(candidate.read(torch.tensor([5])), candidate.read(torch.tensor([4, 5]))[1:])
    noise = candidate.read(torch.arange(500)) - digits.read(torch.arange(500))
    assert noise.std().item() == pytest.approx(0.3, rel=0.02) and noise.mean().abs() < 0.01
    alike = evaluate(candidate, real, pixels, 1500, 1).fd
    apart = evaluate(candidate.images, real, pixels, 1500, 1).fd
    assert alike is not None and apart is not None and alike < 0.1 * apart
    with rejected("reference"):
        reference_from_images(digits, pixels, cache, noisy=True)
    store = from_arrays(noisy.read(torch.arange(200)), 0.3).save(tmp_path / "noisy")
    images = save_pngs(tmp_path / "png", to_bytes(digits.read(torch.arange(60)))[:, 0].numpy())
    options = ["--reference", store.path, "--noised", "--extractor", "pixels", "--cache", cache]
    output = run("evaluate", images, *options)
    assert "FD-pixels" in output and "KID" not in output
    assert failing("evaluate", images, *options[2:]).key == "noised"
