"""Spark's physical plan leaves rows and anchor where the operator needs them, however it is set."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import Row
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from statebackend import ArrowProcessor, BroadcastProcessor, CoProcessor, KeyedProcessor
from statebackend.errors import PlanError
from statebackend.operators.aggregate.windows import tumbling
from statebackend.spark.frames import physical_plan as planshape
from statebackend.spark.frames.physical_plan import misplanned
from tests.spark.local.world import setting, until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from statebackend import StateBackend
    from tests.spark.local.world import World

SCHEMA = "k string, id bigint, at timestamp"
OUTPUT = "k string, n bigint"
SURROGATE = "start_it_with_backend_write_stream"  # the column that the anchor's join is on


class Counted(StatefulProcessor):
    """How many rows a key has had: with each batch or, with a time mode, when a timer fires."""

    def __init__(self, event: bool | None) -> None:
        self.event = event

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.n = handle.getValueState("n", "n bigint")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        (n,) = self.n.get() or (0,)
        rows = list(rows)
        n += len(rows)
        self.n.update((n,))
        if self.event is None:
            yield Row(k=key[0], n=n)
        elif self.event:
            self.handle.registerTimer(max(round(row.at.timestamp() * 1000) for row in rows))
        else:
            self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + 1)

    def handleExpiredTimer(
        self, key: Any, timerValues: Any, expiredTimerInfo: Any
    ) -> Iterator[Any]:
        yield Row(k=key[0], n=self.n.get()[0])

    def close(self) -> None:
        pass


class CountedFrames(StatefulProcessor):
    def init(self, handle: Any) -> None:
        self.n = handle.getValueState("n", "n bigint")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        for frame in rows:
            yield frame[["k"]].assign(n=len(frame))

    def close(self) -> None:
        pass


class Keyed(KeyedProcessor):
    def open(self, ctx: Any) -> None:
        self.n = ctx.value_state("n", "n bigint")

    def process(self, key: Any, rows: Any, ctx: Any) -> Iterator[Any]:
        yield (*key, sum(1 for _ in rows))

    def on_initial(self, key: Any, rows: Any, ctx: Any) -> None:
        self.n.update((sum(1 for _ in rows),))


class Columns(ArrowProcessor):
    def open(self, ctx: Any) -> None:
        self.n = ctx.value_state("n", "n bigint")

    def process(self, epoch: Any, ctx: Any) -> None:
        pass


class Sides(CoProcessor):
    def open(self, ctx: Any) -> None:
        self.n = ctx.value_state("n", "n bigint")

    def process_left(self, key: Any, rows: Any, ctx: Any) -> Iterator[Any]:
        yield (*key, sum(1 for _ in rows))

    process_right = process_left


class Ruled(BroadcastProcessor):
    def open(self, ctx: Any) -> None:
        self.rules = ctx.broadcast_state("rules", "k string", "id bigint")

    def process(self, key: Any, rows: Any, ctx: Any) -> Iterator[Any]:
        yield (*key, sum(1 for _ in rows))

    def process_broadcast(self, rows: Any, ctx: Any) -> None:
        for row in rows:
            self.rules.put((row.k,), (row.id,))


@pytest.fixture
def timed(make_world: Callable[..., World]) -> World:
    return make_world(schema=SCHEMA)


def _add(world: World, *, keys: int = 5, at_s: int) -> None:
    """One row of each key, at a second after the start."""
    at = f"2026-01-01T00:{at_s // 60:02d}:{at_s % 60:02d}Z"
    world.input.add([{"k": f"k{i}", "id": i, "at": at} for i in range(keys)])


EVENT = {"time_mode": "event", "event_time": "at", "watermark_delay": "1 second"}
PROCESSING = {"time_mode": "processing"}
Maker = Callable[["StateBackend", "DataFrame", "DataFrame"], "DataFrame"]


def _tws(event: bool | None, flavour: str = "rows") -> Maker:
    when: dict[str, Any] = {None: {}, True: EVENT, False: PROCESSING}[event]

    def make(backend: StateBackend, df: DataFrame, other: DataFrame) -> DataFrame:
        return backend.transform_with_state(
            df,
            keys="k",
            processor=Counted(event) if flavour == "rows" else CountedFrames(),
            output_schema=OUTPUT,
            uid=f"tws {event} {flavour}",
            flavour=flavour,
            **when,
        )

    return make


def _process(processor: Any = Keyed, name: str = "process", **more: Any) -> Maker:
    def make(backend: StateBackend, df: DataFrame, other: DataFrame) -> DataFrame:
        given = {"keys": "k", "processor": processor(), "output_schema": OUTPUT, "uid": name}
        if name.startswith("connect"):
            return getattr(backend, name)(df, other, **given, **more)
        return getattr(backend, name)(df, **given, **more)

    return make


def _aggregate(window: bool) -> Maker:
    when: dict[str, Any] = {
        "window": tumbling("10 seconds"),
        "event_time": "at",
        "watermark_delay": "1 second",
    }

    def make(backend: StateBackend, df: DataFrame, other: DataFrame) -> DataFrame:
        uid = f"aggregate {window}"
        made = {"n": "count"}
        return backend.aggregate(
            df, keys="k", aggregations=made, uid=uid, **(when if window else {})
        ).select("k", "n")

    return make


def _initial(backend: StateBackend, df: DataFrame, other: DataFrame) -> DataFrame:
    rows = df.sparkSession.createDataFrame([("k0", 1)], "k string, id bigint")
    given = {"keys": "k", "processor": Keyed(), "output_schema": OUTPUT, "initial_state": rows}
    return backend.process(df, uid="initial", **PROCESSING, **given)


def _chained(backend: StateBackend, df: DataFrame, other: DataFrame) -> DataFrame:
    given: Any = {"keys": "k", "processor": Keyed(), "output_schema": OUTPUT}
    first = backend.process(df, uid="first", **PROCESSING, **given)
    return backend.process(first, uid="second", **PROCESSING, **given)


KINDS: dict[str, Maker] = {
    "transform_with_state": _tws(None),
    "transform_with_state, event time": _tws(True),
    "transform_with_state, processing time": _tws(False),
    "pandas": _tws(None, "pandas"),
    "pandas, processing time": _tws(False, "pandas"),
    "process": _process(**EVENT),
    "transform_arrow": _process(Columns, "transform_arrow", **PROCESSING),
    "connect": _process(Sides, "connect", **EVENT),
    "connect_broadcast": _process(Ruled, "connect_broadcast", **EVENT),
    "aggregate": _aggregate(False),
    "aggregate, windows": _aggregate(True),
    "initial state": _initial,
    "two in a row": _chained,
}


# --- plans ---------------------------------------------------------------------------------------


def explained(frame: DataFrame) -> list[str]:
    jvm: Any = frame.sparkSession._jvm
    mode = jvm.org.apache.spark.sql.execution.ExplainMode.fromString("simple")
    jdf: Any = frame._jdf
    return str(jdf.queryExecution().explainString(mode)).splitlines()


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip(" :+-"))


def _below(lines: list[str], top: int) -> list[list[str]]:
    """The subtrees right below a line."""
    found: list[list[str]] = []
    for line in lines[top + 1 :]:
        if _depth(line) <= _depth(lines[top]):
            break
        if _depth(line) == _depth(lines[top]) + 3:
            found.append([])
        found[-1].append(line)
    return found


def check_plan(lines: list[str], parallelism: int, operators: int) -> None:
    """Each operator's join is fed by one exchange of its stream, and by the anchor as it lies."""
    joins = [n for n, line in enumerate(lines) if "Join" in line and SURROGATE in line]
    assert len(joins) == operators, "\n".join(lines)
    ours = rf"SinglePartition|hashpartitioning\({SURROGATE}#\d+, (\d+)\)"
    for top in joins:
        assert re.search(r"ShuffledHashJoin .*RightOuter, BuildRight", lines[top]), lines[top]
        stream, anchor = _below(lines, top)
        (_, first) = next((n, line) for n, line in enumerate(stream) if "Exchange" in line)
        found = re.search(f"Exchange ({ours}), REPARTITION_BY_NUM", first)
        assert found, first
        assert int(found[2] or 1) == parallelism, first
        scan = next(n for n, line in enumerate(anchor) if "InMemoryTableScan" in line)
        assert not any("Exchange" in line for line in anchor[:scan]), "\n".join(anchor)


@pytest.mark.parametrize("parallelism", [1, 2, 7, 200])
def test_every_kind_of_operator_keeps_its_partitions_at_any_number_of_shuffle_partitions(
    timed: World, parallelism: int
) -> None:
    backend = timed.backend(parallelism=parallelism)
    with setting(timed.spark, "spark.sql.adaptive.enabled", "false"):
        for name, make in KINDS.items():
            stream = timed.input.stream(timed.spark)
            frame = make(backend, stream, timed.input.stream(timed.spark))
            for partitions in ("1", "3", "200"):
                with setting(timed.spark, "spark.sql.shuffle.partitions", partitions):
                    lines = explained(frame)
                check_plan(lines, parallelism, 2 if "two" in name else 1)
                assert misplanned("\n".join(lines), parallelism) is None
        timed.spark.catalog.clearCache()
        for partitions in ("1", "3", "200"):
            with setting(timed.spark, "spark.sql.shuffle.partitions", partitions):
                plan = "\n".join(explained(frame))
            assert "InMemoryTableScan" not in plan
            assert misplanned(plan, parallelism) is None, plan


SETTINGS = {
    "spark.sql.adaptive.streaming.stateless.enabled": "false",
    "spark.sql.autoBroadcastJoinThreshold": "1099511627776",
    "spark.sql.bucketing.coalesceBucketsInJoin.enabled": "true",
    "spark.sql.cbo.enabled": "true",
    "spark.sql.cbo.joinReorder.enabled": "true",
    "spark.sql.constraintPropagation.enabled": "false",
    "spark.sql.defaultSizeInBytes": "1",
    "spark.sql.exchange.reuse": "false",
    "spark.sql.execution.replaceHashWithSortAgg": "true",
    "spark.sql.execution.sortBeforeRepartition": "false",
    "spark.sql.inMemoryColumnarStorage.partitionPruning": "false",
    "spark.sql.join.forceApplyShuffledHashJoin": "true",
    "spark.sql.join.preferSortMergeJoin": "true",
    "spark.sql.maxSinglePartitionBytes": "1",
    "spark.sql.optimizer.canChangeCachedPlanOutputPartitioning": "true",
    "spark.sql.optimizer.disableHints": "true",
    "spark.sql.optimizer.propagateDistinctKeys.enabled": "false",
    "spark.sql.optimizer.pushDownJoinThroughUnion.enabled": "true",
    "spark.sql.optimizer.singleTaskExecution.enabled": "true",
    "spark.sql.requireAllClusterKeysForCoPartition": "true",
    "spark.sql.requireAllClusterKeysForDistribution": "true",
    "spark.sql.shuffle.spreadNullJoinKeys.enabled": "true",
    "spark.sql.shuffledHashJoinFactor": "1000000",
    "spark.sql.sources.v2.bucketing.enabled": "true",
    "spark.sql.sources.v2.bucketing.pushPartValues.enabled": "true",
    "spark.sql.sources.v2.bucketing.shuffle.enabled": "true",
    "spark.sql.unionOutputPartitioning": "false",
}


@pytest.mark.parametrize("parallelism", [1, 2])
@pytest.mark.parametrize("kind", ["transform_with_state", "transform_with_state, event time"])
def test_no_setting_of_joins_and_shuffles_changes_the_plan(
    timed: World, kind: str, parallelism: int
) -> None:
    for name, value in SETTINGS.items():
        if not timed.spark.conf.isModifiable(name):
            continue  # this release of Spark does not have it
        backend = timed.backend(parallelism=parallelism)
        with (
            setting(timed.spark, "spark.sql.adaptive.enabled", "false"),
            setting(timed.spark, name, value),
        ):
            stream = timed.input.stream(timed.spark)
            check_plan(explained(KINDS[kind](backend, stream, stream)), parallelism, 1)
        backend.close()


@pytest.mark.parametrize("hint", ["broadcast", "merge", "shuffle_hash", "shuffle_replicate_nl"])
def test_a_join_hint_of_the_users_is_not_taken_for_the_join_with_the_anchor(
    timed: World, hint: str
) -> None:
    backend = timed.backend()
    stream = timed.input.stream(timed.spark).hint(hint).where("id >= 0")
    frame = KINDS["transform_with_state"](backend, stream, stream)
    with setting(timed.spark, "spark.sql.adaptive.enabled", "false"):
        check_plan(explained(frame), 2, 1)


def test_an_anchor_does_not_change_which_session_is_the_active_one(timed: World) -> None:
    active = type(timed.spark).getActiveSession
    before: Any = active()
    KINDS["transform_with_state"](timed.backend(), *[timed.input.stream(timed.spark)] * 2)
    after: Any = active()
    assert after is before or after._jsparkSession.equals(before._jsparkSession)


def test_a_plan_is_read_with_as_many_fields_as_the_session_shows(spark: SparkSession) -> None:
    wide = spark.range(1).select(*[F.col("id").alias(f"c{n}") for n in range(1200)])
    with setting(spark, "spark.sql.debug.maxToStringFields", "1"):
        assert "more fields" in planshape._explained(wide)
    with setting(spark, "spark.sql.debug.maxToStringFields", "5000"):
        assert "more fields" not in planshape._explained(wide)


@pytest.mark.parametrize(
    "text", ["spark.sql.debug.maxToStringFields", "spark.sql.maxPlanStringLength"]
)
def test_a_plan_that_loses_the_anchor_is_refused_at_the_start_with_the_setting_that_does_it(
    timed: World, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    _add(timed, at_s=0)
    backend = timed.backend(parallelism=1)
    stream = timed.input.stream(timed.spark)
    # An anchor as Spark's repartition(1) makes it.
    monkeypatch.setattr(
        type(stream), "dropDuplicates", lambda frame, columns: frame.repartition(1, *columns)
    )
    frame = KINDS["process"](backend, stream, stream)
    with (
        setting(timed.spark, "spark.sql.shuffle.partitions", "200"),
        setting(timed.spark, text, "1"),  # the session wants plans cut short
    ):
        with pytest.raises(PlanError, match=r"SB1019.*spark\.sql\.shuffle\.partitions = 200"):
            timed.start(backend, frame)
        with pytest.raises(PlanError), backend.starting():
            raise AssertionError("the block was entered")
        assert timed.spark.conf.get("spark.sql.shuffle.partitions") == "200"
    assert not timed.location.exists(), "nothing was started"
    assert backend.lineages() == {}


# --- runs at one subtask -------------------------------------------------------------------------


def counts(world: World) -> dict[str, int]:
    """The newest count of each key that the sink was given."""
    return {row["k"]: row["n"] for row in world.sink.rows()}


@pytest.mark.parametrize(
    "kind",
    ["transform_with_state, event time", "aggregate, windows", "two in a row", "process"],
)
def test_one_subtask_runs_with_a_time_mode_at_sparks_default_settings(
    timed: World, kind: str
) -> None:
    for at_s in (0, 20, 60):
        _add(timed, at_s=at_s)
    backend = timed.backend(parallelism=1)
    with setting(timed.spark, "spark.sql.shuffle.partitions", "200"):
        stream = timed.input.stream(timed.spark)
        timed.run(backend, KINDS[kind](backend, stream, stream))
    assert timed.committed()
    wanted = 3 if kind == "transform_with_state, event time" else 1
    assert counts(timed) == {f"k{i}": wanted for i in range(5)}


def test_one_subtask_fires_timers_of_processing_time_without_data(timed: World) -> None:
    _add(timed, at_s=0)
    backend = timed.backend(parallelism=1)
    stream = timed.input.stream(timed.spark)
    frame = KINDS["transform_with_state, processing time"](backend, stream, stream)
    with setting(timed.spark, "spark.sql.shuffle.partitions", "200"):
        query = backend.start(timed.writer(frame).trigger(processingTime="50 milliseconds"))
    until(lambda: len(counts(timed)) == 5 or query.exception(), "the timers have fired")
    query.stop()
    assert query.exception() is None
    assert counts(timed) == {f"k{i}": 1 for i in range(5)}


def test_a_job_with_timers_is_brought_down_to_one_subtask(timed: World) -> None:
    for number, parallelism in enumerate((2, 1, 3, 1)):
        _add(timed, at_s=20 * number)
        backend = timed.backend(parallelism=parallelism)
        stream = timed.input.stream(timed.spark)
        frame = KINDS["transform_with_state, event time"](backend, stream, stream)
        with setting(timed.spark, "spark.sql.shuffle.partitions", "200"):
            timed.run(backend, frame)
        assert backend.lineages()["tws True rows"].parallelism == parallelism
    assert counts(timed) == {f"k{i}": 4 for i in range(5)}, "the timers of all runs but the last"
