"""A trained model in a few calls, for notebooks and scripts.

>>> import assay, numpy as np, torch
>>> from sklearn.datasets import load_digits
>>> digits = load_digits().images                                  # (1797, 8, 8), values 0 to 16
>>> noise = np.random.default_rng(0).normal(0, 4, digits.shape)
>>> noise[:180] = 0                                                # a tenth stays clean
>>> sigma = np.where(np.arange(1797) < 180, 0.0, 4.0)              # in the images' own units
>>> images = assay.from_arrays(digits + noise, sigma, value_range=(0, 16))
>>> images, held_out = assay.split_held_out(images, 60)            # clean images to measure on
>>> model = assay.fit(images, preset="digits", num_steps=60, progress=False)
>>> model.sample(4).shape
torch.Size([4, 1, 8, 8])
>>> loss = model.held_out_loss(held_out).nats_per_dim                     # lower is better
>>> 0 < loss.standard_error < loss.value
True
>>> model.denoise(images.read(torch.tensor([5])), 0.5).shape       # the posterior mean at noise 0.5
torch.Size([1, 1, 8, 8])
"""

import tempfile
from contextlib import AbstractContextManager, nullcontext
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor, nn

from assay.checkpoint import Checkpoint, code_change, load_checkpoint, save_checkpoint
from assay.cost import choose_config
from assay.data import ImageSource
from assay.data.arrays import Arrays, Ends, from_arrays
from assay.data.picture import image_grid
from assay.data.source import as_source
from assay.data.units import Stabilised, to_physical
from assay.denoise import changes, check_label, check_label_shape, warn_if_worse
from assay.errors import AssayError, Rules, check, check_same, warn
from assay.files import check_absent
from assay.generate import class_number
from assay.metrics.evaluate import Evaluation, evaluate
from assay.metrics.extract import load_extractor, reference_from_images
from assay.metrics.generated import Samples, samples_of
from assay.metrics.held_out import HeldOutLoss, check_unseen, checkpoint_loss
from assay.metrics.weights import FeatureNetwork
from assay.nets import NetConfig, pass_module
from assay.noise import MOST_NOISE, warn_of_units
from assay.processes import stop_on_signal
from assay.progress import open_progress
from assay.registry import name_of, own_code
from assay.sample import SampleConfig
from assay.settings import checked
from assay.train import train

_BATCH = 256  # images sampled at once
Images = TypeVar("Images", Tensor, np.ndarray)


class Model:
    """A trained denoiser: generates images, denoises yours, and is measured or compared with real ones.

    `trained_on` are its training images, or the folder of its run, if they are known.
    """

    def __init__(self, checkpoint: Checkpoint, name: str, trained_on: ImageSource | Path | None = None) -> None:
        self.checkpoint, self.denoiser = checkpoint, checkpoint.denoiser
        self.name, self.trained_on = name, trained_on

    def __repr__(self) -> str:
        config, info = self.checkpoint.config, self.checkpoint.info
        shape = " x ".join(map(str, config.image_shape))
        num_weights = sum(weight.numel() for weight in self.denoiser.parameters())
        levels = (
            ", ".join(f"{100 * part:.3g}% at {level}" for level, part in info.levels_in_words()) or "unknown"
        )
        units = info.physical_range
        sensor = f"; sensor: {units.sensor}" if isinstance(units, Stabilised) else ""
        return f"<{self.name}: {config.kind} for {shape}, {num_weights:,} weights; noise: {levels}{sensor}>"

    def sample(
        self, num_images: int = 16, seed: int = 0, label: int | str | None = None, **settings: Any
    ) -> Tensor:
        """Generate images (N, C, H, W), one per seed from `seed` on; black is -1 and white 1.

        A model trained with `class_conditional=True` generates all classes evenly, or only `label`, a class by
        its number or name. `settings` are those of `assay.sample.SampleConfig`, e.g. `num_steps=40` or
        `truncate_at="auto"` for a model that saw only noisy images; `solver` may be a class of your own.
        """
        shares = None
        if label is not None:
            number = class_number(self.checkpoint, label)
            shares = [float(k == number) for k in range(self.checkpoint.config.num_classes)]
        samples = self._samples(num_images, seed, settings, shares)
        return torch.cat([samples.read(index) for index in torch.arange(len(samples)).split(_BATCH)])

    def _classes(self, label: Any | None, num_images: int) -> Tensor | None:
        """Classes (B,) of images to denoise; -1, for none, if the model knows classes and none are given."""
        num_classes = self.checkpoint.config.num_classes
        if label is None and num_classes:
            warn("the model was trained on classes: with the `label` of each image it denoises better")
        if label is None and not num_classes:
            return None
        classes = torch.as_tensor(-1 if label is None else label)
        classes = classes.expand(num_images) if classes.ndim == 0 else classes
        check_label_shape(classes, num_classes, num_images)
        check_label(classes, num_classes)
        return classes.to(next(self.denoiser.parameters()).device)

    def _samples(
        self, num_images: int, seed: int, settings: dict[str, Any], frequencies: list[float] | None = None
    ) -> Samples:
        if not isinstance(num_images, Real) or num_images < 1 or num_images % 1:
            what = f"{num_images!r:.80} is no number of images"
            raise AssayError(what, key="num_images", cure="give 1 or more")
        chosen = checked(SampleConfig, settings)
        return samples_of(self.checkpoint, self.name, int(num_images), seed, chosen, frequencies)

    def save(self, path: Path | str) -> Path:
        """Write the model to one .safetensors file, which `assay.load` and every command open."""
        path = Path(path)
        if path.suffix != ".safetensors":
            raise AssayError("does not end in .safetensors", path=path, key="path", cure="add the ending")
        check_absent(path)
        save_checkpoint(path, self.checkpoint.denoiser, self.checkpoint.config, self.checkpoint.info)
        return path

    def denoise(
        self, x_tn: Images, sigma_tn: Any, value_range: Ends | None = None, label: Any | None = None
    ) -> Images:
        """Clean images from noisy ones at the levels `sigma_tn`: the posterior mean E[x_0 | x_tn].

        `x_tn` is an array or a tensor with its axes as for `from_arrays`; `sigma_tn` is one level or (B,), and
        images at 0 stay as they are. `value_range` are the values of black and white (by default 0 and 255 of
        uint8, -1 and 1 of floats), and `sigma_tn` and the result, float32 of the same shape, are in its units.
        `label` are the classes of images, one or (B,), for a model that was trained on classes.
        The images of a sensor that was packed with its gain are not linear: take them from their store.
        """
        if isinstance(x_tn, ImageSource):
            cure = "give its images, `source.read(torch.arange(len(source)))`, and `source.sigma_tn`"
            raise AssayError("is a source, not an array of images", key="x_tn", cure=cure)
        given = x_tn.numpy(force=True) if isinstance(x_tn, Tensor) else np.asarray(x_tn)
        seen, shape = self._seen(given, sigma_tn, value_range), given.shape
        what, cure = "the model and x_tn differ in shape (C, H, W)", "give images like those it was trained on"
        check_same(self.checkpoint.config.image_shape, seen.image_shape, what, key="x_tn", cure=cure)
        highest = float(seen.sigma_tn.max())
        what, cure = (
            f"has a level of {highest:.4g}, where black to white is 2",
            "give `value_range`, or scale them",
        )
        check([(highest > MOST_NOISE, AssayError(what, key="sigma_tn", cure=cure))])
        warn_of_units(highest)
        device = x_tn.device if isinstance(x_tn, Tensor) else torch.device("cpu")
        level = seen.sigma_tn.where(seen.sigma_tn > 0, 1.0)  # at 0 the network is not defined
        classes = self._classes(label, len(given))
        with torch.no_grad():
            x_0 = self.denoiser(seen.x_tn.to(device), level.to(device), classes)
        warn_if_worse(changes(seen.x_tn.to(device), x_0, seen.sigma_tn.to(device)))
        x_0_hat = x_0.double().numpy(force=True)
        if len(shape) == 4 and shape[1:] != seen.image_shape:
            x_0_hat = np.moveaxis(x_0_hat, 1, -1)
        found = to_physical(x_0_hat.reshape(shape), seen.physical_range)
        is_noisy = (seen.sigma_tn > 0).numpy().reshape(-1, *[1] * (len(shape) - 1))
        denoised: np.ndarray = np.where(is_noisy, found, given).astype(np.float32)
        return torch.from_numpy(denoised).to(device) if isinstance(x_tn, Tensor) else denoised

    def _check_code(self) -> None:
        """Reject to measure a network whose code has changed: the result would pass for that of the trained."""
        what = code_change(self.checkpoint.config, self.checkpoint.info)
        check([(what, AssayError(what, path=self.name, key="net", cure="undo that, or train anew"))])

    def _seen(self, x_tn: np.ndarray, sigma_tn: Any, value_range: Ends | None) -> Arrays:
        """Images to denoise; errors name the arguments of `denoise`."""
        units, cure = self.checkpoint.info.physical_range, "give `value_range`, the values of black and white"
        try:
            if isinstance(units, Stabilised):
                cure = "with units = model.checkpoint.info.physical_range, give `units.noisy_to_images(x_tn)` "
                cure += "and `units.sigma_tn`, and apply `units.to_physical` to the result"
                what = f"is linear, but the model is for stabilised images of a sensor ({units.sensor})"
                is_linear = value_range is not None or x_tn.dtype.kind in "biu"
                check([(is_linear, AssayError(what, key="value_range"))])
            return from_arrays(x_tn, sigma_tn, value_range=value_range, name="x_tn")
        except AssayError as error:
            key = {"images": "x_tn", "sigma": "sigma_tn"}.get(str(error.key), error.key)
            error.key, error.cure = key, cure if key == "value_range" else error.cure
            raise

    def held_out_loss(self, held_out: ImageSource | np.ndarray) -> HeldOutLoss:
        """The held-out loss in nats (see `assay.metrics.held_out`): lower is better, no samples are needed.

        Images that the model was trained on are rejected, if its run or its training images are known; if not,
        a warning says so. Noisy images count at the levels above their own noise. `minus` compares two models,
        in all levels or from `low` to `high`: at which one begins to be better, `split` tells.

        >>> images = assay.from_arrays(np.random.rand(64, 8, 8), value_range=(0, 1))
        >>> images, held_out = assay.split_held_out(images, 30)
        >>> model = assay.fit(images, num_steps=2, batch_size=16, progress=False)
        >>> found = model.held_out_loss(held_out)
        >>> found
        <held-out loss of arrays on 30 images of arrays (held out): ... ± ... nats per dimension>
        """
        self._check_code()
        source = as_source(held_out)
        check_unseen(self.trained_on, source)
        return checkpoint_loss(self.checkpoint, source, model=self.name)

    def evaluate(
        self,
        reference: ImageSource | np.ndarray,
        num_images: int = 1000,
        extractor: str | type[FeatureNetwork] = "classifier",
        cache: Path | str = "cache",
        **settings: Any,
    ) -> Evaluation:
        """Compare `num_images` samples with the clean images of `reference`: FD, KID, precision and recall.

        `extractor` chooses the features. "classifier" is trained on the classes of `reference` and kept in
        `cache`; "pixels" needs no classes; it may be a class of your own. `settings` are those of `sample`.

        >>> images = assay.from_arrays(np.random.rand(64, 8, 8), value_range=(0, 1))
        >>> model = assay.fit(images, num_steps=2, batch_size=16, progress=False)
        >>> found = model.evaluate(images, num_images=50, extractor="pixels", num_steps=4)
        >>> found
        <FD-pixels ..., precision ..., 50 images>
        """
        self._check_code()
        source = as_source(reference)
        network = load_extractor(name_of(extractor, "extractor"), Path(cache), reference=source)
        real = reference_from_images(source, network, Path(cache))
        samples = self._samples(num_images, 0, settings, real.frequencies)
        return evaluate(samples, real, network, num_images)

    def plot(self, num_images: int = 64, seed: int = 0, **settings: Any) -> Image:
        """A picture of generated images; a notebook shows it."""
        return image_grid(self.sample(num_images, seed, **settings), max(1, round(num_images**0.5)))


def load(path: Path | str, net: nn.Module | None = None) -> Model:
    """Open a checkpoint, or the final one of a run folder; of a network of your own with the module, `net`.

    >>> images = assay.from_arrays(np.random.rand(64, 8, 8), value_range=(0, 1))
    >>> trained = assay.fit(images, "runs/mine", num_steps=2, batch_size=16, progress=False)
    >>> picture = assay.load("runs/mine").plot(16)
    """
    return Model(load_checkpoint(Path(path), net=net), Path(path).stem, Path(path))


def fit(
    images: ImageSource | np.ndarray,
    run_dir: Path | str | None = None,
    preset: str | None = None,
    net: dict[str, Any] | nn.Module | type[NetConfig] | None = None,
    minutes: float | None = None,
    progress: bool = True,
    **settings: Any,
) -> Model:
    """Train a model on images of any quality, as `assay train` does; an array is taken as `from_arrays` does.

    `settings` are keys of `[train]`, e.g. `num_steps=5000, batch_size=64`, and win over those of `preset`;
    `net` chooses the network, e.g. `{"preset": "unet-small"}`. By default both suit the size of the images.
    `net` may also be a module of your own, or the class of its config; `noise` and `loss` your own classes.
    A mix trains levels below its noise as seldom as it has clean images: `pairing="level_first"` trains all
    equally often, which is better in short trainings of few clean images, and for comparing models.
    With `minutes` it trains for about that long on an idle machine. With `run_dir` the run is kept, and calling
    `fit` again resumes it, also after an interrupt; without, only the model is kept.

    >>> images = assay.from_arrays(np.random.rand(64, 8, 8), value_range=(0, 1))
    >>> assay.fit(images, num_steps=2, batch_size=16, progress=False)
    <arrays: mlp for 1 x 8 x 8, 3,188,032 weights; noise: 100% at 0>
    """
    source = as_source(images)
    check(_folder_rules(run_dir))
    if isinstance(net, nn.Module):
        its_class: Any = type(net)
        if run_dir is not None and own_code(its_class).get(its_class.__name__) == "":
            what = (
                f"the code of {its_class.__name__} cannot be read here, so that changes of it are not noticed"
            )
            warn(f"{what}: put it into a file, or choose another run_dir after a change")
        net = pass_module(net)
    elif net is not None and not isinstance(net, dict):
        net = {"kind": name_of(net, "net")}
    kept: AbstractContextManager[Any]
    kept = nullcontext(run_dir) if run_dir else tempfile.TemporaryDirectory(prefix="assay-")
    with kept as folder, open_progress(progress) as tell, stop_on_signal() as stopped:
        tree = {"data": {"store": source.name}, "net": net or {}, "train": settings}
        config = choose_config(tree, source, preset, minutes, Path(folder))
        told: Any = {"on_progress": lambda now: tell("training", now.step, now.num_steps)}
        result = train(config, Path(folder), source, should_stop=lambda: bool(stopped), **told)
        if not result.finished:
            kept_words = "saved: call `fit` again to go on" if run_dir else "lost: give `run_dir` to keep it"
            raise KeyboardInterrupt(f"stopped at step {result.step} of {config.train.num_steps}, {kept_words}")
        name = Path(folder).name if run_dir else source.name
        return Model(load_checkpoint(result.checkpoint), name, source)


def _folder_rules(run_dir: Any) -> Rules:
    """A run has a folder of its own, or none."""
    is_path = run_dir is None or isinstance(run_dir, str | Path)
    cure = "give a folder, e.g. 'runs/mine'; settings have names, e.g. num_steps=100"
    if not is_path and isinstance(run_dir, ImageSource | np.ndarray | list):
        cure = "join images first: `assay.from_arrays(np.concatenate([clean, noisy]), sigma=levels)`"
    kind = type(run_dir).__name__
    yield not is_path, AssayError(f"a {kind} is no path", key="run_dir", cure=cure)
    is_file = run_dir is not None and Path(run_dir).is_file()
    yield is_file, AssayError("is a file", path=run_dir, key="run_dir", cure="choose a folder")
