"""Processors that the tests run. Workers get them by value (see conftest): none needs this file.

Each says in its output what it saw and what its state then was, so that every row can be checked.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import Row

from statebackend import BroadcastProcessor
from statebackend.spark.worker import worker_delegation as hosting

if TYPE_CHECKING:
    from collections.abc import Iterator


LEDGER_OUTPUT = "k string, ids array<bigint>, n bigint, total bigint"


class Ledger(StatefulProcessor):
    """Counts and sums the ids of each key; yields the ids of this call, and both afterwards."""

    def init(self, handle: Any) -> None:
        self.state = handle.getValueState("acc", "n bigint, total bigint")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        ids = [row["id"] for row in rows]
        n, total = self.state.get() or (0, 0)
        n, total = n + len(ids), total + sum(ids)
        self.state.update((n, total))
        yield Row(k=None if key[0] is None else str(key[0]), ids=ids, n=n, total=total)

    def close(self) -> None:
        pass


def once(flag: str) -> bool:
    """Whether the flag file was there; it is gone afterwards."""
    try:
        os.unlink(flag)
    except FileNotFoundError:
        return False
    return True


class FailingLedger(Ledger):
    """Raises for one key while the flag file is there, and removes it."""

    def __init__(self, flag: str, key: str) -> None:
        self.flag, self.key = flag, key

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        yield from super().handleInputRows(key, rows, timerValues)
        if key[0] == self.key and once(self.flag):
            raise RuntimeError("the user's own mistake")  # the user's line


class ParsingLedger(Ledger):
    """Makes a mistake that shows only deep in a library."""

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        json.loads("{")  # the user's call
        yield from super().handleInputRows(key, rows, timerValues)


class DyingLedger(FailingLedger):
    """Takes its whole process down instead."""

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        if key[0] == self.key and once(self.flag):
            os.kill(os.getpid(), signal.SIGKILL)
        yield from super().handleInputRows(key, rows, timerValues)


class StuckLedger(Ledger):
    """Says that it has begun, and stays in a call, while the gate file is there."""

    def __init__(self, gate: str, begun: str) -> None:
        self.gate, self.begun = gate, begun

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        yield from super().handleInputRows(key, rows, timerValues)
        for _ in range(9000):  # bounded: a worker that nobody lets go would keep its slot
            if not os.path.exists(self.gate):
                break
            open(self.begun, "w").close()
            time.sleep(0.02)


class OneStuckLedger(Ledger):
    """The first subtask that gets to a key stays in its call; the other makes a mistake."""

    def __init__(self, begun: str) -> None:
        self.begun = begun

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        with contextlib.suppress(FileExistsError):
            open(self.begun, "x").close()
            time.sleep(60)  # bounded: Spark kills the worker
        json.loads("{")
        yield from super().handleInputRows(key, rows, timerValues)


class Everything(StatefulProcessor):
    """Value, list and map state at once, with every way to take things out of them again.

    Rows are (id, op). ``add``: into all three. ``drop``: clears list and value. ``unmap``: removes
    from the map what ``id`` maps to. ``put``: the list becomes this id alone.
    """

    def init(self, handle: Any) -> None:
        self.last = handle.getValueState("last", "id bigint, text string")
        self.ids = handle.getListState("ids", "id bigint")
        keys, values = "slot string, half bigint", "n bigint, last bigint"
        self.by_op = handle.getMapState("by_op", keys, values)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        for row in rows:
            self._one(row["id"], row["op"])
        last = self.last.get()
        ids = [i for (i,) in self.ids.get()] if self.ids.exists() else []
        entries = sorted((*k, *v) for k, v in self.by_op.iterator())
        yield Row(k=key[0], text=repr((tuple(last) if last else None, ids, entries)))

    def _one(self, number: int, op: str) -> None:
        slot = (op[:1], number % 2)
        if op == "drop":
            self.last.clear()
            self.ids.clear()
        elif op == "unmap":
            self.by_op.removeKey(("a", number % 2))
        elif op == "put":
            self.ids.put([(number,)])
        else:
            self.last.update((number, f"{op}{number}"))
            self.ids.appendValue((number,))
            old = self.by_op.getValue(slot) if self.by_op.containsKey(slot) else (0, 0)
            self.by_op.updateValue(slot, (old[0] + 1, number))

    def close(self) -> None:
        pass


class Composite(StatefulProcessor):
    """Counts per key of several columns, nulls included."""

    def init(self, handle: Any) -> None:
        self.n = handle.getValueState("n", "n bigint")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        n = (self.n.get() or (0,))[0] + sum(1 for _ in rows)
        self.n.update((n,))
        yield Row(key=repr(tuple(key)), n=n)

    def close(self) -> None:
        pass


class Noisy(Ledger):
    """Keeps in its state something that differs in every evaluation."""

    def init(self, handle: Any) -> None:
        super().init(handle)
        self.noise = handle.getValueState("noise", "at bigint")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        self.noise.update((int.from_bytes(os.urandom(7), "big"),))
        yield from super().handleInputRows(key, rows, timerValues)


class Drawing(Ledger):
    """Counts with numbers that it draws anew in every evaluation."""

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        drawn = (Row(k=row["k"], id=int.from_bytes(os.urandom(6), "big")) for row in rows)
        yield from super().handleInputRows(key, drawn, timerValues)


class Overtaken(Ledger):
    """The task that comes first to a batch goes on when another one has finished the epoch.

    Args:
        folder: where tasks meet. log: of the job, with one record for each epoch.
    """

    def __init__(self, folder: str, log: str) -> None:
        self.folder, self.log = folder, log

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        records = len(os.listdir(self.log))
        try:
            os.mkdir(f"{self.folder}/{records}")
        except FileExistsError:
            pass  # the first one is there
        else:
            limit_s = time.monotonic() + 60
            while len(os.listdir(self.log)) == records:
                assert time.monotonic() < limit_s, "nobody came second"
                time.sleep(0.01)
            os.rename(f"{self.folder}/{records}", f"{self.folder}/{records}.overtaken")
        yield from super().handleInputRows(key, rows, timerValues)


class Stateless(StatefulProcessor):
    """Declares what it is told to and passes keys on: for refusals at the call and at the start."""

    def __init__(self, **states: str) -> None:
        self.states = states

    def init(self, handle: Any) -> None:
        self.cells = {n: handle.getValueState(n, schema) for n, schema in self.states.items()}

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        yield Row(k=str(key[0]), ids=[row["id"] for row in rows], n=0, total=0)

    def close(self) -> None:
        pass


class Misfit(Ledger):
    """Puts a text where its schema has a number."""

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        self.state.update(("three", 3))  # the user's misfit
        yield from ()


class Flood(Ledger):
    """While the flag file is there: far more output than anybody takes in who stops early."""

    def __init__(self, flag: str) -> None:
        self.flag = flag

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        yield from super().handleInputRows(key, rows, timerValues)
        if os.path.exists(self.flag):
            row = Row(k="flood " * 40, ids=[], n=0, total=0)
            yield from [row] * 10_000


def _is_pairs(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], tuple)


class Typed(StatefulProcessor):
    """Keeps the last row of each key, whatever its types, and yields the one before it."""

    def __init__(self, schema: str) -> None:
        self.schema = schema

    def init(self, handle: Any) -> None:
        self.last = handle.getValueState("last", self.schema)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        for row in rows:
            before = self.last.get()
            # As in Spark a row shows maps as pairs, and state takes dicts.
            self.last.update(tuple([dict(v) if _is_pairs(v) else v for v in row]))
            if before is not None:
                yield Row(*before)

    def close(self) -> None:
        pass


class Rules(BroadcastProcessor):
    """Says with each row which rules were in force."""

    def open(self, ctx: Any) -> None:
        self.rules = ctx.broadcast_state("rules", "name string", "n bigint")
        self.name = ctx.operator_list("name", "name string")
        if not len(self.name):
            self.name.add((os.urandom(8).hex(),))

    def process_broadcast(self, rows: Any, ctx: Any) -> None:
        for row in rows:
            if row.n is None:
                self.rules.remove((row.name,))
            else:
                self.rules.put((row.name,), (row.n,))

    def process(self, key: Any, rows: Any, ctx: Any) -> Iterator[tuple[Any, ...]]:
        rules = [[name, n] for (name,), (n,) in self.rules.items()]
        ((name,), *_) = self.name.get()
        for row in rows:
            yield (*key, row.id, name, json.dumps(rules))


class Diverging(Rules):
    """Comes to another state in each subtask."""

    def process_broadcast(self, rows: Any, ctx: Any) -> None:
        ((name,), *_) = self.name.get()
        self.rules.put((name,), (1,))


class KeyCounter(BroadcastProcessor):
    """Lists the keys that it has seen, and says with each row what the list was before."""

    def open(self, ctx: Any) -> None:
        self.keys = ctx.operator_list("keys", "k string")
        self.before = [k for (k,) in self.keys.get()]
        self.known = ctx.value_state("known", "yes boolean")

    def process_broadcast(self, rows: Any, ctx: Any) -> None:
        pass

    def process(self, key: Any, rows: Any, ctx: Any) -> Iterator[tuple[Any, ...]]:
        if self.known.get() is None:
            self.known.update((True,))
            self.keys.add(key)
        for row in rows:
            yield (*key, row.id, "", json.dumps(self.before))


class MovingLedger(Ledger):
    """Says in ``n`` how often a key was at another process than the time before.

    Its workers wait for each other for as long as a slow machine may need.
    """

    def init(self, handle: Any) -> None:
        self.state = handle.getValueState("at", "pid bigint, moves bigint")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        hosting._ANSWER_S, hosting._BEGIN_S, hosting._MEET_S = 30.0, 1.0, 10.0
        ids = [row["id"] for row in rows]
        pid, moves = self.state.get() or (os.getpid(), 0)
        moves += pid != os.getpid()
        self.state.update((os.getpid(), moves))
        yield Row(k=str(key[0]), ids=ids, n=moves, total=0)


class FreezingLedger(Ledger):
    """Its process stops at one key, once, and is in the file then; only SIGKILL ends it."""

    def __init__(self, key: str, file: str) -> None:
        self.key, self.file = key, file

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        if key[0] == self.key:
            try:
                with open(self.file, "x") as file:
                    file.write(str(os.getpid()))
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGSTOP)
        yield from super().handleInputRows(key, rows, timerValues)


class CarelessLedger(Ledger):
    """Has its process make files for everybody to read and write."""

    def init(self, handle: Any) -> None:
        os.umask(0)
        super().init(handle)
