"""Taking over a closed store: `python -m bench takeover`.

A store of all keys was closed at epoch 0; the delta of epoch 1, which changed half of them, lies
beside it. Measured is the product's own `Restorer`, from the lease to a store that stands at
epoch 1, with the driver's answer made in this process; RocksDB's share is what its calls take in
it. For comparison the same calls alone, on a copy of the same store, in turn with it. Files are in
the page cache.
"""

from __future__ import annotations

import contextlib
import gc
import shutil
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import types as T
from rocksdict import Rdict, WriteBatch, WriteOptions

from bench.inproc import MAX_PARALLELISM, UID
from bench.trace import Tracer
from recovery.local.local_copies import LocalSubtask
from recovery.local.store_pool import Clock
from recovery.restore.restorer import OpenSubtask, Restorer, Site
from snapshot.formats.delta import decode_delta, encode_delta
from snapshot.formats.lineage_digest import chain, chain_start
from snapshot.protocol.messages import BeginReply, LocalCopy, RestoreStep
from snapshot.storage.memory_store import MemoryStore
from statebackend import system
from statebackend.key_hashing import key_groups
from statebackend.keygroups import KeyGroupRange
from statebackend.rocks.rocksdb_options import RocksSettings, store_options
from statebackend.rocks.store import _MARKER_KEY, Marker
from statebackend.schema.codec import codec_for
from statebackend.schema.keys.key_codec import KeyCodec

__all__ = ["takeover", "takeover_text"]

GROUPS = KeyGroupRange(0, 7)
_JOB = "bench"
_KEY = T.StructType([T.StructField("k", T.LongType())])
_VALUE = T.StructType([T.StructField("n", T.LongType())])
# Thin around calls into RocksDB: what these take is its share.
_ROCKSDB = ("RocksStore.open", "RocksStore.get", "RocksStore._write")
_STEPS = (
    "recovery.local.local_copies:LocalSubtask.acquire",
    "recovery.local.store_directory:StoreDirectory.describe",
    "recovery.local.store_directory:StoreDirectory.drop_deltas",
    "recovery.local.store_directory:StoreDirectory.read_delta",
    "recovery.local.local_copies:LocalSubtask.sweep",
    "recovery.restore.step_reader:iter_delta",
    "recovery.restore.restorer:Restorer._apply",
    "statebackend.rocks.store:RocksStore.open",
    "statebackend.rocks.store:RocksStore.get",
    "statebackend.rocks.store:RocksStore._write",
    "statebackend.rocks.store:RocksStore.apply_batches",
)


class _Prepared:
    """A closed store of ``keys`` keys at epoch 0 and the delta of epoch 1, as a folder to copy."""

    def __init__(self, folder: Path, keys: int, changed: int) -> None:
        self.folder = folder
        self.start = chain_start(_JOB, UID, (0, MAX_PARALLELISM - 1))
        full = _full_keys(keys)
        encode = codec_for(_VALUE).encode
        self.changed = sorted(
            np.random.default_rng(3).choice(np.array(full, object), changed, False)
        )
        self.values = [encode((i,)) for i in range(changed)]
        self.delta = encode_delta(self.changed, self.values)
        self.chain = chain(self.start, self.delta.digest).hex()
        held = self.local(folder).create()
        held.open_store(RocksSettings()).apply(
            full, [encode((1,))] * len(full), self.marker(0, self.start.hex())
        )
        held.write_delta(1, self.delta.digest.hex(), self.delta.data)
        self.db = held.path.relative_to(folder) / "db"
        held.release()

    def local(self, folder: Path) -> LocalSubtask:
        clock = Clock(system.monotonic_s, system.sleep_s)
        return LocalSubtask(
            str(folder),
            job=_JOB,
            operator=UID,
            key_groups=GROUPS,
            new_id=system.new_id,
            clock=clock,
        )

    def marker(self, epoch: int, digest: str) -> Marker:
        return Marker(
            job_id=_JOB,
            operator=UID,
            key_group_start=0,
            key_group_end=MAX_PARALLELISM - 1,
            epoch=epoch,
            chain=digest,
        )

    def answer(self, copy: LocalCopy) -> tuple[BeginReply, list[bytes]]:
        """What the driver says: apply the local delta of epoch 1."""
        assert copy.epoch == 0, copy
        step = RestoreStep(
            epoch=1,
            kind="delta",
            digest=self.delta.digest.hex(),
            chain=self.chain,
            size_bytes=len(self.delta.data),
            rows=self.delta.rows,
            source="local",
        )
        reply = BeginReply(
            job_id=_JOB,
            generation=1,
            base_epoch=1,
            durable_epoch=1,
            durable_chain=self.chain,
            chain=self.chain,
            key_group_start=0,
            key_group_end=MAX_PARALLELISM - 1,
            fresh=False,
            reason="",
            steps=[step],
            states={"count": 1},
            inline_budget_bytes=0,
            restoring=False,
            base_due=False,
        )
        return reply, []


def _full_keys(keys: int) -> list[bytes]:
    column = pa.array(np.arange(keys, dtype=np.int64))
    groups = key_groups([column], MAX_PARALLELISM).tolist()
    encoded = KeyCodec(_KEY).encode_arrow([column]).to_pylist()
    return sorted(
        group.to_bytes(2, "big") + b"\x00\x01" + key
        for group, key in zip(groups, encoded, strict=True)
    )


def takeover(*, keys: int, changed: int, repeats: int) -> dict[str, Any]:
    """Medians in milliseconds over ``repeats`` take-overs, each of a fresh copy."""
    ours: list[dict[str, float]] = []
    raw: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="bench-takeover-") as name:
        work = Path(name)
        (work / "prepared").mkdir()
        prepared = _Prepared(work / "prepared", keys, changed)
        for repeat in range(repeats + 1):
            # Taking turns at going first: the second finds the disk as the first has left it.
            for run, into in ((_ours, ours), (_raw, raw))[:: 1 if repeat % 2 else -1]:
                with _copied(prepared, work) as folder:
                    took = run(prepared, folder)
                if repeat:  # the first pays for imports and caches
                    into.append(took)
    ours_ms, raw_ms = _medians(ours), _medians(raw)
    return {
        "keys": keys,
        "changed_keys": changed,
        "repeats": repeats,
        "delta_bytes": len(prepared.delta.data),
        "usable_ms": ours_ms.pop("usable"),
        "close_ms": ours_ms.pop("close"),
        "steps_ms": ours_ms,
        "rocksdb_share": round(statistics.median(map(_share, ours)), 3),
        "alone_usable_ms": raw_ms.pop("usable"),
        "alone_close_ms": raw_ms.pop("close"),
        "alone_steps_ms": raw_ms,
    }


def _share(run: dict[str, float]) -> float:
    return sum(run.get(name, 0.0) for name in _ROCKSDB) / run["usable"]


@contextlib.contextmanager
def _copied(prepared: _Prepared, work: Path) -> Iterator[Path]:
    folder = work / "copy"
    shutil.copytree(prepared.folder, folder)
    gc.collect()
    yield folder
    shutil.rmtree(folder)


def _ours(prepared: _Prepared, folder: Path) -> dict[str, float]:
    tracer = Tracer()
    local = prepared.local(folder)
    with tracer.patched(_STEPS):
        start_s = time.perf_counter()
        opened = _open(prepared, local)
        usable_s = time.perf_counter()
    assert opened.store.marker() == prepared.marker(1, prepared.chain)
    before_close_s = time.perf_counter()
    opened.directory.release()
    closed_s = time.perf_counter()
    found = {name: point.own_wall / 1e6 for name, point in tracer.points.items()}
    found["usable"] = (usable_s - start_s) * 1000
    found["close"] = (closed_s - before_close_s) * 1000
    return found


def _open(prepared: _Prepared, local: LocalSubtask) -> OpenSubtask:
    restorer = Restorer(
        local,
        Site(operator=UID, subtask=0, host="", executor=""),
        ask=prepared.answer,
        store=MemoryStore("takeover"),
        now_s=system.monotonic_s,
        lease_timeout_s=1.0,
        settings=RocksSettings(),
    )
    return restorer.open()


def _raw(prepared: _Prepared, folder: Path) -> dict[str, float]:
    """The same calls into RocksDB, with everything they need at hand."""
    path, unlogged = str(folder / prepared.db), WriteOptions()
    unlogged.disable_wal = True
    marker = b"x" * 200
    rows = decode_delta(prepared.delta.data)
    keys, values = rows.keys.to_pylist(), rows.values.to_pylist()  # new ones, side by side
    marks = [("", time.perf_counter())]

    def mark(name: str) -> None:
        marks.append((name, time.perf_counter()))

    db = Rdict(path, store_options(RocksSettings()))
    mark("open")
    db.get(_MARKER_KEY)
    batch = WriteBatch(raw_mode=True)
    deque(map(batch.put, keys, values), maxlen=0)
    batch.put(_MARKER_KEY, marker)
    mark("fill the batch")
    db.write(batch, unlogged)
    mark("write")
    usable_s = marks[-1][1] - marks[0][1]
    db.flush()
    mark("flush")
    db.close()
    mark("close the files")
    found = {
        name: (at_s - before_s) * 1000
        for (name, at_s), (_, before_s) in zip(marks[1:], marks[:-1], strict=True)
    }
    found["usable"] = usable_s * 1000
    found["close"] = (marks[-1][1] - marks[0][1] - usable_s) * 1000
    return found


def _medians(runs: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for run in runs for name in run)
    return {name: round(statistics.median(run.get(name, 0.0) for run in runs), 3) for name in names}


def takeover_text(found: dict[str, Any]) -> str:
    """The figures as a table to read."""
    lines = [
        f"Taking over a closed store of {found['keys']:,} keys and applying a delta of "
        f"{found['changed_keys']:,} ({found['delta_bytes']:,} bytes), median of "
        f"{found['repeats']}:",
        f"  usable after {found['usable_ms']:.1f} ms, {found['rocksdb_share']:.0%} of it in "
        f"RocksDB; closing it again {found['close_ms']:.1f} ms",
        f"  RocksDB alone, the same calls: {found['alone_usable_ms']:.1f} ms, closing "
        f"{found['alone_close_ms']:.1f} ms",
        "",
        f"{'step (own time)':<49}{'ms':>9}",
    ]
    steps = sorted(found["steps_ms"].items(), key=lambda step: -step[1])
    lines += [f"{name:<49}{took_ms:>9.2f}" for name, took_ms in steps]
    lines += ["", f"{'RocksDB alone':<49}{'ms':>9}"]
    lines += [f"{name:<49}{ms:>9.2f}" for name, ms in found["alone_steps_ms"].items()]
    return "\n".join(lines)
