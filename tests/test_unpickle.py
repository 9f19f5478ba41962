"""Foreign pickles: nothing in them runs, and hostile and damaged ones end in a sentence."""

import builtins
import collections
import io
import os
import pickle
import struct
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.checkpoint import load_checkpoint
from assay.unpickle import PlainTensor, read_pickle
from tests.errors import fault

SNAPSHOT = Path(__file__).parent / "golden" / "edm_pickle" / "network-snapshot-000123.pkl"


class Calls:
    """Pickles as a call of `function` with `arguments`."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.reduced = (function, arguments)

    def __reduce__(self) -> Any:
        return self.reduced


def storage_bytes(values: torch.Tensor) -> bytes:
    """What torch embeds in a pickle for a tensor's storage."""
    buffer = io.BytesIO()
    torch.save(
        torch.storage.TypedStorage(wrap_storage=values.untyped_storage(), dtype=values.dtype, _internal=True),
        buffer,
        _use_new_zipfile_serialization=False,
    )
    return buffer.getvalue()


def write(path: Path, content: Any) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else pickle.dumps(content))
    return path


# 60 tuples, each of which holds the one before twice: the last is 2^60 values written out.
DOUBLING = b")\x94" + b"".join(b"h" + bytes([level]) + b"\x86\x94" for level in range(60))


def program(value: Any) -> bytes:
    """The opcodes of a pickle between its first and its last."""
    return pickle.dumps(value, 3)[2:-1]


def hostile(marker: Path) -> dict[str, tuple[Any, str]]:
    """Pickles that would create `marker` or exhaust memory, and what the refusal must mention."""
    touch = f"touch {marker}"
    evil = Calls(os.system, touch)
    system = f"{os.system.__module__}.system"
    one, many = storage_bytes(torch.zeros(1)), storage_bytes(torch.zeros(50000))
    header = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2)
    storage = b"\x80\x02(X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
    reference = storage + b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpu\x8a\x06\x00\x00\x00\x00\x00\x01NtQ."
    huge_storage = (
        header + pickle.dumps({}, 2) + reference + pickle.dumps(["0"], 2) + struct.pack("<q", 1 << 40)
    )
    rebuild, load = torch._utils._rebuild_tensor_v2, torch.storage._load_from_bytes

    def tensor(offset: int, size: int, stride: int) -> Calls:
        """A tensor on a storage of one value."""
        return Calls(rebuild, Calls(load, one), offset, (size,), (stride,), False, collections.OrderedDict())

    return {
        "system": ({"ema": evil}, f"but a {system}"),
        "eval": (Calls(eval, f"__import__('os').system({touch!r})"), "but a builtins.eval"),
        "popen": (Calls(subprocess.Popen, ["touch", str(marker)]), "but a subprocess.Popen"),
        "a call's result is called": (b"\x80\x04" + program(evil) + b"(tR.", "not callable"),
        "reduce in reduce": (Calls(load, evil), ""),
        "hidden in a tensor": (Calls(load, header + pickle.dumps(evil, 2)), ""),
        "hidden in a key": ({evil: 1}, "a NoneType"),
        "dotted name": (b"\x80\x04\x8c\x0bcollections\x8c\x13OrderedDict.__new__\x93.", "a partial"),
        "old INST opcode": (f"(S'{touch}'\nios\nsystem\n.".encode(), "but a os.system"),
        "old OBJ opcode": (f"(cos\nsystem\nS'{touch}'\no.".encode(), "but a os.system"),
        "extension code": (b"\x80\x02\x82\x01.", "cannot be read"),
        "call of a container": (b"\x80\x02}(tR.", "not callable"),
        "state of a function": (b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}b.", "a partial"),
        "attributes of a function": (b"\x80\x02cos\nsystem\nN}X\x04\x00\x00\x00funcNs\x86b.", "a partial"),
        "persistent id": (b"\x80\x02X\x01\x00\x00\x00xQ.", "cannot be read"),
        "huge tensor": (tensor(0, 1 << 40, 1), f"shape ({1 << 40},)"),
        "repeated tensor": (tensor(0, 1 << 40, 0), f"shape ({1 << 40},)"),
        "tensor past its end": (tensor(1, 1, 1), "storage"),
        "stride past its end": (
            Calls(rebuild, Calls(load, many), 0, (2,), (1 << 62,), False, None),
            "overflowed",
        ),
        "negative stride": (tensor(0, 1, -1), "stride"),
        "text as a size": (Calls(rebuild, Calls(load, one), 0, ("a", 1 << 40), (1,), False, None), "Size"),
        "huge storage": (Calls(load, huge_storage), "a PlainTensor"),
        "huge bytes": (b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"x.", "cannot be read"),
        "huge memo": (b"\x80\x02}r\xff\xff\xff\xffcos\nsystem\n.", "a partial"),
        "same storage over and over": ([Calls(load, many) for _ in range(9)], "a list"),  # kept once
        # Each of a few hundred bytes; read naively they take time or memory exponential in their size.
        "nested keys": (b"\x80\x04}(" + DOUBLING + b"K\x01u.", "unhashable"),
        "nested set": (b"\x80\x04\x8f(" + DOUBLING + b"\x90.", "unhashable"),
        "nested frozen set": (b"\x80\x04(" + DOUBLING + b"\x91.", "unhashable"),
        "nested values": (b"\x80\x04}X\x03\x00\x00\x00ema" + DOUBLING + b"s.", "but a _Tuple"),
        "deep": (b"\x80\x04" + b"]" * 500_000 + b"a" * 499_999 + b".", "a list"),
        "contains itself": (b"\x80\x04]\x94h\x00a.", "a list"),
        "tensor as a set": (b"\x80\x04" + program(tensor(0, 1, 1)) + b"(K\x01\x90.", "no attribute 'add'"),
        "tensor as a list": (b"\x80\x04" + program(tensor(0, 1, 1)) + b"(K\x01e.", "no attribute 'append'"),
        "tensor as a dict": (b"\x80\x04" + program(tensor(0, 1, 1)) + b"K\x00K\x01s.", "item assignment"),
    }


@pytest.mark.parametrize("name", hostile(Path("x")))
@pytest.mark.parametrize("archive", [False, True], ids=["pickle", "archive"])
def test_hostile_pickles_are_refused_and_run_nothing(tmp_path: Path, name: str, archive: bool) -> None:
    content, mention = hostile(tmp_path / "marker")[name]
    path = write(tmp_path / "x.pkl", content)
    if archive:
        with zipfile.ZipFile(tmp_path / "x.pt", "w") as file:
            file.writestr("archive/data.pkl", path.read_bytes())
        path = tmp_path / "x.pt"
    found = fault(lambda: load_checkpoint(path))
    assert mention in found.what and found.path == str(path)
    assert not (tmp_path / "marker").exists()


def test_embedded_source_never_runs(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    before = set(builtins.__dict__)
    content = SNAPSHOT.read_bytes()
    source = b'raise RuntimeError("source embedded in a checkpoint must never run")\n'
    assert source in content
    evil = f"open({str(marker)!r}, 'w')".encode().ljust(len(source))[: len(source)]
    read_pickle(content.replace(source, evil), "x")
    assert not marker.exists() and set(builtins.__dict__) == before


def test_reads_what_torch_writes(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    grid = torch.randn(6, 8, generator=generator)
    content = {
        "whole": grid,
        "transposed": grid.t(),
        "part": grid[2:4, 1:7:2],
        "again": grid,
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "half": grid.half(),
        "bfloat16": grid.bfloat16(),
        "integers": torch.arange(5),
        "parameter": torch.nn.Parameter(grid.clone()),
        "numbers": [1, 2.5, None, True, "text", (1, 2)],
        "ordered": collections.OrderedDict(a=1, b=2),
        "set": {1, 2},
    }
    torch.save(content, tmp_path / "x.pt")
    for path in (tmp_path / "x.pt", write(tmp_path / "x.pkl", content)):
        read = read_pickle(path.read_bytes(), path)
        assert read.keys() == content.keys()
        for name, value in content.items():
            if isinstance(value, torch.Tensor):
                found = read[name].values
                assert isinstance(read[name], PlainTensor) and found.dtype == value.dtype
                assert torch.equal(found, value.detach())
        assert read["numbers"] == content["numbers"] and read["ordered"] == {"a": 1, "b": 2}


@settings(max_examples=150, deadline=None)
@given(program=st.binary(max_size=60))
def test_random_programs_raise_value_errors_only(program: bytes) -> None:
    try:
        read_pickle(program + b".", "x.pkl")
    except ValueError as error:
        assert "x.pkl" in str(error)


def test_odd_archives_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    for name, compression, mention in (("a/data.pkl", 8, "compressed"), ("readme.txt", 0, "data.pkl")):
        with zipfile.ZipFile(path, "w", compression) as file:
            file.writestr(name, pickle.dumps({}) + b"\x00" * 1000)
        assert mention in fault(lambda: load_checkpoint(path)).what
    torch.save({"x": torch.zeros(3)}, path)
    whole = path.read_bytes()
    for end in (len(whole) // 2, len(whole) - 10):
        path.write_bytes(whole[:end])
        assert fault(lambda: load_checkpoint(path)).path == str(path)
