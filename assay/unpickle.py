"""Reads the data in a foreign pickle without running any of it.

A pickle is a program. Python's own interpreter runs it here, but no name is ever looked up: a call becomes a
`Plain` record of the name and its arguments, and only dicts and tensors are rebuilt, which never exceed the
bytes in the file.
"""

import io
import math
import pickle
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from assay.files import decoding


@dataclass(eq=False)
class Plain:
    """An object or a call in a pickle: the name of its class or function, its arguments and its state."""

    name: str
    arguments: tuple[Any, ...] = ()
    state: Any = None


@dataclass(eq=False)
class PlainTensor:
    """A tensor, out of reach of the opcodes that call methods."""

    values: Tensor


def read_pickle(data: bytes, where: str | Path) -> Any:
    """The content of a pickle or of a `torch.save` archive: containers, numbers, `PlainTensor` and `Plain`."""
    with decoding(where, "get it again, from a source you trust; nothing in it was run"):
        if zipfile.is_zipfile(io.BytesIO(data)):
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                return _read_archive(archive, len(data))
        return _Interpreter(io.BytesIO(data)).load()


def to_array(value: Plain) -> np.ndarray:
    """The numpy array of bytes that a record describes."""
    _, shape, _, is_fortran, data = value.state
    if is_fortran:
        raise ValueError("it holds an array in Fortran's order")
    return np.frombuffer(data.encode("latin1") if isinstance(data, str) else data, np.uint8).reshape(shape)


def _read_archive(archive: zipfile.ZipFile, size: int) -> Any:
    """A `torch.save` archive of `size` bytes: `*/data.pkl` beside `*/data/<key>`, all without compression."""
    names = archive.namelist()
    programs = [name for name in names if name.endswith("data.pkl")]
    is_compressed = sum(entry.file_size for entry in archive.infolist()) > size  # or entries overlap
    if is_compressed or len(programs) != 1:
        raise ValueError("it is compressed or has not one data.pkl, as torch.save writes it")
    root = programs[0].removesuffix("data.pkl")
    if f"{root}byteorder" in names and archive.read(f"{root}byteorder") != b"little":
        raise ValueError("its tensors are big-endian")

    @cache
    def storage(dtype: torch.dtype, key: str) -> PlainTensor:
        return _flat(archive.read(f"{root}data/{key}"), dtype)

    return _Interpreter(io.BytesIO(archive.read(programs[0])), storage).load()


class _Tuple(tuple[Any, ...]):
    """Not a key: hashing nested tuples would take time exponential in their depth."""

    __hash__ = None  # type: ignore[assignment]


def _unhashable(load: Callable[[Any], None]) -> Callable[[Any], None]:
    """An opcode that makes a tuple makes a `_Tuple`."""

    def run(self: Any) -> None:
        load(self)
        self.stack[-1] = _Tuple(self.stack[-1])

    return run


# Extension codes and buffers are registered by programs, and no checkpoint has them.
_OTHER = pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER, pickle.BYTEARRAY8
_OPCODES = {code: load for code, load in pickle._Unpickler.dispatch.items() if bytes([code]) not in _OTHER}
_TUPLES = pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3


class _Interpreter(pickle._Unpickler):
    """Python's own, for which every name in a pickle stands for `call`."""

    stack: list[Any]

    def __init__(self, file: io.BytesIO, storage: Callable[[torch.dtype, str], Any] | None = None) -> None:
        super().__init__(file, encoding="latin1")
        self.storage = storage  # what a reference to values outside the pickle becomes
        self.embedded = cache(_read_embedded)  # bytes that are named often are kept once

    def find_class(self, module: str, name: str) -> "partial[Any]":
        return partial(self.call, f"{module}.{name}")

    def call(self, name: str, *arguments: Any) -> Any:
        match name:
            case "collections.OrderedDict" | "dnnlib.util.EasyDict":
                return {}
            case "torch_utils.persistence._reconstruct_persistent_obj":
                return Plain(arguments[0]["class_name"], state=arguments[0]["state"])
            case "torch.storage._load_from_bytes":
                return self.embedded(arguments[0])
            case "torch._utils._rebuild_tensor_v2":
                return _cut(*arguments[:4])
            case "torch._utils._rebuild_parameter":
                return arguments[0]
        return Plain(name, arguments)

    def persistent_load(self, saved_id: Any) -> Any:
        """The values of a tensor, which are elsewhere in the archive."""
        _, kind, key = saved_id[:3]
        if self.storage is None:
            raise ValueError("it refers to something outside the pickle")
        return self.storage(_DTYPES[kind.args[0]], key)

    def load_build(self) -> None:
        """Records get their state; a container's extra attributes are dropped."""
        state = self.stack.pop()
        if isinstance(self.stack[-1], Plain):
            self.stack[-1].state = state

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **_OPCODES,
        pickle.BUILD[0]: load_build,
        pickle.NEWOBJ[0]: _OPCODES[pickle.REDUCE[0]],
        **{code: _unhashable(_OPCODES[code]) for (code,) in _TUPLES},
    }


def _read_embedded(data: bytes) -> PlainTensor:
    """A storage inside a pickle: three header pickles, the reference, its key, a length, the values."""
    file = io.BytesIO(data)
    dtype = [_Interpreter(file, lambda dtype, key: dtype).load() for _ in range(5)][3]
    (numel,) = struct.unpack("<q", file.read(8))
    return _flat(file.read(numel * dtype.itemsize), dtype)


def _flat(data: bytes, dtype: torch.dtype) -> PlainTensor:
    """The values of a storage, to be cut into tensors."""
    return PlainTensor(torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype))


def _cut(storage: PlainTensor, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> PlainTensor:
    held = storage.values.numel()
    if math.prod(torch.Size(size)) > held:  # a stride of 0 repeats values; otherwise torch compares
        raise ValueError(f"it declares a tensor of shape {size}, of which it holds {held} values")
    return PlainTensor(storage.values.as_strided(size, stride, offset))


_DTYPES = {
    "torch.FloatStorage": torch.float32,
    "torch.DoubleStorage": torch.float64,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
}
