"""State, timers and input outside their key or call: refused, or what is defined."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pandas as pd
import pytest
from pyspark.sql import Row
from pyspark.sql import types as T

from statebackend.api.processors import KeyedProcessor
from statebackend.errors import KeyContextError, ProcessorError, UsageError, ValueMismatchError
from statebackend.operators.processor_calls import record_keyed_states
from statebackend.operators.stateful_processor_calls import record_states
from statebackend.testing.processor_tester import ProcessorTester
from tests.api.mistakes.any_processor import (
    CLASSES,
    Act,
    Job,
    Keyed,
    Spark,
    extend,
    here,
    register,
    remembering,
)

# --- outside its key -----------------------------------------------------------------------------


def test_state_has_no_key_while_the_driver_asks_which_there_are(job: Job) -> None:
    def opening(p: Any, handle: Any) -> None:
        p.value.get()  # opening on the driver

    with pytest.raises(KeyContextError, match="state 'count'") as caught:
        job.run(open=opening)
    assert here("opening on the driver") in str(caught.value)


def test_state_has_no_key_in_init(job: Job) -> None:
    def opening(p: Any, handle: Any) -> None:
        p.value.update((5,))  # opening in a worker

    said = job.mistake(KeyContextError, worker={"open": opening})
    assert "State 'count' was used outside the call for a key at" in said
    assert here("opening in a worker") in said


def test_timers_have_no_key_in_init(job: Job) -> None:
    def opening(p: Any, handle: Any) -> None:
        register(p, 5)  # timers in init

    said = job.mistake(KeyContextError, worker={"open": opening})
    assert "Timers were used outside" in said
    assert here("timers in init") in said
    with pytest.raises(UsageError) as caught:
        job.run(open=opening)
    assert here("timers in init") in str(caught.value)


USES: dict[str, Act] = {
    "get": lambda p: p.value.get(),
    "exists": lambda p: p.value.exists(),
    "update": lambda p: p.value.update((1,)),
    "clear": lambda p: p.value.clear(),
    "list get": lambda p: p.list.get(),
    "list put": lambda p: p.list.put([(1, [])]),
    "list append": lambda p: p.list.append((1, [])),
    "list exists": lambda p: p.list.exists(),
    "list clear": lambda p: p.list.clear(),
    "map get": lambda p: p.map.get_value((b"x",)),
    "map update": lambda p: p.map.update_value((b"x",), (1,)),
    "map exists": lambda p: p.map.exists(),
    "map iterator": lambda p: p.map.iterator(),
    "map keys": lambda p: p.map.keys(),
    "map values": lambda p: p.map.values(),
    "map remove": lambda p: p.map.remove_key((b"x",)),
    "map clear": lambda p: p.map.clear(),
    "timers": lambda p: register(p, 5),
}


@pytest.mark.parametrize("use", USES)
def test_state_has_no_key_in_close(job: Job, use: str) -> None:
    def closing(p: Any) -> None:
        USES[use](p)  # closing

    said = job.mistake(KeyContextError, close=closing)
    assert here("closing") in said


@pytest.mark.parametrize("use", ["folded", "fleeting"])
def test_folded_and_fleeting_state_has_no_key_in_close(own: Job, use: str) -> None:
    name = {"folded": "largest", "fleeting": "fleeting"}[use]
    said = own.mistake(KeyContextError, close=lambda p: getattr(p, use).get())
    assert f"State {name!r} was" in said


@pytest.mark.parametrize("use", USES)
def test_what_is_kept_from_an_earlier_batch_reaches_no_key(job: Job, use: str) -> None:
    job.run(remembering)
    earlier = job.processor

    def act(p: Any, key: Any, rows: Any) -> None:
        USES[use](earlier)  # kept from the batch before

    said = job.mistake(KeyContextError, act)
    assert here("kept from the batch before") in said
    assert "for key ('" in said


def test_what_is_kept_from_an_earlier_key_is_the_state_of_the_current_one(job: Job) -> None:
    def act(p: Any, key: Any, rows: Any) -> None:
        p.kept.append(p.value)
        p.kept[0].update((ord(key[0]),))

    job.run(act)
    assert job.counts() == {"a": (97,), "b": (98,)}


def test_a_thread_that_comes_too_late_has_no_key(job: Job) -> None:
    go, raised = threading.Event(), list[BaseException]()

    def late(p: Any) -> None:
        go.wait(30)
        try:
            p.value.update((7,))
        except BaseException as error:
            raised.append(error)

    def act(p: Any, key: Any, rows: Any) -> None:
        p.kept.append(threading.Thread(target=late, args=(p,)))
        p.kept[-1].start()

    job.run(act)
    before = dict(job.base.entries)
    go.set()
    for thread in job.processor.kept:
        thread.join(30)
    assert [type(error) for error in raised] == [KeyContextError] * 2
    assert job.base.entries == before == {}


def test_what_a_thread_raises_during_the_call_shows_both_lines(job: Job) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def elsewhere(p: Any) -> None:
        p.value.update(("x",))  # in the thread

    def act(p: Any, key: Any, rows: Any) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(elsewhere, p).result()  # waits for it

    said = job.mistake(ValueMismatchError, act)
    assert here("in the thread") in said
    assert "state 'count'" in said


# --- generators and iterators --------------------------------------------------------------------


def test_a_generator_that_is_used_up_in_a_later_key_means_that_one(job: Job) -> None:
    def updates(p: Any, n: int) -> Iterator[None]:
        p.value.update((n,))
        yield

    def act(p: Any, key: Any, rows: Any) -> None:
        p.kept.append(updates(p, ord(key[0])))
        if key == ("b",):
            for kept in p.kept:
                next(kept)

    job.run(act)
    assert job.counts() == {"a": None, "b": (98,)}


def test_a_generator_of_state_that_is_used_up_in_close_is_refused(job: Job) -> None:
    def lazily(p: Any) -> Iterator[Any]:
        yield p.value.get()  # in a generator

    def act(p: Any, key: Any, rows: Any) -> None:
        p.kept.append(lazily(p))

    said = job.mistake(KeyContextError, act, close=lambda p: next(p.kept[0]))
    assert here("in a generator") in said


def test_input_that_is_kept_gives_its_own_key_later_and_nothing_is_lost(job: Job) -> None:
    def act(p: Any, key: Any, rows: Any) -> None:
        p.kept.append((key, rows))

    seen = []

    def closing(p: Any) -> None:
        for key, rows in p.kept:
            for some in rows:
                users = some["user"].tolist() if isinstance(some, pd.DataFrame) else [some.user]
                seen.append((key[0], users))

    job.run(act, "aabb", close=closing)
    flat = [(key, user) for key, users in seen for user in users]
    assert flat == [("a", "a"), ("a", "a"), ("b", "b"), ("b", "b")]


def test_what_was_got_from_state_stays_as_it_was(job: Job) -> None:
    def fill(p: Any, key: Any, rows: Any) -> None:
        p.list.put([(n, [key[0]]) for n in range(3)])
        p.map.update_value((key[0].encode(),), (1,))

    def act(p: Any, key: Any, rows: Any) -> None:
        p.kept.append((p.list.get(), p.map.iterator(), p.map.keys(), p.map.values()))
        p.list.clear()
        p.map.clear()

    seen = []
    job.run(fill)
    job.run(act, close=lambda p: seen.extend([list(map(list, four)) for four in p.kept]))
    assert seen == [
        [[(n, [k]) for n in range(3)], [((k.encode(),), (1,))], [(k.encode(),)], [(1,)]]
        for k in "ab"
    ]


class LazyInit(Spark):
    def init(self, handle: Any) -> Any:
        yield handle


class LazyClose(Spark):
    def close(self) -> Any:
        yield


def test_an_init_that_is_a_generator_would_not_run_and_is_refused() -> None:
    with pytest.raises(ProcessorError, match=rf"init\(\).*generator.*{__file__}:"):
        record_states(LazyInit(), "job")


def test_a_close_that_is_a_generator_would_not_run_and_is_refused(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lazy(CLASSES[job.flavour]):  # type: ignore[misc]
        close = LazyClose.close

    monkeypatch.setitem(CLASSES, job.flavour, Lazy)
    with pytest.raises(ProcessorError, match=rf"close\(\).*generator.*{__file__}:"):
        job.run()


def test_a_coroutine_for_open_is_refused() -> None:
    class Lazy(Keyed):
        async def open(self, ctx: Any) -> None:  # type: ignore[override]
            pass

    with pytest.raises(ProcessorError, match=r"open\(\).*coroutine"):
        record_keyed_states(Lazy(), "job")


@pytest.mark.parametrize("flavour", ["rows", "pandas"])
def test_an_initial_state_in_a_generator_would_not_run_and_is_refused(
    flavour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lazy(Spark):
        def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> Any:
            yield self.value.update((1,))

    monkeypatch.setitem(CLASSES, flavour, Lazy)
    with pytest.raises(UsageError, match="handleInitialState"):
        Job(flavour).run(with_initial=True)


# --- references ----------------------------------------------------------------------------------


def test_what_state_gave_may_be_changed_without_changing_state(job: Job) -> None:
    def fill(p: Any, key: Any, rows: Any) -> None:
        p.list.put([(n, ["x"]) for n in range(30)])

    def act(p: Any, key: Any, rows: Any) -> None:
        for _ in range(2):
            some = list(p.list.get())
            assert [tags for _, tags in some] == [["x"]] * 30
            for _, tags in some:
                tags.append("y")

    job.run(fill)
    before = dict(job.base.entries)
    job.run(act)
    assert job.base.entries == before


def test_a_row_with_a_list_is_another_object_each_time() -> None:
    class Tagged(KeyedProcessor):
        def open(self, ctx: Any) -> None:
            self.tags = ctx.value_state("tags", "tags array<string>, more map<string,int>")

        def process(self, key: Any, rows: Any, ctx: Any) -> Any:
            if self.tags.get() is None:
                self.tags.update((["x"], {"x": 1}))
            one, two = self.tags.get(), self.tags.get()
            one[0].append("y")
            one[1]["y"] = 2
            yield (two, self.tags.get())

    with ProcessorTester(Tagged()) as tester:
        for _ in range(2):
            assert tester.test("a", [Row(n=1)]) == [((["x"], {"x": 1}),) * 2]


def test_what_was_given_to_state_may_be_changed_afterwards(job: Job) -> None:
    def act(p: Any, key: Any, rows: Any) -> None:
        tags, more, word = ["x"], [(1, ["x"])], bytearray(b"x")
        p.list.append((1, tags))
        extend(p)(more)
        p.map.update_value((word,), (1,))
        tags.append("y")
        more[0][1].append("y")
        more.append((2, []))
        word[0] = ord("y")
        assert list(p.list.get()) == [(1, ["x"]), (1, ["x"])]
        assert list(p.map.iterator()) == [((b"x",), (1,))]

    job.run(act)


def test_a_map_key_that_is_changed_is_another_key(job: Job) -> None:
    def act(p: Any, key: Any, rows: Any) -> None:
        word = bytearray(b"x")
        map_key = (word,)
        assert p.map.get_value(map_key) is None
        p.map.update_value(map_key, (1,))
        word[0] = ord("y")
        assert p.map.get_value(map_key) is None
        p.map.update_value(map_key, (2,))
        assert dict(p.map.iterator()) == {(b"x",): (1,), (b"y",): (2,)}

    job.run(act)


def test_output_may_be_changed_after_it_was_yielded(job: Job) -> None:
    output = T.StructType().add("user", "string").add("all", T.ArrayType(T.LongType()))

    def act(p: Any, key: Any, rows: Any) -> Any:
        p.kept.append(ord(key[0]))
        if job.flavour == "pandas":
            frame = pd.DataFrame({"user": [key[0]], "all": [p.kept]})
            yield frame
            frame["user"] = "changed"
        elif job.flavour == "rows":
            yield Row(user=key[0], all=p.kept)
        else:
            yield (key[0], p.kept)

    found = job.run(act, "abc", output=output)
    assert sorted(found) == [("a", [97]), ("b", [97, 98]), ("c", [97, 98, 99])]
