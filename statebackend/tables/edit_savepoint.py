"""Makes a savepoint out of others: `edit_savepoint`."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
from pyspark.sql.types import StructType

from recovery.savepoints.location_files import SavepointLocation
from recovery.savepoints.savepoint import Savepoint, read_savepoint
from snapshot.formats.record import SliceEntry
from snapshot.storage.store_options import StoreOptions
from snapshot.storage.store_probe import probe
from snapshot.storage.stores_by_uri import open_store
from statebackend.errors import SettingError
from statebackend.keygroups import check_parallelism, key_group_range
from statebackend.operators.declared_states import StateDeclaration, check_state_name
from statebackend.rocks.parted import Store
from statebackend.rocks.parted import open_store as open_local
from statebackend.state.blocks import binary_array
from statebackend.state.operator_state import (
    StoredList,
    decode_lists,
    decode_maps,
    encode_lists,
    encode_maps,
    redistribute,
)
from statebackend.system import SYSTEM, System
from statebackend.tables.given_sources import Stood, stood_at
from statebackend.tables.keyless_rows import keyless_bytes
from statebackend.tables.savepoint_writer import (
    Columns,
    OperatorRecord,
    SavepointHead,
    SavepointWriter,
)
from statebackend.tables.state_scan import Entries, scratch_folder
from statebackend.tables.stored_entries import is_of, with_key_groups
from statebackend.tables.stored_job import StoredJob, StoredOperator, find_job
from statebackend.tables.temporary_copy import READ_SETTINGS, fetch_subtask
from statebackend.work_done import Progress, WorkDone

__all__ = ["edit_savepoint"]


def edit_savepoint(
    source: str | Sequence[str],
    to: str,
    *,
    rename_operators: Mapping[str, str] | None = None,
    drop_operators: Collection[str] = (),
    rename_states: Mapping[tuple[str, str], str] | None = None,
    drop_states: Collection[tuple[str, str]] = (),
    max_parallelism: int | None = None,
    sources: str | None = None,
    options: StoreOptions | None = None,
    scratch_dir: str | None = None,
    progress: Progress | None = None,
    system: System = SYSTEM,
) -> Savepoint:
    """Write a savepoint anew: changed, or the operators of several in one. Values stay as they are.

    Nothing is changed of ``source``. Memory: a batch, and the states that belong to no key. A
    folder in ``scratch_dir`` takes a subtask's state meanwhile; with ``max_parallelism`` that of an
    operator twice, which is sorted there.

    Args:
        source: the URI of a savepoint, or of several, of queries or of continuous jobs.
        to: the new savepoint's folder, a URI; empty.
        rename_operators: new uids by old ones.
        drop_operators: their uids.
        rename_states: new names by (uid, name), as they are in ``source``.
        drop_states: (uid, name) of each.
        max_parallelism: key groups, of every operator with a key. Default: as it is.
        sources: as for `write_savepoint`. Default: of one savepoint, its own; of several, none.
        options: how S3 is reached.
        progress: told how many subtasks were moved or written, and of how many.

    Returns:
        the savepoint. Of several the newest epoch counts, unless ``sources`` says another one, and
        the smallest watermark.

    Raises:
        SettingError: there is no such operator or state, two would have one name, no operator
            would be left, or something lies in ``to`` already.
        ParallelismError: ``max_parallelism`` is none.
        NotRestorableError: there is no such savepoint.
        CorruptionError: it does not read. StoreUnreachableError: from the store.
    """
    uris = [source] if isinstance(source, str) else list(source)
    saved = [_Saved.of(uri, options, system) for uri in uris]
    renamed, renamed_states = dict(rename_operators or {}), dict(rename_states or {})
    dropped, dropped_states = frozenset(drop_operators), frozenset(drop_states)
    change = _Change(renamed, dropped, renamed_states, dropped_states, max_parallelism)
    head, stood = _head(saved, sources, options, system)
    operators = change.applied(saved)
    if len(saved) > 1 and not head.continuous:
        operators = _with_one_watermark(operators)
    target = open_store(to, new_id=system.new_id, options=options)
    probe(target, new_id=system.new_id)
    with scratch_folder(scratch_dir) as scratch:
        writer = SavepointWriter(target, head, operators, system)
        work = WorkDone(progress)
        return writer.run(lambda into: _write(into, operators, stood, scratch, work))


def _write(
    into: SavepointWriter,
    operators: Mapping[str, _Edited],
    stood: Stood | None,
    scratch: Path,
    work: WorkDone,
) -> None:
    work.expect(sum(one.subtasks for one in operators.values()))
    for number, (uid, one) in enumerate(operators.items()):
        folder = scratch / str(number)
        folder.mkdir()
        into.operator(uid, one.record, one.slices(into, uid, folder, work))
        shutil.rmtree(folder, ignore_errors=True)  # room for the next
    if stood is not None:
        into.files = stood.copy(into.target, scratch, into.system)


@dataclass(frozen=True)
class _Saved:
    """A savepoint that is read."""

    savepoint: Savepoint
    job: StoredJob

    @classmethod
    def of(cls, uri: str, options: StoreOptions | None, system: System) -> _Saved:
        savepoint = read_savepoint(open_store(uri, new_id=system.new_id, options=options))
        return cls(savepoint, find_job("", None, savepoint=uri, options=options, system=system))


def _head(
    saved: Sequence[_Saved], sources: str | None, options: StoreOptions | None, system: System
) -> tuple[SavepointHead, Stood | None]:
    """What the new savepoint says of its job, and where its sources stood.

    Raises:
        SettingError: there is no savepoint, or they are of both modes.
    """
    modes = {one.savepoint.continuous for one in saved}
    if len(modes) != 1:
        raise SettingError(
            "No savepoint was given, or one of a query and one of a continuous job.",
            todo="Give one, or several of one kind.",
        )
    first = saved[0].savepoint
    marks = [one.savepoint.watermark_ms for one in saved]
    known = [mark for mark in marks if mark is not None]
    head = SavepointHead(
        epoch=max(one.savepoint.epoch for one in saved),
        stamp_ms=max(one.savepoint.stamp_ms for one in saved),
        watermark_ms=min(known) if len(known) == len(marks) else None,
        next_watermark_ms=first.next_watermark_ms if len(saved) == 1 else None,
        job=first.of_job if len(saved) == 1 else "",
        continuous=first.continuous,
        uncommitted=any(one.savepoint.uncommitted for one in saved),
    )
    stood = None
    if sources is not None:
        stood = stood_at(sources, options, system)
    elif len(saved) == 1 and first.spark:
        location = SavepointLocation(saved[0].job.store)
        names = tuple(file.name for file in first.spark if file.name != "metadata")
        stood = Stood(location, first.epoch, first.query_id, names)
    return (head if stood is None else stood.named(head)), stood


@dataclass(frozen=True)
class _Change:
    """What was asked for; see `edit_savepoint`."""

    renamed: Mapping[str, str]
    dropped: frozenset[str]
    renamed_states: Mapping[tuple[str, str], str]
    dropped_states: frozenset[tuple[str, str]]
    max_parallelism: int | None

    def applied(self, saved: Iterable[_Saved]) -> dict[str, _Edited]:
        """The operators of the new savepoint, by their new uids.

        Raises:
            SettingError: see `edit_savepoint`.
        """
        found = [(one.job, operator) for one in saved for operator in one.job.operators.values()]
        self._check([operator for _, operator in found])
        made: dict[str, _Edited] = {}
        for job, operator in found:
            if operator.uid in self.dropped:
                continue
            uid = self.renamed.get(operator.uid, operator.uid)
            if not uid or uid in made:
                raise SettingError(
                    f"Two operators would have the uid {uid!r}, or one none.",
                    todo="Rename one of them. Of two savepoints with one uid rename it in one of "
                    "them first.",
                )
            made[uid] = _Edited.of(job, operator, self._names(operator), self.max_parallelism)
        if not made:
            raise SettingError("No operator is left.", todo="Drop fewer.")
        return made

    def _check(self, operators: Iterable[StoredOperator]) -> None:
        """Refuse what is said of an operator or a state that is not there."""
        there: dict[str, set[str]] = {}
        for one in operators:
            there.setdefault(one.uid, set()).update(one.states)
        uids = {*self.renamed, *self.dropped}
        states = {*self.renamed_states, *self.dropped_states}
        missing = sorted(repr(uid) for uid in uids if uid not in there)
        missing += sorted(f"{u!r}: {n!r}" for u, n in states if n not in there.get(u, ()))
        if missing:
            shown = "; ".join(f"{uid!r} with {sorted(names)}" for uid, names in there.items())
            raise SettingError(
                f"The savepoint has no {', '.join(missing)}.", todo=f"It has the operators {shown}."
            )

    def _names(self, operator: StoredOperator) -> dict[str, str]:
        """The new names of the states that are kept, by their old ones."""
        names: dict[str, str] = {}
        for name in operator.states:
            if (operator.uid, name) not in self.dropped_states:
                names[name] = self.renamed_states.get((operator.uid, name), name)
                check_state_name(operator.uid, names[name])
        if len(set(names.values())) < len(names):
            raise SettingError(
                f"Two states of operator {operator.uid!r} would have one name "
                f"({', '.join(sorted(names.values()))}).",
                todo="Give each a name of its own.",
            )
        return names


@dataclass(frozen=True)
class _Edited:
    """An operator that is written anew.

    Attributes:
        kept: the numbers of its states; entries of others are left out.
        rekeyed: it has other key groups.
    """

    job: StoredJob
    operator: StoredOperator
    record: OperatorRecord
    kept: frozenset[bytes]
    rekeyed: bool
    key_schema: StructType = field(repr=False)

    @classmethod
    def of(
        cls,
        job: StoredJob,
        operator: StoredOperator,
        names: Mapping[str, str],
        max_parallelism: int | None,
    ) -> _Edited:
        last, lineage = operator.last, operator.lineage
        states: dict[str, tuple[StateDeclaration, int]] = {}
        for old, state in operator.states.items():
            if old in names and (state.id >= 0 or state.declared.of_operator):
                declared = msgspec.structs.replace(state.declared, name=names[old])
                states[names[old]] = declared, state.id
        has_key = bool(operator.key_schema.fields)
        most = (
            max_parallelism if max_parallelism is not None and has_key else lineage.max_parallelism
        )
        parallelism = min(lineage.parallelism, most)
        check_parallelism(parallelism, most)
        lists, broadcast = _keyless(job, operator, names, parallelism)
        record = OperatorRecord(
            key_schema=last.schemas.get("", ""),
            states=states,
            parallelism=parallelism,
            max_parallelism=most,
            time_mode=last.time_mode,
            watermark_ms=last.watermark_ms,
            event_max_ms=last.event_max_ms,
            second_max_ms=last.second_max_ms,
            next_timer_ms=last.next_timer_ms,
            lists=lists,
            broadcast=broadcast,
        )
        kept = frozenset(at.to_bytes(2, "big") for _, at in states.values() if at >= 0)
        rekeyed = has_key and (parallelism, most) != (
            lineage.parallelism,
            lineage.max_parallelism,
        )
        return cls(job, operator, record, kept, rekeyed, operator.key_schema)

    @property
    def subtasks(self) -> int:
        """How many are written, and with other key groups moved before."""
        moved = self.operator.lineage.parallelism if self.rekeyed else 0
        return self.record.parallelism + moved

    def slices(
        self, writer: SavepointWriter, uid: str, folder: Path, work: WorkDone
    ) -> list[SliceEntry]:
        """Write what its subtasks hold of keys."""
        of = self.record.parallelism, self.record.max_parallelism
        if self.rekeyed:
            with closing(open_local(str(folder / "db"))) as store:
                for number in range(self.operator.lineage.parallelism):
                    self._move(number, folder / "from", store)
                    work.add()
                made = []
                for number in range(of[0]):
                    made.append(self._slice(writer, uid, number, store, folder))
                    work.add()
                return made
        made = []
        for number in range(of[0]):
            path = fetch_subtask(self.job, self.operator, number, folder / "from", writer.system)
            with closing(open_local(str(path), READ_SETTINGS)) as store:
                made.append(self._slice(writer, uid, number, store, folder))
            shutil.rmtree(folder / "from")  # room for the next
            work.add()
        return made

    def _slice(
        self, writer: SavepointWriter, uid: str, number: int, store: Store, folder: Path
    ) -> SliceEntry:
        of = self.record.parallelism, self.record.max_parallelism
        groups = key_group_range(number, *of)

        def columns() -> Columns:
            for keys, values in self._entries(store, groups):
                yield binary_array(keys), binary_array(values)

        return writer.slice(uid, number, of, columns, folder)

    def _move(self, number: int, folder: Path, into: Store) -> None:
        """Bring a subtask's entries into a store, in the key groups that they have now."""
        path = fetch_subtask(self.job, self.operator, number, folder)
        groups = self.operator.lineage.subtasks[number].key_groups
        with closing(open_local(str(path), READ_SETTINGS)) as store:
            into.apply_batches(
                (
                    (with_key_groups(keys, self.key_schema, self.record.max_parallelism), [*values])
                    for keys, values in self._entries(store, groups)
                ),
                None,
            )
        shutil.rmtree(folder)

    def _entries(self, store: Store, groups: Iterable[int]) -> Iterator[Entries]:
        """Those that are kept, in pieces."""
        ranges = [(one.to_bytes(2, "big"), (one + 1).to_bytes(2, "big")) for one in groups]
        for keys, values in store.scan_ranges(ranges):
            places = [n for n, key in enumerate(keys) if is_of(key, self.kept)]
            if len(places) == len(keys):
                yield keys, values
            elif places:
                yield [keys[n] for n in places], [values[n] for n in places]


def _keyless(
    job: StoredJob, operator: StoredOperator, names: Mapping[str, str], parallelism: int
) -> tuple[dict[int, bytes], bytes | None]:
    """The states that belong to no key under their new names, encoded as they are stored."""
    entry = operator.lineage.epochs.get(job.epoch)
    if entry is None:
        return {}, None
    declared = operator.states

    def named(name: str) -> str | None:
        return names.get(name) if name in declared else name  # some are nobody's but the runtime's

    broadcast = None
    if entry.broadcast is not None:
        maps = decode_maps(keyless_bytes(job, operator, entry.broadcast))
        kept = {new: one for name, one in maps.items() if (new := named(name)) is not None}
        broadcast = encode_maps(kept) if kept else None
    of_subtasks: list[dict[str, StoredList]] = []
    for number in range(operator.lineage.parallelism) if entry.lists else ():
        ref = entry.lists.get(number)
        lists = {} if ref is None else decode_lists(keyless_bytes(job, operator, ref))
        of_subtasks.append({new: one for n, one in lists.items() if (new := named(n)) is not None})
    if not any(of_subtasks):
        return {}, broadcast
    if len(of_subtasks) != parallelism:
        of_subtasks = _given_out(of_subtasks, parallelism)
    return {number: encode_lists(one) for number, one in enumerate(of_subtasks)}, broadcast


def _given_out(
    of_subtasks: Sequence[Mapping[str, StoredList]], parallelism: int
) -> list[dict[str, StoredList]]:
    """Lists cut anew, each row in one of them: it is a start that gives union lists to all."""
    modes = {name: one.mode for lists in of_subtasks for name, one in lists.items()}
    split = [{n: replace(one, mode="split") for n, one in x.items()} for x in of_subtasks]
    given = (redistribute(split, parallelism, number) for number in range(parallelism))
    return [{n: replace(one, mode=modes[n]) for n, one in lists.items()} for lists in given]


def _with_one_watermark(operators: Mapping[str, _Edited]) -> dict[str, _Edited]:
    """As a query has them: with the smallest that one of them had; none, where one had none."""
    records = [one.record for one in operators.values()]
    marks = [one.watermark_ms for one in records if one.time_mode == "event"]
    known = [mark for mark in marks if mark is not None]
    mark = min(known, default=None) if len(known) == len(marks) else None
    return {
        uid: replace(one, record=replace(one.record, watermark_ms=mark))
        for uid, one in operators.items()
    }
