"""A job's folder as drivers leave it, without Spark: real log, real deltas, files that stand in."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from blake3 import blake3

from snapshot.formats.delta import decode_delta, encode_delta
from snapshot.formats.file_index import FileEntry, FileIndex, decode_index, encode_index
from snapshot.formats.lineage_digest import chain
from snapshot.formats.object_names import base_file_name, data_name
from snapshot.formats.record import Manifest, SliceEntry, parse_record, record_name
from snapshot.log.commit_log import CommitLog, Tenure
from snapshot.protocol.lineage import OperatorLineage, SliceRef, resolve
from snapshot.protocol.operators import operators_setting
from snapshot.storage.object_store import ObjectStore

JOB, OPERATOR = "clicks per user", "count"
QUERY = "query"
PARALLELISM, MAX_PARALLELISM = 2, 8
State = dict[bytes, bytes]

_ids = itertools.count()


def new_id() -> str:
    return f"id{next(_ids):06}"


def digest_of(data: bytes) -> str:
    return blake3(data).hexdigest()


def encoded(changes: Mapping[bytes, bytes | None]) -> bytes:
    keys = sorted(changes)
    return encode_delta(keys, [changes[key] for key in keys]).data


class Folder:
    """Writes epochs; `state` is the truth, by epoch and subtask."""

    def __init__(self, store: ObjectStore, *, job: str = JOB, operator: str = OPERATOR) -> None:
        self.store, self.job, self.operator = store, job, operator
        self.state: dict[int, list[State]] = {-1: [{} for _ in range(PARALLELISM)]}
        self.next_epoch = 0
        self.tenure: Tenure
        self.log: CommitLog
        self.claim()

    def claim(self, writer: str = "host:1") -> Folder:
        """A new driver."""
        self.log = CommitLog(self.store, job=self.job, writer=writer, new_id=new_id)
        self.tenure = self.log.claim(query_id=QUERY, run=new_id())
        return self

    def lineage(self) -> OperatorLineage:
        lineage = resolve(self.log.manifests()).get(self.operator)
        return lineage or OperatorLineage.new(
            self.operator,
            job_id=self.tenure.job_id,
            parallelism=PARALLELISM,
            max_parallelism=MAX_PARALLELISM,
            first_epoch=0,
        )

    def epochs(self, count: int, *, own: bool = False, base: str = "") -> Folder:
        """More epochs; with `base`, every one of them carries bases of the epoch before."""
        for _ in range(count):
            self.epoch(own=own, base=base)
        return self

    def epoch(self, *, own: bool = False, base: str = "") -> int:
        """One epoch. `own`: slices in their own objects. `base`: '', 'base' or 'files'."""
        epoch, lineage = self.next_epoch, self.lineage()
        slices: list[SliceEntry] = []
        bodies: list[bytes | None] = []
        after: list[State] = []
        for subtask, known in enumerate(lineage.subtasks):
            before = self.state[epoch - 1][subtask]
            change: dict[bytes, bytes | None] = {
                b"key%d" % (epoch % 5): b"epoch %d of subtask %d" % (epoch, subtask),
                b"only%d" % epoch: b"x" * 40,
            }
            after.append({**before, **{k: v for k, v in change.items() if v is not None}})
            data = encoded(change)
            start = known.chain_at(epoch - 1)
            assert start is not None
            follows = chain(bytes.fromhex(start), bytes.fromhex(digest_of(data))).hex()
            parts = [("delta", epoch, follows, data, len(change), 0)]
            if base and epoch > 0:
                full, rows, state_bytes = self._base(base, subtask, epoch - 1, lineage)
                parts.append((base, epoch - 1, start, full, rows, state_bytes))
            for kind, of, link, body, rows, state_bytes in parts:
                name = self._own(of, body) if own else None
                bodies.append(None if own else body)
                slices.append(
                    SliceEntry(
                        operator=self.operator,
                        subtask=subtask,
                        kind=kind,  # type: ignore[arg-type]
                        epoch=of,
                        key_group_start=known.key_groups.start,
                        key_group_end=known.key_groups.end,
                        attempt=0,
                        rows=rows,
                        size_bytes=len(body),
                        digest=digest_of(body),
                        chain=link,
                        object=name,
                        state_bytes=state_bytes,
                    )
                )
        needed = lineage.oldest_needed(epoch - 1)
        manifest = Manifest(
            kind="checkpoint",
            job="",
            job_id="",
            generation=0,
            sequence=0,
            writer="",
            write_id="",
            oldest_needed=max(self.tenure.oldest_needed, needed or 0),
            query_id=QUERY,
            operator=self.operator,
            epoch=epoch,
            stamp_ms=1_700_000_000_000 + epoch,
            parallelism=PARALLELISM,
            max_parallelism=MAX_PARALLELISM,
            first_epoch=0,
            states={"total": 1},
            schemas={"total": "bigint"},
            slices=slices,
            settings=operators_setting({self.operator: 0}),
        )
        self.log.append(self.tenure, manifest, bodies)
        self.state[epoch] = after
        self.next_epoch = epoch + 1
        return epoch

    def _own(self, epoch: int, body: bytes) -> str:
        name = data_name(self.tenure.generation, epoch, new_id())
        self.store.put(name, [body])
        return name

    def _base(
        self, kind: str, subtask: int, epoch: int, lineage: OperatorLineage
    ) -> tuple[bytes, int, int]:
        state = self.state[epoch][subtask]
        if kind == "base":
            return encoded(state), len(state), 0
        files: list[FileEntry] = []
        before = lineage.subtasks[subtask].base_before(epoch)
        if before is not None and before.entry.kind == "files":
            files += [f for f in self.index(before).files if f.name == "shared.sst"]
        grant = new_id()
        mine = {"state.sst": encoded(state), "CURRENT": b"MANIFEST-%d\n" % epoch}
        for name, body in mine.items() if files else [*mine.items(), ("shared.sst", b"s" * 99)]:
            place = base_file_name(self.tenure.generation, grant, name)
            self.store.put(place, [body])
            files.append(
                FileEntry(name=name, object=place, size_bytes=len(body), digest=digest_of(body))
            )
        index = FileIndex(incarnation=f"i{subtask}", files=files)
        return encode_index(index), len(state), index.size_bytes

    def slice(self, ref: SliceRef) -> bytes:
        if ref.entry.object is not None:
            data = self.store.get(ref.entry.object)
            assert digest_of(data) == ref.entry.digest
            return data
        name = record_name(ref.sequence)
        return parse_record(self.store.get(name), name).slice(ref.entry)

    def index(self, ref: SliceRef) -> FileIndex:
        return decode_index(self.slice(ref))

    def restored(self, epoch: int) -> list[State]:
        """What the store gives, read as a restore reads it."""
        lineage = self.lineage()
        lineage.require(epoch)
        states = []
        for subtask in lineage.subtasks:
            base, state = subtask.base_before(epoch), {}
            first = lineage.first_epoch if base is None else base.entry.epoch + 1
            pieces = [self.slice(subtask.deltas[e]) for e in range(first, epoch + 1)]
            if base is not None and base.entry.kind == "files":
                files = {file.name: self.store.get(file.object) for file in self.index(base).files}
                assert set(files) == {"state.sst", "CURRENT", "shared.sst"}
                pieces.insert(0, files["state.sst"])
            elif base is not None:
                pieces.insert(0, self.slice(base))
            for piece in pieces:
                rows = decode_delta(piece)
                state.update(zip(rows.keys.to_pylist(), rows.values.to_pylist(), strict=True))
            states.append(state)
        return states

    def check(self) -> None:
        """The newest epoch and the one before come back as they were."""
        for epoch in (self.next_epoch - 1, self.next_epoch - 2):
            assert self.restored(epoch) == self.state[epoch]
