"""Reads the data in a foreign pickle without running any of it.

A pickle is a program: it names functions ("globals") and calls them. This interpreter knows the opcodes
that EDM snapshots, torch archives and CIFAR-10 use, and a short list of names, each with a harmless
stand-in of its own; any other is rejected by name. Source code embedded in a pickle is a string here and
stays one. Modules come back as `Plain` objects, numpy arrays of bytes as `PlainArray`, tensors as tensors
that never exceed the bytes in the file. Work and memory are bounded by the limits in `assay.archives`,
and what comes back is a tree of bounded depth and size, safe to walk, compare and print.
"""

import io
import math
import pickletools
import struct
import zipfile
from collections.abc import Callable, Iterator
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
from assay.files import reason


class Refused(ValueError):
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
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist or is not a file")
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
        raise ValueError(
            f"{where} was rejected and nothing in it was run: {reason(error)}; get it from a source you trust"
        ) from None
    except Exception as error:  # a damaged program can fail in any way
        why = f"{type(error).__name__}: {reason(error)}"
        raise ValueError(
            f"{where} is damaged, truncated or no pickle known here ({why}): get it again"
        ) from error


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


def _run(file: _Bounded, budget: _Budget, read_storage: ReadStorage | None = None) -> Any:
    """Run one pickle: every opcode that would call or change something does it to our own stand-ins only."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def pop_to_mark() -> list[Any]:
        start = marks.pop()
        values = stack[start:]
        del stack[start:]
        return values

    def container(kind: type) -> Any:
        """The top of the stack, which is to be filled: tensors have an `add` and an `extend` of their own."""
        if type(stack[-1]) is not kind:
            raise Refused(f"it fills a {type(stack[-1]).__name__} as if it were a {kind.__name__}")
        return stack[-1]

    value: Any
    for opcode, value, _ in pickletools.genops(file):  # type: ignore[arg-type]
        budget.opcodes -= 1
        if budget.opcodes < 0:
            raise Refused(f"it has more than {PICKLE_OPCODES} opcodes")
        match opcode.name:
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                return stack.pop()
            case "NONE":
                stack.append(None)
            case "NEWTRUE" | "NEWFALSE":
                stack.append(opcode.name == "NEWTRUE")
            case "BININT" | "BININT1" | "BININT2" | "BINFLOAT":
                stack.append(value)
            case "LONG1" | "LONG4":
                if value.bit_length() > 8 * PICKLE_INT_BYTES:
                    raise Refused(f"it holds a whole number of {value.bit_length()} bits")
                stack.append(value)
            case "BINSTRING" | "SHORT_BINSTRING" | "SHORT_BINUNICODE" | "BINUNICODE" | "BINUNICODE8":
                stack.append(value)
            case "BINBYTES" | "SHORT_BINBYTES" | "BINBYTES8":
                stack.append(value)
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_SET":
                stack.append(set())
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(opcode.name[-1])
                if len(stack) < count:
                    raise Refused("it takes more from the stack than there is")
                stack[-count:] = [tuple(stack[-count:])]
            case "MARK":
                marks.append(len(stack))
            case "TUPLE":
                stack.append(tuple(pop_to_mark()))
            case "FROZENSET":
                stack.append(frozenset(map(_key, pop_to_mark())))
            case "APPEND":
                last = stack.pop()
                container(list).append(last)
            case "APPENDS":
                values = pop_to_mark()
                container(list).extend(values)
            case "SETITEM":
                last = stack.pop()
                key = stack.pop()
                container(dict)[_key(key)] = last
            case "SETITEMS":
                values = pop_to_mark()
                container(dict).update(zip(map(_key, values[::2]), values[1::2], strict=True))
            case "ADDITEMS":
                values = pop_to_mark()
                container(set).update(map(_key, values))
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[value])
            case "BINPUT" | "LONG_BINPUT":
                memo[value] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "GLOBAL":
                module, _, name = value.partition(" ")
                stack.append(_find(module, name, budget))
            case "STACK_GLOBAL":
                name, module = stack.pop(), stack.pop()
                if type(name) is not str or type(module) is not str:
                    raise Refused("it asks for a name that is not text")
                stack.append(_find(module, name, budget))
            case "REDUCE" | "NEWOBJ":
                arguments, function = stack.pop(), stack.pop()
                if not isinstance(function, _Global) or type(arguments) is not tuple:
                    raise Refused(f"it calls a {type(function).__name__}")
                stack.append(function.make(*arguments))
            case "BUILD":
                state = stack.pop()
                _build(stack[-1], state)
            case "BINPERSID":
                stack.append(_storage(stack.pop(), read_storage))
            case _:
                raise Refused(f"it uses the opcode {opcode.name}, which no checkpoint needs")
    raise ValueError("it does not end")


def _key(value: Any) -> Any:
    """A key or a member of a set: hashing nested tuples would take time exponential in their depth."""
    if not isinstance(value, str | int | float | None):
        raise Refused(f"it uses a {type(value).__name__} as a key")
    return value


def _find(module: str, name: str, budget: _Budget) -> _Global | _StorageType:
    key = f"{module}.{name}"
    if module == "torch" and name.removesuffix("Storage") in _STORAGE_DTYPES:
        return _StorageType(_STORAGE_DTYPES[name.removesuffix("Storage")])
    if key == "torch.storage._load_from_bytes":
        return _Global(key, lambda data: _load_from_bytes(data, budget))
    if key not in _GLOBALS:
        raise Refused(f"it asks for {key}, which no checkpoint needs")
    return _Global(key, _GLOBALS[key])


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


def _storage(saved_id: Any, read_storage: ReadStorage | None) -> _Storage:
    """BINPERSID: the values of a tensor, which are elsewhere in the archive."""
    kind, storage_type, key, _location, numel = saved_id[:5]
    if kind != "storage" or not isinstance(storage_type, _StorageType) or read_storage is None:
        raise Refused("it refers to something outside the pickle")
    if type(key) is not str or type(numel) is not int:
        raise Refused("it refers to a storage without a name and a size")
    return _Storage(storage_type.dtype, read_storage(key, numel * storage_type.dtype.itemsize))


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
    size: dict[int, int] = {}  # of finished containers, by identity
    path: dict[int, tuple[Any, Iterator[Any], list[int]]] = {}  # open containers, outermost first

    def enter(value: Any) -> int | None:
        """The size of a leaf or finished container, or None for one that is now open."""
        children = _children(value)
        if children is None or id(value) in size:
            return size.get(id(value), 1)
        if id(value) in path:
            raise Refused("it holds a container that contains itself")
        if len(path) == PICKLE_DEPTH:
            raise Refused(f"it nests containers more than {PICKLE_DEPTH} deep")
        path[id(value)] = value, children, [1]
        return None

    total = enter(root)
    while path:
        identity, (_, children, count) = next(reversed(path.items()))
        for child in children:
            known = enter(child)
            if known is None:
                break
            count[0] += known
        else:
            if count[0] > PICKLE_VALUES:
                raise Refused(f"it holds more than {PICKLE_VALUES} values")
            del path[identity]
            size[identity] = total = count[0]
            if path:
                next(reversed(path.values()))[2][0] += total


def _children(value: Any) -> Iterator[Any] | None:
    match value:
        case list() | tuple():
            return iter(value)
        case dict():
            return iter(value.values())
        case Plain():
            return iter((value.class_name, value.state))
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
