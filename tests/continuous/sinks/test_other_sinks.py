"""Collected rows are there once; a callback sees each at least once."""

from __future__ import annotations

import pickle

import pyarrow as pa
import pytest

from statebackend.continuous.sinks.callback_sink import CallbackSink
from statebackend.continuous.sinks.collect_sink import CollectSink
from statebackend.continuous.sinks.sink import SinkContext
from statebackend.errors import CorruptionError


def batch(*values: int) -> pa.RecordBatch:
    return pa.record_batch({"n": pa.array(values, pa.int64())})


def context(run: str = "r1", subtask: int = 0) -> SinkContext:
    return SinkContext(job="j", uid="out", run=run, subtask=subtask, parallelism=2)


def test_collected_rows_are_there_once_after_their_commit() -> None:
    sink = CollectSink()
    shipped: CollectSink = pickle.loads(pickle.dumps(sink))  # as it reaches a subtask
    writers = [shipped.open(context(subtask=i)) for i in range(2)]
    for i, writer in enumerate(writers):
        writer.write(batch(i))
        writer.write(batch())
    first = [one for writer in writers for one in writer.prepare(1)]
    assert sink.rows() == []
    committer = sink.committer("j", "out")
    for _ in range(2):
        committer.commit(first)
        sink.committer("j", "out").commit(first)
    assert sink.rows() == [{"n": 0}, {"n": 1}]
    assert writers[0].prepare(2) == []


def test_what_was_not_prepared_is_not_collected() -> None:
    sink = CollectSink()
    writer = sink.open(context())
    writer.write(batch(1))
    writer.close()
    sink.committer("j", "out").commit(sink.open(context("r2")).prepare(1))
    assert sink.batches() == []
    with pytest.raises(CorruptionError):
        sink.committer("j", "out").commit([b"\x93"])


def test_the_same_number_in_another_run_is_another_checkpoint() -> None:
    sink = CollectSink()
    for run in ("r1", "r2"):
        writer = sink.open(context(run))
        writer.write(batch(1))
        sink.committer("j", "out").commit(writer.prepare(1))
    assert len(sink.rows()) == 2


def test_a_callback_is_called_at_once_with_each_batch() -> None:
    seen: list[tuple[int, SinkContext]] = []
    sink = CallbackSink(lambda rows, of: seen.append((rows.num_rows, of)))
    writer = sink.open(context(subtask=1))
    writer.write(batch(1, 2))
    assert seen == [(2, context(subtask=1))]
    assert writer.prepare(1) == []
    sink.committer("j", "out").commit([])
    sink.committer("j", "out").sweep("r2")
    writer.close()


def test_what_a_callback_raises_reaches_the_runtime() -> None:
    def fails(rows: pa.RecordBatch, of: SinkContext) -> None:
        raise ValueError("full")

    with pytest.raises(ValueError, match="full"):
        CallbackSink(fails).open(context()).write(batch(1))
