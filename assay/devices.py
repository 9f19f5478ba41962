"""Where to compute: one device by name, several at once by threads, or by processes behind Lightning Fabric.

A device is "auto" (a GPU if torch can use one, else the CPU), "cpu", "cuda" (or "gpu"), "cuda:1" or "mps".
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import torch
from pydantic import Field
from threadpoolctl import threadpool_limits
from torch import nn

from assay.errors import AssayError, check_same

if TYPE_CHECKING:  # Fabric takes as long to import as torch: only a training does
    from lightning_fabric import Fabric
    from torch.distributed.device_mesh import DeviceMesh

NumDevices = Annotated[int, Field(ge=1)] | Literal["auto"]
Strategy = Literal["ddp", "fsdp"]
Item = TypeVar("Item")
Result = TypeVar("Result")


def limit_threads(num_threads: int) -> None:
    """Give this process a share of the cores: in torch, and in the BLAS and OpenMP of numpy and scipy."""
    torch.set_num_threads(num_threads)
    threadpool_limits(num_threads)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread: what is too small for more of them would only wait for those of others."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def find_devices(device: str = "auto") -> list[torch.device]:
    """All GPUs that this process may use, if `device` names them without a number; else the one device."""
    found = find_device(device)
    if found.type != "cuda" or found.index is not None:
        return [found]
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def spread(work: Callable[[Item, int], Result], items: Iterable[Item], num_devices: int) -> Iterator[Result]:
    """`work(item, device_number)` of every item, in order, with a thread for each of `num_devices` devices."""
    if num_devices == 1:
        yield from (work(item, 0) for item in items)
        return
    with ExitStack() as threads:
        pools = [threads.enter_context(ThreadPoolExecutor(1)) for _ in range(num_devices)]
        waiting: deque[Future[Result]] = deque()
        for number, item in enumerate(items):
            if len(waiting) == 2 * num_devices:  # one at work on each device, and one more
                yield waiting.popleft().result()
            waiting.append(pools[number % num_devices].submit(work, item, number % num_devices))
        while waiting:
            yield waiting.popleft().result()


def find_device(device: str = "auto") -> torch.device:
    """The torch device of this name; raises if this machine cannot use it."""
    if device == "auto":
        kinds = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
        return torch.device(next((kind for kind, usable in kinds.items() if usable), "cpu"))
    try:
        found = torch.device(device.replace("gpu", "cuda"))
        torch.zeros(1, device=found).cpu()
    except (RuntimeError, AssertionError) as error:  # the latter where torch was built without CUDA
        reason = str(error).splitlines()[0].split(". ")[0].rstrip(".")
        what, cure = f"{device} cannot be used here ({reason})", "choose cpu, or auto for a GPU if there is one"
        raise AssayError(what, key="device", cure=cure) from error
    return found


def shard(module: nn.Module, mesh: "DeviceMesh") -> nn.Module:
    """Spread the weights of a module over devices (FSDP), to be gathered block by block when they are used."""
    from torch.distributed.fsdp import fully_shard

    module.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]  # all that FSDP takes
    lists = [part for part in module.modules() if isinstance(part, (nn.ModuleList, nn.ModuleDict))]
    blocks = [block for part in reversed(lists) for block in part.children()]  # inner ones first
    for block in (*blocks, module):
        fully_shard(block, mesh=mesh["data_parallel"])
    return module


def mesh_of(fabric: "Fabric") -> "DeviceMesh | None":
    """The devices over which weights are spread; None if each has them all."""
    from lightning_fabric.strategies import ModelParallelStrategy

    return fabric.strategy.device_mesh if isinstance(fabric.strategy, ModelParallelStrategy) else None


def count_devices(device: str, devices: NumDevices) -> int:
    """How many devices of this machine are meant; "auto" is every GPU, or the CPU once.

    On a CPU `devices` counts processes, at most one per core.
    """
    found = find_device(device)
    kinds = {"cuda": torch.cuda.device_count(), "mps": 1}
    num_here = kinds.get(found.type, os.cpu_count() or 1)
    if devices == "auto":
        return num_here if found.type == "cuda" and found.index is None else 1
    if not 1 <= devices <= num_here:
        what = f"{devices} are not there: this machine has {num_here} of {found.type}"
        raise AssayError(what, key="devices", cure=f"ask for 1 to {num_here}")
    if found.index is not None and devices > 1:
        raise AssayError(f"{device} is a single device", key="device", cure="use cuda for several")
    return devices


def open_fabric(
    device: str = "auto",
    devices: NumDevices = 1,
    num_nodes: int = 1,
    precision: Any = "32-true",
    strategy: Strategy = "ddp",
) -> "Fabric":
    """Join the processes of a training, one per device; see `count_devices`.

    Modules that are set up with "fsdp" share out their weights over the devices, if there are several.
    """
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import ModelParallelStrategy

    found, per_node = find_device(device), count_devices(device, devices)
    num_ranks = per_node * num_nodes
    chosen: Any = [found.index] if found.index is not None else per_node
    # Fabric's own "fsdp" is the first version of FSDP, and rejects CPUs.
    sharding = ModelParallelStrategy(shard, data_parallel_size=num_ranks, tensor_parallel_size=1)
    how: Any = sharding if strategy == "fsdp" and num_ranks > 1 else "auto"
    fabric = Fabric(
        accelerator=found.type, strategy=how, devices=chosen, num_nodes=num_nodes, precision=precision
    )
    num_started = int(os.environ.get("WORLD_SIZE", fabric.world_size))
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", num_started))
    cure = f"set devices = {per_node} and num_nodes = {num_started // per_node}, or do without torchrun"
    check_same(num_started, fabric.world_size, "processes and devices differ", key="devices", cure=cure)
    fabric.launch()
    return fabric
