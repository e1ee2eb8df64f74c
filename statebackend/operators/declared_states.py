"""States as a processor declares them, and the cells that they become in a worker."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql.types import StructType

from statebackend.errors import (
    CorruptionError,
    SchemaError,
    StateMismatchError,
)
from statebackend.operators.errors import lost_jvm as jvm
from statebackend.operators.operator_snapshot import HeldOperatorState, StoredOperatorState
from statebackend.operators.rows.zoned_timestamps import zoned, zoned_keys
from statebackend.schema.codec import RowCodec, codec_for
from statebackend.schema.field_defaults import check_defaults
from statebackend.schema.keys.key_codec import KeyCodec
from statebackend.schema.types import schema_from_json
from statebackend.schema.versioned_rows import codec_of_versions
from statebackend.state.cells import KeyCursor, ListCell, MapCell, ValueCell
from statebackend.state.operator_state import BROADCAST, LIST_MODES
from statebackend.state.table import StateTable
from statebackend.state.timers import TimerIndex
from statebackend.state.ttl_cells import TTL, TtlListCell, TtlMapCell, TtlValueCell
from statebackend.state.unbound import Unbound

__all__ = [
    "OPERATOR_KINDS",
    "Declarations",
    "EpochState",
    "EpochTimes",
    "StateDeclaration",
    "Times",
    "Unbound",
    "check_state_name",
    "parse_schema",
    "rehearsed",
]


OPERATOR_KINDS: Final = (*LIST_MODES, BROADCAST)
"""Kinds of state that belong to no key."""

_DEFAULT: Final = re.compile(r"\bdefault\b", re.IGNORECASE)


class StateDeclaration(msgspec.Struct, frozen=True, kw_only=True):
    """A state as it was declared: its kind and schemas as JSON.

    ``kind``: value, list or map, of a key; split or union, a list of a subtask; broadcast, a map.
    ``ttl``: its entries carry the time when they expire. Times and rules of the TTL may change from
    run to run, whether there is one may not. ``earlier``: the value schemas that it had before, the
    oldest first; a row's version is its schema's place in the row of them.
    """

    name: str
    kind: str
    value_schema: str
    key_schema: str = ""
    ttl: bool | msgspec.UnsetType = msgspec.UNSET
    ttl_ms: int | msgspec.UnsetType = msgspec.UNSET
    ttl_update: str | msgspec.UnsetType = msgspec.UNSET
    ttl_expired: str | msgspec.UnsetType = msgspec.UNSET
    earlier: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET

    @classmethod
    def from_json(cls, text: str) -> StateDeclaration:
        """As a checkpoint has it.

        Raises:
            CorruptionError: it is no declaration.
        """
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise CorruptionError(
                f"The checkpoint declares a state as {text[:80]!r}: {error}.",
                todo="Restore the commit log from a copy, or start a new job.",
            ) from error

    @property
    def of_operator(self) -> bool:
        """Whether it belongs to no key."""
        return self.kind in OPERATOR_KINDS

    @property
    def versions(self) -> list[str]:
        """Its value schemas, the oldest first and the one in force last."""
        return [*(() if self.earlier is msgspec.UNSET else self.earlier), self.value_schema]

    def to_json(self) -> str:
        """As kept in the checkpoint."""
        return msgspec.json.encode(self).decode()

    def expiring(self, ttl: TTL) -> StateDeclaration:
        """The same with a TTL."""
        return msgspec.structs.replace(
            self, ttl=True, ttl_ms=ttl.ms, ttl_update=ttl.update, ttl_expired=ttl.expired
        )

    @property
    def time_to_live(self) -> TTL | None:
        """The TTL; None without one."""
        if self.ttl_ms is msgspec.UNSET:
            return None
        return TTL(self.ttl_ms, update=self.ttl_update, expired=self.ttl_expired)  # type: ignore[arg-type]


class Times(Protocol):
    """What time it is, in milliseconds."""

    @property
    def epoch(self) -> int:
        """Which epoch is running."""

    @property
    def processing_time_ms(self) -> int:
        """Of the epoch, or of now."""

    @property
    def watermark_ms(self) -> int:
        """In force: timers fire by it."""

    @property
    def late_watermark_ms(self) -> int:
        """Rows at or before it are late."""


@dataclass(frozen=True)
class EpochTimes:
    """The :class:`Times` of one epoch, the same whenever it is repeated."""

    epoch: int = 0
    processing_time_ms: int = -1
    watermark_ms: int = 0
    late_watermark_ms: int = 0


def parse_schema(schema: Any, what: str, *, defaults: bool = False) -> StructType:
    """A StructType from a StructType or a DDL string.

    Spark's own parser reads it where there is a session, else ours. ``defaults``: fields may have
    one, which Spark's parser does not know.

    Raises:
        SchemaError: it does not parse, naming ``what``.
        SparkLostError: Spark's parser is gone, with its JVM.
    """
    if isinstance(schema, StructType):
        return schema
    todo = "Give a StructType or a DDL string such as 'n bigint, name string'."
    if not isinstance(schema, str):
        raise SchemaError(f"The schema of {what} is a {type(schema).__name__}.", todo=todo)
    try:
        parsed = _parse_ddl(schema, defaults=defaults and bool(_DEFAULT.search(schema)))
    except (SchemaError, PySparkException, Py4JJavaError) as error:
        reason = str(error).strip().splitlines()[0]
        raise SchemaError(
            f"The schema of {what}, {schema!r}, does not parse ({reason}).", todo=todo
        ) from error
    return parsed if isinstance(parsed, StructType) else StructType().add("value", parsed)


def _parse_ddl(text: str, *, defaults: bool) -> Any:
    from pyspark import SparkContext
    from pyspark.sql.types import DataType

    if SparkContext._active_spark_context is not None and not defaults:
        with jvm.calls():
            return DataType.fromDDL(text)
    from statebackend.schema.ddl import parse_ddl

    return parse_ddl(text, defaults=defaults)


class Declarations:
    """Collects what a processor declares; on the driver, where mistakes can be refused.

    ``declared``: by name. ``dropped``: names that were deleted. ``withdrawn``: those of them that
    had been declared before.
    """

    def __init__(self, uid: str) -> None:
        self._uid = uid
        self.declared: dict[str, StateDeclaration] = {}
        self.dropped: list[str] = []
        self.withdrawn: set[str] = set()

    def add(
        self,
        kind: str,
        name: Any,
        value_schema: Any,
        key_schema: Any = None,
        ttl: TTL | None = None,
    ) -> None:
        """Note a state.

        Raises:
            StateMismatchError: the name is taken, or none.
            SchemaError, UnsupportedTypeError: its schemas.
        """
        check_state_name(self._uid, name)
        if name in self.declared:
            raise StateMismatchError(
                f"State {name!r} of operator {self._uid!r} is declared twice.",
                todo="Give each state a name of its own.",
            )
        value = parse_schema(
            value_schema, f"state {name!r} of operator {self._uid!r}", defaults=True
        )
        codec_for(value)  # refuses types that cannot be stored, here and not in a worker
        check_defaults(value)
        key_json = ""
        if key_schema is not None:
            key = parse_schema(key_schema, f"the map key of state {name!r}")
            KeyCodec(key, allow_all_null=True)
            key_json = key.json()
        made = StateDeclaration(
            name=name, kind=kind, value_schema=value.json(), key_schema=key_json
        )
        self.declared[name] = made if ttl is None else made.expiring(ttl)

    def drop(self, name: Any) -> None:
        """Note that a state is to be deleted; declared afterwards, it starts empty.

        Raises:
            StateMismatchError: it is no name.
        """
        if not isinstance(name, str) or not name:
            raise StateMismatchError(f"deleteIfExists was given {name!r}.", todo="Give a name.")
        if self.declared.pop(name, None) is not None:
            self.withdrawn.add(name)
        self.dropped.append(name)


def check_state_name(uid: str, name: Any) -> None:
    """Refuse what names no state.

    Raises:
        StateMismatchError: it is empty, no string, or has a byte 0 in it.
    """
    if not isinstance(name, str) or not name or "\0" in name:
        raise StateMismatchError(
            f"Operator {uid!r} has a state named {name!r}.", todo="Give it a name."
        )


def rehearsed(declared: StateDeclaration) -> Any:
    """What the driver gives out for a state that belongs to no key: an empty one."""
    held = HeldOperatorState(StoredOperatorState())
    codec = codec_for(schema_from_json(declared.value_schema))
    key_codec = _key_codec(declared.key_schema, "") if declared.key_schema else None
    schemas = declared.value_schema, declared.key_schema
    held.hold(declared.name, declared.kind, codec, key_codec, *schemas)
    return held.states[declared.name]


_CELLS: Mapping[tuple[str, bool], Any] = {
    ("value", False): ValueCell,
    ("list", False): ListCell,
    ("map", False): MapCell,
    ("value", True): TtlValueCell,
    ("list", True): TtlListCell,
    ("map", True): TtlMapCell,
}


class EpochState:
    """The state of one subtask in one epoch, from which cells are made.

    Args:
        table: holds all keys. declared, ids: the states, and their numbers in the keys.
        times: of the epoch; where they move within it, :meth:`move` says so to all who keep them.
        timers: None without a time mode.
        timezone: in which cells show timestamps; without one they do so as Spark's.
        versions: of states whose rows may be of several schemas: those (JSON), the oldest first.
        stored: the states that belong to no key, as they were stored.
    """

    def __init__(
        self,
        cursor: KeyCursor,
        table: StateTable,
        *,
        declared: Mapping[str, StateDeclaration],
        ids: Mapping[str, int],
        times: Times,
        timers: TimerIndex | None = None,
        timezone: str = "",
        versions: Mapping[str, Sequence[str]] | None = None,
        stored: StoredOperatorState | None = None,
    ) -> None:
        self.cursor, self.table = cursor, table
        self.declared, self._ids = declared, ids
        self.times, self.timers = times, timers
        self._timezone, self._versions = timezone, versions or {}
        self._claimed: set[str] = set()
        self._moving: list[Callable[[Times], None]] = []
        self.cells: dict[str, Any] = {}
        self.operator = HeldOperatorState(stored or StoredOperatorState())
        for name, one in declared.items():
            if one.of_operator:
                codecs = self._operator_codecs(one)
                self.operator.hold(name, one.kind, *codecs, one.value_schema, one.key_schema)

    def on_move(self, tell: Callable[[Times], None]) -> None:
        """Have something told of the times whenever they have moved."""
        self._moving.append(tell)

    def move(self) -> None:
        """The times have moved; between calls for keys only."""
        for tell in self._moving:
            tell(self.times)

    def claimed(self, name: str, kind: str) -> tuple[StateDeclaration, int]:
        """A declared state, for the first who asks, and its number.

        Raises:
            StateMismatchError: the driver knows no such state, or it was asked for before.
        """
        found = self.declared.get(name)
        if found is None or found.kind != kind or name not in self._ids:
            raise StateMismatchError(
                f"{kind.capitalize()} state {name!r} was asked for in the worker but not on the "
                f"driver.",
                todo="Declare the same states wherever init() or open() runs.",
            )
        if name in self._claimed:
            raise StateMismatchError(
                f"State {name!r} was asked for twice in the worker, but once on the driver.",
                todo="Ask for it once, in init() or open(), and keep what you get.",
            )
        self._claimed.add(name)
        return found, self._ids[name]

    def cell(self, name: str, kind: str, classes: Mapping[tuple[str, bool], Any] = _CELLS) -> Any:
        """The cell of a declared state; ``classes`` by (kind, with a TTL).

        Raises:
            StateMismatchError: the driver knows no such state.
        """
        found, state_id = self.claimed(name, kind)
        ttl = found.time_to_live
        make: Callable[..., Any] = classes[kind, ttl is not None]
        args: tuple[Any, ...] = (self.cursor, self.table, name, state_id)
        if found.key_schema:
            args += (_key_codec(found.key_schema, self._timezone),)
        args += (_codec(self._schemas(name), self._timezone),)
        if ttl is None:
            cell = make(*args)
        else:
            cell = make(*args, ttl=ttl, now_ms=self.times.processing_time_ms)
            self.on_move(lambda times: cell.set_now(times.processing_time_ms))
        self.cells[name] = cell
        return cell

    def operator_state(self, name: str, kind: str) -> Any:
        """A declared list of the subtask, or broadcast map.

        Raises:
            StateMismatchError: the driver knows no such state.
        """
        self.claimed(name, kind)
        return self.operator.states[name]

    def _operator_codecs(self, declared: StateDeclaration) -> tuple[Any, Any]:
        """Of rows, and of keys (None: it has none)."""
        rows = _codec(self._schemas(declared.name), self._timezone)
        if not declared.key_schema:
            return rows, None
        return rows, _key_codec(declared.key_schema, self._timezone)

    def codec(self, name: str) -> RowCodec:
        """The codec of a declared state's rows: it writes the newest version and reads all.

        Timestamps are shown as Spark's. Kept from epoch to epoch.
        """
        codec: RowCodec = _codec(self._schemas(name), "")
        return codec

    def _schemas(self, name: str) -> tuple[str, ...]:
        return tuple(self._versions.get(name, ())) or (self.declared[name].value_schema,)


@functools.lru_cache(256)
def _codec(schemas: tuple[str, ...], timezone: str) -> Any:
    parsed = [schema_from_json(schema) for schema in schemas]
    codec = codec_of_versions(parsed)  # a third of a millisecond, in every task
    return zoned(codec, parsed[-1], timezone) if timezone else codec


@functools.lru_cache(256)
def _key_codec(schema: str, timezone: str) -> Any:
    parsed = schema_from_json(schema)
    codec = KeyCodec(parsed, allow_all_null=True)  # of a map: as in Spark
    return zoned_keys(codec, parsed, timezone) if timezone else codec
