"""Reads the data in a foreign pickle without running any of it.

A pickle is a program: it names functions ("globals") and calls them. Python's own interpreter runs it here with
the opcodes that EDM snapshots, torch archives and CIFAR-10 use, and a short list of names, each with a
harmless stand-in of its own; any other is rejected by name. Source code embedded in a pickle is a string and
stays one. Modules come back as `Plain` objects, numpy arrays of bytes as `PlainArray`, tensors as tensors
that never exceed the bytes in the file. Work and memory are bounded by the limits in `assay.archives`,
and what comes back is a tree of bounded depth and size, safe to walk, compare and print.
"""

import io
import math
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from assay.archives import MAX_DIMENSIONS, PICKLE_DEPTH, PICKLE_INT_BITS, PICKLE_OPCODES, PICKLE_VALUES
from assay.errors import AssayError
from assay.files import reason


class Refused(Exception):
    """The pickle asks for something that no checkpoint needs."""


def _need(allowed: bool, otherwise: str) -> None:
    if not allowed:
        raise Refused(otherwise)


@dataclass
class Plain:
    """An object of a foreign class: its class name and its state, nothing that runs."""

    class_name: str
    state: dict[str, Any] = field(default_factory=dict)


@dataclass
class PlainArray:
    """A numpy array of bytes; `values` is uint8 of any shape."""

    values: np.ndarray


def read_pickle(path: Path) -> Any:
    """The content of a pickle or of a `torch.save` archive: containers, numbers, tensors, `Plain` objects."""
    path = Path(path)
    with open(path, "rb") as file:
        return parse_pickle(file, path.stat().st_size, path)


def parse_pickle(file: IO[bytes], size: int, where: str | Path) -> Any:
    """`read_pickle` of an open file of `size` bytes; errors name `where` it comes from."""
    try:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                content = _read_archive(archive, size)
        else:
            file.seek(0)
            content = _Interpreter(_Bounded(file, size)).load()
        _check_tree(content)
        return content
    except Refused as error:
        what = f"was rejected and nothing in it was run: {reason(error)}"
        raise AssayError(what, path=where, cure="get it from a source you trust") from None
    except Exception as error:  # a damaged program can fail in any way
        what = f"is damaged, truncated or no pickle known here ({type(error).__name__}: {reason(error)})"
        raise AssayError(what, path=where, cure="get it again") from error


def _read_archive(archive: zipfile.ZipFile, size: int) -> Any:
    """A `torch.save` archive of `size` bytes: `*/data.pkl` beside `*/data/<key>`, all without compression."""
    entries, names = archive.infolist(), archive.namelist()
    programs = [name for name in names if name.endswith("data.pkl")]
    _need(len(programs) == 1, "it is a zip archive without a data.pkl")
    stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
    _need(stored, "its entries are compressed, which torch.save never does")
    total = sum(max(entry.file_size, entry.compress_size) for entry in entries)
    _need(total <= size, "its entries overlap and exceed the file")
    root = programs[0].removesuffix("data.pkl")
    little = f"{root}byteorder" not in names or archive.read(f"{root}byteorder") == b"little"
    _need(little, "its tensors are big-endian")

    @cache
    def storage(dtype: torch.dtype, key: str) -> Tensor:
        return _flat(archive.read(f"{root}data/{key}"), dtype)

    program = archive.read(programs[0])
    return _Interpreter(_Bounded(io.BytesIO(program), len(program)), storage).load()


class _Bounded:
    """A file that rejects to read more bytes than it has, before any memory is set aside for them."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self.file, self.size = file, size

    def read(self, count: int) -> bytes:
        left = self.size - self.file.tell()
        _need(count <= left, f"it declares {count} bytes where {left} are left")
        return self.file.read(count)

    def readline(self) -> bytes:
        return self.file.readline(1000)  # the name of a class


class _Opcodes(dict[int, Callable[[Any], None]]):
    """What each opcode does; their uses are counted, and any other is rejected."""

    left = PICKLE_OPCODES

    def __getitem__(self, code: int) -> Callable[[Any], None]:
        self.left -= 1
        _need(self.left >= 0, f"it has more than {PICKLE_OPCODES} opcodes")
        return super().__getitem__(code)

    def __missing__(self, code: int) -> Any:
        name = next((name for name, known in _CODES.items() if known == code), hex(code))
        raise Refused(f"it uses the opcode {name}, which no checkpoint needs")


@dataclass(frozen=True)
class _Global:
    """A name that pickles may use, and what it makes here instead."""

    name: str
    make: Callable[..., Any]


class _Interpreter(pickle._Unpickler):
    """Python's own, in which every opcode that calls or changes something does it to our stand-ins only."""

    stack: list[Any]

    def __init__(
        self,
        file: _Bounded,
        storage: Callable[[torch.dtype, str], Any] | None = None,  # what a reference to one becomes
        opcodes: _Opcodes | None = None,
    ) -> None:
        super().__init__(file, encoding="latin1")
        self.storage = storage
        self.dispatch = _Opcodes(_OPCODES) if opcodes is None else opcodes  # type: ignore[misc]
        self.load_from_bytes = cache(self._load_from_bytes)  # bytes that are named often are kept once

    def find_class(self, module: str, name: str) -> _Global | torch.dtype:
        key = f"{module}.{name}"
        if module == "torch" and name.removesuffix("Storage") in _STORAGE_DTYPES:
            return _STORAGE_DTYPES[name.removesuffix("Storage")]
        if key == "torch.storage._load_from_bytes":
            return _Global(key, self.load_from_bytes)
        _need(key in _GLOBALS, f"it asks for {key}, which no checkpoint needs")
        return _Global(key, _GLOBALS[key])

    def persistent_load(self, saved_id: Any) -> Any:
        """The values of a tensor, which are elsewhere in the archive."""
        kind, dtype, key = saved_id[:3]
        known = kind == "storage" and isinstance(dtype, torch.dtype) and type(key) is str
        if not known or self.storage is None:
            raise Refused("it refers to something outside the pickle")
        return self.storage(dtype, key)

    def _load_from_bytes(self, data: bytes) -> Tensor:
        """A storage inside a pickle: three header pickles, the reference, its key, a length, the values."""
        file = _Bounded(io.BytesIO(data), len(data))
        parts = [_Interpreter(file, lambda dtype, key: dtype, self.dispatch).load() for _ in range(5)]  # type: ignore[arg-type]
        hidden = "it hides something other than one storage among the bytes of a tensor"
        _need(isinstance(parts[3], torch.dtype), hidden)
        (numel,) = struct.unpack("<q", file.read(8))
        return _flat(file.read(numel * parts[3].itemsize), parts[3])

    def call(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, _Global) or type(arguments) is not tuple:
            raise Refused(f"it calls a {type(function).__name__}")
        self.stack.append(function.make(*arguments))

    def fill(self, kind: type, values: Iterable[Any]) -> None:
        """Put values into the container on the stack: tensors have an `add` and an `extend` of their own."""
        target = self.stack[-1]
        _need(type(target) is kind, f"it fills a {type(target).__name__} as if it were a {kind.__name__}")
        getattr(target, "extend" if kind is list else "update")(values)

    def take(self, count: int) -> list[Any]:
        values = self.stack[-count:]
        del self.stack[-count:]
        return values

    def build(self) -> None:
        """Modules and arrays get their state; a container's extra attributes are dropped."""
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, Plain):
            target.state = state
        elif isinstance(target, PlainArray):
            target.values = _array(*state)
        elif isinstance(target, np.dtype):
            _need(type(state) is tuple and ">" not in state[1:2], "it holds big-endian numbers")
        else:
            _need(type(target) is dict, f"it changes a {type(target).__name__}")


# Opcodes that make plain values and containers, which Python's interpreter may run as they are.
_PLAIN = """PROTO FRAME STOP NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT BINSTRING
    SHORT_BINSTRING SHORT_BINUNICODE BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 EMPTY_LIST
    EMPTY_DICT EMPTY_SET EMPTY_TUPLE TUPLE1 TUPLE2 TUPLE3 TUPLE MARK BINGET LONG_BINGET BINPUT LONG_BINPUT
    MEMOIZE GLOBAL STACK_GLOBAL BINPERSID"""
_CODES = {opcode.name: ord(opcode.code) for opcode in pickletools.opcodes}
_OPCODES: dict[int, Callable[[Any], None]] = {
    **{_CODES[name]: pickle._Unpickler.dispatch[_CODES[name]] for name in _PLAIN.split()},
    _CODES["APPEND"]: lambda self: self.fill(list, self.take(1)),
    _CODES["APPENDS"]: lambda self: self.fill(list, self.pop_mark()),
    _CODES["SETITEM"]: lambda self: self.fill(dict, _pairs(self.take(2))),
    _CODES["SETITEMS"]: lambda self: self.fill(dict, _pairs(self.pop_mark())),
    _CODES["ADDITEMS"]: lambda self: self.fill(set, map(_key, self.pop_mark())),
    _CODES["REDUCE"]: _Interpreter.call,
    _CODES["NEWOBJ"]: _Interpreter.call,
    _CODES["BUILD"]: _Interpreter.build,
}


def _pairs(values: list[Any]) -> list[tuple[Any, Any]]:
    return list(zip(map(_key, values[::2]), values[1::2], strict=True))


def _key(value: Any) -> Any:
    """A key or a member of a set: hashing nested tuples would take time exponential in their depth."""
    _need(isinstance(value, str | int | float | None), f"it uses a {type(value).__name__} as a key")
    return value


def _check_tree(root: Any) -> None:
    """Reject containers that hold themselves, or that are too deep or too large once written out.

    A hundred lists that each hold the one before twice are a few hundred bytes in a file, and endless to
    whoever compares or prints them.
    """
    waiting, num_values = [(root, 0)], 0
    while waiting:
        value, depth = waiting.pop()
        num_values += 1
        _need(depth <= PICKLE_DEPTH, f"it nests containers more than {PICKLE_DEPTH} deep, or in themselves")
        _need(num_values <= PICKLE_VALUES, f"it holds more than {PICKLE_VALUES} values")
        if type(value) is int:
            _need(value.bit_length() <= PICKLE_INT_BITS, f"it holds a number of {value.bit_length()} bits")
        waiting += [(child, depth + 1) for child in _children(value)]


def _children(value: Any) -> Iterable[Any]:
    match value:
        case list() | tuple():
            return value
        case dict():
            return value.values()
        case Plain():
            return value.class_name, value.state
    return ()


def _check_sizes(*sizes: Any) -> None:
    for size in sizes:
        is_shape = type(size) is tuple and len(size) <= MAX_DIMENSIONS
        _need(is_shape, "it declares an array without a shape")
        whole = all(type(n) is int and n >= 0 for n in size)
        _need(whole, "it declares an array with sizes that are no whole numbers >= 0")


def _flat(data: bytes, dtype: torch.dtype) -> Tensor:
    """The values of a storage, to be cut into tensors."""
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)


def _rebuild_tensor(storage: Any, offset: int, size: Any, stride: Any, *_unused: Any) -> Tensor:
    if not isinstance(storage, Tensor):
        raise Refused("it declares a tensor that is not made of a storage")
    _check_sizes((offset,), size, stride)
    numel, held = math.prod(size), storage.numel()
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    fits = numel == 0 or (numel <= held and last < held)
    _need(fits, f"it declares a tensor of shape {size}, of which it holds {held} values")
    return storage.as_strided(size, stride, offset) if numel else torch.empty(size, dtype=storage.dtype)


def _array(_version: Any, shape: Any, dtype: Any, is_fortran: Any, data: Any) -> np.ndarray:
    data = data.encode("latin1") if isinstance(data, str) else data  # of Python 2
    plain = isinstance(dtype, np.dtype) and dtype == np.uint8 and not is_fortran and type(data) is bytes
    _need(plain, "it holds a numpy array of other than bytes in C order")
    _check_sizes(shape)
    _need(math.prod(shape) == len(data), f"it declares an array of shape {shape} and holds {len(data)} bytes")
    return np.frombuffer(data, np.uint8).reshape(shape)


def _dtype(name: Any, *_unused: Any) -> np.dtype:
    _need(name in ("f4", "f8", "i4", "i8", "b1", "u1"), "it holds numbers of an unknown type")
    return np.dtype(name)


def _scalar(dtype: Any, data: Any) -> Any:
    made = isinstance(dtype, np.dtype) and type(data) is bytes
    _need(made, "it holds a numpy scalar that is not made of a type and bytes")
    return np.frombuffer(data, dtype, count=1)[0].item()


def _encode(text: str, encoding: str) -> bytes:
    _need(encoding == "latin1" and len(text) <= 16, "it encodes text, where only numbers are encoded")
    return text.encode("latin1")


def _persistent(meta: Any) -> Plain:
    _need(type(meta["class_name"]) is str, "it holds an object whose class has no name")
    return Plain(meta["class_name"], meta["state"])


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
    "numpy.dtype": _dtype,
    "numpy.ndarray": lambda *_unused: None,  # only named, as what `_reconstruct` is to make
    "numpy._core.multiarray._reconstruct": lambda *_unused: PlainArray(np.empty(0, np.uint8)),
    "numpy.core.multiarray._reconstruct": lambda *_unused: PlainArray(np.empty(0, np.uint8)),
    "numpy._core.multiarray.scalar": _scalar,
    "numpy.core.multiarray.scalar": _scalar,
    "torch.nn.modules.container.ModuleDict": lambda: Plain("ModuleDict"),
    "torch_utils.persistence._reconstruct_persistent_obj": _persistent,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_parameter": lambda data, *_unused: data,
}
