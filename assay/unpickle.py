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
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from assay.archives import (
    MAX_DIMENSIONS,
    PICKLE_DEPTH,
    PICKLE_INT_BYTES,
    PICKLE_OPCODES,
    PICKLE_VALUES,
    check_packed,
)
from assay.errors import AssayError
from assay.files import reason


class Refused(Exception):
    """The pickle asks for something that no checkpoint needs."""


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
                check_packed(archive, size)
                content = _read_archive(archive, size)
        else:
            file.seek(0)
            content = _run(_Bounded(file, size), _Budget(size))
        _check_tree(content)
        return content
    except Refused as error:
        what = f"was rejected and nothing in it was run: {reason(error)}"
        raise AssayError(what, path=where, cure="get it from a source you trust") from None
    except Exception as error:  # a damaged program can fail in any way
        what = f"is damaged, truncated or no pickle known here ({type(error).__name__}: {reason(error)})"
        raise AssayError(what, path=where, cure="get it again") from error


@dataclass
class _Budget:
    """What is left to a pickle and all the pickles inside it."""

    storage_bytes: int  # a pickle may not unfold into more than it holds
    opcodes: int = PICKLE_OPCODES


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
    """A file that rejects to read more bytes than it has, before any memory is set aside for them."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self.file, self.size = file, size

    def read(self, count: int) -> bytes:
        left = self.size - self.file.tell()
        if count > left:
            raise Refused(f"it declares {count} bytes where {left} are left")
        return self.file.read(count)

    def readline(self) -> bytes:
        return self.file.readline(1000)  # the name of a class


ReadStorage = Callable[[str, int], bytearray]
_OPCODES = {opcode.name: ord(opcode.code) for opcode in pickletools.opcodes}
# Opcodes that make plain values and containers, which Python's interpreter may run as they are.
_PLAIN = """PROTO FRAME STOP NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 BINFLOAT BINSTRING SHORT_BINSTRING
    SHORT_BINUNICODE BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 EMPTY_LIST EMPTY_DICT EMPTY_SET
    EMPTY_TUPLE TUPLE1 TUPLE2 TUPLE3 TUPLE MARK BINGET LONG_BINGET BINPUT LONG_BINPUT MEMOIZE GLOBAL
    STACK_GLOBAL BINPERSID"""


class _Dispatch(dict[int, Callable[[Any], None]]):
    """What each opcode does, counted; any other is rejected."""

    def __missing__(self, code: int) -> Any:
        name = next((name for name, known in _OPCODES.items() if known == code), hex(code))
        raise Refused(f"it uses the opcode {name}, which no checkpoint needs")


class _Interpreter(pickle._Unpickler):
    """Python's own, in which every opcode that calls or changes something does it to our stand-ins only."""

    stack: list[Any]

    def __init__(self, file: _Bounded, budget: _Budget, read_storage: ReadStorage | None = None) -> None:
        super().__init__(file, encoding="latin1")
        self.budget, self.read_storage = budget, read_storage

    def find_class(self, module: str, name: str) -> _Global | _StorageType:
        key = f"{module}.{name}"
        if module == "torch" and name.removesuffix("Storage") in _STORAGE_DTYPES:
            return _StorageType(_STORAGE_DTYPES[name.removesuffix("Storage")])
        if key == "torch.storage._load_from_bytes":
            return _Global(key, lambda data: _load_from_bytes(data, self.budget))
        if key not in _GLOBALS:
            raise Refused(f"it asks for {key}, which no checkpoint needs")
        return _Global(key, _GLOBALS[key])

    def persistent_load(self, saved_id: Any) -> _Storage:
        """The values of a tensor, which are elsewhere in the archive."""
        kind, storage_type, key, _location, numel = saved_id[:5]
        if kind != "storage" or not isinstance(storage_type, _StorageType) or self.read_storage is None:
            raise Refused("it refers to something outside the pickle")
        if type(key) is not str or type(numel) is not int:
            raise Refused("it refers to a storage without a name and a size")
        return _Storage(storage_type.dtype, self.read_storage(key, numel * storage_type.dtype.itemsize))

    def call(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, _Global) or type(arguments) is not tuple:
            raise Refused(f"it calls a {type(function).__name__}")
        self.stack.append(function.make(*arguments))

    def fill(self, kind: type, values: Iterable[Any]) -> None:
        """Put values into the container on the stack: tensors have an `add` and an `extend` of their own."""
        target = self.stack[-1]
        name = type(target).__name__
        if type(target) is not kind:
            raise Refused(f"it fills a {name} as if it were a {kind.__name__}")
        getattr(target, "extend" if kind is list else "update")(values)

    def take(self, count: int) -> list[Any]:
        values = self.stack[-count:]
        del self.stack[-count:]
        return values

    def long(self, load: Callable[[Any], None]) -> None:
        load(self)
        if self.stack[-1].bit_length() > 8 * PICKLE_INT_BYTES:
            raise Refused(f"it holds a whole number of {self.stack[-1].bit_length()} bits")

    def build(self) -> None:
        state = self.stack.pop()
        _build(self.stack[-1], state)


def _pairs(values: list[Any]) -> list[tuple[Any, Any]]:
    return list(zip(map(_key, values[::2]), values[1::2], strict=True))


def _counted(run: Callable[[Any], None]) -> Callable[[Any], None]:
    def counted(self: _Interpreter) -> None:
        self.budget.opcodes -= 1
        if self.budget.opcodes < 0:
            raise Refused(f"it has more than {PICKLE_OPCODES} opcodes")
        run(self)

    return counted


_PYTHONS = pickle._Unpickler.dispatch
_OURS: dict[str, Callable[[Any], None]] = {
    **{name: _PYTHONS[_OPCODES[name]] for name in _PLAIN.split()},
    "LONG1": lambda self: self.long(_PYTHONS[_OPCODES["LONG1"]]),
    "LONG4": lambda self: self.long(_PYTHONS[_OPCODES["LONG4"]]),
    "FROZENSET": lambda self: self.append(frozenset(map(_key, self.pop_mark()))),
    "APPEND": lambda self: self.fill(list, self.take(1)),
    "APPENDS": lambda self: self.fill(list, self.pop_mark()),
    "SETITEM": lambda self: self.fill(dict, _pairs(self.take(2))),
    "SETITEMS": lambda self: self.fill(dict, _pairs(self.pop_mark())),
    "ADDITEMS": lambda self: self.fill(set, map(_key, self.pop_mark())),
    "REDUCE": _Interpreter.call,
    "NEWOBJ": _Interpreter.call,
    "BUILD": _Interpreter.build,
}
_Interpreter.dispatch = _Dispatch({_OPCODES[name]: _counted(run) for name, run in _OURS.items()})


def _run(file: _Bounded, budget: _Budget, read_storage: ReadStorage | None = None) -> Any:
    """The value of one pickle, which begins where the file stands."""
    return _Interpreter(file, budget, read_storage).load()


def _key(value: Any) -> Any:
    """A key or a member of a set: hashing nested tuples would take time exponential in their depth."""
    if not isinstance(value, str | int | float | None):
        raise Refused(f"it uses a {type(value).__name__} as a key")
    return value


def _build(target: Any, state: Any) -> None:
    """BUILD: modules and arrays get their state; a container's extra attributes are dropped."""
    if isinstance(target, Plain):
        target.state = state
    elif isinstance(target, PlainArray):
        _version, shape, dtype, is_fortran, data = state
        data = data.encode("latin1") if isinstance(data, str) else data  # of Python 2
        if not isinstance(dtype, _Dtype) or dtype.name != "u1" or is_fortran or type(data) is not bytes:
            raise Refused("it holds a numpy array of other than bytes in C order")
        _check_sizes(shape)
        if math.prod(shape) != len(data):
            raise Refused(f"it declares an array of shape {shape} and holds {len(data)} bytes")
        target.values = np.frombuffer(data, np.uint8).reshape(shape)
    elif isinstance(target, _Dtype):
        if type(state) is not tuple or ">" in state[1:2]:
            raise Refused("it holds big-endian numbers")
    elif type(target) is not dict:
        raise Refused(f"it changes a {type(target).__name__}")


def _load_from_bytes(data: bytes, budget: _Budget) -> _Storage:
    """A storage inside a pickle: three header pickles, the reference, its key, a length, the values."""
    budget.storage_bytes -= len(data)
    if budget.storage_bytes < 0:
        raise Refused("it repeats its tensors until they exceed the file")
    file = _Bounded(io.BytesIO(data), len(data))
    for _ in range(3):
        _run(file, budget)
    sizes: list[int] = []
    values = bytearray()

    def read_later(_key: str, size: int) -> bytearray:
        sizes.append(size)
        return values

    storage = _run(file, budget, read_later)
    _run(file, budget)
    if not isinstance(storage, _Storage) or len(sizes) != 1:
        raise Refused("it hides something other than one storage among the bytes of a tensor")
    (numel,) = struct.unpack("<q", file.read(8))
    if numel * storage.dtype.itemsize != sizes[0]:
        raise Refused(f"it declares a storage of {sizes[0]} bytes for {numel} values")
    values += file.read(sizes[0])
    return storage


def _read_archive(archive: zipfile.ZipFile, archive_size: int) -> Any:
    """A `torch.save` archive: `*/data.pkl` beside `*/data/<key>`, all stored without compression."""
    programs = [name for name in archive.namelist() if name.endswith("data.pkl")]
    if len(programs) != 1:
        raise Refused("it is a zip archive without a data.pkl")
    root = programs[0].removesuffix("data.pkl")
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
        raise Refused("its entries are compressed, which torch.save never does")
    if sum(entry.file_size for entry in archive.infolist()) > archive_size:
        raise Refused("its entries overlap and exceed the file")
    if f"{root}byteorder" in archive.namelist() and archive.read(f"{root}byteorder") != b"little":
        raise Refused("its tensors are big-endian")
    storages: dict[str, bytearray] = {}

    def read_storage(key: str, size: int) -> bytearray:
        if key not in storages:
            storages[key] = bytearray(archive.read(f"{root}data/{key}"))
        if len(storages[key]) != size:
            raise Refused(f"it declares a storage of {size} bytes and holds {len(storages[key])}")
        return storages[key]

    program = archive.read(programs[0])
    return _run(_Bounded(io.BytesIO(program), len(program)), _Budget(archive_size), read_storage)


def _check_tree(root: Any) -> None:
    """Reject containers that hold themselves, or that are too deep or too large once written out.

    A hundred lists that each hold the one before twice are a few hundred bytes in a file, and endless to
    whoever compares or prints them.
    """
    sizes: dict[int, int] = {}  # of finished containers, by identity
    above: set[int] = set()  # containers around the present one

    def size(value: Any) -> int:
        inside = _children(value)
        if inside is None or id(value) in sizes:
            return sizes.get(id(value), 1)
        if id(value) in above:
            raise Refused("it holds a container that contains itself")
        if len(above) == PICKLE_DEPTH:
            raise Refused(f"it nests containers more than {PICKLE_DEPTH} deep")
        above.add(id(value))
        total = 1 + sum(map(size, inside))
        above.remove(id(value))
        if total > PICKLE_VALUES:
            raise Refused(f"it holds more than {PICKLE_VALUES} values")
        sizes[id(value)] = total
        return total

    size(root)


def _children(value: Any) -> Iterable[Any] | None:
    match value:
        case list() | tuple():
            return value
        case dict():
            return value.values()
        case Plain():
            return value.class_name, value.state
    return None


def _check_sizes(*sizes: Any) -> None:
    for size in sizes:
        if type(size) is not tuple or len(size) > MAX_DIMENSIONS:
            raise Refused("it declares an array without a shape")
        if not all(type(n) is int and n >= 0 for n in size):
            raise Refused("it declares an array with sizes that are no whole numbers >= 0")


def _rebuild_tensor(storage: _Storage, offset: int, size: Any, stride: Any, *_unused: Any) -> Tensor:
    if not isinstance(storage, _Storage):
        raise Refused("it declares a tensor that is not made of a storage")
    _check_sizes((offset,), size, stride)
    numel, held = math.prod(size), len(storage.data) // storage.dtype.itemsize
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if numel == 0:
        return torch.empty(size, dtype=storage.dtype)
    if numel > held or last >= held:
        raise Refused(f"it declares a tensor of shape {size}, of which it holds {held} values")
    return torch.frombuffer(storage.data, dtype=storage.dtype).as_strided(size, stride, offset)


@dataclass(frozen=True)
class _Dtype:
    """numpy's dtype by its short name."""

    name: str


def _dtype(name: Any, *_unused: Any) -> _Dtype:
    if name not in ("f4", "f8", "i4", "i8", "b1", "u1"):
        raise Refused("it holds numbers of an unknown type")
    return _Dtype(name)


def _scalar(dtype: _Dtype, data: Any) -> Any:
    if not isinstance(dtype, _Dtype) or type(data) is not bytes:
        raise Refused("it holds a numpy scalar that is not made of a type and bytes")
    return np.frombuffer(data, dtype.name, count=1)[0].item()


def _encode(text: str, encoding: str) -> bytes:
    if encoding != "latin1" or len(text) > 16:
        raise Refused("it encodes text, where only numbers are encoded")
    return text.encode("latin1")


def _persistent(meta: Any) -> Plain:
    if type(meta["class_name"]) is not str:
        raise Refused("it holds an object whose class has no name")
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
