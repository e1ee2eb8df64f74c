"""Erases keys everywhere a job keeps them: `erase_keys`.

The job must have stopped. It is claimed as a driver claims it, so one that runs elsewhere is
fenced. Then each operator's newest epoch is written once more, whole, by a record that takes the
place of the one before; the last of these records says that nothing older is needed. What was older
is deleted, the retained epochs with it.

    k                a claim
    k + 1 ... k + n  for each operator its epoch anew: a base for each subtask. Those of the
                     operator that has the keys are without them, and under other lineage digests:
                     so no local copy of what was before is taken for them
    then             records and objects that nobody needs are deleted

Each record is of the same state but for the keys. So wherever this is cut, the job can go on, and
the erasing be repeated. The bases are written before the first record: by then a driver that ran
the job elsewhere has found out that it is fenced, or `Erasing.check` finds it out.

All subtasks of the operator get other digests, not only those that have a key now: the local files
of another one may hold bytes of it, of before a change of parallelism or of entries that are
deleted, and its next base would be these files.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
from blake3 import blake3

from recovery.savepoints.between_modes import overtaken_in
from recovery.savepoints.create_savepoint import complete_epoch, epoch_to_save
from recovery.savepoints.location_files import LocationFiles, batches_of, query_id_of
from recovery.savepoints.state_at_epoch import Needed, StateAt, state_at
from snapshot.formats.delta_in_pieces import encode_stream
from snapshot.formats.object_names import data_name
from snapshot.formats.record import FORMAT_VERSION, Manifest, SliceEntry, parse_record, record_name
from snapshot.log.commit_log import CommitLog
from snapshot.protocol.tenure import Tenure
from snapshot.retention.garbage_collection import ALL_PREFIXES, CleanReport, clean, outside_view
from snapshot.retention.history_keeping import KnownHistory
from snapshot.storage.object_store import ObjectStore
from statebackend.errors import JobRunningError, NotRestorableError, SettingError
from statebackend.rocks.parted import open_store
from statebackend.state.blocks import binary_array
from statebackend.state.expiry_index import BY_EXPIRY, MAP, map_kind
from statebackend.state.timers import BY_KEY, BY_TIME
from statebackend.system import SYSTEM, System
from statebackend.tables.state_scan import Entries
from statebackend.tables.stored_job import StoredJob, StoredOperator, job_in
from statebackend.tables.temporary_copy import READ_SETTINGS, fetch_subtask
from statebackend.work_done import WorkDone

__all__ = ["ErasedKeys", "Erasing", "entries_of", "epoch_to_erase_in"]

_TIME_BYTES: Final = 8
_GROUP_AND_ID: Final = 4
_EXPIRY_KIND_AT: Final = _GROUP_AND_ID + _TIME_BYTES
TIMERS: Final = "timers"
"""Stands for the timers where entries are counted by their states."""


class ErasedKeys:
    """Tells the entries of some keys from others.

    Args:
        keys: encoded, with their key groups before them.
    """

    def __init__(self, operator: StoredOperator, keys: Sequence[bytes]) -> None:
        self._names = {one.id.to_bytes(2, "big"): name for name, one in operator.states.items()}
        self._keys = frozenset(keys)
        self._lengths = sorted({len(key) for key in keys})
        self.groups = frozenset(int.from_bytes(key[:2], "big") for key in keys)

    def state_of(self, entry: bytes) -> str | None:
        """Whose entry it is, if it is of one of the keys: a state's, or the timers'."""
        group, state, rest = entry[:2], entry[2:_GROUP_AND_ID], entry[_GROUP_AND_ID:]
        if state == BY_TIME:
            return TIMERS if group + rest[_TIME_BYTES:] in self._keys else None
        if state == BY_KEY:
            return TIMERS if group + rest[:-_TIME_BYTES] in self._keys else None
        if state == BY_EXPIRY:
            of_map = entry[_EXPIRY_KIND_AT : _EXPIRY_KIND_AT + 1] == MAP
            at = _EXPIRY_KIND_AT + (len(map_kind(0)) if of_map else len(MAP))
            state, rest = entry[at : at + 2], entry[at + 2 :]
        begins = (group + rest[: length - len(group)] for length in self._lengths)
        if any(one in self._keys for one in begins):
            return self._names.get(state, "a deleted state")
        return None


def entries_of(
    job: StoredJob,
    operator: StoredOperator,
    erased: ErasedKeys,
    folder: Path,
    work: WorkDone,
    system: System = SYSTEM,
) -> dict[str, int]:
    """How many entries of the keys an operator has, by state; only their subtasks are fetched."""
    found = Counter[str]()
    subtasks = operator.lineage.subtasks
    wanted = [n for n, one in enumerate(subtasks) if not erased.groups.isdisjoint(one.key_groups)]
    work.expect(len(wanted))
    for number in wanted:
        with _fetched(job, operator, number, folder, system) as scan:
            for keys, _ in scan():
                found.update(name for key in keys if (name := erased.state_of(key)) is not None)
        work.add()
    return dict(found)


@contextmanager
def _fetched(
    job: StoredJob, operator: StoredOperator, number: int, folder: Path, system: System
) -> Iterator[Callable[[], Iterator[Entries]]]:
    """Scans a subtask's entries, in order, as often as it is asked to; fetched for as long."""
    own = folder / str(number)
    path = fetch_subtask(job, operator, number, own, system)
    groups = operator.lineage.subtasks[number].key_groups
    ranges = [(one.to_bytes(2, "big"), (one + 1).to_bytes(2, "big")) for one in groups]
    try:
        with closing(open_store(str(path), READ_SETTINGS)) as store:
            yield lambda: store.scan_ranges(ranges)
    finally:
        shutil.rmtree(own, ignore_errors=True)


def epoch_to_erase_in(
    manifests: list[Manifest], location: LocationFiles | None
) -> tuple[int, Callable[[], None]]:
    """The epoch that the next start goes on from.

    Returns:
        the epoch; and what raises `JobRunningError` once the location has gone on since.

    Raises:
        NotRestorableError: there is none. SettingError: the location is missing, or another job's.
    """
    if location is None:
        return complete_epoch(manifests), lambda: None
    ids = [one.query_id for one in manifests if one.query_id]
    if query_id_of(location) not in ids[-1:]:
        raise SettingError(
            f"{location.path} is not the checkpoint location of this job.",
            todo="Give the checkpointLocation that the query was started with last.",
        )
    batches = batches_of(location)

    def check() -> None:
        commit = batches_of(location).last_commit
        if commit != batches.last_commit:
            raise JobRunningError(
                f"The query runs: it has committed batch {commit} in {location.path} meanwhile.",
                todo="Nothing was erased, and its next batch fails. Stop it, and erase again.",
            )

    return epoch_to_save(manifests, batches), check


def _without(
    erased: ErasedKeys | None, pieces: Iterator[Entries], gone: Counter[str]
) -> Iterator[Entries]:
    """The entries of no erased key; the others are counted by their states."""
    for keys, values in pieces:
        if erased is None:
            yield keys, values
            continue
        names = [erased.state_of(key) for key in keys]
        gone.update(name for name in names if name is not None)
        left = [n for n, name in enumerate(names) if name is None]
        if left:
            yield [keys[n] for n in left], [values[n] for n in left]


@dataclass(frozen=True, kw_only=True)
class Erasing:
    """One folder of a job, or of a savepoint, in which keys are erased.

    Attributes:
        store: the folder. job: the job's name. log: to claim it by.
        manifests: what the log held when `epoch` was chosen.
        scratch: a local folder with room for the state of the largest subtask, twice.
        work: counts the subtasks that were written anew.
        check: called before the first record is written; what it raises leaves all as it was.
        keeps_history: a savepoint has none.
    """

    store: ObjectStore
    job: str
    log: CommitLog
    manifests: list[Manifest]
    epoch: int
    scratch: Path
    work: WorkDone = field(default_factory=WorkDone)
    check: Callable[[], None] = lambda: None
    keeps_history: bool = True
    system: System = SYSTEM

    def run(self, uid: str, keys: Sequence[bytes]) -> tuple[dict[str, int], CleanReport]:
        """Erase the keys of an operator; how many entries were, by state, and what was deleted.

        Raises:
            NotRestorableError: the epoch is not in the log, or holds rows in flight.
            FencedError: another driver has claimed the job meanwhile; nothing is changed then.
            JobRunningError: from `check`.
            CorruptionError: what is needed is damaged; nothing is lost then.
            StoreUnreachableError, CommitUnknownError: from the store; erase again.
        """
        state = state_at(self.manifests, self.epoch)
        if overtaken_in(state, self._read):
            raise NotRestorableError(
                f"The last checkpoint of job {self.job!r} is unaligned: it holds rows in flight, "
                "and keys are not told in them.",
                todo="Start the job once more, and end it with query.stop_with_savepoint().",
            )
        found = job_in(self.store, self.job, self.manifests, self.epoch, self.system)
        erased = ErasedKeys(found.operator(uid), keys)
        tip = self.manifests[-1]
        run = f"erasing {self.system.new_id()[-12:]}"
        tenure = self.log.claim(
            query_id=next((m.query_id for m in reversed(self.manifests) if m.query_id), ""),
            run=run,
            settings=dict(state.settings),
            after=tip.sequence,
        )
        counted = Counter[str]()
        first = tenure.sequence + 1
        self.work.expect(sum(len(one.lineage.subtasks) for one in found.operators.values()))
        anew = [
            self._anew(found, operator, state, tenure, erased if name == uid else None, counted)
            for name, operator in found.operators.items()
        ]
        self.check()
        for number, (manifest, bodies) in enumerate(anew, start=1):
            oldest = first if number == len(anew) else tenure.oldest_needed
            self.log.append(tenure, msgspec.structs.replace(manifest, oldest_needed=oldest), bodies)
        return dict(counted), self._clean()

    def _clean(self) -> CleanReport:
        view = lambda: outside_view(self.store, self.log)  # noqa: E731
        # Figures: no key is in them.
        history = KnownHistory(outside=True) if self.keeps_history else None
        return clean(self.store, view, prefixes=ALL_PREFIXES, history=history)

    def _read(self, one: Needed) -> bytes:
        if one.entry.object is not None:
            return self.store.get(one.entry.object)
        name = record_name(one.sequence)
        return parse_record(self.store.get(name), name).slice(one.entry)

    def _anew(
        self,
        found: StoredJob,
        operator: StoredOperator,
        state: StateAt,
        tenure: Tenure,
        erased: ErasedKeys | None,
        counted: Counter[str],
    ) -> tuple[Manifest, list[bytes | None]]:
        """An operator's record of the epoch with a base for each subtask, and what is inline."""
        last = operator.last
        slices, bodies = list[SliceEntry](), list[bytes | None]()
        for number in range(len(operator.lineage.subtasks)):
            slices.append(self._base(found, operator, number, tenure, erased, counted))
            bodies.append(None)
            self.work.add()
        for entry in last.slices:
            if entry.kind in ("operator", "broadcast"):
                slices.append(entry)
                named = entry.object is not None
                bodies.append(None if named else self._read(Needed(last.sequence, entry)))
        settings = dict(state.settings)
        anew = msgspec.structs.replace(
            last, format=FORMAT_VERSION, slices=slices, settings=settings
        )
        return anew, bodies

    def _base(
        self,
        found: StoredJob,
        operator: StoredOperator,
        number: int,
        tenure: Tenure,
        erased: ErasedKeys | None,
        counted: Counter[str],
    ) -> SliceEntry:
        """A subtask's whole state without the keys, in an object of its own."""
        subtask, epoch = operator.lineage.subtasks[number], found.epoch
        groups, chain = subtask.key_groups, subtask.chain_at(epoch) or ""
        if erased is not None:
            chain = blake3(f"{chain} {self.system.new_id()}".encode()).hexdigest()
            erased = None if erased.groups.isdisjoint(groups) else erased
        kept, gone = self.scratch / f"kept-{number}", Counter[str]()
        with _fetched(found, operator, number, self.scratch, self.system) as scan:
            rows = sum(len(keys) for keys, _ in _without(erased, scan(), gone))
            pieces = (
                (binary_array(keys), binary_array(values))
                for keys, values in _without(erased, scan(), Counter())
            )
            encoded = encode_stream(pieces, rows, kept)
        counted.update(gone)
        assert encoded.path is not None
        name = data_name(tenure.generation, epoch, self.system.new_id())
        self.store.put_file(name, encoded.path)
        encoded.path.unlink()
        return SliceEntry(
            operator=operator.uid,
            subtask=number,
            kind="base",
            epoch=epoch,
            key_group_start=groups.start,
            key_group_end=groups.end,
            attempt=0,
            rows=rows,
            size_bytes=encoded.size_bytes,
            digest=encoded.digest.hex(),
            chain=chain,
            object=name,
        )
