"""Objects of the history: what was written is read, and who writes it does not matter."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import msgspec
import pytest

from recovery.inspect.history_reader import read_history
from snapshot.formats.epoch_figures import (
    EarlierRecord,
    FailedCheckpoint,
    RecordedRestore,
    RecordFigures,
    RestoreTotals,
    SubtaskColumns,
    decode_figures,
    encode_figures,
)
from snapshot.formats.history_object import (
    HISTORY_PREFIX,
    RecordSummary,
    decode_history,
    encode_history,
    parse_history_name,
    summary_of,
)
from snapshot.formats.record import LOG_PREFIX, read_manifest, record_name
from snapshot.formats.zstd_frame import pack
from snapshot.retention import history_keeping
from snapshot.retention.deletable import view_of
from snapshot.retention.garbage_collection import CleanReport, clean, outside_view
from snapshot.retention.history_keeping import KnownHistory, expired_objects
from snapshot.storage import CountingStore, MemoryStore, ObjectStore
from statebackend.errors import CorruptionError, StoreUnreachableError, UnsupportedFormatError
from tests.cli.folder import JOB, Folder
from tests.snapshot.retained import manifest
from tests.support.failing_store import FailingStore

GOLDEN = Path(__file__).parents[2] / "golden" / "history1"

FIGURES = RecordFigures(
    started_ms=1_700_000_000_000,
    checkpoint=12,
    acks_ms=120.5,
    median_ms=80.0,
    p95_ms=118.0,
    slowest=3,
    slowest_on="2 on host-b",
    record_bytes=4096,
    delta_bytes=4000,
    delta_rows=200,
    bases=1,
    base_bytes=70_000,
    uploaded_bytes=65_000,
    upload_s=1.5,
    phases_ms={"process": 100.25, "snapshot": 8.5},
    counts={"rows": 5000, "late_rows": 3, "stored_bytes": 123_456},
    requests={"put": (2, 8000)},
    restores=RestoreTotals(
        by_source={"local": 3, "durable": 1},
        local_bytes=1000,
        durable_bytes=70_000,
        max_seconds=0.75,
        slowest=[
            RecordedRestore(
                subtask=3,
                source="durable",
                durable_bytes=70_000,
                durable_reads=4,
                seconds=0.75,
                host="host-b",
                executor="2",
                reason="there is no local copy",
            )
        ],
    ),
    earlier=[EarlierRecord(40, 12.5, 1_699_999_999_000)],
    failed=[
        FailedCheckpoint(
            epoch=41,
            checkpoint=11,
            started_ms=1_699_999_990_000,
            took_ms=5000.0,
            reason="expired",
            waited_for=["count/3"],
        )
    ],
    failed_more=2,
)
SUMMARIES = [
    RecordSummary(
        sequence=42,
        generation=2,
        operator="count",
        epoch=41,
        operators=2,
        parallelism=4,
        query_id="query",
        stamp_ms=1_700_000_000_000,
        watermark_ms=1_699_999_000_000,
        next_timer_ms=1_700_000_100_000,
        figures=FIGURES,
    ),
    RecordSummary(sequence=43, generation=2, operator="join", epoch=41, operators=2),
]


def test_an_object_of_the_first_format_reads_as_it_was_written() -> None:
    (path,) = GOLDEN.iterdir()
    name = f"{HISTORY_PREFIX}{path.name}"
    assert decode_history(name, path.read_bytes()) == SUMMARIES
    known = parse_history_name(name)
    assert known is not None
    assert (known.newest_sequence, known.first_epoch, known.last_epoch) == (43, 41, 41)


def test_the_same_summaries_are_the_same_object_whoever_writes_it() -> None:
    name, data = encode_history(SUMMARIES)
    assert encode_history(SUMMARIES[::-1]) == (name, data)
    assert decode_history(name, data) == SUMMARIES


@pytest.mark.parametrize("damage", [lambda d: d[:-1], lambda d: b"x" + d[1:], lambda d: b""])
def test_a_damaged_object_is_refused(damage: object) -> None:
    name, data = encode_history(SUMMARIES)
    with pytest.raises(CorruptionError, match="delete it"):
        decode_history(name, damage(data))  # type: ignore[operator]


def test_an_object_of_a_later_format_is_refused() -> None:
    later = pack(b'{"format": 2, "records": "packed"}')
    with mock.patch("snapshot.formats.history_object.pack", return_value=later):
        name, data = encode_history(SUMMARIES)
    with pytest.raises(UnsupportedFormatError):
        decode_history(name, data)


@pytest.mark.parametrize("content", [b'{"format": 1, "records": 3}', b"no json", b'"\xff"'])
def test_an_object_whose_digest_holds_and_that_does_not_read_is_refused(content: bytes) -> None:
    made = pack(content)
    with mock.patch("snapshot.formats.history_object.pack", return_value=made):
        name, data = encode_history(SUMMARIES)
    with pytest.raises(CorruptionError, match="does not read"):
        decode_history(name, data)


def test_a_summary_has_nothing_of_single_subtasks() -> None:
    columns = SubtaskColumns(executors=[("1", "h")], ran_on=[0] * 32_768)
    record = msgspec.structs.replace(
        manifest(7, epoch=3), figures=encode_figures(FIGURES, columns), query_id="query"
    )
    one = summary_of(record)
    assert one.figures == FIGURES
    assert len(msgspec.json.encode(one)) < 2_000
    figures = decode_figures(record.figures)
    assert figures is not None
    assert figures.by_subtask() == columns


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[1]",
        b'{"started_ms": "soon"}',
        b'{"bases": "\xff"}',
        b'{"x": ' + b"[" * 100_000,
    ],
)
def test_figures_that_do_not_read_are_none_and_no_error(raw: bytes) -> None:
    """Nor are those of single subtasks: the others stand without them."""
    assert decode_figures(msgspec.Raw(raw)) is None
    bad = msgspec.structs.replace(FIGURES, columns=msgspec.Raw(b'{"rows": "many"}'))
    figures = decode_figures(encode_figures(bad))
    assert figures is not None
    assert figures.by_subtask() is None
    assert figures.totals() == FIGURES


def test_figures_without_those_of_subtasks_say_so() -> None:
    assert decode_figures(encode_figures(FIGURES)) == FIGURES
    assert FIGURES.by_subtask() is None
    assert FIGURES.totals() is FIGURES


def test_a_long_reason_is_cut() -> None:
    one = FailedCheckpoint(epoch=41, started_ms=1, reason="x" * 1_000)
    assert one.reason == "x" * 300


def test_what_is_beyond_the_bounds_goes_from_the_oldest() -> None:
    def name(sequence: int, epoch: int) -> str:
        one = RecordSummary(sequence=sequence, generation=1, operator="o", epoch=epoch)
        return encode_history([one])[0]

    names = [name(n, 64 * n) for n in range(300)]
    gone = expired_objects([*names, "history/readme"], newest_epoch=64 * 299)
    assert gone == {n for i, n in enumerate(names) if 64 * i <= 64 * 299 - 10_000 or i < 300 - 256}


def cleaned(folder: Folder, *, dry_run: bool = False) -> CleanReport:
    look = lambda: outside_view(folder.store, folder.log)  # noqa: E731
    history = KnownHistory(outside=True)
    return clean(folder.store, look, dry_run=dry_run, history=history)


def told(store: ObjectStore) -> list[int]:
    names = [info.name for info in store.list(HISTORY_PREFIX)]
    return sorted(one.epoch for name in names for one in decode_history(name, store.get(name)))


def test_a_stranger_writes_of_all_that_it_deletes_and_nothing_when_it_only_looks() -> None:
    store = MemoryStore()
    folder = Folder(store).epochs(4).epochs(2, base="base")
    before = store.list("")
    looked = cleaned(folder, dry_run=True)
    assert store.list("") == before
    report = cleaned(folder)
    assert report.removed == looked.removed
    assert told(store) == list(range(report.removed["records"].objects))
    assert cleaned(folder).removed == {}
    assert cleaned(folder).kept["history"].objects == 1


def test_a_file_that_is_no_object_of_the_history_stays() -> None:
    store = MemoryStore()
    folder = Folder(store).epochs(4).epochs(2, base="base")
    store.put(f"{HISTORY_PREFIX}readme", [b"mine"])
    assert cleaned(folder).foreign == [f"{HISTORY_PREFIX}readme"]
    assert store.get(f"{HISTORY_PREFIX}readme") == b"mine"


def test_of_a_record_that_nobody_has_read_is_told_unless_it_does_not_read() -> None:
    """Another cleaner has deleted it, and told of it; a claim is of no epoch."""
    store = MemoryStore()
    Folder(store).epochs(2).claim()
    every = range(len(store.list(LOG_PREFIX)) + 1)
    told_of = history_keeping._summaries(store, every, {})
    assert [one.epoch for one in told_of] == [0, 1]
    assert len(told_of) < every[-1]
    damaged = record_name(told_of[0].sequence)
    store.put(damaged, [store.get(damaged)[:-3]])
    assert [one.epoch for one in history_keeping._summaries(store, every, {})] == [1]


def test_two_who_clean_at_the_same_time_tell_of_each_record() -> None:
    store = MemoryStore()
    folder = Folder(store).epochs(4).epochs(2, base="base")
    ran: list[CleanReport] = []

    class Meanwhile(MemoryStore):
        """Another one cleans once this one has seen what there is."""

        def list(self, prefix: str) -> list:  # type: ignore[type-arg]
            found = store.list(prefix)
            if prefix == HISTORY_PREFIX and not ran:
                ran.append(cleaned(folder))
            return found

        def __getattribute__(self, name: str) -> object:
            own = ("list", "__class__", "__dict__", "__init__")
            return object.__getattribute__(self if name in own else store, name)

    other = Meanwhile()
    look = lambda: outside_view(store, folder.log)  # noqa: E731
    clean(other, look, history=KnownHistory(outside=True))
    assert ran
    assert set(told(store)) == set(range(ran[0].removed["records"].objects))
    folder.check()


def test_a_view_says_which_epoch_is_the_newest() -> None:
    records = [manifest(3, epoch=7), manifest(4, "claim")]
    records = [msgspec.structs.replace(one, oldest_needed=3) for one in records]
    assert view_of(records, {}, kinds={}).newest_epoch == 7


# --- what waits ----------------------------------------------------------------------------------


def waiting(folder: Folder, history: KnownHistory) -> CleanReport:
    """A driver that cleans again and again."""
    return clean(folder.store, lambda: outside_view(folder.store, folder.log), history=history)


@pytest.mark.parametrize(("bound", "most"), [("RECORDS_WAITING", 6), ("BYTES_WAITING", 12_000)])
def test_no_more_waits_for_the_history_than_a_page_and_some_bytes(bound: str, most: int) -> None:
    """Of an epoch that is repeated again and again there would never be enough."""
    store = MemoryStore()
    folder = Folder(store).epochs(5).epochs(2, base="base")
    with mock.patch.object(history_keeping, bound, most):
        report = waiting(folder, KnownHistory())
        assert report.waiting["records"].objects == 5
        assert not told(store)
        report = waiting(folder.epochs(5).epochs(2, base="base"), KnownHistory())
    assert not report.waiting
    assert told(store) == list(range(report.removed["records"].objects))
    assert report.removed["records"].objects > 6
    folder.check()


def test_a_record_that_cannot_be_deleted_is_told_of_once() -> None:
    """Else each cleaning in vain would leave one more object."""
    failing = {"delete"}
    store = FailingStore(MemoryStore(), lambda verb, *_: "before" if verb in failing else None)
    folder = Folder(store).epochs(8).epochs(2, base="base")
    history = KnownHistory()
    with mock.patch.object(history_keeping, "EPOCHS_AN_OBJECT", 4):
        for _ in range(3):
            with pytest.raises(StoreUnreachableError):
                waiting(folder, history)
        assert told(store) == list(range(8))
        failing.clear()
        folder.epochs(1).epochs(2, base="base")
        report = waiting(folder, history)
        assert report.removed["records"].objects == 8
        assert told(store) == list(range(8))
        waiting(folder.epochs(2).epochs(2, base="base"), history)
    assert told(store) == list(range(len(told(store))))
    assert len(told(store)) > 8
    folder.check()


def test_an_object_has_so_many_records_that_it_can_be_read() -> None:
    some = [
        RecordSummary(sequence=3 * epoch + n, generation=1, operator=str(n), epoch=epoch)
        for epoch in range(10)
        for n in range(3)
    ]
    with mock.patch.object(history_keeping, "_RECORDS_AT_MOST", 7):
        made = list(history_keeping._objects(some, 9))
    found = [decode_history(name, data) for name, data in made]
    assert [one for part in found for one in part] == some
    assert [len(part) for part in found] == [9, 9, 9, 3]


def test_what_waits_for_the_history_costs_a_start_nothing() -> None:
    """It is only longer in the listing."""
    store = CountingStore(MemoryStore())
    folder = Folder(store).epochs(40).epochs(2, base="base")

    def asked_at_a_start() -> dict[str, int]:
        before = store.counts
        folder.claim().lineage()
        now = store.counts
        return {verb: n.requests - before[verb].requests for verb, n in now.items()}

    first = asked_at_a_start()
    assert waiting(folder, KnownHistory()).waiting["records"].objects == 40
    assert asked_at_a_start()["list"] == first["list"]
    assert sum(asked_at_a_start().values()) <= sum(first.values()) + 2  # claims since


def test_a_record_that_a_cut_cleaning_left_makes_no_later_epoch_a_discarded_one() -> None:
    store = MemoryStore()
    folder = Folder(store).epochs(4).epochs(2, base="base")
    oldest = min(info.name for info in store.list(LOG_PREFIX) if _is_of_epoch(store, info.name))
    data = store.get(oldest)
    cleaned(folder)
    assert len(told(store)) > 1
    store.create(oldest, [data])  # a power cut undoes one deletion, and not the others
    found = read_history(store, JOB).checkpoints
    assert [one.epoch for one in found if one.status == "complete"] == [5, 4, 3, 2, 1, 0]


def _is_of_epoch(store: ObjectStore, name: str) -> bool:
    return read_manifest(store, name).kind == "checkpoint"
