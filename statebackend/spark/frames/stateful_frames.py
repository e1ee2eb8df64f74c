"""The ways to make a frame with state: what a `StateBackend` is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import StructType

from statebackend.api.arrow import ArrowProcessor
from statebackend.operators.aggregate.windows import Window
from statebackend.operators.arrow_calls import record_arrow_states
from statebackend.operators.processor_calls import record_keyed_states
from statebackend.operators.stateful_processor_calls import record_states
from statebackend.settings import Settings
from statebackend.spark.frames.aggregate_arguments import emitted_in, window_of
from statebackend.spark.frames.aggregate_frame import aggregated
from statebackend.spark.frames.broadcast_input import check_rules
from statebackend.spark.frames.frame_builder import FrameBuilder, OperatorCall
from statebackend.spark.frames.grouped_input import grouped_input, key_names
from statebackend.spark.frames.spark_arguments import (
    check_flavour,
    check_processor,
    either,
    uid_of,
)
from statebackend.spark.frames.two_input_frames import united_sides
from statebackend.spark.session_settings import keeps_avro

if TYPE_CHECKING:
    from pyspark.sql import Column, GroupedData
    from pyspark.sql.pandas._typing import PandasGroupedMapFunctionWithState

    from statebackend.api.processors import BroadcastProcessor, CoProcessor, KeyedProcessor

__all__ = ["FrameMaker"]


class FrameMaker:
    """Makes frames, each with one stateful operator.

    Arguments that several methods have:

    ``uid`` is the operator's name for the life of the job: state is found by it. ``event_time`` is
    the timestamp column whose maximum makes the watermark, and by which rows are late; where
    Spark's ``withWatermark`` was called on the frame, it is that column. ``watermark_delay`` says
    how far the watermark stays behind, as ``withWatermark`` takes it; without one the operator
    takes the job's watermark, which others make. ``initial_state`` is a static frame with the key
    columns, or what its ``groupBy`` gave; it is handed to the processor in the operator's first
    epoch. ``eventTimeColumnName`` is the output's timestamp column that operators behind this one,
    ours and Spark's, take for event time.
    """

    _builder: FrameBuilder
    _settings: Settings

    def transform_with_state(
        self,
        grouped: GroupedData | DataFrame,
        statefulProcessor: StatefulProcessor | None = None,
        outputStructType: StructType | str | None = None,
        outputMode: str | None = None,
        timeMode: str | None = None,
        initialState: DataFrame | GroupedData | None = None,
        eventTimeColumnName: str = "",
        *,
        keys: str | list[str] | None = None,
        processor: StatefulProcessor | None = None,
        output_schema: StructType | str | None = None,
        uid: str | None = None,
        flavour: str = "rows",
        time_mode: str | None = None,
        event_time: str | None = None,
        watermark_delay: str | timedelta | None = None,
        initial_state: DataFrame | GroupedData | None = None,
    ) -> DataFrame:
        """Spark's ``transformWithState``, with its state in this backend.

        The arguments up to ``eventTimeColumnName`` are Spark's, in Spark's order. ``processor``,
        ``output_schema``, ``time_mode`` and ``initial_state`` are other names of them.

        Args:
            grouped: what ``groupBy`` gave, or a frame with ``keys``. Static rows go through once.
            statefulProcessor: any of Spark's, unmodified. outputStructType: of its rows.
            outputMode: as Spark takes it; what counts is the query's own.
            timeMode: ``"none"`` (the default), ``"processing"`` or ``"event"``, or Spark's names.
            uid: default: the processor's class. flavour: ``"rows"`` or ``"pandas"`` (DataFrames).

        Returns:
            a streaming frame, to be started with :meth:`write_stream`; of a static one, a static.

        Raises:
            UsageError: (one of its kinds) whatever is wrong with the arguments or the processor.
            StorageError: the job is known, and its store cannot be reached.
        """
        df, names, shown = grouped_input(grouped, keys)
        check_flavour(flavour, outputMode)
        made = either(statefulProcessor, processor, "statefulProcessor", "processor")
        check_processor(made)
        output = either(outputStructType, output_schema, "outputStructType", "output_schema")
        mode = either(timeMode, time_mode, "timeMode", "time_mode", default="none")
        initial = either(initialState, initial_state, "initialState", "initial_state", default=None)
        (name, of), avro = uid_of(uid, made), df.isStreaming and keeps_avro(df)
        call = OperatorCall(
            names=names,
            processor=made,
            record=lambda copy, mode: record_states(copy, name, time_mode=mode, nullable_only=avro),
            output_schema=output,
            uid=name,
            named_after=of,
            flavour=flavour,
            shown=shown,
            time=_time(mode, event_time, watermark_delay, eventTimeColumnName),
            initial_state=initial,
        )
        return self._builder.build(df, call)

    def transform_with_state_in_pandas(
        self,
        grouped: GroupedData | DataFrame,
        statefulProcessor: StatefulProcessor | None = None,
        outputStructType: StructType | str | None = None,
        *given: Any,
        **named: Any,
    ) -> DataFrame:
        """Spark's ``transformWithStateInPandas``: :meth:`transform_with_state` with DataFrames."""
        return self.transform_with_state(
            grouped, statefulProcessor, outputStructType, *given, flavour="pandas", **named
        )

    def apply_in_pandas_with_state(
        self,
        grouped: GroupedData | DataFrame,
        func: PandasGroupedMapFunctionWithState,
        outputStructType: StructType | str,
        stateStructType: StructType | str,
        outputMode: str,
        timeoutConf: str,
        *,
        uid: str | None = None,
        keys: str | list[str] | None = None,
        event_time: str | None = None,
        watermark_delay: str | timedelta | None = None,
    ) -> DataFrame:
        """Spark's ``applyInPandasWithState`` with state kept here.

        Args:
            grouped: what ``groupBy`` of a streaming frame gave, or the frame, with ``keys=``.
            func: called as ``func(key, frames, state)`` for each key with rows in a micro-batch,
                and then for each key whose timeout is over: a function for Spark, unmodified.
            outputStructType: of the rows in the DataFrames that it yields.
            stateStructType: of the tuple that ``state`` holds.
            outputMode: ``"append"`` or ``"update"``, in any case: the query's own, as in Spark.
            timeoutConf: ``"NoTimeout"``, ``"ProcessingTimeTimeout"`` or ``"EventTimeTimeout"``.
            uid: default: the function's name. keys: names, of a frame that is not grouped.
            event_time: as above. watermark_delay: as above. Timeouts in event time need them, and
                drop rows behind; otherwise they are only what ``getCurrentWatermarkMs`` gives.

        Raises:
            as :meth:`transform_with_state`.
        """
        # It imports pandas, which other operators do without.
        from statebackend.spark.frames.group_state_frame import function_frame

        name, of = uid_of(uid, func)
        made = function_frame(
            grouped,
            func,
            outputStructType,
            stateStructType,
            outputMode,
            timeoutConf,
            keys=keys,
            uid=name,
            event_time=event_time,
            watermark_delay=watermark_delay,
            quick_frames=bool(self._settings.quick_frames),
        )
        call = OperatorCall(
            names=made.names,
            processor=made.processor,
            record=lambda copy, mode: record_arrow_states(copy, name, time_mode=mode),
            output_schema=made.output_schema,
            uid=name,
            named_after=of,
            flavour="arrow",
            time=made.time,
            output_mode=str(outputMode).lower(),
        )
        return self._builder.build(made.frame, call)

    def process(
        self,
        df: DataFrame,
        *,
        keys: str | list[str],
        processor: KeyedProcessor,
        output_schema: StructType | str,
        uid: str,
        time_mode: str = "none",
        event_time: str | None = None,
        watermark_delay: str | timedelta | None = None,
        initial_state: DataFrame | GroupedData | None = None,
        eventTimeColumnName: str = "",
    ) -> DataFrame:
        """A `KeyedProcessor` on ``df``; the rest is as for `transform_with_state`."""
        call = OperatorCall(
            names=key_names(df, keys, static=True),
            processor=processor,
            record=lambda copy, mode: record_keyed_states(
                copy, uid, time_mode=mode, flavour="keyed"
            ),
            output_schema=output_schema,
            uid=uid,
            flavour="keyed",
            time=_time(time_mode, event_time, watermark_delay, eventTimeColumnName),
            initial_state=initial_state,
        )
        return self._builder.build(df, call)

    def transform_arrow(
        self,
        df: DataFrame,
        *,
        keys: str | list[str],
        processor: ArrowProcessor,
        output_schema: StructType | str,
        uid: str,
        time_mode: str = "none",
        event_time: str | None = None,
        watermark_delay: str | timedelta | None = None,
        initial_state: DataFrame | GroupedData | None = None,
        eventTimeColumnName: str = "",
    ) -> DataFrame:
        """An `ArrowProcessor` on ``df``: whole batches in, whole columns of state out.

        Arguments and errors are those of `transform_with_state`.
        """
        call = OperatorCall(
            names=key_names(df, keys, static=True),
            processor=processor,
            record=lambda copy, mode: record_arrow_states(copy, uid, time_mode=mode),
            output_schema=output_schema,
            uid=uid,
            flavour="arrow",
            time=_time(time_mode, event_time, watermark_delay, eventTimeColumnName),
            initial_state=initial_state,
        )
        return self._builder.build(df, call)

    def aggregate(
        self,
        df: GroupedData | DataFrame,
        *,
        keys: str | list[str] | None = None,
        aggregations: Mapping[str, Any] | None = None,
        uid: str | None = None,
        window: Window | Column | None = None,
        event_time: str | None = None,
        watermark_delay: str | timedelta | None = None,
        emit: str | None = None,
        outputMode: str | None = None,
        **named: Any,
    ) -> DataFrame:
        """Counts, sums and other aggregates by key, in windows of event time if you like.

        Args:
            df: what ``groupBy`` of a streaming frame gave, or the frame, with ``keys``.
            named: an output column, and what is in it, as Spark SQL has it: ``n="count"``,
                ``(function, column)`` with sum, min, max, mean, variance, stddev, count, first,
                last, count_distinct or approx_count_distinct, or a function of
                `statebackend.operators.aggregate.functions`, such as ``top_k("page", 10)``.
            aggregations: more of them, as a dict. uid: default: "aggregate".
            window: ``F.window(...)``, ``F.session_window(...)``; or ``tumbling("10 minutes")``,
                ``sliding("10 minutes", "5 minutes")``, ``session("30 minutes")``.
            event_time: the timestamp column of the windows. A row is late if its window is closed.
            watermark_delay: how far the watermark stays behind. It closes the windows.
            outputMode: ``"update"`` (the default): a row for each key (and window) of an epoch.
                ``"append"``: one for each window, once closed. ``emit``: "updates" or "closed".

        Returns:
            the keys, ``window_start`` and ``window_end`` with windows, and the aggregations.

        Raises:
            as :meth:`transform_with_state`.
        """
        given = grouped_input(df, keys)
        name, of = ("aggregate", "method") if uid is None else (uid, "")
        names = key_names(given.frame, given.names)
        made = aggregated(
            given.frame,
            keys=names,
            aggregations={**(aggregations or {}), **named},
            window=window_of(window, event_time),
            watermark_delay=watermark_delay,
            emit=emitted_in(emit, outputMode),
        )
        call = OperatorCall(
            names=names,
            processor=made.processor,
            record=lambda copy, mode: record_arrow_states(copy, name, time_mode=mode),
            output_schema=made.output_schema,
            uid=name,
            named_after=of,
            flavour="arrow",
            time=made.time,
            early=made.early,
        )
        return self._builder.build(made.frame, call)

    def connect(
        self,
        left: DataFrame,
        right: DataFrame,
        *,
        keys: str | list[str],
        right_keys: str | list[str] | None = None,
        processor: CoProcessor,
        output_schema: StructType | str,
        uid: str,
        time_mode: str = "none",
        event_time: str | None = None,
        watermark_delay: str | timedelta | None = None,
        initial_state: DataFrame | GroupedData | None = None,
    ) -> DataFrame:
        """Two streams with one keyed state: a `CoProcessor` sees both.

        The other arguments, and the errors, are those of `transform_with_state`.

        Args:
            left: a streaming frame.
            right: another one.
            keys: of ``left``, and of ``right`` too unless ``right_keys`` says otherwise.
            event_time: a column of both sides, or of one; rows of the other are never late.
            initial_state: with the key columns of ``left``.
        """
        left_names = key_names(left, keys)
        right_names = key_names(right, keys if right_keys is None else right_keys)
        both, names, moment = united_sides(
            left, right, left_keys=left_names, right_keys=right_names, event_time=event_time
        )
        # A watermark goes by the side that is behind, where both have the column.
        measured = 0 if event_time in left.columns and event_time in right.columns else None
        call = OperatorCall(
            names=names,
            processor=processor,
            record=lambda copy, mode: record_keyed_states(
                copy, uid, time_mode=mode, flavour="sides"
            ),
            output_schema=output_schema,
            uid=uid,
            flavour="sides",
            time={**_time(time_mode, moment, watermark_delay), "side_position": measured},
            initial_state=initial_state,
            initial_names=left_names,
            sides=(left.schema, right.schema),
        )
        return self._builder.build(both, call)

    def connect_broadcast(
        self,
        data: DataFrame,
        rules: DataFrame,
        *,
        keys: str | list[str],
        processor: BroadcastProcessor,
        output_schema: StructType | str,
        uid: str,
        time_mode: str = "none",
        event_time: str | None = None,
        watermark_delay: str | timedelta | None = None,
        initial_state: DataFrame | GroupedData | None = None,
    ) -> DataFrame:
        """A stream with keys, and one of few rows that every subtask sees, each in one order.

        The rows of ``rules`` in a micro-batch come before those of ``data`` in it. A
        `BroadcastProcessor` sees both. The other arguments, and the errors, are those of
        `transform_with_state`.

        Args:
            data: a streaming frame.
            rules: a streaming frame; each of its rows goes to every subtask.
            keys: of ``data``.
            event_time: a column of ``data``; rules have no event time, and are never late.
            initial_state: with the key columns of ``data``.
        """
        check_rules(rules)
        call = OperatorCall(
            names=key_names(data, keys),
            processor=processor,
            record=lambda copy, mode: record_keyed_states(
                copy, uid, time_mode=mode, flavour="broadcast"
            ),
            output_schema=output_schema,
            uid=uid,
            flavour="broadcast",
            time=_time(time_mode, event_time, watermark_delay),
            initial_state=initial_state,
            rules=rules,
        )
        return self._builder.build(data, call)


def _time(
    mode: str, event_time: str | None, watermark_delay: Any, goes_on: str = ""
) -> dict[str, Any]:
    return {
        "time_mode": mode,
        "event_time": event_time,
        "watermark_delay": watermark_delay,
        "goes_on": goes_on,
    }
