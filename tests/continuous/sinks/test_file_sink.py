"""Nothing is visible before its commit, nothing is there twice, and nothing is lost."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from statebackend.continuous.files.folder_access import Place
from statebackend.continuous.sinks.committables import Prepared
from statebackend.continuous.sinks.file_sink import FileSink
from statebackend.continuous.sinks.sink import SinkContext, run_name
from statebackend.errors import (
    ConnectorError,
    CorruptionError,
    OutputLostError,
    SettingError,
    UnsupportedFormatError,
    UnsupportedTypeError,
)
from statebackend.schema.types import as_schema

JOB, UID = "clicks/../x", "out"


def batch(*values: int) -> pa.RecordBatch:
    return pa.record_batch({"n": pa.array(values, pa.int64())})


def context(run: str, subtask: int = 0) -> SinkContext:
    return SinkContext(job=JOB, uid=UID, run=run, subtask=subtask, parallelism=2)


def visible(sink: FileSink) -> list[int]:
    """All rows that a reader sees."""
    rows: list[int] = []
    for name, _ in sink.place.files():
        with sink.place.open(name) as handle:
            rows += pq.read_table(handle)["n"].to_pylist()
    return sorted(rows)


def bury(writer: Any) -> None:
    """What the system does for a process that was killed: files are closed as they are."""
    if writer._file is not None:
        handle, encoder, _ = writer._file
        with suppress(Exception):
            encoder.finish()
        handle.close()
        writer._file = None


@pytest.fixture(params=["local", "memory"])
def sink(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FileSink]:
    if request.param == "local":
        yield FileSink(tmp_path / "out")
        return
    url = f"memory://{uuid.uuid4().hex}/out"
    yield FileSink(url)
    with suppress(FileNotFoundError):
        fsspec.filesystem("memory").rm(
            url.removeprefix("memory:/").rpartition("/")[0], recursive=True
        )


def test_rows_are_visible_after_the_commit_and_not_before(sink: FileSink) -> None:
    writer = sink.open(context("r1"))
    writer.write(batch(1, 2))
    assert visible(sink) == []
    committables = writer.prepare(1)
    writer.write(batch(3))
    assert visible(sink) == []
    sink.committer(JOB, UID).commit(committables)
    assert visible(sink) == [1, 2]
    sink.committer(JOB, UID).commit(writer.prepare(2))
    assert visible(sink) == [1, 2, 3]


def test_a_checkpoint_without_rows_makes_no_file(sink: FileSink) -> None:
    writer = sink.open(context("r1"))
    writer.write(batch())
    assert writer.prepare(1) == []
    sink.committer(JOB, UID).commit([])
    assert sink.place.files() == []


def test_committing_again_changes_nothing(sink: FileSink) -> None:
    writer = sink.open(context("r1"))
    writer.write(batch(1))
    committables = writer.prepare(1)
    committer = sink.committer(JOB, UID)
    for _ in range(2):
        committer.commit(committables)
        committer.commit(committables * 2)
        sink.committer(JOB, UID).commit(committables)
    assert visible(sink) == [1]


def test_a_file_that_a_reader_took_away_does_not_come_back_and_is_no_error(sink: FileSink) -> None:
    writer = sink.open(context("r1"))
    writer.write(batch(1))
    committables = writer.prepare(1)
    sink.committer(JOB, UID).commit(committables)
    for name, _ in sink.place.files():
        sink.place.remove(name)
    for run in ("r2", "r3"):  # two starts, no checkpoint between them
        committer = sink.committer(JOB, UID)
        committer.commit(committables)
        committer.sweep(run)
    assert visible(sink) == []


def test_what_is_lost_is_said_to_be(sink: FileSink) -> None:
    writer = sink.open(context("r1"))
    writer.write(batch(1))
    committables = writer.prepare(1)
    sink.place.remove("_statebackend")
    with pytest.raises(OutputLostError, match="-r1-00000-000000"):
        sink.committer(JOB, UID).commit(committables)


def test_a_staged_file_of_another_size_is_refused(sink: FileSink) -> None:
    writer = sink.open(context("r1"))
    writer.write(batch(1))
    committables = writer.prepare(1)
    staged = sink.place.children("_statebackend")[0]
    uid = f"_statebackend/{staged}/{UID}/r1"
    sink.place.write(f"{uid}/{sink.place.children(uid)[0]}", b"cut")
    with pytest.raises(OutputLostError, match="has 3"):
        sink.committer(JOB, UID).commit(committables)
    assert sink.place.files() == []


def test_leftovers_of_dead_runs_are_swept_of_this_job_and_sink_only(sink: FileSink) -> None:
    others = [
        SinkContext(job="other", uid=UID, run="r0"),
        SinkContext(job=JOB, uid="second", run="r0"),
    ]
    kept = []
    for other in others:
        writer = sink.open(other)
        writer.write(batch(7))
        kept.append(writer.prepare(1))
    dead = sink.open(context("r1"))
    dead.write(batch(1))
    dead.prepare(1)
    dead.write(batch(2))
    alive = sink.open(context("r2"))
    alive.write(batch(3))
    sink.committer(JOB, UID).sweep("r2")
    sink.committer(JOB, UID).commit(alive.prepare(1))
    for other, committables in zip(others, kept, strict=True):
        sink.committer(other.job, other.uid).commit(committables)
    assert visible(sink) == [3, 7, 7]
    left = [path for path, _ in _everything(sink.place) if "/r1/" in path]
    assert left == []
    bury(dead)


def test_notes_of_commits_do_not_pile_up(sink: FileSink) -> None:
    writer = sink.open(context("r1"))
    committer = sink.committer(JOB, UID)
    for checkpoint in range(5):
        writer.write(batch(checkpoint))
        committer.commit(writer.prepare(checkpoint))
    assert len([path for path, _ in _everything(sink.place) if "committing-" in path]) == 1


def _everything(place: Place) -> list[tuple[str, int]]:
    fs, root = place._fs
    fs.invalidate_cache()
    return [(path, info["size"]) for path, info in fs.find(root, detail=True).items()]


def test_discarded_output_is_gone_and_committed_output_stays(sink: FileSink) -> None:
    writer = sink.open(context("r1"))
    committer = sink.committer(JOB, UID)
    writer.write(batch(1))
    first = writer.prepare(1)
    committer.commit(first)
    writer.write(batch(2))
    second = writer.prepare(2)
    committer.discard(first + second)
    assert visible(sink) == [1]
    with pytest.raises(OutputLostError):
        committer.commit(second)


def test_an_aborted_writer_leaves_nothing(sink: FileSink) -> None:
    writer = sink.open(context("r1"))
    writer.write(batch(1))
    writer.abort()
    writer.close()
    assert _everything(sink.place) == []


def test_a_file_is_rolled_by_size_and_by_schema(tmp_path: Path) -> None:
    sink = FileSink(tmp_path, roll_bytes=16)
    writer = sink.open(context("r1"))
    writer.write(batch(1, 2))
    writer.write(batch(3))
    writer.write(pa.record_batch({"n": pa.array([4], pa.int32())}))
    committables = writer.prepare(1)
    assert len(committables) == 3
    sink.committer(JOB, UID).commit(committables)
    assert visible(sink) == [1, 2, 3, 4]


def test_two_jobs_and_two_subtasks_write_into_one_folder(tmp_path: Path) -> None:
    sink = FileSink(tmp_path)
    committables: dict[tuple[str, str], list[bytes]] = {}
    for of in (context("r1", 0), context("r1", 1), SinkContext(job="b", uid=UID, run="r2")):
        writer = sink.open(of)
        writer.write(batch(of.subtask))
        committables.setdefault((of.job, of.uid), []).extend(writer.prepare(1))
    for (job, uid), ones in committables.items():
        sink.committer(job, uid).commit(ones)
    assert visible(sink) == [0, 0, 1]


@pytest.mark.parametrize("job", ["..", ".", "a/b", "_x", "ä %2E"])
def test_no_name_of_a_job_leaves_the_staging_folder(tmp_path: Path, job: str) -> None:
    sink = FileSink(tmp_path / "deep" / "out")
    writer = sink.open(SinkContext(job=job, uid="..", run="r1"))
    writer.write(batch(1))
    committables = writer.prepare(1)
    assert sorted(p.name for p in (tmp_path / "deep" / "out").iterdir()) == ["_statebackend"]
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["out"]
    sink.committer(job, "..").commit(committables)
    assert visible(sink) == [1]


def test_json_and_csv_are_what_their_names_say(tmp_path: Path) -> None:
    rows = pa.record_batch(
        {
            "at": pa.array([1, None], pa.timestamp("us", "UTC")),
            "text": pa.array(["", 'a,"b"\nc']),
            "d": pa.array([None, 5], pa.int64()).cast(pa.decimal128(20, 1)),
        }
    )
    for format in ("json", "csv"):
        sink = FileSink(tmp_path / format, format=format)
        writer = sink.open(context("r1"))
        writer.write(rows)
        sink.committer(JOB, UID).commit(writer.prepare(1))
    (written,) = (tmp_path / "json").glob("part-*.json")
    assert [json.loads(line) for line in written.read_text().splitlines()] == [
        {"at": "1970-01-01T00:00:00.000001Z", "text": "", "d": None},
        {"at": None, "text": 'a,"b"\nc', "d": "5.0"},
    ]
    (written,) = (tmp_path / "csv").glob("part-*.csv")
    assert pc.read_csv(written)["text"].to_pylist() == ["", 'a,"b"\nc']


def test_a_wrong_use_is_refused_where_it_is_made(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="orc"):
        FileSink(tmp_path, format="orc")
    with pytest.raises(SettingError, match="roll_bytes"):
        FileSink(tmp_path, roll_bytes=0)
    with pytest.raises(SettingError) as refused:
        FileSink("ftp://me:hunter2@host/x")
    assert "hunter2" not in str(refused.value)
    with pytest.raises(UnsupportedTypeError, match="'m'"):
        FileSink(tmp_path, format="json").check(as_schema("m map<string, int>"))
    FileSink(tmp_path).check(as_schema("m map<string, int>"))


def test_committables_of_another_kind_or_release_are_refused(tmp_path: Path) -> None:
    import msgspec

    committer = FileSink(tmp_path).committer(JOB, UID)
    for data in (b"", b"\x80", msgspec.msgpack.encode({"v": 1})):
        with pytest.raises(CorruptionError):
            committer.commit([data])
    with pytest.raises(UnsupportedFormatError, match="7"):
        committer.commit([msgspec.msgpack.encode({"v": 7})])


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    writer = FileSink(tmp_path / "file" / "out").open(context("r1"))
    with pytest.raises(ConnectorError, match="file/out"):
        writer.write(batch(1))


# --- a crash between every two steps -----------------------------------------------------------


class Killed(BaseException):
    """The process is gone: nothing of it runs any more."""


STEPS = ("create", "close", "write", "move", "remove")


@contextmanager
def killed_at(
    monkeypatch: pytest.MonkeyPatch, step: int, *, after: bool, opened: list[Any]
) -> Iterator[list[str]]:
    """Ends what runs at the n-th step that changes the place, before it or right after it."""
    made: list[str] = []

    def stepping(name: str) -> Callable[..., Any]:
        original = getattr(Place, name)

        def call(self: Place, *args: Any) -> Any:
            made.append(name)
            number = len(made)
            if number == step and not after:
                raise Killed
            result = original(self, *args)
            opened.append(result)
            if number == step:
                raise Killed
            return result

        return call

    with monkeypatch.context() as patch:
        for name in STEPS:
            patch.setattr(Place, name, stepping(name))
        yield made


class Job:
    """A driver with two writers, as the runtime is to use them; it survives its processes."""

    def __init__(self, sink: FileSink, rows: int) -> None:
        self.sink = sink
        self.rows = rows
        self.runs = 0
        self.complete: tuple[int, list[bytes]] = (0, [])  # rows read, committables
        self.writers: list[Any] = []
        self.taken: list[int] = []

    def run(self) -> None:
        """From the last complete checkpoint to the end: a checkpoint each four rows."""
        self.runs += 1
        run = f"run{self.runs}"
        committer = self.sink.committer(JOB, UID)
        committer.commit(self.complete[1])
        committer.sweep(run)
        at = self.complete[0]
        writers = [self.sink.open(context(run, subtask)) for subtask in range(2)]
        self.writers += writers
        prepared = [Prepared() for _ in writers]
        checkpoint = 0
        while at < self.rows:
            upto = min(at + 4, self.rows)
            for row in range(at, upto):
                writers[row % 2].write(batch(row))
            at = upto
            checkpoint += 1
            held = [
                one
                for writer, of in zip(writers, prepared, strict=True)
                for one in of.prepared(checkpoint, writer.prepare(checkpoint))
            ]
            if checkpoint % 2 == 1 and at < self.rows:
                continue  # aborted: the next checkpoint holds what it held
            self.complete = (at, held)
            self.check()
            committer.commit(held)
            for of in prepared:
                of.completed(checkpoint)
        for writer in writers:
            writer.close()

    def seen(self) -> list[int]:
        """All that became visible."""
        return sorted(self.taken + visible(self.sink))

    def take(self) -> None:
        """A reader takes away what it sees."""
        self.taken += visible(self.sink)
        for name, _ in self.sink.place.files():
            self.sink.place.remove(name)

    def check(self) -> None:
        """What is visible is a part of what complete checkpoints hold, and not twice."""
        rows = self.seen()
        assert len(set(rows)) == len(rows)
        assert set(rows) <= set(range(self.complete[0]))


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("kind", ["local", "taken away", "memory"])
def test_a_crash_between_any_two_steps_neither_loses_nor_doubles(
    kind: str, after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = 0
    while True:
        step += 1
        place = f"memory://{uuid.uuid4().hex}/out" if kind == "memory" else tmp_path / str(step)
        job = Job(FileSink(place), rows=10)
        opened: list[Any] = []
        with killed_at(monkeypatch, step, after=after, opened=opened) as made:
            try:
                job.run()
                died = False
            except Killed:
                died = True
        job.check()
        if kind == "taken away":
            job.take()
        with killed_at(
            monkeypatch, 1 + step % 5, after=after, opened=opened
        ):  # and once more, as it comes back
            try:
                job.run()
            except Killed:
                job.check()
        job.run()
        assert job.seen() == list(range(10)), f"step {step}: {made}"
        for writer in job.writers:
            bury(writer)
        for handle in filter(None, opened):
            handle.close()
        if not died:
            assert step > 20
            return


@given(st.lists(st.sampled_from(["prepare", "complete", "lost notice"]), max_size=20))
def test_a_checkpoint_holds_all_that_no_earlier_one_committed(events: list[str]) -> None:
    prepared = Prepared()
    committed: list[bytes] = []
    number = 0
    held: list[bytes] = []
    for event in events:
        if event == "prepare":
            number += 1
            held = prepared.prepared(number, [b"%d" % number])
        elif number:
            committed += held
            if event == "complete":
                prepared.completed(number)
    if number:
        everything = {b"%d" % n for n in range(1, number + 1)}
        assert everything <= set(committed) | set(held)


def test_a_driver_that_was_fenced_sweeps_nothing_of_the_one_that_fenced_it(sink: FileSink) -> None:
    """It claimed the job, stood still, and goes on when another runs it."""
    stale, newer = run_name(9, "b" * 32), run_name(10, "a" * 32)
    left = sink.open(context(run_name(8, "c" * 32)))
    old = sink.open(context("d" * 32))  # of a release that named no generation
    writer = sink.open(context(newer))
    for one in (left, old, writer):
        one.write(batch(1))
    prepared = [one.prepare(1) for one in (left, old, writer)][-1]
    sink.committer(JOB, UID).sweep(stale)
    paths = [path for path, _ in _everything(sink.place)]
    assert [path for path in paths if newer in path] == paths
    sink.committer(JOB, UID).commit(prepared)
    assert visible(sink) == [1]


def test_a_move_that_an_earlier_commit_was_quicker_with_is_done(sink: FileSink) -> None:
    """A commit that was given up as hanging goes on while the next run commits the same."""
    writer = sink.open(context("r1"))
    writer.write(batch(1))
    prepared = writer.prepare(1)
    early, late = sink.committer(JOB, UID), sink.committer(JOB, UID)
    note = late._note  # type: ignore[attr-defined]

    def overtaken(found: Any) -> str:
        early.commit(prepared)
        return str(note(found))

    late._note = overtaken  # type: ignore[attr-defined]
    late.commit(prepared)
    assert visible(sink) == [1]
