"""What is packed is what is read, for every format, depth and dtype."""

import gzip
import io
import json
import pickle
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from typer.testing import CliRunner

from assay.cli import app
from assay.data import open_store, part, simulate, usable
from assay.data.decode import decode_image
from assay.data.formats.pictures import CLASSES
from assay.data.known import get
from assay.data.pack import PackConfig, pack
from assay.data.readers import read_any
from assay.data.spec import Level, SourceSpec, read_levels
from assay.data.store import PackedImage, Store, write_store
from assay.errors import AssayError
from tests.errors import rejected
from tests.stores import grey

FORMATS = ["npy", "npz", "channels first", "png", "tiff", "webp", "zip", "idx"]


def png(pixels: np.ndarray) -> bytes:
    """An encoder apart from Pillow's, which writes no 16-bit colour."""
    height, width, channels = pixels.shape
    rows = np.ascontiguousarray(pixels.astype(f">u{pixels.itemsize}")).view(np.uint8).reshape(height, -1)
    data = b"".join(b"\0" + row.tobytes() for row in rows)

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    colour = {1: 0, 2: 4, 3: 2, 4: 6}[channels]
    header = struct.pack(">IIBBBBB", width, height, 8 * pixels.itemsize, colour, 0, 0, 0)
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def idx(values: np.ndarray, code: int = 8) -> bytes:
    header = bytes([0, 0, code, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    return header + values.astype(values.dtype.newbyteorder(">")).tobytes()


def write(kind: str, images: np.ndarray, folder: Path) -> Path:
    """Save images (N, H, W, C) in a format; returns what to pack."""
    match kind:
        case "npy" | "channels first":
            np.save(folder / "a.npy", images if kind == "npy" else images.transpose(0, 3, 1, 2))
            return folder / "a.npy"
        case "npz":
            np.savez(folder / "a.npz", pictures=images)
            return folder / "a.npz"
        case "idx":
            code = {"uint8": 8, "float32": 13}[str(images.dtype)]
            data = idx(images if images.shape[3] > 1 else images[..., 0], code)
            (folder / "a-idx3.gz").write_bytes(gzip.compress(data))
            return folder / "a-idx3.gz"
        case "zip":
            with zipfile.ZipFile(folder / "a.zip", "w") as archive:
                for i, image in enumerate(images):
                    archive.writestr(f"{i:05d}.png", png(image))
            return folder / "a.zip"
    for i, image in enumerate(images):
        match kind:
            case "png":
                (folder / f"{i:05d}.png").write_bytes(png(image))
            case "tiff":
                tifffile.imwrite(folder / f"{i:05d}.tiff", image.squeeze(2) if image.shape[2] == 1 else image)
            case "webp":
                Image.fromarray(image).save(folder / f"{i:05d}.webp", lossless=True)
    return folder


@st.composite
def stacks(draw: st.DrawFn) -> tuple[str, np.ndarray]:
    kind = draw(st.sampled_from(FORMATS))
    shallow = ["uint8", "uint16"]
    dtypes = {"webp": ["uint8"], "idx": ["uint8", "float32"], "png": shallow, "zip": shallow}
    dtype = draw(st.sampled_from(dtypes.get(kind, ["uint8", "uint16", "float32"])))
    channels = 3 if kind == "webp" else draw(st.sampled_from([1, 3]))
    # Sides of 5 and more, so that no side can be taken for the channels.
    shape = (draw(st.integers(1, 4)), draw(st.integers(5, 9)), draw(st.integers(5, 9)), channels)
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    if dtype == "float32":
        return kind, generator.normal(0.5, 1, shape).astype(np.float32)
    return kind, generator.integers(0, np.iinfo(dtype).max, shape, dtype=dtype, endpoint=True)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    stacks(), st.sampled_from([None, "float16", "float32"]), st.just(0.0) | st.floats(2.0**-10, 0.25, width=32)
)
def test_what_is_packed_is_what_is_read(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[str, np.ndarray], dtype: str | None, sigma: float
) -> None:
    kind, images = case
    folder = tmp_path_factory.mktemp("pack")
    (folder / "in").mkdir()
    source = write(kind, images, folder / "in")
    low, high = (-0.25, 1.5) if images.dtype == np.float32 else (0.0, float(np.iinfo(images.dtype).max))
    value_range = (low, high) if images.dtype == np.float32 else None
    spec = SourceSpec(path=str(source), range=value_range, sigma=sigma, scaled=True)
    report = pack(spec, folder / "store", PackConfig(dtype=dtype))
    store = open_store(folder / "store")
    expected = (images.astype(np.float64).transpose(0, 3, 1, 2) - low) * 2 / (high - low) - 1
    assert store.meta.dtype == (dtype or ("uint8" if images.dtype == np.uint8 else "float32"))
    tolerance = {"uint8": 3e-7, "float32": 3e-7, "float16": 2.0**-11}[store.meta.dtype]
    read = store.read(torch.arange(len(images))).numpy()
    np.testing.assert_allclose(read, expected, rtol=tolerance, atol=tolerance)
    assert store.image_shape == expected.shape[1:]
    assert store.sigma_tn.tolist() == [sigma] * len(images)
    assert store.label.tolist() == [-1] * len(images) and store.num_classes == 0
    assert any("8-bit" in warning for warning in report.warnings) == (images.dtype == np.uint8 and sigma > 0)
    store.verify()


def saved(image: Any, form: str, **options: Any) -> bytes:
    """A picture as the bytes of a file."""
    buffer = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(buffer, form, **options)
    return buffer.getvalue()


def test_transparency_is_flattened_on_white() -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (4, 5, 4), dtype=np.uint8)
    expected = np.rint(pixels[..., :3] * (pixels[..., 3:] / 255) + 255 - 255 * (pixels[..., 3:] / 255))
    for suffix in ("png", "tiff"):
        np.testing.assert_array_equal(decode_image(saved(pixels, suffix), "a"), expected)
    for deep in (pixels.astype(np.uint16) * 250, pixels[..., 2:].astype(np.uint16) * 250):
        share = deep[..., -1:] / 65535
        wanted = np.rint(deep[..., :-1] * share + 65535 * (1 - share))
        np.testing.assert_array_equal(decode_image(png(deep), "a"), wanted)
    grey = decode_image(saved(np.array([[7, 90], [90, 7]], dtype=np.uint8), "PNG", transparency=7), "a")
    np.testing.assert_array_equal(grey[..., 0], [[255, 90], [90, 255]])
    palette = Image.fromarray(np.array([[0, 1], [1, 0]], dtype=np.uint8), mode="L").convert("P")
    palette.putpalette([10, 20, 30, 40, 50, 60])
    found = decode_image(saved(palette, "PNG", transparency=1), "a")[0]
    np.testing.assert_array_equal(found, [[10, 20, 30], [255, 255, 255]])


def test_other_modes_and_layouts() -> None:
    generator = np.random.default_rng(2)
    colour = Image.fromarray(generator.integers(0, 256, (16, 16, 3), dtype=np.uint8))
    one_bit, palette = colour.convert("1"), colour.convert("L").convert("P")
    for image, form in ((colour, "JPEG"), (colour.convert("CMYK"), "JPEG"), (one_bit, "PNG"), (palette, "PNG")):
        data = saved(image, form)
        wanted = np.asarray(Image.open(io.BytesIO(data)).convert("L" if image.mode in "1P" else "RGB"))
        np.testing.assert_array_equal(decode_image(data, "a").squeeze(), wanted)
    exif = Image.Exif()
    exif[0x112] = 6  # to be turned to the right
    turned, plain = (decode_image(saved(colour, "JPEG", **kind), "a") for kind in ({"exif": exif}, {}))
    np.testing.assert_array_equal(turned, np.rot90(plain, -1))
    wide = np.array([[0, 65535], [7, 300]], dtype=np.int32)
    assert decode_image(saved(wide, "TIFF"), "a").dtype == np.uint16
    tifffile.imwrite(signed := io.BytesIO(), np.array([[-1000, 2000]], np.int16))  # Hounsfield units
    assert decode_image(signed.getvalue(), "a").squeeze().tolist() == [-1000.0, 2000.0]
    pixels, buffer = generator.normal(size=(3, 6, 5)).astype(np.float32), io.BytesIO()
    tifffile.imwrite(buffer, pixels, photometric="rgb", planarconfig="separate")
    np.testing.assert_array_equal(decode_image(buffer.getvalue(), "a"), pixels.transpose(1, 2, 0))


def packed(source: Path, target: Path, **settings: Any) -> Store:
    """The store of a source, packed with settings of `PackConfig`."""
    return pack(read_any(str(source)), target, PackConfig(**settings)).store


def test_class_folders(tmp_path: Path) -> None:
    for name, value in (("dog/deep/b.png", 1), ("cat/a.png", 2), ("dog/a.png", 3), ("loose.png", 4)):
        grey(tmp_path / "in" / name, value)
    store = packed(tmp_path / "in", tmp_path / "store", classes=True)
    assert store.class_names == ("cat", "dog")
    found = dict(zip(store.source_names(range(4)), store.label.tolist(), strict=True))
    assert found == {"cat/a.png": 0, "dog/a.png": 1, "dog/deep/b.png": 1, "loose.png": -1}


@pytest.mark.parametrize("zipped", [True, False])
def test_edm_labels(tmp_path: Path, zipped: bool) -> None:
    files = {"00000/img0.png": 2, "00000/img1.png": 0, "00001/img2.png": 1}
    for value, name in enumerate(files):
        grey(tmp_path / "in" / name, value)
    (tmp_path / "in" / "dataset.json").write_text(json.dumps({"labels": list(files.items())}))
    source = tmp_path / "in"
    if zipped:
        with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
            for file in source.rglob("*.*"):
                archive.write(file, file.relative_to(source).as_posix())
        source = tmp_path / "a.zip"
    store = packed(source, tmp_path / "store", classes=True)
    assert store.label.tolist() == [2, 0, 1] and store.class_names == ("0", "1", "2")
    assert store.source_names([0, 2]) == ["00000/img0.png", "00001/img2.png"]


def test_npz_columns_and_idx_labels(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (4, 6, 6), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", x=images, labels=np.array([1, 0, -1, 1]), sigma_tn=np.array([0, 0.5, 0.25, 0]))
    store = packed(tmp_path / "a.npz", tmp_path / "1", classes=True)
    assert store.label.tolist() == [1, 0, -1, 1] and store.sigma_tn.tolist() == [0, 0.5, 0.25, 0]
    assert store.meta.num_clean == 2
    (tmp_path / "t-images-idx3-ubyte").write_bytes(idx(images))
    (tmp_path / "t-labels-idx1-ubyte").write_bytes(idx(np.array([2, 1, 0, 1], np.uint8)))
    store = packed(tmp_path / "t-images-idx3-ubyte", tmp_path / "2", classes=True)
    assert store.label.tolist() == [2, 1, 0, 1]


class Python2Pickler(pickle._Pickler):  # type: ignore[name-defined]
    """Writes bytes as the strings of Python 2, as the official archive has them."""

    def save_bytes(self, value: bytes) -> None:
        self.write(pickle.BINSTRING + struct.pack("<i", len(value)) + value)
        self.memoize(value)

    dispatch = pickle._Pickler.dispatch | {bytes: save_bytes}


def cifar_batches() -> dict[str, tuple[np.ndarray, list[int]]]:
    generator = np.random.default_rng(0)
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    return {
        n: (generator.integers(0, 256, (3, 32, 32, 3), dtype=np.uint8), generator.integers(0, 10, 3).tolist())
        for n in names
    }


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("kind", ["python archive", "python folder", "npm package"])
def test_cifar10(tmp_path: Path, kind: str, split: str) -> None:
    batches = cifar_batches()
    source = tmp_path / "in"
    source.mkdir()
    for name, (images, labels) in batches.items():
        if kind == "npm package":
            Image.fromarray(images.reshape(3, 1024, 3)).save(source / f"{name}.png")
        else:
            rows = images.transpose(0, 3, 1, 2).reshape(3, 3072)
            buffer = io.BytesIO()
            Python2Pickler(buffer, protocol=2).dump({b"data": rows, b"labels": labels})
            (source / name).write_bytes(buffer.getvalue().replace(b"numpy._core", b"numpy.core"))
    if kind == "npm package":
        train = [label for name, (_, labels) in batches.items() if name != "test_batch" for label in labels]
        (source / "train_lables.json").write_text(json.dumps(train))
        (source / "test_lables.json").write_text(json.dumps(batches["test_batch"][1]))
    if kind == "python archive":
        with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
            archive.add(source, "cifar-10-batches-py")
        source = tmp_path / "a.tar.gz"
    wanted = [batch for name, batch in batches.items() if (name == "test_batch") == (split == "test")]
    store = pack(read_any(str(source), split=split), tmp_path / "store", PackConfig(classes=True)).store
    images = np.concatenate([images for images, _ in wanted]).transpose(0, 3, 1, 2)
    np.testing.assert_allclose(store.read(torch.arange(len(images))), images / 127.5 - 1, atol=3e-7)
    assert store.label.tolist() == [label for _, labels in wanted for label in labels]
    assert store.class_names == CLASSES


def test_huggingface_dataset(tmp_path: Path) -> None:
    import datasets

    images = np.random.default_rng(0).integers(0, 256, (4, 6, 6, 3), dtype=np.uint8)
    kinds = {"img": datasets.Image(), "label": datasets.ClassLabel(names=["no", "yes"])}
    features = datasets.Features({**kinds, "sigma_tn": datasets.Value("float32")})
    pictures = [Image.fromarray(image) for image in images]
    columns = {"img": pictures, "label": [1, 0, 0, 1], "sigma_tn": [0.0, 0.25, 0.5, 0.0]}
    datasets.Dataset.from_dict(columns, features).save_to_disk(tmp_path / "hf")
    for source in (str(tmp_path / "hf"), f"hf:{tmp_path / 'hf'}"):
        raw = read_any(source)
        assert raw.class_names == ("no", "yes") and np.asarray(raw.label).tolist() == [1, 0, 0, 1]
        np.testing.assert_array_equal(np.stack([raw.load(i) for i in range(4)]), images)
        levels = [raw.noise(i) for i in range(4)]
        assert [level.in_range(0, 255)[0] for level in levels] == [0, 0.25, 0.5, 0]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("a.csv", "filename,sigma\nx/a.png,0.5\nb.png, 0\n"),
        ("a.csv", "sigma,other,filename\n0.5,1,x/a.png\n0,2,b.png\n"),
        ("a.csv", "\ufefffilename,sigma_tn\r\na.png,0.5\r\nb.png,0\r\n"),
        ("a.jsonl", '{"filename": "x/a.png", "sigma": 0.5}\n\n{"filename": "b.png", "sigma": 0}\n'),
    ],
)
def test_levels_from_a_file(tmp_path: Path, file: str, text: str) -> None:
    (tmp_path / file).write_text(text)
    found = read_levels(tmp_path / file, ["x/a.png", "b.png"], scaled=True)
    assert found == [Level(0.5, None, True, True), Level(0, None, True, True)]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        (
            "annotations.jsonl",
            '{"filename": "a.png", "sigma_min": 0.5, "sigma_max": 0}\n{"filename": "b.png", "annotation": 0}\n'
            '{"filename": "c.png", "sigma": 0.3, "usable_from": 0.5}',
        ),
        ("a.csv", "filename,sigma,usable_from\na.png,0,0.5\nb.png,0,\nc.png,0.3,0.5\n"),
    ],
)
def test_annotated_images_are_raised_and_not_only_relabelled(tmp_path: Path, file: str, text: str) -> None:
    """ "Usable from 0.5" is no noise: the store keeps the pixels, and training gets them with noise of 0.5."""
    for name in "abc":
        grey(tmp_path / f"in/{name}.png", 9)
    (tmp_path / file).write_text(text)
    spec = SourceSpec(path=str(tmp_path / "in"), levels=tmp_path / file, scaled=True)
    store = pack(spec, tmp_path / "store").store
    assert store.sigma_tn.tolist() == [0, 0, pytest.approx(0.3)] and store.usable_from.tolist() == [0.5, 0, 0.5]
    assert store.meta.num_clean == 1 and store.meta.dtype == "uint8"
    every = torch.arange(3)
    assert store.read(every).unique().tolist() == pytest.approx([9 / 127.5 - 1])
    view = usable(store, seed=1)
    assert view.sigma_tn.tolist() == [0.5, 0, 0.5] and usable(view) is view
    added = [image - store.read(every)[i] for i, image in enumerate(view.read(every))]
    assert not bool(added[1].any()) and bool(added[0].any()) and bool(added[2].any())
    assert part(store, noisy=0).index.tolist() == [1]  # an image that is usable from 0.5 is not clean
    with pytest.raises(ValueError, match="noisy already"):
        simulate(store, 0.5, 0.2)
    shown = CliRunner().invoke(app, ["data", "show", str(tmp_path / "store")]).output
    assert "sigma_tn" in shown and "usable from" in shown and "2 images are raised" in shown


def test_stores_without_annotations_keep_their_fingerprint(tmp_path: Path) -> None:
    one = PackedImage("a", np.zeros((1, 2, 2), np.uint8), 0.0, 0, 0.0)
    store = write_store(tmp_path / "store", "one", [one], (1, 2, 2), "uint8", (0, 255), ("x",))
    assert sorted(store.meta.checksums) == [f"{n}.npy" for n in "blocks images label names sigma_tn".split()]
    # As version 0.1 gives it.
    assert store.fingerprint == "5e44076ad2a962c0a0e38c5c49194727fbca254f3107dc21f2a0890c960d575b"
    bad = PackedImage("a", np.zeros((1, 2, 2), np.float32), 0.3, -1, 0.2)
    with pytest.raises(AssayError):
        write_store(tmp_path / "bad", "bad", [bad], (1, 2, 2), "float32", (-1, 1), ())


def test_crop_is_the_centre_and_resize_is_lanczos(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (12, 20, 3), dtype=np.uint8)
    (tmp_path / "in").mkdir()
    Image.fromarray(pixels).save(tmp_path / "in/a.png")
    noisy = SourceSpec(path=str(tmp_path / "in"), sigma=0.1, scaled=True)
    store = pack(noisy, tmp_path / "crop", PackConfig(size=(5, 8), fit="crop")).store
    expected = pixels[3:8, 6:14].transpose(2, 0, 1) / 127.5 - 1
    np.testing.assert_allclose(store.read(torch.tensor([0]))[0], expected, atol=3e-7)
    store = packed(tmp_path / "in", tmp_path / "resize", size=(6, 6), fit="resize")
    middle = Image.fromarray(pixels[:, 4:16]).resize((6, 6), Image.Resampling.LANCZOS)  # as EDM's tool does
    expected = np.asarray(middle).transpose(2, 0, 1) / 127.5 - 1
    difference = np.abs(store.read(torch.tensor([0]))[0].numpy() - expected)
    assert difference.max() <= 1.01 / 127.5  # Pillow's 8-bit resize rounds between the two passes


def test_grey_and_colour(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    (tmp_path / "in").mkdir()
    Image.fromarray(pixels).save(tmp_path / "in/a.png")
    grey(tmp_path / "in/b.png", 200)
    plain = packed(tmp_path / "in", tmp_path / "grey", colour="grey")
    luma = np.rint(0.299 * pixels[..., 0] + 0.587 * pixels[..., 1] + 0.114 * pixels[..., 2])
    np.testing.assert_allclose(plain.read(torch.tensor([0]))[0, 0], luma / 127.5 - 1, atol=3e-7)
    colour = packed(tmp_path / "in", tmp_path / "colour", colour="colour")
    assert colour.image_shape == (3, 4, 4)
    assert colour.read(torch.tensor([1])).unique().tolist() == pytest.approx([200 / 127.5 - 1])


def test_deep_and_shallow_files_share_a_float_store(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.png").write_bytes(png(np.full((4, 4, 1), 13107, dtype=np.uint16)))
    grey(tmp_path / "in/b.png", 51)
    for dtype in ("float32", "uint8"):
        store = packed(tmp_path / "in", tmp_path / dtype, dtype=dtype)
        assert store.read(torch.arange(2)).unique().tolist() == [pytest.approx(-0.6)]  # 0.2 of both ranges
    grey(tmp_path / "in/c.png", 255)
    told, *_ = pack(read_any(str(tmp_path / "in")), tmp_path / "told", PackConfig(dtype="float32")).warnings
    assert "all uint16 pixels of in lie between 1.311e+04 and" in told and "0,4095" not in told


def test_fingerprint_follows_the_content(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (3, 5, 5), dtype=np.uint8)

    def stored(name: str, change: int = 0, sigma: float = 0.0, **settings: Any) -> str:
        np.save(tmp_path / "a.npy", images + np.uint8(change))
        spec = SourceSpec(path=str(tmp_path / "a.npy"), sigma=sigma, scaled=True, **settings)
        return pack(spec, tmp_path / name).store.fingerprint

    prints = [stored("1"), stored("2", change=1), stored("3", sigma=0.5), stored("4", range=(0, 200))]
    assert len(set(prints)) == 4
    assert stored("5") == prints[0]


def test_known_data_sets(tmp_path: Path) -> None:
    from sklearn.datasets import load_digits

    for option in ({"split": "test"}, {"archive": Path("x")}):  # they have no halves and no archive
        with rejected("split"):
            get("digits", tmp_path / "store", **option)  # type: ignore[arg-type]
    digits = get("digits", tmp_path / "digits").store
    np.testing.assert_allclose(digits.read(torch.arange(1797))[:, 0], load_digits().images / 8 - 1, atol=3e-7)
    assert digits.label.tolist() == load_digits().target.tolist()
    fashion = get("fashion-mnist", tmp_path / "fashion").store
    assert len(fashion) == 10_000 and fashion.image_shape == (1, 28, 28)
    assert fashion.label.bincount().tolist() == [1000] * 10 and fashion.class_names[9] == "ankle boot"
    mean = ((fashion.read(torch.arange(10_000)) + 1) / 2).mean().item()
    assert mean == pytest.approx(0.2868, abs=1e-4)  # the published mean of the test half


def test_a_part_of_a_known_data_set(tmp_path: Path) -> None:
    whole = get("fashion-mnist", tmp_path / "whole").store
    kept = ("sandal", "bag", "dress")
    part = get("fashion-mnist", tmp_path / "part", size=7, classes=kept, num_images=500).store
    assert part.class_names == kept and part.image_shape == (1, 7, 7)
    chosen = torch.nonzero(torch.isin(whole.label, torch.tensor([5, 8, 3])))[:500, 0]
    assert [(5, 8, 3)[label] for label in part.label.tolist()] == whole.label[chosen].tolist()
    means = torch.nn.functional.avg_pool2d(whole.read(chosen), 4)  # Pillow's filter is near, not equal
    assert (part.read(torch.arange(500)) - means).abs().mean() < 0.05
    with rejected("classes"):
        get("fashion-mnist", tmp_path / "shoe", classes=("shoe",))
    with rejected("num_images"):
        get("fashion-mnist", tmp_path / "many", classes=("bag",), num_images=1001)


def test_known_data_with_another_content_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(np.zeros((2, 28, 28), np.uint8))))
    with rejected(path=tmp_path):
        get("fashion-mnist", tmp_path / "store", archive=tmp_path)
    with rejected("source", tmp_path):
        get("fashion-mnist", tmp_path / "store", split="train", archive=tmp_path)
    assert not (tmp_path / "store").exists()
