"""A run: the folder it lives in, the devices it uses, how it resumes and what it records.

config.json    what was asked, the network, the fingerprint of the data
state/         the last two states (see `assay.train.state`)
metrics.jsonl  one line every `log_every` steps
samples/       pictures of what the EMA weights generate
snapshots/     EMA weights as checkpoints; `final.safetensors` means finished
averages/      weights averaged in two ways, to choose the EMA's length from (see `assay.train.average`)

With `train.loops` all but config.json and the final snapshot lies in `loop-0/`, `loop-1/` and so on, beside the
restored images of each loop (see `assay.train.restored`).
"""

import copy
import json
import math
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import ModelParallelStrategy
from torch import Tensor, nn

import assay
from assay.checkpoint import CheckpointInfo, load_checkpoint, save_checkpoint
from assay.data import Batch, ImageSource, Loader
from assay.data.loader import prepared_ahead
from assay.data.picture import image_grid
from assay.data.view import convolved, stream
from assay.denoise import Preconditioned
from assay.devices import NumDevices, open_fabric, shard
from assay.files import differences, hold_lock, naming, remove_leftovers, write_whole
from assay.nets import build_denoiser
from assay.noise import LogNormal
from assay.train.average import LENGTHS, save_averages
from assay.train.config import RunConfig, TrainConfig
from assay.train.muon import Muon
from assay.train.record import LossBySigma, Recorder, diagnose
from assay.train.state import load_state, pack_tensors, save_state, unpack_tensors, whole

_PRECISION: dict[str, Any] = {"32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
_MAX_SKIPPED_IN_A_ROW = 10
_MAX_UNREAD = 100  # steps whose losses are left on the device
_NUM_PICTURED = 64
_MAX_LEVELS = 100  # kept in a checkpoint's header


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """Round the tiny numbers of a fading EMA to zero: they would cost microseconds each."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


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
def open_folder(
    config: RunConfig,
    run_dir: Path,
    source: ImageSource,
    device: str,
    devices: NumDevices,
    num_nodes: int,
) -> Iterator[Fabric]:
    """Check what is asked, start the ranks and have the run's folder to oneself until the end."""
    check_run(config, source)
    precision, strategy = _PRECISION[config.train.precision], config.train.strategy
    fabric = open_fabric(device, devices, num_nodes, precision, strategy)
    check_ranks(config, fabric.world_size)
    busy = f"{run_dir} is being trained by {{holder}}: wait for it, stop it, or train into another folder"
    with (
        _gpu_switches(config),
        hold_lock(run_dir / ".training", busy) if fabric.is_global_zero else nullcontext(),
    ):
        yield fabric


@contextmanager
def _gpu_switches(config: RunConfig) -> Iterator[None]:
    """Let GPUs be as fast as the config allows; a CPU does not care."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
    matmul.allow_tf32 = cudnn.allow_tf32 = config.train.tf32
    cudnn.benchmark = config.train.cudnn_benchmark
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before


def check_run(config: RunConfig, source: ImageSource) -> None:
    """Reject, before any work, settings that do not fit each other or these images."""
    settings = config.train
    config.net_config(source)
    config.sample.for_levels(source.sigma_tn.unique().tolist())
    if settings.batch_size % settings.accumulate:
        raise ValueError(
            f"train.batch_size = {settings.batch_size} is not a multiple of "
            f"train.accumulate = {settings.accumulate}"
        )
    if settings.optimizer == "muon" and settings.weight_decay_kind == "l2" and settings.weight_decay:
        raise ValueError("train.weight_decay_kind = l2 adds to Adam's gradient: muon decays decoupled only")
    if settings.strategy == "fsdp" and (settings.optimizer == "muon" or settings.precision == "fp16"):
        raise ValueError(
            "train.strategy = fsdp splits the matrices that muon needs whole, and cannot scale the gradients "
            "of fp16: use adam with precision 32 or bf16, or strategy ddp"
        )
    if settings.batch_size > len(source):
        raise ValueError(
            f"train.batch_size = {settings.batch_size} is larger than the data: {source.name} has "
            f"{len(source)} images"
        )
    if not settings.loops and (num_convolved := int(convolved(source).sum())):
        raise ValueError(
            f"{num_convolved} of the {len(source)} images of {source.name} were convolved with a kernel, and "
            "would be learnt as they are, e.g. blurred: set train.loops, e.g. to 3"
        )
    highest = source.sigma_tn.max().item()
    if settings.consistency.coefficient and highest <= settings.consistency.sigma_min:
        raise ValueError(
            "train.consistency teaches levels below the images' noise, but no image is noisier than "
            f"sigma_min = {settings.consistency.sigma_min:g}: set train.consistency.coefficient = 0"
        )


def check_ranks(config: RunConfig, num_ranks: int) -> None:
    """Reject batches that do not split evenly over the devices."""
    at_once = config.train.batch_size // config.train.accumulate
    if at_once % num_ranks:  # ranks have equal weight, so images of a smaller share would count more
        raise ValueError(
            f"train.batch_size / train.accumulate = {at_once} images do not split evenly over {num_ranks} "
            f"devices: make it a multiple of {num_ranks}"
        )


def make_optimizer(denoiser: nn.Module, settings: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer of a run."""
    options: dict[str, Any] = {
        "lr": settings.lr,
        "betas": settings.betas,
        "weight_decay": settings.weight_decay,
        "fused": settings.precision != "fp16",  # fp16 scales gradients between backward and step
    }
    match settings.optimizer, settings.weight_decay_kind:
        case "muon", _:
            return Muon(denoiser.named_parameters(), **options)
        case _, "decoupled":
            return torch.optim.AdamW(denoiser.parameters(), **options)
        case _:
            return torch.optim.Adam(denoiser.parameters(), **options)


@dataclass(frozen=True)
class _Continued:
    """The state of the run to continue, and what is recorded about it."""

    state: tuple[dict[str, Tensor], dict[str, Any]]
    lineage: list[dict[str, Any]]
    same_data: bool


def read_run(path: Path) -> dict[str, Any]:
    """A run's config.json, with at least `fingerprint` (`data`, `run`), `config` (`train`) and `net`."""
    with naming(path, "restore it, or train into another folder"):
        found = json.loads(path.read_bytes())
        parts = found["fingerprint"], found["config"], found["config"]["train"], found["net"]
        if not all(isinstance(part, dict) for part in parts):
            raise ValueError("its parts are not objects")
        found["fingerprint"]["data"], found["fingerprint"]["run"]
    return dict(found)


class Run:
    """Everything around the loop: built or resumed on creation, saved as it goes.

    A loop over restored images is a run that begins with the weights `start`, after `steps_before` steps.
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        source: ImageSource,
        fabric: Fabric,
        start: Path | None = None,
        steps_before: int = 0,
        snapshot_steps: Collection[int] = (),
    ) -> None:
        settings = config.train
        self.config, self.run_dir, self.source, self.fabric = config, run_dir, source, fabric
        self.sample = config.sample.for_levels(source.sigma_tn.unique().tolist())
        self.net_config = config.net_config(source)
        self.steps_before = steps_before
        # Loops over the same images draw other noise.
        self.seed = stream(settings.seed, "loop", settings.loops).initial_seed() if start else settings.seed
        self.continued = self._find_continued()
        if self.fabric.is_global_zero:
            remove_leftovers(run_dir)
            claim_folder(config, run_dir, source, [] if self.continued is None else self.continued.lineage)

        self.denoiser = build_denoiser(self.net_config, settings.seed)
        if (first := start or settings.init_from) is not None:
            self._load_weights(first)
        self.ema = copy.deepcopy(self.denoiser).eval().requires_grad_(False).to(self.fabric.device)
        self.averages = [copy.deepcopy(self.ema) for _ in LENGTHS] if settings.average_every else []
        self._modules = {"model": self.denoiser, "ema": self.ema}
        self._modules |= {f"average_{number}": average for number, average in enumerate(self.averages)}
        if settings.compile:  # after the copy: the average stays a plain module with the same names
            self.denoiser.compile()
        self.model = self.fabric.setup_module(self.denoiser)
        self.model.train()
        self._is_sharded = isinstance(fabric.strategy, ModelParallelStrategy)
        if isinstance(fabric.strategy, ModelParallelStrategy):
            for average in (self.ema, *self.averages):
                shard(average, fabric.strategy.device_mesh)
        optimizer = make_optimizer(self.denoiser, settings)  # of weights that have been shared out
        self.rates = [group["lr"] for group in optimizer.param_groups]
        self.optimizer: Any = self.fabric.setup_optimizers(optimizer)
        self.loader = Loader(
            self.source,
            settings.batch_size // settings.accumulate,
            self.seed,
            LogNormal(settings.sigma_mean, settings.sigma_std),
            settings.pairing,
            settings.augment.build(),
            self.fabric.global_rank,
            self.fabric.world_size,
        )
        self.highest_level = self.source.sigma_tn.max().item()
        self.step, self.num_skipped, self.num_skipped_in_a_row = 0, 0, 0
        self.snapshot_steps = frozenset(snapshot_steps)  # besides those of the config
        self.by_sigma = LossBySigma(self.source.sigma_tn)
        self._seen: list[tuple[Tensor, Tensor, Tensor]] = []  # index, sigma_t and loss of each part of a batch
        self._norms: list[Tensor] = []  # of the gradient of each step
        self.was_finished = self.final.exists()
        self._resume()
        self.first_step, self.started = self.step, time.perf_counter()
        records = self.fabric.is_global_zero and not self.was_finished
        self.recorder = Recorder(run_dir, self.step) if records else None

    @property
    def final(self) -> Path:
        """The finished run's checkpoint."""
        return final_path(self.run_dir)

    @contextmanager
    def batches(self) -> Iterator[Iterator[Batch]]:
        """The batches from here to the end, where the model is.

        A GPU does not wait for them: the next one is prepared in a thread. A CPU would gain nothing, since
        the thread would take the time from the step.
        """
        settings = self.config.train

        def prepare(place: int) -> Batch:
            walks = settings.consistency.is_on(place // settings.accumulate, settings.num_steps)
            num_walks = max(1, round(settings.consistency.sub_batch * self.loader.num_mine)) if walks else 0
            return self.loader.batch(place, num_walks, settings.consistency.num_draws).to(self.fabric.device)

        places = range(self.step * settings.accumulate, settings.num_steps * settings.accumulate)
        if self.fabric.device.type == "cpu":
            yield map(prepare, places)
            return
        with closing(prepared_ahead(prepare, places)) as batches:
            yield batches

    def note_loss(self, batch: Batch, loss: Tensor) -> None:
        """Keep what a part of a batch gave, on its device until `_catch_up`."""
        self._seen.append((batch.index, batch.sigma_t, loss.detach()))

    def note_gradient(self, grad_norm: Tensor | None) -> None:
        """Have the optimizer skip this step if the gradient is not finite, without asking the device.

        Where `found_inf` is 1 the fused optimizer changes neither weights nor moments nor its count of
        steps. With fp16 the gradients' scaler skips by itself, and learns from it.
        """
        nan = torch.tensor(math.nan, device=self.fabric.device)
        norm = nan if grad_norm is None else whole(grad_norm.detach())
        self._norms.append(norm)
        if self.config.train.precision != "fp16":
            self.optimizer.optimizer.found_inf = (~norm.isfinite()).float()

    def _catch_up(self) -> None:
        """Read what the steps since the last call gave; ten in a row without a finite gradient end the run."""
        if not self._norms:
            return
        norms = torch.stack(self._norms).tolist()
        self._grad_norm = norms[-1]
        num_parts = len(self._seen) // len(norms)
        for number, norm in enumerate(norms):
            bad = not math.isfinite(norm)
            self.num_skipped += bad
            self.num_skipped_in_a_row = (self.num_skipped_in_a_row + 1) * bad
            if self.num_skipped_in_a_row >= _MAX_SKIPPED_IN_A_ROW:
                index, sigma_t, loss = (column.cpu() for column in self._seen[(number + 1) * num_parts - 1])
                where = diagnose(index, sigma_t, loss, self.by_sigma.edges)
                raise FloatingPointError(
                    f"step {self.step - len(norms) + number + 1}: {_MAX_SKIPPED_IN_A_ROW} steps in a row "
                    f"without a finite gradient; {where}. Lower train.lr or look at these images; the last "
                    "state is kept"
                )
        _, sigma_t, loss = (torch.cat(column) for column in zip(*self._seen, strict=True))
        self.by_sigma.add(sigma_t, loss)
        self._seen, self._norms = [], []

    def finish_step(self, on_progress: Callable[[Progress], None]) -> None:
        """Count the step, and record, draw and save what is due."""
        self.step += 1
        settings, mean_loss = self.config.train, self._seen[-1][2].mean()
        last = self.step == settings.num_steps
        num_images = (self.step - self.first_step) * settings.batch_size
        images_per_second = num_images / (time.perf_counter() - self.started)
        logs = self.step % settings.log_every == 0 or last
        saves = self.step % settings.state_every == 0 or last
        if logs or saves or len(self._norms) >= _MAX_UNREAD:
            self._catch_up()
        if logs:
            self._record(images_per_second)
        if self.fabric.is_global_zero:
            on_progress(Progress(self.step, settings.num_steps, images_per_second, mean_loss))
        if settings.picture_every and self.step % settings.picture_every == 0:
            self._draw_samples()
        if settings.average_every and (self.step % settings.average_every == 0 or last):
            averages = [found for average in self.averages if (found := self._whole(average)) is not None]
            if averages:
                save_averages(self.run_dir, self.step, averages)
        due = settings.snapshot_every and self.step % settings.snapshot_every == 0
        if not last and (due or self.step in self.snapshot_steps):
            self._save_checkpoint(snapshot_path(self.run_dir, self.step))
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
        finished = self.step == self.config.train.num_steps
        if not self.was_finished:
            self._catch_up()
            self._save_state()
            if finished:
                self._save_checkpoint(self.final)
        if self.recorder is not None:
            self.recorder.close()
        self.fabric.barrier()
        return TrainResult(self.run_dir, self.step, finished, self.final)

    def _load_weights(self, path: Path) -> None:
        loaded = load_checkpoint(path)
        mine, theirs = self.denoiser.state_dict(), loaded.denoiser.state_dict()
        for key in sorted(mine.keys() | theirs.keys()):
            if key not in mine or key not in theirs or mine[key].shape != theirs[key].shape:
                shapes = [tuple(side[key].shape) if key in side else "nothing" for side in (theirs, mine)]
                raise ValueError(
                    f"{path} is of another network: {key} is {shapes[0]} there and {shapes[1]} here"
                )
        self.denoiser.load_state_dict(theirs)

    def _find_continued(self) -> "_Continued | None":
        """The run to continue, if there is one and this run has not started; checked against this one."""
        folder, settings = self.config.train.continue_from, self.config.train
        if folder is None or (self.run_dir / "config.json").exists():
            return None
        state = load_state(folder / "state", remove_damaged=False)
        if state is None or not (folder / "config.json").is_file():
            raise ValueError(
                f"train.continue_from = {folder}: there is no run with a saved state in that folder"
            )
        theirs = read_run(folder / "config.json")
        step, here = state[1]["step"], self.config.model_dump(mode="json")
        different = differences(theirs["net"], self.net_config.model_dump(mode="json"))
        settings_there = {"optimizer": "adam", **theirs["config"]["train"]}
        # Steps are counted in batches, and a state holds the moments of one optimizer.
        for name in ("batch_size", "accumulate", "optimizer"):
            if settings_there[name] != here["train"][name]:
                different.append(f"train.{name}: {settings_there[name]} there, {here['train'][name]} here")
        if different:
            raise ValueError(
                f"train.continue_from = {folder} is of another network, batch or optimizer "
                f"({'; '.join(different)})"
            )
        if step >= settings.num_steps:
            raise ValueError(
                f"train.continue_from = {folder} is at step {step} already: set train.num_steps above that"
            )
        parent = {
            "fingerprint": theirs["fingerprint"],
            "step": step,
            "changed": differences(theirs["config"], here),
        }
        same_data = theirs["fingerprint"]["data"] == self.source.fingerprint
        return _Continued(state, [*theirs.get("lineage", []), parent], same_data)

    def _resume(self) -> None:
        if self.was_finished:  # its states may be gone, and nothing is left to do
            self.step = self.config.train.num_steps
            return
        state = self.continued.state if self.continued is not None else load_state(self.run_dir / "state")
        if state is None:
            if self.config.train.continue_from is not None:
                raise ValueError(f"{self.run_dir} has lost its states: remove it and continue again")
            return
        tensors, info = state
        if self.averages and not any(key.startswith("average_") for key in tensors):
            raise ValueError(
                "train.average_every needs averages from the first step on, and the state to continue from has "
                "none: leave it out"
            )
        unpack_tensors(tensors, self._modules, self.optimizer)
        self.step, self.num_skipped = info["step"], info["num_skipped"]
        self.num_skipped_in_a_row = info["num_skipped_in_a_row"]
        # Rank 0 carries the sums that were gathered before; the others start from zero.
        if self.fabric.is_global_zero and (self.continued is None or self.continued.same_data):
            self.by_sigma.totals = torch.tensor(info["by_sigma"], dtype=torch.float64)
        if self.continued is not None:
            self._save_state()  # from here on the run needs nothing of the other
            self.continued = None

    def _save_state(self) -> None:
        totals = self._sum_over_ranks(self.by_sigma.totals)
        is_first = self.fabric.is_global_zero
        tensors = pack_tensors(self._modules, self.optimizer, is_first) if is_first or self._is_sharded else {}
        if not is_first:
            return
        info = {
            "num_skipped": self.num_skipped,
            "num_skipped_in_a_row": self.num_skipped_in_a_row,
            "by_sigma": totals.tolist(),
        }
        save_state(self.run_dir / "state", self.step, tensors, info)

    def _whole(self, module: Preconditioned) -> Preconditioned | None:
        """A module with all of its weights, on the first rank; None on the others, which give their parts."""
        if not self._is_sharded:
            return module if self.fabric.is_global_zero else None
        found = {}
        for key, value in module.state_dict().items():
            value = whole(value)
            if self.fabric.is_global_zero:
                found[key] = value.cpu()
        if not found:
            return None
        plain = build_denoiser(self.net_config).eval()
        plain.load_state_dict(found)
        return plain

    def _sum_over_ranks(self, values: Tensor) -> Tensor:
        summed = self.fabric.all_reduce(values.clone(), reduce_op="sum")
        assert isinstance(summed, Tensor)
        return summed

    def _record(self, images_per_second: float) -> None:
        self.by_sigma.totals = self._sum_over_ranks(self.by_sigma.totals)
        if self.recorder is not None:
            sums, counts = self.by_sigma.totals.sum(1).tolist()
            self.recorder.add(
                {
                    "step": self.step,
                    "num_images": self.step * self.config.train.batch_size,
                    "loss": sums / counts if counts else None,
                    "grad_norm": self._grad_norm if math.isfinite(self._grad_norm) else None,
                    "lr": self.optimizer.param_groups[0]["lr"],
                    "num_skipped": self.num_skipped,
                    "images_per_second": images_per_second,
                    "loss_by_sigma": self.by_sigma.summary(),
                }
            )
        self.by_sigma.totals = torch.zeros_like(self.by_sigma.totals)

    def _save_checkpoint(self, path: Path) -> None:
        if (ema := self._whole(self.ema)) is None:
            return
        info = CheckpointInfo(
            dataset=self.source.name,
            sigma_tn=noise_levels(self.source.sigma_tn),
            clean_fraction=(self.source.sigma_tn == 0).float().mean().item(),
            num_images=len(self.source),
            seed=self.config.train.seed,
            consistency=self.config.train.consistency.coefficient > 0,
            loops=self.config.train.loops,
            num_images_seen=(self.steps_before + self.step) * self.config.train.batch_size,
            physical_range=self.source.physical_range,
            label_names=self.source.class_names,
        )
        save_checkpoint(path, ema, self.net_config, info)

    def _draw_samples(self) -> None:
        if (ema := self._whole(self.ema)) is None:
            return
        shape, num_classes = self.net_config.image_shape, self.net_config.num_classes
        label = torch.arange(_NUM_PICTURED) % num_classes if num_classes else None
        seeds, device = range(_NUM_PICTURED), self.fabric.device
        batch = next(self.sample.generate(ema.to(device), seeds, shape, label, _NUM_PICTURED, device))
        with write_whole(self.run_dir / "samples" / f"{self.step:09d}.png") as partial:
            image_grid(batch.images, 8).save(partial)


def claim_folder(config: RunConfig, run_dir: Path, source: ImageSource, lineage: list[dict[str, Any]]) -> None:
    """Write config.json, or make sure that the folder belongs to this very run."""
    path = run_dir / "config.json"
    identity = {"data": source.fingerprint, "run": config.fingerprint(source)}
    if path.exists():
        found = read_run(path)
        known, config_there = found["fingerprint"], found["config"]
        if known["data"] != identity["data"]:
            raise ValueError(
                f"{run_dir} was trained on other images: {source.name} has changed since the run "
                "began. Restore the store, or train into another folder"
            )
        if known["run"] != identity["run"]:
            here = config.model_dump(mode="json")
            for same in ("data", "sample"):  # wherever the images lie, however pictures are sampled
                here[same] = config_there.get(same)
            different = differences(config_there, here)
            raise ValueError(
                f"{run_dir} holds a run with another config ({'; '.join(different)}): train into another folder"
            )
        return
    record = {
        "assay": assay.__version__,
        "fingerprint": identity,
        "data": {"name": source.name, "num_images": len(source)},
        "config": config.model_dump(mode="json"),
        "net": config.net_config(source).model_dump(mode="json"),
        "lineage": lineage,
    }
    with write_whole(path) as partial:
        partial.write_text(json.dumps(record, indent=2))


def final_path(run_dir: Path) -> Path:
    """Where the weights of a finished run are."""
    return run_dir / "snapshots" / "final.safetensors"


def snapshot_path(run_dir: Path, step: int) -> Path:
    """Where the weights after a step are kept, if that was asked for."""
    return run_dir / "snapshots" / f"{step:09d}.safetensors"


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
