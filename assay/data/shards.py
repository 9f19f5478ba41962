"""Stores that are large or elsewhere: several stores as one, and stores by their address.

    shards.json             the name, and the checksum of each shard's meta.json
    job.json                what all shards are made of, by content
    shard-00001-of-00016/   a store, with a part of the images
    ...

Shards are packed one by one, so that packing can be interrupted, or done by several processes or machines at
the same time. A store elsewhere has an address that fsspec knows, such as s3://bucket/store or
gs://bucket/store. Its columns are copied to a local folder when it is opened, its images block by block
(`assay.data.blocks`) as they are first read, each compared with its checksum.
"""

import json
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from assay.archives import check_member_name
from assay.data.blocks import Fetch
from assay.data.store import CHECKSUM, Store, open_one
from assay.data.view import Joined
from assay.errors import AssayError
from assay.files import content_hash, decoding, hold_lock, read_json, sha256, write_whole

_SHARDS = "shards.json"
_JOB = "job.json"
_HEADER_BYTES = 4096  # the header of an array is shorter
_SECONDS_TO_FILL = 600.0  # how long another process may copy columns


class ShardedStore(Joined, Store):
    """Several stores as one: the images of each after those of the one before."""

    def __init__(self, path: Path, name: str, shards: Sequence[Store]) -> None:
        super().__init__(shards)
        self.path, self.name, self._shards = path, name, list(shards)
        metas = [shard.meta for shard in shards]
        counts = {key: sum(getattr(meta, key) for meta in metas) for key in ("num_images", "num_clean")}
        self.meta = metas[0].model_copy(update={**counts, "name": name, "checksums": {}})

    @property
    def num_mapped(self) -> int:
        """How many images have a map of noise levels."""
        return sum(shard.num_mapped for shard in self._shards)

    def source_names(self, index: Sequence[int]) -> list[str]:
        """The files that these images came from."""
        ends, at = self._ends.numpy(), np.asarray(index, dtype=np.int64) % len(self)
        which = np.searchsorted(ends, at, side="right")
        return [self._shards[w].source_names([int(i - ends[w])])[0] for w, i in zip(which, at, strict=True)]

    def verify(self) -> None:
        """Compare every file with its checksum; raises an error about the first that has changed."""
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
    return address_of(path) is not None or (path / "meta.json").is_file() or (path / _SHARDS).is_file()


def shard_path(path: Path, number: int, num_shards: int) -> Path:
    """Where one of several shards lies, counted from 1."""
    return path / f"shard-{number:05d}-of-{num_shards:05d}"


def declare_job(path: Path, settings: str, files: Sequence[Path]) -> None:
    """Record what the shards of a folder are made of, or reject what is not the same.

    The contents of `files`, which may be folders, count. Whoever comes first reads them; later ones compare
    names, sizes, and what a copy cannot keep: the number of the file on its disk and the time of its last
    change. They read the contents only where these differ.
    """
    record, every = path / _JOB, [file for each in files for file in (each, *sorted(each.rglob("*")))]
    with hold_lock(path / "job", "{holder} is reading the same sources", seconds=math.inf):
        stats = [(file.name, file.stat()) for file in every]
        looks = content_hash([(name, stat.st_size, stat.st_ino, stat.st_ctime_ns) for name, stat in stats])
        known = read_json(record) if record.exists() else {}
        if (known.get("settings"), known.get("looks")) == (settings, looks):
            return
        job = {"settings": settings, "contents": content_hash(*files)}
        if known and not job.items() <= known.items():
            what = "has shards of other images or settings"
            raise AssayError(what, path=path, key="shards", cure="remove it, or choose another name")
        with write_whole(record) as partial:
            partial.write_text(json.dumps({**job, "looks": looks}))


def join_shards(path: Path, name: str, num_shards: int) -> Store | None:
    """Declare a folder of shards complete and open it; None if some are still missing."""
    shards = [shard_path(path, number, num_shards) for number in range(1, num_shards + 1)]
    if not all(map(is_store, shards)):
        return None
    tree = {"name": name, "shards": {shard.name: sha256(shard / "meta.json") for shard in shards}}
    with write_whole(path / _SHARDS) as partial:
        partial.write_text(json.dumps({**tree, CHECKSUM: content_hash(tree)}, indent=2) + "\n")
    return open_store(path)


def _open_shards(path: Path, fetches: Callable[[str], Fetch | None] = lambda shard: None) -> Store:
    file = path / _SHARDS
    with decoding(file, "restore it, or pack the store again"):
        tree = dict(json.loads(file.read_bytes()))
        if tree.pop(CHECKSUM, None) != content_hash(tree) or not tree["shards"]:
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
    here = cache / "stores" / content_hash(address)[:16]
    busy = f"{here} is being filled by {{holder}}: wait for it, or set ASSAY_CACHE to another folder"
    with (
        decoding(address, "check the address and your access to it, or copy the store there again"),
        hold_lock(here, busy, seconds=_SECONDS_TO_FILL),
    ):
        files, root = fsspec.core.url_to_fs(address)
        is_sharded = files.isfile(f"{root}/{_SHARDS}")
        if not is_sharded and not files.isfile(f"{root}/meta.json"):
            what = f"is not a store: it has neither meta.json nor {_SHARDS}"
            raise AssayError(what, path=address, cure="check the address")
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
        raise AssayError("lacks shards", path=path, cure="run the same `assay data pack` again to make them")
    return open_one(path)
