"""Every format that Assay reads: how a valid file is made, how it is read, what it holds.

A new format is one more row of `FORMATS`. `make` writes a valid file, with whatever belongs to it, into an
empty folder and returns the file to be damaged. `read` reads that file the way a user's command would, and
returns its contents as plain values and arrays. `has_checksum` says whether other contents can be told from
the right ones; what has no checksum may be read as other contents, but not in any other way.
"""

import gzip
import io
import json
import pickle
import shutil
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
import torch
from astropy.io import fits
from PIL import Image

from assay.checkpoint import (
    Checkpoint,
    CheckpointInfo,
    export_checkpoint,
    load_checkpoint,
    save_checkpoint,
    save_tensors,
)
from assay.data import open_store
from assay.data.export import Target
from assay.data.pack import PackConfig, open_source
from assay.data.readers import RawImages, read_any
from assay.data.spec import SourceSpec
from assay.data.spec import read_levels as read_noise_levels
from assay.data.store import PackedImage, Store, write_store
from assay.errors import AssayError
from assay.metrics.classifier import Classifier
from assay.metrics.distance import features_to_statistics, load_statistics, save_statistics
from assay.metrics.evaluate import Evaluation
from assay.metrics.extract import load_extractor, read_classifier, reference_from_images
from assay.metrics.held_out import HeldOutConfig, HeldOutLoss, load_held_out_loss, save_held_out_loss
from assay.mixture.samples import read_samples
from assay.nets import MLPConfig, UNetConfig, build_denoiser
from assay.outcome import Configuration, Outcome, load_outcome, write_outcomes
from assay.pricing import PAPER, price_all, read_levels
from assay.pricing.words import price_rows
from assay.settings import read_toml
from assay.study.spec import DEMO, read_study
from assay.study.stages import read_measures
from assay.train.config import read_config
from assay.train.folder import load_state, read_run, save_state
from assay.train.record import trim_log
from tests.studies import SPEC
from tests.test_data_pack import idx, png, saved
from tests.test_data_scientific import WRITERS

GOLDEN = Path(__file__).parents[1] / "golden"
_RNG = np.random.default_rng(0)
_IMAGES = _RNG.integers(0, 256, (6, 8, 8, 3), dtype=np.uint8)
_MAPS = [np.full((1, 8, 8), 0.1 * i, np.float32) for i in range(6)]  # of noise levels
_MAX_READ = 50  # images; a mutant may have many more than the valid file


@dataclass(frozen=True)
class Format:
    """One format (see the head of this module)."""

    name: str
    make: Callable[[Path], Path]
    read: Callable[[Path], Any]
    has_checksum: bool = False
    named: Callable[[Path], str] = lambda path: path.name  # what a message must contain


def _maker(write: Callable[..., Path]) -> Callable[..., Callable[[Path], Path]]:
    """`_text("a.csv", "1,2")` is a function of the folder that the file is written into."""
    return lambda *values, **options: lambda folder: write(folder, *values, **options)


# --- images ------------------------------------------------------------------------------------------------


def _raw(path: Path, **options: Any) -> Any:
    return _contents(read_any(str(path), **options))


def _contents(raw: RawImages) -> Any:
    images = range(len(raw.names))[:_MAX_READ]
    noise = [raw.noise(i) for i in images]
    return raw.label, raw.class_names, noise, [raw.pixels(i) for i in images]


def _folder(path: Path) -> Any:
    return _raw(path.parent)


def _parent(path: Path) -> str:
    return path.parent.name


@_maker
def _picture(folder: Path, name: str, values: np.ndarray, mode: str | None = None, **options: Any) -> Path:
    image = Image.fromarray(values)
    (image.convert(mode) if mode else image).save(folder / name, **options)
    return folder / name


@_maker
def _tiff(folder: Path, values: np.ndarray) -> Path:
    tifffile.imwrite(folder / "a.tif", values, photometric="rgb")
    return folder / "a.tif"


@_maker
def _files(folder: Path, name: str, contents: dict[str, bytes]) -> Path:
    for file, content in contents.items():
        (folder / file).write_bytes(content)
    return folder / name


_PNG = saved(_IMAGES[0], "png")
_DEEP_PNG = png(_RNG.integers(0, 65536, (8, 8, 3)).astype(np.uint16))
_EDM_LABELS = json.dumps({"labels": [["a.png", 0]]}).encode()


def _edm_zip(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("00000/a.png", "00000/b.png"):
            archive.writestr(name, _PNG)
        labels = [["00000/a.png", 0], ["00000/b.png", 1]]
        archive.writestr("dataset.json", json.dumps({"labels": labels}))
    return folder / "a.zip"


def _npy(folder: Path) -> Path:
    np.save(folder / "a.npy", _IMAGES)
    return folder / "a.npy"


def _npz(folder: Path) -> Path:
    labels, levels = np.array([0, 1, 0, 1, 0, 1]), np.linspace(0, 1, 6)
    np.savez_compressed(folder / "a.npz", images=_IMAGES, label=labels, sigma_tn=levels)
    return folder / "a.npz"


_IDX = idx(_IMAGES[..., 0])
_IDX_LABELS = idx(np.array([0, 1, 0, 1, 0, 1], np.uint8))


def _tar(path: Path, contents: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz" if path.name.endswith("gz") else "w") as archive:  # type: ignore[call-overload]
        for name, content in contents.items():
            member = tarfile.TarInfo(f"cifar/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def _batches() -> dict[str, bytes]:
    batch = {"data": _RNG.integers(0, 256, (2, 3072), dtype=np.uint8), "labels": [3, 9], "batch_label": "x"}
    return {f"data_batch_{i}": pickle.dumps(batch, 3) for i in range(1, 6)}


def _npm() -> dict[str, bytes]:
    sprite = png(_RNG.integers(0, 256, (1, 1024, 3), dtype=np.uint8))
    contents = {f"data_batch_{i}.png": sprite for i in range(1, 6)}
    return {**contents, "train_lables.json": json.dumps([0, 1, 2, 3, 4]).encode()}


@_maker
def _huggingface(folder: Path, file: str) -> Path:
    import datasets

    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    columns = {"img": [Image.fromarray(image) for image in _IMAGES[:2]], "label": [0, 1]}
    datasets.disable_progress_bars()
    shutil.rmtree(folder / "hf", ignore_errors=True)
    datasets.Dataset.from_dict(columns, features).save_to_disk(folder / "hf")
    return folder / "hf" / file


@_maker
def _scientific(folder: Path, name: str, part: str = "") -> Path:
    path = folder / name
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    write = next(write for known, write in WRITERS.items() if name.startswith(known.removesuffix(".gz")))
    write(path)
    return path / part if part else path


def _read_scientific(path: Path, noise: str | None = None) -> Any:
    whole = next((parent for parent in path.parents if parent.suffix == ".zarr"), path)
    return _raw(whole, dataset="images" if whole.name == "a.zarr" else None, noise=noise)


def _npy_image(folder: Path) -> Path:
    for name, image in zip("ab", _IMAGES, strict=False):
        np.save(folder / f"{name}.npy", image)
    return folder / "a.npy"


def _noise_image(folder: Path) -> Path:
    """A frame with the noise of each of its pixels."""
    pixels = _RNG.uniform(size=(2, 6, 7)).astype(np.float32)
    hdus = [fits.PrimaryHDU(pixels[0]), fits.ImageHDU(pixels[1], name="ERR")]
    fits.HDUList(hdus).writeto(folder / "a.fits", overwrite=True)
    return folder / "a.fits"


@_maker
def _map(folder: Path) -> Path:
    np.save(folder / "images.npy", _IMAGES)
    np.save(folder / "map.npy", np.where(np.eye(8), 9.0, 1.5))
    return folder / "map.npy"


def _read_map(path: Path) -> Any:
    return _contents(open_source(SourceSpec(path=str(path.with_name("images.npy")), map=path), PackConfig()))


# --- our own files -----------------------------------------------------------------------------------------


@_maker
def _store(folder: Path, file: str) -> Path:
    path = folder / "store"
    shutil.rmtree(path, ignore_errors=True)
    images = []
    for i, image in enumerate(_IMAGES):
        columns = 0.1 * i + 0.1, i % 2, 0.1 * i + 0.2, None, i // 2, _MAPS[i]
        images.append(PackedImage(f"{i}.png", image.transpose(2, 0, 1), *columns))
    write_store(path, "noise", images, (3, 8, 8), "uint8", (0, 255), ("a", "b"))
    return path / file


def _read_store(path: Path) -> Any:
    return _store_contents(open_store(next(parent for parent in path.parents if parent.name == "store")))


def _store_contents(store: Store) -> Any:
    every = torch.arange(len(store))
    x, maps = store.read(every), store.read_levels(every)
    columns = store.sigma_tn, store.label, store.usable_from, store.group
    names = store.source_names(range(len(store)))
    return x, maps, *columns, names, store.name, store.class_names, store.physical_range, store.fingerprint


_MLP = MLPConfig(image_shape=(1, 4, 4), num_classes=2, width=8, num_blocks=1)
_UNET = UNetConfig(image_shape=(1, 8, 8), model_channels=8, channel_mult=(1,), num_blocks=1)


def _checkpoint(folder: Path) -> Path:
    info = CheckpointInfo(dataset="digits", sigma_tn=((0.0, 0.5), (0.2, 0.5)), label_names=("a", "b"))
    save_checkpoint(folder / "a.safetensors", build_denoiser(_MLP), _MLP, info)
    return folder / "a.safetensors"


def _published(folder: Path) -> Path:
    return _checkpoint(folder).rename(folder / "model.safetensors")


def _classifier(folder: Path) -> Path:
    save_tensors(folder / "a.safetensors", Classifier((1, 4, 4), 2).state_dict(), {"accuracy": 0.5})
    return folder / "a.safetensors"


def _read_classifier(path: Path) -> Any:
    found = read_classifier(path, (1, 4, 4))
    return found.network.state_dict(), found.accuracy


def _weights(checkpoint: Checkpoint) -> Any:
    state = dict(checkpoint.denoiser.state_dict())
    return state, checkpoint.config.model_dump(), checkpoint.info.model_dump()


def _state(folder: Path) -> Path:
    tensors = {"model/a": torch.arange(100.0), "optimizer/0/step": torch.tensor(3.0)}
    save_state(folder / "state", 40, tensors, {"num_skipped": 1, "by_sigma": [[0.5, 1.5]]})
    return folder / "state" / "000000040.safetensors"


def _read_state(path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            return load_state(path.parent)
        except UserWarning as warning:  # a damaged state is not used, and the user is told
            raise AssayError(str(warning), cure="resume") from warning


@_maker
def _exported(folder: Path, file: str) -> Path:
    shutil.rmtree(folder / "net", ignore_errors=True)
    export_checkpoint(Checkpoint(build_denoiser(_UNET), _UNET, CheckpointInfo()), folder / "net")
    return folder / "net" / file


def _read_foreign(path: Path) -> Any:
    """By what a user would name: a folder, or the pickle itself."""
    return _weights(load_checkpoint(path.parent if path.parent.name == "net" else path))


def _snapshot(folder: Path) -> Path:
    shutil.copy(GOLDEN / "edm_pickle" / "network-snapshot-000123.pkl", folder)
    return folder / "network-snapshot-000123.pkl"


def _archive(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "training-state-000123.pt", "w") as file:
        file.write(GOLDEN / "edm_pickle" / "network-snapshot-000123.pkl", "archive/data.pkl")
    return folder / "training-state-000123.pt"


def _statistics(folder: Path) -> Path:
    save_statistics(folder / "ref.npz", features_to_statistics(_RNG.normal(size=(30, 5))))
    return folder / "ref.npz"


def _edm_reference(folder: Path) -> Path:
    features = _RNG.normal(size=(30, 5))
    np.savez(folder / "ref.npz", mu=features.mean(0), sigma=np.cov(features.T))
    return folder / "ref.npz"


def _reference(folder: Path) -> Any:
    source, extractor = open_store(folder / "clean"), load_extractor("pixels", folder)
    found = reference_from_images(source, extractor, folder / "cache")
    return found.features, vars(found.statistics)


def _features(folder: Path) -> Path:
    for name in ("cache", "clean"):
        shutil.rmtree(folder / name, ignore_errors=True)
    images = [PackedImage(str(i), image.transpose(2, 0, 1), 0, -1) for i, image in enumerate([*_IMAGES] * 4)]
    write_store(folder / "clean", "clean", images, (3, 8, 8), "uint8", (0, 255), ())
    _reference(folder)
    return next((folder / "cache").rglob("features.npy"))


def _read_features(path: Path) -> Any:
    return _reference(next(parent for parent in path.parents if parent.name == "cache").parent)


@_maker
def _text(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


def _job(folder: Path) -> Path:
    _to_go(folder).write(["000000"], torch.zeros(1, 1, 4, 4))
    _to_go(folder).write_job(_JOB)
    return folder / ".job.json"


def _to_go(folder: Path) -> Target:
    return Target(folder, "folder", "png", "uint8", None)


_CONFIG = (
    '[data]\nstore = "digits"\nclean_fraction = 0.1\nsigma = 0.5\n'
    '[net]\npreset = "mlp"\n[train]\nnum_steps = 100\nlr = 1e-3\n'
)
_ANNOTATIONS = "filename,sigma,usable_from\n0.png,0.1,\n1.png,0,0.5\n2.png,0.2,0.3\n"
_SAMPLES = "x,y,sigma\n" + "".join(f"{x},{y},{0.1 + y}\n" for x, y in _RNG.uniform(size=(20, 2)))
_JSON_LINES = "".join(json.dumps({"filename": f"{i}.png", "sigma": i / 10}) + "\n" for i in range(3))
_LOG = "".join(json.dumps({"step": i, "loss": 0.5 / i}) + "\n" for i in range(1, 9))
_RUN = json.dumps(
    {"assay": "0.2.0", "fingerprint": {"data": "a1", "run": "b2"}, "config": {"train": {}}, "net": {}}
)
_JOB = {"seeds": 10, "sample": {"num_steps": 4}}
_LEVELS = (
    "dataset,table,block,sigma,num_clean,num_noisy,level_low,level_high,loss,error,step,last_step,loss_last\n"
    "a,,0,,10,0,0.1,1,0.5,0.01,100,200,0.6\na,,0,0.5,10,90,0.1,1,0.25,0.01,100,200,0.3\n"
)
_EVALUATION = json.dumps({"metric": "FD-pixels", "fd": 2.5, "extractor": "pixels", "num_images": 100})


def _held_out_loss(folder: Path) -> Path:
    arrays = {"index": np.arange(20), "sigma_tn": np.zeros(20), "errors": np.ones((20, 2), np.float32)}
    names = {"model": "a", "held_out": "b", "fingerprint": "c"}
    found = HeldOutLoss(**names, num_dims=64, config=HeldOutConfig(num_bands=2), **arrays)  # type: ignore[arg-type]
    save_held_out_loss(folder / "a.npz", found)
    return folder / "a.npz"


_OUTCOME = Outcome(
    configuration=Configuration(dataset="digits", num_clean=100, noisy=((0.5, 900),), seed=0),
    evaluation=Evaluation.model_validate_json(_EVALUATION),
    train_seconds=1.5,
)


def _results(folder: Path) -> Path:
    found = []
    for level in (None, 0.5):
        for number in (100, 200, 400):
            setting = Configuration(dataset="digits", num_clean=number, noisy=((level, 800),) if level else ())
            distance = 1000 / (number + (400 if level else 0))
            evaluation = _OUTCOME.evaluation.model_copy(update={"fd": distance})
            found.append(_OUTCOME.model_copy(update={"configuration": setting, "evaluation": evaluation}))
    write_outcomes(folder / "results.csv", found)
    return folder / "results.csv"


def _read_annotations(path: Path) -> Any:
    levels = read_noise_levels(path, ["0.png", "1.png", "2.png"])
    for level in levels:
        if isinstance(level, AssayError):
            raise level
    return levels


def _log(path: Path) -> bytes:
    trim_log(path, 5)
    return path.read_bytes()


def _read_table(path: Path) -> Any:
    return [price_rows(found) for found in price_all(path)]


_STORE_FILES = [
    *(f"{name}.npy" for name in "images sigma_tn label names usable_from group blocks sigma_map".split()),
    *("map_index.npy", "meta.json"),
]
FORMATS: list[Format] = [
    *(Format(f"store {file}", _store(f"{file}"), _read_store, True) for file in _STORE_FILES),
    Format("checkpoint", _checkpoint, lambda path: _weights(load_checkpoint(path)), True),
    Format("published model", _published, lambda path: _weights(load_checkpoint(path.parent)), True),
    Format("classifier", _classifier, _read_classifier, True),
    Format("state", _state, _read_state, True),
    Format("EDM pickle", _snapshot, _read_foreign),
    Format("torch archive", _archive, _read_foreign, True),
    Format("ambient-laws weights", _exported("model.safetensors"), _read_foreign),
    Format("ambient-laws config", _exported("config.json"), _read_foreign),
    Format("png", _picture("a.png", _IMAGES[0]), _folder, True),
    Format("png palette", _picture("a.png", _IMAGES[0], "P"), _folder, True),
    Format("png 16-bit grey", _picture("a.png", _IMAGES[0, ..., 0].astype(np.uint16) * 257), _folder, True),
    Format("png 16-bit colour", _files("a.png", {"a.png": _DEEP_PNG}), _folder, True),
    Format("jpeg", _picture("a.jpg", _IMAGES[0]), _folder),
    Format("webp", _picture("a.webp", _IMAGES[0], lossless=True), _folder),
    Format("tiff", _picture("a.tif", _IMAGES[0]), _folder),
    Format("tiff deflate", _picture("a.tif", _IMAGES[0], compression="tiff_adobe_deflate"), _folder),
    Format("tiff float", _tiff(_IMAGES[0].astype(np.float32)), _folder),
    Format("tiff 16-bit", _tiff(_IMAGES[0].astype(np.uint16)), _folder),
    Format("zip", _edm_zip, _raw, True),
    Format("dataset.json", _files("dataset.json", {"a.png": _PNG, "dataset.json": _EDM_LABELS}), _folder),
    Format("npy", _npy, _raw),
    Format("npz", _npz, _raw, True),
    Format("idx", _files("images-idx3", {"images-idx3": _IDX, "labels-idx1": _IDX_LABELS}), _raw),
    Format("idx.gz", _files("a-idx3.gz", {"a-idx3.gz": gzip.compress(_IDX)}), _raw, True),
    Format("cifar tar.gz", lambda folder: _tar(folder / "c.tar.gz", _batches()), _raw, True),
    Format("cifar tar", lambda folder: _tar(folder / "c.tar", _batches()), _raw),
    Format("cifar batch", _files("data_batch_1", _batches()), _folder, named=_parent),
    Format("cifar npm", lambda folder: _tar(folder / "c.tgz", _npm()), _raw, True),
    Format("cifar npm labels", _files("train_lables.json", _npm()), _folder, named=_parent),
    *(
        Format(f"hugging face {file[:10]}", _huggingface(file), _folder, named=_parent)
        for file in ("data-00000-of-00001.arrow", "dataset_info.json", "state.json")
    ),
    *(
        Format(name, _scientific(name), _read_scientific, has_checksum=name.endswith("gz"))
        for name in WRITERS
        if not name.endswith("zarr")
    ),
    Format("a.fits.gz", _scientific("a.fits.gz"), _read_scientific, True),
    Format("a.nii", _scientific("a.nii"), _read_scientific),
    Format("fits keyword", _scientific("a.fits"), partial(_read_scientific, noise="RDNOISE")),
    Format("fits noise image", _noise_image, partial(_read_scientific, noise="ERR")),
    Format("hdf5 levels", _scientific("a.h5"), partial(_read_scientific, noise="levels")),
    Format("npy folder", _npy_image, _folder),
    Format("sigma map npy", _map(), _read_map),
    *(
        Format(name, _scientific(whole, file), _read_scientific, named=lambda path: ".zarr")
        for name, whole, file in (
            ("ome-zarr", "ome.zarr", "zarr.json"),
            ("zarr array", "a.zarr", "images/c/0/0/0"),
            ("zarr group", "a.zarr", "images/zarr.json"),
        )
    ),
    Format("annotations csv", _text("a.csv", _ANNOTATIONS), _read_annotations),
    Format("annotations jsonl", _text("a.jsonl", _JSON_LINES), _read_annotations),
    Format("train toml", _text("a.toml", _CONFIG), lambda path: read_config(read_toml(path), str(path))),
    Format("study toml", _text("study.toml", SPEC), read_study),
    Format("demo toml", _text("study.toml", DEMO.read_text()), read_study),
    Format("run config", _text("config.json", _RUN), read_run),
    Format("metrics.jsonl", _text("metrics.jsonl", _LOG), _log),
    Format("levels.csv", _text("levels.csv", _LEVELS), lambda path: [vars(each) for each in read_levels(path)]),
    Format("stage json", _text("samples-1.json", _EVALUATION), read_measures),
    Format("job json", _job, lambda path: _to_go(path.parent).check_job(_JOB), named=_parent),
    Format("results.csv", _text("results.csv", PAPER.read_text()), _read_table),
    Format("results.csv of a study", _results, _read_table),
    Format("outcome json", _text("a.json", _OUTCOME.model_dump_json()), load_outcome),
    Format("evaluation json", _text("a.json", _EVALUATION), load_outcome),
    Format("held-out loss npz", _held_out_loss, lambda path: vars(load_held_out_loss(path)), True),
    Format("statistics npz", _statistics, lambda path: vars(load_statistics(path)), True),
    Format("EDM reference npz", _edm_reference, lambda path: vars(load_statistics(path)), True),
    Format("features", _features, _read_features, True),
    Format("samples csv", _text("a.csv", _SAMPLES), read_samples),
]
