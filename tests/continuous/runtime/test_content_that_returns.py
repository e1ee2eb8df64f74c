"""State of no key whose content comes back after cleaning took the object that it lay in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recovery.decide.restart_strategy import FixedDelay
from snapshot.log.commit_log import CommitLog
from statebackend import system
from statebackend.api.processors import BroadcastProcessor
from statebackend.continuous.sinks.collect_sink import CollectSink
from statebackend.continuous.sources.file_source import FileSource
from statebackend.runtime.worker.operator_state_io import OperatorStateIO
from tests.continuous.runtime.jobs import OUTPUT, Numbers
from tests.continuous.runtime.world import soon

if TYPE_CHECKING:
    from pathlib import Path

    from statebackend.continuous.driver.continuous_query import ContinuousQuery
    from tests.continuous.runtime.world import World

pytestmark = pytest.mark.full  # whole jobs with cleaning

RULE = "r" * 5_000
ALL = ("rules", "data", "switched", "sink")
RETENTION = {
    "clean_every_epochs": 1,
    "clean_min_age_s": 0.0,
    "base_every_epochs": 1,
    "base_apart_every_epochs": 1,
    "retain_epochs": 1,
}


class Switched(BroadcastProcessor):
    """Each subtask's list has the texts of the rules that are on."""

    def open(self, ctx: Any) -> None:
        self._rules = ctx.broadcast_state("rules", "key BIGINT", "text STRING")
        self._texts = ctx.operator_list("texts", "text STRING")

    def process(self, key: Any, rows: Iterator[Any], ctx: Any) -> Iterator[tuple[int, int, int]]:
        texts = [(text,) for _, (text,) in self._rules.items()]
        if list(self._texts.get()) != texts:
            self._texts.update(texts)
        yield key[0], sum(1 for _ in rows), len(texts)

    def process_broadcast(self, rows: Iterator[Any], ctx: Any) -> None:
        for row in rows:
            if row.on:
                self._rules.put((row.key,), (row.text,))
            else:
                self._rules.remove((row.key,))


class Switches:
    """Files of rules: what is on is said by the newest."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self._written = folder, 0

    def turn(self, *, on: bool) -> None:
        rules = {"key": [1], "text": [RULE], "on": [on]}
        draft = self.folder / f".{self._written}"
        pq.write_table(pa.table(rules), draft)
        draft.rename(self.folder / f"{self._written:03}.parquet")
        self._written += 1


def started(
    world: World, switches: Switches, **settings: Any
) -> tuple[ContinuousQuery, CollectSink]:
    world.renew(**RETENTION, **settings)
    sink = CollectSink()
    source = FileSource(switches.folder, schema="key BIGINT, text STRING, on BOOLEAN", follow=True)
    rules = world.source(source, "rules")
    data = world.source(Numbers(None, rows_per_s=1000), "data").key_by("key")
    data.connect_broadcast(rules).process(Switched(), uid="switched", output_schema=OUTPUT).sink(
        sink
    )
    restart = FixedDelay(1, 0.0)
    return world.start(2, restart=restart, discover_every_s=0.1), sink


def checkpoints(query: ContinuousQuery, count: int) -> None:
    for _ in range(count):
        assert query.checkpoint(60.0) is not None


def seen(sink: CollectSink, rules: int) -> None:
    """Wait until rows were processed with so many rules, from now on."""
    before = len(sink.rows())
    soon(lambda: any(row["total"] == rules for row in sink.rows()[before:]))


def named(world: World, *operators: str) -> set[str]:
    """What the newest records name of states that belong to no key."""
    store = world.flow.setup.job.store
    log = CommitLog(store, job="job", writer="test", new_id=system.new_id)
    newest = {m.operator: m for m in log.manifests() if m.kind == "checkpoint"}
    slices = (s for uid, m in newest.items() if uid in operators for s in m.slices)
    return {s.object for s in slices if s.kind in ("operator", "broadcast") and s.object}


def kept(world: World) -> set[str]:
    return {info.name for info in world.flow.setup.job.store.list("data/")}


@pytest.mark.parametrize("inline_limit_bytes", [1_000, 1])
def test_a_rule_that_is_switched_off_and_on_again_does_not_lose_the_job(
    world: World, tmp_path: Path, inline_limit_bytes: int
) -> None:
    switches = Switches(tmp_path / "rules")
    switches.turn(on=True)
    query, sink = started(world, switches, inline_limit_bytes=inline_limit_bytes)
    seen(sink, 1)
    checkpoints(query, 3)
    first = named(world, "switched")
    assert first
    switches.turn(on=False)
    seen(sink, 0)
    soon(lambda: query.checkpoint(60.0) is not None and not first & kept(world))
    switches.turn(on=True)
    seen(sink, 1)
    checkpoints(query, 3)
    assert query.stop()
    assert query.restarts == 0
    assert named(world, *ALL) <= kept(world)

    query, sink = started(world, switches, inline_limit_bytes=inline_limit_bytes)
    checkpoints(query, 1)
    seen(sink, 1)
    assert query.stop()
    assert query.restarts == 0


def test_a_subtask_that_names_an_object_of_an_earlier_epoch_costs_a_restart_and_no_more(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write = OperatorStateIO.write

    def remembering(self: Any, snapshot: Any, reply: Any, names: Any, budget_bytes: int) -> Any:
        """As workers did: whatever was named once is named again."""
        earlier = self.__dict__.setdefault("earlier", {})
        earlier.update((part.digest, part) for part in reply.operator_parts if part.name)
        more = msgspec.structs.replace(reply, operator_parts=list(earlier.values()))
        return write(self, snapshot, more, names, budget_bytes)

    monkeypatch.setattr(OperatorStateIO, "write", remembering)
    switches = Switches(tmp_path / "rules")
    switches.turn(on=True)
    query, sink = started(world, switches, inline_limit_bytes=1_000)
    seen(sink, 1)
    checkpoints(query, 3)
    switches.turn(on=False)
    seen(sink, 0)
    checkpoints(query, 3)
    switches.turn(on=True)
    soon(lambda: query.restarts == 1)
    seen(sink, 1)
    checkpoints(query, 2)
    assert query.stop()
    assert query.restarts == 1
    assert "SB5011" in caplog.text
    assert named(world, *ALL) <= kept(world)
