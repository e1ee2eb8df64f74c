"""Processors of our own: subclass, override, hand to the backend.

The order of calls in each epoch: ``open``, ``process_broadcast`` (where there is such an input),
``on_initial`` (first epoch, if there is an initial state), ``process`` once per key with rows,
``on_timer`` once per due timer, ``close``. An executor makes the object anew from its pickled form
for each epoch: what is not in state is lost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

from pyspark.sql.types import Row

from statebackend.api.context import ProcessorContext
from statebackend.errors import UsageError

__all__ = ["BroadcastProcessor", "CoProcessor", "KeyedProcessor"]

Key = tuple[Any, ...]
Output = Iterable[tuple[Any, ...]] | None
"""Rows, positional as the output schema; from a generator, in a list or any iterable. Or none."""


class _Processor:
    """What processors of one and of two inputs share."""

    def open(self, ctx: ProcessorContext) -> None:
        """Ask ``ctx`` for states and keep them as attributes; open what cannot be pickled.

        Called in every epoch, and on the driver (on a copy) to learn which states there are:
        declare the same states wherever it runs.
        """

    def on_timer(self, key: Key, at_ms: int, ctx: ProcessorContext) -> Output:
        """Handle a timer of ``key`` that is due; gives output as ``process``.

        The timer is gone after the call.
        """
        raise UsageError(
            f"{type(self).__name__} registered a timer, but has no on_timer().",
            todo="Define on_timer(self, key, at_ms, ctx).",
        )

    def on_initial(self, key: Key, rows: Iterator[Row], ctx: ProcessorContext) -> None:
        """Take in the rows of ``key`` in the initial state; gives no output."""
        raise UsageError(
            f"There is an initial state, but {type(self).__name__} has no on_initial().",
            todo="Define on_initial(self, key, rows, ctx), or leave initial_state out.",
        )

    def close(self) -> None:
        """Let go of what `open` opened; after the epoch's last call, if none failed."""


class KeyedProcessor(_Processor, ABC):
    """A processor of one input.

    In a streaming query ``process`` is called once for each key that has rows in the batch. In a
    continuous job it is called with the rows of a key that came together.

    Example::

        class Totals(KeyedProcessor):
            def open(self, ctx):
                self.total = ctx.value_state("total", "amount bigint")

            def process(self, key, rows, ctx):
                (total,) = self.total.get() or (0,)
                total += sum(row.amount for row in rows)
                self.total.update((total,))
                yield (*key, total)
    """

    @abstractmethod
    def process(self, key: Key, rows: Iterator[Row], ctx: ProcessorContext) -> Output:
        """Handle all rows of ``key`` in this batch; called only if there are any.

        Args:
            key: the values of the key columns.
            rows: can be read once, in the order of arrival.
            ctx: times and timers.

        Returns:
            rows of the output, or None: tuples in the order of the output schema, or Rows by its
            names. It may be a generator.
        """


class CoProcessor(_Processor, ABC):
    """A processor of two inputs that share their keys and their state.

    For each key ``process_left`` comes first, then ``process_right``, each only if its input has
    rows; what ``process_left`` yields is taken before ``process_right`` is called.
    """

    @abstractmethod
    def process_left(self, key: Key, rows: Iterator[Row], ctx: ProcessorContext) -> Output:
        """Handle all rows of ``key`` in the left input, as `KeyedProcessor.process`."""

    @abstractmethod
    def process_right(self, key: Key, rows: Iterator[Row], ctx: ProcessorContext) -> Output:
        """Handle all rows of ``key`` in the right input, as `KeyedProcessor.process`."""


class BroadcastProcessor(_Processor, ABC):
    """A processor of one input with keys, and one of few rows that go to every subtask.

    Such rows are rules, settings or models.

    ``process_broadcast`` runs once in each subtask in every epoch that has such rows, before any
    other row of the epoch.

    Example::

        class Limits(BroadcastProcessor):
            def open(self, ctx):
                self.limits = ctx.broadcast_state("limits", "country string", "cents bigint")

            def process_broadcast(self, rows, ctx):
                for row in rows:
                    self.limits.put((row.country,), (row.cents,))

            def process(self, key, rows, ctx):
                for row in rows:
                    (limit,) = self.limits.get((row.country,)) or (0,)
                    if row.cents > limit:
                        yield (*key, row.cents)
    """

    @abstractmethod
    def process(self, key: Key, rows: Iterator[Row], ctx: ProcessorContext) -> Output:
        """Handle all rows of ``key`` in this batch, as `KeyedProcessor.process`."""

    @abstractmethod
    def process_broadcast(self, rows: Iterator[Row], ctx: ProcessorContext) -> None:
        """Handle all rows of the broadcast input in this batch; gives no output.

        Every subtask is given the same rows in the same order, and must come to the same broadcast
        state: go by the rows and that state alone, not by random numbers, the host or the clock
        (``ctx`` has the epoch's times, which are the same everywhere). There is no key, so keyed
        state and timers are refused.

        Args:
            rows: can be read once, in one order.
            ctx: times.
        """
