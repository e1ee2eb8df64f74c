"""Keyed state over a stream: checkpoints that complete or not, crashes, other parallelisms."""

from __future__ import annotations

import random
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from snapshot.barriers.channel_watermarks import END_MS
from snapshot.protocol.base_policy import BasePolicy
from snapshot.storage.memory_store import MemoryStore
from statebackend.errors import ProtocolError, StoreUnreachableError
from tests.continuous.state.ledger import OUTPUT, Ledger, Model, declared
from tests.continuous.state.streamjob import AtOnce, Sometimes, StreamJob, plan_of
from tests.recovery.driver import manifests_of

pytestmark = pytest.mark.full  # a model of long histories


def ledger_job(root: Path, **options: Any) -> StreamJob:
    plan = plan_of(declared(), OUTPUT, time_mode="event")
    return StreamJob(root, plan, Ledger, **options)


APART = BasePolicy(every_epochs=2, apart_every_epochs=2, apart_min_bytes=1)


class Trial:
    """A job beside its model; what a random sequence of steps may do with them."""

    def __init__(self, job: StreamJob, seed: int) -> None:
        self.job, self.random = job, random.Random(seed)
        self.model, self.durable = Model(), Model()
        self.keys = 30
        self.log: list[int] = []
        self.completed = self.aborted = self.crashed = 0
        self.start()

    def start(self, parallelism: int | None = None) -> None:
        self.job.start(parallelism)
        self.model = self.durable.copy()
        assert self.logs() == sorted(self.model.log)
        positions = sorted(row for one in self.job.sources for row in one.lists["splits"].get())
        assert positions == ([(0, len(self.model.log))] if self.model.log else [])
        self.move()

    def logs(self) -> list[int]:
        held: list[Any] = [one.operator.state.operator.states["log"] for one in self.job.keyed]
        return sorted(v for one in held for (v,) in one.get())

    def move(self) -> None:
        model = self.model
        model.watermark_ms += self.random.choice([0, 50, 100, 400])
        model.now_ms += self.random.choice([0, 10, 600])
        out = self.job.move(
            watermark_ms=model.watermark_ms,
            late_watermark_ms=0,
            processing_time_ms=model.now_ms,
        )
        assert sorted(out) == sorted(model.fire())

    def rows(self) -> None:
        rows = [
            (self.random.randrange(self.keys), self.random.randrange(100), 0)
            for _ in range(self.random.choice([0, 1, 5, 60]))
        ]
        assert sorted(self.job.process(rows)) == sorted(self.model.process(rows))
        for one in self.job.sources:
            one.lists["splits"].clear()
        if self.model.log:
            self.job.sources[0].lists["splits"].add((0, len(self.model.log)))

    def some(self) -> None:
        for _ in range(self.random.randrange(4)):
            self.random.choice([self.rows, self.rows, self.move, self.clean])()
            if isinstance(self.job.background, Sometimes):
                self.job.background.step()

    def clean(self) -> None:
        for one in self.job.keyed:
            one.operator.clean()
            one.tidy()

    def checkpoint_beside(self, pool: ThreadPoolExecutor) -> None:
        """As :meth:`checkpoint`, with what can be done in another thread done there."""
        job = self.job
        frozen, cut = job.freeze(), self.model.copy()
        whole = pool.submit(job.persist, frozen)
        self.some()
        if self.random.random() < 0.3:
            job.abort()
            whole.result()
            self.aborted += 1
            return
        while not whole.done():
            self.rows()
        assert whole.result()
        job.complete()
        self.durable, self.completed = cut, self.completed + 1

    def checkpoint(self) -> None:
        job, subtasks = self.job, 2 * self.job.parallelism
        frozen, cut = job.freeze(), self.model.copy()
        self.some()
        if self.random.random() < 0.4:
            job.persist(frozen, self.random.randrange(subtasks + 1))
            self.some()
            job.abort()
            self.aborted += 1
            return
        assert job.persist(frozen)
        self.some()
        job.complete()
        self.durable, self.completed = cut, self.completed + 1

    def several(self, pool: ThreadPoolExecutor | None = None) -> None:
        """Two or three at once; with one that is given up go the newer ones."""
        job, under_way = self.job, list[tuple[int, Any, Model]]()
        whole: list[Future[bool]] = []
        for _ in range(self.random.choice([2, 3])):
            under_way.append((job.attempt + 1, job.freeze(), self.model.copy()))
            assert {one.times.epoch for one in job.keyed} == {job.epoch + len(under_way)}
            if pool is not None:
                whole.append(pool.submit(job.persist, under_way[-1][1]))
            self.some()
        for place, (number, frozen, cut) in enumerate(under_way):
            if self.random.random() < 0.3:
                if pool is None:
                    job.persist(frozen, self.random.randrange(2 * job.parallelism + 1))
                for newer, *_ in under_way[place:]:
                    self.some()
                    job.abort(newer)
                    self.aborted += 1
                for one in whole[place:]:
                    one.result(20.0)  # whether it acked meanwhile or not, nobody wants it
                break
            assert job.persist(frozen) if pool is None else whole[place].result(20.0)
            self.some()
            job.complete(number)
            self.durable, self.completed = cut, self.completed + 1
            self.some()
        assert {one.times.epoch for one in job.keyed} == {job.epoch}

    def crash(self) -> None:
        self.crashed += 1
        if self.random.random() < 0.5:
            self.job.persist(self.job.freeze(), self.random.randrange(2 * self.job.parallelism))
        self.job.crash(keep_disk=self.random.random() < 0.6)
        if isinstance(self.job.background, Sometimes):
            self.job.background.waiting.clear()
        self.start(self.random.choice([None, None, 1, 2, 3]))

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.some()
            step = self.random.random()
            if step < 0.75:
                self.checkpoint()
            elif step < 0.9:
                self.crash()
        self.job.crash()


@pytest.mark.parametrize("seed", range(8))
def test_a_stream_is_its_model_whatever_happens_between(tmp_path: Path, seed: int) -> None:
    options: dict[str, Any] = [
        {},
        {"inline_budget_bytes": 400, "base_every_epochs": 4},
        {"overlay_bytes": 3000},
        {"base_every_epochs": 3, "clean_every_epochs": 1},
    ][seed % 4]
    background = AtOnce() if seed < 4 else Sometimes(seed)
    trial = Trial(ledger_job(tmp_path, background=background, **options), seed)
    trial.run(14)
    assert trial.completed


@pytest.mark.parametrize("seed", range(8))
def test_a_stream_is_its_model_while_several_attempts_are_under_way(
    tmp_path: Path, seed: int
) -> None:
    options: dict[str, Any] = [
        {},
        {"inline_budget_bytes": 400, "base_every_epochs": 4},
        {"overlay_bytes": 3000},
        {"base_every_epochs": 3, "clean_every_epochs": 1},
    ][seed % 4]
    with ThreadPoolExecutor(6) as pool:
        background = Sometimes(seed) if seed < 4 else pool
        trial = Trial(ledger_job(tmp_path, background=background, **options), seed)
        for step in range(14):
            trial.some()
            trial.several(None if seed < 4 else pool)
            if step % 5 == 4:
                trial.crash()
        trial.job.crash()
    assert trial.completed > 10
    assert trial.aborted


@pytest.mark.parametrize("overlay_bytes", [3000, 64 << 20])
def test_the_subtask_goes_on_while_its_state_is_written(tmp_path: Path, overlay_bytes: int) -> None:
    with ThreadPoolExecutor(2) as pool:
        job = ledger_job(
            tmp_path, background=pool, overlay_bytes=overlay_bytes, base_every_epochs=3
        )
        trial = Trial(job, overlay_bytes)
        for step in range(30):
            trial.some()
            trial.checkpoint_beside(pool)
            if step % 10 == 9:
                trial.crash()
        job.crash()
    assert trial.completed > trial.aborted


def test_an_aborted_attempt_is_in_the_next_one(tmp_path: Path) -> None:
    job = ledger_job(tmp_path)
    job.start()
    job.move(processing_time_ms=0)
    model = Model()
    rows = [(1, 5, 0), (2, 6, 0)]
    assert sorted(job.process(rows)) == sorted(model.process(rows))
    for _ in range(4):  # so often that what was frozen is put together
        frozen = job.freeze()
        assert sorted(job.process(rows)) == sorted(model.process(rows))
        job.persist(frozen, 3)
        job.abort()
    assert max(len(one.table.frozen) for one in job.keyed) <= 3
    job.checkpoint()
    for one in job.keyed:
        one.tidy()
        assert not one.table.frozen
    job.crash(keep_disk=False)
    job.start(3)
    job.move(processing_time_ms=0)
    assert sorted(job.process(rows)) == sorted(model.process(rows))


def test_the_rows_of_an_aborted_attempt_count_in_the_next_one(tmp_path: Path) -> None:
    job = ledger_job(tmp_path)
    job.start()
    job.process([(1, 5, 0), (2, 6, 0)])
    job.freeze()
    job.abort()
    job.process([(3, 7, 0)])
    keyed, _ = job.freeze()
    assert sum(one.figures["rows"] for one in keyed) == 3


def test_nothing_of_an_incomplete_attempt_is_in_the_log(tmp_path: Path) -> None:
    job = ledger_job(tmp_path)
    job.start()
    job.process([(1, 5, 0)])
    job.checkpoint()
    job.process([(1, 6, 0)])
    job.persist(job.freeze(), 3)  # all but one source: both keyed subtasks have acked
    job.crash()
    assert job.start() == 1, "the epoch is repeated from the one before"
    job.move(processing_time_ms=job.stamp(0))
    model = Model()
    model.process([(1, 5, 0)])
    assert job.process([(1, 7, 0)]) == model.process([(1, 7, 0)])


def test_a_barrier_may_come_before_the_word_that_the_last_checkpoint_is_complete(
    tmp_path: Path,
) -> None:
    import threading

    job = ledger_job(tmp_path, parallelism=1)
    job.start()
    job.process([(1, 5, 0)])
    first = job.freeze()
    assert job.persist(first)
    job.process([(1, 6, 0)])
    second = job.keyed[0].freeze(2), job.sources[0].freeze(2)
    acks: list[Any] = []
    early = threading.Thread(target=lambda: acks.append(job.keyed[0].persist(second[0])))
    early.start()
    job.complete()
    early.join(20)
    assert acks[0].epoch == 1
    ack = job.sources[0].persist(second[1])
    assert ack is not None
    job.acks.take(acks[0])
    assert job.acks.take(ack)
    job.attempt = 2
    job.complete()
    job.crash(keep_disk=False)
    job.start()
    assert job.process([(1, 7, 0)])[0][2:4] == (3, 18)


def test_what_nobody_acked_is_not_confirmed(tmp_path: Path) -> None:
    job = ledger_job(tmp_path)
    job.start()
    job.freeze()
    with pytest.raises(ProtocolError, match="completed without"):
        job.keyed[0].confirmed(1, 0)
    with pytest.raises(ProtocolError, match="after that of checkpoint 1"):
        job.keyed[0].freeze(1)


def test_an_attempt_that_was_aborted_meanwhile_gives_no_ack(tmp_path: Path) -> None:
    job = ledger_job(tmp_path)
    job.start()
    keyed, sources = job.freeze()
    job.abort()
    assert job.keyed[0].persist(keyed[0]) is None
    assert job.sources[0].persist(sources[0]) is None


def test_a_large_state_has_bases_of_its_own(tmp_path: Path) -> None:
    job = ledger_job(tmp_path, inline_budget_bytes=300, whole_limit_bytes=0, policy=APART)
    job.start()
    job.move(processing_time_ms=0)
    model = Model()
    for epoch in range(12):
        rows = [(k, k + epoch, 0) for k in range(200)]
        assert sorted(job.process(rows)) == sorted(model.process(rows))
        job.checkpoint()
    job.crash(keep_disk=False)
    kinds = {entry.kind for one in manifests_of(job.store) for entry in one.slices}
    assert "files" in kinds, "RocksDB's own files were uploaded"
    job.start()
    assert sorted(job.move(processing_time_ms=0)) == sorted(model.fire())
    assert sorted(job.process(rows)) == sorted(model.process(rows))


def test_the_epoch_that_a_processor_sees_is_that_which_will_hold_what_comes(tmp_path: Path) -> None:
    job = ledger_job(tmp_path, parallelism=1)
    job.start()
    one = job.keyed[0]
    assert one.times.epoch == 0
    frozen = job.freeze()
    assert one.times.epoch == 1
    assert job.persist(frozen)
    job.complete()
    assert one.times.epoch == 1
    frozen = job.freeze()
    assert one.times.epoch == 2
    job.abort()
    assert one.times.epoch == 1, "the next one takes its epoch, and what came meanwhile"
    job.checkpoint()
    assert one.times.epoch == 2
    job.crash()
    job.start()
    assert job.keyed[0].times.epoch == 2


@pytest.mark.parametrize("aborts", [False, True])
def test_of_an_attempt_that_failed_no_file_stays(
    tmp_path: Path, aborts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = ledger_job(tmp_path, parallelism=1, overlay_bytes=3000)
    job.start()
    job.process([(k, k, 0) for k in range(300)])
    files: list[set[Path]] = []

    def fails(*args: Any) -> Any:
        files.append(work_files(job))
        if aborts:
            job.abort()
        raise StoreUnreachableError("The store is down.")

    frozen = job.freeze()
    before = work_files(job)
    assert any(layer.spilled for _, layer in frozen[0][0].layers)
    monkeypatch.setattr("statebackend.runtime.worker.participant.durable_slice", fails)
    with pytest.raises(StoreUnreachableError):
        job.keyed[0].persist(frozen[0][0])
    assert files[0] > before, "the delta was in a file"
    assert work_files(job) == before
    monkeypatch.undo()
    if not aborts:
        job.abort()
    job.checkpoint()
    job.crash(keep_disk=False)
    job.start()
    job.move(processing_time_ms=0)
    assert job.process([(7, 1, 0)])[0][2:4] == (2, 8)


def work_files(job: StreamJob) -> set[Path]:
    folder = job.keyed[0]._work.path().parent
    return {path for path in folder.rglob("*") if path.is_file()}


@mock.patch("snapshot.retention.history_keeping.EPOCHS_AN_OBJECT", 1)
def test_sources_keep_the_log_short(tmp_path: Path) -> None:
    store = MemoryStore()
    job = ledger_job(tmp_path, store=store, base_every_epochs=4, clean_every_epochs=1)
    job.start()
    for epoch in range(40):
        job.process([(1, epoch, 0)])
        job.checkpoint()
    assert len(list(store.list("log/"))) < 40, "records that nobody needs are deleted"


def test_the_end_of_all_inputs_leaves_the_watermark_where_it_was(tmp_path: Path) -> None:
    """It is of this run only. With none at all, late rows would be in time in the next one."""
    job = ledger_job(tmp_path)
    job.start()
    job.move(watermark_ms=5000, late_watermark_ms=5000)
    job.move(watermark_ms=END_MS)
    job.checkpoint()
    job.crash()
    job.start()
    assert {one.times.late_watermark_ms for one in job.keyed} == {5000}
    job.crash()
