"""Reads the data in a foreign pickle without running any of it.

A pickle is a program: it names functions ("globals") and calls them. This reader knows a short list of
names that EDM snapshots and torch archives use, gives each a harmless stand-in of its own, and refuses
any other by name. Source code embedded in a pickle is a string here and stays one. Modules come back
as `Plain` objects, tensors as tensors that never exceed the bytes present in the file.
"""

import io
import math
import pickle
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np
import torch
from torch import Tensor


class Refused(ValueError):
    """The pickle asks for something that no checkpoint needs."""


@dataclass
class Plain:
    """An object of a foreign class: its class name and its state, nothing that runs."""

    class_name: str
    state: dict[str, Any] = field(default_factory=dict)


def read_pickle(path: Path) -> Any:
    """The content of a pickle or of a `torch.save` archive: containers, numbers, tensors, `Plain` objects."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist or is not a file")
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                return _read_archive(archive, path.stat().st_size)
        with open(path, "rb") as file:
            return _Unpickler(_Bounded(file, path.stat().st_size)).load()
    except Refused as error:
        raise ValueError(f"{path} was refused and nothing in it was run: {error}") from None
    except Exception as error:  # a damaged program fails in any way whatever
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} is damaged, truncated or not a network pickle ({reason})") from error


@dataclass(frozen=True)
class _Global:
    """A name that pickles may use, and what it makes here instead."""

    name: str
    make: Callable[..., Any]


@dataclass(frozen=True)
class _StorageType:
    dtype: torch.dtype


@dataclass(frozen=True)
class _Storage:
    dtype: torch.dtype
    data: bytearray


class _Bounded:
    """A file that refuses to read more bytes than it has, before any memory is set aside for them."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self.file, self.size = file, size

    def read(self, count: int) -> bytes:
        if count > self.size - self.file.tell():
            raise Refused(f"it declares {count} bytes where {self.size - self.file.tell()} are left")
        return self.file.read(count)

    def readline(self) -> bytes:
        return self.file.readline()


class _Unpickler(pickle._Unpickler):
    """Python's own unpickler, with every opcode that calls or changes something replaced.

    The version in Python rather than C: opcodes can be replaced, and a hostile memo index costs nothing.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)
    stack: list[Any]

    def __init__(self, file: "_Bounded", read_storage: Callable[[str, int], bytearray] | None = None) -> None:
        super().__init__(file)
        self.read_storage = read_storage
        self.bytes_left = file.size  # for storages: a pickle may not unfold into more than it holds

    def find_class(self, module: str, name: str) -> Any:
        key = f"{module}.{name}"
        if module == "torch" and name.removesuffix("Storage") in _STORAGE_DTYPES:
            return _StorageType(_STORAGE_DTYPES[name.removesuffix("Storage")])
        if key == "torch.storage._load_from_bytes":
            return _Global(key, self.load_from_bytes)
        if key not in _GLOBALS:
            raise Refused(f"it asks for {key}, which no checkpoint needs")
        return _Global(key, _GLOBALS[key])

    def persistent_load(self, saved_id: Any) -> _Storage:
        kind, storage_type, key, _location, numel = saved_id[:5]
        if kind != "storage" or not isinstance(storage_type, _StorageType) or self.read_storage is None:
            raise Refused(f"it refers to {kind!r} outside the pickle")
        return _Storage(storage_type.dtype, self.read_storage(key, numel * storage_type.dtype.itemsize))

    def load_from_bytes(self, data: bytes) -> _Storage:
        """A storage inside a pickle: three header pickles, the reference, its key, a length, the values."""
        self.bytes_left -= len(data)
        if self.bytes_left < 0:
            raise Refused("it repeats its tensors until they exceed the file")
        file = _Bounded(io.BytesIO(data), len(data))
        for _ in range(3):
            _Unpickler(file).load()
        sizes: list[int] = []
        values = bytearray()

        def read_later(_key: str, size: int) -> bytearray:
            sizes.append(size)
            return values

        storage = _Unpickler(file, read_later).load()
        _Unpickler(file).load()
        if not isinstance(storage, _Storage) or len(sizes) != 1:
            raise Refused("it hides something other than one storage among the bytes of a tensor")
        (numel,) = struct.unpack("<q", file.read(8))
        if numel * storage.dtype.itemsize != sizes[0]:
            raise Refused(f"it declares a storage of {sizes[0]} bytes for {numel} values")
        values += file.read(sizes[0])
        return storage

    def call(self) -> None:
        """REDUCE and NEWOBJ: the stand-in makes its object from the arguments."""
        arguments = self.stack.pop()
        function = self.stack.pop()
        if not isinstance(function, _Global):
            raise Refused(f"it calls a {type(function).__name__}")
        self.stack.append(function.make(*arguments))

    def build(self) -> None:
        """BUILD: modules get their state; a container's extra attributes are dropped."""
        state = self.stack.pop()
        if isinstance(self.stack[-1], Plain):
            self.stack[-1].state = state
        elif not isinstance(self.stack[-1], dict | _Dtype):
            raise Refused(f"it changes a {type(self.stack[-1]).__name__}")

    def refuse(self) -> None:
        """Opcodes of old protocols and of the extension registry, which checkpoints do not use."""
        raise Refused("it uses an opcode that no checkpoint needs")

    dispatch[pickle.REDUCE[0]] = call
    dispatch[pickle.NEWOBJ[0]] = call
    dispatch[pickle.BUILD[0]] = build
    for _opcode in (pickle.INST, pickle.OBJ, pickle.NEWOBJ_EX, pickle.EXT1, pickle.EXT2, pickle.EXT4):
        dispatch[_opcode[0]] = refuse


def _read_archive(archive: zipfile.ZipFile, archive_size: int) -> Any:
    """A `torch.save` archive: `*/data.pkl` beside `*/data/<key>`, all stored without compression."""
    programs = [name for name in archive.namelist() if name.endswith("data.pkl")]
    if len(programs) != 1:
        raise Refused("it is a zip archive without a data.pkl")
    root = programs[0].removesuffix("data.pkl")
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
        raise Refused("its entries are compressed, which torch.save never does")
    if f"{root}byteorder" in archive.namelist() and archive.read(f"{root}byteorder") != b"little":
        raise Refused("its tensors are big-endian")
    storages: dict[str, bytearray] = {}

    def read_storage(key: str, size: int) -> bytearray:
        if key not in storages:
            storages[key] = bytearray(archive.read(f"{root}data/{key}"))
        if len(storages[key]) != size:
            raise Refused(f"it declares a storage of {size} bytes and holds {len(storages[key])}")
        if sum(map(len, storages.values())) > archive_size:
            raise Refused("its entries overlap and exceed the file")
        return storages[key]

    program = archive.read(programs[0])
    return _Unpickler(_Bounded(io.BytesIO(program), len(program)), read_storage).load()


def _rebuild_tensor(storage: _Storage, offset: int, size: Any, stride: Any, *_unused: Any) -> Tensor:
    if not isinstance(storage, _Storage) or not all(
        type(n) is int and n >= 0 for n in (offset, *size, *stride)
    ):
        raise Refused("it declares a tensor that is not made of a storage and sizes")
    numel, held = math.prod(size), len(storage.data) // storage.dtype.itemsize
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if numel == 0:
        return torch.empty(size, dtype=storage.dtype)
    if numel > held or last >= held:
        raise Refused(f"it declares a tensor of shape {tuple(size)}, of which it holds {held} values")
    return torch.frombuffer(storage.data, dtype=storage.dtype).as_strided(size, stride, offset)


@dataclass(frozen=True)
class _Dtype:
    """numpy's dtype by its short name, for scalars."""

    name: str


def _scalar(dtype: _Dtype, data: bytes) -> Any:
    if dtype.name not in ("f4", "f8", "i4", "i8", "b1"):
        raise Refused(f"it holds a numpy scalar of type {dtype.name}")
    return np.frombuffer(data, dtype.name, count=1)[0].item()


def _encode(text: str, encoding: str) -> bytes:
    if encoding != "latin1" or len(text) > 16:
        raise Refused(f"it encodes {len(text)} characters as {encoding}, where only numbers are encoded")
    return text.encode("latin1")


_STORAGE_DTYPES = {
    "Float": torch.float32,
    "Double": torch.float64,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
}
_GLOBALS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": lambda: {},
    "dnnlib.util.EasyDict": lambda: {},
    "builtins.set": lambda *_unused: set(),  # torch lists names of buffers in sets; nothing here needs them
    "__builtin__.set": lambda *_unused: set(),
    "_codecs.encode": _encode,
    "numpy.dtype": lambda name, *_unused: _Dtype(name),
    "numpy._core.multiarray.scalar": _scalar,
    "numpy.core.multiarray.scalar": _scalar,
    "torch.nn.modules.container.ModuleDict": lambda: Plain("ModuleDict"),
    "torch_utils.persistence._reconstruct_persistent_obj": lambda m: Plain(m["class_name"], m["state"]),
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_parameter": lambda data, *_unused: data,
}
