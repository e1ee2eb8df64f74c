"""Processors of our own in the epoch: the calls into them."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from types import GeneratorType
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.types import Row

from statebackend.api.processors import BroadcastProcessor, CoProcessor, KeyedProcessor
from statebackend.errors import ProcessorError, UsageError, ValueMismatchError
from statebackend.operators.declared_states import Declarations, EpochState
from statebackend.operators.errors.user_errors import call_once
from statebackend.operators.operator_plan import Calls, OperatorPlan
from statebackend.operators.processor_contexts import RecordingContext, WorkerContext
from statebackend.operators.two_input_rows import Side, SidePiece, Sides

__all__ = [
    "check_shape",
    "has_initial",
    "processor_calls",
    "record_keyed_states",
]

Key = tuple[Any, ...]
Processor = KeyedProcessor | CoProcessor | BroadcastProcessor

# What a processor defines, and how many arguments each is called with.
_KEYED: Final = {"open": 1, "process": 3, "on_timer": 3, "on_initial": 3, "close": 0}
_SIDES: Final = {
    "open": 1, "process_left": 3, "process_right": 3, "on_timer": 3, "on_initial": 3, "close": 0,
}  # fmt: skip
_KINDS: Final = {
    "keyed": KeyedProcessor, "sides": CoProcessor, "broadcast": BroadcastProcessor,
}  # fmt: skip
_BROADCAST: Final = {**_KEYED, "process_broadcast": 2}


# --- on the driver -----------------------------------------------------------------------------


def record_keyed_states(
    processor: Any, uid: str, *, time_mode: str = "none", flavour: str = ""
) -> Declarations:
    """What states a processor's ``open`` asks for; give it a copy, which is used up.

    Args:
        flavour: keyed, sides or broadcast: the processor must be of that kind.

    Raises:
        ProcessorError: ``open`` raised, or a method takes other arguments.
        SchemaError, UnsupportedTypeError, StateMismatchError: a state's declaration.
        UsageError: no processor of ours, or a use that can only fail later.
    """
    _check_shape(processor, uid, flavour)
    declarations = Declarations(uid)
    broadcast = isinstance(processor, BroadcastProcessor)
    ctx = RecordingContext(declarations, uid, time_mode, broadcast=broadcast)
    call_once(uid, "open", lambda: processor.open(ctx))
    return declarations


def has_initial(processor: Processor) -> bool:
    """Whether it can take in an initial state."""
    return type(processor).on_initial is not KeyedProcessor.on_initial  # one for all


def _check_shape(processor: Any, uid: str, flavour: str) -> None:
    methods = _SIDES if isinstance(processor, CoProcessor) else _KEYED
    if isinstance(processor, BroadcastProcessor):
        methods = _BROADCAST
    check_shape(
        processor,
        uid,
        methods,
        _KINDS.get(flavour, Processor),
        todo="A KeyedProcessor goes to process(), a CoProcessor to connect(), a BroadcastProcessor "
        "to connect_broadcast(), a StatefulProcessor to transform_with_state().",
    )


def check_shape(
    processor: Any, uid: str, methods: Mapping[str, int], kinds: Any, *, todo: str
) -> None:
    """Refuse what is no processor of these kinds, and methods that cannot be called.

    Args:
        methods: how many arguments each is called with.

    Raises:
        UsageError: another object, or a class. ProcessorError: a method takes other arguments.
    """
    if isinstance(processor, type):
        raise UsageError(
            f"Operator {uid!r} was given the class {processor.__name__}, not a processor.",
            todo=f"Give an object: {processor.__name__}(...).",
        )
    if not isinstance(processor, kinds):
        raise UsageError(
            f"Operator {uid!r} was given a {type(processor).__name__} as its processor.", todo=todo
        )
    for name, count in methods.items():
        try:
            signature = inspect.signature(getattr(processor, name))
        except ValueError:
            continue
        try:
            signature.bind(*range(count))
        except TypeError as error:
            raise ProcessorError(
                f"{type(processor).__name__}.{name}{signature} of operator {uid!r} cannot be "
                f"called with {count} arguments ({error}).",
                todo="Take the arguments that the base class's method takes.",
            ) from error


# --- in a worker -------------------------------------------------------------------------------


def processor_calls(plan: OperatorPlan, processor: Any, state: EpochState) -> Calls:
    """One epoch's calls into a processor of flavour "keyed", "sides" or "broadcast"; opens it.

    Raises:
        ProcessorError: ``open`` raised.
        StateMismatchError: it asked for other states than on the driver.
    """
    calls: Callable[..., Calls] = SideCalls if plan.flavour == "sides" else KeyedCalls
    if plan.flavour == "broadcast":
        calls = BroadcastCalls
    return calls(processor, plan.uid, state, time_mode=plan.time_mode)


class _Calls:
    """What both flavours share."""

    def __init__(
        self, processor: Any, uid: str, state: EpochState, *, time_mode: str = "none"
    ) -> None:
        self._processor, self._uid = processor, uid
        self._ctx = ctx = WorkerContext(state, uid, time_mode)
        call_once(uid, "open", lambda: processor.open(ctx))
        ctx.opened()
        self._on_timer = processor.on_timer
        self._on_initial = processor.on_initial

    def initial(self, key: Key, rows: Iterator[Any]) -> None:
        """One key's initial state."""
        output = self._on_initial(key, rows, self._ctx)
        if output is not None:
            raise ValueMismatchError(
                f"on_initial() of operator {self._uid!r}'s processor returned a "
                f"{type(output).__name__}.",
                todo="It gives no output: write to state only, without yield and return.",
            )

    def timer(self, key: Key, at_ms: int) -> Iterable[Any] | None:
        """One key's timer."""
        output = self._on_timer(key, at_ms, self._ctx)
        return output if type(output) in _QUICK else self._checked("on_timer", output)

    def close(self) -> None:
        """Call the processor's ``close``."""
        call_once(self._uid, "close", self._processor.close)

    def _checked(self, method: str, output: Any) -> Iterable[Any]:
        """What is no generator, list or None: other iterables, and the usual mistakes."""
        if isinstance(output, str | bytes | dict | Row) or not isinstance(output, Iterable):
            wrong = True
        else:
            wrong = isinstance(output, tuple) and not all(isinstance(one, tuple) for one in output)
        if wrong:
            raise ValueMismatchError(
                f"{method}() of operator {self._uid!r}'s processor returned {output!r}, which is "
                f"no iterable of rows{_defined(self._processor, method)}.",
                todo="Return a list of tuples, or yield one tuple per row.",
            )
        return output  # type: ignore[no-any-return]


def _defined(processor: Any, method: str) -> str:
    """Where a method begins: nothing of what it returned leads back to it."""
    code = getattr(getattr(processor, method), "__code__", None)
    return "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"


_QUICK: Final = frozenset({GeneratorType, list, type(None)})


class KeyedCalls(_Calls):
    """One epoch's calls into a :class:`KeyedProcessor`."""

    def __init__(
        self, processor: Any, uid: str, state: EpochState, *, time_mode: str = "none"
    ) -> None:
        super().__init__(processor, uid, state, time_mode=time_mode)
        self._process = processor.process

    def rows(self, key: Key, rows: Iterator[Any]) -> Iterable[Any] | None:
        """One key's input."""
        output = self._process(key, rows, self._ctx)
        return output if type(output) in _QUICK else self._checked("process", output)


class BroadcastCalls(KeyedCalls):
    """One epoch's calls into a :class:`BroadcastProcessor`."""

    def __init__(
        self, processor: Any, uid: str, state: EpochState, *, time_mode: str = "none"
    ) -> None:
        super().__init__(processor, uid, state, time_mode=time_mode)
        self._gate = state.operator.gate

    def broadcast(self, rows: Iterator[Row]) -> None:
        """The epoch's rows that go to every subtask.

        Raises:
            ProcessorError, UsageError: the user's code raised, or gave output.
        """
        self._gate.is_open = True
        try:
            call_once(self._uid, "process_broadcast", lambda: self._given(rows))
        finally:
            self._gate.is_open = False

    def _given(self, rows: Iterator[Row]) -> Any:
        output = self._processor.process_broadcast(rows, self._ctx)
        if output is None or isinstance(output, GeneratorType):
            return output  # of a generator nothing would run: refused by who calls this
        raise ValueMismatchError(
            f"process_broadcast() of operator {self._uid!r}'s processor returned a "
            f"{type(output).__name__}.",
            todo="It gives no output (every subtask would give it): write to broadcast state only.",
        )


class SideCalls(_Calls):
    """One epoch's calls into a :class:`CoProcessor`; its input is made by :class:`SideReader`."""

    def __init__(
        self, processor: Any, uid: str, state: EpochState, *, time_mode: str = "none"
    ) -> None:
        super().__init__(processor, uid, state, time_mode=time_mode)
        self._process_left = processor.process_left
        self._process_right = processor.process_right

    def rows(self, key: Key, rows: Any) -> Iterable[Any] | None:
        """One key's input: :class:`Sides`, or an iterator of pieces."""
        if type(rows) is not Sides:
            return self._pieces(key, rows)
        left, right = rows
        if not right:
            return self._left(key, iter(left))
        if not left:
            return self._right(key, iter(right))
        return self._both(key, left, right)

    def _left(self, key: Key, rows: Iterator[Row]) -> Iterable[Any] | None:
        output = self._process_left(key, rows, self._ctx)
        return output if type(output) in _QUICK else self._checked("process_left", output)

    def _right(self, key: Key, rows: Iterator[Row]) -> Iterable[Any] | None:
        output = self._process_right(key, rows, self._ctx)
        return output if type(output) in _QUICK else self._checked("process_right", output)

    def _both(self, key: Key, left: list[Row], right: list[Row]) -> Iterator[Any]:
        yield from self._left(key, iter(left)) or ()
        yield from self._right(key, iter(right)) or ()

    def _pieces(self, key: Key, pieces: Iterator[SidePiece]) -> Iterator[Any]:
        """A large key: its left rows are objects by the piece; its right ones wait as columns."""
        waiting: deque[tuple[Side, pa.Table]] = deque()

        def left_rows() -> Iterator[Row]:
            for piece in pieces:
                yield from piece.left()
                if piece.right_table.num_rows:
                    waiting.append((piece.reader.right, piece.right_table))

        def right_rows() -> Iterator[Row]:
            while waiting:
                side, table = waiting.popleft()
                yield from side.rows(table)

        left = left_rows()
        first = next(left, None)
        if first is not None:
            yield from self._left(key, chain((first,), left)) or ()
            for _ in left:  # what was not read: the right rows come by the same way
                pass
        if waiting:
            yield from self._right(key, right_rows()) or ()
