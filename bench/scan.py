"""One merge scan against point reads: `python -m bench scan`.

A batch needs the state of some of a subtask's keys. Either they are asked for by multi-get, sorted
and in chunks, or the whole range is read once and matched. Measured on stores of the product's own
settings, in three layouts: *merged* (all in one level), *lived in* (four files in level 0 on top of
it, each with a tenth of the keys anew) and *memtable* (nothing flushed yet).

Each way starts with the touched keys as a sorted Arrow array and ends with an Arrow array of their
values, so that making Python objects and matching are in the figures. The fastest of the repeats
counts; one read of everything warms the caches before.
"""

from __future__ import annotations

import gc
import shutil
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bench.takeover import _full_keys
from statebackend.rocks.store import META_PREFIX, RocksSettings, RocksStore

__all__ = ["LAYOUTS", "scan", "scan_text"]

LAYOUTS = ("merged", "lived in", "memtable")
SHARES = (0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 1.0)
CHUNKS = (250, 1_000, 4_000, 16_000, 64_000)
_LARGE_KEYS = 2_000_000  # from here on fewer shares and one size of chunks: minutes each
_LARGE_SHARES, _LARGE_CHUNKS = (0.01, 0.1, 0.3, 0.5, 1.0), (1_000,)
_WRITE_ROWS = 50_000
_PIECE = 8_192
_END = META_PREFIX


def scan(
    *,
    keys: Sequence[int],
    sizes: Sequence[int],
    layouts: Sequence[str] = LAYOUTS,
    repeats: int,
    work: Path,
    progress: Any,
) -> dict[str, Any]:
    """All layouts for all numbers of keys and sizes of values (bytes).

    A store that does not fit its write buffer has no layout ``memtable``.
    """
    cases = []
    for count in keys:
        full = _full_keys(count)
        for size in sizes:
            for layout in layouts:
                if (
                    layout == "memtable"
                    and count * (size + 60) > RocksSettings().write_buffer_bytes
                ):
                    continue
                folder = work / "store"
                store = _filled(folder, full, size, layout)
                cases.append(_case(store, full, repeats) | {"size": size, "layout": layout})
                store.close()
                shutil.rmtree(folder)
                progress(_lines([cases[-1]])[-1])
    return {"cases": cases, "repeats": repeats}


def _filled(folder: Path, full: list[bytes], size: int, layout: str) -> RocksStore:
    store = RocksStore.open(str(folder))
    random = np.random.default_rng(5)
    _write(store, full, size, random)
    if layout == "memtable":
        return store
    store.flush()
    store._db.compact_range(None, None)
    if layout == "lived in":
        every = np.array(full, dtype=object)
        for _ in range(4):
            _write(store, sorted(random.choice(every, len(full) // 10, False)), size, random)
            store.flush()
            if store.level0_files() >= 3:  # the fourth starts the merging of all
                break
    return store


def _write(store: RocksStore, keys: Sequence[bytes], size: int, random: Any) -> None:
    for start in range(0, len(keys), _WRITE_ROWS):
        some = keys[start : start + _WRITE_ROWS]
        raw = random.bytes(len(some) * size)
        store._write(some, [raw[i * size : (i + 1) * size] for i in range(len(some))], None)


# --- the ways ----------------------------------------------------------------------------------


def _by_multi_get(store: RocksStore, touched: pa.Array, chunk: int) -> pa.Array:
    found = []
    for start in range(0, len(touched), chunk):
        some = touched.slice(start, chunk).to_pylist()
        found.append(pa.array(store.multi_get(some), pa.binary()))
    return pa.concat_arrays(found)


def _by_seek(store: RocksStore, touched: pa.Array) -> pa.Array:
    """One iterator that jumps from key to key: what it finds is compared."""
    iterator = store._db.iter()
    seek, key, value = iterator.seek, iterator.key, iterator.value
    found = []
    for wanted in touched.to_pylist():
        seek(wanted)
        found.append(value() if key() == wanted else None)
    iterator.status()
    return pa.array(found, pa.binary())


def _by_scan(store: RocksStore, touched: pa.Array) -> pa.Array:
    """In pieces: each is matched with the touched keys up to its end."""
    wanted, done, found = touched.to_pylist(), 0, []
    for keys, values in _pieces(store._db):
        upto = bisect_right(wanted, keys[-1], done)
        some = wanted[done:upto]
        column = pa.array(values, pa.binary())
        if some != keys:
            there = pa.array(keys, pa.binary())
            at = pc.index_in(touched.slice(done, upto - done), value_set=there)
            column = column.take(at)
        found.append(column)
        done = upto
    return pa.concat_arrays(found)


def _pieces(db: Any) -> Iterator[tuple[list[bytes], list[bytes]]]:
    iterator = db.iter()
    iterator.seek(b"")
    key, value, advance = iterator.key, iterator.value, iterator.next
    at = key()
    while at is not None and at < _END:
        keys: list[bytes] = []
        values: list[bytes] = []
        add_key, add_value = keys.append, values.append
        for _ in range(_PIECE):
            add_key(at)
            add_value(value())
            advance()
            at = key()  # past the end it is None
            if at is None or at >= _END:
                break
        yield keys, values
    iterator.status()


def _read_iter(db: Any) -> tuple[list[bytes], list[bytes]]:
    """Four calls an entry, as ``RocksStore.scan`` makes them, without its generator."""
    iterator = db.iter()
    iterator.seek(b"")
    valid, key, value, advance = iterator.valid, iterator.key, iterator.value, iterator.next
    keys: list[bytes] = []
    values: list[bytes] = []
    add_key, add_value = keys.append, values.append
    while valid():
        at = key()
        if at >= _END:
            break
        add_key(at)
        add_value(value())
        advance()
    iterator.status()
    return keys, values


def _read_calls(db: Any) -> tuple[list[bytes], list[bytes]]:
    """Three calls an entry, made from C: past the end ``key()`` says None."""
    iterator = db.iter()
    iterator.seek(b"")
    keys: list[bytes] = []
    values: list[bytes] = []
    triples = zip(
        iter(iterator.key, None), iter(iterator.value, _END), iter(iterator.next, 0), strict=False
    )
    while piece := list(islice(triples, _PIECE)):
        some, worth, _ = zip(*piece, strict=True)
        keys += some
        values += worth
    iterator.status()
    return keys, values


def _read_items(db: Any) -> tuple[list[bytes], list[bytes]]:
    """One call an entry; ends early, without an error, at a damaged block: see `_checked_end`."""
    pairs = db.items(from_key=b"")
    keys: list[bytes] = []
    values: list[bytes] = []
    while piece := list(islice(pairs, _PIECE)):
        some, worth = zip(*piece, strict=True)
        keys += some
        values += worth
    return keys, values


def _read_keys_values(db: Any) -> tuple[list[bytes], list[bytes]]:
    """Two iterators side by side, one call of each an entry."""
    return list(db.keys(from_key=b"")), list(db.values(from_key=b""))


_READERS = {
    "iter: key, value, next, valid": _read_iter,
    "iter: key, value, next by zip": _read_calls,
    "items()": _read_items,
    "keys() and values()": _read_keys_values,
}


def _case(store: RocksStore, full: list[bytes], repeats: int) -> dict[str, Any]:
    count = len(full)
    random = np.random.default_rng(11)
    readers_ns = {}
    for name, read in _READERS.items():
        took_s = _fastest(partial(read, store._db), repeats, lambda r: len(r[0]) == count)
        readers_ns[name] = took_s * 1e9 / count
    every = np.array(full, dtype=object)
    large = count >= _LARGE_KEYS
    shares = []
    for share in _LARGE_SHARES if large else SHARES:
        chosen = np.sort(random.choice(count, max(1, int(count * share)), False))
        touched = pa.array(every[chosen].tolist(), pa.binary())
        chunks = _LARGE_CHUNKS if large else CHUNKS
        shares.append({"share": share} | _share(store, touched, chunks, repeats))
    return {"keys": count, "readers_ns": readers_ns, "shares": shares, "even": _even(shares)}


def _share(
    store: RocksStore, touched: pa.Array, chunks: Sequence[int], repeats: int
) -> dict[str, Any]:
    def ns(way: Callable[..., pa.Array], *more: int) -> float:
        call = partial(way, store, touched, *more)
        return _fastest(call, repeats, _complete(len(touched))) * 1e9 / len(touched)

    small = [chunk for chunk in chunks if chunk <= len(touched)] or [chunks[0]]
    gets_ns = {chunk: ns(_by_multi_get, chunk) for chunk in small}
    scan_ns, seek_ns = ns(_by_scan), ns(_by_seek)
    return {
        "touched": len(touched),
        "multi_get_ns": gets_ns,
        "seek_ns": seek_ns,
        "scan_ms": scan_ns * len(touched) / 1e6,
        "multi_get_ms": min(gets_ns.values()) * len(touched) / 1e6,
    }


def _complete(rows: int) -> Callable[[pa.Array], bool]:
    return lambda found: len(found) == rows and not found.null_count


def _even(shares: Sequence[dict[str, Any]]) -> float | None:
    """The share of touched keys from which on the scan is quicker; None if it never is."""
    before = None
    for one in shares:
        ratio = one["multi_get_ms"] / one["scan_ms"]
        if ratio >= 1:
            if before is None:
                return float(one["share"])
            low, low_ratio = before
            part = (np.log(1) - np.log(low_ratio)) / (np.log(ratio) - np.log(low_ratio))
            return round(float(low * (one["share"] / low) ** part), 3)
        before = (one["share"], ratio)
    return None


def _fastest(call: Callable[[], Any], repeats: int, right: Callable[[Any], bool]) -> float:
    """Seconds; the first call is not counted, and its result is checked."""
    if not right(call()):
        raise AssertionError("a way to read found something else")
    best = float("inf")
    for _ in range(repeats):
        gc.collect()
        gc.disable()
        try:
            start_s = time.perf_counter()
            result = call()
            best = min(best, time.perf_counter() - start_s)
            deque((result,), maxlen=0)
            del result
        finally:
            gc.enable()
    return best


# --- text --------------------------------------------------------------------------------------


def scan_text(found: dict[str, Any]) -> str:
    """Two tables: an entry of a scan, and scan against multi-get by share."""
    return "\n".join(_lines(found["cases"]))


def _lines(cases: Sequence[dict[str, Any]]) -> list[str]:
    names = list(_READERS)
    lines = [
        "An entry of a scan, ns (into two lists)",
        f"{'store':<34}" + "".join(f"{n:>32}" for n in names),
    ]
    for one in cases:
        cells = "".join(f"{one['readers_ns'][name]:>32,.0f}" for name in names)
        lines.append(f"{_name(one):<34}{cells}")
    lines += [
        "",
        "Touched keys to values, Arrow to Arrow: ms by one scan and by sorted multi-get; ns a key "
        "of multi-get in chunks and of an iterator that seeks",
        f"{'store':<34}{'touched':>9}{'scan ms':>10}{'get ms':>10}{'winner':>8}"
        + "".join(f"{f'in {c:,}':>11}" for c in CHUNKS)
        + f"{'by seek':>11}",
    ]
    for one in cases:
        for share in one["shares"]:
            chunks = "".join(
                f"{share['multi_get_ns'][c]:>11,.0f}" if c in share["multi_get_ns"] else f"{'':>11}"
                for c in CHUNKS
            )
            wins = "scan" if share["scan_ms"] < share["multi_get_ms"] else "get"
            lines.append(
                f"{_name(one):<34}{share['share']:>9.0%}{share['scan_ms']:>10.1f}"
                f"{share['multi_get_ms']:>10.1f}{wins:>8}{chunks}{share['seek_ns']:>11,.0f}"
            )
    lines += ["", "The share of touched keys from which on one scan is quicker"]
    for one in cases:
        lines.append(f"{_name(one):<34}{'never' if one['even'] is None else one['even']:>9}")
    return lines


def _name(one: dict[str, Any]) -> str:
    return f"{one['keys']:,} of {one['size']} B, {one['layout']}"
