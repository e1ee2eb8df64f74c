"""Spark's DDL for schemas, parsed without Spark.

`DataType.fromDDL` asks the JVM; tests and workers have none. The grammar here is the part of
Spark's that a schema can use, and recorded answers of Spark hold the two together
(tests/schema/ddl_vectors.json):

* columns: ``a INT NOT NULL COMMENT 'x', `odd ``name``` array<string>``; also ``a: int``
* or a bare type, ``map<string, bigint>``, which becomes the only field, `value`

For schemas of state there is more than Spark reads: ``n int DEFAULT 0``, a literal after the type
(see `statebackend.schema.field_defaults`).

Words are case-insensitive, names are kept as written. `timestamp` is the one with local time zone
(Spark's `spark.sql.timestampType` is not looked at).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NoReturn

from pyspark.sql import types as T

from statebackend.errors import SchemaError
from statebackend.schema.ddl_tokens import Token, Unparsed, collation_name, tokens_of, unescaped

__all__ = ["DEFAULT", "parse_ddl", "parse_ddl_default", "parse_ddl_type", "quoted"]

DEFAULT: Final = "statebackend.default"
"""Under which a field's metadata has its default."""

_SIMPLE: Final[dict[str, Callable[[], T.DataType]]] = {
    "boolean": T.BooleanType,
    **dict.fromkeys(("tinyint", "byte"), T.ByteType),
    **dict.fromkeys(("smallint", "short"), T.ShortType),
    **dict.fromkeys(("int", "integer"), T.IntegerType),
    **dict.fromkeys(("bigint", "long"), T.LongType),
    **dict.fromkeys(("float", "real"), T.FloatType),
    "double": T.DoubleType,
    "binary": T.BinaryType,
    "date": T.DateType,
    "void": T.NullType,
    "variant": T.VariantType,
}
_DECIMALS: Final = ("decimal", "dec", "numeric")
_DAY_TIME: Final = ("day", "hour", "minute", "second")
_YEAR_MONTH: Final = ("year", "month")
# Far below what Python's stack allows, and above what anyone means.
_DEPTH_MAX: Final = 100
# `DATE '2026-01-31'`: the field's type says it already.
_TYPED_TEXTS: Final = ("date", "time", "timestamp", "timestamp_ntz", "timestamp_ltz", "x")


def parse_ddl(text: str, *, defaults: bool = False) -> T.StructType:
    """A table schema, or a bare type as the only field `value`.

    Args:
        text: for example ``"n BIGINT, at TIMESTAMP"`` or ``"array<int>"``.
        defaults: fields may have one, ``n INT DEFAULT 0``; it goes into their metadata.

    Raises:
        SchemaError: it does not parse; says at which position.
    """
    parsed = parse_ddl_type(text, defaults=defaults)
    if isinstance(parsed, T.StructType):
        return parsed
    return T.StructType([T.StructField("value", parsed)])


def parse_ddl_default(text: object) -> bool | int | str | None:
    """A literal as `statebackend.schema.field_defaults` keeps it; None for NULL.

    Raises:
        SchemaError: no literal.
    """
    try:
        parser = _Parser(tokens_of(str(text), values=True), defaults=True)
        literal = parser.literal()
        parser.end()
    except Unparsed as found:
        raise _error(str(text), found) from None
    return literal


def parse_ddl_type(text: str, *, defaults: bool = False) -> T.DataType:
    """What `DataType.fromDDL` gives: a `StructType` for columns, else the type itself.

    ``defaults``: as for :func:`parse_ddl`.

    Raises:
        SchemaError: it does not parse; says at which position.
    """
    if not isinstance(text, str):
        raise SchemaError(
            f"A schema was given as a {type(text).__name__}.",
            todo="Write Spark DDL, such as 'n BIGINT, at TIMESTAMP', or pass a StructType.",
        )
    try:
        tokens = tokens_of(text, values=defaults)
    except Unparsed as found:
        raise _error(text, found) from None
    furthest = Unparsed(-1, "")
    # Spark's order: `interval int` is a column, `interval day` a type.
    for reading in (_Parser.columns, _Parser.bare_type, _Parser.fields):
        parser = _Parser(tokens, defaults=defaults)
        try:
            found_type = reading(parser)
            parser.end()
            return found_type
        except Unparsed as found:
            if found.at > furthest.at:
                furthest = found
    raise _error(text, furthest)


def _error(text: str, found: Unparsed) -> SchemaError:
    rest = text[found.at : found.at + 20].split("\n")[0]
    where = f"before {rest!r}" if rest else "at its end"
    return SchemaError(
        f"The schema {text!r} does not parse at position {found.at + 1} ({where}): {found.wanted}.",
        todo="Write Spark DDL, such as 'n BIGINT, at TIMESTAMP', or pass a StructType.",
    )


class _Parser:
    """One reading of the tokens, by recursive descent."""

    def __init__(self, tokens: list[Token], *, defaults: bool = False) -> None:
        self._tokens = tokens
        self._defaults = defaults
        self._next = 0
        self._depth = 0

    # --- tokens ---

    @property
    def _token(self) -> Token:
        return self._tokens[self._next]

    def _fail(self, wanted: str) -> NoReturn:
        raise Unparsed(self._token.at, wanted)

    def _is(self, *texts: str) -> bool:
        """Whether the next token is one of these words (in lower case) or marks."""
        return self._token.kind in ("word", "mark") and self._token.text.lower() in texts

    def _take(self, text: str) -> bool:
        found = self._is(text)
        self._next += found
        return found

    def _need(self, text: str) -> None:
        if not self._take(text):
            self._fail(f"{text!r} is missing")

    def end(self) -> None:
        """Nothing may follow."""
        if self._token.kind != "end":
            self._fail("nothing more was expected, or a comma")

    def _name(self) -> str:
        token = self._token
        if token.kind == "word":
            name = token.text
        elif token.kind == "name":
            name = token.text[1:-1].replace("``", "`")
        else:
            self._fail("a name was expected (in backquotes, unless of letters, digits and _)")
        self._next += 1
        return name

    def _number(self, lowest: int, highest: int, what: str) -> int:
        token = self._token
        # The length first: Python refuses to read thousands of digits.
        if token.kind != "number" or len(token.text) > 10:
            self._fail(f"{what} was expected, a number from {lowest} to {highest}")
        number = int(token.text)
        if not lowest <= number <= highest:
            self._fail(f"{what} must be from {lowest} to {highest}")
        self._next += 1
        return number

    # --- columns ---

    def columns(self) -> T.StructType:
        """``a int, b string``."""
        return self._fields(colon=False)

    def fields(self) -> T.StructType:
        """``a: int, b string``."""
        return self._fields(colon=True)

    def _fields(self, *, colon: bool) -> T.StructType:
        if self._token.kind == "end":
            return T.StructType([])
        fields = [self._field(colon=colon)]
        while self._take(","):
            fields.append(self._field(colon=colon))
        return T.StructType(fields)

    def _field(self, *, colon: bool) -> T.StructField:
        name = self._name()
        if colon:
            self._take(":")
        dtype = self.bare_type()
        nullable = self._nullable()
        metadata: dict[str, bool | int | str] = {}
        if self._defaults and self._take("default"):
            literal = self.literal()
            if literal is not None:
                metadata[DEFAULT] = literal
            nullable = self._nullable() and nullable
        if self._is("default", "generated"):
            self._fail(f"{self._token.text.upper()} has no meaning in a schema of state")
        if self._take("comment"):
            if self._token.kind != "text":
                self._fail("the comment was expected, in quotes")
            metadata["comment"] = self._text()
        return T.StructField(name, dtype, nullable, metadata)

    def _nullable(self) -> bool:
        if not self._take("not"):
            return True
        self._need("null")
        return False

    def _text(self) -> str:
        """Literals of text; several in a row are one."""
        content = ""
        while self._token.kind == "text":
            try:
                content += unescaped(self._token.text)
            except (ValueError, OverflowError):
                self._fail("an escape here is no character of Unicode")
            self._next += 1
        return content

    def literal(self) -> bool | int | str | None:
        """A number, text, boolean or null. What is no whole number stays text."""
        if self._is(*_TYPED_TEXTS) and self._tokens[self._next + 1].kind == "text":
            self._next += 1
        token = self._token
        if token.kind == "text":
            return self._text()
        word = token.text.lower()
        if token.kind not in ("number", "value") and word not in ("true", "false", "null"):
            self._fail("a literal was expected (a number, a text in quotes, TRUE, FALSE or NULL)")
        self._next += 1
        if token.kind == "word":
            return {"true": True, "false": False, "null": None}[word]
        try:
            return int(word)
        except ValueError:  # with a point, an exponent or thousands of digits
            return word

    # --- types ---

    def bare_type(self) -> T.DataType:
        """One type."""
        token = self._token
        if token.kind != "word":
            self._fail("a type was expected")
        word = token.text.lower()
        if word in _SIMPLE:
            self._next += 1
            return _SIMPLE[word]()
        special = _SPECIAL.get(word)
        if special is None:
            self._fail(f"{token.text!r} is no type")
        if self._depth == _DEPTH_MAX:
            self._fail(f"types nested more than {_DEPTH_MAX} deep")
        self._next += 1
        self._depth += 1
        dtype = special(self)
        self._depth -= 1
        return dtype

    def _array(self) -> T.DataType:
        self._need("<")
        element = self.bare_type()
        self._need(">")
        return T.ArrayType(element)

    def _map(self) -> T.DataType:
        self._need("<")
        key = self.bare_type()
        self._need(",")
        value = self.bare_type()
        self._need(">")
        return T.MapType(key, value)

    def _struct(self) -> T.DataType:
        self._need("<")
        if self._take(">"):
            return T.StructType([])
        inner = self._fields(colon=True)
        self._need(">")
        return inner

    def _string(self) -> T.DataType:
        if not self._take("collate"):
            return T.StringType()
        at = self._token.at
        name = self._name()
        collation = collation_name(name)
        if collation is None:
            raise Unparsed(at, f"{name!r} is no collation")
        return T.StringType(collation)

    def _sized(self, make: Callable[[int], T.DataType]) -> T.DataType:
        self._need("(")
        length = self._number(0, 2**31 - 1, "a length")
        self._need(")")
        return make(length)

    def _char(self) -> T.DataType:
        return self._sized(T.CharType)

    def _varchar(self) -> T.DataType:
        return self._sized(T.VarcharType)

    def _decimal(self) -> T.DataType:
        precision, scale = 10, 0
        if self._take("("):
            precision = self._number(0, 38, "a precision")
            if self._take(","):
                scale = self._number(0, precision, "a scale")
            self._need(")")
        return T.DecimalType(precision, scale)

    def _time(self) -> T.DataType:
        precision = 6
        if self._take("("):
            precision = self._number(0, 9, "a precision")
            self._need(")")
        self._zone("without")
        return T.TimeType(precision)

    def _timestamp(self) -> T.DataType:
        self._microseconds()
        if self._zone("without"):
            return T.TimestampNTZType()
        self._zone("with", "local")
        return T.TimestampType()

    def _ntz(self) -> T.DataType:
        self._microseconds()
        return T.TimestampNTZType()

    def _ltz(self) -> T.DataType:
        self._microseconds()
        return T.TimestampType()

    def _microseconds(self) -> None:
        if self._take("("):
            self._number(6, 6, "the precision, of microseconds,")
            self._need(")")

    def _zone(self, first: str, *more: str) -> bool:
        if not self._take(first):
            return False
        for word in (*more, "time", "zone"):
            self._need(word)
        return True

    def _interval(self) -> T.DataType:
        for units, make in (
            (_DAY_TIME, T.DayTimeIntervalType),
            (_YEAR_MONTH, T.YearMonthIntervalType),
        ):
            if self._is(*units):
                start = units.index(self._token.text.lower())
                self._next += 1
                end = start
                if self._take("to"):
                    if not self._is(*units[start + 1 :]):
                        self._fail(f"a unit smaller than {units[start]!r} was expected")
                    end = units.index(self._token.text.lower())
                    self._next += 1
                return make(start, end)
        return T.CalendarIntervalType()

    def _spatial(self, make: Callable[[int | str], T.DataType]) -> T.DataType:
        self._need("(")
        if self._take("any"):
            dtype = make("ANY")
        else:
            at = self._token.at
            srid = self._number(0, 2**31 - 1, "a reference system")
            try:
                dtype = make(srid)
            except Exception:  # pyspark's own, for a system that it does not know
                raise Unparsed(at, f"{srid} is no reference system that Spark knows") from None
        self._need(")")
        return dtype

    def _geometry(self) -> T.DataType:
        return self._spatial(T.GeometryType)

    def _geography(self) -> T.DataType:
        return self._spatial(T.GeographyType)


_SPECIAL: Final[dict[str, Callable[[_Parser], T.DataType]]] = {
    "array": _Parser._array,
    "map": _Parser._map,
    "struct": _Parser._struct,
    "string": _Parser._string,
    **dict.fromkeys(("char", "character"), _Parser._char),
    "varchar": _Parser._varchar,
    **dict.fromkeys(_DECIMALS, _Parser._decimal),
    "time": _Parser._time,
    "timestamp": _Parser._timestamp,
    "timestamp_ntz": _Parser._ntz,
    "timestamp_ltz": _Parser._ltz,
    "interval": _Parser._interval,
    "geometry": _Parser._geometry,
    "geography": _Parser._geography,
}


def quoted(name: str) -> str:
    """A column name as an expression, whatever is in it."""
    return "`" + name.replace("`", "``") + "`"
