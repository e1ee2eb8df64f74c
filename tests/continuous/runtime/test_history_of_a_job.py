"""A continuous job's records tell what its checkpoints were like, and which of them failed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recovery.inspect.history_reader import HistoryReader
from snapshot.barriers.pending_checkpoints import Reason, Subtask
from snapshot.log.figures_book import FiguresBook
from statebackend.continuous.driver.checkpoint_book import CheckpointBook
from statebackend.continuous.driver.effect_types import Settled
from statebackend.continuous.sinks.collect_sink import CollectSink
from tests.continuous.runtime.jobs import OUTPUT, Counting, Numbers
from tests.continuous.runtime.world import World, soon

if TYPE_CHECKING:
    from statebackend.continuous.driver.continuous_query import ContinuousQuery


def complete(query: ContinuousQuery, count: int) -> None:
    soon(lambda: sum(not one.aborted for one in query.checkpoints()) >= count)


def test_a_checkpoint_of_a_continuous_job_is_told_by_operator_and_subtask(world: World) -> None:
    counted = world.source(Numbers(3000, rows_per_s=2000, clock=world.held(0.5))).key_by("key")
    counted.process(Counting(), uid="count", output_schema=OUTPUT).sink(CollectSink())
    query = world.start(2)
    complete(query, 2)
    expired = Settled(99, 7, Reason.EXPIRED, 5.0, None, frozenset({Subtask("count", 1)}))
    query._checkpoints.settled(expired, {})
    complete(query, 4)
    world.go_on()
    assert query.await_termination(60.0)
    job = world.flow.setup.job
    reader = HistoryReader(job.store, job.name)
    found = reader.read()
    assert found.mode == "continuous"
    done = [one for one in found.checkpoints if one.status == "complete"]
    assert [one.epoch for one in done] == list(range(done[0].epoch, -1, -1))
    assert done[0].epoch == query.epoch
    (failed,) = (one for one in found.checkpoints if one.status == "failed")
    assert (failed.attempt, failed.total_ms) == (99, 5000.0)
    assert failed.reason == "expired; it waited for count/1"
    one = reader.checkpoint(1)
    assert one is not None
    assert one.attempt is not None
    by_uid = {operator.uid: operator for operator in one.operators}
    keyed = by_uid["count"].by_subtask
    assert len(keyed) == 2
    for subtask in keyed:
        assert subtask.host
        for ms in (subtask.alignment_ms, subtask.freeze_ms, subtask.persist_ms):
            assert ms is not None
        assert subtask.end_to_end_ms is not None
    (source,) = (by_uid[uid] for uid in query._graph.sources)
    assert len(source.by_subtask) >= 1
    assert all(subtask.start_delay_ms is not None for subtask in source.by_subtask)
    assert {"start_delay", "alignment", "sync", "acks"} <= one.phases_ms.keys()


def test_a_checkpoint_that_was_given_up_waits_for_the_next_record() -> None:
    figures = FiguresBook()
    book = CheckpointBook("job", figures=figures)
    book.settled(Settled(3, 2, Reason.DECLINED, 1.5, None), {})
    (failed,) = figures._failed
    assert (failed.checkpoint, failed.epoch, failed.reason) == (3, 2, "declined")
