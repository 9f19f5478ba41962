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
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor, nn

from assay.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from assay.cost import choose_config
from assay.data import ImageSource
from assay.data.arrays import Ends, from_arrays
from assay.data.picture import image_grid
from assay.data.source import as_source
from assay.data.units import to_physical
from assay.errors import AssayError, check_same
from assay.metrics.evaluate import Evaluation, evaluate
from assay.metrics.extract import load_extractor, reference_from_images
from assay.metrics.generated import Samples, samples_of
from assay.metrics.held_out import HeldOutLoss, check_unseen, checkpoint_loss
from assay.nets import NetConfig, pass_module
from assay.noise import warn_of_units
from assay.progress import open_progress
from assay.registry import name_of
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
        return f"<{self.name}: {config.kind} for {shape}, {num_weights:,} weights; noise: {levels}>"

    def sample(self, num_images: int = 16, seed: int = 0, **settings: Any) -> Tensor:
        """Generate images (N, C, H, W), one per seed from `seed` on; black is -1 and white 1.

        `settings` are those of `SampleConfig`, e.g. `num_steps=40` or `truncate_at="auto"` for a model that saw
        only noisy images.
        """
        samples = self._samples(num_images, seed, settings)
        return torch.cat([samples.read(index) for index in torch.arange(len(samples)).split(_BATCH)])

    def _samples(
        self, num_images: int, seed: int, settings: dict[str, Any], frequencies: list[float] | None = None
    ) -> Samples:
        if num_images < 1 or num_images % 1:
            raise AssayError(f"{num_images} is no number of images", key="num_images", cure="give 1 or more")
        chosen = checked(SampleConfig, settings)
        return samples_of(self.checkpoint, self.name, int(num_images), seed, chosen, frequencies)

    def save(self, path: Path | str) -> Path:
        """Write the model to one .safetensors file, which `assay.load` and every command open."""
        path = Path(path)
        if path.suffix != ".safetensors":
            raise AssayError("does not end in .safetensors", path=path, key="path", cure="add the ending")
        save_checkpoint(path, self.checkpoint.denoiser, self.checkpoint.config, self.checkpoint.info)
        return path

    def denoise(self, x_tn: Images, sigma_tn: Any, value_range: Ends | None = None) -> Images:
        """Clean images from noisy ones at the levels `sigma_tn`: the posterior mean E[x_0 | x_tn].

        `x_tn` is an array or a tensor with its axes as for `from_arrays`; `sigma_tn` is one level or (B,), and
        images at 0 stay as they are. `value_range` are the values of black and white (by default 0 and 255 of
        uint8, -1 and 1 of floats), and `sigma_tn` and the result, float32 of the same shape, are in its units.
        """
        if isinstance(x_tn, ImageSource):
            cure = "give its images, `source.read(torch.arange(len(source)))`, and `source.sigma_tn`"
            raise AssayError("is a source, not an array of images", key="x_tn", cure=cure)
        given = x_tn.numpy(force=True) if isinstance(x_tn, Tensor) else np.asarray(x_tn)
        seen, shape = from_arrays(given, sigma_tn, value_range=value_range, name="x_tn"), given.shape
        what, cure = "the model and x_tn differ in shape (C, H, W)", "give images like those it was trained on"
        check_same(self.checkpoint.config.image_shape, seen.image_shape, what, key="x_tn", cure=cure)
        warn_of_units(float(seen.sigma_tn.max()))
        device = x_tn.device if isinstance(x_tn, Tensor) else torch.device("cpu")
        level = seen.sigma_tn.where(seen.sigma_tn > 0, 1.0)  # at 0 the network is not defined
        with torch.no_grad():
            x_0_hat = self.denoiser(seen.x_tn.to(device), level.to(device)).double().numpy(force=True)
        if len(shape) == 4 and shape[1:] != seen.image_shape:
            x_0_hat = np.moveaxis(x_0_hat, 1, -1)
        found = to_physical(x_0_hat.reshape(shape), seen.physical_range)
        is_noisy = (seen.sigma_tn > 0).numpy().reshape(-1, *[1] * (len(shape) - 1))
        denoised: np.ndarray = np.where(is_noisy, found, given).astype(np.float32)
        return torch.from_numpy(denoised).to(device) if isinstance(x_tn, Tensor) else denoised

    def held_out_loss(self, held_out: ImageSource | np.ndarray) -> HeldOutLoss:
        """The held-out loss in nats (see `assay.metrics.held_out`): lower is better, no samples are needed.

        Images that the model was trained on are rejected, if its run or its training images are known.

        >>> images = assay.from_arrays(np.random.rand(64, 8, 8), value_range=(0, 1))
        >>> images, held_out = assay.split_held_out(images, 30)
        >>> model = assay.fit(images, num_steps=2, batch_size=16, progress=False)
        >>> found = model.held_out_loss(held_out)
        >>> found
        <held-out loss of arrays on 30 images of arrays (held out): ... ± ... nats per dimension>
        """
        source = as_source(held_out)
        check_unseen(self.trained_on, source)
        return checkpoint_loss(self.checkpoint, source, model=self.name)

    def evaluate(
        self,
        reference: ImageSource | np.ndarray,
        num_images: int = 1000,
        extractor: str = "classifier",
        cache: Path | str = "cache",
        **settings: Any,
    ) -> Evaluation:
        """Compare `num_images` samples with the clean images of `reference`: FD, KID, precision and recall.

        `extractor` chooses the features. "classifier" is trained on the classes of `reference` and kept in
        `cache`; "pixels" needs no classes. `settings` are those of `sample`.

        >>> images = assay.from_arrays(np.random.rand(64, 8, 8), value_range=(0, 1))
        >>> model = assay.fit(images, num_steps=2, batch_size=16, progress=False)
        >>> found = model.evaluate(images, num_images=50, extractor="pixels", num_steps=4)
        >>> found
        <FD-pixels ..., precision ..., 50 images>
        """
        source = as_source(reference)
        network = load_extractor(extractor, Path(cache), reference=source)
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
    if net is not None:
        pass_module(net)
    return Model(load_checkpoint(Path(path)), Path(path).stem, Path(path))


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
    With `minutes` it trains for about that long on an idle machine. With `run_dir` the run is kept, and calling
    `fit` again resumes it; without, only the model is kept.

    >>> images = assay.from_arrays(np.random.rand(64, 8, 8), value_range=(0, 1))
    >>> assay.fit(images, num_steps=2, batch_size=16, progress=False)
    <arrays: mlp for 1 x 8 x 8, 3,188,032 weights; noise: 100% at 0>
    """
    source = as_source(images)
    if isinstance(net, nn.Module):
        net = pass_module(net)
    elif net is not None and not isinstance(net, dict):
        net = {"kind": name_of(net, "net")}
    own = {key: name_of(settings[key], f"train.{key}") for key in ("noise", "loss") if key in settings}
    kept: AbstractContextManager[Any]
    kept = nullcontext(run_dir) if run_dir else tempfile.TemporaryDirectory(prefix="assay-")
    with kept as folder, open_progress(progress) as tell:
        tree = {"data": {"store": source.name}, "net": net or {}, "train": settings | own}
        config = choose_config(tree, source, preset, minutes, Path(folder))
        told: Any = {"on_progress": lambda now: tell("training", now.step, now.num_steps)}
        result = train(config, Path(folder), source, **told)
        name = Path(folder).name if run_dir else source.name
        return Model(load_checkpoint(result.checkpoint), name, source)
