"""A small world for one query: input files, places, a sink, and the truth that all must agree with.

The truth is computed from the input files in plain Python; the state is read back from the job's
log through the formats alone (records, deltas, schemas), not through the recovery that is tested.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
from blake3 import blake3
from pyspark.errors import StreamingQueryException
from pyspark.sql.types import StructType

from snapshot.formats.delta import decode_delta
from snapshot.formats.file_index import decode_index
from snapshot.formats.lineage_digest import chain, chain_rescaled, chain_start
from snapshot.formats.record import parse_record, record_name
from statebackend import StateBackend
from statebackend.key_hashing import key_groups
from statebackend.keygroups import key_group_range
from statebackend.rocks.store import RocksStore
from statebackend.schema.keys.key_codec import KeyCodec
from statebackend.schema.versioned_rows import codec_of_versions
from tests.spark.local import processors
from tests.spark.local.processors import LEDGER_OUTPUT, Ledger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from snapshot.formats.record import Manifest
    from snapshot.protocol.lineage import OperatorLineage, SliceRef, SubtaskLineage

Rows = list[dict[str, Any]]
BOUND_S = 120.0


def until(condition: Callable[[], Any], what: str) -> Any:
    """Poll until something holds; fail when it does not come about."""
    for _ in range(int(BOUND_S / 0.02)):
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError(f"it did not come about: {what}")


class Input:
    """JSON files that a stream reads in the order in which they were added."""

    def __init__(self, folder: Path, schema: str = "k string, id bigint") -> None:
        self.folder, self.schema = folder, schema
        self.rows: Rows = []
        self._files = itertools.count()
        self._ids = itertools.count(1)
        folder.mkdir(parents=True)

    def add(self, rows: Rows) -> Rows:
        """One more file; with one file per trigger, one more batch."""
        number = next(self._files)
        draft = self.folder / f".{number}"
        draft.write_text("".join(json.dumps(row) + "\n" for row in rows) or "\n")
        # Files are taken by their age, which two writes in one millisecond would share.
        os.utime(draft, (1_700_000_000 + number, 1_700_000_000 + number))
        draft.rename(self.folder / f"{number:03d}.json")
        self.rows += rows
        return rows

    def add_keys(self, *keys: str | None) -> Rows:
        """A file with one row for each key, ids counting up."""
        return self.add([{"k": key, "id": next(self._ids)} for key in keys])

    def add_batches(self, batches: int, keys: int = 7, rows: int = 20) -> None:
        """Files with keys of every subtask."""
        for batch in range(batches):
            self.add_keys(*(f"k{(batch + i * 3) % keys}" for i in range(rows)))

    def stream(self, spark: SparkSession, files: int = 1) -> DataFrame:
        return (
            spark.readStream.schema(self.schema)
            .option("maxFilesPerTrigger", files)
            .json(str(self.folder))
        )

    def ids(self) -> dict[str, list[int]]:
        """By key."""
        found: dict[str, list[int]] = defaultdict(list)
        for row in self.rows:
            found[row["k"]].append(row["id"])
        return dict(found)


class Sink:
    """A foreachBatch function that keeps each batch's rows in a file of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, frame: DataFrame, batch: int) -> None:
        self.write(frame.collect(), batch)

    def write(self, rows: Iterable[Any], batch: int) -> None:
        text = json.dumps([row.asDict() for row in rows])
        draft = self.folder / f".{batch}"
        draft.write_text(text)
        draft.rename(self.folder / str(batch))

    def batches(self) -> dict[int, Rows]:
        paths = sorted(self.folder.glob("[0-9]*"), key=lambda path: int(path.name))
        return {int(path.name): json.loads(path.read_text()) for path in paths}

    def rows(self) -> Rows:
        return [row for rows in self.batches().values() for row in rows]


class World:
    """One job, its query's places, and shorthands."""

    def __init__(
        self, spark: SparkSession, root: Path, schema: str = "k string, id bigint"
    ) -> None:
        self.spark, self.root = spark, root
        self.input = Input(root / "in", schema)
        self.sink = Sink(root / "out")
        self.location = root / "checkpoint"
        self.local = root / "local"
        self.store = root / "store"
        self.backends: list[StateBackend] = []

    # --- making and running ----------------------------------------------------------------

    def backend(self, **given: Any) -> StateBackend:
        given = {
            "uri": self.store.as_uri(),
            "job": "default",
            "local_dir": str(self.local),
            "parallelism": 2,
            **given,
        }
        backend = StateBackend(self.spark, **given)
        self.backends.append(backend)
        return backend

    def ledger(
        self,
        backend: StateBackend,
        df: DataFrame | None = None,
        *,
        processor: Any = None,
        uid: str = "ledger",
        keys: Any = "k",
        **more: Any,
    ) -> DataFrame:
        return backend.transform_with_state(
            self.input.stream(self.spark) if df is None else df,
            keys=keys,
            processor=processor or Ledger(),
            output_schema=LEDGER_OUTPUT,
            uid=uid,
            **more,
        )

    def writer(
        self, frame: DataFrame, sink: Callable[..., None] | None = None, **options: Any
    ) -> DataStreamWriter:
        options = {"checkpointLocation": str(self.location), **options}
        writer = frame.writeStream.outputMode("append").options(**options)
        return writer.foreachBatch(sink or self.sink).trigger(availableNow=True)

    def start(
        self,
        backend: StateBackend,
        frame: DataFrame,
        sink: Callable[..., None] | None = None,
        **options: Any,
    ) -> StreamingQuery:
        sink = sink or self.sink
        if backend._settings.commit == "async":
            sink = backend.checked(sink)
        return backend.start(self.writer(frame, sink, **options))

    def run(
        self, backend: StateBackend, frame: DataFrame, sink: Callable[..., None] | None = None
    ) -> StreamingQuery:
        """Start, and take in everything that is there."""
        return finish(self.start(backend, frame, sink))

    def fail(
        self, backend: StateBackend, frame: DataFrame, sink: Callable[..., None] | None = None
    ) -> str:
        """Start, and the text of what made it fail."""
        return failure(self.start(backend, frame, sink))

    def run_ledger(self, sink: Callable[..., None] | None = None, **given: Any) -> StateBackend:
        """A new backend with one ledger, run to the end of the input."""
        backend = self.backend(**given)
        self.run(backend, self.ledger(backend), sink)
        return backend

    # --- what Spark and the store hold -----------------------------------------------------

    def committed(self) -> list[int]:
        """The batches that Spark has committed."""
        return sorted(int(p.name) for p in (self.location / "commits").glob("[0-9]*"))

    def planned(self) -> list[int]:
        """The batches that Spark has planned."""
        return sorted(int(p.name) for p in (self.location / "offsets").glob("[0-9]*"))

    def hidden(self) -> list[str]:
        """What was taken back of the location, and lies there still."""
        return sorted(p.name for p in self.location.glob("*/.*") if p.suffix != ".crc")

    def objects(self, folder: str, job: str = "default") -> list[Path]:
        return sorted(path for path in (self.store / job / folder).rglob("*") if path.is_file())

    def forget_local(self) -> None:
        """Lose the host: every task-local copy goes."""
        shutil.rmtree(self.local)

    # --- the check ---------------------------------------------------------------------------

    def check(self, backend: StateBackend, uid: str = "ledger", keyed: Any = None) -> None:
        """State and output agree with the input files: each row applied once."""
        truth = keyed if keyed is not None else self.input.ids()
        backend.wait_durable()
        check_ledger_output(self.sink.batches(), truth)
        state = durable_state(backend, uid)
        wanted = {(key,): (len(ids), sum(ids)) for key, ids in truth.items()}
        assert state["acc"] == wanted
        last = backend.lineages()[uid].last_epoch
        assert last == self.committed()[-1], "the log ends where Spark's commits end"


def check_ledger_output(batches: Mapping[int, Rows], truth: Mapping[str, list[int]]) -> None:
    """Every id once, and every running count and sum that of the ids so far."""
    seen: dict[str, list[int]] = defaultdict(list)
    for batch, rows in sorted(batches.items()):
        assert len({row["k"] for row in rows}) == len(rows), f"one row per key in batch {batch}"
        for row in rows:
            seen[row["k"]] += row["ids"]
            ids = seen[row["k"]]
            assert (row["n"], row["total"]) == (len(ids), sum(ids)), (batch, row)
    assert {k: sorted(ids) for k, ids in seen.items()} == {k: sorted(v) for k, v in truth.items()}


@contextlib.contextmanager
def setting(spark: SparkSession, key: str, value: str) -> Iterator[None]:
    """A setting of the session, for a while."""
    before = spark.conf.get(key, None)
    spark.conf.set(key, value)
    try:
        yield
    finally:
        if before is None:
            spark.conf.unset(key)
        else:
            spark.conf.set(key, before)


def finish(query: StreamingQuery) -> StreamingQuery:
    """Wait for the end of what was there to be taken in."""
    assert query.awaitTermination(int(BOUND_S)), "the query did not end"
    return query


def failure(query: StreamingQuery) -> str:
    """The text of the exception that a query must end with."""
    try:
        query.awaitTermination(int(BOUND_S))
    except StreamingQueryException as error:
        return str(error)
    raise AssertionError("the query did not fail" if not query.isActive else "it did not end")


def user_line(marker: str) -> str:
    """Where a line of the processors stands, as an error names it."""
    lines = Path(processors.__file__).read_text().splitlines()
    (number,) = [n for n, line in enumerate(lines, start=1) if line.endswith(f"# {marker}")]
    return f"{processors.__file__}:{number} in handleInputRows"


def sources(backend: StateBackend) -> dict[tuple[str, int], str]:
    """Where each subtask's state came from in the last start."""
    return {(r.operator, r.subtask): r.source for r in backend.restores()}


# --- reading state back ----------------------------------------------------------------------


def job_store(backend: StateBackend) -> Any:
    return backend._job.store


def manifests(backend: StateBackend) -> list[Manifest]:
    return backend._job.manifests()


def checkpoints(backend: StateBackend) -> list[tuple[str, int]]:
    """(operator, epoch) of every checkpoint record, in the order of the log."""
    return [(m.operator, m.epoch) for m in manifests(backend) if m.kind == "checkpoint"]


def durable_state(backend: StateBackend, uid: str) -> dict[str, dict[tuple[Any, ...], Any]]:
    """An operator's state as its newest epoch has it in the log: {state: {key: value}}.

    A value is a tuple (value state), a list of tuples (list state) or a dict (map state). On the
    way every digest, lineage, key group and order that the formats promise is checked.
    """
    lineage = backend.lineages()[uid]
    last = lineage.last_epoch
    newest = [m for m in manifests(backend) if m.operator == uid and m.epoch == last][-1]
    entries: dict[bytes, bytes] = {}
    for subtask, own in enumerate(lineage.subtasks):
        groups = key_group_range(subtask, lineage.parallelism, lineage.max_parallelism)
        assert own.key_groups == groups
        entries |= _subtask_entries(backend, lineage, own, last)
    return _decoded(entries, newest)


def _subtask_entries(
    backend: StateBackend, lineage: OperatorLineage, own: SubtaskLineage, last: int
) -> dict[bytes, bytes]:
    base, groups = own.base_before(last), own.key_groups
    entries: dict[bytes, bytes] = {}
    if base is not None and base.entry.kind == "files":
        entries = _files_entries(backend, base)
        epoch, at = base.entry.epoch, bytes.fromhex(base.entry.chain)
    elif base is not None:
        _apply(entries, base, backend)
        epoch, at = base.entry.epoch, bytes.fromhex(base.entry.chain)
    elif own.rescaled:
        epoch, chains = own.start_epoch, []
        for parent in own.parents:
            ends = (parent.key_groups.start, parent.key_groups.end)
            chains.append((ends, bytes.fromhex(parent.chain_at(epoch) or "")))
            for key, value in _subtask_entries(backend, lineage, parent, epoch).items():
                if int.from_bytes(key[:2], "big") in groups:
                    entries[key] = value
        at = chain_rescaled((groups.start, groups.end), chains)
    else:
        epoch = lineage.first_epoch - 1
        at = chain_start(lineage.job_id, lineage.uid, (groups.start, groups.end))
    for n in range(epoch + 1, last + 1):
        ref = own.deltas[n]
        _apply(entries, ref, backend)
        at = chain(at, bytes.fromhex(ref.entry.digest))
        assert at.hex() == ref.entry.chain
    assert all(int.from_bytes(key[:2], "big") in groups for key in entries)
    return entries


def _apply(entries: dict[bytes, bytes], ref: SliceRef, backend: StateBackend) -> None:
    if ref.entry.size_bytes == 0:
        return
    entry = ref.entry
    data = read_slice(backend, ref)
    rows = decode_delta(data, digest=bytes.fromhex(entry.digest), name="read back")
    assert len(rows.keys) == entry.rows
    for key, value in zip(rows.keys.to_pylist(), rows.values.to_pylist(), strict=True):
        if value is None:
            entries.pop(key, None)
        else:
            entries[key] = value


def read_slice(backend: StateBackend, ref: SliceRef) -> bytes:
    """A slice's bytes, inline or of its own object."""
    store, entry = job_store(backend), ref.entry
    if entry.object is not None:
        return store.get(entry.object)
    name = record_name(ref.sequence)
    return parse_record(store.get(name), name).slice(entry)


def _files_entries(backend: StateBackend, ref: SliceRef) -> dict[bytes, bytes]:
    """What RocksDB itself finds in the files of a base."""
    store = job_store(backend)
    with tempfile.TemporaryDirectory() as folder:
        for file in decode_index(read_slice(backend, ref)).files:
            data = store.get(file.object)
            assert blake3(data).hexdigest() == file.digest
            Path(folder, file.name).write_bytes(data)
        opened = RocksStore.open(folder)
        try:
            return dict(opened.scan())
        finally:
            opened.close()


def _decoded(entries: dict[bytes, bytes], newest: Manifest) -> dict[str, dict[Any, Any]]:
    key_schema = StructType.fromJson(json.loads(newest.schemas[""]))
    key_codec = KeyCodec(key_schema)
    names = {state_id: name for name, state_id in newest.states.items()}
    kinds = {n: msgspec.json.decode(text) for n, text in newest.schemas.items() if n}
    found: dict[str, dict[Any, Any]] = {name: {} for name in kinds}
    lengths: dict[tuple[str, Any], int] = {}
    for raw, value in sorted(entries.items()):
        name = names[int.from_bytes(raw[2:4], "big")]
        if name not in kinds:  # of a state that was dropped
            continue
        key, end = key_codec.decode(raw, 4)
        _check_group(raw, key, key_schema, newest.max_parallelism)
        kind = kinds[name]["kind"]
        if kind == "list" and end == len(raw):
            lengths[name, key] = int.from_bytes(value, "big")
            continue
        schemas = [*kinds[name].get("earlier", ()), kinds[name]["value_schema"]]
        codec = codec_of_versions([StructType.fromJson(json.loads(one)) for one in schemas])
        row = tuple(codec.decode(value))
        if kind == "value":
            assert end == len(raw)
            found[name][key] = row
        elif kind == "list":
            rows = found[name].setdefault(key, [])
            assert int.from_bytes(raw[end:], "big") == len(rows)
            rows.append(row)
        else:
            inner = KeyCodec(StructType.fromJson(json.loads(kinds[name]["key_schema"])))
            map_key, map_end = inner.decode(raw, end)
            assert map_end == len(raw)
            found[name].setdefault(key, {})[map_key] = row
    for (name, key), length in lengths.items():
        assert len(found[name].get(key, [])) == length
    return found


def _check_group(raw: bytes, key: Any, schema: StructType, max_parallelism: int) -> None:
    from statebackend.operators.rows.row_conversion import arrow_schema

    columns = [
        pa.array([part], field.type) for part, field in zip(key, arrow_schema(schema), strict=True)
    ]
    assert key_groups(columns, max_parallelism).tolist() == [int.from_bytes(raw[:2], "big")]
