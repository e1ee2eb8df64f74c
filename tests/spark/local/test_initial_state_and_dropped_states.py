"""Initial state counts once whatever fails, and a state that was dropped comes back empty."""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.cloudpickle import register_pickle_by_value
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import Row

from snapshot.log.commit_log import CommitLog
from statebackend import KeyedProcessor
from statebackend.errors import FencedError, StateMismatchError
from statebackend.spark.frames.initial_state_writer import write_initial
from tests.spark.local.processors import LEDGER_OUTPUT, Ledger, once
from tests.spark.local.world import checkpoints, durable_state, manifests

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame

    from statebackend import ProcessorContext, StateBackend
    from tests.spark.local.world import World

register_pickle_by_value(sys.modules[__name__])  # workers need not find this module


# --- initial state -------------------------------------------------------------------------------


class Opened(Ledger):
    """A ledger that begins with what it is given; may fail once, for one key."""

    def __init__(self, flag: str = "", key: str = "") -> None:
        self.flag, self.key = flag, key

    def init(self, handle: Any) -> None:
        super().init(handle)
        self.given = handle.getListState("given", "id bigint")

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        n, total = self.state.get() or (0, 0)
        self.state.update((n + 1, total + initialState.id))
        self.given.appendValue((initialState.id,))

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        yield from super().handleInputRows(key, rows, timerValues)
        if key[0] == self.key and once(self.flag):
            raise RuntimeError("once only")


INITIAL = [("a", 1000), ("a", 2000), ("bad", 3000), ("never", 4000), ("later", 5000)]


def _opened(
    world: World,
    backend: StateBackend,
    rows: list[tuple[str, int]],
    *,
    df: DataFrame | None = None,
    processor: Any = None,
    uid: str = "ledger",
) -> DataFrame:
    return backend.transform_with_state(
        world.input.stream(world.spark) if df is None else df,
        keys="k",
        processor=processor or Opened(),
        output_schema=LEDGER_OUTPUT,
        uid=uid,
        initial_state=world.spark.createDataFrame(rows, "k string, id bigint"),
    )


def _check(
    world: World, backend: StateBackend, rows: list[tuple[str, int]], uid: str = "ledger"
) -> None:
    """State and output are those of the initial rows, once, and then the input."""
    given: dict[str, list[int]] = defaultdict(list)
    for key, number in rows:
        given[key].append(number)
    ids = {k: list(v) for k, v in given.items()}
    for k, own in world.input.ids().items():
        ids[k] = ids.get(k, []) + own
    state = durable_state(backend, uid)
    assert state["acc"] == {(k,): (len(own), sum(own)) for k, own in ids.items()}
    assert {k: sorted(v) for k, v in state["given"].items() if v} == {
        (k,): sorted((n,) for n in own) for k, own in given.items()
    }
    seen = {k: list(v) for k, v in given.items()}
    for _, out in sorted(world.sink.batches().items()):
        for row in out:
            own = seen.setdefault(row["k"], [])
            own += row["ids"]
            assert (row["n"], row["total"]) == (len(own), sum(own))
    assert {k: sorted(own) for k, own in seen.items()} == {k: sorted(v) for k, v in ids.items()}


@pytest.mark.parametrize("commit", ["sync", "async"])
def test_a_first_epoch_that_fails_is_repeated_with_its_initial_state(
    world: World, commit: str
) -> None:
    flag = world.root / "flag"
    flag.touch()
    world.input.add_keys("a", "b", "bad", "c")
    world.input.add_keys("a", "later", "bad", "c")
    backend = world.backend(commit=commit)
    frame = _opened(world, backend, INITIAL, processor=Opened(str(flag), "bad"))
    assert "once only" in world.fail(backend, frame)
    assert world.committed() == []
    world.run(backend, frame)
    backend.wait_durable()
    _check(world, backend, INITIAL)


def test_a_first_epoch_that_spark_did_not_commit_is_repeated_with_its_initial_state(
    world: World,
) -> None:
    flag = world.root / "flag"
    flag.touch()

    def failing(frame: DataFrame, batch: int) -> None:
        world.sink(frame, batch)
        if once(str(flag)):
            raise RuntimeError("after all is written")

    world.input.add_keys("a", "b", "bad", "c")
    backend = world.backend()
    world.fail(backend, _opened(world, backend, INITIAL), failing)
    assert world.committed() == []
    # A new driver would evaluate its frame again; what it then gives is what counts.
    changed = [(k, number + 1) for k, number in INITIAL]
    backend = world.backend()
    world.run(backend, _opened(world, backend, changed))
    _check(world, backend, changed)


def test_a_start_that_lacks_the_initial_state_takes_nothing_back_and_fences_nobody(
    world: World,
) -> None:
    def forgets(frame: DataFrame, batch: int) -> None:
        if batch:
            world.sink(frame, batch)

    world.input.add_keys("a", "b")
    world.input.add_keys("a")
    backend = world.backend()
    assert "SB5001" in world.fail(backend, _opened(world, backend, INITIAL), forgets)
    assert world.committed() == [0], "Spark has committed a batch that was not computed"
    before = manifests(backend)
    backend = world.backend()
    with pytest.raises(StateMismatchError, match="Give initial_state= as before"):
        world.run(backend, world.ledger(backend, processor=Opened()))
    assert (world.committed(), world.hidden()) == ([0], [])
    assert manifests(backend) == before
    backend = world.backend()
    world.run(backend, _opened(world, backend, INITIAL))
    _check(world, backend, INITIAL)


def test_a_start_that_is_overtaken_while_it_writes_its_initial_state_fences_nobody(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = world.backend()

    def overtaken(*args: Any, **settings: Any) -> Any:
        parts = write_initial(*args, **settings)
        job = backend._job
        CommitLog(job.store, job=job.name, writer="other", new_id=job.system.new_id).claim(
            run="other"
        )
        return parts

    monkeypatch.setattr("statebackend.spark.start.launch.write_initial", overtaken)
    world.input.add_keys("a", "b")
    with pytest.raises(FencedError, match="initial state"):
        world.run(backend, _opened(world, backend, INITIAL))
    assert [m.writer for m in manifests(backend)] == ["other"]
    monkeypatch.undo()
    backend = world.backend()
    world.run(backend, _opened(world, backend, INITIAL))
    _check(world, backend, INITIAL)


@pytest.mark.parametrize("durable", [True, False], ids=["durable", "not durable"])
def test_a_first_epoch_is_not_repeated_without_the_initial_state_that_it_had(
    world: World, durable: bool
) -> None:
    flag = world.root / "flag"
    flag.touch()

    def failing(frame: DataFrame, batch: int) -> None:
        if durable:
            world.sink(frame, batch)
        if once(str(flag)):
            raise RuntimeError("before it is committed")
        world.sink(frame, batch)

    world.input.add_keys("a", "b", "bad", "c")
    backend = world.backend()
    world.fail(backend, _opened(world, backend, INITIAL), failing)
    before = checkpoints(backend)
    assert before == ([("ledger", 0)] if durable else [])
    backend = world.backend()
    frame = world.ledger(backend, processor=Opened())
    with pytest.raises(StateMismatchError, match=r"'ledger'.* it would be lost"):
        world.run(backend, frame)
    assert checkpoints(backend) == before
    backend = world.backend()
    world.run(backend, _opened(world, backend, INITIAL))
    _check(world, backend, INITIAL)
    # It is committed now: nobody asks for it any more.
    world.input.add_keys("a", "later")
    backend = world.backend()
    world.run(backend, world.ledger(backend, processor=Opened()))
    _check(world, backend, INITIAL)


def test_an_empty_frame_takes_an_initial_state_back_that_is_not_committed(world: World) -> None:
    def failing(frame: DataFrame, batch: int) -> None:
        frame.collect()
        raise RuntimeError("before it is committed")

    world.input.add_keys("a", "b")
    backend = world.backend()
    world.fail(backend, _opened(world, backend, INITIAL), failing)
    backend = world.backend()
    world.run(backend, _opened(world, backend, []))
    _check(world, backend, [])


def test_an_initial_state_waits_for_the_first_batch(world: World) -> None:
    backend = world.backend()
    world.run(backend, _opened(world, backend, [("a", 1), ("gone", 2)]))
    assert world.committed() == []
    world.input.add_keys("a", "b")
    backend = world.backend()
    world.run(backend, _opened(world, backend, INITIAL))
    _check(world, backend, INITIAL)


def test_an_initial_state_is_not_applied_again_by_a_later_start(world: World) -> None:
    for keys in (("a", "b"), ("a", "later"), ("later", "c")):
        world.input.add_keys(*keys)
        backend = world.backend()
        rows = INITIAL if len(world.input.rows) == 2 else [("a", 7), ("x", 8)]
        world.run(backend, _opened(world, backend, rows))
        world.forget_local()
    _check(world, backend, INITIAL)


def test_an_operator_that_is_added_later_takes_its_initial_state_in_its_own_first_batch(
    world: World,
) -> None:
    world.input.add_keys("a", "b")
    df = world.input.stream(world.spark)
    backend = world.backend()
    # Spark's number of sources must stay the same: both halves read one.
    world.run(backend, world.ledger(backend, df.union(df.where("false")), uid="old"))
    first = list(world.input.rows)
    for _ in range(2):
        world.input.add_keys("a", "later")
        backend = world.backend()
        old = world.ledger(backend, df, uid="old").where("n < 0")
        new = _opened(world, backend, INITIAL, df=df, uid="new")
        world.run(backend, old.union(new))
    world.input.rows = world.input.rows[len(first) :]
    (world.sink.folder / "0").unlink()  # of the old one
    _check(world, backend, INITIAL, uid="new")


class Alarms(KeyedProcessor):
    """Initial rows set timers; a timer says how often it fired so far, and what it knows."""

    def open(self, ctx: ProcessorContext) -> None:
        self.known = ctx.reducing_state("known", "id bigint", lambda a, b: (a[0] + b[0],))
        self.fired = ctx.map_state("fired", "at_ms bigint", "n bigint")

    def on_initial(self, key: Any, rows: Any, ctx: ProcessorContext) -> None:
        for row in rows:
            self.known.add((row.id,))
            ctx.timers.register(row.id)

    def process(self, key: Any, rows: Any, ctx: ProcessorContext) -> None:
        for row in rows:
            self.known.add((row.id,))

    def on_timer(self, key: Any, at_ms: int, ctx: ProcessorContext) -> Iterator[Any]:
        (n,) = self.fired.get_value((at_ms,)) or (0,)
        self.fired.update_value((at_ms,), (n + 1,))
        yield (*key, [at_ms], n + 1, self.known.get()[0])


def test_timers_of_the_initial_state_fire_once_each_in_the_batch_that_is_their_time(
    world: World,
) -> None:
    world.input.schema = "k string, id bigint, at timestamp"
    for start, (number, at) in enumerate([(1, "00:00:03"), (2, "00:00:07"), (3, "00:01:00")]):
        world.input.add([{"k": "a", "id": number, "at": f"1970-01-01 {at}"}])
        backend = world.backend()
        frame = backend.process(
            world.input.stream(world.spark),
            keys="k",
            processor=Alarms(),
            output_schema=LEDGER_OUTPUT,
            uid="alarms",
            time_mode="event",
            event_time="at",
            watermark_delay="1 second",
            initial_state=world.spark.createDataFrame(INITIAL, "k string, id bigint"),
        )
        world.run(backend, frame)
        # The watermark was 2, 6 and 59 s at the ends of these starts.
        fired = {(row["k"], row["ids"][0]): (row["n"], row["total"]) for row in world.sink.rows()}
        wanted = {("a", 1000): (1, 3001), ("a", 2000): (1, 3001)}
        if start > 0:
            wanted |= {("bad", 3000): (1, 3000), ("never", 4000): (1, 4000)}
            wanted[("later", 5000)] = (1, 5000)
        assert fired == wanted
        assert len(world.sink.rows()) == len(wanted)


# --- states that are dropped ---------------------------------------------------------------------


class Versioned(StatefulProcessor):
    """Counts rows in each of its states; ``kinds``: "value", "list" or "map" by name."""

    def __init__(
        self, kinds: dict[str, str], deleted: tuple[str, ...] = (), flag: str = ""
    ) -> None:
        self.kinds, self.deleted, self.flag = kinds, deleted, flag

    def init(self, handle: Any) -> None:
        for name in self.deleted:
            handle.deleteIfExists(name)
        self.cells = {}
        for name, kind in self.kinds.items():
            if kind == "value":
                self.cells[name] = handle.getValueState(name, "n bigint")
            elif kind == "list":
                self.cells[name] = handle.getListState(name, "n bigint")
            else:
                self.cells[name] = handle.getMapState(name, "id bigint", "n bigint")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        ids = [row.id for row in rows]
        for name, kind in self.kinds.items():
            cell = self.cells[name]
            if kind == "value":
                cell.update(((cell.get() or (0,))[0] + len(ids),))
                n = cell.get()[0]
            elif kind == "list":
                cell.appendList([(number,) for number in ids])
                n = len(list(cell.get()))
            else:
                for number in ids:
                    cell.updateValue((number,), (number,))
                n = len(list(cell.keys()))
            yield Row(k=key[0], state=name, n=n)
        if self.flag and once(self.flag):
            raise RuntimeError("once only")

    def close(self) -> None:
        pass


def _versioned(world: World, backend: StateBackend, processor: Versioned) -> DataFrame:
    return backend.transform_with_state(
        world.input.stream(world.spark),
        keys="k",
        processor=processor,
        output_schema="k string, state string, n bigint",
        uid="versioned",
    )


def _step(world: World, processor: Versioned, **given: Any) -> dict[str, dict[str, int]]:
    """One more batch of two rows for each of three keys; the counts by state, then by key."""
    world.input.add_keys(*"abcabc")
    backend = world.backend(**given)
    before = set(world.sink.batches())
    world.run(backend, _versioned(world, backend, processor))
    found: dict[str, dict[str, int]] = {}
    for number, rows in world.sink.batches().items():
        for row in rows if number not in before else ():
            found.setdefault(row["state"], {})[row["k"]] = row["n"]
    return found


def _all(n: int) -> dict[str, int]:
    return dict.fromkeys("abc", n)


@pytest.mark.parametrize(
    ("kind", "forgetful"), [("value", True), ("list", False), ("map", True)], ids=str
)
def test_a_state_that_was_deleted_is_empty_when_its_name_is_given_again(
    world: World, kind: str, forgetful: bool
) -> None:
    def step(*args: Any) -> dict[str, dict[str, int]]:
        if forgetful and world.local.exists():
            world.forget_local()
        return _step(world, Versioned(*args))

    both = {"kept": "value", "gone": kind}
    assert step(both) == {"kept": _all(2), "gone": _all(2)}
    assert step(both) == {"kept": _all(4), "gone": _all(4)}
    assert step({"kept": "value"}, ("gone",)) == {"kept": _all(6)}
    assert step({"kept": "value"}, ("gone", "unknown")) == {"kept": _all(8)}
    assert step(both) == {"kept": _all(10), "gone": _all(2)}
    assert step(both) == {"kept": _all(12), "gone": _all(4)}


def test_a_state_that_was_deleted_may_come_back_at_once_as_another_kind(world: World) -> None:
    assert _step(world, Versioned({"s": "map"})) == {"s": _all(2)}
    assert _step(world, Versioned({"s": "list"}, ("s",))) == {"s": _all(2)}
    assert _step(world, Versioned({"s": "list"})) == {"s": _all(4)}


def test_a_deletion_in_a_batch_that_failed_is_done_when_the_batch_is_repeated(
    world: World,
) -> None:
    flag = world.root / "flag"
    assert _step(world, Versioned({"kept": "value", "gone": "list"})) == {
        "kept": _all(2),
        "gone": _all(2),
    }
    flag.touch()
    world.input.add_keys(*"abcabc")
    backend = world.backend()
    processor = Versioned({"kept": "value", "gone": "list"}, ("gone",), str(flag))
    frame = _versioned(world, backend, processor)
    assert "once only" in world.fail(backend, frame)
    assert _step(world, processor)["kept"] == _all(6)
    last = {row["state"]: row["n"] for row in world.sink.batches()[1]}
    assert last == {"kept": 4, "gone": 2}
    assert _step(world, Versioned({"kept": "value", "gone": "list"})) == {
        "kept": _all(8),
        "gone": _all(6),
    }


@pytest.mark.parametrize("again", ["value", "map"])
def test_a_state_that_was_left_out_is_empty_when_its_name_is_given_again(
    world: World, again: str
) -> None:
    both = {"kept": "value", "gone": "map"}
    assert _step(world, Versioned(both)) == {"kept": _all(2), "gone": _all(2)}
    with pytest.raises(StateMismatchError, match="'gone'"):
        _step(world, Versioned({"kept": "value"}))
    # The batch that was refused comes now, and so on.
    _step(world, Versioned({"kept": "value"}), allow_dropped_state=True)
    assert {row["n"] for row in world.sink.batches()[2]} == {6}
    assert _step(world, Versioned({"kept": "value"})) == {"kept": _all(8)}
    both["gone"] = again
    assert _step(world, Versioned(both)) == {"kept": _all(10), "gone": _all(2)}
    world.forget_local()
    assert _step(world, Versioned(both)) == {"kept": _all(12), "gone": _all(4)}


def test_an_operator_that_was_left_out_is_empty_when_its_uid_is_given_again(
    world: World,
) -> None:
    df = world.input.stream(world.spark)
    for start, with_second in enumerate((True, False, True)):
        world.input.add_keys(*"abc")
        backend = world.backend(allow_dropped_state=not with_second)
        frame = world.ledger(backend, df).withColumn("side", F.lit("first"))
        other = df.withColumn("side", F.lit("none")).where("false")
        if with_second:
            second = world.ledger(backend, df, uid="second")
        else:
            second = other.selectExpr("k", "array(id) ids", "id n", "id total")
        world.run(backend, frame.union(second.withColumn("side", F.lit("second"))))
        rows = world.sink.batches()[start]
        firsts = {row["k"]: row["n"] for row in rows if row["side"] == "first"}
        assert firsts == _all(start + 1)
        seconds = {row["k"]: row["n"] for row in rows if row["side"] == "second"}
        assert seconds == (_all(1) if with_second else {})
