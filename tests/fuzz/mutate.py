"""Seeded damage: to bytes, and to what JSON and MessagePack hold."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Final

__all__ = ["damaged_bytes", "damaged_text", "damaged_value"]

_WIDTHS: Final = (1, 2, 4, 8)
_NUMBERS: Final[Sequence[Any]] = (
    0,
    -1,
    1,
    255,
    256,
    65_535,
    2**31 - 1,
    2**31,
    -(2**31),
    2**32,
    2**53 + 1,
    2**63 - 1,
    -(2**63),
    2**64 - 1,
    1e308,
    float("nan"),
    float("inf"),
    -0.0,
    0.5,
)
_TEXTS: Final = (
    "",
    "\0",
    "..",
    "../../etc/passwd",
    "/",
    "a" * 70_000,
    "\u202e\ud7ff\uffff",
    "-1",
    "0" * 64,
    "zz" * 32,
    "f" * 65,
    "%s%n{}",
    "١٢",
)


def damaged_bytes(rng: random.Random, data: bytes, others: Sequence[bytes] = (b"",)) -> bytes:
    """One to four mutations of ``data``; ``others`` lend their pieces."""
    found = bytearray(data)
    for _ in range(1 if rng.random() < 0.6 else rng.randint(2, 4)):
        rng.choice(_BYTES)(rng, found, others)
    return bytes(found)


def _place(rng: random.Random, data: bytearray) -> int:
    """Anywhere, but more often near the ends: there is what a format says of itself."""
    length = len(data)
    pick = rng.random()
    if pick < 0.2:
        return min(length, rng.randrange(64))
    if pick < 0.45:
        return max(0, length - rng.randrange(96))
    return rng.randrange(length + 1)


def _flip(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    if data:
        data[min(_place(rng, data), len(data) - 1)] ^= 1 << rng.randrange(8)


def _set(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    if data:
        data[min(_place(rng, data), len(data) - 1)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, 0x20))


def _cut(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    del data[_place(rng, data) :]


def _cut_front(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    del data[: _place(rng, data)]


def _remove(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    start = _place(rng, data)
    del data[start : start + rng.choice((1, 2, 4, 8, 64, 1000))]


def _repeat(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    start = _place(rng, data)
    piece = bytes(data[start : start + rng.choice((1, 4, 8, 64, 512))])
    data[start:start] = piece * rng.choice((1, 2, 50))


def _splice(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    other = rng.choice(others)
    start = rng.randrange(len(other) + 1)
    piece = other[start : start + rng.choice((4, 16, 64, 1024))]
    at = _place(rng, data)
    data[at : at + (len(piece) if rng.random() < 0.5 else 0)] = piece


def _number(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    width = rng.choice(_WIDTHS)
    at = _place(rng, data)
    if rng.random() < 0.5:
        at -= at % width
    limit = 1 << (8 * width)
    near = int.from_bytes(data[at : at + width], "little")
    value = rng.choice((0, 1, limit - 1, limit // 2, limit // 2 - 1, near + 1, near - 1, 2 * near))
    data[at : at + width] = (value % limit).to_bytes(width, rng.choice(("little", "big")))


def _zeros(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    start = _place(rng, data)
    length = min(rng.choice((8, 64, 512, 4096)), len(data) - start)
    data[start : start + length] = bytes(length)


def _swap(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    one, two, width = _place(rng, data), _place(rng, data), rng.choice((1, 4, 8, 16))
    first, second = bytes(data[one : one + width]), bytes(data[two : two + width])
    if len(first) == len(second) == width and abs(one - two) >= width:
        data[one : one + width], data[two : two + width] = second, first


_BYTES: Final[Sequence[Callable[[random.Random, bytearray, Sequence[bytes]], None]]] = (
    _flip,
    _flip,
    _set,
    _cut,
    _cut_front,
    _remove,
    _repeat,
    _splice,
    _number,
    _number,
    _zeros,
    _swap,
)


def damaged_text(rng: random.Random, text: str, others: Sequence[str]) -> str:
    """As :func:`damaged_bytes`, of text; ``others`` lend their words."""
    for _ in range(rng.randint(1, 3)):
        start = rng.randrange(len(text) + 1)
        end = min(len(text), start + rng.choice((0, 1, 3, 10, 100)))
        words = rng.choice(others).split() or [""]
        piece = rng.choice(
            (rng.choice(words), rng.choice("<>(),:`'\"\\\0\n-0٣é𝔸"), "", text[start:end])
        )
        text = text[:start] + piece * rng.choice((1, 1, 1, 2, 40)) + text[end:]
    return text[:3000]


def damaged_value(rng: random.Random, value: Any) -> Any:
    """A copy of plain data (dict, list, leaves) in which one to three places are damaged."""
    for _ in range(rng.randint(1, 3)):
        value = _somewhere(rng, value)
    return value


def _somewhere(rng: random.Random, value: Any) -> Any:
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        if rng.random() < 0.2:
            return _other_keys(rng, value, key)
        return {**value, key: _somewhere(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.85:
        at = rng.randrange(len(value))
        if rng.random() < 0.2:
            less = value[:at] + value[at + 1 :]
            return rng.choice((less, [*value, value[at]], value[::-1], [value[at]] * 100))
        return [*value[:at], _somewhere(rng, value[at]), *value[at + 1 :]]
    return _other(rng, value)


def _other_keys(rng: random.Random, value: dict[Any, Any], key: Any) -> dict[Any, Any]:
    pick = rng.randrange(3)
    if pick == 0:  # two fields swapped
        two = rng.choice(list(value))
        return {**value, key: value[two], two: value[key]}
    rest = {name: one for name, one in value.items() if name != key}
    return rest if pick == 1 else {**rest, rng.choice(_TEXTS): value[key]}


def _other(rng: random.Random, value: Any) -> Any:
    if rng.random() < 0.4:
        if isinstance(value, bool):
            return not value
        if isinstance(value, int):
            return value + rng.choice((-1, 1, 1 << 31, -value - 1, value))
        if isinstance(value, str):
            return damaged_text(rng, value, (value,))
        if isinstance(value, bytes):
            return damaged_bytes(rng, value)
    pick = rng.randrange(6)
    if pick == 0:
        return None
    if pick == 1:
        return rng.choice(_TEXTS)
    if pick == 2:
        return _deep(rng, value)
    if pick == 3:
        return rng.choice(([], {}, True, b"", [value], {"a": value}))
    return rng.choice(_NUMBERS)


def _deep(rng: random.Random, value: Any) -> Any:
    for _ in range(rng.choice((2, 30, 300))):
        value = [value] if rng.random() < 0.5 else {"x": value}
    return value
