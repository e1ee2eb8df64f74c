"""Which kinds of processors an operator takes, and who finds out what states they have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from statebackend.api.arrow import ArrowProcessor
from statebackend.api.processors import BroadcastProcessor, CoProcessor, KeyedProcessor
from statebackend.errors import SettingError
from statebackend.operators.arrow_calls import record_arrow_states
from statebackend.operators.declared_states import Declarations
from statebackend.operators.processor_calls import record_keyed_states
from statebackend.operators.stateful_processor_calls import record_states

__all__ = ["flavour_of", "recorder"]

_RECORDS: Final[tuple[tuple[type, str], ...]] = (
    (KeyedProcessor, "keyed"),
    (ArrowProcessor, "arrow"),
    (StatefulProcessor, "rows"),
)


def flavour_of(processor: Any, wanted: str) -> str:
    """Which of the plans' flavours a processor is of.

    Args:
        wanted: ``"rows"`` or ``"pandas"``, as the user said.

    Raises:
        SettingError: it is no processor of one input, or not of that flavour.
    """
    if wanted not in ("rows", "pandas"):
        raise SettingError(
            f"The flavour is {wanted!r}.", todo="Give flavour='rows' or flavour='pandas'."
        )
    if wanted == "pandas":
        if isinstance(processor, StatefulProcessor):
            return wanted
        raise SettingError(
            f"flavour='pandas' was given with a {type(processor).__name__}.",
            todo="Leave it out: it is for Spark's StatefulProcessor.",
        )
    for kind, flavour in _RECORDS:
        if isinstance(processor, kind):
            return flavour
    if isinstance(processor, CoProcessor | BroadcastProcessor):
        raise SettingError(
            f"{type(processor).__name__} takes two inputs.",
            todo="Use connect() or connect_broadcast() before process().",
        )
    raise SettingError(
        f"The processor is a {type(processor).__name__}.",
        todo="Give a KeyedProcessor, an ArrowProcessor or a StatefulProcessor.",
    )


def recorder(flavour: str) -> Callable[[Any, str, str], Declarations]:
    """What finds out the states of a processor of a flavour, by (a copy, uid, time mode)."""
    if flavour == "arrow":
        return lambda copy, uid, mode: record_arrow_states(copy, uid, time_mode=mode)
    if flavour in ("rows", "pandas"):
        return lambda copy, uid, mode: record_states(copy, uid, time_mode=mode)
    return lambda copy, uid, mode: record_keyed_states(copy, uid, time_mode=mode, flavour=flavour)
