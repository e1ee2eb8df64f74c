"""The Nexmark benchmark's stream of an auction house: persons, auctions and bids.

Of every 50 events of the stream one is a person, three are auctions and 46 are bids, in this order,
and event ``n`` happens ``n / events_per_s`` after the first. A source gives the events of one kind.
Each column of each row is a hash of (seed, kind, column, number of the row) or arithmetic on it, in
whole numbers only, so the rows are the same on every machine.

Proportions, hot keys and value ranges follow https://github.com/nexmark/nexmark; the draws are
other ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql import types as T

from statebackend.continuous.sources.generated_source import Clock, GeneratedSource
from statebackend.errors import SchemaError, SettingError
from statebackend.schema.types import arrow_schema, as_schema
from statebackend.spark_forms import Duration
from statebackend.system import monotonic_s, wall_ms

__all__ = ["KINDS", "NexmarkSource"]

Numbers = NDArray[np.int64]

FIRST_MS: Final = 1_436_918_400_000  # 2015-07-15, where Nexmark begins
FIRST_PERSON: Final = 1_000
FIRST_AUCTION: Final = 1_000
FIRST_CATEGORY: Final = 10
PERSONS, AUCTIONS, BIDS = 1, 3, 46
EVENTS: Final = PERSONS + AUCTIONS + BIDS
HOT: Final = 100  # one in so many is the hot one for a while
ACTIVE_PERSONS: Final = 1_000
IN_FLIGHT_AUCTIONS: Final = 100
CHANNELS: Final = 10_000

KINDS: Final = {
    "bid": "auction BIGINT NOT NULL, bidder BIGINT NOT NULL, price BIGINT NOT NULL, "
    "channel STRING NOT NULL, url STRING NOT NULL, dateTime TIMESTAMP NOT NULL, "
    "extra STRING NOT NULL",
    "auction": "id BIGINT NOT NULL, itemName STRING NOT NULL, description STRING NOT NULL, "
    "initialBid BIGINT NOT NULL, reserve BIGINT NOT NULL, dateTime TIMESTAMP NOT NULL, "
    "expires TIMESTAMP NOT NULL, seller BIGINT NOT NULL, category BIGINT NOT NULL, "
    "extra STRING NOT NULL",
    "person": "id BIGINT NOT NULL, name STRING NOT NULL, emailAddress STRING NOT NULL, "
    "creditCard STRING NOT NULL, city STRING NOT NULL, state STRING NOT NULL, "
    "dateTime TIMESTAMP NOT NULL, extra STRING NOT NULL",
}
# Of events with this kind, in a group of EVENTS: how many, and the place of the first.
_PLACES: Final = {"person": (1, 0), "auction": (AUCTIONS, 1), "bid": (BIDS, 4)}

_STATES: Final = ("AZ", "CA", "ID", "OR", "WA", "WY")
_CITIES: Final = (
    *("Phoenix", "Los Angeles", "San Francisco", "Boise", "Portland"),
    *("Bend", "Redmond", "Seattle", "Kent", "Cheyenne"),
)
_FIRST: Final = (
    "Peter",
    "Paul",
    "Luke",
    "John",
    "Saul",
    "Vicky",
    "Kate",
    "Julie",
    "Sarah",
    "Deiter",
    "Walter",
)
_LAST: Final = (
    "Shultz",
    "Abrams",
    "Spencer",
    "White",
    "Bartels",
    "Walton",
    "Smith",
    "Jones",
    "Noris",
)
_HOT_CHANNELS: Final = ("Google", "Facebook", "Baidu", "Apple")


class NexmarkSource(GeneratedSource):
    """Persons, auctions or bids, in the columns of Nexmark.

    Sources with one ``seed``, ``events_per_s`` and ``first_ms`` belong together: a bid is for an
    auction that came before it, by a person who did.
    """

    def __init__(
        self,
        kind: str = "bid",
        *,
        rows: int | None = None,
        splits: int = 1,
        seed: int = 0,
        rows_per_s: float | None = None,
        live: bool = False,
        events_per_s: int = 10_000,
        first_ms: int = FIRST_MS,
        columns: Sequence[str] | None = None,
        watermark_delay: str | timedelta = "0 seconds",
        idle_after_s: Duration | None = None,
        clock: Clock = monotonic_s,
        clock_ms: Callable[[], int] = wall_ms,
    ) -> None:
        """Choose the events; nothing is made before they are read.

        Args:
            kind: ``bid``, ``auction`` or ``person``.
            rows: of that kind; None: without end.
            splits: as many subtasks can read at once. Each has rows of all of the time.
            rows_per_s: of that kind, all splits together, by ``clock`` from when a split is
                opened; None: as fast as they are taken.
            live: a row is given when ``clock_ms`` reaches its ``dateTime``, so that the one less
                the other is how late it is. Set ``first_ms`` to about now.
            events_per_s: events of all kinds in a second of event time.
            first_ms: when the first event happens, in milliseconds since 1970.
            columns: only these, in this order; the others cost nothing then.
            watermark_delay: how far the watermark stays behind ``dateTime``, the event time.
            idle_after_s: a split without rows for so long no longer holds the watermark back.
            clock: seconds that never go backwards.
            clock_ms: milliseconds since 1970.

        Raises:
            SettingError: no such kind, or a figure out of range.
            SchemaError: no such column.
        """
        _check(kind, events_per_s, rows_per_s if live else None)
        schema = _schema(kind, columns)
        super().__init__(
            schema,
            rows=rows,
            splits=splits,
            rows_per_s=rows_per_s,
            clock=clock,
            event_time="dateTime" if "dateTime" in schema.names else None,
            watermark_delay=watermark_delay,
            idle_after_s=idle_after_s,
        )
        self.kind = kind
        self._seed = seed
        self._live = live
        self._events_per_s = events_per_s
        self._first_us = first_ms * 1_000
        self._clock_ms = clock_ms
        self._arrow = arrow_schema(schema)

    def batch(self, numbers: Numbers) -> pa.RecordBatch:
        """The rows of these numbers, of the kind."""
        rows = _Rows(self.kind, self._seed, numbers, self._first_us, self._events_per_s)
        columns = [_COLUMNS[self.kind, name](rows) for name in self._arrow.names]
        return pa.RecordBatch.from_arrays(columns, schema=self._arrow)

    def _pace(self, index: int) -> Callable[[int], int] | None:
        if not self._live:
            return super()._pace(index)
        per_group, first = _PLACES[self.kind]

        def due(given: int) -> int:
            # Events up to now; those of the kind among them; those of the split among these.
            passed_us = self._clock_ms() * 1_000 - self._first_us
            groups, rest = divmod(passed_us * self._events_per_s // 1_000_000 + 1, EVENTS)
            of_kind = groups * per_group + min(max(rest - first, 0), per_group)
            return max(0, -((index - of_kind) // self.splits))

        return due


def _check(kind: str, events_per_s: int, rate_while_live: float | None) -> None:
    if kind not in KINDS:
        raise SettingError(f"Nexmark has no {kind!r}.", todo=f"Choose one of {', '.join(KINDS)}.")
    if events_per_s < 1 or rate_while_live is not None:
        raise SettingError(
            f"events_per_s={events_per_s}, or live=True with rows_per_s, is no pace.",
            todo="Give whole events per second, and either live=True or rows_per_s.",
        )


def _schema(kind: str, columns: Sequence[str] | None) -> T.StructType:
    schema = as_schema(KINDS[kind])
    if columns is None:
        return schema
    by_name = {field.name: field for field in schema}
    unknown = [name for name in columns if name not in by_name]
    if unknown:
        raise SchemaError(
            f"A Nexmark {kind} has no column {unknown[0]!r}.",
            todo=f"Choose from {', '.join(by_name)}.",
        )
    return T.StructType([by_name[name] for name in columns])


class _Rows:
    """Rows of one kind: their numbers, their events' numbers, and draws for them."""

    def __init__(
        self, kind: str, seed: int, numbers: Numbers, first_us: int, events_per_s: int
    ) -> None:
        self.numbers = numbers
        self._salt = _mixed_one(seed, list(KINDS).index(kind))
        self._first_us = first_us
        self._events_per_s = events_per_s
        per_group, first = _PLACES[kind]
        self.groups: Numbers = numbers // per_group if per_group > 1 else numbers
        place: Numbers = numbers - self.groups * per_group + first
        self.events = self.groups * EVENTS + place

    def draw(self, column: int, below: int | Numbers) -> Numbers:
        """A number from 0 on and below the bound, for each row."""
        salt = np.uint64(_mixed_one(self._salt, column))
        hashed = _mixed(self.numbers.astype(np.uint64) ^ salt)
        drawn: Numbers = ((hashed >> np.uint64(1)) % np.asarray(below, np.uint64)).astype(np.int64)
        return drawn

    def time_us(self) -> Numbers:
        """When the event happens, in microseconds since 1970."""
        return self.events * 1_000_000 // self._events_per_s + self._first_us

    def last_person(self) -> Numbers:
        """The number of the latest person so far."""
        return self.groups

    def last_auction(self) -> Numbers:
        """The number of the latest auction so far; of a bid, that is its group's last."""
        return self.groups * AUCTIONS + AUCTIONS - 1


_GOLDEN: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The mixer of SplitMix64; in place where it can be."""
    values = values + np.uint64(_GOLDEN)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        values ^= values >> np.uint64(shift)
        values *= np.uint64(factor)
    values ^= values >> np.uint64(31)
    return values


def _mixed_one(seed: int, salt: int) -> int:
    start = np.array([(seed * _GOLDEN + salt) & _MASK], np.uint64)
    return int(_mixed(start)[0])


# --- texts ---


@cache
def _table(name: str) -> pa.Array:
    return pa.array(_TEXTS[name]())


def _pool(count: int, shortest: int, spread: int) -> list[str]:
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz "))
    texts = []
    for i in range(count):
        draws = _mixed(np.arange(shortest + i % spread, dtype=np.uint64) + np.uint64(i << 20))
        texts.append("".join(letters[draws % np.uint64(len(letters))]))
    return texts


def _url(i: int) -> str:
    words = [
        f"{int(part):05x}"
        for part in _mixed(np.arange(3, dtype=np.uint64) + np.uint64(i * 3)) >> np.uint64(44)
    ]
    return f"https://www.nexmark.com/{'/'.join(words)}/item.htm?query=1"


_TEXTS: Final[dict[str, Callable[[], list[str]]]] = {
    "channel": lambda: [*_HOT_CHANNELS, *(f"channel-{i}" for i in range(CHANNELS))],
    "url": lambda: [
        *(_url(i) for i in range(4)),
        *(f"{_url(i + 4)}&channel_id={i}" for i in range(CHANNELS)),
    ],
    "name": lambda: [f"{first} {last}" for first in _FIRST for last in _LAST],
    "city": lambda: list(_CITIES),
    "state": lambda: list(_STATES),
    "email": lambda: _pool(1_000, 5, 8),
    "item": lambda: _pool(1_000, 10, 20),
    "description": lambda: _pool(1_000, 50, 100),
    "extra": lambda: _pool(1_024, 10, 60),
}


def _text(table: str, column: int) -> Callable[[_Rows], pa.Array]:
    def made(rows: _Rows) -> pa.Array:
        texts = _table(table)
        return texts.take(pa.array(rows.draw(column, len(texts)), pa.int64()))

    return made


def _channel(table: str) -> Callable[[_Rows], pa.Array]:
    """Half of the bids come by the four hot channels; `url` agrees with `channel`."""

    def made(rows: _Rows) -> pa.Array:
        drawn = rows.draw(5, 2 * CHANNELS)
        index = np.where(drawn < CHANNELS, drawn % len(_HOT_CHANNELS), drawn - CHANNELS + 4)
        return _table(table).take(pa.array(index, pa.int64()))

    return made


# --- numbers ---


def _long(of: Callable[[_Rows], Numbers]) -> Callable[[_Rows], pa.Array]:
    return lambda rows: pa.array(of(rows), pa.int64())


def _time(of: Callable[[_Rows], Numbers]) -> Callable[[_Rows], pa.Array]:
    return lambda rows: pa.array(of(rows), pa.int64()).cast(pa.timestamp("us", "UTC"))


def _price(rows: _Rows, column: int) -> Numbers:
    """As many prices of each number of digits, from 3 to 8."""
    drawn = rows.draw(column, 900 * 6)
    powers = np.array([1, 10, 100, 1_000, 10_000, 100_000], np.int64)
    result: Numbers = (drawn % 900 + 100) * powers[drawn // 900]
    return result


def _hot_or(rows: _Rows, column: int, ratio: int, hot: Numbers, cold: Numbers) -> Numbers:
    """The hot one, but once in ``ratio`` times."""
    return np.where(rows.draw(column, ratio) > 0, hot, cold)


def _auction(rows: _Rows) -> Numbers:
    last = rows.last_auction()
    first = np.maximum(last - IN_FLIGHT_AUCTIONS, 0)
    cold = first + rows.draw(2, last - first + 1)
    return FIRST_AUCTION + _hot_or(rows, 1, 2, last // HOT * HOT, cold)


def _person(rows: _Rows, ratio: int, offset: int) -> Numbers:
    last = rows.last_person()
    active = np.minimum(last + 1, ACTIVE_PERSONS)
    cold = last - rows.draw(4, active)
    hot = np.minimum(last // HOT * HOT + offset, last)
    return FIRST_PERSON + _hot_or(rows, 3, ratio, hot, cold)


def _reserve(rows: _Rows) -> Numbers:
    return _price(rows, 6) + _price(rows, 7)


def _expires(rows: _Rows) -> Numbers:
    return rows.time_us() + (rows.draw(8, 20_000) + 1) * 1_000


def _card(rows: _Rows) -> pa.Array:
    digits = rows.draw(9, 10**16)
    return pa.array([f"{d[:4]} {d[4:8]} {d[8:12]} {d[12:]}" for d in map("{:016d}".format, digits)])


def _email(rows: _Rows) -> pa.Array:
    users = _text("email", 10)(rows).to_pylist()
    hosts = _text("email", 11)(rows).to_pylist()
    pairs = zip(users, hosts, strict=True)
    return pa.array([f"{user}@{host}.com".replace(" ", "") for user, host in pairs])


_COLUMNS: Final[dict[tuple[str, str], Callable[[_Rows], Any]]] = {
    ("bid", "auction"): _long(_auction),
    ("bid", "bidder"): _long(lambda rows: _person(rows, 4, 1)),
    ("bid", "price"): _long(lambda rows: _price(rows, 12)),
    ("bid", "channel"): _channel("channel"),
    ("bid", "url"): _channel("url"),
    ("bid", "dateTime"): _time(_Rows.time_us),
    ("bid", "extra"): _text("extra", 13),
    ("auction", "id"): _long(lambda rows: rows.numbers + FIRST_AUCTION),
    ("auction", "itemName"): _text("item", 14),
    ("auction", "description"): _text("description", 15),
    ("auction", "initialBid"): _long(lambda rows: _price(rows, 6)),
    ("auction", "reserve"): _long(_reserve),
    ("auction", "dateTime"): _time(_Rows.time_us),
    ("auction", "expires"): _time(_expires),
    ("auction", "seller"): _long(lambda rows: _person(rows, 4, 0)),
    ("auction", "category"): _long(lambda rows: rows.draw(16, 5) + FIRST_CATEGORY),
    ("auction", "extra"): _text("extra", 17),
    ("person", "id"): _long(lambda rows: rows.numbers + FIRST_PERSON),
    ("person", "name"): _text("name", 18),
    ("person", "emailAddress"): _email,
    ("person", "creditCard"): _card,
    ("person", "city"): _text("city", 19),
    ("person", "state"): _text("state", 20),
    ("person", "dateTime"): _time(_Rows.time_us),
    ("person", "extra"): _text("extra", 21),
}
