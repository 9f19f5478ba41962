"""One mutator for all formats: the damage of disks and transfers, and the lies of hostile files.

A mutant is a function of the valid bytes and a seed, so a failure is repeated by its number.
"""

import random
import re
import struct

# Sizes that overflow, go round, or ask for all of the memory.
_NUMBERS = [0, 1, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**24]
_NUMBERS += [2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1]
_TEXTS = [b"", b"-1", b"0", b"1e999", b"nan", b"99999999999999999999", b"2147483648", b"0.5", b"null", b"true"]
_WORDS = [b"\x00", b"\xff\xfe", b"\n", b'"', b"{", b"]" * 3, b",", b"../", b"\x1b[31m", "é".encode()]
_WORDS += [b"<script>"]


def mutate(data: bytes, rng: random.Random) -> bytes:
    """One to four changes, most often one; never the valid bytes themselves."""
    mutant = data
    while mutant == data:
        for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
            mutant = rng.choice(_CHANGES)(mutant, rng)
    return mutant


def _place(data: bytes, rng: random.Random) -> int:
    """Anywhere, but half of the time near either end, where headers and directories are."""
    near = min(len(data), 256)
    match rng.randrange(4):
        case 0:
            return rng.randrange(near + 1)
        case 1:
            return len(data) - rng.randrange(near + 1)
    return rng.randrange(len(data) + 1)


def _flip_bit(data: bytes, rng: random.Random) -> bytes:
    at = min(_place(data, rng), len(data) - 1)
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :] if data else data


def _set_bytes(data: bytes, rng: random.Random) -> bytes:
    at, count = _place(data, rng), rng.choice((1, 1, 2, 4, 16))
    return data[:at] + rng.randbytes(min(count, len(data) - at)) + data[at + count :]


def _set_number(data: bytes, rng: random.Random) -> bytes:
    at, number, count = _place(data, rng), rng.choice(_NUMBERS), rng.choice((1, 2, 4, 8))
    packed = struct.pack(rng.choice("<>") + "Q", number)
    packed = packed[:count] if rng.random() < 0.5 else packed[-count:]
    return data[:at] + packed + data[at + count :]


def _set_text(data: bytes, rng: random.Random) -> bytes:
    """Another number where the file has one in words."""
    found = list(re.finditer(rb"-?\d+(\.\d+)?", data[:100_000]))
    if not found:
        return _flip_bit(data, rng)
    chosen = rng.choice(found)
    return data[: chosen.start()] + rng.choice(_TEXTS) + data[chosen.end() :]


def _insert(data: bytes, rng: random.Random) -> bytes:
    at = _place(data, rng)
    new = rng.choice(_WORDS) if rng.random() < 0.7 else rng.randbytes(rng.randrange(1, 64))
    return data[:at] + new + data[at:]


def _delete(data: bytes, rng: random.Random) -> bytes:
    at = _place(data, rng)
    return data[:at] + data[at + rng.choice((1, 1, 2, 8, 100)) :]


def _truncate(data: bytes, rng: random.Random) -> bytes:
    return data[: _place(data, rng)]


def _copy_over(data: bytes, rng: random.Random) -> bytes:
    """A part of the file in place of another, as lost and misplaced blocks leave it."""
    start, at, count = _place(data, rng), _place(data, rng), rng.choice((4, 16, 64, 512))
    part = data[start : start + count]
    return data[:at] + part + data[at + len(part) :]


def _zeros(data: bytes, rng: random.Random) -> bytes:
    at, count = _place(data, rng), rng.choice((1, 8, 64, 512))
    return data[:at] + bytes(min(count, len(data) - at)) + data[at + count :]


def _repeat(data: bytes, rng: random.Random) -> bytes:
    at, count = _place(data, rng), rng.choice((1, 16, 200))
    return data[:at] + data[at : at + count] * rng.choice((2, 3, 50)) + data[at + count :]


_CHANGES = [
    _flip_bit, _flip_bit, _set_bytes, _set_number, _set_number, _set_text, _set_text, _insert, _delete,
    _truncate, _copy_over, _zeros, _repeat,
]  # fmt: skip
