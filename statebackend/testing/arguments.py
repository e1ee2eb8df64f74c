"""What a processor's tester is made with: which kind it tests, in which time mode, from where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import Row

from statebackend.api.arrow import ArrowProcessor
from statebackend.api.processors import BroadcastProcessor, CoProcessor, KeyedProcessor
from statebackend.errors import SettingError, UsageError
from statebackend.operators.errors.spark_errors import (
    ExtractorMissingError,
    NotForwardError,
    TesterUseError,
    UnknownModeError,
)
from statebackend.operators.processor_calls import has_initial

__all__ = [
    "check_forward",
    "check_kind",
    "flavour_of",
    "initial_items",
    "mode_of",
    "refuse_flavour",
]

_MODES: Final = {
    "none": "none",
    "processingtime": "processing",
    "processing": "processing",
    "eventtime": "event",
    "event": "event",
}
_OUTPUT_MODES: Final = ("append", "update", "complete")
_VERBS: Final = {
    "arrow": ("takes record batches", "testBatch(batch)"),
    "sides": ("has two inputs", "testSides(key, left=..., right=...)"),
    "broadcast": ("takes rows of a key, and rules", "test(key, rows), or testBroadcast(rules)"),
    "keyed": ("has one input: rows, not DataFrames", "test(key, rows)"),
    "rows": ("has one input: rows, or DataFrames", "test(key, rows), or testInPandas(key, frame)"),
}


def mode_of(time_mode: str, output_mode: str) -> str:
    """The time mode by our name.

    Raises:
        UnknownModeError: one of them is none of Spark's.
    """
    mode = _MODES.get(str(time_mode).lower(), "")
    if not mode or str(output_mode).lower() not in _OUTPUT_MODES:
        raise UnknownModeError(
            f"timeMode={time_mode!r}, outputMode={output_mode!r} are no modes of Spark's.",
            todo="Give timeMode None, ProcessingTime or EventTime, and outputMode append, update "
            "or complete.",
        )
    return mode


def flavour_of(processor: Any) -> str:
    """Of which kind a processor is (see ``OperatorPlan``)."""
    if isinstance(processor, StatefulProcessor):
        return "rows"
    if isinstance(processor, ArrowProcessor):
        return "arrow"
    if isinstance(processor, BroadcastProcessor):
        return "broadcast"
    return "sides" if isinstance(processor, CoProcessor) else "keyed"


def check_kind(
    flavour: str, mode: str, of_rows: tuple[Any, Any, Any], of_batches: tuple[Any, Any]
) -> None:
    """Refuse arguments that are for processors of another kind.

    Args:
        of_rows: the extractor of event times, the initial states of rows and of frames.
        of_batches: the column of event times, the initial state.

    Raises:
        SettingError: there are such arguments, or no event time in event time.
    """
    batches = flavour == "arrow"
    if any(one is not None for one in (of_rows if batches else of_batches)):
        raise SettingError(
            "Arguments were given that are for processors of another kind.",
            todo="Give eventTime= and initialStateBatch= with an ArrowProcessor, and with others "
            "eventTimeExtractor=, initialStateRow= or initialStatePandas=.",
        )
    column = of_batches[0]
    if batches and (mode == "event") != (column is not None):
        raise SettingError(
            f"An ArrowProcessor was given eventTime={column!r} in time mode {mode!r}.",
            todo="Give eventTime=, the name of a timestamp column, in event time only.",
        )
    if mode == "event" and not batches and of_rows[0] is None:
        raise ExtractorMissingError(
            "eventTimeExtractor is missing in event time.",
            todo="Give a function from a row to its event time in milliseconds.",
        )


def refuse_flavour(processor: Any) -> UsageError:
    """The error for a verb that is for processors of another kind."""
    takes, call = _VERBS[flavour_of(processor)]
    return UsageError(f"A {type(processor).__bases__[0].__name__} {takes}.", todo=f"Call {call}.")


def initial_items(
    processor: Any,
    rows: Sequence[tuple[Any, Row]] | None,
    frames: Sequence[tuple[Any, Any]] | None,
) -> list[tuple[Any, Any]]:
    """The initial state, what one key has in one item.

    Raises:
        UsageError: it is given twice, or to a processor that does not take it.
    """
    if rows is not None and frames is not None:
        raise TesterUseError(
            "Cannot specify both Row and Pandas initial states.", todo="Give one of them."
        )
    keyed = isinstance(processor, KeyedProcessor | CoProcessor | BroadcastProcessor)
    if frames is not None and keyed:
        raise SettingError(
            "initialStatePandas was given for a processor of rows.", todo="Give initialStateRow."
        )
    if (rows or frames) and keyed and not has_initial(processor):
        raise UsageError(
            f"There is an initial state, but {type(processor).__name__} has no on_initial().",
            todo="Define on_initial(self, key, rows, ctx).",
        )
    by_key: dict[Any, list[Any]] = {}
    for key, what in [*(rows or ()), *(frames or ())]:
        by_key.setdefault(key, []).append(what)
    return [(key, iter(some)) for key, some in by_key.items()]


def check_forward(what: str, now_ms: int, next_ms: int) -> None:
    """Refuse a time that is not later.

    Raises:
        NotForwardError: it goes back, or stands still.
    """
    if next_ms <= now_ms:
        raise NotForwardError(
            f"{what} must move forward: it is {now_ms} ms, and was set to {next_ms} ms.",
            todo="Give a later time.",
        )
