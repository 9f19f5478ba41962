"""The names for notebooks: their examples run, and arrays become the same images as files."""

import ast
import doctest
import importlib
import inspect
import os
import re
import signal
import subprocess
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import assay
import assay.model
from assay.checkpoint import load_checkpoint
from assay.data.units import Stabilised
from assay.errors import AssayError
from assay.metrics.weights import FeatureNetwork
from assay.nets import NetConfig, measure_cost
from assay.noise import LogNormal
from assay.registry import own_code
from assay.sample import Euler, SampleConfig
from assay.train import OwnLoss
from assay.train.config import TrainConfig
from tests.errors import fault, rejected

STUDY = """
name = "mine"
[data]
store = "stores/mine"
[net]
preset = "mlp"
width = 16
num_blocks = 1
[train]
num_steps = 3
batch_size = 16
[evaluate]
extractor = "pixels"
num_images = 60
[grid]
clean_fractions = [1, 0.5]
sigmas = [0.3]
baselines = ["clean_only"]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_examples_run(folder: Path) -> None:
    """Every public name has an example, and all of them run; the first, a whole session, in fifteen lines."""
    assert sum(line.startswith(">>>") for line in (assay.model.__doc__ or "").splitlines()) <= 15
    (folder / "study.toml").write_text(STUDY)
    assay.from_arrays(np.random.default_rng(0).uniform(-1, 1, (200, 8, 8)), name="mine").save("stores/mine")
    names = {"np": np, "torch": torch, "assay": assay}
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for public in [*assay.__all__, "model"]:
        finder = doctest.DocTestFinder(recurse=public != "model")  # of the module, its own docstring
        found = [test for test in finder.find(getattr(assay, public), public, globs=names) if test.examples]
        assert found, f"assay.{public} has no example"
        for test in found:
            assert runner.run(test).failed == 0, test.name


def test_every_name_exists_has_a_docstring_and_loads_lazily() -> None:
    for name in assay.__all__:
        assert inspect.getdoc(getattr(assay, name)), name
        assert name in dir(assay)
    with pytest.raises(AttributeError, match="from_arrays"):
        assay.fourier  # noqa: B018
    code = "import assay, sys; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_pictures_and_progress(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    images = assay.from_arrays(np.random.default_rng(0).uniform(-1, 1, (60, 8, 8)), np.repeat([0, 0.3], 30))
    assert images.plot().size == assay.part(images).plot().size
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    model = assay.fit(images, num_steps=2, batch_size=16, net={"preset": "mlp", "width": 16})
    assert capsys.readouterr().out.rstrip(" \n").endswith("training: 100%, 2 of 2, 0 s left")
    assert model.plot(4, num_steps=2).size < model.plot(9, num_steps=2).size  # grids of 2 x 2 and 3 x 3


@given(
    low=st.floats(-100, 100),
    width=st.floats(0.1, 1000),
    sigma=st.just(0.0) | st.floats(0.01, 50),
    shape=st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4)),
)
def test_arrays_are_scaled_with_their_noise(
    low: float, width: float, sigma: float, shape: tuple[int, int, int, int]
) -> None:
    images = np.random.default_rng(0).uniform(low, low + width, shape)
    source = assay.from_arrays(images, sigma, value_range=(low, low + width))
    assert len(source) == shape[0] and source.image_shape == shape[1:]
    back = (source.read(torch.arange(shape[0])).double().numpy() + 1) / 2 * width + low
    assert np.abs(back - images).max() < 1e-5 * width
    assert np.allclose(source.sigma_tn.numpy(), 2 * sigma / width, rtol=1e-6)


def test_arrays_saved_as_a_store_are_the_same_source(tmp_path: Path) -> None:
    images, sigma = np.random.default_rng(0).normal(0, 1, (30, 5, 4)), np.linspace(0, 1, 30)
    source = assay.from_arrays(images, sigma, np.arange(30) % 3)
    store = source.save(tmp_path / "store")
    index = torch.arange(30)
    assert torch.equal(store.read(index), source.read(index))
    assert torch.equal(store.sigma_tn, source.sigma_tn) and torch.equal(store.label, source.label)
    assert store.class_names == source.class_names == ("0", "1", "2")


def test_a_kept_run_is_resumed_and_loaded_again(tmp_path: Path) -> None:
    images = assay.from_arrays(np.random.default_rng(0).uniform(-1, 1, (64, 8, 8)))
    settings = {"num_steps": 3, "batch_size": 16, "net": {"preset": "mlp", "width": 16, "num_blocks": 1}}
    model = assay.fit(images, tmp_path / "run", progress=False, **settings)
    again = assay.load(tmp_path / "run")
    assert torch.equal(model.sample(3, seed=5), again.sample(5, seed=3)[2:])
    assert "mlp" in repr(again) and model.plot(4).size[0] > 8
    x_tn = images.read(torch.arange(2))
    expected = again.denoiser(x_tn, torch.full((2,), 0.3))
    assert torch.equal(again.denoise(x_tn, 0.3), expected.detach())
    found = again.evaluate(images, num_images=40, extractor="pixels", cache=tmp_path / "cache", num_steps=3)
    assert found.fd > 0 and found.num_images == 40


def test_the_page_on_own_parts_runs(folder: Path) -> None:
    page = (Path(__file__).parent.parent / "docs/howto/own_parts.md").read_text()
    names: dict[str, Any] = {"__name__": "own_parts"}
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    for block in blocks:
        exec(block, names)
    assert names["model"].checkpoint.config.kind == "mlp"
    assert assay.load("tiny-kind.safetensors").checkpoint.config.width == 8
    images, tiny = names["images"], names["Tiny"]
    assert "it was trained with" in str(fault(lambda: assay.load("tiny.safetensors", net=tiny(8))).cure)
    with pytest.raises(AssayError) as caught:  # a module that does not give an image
        assay.fit(images, net=nn.Flatten(), num_steps=2, batch_size=16, progress=False)
    assert caught.value.key == "net" or caught.value.path == "Flatten"
    monkey = assay.load("tiny.safetensors", net=tiny(16))
    assert repr(monkey).startswith("<tiny: passed for 1 x 8 x 8")
    code = "import assay; assay.load('tiny.safetensors')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "the network is a Tiny of your own" in done.stderr
    # What the page defines, as a package with an entry point: another process samples its network.
    tree = ast.parse("\n".join(blocks))
    tree.body = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom | ast.ClassDef)]
    (folder / "mine.py").write_text(ast.unparse(tree))
    (folder / "mine-1.dist-info").mkdir()
    (folder / "mine-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    (folder / "mine-1.dist-info/entry_points.txt").write_text("[assay]\nmine = mine\n")
    paths = os.pathsep.join([str(folder), *sys.path])
    sampled = "print(assay.load('tiny-kind.safetensors').sample(1).shape)"
    drafted = "from pathlib import Path; from assay.study.sizing import draft_study as draft; "
    drafted += "print(draft(Path('digits'), 100, [0.2], 1, 'tiny'))"
    for module, code, told in (
        ("", sampled, "torch.Size([1, 1, 8, 8])"),
        ("", drafted, 'kind = "tiny"'),
        ("1 / 0", sampled, "mine: its entry point mine = mine"),
    ):
        (folder / "mine.py").open("a").write(f"\n{module}\n")
        code = f"import assay; {code}"
        environment = os.environ | {"PYTHONPATH": paths}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
        assert told in done.stdout + done.stderr, done.stderr


class Buffers(nn.Module):
    """Integers, booleans, infinities and a weight that is used twice, as networks have them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 1, 3, padding=1), nn.BatchNorm2d(1)
        self.last = nn.Conv2d(1, 1, 3, padding=1)
        self.last.weight = self.first.weight
        self.register_buffer("place", torch.arange(8))
        self.register_buffer("keep", torch.arange(8) > 1)
        self.register_buffer("mask", torch.full((8, 8), -torch.inf).triu(1))
        self.register_buffer("unsaved", torch.ones(8), persistent=False)
        self.plain = torch.ones(8)

    def forward(self, x: Tensor, c_noise: Tensor, *others: Tensor | None) -> Tensor:
        x = self.last(self.norm(self.first(x))) @ self.mask.softmax(1)
        return x + 0.1 * self.place * self.keep * self.unsaved * self.plain


class BuffersConfig(NetConfig):
    kind: Literal["buffers"] = "buffers"

    def build(self) -> nn.Module:
        return Buffers()


@pytest.mark.parametrize("net", [Buffers, lambda: BuffersConfig])
def test_a_network_with_any_buffers_is_saved_and_loaded(net: Any, folder: Path) -> None:
    images = assay.from_arrays(np.random.default_rng(0).random((32, 8, 8)), value_range=(0, 1))
    model = assay.fit(images, "run", net=net(), num_steps=3, batch_size=16, progress=False)
    again = assay.load(model.save("a.safetensors"), net=net() if net is Buffers else None)
    assert torch.equal(again.sample(2, num_steps=3), model.sample(2, num_steps=3))
    state = {key.split(".", 1)[1]: value for key, value in again.denoiser.state_dict().items()}
    found = {key.removeprefix("module."): value for key, value in state.items()}
    assert found["norm.num_batches_tracked"] == 3 and found["norm.running_var"] != 1
    assert found["keep"].dtype == torch.bool and found["mask"].isinf().sum() == 28


def test_slips_with_own_parts_are_named(folder: Path) -> None:
    images = assay.from_arrays(
        np.random.default_rng(0).random((32, 8, 8)), label=np.arange(32) % 2, value_range=(0, 1)
    )
    nothing = type("Nothing", (OwnLoss,), {"kind": "nothing", "__call__": lambda *_: None})
    needy = type("Needy", (LogNormal,), {"kind": "needy", "__init__": lambda self, a: None})
    pair = type("Pair", (Buffers,), {"forward": lambda self, x, c_noise: (self.first(x), 1)})
    blind = type("Blind", (Buffers,), {"forward": lambda self, x: self.first(x)})
    without_class = type("Plain", (Buffers,), {"forward": lambda self, x, c_noise: self.first(x)})
    for settings, key in (
        ({"net": Buffers}, "net"),
        ({"net": BuffersConfig(image_shape=(1, 8, 8))}, "net"),
        ({"net": pair()}, "net"),
        ({"net": blind()}, "net"),
        ({"net": without_class(), "class_conditional": True}, "train.class_conditional"),
        ({"loss": nothing}, "train.loss"),
        ({"loss": nothing()}, "train.loss"),
        ({"loss": nothing, "weight": "x_0"}, "train.weight"),
        ({"noise": LogNormal()}, "train.noise"),
        ({"noise": type("Mine", (LogNormal,), {"kind": "mine"}), "sigma_mean": -0.5}, "train.sigma_mean"),
        ({"noise": needy}, "train.noise"),
    ):
        with rejected(key):
            assay.fit(images, num_steps=1, batch_size=8, progress=False, **settings)


def _slip(name: str, in_list: bool = False, **methods: Any) -> type[Buffers]:
    """A network with a mistake."""

    def init(self: Any) -> None:
        Buffers.__init__(self)
        if in_list:
            self.lost = [[nn.Conv2d(1, 1, 1)]]

    return type(name, (Buffers,), {"__init__": init, **methods})


@pytest.mark.parametrize("by_kind", [False, True])
@pytest.mark.parametrize(
    ("slip", "words"),
    [
        (_slip("Blind", forward=lambda self, x: self.first(x)), "does not take the noise level"),
        (_slip("Small", forward=lambda self, x, c: self.first(x)[..., 1:]), "does not give images as it gets"),
        (
            _slip("Mean", forward=lambda self, x, c: self.first(x).mean(0, True)),
            "does not give images as it gets",
        ),
        (_slip("Pair", forward=lambda self, x, c: (self.first(x), 1)), "does not give images as it gets"),
        (_slip("Fails", forward=lambda self, x, c: self.fist(x)), "no attribute 'fist'"),
        (_slip("Frozen", parameters=lambda self, recurse=True: iter(())), "no weights to train"),
        (_slip("Lost", in_list=True), "lost has layers that torch does not train or save"),
    ],
)
def test_networks_are_tried_before_they_train(
    slip: type[Buffers], words: str, by_kind: bool, folder: Path
) -> None:
    images = assay.from_arrays(np.random.default_rng(0).random((32, 8, 8)), value_range=(0, 1))
    kind = f"slip {slip.__name__}"
    namespace = {"kind": kind, "__annotations__": {"kind": Literal[kind]}, "build": lambda self: slip()}  # type: ignore[valid-type]
    config = type("Config", (NetConfig,), {**namespace, "__module__": __name__})
    with pytest.raises(AssayError, match=words) as caught:
        assay.fit(images, net=config if by_kind else slip(), num_steps=1, batch_size=8, progress=False)
    assert caught.value.key == "net"


def test_a_network_may_compute_with_numbers_when_it_is_made(folder: Path) -> None:
    images = assay.from_arrays(np.random.default_rng(0).random((32, 8, 8)), value_range=(0, 1))

    class Rates(NetConfig):
        kind: Literal["rates"]  # a default is not needed

        def build(self) -> nn.Module:
            return _slip("Rated", rates=[rate.item() for rate in torch.linspace(0, 0.1, 4)])()

    model = assay.fit(images, net=Rates, num_steps=1, batch_size=8, progress=False)
    again = assay.load(model.save("rates.safetensors"))
    assert torch.equal(again.sample(2, num_steps=3), model.sample(2, num_steps=3))
    assert measure_cost(again.checkpoint.config).num_parameters == sum(
        x.numel() for x in Buffers().parameters()
    )
    with pytest.raises(AssayError, match="workers build their network themselves"):
        assay.run_study(images, net=Buffers())  # type: ignore[arg-type]


def test_code_that_cannot_be_read_is_told(folder: Path) -> None:
    images = assay.from_arrays(np.random.default_rng(0).random((32, 8, 8)), value_range=(0, 1))
    typed: dict[str, Any] = {"__name__": "__main__", "Buffers": Buffers}
    exec("class Typed(Buffers): pass", typed)
    with pytest.warns(UserWarning, match="code of Typed cannot be read here"):
        assay.fit(images, "run", net=typed["Typed"](), num_steps=1, batch_size=8, progress=False)


def test_changed_code_is_another_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """\
import assay
from assay.train import OwnLoss

SCALE = 1.0

def scaled(x): return SCALE * x

class Scaled(OwnLoss):
    kind = "scaled"
    def __call__(self, denoiser, batch, label):
        return scaled(denoiser(batch.x_tn, batch.sigma_t, label)).square().flatten(1).mean(1)
"""
    monkeypatch.syspath_prepend(folder)
    images = assay.from_arrays(np.random.default_rng(0).random((32, 8, 8)), value_range=(0, 1))
    for number, (text, is_other) in enumerate(
        [(source, False), (source + "\nOTHER = 2\n", False), (source.replace("1.0", "2.0"), True)]
    ):
        name = f"own_loss_{number}"
        (folder / f"{name}.py").write_text(text)
        loss = importlib.import_module(name).Scaled
        with rejected("code", "run") if is_other else nullcontext():
            assay.fit(images, "run", loss=loss, num_steps=2, batch_size=16, progress=False)


def test_weights_know_the_code_of_their_network(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """\
from torch import nn

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, x, c_noise):
        return 1.0 * self.layer(x)
"""
    monkeypatch.syspath_prepend(folder)
    images = assay.from_arrays(np.random.default_rng(0).random((32, 8, 8)), value_range=(0, 1))

    def defined(number: int, text: str) -> nn.Module:
        (folder / f"own_net_{number}.py").write_text(text)
        return importlib.import_module(f"own_net_{number}").Own()

    assay.fit(images, "run", net=defined(0, source), num_steps=2, batch_size=16, progress=False)
    with warnings.catch_warnings(action="error"):
        commented = source.replace("        return", '        """Or 2?"""\n        # or 3\n        return')
        model = assay.load("run", net=defined(1, commented + "\n\nUNUSED = 2\n"))
    with pytest.warns(UserWarning, match="plain tensors of Own have changed since"):
        other = assay.load("run", net=defined(2, source.replace("1.0", "2.0")))
    assert not torch.equal(other.sample(2, num_steps=3), model.sample(2, num_steps=3))
    other.save("again.safetensors")  # does not hide it
    with rejected("net", "final.safetensors"):  # nor would its loss pass for that of the model
        load_checkpoint(Path("run"), to_measure=True)
    with pytest.warns(UserWarning, match="plain tensors of Own have changed since"):
        assay.load("again.safetensors", net=defined(3, source.replace("1.0", "2.0")))
    with rejected(path="final.safetensors"), pytest.warns(UserWarning):
        assay.load("run", net=defined(4, source.replace("3, padding=1", "5, padding=2")))


def test_code_from_the_same_folder_counts_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder)
    (folder / "near_parts.py").write_text("FACTOR = 2.0\n\ndef scaled(x): return FACTOR * x\n")
    source = "import numpy as np\nfrom near_parts import scaled\n\ndef used(x): return np.abs(scaled(x))\n\n"
    (folder / "near_net.py").write_text(source + "class Near:\n    def __call__(self, x): return used(x)\n")
    code = own_code(importlib.import_module("near_net").Near)
    assert code["scaled"] == "def scaled(x):\n    return FACTOR * x" and code["FACTOR"] == "2.0"
    assert not code["np"] and code.keys() == {"Near", "used", "scaled", "np", "FACTOR"}


def test_an_own_class_may_not_hide_one_of_ours() -> None:
    class Hidden(OwnLoss):  # removed below: classes are known as long as they live
        kind = "ambient"

        def __call__(self, *_: Any) -> Tensor:
            return torch.ones(1)

    with rejected("kind"):
        TrainConfig(loss="mine").own_loss()
    del Hidden
    assert TrainConfig(loss="ambient").loss == "ambient" and TrainConfig().own_loss() is None


class Switched(nn.Module):
    """A network whose output depends on what it is made with, not on its code or weights alone."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        self.act, self.layer = act, nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, x: Tensor, c_noise: Tensor) -> Tensor:
        return self.act(self.layer(x))


def test_a_passed_network_is_known_by_what_it_was_made_with(folder: Path) -> None:
    images = assay.from_arrays(np.random.default_rng(0).random((32, 8, 8)), value_range=(0, 1))
    settings: Any = {"num_steps": 2, "batch_size": 16, "progress": False}
    assay.fit(images, "run", net=Switched(torch.relu), **settings).save("relu.safetensors")
    with rejected("code", "run"):
        assay.fit(images, "run", net=Switched(torch.sin), **settings)
    with rejected("net", "relu.safetensors"):  # the last Switched here is another
        assay.load("relu.safetensors")
    with pytest.warns(UserWarning, match="plain tensors of Switched have changed since"):
        assay.load("relu.safetensors", net=Switched(torch.sin))
    with rejected("net", "relu.safetensors"):
        assay.load("relu.safetensors", net=nn.Conv2d(1, 1, 3))
    with warnings.catch_warnings(action="error"):
        assay.load("relu.safetensors", net=Switched(torch.relu))


def test_an_interrupted_fit_is_saved_and_goes_on(folder: Path) -> None:
    images = assay.from_arrays(np.random.default_rng(0).random((32, 8, 8)), value_range=(0, 1))

    class Stopped(OwnLoss):
        kind = "stopped"
        num_calls = 0

        def __call__(self, denoiser: Any, batch: Any, label: Tensor | None) -> Tensor:
            Stopped.num_calls += 1
            if Stopped.num_calls == 2:
                signal.raise_signal(signal.SIGINT)
            return denoiser(batch.x_tn, batch.sigma_t, label).square().flatten(1).mean(1)

    settings: Any = {"loss": Stopped, "num_steps": 4, "batch_size": 16, "progress": False}
    before = signal.getsignal(signal.SIGINT)  # a job in the background of a shell has none
    with pytest.raises(KeyboardInterrupt, match="step 2 of 4, saved"):
        assay.fit(images, "run", **settings)
    assert signal.getsignal(signal.SIGINT) is before
    assay.fit(images, "run", **settings)
    assert Stopped.num_calls == 4
    Stopped.num_calls = 0
    with pytest.raises(KeyboardInterrupt, match="run_dir"):
        assay.fit(images, **settings)


def test_own_solvers_and_extractors_are_taken_as_classes_and_checked(folder: Path) -> None:
    images = assay.from_arrays(np.random.default_rng(0).random((64, 8, 8)), value_range=(0, 1))
    model = assay.fit(images, num_steps=2, batch_size=16, progress=False)

    class Half(Euler):
        kind = "half"

    assert torch.equal(model.sample(2, solver=Half, num_steps=3), model.sample(2, solver="euler", num_steps=3))
    number = type("Number", (Euler,), {"kind": "number", "step": lambda *_: 1.0})
    needy = type("NeedySolver", (Euler,), {"kind": "needy-solver", "__init__": lambda self, a: None})
    for solver in (number, needy):
        with rejected("solver"):
            model.sample(2, solver=solver, num_steps=3)

    class Flat(FeatureNetwork):
        kind = "flat"

        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1)

    same = [model.evaluate(images, 50, each, num_steps=3).fd for each in (Flat, "flat")]
    assert same[0] == same[1] > 0
    square = type("Square", (Flat,), {"kind": "square", "forward": lambda self, x: x})
    for extractor in (square, FeatureNetwork, 3):
        with rejected("extractor"):
            model.evaluate(images, 50, extractor, num_steps=3)  # type: ignore[arg-type]


def test_arrays_go_in_and_come_out(folder: Path) -> None:
    images = np.random.default_rng(0).uniform(-1, 1, (64, 8, 8))
    model = assay.fit(images, num_steps=2, batch_size=16, net={"width": 16, "num_blocks": 1}, progress=False)
    noisy = images[:5].astype(np.float32)
    clean = model.denoise(noisy, np.full(5, 0.3))
    assert isinstance(clean, np.ndarray) and clean.shape == noisy.shape
    assert np.array_equal(clean, model.denoise(torch.tensor(noisy)[:, None], 0.3)[:, 0].numpy())
    with rejected("x_tn"):
        model.denoise(noisy[:, :4], 0.3)
    for wrong, key in ((noisy[0], "x_tn"), (255 * np.abs(noisy), "value_range"), (np.nan * noisy, "x_tn")):
        with rejected(key):
            model.denoise(wrong, 0.3)
    for level in (-1.0, np.nan, [0.3, 0.2], 20.0):
        with rejected("sigma_tn"):
            model.denoise(noisy, level)
    with rejected("sigma_tn"):  # grey levels, whose black and white were forgotten
        model.denoise(127.5 * (noisy + 1), 40.0)
    for number in (0, 2.5, "4"):
        with rejected("num_images"):
            model.sample(number)
    with rejected("num_step"):
        model.sample(2, num_step=3)
    with rejected("path"):
        model.save("model.pt")
    with rejected("label"):
        model.sample(2, label=0)  # it knows no classes
    (folder / "mine.npz").touch()
    for run_dir in (100, "mine.npz"):
        with rejected("run_dir", "mine.npz" if run_dir != 100 else None):
            assay.fit(images, run_dir)  # type: ignore[arg-type]
    for minutes in (0, -1, "2"):
        with rejected("minutes"):
            assay.fit(images, minutes=minutes)  # type: ignore[arg-type]


def test_samples_of_one_class(folder: Path) -> None:
    label = np.arange(40) % 2
    images = assay.from_arrays(np.where(label, 0.8, -0.8)[:, None, None] * np.ones((40, 8, 8)), label=label)
    model = assay.fit(images, num_steps=2, batch_size=16, class_conditional=True, progress=False)
    both, one = model.sample(4, num_steps=2), model.sample(4, label="1", num_steps=2)
    assert torch.equal(one, model.sample(4, label=1, num_steps=2))
    classes = [torch.full((4,), k) for k in (0, 1)]
    seeds = dict(seeds=range(4), image_shape=(1, 8, 8))
    config = SampleConfig(num_steps=2)
    expected = [next(config.generate(model.denoiser, **seeds, label=k)) for k in classes]
    torch.testing.assert_close(one, expected[1])
    assert not torch.allclose(expected[0], expected[1]) and both.shape == one.shape
    with rejected("label"):
        model.sample(4, label=2)


def test_counts_of_a_sensor_are_denoised_in_the_domain_of_the_model() -> None:
    units = Stabilised(0.0, 4000.0, gain=2.0, read_noise=3.0, black=100.0)
    rng = np.random.default_rng(0)
    counts = 100 + 2 * rng.poisson(rng.uniform(20, 1500, (40, 8, 8))) + rng.normal(0, 3, (40, 8, 8))
    x_tn = units.noisy_to_images(counts)
    source = assay.from_arrays(x_tn, units.sigma_tn)
    source.physical_range = units  # type: ignore[assignment]
    model = assay.fit(source, num_steps=2, batch_size=16, net={"width": 16, "num_blocks": 1}, progress=False)
    assert repr(model).endswith("; sensor: gain 2, read noise 3, black at 100>")
    for values, ends in ((counts, (0, 4000)), (counts, None), (counts.astype(np.uint16), None)):
        error = fault(lambda values=values, ends=ends: model.denoise(values, 40.0, value_range=ends))  # type: ignore[misc]
        assert error.key == "value_range" and "units.noisy_to_images" in str(error.cure)
    # The cure gives what `assay denoise` writes: the prediction, in counts.
    found = units.to_physical(model.denoise(units.noisy_to_images(counts), units.sigma_tn))
    expected = model.denoiser(source.x_tn, source.sigma_tn).detach().double().numpy()[:, 0]
    np.testing.assert_allclose(found, units.to_physical(expected), rtol=1e-4)


def test_arrays_are_denoised_in_their_own_axes_and_units() -> None:
    rng = np.random.default_rng(0)
    images = rng.uniform(0, 255, (40, 8, 8, 3)).astype(np.float32)
    source = assay.from_arrays(images, value_range=(0, 255))
    model = assay.fit(source, num_steps=2, batch_size=16, net={"width": 16, "num_blocks": 1}, progress=False)
    sigma = np.where(np.arange(40) < 5, 0.0, 25.5)
    found = model.denoise(images, sigma, value_range=(0, 255))
    assert found.shape == images.shape and np.array_equal(found[:5], images[:5])  # clean images stay
    expected = model.denoiser(source.x_tn[5:], torch.full((35,), 0.2)).detach().permute(0, 2, 3, 1).numpy()
    np.testing.assert_allclose(found[5:], (expected + 1) * 127.5, atol=1e-3)
    whole = images.astype(np.uint8)
    in_bytes = model.denoise(whole, sigma)
    np.testing.assert_allclose(in_bytes, model.denoise(whole / 1.0, sigma, value_range=(0, 255)), atol=1e-3)
    double = source.x_tn.double()
    assert torch.equal(model.denoise(double, 0.2), model.denoise(source.x_tn, 0.2))
    assert not model.denoise(double, sigma / 127.5).isnan().any()


def test_arrays_stand_for_sources_everywhere(folder: Path) -> None:
    rng = np.random.default_rng(0)
    images, others = rng.uniform(-1, 1, (2, 40, 8, 8))
    assert len(assay.part(images, clean=0.5)) == 20 and len(assay.simulate(images, 0.5, 0.3)) == 40
    assert [len(part) for part in assay.split_held_out(images, 10)] == [30, 10]
    sigma = np.linspace(0.1, 0.3, 40)
    model = assay.fit(assay.from_arrays(images, sigma), num_steps=2, batch_size=16, progress=False)
    assert repr(model).endswith("noise: 100% at 0.1 to 0.3>")
    loss = model.held_out_loss(others)
    assert float(loss.nats_per_dim) == loss.nats_per_dim.value
    for record in (loss, assay.Vendor(price=1), model.evaluate(others, 30, "pixels", num_steps=2)):
        assert not [name for name in dir(record) if name.startswith(("model_", "parse", "schema", "_abc"))]
        assert {"nats_per_dim", "title", "fd"} & {*dir(record)}


def test_a_study_of_arrays_is_the_one_that_was_asked_for(folder: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("assay.study.sizing.seconds_per_evaluation", lambda *arguments: 1e-6)
    monkeypatch.setattr("assay.study.run.drive", lambda opened, *arguments, **options: (opened, (), {}))
    monkeypatch.setattr("assay.study.run.write_report", lambda opened: opened)
    patches, others = (assay.from_arrays(x, name="patches") for x in 2 * np.random.rand(2, 700, 4, 4) - 1)
    with rejected("have_clean"):
        assay.run_study(patches, have_clean=500)
    assert not (folder / "out/patches").exists()
    opened = assay.run_study(patches, have_clean=60, noisy=0.3)
    assert opened.folder == Path("out/patches") and opened.study.name == "patches"
    assert opened.study.design.noisy == (0.3,)
    assert assay.run_study(patches).study == opened.study == assay.run_study("out/patches").study
    for key, value in {"have_clean": 100, "noisy": [0.2], "minutes": 3, "net": "mlp"}.items():
        with rejected(key, "patches"):
            assay.run_study(patches, **{key: value})
    with rejected("images", "patches"):
        assay.run_study(others)
    for key, value in {"noisy": 0.2, "minutes": 5}.items():
        with rejected(key, "study.toml"):
            assay.run_study("out/patches/study.toml", **{key: value})
    again = assay.open_study("out/patches")
    assert again.folder == assay.open_study("out/patches/study.toml", "out/patches").folder == opened.folder
    assert repr(again) == f"<patches in out/patches: 0 of {len(again.runs)} runs finished>"
    half = assay.part(patches, clean=0.5)
    views = assay.run_study(half, "out/half", have_clean=60, net="dit-small")
    every = torch.arange(350)
    stored = assay.open_store("out/half/images")
    assert torch.equal(stored.read(every), half.read(every)) and views.study.design.noisy == (0.2,)
    assert (views.study.net, opened.study.net) == ({"preset": "dit-small"}, {"preset": "mlp"})
    assert assay.run_study(stored, "out/of-store").source.fingerprint == views.source.fingerprint
    wrong: dict[str, Any] = {"noisy": 80, "minutes": 0, "until": 0.5, "num_workers": 0}
    for key, value in [*wrong.items(), ("noisy", object()), ("net", nn.Conv2d(1, 1, 3))]:
        with rejected(key):
            assay.run_study(others, "out/other", **{key: value})
    for study in ("nope.toml", "out/none"):
        with rejected(path=study):
            assay.open_study(study)
    monkeypatch.setattr(
        "assay.study.run.drive", lambda o, *a, **k: signal.raise_signal(signal.SIGINT) or (o, (), {})
    )
    with pytest.raises(KeyboardInterrupt, match=r"run_study.'out/patches'. resumes it"):
        assay.run_study(patches)
    with rejected(path="out/patches"):
        assay.price("out/patches")
    with rejected("table"):
        assay.price([{"sigma": 0.2}])


def test_scales_and_losses_that_are_not_as_stated() -> None:
    images = np.random.default_rng(0).random((40, 8, 8)) + np.random.default_rng(1).normal(0, 0.1, (40, 8, 8))
    with pytest.warns(UserWarning, match="-1 and 1:"):
        source = assay.from_arrays(images, 0.1)
    scalar = type("Scalar", (OwnLoss,), {"kind": "scalar", "__call__": lambda *_: torch.ones(())})
    with pytest.raises(assay.AssayError, match="one per image"):
        assay.fit(source, loss=scalar, num_steps=1, batch_size=8, progress=False)
    model = assay.fit(source, num_steps=1, batch_size=8, progress=False)
    with pytest.warns(UserWarning, match="-1 and 1:"):
        model.denoise(images[:4], 0.1)


def test_classes_reach_the_denoiser(folder: Path) -> None:
    rng = np.random.default_rng(0)
    images = assay.from_arrays(rng.random((32, 8, 8)), label=np.arange(32) % 2, value_range=(0, 1))
    model = assay.fit(images, class_conditional=True, num_steps=2, batch_size=16, progress=False)
    x_tn = torch.from_numpy(rng.normal(size=(4, 1, 8, 8))).float()
    classes = torch.tensor([0, 1, 1, -1])
    with torch.no_grad():
        expected = model.denoiser(x_tn, torch.full((4,), 0.3), classes)
    assert torch.equal(model.denoise(x_tn, 0.3, label=classes), expected)
    with pytest.warns(UserWarning, match="trained on classes"):
        assert torch.equal(model.denoise(x_tn, 0.3)[3], expected[3])
    for wrong in (2, [0, 1]):
        with rejected("label"), pytest.warns(UserWarning):
            model.denoise(x_tn, 0.3, label=wrong)
