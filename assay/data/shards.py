"""Stores that are large or elsewhere: several stores as one, and stores by their address.

    shards.json             the name, and the checksum of each shard's meta.json
    shard-00001-of-00016/   a store, with a part of the images
    ...

Shards are packed one by one, so that packing can be interrupted, or done by several processes or machines at
the same time. A store elsewhere has an address that fsspec knows, such as s3://bucket/store or
gs://bucket/store. Its columns are copied to a local folder when it is opened, its images block by block
(`assay.data.blocks`) as they are first read, each compared with its checksum.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from assay.archives import check_member_name
from assay.data.blocks import Fetch, Rows
from assay.data.store import CHECKSUM, Store, hash_of, no_kernel, open_one
from assay.files import naming, sha256, write_whole

_SHARDS = "shards.json"
_HEADER_BYTES = 4096  # the header of an array is shorter


class ShardedStore(Store):
    """Several stores as one: the images of each after those of the one before."""

    def __init__(self, path: Path, name: str, shards: Sequence[Store]) -> None:
        first, metas = shards[0].meta, [shard.meta for shard in shards]
        for shard in shards:
            for what in ("image_shape", "class_names"):
                if getattr(shard.meta, what) != getattr(first, what):
                    raise ValueError(
                        f"{shard.path} has {what} = {getattr(shard.meta, what)}, {shards[0].path} "
                        f"{getattr(first, what)}: pack all shards alike"
                    )
        self.path, self.name, self._shards = path, name, list(shards)
        self.image_shape, self.class_names = first.image_shape, first.class_names
        self.num_classes = len(first.class_names)
        units = {repr(shard.physical_range) for shard in shards}
        self.physical_range = shards[0].physical_range if len(units) == 1 else None
        counts = {key: sum(getattr(meta, key) for meta in metas) for key in ("num_images", "num_clean")}
        self.meta = first.model_copy(update={**counts, "name": name, "checksums": {}})
        self.sigma_tn, self.label, self.usable_from, self.convolved = (
            torch.cat([getattr(shard, key) for shard in shards])
            for key in ("sigma_tn", "label", "usable_from", "convolved")
        )
        self.group = None
        if any(shard.group is not None for shard in shards):
            groups, offset = [], 0
            for shard in shards:  # patches of one picture are in one shard
                groups.append((torch.arange(len(shard)) if shard.group is None else shard.group) + offset)
                offset = int(groups[-1].max()) + 1
            self.group = torch.cat(groups)
        self.has_map = any(shard.has_map for shard in shards)
        self.fingerprint = hash_of([shard.fingerprint for shard in shards])
        arrays, files = [shard._images for shard in shards], [shard.path / "images.npy" for shard in shards]
        self.rows = Rows(arrays, files)
        self._are_alike = len({(meta.dtype, meta.value_range) for meta in metas}) == 1
        for shard, array, file in zip(shards, arrays, files, strict=True):
            shard.rows = Rows([array], [file], 0 if self._are_alike else self.rows.num_bytes)

    def _parts(self, index: np.ndarray) -> Iterator[tuple[Store, np.ndarray, np.ndarray]]:
        """Each shard that holds some of the images, their places in `index`, and their numbers in it."""
        number, mine = self.rows.place(index)
        for which in np.unique(number).tolist():
            rows = np.flatnonzero(number == which)
            yield self._shards[which], rows, mine[rows]

    def read(self, index: Tensor) -> Tensor:
        """`index` (B,) -> `x_tn` (B, C, H, W) float32, scaled to [-1, 1] but never clipped to it."""
        if self._are_alike:
            if not all(shard.is_checked for shard in self._shards):
                for shard, _, mine in self._parts(index.numpy()):
                    shard.check_images(mine)
            return self._scaled(self.rows.read(index.numpy()))
        x = torch.empty(len(index), *self.image_shape)
        for shard, rows, mine in self._parts(index.numpy()):
            x[torch.from_numpy(rows)] = shard.read(torch.from_numpy(mine))
        return x

    def read_map(self, index: Tensor) -> Tensor | None:
        """`index` (B,) -> the noise level of each pixel (B, C, H, W), or None if no image has a map."""
        if not self.has_map:
            return None
        levels = self.sigma_tn[index][:, None, None, None].repeat(1, *self.image_shape)
        return self._filled(index, levels, Store.read_map)

    def read_kernel(self, index: Tensor) -> Tensor | None:
        """`index` (B,) -> the kernel of each image (B, H, W), or None if no image has one."""
        if not bool(self.convolved.any()):
            return None
        return self._filled(index, no_kernel(self.image_shape).repeat(len(index), 1, 1), Store.read_kernel)

    def _filled(self, index: Tensor, default: Tensor, read: Callable[[Store, Tensor], Tensor | None]) -> Tensor:
        """What `read` finds of the images `index` (B,), `default` (B, ...) in shards that have none."""
        for shard, rows, mine in self._parts(index.numpy()):
            if (found := read(shard, torch.from_numpy(mine))) is not None:
                default[torch.from_numpy(rows)] = found.expand(-1, *default.shape[1:])
        return default

    @property
    def num_mapped(self) -> int:
        """How many images have a map of noise levels."""
        return sum(shard.num_mapped for shard in self._shards)

    def source_names(self, index: Sequence[int]) -> list[str]:
        """The files that these images came from."""
        names = [""] * len(index)
        for shard, rows, mine in self._parts(np.asarray(index, dtype=np.int64)):
            for row, name in zip(rows.tolist(), shard.source_names(mine.tolist()), strict=True):
                names[row] = name
        return names

    def verify(self) -> None:
        """Compare every file with its checksum; raises ValueError on the first that has changed."""
        for shard in self._shards:
            shard.verify()


def address_of(path: Path | str) -> str | None:
    """The address of a store elsewhere, e.g. s3://bucket/store; None of a folder here.

    Paths in config files have lost a slash, which is put back.
    """
    found = re.fullmatch(r"([a-z][a-z0-9+]+):/+(.+)", str(path))
    return None if found is None else f"{found[1]}://{'/' if found[1] == 'file' else ''}{found[2]}"


def is_store(path: Path) -> bool:
    """Whether this names a store: a folder with one, or an address."""
    return address_of(path) is not None or any((path / file).is_file() for file in ("meta.json", _SHARDS))


def shard_path(path: Path, number: int, num_shards: int) -> Path:
    """Where one of several shards lies, counted from 1."""
    return path / f"shard-{number:05d}-of-{num_shards:05d}"


def join_shards(path: Path, name: str, num_shards: int) -> Store | None:
    """Declare a folder of shards complete and open it; None if some are still missing."""
    shards = [shard_path(path, number, num_shards) for number in range(1, num_shards + 1)]
    if not all(map(is_store, shards)):
        return None
    tree = {"name": name, "shards": {shard.name: sha256(shard / "meta.json") for shard in shards}}
    with write_whole(path / _SHARDS) as partial:
        partial.write_text(json.dumps({**tree, CHECKSUM: hash_of(tree)}, indent=2) + "\n")
    return open_store(path)


def _open_shards(path: Path, fetches: Callable[[str], Fetch | None] = lambda shard: None) -> Store:
    file = path / _SHARDS
    with naming(file, "restore it, or pack the store again"):
        tree = dict(json.loads(file.read_bytes()))
        if tree.pop(CHECKSUM, None) != hash_of(tree) or not tree["shards"]:
            raise ValueError("it has changed since it was packed")
        for shard, checksum in tree["shards"].items():
            check_member_name(path, shard)
            if sha256(path / shard / "meta.json") != checksum:
                raise ValueError(f"{shard} is not the shard that was packed")
    shards = [open_one(path / shard, fetches(shard)) for shard in tree["shards"]]
    return ShardedStore(path, tree["name"], shards)


def _open_elsewhere(address: str) -> Store:
    """Open a store by its address: columns are copied to the cache at once, images as they are read."""
    import fsspec

    cache = Path(os.environ.get("ASSAY_CACHE") or Path.home() / ".cache" / "assay")
    here = cache / "stores" / hash_of(address)[:16]
    with naming(address, "check the address and your access to it, or copy the store there again"):
        files, root = fsspec.core.url_to_fs(address)
        is_sharded = files.isfile(f"{root}/{_SHARDS}")
        if not is_sharded and not files.isfile(f"{root}/meta.json"):
            raise FileNotFoundError(f"{address} is not a store: it has neither meta.json nor {_SHARDS}")
        if not is_sharded:
            return open_one(here, _mirror(files, root, here))
        _copy(files, f"{root}/{_SHARDS}", here / _SHARDS)
        names = json.loads((here / _SHARDS).read_bytes())["shards"]
        for name in names:
            check_member_name(here, name)
        found = {name: _mirror(files, f"{root}/{name}", here / name) for name in names}
        return _open_shards(here, found.__getitem__)


def _mirror(files: Any, root: str, here: Path) -> Fetch:
    """Make a local copy of a store without its images, which the function that is returned fetches."""
    _copy(files, f"{root}/meta.json", here / "meta.json")
    checksums = json.loads((here / "meta.json").read_bytes())["checksums"]
    for name in checksums.keys() - {"images.npy"}:
        check_member_name(here, name)
        if not (here / name).is_file() or sha256(here / name) != checksums[name]:
            _copy(files, f"{root}/{name}", here / name)
    images, size = f"{root}/images.npy", files.size(f"{root}/images.npy")

    def fetch(starts: Sequence[int], stops: Sequence[int]) -> Sequence[bytes]:
        return files.cat_ranges([images] * len(starts), list(starts), list(stops), on_error="raise")

    copy = here / "images.npy"
    if not copy.is_file() or copy.stat().st_size != size:
        with write_whole(copy) as partial, open(partial, "wb") as file:
            file.write(fetch([0], [min(size, _HEADER_BYTES)])[0])  # with the header, by which it is mapped
            file.truncate(size)  # the rest takes no room yet
    return fetch


def _copy(files: Any, source: str, target: Path) -> None:
    with write_whole(target, flush=False) as partial:  # what a power cut spoils is copied again
        files.get_file(source, str(partial))


def open_store(path: Path | str) -> Store:
    """Open a store: a folder that `assay data pack` or `from_arrays(...).save` wrote, or its address elsewhere.

    Images are read from disk when they are needed.

    >>> images = assay.from_arrays(np.zeros((10, 8, 8)), sigma=0.1, name="scans")
    >>> images.save("stores/scans")
    <scans: 10 images of 1 x 8 x 8, 0 clean, 10 noisy>
    >>> store = assay.open_store("stores/scans")
    >>> store
    <scans: 10 images of 1 x 8 x 8, 0 clean, 10 noisy>
    >>> store.read(torch.tensor([0, 5])).shape
    torch.Size([2, 1, 8, 8])
    """
    if (address := address_of(path)) is not None:
        return _open_elsewhere(address)
    path = Path(path)
    if (path / _SHARDS).is_file():
        return _open_shards(path)
    if next(path.glob("shard-*"), None) is not None:
        raise FileNotFoundError(f"{path} lacks shards: run the same `assay data pack` again to make them")
    return open_one(path)
