"""Writes a savepoint operator by operator, from what is encoded already."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pyarrow as pa
from blake3 import blake3

from recovery.local.workspace import Workspace
from recovery.savepoints.between_modes import CONTINUOUS
from recovery.savepoints.savepoint import Begun, Savepoint, SavepointFile, SavepointOperator
from recovery.savepoints.savepoint_folder import SavepointFolder, check_begun
from snapshot.formats.delta_in_pieces import EncodedDelta, encode_stream
from snapshot.formats.lineage_digest import chain, chain_start
from snapshot.formats.object_names import data_name
from snapshot.formats.record import Manifest, SliceEntry
from snapshot.log.commit_log import CommitLog
from snapshot.protocol.operators import operators_setting
from snapshot.protocol.tenure import Tenure
from snapshot.storage.object_store import ObjectStore
from statebackend.errors import NotRestorableError, SettingError
from statebackend.keygroups import key_group_range
from statebackend.operators.declared_states import StateDeclaration
from statebackend.state.blocks import BlockFile
from statebackend.state.operator_state import decode_lists, decode_maps
from statebackend.system import System

__all__ = [
    "Columns",
    "OperatorRecord",
    "SavepointHead",
    "SavepointWriter",
    "SliceMaker",
    "encode_once",
]

Columns = Iterator[tuple[pa.BinaryArray, pa.BinaryArray]]
"""Keys, strictly ascending, and their values, in pieces."""

_BLOCK: Final = pa.schema([pa.field("key", pa.binary()), pa.field("value", pa.binary())])
_INLINE_BYTES: Final = 256 << 10  # a larger list or map has an object of its own


@dataclass(frozen=True, kw_only=True)
class SavepointHead:
    """What a savepoint says of the job that it is of; see `Savepoint`. ``job``: default its id."""

    epoch: int = 0
    stamp_ms: int
    watermark_ms: int | None = None
    next_watermark_ms: int | None = None
    job: str = ""
    query_id: str = ""
    location: str = ""
    continuous: bool = False
    uncommitted: bool = False

    def time_mode(self, mode: str) -> str:
        """What a record says of an operator's time mode; "": nothing.

        Without sources every query can begin, also one whose timers bring a heartbeat along.
        """
        return "" if mode == "none" and not self.location and not self.continuous else mode


@dataclass(frozen=True, kw_only=True)
class OperatorRecord:
    """What a record says of an operator; see `Manifest`.

    Attributes:
        key_schema: JSON; empty if it has none.
        states: by name, with their numbers in the keys; -1: it has none.
        lists, broadcast: the states that belong to no key, encoded; lists by subtask.
    """

    key_schema: str
    states: Mapping[str, tuple[StateDeclaration, int]]
    parallelism: int
    max_parallelism: int
    time_mode: str = "none"
    watermark_ms: int | None = None
    event_max_ms: int | None = None
    second_max_ms: int | None = None
    next_timer_ms: int | None = None
    lists: Mapping[int, bytes] = field(default_factory=dict)
    broadcast: bytes | None = None


@dataclass(frozen=True, kw_only=True)
class SliceMaker:
    """Writes slices of a savepoint, in the process that makes it or in others.

    Attributes:
        job_id: of the savepoint's job. epoch: the one that the state is of.
        generation: of the claim, in the names of objects.
        begun: the bytes of `savepoint.begun`.
    """

    job_id: str
    epoch: int
    generation: int
    begun: bytes = field(repr=False)

    def write(
        self,
        store: ObjectStore,
        encoded: EncodedDelta,
        uid: str,
        subtask: int,
        of: tuple[int, int],
        new_id: Callable[[], str],
    ) -> SliceEntry:
        """Write what a subtask holds of keys; its file goes.

        Args:
            of: parallelism and max_parallelism.
        """
        groups = key_group_range(subtask, *of)
        name = None
        if encoded.path is not None:
            name = data_name(self.generation, self.epoch, new_id())
            store.put_file(name, encoded.path)
            encoded.path.unlink()
        start = chain_start(self.job_id, uid, (groups.start, groups.end))
        return SliceEntry(
            operator=uid,
            subtask=subtask,
            kind="delta",
            epoch=self.epoch,
            key_group_start=groups.start,
            key_group_end=groups.end,
            attempt=0,
            rows=encoded.rows,
            size_bytes=encoded.size_bytes,
            digest=encoded.digest.hex(),
            chain=chain(start, encoded.digest).hex(),
            object=name,
        )

    def withdraw_if_deleted(self, store: ObjectStore, entry: SliceEntry) -> None:
        """Remove what was just written if the savepoint is not being made any more.

        A deletion marks the folder before it lists what lies there. So either it finds this object,
        or its mark is found here.

        Raises:
            NotRestorableError: it was deleted meanwhile.
        """
        try:
            check_begun(store, self.begun)
        except NotRestorableError:
            if entry.object is not None:
                store.delete([entry.object])
            raise


class SavepointWriter:
    """One savepoint that is being made.

    Args:
        uids: of all operators that are going to be written.
    """

    def __init__(
        self, target: ObjectStore, head: SavepointHead, uids: Iterable[str], system: System
    ) -> None:
        self.target, self.system = target, system
        self._head = head
        self._created_ms = system.wall_ms()
        self._id = f"{head.epoch:010d}-{system.new_id()[-12:]}"
        self._job = head.job or self._id
        self._job_id = system.new_uuid()
        self._settings = operators_setting(dict.fromkeys(uids, head.epoch))
        self._operators: list[SavepointOperator] = []
        self._objects: set[str] = set()
        self._begun = b""
        self._log: CommitLog
        self._tenure: Tenure
        self.files: list[SavepointFile] = []

    def run(self, write: Callable[[SavepointWriter], None]) -> Savepoint:
        """Take the folder, have the operators written, and say at last that it is whole.

        Raises:
            SettingError: something lies in the folder already.
            NotRestorableError: somebody deleted it meanwhile.
        """
        begun = Begun(id=self._id, job=self._job, job_uri="", created_ms=self._created_ms)
        into = SavepointFolder(self.target, begun)
        self._begun = into.encoded
        try:
            self._claim()
            write(self)
            savepoint = self._described()
            into.finish(savepoint)
        except BaseException:  # a row that does not fit, or Ctrl-C
            into.leave()
            raise
        return savepoint

    def _claim(self) -> None:
        system = self.system
        self._log = CommitLog(
            self.target,
            job=self._job,
            writer="write_savepoint",
            new_id=system.new_id,
            threads=system.threads,
        )
        self._tenure = self._log.claim(
            job_id=self._job_id,
            query_id=self._query_id,
            run=self._id,
            stamp_ms=self._head.stamp_ms,
            settings=self._settings,
        )

    @property
    def _query_id(self) -> str:
        return CONTINUOUS if self._head.continuous else self._head.query_id

    @property
    def maker(self) -> SliceMaker:
        """Writes slices of this savepoint, here or in another process."""
        return SliceMaker(
            job_id=self._job_id,
            epoch=self._head.epoch,
            generation=self._tenure.generation,
            begun=self._begun,
        )

    def slice(
        self,
        uid: str,
        subtask: int,
        of: tuple[int, int],
        columns: Callable[[], Columns],
        folder: Path,
    ) -> SliceEntry:
        """Write what a subtask holds of keys.

        Args:
            of: parallelism and max_parallelism. columns: gives it, each time that it is called.
            folder: takes a file meanwhile.
        """
        rows = sum(len(keys) for keys, _ in columns())
        encoded = EncodedDelta(b"", None, blake3(b"").digest(), 0, 0)
        if rows:
            encoded = encode_stream(columns(), rows, folder / "slice")
        entry = self.maker.write(self.target, encoded, uid, subtask, of, self.system.new_id)
        self._took([entry])
        return entry

    def adopt(self, slices: Iterable[SliceEntry]) -> None:
        """Take slices that other processes have written; what their lost attempts left is removed.

        Raises:
            SettingError: the driver does not find them in the folder.
        """
        given = list(slices)
        self._took(given)
        prefix = data_name(self._tenure.generation, self._head.epoch, "")
        there = {info.name: info.size_bytes for info in self.target.list(prefix)}
        missing = [one for one in given if one.object and there.get(one.object) != one.size_bytes]
        if missing:
            raise SettingError(
                f"Spark's tasks wrote {len(given)} files into {self.target.uri}, and the driver "
                f"does not find {len(missing)} of them there.",
                todo="Give a folder that all hosts share, or on_spark=False.",
            )
        self.target.delete(sorted(there.keys() - self._objects))

    def _took(self, entries: Iterable[SliceEntry]) -> None:
        self._objects.update(one.object for one in entries if one.object is not None)

    def operator(self, uid: str, record: OperatorRecord, slices: Sequence[SliceEntry]) -> None:
        """Write an operator's record.

        Args:
            slices: from :meth:`slice`, of every subtask.
        """
        entries: list[SliceEntry] = []
        bodies: list[bytes | None] = []
        for one in slices:
            shared = record.broadcast if one.subtask == 0 else None
            entries.append(one)
            bodies.append(None if one.size_bytes else b"")
            for kind, blob in (("operator", record.lists.get(one.subtask)), ("broadcast", shared)):
                if blob is not None:
                    entry, body = self._blob(one, kind, blob)
                    entries.append(entry)
                    bodies.append(body)
        self._log.append(self._tenure, self._manifest(uid, record, entries), bodies)
        self._operators.append(
            SavepointOperator(
                uid=uid,
                parallelism=record.parallelism,
                max_parallelism=record.max_parallelism,
                first_epoch=self._head.epoch,
                epoch=self._head.epoch,
                size_bytes=sum(one.size_bytes for one in entries),
            )
        )

    def _blob(self, of: SliceEntry, kind: str, blob: bytes) -> tuple[SliceEntry, bytes | None]:
        """A slice of states that belong to no key; with its body where that is in the record."""
        name = None
        if len(blob) > _INLINE_BYTES:
            name = data_name(self._tenure.generation, self._head.epoch, self.system.new_id())
            self.target.put(name, [blob])
        entry = SliceEntry(
            operator=of.operator,
            subtask=of.subtask,
            kind=kind,  # type: ignore[arg-type]
            epoch=of.epoch,
            key_group_start=of.key_group_start,
            key_group_end=of.key_group_end,
            attempt=0,
            rows=_rows(kind, blob),
            size_bytes=len(blob),
            digest=blake3(blob).hexdigest(),
            chain=of.chain,
            object=name,
        )
        self._took([entry])
        return entry, blob if name is None else None

    def _manifest(self, uid: str, record: OperatorRecord, slices: list[SliceEntry]) -> Manifest:
        schemas = {name: declared.to_json() for name, (declared, _) in record.states.items()}
        return Manifest(
            kind="checkpoint",
            job="",
            job_id="",
            generation=0,
            sequence=0,
            writer="",
            write_id="",
            oldest_needed=self._tenure.oldest_needed,
            query_id=self._query_id,
            run=self._id,
            operator=uid,
            epoch=self._head.epoch,
            stamp_ms=self._head.stamp_ms,
            watermark_ms=record.watermark_ms,
            event_max_ms=record.event_max_ms,
            second_max_ms=record.second_max_ms,
            next_timer_ms=record.next_timer_ms,
            time_mode=self._head.time_mode(record.time_mode),
            parallelism=record.parallelism,
            max_parallelism=record.max_parallelism,
            first_epoch=self._head.epoch,
            schemas={"": record.key_schema, **schemas} if record.key_schema else schemas,
            states={name: at for name, (_, at) in record.states.items() if at >= 0},
            slices=slices,
            settings=self._settings,
        )

    def _described(self) -> Savepoint:
        head = self._head
        return Savepoint(
            id=self._id,
            uri=self.target.uri,
            job=self._job,
            job_id=self._job_id,
            job_uri="",
            query_id=self._query_id,
            location=head.location,
            continuous=head.continuous,
            uncommitted=head.uncommitted,
            epoch=head.epoch,
            stamp_ms=head.stamp_ms,
            watermark_ms=head.watermark_ms,
            created_ms=self._created_ms,
            operators=sorted(self._operators, key=lambda one: one.uid),
            records=len(self._operators),
            objects=len(self._objects),
            size_bytes=sum(one.size_bytes for one in self._operators),
            spark=self.files,
            next_watermark_ms=head.next_watermark_ms,
        )


def encode_once(columns: Columns, work: Workspace) -> EncodedDelta:
    """What a subtask holds of keys as one delta, where it can be given once only.

    A delta says first how many rows it has, so they are counted in a file.
    """
    blocks = BlockFile(work.path(), _BLOCK)
    try:
        for pair in columns:
            blocks.append(pa.RecordBatch.from_arrays(list(pair), schema=_BLOCK))
        if not blocks.rows:
            return EncodedDelta(b"", None, blake3(b"").digest(), 0, 0)
        pieces = (tuple(blocks.read(number).columns) for number in range(len(blocks)))
        return encode_stream(pieces, blocks.rows, work.path())
    finally:
        blocks.remove()


def _rows(kind: str, blob: bytes) -> int:
    if kind == "operator":
        return sum(len(one.rows) for one in decode_lists(blob).values())
    return sum(len(one.entries) for one in decode_maps(blob).values())
