"""An operator's subtasks in one process, on stores of their own: what the tester drives.

The real :class:`StatefulEpoch`, cells, timers and time to live run over a real
:class:`RocksStore`. Only the edges are other: what comes in need not be columns, and what goes out
is kept as the processor gave it.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import pyarrow as pa
from pyspark.sql.types import StructType

from statebackend.errors import ProcessorError, StateBackendError, UsageError
from statebackend.keygroups import check_parallelism, key_group_range, subtask_of
from statebackend.operators.declared_states import Declarations, EpochTimes
from statebackend.operators.epoch_phases import StatefulEpoch
from statebackend.operators.input.group_by_key import Groups
from statebackend.operators.operator_plan import OperatorPlan
from statebackend.operators.operator_snapshot import StoredOperatorState
from statebackend.operators.per_key_loop import InputReader, KeyOperator
from statebackend.operators.processor_copies import copied
from statebackend.operators.redeclared_states import versions_of
from statebackend.rocks.store import Marker, RocksStore
from statebackend.state.table import FrozenOverlay, StateTable
from statebackend.testing.edges import Collector, ItemReader, Items
from statebackend.testing.tested_keys import KeySpace
from statebackend.testing.tested_operator_state import EpochOfTester, HeldByTester
from statebackend.testing.tested_states import StatesUnderTest

__all__ = ["UID", "OperatorUnderTest", "as_raised"]

UID: Final = "tester"
Result = TypeVar("Result")
Item = tuple[Any, Any]
"""A key as the test gave it, and what the reader would have made for it."""


class _Epoch(StatefulEpoch):
    """A real epoch with the tester's edges."""

    def outputs(
        self,
        parts: Sequence[Groups],
        initial: Sequence[Groups],
        dropped: list[int],
        rules: Iterator[Any] | None,
    ) -> list[Any]:
        """All that the processor gives in the epoch."""
        self._collector = collector = Collector()
        for _ in self.run(iter(parts), initial=iter(initial), dropped=dropped, rules=rules):
            pass
        return collector.output

    def _operator(self, reader: InputReader) -> KeyOperator:
        return KeyOperator(uid=UID, cursor=self.cursor, reader=ItemReader(), writer=self._collector)


@dataclass
class _Subtasks:
    """The open stores, by subtask, and the folder that they lie in."""

    folder: Path
    stores: list[RocksStore]
    operator: HeldByTester
    generation: int = 0

    def path(self, subtask: int) -> str:
        return str(self.folder / f"{self.generation}-{subtask}")

    def close(self) -> None:
        for store in self.stores:
            store.close()

    def remove(self) -> None:
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(frozen=True)
class _Inputs:
    """What one subtask is given in an epoch."""

    part: Groups | None
    first: Groups | None
    rules: Sequence[Any]


class OperatorUnderTest:
    """Runs a processor's epochs.

    Args:
        processor: used as it is until the first :meth:`restart` or :meth:`rescale`.
        flavour: rows, keyed, sides, broadcast or arrow.
        time_mode: none, processing or event.
        record: what states a processor asks for (see ``record_states``).
        keys: of the operator.
        check: is given the output of an epoch before the epoch counts; gives what is returned.

    Attributes:
        states: what is known of the processor's. epochs: how many were run.
        processors: by subtask.
    """

    epoch_type: type[Any] = _Epoch

    def __init__(
        self,
        processor: Any,
        *,
        flavour: str,
        time_mode: str,
        record: Callable[..., Declarations],
        keys: KeySpace,
        check: Callable[[list[Any]], list[Any]],
    ) -> None:
        self.keys, self._check = keys, check
        self._original = copied(processor, UID)
        self._time_mode, self._record = time_mode, record
        self.states = StatesUnderTest.first(self._recorded())
        self._due_drops: set[int] = set()
        self._plan = OperatorPlan(
            uid=UID,
            flavour=flavour,
            input_schema=keys.schema,
            key_positions=(),
            output_schema=StructType(),
            states=dict(self.states.declared),
            time_mode=time_mode,
            withdrawn=self.states.withdrawn,
        )
        self.processors = [processor]
        self.epochs = 0
        folder = Path(tempfile.mkdtemp(prefix="statebackend-tester-"))
        self._subtasks = _Subtasks(folder, [], HeldByTester())
        self._removed = weakref.finalize(self, self._subtasks.remove)
        self._open(1)

    # --- subtasks

    @property
    def parallelism(self) -> int:
        """How many subtasks there are."""
        return len(self.stores)

    @property
    def stores(self) -> list[RocksStore]:
        """The subtasks' stores; refused once they are closed."""
        if not self._removed.alive:
            raise UsageError("The tester is closed.", todo="Make another one.")
        return self._subtasks.stores

    def _open(self, parallelism: int) -> None:
        subtasks = self._subtasks
        subtasks.stores[:] = [RocksStore.open(subtasks.path(i)) for i in range(parallelism)]
        self._due_drops = set(range(parallelism)) if self.states.dropped else set()

    def restart(self, processor: Any = None) -> None:
        """Close the stores, open them again; processors are made anew from the pickled original.

        Args:
            processor: takes the place of the one before, with its states.

        Raises:
            StateMismatchError: it cannot go on with them.
        """
        parallelism = self.parallelism
        if processor is not None:
            self._replace(processor)
        self._subtasks.close()
        self._open(parallelism)
        self.processors = [copied(self._original, UID) for _ in range(parallelism)]

    def _recorded(self) -> Declarations:
        processor = copied(self._original, UID)
        return as_raised(lambda: self._record(processor, UID, time_mode=self._time_mode))

    def _replace(self, processor: Any) -> None:
        before, self._original = self._original, copied(processor, UID)
        try:
            self.states = self.states.followed_by(self._recorded(), UID)
        except BaseException:
            self._original = before
            raise
        states = self.states
        self._plan = replace(self._plan, states=dict(states.declared), withdrawn=states.withdrawn)

    def rescale(self, parallelism: int) -> None:
        """Split the state over other subtasks, by key group; otherwise as :meth:`restart`.

        At the same parallelism nothing is redistributed, as in a query.

        Raises:
            ParallelismError: no such parallelism, or more subtasks than key groups.
        """
        groups = self.keys.max_parallelism
        check_parallelism(parallelism, groups)
        if parallelism == self.parallelism:
            self.restart()
            return
        split: list[list[tuple[bytes, bytes]]] = [[] for _ in range(parallelism)]
        for store in self.stores:
            for key, value in store.scan():
                owner = subtask_of(int.from_bytes(key[:2], "big"), parallelism, groups)
                split[owner].append((key, value))
        self._subtasks.close()
        self._subtasks.operator.redistribute(parallelism)
        self._subtasks.generation += 1
        self._open(parallelism)
        for subtask, entries in enumerate(split):
            self.apply(subtask, [key for key, _ in entries], [value for _, value in entries])
        self.processors = [copied(self._original, UID) for _ in range(parallelism)]

    def stored(self, subtask: int) -> StoredOperatorState:
        """A subtask's states that belong to no key."""
        return self._subtasks.operator.stored(subtask)

    def close(self) -> None:
        """Close the stores and remove them; may be called twice."""
        self._removed()

    # --- epochs

    def run(
        self,
        times: EpochTimes,
        items: Sequence[Item] = (),
        *,
        initial: Sequence[Item] = (),
        everywhere: bool = False,
        rules: Sequence[Any] = (),
    ) -> list[Any]:
        """One epoch of the subtasks that have input (``everywhere``: of all of them).

        Nothing of it counts unless all of it went well. ``rules``: rows that every subtask is given
        before all others.

        Raises:
            Exception: what the processor raised, as it raised it.
            StateBackendError: a mistake that the processor made.
        """
        subtasks = len(self.stores)
        parts, firsts = self._parts(items, subtasks), self._parts(initial, subtasks)
        times = replace(times, epoch=self.epochs)
        output: list[Any] = []
        changes: list[tuple[int, FrozenOverlay]] = []
        operator = self._subtasks.operator.epoch()
        for subtask in range(subtasks):
            if everywhere or rules or subtask in parts or subtask in firsts:
                table = StateTable(self.stores[subtask])
                inputs = _Inputs(parts.get(subtask), firsts.get(subtask), rules)
                output += self._epoch(subtask, times, table, inputs, operator)
                changes.append((subtask, table.freeze(times.epoch)))
        operator.commit()
        for subtask, frozen in changes:
            self.apply(subtask, *frozen.sorted())
            self._due_drops.discard(subtask)
        self.epochs += 1
        return output

    def _epoch(
        self,
        subtask: int,
        times: EpochTimes,
        table: StateTable,
        inputs: _Inputs,
        operator: EpochOfTester,
    ) -> list[Any]:
        plan = self._planned(initial=inputs.first is not None)
        owned = key_group_range(subtask, self.parallelism, self.keys.max_parallelism)
        dropped = self.states.dropped if subtask in self._due_drops else []

        def run() -> list[Any]:
            epoch = self.epoch_type(
                plan,
                self.processors[subtask],
                table=table,
                state_ids=self.states.ids,
                times=times,
                key_groups=range(owned.start, owned.end + 1),
                versions=versions_of(self.states.declared),
                stored=operator.stored(subtask),
            )
            output: list[Any] = epoch.outputs(
                [] if inputs.part is None else [inputs.part],
                [] if inputs.first is None else [inputs.first],
                dropped,
                iter(inputs.rules) if inputs.rules else None,
            )
            operator.take(subtask, epoch.operator_snapshot())
            return output

        return self._check(as_raised(run))

    def _planned(self, *, initial: bool) -> OperatorPlan:
        schema = self.keys.schema
        return replace(
            self._plan,
            input_schema=schema,
            key_positions=tuple(range(len(schema.fields))),
            initial_schema=schema if initial else None,
        )

    def _parts(self, items: Sequence[Item], subtasks: int) -> dict[int, Groups]:
        """The input of each subtask that has some, in the order of its keys."""
        found: dict[int, list[tuple[bytes, tuple[Any, ...], Any]]] = {}
        for given, what in items:
            key, group, encoded = self.keys.place(given)
            owner = subtask_of(group, subtasks, self.keys.max_parallelism)
            found.setdefault(owner, []).append((group.to_bytes(2, "big") + encoded, key, what))
        parts = {}
        for subtask, some in found.items():
            some.sort(key=lambda item: item[0])
            parts[subtask] = Groups(
                Items([(key, what) for _, key, what in some]),
                pa.array([full for full, _, _ in some], pa.binary()),
                np.arange(len(some) + 1, dtype=np.int64),
            )
        return parts

    def apply(self, subtask: int, keys: list[bytes], values: Sequence[bytes | None]) -> None:
        """Write entries into a subtask's store, as the epoch that was run last."""
        owned = key_group_range(subtask, self.parallelism, self.keys.max_parallelism)
        marker = Marker(
            job_id=UID,
            operator=UID,
            key_group_start=owned.start,
            key_group_end=owned.end,
            epoch=self.epochs,
            chain="",
        )
        self.stores[subtask].apply(keys, values, marker)


def as_raised(call: Callable[[], Result]) -> Result:
    """``call()``; errors of the user's code come as they were raised, without ours around them."""
    try:
        return call()
    except ProcessorError as error:
        raised = error.__cause__
        if raised is None or isinstance(raised, StateBackendError):
            raise
    raise raised
