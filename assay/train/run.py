"""A run: the devices it uses, how it resumes, what it records and saves; all that surrounds the loop."""

import copy
import math
import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from assay.checkpoint import CheckpointInfo, load_checkpoint, save_checkpoint
from assay.data import Batch, ImageSource, Loader
from assay.data.loader import prepared_ahead
from assay.data.view import stream
from assay.denoise import Preconditioned
from assay.devices import NumDevices, mesh_of, open_fabric, shard
from assay.errors import AssayError, check
from assay.files import hold_lock, reason, remove_leftovers
from assay.nets import NetConfig, build_denoiser, is_own_net
from assay.train import folder
from assay.train.config import RunConfig
from assay.train.optimizer import make_optimizer
from assay.train.record import LossBySigma, add_to_log, trim_log

if TYPE_CHECKING:
    from lightning_fabric import Fabric

_PRECISION: dict[str, Any] = {"32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
_SELDOM = 0.4  # of the images that are clean, below which a mix hardly trains low levels
_MAX_SKIPPED_IN_A_ROW = 10
_MAX_UNREAD = 100  # steps whose losses are left on the device
_DIVERGED = 100.0  # a last loss this many times that of a network without output means that training failed
_MAX_LEVELS = 100  # kept in a checkpoint's header
_CALM = "lower train.lr, raise train.lr_ramp_images or set train.clip_grad, e.g. to 1.0"


@dataclass(frozen=True)
class Progress:
    """How far a run is; reported after every step."""

    step: int
    num_steps: int
    images_per_second: float
    mean_loss: Tensor

    @property
    def loss(self) -> float:
        """The mean loss of the last batch. Reading it waits for the device: a GPU idles meanwhile."""
        return self.mean_loss.item()


@dataclass(frozen=True)
class TrainResult:
    """How a run ended; `checkpoint` holds the EMA weights once it is finished."""

    run_dir: Path
    step: int
    finished: bool
    checkpoint: Path


@contextmanager
def open_run(
    config: RunConfig, run_dir: Path, source: ImageSource, device: str, devices: NumDevices, num_nodes: int
) -> Iterator["Fabric"]:
    """Check what is asked, start the ranks and have the run's folder to oneself until the end."""
    check_run(config, source)
    fabric = open_fabric(device, devices, num_nodes, _PRECISION[config.train.precision], config.train.strategy)
    check_ranks(config, fabric.world_size)
    busy = f"{run_dir} is being trained by {{holder}}: wait for it, stop it, or train into another folder"
    with (
        _switches(config),
        hold_lock(run_dir / "training", busy) if fabric.is_global_zero else nullcontext(),
    ):
        yield fabric


@contextmanager
def _switches(config: RunConfig) -> Iterator[None]:
    """Let GPUs be as fast as the config allows, and round the tiny numbers of a fading EMA to zero on CPUs."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
    matmul.allow_tf32 = cudnn.allow_tf32 = config.train.tf32
    cudnn.benchmark = True
    torch.set_flush_denormal(True)  # they would cost microseconds each
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before


def check_run(config: RunConfig, source: ImageSource) -> None:
    """Reject, before any work, settings that do not fit these images or this machine."""
    settings = config.train
    _check_network(config.net_config(source))
    settings.noise_distribution()
    settings.own_loss()
    lowest, key = settings.consistency.sigma_min, "train.consistency.coefficient"
    is_clean = settings.consistency.coefficient and source.sigma_tn.max().item() <= lowest
    many = f"{settings.batch_size} is more than the {len(source)} images of {source.name}"
    what = f"teaches levels below the images' noise, but no image is noisier than sigma_min = {lowest:g}"
    check([
        (settings.batch_size > len(source), AssayError(many, key="train.batch_size", cure="lower it")),
        (is_clean, AssayError(what, key=key, cure="set it to 0")),
    ])  # fmt: skip


def pairing_note(config: RunConfig, source: ImageSource) -> str:
    """What to say if levels that few, clean images must teach are seldom trained; else nothing."""
    lowest, share = source.lowest_level, float((source.lowest_level == 0).double().mean())
    if config.train.pairing != "image_first" or not 0 < share < _SELDOM:
        return ""
    low, high = (float(end) for end in lowest[lowest > 0].aminmax())
    what = f"levels below {low:.3g} are learnt from the {share:.0%} clean images only, and as seldom"
    what += f"; those up to {high:.3g} also from images with less noise" * (high > 1.1 * low)
    what += ". `--pairing level_first` trains them as often as clean images alone would"
    return f"{what}: better in a short training, while a long one memorises these images"


def _check_network(config: NetConfig) -> None:
    """Reject a network that cannot be used (see `build_net`), or does not fit into this machine's memory."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with torch.device("cpu" if is_own_net(config) else "meta"):  # weights, gradients, two moments of each
            num_bytes = 16 * sum(weight.numel() for weight in build_denoiser(config).parameters())
    except (RuntimeError, OverflowError, TypeError):  # sizes that no number of torch holds
        num_bytes = 2**63
    if num_bytes > memory:
        what = f"its weights need {num_bytes / 1e9:.3g} GB to train, and this machine has {memory / 1e9:.3g}"
        raise AssayError(what, key="net", cure="make it smaller")


def check_ranks(config: RunConfig, num_ranks: int) -> None:
    """Reject batches that do not split evenly over the devices: those of a smaller share would count more."""
    if config.train.batch_size % num_ranks:
        what = f"{config.train.batch_size} images do not split evenly over {num_ranks} devices"
        raise AssayError(what, key="train.batch_size", cure=f"make it a multiple of {num_ranks}")


class Run:
    """Everything around the loop: built or resumed on creation, saved as it goes.

    A round over restored images is a run that begins with the weights `start`, after `steps_before` steps.
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        source: ImageSource,
        fabric: "Fabric",
        start: Path | None = None,
        steps_before: int = 0,
        snapshot_steps: Collection[int] = (),
    ) -> None:
        settings = config.train
        self.config, self.run_dir, self.source, self.fabric = config, run_dir, source, fabric
        self.net_config, self.steps_before = config.net_config(source), steps_before
        self.snapshot_steps = frozenset(snapshot_steps)
        # Rounds over the same images draw other noise.
        self.seed = stream(settings.seed, "loop", settings.rounds).initial_seed() if start else settings.seed
        if fabric.is_global_zero:
            remove_leftovers(run_dir)
            folder.take_state(config, run_dir, source)
            folder.claim_folder(config, run_dir, source)
            self._claim = (run_dir / "config.json").read_bytes()
        fabric.barrier()
        self._build(start or settings.init_from)
        law, ranks = settings.noise_distribution(), (fabric.global_rank, fabric.world_size)
        how = law, settings.pairing, settings.augment
        self.loader = Loader(source, settings.batch_size, self.seed, *how, *ranks)
        self.highest_level = source.sigma_tn.max().item()
        self.step, self.num_skipped, self.num_skipped_in_a_row = 0, 0, 0
        self.last_loss: float | None = None  # recorded
        self.by_sigma = LossBySigma(source.sigma_tn)
        self._seen: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []  # index, sigma_t, loss, gradient's norm
        self._resume()
        self.first_step, self.started = self.step, time.perf_counter()
        self.log = run_dir / "metrics.jsonl"
        if fabric.is_global_zero:
            trim_log(self.log, self.step)

    def _build(self, start: Path | None) -> None:
        """The network, its average and its optimizer, on their devices."""
        settings, fabric = self.config.train, self.fabric
        self.denoiser = build_denoiser(self.net_config, settings.seed)
        if start is not None:
            self._load_weights(start)
        self.ema = copy.deepcopy(self.denoiser).eval().requires_grad_(False).to(fabric.device)
        self._modules = {"model": self.denoiser, "ema": self.ema}
        if settings.compile:  # after the copy: the average stays a plain module with the same names
            self.denoiser.compile()
        self.model = fabric.setup_module(self.denoiser)
        self.model.train()
        if mesh := mesh_of(fabric):
            shard(self.ema, mesh)
        optimizer = make_optimizer(self.denoiser, self.net_config, settings)  # of weights that were shared out
        self.rates = [group["lr"] for group in optimizer.param_groups]
        self.optimizer: Any = fabric.setup_optimizers(optimizer)

    def _load_weights(self, path: Path) -> None:
        try:
            self.denoiser.load_state_dict(load_checkpoint(path).denoiser.state_dict())
        except RuntimeError as error:
            what = f"is of another network ({reason(error)})"
            raise AssayError(what, path=path, key="train.init_from") from error

    @contextmanager
    def batches(self) -> Iterator[Iterator[Batch]]:
        """The batches from here to the end, where the model is.

        A GPU does not wait for them: the next one is prepared in a thread, which would gain a CPU nothing.
        """
        settings, walk = self.config.train, self.config.train.consistency

        def prepare(step: int) -> Batch:
            walks = walk.coefficient > 0 and step >= walk.start * settings.num_steps
            num_walks = max(1, round(walk.sub_batch * self.loader.num_mine)) if walks else 0
            return self.loader.batch(step, num_walks, walk.num_draws).to(self.fabric.device)

        steps = range(self.step, settings.num_steps)
        if self.fabric.device.type == "cpu":
            yield map(prepare, steps)
            return
        with closing(prepared_ahead(prepare, steps)) as batches:
            yield batches

    def note_step(self, batch: Batch, loss: Tensor, grad_norm: Tensor | None) -> None:
        """Keep what a batch gave on its device, and have the step skipped if the gradient is not finite.

        The fused optimizer skips where `found_inf` is 1; with fp16 the gradients' scaler skips by itself.
        """
        nan = torch.tensor(math.nan, device=self.fabric.device)
        norm = nan if grad_norm is None else folder.whole(grad_norm.detach())
        self._seen.append((batch.index, batch.sigma_t, loss.detach(), norm))
        if self.config.train.precision != "fp16":
            self.optimizer.optimizer.found_inf = (~norm.isfinite()).float()

    def _catch_up(self) -> None:
        """Read what the steps since the last call gave; ten in a row without a finite gradient end the run."""
        if not self._seen:
            return
        *columns, norms = zip(*self._seen, strict=True)
        found = torch.stack(norms).tolist()
        self._grad_norm = found[-1]
        for number, norm in enumerate(found):
            bad = not math.isfinite(norm)
            self.num_skipped += bad
            self.num_skipped_in_a_row = (self.num_skipped_in_a_row + 1) * bad
            if self.num_skipped_in_a_row >= _MAX_SKIPPED_IN_A_ROW:
                what = f"step {self.step - len(found) + number + 1}: {_MAX_SKIPPED_IN_A_ROW} steps in a row "
                why = self.by_sigma.diagnose(*(column[number].cpu() for column in columns))
                what, cure = f"{what}without a finite gradient; {why}", f"{_CALM}, or look at these images"
                raise AssayError(what, path=self.run_dir, key="train.lr", cure=cure)
        self.by_sigma.add(torch.cat(columns[1]), torch.cat(columns[2]))
        self._seen = []

    def finish_step(self, on_progress: Callable[[Progress], None]) -> None:
        """Count the step, and record, draw and save what is due."""
        self.step += 1
        settings, mean_loss = self.config.train, self._seen[-1][2].mean()
        last = self.step == settings.num_steps
        num_images = (self.step - self.first_step) * settings.batch_size
        images_per_second = num_images / (time.perf_counter() - self.started)
        logs = self.step % settings.log_every == 0 or last
        saves = self.step % settings.state_every == 0 or last
        if logs or saves or len(self._seen) >= _MAX_UNREAD:
            self._catch_up()
        if logs:
            self._record(images_per_second)
        if self.fabric.is_global_zero:
            on_progress(Progress(self.step, settings.num_steps, images_per_second, mean_loss))
        due = settings.snapshot_every and self.step % settings.snapshot_every == 0
        if not last and (due or self.step in self.snapshot_steps):
            self._save_checkpoint(folder.snapshot_path(self.run_dir, self.step))
        if saves:
            self._save_state()

    def agree_to_stop(self, wanted: bool) -> bool:
        """True on every rank if any rank wants to stop; several ask each other every tenth step only."""
        if self.fabric.world_size > 1:
            if self.step % 10:
                return False
            wanted = bool(self._sum_over_ranks(torch.tensor(float(wanted), device=self.fabric.device)) > 0)
        return wanted

    def finish(self) -> TrainResult:
        """Save the state, and the final checkpoint if the run is complete."""
        finished, final = self.step == self.config.train.num_steps, folder.final_path(self.run_dir)
        self._catch_up()
        self._save_state()
        if finished:
            self._check_learnt()
            self._save_checkpoint(final)
        self.fabric.barrier()
        return TrainResult(self.run_dir, self.step, finished, final)

    def _check_learnt(self) -> None:
        """Reject a model that is no model: its weights or last losses are not finite, or enormous.

        With our preconditioning a network without output has a loss of at most max(1, E x^2 / sigma_data^2).
        """
        x = self.source.read(torch.arange(min(len(self.source), 256)))
        nothing = max(1.0, x.square().mean().item() / self.net_config.sigma_data**2)
        finite = all(folder.whole(weight).isfinite().all() for weight in self.ema.parameters())
        if not finite or self.last_loss is None or self.last_loss > _DIVERGED * nothing:
            found = "not finite" if self.last_loss is None else f"{self.last_loss:.3g}"
            what = f"the training has diverged: its last loss is {found}, and that of no output {nothing:.3g}"
            cure = f"{_CALM}, and train into another folder"
            raise AssayError(what, path=self.run_dir, key="train.lr", cure=cure)

    def _resume(self) -> None:
        if (state := folder.load_state(self.run_dir / "state")) is None:
            if self.config.train.continue_from is not None:
                raise AssayError("has lost its states", path=self.run_dir, cure="remove it and continue again")
            return
        tensors, info = state
        folder.unpack_tensors(tensors, self._modules, self.optimizer)
        self.step, self.num_skipped, self.last_loss = info["step"], info["num_skipped"], info["last_loss"]
        self.num_skipped_in_a_row = info["num_skipped_in_a_row"]
        # Rank 0 carries the sums that were gathered before; the others start from zero.
        if self.fabric.is_global_zero and info["by_sigma"] is not None:  # continued on other images
            self.by_sigma.totals = torch.tensor(info["by_sigma"], dtype=torch.float64)

    def _save_state(self) -> None:
        totals = self._sum_over_ranks(self.by_sigma.totals).tolist()
        tensors = folder.pack_tensors(self._modules, self.optimizer, self.fabric.is_global_zero)
        if self.fabric.is_global_zero:
            counts = {"num_skipped": self.num_skipped, "num_skipped_in_a_row": self.num_skipped_in_a_row}
            info = {**counts, "by_sigma": totals, "last_loss": self.last_loss}
            folder.check_claim(self.run_dir, self._claim)
            folder.save_state(self.run_dir / "state", self.step, tensors, info)

    def _whole_ema(self) -> Preconditioned | None:
        """The average with all of its weights, on the first rank; None on others, which give their parts."""
        if not mesh_of(self.fabric):
            return self.ema if self.fabric.is_global_zero else None
        found = folder.pack_tensors({"ema": self.ema}, keep=self.fabric.is_global_zero)
        if not found:
            return None
        plain = build_denoiser(self.net_config).eval()
        plain.load_state_dict({key.removeprefix("ema/"): value for key, value in found.items()})
        return plain

    def _sum_over_ranks(self, values: Tensor) -> Tensor:
        return cast(Tensor, self.fabric.all_reduce(values.clone(), reduce_op="sum"))

    def _record(self, images_per_second: float) -> None:
        self.by_sigma.totals = self._sum_over_ranks(self.by_sigma.totals)
        sums, counts, num_all = self.by_sigma.totals.sum(1).tolist()
        self.last_loss = sums / counts if counts > 0.5 * num_all else None
        if self.fabric.is_global_zero:
            line = {
                "step": self.step,
                "num_images": self.step * self.config.train.batch_size,
                "loss": sums / counts if counts else None,
                "grad_norm": self._grad_norm if math.isfinite(self._grad_norm) else None,
                "lr": self.optimizer.param_groups[0]["lr"],
                "num_skipped": self.num_skipped,
                "images_per_second": images_per_second,
                "loss_by_sigma": self.by_sigma.summary(),
            }
            add_to_log(self.log, line)
        self.by_sigma.totals = torch.zeros_like(self.by_sigma.totals)

    def _save_checkpoint(self, path: Path) -> None:
        if (ema := self._whole_ema()) is None:
            return
        folder.check_claim(self.run_dir, self._claim)
        info = CheckpointInfo(
            dataset=self.source.name,
            sigma_tn=noise_levels(self.source.sigma_tn),
            clean_fraction=(self.source.sigma_tn == 0).float().mean().item(),
            num_images=len(self.source),
            seed=self.config.train.seed,
            loss=self.config.train.loss,
            noise=self.config.train.noise,
            consistency=self.config.train.consistency.coefficient > 0,
            rounds=self.config.train.rounds,
            num_images_seen=(self.steps_before + self.step) * self.config.train.batch_size,
            physical_range=self.source.physical_range,
            label_names=self.source.class_names,
        )
        save_checkpoint(path, ema, self.net_config, info)


def noise_levels(sigma_tn: Tensor) -> tuple[tuple[float, float], ...]:
    """The data's (noise level, fraction of the images), lowest first; quantiles if there are too many levels.

    The clean fraction and the lowest and highest noise, at which sampling may stop or be refined, stay exact.
    """
    levels, counts = sigma_tn.unique(return_counts=True)
    if len(levels) <= _MAX_LEVELS:
        return tuple(zip(levels.tolist(), (counts / len(sigma_tn)).tolist(), strict=True))
    noisy = sigma_tn[sigma_tn > 0].sort().values
    share = len(noisy) / len(sigma_tn)
    at = torch.linspace(0, len(noisy) - 1, _MAX_LEVELS - 1, dtype=torch.float64).round().long()
    levels, counts = noisy[at].unique(return_counts=True)
    quantiles = zip(levels.tolist(), (counts / len(at) * share).tolist(), strict=True)
    return (((0.0, 1 - share),) if share < 1 else ()) + tuple(quantiles)
