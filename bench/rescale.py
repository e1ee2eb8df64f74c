"""What a change of parallelism costs where the files are local: `python -m bench rescale`.

One store of 10 million keys (96 bytes each, values of 128) in 128 key groups becomes two, and these
become one again. Measured is the time from opening the parents until the child answers its first
read, with its marker set and on disk; what frees the space of what was cut off afterwards; and how
the children read, against the parent. The measure for two into one is what any way would have to do
that moves the smaller parent's bytes: copying its files, in the same run. Also with that copy as a
part of it, as for a parent whose files come from elsewhere.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from recovery.restore.rescaled_store import Piece, assemble
from statebackend.rocks.parted import Store, open_store
from statebackend.rocks.store import Marker, RocksSettings, RocksStore

__all__ = ["rescale", "rescale_text"]

_GROUPS = 128
_HALF = _GROUPS // 2
_REST_BYTES, _VALUE_BYTES = 92, 128
_EPOCHS = 3  # of updates, each of one key in 250
_GETS = 50_000
_SETTINGS = RocksSettings()

Say = Callable[[str], None]
Keys = list[list[bytes]]


def rescale(*, keys: int, work: Path, progress: Say) -> dict[str, Any]:
    """Seconds of each step, and microseconds of reads."""
    progress(f"rescale: a store of {keys:,} keys")
    sampled = _build(work / "parent", keys)
    parent = _opened(work / "parent")
    found: dict[str, Any] = {"keys": keys, "parent_bytes": _bytes(work / "parent")}
    found["parent"] = _reads(parent, sampled, range(_GROUPS))
    parent.close()
    progress("rescale: one into two")
    found["1 -> 2"] = _one_into_two(work, sampled)
    progress("rescale: two into one")
    found["2 -> 1"] = _two_into_one(work, sampled)
    return found


def _marker(first: int, last: int, epoch: int) -> Marker:
    return Marker(
        job_id="j",
        operator="op",
        key_group_start=first,
        key_group_end=last,
        epoch=epoch,
        chain="c",
    )


def _build(path: Path, keys: int) -> Keys:
    """Every 50th key of each key group."""
    random, sampled = np.random.default_rng(42), list[list[bytes]]()
    store = RocksStore.open(str(path), _SETTINGS)

    def values(count: int) -> list[bytes | None]:
        data = random.bytes(count * _VALUE_BYTES)
        return [data[at : at + _VALUE_BYTES] for at in range(0, len(data), _VALUE_BYTES)]

    def pieces() -> Iterator[tuple[list[bytes], list[bytes | None]]]:
        for group in range(_GROUPS):
            prefix = group.to_bytes(2, "big") + b"\0\1"
            data = random.bytes(keys // _GROUPS * _REST_BYTES)
            rests = (data[at : at + _REST_BYTES] for at in range(0, len(data), _REST_BYTES))
            some = sorted(prefix + rest for rest in rests)
            sampled.append(some[::50])
            yield some, values(len(some))

    store.apply_batches(pieces(), _marker(0, _GROUPS - 1, 0))
    for epoch in range(1, _EPOCHS + 1):
        changed = sorted(key for some in sampled for key in some[epoch::5])
        store.apply(changed, values(len(changed)), _marker(0, _GROUPS - 1, epoch))
        store.flush()
    store.close()  # waits for compaction
    return sampled


def _opened(path: Path) -> Store:
    return open_store(str(path), _SETTINGS)


def _bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*.sst"))


def _made(
    path: Path, parents: list[tuple[Path, int, int]], groups: tuple[int, int], key: bytes
) -> tuple[Store, dict[str, float]]:
    """A child, usable; and the seconds since nothing was open."""
    start = time.perf_counter()
    sources = [_opened(parent) for parent, _, _ in parents]
    opened = time.perf_counter()
    pieces = [Piece(one, a, b) for one, (_, a, b) in zip(sources, parents, strict=True)]
    store = assemble(path, pieces, _SETTINGS)
    assembled = time.perf_counter()
    store.apply((), (), _marker(*groups, _EPOCHS))
    store.flush()
    if store.get(key) is None:
        raise AssertionError("the child lacks a key")
    usable = time.perf_counter()
    for one in sources:
        one.close()
    steps = {"usable": usable - start, "of that opening": opened - start}
    steps["of that assembling"] = assembled - opened
    steps["until the parents are closed"] = time.perf_counter() - start
    return store, {name: round(seconds, 4) for name, seconds in steps.items()}


def _one_into_two(work: Path, sampled: Keys) -> dict[str, Any]:
    found: dict[str, Any] = {}
    children: dict[str, tuple[Store, range]] = {}
    start = time.perf_counter()
    for name, first in (("low", 0), ("high", _HALF)):
        last = first + _HALF - 1
        parent = [(work / "parent", first, last)]
        store, found[name] = _made(work / name, parent, (first, last), sampled[first][0])
        children[name] = store, range(first, last + 1)
    found["both usable"] = round(time.perf_counter() - start, 4)
    for store, _ in children.values():
        store.compact_clipped(after_s=600.0)
    for name, (store, groups) in children.items():
        found[name]["reads at once"] = _reads(store, sampled, groups)
    start = time.perf_counter()
    for store, _ in children.values():
        store.settle_compaction()
    found["freeing both"] = round(time.perf_counter() - start, 1)
    for name, (store, groups) in children.items():
        store.close()
        found[name]["bytes"] = _bytes(work / name)
        store = _opened(work / name)
        found[name]["reads once freed"] = _reads(store, sampled, groups)
        store.close()
    return found


def _two_into_one(work: Path, sampled: Keys) -> dict[str, Any]:
    found: dict[str, Any] = {}
    groups = (0, _GROUPS - 1)
    parents = [(work / "low", 0, _HALF - 1), (work / "high", _HALF, _GROUPS - 1)]
    copying = []
    for _ in range(2):
        start = time.perf_counter()
        _copied(work / "high", work / "copied")
        copying.append(time.perf_counter() - start)
        found["copied_bytes"] = _bytes(work / "copied")
        shutil.rmtree(work / "copied")
    found["copying"] = round(min(copying), 4)
    store, found["local"] = _made(work / "both", parents, groups, sampled[-1][0])
    found["reads"] = _reads(store, sampled, range(_GROUPS))
    store.close()
    shutil.rmtree(work / "both")
    start = time.perf_counter()
    _copied(work / "high", work / "copied")
    store, found["with copying"] = _made(
        work / "both", [parents[0], (work / "copied", *parents[1][1:])], groups, sampled[-1][0]
    )
    store.close()
    found["with copying"]["usable"] = round(
        time.perf_counter()
        - start
        - found["with copying"]["until the parents are closed"]
        + found["with copying"]["usable"],
        4,
    )
    return found


def _copied(source: Path, target: Path) -> None:
    target.mkdir()
    for file in source.iterdir():
        if file.suffix == ".sst" or file.name.startswith(("MANIFEST", "CURRENT")):
            shutil.copyfile(file, target / file.name)


def _reads(store: Store, sampled: Keys, groups: range) -> dict[str, float]:
    """Microseconds a row of a scan of a tenth of the key groups, and a key of a multi-get."""
    step = max(1, len(groups) // 10)
    start, rows = time.perf_counter(), 0
    for group in groups[::step]:
        rows += sum(1 for _ in store.scan(group.to_bytes(2, "big")))
    scan_s = time.perf_counter() - start
    wanted = [key for group in groups for key in sampled[group]]
    wanted = wanted[:: max(1, len(wanted) // _GETS)]
    start = time.perf_counter()
    for at in range(0, len(wanted), 1000):
        if None in store.multi_get(wanted[at : at + 1000]):
            raise AssertionError("a key is missing")
    get_s = time.perf_counter() - start
    return {
        "scan_us": round(scan_s / rows * 1e6, 3),
        "multi_get_us": round(get_s / len(wanted) * 1e6, 2),
    }


def rescale_text(found: dict[str, Any]) -> str:
    """The figures to read."""

    def reads(one: dict[str, float]) -> str:
        return f"scan {one['scan_us']:.2f} us/row, multi-get {one['multi_get_us']:.1f} us/key"

    split, joined = found["1 -> 2"], found["2 -> 1"]
    lines = [
        f"Rescaling {found['keys']:,} keys, {found['parent_bytes'] / 1e9:.2f} GB of table files, "
        f"all of them local:",
        f"  the parent: {reads(found['parent'])}",
    ]
    for name in ("low", "high"):
        one = split[name]
        lines += [
            f"  1 -> 2, the {name} half: usable after {one['usable']:.3f} s (opening the parent "
            f"{one['of that opening']:.3f}, assembling {one['of that assembling']:.3f})",
            f"    at once: {reads(one['reads at once'])}; freed, {one['bytes'] / 1e9:.2f} GB: "
            f"{reads(one['reads once freed'])}",
        ]
    lines += [
        f"  both usable after {split['both usable']:.3f} s, one after the other; freeing what was "
        f"cut off, in the background: {split['freeing both']:.1f} s",
        f"  2 -> 1: usable after {joined['local']['usable']:.3f} s; copying the smaller parent's "
        f"{joined['copied_bytes'] / 1e9:.2f} GB alone takes {joined['copying']:.3f} s: "
        f"{joined['local']['usable'] / joined['copying']:.2f} times that",
        f"    with that copy as a part of it: {joined['with copying']['usable']:.3f} s, "
        f"{joined['with copying']['usable'] / joined['copying']:.2f} times it",
        f"    {reads(joined['reads'])}",
    ]
    return "\n".join(lines)
