"""The contexts that processors are really given.

The driver's records which states ``open`` asks for, and refuses mistakes; a worker's hands out the
cells themselves, so that a call on a state goes through no layer of ours.
"""

from __future__ import annotations

from typing import Any, cast

from statebackend.api.context import ProcessorContext
from statebackend.api.state_protocols import Timers
from statebackend.errors import SettingError, UsageError
from statebackend.operators.declared_states import (
    OPERATOR_KINDS,
    Declarations,
    EpochState,
    EpochTimes,
    Unbound,
    rehearsed,
)
from statebackend.state.folding_cells import AggregatingCell, ReducingCell
from statebackend.state.operator_state import BROADCAST
from statebackend.state.ttl_cells import TTL

__all__ = ["RecordingContext", "WorkerContext", "outside_open"]


def outside_open(name: str, uid: str) -> UsageError:
    """Says that a state was asked for when the processor had opened."""
    return UsageError(
        f"State {name!r} of operator {uid!r} was asked for outside open().",
        todo="Ask for states in open(ctx), keep them as attributes, and use those.",
    )


# --- on the driver -----------------------------------------------------------------------------


class RecordingContext(ProcessorContext):
    """Notes which states ``open`` asks for.

    Args:
        broadcast: the processor may have broadcast state.
    """

    def __init__(
        self, declarations: Declarations, uid: str, time_mode: str, *, broadcast: bool = False
    ) -> None:
        timers = None if time_mode == "none" else cast(Timers, Unbound("timers", "open"))
        super().__init__(uid, EpochTimes(), time_mode, timers)
        self._to, self._broadcast = declarations, broadcast

    def _state(
        self,
        kind: str,
        name: str,
        schema: Any,
        key_schema: Any = None,
        *,
        ttl: TTL | None,
        fold: tuple[Any, ...] = (),
    ) -> Any:
        return self.record(kind, name, schema, key_schema, ttl=ttl)

    def record(
        self, kind: str, name: str, schema: Any, key_schema: Any = None, *, ttl: TTL | None
    ) -> Any:
        """Note a state; what stands for it can be kept, not used (one without a key: is empty).

        Raises:
            SettingError, UsageError, StateMismatchError, SchemaError: a wrong declaration.
        """
        if ttl is not None and not isinstance(ttl, TTL):
            raise SettingError(
                f"State {name!r} of operator {self._uid!r} was given ttl={ttl!r}.",
                todo="Give a statebackend.TTL, such as TTL(ms=3_600_000).",
            )
        if kind == "map" and key_schema is None:
            raise UsageError(
                f"Map state {name!r} of operator {self._uid!r} has no key schema.",
                todo="Call ctx.map_state(name, key_schema, value_schema).",
            )
        if kind == BROADCAST and not self._broadcast:
            raise UsageError(
                f"Operator {self._uid!r} asks for broadcast state {name!r}, but nothing is "
                f"broadcast to it that could change it.",
                todo="Subclass BroadcastProcessor and use connect_broadcast(), or ask for "
                "operator_list().",
            )
        self._to.add(kind, name, schema, key_schema, ttl)
        if kind in OPERATOR_KINDS:
            return rehearsed(self._to.declared[name])
        return Unbound(f"state {name!r}", "open")


# --- in a worker -------------------------------------------------------------------------------


class WorkerContext(ProcessorContext):
    """Hands out the cells of the subtask's state, until the processor has opened."""

    def __init__(self, state: EpochState, uid: str, time_mode: str) -> None:
        super().__init__(uid, state.times, time_mode, state.timers)
        state.on_move(self._move)
        self._from: EpochState | None = state

    def opened(self) -> None:
        """From here on, asking for a state is refused."""
        self._from = None

    def _state(
        self,
        kind: str,
        name: str,
        schema: Any,
        key_schema: Any = None,
        *,
        ttl: TTL | None,
        fold: tuple[Any, ...] = (),
    ) -> Any:
        if self._from is None:
            raise outside_open(name, self._uid)
        if kind in OPERATOR_KINDS:
            return self._from.operator_state(name, kind)
        if not fold:
            return self._from.cell(name, kind)
        folding = ReducingCell if kind == "reducing" else AggregatingCell

        def make(*args: Any, **how: Any) -> Any:
            return folding(*args, *fold, **how)

        return self._from.cell(name, kind, {(kind, False): make, (kind, True): make})
