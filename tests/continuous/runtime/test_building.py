"""Building a job: what is refused, where it is said."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from statebackend.api.processors import CoProcessor, KeyedProcessor
from statebackend.continuous.sinks.collect_sink import CollectSink
from statebackend.errors import (
    DuplicateUidError,
    MaxParallelismChangedError,
    MissingUidError,
    ParallelismError,
    ProcessorError,
    SchemaError,
    SettingError,
    StateMismatchError,
    UsageError,
)
from tests.continuous.runtime.jobs import OUTPUT, Counting, Numbers
from tests.continuous.runtime.world import soon

if TYPE_CHECKING:
    from tests.continuous.runtime.world import World


class Broken(KeyedProcessor):
    def open(self, ctx: Any) -> None:
        raise ValueError("at open")

    def process(self, key: Any, rows: Any, ctx: Any) -> None:
        return None


class Both(CoProcessor):
    def process_left(self, key: Any, rows: Any, ctx: Any) -> None:
        return None

    def process_right(self, key: Any, rows: Any, ctx: Any) -> None:
        return None


def process(world: World, **given: Any) -> Any:
    args = {"processor": Counting(), "uid": "count", "output_schema": OUTPUT, **given}
    keyed = world.source(args.pop("source", None) or Numbers(10)).key_by("key")
    return keyed.process(args.pop("processor"), **args)


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"uid": ""}, SettingError, "name"),
        ({"uid": "source"}, DuplicateUidError, "source"),
        ({"processor": Both()}, SettingError, "two inputs"),
        ({"processor": object()}, SettingError, "object"),
        ({"flavour": "pandas"}, SettingError, "Counting"),
        ({"flavour": "polars"}, SettingError, "polars"),
        ({"processor": Broken()}, ProcessorError, "at open"),
        ({"output_schema": "n BIGIN"}, SchemaError, "does not parse"),
        ({"time_mode": "wall"}, SettingError, "wall"),
        ({"time_mode": "event"}, SettingError, "no watermark"),
        ({"event_time": "at"}, SettingError, "time_mode='none'"),
        (
            {
                "source": Numbers(10, event_time="at"),
                "time_mode": "event",
                "event_time": "value",
            },
            SchemaError,
            "timestamps",
        ),
    ],
)
def test_a_mistake_is_refused_at_the_call(
    world: World, given: dict[str, Any], error: type[UsageError], said: str
) -> None:
    with pytest.raises(error, match=said):
        process(world, **given)


@pytest.mark.parametrize("columns", [(), ("key", "key"), ("nothing",)])
def test_a_key_must_be_of_columns_that_are_there(world: World, columns: tuple[str, ...]) -> None:
    stream = world.source(Numbers(10))
    with pytest.raises(SchemaError):
        stream.key_by(*columns)


def test_names_are_given_once(world: World) -> None:
    stream = world.source(Numbers(10))
    with pytest.raises(DuplicateUidError):
        world.source(Numbers(10))
    stream.sink(CollectSink())
    with pytest.raises(DuplicateUidError):
        stream.sink(CollectSink())


def test_a_job_without_a_sink_is_not_started(world: World) -> None:
    process(world)
    with pytest.raises(SettingError, match="no sink"):
        world.start()


@pytest.mark.parametrize(
    "options",
    [
        {"checkpoint_interval_s": 0},
        {"min_pause_s": -1},
        {"max_share": 0},
        {"max_concurrent": 0},
        {"timeout_s": 0},
        {"mode": "sometimes"},
        {"buffer_timeout_s": -1},
        {"tolerable_failures": -1},
    ],
)
def test_settings_out_of_range_are_refused(world: World, options: dict[str, Any]) -> None:
    process(world).sink(CollectSink())
    with pytest.raises(SettingError):
        world.start(2, **options)


def test_an_unknown_setting_is_refused_by_its_name(world: World) -> None:
    stream = process(world).sink(CollectSink())
    with pytest.raises(SettingError, match="chekpoint"):
        stream.start(parallelism=2, chekpoint=1)
    with pytest.raises(SettingError, match="and min_pause_s or max_share"):
        stream.start(parallelism=2, max_concurrent=2, max_share=0.5)


def test_a_job_goes_on_only_as_what_its_checkpoint_says_it_was(world: World) -> None:
    process(world, source=Numbers(None, rows_per_s=100)).sink(CollectSink())
    query = world.start(2)
    soon(lambda: query.epoch is not None)
    assert query.stop()

    world.renew()
    process(world, uid="other").sink(CollectSink())
    with pytest.raises(MissingUidError, match="count"):
        world.start(2)

    class Other(Counting):
        def open(self, ctx: Any) -> None:
            self._state = ctx.value_state("others", "n BIGINT")

    world.renew()
    process(world, processor=Other()).sink(CollectSink())
    with pytest.raises(StateMismatchError, match="counts"):
        world.start(2)

    world.renew(max_parallelism=64)
    process(world).sink(CollectSink())
    with pytest.raises(MaxParallelismChangedError):
        world.start(2)

    world.renew()
    process(world).sink(CollectSink())
    with pytest.raises(ParallelismError):
        world.start(1000)
