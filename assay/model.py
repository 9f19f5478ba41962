"""A trained model in a few calls, for notebooks and scripts.

>>> import assay, numpy as np, torch
>>> from sklearn.datasets import load_digits
>>> digits = load_digits().images                                  # (1797, 8, 8), values 0 to 16
>>> noise = np.random.default_rng(0).normal(0, 4, digits.shape)
>>> noise[:180] = 0                                                # a tenth stays clean
>>> sigma = np.where(np.arange(1797) < 180, 0.0, 4.0)              # in the images' own units
>>> images = assay.from_arrays(digits + noise, sigma, value_range=(0, 16))
>>> images, held_out = assay.split_held_out(images, 60)            # clean images to score on
>>> model = assay.fit(images, preset="digits", num_steps=60, progress=False)
>>> model.sample(4).shape
torch.Size([4, 1, 8, 8])
>>> score = model.score(held_out).nats_per_dim                     # lower is better
>>> 0 < score.standard_error < score.value
True
>>> model.denoise(images.read(torch.tensor([5])), 0.5).shape       # the posterior mean at noise 0.5
torch.Size([1, 1, 8, 8])
"""

import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from assay.checkpoint import Checkpoint, load_checkpoint
from assay.data import ImageSource
from assay.data.picture import image_grid
from assay.metrics.evaluate import Evaluation, evaluate, reference_from_images
from assay.metrics.extract import ExtractorName, load_extractor
from assay.metrics.generated import Samples
from assay.metrics.score import Score, score
from assay.progress import progress_bar
from assay.sample import SampleConfig, SeededNoise, sample_posterior, spread_labels
from assay.train import read_config, train
from assay.train.presets import preset_tree

if TYPE_CHECKING:
    from PIL.Image import Image

_BATCH = 256  # images sampled at once


class Model:
    """A trained denoiser: generates images, denoises yours, and is scored or compared with real ones."""

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self.checkpoint = checkpoint
        self.denoiser = checkpoint.denoiser
        self.name = name

    def __repr__(self) -> str:
        config, info = self.checkpoint.config, self.checkpoint.info
        shape = " x ".join(map(str, config.image_shape))
        num_weights = sum(weight.numel() for weight in self.denoiser.parameters())
        levels = ", ".join(f"{100 * part:.3g}% at {level:g}" for level, part in info.sigma_tn) or "unknown"
        return f"<{self.name}: {config.kind} for {shape}, {num_weights:,} weights; noise: {levels}>"

    def sample(self, num_images: int = 16, seed: int = 0, **settings: Any) -> Tensor:
        """Generate images (N, C, H, W) in [-1, 1], one per seed from `seed` on.

        `settings` are those of `SampleConfig`, e.g. `num_steps=40` or `truncate_at="auto"` for a model that saw
        only noisy images.

        >>> images = assay.from_arrays(np.random.rand(64, 8, 8), 0.1, value_range=(0, 1))
        >>> model = assay.fit(images, num_steps=2, batch_size=16, progress=False)
        >>> model.sample(3, num_steps=4, truncate_at="auto").shape
        torch.Size([3, 1, 8, 8])
        """
        samples = self._samples(num_images, seed, settings)
        return torch.cat([samples.read(index) for index in torch.arange(num_images).split(_BATCH)])

    def _samples(
        self, num_images: int, seed: int, settings: dict[str, Any], frequencies: list[float] | None = None
    ) -> Samples:
        config = SampleConfig(**settings).for_levels(level for level, _ in self.checkpoint.info.sigma_tn)
        label = None
        if num_classes := self.checkpoint.config.num_classes:
            label = spread_labels(frequencies or [1.0] * num_classes, range(seed, seed + num_images))
        shape = self.checkpoint.config.image_shape
        return Samples(self.name, self.denoiser, shape, num_images, seed, config, label)

    def denoise(
        self, x_tn: Tensor, sigma_tn: float | Tensor, posterior_sample: bool = False, seed: int = 0
    ) -> Tensor:
        """Clean images (B, C, H, W) from noisy ones at the levels `sigma_tn`: the posterior mean E[x_0 | x_tn].

        With `posterior_sample` a draw from the posterior instead, with the detail that the mean averages out.

        >>> images = assay.from_arrays(np.random.rand(64, 8, 8), 0.1, value_range=(0, 1))
        >>> model = assay.fit(images, num_steps=2, batch_size=16, progress=False)
        >>> x_tn = images.read(torch.arange(5))
        >>> model.denoise(x_tn, images.sigma_tn[:5]).shape
        torch.Size([5, 1, 8, 8])
        """
        levels = torch.as_tensor(sigma_tn, dtype=x_tn.dtype).expand(len(x_tn))
        with torch.no_grad():
            if not posterior_sample:
                return self.denoiser(x_tn, levels)
            noise = SeededNoise(range(seed, seed + len(x_tn)), x_tn.shape[1:], "cpu")
            return sample_posterior(self.denoiser, x_tn, levels, noise)

    def score(self, held_out: ImageSource) -> Score:
        """The held-out score in nats (see `assay.metrics.score`): lower is better, no samples are needed.

        >>> images = assay.from_arrays(np.random.rand(64, 8, 8), value_range=(0, 1))
        >>> images, held_out = assay.split_held_out(images, 30)
        >>> model = assay.fit(images, num_steps=2, batch_size=16, progress=False)
        >>> found = model.score(held_out)
        >>> found
        <score of arrays on 30 images of arrays (held out): ... ± ... nats per dimension, lower is better>
        >>> picture = found.plot()                                  # the error at each noise level
        """
        return score(self.denoiser, held_out, model=self.name)

    def evaluate(
        self,
        reference: ImageSource,
        num_images: int = 1000,
        extractor: ExtractorName = "classifier",
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
        >>> found.fd > 0
        True
        """
        network = load_extractor(extractor, Path(cache), reference=reference)
        real = reference_from_images(reference, network, Path(cache))
        samples = self._samples(num_images, 0, settings, real.frequencies)
        return evaluate(samples, real, network, num_images).evaluation

    def plot(self, num_images: int = 64, seed: int = 0, **settings: Any) -> "Image":
        """A picture of generated images; a notebook shows it."""
        return image_grid(self.sample(num_images, seed, **settings), max(1, round(num_images**0.5)))


def load(path: Path | str) -> Model:
    """Open a checkpoint, or the final one of a run folder.

    >>> images = assay.from_arrays(np.random.rand(64, 8, 8), value_range=(0, 1))
    >>> trained = assay.fit(images, "runs/mine", num_steps=2, batch_size=16, progress=False)
    >>> model = assay.load("runs/mine")
    >>> picture = model.plot(16)
    """
    return Model(load_checkpoint(Path(path)), Path(path).stem)


def fit(
    images: ImageSource,
    run_dir: Path | str | None = None,
    preset: str | None = None,
    net: dict[str, Any] | None = None,
    progress: bool = True,
    **settings: Any,
) -> Model:
    """Train a model on images of any quality, as `assay train` does.

    `settings` are keys of `[train]`, e.g. `num_steps=5000, batch_size=64`, and win over those of `preset`;
    `net` chooses the network, e.g. `{"preset": "unet-small"}`. With `run_dir` the run is kept, and calling
    `fit` again resumes it; without, only the model is kept.

    >>> images = assay.from_arrays(np.random.rand(64, 8, 8), value_range=(0, 1))
    >>> assay.fit(images, num_steps=2, batch_size=16, progress=False)
    <arrays: mlp for 1 x 8 x 8, 3,188,032 weights; noise: 100% at 0>
    """
    tree = preset_tree(preset) if preset else {}
    tree = {
        "data": {"store": images.name},
        "net": net or tree.get("net", {"preset": "mlp" if max(images.image_shape[1:]) <= 12 else "unet-small"}),
        "train": {**tree.get("train", {}), **settings},
    }
    config = read_config(tree, "fit")
    kept: AbstractContextManager[Any]
    kept = nullcontext(run_dir) if run_dir else tempfile.TemporaryDirectory(prefix="assay-")
    with kept as folder, progress_bar("training", progress) as tell:
        result = train(
            config, Path(folder), images, on_progress=lambda p: tell(p.step / config.train.total_steps)
        )
        return Model(load_checkpoint(result.checkpoint), Path(folder).name if run_dir else images.name)
