"""Building a job: what is refused, where it is said."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from statebackend.api.processors import CoProcessor, KeyedProcessor
from statebackend.continuous.driver.takeover import default_parallelism
from statebackend.continuous.job.job_options import RunOptions
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


@pytest.mark.parametrize("interval", ["10 seconds", "10s", 10, timedelta(seconds=10)])
def test_an_interval_may_have_the_forms_that_sparks_have(interval: Any) -> None:
    options = RunOptions.given(
        checkpoint_interval=interval, timeout_s="2 minutes", buffer_bytes="64k", silence_s=5
    )
    assert options == RunOptions(
        checkpoint_interval_s=10.0, timeout_s=120.0, buffer_bytes=65536, silence_s=5.0
    )
    assert RunOptions.given(checkpoint_interval=None).checkpoint_interval_s is None
    assert RunOptions.given() == RunOptions()


@pytest.mark.parametrize("interval", ["soon", "0 seconds", -1, True])
def test_an_interval_that_is_none_is_refused(world: World, interval: Any) -> None:
    stream = process(world).sink(CollectSink())
    with pytest.raises(SettingError, match="interval"):
        stream.start(checkpoint_interval=interval)


def test_the_intervals_name_of_earlier_releases_is_taken_with_a_warning(world: World) -> None:
    with pytest.warns(DeprecationWarning, match="called checkpoint_interval= now"):
        assert RunOptions.given(checkpoint_interval_s=5).checkpoint_interval_s == 5.0
    warned = pytest.warns(DeprecationWarning, match="called")
    with warned, pytest.raises(SettingError, match="one argument"):
        RunOptions.given(checkpoint_interval="1 second", checkpoint_interval_s=5)


def test_a_start_that_names_no_parallelism_takes_the_backends_or_the_jobs(world: World) -> None:
    process(world, source=Numbers(None, rows_per_s=100)).sink(CollectSink())
    assert default_parallelism(world.flow.setup) == 1, "nobody says it, and there is no Spark"
    query = world.start(2)
    soon(lambda: query.epoch is not None)
    assert query.stop()
    world.renew()
    setup = world.flow.setup
    assert default_parallelism(setup) == 2, "the job's"
    assert default_parallelism(replace(setup, settings=replace(setup.settings, parallelism=3))) == 3


def test_a_processor_runs_in_a_time_mode_by_sparks_name(world: World) -> None:
    process(world, time_mode="ProcessingTime")
    assert world.flow.operations["count"].plan.time_mode == "processing"
    world.renew()
    with pytest.raises(SettingError, match="'sometimes'"):
        process(world, time_mode="sometimes")


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
