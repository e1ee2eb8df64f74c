"""The key-hash vector file: reading it, and (run as a script, by hand, once) writing it from Spark.

Each case is a DDL schema, rows in JSON and the codes that Spark's `hash(*columns)` gave them.
Floats are their bits in hex (JSON has no NaN), decimals strings, binaries hex, dates days,
timestamps and intervals microseconds, times nanoseconds, structs and arrays lists.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa

GOLDEN = Path(__file__).parent.parent / "golden"
VECTORS = GOLDEN / "key_hash_vectors.json"
# What came with the type `time`: a file that is golden is not written again.
TIME_VECTORS = GOLDEN / "key_hash_vectors_time.json"
MAX_PARALLELISMS = (1, 10, 128, 32768)


@dataclass(frozen=True)
class Case:
    """One schema's rows; `types` are the Arrow types as written in the file."""

    ddl: str
    types: list[Any]
    rows: list[list[Any]]
    codes: list[int]
    groups: dict[str, list[int]]

    def columns(self) -> list[pa.Array]:
        """The rows as Arrow columns."""
        kinds = [arrow_type(spec) for spec in self.types]
        return [
            pa.array([revive(row[i], self.types[i]) for row in self.rows], kind)
            for i, kind in enumerate(kinds)
        ]

    def table(self) -> pa.Table:
        return pa.table(self.columns(), names=[f"k{i}" for i in range(len(self.types))])


def load() -> list[Case]:
    files = (VECTORS, TIME_VECTORS)
    return [Case(**case) for file in files for case in json.loads(file.read_text())["cases"]]


def arrow_type(spec: Any) -> pa.DataType:
    """`"long"`, `"decimal(9,2)"`, `["array", spec]` or `["struct", spec, ...]` as an Arrow type."""
    if isinstance(spec, list):
        if spec[0] == "array":
            return pa.list_(arrow_type(spec[1]))
        return pa.struct([pa.field(f"f{i}", arrow_type(s)) for i, s in enumerate(spec[1:])])
    if spec.startswith("decimal"):
        precision, scale = spec[8:-1].split(",")
        return pa.decimal128(int(precision), int(scale))
    return {
        "boolean": pa.bool_(),
        "byte": pa.int8(),
        "short": pa.int16(),
        "int": pa.int32(),
        "long": pa.int64(),
        "float": pa.float32(),
        "double": pa.float64(),
        "string": pa.string(),
        "binary": pa.binary(),
        "date": pa.date32(),
        "timestamp": pa.timestamp("us", "UTC"),
        "timestamp_ntz": pa.timestamp("us"),
        "interval": pa.duration("us"),
        "time(6)": pa.time64("ns"),
        "time(0)": pa.time64("ns"),
    }[spec]


def ddl_type(spec: Any) -> str:
    if isinstance(spec, list):
        if spec[0] == "array":
            return f"array<{ddl_type(spec[1])}>"
        return "struct<" + ",".join(f"f{i}:{ddl_type(s)}" for i, s in enumerate(spec[1:])) + ">"
    return "interval day to second" if spec == "interval" else str(spec)


def revive(value: Any, spec: Any) -> Any:
    """A JSON value as what `pa.array` takes."""
    if value is None:
        return None
    if isinstance(spec, list):
        if spec[0] == "array":
            return [revive(v, spec[1]) for v in value]
        return {f"f{i}": revive(v, s) for i, (v, s) in enumerate(zip(value, spec[1:], strict=True))}
    if spec.startswith("decimal"):
        return Decimal(value)
    if spec in ("float", "double"):
        return struct.unpack(">f" if spec == "float" else ">d", bytes.fromhex(value))[0]
    return bytes.fromhex(value) if spec == "binary" else value


def _floats(code: str, *more: float) -> list[Any]:
    numbers = (0.0, -0.0, 1.0, -1.0, 0.1, float("inf"), float("-inf"), float("nan"), 1e-45, *more)
    odd = ["ffc00001", "7f800001"] if code == ">f" else ["fff8000000000001", "7ff0000000000001"]
    return [struct.pack(code, n).hex() for n in numbers] + odd + [None]


def _ints(bits: int) -> list[Any]:
    top = 1 << (bits - 1)
    return [0, 1, -1, 42, -42, top - 1, -top, None]


def _single() -> Iterator[tuple[list[Any], list[list[Any]]]]:
    texts = ["abcdefghi"[:n] for n in range(10)] + ["é", "日本語", "😀a", "Grüße, Welt", "x" * 41]
    blobs = [bytes(range(250, 250 - n, -1)).hex() for n in range(10)] + ["00" * 5, "ff" * 6]
    big = ["0", "-1", "1", "127", "128", "-128", "-129", "255", "256", "65535", "-65536"]
    big += ["9223372036854775807", "9223372036854775808", "-9223372036854775809"]
    big += ["12345678901234567890123456789012345678", "-" + "9" * 38]
    simple: dict[str, list[Any]] = {
        "boolean": [True, False, None],
        "byte": _ints(8),
        "short": _ints(16),
        "int": _ints(32),
        "long": [*_ints(64), 1 << 32, -(1 << 32)],
        "float": _floats(">f", 3.4028234663852886e38),
        "double": _floats(">d", 5e-324, 1.7976931348623157e308),
        "string": [*texts, None],
        "binary": [*blobs, None],
        "date": [0, 1, -1, 19000, -25567, -719162, 2932896, None],
        "timestamp": [0, 1, -1, 1_700_000_000_123_456, -2_208_988_800_000_001, None],
        "timestamp_ntz": [0, 1, -1, 1_700_000_000_123_456, -2_208_988_800_000_001, None],
        "interval": [0, 1, -1, 86_400_000_000, -90_061_000_001, None],
        "decimal(9,2)": ["0.00", "1.00", "-1.00", "1234567.89", "-9999999.99", None],
        "decimal(18,0)": ["0", "1", "-1", "999999999999999999", "-999999999999999999", None],
        "decimal(19,4)": ["0.0000", "-0.0001", "123456789012345.6789", None],
        "decimal(38,0)": [*big, None],
        "decimal(38,18)": ["0.000000000000000000", "-1.500000000000000000", None],
    }
    for spec, values in simple.items():
        yield [spec], [[value] for value in values]
        whole = [None, [], values, [values[0]], [None, None, values[0], None]]
        yield [["array", spec]], [[value] for value in whole]


def _cases() -> Iterator[tuple[list[Any], list[list[Any]]]]:
    yield from _single()
    yield ["long", "string"], [[1, "a"], [None, "a"], [1, None], [None, None], [-1, ""]]
    yield ["string", "long"], [["a", 1], [None, 1], ["a", None], ["", -1]]
    pairs: list[Any] = [None, [None, None], [1, None], [None, "x"], [7, "é"], [7, ""]]
    yield [["struct", "int", "string"]], [[pair] for pair in pairs]
    yield [["array", ["struct", "int", "string"]]], [[pairs], [[]], [None], [pairs[::-1]]]
    deep = ["struct", ["array", "double"], ["struct", "boolean", "date"], "decimal(20,1)"]
    zero = struct.pack(">d", -0.0).hex()
    yield (
        [deep, "byte"],
        [
            [[[zero, None], [True, -5], "12345678901234567.8"], 1],
            [[None, None, None], None],
            [[[], [None, 0], "-0.1"], -128],
            [None, 3],
        ],
    )
    yield [["array", ["array", "string"]]], [[[["a", None], None, []]], [[None]], [[]], [None]]


def _time_cases() -> Iterator[tuple[list[Any], list[list[Any]]]]:
    day = 86_400 * 10**9
    for spec, step in (("time(6)", 1000), ("time(0)", 10**9)):
        times = [0, step, 1 << 32 if step == 1000 else step * 5, day // 2, day - step, None]
        times = [None if t is None else t // step * step for t in times]
        yield [spec], [[t] for t in times]
        yield [["array", spec]], [[None], [[]], [times]]
    yield ["time(6)", "string"], [[0, "a"], [None, "a"], [1000, None]]
    yield [["struct", "time(6)", "int"]], [[None], [[5000, 1]], [[None, None]]]


def generate(path: Path, cases: Iterator[tuple[list[Any], list[list[Any]]]]) -> None:
    """Write a file. The codes are part of the format: a changed one is a broken format."""
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as F

    from statebackend.spark.frames.key_hash_expression import key_group_expression

    spark = (
        SparkSession.builder.master("local[1]")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.ui.enabled", "false")
        .getOrCreate()
    )
    lines = []
    for types, rows in cases:
        ddl = ", ".join(f"k{i} {ddl_type(spec)}" for i, spec in enumerate(types))
        case = Case(ddl, types, rows, [], {})
        # The DDL decides: without it, a timestamp without a zone would become one with.
        frame = spark.createDataFrame(case.table(), ddl)
        keys = [F.col(name) for name in frame.columns]
        groups = [key_group_expression(keys, p).alias(str(p)) for p in MAX_PARALLELISMS]
        got = frame.select(F.hash(*keys).alias("code"), *groups).collect()
        body = {
            "ddl": ddl,
            "types": types,
            "rows": rows,
            "codes": [row["code"] for row in got],
            "groups": {str(p): [row[str(p)] for row in got] for p in MAX_PARALLELISMS},
        }
        lines.append(json.dumps(body, ensure_ascii=False))
    head = f'{{"source": "Apache Spark {spark.version}, hash(*columns)", "cases": [\n'
    path.write_text(head + ",\n".join(lines) + "\n]}\n")
    spark.stop()


if __name__ == "__main__":
    generate(TIME_VECTORS, _time_cases())
